""" What sample.py and evaluate.py tell the person at the terminal, and ask of the paths they
name. """
import os
import sys


def warn(message):
    print(f'warning: {message}', file=sys.stderr, flush=True)


def check_writable(path):
    """ ValueError unless a file can be written there. Nothing is left behind. """
    if not os.path.isdir(os.path.dirname(path) or '.'):
        raise ValueError(f'{path}: no such folder')
    if os.path.isdir(path):
        raise ValueError(f'{path}: this is a folder, expected the name of a file')

    is_new = not os.path.lexists(path)
    try:
        open(path, 'ab').close()
    except OSError as error:
        raise ValueError(f'{path}: cannot be written ({error.strerror})') from None
    if is_new:
        os.remove(path)

