"""
Checkpoints. A kill at any moment costs at most the checkpoint that is being written. Reading one
runs no code from it and notices every broken byte.

    out/<run>/step-00001000/    model.safetensors, ema.safetensors, optimizer.pt,
                                rng_state_rank{N}.pt, training_state.json
    out/<run>/latest, best      text files that name checkpoints

With parallel=fsdp every rank writes its own rows of weights, average and moments instead
(sharded.py). Both forms are read by any number of processes.

Writing: all files go into step-N.tmp, are synced to the disk, and one rename makes it step-N.
Another rename puts the name into `latest`. Only then are old checkpoints removed.

Reading: training_state.json holds the size and the SHA-256 of the files beside it, and of itself,
so a checkpoint can be proven whole. The digests find accidents. Against malice weights are
safetensors, other files are read with weights_only=True, and all sizes are compared with the file's
header before a model is built.
"""
import hashlib
import os
import re
import shutil
import sys
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import processes
from model import Model, ModelConfig
from runs import distributed, rules, sharded
from runs.files import fsync, one_line, read_json, sha256, write_text
from runs.manifest import read_meta
from runs.run_folder import dumps, read_config

# Names that are read from files must match these, so none leads out of the run folder.
STEP = re.compile(r'step-\d{8,12}', re.ASCII)
FILE = re.compile(r'(model|ema)\.safetensors|(optimizer|rng_state_rank\d+)\.pt|'
                  r'(model|ema|optimizer)_rank\d+\.safetensors', re.ASCII)

# torch and safetensors raise errors of their own for a full disk
DISK_ERRORS = (OSError, RuntimeError, SafetensorError)

# instructions for products in bfloat16: two of x86, one of ARM
CPU_BFLOAT16 = ('amx_bf16', 'avx512_bf16', 'bf16')

# The form of training_state.json, in rules of rules.py. `save` writes step, files and sha256,
# train.py the rest.
STATE = {
    'step': 'int [0, 2**40]',
    'sha256': '<a digest>',
    'files': {'*': {'bytes': 'int [0, 2**60]', 'sha256': '<a digest>'}},
    'evaluated_at?': 'int [0, 2**40]',
    'best_val?': 'None | (-inf, inf)',
    'skipped?': '[0, inf)',
    'streak?': '[0, inf)',
    'history?': ['[0, inf)'],
    'global_batch?': 'int [1, 2**60]',
    'model_config?': {},
    'names?': ['<a name>'],                                # of a sharded model: what trains
    'identity?': {'model': {}, 'process': {}, 'tokenizer': {}, 'encoder': (None, {}), 'files': {}},
}

# the tensors that an optimizer keeps for each parameter
MOMENTS = {
    'AdamW': {'step', 'exp_avg', 'exp_avg_sq'},
    'Muon': {'momentum_buffer'},
}


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


def n_bytes(state):
    """ The size of all tensors in nested dicts, lists and tuples. """
    if torch.is_tensor(state):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        state = state.values()
    is_nested = hasattr(state, '__iter__') and not isinstance(state, str)
    return sum(map(n_bytes, state)) if is_nested else 0


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
    # the state itself; its digest is that of the text without the digest
    path = Path(folder) / 'training_state.json'
    state = read_json(path)
    expected = state.get('sha256')
    text = path.read_bytes().replace(str(expected).encode(), b'')
    found = hashlib.sha256(text).hexdigest()
    if found != expected:
        raise ValueError(f'{path}: found SHA-256 {found}, expected {expected}')

    # the files beside it
    files = state.get('files')
    of_model = {'model.safetensors', 'model_rank0.safetensors'}
    if not isinstance(files, dict) or not of_model & set(files):
        raise ValueError(f'{path}: found files {files}, expected model.safetensors among them')
    for name, expected in files.items():
        path = Path(folder) / name
        if not FILE.fullmatch(name):
            raise ValueError(f'{path}: no file of a checkpoint has this name')
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

def first_not_finite(state, name):
    """ The name of the first tensor with nan or inf in nested dicts, lists and tuples; None where
    all are finite. """
    if torch.is_tensor(state):
        is_finite = not state.is_floating_point() or torch.isfinite(state).all()
        return None if is_finite else name

    if isinstance(state, dict):
        parts = state.items()
    else:
        parts = enumerate(state) if isinstance(state, (list, tuple)) else ()
    for key, value in parts:
        found = first_not_finite(value, f'{name}.{key}')
        if found:
            return found


