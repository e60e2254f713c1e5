"""
The run folder: written so that a kill at any moment costs at most the checkpoint in the making, read so that nothing in it
can execute code and no broken byte goes unnoticed.

    out/<run>/config.json       the resolved knobs, argv, git commit, versions; resumed_from: what
                                they were before each resume
    out/<run>/data/             meta.json, tokenizer.json, latent_stats.npz, encoder.npz: a run folder is complete in itself
    out/<run>/step-00001000/    model.safetensors, ema.safetensors, optimizer.pt, rng_state_rank{N}.pt, training_state.json
    out/<run>/latest, best      text files that name whole checkpoints
    out/<run>/wandb_id          of the run there, where it logs to wandb

Writing: everything into step-N.tmp, fsync, one rename; then `latest`, by another rename; only then are old ones removed.
training_state.json holds size and SHA-256 of the files beside it, and of itself, so reading can prove a checkpoint whole.
The digests find accidents, not malice: against that, weights are safetensors, the rest is read with weights_only=True, and
sizes are compared with the file's header before a model is built.
"""
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import rules
from configurator import read_run_config
from data import read_meta
from files import fsync, read_json, sha256, write_text
from model import Model, ModelConfig

DATA_FILES = ('meta.json', 'tokenizer.json', 'latent_stats.npz', 'encoder.npz')
STEP = re.compile(r'step-\d{8,12}', re.ASCII)  # names that are read from files must match: no way out of the run folder
held = None                                    # the open lock file of this process's run
FILE = re.compile(r'(model|ema)\.safetensors|(optimizer|rng_state_rank\d+)\.pt', re.ASCII)


# the form of training_state.json, in the rules of rules.py; `save` writes step, files and sha256, the rest is train.py's
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
    'identity?': {'model': {}, 'process': {}, 'tokenizer': {}, 'encoder': (None, {}), 'files': {}},
}
NORMS = 64                                     # of the history of gradient norms


# ---- files

def dumps(state):
    return json.dumps(state, indent=1) + '\n'


def describe(path):
    return {'bytes': path.stat().st_size, 'sha256': sha256(path)}


def n_bytes(state):
    """ Of all tensors in nested dicts, lists and tuples. """
    if torch.is_tensor(state):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        state = state.values()
    return sum(map(n_bytes, state)) if hasattr(state, '__iter__') and not isinstance(state, str) else 0


def pick_device(name):
    """ 'auto' is CUDA where there is one; ValueError where the device cannot be used. """
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        if torch.device(name).type == 'cuda' and not torch.cuda.device_count():
            raise RuntimeError('this machine has no CUDA device that torch can use; --device=cpu, or auto')
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f'device={name!r} cannot be used here: {str(error).splitlines()[0]}') from None
    return name


# ---- the run

