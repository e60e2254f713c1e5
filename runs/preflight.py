"""
Everything that can be wrong with a training: knobs that do not go together, the dataset, the
device, room on the disk, the other processes. And what follows from the knobs and the data: opened
splits, sizes, processes, stages. The network is built later, in train.py.
"""
import math
import os
import shutil
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import torch

import processes
from configurator import show_knobs, stop, stop_on_error
from data import PackedDataset
from diffusion import GaussianLatents
from model import Model, ModelConfig
from processes.autoregressive import causal_budget
from runs import checkpoint, distributed, meeting, run_folder, threads
from runs.distributed import rank, world
from runs.files import read_json
from runs.log import in_units
from runs.manifest import dataset_folder, how_to_prepare
from runs.stages import modes_of, read_stages

MODEL_KNOBS = ('latent_tokens', 'depth', 'heads', 'width', 'latent_width', 'streams',
               'text_clock', 'spatial', 'dropout')


def plan(config):
    """ A namespace of what a training needs, from its knobs {name: value}. Stops with one line and
    exit code 2 for what is wrong with knobs or data, 4 for the machine and the other processes. """
    # the knobs alone, then the dataset's folder
    k = SimpleNamespace(**config)
    check_knobs(k)
    folder = dataset_folder(k.dataset)
    if not os.path.exists(os.path.join(folder, 'meta.json')):
        configs = [arg for arg in sys.argv[1:] if arg.endswith('.py')]
        stop(f'no dataset in {folder} (no meta.json): {how_to_prepare(folder, configs)}')

    # what follows from knobs and data
    with stop_on_error():
        run = SimpleNamespace(folder=folder, device=pick_device(k.device))
        run.dtype = checkpoint.pick_dtype(k.dtype, run.device)
        open_data(run, k)
        choose_processes(run, k, config)
        share_rows(run, k)
        choose_stages(run, k)
        sketch_model(run, k, config)

    if not k.predict_length:
        # sampling draws lengths from these: every hundredth quantile of the training lengths
        lengths = np.minimum(run.train_data.lengths(), run.train_data.seq_len)
        config['lengths'] = [int(n) for n in np.quantile(lengths, np.linspace(0, 1, 101))]

    # the streams that any stage predicts, and the modes that have a share in any stage
    run.predict = tuple(s for s in k.streams if any(s in stage.predict for stage in run.stages))
    run.modes = {name for stage in run.stages for name, share in stage.shares.items() if share}

    # nothing is printed before all of that is right
    show_knobs(config)
    say_what_was_found(run, k, config)
    with stop_on_error(code=4):
        check_machine(run, k)
    return run


def agree_on_dtype(run, config):
    """ Every process computes in the same numbers, also where the machines are unlike. """
    dtypes = distributed.all_gather_object(run.dtype)
    if len(set(dtypes)) > 1:
        run.dtype = 'float32'
        if rank == 0:
            print(f'dtype: {dtypes.count("bfloat16")} of {world} processes have bfloat16 '
                  'instructions, so all compute in float32', flush=True)
    config['dtype'] = run.dtype


def check_knobs(k):
    """ What does not go together, whatever the data. """
    if k.parallel == 'fsdp' and k.optimizer == 'muon':
        stop('parallel=fsdp shares matrices out, and muon needs them whole: '
             'use optimizer=adamw, or parallel=ddp')
    if k.freeze == 'modality' and k.mode not in ('l2t', 't2l'):
        stop(f'freeze=modality fine-tunes one direction, l2t or t2l, not mode={k.mode}')
    if k.wandb_project and not find_spec('wandb'):
        stop('wandb_project is set, and wandb is not installed: pip install wandb')
    if k.resume == 'never' and os.path.isdir(k.out_dir) and set(os.listdir(k.out_dir)) - {'lock'}:
        stop(f'{k.out_dir} is not empty and resume=never: choose another --out_dir')


