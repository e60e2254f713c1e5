"""
Files and folders that appear whole or not at all, and folders that are ours.

    with write_whole(path) as f: ...       a reader sees the old file or the new one
    with write_folder(path) as tmp: ...    a folder appears with all its files
    held = Claim(folder, RUN, names)       a folder that is written into over time: of a run, a
                                           dataset
    with Lock(folder): ...                 nobody else has it meanwhile

Nothing is overwritten or removed that we did not write. How do we know?
- Temporary names begin with TEMPORARY, and are new: no file of anybody else is called so.
- A folder that is written into over time has a file `lock` of ours, which is its mark, and its lock
  as well. Without it the folder is taken only where no name is there that we would write.
- A folder is removed only where every file in it has a name that we write.
- A file whose name the user did not choose says WRITTEN_BY, or is JSON of ours.
"""
import fcntl
import fnmatch
import json
import math
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from base.console import warn
from base.files import digest_of, regular, sha256

TEMPORARY = '.nanoLDLM-'
WRITTEN_BY = 'written by nanoLDLM'
LOCK = 'lock'                  # the mark of a folder that is ours. It says which kind of folder:
RUN = 'nanoLDLM run'
DATASET = 'nanoLDLM dataset'


# ---- files and folders that appear whole

def fsync(path):
    """ Puts a file or a folder on the disk. A rename is on the disk only when its folder is. """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def new_mode(most):
    """ The mode of a new file or folder: `most`, without what the umask takes. """
    umask = os.umask(0)
    os.umask(umask)
    return most & ~umask


@contextmanager
def write_whole(path, named=False):
    """ An open file of bytes, which takes the place of `path` when the block has ended well: a
    reader sees the old file or the new one. A file that is there keeps its mode.
    named: the user has named this path. Then a link stays a link, to the new file, and a device or
    a pipe is written as it is. Else a link is replaced, never written through. """
    if named and os.path.exists(path) and not os.path.isfile(path):
        with open(path, 'wb') as f:
            yield f
        return
    if named:
        path = os.path.realpath(path)

    # a new file next to it, with the mode of the old one
    folder, name = os.path.split(path)
    folder = folder or '.'
    mode = new_mode(0o666)
    if os.path.isfile(path) and not os.path.islink(path):
        mode = os.stat(path).st_mode & 0o777
    fd, tmp = tempfile.mkstemp(prefix=f'{TEMPORARY}{name[:100]}-', dir=folder)
    try:
        with open(fd, 'wb') as f:
            with suppress(PermissionError):                # some file systems have no modes
                os.fchmod(fd, mode)
            yield f
        fsync(tmp)
        os.replace(tmp, path)
        fsync(folder)
    finally:
        Path(tmp).unlink(missing_ok=True)


def write_text(path, text, named=False):
    with write_whole(path, named) as f:
        f.write(text.encode())


def fresh_folder(path):
    """ An empty folder of a new name next to a path. """
    path = Path(path)
    tmp = Path(tempfile.mkdtemp(prefix=f'{TEMPORARY}{path.name[:100]}-', dir=path.parent))
    with suppress(PermissionError):
        tmp.chmod(new_mode(0o777))
    return tmp