def git_commit():
    """ The code's commit, with -dirty where files differ from it; None without git. """
    git = ['git', '-C', os.path.dirname(os.path.abspath(__file__)), 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def difference(old, new):
    """ What differs between two {kind: {key: value}}: 'kind key=old, now new', or None. The id of an encoder is where it lay and
    may change, its revision is what it is. """
    for kind in new:
        a, b = old.get(kind) or {}, new[kind] or {}
        for key in sorted({*a, *b} - {'id'}):
            if a.get(key) != b.get(key):
                return f'{kind} {key}={a.get(key)!r}, now it is {b.get(key)!r}'


def replaced_values(out_dir, config, step):
    """ The list resumed_from for the config.json of a run that goes on at a step: an object for each
    resume, with its step and the values of config.json that it replaced. """
    try:
        before = read_config(out_dir)
    except ValueError:                         # it is broken: nothing to keep
        return []
    earlier = before.pop('resumed_from', [])
    earlier = earlier if isinstance(earlier, list) else []
    now = json.loads(json.dumps(config))       # as config.json will have it: a tuple is a list there
    changed = {}
    for name, value in json.loads(json.dumps(before)).items():
        if name in now and value != now[name]:
            changed[name] = value
    return earlier + [{'step': step, **changed}] if changed else earlier


def write_run(out_dir, config, data_folder, fresh=False, step=0):
    """ config.json and data/, before the first step. A data/ that is there already stays, as a resumed run keeps its own;
    fresh: the run has no checkpoint yet, and a data/ left by an earlier attempt is replaced.
    step: where a resumed run goes on. """
    out_dir, data_folder = Path(out_dir), Path(data_folder)
    out_dir.mkdir(parents=True, exist_ok=True)
    if fresh and (out_dir / 'data').exists():
        shutil.rmtree(out_dir / 'data')
    versions = {'python': platform.python_version(), 'torch': torch.__version__, 'numpy': np.__version__}
    config = {**config, 'argv': sys.argv, 'commit': git_commit(), 'versions': versions}
    config = json.loads(dumps(config))         # tuples become lists, as in what was written before
    if not fresh and (earlier := replaced_values(out_dir, config, step)):
        config['resumed_from'] = earlier
    write_text(out_dir / 'config.json', dumps(config))
    if not (out_dir / 'data').exists():
        tmp = out_dir / 'data.tmp'
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir()
        for name in DATA_FILES:
            if (data_folder / name).exists() or name == 'meta.json':
                shutil.copyfile(data_folder / name, tmp / name)
                fsync(tmp / name)
        fsync(tmp)
        os.rename(tmp, out_dir / 'data')
        fsync(out_dir)


def wandb_id(out_dir, fresh=False):
    """ The id under which wandb knows the run: drawn once, then read, so that a resumed run goes on in the same one.
    fresh: the run has no checkpoint yet, and begins a new one there. ValueError where the file holds no id. """
    path = Path(out_dir) / 'wandb_id'
    if fresh or not path.exists():
        write_text(path, secrets.token_hex(4) + '\n')
    found = path.read_text(errors='replace').strip()
    if not re.fullmatch(r'[\w-]{1,64}', found, re.ASCII):
        raise ValueError(f'{path}: found {found[:64]!r}, expected up to 64 letters and digits; delete it to begin a new run in wandb')
    return found


def lock(out_dir):
    """ One run per folder: nobody else gets the lock until this process ends, however it ends, or locks another folder. ValueError
    where another process holds it. """
    global held
    import fcntl
    os.makedirs(out_dir, exist_ok=True)
    if held:
        held.close()
    held = file = open(os.path.join(out_dir, 'lock'), 'w')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f'{out_dir} is in use by another run: wait for it, or choose another --out_dir') from None
    except OSError as error:
        print(f'warning: {out_dir} cannot be locked ({error}): nothing keeps a second run off it', file=sys.stderr, flush=True)


def read_config(out_dir):
    """ config.json: the knobs, checked, and argv, commit, versions, resumed_from. """
    if not (Path(out_dir) / 'config.json').is_file():
        raise ValueError(f'no run in {out_dir}: train it first, or name another --out_dir')
    return read_run_config(Path(out_dir) / 'config.json')


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


def save(out_dir, step, model_state, ema_state, optimizer_state, training_state, rng_states, keep=2, best=False):
    """ Write out_dir/step-N whole or not at all, point `latest` (and `best`) at it, then remove what is no longer kept.
    For one process, rank 0: rng_states is a list, one entry per rank. ema_state and optimizer_state may be None.
    training_state is JSON (tuples become lists), model_config among it. Returns the folder.
    OSError where it cannot be written, ValueError where weights, average or moments are not finite:
    nothing of it is left then, and the checkpoints before it are untouched. """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    folder = out_dir / f'step-{step:08d}'

    # a broken checkpoint would push the good ones out
    states = {'model': model_state, 'ema': ema_state, 'optimizer': optimizer_state}
    for name, state in states.items():
        found = first_not_finite(state, name)
        if found:
            raise ValueError(f'{folder.name} is not saved: {found} holds nan or inf')

    for stale in out_dir.glob('step-*.tmp'):  # of a process that was killed while it saved
        shutil.rmtree(stale)
    if folder.exists() and is_broken(folder):
        set_aside(folder)
    needs = int(1.01 * sum(map(n_bytes, (model_state, ema_state, optimizer_state, rng_states)))) + 2 ** 20
    has = shutil.disk_usage(out_dir).free
    cannot = f'cannot save {folder.name}: needs {needs:,} bytes, has {has:,} at {out_dir}'
    if has < needs:
        raise OSError(cannot)
    tmp = folder.with_name(folder.name + '.tmp')
    try:
        if not folder.exists():  # a step is saved once: what a resumed run would write again is the same to the bit
            tmp.mkdir()
            write_files(tmp, step, model_state, ema_state, optimizer_state, training_state, rng_states)
            os.rename(tmp, folder)
            fsync(out_dir)
        for name in ('latest', 'best') if best else ('latest',):
            write_text(out_dir / name, folder.name + '\n')
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own words for a full disk
        raise OSError(f'{cannot}: ' + str(error).partition('\n')[0]) from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    remove_old(out_dir, keep)
    return folder


