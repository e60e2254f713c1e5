"""
examples/ as sentences: each example prints its claim, and returns the numbers that it prints. The
truths are closed forms or sums over all texts, so they hold on any machine.
"""
import importlib
import json
import math
import sys

import pytest
import torch

from launch import ROOT, run

FOLDER = ROOT / 'examples'
NAMES = sorted(path.stem for path in FOLDER.glob('*.py') if not path.stem.startswith('toy'))
ENTROPY = -sum(p * math.log(p) for p in (.4, .3, .2, .1))


@pytest.fixture
def found(request, monkeypatch, capsys):
    """ The numbers of the example that a test names, as found of its main(). What it prints fits a wall. """
    monkeypatch.syspath_prepend(str(FOLDER))
    numbers = importlib.import_module(request.param).main()
    lines = capsys.readouterr().out.splitlines()
    assert 4 <= len(lines) <= 20 and max(map(len, lines)) <= 100
    return numbers


def of_example(name):
    return pytest.mark.parametrize('found', [name], indirect=True)


def assert_drawn(drawn, law, n):
    """ Shares of n draws lie within 5 standard errors of their law. """
    drawn, law = torch.as_tensor(drawn, dtype=torch.float64), torch.as_tensor(law, dtype=torch.float64)
    error = (law * (1 - law) / n).clamp(min=0).sqrt()
    assert ((drawn - law).abs() <= 5 * error + 1e-9).all(), (drawn, law)


@of_example('why_one_over_t')
def test_one_over_t_counts_each_step_once_and_other_weights_fall_below_the_entropy(found):
    assert found['counted']['1/t'] == pytest.approx([1] * 4, abs=1e-5)
    assert found['counted']['cosine'] == pytest.approx([1] * 4, abs=1e-5)
    assert found['counted']['1'] == pytest.approx([n / 5 for n in (4, 3, 2, 1)], abs=1e-5)
    assert found['nats']['1/t'] == pytest.approx(ENTROPY, abs=1e-5) == found['entropy']
    assert found['nats']['1 - t'] < found['nats']['1'] < ENTROPY - .4


@of_example('two_bounds_agree')
def test_the_two_bounds_agree_and_only_the_best_network_meets_the_entropy(found):
    for name in ('best network', 'worse network'):
        (exact, mean, error), (exact_2, mean_2, error_2) = found[name, '1/t'], found[name, 'L/n']
        assert exact == pytest.approx(exact_2, abs=1e-5)
        assert abs(mean - exact) < 5 * error and abs(mean_2 - exact) < 5 * error_2
        assert error_2 < .8 * error
    assert found['best network', 'L/n'][0] == pytest.approx(ENTROPY, abs=1e-6)
    assert found['worse network', 'L/n'][0] > ENTROPY + .3


@of_example('perplexity_that_is_not_one')
def test_whole_tokens_over_masked_sub_tokens_fall_below_the_entropy_by_half_the_information(found):
    for of_parts, entropy, of_whole, too_good in found.values():
        assert of_parts == pytest.approx(entropy, abs=1e-6) and of_whole == pytest.approx(too_good, abs=1e-6)
    _, entropy, of_whole, _ = found['one bit, written twice']
    assert (round(of_whole, 3), round(entropy, 3)) == (.347, .693)
    of_parts, _, of_whole, _ = found['two fair bits']
    assert of_parts == pytest.approx(of_whole), 'independent sub-tokens give nothing away'


@of_example('first_hitting_equals_ancestral')
def test_four_calls_of_first_hitting_are_exact_and_ancestral_comes_near_with_many(found):
    for drawn, law in found.values():
        assert_drawn(drawn, law, 20_000)
        assert law.sum().item() == pytest.approx(1, abs=1e-6)
    p = torch.tensor([.4, .3, .2, .1] + [0] * 12, dtype=torch.float64)
    assert torch.allclose(found['first_hitting', 4][1], p, atol=1e-6)
    far = [(found['ancestral', T][1] - p).abs().sum().item() for T in (1, 4, 16, 64)]
    assert far[0] > 1 and far[3] < .03 and far == sorted(far, reverse=True)
    none_together = 64 * 63 * 62 * 61 / 64 ** 4
    assert found['ancestral', 64][1][4:].sum() <= 1 - none_together


