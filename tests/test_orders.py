""" The likelihoods of single orders of writing, and the bounds over them, against enumeration: 81 texts, 24 orders. """
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from diffusion import MaskedText
from launch import run_each
from tasks import orders
from tasks.common import Context
from tasks.nelbo import nelbo
from test_evaluate import Codebook
from toys import L, MASK, TEXTS, V, Toy, any_order_law, exact_bound, index, optimal_denoiser, random_denoiser

ORDERS = torch.tensor(list(itertools.permutations(range(L))))            # (24, L): the position of each step
STEPS = ORDERS.argsort(1)                                                # (24, L): the step of each position
EACH = torch.eye(len(TEXTS), dtype=torch.float64)                        # laws of one text each


class ExactToy(Toy):
    """ A Toy of float64 logits, which notes the clocks that it was given beside how much it saw masked. """

    def __init__(self, table):
        super().__init__(table)
        self.config, self.seen = SimpleNamespace(streams=('text',)), []

    def forward(self, tokens, latents, t_text, t_latent, positions=None, predict=('text',)):
        self.seen.append(torch.stack([(tokens == MASK).sum(1) / L, t_text], 1))
        return self.table[index(tokens)].flatten(0, 1)[positions], None


def toy_run(table, schedule='loglinear', lengths=None, eos=98, pad=99):
    return SimpleNamespace(lengths=lengths, model=ExactToy(table), text=MaskedText(V, schedule), next_token=None, device='cpu', row_calls=0,
                           dtype='float32', tokenizer=SimpleNamespace(eos=eos, pad=pad))


def of_all_orders(table, texts=TEXTS, **kw):
    """ -log p_sigma(x), (n, 24), by the code. """
    steps = STEPS.expand(len(texts), -1, -1)
    return orders.nats_of_orders(toy_run(table, **kw), texts, None, 1.0, steps, 100).sum(2)


def by_hand(table, text, order, known=()):
    """ -log p_sigma(x): write the tokens one by one, and look each of them up. """
    text, state, total = text.tolist(), [MASK] * L, 0.0
    for position in known:
        state[position] = text[position]
    for position in order:
        total -= table[index(torch.tensor(state)), position].log_softmax(-1)[text[position]].item()
        state[position] = text[position]
    return total


def knobs(**kw):
    return dict(n_orders=8, seed=0, sample_batch=64) | kw


def test_the_nats_of_left_to_right_and_of_every_other_order_are_the_enumerated_product():
    table = random_denoiser()
    expected = torch.tensor([[by_hand(table, text, order) for order in ORDERS.tolist()] for text in TEXTS], dtype=torch.float64)
    assert (of_all_orders(table) - expected).abs().max() < 1e-6
    found = orders.measure(toy_run(table), Context(knobs(n_orders=1), '', ['abcd'] * 81, TEXTS))
    assert ORDERS[0].tolist() == [0, 1, 2, 3]
    assert found['nats_left_to_right'] == pytest.approx(expected[:, 0].mean().item() / L, abs=1e-6)
    assert expected.std(1).min() > .01, 'the orders of a random network differ, so a wrong order would be seen'


def test_every_order_of_the_optimal_denoiser_gives_minus_log_p_and_so_all_three_figures_are_the_entropy():
    p, table = optimal_denoiser()
    nats = of_all_orders(table)                                          # (81, 24)
    assert (nats + p.log()[:, None]).abs().max() < 1e-6
    entropy = -(p * p.log()).sum()
    for figure in (nats[:, 0], nats[:, 3:9].mean(1), orders.iw_bound(nats[:, 3:9])):
        assert (p * figure).sum() == pytest.approx(entropy.item(), abs=1e-6)


def test_the_mean_over_all_orders_is_the_bound_of_nelbo_and_the_mean_likelihood_is_the_law_of_any_order_sampling():
    table = random_denoiser()
    nats = of_all_orders(table)
    bound = torch.tensor([exact_bound(one, table, 'count') for one in EACH])
    assert (nats.mean(1) - bound).abs().max() < 1e-6
    assert (orders.iw_bound(nats) + any_order_law(table).log()).abs().max() < 1e-6


