""" The two processes against enumeration, closed forms and float64. """
import itertools
import math

import numpy as np
import pytest
import torch

from diffusion import MODES, GaussianLatents, MaskedText, NoisyText, draw_clocks, mode_shares
from noise import Noise, normals, rows_of, uniforms
from sampling.solvers import SOLVERS, x0_and_e
from toys import L, V, Toy, exact_bound, optimal_denoiser, random_denoiser

SCHEDULES = ['loglinear', 'cosine']
PROCESSES = [('vp', 'v'), ('vp', 'x0'), ('vp', 'eps'), ('vp', 'rest'),
             ('rf', 'flow'), ('rf', 'x0'), ('rf', 'v')]


# ---- noise and clocks

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


def test_each_clock_is_exactly_uniform_over_steps():
    draws = [draw_clocks(0, step, 0, 8, mode_shares('unconditional'), t_min=0.)
             for step in range(2000)]
    for clock in ('t_text', 't_latent'):
        t = torch.stack([getattr(d, clock) for d in draws])                       # (steps, rows)
        for row in range(8):
            counts = torch.histc(t[:, row], 20, 0, 1)
            assert ((counts - 100) ** 2 / 100).sum() < 19 + 8 * math.sqrt(38)


def test_every_contiguous_slice_of_clocks_is_stratified_and_the_same_for_every_split():
    shares = mode_shares('unconditional+2*l2t+t2l')
    whole = draw_clocks(5, 11, 0, 64, shares)
    for size in (8, 16, 32):
        for first in range(0, 64, size):
            part = draw_clocks(5, 11, first, size, shares)
            assert all(torch.equal(a, b[first:first + size]) for a, b in zip(part, whole))
            drawn = draw_clocks(5, 11, first, size, mode_shares('unconditional'), t_min=0.)
            for clock in ('t_text', 't_latent'):
                gaps = torch.diff(getattr(drawn, clock).sort().values)
                assert gaps.max() < 2 / size, 'a stretch of the clock without a row'
            joint = torch.histogramdd(torch.stack([drawn.t_text, drawn.t_latent], 1), [2, 2],
                                      range=[0., 1., 0., 1.]).hist
            assert size < 16 or joint.max() - joint.min() <= size / 4, 'the clocks go together'


@pytest.mark.parametrize('mode', [*MODES, '2*unconditional+5*l2t+3*t2l'])
def test_modes_draw_the_clocks_and_weights_of_the_table(mode):
    shares = mode_shares(mode)
    c = draw_clocks(0, 0, 0, 4096, shares, cond_drop=.25)
    names = list(shares)
    for i, name in enumerate(names):
        rows = c.mode == i
        assert abs(rows.double().mean() - shares[name]) < 2e-3, 'rows are not shared by weight'
        if not rows.any():
            continue
        t_text, t_latent = c.t_text[rows], c.t_latent[rows]
        assert (c.text_on[rows] == MODES[name][2]).all()
        assert (c.latent_on[rows] == MODES[name][3]).all()
        if name == 'unconditional':
            assert abs(t_text.mean() - .5) < .02 and abs(t_latent.mean() - .5) < .02
            assert (t_text < 1).all()
        else:
            given, drawn = (t_text, t_latent) if name == 't2l' else (t_latent, t_text)
            if name == 'causal':
                assert (drawn == 0).all(), 'a causal text is never noised'
            else:
                assert abs(drawn.mean() - .5) < .02
            assert abs((given == 1).double().mean() - .25) < .02, 'share of dropped conditions'
            assert ((given == 1) | (given == 0)).all(), 'what is given is clean, or is dropped'


# ---- masked text

@pytest.mark.parametrize('schedule', SCHEDULES)
def test_text_schedule_runs_from_0_to_1_and_its_weight_is_its_derivative(schedule):
    text = MaskedText(V, schedule)
    t = torch.linspace(.01, .99, 99, dtype=torch.float64, requires_grad=True)
    share = text.masked_share(t)
    slope, = torch.autograd.grad(share.sum(), t)
    assert torch.allclose(text.bound_weight(t), slope / share, rtol=1e-9)      # -a'/(1-a)
    assert torch.allclose(text.time_of_share(share), t)
    ends = text.masked_share(torch.tensor([0., 1.]))
    assert ends.tolist() == [0, 1]


