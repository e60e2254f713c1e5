"""
Puzzles of sudoku, 9 x 9, and a small network that learns them. A grid is 81 digits from 0 to 8,
line by line. No row, column or box (3 x 3) has a digit twice. The clues of a puzzle leave one grid.
"""
import random
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base.console import progress_bar
from model import Model, ModelConfig
from runs.muon import Muon

L, V, MASK = 81, 11, 11        # EOS and PAD are digits that no grid uses
CELLS = torch.arange(L)
ROW = CELLS // 9
COLUMN = CELLS % 9
BOX = ROW // 3 * 3 + COLUMN // 3
GROUPS = torch.stack([of == i for of in (ROW, COLUMN, BOX) for i in range(9)])       # (27, 81)
GROUPS_OF = GROUPS.T.nonzero()[:, 1].view(L, 3).tolist()   # of each cell: its row, column and box


# ---- puzzles

def solutions(puzzle, rng):
    """ The grids of a puzzle, a list of 81 where MASK is a gap, one after the other, in random
    order. The next cell is one with the fewest digits left, so a wrong digit is noticed soon. """
    grid = list(puzzle)
    free = [2**9 - 1] * 27                                 # digits left in each group, as bits
    gaps = [cell for cell in range(L) if grid[cell] == MASK]
    for cell in set(range(L)) - set(gaps):
        for group in GROUPS_OF[cell]:
            free[group] &= ~(1 << grid[cell])

    def fill(gaps):
        if not gaps:
            yield list(grid)
            return
        fits = {}
        for cell in gaps:
            row, column, box = GROUPS_OF[cell]
            fits[cell] = free[row] & free[column] & free[box]
        cell = min(gaps, key=lambda cell: fits[cell].bit_count())

        # each digit that fits, and the rest of the grid after it
        rest = [other for other in gaps if other != cell]
        for digit in rng.sample(range(9), 9):
            if fits[cell] >> digit & 1:
                grid[cell] = digit
                for group in GROUPS_OF[cell]:
                    free[group] ^= 1 << digit
                yield from fill(rest)
                for group in GROUPS_OF[cell]:
                    free[group] ^= 1 << digit
    yield from fill(rng.sample(gaps, len(gaps)))


def draw_puzzle(clues, rng):
    """ A grid, and which of its cells are given, as lists of 81. So many clues, or a few more where
    each of them is needed. """
    grid = next(solutions([MASK] * L, rng))
    puzzle = list(grid)
    n = L
    for cell in rng.sample(range(L), L):
        if n == clues:
            break

        # the digit goes, unless that makes a second grid possible
        puzzle[cell] = MASK
        n -= 1
        if len(list(islice(solutions(puzzle, rng), 2))) == 2:
            puzzle[cell] = grid[cell]
            n += 1
    return grid, [digit != MASK for digit in puzzle]


def draw_puzzles(n, clues, seed):
    """ Grids (n, 81), and which cells are given, (n, 81) bool. The number of clues of each puzzle
    is drawn from the sequence `clues`. """
    rng = random.Random(seed)
    bar = progress_bar(range(n), desc=f'puzzles of {min(clues)} to {max(clues)} clues')
    puzzles = [draw_puzzle(rng.choice(clues), rng) for _ in bar]
    grids, given = zip(*puzzles)
    return torch.tensor(grids), torch.tensor(given)


def moved(grids, given, rng):
    """ The same puzzles as others: bands, lines in a band, and digits change places, and rows
    become columns. Of each there are 1.2 trillion. """
    n = len(grids)

    def lines():
        band = torch.rand(n, 3, 1, generator=rng).argsort(1)
        line = torch.rand(n, 3, 3, generator=rng).argsort(2)
        return (3 * band + line).flatten(1)                              # (n, 9)

    # which cell comes to this one
    cells = 9 * lines()[:, :, None] + lines()[:, None]                   # (n, 9, 9)
    is_turned = torch.rand(n, 1, 1, generator=rng) < .5
    cells = torch.where(is_turned, cells.mT, cells).flatten(1)
    digits = torch.rand(n, 9, generator=rng).argsort(1)
    return digits.gather(1, grids.gather(1, cells)), given.gather(1, cells)


def is_right(grids):
    """ (n,): whether each row, column and box of grids (n, 81) has each digit once. """
    cells = GROUPS.nonzero()[:, 1].view(27, 9)
    return (grids[:, cells].sort(2).values == torch.arange(9)).all(2).all(1)


# ---- the network

class GridModel(Model):
    """ The network of the project, which also reads where a digit stands: in which row, column and
    box. reads_puzzle: before the grid it reads a puzzle, all from left to right. """

    def __init__(self, reads_puzzle, width=128):
        seq_len = 2 * L if reads_puzzle else L
        super().__init__(ModelConfig(vocab_size=V, seq_len=seq_len, depth=4, heads=4, width=width,
                                     streams=('text',), text_clock=False))
        self.place = nn.Parameter(0.3 * torch.randn(3, 9, width))

        # from left to right, at the place of a digit the digit before it is read: it says where
        # that stands, too
        self.place_before = None
        if reads_puzzle:
            self.place_before = nn.Parameter(0.3 * torch.randn(3, 9, width))

    def embed_inputs(self, tokens, *others):
        text, *rest = super().embed_inputs(tokens, *others)
        place = of_cells(self.place)
        if self.place_before is not None:
            place = (place + of_cells(self.place_before).roll(1, 0)).repeat(2, 1)
        return text + place[:tokens.shape[1]], *rest


def of_cells(place):
    """ Vectors of the 9 rows, columns and boxes (3, 9, C) -> of the 81 cells (81, C). """
    return place[0, ROW] + place[1, COLUMN] + place[2, BOX]


def logits_of(model, x, puzzle=None, positions=None):
    """ (B, L, V), or (P, V) at so many positions. With a puzzle x is read from left to right. """
    if puzzle is None:
        logits, _ = model(x, None, None, None, positions)
        return logits
    logits, _ = model(torch.cat([puzzle, x], 1), None, None, None, n_causal=len(x))
    return logits[:, L:]                                   # those of the puzzle are not used


def train(loss_of, reads_puzzle, puzzles, seed, steps, compiles=False):
    """ A network after so many steps on loss_of(network, grids (64, 81), given, rng). Each time the
    puzzles are moved, so that none is learned by heart. compiles: it is faster, after a minute
    of work for a C++ compiler. """
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    model = GridModel(reads_puzzle)
    groups = model.parameter_groups()
    matrices = groups.pop('matrices')
    optimizers = (Muon(matrices, 3e-3, weight_decay=0, iterations=3, dtype=torch.float32),
                  torch.optim.AdamW(sum(groups.values(), []), 3e-3, weight_decay=0))

    learner = model
    if compiles:
        torch._dynamo.config.suppress_errors = True        # without a compiler it goes on, slower
        learner = torch.compile(model)
    grids, given = puzzles
    bar = progress_bar(range(steps), desc='the decoder' if reads_puzzle else 'the masked one')
    for step in bar:
        some = torch.randint(len(grids), (64,), generator=rng)
        loss = loss_of(learner, *moved(grids[some], given[some], rng), rng)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        for optimizer in optimizers:
            # the rate rises for 100 steps, and in the second half it falls to 0
            for group in optimizer.param_groups:
                group['lr'] = 3e-3 * min((step + 1) / 100, 1, 2 * (1 - step / steps))
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 99:
            bar.set_postfix(loss=loss.item())
    return model.eval().requires_grad_(False)
