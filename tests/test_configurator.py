""" Knobs, config files and --key=value. Each test writes a small script and runs it as a user would. """
import os
import shutil
import subprocess
import sys

import pytest

import configurator

ROOT = os.path.dirname(os.path.abspath(configurator.__file__))
SCRIPT = '''"""
A demonstration.

    python demo.py
"""
import json
from configurator import configure

# -- data
dataset = 'quickstart'  # a folder under data/
text = ''
batch_size = 8          # rows per rank
lr = 6e-4
compile = True
betas = (0.9, 0.99)
tasks = ['nelbo']
shape = ()
min_lr = None           # None: lr / 10
last = -1               # the last knob, and its comment
                        # goes on here
CAPITALS = 3
config = configure(globals())
below = 5
assert config == {name: globals()[name] for name in config}
print('VALUES', json.dumps(config))
'''
DEFAULTS = {'dataset': 'quickstart', 'text': '', 'batch_size': 8, 'lr': 6e-4, 'compile': True, 'betas': [.9, .99],
            'tasks': ['nelbo'], 'shape': [], 'min_lr': None, 'last': -1}


@pytest.fixture
def demo(tmp_path):
    """ run(*args) -> the finished process of demo.py, with its values. """
    import json
    (tmp_path / 'demo.py').write_text(SCRIPT)

    def run(*args, cwd=tmp_path, **env):
        env = {**os.environ, 'PYTHONPATH': ROOT, **env}
        done = subprocess.run([sys.executable, str(tmp_path / 'demo.py'), *args], cwd=cwd, env=env, capture_output=True, text=True)
        found = [line[7:] for line in done.stdout.splitlines() if line.startswith('VALUES ')]
        done.values = json.loads(found[0]) if found else None
        done.changed = found and {k: v for k, v in done.values.items() if v != DEFAULTS[k]}
        return done
    return run


def refused(done, *words):
    """ One line on stderr with these words, exit code 2, and the script went no further. """
    assert done.returncode == 2, done
    assert done.stderr.count('\n') == 1 and done.values is None, done.stderr
    for word in words:
        assert word in done.stderr, (word, done.stderr)


def test_the_knobs_are_the_literals_of_the_block_below_the_imports(demo):
    done = demo()
    assert done.values == DEFAULTS and done.returncode == 0 and not done.stderr


@pytest.mark.parametrize('flag, name, value', [
    ('--lr=1', 'lr', 1.0), ('--batch_size=1e5', 'batch_size', 100000), ('--last=-3', 'last', -3),
    ('--compile=false', 'compile', False), ('--compile=0', 'compile', False),
    ('--betas=0.9,0.95', 'betas', [.9, .95]), ('--betas=(1,0)', 'betas', [1., 0.]), ('--tasks=l2t,1,t2l', 'tasks', ['l2t', '1', 't2l']),
    ('--shape=3,4', 'shape', [3, 4]), ('--text=1e5', 'text', '1e5'), ('--text=(a, "b") = c', 'text', '(a, "b") = c'),
    ('--min_lr=1e-5', 'min_lr', 1e-5), ('--min_lr=none of it', 'min_lr', 'none of it'), ('--min_lr=false', 'min_lr', False),
])
def test_a_flag_does_what_it_says(tmp_path, flag, name, value):
    (tmp_path / 'demo.py').write_text(SCRIPT)
    globals_ = {'__file__': str(tmp_path / 'demo.py')}
    config = configurator.configure(globals_, [flag])
    found = list(config[name]) if isinstance(config[name], tuple) else config[name]
    assert found == value and type(found) is type(value) and globals_[name] == config[name]
    default = configurator.read_knobs(str(tmp_path / 'demo.py'))[0][name]
    assert default is None or type(config[name]) is type(default)


@pytest.mark.parametrize('flag, kind', [
    ('--batch_size=abc', 'int'), ('--batch_size=1.5', 'int'), ('--batch_size=', 'int'), ('--batch_size=true', 'int'),
    ('--batch_size=1e999', 'int'), ('--lr=fast', 'float'), ('--lr=true', 'float'), ('--compile=maybe', 'bool'),
    ('--compile=2', 'bool'), ('--betas=a,b', '(0.9, 0.99)'),
])
def test_an_ill_typed_flag_stops_with_one_line(tmp_path, capsys, flag, kind):
    (tmp_path / 'demo.py').write_text(SCRIPT)
    with pytest.raises(SystemExit) as stopped:
        configurator.configure({'__file__': str(tmp_path / 'demo.py')}, [flag])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and not out
    assert err == f"error: knob {flag[2:].split('=')[0]!r} in the command line: {flag.split('=')[1]!r} is no {kind}\n"


def test_later_wins_and_the_table_says_where_each_value_came_from(demo, tmp_path):
    (tmp_path / 'a.py').write_text('batch_size = 1\nlr = 1\ntext = "of a"')
    (tmp_path / 'b.py').write_text('batch_size = 2\nlr = 2')
    done = demo('a.py', 'b.py', '--batch_size=3')
    assert done.changed == {'batch_size': 3, 'lr': 2.0, 'text': 'of a'}
    table = {line.split()[0]: line.split()[-1] for line in done.stdout.splitlines()[:3]}
    assert table == {'batch_size': 'line', 'lr': 'b.py', 'text': 'a.py'}
    assert len(done.stdout.splitlines()) == 4, 'knobs at default are not printed'
    assert demo('--batch_size=3', 'a.py').changed['batch_size'] == 1


