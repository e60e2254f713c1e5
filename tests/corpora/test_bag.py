"""
The bag that prepare.py fits in closed form: it solves its equations, and a training begins with it.
"""
import numpy as np
import pytest
import torch

from corpora.bag import Counts, fit_bag, has_bag
from corpora.tokenizers import load_tokenizer
from data import PackedDataset
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
    V = 12
    lengths = torch.randint(1, 6, (40,)).tolist()
    texts = [torch.randint(0, V - 1, (n,)) for n in lengths]             # not V - 1
    sparse = Counts(texts, V)
    X, W, Y = dense(texts, V), torch.randn(V, 4), torch.randn(40, 4)
    Y[:, 2] = 0                                                          # a dead dimension
    assert torch.allclose(sparse.times(W).double(), X @ W.double(), atol=1e-5)
    right = X.T @ Y.double()
    assert torch.allclose(sparse.transposed_times(Y).double(), right, atol=1e-5)
    for penalty in (.1, 20.):
        found = sparse.solve(Y, penalty)
        exact = torch.linalg.solve(X.T @ X + penalty * torch.eye(V), right)
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
    data, tokenizer = PackedDataset(dataset, 'train'), load_tokenizer(dataset)
    encoder = load_encoder(data.meta['encoder'], folder=dataset)
    texts, Z = real_tokens(data)
    X, Z = dense(texts, tokenizer.vocab_size), Z.double()

    def ridge(A, b):
        return torch.linalg.solve(A.T @ A + torch.eye(A.shape[1]), A.T @ b)

    # first from the embeddings of the tokens, where there are any; then of each token its own
    E = torch.zeros(tokenizer.vocab_size, Z.shape[1], dtype=torch.float64)
    if has_encoder:
        for i in torch.cat(texts).unique().tolist():
            raw = encoder([tokenizer.decode([i]).strip() or '.'])
            E[i] = data.standardise(raw)[0, 0].double()
    M = ridge(X @ E, Z)
    exact = E @ M + ridge(X, Z - X @ E @ M)
    with_it, without = (fit_bag(data, tokenizer, one) for one in (encoder, None))
    found = with_it if has_encoder else without
    assert torch.allclose(found.double(), exact, atol=5e-3) and exact.abs().max() > 1
    assert (with_it - without).abs().max() > .05, 'the encoder says nothing'


def test_prepare_writes_it_and_it_predicts_latents_of_unseen_texts(dataset):
    data = PackedDataset(dataset, 'val')
    values = load_bag(str(dataset), data.meta)
    texts, Z = real_tokens(data)
    bag = torch.stack([values[text].sum(0) / len(text) ** .5 for text in texts])
    error = (bag - Z).square().mean()
    assert error < .7 * Z.square().mean() < (bag.roll(1, 0) - Z).square().mean()


def test_latents_of_one_vector_and_pictures_have_one_that_is_not_too_large():
    assert has_bag((1, 10 ** 9), False, 2) and has_bag((64, 16), True, 1536)
    assert not has_bag((64, 16), False, 2), 'several vectors of an encoder'
    assert has_bag((100, 100), True, 1000) and not has_bag((100, 100), True, 1001)


def test_a_new_run_begins_with_it_and_what_has_weights_keeps_them(dataset, tmp_path):
    """ Runs whose weights do not move. At clock 1 `with_v` predicts -z, and `plain` the noise, of
    which a text says nothing. """
    as_it_is = ['--mode=t2l', '--max_iters=1', '--learning_rate=1e-12']
    names = ('now', 'with_v', 'plain', 'after', 'fsdp')
    now, with_v, plain, after, fsdp = (tmp_path / name for name in names)
    train_each(dataset, {now: as_it_is, with_v: [*as_it_is, '--latent_target=v'],
                         plain: [*as_it_is, '--latent_target=eps'],
                         after: [*as_it_is, f'--init_from={plain}']})
    job = Job(dataset, fsdp, *as_it_is, '--parallel=fsdp', ranks=2)
    assert job.wait() == [0, 0], job.err()

    data = PackedDataset(dataset, 'train')
    values = load_bag(str(dataset), data.meta)
    expected = torch.zeros(data.vocab_size + 1)
    expected[[data.eos, data.pad]] = -8                      # no weight on the ends
    for out, sign in ((now, 1), (fsdp, 1), (with_v, -1)):
        for kind in ('model', 'ema'):
            found = weights(out, kind)
            written = found['bag_values.weight']
            assert torch.allclose(written[:-1], sign * values, atol=1e-6) and values.any()
            assert written[-1].abs().max() < 1e-6
            assert torch.allclose(found['bag_scores.weight'][:, 0], expected, atol=1e-4)
    for out in (plain, after):
        assert weights(out)['bag_values.weight'].abs().max() < 1e-6
