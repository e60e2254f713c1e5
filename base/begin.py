"""
How a script begins. It is imported before torch, and only where the script is the program:

    if __name__ == '__main__':
        import base.begin

It sets what must be set before torch is loaded, and what holds until the script ends:
    a thread that waits spins only for a moment, so that other programs get the core
    Ctrl-C is one line on stderr, no traceback; and so is an output that takes no more
    a character that an output cannot show is escaped; when nobody reads any more, nothing is
        written
    RANK, LOCAL_RANK and WORLD_SIZE in the environment are whole numbers that go together
"""
import errno
import io
import os
import signal
import sys

from base.console import stop

# ---- threads

# torch's threads wait for each other at the end of every parallel loop, many times in a step. By
# default a waiting thread spins 300,000 times, for milliseconds, and takes the core from whoever
# has work to do; on a busy machine that is often the thread it waits for. 10,000 spins are as fast
# on free cores, and many times as fast on busy ones. Fewer gain more there, and cost a fifth of the
# speed on free cores (docs/speed.md, "On a CPU").
#
# This is the name that GNU's libgomp has for it, which the wheels of torch for Linux bring along.
# Others pass it over: libiomp5 and LLVM's libomp (torch of conda with MKL, torch for macOS) call it
# KMP_BLOCKTIME, in milliseconds. We have measured neither, so they keep their defaults.
if not {'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'} & os.environ.keys():
    os.environ['GOMP_SPINCOUNT'] = '10000'

# ---- stdout and stderr

class Unwritable(OSError):
    """ stdout takes no more. It is said once. """


class Outlet(io.FileIO):
    """ The descriptor of stdout or stderr. """

    def write(self, data):
        """ As io.FileIO. Where it fails, nothing is written from then on: what was printed must
        not fail again when Python ends. """
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)

            # after `| head`, or in a terminal that was closed: the work goes on, unseen
            is_unread = error.errno in (errno.EPIPE, errno.EIO)
            if not is_unread and self.fileno() == 1:
                raise Unwritable(f'stdout cannot be written: {error.strerror}') from None
            return len(data)


def outlet(file):
    """ A text file in the place of stdout or stderr. Its lines appear at once, also in a pipe. """
    if type(file) is not io.TextIOWrapper:                 # closed, or of a notebook
        return file
    file.flush()
    buffer = raw = Outlet(file.fileno(), 'w', closefd=False)
    if not file.write_through:                             # else it is python -u, as of torchrun
        buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, file.encoding, 'backslashreplace', line_buffering=True,
                            write_through=file.write_through)

# ---- how it may end

def on_interrupt(number, frame):
    """ Ctrl-C is a KeyboardInterrupt, but it ends an import at once: there nothing is half written,
    and Python's own callbacks, of which an import runs many, would swallow the exception. """
    while frame:
        if frame.f_code.co_filename.startswith('<frozen importlib'):
            os.write(2, b'error: interrupted\n')
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def last_words(kind, error, trace):
    """ sys.excepthook: one line where nobody has made a mistake in the code. """
    if issubclass(kind, KeyboardInterrupt):
        stop('interrupted', 130)
    if issubclass(kind, Unwritable):
        stop(error, 2)
    sys.__excepthook__(kind, error, trace)

# ---- which of several processes this is (base/distributed.py)

def number(name, default, least, most):
    """ A variable of the environment as a whole number. """
    text = os.environ.get(name) or default
    is_whole = text.isascii() and text.isdigit() and len(text) < 10
    if not is_whole or not least <= int(text) <= most:
        stop(f'{name}={text[:60]!r} in the environment, expected a whole number from {least} '
             f'to {most}: a launcher such as torchrun sets it; for one process, unset RANK, '
             'LOCAL_RANK and WORLD_SIZE', 2)
    return int(text)


def check_launcher():
    """ RANK counts only with WORLD_SIZE. Alone it was left in the shell by another job. """
    world = number('WORLD_SIZE', '1', 1, 10**9 - 1)
    if world > 1:
        number('RANK', '', 0, world - 1)
    elif os.environ.pop('RANK', '0') not in ('', '0'):
        print('warning: RANK is set, but WORLD_SIZE is not above 1: RANK is passed over, and this '
              'is a run of one process', file=sys.stderr)
    number('LOCAL_RANK', '0', 0, 10**9 - 1)


sys.excepthook = last_words
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:        # else it is ignored
    signal.signal(signal.SIGINT, on_interrupt)
sys.stdout = outlet(sys.stdout)
sys.stderr = outlet(sys.stderr)
check_launcher()
