""" Every sampler against the enumerated law of what it claims to sample. """
import math

import pytest
import torch

import sample
from diffusion import MaskedText
from sample import SAMPLERS, bound_clock, make_propose, nucleus_filter
from toys import L, MASK, STATES, V, Toy, any_order_law, chain_law, chi_square_z, optimal_denoiser, random_denoiser

N = 60_000


def draw(name, table, steps, n=N, tokens=None, given=None, seed=0, schedule='loglinear', temperature=1.0,
         on_step=lambda tokens: None, **extra):
    rng = torch.Generator().manual_seed(seed)
    toy = Toy(table)
    tokens = torch.full((n, L), MASK) if tokens is None else tokens
    given = torch.zeros_like(tokens, dtype=torch.bool) if given is None else given
    return SAMPLERS[name](lambda x, t: toy(x, None, t, None)[0], make_propose(temperature, 1.0, rng), MaskedText(V, schedule),
                          tokens, given, steps, rng, on_step, **extra)


@pytest.mark.parametrize('schedule', ['loglinear', 'cosine'])
@pytest.mark.parametrize('steps', [1, 2, 5])
def test_ancestral_has_the_enumerated_law_of_its_chain(steps, schedule):
    table, text = random_denoiser(), MaskedText(V, schedule)
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    law = chain_law(table, [text.release_share(t, s).item() for t, s in zip(times, times[1:])])
    assert chi_square_z(draw('ancestral', table, steps, schedule=schedule), law) < 4


def test_the_chain_at_few_steps_is_not_the_model_and_the_chi_square_sees_it():
    table = random_denoiser()
    assert chi_square_z(draw('ancestral', table, 2), any_order_law(table)) > 20


def test_first_hitting_has_the_law_of_the_model():
    for table in (random_denoiser(), optimal_denoiser()[1]):
        assert chi_square_z(draw('first_hitting', table, L), any_order_law(table)) < 4
    p, table = optimal_denoiser()                                        # the optimal denoiser's own law is the data's
    assert chi_square_z(draw('first_hitting', table, L), p) < 4


def test_confidence_seeks_the_likely_and_is_no_sample_of_the_model():
    table = random_denoiser()
    law = any_order_law(table)
    assert chi_square_z(draw('confidence', table, L), law) > 20
    greedy = draw('confidence', table, L, n=4, temperature=0.0)
    assert (greedy == greedy[0]).all() and law[(greedy[0] * 3 ** torch.arange(L - 1, -1, -1)).sum()] > 3 * law.median()


