""" The likelihoods of single orders of writing, and the bounds over them, against enumeration: 81
texts, 24 orders. """
import itertools
import math

import pytest
import torch

from diffusion import MaskedText
from tasks import orders
from tasks.common import Context
from toys import (L, MASK, TEXTS, V, Toy, any_order_law, exact_bound, flat, index, net_of,
                  optimal_denoiser, random_denoiser, toy_run)

ORDERS = torch.tensor(list(itertools.permutations(range(L))))            # (24, L), of each step
STEPS = ORDERS.argsort(1)                                                # (24, L), of each position
EACH = torch.eye(len(TEXTS), dtype=torch.float64)                        # laws of one text each


class ExactToy(Toy):
    """ A Toy of float64 logits, which notes how much it saw masked beside the clock. """

    def __init__(self, table):
        super().__init__(table)
        self.seen = []

    def logits_of(self, tokens, z, t_text, t_latent):
        self.seen.append(torch.stack([(tokens == MASK).sum(1) / L, t_text], 1))
        return self.table[index(tokens)]


def run_of(table, schedule='loglinear', lengths=None, eos=98, pad=99):
    return toy_run(net_of(ExactToy(table), text=MaskedText(V, schedule), lengths=lengths, eos=eos,
                          pad=pad))


def of_all_orders(table):
    """ -log p_sigma(x), (81, 24), by the code. """
    steps = STEPS.expand(len(TEXTS), -1, -1)
    return orders.nats_of_orders(run_of(table), TEXTS, None, 1.0, steps, 100).sum(2)


def by_hand(table, text, order, known=()):
    """ -log p_sigma(x): write the tokens one by one, and look each of them up. """
    text, state, total = text.tolist(), [MASK] * L, 0.0
    for position in known:
        state[position] = text[position]
    for position in order:
        logits = table[index(torch.tensor(state)), position]
        total -= logits.log_softmax(-1)[text[position]].item()
        state[position] = text[position]
    return total


def measure(run, texts, raw=None, n_orders=8, batch=64):
    knobs = dict(n_orders=n_orders, seed=0, sample_batch=batch)
    ctx = Context(knobs, '', ['abcd'] * len(texts), texts, raw)
    return flat(orders.measure(run, ctx))


def test_the_nats_of_every_order_are_the_enumerated_product_and_the_bounds_follow_from_them():
    table = random_denoiser()
    nats = of_all_orders(table)                                          # (81, 24)
    expected = [[by_hand(table, text, order) for order in ORDERS.tolist()] for text in TEXTS]
    assert (nats - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-6
    assert nats.std(1).min() > .01, 'the orders of a random network differ'

    # their mean is the bound of nelbo, their mean likelihood the law of any-order sampling
    bound = torch.tensor([exact_bound(one, table, 'count') for one in EACH])
    assert (nats.mean(1) - bound).abs().max() < 1e-6
    assert (orders.iw_bound(nats) + any_order_law(table).log()).abs().max() < 1e-6

    # of the optimal denoiser each order gives -log p
    p, table = optimal_denoiser()
    assert (of_all_orders(table) + p.log()[:, None]).abs().max() < 1e-6


def test_the_task_estimates_the_enumerated_figures():
    table, K = random_denoiser(), 32
    nats = of_all_orders(table)
    found = measure(run_of(table), TEXTS, n_orders=K)
    error = nats.std(1).square().mean().sqrt().item() / math.sqrt(81 * K)
    assert abs(found['nats_plain_bound'] * L - nats.mean().item()) < 4 * error
    floor = -nats.neg().exp().mean(1).log().mean().item()
    assert floor < found['nats_iw_bound'] * L + 4 * error
    assert found['nats_iw_bound'] < found['nats_plain_bound']

    # exact, over texts of one length
    assert ORDERS[0].tolist() == [0, 1, 2, 3]
    assert found['nats_left_to_right'] == pytest.approx(nats[:, 0].mean().item() / L, abs=1e-6)
    se = nats[:, 0].std().item() / math.sqrt(81) / L
    assert found['nats_left_to_right_se'] == pytest.approx(se, rel=1e-6)


def test_orders_are_drawn_uniformly_and_left_to_right_comes_first():
    steps = orders.draw_steps(torch.zeros(500, L, dtype=torch.long), None, 12, 0)    # (500, 13, L)
    assert (steps[:, 0] == torch.arange(L)).all()
    assert (steps.sort(2).values == torch.arange(L)).all()
    which = (steps[:, 1:].reshape(-1, 1, L) == STEPS).all(2)             # (6000, 24)
    counts = which.sum(0).double()
    chi_square = ((counts - 250) ** 2 / 250).sum().item()
    assert abs(chi_square - 23) < 4 * math.sqrt(2 * 23)


def test_every_row_is_read_with_the_clock_of_its_masked_share_whatever_the_rows_of_a_call():
    found = []
    for schedule, batch in (('cosine', 64), ('loglinear', 1), ('loglinear', 10_000)):
        run = run_of(random_denoiser(), schedule)
        found.append(measure(run, TEXTS[:9], n_orders=2, batch=batch))
        share, t = torch.cat(run.net.model.seen).T
        assert (run.net.text.masked_share(t) - share).abs().max() < 1e-6
        assert sorted(set(share.tolist())) == [.25, .5, .75, 1]
        assert run.net.row_calls == 9 * (1 + 2) * L
    assert found[1] == pytest.approx(found[2])


def test_known_ends_are_visible_from_the_start_and_not_scored():
    table = random_denoiser()
    # 1 is EOS, 2 is PAD: 2, 1 and no free positions
    texts = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 2], [1, 2, 2, 2]])
    run = run_of(table, lengths=[1, 2], eos=1, pad=2)
    steps = orders.draw_steps(texts, texts > 0, 5, 0)
    assert (steps[:, 0] == torch.tensor([[0, 1, -1, -1], [0, -1, -1, -1], [-1] * 4])).all()
    assert (steps[1] == steps[1, 0]).all() and set(steps[0, :, 0].tolist()) == {0, 1}

    found = measure(run, texts, n_orders=400)
    forth = by_hand(table, texts[0], (0, 1), (2, 3))
    back = by_hand(table, texts[0], (1, 0), (2, 3))
    one = by_hand(table, texts[1], (0,), (1, 2, 3))
    assert abs(forth - back) > .01
    assert found['nats_left_to_right'] == pytest.approx((forth + one) / 3, abs=1e-6)
    error = abs(forth - back) / 2 / math.sqrt(400) / 3
    bound = ((forth + back) / 2 + one) / 3
    assert abs(found['nats_plain_bound'] - bound) < 4 * error
