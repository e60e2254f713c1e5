"""
Measure a run on its validation split. Each figure comes with the controls that would expose it.

    python evaluate.py --out_dir=out/quickstart               # what the run was trained for
    python evaluate.py --tasks=sts --sts=stsb-en-dev.csv
    python evaluate.py --out_dir=out/quickstart --tasks=l2t \\
                       --sweep="sampler=ancestral,first_hitting,confidence; steps=4,8,16,32"
    python evaluate.py --out_dir=out/quickstart --texts=my.txt      # embeds other texts

A task is a file in tasks/. Its header says what it measures, and with which controls.

Figures are means over texts with standard errors. They are written to out_dir/results.json, each
with its knobs, texts, commit and checkpoint. What is measured again replaces its old records.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))   # PYTHONSAFEPATH=1 leaves it out
if __name__ == '__main__':
    import base.begin                                      # before torch

import itertools
import re
import time

import numpy as np

from base.console import print_table, shown, stop_on_error
from base.files import sha256
from base.machine import keep_freed_memory
from base.writing import WRITTEN_BY, Held, check_ours, check_writable, write_whole
from configurator import configure, here_or_beside, on_command_line, read_knobs
from data import read_meta
from runs.checkpoint import as_written, of_dataset
from runs.results import add_results, figure_text, read_results
from runs.run_folder import git_commit
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS
from sampling.run import Run
from tasks import TASKS
from tasks.common import Context, Figures, dataset_of, load_file, load_texts

out_dir = 'out/quickstart'  # <a run folder>
which = 'best'              # best | latest | <a step, as step-00001000>
encoder = ''                # the folder where the run's encoder lies now; '': where it was for
                            # prepare.py. In a config file it is prepare.py's, and not read here
tasks = ''                  # names of files in tasks/, such as nelbo,l2t; '': nelbo and what the
                            # run was trained for
sweep = ''                  # l2t, t2l, edit, molecule: values of knobs, 'guidance=0,1; steps=8,9'
texts = ''                  # a text file, a text a line, or a .jsonl file, a table, ..., as
                            # prepare.py reads it; too long ones are skipped and counted; '': the
                            # validation split
field = 'text'              # where a record has its text
dataset = ''                # where the run's dataset lies; '': where it was trained from. A config
                            # that names one does not count where that is there
n = None                    # None | int [1, 1e9]: texts, or pairs of sts, drawn with the seed; all
                            # if there are fewer; None: 1000 texts, and all pairs
draws = 16                  # [1, 1e5]; nelbo: draws of the bound for each text
n_orders = 8                # [1, 1e4]; orders: random orders of writing for each text
sts = ''                    # sts: a csv or tsv of sentence1, sentence2, score (STS-B)
scorer = ''                 # unconditional, text: a run of config/ar.py, or a causal language model
scorer_revision = ''        # of the hub model: a commit
infill_share = 0.5          # (0, 1]; infill: of each text's tokens
damage = ''                 # '' | <noise:.01, dims:.5, bits:8 or flips:.1>; l2t, molecule: what is
                            # done to the latents before texts are written from them
classes = ''                # edit: which words become others of their class:
                            # 'animal: cat, dog; colour: red, blue'
show = 10                   # [0, 1e6]; texts to print, the first ones
device = 'auto'             # auto | cpu | cuda | mps | <cuda:1 or the like>
dtype = 'auto'              # auto | bfloat16 | float32; auto: as in train.py

KNOBS = read_knobs(__file__)
SWEPT_KNOBS = (*TEXT_KNOBS, *LATENT_KNOBS, 'latent_clock', 'rerank', 'beams', 'strength', 'damage')
N_TEXTS = 1000                 # where n does not say

# -----------------------------------------------------------------------------
# Tasks

def choose_tasks(run):
    """ {name: Task} of those that are asked for; by default nelbo and what the run was
    trained for. ValueError for one that the run cannot do. """
    # what is asked for
    names = [name.strip() for name in tasks.split(',') if name.strip()]
    if not names:
        trained = run.net.learned
        directions = [name for name in ('l2t', 't2l', 'unconditional') if name in trained]
        if 'causal' in trained and 'l2t' not in trained:
            directions = ['l2t', *directions]
        if run.net.streams == ('text',):
            directions = ['text']
        names = ['nelbo', *(name for name in directions if not TASKS[name].needs.missing(run.net))]

    # can the run do it?
    chosen = {}
    for name in names:
        if name not in TASKS:
            raise ValueError(f'tasks={tasks!r}: choose from {", ".join(TASKS)}')
        missing = TASKS[name].needs.missing(run.net)
        if missing:
            raise ValueError(f'{out_dir} {missing}: no {name} from it')
        chosen[name] = TASKS[name]
    return chosen

# -----------------------------------------------------------------------------
# Sweeps

def read_sweep(spec, config):
    """ 'sampler=ancestral,confidence; steps=8,16' -> [{sampler: .., steps: ..}, ...], values of the
    knobs' own types. """
    # {knob: its values}
    axes = {}
    for part in spec.split(';'):
        name, _, values = part.strip().partition('=')
        if name not in SWEPT_KNOBS or not values or isinstance(config[name], tuple):
            raise ValueError(f'sweep={spec!r}: {part.strip()!r} is no KNOB=VALUE,VALUE of a '
                             'sampling knob')
        try:
            axes[name] = [KNOBS[name].read(value.strip()) for value in values.split(',')]
        except ValueError as error:
            raise ValueError(f'sweep={spec!r}: {name}: {error}') from None
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def measure_sweep(run, ctx, name, task, points):
    """ Measures the task at each point: the quality, and the network calls and milliseconds that a
    text took. Each point is recorded when it is measured. """
    # the first calls of a process are slow. One draft tells as much
    first = knobs_of(task, points[0])
    if 'rerank' in task.settings:
        first['rerank'] = 1
    task.generate(run, ctx, slice(ctx.knobs['sample_batch']), **first)

    # quality and cost of each point
    table = {}
    for point in points:
        label = ', '.join(f'{knob}={value}' for knob, value in point.items())
        run.net.row_calls = 0
        began = time.perf_counter()
        made = task.generate(run, ctx, **knobs_of(task, point))
        ms = 1000 * (time.perf_counter() - began) / len(made)
        figures = Figures(len(made))           # of an edit, the texts that have such a word
        figures.enter('', {'calls': run.net.row_calls / len(made), 'ms': ms})
        figures.enter('', task.judge(run, ctx, made))

        record_figures(run, ctx, name, task, figures, point)
        table |= {(label, metric): figure for (_, metric), figure in figures.items()}
        print(f'{label}: {ms:.4g} ms a text', flush=True)
    show_figures(ctx, name, table, figures.n)


