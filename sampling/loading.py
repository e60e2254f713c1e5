"""
What run.Run reads from a run folder.
"""
import os

import torch

import processes
from corpora.tokenizers import load_tokenizer
from diffusion import GaussianLatents
from data import load_stats
from runs.checkpoint import find_checkpoint, load_model
from runs.files import short
from runs.machine import pick_device, pick_dtype
from runs.stages import modes_of
from sampling.left_to_right import LeftToRight

N_STANDARD = 20                # residues that a protein is written of: the first ones of a tokenizer


def read_run(out_dir, which, device, dtype):
    """ {field of run.Run: its value}. ValueError where something of the folder is broken. """
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    name = find_checkpoint(out_dir, which)
    model, config, meta = load_model(out_dir, name, device=device)
    shape = model.config

    # the checkpoint, config.json and data/ must be of one run
    try:
        text = processes.text_process(config, shape.vocab_size)
        learned = modes_of(config['mode'])
        check_lengths(config.get('lengths'), shape.seq_len)
    except ValueError as error:
        raise ValueError(f'{out_dir}/config.json: {error}') from None
    try:
        if shape.clusters:
            text.take_clusters(model.cluster_of.cpu())
    except ValueError as error:
        raise ValueError(f'{out_dir}/{name}: {error}') from None
    folder = os.path.join(out_dir, 'data')
    tokenizer, stats = load_tokenizer(folder), load_stats(folder)
    latent_shape = tuple(meta['latent_shape'] or (0, 0))
    if (shape.vocab_size != tokenizer.vocab_size
            or (shape.n_latents, shape.latent_dim) != latent_shape):
        raise ValueError(f'{out_dir}: data/meta.json and the checkpoint are not of one run')

    # some rows may have been causal, or all
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


def check_lengths(lengths, longest):
    """ ValueError where the quantiles in config.json are no lengths of texts. """
    if lengths is None:
        return
    is_list = isinstance(lengths, list) and lengths
    if not is_list or not all(type(n) is int and 0 <= n <= longest for n in lengths):
        raise ValueError(f'lengths={short(lengths)}, expected whole numbers of 0 to {longest}: '
                         'copy it from a backup, or train again')


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
