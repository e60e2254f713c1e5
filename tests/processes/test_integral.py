""" GIDD and HDLM against enumeration of their toys and against their reductions. """
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import diffusion
from diffusion import MaskedText
from noise import Noise, rows_of, uniforms
from processes.gidd import GIDD
from processes.hdlm import HDLM
from samplers import make_propose
from toys import Network

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


def law_of_seen(process, t):
    """ q_t(z | x) at clock t: (V, ids), by what corrupt does with a fine grid of uniforms. """
    n = 400_000
    grid = (torch.arange(n, dtype=torch.float64) + .5) / n
    tokens = torch.arange(V)[:, None].expand(V, n)
    seen, _ = process.corrupt(tokens, torch.full((V,), t), grid.expand(V, n))
    counts = [torch.bincount(row, minlength=n_ids(process)) for row in seen]
    return torch.stack(counts).double() / n


def exact_law(process, t):
    """ q_t(z | x) in closed form, (V, ids). """
    a, b, m = map(float, process.masses(torch.tensor(t, dtype=torch.float64))[:3])
    stays, is_mask = a * torch.eye(V, dtype=torch.float64), torch.full((V, 1), m).double()
    if isinstance(process, GIDD):
        return torch.cat((stays + b, is_mask), 1)
    return torch.cat((stays, is_mask, b * cluster_law(process)), 1)


def cluster_law(process):
    """ Q(k | v), (V, C). """
    own = F.one_hot(process.cluster_of(torch.arange(V)), process.n_clusters).double()
    return process.xi * own + (1 - own) * ((1 - process.xi) / max(process.n_clusters - 1, 1))


def n_ids(process):
    """ How many ids a position may show: tokens, MASK and clusters. """
    return V + 1 if isinstance(process, GIDD) else V + 1 + process.n_clusters


def exact_bound(process, denoiser, nodes=64):
    """ The bound in expectation, nats per text: over texts, over everything that may be seen, over
    t by quadrature. denoiser(t, z (n, L)) -> log p (n, L, V). """
    total, p = 0.0, text_law()
    Z = torch.tensor(list(itertools.product(range(n_ids(process)), repeat=L)))
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
        assert torch.allclose(law_of_seen(process, t), exact_law(process, t), atol=1e-4)


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


FOUR = [GIDD(V, .2), GIDD(V, 0.), HDLM(V, CLUSTERS), HDLM(V, CLUSTERS, 2., .8)]


def texts_and_uniforms(n):
    """ n texts of the law, and stratified clocks in u[:, 0] with numbers for each position. """
    rows = torch.multinomial(text_law(), n, True, generator=torch.Generator().manual_seed(1))
    u = uniforms(0, 0, 'evaluation', 0, n, 1 + L)
    u[:, 0] = (u[0, 0] + torch.arange(n) / n) % 1
    return TEXTS[rows], u


@pytest.mark.parametrize('process', FOUR, ids=name_of)
def test_a_draw_of_the_bound_has_its_enumerated_mean_and_what_is_given_is_not_scored(process):
    network = Network(lambda tokens, *clocks: some_denoiser(None, tokens))
    texts, u = texts_and_uniforms(20_000)
    draws = process.bound(network, texts, None, None, u)
    expected = exact_bound(process, some_denoiser)
    error = draws.std() / math.sqrt(len(u))
    assert abs(draws.mean() - expected) < 5 * error, (draws.mean(), expected)
    given = torch.zeros_like(texts, dtype=torch.bool)
    given[:, 1] = True
    seen, _ = process.corrupt(texts, u[:, 0], u[:, 1:], given)
    assert torch.equal(seen[:, 1], texts[:, 1])
    assert process.bound(network, texts, None, None, u, given).mean() < draws.mean()


