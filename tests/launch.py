""" The scripts as processes: how the tests start them, and read what they leave. """
import atexit
import functools
import json
import os
import random
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch

import prepare
from base.files import read_sealed
from base.writing import entry_of, sealed
from configurator import read_knobs
from corpora.tokenizers import load_tokenizer
from data import PackedDataset
from runs import checkpoint
from runs.results import read_results
from warm import RUNS

ROOT = Path(__file__).resolve().parent.parent
EXTENDING = 'docs/extending.md'
TINY = '''--depth=2 --width=32 --heads=2 --latent_tokens=2 --batch_size=8 --dropout=0.1
          --max_iters=12 --log_interval=1 --eval_interval=4 --eval_rows=16 --warmup_iters=2
          --device=cpu --dtype=float32'''.split()

MAY_LACK = 'this machine lacks'        # begins the reason of a skip that make gpu lets pass

# Seconds after which a process hangs: no test measures time with it, a busy machine is slow.
HANGS = 600


# ---- a dataset

def texts_in(data):
    """ All texts of a split. """
    tokenizer = load_tokenizer(data.folder)
    return [tokenizer.decode(data.ids(i)) for i in range(len(data))]


def texts_of(folder, split):
    return texts_in(PackedDataset(folder, split))


# ---- processes

@functools.cache
def server():
    """ The connection to the process that forks the others, warm.py. It ends with this one. """
    ours, its = socket.socketpair()
    warm = Path(__file__).with_name('warm.py')
    process = subprocess.Popen([sys.executable, warm, str(its.fileno())], cwd=ROOT,
                               pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL,
                               env={**os.environ, 'OMP_NUM_THREADS': '1'})
    its.close()

    def end():
        ours.close()
        process.wait()
    atexit.register(end)
    return ours


def ask(number, files=()):
    """ The answer of warm.py to a number. """
    socket.send_fds(server(), [struct.pack('q', number)], files)
    answer = server().recv(8)
    assert answer, 'warm.py has ended'
    return struct.unpack('q', answer)[0]


class Process:
    """ Lines of Python in a process of their own, as subprocess.Popen has it, but forked by
    warm.py: no import of torch. """

    def __init__(self, code, argv, stdout, stderr, stdin=None, cwd=ROOT, env=None):
        self.argv, self.returncode = argv, None
        request, write = os.pipe()
        with open(os.devnull) as nothing:
            files = [(stdin or nothing).fileno(), stdout.fileno(), stderr.fileno()]
            self.pid = ask(0, [request, *files])
        os.close(request)
        with open(write, 'w') as file:
            env = dict(os.environ if env is None else env)
            json.dump([code, list(map(str, argv)), str(cwd), env], file)

    def poll(self):
        if self.returncode is None:
            answer = ask(self.pid)
            self.returncode = None if answer == RUNS else answer
        return self.returncode

    def wait(self, timeout=HANGS):
        end, pause = time.monotonic() + timeout, 0.001
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.argv, timeout)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def finished(code, argv, input='', **kw):
    """ The CompletedProcess of some lines of Python. """
    file = functools.partial(tempfile.TemporaryFile, 'w+')
    with file() as stdin, file() as out, file() as err:
        stdin.write(input)
        stdin.seek(0)
        process = Process(code, argv, out, err, stdin, **kw)
        try:
            process.wait()
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(process.argv, process.returncode, out.read(), err.read())


def run(script, *args, root=ROOT, **kw):
    """ A script of the tree in root, in a process of its own. kw: cwd, env, input. Python finds the
    modules beside a script; runs/export.py is run as a module, from the root. """
    path = str(root / script)
    modules = str(root) if script.startswith('runs/') else os.path.dirname(path)
    code = f"""
import runpy, sys
sys.path[0] = {modules!r}
runpy.run_path({path!r}, run_name='__main__')
"""
    return finished(code, [path, *args], **kw)


