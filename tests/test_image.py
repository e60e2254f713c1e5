""" Pictures and captions in the two streams: every step between a file of pixels and a file of pixels. """
import json

import numpy as np
import pytest
import torch

from plot import draw_images
from data import PackedDataset
from launch import ROOT, TINY, run_each
from corpora.images import DIGITS, image_patches, to_patches, to_pixels
from sampling.png import write_png
from corpora.sources import Source, documents

from tasks import common, image

CLASSES = f'--classes=digit: {", ".join(DIGITS)}; strokes: thin, plain, bold'


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """ The digits prepared, a tiny model trained on them, and what the command line says about it: {name: (exit code, stdout, stderr)}. """
    pytest.importorskip('sklearn', reason='has the digits: pip install scikit-learn')
    pytest.importorskip('PIL', reason='reads and writes images: pip install pillow')
    folder = tmp_path_factory.mktemp('image')
    config, out = ROOT / 'config/image_text.py', f'--out_dir={folder}/run'
    draw = ['sample.py', out, '--dtype=float32', '--device=cpu']
    small = ['--n=40', '--steps=2', '--latent_steps=2', '--draws=2', f'--dataset={folder}/data', '--dtype=float32', '--device=cpu']
    commands = dict(
        prepare=['prepare.py', config, f'--out={folder}/data'],
        whole=['prepare.py', config, '--patch=8', f'--out={folder}/whole'],
        train=['train.py', config, f'--dataset={folder}/data', out, *TINY, '--latent_tokens=1'],
        draw=[*draw, '--mode=t2l', '--text=a bold seven', f'--png={folder}/one.png', f'--save={folder}/one.npy', '--latent_steps=2'],
        sheet=[*draw, '--mode=latent', '--num_samples=5', f'--png={folder}/five.png', '--latent_steps=2'],
        joint=[*draw, '--mode=unconditional', f'--png={folder}/joint.png', '--steps=2'],
        read=[*draw, '--mode=l2t', f'--image={folder}/one.png'],
        again=[*draw, '--mode=l2t', f'--latents={folder}/one.npy'],
        fill=[*draw, '--mode=infill', '--text=a [MASK] seven', f'--image={folder}/one.png'],
        evaluate=['evaluate.py', out, '--tasks=nelbo,image', CLASSES, *small],
        plot=['plot.py', out, '--what=images'],
        no_classes=['evaluate.py', out, '--tasks=image', *small],
        own_texts=['evaluate.py', out, '--tasks=image', CLASSES, f'--texts={folder}/run/config.json', *small],
        embed_text=[*draw, '--mode=l2t', '--text=a seven'],
        two=[*draw, '--mode=l2t', f'--image={folder}/one.png', f'--latents={folder}/one.npy'],
        nothing_there=[*draw, '--mode=l2t', f'--image={folder}/none.png'],
        png_of_text=[*draw, '--mode=l2t', f'--image={folder}/one.png', f'--png={folder}/x.png'])
    results = dict(zip(commands, run_each(*commands.values())))
    for name in list(commands)[:11]:
        assert results[name][0] == 0, (name, results[name])
    return folder, results


def test_patches_are_the_pixels_row_by_row_and_back(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3), np.uint8)
    patches = np.stack([to_patches(p.astype(np.float32) / 127.5 - 1, 4) for p in pixels])
    assert patches.shape == (5, 9, 48) and np.allclose(patches[2, 5].reshape(4, 4, 3), pixels[2, 4:8, 8:] / 127.5 - 1)
    assert np.array_equal(to_pixels(patches.astype(np.float16), 4, 3), pixels), 'as they are stored'
    image = pytest.importorskip('PIL.Image', reason='writes images: pip install pillow')
    write_png(tmp_path / 'sheet', pixels, columns=2, side=24)
    sheet = np.asarray(image.open(tmp_path / 'sheet'))
    assert sheet.shape == (3 * 28 - 4, 2 * 28 - 4, 3) and (sheet[56:, 28:] == 255).all()
    assert np.array_equal(sheet[28:52:2, 29:53:2], pixels[3]), 'two in a row, each pixel twice as large'
    assert to_pixels(np.array([[[-3.]], [[3.]]], np.float32), 1, 1).ravel().tolist() == [0, 255]


