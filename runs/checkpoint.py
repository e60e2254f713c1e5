"""
Checkpoints: what makes two runs the same, how a checkpoint is read, and how a training writes it.
No code is run from one, and every broken byte is noticed.

    out/<run>/step-00001000/    model.safetensors, ema.safetensors, optimizer.safetensors,
                                rng.safetensors, training_state.json
    out/<run>/best              a text file that names a checkpoint

There is one form, whatever wrote it: one process, DDP or FSDP2. The tensors are whole, and any
number of processes reads them.

training_state.json holds size and SHA-256 of the files next to it, and its own SHA-256, so a
checkpoint can be proven whole. Shapes are compared with the file's before a model takes memory.

A kill at any moment costs at most the checkpoint that is being written: all files go into a folder
of a temporary name, are synced to the disk, and one rename makes it step-N. Only then are old
checkpoints removed.
"""
import hashlib
import json
import os
import re
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from base.console import warn, warn_once
from base.files import check, one_line, read_sealed, regular, short, why
from base.writing import entry_of, fsync, new_mode, remove_folder, sealed, write_folder, write_text
from configurator import seen_from
from data import read_meta
from model import Model, ModelConfig

# Names that are read from files must match this, so none leads out of the run folder.
STEP = re.compile(r'step-\d{8,12}', re.ASCII)
FILES = ('model.safetensors', 'ema.safetensors', 'optimizer.safetensors', 'rng.safetensors',
         'training_state.json')

# what is compared: of a text process and a latent one, of samples, of training alone
PROCESS = ['text_process', 'text_schedule', 'latent_schedule', 'latent_target']
SAMPLES = {'samples of train', 'samples of val', 'sha256 of train', 'sha256 of val'}
STATISTICS = 'sha256 of latent_stats.npz'
OF_TRAINING = {'dropout', 'optimizer'} | SAMPLES

# -----------------------------------------------------------------------------
# What is the same. An identity is a dict of values that must be equal:
#     identity_of(model_config, knobs, meta)     of a run: it goes on only as what it was
#     of_dataset(meta)                           of a dataset, a part of it
#     check_equal(where, found, expected)        ValueError: the name, and both values
# init_from needs less than a resume: without OF_TRAINING, one run may begin with another's weights.
# evaluate.py takes a dataset as the run's own if all but SAMPLES is the same.

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
    """ Tokenizer, encoder, files and samples of a dataset.

    The id of an encoder is left out: it says where the encoder lay, and its revision says which it
    is. So is bag.npy: a training begins with it, and nothing depends on it later. but: of the
    samples, files whose names end so are left out, too. """
    found = {f'tokenizer {key}': value for key, value in meta['tokenizer'].items()}
    for key, value in (meta['encoder'] or {}).items():
        if key != 'id':
            found[f'encoder {key}'] = value

    # files by their digests: an equal name says nothing of what is in them
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


def check_equal(where, found, expected, advice='', but=()):
    """ ValueError with the first difference, but of the names `but`. """
    for name, (a, b) in differences(found, expected, but).items():
        raise ValueError(f'{where}: {name} is {a!r}, expected {b!r}{advice}')

# -----------------------------------------------------------------------------
# Reading

def steps(out_dir):
    """ The checkpoint folders, newest first. """
    # by number and not by name: a step of nine digits is newer than one of eight
    folders = [path for path in Path(out_dir).glob('step-*') if STEP.fullmatch(path.name)]
    return sorted(folders, key=lambda path: -int(path.name[5:]))


def best_of(out_dir):
    """ The text in `best`, its first 100 bytes, whatever it is; '' before the first evaluation. """
    path = Path(out_dir) / 'best'
    if not path.is_file():
        return ''

    # it may be damaged, and is only compared with names: a few bytes are enough
    with open(path, 'rb') as f:
        return f.read(100).decode(errors='replace').strip()


def read_state(folder):
    """ training_state.json of a checkpoint folder. ValueError where what all readers ask of it has
    another form. """
    path = Path(folder) / 'training_state.json'
    state = read_sealed(path)

    # its digest is right, but another version of this code may have written it, or another hand
    for name, kind in dict(step=int, identity=dict, knobs=dict, files=dict).items():
        if type(state.get(name)) is not kind:
            raise ValueError(f'{path}: {name} is {short(state.get(name))}, expected '
                             f'{"an object" if kind is dict else "a whole number"}')
    for name, entry in state['files'].items():
        # these names are opened later: none but our own may stand here, or a path could lead
        # elsewhere
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

    # a folder that was renamed by hand would count as another step
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
        # one nan in the weights is soon a nan in all that comes out, so it is better found here
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f'{path}: {name} holds nan or inf, which no training saves')
    return tensors


def check_tensors(path, found, expected):
    """ ValueError unless names, shapes and dtypes are as expected: kernels read bare memory. """
    def described(tensors):
        return {name: f'{str(tensor.dtype)[6:]} {tuple(tensor.shape)}'
                for name, tensor in tensors.items()}

    check_equal(path, described(found), described(expected))


def find_checkpoint(out_dir, which='best'):
    """ The name of a checkpoint folder, as 'step-00001000'. which: 'best', 'latest' or that name.
    Before the first evaluation, and in an export, no best is named: then it is the latest. """
    best = best_of(out_dir)
    found = [path.name for path in steps(out_dir) if path.is_dir()]      # no link to nowhere
    if not found:
        raise ValueError(f'no run in {out_dir}{seen_from(out_dir)}: train it to its first '
                         'checkpoint, or name another --out_dir')

    # what `best` names may have been removed by hand: then it is not among those found
    named = {'latest': found[0], 'best': best or found[0]}
    name = named.get(which, which)
    if name not in found:
        raise ValueError(f'{out_dir} has no checkpoint {short(name)}, only {found}: choose one '
                         'with --which=')
    return name


