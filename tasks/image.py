"""
image: pictures and their names, in every direction. A judge, a small network that was trained on
the real training pictures, says what a picture shows (tasks/judge.py).

Several parts of what is held out are measured, and the figures of each begin with its name:
    val         new names, where the pictures are icons
    pairs       names that other sets have: the missing icon of a set
    sets        whole sets that are new: their pictures are named
    shared      of pairs and sets (else of val) captions of a name that many training pictures have,
                without a set
Pictures made from captions (val, pairs, shared)
    named           %, of those whose name the judge knows: it gives them that name
    words           of the words of a name that it knows, the % that it sees
    style           %, of those whose caption names a set: it says that they are of that set
    distance        from the right picture. Of all pixels, the root mean square in grey levels
    nearest         distance from the nearest training picture: are they copies?
    frechet, precision, coverage    of the judge's features, against other real pictures
    variety         distance between two pictures of one caption
Captions written from pictures (val, pairs, sets)
    exact, f1       the name, %, and the sets of words
    any             %: a name that this very drawing has in some set
Both from noise
    both_named, both_words          does the picture show what its name says?
Pictures whose left half is given, with a caption (of the part pairs, else val)
    half_distance, half_named, half_words       distance: of the right half

Controls
    real            the right pictures; frechet: the floor; variety: of two training pictures
    shuffled, null  of another's caption or picture, and of nothing
    ridge           a regression from the words; with a half: from its pixels, too
    mean, copy      the mean training picture of the nearest name, and a random one
    near_set        of the nearest name, that of the set that is most like the one asked for
    nearest         the name, or the right half, of the nearest training picture
    diffusion       captions that are written the most certain token first
    text_first      both: a caption from left to right, and then its picture
    alone           of the same caption, without the half
    lead            over near_set, nearest or alone, picture by picture
images.npz has the first 100 of each kind.
"""
from collections import Counter, defaultdict
from functools import lru_cache

import numpy as np
import torch

from corpora.images import images_of, pixels
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS
from sampling.run import BOTH, Needs
from tasks.common import (Figures, Task, chosen_rows, derangement, open_split, progress_bar,
                          train_texts)
from tasks.judge import parse, train_judge
from tasks.measures import word_f1
from tasks.t2l import ridge
from tasks.unconditional import describe_latents, text_first

DRAWN = ('val', 'pairs', 'shared')         # parts whose captions are drawn,
WRITTEN = ('val', 'pairs', 'sets')         # and whose pictures are named
N_KEPT = 100                   # of each kind, in images.npz
N_OTHERS = 4000                # real pictures of a split that made ones are compared with
N_FITTED = 20_000              # training pictures: what each set looks like, and half and half
BLOCK = 8192                   # training pictures that are read at a time


def prepare(run, knobs):
    images_of(run)
    return {}                                              # for all points of a sweep


def measure(run, ctx):
    seed = ctx.knobs['seed']
    train = training(run, ctx.folder, seed)
    parts = parts_of(run, ctx, train.judge.classes)
    figures = Figures(ctx.n)

    # what a regression draws, of the captions of all parts at once, and of training pictures
    rows = chosen_rows(len(train.data), N_FITTED, seed)
    tokens = [part.tokens for part in parts.values()] + [train.data.rows(rows)[0]]
    found = ridge(run, ctx.folder, torch.cat(tokens)).split([len(some) for some in tokens])
    regressed = dict(zip(parts, found))

    for name, part in parts.items():
        if run.can('t2l') and name in DRAWN:
            enter_drawn(run, ctx, figures, train, part, regressed[name])
        if run.can('l2t') and name in WRITTEN:
            enter_written(run, ctx, figures, train, part)
    if run.can('unconditional'):
        enter_both(run, ctx, figures, train.judge)
    if run.can('complete'):
        part = parts.get('pairs', parts['val'])
        halves = Halves(train.data.raw_latents(rows), found[-1])
        enter_halves(run, ctx, figures, train, part, halves, regressed[part.name])

    ctx.arrays = {name: np.array(some[:N_KEPT]) for name, some in ctx.arrays.items()}
    return figures

# -----------------------------------------------------------------------------
# What is measured, and what is known

class Part:
    """ Rows that are held out: n captions, their tokens and names, raw latents, pictures. """

    def __init__(self, run, ctx, name, chosen):
        """ chosen: [(a split, its rows)], of which n are drawn at random; the others are what made
        pictures are compared with. """
        self.name = name
        self.tokens = torch.cat([data.rows(rows)[0] for data, rows in chosen])
        raw = torch.cat([data.raw_latents(rows) for data, rows in chosen])
        order = chosen_rows(len(raw), ctx.n + N_OTHERS, ctx.knobs['seed'])
        self.others = pixels(run, raw[order[ctx.n:]])
        order = order[:ctx.n]
        self.raw = raw[order]
        self.tokens = self.tokens[order]
        self.real = pixels(run, self.raw)
        self.texts = run.decode(self.tokens)
        self.sets, self.names = zip(*map(parse, self.texts))


