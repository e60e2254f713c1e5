"""
What a script and the person at its terminal tell one another: lines, progress, and signals.
"""
import re
import signal
import sys

# What a terminal obeys: C0 but tab and newline, DEL, C1; what turns the direction of writing, or
# ends a line; half of a UTF-16 pair, which stands for a byte that is no text
OBEYED = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')

signal_seen = 0                # the signal that asks this process to leave, or 0: train.py looks


def shown(text):
    """ A text from outside as it may be printed: every character that a terminal would obey is its
    escape, as \\x1b. Newline and tab stay. """
    return OBEYED.sub(lambda found: found[0].encode('unicode_escape').decode(), str(text))


def warn(message):
    print(f'warning: {shown(message)}', file=sys.stderr, flush=True)


def progress_bar(*args, **how):
    """ tqdm's, on a terminal; elsewhere, as in the log of a job, a line a minute. """
    from tqdm import tqdm
    if not sys.stderr.isatty():
        how = dict(mininterval=60, delay=60, ncols=80) | how
    return tqdm(*args, leave=False, **how)


def note_signal(number, frame=None):
    global signal_seen
    signal_seen = number


def note_signals():
    """ From now on these signals are noted in signal_seen, and do nothing else. """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        is_of_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not is_of_nohup:
            signal.signal(number, note_signal)
