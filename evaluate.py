"""
Measure a run on its validation split, each figure beside the controls that would expose it.

    python evaluate.py --out_dir=out/quickstart               # what the run was trained for
    python evaluate.py --tasks=nelbo,l2t,t2l,unconditional,infill --n=200
    python evaluate.py --tasks=sts --sts=stsb-en-dev.csv
    python evaluate.py --out_dir=out/quickstart --tasks=l2t \\
                       --sweep="sampler=ancestral,first_hitting,confidence; steps=4,8,16,32"
    python evaluate.py --out_dir=out/quickstart --texts=my.txt      # embeds other texts

A task is a file in tasks/, whose header says what it measures and beside which controls:
    nelbo            the bound on -log p(text | latent), and the error of the latent prediction
    l2t, t2l         texts written from latents, latents made from texts
    infill           masked tokens written again
    edit             a word of a text becomes another, by arithmetic of embeddings (classes)
    unconditional    joint samples from noise; text: texts alone
    sts              do generated latents say how alike two sentences are?
    image, protein   of runs on pictures with captions, and on proteins
    orders           of masked text: -log p(text | latent) of one order of writing, left to right,
                     and the bound over several orders, which is tighter than nelbo's; slow
    importance, self_correction    of runs with importance, and with text_process=gidd

Figures are means over texts with standard errors, printed and written to out_dir/results.json as
"task/metric", "task/control/metric", "..._se". A task replaces its own keys where it is measured
again with the same settings, on a later checkpoint or on more texts. Nothing else overwrites; to
start anew, remove the file. Other settings get a name that says what differs:
    nelbo[texts=my.txt]/...     a file of texts; nelbo/ is of the validation split
    nelbo[n=20]/...             fewer texts than nelbo/ has
    l2t[guidance=2.0]/...       another value of a knob in the task's SETTINGS
A sweep has keys of its own, l2t_sweep_steps/steps=8/..., and keeps the points that it does not
measure again.
"""
import importlib
import itertools
import json
import os
import re
import shutil
import sys
import time
from datetime import timedelta

from runs import console

console.begin(__name__)

import numpy as np

from configurator import HERE, configure, read_knobs, stop_on_error
from runs.console import check_writable
from runs.distributed import keep_freed_memory
from runs.files import alone_in, read_json, sha256, write_text, write_whole
from sampling.loading import encoder_of, load_run, trained_for
from runs.manifest import dataset_folder
from runs.run_folder import git_commit
from runs.threads import watch
from sampling.denoise import rows_that_fit
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS
from tasks.common import Context, enter, load_file, load_texts, seconds_of

out_dir = 'out/quickstart'  # <a run folder>
which = 'best'              # best | latest | <a step, as step-00001000>
encoder_folder = ''         # where the encoder lies now; '': where it was when the data were
                            # prepared
tasks = ''                  # names of files in tasks/, such as nelbo,l2t; '': nelbo and what the
                            # run was trained for
sweep = ''                  # l2t, t2l, edit over values of their knobs: 'guidance=0,1,2' or
                            # 'sampler=ancestral,confidence; steps=8,16'
texts = ''                  # a text file, one text a line, or a .jsonl, .csv, .tsv, .parquet or
                            # .fasta file, a record each, all but parquet also as .gz; too long ones
                            # are skipped and counted; '': the validation split
field = 'text'              # where a record of such a file has its text
dataset = ''                # where the run's dataset lies; '': where it was trained from
n = None                    # None | int [1, 1e9]: texts, or pairs of sts; all if there are fewer;
                            # None: 1000 texts, and all pairs
order = 'random'            # random | first: random ones are drawn with the seed
draws = 16                  # [1, 1e5]; nelbo: draws of the bound per text, spread evenly over the
                            # number of masked positions
n_orders = 8                # [1, 1e4]; orders: random orders of writing for each text; a tighter
                            # bound, and a network row more per token, with each
sts = ''                    # sts: a csv or tsv of sentence, sentence, score (STS-B, SICK), or a hub
                            # dataset's id
