"""
What a run folder holds besides its checkpoints (checkpoint.py), and the signals that end a run.
Nothing else that lies there is ever removed or overwritten (writing.py).

    out/<run>/config.json    for a reader: the knobs, argv, the git commit, versions
    out/<run>/data/          meta.json, tokenizer.json, latent_stats.npz, encoder.npz: copies from
                             the dataset, so a run folder is complete in itself
    out/<run>/lock           says that the folder is of a run; held by the process that trains
    out/<run>/preempted.json which signal ended the run, where one did
"""
import json
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from base.writing import RUN, Claim, fsync, remove_folder, write_folder, write_text
from configurator import HERE

signal_seen = 0                # the signal that asks this process to leave, or 0: train.py looks
earlier_handlers = {}          # {number of a signal: what it did before it was noted}

DATA_FILES = ('meta.json', 'tokenizer.json', 'latent_stats.npz', 'encoder.npz')
LOG = 'training_log.jsonl'
NAMES = ('config.json', 'data', 'best', 'preempted.json', LOG, 'step-[0-9]*')

claim = None                   # the run folder of this process, where it has one: rank 0


def git_commit():
    """ The commit of the code, with -dirty where files differ from it; None without git. """
    # a training begins without git as well, and where git hangs
    command = ['git', '-C', HERE, 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def take(out_dir):
    """ The run folder is this process's own until it ends. ValueError where another has it, or
    where it is of something else. """
    global claim
    claim = Claim(out_dir, RUN, NAMES)
    log = Path(out_dir) / LOG
    if log.exists() and log.stat().st_nlink > 1:
        raise ValueError(f'{log}: this file has another name, too (a hard link), where each line '
                         'would appear as well: make it a copy')


def check():
    """ ValueError where the run folder is no longer the one that this process took. """
    if claim:
        claim.check()


def begin(config, data_folder, step):
    """ Makes the run folder ready for a training that has done so many steps: writes data/, and
    config.json where steps are left. At step 0 there is no checkpoint yet, so a data/ of an earlier
    attempt is replaced. A resumed run keeps its own. ValueError where data/ holds anything else:
    then nothing is touched. """
    out_dir = Path(config['out_dir'])
    data = out_dir / 'data'
    if step == 0 and data.exists() and not remove_folder(data, DATA_FILES):
        raise ValueError(f'{data} holds files that no run has put there: move them away, or name '
                         'another --out_dir')

    # how the run was made, for whoever finds the folder later
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
    if not data.exists():
        copy_data(Path(data_folder), out_dir)
    (out_dir / 'preempted.json').unlink(missing_ok=True)


def note_signal(number, frame=None):
    global signal_seen
    signal_seen = number


def note_signals():
    """ From now on these signals are noted in signal_seen, and do nothing else. """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        # nohup has asked that a hangup be ignored, so it stays ignored
        is_of_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not is_of_nohup:
            earlier_handlers[number] = signal.signal(number, note_signal)


def forget_signals():
    """ From now on they do again what they did before. """
    for number, handler in earlier_handlers.items():
        # None: the earlier handler was not set from Python
        signal.signal(number, handler or signal.SIG_DFL)


def note_preemption(out_dir, step, name):
    """ preempted.json: which signal ended the run, and after which saved step. """
    write_text(Path(out_dir) / 'preempted.json', json.dumps(dict(step=step, signal=name)))


def copy_data(data_folder, out_dir):
    """ Copies DATA_FILES to out_dir/data, which appears whole or not at all. """
    with write_folder(out_dir / 'data') as tmp:
        for name in DATA_FILES:
            if (data_folder / name).exists() or name == 'meta.json':     # that one must be there
                shutil.copyfile(data_folder / name, tmp / name)
                fsync(tmp / name)
