""" Drafts of a text, each nearer to the embedding. """
import pytest
import torch
import torch.nn.functional as F

from noise import Noise
from sampling import drafts
from toys import toy_run

RAW = torch.tensor([[[3., 0]], [[0., 3]], [[-3., -3]], [[9., 9]]])


class Rounds(list):
    """ A network that errs alike everywhere, but for the third latent, and notes each round: where
    it aimed, what it wrote, and for which draft of which text. A text is its embedding. """

    def write(self, net, tokens, known_mask, z, knobs, rows, **more):
        u = Noise(knobs.seed, rows).uniforms('token', 2).float()
        errs = torch.where(z[:, :, :1] < -2, 0., 1 + u.view(z.shape))
        self.append((z, z + errs * torch.tensor([.5, -.5]), torch.from_numpy(rows)))
        return self[-1][1]

    def of(self, i):
        """ [(aims, texts, numbers)] of the rounds that had drafts of text i. """
        found = []
        for z, written, rows in self:
            its = rows[:, 0] == i
            if its.any():
                found.append((z[its], written[its], rows[its, 1]))
        return found


@pytest.fixture
def rounds(monkeypatch):
    rounds = Rounds()
    monkeypatch.setattr(drafts, 'write', rounds.write)
    monkeypatch.setattr(drafts, 'tidied', lambda net, tokens: tokens)
    return rounds


def encoder(texts):
    """ Of the last latent's texts none has an embedding. """
    e = torch.tensor([eval(text) for text in texts])
    return torch.where(e.sum(2, keepdim=True) > 9, 0., e)


def test_drafts_correct_their_aim_by_what_the_nearest_have_missed_and_a_hit_ends_them(rounds):
    run = toy_run(encoder=encoder)
    run.decode = lambda tokens: [str(x) for x in tokens.tolist()]
    written = run.write(latents=RAW, rerank=24)
    found = run.encode(written)

    aims = [z for z, _, _ in rounds]
    assert aims[0].equal(RAW.repeat_interleave(4, 0)) and len(aims[1]) < 16, 'the third is hit'
    assert all((z[-4:] == RAW[3]).all() for z in aims), 'nothing says where to aim'
    for i in (0, 1):
        def cosine(e):
            return F.cosine_similarity(e[:, 0], RAW[i], dim=1)
        (aim, e, numbers), *later = rounds.of(i)
        assert numbers.tolist() == [0, 1, 2, 3]
        first = cosine(e).max()
        for z, new, numbers in later:
            assert numbers.tolist() == list(range(len(e), len(e) + 4)), 'each draws for itself'
            nearest = cosine(e).argsort(descending=True)[:4]
            assert torch.allclose(z, aim[nearest] + (RAW[i] - e[nearest]) / 2)
            e, aim = torch.cat([e, new]), torch.cat([aim, z])
        assert len(e) > 4 and torch.allclose(found[i], e[cosine(e).argmax()])
        assert 1 - cosine(e).max() < (1 - first) / 2, 'what was missed is corrected'

    # with the third, which is hit at once, or without it, and alone
    for others in ([0, 1, 3], [0]):
        assert run.write(latents=RAW[others], rerank=24)[0] == written[0]
