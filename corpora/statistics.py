""" Statistics of one split of a dataset. """
import numpy as np
import torch


def lengths(data):
    """ Tokens of every text, (n,) int64. """
    edges = [data.shard(i).edges(slice(None)) for i in range(data.n_shards)]
    return np.concatenate([end - begin for begin, end in edges])


def counts(data):
    """ How often each id occurs, (V,) int64: an EOS after every text, no PAD. """
    found = np.zeros(data.vocab_size, np.int64)
    for shard in map(data.shard, range(data.n_shards)):
        shard.check_ids(shard.tokens)
        for part in np.array_split(shard.tokens, 1 + len(shard.tokens) // 2**24):
            found += np.bincount(part, minlength=len(found))         # casts to int64
        found[data.eos] += len(shard.offsets) - 1
    return torch.from_numpy(found)
