"""
image: pictures and their names, in every direction. A judge, a small network that was trained on
the real training pictures, says what a picture shows (tasks/judge.py).

Several parts of what is held out are measured, and the figures of each begin with its name:
    val         new names, where the pictures are icons
    pairs       names that other sets have: the missing icon of a set
    sets        whole sets that are new: their pictures are named
    shared      of all of these the captions without a set, of a name that many training pictures
                have
Each picture comes once, with one of its captions. A part of fewer than two is left out. val_n and
the like: how many pictures of a part are measured; val_others: how many other ones they are
compared with.

Pictures made from captions (val, pairs, shared)
    named           %, of those whose name the judge knows: it gives them that name
    words           of the words of the captions that it knows, the % that it sees
    style           %, of those whose caption names a set: it says that they are of that set
    distance        from the right picture. Of all pixels, the root mean square in grey levels
    nearest         distance from the nearest training picture: are they copies?
    frechet, precision, coverage    of the judge's features, against the other real pictures of the
                    part, where there are some
    variety         distance between two pictures of one caption
Captions written from pictures (val, pairs, sets)
    exact, f1       the name, %, and the sets of words
    any             %: a name that this very drawing has in some set
Both from noise
    both_named, both_words, both_style      does the picture show what its caption says?
Pictures whose left half is given, with a caption (of the part pairs, else val)
    half_named, half_words, half_style, half_distance       distance: of the right half

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
    lead            over near_set, nearest or alone, picture by picture; of distances below 0 is
                    better
The judge has learned from the training pictures that mean, copy, near_set and nearest show, so
their named, words and style are somewhat too high. images.npz has the first 100 of each kind.
"""
import math
from collections import Counter, defaultdict
from functools import cached_property

import numpy as np
import torch

from base.console import progress_bar, warn
from corpora.images import images_of, pixels
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS
from sampling.run import BOTH, Needs
from tasks.common import Figures, Task, chosen_rows, derangement, open_split, train_texts
from tasks.judge import parse, train_judge
from tasks.measures import word_f1
from tasks.t2l import ridge
from tasks.unconditional import describe_latents, text_first

DRAWN = ('val', 'pairs', 'shared')         # parts whose captions are drawn,
WRITTEN = ('val', 'pairs', 'sets')         # and whose pictures are named: those that are splits
N_KEPT = 100                   # of each kind, in images.npz
N_OTHERS = 4000                # real pictures of a part that drawn ones are compared with
N_FITTED = 20_000              # training pictures: what each set looks like, and half and half
BLOCK = 8192                   # training pictures that are read at a time


def prepare(run, knobs):
    images_of(run)
    return {}                                              # `known` fills it


def known(run, ctx):
    """ The Training and {name: Part}, made once: for all points of a sweep. """
    if not ctx.prepared:
        train = Training(run, ctx.folder, ctx.knobs['seed'])
        ctx.prepared |= dict(train=train, parts=parts_of(run, ctx, train))
    return ctx.prepared['train'], ctx.prepared['parts']


def measure(run, ctx):
    train, parts = known(run, ctx)
    figures = Figures(ctx.n)
    for name, part in parts.items():
        figures.enter('', {f'{name}_n': len(part.texts), f'{name}_others': len(part.others)})

    if run.can('t2l') or run.can('complete'):
        enter_drawings(run, ctx, figures, train, parts)
    if run.can('l2t'):
        for name in WRITTEN:
            if name in parts:
                enter_written(run, ctx, figures, train, parts[name])
    if run.can('unconditional'):
        enter_both(run, ctx, figures, train.judge)
    ctx.arrays = {name: np.array(some[:N_KEPT]) for name, some in ctx.arrays.items()}
    return figures


def enter_as(figures, prefix, control, found):
    """ Enters {metric: value} by names that begin with a prefix. """
    figures.enter(control, {f'{prefix}_{metric}': value for metric, value in found.items()})

# -----------------------------------------------------------------------------
# The parts

