""" One network that writes both ways: rows that are read from left to right beside rows that are
masked. """
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F

from data import PackedDataset, Rows
from diffusion import CAUSAL, GaussianLatents, MaskedText, Noising, exact_nll, mode_shares
from launch import log, measured, run_each, train_each
from model import Stream
from noise import Noise, rows_of
from processes.gidd import GIDD
from sampling.knobs import SamplingKnobs
from sampling.latents import settle_latents
from sampling.run import Run
from sampling.writing import blank, settle, write
from tasks import infill
from toys import l2t, net_of, random_inputs, random_network


# ---- the network

@pytest.mark.parametrize('more', [{}, dict(bag=True, shortcut=True), dict(streams=('text',)),
                                  dict(shift=True)])
def test_a_batch_of_both_kinds_is_the_full_network_and_on_its_last_rows_the_causal_one(more):
    model, (x, z, t, s) = random_network(**more), random_inputs()
    if 'streams' in more:
        z = None
    both, latents = model(x, z, t, s, n_causal=2)
    full, latents_of_full = model(x, z, t, s)
    only = model(x, z, t, s, n_causal=6)[0]
    assert torch.allclose(both[:4], full[:4], atol=1e-5)
    assert torch.allclose(both[4:], only[4:], atol=1e-5)
    assert (full[4:] - only[4:]).abs().max() > .1
    if latents is not None and 'bag' not in more:
        assert torch.allclose(latents[:4], latents_of_full[:4], atol=1e-5)


def test_a_shifted_row_reads_the_token_before_the_place_that_it_predicts():
    model, (x, z, t, s) = random_network(shift=True, bag=True), random_inputs()
    plain = random_network(bag=True)
    later = F.pad(x[:, :-1], (1, 0), value=20)
    text, latent = model(x, z, t, s)
    assert torch.allclose(text, plain(later, z, t, s)[0], atol=1e-6)
    last = x.clone()
    last[:, -1] = (x[:, -1] + 1) % 20
    assert torch.allclose(model(last, z, t, s)[0], text), 'nothing is predicted from the last token'
    assert (model(last, z, t, s)[1] - latent).abs().max() > 1e-4, 'the bag reads all of a text'


@pytest.mark.parametrize('more', [{}, dict(bag=True, shortcut=True, text_clock=False),
                                  dict(streams=('text',))])
def test_a_cache_gives_the_logits_without_it_and_equal_beginnings_share_a_row_of_it(more):
    model, (x, z, _, _) = random_network(**more), random_inputs(V=18)
    # three drafts of each: one parts at position 4, and ends in two of the texts
    x, z = x.repeat_interleave(3, 0), z.repeat_interleave(3, 0)
    x[1::3, 4:] = x[:6, 4:]
    x[1:6:3, 6], x[1:6:3, 7:] = 18, 19
    if 'streams' in more:
        z = None
    net = net_of(model, eos=18, pad=19)
    zero = torch.zeros(18)
    with torch.no_grad():
        whole, _ = model(x, z, zero, zero, predict=('text',), n_causal=18)
        for prompt in (1, 5):
            cache = {}
            for end in range(prompt, 13):
                seen = model.shifted(x, 18)[:, :end]
                goes_on = (seen[:, 1:] < 18).all(1)
                step = net.next_logits(seen, cache, z, 0.)
                assert torch.allclose(step[goes_on], whole[goes_on, end - 1], atol=1e-4)
                sources = torch.arange(18) // 3 if z is not None else torch.zeros(18)
                states = torch.cat([sources[:, None], seen], 1)[goes_on]
                assert len(cache['reader'].row_of.unique()) == len(states.unique(dim=0))


