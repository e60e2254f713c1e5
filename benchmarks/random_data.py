"""
Datasets of nothing but noise, in the shape of the real ones: so the configs that need a large
corpus can be timed without it. Every text has all of its tokens, each drawn evenly from the
vocabulary, and every latent is drawn from N(0, 1). Shards are written as by prepare.py.

Letters: n samples, L tokens of a text with its EOS, D latent dimensions, V vocabulary.
"""
import itertools
import json
import os
from types import SimpleNamespace

import numpy as np

from base.writing import DATASET, Claim
from corpora.readers import Document
from corpora.shards import NAMES, token_dtype, write_files, write_shard
from corpora.tokenizers import bytes_of_characters
from data import FORMAT

# the size of a latent, which the encoder gives; the rest stands in the config
LATENT_DIMS = {'quickstart': 512, 'captions': 384, 'l2t': 1024, 'l2t_892m': 32}
R50K = 50_258                  # ids of r50k_base, EOS among them, and PAD


def make_tokenizer(V):
    """ The tokenizer.json of V ids, EOS and PAD included: all bytes, then pairs of bytes. It has no
    merges, for it never reads a text. """
    # any distinct names will do
    letters = list(bytes_of_characters())
    pairs = (a + b for a, b in itertools.product(letters, letters))
    words = itertools.islice(itertools.chain(letters, pairs), V - 2)
    model = dict(type='BPE', vocab={word: i for i, word in enumerate(words)}, merges=[])
    splitter = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=True)
    return json.dumps(dict(version='1.0', pre_tokenizer=splitter, model=model)).encode()


def write_dataset(folder, V, L, D, n=2048, n_val=256):
    """ Writes a dataset folder; one that is there already is kept. Returns the folder. """
    if os.path.exists(os.path.join(folder, 'meta.json')):
        return folder
    claim = Claim(folder, DATASET, NAMES)                  # until this process ends

    # write_shard wants documents and a tokenizer: these documents are empty, and the tokenizer
    # draws a text for each
    rng = np.random.default_rng(0)
    tokenizer = SimpleNamespace(
        vocab_size=V, pieces=[b'a'] * V,
        encode_batch=lambda texts: rng.integers(V - 2, size=(len(texts), L - 1)))

    # one shard for each split, of texts that all have L - 1 random tokens
    splits = {}
    for split, size in (('train', n), ('val', n_val)):
        latents = rng.standard_normal((size, 1, D))
        shard = write_shard(claim, f'{split}-00000', '', [Document('')] * size, latents, tokenizer,
                            None, L - 1)
        splits[split] = dict(shards=[shard], samples=size, tokens=shard['tokens'])

    # the latents are N(0, 1) already, so there is nothing to standardise
    stats = dict(mean=np.zeros(D, np.float32), std=np.ones(D, np.float32))
    files = {'tokenizer.json': make_tokenizer(V), 'latent_stats.npz': stats}

    # meta.json last: where it is, the dataset is complete
    meta = dict(
        format=FORMAT,
        name='random',
        tokenizer=dict(kind='bpe', vocab_size=V, eos=V - 2, pad=V - 1),
        encoder=dict(id='random'),
        latent_shape=[1, D],
        token_dtype=token_dtype(tokenizer),
        max_tokens=L - 1,
        splits=splits,
        files=write_files(claim, files),
    )
    write_files(claim, {'meta.json': meta})
    return folder
