""" The two processes against enumeration, closed forms and float64. """
import math

import pytest
import torch

from diffusion import (MODES, GaussianLatents, MaskedText, NoisyText, draw_clocks, exact_nll,
                       mode_shares)
from processes.gidd import GIDD
from sampling.solvers import x0_and_e
from toys import (TEXTS, L, V, Toy, exact_bound, optimal_denoiser, random_denoiser,
                  random_network)

SCHEDULES = ['loglinear', 'cosine']


# ---- clocks

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
    for i, (name, share) in enumerate(shares.items()):
        rows = c.mode == i
        assert abs(rows.double().mean() - share) < 2e-3, 'rows are not shared by weight'
        if not rows.any():
            continue
        assert (c.text_on[rows] == MODES[name][2]).all()
        assert (c.latent_on[rows] == MODES[name][3]).all()
        drawn, given = c.t_text[rows], c.t_latent[rows]
        if name in ('t2l', 'complete'):
            drawn, given = given, drawn
        if name == 'causal':
            assert (drawn == 0).all(), 'a causal text is never noised'
        else:
            assert abs(drawn.mean() - .5) < .02
        if name == 'unconditional':
            assert abs(given.mean() - .5) < .02 and (drawn < 1).all()
        else:
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


def test_each_loss_weight_is_its_own_and_none_is_taken_for_another():
    class Square(MaskedText):
        LOSS_WEIGHTS = MaskedText.LOSS_WEIGHTS | {'square': lambda self, t: t ** 2}

    t = torch.tensor([.25, .5, 1.])
    expected = dict(bound=1 / t, uniform=torch.ones(3), rdm=1 - t, square=t ** 2)
    assert Square.LOSS_WEIGHTS.keys() == expected.keys()
    for name, weight in expected.items():
        assert Square(V, loss_weight=name).training_weight(t).equal(weight), name
    with pytest.raises(ValueError, match='choose from bound, uniform, rdm$'):
        MaskedText(V, loss_weight='square')

    # GIDD has weights of its own
    with pytest.raises(AssertionError, match='square'):
        GIDD(V).weights(t, 'square')


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


@pytest.fixture(params=SCHEDULES)
def estimated(request):
    """ A process, a network that is a table, texts of a law, and the bound of the network, nats
    per text. """
    p, table = optimal_denoiser()[0], random_denoiser()
    torch.manual_seed(0)
    tokens = TEXTS[torch.multinomial(p, 40_000, replacement=True)]
    return MaskedText(V, request.param), Toy(table), tokens, exact_bound(p, table, 'count')


def test_the_evaluated_bound_estimates_the_enumerated_one(estimated):
    text, toy, tokens, exact = estimated
    B = len(tokens)
    draws = text.bound(toy, tokens, None, None, torch.rand(B, 1 + L))
    assert abs(draws.mean() - exact) < 5 * draws.std() / math.sqrt(B)


def test_the_training_loss_estimates_the_enumerated_bound(estimated):
    text, toy, tokens, exact = estimated
    B = len(tokens)
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


def test_a_causal_text_is_scored_up_to_its_eos_and_reads_one_position_later():
    eos, pad = 18, 19
    tokens = torch.tensor([[4, 5, 6, eos, pad, pad], [7, 8, 9, 10, 11, eos]])
    model = random_network(streams=('text',), text_clock=False)
    assert model.shifted(tokens, 2).tolist() == [[20, 4, 5, 6, eos, pad], [20, 7, 8, 9, 10, 11]]
    logp = model(tokens, None, None, None, n_causal=2)[0].detach().log_softmax(2)
    nats = -logp.gather(2, tokens[:, :, None]).squeeze(2)                # (2, 6)
    expected = torch.stack([nats[0, :4].sum(), nats[1].sum()]).double()
    assert torch.allclose(exact_nll(model, tokens, None, None), expected, atol=1e-4)


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
