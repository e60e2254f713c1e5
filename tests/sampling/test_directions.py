""" Every direction, on a network that is known, and what a run can be asked. """
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from diffusion import MaskedText
from processes.gidd import GIDD
from sampling.knobs import SamplingKnobs
from sampling.latents import make_latents, write_both
from sampling.run import NEEDS
from sampling.solvers import SOLVERS
from sampling.texts import settle, write
from tasks import TASKS
from toys import EOS, FILL_MASKS, L, MASK, V, Known, Network, as_v, l2t, net_of, toy_run


@pytest.mark.parametrize('g, calls', [(1.0, 1), (0.0, 1), (2.0, 2), (.5, 2)])
def test_text_guidance_1_and_0_are_the_two_models_and_between_is_their_mixture(g, calls):
    conditional = torch.tensor([1., 0., 2.]).log_softmax(0)
    null = torch.tensor([0., 3., 0.]).log_softmax(0)
    net, n = net_of(), 20_000
    ids = l2t(net, torch.zeros(n, 1, 2), guidance=g, sampler='first_hitting', steps=1,
              sample_batch=n)
    share = torch.bincount(ids.flatten(), minlength=3) / ids.numel()
    expected = (g * conditional + (1 - g) * null).softmax(0)
    assert (share - expected).abs().max() < 5 * math.sqrt(.25 / ids.numel())
    assert net.row_calls == n * calls


@pytest.mark.parametrize('solver', SOLVERS)
@pytest.mark.parametrize('g, expected, clocks', [
    (1.0, [0., 2., 1.], {0.}), (0.0, [-1., -1., -1.], {1.}), (2.0, [1., 5., 3.], {0., 1.})])
def test_t2l_follows_its_text_and_guidance_moves_between_and_beyond_both_predictions(
        solver, g, expected, clocks):
    net, tokens = net_of(), torch.tensor([[0, 1, 2, 2], [2, 1, 2, 2], [1, 1, 2, 2]])
    z = make_latents(net, tokens, 3, SamplingKnobs(solver=solver, latent_steps=6, guidance=g))
    assert torch.allclose(z, torch.tensor(expected)[:, None, None].expand(3, 1, 2), atol=1e-5)
    of_text, of_latent = map(set, zip(*net.model.clocks))
    assert of_text == clocks
    assert max(of_latent) == 1 and len(of_latent) == 6 and min(of_latent) > 0, 'no call at t = 0'


@pytest.mark.parametrize('shape, is_of_text, guidance, steps', [
    (dict(n_latents=4, spatial=True), True, 2.0, 8),
    (dict(n_latents=4, spatial=True), False, 0, 32),
    (dict(n_latents=4), True, 1.0, 32), (dict(n_latents=1), True, 1.0, 1),
    (dict(n_latents=1), False, 0, 32)])
def test_what_is_not_given_follows_from_the_direction(shape, is_of_text, guidance, steps):
    tokens = torch.zeros(3, L, dtype=torch.int64) if is_of_text else None

    def cost(**knobs):
        net = net_of(Known(**shape))
        z = make_latents(net, tokens, 3, SamplingKnobs(**knobs))
        return z, net.row_calls / 3

    # guidance 2 asks twice a step: with the text and without it
    z, calls = cost()
    assert calls == steps * (2 if guidance == 2 else 1)
    expected, _ = cost(guidance=guidance, latent_steps=steps)
    assert torch.equal(z, expected)
    if is_of_text:
        assert not torch.equal(z, cost(guidance=3.0)[0]), 'what is given is taken'

    # a text, also one of a picture, is written with guidance 1
    net = net_of(Known(**shape))
    assert settle(net, SamplingKnobs(), from_latent=True)[1].guidance == 1
    assert settle(net, SamplingKnobs(guidance=2.0), from_latent=True)[1].guidance == 2


