""" How a script begins and ends, whatever its terminal, its pipes and its environment are. Where it
is seen before torch is imported, a process takes a fraction of a second. """
import os
import subprocess
import sys

import pytest

from launch import HANGS, ROOT, Job, flags, run
from toys import write_lines

SCRIPTS = ['train.py', 'sample.py', 'evaluate.py', 'prepare.py', 'bench.py', 'plot.py', 'nano.py',
           'runs/export.py']

# a script up to its first import of torch, or of what may load torch
UNTIL_TORCH = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)     # in the background it is ignored
class Finder:
    def find_spec(self, name, *more):
        if name in ('torch', 'numpy'):
            {do}
sys.meta_path.insert(0, Finder())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def python(code, *args, flags=(), stdout=subprocess.PIPE, pass_fds=(), **env):
    """ Some lines in a new interpreter. env: None takes a variable away. """
    env = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    return subprocess.run([sys.executable, *flags, '-c', code, *map(str, args)], env=env,
                          stdout=stdout, stderr=subprocess.PIPE, pass_fds=pass_fds, text=True,
                          timeout=HANGS)


def begun(code, before='', **kw):
    """ Some lines in a new interpreter, behind base/begin.py, and some before it. """
    return python(f"""
import os, signal, sys
{before}
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(ROOT)!r})
import base.begin
{code}""", **kw)


