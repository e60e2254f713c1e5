""" sample.py: what a run cannot do with a text. """
import json

import pytest

from launch import assert_refused, run_each

LINE = 'a red dog runs near the park number 3'


@pytest.fixture
def here(finished, tmp_path):
    files = {'own.txt': f'{LINE}\n\n{" ".join([LINE] * 9)}\n', 'blank.txt': '\n',
             'own.jsonl': json.dumps({'text': LINE})}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return f'sample.py --out_dir={finished} --device=cpu --steps=2'


def test_texts_of_a_file_are_read_and_warnings_come_first(here, tmp_path):
    of_json, unknown, too_long = run_each(f'{here} --texts={tmp_path}/own.jsonl',
                                          f'{here} --text=これは日本',
                                          f'{here} --texts={tmp_path}/own.txt')
    assert of_json[0] == 0 and of_json[1].count('\n  -> ') == 1
    assert f'\n{LINE}\n' in of_json[1], 'no raw JSON'
    for (code, _, err), words in (
            (unknown, "'これは日本' has no word that the encoder knows"),
            (too_long, 'writes at most 31 and has seen no embedding of a longer text')):
        assert code == 0 and err.startswith('warning: ') and words in err.splitlines()[0], err


@pytest.mark.parametrize('args, words', [
    ("--text='  '", 'is blank'), ("--mode=infill --text='a [MASK]' --like=' '", 'is blank'),
    ('--texts=HERE/blank.txt', 'no text in it'), ('--mode=edit --text=a', 'give --like'),
    ('--mode=text --text=a', 'mode=text does not read it'),
    ('--which=step-00000001 --text=a', 'no checkpoint'),
    ('--text=a --fasta=HERE', 'this is a folder'),
    ('--mode=text --latent_clock=.5', 'does not read it'),
    ('--text=a --solver=heun', 'solver: mode=l2t does not read it'),
    ('--text=a --beams=4 --watch=true', 'a search has no steps to show'),
    ('--text=a --beams=4', 'was trained without causal rows'),
    ('--out_dir=HERE --text=a', 'no run in')])
def test_what_a_run_cannot_do_with_a_text_is_said_in_one_line_each(here, tmp_path, args, words):
    result, = run_each(f'{here} {args}'.replace('HERE', str(tmp_path)))
    assert_refused(result, words)


def test_knobs_of_a_config_that_the_mode_does_not_read_are_passed_over(here, tmp_path):
    (tmp_path / 'mine.py').write_text('beams = 4\nrerank = 3\n')
    args = '--mode=infill --text="a red [MASK]" --watch=true'
    plain, given = run_each(f'{here} {args}', f'{here} {tmp_path}/mine.py {args}')
    assert given[0] == 0, given[2]
    assert given[1].split('\n\n')[1:] == plain[1].split('\n\n')[1:]
