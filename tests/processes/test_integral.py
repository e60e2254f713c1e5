""" The baselines: each process against enumeration of its toy, its reductions, and AR with its
cache. """
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import diffusion
from data import PackedDataset
from diffusion import MaskedText, exact_nll
from launch import log, measured, run_each, train_each, weights
from model import Model, ModelConfig
from noise import Noise, rows_of, uniforms
from processes.clusters import cluster_table
from processes.gidd import GIDD
from processes.hdlm import HDLM
from runs.preflight import flops_of
from runs.stages import read_stages
from samplers import autoregressive, make_propose
from toys import Network, net_of, random_network, toy_run

V, L = 3, 2
TEXTS = torch.tensor(list(itertools.product(range(V), repeat=L)))        # (9, 2)
CLUSTERS = torch.tensor([0, 1, 0])


def name_of(process):
    noise = process.ratio if isinstance(process, GIDD) else process.xi
    return f'{type(process).__name__}-{process.gamma}-{noise}'


def text_law():
    p = torch.rand(len(TEXTS), generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 2
    return p / p.sum()


def gauss(n=200):
    """ Nodes and weights on (0, 1) after t = y^5 / (y^5 + (1-y)^5): integrands may be as steep as
    t^-3/4 at the ends. """
    y, w = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(n))
    y, w = (y + 1) / 2, w / 2
    total = y ** 5 + (1 - y) ** 5
    return (y ** 5 / total).clamp(max=1 - 1e-13), w * 5 * (y * (1 - y)) ** 4 / total ** 2


def law_of_seen(process, t, ids):
    """ q_t(z | x) at clock t: (V, ids), by what corrupt does with a fine grid of uniforms. """
    grid = (torch.arange(400_000, dtype=torch.float64) + .5) / 400_000
    seen, _ = process.corrupt(torch.arange(V)[:, None].expand(V, len(grid)), torch.full((V,), t),
                              grid.expand(V, -1))
    return torch.stack([torch.bincount(row, minlength=ids).double() / len(grid) for row in seen])


def exact_law(process, t):
    """ q_t(z | x) in closed form, (V, ids). """
    if isinstance(process, GIDD):
        a, b, m, _ = (float(x) for x in process.masses(torch.tensor(t, dtype=torch.float64)))
        return torch.cat((a * torch.eye(V, dtype=torch.float64) + b,
                          torch.full((V, 1), m, dtype=torch.float64)), 1)
    a, c, m, *_ = (float(x) for x in process.masses(torch.tensor(t, dtype=torch.float64)))
    return torch.cat((a * torch.eye(V, dtype=torch.float64),
                      torch.full((V, 1), m, dtype=torch.float64), c * cluster_law(process)), 1)


def cluster_law(process):
    """ Q(k | v), (V, C). """
    own = F.one_hot(process.cluster_of(torch.arange(V)), process.n_clusters).double()
    return process.xi * own + (1 - own) * ((1 - process.xi) / max(process.n_clusters - 1, 1))


def states(process):
    """ Everything that two positions may show, (n, L). """
    ids = V + 1 if isinstance(process, GIDD) else V + 1 + process.n_clusters
    return torch.tensor(list(itertools.product(range(ids), repeat=L)))


def exact_bound(process, denoiser, nodes=64):
    """ The bound in expectation, nats per text: over texts, over everything that may be seen, over
    t by quadrature. denoiser(t, z (n, L)) -> log p (n, L, V). """
    total, p, Z = 0.0, text_law(), states(process)
    n, X = len(Z), len(TEXTS)
    x, z = TEXTS[None].expand(n, X, L).flatten(), Z[:, None].expand(n, X, L).flatten()
    for t, w in zip(*gauss(nodes)):
        chance = p * exact_law(process, t.item())[TEXTS[None], Z[:, None]].prod(2)      # (n, X)
        log_p = denoiser(t, Z)[:, None].expand(n, X, L, V).flatten(0, 2)
        coefficients = process.coefficients(t[None], 'bound').expand(len(x), -1)
        value = process.integrand(log_p, x, z, coefficients)
        scored = (z >= V) if isinstance(process, HDLM) else torch.ones_like(z, dtype=torch.bool)
        chance = chance[..., None].expand(n, X, L).flatten()
        total += w.item() * torch.where((chance > 0) & scored, chance * value, 0).sum().item()
    return total