def test_the_iw_bound_over_all_draws_of_K_orders_falls_with_K_and_stays_above_minus_log_p_mix():
    nats = of_all_orders(random_denoiser())
    floor = -nats.neg().exp().mean(1).log()                              # (81,): -log p_mix
    expected = []
    for K in (1, 2, 3):
        draws = torch.cartesian_prod(*[torch.arange(24)] * K).view(-1, K)                    # (24^K, K)
        of_draws = orders.iw_bound(nats[:, draws].flatten(0, 1)).view(81, -1)                # (81, 24^K)
        assert (of_draws <= nats[:, draws].mean(2) + 1e-12).all(), 'Jensen, draw by draw'
        expected.append(of_draws.mean(1))
    assert (expected[0] - nats.mean(1)).abs().max() < 1e-12, 'one order: the plain bound'
    gaps = [(expected[0] - expected[1]), (expected[1] - expected[2]), (expected[2] - floor)]
    assert all(gap.min() > 0 for gap in gaps) and gaps[0].mean() > .001, 'strictly, text by text'

    # the pairs once more, by the definition
    by_pairs = [[-math.log((math.exp(-a) + math.exp(-b)) / 2) for a in row for b in row] for row in nats.tolist()]
    assert (expected[1] - torch.tensor(by_pairs, dtype=torch.float64).mean(1)).abs().max() < 1e-9


def test_the_task_fed_with_all_pairs_of_orders_gives_their_enumerated_mean(monkeypatch):
    table, text = random_denoiser(), TEXTS[50]
    pairs = torch.cartesian_prod(torch.arange(24), torch.arange(24))     # (576, 2)
    fed = torch.cat([STEPS[:1].expand(576, 1, L), STEPS[pairs]], 1)      # (576, 1 + 2, L)
    monkeypatch.setattr(orders, 'draw_steps', lambda *args: fed)
    ctx = Context(knobs(n_orders=2), '', ['abcd'] * 576, text.expand(576, L))
    found = orders.measure(toy_run(table), ctx)
    nats = torch.tensor([by_hand(table, text, order) for order in ORDERS.tolist()], dtype=torch.float64)
    expected = -nats[pairs].neg().exp().mean(1).log().mean().item()
    assert found['nats_iw_bound'] == pytest.approx(expected / L, abs=1e-6)
    assert found['nats_plain_bound'] == pytest.approx(nats.mean().item() / L, abs=1e-6)
    assert found['nats_left_to_right'] == pytest.approx(nats[0].item() / L, abs=1e-6)


def test_orders_are_drawn_uniformly_and_left_to_right_comes_first():
    steps = orders.draw_steps(torch.zeros(500, L, dtype=torch.long), None, 12, 0)            # (500, 13, L)
    assert (steps[:, 0] == torch.arange(L)).all() and (steps.sort(2).values == torch.arange(L)).all()
    which = (steps[:, 1:].reshape(-1, 1, L) == STEPS).all(2)             # (6000, 24)
    counts = which.sum(0).double()
    chi_square = ((counts - 250) ** 2 / 250).sum().item()
    assert abs(chi_square - 23) < 4 * math.sqrt(2 * 23)


def test_the_plain_bound_of_the_task_estimates_the_enumerated_one_and_its_iw_bound_lies_between():
    table, K = random_denoiser(), 32
    nats = of_all_orders(table)
    found = orders.measure(toy_run(table), Context(knobs(n_orders=K), '', ['abcd'] * 81, TEXTS))
    exact = nats.mean().item()
    error = nats.std(1).square().mean().sqrt().item() / math.sqrt(81 * K)
    assert abs(found['nats_plain_bound'] * L - exact) < 4 * error
    floor = -nats.neg().exp().mean(1).log().mean().item()
    assert floor < found['nats_iw_bound'] * L + 4 * error and found['nats_iw_bound'] < found['nats_plain_bound']
    se = nats[:, 0].std().item() / math.sqrt(81) / L                     # over texts of one length
    assert found['nats_left_to_right_se'] == pytest.approx(se, rel=1e-6)


def test_every_row_is_read_with_the_clock_of_its_masked_share():
    for schedule in ('loglinear', 'cosine'):
        run = toy_run(random_denoiser(), schedule)
        orders.measure(run, Context(knobs(n_orders=2), '', ['abcd'] * 81, TEXTS))
        share, t = torch.cat(run.model.seen).T
        assert (run.text.masked_share(t) - share).abs().max() < 1e-6 and sorted(set(share.tolist())) == [.25, .5, .75, 1]


def test_the_figures_do_not_depend_on_the_rows_of_a_call_and_the_cost_is_as_said(capsys):
    found = []
    for batch in (1, 7, 10_000):
        run = toy_run(random_denoiser())
        found.append(orders.measure(run, Context(knobs(sample_batch=batch), '', ['abcd'] * 9, TEXTS[:9])))
        assert run.row_calls == 9 * (1 + 8) * L and f'{run.row_calls} network rows for each of 1 ' in capsys.readouterr().out
        assert len(run.model.seen) == math.ceil(run.row_calls / batch)
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])


