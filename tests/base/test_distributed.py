""" Many processes are one run: the same losses and weights whatever their number and launcher, and
the way they share the model. """
import shutil

import pytest
import torch

from launch import Job, log, saved, weights
from runs import checkpoint

EXACT = '--dropout=0 --ema_decay=0.9'
LOSSES = ('loss', 'text_loss', 'latent_loss', 'causal_nats_per_token', 'grad_norm', 'val_text',
          'val_causal', 'val_latent')


@pytest.fixture(scope='module')
def alone(dataset, tmp_path_factory):
    """ One process, micro-batches of 8, accumulation 2. """
    out = tmp_path_factory.mktemp('runs') / 'alone'
    job = Job(dataset, out, EXACT, '--global_batch=16 --keep=9').ends()
    assert '16 rows a step: 1 processes x 2 micro-steps x 8 rows' in job.out()
    return out


@pytest.fixture(scope='module')
def sharded(dataset, tmp_path_factory):
    """ Four processes, which share parameters and moments out. """
    out = tmp_path_factory.mktemp('runs') / 'fsdp'
    job = Job(dataset, out, EXACT, '--parallel=fsdp --global_batch=16 --keep=9', ranks=4).ends()
    assert 'Warning' not in job.err(), job.err()
    return out


def assert_close(a, b, rel, first=1):
    """ Two runs have the same losses, from step `first` on. """
    a, b = log(a), log(b)
    steps = [key for key in a if key[0] >= first]
    assert steps and set(steps) <= b.keys()
    for key in steps:
        assert a[key].get('modes') == b[key].get('modes')
        for name in LOSSES:
            if name in a[key]:
                assert b[key][name] == pytest.approx(a[key][name], rel=rel), (key, name)


# ---- the same run

def test_accumulation_equals_the_large_batch(dataset, alone, tmp_path):
    Job(dataset, tmp_path / 'whole', EXACT, '--batch_size=16').ends()
    assert_close(tmp_path / 'whole', alone, 1e-5)


@pytest.mark.parametrize('args', [
    '--optimizer=muon', '--mode=l2t+causal --causal_weight=2',
    '--mode=t2l:3,l2t:3,unconditional+l2t+t2l --max_iters=9 --eval_interval=3',
    'config/atat.py --max_iters=6'])
def test_two_processes_equal_one_with_accumulation_two(dataset, tmp_path, args):
    one, two = tmp_path / 'one', tmp_path / 'two'
    Job(dataset, one, EXACT, args, '--global_batch=16').ends()
    job = Job(dataset, two, EXACT, args, ranks=2).ends()
    assert 'Warning' not in job.err()
    assert_close(one, two, 1e-5)


@pytest.mark.parametrize('args', ['', '--batch_size=4 --global_batch=16'])
def test_two_processes_with_and_without_accumulation_equal_one(dataset, alone, tmp_path, args):
    job = Job(dataset, tmp_path / 'two', EXACT, args, ranks=2).ends()
    assert 'Warning' not in job.err()
    assert_close(alone, tmp_path / 'two', 1e-5)


def test_four_processes_that_share_the_model_out_equal_one(alone, sharded):
    assert_close(alone, sharded, 1e-5)
    shapes = [{name: w.shape for name, w in weights(out).items()} for out in (alone, sharded)]
    assert shapes[0] == shapes[1]


def test_a_learned_importance_may_be_sharded(dataset, tmp_path):
    args = ('config/atat.py --curriculum=false --mode=unconditional+l2t+t2l --max_iters=6 '
            '--eval_interval=3')
    for kind in ('ddp', 'fsdp'):
        Job(dataset, tmp_path / kind, EXACT, args, f'--parallel={kind}', ranks=2).ends()
    assert_close(tmp_path / 'ddp', tmp_path / 'fsdp', 1e-5)


def test_in_bfloat16_fsdp_gathers_its_blocks_in_bfloat16_and_stays_close_to_ddp(dataset, tmp_path):
    """ Also over two micro-steps and with an evaluation; what is kept is float32. """
    say = """
import model
forward = model.Block.forward
def watched(self, *args):
    if next(self.parameters()).device.type != 'meta':
        print('BLOCK', sorted({str(p.dtype) for p in self.parameters()}))
    return forward(self, *args)
model.Block.forward = watched
"""
    kept = "print('KEPT', {p.dtype for p in [*g['state'].parameters, *g['state'].ema]})"
    for kind, dtype in (('ddp', 'float32'), ('fsdp', 'bfloat16')):
        job = Job(dataset, tmp_path / kind, EXACT, f'--parallel={kind} --dtype=bfloat16',
                  '--batch_size=4 --global_batch=16 --eval_interval=3', ranks=2, before=say,
                  after=kept).ends()
        found = {line for line in job.out().splitlines() if line.startswith('BLOCK')}
        assert found == {f"BLOCK ['torch.{dtype}']"} and 'KEPT {torch.float32}' in job.out()
    assert_close(tmp_path / 'ddp', tmp_path / 'fsdp', 1e-3)


def test_fsdp_trains_on_its_own_weights_after_an_evaluation_without_a_save(dataset, tmp_path):
    """ FSDP2 keeps what it gathered for an evaluation, until it is told. """
    no_save = 'from runs import resume\nresume.State.save = lambda *args: None'
    for kind in ('ddp', 'fsdp'):
        Job(dataset, tmp_path / kind, EXACT, f'--parallel={kind} --eval_interval=3', ranks=2,
            before=no_save).ends()
    assert not checkpoint.steps(tmp_path / 'fsdp')
    assert_close(tmp_path / 'ddp', tmp_path / 'fsdp', 1e-5)


@pytest.mark.parametrize('source, kind, ranks', [
    ('sharded', 'ddp', 1), ('sharded', 'ddp', 2), ('sharded', 'fsdp', 2), ('alone', 'fsdp', 2)])
def test_a_checkpoint_goes_on_with_any_number_of_processes(
        request, dataset, alone, tmp_path, source, kind, ranks):
    source, out = request.getfixturevalue(source), tmp_path / 'run'
    shutil.copytree(source, out, ignore=shutil.ignore_patterns('step-00000012', '*.jsonl'))
    job = Job(dataset, out, EXACT, f'--parallel={kind} --global_batch=16', ranks=ranks).ends()
    assert 'going on from' in job.out() and f'{ranks} x cpu' in job.out()
    assert_close(alone, out, 1e-5, first=9)

    torch.testing.assert_close(weights(out, 'ema'), weights(alone, 'ema'), rtol=1e-5, atol=1e-4)
    ours, theirs = (saved(run / 'step-00000012')['optimizer'] for run in (out, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
