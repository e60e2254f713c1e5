"""
Faults that real runs meet, each injected for real: bytes, signals, limits, several processes. Nothing in train.py or prepare.py
knows of these tests; where a gradient must go wrong, a hook is set from outside.
"""
import json
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

from runs import checkpoint
from data import PackedDataset, row_order
from runs.files import sealed
from launch import HANGS, ROOT, SLOW, TINY, Job, cut, log, run, run_each, saved, texts_in, train, train_each, weights
from corpora.sources import text_hash
from test_checkpoint import Command, forge, same, states
from test_encoders import save_encoder

TORCHRUN = [sys.executable, '-m', 'torch.distributed.run']
EVERY_STEP = ['--eval_interval=1', '--keep=99']


def poison(dataset, copy, step, first, global_batch, value=np.nan):
    """ A copy of the dataset where one latent row is NaN: one that is read at this step, `first` rows into the global batch. """
    shutil.copytree(dataset, copy)
    row = int(row_order(len(PackedDataset(dataset, 'train')), 0, step * global_batch + first, 1)[0])
    latents = np.load(copy / 'train-00000.latents.npy', mmap_mode='r+')
    latents[row] = value
    latents.flush()
    return row


def hook(factors, rank=0, offset=0):
    """ Code that multiplies the gradient of the text loss, and so all that l2t computes from it, by factors[step] on one rank. """
    return f"""
import os, torch, loss
text_loss, calls = loss.Loss.text_loss, []
def patched(*args):
    result, factor = text_loss(*args), float({factors}.get(len(calls) + {offset}, 1))
    calls.append(1)
    result['text_loss'].register_hook(lambda grad: grad * factor)
    return result
if os.environ.get('RANK', '0') == '{rank}':
    loss.Loss.text_loss = patched
"""


