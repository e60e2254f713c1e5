""" The network's promises: shapes, identity at init, what sees what, and that every knob does
something. """
import dataclasses
import math

import pytest
import torch

import model as model_module
from diffusion import GaussianLatents, MaskedText
from model import Model, ModelConfig, rotary_angles, rotate

SMALL = dict(vocab_size=20, seq_len=12, latent_dim=6, n_latents=1, latent_tokens=4, depth=2,
             heads=2, width=16)


def inputs(B=3, L=12, N=1, D=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 21, (B, L), generator=g), torch.randn(B, N, D, generator=g),
            torch.rand(B, generator=g), torch.rand(B, generator=g))


def randomised(**changes):
    """ A model all of whose weights are random: at init gates and heads are 0 and nothing shows.
    """
    torch.manual_seed(1)
    model = Model(ModelConfig(**{**SMALL, **changes}))
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=.3, generator=g)
    return model


def test_rotary_scores_depend_on_the_distance_only():
    angles = rotary_angles(10, 8)
    cos, sin = angles.cos().float(), angles.sin().float()
    q, k = torch.randn(2, 8)
    score = rotate(q.expand(10, 8), cos, sin) @ rotate(k.expand(10, 8), cos, sin).T
    for distance in range(-9, 10):
        assert torch.allclose(score.diagonal(distance), score.diagonal(distance)[:1], atol=1e-5)
    assert score[0].max() - score[0].min() > 1e-2, 'the distance changes nothing'


def test_each_block_is_the_identity_at_init_and_the_predictions_are_uniform_and_zero():
    model = Model(ModelConfig(**SMALL))
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, args, out: seen.append((args[:2], out)))
    logits, latent = model(*inputs())
    assert all(torch.equal(a, b) for before, after in seen for a, b in zip(before, after))
    assert len(seen) == 2
    assert (logits == 0).all() and (latent == 0).all() and logits.shape == (3, 12, 20)
    assert latent.shape == (3, 1, 6)


def test_clocks_a_thousandth_apart_differ_in_bfloat16():
    clock = model_module.TimestepEmbedding(32)
    with torch.autocast('cpu', torch.bfloat16):
        a, b = clock(torch.tensor([.500, .501]))
    assert (a - b).abs().max() > .01


def test_without_a_text_clock_the_text_clock_changes_nothing():
    model, (x, z, t, s) = randomised(text_clock=False), inputs()
    assert torch.equal(model(x, z, t, s)[0], model(x, z, t * 0, s)[0])
    assert not torch.equal(model(x, z, t, s)[0], model(x, z, t, s * 0)[0])


CHANGES = dict(vocab_size=21, latent_tokens=5, depth=3, heads=4, width=20, latent_width=8,
               mlp_ratio=2.0, shift=True, streams=('text',), bag=True, shortcut=True,
               text_clock=False, spatial=True, dropout=.5)
SIZES = ('seq_len', 'latent_dim', 'n_latents')             # of the input
OTHERS = ('importance', 'clusters', 'parts')              # parts: tests/sampling/test_parts.py


def test_every_model_knob_is_tried():
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields == {*CHANGES, *SIZES, *OTHERS}


@pytest.mark.parametrize('knob', CHANGES)
def test_every_model_knob_changes_the_output_of_a_model_with_randomised_weights(knob):
    args = inputs(N=4)
    out = 1 if knob == 'bag' else 0                        # the latents', else the text's
    base = randomised(n_latents=4)(*args)[out]
    other = randomised(n_latents=4, **{knob: CHANGES[knob]})(*args)[out]
    assert base.shape != other.shape or (base - other).abs().max() > 1e-3


@pytest.mark.parametrize('knob', SIZES)
def test_inputs_of_another_size_do_not_fit(knob):
    with pytest.raises((RuntimeError, ValueError)):
        randomised(**{'n_latents': 4, knob: 3})(*inputs(N=4))


def test_a_learned_importance_differs_from_token_to_token():
    model = randomised(n_latents=4, importance='learned')
    assert model.importance(inputs()[0])[1].std() > .01


def test_clusters_are_read_and_never_written():
    x, *rest = inputs()
    model = randomised(clusters=3)
    outs = [model(torch.where(x == 20, 21 + k, x), *rest)[0] for k in range(3)]
    assert (outs[0] - outs[1]).abs().max() > 1e-3 and (outs[1] - outs[2]).abs().max() > 1e-3
    assert outs[0].shape[2] == 20


def test_the_bag_is_the_weighted_average_it_claims_and_starts_at_nothing():
    x, z, t, s = inputs(N=2)
    model, without = randomised(n_latents=2, bag=True), randomised(n_latents=2)
    score = model.bag_scores.weight.detach().double()
    value = model.bag_values.weight.detach().double()
    for row, found in zip(x, model.bag_of(x).detach()):
        share = torch.tensor([math.exp(score[token]) for token in row]).double()
        of_squares = sum(w / share.norm() * value[token] for w, token in zip(share, row))
        assert torch.allclose(found.flatten().double(), of_squares, atol=1e-5)
    # scores of any size have finite weights
    with torch.no_grad():
        model.bag_scores.weight.mul_(1e4)
        assert model.bag_of(x).isfinite().all()
        model.bag_scores.weight.div_(1e4)
    # the rest as in the model without one; the gate at 1
    with torch.no_grad():
        for name, p in without.named_parameters():
            dict(model.named_parameters())[name][:len(p)].copy_(p)
        model.latent_modulation.weight[-6:] = 0
        model.latent_modulation.bias[-6:] = 0
    (logits, latent), (other_logits, other) = model(x, z, t, s), without(x, z, t, s)
    assert torch.equal(logits, other_logits)
    assert torch.allclose(latent, other + model.bag_of(x), atol=1e-5)
    assert not Model(ModelConfig(**SMALL, bag=True))(*inputs())[1].any()


