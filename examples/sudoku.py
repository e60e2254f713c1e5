"""
Who can fill a sudoku, whichever cells are given?

A masked network learns every pattern of gaps, and may fill the most certain cell first. A decoder
writes from left to right; to see all clues it reads the puzzle before the grid, in twice the time.

    masked     loss = 1/t * sum over masked i of -log p(x^i | x_t),        t ~ U(.1, 1)
    decoder    loss =       sum over masked i of -log p(x^i | x_t, x^<i)

    python examples/sudoku.py 0      trains both from seed 0, on equally many grids, and prints how
many % of new puzzles with so many clues become a right grid. All take the likeliest digits.
"""
import sys
from functools import partial

import torch
import torch.nn.functional as F

from toy_sudoku import L, MASK, V, draw_grids, is_right, logits_of, train
from diffusion import MaskedText, rank_in_row
from noise import Noise, rows_of
from samplers import confidence, first_hitting, make_propose

CLUES = (6, 12, 18, 24)


def masked_loss(model, x, rng):
    x_t, mask, t = corrupt(x, rng)

    # why 1/t? See why_one_over_t.py
    nll = F.cross_entropy(logits_of(model, x_t).mT, x, reduction='none')             # (B, L)
    return (mask / t * nll).mean()


def decoder_loss(model, x, rng):
    # the decoder reads the puzzle, and then the grid up to a cell. It is scored where the puzzle
    # has a gap
    x_t, mask, _ = corrupt(x, rng)
    return F.cross_entropy(logits_of(model, x, puzzle=x_t)[mask], x[mask])


def corrupt(x, rng):
    # t begins at .1, so that the weight 1/t stays small
    t = 0.1 + 0.9 * torch.rand(len(x), 1, generator=rng)
    mask = torch.rand(x.shape, generator=rng) < t                        # (B, L)
    return torch.where(mask, MASK, x), mask, t


def fill(model, sampler, puzzles):
    """ Each call fills one cell of each grid, which the sampler chooses. """
    def denoise(x, t, positions):
        return logits_of(model, x, positions=positions)

    # temperature 0: the likeliest digit. L steps: a cell in each
    is_given = puzzles != MASK
    noise = Noise(0, rows_of(len(puzzles)))
    return sampler(denoise, make_propose(0.0, 1.0), MaskedText(V), puzzles, is_given, L, noise)


def fill_in_order(model, puzzles, reads_puzzle):
    """ From left to right. """
    x = puzzles.clone()
    read = puzzles if reads_puzzle else None
    for i in range(L):
        # a cell that is given keeps its digit
        digit = logits_of(model, x, puzzle=read)[:, i].argmax(1)
        x[:, i] = torch.where(x[:, i] == MASK, digit, x[:, i])
    return x


def main(seed=0, steps=500, n=200):
    # both from the same seed, with the same steps and grids
    masked = train(masked_loss, False, seed, steps)
    decoder = train(decoder_loss, True, seed, steps)
    ways = {'masked, the most certain cell first': partial(fill, masked, confidence),
            'masked, in random order': partial(fill, masked, first_hitting),
            'masked, from left to right': partial(fill_in_order, masked, reads_puzzle=False),
            'decoder, from left to right': partial(fill_in_order, decoder, reads_puzzle=True)}

    # new grids; of each the cells with the smallest random numbers are given
    rng = torch.Generator().manual_seed(1000)
    grids = draw_grids(n, rng)
    rank = rank_in_row(torch.rand(n, L, generator=rng))
    print(f'{"% right, with so many clues":36}' + ''.join(f'{clues:8}' for clues in CLUES))
    found = {}
    for name, fill_by in ways.items():
        for clues in CLUES:
            filled = fill_by(torch.where(rank < clues, grids, MASK))
            found[name, clues] = 100 * is_right(filled).double().mean().item()
        row = ''.join(f'{found[name, clues]:8.1f}' for clues in CLUES)
        print(f'{name:36}{row}', flush=True)
    return found


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
