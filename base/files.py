"""
Reads files that come from outside and may be damaged: digests, JSON, arrays. (writing.py writes.)

Every mistake is a ValueError of one line that names the file; a file that is missing is a
FileNotFoundError. Another OSError says that the file cannot be read now, and nothing more.

A path from outside is opened by `regular` alone: it must lead to a file. Nothing is ever unpickled.
An array is mapped before it is copied, so reading never takes more memory than the file has bytes.
Before a file is unpacked or parsed, its size is compared with MOST_MEMORY. What a file with the
right digest says of itself is believed.
"""
import hashlib
import json
import mmap as memory_maps
import os
import re
import stat
from contextlib import contextmanager
from pathlib import Path

import numpy as np

# Bytes that one thing may take in memory when it is read: a text, a picture, a group of rows, a
# file of JSON. A small file may hold much more
MOST_MEMORY = 2**28
MOST_JSON = MOST_MEMORY // 16  # bytes of a file of JSON, which becomes up to 30 times as large

# how a file begins that lies in the place of another -> what it is, and what to do
STAND_INS = {
    rb'version https://(git-lfs|hawser)':
        'a Git LFS pointer: get the file itself, git lfs pull',
    rb'/annex/objects/':
        'a git-annex pointer: get the file itself, git annex get',
    rb'\s*<(!doctype html|\?xml|html[\s>]|head[\s>])':
        'a page of HTML or XML, as a server may send for a file that it does not have: get the '
        'file again',
    rb'([45]\d\d: [a-z ]+|(entry|repository) not found)\s*\Z':
        'what a server says of a file that it does not have: get the file again',
}

# ---- any file

def regular(path):
    """ The path itself, where it leads to a file. To read a pipe or a device might never end. """
    mode = os.stat(path).st_mode                           # FileNotFoundError where nothing is
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: 'folder', stat.S_IFIFO: 'pipe', stat.S_IFSOCK: 'socket'}
        kind = kinds.get(stat.S_IFMT(mode), 'device')
        raise ValueError(f'{path}: this is a {kind}, expected a file')
    return path


def stand_in(begin):
    """ What a file is, by its first bytes, if it lies in the place of another; else ''. """
    begin = begin.removeprefix(b'\xef\xbb\xbf')
    for pattern, words in STAND_INS.items():
        if re.match(pattern, begin, re.IGNORECASE):
            return words
    return ''


def stand_in_at(path):
    """ stand_in of a file; '' also where it cannot be read. """
    if not os.path.isfile(path):                           # a pipe would wait
        return ''
    try:
        with open(path, 'rb') as f:
            return stand_in(f.read(512))
    except OSError:
        return ''


def sha256(path):
    with open(regular(path), 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def check(path, entry, digest=True):
    """ ValueError where a file is not as its entry says. digest=False: only its size is asked. """
    found, expected = os.path.getsize(regular(path)), entry['bytes']
    if found != expected:
        words = stand_in_at(path)
        words = f'{expected}: {words}' if words else expected
        raise ValueError(f'{path}: found {found} bytes, expected {words}')
    if digest and sha256(path) != entry['sha256']:
        raise ValueError(f'{path}: its sha256 is not the one that was noted')


def one_line(error):
    """ The first line of an exception's text, or its type where it has no text. """
    return (str(error).splitlines() or [''])[0][:200] or type(error).__name__


@contextmanager
def in_one_line(what):
    """ Whatever a file provokes in another library is a ValueError of one line: `what` cannot be
    used. A panic of a library in Rust is no Exception of Python's, so it is caught here, too. """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        kind = '' if type(error) is ValueError else f'{type(error).__name__}: '
        raise ValueError(f'{what} cannot be used: {kind}{one_line(error)}') from None


def why(path, error):
    """ Why a file cannot be read, by what lies in its place, or else by an exception. """
    return stand_in_at(path) or one_line(error)


def short(value):
    """ A value in an error line: its first 60 characters. """
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + '...'


# ---- JSON

def whole_number(digits):
    """ An integer of a JSON file, which must be one that a float can hold. """
    number = int(digits)
    float(number)
    return number


def read_json(path, kind=dict, limit=MOST_JSON):
    """ The object in a JSON file of at most `limit` bytes; kind=object: whatever it holds. """
    size = os.path.getsize(regular(path))
    if size > limit:
        raise ValueError(f'cannot read {path}: {size:,} bytes, at most {limit:,} expected')
    try:
        value = json.loads(Path(path).read_bytes(), parse_int=whole_number)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f'cannot read {path}: no JSON ({why(path, error)})') from None
    if not isinstance(value, kind):
        raise ValueError(f'cannot read {path}: found a {type(value).__name__}, expected an object')
    return value


def digest_of(value):
    text = json.dumps({**value, 'sha256': ''}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_sealed(path):
    """ The object in a file of `sealed`, without its digest; ValueError if a field was changed. """
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
    if at_random and hasattr(memory_maps, 'MADV_RANDOM') and mapped.size:
        mapped._mmap.madvise(memory_maps.MADV_RANDOM)
    return mapped.view(np.ndarray)


def as_floats(array):
    """ A copy of an array of floats, of any size and byte order, in float32 or float64. """
    return np.array(array, np.float64 if array.itemsize > 4 else np.float32)


def read_array(path, dtype='floats', shape=None, mmap=False, what='array', at_random=False):
    """ The array in an .npy file. dtype, shape: what is expected; None: any shape. Floats come as
    torch has them, float32 or float64. mmap: a read-only map of the file as it is (plain). `what`
    names the array in the error. """
    try:
        array = np.lib.format.open_memmap(regular(path), mode='r')       # never reads pickles
        is_right = array.dtype.kind == 'f' if dtype == 'floats' else array.dtype == dtype
        if not is_right or shape not in (None, array.shape):
            raise ValueError(f'found {array.dtype} {short(array.shape)}, expected {dtype} '
                             f'{"of any shape" if shape is None else shape}')
        if mmap:
            return plain(array, at_random)
        return as_floats(array) if dtype == 'floats' else np.array(array)
    except Exception as error:                             # whatever a header provokes in numpy
        raise ValueError(f'{path}: {what} cannot be read ({why(path, error)})') from None


def read_arrays(path):
    """ {name: array} of an .npz file. """
    try:
        with np.load(regular(path), allow_pickle=False) as file:
            # a compressed array could unpack to any size
            if any(info.file_size > os.path.getsize(path) for info in file.zip.infolist()):
                raise ValueError('an array is compressed, expected as np.savez writes it')
            return dict(file)
    except Exception as error:                             # zipfile has a dozen kinds
        raise ValueError(f'{path}: cannot be read as .npz ({why(path, error)}); '
                         'run prepare.py again') from None
