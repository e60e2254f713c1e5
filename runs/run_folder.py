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
from runs.files import fsync, read_json, short, take_lock, write_text

DATA_FILES = ('meta.json', 'tokenizer.json', 'latent_stats.npz', 'encoder.npz')

# these knobs leave what a resumed run learns as it is
HARMLESS = {'dataset', 'out_dir', 'init_from', 'clusters_from', 'device', 'compile',
            'parallel', 'dist_timeout', 'master_timeout', 'preflight_only', 'keep',
            'eval_interval', 'log_interval', 'wandb_project'}

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
    """ The object in config.json of a run, its knobs checked. A knob that is not there has its
    default. ValueError names the file and the field. """
    path = Path(out_dir) / 'config.json'
    if not path.is_file():
        raise ValueError(f'no run in {out_dir}: train it first, or name another --out_dir')
    found = read_json(path, limit=2**20)
    for name, knob in read_knobs(os.path.join(HERE, 'train.py')).items():
        try:
            found[name] = knob.settle(found.get(name, knob.default))
        except ValueError as error:
            raise ValueError(f'{path}: {name}={error}') from None
    return found


def replaced_values(out_dir, config, step):
    """ The list `resumed_from` for the config.json of a run that resumes at a step. It has one
    object for each resume: its step, and the values of config.json that it replaced. Prints a line
    of those that change what is learned. """
    try:
        before = read_config(out_dir)
    except ValueError as error:
        print(f'warning: {error}: whether knobs have changed is not known', file=sys.stderr)
        return []

    # what is other now
    changed = {name: before.get(name) for name in config if before.get(name) != config[name]}
    learned = [f'{name} {old!r} -> {config[name]!r}' for name, old in changed.items()
               if name not in HARMLESS]
    if learned:
        print(f'resumed with other knobs: {", ".join(learned)}', flush=True)
    earlier = before.get('resumed_from')
    if not isinstance(earlier, list):                      # the first resume, or a damaged file
        earlier = []
    return [*earlier, {'step': step, **changed}] if changed else earlier


def begin(config, data_folder, fresh, step=0):
    """
    Makes the run folder ready for training: writes config.json and data/.
    fresh: the run has no checkpoint yet, so a data/ of an earlier attempt is replaced. A resumed
    run keeps its own. step: where a resumed run goes on. Returns the run's id in wandb, drawn once
    and then read, so that a resumed run goes on there; None where it does not log there.
    """
    # config.json
    out_dir = Path(config['out_dir'])
    out_dir.mkdir(parents=True, exist_ok=True)
    versions = {'python': platform.python_version(), 'torch': torch.__version__,
                'numpy': np.__version__}
    found = {**config, 'argv': sys.argv, 'commit': git_commit(), 'versions': versions}
    if not fresh:
        found['resumed_from'] = replaced_values(out_dir, config, step)
    write_text(out_dir / 'config.json', dumps(found))

    # data/, and no trace of a signal
    if fresh:
        shutil.rmtree(out_dir / 'data', ignore_errors=True)
    if not (out_dir / 'data').exists():
        copy_data(Path(data_folder), out_dir)
    (out_dir / 'preempted.json').unlink(missing_ok=True)

    # the id in wandb
    if not config['wandb_project']:
        return None
    path = out_dir / 'wandb_id'
    if fresh or not path.exists():
        write_text(path, secrets.token_hex(4) + '\n')
    wandb_id = path.read_text(errors='replace').strip()
    if not re.fullmatch('[0-9a-f]{8}', wandb_id):
        raise ValueError(f'{path}: found {short(wandb_id)}, expected 8 of 0-9 and a-f: remove it, '
                         'and the run begins anew in wandb')
    return wandb_id


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


# ---- one process at a time

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
