"""
Pictures of a run, from the files in its folder. Needs matplotlib: pip install matplotlib

    python plot.py --out_dir=out/quickstart                                   # its curves: training_log.jsonl
    python plot.py --out_dir=out/quickstart --what=sweep --metric=bleu        # every sweep of evaluate.py: results.json
    python plot.py --out_dir=out/atat --what=importance                       # evaluate.py --tasks=importance, and the log
    python plot.py --out_dir=out/image_text --what=images                     # evaluate.py --tasks=image: images.npz

A sweep over steps is drawn against the network calls that a text took, a line per sampler; over another knob against that knob.
"""
import json
import os
import re
import textwrap

import rules
from configurator import configure, stop, stop_on_error
from files import read_arrays, read_json

out_dir = 'out/quickstart'
what = 'curves'                 # curves | sweep | importance | images
metric = 'bleu'                 # sweep: of l2t or t2l, as named in results.json
save = ''                       # the picture; '': <out_dir>/<what>.png


# what evaluate.py --tasks=image writes: pictures (n, S, S, channels), and their texts
IMAGES = {name: ('uint8', (None,) * 4) for name in ('real', 'made?', 'joint?')} | {
    name: ('texts', (None,)) for name in ('captions', 'written?', 'joint_captions?')}
# what is drawn of a log entry: a run that diverged has logged nan and inf, which leave gaps
STEP, NUMBER = 'int [0, 2**63)', '[-inf, inf] | nan'
BY_CLOCK = [f'None | {NUMBER}']
ENTRY = {'step': STEP, 'text_loss?': NUMBER, 'text_nats_per_token?': NUMBER, 'val_text?': NUMBER,
         'latent_loss?': NUMBER, 'val_latent?': NUMBER, 'text_nll_by_t?': BY_CLOCK, 'latent_mse_by_t?': BY_CLOCK,
         'grad_norm?': NUMBER, 'skips?': [{'step': STEP}], 'tokens_per_s?': NUMBER,
         'importance_mean?': NUMBER, 'importance_std?': NUMBER, 'importance_min?': NUMBER, 'importance_max?': NUMBER}


def check_file(path, what_to_do):
    """ ValueError where it is missing: what to do about the run, or about the file. """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise ValueError(f'no run in {folder}: train it first, or name another --out_dir')
    if not os.path.isfile(path):
        raise ValueError(f'{path}: missing, {what_to_do}')


def read_log(path):
    """ The entries in the order of their steps; of a step that a resumed run did again, the last. """
    check_file(path, 'train the run first')
    entries = []
    with open(path, encoding='utf-8', errors='replace') as f:
        for number, line in enumerate(f, 1):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f'{path}, line {number}: no JSON ({error}); delete the line') from None
            rules.check_json(entry, ENTRY, f'{path}, line {number}')
            entries.append(entry)
    if not entries:
        raise ValueError(f'{path}: empty, the run has logged nothing yet')
    return [entry for _, entry in sorted({(e['step'], 'best' in e): e for e in entries}.items())]