@of_example('what_parallel_unmasking_breaks')
def test_the_damage_of_parallel_unmasking_is_the_information_that_a_call_holds(found):
    for calls in (4, 2, 1):
        drawn, law = found.pop(calls)
        assert_drawn(drawn, law, 20_000)
        assert law == pytest.approx({4: 0, 1: 1 - (.6 ** 2 + .4 ** 2) * (.7 ** 2 + .3 ** 2)}.get(calls, law), abs=1e-6)
    assert len(found) == 6
    for pair, (wrong, damage, information) in found.items():
        assert damage == pytest.approx(information, abs=1e-6)
        assert (wrong > .5 and damage > 1) if pair in ((0, 2), (1, 3)) else (wrong < 1e-6 and damage < .01)


@of_example('two_clocks_make_every_task')
def test_one_network_answers_as_bayes_at_every_point_of_the_square(found):
    assert len(found) == 7
    errors = torch.stack([(answer - truth).abs() for answer, truth in found.values()])
    assert errors.max() < .35 and errors.mean() < .08, errors
    truths = torch.stack([truth for _, truth in found.values()])
    assert truths[2].tolist() == pytest.approx([.4, .3, -.2, -.4], abs=1e-6) and truths[0].tolist() == [1] * 4


@of_example('causal_and_masked_rows')
def test_causal_rows_are_exact_and_only_masked_rows_see_what_is_behind_a_gap(found):
    assert ENTROPY <= found['exact'] < ENTROPY + .05
    assert ENTROPY <= found['bound'] < ENTROPY + .1, 'enumerated, so it cannot lie below'
    for text, truth in (('she __ her soup', 0), ('she __ her dog', 1)):
        masked, _, causal, _ = found[text]
        assert abs(masked - truth) < .1 and abs(causal - .25) < .1
    assert found['change'][0] > .8 and found['change'][1] < 1e-6


@of_example('guidance_on_a_toy')
def test_guidance_tilts_towards_the_condition_and_costs_entropy(found):
    for rows in found.values():
        assert_drawn(rows['drawn'], rows['enumerated'], 20_000)
    for g in (0, 1):
        assert torch.allclose(found[g]['enumerated'], found[g]['p_c^g p_u^(1-g)'], atol=1e-6)
    assert found[0]['enumerated'].tolist() == pytest.approx([.4, .3, .2, .1], abs=1e-6)
    wanted = [rows['enumerated'][3].item() for rows in found.values()]
    assert wanted == sorted(wanted) and wanted[-1] > .9
    assert (found[8]['enumerated'] - found[8]['p_c^g p_u^(1-g)']).abs().max() > 1e-3, 'word by word is another law'


@of_example('eps_learns_nothing_at_t_1')
def test_at_t_1_a_text_is_worth_nothing_to_eps_and_much_to_x0_and_v(found):
    for t in (.1, .5, .9, .99, 1.):
        for target, errors in found['fitted', t].items():
            assert errors == pytest.approx(found['exact', t][target], abs=.03)
    assert found['fitted', 1.]['eps'] == pytest.approx([0, 0], abs=1e-6)
    for target in ('x0', 'v'):
        assert found['exact', 1.][target] == pytest.approx([1, .2])
    assert 't=1' in found['refused']


# ---- sudoku: it trains for minutes, so its parts are tested

