"""
What plot.py draws of a run with matplotlib, and how it reads the run's files: training_log.jsonl of
train.py, results.json and images.npz of evaluate.py.
"""
import json
import os
import re
import textwrap

from runs.files import read_arrays, read_json

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
    return plt


def check_file(path, what_to_do):
    """ ValueError where the run or the file is missing. """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise ValueError(f'no run in {folder}: train it first, or name another --out_dir')
    if not os.path.isfile(path):
        raise ValueError(f'{path}: missing, {what_to_do}')


def read_log(path):
    """ The entries of training_log.jsonl in the order of their steps. A resumed run may have done
    a step twice: the last entry counts. """
    check_file(path, 'train the run first')
    entries = {}
    with open(path, encoding='utf-8', errors='replace') as f:
        for number, line in enumerate(f, 1):
            where = f'{path}, line {number}'
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f'{where}: no JSON ({error}); delete the line') from None

            if not isinstance(entry, dict) or not isinstance(entry.get('step'), int):
                raise ValueError(f'{where}: no entry of a log; delete the line')

            # a step may have two entries: one of training, one of an evaluation
            is_evaluation = 'best' in entry
            entries[entry['step'], is_evaluation] = entry
    if not entries:
        raise ValueError(f'{path}: empty, the run has logged nothing yet')
    return [entries[key] for key in sorted(entries)]


def read_results(path):
    """ {key: number or None} of results.json, without its notes on how it was made. """
    check_file(path, 'run evaluate.py first')
    results = read_json(path)
    results.pop('meta', None)
    for key, value in results.items():
        if not (value is None or isinstance(value, (int, float))):
            raise ValueError(f'{path}: {key} is a {type(value).__name__}, expected a number')
    return results


def read_images(out_dir):
    """ The arrays of images.npz: pictures (n, S, S, channels), and their texts (n,). """
    path = os.path.join(out_dir, 'images.npz')
    check_file(path, 'run evaluate.py --tasks=image first')
    return read_arrays(path)


def read_sweeps(results, metric):
    """ {sweep: [(point, {calls, value, se})]} of the keys 'task_sweep_knobs/knob=value,.../metric'.
    A point is {knob: its value as text}. """
    sweeps = {}
    pattern = re.compile(r'(\w+_sweep_\w+(?:\[[^/]*\])?)/([^/]*)/' + re.escape(metric))
    for key, value in results.items():
        match = pattern.fullmatch(key)
        if match:
            name, label = match.groups()
            point = dict(pair.split('=', 1) for pair in label.split(',') if '=' in pair)
            found = dict(value=value, se=results.get(f'{key}_se', 0.0),
                         calls=results.get(f'{name}/{label}/calls'))
            sweeps.setdefault(name, []).append((point, found))
    return sweeps

# -----------------------------------------------------------------------------
# Curves

def series(entries, name):
    """ [(step, value)] of the entries that have this value. """
    return [(e['step'], e[name]) for e in entries if name in e]


def draw_series(axis, entries, label_of, style='-', **more):
    """ label_of: {name of a value: label}; a value that the log does not have has no line. """
    for name, label in label_of.items():
        points = series(entries, name)
        if points:
            axis.plot(*zip(*points), style, label=label, **more)


def draw_loss(axis, entries, stream):
    """ A stream's loss against steps, with the validation. """
    if stream == 'text':
        training = dict(text_nats_per_token='training',
                        causal_nats_per_token='training, left to right')
        validation = dict(val_text='validation', val_causal='validation, left to right')
        unit = 'nats per token, PAD not counted'
    else:
        training, validation = dict(latent_loss='training'), dict(val_latent='validation')
        unit = 'squared error per dimension'
    draw_series(axis, entries, training)
    draw_series(axis, entries, validation, 'o-')
    axis.set(xlabel='step', ylabel=unit, title=stream)


