"""
Pictures of a run, from the files in its folder: training_log.jsonl of train.py, results.json and
images.npz of evaluate.py. Needs matplotlib: pip install matplotlib

    python plot.py --out_dir=out/quickstart                              # training_log.jsonl
    python plot.py --out_dir=out/quickstart --what=sweep --metric=bleu   # evaluate.py --sweep=...
    python plot.py --out_dir=out/icons --what=images                     # and --tasks=image
    python plot.py --out_dir=weights/captions --what=report              # texts being written
    python plot.py --out_dir=weights/icons --what=try                    # type a name, it is drawn
A sweep over steps is drawn against the network calls that a text took, a line per sampler; over
another knob against that knob. Report and try are each one HTML file; sampling/report.py makes the
one, sampling/try_page.py the other, of a run of pictures.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))   # PYTHONSAFEPATH=1 leaves it out
if __name__ == '__main__':
    import base.begin                                      # before torch

import base64
import io
import json
import textwrap

from base.console import shown, stop_on_error
from base.files import read_array, read_arrays, regular
from base.writing import WRITTEN_BY, check_ours, check_writable, write_text, write_whole
from configurator import configure, here_or_beside, on_command_line, seen_from
from runs.results import find, read_results

out_dir = 'out/quickstart'      # <a run folder>
what = 'curves'                 # curves | sweep | images | report | try
metric = 'bleu'                 # sweep: of l2t or t2l, as named in results.json
save = ''                       # '': <what>.png, report.html or try.html, next to the training's
                                # log if <out_dir> has one, else here
dataset = ''                    # report: where the run's dataset lies; '': where it was trained

LOG = 'training_log.jsonl'
DRAWN = ('text_nats_per_token', 'causal_nats_per_token', 'val_text', 'val_causal', 'val_latent',
         'grad_norm', 'tokens_per_s')          # what is drawn of it against the steps

# -----------------------------------------------------------------------------
# Files. ValueError says what is wrong and what to do

def pyplot():
    """ matplotlib.pyplot, which draws into files alone. """
    try:
        import matplotlib
    except ImportError:
        raise ValueError('pictures need matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    plt.rcParams['text.parse_math'] = False                # a $ in a text or a name is a $
    return plt


def check_file(path, what_to_do):
    """ ValueError where the run or the file is missing. """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise ValueError(f'no run in {folder}{seen_from(folder)}: train it first, or name another '
                         '--out_dir')
    if not os.path.isfile(path):
        raise ValueError(f'{path}: missing, {what_to_do}')


def read_log(path):
    """ The entries of training_log.jsonl in the order of their steps. A resumed run may have done
    a step twice: the last entry counts. """
    check_file(path, 'train the run first')
    entries = {}
    with open(path, encoding='utf-8', errors='replace') as f:
        lines = iter(lambda: f.readline(2**20), '')        # no entry is longer
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                check_entry(entry)
                # a step may have two entries: one of training, one of an evaluation
                key = int(entry['step']), 'best' in entry
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError,
                    RecursionError):
                # a power cut may leave half of a line
                raise ValueError(f'{path}, line {number}: no entry of a log; delete the line') \
                    from None
            entries[key] = entry
    if not entries:
        raise ValueError(f'{path}: empty, the run has logged nothing yet')
    return [entries[key] for key in sorted(entries)]


def check_entry(entry):
    """ Some error unless what is drawn of an entry of the log is made of numbers. """
    numbers = [entry['step']]
    numbers += [entry[name] for name in DRAWN if name in entry]
    numbers += [skip['step'] for skip in entry.get('skips', [])]
    for name, value in entry.items():
        if name.endswith('_by_t'):
            if len(value) != 4:
                raise ValueError
            numbers += [number for number in value if number is not None]
    sum(numbers, 0.0)                          # no text, and no integer that no float can hold

# -----------------------------------------------------------------------------
# Curves

def draw_line(axis, points, label, style='-'):
    """ points: [(x, y)]. One without y is left out, and of no points there is no line. """
    points = [(x, y) for x, y in points if y is not None]
    if points:
        axis.plot(*zip(*points), style, label=label)


def draw_value(axis, entries, name, label, style='-'):
    """ A value of the log against the steps. """
    draw_line(axis, [(entry['step'], entry.get(name)) for entry in entries], label, style)


def mean_by_clock(entry):
    """ The training error of the latents as a mean over the four bins of the clock, or None: per
    row that has this loss, as in validation. The loss in the log is per row of a batch. """
    errors = [error for error in entry.get('latent_mse_by_t', []) if error is not None]
    return sum(errors) / len(errors) if errors else None


def draw_loss(axis, entries, stream):
    """ A stream's loss against steps, with the validation. """
    if stream == 'text':
        unit = 'nats per token, PAD not counted'
        draw_value(axis, entries, 'text_nats_per_token', 'training')
        draw_value(axis, entries, 'causal_nats_per_token', 'training, left to right')
        draw_value(axis, entries, 'val_text', 'validation', 'o-')
        draw_value(axis, entries, 'val_causal', 'validation, left to right', 'o-')
    else:
        unit = 'squared error per dimension'
        training = [(entry['step'], mean_by_clock(entry)) for entry in entries]
        draw_line(axis, training, 'training')
        draw_value(axis, entries, 'val_latent', 'validation', 'o-')
    axis.set(xlabel='step', ylabel=unit, title=stream)


