"""
Files that are written whole or not at all, and errors that name the path.

A file appears by rename when it is complete. So whoever reads a dataset never sees half a file, and
a run after a kill can trust what it finds.
"""
import errno
import hashlib
import io
import os
import shutil
import sys
from contextlib import contextmanager, suppress

from runs.files import sha256, take_lock, write_whole


@contextmanager
def names_path(path, size=0):
    """ Inside, a write that fails is an OSError that names the path. On a full disk it says how
    many bytes are needed (`size`) and how many are free. """
    try:
        yield
    except OSError as error:
        if error.filename:             # the error names its path already
            raise
        reason = f'{path}: cannot be written ({error.strerror or error})'
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(os.path.dirname(path) or '.').free
            needed = f'it needs {size:,} bytes, ' if size else ''
            reason += f': {needed}{free:,} are free there; make room and run again'
        raise OSError(reason) from None


def is_whole(path, entry):
    """ Whether a file has the size and the digest of its entry in meta.json. """
    if not os.path.isfile(path) or os.path.getsize(path) != entry['bytes']:
        return False
    return sha256(path) == entry['sha256']


def write_file(path, data):
    """ Writes the bytes and returns the file's entry for meta.json. An equal file is left alone.

    meta.json says that the dataset is complete. So it is removed before any other file changes.
    """
    entry = dict(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    if is_whole(path, entry):
        return entry

    # from here on the dataset is not complete
    meta = os.path.join(os.path.dirname(path), 'meta.json')
    with suppress(FileNotFoundError):
        os.remove(meta)

    with names_path(path, len(data)), write_whole(path) as f:
        f.write(data)
    return entry


def as_bytes(save, *arrays, **named):
    """ What np.save, np.savez or a `save` method writes. """
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


@contextmanager
def in_use(folder):
    """ Inside, no other prepare.py writes to the folder, not even one that a killed run left
    behind. Rank 0 holds the lock alone until all ranks share it: hold(is_shared). The lock leaves
    no file, and it ends with its process. """
    handle = os.open(folder, os.O_RDONLY)

    def hold(is_shared):
        try:
            take_lock(handle, is_shared)
        except BlockingIOError:
            raise ValueError(f'{folder} is in use by another prepare.py: wait for it, end it, '
                             'or choose another --out=') from None
        except OSError as error:
            if not is_shared:                      # said once, by rank 0
                print(f'warning: {folder} cannot be locked ({error}): see to it that one '
                      'prepare.py runs at a time', file=sys.stderr)
    try:
        yield hold
    finally:
        os.close(handle)