def test_pictures_read_the_bag_but_where_a_text_is_read_from_left_to_right():
    x, z, t, s = inputs(N=4)
    model = randomised(n_latents=4, bag=True, spatial=True)
    found = []
    for weight in (model.bag_in.weight.detach().clone(), 0.0):
        with torch.no_grad():
            model.bag_in.weight.copy_(torch.as_tensor(weight))
        found.append(model(x, z, t, s, n_causal=1))
    (logits, latent), (without, latent_without) = found
    assert torch.equal(logits[-1], without[-1]) and torch.equal(latent[-1], latent_without[-1])
    assert (logits[:-1] - without[:-1]).abs().amax((1, 2)).min() > 1e-3
    assert (latent[:-1] - latent_without[:-1]).abs().amax((1, 2)).min() > 1e-3


def test_the_shortcut_adds_the_latents_it_maps_and_says_nothing_at_init():
    x, z, t, s = inputs()
    model = randomised(shortcut=True)
    found = []
    with torch.no_grad():
        model.latent_modulation.weight[-2:] = 0
        # the gates are 1 + this: both ways are open, then one, then none
        for gates in ([0., 0.], [0., -1.], [-1., -1.]):
            model.latent_modulation.bias[-2:] = torch.tensor(gates)
            found.append(model(x, z, t, s)[0])
    out = (z.flatten(1) @ model.shortcut_out.weight.T) @ model.text_head.weight.T        # (B, V)
    assert torch.allclose(found[0] - found[1], out[:, None].expand_as(found[0]), atol=1e-4)
    assert (found[1] - found[2]).abs().max() > 1e-3
    assert not Model(ModelConfig(**SMALL, shortcut=True))(*inputs())[0].any()


def loss_of(predict, ways, importance):
    model = randomised(bag=ways, shortcut=ways, importance=importance)
    x, z, t, s = inputs()
    text, latent = MaskedText(20), GaussianLatents(torch.ones(6))
    g = torch.Generator().manual_seed(0)
    clean = x % 20
    noisy, mask = text.corrupt(clean, t, torch.rand(x.shape, generator=g))
    z_t, e = latent.corrupt(z, s, torch.randn(z.shape, generator=g))
    weight = (text.bound_weight(t)[:, None] * mask).flatten() / mask.numel()
    hidden, out = model(noisy, z_t, t, s, predict=predict, return_hidden=True)
    total = 0.
    if 'text' in predict:
        total = total + text.loss(hidden.flatten(0, 1), model.text_head.weight, clean.flatten(),
                                  weight)[0]
        if importance != 'none':
            total = total + model.importance(clean)[1].square().mean()
    if 'latent' in predict:
        total = total + latent.loss(out, latent.target_of(z, e, s), torch.ones_like(s))[0]
    return total, model


@pytest.mark.parametrize('ways, importance', [(False, 'none'), (True, 'none'), (False, 'learned')])
@pytest.mark.parametrize('predict', [('text',), ('latent',), ('text', 'latent')])
def test_what_no_loss_reaches_has_no_gradient_or_zeros_without_decay(predict, ways, importance):
    loss, model = loss_of(predict, ways, importance)
    loss.backward()
    still = {name: p for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert bool(still) == (len(predict) < 2)
    assert all(p.grad is None or p.ndim == 1 for p in still.values()), 'a matrix would decay'


def tie_head(model):
    model.text_head.weight = model.embed.weight


def share_up(model):
    model.blocks[1].text.up = model.blocks[0].text.up


@pytest.mark.parametrize('share, words', [
    (tie_head, 'text_head.weight is embed.weight'),
    (share_up, 'blocks.1.text.up.weight is blocks.0.text.up.weight')])
def test_a_head_tied_to_the_embedding_and_other_shared_weights_are_refused(share, words):
    model = Model(ModelConfig(**SMALL))
    share(model)
    with pytest.raises(ValueError, match=words):
        model.parameter_groups()


def test_parameter_groups_hold_every_parameter_once_and_decay_only_matrices():
    groups = Model(ModelConfig(**SMALL | dict(bag=True, n_latents=1))).parameter_groups()
    # the bag begins as what ridge regression has found
    assert 'bag_values.weight' in dict(groups['vectors'])
    for name, p in groups['matrices']:
        assert p.ndim == 2 and min(p.shape) > 1 and name.startswith('blocks.')
    vectors = {'latent_pos_emb', 'bias', 'blocks.0.text.scale_shift_table',
               'blocks.0.text.q_gain', 'latent_in.bias'}
    assert vectors <= dict(groups['vectors']).keys()
    heads = {'embed.weight', 'text_head.weight', 'latent_in.weight'}
    assert heads <= dict(groups['embeddings_and_heads']).keys()


def test_bad_shapes_of_a_model_are_refused_with_the_value():
    for bad, word in ((dict(heads=3), 'heads=3'), (dict(spatial=True, n_latents=5), 'n_latents=5')):
        with pytest.raises(ValueError, match=word):
            ModelConfig(**{**SMALL, **bad})
