"""
Files that appear whole or not at all, and folders that one process has at a time.

    with write_whole(path) as f: ...       a reader sees the old file or the new one
    lock(folder)                           nobody else has it until this process ends
"""
import fcntl
import json
import os
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from runs.files import digest_of, sha256


def fsync(path):
    """ Puts a file or a folder on the disk. A rename is on the disk only when its folder is. """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


def sealed(value):
    """ The text of a JSON file that holds the digest of all else in it. """
    return json.dumps({**value, 'sha256': digest_of(value)}, indent=1, ensure_ascii=False) + '\n'


def entry_of(path):
    """ What a manifest says of a file. """
    return {'bytes': os.path.getsize(path), 'sha256': sha256(path)}


def check_writable(path):
    """ ValueError unless a file can be written there: it is asked before hours of work. """
    folder = os.path.dirname(path) or '.'
    if not os.path.isdir(folder):
        raise ValueError(f'{path}: no such folder')
    if os.path.isdir(path):
        raise ValueError(f'{path}: this is a folder, expected the name of a file')
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f'{path}: cannot be written')


@contextmanager
def new_folder(path):
    """ Makes a folder, and those above it. Where the block fails, those that it has made and that
    are still empty go again. """
    made = []
    above = Path(path).absolute()
    while not above.exists():
        made.append(above)
        above = above.parent
    os.makedirs(path, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in made:                                    # the deepest first
            with suppress(OSError):                            # it is not empty
                folder.rmdir()
        raise


def lock(path, shared=False, wait=False):
    """ Takes a file or folder for this process: until it ends, however it ends, or until the end of
    the block, `with lock(path):`. shared: together with others that share it. wait: for its turn;
    else ValueError where another process has it. """
    fd = os.open(path, os.O_RDONLY)
    held = ExitStack()
    held.callback(os.close, fd)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise ValueError(f'{path} is in use by another process: wait for it, end it, or choose '
                         'another folder') from None
    except OSError as error:                               # Lustre may be mounted without locks
        print(f'warning: {path} cannot be locked ({error}): a second process could write there too',
              file=sys.stderr, flush=True)
    return held
