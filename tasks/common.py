"""
What the tasks of this folder share. A task is a file here with a Task, and a row of
TASKS (tasks/__init__.py).

Letters: n texts, L text tokens, N latent vectors, D latent dimensions, V vocabulary.
"""
import math
import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Callable, NamedTuple

import numpy as np
import torch

from base.console import progress_bar, shown, warn
from configurator import on_command_line
from data import PackedDataset, dataset_folder
from noise import uniforms
from runs.checkpoint import SAMPLES, STATISTICS, check_equal, of_dataset
from sampling.inputs import most_tokens, pack, read_texts
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS, SamplingKnobs
from sampling.run import Needs

# the settings of samples from noise, which have nothing to guide them, and of what judges them
FREE_SETTINGS = (*(name for name in TEXT_KNOBS if name != 'guidance'), 'scorer', 'scorer_revision')

# -----------------------------------------------------------------------------
# What a task is, gets and gives

class Task(NamedTuple):
    """
    needs       of the run that it can measure (sampling.run.Needs)
    settings    the knobs of evaluate.py that decide its figures, besides its texts
    measure     (run, ctx) -> Figures. What else there is to see it puts into ctx.shown and
                ctx.arrays

    What only some tasks have:
    prepare     (run, knobs) -> ctx.prepared: reads what the task's own knobs name, and checks what
                else it needs, before anything is computed
    generate    (run, ctx, rows=slice(None), **knobs) -> what is made of these rows: a sweep's
                point
    judge       (run, ctx, what was made) -> {metric: values (n,)}
    headlines   (what to call it, control, metric) of the figures that stand in the summary
    rival       the control that is the one to beat
    """
    needs: Needs
    settings: tuple
    measure: Callable
    prepare: Callable | None = None
    generate: Callable | None = None
    judge: Callable | None = None
    headlines: tuple = ()
    rival: str | None = None
    embeds: bool = False           # it embeds texts, where the run has an encoder
    takes_two: bool = False        # a control gives a text the latent of another
    has_own_texts: bool = False    # --texts= is not read


@dataclass
class Context:
    """ What is measured, and how. """
    knobs: dict                    # of evaluate.py
    folder: str = ''               # of the run's dataset
    texts: list = ()               # n
    tokens: object = None          # (n, L)
    raw: object = None             # raw latents (n, N, D), or None
    prepared: object = None        # what the task's `prepare` returned
    source: tuple = ('', {})       # which texts these are, in a record
    held: object = None            # the run folder, kept open: is it still that of the run?
    shown: list = field(default_factory=list)      # lines for a reader: what was written
    arrays: dict = field(default_factory=dict)     # {name: array}, saved next to results.json

    @property
    def n(self):
        return len(self.texts)

    @property
    def sampling(self):
        """ The keywords of the methods of a run, but for those of l2t and edit alone. """
        names = (*TEXT_KNOBS, *LATENT_KNOBS, 'seed', 'sample_batch')
        return {name: self.knobs[name] for name in names}

    def sampling_knobs(self, **changed):
        return SamplingKnobs(**self.sampling | changed)

    def show_written(self, texts, written):
        """ For a reader: each text, and what was written from its latent. """
        self.shown += [f'   {text}\n-> {out}\n' for text, out in zip(texts, written)]


# -----------------------------------------------------------------------------
# The texts that are measured

def dataset_of(run, dataset):
    """ The folder of the run's own dataset, or that which the command line names. A config file is
    of a training, perhaps of another one: what it names counts where the run's own is missing. """
    own = run.config['dataset']
    if dataset and (on_command_line('dataset') or not os.path.exists(dataset_folder(own))):
        return dataset_folder(dataset)
    if dataset not in ('', own):
        print(shown(f'{"dataset":<18} {own:<30} that of {run.out_dir}'))
    return dataset_folder(own)


def chosen_rows(total, n, seed):
    """ Which n of `total` rows are measured: random ones, drawn with the seed. """
    return np.random.Generator(np.random.Philox(seed)).permutation(total)[:n]


def load_file(run, path, field, n):
    """ (texts, tokens (n, L), raw latents (n, N, D) or None): the first n texts of a file that are
    short enough for the run. """
    if run.stats and not run.meta['encoder']:
        raise ValueError(f'texts={path}: {run.out_dir} has latents that no encoder made, so none '
                         'of other texts: leave it out')

    # the first n that fit
    most = most_tokens(run)
    texts = []
    n_skipped = 0
    for text in read_texts(path, field):
        if len(run.tokenizer.encode(text)) > most:
            n_skipped += 1
        else:
            texts.append(text)
        if len(texts) == n:
            break
    if n_skipped:
        warn(f'texts={path}: {n_skipped:,} texts skipped, which have more than the {most} tokens '
             f'that {run.out_dir} reads')
    if not texts:
        raise ValueError(f'texts={path}: no text in it is short enough for {run.out_dir}')

    # their latents
    raw = encode(run, texts)
    if raw is not None:
        n_zero = int((raw.flatten(1) == 0).all(1).sum())
        if n_zero:
            warn(f'texts={path}: {n_zero:,} of {len(texts):,} texts have no word that the encoder '
                 'knows: their latent is zero')
    return texts, pack(run, texts), raw


