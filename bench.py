"""
Speed as a ratio in one run: before beside after, interleaved, medians.

    python bench.py                         # what guard and logging cost a training step

The two sides of a comparison are train.py itself, run by turns in this process on the same dataset from the same seed; what is
compared are the tokens per second of its own log, without the first line. guard=False decides nothing and skips nothing, and still
keeps the few numbers that a log line needs.
"""
import gc
import json
import os
import runpy
import statistics
import sys
import tempfile

from configurator import configure

dataset = 'quickstart'          # a folder under data/, or a path to one
rounds = 5                      # each side so many times
max_iters = 60                  # of each
batch_size = 32
depth = 4
width = 256
heads = 4
dtype = 'bfloat16'

HERE = os.path.dirname(os.path.abspath(__file__))
SIDES = {'off': ['--guard=false', '--log_interval=30'], 'guard': ['--guard=true', '--log_interval=30'],
         'guard and a log line every 10 steps': ['--guard=true', '--log_interval=10']}


def tokens_per_s(arguments):
    """ Median over the log lines of one training, but the first, which waits for the first steps to warm up. """
    with tempfile.TemporaryDirectory() as out_dir:
        sys.argv = ['train.py', f'--dataset={dataset}', f'--out_dir={out_dir}', f'--max_iters={max_iters}', f'--batch_size={batch_size}',
                    f'--depth={depth}', f'--width={width}', f'--heads={heads}', f'--dtype={dtype}', '--eval_interval=1000000',
                    '--save_interval=1000000', '--eval_iters=1', *arguments]
        stdout, sys.stdout = sys.stdout, open(os.devnull, 'w')
        try:
            runpy.run_path(os.path.join(HERE, 'train.py'), run_name='__main__')
        finally:
            sys.stdout.close()
            sys.stdout = stdout
            gc.collect()                                                 # the script's model
        with open(os.path.join(out_dir, 'training_log.jsonl')) as f:
            entries = [json.loads(line) for line in f]
    return statistics.median([e['tokens_per_s'] for e in entries if 'tokens_per_s' in e][1:])


def main():
    configure(globals())
    speeds = {}
    for i in range(rounds):
        for name, arguments in SIDES.items():                            # interleaved: what disturbs the machine disturbs all
            speeds.setdefault(name, []).append(tokens_per_s(arguments))
            print(f'round {i + 1}/{rounds}  {name:<40} {speeds[name][-1]:>10,.0f} tokens/s', flush=True)
    base = next(iter(SIDES))
    print(f'\n{"":<40} {"tokens/s":>10}   time of a step, relative to {base!r}: median (least, most) over rounds')
    for name in SIDES:
        ratios = [b / s for b, s in zip(speeds[base], speeds[name])]
        print(f'{name:<40} {statistics.median(speeds[name]):>10,.0f}   {statistics.median(ratios):.3f} '
              f'({min(ratios):.3f}, {max(ratios):.3f})')


if __name__ == '__main__':
    main()
