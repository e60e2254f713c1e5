"""
Whether everything works on this device, at a tiny size: each check of bench.py --what=gpu returns
{row: {field: value}}, or raises with one line that says what is wrong.
"""
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.watched import (ROOT, Brief, Interrupted, Skipped, check_waits, log_entries,
                                run_script, train)
from runs.files import read_json

SMALL = ['config/quickstart.py', '--depth=2', '--width=64', '--heads=2', '--batch_size=8',
         '--latent_tokens=2', '--warmup_iters=2', '--eval_iters=1', '--dropout=0']

# {option set: arguments of train.py}
OPTIONS = {
    'muon': ['--mode=l2t'],
    'adamw': ['--mode=l2t', '--optimizer=adamw'],
    'l2t+causal': [],
    'mixed': ['config/mixed.py'],
    't2l': ['config/t2l.py'],
    'unconditional': ['config/unconditional.py'],
    'importance': ['config/atat.py'],
    'gidd': ['config/gidd.py'],
    'hdlm': ['config/hdlm.py'],
    'ar': ['config/ar.py'],
    'ar_prefix': ['config/ar_prefix.py'],
}

# -----------------------------------------------------------------------------
# A dataset and a run to work on

def prepare_data(folder):
    """ A small dataset by prepare.py, with latents: sentences of a grammar. """
    generator = random.Random(0)
    words = [['red', 'blue', 'small', 'old'], ['man', 'woman', 'child', 'dog', 'cat'],
             ['runs', 'sits', 'eats', 'jumps', 'sleeps'], ['street', 'house', 'park', 'river']]
    lines = set()
    for _ in range(600):
        color, who, does, where = map(generator.choice, words)
        lines.add(f'a {color} {who} {does} near the {where} number {generator.randrange(40)}')
    texts = folder / 'lines.txt'
    texts.write_text('\n'.join(sorted(lines)))
    run_script('prepare.py', [f'--input={texts}', f'--out={folder}/data', '--encoder=lsa',
                              '--encoder_dims=16', '--vocab_size=300', '--max_tokens=31',
                              '--val_fraction=.1'])
    return {'prepare.py': dict(texts=len(lines))}


def arguments_of(folder, out, device, max_iters, *more):
    """ The command line of a tiny training. """
    return [*SMALL, f'--dataset={folder}/data', f'--out_dir={folder}/{out}', f'--device={device}',
            f'--max_iters={max_iters}', '--log_interval=1', *more]


def train_run(folder, device):
    """ A short run of four modes, for sampling and evaluation. """
    train(arguments_of(folder, 'run', device, 20, 'config/mixed.py'))
    return {'train.py': dict(loss=log_entries(folder / 'run')[-1]['loss'])}

# -----------------------------------------------------------------------------
# Losses, waits

def compare_losses(folder, name, device):
    """ Three steps in float32 on the device and on the CPU. """
    # train.py allows TF32 on a GPU, whose rounding would hide an error
    torch.set_float32_matmul_precision = lambda precision: None
    losses = []
    for where in ('cpu', device):
        out = f'losses-{name}-{where.replace(":", "")}{len(losses)}'
        train(arguments_of(folder, out, where, 3, '--dtype=float32', *OPTIONS[name]), Brief)
        losses.append([entry['loss'] for entry in log_entries(folder / out)])

    difference = max(abs(b / a - 1) for a, b in zip(*losses))
    if len(losses[1]) != 3 or not difference <= 1e-3:
        raise RuntimeError(f'losses {losses[0]} on the CPU, {losses[1]} on {device}')
    return {name: {'loss': losses[1][-1], 'largest difference': difference}}


def run_options(folder, name, device):
    """ A few steps in bfloat16 in which nothing may wait for the device. """
    return check_waits(name, arguments_of(folder, f'options-{name}', device, 6, *OPTIONS[name]))

# -----------------------------------------------------------------------------
# Sampling, evaluation

def sample(folder, sampler, device):
    """ A text from an embedding, by one sampler. """
    began = time.perf_counter()
    run_script('sample.py', [f'--out_dir={folder}/run', f'--device={device}', '--mode=l2t',
                             f'--sampler={sampler}', '--text=a red dog runs', '--num_samples=4',
                             '--steps=8'])
    return {f'sampler {sampler}': dict(seconds=time.perf_counter() - began)}


def sample_latents(folder, solver, device):
    """ An embedding from a text, by one solver. """
    began = time.perf_counter()
    run_script('sample.py', [f'--out_dir={folder}/run', f'--device={device}', '--mode=t2l',
                             f'--solver={solver}', '--text=a red dog runs', '--latent_steps=8',
                             f'--save={folder}/z.npy'])
    return {f'solver {solver}': dict(seconds=time.perf_counter() - began)}


