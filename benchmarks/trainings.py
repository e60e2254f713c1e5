"""
Speeds of several sides, measured by turns; and trainings as such sides, in tokens per second.

The numbers are those of train.py itself. It runs in this process, always from the same seed, and
writes the tokens per second into its log.
"""
import contextlib
import gc
import json
import os
import runpy
import statistics
import sys
import tempfile
from unittest.mock import patch

import torch

from base.console import stop
from configurator import HERE
from diffusion import Loss
from runs.resume import State


def compare(sides, unit, rounds):
    """ Runs each side `rounds` times and prints its speed and its ratio to the first side's.
    sides: {name: function that returns the speed}. Returns {name: median speed}. """
    speeds = {name: [] for name in sides}
    for i in range(rounds):
        # by turns: what disturbs the machine disturbs all sides
        for name, measure in sides.items():
            speed = measure()
            speeds[name].append(speed)
            print(f'round {i + 1}/{rounds}  {name:<40} {speed:>12,.0f} {unit}', flush=True)

    # each round against the first side of that round
    first = next(iter(sides))
    print(f'\n{"":<40} {unit:>12}   '
          f'speed, relative to {first!r}: median (least, most) over rounds')
    medians = {}
    for name in sides:
        medians[name] = statistics.median(speeds[name])
        ratios = [speed / of_first for of_first, speed in zip(speeds[first], speeds[name])]
        print(f'{name:<40} {medians[name]:>12,.0f}   {statistics.median(ratios):.3f} '
              f'({min(ratios):.3f}, {max(ratios):.3f})')
    print()
    return medians


def log_of(arguments, max_iters, *last):
    """ The lines {field: value} of the log of a training: of its steps and evaluations. last: what
    wins over the intervals that are given here. """
    with tempfile.TemporaryDirectory() as out_dir:
        sys.argv = ['train.py', *arguments, f'--out_dir={out_dir}', f'--max_iters={max_iters}',
                    '--eval_interval=1000000', '--eval_rows=1',
                    f'--log_interval={max(1, max_iters // 4)}', *last]
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()           # memory_gb is of this training alone
        # in this process: a new one would import and compile everything again
        try:
            with open(os.devnull, 'w') as nowhere, contextlib.redirect_stdout(nowhere):
                runpy.run_path(os.path.join(HERE, 'train.py'), run_name='__main__')
        finally:
            # free the script's model, and its programs: torch keeps at most 8 of a function
            gc.collect()
            torch._dynamo.reset()

        with open(os.path.join(out_dir, 'training_log.jsonl')) as f:
            return [json.loads(line) for line in f]


def timed(arguments, max_iters):
    """ The lines of steps of a training that neither validates nor saves: with 727M parameters both
    take long. Without the first line: the first steps are slower. """
    # validate returns five sums, for which ones will do
    ones = torch.ones(5, dtype=torch.float64)
    with (patch.object(Loss, 'validate', lambda *_: ones),
          patch.object(State, 'save', lambda *_: None)):
        entries = log_of(arguments, max_iters)
    return [entry for entry in entries if 'tokens_per_s' in entry][1:]


def run(knobs):
    """ The command lines in --lines, by turns. """
    if not knobs.lines:
        stop('--lines="config/a.py | config/b.py --lr=...": the arguments of each training')

    def side(line):
        def measure():
            entries = timed(line.split(), knobs.max_iters)
            return statistics.median(entry['tokens_per_s'] for entry in entries)
        return measure

    # the command lines are the names of the sides
    lines = [line.strip() for line in knobs.lines.split('|')]
    compare({line: side(line) for line in lines}, 'tokens/s', knobs.rounds)
