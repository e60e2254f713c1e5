""" One network that writes both ways: rows that are read from left to right beside rows that are
masked. """
import itertools
import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F

from data import PackedDataset, Rows
from diffusion import (CAUSAL, MODES, GaussianLatents, MaskedText, Noising, exact_nll,
                       mode_shares)
from launch import flags, log, measured, run_together, train_each
from model import Stream
from noise import Noise, rows_of
from processes.gidd import GIDD
from sampling.beams import fill_by_beams
from sampling.knobs import SamplingKnobs
from sampling.latents import settle_latents
from sampling.run import Run
from sampling.texts import blank, settle, write
from toys import l2t, net_of, random_inputs, random_network


# ---- the network

@pytest.mark.parametrize('more', [{}, dict(bag=True, shortcut=True), dict(streams=('text',)),
                                  dict(shift=True)])
def test_a_batch_of_both_kinds_is_the_full_network_and_on_its_last_rows_the_causal_one(more):
    model, (x, z, t, s) = random_network(**more), random_inputs()
    if 'streams' in more:
        z = None
    (both, of_both), (full, of_full), (only, _) = (model(x, z, t, s, n_causal=n) for n in (2, 0, 6))
    assert torch.allclose(both, torch.cat([full[:4], only[4:]]), atol=1e-5)
    assert (full[4:] - only[4:]).abs().max() > .1
    if z is not None and 'bag' not in more:
        assert torch.allclose(of_both[:4], of_full[:4], atol=1e-5)


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


@torch.no_grad()
def test_it_draws_from_left_to_right_what_its_causal_rows_say():
    model = random_network(V, L, streams=('text',), depth=1, heads=1, width=8)
    net, n = net_of(model, 'causal', eos=V - 2, pad=V - 1), 20_000
    knobs = SamplingKnobs(temperature=1.0, sample_batch=n)
    out = write(net, *blank(net, n, knobs), None, knobs)

    # the law: PAD is never written but by rule
    texts, zero = torch.tensor(TEXTS), torch.zeros(len(TEXTS))
    logits, _ = model(texts, None, zero, zero, n_causal=len(TEXTS))
    logits[:, :, V - 1] = -torch.inf
    log_p = logits.double().log_softmax(2).gather(2, texts[..., None])[..., 0]
    law = log_p.masked_fill(texts == V - 1, 0).sum(1).exp()
    shares = (out == texts[:, None]).all(2).double().mean(1)
    assert ((shares - law).abs() < 5 * (law * (1 - law) / n).sqrt() + 1e-4).all()


# ---- batches and losses

T2L = list(MODES).index('t2l')

@pytest.fixture(params=['l2t+causal', 'unconditional+l2t+t2l+causal', '7*l2t+causal', 'causal'])
def batches(request, dataset):
    """ batches(first, n) -> a Batch of n rows of step 3 of a mode. """
    data, shares = PackedDataset(str(dataset), 'train'), mode_shares(request.param)
    noising = Noising(MaskedText(data.vocab_size), GaussianLatents(data.live), ('text', 'latent'),
                      cond_drop=.25, t_min=.1, causal_weight=2.)

    def of_rows(first, n):
        rows = Rows(*data.rows(range(first, first + n)), False, 3, first)
        batch = noising(rows, shares, data)
        assert batch.n_causal == n * shares['causal']
        return batch
    return of_rows


def scored_by(batch):
    """ (targets (B, L), weights (B, L)) of a Batch; -1 and 0 where nothing is scored. """
    targets, weights = torch.full_like(batch.x_t, -1), torch.zeros(batch.x_t.shape)
    targets.flatten()[batch.positions] = batch.targets
    weights.flatten()[batch.positions] = batch.weight
    return targets, weights


def test_causal_rows_are_clean_scored_to_their_eos_and_last(batches, dataset):
    data, batch = PackedDataset(str(dataset), 'train'), batches(0, 16)
    of_text = {tuple(row.tolist()): z for row, z in zip(*data.rows(range(16)))}
    targets, weights = scored_by(batch)
    is_causal = torch.arange(16) >= 16 - batch.n_causal
    assert torch.equal(batch.mode == CAUSAL, is_causal)

    # PAD where nothing is scored
    causal = torch.where(targets >= 0, targets, data.pad)[is_causal]
    assert torch.equal(batch.x_t[is_causal], causal), 'the network shifts it'
    for row, z in zip(causal, batch.clean[is_causal]):
        assert torch.equal(of_text[tuple(row.tolist())], z), 'the latent is that of the text'
    each = torch.tensor(2. / weights.numel())
    assert torch.allclose(weights[is_causal], torch.where(causal != data.pad, each, 0))
    assert not batch.t_text[is_causal].any()
    assert set(batch.t_latent[is_causal].tolist()) <= {0, 1}

    # of the others, masks: all of them where text is learned
    masked, scored = batch.x_t == data.vocab_size, targets >= 0
    learns_text = ~is_causal & (batch.mode != T2L)
    assert torch.equal(scored[learns_text], masked[learns_text])
    assert not scored[batch.mode == T2L].any()


