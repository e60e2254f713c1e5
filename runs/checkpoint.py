"""
Checkpoints. A kill at any moment costs at most the checkpoint that is being written. Reading one
runs no code from it and notices every broken byte.

    out/<run>/step-00001000/    model.safetensors, ema.safetensors, optimizer.safetensors,
                                rng.safetensors, training_state.json
    out/<run>/best              a text file that names a checkpoint

There is one form, whatever wrote it: one process, DDP or FSDP2. The tensors are whole, and any
number of processes reads them.

Writing: all files go into step-N.tmp, are synced to the disk, and one rename makes it step-N. Only
then are old checkpoints removed.

Reading: training_state.json holds the size and the SHA-256 of the files beside it, and its own
SHA-256, so a checkpoint can be proven whole. All shapes are compared with the file's before memory
is taken for a model.
"""
import os
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model import Model, ModelConfig
from runs.console import warn
from runs.files import check, one_line, read_sealed, short
from runs.identity import check_same, of_dataset
from runs.manifest import read_meta
from runs.writing import entry_of, fsync, sealed, write_text

# Names that are read from files must match this, so none leads out of the run folder.
STEP = re.compile(r'step-\d{8,12}', re.ASCII)

# torch and safetensors raise errors of their own for a full disk
DISK_ERRORS = (OSError, RuntimeError, SafetensorError)


def steps(out_dir):
    """ The checkpoint folders, newest first. """
    folders = [path for path in Path(out_dir).glob('step-*') if STEP.fullmatch(path.name)]
    return sorted(folders, key=lambda path: -int(path.name[5:]))


def best_of(out_dir):
    """ The text in `best`, its first 100 bytes, whatever it is; '' before the first evaluation. """
    path = Path(out_dir) / 'best'
    return path.read_text(errors='replace')[:100].strip() if path.is_file() else ''


# ---- is it whole?

def verify(folder):
    """ The training state of a checkpoint that is whole to the bit. Else ValueError: the file, what
    was found, what was expected. """
    folder = Path(folder)
    state = read_sealed(folder / 'training_state.json')
    for name, entry in state['files'].items():
        check(folder / name, entry)
    if state['step'] != int(folder.name[5:]):
        raise ValueError(f'{folder}: training_state.json is of step {state["step"]}')
    return state


def newest(out_dir):
    """ The folder of the newest whole checkpoint; None where the run has none yet. Only rank 0
    calls this. Broken ones are reported and set aside. ValueError when nothing else is left. """
    out_dir = Path(out_dir)
    for folder in steps(out_dir):
        try:
            verify(folder)
        except ValueError as error:
            warn(f'{folder.name} is broken and set aside: {error}')
            # no function here reads it; it is kept for whoever wants to look at it
            broken = folder.with_name(folder.name + '.broken')
            shutil.rmtree(broken, ignore_errors=True)
            os.rename(folder, broken)
        else:
            return folder
    if list(out_dir.glob('step-*.broken')):
        raise ValueError(f'{out_dir} has no whole checkpoint left: to start afresh, '
                         'choose another out_dir or empty it')


# ---- writing

def save(out_dir, step, tensors, training_state, keep=2, best=False):
    """
    Writes out_dir/step-N whole or not at all, names it in `best` if it is, then removes the
    checkpoints that are no longer kept. Only rank 0 calls this. Returns the folder.
    tensors: {kind: {name: tensor}}, whole tensors, a file for each kind: model, ema, optimizer,
    rng. training_state: plain values that JSON has.
    OSError where it cannot be written, ValueError where a tensor is not finite. Then nothing of it
    is left, and the checkpoints before it are untouched.
    """
    folder = Path(out_dir) / f'step-{step:08d}'
    tmp = folder.with_name(folder.name + '.tmp')
    for kind, state in tensors.items():
        for name, tensor in state.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                # a broken checkpoint would push the good ones out
                raise ValueError(f'{folder.name} is not saved: {kind}.{name} holds nan or inf')

    # leftovers of a process that was killed while it saved
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in folder.parent.glob('step-*.tmp'):
        shutil.rmtree(stale)

    # where step-N is there already, only its name is written: it was saved before it was best
    try:
        if not folder.exists():
            write_files(tmp, tensors, {**training_state, 'step': step})
            os.rename(tmp, folder)
            fsync(folder.parent)
        if best:
            write_text(folder.parent / 'best', folder.name + '\n')
    except DISK_ERRORS as error:
        raise OSError(f'cannot save {folder}: {one_line(error)}') from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    remove_old(folder.parent, keep)
    return folder


def write_files(folder, tensors, training_state):
    """ A safetensors file for each kind of {kind: {name: tensor}}, and training_state.json, which
    has their sizes and digests. """
    folder.mkdir()
    umask = os.umask(0)
    os.umask(umask)
    files = {}
    for kind, state in tensors.items():
        path = folder / f'{kind}.safetensors'
        state = {name: tensor.detach().contiguous() for name, tensor in state.items()}
        save_file(state, path)
        path.chmod(0o666 & ~umask)             # safetensors lets only the owner read
        fsync(path)
        files[path.name] = entry_of(path)
    write_text(folder / 'training_state.json', sealed({**training_state, 'files': files}))


def remove_old(out_dir, keep):
    """ Removes all checkpoints but the newest `keep` and the best. """
    for folder in steps(out_dir)[keep:]:
        if folder.name != best_of(out_dir):
            # first a rename: a folder that is half removed must not look like a checkpoint
            tmp = folder.with_name(folder.name + '.tmp')
            os.rename(folder, tmp)
            shutil.rmtree(tmp)


# ---- reading

def read_tensors(path):
    """ {name: tensor} of a safetensors file. """
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f'cannot read {path}: {one_line(error)}') from None


def check_tensors(path, found, expected):
    """ ValueError unless the names, shapes and dtypes are those expected: kernels read bare memory.
    """
    def described(tensors):
        return {name: f'{str(tensor.dtype)[6:]} {tuple(tensor.shape)}'
                for name, tensor in tensors.items()}

    check_same(path, described(found), described(expected))


def find_checkpoint(out_dir, which='best'):
    """ The name of a checkpoint folder, as 'step-00001000'. which: 'best', 'latest' or that name. A
    run that was saved before its first evaluation has no best yet: then it is the latest, with a
    warning. """
    found = [path.name for path in steps(out_dir)]
    if not found:
        raise ValueError(f'no run in {out_dir}: train it to its first checkpoint, or name another '
                         '--out_dir')
    best = best_of(out_dir)
    is_export = not (Path(out_dir) / found[0] / 'optimizer.safetensors').exists()
    if which == 'best' and not best and not is_export and os.environ.get('RANK', '0') == '0':
        warn(f'{out_dir} has no best checkpoint before its first evaluation: the latest is read')
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
    return ModelConfig(**{name: identity[name] for name in names})


def load_model(out_dir, which='best', device='cpu'):
    """ (model, knobs, meta) of a run, with its averaged weights, where there are any. which: as in
    find_checkpoint. """
    out_dir = Path(out_dir)
    folder = out_dir / find_checkpoint(out_dir, which)
    state = verify(folder)
    identity = state.get('identity', {})
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