def parts_of(run, ctx, classes):
    """ {name: Part} of what the dataset has. """
    if ctx.prepared:
        return ctx.prepared

    # each split, and what its captions say
    held_out = {}
    for split in WRITTEN:
        if split in run.meta['splits']:
            data = open_split(run, ctx.folder, split)
            texts = [run.tokenizer.decode(data.ids(i)) for i in range(len(data))]
            held_out[split] = data, texts
            rows = np.arange(len(data))
            if split == 'pairs':
                rows = rows[[bool(parse(text)[0]) for text in texts]]
            ctx.prepared[split] = Part(run, ctx, split, [(data, rows)])

    # names that the judge knows, without a set
    if len(held_out) > 1:
        del held_out['val']
    chosen = []
    for data, texts in held_out.values():
        name, of_set, _ = classes.of(texts)
        is_plain = [not parse(text)[0] for text in texts]
        chosen.append((data, np.flatnonzero((name >= 0).numpy() & is_plain)))
    if sum(len(rows) for _, rows in chosen) > 1:
        ctx.prepared['shared'] = Part(run, ctx, 'shared', chosen)
    return ctx.prepared


class Training:
    """ The training pictures, and a judge that has learned from them. """

    def __init__(self, run, folder, seed):
        self.run = run
        self.data = open_split(run, folder, 'train')
        self.rng = np.random.Generator(np.random.Philox(seed))
        self.captions = list(train_texts(run, folder))
        self.judge = train_judge(run, self.data, self.captions, seed)

        # {name: its rows}, and {word: names with it}
        self.sets, names = zip(*map(parse, self.captions))
        self.rows_of = defaultdict(list)
        for row, name in enumerate(names):
            self.rows_of[name].append(row)
        self.names_with = defaultdict(list)
        for name in self.rows_of:
            for word in set(name):
                self.names_with[word].append(name)

        # {set: what it looks like}, the mean features of its pictures among some
        rows = chosen_rows(len(self.data), N_FITTED, seed)
        features = self.judge.features(self.pictures(rows)).squeeze(1)
        rows_of_set = defaultdict(list)
        for i, row in enumerate(rows):
            rows_of_set[self.sets[row]].append(i)
        self.look = {of_set: features[some].mean(0) for of_set, some in rows_of_set.items()}

    def pictures(self, rows):
        return pixels(self.run, self.data.raw_latents(rows))

    def nearest_name(self, name):
        """ The name of training pictures with the highest F1 of words; of equal ones the first. """
        n_common = Counter(known for word in set(name) for known in self.names_with[word])
        if not n_common:
            return next(iter(self.rows_of))
        return max(n_common, key=lambda known: n_common[known] / (len(known) + len(name)))

    def some_rows(self, name, n):
        """ n rows of a name, at random: where sets are named, those that name one, so that no
        picture comes twice. None: it has fewer. """
        rows = [row for row in self.rows_of[name] if self.sets[row]] or self.rows_of[name]
        return self.rng.permutation(rows)[:n] if len(rows) >= n else None

    def row_of_near_set(self, name, of_set):
        """ The row of a name in the set that looks most like this one; None where there is none.
        """
        rows = [row for row in self.rows_of[name]
                if self.sets[row] in self.look and self.sets[row]]
        if not rows or of_set not in self.look:
            return None
        here = self.look[of_set]
        return min(rows, key=lambda row: (self.look[self.sets[row]] - here).norm().item())

    def nearest(self, raw, given=None):
        """ The nearest training picture of each of raw (n, N, D): how far it is, as `distance` has
        it, and its row, (n,) each. given (N,) bool: patches that are compared; None: all. """
        given = slice(None) if given is None else given
        x = raw[:, given].flatten(1)
        best = torch.full((len(x),), torch.inf)
        best_at = torch.zeros(len(x), dtype=torch.int64)
        for first in progress_bar(range(0, len(self.data), BLOCK), desc='nearest pictures'):
            rows = np.arange(first, min(first + BLOCK, len(self.data)))
            y = self.data.raw_latents(rows)[:, given].flatten(1)
            near, at = torch.cdist(x, y).min(1)
            best_at = torch.where(near < best, at + first, best_at)
            best = torch.minimum(near, best)
        return 127.5 * best / x.shape[1] ** 0.5, best_at


@lru_cache(1)
def training(run, folder, seed):
    """ The Training, once for all points of a sweep. """
    return Training(run, folder, seed)


