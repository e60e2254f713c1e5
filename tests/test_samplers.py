""" Every sampler against the enumerated law of what it claims to sample, and the draws they share.
"""
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import samplers
from diffusion import MaskedText
from noise import Noise, rows_of
from processes.gidd import GIDD
from processes.hdlm import HDLM
from samplers import (SAMPLERS, autoregressive, in_blocks, make_propose, no_callback,
                      nucleus_filter)
from sampling.denoise import guided_logits
from toys import (EOS, FILL_MASKS, L, MASK, PAD, STATES, V, Toy, any_order_law, chain_law,
                  chi_square_z, index, optimal_denoiser, random_denoiser, release_chain)

N = 60_000
TABLE = random_denoiser()
REMASK = dict(remdm=dict(eta=.5), dfm=dict(alpha=2.))


def likeliest(logits, u):
    return logits.argmax(-1)


def fill(sampler, denoise, steps=L, tokens=None, text=None, seed=0, propose=likeliest,
         on_step=no_callback, rows=None, **knobs):
    """ What a sampler writes into tokens, of which MASK alone is free. """
    text = text or MaskedText(V)
    tokens = torch.full((1, L), text.mask_id) if tokens is None else tokens
    rows = rows_of(len(tokens)) if rows is None else rows
    return sampler(denoise, propose, text, tokens, tokens != text.mask_id, steps,
                   Noise(seed, rows), lambda x, *said: on_step(x), **knobs)


def draw(name, table, steps, n=N, tokens=None, schedule='loglinear', temperature=1.0, calls=None,
         block=0, on_step=no_callback, rows=None, **knobs):
    """ n texts by a network that is a table. calls: a list that takes the number of rows of every
    network call. """
    toy = Toy(table)

    def denoise(x, t, positions, rows=None):
        if calls is not None:
            calls.append(len(x))
        return toy(x, None, t, None, positions)[0]
    sampler = partial(SAMPLERS[name].function, **knobs)
    if block:
        sampler = in_blocks(sampler, block)
    tokens = torch.full((n, L), MASK) if tokens is None else tokens
    return fill(sampler, denoise, steps, tokens, MaskedText(V, schedule), on_step=on_step,
                propose=make_propose(temperature, 1.0), rows=rows)


def shares(schedule, steps):
    """ M at the ends of the steps. """
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return MaskedText(V, schedule).masked_share(times).tolist()


def ancestral_law(M):
    return chain_law(TABLE, [(m - m_s) / m for m, m_s in zip(M, M[1:])])


class Order(list):
    """ A callback that notes which position of the one text each step unmasked. """
    before = torch.zeros(L, dtype=torch.bool)

    def __call__(self, x):
        now = x[0] != MASK
        self.append((now ^ self.before).nonzero().item())
        self.before = now


# ---- the law of each sampler

@pytest.mark.parametrize('schedule, steps', [('loglinear', 1), ('loglinear', 2), ('cosine', 5)])
@pytest.mark.parametrize('name, knobs', [
    ('ancestral', {}), ('cached', {}), ('remdm', dict(eta=0.0)), ('dfm', dict(alpha=1.0))])
def test_without_remasking_samplers_have_the_law_of_the_ancestral_chain(name, knobs, steps,
                                                                        schedule):
    law = ancestral_law(shares(schedule, steps))
    assert chi_square_z(draw(name, TABLE, steps, schedule=schedule, **knobs), law) < 6


def remdm_chain(m_t, m_s, eta):
    a_t, a_s = 1 - m_t, 1 - m_s
    g = eta if a_t == 0 else min(eta, m_s / a_t)
    return (a_s - (1 - g) * a_t) / (1 - a_t), g


def dfm_chain(m_t, m_s, alpha):
    g = 0. if m_t == 1 else min(1, m_s * (1 - (m_s / m_t) ** (alpha - 1)) / (1 - m_t))
    return 1 - (m_s - (1 - m_t) * g) / m_t, g


