"""
What Run of sampling/run.py reads from a run folder.
"""
import os

import torch

import processes
from corpora.tokenizers import load_tokenizer
from diffusion import GaussianLatents
from data import load_stats
from runs.checkpoint import find_checkpoint, load_model
from runs.machine import pick_device, pick_dtype
from runs.stages import modes_of
from sampling.left_to_right import LeftToRight

N_STANDARD = 20                # residues that a protein is written of: the first ones of a tokenizer


def read_run(out_dir, which, device, dtype):
    """ {field of Run: its value}. ValueError where something of the folder is broken. """
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    name = find_checkpoint(out_dir, which)
    model, config, meta = load_model(out_dir, name, device=device)
    shape = model.config

    text = processes.text_process(config, shape.vocab_size)
    learned = modes_of(config['mode'])
    if shape.clusters:
        text.take_clusters(model.cluster_of.cpu())
    folder = os.path.join(out_dir, 'data')
    tokenizer, stats = load_tokenizer(folder), load_stats(folder)
    next_token = LeftToRight(shape.vocab_size, tokenizer.eos) if 'causal' in learned else None

    # the process of the latents, if there are any
    latent = None
    if stats:
        latent = GaussianLatents(stats.live.to(device), config['latent_schedule'],
                                 config['latent_target'])

    return dict(checkpoint=name, config=config, meta=meta, folder=folder, device=device,
                dtype=dtype, model=cast(model, dtype), L=shape.seq_len, streams=shape.streams,
                text=text, next_token=next_token, latent=latent, learned=learned,
                tokenizer=tokenizer, stats=stats, lengths=config.get('lengths'),
                banned=never_written(tokenizer, 'lengths' in config).to(device))


# what stays float32: clocks, and where latents come in or pass by the blocks
IN_FLOAT32 = ('text_clock', 'latent_clock', 'latent_in', 'shortcut', 'bag', 'importance')


def cast(model, dtype):
    """ The model, with the weights of its products cast once to the dtype it computes in: autocast
    would cast them at every call. """
    for name, module in model.named_modules():
        is_product = isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
        if is_product and not name.startswith(IN_FLOAT32):
            module.to(getattr(torch, dtype))
    return model


def never_written(tokenizer, has_length):
    """ Ids (n,) that no sampler writes: the residues of a protein but the 20 standard ones, and EOS
    and PAD where the length of a text is given. """
    ids = []
    if tokenizer.kind == 'esm':
        from corpora.tokenizers import RESIDUES
        ids += range(N_STANDARD, len(RESIDUES))
    if has_length:
        ids += [tokenizer.eos, tokenizer.pad]
    return torch.tensor(ids, dtype=torch.int64)