def run_code(code, *args, cwd=ROOT, fresh=False, **env):
    """ Some lines of Python in a process of their own, which finds the modules; env: None takes a
    variable away. fresh: a new interpreter, for lines that ask what is imported, or set what is
    read when torch is. """
    env = {**os.environ, 'PYTHONPATH': str(ROOT), **env}
    env = {name: value for name, value in env.items() if value is not None}
    if fresh:
        return subprocess.run([sys.executable, '-c', code, *args], cwd=cwd, env=env,
                              capture_output=True, text=True, timeout=HANGS)
    return finished(code, ['-c', *args], cwd=cwd, env=env)


def flags_of(dataset, out, args):
    """ Those of a training: TINY, and args, each of which may hold several as one types them. """
    more = shlex.split(' '.join(args))
    return [f'--dataset={dataset}', f'--out_dir={out}', *TINY, *more]


def train(dataset, out, *args, **kw):
    return run('train.py', *flags_of(dataset, out, args), **kw)


def train_each(dataset, runs):
    """ train.py once per {out: args}. """
    for out, args in runs.items():
        result = train(dataset, out, *args)
        assert result.returncode == 0, result.stderr


def flags(**knobs):
    """ Knobs as a command line has them: ['--name=value', ...]. """
    return [f'--{name}={value}' for name, value in knobs.items()]


def assert_refused(result, *words):
    """ A script has ended with code 2 and one line on stderr, with these words in it. """
    code, _, err = result
    assert code == 2 and err.strip().count('\n') == 0, (code, err)
    assert all(word in err for word in words), (words, err)


def run_each(*commands, env=(), **kw):
    """ (exit code, stdout, stderr) of each command, one after the other: [script, *args], or a line
    as one types it. """
    found = []
    for command in commands:
        words = shlex.split(command) if isinstance(command, str) else command
        result = run(*words, env={**os.environ, **dict(env)}, **kw)
        found.append((result.returncode, result.stdout, result.stderr))
    return found


TOGETHER = """
import contextlib, io, json, runpy, sys, traceback
answers = []
for script, *args in json.load(sys.stdin):
    sys.argv = [script, *args]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name='__main__')
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def run_together(*commands, cwd=ROOT, before=''):
    """ As run_each, but all in one process, which imports the modules once: where the process is
    not what is tested. `before` is code that runs first in it. """
    commands = [[str(ROOT / script), *map(str, args)] for script, *args in commands]
    result = finished(before + TOGETHER, ['-c'], json.dumps(commands), cwd=cwd,
                      env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def held(n, go):
    """ Code that holds a training after n steps of this process, until the file `go` is there. A
    rank that has had a signal makes it, so all go on as soon as one knows. """
    return f"""
import os, time, diffusion
from runs import run_folder
forward, steps = diffusion.Loss.forward, []
def hold(*args):
    steps.append(1)
    while len(steps) > {n} and not os.path.exists({str(go)!r}):
        time.sleep(0.01)
        if run_folder.signal_seen:
            open({str(go)!r}, 'w').close()
    return forward(*args)
diffusion.Loss.forward = hold
"""


def free_port():
    """ Where processes may meet in a moment. Those that the system picks, mostly 32768 and above,
    it may give to any connection of another test until then. """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as s:
            s.bind(('127.0.0.1', port))
            return port


started = []                                                             # jobs, for conftest to end


class Job:
    """ train.py, or another script without a dataset, as `ranks` processes, started as any launcher
    may (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). `before` is code that runs first in each of
    them, `after` last, with the script's globals in g. """

    def __init__(self, dataset, out, *args, ranks=1, before='', after='', env=None,
                 script='train.py'):
        port = free_port()
        if script == 'train.py':
            args = flags_of(dataset, out, args)
        code = f"""
import os, runpy, sys
{before}
g = runpy.run_path({str(ROOT / script)!r}, run_name='__main__')
{after}
"""
        self.files, self.processes = [], []
        started.append(self)
        for rank in range(ranks):
            where = dict(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1',
                         MASTER_PORT=str(port)) if ranks > 1 else {}
            where = {**os.environ, 'PYTHONPATH': str(ROOT), **where, **(env or {})}
            files = [Path(f'{out}.{rank}.{kind}') for kind in ('out', 'err')]
            self.files.append(files)
            with open(files[0], 'w') as stdout, open(files[1], 'w') as stderr:
                self.processes.append(Process(code, [script, *args], stdout, stderr, env=where))

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

    def ends(self, *codes):
        """ This job, once it has ended as expected: with these codes, one of each rank, or with one
        of all ranks; by default with 0. """
        expected = list(codes or [0])
        if len(expected) == 1:
            expected *= len(self.processes)
        found = self.wait()
        assert found == expected, (found, [self.err(rank) for rank in range(len(found))])
        return self

    def error(self):
        """ The one line of an error on stderr of rank 0, which shows no traceback. """
        err = self.err()
        line, = [line for line in err.splitlines() if line.startswith('error')]
        assert 'Traceback' not in err
        return line


