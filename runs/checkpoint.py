"""
Checkpoints, as they are read. It runs no code from them and notices every broken byte.

    out/<run>/step-00001000/    model.safetensors, ema.safetensors, optimizer.safetensors,
                                rng.safetensors, training_state.json
    out/<run>/best              a text file that names a checkpoint

There is one form, whatever wrote it (saving.py): one process, DDP or FSDP2. The tensors are whole,
and any number of processes reads them.

training_state.json holds the size and the SHA-256 of the files beside it, and its own SHA-256, so a
checkpoint can be proven whole. Shapes are compared with the file's before a model takes memory.
"""
import re
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from configurator import seen_from
from model import Model, ModelConfig
from runs.files import check, one_line, read_sealed, regular, short, why
from runs.identity import check_same, of_dataset
from data import read_meta

# Names that are read from files must match this, so none leads out of the run folder.
STEP = re.compile(r'step-\d{8,12}', re.ASCII)
FILES = ('model.safetensors', 'ema.safetensors', 'optimizer.safetensors', 'rng.safetensors',
         'training_state.json')


def steps(out_dir):
    """ The checkpoint folders, newest first. """
    folders = [path for path in Path(out_dir).glob('step-*') if STEP.fullmatch(path.name)]
    return sorted(folders, key=lambda path: -int(path.name[5:]))


def best_of(out_dir):
    """ The text in `best`, its first 100 bytes, whatever it is; '' before the first evaluation. """
    path = Path(out_dir) / 'best'
    if not path.is_file():
        return ''
    with open(path, 'rb') as f:
        return f.read(100).decode(errors='replace').strip()


def read_state(folder):
    """ training_state.json of a checkpoint folder. ValueError where what all readers ask of it has
    another form. """
    path = Path(folder) / 'training_state.json'
    state = read_sealed(path)
    for name, kind in dict(step=int, identity=dict, knobs=dict, files=dict).items():
        if type(state.get(name)) is not kind:
            raise ValueError(f'{path}: {name} is {short(state.get(name))}, expected '
                             f'{"an object" if kind is dict else "a whole number"}')
    for name, entry in state['files'].items():
        is_known = name in FILES and isinstance(entry, dict)
        if not is_known or type(entry.get('bytes')) is not int or 'sha256' not in entry:
            raise ValueError(f'{path}: of its files, {short(name)} is {short(entry)}, expected '
                             f'one of {", ".join(FILES[:-1])}, with its bytes and sha256')
    return state


@contextmanager
def as_written(out_dir):
    """ Around code that reads the knobs of a run: of another form, they are one line. """
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f'{out_dir}: its knobs are not as this code writes them '
                         f'({type(error).__name__}: {one_line(error)})') from None


def verify(folder):
    """ The training state of a checkpoint that is whole to the bit. Else ValueError: the file, what
    was found, what was expected. """
    folder = Path(folder)
    state = read_state(folder)
    for name, entry in state['files'].items():
        check(folder / name, entry)
    if state['step'] != int(folder.name[5:]):
        raise ValueError(f'{folder}: training_state.json is of step {state["step"]}')
    return state


def read_tensors(path):
    """ {name: tensor} of a safetensors file, all of them finite. """
    try:
        tensors = load_file(regular(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f'cannot read {path}: {why(path, error)}') from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f'{path}: {name} holds nan or inf, which no training saves')
    return tensors


def check_tensors(path, found, expected):
    """ ValueError unless names, shapes and dtypes are as expected: kernels read bare memory. """
    def described(tensors):
        return {name: f'{str(tensor.dtype)[6:]} {tuple(tensor.shape)}'
                for name, tensor in tensors.items()}

    check_same(path, described(found), described(expected))


def find_checkpoint(out_dir, which='best'):
    """ The name of a checkpoint folder, as 'step-00001000'. which: 'best', 'latest' or that name.
    Before the first evaluation, and in an export, no best is named: then it is the latest. """
    best = best_of(out_dir)
    found = [path.name for path in steps(out_dir) if path.is_dir()]      # no link to nowhere
    if not found:
        raise ValueError(f'no run in {out_dir}{seen_from(out_dir)}: train it to its first '
                         'checkpoint, or name another --out_dir')
    name = {'latest': found[0], 'best': best or found[0]}.get(which, which)
    if name not in found:
        raise ValueError(f'{out_dir} has no checkpoint {short(name)}, only {found}: choose one '
                         'with --which=')
    return name


def config_of(identity, folder):
    """ The ModelConfig in the identity of a run, which is that of a checkpoint folder. """
    names = [field.name for field in fields(ModelConfig)]
    if not {*names, 'latent_target'} <= identity.keys():
        raise ValueError(f'{folder} was written by another version of this code: read it with that')
    try:
        return ModelConfig(**{name: identity[name] for name in names})
    except (TypeError, ValueError) as error:               # values of other types
        raise ValueError(f'{folder}: no network has its form ({one_line(error)})') from None


def load_model(out_dir, which='best', device='cpu'):
    """ (model, knobs, meta, the checkpoint's name) of a run, with its averaged weights, if it has
    any. which: as in find_checkpoint. If a training removes it meanwhile, the next is read. """
    folder = Path(out_dir) / find_checkpoint(out_dir, which)
    try:
        return *read_model(folder, device), folder.name
    except (ValueError, OSError):
        if folder.exists():
            raise
    return load_model(out_dir, which, device)


def read_model(folder, device):
    """ (model, knobs, meta) of a checkpoint folder. """
    out_dir = folder.parent
    state = read_state(folder)
    identity = state['identity']
    config = config_of(identity, folder)
    knobs = state['knobs']

    # data/ must be that of the training
    meta = read_meta(out_dir / 'data')
    of_data = of_dataset(meta)
    check_same(f'{out_dir}/data', of_data, {name: identity.get(name) for name in of_data},
               '; copy data/ from the dataset that the run was trained on')

    # first on the meta device, without memory: are the sizes those of the file? The tables of
    # positions are in no file
    kind = 'ema' if 'ema.safetensors' in state['files'] else 'model'
    path = folder / f'{kind}.safetensors'
    if path.name not in state['files']:
        raise ValueError(f'{folder}/training_state.json: {path.name} is not among its files')
    check(path, state['files'][path.name])
    weights = read_tensors(path)
    try:
        # n tensors cannot fill n + 1 blocks, and a sketch of a million would take hours
        drawn = replace(config, depth=min(config.depth, len(weights) + 1))
        with torch.device('meta'):
            sketch = Model(drawn)
        n_bytes = sum(weight.nbytes for weight in weights.values())
        if sum(table.nbytes for table in sketch.buffers()) > max(n_bytes, 2 ** 28):
            raise ValueError(f'seq_len={config.seq_len} needs more memory than the weights')
        sketch.load_state_dict(weights, assign=True)
    except Exception as error:
        words = ' '.join(str(error).split())[:300]
        raise ValueError(f'{path}: found another network than this code makes: {words}') from None
    model = Model(config)
    model.load_state_dict(weights)
    return model.to(device).eval(), knobs, meta