@pytest.mark.parametrize('method', ['modulation', 'project', 'mlp', 'finish'])
def test_a_change_of_what_a_stream_does_reaches_the_cache(method, monkeypatch):
    model, (x, z, _, _) = random_network(), random_inputs(V=18)
    net, zero = net_of(model, eos=18, pad=19), torch.zeros(len(x))
    seen, unchanged = model.shifted(x, len(x)), getattr(Stream, method)

    def changed(self, *args):
        found = unchanged(self, *args)
        return tuple(1.2 * one for one in found) if isinstance(found, tuple) else 1.2 * found

    def logits_of(length):
        whole, _ = model(x, z, zero, zero, predict=('text',), n_causal=len(x))
        cache, steps = {}, []
        for end in range(1, length + 1):
            steps.append(net.next_logits(seen[:, :end], cache, z, 0.))
        return whole[:, :length], torch.stack(steps, 1)
    with torch.no_grad():
        before, _ = logits_of(6)
        monkeypatch.setattr(Stream, method, changed)
        whole, steps = logits_of(6)
    assert torch.allclose(steps, whole, atol=1e-3) and not torch.allclose(whole, before, atol=1e-2)


# ---- its two likelihoods, enumerated: ids 0, 1, EOS 2, PAD 3

V, L = 4, 3
TEXTS = [[2, 3, 3]] + [[a, 2, 3] for a in (0, 1)] + [[a, b, 2] for a in (0, 1) for b in (0, 1)] + \
        [list(x) for x in itertools.product((0, 1), repeat=3)]


def test_it_draws_from_left_to_right_what_its_causal_rows_say():
    model = random_network(V, L, streams=('text',), depth=1, heads=1, width=8)
    net, n = net_of(model, 'causal', eos=V - 2, pad=V - 1), 20_000
    knobs = SamplingKnobs(temperature=1.0, sample_batch=n)
    out = write(net, *blank(net, n, knobs), None, knobs)

    # the law: PAD is never written but by rule
    texts, zero = torch.tensor(TEXTS), torch.zeros(len(TEXTS))
    with torch.no_grad():
        logits, _ = model(texts, None, zero, zero, n_causal=len(TEXTS))
    logits[:, :, V - 1] = -torch.inf
    log_p = logits.double().log_softmax(2).gather(2, texts[..., None])[..., 0]
    law = log_p.masked_fill(texts == V - 1, 0).sum(1).exp()
    for x, p in zip(TEXTS, law.tolist()):
        share = (out == torch.tensor(x)).all(1).double().mean().item()
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n) + 1e-4, x


# ---- batches and losses

@pytest.mark.parametrize('mode', ['l2t+causal', 'unconditional+l2t+t2l+causal', '7*l2t+causal',
                                  'causal'])
def test_causal_rows_are_clean_scored_to_their_eos_and_last(dataset, mode):
    data = PackedDataset(str(dataset), 'train')
    text, shares = MaskedText(data.vocab_size), mode_shares(mode)
    noising = Noising(text, GaussianLatents(data.live), ('text', 'latent'), cond_drop=.25,
                      t_min=.1, causal_weight=2.)

    def batch_of(first, n):
        rows = Rows(*data.rows(range(first, first + n)), False, 3, first)
        return noising(rows, shares, data)
    B = 16
    batch = batch_of(0, B)
    n = batch.n_causal
    assert n == B * shares['causal'] and (batch.mode[B - n:] == CAUSAL).all()
    assert (batch.mode[:B - n] != CAUSAL).all()
    clean = {tuple(row.tolist()): z for row, z in zip(*data.rows(range(B)))}
    V, L = text.mask_id, data.seq_len
    scored = torch.zeros(B * L, dtype=torch.bool).index_fill(0, batch.positions, True).view(B, L)
    for i in range(B - n, B):
        target = torch.full((L,), -1)
        here = batch.positions // L == i
        target[batch.positions[here] % L] = batch.targets[here]
        # PAD where nothing is scored
        row = torch.where(target >= 0, target, V - 1)
        assert torch.equal(clean[tuple(row.tolist())],
                           batch.clean[i]), 'the latent is that of the text'
        assert torch.equal(batch.x_t[i], row), 'the network shifts it'
        assert torch.equal(scored[i], row != V - 1)
        assert torch.allclose(batch.weight[here], torch.tensor(2. / (B * L)))
        assert batch.t_text[i] == 0 and batch.t_latent[i] in (0, 1)
    masked = batch.x_t[:B - n] == V
    trained = torch.tensor([name not in (CAUSAL, 2) for name in batch.mode.tolist()])[:B - n]
    assert torch.equal(scored[:B - n] & masked, scored[:B - n])
    assert torch.equal(scored[:B - n][trained], masked[trained])

    # two processes draw what one draws
    halves = [batch_of(first, 8) for first in (0, 8)]
    both = torch.cat([half.x_t for half in halves])
    assert sorted(both.tolist()) == sorted(batch.x_t.tolist())
    noise = torch.cat([half.noise for half in halves])
    assert sorted(noise.flatten(1).tolist()) == sorted(batch.noise.flatten(1).tolist())


