"""
Does a card compute what the CPU computes? train.py runs on both with the same seed, and each number
of the two logs is compared: losses, gradient norms and validation losses, relative to their size.

At its start a network is nearly blind: all gates and heads are 0, so a break in the attention moves
the loss of the first steps by less than rounding does later. So N(0, .1^2) is added to all weights,
and the rates are large: five steps at .005.

The largest difference on a CPU, four modes, float32:
    the same again, another number of threads      0 to 1e-7
    outputs of the linear maps times 1 + 1e-6 N(0, 1)   3e-5
    products in TF32, in bfloat16                  2.8e-3, 4.9e-3
    the smallest of ten breaks (35b8b4c:tests/test_bench.py)   1.2e-2

In float32 a card is asked for whole float32 products, so TOLERANCE can be small. In bfloat16 it
cannot: there the causal breaks are for tests/test_cuda.py, which compares attention by itself.
"""
import contextlib
import math
from unittest.mock import patch

import torch

from benchmarks.random_data import write_dataset
from benchmarks.trainings import log_of
from model import Model

TOLERANCE = {'float32': 1e-3, 'bfloat16': 5e-2}
TOLERANCES = {'importance': {'float32': 1e-3, 'bfloat16': 1e-1}}   # masks differ by rounding
COMPARED = ('loss', 'grad_norm', 'val_text', 'val_causal', 'val_latent')

TINY = ['--depth=2', '--width=64', '--heads=2', '--latent_tokens=2', '--batch_size=16',
        '--warmup_iters=1', '--learning_rate=.005', '--t_min=.1']
OFTEN = ['--eval_interval=5', '--eval_rows=32', '--log_interval=1']
TEXT = ['--streams=text,', '--mode=unconditional']
SETS = {
    'four modes': ['--mode=unconditional+l2t+t2l+causal'],
    'Muon': ['--mode=l2t+causal', '--optimizer=muon'],
    'a decoder': ['--streams=text,', '--mode=causal', '--text_clock=false'],
    'latents alone': ['--streams=latent,', '--mode=unconditional', '--latent_schedule=rf',
                      '--latent_target=flow'],
    'gidd': [*TEXT, '--text_process=gidd'],
    'hdlm': [*TEXT, '--text_process=hdlm', '--clusters=8'],
    'importance': ['--text_process=atat', '--importance=hybrid', '--masking=inverse',
                   '--curriculum=true'],
    # one program for training: one block, in which rows are of both kinds and both streams are read
    'compiled': ['--mode=unconditional+causal', '--depth=1', '--compile=true'],
}


@contextlib.contextmanager
def awake():
    """ Inside, a new network has no gate and no head at 0, and float32 is not rounded to TF32. """
    init_weights = Model.init_weights

    @torch.no_grad()
    def init_and_shift(model):
        # after the usual weights, with their gates and heads at 0
        init_weights(model)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=.1)

    # train.py makes the network and sets the precision by itself, so both are replaced while it
    # runs
    torch.set_float32_matmul_precision('highest')
    with (patch.object(Model, 'init_weights', init_and_shift),
          patch.object(torch, 'set_float32_matmul_precision', lambda _: None)):
        yield


def numbers(folder, arguments):
    """ {(step, name): value} that five steps of train.py log. folder: for the data. """
    data = write_dataset(f'{folder}/agreement', V=300, L=17, D=12, n=512, n_val=64)
    with awake():
        return numbers_in(log_of([f'--dataset={data}', *TINY, *arguments], 5, *OFTEN))


def numbers_in(entries):
    """ {(step, name): value} of the lines of a log; of a step that ran twice, the second time. """
    return {(entry['step'], name): entry[name] for entry in entries
            for name in COMPARED if name in entry}


def difference(ours, theirs):
    """ (largest |a - b| / max(|a|, |b|), where it is); inf where one lacks a number, or a number is
    not finite. """
    # a log that lacks a line has failed, however near its other numbers are
    if ours.keys() != theirs.keys() or not ours:
        return math.inf, 'not the same entries'

    found = []
    for (step, name), a in ours.items():
        b = theirs[step, name]

        # relative to the larger one; a difference that is not finite is a failure
        relative = math.inf
        if math.isfinite(a - b):
            relative = abs(a - b) / max(abs(a), abs(b), 1e-9)
        found.append((relative, f'{name} of step {step}'))
    return max(found)


def disagreements(folder, device):
    """ Prints a row for each set and dtype, against the CPU in float32. Returns the rows that
    differ by more than their tolerance, in words. """
    wrong = []
    print(f'\n{"against the CPU":<36}{"differs by":>12}   in')
    for name, arguments in SETS.items():
        if name == 'compiled' and device == 'cpu':         # a minute of C++; tests/ compiles there
            continue

        # float32 on a CPU, not compiled, is what all others are compared with
        cpu = numbers(folder, [*arguments, '--device=cpu', '--dtype=float32', '--compile=false'])
        for dtype, tolerance in TOLERANCES.get(name, TOLERANCE).items():
            # on the device each dtype has its own tolerance
            other = numbers(folder, [*arguments, f'--device={device}', f'--dtype={dtype}'])
            found, where = difference(cpu, other)
            label = f'{name}, {dtype}'
            if found > tolerance:
                wrong.append(label)
                where += '  WRONG'
            print(f'{label:<36}{found:>12.1e}   {where}', flush=True)
    return wrong
