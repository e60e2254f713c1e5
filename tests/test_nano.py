""" nano.py is the page that a lecture shows: it computes what model.py and diffusion.py
compute. examples/nano_decoder.py is the same file as a plain decoder. """
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F

import nano
from data import PackedDataset
from diffusion import Batch, GaussianLatents, Loss, MaskedText, Noising, NoisyText
from launch import ROOT, run
from model import Model, ModelConfig

V, L, D, B = 30, 12, 6, 8


def in_full(name):
    """ The name that model.py has for a parameter. """
    parts = name.split('.')
    if parts[0] in ('text', 'latent'):
        name = '.'.join(['blocks', parts[1], parts[0], *parts[2:]])
    name = name.replace('clock.0', 'clock.up').replace('clock.2', 'clock.down')
    return name.replace('_norm.weight', '_gain')


def test_without_data_it_says_how_to_make_them(tmp_path):
    result = run('nano.py', cwd=tmp_path)
    assert 'python prepare.py' in result.stderr and result.stderr.count('\n') == 1


def both():
    """ The two networks with the same random weights. """
    torch.manual_seed(0)
    small = nano.Nano(V, L, D)
    model = Model(ModelConfig(vocab_size=V, seq_len=L, latent_dim=D, depth=nano.depth,
                              width=nano.width,
                              heads=nano.heads, latent_tokens=nano.K, shift=True, bag=True))
    with torch.no_grad():
        for p in small.parameters():
            p.add_(.1 * torch.randn(p.shape))
    # the bag of the real network also has a weight for each token, and a gate: here 1
    given = {in_full(name): p for name, p in small.state_dict().items()}
    given['bag_scores.weight'] = torch.zeros(V + 1, 1)
    for name in ('latent_modulation.weight', 'latent_modulation.bias'):
        given[name] = F.pad(given[name], [0, 0] * (given[name].ndim - 1) + [0, D])
    model.load_state_dict(given)
    return small, model


def batch():
    mode = torch.arange(B) * 4 // B
    x, z = torch.randint(0, V, (B, L)), torch.randn(B, D)
    t_text, t_latent = nano.draw_clocks(mode)
    return mode, x, z, t_text, t_latent, torch.rand(B, L), torch.randn(B, D)


def test_the_predictions_are_those_of_the_model_for_masked_and_causal_rows():
    small, model = both()
    mode, x, z, t_text, t_latent, u, _ = batch()
    x = torch.where(u < .3, V, x)
    for n_causal in (0, 2, B):
        logits, v = small(x, z, t_text, t_latent, n_causal)
        expected, latent = model(x, z[:, None], t_text, t_latent, n_causal=n_causal)
        assert torch.allclose(logits, expected, atol=1e-4)
        assert torch.allclose(v, latent[:, 0], atol=1e-4)


def test_the_loss_and_its_gradient_are_those_of_a_training_step():
    small, model = both()
    mode, x, z, t_text, t_latent, u, e = batch()
    found = nano.loss_of(small, x, z, mode, t_text, t_latent, u, e, pad=V - 1)

    # the same batch, as diffusion.Noising makes it
    text, latent = MaskedText(V), GaussianLatents(torch.ones(D), target='x0')
    is_causal, real = mode == nano.CAUSAL, x != V - 1
    x_t, mask = text.corrupt(x, t_text, u)
    scored = torch.where(is_causal[:, None], real, mask & (mode != nano.T2L)[:, None])
    weight = torch.where(is_causal, 1, text.bound_weight(t_text.clamp(min=nano.t_min)))
    noisy = NoisyText(x_t, scored, weight[:, None].expand(B, L))
    has_latent_loss = (mode == nano.UNCONDITIONAL) | (mode == nano.T2L)
    n = int(is_causal.sum())
    batch_of_model = Batch(
        **noisy.fields(x), coefficients=None, mode=mode, t_text=t_text, t_latent=t_latent,
        pad=V - 1, n_causal=n, clean=z[:, None], noise=e[:, None],
        row_weight=has_latent_loss.float(), n_real=real[:B - n].sum()[None],
        n_real_causal=real[B - n:].sum()[None])
    loss_fn = Loss(model, Noising(text, latent, ('text', 'latent')))
    loss = loss_fn(batch_of_model, ('text', 'latent')).loss
    assert torch.allclose(found, loss, rtol=1e-5)
    found.backward()
    loss.backward()
    of_model = dict(model.named_parameters())
    for name, p in small.named_parameters():
        theirs = of_model[in_full(name)].grad[:len(p)]
        assert torch.allclose(p.grad, theirs, atol=1e-4 * theirs.abs().max().item() + 1e-7), name


# ---- the plain decoder

@pytest.fixture
def decoder(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'examples'))
    return importlib.import_module('nano_decoder')


def test_the_probabilities_of_a_plain_decoder_add_up_to_1_over_all_texts(decoder):
    torch.manual_seed(0)
    model = decoder.Nano(V=4, L=3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(.3 * torch.randn(p.shape))
    texts = torch.tensor([*itertools.product(range(4), repeat=3)])
    nats = torch.stack([3 * decoder.loss_of(model, x[None], pad=-1) for x in texts]).detach()
    p = (-nats).exp()
    assert abs(p.sum() - 1) < 1e-5 and p.std() > 1e-3

    # and it writes them as often
    torch.manual_seed(1)
    drawn = decoder.write_from_left_to_right(model, 20_000, 3)
    share = torch.bincount((drawn * torch.tensor([16, 4, 1])).sum(1), minlength=64) / 20_000
    assert ((share - p).abs() <= 5 * (p * (1 - p) / 20_000).sqrt()).all()


@pytest.mark.parametrize('name', ['nano', 'nano_decoder'])
def test_it_trains_on_a_dataset_and_writes(name, decoder, dataset, monkeypatch, capsys):
    module = importlib.import_module(name)
    for knob, value in dict(folder=str(dataset), depth=1, width=32, heads=2, batch_size=16,
                            max_iters=201, learning_rate=1e-2).items():
        monkeypatch.setattr(module, knob, value)
    # the validation split of this dataset has fewer rows than it shows
    monkeypatch.setattr(module, 'PackedDataset', lambda folder, _: PackedDataset(folder, 'train'))
    module.main()
    said = capsys.readouterr().out.splitlines()
    losses = [float(line.rpartition(' ')[2]) for line in said[:3]]
    assert losses[2] < .6 * losses[0], losses
    assert len(said) > 6
