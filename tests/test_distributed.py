""" Many processes are one run: the same losses and weights whatever the number of ranks and the way they share the model. """
import json
import re

import pytest
import torch

from runs import checkpoint
from launch import TINY, Job, log, run_each, saved, weights

EXACT = ['--dropout=0', '--ema_decay=0.9']


@pytest.fixture(scope='module')
def alone(dataset, tmp_path_factory):
    """ One process, micro-batches of 8, accumulation 2. """
    out = tmp_path_factory.mktemp('runs') / 'alone'
    job = Job(dataset, out, *EXACT, '--global_batch=16', '--keep=9')
    assert job.wait() == [0], job.err()
    return out


@pytest.fixture(scope='module')
def sharded(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'fsdp'
    job = Job(dataset, out, *EXACT, '--parallel=fsdp', '--keep=9', ranks=2)
    assert job.wait() == [0, 0], job.err()
    return out


def assert_close(a, b, rel):
    a, b = log(a), log(b)
    assert a.keys() == b.keys()
    for key in a:
        for name in ('loss', 'text_loss', 'latent_loss', 'causal_nats_per_token', 'grad_norm', 'val_text', 'val_causal', 'val_latent'):
            assert name not in a[key] or b[key][name] == pytest.approx(a[key][name], rel=rel), (key, name)
        assert a[key].get('modes') == b[key].get('modes')


@pytest.mark.parametrize('args', [[], ['--optimizer=muon'], ['--mode=l2t+causal', '--causal_weight=2'],
                                  ['--mode=t2l:3,l2t:3,unconditional+l2t+t2l', '--max_iters=9', '--eval_interval=3']])
def test_two_processes_equal_one_with_accumulation_two(dataset, alone, tmp_path, args):
    one = alone
    if args:
        one = tmp_path / 'one'
        assert Job(dataset, one, *EXACT, '--global_batch=16', *args).wait() == [0]
    job = Job(dataset, tmp_path / 'two', *EXACT, *args, ranks=2)
    assert job.wait() == [0, 0], job.err()
    assert 'Warning' not in job.err()
    assert_close(one, tmp_path / 'two', 1e-5)


@pytest.mark.parametrize('args', [['--optimizer=muon'], ['--parallel=fsdp']])
def test_processes_on_unlike_machines_compute_in_what_all_of_them_have(dataset, tmp_path, args):
    unlike = """
import os, torch
torch.backends.mkldnn.is_available = lambda: True
torch.cpu.get_capabilities = lambda: {'avx512_bf16': os.environ['RANK'] == '0'}
"""
    job = Job(dataset, tmp_path / 'run', *EXACT, '--dtype=auto', *args, ranks=2, before=unlike, after="print('IN', g['dtype'])")
    assert job.wait() == [0, 0], job.err()
    assert all('IN float32\n' in job.out(rank) for rank in range(2))
    assert 'rank 0 computes in float32' in job.out()
    assert json.load(open(tmp_path / 'run' / 'config.json'))['dtype'] == 'float32'


def test_accumulation_over_two_processes_equals_one(dataset, alone, tmp_path):
    job = Job(dataset, tmp_path / 'two', *EXACT, '--batch_size=4', '--global_batch=16', ranks=2)
    assert job.wait() == [0, 0], job.err()
    a, b = log(alone), log(tmp_path / 'two')
    for key in a:
        if 'loss' in a[key]:
            assert b[key]['loss'] == pytest.approx(a[key]['loss'], rel=1e-5)


def test_fsdp_equals_ddp(alone, sharded):
    assert_close(alone, sharded, 1e-5)                                   # which two ddp ranks equal
    shapes = [{name: tuple(w.shape) for name, w in weights(out).items()} for out in (alone, sharded)]
    assert shapes[0] == shapes[1]


def test_in_bfloat16_fsdp_gathers_its_blocks_in_bfloat16_and_stays_close_to_ddp(dataset, tmp_path):
    """ Also over two micro-steps and with an evaluation; what is kept is float32. """
    say = """
import model
forward = model.Block.forward
def watched(self, *args):
    if next(self.parameters()).device.type != 'meta':                    # not the sketch whose operations are counted
        print('BLOCK', sorted({str(p.dtype) for p in self.parameters()}))
    return forward(self, *args)
model.Block.forward = watched
"""
    blocks = {'ddp': "['torch.float32']", 'fsdp': "['torch.bfloat16']"}
    for kind, dtypes in blocks.items():
        job = Job(dataset, tmp_path / kind, *EXACT, f'--parallel={kind}', '--dtype=bfloat16', '--batch_size=4', '--global_batch=16',
                  '--eval_interval=3', ranks=2, before=say, after="print('KEPT', {p.dtype for p in [*g['state'].parameters, *g['state'].ema]})")
        assert job.wait() == [0, 0], job.err()
        assert {line for line in job.out().splitlines() if line.startswith('BLOCK')} == {f'BLOCK {dtypes}'}
        assert 'KEPT {torch.float32}' in job.out()
    assert_close(tmp_path / 'ddp', tmp_path / 'fsdp', 1e-3)


def test_fsdp_trains_on_its_own_weights_after_an_evaluation_without_a_save(dataset, tmp_path):
    """ FSDP2 keeps what it gathered for an evaluation, until it is told. """
    no_save = """
from runs import resume
resume.State.save = lambda *args: None
"""
    for kind in ('ddp', 'fsdp'):
        job = Job(dataset, tmp_path / kind, *EXACT, f'--parallel={kind}', '--eval_interval=3', ranks=2, before=no_save)
        assert job.wait() == [0, 0], job.err()
    assert not checkpoint.steps(tmp_path / 'fsdp')
    assert_close(tmp_path / 'ddp', tmp_path / 'fsdp', 1e-5)


@pytest.mark.parametrize('kind, ranks', [('ddp', 1), ('ddp', 2), ('fsdp', 2)])
def test_a_checkpoint_of_fsdp_goes_on_in_any_other_way_and_back(dataset, alone, sharded, tmp_path, kind, ranks):
    out = tmp_path / 'run'
    source = sharded if kind == 'ddp' else alone
    (out / 'data').mkdir(parents=True)
    for name in ('config.json', 'data/meta.json', 'data/tokenizer.json', 'data/latent_stats.npz', 'data/encoder.npz'):
        (out / name).write_bytes((source / name).read_bytes())
    (out / 'step-00000008').mkdir()
    for path in (source / 'step-00000008').iterdir():
        (out / 'step-00000008' / path.name).write_bytes(path.read_bytes())
    job = Job(dataset, out, *EXACT, f'--parallel={kind}', '--global_batch=16', ranks=ranks)
    assert job.wait() == [0] * ranks and 'going on from' in job.out(), job.err()
    for step in range(9, 13):
        assert log(out)[step, False]['loss'] == pytest.approx(log(alone)[step, False]['loss'], rel=1e-5)
    ours, theirs = weights(out, 'ema'), weights(alone, 'ema')
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)
    moments = [saved(o / 'step-00000012')['optimizer'] for o in (out, alone)]
    assert all(torch.allclose(moments[0][name], x, atol=1e-5) for name, x in moments[1].items() if name.startswith('exp_avg.'))


