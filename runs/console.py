"""
What a script and the person at its terminal tell one another: its output, Ctrl-C and other signals,
and the paths that it is given.

The output of a script never ends its work. A character that the terminal cannot show is printed as
its escape. Where nobody reads any more (`| head`), or the disk under the output is full, a line is
dropped and the work goes on into its files.
"""
import atexit
import errno
import io
import os
import signal
import sys
from contextlib import suppress

signal_seen = 0                # the signal that asks this process to leave, or 0: train.py looks
is_listening = False           # whether signals are noted, as train.py wants it
lost = None                    # the last error of an output but a reader that has gone


def warn(message):
    print(f'warning: {message}', file=sys.stderr, flush=True)


def progress_bar(*args, **how):
    """ tqdm's, on a terminal; elsewhere, as in the log of a job, a line a minute. """
    from tqdm import tqdm
    if not sys.stderr.isatty():
        how = dict(mininterval=60, delay=60, ncols=80) | how
    return tqdm(*args, leave=False, **how)


# ---- output and Ctrl-C, of every script

class Output(io.FileIO):
    """ stdout or stderr as a file of bytes, whose errors are noted and not raised. A reader that
    has gone away counts as a signal. """

    def write(self, data):
        global lost
        try:
            return super().write(data)
        except OSError as error:
            if error.errno == errno.EPIPE:
                note_signal(getattr(signal, 'SIGPIPE', signal.SIGTERM))
            else:
                lost = error
            return len(data)


def begin(name):
    """ At the top of a script, before the imports that take seconds; name: its __name__. A module
    that imports the script keeps its own output and Ctrl-C. """
    global signal_seen, is_listening, lost
    if name != '__main__':
        return
    signal_seen, is_listening, lost = 0, False, None       # of a script before, in one process
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:    # else it is ignored
        signal.signal(signal.SIGINT, interrupted)
    atexit.register(say_what_is_lost)
    for stream_name in ('stdout', 'stderr'):
        old = getattr(sys, stream_name)
        if old is None:                                    # it was closed (>&-)
            setattr(sys, stream_name, open(os.devnull, 'w', encoding='utf-8'))
        elif isinstance(getattr(old, 'buffer', None), (io.BufferedWriter, io.FileIO)):
            old.flush()
            raw = Output(old.fileno(), 'w', closefd=False)
            by_line = old.line_buffering or old.write_through            # or: python -u
            new = io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, 'backslashreplace',
                                   line_buffering=by_line)
            setattr(sys, stream_name, new)


def interrupted(number, frame):
    """ Ctrl-C: one line, of the first process, and exit code 130. A file that is half written has
    its name with .tmp. No exception is raised: inside of torch's C++ one may end in an abort. """
    with suppress(RuntimeError, OSError):                  # in the middle of another write
        sys.stdout.flush()
    if os.environ.get('RANK', '0') == '0':
        os.write(2, b'\ninterrupted\n' if os.isatty(2) else b'interrupted\n')
    os._exit(128 + number)


def say_what_is_lost():
    """ At the exit of a script: output that is lost is exit code 5. A training has its log. """
    sys.stdout.flush()
    if lost and not is_listening:
        print(f'error: not all output could be written ({lost.strerror}); files are whole',
              file=sys.stderr, flush=True)
        os._exit(5)


# ---- signals, of train.py

def note_signal(number, frame=None):
    global signal_seen
    signal_seen = number


def note_signals():
    """ From now on these signals are noted in signal_seen, and do nothing else. """
    global is_listening
    is_listening = True
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        is_of_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not is_of_nohup:
            signal.signal(number, note_signal)


# ---- paths

def check_writable(path):
    """ ValueError unless a file can be written there. The file itself is not touched: another
    process may be writing it. """
    folder = os.path.dirname(path) or '.'
    if not os.path.isdir(folder):
        raise ValueError(f'{path}: no such folder')
    if os.path.isdir(path):
        raise ValueError(f'{path}: this is a folder, expected the name of a file')
    try:
        if os.path.exists(path):
            os.close(os.open(path, os.O_WRONLY))
        if os.path.isfile(path) or not os.path.exists(path):             # else it is a device
            probe = f'{path}.{os.getpid()}'
            open(probe, 'xb').close()
            os.remove(probe)
    except OSError as error:
        raise ValueError(f'{path}: cannot be written ({error.strerror})') from None
