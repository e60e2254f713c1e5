"""
Texts whose latents exist already: row i of the .npy files belongs to document i.
"""
import glob
import itertools
import os
import re
from functools import partial

import numpy as np
import torch

from corpora.readers import Document
from runs.console import warn
from runs.files import read_array


def as_latent(array, path):
    """ (D,) or (N, D) -> (N, D) float32, or float64 of float64. It is a copy, so no file stays
    open. """
    if array.ndim not in (1, 2) or array.dtype.kind != 'f':
        raise ValueError(f'{path}: a latent is {array.dtype} {array.shape}, '
                         'expected floats (D,) or (N, D)')
    return np.atleast_2d(np.array(array, np.float64 if array.itemsize > 4 else np.float32))


def natural_order(path):
    """ A sort key: 2.npy comes before 10.npy. """
    return [int(part) if part.isdigit() else part for part in re.split(r'(\d+)', path)]


def latent_files(spec):
    """ The .npy files of latents_from, in order. ValueError where a part of it is none, nor a
    folder of them. """
    paths = []
    for part in [part.strip() for part in spec.split(',')]:
        found = [part] if part.endswith('.npy') else []
        if os.path.isdir(part):
            found = sorted(glob.glob(os.path.join(glob.escape(part), '*.npy')), key=natural_order)
        if not found:
            raise ValueError(f'latents_from={part}: expected a .npy file or a folder of them; '
                             'save each array with numpy.save')
        paths += found
    return paths


def with_latents(texts, spec):
    """ Each text with its row of the arrays (n, D) or (n, N, D), one after the other. """
    # the arrays, mapped into memory
    paths = latent_files(spec)
    arrays = [read_array(path, mmap=True, what='latents') for path in paths]
    for path, array in zip(paths, arrays):
        is_like_others = array.shape[1:] == arrays[0].shape[1:]
        if array.ndim not in (2, 3) or not is_like_others or array.dtype.kind != 'f':
            raise ValueError(f'{path}: latents are {array.dtype} {array.shape}, '
                             'expected floats (n, D) or (n, N, D), alike in all files')

    # for each row, which is a view of the map, a function that reads it
    rows = ((partial(as_latent, row, path), f'{path}, row {i}')
            for path, array in zip(paths, arrays) for i, row in enumerate(array))

    # as many rows as texts
    n_texts = 0
    for text in texts:
        row, place = next(rows, (None, None))
        if row is None:
            raise ValueError(f'latents_from={spec}: {n_texts} rows for more documents than that')
        n_texts += 1
        yield Document(text, row, place=place)
    n_left = sum(1 for _ in rows)
    if n_left:
        raise ValueError(f'latents_from={spec}: {n_texts + n_left} rows for {n_texts} documents')

# -----------------------------------------------------------------------------
# Latents of documents

def given_latents(docs):
    """ The latents that the documents bring along, (n, N, D) as as_latent gives them, or None. """
    if docs[0].latent is None:
        return None
    latents = [doc.latent() for doc in docs]
    for doc, latent in zip(docs, latents):
        if latent.shape != latents[0].shape:
            raise ValueError(f'latents are of shapes {latents[0].shape} and {latent.shape}, '
                             f'the latter of {doc.text[:40]!r}')
    return np.stack(latents)


def flaw_of(latent):
    """ What keeps a latent (N, D) from being stored in float16, and what to do; '' for nothing. """
    largest = np.abs(latent).max()
    if not np.isfinite(largest):
        return 'NaN or inf: mend it, or leave out the row and its text'
    if largest >= 65520:                                   # from here on it is rounded to inf
        return (f'{largest:,.6g}, and float16 ends at 65,504: divide all latents by one number, '
                'such as their standard deviation')
    return ''


def check_steps(latents, stored, name):
    """ ValueError where most dimensions of `stored`, (n, N, D) float16, have lost how the latents
    vary: where their rounding errors are above a quarter of their spread. A warning where some
    have. name: of what they are. """
    if len(latents) < 8:
        return
    D = latents.shape[-1]
    z = latents.reshape(-1, D)
    error = np.sqrt(np.mean((stored.reshape(-1, D) - z) ** 2, 0, np.float64))          # (D,)
    spread = (z - z[0]).std(0, dtype=np.float64)
    coarse = np.flatnonzero((error > spread / 4) & (spread > 0))
    if not len(coarse):
        return

    d = coarse[0]
    step = np.spacing(np.abs(stored[..., d]).max())
    said = (f'{name}: {len(coarse)} of {D} dimensions of the latents vary by less than float16 '
            f'shows: dimension {d} is {z[:, d].mean():.5g} +- {spread[d]:.2g}, where its steps are '
            f'{step:.2g}; subtract the mean of all latents from them, then divide by their spread')
    if len(coarse) > D / 2:
        raise ValueError(said)
    warn(said)


def check_given(stream, encoder, name):
    """ ValueError unless the latents of the documents are those of the encoder `name`: over a few
    texts, both centred on their mean, the mean cosine is at least .95. """
    docs = [doc for doc in itertools.islice(stream, 32) if np.isfinite(doc.latent()).all()]
    if len(docs) < 3:
        return

    # of one shape
    own = encoder([doc.text for doc in docs])[:, 0]                       # (n, D)
    given = torch.from_numpy(given_latents(docs)).float()                # (n, N, D)
    if given.shape[1:] != (1, own.shape[1]):
        raise ValueError(f'the latents given are {tuple(given.shape[1:])}, encoder {name} makes '
                         f'(1, {own.shape[1]}): name their encoder, or none')

    # of one direction, once the mean is taken off: raw embeddings all look alike
    given = given[:, 0]
    cosine = torch.nn.functional.cosine_similarity(own - own.mean(0), given - given.mean(0))
    cosine = cosine.mean().item()
    if not cosine >= .95:
        raise ValueError(f'the latents given are not those of encoder {name}: over {len(docs)} '
                         f'texts their mean centred cosine with its own is {cosine:.3f}; '
                         'name their encoder, with its --prefix and --pooling, or --encoder=none')
