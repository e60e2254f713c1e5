"""
Files that come from outside: JSON and arrays, which may be damaged or hostile. Every mistake is a
ValueError of one line that names the file.

    read_json(path, schema=...)                             an object, checked by check_json
    read_array(path, 'float16', (n, None, 384), mmap=True)  an .npy file; None: any length
    read_arrays(path, {'mean': ('floats', (384,))})         the arrays of an .npz file, by name

The header of a file says how large its arrays are, and it may lie. So the header is read first, at
most MAX_HEADER bytes of it. Its dtype and shape are compared with what is expected, and the bytes
that they need with the size of the file. Only then is anything loaded or mapped. Nothing is ever
unpickled. The arrays in an .npz file must be stored uncompressed, as np.savez writes them, so
reading never takes more memory than the file has bytes.
"""
import hashlib
import io
import json
import math
import mmap
import os
import warnings
import zipfile
from pathlib import Path

import numpy as np

from runs import rules

IS_WINDOWS = os.name == 'nt'
MAX_HEADER = 10_000             # bytes of an .npy header, numpy's own limit; ours have 128

# names for several dtypes: the letters of np.dtype.kind
KINDS = {'floats': 'f', 'numbers': 'biuf', 'texts': 'U'}


# ---- any file

def sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def fsync(path):
    """ Puts a file or a folder on the disk. A rename is on the disk only when its folder is. """
    flags = os.O_RDONLY
    if IS_WINDOWS:                             # it flushes no folder, and no file that is only read
        if os.path.isdir(path):
            return
        flags = os.O_RDWR
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def take_lock(file, is_shared=False):
    """ Locks an open file or folder, until it is closed or the process ends. It does not wait:
    BlockingIOError where another process has the lock, another OSError where there are no locks.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError('this system has no flock') from None        # Windows
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    fcntl.flock(file, kind | fcntl.LOCK_NB)


def write_text(path, text):
    """ Writes a file atomically: a reader sees the old file or the new one. """
    path = Path(path)
    tmp = path.with_name(path.name + '.tmp')
    try:
        tmp.write_text(text)
        fsync(tmp)
        os.replace(tmp, path)
        fsync(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


def one_line(error):
    """ The first line of an exception's text, or its type where it has no text. """
    return (str(error).splitlines() or [''])[0][:200] or type(error).__name__


def read_json(path, schema=None, kind=dict, limit=2**24):
    """ The object in a JSON file of at most `limit` bytes; kind=list: the list. With a schema its
    form is checked (check_json). """
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
    if schema is not None:
        check_fields(value, schema, path)
    return value


def check_fields(value, schema, path):
    """ ValueError, with the names of file and field, unless an object from JSON has the form of a
    schema. """
    try:
        check_json(value, schema, '')
    except ValueError as error:
        raise ValueError(f'{path}: {str(error).lstrip(".: ")}') from None


def check_json(value, schema, where):
    """
    ValueError unless a value read from JSON has the form of a schema. `where` names it in the
    error.
        'int [0, 10]'            a rule
        {'a': ..., 'b?': ...}    an object with a field a, and perhaps b; other fields do not matter
        {'*': ...}               an object of any fields, each of this form
        [...]                    a list, each element of this form
        (None, {...})            null, or this form
    """
    if isinstance(schema, tuple):
        if value is not None:
            check_json(value, schema[1], where)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise ValueError(f'{where}: {rules.short(value)}, expected a list')
        for i, element in enumerate(value):
            check_json(element, schema[0], f'{where}[{i}]')
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            raise ValueError(f'{where}: {rules.short(value)}, expected an object')
        check_object(value, schema, where)
    elif not rules.follows(value, schema):
        raise ValueError(f'{where}: {rules.short(value)}, expected {schema}')


def check_object(value, schema, where):
    """ check_json of an object. """
    for key, form in schema.items():
        name = key.removesuffix('?')
        if key == '*':
            for field in value:
                check_json(value[field], form, f'{where}.{rules.short(field)}')
        elif name in value:
            check_json(value[name], form, f'{where}.{name}')
        elif name == key:
            raise ValueError(f'{where}: no field {name!r}')


# ---- arrays

def read_header(f):
    """ (dtype, shape, whether in Fortran's order, bytes of the header) of an .npy file, open at its
    start. """
    formats = np.lib.format
    start = f.read(12)
    if len(start) < 12 or start[:6] != formats.MAGIC_PREFIX:
        raise ValueError('it does not begin as an .npy file')

    # the length of the header; numpy would read a header of any length before it looks at it
    version = (start[6], start[7])
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f'.npy format {version}, expected (1, 0) or (2, 0)')
    begin = 10 if version == (1, 0) else 12
    n_bytes = begin + int.from_bytes(start[8:begin], 'little')
    if not 12 < n_bytes <= MAX_HEADER:
        raise ValueError(f'a header of {n_bytes:,} bytes, at most {MAX_HEADER:,} expected')

    # numpy parses it
    header = io.BytesIO(start + f.read(n_bytes - 12))
    header.seek(8)
    read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        shape, is_fortran, dtype = read(header, max_header_size=MAX_HEADER)
    return dtype, tuple(map(int, shape)), is_fortran, n_bytes