@pytest.mark.parametrize('script', SCRIPTS)
def test_each_script_sets_a_short_spin_before_torch_from_any_folder_also_with_a_safe_path(
        script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    say = UNTIL_TORCH.format(do="print(os.environ.get('GOMP_SPINCOUNT')); os._exit(0)")
    own = dict(OMP_WAIT_POLICY=None, GOMP_SPINCOUNT=None)
    result = python(say, ROOT / script, flags=['-P'], PYTHONPATH=None, **own)
    assert result.stdout == '10000\n' and not result.stderr


@pytest.mark.parametrize('policy, spins, expected', [
    ('passive', None, None), (None, '7', '7'), ('a', '', '')])
def test_a_spin_that_the_user_has_set_stays(policy, spins, expected):
    found = begun("print(os.environ.get('GOMP_SPINCOUNT'))", OMP_WAIT_POLICY=policy,
                  GOMP_SPINCOUNT=spins)
    assert found.stdout == f'{expected}\n'


# ---- Ctrl-C

@pytest.mark.parametrize('script', SCRIPTS)
def test_ctrl_c_while_torch_is_imported_is_one_line_and_code_130(script):
    # in a destructor, where Python would swallow an exception
    kill = 'lambda self: os.kill(os.getpid(), signal.SIGINT)'
    interrupt = UNTIL_TORCH.format(do=f"type('Last', (), dict(__del__={kill}))()")
    result = python(interrupt, ROOT / script)
    assert (result.returncode, result.stderr) == (130, 'error: interrupted\n')


def test_ctrl_c_later_clears_away_what_is_half_written_and_a_bug_stays_a_traceback():
    result = begun("""
try:
    os.kill(os.getpid(), signal.SIGINT)
finally:
    print('cleared')
""")
    assert (result.returncode, result.stderr) == (130, 'error: interrupted\n')
    assert result.stdout == 'cleared\n'
    result = begun('1 / 0')
    assert result.returncode == 1 and 'Traceback' in result.stderr


# ---- outputs

def script_of(name):
    """ Code that runs a script with the arguments that it is given. """
    return f"""
import runpy, sys
sys.argv = [{name!r}, *sys.argv[1:]]
runpy.run_path({str(ROOT / name)!r}, run_name='__main__')
"""


def test_what_an_output_cannot_show_is_escaped(tmp_path):
    write_lines(tmp_path / 'a.txt', [f'Ein süßer Hund läuft, {i}.' for i in range(10)])
    told = flags(input=tmp_path / 'a.txt', tokenizer='byte', val_fraction=.3, out=tmp_path / 'ä')
    result = python(script_of('prepare.py'), *told, PYTHONIOENCODING='ascii')
    assert result.returncode == 0, result.stderr
    assert 's\\xfc\\xdfer Hund' in result.stdout and (tmp_path / 'ä/meta.json').is_file()


def test_what_a_script_is_told_is_utf_8_whatever_the_locale(tmp_path):
    told = flags(out_dir=tmp_path / 'nowhere', metric='süß')
    result = python(script_of('plot.py'), *told, LC_ALL='C', PYTHONUTF8='0',
                    PYTHONCOERCECLOCALE='0', PYTHONIOENCODING=None)
    assert result.returncode == 2 and "'s\\xfc\\xdf'" in result.stdout
    assert 'no run in' in result.stderr


@pytest.mark.parametrize('number, stream', [(1, 'stdout'), (2, 'stderr')])
def test_where_nobody_reads_any_more_the_work_goes_on(tmp_path, number, stream):
    read, write = os.pipe()
    os.close(read)
    result = begun(f"""
for i in range(1000):
    print('line', i, file=sys.{stream})
open({str(tmp_path / 'done')!r}, 'w').close()
""", before=f'os.dup2({write}, {number})', pass_fds=[write])
    os.close(write)
    assert (result.returncode, result.stdout, result.stderr) == (0, '', '')
    assert (tmp_path / 'done').exists()


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
@pytest.mark.parametrize('flags', [[], ['-u']])
def test_a_full_stdout_is_one_line_and_code_2(flags):
    with open('/dev/full', 'w') as full:
        for code in ("print('a')", "print('a', end='')", "print('a' * 100_000)\nprint('b')"):
            result = begun(f'{code}\nsys.stdout.flush()', flags=flags, stdout=full)
            assert result.returncode == 2 and result.stderr.count('\n') == 1, result.stderr
            assert 'stdout cannot be written: No space left' in result.stderr


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_the_scripts_survive_a_full_stdout(dataset, tmp_path):
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    job = Job(None, tmp_path / 'x', f'--inspect={dataset}', script='prepare.py', before=full)
    assert job.wait() == [2] and job.err().count('\n') == 1

    # a training goes on
    later = f"from runs import resume\nbegin = resume.run_folder.begin\n" \
            f"resume.run_folder.begin = lambda *args: ({full}, begin(*args))[1]"
    job = Job(dataset, tmp_path / 'run', before=later)
    assert job.wait() == [0] and (tmp_path / 'run/step-00000012').is_dir()
    assert job.err() == ('warning: stdout cannot be written: No space left on device; '
                         'the run goes on\n')


# ---- the launcher's variables

@pytest.mark.parametrize('rank, world, words', [
    ('1', None, 'RANK is passed over'), ('x', '1', 'RANK is passed over'), ('0', '1', ''),
    ('', None, ''), (None, None, ''), ('1', '2', None)])
def test_a_rank_without_a_world_is_passed_over(rank, world, words):
    result = begun("print(os.environ.get('RANK'))", RANK=rank, WORLD_SIZE=world,
                   LOCAL_RANK=None)
    assert result.returncode == 0
    assert result.stdout == ('None\n' if words is not None else f'{rank}\n')
    assert words in result.stderr if words else not result.stderr


@pytest.mark.parametrize('name, value, world', [
    ('RANK', None, '2'), ('RANK', '2', '2'), ('RANK', '-1', '2'), ('RANK', 'one', '2'),
    ('RANK', '1.0', '2'), ('RANK', '\u00b2', '3'), ('WORLD_SIZE', '0', ''),
    ('WORLD_SIZE', '-2', ''), ('WORLD_SIZE', 'two', ''), ('WORLD_SIZE', '9' * 5000, ''),
    ('LOCAL_RANK', 'x', None), ('LOCAL_RANK', '-1', None)])
def test_a_variable_of_a_launcher_that_is_no_such_number_is_one_line(name, value, world):
    env = dict(RANK='0', WORLD_SIZE=world, LOCAL_RANK=None) | {name: value}
    result = begun('', **env)
    assert result.returncode == 2 and result.stderr.count('\n') == 1
    assert f'{name}=' in result.stderr and 'expected a whole number' in result.stderr


def test_a_stray_rank_changes_nothing(tmp_path):
    write_lines(tmp_path / 'a.txt')
    told = flags(input=tmp_path / 'a.txt', tokenizer='byte', encoder='lsa', encoder_dims=2,
                 val_fraction=.3, out=tmp_path / 'x')
    result = run('prepare.py', *told, env={**os.environ, 'RANK': '1'})
    assert result.returncode == 0, result.stderr
    assert 'tokens per sample' in result.stdout and 'Traceback' not in result.stderr
