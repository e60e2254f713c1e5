"""
Random numbers that are functions of what they are for: (seed, step, purpose, row).

In training a resumed run draws the same noise without replaying anything, and processes that share
a batch draw together what one process would draw alone:
    u = uniforms(seed, step, 'mask', first, B, L)

In sampling text i of a seed is the same alone, among others, and in batches of any size:
    rows = rows_of(2, num_samples=3)         # (6, 2): three samples of each of two sources
    noise = Noise(seed, rows[part])          # of the rows of a batch
    noise.uniforms('unmask', L)              # (B, L); the next call gives other numbers
A source is a text, a latent, or a number where there is nothing to write from. Of one source there
may be several samples: its row says which of them it is.

Letters: n sources, B rows of a batch.
"""
import math
from collections import Counter

import numpy as np
import torch

# one key word for each, so that no two purposes share their numbers
PURPOSES = ('clocks', 'mask', 'latent', 'evaluation', 'evaluation clock', 'evaluation latent',
            'crop', 'unmask', 'token', 'null', 'start', 'solver', 'length', 'half', 'parts')


def philox(seed, step, purpose):
    """ The bit generator at the start of the stream of (seed, step, purpose), of the first sample.
    Philox turns a key and a 256-bit counter into numbers. The key is (seed, purpose). The step is
    the third word of the counter, and the sample the fourth: two of them overlap only after 2^128
    counts. """
    number = 1 + PURPOSES.index(purpose)
    key = np.array([seed % 2 ** 64, number], np.uint64)
    counter = np.array([0, 0, step, 0], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def uniforms(seed, step, purpose, first, rows, columns):
    """ Rows first .. first + rows of an endless table of U(0, 1): float64, (rows, columns). No
    number is exactly 0 or 1. Row i is the same however the rows are split. Use one number of
    columns per (seed, step, purpose): tables of two widths would share their numbers. """
    return uniforms_of(seed, step, purpose, [(first, rows, 0)], columns)


def uniforms_of(seed, step, purpose, stretches, columns):
    """ Such rows of several tables, one for each sample (rows_of, below), one below the other.
    stretches: [(first, rows, sample)]. """
    # one count of Philox yields four words of 64 bits, and each row starts at a new count. To set
    # the state of a generator takes a tenth of the time of making one
    counts_per_row = -(-columns // 4)
    generator = philox(seed, step, purpose)
    state = generator.state
    words = []
    for first, rows, sample in stretches:
        state['state']['counter'][:] = first * counts_per_row, 0, step, sample
        generator.state = state
        words.append(generator.random_raw(rows * counts_per_row * 4))
    words = np.concatenate(words).reshape(-1, counts_per_row * 4)[:, :columns]

    # the upper 52 bits, moved by half a unit to stay off 0 and 1
    bits = words >> np.uint64(12)
    return torch.from_numpy((bits + 0.5) * 2.0 ** -52)


def below_1(u, dtype):
    """ Uniform numbers in a dtype, as float32. None of them is rounded to 1. """
    return u.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)


def normals(seed, step, purpose, first, rows, *shape):
    """ The same for N(0, 1): float32, (rows, *shape). """
    u = uniforms(seed, step, purpose, first, rows, math.prod(shape))
    return torch.special.ndtri(u).float().view(rows, *shape)

# -----------------------------------------------------------------------------
# Sampling: each row draws its own numbers, whatever other rows are in its batch

def rows_of(n, num_samples=1):
    """ (n num_samples, 2) int64: of each row its source, and which of its samples it is. The
    samples of a source follow each other. ValueError where one of the two is no number of things.
    """
    for name, value in (('number of texts or latents', n), ('num_samples', num_samples)):
        is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_whole or value < 1:
            raise ValueError(f'{name}: {value!r}, expected a whole number, at least one')
    source = np.repeat(np.arange(n), num_samples)
    sample = np.tile(np.arange(num_samples), n)
    return np.stack([source, sample], 1)


def rows_of_parts(rows, n_parts, most):
    """ Row i becomes n_parts[i] rows, at most `most`: (sum of n_parts, 2). These parts are samples
    of their own. Part k draws the same numbers whatever n_parts is. """
    n_parts = np.asarray(n_parts)
    first = n_parts.cumsum() - n_parts
    part = np.arange(n_parts.sum()) - np.repeat(first, n_parts)
    source, sample = np.repeat(rows, n_parts, axis=0).T
    return np.stack([source, sample * most + part], 1)


class Noise:
    """ The random numbers of the rows of a batch. seed: the knob. rows (B, 2): as rows_of gives
    them. part: which part, of a text that is written in parts (samplers.in_blocks). Two parts share
    no numbers, however many calls each takes. """

    def __init__(self, seed, rows, part=0):
        self.seed = seed
        self.rows = np.asarray(rows)
        self.first_step = part << 32
        self.n_calls = Counter()                           # of each purpose

        # a table of numbers has a row for each source, and there is one for each sample. So the
        # rows come in stretches: of one sample, of sources that follow each other
        source, sample = self.rows.T
        self.order = np.lexsort((source, sample))
        source, sample = source[self.order], sample[self.order]
        begins_anew = np.diff(source, prepend=-2) != 1
        begins_anew |= np.diff(sample, prepend=-1) != 0
        first = np.flatnonzero(begins_anew)
        n_rows = np.diff(first, append=len(source))
        stretches = np.stack([source[first], n_rows, sample[first]], 1)
        self.stretches = stretches.tolist()

    def of_part(self, part):
        """ Other numbers for the same rows. """
        return Noise(self.seed, self.rows, part)

    def uniforms(self, purpose, columns, dtype=torch.float64):
        """ U(0, 1) on the host, (B, columns), below 1 also in float32. Use one number of columns
        for a purpose. """
        step = self.first_step + self.n_calls[purpose]
        self.n_calls[purpose] += 1
        found = torch.empty(len(self.rows), columns, dtype=torch.float64)
        found[self.order] = uniforms_of(self.seed, step, purpose, self.stretches, columns)
        return below_1(found, dtype)

    def normals(self, purpose, *shape):
        """ N(0, 1), float32 on the host, (B, *shape). """
        u = self.uniforms(purpose, int(np.prod(shape)))
        return torch.special.ndtri(u).float().view(-1, *shape)
