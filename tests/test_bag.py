""" The bag that prepare.py fits in closed form: it is the solution of its equations, and a training begins with it. """
import json
import shutil

import numpy as np
import pytest
import torch

from corpora.bag import Counts, fit_bag
from data import PackedDataset
from encoders import load_encoder
from launch import Job, train, train_each, weights
from runs import manifest
from corpora.tokenizers import load_tokenizer
from runs.resume import load_bag
from runs.files import sealed

V = 12


def texts(n=40, seed=0):
    """ Tokens of n texts, one after the other, and where each begins. Id V - 1 never occurs, and some texts repeat a token. """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (n,), generator=g)
    tokens = torch.randint(0, V - 1, (int(lengths.sum()),), generator=g)
    return tokens, torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])


def dense(tokens, offsets, n_ids=V):
    """ X (n, V) in float64, by loops. """
    X = torch.zeros(len(offsets) - 1, n_ids, dtype=torch.float64)
    for i, (begin, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist())):
        for token in tokens[begin:end].tolist():
            X[i, token] += (end - begin) ** -.5
    return X


def test_the_sparse_products_are_those_of_the_matrix_of_counts():
    tokens, offsets = texts()
    X, sparse = dense(tokens, offsets), Counts(tokens, offsets, V)
    g = torch.Generator().manual_seed(1)
    W, Y = torch.randn(V, 3, generator=g), torch.randn(40, 3, generator=g)
    assert torch.allclose(sparse.times(W).double(), X @ W.double(), atol=1e-5)
    assert torch.allclose(sparse.transposed_times(Y).double(), X.T @ Y.double(), atol=1e-5)


@pytest.mark.parametrize('penalty', [0.1, 1.0, 20.0])
def test_conjugate_gradients_find_the_solution_of_the_normal_equations(monkeypatch, penalty):
    monkeypatch.setattr('corpora.bag.TOLERANCE', 1e-6)
    tokens, offsets = texts()
    X = dense(tokens, offsets)
    Z = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    Z[:, 2] = 0                                                          # a dead dimension
    exact = torch.linalg.solve(X.T @ X + penalty * torch.eye(V, dtype=torch.float64), X.T @ Z.double())
    found = Counts(tokens, offsets, V).solve(Z, penalty)
    assert torch.allclose(found.double(), exact, atol=1e-5) and found.abs().max() > .1
    assert not found[:, 2].any() and not found[V - 1].any()


@pytest.mark.parametrize('has_encoder', [True, False])
def test_the_fit_of_a_dataset_is_that_of_its_equations_in_float64(dataset, monkeypatch, has_encoder):
    monkeypatch.setattr('corpora.bag.TOLERANCE', 1e-6)
    monkeypatch.setattr('corpora.bag.STEPS', 300)
    meta, tokenizer = manifest.read_meta(dataset), load_tokenizer(dataset)
    encoder = load_encoder(meta['encoder'], folder=dataset) if has_encoder else None
    data = PackedDataset(dataset, 'train')
    rows, Z = data.rows(np.arange(len(data)))
    real = [row[(row != tokenizer.eos) & (row != tokenizer.pad)] for row in rows]
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in real])])
    X, Z = dense(torch.cat(real), offsets, tokenizer.vocab_size), Z[:, 0].double()

    def ridge(A, b):
        return torch.linalg.solve(A.T @ A + torch.eye(A.shape[1], dtype=torch.float64), A.T @ b)
    E = torch.zeros(tokenizer.vocab_size, Z.shape[1], dtype=torch.float64)
    if has_encoder:
        for i in torch.cat(real).unique().tolist():
            E[i] = data.standardise(encoder([tokenizer.decode([i]).strip() or '.']))[0, 0].double()
    M = ridge(X @ E, Z)
    exact = E @ M + ridge(X, Z - X @ E @ M)
    found = fit_bag(dataset, meta, tokenizer, encoder).double()
    assert torch.allclose(found, exact, atol=5e-3) and exact.abs().max() > 1
    other = fit_bag(dataset, meta, tokenizer, None if has_encoder else load_encoder(meta['encoder'], folder=dataset)).double()
    assert (other - exact).abs().max() > .05, 'the encoder says nothing'


