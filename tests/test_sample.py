""" Every sampler against the enumerated law of what it claims to sample, and every direction. """
import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import samplers
from diffusion import MaskedText
from encoders import far_off
from launch import run_each
from noise import Noise, rows_of
from processes.gidd import GIDD
from processes.hdlm import HDLM
from samplers import SAMPLERS, in_blocks, make_propose, no_callback, nucleus_filter
from sampling import drafts
from sampling.denoise import guided_logits
from sampling.inputs import pack, read_latents, read_texts
from sampling.knobs import SamplingKnobs
from sampling.latents import make_latents, write_both
from sampling.run import NEEDS
from sampling.solvers import SOLVERS
from sampling.writing import write
from tasks import TASKS
from toys import (EOS, FILL_MASKS, L, MASK, PAD, STATES, V, Known, Network, Toy, any_order_law,
                  as_v, chain_law, chi_square_z, index, l2t, net_of, optimal_denoiser,
                  random_denoiser, release_chain, toy_run)

N = 60_000


def draw(name, table, steps, n=N, tokens=None, given=None, seed=0, schedule='loglinear',
         temperature=1.0, on_step=no_callback, calls=None, block=0, nucleus=1.0, rows=None,
         **knobs):
    """ calls: a list that takes the number of rows of every network call. rows: of the noise. """
    toy = Toy(table)
    tokens = torch.full((n, L), MASK) if tokens is None else tokens
    noise = Noise(seed, rows_of(len(tokens)) if rows is None else rows)
    given = torch.zeros_like(tokens, dtype=torch.bool) if given is None else given

    def denoise(x, t, positions, rows=None):
        if calls is not None:
            calls.append(len(x))
        return toy(x, None, t, None, positions)[0]
    sampler = partial(SAMPLERS[name].function, **knobs)
    sampler = in_blocks(sampler, block) if block else sampler
    propose = make_propose(temperature, nucleus)
    return sampler(denoise, propose, MaskedText(V, schedule), tokens, given, steps, noise,
                   lambda x, *said: on_step(x))


def shares(schedule, steps):
    """ M at the ends of the steps. """
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return MaskedText(V, schedule).masked_share(times).tolist()


# ---- the law of each sampler

@pytest.mark.parametrize('schedule, steps', [('loglinear', 1), ('loglinear', 2), ('cosine', 5)])
@pytest.mark.parametrize('name, knobs', [
    ('ancestral', {}), ('cached', {}), ('remdm', dict(eta=0.0)), ('dfm', dict(alpha=1.0))])
def test_without_remasking_samplers_have_the_law_of_the_ancestral_chain(name, knobs, steps,
                                                                        schedule):
    table, M = random_denoiser(), shares(schedule, steps)
    law = chain_law(table, [(m - m_s) / m for m, m_s in zip(M, M[1:])])
    assert chi_square_z(draw(name, table, steps, schedule=schedule, **knobs), law) < 6


def remdm_chain(M, eta):
    for m_t, m_s in zip(M, M[1:]):
        a_t, a_s = 1 - m_t, 1 - m_s
        g = eta if a_t == 0 else min(eta, m_s / a_t)
        yield (a_s - (1 - g) * a_t) / (1 - a_t), g


def dfm_chain(M, alpha):
    for m_t, m_s in zip(M, M[1:]):
        g = 0. if m_t == 1 else min(1, m_s * (1 - (m_s / m_t) ** (alpha - 1)) / (1 - m_t))
        yield 1 - (m_s - (1 - m_t) * g) / m_t, g


@pytest.mark.parametrize('name, schedule, chain_of, knobs', [
    ('remdm', 'loglinear', remdm_chain, dict(eta=.3)),
    ('dfm', 'loglinear', dfm_chain, dict(alpha=2.)), ('dfm', 'cosine', dfm_chain, dict(alpha=1.5))])
def test_remasking_has_the_law_of_its_chain_and_keeps_marginals(name, schedule, chain_of, knobs):
    table, M, states = random_denoiser(), shares(schedule, 4), []
    out = draw(name, table, 4, schedule=schedule, **knobs,
               on_step=lambda x: states.append((x == MASK).double().mean().item()))
    assert chi_square_z(out, release_chain(table, list(chain_of(M, **knobs)))) < 6
    ancestral = chain_law(table, [(m - m_s) / m for m, m_s in zip(M, M[1:])])
    assert chi_square_z(out, ancestral) > 10, 'it is another chain than ancestral'
    for share, m in zip(states, M[1:]):
        assert abs(share - m) < 5 * math.sqrt(m * (1 - m) / (N * L)) + 1e-12


