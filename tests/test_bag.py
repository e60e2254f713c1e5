"""
The bag that prepare.py fits in closed form: it solves its equations, and a training begins with it.
"""
import numpy as np
import pytest
import torch

from corpora.bag import Counts, fit_bag
from corpora.tokenizers import load_tokenizer
from data import PackedDataset, read_meta
from encoders import load_encoder
from launch import Job, train_each, weights
from runs.resume import load_bag


def dense(texts, n_ids):
    """ X (n, V) in float64, by loops. """
    X = torch.zeros(len(texts), n_ids, dtype=torch.float64)
    for i, text in enumerate(texts):
        for token in text.tolist():
            X[i, token] += len(text) ** -.5
    return X


def test_products_and_conjugate_gradients_are_those_of_the_dense_matrix(monkeypatch):
    monkeypatch.setattr('corpora.bag.TOLERANCE', 1e-6)
    g = torch.Generator().manual_seed(0)
    V = 12
    lengths = torch.randint(1, 6, (40,), generator=g).tolist()
    texts = [torch.randint(0, V - 1, (n,), generator=g) for n in lengths]        # not V - 1
    sparse = Counts(texts, V)
    X, W, Y = dense(texts, V), torch.randn(V, 4, generator=g), torch.randn(40, 4, generator=g)
    Y[:, 2] = 0                                                          # a dead dimension
    assert torch.allclose(sparse.times(W).double(), X @ W.double(), atol=1e-5)
    assert torch.allclose(sparse.transposed_times(Y).double(), X.T @ Y.double(), atol=1e-5)
    for penalty in (.1, 20.):
        found = sparse.solve(Y, penalty)
        exact = torch.linalg.solve(X.T @ X + penalty * torch.eye(V), X.T @ Y.double())
        assert torch.allclose(found.double(), exact, atol=1e-5)
        assert not found[:, 2].any() and not found[V - 1].any() and found.abs().max() > .01


def real_tokens(data):
    """ (texts without EOS and PAD, standardised latents) of a split. """
    rows, Z = data.rows(np.arange(len(data)))
    return [row[(row != data.eos) & (row != data.pad)] for row in rows], Z[:, 0]


@pytest.mark.parametrize('has_encoder', [True, False])
def test_the_fit_of_a_dataset_is_that_of_its_equations(dataset, monkeypatch, has_encoder):
    monkeypatch.setattr('corpora.bag.TOLERANCE', 1e-6)
    monkeypatch.setattr('corpora.bag.STEPS', 300)
    data = PackedDataset(dataset, 'train')
    meta, tokenizer = read_meta(dataset), load_tokenizer(dataset)
    encoder = load_encoder(meta['encoder'], folder=dataset)
    texts, Z = real_tokens(data)
    X, Z = dense(texts, tokenizer.vocab_size), Z.double()

    def ridge(A, b):
        return torch.linalg.solve(A.T @ A + torch.eye(A.shape[1]), A.T @ b)
    E = torch.zeros(tokenizer.vocab_size, Z.shape[1], dtype=torch.float64)
    for i in torch.cat(texts).unique().tolist() if has_encoder else []:
        raw = encoder([tokenizer.decode([i]).strip() or '.'])
        E[i] = data.standardise(raw)[0, 0].double()
    M = ridge(X @ E, Z)
    exact = E @ M + ridge(X, Z - X @ E @ M)
    found, other = (fit_bag(data, tokenizer, one).double()
                    for one in (encoder, None)[::1 if has_encoder else -1])
    assert torch.allclose(found, exact, atol=5e-3) and exact.abs().max() > 1
    assert (other - exact).abs().max() > .05, 'the encoder says nothing'


def test_prepare_writes_it_and_it_predicts_latents_of_unseen_texts(dataset):
    data = PackedDataset(dataset, 'val')
    values = load_bag(str(dataset), data.meta)
    texts, Z = real_tokens(data)
    bag = torch.stack([values[text].sum(0) / len(text) ** .5 for text in texts])
    error = (bag - Z).square().mean()
    assert error < .7 * Z.square().mean() < (bag.roll(1, 0) - Z).square().mean()


def test_a_new_run_begins_with_it_and_what_has_weights_keeps_them(dataset, tmp_path):
    """ Runs whose weights do not move. `plain` predicts no clean latent. """
    as_it_is = ['--mode=t2l', '--max_iters=1', '--learning_rate=1e-12']
    now, plain, after = (tmp_path / name for name in ('now', 'plain', 'after'))
    train_each(dataset, {now: as_it_is, plain: [*as_it_is, '--latent_target=v']})
    train_each(dataset, {after: [*as_it_is, f'--init_from={plain}']})
    job = Job(dataset, tmp_path / 'fsdp', *as_it_is, '--parallel=fsdp', ranks=2)
    assert job.wait() == [0, 0], job.err()

    data = PackedDataset(dataset, 'train')
    values = load_bag(str(dataset), data.meta)
    V, ends = data.vocab_size, [data.eos, data.pad]
    for out in (now, tmp_path / 'fsdp'):
        for kind in ('model', 'ema'):
            found = weights(out, kind)
            assert torch.allclose(found['bag_values.weight'][:V], values, atol=1e-6)
            assert found['bag_values.weight'][V:].abs().max() < 1e-6 < values.abs().max()
            scores = found['bag_scores.weight'][:, 0]
            assert torch.allclose(scores[ends], torch.tensor(-8.)), 'no weight on the ends'
            assert scores.abs().sum() == pytest.approx(16, abs=1e-4)
    for out in (plain, after):
        assert weights(out)['bag_values.weight'].abs().max() < 1e-6
