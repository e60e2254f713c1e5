"""
Faults that real runs meet, each injected for real: bytes, signals, limits, several processes.
Nothing in train.py or prepare.py knows of these tests. Where a gradient must go wrong, a hook is
set from outside. Faults 23 and 24 are in test_hostile.py.
"""
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from base.files import read_json
from base.writing import RUN, Claim
from corpora.sources import text_hash
from data import PackedDataset, lengths, row_order
from launch import (HANGS, ROOT, TINY, Job, change_meta, cut, flip, forge_file, held, log, run,
                    run_each, same, saved, texts_in, train, train_each, weights)
from runs import checkpoint, run_folder
from toys import save_encoder, states

TORCHRUN = [sys.executable, '-m', 'torch.distributed.run']
EVERY_STEP = ['--eval_interval=1', '--keep=99']
LONG = ['--max_iters=100000', '--eval_interval=1000000']


# ---- what is not finite

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


def digests(job):
    return {out.split('weights ')[1].strip() for out in map(job.out, range(len(job.processes)))}


def skips(out):
    return [skip for entry in log(out).values() for skip in entry.get('skips', [])]


def assert_nothing_moved(out, a, b):
    """ Between the checkpoints of two steps: weights, average, moments, step counts. """
    a, b = (saved(out / f'step-{n:08d}') for n in (a, b))
    assert all(same(a[kind], b[kind]) for kind in ('model', 'ema', 'optimizer'))


def assert_same_run(out, whole):
    """ The same losses at every step and the same final weights, to the bit. """
    assert log(out) == log(whole)
    assert all(same(weights(out, kind), weights(whole, kind)) for kind in ('model', 'ema'))


def assert_finite(out):
    assert all(torch.isfinite(w).all() for w in weights(out).values())


