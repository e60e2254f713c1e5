""" data.py as sentences: tokenizers never lie about text, batches are what the disk says, order and
noise are pure functions. """
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from base.files import read_array
from base.writing import entry_of, sealed
from corpora import tokenizers
from corpora.latents import as_latent
from corpora.layouts import verify_dataset
from corpora.tokenizers import load_tokenizer, train_bpe
from data import LatentStats, PackedDataset, counts, lengths, load_stats, row_order
from launch import forge_file

TEXTS = ['a dog runs on the beach', 'tabs\tand\n\nlines  ', '<eos> <|endoftext|> [MASK] <pad>',
         'naïve café 東京 🙂 e\u0301', 'nul \x00 byte', '', ' ']
# of the seven rows of the little dataset, over three shards
LENGTHS = [3, 0, 7, 1, 5, 7, 2]


def bpe(tmp_path, vocab_size=300):
    texts = ['the dog runs on the beach', 'a dog on a beach'] * 3
    (tmp_path / 'tokenizer.json').write_text(train_bpe(texts, vocab_size))
    return tokenizers.bpe_tokenizer(tmp_path / 'tokenizer.json')


def write_dataset(folder, edges=(0, 3, 4, 7), rows=range(7)):
    """ Rows of known tokens and latents, written by hand in the format of the design; edges: where
    its shards begin and end. """
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 256, n) for n in LENGTHS]
    latents = rng.normal(3, 2, (7, 2, 5)).astype(np.float16)
    latents[..., 1] = .25                                          # a dead dimension
    shards = []
    for a, b in itertools.pairwise(edges):
        name, own = f'train-{len(shards):05d}', rows[a:b]
        of_shard = [LENGTHS[i] for i in own]
        np.concatenate([tokens[i] for i in own]).astype('<u2').tofile(folder / f'{name}.tokens.bin')
        np.save(folder / f'{name}.offsets.npy', np.cumsum([0, *of_shard]))
        np.save(folder / f'{name}.latents.npy', latents[own])
        files = {path.name: entry_of(path) for path in folder.glob(f'{name}.*')}
        shards.append(dict(name=name, samples=len(own), tokens=sum(of_shard),
                           longest=max(of_shard), files=files))
    flat = latents.reshape(-1, 5).astype(np.float64)
    stats = folder / 'latent_stats.npz'
    np.savez(stats, mean=flat.mean(0), std=flat.std(0))
    meta = dict(format=2, name='little', tokenizer=tokenizers.byte_tokenizer().record, encoder=None,
                latent_shape=[2, 5], token_dtype='uint16', max_tokens=8,
                splits=dict(train=dict(samples=len(rows), shards=shards)),
                files={stats.name: entry_of(stats)})
    (folder / 'meta.json').write_text(sealed(meta))
    return tokens, latents


def rewrite(folder, name, array):
    """ Another array in a shard, with its size and digest in meta.json. """
    array.tofile(folder / name) if name.endswith('.bin') else np.save(folder / name, array)
    forge_file(folder, name, (folder / name).read_bytes())

# -----------------------------------------------------------------------------

@pytest.mark.parametrize('kind', ['byte', 'bpe'])
def test_text_survives_tokenizing_and_never_becomes_a_special_id(tmp_path, kind):
    tok = load_tokenizer('byte') if kind == 'byte' else bpe(tmp_path)
    for text, ids in zip(TEXTS, tok.encode_batch(TEXTS)):
        assert tok.decode(ids) == text and ids == tok.encode(text)
        assert all(0 <= i < tok.vocab_size - 2 for i in ids)
    assert {tok.eos, tok.pad} == {tok.vocab_size - 2, tok.vocab_size - 1}


def test_decoding_stops_at_eos_passes_over_pad_and_shows_masks(tmp_path):
    tok = bpe(tmp_path)
    a, b = tok.encode('a dog'), tok.encode(' runs')
    assert tok.decode(a + [tok.pad] + b + [tok.eos] + a) == 'a dog runs'
    assert tok.decode(a + [tok.vocab_size]) == 'a dog[MASK]'
    assert tok.decode(torch.tensor(a + [tok.eos, tok.pad])) == 'a dog'


def test_a_tiktoken_encoding_keeps_its_ids_and_gains_one_for_pad(monkeypatch):
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)} | {b'do': 256, b'dog': 257}
    encoding = tiktoken.Encoding('little', pat_str=r'\w+|\W', mergeable_ranks=ranks,
                                 special_tokens={'<|endoftext|>': 260})          # 258, 259: holes
    monkeypatch.setattr(tiktoken, 'list_encoding_names', lambda: ['little'])
    monkeypatch.setattr(tiktoken, 'get_encoding', {'little': encoding}.__getitem__)
    tok = load_tokenizer('little')
    assert (tok.eos, tok.pad, tok.vocab_size) == (260, 261, 262)
    assert tok.encode('dog') == [257]
    for text in TEXTS:
        assert tok.decode(tok.encode(text)) == text
        assert not {tok.eos, tok.pad} & set(tok.encode(text))
    with pytest.raises(ValueError, match='littel.*little'):
        load_tokenizer('littel')

    # a text that is too much for its regular expression: a panic, which is no Exception
    hard = tiktoken.Encoding('hard', pat_str=r'(?:a|aa)+(?!.)|.', mergeable_ranks=ranks,
                             special_tokens={'<|endoftext|>': 260})
    monkeypatch.setattr(tiktoken, 'get_encoding', {'hard': hard}.__getitem__)
    with pytest.raises(ValueError, match='^tokenizer hard cannot be used: PanicException: '):
        load_tokenizer('hard').encode('a' * 100_000 + 'b')