@pytest.mark.parametrize('name, schedule, chain, knobs', [
    ('remdm', 'loglinear', remdm_chain, dict(eta=.3)),
    ('dfm', 'loglinear', dfm_chain, dict(alpha=2.)), ('dfm', 'cosine', dfm_chain, dict(alpha=1.5))])
def test_remasking_has_the_law_of_its_chain_and_keeps_marginals(name, schedule, chain, knobs):
    M, masked = shares(schedule, 4), []
    out = draw(name, TABLE, 4, schedule=schedule, **knobs,
               on_step=lambda x: masked.append((x == MASK).double().mean().item()))
    steps = [chain(m_t, m_s, **knobs) for m_t, m_s in zip(M, M[1:])]
    assert chi_square_z(out, release_chain(TABLE, steps)) < 6
    assert chi_square_z(out, ancestral_law(M)) > 10, 'it is another chain than ancestral'
    for share, m in zip(masked, M[1:]):
        assert abs(share - m) < 5 * math.sqrt(m * (1 - m) / (N * L)) + 1e-12


def test_first_hitting_has_the_law_of_the_model_and_blocks_that_of_one_after_the_other():
    p, optimal = optimal_denoiser()
    free = draw('first_hitting', TABLE, L)
    assert chi_square_z(free, any_order_law(TABLE)) < 6
    assert chi_square_z(draw('first_hitting', optimal, L), p) < 6, "the data's own law"
    law = any_order_law(TABLE, block=2)
    assert chi_square_z(draw('first_hitting', TABLE, L, block=2), law) < 6
    assert chi_square_z(draw('ancestral', TABLE, 400, block=2, n=5000), law) < 6
    assert chi_square_z(free, law) > 20, 'blocks change the law'


def test_cached_writes_what_ancestral_writes_in_at_most_L_calls_a_row():
    n, steps, calls, all_calls = 64, 200, [], []
    a = draw('ancestral', TABLE, steps, n=n, temperature=0.0, calls=all_calls)
    c = draw('cached', TABLE, steps, n=n, temperature=0.0, calls=calls)
    assert torch.equal(a, c)
    assert sum(all_calls) == n * steps and n < sum(calls) <= n * L


# ---- confidence

@pytest.mark.parametrize('eos', [1, 0])
@pytest.mark.parametrize('penalty, expected', [(0.0, [3, 2, 0, 1]), (50.0, [2, 0, 1, 3]),
                                               (1e39, [2, 0, 1, 3])])
def test_the_end_of_a_text_may_be_held_back(eos, penalty, expected):
    """ The last position is surest, of its EOS, whose id need not be one of the last two. """
    p, order = torch.full((4, 3), .01), Order()
    p[:3, 1 - eos] = torch.tensor([.80, .70, .90])
    p[3, eos] = .95
    text = fill(samplers.confidence, lambda tokens, t, positions: p[positions].log(),
                propose=make_propose(0., 1.), on_step=order, end_penalty=penalty, ends=(eos, 2))
    assert text.tolist() == [[1 - eos] * 3 + [eos]] and order == expected


def filled_one_by_one(x, places, table, threshold, steps, penalty):
    """ What confidence writes in these places of a text, a list, token by token, and how many
    calls that takes. """
    x = list(x)
    free = [i for i in places if x[i] == MASK]
    n, calls, planned = len(free), 0, 0
    while free:
        p = table[index(torch.tensor([x]))][0].double().softmax(1)
        best = {i: int(p[i].argmax()) for i in free}
        sure = {i: float(p[i, best[i]]) / (math.exp(penalty) if best[i] in (EOS, PAD) else 1)
                for i in free}
        calls += 1
        planned += n // steps + (calls <= n % steps)
        k = max(1, planned - (n - len(free)))
        by_certainty = sorted(free, key=lambda i: -sure[i])
        now = {*by_certainty[:k]} | {i for i in free if threshold < 1 and sure[i] >= threshold}
        if all(best[i] in (EOS, PAD) for i in free):
            now = {*free}
        for i in now:
            x[i] = best[i]
        free = [i for i in free if i not in now]
    return x, calls


