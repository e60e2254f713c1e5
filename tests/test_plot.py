""" plot.py reads what train.py and evaluate.py write. """
import json
import sys

import numpy as np
import pytest

import plot
from launch import assert_refused, flags, run_together
from toys import put

plt = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib')

LOG = [dict(step=50, text_loss=3., text_nats_per_token=6., text_nll_by_t=[1., 2., 3., None],
            latent_loss=.1, latent_mse_by_t=[.2, .3, .7, None], grad_norm=4., tokens_per_s=900.),
       dict(step=50, val_text=2.5, best=True),
       dict(step=100, text_loss=2., text_nats_per_token=4., text_nll_by_t=[.5, 1., 2., 3.],
            grad_norm=3., tokens_per_s=1000., skips=[dict(step=70)]),
       dict(step=100, val_text=2.0, val_latent=.5, best=True)]
NAN, INF = float('nan'), float('inf')
DIVERGED = [{**LOG[0], 'step': 150, 'text_nats_per_token': NAN, 'grad_norm': INF,
             'text_nll_by_t': [NAN, INF, 2., None]}, dict(step=150, val_text=NAN, best=False)]


def points(line):
    return line.get_xydata().tolist()


def test_curves_show_the_logged_numbers_also_of_a_run_that_diverged(tmp_path):
    # it did step 50 again
    put(tmp_path / 'a.jsonl', lines_of([dict(step=50, text_loss=9.), *LOG]))
    assert plot.read_log(tmp_path / 'a.jsonl') == LOG
    figure = plot.draw_curves(LOG, plt)
    left, right, latent, _, norms, speed = figure.axes
    found = [points(axis.lines[i]) for axis, i in (
        (left, 0), (left, 1), (right, 3), (latent, 1), (norms, 0), (speed, 0))]
    assert found == [[[50, 6], [100, 4]], [[50, 2.5], [100, 2]], [[100, 3]], [[100, .5]],
                     [[50, 4], [100, 3]], [[50, 900], [100, 1000]]]
    assert points(latent.lines[0]) == [[50, pytest.approx(.4)]] and len(right.lines) == 4
    assert norms.lines[1].get_xdata() == [70, 70], 'a step that was skipped'
    figure.canvas.draw()
    ticks = [tick.get_text() for tick in left.get_yticklabels(which='both')]
    assert {'2', '3', '5'} <= {*ticks}, 'numbers as one writes them'

    figure = plot.draw_curves(LOG + DIVERGED, plt)
    figure.savefig(tmp_path / 'a.png')
    assert figure.axes[4].lines[0].get_ydata().tolist() == [4, 3, INF]


def test_sweeps_with_other_knobs_or_of_other_texts_have_panels_of_their_own():
    def record(value, texts='', metric='bleu', knobs={}, **point):
        return dict(task='l2t', metric=metric, control='', value=value, se=None, n=9, texts=texts,
                    point=point, knobs=knobs, checkpoint='step-1')
    records = [record(10, rerank=2), record(20, rerank=4), record(40, 'my.txt', rerank=2),
               record(30, knobs=dict(guidance=2.0), rerank=2)]
    for sampler, bleu, calls in (('cached', 50, 3.5), ('remdm', 60, 8)):
        records += [record(bleu, sampler=sampler, steps=8),
                    record(calls, metric='calls', sampler=sampler, steps=8)]
    panels = plot.read_sweeps(records, 'bleu')
    assert list(panels.values()) == [
        {'l2t': [(2, 10, 0), (4, 20, 0)]}, {'l2t': [(2, 40, 0)]}, {'l2t': [(2, 30, 0)]},
        {'sampler cached': [(3.5, 50, 0)], 'sampler remdm': [(8, 60, 0)]}]
    assert len(plot.draw_sweeps(panels, 'bleu', plt).axes) == 4


def written(folder, text):
    """ A folder with this log. """
    put(folder / 'training_log.jsonl', text)
    return folder


def lines_of(entries):
    return '\n'.join(map(json.dumps, entries)) + '\n'


def test_a_picture_of_ours_is_drawn_again_and_a_file_of_somebody_else_is_left_alone(
        tmp_path, monkeypatch):
    written(tmp_path, lines_of(LOG))
    monkeypatch.setattr(sys, 'argv', ['plot.py', f'--out_dir={tmp_path}'])
    for _ in range(2):
        plot.main()
    (tmp_path / 'curves.png').write_text('precious')
    with pytest.raises(SystemExit):
        plot.main()
    assert (tmp_path / 'curves.png').read_text() == 'precious'