def infinite(step, rank=0):
    """ Code that makes one number of one weight's gradient +inf at this step on one rank, before it is averaged. (All the logits'
    gradients times inf would be NaN, where they are 0; and fsdp replaces the parameters, hooks and all.) """
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
moments = [m[k] for opt, _ in g['optimizers'] for m in opt.state.values() for k in sorted(m)]
held = [*g['model'].parameters(), *g['state'].ema, *moments]
print('weights', hashlib.sha256(b''.join(local(p).detach().numpy().tobytes() for p in held)).hexdigest())
"""


def digests(job):
    return {out.split('weights ')[1].strip() for out in map(job.out, range(len(job.processes)))}


def assert_nothing_moved(out, a, b):
    """ Between the checkpoints of two steps: weights, average, moments, step counts. """
    a, b = (saved(out / f'step-{n:08d}') for n in (a, b))
    for kind in ('model', 'ema', 'optimizer'):
        assert a[kind].keys() == b[kind].keys()
        assert all(torch.equal(a[kind][name], b[kind][name]) for name in a[kind]), kind


def assert_same_run(out, whole):
    """ The same losses at every step and the same final weights, to the bit. """
    assert log(out) == log(whole)
    for kind in ('model', 'ema'):
        ours, theirs = weights(out, kind), weights(whole, kind)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours), kind


def skips(out):
    return [skip for entry in log(out).values() for skip in entry.get('skips', [])]


@pytest.fixture(scope='session')
def finished_by_two(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'two'
    job = Job(dataset, out, ranks=2)
    assert job.wait() == [0, 0], job.err()
    return out


# ---- what is not finite

@pytest.mark.parametrize('step, first, args, rank', [(6, 8 + 3, [], 1), (4, (1 * 2 + 0) * 8 + 5, ['--global_batch=48'], 0)],
                         ids=['fault_01_one_rank', 'fault_03_a_middle_micro_batch'])
def test_fault_01_and_03_nan_in_a_row_skips_the_step_once_on_all_ranks(dataset, tmp_path, step, first, args, rank):
    row = poison(dataset, tmp_path / 'data', step, first, global_batch=48 if args else 16)
    out = tmp_path / 'run'
    run_of = [*EVERY_STEP, *args]
    job = Job(tmp_path / 'data', out, *run_of, f'--max_iters={step + 1}', ranks=2, after=DIGEST)     # ends on the bad step: saves what did not move
    assert job.wait() == [0, 0], job.err()
    skip, = skips(out)
    where, = skip['where']
    assert skip['step'] == step + 1 and skip['why'] == 'loss' and where['rank'] == rank and row in where['rows'] and len(where['rows']) == 8
    assert len(digests(job)) == 1, 'the ranks hold different weights'
    assert_nothing_moved(out, step, step + 1)
    job = Job(tmp_path / 'data', out, *run_of, ranks=2, after=DIGEST)
    assert job.wait() == [0, 0] and len(digests(job)) == 1, job.err()
    assert all(torch.isfinite(w).all() for w in weights(out).values()) and log(out)[12, False]['skipped'] == 1


@pytest.mark.parametrize('ranks, args', [(2, []), (2, ['--parallel=fsdp']), (2, ['--optimizer=muon'])])
def test_fault_02_an_infinite_gradient_with_a_finite_loss(dataset, tmp_path, ranks, args):
    out = tmp_path / 'run'
    spoil = hook({6: 'inf'}, rank=1) if args == ['--parallel=fsdp'] else infinite(6, rank=1)
    job = Job(dataset, out, *EVERY_STEP, '--max_iters=7', *args, ranks=ranks, before=spoil, after=DIGEST)
    assert job.wait() == [0] * ranks, job.err()
    skip, = skips(out)
    assert skip['step'] == 7 and skip['why'] == 'gradient' and np.isfinite(float(skip['loss']))
    assert args == ['--parallel=fsdp'] or skip['grad_norm'] == 'inf'
    assert len(digests(job)) == 1 or args == ['--parallel=fsdp']         # there each rank holds its share
    assert_nothing_moved(out, 6, 7)


def test_fault_04_a_finite_spike_is_skipped_above_the_threshold_only_and_after_a_resume_too(dataset, tmp_path):
    args = ['--max_iters=90', '--eval_interval=70', '--dropout=0']
    assert Job(dataset, tmp_path / 'clean', *args).wait() == [0]
    norms = [e['grad_norm'] for e in log(tmp_path / 'clean').values() if 'grad_norm' in e]
    below = 9.5 * np.median(norms[12:76]) / norms[76]                    # step 77's norm, 9.5 times the median of the 64 before
    above = 10.8 * np.median(norms[16:80]) / norms[80]                   # step 81's, 10.8 times: step 77 is now among them and moved on
    factors = {76: float(below), 80: float(above)}
    assert Job(dataset, tmp_path / 'whole', *args, before=hook(factors)).wait() == [0]
    skip, = skips(tmp_path / 'whole')
    assert skip['step'] == 81 and skip['why'] == 'spike', skip
    assert float(skip['grad_norm']) < 12 * np.median(norms[16:80])
    cut = tmp_path / 'cut'                                               # as if it had been killed before 90
    shutil.copytree(tmp_path / 'whole', cut)
    for gone in cut.glob('step-00000090'):
        shutil.rmtree(gone)
    assert Job(dataset, cut, *args, before=hook(factors, offset=70)).wait() == [0]
    assert [s['step'] for s in skips(cut)] == [81]
    assert all(torch.equal(a, b) for a, b in zip(weights(cut).values(), weights(tmp_path / 'whole').values()))
    assert Job(dataset, tmp_path / 'off', *args, '--guard=1e9', before=hook(factors)).wait() == [0]
    assert not skips(tmp_path / 'off')


def test_fault_05_endless_nan_stops_the_run_with_a_finite_checkpoint(dataset, tmp_path):
    out = tmp_path / 'run'
    endless = hook(dict.fromkeys(range(6, 99), 'nan'))
    job = Job(dataset, out, '--max_iters=60', '--log_interval=3', ranks=2, before=endless)
    assert job.wait() == [3, 3]
    assert 'steps in a row' in job.err(0) and job.err(0).count('error') == 1 and 'Traceback' not in job.err(0) + job.err(1)
    assert max(step for step, _ in log(out)) <= 6 + 10 + 3 and (out / 'latest').read_text().strip() == 'step-00000004'
    assert all(torch.isfinite(w).all() for w in weights(out).values())


# ---- kills and signals

def tell(pipe):
    """ From now on, this process writes one byte into the pipe whenever it opens, syncs or renames a file. """
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
        known = int((out / 'latest').read_text()[5:])
        hits += bool(list(out.glob('step-*.tmp')))
        found = checkpoint.newest(out)
        step = checkpoint.verify(found)['step']
        assert step in (known, known + 1) and same(saved(found)['optimizer'], dict(sorted(ready[step % 10][0]['optimizer'].items())))
        assert not list(out.glob('*.broken*')), 'no torn folder under a whole name'
        assert known < 3 or len(checkpoint.steps(out)) in (2, 3)
        outcomes.add(step)
        checkpoint.save(out, 10 ** 6, *ready[0])                         # and the next save clears away what was left
        assert not list(out.glob('step-*.tmp'))
        shutil.rmtree(out)
    assert len(outcomes) > 1 and hits > 20, (outcomes, hits)             # the kills hit different moments, and saves


@pytest.mark.parametrize('ranks, optimizer', [(1, 'adamw'), (1, 'muon'), (2, 'adamw')])
def test_fault_07_kill_9_then_resume_equals_the_uninterrupted_run_bitwise(dataset, finished_by_two, tmp_path, ranks, optimizer):
    out, whole, args = tmp_path / 'cut', finished_by_two, [f'--optimizer={optimizer}']
    if ranks == 1:
        whole = tmp_path / 'whole'
        assert Job(dataset, whole, *args).wait() == [0]
    job = Job(dataset, out, *args, ranks=ranks, before=SLOW)
    job.until(f'step      {random.randrange(5, 9)}/')                            # the checkpoint of step 4 is whole
    for process in job.processes:
        process.kill()
    job.wait()
    assert not (out / 'step-00000012').exists()
    job = Job(dataset, out, *args, ranks=ranks)
    assert job.wait() == [0] * ranks and 'going on from' in job.out(), job.err()
    assert_same_run(out, whole)


def test_fault_08_resume_on_another_number_of_ranks(dataset, tmp_path):
    args = ['--dropout=0', '--max_iters=24', '--eval_interval=100']
    assert Job(dataset, tmp_path / 'one', *args, '--batch_size=16').wait() == [0]
    out = tmp_path / 'many'
    for ranks, batch, end in ((2, 8, 4), (1, 16, 12), (4, 4, None)):
        job = Job(dataset, out, *args, f'--batch_size={batch}', ranks=ranks, before=SLOW if end else '')
        if end:
            job.until(f'step {end:>6}/')
            job.processes[-1].terminate()                                # one rank is told, all agree
        assert job.wait() == [0] * ranks, job.err()
        assert 'global batch' not in job.out()
    one, many = log(tmp_path / 'one'), log(out)
    assert len({entry['step'] for entry in many.values()}) == 24
    for key in one:
        if 'loss' in one[key]:
            assert many[key]['loss'] == pytest.approx(one[key]['loss'], rel=1e-3), key


def assert_preempted(out, name):
    stopped = json.loads((out / 'preempted.json').read_text())
    assert stopped['signal'] == name and stopped['step'] in (4, 5, 6, 7), 'at once'
    assert int((out / 'latest').read_text()[5:]) == stopped['step']


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


def torchrun(dataset, out, *args, flags=()):
    """ Two ranks under torchrun, each step slow enough to be hit; its output goes to a file beside `out`. """
    script = Path(f'{out}.py')
    script.write_text(f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
{SLOW}
runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')
""")
    with open(f'{out}.txt', 'w') as file:
        process = subprocess.Popen([*TORCHRUN, '--standalone', '--nproc_per_node=2', *flags, str(script), f'--dataset={dataset}',
                                    f'--out_dir={out}', *TINY, *args], cwd=ROOT, stdout=file, stderr=file,
                                   env={**os.environ, 'OMP_NUM_THREADS': '1'})
    running.append(out)
    return process


