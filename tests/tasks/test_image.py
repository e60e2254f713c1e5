""" Pictures and captions in the two streams: every step between a file of pixels and a file of
pixels. """
import numpy as np
import pytest
import torch

from corpora.images import DIGITS, image_patches, to_patches, to_pixels
from data import PackedDataset
from launch import ROOT, TINY, flags, measured, prepared, run_together
from tasks import common, image

CLASSES = f'--classes=digit: {", ".join(DIGITS)}; strokes: thin, plain, bold'


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """ The digits prepared, a tiny model trained on them, and what the command line says about it:
    a folder, and {name: stdout}. """
    pytest.importorskip('sklearn', reason='has the digits: pip install scikit-learn')
    pytest.importorskip('PIL', reason='reads and writes images: pip install pillow')
    folder = tmp_path_factory.mktemp('image')
    config = ROOT / 'config/image_text.py'
    here = flags(out_dir='./run', dtype='float32', device='cpu')
    draw = ['sample.py', *here, '--latent_steps=2']
    write = ['sample.py', *here, '--mode=l2t']
    commands = dict(
        prepare=['prepare.py', config, '--out=./data'],
        whole=['prepare.py', config, '--patch=8', '--out=./whole'],
        train=['train.py', config, *flags(dataset='./data', out_dir='./run'), *TINY,
               '--latent_tokens=1'],
        draw=[*draw, *flags(mode='t2l', text='a bold seven', save='one.npy', png='one.png')],
        sheet=[*draw, *flags(mode='latent', num_samples=5, png='five.png')],
        joint=[*draw, *flags(mode='unconditional', png='joint.png', steps=2)],
        read=[*write, '--image=one.png'],
        again=[*write, '--latents=one.npy'],
        fill=[*write, '--image=one.png', '--mode=infill', '--text=a [MASK] seven'],
        evaluate=['evaluate.py', *here, CLASSES,
                  *flags(tasks='nelbo,image', n=40, steps=2, draws=2, latent_steps=2,
                         dataset='./data')],
        plot=['plot.py', '--out_dir=./run', '--what=images'])
    results = run_together(*commands.values(), cwd=folder)
    for name, (code, _, err) in zip(commands, results):
        assert code == 0, (name, err)
    return folder, {name: out for name, (_, out, _) in zip(commands, results)}


def test_patches_are_the_pixels_row_by_row_and_back():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3), np.uint8)
    scaled = pixels / np.float32(127.5) - 1
    patches = np.stack([to_patches(image, 4) for image in scaled])
    assert patches.shape == (5, 9, 48)
    assert np.array_equal(patches[2, 5].reshape(4, 4, 3), scaled[2, 4:8, 8:])
    assert np.array_equal(to_pixels(patches.astype(np.float16), 4, 3), pixels), 'as stored'
    assert to_pixels(np.array([[[-3.]], [[3.]]], np.float32), 1, 1).ravel().tolist() == [0, 255]


def test_no_image_is_in_both_splits_and_a_pixel_that_never_changes_is_dead(made):
    folder, _ = made
    train, val = (PackedDataset(folder / 'data', split) for split in ('train', 'val'))
    ours, others = ({z.numpy().tobytes() for z in split.raw_latents(np.arange(len(split)))}
                    for split in (train, val))
    assert len(ours | others) == 1797 and not ours & others and train.latent_shape == (16, 4)
    whole = PackedDataset(folder / 'whole', 'train')                     # a dimension a pixel
    stats, raw = whole.stats, whole.raw_latents(np.arange(4))
    is_dead = stats.live == 0
    assert whole.latent_shape == (1, 64) and 0 < is_dead.sum() < 20
    assert torch.allclose(stats.destandardise(stats.standardise(raw)), raw, atol=.3)
    drawn = stats.destandardise(torch.ones(2, 1, 64))
    assert (drawn[..., is_dead] < -.99).all(), 'a dead corner comes back black'


