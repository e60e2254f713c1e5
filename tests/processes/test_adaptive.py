""" Importance, adaptive masking and curriculum: against plain masking, enumeration, and what they
must not change. """
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import PackedDataset, Rows, counts
from diffusion import Clocks, MaskedText, Noising, mode_shares
from launch import cut, run_each, same, train, train_each, weights
from model import Importance, Model, ModelConfig
from processes.adaptive import Adaptive, AdaptiveText, rarity

FREQUENT_FIRST = torch.tensor([0.1, 0.4, 0.7, 0.95, 0.5])


def adaptive(masking='proportional', beta=.5, curriculum=False, learns=False, max_iters=100,
             table=FREQUENT_FIRST):
    return Adaptive(masking, beta, curriculum, (1 / 3, 2 / 3), 2.0, max_iters, len(table) - 1,
                    table, learns)


# ---- importance by frequency

def test_rarity_is_the_rank_of_a_tokens_frequency_with_mean_one_half():
    counts = np.random.default_rng(0).zipf(1.5, 1000).clip(max=10 ** 6)
    imp = rarity(counts, pad=7)
    others = np.arange(1000) != 7
    assert np.average(imp[others], weights=counts[others]) == pytest.approx(.5, abs=1e-6)
    assert imp[7] == .5 and 0 < imp.min() and imp.max() < 1
    order = np.argsort(counts[others], kind='stable')
    assert (np.diff(imp.numpy()[others][order]) <= 1e-7).all(), 'the rarer, the more important'
    assert torch.allclose(rarity([6, 2, 1, 1], pad=3),
                          torch.tensor([6 / 9 / 2, 6 / 9 + 2 / 9 / 2, 8 / 9 + 1 / 9 / 2, .5]))
    assert rarity([3, 3, 0], 2)[:2].tolist() == [.5, .5], 'equally frequent, equally important'


# ---- masking

def test_each_token_is_masked_with_probability_t_to_the_w_never_at_0_and_always_at_1():
    text, a = MaskedText(5), adaptive()
    tokens = torch.arange(5).repeat(4000, 50)                            # (4000, 250)
    w = a.exponents(a.rarity[tokens].double(), 0)
    assert w[0, 0] == math.exp(-.5 * (2 * FREQUENT_FIRST[0].item() - 1))
    assert (w[tokens == 4] == 1).all(), 'PAD is masked as ever'
    u = torch.rand(tokens.shape, dtype=torch.float64)
    for t, law in ((0., lambda w: 0), (1., lambda w: 1), (.3, lambda w: .3 ** w),
                   (.8, lambda w: .8 ** w)):
        _, mask = text.corrupt(tokens, torch.full((4000,), t, dtype=torch.float64), u, exponent=w)
        for token in range(5):
            p, n = law(w[0, token].item()), 4000 * 50
            share = mask[tokens == token].double().mean().item()
            assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / n) + 1e-12


@pytest.mark.parametrize('masking, at', [('time_only', (0, 0)), ('proportional', (.5, .5)),
                                         ('inverse', (-.5, -.5)),
                                         ('balanced', (-.5, .5))])
def test_beta_runs_as_the_strategy_says_and_the_exponents_are_clamped(masking, at):
    a = adaptive(masking)
    assert (a.beta_at(0), a.beta_at(99)) == at
    w = adaptive(masking, beta=3.).exponents(torch.linspace(0, 1, 50), 99)
    assert .5 <= w.min() and w.max() <= 2
    important = w[-1].item()
    assert np.sign(1 - important) == np.sign(at[1]), 'beta > 0 masks the important first'


def noising(dataset, **knobs):
    """ Of a text that is masked by importance, or plainly where there are no knobs. """
    data = PackedDataset(str(dataset), 'train')
    text, a = MaskedText(data.vocab_size), None
    if knobs:
        usual = dict(masking='time_only', beta=.5, curriculum=False, stages=(1 / 3, 2 / 3),
                     focus=2., max_iters=30, pad=data.pad, rarity=rarity(counts(data), data.pad),
                     learns=False)
        a = Adaptive(**usual | knobs)
        text = AdaptiveText(data.vocab_size, 'loglinear', 'bound', a)
    return Noising(text, None, ('text',)), data, a


def batches(dataset, **knobs):
    """ Every third of 30 steps. """
    noisy, data, a = noising(dataset, **knobs)
    shares = mode_shares('unconditional')
    found = []
    for step in range(0, 30, 3):
        rows = Rows(*data.rows(np.arange(16) + 16 * step), False, step, 0)
        found.append(noisy(rows, shares, data))
    return found, data, a


@pytest.mark.parametrize('knobs', [dict(masking='time_only'),
                                   dict(masking='proportional', beta=0.)])
