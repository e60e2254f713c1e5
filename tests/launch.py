""" train.py and the other scripts as processes: how the tests start them, and read what they leave. """
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from runs import checkpoint

ROOT = Path(__file__).resolve().parent.parent
TINY = ['--depth=2', '--width=32', '--heads=2', '--latent_tokens=2', '--batch_size=8', '--max_iters=12', '--log_interval=1',
        '--eval_interval=4', '--eval_iters=2', '--warmup_iters=2', '--device=cpu', '--dtype=float32',
        '--dropout=0.1']

# Seconds after which a process hangs: no test measures time with it, a busy machine may take minutes.
HANGS = 600


def run(script, *args, cwd=ROOT, **kw):
    return subprocess.run([sys.executable, str(ROOT / script), *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=HANGS, **kw)


def run_code(code, *args, cwd=ROOT, **env):
    """ Some lines of Python in a process of their own, which finds the modules; env: None takes a variable away. """
    env = {**os.environ, 'PYTHONPATH': str(ROOT), **env}
    env = {name: value for name, value in env.items() if value is not None}
    return subprocess.run([sys.executable, '-c', code, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=HANGS)


def train(dataset, out, *args, **kw):
    return run('train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY, *args, **kw)


def train_each(dataset, runs):
    """ train.py once per {out: args}, by runpy in one process: one import of torch for all of them. """
    code = f"""
import runpy, sys
for argv in {[[f'--dataset={dataset}', f'--out_dir={out}', *TINY, *args] for out, args in runs.items()]!r}:
    sys.argv = ['train.py'] + argv
    runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')
"""
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
                            env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert result.returncode == 0, result.stderr


def run_each(*commands, cwd=ROOT, timeout=HANGS, env=(), root=ROOT):
    """ (exit code, stdout, stderr) of each [script, *args], one after the other in one process: one import of torch for all. An
    exception is exit code 1, as Python would have it. root: of the tree whose scripts run. """
    code = f"""
import contextlib, gc, io, json, runpy, sys, traceback
results = []
for script, *args in {[list(map(str, c)) for c in commands]!r}:
    sys.argv, out, err, rc = [script] + args, io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path({str(root)!r} + '/' + script, run_name='__main__')
        except SystemExit as stop:
            rc = stop.code or 0
        except Exception:
            rc = 1
            traceback.print_exc()
    results.append((rc, out.getvalue(), err.getvalue()))
    if rc != 2:
        gc.collect()                                       # what a script left open is closed
        gc.freeze()                                        # and what stays is not searched again
print('RESULTS' + json.dumps(results))
"""
    result = subprocess.run([sys.executable, '-'], input=code, cwd=cwd, capture_output=True, text=True, timeout=timeout,
                            env={**os.environ, 'PYTHONPATH': str(root), **dict(env)})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.split('RESULTS')[1])


def log(out):
    """ {step: (loss, text loss, ...)} as logged, without what depends on the clock on the wall. """
    entries = [json.loads(line) for line in open(Path(out) / 'training_log.jsonl')]
    return {(e['step'], 'best' in e): {k: v for k, v in e.items() if k not in ('tokens_per_s', 'mfu', 'seconds', 'memory_gb')} for e in entries}


def cut(whole, out, step):
    """ A copy of a run as if it had been killed after this checkpoint. """
    out.mkdir()
    for name in ('data', step):
        shutil.copytree(whole / name, out / name)
    shutil.copy(whole / 'config.json', out)
    (out / 'latest').write_text(step)


def weights(out, kind='model'):
    """ {name: tensor} of the newest checkpoint. """
    folder = Path(out) / (Path(out) / 'latest').read_text().strip()
    return checkpoint.read_tensors(folder / f'{kind}.safetensors')


def saved(folder):
    """ {kind: {name: tensor}} of a checkpoint that is whole. """
    return {name.split('.')[0]: checkpoint.read_tensors(folder / name) for name in checkpoint.verify(folder)['files']}


def fork_ranks(before, body, *jobs, env=()):
    """
    Runs `body` in each rank of each job, one job after the other. A job is (name of its output, ranks, anything else); body sees
    them as `job`, and its rank. All ranks are forks of one process that has run `before`: one import of torch for all.
    Returns the exit codes of each job's ranks; what rank r prints is in the files `name`.r.out and .err.
    """
    code = f"""
import json, os, runpy, socket, sys
import numpy, safetensors.torch, tokenizers, torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
sys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT)!r}]
def fork(job, rank, port):
    pid = os.fork()
    if pid:
        return pid
    rc = 1
    try:
        for number, kind in ((1, 'out'), (2, 'err')):
            os.dup2(os.open(f'{{job[0]}}.{{rank}}.{{kind}}', os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if job[1] > 1:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(job[1]), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        body(job, rank, port)
        rc = 0
    except SystemExit as stop:
        rc = stop.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(rc)
def body(job, rank, port):
{textwrap.indent(body, '    ')}
{before}
codes = []
for job in {jobs!r}:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    pids = [fork(job, rank, port) for rank in range(job[1])]
    after_fork(job, pids)
    codes.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
print(json.dumps(codes))
"""
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
                            env={**os.environ, 'OMP_NUM_THREADS': '1', **dict(env)})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def train_ranks(dataset, *jobs, before=''):
    """ fork_ranks of train.py; a job is (out_dir, ranks, *args). `before` is code that runs first in each rank. """
    body = f"""{before}
sys.argv = ['train.py', {f'--dataset={dataset}'!r}, f'--out_dir={{job[0]}}', *{TINY!r}, '--master_timeout=180', *job[2:]]
runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')
"""
    return fork_ranks('after_fork = lambda job, pids: None', body, *((str(job[0]), *job[1:]) for job in jobs))


# five steps of a tenth of a second, then of one each: time to hit a certain one
SLOW = """
import time, loss
statistics, steps = loss.statistics, []
def slowly(*args):
    steps.append(1)
    time.sleep(0.1 if len(steps) < 6 else 1)
    return statistics(*args)
loss.statistics = slowly
"""
started = []                                                             # jobs, for conftest to end


class Job:
    """ train.py, or another script without a dataset, as `ranks` processes, started as any launcher may (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT). `before` is code that runs first in each of them, `after` last, with the script's globals in g. """

    def __init__(self, dataset, out, *args, ranks=1, before='', after='', preexec=None, env=None, script='train.py'):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        of_train = [f'--dataset={dataset}', f'--out_dir={out}', *TINY, '--master_timeout=180'] if script == 'train.py' else []
        argv = [script, *of_train, *map(str, args)]
        code = f"""
import os, runpy, sys
sys.argv = {argv!r}
{before}
g = runpy.run_path({str(ROOT / script)!r}, run_name='__main__')
{after}
"""
        self.files, self.processes = [], []
        started.append(self)
        for rank in range(ranks):
            where = dict(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port)) if ranks > 1 else {}
            files = [Path(f'{out}.{rank}.{kind}') for kind in ('out', 'err')]
            self.files.append(files)
            with open(files[0], 'w') as stdout, open(files[1], 'w') as stderr:
                self.processes.append(subprocess.Popen(
                    [sys.executable, '-c', code], cwd=ROOT, stdout=stdout, stderr=stderr, preexec_fn=preexec,
                    env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', **where, **(env or {})}))

    def out(self, rank=0):
        return self.files[rank][0].read_text()

    def err(self, rank=0):
        return self.files[rank][1].read_text()

    def until(self, text, seconds=HANGS):
        """ Wait until rank 0 has printed it. """
        end = time.monotonic() + seconds
        while text not in self.out():
            ended = self.processes[0].poll() is not None and text not in self.out()
            assert time.monotonic() < end and not ended, (text, self.out(), self.err())
            time.sleep(0.005)

    def wait(self, seconds=HANGS):
        """ The exit code of each rank. """
        end = time.monotonic() + seconds
        try:
            return [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]
        finally:
            for p in self.processes:
                p.kill()
