"""
What a training step of train.py takes, for bench.py --what=gpu: seconds, the share of the card's
peak, kernels and memory, and the step in parts. train.py runs as it is, under watch (watched.py).

    time       the median of 5 windows of many steps; the device is waited for between windows only
    parts      the median of 3 steps in which it is waited for after each part
    kernels    of one step under torch's profiler
"""
import statistics
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import wait
from benchmarks.step import begin_peak, peak_gb
from benchmarks.watched import Enough, seen, train
from runs.flops import flops_of_step, peak_of
from runs.log import StepLog


class Timed(StepLog):
    """ Measures for some seconds, then raises Enough with a row of the table. """
    window = 0.5               # seconds of one of its 5 windows
    parts = None               # {name: [seconds]}, while parts are timed

    def begin_step(self):
        if not hasattr(self, 'course'):
            self.course = course(self)
        next(self.course)
        super().begin_step()

    def end_step(self, *arguments):
        super().end_step(*arguments)
        if self.parts is not None:                         # what is left of a step is the average
            wait(self.device)
            self.ended = time.perf_counter()


def course(log):
    """ A generator that is resumed whenever a step begins. """
    device = log.device

    # compile, choose kernels, fill caches of memory
    for _ in range(8):
        yield

    # how many steps fit into a window
    wait(device)
    began = time.perf_counter()
    yield
    wait(device)
    n_steps = max(1, min(100, int(log.window / (time.perf_counter() - began))))

    # five windows
    begin_peak(device)
    times = []
    for _ in range(5):
        wait(device)
        began = time.perf_counter()
        for _ in range(n_steps):
            yield
        wait(device)
        times.append((time.perf_counter() - began) / n_steps)
    seconds = statistics.median(times)
    memory = peak_gb(device)

    # its parts, three times
    log.parts = defaultdict(list)
    with timed_parts(device, log.parts) as clock:
        for _ in range(3):
            wait(device)
            clock.began = time.perf_counter()
            yield
            wait(device)
            log.parts['ema'].append(time.perf_counter() - log.ended)
    parts = {f'{part} ms': 1000 * statistics.median(found) for part, found in log.parts.items()}
    log.parts = None

    # its kernels; on a CPU, its operators
    kind = torch.device(device).type
    activity = ProfilerActivity.CUDA if kind == 'cuda' else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        yield
        wait(device)
    raise Enough(row_of(log.grad_accum, seconds, memory, parts, kernels_of(profiler, kind)))


@contextmanager
def timed_parts(device, found):
    """ Inside, the seconds of clipping and of each optimizer are appended to found[name], and those
    of all that is before them, forward and backward. """
    clock = SimpleNamespace(began=0.0)

    def lap(name):
        wait(device)
        now = time.perf_counter()
        found[name].append(now - clock.began)
        clock.began = now

    def before(*_):
        wait(device)
        clock.began = time.perf_counter()

    def after(optimizer, *_):
        lap(type(optimizer).__name__)

    clip = torch.nn.utils.clip_grad_norm_

    def timed_clip(*arguments):
        lap('micro-steps')
        norm = clip(*arguments)
        lap('clip')
        return norm

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    torch.nn.utils.clip_grad_norm_ = timed_clip
    try:
        yield clock
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
        for hook in hooks:
            hook.remove()


def kernels_of(profiler, kind):
    """ [(name, microseconds)] of what the device ran. """
    found = []
    for event in profiler.events():
        is_ours = event.device_type.name.lower() == kind and event.name != 'Context Sync'
        if is_ours and not event.is_user_annotation:
            found.append((event.name, event.time_range.elapsed_us()))
    return found


def row_of(grad_accum, seconds, memory, parts, kernels):
    """ The row of a training in the table of bench.py --what=gpu. """
    run = seen.run
    flops = flops_of_step(seen.model, run, grad_accum, run.stages[0])
    row = {'ms': 1000 * seconds, 'tokens/s': run.global_batch * run.stages[0].seq_len / seconds,
           'TFLOP/s': flops / seconds / 1e12}
    if peak := peak_of(run.device):
        row['MFU %'] = 100 * flops / seconds / peak

    # of the device's kernels, how long it was at work in a step
    busy = sum(microseconds for _, microseconds in kernels) / 1e6
    if torch.device(run.device).type == 'cuda':
        row['busy %'] = 100 * busy / seconds
    row.update({'kernels': len(kernels), 'GB': memory, 'M params': run.n_parameters / 1e6,
                'rows': run.global_batch}, **parts)

    # for the file only: the kernels that take most of the time, in ms
    total = Counter()
    for name, microseconds in kernels:
        total[name[:80]] += microseconds / 1000
    row['longest'] = total.most_common(12)
    return row


def time_training(name, arguments, window):
    """ The row of a training: 5 windows of so many seconds. """
    Timed.window = window
    row = train([*arguments, '--max_iters=100000', '--log_interval=100000', '--resume=never',
                 '--eval_interval=1000000', '--save_interval=1000000'], Timed)
    return {name: row}
