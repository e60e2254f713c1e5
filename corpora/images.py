"""
Pictures with captions. A picture is latent vectors, one for each patch, with pixels in [-1, 1]:

    image (S, S, C)  ->  latents (N, D)       N = (S / patch)^2 patches row by row, D = patch^2 * C

The source is a folder of images with metadata.csv or metadata.jsonl (the hub's imagefolder:
file_name and a caption). Icons and their names: icons.py.
Letters: S pixels a side, C channels (1 grey, 3 colour), N patches of D numbers, n images.
"""
import glob
import math
import os
import warnings
from functools import partial

import numpy as np
import torch

from base.files import MOST_MEMORY, regular, why
from base.writing import write_whole
from corpora.readers import RECORDS, Document, count_endings, inside, kind_of, text_of, walk

GAP = 4                        # white pixels between two pictures of a sheet

# -----------------------------------------------------------------------------
# Patches

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

# -----------------------------------------------------------------------------
# Sources

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

# -----------------------------------------------------------------------------
# Pictures in and out of a run that was trained on images

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


def read_in_part(run, path, box):
    """ (names, raw latents (1, N, D), given (1, N)) of a picture that is to be completed: not given
    is each patch that is transparent somewhere, or lies in the box 'X0,Y0,X1,Y1', in pixels of the
    run's pictures. """
    cut = images_of(run)
    if os.path.isdir(path):
        raise ValueError(f'image={path}: mode=complete reads one picture, not a folder')
    names, raw = read_pictures(run, path)
    S = cut['image_size']
    if box:
        numbers = box.split(',')
        edges = [int(x) for x in numbers if x.strip().isdecimal()]
        x0, y0, x1, y1 = edges if len(edges) == len(numbers) == 4 else (0, 0, 0, 0)
        if not (x0 < x1 <= S and y0 < y1 <= S):
            raise ValueError(f'box={box}: expected X0,Y0,X1,Y1, pixels from 0 to {S}, X0 below X1 '
                             'and Y0 below Y1')
        is_drawn = np.zeros((S, S), bool)
        is_drawn[y0:y1, x0:x1] = True
    else:
        from PIL import Image, ImageOps
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image).convert('RGBA')
            image = ImageOps.fit(image, (S, S), Image.Resampling.BOX)
        is_drawn = np.asarray(image)[..., 3] < 255

    patches = to_patches(is_drawn[..., None], cut['patch'])              # (N, pixels)
    given = torch.from_numpy(~patches.any(1))[None]
    if given.all():
        raise ValueError(f'image={path}: nothing in it is transparent: name what is to be drawn, '
                         '--box=X0,Y0,X1,Y1')
    return names, raw, given


def sheet_of(pictures, columns=0, side=128):
    """ Pictures (n, S, S, channels) as one PIL image, in rows of `columns` (0: as many columns as
    rows). Small ones are enlarged by a whole factor, to about `side` pixels. """
    try:
        from PIL import Image
    except ImportError:
        raise ValueError('to write pictures: pip install pillow') from None
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
    return Image.fromarray(sheet)


def write_png(path, pictures, columns=0):
    """ Writes the sheet of pictures (n, S, S, channels). """
    sheet = sheet_of(pictures, columns)
    with write_whole(path, named=True) as f:
        sheet.save(f, 'PNG')
