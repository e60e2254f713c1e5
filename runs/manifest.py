"""
What a dataset says of itself, and a run of its dataset in data/: the manifest, meta.json, whether
the files are as it says, and the statistics of the latents.

prepare.py writes meta.json last. So where it exists, the dataset is complete. It holds the size and
the SHA-256 of every file, and a digest of itself; what it says is then believed.
"""
import os

import torch

from configurator import here_or_beside, seen_from
from runs.files import check, read_arrays, read_sealed

FORMAT = 2                     # of meta.json; a reader refuses any other
HOW_TO_MEND = ('run prepare.py again, it redoes what is broken; a run folder takes a copy from its '
               'dataset')
DEAD = 1e-3       # a dimension is dead if its std is below DEAD * median std; MiniLM has three


def dataset_folder(name):
    """ A folder under data/ by name, or a path; where it is not here, beside the scripts. """
    is_path = os.path.sep in name or name in ('.', '..')
    return here_or_beside(name if is_path else os.path.join('data', name))


def check_file(folder, name, files, digest=True):
    """ The path of a file that is as `files` says, {name: {bytes, sha256}}; else ValueError.
    digest=False: only its size is compared. """
    path = os.path.join(folder, name)
    try:
        check(path, files[name], digest)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f'{error}; {HOW_TO_MEND}') from None
    return path


def read_meta(folder):
    """ meta.json of a dataset folder. """
    path = os.path.join(folder, 'meta.json')
    if not os.path.isfile(path):
        raise ValueError(f'no dataset in {folder}{seen_from(folder)} (no meta.json): make it with '
                         '`python prepare.py` and the config of the training, or name another '
                         '--dataset')
    try:
        meta = read_sealed(path)
        if meta['format'] != FORMAT:
            raise ValueError(f'{path}: format {meta["format"]!r}, this code reads {FORMAT}')
    except ValueError as error:
        raise ValueError(f'{error}; delete the dataset and run prepare.py again; a run folder '
                         'takes a copy from its dataset') from None
    return meta

# -----------------------------------------------------------------------------
# Latent statistics: the networks see latents of unit variance, whatever the encoder's own scale

class LatentStats:
    """ z = live * (raw - mean) / std and back, per dimension. A dead dimension has live = 0: the
    network sees 0 there, and the way back gives its mean. """

    def __init__(self, mean, std):
        std = torch.as_tensor(std, dtype=torch.float32)
        is_live = (std > 0) & (std >= DEAD * std.median())
        self.mean = torch.as_tensor(mean, dtype=torch.float32)           # (D,)
        self.std = torch.where(is_live, std, 1.0)                        # (D,), 1 where dead
        self.live = is_live.float()                                      # (D,), 0 where dead

    def standardise(self, raw):
        """ raw (..., D) on the host: a tensor, or an array as an encoder may give it. """
        return (torch.as_tensor(raw).float() - self.mean) / self.std * self.live

    def destandardise(self, z):
        return z.float() * self.live * self.std + self.mean


def load_stats(folder, meta=None):
    """ LatentStats of a dataset folder, or of a run's data/; None if it is text only. """
    meta = meta or read_meta(folder)
    if meta['latent_shape'] is None:
        return None
    return LatentStats(**read_arrays(check_file(folder, 'latent_stats.npz', meta['files'])))
