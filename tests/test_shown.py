""" Nothing that a text, a file's name or a damaged file holds reaches a terminal raw. """
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest

from launch import HANGS, ROOT, TINY
from runs.shown import ShownStream, shown
from sample import Run

# writes the clipboard, clears the screen, colours by C1, goes back over what was printed, turns the direction of writing
HOSTILE = '\x1b]52;c;aGk=\x07 \x1b[2J \x9b31m \r\b\x00\x7f \u202egnp\u202c \u2066x\u2069 \u2028'
CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]')

RUN_ALL = """
import runpy, sys, torch
out, err = sys.stdout, sys.stderr
for name, argv in COMMANDS:
    sys.argv, sys.stdout, sys.stderr = argv, out, err
    print(f'## {name}', flush=True)
    print(f'## {name}', file=sys.stderr, flush=True)
    try:
        if argv[0] == 'nano.py':
            import nano
            nano.max_iters, nano.batch_size = 1, 4
            nano.latent_of_text = lambda model, x, D: torch.zeros(len(x), D)
            nano.write_by_diffusion = nano.write_from_left_to_right = lambda model, z, L: len(z) * [[109, 27, 155]]
            nano.main()
        else:
            runpy.run_path(ROOT + '/' + argv[0], run_name='__main__')
    except SystemExit as stop:
        print(f'## code {stop.code}', flush=True)
"""


def code_for(commands):
    return f'ROOT = {str(ROOT)!r}\nCOMMANDS = {[(name, list(map(str, argv))) for name, argv in commands.items()]!r}\n{RUN_ALL}'


def environment(**more):
    return {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', **more}


def parts(text):
    """ {name of a command: what it printed}. """
    _, *found = re.split('^## (?!code)', text, flags=re.MULTILINE)
    return {part.partition('\n')[0]: part.partition('\n')[2] for part in found}


@pytest.fixture(scope='module')
def planted(tmp_path_factory):
    """ A folder with a corpus whose texts, and whose file's name, are hostile; its dataset, a run, and what every command that prints
    has written to its stdout and stderr, as bytes. """
    folder = tmp_path_factory.mktemp('planted')
    corpus = folder / 'texts\x1b[2J\x9b.jsonl'
    corpus.write_text('\n'.join(json.dumps({'text': f'{who} {HOSTILE} {i}'}) for i in range(90) for who in ('man', 'dog')))
    broken = folder / 'broken\x1b[2J\r.jsonl'
    broken.write_text('{"text": "a"}\n{"text": \n')
    forged = folder / 'forged\x07'
    forged.mkdir()
    (forged / 'config.json').write_text(json.dumps({'mode': HOSTILE, 'dtype': HOSTILE}))
    (folder / 'config.py').write_text(f'mode = {"no " + HOSTILE!r}\n')
    lines = folder / 'lines.txt'
    lines.write_text(f'man {HOSTILE.translate({0x2028: None, 13: None})} 1\n')

    data, run = folder / 'data' / 'quickstart', folder / 'run'
    here = [f'--out_dir={run}', '--device=cpu']
    commands = {
        'prepare': ['prepare.py', f'--input={corpus}', '--encoder=lsa', '--encoder_dims=8', '--tokenizer=byte', '--max_tokens=79',
                    '--val_fraction=.5', f'--out={data}'],
        'inspect': ['prepare.py', f'--inspect={data}'],
        'train': ['train.py', f'--dataset={data}', f'--out_dir={run}', *TINY, '--max_iters=2', '--mode=l2t+causal'],
        'sample': ['sample.py', *here, f'--text=man {HOSTILE} [MASK:2]'],
        'sample a file': ['sample.py', *here, f'--texts={lines}', '--steps=2', '--sampler=ancestral'],
        'watch': ['sample.py', *here, f'--text=man {HOSTILE} [MASK:2]', '--watch=true'],
        'evaluate': ['evaluate.py', *here, '--n=2', '--tasks=l2t', '--show=2'],
        'report': ['plot.py', f'--out_dir={run}', '--what=report', f'--save={folder}/report\x1b[2J.html'],
        'export': ['runs/export.py', *here[:1], f'--to={folder}/given\x1b[2J'],
        'nano': ['nano.py'],
        'broken file': ['prepare.py', f'--input={broken}', f'--out={folder}/no'],
        'forged config': ['sample.py', f'--out_dir={forged}'],
        'config file': ['train.py', f'{folder}/config.py', f'--dataset={data}'],
        'no run': ['evaluate.py', f'--out_dir={folder}/none\x1b[2J\u202e'],
        'no file': ['bench.py', f'--what={HOSTILE}'],
    }
    commands |= {'no start': [*commands['train'][:2], f'--out_dir={folder}/other', *TINY, f'--init_from={folder}/no\x1b[2J\x9b']}
    result = subprocess.run([sys.executable, '-c', code_for(commands)], cwd=folder, capture_output=True, timeout=HANGS, env=environment())
    return folder, result, commands


def test_no_command_prints_a_control_character(planted):
    folder, result, commands = planted
    out, err = result.stdout.decode(), result.stderr.decode()
    assert result.returncode == 0, err
    assert not CONTROLS.findall(out) and not CONTROLS.findall(err)

    # it was there to be printed, and is shown as its escape
    of_out, of_err = parts(out), parts(err)
    assert list(of_out) == list(of_err) == list(commands)
    assert r'\r' in of_out['sample']                          # in a file it ends a line
    for name in ('sample', 'evaluate', 'prepare', 'inspect', 'nano'):
        assert all(escape in of_out[name] for escape in (r'\x1b]52;c;aGk=\x07', r'\x9b31m', r'\x08\x00\x7f', r'\u202egnp\u202c', r'\u2028')), name
    assert r'\x1b[2J' in of_out['report'] and r'\x1b[2J' in of_out['export'] and r'\x1b[2J' in of_out['sample a file']
    for name, what in {'broken file': r'broken\x1b[2J', 'forged config': r'forged\x07/config.json', 'config file': r'\x1b]52;c',
                       'no run': r'none\x1b[2J\u202e', 'no file': r'\x1b]52;c', 'no start': r'no\x1b[2J\x9b'}.items():
        assert '## code 2' in of_out[name] and what in of_err[name] and of_err[name].count('\n') == 1, (name, of_err[name])
    assert '░' in of_out['watch'] and of_out['watch'].rstrip().splitlines()[-1].startswith(r'  -> man \x1b]52')


def test_files_and_python_keep_the_text_exact(planted):
    folder, *_ = planted
    written, = Run(folder / 'run', device='cpu').infill([f'man {HOSTILE} [MASK:2]'])
    assert written.startswith(f'man {HOSTILE} ')
    assert not isinstance(sys.stdout, ShownStream), 'an import leaves the streams of a program alone'
    ids = np.fromfile(folder / 'data/quickstart/train-00000.tokens.bin', np.uint16)
    as_read = HOSTILE.replace('\r', '\n')                      # any line ending is one
    assert f'{as_read} '.encode() in bytes(ids.clip(max=255).astype(np.uint8))


def test_a_terminal_that_watches_gets_colours_and_no_character_of_a_text(planted):
    folder, *_ = planted
    commands = {'watch': ['sample.py', f'--out_dir={folder}/run', '--device=cpu', '--watch=true', f'--text=man {HOSTILE} [MASK:2]'],
                'two rows': ['evaluate.py', f'--out_dir={folder}/run', '--device=cpu', '--n=2', '--tasks=l2t', '--show=2']}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 50, 120, 0, 0))
    env = environment(TERM='xterm')
    env.pop('NO_COLOR', None)
    process = subprocess.Popen([sys.executable, '-c', code_for(commands)], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    found = b''
    try:
        while part := os.read(ours, 2**16):
            found += part
    except OSError:                                                      # the other side has closed
        pass
    os.close(ours)
    text = found.decode()
    assert process.wait(HANGS) == 0, text

    # what watching draws: colours, up and erase; what a bar draws: back and up
    assert '\x1b[2m░' in text and re.search(r'\x1b\[\d+A\x1b\[J', text)
    rest = re.sub(r'\x1b\[[\d;]*m|\x1b\[\d+A\x1b\[J|\r\n', '\n', text)
    rest = re.sub(r'(^|(?<=[\]\s]))(\r|\x1b\[A)+', '', rest, flags=re.MULTILINE)
    assert not CONTROLS.findall(rest), CONTROLS.findall(rest)
    assert r'-> man \x1b]52;c;aGk=\x07 \x1b[2J \x9b31m \r\x08\x00\x7f \u202egnp' in rest


def test_each_control_character_is_its_escape_and_all_others_stay():
    stays = '\t\n aé日🙂\u200d\u200f\u00a0\ufffd~'
    assert shown(stays) == stays and shown('') == ''
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, 0xDC9B):
        escape = shown(chr(code))
        assert escape.startswith('\\') and escape.isascii() and escape.isprintable(), code
        assert eval(f'"{escape}"') == chr(code)


