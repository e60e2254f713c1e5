"""
The speed of a training step, ours against transformers' (peers.py), by turns in one process. All
have the same batch, AdamW, and the knobs dtype and compile.
"""
import statistics
import time

import torch

from base.machine import keep_freed_memory, pick_device, pick_dtype
from benchmarks import peers
from benchmarks.trainings import compare

WARM_UP = 5                    # steps: the first ones are slower


def side_of(name, shape, device, dtype, knobs):
    """ A function that does max_iters steps and returns their tokens per second. """
    module, loss = peers.build(name, shape, device, dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    print(f'{name}: {sum(p.numel() for p in module.parameters()) / 1e6:.1f}M parameters')

    # ours is compiled as train.py does it: block by block
    if knobs.compile:
        for part in module.blocks if name == 'ours' else [module]:
            part.compile(dynamic=False)

    # a step is whole when its loss can be read on the host
    def seconds_of_step():
        began = time.perf_counter()
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        value.item()                                       # waits for the device
        return time.perf_counter() - began

    def measure():
        # the median: now and then another program disturbs a step
        times = [seconds_of_step() for _ in range(knobs.max_iters)]
        return shape['batch'] * shape['length'] / statistics.median(times)

    # before the rounds: compilation, and memory that is taken once
    for _ in range(WARM_UP):
        seconds_of_step()
    return measure


def run(knobs):
    shape = peers.SHAPES[knobs.shape]
    device = pick_device(knobs.device)
    dtype = pick_dtype(knobs.dtype, device)

    # memory and precision as train.py sets them
    keep_freed_memory()
    torch.set_float32_matmul_precision('high')
    print(f'{knobs.shape}: {shape}; {dtype}, {device}')
    sides = {name: side_of(name, shape, device, dtype, knobs) for name in peers.SIDES}
    compare(sides, 'tokens/s', knobs.rounds)