def test_two_processes_draw_what_one_draws(batches):
    whole, halves = batches(0, 16), [batches(first, 8) for first in (0, 8)]

    def rows(*some):
        return sorted(torch.cat([torch.cat([one.x_t, one.noise.flatten(1)], 1)
                                 for one in some]).tolist())
    assert rows(*halves) == rows(whole)


# ---- runs

KINDS = {'both': ['--mode=l2t+causal', '--learning_rate=1e-2', '--max_iters=40'],
         'causal': ['--mode=causal'], 'masked': ['--mode=l2t']}


@pytest.fixture(scope='module')
def dual(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp('dual')
    train_each(dataset, {folder / name: args for name, args in KINDS.items()})
    return folder


@pytest.fixture(scope='module')
def run(dual):
    return Run(str(dual / 'both'), device='cpu', dtype='float32')


def test_a_dual_run_logs_and_validates_both(dual):
    entries = log(dual / 'both')
    last = entries[40, False]
    assert last['modes'] == dict(unconditional=0, l2t=.5, t2l=0, causal=.5, complete=0)
    assert 0 < last['causal_nats_per_token'] < entries[1, False]['causal_nats_per_token']
    validations = [entry for (_, is_validation), entry in entries.items() if is_validation]
    assert validations and all(v['val_causal'] > 0 and v['val_text'] > 0 for v in validations)


BOUND, OF_CAUSAL = 'nelbo/nats_per_token', 'nelbo/causal_nats_per_token'


def test_each_run_is_evaluated_in_the_modes_that_it_has(dual, mixed, tmp_path):
    outs = dict.fromkeys(KINDS)
    for name in outs:
        outs[name] = dual / name
    outs['all'] = shutil.copytree(mixed, tmp_path / 'all')
    results = run_together(*[['evaluate.py', *flags(out_dir=out, device='cpu', dtype='float32', n=6,
                                                    draws=2)] for out in outs.values()])
    assert not any(code for code, _, _ in results), results
    found = {name: measured(out).keys() for name, out in outs.items()}
    for name in ('both', 'all'):
        assert found[name] >= {BOUND, OF_CAUSAL, f'{OF_CAUSAL}_se', 'l2t/bleu',
                               'nelbo/shuffled/causal_nats_per_token',
                               'nelbo/null/causal_nats_per_token'}
    assert 'nelbo/latent_mse' in found['all'] and 'nelbo/latent_mse' not in found['both']
    assert BOUND not in found['causal'] and found['causal'] >= {OF_CAUSAL, 'l2t/f1'}
    assert OF_CAUSAL not in found['masked']


@torch.no_grad()
@pytest.mark.parametrize('guidance', [1.0, 2.0])
@pytest.mark.parametrize('s', [0.0, 0.6])
def test_the_default_writes_from_left_to_right_as_by_hand(run, guidance, s):
    """ Without a cache; latents at clock s are alpha z + sigma e. """
    net = run.net
    z = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(1))
    zero, ones, z_s = torch.zeros(3), torch.ones(3), math.cos(math.pi / 2 * s) * z
    null = net.nothing(Noise(0, rows_of(3)))
    tokens = torch.full((3, net.L), net.text.mask_id)
    for i in range(net.L):
        c, _ = net.model(tokens, z_s, zero, zero + s, n_causal=3)
        u, _ = net.model(tokens, null, zero, ones, n_causal=3)
        logits = guidance * c[:, i].log_softmax(1) + (1 - guidance) * u[:, i].log_softmax(1)
        logits[:, net.pad] = -torch.inf
        ended = (tokens[:, :i] == net.eos).any(1)
        tokens[:, i] = torch.where(ended, net.pad, logits.argmax(1))
    knobs = dict(guidance=guidance, latent_clock=s)
    assert torch.equal(l2t(net, z, **knobs), tokens)
    assert torch.equal(l2t(net, z, sampler='autoregressive', temperature=0., **knobs), tokens)

    # by masked rows, all tokens in one call
    masks = torch.full_like(tokens, net.text.mask_id)
    logits, _ = net.model(masks, z_s, ones, zero + s)
    found = l2t(net, z, sampler='ancestral', steps=1, temperature=0., latent_clock=s)
    assert torch.equal(found, logits.argmax(2))


