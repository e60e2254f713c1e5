"""
The packed dataset that prepare.py wrote: everything between the disk and the clean rows of a step.

    data = PackedDataset('data/captions', 'train')
    tokens, latents = data.rows(rows)
    for batch in Loader(data, ...).batches(...):           # micro-batch after micro-batch

A sample is a text and, unless the dataset is text only, the latent vectors of that very text:
    tokens   (B, L)     int64     the text, one EOS, then PAD up to L
    latents  (B, N, D)  float32   standardised per dimension; dead dimensions are 0

A split is stored in shards. A shard has the tokens of its texts in one row, the offsets where each
text begins, and the latents as float16. All of it is mapped into memory. So a split of any size is
opened fast: offsets, and token ids beyond the first shard, are checked when a row is read, and
digests where they are asked for (check_files).

What a dataset says of itself stands in its manifest, meta.json, and a run keeps a copy of it in
data/. prepare.py writes meta.json last. So where it exists, the dataset is complete. It holds the
size and the SHA-256 of every file, and a digest of itself; what it says is then believed.

Letters: B batch, L text tokens, N latent vectors, D latent dimensions, V token ids (EOS and PAD
included; MASK is id V), T tokens of a shard, n samples.
"""
import os
import resource
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from base.console import warn
from base.files import check, plain, read_array, read_arrays, read_sealed
from configurator import here_or_beside, seen_from
from noise import uniforms

FORMAT = 2                     # of meta.json; a reader refuses any other
HOW_TO_MEND = ('run prepare.py again, it redoes what is broken; a run folder takes a copy from its '
               'dataset')
DEAD = 1e-3       # a dimension is dead if its std is below DEAD * median std; MiniLM has three


# -----------------------------------------------------------------------------
# The manifest

def dataset_folder(name):
    """ A folder under data/ by name, or a path; if it is not here, next to the scripts. """
    is_path = os.path.sep in name or name in ('.', '..')
    return here_or_beside(name if is_path else os.path.join('data', name))


def check_file(folder, name, files, digest=True):
    """ The path of a file that is as `files` says, {name: {bytes, sha256}}; else ValueError.
    digest=False: only its size is compared. """
    path = os.path.join(folder, name)
    try:
        check(path, files[name], digest)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f'{error}; {HOW_TO_MEND}') from None
    return path


def read_meta(folder):
    """ meta.json of a dataset folder. """
    path = os.path.join(folder, 'meta.json')
    if not os.path.isfile(path):
        raise ValueError(f'no dataset in {folder}{seen_from(folder)} (no meta.json): make it with '
                         '`python prepare.py` and the config of the training (with --input and '
                         '--out for your own texts), or name another --dataset')
    try:
        meta = read_sealed(path)
        if meta['format'] != FORMAT:
            raise ValueError(f'{path}: format {meta["format"]!r}, this code reads {FORMAT}')
    except ValueError as error:
        raise ValueError(f'{error}; delete the dataset and run prepare.py again; a run folder '
                         'takes a copy from its dataset') from None
    return meta

# -----------------------------------------------------------------------------
# Latent statistics: the networks see latents of unit variance, whatever the encoder's own scale

class LatentStats:
    """ z = live * (raw - mean) / std and back, per dimension. A dead dimension has live = 0: the
    network sees 0 there, and the way back gives its mean. """

    def __init__(self, mean, std):
        std = torch.as_tensor(std, dtype=torch.float32)
        is_live = (std > 0) & (std >= DEAD * std.median())
        self.mean = torch.as_tensor(mean, dtype=torch.float32)           # (D,)
        self.std = torch.where(is_live, std, 1.0)                        # (D,), 1 where dead
        self.live = is_live.float()                                      # (D,), 0 where dead

    def standardise(self, raw):
        """ raw (..., D) on the host: a tensor, or an array as an encoder may give it. """
        return (torch.as_tensor(raw).float() - self.mean) / self.std * self.live

    def destandardise(self, z):
        return z.float() * self.live * self.std + self.mean


def load_stats(folder, meta=None):
    """ LatentStats of a dataset folder, or of a run's data/; None if it is text only. """
    meta = meta or read_meta(folder)
    if meta['latent_shape'] is None:
        return None
    return LatentStats(**read_arrays(check_file(folder, 'latent_stats.npz', meta['files'])))

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
        begin = self.offsets[:-1][rows]
        end = self.offsets[1:][rows]
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
        self.crop = crop
        self.cropped = longest > self.seq_len
        if not crop and self.seq_len < longest + 1:
            raise ValueError(f'seq_len {self.seq_len} is too short for {folder}: its longest '
                             f'{split} text has {longest} tokens and an EOS; use seq_len '
                             f'{longest + 1} or more, or prepare with a smaller max_tokens')

    def __len__(self):
        return int(self.first[-1])

    def check_files(self, entries=None, digest=True):
        """ ValueError where a file of these shards (None: all) does not have the size that its
        entry notes, or the digest. A digest takes about a second for 1 GB. A file that was moved
        away since the split was opened is still mapped, and whole: it is passed over, with a
        warning where digests are asked for. """
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