def test_a_digit_has_four_captions_that_name_it_and_its_thirds_are_even():
    pytest.importorskip('sklearn', reason='has the digits: pip install scikit-learn')
    from collections import Counter
    from sklearn.datasets import load_digits
    found = list(documents(Source(input='digits', image_size=8, channels=1, patch=2), Counter()))
    labels, images = load_digits().target, load_digits().images
    assert len(found) == 4 * len(labels) and len({d.group for d in found}) == len(labels)
    for i in range(0, len(found), 4):
        assert all(set(d.text.replace(',', '').split()) & set(DIGITS) == {DIGITS[labels[i // 4]]} for d in found[i:i + 4])
    assert np.array_equal(to_pixels(found[4 * 7].latent()[None], 2, 1)[0, :, :, 0], (images[7] * 255 / 16).round().astype(np.uint8))
    ink = {word: [images[i // 4].sum() for i in range(1, len(found), 4) if word in found[i].text and labels[i // 4] == 3]
           for word in ('thin', 'plain', 'bold')}
    assert max(ink['thin']) <= min(ink['plain']) and max(ink['plain']) <= min(ink['bold']) and min(map(len, ink.values())) > 50
    for knobs in (dict(image_size=0, channels=1), dict(image_size=8, channels=3)):
        with pytest.raises(ValueError, match='input=digits needs image_size=8, channels=1, found'):
            Source(input='digits', **{'patch': 2, **knobs})


def test_no_image_is_in_both_splits_and_a_pixel_that_never_changes_is_dead(made):
    folder, _ = made
    pictures = {split: {z.numpy().tobytes() for z in ds.raw_latents(np.arange(len(ds)))}
                for split in ('train', 'val') for ds in [PackedDataset(folder / 'data', split)]}
    assert len(pictures['train'] | pictures['val']) == 1797 and not pictures['train'] & pictures['val']
    assert PackedDataset(folder / 'data', 'train').latent_shape == (16, 4)
    whole = PackedDataset(folder / 'whole', 'train')                     # one patch: a dimension a pixel
    stats, raw = whole.stats, whole.raw_latents(np.arange(4))
    assert whole.latent_shape == (1, 64) and 0 < (stats.live == 0).sum() < 20
    assert torch.allclose(stats.destandardise(stats.standardise(raw)), raw, atol=.3)
    assert (stats.destandardise(torch.randn(2, 1, 64))[..., stats.live == 0] < -.99).all(), 'a dead corner comes back black'


def test_a_picture_is_drawn_as_its_latent_says_and_read_back_the_same(made):
    from PIL import Image
    folder, results = made
    latent = np.load(folder / 'one.npy')
    picture = np.asarray(Image.open(folder / 'one.png'))
    assert picture.shape == (128, 128) and np.array_equal(picture[8::16, 8::16], to_pixels(latent, 2, 1)[0, :, :, 0])
    assert np.array_equal(picture, picture[8::16, 8::16].repeat(16, 0).repeat(16, 1))
    assert np.array_equal(to_pixels(image_patches(str(folder / 'one.png'), 8, 2, 1)[None], 2, 1), to_pixels(latent, 2, 1))
    assert np.asarray(Image.open(folder / 'five.png')).shape == (2 * 132 - 4, 3 * 132 - 4), 'five in three columns'
    written = [[line for line in results[name][1].splitlines() if '->' in line] for name in ('read', 'again', 'fill')]
    assert written[0] == written[1] and len(written[0]) == 1, 'as from the latent itself, but for rounding'
    assert '1 pictures written' in results['draw'][1] and 'a ' in written[2][0] and ' seven' in written[2][0]


def test_the_image_task_has_every_figure_beside_its_controls(made):
    folder, results = made
    found = json.load(open(folder / 'run/results.json'))
    for name in ('digit', 'strokes'):
        assert {f'image/{c}image_{name}' for c in ('', 'shuffled/', 'null/', 'real/')} <= set(found)
        assert {f'image/{c}named_{name}' for c in ('', 'shuffled/', 'null/', 'nearest/')} <= set(found)
    assert found['image/real/image_digit'] > 85 and found['image/nearest/caption_digit'] > 90
    assert found['image/real/image_digit'] > found['image/image_digit'] + 30, 'an untrained model draws nothing'
    assert found['image/real/spread_digit'] > 10 and found['image/real/nearest_training'] > 5
    assert found['nelbo/latent_mse'] > .3 and 'nelbo/null/latent_mse' in found, 'per dimension, of standardised patches'
    assert (folder / 'run/images.png').stat().st_size > 5000


def test_what_cannot_be_is_one_line(made, finished):
    _, results = made
    for name, line in (('no_classes', 'expected --classes='), ('own_texts', 'no encoder made'),
                       ('embed_text', 'no text can be embedded'), ('two', 'one embedding'), ('nothing_there', 'none.png'),
                       ('png_of_text', 'mode=l2t does not read it')):
        rc, _, err = results[name]
        assert rc == 2 and err.count('\n') == 1 and line in err, (name, err)
    common = [f'--out_dir={finished}', '--device=cpu']
    for rc, _, err in run_each(['sample.py', *common, '--mode=l2t', '--image=a.png'], ['sample.py', *common, '--text=a', '--png=a.png'],
                               ['evaluate.py', *common, '--tasks=image', CLASSES]):
        assert rc == 2 and err.count('\n') == 1 and 'was not trained on images' in err, err


def test_a_caption_has_a_class_where_it_names_just_one():
    groups = common.read_classes('animal: cat, dog; colour: red, light blue')
    assert groups == dict(animal=['cat', 'dog'], colour=['red', 'light blue'])
    texts = ['a cat', 'a dog, red', 'a cat and a dog', 'category', 'a light blue dog']
    assert image.classes_of(texts, groups['animal']).tolist() == [0, 1, -1, -1, 1]
    assert image.classes_of(texts, groups['colour']).tolist() == [-1, 0, -1, -1, 1]
    for bad in ('', 'cat, dog', 'animal: cat', 'animal: cat, dog;'):
        with pytest.raises(ValueError, match='expected --classes='):
            common.read_classes(bad)


def test_the_eye_sees_spread_and_copies_are_measured_in_grey_levels():
    rng = np.random.default_rng(0)
    labels = torch.arange(60) % 2
    pictures = (rng.integers(0, 60, (60, 8, 8, 1)) + 150 * labels.numpy()[:, None, None, None]).astype(np.uint8)
    before = torch.random.get_rng_state()
    eye = image.train_classifier(pictures, labels, 2, seed=0, steps=30)
    assert torch.equal(eye(pictures), labels) and torch.equal(eye(pictures[:1]), labels[:1])
    assert torch.equal(before, torch.random.get_rng_state()), 'it draws nothing of the others'
    flat = np.array([[10], [30], [100]], np.uint8)[:, :, None, None].repeat(4, 2)
    assert image.spread(flat, torch.tensor([0, 0, 1])) == pytest.approx((200 / 3) ** .5)
    at, distance = image.nearest_pictures(flat[:2], flat[::2])
    assert at.tolist() == [0, 0] and distance.tolist() == pytest.approx([0, 20.])


def test_the_sheet_shows_the_arrays_and_their_captions():
    plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    pictures = lambda n, seed: np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 1), np.uint8)   # noqa: E731
    shown = dict(captions=np.array([f'a {i}' for i in range(6)]), made=pictures(6, 0), real=pictures(6, 1),
                 written=np.array([f'the {i}' for i in range(6)]), joint=pictures(3, 2), joint_captions=np.array(list('xyz')))
    figure = draw_images(shown, plt, columns=4, rows=2)
    axes = np.array(figure.axes).reshape(6, 4)
    assert axes[2, 1].get_title() == 'a 5' and axes[3, 1].get_title() == 'the 5' and axes[4, 2].get_title() == 'z'
    assert np.array_equal(axes[2, 1].images[0].get_array(), shown['made'][5, :, :, 0]) and not axes[2, 2].images and not axes[5, 0].images
    for kept in (('captions', 'real', 'made'), ('captions', 'real', 'written')):               # of a run for one direction
        assert len(draw_images({k: shown[k] for k in kept}, plt, columns=4, rows=2).axes) == 8