@pytest.fixture
def sudoku(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module('sudoku')


class Recorder:
    """ A network that says the same grid whatever it reads, the more surely the later the cell, and keeps what it has read.
    spoils_clues: what it says of a cell that is given is wrong, which no loss may count. """

    def __init__(self, grid, spoils_clues=False):
        self.spoils_clues = spoils_clues
        self.logits = torch.nn.functional.one_hot(grid, 8) * (1 + torch.arange(36.) / 5)[:, None]      # (36, V)
        self.read = []

    def __call__(self, x, latents, t_text, t_latent, positions=None, n_causal=0):
        puzzle, x = (x[:, :36], x[:, 36:]) if x.shape[1] == 72 else (None, x)
        self.read.append((x.clone(), puzzle, n_causal))
        logits = self.logits.expand(len(x), -1, -1)
        if self.spoils_clues:
            is_given = (x if puzzle is None else puzzle) != 8
            logits = logits.roll(1, 2).where(is_given[..., None], logits)
        if puzzle is not None:
            logits = torch.cat([logits.flip(2), logits], 1)
        return (logits if positions is None else logits.flatten(0, 1)[positions]), None


def test_grids_of_sudoku_are_right_and_a_wrong_row_column_or_box_is_seen(sudoku):
    grids = sudoku.draw_grids(500, torch.Generator().manual_seed(0))
    assert grids.shape == (500, 36) and sudoku.is_right(grids).all() and len(grids.unique(dim=0)) > 490

    def exchanged(i, j):
        order = torch.arange(36)
        order[i], order[j] = j, i
        return grids[:, order]
    assert not sudoku.is_right(exchanged(0, 1)).any(), 'two cells of one row and box: columns are wrong'
    assert not sudoku.is_right(exchanged(0, 6)).any(), 'two cells of one column and box: rows are wrong'
    by_row = (torch.arange(6)[:, None] + torch.arange(6)) % 6
    assert not sudoku.is_right(by_row.flatten()[None]), 'each row and column is right, no box is'


def test_who_fills_a_sudoku_keeps_the_clues_and_each_way_has_its_order(sudoku):
    said, other = sudoku.draw_grids(2, torch.Generator().manual_seed(0))
    is_clue = torch.arange(36) % 3 == 0
    puzzles = torch.where(is_clue, other, sudoku.MASK)[None].repeat(3, 1)
    expected = torch.where(is_clue, other, said).tolist()
    cells = [i for i in range(36) if i % 3]

    orders = {}
    for name, fill in (('certain', lambda model: sudoku.fill(model, sudoku.confidence, puzzles)),
                       ('random', lambda model: sudoku.fill(model, sudoku.first_hitting, puzzles)),
                       ('in order', lambda model: sudoku.fill_in_order(model, puzzles, reads_puzzle=False))):
        model = Recorder(said)
        filled = fill(model)
        assert filled.tolist() == [expected] * 3
        read = [x[0] for x, puzzle, n_causal in model.read if puzzle is None and not n_causal] + [filled[0]]
        orders[name] = [int(i) for x, after in zip(read, read[1:]) for i in (x != after).nonzero().flatten()]
    assert orders['certain'] == cells[::-1] and orders['in order'] == cells and sorted(orders['random']) == cells
    assert orders['random'] not in (cells, cells[::-1])

    # the decoder reads the puzzle itself at each call, from left to right
    model = Recorder(said)
    assert sudoku.fill_in_order(model, puzzles, reads_puzzle=True).tolist() == [expected] * 3
    assert all((puzzle == puzzles).all() and n_causal == 3 for _, puzzle, n_causal in model.read)


def test_the_losses_of_sudoku_are_nats_of_masked_cells_that_no_network_reads(sudoku):
    grid = sudoku.draw_grids(1, torch.Generator().manual_seed(0))
    grids = grid.expand(20_000, -1)
    nats = torch.log1p(7 * torch.exp(-1 - torch.arange(36.) / 5)).mean().item()            # one logit 1 + i / 5, and seven of 0
    for loss_of, tolerance in ((sudoku.masked_loss, .02), (sudoku.decoder_loss, .02)):
        model = Recorder(grid[0], spoils_clues=True)
        assert loss_of(model, grids, torch.Generator().manual_seed(0)).item() == pytest.approx(nats, rel=tolerance)
        (x, before, n_causal), = model.read
        puzzle = x if before is None else before
        share = (puzzle == sudoku.MASK).float().mean(1)
        assert share.mean() == pytest.approx(.55, abs=.01) and share.std() > .2                # t ~ U(.1, 1)
        assert ((puzzle == sudoku.MASK) | (puzzle == grids)).all()
        assert (before is None, n_causal) == ((True, 0) if loss_of is sudoku.masked_loss else (False, 20_000))

        # another digit in cell 5, where the logit is 2
        wrong = Recorder(torch.where(torch.arange(36) == 5, (grid[0] + 1) % 6, grid[0]))
        assert loss_of(wrong, grids, torch.Generator().manual_seed(0)).item() == pytest.approx(nats + 2 / 36, rel=tolerance)


def test_a_decoder_of_sudoku_sees_all_clues_and_no_digit_that_it_is_to_write(sudoku):
    torch.manual_seed(0)
    from toy_sudoku import GridModel
    model = GridModel(reads_puzzle=True).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=.3)
    x, other = sudoku.draw_grids(2, torch.Generator().manual_seed(0))
    puzzle = torch.where(torch.arange(36) < 20, sudoku.MASK, x)[None]
    before = sudoku.logits_of(model, x[None], puzzle=puzzle)
    after = sudoku.logits_of(model, torch.where(torch.arange(36) < 10, x, other)[None], puzzle=puzzle)
    assert torch.allclose(before[:, :11], after[:, :11], atol=1e-4) and not torch.allclose(before[:, 11:], after[:, 11:], atol=1e-2)
    last_clue = puzzle.clone()
    last_clue[0, 35] = (x[35] + 1) % 6
    assert not torch.allclose(before[:, 0], sudoku.logits_of(model, x[None], puzzle=last_clue)[:, 0], atol=1e-3)


