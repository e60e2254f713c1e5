"""
A packed dataset, seen from outside: a look at it, and the layout of earlier systems, written.

    verify_dataset(folder)                 is every file as meta.json says?
    print_summary(train, val, tokenizer)   what is in it; every prepare.py ends with this
    inspected(folder)                      both of them: python prepare.py --inspect=FOLDER
    export(folder, target)                 python prepare.py --export_dir=TARGET

The earlier layout is read by corpora/latents.py. It has a file per text and a file per latent:
    train_data.json, validation_data.json      lists of {text, text_path, latent_path}
    texts/<split>/*.txt                        UTF-8; such a file counts more than the list's text
    latents/<split>/*.npy                      (N, D) or (D,), floats
"""
import json
import os

import numpy as np

from base.console import progress_bar, shown
from base.writing import write_text
from corpora.latents import earlier_index
from corpora.readers import counted
from corpora.tokenizers import load_tokenizer
from data import PackedDataset, check_file, lengths, read_meta

# -----------------------------------------------------------------------------
# A look at a packed dataset

def verify_dataset(folder):
    """ Compares every file of a dataset with its digest in meta.json, and asks whether its shards
    hold what they may. ValueError names the first one that is wrong. Returns the two splits. """
    meta = read_meta(folder)
    files = dict(meta['files'])
    for split in meta['splits'].values():
        for shard in split['shards']:
            files |= shard['files']
    for name in progress_bar(files, desc='verifying', unit=' files'):
        check_file(folder, name, files)
    splits = [PackedDataset(folder, name) for name in meta['splits']]
    for data in splits:
        for i in range(data.n_shards):
            data.shard(i).check()
    print(f'{len(files)} files, each as meta.json says')
    return splits


def inspected(folder):
    """ Verifies a dataset, and prints what is in it. """
    train, val, *_ = verify_dataset(folder)
    print_summary(train, val, load_tokenizer(folder))


def line(name, *words):
    print(shown(f'{name:<20} {", ".join(words)}'))


def print_summary(train, val, tokenizer):
    """ Prints what is in a dataset, as a reader finds it. train, val: its two splits. """
    # the documents that were read
    meta = train.meta
    line('dataset', train.folder)
    for name, counts in meta['counts'].items():
        line(f'read {name}', f'{counts["read"]:,} documents', f'{counts["kept"]:,} kept',
             *counted(counts))

    # the samples that they became
    for name, split in meta['splits'].items():
        n_tokens = split['tokens']
        bytes_a_token = split['bytes'] / max(1, n_tokens)
        line(name, f'{split["documents"]:,} documents', f'{split["samples"]:,} samples',
             f'{n_tokens:,} tokens', f'{bytes_a_token:.2f} bytes per token', *counted(split))

    # how long they are
    percents = (50, 95, 99, 99.5, 100)
    found = np.percentile(lengths(train), percents, method='lower')
    said = [f'{percent:g} %: {n}' for percent, n in zip(percents, found)]
    line('tokens per sample', *said, f'max_tokens={meta["max_tokens"]}')

    # their latents, and the first texts
    if train.stats is not None:
        show_latents(train, val)
    for i in range(min(3, len(val))):
        text = tokenizer.decode(val.ids(i))
        line(f'val {i}', repr(text)[:100])


def show_latents(train, val):
    """ Their shape, norm and statistics, and what may be wrong with them. """
    # the norm is of those of val, at most 4,096 of them
    encoder = train.meta['encoder']
    made_by = encoder['id'] if encoder else 'given'
    z = val.raw_latents(np.arange(min(len(val), 4096)))
    norm = z.norm(dim=-1)
    spread = norm.std(correction=0)                        # of one latent it is 0
    line('latents', f'{train.latent_shape}', made_by, f'norm {norm.mean():.3f} +- {spread:.3f}')

    # mean and std are those that the networks' scale comes from, dead dimensions left out
    is_live = train.live > 0
    mean = train.stats.mean[is_live]
    std = train.stats.std[is_live]
    n_dead = int((~is_live).sum())
    line('per dimension', f'mean {mean.min():.3g} to {mean.max():.3g}',
         f'std {std.min():.3g} to {std.max():.3g}', f'{n_dead} dead dimensions')

    # what was counted while they were made, over both splits
    remarks = dict(
        truncated='are longer than the encoder reads: lower --max_tokens',
        zero='have a latent of zeros, which says nothing',
        unknown='have no word that the encoder knows, so their latents say nothing'
    )
    for key, words in remarks.items():
        n = sum(split.get(key, 0) for split in train.meta['splits'].values())
        if n:
            line('warning', f'{n:,} samples {words}')

# -----------------------------------------------------------------------------
# The earlier layout, written

def export(folder, target):
    """ Writes a dataset in the earlier layout, with latents (N, D) float32. ValueError where
    something is in `target` already, or the dataset has no latents. """
    if os.path.isdir(target) and os.listdir(target):
        raise ValueError(f'export_dir={target} is there already: name a new folder')
    splits = verify_dataset(folder)
    tokenizer = load_tokenizer(folder)
    for data in splits[:2]:
        if data.stats is None:
            raise ValueError(f'{folder} has no latents: the earlier layout is for pairs')
        name = dict(train='train', val='validation')[data.split]
        for kind in ('texts', 'latents'):
            os.makedirs(os.path.join(target, kind, name), exist_ok=True)

        # a file of the text and a file of the latents for each sample
        items = []
        for i in progress_bar(range(len(data)), f'writing {name}', unit=' samples'):
            text = tokenizer.decode(data.ids(i))
            text_path = f'texts/{name}/{i:08d}.txt'
            latent_path = f'latents/{name}/{i:08d}.npy'
            # newline='': what the tokens say is written as it is, on any machine
            with open(os.path.join(target, text_path), 'w', encoding='utf-8', newline='') as f:
                f.write(text)
            latent = data.raw_latents([i])[0]                            # (N, D)
            np.save(os.path.join(target, latent_path), latent.numpy())
            items.append(dict(id=i, text=text, text_path=text_path, latent_path=latent_path))

        # the list of them
        index = earlier_index(target, name)
        write_text(index, json.dumps(items, indent=1, ensure_ascii=False))
        print(f'{index}: {len(items):,} samples')