running = []


@pytest.fixture(autouse=True)
def no_torchrun_outlives_its_test():
    yield
    while running:
        for pid in alive(running.pop()):
            os.kill(pid, signal.SIGKILL)


def rank_1(out):
    pid, = (pid for pid in alive(out) if b'\0RANK=1\0' in Path(f'/proc/{pid}/environ').read_bytes())
    return pid


def until(out, text, seconds=HANGS):
    end = time.monotonic() + seconds
    while text not in Path(f'{out}.txt').read_text():
        assert time.monotonic() < end, Path(f'{out}.txt').read_text()
        time.sleep(0.005)


@pytest.mark.parametrize('number, flags', [(signal.SIGTERM, []), (signal.SIGUSR1, ['--signals-to-handle=SIGTERM,SIGUSR1'])],
                         ids=['fault_09_sigterm', 'fault_10_sigusr1'])
def test_fault_09_and_10_a_signal_to_torchrun_saves_at_once_and_the_run_goes_on_bitwise(dataset, finished_by_two, tmp_path, number, flags):
    out = tmp_path / 'run'
    process = torchrun(dataset, out, flags=flags)
    until(out, 'step      5/')
    process.send_signal(number)
    # torchrun's own code after a signal; the minute is against hanging, that it saved at once is counted in steps
    assert process.wait(60) == 1
    assert not alive(out)
    assert_preempted(out, number.name)
    job = Job(dataset, out, ranks=2)
    assert job.wait() == [0, 0], job.err()
    assert not (out / 'preempted.json').exists()
    assert_same_run(out, finished_by_two)


def test_fault_11_sigterm_during_an_evaluation(dataset, finished_by_two, tmp_path):
    slow = """
import time, loss
validate = loss.Loss.validate
def slowly(*args):
    print('evaluating', flush=True)
    time.sleep(3)
    return validate(*args)
loss.Loss.validate = slowly
"""
    out = tmp_path / 'run'
    job = Job(dataset, out, '--eval_iters=20', ranks=2, before=slow)
    job.until('evaluating')
    job.processes[1].terminate()
    assert job.wait(60) == [0, 0]
    assert_preempted(out, 'SIGTERM')
    assert (4, True) not in log(out), 'it was to leave the evaluation'
    job = Job(dataset, out, ranks=2)
    assert job.wait() == [0, 0], job.err()
    assert_same_run(out, finished_by_two)                                # the evaluation is done after the resume


def test_a_signal_before_the_first_step_ends_the_run_with_nothing_saved(dataset, tmp_path):
    early = """
import os, signal, loss
prefetch = loss.prefetch
def after_a_signal(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return prefetch(*args)
loss.prefetch = after_a_signal
"""
    out = tmp_path / 'run'
    job = Job(dataset, out, before=early)
    assert job.wait(60) == [0], job.err()
    assert 'SIGTERM: nothing to save' in job.out() and not checkpoint.steps(out)
    assert json.loads((out / 'preempted.json').read_text())['signal'] == 'SIGTERM'


def test_a_hangup_counts_as_a_signal_but_under_nohup_and_a_reader_may_leave(
        dataset, finished_by_two, tmp_path):
    # the terminal closes; under nohup a hangup is ignored at the start, and stays so
    hung, kept, cut = (tmp_path / name for name in ('hung', 'kept', 'cut'))
    job = Job(dataset, hung, ranks=2)
    nohup = Job(dataset, kept, ranks=2,
                before='import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)')
    for one in (job, nohup):
        one.until('step      5/')
        one.processes[1].send_signal(signal.SIGHUP)
    assert job.wait() == [0, 0], job.err()
    assert nohup.wait() == [0, 0], nohup.err()
    assert_preempted(hung, 'SIGHUP')
    assert_same_run(kept, finished_by_two)

    # python train.py | head
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    job = Job(dataset, cut, ranks=2, before=f'os.dup2(os.open({str(pipe)!r}, os.O_WRONLY), 1)')
    with open(pipe) as lines:
        assert any('step      5/' in line for line in lines)
    job.wait()
    assert_same_run(cut, finished_by_two)


def test_fault_12_one_rank_dies(dataset, tmp_path):
    args = ['--max_iters=100000', '--eval_interval=1000000']
    job = Job(dataset, tmp_path / 'direct', *args, ranks=2)
    job.until('step      6/')
    job.processes[1].kill()
    # long before dist_timeout, which is 600 s
    assert job.wait(60) == [4, -signal.SIGKILL]
    assert job.err().count('\n') == 1 and 'lost the other processes' in job.err() and 'Traceback' not in job.err()
    assert not checkpoint.steps(tmp_path / 'direct'), 'half a job must not save'
    out = tmp_path / 'run'
    process = torchrun(dataset, out, *args)
    until(out, 'step      6/')
    os.kill(rank_1(out), signal.SIGKILL)
    assert process.wait(60) == 1
    assert not alive(out) and not checkpoint.steps(out)


def test_fault_13_one_rank_hangs(dataset, tmp_path):
    out = tmp_path / 'run'
    process = torchrun(dataset, out, '--max_iters=100000', '--eval_interval=1000000', '--dist_timeout=12')
    until(out, 'step      6/')
    os.kill(rank_1(out), signal.SIGSTOP)
    # dist_timeout, then the 30 s that torchrun gives before its kill -9; the rest is for a busy machine
    assert process.wait(12 + 30 + 120) == 1
    assert not alive(out) and 'lost the other processes' in Path(f'{out}.txt').read_text()


@pytest.fixture
def silent_port():
    """ Where a connection is neither accepted nor refused, as behind a firewall: a queue of one that is full. """
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(('127.0.0.1', 0))
        listener.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.mark.parametrize('rank, address, port, words', [(1, '127.0.0.1', '1', 'refused'), (1, '127.0.0.1', None, 'timed out'),
                                                        (1, 'no-such-host.invalid', '29511', 'is rank 0 running'),
                                                        (0, 'no-such-host.invalid', '29511', 'is rank 0 running'),
                                                        (1, '127.0.0.1', '', 'not set')])
