"""
meta.json, the manifest of a dataset, and whether the files are as it says.

    meta = read_meta('data/captions')
    path = check_file('data/captions', 'tokenizer.json', meta['files'])

prepare.py writes meta.json last. So where it exists, the dataset is complete. It holds the size and
the SHA-256 of every file, and a digest of itself; what it says is then believed. Every mistake is a
ValueError of one line: file, found, expected, what to do.
"""
import hashlib
import os
import re
import sys

from configurator import on_command_line
from runs.files import read_sealed, sha256, short

FORMAT = 2                     # of meta.json; a reader refuses any other

# -----------------------------------------------------------------------------
# Checks

def how_to_mend(folder):
    """ What to do about a broken file in a dataset folder, or in a run's data/. """
    if os.path.isfile(os.path.join(folder, os.pardir, 'config.json')):
        return 'copy it from the dataset'
    return 'run prepare.py again, it redoes what is broken'


def check_file(folder, name, files, digest=True):
    """ The path of a file that agrees with its entry in `files`, {name: {bytes, sha256}}; else
    ValueError. digest=False: only its size is compared. """
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise ValueError(f'{path}: missing; {how_to_mend(folder)}')
    found, expected = os.path.getsize(path), files[name]['bytes']
    if found != expected:
        raise ValueError(f'{path}: found {found} bytes, expected {expected}; '
                         f'{how_to_mend(folder)}')
    if digest and sha256(path) != files[name]['sha256']:
        raise ValueError(f'{path}: its sha256 is not the one in meta.json; {how_to_mend(folder)}')
    return path

# -----------------------------------------------------------------------------
# Reading

def dataset_folder(name):
    """ A folder under data/ by name, or a path as it is. """
    return name if os.path.sep in name else os.path.join('data', name)


def how_to_prepare(folder):
    """ The command that makes a missing dataset: prepare.py with the configs of this command line,
    unless a flag names the dataset. """
    configs = ' '.join(arg for arg in sys.argv[1:] if arg.endswith('.py'))
    if configs and not on_command_line('dataset'):
        return f"`python prepare.py {configs}` (the config's first lines name the input)"
    return f'`python prepare.py --input=... --out={folder}`, or name another dataset'


def read_meta(folder):
    """ meta.json of a dataset folder. """
    path = os.path.join(folder, 'meta.json')
    if not os.path.isfile(path):
        raise ValueError(f'no dataset in {folder} (no meta.json): make it with '
                         f'{how_to_prepare(folder)}')
    try:
        meta = read_sealed(path)
        if meta['format'] != FORMAT:
            raise ValueError(f'{path}: format {meta["format"]!r}, this code reads {FORMAT}')
        check_names(meta, path)
    except ValueError as error:
        raise ValueError(f'{error}; {how_to_mend(folder)}') from None
    return meta


def check_names(meta, path):
    """ ValueError where a name leads out of the folder: files are written by these names too. """
    shards = [shard for split in meta['splits'].values() for shard in split['shards']]
    names = [*meta['files'], *(shard['name'] for shard in shards)]
    names += [name for shard in shards for name in shard['files']]
    for name in names:
        if not re.fullmatch(r'[\w-]+(\.\w+)*', name, re.ASCII):
            raise ValueError(f'{path}: {short(name)} is no name of a file of a dataset')


def is_of_a_folder(encoder):
    """ Whether an encoder's record is of a model in a folder, which no hub has. """
    revision = str(encoder.get('revision'))
    return encoder.get('id') != 'lsa' and revision.startswith('sha256:')


def encoder_identity(encoder):
    """ An encoder's record, or None, without the path to its folder: the digest says what is in
    it. """
    if encoder is None or not is_of_a_folder(encoder):
        return encoder
    return {**encoder, 'id': os.path.basename(os.path.normpath(encoder['id']))}


def dataset_identity(meta, has_statistics=False):
    """ What two datasets must share, so that a model of one can read the other. The bag is where a
    training begins, and nothing depends on it later. has_statistics: whoever reads the dataset has
    those of the latents, and these may differ, as they do in the last bits where another machine
    has embedded the texts; if no encoder is known, they say which latents these are. """
    unread = {'bag.npy'}
    if has_statistics and meta['encoder']:
        unread.add('latent_stats.npz')
    digests = {name: entry['sha256'] for name, entry in meta['files'].items()
               if name not in unread}
    encoder = encoder_identity(meta['encoder'])
    return dict(tokenizer=meta['tokenizer'], encoder=encoder, files=digests)


def split_digests(meta):
    """ Two datasets share this only if they hold the same samples: for each split the number of
    samples, and one SHA-256 over the digests of its files in meta.json. """
    found = {}
    for split, entry in meta['splits'].items():
        digest = hashlib.sha256()
        for shard in entry['shards']:
            for name, file in sorted(shard['files'].items()):
                digest.update(f'{name} {file["sha256"]}\n'.encode())
        found[f'samples of {split}'] = entry['samples']
        found[f'sha256 of {split}'] = digest.hexdigest()
    return found