@contextmanager
def write_folder(path):
    """ An empty folder, which is called `path` when the block has ended well. Nothing may be there
    yet. """
    tmp = fresh_folder(path)
    try:
        yield tmp
        os.rename(tmp, path)
        fsync(tmp.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def remove_folder(path, names):
    """ Removes a folder whose files all have these names, and so are ours. False where anything
    else is in it: then it stays as it is. """
    is_ours = os.path.isdir(path) and not os.path.islink(path) and all(
        entry.name in names and entry.is_file(follow_symlinks=False) for entry in os.scandir(path))
    if is_ours:
        # first a rename: a folder that is half removed must not look like a whole one
        tmp = fresh_folder(path)
        os.rename(path, tmp / 'old')
        shutil.rmtree(tmp)
    return is_ours


def clear(folder, *names):
    """ Removes what killed processes have left of files and folders of these names (patterns). """
    any_ending = '?' * 8                                   # of mkstemp and mkdtemp
    for name in names:
        for path in Path(folder).glob(f'{TEMPORARY}{name}-{any_ending}'):
            # another process may remove it now, too
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


# ---- what is in a file

def json_line(value):
    """ A value of JSON in one line. JSON has no nan and no inf: they are null. """
    def without_nan(value):
        if isinstance(value, dict):
            return {key: without_nan(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [without_nan(part) for part in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value
    return json.dumps(without_nan(value), allow_nan=False)


def sealed(value):
    """ The text of a JSON file that holds the digest of all else in it. """
    return json.dumps({**value, 'sha256': digest_of(value)}, indent=1, ensure_ascii=False) + '\n'


def entry_of(path):
    """ What a manifest says of a file. """
    return {'bytes': os.path.getsize(path), 'sha256': sha256(path)}


# ---- may it be written?

def check_writable(path):
    """ ValueError unless a file can be written there: it is asked before hours of work. """
    folder = os.path.dirname(path) or '.'
    if not os.path.isdir(folder):
        raise ValueError(f'{path}: no such folder')
    if os.path.isdir(path):
        raise ValueError(f'{path}: this is a folder, expected the name of a file')
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f'{path}: cannot be written')


def check_ours(path, advice):
    """ ValueError where a file is there whose first bytes do not say that we wrote it. """
    if not os.path.lexists(path):
        return
    with open(regular(path), 'rb') as f:
        if WRITTEN_BY.encode() not in f.read(4096):
            raise ValueError(f'{path} is there, and no script of nanoLDLM wrote it: move it away'
                             f'{advice}')


# ---- folders that one process has at a time

class Held:
    """ A file or folder that is kept open until this process ends, or until the end of the block:
    as long as it is, check() tells whether its path still leads to it. """

    def __init__(self, path):
        self.path = path
        # NFS locks a file only where it is open for writing
        is_file = os.path.isfile(path) and os.access(path, os.W_OK)
        self.fd = os.open(path, os.O_RDWR if is_file else os.O_RDONLY)

    def is_here(self):
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:                                    # nothing is known: whoever writes sees
            return True

    def check(self):
        """ ValueError where it was removed, moved, or replaced by another. """
        if not self.is_here():
            raise ValueError(f'{self.path} was removed, moved or replaced meanwhile: this process '
                             'writes nothing more there')

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.close(self.fd)


class Lock(Held):
    """ A file or folder that this process has: until it ends, however it ends, or until the end of
    the block, `with Lock(path):`. shared: together with others that share it. wait: for its turn;
    else ValueError where another process has it. """

    def __init__(self, path, shared=False, wait=False):
        super().__init__(path)
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.fd, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.fd)
            raise ValueError(f'{path} is in use by another process: wait for it, end it, or choose '
                             'another folder') from None
        except OSError as error:                           # Lustre may be mounted without locks
            warn(f'{path} cannot be locked ({error}): a second process could write there too')


class Claim(Lock):
    """ A folder that we write into over time, held by this process: until it ends, however it ends,
    or until the end of the block. It is made where it is missing; where a block then fails before
    anything is written, no trace is left.
    mark: what its file `lock` says. names: patterns of the names that we write there.
    ValueError where another process has it, or where it is not ours: it has such a name and no such
    mark, or such a name is a link, a pipe or a device. Then nothing is touched. """

    made = {}                      # {a lock that this process has made: folders made for it}

    def __init__(self, folder, mark, names, shared=False):
        self.folder = folder = str(folder)
        missing = [str(path) for path in (Path(folder), *Path(folder).parents) if not path.exists()]
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, LOCK)

        # is it ours?
        found = sorted(name for name in os.listdir(folder)
                       if any(fnmatch.fnmatchcase(name, pattern) for pattern in (LOCK, *names)))
        if found and not has_mark(path, mark):
            raise ValueError(f'{folder} holds {", ".join(found[:3])}, and no file {LOCK} with the '
                             f'words {mark!r}: it is not known to be ours, so nothing is written '
                             'there; name another folder')

        # the mark, and the lock
        if not found:
            make_mark(path, mark)
            self.made[path] = missing
        super().__init__(path, shared)
        try:
            self.check()
            for name in found:
                check_plain(os.path.join(folder, name))
        except ValueError:
            os.close(self.fd)
            raise
        if not shared:
            clear(folder, LOCK, *names)

    def __exit__(self, failure=None, *error):
        is_ours = self.path in self.made and self.is_here()
        with suppress(OSError):                            # another process may begin there now
            if failure and is_ours and os.listdir(self.folder) == [LOCK]:
                os.unlink(self.path)
                for folder in self.made.pop(self.path):
                    os.rmdir(folder)
        super().__exit__()


def check_plain(path):
    """ ValueError for a link, a pipe or a device: what is written there would go elsewhere. """
    is_plain = os.path.isdir(path) or os.path.isfile(path) or not os.path.lexists(path)
    if os.path.islink(path) or not is_plain:
        raise ValueError(f'{path}: this is a link, a pipe or a device, which no script of nanoLDLM '
                         'makes: move it away, or name another folder')


def has_mark(path, mark):
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    with open(path, 'rb') as f:
        return f.read(100) == f'{mark}\n'.encode()


def make_mark(path, mark):
    """ The file appears with its text, or stays as it is where another process made it now. """
    tmp = fresh_folder(path) / LOCK
    try:
        tmp.write_text(f'{mark}\n')
        os.link(tmp, path)
    except (FileExistsError, FileNotFoundError):           # whoever has the lock may remove tmp
        pass
    except OSError:                                        # a file system without hard links
        os.replace(tmp, path)
    finally:
        shutil.rmtree(tmp.parent, ignore_errors=True)
