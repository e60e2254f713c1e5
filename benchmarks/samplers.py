"""
Milliseconds a text, the most probable token each time: from left to right and by unmasking, against
transformers' GPT-2 of the same depth and width, which has a cache of keys and values too.

The networks are untrained: only the time matters here, and evaluate.py measures the texts.
"""
import time
from functools import partial

import torch

from base.machine import pick_device, pick_dtype
from benchmarks import peers
from benchmarks.trainings import compare
from diffusion import GaussianLatents, MaskedText
from sampling.denoise import Denoiser
from sampling.knobs import SamplingKnobs
from sampling.texts import blank, write


def untrained(shape, device, dtype):
    """ A network that never writes EOS, so every text has all its tokens. """
    V = shape['vocab_size']

    # a new head is 0, so all tokens would be equally likely: with a random one they differ
    model = peers.our_network(shape).to(device).eval()
    model.text_head.weight.data.normal_(std=shape['width'] ** -.5)
    latent = GaussianLatents(torch.ones(shape['latent_dim'], device=device))

    # EOS and PAD are banned, so no text ends early
    return Denoiser(model, MaskedText(V), latent, eos=0, pad=V - 1, learned={'l2t', 'causal'},
                    banned=[0, V - 1], dtype=dtype)


def run(knobs):
    shape = peers.SHAPES[knobs.shape]
    device = pick_device(knobs.device)
    dtype = pick_dtype(knobs.dtype, device)
    L = shape['length']
    ours = untrained(shape, device, dtype)
    gpt = peers.gpt_network(shape).to(device, getattr(torch, dtype)).eval()

    # each side writes n texts at a time
    def write_ours(n, **how):
        z = torch.randn(n, shape['n_latents'], shape['latent_dim'])
        settings = SamplingKnobs(**how)
        tokens, known_mask = blank(ours, n, settings)
        write(ours, tokens, known_mask, z, settings)

    @torch.inference_mode()
    def write_gpt(n):
        # GPT-2 may not end early, either
        start = torch.zeros(n, 1, dtype=torch.int64, device=device)
        gpt.generate(start, max_new_tokens=L, min_new_tokens=L, do_sample=False, pad_token_id=1)

    def texts_per_s(write_texts, n, **how):
        began = time.perf_counter()
        write_texts(n, **how)
        return n / (time.perf_counter() - began)

    print(f'{knobs.shape}: {L} tokens a text, {dtype}, {torch.get_num_threads()} threads, {device}')
    for n in map(int, knobs.batch_sizes.split(',')):
        # confidence gets as many steps as a text has tokens: one token a call, as from left to
        # right
        medians = compare({
            f'GPT-2, batch {n}': partial(texts_per_s, write_gpt, n),
            f'left to right, batch {n}': partial(texts_per_s, write_ours, n,
                                                 sampler='autoregressive'),
            f'confidence, batch {n}': partial(texts_per_s, write_ours, n, sampler='confidence',
                                              steps=L),
        }, 'texts/s', knobs.rounds)
        for side, speed in medians.items():
            print(f'{side:<40} {1000 / speed:>9.1f} ms a text')
        print()