# ---- runs

@pytest.fixture(scope='module')
def dual(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp('dual')
    train_each(dataset, {folder / 'both': ['--mode=l2t+causal', '--learning_rate=1e-2',
                                           '--max_iters=40'],
                         folder / 'all': ['--mode=unconditional+l2t+t2l+causal'],
                         folder / 'causal': ['--mode=causal'],
                         folder / 'masked': ['--mode=l2t']})
    return folder


def test_a_dual_run_logs_validates_and_evaluates_both(dual):
    entries = log(dual / 'both')
    last = entries[40, False]
    assert last['modes'] == dict(unconditional=0, l2t=.5, t2l=0, causal=.5)
    assert 0 < last['causal_nats_per_token'] < entries[1, False]['causal_nats_per_token']
    validations = [json.loads(line) for line in (dual / 'both'
                                                 / 'training_log.jsonl').read_text().splitlines()
                   if 'val_text' in line]
    assert validations and all(v['val_causal'] > 0 and v['val_text'] > 0 for v in validations)

    small = ['--device=cpu', '--dtype=float32', '--n=6', '--draws=2']
    outputs = run_each(*[['evaluate.py', f'--out_dir={dual / name}', *small]
                         for name in ('both', 'all', 'causal', 'masked')])
    assert [code for code, _, _ in outputs] == [0] * 4, outputs
    found = {name: measured(dual / name) for name in ('both', 'all', 'causal', 'masked')}
    for name in ('both', 'all'):
        assert {'nelbo/nats_per_token', 'nelbo/causal_nats_per_token',
                'nelbo/shuffled/causal_nats_per_token',
                'nelbo/null/causal_nats_per_token', 'nelbo/causal_nats_per_token_se',
                'l2t/bleu'} <= set(found[name])
    assert 'nelbo/latent_mse' in found['all'] and 'nelbo/latent_mse' not in found['both']
    assert 'nelbo/nats_per_token' not in found['causal']
    assert 'nelbo/causal_nats_per_token' in found['causal'] and 'l2t/f1' in found['causal']
    assert 'nelbo/causal_nats_per_token' not in found['masked']


def test_the_default_writes_from_left_to_right_and_every_sampler_still_fills_masks(dual):
    net = Run(str(dual / 'both'), device='cpu', dtype='float32').net
    z = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(1))
    assert l2t(net, z).equal(l2t(net, z, sampler='autoregressive', temperature=0.)), 'greedy'

    # by hand, without a cache; latents at clock s are alpha z + sigma e
    zero, ones = torch.zeros(3), torch.ones(3)
    null = net.nothing(Noise(0, rows_of(3)))
    for guidance, s in ((1.0, 0.0), (2.0, 0.0), (1.0, 0.6), (2.0, 0.6)):
        tokens = torch.full((3, net.L), net.text.mask_id)
        with torch.no_grad():
            for i in range(net.L):
                z_s = math.cos(math.pi / 2 * s) * z
                c = net.model(tokens, z_s, zero, zero + s, n_causal=3)[0][:, i].log_softmax(1)
                u = net.model(tokens, null, zero, ones, n_causal=3)[0][:, i].log_softmax(1)
                logits = guidance * c + (1 - guidance) * u
                logits[:, net.pad] = -torch.inf
                ended = (tokens[:, :i] == net.eos).any(1)
                tokens[:, i] = torch.where(ended, net.pad, logits.argmax(1))
        written = l2t(net, z, guidance=guidance, latent_clock=s)
        assert torch.equal(written, tokens), (guidance, s)

        # by masked rows, all tokens in one call
        if guidance == 1:
            with torch.no_grad():
                masks = torch.full_like(tokens, net.text.mask_id)
                logits = net.model(masks, z_s, ones, zero + s)[0]
            found = l2t(net, z, sampler='ancestral', steps=1, temperature=0., latent_clock=s)
            assert torch.equal(found, logits.argmax(2)), s

    # masks are filled as ever; what is known before them is continued
    for sampler in ('confidence', 'ancestral', 'first_hitting', 'remdm', 'dfm', 'cached'):
        assert (l2t(net, z, sampler=sampler, steps=4) < net.text.mask_id).all()
    known = torch.full((3, net.L), net.text.mask_id)
    known[:, :2] = torch.tensor([5, 6])
    from_left = SamplingKnobs(sampler='autoregressive')
    continued = write(net, known, known != net.text.mask_id, z, from_left)
    assert (continued[:, :2] == torch.tensor([5, 6])).all() and (continued < net.text.mask_id).all()
    known[:, 5] = 7
    forced = write(net, known, known != net.text.mask_id, z, from_left)
    assert (forced[:, 5] == 7).all()
    assert torch.equal(forced[:, :5], continued[:, :5]), 'what stands behind is not seen'
    filled = write(net, known, known != net.text.mask_id, z, SamplingKnobs())
    assert (filled[:, 5] == 7).all(), 'gaps are filled by diffusion'


