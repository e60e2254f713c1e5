"""
Images with captions, whose latents are their patches (corpora/patches.py). Two sources: a folder of
images with metadata.csv or metadata.jsonl (the hub's imagefolder: file_name and a caption), and
scikit-learn's handwritten digits.
"""
import os
from functools import partial

import numpy as np

from corpora.patches import image_patches, to_patches
from corpora.readers import (RECORDS, Document, count_endings, inside, kind_of, text_of,
                             walk)

DIGITS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')


def read_images(source, counts):
    """ Documents of a folder: each caption with the patches of its image. An image may have several
    captions; they are one group. Files that no caption names are counted. """
    # the list of captions
    folder = source.input
    lists = [os.path.join(folder, f'metadata.{kind}') for kind in ('csv', 'jsonl')]
    lists = [path for path in lists if os.path.isfile(path)]
    if not lists:
        raise ValueError(f'image_size is set, but input={folder} is no folder with a metadata.csv '
                         f'or metadata.jsonl of file_name and {source.field}')

    # its records; the image itself is read when its latents are asked for
    passed = {os.path.realpath(path) for path in walk(folder)} - {os.path.realpath(lists[0])}
    for record, where in RECORDS[kind_of(lists[0])](lists[0], source):
        file_name = text_of(record, 'file_name', where)
        text = text_of(record, source.field, where)
        path = inside(folder, file_name, where)
        if not os.path.isfile(path):
            raise ValueError(f'{path}: missing, {where} names it')
        passed.discard(path)
        latent = partial(image_patches, path, source.image_size, source.patch, source.channels)
        yield Document(text, latent, group=file_name, place=path)
    counts.update(count_endings(passed))


def read_digits(source):
    """ scikit-learn's handwritten digits, 8 x 8 pixels, which are part of its package. Each has
    four captions: the digit, and how bold its strokes are, in thirds of that digit's images. """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError('input=digits: pip install scikit-learn') from None

    found = load_digits()
    images = found.images.astype(np.float32)                             # (n, 8, 8), 0 to 16
    labels = found.target                                                # (n,)

    # how much ink an image has, and the limits of the thirds for each digit
    ink = images.sum((1, 2))
    limits = [np.quantile(ink[labels == digit], (1 / 3, 2 / 3)) for digit in range(10)]

    # four documents of each image
    for i, (image, label) in enumerate(zip(images, labels)):
        digit = DIGITS[label]
        strokes = ('thin', 'plain', 'bold')[np.searchsorted(limits[label], ink[i])]
        article = 'an' if digit == 'eight' else 'a'
        captions = (f'{article} {digit}', f'a {strokes} {digit}', f'the digit {digit}',
                    f'the digit {digit} in {strokes} strokes')

        latent = partial(to_patches, image[..., None] / 8 - 1, source.patch)
        for text in captions:
            yield Document(text, latent, group=f'digit {i}')
