"""
Grids of sudoku, 6 x 6, and a small network that learns them. A grid is 36 digits from 0 to 5, line
by line. No row, column or box (2 x 3) has a digit twice. There are 28 million.
"""
import itertools
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model import Model, ModelConfig

L, V, MASK = 36, 8, 8          # EOS and PAD are digits that no grid uses
CELLS = torch.arange(L).view(6, 6)
BOXES = CELLS.view(3, 2, 2, 3).transpose(1, 2).reshape(6, 6)
GROUPS = torch.cat([CELLS, CELLS.T, BOXES])                # (18, 6): cells that share no digit

# the 720 ways to write a row, and which two may stand in one grid, and in one box
ROWS = torch.tensor(list(itertools.permutations(range(6))))
FIT_IN_COLUMNS = (ROWS[:, None] != ROWS).all(2)            # (720, 720)
HAS_LEFT = (ROWS[:, :3, None] == torch.arange(6)).any(1)   # (720, 6): digits of its left half
FIT_IN_BOX = ~(HAS_LEFT[:, None] & HAS_LEFT).any(2)


def draw_grids(n, rng):
    """ (n, 36), row by row, each drawn from those that fit the rows above. There are some. """
    rows = [torch.randint(720, (n,), generator=rng)]
    for i in range(1, 6):
        # it must differ from all rows above in every column
        fits = torch.stack([FIT_IN_COLUMNS[row] for row in rows]).all(0)             # (n, 720)
        if i % 2:                                          # the second row of two boxes
            fits &= FIT_IN_BOX[rows[-1]]
        rows.append(torch.multinomial(fits.float(), 1, generator=rng)[:, 0])
    return ROWS[torch.stack(rows, 1)].flatten(1)


def is_right(grids):
    """ (n,): whether each row, column and box of grids (n, 36) has each digit once. """
    return (grids[:, GROUPS].sort(2).values == torch.arange(6)).all(2).all(1)


class GridModel(Model):
    """ The network of the project, which also reads where a digit stands: an embedding a cell.
    reads_puzzle: before the grid it reads a puzzle, all from left to right. """

    def __init__(self, reads_puzzle):
        seq_len = 2 * L if reads_puzzle else L
        super().__init__(ModelConfig(vocab_size=V, seq_len=seq_len, depth=4, heads=4, width=96,
                                     streams=('text',), text_clock=False))
        self.cell_embedding = nn.Parameter(0.3 * torch.randn(L, 96))

    def embed_inputs(self, tokens, *others):
        text, *rest = super().embed_inputs(tokens, *others)
        n_grids = tokens.shape[1] // L
        return text + self.cell_embedding.repeat(n_grids, 1), *rest


def logits_of(model, x, puzzle=None, positions=None):
    """ (B, L, V), or (P, V) at so many positions. With a puzzle x is read from left to right. """
    if puzzle is None:
        logits, _ = model(x, None, None, None, positions)
        return logits
    logits, _ = model(torch.cat([puzzle, x], 1), None, None, None, n_causal=len(x))
    return logits[:, L:]                                   # those of the puzzle are not used


def train(loss_of, reads_puzzle, seed, steps):
    """ A network after so many steps on loss_of(model, grids (64, 36), rng), each on new grids. """
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    model = GridModel(reads_puzzle)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        # the rate rises for 50 steps and falls to 0; every grid is new, so none is learned by heart
        optimizer.param_groups[0]['lr'] = 3e-3 * min((step + 1) / 50, 1 - step / steps)
        loss_of(model, draw_grids(64, rng), rng).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)
