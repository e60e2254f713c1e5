"""
A text being written, kept step by step, and drawn in a terminal (sample.py --watch).

    recorder = Recorder(run.text.mask_id)
    tokens = l2t(run, z, on_step=recorder.on_step, observe=recorder.observe)
    recorder.frames                      the start, and then a Frame after each step

A recorder only looks on: it draws no random number, and the same ids are written without it.
sampling/animation.py makes a picture of the frames, benchmarks/report.py a page.
Letters: B texts, L tokens, P positions where the network was asked, V vocabulary, K candidates.
"""
import codecs
import os
import shutil
import sys
import time
from dataclasses import dataclass

import torch

from diffusion import in_chunks

MASK = '░'

# ---- what is kept

@dataclass
class Frame:
    """ What stands after a step, and what the network said in it. """
    tokens: torch.Tensor           # (B, L) ids; one of mask_id or more is a mask
    p: torch.Tensor                # (B, L) probability of each token when it was written; nan: it
                                   # was not written here, or is a mask
    is_new: torch.Tensor           # (B, L) written in this step
    is_again: torch.Tensor         # (B, L) was visible and then masked, and maybe written again
    asked: torch.Tensor            # (B, L) where the network was asked in this step
    top_ids: torch.Tensor          # (B, L, K) the likeliest ids there, the likeliest first
    top_p: torch.Tensor            # (B, L, K) their probabilities
    step: int = 0                  # 0: the start
    first: int = 0                 # how many texts of other batches stand before these
    i_round: int = 0               # 0: texts are written; i: a search mends them for the ith time


def no_observer(denoise, tokens, first=0, i_round=0):
    return denoise


class Recorder:
    """
    Keeps a Frame for each step of a sampler.

    n_top       K
    everywhere  ask at every masked position, not only where the sampler does: a second network
                call in each step. Not for joint sampling, in which each call is a step of the
                latents, and not for a text written from left to right.
    on_frame    called with each Frame, of which then only the last is kept
    """

    def __init__(self, mask_id, n_top=5, everywhere=False, on_frame=None):
        self.mask_id = mask_id
        self.n_top = n_top
        self.everywhere = everywhere
        self.on_frame = on_frame
        self.frames = []

    def observe(self, denoise, tokens, first=0, i_round=0):
        """ A function like `denoise` of samplers.py that also keeps what it says. tokens (B, L):
        what the sampler starts from; first, i_round as in Frame. """
        self.begin(tokens.cpu().clone(), first, i_round)

        def observed(tokens, t, positions, *rows):
            logits = denoise(tokens, t, positions, *rows)
            if self.everywhere:
                is_mask = (tokens >= self.mask_id).flatten()
                all_masked = is_mask.nonzero().flatten()
                self.keep_top(denoise(tokens, t, all_masked, *rows), all_masked, *rows)
            self.said.append(self.keep_top(logits, positions, *rows))
            return logits
        return observed

    def begin(self, tokens, first, i_round):
        """ The frame before the first step. """
        # a text that is mended was whole, so each of its masks is there again
        masked = tokens >= self.mask_id
        nowhere = torch.zeros_like(masked)
        is_again = masked if i_round else nowhere
        self.forget(tokens)
        p = torch.full(tokens.shape, torch.nan)
        start = Frame(tokens, p, nowhere, is_again, self.asked, self.top_ids, self.top_p,
                      0, first, i_round)
        self.forget(tokens)
        self.add(start)

    def forget(self, tokens):
        """ Nothing is known of the step to come. """
        shape = (*tokens.shape, self.n_top)
        self.asked = torch.zeros(tokens.shape, dtype=torch.bool)
        self.top_ids = torch.zeros(shape, dtype=torch.long)
        self.top_p = torch.zeros(shape)
        self.said = []                         # of each call of the sampler: row, column, logits

    def keep_top(self, logits, positions, rows=None):
        """ Keeps the likeliest tokens of logits (P, V) at the flat positions (P,) of all rows, or
        of the rows `rows`. Returns row (P,), column (P,), on the host, and the logits. """
        L = self.asked.shape[1]
        positions = positions.cpu()
        row = positions // L
        if rows is not None:
            row = rows.cpu()[row]
        column = positions % L

        n_top = min(self.n_top, logits.shape[1])

        def likeliest(logits):
            top = logits.softmax(-1).topk(n_top, -1)
            return top.indices, top.values
        ids, p = in_chunks(likeliest, logits)
        self.asked[row, column] = True
        self.top_ids[row, column, :n_top] = ids.cpu()
        self.top_p[row, column, :n_top] = p.cpu()
        return row, column, logits

    def on_step(self, tokens):
        """ For a sampler: the step is done. """
        tokens = tokens.cpu().clone()
        before = self.frames[-1]
        masked = tokens >= self.mask_id
        is_new = (tokens != before.tokens) & ~masked
        was_visible = before.tokens < self.mask_id

        # the probability of what was written in this step; of what stays, as before
        p = before.p.masked_fill(masked | is_new, torch.nan)
        for row, column, logits in self.said:
            x = tokens[row, column].clamp(max=logits.shape[1] - 1)       # a mask has no column
            found = in_chunks(probability, logits, x).cpu()              # (P,)
            written = is_new[row, column]
            p[row[written], column[written]] = found[written]

        is_again = before.is_again | (was_visible & (tokens != before.tokens))
        frame = Frame(tokens, p, is_new, is_again, self.asked, self.top_ids, self.top_p,
                      before.step + 1, before.first, before.i_round)
        self.forget(tokens)
        self.add(frame)

    def add(self, frame):
        self.frames.append(frame)
        if self.on_frame:
            self.on_frame(frame)
            self.frames = [frame]


