"""
The packed dataset that prepare.py wrote: everything between the disk and a batch.

    data = PackedDataset('data/captions', 'train')
    rows = row_order(len(data), seed, start=step * batch_size, count=batch_size)
    tokens, latents = data.rows(rows)

A sample is a text and, unless the dataset is text only, the latent vectors of that very text:
    tokens   (B, L)     int64     the text, one EOS, then PAD up to L
    latents  (B, N, D)  float32   standardised per dimension; dead dimensions are 0

A split is stored in shards. A shard has the tokens of its texts in one row, the offsets where each
text begins, and the latents as float16. All of it is mapped into memory. runs/opening.py opens the
files and checks them; here they are whole.

The order of rows is a pure function of (seed, epoch). So a resume replays nothing, and the order
does not depend on how many ranks share the rows.

Letters: B batch, L text tokens, N latent vectors, D latent dimensions, V token ids (EOS and PAD
included; MASK is id V), T tokens of a shard, n samples.
"""
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from diffusion import philox

DEAD = 1e-3                    # a latent dimension is dead if its std is below DEAD * median std;
                               # MiniLM has three
CHECK_ALL_TOKENS = 2**27       # splits up to this many tokens are checked id by id when opened
                               # (well under a second)


def is_end(tokens, tokenizer):
    """ Where tokens (B, L) are EOS or PAD. """
    return (tokens == tokenizer.eos) | (tokens == tokenizer.pad)

# -----------------------------------------------------------------------------
# Latent statistics: the networks see latents of unit variance, whatever the encoder's own scale

class LatentStats:
    """ z = live * (raw - mean) / std and back, per dimension. A dead dimension has live = 0: the
    network sees 0 there, and the way back gives its mean. """

    def __init__(self, mean, std):
        std = torch.as_tensor(std, dtype=torch.float32)
        is_live = std >= DEAD * std.median()
        if std.median() == 0:
            is_live = std > 0
        self.mean = torch.as_tensor(mean, dtype=torch.float32)           # (D,)
        self.std = torch.where(is_live, std, 1.0)                        # (D,), 1 where dead
        self.live = is_live.float()                                      # (D,), 0 where dead

    def on_device(self, device):
        return self.mean.to(device), self.std.to(device), self.live.to(device)

    def standardise(self, raw):
        mean, std, live = self.on_device(raw.device)
        return (raw.float() - mean) / std * live

    def destandardise(self, z):
        mean, std, live = self.on_device(z.device)
        return z.float() * live * std + mean

# -----------------------------------------------------------------------------
# A split