def draw_by_clock(axis, entries, stream):
    """ A stream's error in four bins of its clock. """
    name = 'text_nll_by_t' if stream == 'text' else 'latent_mse_by_t'
    for i in range(4):
        points = [(step, errors[i]) for step, errors in series(entries, name)
                  if errors[i] is not None]
        if points:
            axis.plot(*zip(*points), label=f't in [{i / 4}, {(i + 1) / 4}]')
    axis.set(xlabel='step', title=f'{stream}, by clock')


def draw_curves(entries, plt):
    """ A row for each stream: its loss, and its error by clock, the one diagnostic that a
    diffusion run needs. A last row: gradient norm with the skipped steps, and speed. """
    streams = [s for s in ('text', 'latent') if any(f'{s}_loss' in e for e in entries)]
    n_rows = len(streams) + 1
    figure, axes = plt.subplots(n_rows, 2, figsize=(10, 3.4 * n_rows), squeeze=False)
    for (left, right), stream in zip(axes, streams):
        draw_loss(left, entries, stream)
        draw_by_clock(right, entries, stream)
        for axis in (left, right):
            axis.set_yscale('log')
            axis.legend()

    # gradient norm; a red line for every skipped step
    left, right = axes[-1]
    draw_series(left, entries, dict(grad_norm='gradient norm'))
    skipped = [skip['step'] for e in entries for skip in e.get('skips', [])]
    for i, step in enumerate(skipped):
        left.axvline(step, color='red', linewidth=0.8, label='skipped steps' if i == 0 else None)
    left.set(xlabel='step', yscale='log')
    left.legend()

    draw_series(right, entries, dict(tokens_per_s='tokens per second'))
    right.set(xlabel='step', ylim=(0, None))
    right.legend()
    return figure


def draw_runs(logs, plt):
    """ Text validations of several runs in one picture. logs: {name: entries}. A whole line is the
    bound of diffusion, a broken one the exact nats from left to right. Runs of other data, seeds or
    batch sizes validate other texts and clocks: those are for evaluate.py to compare. """
    figure, axis = plt.subplots(figsize=(8, 5))
    for i, (name, entries) in enumerate(logs.items()):
        if not series(entries, 'val_text') + series(entries, 'val_causal'):
            raise ValueError(f'{name}: no validation of text in the log')
        bound, exact = dict(val_text=f'{name}, bound'), dict(val_causal=f'{name}, left to right')
        draw_series(axis, entries, bound, '.-', color=f'C{i}')
        draw_series(axis, entries, exact, '.--', color=f'C{i}')
    axis.set(xlabel='step', xscale='log', ylabel='nats per token', title='validation')
    axis.legend()
    return figure

# -----------------------------------------------------------------------------
# Sweeps

STEPS = ('steps', 'latent_steps')                          # drawn as network calls


def is_number(text):
    """ NaN is none. """
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def knob_of_x(points):
    """ The knob along x: the number of steps, else the first whose values are all numbers, else
    None. """
    numbers = [knob for knob in points[0][0] if all(is_number(point[knob]) for point, _ in points)]
    numbers.sort(key=lambda knob: knob not in STEPS)
    return numbers[0] if numbers else None


def lines_of(name, points, knob, metric):
    """ {label: [(x, value, standard error)]}: a line for each setting of the knobs other than x's.
    """
    lines = {}
    for point, found in points:
        others = []
        for other, value in point.items():
            if other != knob:
                others.append(f'{other} {value}' if is_number(value) else value)
        setting = ', '.join(others)

        if knob is None:
            x, label = setting, metric
        else:
            x = found['calls'] if knob in STEPS else float(point[knob])
            label = setting or name.split('_sweep_')[0]
        lines.setdefault(label, []).append((x, found['value'], found['se']))
    return lines