def test_padding_is_in_the_total_but_not_in_the_divisor_and_until_eos_leaves_it_out():
    table = random_denoiser()
    texts = torch.tensor([[0, 1, 2, 2], [1, 2, 2, 2], [0, 0, 0, 1]])     # 1 is EOS, 2 is PAD: 2 + 1 + 4 real tokens
    run = toy_run(table, eos=1, pad=2)
    found = orders.measure(run, Context(knobs(), '', ['a'] * 3, texts))
    whole = sum(by_hand(table, text, range(L)) for text in texts)
    until_eos = sum(by_hand(table, text, range(n)) for text, n in zip(texts, (2, 1, 4)))
    assert found['nats_left_to_right'] == pytest.approx(whole / 7, abs=1e-6)
    assert found['nats_until_eos'] == pytest.approx(until_eos / 7, abs=1e-6)


def test_known_ends_are_visible_from_the_start_and_not_scored_as_in_nelbo(monkeypatch):
    table = random_denoiser()
    texts = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 2], [1, 2, 2, 2]])     # 1 is EOS, 2 is PAD: 2, 1 and no free positions
    run = toy_run(table, lengths=[1, 2], eos=1, pad=2)
    steps = orders.draw_steps(texts, texts > 0, 5, 0)
    assert (steps[:, 0] == torch.tensor([[0, 1, -1, -1], [0, -1, -1, -1], [-1] * 4])).all()
    assert (steps[1] == steps[1, 0]).all() and set(steps[0, :, 0].tolist()) == {0, 1}

    found = orders.measure(run, Context(knobs(n_orders=400), '', ['a'] * 3, texts))
    forth = by_hand(table, texts[0], (0, 1), (2, 3))
    back = by_hand(table, texts[0], (1, 0), (2, 3))
    one = by_hand(table, texts[1], (0,), (1, 2, 3))
    assert abs(forth - back) > .01 and 'nats_until_eos' not in found
    assert found['nats_left_to_right'] == pytest.approx((forth + one) / 3, abs=1e-6)
    error = abs(forth - back) / 2 / math.sqrt(400) / 3
    bound = ((forth + back) / 2 + one) / 3
    assert abs(found['nats_plain_bound'] - bound) < 4 * error

    # nelbo of the first text, which has both orders
    r = nelbo(run, ['a'] * 2000, texts[:1].expand(2000, L), None, 2, 0, 500)
    assert r['nats_per_token'] == pytest.approx((forth + back) / 2 / 2, abs=4 * r['nats_per_token_se'])


def test_another_texts_latent_costs_a_network_that_reads_it():
    run, tokens, raw = Codebook().run(), Codebook.texts, Codebook.code[:, None]
    found = orders.measure(run, Context(knobs(sample_batch=5), '', ['a'] * 6, tokens, raw))
    for metric in ('nats_left_to_right', 'nats_until_eos', 'nats_plain_bound', 'nats_iw_bound'):
        assert found[metric] < .01 < found[f'null/{metric}'] < found[f'shuffled/{metric}']
        assert found[f'shuffled/{metric}'] > 4
    one = orders.measure(run, Context(knobs(), '', ['a'], tokens[:1], raw[:1]))
    assert 'null/nats_iw_bound' in one and not [key for key in one if 'shuffled' in key or key.endswith('_se')]


def test_orders_of_a_trained_run_as_a_command(finished, tmp_path):
    out = tmp_path / 'run'
    shutil.copytree(finished, out)
    (out / 'results.json').unlink(missing_ok=True)                       # what other tests have measured
    here = ['evaluate.py', f'--out_dir={out}', '--device=cpu', '--dtype=float32', '--n=8']
    good, again, wrong = run_each([*here, '--tasks=orders,nelbo', '--n_orders=3'], [*here, '--tasks=orders', '--n_orders=1'],
                                  [*here, '--tasks=orders', '--n_orders=0'])
    assert good[0] == again[0] == 0 and wrong[0] == 2 and 'n_orders' in wrong[2], (good, again, wrong)
    assert '1,024 network rows for each of 3 conditions: 4 orders of 8 texts' in good[1] and 'orders: n 8, n_orders 3' in good[1]
    found = json.loads((out / 'results.json').read_text())
    for control in ('', 'shuffled/', 'null/'):
        plain, tighter = (found[f'orders/{control}nats_{name}'] for name in ('plain_bound', 'iw_bound'))
        assert tighter < plain == pytest.approx(found[f'nelbo/{control}nats_per_token'], rel=.1)
        assert found[f'orders/{control}nats_until_eos'] < found[f'orders/{control}nats_left_to_right']
        assert found[f'orders/{control}nats_iw_bound_se'] > 0
    once = {key: found[f'orders[n_orders=1]/nats_{key}'] for key in ('plain_bound', 'iw_bound', 'left_to_right')}
    assert once['iw_bound'] == pytest.approx(once['plain_bound'])
    assert once['left_to_right'] == pytest.approx(found['orders/nats_left_to_right']), 'exact: no draw'