def test_a_bar_may_move_on_stderr_and_nowhere_else(capsys):
    for has_bars, expected in ((True, '\rread\\r 5 %\n\x1b[Aa\\x1b[A\\rb'), (False, '\\rread\\r 5 %\n\\x1b[Aa\\x1b[A\\rb')):
        stream = ShownStream(sys.stdout, has_bars)
        assert stream.write('\rread\r 5 %') == 10
        stream.write('\n\x1b[A')
        stream.writelines(['a\x1b[A\rb'])
        assert capsys.readouterr().out == expected


def test_every_script_shows_what_it_prints():
    """ Whoever starts a process by `configure` has shown streams; nano.py, which imports no other file than data.py, prints reprs. """
    scripts = [path for path in ROOT.rglob('*.py') if "if __name__ == '__main__'" in path.read_text()]
    without = {path.name for path in scripts if 'configure(globals()' not in path.read_text() and path.parent.name not in ('examples', 'tests')}
    assert without == {'nano.py'}


WRITE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from runs.files import write_text
print('mine')
write_text(sys.argv[1], 'text\\n')
"""


@pytest.mark.skipif(not shutil.which('bash'), reason='the shell is bash')
def test_a_file_may_be_a_pipe_or_stdout_and_what_is_printed_around_it_stays(tmp_path):
    (tmp_path / 'w.py').write_text(WRITE)
    line = f'{sys.executable} {tmp_path}/w.py'
    for command, expected in ((f'(echo before; {line} /dev/stdout; echo after) > {tmp_path}/out; cat {tmp_path}/out', 'before mine text after'),
                              (f'{line} /dev/stdout | cat', 'mine text'), (f'{line} >(cat > {tmp_path}/pipe); until [ -s {tmp_path}/pipe ]; do sleep .05; done; cat {tmp_path}/pipe', 'mine text')):
        result = subprocess.run(['bash', '-c', command], capture_output=True, text=True)
        assert result.returncode == 0 and result.stdout.split() == expected.split() and not result.stderr, result
