"""
Whether two runs, models or datasets are the same. An identity: a dict of values that must be equal.

    identity_of(model_config, knobs, meta)     of a run: it goes on only as what it was
    of_dataset(meta)                           of a dataset, a part of it
    check_same(where, found, expected)         ValueError: the name, and both values

init_from needs less than a resume: without OF_TRAINING, one run may begin with another's weights.
A dataset is of a run, as evaluate.py asks, if it is the same without SAMPLES.
"""
import hashlib
import json
from dataclasses import asdict

PROCESS = ['text_process', 'text_schedule', 'latent_schedule', 'latent_target']
SAMPLES = {'samples of train', 'samples of val', 'sha256 of train', 'sha256 of val'}
STATISTICS = 'sha256 of latent_stats.npz'
OF_TRAINING = {'dropout', 'optimizer'} | SAMPLES


def as_json(value):
    """ As JSON gives it back: a tuple is a list. """
    return json.loads(json.dumps(value))


def identity_of(model_config, knobs, meta):
    """ What a run must share with the one that it goes on as. """
    # a text process has the knobs that begin with its name: gidd_gamma, hdlm_xi
    prefix = knobs['text_process'] + '_'
    own = [name for name in knobs if name.startswith(prefix)]
    found = {name: knobs[name] for name in [*PROCESS, *own, 'optimizer']}
    found.update(asdict(model_config))
    found.update(of_dataset(meta))
    return as_json(found)


def of_dataset(meta, but=()):
    """ Tokenizer, encoder, files and samples of a dataset. The id of an encoder says where it lay,
    its revision which it is. bag.npy begins a training. but: endings of samples' files to pass. """
    found = {f'tokenizer {key}': value for key, value in meta['tokenizer'].items()}
    for key, value in (meta['encoder'] or {}).items():
        if key != 'id':
            found[f'encoder {key}'] = value
    for name, entry in meta['files'].items():
        if name != 'bag.npy':
            found[f'sha256 of {name}'] = entry['sha256']

    # of each split one digest, over those of its files
    for split, entry in meta['splits'].items():
        digest = hashlib.sha256()
        for shard in entry['shards']:
            for name, file in sorted(shard['files'].items()):
                if not name.endswith(but):
                    digest.update(f'{name} {file["sha256"]}\n'.encode())
        found[f'samples of {split}'] = entry['samples']
        found[f'sha256 of {split}'] = digest.hexdigest()
    return found


def differences(old, new, but=()):
    """ {name: (old value, new value)} where two dicts are not equal. """
    found = {}
    for name in {**old, **new}:
        a, b = old.get(name), new.get(name)
        if a != b and name not in but:
            found[name] = a, b
    return found


def check_same(where, found, expected, advice='', but=()):
    """ ValueError with the first difference, but of the names `but`. """
    for name, (a, b) in differences(found, expected, but).items():
        raise ValueError(f'{where}: {name} is {a!r}, expected {b!r}{advice}')
