"""
What a script tells the person at its terminal: lines, errors and progress.
"""
import contextlib
import functools
import os
import re
import shutil
import sys

# What a terminal obeys: C0 but tab and newline, DEL, C1; what turns the direction of writing, or
# ends a line; half of a UTF-16 pair, which stands for a byte that is no text
OBEYED = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')


def shown(text):
    """ A text from outside as it may be printed: every character that a terminal would obey is its
    escape, as \\x1b. Newline and tab stay. """
    return OBEYED.sub(lambda found: found[0].encode('unicode_escape').decode(), str(text))


def warn(message):
    print(f'warning: {shown(message)}', file=sys.stderr, flush=True)


@functools.cache
def warn_once(message):
    """ Warns on the first process, and of the same thing once: a file is read more than once, by
    each process. """
    if os.environ.get('RANK', '0') == '0':
        warn(message)


def progress_bar(*args, **how):
    """ tqdm's, on a terminal; elsewhere, as in the log of a job, a line a minute. """
    from tqdm import tqdm
    if not sys.stderr.isatty():
        how = dict(mininterval=60, delay=60, ncols=80) | how
    return tqdm(*args, leave=False, **how)


def print_table(rows):
    """ Rows of texts, of which the first has the titles. The first column is set to the left, the
    others to the right. Columns that do not fit in the width of the terminal (100 characters where
    there is none) follow in a block of their own, without the rows that are empty there. """
    width = shutil.get_terminal_size((100, 24)).columns
    first = 1 + max(len(row[0]) for row in rows)
    each = 2 + max(len(cell) for row in rows for cell in row[1:])

    # block by block
    n_fit = max(1, (width - first) // each)
    for i in range(1, len(rows[0]), n_fit):
        if i > 1:
            print()
        for row in rows:
            cells = row[i:i + n_fit]
            if any(cells):
                line = row[0].ljust(first) + ''.join(cell.rjust(each) for cell in cells)
                print(line.rstrip())


# ---- errors

def say_error(message):
    """ One line on stderr. """
    print('error: ' + shown(' '.join(str(message).splitlines())), file=sys.stderr, flush=True)


def stop(message, code=2):
    """ Leave with one line on stderr. SystemExit('text') would do the same, but with code 1. """
    say_error(message)
    raise SystemExit(code)


@contextlib.contextmanager
def stop_on_error(code=2):
    """ Around code that reads the user's files: an error there is one line, not a traceback, and so
    is Ctrl-C. """
    try:
        yield
    except (ValueError, OSError) as error:
        stop(error, code)
    except KeyboardInterrupt:
        stop('interrupted', 130)
