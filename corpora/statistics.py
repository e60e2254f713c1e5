"""
Statistics of one split of a dataset: of all its shards, or of SHARDS evenly spaced ones.
"""
import numpy as np
import torch

SHARDS = 64


def some_shards(data):
    """ All shards of a split, or SHARDS of them, always the same. """
    step = -(-data.n_shards // SHARDS)
    return map(data.shard, range(0, data.n_shards, step))


def lengths(data):
    """ Tokens of every text in these shards, (n,) int64. """
    edges = [shard.edges(slice(None)) for shard in some_shards(data)]
    return np.concatenate([end - begin for begin, end in edges])


def counts(data):
    """ How often each id occurs in these shards, (V,) int64: an EOS after every text, no PAD. """
    found = np.zeros(data.vocab_size, np.int64)
    for shard in some_shards(data):
        data.check_ids(shard.tokens)
        for part in np.array_split(shard.tokens, 1 + len(shard.tokens) // 2**24):
            found += np.bincount(part, minlength=len(found))
        found[data.eos] += len(shard.offsets) - 1
    return torch.from_numpy(found)
