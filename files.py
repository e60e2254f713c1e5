"""
Files that come from outside, read with suspicion: JSON and arrays. Every mistake is a ValueError of one line that names
the file.

    read_json(path, schema=...)                             an object, of the form of a schema (rules.check_json)
    read_array(path, 'float16', (n, None, 384), mmap=True)  an .npy file; None: any length
    read_arrays(path, {'mean': ('floats', (384,))})         the arrays of an .npz file, by name

A file says itself how large its arrays are, and a damaged or hostile one lies. So the header is read first, within
MAX_HEADER bytes; its dtype and shape are compared with what is expected, and the bytes that they need with the size of
the file. Only then is anything loaded or mapped. Nothing is ever unpickled. Arrays in an .npz file must be stored
uncompressed, as np.savez writes them, so that reading never takes more memory than the file has bytes.
"""
import hashlib
import io
import json
import math
import os
import warnings
import zipfile
from pathlib import Path

import numpy as np

import rules

MAX_HEADER = 10_000            # bytes of an .npy header, numpy's own limit; ours have 128
KINDS = {'floats': 'f', 'numbers': 'biuf', 'texts': 'U'}   # what stands for several dtypes, as np.dtype.kind


# ---- any file

def sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def fsync(path):
    """ A file or a folder: a rename is on disk only when its folder is. """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path, text):
    """ Atomically: whoever reads sees the old file or the new one. """
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
    """ The first line of an exception's text, or else its name. """
    return (str(error).splitlines() or [''])[0][:200] or type(error).__name__


def read_json(path, schema=None, kind=dict, limit=2**24):
    """ The object in a JSON file (kind=list: the list), of the form of the schema where there is one. """
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
    """ ValueError, with the file's name and the field's, unless an object read from JSON has the form of a schema. """
    try:
        rules.check_json(value, schema, '')
    except ValueError as error:
        raise ValueError(f'{path}: {str(error).lstrip(".: ")}') from None


# ---- arrays

def read_header(f):
    """ (dtype, shape, whether Fortran's order, bytes of the header) at the start of an .npy file, open for reading bytes. """
    formats = np.lib.format
    start = f.read(12)
    if len(start) < 12 or start[:6] != formats.MAGIC_PREFIX:
        raise ValueError('it does not begin as an .npy file')

    # numpy would read a header of any length before it looks at the length
    version = (start[6], start[7])
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f'.npy format {version}, expected (1, 0) or (2, 0)')
    begin = 10 if version == (1, 0) else 12
    n_bytes = begin + int.from_bytes(start[8:begin], 'little')
    if not 12 < n_bytes <= MAX_HEADER:
        raise ValueError(f'a header of {n_bytes:,} bytes, at most {MAX_HEADER:,} expected')

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
    expected_dtype: a dtype, one of KINDS, or None: numbers. expected_shape: None in it stands for any length; None: any shape.
    """
    expected_dtype = 'numbers' if expected_dtype is None else expected_dtype
    if expected_dtype in KINDS:
        is_dtype = dtype.kind in KINDS[expected_dtype] and (dtype.kind == 'U' or dtype.itemsize <= 8)
    else:
        is_dtype = dtype == np.dtype(expected_dtype)
    is_shape = expected_shape is None or len(shape) == len(expected_shape) and all(
        want in (None, n) for n, want in zip(shape, expected_shape))
    if dtype.hasobject or not is_dtype or not is_shape or any(n < 0 for n in shape):
        expected = f'{expected_dtype}' + (f' {expected_shape}'.replace('None', 'n') if expected_shape is not None else '')
        raise ValueError(f'found {dtype} {rules.short(shape)}, expected {expected}')

    # whole numbers of Python: they do not overflow
    needs = math.prod(shape) * dtype.itemsize
    if needs != n_bytes:
        raise ValueError(f'{dtype} {rules.short(shape)} are {needs:,} bytes, found {n_bytes:,}')


def read_array(path, dtype=None, shape=None, mmap=False, what='array'):
    """
    The array in an .npy file, of the dtype and shape that check_header describes; `what` names it in the error.
    mmap: a read-only map of the file, as a plain ndarray, since indexing an np.memmap costs more.
    """
    try:
        with open(path, 'rb') as f:
            found, found_shape, is_fortran, n_header = read_header(f)
            check_header(found, found_shape, os.path.getsize(path) - n_header, dtype, shape)
            order = 'F' if is_fortran else 'C'
            if mmap and math.prod(found_shape):
                array = np.memmap(f, found, mode='r', offset=n_header, shape=found_shape, order=order)
                return array.view(np.ndarray)
            array = np.fromfile(f, found, count=math.prod(found_shape))
            return array.reshape(found_shape, order=order)
    except Exception as error:                               # whatever a hostile header provokes in numpy's parser
        raise ValueError(f'{path}: {what} cannot be read ({one_line(error)})') from None


def read_arrays(path, expected):
    """
    {name: array} of an .npz file. expected: {name: (dtype, shape)}, as check_header has them; a name that ends in '?' may be
    missing, and other arrays in the file are not looked at.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as file:
            names = set(file.namelist())
            for name, (dtype, shape) in expected.items():
                member = name.removesuffix('?') + '.npy'
                if member in names:
                    arrays[member[:-4]] = read_member(file, member, dtype, shape, os.path.getsize(path))
                elif not name.endswith('?'):
                    raise ValueError(f'no array {name!r} in it')
    except Exception as error:                               # zipfile has a dozen kinds
        raise ValueError(f'{path}: cannot be read as .npz ({one_line(error)}); run prepare.py again') from None
    return arrays


def read_member(file, member, dtype, shape, size):
    """ One array of an open .npz file of `size` bytes. """
    info = file.getinfo(member)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
        raise ValueError(f'{member} is compressed to {info.compress_size:,} bytes of {info.file_size:,}; '
                         'expected as np.savez writes it')
    with file.open(info) as f:
        found, found_shape, is_fortran, n_header = read_header(f)
        n_bytes = info.file_size - n_header
        check_header(found, found_shape, n_bytes, dtype, shape)
        content = bytearray(f.read(n_bytes))                 # one that can be written to, as torch wants it
        if len(content) != n_bytes:
            raise ValueError(f'{member} ends after {len(content):,} of {n_bytes:,} bytes')
    array = np.frombuffer(content, found) if n_bytes else np.empty(0, found)
    return array.reshape(found_shape, order='F' if is_fortran else 'C')
