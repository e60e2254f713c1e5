""" What evaluate.py reports, against enumeration, and controls that expose a model which ignores its condition. """
import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diffusion import GaussianLatents, MaskedText
from evaluate import compare, derangement, nelbo, word_f1
from model import Model, ModelConfig
from toys import L, TEXTS, V, Toy, any_order_law, exact_bound, optimal_denoiser


def toy_run(table, pad=99):
    model = Toy(table)
    model.config = SimpleNamespace(streams=('text',))
    return SimpleNamespace(model=model, text=MaskedText(V), device='cpu', autocast=contextlib.nullcontext,
                           tokenizer=SimpleNamespace(pad=pad))


def test_nelbo_is_the_enumerated_bound_and_its_standard_error_is_honest():
    p, table = optimal_denoiser()
    exact = exact_bound(p, table, 'count') / L                           # the entropy, per token
    g = torch.Generator().manual_seed(0)
    z = []
    for seed in range(40):
        tokens = TEXTS[torch.multinomial(p, 500, replacement=True, generator=g)]
        r = nelbo(toy_run(table), ['abcd'] * 500, tokens, None, 4, seed, 128)
        z.append((r['nats_per_token'] - exact) / r['nats_per_token_se'])
        assert r['perplexity'] == pytest.approx(math.exp(r['nats_per_token']))
        assert r['bits_per_byte'] == pytest.approx(r['nats_per_token'] / math.log(2))   # four bytes, four tokens
    z = np.array(z)
    assert abs(z.mean()) < 4 / math.sqrt(len(z)) and .7 < z.std() < 1.3, 'the error must be about one standard error'


def test_nats_of_padding_are_in_the_total_and_padding_is_not_in_the_divisor():
    uniform = torch.zeros(4 ** L, L, V)
    tokens = torch.tensor([[0, 1, 2, 2], [0, 2, 2, 2]])                   # 2 is PAD: 2 + 1 real tokens
    r = nelbo(toy_run(uniform, pad=2), ['ab', 'a'], tokens, None, 4, 0, 8)
    assert r['nats_per_token'] == pytest.approx(2 * L * math.log(V) / 3)


def test_the_bound_lies_above_the_negative_log_likelihood_of_the_model_itself():
    _, table = optimal_denoiser()
    table = table * .5                                                   # no longer consistent: the bound is strict
    nll = -any_order_law(table).log()
    gap = torch.tensor([exact_bound(one, table, 'count') for one in torch.eye(len(TEXTS), dtype=torch.float64)]) - nll
    assert gap.min() > -1e-9 and gap.mean() > .001                       # Jensen, text by text


def copy_task(mode, read_condition=True, steps=400):
    """ Train a tiny model where latents and text say the same; returns the loss with the right and with a shuffled condition. """
    torch.manual_seed(0)
    vocabulary, length, dims = 8, 4, 8
    model = Model(ModelConfig(vocab_size=vocabulary, seq_len=length, latent_dim=dims, latent_tokens=2, depth=2, heads=2, width=32))
    text, latent = MaskedText(vocabulary), GaussianLatents(torch.ones(dims))
    code = torch.randn(length, vocabulary, dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def loss_of(B, shuffle):
        tokens = torch.randint(0, vocabulary, (B, length))
        z = code[torch.arange(length), tokens].sum(1, keepdim=True) / 2
        t, zeros = 1e-3 + (1 - 1e-3) * torch.rand(B), torch.zeros(B)
        other = torch.randperm(B) if shuffle else torch.arange(B)
        if mode == 'l2t':
            noisy, mask = text.corrupt(tokens, t, torch.rand(B, length))
            condition = z[other] if read_condition else torch.zeros_like(z)
            logits, _ = model(noisy, condition, t, zeros, predict=('text',))
            weight = (text.weight(t)[:, None] * mask).flatten() / mask.numel()
            return text.loss(logits.flatten(0, 1), tokens.flatten(), weight)[0]
        z_t, e = latent.corrupt(z, t, torch.randn(z.shape))
        condition = tokens[other] if read_condition else torch.zeros_like(tokens)
        _, out = model(condition, z_t, zeros, t, predict=('latent',))
        return latent.loss(out, latent.target_of(z, e, t), torch.ones(B))[0]
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(64, False).backward()
        optimizer.step()
    with torch.no_grad():
        return loss_of(4096, False).item(), loss_of(4096, True).item()


@pytest.mark.parametrize('mode', ['l2t', 't2l'])
def test_a_shuffled_condition_costs_a_model_that_reads_it_and_exposes_one_that_does_not(mode):
    right, shuffled = copy_task(mode)
    assert shuffled > 1.5 * right, (right, shuffled)
    right, shuffled = copy_task(mode, read_condition=False, steps=100)
    assert shuffled == pytest.approx(right, rel=.1), 'a model that ignores its condition does not care'


def test_a_derangement_leaves_no_one_in_place_and_one_text_cannot_be_shuffled():
    for n in (2, 3, 100):
        order = derangement(n, 0)
        assert (order != torch.arange(n)).all() and order.sort().values.tolist() == list(range(n))
    with pytest.raises(ValueError, match='at least 2'):
        derangement(1, 0)


def test_comparison_scores_copies_full_and_collapsed_embeddings_at_chance():
    sources = ['A dog runs.', 'The cat sits.', 'A red car', 'Two men']
    raw = torch.eye(4)[:, None]
    r = compare(sources, sources, raw, raw)
    assert all(r[metric].mean() == pytest.approx(100) for metric in ('bleu', 'f1', 'exact', 'retrieval@1', 'retrieval@10'))
    assert r['cosine'].mean() == pytest.approx(1)
    r = compare(sources, [''] * 4, raw, torch.zeros(4, 1, 4))
    assert r['retrieval@1'].mean() == pytest.approx(25) and r['bleu'].mean() == 0 and r['exact'].mean() == 0
    r = compare(sources, sources[1:] + sources[:1], raw, raw[[1, 2, 3, 0]])
    assert r['retrieval@1'].mean() == 0 and r['exact'].mean() == 0
    assert word_f1('A dog runs.', 'a DOG sits') == pytest.approx(2 * 2 / 6) and word_f1('', '') == 1