@pytest.mark.parametrize('score', ['top1', 'margin', 'entropy', 'threshold'])
def test_confidence_releases_the_share_of_each_row_that_it_owes(score):
    counts = []
    tokens = STATES.clone()
    n = (tokens == MASK).sum(1)
    draw('confidence', random_denoiser(), 3, tokens=tokens, given=tokens != MASK, score=score,
         on_step=lambda x: counts.append((x == MASK).sum(1)))
    if score == 'threshold':
        assert (torch.stack([n, *counts]).diff(dim=0)[:2] <= -(torch.stack([n, *counts])[:2] > 0).long()).all(), 'at least one a step'
    else:
        for i, left in enumerate(counts):
            assert torch.equal(left, n - (i + 1) * (n // 3) - (n % 3).clamp(max=i + 1))
    assert (counts[-1] == 0).all()


@pytest.mark.parametrize('name', SAMPLERS)
def test_given_tokens_never_change_and_nothing_stays_masked(name):
    tokens = STATES.repeat(4, 1)
    given = tokens != MASK
    for steps in (1, 3, 7):
        states = [tokens]
        out = draw(name, random_denoiser(), steps, tokens=tokens, given=given, on_step=states.append)
        assert (out != MASK).all() and torch.equal(out[given], tokens[given])
        assert ((out >= 0) & (out < V)).all()
        assert len(states) == (steps if name == 'ancestral' else min(steps, L)) + 1
        for before, after in zip(states, states[1:]):
            released = before != MASK
            assert torch.equal(before[released], after[released]), 'a released token changed'


def released_in_the_first_step(vocabulary, steps, shape, denoise, propose, seed=0):
    text, count = MaskedText(vocabulary), []

    class Enough(Exception):
        pass

    def on_step(tokens):
        count.append((tokens != vocabulary).sum().item())
        raise Enough

    with pytest.raises(Enough):
        sample.ancestral(denoise, propose, text, torch.full(shape, vocabulary), torch.zeros(shape, dtype=torch.bool), steps,
                         torch.Generator().manual_seed(seed), on_step)
    return count[0]


def test_release_rate_equals_u_at_4096_steps():
    """ Four million positions; what is released is drawn apart, so the proposal may be anything. """
    shape, u = (4096, 1024), 1 / 4096
    count = released_in_the_first_step(50257, 4096, shape, lambda x, t: None, lambda logits: (torch.zeros(shape, dtype=torch.int64), None))
    n = math.prod(shape)
    assert abs(count - n * u) < 4 * math.sqrt(n * u * (1 - u))


def test_release_rate_equals_u_with_real_proposals_over_50257_ids():
    shape, u, vocabulary = (16, 64), 1 / 16, 50257
    flat = torch.zeros(1, 1, vocabulary).expand(*shape, vocabulary)
    propose = make_propose(1.0, 1.0, torch.Generator().manual_seed(1))
    count = released_in_the_first_step(vocabulary, 16, shape, lambda x, t: flat, propose)
    n = math.prod(shape)
    assert abs(count - n * u) < 4 * math.sqrt(n * u * (1 - u))


def test_proposals_follow_the_softmax_at_a_temperature_in_float32():
    logits = torch.tensor([2., 0., -1., -30.]).expand(1, 200_000, 4)
    for temperature in (1.0, 0.5):
        x, logp = make_propose(temperature, 1.0, torch.Generator().manual_seed(0))(logits)
        p = (logits[0, 0] / temperature).softmax(0)
        share = torch.bincount(x[0], minlength=4) / 200_000
        assert ((share - p).abs() <= 4 * (p * (1 - p) / 200_000).sqrt() + 1e-9).all()
        assert torch.allclose(logp, logits.log_softmax(-1).gather(-1, x[..., None]).squeeze(-1))
    x, _ = make_propose(0.0, 1.0, None)(logits)
    assert (x == 0).all()


def test_nucleus_keeps_the_boundary_token_and_always_the_top_one():
    logits = torch.tensor([.15, .5, .3, .05]).log()
    kept = lambda p: (nucleus_filter(logits, p) > -torch.inf).tolist()  # noqa: E731
    assert kept(0.0) == [False, True, False, False]
    assert kept(0.4) == [False, True, False, False]
    assert kept(0.6) == [False, True, True, False]
    assert kept(0.81) == [True, True, True, False]
    assert kept(1.0) == [True] * 4


def test_guidance_1_and_0_are_the_two_models_and_between_is_their_mixture():
    class Two:
        def __call__(self, tokens, z, t, clock, predict):
            conditional = torch.tensor([1., 0., 2.]).expand(*tokens.shape, 3)
            null = torch.tensor([0., 3., 0.]).expand(*tokens.shape, 3)
            assert (clock == 1).all() or (clock == 0).all()
            assert (z == 5).all() if (clock == 1).all() else (z == 7).all()
            return (null if clock[0] == 1 else conditional), None
    import contextlib
    tokens, t = torch.full((2, 4), 3), torch.ones(2)
    run = lambda g: sample.make_denoise(Two(), torch.full((2, 1, 2), 7.), torch.zeros(2), torch.full((2, 1, 2), 5.), g,  # noqa: E731
                                        contextlib.nullcontext)(tokens, t).log_softmax(-1)[0, 0]
    conditional, null = torch.tensor([1., 0., 2.]).log_softmax(0), torch.tensor([0., 3., 0.]).log_softmax(0)
    assert torch.allclose(run(1.0), conditional) and torch.allclose(run(0.0), null)
    assert torch.allclose(run(2.0), (2 * conditional - null).log_softmax(0))


def test_the_clock_fed_to_the_network_is_that_of_the_bound():
    masked = torch.tensor([[True] * 3 + [False], [True] * 4])
    for schedule in ('loglinear', 'cosine', 'polynomial'):
        text = MaskedText(V, schedule)
        assert torch.allclose(text.masked_share(bound_clock(text, masked)), torch.tensor([.75, 1.]))
