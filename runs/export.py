"""
A run as a folder that can be given away. It is a run folder with one checkpoint, which holds the
averaged weights alone, and it opens like any other: sample.py, evaluate.py, sample.Run, and
init_from of a training. No code is in it and none is run by opening it. Of folders of this machine
it has the last name alone.

    python -m runs.export --out_dir=out/quickstart --to=quickstart-export --license=mit
    python sample.py --out_dir=quickstart-export --text="Return a list."

    quickstart-export/    README.md                 the model card: data, commit, figures, controls
                          config.json               the knobs of the training
                          data/                     tokenizer, statistics of the latents, the
                                                    encoder lsa; the record of another encoder
                          step-N/model.safetensors  the averaged weights
                          results.json              what evaluate.py measured, if it did
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
if __name__ == '__main__':
    import base.begin                                      # before torch

import glob
import json
from pathlib import Path

import torch

from base.console import stop_on_error
from base.files import read_json, short
from base.writing import clear, sealed, write_folder, write_text
from configurator import configure
from data import read_meta
from encoders import CODE, TABLE
from runs import checkpoint
from runs.results import figure_text, find, read_results, write_results
from runs.run_folder import copy_data

out_dir = 'out/quickstart'     # <a run folder>: what is exported
which = 'best'                 # best | latest | <a step, as step-00001000>
to = ''                        # <a folder>: it must not exist yet
weights_dtype = 'float32'      # float32 | float16: how the weights are stored
license = ''                   # '' | <a name that the hub knows, as mit or apache-2.0>
data = ''                      # '' | <a text>: what it was trained on, and its licence, for a card
hardware = ''                  # '' | <a text>: what it was trained on, for the card


CARD = """---
library_name: nanoldlm
tags: [text-diffusion, masked-diffusion]{license_of_hub}
---
# {title}

A network of nanoLDLM, for texts and latents. Its mode says what it has learned.
Loading it runs no code of this folder.

| | |
|---|---|
{facts}

```python
from sample import Run
run = Run('{title}')
```

{encoder}

{figures}
"""


def export(out_dir, folder, which='best', license='', hardware='', dtype='float32',
           data=''):
    """ Writes the run's checkpoint `which` to `folder`, which appears whole or not at all.
    ValueError where the folder exists, something of the run is missing or broken, or a weight is
    too large for `dtype`. """
    out_dir, folder = Path(out_dir), Path(folder)

    # nothing is overwritten: an earlier export may have been given away
    if os.path.lexists(folder):
        raise ValueError(f'{folder} exists: choose another folder')

    # the run. The knobs are those of its weights: config.json may be of a later attempt
    name = checkpoint.find_checkpoint(out_dir, which)
    state = checkpoint.verify(out_dir / name)
    config = read_json(out_dir / 'config.json') | state['knobs']
    if not isinstance(config.get('versions'), dict):
        raise ValueError(f'{out_dir}/config.json: found versions {short(config.get("versions"))}, '
                         'expected those of python, torch and numpy, as train.py writes them')

    # what is written: no folder of this machine, and not the command line
    weights = weights_of(out_dir / name, state['files'], dtype)
    kept = without_folders({key: state[key] for key in ('step', 'identity', 'knobs')})
    meta = read_meta(out_dir / 'data')
    if meta['encoder']:
        meta['encoder']['id'] = public_id(meta['encoder'])
    meta = without_folders(meta)
    config.pop('argv', None)
    config = without_folders(config)
    results = results_of(out_dir / 'results.json', name)
    text = card(folder.name, config, meta, state['step'], license, hardware, data, dtype, results)

    # the folder, after what an export that was killed has left of it
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear(folder.parent, glob.escape(folder.name[:100]))
    with write_folder(folder) as tmp:
        checkpoint.write_files(tmp / name, {'model': weights}, kept)
        copy_data(out_dir / 'data', tmp)
        write_text(tmp / 'data/meta.json', sealed(meta))
        write_text(tmp / 'config.json', json.dumps(config, indent=1))
        if results:
            write_results(tmp / 'results.json', results)
        write_text(tmp / 'README.md', text)


def weights_of(folder, files, dtype):
    """ {name: tensor}: the weights of a checkpoint that sampling reads, in a dtype. """
    weights = checkpoint.read_tensors(folder / checkpoint.weights_file(files))
    for key, weight in weights.items():
        # float16 ends at 65,504: a larger weight becomes inf, and is found below
        if weight.is_floating_point():
            weights[key] = weight.to(getattr(torch, dtype))
        if not weights[key].isfinite().all():
            raise ValueError(f'{folder}: {key} is too large for {dtype}: --weights_dtype=float32')
    return weights


def public_id(encoder):
    """ The id of an encoder's record as others know it. Of a copy of a hub's model in a folder it
    is the hub's, and of another model in a folder the last name of the folder. """
    for row in TABLE.values():
        # the revision says which model it is, wherever it lay
        if row.get('revision') == encoder['revision']:
            return row['id']
    if is_of_a_folder(encoder):
        return os.path.basename(os.path.normpath(encoder['id']))
    return encoder['id']


