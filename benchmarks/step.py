"""
The time of a training step, ours beside other libraries' (peers.py), by turns. Each side works in a
process of its own, which waits for its turns, so that no library disturbs another.

A setting is 'as shipped' or a dtype, with 'compiled' behind it or not.
"""
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import peers
from configurator import stop
from runs.machine import keep_freed_memory, pick_device

ROOT = Path(__file__).resolve().parent.parent

# -----------------------------------------------------------------------------
# In the process of a side

def build_step(side, shape, setting, device, dtype):
    """ The module of a side, and a function that does one training step and returns the loss. """
    as_shipped = setting == 'as shipped'
    if not as_shipped:
        keep_freed_memory()
        torch.set_float32_matmul_precision('high')
    module, loss = peers.build(side, shape, device, dtype, as_shipped)
    fused = {} if as_shipped else dict(fused=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, **fused)

    def step():
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value
    return module, step


def begin_peak(device):
    """ The peak of memory is counted from here. """
    if device.startswith('cuda'):
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == 'linux':
        with open('/proc/self/clear_refs', 'w') as f:
            f.write('5')


def peak_gb(device):
    """ The peak of memory in GB since begin_peak; None where it is not known. """
    if device.startswith('cuda'):
        return torch.cuda.max_memory_allocated() / 1e9
    if sys.platform == 'linux':
        with open('/proc/self/status') as f:
            return int(re.search(r'VmHWM:\s+(\d+)', f.read())[1]) / 1e6
    return None


def work(side, shape, setting, threads, device):
    """ Prints a line of JSON when the side is ready. Then it reads numbers of seconds from stdin,
    works for so long, and prints a line of JSON for each. """
    torch.set_num_threads(threads)
    device = pick_device(device)
    dtype, *compiled = setting.replace('as shipped', 'float32').split()
    module, step = build_step(side, shape, setting, device, dtype)

    # on a CPU the counter of operations knows this attention only
    only_math = sdpa_kernel(SDPBackend.MATH) if device == 'cpu' else nullcontext()
    with FlopCounterMode(display=False) as flops, only_math:
        step()

    # ours is compiled as train.py does it: block by block
    if compiled:
        for part in module.blocks if side == 'ours' else [module]:
            part.compile(dynamic=False)
    for _ in range(5):
        step()
    begin_peak(device)
    parameters = sum(p.numel() for p in module.parameters())
    print(json.dumps(dict(flops=flops.get_total_flops(), parameters=parameters)), flush=True)

    for line in sys.stdin:
        end = time.perf_counter() + float(line)
        times = []
        while time.perf_counter() < end:
            began = time.perf_counter()
            value = step().item()                          # waits for the device
            times.append(time.perf_counter() - began)
        assert np.isfinite(value), f'{side}: loss {value}'
        answer = dict(seconds=statistics.median(times), memory_gb=peak_gb(device))
        print(json.dumps(answer), flush=True)

# -----------------------------------------------------------------------------
# In the process that compares

class Worker:
    """ A side in one setting at one shape, in a process of its own. It waits for its turns. """

    def __init__(self, side, shape, setting, knobs):
        arguments = (side, shape, setting, knobs.threads, knobs.device)
        code = f'from benchmarks.step import work; work(*{arguments!r})'
        self.errors = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen(
            [sys.executable, '-W', 'ignore', '-c', code], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.ready = self.answer()

    def answer(self):
        """ The next line of JSON; what a library prints is passed over. {error: its last words}
        where the process has ended. """
        for line in self.process.stdout:
            if line.startswith('{'):
                return json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        last_words = self.errors.read().strip() or f'exit code {code}'
        return dict(error=last_words.split('\n')[-1])

    def turn(self, seconds):
        """ {seconds: of a step, memory_gb}, or {error: its last words}. """
        with suppress(BrokenPipeError):                    # it has ended: answer() says why
            self.process.stdin.write(f'{seconds}\n')
            self.process.stdin.flush()
        return self.answer()

    def end(self):
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def start_sides(shape, knobs):
    """ {(side, setting): Worker} of what works; prints what does not. """
    workers = {}
    for side in knobs.sides.split(','):
        if side not in peers.SIDES:
            stop(f'sides={knobs.sides!r}: choose from {", ".join(peers.SIDES)}')
        for setting in knobs.settings.split(','):
            if (side, setting) == ('ours', 'as shipped'):                # ours is none of a library
                continue
            worker = Worker(side, shape, setting, knobs)
            if 'error' in worker.ready:
                print(f'{side:<12}{setting:<20} {worker.ready["error"]}', flush=True)
                worker.end()
            else:
                workers[side, setting] = worker
    if not workers:
        stop('no side could be measured: the lines above say why')
    return workers


def take_turns(workers, knobs):
    """ {worker: seconds of a step in each round}, {worker: memory}. """
    times = {key: [] for key in workers}
    memory = {}
    for i in range(knobs.rounds):
        for key, worker in workers.items():
            answer = worker.turn(knobs.seconds)
            if 'error' in answer:
                stop(f'{" ".join(key)}: {answer["error"]}; without it: --sides')
            times[key].append(answer['seconds'])
            memory[key] = answer['memory_gb']
        found = '  '.join(f'{key[0]} {1000 * times[key][-1]:.1f}' for key in workers)
        print(f'round {i + 1}/{knobs.rounds}  {found}', flush=True)
    return times, memory


def run(knobs):
    shape = peers.SHAPES[knobs.shape]
    workers = start_sides(shape, knobs)
    times, memory = take_turns(workers, knobs)

    # the table: the first side is the base of the ratios
    base = next(iter(workers))
    sizes = ', '.join(f'{name} {value:,}' for name, value in shape.items())
    print(f'\n{knobs.shape}: {sizes}')
    print(f'{"":<12}{"setting":<20}{"ms":>8}{"tokens/s":>10}   {f"time / {base[0]}":<22}'
          f'{"M params":>9}{"GFLOP":>7}{"GB":>6}')
    rows = []
    for (side, setting), seconds in times.items():
        worker = workers[side, setting]
        worker.end()
        flops = worker.ready['flops']
        ms = 1000 * statistics.median(seconds)
        ratios = [t / t_base for t, t_base in zip(seconds, times[base])]
        row = dict(side=side, setting=setting, ms=ms,
                   tokens_per_s=shape['batch'] * shape['length'] / ms * 1000,
                   ratio=statistics.median(ratios), ratio_least=min(ratios), ratio_most=max(ratios),
                   memory_gb=memory[side, setting], **worker.ready)
        rows.append(row)
        ratio = f'{row["ratio"]:.2f} ({row["ratio_least"]:.2f}, {row["ratio_most"]:.2f})'
        print(f'{side:<12}{setting:<20}{ms:>8.1f}{row["tokens_per_s"]:>10,.0f}   {ratio:<22}'
              f'{row["parameters"] / 1e6:>9.1f}{flops / 1e9:>7.0f}'
              f'{row["memory_gb"] or 0:>6.2f}')

    if knobs.save:
        table = dict(command=sys.argv[1:], shape=shape, torch=torch.__version__,
                     threads=knobs.threads, rows=rows)
        Path(knobs.save).write_text(json.dumps(table, indent=1))
