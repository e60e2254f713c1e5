""" What diffusion is measured against. A rival that reads or searches less than it may would be
beaten, and no figure would show why. """
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sampling.beams import fill_by_beams
from sampling.knobs import SamplingKnobs
from sampling.likelihood import changed_by
from tasks import edit, infill
from tasks.common import Context
from toys import net_of, random_network, toy_run

V, L, EOS, PAD = 11, 8, 9, 10


def decode(ids):
    return ' '.join(f'w{i}' for i in ids if i < EOS)


@pytest.fixture
def run():
    """ A random network that writes both ways, whose tokens depend on the latent and on each
    other. """
    model = random_network(V, L, shortcut=True)
    torch.nn.init.normal_(model.embed.weight, std=10.)
    net = net_of(model, 'l2t+causal', eos=EOS, pad=PAD, banned=[3])
    return toy_run(net, tokenizer=SimpleNamespace(eos=EOS, pad=PAD, decode=decode))


def context():
    """ 60 texts of 1 to 7 words, and another latent for each. """
    rng = torch.Generator().manual_seed(0)
    lengths = torch.arange(60)[:, None] % 7 + 1
    tokens = torch.randint(EOS, (60, L), generator=rng)
    tokens = torch.where(torch.arange(L) < lengths, tokens, PAD).scatter(1, lengths, EOS)
    knobs = dict(vars(SamplingKnobs(steps=2)), infill_share=.5)
    return Context(knobs, '', [decode(row) for row in tokens.tolist()], tokens,
                   torch.randn(60, 2, 6, generator=rng)), lengths


def test_gaps_are_a_share_of_each_text_and_their_rival_is_8_beams_from_the_same_latent(run):
    ctx, lengths = context()
    masked = infill.gaps_of(run, ctx.tokens, .5, 0)
    assert masked.sum(1, keepdim=True).equal((lengths + 1) // 2)
    assert not (masked & (ctx.tokens >= EOS)).any()

    def accuracy(K, z):
        gaps = torch.where(masked, V, ctx.tokens)
        found = fill_by_beams(run.net, gaps, masked, z, K)
        n_right = ((found == ctx.tokens) & masked).sum(1)
        return 100 * (n_right / masked.sum(1)).mean().item()
    figures = infill.measure(run, ctx)
    expected = accuracy(8, ctx.raw)
    assert figures['left_to_right', 'token_accuracy'].value == pytest.approx(expected)
    for weaker in (accuracy(1, ctx.raw), accuracy(8, ctx.raw.flip(0))):
        assert abs(weaker - expected) > .1, 'the test would see nothing'


def test_an_edit_changes_what_loses_and_its_rival_is_8_beams_from_the_new_latent(run, monkeypatch):
    ctx, _ = context()
    z = ctx.raw.flip(0)
    asked = SimpleNamespace(texts=ctx.texts, tokens=ctx.tokens, raw_now=ctx.raw, raw=z,
                            raw_wanted=z, old=ctx.texts, new=ctx.texts)
    ctx.knobs['strength'] = .6
    masked = changed_by(run.net, ctx.tokens, ctx.raw, z, SamplingKnobs(strength=.6))
    gaps = torch.where(masked, V, ctx.tokens)
    nothing = changed_by(run.net, ctx.tokens, ctx.raw, ctx.raw, SamplingKnobs())
    assert nothing.equal((torch.arange(L) == 0).expand(60, L)), 'both read the same half'
    texts, weaker, of_old = (run.decode(fill_by_beams(run.net, gaps, masked, latents, K))
                             for latents, K in ((z, 8), (z, 1), (ctx.raw, 8)))
    assert texts != weaker and texts != of_old, 'the test would see nothing'

    monkeypatch.setattr(edit, 'what_is_asked', lambda *args: asked)
    monkeypatch.setattr(edit, 'compare_edits', lambda run, asked, written: {
        'same': np.array([100.0 * (a == b) for a, b in zip(written, texts)])})
    figures = edit.measure(run, ctx)
    assert figures['left_to_right', 'same'].value == 100
