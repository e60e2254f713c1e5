"""
Images with captions: pictures become latent vectors, a vector per patch.

    image (S, S, C)  ->  latents (N, D)       N = (S / patch)^2 patches row by row, D = patch^2 * C

Pixels lie in [-1, 1]. Two sources: a folder of images with metadata.csv or metadata.jsonl (the
hub's imagefolder: file_name and a caption), and scikit-learn's handwritten digits. Letters: S
pixels a side, C channels (1 grey, 3 colour), N patches, D numbers of a patch, n images.
"""
import math
import os
from functools import partial

import numpy as np

from corpora.readers import Document, inside, read_records, text_of

DIGITS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')

# -----------------------------------------------------------------------------
# Pixels and patches

def to_patches(pixels, patch):
    """ (S, S, C) -> (N, D). """
    S, _, C = pixels.shape
    side = S // patch                                                    # patches
    grid = pixels.reshape(side, patch, side, patch, C)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, patch * patch * C)


def to_pixels(patches, patch, channels):
    """ The way back, for n images: (n, N, D) -> (n, S, S, C) uint8. Numbers outside of [-1, 1]
    become black or white. """
    n = len(patches)
    side = math.isqrt(patches.shape[1])
    grid = patches.reshape(n, side, side, patch, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    pixels = grid.reshape(n, side * patch, side * patch, channels)
    return ((pixels.clip(-1, 1) + 1) * 127.5).round().astype(np.uint8)


def image_patches(path, size, patch, channels):
    """ The middle square of an image file at size x size pixels, as patches (N, D) float32. To
    shrink it we average areas, so an image enlarged by a whole factor comes back as it was. What is
    transparent lies on white. """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError(f'{path}: to read images: pip install pillow') from None

    # the middle square, turned as its EXIF data say
    try:
        with Image.open(path) as image:
            image = with_8_bits(ImageOps.exif_transpose(image), image.format)
            image = image.convert('L' if channels == 1 else 'RGB')
            shrinks = min(image.size) >= size
            method = Image.Resampling.BOX if shrinks else Image.Resampling.BICUBIC
            image = ImageOps.fit(image, (size, size), method)
    except Exception as error:                                           # pillow raises anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f'{path}: no image that can be read ({reason})') from None

    # 0 to 255 becomes -1 to 1
    pixels = np.asarray(image, np.float32).reshape(size, size, channels) / 127.5 - 1
    return to_patches(pixels, patch)


def with_8_bits(image, form):
    """ A PIL image of 8 bits a channel, opaque: 16 bits are scaled, alpha is laid on white. form:
    of its file, such as 'PNG'. ValueError where nobody knows which number is white. """
    from PIL import Image
    has_16_bits = image.mode.startswith('I;16') or image.mode == 'I' and form in ('PNG', 'PPM')
    if has_16_bits and 'transparency' not in image.info:
        return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode[0] in 'IF':
        raise ValueError(f'mode {image.mode}, whose white is unknown; save it with 8 or 16 bits')
    if image.has_transparency_data:
        white = Image.new('RGBA', image.size, 'white')
        return Image.alpha_composite(white, image.convert('RGBA'))
    return image

# -----------------------------------------------------------------------------
# Sources

def read_images(source):
    """ Documents of a folder: each caption with the patches of its image. An image may have several
    captions; they are one group. """
    # the list of captions
    folder = source.input
    lists = [os.path.join(folder, f'metadata.{kind}') for kind in ('csv', 'jsonl')]
    lists = [path for path in lists if os.path.isfile(path)]
    if not lists:
        raise ValueError(f'image_size is set, but input={folder} is no folder with a metadata.csv '
                         f'or metadata.jsonl of file_name and {source.field}')

    # its records; the image itself is read when its latents are asked for
    for record, where in read_records(lists[0], source):
        file_name = text_of(record, 'file_name', where)
        text = text_of(record, source.field, where)
        path = inside(folder, file_name, where)
        if not os.path.isfile(path):
            raise ValueError(f'{path}: missing, {where} names it')
        latent = partial(image_patches, path, source.image_size, source.patch, source.channels)
        yield Document(text, latent, group=file_name, place=path)


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
