"""
Who can fill a sudoku, and in how few calls of the network?

A masked network may fill all cells of which it is sure in one call, wherever they are. A decoder
writes from left to right. To see all clues it reads the puzzle before the grid, so its rows are
twice as long, and in the same time it sees half as many.

    masked     loss = 1/t * mean over gaps of  m^i * -log p(x^i | x_t),     t ~ U(.1, 1)
               where m^i = 1 with probability t: the gap i is masked in x_t
    decoder    loss = mean over gaps of  -log p(x^i | puzzle, x^<i)

    python examples/sudoku.py 0            trains both from seed 0, an hour each on a core, and
                                           tries both for another 80 minutes
    python examples/sudoku.py 0 FILE       tries puzzles of a file, too: 81 digits a line, 0 a gap

prints how many % of new puzzles with so many clues (or a few more, where each is needed) become
their grid, and in how many calls for each. With 8 beams a call reads 8 rows, and a quarter of the
puzzles is tried. All take the likeliest digit. sudoku.svg, in the current folder, shows a puzzle
that the masked network gets right and the decoder does not.
"""
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from toy_sudoku import L, MASK, V, draw_puzzles, is_right, logits_of, train
from toy_sudoku_picture import picture
from diffusion import MaskedText
from noise import Noise, rows_of
from samplers import confidence, first_hitting, in_blocks, make_propose

TRAINED_ON = range(24, 31)     # clues
TRIED_ON = (24, 27, 30, 36, 45)


def masked_loss(model, x, given, rng):
    # t begins at .1, so that the weight 1/t stays small
    t = 0.1 + 0.9 * torch.rand(len(x), 1, generator=rng)
    mask = ~given & (torch.rand(x.shape, generator=rng) < t)             # (B, L)
    logits = logits_of(model, torch.where(mask, MASK, x))

    # why 1/t? See why_one_over_t.py
    nll = F.cross_entropy(logits.mT, x, reduction='none')                # (B, L)
    return (mask / t * nll).sum() / (~given).sum()


def decoder_loss(model, x, given, rng):
    logits = logits_of(model, x, puzzle=torch.where(given, x, MASK))
    return F.cross_entropy(logits[~given], x[~given])


# ---- ways to fill puzzles (n, L): grids (n, L), and how many calls each took

def fill(model, sampler, puzzles, **knobs):
    """ By a sampler of the masked network. """
    n_rows = 0

    def denoise(x, t, positions, rows=None):
        nonlocal n_rows
        n_rows += len(x)
        return logits_of(model, x, positions=positions)

    # temperature 0: the likeliest digit. At most L calls, a cell in each
    noise = Noise(0, rows_of(len(puzzles)))
    grids = sampler(denoise, make_propose(0.0, 1.0), MaskedText(V), puzzles, puzzles != MASK, L,
                    noise, **knobs)
    return grids, n_rows / len(puzzles)


def fill_in_order(model, puzzles, n_beams):
    """ By the decoder, which goes on with the n_beams likeliest beginnings of each grid. """
    n = len(puzzles)
    reads = puzzles.repeat_interleave(n_beams, 0)                        # (n W, L)
    x = reads.view(n, n_beams, L).clone()
    log_p = torch.full((n, n_beams), -torch.inf)
    log_p[:, 0] = 0                                                      # they begin as one
    for i in range(L):
        logits = logits_of(model, x[:, :, :i + 1].flatten(0, 1), puzzle=reads)[:, i]
        of_digit = logits.log_softmax(1).view(n, n_beams, V)

        # a digit that is given is certain
        digit = puzzles[:, i, None]                                      # (n, 1)
        is_given = digit != MASK
        is_other = is_given & (torch.arange(V) != digit)                 # (n, V)
        of_digit = of_digit.masked_fill(is_given[:, None], 0)
        of_digit = of_digit.masked_fill(is_other[:, None], -torch.inf)

        # of all beginnings with all digits the likeliest
        log_p, best = (log_p[:, :, None] + of_digit).flatten(1).topk(n_beams)        # (n, W)
        x = x[torch.arange(n)[:, None], best // V]
        x[:, :, i] = best % V
    return x[:, 0], (puzzles == MASK).double().sum(1).mean().item()


def puzzles_of(file, n):
    """ The first n puzzles of a file, (n, L). """
    with open(file) as lines:
        rows = [[int(digit) for digit in line.strip()] for line, _ in zip(lines, range(n))]
    digits = torch.tensor(rows)
    return torch.where(digits == 0, MASK, digits - 1)


def picture_of_one(masked, decoder, puzzles, grids):
    """ Of the first puzzle that only the masked network gets right: SVG text; None: there is none.
    """
    call = torch.ones_like(puzzles)                        # that writes each cell

    def on_step(tokens, *said):
        call.add_(tokens == MASK)
    ours, _ = fill(masked, confidence, puzzles, threshold=.99, on_step=on_step)
    theirs, _ = fill_in_order(decoder, puzzles, n_beams=1)
    is_ours = (ours == grids).all(1) & (theirs != grids).any(1)
    if not is_ours.any():
        return None

    i = is_ours.nonzero()[0, 0]
    gap = (puzzles[i] == MASK).cumsum(0)                   # the decoder's calls
    panels = [(f'masked, all that are sure: {call[i].max()} calls', ours[i], call[i]),
              (f'decoder, from left to right: {gap.max()} calls', theirs[i], gap)]
    return picture(puzzles[i], grids[i], panels)


def main(seed=0, file=None, steps=4000, n=200, n_puzzles=2000):
    # new puzzles
    sets = {}
    grids_of = {}
    for clues in TRIED_ON:
        grids_of[clues], given = draw_puzzles(n, [clues], 1000 + clues)
        sets[clues] = torch.where(given, grids_of[clues], MASK)
    if file:
        sets[file] = puzzles_of(file, n)

    # equal networks, tokens and time: a row of the decoder is twice as long
    puzzles = draw_puzzles(n_puzzles, TRAINED_ON, seed)
    masked = train(masked_loss, False, puzzles, seed, steps, compiles=True)
    decoder = train(decoder_loss, True, puzzles, seed, steps // 2, compiles=True)
    ways = {'masked, all that are sure': partial(fill, masked, confidence, threshold=.99),
            'masked, the most certain first': partial(fill, masked, confidence),
            'masked, in random order': partial(fill, masked, first_hitting),
            'masked, from left to right': partial(fill, masked, in_blocks(confidence, 1)),
            'decoder, from left to right': partial(fill_in_order, decoder, n_beams=1),
            'decoder, with 8 beams': partial(fill_in_order, decoder, n_beams=8)}

    print(f'{"% right, calls":32}' + ''.join(f'{str(name)[:12]:>13}' for name in sets))
    found = {}
    for name, fill_by in ways.items():
        print(f'{name:32}', end='', flush=True)
        for clues, of_set in sets.items():
            if '8 beams' in name:
                of_set = of_set[:max(1, n // 4)]
            filled, calls = fill_by(of_set)
            keeps_clues = ((filled == of_set) | (of_set == MASK)).all(1)
            right = 100 * (is_right(filled) & keeps_clues).double().mean().item()
            found[name, clues] = right, calls
            print(f'{right:7.1f} {calls:5.1f}', end='', flush=True)
        print()
    svg = picture_of_one(masked, decoder, sets[36], grids_of[36])
    if svg:
        Path('sudoku.svg').write_text(svg)
    print('written to sudoku.svg' if svg else 'no puzzle that only the masked network gets right')
    return found


if __name__ == '__main__':
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