def draw_curves(entries, plt):
    """ Loss of each stream against steps, with the validation; the error by clock, the one diagnostic a diffusion run needs; and
    how the run fares: gradient norm, skipped steps, speed. """
    streams = [s for s in ('text', 'latent') if any(f'{s}_loss' in e for e in entries)]
    figure, axes = plt.subplots(len(streams) + 1, 2, figsize=(10, 3.4 * (len(streams) + 1)), squeeze=False)
    for (left, right), stream in zip(axes, streams):
        train = [e for e in entries if f'{stream}_loss' in e]
        val = [e for e in entries if f'val_{stream}' in e]
        if stream == 'text':
            # logs of earlier versions have the loss per position alone, which is another quantity: its label says so
            counted = [(e['step'], e['text_nats_per_token']) for e in train if 'text_nats_per_token' in e]
            others = [(e['step'], e['text_loss']) for e in train if 'text_nats_per_token' not in e]
            if counted:
                left.plot(*zip(*counted), label='training')
            if others:
                left.plot(*zip(*others), label='training, per position with PAD')
            left.set(ylabel='nats per token, PAD not counted')
        else:
            left.plot([e['step'] for e in train], [e['latent_loss'] for e in train], label='training')
            left.set(ylabel='squared error per dimension')
        left.plot([e['step'] for e in val], [e[f'val_{stream}'] for e in val], 'o-', label='validation')
        left.set(xlabel='step', title=stream)
        key = 'text_nll_by_t' if stream == 'text' else 'latent_mse_by_t'
        for i in range(4):
            points = [(e['step'], e[key][i]) for e in train if i < len(e.get(key, ())) and e[key][i] is not None]
            right.plot(*zip(*points), label=f't in [{i / 4}, {(i + 1) / 4}]') if points else None
        right.set(xlabel='step', title=f'{stream}, by clock')
        for axis in (left, right):
            axis.set_yscale('log')
            axis.legend()
    left, right = axes[-1]
    left.plot(*zip(*[(e['step'], e['grad_norm']) for e in entries if 'grad_norm' in e]), label='gradient norm')
    for i, skip in enumerate(skip for e in entries for skip in e.get('skips', [])):
        left.axvline(skip['step'], color='red', linewidth=0.8, label='skipped steps' if i == 0 else None)
    left.set(xlabel='step', yscale='log')
    left.legend()
    right.plot(*zip(*[(e['step'], e['tokens_per_s']) for e in entries if 'tokens_per_s' in e]), label='tokens per second')
    right.set(xlabel='step', ylim=(0, None))
    right.legend()
    return figure


def read_results(path):
    """ results.json of evaluate.py, {key: number or None}, without what it says of how it was made. """
    check_file(path, 'run evaluate.py first')
    results = read_json(path)
    results.pop('meta', None)
    for key, value in results.items():
        if not (value is None or isinstance(value, (int, float))):
            raise ValueError(f'{path}: {key} is a {type(value).__name__}, expected a number')
    return results


def read_sweeps(results, metric):
    """ {sweep: [(point {knob: text}, {calls, value, se})]} from the flat keys task_sweep_knobs/knob=value,.../metric. """
    sweeps = {}
    for key, value in results.items():
        match = re.fullmatch(r'(\w+_sweep_\w+(?:\[[^/]*\])?)/([^/]*)/' + re.escape(metric), key)
        if match:
            name, label = match.groups()
            point = dict(pair.split('=', 1) for pair in label.split(',') if '=' in pair)
            y = dict(value=value, se=results.get(f'{key}_se', 0.0), calls=results.get(f'{name}/{label}/calls'))
            rules.check_json(y, {'calls': NUMBER}, f'results.json, {name}/{label}')
            sweeps.setdefault(name, []).append((point, y))
    return sweeps


def is_number(text):
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def draw_sweeps(sweeps, metric, plt):
    """ A panel per sweep. Its x: the number of steps, as network calls, else the first knob whose values are all numbers. """
    columns = min(3, len(sweeps))
    rows = -(-len(sweeps) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 4 * rows), squeeze=False)
    for axis in axes.flat[len(sweeps):]:
        axis.remove()
    for axis, (name, points) in zip(axes.flat, sweeps.items()):
        numbers = [k for k in points[0][0] if all(is_number(point[k]) for point, _ in points)]
        numbers.sort(key=lambda k: k not in ('steps', 'latent_steps'))
        knob, lines = numbers[0] if numbers else None, {}
        for point, y in points:
            rest = ', '.join(f'{k} {value}' if is_number(value) else value for k, value in point.items() if k != knob)
            x = rest if knob is None else y['calls'] if knob in ('steps', 'latent_steps') else float(point[knob])
            label = metric if knob is None else rest or name.split('_sweep_')[0]
            lines.setdefault(label, []).append((x, y['value'], y['se']))
        for label, rows in lines.items():
            axis.errorbar(*zip(*(rows if knob is None else sorted(rows))), marker='o', capsize=2, label=label)
        axis.set(xlabel='network calls per text' if knob in ('steps', 'latent_steps') else knob or '', ylabel=metric,
                 title=name.replace('_sweep_', ' over '))
        if knob in ('steps', 'latent_steps', 'rerank'):
            axis.set_xscale('log', base=2)
        axis.legend()
    return figure


