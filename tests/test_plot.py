""" plot.py reads what train.py and evaluate.py write. """
import json

import pytest

from benchmarks import pictures
from launch import run_each

LOG = [dict(step=50, text_loss=3., text_nats_per_token=6., text_nll_by_t=[1., 2., 3., None], grad_norm=4., tokens_per_s=900.),
       dict(step=50, val_text=2.5, best=True),
       dict(step=100, text_loss=2., text_nats_per_token=4., text_nll_by_t=[.5, 1., 2., 3.], grad_norm=3., tokens_per_s=1000.,
            skips=[dict(step=70)]), dict(step=100, val_text=2.0, best=True)]
RESULTS = {'l2t/bleu': 30., 'l2t_sweep_sampler_steps/n': 8}
for sampler in ('ancestral', 'cached'):
    for steps in (2, 4):
        label = f'l2t_sweep_sampler_steps/sampler={sampler},steps={steps}'
        RESULTS |= {f'{label}/calls': float(steps), f'{label}/bleu': 10. * steps, f'{label}/bleu_se': 1.}


def test_pictures_show_the_logged_numbers(tmp_path):
    plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    figure = pictures.draw_curves(LOG, plt)
    left, right, norms, speed = figure.axes
    assert left.get_ylabel() == 'nats per token, PAD not counted'
    assert left.lines[0].get_xydata().tolist() == [[50, 6], [100, 4]] and left.lines[1].get_xydata().tolist() == [[50, 2.5], [100, 2]]
    assert norms.lines[0].get_xydata().tolist() == [[50, 4], [100, 3]] and norms.lines[1].get_xdata() == [70, 70]
    assert speed.lines[0].get_xydata().tolist() == [[50, 900], [100, 1000]]
    assert left.get_ylabel() == 'nats per token, PAD not counted'
    assert len(right.lines) == 4 and right.lines[3].get_xydata().tolist() == [[100, 3]]
    figure = pictures.draw_sweeps(pictures.read_sweeps(RESULTS, 'bleu'), 'bleu', plt)
    lines = {c.get_label(): c.lines[0].get_xydata().tolist() for c in figure.axes[0].containers}
    assert lines == {'ancestral': [[2, 20], [4, 40]], 'cached': [[2, 20], [4, 40]]}
    named = {'t2l_sweep_solver/solver=ddim/calls': 3., 't2l_sweep_solver/solver=ddim/mrr': .5, 't2l_sweep_solver/solver=heun/calls': 5.,
             't2l_sweep_solver/solver=heun/mrr': .7}
    (_, points), = pictures.read_sweeps(named, 'mrr').items()
    assert pictures.draw_sweeps({'t2l_sweep_solver': points}, 'mrr', plt).axes[0].containers[0].lines[0].get_ydata().tolist() == [.5, .7]
    figure.savefig(tmp_path / 'a.png')
    assert (tmp_path / 'a.png').stat().st_size > 1000


def test_the_validations_of_several_runs_are_in_one_picture(tmp_path):
    plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    both = [dict(step=50, val_text=3.5, val_causal=3., best=True), dict(step=100, val_text=3.25, val_causal=2.5, best=True)]
    axis, = pictures.draw_runs({'masked': LOG, 'both': both}, plt).axes
    assert {line.get_label(): (line.get_xydata().tolist(), line.get_linestyle(), line.get_color()) for line in axis.lines} == {
        'masked, bound': ([[50, 2.5], [100, 2]], '-', 'C0'), 'both, bound': ([[50, 3.5], [100, 3.25]], '-', 'C1'),
        'both, left to right': ([[50, 3], [100, 2.5]], '--', 'C1')}
    with pytest.raises(ValueError, match='a: no validation'):
        pictures.draw_runs({'a': [dict(step=1, text_loss=2.)]}, plt)

    # as a command
    for name, entries in dict(masked=LOG, both=both).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / 'training_log.jsonl').write_text('\n'.join(map(json.dumps, entries)))
    (rc, out, err), twice, missing = run_each(
        *(['plot.py', f'--out_dir={tmp_path}/masked,{tmp_path}/{other}', '--what=runs'] for other in ('both', 'masked', 'nope')))
    assert rc == 0 and (tmp_path / 'masked' / 'runs.png').stat().st_size > 1000, err
    assert twice[0] == 2 and 'two runs of one name' in twice[2]
    assert missing[0] == 2 and 'nope' in missing[2] and missing[2].count('\n') == 1


