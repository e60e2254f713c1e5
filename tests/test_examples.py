""" examples/: each prints its claim, and returns the numbers that it prints. The truths are closed
forms or sums over all texts, so they hold on any machine. """
import importlib
import json
import math
import random
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F

from launch import ROOT

FOLDER = ROOT / 'examples'
ENTROPY = -sum(p * math.log(p) for p in (.4, .3, .2, .1))


def near(value, truth, by=1e-5):
    value, truth = (torch.as_tensor(x, dtype=torch.float64) for x in (value, truth))
    return bool(((value - truth).abs() <= by).all())


def drawn_from(drawn, law, n=20_000):
    """ Shares of n draws lie within 5 standard errors of their law. """
    drawn, law = (torch.as_tensor(x, dtype=torch.float64) for x in (drawn, law))
    return bool(((drawn - law).abs() <= 5 * (law * (1 - law) / n).clamp(min=0).sqrt() + 1e-9).all())


def first_hitting(found):
    p = torch.tensor([.4, .3, .2, .1] + [0] * 12, dtype=torch.float64)
    far = [(found['ancestral', T][1] - p).abs().sum() for T in (1, 4, 16, 64)]
    exact = found['first_hitting', 4][1]
    return (all(drawn_from(*pair) for pair in found.values())
            and torch.allclose(exact, p, atol=1e-6) and far[0] > 1 and far[3] < .03
            and far == sorted(far, reverse=True))


def parallel(found):
    calls = [found.pop(calls) for calls in (4, 2, 1)]
    return (all(drawn_from(*pair) for pair in calls) and near(calls[0][1], 0)
            and all(near(damage, information) for _, damage, information in found.values()))


def whole_idea(found):
    right, distance, shares = found
    return right > .99 and distance < .05 and near(shares, [.4, .3, .2, .1], .06)


def guidance(found):
    wanted = [rows['enumerated'][3].item() for rows in found.values()]
    return (all(drawn_from(rows['drawn'], rows['enumerated']) for rows in found.values())
            and near(found[1]['enumerated'], found[1]['p_c^g p_u^(1-g)'])
            and wanted == sorted(wanted) and wanted[-1] > .9)


CLAIMS = {
    'the_whole_idea': whole_idea,
    'why_one_over_t': lambda found: (near(found['counted']['1/t'], [1.] * 4)
                                     and near(found['nats']['1/t'], ENTROPY)
                                     and found['nats']['1'] < ENTROPY - .4),
    'guesses_that_are_checked': lambda found: near([*found.values()], [[4, 0], [2.6, 0], [4, 0]]),
    'first_hitting_equals_ancestral': first_hitting,
    'what_parallel_unmasking_breaks': parallel,
    'causal_and_masked_rows': lambda found: (ENTROPY <= found['exact'] < ENTROPY + .05
                                             and ENTROPY <= found['bound'] < ENTROPY + .1),
    'guidance_on_a_toy': guidance,
}


# the first is tried below, the others in test_weights.py and test_nano.py
NEED_HOURS_OR_FILES = {'sudoku', 'one_name_many_drawings', 'one_call', 'nano_decoder'}


@pytest.mark.parametrize('name', sorted(
    {path.stem for path in FOLDER.glob('*.py') if not path.stem.startswith('toy')}
    - NEED_HOURS_OR_FILES))