def save(out_dir, step, model_state, ema_state, optimizer_state, training_state, rng_states, keep=2,
         best=False):
    """
    Writes out_dir/step-N whole or not at all, names it in `latest` (and `best`), then removes the
    checkpoints that are no longer kept. Only rank 0 calls this. Returns the folder.
    rng_states: a list, one entry per rank. ema_state and optimizer_state may be None.
    training_state: plain values that JSON has (tuples become lists), with model_config.
    OSError where it cannot be written, ValueError where weights, average or moments are not finite.
    Then nothing of it is left, and the checkpoints before it are untouched.
    """
    folder = Path(out_dir) / f'step-{step:08d}'
    weights = {'model': model_state, 'ema': ema_state}
    check_finite(folder, {**weights, 'optimizer': optimizer_state})
    size = n_bytes((model_state, ema_state, optimizer_state, rng_states))
    tmp, cannot = make_room(folder, size)

    with nothing_left(tmp, cannot):
        if tmp:
            files = write_files(tmp, weights)
            state = {**training_state, 'step': step}
            write_rest(tmp, state, files, rng_states, optimizer_state)
        publish(folder, tmp, best)
    remove_old(folder.parent, keep)
    return folder


def save_sharded(out_dir, step, model_state, ema_state, optimizer_state, training_state, rng_states,
                 keep=2, best=False):
    """ `save` for a sharded model: every rank calls it, with its shares, and writes its own rows.
    Returns [folder, error], the same on all ranks; one of the two is None. """
    folder = Path(out_dir) / f'step-{step:08d}'
    shares = sharded.shares_of(model_state, ema_state, optimizer_state, distributed.rank)

    # what one rank finds, all know
    error = None
    try:
        check_finite(folder, shares)
    except ValueError as failure:
        error = str(failure)
    errors = [error for error in distributed.all_gather_object(error) if error]
    if errors:
        return None, ValueError(errors[0])

    # rank 0 makes room
    size = sum(distributed.all_gather_object(n_bytes(shares)))
    room, error = distributed.on_rank0(make_room, folder, size)
    if error:
        return None, error
    tmp, cannot = room

    # all write, and rank 0 makes it a checkpoint
    files = {}
    if tmp:
        try:
            files = write_files(tmp, shares, f'_rank{distributed.rank}')
        except DISK_ERRORS as failure:
            error = one_line(failure)
    written = distributed.all_gather_object((files, error))
    state = {**training_state, 'step': step, 'names': optimizer_state['names']}
    return distributed.on_rank0(finish_sharded, folder, tmp, cannot, written, state, rng_states,
                                keep, best)


def finish_sharded(folder, tmp, cannot, written, state, rng_states, keep, best):
    """ What is left for rank 0. written: for each rank its files, as write_files gives them, and
    the error that it met, or None. """
    with nothing_left(tmp, cannot):
        all_files = {}
        for files, error in written:
            if error:
                raise OSError(error)
            all_files.update(files)
        if tmp:
            write_rest(tmp, state, all_files, rng_states)
        publish(folder, tmp, best)
    remove_old(folder.parent, keep)
    return folder


def check_finite(folder, states):
    """ ValueError where a tensor is not finite: a broken checkpoint would push the good ones out.
    states: {kind: nested tensors}. """
    for name, state in states.items():
        found = first_not_finite(state, name)
        if found:
            raise ValueError(f'{folder.name} is not saved: {found} holds nan or inf')


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
    if has < needs:
        raise OSError(cannot)
    return None if folder.exists() else folder.with_name(folder.name + '.tmp'), cannot


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


def write_files(tmp, states, suffix=''):
    """ A safetensors file for each kind of {kind: {name: tensor}}. Returns {file: its size and
    digest}. """
    tmp.mkdir(exist_ok=True)                               # several ranks may write there
    paths = []
    for kind, state in states.items():
        if state is not None:
            paths.append(tmp / f'{kind}{suffix}.safetensors')
            save_file(unshared(state), paths[-1])
    return synced(paths)


def write_rest(tmp, state, files, rng_states, optimizer_state=None):
    """ The files of torch.save, and training_state.json, which names all. """
    pickles = {f'rng_state_rank{rank}.pt': rng for rank, rng in enumerate(rng_states)}
    if optimizer_state is not None:
        pickles['optimizer.pt'] = by_value(optimizer_state)
    for name, value in pickles.items():
        torch.save(value, tmp / name)
    files = {**files, **synced([tmp / name for name in pickles])}

    # the digest of the state is that of its text with an empty one
    state = {**state, 'files': dict(sorted(files.items())), 'sha256': ''}
    state['sha256'] = hashlib.sha256(dumps(state).encode()).hexdigest()
    write_text(tmp / 'training_state.json', dumps(state))


