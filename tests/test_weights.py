""" weights/captions and weights/icons, which come with the repository: what README opens with. """
import importlib
import re
import subprocess
import sys

import numpy as np
import pytest

from corpora.icons import SHEET, SHEET_SIZE, read_sheet
from corpora.images import pixels
from data import dataset_folder
from launch import ROOT, assert_refused, flags, run, run_each
from sample import Run
from tasks.image import distance
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


def test_a_run_opens_without_torchs_compiler():
    """ Its import takes two seconds. """
    code = ("import sys; from sample import Run; Run('weights/captions'); "
            "sys.exit('torch._dynamo' in sys.modules)")
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- icons

def test_eight_hearts_are_drawn_by_the_line_of_the_readme(tmp_path):
    pytest.importorskip('PIL', reason='needs pillow')
    from PIL import Image
    file = tmp_path / 'hearts.png'
    result = run('sample.py', *flags(out_dir='weights/icons', mode='t2l', text='a heart',
                                     num_samples=8, png=file))
    assert result.returncode == 0 and '8 pictures' in result.stdout, result.stderr
    with Image.open(file) as picture:
        ink = 255 - np.asarray(picture, dtype=float)
    assert ink.max() > 225 and .05 < (ink > 127).mean() < .5, 'strokes, no fog'


@pytest.mark.parametrize('flag, words', [
    ('--steps=4', 'steps: mode=t2l does not read it'),
    ('--watch=true', 'watch: mode=t2l does not read it'),
    ('--png=a.jpg', 'to a file that ends in .png')])
def test_what_is_of_no_use_where_a_picture_is_drawn_is_refused(flag, words):
    pytest.importorskip('PIL', reason='needs pillow')
    result, = run_each(f'sample.py --out_dir=weights/icons --mode=t2l --text=heart {flag}')
    assert_refused(result, words)


def test_drawings_are_nearest_to_the_mean_of_their_name_and_differ():
    pytest.importorskip('PIL', reason='needs pillow')
    run_of_icons = Run(str(ROOT / 'weights/icons'))
    names = ('heart', 'umbrella', 'folder', 'rocket', 'lock', 'star', 'home', 'camera')
    icons = read_sheet(SHEET, SHEET_SIZE)
    means = []
    for name in names:
        inks = [np.frombuffer(icon.ink, np.uint8) for icon in icons if icon.words == (name,)]
        means.append(255 - np.mean(inks, 0).reshape(1, SHEET_SIZE, SHEET_SIZE, 1))

    n_right = 0
    for i, name in enumerate(names[:3]):
        drawn = pixels(run_of_icons, run_of_icons.embed([f'a {name}'], num_samples=8))
        far = np.stack([distance(drawn, mean) for mean in means])        # (names, 8)
        n_right += (far.argmin(0) == i).sum()
        between = [distance(drawn[k:k + 1], drawn[k + 1:]).min() for k in range(7)]
        assert min(between) > 20, 'no two are the same'
    assert n_right >= 16, 'of 24; by chance 3'


def test_a_call_says_what_is_clean_where_a_clock_is_above_0(monkeypatch, tmp_path):
    pytest.importorskip('matplotlib', reason='needs matplotlib')
    pytest.importorskip('PIL', reason='needs pillow')
    monkeypatch.syspath_prepend(str(ROOT / 'examples'))
    example = importlib.import_module('one_call')
    icon = next(icon for icon in read_sheet(SHEET, SHEET_SIZE)
                if (icon.set, icon.words) == (example.SET, (example.NAME,)))
    rows = example.rows(Run(str(ROOT / 'weights/icons')), icon)
    found = {label.split()[0]: (reads, says) for label, reads, says in rows}
    clean = found['l2t'][0][1].astype(float)

    # the masked word, by the picture; the picture, by the word: nearer than the noise is, by far
    word, p = found['l2t'][1][0].split()[:2]
    assert 'camera' not in found['l2t'][0][0] and word == 'camera' and float(p) > .9
    assert 'camera' in found['causal'][1][0]
    for mode in ('t2l', 'unconditional'):
        (_, noisy), (_, said) = found[mode]
        assert abs(said - clean).mean() < .4 * abs(noisy - clean).mean(), mode
    assert found['l2t'][1][1] is None and found['causal'][1][1] is None
    assert found['t2l'][1][0] == ''

    monkeypatch.setattr(sys, 'argv', ['', f'--save={tmp_path / "call.png"}'])
    example.main()
    from PIL import Image
    with Image.open(tmp_path / 'call.png') as picture:
        assert min(picture.size) > 200 and picture.convert('L').getextrema() == (0, 255)


def test_the_picture_of_the_readme_is_made_by_its_example(tmp_path, monkeypatch):
    pytest.importorskip('matplotlib', reason='needs matplotlib')
    pytest.importorskip('PIL', reason='needs pillow')
    monkeypatch.syspath_prepend(str(ROOT / 'examples'))
    example = importlib.import_module('one_name_many_drawings')
    monkeypatch.setattr(example, 'NAMES', ('heart',))
    monkeypatch.setattr(example, 'N_DRAWN', 5)
    monkeypatch.setattr(sys, 'argv', ['', f'--save={tmp_path / "one.png"}'])
    example.main()
    from PIL import Image
    with Image.open(tmp_path / 'one.png') as picture:
        assert min(picture.size) > 200 and picture.convert('L').getextrema() == (0, 255)
