""" Pictures and captions in the two streams: every step between a file of pixels and a file of
pixels. """
import numpy as np
import pytest

from corpora.images import to_patches, to_pixels
from data import PackedDataset
from launch import prepared


def test_patches_are_the_pixels_row_by_row_and_back():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3), np.uint8)
    scaled = pixels / np.float32(127.5) - 1
    patches = np.stack([to_patches(image, 4) for image in scaled])
    assert patches.shape == (5, 9, 48)
    assert np.array_equal(patches[2, 5].reshape(4, 4, 3), scaled[2, 4:8, 8:])
    assert np.array_equal(to_pixels(patches.astype(np.float16), 4, 3), pixels), 'as stored'
    assert to_pixels(np.array([[[-3.]], [[3.]]], np.float32), 1, 1).ravel().tolist() == [0, 255]


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