def pick_device(device):
    """ One GPU per process. """
    n_gpus = torch.cuda.device_count()
    if device == 'auto' and torch.cuda.is_available() or device == 'cuda':
        # with --gpus-per-task=1, srun shows each process only its own GPU, as cuda:0
        number = distributed.local_rank
        if n_gpus == 1 and distributed.by_srun:
            number = 0
        if 0 < n_gpus <= number:
            stop(f'rank {rank}: cuda:{number} is asked for, '
                 f'this machine has {n_gpus}; fewer --nproc_per_node', code=4)
        if n_gpus:                                         # none: checkpoint.pick_device says so
            device = f'cuda:{number}'
    return checkpoint.pick_device(device)


def open_data(run, k):
    """ Both splits of the dataset, and the sizes of the network. """
    crop = not k.predict_length
    run.train_data = PackedDataset(run.folder, 'train', k.seq_len, crop)
    run.val_data = PackedDataset(run.folder, 'val', run.train_data.seq_len, crop)

    if not k.predict_length and k.text_clock and 'text' in k.streams:
        raise ValueError('predict_length=False goes with text_clock=False: the clock is the masked '
                         'share of seq_len tokens, and here a text has fewer')
    is_cropped = run.train_data.cropped or run.val_data.cropped
    if is_cropped and 'latent' in k.streams:
        raise ValueError(f'seq_len={k.seq_len} crops texts of {run.folder}, whose latents are of '
                         'whole ones: use seq_len=None, or --streams=text')
    if run.train_data.latent_shape is None and 'latent' in k.streams:
        raise ValueError(f'{run.folder} has no latents: prepare it with --encoder=..., '
                         'or train with --streams=text, --mode=unconditional')


def earlier_network(k):
    """ What the run in out_dir, or else in init_from, has beside its blocks, {field of ModelConfig:
    whether}, and its latent target. None where there is no such run, or it cannot be read. """
    for folder in (k.out_dir, k.init_from):
        if folder and (found := checkpoint.steps(folder)):
            try:
                shape = read_json(found[0] / 'training_state.json')['model_config']
                target = run_folder.read_config(folder)['latent_target']
                return {name: shape[name] for name in ('bag', 'shortcut', 'shift')}, target
            except (ValueError, KeyError):                 # the checkpoint will be looked at again
                return None


def choose_processes(run, k, config):
    """ The network's sizes, the text process, the latent process, and ATAT where tokens have an
    importance. """
    data = run.train_data
    N, D = data.latent_shape or (0, 0)
    V = data.tokenizer.vocab_size

    # what the modes need beside the blocks, by measurements on latents of one vector
    # (docs/both_ways.md). A run that goes on, or begins with the weights of another, keeps its
    # network
    modes = modes_of(k.mode)
    is_one_vector = set(k.streams) == {'text', 'latent'} and N == 1
    bag = is_one_vector and bool(modes & {'t2l', 'unconditional'})
    shape = dict(bag=bag, shortcut=is_one_vector and bool(modes & {'l2t', 'causal'}),
                 shift='causal' in modes)
    target = 'x0' if bag else 'v'
    if earlier := earlier_network(k):
        shape, target = earlier
    if k.latent_target is None:
        config['latent_target'] = k.latent_target = target

    knobs = {name: config[name] for name in MODEL_KNOBS}
    run.model_config = ModelConfig(vocab_size=V, seq_len=data.seq_len, latent_dim=D, n_latents=N,
                                   extra_ids=processes.extra_ids(config), **shape, **knobs)

    run.text = processes.text_process(config, V)
    if k.text_process != 'masked' and 'text' not in k.streams:
        raise ValueError(f'text_process={k.text_process}, but streams={k.streams} has no text')
    live = data.live.to(run.device) if N else None
    run.latent = GaussianLatents(live, k.latent_schedule, k.latent_target, k.latent_loss_weight)
    run.adaptive = processes.adaptive_masking(config, data)