@pytest.mark.parametrize('block', [0, 2])
@pytest.mark.parametrize('steps', [L, 3])
@pytest.mark.parametrize('threshold', [1.0, .8, .6, .45, 0.0])
def test_a_threshold_is_that_of_each_text_alone(threshold, steps, block):
    table, calls = 2 * random_denoiser(), []
    made = draw('confidence', table, steps, tokens=STATES, temperature=0., calls=calls, block=block,
                threshold=threshold, ends=(EOS, PAD), end_penalty=.3)

    # block by block, in each its share of the steps
    size = block or L
    n_calls = 0
    for x, found in zip(STATES.tolist(), made.tolist()):
        for first in range(0, L, size):
            x, n = filled_one_by_one(x, range(first, first + size), table, threshold,
                                     round(steps * size / L), .3)
            n_calls += n
        assert found == x
    assert sum(calls) == n_calls, 'a text that is finished takes no more calls'
    if threshold == 0 and not block:
        assert n_calls == 256 - 81, 'one for each text that has a MASK'


@pytest.mark.parametrize('prefer, sign', [('certain', 1), ('uncertain', -1)])
def test_importance_weighs_the_uncertainty_of_what_is_proposed(prefer, sign):
    logits = torch.tensor([[4., 0, 0], [0, 2, 0], [0, 0, 1], [0, 0, 1]])     # ever less certain
    important = torch.tensor([1., .6, .2, .5])                   # of the ids 0, 1, 2, and MASK
    uncertainty = -logits.log_softmax(1).amax(1) * important[logits.argmax(1)]
    order = Order()
    fill(samplers.confidence, lambda x, t, positions: logits[positions % L], on_step=order,
         prefer=prefer, importance=lambda tokens: important[tokens])
    assert order == (sign * uncertainty).argsort(stable=True).tolist()


# ---- what all share

@pytest.mark.parametrize('block', [0, 3])
@pytest.mark.parametrize('name', FILL_MASKS)
def test_given_tokens_never_change_and_nothing_stays_masked(name, block):
    tokens = STATES.repeat(4, 1)
    given = tokens != MASK
    for steps in (1, 3, 7):
        states = [tokens]
        out = draw(name, TABLE, steps, tokens=tokens, block=block,
                   on_step=lambda x: states.append(x.clone()), **REMASK.get(name, {}))
        assert (out < V).all() and torch.equal(out[given], tokens[given])
        assert torch.equal(tokens, STATES.repeat(4, 1)), 'the input was written into'
        for before, after in zip(states, states[1:]):
            changed = (before != MASK) & (after != before)
            assert not changed.any() or name in REMASK
            assert (after[changed] == MASK).all() and not changed[given].any()


@pytest.mark.parametrize('block', [0, 3])
@pytest.mark.parametrize('name', FILL_MASKS)
def test_a_row_is_written_the_same_alone_and_beside_any_others(name, block):
    """ Whatever is known of the others, in whatever order they stand. """
    rng = torch.Generator().manual_seed(0)
    tokens = STATES[torch.randint(len(STATES), (40,), generator=rng)].repeat_interleave(2, 0)
    tokens[:10] = MASK
    rows, order = rows_of(40, 2), torch.randperm(80, generator=rng)
    for steps in (2, 3, 7):
        def written(these):
            return draw(name, TABLE, steps, tokens=tokens[these], block=block,
                        rows=rows[these.numpy()], **REMASK.get(name, {}))
        together = written(order)
        assert torch.equal(together, torch.cat([written(one) for one in order.split(1)]))
        sorted_again = together[order.argsort()]
        assert not torch.equal(sorted_again[0:10:2], sorted_again[1:10:2])


def clocks_of(name, schedule, tokens, block=L):
    """ [(state, clock of each row)] of the calls of the network. """
    seen, sampler = [], in_blocks(SAMPLERS[name].function, block)

    def denoise(x, t, positions, rows=None):
        seen.append((x.clone(), torch.as_tensor(t).expand(len(x)).double()))
        return torch.zeros(len(positions), V)
    fill(sampler, denoise, 4, tokens, MaskedText(V, schedule))
    return seen


