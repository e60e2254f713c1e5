"""
meta.json, the manifest of a dataset, and whether the files are as it says.

prepare.py writes meta.json last. So where it exists, the dataset is complete. It holds the size and
the SHA-256 of every file, and a digest of itself; what it says is then believed. Every mistake is a
ValueError of one line: file, found, expected, what to do.
"""
import os

from runs.files import check, read_sealed

FORMAT = 2                     # of meta.json; a reader refuses any other
HOW_TO_MEND = ('run prepare.py again, it redoes what is broken; a run folder takes a copy from its '
               'dataset')


def dataset_folder(name):
    """ A folder under data/ by name, or a path as it is. """
    return name if os.path.sep in name else os.path.join('data', name)


def check_file(folder, name, files, digest=True):
    """ The path of a file that is as `files` says, {name: {bytes, sha256}}; else ValueError.
    digest=False: only its size is compared. """
    path = os.path.join(folder, name)
    try:
        check(path, files[name], digest)
    except ValueError as error:
        raise ValueError(f'{error}; {HOW_TO_MEND}') from None
    return path


def read_meta(folder):
    """ meta.json of a dataset folder. """
    path = os.path.join(folder, 'meta.json')
    if not os.path.isfile(path):
        raise ValueError(f'no dataset in {folder} (no meta.json): make it with `python prepare.py` '
                         f"and the config of the training, or --input=... --out={folder}; or name "
                         'another --dataset')
    try:
        meta = read_sealed(path)
        if meta['format'] != FORMAT:
            raise ValueError(f'{path}: format {meta["format"]!r}, this code reads {FORMAT}')
    except ValueError as error:
        raise ValueError(f'{error}; {HOW_TO_MEND}') from None
    return meta
