""" plot.py reads what train.py and evaluate.py write. """
import json

import pytest

import plot

LOG = [dict(step=50, text_loss=3., text_nll_by_t=[1., 2., 3., None], grad_norm=4., tokens_per_s=900.),
       dict(step=50, val_text=2.5, best=True),
       dict(step=100, text_loss=2., text_nll_by_t=[.5, 1., 2., 3.], grad_norm=3., tokens_per_s=1000.,
            skips=[dict(step=70)]), dict(step=100, val_text=2.0, best=True)]
RESULTS = {'l2t/bleu': 30., 'l2t_sweep_sampler_steps/n': 8}
for sampler in ('ancestral', 'cached'):
    for steps in (2, 4):
        label = f'l2t_sweep_sampler_steps/sampler={sampler},steps={steps}'
        RESULTS |= {f'{label}/calls': float(steps), f'{label}/bleu': 10. * steps, f'{label}/bleu_se': 1.}


def test_sweeps_are_found_among_the_flat_keys():
    (name, points), = plot.read_sweeps(RESULTS, 'bleu').items()
    assert name == 'l2t_sweep_sampler_steps' and len(points) == 4
    assert points[0] == (dict(sampler='ancestral', steps='2'), dict(value=20., se=1., calls=2.))
    assert plot.read_sweeps(RESULTS, 'f1') == {}


def test_pictures_show_the_logged_numbers(tmp_path):
    plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    figure = plot.draw_curves(LOG, plt)
    left, right, norms, speed = figure.axes
    assert left.lines[0].get_xydata().tolist() == [[50, 3], [100, 2]] and left.lines[1].get_xydata().tolist() == [[50, 2.5], [100, 2]]
    assert norms.lines[0].get_xydata().tolist() == [[50, 4], [100, 3]] and norms.lines[1].get_xdata() == [70, 70]
    assert speed.lines[0].get_xydata().tolist() == [[50, 900], [100, 1000]]
    assert len(right.lines) == 4 and right.lines[3].get_xydata().tolist() == [[100, 3]]
    figure = plot.draw_sweeps(plot.read_sweeps(RESULTS, 'bleu'), 'bleu', plt)
    lines = {c.get_label(): c.lines[0].get_xydata().tolist() for c in figure.axes[0].containers}
    assert lines == {'ancestral': [[2, 20], [4, 40]], 'cached': [[2, 20], [4, 40]]}
    named = {'t2l_sweep_solver/solver=ddim/calls': 3., 't2l_sweep_solver/solver=ddim/mrr': .5, 't2l_sweep_solver/solver=heun/calls': 5.,
             't2l_sweep_solver/solver=heun/mrr': .7}
    (_, points), = plot.read_sweeps(named, 'mrr').items()
    assert plot.draw_sweeps({'t2l_sweep_solver': points}, 'mrr', plt).axes[0].containers[0].lines[0].get_ydata().tolist() == [.5, .7]
    figure.savefig(tmp_path / 'a.png')
    assert (tmp_path / 'a.png').stat().st_size > 1000


def test_a_log_on_disk_is_read_line_by_line(tmp_path):
    (tmp_path / 'training_log.jsonl').write_text('\n'.join(map(json.dumps, LOG)) + '\n')
    assert plot.read_log(tmp_path / 'training_log.jsonl') == LOG
    (tmp_path / 'training_log.jsonl').write_text('\n'.join(map(json.dumps, [dict(step=50, text_loss=9.), *LOG])) + '\n')
    assert plot.read_log(tmp_path / 'training_log.jsonl') == LOG, 'a resumed run did step 50 again'


def test_the_picture_of_importance_shows_its_spread_and_the_loss_by_quarters():
    plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')
    entries = [dict(step=s, importance_mean=.5, importance_std=.1 * s, importance_min=.1, importance_max=.9) for s in (1, 2)]
    results = {f'importance/{by}/{key}': value for by in ('frequency', 'importance') for q in (1, 2, 3, 4)
               for key, value in ((f'nats_quarter_{q}', q + .5), (f'nats_quarter_{q}_se', .1), ('spearman_with_loss', .25))}
    left, right = plot.draw_importance(entries, results, plt).axes
    assert left.lines[0].get_xydata().tolist() == [[1, .5], [2, .5]] and len(left.collections) == 2
    assert [bar.get_height() for bar in right.patches] == [1.5, 2.5, 3.5, 4.5] * 2
    assert 'rank correlation 0.25' in right.get_legend().get_texts()[0].get_text()
    assert len(plot.draw_importance([], results, plt).axes[1].patches) == 8, 'a run without importance: by frequency all the same'