def test_beta_0_without_curriculum_is_plain_masking_bit_for_bit(dataset, knobs):
    for plain, b in zip(batches(dataset)[0], batches(dataset, **knobs)[0]):
        assert plain.importance is None and len(b.importance) == 4, 'for the log'
        b.importance = None
        assert all(np.array_equal(value, getattr(b, name)) for name, value in vars(plain).items())


def test_inverse_masking_masks_other_tokens(dataset):
    pairs = zip(batches(dataset)[0], batches(dataset, masking='inverse')[0])
    assert any(not torch.equal(plain.x_t, b.x_t) for plain, b in pairs)


def test_the_weight_of_a_masked_token_is_its_own_rate(dataset):
    found, data, a = batches(dataset, masking='proportional')
    for b in found:
        w = torch.exp(-.5 * (2 * a.rarity[b.targets].double() - 1))
        t = b.t_text[b.positions // data.seq_len].double()
        assert torch.allclose(b.weight.double() * 16 * data.seq_len, w / t, rtol=1e-4)


# ---- curriculum

def test_the_curriculum_weighs_one_group_after_the_other_with_mean_1_and_ends_flat(dataset):
    a, g = adaptive(curriculum=True, max_iters=900), torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (64, 40), generator=g)
    imp, scored = torch.rand(64, 40, generator=g), torch.rand(64, 40, generator=g) < .5
    counted = scored & (tokens != 4)
    low, high = imp[counted].quantile(.3), imp[counted].quantile(.7)
    groups = imp <= low, (imp > low) & (imp <= high), imp > high
    for step, group in ((0, 0), (299, 0), (300, 1), (599, 1), (600, 2), (700, 2)):
        weight = a.emphasis(imp, scored, tokens, step)
        assert a.stage(step) == group
        assert weight[counted].mean().item() == pytest.approx(1, abs=1e-5)
        assert (weight[~counted] == 1).all(), 'PAD, and what is not scored'
        inside, outside = counted & groups[group], counted & ~groups[group]
        ratio = weight[inside].min() / weight[outside].max()
        assert ratio == pytest.approx(2 if step <= 600 else 1 + (.9 - 700 / 900) / (.9 - 2 / 3),
                                      rel=1e-5)
    assert (a.emphasis(imp, scored, tokens, 811) == 1).all(), 'the last tenth is flat'
    nothing = a.emphasis(imp, torch.zeros_like(scored), tokens, 0)
    assert (nothing == 1).all(), 'nothing scored, nothing divided by 0'
    for b, plain in zip(batches(dataset, curriculum=True)[0], batches(dataset)[0]):
        assert torch.equal(b.x_t, plain.x_t), 'weights of the loss only'


# ---- learned importance

def test_masking_on_the_device_in_float32_is_that_of_float64(dataset, monkeypatch):
    """ Of 160 rows the masks are equal, the weights to 1e-5, and uniform numbers stay below 1. """
    knobs = dict(masking='proportional', beta=.9, curriculum=True)
    noisy, data, _ = noising(dataset, **knobs)
    on_device, _, _ = noising(dataset, **knobs, learns=True)
    rng = torch.Generator().manual_seed(0)
    tokens, (B, L) = data.rows(np.arange(160))[0], (160, data.seq_len)
    importance = torch.rand(B, L, generator=rng)
    t = torch.rand(B, generator=rng, dtype=torch.float64)
    u = torch.rand(B, L, generator=rng, dtype=torch.float64)
    u[0, 0], t[0] = 1 - 2 ** -40, 1                                      # all MASK, whatever u
    exact = noisy.text.masked_by(importance, tokens, t, torch.ones_like(t), u, 7, None)
    exact = exact.fields(tokens)

    # what is sent to the device, and what it makes of it
    mode, on = torch.zeros(B, dtype=torch.int64), torch.ones_like(t)
    monkeypatch.setattr('diffusion.draw_clocks', lambda *args: Clocks(mode, t, t, on, on))
    monkeypatch.setattr('diffusion.uniforms', lambda *args: u)
    batch = on_device(Rows(tokens, None, False, 7, 0), mode_shares('unconditional'), data)
    assert batch.x_t is None and all(batch.unmasked[name].dtype == torch.float32
                                     for name in ('t', 'text_on', 'u'))
    model = SimpleNamespace(importance=lambda tokens: (importance, importance))
    assert on_device.text.mask_on_device(model, batch) is importance
    for name in ('x_t', 'positions', 'targets'):
        assert torch.equal(getattr(batch, name), exact[name]), name
    assert (batch.x_t[0] == data.vocab_size).all()
    assert torch.allclose(batch.weight, exact['weight'], rtol=1e-5, atol=0)