def load_texts(run, folder, n, seed):
    """ (texts, tokens (n, L), raw latents (n, N, D) or None): n rows of the validation split. """
    data = open_split(run, folder, 'val')
    rows = chosen_rows(len(data), n, seed)
    raw = data.raw_latents(rows) if run.stats else None

    # long proteins are cropped; as in training, always at the same positions
    tokens, _ = data.rows(rows, uniforms(seed, 0, 'crop', 0, len(rows), 1)[:, 0])
    return run.decode(tokens), tokens, raw


def open_split(run, folder, split):
    """ A split of the run's dataset. ValueError where the folder holds another dataset, or a shard
    is not the one that the dataset was made with: figures would be of other texts. """
    data = opened(folder, split, run.net.L, run.net.lengths is not None)
    # the run has the statistics of its own latents, which on another machine differ in the last
    # bits; without an encoder they say which latents these are
    but = SAMPLES | {STATISTICS} if run.meta['encoder'] else SAMPLES
    check_equal(folder, of_dataset(data.meta), of_dataset(run.meta),
                f' by {run.out_dir}: name its own dataset with --dataset=', but)
    return data


@lru_cache
def opened(folder, split, seq_len, crop):
    """ A split whose digests are asked for, once in an evaluation. """
    data = PackedDataset(folder, split, seq_len, crop)
    data.check_files()
    return data


def read_classes(spec):
    """ {name: its words} of 'animal: cat, dog; colour: red, blue'. """
    # a word that is alone in its class has no other to become
    groups = {}
    for part in spec.split(';'):
        name, _, listed = part.partition(':')
        name = name.strip()
        groups[name] = [word.strip() for word in listed.split(',') if word.strip()]
        if not name or len(groups[name]) < 2:
            raise ValueError(f'classes={spec!r}: expected --classes="animal: cat, dog; '
                             'colour: red, blue", two words or more each')
    return groups


def train_texts(run, folder):
    """ The training texts, one by one. """
    train = open_split(run, folder, 'train')
    for i in progress_bar(range(len(train)), desc='training texts', unit='text'):
        yield run.tokenizer.decode(train.ids(i))


def encode(run, texts):
    """ Raw latents (n, N, D) of written texts; None where the latents were given without their
    encoder. """
    return run.encode(texts) if run.meta['encoder'] else None

# -----------------------------------------------------------------------------
# Figures

def derangement(n, seed):
    """ A permutation that moves every one: a random cycle. """
    if n < 2:
        raise ValueError(f'{n} text: shuffled controls need at least 2')
    order = np.random.Generator(np.random.Philox(seed + 1)).permutation(n)

    # each gets its neighbour in a random cycle, so none keeps its own
    out = np.empty(n, np.int64)
    out[order] = np.roll(order, 1)
    return torch.from_numpy(out)


def with_controls(right, null, seed):
    """ {control: (condition, its clock)}: the condition of each text (n, ...), that of another
    text, and nothing. Of one text there is no other. """
    conditions = {'': (right, 0.0)}
    if len(right) > 1:
        conditions['shuffled'] = right[derangement(len(right), seed)], 0.0
    return conditions | {'null': (null, 1.0)}


class Figure(NamedTuple):
    value: float
    se: float | None = None        # standard error over texts


class Figures(dict):
    """ What a task has measured: {(control, metric): Figure}, and of how many texts. The control of
    what the task is about is ''. """

    def __init__(self, n):
        super().__init__()
        self.n = n

    def enter(self, control, metrics):
        """
        Enters {metric: value} of a control. A value is
            a number               a whole one is a count, and stands above the table
            values (n,) of n texts         their mean
            (totals (n,), sizes (n,))      sum of totals / sum of sizes: a long text weighs more

        Means and ratios get a standard error over texts, from two texts on. Of nothing they are nan
        (no text, sizes of 0), which is shown as undefined, and is null in results.json.
        """
        for metric, value in metrics.items():
            if isinstance(value, tuple):
                figure = ratio(*value)
            elif np.ndim(value):
                figure = mean(np.asarray(value, np.float64))
            else:
                figure = Figure(value if isinstance(value, int) else float(value))
            self[control, metric] = figure

    def enter_with_lead(self, measured, rival):
        """ Enters {control: {metric: value}}, of which '' is what is measured. If the control
        `rival` is among them, also the lead over it, text by text: the control 'lead', with the
        standard error of the paired differences. """
        for control, metrics in measured.items():
            self.enter(control, metrics)
        if rival in measured:
            for metric, values in measured[''].items():
                if np.ndim(values):
                    difference = np.asarray(values) - np.asarray(measured[rival][metric])
                    self.enter('lead', {metric: difference})


def mean(values):
    """ The Figure of values (n,), float64. """
    n = len(values)
    if n < 2:
        return Figure(float(values[0]) if n else math.nan)
    return figure_of(values.mean(), values.std(ddof=1) / math.sqrt(n))


def ratio(totals, sizes):
    """ The Figure of totals (n,) over sizes (n,). """
    if not sizes.sum():
        return Figure(math.nan)
    n = len(totals)

    # to first order its error is that of totals - value * sizes
    value = totals.sum() / sizes.sum()
    if n < 2:
        return Figure(float(value))
    return figure_of(value, (totals - value * sizes).std() / sizes.mean() / math.sqrt(n))


def figure_of(value, se):
    """ What is not finite has no error. """
    return Figure(float(value), float(se) if math.isfinite(value) else None)