def test_first_hitting_has_the_law_of_the_model_and_blocks_that_of_one_after_the_other():
    table, (p, optimal) = random_denoiser(), optimal_denoiser()
    assert chi_square_z(draw('first_hitting', table, L), any_order_law(table)) < 6
    assert chi_square_z(draw('first_hitting', optimal, L), p) < 6, "the data's own law"
    law = any_order_law(table, block=2)
    assert chi_square_z(draw('first_hitting', table, L, block=2), law) < 6
    assert chi_square_z(draw('ancestral', table, 400, block=2, n=20_000), law) < 6
    assert chi_square_z(draw('first_hitting', table, L), law) > 20, 'blocks change the law'


def test_cached_writes_what_ancestral_writes_in_at_most_L_calls_a_row():
    table, n, steps, calls, all_calls = random_denoiser(), 64, 200, [], []
    a = draw('ancestral', table, steps, n=n, temperature=0.0, calls=all_calls)
    c = draw('cached', table, steps, n=n, temperature=0.0, calls=calls)
    assert torch.equal(a, c)
    assert sum(all_calls) == n * steps and n < sum(calls) <= n * L


# ---- confidence

@pytest.mark.parametrize('eos', [1, 0])
@pytest.mark.parametrize('penalty, expected', [(0.0, [3, 2, 0, 1]), (50.0, [2, 0, 1, 3]),
                                               (1e39, [2, 0, 1, 3])])
def test_the_end_of_a_text_may_be_held_back(eos, penalty, expected):
    """ The last position is surest, of its EOS, whose id need not be one of the last two. """
    certainty = torch.tensor([.80, .70, .90, .95])
    p = torch.full((4, 3), .01)
    p[:3, 1 - eos], p[3, eos] = certainty[:3], certainty[3]
    seen = [torch.zeros(4, dtype=torch.bool)]
    text = samplers.confidence(
        lambda tokens, t, positions: p[positions].log(), make_propose(0., 1.), MaskedText(3),
        torch.full((1, 4), 3), torch.zeros(1, 4, dtype=torch.bool), 4, Noise(0, rows_of(1)),
        lambda x, *said: seen.append(x[0] != 3), end_penalty=penalty, ends=(eos, 2))
    order = [(after ^ before).nonzero().item() for before, after in zip(seen, seen[1:])]
    assert text.tolist() == [[1 - eos] * 3 + [eos]] and order == expected


@pytest.mark.parametrize('prefer', ['certain', 'uncertain'])
def test_confidence_unmasks_the_most_or_the_least_certain_position_first(prefer):
    table, order = random_denoiser(), []
    draw('confidence', table, L, n=1, temperature=0.0, prefer=prefer,
         on_step=lambda x: order.append(x.clone()))
    state = torch.full((1, L), MASK)
    for after in order:
        p = table[index(state)][0].float().softmax(-1)                   # (L, V), by hand
        certainty = p.amax(-1)
        free = (state[0] == MASK).nonzero().flatten().tolist()
        pick = max if prefer == 'certain' else min
        assert (after != state)[0].nonzero().item() == pick(free, key=lambda i: certainty[i])
        state = after


def test_importance_weighs_the_uncertainty_of_what_is_proposed():
    logits = torch.tensor([[4., 0, 0], [0, 2, 0], [0, 0, 1], [0, 0, 1]])     # ever less certain
    important = torch.tensor([1., .6, .2, .5])                   # of the ids 0, 1, 2, and MASK
    by = -logits.log_softmax(1).amax(1) * important[logits.argmax(1)]
    for prefer, expected in (('certain', by), ('uncertain', -by)):
        shown = [torch.zeros(1, L, dtype=torch.bool)]
        samplers.confidence(
            lambda x, t, positions: logits[positions % L], lambda logits, u: logits.argmax(-1),
            MaskedText(V), torch.full((1, L), MASK), torch.zeros(1, L, dtype=torch.bool), L,
            Noise(0, rows_of(1)), lambda x, *said: shown.append(x != MASK), prefer=prefer,
            importance=lambda tokens: important[tokens])
        order = [(after ^ before).int().argmax().item() for before, after in zip(shown, shown[1:])]
        assert order == expected.argsort(stable=True).tolist()


# ---- what all share

