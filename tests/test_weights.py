""" weights/captions, the export that comes with the repository: what README opens with. """
import json
import re

import numpy as np
import pytest

from benchmarks import wins
from launch import ROOT, run
from sample import Run
from tasks.common import word_f1

FOLDER = ROOT / 'weights/captions'
SOURCES = (FOLDER / 'ten.txt').read_text().splitlines()
ARGS = 'sample.py', '--out_dir=weights/captions'


@pytest.fixture(scope='module')
def loaded():
    return Run(str(FOLDER))


def written(*args):
    result = run(*ARGS, *args)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_is_small_names_no_folder_of_a_machine_and_says_whose_data_it_has_seen():
    assert sum(path.stat().st_size for path in FOLDER.rglob('*') if path.is_file()) <= 30e6
    card = (FOLDER / 'README.md').read_text()
    assert 'Multi30k' in card and 'research' in card and 'all-MiniLM-L6-v2' in card
    for path in FOLDER.rglob('*.*'):
        if path.suffix in ('.json', '.md'):
            assert not re.search(r'(?<![\w.])/(home|work|root|tmp|usr)/', path.read_text()), path


def test_ten_captions_come_back_beside_their_sources():
    lines = [line for line in written('--latents=weights/captions/ten.npy').splitlines() if line.strip()]
    lines = lines[next(i for i, line in enumerate(lines) if line == SOURCES[0]):]
    assert lines[::2] == SOURCES and all(line.startswith('  -> ') for line in lines[1::2])
    texts = [line.removeprefix('  -> ') for line in lines[1::2]]
    right = np.mean([word_f1(a, b) for a, b in zip(texts, SOURCES)])
    wrong = np.mean([word_f1(a, b) for a, b in zip(texts, SOURCES[1:] + SOURCES[:1])])
    assert right > .6 and wrong < .4, (right, wrong)


def test_both_ways_of_writing_and_gaps_and_both_from_noise(loaded):
    latents = np.load(FOLDER / 'ten.npy')
    for sampler in ('autoregressive', 'confidence'):
        texts = loaded.write(latents=latents, sampler=sampler)
        assert np.mean([word_f1(a, b) for a, b in zip(texts, SOURCES)]) > .6, sampler
    text, = loaded.infill(['A man [MASK] a horse.'])
    assert re.fullmatch(r'A man .+ a horse\.', text)
    assert all(loaded.sample(2))


def test_an_embedding_from_text_is_near_the_encoders_and_writes_the_text_again(loaded):
    latents = np.load(FOLDER / 'ten.npy')
    z = loaded.embed(SOURCES)
    cosine = (z * latents).sum(1) / np.linalg.norm(z, axis=1) / np.linalg.norm(latents, axis=1)
    assert cosine.mean() > .8 and (z @ latents.T).argmax(1).tolist() == list(range(len(SOURCES)))
    texts = loaded.write(latents=z)
    assert np.mean([word_f1(a, b) for a, b in zip(texts, SOURCES)]) > .5


def test_its_figures_are_on_its_card():
    found = json.loads((FOLDER / 'results.json').read_text())
    card = (FOLDER / 'README.md').read_text()
    assert found['l2t/n'] == 1000 and f'{found["l2t/bleu"]:.3f}' in card


def test_the_picture_of_gaps_is_what_the_weights_write(loaded):
    rows = wins.fillings(loaded)
    for i, source in enumerate(SOURCES[:3]):
        gaps, by_diffusion, token_by_token = rows[3 * i:3 * i + 3]
        pieces = [piece for piece, _ in by_diffusion[1]]
        is_masked = ['m' in kind for _, kind in gaps[1]]
        assert sum(is_masked) == (len(is_masked) + 1) // 2 and len(pieces) == len(is_masked)
        for label, spans in (by_diffusion, token_by_token):
            kinds = [kind for _, kind in spans]
            assert [kind != '' for kind in kinds] == is_masked
            assert f'{kinds.count("n") / sum(is_masked):.0%} right' in label
            if 'a' not in kinds:
                assert ''.join(piece for piece, _ in spans) == source

    # the page shows these rows; another CPU may write another word
    def lines_of_picture(svg):
        return [re.sub('<.*?>', '', line) for line in svg.splitlines() if '<text' in line]
    shown, drawn = lines_of_picture((ROOT / 'docs/infill.svg').read_text()), lines_of_picture(wins.picture('', rows))
    assert len(shown) >= 18 and abs(len(shown) - len(drawn)) <= 1 and len(set(shown) - set(drawn)) <= 2


def test_the_picture_of_an_edit_is_of_the_caption_and_the_strengths_that_the_code_names():
    svg = (ROOT / 'docs/edit.svg').read_text()
    text = ' '.join(re.sub('<.*?>', '', line) for line in svg.splitlines() if '<text' in line)
    assert wins.TEXT == SOURCES[0] and text.count(wins.TEXT) == 1
    assert re.findall(r'strength ([\d.]+):', text) == [f'{strength:g}' for strength in wins.STRENGTHS]
    assert wins.TEXT.replace(wins.AWAY, wins.TOWARDS) in text