class Part:
    """ Pictures that are held out, n at most: captions, their tokens, sets and names, raw latents
    (n, N, D), pictures `real`, and pictures `others` of the same kind. """

    def __init__(self, run, ctx, name, pool):
        """ pool: [(a split, its row)], in any order. """
        self.name = name

        # at random; a picture has two captions at most, or a few where many are the same
        order = chosen_rows(len(pool), 2 * (ctx.n + N_OTHERS), ctx.knobs['seed'])
        picked = {}
        for data, row in (pool[i] for i in order):
            z = data.raw_latents([row])
            picked.setdefault(bytes_of(z), (z, data, row))
        raw, datas, rows = zip(*picked.values())
        raw = torch.cat(raw)

        # ours, and the others
        self.raw = raw[:ctx.n]
        self.real = pixels(run, self.raw)
        self.tokens = torch.cat([data.rows([row])[0] for data, row in zip(datas, rows[:ctx.n])])
        self.texts = run.decode(self.tokens)
        self.sets, self.names = zip(*map(parse, self.texts))
        self.others = pixels(run, raw[ctx.n:ctx.n + N_OTHERS])
        if len(self.others) < 2:
            warn(f'{name}: all {len(self.raw)} pictures are measured, so no other ones are left to '
                 'compare drawn ones with: a smaller --n leaves some')


def bytes_of(z):
    """ Latents as the key of a dict. """
    return z.numpy().tobytes()


def parts_of(run, ctx, train):
    """ {name: Part} of what the dataset has, but for those of fewer than two pictures. """
    # each split: its rows, and what their captions say
    pools = {}
    captions = {}
    for split in WRITTEN:
        if split in run.meta['splits']:
            data = open_split(run, ctx.folder, split)
            pools[split] = [(data, i) for i in range(len(data))]
            captions[split] = [run.tokenizer.decode(data.ids(i)) for i in range(len(data))]

    # captions without a set, of names that the judge knows
    if run.can('t2l'):
        pools['shared'] = []
        for split, texts in captions.items():
            name, _, _ = train.judge.classes.of(texts)
            for row, text, number in zip(pools[split], texts, name.tolist()):
                if number >= 0 and not parse(text)[0]:
                    pools['shared'].append(row)

    # of pairs those that name their set
    if 'pairs' in pools:
        pools['pairs'] = [row for row, text in zip(pools['pairs'], captions['pairs'])
                          if parse(text)[0]]
    return {name: Part(run, ctx, name, pool) for name, pool in pools.items() if len(pool) > 1}

# -----------------------------------------------------------------------------
# The training pictures

class Training:
    """ The training pictures and their captions, and what is known from them. """

    def __init__(self, run, folder, seed):
        self.run = run
        self.seed = seed
        self.data = open_split(run, folder, 'train')
        self.rng = np.random.Generator(np.random.Philox(seed))
        self.captions = list(train_texts(run, folder))

        # {name: its rows}, and {word: names with it}
        self.sets, names = zip(*map(parse, self.captions))
        self.rows_of = defaultdict(list)
        for row, name in enumerate(names):
            self.rows_of[name].append(row)
        self.names_with = defaultdict(list)
        for name in self.rows_of:
            for word in set(name):
                self.names_with[word].append(name)

    @cached_property
    def judge(self):
        """ A Judge that has learned from them, where one is asked. """
        return train_judge(self.run, self.data, self.captions, self.seed)

    @cached_property
    def look(self):
        """ {set: what it looks like}: the mean features of its pictures, among some. """
        rows = self.fitted_rows
        features = self.judge.features(self.pictures(rows)).squeeze(1)
        rows_of_set = defaultdict(list)
        for i, row in enumerate(rows):
            rows_of_set[self.sets[row]].append(i)
        return {of_set: features[some].mean(0) for of_set, some in rows_of_set.items() if of_set}

    @property
    def fitted_rows(self):
        """ N_FITTED rows at random, or all. """
        return chosen_rows(len(self.data), N_FITTED, self.seed)

    def pictures(self, rows):
        return pixels(self.run, self.data.raw_latents(rows))

    def nearest_name(self, name):
        """ The name of training pictures with the highest F1 of words; of equal ones the first. """
        n_common = Counter(known for word in dict.fromkeys(name) for known in self.names_with[word])
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
        rows = [row for row in self.rows_of[name] if self.sets[row] in self.look]
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

        # cdist is inexact where two are nearly the same
        y = self.data.raw_latents(best_at.numpy())[:, given].flatten(1)
        return 127.5 * (x - y).square().mean(1).sqrt(), best_at


def distance(a, b):
    """ Of pictures (n, S, S, C) uint8: of all pixels the root mean square of the difference in grey
    levels, (n,). """
    difference = a.astype(np.float32) - b
    return np.sqrt((difference ** 2).mean((1, 2, 3)))

# -----------------------------------------------------------------------------
# What the judge says