def test_a_dollar_in_a_name_is_a_dollar_and_a_damaged_sweep_is_one_line(here):
    record = dict(task='l2t', metric='bleu', control='', value=12.5, se=None, n=9,
                  texts='costs_$5_and_$x__y.txt', point=dict(temperature=.5), knobs={},
                  checkpoint='step-1', commit=None)
    cases = dict(good={}, large=dict(value=10**400), no_calls=dict(point=dict(steps=8)))
    for name, changes in cases.items():
        put(f'{name}/results.json', json.dumps([record | changes]))
    good, large, no_calls = run_together(
        *[['plot.py', *flags(what='sweep', out_dir=f'./{name}', save=f'{name}.svg')]
          for name in cases], cwd=here)
    assert good[0] == 0 and not good[2]
    assert 'costs_$5_and_$x__y.txt' in (here / 'good.svg').read_text()
    assert_refused(large, 'too large')
    assert_refused(no_calls, 'has no calls of l2t')


def images(*names, n=2, channels=1):
    """ Arrays of images.npz by their names: texts, or pictures that are told by their grey. """
    found = {}
    for i, name in enumerate(names):
        is_text = name.endswith(('_texts', '_written'))
        found[name] = np.full((n, 8, 8, channels), i, np.uint8)
        if is_text:
            found[name] = np.array([f'{name} {k} for $5 or $6' for k in range(n)])
    return found


def rows_drawn(arrays):
    """ (texts, greys) of each row of the picture, of its first two columns. """
    axes = np.array(plot.draw_images(arrays, plt).axes).reshape(-1, 10)
    assert not any(axis.images for axis in axes[:, 2:].flat), 'there are two of each kind'
    return [([axis.get_title().replace('\n', ' ') for axis in row[:2]],
             {int(axis.images[0].get_array().max()) for axis in row[:2]}) for row in axes]


def test_pictures_stand_under_their_captions_next_to_the_real_ones_and_the_controls():
    names = ['shared_texts', 'shared_made', 'shared_real', 'shared_ridge', 'shared_copy',
             'sets_written', 'sets_real', 'both_texts', 'both_made', 'half_texts', 'half_given',
             'half_made', 'half_real']
    less = ['val_texts', 'val_made', 'val_real', 'val_written']
    found = rows_drawn(images(*names, *less))
    assert [greys for _, greys in found] == [{1}, {2}, {3}, {4}, {6}, {8}, {10}, {11}, {12}]
    titles = [texts[1].removesuffix(' 1 for $5 or $6') for texts, _ in found]
    assert titles == ['shared_texts', '', '', '', 'sets_written', 'both_texts', 'half_texts', '',
                      '']

    # only what the file has, in colour too
    found = rows_drawn(images(*less, channels=3))
    assert [greys for _, greys in found] == [{1}, {2}, {2}]
    found = rows_drawn(images('val_texts', 'val_real', 'val_written'))
    assert [texts[0][:11] for texts, _ in found] == ['val_written']
    with pytest.raises(ValueError, match='images.npz has none of the pictures'):
        plot.draw_images(images('val_texts'), plt)


@pytest.mark.parametrize('name, array', [
    ('val_made', np.array(5)), ('val_made', np.zeros((2, 8, 8, 2))),
    ('val_made', np.zeros((3, 8, 8, 1))), ('val_real', np.array(['a', 'b'])),
    ('val_real', np.zeros((2, 8, 8, 1), complex)), ('val_texts', np.array(5)),
    ('val_texts', np.zeros(2))])
def test_pictures_of_another_form_are_refused(name, array):
    arrays = images('val_texts', 'val_made', 'val_real') | {name: array}
    with pytest.raises(ValueError, match='images.npz: val_.* is .*, with texts .*; run evaluate'):
        plot.draw_images(arrays, plt)


DAMAGED = [
    '', '{"step": 1', '[1]', '{"text_loss": 1}', '{"step": Infinity}', '{"step": "1"}',
    '{"step": 1, "text_loss": 1, "text_nll_by_t": [1, 2]}', '{"step": 1, "skips": [{}]}',
    '{"step": 1, "skips": 5}', '{"step": 1, "grad_norm": "high"}',
    '{"step": 1, "latent_mse_by_t": "abcd"}', f'{{"step": 1, "val_text": 1{"0" * 400}}}',
    '[' * 2**21]


def test_what_cannot_be_drawn_is_one_line_and_code_2(tmp_path):
    folders = [written(tmp_path / f'run{i}', text) for i, text in enumerate(DAMAGED)]
    (tmp_path / 'empty').mkdir()
    results = run_together(*(['plot.py', f'--out_dir={folder}'] for folder in folders))
    for result in results:
        assert_refused(result, 'error: ', 'training_log.jsonl')
    assert 'line 1' in results[-1][2]
    nope, empty, no_sweep, nowhere = run_together(
        ['plot.py', f'--out_dir={tmp_path}/nope'], ['plot.py', f'--out_dir={tmp_path}/empty'],
        ['plot.py', f'--out_dir={folders[0]}', '--what=sweep'],
        ['plot.py', f'--out_dir={tmp_path}/empty', f'--save={tmp_path}/none/a.png'])
    assert_refused(nope, 'nope', 'train it first')
    assert_refused(empty, 'training_log.jsonl')
    assert_refused(no_sweep, 'results.json')
    assert nowhere[2] == f'error: {tmp_path}/none/a.png: no such folder\n'