def draw_sweeps(sweeps, metric, plt):
    """ A panel per sweep. """
    if not sweeps:
        raise ValueError(f'results.json has no sweep with {metric}: run evaluate.py --tasks=l2t '
                         '--sweep="sampler=ancestral,confidence; steps=4,8,16,32"')
    n_columns = min(3, len(sweeps))
    n_rows = -(-len(sweeps) // n_columns)
    size = (5.2 * n_columns, 4 * n_rows)
    figure, axes = plt.subplots(n_rows, n_columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(sweeps):]:
        axis.remove()

    for axis, (name, points) in zip(axes.flat, sweeps.items()):
        knob = knob_of_x(points)
        for label, line in lines_of(name, points, knob, metric).items():
            if knob is not None:
                line = sorted(line)
            axis.errorbar(*zip(*line), marker='o', capsize=2, label=label)
        axis.set(xlabel='network calls per text' if knob in STEPS else knob or '', ylabel=metric,
                 title=name.replace('_sweep_', ' over '))
        if knob in (*STEPS, 'rerank'):
            axis.set_xscale('log', base=2)
        axis.legend()
    return figure

# -----------------------------------------------------------------------------
# Importance and images

def draw_spread(axis, entries):
    """ Importance over training: mean, standard deviation, least and most. """
    logged = [e for e in entries if 'importance_mean' in e]
    if logged:
        steps = [e['step'] for e in logged]
        mean = [e['importance_mean'] for e in logged]
        below = [e['importance_mean'] - e['importance_std'] for e in logged]
        above = [e['importance_mean'] + e['importance_std'] for e in logged]
        least = [e['importance_min'] for e in logged]
        most = [e['importance_max'] for e in logged]
        axis.fill_between(steps, least, most, alpha=0.15, label='least to most')
        axis.fill_between(steps, below, above, alpha=0.3, label='mean ± std')
        axis.plot(steps, mean)
        axis.legend()
    axis.set(xlabel='step', ylabel='importance of a micro-batch', ylim=(0, 1))


def draw_importance(entries, results, plt):
    """ The spread of importance over training, and the loss at masked positions by quarters of the
    tokens, ordered by frequency and by importance. """
    if 'importance/frequency/spearman_with_loss' not in results:
        raise ValueError('results.json: no importance in it, run evaluate.py --tasks=importance '
                         'first')
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    draw_spread(left, entries)

    for i, by in enumerate(('frequency', 'importance')):
        key = f'importance/{by}'
        names = [f'{key}/nats_quarter_{quarter}' for quarter in (1, 2, 3, 4)]
        bars = [(quarter + 0.35 * i, results[name], results.get(f'{name}_se'))
                for quarter, name in enumerate(names, 1) if name in results]
        if bars:
            x, height, error = zip(*bars)
            correlation = results[f'{key}/spearman_with_loss']
            right.bar(x, height, 0.33, yerr=error, capsize=2,
                      label=f'by {by}, rank correlation {correlation:.2f}')
    right.set(xlabel='quarter of the tokens, least to most rare or important',
              ylabel='nats at masked positions', xticks=(1, 2, 3, 4))
    right.legend()
    return figure


def draw_images(arrays, plt, columns=10, rows=2):
    """ The first of evaluate.py's images, by turns: a row of pictures made from the captions above
    them, and below it a row of the real ones, each with the caption written from it. At the end
    rows of pictures and captions that were both made from noise. """
    # (texts, pictures, label) of each row
    pair = [('captions', 'made', 'made from\nthe caption'),
            ('written', 'real', 'real; caption\nwritten from it')]
    joint = [('joint_captions', 'joint', 'both\nfrom noise')]
    kinds = [kind for kind in pair * rows + joint * rows
             if kind[0] in arrays and kind[1] in arrays]

    size = (1.2 * columns, 1.6 * len(kinds))
    figure, axes = plt.subplots(len(kinds), columns, figsize=size, squeeze=False)
    for i, (texts, pictures, label) in enumerate(kinds):
        # the images go on where the last row of this kind stopped
        first = columns * kinds[:i].count(kinds[i])
        axes[i][0].set_ylabel(label, fontsize=8)
        for n, axis in enumerate(axes[i], first):
            axis.set(xticks=[], yticks=[], frame_on=False)
            if n < len(arrays[pictures]):
                axis.imshow(arrays[pictures][n].squeeze(), cmap='gray', vmin=0, vmax=255)
                caption = textwrap.wrap(str(arrays[texts][n]), 16)
                axis.set_title('\n'.join(caption), fontsize=7)
    return figure