@pytest.mark.parametrize('schedule', ['loglinear', 'cosine'])
@pytest.mark.parametrize('name', FILL_MASKS)
def test_the_clock_of_the_network_is_that_of_the_bound_or_of_the_schedule(name, schedule):
    """ With tokens given (and always for first_hitting and confidence) the t with M(t) =
    n_masked / L per row; else the schedule's t. """
    text = MaskedText(V, schedule)

    def assert_by_share(seen):
        for x, t in seen:
            share = (x == MASK).double().mean(1)
            assert torch.allclose(text.masked_share(t), share, atol=1e-6)
    free = torch.full((6, L), MASK)
    given_first = free.clone()
    given_first[:, 0] = 1
    assert_by_share(clocks_of(name, schedule, given_first))
    assert_by_share(clocks_of(name, schedule, given_first, block=3))
    seen = clocks_of(name, schedule, free)
    if name in ('first_hitting', 'confidence'):
        assert_by_share(seen)
    else:
        assert {t[0].item() for _, t in seen} <= {1., .75, .5, .25}

    # a text of which something is known does not change the clocks of the others
    free[0, 0] = 1
    clocks, now = ([t[1:] for x, t in calls if len(x) == 6]
                   for calls in (seen, clocks_of(name, schedule, free)))
    assert name in ('cached', 'confidence') or len(now) == len(clocks) > 0
    assert all(torch.equal(a, b) for a, b in zip(now, clocks))


# ---- draws

