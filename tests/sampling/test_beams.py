""" Whole texts by beam search, against all texts. """
import itertools

import pytest
import torch
import torch.nn.functional as F

from sampling import drafts
from sampling import run as run_module
from sampling.beams import beams, write_by_beams
from sampling.knobs import SamplingKnobs
from sampling.texts import blank, write
from toys import net_of, random_network, toy_run

V, L, EOS, PAD, BANNED = 7, 4, 5, 6, 3
WORDS = (0, 1, 2, 4)
TEXTS = torch.tensor([[*words, *[EOS, PAD, PAD, PAD, PAD][:L - n]]
                      for n in range(L + 1) for words in itertools.product(WORDS, repeat=n)])
Z = torch.randn(40, 2, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net():
    """ A random network whose tokens depend on the latent and on each other. """
    model = random_network(V, L, shortcut=True)
    torch.nn.init.normal_(model.embed.weight, std=10.)
    return net_of(model, 'l2t+causal', eos=EOS, pad=PAD, banned=[BANNED])


@torch.no_grad()
def log_p_of_texts(net):
    """ (40, n): of all texts, by the network as it is trained. PAD follows an EOS by rule. """
    found = []
    for z in Z:
        zero = torch.zeros(len(TEXTS))
        logits, _ = net.model(TEXTS, z.expand(len(TEXTS), -1, -1), zero, zero,
                              n_causal=len(TEXTS), predict=('text',))
        logits[:, :, PAD] = -torch.inf
        log_p = logits.log_softmax(2).gather(2, TEXTS[..., None])[..., 0]
        found.append(log_p.masked_fill(TEXTS == PAD, 0).sum(1))
    return torch.stack(found)


def per_token(log_p):
    """ (40, n) of all TEXTS: an EOS is a token. """
    return log_p / (TEXTS != PAD).sum(1)


def test_many_beams_find_the_likeliest_of_all_texts_per_token_and_one_is_greedy(net):
    log_p = log_p_of_texts(net)
    best = per_token(log_p).topk(3).indices                              # (40, 3)
    masked = torch.full((len(Z), L), V)
    found = beams(net, masked, masked == V, Z, 400, may_end=True)        # more than there are texts
    assert (found[:, :3] == TEXTS[best]).all(), 'in order'
    assert len({TEXTS[i].eq(PAD).sum().item() for i in best[:, 0]}) > 1, 'of several lengths'
    assert not best[:, 0].equal(log_p.argmax(1)), 'the likeliest are others'

    # fewer beams keep those of the largest score, whatever their length, in the same order
    few = write_by_beams(net, Z, SamplingKnobs(beams=64))
    index = (few[:, :, None] == TEXTS).all(3).byte().argmax(2)           # (40, 64)
    assert TEXTS[index].equal(few)
    assert (per_token(log_p).gather(1, index).diff(dim=1) < 1e-6).all()
    assert all(set(row.tolist()) <= set(found.tolist())
               for row, found in zip(log_p.topk(3).indices, index))

    one = write_by_beams(net, Z, SamplingKnobs(beams=1))[:, 0]
    greedy = write(net, *blank(net, len(Z), SamplingKnobs()), Z,
                   SamplingKnobs(sampler='autoregressive', temperature=0.))
    assert one.equal(greedy) and not one.equal(TEXTS[best[:, 0]])

    # a text has the same beams in any batch
    alone = write_by_beams(net, Z[2:3], SamplingKnobs(beams=3, sample_batch=1))
    assert alone.equal(write_by_beams(net, Z, SamplingKnobs(beams=3))[2:3])


def test_a_latent_with_errors_is_read_at_its_clock(net):
    clean = write_by_beams(net, Z, SamplingKnobs(beams=4))
    same = SamplingKnobs(beams=4, temperature=0., guidance=1.)
    assert write_by_beams(net, Z, same).equal(clean)
    noisy = write_by_beams(net, Z, SamplingKnobs(beams=4, latent_clock=.7))
    at_its_clock = net.at_clock(Z, .7)
    tokens = torch.full((len(Z), L), V)
    expected = beams(net, tokens, tokens == V, at_its_clock, 4, may_end=True, s=.7)
    unscaled = beams(net, tokens, tokens == V, Z, 4, may_end=True, s=.7)
    assert noisy.equal(expected) and not noisy.equal(clean) and not noisy.equal(unscaled)


def test_drafts_are_the_first_new_beam_of_each_aim(net):
    """ Round 1: the beams of the latent. Later: of each of the four nearest aims one. """
    rounds = []

    def encoder(texts):
        rounds.append(texts)
        return torch.tensor([eval(text) for text in texts])
    run = toy_run(net, encoder=encoder)
    run.decode = lambda tokens: [str(F.one_hot(x[:2], 6).tolist()) for x in tokens % 6]
    beams_of = write_by_beams(net, run.stats.standardise(Z), SamplingKnobs(beams=8))
    most = 0
    for z, texts in zip(Z, beams_of):
        first = list(dict.fromkeys(run.decode(texts)))[:4]
        aims = z.expand(len(first), -1, -1)
        cosine = F.cosine_similarity(run.encode(first).flatten(1), aims.flatten(1)).tolist()
        assert run.write(latents=z[None], beams=8, rerank=4) == [first[cosine.index(max(cosine))]]

        rounds.clear()
        run.write(latents=z[None], beams=8, rerank=24)
        assert rounds[0] == first and max(map(len, rounds)) <= 4
        embedded = sum(rounds, [])
        assert len(set(embedded)) == len(embedded), 'none is embedded twice'
        most = max([most, *map(len, rounds[1:])])
    assert most > 1, 'several aims have new ones'


def test_a_text_without_a_new_draft_is_not_searched_again(net, monkeypatch):
    searched = []

    def always_the_same(net, z, knobs):
        searched.append(len(z))
        return TEXTS[[7, 8, 9, 10]].expand(len(z), -1, -1)
    monkeypatch.setattr(drafts, 'write_by_beams', always_the_same)
    run = toy_run(net, encoder=lambda texts: torch.ones(len(texts), 2, 6))
    run.decode = lambda tokens: [str(x.tolist()) for x in tokens]
    run.write(latents=Z[:2], beams=4, rerank=24)
    assert searched == [2, 8], 'of six rounds two: four aims of each text had nothing new'


def test_drafts_come_from_4_beams_unless_a_knob_asks_for_random_ones(net, monkeypatch):
    searched = []

    def noted(net, z, knobs):
        searched.append(knobs.beams)
        return write_by_beams(net, z, knobs)
    monkeypatch.setattr(drafts, 'write_by_beams', noted)
    monkeypatch.setattr(run_module, 'write_by_beams', noted)
    run = toy_run(net, encoder=lambda texts: torch.ones(len(texts), 2, 6))
    run.decode = lambda tokens: [str(x.tolist()) for x in tokens]

    run.write(latents=Z[:2], rerank=3)
    assert set(searched) == {4}
    searched.clear()
    for knobs in (dict(beams=1), dict(temperature=.4), dict(guidance=2.), dict(nucleus=.9),
                  dict(num_samples=2), dict(on_step=lambda *step: None)):
        run.write(latents=Z[:2], rerank=3, **knobs)
    run.write(latents=Z[:2])
    assert not searched


@pytest.mark.parametrize('knobs', [dict(temperature=.5), dict(guidance=2.), dict(nucleus=.9),
                                   dict(length=2), dict(sampler='confidence')])
def test_beams_refuse_what_they_do_not_have(net, knobs):
    name, = knobs
    with pytest.raises(ValueError, match=name):
        write_by_beams(net, Z, SamplingKnobs(beams=4, **knobs))
    with pytest.raises(ValueError, match='num_samples'):
        toy_run(net).write(latents=Z, beams=4, num_samples=2)


def test_several_texts_of_a_round_trip_refuse_beams(net, monkeypatch):
    run = toy_run(net)
    monkeypatch.setattr(run, 'check', lambda direction: None)
    with pytest.raises(ValueError, match='num_samples'):
        run.round_trip(['a text'], num_samples=2, beams=4)


def test_what_is_not_searched_refuses_beams(net):
    knobs = SamplingKnobs(beams=4)
    gap = TEXTS[7:8].clone()
    gap[:, 1] = V
    for z in (Z[:1], None):
        for tokens, known_mask in ((gap, gap != V), blank(net, 1, SamplingKnobs())):
            with pytest.raises(ValueError, match='beams=4: beams search for a whole text'):
                write(net, tokens, known_mask, z, knobs)
