"""
Trainings beside each other, in tokens per second.

The numbers are those of train.py itself. It runs in this process, always from the same seed, and
writes the tokens per second into its log. The first line of the log is left out: the first steps
are slower.

    guard       what the guard and the log cost a training step. guard=False skips no step, and
                still keeps the few numbers that a log line needs
    trainings   any command lines of train.py: --lines="config/a.py | config/a.py --optimizer=adamw"
"""
import contextlib
import gc
import json
import os
import runpy
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.compare import compare
from configurator import stop

ROOT = Path(__file__).resolve().parent.parent


def tokens_per_s(arguments, max_iters):
    """ Tokens per second of one training: the median over its log lines. """
    with tempfile.TemporaryDirectory() as out_dir:
        sys.argv = ['train.py', *arguments, f'--out_dir={out_dir}', f'--max_iters={max_iters}',
                    '--eval_interval=1000000', '--save_interval=1000000', '--eval_iters=1']
        try:
            with open(os.devnull, 'w') as nowhere, contextlib.redirect_stdout(nowhere):
                runpy.run_path(str(ROOT / 'train.py'), run_name='__main__')
        finally:
            # free the script's model, and its programs: torch keeps at most 8 of a function
            gc.collect()
            torch._dynamo.reset()

        with open(os.path.join(out_dir, 'training_log.jsonl')) as f:
            entries = [json.loads(line) for line in f]
    return statistics.median([e['tokens_per_s'] for e in entries if 'tokens_per_s' in e][1:])


def model_arguments(knobs):
    """ The knobs that bench.py has of train.py, as its command line. """
    names = ('dataset', 'batch_size', 'depth', 'width', 'heads', 'dtype')
    return [f'--{name}={getattr(knobs, name)}' for name in names]


def side(arguments, max_iters):
    """ A side of `compare`: this training. """
    return lambda: tokens_per_s(arguments, max_iters)


def run_guard(knobs):
    """ A training without the guard, with it, and with more log lines. """
    common = model_arguments(knobs)
    lines = {'off': ['--guard=false', '--log_interval=30'],
             'guard': ['--guard=true', '--log_interval=30'],
             'guard and a log line every 10 steps': ['--guard=true', '--log_interval=10']}
    sides = {name: side(common + more, knobs.max_iters) for name, more in lines.items()}
    compare(sides, 'tokens/s', knobs.rounds)


def run_trainings(knobs):
    """ The command lines in --lines, beside each other. """
    if not knobs.lines:
        stop('--lines="config/a.py | config/b.py --lr=...": the arguments of each training')

    log_interval = f'--log_interval={max(1, knobs.max_iters // 4)}'
    sides = {}
    for line in knobs.lines.split('|'):
        sides[line.strip()] = side([*line.split(), log_interval], knobs.max_iters)
    compare(sides, 'tokens/s', knobs.rounds)
