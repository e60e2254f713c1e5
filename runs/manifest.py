"""
meta.json, the manifest of a dataset: what it must hold, and whether the files are as it says.

    meta = read_meta('data/captions')                        # every field checked
    path = check_file('data/captions', 'tokenizer.json', meta['files'])

prepare.py writes meta.json last. So where it exists, the dataset is complete. It lists every file
with its size and SHA-256. Every mistake is a ValueError of one line: file, found, expected, what to
do.
"""
import hashlib
import os
import re

from configurator import run_config
from runs.files import MAX_HEADER, check_fields, read_json, sha256
from runs.rules import short

FORMAT = 1                     # of meta.json; a reader refuses any other
MAX_META = 2**26               # bytes of a meta.json, which lists every shard, or a tokenizer.json

# ---- the form of meta.json, in the rules of rules.py; a field with '?' may be missing
COUNT = 'int [0, 2**50]'
LATENT_SHAPE = (None, ['int [1, 2**24]'])

FILES = {'*': {'bytes': COUNT, 'sha256': '<a digest>'}}

TOKENIZER = {
    'kind': '<a name>',
    'vocab_size': 'int [2, 2**32]',
    'eos': 'int [0, 2**32]',
    'pad': 'int [0, 2**32]',
}

ENCODER = {
    'id': '<a name>',
    'revision?': 'None | <a commit or a digest>',
    'pooling?': '<a name>',
    'prefix?': "'' | <a text>",
    'normalize?': 'bool',
    'dimension?': 'int [1, 2**24]',
    'max_length?': 'None | int [1, 2**62]',
    'dtype?': '<a name>',
    'language?': 'None | <a code>',
}

# counts of a shard or a split that only the summary of prepare.py reads
SUMMARY_COUNTS = {
    'documents?': COUNT,
    'bytes?': COUNT,
    'nonfinite?': COUNT,
    'longer_than_max_tokens?': COUNT,
    'truncated?': COUNT,
}

SHARD = {
    'name': '<a name>',
    'samples': COUNT,
    'tokens': COUNT,
    'longest?': COUNT,
    'latent_shape?': LATENT_SHAPE,
    'key?': '<a digest>',
    'files': FILES,
    **SUMMARY_COUNTS,
}

META = {
    'format': '1',
    'name?': "'' | <a name>",
    'tokenizer': TOKENIZER,
    'encoder': (None, ENCODER),
    'latent_shape': LATENT_SHAPE,
    'token_dtype': 'uint16 | uint32',
    'max_tokens': 'int [1, 65535]',
    'splits': {'*': {'samples': COUNT, 'tokens?': COUNT, 'shards': [SHARD], **SUMMARY_COUNTS}},
    'files': FILES,
    'source?': {'image_size?': 'int [0, 4096]', 'patch?': 'int [1, 4096]', 'channels?': '1 | 3'},
    'counts?': {'*': {'read': COUNT, 'kept': COUNT, '*': COUNT}},
}

# -----------------------------------------------------------------------------
# Checks

def how_to_mend(folder):
    """ What to do about a broken file in a dataset folder, or in a run's data/. """
    is_of_a_run = os.path.isfile(os.path.join(folder, os.pardir, 'config.json'))
    if is_of_a_run:
        return 'copy it from the dataset'
    return 'run prepare.py again, it redoes what is broken'


def check_file(folder, name, files, digest=True):
    """ The path of a file that agrees with its entry in `files`, {name: {bytes, sha256}}; else
    ValueError. digest=False: only its size is compared. """
    path = os.path.join(folder, name)
    if name not in files:
        raise ValueError(f'{folder}/meta.json does not list {name}; run prepare.py again')
    expected = files[name]['bytes']
    if not os.path.isfile(path):
        raise ValueError(f'{path}: missing, expected {expected} bytes; {how_to_mend(folder)}')
    found = os.path.getsize(path)
    if found != expected:
        raise ValueError(f'{path}: found {found} bytes, expected {expected}; '
                         f'{how_to_mend(folder)}')
    if digest and sha256(path) != files[name]['sha256']:
        raise ValueError(f'{path}: its sha256 is not the one in meta.json; {how_to_mend(folder)}')
    return path


def check_shard(shard, split, has_latents, path):
    """ ValueError unless a shard's name is one of its split, and its files have that name too. """
    name = shard['name']
    if not re.fullmatch(rf'{split}-\d{{5,9}}', name, re.ASCII):
        raise ValueError(f'{path}: shard name {short(name)}, expected {split}-00000 or the like')

    endings = ['tokens.bin', 'offsets.npy', 'latents.npy', 'ids.npy']
    legal = [f'{name}.{ending}' for ending in endings]
    needed = legal[:3] if has_latents else legal[:2]
    for file in shard['files']:
        if file not in legal:
            raise ValueError(f'{path}: {name} has a file {short(file)}, '
                             f'expected {", ".join(legal)}')
    for file in needed:
        if file not in shard['files']:
            raise ValueError(f'{path}: {name} lists no {file}, expected one')


