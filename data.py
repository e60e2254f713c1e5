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
files and checks them.

The order of rows is a pure function of (seed, epoch). So a resume replays nothing, and the order
does not depend on how many ranks share the rows.

A split of more than MANY_ROWS rows is large. What takes time or memory for each row is then done
otherwise: the order is computed, not stored; offsets are checked when a row is read; statistics
(lengths, counts) are those of a sample of the rows.

Letters: B batch, L text tokens, N latent vectors, D latent dimensions, V token ids (EOS and PAD
included; MASK is id V), T tokens of a shard, n samples.
"""
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from diffusion import philox, uniforms

DEAD = 1e-3                    # a latent dimension is dead if its std is below DEAD * median std;
                               # MiniLM has three
CHECK_ALL_TOKENS = 2**27       # splits up to this many tokens are checked id by id when opened
                               # (well under a second)
MANY_ROWS = 2**24              # a split of more rows is large
STRETCHES = 256                # the sample of a large split: so many stretches,
STRETCH_ROWS = 4096            # each of so many neighbouring rows
ROUNDS = 8                     # of the Feistel network that shuffles a large split


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
        opened = read_split(self.folder, split, MANY_ROWS)
        self.meta, self.tokenizer, self.stats, self.shards = opened

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
        self.first = np.cumsum([0] + self.shards.n_samples)
        if sum(self.shards.n_tokens) <= CHECK_ALL_TOKENS:
            for shard in self.shards:
                self.check_ids(shard.tokens)

        # the length of a row
        self.longest = longest = max(self.shards.longest)                # tokens
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
            begin, end = shard.edges(rows[:, None])                      # (b, 1) each
            n_tokens = end - begin
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

    def stretches(self):
        """ (shard, its rows from, to) over which statistics of the split are taken: all rows. Of a
        large split it is a sample that never changes. The split is cut into STRETCHES equal parts,
        and in each part begins, at a random place, a stretch of STRETCH_ROWS rows. """
        if not self.shards.is_large:
            for shard in self.shards:
                yield shard, 0, len(shard.offsets) - 1
            return
        u = uniforms(0, 0, 'sample of rows', 0, STRETCHES, 1)[:, 0].numpy()
        for row in ((np.arange(STRETCHES) + u) * (len(self) / STRETCHES)).astype(np.int64):
            (shard, _, (begin,)), = self.by_shard([min(row, len(self) - 1)])
            yield shard, begin, min(begin + STRETCH_ROWS, len(shard.offsets) - 1)

    def counts(self):
        """ How often each id occurs in the split, (V,) int64: an EOS after every text, no PAD. Of a
        large split: in a sample of it. """
        counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        for shard, begin, end in self.stretches():
            tokens = shard.tokens[shard.offsets[begin]:shard.offsets[end]]
            self.check_ids(tokens)
            for i in range(0, len(tokens), 2 ** 24):
                counts += np.bincount(tokens[i:i + 2 ** 24], minlength=len(counts))
            counts[self.tokenizer.eos] += end - begin
        return torch.from_numpy(counts)

    def lengths(self):
        """ Tokens of every text of the split, (n,) int64. Of a large split: of a sample of its
        texts. """
        lengths = []
        for shard, begin, end in self.stretches():
            begins, ends = shard.edges(slice(begin, end))
            lengths.append(ends - begins)
        return np.concatenate(lengths)

    def text(self, i):
        (shard, _, rows), = self.by_shard([i])
        (begin,), (end,) = shard.edges(rows)
        return self.tokenizer.decode(shard.tokens[begin:end])

# -----------------------------------------------------------------------------
# The order of rows, a pure function of (seed, epoch)

@lru_cache(maxsize=2)                                                  # a batch may span two epochs
def epoch_permutation(n, seed, epoch):
    return np.random.Generator(philox(seed, epoch, 'row order')).permutation(n)


def mix(x):
    """ The finaliser of SplitMix64, uint64 to uint64: each bit of x moves half the bits. """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
    return x ^ (x >> np.uint64(31))


def keyed_permutation(places, n, seed, epoch):
    """
    The rows, int64, at some places (int64, in [0, n)) of a shuffled epoch over n rows. It needs no
    table: a row is computed from its place.

    A Feistel network is a one-to-one map of 2b bits, whatever f is:
        (left, right) <- (right, left xor f(right + key_r))        b bits each; r = 1..ROUNDS
    Here 4^b is the least that is not below n, and f is the last b bits of `mix`. A result that is n
    or more goes through the network again, until it is below n ("cycle walking"). That is one to
    one over [0, n), and takes fewer than 4 turns on average, since 4^b < 4 n.
    Luby and Rackoff 1988; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002
    """
    b = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    last_b = (np.uint64(1) << b) - np.uint64(1)
    keys = philox(seed, epoch, 'row order').random_raw(ROUNDS)           # uint64

    rows = np.array(places, np.uint64)
    walking = np.arange(len(rows))                                       # those not yet below n
    while len(walking):
        left, right = rows[walking] >> b, rows[walking] & last_b
        for key in keys:
            left, right = right, left ^ (mix(right + key) & last_b)
        rows[walking] = (left << b) | right
        walking = walking[rows[walking] >= np.uint64(n)]
    return rows.astype(np.int64)


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
        places = slice(i, min(n, i + end - start))
        if n > MANY_ROWS:
            part = keyed_permutation(np.arange(places.start, places.stop), n, seed, epoch)
        else:
            part = epoch_permutation(n, seed, epoch)[places]
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
