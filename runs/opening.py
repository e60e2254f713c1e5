"""
A dataset folder, or a run's data/, opened and checked: meta.json, the tokenizer, the statistics of
the latents, the shards of a split. Every mistake is a ValueError of one line: file, found,
expected, what to do. data.py makes its batches from what this module opens.
"""
import os

import numpy as np

from data import LatentStats
from runs.files import read_array, read_arrays
from runs.manifest import check_file, read_meta


def load_tokenizer(folder_or_name, meta=None):
    """ The tokenizer of a dataset folder or of a run's data/, or one by name (byte, esm, a tiktoken
    encoding). meta: the folder's meta.json, if read_meta has read it already. """
    from corpora.tokenizers import bpe_tokenizer, make_tokenizer
    if not os.path.isdir(folder_or_name):
        return make_tokenizer(folder_or_name)

    folder = folder_or_name
    meta = meta or read_meta(folder)
    kind = meta['tokenizer']['kind']
    if kind == 'bpe':
        tokenizer = bpe_tokenizer(check_file(folder, 'tokenizer.json', meta['files']))
    else:
        try:
            tokenizer = make_tokenizer(kind)
        except ValueError as error:
            raise ValueError(f'{folder}: {error}') from None
    if tokenizer.record != meta['tokenizer']:
        raise ValueError(f'{folder}: the tokenizer is {tokenizer.record}, '
                         f'meta.json says {meta["tokenizer"]}; run prepare.py again')
    return tokenizer


def load_stats(folder, meta=None):
    """ LatentStats of a dataset folder or of a run's data/; None if it is text only. meta: as in
    load_tokenizer. """
    meta = meta or read_meta(folder)
    if meta['latent_shape'] is None:
        return None
    path = check_file(folder, 'latent_stats.npz', meta['files'])
    N, D = meta['latent_shape']
    arrays = read_arrays(path, {'mean': ('floats', (D,)), 'std': ('floats', (D,))})
    with np.errstate(over='ignore'):                       # too large becomes inf
        mean = arrays['mean'].astype(np.float32)
        std = arrays['std'].astype(np.float32)
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std >= 0).all()):
        raise ValueError(f'{path}: a mean or std that is not finite, or a std below 0; '
                         'run prepare.py again')
    return LatentStats(mean, std)


class Shard:
    """ The memory maps of one shard: tokens (T,), offsets (n + 1,), latents (n, N, D) or None. """

    def __init__(self, folder, meta, entry):
        self.folder = folder
        self.name = name = entry['name']
        self.files = files = entry['files']
        n = entry['samples']

        # tokens: as many as meta.json says, and not none: a text has at least one
        path = check_file(folder, f'{name}.tokens.bin', files, digest=False)
        dtype = np.dtype(meta['token_dtype']).newbyteorder('<')
        n_bytes = os.path.getsize(path)
        if n_bytes != entry['tokens'] * dtype.itemsize:
            raise ValueError(f'{path}: {n_bytes} bytes, expected {entry["tokens"]} tokens of '
                             f'{dtype.itemsize}; run prepare.py again')
        if not n_bytes:
            raise ValueError(f'{path}: no tokens, expected some for {n} samples; '
                             'run prepare.py again')
        self.tokens = np.memmap(path, dtype, mode='r').view(np.ndarray)

        # offsets: from 0 to the end of the tokens, never falling. We compare neighbours:
        # differences of the numbers in a hostile file could overflow
        path = check_file(folder, f'{name}.offsets.npy', files, digest=False)
        self.offsets = read_array(path, 'int64', (n + 1,), what='offsets')
        is_rising = (self.offsets[1:] >= self.offsets[:-1]).all()
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens) or not is_rising:
            raise ValueError(f'{path}: offsets run to {int(self.offsets[-1])}, expected rising '
                             f'from 0 to the {len(self.tokens)} tokens of {name}.tokens.bin; '
                             'run prepare.py again')
        self.longest = int(np.diff(self.offsets).max())

        self.latents = None
        if meta['latent_shape'] is not None:
            path = check_file(folder, f'{name}.latents.npy', files, digest=False)
            shape = (n, *meta['latent_shape'])
            self.latents = read_array(path, 'float16', shape, mmap=True, what='latents')

    def ids(self):
        """ (n, 2) int64: the number of a sample's document in its split, and the number of the
        chunk in its document. """
        path = check_file(self.folder, f'{self.name}.ids.npy', self.files, digest=False)
        shape = (len(self.offsets) - 1, 2)
        return read_array(path, 'int64', shape, mmap=True, what='ids')


def read_split(folder, split):
    """ meta.json, the tokenizer, the LatentStats (None for text only) and the shards of a split,
    those without samples left out. """
    meta = read_meta(folder)
    if split not in meta['splits']:
        raise ValueError(f'{folder}: no split {split!r}, it has {", ".join(meta["splits"])}')
    tokenizer = load_tokenizer(folder, meta)
    stats = load_stats(folder, meta)

    entry = meta['splits'][split]
    filled = [shard for shard in entry['shards'] if shard['samples']]
    shards = [Shard(folder, meta, shard) for shard in filled]
    found = sum(len(shard.offsets) - 1 for shard in shards)
    if found != entry['samples'] or not found:
        raise ValueError(f'{folder}/meta.json: the shards of {split} hold {found} samples, '
                         f'expected {entry["samples"]} and not 0')
    return meta, tokenizer, stats, shards
