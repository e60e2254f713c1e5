"""
The packed dataset that prepare.py wrote: everything between the disk and a batch.

    data = PackedDataset('data/captions', 'train')
    rows = row_order(len(data), seed, start=step * batch_size, count=batch_size)  # stages.py
    tokens, latents = data.rows(rows)

A sample is a text and, unless the dataset is text only, the latent vectors of that very text:
    tokens   (B, L)     int64     the text, one EOS, then PAD up to L
    latents  (B, N, D)  float32   standardised per dimension; dead dimensions are 0

A split is stored in shards. A shard has the tokens of its texts in one row, the offsets where each
text begins, and the latents as float16. All of it is mapped into memory. So a split of any size is
opened fast: offsets, and token ids beyond the first shard, are checked when a row is read, and
digests where they are asked for (check_files).

Letters: B batch, L text tokens, N latent vectors, D latent dimensions, V token ids (EOS and PAD
included; MASK is id V), T tokens of a shard, n samples.
"""
import os
import resource
from functools import lru_cache, partial

import numpy as np
import torch

from runs.console import warn
from runs.files import plain, read_array
from runs.manifest import HOW_TO_MEND, check_file, load_stats, read_meta

# -----------------------------------------------------------------------------
# A shard

class Shard:
    """ The memory maps of one shard: tokens (T,), offsets (n + 1,), latents (n, N, D) or None. """

    def __init__(self, folder, meta, entry):
        name, n = entry['name'], entry['samples']

        def path_of(end):
            return check_file(folder, f'{name}.{end}', entry['files'], digest=False)

        self.path_of_tokens = path_of('tokens.bin')
        self.vocab_size = meta['tokenizer']['vocab_size']
        tokens = np.memmap(self.path_of_tokens, meta['token_dtype'], mode='r')
        self.tokens = plain(tokens, at_random=True)
        map_of = partial(read_array, mmap=True, at_random=True)
        self.path, self.longest = path_of('offsets.npy'), entry['longest']
        self.offsets = map_of(self.path, 'int64', (n + 1,))
        self.latents = None
        if meta['latent_shape'] is not None:
            self.latents = map_of(path_of('latents.npy'), 'float16', (n, *meta['latent_shape']))

    def edges(self, rows):
        """ Where the tokens of these rows begin and end. rows: int64 of any shape, or a slice. """
        begin, end = self.offsets[:-1][rows], self.offsets[1:][rows]
        n_tokens = end - begin
        if (begin > end).any() or (n_tokens > self.longest).any():
            raise ValueError(f'{self.path}: texts of {n_tokens.min():,} to {n_tokens.max():,} '
                             f'tokens, expected 0 to {self.longest:,}; {HOW_TO_MEND}')
        if (begin < 0).any() or (end > len(self.tokens)).any():
            raise ValueError(f'{self.path}: offsets from {begin.min():,} to {end.max():,}, the '
                             f'shard has {len(self.tokens):,} tokens; {HOW_TO_MEND}')
        return begin, end

    def check_ids(self, tokens):
        """ ValueError where one of these tokens of the shard is beyond the vocabulary. """
        if tokens.size and tokens.max() >= self.vocab_size:
            raise ValueError(f'{self.path_of_tokens}: token id {tokens.max()}, expected ids below '
                             f'vocab_size {self.vocab_size}; run prepare.py again')

    def check(self):
        """ ValueError unless its texts are all of its tokens, and these are of the vocabulary. """
        self.edges(slice(None))
        if self.offsets[0] or self.offsets[-1] != len(self.tokens):
            raise ValueError(f'{self.path}: offsets from {self.offsets[0]:,} to '
                             f'{self.offsets[-1]:,}, the shard has {len(self.tokens):,} tokens; '
                             f'{HOW_TO_MEND}')
        self.check_ids(self.tokens)


def most_open():
    """ How many shards of a split may be open. Each of the three maps of a shard holds a file
    descriptor: with two splits there is room for 256 other files. """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 8192 if limit == resource.RLIM_INFINITY else (limit - 256) // 6
    return max(16, min(most, 8192))            # Linux has room for 65,530 maps in a process

# -----------------------------------------------------------------------------
# A split

