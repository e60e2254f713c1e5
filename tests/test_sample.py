""" Every sampler against the enumerated law of what it claims to sample. """
import gzip
import json
import math
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configurator
import evaluate
import sample
from sampling.inputs import pack, read_template, read_texts
from processes.gidd import GIDD
from processes.hdlm import HDLM
from diffusion import GaussianLatents, MaskedText
import samplers
from samplers import SAMPLERS, certainty_of, in_blocks, init_state, make_propose, no_callback, nucleus_filter
from launch import run_each
from sampling.loading import encode
from sampling import directions, drafts, writing
from sampling.knobs import SamplingKnobs
from sampling.solvers import SOLVERS
from tasks import common
from toys import (L, MASK, STATES, V, Network, Toy, any_order_law, chain_law, chi_square_z, index, optimal_denoiser, random_denoiser, release_chain)

N = 60_000


def draw(name, table, steps, n=N, tokens=None, given=None, seed=0, schedule='loglinear', temperature=1.0, on_step=no_callback,
         calls=None, block=0, **knobs):
    """ calls: a list that takes the number of rows of every network call. """
    rng, toy = torch.Generator().manual_seed(seed), Toy(table)
    tokens = torch.full((n, L), MASK) if tokens is None else tokens
    given = torch.zeros_like(tokens, dtype=torch.bool) if given is None else given

    def denoise(x, t, positions, rows=None):
        if calls is not None:
            calls.append(len(x))
        return toy(x, None, t, None, positions)[0]
    sampler = partial(SAMPLERS[name], **knobs)
    sampler = in_blocks(sampler, block) if block else sampler
    propose = make_propose(temperature, 1.0, rng)
    return sampler(denoise, propose, MaskedText(V, schedule), tokens, given, steps, rng, lambda x, *said: on_step(x))


def shares(schedule, steps):
    """ M at the ends of the steps. """
    return MaskedText(V, schedule).masked_share(torch.linspace(1, 0, steps + 1, dtype=torch.float64)).tolist()


# ---- the law of each sampler

@pytest.mark.parametrize('schedule', ['loglinear', 'cosine'])
@pytest.mark.parametrize('steps', [1, 2, 5])
@pytest.mark.parametrize('name, knobs', [('ancestral', {}), ('cached', {}), ('remdm', dict(eta=0.0)),
                                         ('remdm', dict(eta=0.0, remask='rescale')), ('dfm', dict(alpha=1.0))])
def test_ancestral_cached_remdm_and_dfm_without_remasking_have_the_enumerated_law_of_their_chain(name, knobs, steps, schedule):
    table, M = random_denoiser(), shares(schedule, steps)
    law = chain_law(table, [(m - m_s) / m for m, m_s in zip(M, M[1:])])
    assert chi_square_z(draw(name, table, steps, schedule=schedule, **knobs), law) < 6


@pytest.mark.parametrize('remask, eta', [('cap', .3), ('rescale', .6)])
def test_remdm_has_the_enumerated_law_of_its_chain_and_keeps_the_marginals(remask, eta):
    table, M, steps = random_denoiser(), shares('loglinear', 4), 4
    chain = []
    for m_t, m_s in zip(M, M[1:]):
        a_t, a_s = 1 - m_t, 1 - m_s
        g_max = 1. if a_t == 0 else min(1, m_s / a_t)
        g = min(eta, g_max) if remask == 'cap' else eta * g_max
        chain.append(((a_s - (1 - g) * a_t) / (1 - a_t), g))
    states = []
    out = draw('remdm', table, steps, remask=remask, eta=eta, on_step=lambda x: states.append((x == MASK).double().mean().item()))
    assert chi_square_z(out, release_chain(table, chain)) < 6
    assert chi_square_z(out, chain_law(table, [(m - m_s) / m for m, m_s in zip(M, M[1:])])) > 10, 'it is another chain than ancestral'
    for share, m in zip(states, M[1:]):
        assert abs(share - m) < 5 * math.sqrt(m * (1 - m) / (N * L)) + 1e-12


@pytest.mark.parametrize('alpha', [1.5, 2.])
@pytest.mark.parametrize('schedule', ['loglinear', 'cosine'])
def test_dfm_has_the_enumerated_law_of_its_chain_and_keeps_the_marginals(alpha, schedule):
    table, M, chain = random_denoiser(), shares(schedule, 4), []
    for m_t, m_s in zip(M, M[1:]):
        g = 0. if m_t == 1 else min(1, m_s * (1 - (m_s / m_t) ** (alpha - 1)) / (1 - m_t))
        chain.append((1 - (m_s - (1 - m_t) * g) / m_t, g))
        assert g == 1 or chain[-1][0] == pytest.approx(1 - (m_s / m_t) ** (alpha if m_t < 1 else 1))
    assert max(g for _, g in chain) > .1
    states = []
    out = draw('dfm', table, 4, alpha=alpha, schedule=schedule, on_step=lambda x: states.append((x == MASK).double().mean().item()))
    assert chi_square_z(out, release_chain(table, chain)) < 6
    for share, m in zip(states, M[1:]):
        assert abs(share - m) < 5 * math.sqrt(m * (1 - m) / (N * L)) + 1e-12