sts_revision = ''           # of the hub dataset: a commit
scorer = ''                 # unconditional, text, self_correction: says how likely the texts are: a
                            # run of config/ar.py, or a causal language model, hub id or folder
scorer_revision = ''        # of the hub model: a commit
infill_share = 0.5          # (0, 1]; infill: of each text's tokens
classes = ''                # image: what captions say, and by which words:
                            # 'animal: cat, dog; colour: red, blue'; edit: which words become others
seeds = 3                   # [1, 1000]; t2l, sts: draws of every latent
show = 10                   # [0, 1e6]; texts to print, the first ones
compile = False             # torch.compile every block: a minute at first, then faster calls;
                            # from left to right it does nothing
device = 'auto'             # auto | cpu | cuda | <cuda:1 or the like>
dtype = 'auto'              # auto | bfloat16 | float32; auto: as in train.py

ROOMS = {'sampling/knobs.py': ''}   # which has the knobs of all that samples
SWEPT_KNOBS = TEXT_KNOBS + LATENT_KNOBS + ('rerank', 'strength')
# figures that stand above a table, not in it
FACTS = ('n', 'n_near', 'n_skipped', 'draws', 'n_orders', 'seeds', 'share', 'n_known', 'n_clean',
         'n_cut_sentences', 'rounds_at_most')
N_TEXTS = 1000                 # where n does not say

# -----------------------------------------------------------------------------
# Tasks

def all_tasks():
    """ {name: module} of the files in tasks/ that declare a task. """
    found = {}
    for file in sorted(os.listdir(os.path.join(HERE, 'tasks'))):
        name, kind = os.path.splitext(file)
        if kind == '.py':
            module = importlib.import_module(f'tasks.{name}')
            if hasattr(module, 'NEEDS'):
                found[name] = module
    return found


def choose_tasks(run, known):
    """ {name: module} of the tasks that are asked for; by default nelbo and what the run was
    trained for. ValueError for one that the run cannot do. """
    # what is asked for
    names = [name.strip() for name in tasks.split(',') if name.strip()]
    if not names:
        trained = trained_for(run)
        directions = [name for name in ('l2t', 't2l', 'unconditional') if name in trained]
        if 'causal' in trained and 'l2t' not in trained:
            directions = ['l2t', *directions]
        if run.streams == ('text',):
            directions = ['text']
        names = ['nelbo', *(name for name in directions if not known[name].NEEDS.missing(run))]

    # can the run do it?
    chosen = {}
    for name in names:
        # a config of training says unconditional of a run of text alone, too
        if name == 'unconditional' and run.streams == ('text',):
            name = 'text'
        if name not in known:
            raise ValueError(f'tasks={tasks!r}: choose from {", ".join(known)}')
        missing = known[name].NEEDS.missing(run)
        if missing:
            raise ValueError(f'{out_dir} {missing}: no {name} from it')
        chosen[name] = known[name]

    # a scorer that no task reads
    readers = [name for name, task in known.items() if 'scorer' in task.SETTINGS]
    if scorer and not chosen.keys() & set(readers):
        raise ValueError(f'scorer={scorer}: read by {", ".join(readers)}, chosen are '
                         f'{", ".join(chosen)}')
    return chosen

# -----------------------------------------------------------------------------
# Sweeps

