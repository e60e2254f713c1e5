"""
train.py under watch, for bench.py --what=gpu. It runs in this process as its users start it. Its
log, runs.log.StepLog, is told when a step begins and ends; a subclass in its place sees each step.
So train.py needs no knob for any of this.

    Brief        ends without an evaluation and a checkpoint
    NoWaits      a step that waits for the device is an error, but for what is allowed by name
    Timed        seconds, parts, kernels and memory of a step
    Interrupted  a signal comes in the middle
"""
import gc
import json
import linecache
import os
import runpy
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)
from torch.profiler import ProfilerActivity, profile

import runs.log
from benchmarks.machine import wait
from benchmarks.step import begin_peak, peak_gb
from runs.flops import flops_of_step, peak_of
from runs.log import StepLog

ROOT = Path(__file__).resolve().parent.parent
seen = SimpleNamespace()       # model and run of the training that is being watched


class Enough(Exception):
    """ Ends a training whose watch has seen what it wanted: nothing is evaluated or saved. """


class Skipped(Exception):
    """ A job that cannot run here, with the reason. """


def run_script(script, arguments):
    """ A script of the repository in this process. RuntimeError if it ends with another code than
    0; what it said is on stderr. """
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(str(ROOT / script), run_name='__main__')
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f'{script} ended with exit code {end.code}') from None
    finally:
        gc.collect()                                       # what the script left open is closed
        torch._dynamo.reset()


def train(arguments, log=StepLog):
    """ train.py with another log. Returns what the log gave to Enough; else None. """
    def note(model, run, config):                          # in place of the line about the costs
        seen.model, seen.run = model, run

    real = runs.log.StepLog, runs.log.say_cost
    runs.log.StepLog, runs.log.say_cost = log, note
    try:
        run_script('train.py', arguments)
    except Enough as enough:
        return enough.args[0]
    finally:
        runs.log.StepLog, runs.log.say_cost = real


def log_entries(out_dir):
    """ The lines of a run's log that tell of steps. """
    with open(os.path.join(out_dir, 'training_log.jsonl')) as f:
        entries = [json.loads(line) for line in f]
    return [entry for entry in entries if 'loss' in entry]


class Brief(StepLog):
    """ Ends the training after its last line, without an evaluation and a checkpoint. """

    def report(self, step, *arguments):
        super().report(step, *arguments)
        if step == self.max_iters:
            raise Enough(None)

# -----------------------------------------------------------------------------
# A step that waits is an error

# what may wait in train.py: Muon, which has no switch on the device that skips a step, and what
# comes just before a line of the log
ALLOWED = ('bad.item()', 'state.skipped.item()')


class NoWaits(Brief):
    """ From the second step on. A line of the log waits by design: there it is off. """
    waits = Counter()          # {name: times}, of what is allowed
    is_on = False
    is_first = True

    def begin_step(self):
        super().begin_step()
        self.switch(not self.is_first)
        self.is_first = False

    def switch(self, is_on):
        NoWaits.is_on = is_on
        if torch.device(self.device).type == 'cuda':
            torch.cuda.set_sync_debug_mode('error' if is_on else 'default')

    def report(self, *arguments):
        self.switch(False)
        super().report(*arguments)

    def estimate(self, step):
        self.switch(False)
        super().estimate(step)


@contextmanager
def allowed_waits():
    """ Inside, `.item()` in train.py is looked at: allowed ones are counted and may wait, others
    are an error. On a CPU, where nothing waits, too. """
    item = torch.Tensor.item

    def watched_item(tensor):
        caller = sys._getframe(1)
        path = caller.f_code.co_filename
        if not NoWaits.is_on or os.path.basename(path) != 'train.py':
            return item(tensor)
        line = linecache.getline(path, caller.f_lineno).strip()
        name = next((name for name in ALLOWED if name in line), None)
        if name is None:
            raise RuntimeError(f'train.py:{caller.f_lineno} waits for the device: {line}')

        NoWaits.waits[name] += 1
        if not tensor.is_cuda:
            return item(tensor)
        torch.cuda.set_sync_debug_mode('default')
        value = item(tensor)
        torch.cuda.set_sync_debug_mode('error')
        return value

    torch.Tensor.item = watched_item
    try:
        yield
    finally:
        torch.Tensor.item = item


def check_waits(name, arguments):
    """ A short training in which no step may wait: the row of an option set. """
    NoWaits.waits.clear()
    with allowed_waits():
        train(arguments, NoWaits)
    found = [f'{what} x {n}' for what, n in NoWaits.waits.items()]
    return {name: dict(waits=', '.join(found) or 'none')}

# -----------------------------------------------------------------------------
# What a step takes

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

# -----------------------------------------------------------------------------
# A signal

class Interrupted(StepLog):
    """ SIGTERM comes before the 4th step is done. """
    count = 0

    def begin_step(self):
        super().begin_step()
        self.count += 1
        if self.count == 4:
            os.kill(os.getpid(), signal.SIGTERM)
