"""
Checkpoints. A kill at any moment costs at most the checkpoint that is being written. Reading one
runs no code from it and notices every broken byte.

    out/<run>/step-00001000/    model.safetensors, ema.safetensors, optimizer.safetensors,
                                rng.safetensors, training_state.json
    out/<run>/latest, best      text files that name checkpoints

There is one form, whatever wrote it: one process, DDP or FSDP2. The tensors are whole, and any
number of processes reads them.

Writing: all files go into step-N.tmp, are synced to the disk, and one rename makes it step-N.
Another rename puts the name into `latest`. Only then are old checkpoints removed.

Reading: training_state.json holds the size and the SHA-256 of the files beside it, and of itself,
so a checkpoint can be proven whole. All shapes are compared with the file's header before a model
is built.
"""
import os
import re
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import processes
from model import Model, ModelConfig
from runs.files import fsync, one_line, read_sealed, sealed, sha256, short, write_text
from runs.manifest import read_meta
from runs.run_folder import read_config

# Names that are read from files must match this, so none leads out of the run folder.
STEP = re.compile(r'step-\d{8,12}', re.ASCII)

# torch and safetensors raise errors of their own for a full disk
DISK_ERRORS = (OSError, RuntimeError, SafetensorError)

# instructions for products in bfloat16: two of x86, one of ARM
CPU_BFLOAT16 = ('amx_bf16', 'avx512_bf16', 'bf16')


# ---- leaves

def pick_device(name):
    """ 'auto' is CUDA where there is one. ValueError where the device cannot be used. """
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        if torch.device(name).type == 'cuda' and not torch.cuda.device_count():
            raise RuntimeError('this machine has no CUDA device that torch can use; '
                               '--device=cpu, or auto')
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f'device={name!r} cannot be used here: {first_line}') from None
    return name


def pick_dtype(name, device):
    """ 'auto' is bfloat16 where the device has instructions for its products, else float32: a CPU
    without them is many times slower in bfloat16 (docs/speed.md). ValueError for another name. """
    if name not in ('auto', 'bfloat16', 'float32'):
        raise ValueError(f'dtype={name!r}: choose from auto, bfloat16, float32')
    if name != 'auto':
        return name
    if torch.device(device).type == 'cuda':
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        # without oneDNN torch does not use the instructions; an older torch cannot list them
        capabilities = getattr(torch.cpu, 'get_capabilities', dict)()
        has_bfloat16 = (torch.backends.mkldnn.is_available()
                        and any(capabilities.get(instruction) for instruction in CPU_BFLOAT16))
    return 'bfloat16' if has_bfloat16 else 'float32'


def describe(path):
    """ What training_state.json says of a file. """
    return {'bytes': path.stat().st_size, 'sha256': sha256(path)}


def n_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def difference(old, new):
    """ What differs between two {kind: {key: value}}, in words, or None. The id of an encoder may
    differ: it says where the encoder lay. Its revision says which it is. """
    for kind in new:
        a, b = old.get(kind) or {}, new[kind] or {}
        for key in sorted({*a, *b} - {'id'}):
            if a.get(key) != b.get(key):
                return f'{kind} {key}={a.get(key)!r}, now it is {b.get(key)!r}'


def steps(out_dir):
    """ The checkpoint folders, newest first. """
    folders = [path for path in Path(out_dir).glob('step-*') if STEP.fullmatch(path.name)]
    return sorted(folders, key=lambda path: -int(path.name[5:]))


def checkpoint_named(out_dir, which):
    """ The text in `latest` or `best`, at most 100 bytes of it, whatever it is; another `which`
    itself. """
    path = Path(out_dir) / which
    if which not in ('latest', 'best') or not path.is_file():
        return which
    with open(path, 'rb') as f:
        return f.read(100).decode('ascii', 'replace').strip()


# ---- is it whole?

def verify(folder):
    """ The training state of a checkpoint that is whole to the bit. Else ValueError: the file, what
    was found, what was expected. """
    state = read_sealed(Path(folder) / 'training_state.json')
    for name, expected in state['files'].items():
        path = Path(folder) / name
        found = describe(path) if path.is_file() else 'no file'
        if found != expected:
            raise ValueError(f'{path}: found {found}, expected {expected}')
    return state


def is_broken(folder):
    """ Why a checkpoint is not whole; None when it is. """
    try:
        verify(folder)
    except ValueError as error:
        return str(error)


