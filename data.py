"""
The packed dataset that prepare.py wrote: everything between the disk and a batch.

    data = PackedDataset('data/captions', 'train')
    rows = row_order(len(data), seed, start=step * batch_size, count=batch_size)
    tokens, latents = data.rows(rows)

A sample is a text and, unless the dataset is text only, the latent vectors of that very text:
    tokens   (B, L)     int64     the text, one EOS, then PAD up to L
    latents  (B, N, D)  float32   standardised per dimension; dead dimensions are 0

A split is stored in shards. A shard has the tokens of its texts in one row, the offsets where each
text begins, and the latents as float16. All of it is mapped into memory.

The order of rows is a pure function of (seed, epoch), computed row by row. So a resume replays
nothing, and the order does not depend on how many ranks share the rows.

A split of more than MANY_ROWS rows is large: its offsets are checked when a row is read, and
statistics (lengths, counts) are those of a sample of the rows.

Letters: B batch, L text tokens, N latent vectors, D latent dimensions, V token ids (EOS and PAD
included; MASK is id V), T tokens of a shard, n samples.
"""
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from diffusion import philox, uniforms
from runs.files import plain, read_array, read_arrays
from runs.manifest import check_file, read_meta

DEAD = 1e-3                    # a latent dimension is dead if its std is below DEAD * median std;
                               # MiniLM has three
CHECK_ALL_TOKENS = 2**27       # splits up to this many tokens are checked id by id when opened
                               # (well under a second)
MANY_ROWS = 2**24              # a split of more rows is large
STRETCHES = 256                # the sample of a large split: so many stretches,
STRETCH_ROWS = 4096            # each of so many neighbouring rows
ROUNDS = 8                     # of the Feistel network that shuffles a split


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
        """ raw (..., D): a tensor, or an array as an encoder may give it. """
        raw = torch.as_tensor(raw)
        mean, std, live = self.on_device(raw.device)
        return (raw.float() - mean) / std * live

    def destandardise(self, z):
        mean, std, live = self.on_device(z.device)
        return z.float() * live * std + mean

# -----------------------------------------------------------------------------
# What a dataset folder, or a run's data/, holds beside its shards

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

# -----------------------------------------------------------------------------
# A shard

class Shard:
    """ The memory maps of one shard: tokens (T,), offsets (n + 1,), latents (n, N, D) or None.
    longest: no text has more tokens. at_random: as in files.plain. """

    def __init__(self, folder, meta, entry, longest, at_random=False):
        self.folder = folder
        self.name = name = entry['name']
        self.files = files = entry['files']
        self.longest = longest
        n = entry['samples']

        # tokens, as many as meta.json says
        path = check_file(folder, f'{name}.tokens.bin', files, digest=False)
        dtype = np.dtype(meta['token_dtype']).newbyteorder('<')
        tokens = np.memmap(path, dtype, mode='r', shape=(entry['tokens'],))
        self.tokens = plain(tokens, at_random)

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
        self.longest = longest = [entry['longest'] for entry in entries]

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

# -----------------------------------------------------------------------------
# A split

class PackedDataset:
    """ One split of a dataset folder. Raises ValueError before any batch is read: file, found,
    expected, what to do.

    seq_len is L, for a text with EOS and PAD; None: max_tokens + 1. The longest text and its EOS
    must fit, unless crop=True: then rows() shows L tokens of a longer text, without EOS.
    """

    def __init__(self, folder, split, seq_len=None, crop=False):
        self.folder = folder = str(folder)
        self.split = split
        self.meta = meta = read_meta(folder)
        if split not in meta['splits']:
            raise ValueError(f'{folder}: no split {split!r}, it has {", ".join(meta["splits"])}')
        self.tokenizer = load_tokenizer(folder, meta)
        self.stats = load_stats(folder, meta)

        # the shards that hold samples
        entry = meta['splits'][split]
        filled = [shard for shard in entry['shards'] if shard['samples']]
        if not filled:
            raise ValueError(f'{folder}/meta.json: the shards of {split} hold 0 samples, '
                             'expected some')
        self.shards = Shards(folder, meta, filled, is_large=entry['samples'] > MANY_ROWS)

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
            possible position and the last; None: at the first.
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
        and in each part begins, at a random position, a stretch of STRETCH_ROWS rows. """
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

def mix(x):
    """ The finaliser of SplitMix64, uint64 to uint64: each bit of x moves half the bits. """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
    return x ^ (x >> np.uint64(31))


def keyed_permutation(positions, n, seed, epoch):
    """
    The rows, int64, at some positions (int64, in [0, n)) of a shuffled epoch over n rows. It needs
    no table: a row is computed from its position.

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

    rows = np.array(positions, np.uint64)
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
        part = keyed_permutation(np.arange(i, min(n, i + end - start)), n, seed, epoch)
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
