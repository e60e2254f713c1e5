"""
Files that come from outside: JSON and arrays, which may be damaged. Every mistake is a ValueError
of one line that names the file.

    read_json(path)                                         an object
    read_sealed(path)                                       an object that holds its own digest
    read_array(path, 'float16', (n, N, D), mmap=True)       an .npy file
    read_arrays(path)                                       the arrays of an .npz file, by name

Nothing is ever unpickled, and an array is mapped before it is copied, so reading never takes more
memory than the file has bytes. What a file with the right digest says of itself is believed.
"""
import fcntl
import hashlib
import json
import os
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np


# ---- any file

def sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def fsync(path):
    """ Puts a file or a folder on the disk. A rename is on the disk only when its folder is. """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def take_lock(file, is_shared=False, wait=False):
    """ Locks an open file or folder, until it is closed or the process ends. BlockingIOError where
    another process has the lock, unless it shall wait; another OSError where there are no locks.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)


@contextmanager
def alone_in(folder):
    """ Inside, no other process is inside; it waits for its turn. Where there are no locks it goes
    on without. """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            take_lock(handle, wait=True)
        yield
    finally:
        os.close(handle)


@contextmanager
def write_whole(path):
    """ An open file of bytes, which takes the place of `path` when the block has ended well: a
    reader sees the old file or the new one. A device or a pipe is written as it is. """
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, 'wb') as f:
            yield f
        return
    path = os.path.realpath(path)                              # a link stays a link
    tmp = path + '.tmp'
    try:
        with open(tmp, 'wb') as f:
            yield f
        fsync(tmp)
        os.replace(tmp, path)
        fsync(os.path.dirname(path))
    finally:
        Path(tmp).unlink(missing_ok=True)


def write_text(path, text):
    with write_whole(path) as f:
        f.write(text.encode())


def check_writable(path):
    """ ValueError unless a file can be written there: it is asked before hours of work. """
    folder = os.path.dirname(path) or '.'
    if not os.path.isdir(folder):
        raise ValueError(f'{path}: no such folder')
    if os.path.isdir(path):
        raise ValueError(f'{path}: this is a folder, expected the name of a file')
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f'{path}: cannot be written')


def one_line(error):
    """ The first line of an exception's text, or its type where it has no text. """
    return (str(error).splitlines() or [''])[0][:200] or type(error).__name__


def short(value):
    """ A value in an error line: its first 60 characters. """
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + '...'


# ---- JSON

def read_json(path, kind=dict, limit=2**26):
    """ The object in a JSON file of at most `limit` bytes; kind=list: the list. """
    try:
        size = os.path.getsize(path)
        if size > limit:
            raise ValueError(f'{size:,} bytes, at most {limit:,} expected')
        value = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f'cannot read {path}: no JSON ({one_line(error)})') from None
    if not isinstance(value, kind):
        expected = 'an object' if kind is dict else 'a list'
        raise ValueError(f'cannot read {path}: found a {type(value).__name__}, expected {expected}')
    return value


def digest_of(value):
    text = json.dumps({**value, 'sha256': ''}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(value):
    """ The text of a JSON file that holds the digest of all else in it. """
    return json.dumps({**value, 'sha256': digest_of(value)}, indent=1, ensure_ascii=False) + '\n'


def read_sealed(path):
    """ The object in a file that `sealed` made, without its digest. ValueError where a field was
    changed. """
    value = read_json(path)
    found, expected = digest_of(value), value.pop('sha256', None)
    if found != expected:
        raise ValueError(f'{path}: found SHA-256 {found}, expected {short(expected)}')
    return value


# ---- arrays

def plain(mapped, at_random=False):
    """ A memory map as a plain ndarray: indexing an np.memmap costs more. at_random: its rows will
    be read far from each other. So Linux reads no page beyond those asked for; by default it reads
    up to megabytes around each. """
    import mmap
    if at_random and mapped.size:
        mapped._mmap.madvise(mmap.MADV_RANDOM)
    return mapped.view(np.ndarray)


def read_array(path, dtype='numbers', shape=None, mmap=False, what='array', at_random=False):
    """ The array in an .npy file. dtype, shape: what is expected; None: any shape. mmap: a
    read-only map of the file (plain). `what` names the array in the error. """
    try:
        array = np.load(path, mmap_mode='r', allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError('an .npz file, expected .npy')
        is_right = array.dtype.kind in 'biuf' if dtype == 'numbers' else array.dtype == dtype
        if not is_right or shape not in (None, array.shape):
            raise ValueError(f'found {array.dtype} {short(array.shape)}, expected {dtype} '
                             f'{"of any shape" if shape is None else shape}')
        return plain(array, at_random) if mmap else np.array(array)
    except Exception as error:                             # whatever a header provokes in numpy
        raise ValueError(f'{path}: {what} cannot be read ({one_line(error)})') from None


def read_arrays(path):
    """ {name: array} of an .npz file. """
    try:
        with np.load(path, allow_pickle=False) as file:
            # a compressed array could unpack to any size
            if any(info.file_size > os.path.getsize(path) for info in file.zip.infolist()):
                raise ValueError('an array is compressed, expected as np.savez writes it')
            return dict(file)
    except Exception as error:                             # zipfile has a dozen kinds
        raise ValueError(f'{path}: cannot be read as .npz ({one_line(error)}); '
                         'run prepare.py again') from None