# -----------------------------------------------------------------------------

def test_a_batch_is_the_text_one_eos_and_pad_beside_standardised_latents(tmp_path):
    tokens, latents = write_dataset(tmp_path)
    ds = PackedDataset(tmp_path, 'train')
    assert len(ds) == 7 and ds.seq_len == 9 and ds.latent_shape == (2, 5)
    # out of order, repeated, over all shards, an empty text
    indices = np.array([6, 0, 3, 0, 5, 1, 4, 2])
    x, z = ds.rows(indices)
    assert x.dtype == torch.int64 and z.dtype == torch.float32
    for i, row in zip(indices, x.tolist()):
        own = tokens[i].tolist()
        assert row == [*own, ds.eos] + [ds.pad] * (8 - len(own))
        assert ds.ids(i).tolist() == own
    raw = ds.raw_latents(indices)
    assert torch.equal(raw, torch.from_numpy(latents[indices]).float())
    assert torch.allclose(z, ds.standardise(raw))
    assert PackedDataset(tmp_path, 'train', seq_len=12).rows([0])[0].shape == (1, 12)
    with pytest.raises(IndexError):
        ds.rows([7])


def test_destandardise_is_the_inverse_and_gives_a_dead_dimension_its_mean(tmp_path):
    write_dataset(tmp_path)
    stats, raw = load_stats(tmp_path), PackedDataset(tmp_path, 'train').raw_latents(np.arange(7))
    assert torch.allclose(stats.destandardise(stats.standardise(raw)), raw, atol=1e-5)
    anything = torch.randn(4, 2, 5)
    assert torch.allclose(stats.destandardise(anything)[..., 1], torch.tensor(.25))
    tiny = LatentStats(np.full(3, .1), np.array([1e-9, .03, .03]))
    z = tiny.standardise(torch.randn(8, 3))
    assert z.isfinite().all() and not z[:, 0].any() and tiny.live.tolist() == [0, 1, 1]


# -----------------------------------------------------------------------------

@pytest.mark.parametrize('name, content, words', [
    ('train-00000.latents.npy', np.zeros((3, 2, 4), np.float16), r'\(3, 2, 4\).*\(3, 2, 5\)'),
    ('train-00000.latents.npy', np.zeros((3, 2, 5), np.float32), 'float32.*float16'),
    ('train-00000.latents.npy', np.zeros((2, 2, 5), np.float16), r'\(2, 2, 5\).*\(3, 2, 5\)'),
    ('train-00000.offsets.npy', np.array([0, 3, 10]), r'\(3,\).*\(4,\)'),
    ('train-00000.offsets.npy', np.array([0., 3, 3, 10]), 'found float64'),
    ('train-00000.tokens.bin', np.zeros(0, '<u2'), 'empty')])
def test_a_wrong_shape_or_dtype_is_refused_with_both_values(tmp_path, name, content, words):
    write_dataset(tmp_path)
    rewrite(tmp_path, name, content)
    with pytest.raises(ValueError, match=words):
        PackedDataset(tmp_path, 'train')


# a text that ends before it begins, one of 10 tokens, and one that begins before the first; all of
# them beyond the last token, before the first
@pytest.mark.parametrize('offsets', [(0, 7, 3, 10), (0, 3, 3, 13), (-8, 3, 3, 10),
                                     (10**9, 1000000003, 1000000003, 1000000010),
                                     (-99, -96, -96, -89), (1, 4, 4, 11),
                                     (2**63 - 1, 3 - 2**63, 3, 10)])
def test_a_flipped_bit_of_an_offset_is_found_when_its_text_is_read(tmp_path, offsets):
    write_dataset(tmp_path)
    rewrite(tmp_path, 'train-00000.offsets.npy', np.array(offsets))
    data = PackedDataset(tmp_path, 'train')
    for read in (data.rows, lambda rows: [data.ids(i) for i in rows]):
        with pytest.raises(ValueError, match='train-00000.offsets.npy: .*run prepare.py again'):
            read(range(3))


@pytest.mark.parametrize('name, content', [
    ('train-00001.offsets.npy', np.array([10**9, 10**9 + 1])),
    ('train-00001.offsets.npy', np.array([-1, 0])),
    ('train-00002.offsets.npy', np.array([0, 5, 12, 13])),               # the last token is of none
    ('train-00001.tokens.bin', np.array([258], '<u2'))])