def distance(a, b):
    """ Of pictures (n, S, S, C) uint8: of all pixels the root mean square of the difference in grey
    levels, (n,). """
    difference = a.astype(np.float32) - b
    return np.sqrt((difference ** 2).mean((1, 2, 3)))

# -----------------------------------------------------------------------------
# Pictures from captions

def draw(run, ctx, part, rows=slice(None), **knobs):
    return pixels(run, run.embed(part.tokens[rows], **ctx.sampling | knobs))


def enter_drawn(run, ctx, figures, train, part, regressed):
    judge = train.judge

    def enter(control, found):
        enter_as(figures, part.name, control, found)

    # what the run draws
    n = len(part.texts)
    num_samples = 2 if part.name == 'shared' else 1
    raw = run.embed(part.tokens, num_samples=num_samples, **ctx.sampling).clamp(-1, 1)
    raw, again = raw[::num_samples], raw[1::2]
    made = pixels(run, raw)

    # and what could be drawn without it
    nearest = [train.nearest_name(name) for name in part.names]
    copies = np.concatenate([train.some_rows(name, 1) for name in nearest])
    means = [train.pictures(train.rows_of[name]).mean(0) for name in nearest]
    pictures = {
        '': made,
        'real': part.real,
        'shuffled': made[derangement(n, ctx.knobs['seed'])],
        'null': draw(run, ctx, part, guidance=0.0),
        'ridge': pixels(run, regressed),
        'mean': np.stack(means).round().astype(np.uint8),
        'copy': train.pictures(copies)}
    for control, some in pictures.items():
        found = judged(judge, some, part.texts) | described(judge, some, part.others)
        if control != 'real':
            found['distance'] = distance(some, part.real)
        enter(control, found)
        ctx.arrays[f'{part.name}_{control or "made"}'] = some
    ctx.arrays[f'{part.name}_texts'] = part.texts

    # are they copies?
    for control, some in (('', raw), ('real', part.raw)):
        enter(control, {'nearest': train.nearest(some)[0]})

    if part.name == 'pairs':
        # the same name in the set that is most like
        rows = [train.row_of_near_set(*one) for one in zip(nearest, part.sets)]
        here = np.flatnonzero([row is not None for row in rows])
        same = train.pictures([rows[i] for i in here])
        far = distance(same, part.real[here])
        enter('near_set', {'distance': far, **judged(judge, same, [part.texts[i] for i in here])})
        enter('lead', {'distance': distance(made[here], part.real[here]) - far})

    if part.name == 'shared':
        # two of a name
        two = [some for some in (train.some_rows(name, 2) for name in nearest) if some is not None]
        one, other = map(train.pictures, zip(*two))
        enter('real', {'variety': distance(one, other)})
        enter('', {'variety': distance(made, pixels(run, again))})


def enter_as(figures, prefix, control, found):
    """ Enters {metric: value} by names that begin with a prefix. """
    figures.enter(control, {f'{prefix}_{metric}': value for metric, value in found.items()})


def judged(judge, pictures, texts):
    """ {metric: values}: does the judge see in n pictures what their captions say? """
    name, of_set, has_word = judge.classes.of(texts)
    seen_name, seen_set, seen_words = judge.of(pictures)
    found = {
        'named': 100.0 * (seen_name == name)[name >= 0],
        'words': (100.0 * (seen_words & has_word).sum(1), 1.0 * has_word.sum(1)),
        'style': 100.0 * (seen_set == of_set)[of_set >= 0]}
    return {metric: values for metric, values in found.items() if len(values)}


def described(judge, pictures, others):
    """ {metric: value}: how like other pictures are they, by the judge's features? """
    found = describe_latents(judge.features(pictures), judge.features(others))
    return {name: found[name] for name in ('frechet', 'precision', 'coverage')}

# -----------------------------------------------------------------------------
# Captions from pictures

def enter_written(run, ctx, figures, train, part):
    def write(**knobs):
        return run.write(latents=part.raw, lengths_of=part.tokens, **ctx.sampling | knobs)

    # all names that each drawing has
    data = open_split(run, ctx.folder, part.name)
    names_of = defaultdict(set)
    for i in range(len(data)):
        _, name = parse(run.tokenizer.decode(data.ids(i)))
        names_of[data.raw_latents([i]).numpy().tobytes()].add(name)
    all_names = [names_of[one.numpy().tobytes()] for one in part.raw.split(1)]

    written = {'': write()}
    if run.net.is_causal and run.net.fills_masks:
        written['diffusion'] = write(sampler='confidence')
    other = derangement(len(part.texts), ctx.knobs['seed'])
    written['shuffled'] = [written[''][i] for i in other]
    written['nearest'] = [train.captions[row] for row in train.nearest(part.raw)[1].tolist()]

    measured = {}
    for control, texts in written.items():
        names = [parse(text)[1] for text in texts]
        f1 = [word_f1(' '.join(a), ' '.join(b)) for a, b in zip(names, part.names)]
        measured[control] = {
            f'{part.name}_exact': [100.0 * (a == b) for a, b in zip(names, part.names)],
            f'{part.name}_any': [100.0 * (a in b) for a, b in zip(names, all_names)],
            f'{part.name}_f1': 100.0 * np.array(f1)}
    figures.enter_with_lead(measured, 'nearest')
    ctx.arrays |= {f'{part.name}_texts': part.texts, f'{part.name}_real': part.real,
                   f'{part.name}_written': written['']}
    ctx.show_written(written[''])

