""" No table of the vocabulary's width is larger than a chunk, whatever samples or measures; and the chunks change nothing. """
import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import diffusion
from diffusion import GaussianLatents, MaskedText, in_chunks, nll_of
from model import Model, ModelConfig
from processes.adaptive import genmd4_bound
from processes.gidd import GIDD
from processes.hdlm import HDLM
from samplers import SAMPLERS, make_propose
from sampling import denoise, directions, loading, writing
from sampling.left_to_right import LeftToRight
from sampling.likelihood import log_p_given_half
from tasks.importance import losses
from tasks.nelbo import nelbo
from tasks.orders import nats_of_orders
from tasks.protein import predict
from tasks.self_correction import correct
from toys import Network

V, L, B, N_CLUSTERS = 500, 16, 6, 5
CHUNK = 9 * V                                                            # 9 positions of at most B L = 96


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
    model = Model(ModelConfig(vocab_size=V, seq_len=L, latent_dim=3, latent_tokens=2, depth=1, heads=1, width=8, clusters=N_CLUSTERS))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=.5)
    torch.nn.init.normal_(model.text_head.weight, std=.1)                # so that many ids are likely
    return model.eval()


def run_of(model, text=None):
    tokenizer = SimpleNamespace(eos=V - 2, pad=V - 1, decode=lambda ids: 'text')
    stats = SimpleNamespace(standardise=lambda z: z, live=torch.ones(3))
    return SimpleNamespace(model=model, text=text or MaskedText(V), next_token=LeftToRight(V, V - 2), fills_masks=True, streams=('text', 'latent'),
                           out_dir='out/toy', device='cpu', L=L, row_calls=0, lengths=None, banned=torch.tensor([3]), tokenizer=tokenizer,
                           latent=GaussianLatents(torch.ones(3)), stats=stats, dtype='float32',
                           config=dict(mode='unconditional'))


def texts():
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(V - 2, (B, L), generator=rng)
    tokens[:, -1] = V - 2
    return tokens, torch.randn(B, 1, 3, generator=rng)


def whole_and_in_chunks(compute, monkeypatch, at_least=4 * CHUNK):
    """ What compute() gives with one chunk, and with small ones, where no table is larger than a chunk. Without chunks some table has
    `at_least` so many numbers, or the test would see nothing. """
    with torch.inference_mode(), WidestTable() as widest:
        whole = compute()
    assert widest.numel >= at_least, widest.numel
    monkeypatch.setattr(diffusion, 'LOGITS_CHUNK', CHUNK)
    with torch.inference_mode(), WidestTable() as widest:
        chunked = compute()
    assert 0 < widest.numel <= CHUNK, widest.numel
    return whole, chunked


# ---- sampling

KNOBS = dict(temperature=.7, nucleus=.9, guidance=2.0, steps=3)


def drawn(model):
    """ {name: a function that draws}. """
    tokens, z = texts()
    masks = torch.full((B, L), V)
    inner = torch.arange(L).expand(B, L) < 9

    def write(text=None, **more):
        return lambda: writing.write(run_of(model, text), masks, masks < 0, z, 0, inner=None if text else inner, **{**KNOBS, **more})
    found = {name: write(sampler=name) for name in SAMPLERS}
    return found | {
        'reparam, repeat_cap': write(sampler='reparam', repeat_cap=.05),
        'confidence, entropy': write(sampler='confidence', score='entropy'),
        'confidence, margin': write(sampler='confidence', score='margin', temperature=0.0),
        'gidd': write(GIDD(V, .2), sampler='ancestral', self_correct=2),
        'hdlm': write(HDLM(V, torch.arange(V) % N_CLUSTERS, 2., .8), sampler='ancestral'),
        'joint': lambda: directions.unconditional(run_of(model), B, sampler='confidence', steps=3, temperature=.7)[0]}


@pytest.mark.parametrize('name', [*SAMPLERS, 'reparam, repeat_cap', 'confidence, entropy', 'confidence, margin', 'gidd', 'hdlm', 'joint'])
def test_a_sampler_makes_no_table_above_a_chunk_and_writes_the_same(name, model, monkeypatch):
    whole, chunked = whole_and_in_chunks(drawn(model)[name], monkeypatch)
    assert torch.equal(whole, chunked) and len(whole.unique()) > 3


# ---- measuring