def test_fault_14_the_master_cannot_be_reached(dataset, tmp_path, silent_port, rank, address, port, words):
    port = str(silent_port) if port is None else port
    env = dict(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR=address, MASTER_PORT=port)
    job = Job(dataset, tmp_path / 'run', '--master_timeout=6', env=env)
    assert job.wait(120) == [4]                                          # torch's own patience is 300 s and more
    err = job.err()
    assert err.count('\n') == 1 and words in err, err
    for word in ('MASTER_PORT', *([address, 'MASTER_ADDR', port] if port else [])):
        assert word in err
    assert not (tmp_path / 'run').exists()


# ---- broken bytes, full disks

def damaged(finished, tmp_path, name, damage):
    out = tmp_path / name
    shutil.copytree(finished, out)
    damage(out / 'step-00000012')
    return out


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_fault_15_and_16_the_newest_checkpoint_is_torn_or_a_bit_is_flipped(dataset, finished, tmp_path):
    model = 'model.safetensors'
    cases = {'half': (model, lambda p: os.truncate(p / model, (p / model).stat().st_size // 2)),
             'less_100': ('optimizer.safetensors', lambda p: os.truncate(p / 'optimizer.safetensors', (p / 'optimizer.safetensors').stat().st_size - 100)),
             'empty': ('training_state.json', lambda p: os.truncate(p / 'training_state.json', 0)),
             'flipped': ('ema.safetensors', lambda p: flip(p / 'ema.safetensors'))}
    outs = {name: damaged(finished, tmp_path, name, damage) for name, (_, damage) in cases.items()}
    results = run_each(*(['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY] for out in outs.values()))
    for (name, (file, _)), out, (rc, stdout, stderr) in zip(cases.items(), outs.values(), results):
        assert rc == 0 and 'going on from' in stdout and 'step-00000008' in stdout, (name, stderr)
        assert 'step-00000012 is broken and set aside' in stderr and file in stderr
        assert (out / 'step-00000012.broken').exists() and checkpoint.verify(out / 'step-00000012')


def test_fault_17_all_checkpoints_are_broken(dataset, finished, tmp_path):
    out = damaged(finished, tmp_path, 'run', lambda p: None)
    for folder in checkpoint.steps(out):
        flip(folder / 'model.safetensors')
    result = train(dataset, out)
    assert result.returncode == 2 and 'no whole checkpoint left' in result.stderr.splitlines()[-1] and 'Traceback' not in result.stderr


def test_fault_18_the_disk_is_full(dataset, tmp_path):
    out = tmp_path / 'run'
    assert train(dataset, out, '--max_iters=4').returncode == 0
    job = Job(dataset, out, '--max_iters=40', ranks=2,
              before='import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))')
    assert job.wait() == [5, 5] and not job.err(1)
    lines = job.err().splitlines()
    assert len(lines) == 3
    for n, line in zip((8, 12, 16), lines):
        assert f'cannot save step-{n:08d}: needs ' in line and f'at {out}' in line
    assert lines[0].startswith('warning') and lines[2].startswith('error') and 'step     16/' in job.out()
    assert not list(out.glob('*.tmp')) and checkpoint.newest(out).name == 'step-00000004'
    assert train(dataset, out).returncode == 0                           # room again: it goes on


def test_a_median_of_zero_makes_no_step_a_spike(dataset, tmp_path):
    """ Most steps of t2l beside cut texts have no loss, so their gradient is exactly 0. """
    before = 'import torch\nfrom runs import resume\nresume.State.history = property(lambda self: torch.zeros(64), lambda self, norms: None)'
    assert Job(dataset, tmp_path / 'run', '--max_iters=4', before=before).wait() == [0]
    assert not skips(tmp_path / 'run')


def test_fault_19_a_truncated_dataset(dataset, tmp_path):
    commands, expected = [], []
    for name in ('train-00000.tokens.bin', 'train-00000.latents.npy', 'val-00000.offsets.npy', 'latent_stats.npz'):
        copy = tmp_path / name
        shutil.copytree(dataset, copy)
        size = (copy / name).stat().st_size
        os.truncate(copy / name, size - 8)
        commands.append(['train.py', f'--dataset={copy}', f'--out_dir={tmp_path}/run', *TINY])
        expected.append((name, str(size), str(size - 8)))
    for words, (rc, out, err) in zip(expected, run_each(*commands)):
        assert rc == 2 and err.count('\n') == 1 and all(word in err for word in words), err
        assert 'parameters' not in out, 'before the model is built'


def test_fault_21_data_that_contradicts_its_manifest(dataset, tmp_path):
    def meta_with(change):
        def damage(folder):
            meta = json.loads((folder / 'meta.json').read_text())
            change(meta)
            (folder / 'meta.json').write_text(sealed(meta))
        return damage

    def large_id(folder):
        tokens = np.memmap(folder / 'train-00000.tokens.bin', np.uint16, 'r+')
        tokens[5] = 60_000
        tokens.flush()
    cases = [(meta_with(lambda m: m.update(latent_shape=[1, 17])), ['1, 17)', '1, 16)']),
             (meta_with(lambda m: m['tokenizer'].update(vocab_size=10 ** 9)), ['1000000000', 'uint16']),
             (large_id, ['60000', '300'])]
    commands = []
    for i, (damage, _) in enumerate(cases):
        shutil.copytree(dataset, tmp_path / str(i))
        damage(tmp_path / str(i))
        commands.append(['train.py', f'--dataset={tmp_path}/{i}', f'--out_dir={tmp_path}/run', *TINY])
    for (_, words), (rc, _, err) in zip(cases, run_each(*commands)):
        assert rc == 2 and err.count('\n') == 1 and all(word in err for word in words), err


def test_validation_data_found_wrong_only_when_it_is_read_is_one_line(dataset, tmp_path):
    before = """
import data
rows = data.PackedDataset.rows
def patched(self, *args):
    if self.split == 'val':
        raise ValueError('val-00000: wrong')
    return rows(self, *args)
data.PackedDataset.rows = patched
"""
    job = Job(dataset, tmp_path / 'run', before=before)
    assert job.wait() == [2] and job.err() == 'error: val-00000: wrong\n'


def corpus(path, n=400):
    rng = np.random.default_rng(0)
    words = 'red blue small old man woman child dog cat runs sits eats jumps street house park river market near the'.split()
    path.write_text('\n'.join(f'{" ".join(rng.choice(words, 12))} number {i}' for i in range(n)) + '\n')
    return path


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_fault_20_latents_that_are_not_finite_at_prepare(tmp_path):
    path, z = corpus(tmp_path / 'a.txt', 3000), np.random.default_rng(0).standard_normal((3000, 4)).astype(np.float32)
    commands = []
    lines = path.read_text().splitlines()
    in_val = next(i for i, line in enumerate(lines) if text_hash(line) < .01 * 2**64)
    for name, bad in (('few', [7, in_val]), ('many', range(0, 3000, 100))):
        spoiled = z.copy()
        spoiled[list(bad), 1] = [np.nan, np.inf] * (len(bad) // 2)
        np.save(tmp_path / f'{name}.npy', spoiled)
        commands.append(['prepare.py', f'--input={path}', f'--latents_from={tmp_path}/{name}.npy', '--tokenizer=byte',
                         f'--out={tmp_path}/{name}'])
    (rc, out, err), (rc_many, _, err_many) = run_each(*commands)
    assert rc == 0, err
    splits = [PackedDataset(tmp_path / 'few', split) for split in ('train', 'val')]
    assert [ds.meta['splits'][ds.split]['nonfinite'] for ds in splits] == [1, 1] and sum(map(len, splits)) == 2998
    assert all(torch.isfinite(ds.rows(np.arange(len(ds)))[1]).all() for ds in splits) and 'dropped (NaN, inf or beyond float16)' in out
    assert rc_many == 2 and 'latents cannot be stored, more than 0.1%; the first: ' in err_many and err_many.strip().count('\n') == 0
    assert not (tmp_path / 'many/meta.json').exists()


def test_fault_20_the_share_of_bad_latents_is_that_of_all_ranks(tmp_path):
    """ One in 2,000 is a drop, also where it lies in a last shard of 80 that is all a rank has. """
    lines = corpus(tmp_path / 'a.txt', 2000).read_text().splitlines()
    in_train = [i for i, line in enumerate(lines) if text_hash(line) >= .01 * 2**64]
    z = np.random.default_rng(0).standard_normal((2000, 4)).astype(np.float32)
    z[in_train[-5]] = np.nan
    np.save(tmp_path / 'z.npy', z)
    job = Job(None, tmp_path / 'x', f'--input={tmp_path}/a.txt', f'--latents_from={tmp_path}/z.npy', '--tokenizer=byte',
              '--shard_size=1900', f'--out={tmp_path}/x', script='prepare.py', ranks=2)
    assert job.wait() == [0, 0], job.err(1)
    assert [shard['nonfinite'] for shard in PackedDataset(tmp_path / 'x', 'train').meta['splits']['train']['shards']] == [0, 1]


def test_fault_26_prepare_is_killed_at_random_and_goes_on_with_another_number_of_ranks(tmp_path):
    """ The encoder is a BERT: its embeddings do depend on how texts are batched, so batches must be the shard's own. """
    (tmp_path / 'bert').mkdir()
    args = [f'--input={corpus(tmp_path / "a.txt")}', f'--encoder={save_encoder(tmp_path / "bert")}', '--pooling=mean', '--vocab_size=300',
            '--shard_size=20', '--val_fraction=.1', '--device=cpu']
    # kills fall inside a shard too, and before meta.json is there, however late they come
    slow = """
import os, time
replace = os.replace
def slowly(source, target):
    time.sleep(999 if str(target).endswith('meta.json') else .03)
    replace(source, target)
os.replace = slowly
"""

    def start(name, ranks, **kw):
        return Job(None, tmp_path / name, *args, f'--out={tmp_path / name}', script='prepare.py', ranks=ranks, **kw)
    whole = start('whole', 1)
    assert whole.wait() == [0], whole.err()
    chance = random.Random(0)
    for ranks, killed, at in ((1, (0, 1), 'train-0000'), (2, (1,), 'train-0001'), (4, (0, 1), 'val-0000')):
        out = tmp_path / f'killed{ranks}'
        job = start(out.name, 2, before=slow)
        job.until(at)
        time.sleep(chance.random() / 5)
        for i in killed:
            job.processes[i].send_signal(signal.SIGKILL)
        codes = job.wait()
        assert codes[1] == -signal.SIGKILL and codes[0] == (-signal.SIGKILL if 0 in killed else 4), (codes, job.err())
        assert not (out / 'meta.json').exists()
        noted = {path.name.split('.')[0] for path in out.glob('*.whole.json')}
        begun = {path.name.split('.')[0] for path in out.glob('*-0*') if not path.name.endswith('.tmp')}
        assert noted and len(begun - noted) <= 2, 'of each rank at most the shard that it was writing'
        before = {path: path.stat().st_mtime_ns for path in out.glob('*-0*.*')
                  if path.name.split('.')[0] in noted and 'whole' not in path.name}
        job = start(out.name, ranks)
        assert job.wait() == [0] * ranks, job.err()
        assert all(path.stat().st_mtime_ns == when for path, when in before.items()), 'what was whole is not written again'
        assert files_of(out) == files_of(tmp_path / 'whole')


def test_fault_26_an_orphan_of_a_killed_prepare_keeps_the_next_one_out(tmp_path):
    args = [f'--input={corpus(tmp_path / "a.txt")}', '--encoder=lsa', '--encoder_dims=16', '--vocab_size=300', '--shard_size=20',
            f'--out={tmp_path / "x"}']
    stuck = "import os, time\nreplace = os.replace\nos.replace = lambda *p: time.sleep(999) if 'train-00003' in str(p[1]) else replace(*p)"
    job = Job(None, tmp_path / 'x', *args, script='prepare.py', ranks=2, before=stuck)
    job.until('train-00002')
    job.processes[0].kill()                                  # rank 1 is asleep in its own shard, and lives on
    job.processes[0].wait()
    second = run('prepare.py', *args)
    assert second.returncode == 2 and 'in use by another prepare.py' in second.stderr and second.stderr.strip().count('\n') == 0
    assert job.processes[1].poll() is None
    job.processes[1].kill()
    job.processes[1].wait()
    assert run('prepare.py', *args).returncode == 0


def test_fault_27_bad_documents_and_broken_files_at_prepare(tmp_path):
    lines = corpus(tmp_path / 'good.txt').read_bytes().splitlines()
    bad = [b'', b'   ', b'\xff\xfe broken \x80', b'nul \x00 inside', b'word ' * 2_000_000]                    # the last has 10 MB
    (tmp_path / 'a.txt').write_bytes(b'\n'.join(lines + bad))
    (tmp_path / 'empty.txt').write_bytes(b'\n\n')
    args = ['prepare.py', f'--input={tmp_path}/a.txt', '--encoder=lsa', '--encoder_dims=16', '--vocab_size=300', '--shard_size=100']
    (rc_stop, _, err_stop), (rc, _, err) = run_each([*args, f'--out={tmp_path}/x'],
                                                    [*args, '--invalid_bytes=replace', f'--out={tmp_path}/x'])
    args.append('--invalid_bytes=replace')
    assert rc_stop == 2 and f'a.txt, line {len(lines) + 3}: byte 0xFF is no utf-8' in err_stop and err_stop.strip().count('\n') == 0
    assert rc == 0, err
    x, splits = tmp_path / 'x', [PackedDataset(tmp_path / 'x', split) for split in ('train', 'val')]
    count = splits[0].meta['counts']['input']
    assert count == dict(read=405, kept=403, empty=2, invalid_utf8=1)
    assert sum(ds.meta['splits'][ds.split]['documents'] for ds in splits) == 403
    found = [''.join(text for _, text in sorted(parts)) for ds in splits for parts in documents_of(ds).values()]
    expected = [line.decode('utf-8', 'replace') for line in lines + bad[3:4]] + ['\ufffd\ufffd broken \ufffd', bad[4].decode().strip()]
    assert sorted(found) == sorted(expected), 'chunks join to their documents'
    first = files_of(x)
    content = bytearray((x / 'train-00001.latents.npy').read_bytes())
    content[-3] ^= 4
    (x / 'train-00001.latents.npy').write_bytes(content)
    os.truncate(x / 'train-00000.tokens.bin', 100)
    (x / 'train-00002.tokens.bin.tmp').write_bytes(b'stale')
    os.remove(x / 'latent_stats.npz')
    (rc_seen, _, err_seen), (rc, out, err), (rc_none, _, err_none), (rc_good, seen, _) = run_each(
        ['prepare.py', f'--inspect={x}'], [*args, f'--out={x}'], ['prepare.py', f'--input={tmp_path}/empty.txt', f'--out={tmp_path}/y'],
        ['prepare.py', f'--inspect={x}'])
    assert rc_seen == 2 and 'run prepare.py again' in err_seen and err_seen.strip().count('\n') == 0
    assert rc == 0 and files_of(x) == first and out.count('there already') == sum(ds.n_shards for ds in splits) - 2
    assert rc_none == 2 and 'no documents (2 empty among 2 read)' in err_none and err_none.strip().count('\n') == 0
    assert rc_good == 0 and 'each as meta.json says' in seen and '405 documents, 403 kept, 2 empty' in seen


def documents_of(ds):
    """ {document: [(chunk, text)]} of a split. """
    parts = {}
    ids = np.concatenate([np.load(path) for path in sorted(Path(ds.folder).glob(f'{ds.split}-*.ids.npy'))])
    for text, (document, chunk) in zip(texts_in(ds), ids.tolist()):
        parts.setdefault(document, []).append((chunk, text))
    return parts


def test_fault_22_resume_with_another_model_tokenizer_or_encoder(dataset, finished, tmp_path):
    def other(name, change):
        shutil.copytree(dataset, tmp_path / name)
        meta = json.loads((tmp_path / name / 'meta.json').read_text())
        change(tmp_path / name, meta)
        (tmp_path / name / 'meta.json').write_text(sealed(meta))
        return tmp_path / name

    def retokenize(folder, meta):
        path = folder / 'tokenizer.json'
        path.write_text(path.read_text() + '\n')
        meta['files']['tokenizer.json'] = checkpoint.describe(path)
    encoder = other('encoder', lambda folder, meta: meta['encoder'].update(revision='sha256:0'))
    out = tmp_path / 'run'
    shutil.copytree(finished, out)
    cases = [(dataset, ['--width=64'], ['width=32', '64']), (dataset, ['--latent_target=x0'], ["latent_target='v'", "'x0'"]),
             (encoder, [], ['revision', 'sha256:0']), (other('tokenizer', retokenize), [], ['tokenizer.json']),
             (dataset, ['--optimizer=muon'], ["optimizer='adamw'", "'muon'"]),
             (dataset, ['--device=auto', '--max_iters=14', '--eval_interval=7', '--log_interval=2',
                        '--learning_rate=1e-4', '--keep=3'], None)]
    results = run_each(*(['train.py', f'--dataset={data}', f'--out_dir={out}', *TINY, *args] for data, args, _ in cases))
    for (_, args, words), (rc, stdout, err) in zip(cases, results):
        if words is None:                                                # harmless
            assert rc == 0 and (out / 'latest').read_text().strip() == 'step-00000014', err
        else:
            assert rc == 2 and err.count('\n') == 1 and all(word in err for word in words), (args, err)


def test_fault_22_resume_on_other_texts_of_the_same_tokenizer(tmp_path):
    lines = corpus(tmp_path / 'a.txt').read_text().splitlines()
    hashes = [text_hash(line) < .1 * 2**64 for line in lines]
    (tmp_path / 'same.txt').write_text('\n'.join(lines) + '\n')

    # as many texts, one of them another: in train, or in val
    for name, where in (('train', hashes.index(False)), ('val', hashes.index(True))):
        other = next(text for i in range(999) if (text_hash(text := f'other {i}') < .1 * 2**64) == hashes[where])
        (tmp_path / f'{name}.txt').write_text('\n'.join([*lines[:where], other, *lines[where + 1:]]) + '\n')

    def prepare(name):
        return ['prepare.py', f'--input={tmp_path}/{name}.txt', '--tokenizer=byte', '--val_fraction=.1', f'--out={tmp_path}/{name}']

    def go_on(run, data, *args):
        return ['train.py', f'--dataset={tmp_path}/{data}', f'--out_dir={tmp_path}/{run}', *TINY, '--mode=unconditional', '--streams=text',
                *args]
    results = run_each(*map(prepare, ('a', 'same', 'train', 'val')), go_on('run', 'a', '--max_iters=2'))
    assert all(rc == 0 for rc, _, _ in results), results

    refused = ('train', 'val')
    results = run_each(*(go_on('run', data, '--max_iters=4') for data in refused))
    for data, (rc, _, err) in zip(refused, results):
        assert rc == 2 and err.count('\n') == 1 and f'data sha256 of {data}' in err, (data, err)
        assert (tmp_path / 'run' / 'latest').read_text() == 'step-00000002\n'

    # the same bytes in another folder are the same data; to fine-tune or to evaluate on other texts stays possible
    results = run_each(go_on('run', 'same', '--max_iters=4'), go_on('run', 'a', '--max_iters=5'),
                       go_on('tuned', 'train', '--max_iters=2', f'--init_from={tmp_path}/run'),
                       ['evaluate.py', f'--out_dir={tmp_path}/run', f'--dataset={tmp_path}/val', '--tasks=nelbo', '--n=8', '--draws=1',
                        '--device=cpu'])
    assert all(rc == 0 for rc, _, _ in results), results
    assert (tmp_path / 'run' / 'latest').read_text() == 'step-00000005\n'


# ---- hostile files

@pytest.mark.parametrize('force', ['0', '1'])
def test_fault_23_a_checkpoint_that_would_run_a_command(dataset, finished, tmp_path, force):
    commands, ran = [], tmp_path / 'ran'
    for name in ('optimizer.safetensors', 'rng.safetensors', 'model.safetensors'):
        out = tmp_path / name
        shutil.copytree(finished, out)
        torch.save(Command(f'touch {ran}'), out / 'step-00000012' / name)
        forge(out / 'step-00000012')
        commands.append(['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY])
    results = run_each(*commands, env=dict(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=force))
    for command, (rc, _, err) in zip(commands, results):
        assert rc == 2 and err.count('\n') == 1 and Path(command[2].partition('=')[2]).name in err, err
    assert not ran.exists()


def test_fault_24_hostile_metadata(dataset, finished, tmp_path):
    def lies_about(folder, **lie):
        # the digest stays as it was
        state = json.loads((folder / 'training_state.json').read_text())
        (folder / 'training_state.json').write_text(json.dumps({**state, **lie}))

    commands = []
    config = json.loads((finished / 'step-00000012' / 'training_state.json').read_text())['model_config']
    lies = [dict(depth=10 ** 6), dict(vocab_size=10 ** 9), dict(width=2 ** 40), dict(seq_len=10 ** 12), dict(latent_tokens=10 ** 9)]
    for i, lie in enumerate(lies):
        out = tmp_path / f'lie{i}'
        shutil.copytree(finished, out)
        for folder in checkpoint.steps(out):
            forge(folder, model_config={**config, **lie})
        commands.append(['sample.py', f'--out_dir={out}', '--text=a dog', '--device=cpu'])
    for i, lie in enumerate([dict(identity=5), dict(history=[1.0] * 99), dict(step='many'), dict(identity=None)]):
        out = tmp_path / f'state{i}'
        shutil.copytree(finished, out)
        lies_about(out / 'step-00000012', **lie)
        commands.append(['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY])
    huge = {'name': 'train-00000', 'samples': 10 ** 12, 'files': {}}
    changes = [lambda m: m['splits']['train']['shards'][0].update(name='../../etc/passwd'), lambda m: m.update(max_tokens=10 ** 12),
               lambda m: m.update(latent_shape=[10 ** 9, 10 ** 9]), lambda m: m['splits']['train'].update(shards=[huge])]
    for i, change in enumerate(changes):
        copy = tmp_path / f'data{i}'
        shutil.copytree(dataset, copy)
        meta = json.loads((copy / 'meta.json').read_text())
        change(meta)
        (copy / 'meta.json').write_text(json.dumps(meta))
        commands.append(['train.py', f'--dataset={copy}', f'--out_dir={tmp_path}/run', *TINY])
    code = f"""
import json, resource, sys, time
sys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT)!r}]
import contextlib, io, runpy, torch, transformers
for script, *args in {commands!r}:
    sys.argv, err, rc, begin = [script] + args, io.StringIO(), 0, time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            runpy.run_path({str(ROOT)!r} + '/' + script, run_name='__main__')
        except SystemExit as stop:
            rc = stop.code
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps([args[0], rc, err.getvalue(), time.process_time() - begin, mib]))
"""
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                            env={**os.environ, 'PYTHONPATH': str(ROOT)})
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == len(commands), result.stderr
    for i, (name, rc, err, seconds, mib) in enumerate(found):
        assert 'json' in err or 'safetensors' in err, err
        assert seconds < 5 and mib < 1000, (name, rc, err, seconds, mib)

        # a training goes on from the newest whole step, and says so
        if len(lies) <= i < len(lies) + 4:
            assert rc == 0 and 'step-00000012 is broken and set aside' in err, (name, rc, err)
        else:
            assert rc == 2 and err.count('\n') == 1, (name, rc, err)


# ---- mistakes

def test_fault_25_a_bad_command_line_ends_before_any_process_is_met(dataset, tmp_path):
    env = dict(RANK='1', WORLD_SIZE='2', MASTER_ADDR='no-such-host.invalid', MASTER_PORT='29511')
    (tmp_path / 'typo.py').write_text('bach_size = 3\n')
    for args, words in ((['--bach_size=3'], ['bach_size', 'batch_size']), (['--max_iters=many'], ['max_iters', 'many']),
                        ([f'{tmp_path}/typo.py'], ['bach_size', 'typo.py', 'batch_size']), (['--learning_rate=-1'], ['learning_rate', '-1']),
                        (['--parallel=fsdp', '--optimizer=muon'], ['fsdp', 'muon'])):
        result = run('train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/run', *args, env={**os.environ, **env})
        assert result.returncode == 2 and result.stderr.count('\n') == 1 and all(word in result.stderr for word in words), result.stderr


def test_fault_28_two_runs_on_one_folder(dataset, tmp_path):
    out = tmp_path / 'run'
    first = Job(dataset, out, '--max_iters=100000')
    first.until('step      5/')
    second = train(dataset, out)
    assert second.returncode == 2 and second.stderr.count('\n') == 1 and 'in use by another run' in second.stderr
    assert json.loads((out / 'config.json').read_text())['max_iters'] == 100_000
    before = max(step for step, _ in log(out))
    first.until(f'step {before + 5:>6}/')                                # unharmed: it goes on
    first.processes[0].terminate()
    assert first.wait() == [0] and checkpoint.verify(checkpoint.newest(out))


def test_fault_29_guard_off_against_on(dataset, tmp_path):
    args = ['--max_iters=80', '--eval_interval=40']                    # beyond the 64 norms of the history
    train_each(dataset, {tmp_path / 'on': args, tmp_path / 'off': [*args, '--guard=0']})
    assert_same_run(tmp_path / 'on', tmp_path / 'off')
    assert log(tmp_path / 'on')[80, False]['skipped'] == 0


@pytest.mark.parametrize('ranks, args', [(1, []), (2, ['--parallel=fsdp'])])
def test_weights_that_are_not_finite_are_not_saved_and_end_the_run(dataset, tmp_path, ranks, args):
    out = tmp_path / 'run'
    job = Job(dataset, out, '--guard=0', '--keep=2', *args, ranks=ranks, before=hook({9: 'nan'}))
    assert job.wait() == [3] * ranks
    line, = [line for line in job.err().splitlines() if line.startswith('error')]
    assert line.startswith('error: step-00000012 is not saved: model.') and 'newest checkpoint is step 8' in line
    assert 'Traceback' not in job.err() and not list(out.glob('*.tmp'))
    assert [p.name for p in checkpoint.steps(out)] == ['step-00000008', 'step-00000004']
    assert all(torch.isfinite(w).all() for w in weights(out).values())


def test_nothing_is_saved_on_a_skipped_step_but_at_the_first_log_line_after_it(dataset, tmp_path):
    out = tmp_path / 'run'
    assert Job(dataset, out, '--keep=9', '--log_interval=2', before=hook({3: 'nan', 4: 'nan'})).wait() == [0]
    assert [p.name[-2:] for p in checkpoint.steps(out)] == ['12', '08', '06']
    entries = log(out)
    assert [step for step, is_evaluation in entries if is_evaluation] == [4, 6, 8, 12]
    assert entries[6, False]['skipped'] == 2 and json.loads((out / 'step-00000006/training_state.json').read_text())['evaluated_at'] == 6

    # a run that goes on from there is the same run
    cut(out, tmp_path / 'cut', 'step-00000006')
    assert train(dataset, tmp_path / 'cut', '--keep=9', '--log_interval=2').returncode == 0
    assert log(tmp_path / 'cut') == {key: entry for key, entry in entries.items() if key[0] > 6}
    assert same(weights(out), weights(tmp_path / 'cut'))


def test_an_error_of_one_rank_at_the_resume_is_everybodys(dataset, finished, tmp_path):
    out = tmp_path / 'run'
    shutil.copytree(finished, out)
    job = Job(dataset, out, ranks=2, before="""
from runs import resume
def cannot(*args, **kw):
    raise OSError('no such mount')
if os.environ['RANK'] == '1':
    resume.State.load = cannot
""")
    assert job.wait() == [2, 2] and 'no such mount' in job.err(0) and 'Traceback' not in job.err(0) + job.err(1)


def test_the_lost_run(dataset, tmp_path):
    """ An inf gradient at one step of an l2t training. The loop that lost 16 GPUs asked isnan(norm): the norm is inf, the clip
    coefficient 0, and inf * 0 goes into the weights for good. """
    args = ['--max_iters=60', '--eval_interval=60', '--learning_rate=1e-2', '--dropout=0']
    naive = """
g['model'].train()
weights = [p for p in g['state'].parameters if p.requires_grad]
optimizer, lost = torch.optim.AdamW(weights, lr=1e-3), []
for step, batch in zip(range(12), g['micro_batches'](0)):
    loss = g['loss_fn'](batch, g['stages'][0].predict)[0]
    loss.backward()
    if step == 5:
        weights[0].grad.view(-1)[0] = float('inf')
    norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
    if not torch.isnan(norm):
        optimizer.step()
    optimizer.zero_grad()
    lost.append(not torch.isfinite(loss))
print('naive', [bool(x) for x in lost])
"""
    job = Job(dataset, tmp_path / 'clean', *args, before='import torch', after=naive)
    assert job.wait() == [0], job.err()
    assert f'naive {[False] * 6 + [True] * 6}' in job.out()
    assert Job(dataset, tmp_path / 'ours', *args, before=infinite(20)).wait() == [0]
    clean, ours = log(tmp_path / 'clean')[60, True]['val_text'], log(tmp_path / 'ours')[60, True]['val_text']
    assert [s['step'] for s in skips(tmp_path / 'ours')] == [21]
    assert ours == pytest.approx(clean, rel=0.02)