def knobs_of(task, point):
    """ Those of a sweep's knobs that the task reads. """
    return {knob: value for knob, value in point.items() if knob in task.settings}

# -----------------------------------------------------------------------------
# Figures, printed and recorded

def print_figures(task, figures, n):
    """ A table: metrics down, controls across. Whole numbers are counts, and stand above it. """
    counts = ''
    cells_of = {}                                          # {metric: {control: cell}}
    controls = {}                                          # in order; the values say nothing
    for (control, metric), (value, se) in figures.items():
        if isinstance(value, int):
            counts += f', {metric} {value}'
        else:
            cell = figure_text(value, se)
            if se is None:
                cell += ' ' * 8                            # so values stand below each other
            cells_of.setdefault(metric, {})[control] = cell
            controls[control] = None

    rows = [['', *(control or task for control in controls)]]
    for metric, cells in cells_of.items():
        rows.append([metric, *(cells.get(control, '') for control in controls)])
    print(f'\n{task}: n {n}{counts}')
    print_table(rows)
    if 'f1' in cells_of:
        print('f1 is of the sets of words: it does not see what is said twice, length does')


def print_summary(chosen, measured):
    """ A table with one line for each of the headlines of the tasks. """
    rows = [['in short', 'ours', 'shuffled', 'null', 'rival', 'lead']]
    rivals = []
    for name, task in chosen.items():
        figures = measured[name]
        for label, control, metric in task.headlines:
            if (control, metric) not in figures:
                continue
            # the controls of a control stand one line above
            controls = [control]
            if not control:
                controls = ['', 'shuffled', 'null', task.rival, 'lead']
            rows.append([label, *summary_cells(figures, controls, metric)])
        if any(control == task.rival for control, _ in figures):
            rivals.append(f'{task.rival} ({name})')

    # a single headline stands in its own table already
    if len(rows) < 3:
        return
    print()
    print_table(rows)
    if rivals:
        print(f'rival: {", ".join(rivals)}\nlead: over the rival, text by text')


def summary_cells(figures, controls, metric):
    """ A metric of each control, or '' where there is none: 24.1 ± 1.4, .912 ± .003. """
    # as many digits as the first one needs
    value, se = figures[controls[0], metric]
    digits = 3
    if max(abs(value), 10 * (se or 0)) >= 10:
        digits = 1

    cells = []
    for control in controls:
        text = ''
        if (control, metric) in figures:
            text = figure_text(*figures[control, metric], digits)
        cells.append(re.sub(r'(?<!\d)0\.', '.', text))
    return cells


