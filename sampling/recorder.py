"""
A text being written, kept step by step, and shown in a terminal (sample.py --watch).

    recorder = Recorder(run.net.text.mask_id)
    run.write(latents=z, on_step=recorder)
    recorder.frames                      the start, and then a Frame after each step

A recorder only looks on: it draws no random number, and the same ids are written without it.
The frames become spans here, and lines of spans. sampling/animation.py makes a picture of them, and
sampling/report.py a page.
Letters: B texts, L tokens, P positions where the network was asked, V vocabulary, K candidates.
"""
import codecs
import os
import shutil
import sys
import time
from dataclasses import dataclass

import torch

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


class Recorder:
    """ An on_step of a sampler, which keeps a Frame for each step. n_top: K. on_frame: called with
    each Frame, of which then only the last is kept. """

    def __init__(self, mask_id, n_top=5, on_frame=None):
        self.mask_id = mask_id
        self.n_top = n_top
        self.on_frame = on_frame
        self.frames = []

    def __call__(self, tokens, logits=None, positions=None):
        """ tokens (B, L), and what was said in this step: logits (P, V) at the flat positions (P,).
        None: the first step of a batch is to come. """
        tokens = tokens.cpu().clone()
        if logits is None:
            frame = self.start(tokens)
        else:
            frame = self.after_step(tokens, logits, positions.cpu())
        self.frames.append(frame)
        if self.on_frame:
            self.on_frame(frame)
            self.frames = [frame]

    def start(self, tokens):
        nowhere = torch.zeros(tokens.shape, dtype=torch.bool)
        no_p = torch.full(tokens.shape, torch.nan)
        said = self.nothing_said(tokens)

        # those of earlier batches stand before these
        first = 0
        if self.frames:
            last = self.frames[-1]
            first = last.first + len(last.tokens)
        return Frame(tokens, no_p, nowhere, nowhere, *said, step=0, first=first)

    def after_step(self, tokens, logits, positions):
        before = self.frames[-1]
        masked = tokens >= self.mask_id
        is_changed = tokens != before.tokens
        is_new = is_changed & ~masked
        is_again = before.is_again | is_changed & (before.tokens < self.mask_id)

        # a mask that stays has no column
        x = tokens.flatten()[positions].clamp(max=logits.shape[1] - 1)
        x = x.to(logits.device)
        p = logits.softmax(-1)
        ids = logits.topk(min(self.n_top, logits.shape[1]), -1).indices
        top_p = p.gather(-1, ids).cpu()
        p_x = p.gather(-1, x[:, None]).squeeze(-1).cpu()
        asked, all_ids, all_p = self.nothing_said(tokens)
        asked.view(-1)[positions] = True
        all_ids.view(-1, self.n_top)[positions, :ids.shape[1]] = ids.cpu()
        all_p.view(-1, self.n_top)[positions, :ids.shape[1]] = top_p

        # the probability of what was written in this step; of what stays, as before
        p = before.p.masked_fill(masked | is_new, torch.nan)
        written = is_new.flatten()[positions]
        p.view(-1)[positions[written]] = p_x[written]
        return Frame(tokens, p, is_new, is_again, asked, all_ids, all_p, before.step + 1,
                     before.first)

    def nothing_said(self, tokens):
        shape = (*tokens.shape, self.n_top)
        asked = torch.zeros(tokens.shape, dtype=torch.bool)
        top_ids = torch.zeros(shape, dtype=torch.long)
        return asked, top_ids, torch.zeros(shape)


# ---- as text

def printable(text):
    """ A text without characters that would move the cursor of a terminal or break a file. """
    found = ''
    for c in text:
        if not c.isprintable():
            c = ' ' if c.isspace() else '·'
        found += c
    return found


def pieces_of(tokenizer, ids, mask_id, to_end=False):
    """ The text of each id: a list. MASK is a block. Of a character that several tokens write, the
    last of them has all. It ends at the EOS, or with to_end=True names it and what follows. """
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    pieces = []
    for i in ids:
        if i in (tokenizer.eos, tokenizer.pad) and to_end:
            pieces.append(name_of(tokenizer, i))
        elif i == tokenizer.eos:
            break
        elif i < mask_id:
            pieces.append(printable(decoder.decode(tokenizer.pieces[i])))
        else:
            # MASK, or beyond it a cluster (text_process=hdlm); it may cut a character in two
            pieces.append(decoder.decode(b'', final=True) + MASK)
    if pieces:
        pieces[-1] += decoder.decode(b'', final=True)
    return pieces

# ---- as lines, for a terminal and for a picture

def name_of(tokenizer, i):
    """ The text of one id; EOS and PAD have none and go by their names. """
    if i in (tokenizer.eos, tokenizer.pad):
        return 'EOS' if i == tokenizer.eos else 'PAD'
    return printable(tokenizer.pieces[i].decode('utf-8', 'replace'))


