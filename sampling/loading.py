"""
A run folder as sampling needs it, and what the run can do.

    run = load_run('out/quickstart')
    run.model, run.text, run.latent     the network (EMA weights), and its two processes
    run.next_token                      the process of text written from left to right, or None
    run.fills_masks                     whether it has learned to write where MASKs are
    run.tokenizer, run.stats            of its data; run.L: the longest text, in tokens
    run.lengths                         quantiles of the training texts' lengths, where the run does
                                        not learn when a text ends; else None
    run.banned                          ids that no sampler writes
    run.row_calls                       rows that the network has read: what sampling costs
"""
import os
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import processes
from corpora.tokenizers import load_tokenizer
from sampling.fasta import never_written
from diffusion import GaussianLatents, MaskedText
from encoders import check_texts, load_encoder
from runs.checkpoint import find_checkpoint, load_model
from data import load_stats
from runs.files import short
from runs.machine import pick_device, pick_dtype
from runs.stages import modes_of
from sampling.left_to_right import LeftToRight


def load_run(out_dir, which='best', device='auto', dtype='auto', encoder_folder=''):
    """ Everything sampling needs from a run folder: model (EMA weights), tokenizer, stats,
    processes, encoder record. ValueError where something of it is broken. """
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

    return SimpleNamespace(
        out_dir=out_dir, checkpoint=name, config=config, meta=meta, folder=folder, device=device,
        dtype=dtype, model=cast(model, dtype), L=shape.seq_len, streams=shape.streams,
        row_calls=0,                           # rows the network has read: what sampling costs
        text=text, next_token=next_token,
        fills_masks=bool(learned & {'l2t', 'unconditional'}),
        latent=latent, tokenizer=tokenizer, stats=stats,
        lengths=config.get('lengths'),         # quantiles, where it does not learn when a text ends
        banned=never_written(tokenizer, 'lengths' in config).to(device),
        encoder_folder=encoder_folder, encoder=None)


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


def encoder_of(run):
    """ The encoder that made the run's data; ValueError where there is none, or it has changed. """
    # once: its weights are read, and their digest is compared
    if run.encoder is None:
        record = run.meta['encoder']
        if record is None:
            raise ValueError(f'{run.out_dir}: its latents were given without their encoder, so no '
                             'text can be embedded')
        folder = run.folder if record['id'] == 'lsa' else run.encoder_folder or None
        run.encoder = load_encoder(record, folder=folder, device=run.device)
    return run.encoder


def encode(run, texts):
    """ Raw latents (n, N, D) float32 of a list of texts, by the encoder that made the run's
    data. """
    check_texts(texts)
    return torch.as_tensor(encoder_of(run)(texts))


def raw_latents(run, z):
    """ Standardised latents as the encoder would give them. Its outputs may lie on the sphere;
    latents that were given without an encoder are taken as they are. """
    raw = run.stats.destandardise(z)
    is_normalized = (run.meta['encoder'] or {}).get('normalize')
    return F.normalize(raw, dim=-1) if is_normalized else raw

# -----------------------------------------------------------------------------
# What a run can do

def trained_for(run):
    """ The modes that the run's losses cover. """
    return modes_of(run.config['mode'])


@dataclass
class Needs:
    """ What a run must have for a direction of sampling/, or for a task in tasks/. """
    streams: tuple = ()
    modes: tuple = ()              # of each tuple in it, the run was trained for one mode or more
    masked_text: bool = False      # its text process is MaskedText

    def missing(self, run):
        """ What the run lacks, as the rest of a sentence that begins with its name, or ''. """
        learned = trained_for(run)
        has_modes = all(learned & set(some) for some in self.modes)
        if not set(self.streams) <= set(run.streams) or not has_modes:
            return f'has streams {run.streams} and was trained for {", ".join(sorted(learned))}'
        if self.masked_text and not isinstance(run.text, MaskedText):
            return 'was not trained on masked text'
        return ''