def has_fitting_sizes(shard, itemsize):
    """ Whether the files of a shard have the sizes that its counts of samples and tokens need. """
    name = shard['name']
    n = shard['samples']
    files = shard['files']
    N, D = shard.get('latent_shape') or (0, 0)
    if files[f'{name}.tokens.bin']['bytes'] != itemsize * shard['tokens']:
        return False

    # an array has a header before its numbers
    n_bytes = {'offsets.npy': 8 * (n + 1), 'ids.npy': 16 * n, 'latents.npy': 2 * n * N * D}
    for ending, needed in n_bytes.items():
        file = files.get(f'{name}.{ending}')
        if file and not 0 < file['bytes'] - needed <= MAX_HEADER:
            return False
    return True


def check_meta(meta, path):
    """ ValueError unless the fields of meta.json agree with each other and it lists every file that
    they need. """
    def refuse(what, expected):
        raise ValueError(f'{path}: {what}, expected {expected}')

    # latents, and the images that they are patches of
    latent_shape = meta['latent_shape']
    has_latents = latent_shape is not None
    if has_latents and len(latent_shape) != 2:
        refuse(f'latent_shape is {short(latent_shape)}', 'two numbers')
    source = meta.get('source', {})
    if size := source.get('image_size'):
        patch = source.get('patch')
        channels = source.get('channels')
        has_both = patch and channels
        if not has_both or latent_shape != [(size // patch) ** 2, patch * patch * channels]:
            refuse(f'image_size={size}, patch={patch}, channels={channels}',
                   f'those of latent_shape {latent_shape}')

    # files beside the shards
    is_needed = {
        'tokenizer.json': meta['tokenizer']['kind'] == 'bpe',
        'latent_stats.npz': has_latents,
        'encoder.npz': False,
        'bag.npy': False,
    }
    for name in meta['files']:
        if name not in is_needed:
            refuse(f'files has {short(name)}', ', '.join(is_needed))
    for name in is_needed:
        if is_needed[name] and name not in meta['files']:
            refuse(f'files has no {name}', 'one')

    # shards: each of its split, once, and together as many samples and tokens as the split says
    for split, entry in meta['splits'].items():
        if split not in ('train', 'val'):
            refuse(f'a split {short(split)}', 'train or val')
        seen = set()
        for shard in entry['shards']:
            check_shard(shard, split, has_latents, path)
            shard_has_latents = shard.get('latent_shape', latent_shape) is not None
            if shard['samples'] and shard_has_latents != has_latents:
                refuse(f'{shard["name"]} has latent_shape {short(shard["latent_shape"])}',
                       latent_shape)
            if shard['name'] in seen:
                refuse(f'{shard["name"]} is there twice', 'once')
            seen.add(shard['name'])
        for key in ('samples', 'tokens'):
            found = sum(shard[key] for shard in entry['shards'])
            if entry.get(key, found) != found:
                refuse(f'the shards of {split} hold {found} {key}', entry[key])

# -----------------------------------------------------------------------------
# Reading

def dataset_folder(name):
    """ A folder under data/ by name, or a path as it is. """
    return name if os.path.sep in name else os.path.join('data', name)


def how_to_prepare(folder, configs=()):
    """ The command that makes a missing dataset in this very folder: prepare.py with the configs of
    the command line, or with config/<its name>.py, if their `out` is the folder; else with --input.
    """
    name = os.path.basename(os.path.normpath(folder))
    own = os.path.join('config', f'{name}.py')
    for paths in (configs, [own] if os.path.exists(own) else []):
        out = None
        for path in paths:
            for knob, value, _ in run_config(path):
                if knob == 'out':
                    out = str(value)
        if out is not None and os.path.abspath(out) == os.path.abspath(folder):
            return (f"make it with `python prepare.py {' '.join(paths)}` "
                    "(the config's first lines name the input)")
    return f'make it with `python prepare.py --input=... --out={folder}`, or name another dataset'


def read_meta(folder):
    """ meta.json of a dataset folder, checked. """
    path = os.path.join(folder, 'meta.json')
    if not os.path.isfile(path):
        raise ValueError(f'no dataset in {folder} (no meta.json): {how_to_prepare(folder)}')
    meta = read_json(path, limit=MAX_META)
    if meta.get('format') != FORMAT:
        raise ValueError(f'{path}: format {meta.get("format")!r}, this code reads {FORMAT}; '
                         'run prepare.py again')
    try:
        check_fields(meta, META, path)
        check_meta(meta, path)
    except ValueError as error:
        raise ValueError(f'{error}; {how_to_mend(folder)}') from None
    return meta


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


def dataset_identity(meta):
    """ What two datasets must share, so that a model of one can read the other. The bag is where a
    training begins, and nothing depends on it later. """
    digests = {name: entry['sha256'] for name, entry in meta['files'].items() if name != 'bag.npy'}
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
