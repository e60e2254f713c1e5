""" The order of rows, and splits of many shards, which open when they are read. """
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import data
from corpora.statistics import counts, lengths
from data import PackedDataset, row_order
from test_data import write_dataset

# -----------------------------------------------------------------------------
# The order

def test_a_row_depends_on_its_position_the_seed_and_the_epoch_alone():
    n = 1003
    whole = row_order(n, 3, 0, 3 * n)
    epochs = whole.reshape(3, n)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(n))
    # two unrelated orders of n rows agree at one position on average, and rarely at 10
    others = [*epochs, row_order(n, 4, 0, n)]
    for i in range(4):
        assert not any((others[i] == others[j]).sum() > 10 for j in range(i))

    # any share of the positions gives the same rows: of ranks, of a resumed run, over the end of
    # an epoch
    for start, count in ((0, 5), (n - 2, 4), (n - 1, 2 * n), (7, 0), (2 * n, 1)):
        assert np.array_equal(row_order(n, 3, start, count), whole[start:start + count])
    ranks = [row_order(n, 3, 640 + 16 * rank, 16) for rank in range(8)]
    assert np.array_equal(np.concatenate(ranks), whole[640:768])


# -----------------------------------------------------------------------------
# Opening and reading

@pytest.mark.skipif(sys.platform != 'linux', reason='counts the open files of Linux')
def test_no_more_shards_are_open_than_there_is_room_for(tmp_path, monkeypatch):
    # row 1 is empty: a shard of it alone would be refused
    kept = [0, 2, 3, 4, 5, 6]
    tokens, _ = write_dataset(tmp_path, shards=[(i, i + 1) for i in kept])
    monkeypatch.setattr(data, 'most_open', lambda: 2)
    ds = PackedDataset(tmp_path, 'train')
    rows = np.array([5, 0, 3, 0, 4, 1, 2])
    for _ in range(2):
        for row, x in zip(rows, ds.rows(rows)[0]):
            own = tokens[kept[row]].tolist()
            assert x.tolist()[:len(own) + 1] == [*own, ds.eos]
        links = [os.path.join('/proc/self/fd', fd) for fd in os.listdir('/proc/self/fd')]
        files = {os.readlink(link) for link in links if os.path.exists(link)}
        assert 0 < sum(Path(file).parent == tmp_path for file in files) <= 2 * 3
    lengths(ds), counts(ds)
