""" What Windows lacks is not needed: fcntl, resource, SIGUSR1, sched_getaffinity, the opening of folders, and fsync of what is only
read. A Linux from which all of that is taken away stands in for it; what else is different there, these tests do not see. """
import ast
import json

import pytest

from launch import ROOT, TINY, run_code

POSIX = {'fcntl', 'grp', 'posix', 'pty', 'pwd', 'resource', 'termios', 'tty'}

LIKE_WINDOWS = """
import os, signal, sys
sys.modules['fcntl'] = sys.modules['resource'] = None                    # an import of them fails
del signal.SIGUSR1, os.sched_getaffinity

of_linux = os.open, os.fsync, os.close
read_only = set()

def open_file(path, flags, *args, **kw):
    if os.path.isdir(path):
        raise PermissionError(13, 'Permission denied', path)
    fd = of_linux[0](path, flags, *args, **kw)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        read_only.add(fd)
    return fd

def fsync(fd):
    if fd in read_only:
        raise OSError(9, 'Bad file descriptor')
    of_linux[1](fd)

def close(fd):
    read_only.discard(fd)
    of_linux[2](fd)

import torch, tempfile, shutil                                           # what is not ours opens as it does
os.open, os.fsync, os.close = open_file, fsync, close
shutil._use_fd_functions = False                                         # as there: rmtree opens no folder

from runs import files
files.IS_WINDOWS = True
"""
RUN = """
import contextlib, io, json, runpy
results = []
for script, *args in json.loads(sys.argv[1]):
    sys.argv, out, err, rc = [script] + args, io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name='__main__')
        except SystemExit as stop:
            rc = stop.code or 0
    results.append((rc, out.getvalue(), err.getvalue()))
import bench, plot
print('RESULTS' + json.dumps(results))
"""


@pytest.mark.parametrize('folder', ['.', 'benchmarks', 'corpora', 'processes', 'runs', 'sampling', 'tasks'])
def test_no_module_imports_what_only_posix_has_at_its_top(folder):
    for path in sorted((ROOT / folder).glob('*.py')):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not POSIX & set(names), f'{path.relative_to(ROOT)} imports {names}'


def test_prepare_train_sample_and_evaluate_run_without_what_windows_lacks(tmp_path):
    lines = [f'a {color} {who} near the {where} number {i}' for i, (color, who, where) in enumerate(
        (c, w, p) for c in 'red blue small old'.split() for w in 'man dog cat'.split() for p in 'street house park river'.split())]
    (tmp_path / 'lines.txt').write_text('\n'.join(lines))
    data, out = tmp_path / 'packed', tmp_path / 'run'
    commands = [
        ['prepare.py', f'--input={tmp_path}/lines.txt', '--encoder=lsa', '--encoder_dims=8', '--vocab_size=280', '--max_tokens=31',
         '--val_fraction=.2', f'--out={data}'],
        ['train.py', f'--dataset={data}', f'--out_dir={out}', *TINY, '--max_iters=2', '--warmup_iters=1'],
        ['sample.py', f'--out_dir={out}', '--text=a red dog near the park', '--device=cpu', '--steps=2'],
        ['evaluate.py', f'--out_dir={out}', '--tasks=nelbo', '--n=4', '--draws=1', '--device=cpu'],
    ]
    result = run_code(LIKE_WINDOWS + RUN, json.dumps(commands))
    assert result.returncode == 0, result.stderr
    prepared, trained, *others = json.loads(result.stdout.split('RESULTS')[1])

    # all is done, and one line says that there is no lock
    for rc, _, err in (prepared, trained, *others):
        assert rc == 0, err
    assert prepared[2].count('cannot be locked') == trained[2].count('cannot be locked') == 1
    assert (data / 'meta.json').exists() and (out / 'latest').read_text().strip() == 'step-00000002'
    assert all('cannot be locked' not in err for _, _, err in others)
