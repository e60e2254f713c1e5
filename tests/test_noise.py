""" Random numbers of their own for each row and each purpose. """
import math

import numpy as np
import torch

from noise import Noise, normals, rows_of, uniforms


def test_uniforms_of_a_row_are_the_same_whatever_the_split():
    whole = uniforms(3, 7, 'mask', 0, 12, 5)
    assert torch.equal(whole, torch.cat([uniforms(3, 7, 'mask', i, 4, 5) for i in (0, 4, 8)]))
    for other in (uniforms(4, 7, 'mask', 0, 12, 5), uniforms(3, 8, 'mask', 0, 12, 5),
                  uniforms(3, 7, 'latent', 0, 12, 5)):
        assert not torch.isclose(whole, other).any()
    assert torch.equal(normals(3, 7, 'latent', 0, 6, 2, 3)[4:], normals(3, 7, 'latent', 4, 2, 2, 3))


def test_samples_have_numbers_of_their_own_and_one_generator_gives_all(monkeypatch):
    """ To make a generator for each row takes longer than a call of a small network on a GPU. """
    rows = rows_of(50, 3)[torch.randperm(150, generator=torch.Generator().manual_seed(0))]
    apart = [Noise(3, rows[i:i + 1]).uniforms('token', 5) for i in range(len(rows))]
    made = []
    make = np.random.Philox
    monkeypatch.setattr(np.random, 'Philox', lambda **kw: made.append(kw) or make(**kw))
    together = Noise(3, rows).uniforms('token', 5)
    assert len(made) == 1 and torch.equal(together, torch.cat(apart))
    assert len(together.unique()) == together.numel()
    first = together[rows[:, 1] == 0][rows[rows[:, 1] == 0, 0].argsort()]
    assert torch.equal(first, uniforms(3, 0, 'token', 0, 50, 5))


def test_uniforms_and_normals_have_the_right_law():
    u = uniforms(0, 0, 'mask', 0, 1000, 1000)
    assert 0 < u.min() and u.max() < 1
    counts = torch.histc(u, 100, 0, 1)
    assert ((counts - 1e4) ** 2 / 1e4).sum() < 99 + 6 * math.sqrt(2 * 99)
    z = normals(0, 1, 'latent', 0, 1000, 10, 100).double()
    assert z.mean().abs() < 5e-3 and (z.var() - 1).abs() < 7e-3
    assert ((z ** 4).mean() - 3).abs() < .05