def record_figures(run, ctx, name, task, figures, point={}):
    """ Writes the figures of a task, or of a point of a sweep, into results.json at once. """
    # of the knobs that decide them, those that are not at their defaults
    source, knobs = ctx.source
    if task.has_own_texts:
        source, knobs = '', {}
    knobs = dict(knobs)
    for knob in ('which', 'seed', 'field', 'dtype', *task.settings):
        value = ctx.knobs[knob]
        if knob not in point and value != KNOBS[knob].default:
            knobs[knob] = value

    # a record of each figure
    same = dict(
        n=figures.n, texts=source, point=point, knobs=knobs,
        checkpoint=run.checkpoint, commit=git_commit())
    records = [dict(task=name, metric=metric, control=control, value=value, se=se, **same)
               for (control, metric), (value, se) in figures.items()]
    ctx.held.check()
    add_results(os.path.join(out_dir, 'results.json'), records)
    if ctx.arrays:
        with write_whole(os.path.join(out_dir, f'{name}s.npz')) as f:
            np.savez(f, written_by=np.bytes_(WRITTEN_BY), **ctx.arrays)


def source_of(run, folder):
    """ Which texts are measured, and a digest; '' and {} for the run's own validation split. """
    if texts:
        return texts, {'texts_sha256': sha256(texts)[:8]}
    # but the latents: on another machine they differ in the last bits
    own = of_dataset(run.meta, but='latents.npy')['sha256 of val']
    measured = of_dataset(read_meta(folder), but='latents.npy')['sha256 of val']
    if own == measured:
        return '', {}
    return folder, {'texts_sha256': measured[:8]}


def show_figures(ctx, name, figures, n):
    """ Prints the figures of a task, and what it wrote. """
    if ctx.shown[:show]:
        print(shown('\n' + '\n'.join(ctx.shown[:show]).rstrip('\n')))
    print_figures(name, figures, n)
    print(f'\nwritten to {os.path.join(out_dir, "results.json")}', flush=True)

# -----------------------------------------------------------------------------

def evaluate(config):
    """ Measures what is asked for. ValueError says what is wrong. """
    # the run, and what can be missing: that is asked for before anything is computed
    where = encoder if on_command_line('encoder') else ''
    run = Run(out_dir, which, device, dtype, where)
    held = Held(out_dir)
    chosen = choose_tasks(run)
    config['sample_batch'] = run.net.rows_that_fit(config['sample_batch'])
    config['dtype'] = run.net.dtype
    check_results(chosen)
    prepared = {name: task.prepare(run, config) for name, task in chosen.items()
                if task.prepare}
    if run.meta['encoder'] and any(task.embeds for task in chosen.values()):
        run.load_encoder()
    points = []
    if sweep:
        points = read_sweep(sweep, config)
        chosen = tasks_of_sweep(run, chosen, points, config)

    # the texts
    with as_written(out_dir):
        folder = dataset_of(run, dataset)
    n_texts = N_TEXTS if n is None else n
    if texts:
        sources, tokens, raw = load_file(run, texts, field, n_texts)
    else:
        sources, tokens, raw = load_texts(run, folder, n_texts, config['seed'])
    source = source_of(run, folder)
    for name, task in chosen.items():
        if len(sources) == 1 and task.takes_two and raw is not None:
            raise ValueError(f'{name} of 1 text: its shuffled control needs at least 2; '
                             '--tasks=nelbo takes one; prepare.py --val_fraction=0.1 sets more '
                             'aside')

    # the figures, task by task
    measured = {}
    for name, task in chosen.items():
        ctx = Context(config, folder, sources, tokens, raw, prepared.get(name), source, held)
        if sweep:
            measure_sweep(run, ctx, name, task, points)
        else:
            figures = task.measure(run, ctx)
            measured[name] = figures
            record_figures(run, ctx, name, task, figures)
            show_figures(ctx, name, figures, figures.n)
    if measured:
        print_summary(chosen, measured)


def check_results(chosen):
    """ ValueError where the figures of these tasks could not be written into the run folder. """
    path = os.path.join(out_dir, 'results.json')
    if os.path.exists(path):
        read_results(path)
    check_writable(path)
    for name in chosen:
        check_ours(os.path.join(out_dir, f'{name}s.npz'), '')


def tasks_of_sweep(run, chosen, points, config):
    """ Those of the tasks that a sweep measures. ValueError where a point of it is not possible, or
    where a knob changes nothing. """
    swept = {name: task for name, task in chosen.items() if task.judge}
    for point in points:
        for task in swept.values():
            if task.prepare:
                task.prepare(run, config | point)
    read = {knob for task in swept.values() for knob in task.settings}
    unread = ', '.join({*points[0]} - read)
    if unread:
        judged = ', '.join(name for name, task in TASKS.items() if task.judge)
        raise ValueError(f'sweep={sweep!r}: {unread} changes nothing in tasks={tasks}; a sweep '
                         f'is of {judged}')
    return swept


def main():
    global out_dir
    config = configure(globals())
    out_dir = here_or_beside(out_dir)
    keep_freed_memory()
    with stop_on_error():
        evaluate(config)


if __name__ == '__main__':
    main()