def test_each_row_of_the_sudoku_example_is_of_the_network_and_the_order_that_it_names(sudoku, capsys, monkeypatch):
    """ The networks that are trained record what they read. One knows the first grid by heart, most surely its last cells. """
    grid = sudoku.draw_grids(200, torch.Generator().manual_seed(1000))[0]
    trained = []

    def train(loss_of, reads_puzzle, seed, steps):
        assert (loss_of, seed, steps) == (sudoku.decoder_loss if reads_puzzle else sudoku.masked_loss, 0, 500)
        trained.append(Recorder(grid))
        return trained[-1]
    monkeypatch.setattr(sudoku, 'train', train)
    found = sudoku.main(0)
    lines = capsys.readouterr().out.splitlines()
    assert len(found) == 16 and len(lines) == 5 and max(map(len, lines)) <= 100 and all(0 <= x <= 100 for x in found.values())
    assert found['decoder, from left to right', 6] < 10, 'of the 200 puzzles only the first has this grid'
    masked, decoder = trained

    # four ways of 36 calls for each number of clues, but a sampler makes none for what is given
    def given(x):
        return (x != sudoku.MASK).sum(1)
    assert all(n_causal == 200 for *_, n_causal in decoder.read)
    assert [given(puzzle).unique().tolist() for _, puzzle, _ in decoder.read] == [[clues] for clues in sudoku.CLUES for _ in range(36)]
    assert all(puzzle is None and not n_causal for _, puzzle, n_causal in masked.read)
    reads = [x for x, *_ in masked.read]
    starts = reads[:1] + [x for before, x in zip(reads, reads[1:]) if (given(x) < given(before)).any()]
    assert [given(x).unique().tolist() for x in starts] == [[clues] for _ in range(3) for clues in sudoku.CLUES]

    # which gap of a puzzle is written first: its last one, one by lot, its first one
    first = []
    for start in (starts[0], starts[4], starts[8]):
        i = next(i for i, x in enumerate(reads) if x is start)
        rank = (start == sudoku.MASK).cumsum(1) - 1                                            # of a gap among those of its puzzle
        first.append(rank[(reads[i + 1] != start)].tolist())
    certain, random, in_order = first
    assert certain == [29] * 200 and set(in_order) == {0} and len(random) == 200 and len(set(random)) == 30