def judged(judge, pictures, texts):
    """ {metric: values}: does the judge see in n pictures what their captions say? """
    name, of_set, has_word = judge.classes.of(texts)
    seen_name, seen_set, seen_words = judge.of(pictures)
    n_seen = (seen_words & has_word).sum(1)
    found = {}
    if (name >= 0).any():
        found['named'] = 100.0 * (seen_name == name)[name >= 0]
    if has_word.any():
        found['words'] = 100.0 * n_seen.numpy(), has_word.sum(1).numpy()
    if (of_set >= 0).any():
        found['style'] = 100.0 * (seen_set == of_set)[of_set >= 0]
    return found


def described(judge, pictures, others):
    """ {metric: value}: how like other pictures are they, by the judge's features? """
    if len(others) < 2:
        return {}
    found = describe_latents(judge.features(pictures), judge.features(others))
    return {name: found[name] for name in ('frechet', 'precision', 'coverage')}

# -----------------------------------------------------------------------------
# Pictures from captions

def enter_drawings(run, ctx, figures, train, parts):
    """ Whole pictures of each part, and halves. """
    # what a regression draws of all captions at once, those of training pictures among them
    parts = {name: part for name, part in parts.items() if name in DRAWN}
    rows = train.fitted_rows
    tokens = [part.tokens for part in parts.values()]
    tokens.append(train.data.rows(rows)[0])
    *found, of_training = ridge(run, ctx.folder, torch.cat(tokens)).split(list(map(len, tokens)))
    regressed = dict(zip(parts, found))

    made = {}
    if run.can('t2l'):
        for name, part in parts.items():
            made[name] = enter_drawn(run, ctx, figures, train, part, regressed[name])
    if run.can('complete') and run.net.model.config.n_latents > 1:
        part = parts.get('pairs', parts['val'])
        halves = Halves(train.data.raw_latents(rows), of_training)
        enter_halves(run, ctx, figures, train, part, halves, regressed[part.name],
                     alone=made.get(part.name))


def draw(run, ctx, part, rows=slice(None), **knobs):
    return pixels(run, run.embed(part.tokens[rows], **ctx.sampling | knobs))


def enter_drawn(run, ctx, figures, train, part, regressed):
    """ Enters the figures of what is drawn, which it returns. """
    # what the run draws, and what could be drawn without it
    raw = run.embed(part.tokens, **ctx.sampling).clamp(-1, 1)
    made = pixels(run, raw)
    names = [train.nearest_name(name) for name in part.names]
    means = {name: train.pictures(train.rows_of[name]).mean(0) for name in set(names)}
    pictures = {
        '': made,
        'real': part.real,
        'shuffled': made[derangement(len(made), ctx.knobs['seed'])],
        'null': draw(run, ctx, part, guidance=0.0),
        'ridge': pixels(run, regressed),
        'mean': np.stack([means[name] for name in names]).round().astype(np.uint8),
        'copy': train.pictures(np.concatenate([train.some_rows(name, 1) for name in names]))}

    for control, some in pictures.items():
        found = judged(train.judge, some, part.texts)
        found |= described(train.judge, some, part.others)
        if control != 'real':
            found['distance'] = distance(some, part.real)
        enter_as(figures, part.name, control, found)
        ctx.arrays[f'{part.name}_{control or "made"}'] = some
    ctx.arrays[f'{part.name}_texts'] = part.texts

    # are they copies?
    for control, some in (('', raw), ('real', part.raw)):
        enter_as(figures, part.name, control, {'nearest': train.nearest(some)[0]})

    if part.name == 'pairs':
        enter_near_set(figures, train, part, names, made)
    if part.name == 'shared':
        enter_variety(run, ctx, figures, train, part, names, made)
    return made


def enter_near_set(figures, train, part, names, made):
    """ The same names in the sets that are most like those asked for. """
    rows = [train.row_of_near_set(*one) for one in zip(names, part.sets)]
    here = [i for i, row in enumerate(rows) if row is not None]
    if not here:
        return
    texts = [part.texts[i] for i in here]
    found = []
    for some in (made[here], train.pictures([rows[i] for i in here])):
        far = distance(some, part.real[here])
        found.append({'distance': far, **judged(train.judge, some, texts)})
    ours, theirs = found
    enter_as(figures, part.name, 'near_set', theirs)
    both = {'distance', 'named', 'style'} & {*ours}
    enter_as(figures, part.name, 'lead', {metric: ours[metric] - theirs[metric] for metric in both})