def set_aside(folder):
    """ Renames a broken checkpoint to step-N.broken, which no function here reads. It is kept for
    whoever wants to look at it. """
    for n in ('', *range(2, 1000)):
        name = folder.with_name(f'{folder.name}.broken{n}')
        if not name.exists():
            os.rename(folder, name)
            return
    raise OSError(f'{folder} is broken, and so are many others: remove {folder.name}.broken*')


def newest(out_dir):
    """ The folder of the newest whole checkpoint; None where the run has none yet. Only rank 0
    calls this. Broken ones are reported and set aside. ValueError when nothing else is left. """
    out_dir = Path(out_dir)
    for folder in steps(out_dir):
        reason = is_broken(folder)
        if not reason:
            write_text(out_dir / 'latest', folder.name + '\n')
            return folder
        print(f'warning: {folder.name} is broken and set aside: {reason}',
              file=sys.stderr, flush=True)
        set_aside(folder)
    if list(out_dir.glob('step-*.broken*')) or (out_dir / 'latest').exists():
        raise ValueError(f'{out_dir} has no whole checkpoint left: to start afresh, '
                         'choose another out_dir or empty it')


# ---- writing

def save(out_dir, step, tensors, training_state, keep=2, best=False):
    """
    Writes out_dir/step-N whole or not at all, names it in `latest` (and `best`), then removes the
    checkpoints that are no longer kept. Only rank 0 calls this. Returns the folder.
    tensors: {kind: {name: tensor}}, whole tensors, a file for each kind: model, ema, optimizer,
    rng. training_state: plain values that JSON has.
    OSError where it cannot be written, ValueError where a tensor is not finite. Then nothing of it
    is left, and the checkpoints before it are untouched.
    """
    folder = Path(out_dir) / f'step-{step:08d}'
    for kind, state in tensors.items():
        for name, tensor in state.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                # a broken checkpoint would push the good ones out
                raise ValueError(f'{folder.name} is not saved: {kind}.{name} holds nan or inf')
    size = sum(n_bytes(state.values()) for state in tensors.values())
    tmp, cannot = make_room(folder, size)

    with nothing_left(tmp, cannot):
        if tmp:
            write_files(tmp, tensors, {**training_state, 'step': step})
        publish(folder, tmp, best)
    remove_old(folder.parent, keep)
    return folder


def make_room(folder, size):
    """ (step-N.tmp, the begin of an error line), for tensors of so many bytes. None for step-N.tmp
    where step-N is there already: it is the same to the bit, since a resumed run writes what it
    wrote before. OSError where the disk is too full. """
    # leftovers of a process that was killed while it saved
    out_dir = folder.parent
    out_dir.mkdir(parents=True, exist_ok=True)
    for stale in out_dir.glob('step-*.tmp'):
        shutil.rmtree(stale)
    if folder.exists() and is_broken(folder):
        set_aside(folder)

    # is there room?
    needs = int(1.01 * size) + 2 ** 20
    has = shutil.disk_usage(out_dir).free
    cannot = f'cannot save {folder.name}: needs {needs:,} bytes, has {has:,} at {out_dir}'
    if folder.exists():
        return None, cannot
    if has < needs:
        raise OSError(cannot)
    return folder.with_name(folder.name + '.tmp'), cannot


@contextmanager
def nothing_left(tmp, cannot):
    """ Around what writes a checkpoint: an error of the disk becomes an OSError that begins with
    `cannot`, and tmp is removed. """
    try:
        yield
    except DISK_ERRORS as error:
        raise OSError(f'{cannot}: {one_line(error)}') from error
    finally:
        if tmp:
            shutil.rmtree(tmp, ignore_errors=True)


def write_files(folder, tensors, training_state):
    """ A safetensors file for each kind of {kind: {name: tensor}}, and training_state.json, which
    has their sizes and digests. """
    folder.mkdir()
    umask = os.umask(0)
    os.umask(umask)
    files = {}
    for kind, state in tensors.items():
        path = folder / f'{kind}.safetensors'
        save_file(unshared(state), path)
        path.chmod(0o666 & ~umask)             # safetensors lets only the owner read
        fsync(path)
        files[path.name] = describe(path)
    write_text(folder / 'training_state.json', sealed({**training_state, 'files': files}))


def publish(folder, tmp, best):
    """ Makes step-N.tmp step-N and names it. """
    if tmp:
        os.rename(tmp, folder)
        fsync(folder.parent)
    write_text(folder.parent / 'latest', folder.name + '\n')
    if best:
        write_text(folder.parent / 'best', folder.name + '\n')