@pytest.fixture(scope='session')
def finished_by_two(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'two'
    job = Job(dataset, out, ranks=2)
    assert job.wait() == [0, 0], job.err()
    return out


@pytest.mark.parametrize('step, first, args, rank', [
    (6, 8 + 3, ['--global_batch=16'], 1), (4, (1 * 2 + 0) * 8 + 5, ['--global_batch=48'], 0)],
    ids=['fault_01_one_rank', 'fault_03_a_middle_micro_batch'])
def test_fault_01_and_03_nan_in_a_row_skips_the_step_once_on_all_ranks(
        dataset, tmp_path, step, first, args, rank):
    # a copy of the dataset where one latent row is NaN: `first` rows into the global batch
    data, out = shutil.copytree(dataset, tmp_path / 'data'), tmp_path / 'run'
    rows_a_step = int(args[0].partition('=')[2])
    row, = row_order(len(PackedDataset(dataset, 'train')), 0, step * rows_a_step + first, 1)
    latents = np.load(data / 'train-00000.latents.npy', mmap_mode='r+')
    latents[row] = np.nan
    latents.flush()
    forge_file(data, 'train-00000.latents.npy', (data / 'train-00000.latents.npy').read_bytes())

    # it ends on the bad step: saves what did not move
    args = [*EVERY_STEP, *args]
    job = Job(data, out, *args, f'--max_iters={step + 1}', ranks=2, after=DIGEST)
    assert job.wait() == [0, 0], job.err()
    skip, = skips(out)
    where, = skip['where']
    assert skip['step'] == step + 1 and skip['why'] == 'loss' and where['rank'] == rank
    assert row in where['rows'] and len(where['rows']) == 8
    assert len(digests(job)) == 1, 'the ranks hold different weights'
    assert_nothing_moved(out, step, step + 1)
    job = Job(data, out, *args, ranks=2, after=DIGEST)
    assert job.wait() == [0, 0] and len(digests(job)) == 1, job.err()
    assert log(out)[12, False]['skipped'] == 1
    assert_finite(out)


@pytest.mark.parametrize('args', [[], ['--parallel=fsdp'], ['--optimizer=muon']])
def test_fault_02_an_infinite_gradient_with_a_finite_loss(dataset, tmp_path, args):
    out, is_sharded = tmp_path / 'run', args == ['--parallel=fsdp']
    spoil = hook({6: 'inf'}, rank=1) if is_sharded else infinite(6, rank=1)
    job = Job(dataset, out, *EVERY_STEP, '--max_iters=7', *args, ranks=2, before=spoil,
              after=DIGEST)
    assert job.wait() == [0, 0], job.err()
    skip, = skips(out)
    assert skip['step'] == 7 and skip['why'] == 'gradient' and np.isfinite(float(skip['loss']))
    assert is_sharded or skip['grad_norm'] == 'inf'
    assert is_sharded or len(digests(job)) == 1                # sharded, each rank holds its share
    assert_nothing_moved(out, 6, 7)


def test_fault_04_a_finite_spike_is_skipped_above_the_threshold_only_also_after_a_resume(
        dataset, tmp_path):
    args = ['--max_iters=90', '--eval_interval=70', '--dropout=0']
    train_each(dataset, {tmp_path / 'clean': args})
    norms = [e['grad_norm'] for e in log(tmp_path / 'clean').values() if 'grad_norm' in e]

    # step 77 is 9.5 times the median of the 64 before; step 81 10.8 times, and 77 is among them
    factors = {76: float(9.5 * np.median(norms[12:76]) / norms[76]),
               80: float(10.8 * np.median(norms[16:80]) / norms[80])}
    whole, cut_off = tmp_path / 'whole', tmp_path / 'cut'
    assert Job(dataset, whole, *args, before=hook(factors)).wait() == [0]
    skip, = skips(whole)
    assert skip['step'] == 81 and skip['why'] == 'spike', skip

    # as if it had been killed before 90
    cut(whole, cut_off, 'step-00000070')
    assert Job(dataset, cut_off, *args, before=hook(factors, offset=70)).wait() == [0]
    assert [s['step'] for s in skips(cut_off)] == [81]
    assert same(weights(cut_off), weights(whole))
    off = tmp_path / 'off'
    assert Job(dataset, off, *args, '--guard=1e9', before=hook(factors)).wait() == [0]
    assert not skips(off)


def test_a_median_of_zero_makes_no_step_a_spike(dataset, tmp_path):
    """ Most steps of t2l beside cut texts have no loss, so their gradient is exactly 0. """
    before = """
import torch
from runs import resume
zero = property(lambda self: torch.zeros(64), lambda self, norms: None)
resume.State.history = zero
"""
    assert Job(dataset, tmp_path / 'run', '--max_iters=4', before=before).wait() == [0]
    assert not skips(tmp_path / 'run')


def test_fault_05_endless_nan_stops_the_run_with_a_finite_checkpoint(dataset, tmp_path):
    out = tmp_path / 'run'
    endless = hook(dict.fromkeys(range(6, 99), 'nan'))
    job = Job(dataset, out, '--max_iters=60', '--log_interval=3', ranks=2, before=endless)
    assert job.wait() == [3, 3]
    assert 'steps in a row' in job.err(0) and job.err(0).count('error') == 1
    assert 'Traceback' not in job.err(0) + job.err(1)
    assert max(step for step, _ in log(out)) <= 6 + 10 + 3
    assert checkpoint.steps(out)[0].name == 'step-00000004'
    assert_finite(out)


@pytest.mark.parametrize('ranks, args', [(1, []), (2, ['--parallel=fsdp'])])
def test_weights_that_are_not_finite_are_not_saved_and_end_the_run(dataset, tmp_path, ranks, args):
    out = tmp_path / 'run'
    job = Job(dataset, out, '--guard=0', *args, ranks=ranks, before=hook({9: 'nan'}))
    assert job.wait() == [3] * ranks, [job.err(rank) for rank in range(ranks)]
    line, = [line for line in job.err().splitlines() if line.startswith('error')]
    assert line.startswith('error: step-00000012 is not saved: ')
    assert 'newest checkpoint is step 8' in line and 'Traceback' not in job.err()
    assert [p.name for p in checkpoint.steps(out)] == ['step-00000008', 'step-00000004']
    assert_finite(out)


def test_a_rank_that_crashes_as_all_leave_changes_nothing_for_the_others(dataset, tmp_path):
    out = tmp_path / 'run'
    crash = """
import os, signal, torch.distributed
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
if os.environ['RANK'] == '1':
    torch.distributed.barrier = crash
"""
    job = Job(dataset, out, '--guard=0', ranks=2, before=hook({9: 'nan'}) + crash)
    assert job.wait() == [3, -signal.SIGSEGV], job.err()
    line, = [line for line in job.err().splitlines() if line.startswith('error')]
    assert line.startswith('error: step-00000012 is not saved: ')


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
    job = Job(dataset, tmp_path / 'run', '--guard=0', ranks=2, before=hook(factors) + crash)
    assert job.wait() == [code, code], job.err()


def test_a_prepare_that_fails_takes_nothing_apart_either(tmp_path):
    (tmp_path / 'empty.txt').touch()
    crash = """
import atexit, os, signal
atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))
"""
    job = Job(None, tmp_path / 'job', f'--input={tmp_path}/empty.txt', '--encoder=none',
              f'--out={tmp_path}/x', ranks=2, before=crash, script='prepare.py')
    assert job.wait() == [2, 2] and job.err().count('error: ') == 1, job.err()
    assert 'no documents' in job.err() and 'error' not in job.err(1)


def test_nothing_is_saved_on_a_skipped_step_but_at_the_next_evaluation(dataset, tmp_path):
    out, args = tmp_path / 'run', ['--keep=9', '--log_interval=2']
    assert Job(dataset, out, *args, before=hook({3: 'nan', 4: 'nan'})).wait() == [0]
    assert [p.name[-2:] for p in checkpoint.steps(out)] == ['12', '08']
    entries = log(out)
    assert [step for step, is_evaluation in entries if is_evaluation] == [4, 8, 12]
    assert entries[6, False]['skipped'] == 2

    # a run that goes on from there is the same run
    cut(out, tmp_path / 'cut', 'step-00000008')
    train_each(dataset, {tmp_path / 'cut': args})
    assert log(tmp_path / 'cut') == {key: entry for key, entry in entries.items() if key[0] > 8}
    assert same(weights(out), weights(tmp_path / 'cut'))


def test_fault_29_guard_off_against_on(dataset, tmp_path):
    args = ['--max_iters=80', '--eval_interval=40']            # beyond the 64 norms of the history
    train_each(dataset, {tmp_path / 'on': args, tmp_path / 'off': [*args, '--guard=0']})
    assert_same_run(tmp_path / 'on', tmp_path / 'off')
    assert log(tmp_path / 'on')[80, False]['skipped'] == 0


# ---- kills and signals

def tell(pipe):
    """ From now on, this process writes one byte into the pipe whenever it opens, syncs or renames
    a file. """
    def told(function):
        def call(*args, **kw):
            os.write(pipe, b'.')
            return function(*args, **kw)
        return call
    for name in ('open', 'fsync', 'rename', 'replace'):
        setattr(os, name, told(getattr(os, name)))


def test_fault_06_kill_9_while_saving_200_times(tmp_path):
    ready = [states(step) for step in range(10)]
    outcomes, hits, moment = set(), 0, random.Random(0)
    for trial in range(200):
        out = tmp_path / str(trial)
        with Claim(out, RUN, run_folder.NAMES):
            checkpoint.save(out, 1, *ready[1])
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                tell(write)
                for step in range(2, 10 ** 6):
                    checkpoint.save(out, step, *ready[step % 10])
            finally:
                os._exit(1)
        os.close(write)

        # after so many files: a count, for a busy machine is seconds late
        for _ in range(moment.randrange(1, 40)):
            assert os.read(read, 1), 'the child ended by itself'
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        os.close(read)

        # what is there loads, and no torn folder has a whole name
        hits += bool(list(out.glob('.nanoLDLM-step-*')))
        found = checkpoint.newest(out)
        step = checkpoint.verify(found)['step']
        assert same(saved(found)['optimizer'], ready[step % 10][0]['optimizer'])
        assert not list(out.glob('*.broken*'))
        assert step < 3 or len(checkpoint.steps(out)) in (2, 3)
        outcomes.add(step)

        # whoever has the folder next clears away what was left
        with Claim(out, RUN, run_folder.NAMES):
            assert not list(out.glob('.*'))
            checkpoint.save(out, 10 ** 6, *ready[0])
        shutil.rmtree(out)
    assert len(outcomes) > 1 and hits > 20, 'the kills are to hit different moments, and saves'


@pytest.mark.parametrize('ranks, optimizer', [(1, 'adamw'), (1, 'muon'), (2, 'adamw')])
def test_fault_07_kill_9_then_resume_equals_the_uninterrupted_run_bitwise(
        dataset, finished_by_two, tmp_path, ranks, optimizer):
    out, whole, args = tmp_path / 'cut', finished_by_two, [f'--optimizer={optimizer}']
    if ranks == 1:
        whole = tmp_path / 'whole'
        train_each(dataset, {whole: args})
    step = random.randrange(5, 9)                              # the checkpoint of step 4 is whole
    job = Job(dataset, out, *args, ranks=ranks, before=held(step, tmp_path / 'never'))
    job.until(f'step {step:>6}/')
    for process in job.processes:
        process.kill()
    job.wait()
    assert not (out / 'step-00000012').exists()
    job = Job(dataset, out, *args, ranks=ranks)
    assert job.wait() == [0] * ranks and 'going on from' in job.out(), job.err()
    assert_same_run(out, whole)


def test_fault_08_resume_on_another_number_of_ranks(dataset, tmp_path):
    args = ['--dropout=0', '--max_iters=24', '--eval_interval=100', '--global_batch=16']
    one, out = tmp_path / 'one', tmp_path / 'many'
    train_each(dataset, {one: [*args, '--batch_size=16']})
    for ranks, batch, end in ((2, 8, 4), (1, 16, 12), (4, 4, None)):
        before = ''
        if end:
            first = len(log(out)) if out.exists() else 0
            before = held(end - first, tmp_path / f'go{end}')
        job = Job(dataset, out, *args, f'--batch_size={batch}', ranks=ranks, before=before)
        if end:
            job.until(f'step {end:>6}/')
            job.processes[-1].terminate()                      # one rank is told, all agree
        assert job.wait() == [128 + signal.SIGTERM if end else 0] * ranks, job.err()
    found = {step: entry['loss'] for (step, _), entry in log(out).items() if 'loss' in entry}
    expected = {step: entry['loss'] for (step, _), entry in log(one).items() if 'loss' in entry}
    assert len(found) == 24 and found == pytest.approx(expected, rel=1e-3)


def assert_preempted(out, name, steps=(5, 6)):
    """ steps: of a run that is held in its sixth step, these; another rank may just enter it. """
    stopped = read_json(out / 'preempted.json')
    assert stopped['signal'] == name and stopped['step'] in steps, 'at once'
    assert int(checkpoint.steps(out)[0].name[5:]) == stopped['step']


def alive(out):
    """ Processes whose command line names this run. """
    found = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        try:
            if str(out).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


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


@pytest.fixture
def torchrun(dataset, tmp_path):
    """ Starts two ranks under torchrun, and waits until they are held after step 5. The output goes
    to a file beside the run. shutdown: seconds after a signal in which torchrun kills nobody. What
    is left of it after the test is killed. """
    out, script, said = (tmp_path / name for name in ('torchrun', 'torchrun.py', 'torchrun.txt'))
    script.write_text(f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
{held(5, tmp_path / 'go')}
runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')
""")

    def start(*args, flags=(), shutdown=HANGS):
        command = [*TORCHRUN, '--standalone', '--nproc_per_node=2', *flags, str(script),
                   f'--dataset={dataset}', f'--out_dir={out}', *TINY, *args]
        with open(said, 'w') as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file,
                                       env={**os.environ, 'OMP_NUM_THREADS': '1',
                                            'TORCH_ELASTIC_SHUTDOWN_TIMEOUT': str(shutdown)})
        end = time.monotonic() + HANGS
        while 'step      5/' not in said.read_text():
            assert time.monotonic() < end and process.poll() is None, said.read_text()
            time.sleep(0.005)
        return process, out, said

    yield start
    for pid in alive(out):
        os.kill(pid, signal.SIGKILL)


def rank_1(out):
    pid, = (pid for pid in alive(out) if b'\0RANK=1\0' in Path(f'/proc/{pid}/environ').read_bytes())
    return pid


@pytest.mark.parametrize('number, flags', [
    (signal.SIGTERM, []), (signal.SIGUSR1, ['--signals-to-handle=SIGTERM,SIGUSR1'])],
    ids=['fault_09_sigterm', 'fault_10_sigusr1'])
def test_fault_09_and_10_a_signal_to_torchrun_saves_at_once_and_the_run_goes_on_bitwise(
        dataset, finished_by_two, torchrun, number, flags):
    process, out, _ = torchrun(flags=flags)
    process.send_signal(number)
    assert process.wait(HANGS) == 1 and not alive(out)         # torchrun's own code after a signal
    assert_preempted(out, number.name)
    job = Job(dataset, out, ranks=2)
    assert job.wait() == [0, 0], job.err()
    assert not (out / 'preempted.json').exists()
    assert_same_run(out, finished_by_two)


def test_the_workers_of_a_torchrun_that_is_killed_save_and_leave(torchrun):
    process, out, _ = torchrun()
    process.kill()
    while alive(out):                                          # without a signal they are held
        time.sleep(0.05)
    assert_preempted(out, 'SIGTERM')


@pytest.mark.parametrize('number, code', [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_run_that_has_saved_all_ends_at_a_signal_while_it_reads_its_data_once_more(
        dataset, tmp_path, number, code):
    slow = """
import time
from runs import preflight
check_digests, calls = preflight.check_digests, []
def slow(*splits):
    calls.append(1)
    if len(calls) == 2:
        print('once more', flush=True)
        time.sleep(15)                                         # as large data take
    check_digests(*splits)
preflight.check_digests = slow
"""
    out = tmp_path / 'run'
    job = Job(dataset, out, before=slow)
    job.until('once more')
    job.processes[0].send_signal(number)
    assert job.wait() == [code]
    assert checkpoint.steps(out)[0].name == 'step-00000012' and 'Traceback' not in job.err()


def test_fault_11_sigterm_during_an_evaluation(dataset, finished_by_two, tmp_path):
    until_a_signal = """
import os, time, diffusion
from runs import run_folder
validate = diffusion.Loss.validate
def hold(*args):
    print('evaluating', flush=True)
    while os.environ['RANK'] == '1' and not run_folder.signal_seen:
        time.sleep(0.01)
    return validate(*args)
diffusion.Loss.validate = hold
"""
    out = tmp_path / 'run'
    job = Job(dataset, out, '--eval_rows=160', ranks=2, before=until_a_signal)
    job.until('evaluating')
    job.processes[1].terminate()
    assert job.wait() == [143, 143]
    assert_preempted(out, 'SIGTERM', steps=[4])
    assert (4, True) not in log(out), 'it was to leave the evaluation'
    job = Job(dataset, out, ranks=2)
    assert job.wait() == [0, 0], job.err()
    assert_same_run(out, finished_by_two)                      # it is done after the resume


@pytest.mark.parametrize('number, code', [(signal.SIGINT, 130), (signal.SIGUSR1, 0)])
def test_ctrl_c_saves_and_stops_make_and_a_preemption_is_a_success(
        dataset, finished, tmp_path, number, code):
    out = tmp_path / 'run'
    job = Job(dataset, out, before=held(5, tmp_path / 'go') + AGAIN)
    job.until('step      5/')
    job.processes[0].send_signal(number)
    assert job.wait() == [code] and not job.err(), job.err()
    assert_preempted(out, number.name)
    assert 'run the same command again to go on' in job.out()
    train_each(dataset, {out: []})
    assert_same_run(out, finished)


def test_a_hangup_counts_as_a_signal_and_a_reader_may_leave(dataset, finished_by_two, tmp_path):
    # the terminal closes
    hung, cut_off, pipe = (tmp_path / name for name in ('hung', 'cut', 'pipe'))
    heard = 'import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)'      # also under nohup
    job = Job(dataset, hung, ranks=2, before=held(5, tmp_path / 'go') + heard)
    job.until('step      5/')
    job.processes[1].send_signal(signal.SIGHUP)
    assert job.wait() == [129, 129], job.err()
    assert_preempted(hung, 'SIGHUP')

    # python train.py | head
    os.mkfifo(pipe)
    into_pipe = f'os.dup2(os.open({str(pipe)!r}, os.O_WRONLY), 1)'
    job = Job(dataset, cut_off, ranks=2, before=into_pipe)
    with open(pipe) as lines:
        assert any('step      5/' in line for line in lines)
    job.wait()
    assert_same_run(cut_off, finished_by_two)


# ---- processes that die, hang, or do not meet

def test_fault_12_one_rank_dies(dataset, tmp_path, torchrun):
    out = tmp_path / 'direct'
    job = Job(dataset, out, *LONG, '--dist_timeout=3600', ranks=2)
    job.until('step      6/')
    job.processes[1].kill()
    # at once: after dist_timeout, an hour, the test would have given up
    assert job.wait() == [4, -signal.SIGKILL]
    assert job.err().count('\n') == 1 and 'lost the other processes' in job.err()
    assert not checkpoint.steps(out), 'half a job must not save'

    # torchrun leaves no orphan
    process, out, _ = torchrun(*LONG)
    os.kill(rank_1(out), signal.SIGKILL)
    assert process.wait(HANGS) == 1
    assert not alive(out) and not checkpoint.steps(out)


def test_fault_13_one_rank_hangs(torchrun):
    # long enough for a busy machine; then torchrun gives 5 seconds before its kill -9
    process, out, said = torchrun(*LONG, '--dist_timeout=40', shutdown=5)
    os.kill(rank_1(out), signal.SIGSTOP)
    (out.parent / 'go').touch()
    assert process.wait(HANGS) == 1
    assert not alive(out) and 'lost the other processes' in said.read_text()


@pytest.fixture
def silent_port():
    """ Where a connection is neither accepted nor refused, as behind a firewall: a queue of one
    that is full. """
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(('127.0.0.1', 0))
        listener.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.mark.parametrize('rank, address, port, words', [
    (1, '127.0.0.1', '1', 'timed out'), (1, '127.0.0.1', None, 'timed out'),
    (0, 'no-such-host.invalid', '29511', 'is rank 0 running'), (1, '127.0.0.1', '', 'not set')])
def test_fault_14_the_master_cannot_be_reached(
        dataset, tmp_path, silent_port, rank, address, port, words):
    port = str(silent_port) if port is None else port
    env = dict(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR=address, MASTER_PORT=port)
    job = Job(dataset, tmp_path / 'run', env=env,
              before='from base import distributed\ndistributed.MEETING = 4')
    assert job.wait() == [4]
    err = job.err().splitlines()[-1]                           # below the lines of torch
    assert words in err, err
    assert all(word in err for word in ['MASTER_PORT', *([address, port] if port else [])])
    assert not (tmp_path / 'run').exists()


def test_a_process_that_ends_while_they_meet_is_not_waited_for_longer_than_the_meeting(
        dataset, tmp_path):
    """ Once all are at the store, before the first collective. """
    before = """
import os
import torch.distributed as dist
from base import distributed
distributed.MEETING = 4
if os.environ['RANK'] == '1':
    dist.init_process_group = lambda *args, **kw: os._exit(9)
"""
    job = Job(dataset, tmp_path / 'run', '--dist_timeout=1e6', ranks=2, before=before)
    assert job.wait(120) == [4, 9]
    assert 'rank 0 of 2 cannot meet the others' in job.err().splitlines()[-1]


# ---- broken checkpoints, full disks

def test_fault_15_to_17_the_newest_checkpoint_is_broken_and_then_all_are(
        dataset, finished, tmp_path):
    """ In every way that it can be broken: test_checkpoint.py. """
    out = shutil.copytree(finished, tmp_path / 'run')
    flip(out / 'step-00000012/ema.safetensors')
    result = train(dataset, out)
    assert result.returncode == 0 and 'going on from' in result.stdout
    assert 'step-00000012 is broken and set aside' in result.stderr
    assert_same_run(out, finished)
    for folder in checkpoint.steps(out):
        os.truncate(folder / 'model.safetensors', 100)
    for result in (train(dataset, out), train(dataset, out)):  # and it never begins anew
        assert result.returncode == 2 and 'Traceback' not in result.stderr
        assert 'no whole checkpoint left' in result.stderr.splitlines()[-1]


def test_fault_18_the_disk_is_full(dataset, tmp_path):
    out = tmp_path / 'run'
    train_each(dataset, {out: ['--max_iters=4', '--global_batch=16']})
    limit = 'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))'
    job = Job(dataset, out, '--max_iters=40', ranks=2, before=limit)
    assert job.wait() == [5, 5] and not job.err(1)
    lines = job.err().splitlines()
    assert len(lines) == 3
    for n, line in zip((8, 12, 16), lines):
        assert f'cannot save {out}/step-{n:08d}: ' in line
    assert lines[0].startswith('warning') and lines[2].startswith('error')
    assert not list(out.glob('.*')) and checkpoint.newest(out).name == 'step-00000004'
    train_each(dataset, {out: []})                             # room again: it goes on


def test_an_error_of_one_rank_at_the_resume_is_everybodys(dataset, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / 'run')
    job = Job(dataset, out, ranks=2, before="""
from runs import resume
def cannot(*args, **kw):
    raise OSError('no such mount')
if os.environ['RANK'] == '1':
    resume.State.load = cannot
""")
    assert job.wait() == [2, 2] and 'no such mount' in job.err(0)
    assert 'Traceback' not in job.err(0) + job.err(1)


def test_fault_28_two_runs_on_one_folder(dataset, tmp_path):
    out = tmp_path / 'run'
    first = Job(dataset, out, '--max_iters=100000')
    first.until('step      5/')
    second = train(dataset, out)
    assert second.returncode == 2 and second.stderr.count('\n') == 1
    assert 'in use by another process' in second.stderr
    assert read_json(out / 'config.json')['max_iters'] == 100_000
    before = max(step for step, _ in log(out))
    first.until(f'step {before + 5:>6,}/')                     # unharmed: it goes on
    first.processes[0].terminate()
    assert first.wait() == [143] and checkpoint.verify(checkpoint.newest(out))


def test_a_run_whose_folder_is_removed_stops_and_leaves_the_next_one_alone(
        dataset, finished, tmp_path):
    out = tmp_path / 'run'
    go = tmp_path / 'go'
    first = Job(dataset, out, '--max_iters=40', '--learning_rate=3e-4', before=held(5, go))
    first.until('step      5/')
    shutil.rmtree(out)
    train_each(dataset, {out: []})                             # while the first one waits
    before = files_of_all(out)
    go.touch()
    assert first.wait() == [2]
    assert first.err().splitlines()[-1].startswith(f'error: {out}/lock was removed, moved or ')
    assert files_of_all(out) == before
    assert_same_run(out, finished)


# ---- broken data

def assert_one_line(result, *words):
    rc, _, err = result
    assert rc == 2 and err.strip().count('\n') == 0, err
    assert all(word in err for word in words), (words, err)


def test_fault_19_a_truncated_dataset(dataset, tmp_path):
    commands, expected = [], []
    for name in ('train-00000.tokens.bin', 'train-00000.latents.npy', 'val-00000.offsets.npy',
                 'latent_stats.npz'):
        copy = shutil.copytree(dataset, tmp_path / name)
        size = (copy / name).stat().st_size
        os.truncate(copy / name, size - 8)
        commands.append(['train.py', f'--dataset={copy}', f'--out_dir={tmp_path}/run', *TINY])
        expected.append((name, str(size), str(size - 8)))
    for words, result in zip(expected, run_each(*commands)):
        assert_one_line(result, *words)
        assert 'parameters' not in result[1], 'before the model is built'


def test_fault_21_data_that_contradicts_its_manifest(dataset, tmp_path):
    def large_id(folder):
        tokens = np.memmap(folder / 'train-00000.tokens.bin', np.uint16, 'r+')
        tokens[5] = 60_000
        tokens.flush()

    def large_vocabulary(folder):
        change_meta(folder, lambda meta: meta['tokenizer'].update(vocab_size=10 ** 9))

    def wide_latents(folder):
        change_meta(folder, lambda meta: meta.update(latent_shape=[1, 17]))

    cases = [(wide_latents, ['1, 17)', '1, 16)']), (large_vocabulary, ['1000000000', 'uint16']),
             (large_id, ['60000', '300'])]
    commands = []
    for i, (damage, _) in enumerate(cases):
        damage(shutil.copytree(dataset, tmp_path / str(i)))
        commands.append(['train.py', f'--dataset={tmp_path}/{i}', f'--out_dir={tmp_path}/run',
                         *TINY])
    for (_, words), result in zip(cases, run_each(*commands)):
        assert_one_line(result, *words)


def test_data_that_are_cut_off_meanwhile_end_the_run_before_it_is_saved(dataset, tmp_path):
    data, out = shutil.copytree(dataset, tmp_path / 'data'), tmp_path / 'run'
    job = Job(data, out, before=held(5, tmp_path / 'go'))
    job.until('step      5/')
    path = data / 'train-00000.latents.npy'
    os.truncate(path, path.stat().st_size - 8)
    (tmp_path / 'go').touch()
    assert job.wait() == [2] and 'latents.npy: found' in job.err()
    assert checkpoint.steps(out)[0].name == 'step-00000004'


def test_data_that_change_meanwhile_end_a_run_that_is_saved_with_code_2(dataset, tmp_path):
    data, out = shutil.copytree(dataset, tmp_path / 'data'), tmp_path / 'run'
    go = tmp_path / 'go'
    job = Job(data, out, '--max_iters=8', ranks=2, before=held(5, go))
    job.until('step      5/')
    tokens = np.memmap(data / 'train-00000.tokens.bin', np.uint16, 'r+')
    tokens[:] = 0                                              # as many, and in place
    tokens.flush()
    go.touch()
    assert job.wait() == [2, 2], job.err()
    line, = [line for line in job.err().splitlines() if line.startswith('error')]
    assert 'train-00000.tokens.bin: its sha256 is not' in line and 'whole at step 0' in line
    assert checkpoint.verify(out / 'step-00000008')

    # what is moved away is still mapped, and whole
    other = tmp_path / 'other'
    go = tmp_path / 'go_on'
    moved = shutil.copytree(dataset, tmp_path / 'gone')
    job = Job(moved, other, '--max_iters=8', before=held(5, go))
    job.until('step      5/')
    os.rename(moved, tmp_path / 'aside')
    go.touch()
    assert job.wait() == [0] and 'were moved away: nobody knows' in job.err()


def test_a_validation_that_is_nan_or_worse_than_a_guess_is_named(dataset, tmp_path):
    nan = """
import torch, diffusion
diffusion.Loss.validate = lambda *args: torch.full((5,), float('nan'))
"""
    job = Job(dataset, tmp_path / 'nan', '--max_iters=1', before=nan)
    assert job.wait() == [0] and 'warning: val_text nan is not finite' in job.err()
    job = Job(dataset, tmp_path / 'far', '--learning_rate=10')
    assert job.wait() == [0] and 'or worse than a guess' in job.err()
    val = PackedDataset(dataset, 'val')                        # the first 16 texts, each with EOS
    guess = np.log(val.vocab_size) * 32 / (lengths(val)[:16] + 1).mean()
    assert f'nats per token (a guess: {guess:.2f})' in job.out()


# ---- another run, model or dataset

def test_fault_22_resume_with_another_model_or_dataset(dataset, finished, tmp_path):
    def other_texts(split):
        """ As many, but backwards. """
        folder, name = shutil.copytree(dataset, tmp_path / split), f'{split}-00000.tokens.bin'
        forge_file(folder, name, np.fromfile(folder / name, np.uint16)[::-1].tobytes())
        return f'--dataset={folder}'

    encoder = shutil.copytree(dataset, tmp_path / 'encoder')
    change_meta(encoder, lambda meta: meta['encoder'].update(revision='sha256:0'))
    cases = [('--width=64', 'width is 32, expected 64'),
             ('--latent_target=x0', "latent_target is 'v', expected 'x0'"),
             ('--optimizer=muon', "optimizer is 'adamw', expected 'muon'"),
             (f'--dataset={encoder}', 'encoder revision is '),
             (other_texts('train'), 'sha256 of train is '),
             (other_texts('val'), 'sha256 of val is ')]
    out = shutil.copytree(finished, tmp_path / 'run')
    here = ['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY]
    for (_, words), result in zip(cases, run_each(*([*here, arg] for arg, _ in cases))):
        assert_one_line(result, words)

    # harmless knobs; and other texts can be evaluated, and the weights can go on with them
    texts = cases[-1][0]
    results = run_each(
        [*here, '--device=auto', '--max_iters=14', '--eval_interval=7', '--learning_rate=1e-4'],
        [*here, texts, f'--out_dir={tmp_path}/tuned', f'--init_from={out}', '--max_iters=2'],
        ['evaluate.py', f'--out_dir={out}', texts, '--tasks=nelbo', '--n=8', '--draws=1',
         '--device=cpu'])
    assert all(rc == 0 for rc, _, _ in results), results
    assert checkpoint.steps(out)[0].name == 'step-00000014'


def test_fault_25_a_bad_command_line_ends_before_any_process_is_met(dataset, tmp_path):
    env = dict(RANK='1', WORLD_SIZE='2', MASTER_ADDR='no-such-host.invalid', MASTER_PORT='29511')
    cases = [(['--bach_size=3'], ['bach_size', 'batch_size']),
             (['--parallel=fsdp', '--optimizer=muon'], ['fsdp', 'muon'])]
    here = ['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/run']
    for (_, words), result in zip(cases, run_each(*([*here, *args] for args, _ in cases), env=env)):
        assert_one_line(result, *words)


# ---- prepare.py

def corpus(path, n=400):
    rng = np.random.default_rng(0)
    words = ('red blue small old man woman child dog cat runs sits eats jumps street house park '
             'river market near the').split()
    lines = [f'{" ".join(rng.choice(words, 12))} number {i}' for i in range(n)]
    path.write_text('\n'.join(lines) + '\n')
    return path


def is_of_val(line, fraction=.1):
    return text_hash(line) < fraction * 2**64


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def files_of_all(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}


def test_fault_20_latents_that_are_not_finite_at_prepare(tmp_path):
    path = corpus(tmp_path / 'a.txt', 3000)
    lines = path.read_text().splitlines()
    in_val = next(i for i, line in enumerate(lines) if is_of_val(line, .01))
    z = np.random.default_rng(0).standard_normal((3000, 4)).astype(np.float32)
    commands = []
    for name, bad in (('few', [7, in_val]), ('many', range(0, 3000, 100))):
        spoiled = z.copy()
        spoiled[list(bad), 1] = [np.nan, np.inf] * (len(bad) // 2)
        np.save(tmp_path / f'{name}.npy', spoiled)
        commands.append(['prepare.py', f'--input={path}', f'--latents_from={tmp_path}/{name}.npy',
                         '--tokenizer=byte', f'--out={tmp_path}/{name}'])
    (rc, out, err), many = run_each(*commands)
    assert rc == 0 and 'dropped (NaN, inf, of another scale, ' in out, err
    splits = [PackedDataset(tmp_path / 'few', split) for split in ('train', 'val')]
    assert [ds.meta['splits'][ds.split]['nonfinite'] for ds in splits] == [1, 1]
    assert sum(map(len, splits)) == 2998
    assert all(torch.isfinite(ds.rows(np.arange(len(ds)))[1]).all() for ds in splits)
    assert_one_line(many, 'latents cannot be stored, more than 0.1%; the first: ')
    assert not (tmp_path / 'many/meta.json').exists()


def test_fault_26_prepare_is_killed_at_random_and_goes_on_with_another_number_of_ranks(tmp_path):
    """ The encoder is a BERT: its embeddings do depend on how texts are batched, so batches must be
    the shard's own. """
    (tmp_path / 'bert').mkdir()
    args = [f'--input={corpus(tmp_path / "a.txt")}', '--pooling=mean', '--vocab_size=300',
            f'--encoder={save_encoder(tmp_path / "bert")}', '--shard_size=20', '--val_fraction=.1',
            '--device=cpu']
    # kills fall inside a shard too, and before meta.json is there, however late they come
    slow = """
import os, time
replace = os.replace
def slowly(source, target):
    time.sleep(999 if str(target).endswith('meta.json') else .03)
    replace(source, target)
os.replace = slowly
"""

    def start(out, ranks, before=''):
        return Job(None, out, *args, f'--out={out}', script='prepare.py', ranks=ranks,
                   before=before)

    whole = start(tmp_path / 'whole', 1)
    assert whole.wait() == [0], whole.err()
    chance = random.Random(0)
    for ranks, killed, at in ((1, (0, 1), 'train-0000'), (2, (1,), 'train-0001'),
                              (4, (0, 1), 'val-0000')):
        out = tmp_path / f'killed{ranks}'
        job = start(out, 2, before=slow)
        job.until(at)
        time.sleep(chance.random() / 5)
        for i in killed:
            job.processes[i].send_signal(signal.SIGKILL)
        killed_code = -signal.SIGKILL
        assert job.wait() == [killed_code if 0 in killed else 4, killed_code], job.err()
        assert not (out / 'meta.json').exists()

        # of each rank at most the shard that it was writing is begun
        noted = {path.name.split('.')[0] for path in out.glob('*.whole.json')}
        shards = [path for path in out.glob('*-0*.*') if path.name[0] != '.']
        begun = {path.name.split('.')[0] for path in shards}
        assert noted and len(begun - noted) <= 2
        before = {path: path.stat().st_mtime_ns for path in shards
                  if path.name.split('.')[0] in noted and 'whole' not in path.name}

        # what was whole is not written again
        job = start(out, ranks)
        assert job.wait() == [0] * ranks, job.err()
        assert all(path.stat().st_mtime_ns == when for path, when in before.items())
        assert files_of(out) == files_of(tmp_path / 'whole')


def test_fault_26_an_orphan_of_a_killed_prepare_keeps_the_next_one_out(tmp_path):
    args = [f'--input={corpus(tmp_path / "a.txt")}', '--encoder=lsa', '--encoder_dims=16',
            '--vocab_size=300', '--shard_size=20', f'--out={tmp_path / "x"}']
    stuck = """
import os, time
replace = os.replace
os.replace = lambda *p: time.sleep(999) if 'train-00003' in str(p[1]) else replace(*p)
"""
    job = Job(None, tmp_path / 'x', *args, script='prepare.py', ranks=2, before=stuck)
    job.until('train-00002')
    job.processes[0].kill()                        # rank 1 is asleep in its own shard, and lives on
    job.processes[0].wait()
    second, = run_each(['prepare.py', *args])
    assert_one_line(second, 'in use by another process')
    assert job.processes[1].poll() is None
    job.processes[1].kill()
    job.processes[1].wait()
    assert run('prepare.py', *args).returncode == 0


def test_fault_27_bad_documents_and_broken_files_at_prepare(tmp_path):
    lines = corpus(tmp_path / 'good.txt').read_bytes().splitlines()
    large = b'word ' * 2_000_000                                         # 10 MB
    bad = [b'', b'   ', b'\xff\xfe broken \x80', b'nul \x00 inside', large]
    (tmp_path / 'a.txt').write_bytes(b'\n'.join(lines + bad))
    (tmp_path / 'empty.txt').write_bytes(b'\n\n')
    x = tmp_path / 'x'
    args = ['prepare.py', f'--input={tmp_path}/a.txt', '--encoder=lsa', '--encoder_dims=16',
            '--vocab_size=300', '--shard_size=100', f'--out={x}']
    replace = [*args, '--invalid_bytes=replace']
    stopped, (rc, _, err) = run_each(args, replace)
    assert_one_line(stopped, f"a.txt, line {len(lines) + 3}: 'utf-8' codec can't decode byte 0xff")
    assert rc == 0, err

    # nothing is dropped without a count, and chunks join to their documents
    splits = [PackedDataset(x, split) for split in ('train', 'val')]
    counts = dict(read=405, kept=402, empty=2, nul=1, invalid_utf8=1, trimmed=1)
    assert splits[0].meta['counts']['input'] == counts
    found = ''.join(text for ds in splits for text in texts_in(ds))
    expected = [line.decode() for line in (*lines, large.strip())]
    expected.append('\ufffd\ufffd broken \ufffd')
    assert len(found) == sum(map(len, expected)) and all(text in found for text in expected)

    # what is broken is redone, and nothing else
    first = files_of(x)
    flip(x / 'train-00001.latents.npy')
    os.truncate(x / 'train-00000.tokens.bin', 100)
    (x / '.nanoLDLM-train-00000.tokens.bin-12345678').write_bytes(b'stale')
    for name in ('latent_stats.npz', 'tokenizer.json'):
        os.remove(x / name)
    inspect = ['prepare.py', f'--inspect={x}']
    none = ['prepare.py', f'--input={tmp_path}/empty.txt', f'--out={tmp_path}/y']
    seen, (rc, out, err), empty, good = run_each(inspect, replace, none, inspect)
    assert_one_line(seen, 'run prepare.py again')
    assert rc == 0 and files_of(x) == first, err
    assert out.count('there already') == sum(ds.n_shards for ds in splits) - 2
    assert_one_line(empty, 'no documents (2 empty among 2 read)')
    assert good[0] == 0 and '405 documents, 402 kept, 2 empty, 1 dropped (with a NUL)' in good[1]