@pytest.mark.parametrize('block', [0, 3])
@pytest.mark.parametrize('name', FILL_MASKS)
def test_given_tokens_never_change_and_nothing_stays_masked(name, block):
    tokens = STATES.repeat(4, 1)
    given = tokens != MASK
    knobs = {'remdm': {'eta': .5}, 'dfm': {'alpha': 2.}}.get(name, {})
    for steps in (1, 3, 7):
        states = [tokens]
        out = draw(name, random_denoiser(), steps, tokens=tokens, given=given, block=block,
                   on_step=lambda x: states.append(x.clone()), **knobs)
        assert (out < V).all() and torch.equal(out[given], tokens[given])
        assert torch.equal(tokens, STATES.repeat(4, 1)), 'the input was written into'
        for before, after in zip(states, states[1:]):
            changed = (before != MASK) & (after != before)
            assert not changed.any() or name in ('remdm', 'dfm')
            assert (after[changed] == MASK).all() and not changed[given].any()


@pytest.mark.parametrize('block', [0, 3])
@pytest.mark.parametrize('name', FILL_MASKS)
def test_a_row_is_written_the_same_alone_and_beside_any_others(name, block):
    """ Whatever is known of the others, in whatever order they stand. """
    rng = torch.Generator().manual_seed(0)
    tokens = STATES[torch.randint(len(STATES), (40,), generator=rng)].repeat_interleave(2, 0)
    tokens[:10] = MASK
    rows, order = rows_of(40, 2), torch.randperm(80, generator=rng)
    knobs = {'remdm': {'eta': .5}, 'dfm': {'alpha': 2.}}.get(name, {})
    for steps in (2, 3, 7):
        def written(these):
            x = tokens[these]
            return draw(name, random_denoiser(), steps, tokens=x, given=x != MASK, block=block,
                        rows=rows[these.numpy()], **knobs)
        together = written(order)
        alone = torch.cat([written(order[i:i + 1]) for i in range(80)])
        assert torch.equal(together, alone)
        assert not torch.equal(together[order.argsort()][0:10:2], together[order.argsort()][1:10:2])


@pytest.mark.parametrize('name', FILL_MASKS)
def test_the_clock_of_the_network_is_that_of_the_bound_or_of_the_schedule(name):
    """ With tokens given (and always for first_hitting and confidence) the t with M(t) =
    n_masked / L per row; else the schedule's t. """
    for schedule in ('loglinear', 'cosine'):
        text = MaskedText(V, schedule)
        for given_first in (False, True):
            tokens = torch.full((6, L), MASK)
            tokens[:, 0] = 1 if given_first else MASK
            seen = []

            def denoise(x, t, positions, rows=None):
                seen.append((x.clone(), torch.as_tensor(t).expand(len(x)).double()))
                return torch.zeros(len(positions), V)
            def written():
                SAMPLERS[name].function(denoise, lambda logits, u: logits.argmax(-1), text, tokens,
                                        tokens != MASK, 4, Noise(0, rows_of(6)))
            written()
            by_share = given_first or name in ('first_hitting', 'confidence')
            if by_share:
                for x, t in seen:
                    share = (x == MASK).double().mean(1)
                    assert torch.allclose(text.masked_share(t), share, atol=1e-6)
            else:
                assert {t[0].item() for _, t in seen} <= {1., .75, .5, .25}

            # a text of which something is known does not change the clocks of the others
            if not given_first:
                clocks = [t[1:] for x, t in seen if len(x) == 6]
                tokens[0, 0] = 1
                seen.clear()
                written()
                now = [t[1:] for x, t in seen if len(x) == 6]
                assert name == 'cached' or len(now) == len(clocks) > 0
                assert all(torch.equal(a, b) for a, b in zip(now, clocks))


def test_proposals_follow_the_softmax_at_a_temperature():
    logits = torch.tensor([2., 0., -1., -30.]).expand(200_000, 4)
    for temperature in (1.0, 0.5):
        x = make_propose(temperature, 1.0)(logits, torch.rand(200_000, 2))
        p = (logits[0] / temperature).softmax(0)
        share = torch.bincount(x, minlength=4) / 200_000
        assert ((share - p).abs() <= 5 * (p * (1 - p) / 200_000).sqrt() + 1e-9).all()
    assert (make_propose(0.0, 1.0)(logits, None) == 0).all()