def read_sweep(spec, config):
    """ 'sampler=ancestral,confidence; steps=8,16' -> [{sampler: .., steps: ..}, ...], values of the
    knobs' own types. """
    knobs = read_knobs(__file__)
    # {knob: its values}
    axes = {}
    for part in spec.split(';'):
        name, _, values = part.strip().partition('=')
        if name not in SWEPT_KNOBS or not values or isinstance(config[name], tuple):
            raise ValueError(f'sweep={spec!r}: {part.strip()!r} is no KNOB=VALUE,VALUE of a '
                             'sampling knob')
        try:
            axes[name] = [knobs[name].read(value.strip()) for value in values.split(',')]
        except ValueError as error:
            raise ValueError(f'sweep={spec!r}: {name}: {error}') from None
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def measure_sweep(run, ctx, task, name, points):
    """ {'name=value,.../metric': value}: quality beside the network calls and the milliseconds that
    a text took, and the name of their keys. Each point is recorded when it is measured. task: a
    module with generate and judge. """
    results = {'n': ctx.n}

    # the first calls of a process, or of a compiled network, are slow. One draft tells as much
    first = knobs_of(task, points[0])
    if 'rerank' in task.SETTINGS:
        first['rerank'] = 1
    task.generate(run, ctx, slice(ctx.knobs['sample_batch']), **first)

    # quality and cost of each point
    for point in points:
        label = ','.join(f'{knob}={value}' for knob, value in point.items())
        run.row_calls, began = 0, time.perf_counter()
        made = task.generate(run, ctx, **knobs_of(task, point))
        seconds = time.perf_counter() - began
        n = len(made)                          # of an edit, the texts that have such a word
        figures = {'calls': run.row_calls / n, 'ms': 1000 * seconds / n}
        results['n'] = n
        enter(figures, '', task.judge(run, ctx, made))

        line = f'{label:<40}'
        for metric, value in figures.items():
            results[f'{label}/{metric}'] = value
            if not metric.endswith('_se'):
                line += f'{metric} {value:<9.4g}'
        key, _ = record(run, ctx, task, name, results, point)
        print(line, flush=True)
    return results, key


def knobs_of(task, point):
    """ Those of a sweep's knobs that the task reads. """
    return {knob: value for knob, value in point.items() if knob in task.SETTINGS}

# -----------------------------------------------------------------------------
# results.json

def read_results(path):
    """ results.json, flat, with how each task was measured in 'meta'; {} where there is none
    yet. """
    if not os.path.exists(path):
        return {}
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f'{error}: move it away, and results start anew') from None
    meta = found.setdefault('meta', {})
    if not isinstance(meta, dict) or not all(isinstance(one, dict) for one in meta.values()):
        raise ValueError(f'{path}: meta is no object of objects: move it away, and results start '
                         'anew')
    return found


def name_of_results(task, settings, n, texts, old):
    """
    The name under which the figures of a task go into results.json, `old`: 'nelbo', or
    'nelbo[texts=my.txt,n=20]'. texts: the file they are from, or ''. A name belongs to the settings
    {knob: value} that it was first used with, and to the most texts n. What was measured otherwise
    gets a name with the knobs that differ from them.
    """
    settings = json.loads(json.dumps(settings))          # as they are recorded: tuples are lists
    differences = {'texts': os.path.basename(texts)} if texts else {}
    while True:
        label = ','.join(f'{knob}={value}' for knob, value in differences.items())
        name = f'{task}[{label}]' if label else task
        name = name.replace('/', ':')                    # a / ends the name in a key
        if name not in old.get('meta', {}):
            return name
        meta = old['meta'][name]
        found = {knob: value for knob, value in settings.items() if meta.get(knob, value) != value}
        if n < old.get(f'{name}/n', 0):
            found['n'] = n
        if found.keys() <= differences.keys():
            return name
        differences |= found


def write_results(path, name, figures, meta, old, keep=False):
    """ {key: value} into results.json, which holds `old`, as 'name/key'. The name's other keys go,
    unless they are to keep. """
    flat = {key: value for key, value in old.items() if keep or key.split('/')[0] != name}
    flat |= {f'{name}/{key}': value for key, value in figures.items()}
    flat['meta'] = old.get('meta', {}) | {name: meta}
    write_text(path, json.dumps(flat, indent=1))


