"""
Speed as a ratio: one side against the other in one run, by turns, medians over rounds. The code of
each comparison is a file in benchmarks/.

    python bench.py --lines="config/speedrun.py | config/quickstart.py"     # trainings, any two
    python bench.py --what=step --shape=small      # a training step against transformers'
    python bench.py --what=samplers --shape=captions    # milliseconds a text, against GPT-2
    python bench.py --what=gpu     # our configs on a card, and its losses against a CPU's
    python bench.py --what=gpu --device=cpu      # a tiny size: does it run?
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))   # PYTHONSAFEPATH=1 leaves it out
if __name__ == '__main__':
    import base.begin                                      # before torch

from types import SimpleNamespace

import torch

from base.console import stop_on_error
from benchmarks import gpu, samplers, step, trainings
from configurator import configure

what = 'trainings'              # trainings | step | samplers | gpu
lines = ''                      # trainings: arguments of train.py, | between them
rounds = 5                      # [1, 1000]: each side so many times
max_iters = 60                  # [2, 1e6]: trainings: of each; step: of each round
batch_sizes = '1,8,64'          # samplers: texts at a time
dtype = 'auto'                  # auto | bfloat16 | float32; auto: as in train.py
shape = 'small'                 # small | captions | gpt2vocab: step, samplers
compile = False                 # step
device = 'auto'                 # auto | cpu | cuda | mps | <cuda:1 or the like>
threads = 2                     # [1, 1024]: of torch

BENCHES = {'trainings': trainings.run, 'step': step.run, 'samplers': samplers.run, 'gpu': gpu.run}


def main():
    knobs = SimpleNamespace(**configure(globals()))
    torch.set_num_threads(knobs.threads)
    with stop_on_error():
        BENCHES[knobs.what](knobs)


if __name__ == '__main__':
    main()