def enter_variety(run, ctx, figures, train, part, names, made):
    """ Two pictures of each caption, and two training pictures of its name. """
    again = draw(run, ctx, part, seed=ctx.knobs['seed'] + 1)
    enter_as(figures, part.name, '', {'variety': distance(made, again)})
    two = [rows for rows in (train.some_rows(name, 2) for name in names) if rows is not None]
    if two:
        one, other = (train.pictures(rows) for rows in zip(*two))
        enter_as(figures, part.name, 'real', {'variety': distance(one, other)})

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
        names_of[bytes_of(data.raw_latents([i]))].add(name)
    all_names = [names_of[bytes_of(z)] for z in part.raw]

    written = {'': write()}
    if run.net.is_causal and run.net.fills_masks and not ctx.knobs['sampler']:
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
    ctx.show_written(part.texts, written[''])

# -----------------------------------------------------------------------------
# Both from noise

def enter_both(run, ctx, figures, judge):
    texts, raw = run.sample_both(ctx.n, **ctx.sampling)
    pictures = pixels(run, raw)
    other = derangement(ctx.n, ctx.knobs['seed'])
    pairs = {'': (texts, pictures), 'shuffled': (texts, pictures[other])}
    if run.net.is_causal and not ctx.knobs['sampler']:
        knobs = ctx.sampling_knobs(sampler='autoregressive', block_size=0)
        tokens, raw = text_first(run, ctx.n, knobs)
        pairs['text_first'] = run.decode(tokens), pixels(run, raw)
    for control, (captions, some) in pairs.items():
        enter_as(figures, 'both', control, judged(judge, some, captions))
    ctx.arrays |= dict(both_texts=texts, both_made=pictures)

# -----------------------------------------------------------------------------
# The right half of a picture, from its left half and a caption

class Halves:
    """ Latents (n, N, D) in two halves, and the linear regression of what a caption does not say
    (raw less regressed) of the right one on that of the left one. """

    def __init__(self, raw, regressed):
        side = math.isqrt(raw.shape[1])                                  # patches
        self.given = torch.arange(side).repeat(side) < side // 2         # (N,)
        self.share = side // 2 / side                                    # of the width
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

    def distance(self, a, b):
        """ Of the right halves of pictures. """
        first = round(self.share * a.shape[2])
        return distance(a[:, :, first:], b[:, :, first:])


def enter_halves(run, ctx, figures, train, part, halves, regressed, alone):
    """ alone: pictures of the same captions that were drawn without the half, or None. """
    # the right half: drawn, and without the run
    given = halves.given.expand(len(part.raw), -1)
    _, rows = train.nearest(part.raw, halves.given)
    nearest = train.data.raw_latents(rows.numpy())[:, ~halves.given]
    made = {
        '': run.complete(part.raw, given, part.tokens, **ctx.sampling),
        'ridge': halves.regressed(part.raw, regressed),
        'nearest': halves.joined(part.raw, nearest)}
    pictures = {control: pixels(run, raw) for control, raw in made.items()}
    if alone is not None:
        pictures['alone'] = alone

    far = {control: halves.distance(some, part.real) for control, some in pictures.items()}
    for control, some in pictures.items():
        found = judged(train.judge, some, part.texts)
        enter_as(figures, 'half', control, found | {'distance': far[control]})
    enter_as(figures, 'half', 'real', judged(train.judge, part.real, part.texts))
    if alone is not None:
        enter_as(figures, 'half', 'lead', {'distance': far[''] - far['alone']})
    left_alone = halves.joined(part.raw, 0.0)
    ctx.arrays |= dict(half_texts=part.texts, half_given=pixels(run, left_alone),
                       half_made=pictures[''], half_real=part.real)

# -----------------------------------------------------------------------------
# A sweep draws the captions of one part

def part_of_sweep(run, ctx):
    train, parts = known(run, ctx)
    run.check('t2l')
    return train, parts.get('shared', parts['val'])


def generate(run, ctx, rows=slice(None), **knobs):
    """ Pictures of these captions. """
    _, part = part_of_sweep(run, ctx)
    return draw(run, ctx, part, rows, **knobs)


def judge_drawings(run, ctx, made):
    """ {metric: value} of pictures made from all captions. """
    train, part = part_of_sweep(run, ctx)
    return judged(train.judge, made, part.texts) | described(train.judge, made, part.others)


TASK = Task(
    Needs(BOTH), (*TEXT_KNOBS, *LATENT_KNOBS), measure,
    prepare=prepare, generate=generate, judge=judge_drawings, takes_two=True)
