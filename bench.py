"""
Speed as a ratio: one side beside the other in one run, by turns, medians over rounds. The code of
each comparison is a file in benchmarks/.

    python bench.py                                      # guard: what it costs a training step
    python bench.py --what=trainings --lines="config/speedrun.py | config/quickstart.py"
    python bench.py --what=step --shape=small            # a training step beside other libraries'
    python bench.py --what=scaling --settings=bfloat16   # how that grows with depth, width, length
    python bench.py --what=samplers                      # seconds a text, beside autoregressive
    python bench.py --what=loader                        # the packed dataset beside a file a sample
    python bench.py --what=encoder --encoder=FOLDER      # beside sentence-transformers
    python bench.py --what=opening --rows=1e6,1e8,1e9    # datasets of so many rows, in sparse files
    python bench.py --what=gpu                           # all of a card: does it run, how fast
"""
from types import SimpleNamespace

import runs.threads    # before torch: it sets how threads wait for one another

import torch

from benchmarks import (encoder as encoder_bench, gpu, loader, opening, peers, samplers, scaling,
                        step, trainings)
from configurator import configure, stop, stop_on_error

what = 'guard'                  # one or more of guard, trainings, step, scaling, samplers, loader,
                                # encoder, opening; or gpu
dataset = 'quickstart'          # <a folder under data/, or a path to one>
rounds = 5                      # [1, 1000]: each side so many times
max_iters = 60                  # [1, 1e6]: of each training
batch_size = 32                 # [1, 65536]
depth = 4                       # [1, 256]
width = 256                     # [1, 16384]
heads = 4                       # [1, 256]
dtype = 'auto'                  # auto | bfloat16 | float32; auto: as in train.py
samples = 4096                  # [1, 1e7]: loader, encoder
encoder = 'minilm'              # <a name, hub id or folder>: of texts
embed_batch_size = 64           # [1, 65536]
lines = ''                      # trainings: arguments of train.py, | between them
shape = 'small'                 # small | gpt2vocab: step
sides = 'ours,diffusers,mmdit,bert,gpt'   # step
settings = 'as shipped,float32,float32 compiled,bfloat16,bfloat16 compiled'
seconds = 2.0                   # (0, 3600]; step, scaling: of steps in each round
scale = 'depth,width,length,batch'      # scaling: what is halved and doubled
rows = '1e6,1e8'                # opening: of the training split, one dataset for each number
shard_rows = 0                  # [0, 1e9]: opening; 0: as many as prepare.py puts into a shard
device = 'auto'                 # auto | cpu | cuda | <cuda:1 or the like>
save = ''                       # step, scaling, gpu: a .json for the table; gpu: '' is
                                # out/gpu/table.json
minutes = 10.0                  # (0, 1e4]; gpu: what does not fit is skipped
parts = ''                      # gpu: some of its parts (benchmarks/gpu.py); '': all
threads = 2                     # [1, 1024]: of torch

BENCHES = {'guard': trainings.run_guard, 'trainings': trainings.run_trainings, 'step': step.run,
           'scaling': scaling.run, 'samplers': samplers.run, 'loader': loader.run,
           'encoder': encoder_bench.run, 'opening': opening.run, 'gpu': gpu.run}


def main():
    knobs = SimpleNamespace(**configure(globals()))
    if knobs.shape not in peers.SHAPES:
        stop(f'shape={knobs.shape!r}: choose from {", ".join(peers.SHAPES)}')
    names = knobs.what.split(',')
    for name in names:
        if name not in BENCHES:
            stop(f'what={name!r}: choose from {", ".join(BENCHES)}')

    torch.set_num_threads(knobs.threads)
    for name in names:
        print(f'{name}, {torch.get_num_threads()} threads')
        with stop_on_error():
            BENCHES[name](knobs)


if __name__ == '__main__':
    main()
