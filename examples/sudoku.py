"""
Who can fill a sudoku, whichever cells are given?

A masked network learns every pattern of gaps, and may fill the most certain cell first. A decoder
writes from left to right, and does not see a clue that comes later. It sees all clues if the puzzle
stands before the grid. Then rows are twice as long, and the same tokens make half as many.

    masked              loss = 1/t * sum over masked i of -log p(x^i | x_t)
    decoder             loss =       sum over i of        -log p(x^i | x^<i)
    decoder + puzzle    loss =       sum over i of        -log p(x^i | x_t, x^<i)

    python examples/sudoku.py 0      trains all three from seed 0 and prints how many % of new
puzzles with 0, 6, 12, 18 or 24 clues become a right grid that has them: nine minutes on one core.
"""
import sys
from functools import partial

import torch
import torch.nn.functional as F

from toy_sudoku import L, MASK, V, draw_grids, is_right, logits_of, train
from diffusion import MaskedText, rank_in_row
from samplers import confidence, first_hitting, make_propose

ROWS_A_STEP = {'masked': 64, 'decoder': 64, 'decoder + puzzle': 32}
CLUES = (0, 6, 12, 18, 24)


def loss_of(kind, model, x, rng):
    t = 0.1 + 0.9 * torch.rand(len(x), 1, generator=rng)
    masked = torch.rand(x.shape, generator=rng) < t
    x_t = torch.where(masked, MASK, x)
    read = {'masked': x_t, 'decoder': x, 'decoder + puzzle': torch.cat([x_t, x], 1)}[kind]
    logits = logits_of(model, read, kind != 'masked')[:, -L:]
    nll = F.cross_entropy(logits.mT, x, reduction='none')                # (B, L)
    return (masked / t * nll if kind == 'masked' else nll).mean()


def fill(model, sampler, puzzles, propose):
    """ By diffusion: each call fills the cell of each row that the sampler chooses. """
    return sampler(lambda x, t, positions: logits_of(model, x, False, positions), propose,
                   MaskedText(V), puzzles, puzzles != MASK, L, torch.Generator().manual_seed(0))


def fill_in_order(model, before, puzzles, propose):
    """ From left to right; clues stay. before (n, 0 or L): what stands before the grid. """
    x = torch.cat([before, puzzles], 1)
    for i in range(before.shape[1], x.shape[1]):
        x[:, i] = torch.where(x[:, i] == MASK, propose(logits_of(model, x, True)[:, i]), x[:, i])
    return x[:, -L:]


@torch.no_grad()
def main(seed=0, steps=500, n=300):
    with torch.enable_grad():
        masked, decoder, both = (train(partial(loss_of, kind), rows, seed, steps)
                                 for kind, rows in ROWS_A_STEP.items())
    ways = {'masked, certain first': lambda *puzzle: fill(masked, confidence, *puzzle),
            'masked, random order': lambda *puzzle: fill(masked, first_hitting, *puzzle),
            'decoder': lambda x, propose: fill_in_order(decoder, x[:, :0], x, propose),
            'decoder + puzzle': lambda x, propose: fill_in_order(both, x, x, propose)}

    # new grids; a puzzle keeps the cells of the smallest numbers
    rng = torch.Generator().manual_seed(1000)
    grids = draw_grids(n, rng)
    rank = rank_in_row(torch.rand(n, L, generator=rng))
    found = {}
    print('clues' + ''.join(f'{name:>23}' for name in ways))
    for clues in CLUES:
        puzzles = torch.where(rank < clues, grids, MASK)
        for name, write in ways.items():
            propose = make_propose(1.0 if clues == 0 else 0.0, 1.0, rng)     # drawn; likeliest
            found[name, clues] = 100 * is_right(write(puzzles, propose)).double().mean().item()
        print(f'{clues:5}' + ''.join(f'{found[name, clues]:23.1f}' for name in ways), flush=True)
    return found


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