def spans_of(tokenizer, frame, row, mask_id, least_draft=None, to_end=False):
    """ [(text, kinds)] of the tokens of a row of a frame, as in pieces_of. With least_draft, a
    masked position shows the likeliest token there, if it has this probability and is a text.
    kinds, none or several letters:
    m   masked;  d: and shows a draft
    u   written with a probability below a half;  c: of .9 or more
    n   written in this step
    a   was visible and then masked
    """
    ids = frame.tokens[row].tolist()
    spans = []
    for i, piece in enumerate(pieces_of(tokenizer, ids, mask_id, to_end)):
        p = frame.p[row, i]                                # nan of a known token: neither u nor c
        is_of = dict(
            m=ids[i] >= mask_id,
            u=p < 0.5,
            c=p >= 0.9,
            n=frame.is_new[row, i],
            a=frame.is_again[row, i])
        kinds = ''.join(kind for kind, is_it in is_of.items() if is_it)

        # a draft; where the network expects an end or a cluster, there is none
        if least_draft is not None and 'm' in kinds and frame.asked[row, i]:
            best = frame.top_ids[row, i, 0].item()
            is_text = best < mask_id and best not in (tokenizer.eos, tokenizer.pad)
            if is_text and frame.top_p[row, i, 0] >= least_draft:
                piece = name_of(tokenizer, best)
                kinds += 'd'
        spans.append((piece, kinds))
    return spans


def lines_of(spans, width):
    """ The spans cut into lines of at most `width` characters. Neighbours of the same kinds become
    one span. """
    lines = [[]]
    n_in_line = 0
    for text, kinds in spans:
        if n_in_line and n_in_line + len(text) > width:
            lines.append([])
            n_in_line = 0
            text = text.removeprefix(' ')
        text = text[:width]
        line = lines[-1]
        if line and line[-1][1] == kinds:
            line[-1] = (line[-1][0] + text, kinds)
        else:
            line.append((text, kinds))
        n_in_line += len(text)
    return lines

# ---- in a terminal

# the SGR code of each kind: faint, faint, bold, cyan, magenta, italic
CODES = dict(m='2', u='2', c='1', n='36', a='35', d='3')
PAUSE = 0.06                                               # seconds that a frame stands at least


def headline(frame, calls, n_free, n_masked):
    """ What is happening, in a line. The numbers are of a text, on average: calls of the network
    so far, tokens to write, and those still masked. """
    what = f'writes, from text {frame.first + 1} on' if frame.first else 'writes'
    return f'{what} · calls {calls:.1f} of {n_free:.0f} · {n_masked:.0f} masked'


def watcher(run, rows):
    """ A Recorder that shows the first `rows` texts being written: on a terminal in place and in
    shades; elsewhere, or where NO_COLOR is set, the first text as plain lines, one for each step
    that changes it. """
    mask_id = run.net.text.mask_id
    n_shown = 0
    last = None
    calls_before = n_free = 0

    def plain(frame):
        nonlocal last
        text = ''.join(pieces_of(run.tokenizer, frame.tokens[0].tolist(), mask_id))
        state = text.rstrip(MASK), MASK in text            # masks at the end may only become PAD
        if frame.step and not frame.first and state != last:
            print(text, flush=True)
            last = state

    def in_place(frame):
        nonlocal n_shown, calls_before, n_free
        n_masked = (frame.tokens >= mask_id).sum(1).double().mean()
        if frame.step == 0:
            calls_before = run.net.row_calls
            n_free = n_masked
        calls = (run.net.row_calls - calls_before) / len(frame.tokens)
        size = shutil.get_terminal_size()
        head = headline(frame, calls, n_free, n_masked)
        lines = lines_of([(head, 'm')], size.columns - 1)
        for row in range(min(rows, len(frame.tokens))):
            spans = spans_of(run.tokenizer, frame, row, mask_id, least_draft=0.1)
            lines += lines_of(spans, size.columns - 1)

        # back up over what was shown before, and erase it; what scrolled away cannot be erased
        lines = lines[:size.lines - 1]
        if n_shown:
            print(f'\x1b[{n_shown}A\x1b[J', end='')
        for line in lines:
            print(''.join(coloured(*span) for span in line))
        sys.stdout.flush()
        n_shown = len(lines)
        time.sleep(PAUSE)

    is_plain = not sys.stdout.isatty() or os.environ.get('NO_COLOR')
    return Recorder(mask_id, n_top=1, on_frame=plain if is_plain else in_place)


def coloured(text, kinds):
    codes = ';'.join(CODES[kind] for kind in kinds)
    return f'\x1b[{codes}m{text}\x1b[0m' if codes else text