def test_corruption_masks_at_the_scheduled_rate_and_never_what_is_given():
    text, tokens = MaskedText(50, 'cosine'), torch.randint(0, 50, (400, 256))
    given = torch.rand(400, 256) < .3
    noisy, mask = text.corrupt(tokens, torch.full((400,), .4), torch.rand(400, 256), given)
    assert torch.equal(noisy[~mask], tokens[~mask]) and (noisy[mask] == 50).all()
    assert not (mask & given).any()
    rate, n = math.sin(math.pi * .2), int((~given).sum())
    assert abs(mask[~given].double().mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / n)
    for t, all_masked in ((0., False), (1., True)):
        _, mask = text.corrupt(tokens, torch.full((400,), t), torch.rand(400, 256))
        assert (mask == all_masked).all()


def test_the_two_text_bounds_agree_and_meet_the_entropy_only_for_the_optimal_denoiser():
    p, table = optimal_denoiser()
    entropy = -(p * p.log()).sum().item()
    assert exact_bound(p, table, 'count') == pytest.approx(entropy, abs=1e-9)
    for table in (table, random_denoiser()):
        by_count = exact_bound(p, table, 'count')
        assert by_count == pytest.approx(exact_bound(p, table, 'continuous'), abs=1e-9)
        assert by_count >= entropy - 1e-9
    assert exact_bound(p, random_denoiser(), 'count') > entropy + .1


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_training_loss_and_evaluated_bound_estimate_the_enumerated_bound(schedule):
    p, table = optimal_denoiser()[0], random_denoiser()
    exact, text = exact_bound(p, table, 'count'), MaskedText(V, schedule)
    toy, B = Toy(table), 40_000
    torch.manual_seed(0)
    states = torch.tensor(list(itertools.product(range(V), repeat=L)))
    tokens = states[torch.multinomial(p, B, replacement=True)]
    draws = text.bound(toy, tokens, None, None, torch.rand(B, 1 + L))
    assert abs(draws.mean() - exact) < 5 * draws.std() / math.sqrt(B)
    t = 1e-4 + (1 - 1e-4) * torch.rand(B, dtype=torch.float64)
    noisy, mask = text.corrupt(tokens, t, torch.rand(B, L, dtype=torch.float64))
    weight = text.bound_weight(t)[:, None].expand(B, L)
    fields = NoisyText(noisy, mask, weight).fields(tokens)
    positions, weight = fields['positions'], fields['weight']
    logits = toy(noisy, None, t, None, positions)[0]
    loss, nll, _ = text.loss(logits, torch.eye(V), fields['targets'], weight)
    assert loss.item() == pytest.approx((weight * nll).sum().item())
    per_row = torch.zeros(B).index_add_(0, positions // L, weight * nll) * B * L
    assert abs(loss.item() * L - exact) < 5 * per_row.std() / math.sqrt(B)


def test_the_likeliest_token_is_right_and_a_latent_without_a_loss_passes_no_nan():
    for target, is_right in ((0, True), (1, False)):
        target, one = torch.tensor([target]), torch.ones(1)
        loss, _, right = MaskedText(V).loss(torch.zeros(1, V), torch.eye(V), target, one)
        assert loss.item() == pytest.approx(math.log(V)) and right[0] == is_right
    out = torch.full((2, 1, 3), torch.nan)
    out[0] = 1
    latent = GaussianLatents(torch.ones(3))
    loss, _ = latent.loss(out, torch.zeros(2, 1, 3), torch.tensor([1., 0.]))
    assert loss.item() == .5


# ---- Gaussian latents

@pytest.mark.parametrize('schedule, target', PROCESSES)
def test_conversions_round_trip_wherever_they_are_defined(schedule, target):
    latent = GaussianLatents(torch.ones(5), schedule, target)
    t = torch.linspace(0, 1, 11)
    if target in ('x0', 'rest'):
        t = t[1:]
    if target == 'eps':
        t = t[:-1]
    z, e = torch.randn(len(t), 1, 5), torch.randn(len(t), 1, 5)
    z_t, e = latent.corrupt(z, t, e)
    x0, e_hat = x0_and_e(latent, latent.target_of(z, e, t), z_t, t)
    assert torch.allclose(x0, z, atol=2e-5) and torch.allclose(e_hat, e, atol=2e-5)


def test_both_ends_of_the_latent_schedules_are_exact_in_float32():
    for schedule in ('vp', 'rf'):
        a, s = GaussianLatents(torch.ones(1), schedule).alpha_sigma(torch.tensor([0., 1.]))
        assert a.tolist() == [1, 0] and s.tolist() == [0, 1]
    x0, e = x0_and_e(GaussianLatents(torch.ones(1), target='x0'), torch.ones(1, 1, 1),
                     torch.ones(1, 1, 1), torch.zeros(1))
    assert x0.item() == 1 and e.item() == 0
    with pytest.raises(ValueError, match='t=1'):
        x0_and_e(GaussianLatents(torch.ones(1), target='eps'), torch.ones(1, 1, 1),
                 torch.ones(1, 1, 1), torch.ones(1))


def test_dead_dimensions_carry_no_noise_no_loss_and_come_back_as_zero():
    live = torch.tensor([1., 0., 1.])
    latent = GaussianLatents(live)
    z_t, e = latent.corrupt(torch.randn(4, 1, 3) * live, torch.full((4,), .5), torch.randn(4, 1, 3))
    assert (z_t[..., 1] == 0).all() and (e[..., 1] == 0).all()
    out = torch.randn(4, 1, 3)
    other = out.clone()
    other[..., 1] = 100
    loss = [latent.loss(o, torch.zeros(4, 1, 3), torch.ones(4))[0].item() for o in (out, other)]
    assert loss[0] == loss[1] == pytest.approx((out * live).square().sum().item() / (4 * 2))
    assert all((x[..., 1] == 0).all() for x in x0_and_e(latent, out, z_t, torch.full((4,), .5)))


# data N(mu, diag(var)) has a known denoiser: x0 = mu + a var (z_t - a mu) / (a^2 var + s^2)
MU, VAR = torch.tensor([1., -2.], dtype=torch.float64), torch.tensor([.25, 4.], dtype=torch.float64)


def known_denoiser(latent):
    def denoise(z, t):
        a, s = latent.alpha_sigma(t)
        x0 = MU + a * VAR * (z - a * MU) / (a * a * VAR + s * s)
        return x0, (z - a * x0) / s
    return denoise


def solve(latent, solver, z, times, generator=None):
    memory, step = {}, SOLVERS[solver]
    times = torch.as_tensor(times, dtype=torch.float64)
    for t, s in zip(times, times[1:]):
        def noise():
            return torch.randn(z.shape, generator=generator, dtype=z.dtype)
        z = step(latent, z, t, s, known_denoiser(latent), memory, noise)
    return z


@pytest.mark.parametrize('schedule', ['vp', 'rf'])
@pytest.mark.parametrize('solver', SOLVERS)
def test_each_solver_reaches_mean_and_covariance_of_gaussian_data(schedule, solver):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(20_000, 1, 2, generator=g, dtype=torch.float64)
    out = solve(GaussianLatents(torch.ones(2), schedule), solver, z, torch.linspace(1, 0, 201),
                g)[:, 0]
    assert out.isfinite().all()
    assert torch.allclose(out.mean(0), MU, atol=.08)
    assert torch.allclose(out.T.cov(), torch.diag(VAR), atol=.25)


@pytest.mark.parametrize('schedule', ['vp', 'rf'])
@pytest.mark.parametrize('solver, order', [('ddim', 1), ('dpmpp_2m', 2), ('heun', 2)])
def test_solvers_converge_to_the_exact_flow_at_their_order(schedule, solver, order):
    latent = GaussianLatents(torch.ones(2), schedule)
    ends = torch.tensor([.95, .05], dtype=torch.float64)
    a, s = latent.alpha_sigma(ends)
    # the flow keeps w = (z - a mu) / sd
    w = torch.tensor([[[1., -1.]], [[.5, 2.]]], dtype=torch.float64)
    start, end = (a[i] * MU + (a[i] ** 2 * VAR + s[i] ** 2).sqrt() * w for i in (0, 1))
    n = [16, 32, 64, 128]
    errors = [(solve(latent, solver, start, torch.linspace(.95, .05, k + 1, dtype=torch.float64))
               - end).abs().max().item() for k in n]
    slope = -np.polyfit(np.log(n), np.log(errors), 1)[0]
    assert abs(slope - order) < .25, (slope, errors)