@pytest.mark.parametrize('temperature', [1.0, 0.5])
def test_proposals_follow_the_softmax_at_a_temperature(temperature):
    n, logits = 200_000, torch.tensor([2., 0., -1., -30.])
    x = make_propose(temperature, 1.0)(logits.expand(n, 4), torch.rand(n, 2))
    p = (logits / temperature).softmax(0)
    share = torch.bincount(x, minlength=4) / n
    assert ((share - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-9).all()
    assert (make_propose(0.0, 1.0)(logits[None], None) == 0).all()


@pytest.mark.parametrize('first', [0, 50_256])
def test_unlikely_tokens_keep_their_mass_in_a_large_vocabulary(first):
    """ One token has .999. The others have so little that a sum in float32 would not change where
    one of them is added. Together they are drawn at their rate, each as often as the next. """
    V, n, likely = 50_257, 2000, .999
    p = torch.full((V,), (1 - likely) / (V - 1))
    p[first] = likely
    assert p[first] + p[1] == p[first]

    # numbers of which a half belongs to the others: the last .002, or the first
    u = torch.rand(n, 2)
    u[:, 0] = .002 * u[:, 0] + (.998 if first == 0 else 0)
    found = torch.cat([samplers.draw_from(p.expand(len(part), V), part) for part in u.split(50)])
    others = found[found != first]
    assert abs(len(others) / n - .5) < 5 * math.sqrt(.25 / n)
    expected = len(others) / 10
    counts = torch.histc(others.float(), 10, 0, V)
    assert ((counts - expected) ** 2 / expected).sum() < 9 + 6 * math.sqrt(2 * 9)
    assert len(others.unique()) > .965 * len(others), 'none of them stands for its neighbours'


@pytest.mark.parametrize('V', [1, 2, 3, 10, 300])
def test_no_draw_takes_an_impossible_token_whatever_the_numbers_are(V):
    """ Also at the ends of (0, 1), and where most of the probabilities are 0. """
    p = torch.rand(500, V) ** 9
    p = p.masked_fill(torch.rand(500, V) < .7, 0)
    p[torch.arange(500), torch.randint(V, (500,))] = 1e-30
    p = p * torch.tensor([1e-8, 1., 1e8, 1e30]).repeat(125)[:, None]
    ends = torch.tensor([2.0 ** -53, .5, 1 - 2.0 ** -24])
    for u in [*torch.cartesian_prod(ends, ends), torch.rand(500, 2)]:
        x = samplers.draw_from(p, u.expand(500, 2))
        assert (p.gather(1, x[:, None]) > 0).all(), u


def test_nucleus_keeps_the_boundary_token_and_always_the_top_one():
    logits = torch.tensor([.15, .5, .3, .05]).log()
    for p, kept in ((0.0, [1]), (0.4, [1]), (0.6, [1, 2]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        assert (nucleus_filter(logits, p) > -torch.inf).nonzero().flatten().tolist() == kept


def test_what_is_known_beside_is_weighed_in_before_the_filter():
    logits = torch.tensor([9., 8., 0., 0.]).expand(1000, 4)
    tilt = torch.tensor([0., 0, .2, .8]).expand(1000, 4)
    u = torch.rand(1000, 2)
    for temperature, nucleus in ((1., 1.), (1., .9), (.05, 1.), (0., 1.)):
        found = make_propose(temperature, nucleus)(logits, u, tilt)
        assert (found >= 2).all(), (temperature, nucleus)
    found = make_propose(1., 1.)(logits, u, tilt)
    assert abs((found == 3).double().mean() - .8) < .07


PROCESSES = {**dict.fromkeys(SAMPLERS, MaskedText(V)), 'gidd': GIDD(V, .2),
             'hdlm': HDLM(V, torch.tensor([0, 1, 0]), xi=.9)}


@pytest.mark.parametrize('name', PROCESSES)
def test_extreme_knobs_write_texts_of_tokens_that_are_allowed(name):
    """ No NaN takes the first id, nothing stays masked, and a temperature next to 0 writes the
    likeliest text. """
    process = PROCESSES[name]
    sampler = (process.samplers or SAMPLERS).get(name) or process.samplers['ancestral']
    tables = 20 * random_denoiser(0).float(), random_denoiser(1).float()

    def written(guidance=1., temperature=0., nucleus=1., **knobs):
        def denoise(x, t, positions, rows=None):
            state = F.pad(x, (0, L - x.shape[1]), value=MASK).clamp(max=MASK)
            conditional, null = (table[index(state)].flatten(0, 1)[positions] for table in tables)
            logits = guided_logits(guidance, lambda: conditional, lambda: null)
            banned = torch.where(positions % 2 == 0, 0, EOS)   # the first id, or an end
            return logits.scatter(1, banned[:, None], -torch.inf)
        text = fill(sampler.function, denoise, 3, torch.full((6, L), MASK), process,
                    propose=make_propose(temperature, nucleus), ends=(EOS, PAD), **knobs)
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


# ---- autoregressive

def test_what_is_known_behind_a_gap_stays_and_is_not_seen_when_the_gap_is_filled():
    read = []
    tokens = torch.tensor([[1, 20, 3, 20, 20, 20, 20, 20, 20, 5],
                           [1, 6, 20, 20, 20, 20, 20, 20, 20, 5]])

    def denoise(tokens, t, positions):
        read.append(tokens[0].tolist())
        x = torch.tensor([4 if tokens.shape[1] < 5 else 7])              # then the EOS
        return F.one_hot(x.expand(2), 20).float()
    out = fill(autoregressive, denoise, 0, tokens, MaskedText(20), ends=(7, 19),
               propose=make_propose(0, 1))
    assert out.tolist() == [[1, 4, 3, 4, 7, 19, 19, 19, 19, 5], [1, 6, 4, 4, 7, 19, 19, 19, 19, 5]]
    assert read[:3] == [[20, 1], [20, 1, 4], [20, 1, 4, 3]]


def test_writing_ends_at_the_eos_of_the_tokenizer_which_need_not_be_the_last_id_but_one():
    """ cl100k_base has 19 ids above its EOS, which are never written. """
    states, wanted = [], torch.tensor([[3, 7, 5], [4, 6, 7]])

    def denoise(tokens, t, positions):
        return F.one_hot(wanted[:, min(tokens.shape[1] - 1, 2)], 20).float()
    out = fill(autoregressive, denoise, 0, torch.full((2, 16), 20), MaskedText(20), ends=(7, 19),
               propose=make_propose(0, 1), on_step=states.append)
    assert out.tolist() == [[3, 7] + [19] * 14, [4, 6, 7] + [19] * 13] and len(states) == 3
