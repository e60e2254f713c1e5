""" Numbers that are not finite, leaps of the gradient, and weights that must not be saved. """
import shutil
import signal

import numpy as np
import pytest

from data import PackedDataset, lengths, row_order
from faulty import (DIGEST, assert_finite, assert_nothing_moved, assert_same_run, hook, infinite,
                    n_digests, names, skips)
from launch import Job, cut, forge_file, log, same, train_each, weights

EVERY_STEP = '--eval_interval=1 --keep=99'


@pytest.mark.parametrize('step, first, n_rows, rank', [
    pytest.param(6, 8 + 3, 16, 1, id='fault_01_one_rank'),
    pytest.param(4, 2 * 8 + 5, 48, 0, id='fault_03_a_middle_micro_batch')])
def test_fault_01_and_03_nan_in_a_row_skips_the_step_once_on_all_ranks(
        dataset, tmp_path, step, first, n_rows, rank):
    # a copy of the dataset where one latent row is NaN: `first` rows into the global batch
    data, out = shutil.copytree(dataset, tmp_path / 'data'), tmp_path / 'run'
    row, = row_order(len(PackedDataset(dataset, 'train')), 0, step * n_rows + first, 1)
    path = data / 'train-00000.latents.npy'
    latents = np.load(path, mmap_mode='r+')
    latents[row] = np.nan
    latents.flush()
    forge_file(data, path.name, path.read_bytes())

    # it ends on the bad step: saves what did not move
    args = f'{EVERY_STEP} --global_batch={n_rows}'
    job = Job(data, out, args, f'--max_iters={step + 1}', ranks=2, after=DIGEST).ends()
    skip, = skips(out)
    where, = skip['where']
    assert skip['step'] == step + 1 and skip['why'] == 'loss' and where['rank'] == rank
    assert row in where['rows'] and len(where['rows']) == 8
    assert n_digests(job) == 1, 'the ranks hold different weights'
    assert_nothing_moved(out, step, step + 1)

    # and goes on
    job = Job(data, out, args, ranks=2, after=DIGEST).ends()
    assert n_digests(job) == 1 and log(out)[12, False]['skipped'] == 1
    assert_finite(out)


@pytest.mark.parametrize('args', ['', '--parallel=fsdp', '--optimizer=muon'])
def test_fault_02_an_infinite_gradient_with_a_finite_loss(dataset, tmp_path, args):
    out, is_sharded = tmp_path / 'run', 'fsdp' in args
    spoil = hook({6: 'inf'}, rank=1) if is_sharded else infinite(6, rank=1)
    job = Job(dataset, out, EVERY_STEP, '--max_iters=7', args, ranks=2, before=spoil, after=DIGEST)
    job.ends()
    skip, = skips(out)
    assert skip['step'] == 7 and skip['why'] == 'gradient' and np.isfinite(float(skip['loss']))
    if not is_sharded:                                     # else each rank holds its share
        assert skip['grad_norm'] == 'inf' and n_digests(job) == 1
    assert_nothing_moved(out, 6, 7)


def test_fault_04_a_finite_spike_is_skipped_above_the_threshold_only_also_after_a_resume(
        dataset, tmp_path):
    args = '--max_iters=82 --eval_interval=70 --dropout=0'
    train_each(dataset, {tmp_path / 'clean': [args]})
    norms = [e['grad_norm'] for e in log(tmp_path / 'clean').values() if 'grad_norm' in e]

    # step 77 is 9.5 times the median of the 64 before; step 81 10.8 times, and 77 is among them
    factors = {76: float(9.5 * np.median(norms[12:76]) / norms[76]),
               80: float(10.8 * np.median(norms[16:80]) / norms[80])}
    whole, cut_off, off = (tmp_path / name for name in ('whole', 'cut', 'off'))
    Job(dataset, whole, args, before=hook(factors)).ends()
    skip, = skips(whole)
    assert skip['step'] == 81 and skip['why'] == 'spike', skip

    # as if it had been killed after 70
    cut(whole, cut_off, 'step-00000070')
    Job(dataset, cut_off, args, before=hook(factors, offset=70)).ends()
    assert [skip['step'] for skip in skips(cut_off)] == [81]
    assert same(weights(cut_off), weights(whole))

    # and with a larger threshold
    off = cut(whole, off, 'step-00000070')
    Job(dataset, off, args, '--guard=1e9', before=hook(factors, offset=70)).ends()
    assert not skips(off)


def test_a_median_of_zero_makes_no_step_a_spike(dataset, tmp_path):
    """ Most steps of t2l beside cut texts have no loss, so their gradient is exactly 0. """
    before = """
import torch
from runs import resume
zero = property(lambda self: torch.zeros(64), lambda self, norms: None)
resume.State.history = zero
"""
    Job(dataset, tmp_path / 'run', '--max_iters=4', before=before).ends()
    assert not skips(tmp_path / 'run')


