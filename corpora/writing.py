"""
Files of a dataset, which are written whole or not at all.

A file appears by rename when it is complete. So whoever reads a dataset never sees half a file, and
a run after a kill can trust what it finds.
"""
import hashlib
import io
import os
from contextlib import suppress

from runs.files import check
from runs.writing import write_whole


def is_whole(path, entry):
    """ Whether a file has the size and the digest of its entry in meta.json. """
    try:
        check(path, entry)
    except (ValueError, FileNotFoundError):
        return False
    return True


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

    with write_whole(path) as f:
        f.write(data)
    return entry


def as_bytes(save, *arrays, **named):
    """ What np.save, np.savez or a `save` method writes. """
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()