class PackedDataset:
    """ One split of a dataset folder. Raises ValueError before any batch is read: file, found,
    expected, what to do.
    seq_len is L, for a text with EOS and PAD; None: max_tokens + 1. The longest text and its EOS
    must fit, unless crop=True: then rows() shows L tokens of a longer text, without EOS.
    """

    def __init__(self, folder, split, seq_len=None, crop=False, meta=None):
        self.folder = folder = str(folder)
        self.split = split
        self.meta = meta = meta or read_meta(folder)
        if split not in meta['splits']:
            raise ValueError(f'{folder}: no split {split!r}, it has {", ".join(meta["splits"])}')
        self.vocab_size = meta['tokenizer']['vocab_size']                # V
        self.eos, self.pad = meta['tokenizer']['eos'], meta['tokenizer']['pad']
        if self.vocab_size > np.iinfo(meta['token_dtype']).max + 1:
            raise ValueError(f'{folder}/meta.json: vocab_size {self.vocab_size}, and its tokens '
                             f'are {meta["token_dtype"]}')

        # statistics of the latents; None for text only
        self.stats = load_stats(folder, meta)
        self.latent_shape = None
        if self.stats is not None:
            self.latent_shape = tuple(meta['latent_shape'])              # (N, D)
            self.live = self.stats.live                                  # (D,)
            self.standardise = self.stats.standardise

        # the shards that hold samples. Not all stay open, but each is opened once at the start, so
        # a wrong file is found before any batch
        self.entries = entries = [one for one in meta['splits'][split]['shards'] if one['samples']]
        if not entries:
            raise ValueError(f'{folder}/meta.json: the shards of {split} hold 0 samples')
        self.n_shards = len(entries)
        self.shard = lru_cache(most_open())(lambda i: Shard(folder, meta, entries[i]))
        for i in range(self.n_shards):
            self.shard(i)
        self.shard(0).check_ids(self.shard(0).tokens)      # is it the right vocabulary?

        # row first[i] is the first one of shard i
        self.first = np.cumsum([0] + [entry['samples'] for entry in entries])

        # the length of a row
        self.longest = longest = max(entry['longest'] for entry in entries)          # tokens
        self.seq_len = meta['max_tokens'] + 1 if seq_len is None else seq_len
        self.cropped = longest > self.seq_len
        if not crop and self.seq_len < longest + 1:
            raise ValueError(f'seq_len {self.seq_len} is too short for {folder}: its longest '
                             f'{split} text has {longest} tokens and an EOS; use seq_len '
                             f'{longest + 1} or more, or prepare with a smaller max_tokens')

    def __len__(self):
        return int(self.first[-1])

    def check_files(self, entries=None, digest=True):
        """ ValueError where a file of these shards (None: all) has not the size, or the digest,
        that is noted. A digest takes about a second for 1 GB. What was moved away since the split
        was opened is still mapped, and whole: it is passed over, with a warning where digests are
        asked for. """
        n_gone = 0
        for entry in self.entries if entries is None else entries:
            for name in entry['files']:
                if os.path.exists(os.path.join(self.folder, name)):
                    check_file(self.folder, name, entry['files'], digest)
                else:
                    n_gone += 1
        if n_gone and digest:
            warn(f'{n_gone} files of {self.folder} were moved away: nobody knows their digests')

    def by_shard(self, indices):
        """ (shard, positions in `indices`, rows in the shard) for each shard that they touch. """
        indices = np.asarray(indices, dtype=np.int64)
        owner = np.searchsorted(self.first, indices, side='right') - 1
        for i in np.unique(owner):
            positions = np.flatnonzero(owner == i)
            yield self.shard(i), positions, indices[positions] - self.first[i]

    def rows(self, indices, crop_at=None, length=None):
        """ tokens (B, L) int64, and latents (B, N, D) float32, standardised (None for text only).
        crop_at (B,) in [0, 1): of a text longer than L, where its L tokens begin, between the first
            possible position and the last; None: at the first.
        length: L, if it is less than seq_len. """
        L = length or self.seq_len
        column = np.arange(L)
        tokens = np.empty((len(indices), L), np.int64)

        # the shards that hold these rows, one after the other
        for shard, positions, rows in self.by_shard(indices):
            begin, end = shard.edges(rows[:, None])                      # (b, 1) each
            n_tokens = end - begin
            if crop_at is not None:
                n_hidden = np.maximum(n_tokens - L, 0)
                shift = np.asarray(crop_at)[positions, None] * (n_hidden + 1)
                begin = begin + shift.astype(np.int64)
                n_tokens = n_tokens - n_hidden                           # L at most

            # after its n_tokens a row of `text` has tokens of other texts: EOS and PAD cover them
            text = shard.tokens[np.minimum(begin + column, len(shard.tokens) - 1)]   # (b, L)
            ends = np.where(column == n_tokens, self.eos, self.pad)
            tokens[positions] = np.where(column < n_tokens, text, ends)
            shard.check_ids(text)

        latents = None
        if self.stats is not None:
            latents = self.standardise(self.raw_latents(indices))
        return torch.from_numpy(tokens), latents

    def raw_latents(self, indices):
        """ (B, N, D) float32, as the encoder gave them. """
        latents = np.empty((len(indices), *self.latent_shape), np.float32)
        for shard, positions, rows in self.by_shard(indices):
            latents[positions] = shard.latents[rows]
        return torch.from_numpy(latents)

    def ids(self, i):
        """ The tokens of text i, without EOS. """
        (shard, _, rows), = self.by_shard([i])
        (begin,), (end,) = shard.edges(rows)
        tokens = shard.tokens[begin:end]
        shard.check_ids(tokens)
        return tokens
