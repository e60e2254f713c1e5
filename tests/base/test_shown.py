""" A text from outside cannot drive a terminal: its control characters are printed as escapes. """
import json
import re

import pytest

from launch import TINY, run_each
from sample import Run

# writes the clipboard, clears the screen, colours by C1, goes back, turns the direction of writing
HOSTILE = '\x1b]52;c;aGk=\x07 \x1b[2J \x9b31m \b\x01\x7f \u202egnp\u202c \u2066x\u2069'
CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]')


@pytest.fixture(scope='module')
def planted(tmp_path_factory):
    """ A folder with a run on hostile texts, and {command: its exit code, stdout and stderr}. """
    folder = tmp_path_factory.mktemp('planted')
    lines = [json.dumps({'text': f'{who} {HOSTILE} {i}'}) for i in range(90)
             for who in ('man', 'dog')]
    (folder / 'texts.jsonl').write_text('\n'.join(lines))
    (folder / 'config.py').write_text(f'mode = {"no " + HOSTILE!r}\n')

    data, here = folder / 'data', [f'--out_dir={folder}/run', '--device=cpu']
    commands = {
        'prepare': ['prepare.py', f'--input={folder}/texts.jsonl', '--encoder=lsa',
                    '--encoder_dims=8', '--tokenizer=byte', '--max_tokens=79',
                    '--val_fraction=.5', f'--out={data}'],
        'train': ['train.py', f'--dataset={data}', *TINY, '--max_iters=2', '--mode=l2t+causal',
                  *here],
        'inspect': ['prepare.py', f'--inspect={data}'],
        'sample': ['sample.py', *here, f'--text=man {HOSTILE} [MASK:2]'],
        'watch': ['sample.py', *here, f'--text=man {HOSTILE} [MASK:2]', '--watch=true'],
        'evaluate': ['evaluate.py', *here, '--n=2', '--tasks=l2t', '--show=2'],
        'config': ['train.py', f'{folder}/config.py', f'--dataset={data}'],
        'no run': ['evaluate.py', f'--out_dir={folder}/none\x1b[2J\u202e']}
    return folder, dict(zip(commands, run_each(*commands.values(), cwd=folder)))


def test_no_command_prints_a_control_character(planted):
    _, results = planted
    for name, (code, out, err) in results.items():
        assert not CONTROLS.findall(out + err), name
        if name in ('config', 'no run'):
            assert code == 2 and err.count('\n') == 1 and '\\x1b' in err, (name, err)
        else:
            assert code == 0, (name, err)
    for name in ('inspect', 'sample', 'evaluate'):
        assert r'\x1b]52;c;aGk=\x07' in results[name][1] and r'\u202egnp' in results[name][1], name
    assert '░' in results['watch'][1]


def test_python_has_the_text_exact(planted):
    written, = Run(planted[0] / 'run', device='cpu').infill([f'man {HOSTILE} [MASK:2]'])
    assert written.startswith(f'man {HOSTILE} ')