def label_log(axis):
    """ A logarithmic y with numbers as one writes them, and the legend where no curve is. """
    axis.set_yscale('log', subs=(1.5, 2, 3, 5, 7))
    axis.yaxis.set_major_formatter('{x:g}')
    axis.yaxis.set_minor_formatter('{x:g}')
    put_legend(axis)


def put_legend(axis):
    """ Next to the axes: on them it would cover curves. """
    axis.legend(loc='upper left', bbox_to_anchor=(1, 1), frameon=False)


def draw_by_clock(axis, entries, name, stream):
    """ A stream's error in four bins of its clock. """
    with_bins = [entry for entry in entries if name in entry]
    for i in range(4):
        points = [(entry['step'], entry[name][i]) for entry in with_bins]
        draw_line(axis, points, f't in [{i / 4}, {(i + 1) / 4}]')
    axis.set(xlabel='step', title=f'{stream}, by clock')


def draw_curves(entries, plt):
    """ A row for each stream: its loss, and its error by clock, the one diagnostic that a
    diffusion run needs. A last row: gradient norm with the skipped steps, and speed. """
    by_clock = {'text': 'text_nll_by_t', 'latent': 'latent_mse_by_t'}
    streams = [stream for stream in by_clock
               if any(f'{stream}_loss' in entry for entry in entries)]
    n_rows = len(streams) + 1
    figure, axes = plt.subplots(n_rows, 2, figsize=(12, 3.4 * n_rows), squeeze=False)
    for (left, right), stream in zip(axes, streams):
        draw_loss(left, entries, stream)
        draw_by_clock(right, entries, by_clock[stream], stream)
        label_log(left)
        label_log(right)

    # gradient norm; a red line for every skipped step, of which one is in the legend
    left, right = axes[-1]
    draw_value(left, entries, 'grad_norm', 'gradient norm')
    label = 'skipped steps'
    for entry in entries:
        for skip in entry.get('skips', []):
            left.axvline(skip['step'], color='red', linewidth=0.8, label=label)
            label = None
    left.set(xlabel='step')
    label_log(left)

    draw_value(right, entries, 'tokens_per_s', 'tokens per second')
    right.set(xlabel='step', ylim=(0, None))
    put_legend(right)
    return figure

# -----------------------------------------------------------------------------
# Sweeps

STEPS = ('steps', 'latent_steps')                          # drawn as network calls


def knob_of_x(point):
    """ The knob along x: the number of steps, else the first that is a number, else ''. """
    numbers = [knob for knob, value in point.items() if isinstance(value, (int, float))]
    return min(numbers, key=lambda knob: knob not in STEPS, default='')


