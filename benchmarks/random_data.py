"""
Datasets of nothing but noise, in the shape of the real ones: so the configs that need a large
corpus can be timed without it. Every text has all of its tokens, each drawn evenly from the
vocabulary, and every latent is drawn from N(0, 1). The format is prepare.py's.

Letters: n samples, L tokens of a text, N latent vectors of D dimensions, V vocabulary.
"""
import itertools
import json
import os

import numpy as np

from corpora.tokenizers import bytes_of_characters
from corpora.writing import as_bytes, write_file
from runs.manifest import FORMAT
from runs.writing import sealed

# the size of a latent, which the encoder gives; the rest stands in the config
LATENT_DIMS = {'quickstart': 512, 'captions': 384, 'l2t': 1024, 'l2t_892m': 32}
R50K = 50_258                  # ids of r50k_base, EOS among them, and PAD


def make_tokenizer(vocab_size):
    """ The tokenizer.json of V ids, EOS and PAD included: all bytes, then pairs of bytes. It has no
    merges, for it never reads a text. """
    letters = list(bytes_of_characters())
    pairs = (a + b for a, b in itertools.product(letters, letters))
    words = itertools.islice(itertools.chain(letters, pairs), vocab_size - 2)
    model = dict(type='BPE', vocab={word: i for i, word in enumerate(words)}, merges=[])
    splitter = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=True)
    return json.dumps(dict(version='1.0', pre_tokenizer=splitter, model=model)).encode()


def write_split(folder, split, n, L, D, vocab_size, generator):
    """ One shard of n samples. Returns the split's entry for meta.json. """
    name = f'{split}-00000'
    n_tokens = L - 1                                       # and an EOS
    tokens = generator.integers(vocab_size - 2, size=n * n_tokens).astype(np.uint16)
    offsets = np.arange(n + 1, dtype=np.int64) * n_tokens
    latents = generator.standard_normal((n, 1, D)).astype(np.float16)

    files = write_files(folder, {
        f'{name}.tokens.bin': tokens.tobytes(),
        f'{name}.offsets.npy': as_bytes(np.save, offsets),
        f'{name}.latents.npy': as_bytes(np.save, latents),
    })
    counts = dict(samples=n, tokens=n * n_tokens)
    shard = dict(name=name, longest=n_tokens, files=files, **counts)
    return dict(shards=[shard], **counts)


def write_files(folder, contents):
    """ contents: {name: bytes}. Returns what meta.json says of each. """
    files = {}
    for name, data in contents.items():
        path = os.path.join(folder, name)
        files[name] = write_file(path, data)
    return files


def write_dataset(folder, vocab_size, length, latent_dim, n=2048, n_val=256):
    """ Writes a dataset folder; one that is there already is kept. Returns the folder. """
    if os.path.exists(os.path.join(folder, 'meta.json')):
        return folder
    os.makedirs(folder, exist_ok=True)
    generator = np.random.default_rng(0)
    splits = {}
    for split, size in (('train', n), ('val', n_val)):
        splits[split] = write_split(folder, split, size, length, latent_dim, vocab_size, generator)

    mean = np.zeros(latent_dim, np.float32)
    std = np.ones(latent_dim, np.float32)
    files = write_files(folder, {
        'tokenizer.json': make_tokenizer(vocab_size),
        'latent_stats.npz': as_bytes(np.savez, mean=mean, std=std),
    })

    # meta.json last: where it is, the dataset is complete
    tokenizer = dict(kind='bpe', vocab_size=vocab_size, eos=vocab_size - 2, pad=vocab_size - 1)
    meta = dict(
        format=FORMAT,
        name='random',
        tokenizer=tokenizer,
        encoder=dict(id='random'),
        latent_shape=[1, latent_dim],
        token_dtype='uint16',
        max_tokens=length - 1,
        splits=splits,
        files=files,
    )
    write_file(os.path.join(folder, 'meta.json'), sealed(meta).encode())
    return folder