def evaluate(folder, device):
    """ Every task of the run; and the bound, in float32, beside the CPU's. """
    began = time.perf_counter()
    common = [f'--out_dir={folder}/run', '--n=8', '--draws=2', '--steps=4', '--latent_steps=4',
              '--seeds=1', '--show=0', '--dtype=float32']
    bounds = []
    for where, tasks in (('cpu', 'nelbo'), (device, 'nelbo,l2t,t2l,unconditional,infill')):
        results = folder / 'run' / 'results.json'
        results.unlink(missing_ok=True)
        run_script('evaluate.py', [*common, f'--device={where}', f'--tasks={tasks}'])
        bounds.append(read_json(results)['nelbo/nats_per_token'])
    difference = abs(bounds[1] / bounds[0] - 1)
    if not difference <= 1e-3:
        raise RuntimeError(f'the bound is {bounds[0]} on the CPU, {bounds[1]} on {device}')
    return {'evaluate.py': {'nats per token': bounds[1], 'largest difference': difference,
                            'seconds': time.perf_counter() - began}}

# -----------------------------------------------------------------------------
# Signals, resume, several cards

def largest_difference(folder, a, b):
    """ Of the weights of two finished runs, as a share of the largest weight. """
    runs = []
    for out in (a, b):
        newest = (folder / out / 'latest').read_text().strip()
        runs.append(load_file(folder / out / newest / 'model.safetensors'))
    apart = max((runs[0][name] - runs[1][name]).abs().max().item() for name in runs[0])
    return apart / max(weight.abs().max().item() for weight in runs[0].values())


def preempt(folder, device):
    """ SIGTERM, resume, and the same weights as a run that was never stopped. """
    arguments = arguments_of(folder, 'whole', device, 8, '--dtype=float32')
    train(arguments)
    arguments = arguments_of(folder, 'stopped', device, 8, '--dtype=float32')
    train(arguments, Interrupted)
    saved = read_json(folder / 'stopped' / 'preempted.json')['step']
    train(arguments)

    difference = largest_difference(folder, 'whole', 'stopped')
    if not difference <= 1e-3:
        raise RuntimeError(f'resumed from step {saved}, its weights differ by {difference:.2g}')
    return {'SIGTERM, resume': {'saved at step': saved, 'largest difference': difference}}


def start_ranks(folder, n, arguments):
    """ train.py as n processes: [(process, its output)]. """
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(n):
        path = folder / f'rank{rank}.txt'
        environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n),
                           MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        with open(path, 'w') as output:
            process = subprocess.Popen([sys.executable, 'train.py', *arguments], cwd=ROOT,
                                       env=environment, stdout=output, stderr=output)
        ranks.append((process, path))
    return ranks


def two_cards(folder, parallel, device, n_cards):
    """ The losses of two processes beside those of one, for the same global batch. """
    if n_cards < 2:
        raise Skipped('one card, and this needs two')
    common = ['--dtype=float32', '--optimizer=adamw', '--master_timeout=60']
    train(arguments_of(folder, f'one-{parallel}', device, 4, *common), Brief)
    two = arguments_of(folder, f'two-{parallel}', device.partition(':')[0], 4, *common,
                       '--batch_size=4', f'--parallel={parallel}')
    began = time.perf_counter()
    for process, path in start_ranks(folder, 2, two):
        if process.wait():
            raise RuntimeError(Path(path).read_text().strip().split('\n')[-1])
    seconds = time.perf_counter() - began

    one, two = (log_entries(folder / f'{runs}-{parallel}') for runs in ('one', 'two'))
    difference = max(abs(b['loss'] / a['loss'] - 1) for a, b in zip(one, two))
    if len(two) != 4 or not difference <= 1e-3:
        raise RuntimeError(f'losses {[e["loss"] for e in two]}, of one process '
                           f'{[e["loss"] for e in one]}')
    return {parallel: {'largest difference': difference, 'seconds': seconds}}


def kill_a_rank(folder, device, n_cards):
    """ Kill -9 to one of two processes: the other one must leave, with an error. """
    if n_cards < 2:
        raise Skipped('one card, and this needs two')
    arguments = arguments_of(folder, 'killed', device.partition(':')[0], 100_000,
                             '--optimizer=adamw', '--master_timeout=60', '--dist_timeout=20')
    (first, output), (second, _) = start_ranks(folder, 2, arguments)
    while first.poll() is None and 'loss' not in Path(output).read_text():
        time.sleep(.1)
    second.send_signal(signal.SIGKILL)
    second.wait()
    began = time.perf_counter()
    code = first.wait(timeout=60)
    if code == 0:
        raise RuntimeError('the other process ended with code 0')
    return {'a killed rank': {'the other leaves after seconds': time.perf_counter() - began,
                              'its exit code': code}}
