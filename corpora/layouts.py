"""
Datasets as folders: a look at a packed one, and the layout of earlier systems, read and written.

    verify(folder)             python prepare.py --inspect=FOLDER: is every file as meta.json says?
    summary(folder)            what is in it; every prepare.py ends with this
    export(folder, target)     python prepare.py --export_dir=TARGET
    read_earlier(source)       python prepare.py --import_dir=FOLDER

The earlier layout has a file per text and a file per latent:
    train_data.json, validation_data.json      lists of {text, text_path, latent_path}
    texts/<split>/*.txt                        UTF-8; such a file counts more than the list's text
    latents/<split>/*.npy                      (N, D) or (D,), floats
"""
import json
import os
from functools import partial

import numpy as np

from base.console import progress_bar, shown
from base.files import read_array, read_json, short
from base.writing import write_text
from corpora.latents import as_latent
from corpora.readers import Document, inside, joined, lines_of, passed_over
from corpora.tokenizers import load_tokenizer
from data import PackedDataset, check_file, lengths, read_meta

# of the documents that were read, and of the samples of a split: what happened to some of them
COUNTED = dict(
    empty='empty',
    nul='dropped (with a NUL)',
    duplicate='duplicate',
    known='also in the input',
    invalid_utf8='with invalid UTF-8, now U+FFFD',
    unknown_residues='unknown residues, now X',
    stops='stops inside, now X',
    nucleotides='of A, C, G, T, U and N alone',
    gaps='gaps, left out',
    names='with a name behind the SMILES, cut off',
    headers='header line(s), left out',
    trimmed='with white space at their ends, taken off',
    copies='file(s) with the texts of another, left out',
    nonfinite='dropped (NaN, inf, of another scale, or no molecule)',
    longer_than_max_tokens='dropped (too many tokens)',
)

# -----------------------------------------------------------------------------
# A look at a packed dataset

def verify(folder):
    """ Compares every file of a dataset with its digest in meta.json, and asks whether its shards
    hold what they may. ValueError names the first one that is wrong. """
    meta = read_meta(folder)
    files = dict(meta['files'])
    for split in meta['splits'].values():
        for shard in split['shards']:
            files |= shard['files']
    for name in progress_bar(files, desc='verifying', unit=' files'):
        check_file(folder, name, files)
    for split in meta['splits']:
        data = PackedDataset(folder, split)
        for i in range(data.n_shards):
            data.shard(i).check()
    print(f'{len(files)} files, each as meta.json says')


def counted(counts):
    """ ['3 empty', '2 duplicate'] of the counts of a source, or of a split. """
    said = [f'{counts[name]:,} {words}' for name, words in COUNTED.items() if counts.get(name)]
    return [*said, *filter(None, [passed_over(counts)])]


def line(name, *words):
    print(shown(f'{name:<20} {", ".join(words)}'))


def summary(folder):
    """ Prints what is in a dataset, as a reader finds it. """
    train = PackedDataset(folder, 'train')
    val = PackedDataset(folder, 'val')
    meta = train.meta

    # documents and samples
    line('dataset', folder)
    for name, counts in meta['counts'].items():
        line(f'read {name}', f'{counts["read"]:,} documents', f'{counts["kept"]:,} kept',
             *counted(counts))
    for split in ('train', 'val'):
        entry = meta['splits'][split]
        line(split, f'{entry["documents"]:,} documents', f'{entry["samples"]:,} samples',
             f'{entry["tokens"]:,} tokens',
             f'{entry["bytes"] / max(1, entry["tokens"]):.2f} bytes per token', *counted(entry))
    percents = (50, 95, 99, 99.5, 100)
    found = np.percentile(lengths(train), percents, method='lower')
    line('tokens per sample', *(f'{percent:g} %: {n}' for percent, n in zip(percents, found)),
         f'max_tokens={meta["max_tokens"]}')

    # latents
    if train.stats is not None:
        show_latents(train, val)
    tokenizer = load_tokenizer(folder)
    for i in range(min(3, len(val))):
        text = tokenizer.decode(val.ids(i))
        line(f'val {i}', repr(text)[:100])


def show_latents(train, val):
    """ Their shape, norm and statistics, and what may be wrong with them. """
    encoder = train.meta['encoder']
    z = val.raw_latents(np.arange(min(len(val), 4096)))
    norm = z.norm(dim=-1)
    line('latents', f'{train.latent_shape}', encoder['id'] if encoder else 'given',
         f'norm {norm.mean():.3f} +- {norm.std(correction=0):.3f}')

    is_live = train.live > 0
    mean = train.stats.mean[is_live]
    std = train.stats.std[is_live]
    line('per dimension', f'mean {mean.min():.3g} to {mean.max():.3g}',
         f'std {std.min():.3g} to {std.max():.3g}', f'{int((~is_live).sum())} dead dimensions')

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
# The earlier layout

def earlier_index(folder, split):
    return os.path.join(folder, f'{split}_data.json')


def read_latent(path):
    return as_latent(read_array(path, mmap=True, what='a latent'), path)


def read_earlier(source):
    """ The documents of a folder in the earlier layout. """
    folder = source.import_dir
    index = earlier_index(folder, source.split)

    for i, item in enumerate(read_json(index, list, limit=2**40)):
        if not isinstance(item, dict) or not isinstance(item.get('latent_path'), str):
            raise ValueError(f'{index}, item {i}: no latent_path, found {short(item)}')

        # the text: of its file, if there is one
        stem = os.path.splitext(os.path.basename(item['latent_path']))[0]
        usual_path = os.path.join('texts', source.split, f'{stem}.txt')
        text_path = inside(folder, item.get('text_path') or usual_path, index)
        if os.path.isfile(text_path):
            text = joined(lines_of(text_path, source), text_path)
        elif isinstance(item.get('text'), str):
            text = item['text']
        else:
            raise ValueError(f'{index}, item {i}: no "text", and no file {text_path}')

        # the latents are read when they are asked for
        path = inside(folder, item['latent_path'], index)
        if not os.path.isfile(path):
            raise ValueError(f'{path}: missing, {index} names it in item {i}')
        yield Document(text, partial(read_latent, path), place=path)


def export(folder, target):
    """ Writes a dataset in the earlier layout, with latents (N, D) float32. """
    if os.path.isdir(target) and os.listdir(target):
        raise ValueError(f'export_dir={target} is there already: name a new folder')
    verify(folder)
    tokenizer = load_tokenizer(folder)
    for split, name in (('train', 'train'), ('val', 'validation')):
        ds = PackedDataset(folder, split)
        if ds.stats is None:
            raise ValueError(f'{folder} has no latents: the earlier layout is for pairs')
        for kind in ('texts', 'latents'):
            os.makedirs(os.path.join(target, kind, name), exist_ok=True)

        # a file of the text and a file of the latents for each sample
        items = []
        for i in progress_bar(range(len(ds)), f'writing {name}', unit=' samples'):
            text = tokenizer.decode(ds.ids(i))
            text_path = f'texts/{name}/{i:08d}.txt'
            latent_path = f'latents/{name}/{i:08d}.npy'
            with open(os.path.join(target, text_path), 'w', encoding='utf-8', newline='') as f:
                f.write(text)
            np.save(os.path.join(target, latent_path), ds.raw_latents([i])[0].numpy())
            items.append(dict(id=i, text=text, text_path=text_path, latent_path=latent_path))

        # the list of them
        index = earlier_index(target, name)
        write_text(index, json.dumps(items, indent=1, ensure_ascii=False))
        print(f'{index}: {len(items):,} samples')