def check_header(dtype, shape, n_bytes, expected_dtype, expected_shape):
    """
    ValueError unless dtype and shape are as expected and fill the n_bytes that follow the header.
    expected_dtype: a dtype, one of KINDS, or None: numbers.
    expected_shape: a None in it stands for any length; None: any shape.
    """
    if expected_dtype is None:
        expected_dtype = 'numbers'
    if expected_dtype in KINDS:
        is_small = dtype.kind == 'U' or dtype.itemsize <= 8
        is_dtype = dtype.kind in KINDS[expected_dtype] and is_small
    else:
        is_dtype = dtype == np.dtype(expected_dtype)

    is_shape = True
    if expected_shape is not None:
        is_shape = len(shape) == len(expected_shape)
        is_shape &= all(want in (None, n) for n, want in zip(shape, expected_shape))

    if dtype.hasobject or not is_dtype or not is_shape or any(n < 0 for n in shape):
        expected = str(expected_dtype)
        if expected_shape is not None:
            expected += f' {expected_shape}'.replace('None', 'n')
        raise ValueError(f'found {dtype} {rules.short(shape)}, expected {expected}')

    # Python's whole numbers do not overflow
    needs = math.prod(shape) * dtype.itemsize
    if needs != n_bytes:
        raise ValueError(f'{dtype} {rules.short(shape)} are {needs:,} bytes, found {n_bytes:,}')


def map_array(f, dtype, shape, offset=0, order='C', at_random=False):
    """ A read-only map of an open file that is not empty, as a plain ndarray: indexing an np.memmap
    costs more. at_random: its rows will be read far from each other. So Linux reads no page beyond
    those asked for; by default it reads up to megabytes around each. """
    pages = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    if at_random and hasattr(mmap, 'MADV_RANDOM'):
        pages.madvise(mmap.MADV_RANDOM)
    array = np.frombuffer(pages, dtype, count=math.prod(shape), offset=offset)
    return array.reshape(shape, order=order)


def read_array(path, dtype=None, shape=None, mmap=False, what='array', at_random=False):
    """ The array in an .npy file. dtype, shape: what is expected, as in check_header; `what` names
    the array in the error. mmap: a read-only map of the file (map_array). """
    try:
        with open(path, 'rb') as f:
            found, found_shape, is_fortran, n_header = read_header(f)
            check_header(found, found_shape, os.path.getsize(path) - n_header, dtype, shape)
            order = 'F' if is_fortran else 'C'
            if mmap and math.prod(found_shape):
                return map_array(f, found, found_shape, n_header, order, at_random)
            array = np.fromfile(f, found, count=math.prod(found_shape))
            return array.reshape(found_shape, order=order)
    except Exception as error:                             # whatever a header provokes in numpy
        raise ValueError(f'{path}: {what} cannot be read ({one_line(error)})') from None


def read_arrays(path, expected):
    """ {name: array} of an .npz file. expected: {name: (dtype, shape)}, as in check_header. A name
    that ends in '?' may be missing. Other arrays in the file are not looked at. """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as file:
            names = set(file.namelist())
            for name, (dtype, shape) in expected.items():
                member = name.removesuffix('?') + '.npy'
                if member in names:
                    size = os.path.getsize(path)
                    arrays[member[:-4]] = read_member(file, member, dtype, shape, size)
                elif not name.endswith('?'):
                    raise ValueError(f'no array {name!r} in it')
    except Exception as error:                             # zipfile has a dozen kinds
        raise ValueError(f'{path}: cannot be read as .npz ({one_line(error)}); '
                         'run prepare.py again') from None
    return arrays


def read_member(file, member, dtype, shape, size):
    """ One array of an open .npz file of `size` bytes. """
    info = file.getinfo(member)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
        raise ValueError(f'{member} is compressed to {info.compress_size:,} bytes of '
                         f'{info.file_size:,}; expected as np.savez writes it')

    # the content as a bytearray, not bytes: torch wants an array that can be written to
    with file.open(info) as f:
        found, found_shape, is_fortran, n_header = read_header(f)
        n_bytes = info.file_size - n_header
        check_header(found, found_shape, n_bytes, dtype, shape)
        content = bytearray(f.read(n_bytes))
        if len(content) != n_bytes:
            raise ValueError(f'{member} ends after {len(content):,} of {n_bytes:,} bytes')
    array = np.frombuffer(content, found) if n_bytes else np.empty(0, found)
    return array.reshape(found_shape, order='F' if is_fortran else 'C')
