""" Many processes are one run: the same losses and weights whatever their number and launcher, and
the way they share the model. """
import shutil

import pytest
import torch

from base.machine import pick_device
from launch import TINY, Job, log, run_each, saved, weights
from runs import checkpoint, preflight

EXACT = ['--dropout=0', '--ema_decay=0.9']
LOSSES = ('loss', 'text_loss', 'latent_loss', 'causal_nats_per_token', 'grad_norm', 'val_text',
          'val_causal', 'val_latent')


@pytest.fixture(scope='module')
def alone(dataset, tmp_path_factory):
    """ One process, micro-batches of 8, accumulation 2. """
    out = tmp_path_factory.mktemp('runs') / 'alone'
    job = Job(dataset, out, *EXACT, '--global_batch=16', '--keep=9')
    assert job.wait() == [0], job.err()
    assert '16 rows a step: 1 processes x 2 micro-steps x 8 rows' in job.out()
    return out


@pytest.fixture(scope='module')
def sharded(dataset, tmp_path_factory):
    """ Four processes, which share parameters and moments out. """
    out = tmp_path_factory.mktemp('runs') / 'fsdp'
    job = Job(dataset, out, *EXACT, '--parallel=fsdp', '--global_batch=16', '--keep=9', ranks=4)
    assert job.wait() == [0] * 4 and 'Warning' not in job.err(), job.err()
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


# ---- the rows of a step

def test_a_step_has_the_same_rows_on_any_number_of_processes(monkeypatch):
    for world, expected in ((1, (128, 4)), (2, (128, 2)), (4, (128, 1)), (8, (64, 1))):
        monkeypatch.setenv('WORLD_SIZE', str(world))
        assert preflight.share_rows(128, 512) == expected
    assert preflight.share_rows(128, None) == (128, 1)
    for world, n, words in ((3, 512, '512 .* 3 processes'), (1024, 512, '512 .* 1024 processes'),
                            (2, 384, '384 .* 2 processes .* batch_size=128:')):
        monkeypatch.setenv('WORLD_SIZE', str(world))
        with pytest.raises(ValueError, match=words):
            preflight.share_rows(128, n)


# ---- the same run

def test_accumulation_equals_the_large_batch(dataset, alone, tmp_path):
    job = Job(dataset, tmp_path / 'whole', *EXACT, '--batch_size=16')
    assert job.wait() == [0], job.err()
    assert_close(tmp_path / 'whole', alone, 1e-5)


@pytest.mark.parametrize('args', [
    [], ['--batch_size=4', '--global_batch=16'], ['--optimizer=muon'],
    ['--mode=l2t+causal', '--causal_weight=2'],
    ['--mode=t2l:3,l2t:3,unconditional+l2t+t2l', '--max_iters=9', '--eval_interval=3'],
    ['config/atat.py', '--max_iters=6']])
def test_two_processes_equal_one_with_accumulation_two(dataset, alone, tmp_path, args):
    one, of_two = alone, tmp_path / 'two'
    is_other = args and '--batch_size=4' not in args
    if is_other:
        one = tmp_path / 'one'
        assert Job(dataset, one, *EXACT, '--global_batch=16', *args).wait() == [0]
    job = Job(dataset, of_two, *EXACT, *args, ranks=2)
    assert job.wait() == [0, 0], job.err()
    assert 'Warning' not in job.err()
    assert_close(one, of_two, 1e-5)


def test_four_processes_that_share_the_model_out_equal_one(alone, sharded):
    assert_close(alone, sharded, 1e-5)
    shapes = [{name: w.shape for name, w in weights(out).items()} for out in (alone, sharded)]
    assert shapes[0] == shapes[1]


def test_a_learned_importance_may_be_sharded(dataset, tmp_path):
    args = ['config/atat.py', '--curriculum=false', '--mode=unconditional+l2t+t2l',
            '--max_iters=6', '--eval_interval=3']
    jobs = [Job(dataset, tmp_path / kind, *EXACT, *args, f'--parallel={kind}', ranks=2)
            for kind in ('ddp', 'fsdp')]
    assert [job.wait() for job in jobs] == [[0, 0]] * 2, [job.err() for job in jobs]
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
        job = Job(dataset, tmp_path / kind, *EXACT, f'--parallel={kind}', '--dtype=bfloat16',
                  '--batch_size=4', '--global_batch=16', '--eval_interval=3', ranks=2,
                  before=say, after=kept)
        assert job.wait() == [0, 0], job.err()
        found = {line for line in job.out().splitlines() if line.startswith('BLOCK')}
        assert found == {f"BLOCK ['torch.{dtype}']"} and 'KEPT {torch.float32}' in job.out()
    assert_close(tmp_path / 'ddp', tmp_path / 'fsdp', 1e-3)