def bounds(model):
    """ {name: a function that gives what is measured}. """
    tokens, z = texts()
    run, gidd, hdlm = run_of(model), GIDD(V, .2), HDLM(V, torch.arange(V) % N_CLUSTERS, 2., .8)
    u = torch.rand(B, 1 + L, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    u[:, 0] = .8                                                         # most of each text is scored
    zeros = torch.zeros(B)

    def of(process):
        return process.bound(model, tokens, z, zeros, u)

    def of_task(process):
        return torch.tensor(nelbo(run, ['text'] * B, tokens, z, 2, 0, B, process)['', 'nats_per_token'].value)

    rare = torch.rand(V, generator=torch.Generator().manual_seed(3))
    steps = torch.arange(L).expand(B, 2, L)
    return {
        'masked': lambda: of(MaskedText(V)),
        'causal': lambda: of(LeftToRight(V, V - 2)),
        'gidd': lambda: of(gidd),
        'hdlm': lambda: of(hdlm),
        'genmd4': lambda: genmd4_bound(model, MaskedText(V), tokens, z, zeros, u[:, 0], u[:, 1:], rare.double() + .5),
        'nelbo': lambda: of_task(MaskedText(V)),
        'importance': lambda: losses(run, tokens, z, 2, 0, B)[0],
        'orders': lambda: nats_of_orders(run, tokens, z, 0.0, steps, 64),
        'given half': lambda: log_p_given_half(run, tokens, z, 0, B),
        'protein': lambda: predict(run, torch.full_like(tokens, V), tokens < V, B, torch.Generator().manual_seed(4)).float(),
        'self_correction': lambda: correct(run_of(model, gidd), tokens, tokens < 0, 1, B, torch.Generator().manual_seed(5))[1],
    }


@pytest.mark.parametrize('name', ['masked', 'causal', 'gidd', 'hdlm', 'genmd4', 'nelbo', 'importance', 'orders', 'given half', 'protein', 'self_correction'])
def test_a_measure_makes_no_table_above_a_chunk_and_is_the_same(name, model, monkeypatch):
    whole, chunked = whole_and_in_chunks(bounds(model)[name], monkeypatch)
    assert whole.isfinite().all() and torch.allclose(whole, chunked, rtol=1e-5)


def test_the_first_choice_of_a_network_that_knows_the_tokens_is_right_at_every_masked_position():
    tokens, _ = texts()
    mask = torch.arange(L).expand(B, L) % 3 == 1
    right = torch.nn.functional.one_hot(tokens, V).float()               # (B, L, V)
    knows = Network(lambda x, z, t, s, positions, predict: (right.flatten(0, 1)[positions], None))
    run = run_of(knows)
    run.streams = ('text',)
    assert torch.equal(predict(run, tokens.masked_fill(mask, V), mask, B, torch.Generator()), tokens)


# ---- the chunks themselves

def test_chunks_go_through_all_positions_in_order_once_even_where_there_are_none(monkeypatch):
    monkeypatch.setattr(diffusion, 'LOGITS_CHUNK', 3 * V)
    seen = []
    for n in (0, 1, 3, 8):
        table, seen[:] = torch.randn(n, V), []
        logits = denoise.Logits((n, V), lambda part: seen.append(part) or table[part])
        x, place = in_chunks(lambda some, place: (some.argmax(1), place), logits, torch.arange(n))
        assert torch.equal(x, table.argmax(1)) and place.tolist() == list(range(n)) and len(seen) == max(1, -(-n // 3))
        targets = torch.arange(n)
        assert torch.allclose(in_chunks(nll_of, logits, targets), -table.log_softmax(1).gather(1, targets[:, None])[:, 0])
    monkeypatch.setattr(diffusion, 'LOGITS_CHUNK', 1)                  # less than a row: a row
    assert in_chunks(lambda some: some.sum(1), torch.ones(2, V)).tolist() == [V, V]


def test_what_is_drawn_for_a_position_does_not_depend_on_the_chunks(monkeypatch):
    logits = torch.randn(40, V)
    drawn = []
    for chunk in (2 ** 25, 7 * V, V):
        monkeypatch.setattr(diffusion, 'LOGITS_CHUNK', chunk)
        drawn.append(make_propose(1.0, .9, torch.Generator().manual_seed(0))(logits))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


def test_a_cast_run_computes_in_bfloat16_and_its_clocks_in_float32(model):
    run, (tokens, z) = run_of(loading.cast(copy.deepcopy(model), 'bfloat16')), texts()
    seen = {}
    for name, module in run.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, out, name=name: seen.update({name: out.dtype}))
    with torch.inference_mode():
        logits, _ = denoise.call(run, tokens, z, 0.5, 0.0, torch.arange(5))
        expected, _ = denoise.call(run_of(model), tokens, z, 0.5, 0.0, torch.arange(5))
        found, expected = logits[1:3], expected[1:3]
    assert found.dtype == torch.float32 and torch.equal(found, found.bfloat16().float())
    assert 0 < (found - expected).abs().max() < .05 * expected.abs().max()
    assert {seen[name] for name in ('blocks.0.text.qkv', 'blocks.0.latent.qkv', 'text_modulation', 'text_head')} == {torch.bfloat16}
    assert {seen[name] for name in ('latent_in', 'latent_clock.up', 'latent_clock.down')} == {torch.float32}


# ---- rows

class RowsSeen:
    """ A model that notes how many rows its calls read. """

    def __init__(self, model):
        self.model, self.seen = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, z, *args, **kw):
        self.seen.append(len(z))
        return self.model(tokens, z, *args, **kw)


def test_a_call_reads_no_more_rows_than_fit_and_at_a_large_size_6_gb_hold_them():
    size = SimpleNamespace(seq_len=1024, n_latents=1, latent_tokens=8, width=1024, depth=24)     # config/l2t_892m.py
    run = SimpleNamespace(model=SimpleNamespace(config=size), device='cpu', dtype='bfloat16')
    number = 2 * 1032 * 1024                                             # a number for each place and dimension of a row, bfloat16
    assert denoise.rows_that_fit(run, 128) == 6e9 // (25 * number) == 113
    assert denoise.rows_that_fit(run, 10 ** 6, 1) == 6e9 // ((25 + 48) * number) == 38
    assert denoise.rows_that_fit(run, 10 ** 6, 2) == 6e9 // ((25 + 96) * number) == 23
    assert denoise.rows_that_fit(run, 7) == 7
    run.dtype = 'float32'
    assert denoise.rows_that_fit(run, 128) == 56
    size.seq_len = 10 ** 9
    assert denoise.rows_that_fit(run, 128) == 1, 'one row in any case'


@pytest.mark.parametrize('direction', ['l2t', 'unconditional', 't2l', 'embed', 'changed'])
def test_every_direction_goes_by_the_rows_that_fit(direction, model, monkeypatch):
    tokens, z = texts()
    run = run_of(RowsSeen(model))
    monkeypatch.setattr(denoise, 'MOST_BYTES', int(4.9 * 4 * (L + 2) * 8 * 25))
    {'l2t': lambda: directions.l2t(run, z, sampler='ancestral', steps=2),
     'unconditional': lambda: directions.unconditional(run, B, steps=2),
     't2l': lambda: directions.t2l(run, tokens, latent_steps=2),
     'embed': lambda: directions.embed(run, tokens, z),
     'changed': lambda: directions.changed_by(run, tokens, z, -z, .5)}[direction]()
    assert run.model.seen[0] == max(run.model.seen) == 4 and run.model.seen[-1] == B - 4


def test_a_cache_of_keys_and_values_counts(model, monkeypatch):
    _, z = texts()
    run, seen = run_of(model), []
    monkeypatch.setattr(run.next_token, 'decode_step', lambda model, tokens, z, *rest: seen.append(len(z)) or torch.zeros(len(tokens), V))
    monkeypatch.setattr(denoise, 'MOST_BYTES', int(3.1 * 4 * (L + 2) * 8 * 27))                   # 25 + 2 for one block's keys and values
    directions.l2t(run, z, sampler='autoregressive')
    assert max(seen) == 3
    seen.clear()
    directions.l2t(run, z, sampler='autoregressive', guidance=2.0)
    assert max(seen) == 2


def test_the_cache_has_the_precision_of_the_weights_and_room_for_a_whole_text(model):
    run, cache = run_of(loading.cast(copy.deepcopy(model), 'bfloat16')), {}
    tokens, z = texts()
    with torch.inference_mode():
        for n in (1, 2):
            run.next_token.decode_step(run.model, tokens[:, :n], z, torch.zeros(B), torch.zeros(B), cache)
    kept = cache['reader'].cache
    assert kept.dtype == torch.bfloat16 and kept.shape[:5] == (1, 2, B, 1, model.config.latent_tokens + L)
