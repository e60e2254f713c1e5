""" The bounds make no table of the vocabulary's width above a chunk; sampling reads as many rows as
fit; a cast network computes in bfloat16. """
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import diffusion
from diffusion import MaskedText, exact_nll
from model import Model, ModelConfig
from processes.gidd import GIDD
from processes.hdlm import HDLM
from sampling import denoise
from sampling.knobs import SamplingKnobs
from sampling.latents import make_latents, write_both
from sampling.likelihood import changed_by
from tasks.protein import predict
from toys import Network, l2t, net_of, toy_run

V, L, B, N_CLUSTERS = 500, 16, 6, 5
CHUNK = 9 * V                                                # 9 positions of at most B L = 96


class WidestTable(TorchDispatchMode):
    """ The most numbers in a tensor of V columns, of all that any operation gave. """
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] == V:
                self.numel = max(self.numel, x.numel())
        return result


@pytest.fixture(scope='module')
def model():
    torch.manual_seed(0)
    model = Model(ModelConfig(vocab_size=V, seq_len=L, latent_dim=3, latent_tokens=2, depth=1,
                              heads=1, width=8, clusters=N_CLUSTERS))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=.5)
    torch.nn.init.normal_(model.text_head.weight, std=.1)    # so that many ids are likely
    return model.eval()


def net_of_texts(model, **more):
    return net_of(model, eos=V - 2, pad=V - 1, **more)


def texts():
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(V - 2, (B, L), generator=rng)
    tokens[:, -1] = V - 2
    return tokens, torch.randn(B, 1, 3, generator=rng)


@pytest.mark.parametrize('name', ['masked', 'causal', 'gidd', 'hdlm'])
def test_a_bound_makes_no_table_above_a_chunk_and_is_the_same(name, model, monkeypatch):
    tokens, z = texts()
    u = torch.rand(B, 1 + L, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    u[:, 0] = .8                                             # most of each text is scored
    zero = torch.zeros(B)
    process = {'masked': MaskedText(V), 'gidd': GIDD(V, .2),
               'hdlm': HDLM(V, torch.arange(V) % N_CLUSTERS, 2., .8)}.get(name)

    def bound():
        with torch.inference_mode(), WidestTable() as widest:
            if name == 'causal':
                nats = exact_nll(model, tokens, z, zero)
            else:
                nats = process.bound(model, tokens, z, zero, u)
        return nats, widest.numel
    whole, widest = bound()
    assert widest >= 4 * CHUNK, 'the test would see nothing'
    monkeypatch.setattr(diffusion, 'LOGITS_CHUNK', CHUNK)
    chunked, widest = bound()
    assert 0 < widest <= CHUNK and torch.allclose(whole, chunked, rtol=1e-5)


def test_the_first_choice_of_a_network_that_knows_the_tokens_is_right():
    tokens, _ = texts()
    mask = torch.arange(L).expand(B, L) % 3 == 1
    right = torch.nn.functional.one_hot(tokens, V).float()               # (B, L, V)
    knows = Network(lambda tokens, z, t_text, t_latent: right, streams=('text',), vocab_size=V)
    run = toy_run(net_of_texts(knows))
    found = predict(run, tokens.masked_fill(mask, V), mask, SamplingKnobs(sample_batch=B))
    assert torch.equal(found, tokens)


def test_a_cast_run_computes_in_bfloat16_and_its_clocks_in_float32(model):
    net, (tokens, z) = net_of_texts(copy.deepcopy(model), dtype='bfloat16'), texts()
    seen = {}
    for name, module in net.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda module, args, out, name=name: seen.update({name: out.dtype}))
    with torch.inference_mode():
        found, expected = (one.logits(tokens, 0.5, torch.arange(5), z, 0.0)
                           for one in (net, net_of_texts(model)))
    assert found.dtype == torch.float32 and torch.equal(found, found.bfloat16().float())
    assert 0 < (found - expected).abs().max() < .05 * expected.abs().max()
    in_bfloat16 = ('blocks.0.text.qkv', 'blocks.0.latent.qkv', 'text_modulation', 'text_head')
    assert {seen[name] for name in in_bfloat16} == {torch.bfloat16}
    in_float32 = ('latent_in', 'latent_clock.up', 'latent_clock.down')
    assert {seen[name] for name in in_float32} == {torch.float32}


# ---- rows

def test_a_call_reads_no_more_rows_than_fit_in_6_gb():
    """ Of config/l2t_892m.py: a number for each position and dimension of a row, in bfloat16. """
    size = dict(seq_len=1024, n_latents=1, latent_tokens=8, width=1024, depth=24)
    net = net_of(Network(vocab_size=50_258, **size), dtype='bfloat16')
    number, table = 2 * 1032 * 1024, 50_258 * 8 * 4
    assert net.rows_that_fit(128) == 6e9 // (25 * number) == 113
    assert net.rows_that_fit(128, 8) == 6e9 // (25 * number + 8 * table) == 91
    assert net.rows_that_fit(128, 1024) == 6e9 // (25 * number + 1024 * table) == 3
    assert net.rows_that_fit(10 ** 6, 0, 2) == 6e9 // ((25 + 96) * number) == 23
    assert net.rows_that_fit(7) == 7
    net.model.config.seq_len = 10 ** 9
    assert net.rows_that_fit(128) == 1, 'one row in any case'


@pytest.mark.parametrize('direction, n_asked', [
    ('l2t', L // 2), ('remdm', L), ('confidence', L), ('unconditional', 0), ('t2l', 0),
    ('changed', L)])
def test_every_direction_goes_by_the_rows_that_fit(direction, n_asked, model, monkeypatch):
    (tokens, z), seen = texts(), []
    net = net_of_texts(model)
    monkeypatch.setattr(model, 'forward', lambda tokens, z, *args, forward=model.forward, **kw:
                        seen.append(len(z)) or forward(tokens, z, *args, **kw))
    row = 4 * (L + 2) * 8 * 25 + n_asked * V * 8 * 4
    monkeypatch.setattr(denoise, 'MOST_BYTES', int(4.9 * row))
    knobs = SamplingKnobs(sampler='ancestral', steps=4, latent_steps=4)
    with torch.inference_mode():
        {'l2t': lambda: l2t(net, z, sampler='ancestral', steps=4),
         'remdm': lambda: l2t(net, z, sampler='remdm', steps=4),
         'confidence': lambda: l2t(net, z, sampler='confidence', steps=2),
         'unconditional': lambda: write_both(toy_run(net), B, knobs),
         't2l': lambda: make_latents(net, tokens, B, knobs),
         'changed': lambda: changed_by(net, tokens, z, -z, knobs)}[direction]()
    assert seen[0] == max(seen) == 4 and seen[-1] == B - 4
