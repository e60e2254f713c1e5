""" Splits of more rows than a table has room for, as sentences: an order that is computed, shards that open when they are read,
offsets that are checked then, statistics of a sample. """
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import PackedDataset, keyed_permutation, row_order
from launch import TINY, run_code
from tasks.common import chosen_rows
from test_data import LENGTHS, edit_meta, entry, write_dataset

BILLION = 10**9


@pytest.fixture
def large(monkeypatch):
    """ Every split is large, and has more tokens than are checked when it is opened. """
    monkeypatch.setattr(data, 'MANY_ROWS', 0)
    monkeypatch.setattr(data, 'CHECK_ALL_TOKENS', 0)


def rewrite(folder, name, offsets):
    """ Other offsets in a shard, with their size and digest in meta.json. """
    np.save(folder / name, np.array(offsets))

    def recount(meta):
        for shard in meta['splits']['train']['shards']:
            if name in shard['files']:
                shard['files'][name] = entry(folder / name)
    edit_meta(folder, recount)

# -----------------------------------------------------------------------------
# The order

def test_the_keyed_order_visits_every_row_once_whatever_their_number():
    for n in [*range(1, 70), 255, 256, 257, 1000, 4095, 4096, 4097, 2**16, 2**16 + 1, 100_003]:
        for epoch in (0, 1):
            rows = keyed_permutation(np.arange(n), n, seed=5, epoch=epoch)
            assert rows.dtype == np.int64 and np.array_equal(np.sort(rows), np.arange(n)), n


def test_a_row_depends_on_its_position_the_seed_and_the_epoch_alone(monkeypatch):
    monkeypatch.setattr(data, 'MANY_ROWS', 10)
    n = 1003
    whole = row_order(n, 3, 0, 3 * n)
    epochs = whole.reshape(3, n)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(n))
    # two unrelated orders of n rows agree at one position on average, and rarely at 10
    others = [*epochs, row_order(n, 4, 0, n)]
    for i in range(4):
        assert not any((others[i] == others[j]).sum() > 10 for j in range(i))

    # any share of the positions gives the same rows: of ranks, of a resumed run, over the end of an epoch
    for start, count in ((0, 5), (n - 2, 4), (n - 1, 2 * n), (7, 0), (2 * n, 1)):
        assert np.array_equal(row_order(n, 3, start, count), whole[start:start + count])
    ranks = [row_order(n, 3, 640 + 16 * rank, 16) for rank in range(8)]
    assert np.array_equal(np.concatenate(ranks), whole[640:768])
    assert row_order(n, 3, 0, n - 1).tolist() == [row_order(n, 3, i, 1)[0] for i in range(n - 1)]


