"""
Pictures as latent vectors, a vector per patch, with pixels in [-1, 1].

    image (S, S, C)  ->  latents (N, D)       N = (S / patch)^2 patches row by row, D = patch^2 * C

Letters: S pixels a side, C channels (1 grey, 3 colour), N patches of D numbers, n images.
"""
import math
import warnings

import numpy as np

from runs.files import MOST_MEMORY, regular, why


def to_patches(pixels, patch):
    """ (S, S, C) -> (N, D). """
    S, _, C = pixels.shape
    side = S // patch                                                    # patches
    grid = pixels.reshape(side, patch, side, patch, C)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, patch * patch * C)


def to_pixels(patches, patch, channels):
    """ The way back, for n images: (n, N, D), clipped to [-1, 1], -> (n, S, S, C) uint8. """
    n = len(patches)
    side = math.isqrt(patches.shape[1])
    grid = patches.reshape(n, side, side, patch, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    pixels = grid.reshape(n, side * patch, side * patch, channels)
    return ((pixels.clip(-1, 1) + 1) * 127.5).round().astype(np.uint8)


def image_patches(path, size, patch, channels):
    """ The middle square of an image file at size x size pixels, as patches (N, D) float32. Areas
    are averaged, and what is transparent lies on white. """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError(f'{path}: to read images: pip install pillow') from None

    # a small file may hold a large picture. Its header says how large, before it is unpacked
    try:
        with warnings.catch_warnings(action='ignore'), Image.open(regular(path)) as image:
            n_bytes = 4 * image.width * image.height
            if n_bytes > MOST_MEMORY:
                raise ValueError(f'{image.width} x {image.height} pixels, at most '
                                 f'{MOST_MEMORY // 4:,}: make it smaller')
            ImageOps.exif_transpose(image, in_place=True)
            image = as_mode('L' if channels == 1 else 'RGB', opaque(image))
            image = ImageOps.fit(image, (size, size), Image.Resampling.BOX)
    except Exception as error:                                           # pillow raises anything
        raise ValueError(f'{path}: no image that can be read ({why(path, error)})') from None

    pixels = np.asarray(image, np.float32).reshape(size, size, channels) / 127.5 - 1
    return to_patches(pixels, patch)


def opaque(image):
    """ A PIL image of 8 bits a channel, with what is transparent laid on white. ValueError for
    other depths: nobody knows which number is white. """
    from PIL import Image
    if image.mode[0] in 'IF':
        raise ValueError(f'mode {image.mode}, whose white is unknown; save it with 8 bits')
    if image.has_transparency_data:
        white = Image.new('RGBA', image.size, 'white')
        return Image.alpha_composite(white, as_mode('RGBA', image))
    return image


def as_mode(mode, image):
    """ A PIL image in a mode; itself, without a copy, where it is in that mode. """
    return image if image.mode == mode else image.convert(mode)