class Plans(Known):
    """ Draws -1 or 1 as a latent of no text, and writes 0 or 1 from it. """

    def logits_of(self, tokens, z, t_text, t_latent):
        plan = z[:, 0, 0]
        logits = 9 * torch.stack([plan < 0, plan > 0, plan > 9], 1).float()
        return logits[:, None].expand(-1, L, -1)

    def latents_of(self, tokens, z, t_text, t_latent):
        plan = torch.where(t_text == 1, z[:, 0, 0].sign(), 5. + tokens[:, 0])
        return as_v(z, plan[:, None, None].expand(z.shape), t_latent)


def test_both_from_noise_are_a_plan_its_likeliest_text_and_the_latent_of_that():
    net = net_of(Plans())
    tokens, z = write_both(toy_run(net), 40, SamplingKnobs(seed=3))
    plan = make_latents(net, None, 40, SamplingKnobs(seed=3, solver='ancestral'))
    assert torch.equal(tokens, torch.where(plan[:, 0, :1] > 0, 1, 0).expand(40, L))
    assert torch.allclose(z, 5. + tokens[:, :1, None]) and 0 < tokens.float().mean() < 1


@pytest.mark.parametrize('name', FILL_MASKS)
def test_each_row_is_written_from_its_own_latent(name):
    def logits_of(tokens, z, t_text, t_latent):
        return 50. * F.one_hot(z[:, 0, 0].long(), 3).float()[:, None].expand(-1, L, 3)
    ids = torch.arange(30) % 3
    z = ids[:, None, None].float().expand(30, 1, 2)
    written = l2t(net_of(Network(logits_of)), z, sampler=name, steps=9, sample_batch=16)
    assert (written == ids[:, None]).all()


def encode_nothing(texts):
    return torch.zeros(len(texts), 1, 2)


encode_nothing.remark = lambda text: ''


@pytest.mark.parametrize('lengths', [None, (2, 2)])
def test_an_edit_writes_anew_where_the_other_latent_wants_another_token(lengths):
    def logits_of(tokens, z, t_text, t_latent):
        logits = torch.zeros(*tokens.shape, 5)
        logits[:, :, 3] = 9                                  # an EOS, which an edit does not write,
        logits[:, :, 0] = 4                                  # everywhere 0, whatever z says,
        logits[:, 2] = 4 * F.one_hot(z[:, 0, 0].long(), 5)   # but at 2 what z
        return logits
    net = net_of(Network(logits_of, vocab_size=5), eos=3, pad=4, lengths=lengths)
    run = toy_run(net, encoder=encode_nothing)
    run.tokenizer.encode = lambda text: [int(c) for c in text]
    run.tokenizer.decode = lambda ids: ''.join(str(i) for i in ids if i < 3)

    def edited(text, strength):
        return run.edit([text], latents=torch.ones(1, 2), strength=strength)[0]
    assert edited('210', 1e-6) == '211', 'at least one'
    assert edited('210', 1.0) == '001'
    assert edited('210', .5) in ('011', '201'), 'two of three'
    assert edited('2', 1e-6) == '0', 'no PAD that loses is touched'
    with pytest.raises(ValueError, match='length=3'):
        run.edit(['210'], latents=torch.ones(1, 2), length=3)


@pytest.mark.parametrize('block', [0, 2])
@pytest.mark.parametrize('name', FILL_MASKS)
def test_a_text_and_its_gaps_are_kept_and_no_EOS_or_PAD_is_written_inside(name, block):
    n, z = 300, torch.zeros(300, 1, 2)
    tokens = torch.tensor([[0, MASK, MASK, EOS]]).repeat(n, 1)
    known = tokens != MASK
    knobs = SamplingKnobs(sampler=name, temperature=1.0, block_size=block, steps=3)
    ids = write(net_of(), tokens, known, z, knobs, inner=~known)
    assert (ids == torch.tensor([0, 0, 0, EOS])).all(), 'of three ids two are EOS and PAD'
    free = write(net_of(), tokens, known, None, SamplingKnobs(sampler='ancestral'))
    assert (free[:, 1:3] == EOS).double().mean() > .8, 'the null model speaks, which likes EOS'


