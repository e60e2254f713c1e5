""" Latents of which a part is given: what training reads and scores, the law of what is drawn. """
import numpy as np
import pytest
import torch

from corpora.images import read_in_part
from data import Rows
from diffusion import (COMPLETE, GaussianLatents, Loss, MaskedText, Noising, given_parts,
                       mode_shares)
from launch import Job
from model import Model, ModelConfig
from noise import rows_of
from sampling.knobs import SamplingKnobs
from sampling.latents import make_latents
from toys import Network, as_v, net_of, toy_run

SHAPE = dict(vocab_size=8, seq_len=4, depth=1, heads=2, width=16, latent_dim=3, n_latents=16,
             latent_tokens=1, spatial=True, parts=True)


def test_given_is_a_box_or_all_but_a_box_and_halves_are_among_them():
    given = given_parts(0, 0, 0, 4000, 64).unflatten(1, (8, 8))
    assert torch.equal(given_parts(0, 0, 10, 5, 64).unflatten(1, (8, 8)), given[10:15])
    shares = given.float().mean((1, 2))
    assert .3 < shares.mean() < .5 and shares.std() > .3
    assert not given.all(1).all(1).any(), 'nothing would be left to draw'
    n_boxes = n_halves = 0
    for one in given:
        for box in (one, ~one):
            lines, columns = box.any(1), box.any(0)
            is_box = torch.equal(box, lines[:, None] & columns) and bool(box.any())
            whole = is_box and all((side.int().diff() != 0).sum() <= 2 for side in (lines, columns))
            n_boxes += whole
            n_halves += whole and bool(lines.all()) != bool(columns.all())
    assert n_boxes >= 3900 and n_halves > 200


def batch_of(B=64, mode='t2l+complete'):
    tokens = torch.randint(0, 6, (B, 4))
    rows = Rows(tokens, torch.randn(B, 16, 3), False, 3, 0)
    ids = net_of(eos=6, pad=7)
    noising = Noising(MaskedText(8), GaussianLatents(torch.ones(3)), ('text', 'latent'))
    return noising, noising(rows, mode_shares(mode), ids)


@pytest.mark.parametrize('mode', ['t2l+complete', 't2l+causal+2*complete'])
def test_only_rows_of_the_mode_complete_have_given_vectors(mode):
    _, batch = batch_of(mode=mode)
    is_complete = batch.mode == COMPLETE
    assert 20 < is_complete.sum() < 44 and batch.given[is_complete].any(1).sum() > 15
    assert not batch.given[~is_complete].any()
    assert batch_of(mode='t2l')[1].given is None


def test_given_vectors_are_read_clean_and_not_scored():
    noising, batch = batch_of()
    model = Model(ModelConfig(**SHAPE))
    seen = {}
    forward = model.forward

    def watched(x_t, z_t, *args, **more):
        seen.update(z=z_t, given=more['given'])
        return forward(x_t, z_t, *args, **more)
    model.forward = watched
    losses = Loss(model, noising)(batch, ('latent',))
    given = batch.given
    assert torch.equal(seen['z'][given], batch.clean[given]) and seen['given'] is given
    assert not torch.isclose(seen['z'][~given], batch.clean[~given]).all(1).any()

    # the network says 0 at its start, so the error of a row is the mean square of its targets
    target = noising.latent.target_of(batch.clean, batch.noise, batch.t_latent)
    for row in range(len(given)):
        scored = target[row][~given[row]]
        expected = scored.square().mean() if len(scored) else torch.zeros(())
        assert torch.isclose(losses.error[row], expected, atol=1e-5)


