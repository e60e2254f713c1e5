""" Processes that die, hang, or do not meet, and runs of two processes on one folder. """
import os
import shutil
import signal
import socket

import pytest

from base.files import read_json
from faulty import LONG, assert_same_run, files_of, names
from launch import Job, assert_refused, flags_of, held, log, run_each, train_each
from runs import checkpoint


def test_fault_12_one_rank_dies(dataset, tmp_path, torchrun):
    out = tmp_path / 'direct'
    job = Job(dataset, out, LONG, '--dist_timeout=3600', ranks=2)
    job.until('step      6/')
    job.processes[1].kill()
    # at once: after dist_timeout, an hour, the test would have given up
    job.ends(4, -signal.SIGKILL)
    assert job.err().count('\n') == 1 and 'lost the other processes' in job.err()
    assert not names(out), 'half a job must not save'

    # torchrun leaves no orphan
    agent = torchrun(LONG)
    os.kill(agent.rank_1(), signal.SIGKILL)
    assert agent.wait() == 1
    assert not agent.alive() and not names(agent.out)


def test_fault_13_one_rank_hangs(torchrun):
    # long enough for a busy machine; then torchrun gives 5 seconds before its kill -9
    agent = torchrun(LONG, '--dist_timeout=20', shutdown=5)
    os.kill(agent.rank_1(), signal.SIGSTOP)
    agent.go.touch()
    assert agent.wait() == 1
    assert not agent.alive() and 'lost the other processes' in agent.said()


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
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize('rank, address, port, words', [
    (1, '127.0.0.1', '1', 'timed out'), (1, '127.0.0.1', 'silent', 'timed out'),
    (0, 'no-such-host.invalid', '29511', 'is rank 0 running'), (1, '127.0.0.1', '', 'not set')])
def test_fault_14_the_master_cannot_be_reached(
        dataset, tmp_path, silent_port, rank, address, port, words):
    port = silent_port if port == 'silent' else port
    env = dict(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR=address, MASTER_PORT=port)
    job = Job(dataset, tmp_path / 'run', env=env,
              before='from base import distributed\ndistributed.MEETING = 4').ends(4)
    err = job.err().splitlines()[-1]                           # below the lines of torch
    assert words in err and 'MASTER_PORT' in err, err
    assert not port or address in err and port in err
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


def test_fault_25_a_bad_command_line_ends_before_any_process_is_met(dataset, tmp_path):
    env = dict(RANK='1', WORLD_SIZE='2', MASTER_ADDR='no-such-host.invalid', MASTER_PORT='29511')
    here = f'train.py --dataset={dataset} --out_dir={tmp_path}/run'
    spelled, together = run_each(f'{here} --bach_size=3',
                                 f'{here} --parallel=fsdp --optimizer=muon', env=env)
    assert_refused(spelled, 'bach_size', 'batch_size')
    assert_refused(together, 'fsdp', 'muon')


def test_an_error_of_one_rank_at_the_resume_is_everybodys(dataset, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / 'run')
    job = Job(dataset, out, ranks=2, before="""
from runs import resume
def cannot(*args, **kw):
    raise OSError('no such mount')
if os.environ['RANK'] == '1':
    resume.State.load = cannot
""").ends(2)
    assert 'no such mount' in job.error() and 'Traceback' not in job.err(1)


# ---- two runs on one folder

def test_fault_28_two_runs_on_one_folder(dataset, tmp_path):
    out = tmp_path / 'run'
    first = Job(dataset, out, '--max_iters=100000')
    first.until('step      5/')
    second, = run_each(['train.py', *flags_of(dataset, out, [])])
    assert_refused(second, 'in use by another process')
    assert read_json(out / 'config.json')['max_iters'] == 100_000
    last = max(step for step, _ in log(out))
    first.until(f'step {last + 5:>6,}/')                       # unharmed: it goes on
    first.processes[0].terminate()
    first.ends(128 + signal.SIGTERM)
    assert checkpoint.verify(checkpoint.newest(out))


def test_a_run_whose_folder_is_removed_stops_and_leaves_the_next_one_alone(
        dataset, finished, tmp_path):
    out, go = tmp_path / 'run', tmp_path / 'go'
    first = Job(dataset, out, '--max_iters=40 --learning_rate=3e-4', before=held(5, go))
    first.until('step      5/')
    shutil.rmtree(out)
    train_each(dataset, {out: []})                             # while the first one waits
    before = files_of(out)
    go.touch()
    first.ends(2)
    assert first.error().startswith(f'error: {out}/lock was removed, moved or ')
    assert files_of(out) == before
    assert_same_run(out, finished)
