""" What is done to embeddings before a text is written from them. """
import pytest
import torch

from data import LatentStats
from tasks import l2t
from tasks.common import Context
from tasks.damage import damaged
from toys import toy_run

D = 40


@pytest.fixture
def raw():
    """ 4,000 embeddings; each dimension has a mean and a deviation of its own. """
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(4000, 1, D, generator=rng)
    return z * torch.linspace(.1, 2, D) + torch.linspace(-1, 1, D)


@pytest.fixture
def run(raw):
    return toy_run(stats=LatentStats(raw.mean((0, 1)), raw.std((0, 1))))


def test_noise_is_added_in_the_units_of_the_embedding(run, raw):
    e = damaged(run, raw, 'noise:.3', 0) - raw
    assert abs(e.mean()) < .003 and abs(e.std() - .3) < .003
    assert damaged(run, raw, 'noise:.3', 0).equal(raw + e)
    assert not damaged(run, raw, 'noise:.3', 1).equal(raw + e)


def test_the_first_dimensions_stay_and_the_others_say_nothing(run, raw):
    half = damaged(run, raw, 'dims:.5', 0)
    assert half[..., :D // 2].equal(raw[..., :D // 2])
    assert (run.stats.standardise(half)[..., D // 2:].abs() < 1e-5).all()


def test_one_bit_is_whether_a_number_is_above_its_mean_and_eight_lose_next_to_nothing(run, raw):
    z = run.stats.standardise(raw)
    one = run.stats.standardise(damaged(run, raw, 'bits:1', 0))
    assert ((one > 0) == (z > 0)).all()
    assert torch.allclose(one.abs(), torch.tensor(.67449), atol=1e-4)
    error = [(run.stats.standardise(damaged(run, raw, f'bits:{n}', 0)) - z).square().mean().item()
             for n in (1, 2, 4, 8)]
    assert error == sorted(error, reverse=True) and error[-1] < .01 < .1 < error[0]


def test_wrong_bits_are_a_share_of_the_ones_and_as_many_zeros(run):
    right = (torch.rand(500, 1, 400, generator=torch.Generator().manual_seed(0)) < .1).float()
    for share in (0., .3):
        wrong = damaged(run, right, f'flips:{share}', 0)
        lost = ((right == 1) & (wrong == 0)).sum() / right.sum()
        assert (wrong.sum(2) == right.sum(2)).all() and abs(lost - share) < .01


def test_only_bits_are_flipped(run, raw):
    """ Else what is written would come from signs, which nobody asked for. """
    with pytest.raises(ValueError, match='flips:.1.*these embeddings are no bits'):
        damaged(run, raw, 'flips:.1', 0)


@pytest.mark.parametrize('damage', ['noise', 'noise:-1', 'noise:1e9', 'bits:0', 'bits:.5', 'dims:2',
                                    'flips:nan', 'half', 'noise:.1;dims:.5'])
def test_a_damage_that_is_none_is_one_line(run, raw, damage):
    with pytest.raises(ValueError, match='expected noise:.01, dims:.5, bits:8, flips:.1'):
        damaged(run, raw, damage, 0)


def test_texts_and_the_nearest_training_text_come_from_damaged_embeddings(run, raw, monkeypatch):
    """ The rival reads what the attacker reads, and the control `shuffled`, too. """
    read = {}
    monkeypatch.setattr(l2t, 'nearest_training_texts',
                        lambda run, folder, z: read.update(nearest=z))
    run.write = lambda latents, **knobs: read.setdefault('written', []).append(latents)
    knobs = dict(seed=0, damage='dims:.5', latent_clock=0., rerank=1, beams=1)
    ctx = Context(knobs, texts=[''] * len(raw), tokens=torch.zeros(len(raw), 3), raw=raw)
    monkeypatch.setattr(Context, 'sampling', {})
    l2t.write_with_controls(run, ctx)
    half = damaged(run, raw, 'dims:.5', 0)
    own, shuffled, null = read['written']
    assert own.equal(half) and null.equal(half) and read['nearest'].equal(half)
    assert not shuffled.equal(half) and shuffled.sum(0).allclose(half.sum(0), atol=1e-2)
