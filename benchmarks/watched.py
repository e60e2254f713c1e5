"""
train.py under watch, for bench.py --what=gpu. It runs in this process as its users start it. Its
log, runs.log.StepLog, is told when a step begins and ends; a subclass in its place sees each step.
So train.py needs no knob for any of this.

    Brief        ends without an evaluation and a checkpoint
    NoWaits      a step that waits for the device is an error, but for what is allowed by name
    Interrupted  a signal comes in the middle
    timed.Timed  seconds, parts, kernels and memory of a step
"""
import gc
import json
import linecache
import os
import runpy
import signal
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

import runs.log
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
# A signal

class Interrupted(StepLog):
    """ SIGTERM comes before the 4th step is done. """
    count = 0

    def begin_step(self):
        super().begin_step()
        self.count += 1
        if self.count == 4:
            os.kill(os.getpid(), signal.SIGTERM)