def test_what_is_in_a_shard_is_looked_at_by_inspect(tmp_path, name, content):
    write_dataset(tmp_path)
    verify_dataset(tmp_path)
    rewrite(tmp_path, name, content)
    PackedDataset(tmp_path, 'train')
    with pytest.raises(ValueError, match=f'{name}: (offsets|token id)'):
        verify_dataset(tmp_path)


def test_ids_beyond_the_vocabulary_are_found_in_the_first_shard_or_when_they_are_read(tmp_path):
    def stops(number, read, *args):
        with pytest.raises(ValueError, match=f'train-0000{number}.tokens.bin: token id 258, '
                                             'expected ids below vocab_size 258'):
            read(*args)

    write_dataset(tmp_path)
    np.full(14, 258, '<u2').tofile(tmp_path / 'train-00002.tokens.bin')
    ds = PackedDataset(tmp_path, 'train')
    np.full(10, 258, '<u2').tofile(tmp_path / 'train-00000.tokens.bin')
    stops(2, ds.rows, [5])
    stops(2, ds.ids, 5)
    stops(0, counts, ds)
    stops(0, PackedDataset, tmp_path, 'train')


def test_a_row_depends_on_its_position_the_seed_and_the_epoch_alone():
    n = 1003
    whole = row_order(n, 3, 0, 3 * n)
    epochs = whole.reshape(3, n)
    assert (np.sort(epochs) == np.arange(n)).all()
    # two unrelated orders of n rows agree at one position on average, and rarely at 10
    for a, b in itertools.combinations([*epochs, row_order(n, 4, 0, n)], 2):
        assert (a == b).sum() <= 10

    # any share of the positions gives the same rows, also over the end of an epoch
    for start, count in ((0, 5), (n - 2, 4), (n - 1, 2 * n), (7, 0), (2 * n, 1)):
        assert np.array_equal(row_order(n, 3, start, count), whole[start:start + count])


def open_files(folder):
    """ How many files of a folder this process has open. """
    links = [os.path.join('/proc/self/fd', fd) for fd in os.listdir('/proc/self/fd')]
    files = {os.readlink(link) for link in links if os.path.exists(link)}
    return sum(Path(file).parent == folder for file in files)


def test_no_more_shards_are_open_than_there_is_room_for(tmp_path, monkeypatch):
    # row 1 is empty: a shard of it alone would be refused
    kept = [0, 2, 3, 4, 5, 6]
    tokens, _ = write_dataset(tmp_path, range(7), kept)
    monkeypatch.setattr(data, 'most_open', lambda: 2)
    ds = PackedDataset(tmp_path, 'train')
    rows = np.array([5, 0, 3, 0, 4, 1, 2])
    for _ in range(2):
        for row, x in zip(rows, ds.rows(rows)[0].tolist()):
            own = tokens[kept[row]].tolist()
            assert x[:len(own) + 1] == [*own, ds.eos]
        assert 0 < open_files(tmp_path) <= 2 * 3
    lengths(ds), counts(ds)


@pytest.mark.parametrize('kind', ['<f2', '>f2', '<f4', '>f4', '<f8', '>f8', '<f16', '>f16'])
def test_floats_of_any_size_and_byte_order_are_read_as_torch_has_them(tmp_path, kind):
    if kind.endswith('16') and np.longdouble(0).itemsize != 16:
        pytest.skip('this machine has no such floats')
    np.save(tmp_path / 'z.npy', np.array([[0.5, -2.0]], kind))
    z = read_array(tmp_path / 'z.npy')
    assert z.dtype == (np.float32 if kind[1:] in ('f2', 'f4') else np.float64)
    assert torch.from_numpy(z).tolist() == [[0.5, -2.0]]
    assert as_latent(np.load(tmp_path / 'z.npy')[0], 'z.npy').dtype == z.dtype


@pytest.mark.parametrize('part', [
    '"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}',
    '"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}',
    '"padding": {"strategy": {"Fixed": 1000000000}, "direction": "Right", "pad_id": 0,'
    ' "pad_to_multiple_of": null, "pad_type_id": 0, "pad_token": "!"}'])
def test_of_a_tokenizer_only_words_and_merges_are_read(tmp_path, part):
    path = tmp_path / 'tokenizer.json'
    expected = bpe(tmp_path).encode('the dog runs')
    path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(f'{{{part}}}')))
    assert tokenizers.bpe_tokenizer(path).encode('the dog runs') == expected


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    path = tmp_path / 'tokenizer.json'
    bpe(tmp_path)
    model = {'type': 'WordPiece', 'unk_token': 'a', 'continuing_subword_prefix': '#',
             'max_input_chars_per_word': 100, 'vocab': {'a': 0}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {'model': model}))
    with pytest.raises(ValueError, match='tokenizer.json: no byte-level BPE'):
        tokenizers.bpe_tokenizer(path)