def probability(logits, x):
    """ p(x) (P,) of tokens x (P,) by logits (P, V). """
    return logits.softmax(-1).gather(-1, x[:, None].to(logits.device)).squeeze(-1)


# ---- as text

def printable(text):
    """ A text without characters that would move the cursor of a terminal or break a file. """
    return ''.join(c if c.isprintable() else ' ' if c.isspace() else '·' for c in text)


def pieces_of(tokenizer, ids, mask_id, to_end=False):
    """ The text of each id: a list. MASK is a block. Of a character that several tokens write, the
    last of them has all. It ends at the EOS, or with to_end=True names it and what follows. """
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    pieces = []
    for i in ids:
        if i == tokenizer.eos and not to_end:
            break
        if i in (tokenizer.eos, tokenizer.pad) and to_end:
            pieces.append('EOS' if i == tokenizer.eos else 'PAD')
        elif i < mask_id:
            pieces.append(printable(decoder.decode(tokenizer.pieces[i])))
        else:
            # MASK, or beyond it a cluster (text_process=hdlm); it may cut a character in two
            pieces.append(decoder.decode(b'', final=True) + MASK)
    if pieces:
        pieces[-1] += decoder.decode(b'', final=True)
    return pieces

# ---- in a terminal

# how a terminal shows a token: its SGR codes
MASKED, DRAFT = '2', '2;3'                                 # faint; faint and italic
UNLIKELY, NORMAL, CERTAIN = '2', '', '1'                   # faint, plain, bold
NEW, AGAIN = '36', '35'                                    # cyan, magenta
PAUSE = 0.06                                               # seconds that a frame stands at least


def cells_of(tokenizer, frame, row, mask_id):
    """ [(text, SGR codes)] of a row of a frame. A written token is faint, plain or bold by its
    probability. It is cyan where this step wrote it, and magenta where it was masked again. A
    masked position shows the network's draft for it, where it was asked and expects no end. """
    ids = frame.tokens[row].tolist()
    cells = []
    for i, piece in enumerate(pieces_of(tokenizer, ids, mask_id)):
        colour = AGAIN if frame.is_again[row, i] else NEW if frame.is_new[row, i] else ''
        if ids[i] >= mask_id:
            draft = draft_of(tokenizer, frame, row, i, mask_id)
            piece = draft or piece
            shade = DRAFT if draft else MASKED
        else:
            p = frame.p[row, i].item()                     # nan of a known token: plain
            shade = UNLIKELY if p < 0.5 else CERTAIN if p >= 0.9 else NORMAL
        cells.append((piece, ';'.join(filter(None, (shade, colour)))))
    return cells


def draft_of(tokenizer, frame, row, i, mask_id, at_least=0.1):
    """ The text of the likeliest token of a masked position, or ''. """
    best = frame.top_ids[row, i, 0].item()
    is_likely = frame.asked[row, i] and frame.top_p[row, i, 0] >= at_least
    if not is_likely or best >= mask_id:
        return ''
    return printable(tokenizer.pieces[best].decode('utf-8', 'replace'))


def wrapped(cells, width):
    """ The cells as lines of at most `width` characters, with their SGR codes. """
    lines, n_in_line = [''], 0
    for text, codes in cells:
        if n_in_line and n_in_line + len(text) > width:
            lines.append('')
            n_in_line = 0
            text = text.removeprefix(' ')
        text = text[:width]
        lines[-1] += f'\x1b[{codes}m{text}\x1b[0m' if codes else text
        n_in_line += len(text)
    return lines


def headline(frame, mask_id):
    """ What is happening, in a line. """
    what = f'mends, round {frame.i_round}' if frame.i_round else 'writes'
    if frame.first:
        what += f', from text {frame.first + 1} on'
    masked = frame.tokens >= mask_id
    n_masked = masked.sum().item() / len(masked)
    return f'{what} · step {frame.step} · {n_masked:.0f} of {masked.shape[1]} masked'


def watcher(run, rows):
    """ A Recorder that shows the first `rows` texts being written: on a terminal in place and in
    shades; elsewhere, or where NO_COLOR is set, the first text as plain lines, one a step. """
    mask_id = run.text.mask_id
    n_drawn = 0

    def plain(frame):
        if frame.step and not frame.first:
            ids = frame.tokens[0].tolist()
            print(''.join(pieces_of(run.tokenizer, ids, mask_id)), flush=True)

    def in_place(frame):
        nonlocal n_drawn
        size = shutil.get_terminal_size()
        lines = wrapped([(headline(frame, mask_id), MASKED)], size.columns - 1)
        for row in range(min(rows, len(frame.tokens))):
            lines += wrapped(cells_of(run.tokenizer, frame, row, mask_id), size.columns - 1)

        # back up over what was drawn before, and erase it; what scrolled away cannot be erased
        lines = lines[:size.lines - 1]
        if n_drawn:
            print(f'\x1b[{n_drawn}A\x1b[J', end='')
        print('\n'.join(lines), flush=True)
        n_drawn = len(lines)
        time.sleep(PAUSE)

    is_plain = not sys.stdout.isatty() or os.environ.get('NO_COLOR')
    return Recorder(mask_id, n_top=1, on_frame=plain if is_plain else in_place)