CAME_LATER = {'parts'}         # fields of ModelConfig that earlier checkpoints lack


def config_of(identity, folder):
    """ The ModelConfig in the identity of a run, which is that of a checkpoint folder. """
    names = {field.name for field in fields(ModelConfig)}

    # what is missing would get the default of its field, which nobody has chosen. But a field that
    # came later has a default that changes nothing
    if not {*names, 'latent_target'} - CAME_LATER <= identity.keys():
        raise ValueError(f'{folder} was written by another version of this code: read it with that')
    try:
        return ModelConfig(**{name: identity[name] for name in names & identity.keys()})
    except (TypeError, ValueError) as error:               # values of other types
        raise ValueError(f'{folder}: no network has its form ({one_line(error)})') from None


def load_model(out_dir, which='best', device='cpu'):
    """ (model, knobs, meta, the checkpoint's name) of a run, with its averaged weights, if it has
    any. which: as in find_checkpoint. If a training removes it meanwhile, the next is read. """
    folder = Path(out_dir) / find_checkpoint(out_dir, which)
    try:
        return *read_model(folder, device), folder.name
    except (ValueError, OSError):
        # a training keeps few checkpoints: it may have removed this one since its name was read
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
    check_equal(f'{out_dir}/data', of_data, {name: identity.get(name) for name in of_data},
                '; copy data/ from the dataset that the run was trained on')

    # the weights that sampling reads: their average, if there is one
    path = folder / weights_file(state['files'])
    if path.name not in state['files']:
        raise ValueError(f'{folder}/training_state.json: {path.name} is not among its files')
    check(path, state['files'][path.name])
    weights = read_tensors(path)
    check_network(path, config, weights)
    model = Model(config)
    model.load_state_dict(weights)
    return model.to(device).eval(), knobs, meta


def weights_file(files):
    """ The name of the file with the weights that sampling reads, by the names of all files. """
    return 'ema.safetensors' if 'ema.safetensors' in files else 'model.safetensors'


class WithoutDraws(TorchFunctionMode):
    """ Leaves normal_ out. On the meta device there is nothing to draw, and torch would import its
    compiler for it: two seconds at the start of each command. """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.init.normal_:
            return kwargs['tensor']
        if function is torch.Tensor.normal_:
            return args[0]
        return function(*args, **kwargs)


def check_network(path, config, weights):
    """ ValueError unless a file's weights {name: tensor} are those of the network. It is tried on
    the meta device, without memory. """
    try:
        # n tensors cannot fill n + 1 blocks, and a sketch of a million would take hours
        shallow = replace(config, depth=min(config.depth, len(weights) + 1))

        # the tables of positions are in no file, and they alone are made with numbers: a row for
        # each token, as wide as a head, and in pictures one for each patch
        of_text = config.seq_len * config.width // config.heads
        n_bytes = 16 * (of_text + config.n_latents * config.latent_width)
        of_weights = sum(weight.nbytes for weight in weights.values())
        if n_bytes > max(of_weights, 2 ** 28):
            raise ValueError(f'seq_len={config.seq_len} needs more memory than the weights')
        with torch.device('meta'), WithoutDraws():
            sketch = Model(shallow)
        sketch.load_state_dict(weights, assign=True)
    except Exception as error:
        # whatever torch says of a network that it cannot make or fill: here it is a wrong file
        words = ' '.join(str(error).split())[:300]
        raise ValueError(f'{path}: found another network than this code makes: {words}') from None

# -----------------------------------------------------------------------------
# Writing

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

    # a run that had checkpoints does not begin anew in silence
    if list(out_dir.glob('step-*.broken')):
        raise ValueError(f'{out_dir} has no whole checkpoint left: to start afresh, '
                         'choose another out_dir or empty it')


def write_checkpoint(out_dir, step, tensors, training_state, keep=2, best=False):
    """ Writes out_dir/step-N whole or not at all, names it in `best` if it is, then removes the
    checkpoints that are no longer kept. Only rank 0 calls this. Returns the folder.
    tensors: {kind: {name: tensor}}, whole tensors, a file for each kind: model, ema, optimizer,
    rng. training_state: plain values that JSON has.
    OSError where it cannot be written, ValueError where a tensor is not finite. Then nothing of it
    is left, and the checkpoints before it are untouched. """
    folder = Path(out_dir) / f'step-{step:08d}'

    # a broken checkpoint would push the good ones out
    for kind, state in tensors.items():
        for name, tensor in state.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
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

    # it has the digests of the others, so it comes last
    write_text(folder / 'training_state.json', sealed({**training_state, 'files': files}))


def remove_old(out_dir, keep):
    """ Removes all checkpoints but the newest `keep` and the best. What cannot be removed is a
    warning: the new one is saved. """
    for folder in steps(out_dir)[keep:]:
        # the best one stays, however old it is
        if folder.name == best_of(out_dir):
            continue
        try:
            if not remove_folder(folder, FILES):
                warn_once(f'{folder} is kept: it holds files that no training has put there')
        except OSError as error:               # as on NFS, while another program reads it
            warn(f'{folder} cannot be removed: {one_line(error)}')