def test_the_mark_of_a_given_vector_reaches_the_prediction_of_the_others():
    model = Model(ModelConfig(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=.3)
    x, z, t = torch.zeros(1, 4, dtype=torch.int64), torch.randn(1, 16, 3), torch.full((1,), .5)
    given = torch.zeros(1, 16, dtype=torch.bool)
    outs = []
    for i in (0, 1):
        given[:, 5] = bool(i)
        outs.append(model(x, z, t, t, predict=('latent',), given=given)[1])
    assert (outs[0] - outs[1]).abs()[0, 0].max() > 1e-3
    assert torch.equal(outs[0], model(x, z, t, t, predict=('latent',))[1]), 'none is given'


class Gaussian(Network):
    """ Knows E[z | z_t] where z has two vectors of one number, N(0, C), some of them given. """
    C = torch.tensor([[1., .8], [.8, 1.]])

    def forward(self, tokens, z, t_text, t_latent, given=None, **more):
        alpha, sigma = GaussianLatents(torch.ones(1)).alpha_sigma(t_latent[0].double())
        n = len(z)
        scale = torch.full((n, 2), float(alpha))
        noise = torch.full((n, 2), float(sigma) ** 2)
        if given is not None:
            scale = torch.where(given, 1., scale)
            noise = torch.where(given, 0., noise)
        A = scale[:, :, None] * self.C * scale[:, None] + torch.diag_embed(noise + 1e-9)
        x0 = self.C * scale[:, None] @ torch.linalg.solve(A, z)
        return None, as_v(z, x0, t_latent)


@pytest.mark.parametrize('solver', ['ddim', 'ancestral', 'dpmpp_2m'])
def test_the_rest_of_a_gaussian_has_its_conditional_law(solver):
    n, value = 4000, 1.5
    net = net_of(Gaussian(latent_dim=1, n_latents=2))
    known = torch.full((n, 2, 1), 7.)                      # the other number is not read
    known[:, 0] = value
    given = torch.tensor([[True, False]]).expand(n, 2)
    knobs = SamplingKnobs(latent_steps=64, solver=solver)
    z = make_latents(net, None, n, knobs, rows_of(n), known, given)[..., 0]
    assert (z[:, 0] == value).all()
    rest = z[:, 1]
    assert abs(rest.mean() - .8 * value) < .05 and abs(rest.var() - .36) < .04
    free = make_latents(net, None, n, knobs, rows_of(n))[..., 0]
    assert abs(free.T.cov() - net.model.C).max() < .09


def test_each_latent_of_a_run_keeps_its_own_given_vectors_in_every_sample():
    run = toy_run(net_of(Gaussian(latent_dim=1, n_latents=2), mode='t2l+complete'))
    latents = torch.tensor([[[3.], [4.]], [[5.], [6.]]])
    given = [[True, False], [False, True]]
    drawn = run.complete(latents, given, num_samples=3, latent_steps=4)[..., 0]
    assert (drawn[:3, 0] == 3).all() and (drawn[3:, 1] == 6).all()
    assert not (drawn[:3, 1] == 4).any() and not (drawn[3:, 0] == 5).any()
    for wrong, words in ((dict(given=[[True]]), 'given: shape'),
                         (dict(given=given, texts=['a']), '1 texts for 2 latents')):
        with pytest.raises(ValueError, match=words):
            run.complete(latents, **wrong)


def test_a_picture_says_which_patches_are_given(tmp_path):
    pil = pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')
    pixels = np.full((8, 8, 4), 255, np.uint8)
    pixels[:3, 5:, 3] = 0                                  # a corner is transparent
    pil.fromarray(pixels).save(tmp_path / 'a.png')
    run = toy_run(meta=dict(source=dict(image_size=8, patch=2, channels=1)))
    names, raw, given = read_in_part(run, str(tmp_path / 'a.png'), '')
    assert names == ['a.png'] and raw.shape == (1, 16, 4)
    expected = torch.ones(4, 4, dtype=torch.bool)
    expected[:2, 2:] = False
    assert torch.equal(given.view(4, 4), expected)
    _, _, given = read_in_part(run, str(tmp_path / 'a.png'), '0,2,3,8')
    expected = torch.ones(4, 4, dtype=torch.bool)
    expected[1:, :2] = False
    assert torch.equal(given.view(4, 4), expected)
    pil.fromarray(pixels[4:, :4]).save(tmp_path / 'b.png')
    for path, box, words in (('b.png', '', 'nothing in it is transparent'),
                             ('b.png', '1,2,3', 'expected X0,Y0,X1,Y1'),
                             ('b.png', '4,4,2,8', 'X0 below X1'), ('b.png', '0,0,8,9', 'to 8'),
                             ('no.png', '', 'no image that can be read'), ('.', '', 'one picture')):
        with pytest.raises(ValueError, match=words):
            read_in_part(run, str(tmp_path / path), box)


def test_stages_with_and_without_given_parts_train_on_two_ranks(dataset, tmp_path):
    job = Job(dataset, tmp_path / 'run', '--mode=t2l+complete:3,l2t+t2l', '--spatial=true',
              '--max_iters=6', ranks=2)
    job.ends()