def test_beams_find_the_likeliest_filling_and_what_stands_behind_a_gap_decides():
    """ By enumeration: ids 0 to 4, of which 3 is never written, EOS 5, PAD 6, MASK 7. """
    model = random_network(7, 6, shortcut=True)
    # so that a token depends on the one before it
    torch.nn.init.normal_(model.embed.weight, std=10.)
    net = net_of(model, 'l2t+causal', eos=5, pad=6, banned=[3])
    n, rng = 60, torch.Generator().manual_seed(0)
    z = torch.randn(n, model.config.n_latents, model.config.latent_dim, generator=rng)
    tokens = torch.randint(5, (n, 6), generator=rng)
    tokens[:, 4:] = torch.tensor([5, 6])
    tokens[::3, 5], tokens[::3, 4] = 5, 2                                # also without PAD
    masked = torch.tensor([False, True, True, False, False, False]).expand(n, -1)

    fillings = torch.tensor(list(itertools.product((0, 1, 2, 4), repeat=2)))
    all_texts = tokens[:, None].repeat(1, 16, 1)
    all_texts[:, :, 1:3] = fillings
    nats = exact_nll(model, all_texts.flatten(0, 1), z.repeat_interleave(16, 0),
                     torch.zeros(16 * n)).view(n, 16)
    best = all_texts[torch.arange(n), nats.argmin(1)]

    gaps = torch.where(masked, 7, tokens)
    assert infill.left_to_right(net, gaps, masked, z, K=16, batch=40).equal(best)
    greedy = infill.left_to_right(net, gaps, masked, z, K=1)
    assert greedy[~masked].equal(tokens[~masked])
    assert (greedy != best).any(), 'a beam that sees nothing behind the gap'
    assert all((greedy[i, 1:3] == fillings).all(1).any() for i in range(n))


