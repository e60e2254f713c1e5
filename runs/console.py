""" What sample.py and evaluate.py tell the person at the terminal, and ask of the paths they
name. """
import os
import shutil
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


def watcher(tokenizer, mask_id, rows):
    """ on_step(tokens) of a sampler: redraws the texts in place on a terminal, and elsewhere prints
    the first one, a line a step. """
    n_drawn = 0

    def on_step(tokens):
        nonlocal n_drawn
        lines = [unfinished_text(tokenizer, ids, mask_id) for ids in tokens[:rows].tolist()]
        if not sys.stdout.isatty():
            print(lines[0], flush=True)
            return

        # back up over what was drawn before, and erase it
        if n_drawn:
            print(f'\x1b[{n_drawn}A\x1b[J', end='')
        width = shutil.get_terminal_size().columns - 1
        print('\n'.join(line[:width] for line in lines), flush=True)
        n_drawn = len(lines)
    return on_step


def unfinished_text(tokenizer, ids, mask_id):
    """ A half-written text: what is still masked shows as a block. It ends at its EOS. """
    pieces, known = [], []
    for i in ids:
        if i == tokenizer.eos:
            break
        if i < mask_id:
            known.append(i)
            continue
        # MASK, or beyond it a cluster (text_process=hdlm)
        pieces.append(tokenizer.decode(known))
        pieces.append('░')
        known = []
    pieces.append(tokenizer.decode(known))
    return ''.join(pieces).replace('\n', ' ')
