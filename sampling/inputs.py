"""
What a person gives a run to read: texts, templates with gaps, and latents. Whatever the run cannot
read is a ValueError that says where it stands.
Letters: n texts, L tokens, N latent vectors, D latent dimensions.
"""
import itertools
import math
import os
import re
from collections import Counter
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from base.console import warn
from base.files import read_array, short
from configurator import HERE, read_knobs
from corpora.readers import counted
from corpora.sources import documents
from corpora.tokenizers import spelled
from encoders import FAR, check_texts, far_off

MOST_TEMPLATES = 64            # that a template with [MASK:2-6] may stand for

# -----------------------------------------------------------------------------
# Texts

def most_tokens(run):
    """ How many tokens a text may have: L, less one for the EOS where the run learns lengths.
    (net.lengths holds the lengths of a run that does not learn them.) """
    return run.net.L if run.net.lengths else run.net.L - 1


def pack(run, texts, cut=False):
    """ A list of texts as the model reads them: tokens (n, L), an EOS after the text, then PAD. A
    text that is too long is cut with a warning, if `cut`; else it is a ValueError. """
    check_texts(texts)
    most = most_tokens(run)
    end = [run.tokenizer.eos] + [run.tokenizer.pad] * run.net.L
    rows = []
    n_cut = 0
    for i, text in enumerate(texts):
        ids = run.tokenizer.encode(text)
        is_long = len(ids) > most
        if is_long and not cut:
            raise ValueError(f'text {i + 1} of {len(texts)}, {short(text)}, has {len(ids):,} '
                             f'tokens, {run.out_dir} reads at most {most}')
        n_cut += is_long
        row = ids[:most] + end
        rows.append(row[:run.net.L])
    if n_cut:
        warn(f'{n_cut:,} of {len(texts):,} texts have more tokens than {run.out_dir} reads, '
             f'{most}: their ends are left out')
    return torch.tensor(rows)


def read_texts(path, field='text'):
    """ The texts of a file as prepare.py reads them: its lines, the records of a .jsonl file or a
    table, ... Blank ones are passed over; another drop is a warning. """
    if not os.path.isfile(path):
        what = 'this is a folder, expected a file' if os.path.isdir(path) else 'no such file'
        raise ValueError(f'texts={path}: {what}')
    # by the knobs of prepare.py, as they are by default
    knobs = read_knobs(os.path.join(HERE, 'prepare.py'))
    knobs = {name: knob.default for name, knob in knobs.items()}
    source = SimpleNamespace(**knobs | dict(input=path, field=field))
    counts = Counter()
    for document in documents(source, counts):
        yield document.text
    if not counts['kept']:
        raise ValueError(f'texts={path}: no text in it')
    counts['empty'] = counts['trimmed'] = 0
    if counted(counts):
        warn(f'texts={path}: {", ".join(counted(counts))}')


def embeddings(run, texts):
    """ Raw latents (n, N, D) to write from, by the run's encoder. A warning where there are texts
    that it cannot embed as the run would need it, with the first of them. """
    raw = run.encode(texts)                    # it says what is an error
    texts = [spelled(run.tokenizer.kind, text) for text in texts]

    # (text, what is to be said of it), by what is wrong with it
    masked, remarked, long = [], [], []
    for text in texts:
        n_tokens = len(run.tokenizer.encode(text))
        remark = run.encoder.remark(text)
        if '[MASK' in text:
            masked.append((text, 'has a [MASK, embedded as it stands: mode=infill fills gaps'))
        elif remark:
            remarked.append((text, remark))
        if n_tokens > most_tokens(run):
            long.append((text, f'has {n_tokens:,} tokens, {run.out_dir} writes at most '
                               f'{most_tokens(run):,} and has seen no embedding of a longer text'))

    # one warning of each kind, however many texts there are
    for found in filter(None, (masked, remarked, long)):
        text, remark = found[0]
        more = f'; and so with {len(found) - 1:,} more texts' if len(found) > 1 else ''
        warn(f'{short(text)} {remark}{more}')
    return raw

# -----------------------------------------------------------------------------
# Templates: texts with gaps

def pieces_of_template(run, text):
    """ A template as its pieces: the token ids of a text, a range of numbers of MASKs, or '*' for
    the whole rest. A space before a gap belongs to its first token, where the tokenizer has such
    tokens. """
    # text, gap, text, gap, ..., text
    has_space_tokens = run.tokenizer.kind != 'esm' and len(run.tokenizer.encode(' a')) == 1
    space = ' ?' if has_space_tokens else ''
    parts = re.split(space + r'\[MASK(|:\*|:\d{1,6}|:\d{1,6}-\d{1,6})\]', text)
    if len(parts) == 1 and '[MASK' not in text:
        raise ValueError(f'no [MASK] in {short(text)}: nothing to fill')

    pieces = []
    for i, part in enumerate(parts):
        if '*' in pieces and part:
            raise ValueError(f'[MASK:*] stands at the end of a text, found {part!r} behind it')
        is_text = i % 2 == 0
        piece = None                                       # what is no text and no gap
        if is_text and '[MASK' not in part:
            piece = run.tokenizer.encode(part) if part else []
        elif not is_text:
            piece = read_gap(part)
        if piece is None:
            raise ValueError(f'a [MASK in {short(text)} is not a gap: expected [MASK], [MASK:3], '
                             '[MASK:2-6] or [MASK:*]')
        pieces.append(piece)
    return pieces