@pytest.fixture
def learned():
    """ A model whose importance differs from token to token, and three texts, one with PAD. """
    torch.manual_seed(0)
    model = Model(ModelConfig(vocab_size=20, seq_len=12, depth=1, width=32, heads=2,
                              streams=('text',), importance='learned'))
    tokens = torch.randint(19, (3, 12))
    tokens[1, :4] = 19                                                   # PAD
    imp, same = model.importance(tokens)
    assert imp is same and (imp == .5).all(), 'at the start nothing is more important'
    # wider ones saturate the sigmoid
    torch.nn.init.normal_(model.importance.net.text_head.weight, std=.2)
    for block in model.importance.net.blocks:
        torch.nn.init.normal_(block.text.scale_shift_table, std=.2)
    return model, tokens


def test_importance_looks_both_ways_and_passes_no_gradient_to_the_trunk(learned):
    model, tokens = learned
    imp, _ = model.importance(tokens)
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 19
    assert not torch.equal(model.importance(changed)[0][0, 0], imp[0, 0])
    imp.sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == name.startswith('importance.')


def test_importance_is_within_0_and_1_and_one_half_of_PAD_and_MASK(learned):
    model, tokens = learned
    imp, _ = model.importance(tokens)
    assert 0 < imp.min() and imp.max() < 1 and imp.std() > .05 and (imp[tokens == 19] == .5).all()
    unwritten = torch.full((1, 12), 20)
    for importance in (model.importance, Importance('freq', 20, 12)):
        assert (importance(unwritten)[0] == .5).all()
    hybrid = Importance('hybrid', 20, 12)
    hybrid.rarity.copy_(torch.linspace(0, 1, 20))
    imp, learns = hybrid(tokens)
    assert torch.allclose(imp, .7 * learns + .3 * hybrid.rarity[tokens])


def test_a_learned_importance_ranks_the_tokens_by_their_loss():
    """ Losses by token with noise: after some steps the network's order is theirs, and its values
    are ranks. """
    torch.manual_seed(0)
    a = adaptive(learns=True, table=torch.full((20,), .5))
    net = Importance('learned', 20, 16, width=32)
    optimizer, hardness = torch.optim.AdamW(net.parameters(), lr=3e-3), torch.randn(20) * 3
    for _ in range(150):
        tokens = torch.randint(20, (32, 16))
        scored = torch.rand(tokens.shape) < .5
        x, learns = tokens[scored], net(tokens)[1][scored]
        loss = a.regression(learns, hardness[x].exp() + torch.rand(len(x)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    imp = net(torch.arange(19)[:, None].expand(19, 16))[1][:, 0].detach()
    rank = hardness[:19].argsort().argsort().float()
    assert torch.corrcoef(torch.stack((imp, rank)))[0, 1] > .95 and imp.std() > .2
    none = torch.zeros(0)
    assert a.regression(none, none, none) == 0, 'nothing scored: no loss, no NaN'


# ---- train.py

def steps_of(out):
    entries = [json.loads(line) for line in open(out / 'training_log.jsonl')]
    steps = [e for e in entries if 'loss' in e]
    assert [e['curriculum_stage'] for e in steps] == ['easy'] * 4 + ['medium'] * 4 + ['hard'] * 4
    for e in steps:
        assert 0 <= e['importance_min'] <= e['importance_mean'] <= e['importance_max'] <= 1
    return steps


ARGS = 'config/atat.py --masking=balanced --keep=9 --mode=unconditional+l2t+t2l'


@pytest.fixture(scope='module')
def whole(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'whole'
    train_each(dataset, {out: [ARGS]})
    return out


def test_a_run_that_learns_its_importance_goes_on_bit_for_bit(dataset, whole, tmp_path):
    parts = tmp_path / 'parts'
    assert all(0 < e['importance_loss'] < .3 for e in steps_of(whole))
    assert weights(whole)['importance.net.text_head.weight'].any(), 'it learns'
    cut(whole, parts, 'step-00000004')
    result = train(dataset, parts, ARGS)
    assert result.returncode == 0 and 'going on from' in result.stdout, result.stderr
    for kind in ('model', 'ema'):
        assert same(weights(whole, kind), weights(parts, kind))


def test_a_run_begun_from_another_has_the_rarity_of_its_own_texts(dataset, whole, tmp_path):
    other = tmp_path / 'other'
    (tmp_path / 'lines.txt').write_text('\n'.join(f'a red cat {i}' for i in range(60)))
    (code, _, err), = run_each(f'prepare.py --same_as={dataset} --input={tmp_path}/lines.txt '
                               f'--val_fraction=.3 --out={other}')
    assert code == 0, err
    train_each(other, {tmp_path / 'next': [ARGS, f'--init_from={whole}']})
    own = PackedDataset(other, 'train')
    now, before = (weights(out)['importance.rarity'] for out in (tmp_path / 'next', whole))
    assert torch.equal(now, rarity(counts(own), own.pad)) and not torch.equal(now, before)