def test_a_text_has_one_score_whatever_stands_behind_its_eos(dual, dataset):
    """ Diffusion may write an EOS and more words, or PAD and no EOS: what is read is the same text.
    """
    run = Run(str(dual / 'both'), device='cpu', dtype='float32')
    data, (eos, pad) = PackedDataset(str(dataset), 'val'), (run.tokenizer.eos, run.tokenizer.pad)
    text = [5, 6, 7, 8]
    n_rest = run.net.L - len(text) - 1
    same = torch.tensor([[*text, eos, *[pad] * n_rest], [*text, eos, *[9] * n_rest],
                         [*text, pad, *[pad] * n_rest], [pad, *text, eos, *[pad] * (n_rest - 1)]])
    raw = torch.as_tensor(data.raw_latents(range(1))).expand(4, -1, -1)
    nats = run.nats(same, raw)
    assert torch.allclose(nats, nats[0].expand(4))
    assert not torch.allclose(nats[0], run.nats(torch.full_like(same[:1], 5), raw[:1]))


def test_what_is_left_open_is_chosen_by_what_a_text_is_written_from():
    """ Several greedy texts of one source would be equal; drafts from left to right differ by a
    lower temperature; a sampler that draws by itself, as that of GIDD, keeps 1. """
    masked, gidd = net_of(), net_of(text=GIDD(9))
    dual = net_of(mode='unconditional+l2t+t2l+causal')
    latent, both = dict(from_latent=True), dict(from_latent=True, must_differ=True)
    for net, given, asked, sampler, temperature in (
            (masked, both, {}, 'confidence', .7), (masked, latent, {}, 'confidence', 0),
            (masked, {}, {}, 'ancestral', 1), (gidd, both, {}, 'ancestral', 1),
            (masked, both, dict(sampler='remdm'), 'remdm', 1),
            (masked, both, dict(temperature=.3), 'confidence', .3),
            (masked, both, dict(rerank=4), 'confidence', .7),
            (dual, latent, {}, 'autoregressive', 0), (dual, both, {}, 'autoregressive', .7),
            (dual, both, dict(rerank=4), 'autoregressive', .4),
            (dual, {}, {}, 'autoregressive', 1),
            (dual, dict(from_text=True), dict(rerank=4), 'confidence', 0)):
        _, knobs = settle(net, SamplingKnobs(**asked), **given)
        assert (knobs.sampler, knobs.temperature) == (sampler, temperature), (given, asked)
    for from_text, steps in ((True, 1), (False, 32)):
        knobs = settle_latents(masked, SamplingKnobs(), from_text)
        assert knobs.latent_steps == steps, 'the mean of what fits'


@pytest.mark.parametrize('mode, expected, target', [
    ('l2t', (False, True, False), 'v'),
    ('l2t+causal', (True, True, False), 'v'),
    ('unconditional+l2t', (False, True, True), 'x0'),
    ('t2l', (False, False, True), 'x0')])
def test_a_mode_brings_what_it_needs_and_a_run_keeps_it(dataset, tmp_path, mode, expected, target):
    out, other = tmp_path / 'run', tmp_path / 'next'
    train_each(dataset, {out: [f'--mode={mode}', '--max_iters=2']})
    # another mode begins with these weights, and so with this network
    train_each(dataset, {other: ['--mode=unconditional+l2t+t2l', f'--init_from={out}',
                                 '--max_iters=2']})
    for folder in (out, other):
        shape = Run(str(folder), device='cpu').net.model.config
        assert (shape.shift, shape.shortcut, shape.bag) == expected
        assert json.loads((folder / 'config.json').read_text())['latent_target'] == target


def test_a_run_that_goes_on_with_other_modes_has_no_best_validation_yet(dataset, tmp_path):
    out = tmp_path / 'run'
    train_each(dataset, {out: ['--mode=causal', '--max_iters=4']})
    before = (out / 'best').read_text()
    train_each(dataset, {out: ['--mode=l2t+causal', '--max_iters=8']})
    # a bound and causal nats add up to more than the bound alone
    assert (out / 'best').read_text() != before