def unshared(state):
    """ A state dict as safetensors wants it: contiguous, and tied tensors copied, each under its
    own name. """
    seen = set()
    found = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach().contiguous()
        found[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return found


def remove_old(out_dir, keep):
    """ Removes all checkpoints but the newest `keep`, the latest and the best. """
    kept = {path.name for path in steps(out_dir)[:max(keep, 1)]}
    kept |= {checkpoint_named(out_dir, name) for name in ('latest', 'best')}
    for folder in steps(out_dir):
        if folder.name not in kept:
            # first a rename: a folder that is half removed must not look like a checkpoint
            tmp = folder.with_name(folder.name + '.tmp')
            os.rename(folder, tmp)
            shutil.rmtree(tmp)


# ---- reading

def read_tensors(path, device='cpu'):
    """ {name: tensor} of a safetensors file. """
    try:
        return load_file(path, device=str(device))
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f'cannot read {path}: {one_line(error)}') from None


def shapes_in(path):
    """ {name: shape} of the tensors in a safetensors file. Only its header is read. """
    try:
        with safe_open(path, 'pt') as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f'cannot read {path}: {one_line(error)}') from None


def compare_shapes(model, found, path):
    """ ValueError unless the names and shapes found in a safetensors file are the model's. """
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted({**expected, **found}):
        if found.get(name) != expected.get(name):
            raise ValueError(f'{path}: found {name} {found.get(name)}, '
                             f'expected {expected.get(name)}')


def check_table_sizes(model, path):
    """ ValueError where position tables and masks would take too much memory. They are in no file,
    so the shapes there do not confirm their length. """
    tables = n_bytes(model.buffers())
    weights = n_bytes(model.parameters())
    if tables > max(weights, 2 ** 28):
        raise ValueError(f'{path}: seq_len={model.config.seq_len} needs tables of {tables:,} bytes '
                         f'beside weights of {weights:,}')


def find_checkpoint(out_dir, which='best'):
    """ The name of a checkpoint folder, as 'step-00001000'. which: 'best', 'latest' or that name. A
    run that was saved before its first evaluation has no best yet: then it is the latest, with a
    warning. """
    out_dir = Path(out_dir)
    read_config(out_dir)                                   # ValueError where there is no run
    if which == 'best' and not (out_dir / 'best').exists() and (out_dir / 'latest').is_file():
        if os.environ.get('RANK', '0') == '0':
            print(f'warning: {out_dir} has no best checkpoint before its first evaluation: '
                  'the latest one is read', file=sys.stderr, flush=True)
        which = 'latest'
    name = checkpoint_named(out_dir, which)
    if STEP.fullmatch(name) and (out_dir / name).is_dir():
        return name

    found = [path.name for path in steps(out_dir)]
    hint = f'only {found}: choose one with --which='
    if not found:
        hint = 'nor any other: train it to its first save'
    raise ValueError(f'{out_dir} has no checkpoint {short(name)}, {hint}')


def load_model(out_dir, which='best', ema=True, device='cpu'):
    """ (model, config, meta) of a run. which: as in find_checkpoint. ema: the EMA weights, where
    there are any. """
    out_dir = Path(out_dir)
    knobs = read_config(out_dir)
    meta = read_meta(out_dir / 'data')
    folder = out_dir / find_checkpoint(out_dir, which)
    state = verify(folder)

    # the knobs of the process decide how the weights are read, so the checkpoint holds them too
    for knob, value in state['identity']['process'].items():
        if knobs[knob] != value:
            raise ValueError(f'{out_dir}/config.json: {knob}={knobs[knob]!r}, but {folder.name} '
                             f'was trained with {value!r}')

    # first on the meta device, without memory: are the sizes those of the file?
    kind = 'ema' if ema and 'ema.safetensors' in state['files'] else 'model'
    path = folder / f'{kind}.safetensors'
    found = shapes_in(path)
    try:
        config = ModelConfig(**state['model_config'])
        # n tensors cannot fill n + 1 blocks, and a sketch of a million would take hours
        drawn = replace(config, depth=min(config.depth, len(found) + 1))
        with torch.device('meta'):
            sketch = processes.add_modules(Model(drawn), knobs)
    except Exception as error:                             # sizes that no network can have
        raise ValueError(f'{path}: no network of these sizes: {one_line(error)}') from None
    compare_shapes(sketch, found, path)
    check_table_sizes(sketch, path)
    model = processes.add_modules(Model(config), knobs)
    model.load_state_dict(read_tensors(path))
    return model.to(device).eval(), knobs, meta
