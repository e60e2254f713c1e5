""" A look at a packed dataset: are its files whole, what is in it, and the way back into a file a sample.

prepare.py --inspect=FOLDER and --export_dir=FOLDER come here, and every prepare.py ends here.
"""
import itertools
import json
import os

import numpy as np
from tqdm import tqdm

from data import COUNT, PackedDataset, check_file, read_meta
from files import check_fields
from sources import DROPS, earlier_index

SUMMED = {key: COUNT for key in ('documents', 'tokens', 'bytes', 'truncated')}   # of a split, beside what every reader needs


def verify(folder):
    """ Every file of a dataset against its digest in meta.json; ValueError names the first that differs. """
    meta = read_meta(folder)
    manifest = dict(meta['files'])
    for split in meta['splits'].values():
        for entry in split['shards']:
            manifest |= entry['files']
    with tqdm(total=sum(entry['bytes'] for entry in manifest.values()), desc='verifying', unit='B', unit_scale=True, disable=None) as bar:
        for file, entry in manifest.items():
            check_file(folder, file, manifest)
            bar.update(entry['bytes'])
    print(f'{len(manifest)} files, {sum(entry["bytes"] for entry in manifest.values()) / 1e6:,.1f} MB, each as meta.json says')


def dropped(counts):
    """ '3 empty, 2 duplicate' of a source's counts. """
    return ', '.join(f'{counts[reason]:,} {reason}' for reason in DROPS if counts.get(reason))


def sample_hashes(ds):
    """ A hash per sample of a split, of its tokens, (n,). """
    found = []
    for shard in ds.shards:
        tokens, edges = shard.tokens.tobytes(), (shard.offsets * shard.tokens.itemsize).tolist()
        found += [hash(tokens[a:b]) for a, b in itertools.pairwise(edges)]
    return np.array(found, np.int64)


def covering(lengths, of_1000=999):
    """ The max_tokens that so many of 1,000 texts keep to, of sorted numbers of tokens; with an EOS it is a multiple of 8. """
    needed = lengths[-(-of_1000 * len(lengths) // 1000) - 1]
    return int(-(-(max(needed, 8) + 1) // 8) * 8 - 1)


def summary(folder):
    """ What is in a dataset, as a reader finds it. """
    def line(name, text):
        print(f'{name:<20} {text}')
    train, val = PackedDataset(folder, 'train'), PackedDataset(folder, 'val')
    meta = train.meta
    check_fields(meta, {'counts': {}, 'splits': {'*': SUMMED}}, os.path.join(folder, 'meta.json'))
    print()
    line('dataset', folder)
    for name, count in meta['counts'].items():
        words = [f'{count["read"]:,} documents', f'{count["kept"]:,} kept', *filter(None, [dropped(count)])]
        words += [f'{count[key]:,} {word}' for key, word in (('invalid_utf8', 'with invalid UTF-8, now U+FFFD'),
                                                             ('unknown_residues', 'unknown residues, now X')) if count.get(key)]
        line(f'read {name}', ', '.join(words))
    for ds in (train, val):
        m = meta['splits'][ds.split]
        lost = [f'{m[key]:,} dropped ({word})' for key, word in (('nonfinite', 'NaN or inf'), ('longer_than_max_tokens', 'too many tokens'))
                if m.get(key)]
        line(ds.split, ', '.join([f'{m["documents"]:,} documents, {m["samples"]:,} samples, {m["tokens"]:,} tokens, '
                                  f'{m["bytes"] / max(1, m["tokens"]):.2f} bytes per token', *lost]))
    lengths = np.sort(np.concatenate([np.diff(s.offsets) for s in train.shards]))
    line('tokens per sample', ', '.join(f'{q:g} %: {lengths[int(q / 100 * (len(lengths) - 1))]}' for q in (50, 95, 99, 99.5, 100)))
    padding, enough = 1 - (lengths.mean() + 1) / (meta['max_tokens'] + 1), covering(lengths)
    if padding > .5 and enough < meta['max_tokens']:
        line('warning', f'{padding:.0%} of a batch would be PAD: {meta["max_tokens"] + 1} tokens a row, where the mean text has '
                        f'{lengths.mean():.0f} and 99.9 % fit into --max_tokens={enough}; or train with a lower --seq_len')
    line('vocabulary', f'{train.tokenizer.vocab_size} ids, {train.tokenizer.kind}')
    t, v = sample_hashes(train), sample_hashes(val)
    line('duplicates', f'{len(t) - len(np.unique(t)):,} in train, {len(v) - len(np.unique(v)):,} in val, '
                       f'{np.isin(v, t).sum():,} of val in train')
    if train.stats is not None:
        z, live = val.raw_latents(np.arange(min(len(val), 4096))), train.live > 0
        norm = z.norm(dim=-1)
        line('latents', f'{train.latent_shape}, {meta["encoder"]["id"] if meta["encoder"] else "given"}, '
                        f'norm {norm.mean():.3f} +- {norm.std(correction=0):.3f}')
        if live.any():
            mean, std = train.mean[live], train.std[live]
            line('per dimension', f'mean {mean.min():.3g} to {mean.max():.3g}, std {std.min():.3g} to {std.max():.3g}, '
                                  f'{int((~live).sum())} dead dimensions')
        else:
            line('warning', 'no dimension of the latents varies: nothing can be learned from them')
        truncated = sum(split['truncated'] for split in meta['splits'].values())
        if truncated and meta['encoder']:
            line('warning', f'{truncated:,} samples are longer than the encoder reads ({meta["encoder"]["max_length"]} of its tokens); '
                            'lower --max_tokens')
    for i in range(min(3, len(val))):
        line(f'val {i}', repr(val.text(i))[:100])


def export(folder, target):
    """ A dataset in the earlier layout: texts/<split>/*.txt, latents/<split>/*.npy (N, D) float32, and <split>_data.json. """
    if os.path.exists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise ValueError(f'export_dir={target} is not an empty folder: name another')
    for split, name in (('train', 'train'), ('val', 'validation')):
        ds = PackedDataset(folder, split)
        if ds.stats is None:
            raise ValueError(f'{folder} has no latents: the earlier layout is for pairs')
        for kind in ('texts', 'latents'):
            os.makedirs(os.path.join(target, kind, name), exist_ok=True)
        items = []
        for i in tqdm(range(len(ds)), f'writing {name}', unit=' samples', disable=None):
            text, text_path, latent_path = ds.text(i), f'texts/{name}/{i:08d}.txt', f'latents/{name}/{i:08d}.npy'
            with open(os.path.join(target, text_path), 'w', encoding='utf-8', newline='') as f:
                f.write(text)
            np.save(os.path.join(target, latent_path), ds.raw_latents([i])[0].numpy())
            items.append(dict(id=i, text=text, text_path=text_path, latent_path=latent_path))
        with open(earlier_index(target, name), 'w', encoding='utf-8') as f:
            json.dump(items, f, indent=1, ensure_ascii=False)
        print(f'{earlier_index(target, name)}: {len(items):,} samples')