def synced(paths):
    """ {name: size and digest} of files, once they are on the disk. """
    # safetensors lets only the owner read; these files get the usual permissions
    umask = os.umask(0)
    os.umask(umask)
    for path in paths:
        path.chmod(0o666 & ~umask)
        fsync(path)
    return {path.name: describe(path) for path in paths}


def publish(folder, tmp, best):
    """ Makes step-N.tmp step-N and names it. """
    if tmp:
        os.rename(tmp, folder)
        fsync(folder.parent)
    write_text(folder.parent / 'latest', folder.name + '\n')
    if best:
        write_text(folder.parent / 'best', folder.name + '\n')


def by_value(state):
    """ A copy in which no dict, list or tuple occurs twice. torch.save writes what occurs twice
    only once, so the bytes would depend on more than the values. """
    if isinstance(state, dict):
        return {key: by_value(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(by_value(value) for value in state)
    return state


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


# ---- reading: files

def read_state(folder):
    """ training_state.json, with the form of its fields checked. """
    return read_json(Path(folder) / 'training_state.json', STATE)


def check_stored(path):
    """ ValueError unless a file of torch.save is a zip file with nothing compressed in it, as torch
    writes it. So its content is never larger than the file. """
    try:
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
    except Exception as error:                             # zipfile has a dozen kinds
        raise ValueError(f'cannot read {path}: no torch file ({type(error).__name__})') from None

    size = sum(record.file_size for record in records)
    file_size = os.path.getsize(path)
    is_stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    if size > file_size or not is_stored:
        raise ValueError(f'cannot read {path}: found records of {size:,} bytes in a file of '
                         f'{file_size:,}, expected them uncompressed, as torch.save writes them')


def read_pickle(path, map_location='cpu'):
    """ A file of torch.save. weights_only is spelled out, since the environment can change its
    default. """
    check_stored(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        # whatever a hostile file provokes; torch's own text advises weights_only=False
        raise ValueError(f'cannot read {path}: no torch file of tensors and plain values '
                         f'({type(error).__name__})') from None


def read_weights(*paths, device='cpu'):
    """ {name: tensor} of a safetensors file, or of those of all ranks. """
    tensors = sharded.read(paths, device)
    return {todays_name(name): tensor.whole() for name, tensor in tensors.items()}


def read_shapes(*paths):
    """ {name: shape}, from headers alone. Nothing is loaded. """
    return {todays_name(name): tensor.shape for name, tensor in sharded.read(paths).items()}


def todays_name(name):
    """ The name of a parameter today, from its name in any run. Before 2026-11-23 two had other
    names. """
    if name == 'slots':
        return 'latent_pos_emb'
    if name.endswith('.table'):
        return name.removesuffix('.table') + '.scale_shift_table'
    return name


def todays_config(model_config):
    """ The fields of a model_config today, from those of any run. """
    fields = dict(model_config)
    if 'clusters' in fields:                               # before 2026-11-23
        fields['extra_ids'] = fields.pop('clusters')
    return fields


def load(folder, map_location='cpu', rank=0):
    """ {'model', 'ema', 'optimizer', 'training_state', 'rng'} of a folder that `newest` or `verify`
    found whole, with None for what it does not have. rng is that of this rank. What a sharded model
    has written is not read yet: its tensors are sharded.ShardedTensor. """
    folder = Path(folder)
    state = read_state(folder)
    files = state['files']

    def read(name, device=map_location):
        return read_pickle(folder / name, device) if name in files else None

    found = {'optimizer': read('optimizer.pt'), 'rng': read(f'rng_state_rank{rank}.pt', 'cpu'),
             'training_state': state}
    for kind in ('model', 'ema'):
        paths = sharded.paths_of(folder, files, kind)
        if f'{kind}.safetensors' in files:
            found[kind] = read_weights(*paths, device=map_location)
        else:
            tensors = sharded.read(paths)
            found[kind] = {todays_name(name): tensor for name, tensor in tensors.items()} or None

    moments = sharded.paths_of(folder, files, 'optimizer')
    if moments:
        found['optimizer'] = sharded.read_optimizer(moments, state.get('names', []))
    return found


def checked_moments(path, state, optimizer, owners):
    """
    {number of a parameter: {name: tensor}} for an optimizer, from its state dict, read from `path`.
    owners: [(name, parameter)] in the optimizer's order. Of a sharded parameter the whole shape
    counts. ValueError where a tensor is missing, or has another shape.
    Each tensor comes back contiguous, in memory of its own and with its parameter's dtype: the
    fused kernels read bare pointers.
    """
    def refuse(what, expected):
        raise ValueError(f'{path}: {what}, expected {expected}; choose another --out_dir')

    kinds = MOMENTS[type(optimizer).__name__]
    checked = {}
    for number, found in state['state'].items():
        # whose they are
        if type(number) is not int or not 0 <= number < len(owners):
            refuse(f'moments of parameter {rules.short(number)}', f'a number below {len(owners)}')
        name, owner = owners[number]
        if not isinstance(found, dict) or set(found) != kinds:
            refuse(f'{name} has {rules.short(list(found))}', ', '.join(sorted(kinds)))

        checked[number] = {}
        for kind, value in found.items():
            # `step` is one number, AdamW's count of steps; the others are as large as the parameter
            is_step = kind == 'step'
            shape = [] if is_step else list(owner.shape)
            value = sharded.as_tensor(value, owner)
            is_dense = value.layout == torch.strided and not value.is_complex()
            is_numbers = is_dense and value.dtype != torch.bool
            if not is_numbers or list(value.shape) != shape:
                refuse(f'{kind} of {name} is {value.dtype} {list(value.shape)}', f'numbers {shape}')
            if is_step and not 0 <= value.item() < 2**40:
                refuse(f'{kind} of {name} is {value.item()}', 'a count of steps')

            dtype = torch.float32 if is_step else owner.dtype
            value = value.detach().to(dtype)
            checked[number][kind] = value.clone(memory_format=torch.contiguous_format)
    return checked


def check_average(path, name, value, parameter):
    """ ValueError unless a parameter's average has its shape: copy_ broadcasts others. """
    if list(value.shape) != list(parameter.shape):
        raise ValueError(f'{path}: found {name} {list(value.shape)}, '
                         f'expected {list(parameter.shape)}')


# ---- reading: a model

def compare_shapes(model, paths):
    """ ValueError unless the names and shapes in a safetensors file, or in those of all ranks, are
    the model's. """
    found = read_shapes(*paths)
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted({**expected, **found}):
        if found.get(name) != expected.get(name):
            raise ValueError(f'{paths[0]}: found {name} {found.get(name)}, '
                             f'expected {expected.get(name)}')


def check_table_sizes(model):
    """ ValueError where position tables and masks would take too much memory. They are in no file,
    so the shapes there do not confirm their length. """
    tables = n_bytes(list(model.buffers()))
    weights = n_bytes(list(model.parameters()))
    if tables > max(weights, 2 ** 28):
        raise ValueError(f'seq_len={model.config.seq_len} needs tables of {tables:,} bytes beside '
                         f'weights of {weights:,}')


def build(model_config, paths, knobs):
    """ A model for the weights in these files, not yet filled, of a run with these knobs. The sizes
    are not trusted: the model is first built on the meta device, without memory, and each name and
    shape is compared with the files' headers. """
    path = paths[0]
    try:
        fields = todays_config(model_config)
        fields.pop('importance', None)                     # a knob of the run, not of the network
        config = ModelConfig(**fields)
        if config.depth > 256:                             # a million blocks take minutes even so
            raise ValueError(f'depth={config.depth} is above 256')
        with torch.device('meta'):
            model = processes.add_modules(Model(config), knobs)
    except Exception as error:                             # whatever hostile values provoke
        raise ValueError(f'{path}: its model_config builds no model: {error}') from None
    compare_shapes(model, paths)
    try:
        check_table_sizes(model)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None
    return processes.add_modules(Model(config), knobs)


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
    raise ValueError(f'{out_dir} has no checkpoint {rules.short(name)}, {hint}')


def sampled_files(folder, files, ema=True):
    """ The files of the weights that sampling reads: of the average, where there is one. """
    average = sharded.paths_of(folder, files, 'ema') if ema else []
    return average or sharded.paths_of(folder, files, 'model')


def load_model(out_dir, which='best', ema=True, device='cpu'):
    """ (model, config, meta) of a run. which: as in find_checkpoint. ema: the EMA weights, where
    there are any. """
    out_dir = Path(out_dir)
    config = read_config(out_dir)
    meta = read_meta(out_dir / 'data')
    name = find_checkpoint(out_dir, which)
    verify(out_dir / name)
    state = read_state(out_dir / name)

    # the knobs of the process decide how the weights are read, so the checkpoint holds them too
    for knob, value in state.get('identity', {}).get('process', {}).items():
        if config.get(knob, value) != value:
            raise ValueError(f'{out_dir}/config.json: {knob}={config[knob]!r}, but {name} was '
                             f'trained with {value!r}')

    paths = sampled_files(out_dir / name, state['files'], ema)
    model = build(state.get('model_config'), paths, config)
    model.load_state_dict(read_weights(*paths))
    return model.to(device).eval(), config, meta