@pytest.mark.parametrize('name', NAMES)
def test_an_example_is_short_opens_with_its_equation_and_its_command_and_is_on_the_page(name):
    source = (FOLDER / f'{name}.py').read_text()
    head = source.split('"""')[1]
    assert len(source.splitlines()) < 80 and '=' in head and f'python examples/{name}.py ' in head
    assert f'[{name}](../examples/{name}.py)' in (ROOT / 'docs/examples.md').read_text()


def test_an_example_runs_from_any_folder(tmp_path):
    result = run('examples/perplexity_that_is_not_one.py', cwd=tmp_path)
    assert result.returncode == 0 and not result.stderr and '0.347 (0.347)' in result.stdout


# ---- the notebook

NOTEBOOK = FOLDER / 'quickstart.ipynb'


def code_cells():
    cells = json.loads(NOTEBOOK.read_text())['cells']
    return [cell for cell in cells if cell['cell_type'] == 'code']


def test_the_notebook_is_whole_small_and_shows_its_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook['nbformat'] == 4 and NOTEBOOK.stat().st_size < 300_000
    assert len({cell['id'] for cell in notebook['cells']}) == len(notebook['cells'])
    assert [cell['execution_count'] for cell in code_cells()] == list(range(1, len(code_cells()) + 1))
    outputs = [output for cell in code_cells() for output in cell['outputs']]
    assert all(output['output_type'] in ('stream', 'display_data') for output in outputs), 'an error, or a warning'
    assert sum(output['output_type'] == 'display_data' for output in outputs) == 4


def test_the_cells_of_the_notebook_run_in_order(tmp_path, monkeypatch, capsys):
    """ Jupyter is no requirement, so the code cells are run by exec, in one clean namespace and in a temporary folder. The cell
    with the tag `parameters` is followed by tiny settings. """
    plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    plt.switch_backend('agg')
    shown = []
    monkeypatch.setattr(plt, 'show', lambda: (shown.append(plt.gcf()), plt.close('all')))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', sys.path[:])
    names, verbs = 'list file number name item line word'.split(), 'Return Remove Print Copy Find'.split()
    lines = [f'{verb} the {name} of the {other} number {i}.' for verb in verbs for name in names for other in names for i in range(2)]
    (tmp_path / 'lines.txt').write_text('\n'.join(lines))
    tiny = dict(
        root=ROOT, data=tmp_path / 'data', out_dir=tmp_path / 'out', sentence=lines[0],
        prepare_knobs=[f'--input={tmp_path}/lines.txt', '--encoder_dims=16', '--vocab_size=300', '--val_fraction=.2'],
        train_knobs=['--depth=1', '--width=32', '--heads=2', '--latent_tokens=2', '--batch_size=8', '--max_iters=4', '--warmup_iters=1',
                     '--eval_interval=2', '--eval_iters=1', '--device=cpu', '--dtype=float32'],
        evaluate_knobs=['--tasks=l2t', '--n=4', '--draws=1', '--rerank=1', '--device=cpu'])

    namespace = {'__name__': '__main__'}
    for cell in code_cells():
        exec(compile(''.join(cell['source']), cell['id'], 'exec'), namespace)
        if 'parameters' in cell['metadata'].get('tags', ()):
            assert set(tiny) <= set(namespace), 'a setting that the notebook does not have'
            namespace.update(tiny)

    out = capsys.readouterr().out
    assert len(shown) == 4 and '4 steps in ' in out and f'{lines[0]}\n  -> ' in out and 'nearest of 8\n  -> ' in out and 'bleu ours ' in out
    assert (namespace['frames'][-1] != namespace['mask_id']).all() and (namespace['frames'][0] == namespace['mask_id']).all()
    n_masked = (namespace['frames'] == namespace['mask_id']).sum(1)
    assert n_masked.tolist() == list(range(32, -1, -1)), 'a call unmasks one token'
    assert len(shown[1].axes[0].lines) == 2 and len(shown[3].axes) == 2
