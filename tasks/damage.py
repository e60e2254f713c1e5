"""
What is done to embeddings before a text is written from them: the usual defences of a database of
embeddings, and wrong bits of a fingerprint.

    raw = damaged(run, raw, 'noise:.01', seed)

    noise:S     z + S e,  e ~ N(0, 1), for every number           arXiv:2310.06816, section 6
    dims:S      the first share S of the dimensions is kept, the others become their mean
    bits:N      a number becomes one of 2^N values, which a normal law of its dimension's mean and
                deviation would make equally frequent; 1: is it above the mean?
    flips:S     of bits: ones are lost with probability S, and as many zeros are won

Mean and deviation are those of the run's training data. An attacker has these, too.
Letters: n texts, N latent vectors, D latent dimensions.
"""
import re

import numpy as np
import torch

SHARE = dict(noise=100, dims=1, flips=1)                   # {name: the largest S}


def read_damage(damage):
    """ ('noise', .01) of 'noise:.01'; ('', 0) of ''. ValueError for anything else. """
    if not damage:
        return '', 0
    name, _, size = damage.partition(':')
    is_number = re.fullmatch(r'\d+|\d*\.\d+', size)
    if name == 'bits' and size.isdecimal() and 1 <= int(size) <= 16:
        return name, int(size)
    if name in SHARE and is_number and float(size) <= SHARE[name]:
        return name, float(size)
    raise ValueError(f'damage={damage!r}: expected noise:.01, dims:.5, bits:8, flips:.1, or the '
                     'like (tasks/damage.py)')


def damaged(run, raw, damage, seed):
    """ Raw latents (n, N, D) with a damage; '': as they are. ValueError for flips of what is no
    bit. """
    # random numbers of its own: the samplers' stay what they are without a damage
    name, size = read_damage(damage)
    rng = np.random.Generator(np.random.Philox(seed))
    if name == 'noise':
        e = rng.standard_normal(raw.shape, dtype=np.float32)
        return raw + size * torch.from_numpy(e)
    if name == 'flips':
        if not ((raw == 0) | (raw == 1)).all():
            raise ValueError(f'damage={damage!r}: these embeddings are no bits, 0 or 1: choose '
                             'noise, dims or bits (tasks/damage.py)')
        return with_wrong_bits(raw, size, rng)
    if name == 'dims':
        # the mean says nothing, and is what a reader of fewer numbers would guess
        is_kept = torch.arange(raw.shape[-1]) < round(size * raw.shape[-1])
        return torch.where(is_kept, raw, run.stats.mean)
    if name == 'bits':
        # the normal law gives each number its quantile; a value is the middle of its share of them
        z = run.stats.standardise(raw)                     # 0 where a dimension is dead
        n_values = 2 ** size
        value = (torch.special.ndtr(z) * n_values).floor().clamp(max=n_values - 1)
        return run.stats.destandardise(torch.special.ndtri((value + .5) / n_values))
    return raw


def with_wrong_bits(raw, share, rng):
    """ Fingerprints (n, 1, D): ones are lost with probability `share`, as many zeros are won. """
    bits = raw.numpy() > 0
    lost = bits & (rng.random(bits.shape) < share)

    # as many of the zeros are won: those with the smallest random numbers (a one has 2, and is
    # never among them)
    order = np.where(bits, 2, rng.random(bits.shape))
    won = order.argsort(2).argsort(2) < lost.sum(2, keepdims=True)
    return torch.from_numpy((bits & ~lost | won).astype(np.float32))
