"""
What a run folder holds beside its checkpoints (checkpoint.py).

    out/<run>/config.json    the knobs, argv, the git commit, versions; resumed_from: what each
                             resume replaced of them
    out/<run>/data/          meta.json, tokenizer.json, latent_stats.npz, encoder.npz: copies from
                             the dataset, so a run folder is complete in itself
    out/<run>/lock           held by the process that trains
    out/<run>/preempted.json which signal ended the run, where one did
    out/<run>/wandb_id       the id of the run in wandb, where it logs there
"""
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from configurator import HERE, read_knobs
from runs.files import short
from runs.files import fsync, read_json, take_lock, write_text
from runs.stages import modes_of

DATA_FILES = ('meta.json', 'tokenizer.json', 'latent_stats.npz', 'encoder.npz')

held = None                     # the open lock file of this process


# ---- config.json

def dumps(state):
    return json.dumps(state, indent=1) + '\n'


def git_commit():
    """ The commit of the code, with -dirty where files differ from it; None without git. """
    command = ['git', '-C', HERE, 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def read_config(out_dir):
    """ config.json of a run: the knobs, checked, and the other fields. """
    path = Path(out_dir) / 'config.json'
    if not path.is_file():
        raise ValueError(f'no run in {out_dir}: train it first, or name another --out_dir')
    return read_run_config(path)


def read_run_config(path):
    """ The object in a config.json, its knobs checked. A knob that is not there has its default.
    ValueError names the file and the field. """
    found = read_json(path, limit=2**20)
    for name, knob in read_knobs(os.path.join(HERE, 'train.py')).items():
        try:
            found[name] = knob.settle(found.get(name, knob.default))
        except ValueError as error:
            raise ValueError(f'{path}: {name}={error}') from None

    try:
        modes_of(found['mode'])
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None

    # a run that does not learn where a text ends has quantiles of the lengths, which rise
    lengths = found.get('lengths')
    is_missing = (lengths is None) != found['predict_length']
    is_unsorted = lengths is not None and (not lengths or lengths != sorted(lengths))
    if is_missing or is_unsorted:
        raise ValueError(f'{path}: predict_length={found["predict_length"]}, '
                         f'lengths={short(lengths)}; expected rising lengths where '
                         'predict_length is false, and else none')
    return found


def replaced_values(out_dir, config, step):
    """ The list `resumed_from` for the config.json of a run that resumes at a step. It has one
    object for each resume: its step, and the values of config.json that it replaced. """
    try:
        before = read_config(out_dir)
    except ValueError:                                     # a broken one: nothing to keep
        return []
    earlier = before.pop('resumed_from', [])
    earlier = earlier if isinstance(earlier, list) else []

    # write_run gives config as JSON has it; so must `before` be, where a default is a tuple
    changed = {}
    for name, value in json.loads(json.dumps(before)).items():
        if name in config and value != config[name]:
            changed[name] = value
    return earlier + [{'step': step, **changed}] if changed else earlier


def write_run(out_dir, config, data_folder, fresh=False, step=0):
    """
    Writes config.json and data/ before the first step.
    fresh: the run has no checkpoint yet, so a data/ of an earlier attempt is replaced. A resumed
    run keeps its own. step: where a resumed run goes on.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    if fresh and (out_dir / 'data').exists():
        shutil.rmtree(out_dir / 'data')

    # config.json
    versions = {'python': platform.python_version(), 'torch': torch.__version__,
                'numpy': np.__version__}
    config = {**config, 'argv': sys.argv, 'commit': git_commit(), 'versions': versions}
    config = json.loads(dumps(config))                     # tuples become lists
    earlier = [] if fresh else replaced_values(out_dir, config, step)
    if earlier:
        config['resumed_from'] = earlier
    write_text(out_dir / 'config.json', dumps(config))

    if not (out_dir / 'data').exists():
        copy_data(Path(data_folder), out_dir)


def begin(config, data_folder, fresh, step):
    """ Makes the run folder ready for training. fresh: the run has no checkpoint yet. step: where a
    resumed run goes on. Returns the run's id in wandb, or None where it does not log there. """
    out_dir = config['out_dir']
    write_run(out_dir, config, data_folder, fresh, step)
    (Path(out_dir) / 'preempted.json').unlink(missing_ok=True)
    return wandb_id(out_dir, fresh) if config['wandb_project'] else None


def note_preemption(out_dir, step, name):
    """ preempted.json: which signal ended the run, and after which saved step. """
    write_text(Path(out_dir) / 'preempted.json', json.dumps(dict(step=step, signal=name)))


def copy_data(data_folder, out_dir):
    """ Copies DATA_FILES to out_dir/data, which appears whole or not at all. """
    tmp = out_dir / 'data.tmp'
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir()
    for name in DATA_FILES:
        if (data_folder / name).exists() or name == 'meta.json':         # that one must be there
            shutil.copyfile(data_folder / name, tmp / name)
            fsync(tmp / name)
    fsync(tmp)
    os.rename(tmp, out_dir / 'data')
    fsync(out_dir)


# ---- one process at a time, one run in wandb

def lock(out_dir):
    """ Takes the run folder for this process until it ends, however it ends, or takes another one.
    ValueError where another process has it. """
    global held
    os.makedirs(out_dir, exist_ok=True)
    if held:
        held.close()
    held = open(os.path.join(out_dir, 'lock'), 'w')
    try:
        take_lock(held)
    except BlockingIOError:
        raise ValueError(f'{out_dir} is in use by another run: wait for it, or choose another '
                         '--out_dir') from None
    except OSError as error:
        print(f'warning: {out_dir} cannot be locked ({error}): a second run could write there too',
              file=sys.stderr, flush=True)


def wandb_id(out_dir, fresh=False):
    """ The id of the run in wandb. It is drawn once and then read, so a resumed run goes on in the
    same run there. fresh: the run has no checkpoint yet, so it begins a new one. ValueError where
    the file holds no id. """
    path = Path(out_dir) / 'wandb_id'
    if fresh or not path.exists():
        write_text(path, secrets.token_hex(4) + '\n')
    found = path.read_text(errors='replace').strip()
    if not re.fullmatch(r'[\w-]{1,64}', found, re.ASCII):
        raise ValueError(f'{path}: found {found[:64]!r}, expected up to 64 letters and digits; '
                         'delete it to begin a new run in wandb')
    return found