class PackedDataset:
    """ One split of a dataset folder. Raises ValueError before any batch is read: file, found,
    expected, what to do.

    seq_len is L, for a text with EOS and PAD; None: max_tokens + 1. The longest text and its EOS
    must fit, unless crop=True: then rows() shows L tokens of a longer text, without EOS.
    """

    def __init__(self, folder, split, seq_len=None, crop=False):
        # imported here, since that module makes the LatentStats of this one
        from runs.opening import read_split
        self.folder = str(folder)
        self.split = split
        self.meta, self.tokenizer, self.stats, self.shards = read_split(self.folder, split)

        # statistics of the latents; None for text only
        self.latent_shape = None
        if self.stats is not None:
            self.latent_shape = tuple(self.meta['latent_shape'])         # (N, D)
            self.mean = self.stats.mean                                  # (D,)
            self.std = self.stats.std                                    # (D,)
            self.live = self.stats.live                                  # (D,)
            self.standardise = self.stats.standardise
            self.destandardise = self.stats.destandardise

        # row first[i] is the first one of shard i
        self.first = np.cumsum([0] + [len(shard.offsets) - 1 for shard in self.shards])
        if sum(len(shard.tokens) for shard in self.shards) <= CHECK_ALL_TOKENS:
            for shard in self.shards:
                self.check_ids(shard.tokens)

        # the length of a row
        longest = max(shard.longest for shard in self.shards)
        self.seq_len = self.meta['max_tokens'] + 1 if seq_len is None else seq_len
        self.cropped = longest > self.seq_len
        if not crop and self.seq_len < longest + 1:
            raise ValueError(f'seq_len {self.seq_len} is too short for {folder}: its longest '
                             f'{split} text has {longest} tokens and an EOS; use seq_len '
                             f'{longest + 1} or more, or prepare with a smaller max_tokens')

    def __len__(self):
        return int(self.first[-1])

    def check_ids(self, tokens):
        if len(tokens) and tokens.max() >= self.tokenizer.vocab_size:
            raise ValueError(f'{self.folder}: token id {tokens.max()} in {self.split}, expected '
                             f'ids below vocab_size {self.tokenizer.vocab_size}; '
                             'run prepare.py again')

    def by_shard(self, indices):
        """ (shard, positions in `indices`, rows in the shard) for each shard that they touch. """
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f'row {indices.min()} or {indices.max()} is outside '
                             f'0..{len(self) - 1}')
        owner = np.searchsorted(self.first, indices, side='right') - 1
        for i in np.unique(owner):
            positions = np.flatnonzero(owner == i)
            yield self.shards[i], positions, indices[positions] - self.first[i]

    def rows(self, indices, crop_at=None, length=None):
        """
        tokens (B, L) int64, and latents (B, N, D) float32, standardised (None for text only).
        crop_at (B,) in [0, 1): of a text longer than L, where its L tokens begin, between the first
            possible place and the last; None: at the first.
        length: L, if it is less than seq_len.
        """
        L = length or self.seq_len
        column = np.arange(L)
        tokens = np.empty((len(indices), L), np.int64)

        # the shards that hold these rows, one after the other
        for shard, positions, rows in self.by_shard(indices):
            begin = shard.offsets[rows, None]                            # (b, 1)
            n_tokens = shard.offsets[rows + 1, None] - begin             # (b, 1)
            if crop_at is not None:
                n_hidden = np.maximum(n_tokens - L, 0)
                shift = np.asarray(crop_at)[positions, None] * (n_hidden + 1)
                begin = begin + shift.astype(np.int64)
                n_tokens = n_tokens - n_hidden                           # L at most

            # after its n_tokens a row of `text` has tokens of other texts: EOS and PAD cover them
            text = shard.tokens[np.minimum(begin + column, len(shard.tokens) - 1)]   # (b, L)
            ends = np.where(column == n_tokens, self.tokenizer.eos, self.tokenizer.pad)
            tokens[positions] = np.where(column < n_tokens, text, ends)
        self.check_ids(tokens)

        # their latents
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

    def ids(self, indices):
        """ (B, 2) int64: the number of a sample's document in its split, and the number of the
        chunk in its document. """
        ids = np.empty((len(indices), 2), np.int64)
        for shard, positions, rows in self.by_shard(indices):
            ids[positions] = shard.ids()[rows]
        return ids

    def counts(self):
        """ How often each id occurs in the split, (V,) int64: an EOS after every text, no PAD. """
        counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        for shard in self.shards:
            for i in range(0, len(shard.tokens), 2 ** 24):
                counts += np.bincount(shard.tokens[i:i + 2 ** 24], minlength=len(counts))
        counts[self.tokenizer.eos] += len(self)
        return torch.from_numpy(counts)

    def lengths(self):
        """ Tokens of every text of the split, (n,) int64. """
        return np.concatenate([np.diff(shard.offsets) for shard in self.shards])

    def text(self, i):
        (shard, _, (row,)), = self.by_shard([i])
        return self.tokenizer.decode(shard.tokens[shard.offsets[row]:shard.offsets[row + 1]])

# -----------------------------------------------------------------------------
# The order of rows, a pure function of (seed, epoch)

@lru_cache(maxsize=2)                                                  # a batch may span two epochs
def epoch_permutation(n, seed, epoch):
    return np.random.Generator(philox(seed, epoch, 'row order')).permutation(n)


def row_order(n, seed, start, count):
    """ Rows start..start+count-1 of an endless sequence of shuffled epochs over n rows, int64. """
    if n < 1 or start < 0 or count < 0:
        raise ValueError('row_order needs n >= 1, start >= 0, count >= 0, '
                         f'found n {n}, start {start}, count {count}')

    # a part from each epoch that it touches
    parts = [np.empty(0, np.int64)]
    end = start + count
    while start < end:
        epoch, i = divmod(start, n)
        part = epoch_permutation(n, seed, epoch)[i:i + end - start]
        parts.append(part)
        start += len(part)
    return np.concatenate(parts)

# -----------------------------------------------------------------------------
# From the host to the device

def copy_to(batch, device):
    """ A batch whose tensors are on their way to `device`. """
    moved = {}
    for name, value in batch.items():
        if torch.is_tensor(value):
            value = value.pin_memory().to(device, non_blocking=True)
        moved[name] = value
    return moved


def prefetch(batches, device):
    """ Yields the batches (dicts) with their tensors on `device`. On CUDA a thread reads, pins and
    copies the next batch meanwhile. """
    device = torch.device(device)
    if device.type != 'cuda':
        yield from batches
        return
    batches = iter(batches)
    copies = torch.cuda.Stream(device)

    def fetch():
        batch = next(batches, None)
        with torch.cuda.stream(copies):
            return batch and copy_to(batch, device)

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(fetch)
        while (batch := ahead.result()) is not None:
            # wait before the next copy is queued, so that we wait for this batch only
            compute = torch.cuda.current_stream(device)
            compute.wait_stream(copies)

            # else this memory could be reused while a kernel still reads it
            for value in batch.values():
                if torch.is_tensor(value):
                    value.record_stream(compute)
            ahead = pool.submit(fetch)
            yield batch