ADAPTIVE = ['--importance=hybrid', '--masking=proportional', '--curriculum=true', '--eval_interval=3', '--mode=unconditional+l2t+t2l', '--max_iters=6']


def test_a_learned_importance_is_the_same_over_two_processes_and_sharded(dataset, tmp_path):
    jobs = [Job(dataset, tmp_path / 'one', *EXACT, *ADAPTIVE, '--global_batch=16'), Job(dataset, tmp_path / 'ddp', *EXACT, *ADAPTIVE, ranks=2),
            Job(dataset, tmp_path / 'fsdp', *EXACT, *ADAPTIVE, '--parallel=fsdp', ranks=2)]
    assert [code for job in jobs for code in job.wait()] == [0] * 5, [job.err() for job in jobs]
    assert_close(tmp_path / 'one', tmp_path / 'ddp', 1e-5)
    assert_close(tmp_path / 'ddp', tmp_path / 'fsdp', 1e-5)
    assert weights(tmp_path / 'fsdp').keys() == weights(tmp_path / 'ddp').keys()


def test_preflight_says_what_it_found_and_builds_nothing(dataset, tmp_path):
    here = ['train.py', f'--dataset={dataset}', *TINY, '--preflight_only=true']
    here += [f'--out_dir={tmp_path}/run']
    (rc, out, err), (_, out_keep, _), (rc_full, out_full, err_full) = run_each(
        here, [*here, '--keep=1000', '--eval_interval=5', '--max_iters=18'],
        [*here, '--keep=1000000', '--max_iters=1e9', '--eval_interval=1'])
    assert rc == 0 and not err and not (tmp_path / 'run').exists()
    ticks = [line.split()[1] for line in out.splitlines() if line.startswith('✓')]
    assert ticks == ['data', 'model', 'batch', 'cost', 'device', 'disk', 'processes', 'versions']
    assert '1 x 16' in out and torch.__version__ in out
    assert ' for 3 checkpoints to come' in out and ' for 4 checkpoints to come' in out_keep, 'no more than are made: 5, 10, 15, 18'
    assert rc_full == 4 and err_full.count('\n') == 1 and 'checkpoints to come need' in err_full and 'make room' in err_full