def test_the_keyed_order_of_a_billion_rows_looks_random():
    m = 2**17
    positions = np.arange(m) + 123_456_789
    rows = keyed_permutation(positions, BILLION, seed=0, epoch=0)
    assert len(np.unique(rows)) == m and 0 <= rows.min() and rows.max() < BILLION

    # rows of neighbouring positions are as far apart as independent ones: |a - b| < share n with probability 1 - (1 - share)^2
    for step in (1, 2, 32, 4096):
        distance = np.abs(rows[step:] - rows[:-step]) / BILLION
        for share in (.001, .01, .1, .5):
            p = 1 - (1 - share)**2
            sd = np.sqrt(p * (1 - p) / len(distance))
            assert abs((distance < share).mean() - p) < 5 * sd, (step, share)
        assert abs(np.corrcoef(rows[step:], rows[:-step])[0, 1]) < 5 / np.sqrt(m)

    # every bin of the rows gets its share, in every part of the positions; so do the last bits, and other epochs and seeds
    table = np.zeros((16, 16))
    np.add.at(table, (np.arange(m) * 16 // m, rows * 16 // BILLION), 1)
    assert ((table - m / 256)**2 / (m / 256)).sum() < 256 + 6 * np.sqrt(2 * 256)
    for bit in range(12):
        assert abs((rows >> bit & 1).mean() - .5) < 5 * .5 / np.sqrt(m)
    for seed, epoch in ((0, 1), (1, 0)):
        other = keyed_permutation(positions, BILLION, seed, epoch)
        assert abs(np.corrcoef(rows, other)[0, 1]) < 5 / np.sqrt(m) and (rows == other).sum() < 3


def test_the_keyed_order_takes_neither_memory_nor_time_for_each_row():
    rows = row_order(2**62, 0, 2**61, 4)
    assert len(set(rows.tolist())) == 4 and 0 <= rows.min()
    assert chosen_rows(BILLION, 3, 'random', 1).tolist() == row_order(BILLION, 1, 0, 3).tolist()
    assert chosen_rows(BILLION, 3, 'random', 1).tolist() != chosen_rows(BILLION, 3, 'random', 2).tolist()


# -----------------------------------------------------------------------------
# Opening and reading

def test_a_large_split_gives_the_rows_of_a_small_one(dataset, monkeypatch):
    small = PackedDataset(dataset, 'train')
    monkeypatch.setattr(data, 'MANY_ROWS', len(small) - 1)
    large, val = PackedDataset(dataset, 'train'), PackedDataset(dataset, 'val')
    assert large.shards.is_large and not val.shards.is_large and not small.shards.is_large
    rows = np.array([5, 0, len(small) - 1, 5, 17])
    for a, b in zip(small.rows(rows), large.rows(rows)):
        assert torch.equal(a, b)
    assert np.array_equal(small.ids(rows), large.ids(rows)) and small.text(17) == large.text(17)
    assert (large.seq_len, large.longest) == (small.seq_len, small.longest) and len(large) == len(small)


def test_wrong_offsets_inside_a_large_split_are_found_when_their_row_is_read(tmp_path, large):
    name = 'train-00002.offsets.npy'                                     # rows 4, 5, 6 of 5, 7, 2 tokens
    for offsets, wrong in (([0, 13, 12, 14], (4, 5)),                    # a text that ends before it begins; and one of 13 tokens
                           ([0, 5, 99, 14], (5, 6)),                     # beyond the tokens
                           ([0, -5, 12, 14], (4, 5))):
        folder = tmp_path / str(offsets)
        folder.mkdir()
        write_dataset(folder)
        rewrite(folder, name, offsets)
        ds = PackedDataset(folder, 'train')
        for row in range(7):
            if row not in wrong:
                ds.rows([row])
                continue
            for read in (lambda: ds.rows([0, row]), lambda: ds.text(row), ds.lengths):
                with pytest.raises(ValueError, match=rf'{name}: a text from .* expected .* 14 tokens of .*prepare.py') as error:
                    read()
                assert '\n' not in str(error.value)
        data.MANY_ROWS = 7                                               # a small split is checked whole when it is opened
        with pytest.raises(ValueError, match=f'{name}: offsets run to 14, expected rising'):
            PackedDataset(folder, 'train')
        data.MANY_ROWS = 0


def test_sizes_headers_and_the_ends_of_offsets_are_checked_when_a_large_split_opens(tmp_path, large):
    def refuses(match, change):
        folder = tmp_path / str(len(os.listdir(tmp_path)))
        folder.mkdir()
        write_dataset(folder)
        change(folder)
        with pytest.raises(ValueError, match=match):
            PackedDataset(folder, 'train')
    name = 'train-00002.offsets.npy'
    refuses('train-00002.tokens.bin: found 27 bytes, expected 28', lambda f: os.truncate(f / 'train-00002.tokens.bin', 27))
    refuses('train-00001.latents.npy: missing', lambda f: os.remove(f / 'train-00001.latents.npy'))
    refuses('offsets run to 14, expected rising from 0', lambda f: rewrite(f, name, [1, 5, 12, 14]))
    refuses('offsets run to 15, expected rising from 0 to the 14', lambda f: rewrite(f, name, [0, 5, 12, 15]))
    refuses(r'\(3,\), expected int64 \(4,\)', lambda f: rewrite(f, name, [0, 5, 14]))
    refuses('found float64', lambda f: rewrite(f, name, [0., 5, 12, 14]))


def test_a_training_that_meets_a_wrong_offset_ends_with_one_line(dataset, tmp_path):
    folder = tmp_path / 'packed'
    shutil.copytree(dataset, folder)
    path = folder / 'train-00000.offsets.npy'
    offsets = np.load(path)
    offsets[1:-1] += 10**9
    np.save(path, offsets)
    out = run_code(f"""
import runpy, sys, data
data.MANY_ROWS = 0
PackedDataset = data.PackedDataset
PackedDataset.lengths = lambda self: data.np.array([9])     # what the preflight asks for
sys.argv = ['train.py', '--dataset={folder}', '--out_dir={tmp_path}/out', *{TINY!r}]
runpy.run_path('train.py', run_name='__main__')
""")
    assert out.returncode == 2 and out.stderr.count('\n') == 1, out.stderr
    assert out.stderr.startswith(f'error: {path}: a text from ') and 'Traceback' not in out.stderr


@pytest.mark.skipif(sys.platform != 'linux', reason='counts the open files of Linux')
@pytest.mark.parametrize('many_rows', [0, 7])
def test_no_more_shards_are_open_than_there_is_room_for(tmp_path, monkeypatch, many_rows):
    kept = [0, 2, 3, 4, 5, 6]                                            # row 1 is empty: a shard of it alone would be refused
    tokens, _ = write_dataset(tmp_path, shards=[(i, i + 1) for i in kept])
    edit_meta(tmp_path, lambda meta: meta['splits']['train'].update(samples=6))
    monkeypatch.setattr(data, 'MANY_ROWS', many_rows)
    monkeypatch.setattr(data, 'most_open', lambda: 2)
    ds = PackedDataset(tmp_path, 'train')
    rows = np.array([5, 0, 3, 0, 4, 1, 2])
    for _ in range(2):
        for row, x in zip(rows, ds.rows(rows)[0]):
            own = tokens[kept[row]].tolist()
            assert x.tolist()[:len(own) + 1] == [*own, ds.tokenizer.eos]
        links = [os.path.join('/proc/self/fd', fd) for fd in os.listdir('/proc/self/fd')]
        files = {os.readlink(link) for link in links if os.path.exists(link)}
        assert 0 < sum(Path(file).parent == tmp_path for file in files) <= 2 * 3
    ds.lengths(), ds.counts()


def test_the_limit_on_open_files_decides_how_many_shards_are_open(monkeypatch):
    import resource
    for limit, n in ((1024, 128), (100, 16), (2**20, 8192), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(resource, 'getrlimit', lambda kind: (limit, limit))
        assert data.most_open() == n

# -----------------------------------------------------------------------------
# Statistics

def test_statistics_of_a_large_split_are_those_of_a_sample_that_never_changes(dataset, monkeypatch):
    small = PackedDataset(dataset, 'train')
    lengths, counts = small.lengths(), small.counts()
    monkeypatch.setattr(data, 'MANY_ROWS', 0)
    monkeypatch.setattr(data, 'STRETCHES', 20)
    monkeypatch.setattr(data, 'STRETCH_ROWS', 5)
    large = PackedDataset(dataset, 'train')
    sample = large.lengths()
    assert len(sample) <= 100 and np.array_equal(sample, PackedDataset(dataset, 'train').lengths())

    # a stretch in each twentieth of the split, of neighbouring rows
    stretches = [(begin, end) for _, begin, end in large.stretches()]
    assert [int(begin * 20 / len(small)) for begin, _ in stretches] == list(range(20))
    assert np.array_equal(sample, np.concatenate([lengths[begin:end] for begin, end in stretches]))
    assert len({begin - i * len(small) // 20 for i, (begin, _) in enumerate(stretches)}) > 5

    # its mean is that of the split to 5 standard errors, and the counts are those of the same rows
    assert abs(sample.mean() - lengths.mean()) < 5 * lengths.std() / np.sqrt(len(sample))
    of_sample = large.counts()
    assert of_sample.sum() == sample.sum() + len(sample) and (of_sample <= counts).all()
    assert of_sample[large.tokenizer.eos] == len(sample)


def test_statistics_of_a_small_split_are_of_all_rows(tmp_path):
    tokens, _ = write_dataset(tmp_path)
    ds = PackedDataset(tmp_path, 'train')
    assert ds.lengths().tolist() == LENGTHS
    expected = np.bincount(np.concatenate(tokens), minlength=258)
    expected[ds.tokenizer.eos] += 7
    assert ds.counts().tolist() == expected.tolist()