def test_only_the_end_of_a_text_can_be_written_from_left_to_right():
    tokens = torch.tensor([[1, 20, 3, 18]])
    with pytest.raises(ValueError, match='at its end'):
        toy_run(net_of(eos=18, pad=19)).check_ends_in_gaps(tokens, tokens != 20)
    # an EOS that need not be the last id but one
    tokens = torch.tensor([[1, 20, 7, 19]])
    toy_run(net_of(eos=7, pad=19)).check_ends_in_gaps(tokens, tokens != 20)


# ---- what a run can do

WRITE, MAKE = {'l2t', 'text', 'infill'}, {'t2l', 'latent'}
BOTH = WRITE | MAKE | {'t2l2t'}
MEASURE = {'l2t', 't2l', 'text', 'infill', 'sts', 'image', 'nelbo'}
ORDERS = {'importance', 'orders'}
JOINT = {'edit', 'unconditional'}
CAN = {  # streams, process, mode: the directions, the tasks
    ('text latent', 'masked', 'l2t'):
        (WRITE | {'edit'}, WRITE | ORDERS | {'image', 'nelbo', 'edit'}),
    ('text latent', 'masked', 't2l'): (MAKE, {'t2l', 'sts', 'image', 'nelbo'}),
    ('text latent', 'masked', 'unconditional'):
        (BOTH | JOINT, MEASURE | ORDERS | JOINT),
    ('text latent', 'gidd', 'unconditional+l2t+t2l'): (BOTH, MEASURE),
    ('text latent', 'masked', 'causal'): (WRITE, {'l2t', 'text', 'image', 'nelbo'}),
    ('text', 'masked', 'unconditional'):
        ({'text', 'infill'}, {'text', 'infill', 'nelbo'} | ORDERS),
    ('text', 'masked', 'causal'): ({'text', 'infill'}, {'text', 'nelbo'}),
    ('latent', 'masked', 'unconditional'): ({'latent'}, {'nelbo'})}


def measures(task, run):
    if task.needs.missing(run.net):
        return False
    try:
        if task.prepare:
            task.prepare(run, dict(sts='', classes='', scorer='', damage=''))
    except ValueError as error:
        return not str(error).startswith(run.out_dir)                    # or a knob is missing
    return True


def measured(run):
    return {name for name, task in TASKS.items() if measures(task, run)}


@pytest.mark.parametrize('streams, process, mode', CAN)
def test_a_run_can_be_asked_what_it_has_learned_and_nothing_else(streams, process, mode):
    text = dict(masked=MaskedText(V), gidd=GIDD(V))[process]
    run = toy_run(net_of(Known(streams=streams.split()), mode, text), out_dir='R')
    directions, tasks = CAN[streams, process, mode]
    run.meta = dict(encoder={'id': 'lsa'}, source=dict(image_size=8))
    assert {name for name in NEEDS if run.can(name)} == directions
    assert measured(run) == tasks
    run.meta = dict(encoder=None, source=None)
    assert measured(run) == tasks - {'sts', 'edit', 'image'}, 'without encoder and pictures'


@pytest.mark.parametrize('knobs, words', [
    (dict(sampler='magic'), 'magic'), (dict(prefer='best'), 'best'), (dict(eta=2.5), 'eta'),
    (dict(sampler='ancestral', by_importance=True), 'by_importance'), (dict(steps=0), 'steps'),
    (dict(sampler='ancestral', threshold=.9), 'threshold=0.9 goes with sampler=confidence'),
    (dict(threshold=.9, prefer='uncertain'), 'leave by_importance and prefer out'),
    (dict(temperature=-3), r'temperature: -3, expected None \| \[0, 100\]'),
    (dict(solver='euler'), 'dpmpp_2m')])
def test_wrong_knobs_are_refused(knobs, words):
    with pytest.raises(ValueError, match=words):
        toy_run().write(latents=torch.zeros(1, 2), **knobs)


def test_a_knob_that_is_none_is_refused_and_numbers_take_their_own_type():
    with pytest.raises(TypeError, match='temprature'):
        toy_run().write(latents=torch.zeros(1, 2), temprature=1)
    assert SamplingKnobs(guidance=np.float32(2), steps=4.0) == SamplingKnobs(guidance=2., steps=4)
