""" A text from outside cannot drive a terminal: its control characters are printed as escapes. """
import json
import re

import pytest

from launch import TINY, assert_refused, flags, run_each
from sample import Run
from toys import write_lines

# writes the clipboard, clears the screen, colours by C1, goes back, turns the direction of writing
HOSTILE = '\x1b]52;c;aGk=\x07 \x1b[2J \x9b31m \b\x01\x7f \u202egnp\u202c \u2066x\u2069'
CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]')


@pytest.fixture(scope='module')
def planted(tmp_path_factory):
    """ A folder with a run on hostile texts. """
    folder = tmp_path_factory.mktemp('planted')
    lines = [json.dumps({'text': f'{who} {HOSTILE} {i}'}) for i in range(90)
             for who in ('man', 'dog')]
    write_lines(folder / 'texts.jsonl', lines)
    prepare = flags(input='texts.jsonl', encoder='lsa', encoder_dims=8, tokenizer='byte',
                    max_tokens=79, val_fraction=.5, out='./data')
    train = flags(dataset='./data', out_dir='./run', max_iters=2, mode='l2t+causal')
    results = run_each(['prepare.py', *prepare], ['train.py', *TINY, *train], cwd=folder)
    for code, out, err in results:
        assert code == 0 and not CONTROLS.findall(out + err), err
    return folder


ESCAPED = (r'\x1b]52;c;aGk=\x07', r'\u202egnp')
GAP = f'man {HOSTILE} [MASK:2]'
RUN = ['--out_dir=./run', '--device=cpu']


@pytest.mark.parametrize('command, words', [
    (['prepare.py', '--inspect=./data'], ESCAPED),
    (['sample.py', *RUN, f'--text={GAP}'], ESCAPED),
    (['sample.py', *RUN, f'--text={GAP}', '--watch=true'], ['░']),
    (['evaluate.py', *RUN, '--n=2', '--tasks=l2t', '--show=2'], ESCAPED)])
def test_no_command_prints_a_control_character(planted, command, words):
    (code, out, err), = run_each(command, cwd=planted)
    assert code == 0 and not CONTROLS.findall(out + err), err
    assert all(word in out for word in words)


def test_no_error_has_a_control_character(planted):
    (planted / 'config.py').write_text(f'mode = {"no " + HOSTILE!r}\n')
    for result in run_each(['train.py', 'config.py', '--dataset=./data'],
                           ['evaluate.py', '--out_dir=./none\x1b[2J\u202e'], cwd=planted):
        assert_refused(result, '\\x1b')
        assert not CONTROLS.findall(result[1] + result[2])


def test_python_has_the_text_exact(planted):
    written, = Run(planted / 'run', device='cpu').infill([GAP])
    assert written.startswith(f'man {HOSTILE} ')