def read_sweeps(records, metric):
    """ {(panel, knob of x): {line: [(x, value, standard error)]}} of the records of sweeps. Other
    texts and knobs have a panel of their own. A line has one setting of the knobs but x's. """
    panels = {}
    for record in records:
        point = record['point']
        if not point or record['metric'] != metric:
            continue

        # the panel: what was swept, and what else the figures are of
        of = {'of': record['texts']} | record['knobs']
        title = f'{record["task"]} over {", ".join(sorted(point))}, {record["n"]} texts'
        panel = '\n'.join([title, *(f'{name} {value}' for name, value in of.items() if value)])

        # the line: the knobs but x's. Where no knob is a number, these words are along x
        knob = knob_of_x(point)
        setting = ', '.join(f'{name} {value}' for name, value in point.items() if name != knob)
        if knob:
            line = setting or record['task']
            x = x_of(records, record, knob, setting or point)
        else:
            line = record['task']
            x = shown(setting)
            if len(point) == 1:                            # the panel names the knob
                x = shown(*point.values()) or 'none'
        lines = panels.setdefault((panel, knob), {})
        if record['value'] is not None:                    # null: it is not defined there
            lines.setdefault(line, []).append((x, record['value'], record['se'] or 0.0))
    return panels


def x_of(records, record, knob, setting):
    """ Where a record stands along x: at the value of the knob, steps at their network calls. """
    if knob not in STEPS:
        return record['point'][knob]
    same = {name: record[name] for name in ('n', 'texts', 'point', 'knobs')}
    calls = find(records, record['task'], 'calls', **same)
    if not calls:
        raise ValueError(f'results.json has no calls of {record["task"]} with {setting}: '
                         'measure the sweep again')
    return calls['value']


def draw_sweeps(panels, metric, plt):
    """ A panel per sweep, one below the other. """
    if not panels:
        raise ValueError(f'results.json has no sweep with {metric}: run evaluate.py --tasks=l2t '
                         '--sweep="sampler=ancestral,confidence; steps=4,8,16,32"')
    figure, axes = plt.subplots(len(panels), figsize=(8, 4 * len(panels)), squeeze=False)
    for axis, ((panel, knob), lines) in zip(axes.flat, panels.items()):
        for label, line in lines.items():
            style = 'o'                                    # words, which no line joins
            if knob:
                style = 'o-'
                line = sorted(line)
            axis.errorbar(*zip(*line), fmt=style, capsize=2, label=shown(label))
        if not knob:
            axis.tick_params(axis='x', rotation=30)

        # steps and drafts double from point to point
        x = 'network calls per text' if knob in STEPS else knob
        axis.set(xlabel=shown(x), ylabel=metric, title=shown(panel))
        if knob in (*STEPS, 'rerank'):
            axis.set_xscale('log', base=2)
            axis.xaxis.set_major_formatter('{x:g}')
        put_legend(axis)
    return figure

# -----------------------------------------------------------------------------
# Images

def check_pictures(texts, pictures, name):
    """ ValueError unless these are pictures (n, S, S, channels) of numbers, and a text on each. """
    are_texts = texts.dtype.kind == 'U' and texts.shape == pictures.shape[:1]
    are_numbers = pictures.dtype.kind in 'uif' and pictures.size
    if not are_texts or not are_numbers or pictures.ndim != 4 or pictures.shape[3] not in (1, 3):
        raise ValueError(f'images.npz: {name} is {pictures.dtype} {pictures.shape}, with texts '
                         f'{texts.dtype} {texts.shape}; run evaluate.py --tasks=image again')


def blocks_of_images(arrays):
    """ [(texts, {pictures: what they are})], names of arrays: rows of pictures under one row of
    texts. Of several parts of the data that which says most. """
    drawn = 'shared' if 'shared_made' in arrays else 'val'
    written = 'sets' if 'sets_written' in arrays else 'val'
    return [
        (f'{drawn}_texts', {
            f'{drawn}_made': 'drawn from\nthe caption',
            f'{drawn}_real': 'the real one',
            f'{drawn}_ridge': 'by ridge\nregression',
            f'{drawn}_copy': 'a training picture\nof the nearest name'}),
        (f'{written}_written', {
            f'{written}_real': 'a real one, and\nthe caption\nwritten from it'}),
        ('both_texts', {'both_made': 'both from noise'}),
        ('half_texts', {
            'half_given': 'the left half\nis given',
            'half_made': 'the right half\nis drawn',
            'half_real': 'the real one'})]