# -----------------------------------------------------------------------------
# What a split is like

def lengths(data):
    """ Tokens of every text, (n,) int64. """
    edges = [data.shard(i).edges(slice(None)) for i in range(data.n_shards)]
    return np.concatenate([end - begin for begin, end in edges])


def counts(data):
    """ How often each id occurs, (V,) int64: an EOS after every text, no PAD. """
    found = np.zeros(data.vocab_size, np.int64)
    for shard in map(data.shard, range(data.n_shards)):
        shard.check_ids(shard.tokens)
        for part in np.array_split(shard.tokens, 1 + len(shard.tokens) // 2**24):
            found += np.bincount(part, minlength=len(found))         # casts to int64
        found[data.eos] += len(shard.offsets) - 1
    return torch.from_numpy(found)

# -----------------------------------------------------------------------------
# The rows of a step: pure functions of (seed, step)

class Rows(NamedTuple):
    """ Clean rows of a dataset, a micro-batch of a training. """
    tokens: torch.Tensor       # (B, L) int64
    latents: torch.Tensor      # (B, N, D) float32; None of text only
    is_cut: bool               # L is shorter than the dataset's: texts may have lost their ends
    step: int
    first: int                 # where its first row stands in the global batch


@lru_cache(1)
def order_of_epoch(n, seed, epoch):
    """ The rows of a shuffled epoch, (n,) int64: 8 bytes a row, kept until the next one. """
    return np.random.Generator(np.random.Philox([seed, epoch])).permutation(n)


def row_order(n, seed, start, count):
    """ Rows start..start+count-1 of an endless sequence of shuffled epochs over n rows, int64. """
    epochs, rows = np.divmod(np.arange(start, start + count), n)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = order_of_epoch(n, seed, epoch)[rows[here]]
    return rows


@dataclass
class Loader:
    """ Makes the micro-batches of one process, the one that has the number `rank`. In a step each
    of `world` processes reads grad_accum micro-batches of micro_batch rows. Together these rows are
    the global batch: micro-batch 0 of all ranks, then micro-batch 1 of all ranks, ... """
    data: PackedDataset
    seed: int
    micro_batch: int
    grad_accum: int = 1
    rank: int = 0
    world: int = 1

    def row_numbers(self, step, micro, rank):
        """ Of a rank's micro-batch: where in the global batch it begins, and which rows of the
        dataset it has, (micro_batch,). """
        B = self.micro_batch
        first = (micro * self.world + rank) * B
        rows_a_step = B * self.grad_accum * self.world
        return first, row_order(len(self.data), self.seed, step * rows_a_step + first, B)

    def clean_rows(self, step, micro, L):
        """ The Rows of this process's micro-batch, with texts cut to L tokens. """
        first, chosen = self.row_numbers(step, micro, self.rank)
        crop = None
        if self.data.crop:
            crop = uniforms(self.seed, step, 'crop', first, len(chosen), 1)[:, 0]
        tokens, latents = self.data.rows(chosen, crop, L)
        return Rows(tokens, latents, L < self.data.seq_len, step, first)

    def batches(self, noising, stages, start, device):
        """ Yields a diffusion.Batch for each micro-batch from step `start` on, on the device: what
        `noising` (diffusion.Noising) makes of its clean rows. On a CPU it is made when it is asked
        for. On a GPU threads make the next four while this step runs, and copy them. """
        def make(stage, step, micro):
            rows = self.clean_rows(step, micro, stage.seq_len)
            return noising(rows, stage.shares, self.data).to(device)

        def calls():
            for stage in stages:
                for step in range(max(start, stage.first), stage.end):
                    for micro in range(self.grad_accum):
                        yield stage, step, micro

        if device == 'cpu':
            for call in calls():
                yield make(*call)
            return

        # one thread of torch each, not one for every core; threads that begin later have one, too
        with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            ahead = deque()
            for call in calls():
                ahead.append(pool.submit(make, *call))
                if len(ahead) > 4:
                    yield ahead.popleft().result()
            for batch in ahead:
                yield batch.result()
