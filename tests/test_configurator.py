""" Knobs, config files and --key=value. """
import os
import subprocess
import sys

import pytest

import configurator
from base import console
from configurator import Knob
from launch import ROOT, flags
from toys import put

SCRIPT = '''"""
A demonstration.

    python demo.py
"""
import json
from configurator import configure

# -- data
dataset = 'quickstart'  # a folder under data/
text = ''
batch_size = 8          # [1, 1e6]: rows per rank
lr = 6e-4
compile = True
betas = (0.9, 0.99)     # [0, 1)
tasks = ('nelbo',)      # nelbo | l2t | t2l; what is measured,
                        # all of it
min_lr = None           # None | (0, 1] | <a name>; None: lr / 10
last = -1               # the last knob, and its comment
                        # goes on here
CAPITALS = 3
config = configure(globals())
below = 5
print('VALUES', json.dumps(config))
'''
TRAIN, SAMPLE = str(ROOT / 'train.py'), str(ROOT / 'sample.py')
HOME = os.path.expanduser('~')
DEFAULTS = {'dataset': 'quickstart', 'text': '', 'batch_size': 8, 'lr': 6e-4, 'compile': True,
            'betas': (.9, .99), 'tasks': ('nelbo',), 'min_lr': None, 'last': -1}


def table(text):
    """ [left, right] of lines 'left => right'. """
    return [line.strip().split(' => ') for line in text.strip().splitlines()]


@pytest.fixture
def demo(here):
    """ changed(*args) -> the knobs that are not at their defaults. The working directory is that of
    demo.py. """
    put('demo.py', SCRIPT)

    def changed(*args):
        globals_ = {'__file__': str(here / 'demo.py')}
        config = configurator.configure(globals_, args)
        assert config.items() <= globals_.items()
        return {name: value for name, value in config.items()
                if value != DEFAULTS[name] or type(value) is not type(DEFAULTS[name])}
    return changed