@pytest.mark.parametrize('columns', [10, 40, 80])
def test_no_line_of_the_table_is_wider_than_the_terminal(demo, tmp_path, columns):
    (tmp_path / ('long' * 20 + '.py')).write_text('batch_size = 1')
    done = demo('long' * 20 + '.py', '--text=' + 'many words ' * 20, '--lr=1', COLUMNS=str(columns))
    lines = [line for line in done.stdout.splitlines() if not line.startswith('VALUES')]
    assert len(lines) == 3 and max(map(len, lines)) <= columns
    assert columns < 40 or '...' in lines[0] and 'many' in lines[1] and lines[2].split()[:2] == ['lr', '1.0']
    assert done.values['text'] == 'many words ' * 20


def test_a_script_with_checks_of_its_own_prints_the_table_after_them(tmp_path, capsys):
    (tmp_path / 'demo.py').write_text(SCRIPT)
    config = configurator.configure({'__file__': str(tmp_path / 'demo.py')}, ['--lr=1'], show=False)
    assert not capsys.readouterr().out
    configurator.show_knobs(config)
    assert capsys.readouterr().out == 'lr  1.0  the command line\n'


def test_a_config_file_is_python_and_its_helpers_are_no_knobs(demo, tmp_path):
    (tmp_path / 'c.py').write_text('import math, os.path as path\nfrom math import pi\nfrom os import sep\n'
                                   'def double(x):\n    return 2 * x\n'
                                   '_rows, SCALE = 4, 2\nbatch_size = double(_rows) * SCALE\nlr = 1 if pi > 3 else 2\n'
                                   'tasks = [t for t in ("l2t", "t2l")]')
    assert demo('c.py').changed == {'batch_size': 16, 'lr': 1.0, 'tasks': ['l2t', 't2l']}


def copy_configurator(home):
    (home / 'runs').mkdir()
    shutil.copy(configurator.__file__, home)
    shutil.copy(os.path.join(ROOT, 'runs', 'files.py'), home / 'runs')


def test_a_config_file_is_found_from_any_working_directory(demo, tmp_path):
    (tmp_path / 'config').mkdir()
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'config' / 'c.py').write_text('import os\ntext = os.path.basename(__file__)')
    for path in (str(tmp_path / 'config' / 'c.py'), '../config/c.py'):
        assert demo(path, cwd=tmp_path / 'elsewhere').changed == {'text': 'c.py'}
    (tmp_path / 'home' / 'config').mkdir(parents=True)  # or beside the scripts, whatever the working directory
    copy_configurator(tmp_path / 'home')
    (tmp_path / 'home' / 'config' / 'd.py').write_text('text = "of home"')
    assert demo('config/d.py', PYTHONPATH=str(tmp_path / 'home')).changed == {'text': 'of home'}


def test_a_file_may_hold_the_knobs_of_other_scripts_but_no_typo(demo, tmp_path, monkeypatch):
    home = tmp_path / 'home'  # a copy of the configurator and its rules beside a script of another name
    home.mkdir()
    copy_configurator(home)
    (home / 'sample.py').write_text('import a_library_that_is_not_here\nnum_samples = 4\nsteps = 1\n1 / 0')
    (tmp_path / 'c.py').write_text('num_samples = "any"\nbatch_size = 2')
    assert demo('c.py', PYTHONPATH=str(home)).changed == {'batch_size': 2}
    refused(demo('--num_samples=4', PYTHONPATH=str(home)), "unknown knob 'num_samples' in the command line", 'sample.py')
    (tmp_path / 'd.py').write_text('num_sample = 4')
    refused(demo('d.py', PYTHONPATH=str(home)), "unknown knob 'num_sample' in d.py, did you mean 'num_samples'?")


@pytest.mark.parametrize('content, words', [
    ('batch_siz = 4', ["unknown knob 'batch_siz' in c.py, did you mean 'batch_size'?"]),
    ('Batch_size = 4', ["'Batch_size'", "'batch_size'"]),
    ('zzzz = 4', ["unknown knob 'zzzz' in c.py"]),
    ('batch_size = "abc"', ["knob 'batch_size' in c.py: 'abc' is no int"]),
    ('batch_size = "8"', ["knob 'batch_size' in c.py: '8' is no int"]),
    ('batch_size = True', ['True is no int']),
    ('compile = 1', ['1 is no bool']),
    ('lr = None', ['None is no float']),
    ('min_lr = {"a": 1}', ['is no plain value']),
    ('betas = .9', ['0.9 is no (0.9, 0.99)']),
    ('lr = 1\nbatch_size =', ['c.py, line 2', 'SyntaxError']),
    ('lr = 1\n\nbatch_size = rows', ['c.py, line 3', 'NameError', 'rows']),
    ('raise ValueError("two\\nlines")', ['c.py, line 1', 'two lines']),
])
def test_a_mistake_in_a_config_file_stops_with_one_line(demo, tmp_path, content, words):
    (tmp_path / 'c.py').write_text(content)
    refused(demo('c.py'), *words)


