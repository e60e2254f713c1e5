"""
Texts whose latents exist already.

    latents_from=a.npy,b.npy     row i of the files belongs to document i. Where texts and latents
                                 are both folders or globs, a row belongs to a document of the file
                                 of the same name
    latents_from=column:NAME     the latent of a record is in a column of its own
    import_dir=FOLDER            the layout of earlier systems, as corpora/layouts.py describes it

The latent of a Document is a function: it is read when it is asked for.
"""
import itertools
import json
import os
from contextlib import suppress
from functools import partial

import numpy as np

from base.files import as_floats, read_array, read_json, short
from corpora.readers import (RECORDS, Document, inside, joined, kind_of, lines_of, stem_of,
                             text_of)

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

    # text by text with its row. zip asks for the row first, so a text behind the last row of a
    # file is still there for the first row of the next
    texts = iter(texts)
    n_rows = sum(map(len, arrays))
    n_texts = 0
    for path, array in zip(paths, arrays):
        for i, (row, text) in enumerate(zip(array, texts)):
            n_texts += 1
            yield Document(text, partial(as_latent, row, path), place=f'{path}, row {i}')

    # are there more texts than rows? Then they are counted, too
    n_texts += sum(1 for _ in texts)
    if n_texts != n_rows:
        names = ', '.join(paths[:3]) + ', ...' * (len(paths) > 3)
        raise ValueError(f'latents_from={names}: {n_rows:,} rows for {n_texts:,} documents of the '
                         'input, expected a row for each, also for one that is blank')


def latent_of(record, column, where):
    """ The latent in a column of a record: a list of numbers, or its JSON. ValueError without. """
    value = record.get(column)
    latent = None
    with suppress(ValueError, TypeError, OverflowError, RecursionError):
        if isinstance(value, str):
            value = json.loads(value)
        latent = as_latent(np.array(value, np.float32), where)
    if latent is None or not latent.size:
        raise ValueError(f'{where}: no latent in {column!r}, found {short(value)}, expected a list '
                         f'of numbers; choose with --latents_from={COLUMN}')
    return latent


def with_column(files, column, source):
    """ Each text of [(name, path)] with the latent in a column of its own record. ValueError unless
    all latents have one shape. """
    first = shape = None                   # where the first latent stands, and its shape
    for name, path in files:
        if kind_of(path) not in RECORDS:
            raise ValueError(f'{path}: latents_from={COLUMN}{column} goes with records, in files '
                             f'ending in {", ".join(RECORDS)}; of other files give .npy files')
        for record, where in RECORDS[kind_of(path)](path, source, column):
            latent = latent_of(record, column, where)

            # all have one shape
            if first is None:
                first = where
                shape = latent.shape
            if latent.shape != shape:
                raise ValueError(f'{where}: a latent {latent.shape} in {column!r}, and {first} has '
                                 f'one {shape}: expected lists of one length')
            yield Document(text_of(record, source.field, where), lambda z=latent: z, place=where)


def by_name(files, paths):
    """ Each text with its row, of [(name of a file, its texts)] and of .npy files. """
    def stems(names):
        return [os.path.basename(stem_of(name)) for name in names]

    # the names of both lists, one by one; the shorter list has none at its end
    names = [name for name, _ in files]
    for ours, theirs in itertools.zip_longest(stems(names), stems(paths), fillvalue='none'):
        if ours != theirs:
            raise ValueError('files of texts and of latents belong together by their names, and '
                             f'input has {ours} where latents_from has {theirs}: rename them, or '
                             'list them, comma-separated, in the order that pairs them')

    # each pair of files has as many texts as rows
    for (_, texts), path in zip(files, paths):
        yield from with_latents(texts, [path])

# -----------------------------------------------------------------------------
# The earlier layout

def earlier_index(folder, split):
    return os.path.join(folder, f'{split}_data.json')


def read_latent(path):
    return as_latent(read_array(path, mmap=True, what='a latent'), path)


def read_earlier(source):
    """ The documents of a folder in the earlier layout. """
    folder = source.import_dir
    index = earlier_index(folder, source.split)

    for i, item in enumerate(read_json(index, list, limit=2**40)):
        if not isinstance(item, dict) or not isinstance(item.get('latent_path'), str):
            raise ValueError(f'{index}, item {i}: no latent_path, found {short(item)}')

        # the text: of its file, if there is one
        stem = os.path.splitext(os.path.basename(item['latent_path']))[0]
        usual_path = os.path.join('texts', source.split, f'{stem}.txt')
        text_path = inside(folder, item.get('text_path') or usual_path, index)
        if os.path.isfile(text_path):
            text = joined(lines_of(text_path, source), text_path)
        elif isinstance(item.get('text'), str):
            text = item['text']
        else:
            raise ValueError(f'{index}, item {i}: no "text", and no file {text_path}')

        # the latents are read when they are asked for
        path = inside(folder, item['latent_path'], index)
        if not os.path.isfile(path):
            raise ValueError(f'{path}: missing, {index} names it in item {i}')
        yield Document(text, partial(read_latent, path), place=path)
