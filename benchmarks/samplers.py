"""
Seconds a text of every sampler, beside an autoregressive decoder of the same depth and width with
its cache of keys and values (transformers' GPT-2). Both networks are untrained: only the time
matters here. The quality of texts is evaluate.py's to measure.
"""
import time
from types import SimpleNamespace

import torch

from benchmarks import peers
from benchmarks.trainings import compare
from diffusion import GaussianLatents, MaskedText
from runs.checkpoint import pick_device, pick_dtype
from samplers import SAMPLERS
from sampling.writing import blank, write


def untrained_run(shape, device, autocast):
    """ What sampling.loading.load_run would return of a run of this shape. """
    model = peers.ours(shape, None)[0].to(device).eval()
    model.text_head.weight.data.normal_(std=shape['width'] ** -.5)
    latent = GaussianLatents(torch.ones(shape['latent_dim'], device=device))
    return SimpleNamespace(
        model=model, device=device, text=MaskedText(shape['vocab_size']), latent=latent,
        next_token=None, fills_masks=True,
        streams=model.config.streams, L=shape['length'], row_calls=0, autocast=autocast,
        out_dir='', lengths=None, banned=[], tokenizer=SimpleNamespace(eos=0, pad=1))


def untrained_gpt(shape, device):
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(vocab_size=shape['vocab_size'], n_positions=shape['length'] + 1,
                        n_embd=shape['width'], n_layer=shape['depth'], n_head=shape['heads'])
    return GPT2LMHeadModel(config).to(device).eval()


def run(knobs):
    shape = peers.SHAPES[knobs.shape]
    device = pick_device(knobs.device)
    dtype = pick_dtype(knobs.dtype, device)
    L = shape['length']

    def autocast():
        return torch.autocast(torch.device(device).type, torch.bfloat16,
                              enabled=dtype == 'bfloat16')

    ours = untrained_run(shape, device, autocast)
    gpt = untrained_gpt(shape, device)
    calls = {}                                             # {side: network calls a text}

    def ours_side(side, n, sampler, steps):
        """ Texts per second of a sampler, n at a time. """
        def measure():
            ours.row_calls = 0
            began = time.perf_counter()
            z = torch.randn(n, shape['n_latents'], shape['latent_dim'])
            write(ours, *blank(ours, n), z, sampler=sampler, steps=steps)
            calls[side] = ours.row_calls / n
            return n / (time.perf_counter() - began)
        return measure

    def gpt_side(n):
        """ Texts per second of the autoregressive decoder, n at a time. """
        @torch.inference_mode()
        def measure():
            began = time.perf_counter()
            start = torch.zeros(n, 1, dtype=torch.int64, device=device)
            with autocast():
                gpt.generate(start, max_new_tokens=L, min_new_tokens=L, do_sample=True,
                             pad_token_id=1)
            return n / (time.perf_counter() - began)
        return measure

    for n in (1, knobs.batch_size):
        sides = {f'autoregressive, batch {n}': gpt_side(n)}
        for sampler in SAMPLERS:
            for steps in (L, L // 8):
                side = f'{sampler}, {steps} steps, batch {n}'
                sides[side] = ours_side(side, n, sampler, steps)
        medians = compare(sides, 'texts/s', knobs.rounds)
        for side, texts_per_s in medians.items():
            print(f'{side:<40} {1000 / texts_per_s:>9.1f} ms a text, '
                  f'{calls.get(side, L):>6.1f} network calls')
        print()