def test_the_log_of_a_run_that_diverged_is_drawn(tmp_path):
    plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    nan, inf = float('nan'), float('inf')
    diverged = [{**LOG[0], 'step': 150, 'text_loss': nan, 'text_nats_per_token': nan, 'grad_norm': inf,
                 'text_nll_by_t': [nan, inf, 2., None]}, dict(step=150, val_text=nan, best=False)]
    path = tmp_path / 'training_log.jsonl'
    path.write_text('\n'.join(map(json.dumps, LOG + diverged)))
    figure = pictures.draw_curves(pictures.read_log(path), plt)
    figure.savefig(tmp_path / 'a.png')
    left, right, norms, speed = figure.axes
    assert left.lines[0].get_xydata().tolist()[:2] == [[50, 6], [100, 4]]
    assert norms.lines[0].get_ydata().tolist() == [4, 3, inf]


def test_what_cannot_be_drawn_is_one_line_and_code_2(tmp_path):
    pytest.importorskip('matplotlib', reason='needs matplotlib')
    logs = [None, '', '{"step": 1', '[1]', '{"step": "one"}', '{"text_loss": 1}']
    for i, text in enumerate(logs):
        (tmp_path / f'run{i}').mkdir()
        if text is not None:
            (tmp_path / f'run{i}' / 'training_log.jsonl').write_text(text)
    (tmp_path / 'run0' / 'results.json').write_text('[1')
    results = run_each(['plot.py', f'--out_dir={tmp_path}/nope'], ['plot.py', f'--out_dir={tmp_path}/nope', '--what=sweep'],
                       ['plot.py', f'--out_dir={tmp_path}/run1', '--what=importance'],
                       ['plot.py', f'--out_dir={tmp_path}/run0', '--what=sweep'],
                       *(['plot.py', f'--out_dir={tmp_path}/run{i}'] for i in range(len(logs))))
    names = ['nope'] * 2 + ['results.json'] * 2 + ['training_log.jsonl'] * len(logs)
    for (rc, _, err), name in zip(results, names):
        assert rc == 2 and err.count('\n') == 1 and err.startswith('error: ') and name in err, err
    assert 'train it first' in results[0][2] and 'line 1' in results[-1][2]


def test_a_log_on_disk_is_read_line_by_line(tmp_path):
    (tmp_path / 'training_log.jsonl').write_text('\n'.join(map(json.dumps, LOG)) + '\n')
    assert pictures.read_log(tmp_path / 'training_log.jsonl') == LOG
    (tmp_path / 'training_log.jsonl').write_text('\n'.join(map(json.dumps, [dict(step=50, text_loss=9.), *LOG])) + '\n')
    assert pictures.read_log(tmp_path / 'training_log.jsonl') == LOG, 'a resumed run did step 50 again'


def test_the_picture_of_importance_shows_its_spread_and_the_loss_by_quarters():
    plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    entries = [dict(step=s, importance_mean=.5, importance_std=.1 * s, importance_min=.1, importance_max=.9) for s in (1, 2)]
    results = {f'importance/{by}/{key}': value for by in ('frequency', 'importance') for q in (1, 2, 3, 4)
               for key, value in ((f'nats_quarter_{q}', q + .5), (f'nats_quarter_{q}_se', .1), ('spearman_with_loss', .25))}
    left, right = pictures.draw_importance(entries, results, plt).axes
    assert left.lines[0].get_xydata().tolist() == [[1, .5], [2, .5]] and len(left.collections) == 2
    assert [bar.get_height() for bar in right.patches] == [1.5, 2.5, 3.5, 4.5] * 2
    assert 'rank correlation 0.25' in right.get_legend().get_texts()[0].get_text()
    assert len(pictures.draw_importance([], results, plt).axes[1].patches) == 8, 'a run without importance: by frequency all the same'