# -----------------------------------------------------------------------------
# Both from noise

def enter_both(run, ctx, figures, judge):
    texts, raw = run.sample_both(ctx.n, **ctx.sampling)
    pictures = pixels(run, raw)
    other = derangement(ctx.n, ctx.knobs['seed'])
    pairs = {'': (texts, pictures), 'shuffled': (texts, pictures[other])}
    if run.net.is_causal:
        tokens, raw = text_first(run, ctx.n, ctx.sampling_knobs(sampler='autoregressive',
                                                                block_size=0))
        pairs['text_first'] = run.decode(tokens), pixels(run, raw)
    for control, (texts, some) in pairs.items():
        enter_as(figures, 'both', control, judged(judge, some, texts))
    ctx.arrays |= dict(both_texts=pairs[''][0], both_made=pictures)

# -----------------------------------------------------------------------------
# The right half of a picture, from its left half and a caption

class Halves:
    """ Latents (n, N, D) in two halves, and the linear regression of what a caption does not say
    (raw less regressed) of the right one on that of the left one. """

    def __init__(self, raw, regressed):
        side = int(raw.shape[1] ** 0.5)
        self.given = torch.arange(side).repeat(side) < side // 2         # (N,)
        left, right = self.split(raw - regressed)
        penalty = torch.eye(left.shape[1])
        self.M = torch.linalg.solve(left.T @ left + penalty, left.T @ right)

    def split(self, z):
        return z[:, self.given].flatten(1), z[:, ~self.given].flatten(1)

    def joined(self, raw, right):
        """ Latents whose left half is that of raw. """
        found = raw.clone()
        found[:, ~self.given] = right
        return found

    def regressed(self, raw, regressed):
        """ The same, whose right half is the regression's. """
        left, _ = self.split(raw - regressed)
        rest = (left @ self.M).view_as(raw[:, ~self.given])
        return self.joined(raw, regressed[:, ~self.given] + rest)


def enter_halves(run, ctx, figures, train, part, halves, regressed):
    given = halves.given.expand(len(part.raw), -1)
    _, rows = train.nearest(part.raw, halves.given)
    nearest = train.data.raw_latents(rows.numpy())[:, ~halves.given]
    made = {
        '': run.complete(part.raw, given, part.tokens, **ctx.sampling),
        'alone': run.embed(part.tokens, **ctx.sampling),
        'ridge': halves.regressed(part.raw, regressed),
        'nearest': halves.joined(part.raw, nearest),
        'real': part.raw}
    pictures = {control: pixels(run, raw) for control, raw in made.items()}
    S = part.real.shape[1]
    far = {control: distance(some[:, :, S // 2:], part.real[:, :, S // 2:])
           for control, some in pictures.items()}
    for control, some in pictures.items():
        found = judged(train.judge, some, part.texts)
        if control != 'real':
            found['distance'] = far[control]
        enter_as(figures, 'half', control, found)
    enter_as(figures, 'half', 'lead', {'distance': far[''] - far['alone']})
    ctx.arrays |= dict(half_texts=part.texts, half_made=pictures[''], half_real=part.real)

# -----------------------------------------------------------------------------
# A sweep draws the captions of one part

def part_of_sweep(run, ctx):
    train = training(run, ctx.folder, ctx.knobs['seed'])
    parts = parts_of(run, ctx, train.judge.classes)
    return train, parts.get('shared', parts['val'])


def generate(run, ctx, rows=slice(None), **knobs):
    """ Pictures of these captions. """
    _, part = part_of_sweep(run, ctx)
    return draw(run, ctx, part, rows, **knobs)


def judge(run, ctx, made):
    """ {metric: value} of pictures made from all captions. """
    train, part = part_of_sweep(run, ctx)
    return judged(train.judge, made, part.texts) | described(train.judge, made, part.others)


TASK = Task(
    Needs(BOTH), (*TEXT_KNOBS, *LATENT_KNOBS), measure,
    prepare=prepare, generate=generate, judge=judge, takes_two=True)
