"""
A dataset folder, or a run's data/, opened and checked: meta.json, the tokenizer, the statistics of
the latents, the shards of a split. Every mistake is a ValueError of one line: file, found,
expected, what to do. data.py makes its batches from what this module opens.
"""
import os
from functools import lru_cache

import numpy as np
import torch

from data import LatentStats
from runs.files import map_array, read_array, read_arrays
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


def load_bag(folder, meta):
    """ The values (V, D) float32 of a dataset's linear model from tokens to the latent
    (corpora/bag.py); None where it has none. """
    if 'bag.npy' not in meta['files']:
        return None
    path = check_file(folder, 'bag.npy', meta['files'])
    shape = (meta['tokenizer']['vocab_size'], meta['latent_shape'][1])
    values = torch.from_numpy(read_array(path, 'float16', shape)).float()
    if not values.isfinite().all():
        raise ValueError(f'{path}: a value that is not finite; run prepare.py again')
    return values


class Shard:
    """ The memory maps of one shard: tokens (T,), offsets (n + 1,), latents (n, N, D) or None.
    Sizes and headers of its files are right, and offsets run from 0 to T. longest: no text has more
    tokens. at_random: as in files.map_array. """

    def __init__(self, folder, meta, entry, longest, at_random=False):
        self.folder = folder
        self.name = name = entry['name']
        self.files = files = entry['files']
        self.longest = longest
        n = entry['samples']

        # tokens: as many as meta.json says, and not none: a text has at least one
        path = check_file(folder, f'{name}.tokens.bin', files, digest=False)
        dtype = np.dtype(meta['token_dtype']).newbyteorder('<')
        n_bytes = files[f'{name}.tokens.bin']['bytes']
        if n_bytes != entry['tokens'] * dtype.itemsize:
            raise ValueError(f'{path}: {n_bytes} bytes, expected {entry["tokens"]} tokens of '
                             f'{dtype.itemsize}; run prepare.py again')
        if not n_bytes:
            raise ValueError(f'{path}: no tokens, expected some for {n} samples; '
                             'run prepare.py again')
        with open(path, 'rb') as f:
            self.tokens = map_array(f, dtype, (entry['tokens'],), at_random=at_random)

        # offsets: from 0 to the end of the tokens
        path = check_file(folder, f'{name}.offsets.npy', files, digest=False)
        self.offsets = read_array(path, 'int64', (n + 1,), mmap=True, what='offsets',
                                  at_random=at_random)
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            self.refuse_offsets()

        self.latents = None
        if meta['latent_shape'] is not None:
            path = check_file(folder, f'{name}.latents.npy', files, digest=False)
            shape = (n, *meta['latent_shape'])
            self.latents = read_array(path, 'float16', shape, mmap=True, what='latents',
                                      at_random=at_random)

    def refuse_offsets(self):
        raise ValueError(f'{self.folder}/{self.name}.offsets.npy: offsets run to '
                         f'{int(self.offsets[-1])}, expected rising from 0 to the '
                         f'{len(self.tokens)} tokens of {self.name}.tokens.bin; '
                         'run prepare.py again')

    def read_offsets(self):
        """ Reads all offsets into memory, checks that they never fall, and finds the longest text.
        We compare neighbours: differences of the numbers in a hostile file could overflow. """
        self.offsets = np.array(self.offsets)
        if not (self.offsets[1:] >= self.offsets[:-1]).all():
            self.refuse_offsets()
        self.longest = int(np.diff(self.offsets).max())

    def edges(self, rows):
        """ Where the tokens of these rows begin and where they end. rows: int64 of any shape, or a
        slice. ValueError where the offsets cannot be right: those of a large split are looked at
        here for the first time. """
        begin, end = self.offsets[:-1][rows], self.offsets[1:][rows]
        is_right = (0 <= begin) & (begin <= end) & (end <= len(self.tokens))
        is_right &= end - begin <= self.longest
        if not is_right.all():
            begin, end = int(begin[~is_right][0]), int(end[~is_right][0])
            raise ValueError(f'{self.folder}/{self.name}.offsets.npy: a text from {begin} to '
                             f'{end}, expected at most {self.longest} of the {len(self.tokens)} '
                             f'tokens of {self.name}.tokens.bin; run prepare.py again')
        return begin, end

    def ids(self):
        """ (n, 2) int64: the number of a sample's document in its split, and the number of the
        chunk in its document. """
        path = check_file(self.folder, f'{self.name}.ids.npy', self.files, digest=False)
        shape = (len(self.offsets) - 1, 2)
        return read_array(path, 'int64', shape, mmap=True, what='ids')


class Shards:
    """ The shards of a split: shards[i] is a Shard. Not all of them stay open, because each of the
    three maps of a shard holds a file descriptor. A shard that was closed opens again when it is
    read.

    Every shard is opened once at the start, so a wrong file is found before any batch. is_large:
    then only the first and the last offset of a shard are looked at, and the longest text is that
    of meta.json; else all offsets are read, and stay in memory while the shard is open. """

    def __init__(self, folder, meta, entries, is_large):
        self.is_large = is_large
        self.n_samples = [entry['samples'] for entry in entries]
        self.n_tokens = [entry['tokens'] for entry in entries]
        self.longest = longest = [entry.get('longest', meta['max_tokens']) for entry in entries]

        @lru_cache(most_open())
        def open_shard(i):
            return Shard(folder, meta, entries[i], longest[i], at_random=is_large)
        self.open_shard = open_shard

        for i in range(len(entries)):
            if is_large:
                Shard(folder, meta, entries[i], longest[i], at_random=True)
            else:
                self[i].read_offsets()
                longest[i] = self[i].longest

    def __len__(self):
        return len(self.n_samples)

    def __getitem__(self, i):
        return self.open_shard(i)


def most_open():
    """ How many shards of a split may be open: with two splits of three maps a shard there is room
    for 256 other files. Linux has room for 65,530 maps in a process. """
    try:
        import resource
    except ImportError:                                    # Windows has no such limit
        return 8192
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return 8192
    return max(16, min(8192, (limit - 256) // 6))


def read_split(folder, split, many_rows):
    """ meta.json, the tokenizer, the LatentStats (None for text only) and the Shards of a split,
    those without samples left out. A split of more than `many_rows` samples is large. """
    meta = read_meta(folder)
    if split not in meta['splits']:
        raise ValueError(f'{folder}: no split {split!r}, it has {", ".join(meta["splits"])}')
    tokenizer = load_tokenizer(folder, meta)
    stats = load_stats(folder, meta)

    entry = meta['splits'][split]
    filled = [shard for shard in entry['shards'] if shard['samples']]
    if not filled:
        raise ValueError(f'{folder}/meta.json: the shards of {split} hold 0 samples, '
                         f'expected {entry["samples"]} and not 0')
    shards = Shards(folder, meta, filled, is_large=entry['samples'] > many_rows)
    return meta, tokenizer, stats, shards
