"""
What can be wrong with a training before its first step: knobs that do not go together, the dataset,
the device, room on the disk, the other processes. And what a run derives from its knobs and data.
Each mistake is one line, with exit code 2 for knobs and data, 4 for the machine and the others.
"""
import math
import os
import shutil
from dataclasses import fields

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from base import distributed
from base.console import progress_bar
from base.distributed import print0, rank, world
from base.machine import pick_dtype
from corpora.bag import has_bag
from data import PackedDataset, dataset_folder, lengths
from diffusion import modes_of
from model import ModelConfig
from runs import checkpoint


# ---- knobs and data

def open_data(config):
    """ Both splits of the dataset. ValueError for what is wrong with it, or with knobs that do not
    go together. """
    check_knobs(config)

    # the dataset
    streams = config['streams']
    crop = not config['predict_length']
    folder = dataset_folder(config['dataset'])
    train = PackedDataset(folder, 'train', config['seq_len'], crop)
    val = PackedDataset(folder, 'val', train.seq_len, crop)

    # a latent is that of a whole text, so with a part of it a pair would be wrong
    if 'latent' in streams and (train.cropped or val.cropped):
        raise ValueError(f'seq_len={train.seq_len} crops texts of {folder}, whose latents are of '
                         'whole ones: use seq_len=None, or --streams=text')
    if 'latent' in streams and train.latent_shape is None:
        raise ValueError(f'{folder} has no latents: prepare it with --encoder=..., '
                         'or train with --streams=text, --mode=unconditional')

    # last, as it takes longest
    check_digests(train, val)
    return train, val


def check_knobs(config):
    """ ValueError for knobs that do not go together. """
    mode, streams = config['mode'], config['streams']
    crop = not config['predict_length']
    is_masked = config['text_process'] == 'masked'

    # these exclude each other; the messages say why
    if config['parallel'] == 'fsdp' and config['optimizer'] == 'muon':
        raise ValueError('parallel=fsdp shares matrices out, and muon needs them whole: '
                         'use optimizer=adamw, or parallel=ddp')
    if crop and config['text_clock'] and 'text' in streams:
        raise ValueError('predict_length=False goes with text_clock=False: the clock is the masked '
                         'share of seq_len tokens, and here a text has fewer')
    if 'causal' in modes_of(mode) and (crop or not is_masked or 'text' not in streams):
        raise ValueError(f'mode={mode}: causal rows go with masked text whose length is learned: '
                         'not with another text_process, predict_length=False, or latents alone')
    if not is_masked and 'text' not in streams:
        raise ValueError(f'text_process={config["text_process"]}, but streams={streams} has no '
                         'text')


def check_digests(*splits):
    """ Reads every shard once, a share by each process. ValueError where one is not as noted. """
    for data in splits:
        mine = data.entries[rank()::world()]
        data.check_files(progress_bar(mine, desc='checking shards'))


def earlier_network(config):
    """ What the network of the run in out_dir, or else in init_from, has besides its blocks, and
    its latent target, {name: value}. None where there is no such run, or it cannot be read. """
    for out_dir in filter(None, (config['out_dir'], config['init_from'])):
        for folder in checkpoint.steps(out_dir):
            try:
                identity = checkpoint.read_state(folder)['identity']
            except (ValueError, FileNotFoundError):        # a broken one; it is looked at again
                continue
            c = checkpoint.config_of(identity, folder)
            return dict(
                bag=c.bag,
                shortcut=c.shortcut,
                shift=c.shift,
                parts=c.parts,
                latent_target=identity['latent_target'])


def network(config, data):
    """ The ModelConfig of a run. By the mode it decides shift, bag and shortcut, which are no
    knobs, and config['latent_target'], where that is None. Where the length of a text is not
    learned, it also fills in config['lengths'], from the data. """
    # what the modes need besides the blocks, by measurements on latents of one vector
    # and, for the bag, on pictures (docs/both_ways.md). A run that goes on, or begins with the
    # weights of another, keeps its network
    N, D = data.latent_shape or (0, 0)
    modes = modes_of(config['mode'])
    has_both = set(config['streams']) == {'text', 'latent'}
    if 'complete' in modes and not (has_both and config['spatial'] and 't2l' in modes):
        raise ValueError('mode=complete gives a part of a picture, and draws the rest: it goes '
                         'with t2l, as in t2l+complete, both streams, and --spatial=true, latents '
                         'that are a square grid')
    is_one_vector = has_both and N == 1
    bag = (has_both and has_bag((N, D), config['spatial'], data.vocab_size)
           and bool(modes & {'t2l', 'unconditional'}))
    shape = earlier_network(config) or dict(
        bag=bag,
        shortcut=is_one_vector and bool(modes & {'l2t', 'causal'}),
        shift='causal' in modes,
        parts='complete' in modes,
        latent_target='x0' if bag and is_one_vector else 'v')
    if 'complete' in modes and not shape['parts']:
        raise ValueError('mode=complete marks what is given, and the network of the run in out_dir '
                         'or init_from has no such mark: begin a new run')
    target = shape.pop('latent_target')
    config['latent_target'] = config['latent_target'] or target

    # sampling draws lengths from these: every hundredth quantile of the training lengths
    if not config['predict_length']:
        of_texts = np.minimum(lengths(data), data.seq_len)
        config['lengths'] = [int(n) for n in np.quantile(of_texts, np.linspace(0, 1, 101))]

    # the knobs that are fields of ModelConfig, and what the data say
    known = {field.name: config[field.name] for field in fields(ModelConfig)
             if field.name in config}
    known.update(
        shape,
        vocab_size=data.vocab_size,
        seq_len=data.seq_len,
        latent_dim=D,
        n_latents=N)
    if config['text_process'] != 'atat':
        known['importance'] = 'none'
    if config['text_process'] != 'hdlm':
        known['clusters'] = 0
    return ModelConfig(**known)


