""" Kills and signals, at any moment of a run. """
import os
import random
import signal
import time

import pytest

from base.writing import RUN, Claim
from faulty import AGAIN, assert_preempted, assert_same_run, names
from launch import Job, held, log, same, saved, train_each
from runs import checkpoint, run_folder
from toys import states


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


def killed_while_saving(out, first, ready, n_files):
    """ A child saves step after step, and is killed after it has touched so many files: a count,
    for a busy machine is seconds late. """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            tell(write)
            for step in range(first, 10 ** 6):
                checkpoint.write_checkpoint(out, step, *ready[step % 10])
        finally:
            os._exit(1)
    os.close(write)
    for _ in range(n_files):
        assert os.read(read, 1), 'the child ended by itself'
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(read)


def test_fault_06_kill_9_while_saving_200_times(tmp_path):
    """ Each child goes on from what the one before it has left. """
    ready = [states(step) for step in range(10)]
    step, outcomes, n_torn, moment = 1, set(), 0, random.Random(0)
    with Claim(tmp_path, RUN, run_folder.NAMES):
        checkpoint.write_checkpoint(tmp_path, 1, *ready[1])
    for _ in range(200):
        before = step
        killed_while_saving(tmp_path, step + 1, ready, moment.randrange(1, 40))

        # what is there loads, and no torn folder has a whole name
        n_torn += bool(list(tmp_path.glob('.nanoLDLM-step-*')))
        found = checkpoint.newest(tmp_path)
        step = checkpoint.verify(found)['step']
        assert same(saved(found)['optimizer'], ready[step % 10][0]['optimizer'])
        assert not list(tmp_path.glob('*.broken*'))
        # two are kept, and more where one kill after the other came before the removal
        assert step < 3 or 2 <= len(checkpoint.steps(tmp_path)) < 6
        outcomes.add(step - before)

        # whoever has the folder next clears away what was left
        with Claim(tmp_path, RUN, run_folder.NAMES):
            assert not list(tmp_path.glob('.*'))
    assert len(outcomes) > 1 and n_torn > 20, 'the kills are to hit different moments, and saves'


@pytest.mark.parametrize('ranks, args', [(1, ''), (1, '--optimizer=muon'), (2, '')])
def test_fault_07_kill_9_then_resume_equals_the_uninterrupted_run_bitwise(
        request, dataset, tmp_path, ranks, args):
    out, whole = tmp_path / 'cut', tmp_path / 'whole'
    if args:
        train_each(dataset, {whole: [args]})
    else:
        whole = request.getfixturevalue('finished' if ranks == 1 else 'finished_by_two')
    step = random.randrange(5, 9)                              # the checkpoint of step 4 is whole
    job = Job(dataset, out, args, ranks=ranks, before=held(step, tmp_path / 'never'))
    job.until(f'step {step:>6}/')
    for process in job.processes:
        process.kill()
    job.wait()
    assert not (out / 'step-00000012').exists()
    job = Job(dataset, out, args, ranks=ranks).ends()
    assert 'going on from' in job.out()
    assert_same_run(out, whole)


def test_fault_08_resume_on_another_number_of_ranks(dataset, tmp_path):
    args = '--dropout=0 --max_iters=24 --eval_interval=100 --global_batch=16'
    one, out = tmp_path / 'one', tmp_path / 'many'
    train_each(dataset, {one: [args, '--batch_size=16']})
    first = 0
    for ranks, batch, end in ((2, 8, 4), (1, 16, 12)):
        job = Job(dataset, out, args, f'--batch_size={batch}', ranks=ranks,
                  before=held(end - first, tmp_path / f'go{end}'))
        job.until(f'step {end:>6}/')
        job.processes[-1].terminate()                          # one rank is told, all agree
        job.ends(128 + signal.SIGTERM)
        first = len(log(out))
    Job(dataset, out, args, '--batch_size=4', ranks=4).ends()

    def losses(out):
        return {step: entry['loss'] for (step, _), entry in log(out).items() if 'loss' in entry}
    assert len(losses(out)) == 24 and losses(out) == pytest.approx(losses(one), rel=1e-3)


@pytest.mark.parametrize('number, flags', [
    pytest.param(signal.SIGTERM, [], id='fault_09_sigterm'),
    pytest.param(signal.SIGUSR1, ['--signals-to-handle=SIGTERM,SIGUSR1'], id='fault_10_sigusr1')])
def test_fault_09_and_10_a_signal_to_torchrun_saves_at_once_and_the_run_goes_on_bitwise(
        dataset, finished_by_two, torchrun, number, flags):
    agent = torchrun(flags=flags)
    agent.process.send_signal(number)
    assert agent.wait() == 1 and not agent.alive()             # torchrun's own code after a signal
    assert_preempted(agent.out, number.name)
    Job(dataset, agent.out, ranks=2).ends()
    assert not (agent.out / 'preempted.json').exists()
    assert_same_run(agent.out, finished_by_two)


def test_the_workers_of_a_torchrun_that_is_killed_save_and_leave(torchrun):
    agent = torchrun()
    agent.process.kill()
    while agent.alive():                                       # without a signal they are held
        time.sleep(0.05)
    assert_preempted(agent.out, 'SIGTERM')


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
    job.ends(code)
    assert names(out)[0] == 12 and 'Traceback' not in job.err()


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
    job.ends(128 + signal.SIGTERM)
    assert_preempted(out, 'SIGTERM', steps=[4])
    assert (4, True) not in log(out), 'it was to leave the evaluation'
    Job(dataset, out, ranks=2).ends()
    assert_same_run(out, finished_by_two)                      # it is done after the resume


@pytest.mark.parametrize('number, code', [(signal.SIGINT, 130), (signal.SIGUSR1, 0)])
def test_ctrl_c_saves_and_stops_make_and_a_preemption_is_a_success(
        dataset, finished, tmp_path, number, code):
    out = tmp_path / 'run'
    job = Job(dataset, out, before=held(5, tmp_path / 'go') + AGAIN)
    job.until('step      5/')
    job.processes[0].send_signal(number)
    job.ends(code)
    assert not job.err() and 'run the same command again to go on' in job.out()
    assert_preempted(out, number.name)
    train_each(dataset, {out: []})
    assert_same_run(out, finished)


def test_a_hangup_counts_as_a_signal_and_a_reader_may_leave(dataset, finished_by_two, tmp_path):
    # the terminal closes
    hung, cut_off, pipe = (tmp_path / name for name in ('hung', 'cut', 'pipe'))
    heard = 'import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)'      # also under nohup
    job = Job(dataset, hung, ranks=2, before=held(5, tmp_path / 'go') + heard)
    job.until('step      5/')
    job.processes[1].send_signal(signal.SIGHUP)
    job.ends(128 + signal.SIGHUP)
    assert_preempted(hung, 'SIGHUP')

    # python train.py | head
    os.mkfifo(pipe)
    into_pipe = f'os.dup2(os.open({str(pipe)!r}, os.O_WRONLY), 1)'
    job = Job(dataset, cut_off, ranks=2, before=into_pipe)
    with open(pipe) as lines:
        assert any('step      5/' in line for line in lines)
    job.wait()
    assert_same_run(cut_off, finished_by_two)