def test_what_is_known_before_the_masks_is_continued_and_gaps_are_filled_by_diffusion(run):
    net, z = run.net, torch.randn(3, 1, 16)
    known = torch.full((3, net.L), net.text.mask_id)
    known[:, :2] = torch.tensor([5, 6])

    def written(**knobs):
        return write(net, known, known != net.text.mask_id, z, SamplingKnobs(**knobs))

    continued = written(sampler='autoregressive')
    assert torch.equal(continued[:, :2], known[:, :2]) and (continued < net.text.mask_id).all()
    known[:, 5] = 7
    forced = written(sampler='autoregressive')
    assert (forced[:, 5] == 7).all()
    assert torch.equal(forced[:, :5], continued[:, :5]), 'what stands behind is not seen'
    assert (written()[:, 5] == 7).all()


def test_beams_find_the_likeliest_filling_and_what_stands_behind_a_gap_decides():
    """ By enumeration: ids 0 to 4, of which 3 is never written, EOS 5, PAD 6, MASK 7. """
    model = random_network(7, 6, shortcut=True)
    # so that a token depends on the one before it
    torch.nn.init.normal_(model.embed.weight, std=10.)
    net, n = net_of(model, 'l2t+causal', eos=5, pad=6, banned=[3]), 60
    z = torch.randn(n, model.config.n_latents, model.config.latent_dim)
    tokens = torch.randint(5, (n, 6))
    tokens[:, 4:] = torch.tensor([5, 6])
    tokens[::3, 4:] = torch.tensor([2, 5])                               # also without PAD
    masked = torch.tensor([False, True, True, False, False, False]).expand(n, -1)

    fillings = torch.tensor(list(itertools.product((0, 1, 2, 4), repeat=2)))
    texts = tokens[:, None].repeat(1, 16, 1)
    texts[:, :, 1:3] = fillings
    nats = exact_nll(model, texts.flatten(0, 1), z.repeat_interleave(16, 0), torch.zeros(16 * n))
    best = texts[torch.arange(n), nats.view(n, 16).argmin(1)]

    gaps = torch.where(masked, 7, tokens)
    assert fill_by_beams(net, gaps, masked, z, K=16, batch=40).equal(best)
    greedy = fill_by_beams(net, gaps, masked, z, K=1)
    assert greedy[~masked].equal(tokens[~masked])
    assert (greedy != best).any(), 'a beam that sees nothing behind the gap'
    assert (greedy[:, None, 1:3] == fillings).all(2).any(1).all()


def test_a_text_has_one_score_whatever_stands_behind_its_eos(run, dataset):
    """ Diffusion may write an EOS and more words, or PAD and no EOS: what is read is the same text.
    """
    eos, pad, text = run.net.eos, run.net.pad, [5, 6, 7, 8]
    behind = [[*text, eos], [*text, eos, *[9] * run.net.L], [*text, pad], [pad, *text, eos],
              [5] * 99]
    tokens = torch.tensor([(row + [pad] * run.net.L)[:run.net.L] for row in behind])
    raw = PackedDataset(str(dataset), 'val').raw_latents([0]).expand(5, -1, -1)
    nats = run.nats(tokens, raw)
    assert torch.allclose(nats[:4], nats[0].expand(4)) and not torch.allclose(nats[4], nats[0])


LATENT, BOTH = dict(from_latent=True), dict(from_latent=True, must_differ=True)


@pytest.mark.parametrize('kind, given, asked, sampler, temperature', [
    ('masked', BOTH, {}, 'confidence', .7),
    ('masked', LATENT, {}, 'confidence', 0),
    ('masked', {}, {}, 'ancestral', 1),
    ('masked', BOTH, dict(sampler='remdm'), 'remdm', 1),
    ('masked', BOTH, dict(temperature=.3), 'confidence', .3),
    ('masked', BOTH, dict(rerank=4), 'confidence', .7),
    ('gidd', BOTH, {}, 'ancestral', 1),
    ('dual', LATENT, {}, 'autoregressive', 0),
    ('dual', BOTH, {}, 'autoregressive', .7),
    ('dual', BOTH, dict(rerank=4), 'autoregressive', .4),
    ('dual', {}, {}, 'autoregressive', 1),
    ('dual', dict(from_text=True), dict(rerank=4), 'confidence', 0)])
def test_what_is_left_open_is_chosen_by_what_a_text_is_written_from(kind, given, asked, sampler,
                                                                    temperature):
    """ Several greedy texts of one source would be equal; drafts from left to right differ by a
    lower temperature; a sampler that draws by itself, as that of GIDD, keeps 1. """
    net = net_of(text=GIDD(9) if kind == 'gidd' else None,
                 mode='unconditional+l2t+t2l' + '+causal' * (kind == 'dual'))
    _, knobs = settle(net, SamplingKnobs(**asked), **given)
    assert (knobs.sampler, knobs.temperature) == (sampler, temperature)


def test_a_latent_from_a_text_is_the_mean_of_what_fits():
    for from_text, steps in ((True, 1), (False, 32)):
        assert settle_latents(net_of(), SamplingKnobs(), from_text).latent_steps == steps


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