def share_rows(run, k):
    """ How many rows of a step a process reads at once. """
    run.micro_batch, run.grad_accum = k.batch_size, k.grad_accum
    if k.global_batch is not None:
        if k.grad_accum != 1:
            raise ValueError(f'global_batch={k.global_batch} and grad_accum={k.grad_accum}: '
                             'grad_accum follows from global_batch, leave it at 1')
        rows, rest = divmod(k.global_batch, world)
        if rest:
            raise ValueError(f'global_batch={k.global_batch} cannot be shared by {world} processes '
                             'alike: use another number of processes, or another --global_batch')
        run.micro_batch = min(k.batch_size, rows)
        run.grad_accum, rest = divmod(rows, run.micro_batch)
        if rest:
            fits = max(n for n in range(1, run.micro_batch) if rows % n == 0)
            raise ValueError(f'global_batch={k.global_batch} gives each of {world} processes '
                             f'{rows} rows, no multiple of batch_size={k.batch_size}: use '
                             f'--batch_size={fits}, or another --global_batch')
    run.global_batch = run.micro_batch * run.grad_accum * world


def choose_stages(run, k):
    """ Stretches of the run with one mode and one text length. """
    # importance changes how much is masked, and so on how many positions the head runs
    more = run.adaptive.share(run.text, k.t_min) if run.adaptive else 1
    rows = run.micro_batch

    def head_budget(masked_rows, causal_share, length):
        positions = 0
        if masked_rows:
            positions = run.text.head_budget(rows, length, masked_rows * more, k.t_min)
        if causal_share:
            positions += causal_budget(lengths, rows, length, causal_share)
        return min(positions, rows * length)

    lengths = run.train_data.lengths()
    run.stages = read_stages(k.mode, k.length_schedule, k.streams, k.max_iters,
                             run.model_config.seq_len, head_budget)
    if any(stage.shares['causal'] for stage in run.stages):
        is_masked = k.text_process == 'masked' and 'text' in k.streams
        if not is_masked or run.adaptive or not k.predict_length:
            raise ValueError(f'mode={k.mode}: causal rows go with masked text whose length is '
                             'learned: not with another text_process, an importance, '
                             'predict_length=False, or latents alone')

    # latents are learned beside whole texts only: the share of these
    for stage in run.stages:
        stage.whole_texts = 1.0
        is_cut = stage.seq_len < run.model_config.seq_len and 'text' in k.streams
        if is_cut and 'latent' in stage.predict:
            stage.whole_texts = float((run.train_data.lengths() < stage.seq_len).mean())
        if not stage.whole_texts:
            raise ValueError(f'length_schedule={k.length_schedule}: no text ends within '
                             f'{stage.seq_len} tokens, and beside a text that is cut no latent is '
                             f'learned: let mode={stage.mode} read more tokens')


def sketch_model(run, k, config):
    """ The size of the network, from one that takes no memory. """
    with torch.device('meta'):
        sketch = processes.add_modules(Model(run.model_config), config)
    checkpoint.check_table_sizes(sketch, run.folder)
    run.n_parameters = sum(p.numel() for p in sketch.parameters())
    run.is_sharded = k.parallel == 'fsdp' and world > 1


# ---- what is said

def report_check(what, finding):
    if rank == 0:
        print(f'✓ {what:<10} {finding}', flush=True)


