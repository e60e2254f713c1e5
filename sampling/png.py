""" Pictures on their way in and out of a run that was trained on images: latents are their patches.
Letters: n pictures, S pixels a side, N patches, D numbers of a patch. """
import glob
import math
import os

import numpy as np
import torch

from corpora.patches import image_patches, to_pixels
from runs.writing import write_whole

GAP = 4                        # white pixels between two pictures of a sheet


def images_of(run):
    """ How the images of a run were cut: {image_size, patch, channels}. ValueError where its
    latents are not of images. """
    record = run.meta.get('source') or {}
    if not record.get('image_size'):
        raise ValueError(f'{run.out_dir} was not trained on images: it neither reads nor draws a '
                         'picture')
    return record


def pixels(run, raw):
    """ Raw latents (n, N, D) as pictures (n, S, S, channels), uint8. """
    record = images_of(run)
    return to_pixels(raw.numpy(), record['patch'], record['channels'])


def read_pictures(run, path):
    """ (names, raw latents (n, N, D)) of a picture, or of all in a folder, by name. """
    cut = images_of(run)
    files = [path]
    if os.path.isdir(path):
        files = sorted(glob.glob(os.path.join(glob.escape(path), '*.[pj][np]g')))
    if not files:
        raise ValueError(f'{path}: no .png or .jpg file in this folder')

    patches = [image_patches(file, cut['image_size'], cut['patch'], cut['channels'])
               for file in files]
    return [os.path.basename(file) for file in files], torch.from_numpy(np.stack(patches))


def write_png(path, pictures, columns=0, side=128):
    """ Pictures (n, S, S, channels) as one sheet, in rows of `columns` (0: as many columns as
    rows). Small ones are enlarged by a whole factor, to about `side` pixels. """
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(f'png={path}: pip install pillow') from None
    n, S, _, channels = pictures.shape
    columns = columns or math.ceil(math.sqrt(n))
    rows = -(-n // columns)
    scale = max(1, side // S)
    step = S * scale + GAP

    # a white sheet, and each picture at its position
    large = pictures.repeat(scale, 1).repeat(scale, 2)
    shape = (rows * step - GAP, columns * step - GAP, channels)
    sheet = np.full(shape, 255, np.uint8)
    for i, picture in enumerate(large):
        y = i // columns * step
        x = i % columns * step
        sheet[y:y + S * scale, x:x + S * scale] = picture
    if channels == 1:
        sheet = sheet.squeeze(2)
    with write_whole(path, named=True) as f:
        Image.fromarray(sheet).save(f, 'PNG')
