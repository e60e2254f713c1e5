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
from runs.files import read_array


def as_latent(array, path):
    """ (D,) or (N, D) -> (N, D) float32. It is a copy, so no file stays open. """
    if array.ndim not in (1, 2) or array.dtype.kind != 'f':
        raise ValueError(f'{path}: a latent is {array.dtype} {array.shape}, '
                         'expected floats (D,) or (N, D)')
    return np.atleast_2d(np.array(array, np.float32))


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
    rows = (partial(as_latent, row, path) for path, array in zip(paths, arrays) for row in array)

    # as many rows as texts
    n_texts = 0
    for text in texts:
        row = next(rows, None)
        if row is None:
            raise ValueError(f'latents_from={spec}: {n_texts} rows for more documents than that')
        n_texts += 1
        yield Document(text, row)
    n_left = sum(1 for _ in rows)
    if n_left:
        raise ValueError(f'latents_from={spec}: {n_texts + n_left} rows for {n_texts} documents')

# -----------------------------------------------------------------------------
# Latents of documents

def given_latents(docs):
    """ The latents that the documents bring along, (n, N, D) float16, or None. """
    if docs[0].latent is None:
        return None
    with np.errstate(over='ignore'):                       # too large becomes inf, which is counted
        latents = [doc.latent().astype(np.float16) for doc in docs]
    for doc, latent in zip(docs, latents):
        if latent.shape != latents[0].shape:
            raise ValueError(f'latents are of shapes {latents[0].shape} and {latent.shape}, '
                             f'the latter of {doc.text[:40]!r}')
    return np.stack(latents)


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