def test_reparam_masks_the_least_certain_again_and_the_others_keep_their_tokens():
    back, K = 0, 4
    for seed in range(20):                                               # the likeliest token everywhere: what it does can be foretold
        table, states = random_denoiser(seed), []
        draw('reparam', table, K, n=1, temperature=0, on_step=lambda x: states.append(x[0].clone()))
        state, certainty = torch.full((L,), MASK), torch.zeros(L, dtype=torch.float64)
        for k, now in enumerate(states, 1):
            logp, x = table[index(state)].log_softmax(-1).max(-1)
            masked = state == MASK
            certainty = torch.where(masked, logp, certainty)             # a visible one has that of its release
            expected = torch.where(masked, x, state)
            again = certainty.argsort()[:L * (K - k) // K]
            back += (~masked[again]).sum().item()
            expected[again] = MASK
            assert torch.equal(now, expected)
            state = now
    assert back > 0, 'nothing was taken back'
    table = random_denoiser()
    assert chi_square_z(draw('reparam', table, 1), chain_law(table, [1.0])) < 6, 'one step: every position on its own'


def test_reparam_draws_over_repeated_tokens_again():
    one = torch.zeros(len(STATES), L, V)
    one[..., 2] = 4                                                      # the network would write nothing else
    plain, capped = (draw('reparam', one, 2, n=2000, repeat_cap=cap) for cap in (0., .5))
    repeated = lambda x: ((x == 2).sum(1) > L / 2).double().mean()       # noqa: E731
    assert repeated(plain) > .9 and repeated(capped) < .1


def test_first_hitting_has_the_law_of_the_model():
    for table in (random_denoiser(), optimal_denoiser()[1]):
        assert chi_square_z(draw('first_hitting', table, L), any_order_law(table)) < 6
    p, table = optimal_denoiser()                                        # the optimal denoiser's own law is the data's
    assert chi_square_z(draw('first_hitting', table, L), p) < 6


def test_blocks_have_the_law_of_filling_one_block_after_the_other():
    table = random_denoiser()
    law = any_order_law(table, block=2)
    assert chi_square_z(draw('first_hitting', table, L, block=2), law) < 6
    assert chi_square_z(draw('ancestral', table, 400, block=2, n=20_000), law) < 6
    assert chi_square_z(draw('first_hitting', table, L), law) > 20, 'blocks change the law'
    left_to_right = []
    draw('remdm', table, 12, n=50, block=1, eta=.5, on_step=lambda x: left_to_right.append(x.clone()))
    for x in left_to_right:
        known = (x != MASK).long()
        assert (known.diff(dim=1) <= 0).all(), 'a position is known before one to its left'


def test_cached_writes_what_ancestral_writes_and_calls_the_network_at_most_L_times_a_row():
    table, n, steps = random_denoiser(), 64, 200
    for seed in range(3):
        calls, all_calls = [], []
        a = draw('ancestral', table, steps, n=n, seed=seed, temperature=0.0, calls=all_calls)
        c = draw('cached', table, steps, n=n, seed=seed, temperature=0.0, calls=calls)
        assert torch.equal(a, c)
        assert sum(all_calls) == n * steps and n < sum(calls) <= n * L


# ---- confidence

def test_confidence_seeks_the_likely_and_is_no_sample_of_the_model():
    table = random_denoiser()
    law = any_order_law(table)
    assert chi_square_z(draw('confidence', table, L), law) > 20
    greedy = draw('confidence', table, L, n=4, temperature=0.0)
    assert (greedy == greedy[0]).all() and law[(greedy[0] * 3 ** torch.arange(L - 1, -1, -1)).sum()] > 3 * law.median()


def test_confidence_releases_the_share_of_each_row_that_it_owes():
    counts = []
    tokens = STATES.clone()
    n = (tokens == MASK).sum(1)
    draw('confidence', random_denoiser(), 3, tokens=tokens, given=tokens != MASK, on_step=lambda x: counts.append((x == MASK).sum(1)))
    for i, left in enumerate(counts):
        assert torch.equal(left, n - (i + 1) * (n // 3) - (n % 3).clamp(max=i + 1))
    assert (counts[-1] == 0).all()


@pytest.mark.parametrize('penalty, order', [(0.0, [3, 2, 0, 1]), (0.2, [2, 0, 3, 1]), (50.0, [2, 0, 1, 3])])
def test_the_end_of_a_text_may_be_held_back(penalty, order):
    """ Ids 0, EOS 1, PAD 2. The last place is surest of its EOS, and the penalty makes it wait. """
    certainty = torch.tensor([.80, .70, .90, .95])
    p = torch.stack([torch.tensor([.80, .70, .90, .04]), torch.tensor([.19, .29, .09, .95]), torch.full((4,), .01)], 1)
    seen = []
    text = samplers.confidence(lambda tokens, t, positions: p[positions].log(), make_propose(0., 1., None), MaskedText(3),
                               torch.full((1, 4), 3), torch.zeros(1, 4, dtype=torch.bool), 4, torch.Generator(),
                               lambda x, *said: seen.append(x[0] != 3), end_penalty=penalty)
    assert text.tolist() == [[0, 0, 0, 1]] and certainty.argmax() == 3
    assert [(b.int() - a.int()).argmax().item() for a, b in zip([torch.zeros(4).bool(), *seen], seen)] == order


def test_the_end_is_held_back_by_its_id_which_need_not_be_one_of_the_last_two():
    """ Some of tiktoken's encodings have ids above their EOS. Here EOS is 0, and the last place is surest of it. """
    p = torch.tensor([[.1, .8, .1], [.15, .7, .15], [.05, .9, .05], [.95, .04, .01]])
    model = Network(lambda tokens, z, t_text, t_latent, positions, predict: (p.log()[positions % L], None))
    model.config, shown = Known(), []
    run = known_run(model=model, tokenizer=SimpleNamespace(eos=0, pad=2))
    for penalty in (0.0, 50.0):
        directions.l2t(run, torch.zeros(1, 1, 2), sampler='confidence', end_penalty=penalty,
                       on_step=lambda x, *said: shown.append((x[0] != MASK).tolist()))
    assert shown[1] == [False, False, False, True] and shown[L + 2] == [False, False, True, False], 'without and with the penalty'
    assert shown[-2] == [True, True, True, False]


@pytest.mark.parametrize('score', ['top1', 'margin', 'entropy'])
@pytest.mark.parametrize('prefer', ['certain', 'uncertain'])
def test_confidence_releases_the_most_or_the_least_certain_position_first(score, prefer):
    table, order = random_denoiser(), []
    draw('confidence', table, L, n=1, temperature=0.0, score=score, prefer=prefer, on_step=lambda x: order.append(x.clone()))
    state = torch.full((1, L), MASK)
    for after in order:
        p = table[index(state)][0].float().softmax(-1)                   # (L, V), by hand
        best = p.sort(-1, descending=True).values
        certainty = {'top1': best[:, 0], 'margin': best[:, 0] - best[:, 1], 'entropy': (p * p.log()).sum(-1)}[score]
        free = (state[0] == MASK).nonzero().flatten().tolist()
        expected = (max if prefer == 'certain' else min)(free, key=lambda i: certainty[i])
        assert (after != state)[0].nonzero().flatten().tolist() == [expected]
        state = after


# ---- what all share

@pytest.mark.parametrize('score', ['top1', 'margin', 'entropy'])
def test_importance_weighs_the_uncertainty_of_what_is_proposed(score):
    logits = torch.tensor([[4., 0, 0], [0, 2, 0], [0, 0, 1], [0, 0, 1]])                     # ever less certain; proposals 0, 1, 2, 2
    important = torch.tensor([1., .6, .2, .5])                                               # of the ids 0, 1, 2, and MASK
    order = {}
    for prefer in ('certain', 'uncertain'):
        for importance in (None, lambda tokens: important[tokens]):
            states = []
            samplers.confidence(lambda x, t, positions: logits[positions % L], lambda logits: logits.argmax(-1), MaskedText(V),
                                   torch.full((1, L), MASK), torch.zeros(1, L, dtype=torch.bool), L, torch.Generator(),
                                   lambda x, *said: states.append((x != MASK).sum().item() and x.clone()), score=score, prefer=prefer,
                                   importance=importance)
            shown = torch.cat([torch.full((1, L), MASK), *states]) != MASK
            order[prefer, bool(importance)] = (shown[1:] & ~shown[:-1]).int().argmax(1).tolist()
    uncertainty = int(score == 'margin') - certainty_of(logits, logits.argmax(1), score)
    by = uncertainty * important[logits.argmax(1)]
    assert order['certain', False] == uncertainty.argsort(stable=True).tolist()
    assert order['certain', True] == by.argsort(stable=True).tolist() != order['certain', False]
    assert order['uncertain', True] == (-by).argsort(stable=True).tolist()


@pytest.mark.parametrize('block', [0, 3])
@pytest.mark.parametrize('name', SAMPLERS)
def test_given_tokens_never_change_and_nothing_stays_masked(name, block):
    tokens = STATES.repeat(4, 1)
    given = tokens != MASK
    for steps in (1, 3, 7):
        states = [tokens]
        out = draw(name, random_denoiser(), steps, tokens=tokens, given=given, on_step=lambda x: states.append(x.clone()), block=block,
                   **{'remdm': {'eta': .5}, 'dfm': {'alpha': 2.}}.get(name, {}))
        assert (out != MASK).all() and torch.equal(out[given], tokens[given])
        assert ((out >= 0) & (out < V)).all() and torch.equal(tokens, STATES.repeat(4, 1)), 'the input was written into'
        if not block:
            assert len(states) == (steps if name in ('ancestral', 'cached', 'remdm', 'dfm') else min(steps, L)) + 1
        for before, after in zip(states, states[1:]):
            changed = (before != MASK) & (after != before)
            assert not changed.any() or name in ('remdm', 'dfm', 'reparam') and (after[changed] == MASK).all() and not changed[given].any()


@pytest.mark.parametrize('name', SAMPLERS)
def test_the_clock_fed_to_the_network_is_that_of_the_bound_or_of_the_schedule(name):
    """ With tokens given (and always for first_hitting, confidence and reparam) 1 - a(t) = n_masked / L per row; else the schedule's t. """
    for schedule in ('loglinear', 'cosine', 'polynomial'):
        text = MaskedText(V, schedule)
        for given_first in (False, True):
            tokens = torch.full((6, L), MASK)
            tokens[:, 0] = 1 if given_first else MASK
            seen = []

            def denoise(x, t, positions, rows=None):
                seen.append((x.clone(), torch.as_tensor(t).expand(len(x)).double()))
                return torch.zeros(len(positions), V)
            SAMPLERS[name](denoise, lambda logits: logits.argmax(-1), text, tokens, tokens != MASK, 4, torch.Generator().manual_seed(0))
            if given_first or name in ('first_hitting', 'confidence', 'reparam'):
                for x, t in seen:
                    assert torch.allclose(text.masked_share(t), (x == MASK).double().mean(1), atol=1e-6)
            else:
                assert all((t == t[0]).all() for _, t in seen) and set(t[0].item() for _, t in seen) <= {1., .75, .5, .25}


def test_init_state_counts_masks_outside_the_block_in_the_clock():
    tokens = torch.full((2, 4), MASK)
    tokens[1, 0] = 0
    given = torch.tensor([[False, False, True, True]] * 2)
    _, masked, clock = init_state(MaskedText(V), tokens, given)
    assert masked.sum(1).tolist() == [2, 1]
    assert clock(torch.tensor([2, 1])).tolist() == [1., .75] and clock(torch.tensor([0, 0]), t=.9).tolist() == [.5, .5]


def released_in_the_first_step(vocabulary, steps, shape, denoise, propose, seed=0, name='ancestral'):
    text, count = MaskedText(vocabulary), []

    class Enough(Exception):
        pass

    def on_step(tokens, *said):
        count.append((tokens != vocabulary).sum().item())
        raise Enough

    with pytest.raises(Enough):
        SAMPLERS[name](denoise, propose, text, torch.full(shape, vocabulary), torch.zeros(shape, dtype=torch.bool), steps,
                       torch.Generator().manual_seed(seed), on_step)
    return count[0]


@pytest.mark.parametrize('name', ['ancestral', 'cached', 'remdm', 'dfm'])
def test_release_rate_equals_u_at_4096_steps(name):
    """ Four million positions; what is released is drawn apart, so the proposal may be anything. """
    shape, u = (4096, 1024), 1 / 4096
    count = released_in_the_first_step(50257, 4096, shape, lambda x, t, positions, rows=None: positions, torch.zeros_like, name=name)
    n = math.prod(shape)
    assert abs(count - n * u) < 5 * math.sqrt(n * u * (1 - u))


def test_release_rate_equals_u_with_real_proposals_over_50257_ids():
    shape, u, vocabulary = (16, 64), 1 / 16, 50257
    propose = make_propose(1.0, 1.0, torch.Generator().manual_seed(1))
    count = released_in_the_first_step(vocabulary, 16, shape, lambda x, t, positions: torch.zeros(len(positions), vocabulary), propose)
    n = math.prod(shape)
    assert abs(count - n * u) < 5 * math.sqrt(n * u * (1 - u))


def test_proposals_follow_the_softmax_at_a_temperature_in_float32():
    logits = torch.tensor([2., 0., -1., -30.]).expand(200_000, 4)
    for temperature in (1.0, 0.5):
        x = make_propose(temperature, 1.0, torch.Generator().manual_seed(0))(logits)
        p = (logits[0] / temperature).softmax(0)
        share = torch.bincount(x, minlength=4) / 200_000
        assert ((share - p).abs() <= 5 * (p * (1 - p) / 200_000).sqrt() + 1e-9).all()
    assert (make_propose(0.0, 1.0, None)(logits) == 0).all()


def test_nucleus_keeps_the_boundary_token_and_always_the_top_one():
    logits = torch.tensor([.15, .5, .3, .05]).log()
    kept = lambda p: (nucleus_filter(logits, p) > -torch.inf).tolist()  # noqa: E731
    assert kept(0.0) == [False, True, False, False]
    assert kept(0.4) == [False, True, False, False]
    assert kept(0.6) == [False, True, True, False]
    assert kept(0.81) == [True, True, True, False]
    assert kept(1.0) == [True] * 4


# ---- the directions, on a network that is known

EOS, PAD = 1, 2                                                          # of the V = 3 ids of the toy


class Known(Network):
    """ A two-stream network that says what its condition tells it: text logits from the latents' first number (5 when null), and
    latents, as v, whose x0 is the first token of the text (or -1 where the text is all MASK). Records its clocks. """
    streams, n_latents, latent_dim, seq_len, latent_tokens, depth, width = ('text', 'latent'), 1, 2, L, 1, 1, 1

    def __init__(self):
        self.config, self.clocks, self.latent = self, [], GaussianLatents(torch.ones(2))

    def forward(self, tokens, z, t_text, t_latent, positions=None, predict=('text', 'latent')):
        self.clocks.append((t_text[0].item(), t_latent[0].item()))
        logits = out = None
        if 'text' in predict:
            conditional, null = torch.tensor([1., 0., 2.]), torch.tensor([0., 3., 0.])
            logits = torch.where((t_latent == 1)[:, None, None], null, conditional).expand(len(tokens), L, 3).clone()
            logits = logits.flatten(0, 1)[positions]
        if 'latent' in predict:
            all_masked = (tokens == MASK).all(1)
            x0 = torch.where(all_masked, -1., tokens[:, 0].float())[:, None, None].expand(z.shape)
            a, s = (x[:, None, None] for x in self.latent.alpha_sigma(t_latent))
            out = (a * z - x0) / s                                       # from x0 = a z_t - s v
        return logits, out


def known_run(**changes):
    run = SimpleNamespace(next_token=None, fills_masks=True, model=Known(), streams=('text', 'latent'), out_dir='out/toy', device='cpu', L=L, row_calls=0,
                          lengths=None, banned=[], text=MaskedText(V), latent=GaussianLatents(torch.ones(2)),
                          dtype='float32', config=dict(mode='unconditional'),
                          tokenizer=SimpleNamespace(eos=EOS, pad=PAD, decode=lambda ids: ids, encode=lambda t: [0] * len(t)))
    vars(run).update(changes)
    return run


def test_text_guidance_1_and_0_are_the_two_models_and_between_is_their_mixture():
    conditional, null = torch.tensor([1., 0., 2.]).log_softmax(0), torch.tensor([0., 3., 0.]).log_softmax(0)
    for g, expected, calls in ((1.0, conditional, 1), (0.0, null, 1), (2.0, (2 * conditional - null).log_softmax(0), 2),
                               (.5, (.5 * conditional + .5 * null).log_softmax(0), 2)):
        run = known_run()
        ids = directions.l2t(run, torch.zeros(20_000, 1, 2), guidance=g, sampler='first_hitting', steps=1, batch=20_000)
        share = torch.bincount(ids.flatten(), minlength=3) / ids.numel()
        assert (share - expected.exp()).abs().max() < 5 * math.sqrt(.25 / ids.numel()), g
        assert run.row_calls == 20_000 * calls


@pytest.mark.parametrize('solver', SOLVERS)
def test_t2l_follows_its_text_and_guidance_moves_between_and_beyond_the_two_predictions(solver):
    tokens = torch.tensor([[0, 1, 2, 2], [2, 1, 2, 2], [1, 1, 2, 2]])
    for g, expected in ((1.0, [0., 2., 1.]), (0.0, [-1., -1., -1.]), (2.0, [1., 5., 3.])):
        run = known_run()
        z = directions.t2l(run, tokens, solver=solver, latent_steps=6, guidance=g)
        assert torch.allclose(z, torch.tensor(expected)[:, None, None].expand(3, 1, 2), atol=1e-5)
        assert {t for t, _ in run.model.clocks} == {1.0: {0.}, 0.0: {1.}, 2.0: {0., 1.}}[g], 'the text clock of the two models'
        times = {t for _, t in run.model.clocks}
        assert max(times) == 1 and len(times) == 6 and min(times) > 0, 'from t = 1, and no call at t = 0'


@pytest.mark.parametrize('name, knobs', [('ancestral', {}), ('confidence', {}), ('remdm', dict(eta=.3)), ('dfm', {})])
def test_joint_sampling_runs_both_clocks_down_together_with_one_call_a_step(name, knobs):
    run = known_run()
    tokens, z = directions.unconditional(run, 10, steps=4, sampler=name, batch=5, **knobs)
    assert tokens.shape == (10, L) and (tokens < V).all() and z.isfinite().all() and run.row_calls == 4 * 10
    assert run.model.clocks == [(t, t) for t in (1., .75, .5, .25)] * 2
    calls, run = [], known_run()
    network = run.model
    run.model = Network(lambda tokens, *rest: calls.append(tokens.clone()) or network(tokens, *rest))
    run.model.config = network
    _, z = directions.unconditional(run, 10, steps=4, sampler=name, **knobs)
    first = calls[-1][:, 0]                                              # what the last call said of the latent is the latent
    x0 = torch.where((calls[-1] == MASK).all(1), -1, first).float()
    assert torch.allclose(z, x0[:, None, None].expand(z.shape), atol=1e-5)


@pytest.mark.parametrize('name', SAMPLERS)
def test_each_row_is_written_from_its_own_latent(name):
    def reads_z(tokens, z, t_text, t_latent, positions, predict):
        return 50. * torch.nn.functional.one_hot(z[:, 0, 0].long(), 3).float()[:, None].expand(-1, L, 3).flatten(0, 1)[positions], None
    model = Network(reads_z)
    model.config = Known()
    ids = torch.arange(30) % 3
    z = ids[:, None, None].float().expand(30, 1, 2)
    assert (directions.l2t(known_run(model=model), z, sampler=name, steps=9, batch=16) == ids[:, None]).all()


def test_an_edit_writes_anew_where_the_other_latent_wants_another_token_and_keeps_what_both_find_unlikely():
    def reads_z(tokens, z, t_text, t_latent, positions, predict):
        logits = torch.zeros(*tokens.shape, 5)
        logits[:, :, 3] = 9                                              # an EOS, which an edit does not write,
        logits[:, :, 0] = 4                                              # everywhere 0, whatever the latent says,
        logits[:, 2] = 4 * torch.nn.functional.one_hot(z[:, 0, 0].long(), 5)    # but at 2 what it says
        return logits.flatten(0, 1)[positions], None
    model = Network(reads_z)
    model.config = Known()
    run = known_run(model=model, text=MaskedText(5), tokenizer=SimpleNamespace(eos=3, pad=4))
    z_now, z = torch.zeros(5, 1, 2), torch.ones(5, 1, 2)
    tokens = torch.tensor([[2, 1, 0, 2]]).repeat(5, 1)
    assert (directions.edit(run, tokens, z_now, z, 1e-6) == torch.tensor([2, 1, 1, 2])).all(), 'at least one'
    assert (directions.edit(run, tokens, z_now, z, 1.0) == torch.tensor([0, 0, 1, 0])).all()
    with pytest.raises(ValueError, match='length=3'):
        directions.edit(run, tokens, z_now, z, length=3)
    two = directions.edit(run, tokens, z_now, z, .5)
    assert (two[:, 2] == 1).all() and ((two != tokens).sum(1) == 2).all()
    ended = torch.tensor([[2, 3, 4, 4]]).repeat(5, 1)                    # nor does it touch a PAD that loses
    for lengths in (None, (2, 2)):                                       # a run that is given its ends: log p is inf there
        run.lengths = lengths
        assert (directions.edit(run, ended, 4 * z, z, 1e-6) == torch.tensor([0, 3, 4, 4])).all()


WRITE, MAKE = {'l2t', 'text', 'infill'}, {'t2l', 'latent'}
BOTH = WRITE | MAKE | {'t2l2t'}
MEASURE = {'l2t', 't2l', 'text', 'infill', 'sts', 'image', 'nelbo'}
ORDERS = {'importance', 'orders'}
CAN = {  # streams, process, mode: the directions, the tasks
    ('text latent', 'masked', 'l2t'): (WRITE | {'embed', 'edit'}, WRITE | ORDERS | {'image', 'nelbo', 'edit'}),
    ('text latent', 'masked', 't2l'): (MAKE, {'t2l', 'sts', 'image', 'nelbo'}),
    ('text latent', 'masked', 'unconditional'): (BOTH | {'embed', 'edit', 'unconditional'}, MEASURE | ORDERS | {'edit', 'unconditional'}),
    ('text latent', 'masked', 'unconditional+l2t+t2l'): (BOTH | {'embed', 'edit', 'unconditional'}, MEASURE | ORDERS | {'edit', 'unconditional'}),
    ('text latent', 'masked', 't2l:5,l2t'): (BOTH | {'embed', 'edit'}, MEASURE | ORDERS | {'edit'}),
    ('text latent', 'gidd', 'unconditional+l2t+t2l'): (BOTH, MEASURE | {'self_correction'}),
    ('text latent', 'hdlm', 'unconditional+l2t+t2l'): (BOTH, MEASURE),
    ('text latent', 'masked', 'causal'): (WRITE, {'l2t', 'text', 'image', 'nelbo'}),
    ('text', 'masked', 'unconditional'): ({'text', 'infill', 'embed'}, {'text', 'infill', 'nelbo'} | ORDERS),
    ('text', 'gidd', 'unconditional'): ({'text', 'infill'}, {'text', 'infill', 'self_correction', 'nelbo'}),
    ('text', 'masked', 'causal'): ({'text', 'infill'}, {'text', 'nelbo'}),
    ('latent', 'masked', 'unconditional'): ({'latent'}, {'nelbo'})}


def measures(task, run):
    if task.NEEDS.missing(run):
        return False
    try:
        getattr(task, 'prepare', lambda *_: None)(run, dict(sts='', classes='', scorer=''))
    except ValueError as error:
        return not str(error).startswith(run.out_dir)                    # or a knob is missing
    return True


@pytest.mark.parametrize('streams, process, mode', CAN)
def test_a_run_can_be_asked_what_it_has_learned_and_nothing_else(streams, process, mode):
    text = dict(masked=MaskedText(9), gidd=GIDD(9), hdlm=HDLM(9, torch.arange(9) % 4))[process]
    run = SimpleNamespace(out_dir='R', streams=tuple(streams.split()), text=text, tokenizer=SimpleNamespace(kind='bpe'),
                          config=dict(mode=mode), fills_masks=mode != 'causal',
                          meta=dict(encoder={'id': 'lsa'}, source=dict(image_size=8)))

    def can():
        return {name for name, needs in directions.NEEDS.items() if not needs.missing(run)}

    def can_measure():
        return {name for name, task in evaluate.all_tasks().items() if measures(task, run)}
    drawn, expected = CAN[streams, process, mode]
    assert can() == drawn and can_measure() == expected
    run.tokenizer.kind, run.meta['encoder'] = 'esm', None
    more = {'protein'} if 'importance' in expected else set()            # of masked text
    assert can() == drawn and can_measure() == expected - {'sts', 'edit'} | more
    run.meta['source'] = None
    assert can_measure() == (expected | more) - {'sts', 'image', 'edit'}


def test_joint_sampling_refuses_what_needs_a_fixed_condition_or_another_number_of_calls():
    for knobs in (dict(sampler='first_hitting'), dict(sampler='cached'), dict(sampler='reparam'), dict(solver='heun'),
                  dict(guidance=2.0), dict(block_size=2)):
        with pytest.raises(ValueError, match='joint'):
            directions.unconditional(known_run(), 2, **knobs)
    with pytest.raises(ValueError, match='mode=text'):
        directions.unconditional(known_run(streams=('text',)), 2)


def test_infilling_keeps_the_template_and_writes_no_EOS_or_PAD_inside_it():
    run, n = known_run(), 500
    tokens = torch.tensor([[0, MASK, MASK, EOS]]).repeat(n, 1)
    for name in SAMPLERS:
        for block in (0, 2):
            ids = writing.write(run, tokens, tokens != MASK, torch.zeros(n, 1, 2), inner=tokens == MASK, sampler=name, temperature=1.0,
                               block_size=block, steps=3)
            assert (ids == torch.tensor([0, 0, 0, EOS])).all(), 'of three ids two are EOS and PAD'
    free = writing.write(run, tokens, tokens != MASK, None, sampler='ancestral')
    assert (free[:, 1:3] == EOS).double().mean() > .8, 'without a latent the null model speaks, and it likes EOS'
    assert {t for _, t in run.model.clocks[-3:]} == {1.}


def test_templates_hold_masks_of_one_many_and_all_the_rest():
    run = known_run(L=12, tokenizer=SimpleNamespace(eos=EOS, pad=PAD, kind='bpe', encode=lambda t: [0] * len(t.split())))
    tokens, given, inner = read_template(run, 'A [MASK] runs on the [MASK:3] .')
    assert tokens.tolist() == [[0, MASK, 0, 0, 0, MASK, MASK, MASK, 0, EOS, PAD, PAD]]
    assert torch.equal(given, tokens != MASK) and torch.equal(inner, ~given)
    tokens, given, inner = read_template(run, '[MASK:2] dog [MASK:*]')
    assert tokens.tolist() == [[MASK, MASK, 0] + [MASK] * 9] and inner.tolist() == [[True, True] + [False] * 10]
    for wrong, words in (('no gap', 'no \\[MASK\\]'), ('[MASK:*] end', 'at the end'), ('[MASK:12]', 'at most 11 and an EOS')):
        with pytest.raises(ValueError, match=words):
            read_template(run, wrong)


def test_rerank_keeps_the_nearest_of_its_candidates(monkeypatch):
    embed = lambda texts: torch.tensor([[[1.0, sum(t) - 5.0]] for t in texts])  # noqa: E731  the toy's encoder: the sum of its ids
    monkeypatch.setattr(drafts, 'encode', lambda run, texts: embed(texts))
    run = known_run(stats=SimpleNamespace(standardise=lambda z: z), tokenizer=SimpleNamespace(eos=EOS, pad=99, decode=lambda ids: ids))
    raw = embed([[0, 0, 0, 0], [2, 2, 2, 2], [0, 1, 0, 0], [2, 2, 0, 0]] * 5)
    one, cosine_1 = drafts.nearest_of(run, raw, 1, temperature=1.0, sampler='first_hitting')
    many, cosine_8 = drafts.nearest_of(run, raw, 8, sampler='first_hitting')
    assert torch.allclose(cosine_8, drafts.closeness(run, many, raw)) and cosine_8.mean() > cosine_1.mean() + .05

    written = torch.tensor([[0, 0, 0, 0], [2, 2, 2, 2], [1, 0, 0, 0], [2, 2, 2, 2]])
    seen = []
    monkeypatch.setattr(directions, 'write', lambda *args, several=False, **how: seen.append(several) or written)
    best, cosine = drafts.nearest_of(run, raw[:2], 2)
    assert best.tolist() == [[0, 0, 0, 0], [2, 2, 2, 2]] and torch.allclose(cosine, torch.ones(2))
    assert seen == [True], 'greedy candidates would all be the same'


@pytest.mark.parametrize('knobs, words', [(dict(sampler='magic'), 'magic'), (dict(score='best'), 'best'), (dict(prefer='x'), 'uncertain'),
                                          (dict(remask='x'), 'rescale'), (dict(alpha=2.5), 'alpha'), (dict(repeat_cap=1.), 'repeat_cap'),
                                          (dict(sampler='ancestral', by_importance=True), 'by_importance'),
                                          (dict(steps=-1), 'steps')])
def test_samplers_that_do_not_exist_are_refused(knobs, words):
    with pytest.raises(ValueError, match=words):
        directions.l2t(known_run(), torch.zeros(1, 1, 2), **knobs)
    with pytest.raises(ValueError, match='dpmpp_2m'):
        directions.t2l(known_run(), torch.zeros(1, L, dtype=torch.int64), solver='euler')


def test_an_unknown_keyword_is_refused_with_the_nearest_legal_one():
    run, z, tokens = known_run(), torch.zeros(1, 1, 2), torch.zeros(1, L, dtype=torch.int64)
    stats = SimpleNamespace(standardise=lambda z: z, destandardise=lambda z: z)
    for function, args in ((directions.l2t, (z,)), (writing.write, (tokens, tokens == 0, z)), (directions.t2l, (tokens,)),
                           (directions.unconditional, (1,)), (drafts.nearest_of, (z, 1)), (common.write_from, (z, None)),
                           (common.make_latents, (tokens, 0))):
        for wrong in ('temprature', 'latent_step'):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'"):
                function(known_run(stats=stats), *args, **{wrong: 3})
    with pytest.raises(ValueError, match=r'temperature: -3, expected None \| \[0, 100\]'):
        directions.l2t(run, z, temperature=-3)
    assert SamplingKnobs(guidance=np.float32(2), steps=4.0) == SamplingKnobs(guidance=2.0, steps=4)


def test_a_bare_text_is_not_taken_for_its_characters():
    run = known_run(encoder=lambda texts: torch.zeros(len(texts), 1, 2))
    assert encode(run, ['a text', 'b']).shape == (2, 1, 2)
    for function in (encode, pack, common.embed):
        with pytest.raises(ValueError, match=r"found one str: write \['a text'\]"):
            function(known_run(encoder=run.encoder, meta={'encoder': {'id': 'lsa'}}), 'a text')


def test_a_text_that_is_too_long_is_named_with_its_place_and_length():
    run = known_run(meta={})
    with pytest.raises(ValueError, match="text 2 of 2, 'a long text', has 11 tokens, out/toy reads at most 3 and an EOS"):
        pack(run, ['ab', 'a long text'])
    with pytest.raises(ValueError, match="my.txt, line 7, 'a long text', has 11"):
        pack(run, ['a long text'], places=['my.txt, line 7'])
    assert pack(run, ['a long text'], cut=True).shape == (1, L)


def test_files_of_texts_are_read_by_their_kind_and_every_text_has_its_place(tmp_path):
    (tmp_path / 'a.txt').write_text('one\n\n  two  \n')
    (tmp_path / 'a.jsonl').write_text('{"text": "one", "other": "1"}\n\n{"text": "two", "other": "2"}\n')
    (tmp_path / 'a.csv').write_text('other,text\n1,one\n2,two\n')
    with gzip.open(tmp_path / 'b.txt.gz', 'wt') as f:
        f.write('one\n\ntwo\n')
    for name, places in (('a.txt', ('line 1', 'line 3')), ('a.jsonl', ('record 1', 'record 2')), ('a.csv', ('record 1', 'record 2')),
                         ('b.txt.gz', ('line 1', 'line 3'))):
        path = str(tmp_path / name)
        assert list(read_texts(path)) == [(f'{path}, {place}', text) for place, text in zip(places, ('one', 'two'))]
    assert [text for _, text in read_texts(str(tmp_path / 'a.jsonl'), 'other')] == ['1', '2']
    (tmp_path / 'empty.txt').write_text('\n \n')
    for name, words in (('empty.txt', 'no text in it'), ('nowhere.txt', 'no such file'), ('', 'a folder')):
        with pytest.raises(ValueError, match=words):
            list(read_texts(str(tmp_path / name)))


def test_a_file_of_texts_may_hold_bytes_that_are_no_utf_8_and_its_name_a_comma(tmp_path, capsys):
    path = tmp_path / 'a,b.txt'
    path.write_bytes('one\ncaf\u00e9\nth\u00e9\n'.encode('latin-1'))
    assert [text for _, text in read_texts(str(path))] == ['one', 'caf\ufffd', 'th\ufffd']
    said = capsys.readouterr().err
    assert said.count('\n') == 1 and said.startswith(f'warning: {path}, line 2: ') and 'in 2 of 3 texts' in said


def test_what_a_run_cannot_do_with_a_text_is_said_in_one_line_each(finished, tmp_path):
    line = 'a red dog runs near the park number 3'
    long = ' '.join([line] * 9)
    files = {'own.txt': f'{line}\n\n{long}\n', 'blank.txt': '\n', 'own.jsonl': json.dumps({'text': line})}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    here = ['sample.py', f'--out_dir={finished}', '--device=cpu', '--steps=2']
    warned = [(['--text=これは日本語です'], "'これは日本語です' has no word that the encoder knows"),
              (['--mode=infill', '--text=a [MASK] dog', '--like=これは'], 'no word that the encoder knows'),
              ([f'--texts={tmp_path}/own.txt'], 'writes at most 31 and has seen no embedding of a longer text')]
    wrong = [(['--text=  '], 'is blank'), (['--text='], 'is blank'), (['--mode=infill', '--text=a [MASK]', '--like= '], 'is blank'),
             ([f'--texts={tmp_path}/blank.txt'], 'no text in it'), (['--mode=embed', f'--texts={tmp_path}/own.txt',
              f'--save={tmp_path}/h.npy'], 'own.txt, line 3, '), (['--which=step-00000001', '--text=a'], 'no checkpoint'),
             (['--mode=embed', '--text=a', f'--save={tmp_path}'], 'this is a folder'), (['--temperature=-3', '--text=a'], 'temperature'),
             ([f'--out_dir={tmp_path}', '--text=a'], 'no run in')]
    results = run_each([*here, f'--texts={tmp_path}/own.jsonl'], *([*here, *args] for args, _ in warned + wrong))
    rc, out, err = results[0]
    assert rc == 0 and out.count('\n  -> ') == 1 and f'\n{line}\n' in out and 'error' not in err, 'no raw JSON'
    for (rc, _, err), (args, words) in zip(results[1:], warned):
        assert rc == 0 and words in err.splitlines()[0] and err.startswith('warning: '), (args, err)
    for (rc, _, err), (args, words) in zip(results[1 + len(warned):], wrong):
        assert rc == 2 and words in err and err.count('\n') == 1, (args, err)
    assert not (tmp_path / 'h.npy').exists()


def test_an_empty_text_is_not_silent(finished, monkeypatch, capsys):
    for name in configurator.read_knobs(sample.__file__):
        monkeypatch.setattr(sample, name, getattr(sample, name, None), raising=False)         # to be put back
    monkeypatch.setattr(sys, 'argv', ['sample.py', f'--out_dir={finished}', '--text=a red dog', '--device=cpu'])
    monkeypatch.setattr(directions, 'l2t', lambda run, z, **how: torch.full((len(z), run.L), run.tokenizer.eos))
    sample.main()
    assert 'warning: 1 of 1 texts are empty: the model wrote their end (EOS) first' in capsys.readouterr().err