def write_files(tmp, step, model_state, ema_state, optimizer_state, training_state, rng_states):
    save_file(unshared(model_state), tmp / 'model.safetensors')
    if ema_state is not None:
        save_file(unshared(ema_state), tmp / 'ema.safetensors')
    if optimizer_state is not None:
        torch.save(optimizer_state, tmp / 'optimizer.pt')
    for rank, rng_state in enumerate(rng_states):
        torch.save(rng_state, tmp / f'rng_state_rank{rank}.pt')
    umask = os.umask(0)
    os.umask(umask)
    for path in tmp.iterdir():
        path.chmod(0o666 & ~umask)             # safetensors writes for the owner's eyes only
        fsync(path)
    files = {path.name: describe(path) for path in sorted(tmp.iterdir())}
    state = {**training_state, 'step': step, 'files': files, 'sha256': ''}
    state['sha256'] = hashlib.sha256(dumps(state).encode()).hexdigest()  # of the text without it
    write_text(tmp / 'training_state.json', dumps(state))


def unshared(state):
    """ A state dict as safetensors wants it: contiguous, and tied tensors written out, each under its own name. """
    seen, out = set(), {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach().contiguous()
        out[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return out


def remove_old(out_dir, keep):
    kept = {path.name for path in steps(out_dir)[:max(keep, 1)]}
    kept |= {checkpoint_named(out_dir, name) for name in ('latest', 'best')}
    for folder in steps(out_dir):
        if folder.name not in kept:
            gone = folder.with_name(folder.name + '.tmp')  # so that half a removal is not taken for a checkpoint
            os.rename(folder, gone)
            shutil.rmtree(gone)


# ---- reading

def steps(out_dir):
    """ The checkpoint folders, newest first. """
    return sorted((p for p in Path(out_dir).glob('step-*') if STEP.fullmatch(p.name)), key=lambda p: -int(p.name[5:]))


def checkpoint_named(out_dir, which):
    """ The checkpoint that `latest` or `best` names, or `which` itself; whatever is in the file, a short text. """
    path = Path(out_dir) / which
    if which not in ('latest', 'best') or not path.is_file():
        return which
    with open(path, 'rb') as f:
        return f.read(100).decode('ascii', 'replace').strip()


def read_state(folder):
    """ training_state.json, with the form of its fields checked. """
    path = Path(folder) / 'training_state.json'
    state = read_json(path, STATE)
    if len(state.get('history', [])) > NORMS:
        raise ValueError(f'{path}: a history of {len(state["history"])} norms, expected at most {NORMS}')
    return state


def verify(folder):
    """ The training state of a checkpoint that is whole to the bit; else ValueError: file, found, expected. """
    path = Path(folder) / 'training_state.json'
    state = read_json(path)
    expected = state.get('sha256')
    found = hashlib.sha256(path.read_bytes().replace(str(expected).encode(), b'')).hexdigest()
    if found != expected:
        raise ValueError(f'{path}: found SHA-256 {found}, expected {expected}')
    files = state.get('files')
    if not isinstance(files, dict) or 'model.safetensors' not in files:
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
    """ Broken ones stay for whoever wants to look, out of the way of all functions here. """
    names = (folder.with_name(f'{folder.name}.broken{n}') for n in ('', *range(2, 1000)))
    os.rename(folder, next(name for name in names if not name.exists()))


def newest(out_dir):
    """ The folder of the newest whole checkpoint; None where the run has none yet. For one process, rank 0.
    Broken ones on the way are reported and set aside; ValueError when nothing else is left. """
    out_dir = Path(out_dir)
    for folder in steps(out_dir):
        reason = is_broken(folder)
        if not reason:
            write_text(out_dir / 'latest', folder.name + '\n')
            return folder
        print(f'warning: {folder.name} is broken and set aside: {reason}', file=sys.stderr, flush=True)
        set_aside(folder)
    if list(out_dir.glob('step-*.broken*')) or (out_dir / 'latest').exists():
        raise ValueError(f'{out_dir} has no whole checkpoint left: to start afresh, choose another out_dir or empty it')


def check_stored(path):
    """ ValueError unless a file of torch.save is a zip file with nothing compressed in it, as torch
    writes them: what is read is then never larger than the file. """
    try:
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
    except Exception as error:                 # zipfile has a dozen kinds
        raise ValueError(f'cannot read {path}: no torch file ({type(error).__name__})') from None

    size, file_size = sum(record.file_size for record in records), os.path.getsize(path)
    if size > file_size or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError(f'cannot read {path}: found records of {size:,} bytes in a file of '
                         f'{file_size:,}, expected them uncompressed, as torch.save writes them')


def read_pickle(path, map_location='cpu'):
    """ weights_only is spelled out, as the environment can flip its default. """
    check_stored(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # whatever a hostile file provokes; torch's own text advises weights_only=False
        raise ValueError(f'cannot read {path}: no torch file of tensors and plain values ({type(error).__name__})') from None


def load(folder, map_location='cpu', rank=0):
    """ {'model', 'ema', 'optimizer', 'training_state', 'rng'} of a folder that `newest` or `verify` found whole.
    None for what it has not; rng is that of this rank. """
    state = read_state(folder)

    def read(name, reader, device=map_location):
        return reader(Path(folder) / name, device) if name in state['files'] else None
    return {'model': read('model.safetensors', read_weights), 'ema': read('ema.safetensors', read_weights),
            'optimizer': read('optimizer.pt', read_pickle), 'rng': read(f'rng_state_rank{rank}.pt', read_pickle, 'cpu'),
            'training_state': state}


# the tensors that an optimizer keeps for each parameter, beside AdamW's count of steps
MOMENTS = {'AdamW': {'step', 'exp_avg', 'exp_avg_sq'}, 'Muon': {'momentum_buffer'}}


def checked_moments(path, state, optimizer, owners):
    """
    {number of a parameter: {name: tensor}} for an optimizer, from its state dict in the file at path.
    owners: [(name, parameter)] in the optimizer's order; of a sharded one the whole shape counts.
    Every tensor comes back contiguous, in memory of its own and of its parameter's dtype: the fused
    kernels read through bare pointers. ValueError where one is missing, or of another shape.
    """
    def refuse(what, expected):
        raise ValueError(f'{path}: {what}, expected {expected}; choose another --out_dir')

    checked, kinds = {}, MOMENTS[type(optimizer).__name__]
    for number, found in state['state'].items():
        if type(number) is not int or not 0 <= number < len(owners):
            refuse(f'moments of parameter {rules.short(number)}', f'a number below {len(owners)}')
        name, owner = owners[number]
        if not isinstance(found, dict) or set(found) != kinds:
            refuse(f'{name} has {rules.short(list(found))}', ', '.join(sorted(kinds)))

        checked[number] = {}
        for kind, value in found.items():
            shape = [] if kind == 'step' else list(owner.shape)
            value = torch.as_tensor(value)
            is_dense = value.layout == torch.strided and not value.is_complex()
            if not is_dense or value.dtype == torch.bool or list(value.shape) != shape:
                refuse(f'{kind} of {name} is {value.dtype} {list(value.shape)}', f'numbers {shape}')
            if kind == 'step' and not 0 <= value.item() < 2**40:
                refuse(f'{kind} of {name} is {value.item()}', 'a count of steps')
            dtype = torch.float32 if kind == 'step' else owner.dtype
            checked[number][kind] = value.detach().to(dtype).clone(memory_format=torch.contiguous_format)
    return checked


def check_average(path, name, value, parameter):
    """ ValueError unless a parameter's average has its shape: copy_ would broadcast another one. """
    if value.shape != parameter.shape:
        raise ValueError(f'{path}: found {name} {list(value.shape)}, expected {list(parameter.shape)}')


def read_weights(path, device='cpu'):
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise ValueError(f'cannot read {path}: {error}') from None


def compare_shapes(model, path):
    """ ValueError unless the names and shapes in a safetensors header are the model's. Nothing is loaded. """
    try:
        with safe_open(path, 'pt') as f:
            found = {name: list(f.get_slice(name).get_shape()) for name in f.keys()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f'cannot read {path}: {error}') from None
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted({**expected, **found}):
        if found.get(name) != expected.get(name):
            raise ValueError(f'{path}: found {name} {found.get(name)}, expected {expected.get(name)}')


def build(model_config, path):
    """ An unfilled model for the weights at path. The sizes are not trusted: the model is first built without memory, on the
    meta device, and every name and shape compared with the file's header. """
    try:
        config = ModelConfig(**model_config)
        if config.depth > 256:  # even without memory a million blocks take minutes
            raise ValueError(f'depth={config.depth} is above 256')
        with torch.device('meta'):
            model = Model(config)
    except Exception as error:  # whatever hostile values provoke
        raise ValueError(f'{path}: its model_config builds no model: {error}') from None
    compare_shapes(model, path)
    try:
        check_tables(model)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None
    return Model(config)


def check_tables(model):
    """ ValueError where a length that nothing confirms would take memory without end: position tables and masks are in no file. """
    tables, weights = n_bytes(list(model.buffers())), n_bytes(list(model.parameters()))
    if tables > max(weights, 2 ** 28):
        raise ValueError(f'seq_len={model.config.seq_len} needs tables of {tables:,} bytes beside weights of {weights:,}')


def find_checkpoint(out_dir, which='best'):
    """
    The name of a checkpoint folder, as 'step-00001000'; which is 'best', 'latest' or that name.
    A run that was saved before its first evaluation has no best yet: then it is the latest one, with a warning.
    """
    out_dir = Path(out_dir)
    read_config(out_dir)                                          # ValueError where there is no run
    if which == 'best' and not (out_dir / 'best').exists() and (out_dir / 'latest').is_file():
        if os.environ.get('RANK', '0') == '0':
            print(f'warning: {out_dir} has no best checkpoint before its first evaluation: the latest one is read',
                  file=sys.stderr, flush=True)
        which = 'latest'
    name = checkpoint_named(out_dir, which)
    if not STEP.fullmatch(name) or not (out_dir / name).is_dir():
        found = [path.name for path in steps(out_dir)]
        raise ValueError(f'{out_dir} has no checkpoint {rules.short(name)}, ' + (
            f'only {found}: choose one with --which=' if found else 'nor any other: train it to its first save'))
    return name


def load_model(out_dir, which='best', ema=True, device='cpu'):
    """ (model, config, meta) of a run: which is 'best', 'latest' or 'step-00001000', as in find_checkpoint. EMA weights where there
    are any. """
    out_dir = Path(out_dir)
    config, meta = read_config(out_dir), read_meta(out_dir / 'data')
    name = find_checkpoint(out_dir, which)
    verify(out_dir / name)
    state = read_state(out_dir / name)
    for knob, value in state.get('identity', {}).get('process', {}).items():
        if config.get(knob, value) != value:
            raise ValueError(f'{out_dir}/config.json: {knob}={config[knob]!r}, but {name} was trained with {value!r}')
    path = out_dir / name / ('ema.safetensors' if ema and 'ema.safetensors' in state['files'] else 'model.safetensors')
    model = build(state.get('model_config'), path)
    model.load_state_dict(read_weights(path))
    return model.to(device).eval(), config, meta
