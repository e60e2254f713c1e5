""" weights/captions, the export that comes with the repository: what README opens with. """
import re

import numpy as np
import pytest

from data import dataset_folder
from launch import ROOT, assert_refused, flags, run, run_each
from sample import Run
from tasks.measures import word_f1

FOLDER = ROOT / 'weights/captions'
SOURCES = (FOLDER / 'ten.txt').read_text().splitlines()


@pytest.fixture(scope='module')
def loaded():
    return Run(str(FOLDER))


def f1(texts, sources=SOURCES):
    return np.mean([word_f1(a, b) for a, b in zip(texts, sources)])


def test_ten_captions_come_back_beside_their_sources():
    result = run('sample.py', '--out_dir=weights/captions', '--latents=weights/captions/ten.npy')
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    lines = lines[lines.index(SOURCES[0]):]
    assert lines[::2] == SOURCES and all(line.startswith('  -> ') for line in lines[1::2])
    texts = [line.removeprefix('  -> ') for line in lines[1::2]]
    assert f1(texts) > .6 and f1(texts, SOURCES[1:] + SOURCES[:1]) < .4


def test_a_run_is_found_beside_the_scripts_and_one_that_is_not_says_from_where(here):
    sample = ['sample.py', *flags(out_dir='weights/captions', latents=FOLDER / 'ten.npy')]
    nowhere = [[script, '--out_dir=weights/nowhere'] for script in ('sample.py', 'evaluate.py',
                                                                    'plot.py')]
    no_data = ['evaluate.py', *flags(out_dir='weights/captions', dataset='nowhere', tasks='nelbo')]
    (code, out, err), *wrong, of_data = run_each(sample, *nowhere, no_data, cwd=here)
    assert code == 0 and SOURCES[0] in out, err
    for result in wrong:
        assert_refused(result, f'no run in weights/nowhere, seen from {here}: ')
    assert_refused(of_data, f'no dataset in data/nowhere, seen from {here} (no meta.json)')
    assert dataset_folder('..') == '..'                      # no name in data/

    # what is here comes first
    (here / 'weights/captions').mkdir(parents=True)
    (result,) = run_each(sample, cwd=here)
    assert_refused(result, 'no run in weights/captions')


def test_every_direction_works_from_the_weights(loaded):
    latents = np.load(FOLDER / 'ten.npy')
    for sampler in ('autoregressive', 'confidence'):
        assert f1(loaded.write(latents=latents, sampler=sampler)) > .6, sampler
    text, = loaded.infill(['A man [MASK] a horse.'])
    assert re.fullmatch(r'A man .+ a horse\.', text) and all(loaded.sample(2))

    # an embedding from text is near the encoder's, and writes the text again
    z = np.asarray(loaded.embed(SOURCES))[:, 0]
    cosine = (z * latents).sum(1) / np.linalg.norm(z, axis=1) / np.linalg.norm(latents, axis=1)
    assert cosine.mean() > .8 and (z @ latents.T).argmax(1).tolist() == list(range(len(SOURCES)))
    assert f1(loaded.write(latents=z)) > .5