def test_prepare_writes_it_and_it_predicts_latents_of_texts_that_it_has_not_seen(dataset):
    data = PackedDataset(dataset, 'val')
    values = load_bag(str(dataset), data.meta)
    rows, Z = data.rows(np.arange(len(data)))
    is_real = (rows != data.eos) & (rows != data.pad)
    bag = (values[rows] * is_real[..., None]).sum(1) / is_real.sum(1, keepdim=True) ** .5
    error = (bag - Z[:, 0]).square().mean()
    shuffled = (bag.roll(1, 0) - Z[:, 0]).square().mean()
    assert error < .7 * Z.square().mean() < shuffled


AS_IT_IS = ['--mode=t2l', '--max_iters=1', '--learning_rate=1e-12', '--eval_interval=1']


@pytest.fixture(scope='module')
def begun(dataset, tmp_path_factory):
    """ Runs whose weights have not moved: the usual one, one that predicts no clean latent, and with FSDP on two processes. """
    folder = tmp_path_factory.mktemp('bag')
    train_each(dataset, {folder / 'now': AS_IT_IS, folder / 'plain': [*AS_IT_IS, '--latent_target=v']})
    job = Job(dataset, folder / 'fsdp', *AS_IT_IS, '--parallel=fsdp', ranks=2)
    assert job.wait() == [0, 0], job.err()
    return folder


def validation(out):
    entries = [json.loads(line) for line in open(out / 'training_log.jsonl')]
    return next(entry['val_latent'] for entry in entries if 'val_latent' in entry)


def test_a_new_run_begins_with_it_and_so_does_its_average(dataset, begun):
    data = PackedDataset(dataset, 'train')
    values, V = load_bag(str(dataset), data.meta), data.vocab_size
    for name in ('now', 'fsdp'):
        for kind in ('model', 'ema'):
            found = weights(begun / name, kind)
            assert torch.allclose(found['bag_values.weight'][:V], values, atol=1e-6) and values.abs().max() > 1
            assert found['bag_values.weight'][V:].abs().max() < 1e-6
            scores = found['bag_scores.weight'][:, 0]
            ends = [data.eos, data.pad]
            assert torch.allclose(scores[ends], torch.tensor(-8.)) and scores.abs().sum() == pytest.approx(16, abs=1e-4)
    assert validation(begun / 'fsdp') == pytest.approx(validation(begun / 'now'), rel=.2)
    plain = weights(begun / 'plain')
    assert plain['bag_values.weight'].abs().max() < 1e-6 and not plain['bag_scores.weight'].abs().max() > 1e-6


def test_what_has_weights_already_keeps_them(dataset, begun, tmp_path):
    """ A run that resumes, and one that begins with the weights of another. """
    resumed = tmp_path / 'resumed'
    shutil.copytree(begun / 'plain', resumed)
    train_each(dataset, {resumed: [*AS_IT_IS, '--max_iters=2'],
                         tmp_path / 'next': [*AS_IT_IS, f'--init_from={begun / "plain"}']})
    for out in (resumed, tmp_path / 'next'):
        assert weights(out)['bag_values.weight'].abs().max() < 1e-6


@pytest.mark.parametrize('harm', ['cut', 'shape'])
def test_a_broken_one_stops_the_training_with_one_line(dataset, tmp_path, harm):
    folder = tmp_path / 'data'
    shutil.copytree(dataset, folder)
    path = folder / 'bag.npy'
    values = np.load(path)
    if harm == 'cut':
        path.write_bytes(path.read_bytes()[:-2])
    else:
        np.save(path, values[:-1])
        meta = json.loads((folder / 'meta.json').read_text())
        meta['files']['bag.npy'] = dict(bytes=path.stat().st_size, sha256=manifest.sha256(path))
        (folder / 'meta.json').write_text(sealed(meta))
    result = train(folder, tmp_path / 'run', *AS_IT_IS)
    assert result.returncode == 2 and 'bag.npy' in result.stderr and result.stderr.count('\n') == 1, result.stderr
    assert 'Traceback' not in result.stderr