def is_of_a_folder(encoder):
    """ Whether an encoder's record is of a model in a folder, which no hub has. """
    return encoder['id'] != 'lsa' and encoder['revision'].startswith('sha256:')


def without_folders(value):
    """ A value of JSON in which an absolute path is its last name alone: the folders above it are
    of this machine. """
    if isinstance(value, dict):
        return {key: without_folders(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(part) for part in value]
    if isinstance(value, str) and os.path.isabs(value):
        return os.path.basename(os.path.normpath(value))
    return value


def results_of(path, checkpoint_name):
    """ The records of results.json that are of this checkpoint; [] where there is no file. """
    records = read_results(path) if path.is_file() else []
    return [without_folders(record) for record in records
            if record['checkpoint'] == checkpoint_name]


def card(title, config, meta, step, license, hardware, data, dtype, results):
    """ The text of the model card: Markdown with the header that the hub reads. """
    # the first table of the card, in this order
    facts = {
        'mode': config['mode'],
        'data': f'{meta["splits"]["train"]["samples"]:,} samples',
        'encoder of the latents': (meta['encoder'] or {}).get('id', 'none'),
        'steps': f'{step:,}',
        'weights': f'stored in {dtype}; the figures below are of float32 weights',
        'hardware': hardware or 'not recorded',
        'code': f'nanoLDLM, commit {config.get("commit") or "not recorded"}',
        'versions': ', '.join(f'{name} {version}' for name, version in config['versions'].items()),
        'license of the weights': license or 'not stated',
        'license of the code': 'MIT',
    }
    if data:
        facts['data'] += f': {data}'

    # the figures are of float32 weights, so of these there is nothing to say
    if dtype == 'float32':
        del facts['weights']
    license_of_hub = ''
    if license:
        license_of_hub = f'\nlicense: {license}'
    return CARD.format(
        title=title,
        license_of_hub=license_of_hub,
        facts='\n'.join(f'| {name} | {value} |' for name, value in facts.items()),
        encoder=what_to_supply(config, meta, title),
        figures=table_of(results))


def what_to_supply(config, meta, title):
    """ For the card: what a reader needs to embed texts as the training data were. """
    encoder = meta['encoder']
    if meta['latent_shape'] is None or 'latent' not in config['streams']:
        return 'It reads no embeddings, so it needs nothing besides this folder.'
    size = meta['source'].get('image_size')
    if size:
        return (f'Its latents are pictures of {size} x {size} pixels, so it needs nothing besides '
                'this folder. How they are\ndrawn, named and completed, and what the figures stand '
                'beside, is in docs/images.md of the code.')
    if encoder is None:
        return 'Its encoder is not known: it cannot embed a text. Give it `run.write(latents=z)`.'
    name, revision = encoder['id'], encoder['revision']

    # encoders for which a reader needs no weights of another
    if name == 'lsa':
        return 'Its encoder, `lsa`, is in `data/`.'
    if name == 'morgan':
        return "Its encoder, `morgan`, is RDKit's: `pip install rdkit`."
    if name in CODE:
        return f'Its encoder, `{name}`, is part of the code.'
    if is_of_a_folder(encoder):
        # all others are models: to be had from the author alone, or from the hub
        return (f'**You supply the encoder**, `{name}`: it was in a folder, and is on no hub.\n'
                'Ask the author for it, and open the run with\n'
                f"`Run('{title}', encoder='FOLDER')`. The digest of its files is checked:\n"
                f'`{revision}`. Without it, give latents as arrays: `run.write(latents=z)`.')
    return (f'**You supply the encoder**: `{name}` of the hub embeds the texts, in\n'
            f'revision `{revision}`. It is downloaded with the first text.')


def table_of(results):
    """ For the card: what was measured with a control; at times nothing was. """
    rows = []
    for task, metric in dict.fromkeys((record['task'], record['metric']) for record in results):
        found = [find(results, task, metric, control) for control in ('', 'shuffled', 'null')]

        # a figure without a control says little
        if any(found[1:]):
            cells = [figure_text(record['value'], record['se']) if record else ''
                     for record in found]
            n = next(record['n'] for record in found if record)
            rows.append(f'| {task}/{metric} | {" | ".join(cells)} | {n} |')
    if not rows:
        return 'Nothing was measured with a control on this checkpoint (`evaluate.py`).'
    return '\n'.join(["| of the validation split | | another text's latent | no latent | texts |",
                      '|---|--:|--:|--:|--:|', *rows, '',
                      '± is the standard error over texts. f1 is of the sets of words.'])


if __name__ == '__main__':
    configure(globals())
    with stop_on_error():
        if not to:
            raise ValueError('to= names no folder: --to=FOLDER')
        export(out_dir, to, which, license, hardware, weights_dtype, data)
        print(f'{out_dir} exported to {to}')
