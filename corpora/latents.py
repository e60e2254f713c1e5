"""
Texts whose latents exist already: row i of the .npy files belongs to document i. Where texts and
latents are both folders or globs, a row belongs to a document of the file of the same name. Or the
latent of a record is in a column of its own: latents_from=column:NAME.
"""
import itertools
import json
import os
from functools import partial

import numpy as np
import torch

from base.console import warn
from base.files import as_floats, read_array, short
from corpora.readers import RECORDS, Document, kind_of, stem_of, text_of
from encoders import FAR

COLUMN = 'column:'             # begins a value of latents_from that is no file


def as_latent(array, path):
    """ (D,) or (N, D) -> (N, D) float32, or float64 of float64. It is a copy, so no file stays
    open. """
    if array.ndim not in (1, 2) or array.dtype.kind != 'f':
        raise ValueError(f'{path}: a latent is {array.dtype} {array.shape}, '
                         'expected floats (D,) or (N, D)')
    return np.atleast_2d(as_floats(array))


def with_latents(texts, paths):
    """ Each text with its row of the arrays (n, D) or (n, N, D) in these files, in turn. """
    # the arrays, mapped into memory
    arrays = [read_array(path, mmap=True, what='latents') for path in paths]
    for path, array in zip(paths, arrays):
        is_like_others = array.shape[1:] == arrays[0].shape[1:]
        if array.ndim not in (2, 3) or not is_like_others or array.dtype.kind != 'f':
            raise ValueError(f'{path}: latents are {array.dtype} {array.shape}, '
                             'expected floats (n, D) or (n, N, D), alike in all files')

    # as many rows as texts; a row is read when it is asked for
    texts = iter(texts)
    n_rows = sum(map(len, arrays))
    n_texts = 0
    for path, array in zip(paths, arrays):
        for i, (row, text) in enumerate(zip(array, texts)):
            n_texts += 1
            yield Document(text, partial(as_latent, row, path), place=f'{path}, row {i}')
    n_texts += sum(1 for _ in texts)
    if n_texts != n_rows:
        names = ', '.join(paths[:3]) + ', ...' * (len(paths) > 3)
        raise ValueError(f'latents_from={names}: {n_rows:,} rows for {n_texts:,} documents of the '
                         'input, expected a row for each, also for one that is blank')


def with_column(files, column, source):
    """ Each text of [(name, path)] with the latent in a column of its own record: a list of
    numbers, or its JSON. """
    first = shape = None                   # where the first latent stands, and its shape
    for name, path in files:
        if kind_of(path) not in RECORDS:
            raise ValueError(f'{path}: latents_from={COLUMN}{column} goes with records, in files '
                             f'ending in {", ".join(RECORDS)}; of other files give .npy files')
        for record, where in RECORDS[kind_of(path)](path, source, column):
            value = record.get(column)
            try:
                value = json.loads(value) if isinstance(value, str) else value
                latent = as_latent(np.array(value, np.float32), where)
            except (ValueError, TypeError, OverflowError, RecursionError):
                latent = None
            if latent is None or not latent.size:
                raise ValueError(f'{where}: no latent in {column!r}, found {short(value)}, '
                                 'expected a list of numbers; choose with '
                                 f'--latents_from={COLUMN}')
            if first is None:
                first, shape = where, latent.shape
            if latent.shape != shape:
                raise ValueError(f'{where}: a latent {latent.shape} in {column!r}, and {first} has '
                                 f'one {shape}: expected lists of one length')
            yield Document(text_of(record, source.field, where), lambda z=latent: z, place=where)


def by_name(files, paths):
    """ Each text with its row, of [(name of a file, its texts)] and of .npy files. """
    def stems(names):
        return [os.path.basename(stem_of(name)) for name in names]

    names = [name for name, _ in files]
    pairs = itertools.zip_longest(stems(names), stems(paths), fillvalue='none')
    for ours, theirs in pairs:
        if ours != theirs:
            raise ValueError('files of texts and of latents belong together by their names, and '
                             f'input has {ours} where latents_from has {theirs}: rename them, or '
                             'list them, comma-separated, in the order that pairs them')
    for (_, texts), path in zip(files, paths):
        yield from with_latents(texts, [path])

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
    """ What keeps a latent (N, D) from being stored, and what to do. """
    largest = np.abs(latent).max()
    if not largest:
        return 'is no molecule that RDKit can read'
    if not np.isfinite(largest):
        return 'NaN or inf: mend it, or leave out the row and its text'
    if largest >= 65520:                                   # from here on it is rounded to inf
        return (f'{largest:,.6g}, and float16 ends at 65,504: divide all latents by one number, '
                'such as their standard deviation')
    return (f'{FAR} times as long as the others or more, it has {largest:,.6g}: mend it, or leave '
            'out the row and its text')


def check_stats(stats):
    """ ValueError where no dimension of the latents varies, or most vary by less than a step of
    float16, in which they are stored: what they say is lost. A warning where some do. """
    if not stats.live.any():
        raise ValueError('all latents of train are the same, so nothing can be learned from them: '
                         'check what made them (--encoder, --latents_from), or prepare text only '
                         '(--encoder=none, no --latents_from)')
    mean = stats.mean.numpy()
    std = stats.std.numpy()
    steps = np.spacing(mean.astype(np.float16)).astype(np.float32)       # (D,)
    coarse = np.flatnonzero(stats.live.numpy() * (std < np.abs(steps)))
    if not len(coarse):
        return
    d = coarse[0]
    said = (f'{len(coarse)} of {len(mean)} dimensions of the latents vary by less than float16 '
            f'shows: dimension {d} is {mean[d]:.5g} +- {std[d]:.2g}, where its steps are '
            f'{abs(steps[d]):.2g}; subtract the mean of all latents from them, then divide by '
            'their spread')
    if len(coarse) > len(mean) / 2:
        raise ValueError(said)
    warn(said)


def check_given(stream, encoder, name):
    """ ValueError unless the latents of the documents are those of the encoder `name`: over a few
    texts, both centred on their mean, the mean cosine is at least .95. """
    docs = itertools.islice(stream, 32)
    docs = [doc for doc in docs if np.isfinite(doc.latent()).all()]
    if len(docs) < 3:
        return
    hint = 'name their encoder, with its --prefix and --pooling, or --encoder=none'

    # of one shape
    own = encoder([doc.text for doc in docs])[:, 0]                       # (n, D)
    given = torch.from_numpy(given_latents(docs)).float()                # (n, N, D)
    if given.shape[1:] != (1, own.shape[1]):
        raise ValueError(f'the latents given are {tuple(given.shape[1:])}, encoder {name} makes '
                         f'(1, {own.shape[1]}): {hint}')

    # of one direction, once the mean is taken off: raw embeddings all look alike
    given = given[:, 0]
    given = given - given.mean(0)
    own = own - own.mean(0)
    cosine = torch.nn.functional.cosine_similarity(own, given).mean()
    if not cosine >= .95:
        raise ValueError(f'the latents given are not those of encoder {name}: over {len(docs)} '
                         f'texts their mean centred cosine with its own is {cosine:.3f}; {hint}')