def test_a_disk_too_small_for_a_small_run_is_told_in_units_that_show_it(dataset, tmp_path):
    small_disk = 'import shutil\nshutil.disk_usage = lambda path: shutil._ntuple_diskusage(10 ** 9, 10 ** 9, 12_345)\n'
    jobs = {keep: Job(dataset, tmp_path / f'keep{keep}', f'--keep={keep}', '--eval_interval=1', before=small_disk) for keep in (1, 2)}
    needs = {}
    for keep, job in jobs.items():
        assert job.wait() == [4] and job.err().count('\n') == 1
        count, size = re.search(r'error: (\d+) checkpoints to come need ([\d.]+) GB, ', job.err()).groups()
        assert ' has 1.23e-05 GB: make room' in job.err() and int(count) == keep + 2, 'those kept, the best, the one being written'
        needs[keep] = float(size)
    assert 0 < needs[1] < needs[2]


def test_skips_are_written_with_step_rank_and_rows_and_losses_without_them(dataset, tmp_path):
    before = """
import loss
make, calls = loss.BatchMaker.__call__, []
def poisoned(self, *args):
    b = make(self, *args)
    calls.append(1)
    if len(calls) == 3 and os.environ['RANK'] == '1':
        b['clean'] = b['clean'] * float('nan')
    return b
loss.BatchMaker.__call__ = poisoned
"""
    job = Job(dataset, tmp_path / 'run', '--max_iters=5', '--log_interval=5', ranks=2, before=before)
    assert job.wait() == [0, 0], job.err()
    entry = log(tmp_path / 'run')[5, False]
    skip, = entry['skips']
    assert skip['step'] == 3 and [w['rank'] for w in skip['where']] == [1] and len(skip['where'][0]['rows']) == 8
    assert 0 < entry['loss'] < 10 and 0 < entry['grad_norm'] and entry['skipped'] == 1
    assert 'step      3 skipped: loss' in job.out() and 'rank 1' in job.out()
    for line in open(tmp_path / 'run' / 'training_log.jsonl'):
        raw = json.loads(line, parse_constant=lambda name: pytest.fail(f'{name} is no JSON'))
        assert raw.get('memory_gb', 1) > 0.1


def test_a_new_mode_is_no_spike(dataset, tmp_path):
    """ Norms a thousand times larger from the first step of another loss on: the guard begins its history anew. """
    out = tmp_path / 'run'
    job = Job(dataset, out, '--mode=l2t:70,t2l', '--latent_weight=3e4', '--max_iters=76', '--eval_interval=1000',
              '--log_interval=5')
    assert job.wait() == [0], job.err()
    norms = {step: entry['grad_norm'] for (step, _), entry in log(out).items() if 'grad_norm' in entry}
    assert norms[75] > 20 * norms[70] and log(out)[76, False]['skipped'] == 0


def test_a_log_that_cannot_be_written_does_not_end_the_run(dataset, tmp_path):
    (tmp_path / 'run' / 'training_log.jsonl').mkdir(parents=True)
    job = Job(dataset, tmp_path / 'run', '--max_iters=2')
    assert job.wait() == [0] and 'warning: cannot log in ' in job.err() and 'training_log.jsonl: ' in job.err()


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU: does a step wait for the device?')
def test_no_step_waits_for_the_device(dataset, tmp_path):
    """ Steps 6 to 9 of a run that logs every 20, with every wait an error. """
    watch = """
import torch, loss
forward, calls = loss.Loss.forward, []
def watched(*args):
    calls.append(1)
    torch.cuda.set_sync_debug_mode('error' if 6 <= len(calls) < 10 else 'default')
    return forward(*args)
loss.Loss.forward = watched
"""
    job = Job(dataset, tmp_path / 'run', '--device=cuda', '--dtype=bfloat16', '--max_iters=20', '--log_interval=20', '--eval_interval=20',
              before=watch)
    assert job.wait() == [0], job.err()