def print_table(task, results, width=None):
    """ Metrics down, controls across; value and standard error. Controls that do not fit in the
    width of the terminal (100 columns where there is none) follow in a block of their own. """
    width = width or shutil.get_terminal_size((100, 24)).columns
    facts = ', '.join(f'{key} {results[key]}' for key in FACTS if key in results)
    print(f'\n{task}: {facts}')

    # {control: {metric: cell}}
    columns = {}
    for key, value in results.items():
        if key not in FACTS and not key.endswith('_se'):
            control, _, metric = key.rpartition('/')
            se = results.get(f'{key}_se')
            error = ' ' * 8 if se is None else f' ± {se:<5.3f}'
            columns.setdefault(control or task, {})[metric] = f'{value:>10.3f}{error}'
    first = 2 + max(len(metric) for column in columns.values() for metric in column)
    each = max(18, 2 + max(map(len, columns)))

    # block by block
    controls = list(columns)
    n_fit = max(1, (width - first) // each)
    for i in range(0, len(controls), n_fit):
        block = controls[i:i + n_fit]
        if i:
            print()
        print(' ' * first + ''.join(f'{control:>{each}}' for control in block))
        for metric in dict.fromkeys(metric for control in block for metric in columns[control]):
            cells = [columns[control].get(metric, '') for control in block]
            line = f'{metric:<{first}}' + ''.join(f'{cell:>{each}}' for cell in cells)
            print(line.rstrip())


def print_summary(chosen, measured):
    """ One line for each of the HEADLINES of the tasks, with its controls side by side. The lead
    over the rival is of paired texts. """
    rows, rivals = [], []
    for name, task in chosen.items():
        found, rival = measured[name], getattr(task, 'RIVAL', '')
        for label, column, metric in getattr(task, 'HEADLINES', ()):
            keys = [f'{column}{metric}']
            if not column:                                 # else they stand one line above
                keys += [f'{control}/{metric}' for control in ('shuffled', 'null', rival, 'lead')]
            if keys[0] in found:
                rows.append([label, *(cell_of(found, key) for key in keys)])
        if 'lead' in {key.split('/')[0] for key in found}:
            rivals.append(f'{rival} ({name})')
    if len(rows) < 2:
        return

    titles = ['in short', 'ours', 'shuffled', 'null', 'rival', 'lead']
    print()
    for row in [titles, *rows]:
        print(f'{row[0]:<29}' + ''.join(f'{cell:>14}' for cell in row[1:]).rstrip())
    if rivals:
        print(f'rival: {", ".join(rivals)}; lead: over it, text by text')


def cell_of(figures, key):
    """ A figure and its standard error, or '' where there is none: 24.1 ± 1.4, .912 ± .003. """
    if key not in figures:
        return ''
    digits = 1 if abs(figures[key.rpartition('/')[2]]) >= 10 else 3
    values = [figures[key], figures.get(f'{key}_se')]
    return ' ± '.join(re.sub(r'^(-?)0\.', r'\1.', f'{value:.{digits}f}')
                      for value in values if value is not None)


def record(run, ctx, task, name, figures, point=()):
    """ Writes the figures of a task into results.json, at once: what comes later may fail. name: of
    the task, or of its sweep; point: the knobs of the sweep. Returns the name of their keys
    and the figures with what stands beside them. """
    # how they were measured
    file = '' if hasattr(task, 'HAS_OWN_TEXTS') else texts
    settings = {knob: ctx.knobs[knob] for knob in ('which', 'seed', *task.SETTINGS)
                if knob not in point}
    if file:
        settings['texts_sha256'] = sha256(file)[:8]
        figures = figures | {'n_skipped': ctx.n_skipped}
    else:
        settings['order'] = order

    meta = ctx.knobs | settings | dict(texts=file, checkpoint=run.checkpoint, commit=git_commit(),
                                       argv=sys.argv, n_texts=ctx.n, n_skipped=ctx.n_skipped)

    # read and written by one process at a time: another evaluation of this run may end now
    with alone_in(out_dir):
        path = os.path.join(out_dir, 'results.json')
        old = read_results(path)
        key = name_of_results(name, settings, figures['n'], file, old)

        # a sweep keeps its earlier points, if they are of the same checkpoint and texts
        before = old.get('meta', {}).get(key, {})
        is_same = before.get('checkpoint') == run.checkpoint and old.get(f'{key}/n') == figures['n']
        write_results(path, key, figures, meta, old, keep=bool(point) and is_same)
        if ctx.arrays:
            file_name = key.replace(name, f'{name}s', 1) + '.npz'
            with write_whole(os.path.join(out_dir, file_name)) as f:
                np.savez(f, **ctx.arrays)
    return key, figures


def show_figures(ctx, name, figures, key):
    """ Prints the figures of a task, which are in results.json under `key`. """
    if ctx.shown[:show]:
        print('\n' + '\n'.join(ctx.shown[:show]).rstrip('\n'))
    print_table(name, figures)
    other = f' under {key}/, not under {name}/' if key != name else ''
    print(f'\nwritten to {os.path.join(out_dir, "results.json")}{other}', flush=True)

# -----------------------------------------------------------------------------

def say_cost(run, chosen, contexts):
    """ A line for each task, and their sum: about how long they will take. """
    costs = {name: seconds_of(run, task, contexts[name]) for name, task in chosen.items()}
    known = [seconds for seconds in costs.values() if seconds is not None]
    if not known:
        return
    for name, seconds in costs.items():
        about = 'not known' if seconds is None else f'about {timedelta(seconds=round(seconds))}'
        print(f'{name:<18} {about}')
    print(f'{"all that is known":<18} about {timedelta(seconds=round(sum(known)))}', flush=True)


def evaluate(config):
    """ Measures what is asked for. ValueError says what is wrong. """
    # what can be missing is asked for before anything is computed
    run = load_run(out_dir, which, device, dtype, encoder_folder)
    chosen = choose_tasks(run, all_tasks())
    config['sample_batch'] = rows_that_fit(run, config['sample_batch'])
    config['dtype'] = run.dtype
    path = os.path.join(out_dir, 'results.json')
    read_results(path)
    check_writable(path)
    prepared = {name: task.prepare(run, config) for name, task in chosen.items()
                if hasattr(task, 'prepare')}
    if run.meta['encoder'] and any(task.NEEDS.encoder for task in chosen.values()):
        encoder_of(run)
    points = read_sweep(sweep, config) if sweep else []
    if sweep:
        chosen = {name: task for name, task in chosen.items() if hasattr(task, 'judge')}
        if not chosen:
            raise ValueError(f'sweep={sweep!r} goes over l2t, t2l and edit: name one in --tasks=')

    # the texts
    folder = dataset_folder(dataset or run.config['dataset'])
    n_texts = N_TEXTS if n is None else n
    n_skipped = 0
    if texts:
        sources, tokens, raw, n_skipped = load_file(run, texts, field, n_texts)
    else:
        sources, tokens, raw = load_texts(run, folder, n_texts, order, config['seed'])
    for name, task in chosen.items():
        if len(sources) == 1 and task.NEEDS.shuffled and raw is not None:
            raise ValueError(f'{name} of 1 text: its shuffled control needs at least 2; '
                             '--tasks=nelbo takes one; prepare.py --val_fraction=0.1 sets more '
                             'aside')

    # measure
    if compile:
        for block in run.model.blocks:
            block.compile()
    contexts = {name: Context(config, folder, sources, tokens, raw, n_skipped, prepared.get(name))
                for name in chosen}
    if not sweep and not compile:              # each size of a trial would be compiled
        say_cost(run, chosen, contexts)
    measured = {}
    for name, task in chosen.items():
        ctx = contexts[name]
        if sweep:
            name = f'{name}_sweep_' + '_'.join(points[0])
            figures, key = measure_sweep(run, ctx, task, name, points)
        else:
            measured[name] = task.measure(run, ctx)
            key, figures = record(run, ctx, task, name, measured[name])
        show_figures(ctx, name, figures, key)
    if measured:
        print_summary(chosen, measured)


def main():
    config = configure(globals())
    keep_freed_memory()
    watch()
    with stop_on_error():
        evaluate(config)


if __name__ == '__main__':
    main()