@pytest.mark.parametrize('process', FOUR, ids=name_of)
def test_the_loss_is_the_weighted_integrand(process):
    """ hidden is the logits, the head the identity. """
    texts, u = texts_and_uniforms(1000)
    rng = torch.Generator().manual_seed(2)
    seen, scored = process.corrupt(texts, u[:, 0], u[:, 1:])
    at = scored.flatten().nonzero().squeeze(1)[:500]
    x, z, t = texts.flatten()[at], seen.flatten()[at], u[at // L, 0]
    logits, weight = torch.randn(len(at), V, generator=rng), torch.rand(len(at), generator=rng)
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
    n, rng = 3000, torch.Generator().manual_seed(5)
    y = (torch.arange(n, dtype=torch.float64) + .5) / n
    # as in IntegralProcess.bound
    t = (y ** 3 * (10 - 15 * y + 6 * y * y)).clamp(1e-12, 1 - 1e-12)
    slope = 30 * (y * (1 - y)) ** 2
    x = torch.randint(300, (n, 1), generator=rng)
    z, scored = process.corrupt(x, t, torch.rand(n, 1, dtype=torch.float64, generator=rng))
    of_bound = process.coefficients(t, 'bound')
    of_loss = process.coefficients(t.clamp(1e-6, 1 - 1e-6), process.loss_weight)
    for certainty in (1, 10):
        logits = torch.randn(n, 300, generator=rng)
        logits = certainty * logits.scatter_add_(1, x, torch.full((n, 1), 2.))

        def values(logits, coefficients, factor):
            log_p = logits.log_softmax(1)
            value = process.integrand(log_p, x[:, 0], z[:, 0], coefficients) * factor
            return value[scored[:, 0]]
        for exact, rounded, factor in ((of_bound, of_bound.float(), slope),
                                       (of_loss, process.loss_coefficients(t), torch.ones(n))):
            assert rounded.dtype == torch.float32
            wide, narrow = values(logits.double(), exact, factor), values(logits, rounded, factor)
            assert abs(narrow.mean() / wide.mean() - 1) < 1e-5
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
    law = {(V,) * L: 1.0}
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
    for t, s in zip(times, times[1:]):
        q_t, q_s = exact_law(process, t), exact_law(process, s)
        new = {}
        for z, chance in law.items():
            log_p = denoiser(t, torch.tensor([z]))[0]
            moves = [reverse(process, t, s, q_t, q_s, log_p[i].exp(), z[i]) for i in range(L)]
            for to in itertools.product(range(n_ids(process)), repeat=L):
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


def draw(process, n, steps, tokens=None, rows=None, **knobs):
    """ n texts by some_denoiser, of which what is not MASK is given. """
    def denoise(tokens, t, positions, rows=None):
        return some_denoiser(t, tokens).flatten(0, 1)[positions].float()
    noise = Noise(0, rows_of(n) if rows is None else rows)
    tokens = torch.full((n, L), V) if tokens is None else tokens
    ancestral = process.samplers['ancestral'].function
    return ancestral(denoise, make_propose(1.0, 1.0), process, tokens, tokens != V, steps, noise,
                     **knobs)


@pytest.mark.parametrize('process', [GIDD(V, .2), GIDD(V, .5, 2.), GIDD(V, 0.), HDLM(V, CLUSTERS),
                                     HDLM(V, CLUSTERS, 2., .8), HDLM(V, CLUSTERS, .5)], ids=name_of)
def test_samplers_have_the_enumerated_law_of_their_chain_and_end_in_tokens(process):
    n, steps = 60_000, 4
    law = chain_law(process, some_denoiser, steps)
    assert math.isclose(law.sum(), 1, rel_tol=1e-9), 'the last step leaves nothing but tokens'
    found = draw(process, n, steps)
    assert found.max() < V
    counts = torch.bincount(found[:, 0] * V + found[:, 1], minlength=V * V).double()
    z = (((counts - n * law) ** 2 / (n * law)).sum() - 8) / 4            # 8 degrees of freedom
    assert z < 10, (counts / n, law)                       # one seed in ten million lies above


@pytest.mark.parametrize('knobs', [{}, dict(self_correct=4)])
@pytest.mark.parametrize('process', [GIDD(V, .5), HDLM(V, CLUSTERS, 1., .8)], ids=name_of)
def test_a_row_is_written_alone_as_beside_others_and_what_is_given_is_never_touched(process, knobs):
    rows, tokens = rows_of(100, 2), torch.tensor([[V, V], [2, V]]).repeat(100, 1)

    def written(part):
        return draw(process, len(tokens[part]), 5, tokens[part], rows[part], **knobs)
    together = written(slice(None))
    assert (together < V).all() and (together[1::2, 0] == 2).all()
    alone = [written(slice(i, i + 1)) for i in range(30)]
    assert torch.equal(together[:30], torch.cat(alone))


def correct(rows_of_logits, tokens, rounds, rows):
    """ Tokens after rounds of self-correction by a network that says this of the two positions. """
    def denoise(tokens, t, positions):
        return torch.tensor(rows_of_logits).repeat(len(tokens), 1)[positions]
    none = torch.zeros_like(tokens, dtype=torch.bool)
    return GIDD(V, .2).correct(denoise, tokens, none, rounds, Noise(0, rows))


def test_self_correction_takes_what_the_network_prefers_and_stops():
    tokens = torch.tensor([[0, 2], [1, 2], [1, 1]])
    wants_0_2 = [[5., 0, 0], [0, 0, 5.]]
    one, two, ten = (correct(wants_0_2, tokens, n, rows_of(3)) for n in (1, 2, 10))
    assert ten.tolist() == two.tolist() == [[0, 2]] * 3
    assert (one != tokens).sum(1).tolist() == [0, 1, 1], 'one position of each text in a round'
    assert (one != ten).sum(1).tolist() == [0, 0, 1]

    # a text that has once drawn no change is done, whatever the others draw
    by_half, rows = [[0., .01, -9], [9, 0, 0]], rows_of(40)
    x = torch.zeros(40, 2, dtype=torch.int64)
    together = correct(by_half, x, 6, rows)
    alone = [correct(by_half, x[:1], 6, rows[i:i + 1]) for i in range(40)]
    assert torch.equal(together, torch.cat(alone)) and 5 < (together[:, 0] == 1).sum() < 35

    # a draw of what is less likely is no reason to move
    assert torch.equal(correct([[.04, 0, -9]] * 2, x, 5, rows), x)