def draw_images(arrays, plt, columns=10):
    """ The first of evaluate.py's images, as far as the file has them. """
    # (texts or None, pictures, label) of each row; the texts stand above the first of a block
    rows = []
    for texts, kinds in blocks_of_images(arrays):
        first, *_ = kinds
        if texts not in arrays or first not in arrays:
            continue
        for name in [name for name in kinds if name in arrays]:
            check_pictures(arrays[texts], arrays[name], name)
            rows.append((arrays[texts] if name == first else None, arrays[name], kinds[name]))
    if not rows:
        raise ValueError('images.npz has none of the pictures that are drawn; run evaluate.py '
                         '--tasks=image again')

    size = (1.2 * columns, 1.5 * len(rows))
    figure, axes = plt.subplots(len(rows), columns, figsize=size, squeeze=False)
    for (texts, pictures, label), row in zip(rows, axes):
        row[0].set_ylabel(label, fontsize=8)
        for axis in row:
            axis.set(xticks=[], yticks=[], frame_on=False)
        for i, (axis, pixels) in enumerate(zip(row, pictures)):
            axis.imshow(pixels.squeeze(), cmap='gray', vmin=0, vmax=255)
            if texts is not None:
                caption = textwrap.wrap(shown(texts[i]), 18, max_lines=4)
                axis.set_title('\n'.join(caption), fontsize=7)
    return figure

# -----------------------------------------------------------------------------
# The command

def picture(plt):
    """ The picture that is asked for. ValueError says what is missing. """
    if what == 'images':
        path = os.path.join(out_dir, 'images.npz')
        check_file(path, 'run evaluate.py --tasks=image first')
        return draw_images(read_arrays(path), plt)
    if what == 'sweep':
        path = os.path.join(out_dir, 'results.json')
        check_file(path, 'run evaluate.py first')
        return draw_sweeps(read_sweeps(read_results(path), metric), metric, plt)
    return draw_curves(read_log(os.path.join(out_dir, LOG)), plt)


def losses():
    """ The curves as HTML, for the page. """
    figure = draw_curves(read_log(os.path.join(out_dir, LOG)), pyplot())
    figure.tight_layout()
    file = io.BytesIO()
    figure.savefig(file, format='svg')
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="losses" src="data:image/svg+xml;base64,{data}">'


def texts_of(run, n):
    """ (texts, raw latents (n, N, D)) that the page writes again: of the dataset, or the ten of
    weights/captions, which has none. """
    import torch
    from tasks.common import dataset_of, load_texts

    ten = os.path.join(out_dir, 'ten.npy')
    if not on_command_line('dataset') and os.path.isfile(ten):
        with open(regular(os.path.join(out_dir, 'ten.txt')), encoding='utf-8') as f:
            texts = f.read().splitlines()[:n]
        return texts, torch.from_numpy(read_array(ten)[:n, None])

    texts, _, raw = load_texts(run, dataset_of(run, dataset), n, seed=0)
    return texts, raw


def write_page(path):
    # it loads the run, while the pictures read files
    from sampling import report, try_page
    check_file(os.path.join(out_dir, 'config.json'), 'train the run first')
    page = try_page.page(out_dir) if what == 'try' else report.page(out_dir, texts_of, losses)
    write_text(path, page, named=bool(save))


def write_picture(path):
    figure = picture(pyplot())
    figure.tight_layout()
    kind = os.path.splitext(path)[1][1:] or 'png'
    more = {}
    if kind == 'png':                                      # its mark: check_ours finds it
        more = dict(metadata={'Software': WRITTEN_BY})
    with write_whole(path, named=bool(save)) as f:
        figure.savefig(f, dpi=110, format=kind, **more)


def main():
    global out_dir
    configure(globals())
    out_dir = here_or_beside(out_dir)
    with stop_on_error():
        # an export, such as weights/captions, stays as it was published
        folder = out_dir if os.path.isfile(os.path.join(out_dir, LOG)) else '.'
        is_page = what in ('report', 'try')
        name = f'{what}.html' if is_page else f'{what}.png'
        path = save or os.path.join(folder, name)
        check_writable(path)
        if not save:
            check_ours(path, ', or name another file with --save=')
        if is_page:
            write_page(path)
        else:
            write_picture(path)
    print(f'written to {path}')


if __name__ == '__main__':
    main()