def test_an_example_proves_its_claim(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    found = importlib.import_module(name).main()
    assert CLAIMS[name](found), found
    assert 4 <= len(capsys.readouterr().out.splitlines()) <= 20


@pytest.fixture
def sudoku(monkeypatch):
    """ The whole example trains for hours. """
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module('sudoku')


def test_the_clues_of_a_sudoku_leave_one_grid_and_moving_it_makes_another(sudoku):
    toy = sys.modules['toy_sudoku']
    grids, given = sudoku.draw_puzzles(4, [30], seed=0)
    assert toy.is_right(grids).all() and (given.sum(1) == 30).all()
    for grid, of_grid in zip(grids, given):
        puzzle = torch.where(of_grid, grid, sudoku.MASK).tolist()
        assert [*toy.solutions(puzzle, random.Random(1))] == [grid.tolist()]

    moved, given_then = toy.moved(grids, given, torch.Generator().manual_seed(0))
    assert toy.is_right(moved).all() and (given_then.sum(1) == 30).all()
    assert not (moved == grids).all(1).any()
    puzzle = torch.where(given_then[0], moved[0], sudoku.MASK).tolist()
    assert [*toy.solutions(puzzle, random.Random(1))] == [moved[0].tolist()]

    # a right grid, and those that are right but for their boxes, their columns, their rows
    line = torch.arange(9)
    right = (3 * line[:, None] + line[:, None] // 3 + line) % 9
    but_boxes = (line[:, None] + line) % 9
    but_columns = (3 * (line[:, None] % 3) + line) % 9
    wrong = torch.stack([but_boxes, but_columns, but_columns.T]).flatten(1)
    assert toy.is_right(right.flatten()[None]).all() and not toy.is_right(wrong).any()


def test_each_way_to_fill_a_sudoku_keeps_its_clues(sudoku):
    puzzles = sudoku.draw_puzzles(3, [45], seed=0)
    masked = sudoku.train(sudoku.masked_loss, False, puzzles, seed=0, steps=2)
    decoder = sudoku.train(sudoku.decoder_loss, True, puzzles, seed=0, steps=2)
    grids, given = puzzles
    asked = torch.where(given, grids, sudoku.MASK)
    in_order = sudoku.in_blocks(sudoku.confidence, 1)
    for n_calls, (filled, calls) in (
            (1, sudoku.fill(masked, sudoku.confidence, asked, threshold=0.)),
            (36, sudoku.fill(masked, in_order, asked)),
            (36, sudoku.fill_in_order(decoder, asked, n_beams=1)),
            (36, sudoku.fill_in_order(decoder, asked, n_beams=3))):
        assert (filled[given] == asked[given]).all() and (filled != sudoku.MASK).all()
        assert calls == n_calls


def test_the_picture_of_a_sudoku_shows_each_digit_in_its_call(sudoku, monkeypatch):
    """ The masked network knows the grid, the decoder one that is wrong in its last gap. """
    grids, given = sudoku.draw_puzzles(1, [45], seed=0)
    asked = torch.where(given, grids, sudoku.MASK)
    wrong = grids.clone()
    last = (~given[0]).nonzero()[-1, 0]
    wrong[0, last] = (grids[0, last] + 1) % 9
    sure = (~given[0]).nonzero()[:20, 0]                   # all others wait for the second call

    def logits_of(model, x, puzzle=None, positions=None):
        logits = 20. * F.one_hot(wrong if puzzle is not None else grids, sudoku.V)
        if puzzle is None and (x == sudoku.MASK).sum() == 36:
            logits[0, ~torch.isin(torch.arange(81), sure)] /= 20
        return logits.flatten(0, 1)[positions] if puzzle is None else logits[:, :x.shape[1]]
    monkeypatch.setattr(sudoku, 'logits_of', logits_of)
    svg = sudoku.picture_of_one(None, None, asked, grids)
    root = ElementTree.fromstring(svg)
    says = [*root.iter('{http://www.w3.org/2000/svg}text')]
    masked, decoder = says[:82], says[82:]
    assert [panel[0].text.split(': ')[1] for panel in (masked, decoder)] == ['2 calls', '36 calls']
    assert [int(text.text) - 1 for text in masked[1:]] == grids[0].tolist()
    assert [int(text.text) - 1 for text in decoder[1:]] == wrong[0].tolist()
    assert [text.get('class') for text in decoder[1:]].count('wrong') == 1
    call = [int(text.get('style').split()[1][1:]) if text.get('style') else 0
            for text in masked[1:]]
    assert [cell for cell in range(81) if call[cell] == 1] == sure.tolist()
    assert [cell for cell in range(81) if call[cell] == 0] == given[0].nonzero()[:, 0].tolist()
    assert sudoku.picture_of_one(None, None, asked, wrong) is None, 'ours is wrong'


def test_beams_of_a_sudoku_find_the_likeliest_grid(sudoku, monkeypatch):
    """ Against all grids: two gaps, a table of probabilities, as many beams as digits. """
    table = torch.randn(sudoku.V + 1, sudoku.V, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(sudoku, 'logits_of', lambda model, x, puzzle: table[x.roll(1, 1)])
    puzzles = torch.arange(81)[None] % 9
    puzzles[0, 40:42] = sudoku.MASK
    log_p = table.log_softmax(1)
    a, b = torch.meshgrid(*2 * [torch.arange(sudoku.V)], indexing='ij')
    best = (log_p[puzzles[0, 39], a] + log_p[a, b]).argmax()             # what follows is certain
    filled, _ = sudoku.fill_in_order(None, puzzles, n_beams=sudoku.V)
    assert filled[0, 40:42].tolist() == [a.flatten()[best], b.flatten()[best]]


def test_the_cells_of_the_notebook_run_in_order(tmp_path, monkeypatch, capsys):
    """ By exec. The cell with the tag `parameters` is followed by a tiny size. """
    plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    plt.switch_backend('agg')
    shown = []
    monkeypatch.setattr(plt, 'show', lambda: (shown.append(plt.gcf()), plt.close('all')))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', sys.path[:])
    names = 'list file number name item line word'.split()
    lines = [f'{verb} the {name} of the {other} number {i}.' for verb in ('Return', 'Copy', 'Find')
             for name in names for other in names for i in range(3)]
    (tmp_path / 'lines.txt').write_text('\n'.join(lines))
    tiny = dict(
        root=ROOT, data=tmp_path / 'data', out_dir=tmp_path / 'out', sentence=lines[0],
        prepare_knobs=[f'--input={tmp_path}/lines.txt', '--encoder_dims=16', '--vocab_size=300',
                       '--val_fraction=.2'],
        train_knobs=['--depth=1', '--width=32', '--heads=2', '--latent_tokens=2', '--batch_size=8',
                     '--max_iters=4', '--warmup_iters=1', '--eval_interval=2', '--eval_rows=8',
                     '--device=cpu', '--dtype=float32'],
        evaluate_knobs=['--tasks=l2t', '--n=4', '--draws=1', '--rerank=1', '--device=cpu'])

    namespace = {'__name__': '__main__'}
    for cell in json.loads((FOLDER / 'quickstart.ipynb').read_text())['cells']:
        if cell['cell_type'] == 'code':
            exec(compile(''.join(cell['source']), cell['id'], 'exec'), namespace)
            if 'parameters' in cell['metadata'].get('tags', ()):
                assert set(tiny) <= set(namespace), 'a setting that the notebook does not have'
                namespace.update(tiny)
    out = capsys.readouterr().out
    assert len(shown) == 4 and 'python evaluate.py' in out and f'{lines[0]}\n  -> ' in out
    n_masked = (namespace['frames'] == namespace['mask_id']).sum(1)
    assert n_masked.tolist() == list(range(32, -1, -1)), 'a call unmasks one token'


def test_where_there_is_no_clone_the_notebook_makes_one(tmp_path, monkeypatch):
    pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    if not (ROOT / '.git').exists():
        pytest.skip('the tests run outside of a clone')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', sys.path[:])
    commands = []
    real_run = subprocess.run

    def without_pip(command, **how):
        commands.append(command)
        return None if 'pip' in command else real_run(command, **how)
    monkeypatch.setattr(subprocess, 'run', without_pip)
    namespace = {}
    cells = json.loads((FOLDER / 'quickstart.ipynb').read_text())['cells']
    settings, first = [cell for cell in cells if cell['cell_type'] == 'code'][:2]
    exec(''.join(settings['source']), namespace)
    namespace['root'] = 'nowhere'
    with pytest.raises(ValueError, match='give its address'):
        exec(''.join(first['source']), namespace)
    namespace['repository'] = str(ROOT)
    for _ in range(2):
        namespace['root'] = '..'
        exec(''.join(first['source']), namespace)
        assert (tmp_path / 'nanoLDLM/train.py').is_file()
        assert namespace['root'] == tmp_path / 'nanoLDLM'
        assert namespace['out_dir'] == tmp_path / 'nanoLDLM/out/quickstart'
    assert [command[0] for command in commands] == ['git', sys.executable, sys.executable]
    assert commands[1][-2:] == ['-e', 'nanoLDLM']