def test_a_new_mode_is_no_spike(dataset, tmp_path):
    """ Norms are many times larger from the first step of another loss on: the guard begins its
    history anew. """
    out = tmp_path / 'run'
    Job(dataset, out, '--mode=l2t:70,t2l --latent_weight=3e4 --max_iters=76',
        '--eval_interval=1000 --log_interval=5').ends()
    entries = log(out)
    assert entries[75, False]['grad_norm'] > 20 * entries[70, False]['grad_norm']
    assert entries[76, False]['skipped'] == 0


def test_fault_05_endless_nan_stops_the_run_with_a_finite_checkpoint(dataset, tmp_path):
    out = tmp_path / 'run'
    endless = hook(dict.fromkeys(range(6, 99), 'nan'))
    job = Job(dataset, out, '--max_iters=60 --log_interval=3', ranks=2, before=endless).ends(3)
    assert 'steps in a row' in job.error() and not job.err(1)
    assert max(step for step, _ in log(out)) <= 6 + 10 + 3
    assert names(out)[0] == 4
    assert_finite(out)


@pytest.mark.parametrize('ranks, args', [(1, ''), (2, '--parallel=fsdp')])
def test_weights_that_are_not_finite_are_not_saved_and_end_the_run(dataset, tmp_path, ranks, args):
    out = tmp_path / 'run'
    job = Job(dataset, out, '--guard=0', args, ranks=ranks, before=hook({9: 'nan'})).ends(3)
    assert job.error().startswith('error: step-00000012 is not saved: ')
    assert 'newest checkpoint is step 8' in job.error()
    assert names(out) == [8, 4]
    assert_finite(out)


def test_a_rank_that_crashes_as_all_leave_changes_nothing_for_the_others(dataset, tmp_path):
    crash = """
import os, signal, torch.distributed
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
if os.environ['RANK'] == '1':
    torch.distributed.barrier = crash
"""
    job = Job(dataset, tmp_path / 'run', '--guard=0', ranks=2, before=hook({9: 'nan'}) + crash)
    job.ends(3, -signal.SIGSEGV)
    assert job.error().startswith('error: step-00000012 is not saved: ')


@pytest.mark.parametrize('factors, code', [({}, 0), ({9: 'nan'}, 3)])
def test_nothing_is_taken_apart_once_all_have_left(dataset, tmp_path, factors, code):
    """ Destructors of torch and gloo, whose threads still run, would crash now and then. """
    crash = """
import atexit, os, signal, sys, torch.distributed
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
torch.distributed.destroy_process_group = crash
atexit.register(crash)                       # called last: after what the script has registered
"""
    Job(dataset, tmp_path / 'run', '--guard=0', ranks=2, before=hook(factors) + crash).ends(code)


def test_nothing_is_saved_on_a_skipped_step_but_at_the_next_evaluation(dataset, tmp_path):
    out, args = tmp_path / 'run', '--keep=9 --log_interval=2'
    Job(dataset, out, args, before=hook({3: 'nan', 4: 'nan'})).ends()
    assert names(out) == [12, 8]
    entries = log(out)
    assert [step for step, is_evaluation in entries if is_evaluation] == [4, 8, 12]
    assert entries[6, False]['skipped'] == 2

    # a run that goes on from there is the same run
    cut(out, tmp_path / 'cut', 'step-00000008')
    train_each(dataset, {tmp_path / 'cut': [args]})
    assert log(tmp_path / 'cut') == {key: entry for key, entry in entries.items() if key[0] > 8}
    assert same(weights(out), weights(tmp_path / 'cut'))


def test_fault_29_guard_off_against_on(dataset, tmp_path):
    args = '--max_iters=80 --eval_interval=40'                 # beyond the 64 norms of the history
    train_each(dataset, {tmp_path / 'on': [args], tmp_path / 'off': [args, '--guard=0']})
    assert_same_run(tmp_path / 'on', tmp_path / 'off')
    assert log(tmp_path / 'on')[80, False]['skipped'] == 0


def test_a_validation_that_is_nan_or_worse_than_a_guess_is_named(dataset, tmp_path):
    nan = """
import torch, diffusion
diffusion.Loss.validate = lambda *args: torch.full((5,), float('nan'))
"""
    job = Job(dataset, tmp_path / 'nan', '--max_iters=1', before=nan).ends()
    assert 'warning: val_text nan is not finite' in job.err()
    job = Job(dataset, tmp_path / 'far', '--learning_rate=10').ends()
    assert 'or worse than a guess' in job.err()
    val = PackedDataset(dataset, 'val')                        # the first 16 texts, each with EOS
    guess = np.log(val.vocab_size) * 32 / (lengths(val)[:16] + 1).mean()
    assert f'nats per token (a guess: {guess:.2f})' in job.out()