def draw_importance(entries, results, plt):
    """ The spread of importance over training, and the loss at masked positions by quarters of frequency and of importance. """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    logged = [e for e in entries if 'importance_mean' in e]
    if logged:
        steps, mean, std, low, high = zip(*((e['step'], *(e[f'importance_{x}'] for x in ('mean', 'std', 'min', 'max'))) for e in logged))
        left.fill_between(steps, low, high, alpha=0.15, label='least to most')
        left.fill_between(steps, [m - s for m, s in zip(mean, std)], [m + s for m, s in zip(mean, std)], alpha=0.3, label='mean ± std')
        left.plot(steps, mean)
        left.legend()
    left.set(xlabel='step', ylabel='importance of a micro-batch', ylim=(0, 1))
    for i, by in enumerate(('frequency', 'importance')):
        keys = [f'importance/{by}/nats_quarter_{q}' for q in (1, 2, 3, 4)]
        bars = [(q + 0.35 * i, results[key], results[f'{key}_se']) for q, key in enumerate(keys, 1) if key in results]
        x, y, error = zip(*bars)
        rank = results[f'importance/{by}/spearman_with_loss']
        right.bar(x, y, 0.33, yerr=error, capsize=2, label=f'by {by}, rank correlation {rank:.2f}')
    right.set(xlabel='quarter of the tokens, least to most rare or important', ylabel='nats at masked positions', xticks=(1, 2, 3, 4))
    right.legend()
    return figure


def draw_images(shown, plt, columns=10, rows=2):
    """ The first of evaluate.py's images, by turns: pictures made from the captions above them, and below each the real one, with the
    caption written from it; at the end pictures and captions from noise. """
    kinds = [('captions', 'made', 'made from\nthe caption'), ('written', 'real', 'real; caption\nwritten from it')] * rows
    kinds = [kind for kind in kinds + [('joint_captions', 'joint', 'both\nfrom noise')] * rows if kind[0] in shown and kind[1] in shown]
    figure, axes = plt.subplots(len(kinds), columns, figsize=(1.2 * columns, 1.6 * len(kinds)), squeeze=False)
    for i, (line, (texts, pictures, label)) in enumerate(zip(axes, kinds)):
        first = columns * kinds[:i].count(kinds[i])
        line[0].set_ylabel(label, fontsize=8)
        for k, axis in enumerate(line, first):
            axis.set(xticks=[], yticks=[], frame_on=False)
            if k < len(shown[pictures]):
                axis.imshow(shown[pictures][k].squeeze(), cmap='gray', vmin=0, vmax=255)
                axis.set_title('\n'.join(textwrap.wrap(str(shown[texts][k]), 16)), fontsize=7)
    return figure


def main():
    configure(globals())
    if what not in ('curves', 'sweep', 'importance', 'images'):
        stop(f'what={what!r}: choose from curves, sweep, importance, images')
    try:
        import matplotlib
    except ImportError:
        stop('plot.py needs matplotlib: pip install matplotlib')
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    with stop_on_error():
        if what == 'curves':
            figure = draw_curves(read_log(os.path.join(out_dir, 'training_log.jsonl')), plt)
        elif what == 'images':
            path = os.path.join(out_dir, 'images.npz')
            check_file(path, 'run evaluate.py --tasks=image first')
            figure = draw_images(read_arrays(path, IMAGES), plt)
        elif what == 'importance':
            results = read_results(os.path.join(out_dir, 'results.json'))
            keys = [f'importance/{by}/{what}' for by in ('frequency', 'importance')
                    for what in ('nats_quarter_1', 'nats_quarter_1_se', 'spearman_with_loss')]
            if not all(isinstance(results.get(key), (int, float)) for key in keys):
                raise ValueError(f'{out_dir}/results.json: no importance in it, run evaluate.py --tasks=importance first')
            figure = draw_importance(read_log(os.path.join(out_dir, 'training_log.jsonl')), results, plt)
        else:
            sweeps = read_sweeps(read_results(os.path.join(out_dir, 'results.json')), metric)
            if not sweeps:
                raise ValueError(f'{out_dir}/results.json has no sweep with {metric}: run evaluate.py --sweep=... first')
            figure = draw_sweeps(sweeps, metric, plt)
        figure.tight_layout()
        path = save or os.path.join(out_dir, f'{what}.png')
        figure.savefig(path, dpi=110)
    print(f'written to {path}')


if __name__ == '__main__':
    main()