@pytest.mark.parametrize('first', [0, 50_256])
def test_unlikely_tokens_keep_their_mass_in_a_large_vocabulary(first):
    """ One token has .999. The others have so little that a sum in float32 would not change where
    one of them is added. Together they are drawn at their rate, each as often as the next. """
    V, n, likely = 50_257, 4000, .999
    p = torch.full((V,), (1 - likely) / (V - 1))
    p[first] = likely
    assert p[first] + p[1] == p[first]

    # numbers of which a half belongs to the others: the last .002, or the first
    u = torch.rand(n, 2)
    u[:, 0] = .002 * u[:, 0] + (.998 if first == 0 else 0)
    found = torch.cat([samplers.draw_from(p.expand(len(part), V), part) for part in u.split(50)])
    others = found[found != first]
    assert abs(len(others) / n - .5) < 5 * math.sqrt(.25 / n)
    counts = torch.histc(others.float(), 10, 0, V)
    expected = len(others) / 10
    assert ((counts - expected) ** 2 / expected).sum() < 9 + 6 * math.sqrt(2 * 9)
    assert len(others.unique()) > .965 * len(others), 'none of them stands for its neighbours'


def test_no_draw_takes_an_impossible_token_whatever_the_numbers_are():
    """ Also at the ends of (0, 1), and where most of the probabilities are 0. """
    least, most = 2.0 ** -53, 1 - 2.0 ** -24
    ends = torch.tensor([[a, b] for a in (least, .5, most) for b in (least, .5, most)])
    for V in (1, 2, 3, 10, 300):
        p = torch.rand(500, V) ** 9
        p = p.masked_fill(torch.rand(500, V) < .7, 0)
        p[torch.arange(500), torch.randint(V, (500,))] = 1e-30
        p = p * torch.tensor([1e-8, 1., 1e8, 1e30]).repeat(125)[:, None]
        for u in [*ends, None]:
            numbers = torch.rand(500, 2) if u is None else u.expand(500, 2)
            x = samplers.draw_from(p, numbers)
            assert (p.gather(1, x[:, None]) > 0).all(), (V, u)


PROCESSES = {**dict.fromkeys(SAMPLERS, MaskedText(V)), 'gidd': GIDD(V, .2),
             'hdlm': HDLM(V, torch.tensor([0, 1, 0]), xi=.9)}


@pytest.mark.parametrize('name', PROCESSES)
def test_extreme_knobs_write_texts_of_tokens_that_are_allowed(name):
    """ No NaN takes the first id, nothing stays masked, and a temperature next to 0 writes the
    likeliest text. """
    process, n = PROCESSES[name], 6
    sampler = (process.samplers or SAMPLERS).get(name) or process.samplers['ancestral']
    conditional, null = 20 * random_denoiser(0).float(), random_denoiser(1).float()

    def written(guidance=1., temperature=0., nucleus=1., **knobs):
        def denoise(x, t, positions, rows=None):
            state = F.pad(x, (0, L - x.shape[1]), value=MASK).clamp(max=MASK)
            logits = [table[index(state)].flatten(0, 1)[positions] for table in (conditional, null)]
            logits = guided_logits(guidance, lambda: logits[0], lambda: logits[1])
            banned = torch.where(positions % 2 == 0, 0, EOS)   # the first id, or an end
            return logits.scatter(1, banned[:, None], -torch.inf)
        tokens = torch.full((n, L), MASK)
        text = sampler.function(denoise, make_propose(temperature, nucleus), process, tokens,
                                tokens < 0, 3, Noise(0, rows_of(n)), ends=(EOS, PAD), **knobs)
        assert (text < V).all(), 'a MASK is left'
        assert (text[:, ::2] != 0).all() and (text[:, 1::2] != EOS).all()
        return text

    # temperature is no knob of self-correction, so its other draws stay draws
    greedy = written()
    for temperature in (1e-300, 1e-40, 1e-12):
        for nucleus in (1e-300, 1e-30, 1.):
            assert written(temperature=temperature, nucleus=nucleus).equal(greedy)
    penalties = (0., 1e30, 1e39, 1e300) if name == 'confidence' else (0.,)
    held_back = [written(temperature=1., end_penalty=penalty) for penalty in penalties[1:]]
    assert all(torch.equal(text, held_back[0]) for text in held_back)
    for guidance in (1., 100.):
        for temperature in (0., 1e-40, 1e-9, 1e-6, 1., 1e38):
            for nucleus in (1e-300, 1e-30, .5, 1.):
                for penalty in penalties:
                    for prefer in ('certain', 'uncertain'):
                        written(guidance, temperature, nucleus, end_penalty=penalty, prefer=prefer,
                                self_correct=2)