def share_rows(batch_size, global_batch):
    """ (micro_batch: the rows that a process reads at once, grad_accum: how many micro-batches it
    reads in a step). """
    if global_batch is None:
        return batch_size, 1

    # each process has equally many rows, as their gradients are averaged with equal weights
    rows, rest = divmod(global_batch, world())
    micro_batch = min(batch_size, rows)

    # micro-batches of one size, so that a step is a plain mean over them
    if rest or rows % micro_batch:
        raise ValueError(f'global_batch={global_batch} cannot be shared by {world()} processes '
                         f'alike, in micro-batches of batch_size={batch_size}: use other numbers')
    return micro_batch, rows // micro_batch


def scored_share(text_process):
    """ The share of a noisy text's positions that are scored, a mean over its clock. """
    # an even grid of clocks, 0 and 1 among them, and of random numbers stands for both
    t = torch.arange(101) / 100
    u = (torch.arange(100) + 0.5) / 100
    tokens = torch.zeros(101, 100, dtype=torch.int64)
    _, scored = text_process.corrupt(tokens, t, u.expand(101, 100))
    return scored.float().mean().item()


def flops_of(sketch, rows, stage, text_process):
    """ Floating-point operations of a micro-batch, forward and backward, as torch counts matrix
    products. The network of a learned importance is not among them. """
    # the head runs where a noisy text is scored, and at all of a causal one
    c, shares = sketch.config, stage.shares
    noisy = shares['unconditional'] + shares['l2t']
    texts = rows * (scored_share(text_process) * noisy + shares['causal'])

    # one micro-batch on the meta device, which computes nothing
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        tokens = latents = None
        if 'text' in c.streams:
            tokens = torch.zeros(rows, stage.seq_len, dtype=torch.int64)
        if 'latent' in c.streams:
            latents = torch.zeros(rows, c.n_latents, c.latent_dim)
        clock = torch.zeros(rows)
        positions = torch.zeros(round(texts * stage.seq_len), dtype=torch.int64)
        found = sketch.to('meta')(tokens, latents, clock, clock, positions, stage.predict)
        sum(x.sum() for x in found if x is not None).backward()
    return counter.get_total_flops()


# ---- what was found, and the machine

def count(model):
    return sum(p.numel() for p in model.parameters())


def print_finding(what, finding):
    print0(f'✓ {what:<10} {finding}')


def print_findings(config, sketch, train, val, stages, micro_batch, grad_accum):
    """ What was found, and what a whole run will take. """
    c = sketch.config
    print_finding('data', f'{train.folder}: {len(train):,} and {len(val):,} samples, vocabulary '
                          f'{c.vocab_size:,}, {c.seq_len} tokens, '
                          f'latents {c.n_latents} x {c.latent_dim}')
    print_finding('model', f'{count(sketch) / 1e6:.1f}M parameters, mode {config["mode"]}')
    last = stages[-1].seq_len                              # with an EOS
    if last < c.seq_len and config['predict_length']:
        is_cut = lengths(train) >= last
        if is_cut.any():
            print0(f'warning: {is_cut.mean():.1%} of the texts are cut to {last} tokens until the '
                   'end: let length_schedule end in `all`')

    # the steps, and their cost
    steps = config['max_iters']
    rows = micro_batch * grad_accum * world()
    flops = sum((stage.end - stage.first) * stage.flops for stage in stages)
    print_finding('batch', f'{rows:,} rows a step: {world()} processes x {grad_accum} micro-steps '
                           f'x {micro_batch} rows')
    print_finding('cost', f'{steps:,} steps, {rows * steps / len(train):,.2f} epochs, '
                          f'{flops / steps:.3g} FLOP a step, {flops:.3g} FLOP in all')


def check_machine(config, device, dtype, sketch):
    """ OSError where checkpoints do not fit, ConnectionError where the others cannot be met. """
    # the device; an emulated product takes many times as long
    name = f'{torch.get_num_threads()} threads'
    if device != 'cpu':
        name = torch.cuda.get_device_name(device)
    print_finding('device', f'{world()} x {device}, {dtype}, {name}')
    if dtype != pick_dtype('auto', device) == 'float32':
        print0(f'warning: dtype=bfloat16, but {device} has no bfloat16 instructions and '
               'emulates them: --dtype=float32 is usually faster')

    # torch.compile calls it by this name, for a CPU
    compiler = os.environ.get('CXX', 'g++')
    if device == 'cpu' and config['compile'] and not shutil.which(compiler):
        raise OSError(f'compile=true needs the C++ compiler {compiler}, which is not here: install '
                      'one, or name it in CXX, or --compile=false')

    # the disk: the checkpoints that are kept, the best, and the one being written
    folder = os.path.abspath(config['out_dir'])
    there = len(checkpoint.steps(folder))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    made = math.ceil(config['max_iters'] / config['eval_interval'])
    to_come = max(1, min(config['keep'] + 2, made) - there)
    copies = 4 if config['ema_decay'] else 3               # weights, average, two moments
    needs = to_come * count(sketch) * 4 * copies
    has = shutil.disk_usage(folder).free
    if has < needs:
        raise OSError(f'{to_come:,} checkpoints to come need {needs / 1e9:.3g} GB, {folder} has '
                      f'{has / 1e9:.3g} GB: make room, or choose another --out_dir')
    print_finding('disk', f'{needs / 1e9:.3g} GB for {to_come} checkpoints to come, '
                          f'{has / 1e9:.3g} GB free at {folder}')

    # the other processes
    distributed.join(device, config['dist_timeout'])