def test_fsdp_trains_on_its_own_weights_after_an_evaluation_without_a_save(dataset, tmp_path):
    """ FSDP2 keeps what it gathered for an evaluation, until it is told. """
    no_save = 'from runs import resume\nresume.State.save = lambda *args: None'
    for kind in ('ddp', 'fsdp'):
        job = Job(dataset, tmp_path / kind, *EXACT, f'--parallel={kind}', '--eval_interval=3',
                  ranks=2, before=no_save)
        assert job.wait() == [0, 0], job.err()
    assert not checkpoint.steps(tmp_path / 'fsdp')
    assert_close(tmp_path / 'ddp', tmp_path / 'fsdp', 1e-5)


@pytest.mark.parametrize('n_gpus, device', [(4, 'cuda:3'), (1, None)])
def test_a_process_takes_its_own_gpu(monkeypatch, n_gpus, device):
    def empty(size, device):
        if int(device[5:]) >= n_gpus:
            raise RuntimeError('CUDA error: invalid device ordinal')
    monkeypatch.setattr(torch, 'empty', empty)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: n_gpus)
    monkeypatch.setenv('LOCAL_RANK', '3')
    if device:
        assert pick_device('auto') == pick_device('cuda') == device
    else:
        with pytest.raises(ValueError, match="device='cuda:3' .* a machine with 1 GPUs"):
            pick_device('auto')


@pytest.mark.parametrize('name', ['mps', 'xpu', 'meta', 'gpu', 'cuda:', 'cuda:x', 'cpu:0'])
def test_another_device_is_refused_without_a_word_on_gpus(name):
    with pytest.raises(ValueError, match=f"device='{name}' is of a kind ") as error:
        pick_device(name)
    assert 'GPU' not in str(error.value)
    assert pick_device(torch.device('cpu')) == 'cpu'


@pytest.mark.parametrize('source, kind, ranks', [
    ('sharded', 'ddp', 1), ('sharded', 'ddp', 2), ('sharded', 'fsdp', 2), ('alone', 'fsdp', 2)])
def test_a_checkpoint_goes_on_with_any_number_of_processes(
        request, dataset, alone, tmp_path, source, kind, ranks):
    source, out = request.getfixturevalue(source), tmp_path / 'run'
    shutil.copytree(source, out, ignore=shutil.ignore_patterns('step-00000012', '*.jsonl'))
    job = Job(dataset, out, *EXACT, f'--parallel={kind}', '--global_batch=16', ranks=ranks)
    assert job.wait() == [0] * ranks, job.err()
    assert 'going on from' in job.out() and f'{ranks} x cpu' in job.out()
    assert_close(alone, out, 1e-5, first=9)

    ours, theirs = weights(out, 'ema'), weights(alone, 'ema')
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)
    ours, theirs = (saved(run / 'step-00000012')['optimizer'] for run in (out, alone))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], x, atol=1e-5) for name, x in theirs.items())


def test_preflight_says_what_it_found_and_builds_nothing(dataset, tmp_path):
    here = ['train.py', f'--dataset={dataset}', *TINY, '--preflight_only=true',
            f'--out_dir={tmp_path}/run']
    (code, out, err), (_, kept, _), (full, _, why) = run_each(
        here, [*here, '--keep=1000', '--eval_interval=5', '--max_iters=18'],
        [*here, '--keep=1000000', '--max_iters=1e9', '--eval_interval=1'])
    assert code == 0 and not err and not (tmp_path / 'run').exists()
    ticks = [line.split()[1] for line in out.splitlines() if line.startswith('✓')]
    assert ticks == ['data', 'model', 'batch', 'cost', 'device', 'disk']
    assert '1 x 16' in out and ' for 3 checkpoints to come' in out
    assert ' for 4 checkpoints to come' in kept, 'no more than are made: 5, 10, 15, 18'
    assert full == 4 and why.count('\n') == 1 and 'checkpoints to come need' in why


def test_a_new_mode_is_no_spike(dataset, tmp_path):
    """ Norms are many times larger from the first step of another loss on: the guard begins its
    history anew. """
    out = tmp_path / 'run'
    job = Job(dataset, out, '--mode=l2t:70,t2l', '--latent_weight=3e4', '--max_iters=76',
              '--eval_interval=1000', '--log_interval=5')
    assert job.wait() == [0], job.err()
    entries = log(out)
    assert entries[75, False]['grad_norm'] > 20 * entries[70, False]['grad_norm']
    assert entries[76, False]['skipped'] == 0