def test_nucleus_keeps_the_boundary_token_and_always_the_top_one():
    logits = torch.tensor([.15, .5, .3, .05]).log()
    for p, kept in ((0.0, [1]), (0.4, [1]), (0.6, [1, 2]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        assert (nucleus_filter(logits, p) > -torch.inf).nonzero().flatten().tolist() == kept


# ---- the directions, on a network that is known

def test_text_guidance_1_and_0_are_the_two_models_and_between_is_their_mixture():
    conditional = torch.tensor([1., 0., 2.]).log_softmax(0)
    null = torch.tensor([0., 3., 0.]).log_softmax(0)
    for g, calls in ((1.0, 1), (0.0, 1), (2.0, 2), (.5, 2)):
        net = net_of()
        ids = l2t(net, torch.zeros(20_000, 1, 2), guidance=g, sampler='first_hitting', steps=1,
                  sample_batch=20_000)
        share = torch.bincount(ids.flatten(), minlength=3) / ids.numel()
        expected = (g * conditional + (1 - g) * null).softmax(0)
        assert (share - expected).abs().max() < 5 * math.sqrt(.25 / ids.numel()), g
        assert net.row_calls == 20_000 * calls


@pytest.mark.parametrize('solver', SOLVERS)
@pytest.mark.parametrize('g, expected, clocks', [
    (1.0, [0., 2., 1.], {0.}), (0.0, [-1., -1., -1.], {1.}), (2.0, [1., 5., 3.], {0., 1.})])
def test_t2l_follows_its_text_and_guidance_moves_between_and_beyond_both_predictions(
        solver, g, expected, clocks):
    net, tokens = net_of(), torch.tensor([[0, 1, 2, 2], [2, 1, 2, 2], [1, 1, 2, 2]])
    z = make_latents(net, tokens, 3, SamplingKnobs(solver=solver, latent_steps=6, guidance=g))
    assert torch.allclose(z, torch.tensor(expected)[:, None, None].expand(3, 1, 2), atol=1e-5)
    assert {t for t, _ in net.model.clocks} == clocks
    times = {t for _, t in net.model.clocks}
    assert max(times) == 1 and len(times) == 6 and min(times) > 0, 'no call at t = 0'


def test_both_from_noise_are_a_plan_its_likeliest_text_and_the_latent_of_that():
    class Plans(Known):
        """ Draws -1 or 1 as a latent of no text, and writes 0 or 1 from it. """
        def logits_of(self, tokens, z, t_text, t_latent):
            logits = 9 * torch.stack([z[:, 0, 0] < 0, z[:, 0, 0] > 0, z[:, 0, 0] > 9], 1).float()
            return logits[:, None].expand(-1, L, -1)

        def latents_of(self, tokens, z, t_text, t_latent):
            plan = torch.where(t_text == 1, z[:, 0, 0].sign(), 5. + tokens[:, 0])
            return as_v(z, plan[:, None, None].expand(z.shape), t_latent)
    net = net_of(Plans())
    tokens, z = write_both(toy_run(net), 40, SamplingKnobs(seed=3))
    plan = make_latents(net, None, 40, SamplingKnobs(seed=3, solver='ancestral'))
    assert torch.equal(tokens, torch.where(plan[:, 0, :1] > 0, 1, 0).expand(40, L))
    assert torch.allclose(z, 5. + tokens[:, :1, None]) and 0 < tokens.float().mean() < 1


@pytest.mark.parametrize('name', FILL_MASKS)
def test_each_row_is_written_from_its_own_latent(name):
    def logits_of(tokens, z, t_text, t_latent):
        return 50. * F.one_hot(z[:, 0, 0].long(), 3).float()[:, None].expand(-1, L, 3)
    ids = torch.arange(30) % 3
    z = ids[:, None, None].float().expand(30, 1, 2)
    written = l2t(net_of(Network(logits_of)), z, sampler=name, steps=9, sample_batch=16)
    assert (written == ids[:, None]).all()


@pytest.mark.parametrize('lengths', [None, (2, 2)])
def test_an_edit_writes_anew_where_the_other_latent_wants_another_token(lengths):
    def logits_of(tokens, z, t_text, t_latent):
        logits = torch.zeros(*tokens.shape, 5)
        logits[:, :, 3] = 9                                  # an EOS, which an edit does not write,
        logits[:, :, 0] = 4                                  # everywhere 0, whatever z says,
        logits[:, 2] = 4 * F.one_hot(z[:, 0, 0].long(), 5)   # but at 2 what z
        return logits
    def encoder(texts):
        return torch.zeros(len(texts), 1, 2)
    encoder.remark = lambda text: ''
    net = net_of(Network(logits_of, vocab_size=5), eos=3, pad=4, lengths=lengths)
    run = toy_run(net, encoder=encoder)
    run.tokenizer = SimpleNamespace(eos=3, pad=4, kind='bpe',
                                    encode=lambda text: [int(c) for c in text],
                                    decode=lambda ids: ''.join(str(i) for i in ids if i < 3))

    def edited(text, strength):
        return run.edit([text], latents=torch.ones(1, 2), strength=strength)[0]
    assert edited('210', 1e-6) == '211', 'at least one'
    assert edited('210', 1.0) == '001'
    assert edited('210', .5) in ('011', '201'), 'two of three'
    assert edited('2', 1e-6) == '0', 'no PAD that loses is touched'
    with pytest.raises(ValueError, match='length=3'):
        run.edit(['210'], latents=torch.ones(1, 2), length=3)


def test_a_text_and_its_gaps_are_kept_and_no_EOS_or_PAD_is_written_inside():
    net, n = net_of(), 500
    tokens = torch.tensor([[0, MASK, MASK, EOS]]).repeat(n, 1)
    for name in FILL_MASKS:
        for block in (0, 2):
            knobs = SamplingKnobs(sampler=name, temperature=1.0, block_size=block, steps=3)
            ids = write(net, tokens, tokens != MASK, torch.zeros(n, 1, 2), knobs,
                        inner=tokens == MASK)
            assert (ids == torch.tensor([0, 0, 0, EOS])).all(), 'of three ids two are EOS and PAD'
    free = write(net, tokens, tokens != MASK, None, SamplingKnobs(sampler='ancestral'))
    assert (free[:, 1:3] == EOS).double().mean() > .8, 'the null model speaks, which likes EOS'


def test_drafts_correct_their_aim_by_what_the_nearest_have_missed_and_a_hit_ends_them(monkeypatch):
    """ A network that errs alike everywhere, but for the third latent. A text is its embedding; of
    the last latent's texts none has one. """
    aims, texts, keys = [], [], []                         # of each round
    raw = torch.tensor([[[3., 0]], [[0., 3]], [[-3., -3]], [[9., 9]]])

    def writes(net, tokens, known_mask, z, knobs, rows, **more):
        u = Noise(knobs.seed, rows).uniforms('token', 2).float()
        errs = torch.where(z[:, :, :1] < -2, 0., 1 + u.view(z.shape))
        aims.append(z)
        texts.append(z + errs * torch.tensor([.5, -.5]))
        keys.append(torch.from_numpy(rows))
        return texts[-1]
    monkeypatch.setattr(drafts, 'write', writes)
    monkeypatch.setattr(drafts, 'tidied', lambda net, tokens: tokens)
    def encoder(texts):
        e = torch.tensor([eval(text) for text in texts])
        return torch.where(e.sum(2, keepdim=True) > 9, 0., e)
    run = toy_run(encoder=encoder)
    run.decode = lambda tokens: [str(x) for x in tokens.tolist()]
    written = run.write(latents=raw, rerank=24)
    found = run.encode(written)

    assert aims[0].equal(raw.repeat_interleave(4, 0)) and len(aims[1]) < 16, 'the third is hit'
    assert all((z[-4:] == raw[3]).all() for z in aims), 'nothing says where to aim'
    for i in (0, 1):
        # the drafts of this text, round by round
        rounds = [(z[key[:, 0] == i], e[key[:, 0] == i], key[key[:, 0] == i, 1])
                  for z, e, key in zip(aims, texts, keys)]
        aim, e, first_keys = rounds[0]
        assert first_keys.tolist() == [0, 1, 2, 3]
        first = F.cosine_similarity(e[:, 0], raw[i], dim=1).max()
        for z, new, key in [one for one in rounds[1:] if len(one[0])]:
            assert key.tolist() == list(range(len(e), len(e) + 4)), 'each draws for itself'
            nearest = F.cosine_similarity(e[:, 0], raw[i], dim=1).argsort(descending=True)[:4]
            expected = aim[nearest] + (raw[i] - e[nearest]) / 2
            assert torch.allclose(z, expected)
            e = torch.cat([e, new])
            aim = torch.cat([aim, z])
        cosine = F.cosine_similarity(e[:, 0], raw[i], dim=1)
        assert len(e) > 4 and torch.allclose(found[i], e[cosine.argmax()])
        assert 1 - cosine.max() < (1 - first) / 2, 'what was missed is corrected'

    # with the third, which is hit at once, or without it, and alone
    for others in ([0, 1, 3], [0]):
        assert run.write(latents=raw[others], rerank=24)[0] == written[0]


# ---- what a run can do

WRITE, MAKE = {'l2t', 'text', 'infill'}, {'t2l', 'latent'}
BOTH = WRITE | MAKE | {'t2l2t'}
MEASURE = {'l2t', 't2l', 'text', 'infill', 'sts', 'image', 'nelbo'}
ORDERS = {'importance', 'orders'}
JOINT = {'edit', 'unconditional'}
CAN = {  # streams, process, mode: the directions, the tasks
    ('text latent', 'masked', 'l2t'):
        (WRITE | {'edit'}, WRITE | ORDERS | {'image', 'nelbo', 'edit'}),
    ('text latent', 'masked', 't2l'): (MAKE, {'t2l', 'sts', 'image', 'nelbo'}),
    ('text latent', 'masked', 'unconditional'):
        (BOTH | JOINT, MEASURE | ORDERS | JOINT),
    ('text latent', 'gidd', 'unconditional+l2t+t2l'): (BOTH, MEASURE),
    ('text latent', 'masked', 'causal'): (WRITE, {'l2t', 'text', 'image', 'nelbo'}),
    ('text', 'masked', 'unconditional'):
        ({'text', 'infill'}, {'text', 'infill', 'nelbo'} | ORDERS),
    ('text', 'masked', 'causal'): ({'text', 'infill'}, {'text', 'nelbo'}),
    ('latent', 'masked', 'unconditional'): ({'latent'}, {'nelbo'})}


def measures(task, run):
    if task.needs.missing(run.net):
        return False
    try:
        if task.prepare:
            task.prepare(run, dict(sts='', classes='', scorer='', damage=''))
    except ValueError as error:
        return not str(error).startswith(run.out_dir)                    # or a knob is missing
    return True


@pytest.mark.parametrize('streams, process, mode', CAN)
def test_a_run_can_be_asked_what_it_has_learned_and_nothing_else(streams, process, mode):
    text = dict(masked=MaskedText(V), gidd=GIDD(V))[process]
    net = net_of(Known(streams=streams.split()), mode, text)
    run = toy_run(net, out_dir='R')
    run.meta = dict(encoder={'id': 'lsa'}, source=dict(image_size=8))
    drawn, measured = CAN[streams, process, mode]
    assert {name for name in NEEDS if run.can(name)} == drawn
    assert {name for name, task in TASKS.items() if measures(task, run)} == measured
    run.meta = dict(encoder=None, source=None)
    now = {name for name, task in TASKS.items() if measures(task, run)}
    assert now == measured - {'sts', 'edit', 'image'}, 'without encoder and pictures'


@pytest.mark.parametrize('knobs, words', [
    (dict(sampler='magic'), 'magic'), (dict(prefer='best'), 'best'), (dict(eta=2.5), 'eta'),
    (dict(sampler='ancestral', by_importance=True), 'by_importance'), (dict(steps=0), 'steps'),
    (dict(temperature=-3), r'temperature: -3, expected None \| \[0, 100\]'),
    (dict(solver='euler'), 'dpmpp_2m')])
def test_wrong_knobs_are_refused(knobs, words):
    with pytest.raises(ValueError, match=words):
        toy_run().write(latents=torch.zeros(1, 2), **knobs)
    with pytest.raises(TypeError, match='temprature'):
        toy_run().write(latents=torch.zeros(1, 2), temprature=1)
    assert SamplingKnobs(guidance=np.float32(2), steps=4.0) == SamplingKnobs(guidance=2., steps=4)


# ---- texts and latents from a person

def test_latents_of_another_scale_are_said_and_whole_numbers_refused(tmp_path, capsys):
    run, path = toy_run(), tmp_path / 'z.npy'
    run.stats.mean, run.stats.std, run.stats.live = torch.tensor([3., 0.]), torch.ones(2), 1
    np.save(path, np.array([[3., 0.], [0., 60.], [99., 0.]]))            # usual: root of 11
    read_latents(run, str(path))
    assert 'row 2 is 20 times as long' in (err := capsys.readouterr().err) and 'so are 0' in err
    assert far_off(np.array([[1.], [9.], [21.], [1.], [1.]])).tolist() == [0, 0, 1, 0, 0]
    assert not far_off(np.array([[0.], [0.], [0.], [2.], [3.]])).any()
    np.save(path, np.array([[3., 0.], [0., 0.], [0., 0.]]))
    read_latents(run, str(path))
    said = '2 of 3 latents are zeros, which say nothing; the first is row 1'
    assert said in capsys.readouterr().err
    np.save(path, np.array([[3, 0]]))
    with pytest.raises(ValueError, match='found int64'):
        read_latents(run, str(path))


def test_texts_are_read_and_packed_and_one_that_is_too_long_or_no_list_is_refused(tmp_path,
                                                                                  capsys):
    (tmp_path / 'a.jsonl').write_text('{"b": "one"}\n\n{"b": " two "}\n')
    assert list(read_texts(str(tmp_path / 'a.jsonl'), 'b')) == ['one', 'two']
    (tmp_path / 'b.JSONL').write_text(r'{"text": "a dog\r\nruns\rand\nsits"}')
    assert list(read_texts(str(tmp_path / 'b.JSONL'))) == ['a dog\nruns\nand\nsits']

    # as prepare.py reads them
    (tmp_path / 'c.csv').write_text('id;text\n1;a dog\n2;"b; c"\n')
    assert list(read_texts(str(tmp_path / 'c.csv'))) == ['a dog', 'b; c']
    (tmp_path / 'd.txt').write_text('\ufeffa dog\n\u200b\n\nb\0\n')
    assert list(read_texts(str(tmp_path / 'd.txt'))) == ['a dog']
    assert 'd.txt: 1 dropped (with a NUL)' in capsys.readouterr().err
    (tmp_path / 'e.txt').write_text('a dog\n', 'utf-16-le')
    with pytest.raises(ValueError, match='e.txt: UTF-16-LE, expected UTF-8'):
        list(read_texts(str(tmp_path / 'e.txt')))
    run = toy_run()
    for function in (run.encode, run.pack):
        with pytest.raises(ValueError, match="at least one, found 'a text'"):
            function('a text')
    with pytest.raises(ValueError, match="2 of 2, 'a long text', has 11 tokens.* reads at most 3"):
        pack(run, ['ab', 'a long text'])
    assert pack(run, ['a long text'], cut=True).shape == (1, L)


def test_what_a_run_cannot_do_with_a_text_is_said_in_one_line_each(finished, tmp_path):
    line = 'a red dog runs near the park number 3'
    files = {'own.txt': f'{line}\n\n{" ".join([line] * 9)}\n', 'blank.txt': '\n',
             'own.jsonl': json.dumps({'text': line})}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    own = f'--texts={tmp_path}/own.txt'
    warned = [(['--text=これは日本'], "'これは日本' has no word that the encoder knows"),
              ([own], 'writes at most 31 and has seen no embedding of a longer text')]
    wrong = [(['--text=  '], 'is blank'),
             (['--mode=infill', '--text=a [MASK]', '--like= '], 'is blank'),
             ([f'--texts={tmp_path}/blank.txt'], 'no text in it'),
             (['--mode=edit', '--text=a'], 'give --like'),
             (['--mode=text', '--text=a'], 'mode=text does not read it'),
             (['--which=step-00000001', '--text=a'], 'no checkpoint'),
             (['--text=a', f'--fasta={tmp_path}'], 'this is a folder'),
             (['--mode=text', '--latent_clock=.5'], 'does not read it'),
             ([f'--out_dir={tmp_path}', '--text=a'], 'no run in')]
    here = ['sample.py', f'--out_dir={finished}', '--device=cpu', '--steps=2']
    results = run_each([*here, f'--texts={tmp_path}/own.jsonl'],
                       *([*here, *args] for args, _ in warned + wrong))
    (rc, out, err), *others = results
    assert rc == 0 and out.count('\n  -> ') == 1 and f'\n{line}\n' in out, 'no raw JSON'
    for (rc, _, err), (args, words) in zip(others, warned):
        assert rc == 0 and words in err.splitlines()[0] and err.startswith('warning: '), (args, err)
    for (rc, _, err), (args, words) in zip(others[len(warned):], wrong):
        assert rc == 2 and words in err and err.count('\n') == 1, (args, err)
