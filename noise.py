"""
Random numbers that are functions of what they are for: (seed, step, purpose, row).

A resumed run draws the same noise without replaying anything. Processes that share a batch draw
together what one process would draw alone.
"""
import math

import numpy as np
import torch

# one key word for each, so that no two purposes share their numbers
PURPOSES = ('clocks', 'mask', 'latent', 'evaluation', 'evaluation clock', 'evaluation latent',
            'crop')


def philox(seed, step, purpose):
    """ The bit generator at the start of the stream of (seed, step, purpose).
    Philox turns a key and a 256-bit counter into numbers. The key is (seed, purpose), and the step
    is the third word of the counter: two steps overlap only after 2^128 counts. """
    key = np.array([seed % 2 ** 64, 1 + PURPOSES.index(purpose)], np.uint64)
    counter = np.array([0, 0, step, 0], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def uniforms(seed, step, purpose, first, rows, columns):
    """ Rows first .. first + rows of an endless table of U(0, 1): float64, (rows, columns). No
    number is exactly 0 or 1. Row i is the same however the rows are split. Use one number of
    columns per (seed, step, purpose): tables of two widths would share their numbers. """
    # one count of Philox yields four words of 64 bits, and each row starts at a new count
    counts_per_row = -(-columns // 4)
    generator = philox(seed, step, purpose).advance(first * counts_per_row)
    words = generator.random_raw(rows * counts_per_row * 4)
    words = words.reshape(rows, counts_per_row * 4)[:, :columns]

    # the upper 52 bits, moved by half a unit to stay off 0 and 1
    bits = words >> np.uint64(12)
    return torch.from_numpy((bits + 0.5) * 2.0 ** -52)


def normals(seed, step, purpose, first, rows, *shape):
    """ The same for N(0, 1): float32, (rows, *shape). """
    u = uniforms(seed, step, purpose, first, rows, math.prod(shape))
    return torch.special.ndtri(u).float().view(rows, *shape)