def say_what_was_found(run, k, config):
    c, data = run.model_config, run.train_data
    report_check('config', f'{len(config)} knobs, mode {k.mode}')
    report_check('data', f'{run.folder}: {len(data):,} and {len(run.val_data):,} samples, '
                         'every file of the size in meta.json')
    report_check('shapes', f'vocabulary {c.vocab_size:,}, {c.seq_len} tokens, '
                           f'latents {c.n_latents} x {c.latent_dim}')
    report_check('model', f'{run.n_parameters / 1e6:.1f}M parameters')
    for stage in run.stages:
        if stage.whole_texts < 1:
            report_check('latents', f'are learned beside {100 * stage.whole_texts:.0f} % of the '
                                    f'texts, those that end within {stage.seq_len} tokens, from '
                                    f'step {stage.first:,}')
    if k.global_batch is not None:
        report_check('batch', f'{run.global_batch:,} rows a step: {world} processes x '
                              f'{run.grad_accum} micro-steps x {run.micro_batch} rows')

    # an emulated product takes many times as long
    fast = checkpoint.pick_dtype('auto', run.device)
    if rank == 0 and run.dtype == 'bfloat16' and fast == 'float32':
        print(f'warning: dtype=bfloat16, but {run.device} has no bfloat16 instructions and '
              'emulates them: --dtype=float32 is usually faster', flush=True)

    is_new = not checkpoint.steps(k.out_dir)
    if rank == 0 and 'text' in k.streams and is_new:
        warn_of_padding(run)


def warn_of_padding(run):
    """ A line if most of a batch is PAD: the network computes it all the same. """
    seq_len = max(stage.seq_len for stage in run.stages)
    lengths = run.train_data.lengths()
    share = 1 - np.minimum(lengths + 1, seq_len).mean() / seq_len        # a text and its EOS
    if share > 0.5:
        longest = max(run.train_data.longest, run.val_data.longest)
        shorter = f'--seq_len={longest + 1} holds the longest, or ' if longest + 1 < seq_len else ''
        print(f'warning: {100 * share:.0f} % of a batch is PAD: texts have {lengths.mean():.1f} '
              f'tokens on average, seq_len is {seq_len}; {shorter}prepare with a smaller '
              '--max_tokens, which cuts the long ones', flush=True)


def checkpoints_to_come(k):
    """ How many more checkpoints the disk must hold: those kept, the best, and the one being
    written. A short run makes fewer. """
    # the run saves at each interval and at its end; a step of both intervals counts once
    steps = k.max_iters - 1
    at_both = steps // math.lcm(k.save_interval, k.eval_interval)
    made = steps // k.save_interval + steps // k.eval_interval - at_both + 1
    return max(1, min(k.keep + 2, made) - len(checkpoint.steps(k.out_dir)))


def check_machine(run, k):
    """ OSError where the checkpoints do not fit, ConnectionError where the others cannot be met.
    """
    # the device
    device = torch.device(run.device)
    if device.type == 'cuda':
        report_check('device', f'{run.device}, {torch.cuda.get_device_name(device)}, '
                               f'{torch.cuda.device_count()} here')
    else:
        how = ''
        if threads.wait_asleep:
            how = ', which sleep while they wait: others use the cores too'
        report_check('device', f'{run.device}, {torch.get_num_threads()} threads{how}')

    # the disk that out_dir will be on
    place = os.path.abspath(k.out_dir)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    to_come = checkpoints_to_come(k)
    copies = 4 if k.ema_decay else 3                       # weights, average, two moments
    needs = to_come * run.n_parameters * 4 * copies
    has = shutil.disk_usage(place).free
    if has < needs:
        raise OSError(f'{to_come:,} checkpoints to come need {in_units(needs, "B")}, {place} has '
                      f'{in_units(has, "B")}: make room, or choose another --out_dir')
    report_check('disk', f'{in_units(needs, "B")} for {to_come} checkpoints to come, '
                         f'{in_units(has, "B")} free at {place}')

    # the other processes, and the libraries
    waits = ''
    if world > 1 and not k.preflight_only:
        waits = f'; waits up to {k.dist_timeout:g} s for the others'
    report_check('processes', meeting.reach_master(k.master_timeout) + waits)
    nccl = ''
    if torch.cuda.is_available():
        nccl = f', NCCL {".".join(map(str, torch.cuda.nccl.version()))}'
    report_check('versions', f'torch {torch.__version__}{nccl}')