def posterior(process, leave_one_out=True):
    """ The denoiser log P(x^i | z without position i, t), or log P(x^i | z, t). """
    p = text_law()

    def denoiser(t, Z):
        q = exact_law(process, float(t))[TEXTS[None], Z[:, None]]        # (n, X, L)
        q = torch.stack([q[..., [j for j in range(L) if j != i]].prod(2) if leave_one_out
                         else q.prod(2) for i in range(L)], 2)
        onehot = F.one_hot(TEXTS, V).double()          # (X, L, V)
        mass = torch.einsum('x,nxl,xlv->nlv', p, q, onehot)
        return (mass / mass.sum(2, keepdim=True).clamp(min=1e-300)).clamp(min=1e-300).log()
    return denoiser


SOME = torch.randn(V + 4, V + 4, L, V, generator=torch.Generator().manual_seed(4),
                   dtype=torch.float64).log_softmax(3)


def some_denoiser(t, Z):
    """ A network that knows nothing of the data, and reads what it sees. """
    return SOME[Z[:, 0], Z[:, 1]]


ENTROPY = -(text_law() * text_law().log()).sum().item()
GIDDS = [GIDD(V, p_u, g) for p_u in (0, .1, .2, .5) for g in (.5, 1., 2.)]
HDLMS = [HDLM(V, CLUSTERS, g, xi) for g in (.5, 1., 2.) for xi in (1., .8)]


@pytest.mark.parametrize('process', GIDDS + HDLMS, ids=name_of)
def test_masses_sum_to_one_and_are_what_corrupt_draws(process):
    t = torch.cat((torch.linspace(0, 1, 1001, dtype=torch.float64),
                   torch.tensor([1e-3, 1 - 1e-3], dtype=torch.float64)))
    if isinstance(process, GIDD):
        for size in (50_257, V):
            a, b, m, _ = GIDD(size, process.ratio / (2 + process.ratio), process.gamma).masses(t)
            shares = torch.stack((a, size * b, m))
            assert torch.allclose(shares.sum(0), torch.ones_like(t)) and (shares >= 0).all()
    else:
        shares = torch.stack(process.masses(t)[:3])
    assert torch.allclose(shares.sum(0), torch.ones_like(t)) and (shares > -1e-12).all()
    # all MASK at t = 1
    assert torch.allclose(shares[:, 0], torch.tensor([1., 0, 0], dtype=torch.float64))
    assert shares[2, 1000] == 1
    for t in (.03, .5, .9):
        ids = V + 1 if isinstance(process, GIDD) else V + 1 + process.n_clusters
        assert torch.allclose(law_of_seen(process, t, ids), exact_law(process, t), atol=1e-4)


@pytest.mark.parametrize('process', [*GIDDS[3:], *HDLMS], ids=name_of)
def test_the_bound_meets_the_entropy_for_the_optimal_denoiser_and_lies_above_it_for_others(process):
    best = exact_bound(process, posterior(process), 200)
    assert abs(best - ENTROPY) < 5e-5, (best, ENTROPY)
    assert exact_bound(process, some_denoiser) > ENTROPY + .05
    # what its own position shows is weighed in by the formula already
    if isinstance(process, GIDD) or process.xi < 1:
        assert exact_bound(process, posterior(process, leave_one_out=False)) > ENTROPY + .02


def masked_reading(process):
    """ some_denoiser as the masked network that a reduction says it is. """
    def denoiser(t, Z):
        # a cluster is its token
        if isinstance(process, HDLM) and process.n_clusters == V:
            Z = torch.where(Z > V, Z - V - 1, Z)
        return some_denoiser(t, Z.clamp(max=V))                          # one cluster: it is MASK
    return denoiser


def plain_bound(denoiser):
    """ E_n [ L/n sum over the n masked ], enumerated. """
    p, total = text_law(), 0.0
    for bits in itertools.product([False, True], repeat=L):
        n, mask = sum(bits), torch.tensor(bits)
        for x, chance in zip(TEXTS, p) if n else ():
            nll = -denoiser(None, torch.where(mask, V, x)[None])[0].gather(1, x[:, None]).squeeze(1)
            total += (chance * (nll * mask).sum() / n / math.comb(L, n)).item()
    return total


def test_without_uniform_noise_and_with_trivial_clusters_the_bounds_are_the_one_of_masked_text():
    plain = plain_bound(some_denoiser)
    for process in (GIDD(V, 0., .5), GIDD(V, 0., 1.), GIDD(V, 0., 2.), HDLM(V, torch.arange(V), 1.),
                    HDLM(V, torch.arange(V), 2.),
                    HDLM(V, torch.zeros(V, dtype=torch.int64), 1.)):
        assert abs(exact_bound(process, masked_reading(process))
                   - plain) < 3e-4, (type(process), process.gamma)