def read_gap(part):
    """ What stands between [MASK and ], such as ':2-6': a range of numbers of MASKs, or '*'. None
    where the range is empty. """
    least, _, most = (part[1:] or '1').partition('-')
    if least == '*':
        return '*'
    return range(int(least), int(most or least) + 1) or None


def read_template(run, text, length=0):
    """ 'A [MASK] runs on the [MASK:2-3].' -> tokens, known_mask, inner, (k, L) each: a row for each
    combination of the lengths of its gaps. [MASK:*] is the whole rest; without it the text has the
    length that it shows. inner: positions where EOS and PAD are not allowed. """
    pieces = pieces_of_template(run, text)
    has_rest = '*' in pieces
    ranges = [piece for piece in pieces if isinstance(piece, range)]
    n_rows = math.prod(map(len, ranges))
    if n_rows > MOST_TEMPLATES:
        raise ValueError(f'{short(text)} stands for {n_rows:,} texts, one for each length: '
                         f'expected at most {MOST_TEMPLATES}')
    if length and not (has_rest and run.net.lengths):
        raise ValueError(f'length={length} goes with [MASK:*] in a run that does not learn when a '
                         f'text ends, not with {short(text)}')

    rows = []
    for lengths in itertools.product(*ranges):
        # the ids of the text, -1 where EOS and PAD are not allowed
        ids = []
        lengths = iter(lengths)
        for piece in pieces:
            if isinstance(piece, range):
                ids += [-1] * min(next(lengths), run.net.L + 1)
            elif piece != '*':
                ids += piece

        # the whole rest, where somebody must say how long it is
        if has_rest and run.net.lengths:
            if length <= len(ids):
                raise ValueError(f'[MASK:*] in {short(text)} needs a --length above {len(ids)}: '
                                 f'{run.out_dir} does not learn when a text ends')
            ids += [-1] * (length - len(ids))
        if len(ids) > most_tokens(run):
            raise ValueError(f'{short(text)} has more tokens than {run.out_dir} writes: at most '
                             f'{most_tokens(run)}')

        # up to L: MASK where the model chooses the end, else an EOS and PAD
        if has_rest and not run.net.lengths:
            ids += [run.net.text.mask_id] * (run.net.L - len(ids))
        ids += [run.tokenizer.eos] + [run.tokenizer.pad] * run.net.L
        rows.append(ids[:run.net.L])
    tokens = torch.tensor(rows)
    inner = tokens == -1
    tokens = torch.where(inner, run.net.text.mask_id, tokens)
    return tokens, tokens != run.net.text.mask_id, inner

# -----------------------------------------------------------------------------
# Latents

def read_latents(run, path):
    """ Raw latents (n, N, D) from an .npy file of (n, D) or (n, N, D). """
    array = read_array(path, what='latents')
    try:
        raw = run.to_raw(array)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None

    # are they as long as those of the training? The mean square of a vector's length is
    # E|z|^2 = |mean|^2 + the sum of the variances
    stats = run.stats
    square = (stats.mean ** 2 + stats.live * stats.std ** 2).sum()
    length = float(square * raw.shape[1]) ** 0.5
    far = far_off(raw.numpy(), length)
    if far.any():
        warn(f'{path}: row {far.argmax()} is {FAR} times as long as the latents that {run.out_dir} '
             f'was trained on, or more, and so are {far.sum() - 1} others: of another scale?')

    # an embedding of nothing, such as a text without a known word
    is_zero = ~raw.numpy().any((1, 2))
    if is_zero.any():
        warn(f'{path}: {is_zero.sum():,} of {len(raw):,} latents are zeros, which say nothing; the '
             f'first is row {is_zero.argmax()}')
    return raw


def moved(run, raw, towards=(), away=()):
    """ Raw latents (n, N, D) by arithmetic of embeddings, of the lengths that they had: those of
    the texts `towards` are added, those of `away` subtracted: n each, one for all, or none. """
    there = raw
    if towards:
        there = there + embeddings(run, towards)
    if away:
        there = there - embeddings(run, away)
    if (there.norm(dim=-1) < 1e-6).any():
        raise ValueError('towards and away leave nothing of the embedding of a text')
    return F.normalize(there, dim=-1) * raw.norm(dim=-1, keepdim=True)
