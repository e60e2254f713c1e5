"""
Checkpoints, as a training writes them (reading: checkpoint.py). A kill at any moment costs at most
the one that is being written: all files go into a folder of a temporary name, are synced to the
disk, and one rename makes it step-N. Only then are old checkpoints removed.
"""
import functools
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from runs.checkpoint import FILES, best_of, steps, verify
from runs.console import warn
from runs.files import one_line
from runs.writing import (entry_of, fsync, new_mode, remove_folder, sealed, write_folder,
                          write_text)

warn_once = functools.cache(warn)


def newest(out_dir):
    """ The folder of the newest whole checkpoint; None where the run has none yet. Only rank 0
    calls this. Broken ones are reported and set aside. ValueError when nothing else is left. """
    out_dir = Path(out_dir)
    for folder in steps(out_dir):
        try:
            verify(folder)
        except (ValueError, FileNotFoundError) as error:
            warn(f'{folder.name} is broken and set aside: {error}')
            # no function here reads it; it is kept for whoever wants to look at it
            broken = folder.with_name(folder.name + '.broken')
            while os.path.lexists(broken):
                broken = broken.with_name(broken.name + '.broken')
            os.rename(folder, broken)
        else:
            return folder
    if list(out_dir.glob('step-*.broken')):
        raise ValueError(f'{out_dir} has no whole checkpoint left: to start afresh, '
                         'choose another out_dir or empty it')


def save(out_dir, step, tensors, training_state, keep=2, best=False):
    """ Writes out_dir/step-N whole or not at all, names it in `best` if it is, then removes the
    checkpoints that are no longer kept. Only rank 0 calls this. Returns the folder.
    tensors: {kind: {name: tensor}}, whole tensors, a file for each kind: model, ema, optimizer,
    rng. training_state: plain values that JSON has.
    OSError where it cannot be written, ValueError where a tensor is not finite. Then nothing of it
    is left, and the checkpoints before it are untouched. """
    folder = Path(out_dir) / f'step-{step:08d}'
    for kind, state in tensors.items():
        for name, tensor in state.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                # a broken checkpoint would push the good ones out
                raise ValueError(f'{folder.name} is not saved: {kind}.{name} holds nan or inf')

    # where step-N is there already, only its name is written: it was saved before it was best
    try:
        if not folder.exists():
            with write_folder(folder) as tmp:
                write_files(tmp, tensors, {**training_state, 'step': step})
        if best:
            write_text(folder.parent / 'best', folder.name + '\n')
    except (OSError, RuntimeError, SafetensorError) as error:            # each for a full disk
        raise OSError(f'cannot save {folder}: {one_line(error)}') from error
    remove_old(folder.parent, keep)
    return folder


def write_files(folder, tensors, training_state):
    """ A safetensors file for each kind of {kind: {name: tensor}}, and training_state.json, which
    has their sizes and digests. """
    folder.mkdir(exist_ok=True)
    files = {}
    for kind, state in tensors.items():
        path = folder / f'{kind}.safetensors'
        state = {name: tensor.detach().contiguous() for name, tensor in state.items()}
        save_file(state, path)
        path.chmod(new_mode(0o666))            # safetensors lets only the owner read
        fsync(path)
        files[path.name] = entry_of(path)
    write_text(folder / 'training_state.json', sealed({**training_state, 'files': files}))


def remove_old(out_dir, keep):
    """ Removes all checkpoints but the newest `keep` and the best. What cannot be removed is a
    warning: the new one is saved. """
    for folder in steps(out_dir)[keep:]:
        if folder.name == best_of(out_dir):
            continue
        try:
            if not remove_folder(folder, FILES):
                warn_once(f'{folder} is kept: it holds files that no training has put there')
        except OSError as error:               # as on NFS, while another program reads it
            warn(f'{folder} cannot be removed: {one_line(error)}')