def test_training_weights_are_dynamic_or_clipped():
    process, t = GIDD(V, .2, 2.), torch.tensor([.3, .3, .3], dtype=torch.float64)
    x, z = torch.tensor([0, 0, 0]), torch.tensor([V, 1, 0])
    log_p = torch.randn(3, V, dtype=torch.float64).log_softmax(1)
    value = [process.integrand(log_p, x, z, process.coefficients(t, kind))
             for kind in ('bound', 'dynamic', 'clip')]
    # at MASK, at another token, at its own
    unweighted = value[0] / process.weights(t, 'bound').diagonal()
    w, dynamic, clip = (one / unweighted for one in value)
    assert torch.allclose(dynamic, w * 2 * t * (1 - t) / 2)
    assert torch.allclose(dynamic[:2], torch.tensor([2., 1.]).double()) and 0 < dynamic[2] < 1
    assert torch.allclose(clip, w.clamp(max=2)) and w.max() > 2


@pytest.mark.parametrize('process', [GIDD(V, .2), GIDD(V, 0.), HDLM(V, CLUSTERS),
                                     HDLM(V, CLUSTERS, 2., .8)],
                         ids=name_of)
def test_a_draw_of_the_bound_has_its_enumerated_mean_and_the_loss_its_integrand(process):
    network = Network(lambda tokens, *clocks: some_denoiser(None, tokens))
    n = 20_000
    rows = torch.multinomial(text_law(), n, True, generator=torch.Generator().manual_seed(1))
    u = uniforms(0, 0, 'evaluation', 0, n, 1 + L)
    u[:, 0] = (u[0, 0] + torch.arange(n) / n) % 1
    draws = process.bound(network, TEXTS[rows], None, None, u)
    t = u[:, 0]
    expected = exact_bound(process, some_denoiser)
    assert abs(draws.mean() - expected) < 5 * draws.std() / math.sqrt(n), (draws.mean(), expected)
    given = torch.zeros(n, L, dtype=torch.bool)
    # what is given is neither noised nor scored
    given[:, 1] = True
    assert torch.equal(process.corrupt(TEXTS[rows], u[:, 0], u[:, 1:], given)[0][:, 1],
                       TEXTS[rows][:, 1])
    assert process.bound(network, TEXTS[rows], None, None, u, given).mean() < draws.mean()
    # the loss: hidden is the logits, the head the identity
    seen, scored = process.corrupt(TEXTS[rows], u[:, 0], u[:, 1:])
    at = scored.flatten().nonzero().squeeze(1)[:500]
    logits = torch.randn(500, V, generator=torch.Generator().manual_seed(2))
    x, z, t = TEXTS[rows].flatten()[at], seen.flatten()[at], t[at // L]
    weight = torch.rand(500, generator=torch.Generator().manual_seed(3))
    loss, value, _ = process.loss(logits, torch.eye(V), x, weight, z, process.loss_coefficients(t))
    exact = process.integrand(logits.double().log_softmax(1), x, z,
                              process.coefficients(t, process.loss_weight))
    assert torch.allclose(value.double(), exact, rtol=1e-3, atol=1e-4)
    assert torch.allclose(loss, (weight * value).sum())


@pytest.mark.parametrize('process', [GIDD(V, .2, loss_weight='bound'), HDLM(V, CLUSTERS, 1.2, .9)],
                         ids=['gidd', 'hdlm'])
def test_the_loss_in_pieces_is_the_loss_in_one(process, monkeypatch):
    rng = torch.Generator().manual_seed(4)
    x, t = torch.randint(V, (50, 1), generator=rng), torch.rand(50, generator=rng)
    u = torch.rand(50, 1, generator=rng, dtype=torch.float64)
    z, scored = process.corrupt(x, t, u)
    leaves = [torch.randn(shape, generator=rng).requires_grad_() for shape in ((50, 8), (V, 8))]
    found, rows, integrand = [], [], process.integrand

    def counted(log_p, *args):
        rows.append(len(log_p))
        return integrand(log_p, *args)
    monkeypatch.setattr(process, 'integrand', counted)
    # all at once; 7 positions at a time, with a head that is filled up
    for numbers, rows_of_head in ((2 ** 22, 1), (7 * V, 64)):
        monkeypatch.setattr(diffusion, 'LOGITS_CHUNK', numbers)
        monkeypatch.setitem(diffusion.ROWS_OF_HEAD, 'cpu', rows_of_head)
        loss, value, right = process.loss(*leaves, x[:, 0], scored[:, 0] / 50, z[:, 0],
                                          process.loss_coefficients(t))
        found.append([loss.detach(), value, right.float(), *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert found[0][0] > 0 and found[0][4].abs().sum() > 0
    # forward, and again in the backward pass
    assert rows == [50] * 2 + [7] * 7 + [1] + [1] + [7] * 7


@pytest.mark.parametrize('process', [
    GIDD(300, 0), GIDD(300, .1), GIDD(300, .2, .1), GIDD(300, .5, 10.),
    *(HDLM(300, torch.arange(300) % 9, g, xi) for g, xi in ((1., 1.), (.1, .9), (10., .9)))],
    ids=name_of)
def test_float32_on_the_device_gives_what_float64_gives(process):
    """ Bound and loss at clocks from 1e-12 to 1 - 1e-12, of networks that are unsure and sure: the
    mean to 1e-5, each position to 1e-4 and, before its weight, to 1e-5 nats. """
    n = 3000
    y, rng = (torch.arange(n, dtype=torch.float64) + .5) / n, torch.Generator().manual_seed(5)
    # as in IntegralProcess.bound
    t = (y ** 3 * (10 - 15 * y + 6 * y * y)).clamp(1e-12, 1 - 1e-12)
    slope, middle = 30 * (y * (1 - y)) ** 2, t.clamp(1e-6, 1 - 1e-6)
    x = torch.randint(300, (n, 1), generator=rng)
    u = torch.rand(n, 1, dtype=torch.float64, generator=rng)
    for certainty in (1, 10):
        logits = torch.randn(n, 300, generator=rng)
        logits = certainty * logits.scatter_add_(1, x, torch.full((n, 1), 2.))
        z, scored = process.corrupt(x, t, u)
        kinds = ((process.coefficients(t, 'bound'), process.coefficients(t, 'bound').float(),
                  slope),
                 (process.coefficients(middle, process.loss_weight), process.loss_coefficients(t),
                  torch.ones(n)))
        for exact, rounded, factor in kinds:
            wide, narrow = ((process.integrand(log_p, x[:, 0], z[:, 0], c) * factor)[scored[:, 0]]
                            for log_p, c in (
                (logits.double().log_softmax(1), exact), (logits.log_softmax(1), rounded)))
            assert rounded.dtype == torch.float32 and abs(narrow.mean() / wide.mean() - 1) < 1e-5
            weight = (exact[:, -2:].amax(1) * factor)[scored[:, 0]]
            assert ((narrow - wide).abs() <= 1e-4 * wide.abs() + 1e-5 * weight).all()


@pytest.mark.parametrize('process', [MaskedText(V), GIDD(V), HDLM(V, CLUSTERS)])
def test_where_nothing_is_scored_the_loss_is_0_and_has_a_gradient(process):
    """ A process whose rows have no scored position must still take part in the step of all. """
    head = torch.randn(V, 8, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    coefficients = process.loss_coefficients(torch.zeros(0))
    loss, *_ = process.loss(torch.zeros(0, 8), head, none, torch.zeros(0), none, coefficients)
    loss.backward()
    assert loss == 0 and not head.grad.any()


# ---- samplers

def chain_law(process, denoiser, steps):
    """ Law over TEXTS of the chain, position by position from p(z_s | z_t, x) = q(z_t | z_s)
    q_s(z_s | x) / q_t(z_t | x), with x ~ p(x) q_t(z_t | x): enumerated from the masses alone. """
    ids = V + 1 if isinstance(process, GIDD) else V + 1 + process.n_clusters
    law = {(V,) * L: 1.0}
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
    for t, s in zip(times, times[1:]):
        q_t, q_s = exact_law(process, t), exact_law(process, s)
        new = {}
        for z, chance in law.items():
            log_p = denoiser(t, torch.tensor([z]))[0]
            moves = [reverse(process, t, s, q_t, q_s, log_p[i].exp(), z[i]) for i in range(L)]
            for to in itertools.product(range(ids), repeat=L):
                probability = math.prod(moves[i][to[i]].item() for i in range(L))
                new[to] = new.get(to, 0) + chance * probability
        law = {z: chance for z, chance in new.items() if chance}
    return torch.tensor([law.get(tuple(x), 0.0) for x in TEXTS.tolist()], dtype=torch.float64)


def reverse(process, t, s, q_t, q_s, p, z):
    """ p(z_s | z_t = z), (ids,). Token v -> anything by the forward kernel from s to t. """
    if isinstance(process, GIDD):
        # q(z | z_s) of each z_s
        kernel = torch.zeros(q_t.shape[1], dtype=torch.float64)
        clocks = torch.tensor([t, s], dtype=torch.float64)
        (a_t, a_s), (b_t, b_s), (m_t, m_s), _ = [x.tolist() for x in process.masses(clocks)]
        a = a_t / a_s
        kernel += (m_t - a * m_s) if z == V else (b_t - a * b_s)
        kernel[z] += a
        joint = q_s * kernel                                             # (V, ids)
    else:
        # paths token -> cluster -> MASK, each x on its own
        joint = torch.zeros_like(q_s)
        still = (1 - t) / (1 - s)                                        # a cluster stays one
        for x in range(V):
            if z < V:
                joint[x, z] = (1 - t) ** process.gamma * (x == z)        # what is seen was a token
            elif z == V:
                joint[x, V] = q_s[x, V]
                joint[x, V + 1:] = q_s[x, V + 1:] * (1 - still)
                joint[x, x] = q_t[x, V] - joint[x].sum()                 # the rest was a token at s
            else:
                joint[x, z] = q_s[x, z] * still
                joint[x, x] = q_t[x, z] - joint[x, z]
    weight = p[:, None] * joint                                          # p(x) q(z_t, z_s | x)
    return weight.sum(0) / weight.sum()


def draw(process, denoiser, n, steps, seed=0, given=None, tokens=None, temperature=1.0, rows=None,
         **knobs):
    def denoise(tokens, t, positions, rows=None):
        return denoiser(t, tokens).flatten(0, 1)[positions].float()
    noise = Noise(seed, rows_of(n) if rows is None else rows)
    tokens = torch.full((n, L), V) if tokens is None else tokens
    given = torch.zeros(n, L, dtype=torch.bool) if given is None else given
    ancestral = process.samplers['ancestral'].function
    return ancestral(denoise, make_propose(temperature, 1.0), process, tokens, given, steps, noise,
                     **knobs)


@pytest.mark.parametrize('process', [GIDD(V, .2), GIDD(V, .5, 2.), GIDD(V, 0.), HDLM(V, CLUSTERS),
                                     HDLM(V, CLUSTERS, 2., .8), HDLM(V, CLUSTERS, .5)], ids=name_of)
def test_samplers_have_the_enumerated_law_of_their_chain_and_end_in_tokens(process):
    n, steps = 60_000, 4
    law = chain_law(process, some_denoiser, steps)
    assert math.isclose(law.sum(), 1, rel_tol=1e-9), 'the last step leaves nothing but tokens'
    found = draw(process, some_denoiser, n, steps)
    assert found.max() < V
    counts = torch.bincount(found[:, 0] * V + found[:, 1], minlength=V * V).double()
    z = (((counts - n * law) ** 2 / (n * law)).sum() - 8) / 4            # 8 degrees of freedom
    assert z < 10, (counts / n, law)                       # one seed in ten million lies above


@pytest.mark.parametrize('process', [GIDD(V, .5), HDLM(V, CLUSTERS, 1., .8)], ids=name_of)
def test_a_row_of_a_baseline_is_written_the_same_alone_and_beside_others(process):
    rows = rows_of(15, 2)
    tokens = torch.tensor([[V, V], [2, V]]).repeat(15, 1)
    for knobs in ({}, dict(self_correct=4)):
        def written(part):
            x = tokens[part]
            return draw(process, some_denoiser, len(x), 5, given=x != V, tokens=x, rows=rows[part],
                        **knobs)
        alone = [written(slice(i, i + 1)) for i in range(30)]
        assert torch.equal(written(slice(None)), torch.cat(alone))


def test_given_tokens_are_never_touched_by_baseline_samplers():
    tokens = torch.tensor([[2, V]]).repeat(200, 1)
    for process in (GIDD(V, .5), HDLM(V, CLUSTERS, 1., .8)):
        out = draw(process, some_denoiser, 200, 8, given=tokens != V, tokens=tokens)
        assert (out[:, 0] == 2).all() and (out < V).all()
    out = draw(GIDD(V, .5), some_denoiser, 200, 8, given=tokens != V, tokens=tokens, self_correct=5)
    assert (out[:, 0] == 2).all() and (out < V).all()


def test_self_correction_takes_what_the_network_prefers_and_stops():
    process, tokens = GIDD(V, .2), torch.tensor([[0, 2], [1, 2], [1, 1]])

    # wants (0, 2), whatever it sees
    def denoise(tokens, t, positions):
        return torch.tensor([[5., 0, 0], [0, 0, 5.]]).repeat(len(tokens), 1)[positions]
    noise = Noise(0, rows_of(3))
    free = torch.zeros(3, 2, dtype=torch.bool)
    rounds = [process.correct(denoise, tokens, free, n, noise) for n in (10, 2, 1)]
    assert rounds[0].tolist() == rounds[1].tolist() == [[0, 2]] * 3
    changed = (rounds[2] != tokens).sum(1)
    assert changed.tolist() == [0, 1, 1] and (rounds[2] != rounds[0]).sum(1).tolist() == [0, 0, 1]

    # a text that has once drawn no change is done, whatever the others draw
    def drawn_by_half(tokens, t, positions):
        return torch.tensor([[0., .01, -9], [9, 0, 0]]).repeat(len(tokens), 1)[positions]
    x, rows = torch.zeros(40, 2, dtype=torch.int64), rows_of(40)
    free = torch.zeros(40, 2, dtype=torch.bool)
    together = process.correct(drawn_by_half, x, free, 6, Noise(0, rows))
    alone = [process.correct(drawn_by_half, x[:1], free[:1], 6, Noise(0, rows[i:i + 1]))
             for i in range(40)]
    assert torch.equal(together, torch.cat(alone)) and 5 < (together[:, 0] == 1).sum() < 35

    # a draw of what is less likely is no reason to move
    def nearly_even(tokens, t, positions):
        return torch.tensor([[.04, 0, -9], [.04, 0, -9]]).repeat(len(tokens), 1)[positions]
    liked = torch.zeros(50, 2, dtype=torch.int64)
    assert torch.equal(process.correct(nearly_even, liked, torch.zeros(50, 2, dtype=torch.bool), 5,
                                       Noise(0, rows_of(50))), liked)


def test_what_is_known_beside_is_weighed_in_before_the_filter():
    logits = torch.tensor([[9., 8., 0., 0.]]).repeat(1000, 1)
    tilt = torch.tensor([[0., 0, .2, .8]]).repeat(1000, 1)
    u = torch.rand(1000, 2)
    for temperature, nucleus in ((1., 1.), (1., .9), (.05, 1.), (0., 1.)):
        found = make_propose(temperature, nucleus)(logits, u, tilt)
        assert (found >= 2).all(), (temperature, nucleus)
    found = make_propose(1., 1.)(logits, u, tilt)
    assert abs((found == 3).double().mean() - .8) < .07


# ---- autoregressive

def test_a_causal_text_is_scored_up_to_its_eos_and_reads_one_position_later():
    eos, pad = 18, 19
    tokens = torch.tensor([[4, 5, 6, eos, pad, pad], [7, 8, 9, 10, 11, eos]])
    model = random_network(streams=('text',), text_clock=False)
    assert model.shifted(tokens, 2).tolist() == [[20, 4, 5, 6, eos, pad], [20, 7, 8, 9, 10, 11]]
    logp = model(tokens, None, None, None, n_causal=2)[0].detach().log_softmax(2)
    by_hand = [-sum(logp[i, j, tokens[i, j]] for j in range(n)) for i, n in enumerate((4, 6))]
    assert torch.allclose(exact_nll(model, tokens, None, None),
                          torch.tensor(by_hand, dtype=torch.float64), atol=1e-4)


def test_only_the_end_of_a_text_can_be_written_from_left_to_right():
    tokens = torch.tensor([[1, 20, 3, 18]])
    run = toy_run(net_of(eos=18, pad=19))
    with pytest.raises(ValueError, match='at its end'):
        run.check_ends_in_gaps(tokens, tokens != 20)

    # an EOS that need not be the last id but one
    run = toy_run(net_of(eos=7, pad=19))
    tokens = torch.tensor([[1, 20, 7, 19]])
    run.check_ends_in_gaps(tokens, tokens != 20)


def test_what_is_known_behind_a_gap_stays_and_is_not_seen_when_the_gap_is_filled():
    read = []
    tokens = torch.tensor([[1, 20, 3, 20, 20, 20, 20, 20, 20, 5]])
    known = tokens != 20

    def denoise(tokens, t, positions):
        read.append(tokens[0].tolist())
        x = torch.tensor([4 if tokens.shape[1] < 5 else 7])              # then the EOS
        return F.one_hot(x, 20).float()
    out = autoregressive(denoise, make_propose(0, 1), MaskedText(20), tokens, known, 0,
                         Noise(0, rows_of(1)), ends=(7, 19))
    assert out.tolist() == [[1, 4, 3, 4, 7, 19, 19, 19, 19, 5]]
    assert read[:2] == [[20, 1], [20, 1, 4, 3]]


def test_writing_ends_at_the_eos_of_the_tokenizer_which_need_not_be_the_last_id_but_one():
    """ cl100k_base has 19 ids above its EOS, which are never written. """
    states = []
    blank = torch.full((2, 16), 20)

    def denoise(tokens, t, positions):
        x = torch.tensor([[3, 7, 5], [4, 6, 7]])[:, min(tokens.shape[1] - 1, 2)]
        return F.one_hot(x, 20).float()
    out = autoregressive(denoise, make_propose(0, 1), MaskedText(20), blank, blank < 0, 0,
                         Noise(0, rows_of(2)), lambda x, *_: states.append(x), ends=(7, 19))
    assert out.tolist() == [[3, 7] + [19] * 14, [4, 6, 7] + [19] * 13] and len(states) == 3


# ---- clusters

class Sentences:
    """ One of five subjects, one of five verbs, one of five places, EOS, as PackedDataset has it.
    """
    vocab_size, eos, pad, n_shards = 17, 15, 16, 1

    def __init__(self):
        draw = torch.randint(0, 5, (5000, 3), generator=torch.Generator().manual_seed(0))
        self.words = draw + torch.tensor([0, 5, 10])

    def __len__(self):
        return len(self.words)

    def rows(self, indices):
        words = self.words[torch.as_tensor(list(indices))]
        return F.pad(F.pad(words, (0, 1), value=self.eos), (0, 1), value=self.pad), None

    def shard(self, i):
        return SimpleNamespace(tokens=self.words.flatten().numpy(), offsets=np.arange(0, 15_001, 3),
                               check_ids=lambda tokens: None)


def test_words_that_keep_the_same_company_share_a_cluster():
    which = cluster_table('', Sentences(), 4).tolist()
    assert [len(set(which[i:i + 5])) for i in (0, 5, 10)] == [1, 1, 1]
    assert len(set(which)) == 4 and which[16] == which[15]

    # an EOS that is another id than the last but one
    data = Sentences()
    for data.eos in (2, 7, 12):
        which = cluster_table('', data, 4).tolist()
        assert which[16] == which[data.eos]


def test_clusters_come_from_a_run_and_anything_else_is_one_line(baselines, dataset, tmp_path):
    data = PackedDataset(dataset, 'train')
    V, ar = data.vocab_size, str(baselines / 'ar')
    assert cluster_table(ar, data, 7).unique().tolist() == list(range(7))
    for source, C, message in ((str(tmp_path / 'none'), 4, 'no run in'), (ar, V, 'expected 1 to')):
        with pytest.raises(ValueError, match=message):
            cluster_table(source, data, C)


def test_the_floating_point_operations_count_the_head_where_a_text_is_scored():
    """ Of a masked text a mean of M(t), of GIDD's all; six of a matrix, three products. """
    shares = [(MaskedText(50), 1 / 2), (MaskedText(50, 'cosine'), 2 / math.pi),
              (GIDD(50), 1), (HDLM(50, torch.arange(50) % 8, gamma=3.), 3 / 4)]
    with torch.device('meta'):
        sketch = Model(ModelConfig(vocab_size=50, seq_len=16, width=32, heads=2, depth=1,
                                   streams=('text',)))
    stage, = read_stages('unconditional', '', ('text',), 9, 16)
    least = flops_of(sketch, 64, stage, shares[0][0])
    for process, share in shares:
        found = flops_of(sketch, 64, stage, process) - least
        head = 6 * 64 * 16 * 50 * 32
        assert found / head == pytest.approx(share - 1 / 2, abs=.005), process


# ---- the scripts

OVERLAYS = {'ar': [], 'ar_prefix': [], 'mdlm': [], 'latent_dit': [], 'gidd': [],
            'hdlm': ['--clusters=8']}


@pytest.fixture(scope='module')
def baselines(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp('baselines')
    train_each(dataset, {folder / name: [f'config/{name}.py', *more]
                         for name, more in OVERLAYS.items()})
    return folder


def test_every_baseline_trains_and_samples_and_is_evaluated(baselines):
    runs = {name: baselines / name for name in OVERLAYS}
    small = ['--device=cpu', '--dtype=float32']
    commands = [['sample.py', f'--out_dir={runs[name]}', '--num_samples=2', '--steps=4', *small]
                for name in ('ar', 'mdlm', 'latent_dit', 'gidd', 'hdlm')]
    commands += [['sample.py', f'--out_dir={runs["ar_prefix"]}', '--text=a red dog runs',
                  '--guidance=1.5', '--rerank=2', *small],
                 ['sample.py', f'--out_dir={runs["ar"]}', '--mode=infill', '--text=a red [MASK:*]',
                  *small],
                 ['sample.py', f'--out_dir={runs["gidd"]}', '--mode=infill', '--text=a [MASK] dog',
                  '--steps=4', '--self_correct=3', *small]]
    commands += [['evaluate.py', f'--out_dir={runs["latent_dit"]}', '--n=6', '--draws=2', *small],
                 ['sample.py', f'--out_dir={runs["hdlm"]}', '--watch=true', '--nucleus=.5',
                  '--steps=4', *small]]
    commands += [['evaluate.py', f'--out_dir={runs[name]}', '--tasks=' + tasks, '--n=6',
                  '--draws=2', '--steps=4',
                  f'--scorer={runs["ar"]}', *small]
                 for name, tasks in (('ar', 'nelbo,text'), ('mdlm', 'nelbo,text'),
                                     ('hdlm', 'nelbo,text'),
                                     ('gidd', 'nelbo,text'))]
    for command, (code, out, err) in zip(commands, run_each(*commands)):
        assert code == 0, (command, err)
        assert '[MASK]' not in out.split('->')[-1], command
    found = measured(runs['gidd'])
    assert {'nelbo/nats_per_token', 'text/gen_ppl', 'text/ms'} <= set(found)


def test_a_run_begun_from_another_keeps_its_clusters(baselines, dataset, tmp_path):
    mixed = ['--streams=text,latent', '--mode=unconditional+l2t+t2l', '--cond_drop=.3']
    hdlm = ['config/hdlm.py', '--clusters=8']
    other = [f'--clusters_from={baselines}/ar', f'--init_from={baselines}/hdlm']
    train_each(dataset, {tmp_path / 'hdlm': [*hdlm, *mixed],
                         tmp_path / 'gidd': ['config/gidd.py', *mixed],
                         tmp_path / 'next': [*hdlm, *other]})
    for name in ('hdlm', 'gidd'):
        assert all(entry.get('skipped', 0) == 0 for entry in log(tmp_path / name).values())
    assert torch.equal(weights(tmp_path / 'next')['cluster_of'],
                       weights(baselines / 'hdlm')['cluster_of'])


def test_a_run_with_clusters_goes_on_bit_for_bit(dataset, tmp_path):
    args = ['config/hdlm.py', '--clusters=8', '--min_lr=1']
    train_each(dataset, {tmp_path / 'run': [*args, '--max_iters=4']})
    train_each(dataset, {tmp_path / name: [*args, '--max_iters=8'] for name in ('whole', 'run')})
    assert log(tmp_path / 'run') == log(tmp_path / 'whole')
    whole, run = (weights(tmp_path / name) for name in ('whole', 'run'))
    assert all(torch.equal(whole[key], run[key]) for key in whole)


def test_what_does_not_go_together_is_one_line(baselines, dataset, tmp_path):
    wrong = [(['config/ar.py', '--text_process=gidd'], 'causal rows'),
             (['--mode=l2t+causal', '--text_process=atat'], 'causal rows'),
             (['--masking=inverse'], 'text_process=atat'),
             (['config/hdlm.py', '--text_loss_weight=uniform'], 'bound alone'),
             (['--text_loss_weight=dynamic'], 'choose from'),
             (['config/gidd.py', '--text_schedule=cosine'], 'masked text'),
             (['config/gidd.py', '--streams=latent'], 'has no text')]
    commands = [['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/x', *args]
                for args, _ in wrong]
    sampling = [(['ar', '--sampler=confidence'], 'causal alone'),
                (['mdlm', '--self_correct=3'], 'takes back'),
                (['hdlm', '--block_size=4'], 'masked text')]
    commands += [['sample.py', f'--out_dir={baselines / name}', '--device=cpu', *args]
                 for (name, *args), _ in sampling]
    evaluating = [(['ar', '--tasks=infill'], 'no infill'),
                  (['latent_dit', '--tasks=unconditional'], 'no unconditional'),
                  (['mdlm', f'--scorer={baselines / "mdlm"}'], 'left to right')]
    commands += [['evaluate.py', f'--out_dir={baselines / name}', '--device=cpu', '--n=4', *args]
                 for (name, *args), _ in evaluating]
    messages = [message for _, message in wrong + sampling + evaluating]
    for command, message, (code, _, err) in zip(commands, messages, run_each(*commands)):
        assert code == 2 and message in err and err.strip().count('\n') == 0, (command, code, err)