@pytest.fixture
def refused(demo, capsys):
    """ refused(args, words): one line on stderr with these words, exit code 2, nothing printed. """
    def refuses(args, words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            demo(*args)
        out, err = capsys.readouterr()
        assert stopped.value.code == 2 and not out and err.startswith('error: ') and words in err
        assert err.count('\n') == 1, err
    return refuses


def test_a_script_is_configured_and_prints_what_was_set(demo):
    done = subprocess.run([sys.executable, 'demo.py', '--lr=2'], capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': str(ROOT)})
    table, values = done.stdout.splitlines()
    assert done.returncode == 0 and '"lr": 2.0' in values and '"batch_size": 8' in values
    assert table.split() == ['lr', '2.0', 'the', 'command', 'line']


@pytest.mark.parametrize('flag, value', [
    ('--lr=1', 1.0), ('--batch_size=1e5', 100000), ('--last=-3', -3), ('--compile=false', False),
    ('--compile=0', False), ('--betas=0.9,0.95', (.9, .95)), ('--betas=(0,.5)', (0., .5)),
    ('--tasks=l2t,t2l', ('l2t', 't2l')), ('--text=1e5', '1e5'), ('--min_lr=1e-5', 1e-5),
    ('--text=(a, "b") = c', '(a, "b") = c'), ('--min_lr=none of it', 'none of it'),
    ('--min_lr=12', '12'), ('--min_lr=~/a,~/b~/c', f'{HOME}/a,{HOME}/b~/c'), ('--text=~/a', '~/a'),
    ('--text=two\nlines', 'two\nlines')])
def test_a_flag_does_what_it_says(demo, flag, value):
    found = demo(flag)
    assert list(found.values()) == [value] and type(*found.values()) is type(value)


@pytest.mark.parametrize('flag, words', table("""
    --batch_size=abc  => 'abc' is no int
    --batch_size=1.5  => is no int
    --batch_size=     => '' is no int
    --batch_size=true => is no int
    --batch_size=1e999 => is no int
    --batch_size=0    => 0, expected [1, 1e6]
    --lr=fast         => is no float
    --compile=maybe   => is no bool
    --compile=2       => is no bool
    --betas=a,b       => 'a' is no float
    --betas=.9        => expected values like (0.9, 0.99)
    --betas=.9,1      => 1.0, expected [0, 1)
    --tasks=          => expected values like
    --tasks=all       => 'all', expected nelbo | l2t | t2l
    --min_lr=         => '', expected None | (0, 1] | <a name>
    --batchsize=4     => 'batchsize' in the command line, did you mean 'batch_size'?
    --lx=4            => 'lx' in the command line, --help lists them
    --below=4         => 'below'
    --CAPITALS=4      => 'CAPITALS'
    nowhere.py        => no config file nowhere.py: No such file
    word              => neither a config
    """))
def test_a_mistake_on_the_command_line_stops_with_one_line(refused, flag, words):
    refused([flag.strip()], words.strip())


@pytest.mark.parametrize('flag, words', [
    ('--dataset=X\r', r"'X\r' has a control character"), ('--dataset=a\nb', 'a control character'),
    ('--dataset=\x85', 'a control character'), ('--min_lr=a\t', 'a control character')])
def test_no_value_has_a_control_character(refused, flag, words):
    refused([flag], words)


def test_later_wins_and_the_table_says_where_each_value_came_from(demo, capsys):
    put('a.py', 'batch_size = 1\nlr = 1\ntext = "of a"')
    put('b.py', 'batch_size = 2\nlr = 2')
    found = demo('a.py', 'b.py', '--batch_size=3')
    assert found == {'batch_size': 3, 'lr': 2.0, 'text': 'of a'}
    table = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert table == {'batch_size': 'line', 'lr': 'b.py', 'text': 'a.py'}
    assert demo('--batch_size=3', 'a.py')['batch_size'] == 1


CONFIG = """
import math, os.path as path
def double(x):
    return 2 * x
_rows, SCALE = 4, 2
batch_size = double(_rows) * SCALE
lr = 1 if math.pi > 3 else 2
tasks = [t for t in ("l2t", "t2l")]
text = path.basename(__file__)
"""


def test_a_config_file_is_python_and_is_found_from_any_folder(demo, here, monkeypatch):
    put('config/c.py', CONFIG)
    expected = {'batch_size': 16, 'lr': 1.0, 'tasks': ('l2t', 't2l'), 'text': 'c.py'}
    assert demo('config/c.py') == expected
    monkeypatch.chdir('config')
    monkeypatch.setattr(configurator, 'HERE', str(here))
    assert configurator.run_config('config/c.py')['text'] == 'c.py', 'or beside the scripts'


def test_a_file_may_hold_the_knobs_of_other_scripts_but_no_typo(demo, refused):
    put('c.py', 'num_samples = "any"\nbatch_size = 2\nend_penalty = 1')
    assert demo('c.py') == {'batch_size': 2}
    refused(['--num_samples=4'], "'num_samples' in the command line: it is one of sample.py")
    put('d.py', 'num_sample = 4')
    refused(['d.py'], "unknown knob 'num_sample' in d.py, did you mean 'num_samples'?")


@pytest.mark.parametrize('content, words', [
    ('batch_siz = 4', "unknown knob 'batch_siz' in c.py, did you mean 'batch_size'?"),
    ('batch_size = "8"', "knob 'batch_size' in c.py: '8' is no int"),
    ('batch_size = True', 'True is no int'), ('lr = None', 'None is no float'),
    ('min_lr = {"a": 1}', "{'a': 1}, expected None"),
    ('dataset = "X\\r"', 'a control character'),
    ('lr = 1\nbatch_size =', 'config file c.py, line 2: SyntaxError'),
    ('lr = 1\n\nbatch_size = rows', 'config file c.py, line 3: NameError'),
    ('raise ValueError("two\\nlines")', 'line 1: ValueError: two lines')])
def test_a_mistake_in_a_config_file_stops_with_one_line(refused, content, words):
    put('c.py', content)
    refused(['c.py'], words)


def test_a_config_file_that_is_no_file_is_not_run(here, capsys):
    os.mkdir('c.py')
    with pytest.raises(SystemExit):
        configurator.run_config(str(here / 'c.py'))
    said = 'c.py: this is a folder, a pipe or a device, expected a file'
    assert said in capsys.readouterr().err


@pytest.mark.parametrize('line, words', table("""
    --batch_size 100        => write --batch_size=100
    --last -1               => write --last=-1
    c.py --batch_size= 100  => write --batch_size=100
    --batch_size = 100      => write --batch_size=100
    --batch_size            => write --batch_size=VALUE
    batch_size=4            => write --batch_size=4
    -batch_size=4           => write --batch_size=4
    \u2013batch_size=4           => write --batch_size=4
    --compile --lr=2        => write --compile=true
    --compile false         => write --compile=false
    --batch-size 4          => write --batch_size=4
    --batch_siz 4           => did you mean 'batch_size'
    --text=A list of three. --lr=1 => put quotes around it, --text="A list of three."
    --text=the last lr      => --text="the last lr"
    --text A list.          => --text="A list."
    --text=see c.txt        => --text="see c.txt"
    Return a list.          => --text="Return a list."
    --tasks=l2t, t2l        => put quotes around it, --tasks="l2t, t2l"
    --dataset=my data       => --dataset="my data"
    --lr=1 quickstart       => config/quickstart.py?
    --dataset=a quickstart  => did you mean config/quickstart.py?
    config/quickstart       => config/quickstart.py?
    quickstart.py           => config/quickstart.py?
    quikstart               => config/quickstart.py?
    --config=c.py           => a config file stands alone
    """))
def test_each_riddle_of_the_command_line_gets_the_line_that_is_meant(refused, line, words):
    put('c.py', 'lr = 1')
    put('c.txt', 'a text')
    refused(line.split(), words)


@pytest.mark.parametrize('args, text', [(['--dataset=w', 'A man walks.'], 'A man walks.'),
                                        (['--text=A', 'man walks.'], 'A man walks.')])
def test_a_text_in_quotes_is_no_part_of_the_knob_before_it(refused, args, text):
    refused(args, f': put quotes around it, --text="{text}"')


@pytest.mark.parametrize('script, arg, words', table("""
    prepare => mine.txt => write --input=mine.txt
    prepare => sub      => write --input=sub
    prepare => z.npy    => write --latents_from=z.npy
    prepare => a.csv    => --input=a.csv
    sample  => z.npy    => write --latents=z.npy
    sample  => a.png    => write --image=a.png
    evaluate => mine.txt => write --texts=mine.txt
    evaluate => captions => write --out_dir=captions
    train   => sub      => write --dataset=sub
    """))
def test_a_file_that_stands_alone_is_told_its_knob(here, capsys, script, arg, words):
    put('mine.txt', 'a text')
    os.mkdir('sub')
    put('captions/config.json', '{}')                        # a run, with the name of a config
    with pytest.raises(SystemExit):
        configurator.configure({'__file__': str(ROOT / f'{script.strip()}.py')}, [arg.strip()])
    assert words in capsys.readouterr().err


def test_wrong_input_is_one_line_and_a_bug_is_a_traceback(capsys):
    for error, code in ((FileNotFoundError(2, 'No such\nfile', 'x'), 5),
                        (KeyboardInterrupt(), 130)):
        with pytest.raises(SystemExit) as stopped, console.stop_on_error(5):
            raise error
        assert stopped.value.code == code and capsys.readouterr().err.count('\n') == 1
    with pytest.raises(KeyError), console.stop_on_error():
        raise KeyError('ours')


@pytest.mark.parametrize('text, value', [('1', True), ('0', False), ('true', True), ('None', None)])
def test_a_knob_that_is_none_or_a_bool_takes_0_and_1(text, value):
    assert Knob(None, 'None | bool', '').read(text) is value


def test_help_says_where_a_knob_of_one_choice_is_read():
    """ gidd_gamma of train.py with text_process=gidd alone; sample.py reads the dataclass of
    sampling/knobs.py in any case. """
    assert configurator.read_knobs(TRAIN)['gidd_gamma'][:2] == (1.0, '[0.1, 10]')
    assert configurator.read_knobs(SAMPLE)['eta'][:2] == (.02, '[0, 1]')
    assert '\n# ---- read where text_process=gidd\ngidd_' in configurator.help_of(TRAIN)
    assert '\n# ---- latents\nsolver: str = ' in configurator.help_of(SAMPLE)


def in_a_file(knobs):
    return [put('overlay.py', '\n'.join(f'{name} = {value!r}' for name, value in knobs.items()))]


def on_a_line(knobs):
    return flags(**knobs)


@pytest.mark.parametrize('given', [in_a_file, on_a_line])
def test_a_knob_of_one_choice_is_read_where_that_is_chosen_and_refused_elsewhere(here, capsys,
                                                                                 given):
    def configure(script=TRAIN, **knobs):
        args = [str(arg) for arg in given(knobs)]
        return configurator.configure({'__file__': script}, args, show=False)

    assert configure(gidd_gamma=2, text_process='gidd')['gidd_gamma'] == 2.0
    assert configure(SAMPLE, eta=1)['eta'] == 1.0
    for knobs, words in ((dict(gidd_gamma=2), 'is read where text_process=gidd'),
                         (dict(curriculum=True), 'where text_process=atat'),
                         (dict(text_process='gidd', gidd_gamma=99), '99')):
        with pytest.raises(SystemExit):
            configure(**knobs)
        assert words in capsys.readouterr().err