@pytest.mark.parametrize('args, words', [
    (['--batchsize=4'], ["unknown knob 'batchsize' in the command line, did you mean 'batch_size'?"]),
    (['--below=4'], ["'below'"]), (['--CAPITALS=4'], ["'CAPITALS'"]), (['--json=4'], ["'json'"]),
    (['nowhere.py'], ['nowhere.py', 'No such file']),
    (['--compile'], ["'--compile' is neither", '--compile=VALUE']),
    (['batch_size=4'], ['neither']), (['config/l2t'], ['neither']), (['-'], ['neither']),
])
def test_a_mistake_on_the_command_line_stops_with_one_line(demo, args, words):
    refused(demo(*args), *words)


def test_a_guard_and_a_setting_among_the_imports_do_not_end_the_block(tmp_path):
    path = tmp_path / 'demo.py'
    path.write_text("""'''Docs.'''
if __name__ != '__main__':
    raise ImportError('a script')

import os

os.environ.setdefault('A', 'B')

import json

# ---- knobs
rate = 0.5            # [0, 1]: per step

if rate:
    after = 1
""")
    knobs, help_text, found_rules = configurator.read_knobs(path)
    assert knobs == dict(rate=0.5) and found_rules == dict(rate='[0, 1]')
    assert help_text == 'Docs.\n\n# ---- knobs\nrate = 0.5            # [0, 1]: per step'


def test_help_is_the_docstring_and_the_knob_block_as_written(demo):
    done = demo('--help', '--batch_size=oops')
    block = SCRIPT[SCRIPT.index('# -- data'):SCRIPT.index('\nCAPITALS')]
    assert done.returncode == 0 and done.values is None and not done.stderr
    assert done.stdout == f'A demonstration.\n\n    python demo.py\n\n{block}\n'


def test_only_the_first_rank_prints_the_values_and_every_rank_its_errors(demo):
    assert 'batch_size' in demo('--batch_size=3', RANK='0').stdout
    quiet = demo('--batch_size=3', RANK='1')
    assert quiet.values['batch_size'] == 3 and len(quiet.stdout.splitlines()) == 1
    refused(demo('--oops=3', RANK='1'), 'oops')


def test_a_script_run_by_runpy_is_configured_the_same(tmp_path):
    (tmp_path / 'demo.py').write_text(SCRIPT)
    code = 'import runpy, sys; sys.argv = ["demo.py", "--lr=2"]; print(runpy.run_path("demo.py", run_name="__main__")["lr"])'
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': ROOT},
                          capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == '2.0', done


def test_wrong_input_is_one_line_and_a_bug_is_a_traceback(capsys):
    for error in (ValueError('two\nlines'), FileNotFoundError(2, 'No such file', 'x')):
        with pytest.raises(SystemExit) as stopped, configurator.stop_on_error(5):
            raise error
        assert stopped.value.code == 5 and capsys.readouterr().err.count('\n') == 1
    with pytest.raises(KeyError), configurator.stop_on_error():
        raise KeyError('ours')


def test_every_script_of_the_repository_explains_itself():
    for script in configurator.SCRIPTS:
        path = os.path.join(ROOT, f'{script}.py')
        if os.path.exists(path):
            knobs, help_text, _ = configurator.read_knobs(path)
            assert knobs and all(f'\n{name} = ' in help_text for name in knobs), script


@pytest.mark.parametrize('text, value', [('1', True), ('0', False), ('true', True), ('None', None)])
def test_a_knob_that_is_none_or_a_bool_takes_0_and_1(text, value):
    assert configurator.settle(text, None, 'None | bool', configurator.from_text) is value


def test_a_knob_of_a_room_is_read_where_its_switch_names_it_and_refused_elsewhere(capsys):
    """ gidd_gamma stands in processes/gidd.py, and text_process=gidd opens it. """
    train = {'__file__': os.path.join(ROOT, 'train.py')}
    knobs, help_text, rules = configurator.read_knobs(train['__file__'])
    assert knobs['gidd_gamma'] == 1.0 and rules['gidd_gamma'] == '[0.1, 10]' and 'processes/gidd.py' in help_text
    opened = configurator.configure(dict(train), ['--gidd_gamma=2', '--text_process=gidd'], show=False)
    assert opened['gidd_gamma'] == 2.0
    for flags, words in ((['--gidd_gamma=2'], 'text_process is gidd'), (['--muon_lr=.1', '--optimizer=adamw'], 'optimizer is muon'),
                         (['--curriculum=true'], 'importance is freq or learned or hybrid')):
        with pytest.raises(SystemExit) as stopped:
            configurator.configure(dict(train), flags, show=False)
        err = capsys.readouterr().err
        assert stopped.value.code == 2 and words in err and err.count('\n') == 1, err
    with pytest.raises(SystemExit):
        configurator.configure(dict(train), ['--text_process=gidd', '--gidd_gamma=99'], show=False)