def test_a_picture_is_drawn_as_its_latent_says_and_read_back_the_same(made):
    pil = pytest.importorskip('PIL.Image')
    folder, outputs = made
    pixels = to_pixels(np.load(folder / 'one.npy'), 2, 1)
    picture = np.asarray(pil.open(folder / 'one.png'))
    assert np.array_equal(picture, pixels[0, :, :, 0].repeat(16, 0).repeat(16, 1))
    read = image_patches(str(folder / 'one.png'), 8, 2, 1)
    assert np.array_equal(to_pixels(read[None], 2, 1), pixels)
    five = np.asarray(pil.open(folder / 'five.png'))
    assert five.shape == (2 * 132 - 4, 3 * 132 - 4), 'five in three columns'

    (read,), (again,), (filled,) = ([line for line in outputs[name].splitlines() if '->' in line]
                                    for name in ('read', 'again', 'fill'))
    assert read == again, 'as from the latent itself'
    assert 'a ' in filled and ' seven' in filled


def test_the_image_task_has_every_figure_beside_its_controls(made):
    folder, _ = made
    found = measured(folder / 'run')
    for name in ('digit', 'strokes'):
        for control in ('', 'shuffled/', 'null/', 'real/'):
            assert f'image/{control}image_{name}' in found
        for control in ('', 'shuffled/', 'null/', 'nearest/'):
            assert f'image/{control}named_{name}' in found
    assert found['image/real/image_digit'] > 85 and found['image/nearest/caption_digit'] > 90
    assert found['image/real/image_digit'] > found['image/image_digit'] + 30, 'untrained'
    assert found['image/real/nearest_training'] > 5
    assert (folder / 'run/images.png').stat().st_size > 5000


def test_a_caption_has_a_class_where_it_names_just_one():
    groups = common.read_classes('animal: cat, dog; colour: red, light blue')
    assert groups == dict(animal=['cat', 'dog'], colour=['red', 'light blue'])
    texts = ['a cat', 'a dog, red', 'a cat and a dog', 'category', 'a light blue dog']
    assert image.classes_of(texts, groups['animal']).tolist() == [0, 1, -1, -1, 1]
    assert image.classes_of(texts, groups['colour']).tolist() == [-1, 0, -1, -1, 1]
    for bad in ('', 'cat, dog', 'animal: cat', 'animal: cat, dog;'):
        with pytest.raises(ValueError, match='expected --classes='):
            common.read_classes(bad)


def test_the_classifier_and_copies_in_grey_levels():
    rng = np.random.default_rng(0)
    labels = torch.arange(60) % 2
    brightness = 150 * labels.numpy()[:, None, None, None]
    pictures = (rng.integers(0, 60, (60, 8, 8, 1)) + brightness).astype(np.uint8)
    before = torch.random.get_rng_state()
    classify = image.train_classifier(pictures, labels, 2, seed=0, steps=30)
    assert torch.equal(classify(pictures), labels)
    assert torch.equal(before, torch.random.get_rng_state()), 'it draws nothing of the others'
    flat = np.array([[10], [30], [100]], np.uint8)[:, :, None, None].repeat(4, 2)
    at, distance = image.nearest_pictures(flat[:2], flat[::2])
    assert at.tolist() == [0, 0] and distance.tolist() == pytest.approx([0, 20.])


def test_pictures_may_have_validation_pictures_of_their_own(tmp_path):
    pil = pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')
    for name, greys in (('mine', (10, 90, 170)), ('theirs', (30, 110))):
        folder = tmp_path / name
        folder.mkdir()
        lines = ['file_name,text']
        for grey in greys:
            pil.new('L', (8, 8), grey).save(folder / f'{grey}.png')
            lines.append(f'{grey}.png,a grey picture')
        (folder / 'metadata.csv').write_text('\n'.join(lines))
    out = prepared(input=tmp_path / 'mine', val_input=tmp_path / 'theirs', image_size=8, patch=4,
                   channels=1, encoder='none', tokenizer='byte', out=tmp_path / 'data')
    greys = {}
    for split in ('train', 'val'):
        data = PackedDataset(out, split)
        raw = data.raw_latents(np.arange(len(data))).numpy()
        greys[split] = sorted(np.unique(to_pixels(raw, 4, 1)).tolist())
    assert greys == dict(train=[10, 90, 170], val=[30, 110])
