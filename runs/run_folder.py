"""
What a run folder holds beside its checkpoints (checkpoint.py), and the signals that end a run.

    out/<run>/config.json    for a reader: the knobs, argv, the git commit, versions
    out/<run>/data/          meta.json, tokenizer.json, latent_stats.npz, encoder.npz: copies from
                             the dataset, so a run folder is complete in itself
    out/<run>/lock           held by the process that trains
    out/<run>/preempted.json which signal ended the run, where one did
"""
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from configurator import HERE
from runs.writing import fsync, lock, write_text

signal_seen = 0                # the signal that asks this process to leave, or 0: train.py looks

DATA_FILES = ('meta.json', 'tokenizer.json', 'latent_stats.npz', 'encoder.npz')


def git_commit():
    """ The commit of the code, with -dirty where files differ from it; None without git. """
    command = ['git', '-C', HERE, 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def take(out_dir):
    """ The run folder is this process's own until it ends. ValueError where another has it. """
    path = Path(out_dir) / 'lock'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    lock(path)


def begin(config, data_folder, step):
    """ Makes the run folder ready for a training that has done so many steps: writes data/, and
    config.json where steps are left. At step 0 there is no checkpoint yet, so a data/ of an earlier
    attempt is replaced. A resumed run keeps its own. """
    out_dir = Path(config['out_dir'])
    found = {
        **config,
        'argv': sys.argv,
        'commit': git_commit(),
        'versions': dict(python=platform.python_version(), torch=torch.__version__,
                         numpy=np.__version__),
    }
    if step < config['max_iters']:
        write_text(out_dir / 'config.json', json.dumps(found, indent=1) + '\n')

    # data/, and no trace of a signal
    if step == 0:
        shutil.rmtree(out_dir / 'data', ignore_errors=True)
    if not (out_dir / 'data').exists():
        copy_data(Path(data_folder), out_dir)
    (out_dir / 'preempted.json').unlink(missing_ok=True)


def note_signal(number, frame=None):
    global signal_seen
    signal_seen = number


def note_signals():
    """ From now on these signals are noted in signal_seen, and do nothing else. """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        is_of_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not is_of_nohup:
            signal.signal(number, note_signal)


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
    os.rename(tmp, out_dir / 'data')
    fsync(out_dir)
