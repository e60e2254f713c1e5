""" How a fault is brought into a real process, and what must hold after it. Nothing in train.py or
prepare.py knows of these. """
from pathlib import Path

import numpy as np
import torch

from base.files import read_json
from launch import log, same, saved, weights
from runs import checkpoint

LONG = '--max_iters=100000 --eval_interval=1000000'


# ---- code that runs before a script

def hook(factors, rank=0, offset=0):
    """ Code that multiplies the gradient of the text loss, and so all that l2t computes from it, by
    factors[step] on one rank. """
    return f"""
import os, torch, diffusion
loss_of, calls = diffusion.MaskedText.loss, []
def patched(*args):
    loss, *more = loss_of(*args)
    factor = float({factors}.get(len(calls) + {offset}, 1))
    calls.append(1)
    loss.register_hook(lambda grad: grad * factor)
    return loss, *more
if os.environ.get('RANK', '0') == '{rank}':
    diffusion.MaskedText.loss = patched
"""


def infinite(step, rank=0):
    """ Code that makes one number of one weight's gradient +inf at this step on one rank, before it
    is averaged. (All the logits' gradients times inf would be NaN, where they are 0; and fsdp
    replaces the parameters, hooks and all.) """
    return f"""
import os, model
init, calls = model.Model.__init__, []
def patched(self, config):
    init(self, config)
    def spoil(grad):
        calls.append(1)
        if len(calls) == {step} + 1:
            grad = grad.clone()
            grad.view(-1)[0] = float('inf')
        return grad
    if self.bias.device.type != 'meta' and os.environ.get('RANK', '0') == '{rank}':
        self.blocks[0].text.up.weight.register_hook(spoil)
model.Model.__init__ = patched
"""


# what each rank holds at the end: weights, average, moments
DIGEST = """
import hashlib
local = lambda p: p.to_local() if hasattr(p, 'to_local') else p
moments = [m[k] for opt in g['optimizers'] for m in opt.state.values() for k in sorted(m)]
held = [*g['model'].parameters(), *g['state'].ema, *moments]
held = b''.join(local(p).detach().numpy().tobytes() for p in held)
print('weights', hashlib.sha256(held).hexdigest())
"""


def n_digests(job):
    """ How many different ones its ranks hold. """
    found = set()
    for rank in range(len(job.processes)):
        found.add(job.out(rank).split('weights ')[1].strip())
    return len(found)


# the same signal again in the middle of the save, as of one who is impatient
AGAIN = """
from runs import checkpoint
write_files = checkpoint.write_files
def again(*args):
    write_files(*args)
    if run_folder.signal_seen:
        os.kill(os.getpid(), run_folder.signal_seen)
checkpoint.write_files = again
"""


# ---- what a run has left

def skips(out):
    return [skip for entry in log(out).values() for skip in entry.get('skips', [])]


def names(out):
    """ Of the checkpoints, the newest first: their numbers. """
    return [int(folder.name.removeprefix('step-')) for folder in checkpoint.steps(out)]


def files_of(folder):
    """ {path: content} of all that is in a folder. """
    paths = [path for path in Path(folder).rglob('*') if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def assert_nothing_moved(out, a, b):
    """ Between the checkpoints of two steps: weights, average, moments, step counts. """
    before, after = saved(out / f'step-{a:08d}'), saved(out / f'step-{b:08d}')
    for kind in ('model', 'ema', 'optimizer'):
        assert same(before[kind], after[kind]), kind


def assert_same_run(out, whole):
    """ The same losses at every step and the same final weights, to the bit. """
    assert log(out) == log(whole)
    for kind in ('model', 'ema'):
        assert same(weights(out, kind), weights(whole, kind)), kind


def assert_finite(out):
    assert all(torch.isfinite(w).all() for w in weights(out).values())


def assert_preempted(out, name, steps=(5, 6)):
    """ steps: of a run that is held in its sixth step, these; another rank may just enter it. """
    stopped = read_json(out / 'preempted.json')
    assert stopped['signal'] == name and stopped['step'] in steps, 'at once'
    assert names(out)[0] == stopped['step']


# ---- texts

def corpus(path, n=400):
    rng = np.random.default_rng(0)
    words = ('red blue small old man woman child dog cat runs sits eats jumps street house park '
             'river market near the').split()
    lines = [f'{" ".join(rng.choice(words, 12))} number {i}' for i in range(n)]
    path.write_text('\n'.join(lines) + '\n')
    return path