# ---- prepare.py, in this process

def knobs_of(**knobs):
    """ All knobs of prepare.py, these among them. """
    defaults = read_knobs(ROOT / 'prepare.py')
    found = {name: knob.default for name, knob in defaults.items()}
    for name, value in knobs.items():
        found[name] = str(value) if isinstance(value, os.PathLike) else value
    return SimpleNamespace(**found)


def source_of(**knobs):
    """ What says which documents there are. """
    return SimpleNamespace(**vars(knobs_of(**knobs)), split='train')


def prepared(**knobs):
    """ The folder that prepare.py has made. """
    threads = torch.get_num_threads()
    small = dict(vocab_size=300, encoder='lsa', encoder_dims=8, shard_size=40)
    try:
        prepare.prepare(knobs_of(**small | knobs))
    finally:
        torch.set_num_threads(threads)
    return str(knobs['out'])


# ---- what a run leaves

def log(out):
    """ {step: (loss, text loss, ...)} as logged, without what depends on the clock on the wall. """
    entries = [json.loads(line) for line in open(Path(out) / 'training_log.jsonl')]
    of_clock = ('tokens_per_s', 'mfu', 'seconds', 'memory_gb')
    return {(e['step'], 'best' in e): {k: v for k, v in e.items() if k not in of_clock}
            for e in entries}


def cut(whole, out, step):
    """ A copy of a run as if it had been killed after this checkpoint. """
    out.mkdir()
    for name in ('data', step):
        shutil.copytree(whole / name, out / name)
    for name in ('config.json', 'lock'):
        shutil.copy(whole / name, out)
    return out


def weights(out, kind='model'):
    """ {name: tensor} of the newest checkpoint. """
    folder = checkpoint.steps(out)[0]
    return checkpoint.read_tensors(folder / f'{kind}.safetensors')


def saved(folder):
    """ {kind: {name: tensor}} of a checkpoint that is whole. """
    return {name.split('.')[0]: checkpoint.read_tensors(folder / name)
            for name in checkpoint.verify(folder)['files']}


def same(a, b):
    """ The same names, and under each the same bits. """
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def measured(out):
    """ {'task/control/metric': value} of a run's results.json, '..._se': its standard error. Of the
    validation split, the most texts, and no sweep. """
    found = {}
    for record in sorted(read_results(Path(out) / 'results.json'), key=lambda one: one['n']):
        key = '/'.join(filter(None, (record['task'], record['control'], record['metric'])))
        if not record['point'] and not record['texts']:
            found[key] = record['value']
            if record['se'] is not None:
                found[f'{key}_se'] = record['se']
    return found


# ---- files that were changed, with and without their digests

def change_meta(folder, change):
    """ Another meta.json, with its digest. """
    meta = read_sealed(folder / 'meta.json')
    change(meta)
    (folder / 'meta.json').write_text(sealed(meta))


def forge_file(folder, name, content):
    """ Another content of a file of a dataset, with its size and digest in meta.json. """
    (folder / name).write_bytes(content)

    def change(meta):
        shards = [shard for split in meta['splits'].values() for shard in split['shards']]
        for files in [meta['files'], *(shard['files'] for shard in shards)]:
            if name in files:
                files[name] = entry_of(folder / name)
    change_meta(folder, change)


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
