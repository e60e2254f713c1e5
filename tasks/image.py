"""
image: of captions and pictures: is what a caption says (classes) to be seen in the picture made
from it? A classifier judges: a small network trained on the real training pictures. The real
validation pictures (real) show how well it sees.
    image_     pictures from captions
    caption_   captions from pictures, of those that say anything about it (named_)
    joint_     both from noise: do they agree?
    spread     how far pictures are from the mean of their class
    nearest_training   how far from the nearest training picture
The last two are in grey levels of 255 a pixel, root mean square. out_dir/images.npz has the first
100 (plot.py --what=images). Controls: shuffled, another's; null, of no caption or picture; nearest,
the caption of the nearest training picture.
"""
import re

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from sampling.png import pixels
from sampling.loading import raw_latents, trained_for
from sampling import directions
from sampling.directions import MAKES, WRITES, unconditional
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS
from tasks.common import (Measured, TaskNeeds, decode, derangement, make_latents, means, open_split,
                          write_from)

NEEDS = TaskNeeds(('text', 'latent'), shuffled=True, images=True)
SETTINGS = (*dict.fromkeys(TEXT_KNOBS + LATENT_KNOBS), 'classes')
MOST_TRAINING = 20_000         # pictures that the classifier learns from
N_KEPT = 100                   # of each kind, in images.npz


def prepare(run, knobs):
    return read_classes(knobs['classes'])


def measure(run, ctx):
    """ Pictures are judged as a .png has them. """
    n, seed = ctx.n, ctx.knobs['seed']
    other = derangement(n, seed)

    # real pictures and captions, to learn from
    train = open_split(run, ctx.folder, 'train')
    rows = np.random.Generator(np.random.Philox(seed)).permutation(len(train))[:MOST_TRAINING]
    known = pixels(run, train.raw_latents(rows))
    captions = [train.text(int(i)) for i in rows]

    # draw and write, then judge
    made = draw_and_write(run, ctx, other, known, captions)
    results = {'n': n}
    for name, class_words in ctx.prepared.items():
        judge_class(run, ctx, results, made, other, known, captions, name, class_words)
    for control in ('', 'real/'):
        if control in made.pictures:
            _, distance = nearest_pictures(made.pictures[control], known)
            means(results, control, {'nearest_training': distance})
    kept = {name: np.array(value[:N_KEPT]) for name, value in made.arrays().items()}
    return Measured(results, arrays=kept)


class Made:
    """ What the run draws and writes, with its controls: pictures {control: (n, S, S, C)}, captions
    {control: n texts}, and joint samples, if it makes them. """

    def __init__(self, texts, real):
        self.texts = texts
        self.pictures = {'real/': real}
        self.captions = {}
        self.joint = self.joint_captions = None

    def arrays(self):
        """ What is to be looked at, by the names that plot.py knows. """
        found = dict(captions=self.texts, real=self.pictures['real/'])
        if '' in self.pictures:
            found['made'] = self.pictures['']
        if '' in self.captions:
            found['written'] = self.captions['']
        if self.joint is not None:
            found |= dict(joint_captions=self.joint_captions, joint=self.joint)
        return found


def draw_and_write(run, ctx, other, known, captions):
    learned = trained_for(run)
    sampling, of_null = ctx.sampling, ctx.sampling | dict(guidance=0.0)
    tokens, raw = ctx.tokens, ctx.raw
    made = Made(ctx.texts, pixels(run, raw))

    # captions to pictures
    if learned & set(MAKES):
        pictures = pixels(run, make_latents(run, tokens, 'image', **sampling))
        made.pictures[''] = pictures
        made.pictures['shuffled/'] = pictures[other]
        made.pictures['null/'] = pixels(run, make_latents(run, tokens, 'image null', **of_null))

    # pictures to captions
    if learned & set(WRITES):
        written = write_from(run, raw, 'caption', tokens, **sampling)
        nearest, _ = nearest_pictures(made.pictures['real/'], known)
        made.captions[''] = written
        made.captions['shuffled/'] = [written[i] for i in other]
        made.captions['null/'] = write_from(run, raw, 'caption null', tokens, **of_null)
        made.captions['nearest/'] = [captions[i] for i in nearest.tolist()]

    # both from noise
    if not directions.NEEDS['unconditional'].missing(run):
        ids, z = unconditional(run, ctx.n, **sampling | dict(guidance=1.0))
        made.joint_captions = decode(run, ids)
        made.joint = pixels(run, raw_latents(run, z))
    return made


def judge_class(run, ctx, results, made, other, known, captions, name, class_words):
    """ Enters the figures of one group of classes. """
    # what the captions say
    right = classes_of(ctx.texts, class_words)                           # (n,), -1: says none
    has_class = right >= 0
    labels = classes_of(captions, class_words)
    is_labelled = labels >= 0
    if len(labels[is_labelled].unique()) < 2 or has_class.sum() < 2:
        raise ValueError(f'classes: next to no caption of {ctx.folder} has one of '
                         f'{", ".join(class_words)}')
    classify = train_classifier(known[is_labelled.numpy()], labels[is_labelled], len(class_words),
                                ctx.knobs['seed'])

    # pictures, and captions
    for control, pictures in made.pictures.items():
        is_right = classify(pictures) == right
        means(results, control, {f'image_{name}': 100.0 * is_right[has_class]})
    for control, texts in made.captions.items():
        said = classes_of(texts, class_words)
        means(results, control, {f'named_{name}': 100.0 * (said >= 0)})
        both = (said >= 0) & has_class
        if both.sum() > 1:
            means(results, control, {f'caption_{name}': 100.0 * (said == right)[both]})

    # both from noise
    if made.joint is not None:
        said = classes_of(made.joint_captions, class_words)
        seen = classify(made.joint)
        for control, x in (('', seen), ('shuffled/', seen[other])):
            if (said >= 0).sum() > 1:
                means(results, control, {f'joint_{name}': 100.0 * (x == said)[said >= 0]})
    for control in ('', 'real/'):
        if control in made.pictures:
            pictures = made.pictures[control][has_class.numpy()]
            results[f'{control}spread_{name}'] = spread(pictures, right[has_class])


def read_classes(spec):
    """ {name: its words} of 'animal: cat, dog; colour: red, blue'. """
    groups = {}
    for part in spec.split(';'):
        name, _, listed = part.partition(':')
        name = name.strip()
        groups[name] = [word.strip() for word in listed.split(',') if word.strip()]
        if not name or len(groups[name]) < 2:
            raise ValueError(f'classes={spec!r}: tasks=image reads --classes="animal: cat, dog; '
                             'colour: red, blue", two words or more each')
    return groups


def classes_of(texts, class_words):
    """ Which of these words each text has, (n,) int64; -1: none, or several. """
    patterns = [re.compile(rf'\b{re.escape(word)}\b') for word in class_words]
    found = []
    for text in texts:
        which = [i for i, pattern in enumerate(patterns) if pattern.search(text)]
        found.append(which[0] if len(which) == 1 else -1)
    return torch.tensor(found)


def as_input(pictures):
    """ (n, S, S, C) uint8 -> (n, C, S, S) in [-1, 1]. """
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_classifier(pictures, labels, n_classes, seed, steps=600, batch=64):
    """ classify(pictures (n, S, S, C) uint8) -> classes (n,): a small convolutional network,
    trained on these pictures and labels. """
    # the caller's generator stays as it is
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Conv2d(pictures.shape[3], 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, n_classes))
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in tqdm(range(steps), desc='training the classifier', leave=False, disable=None):
            rows = torch.randint(len(pictures), (batch,))
            F.cross_entropy(net(as_input(pictures[rows.numpy()])), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    net.eval().requires_grad_(False)

    def classify(x):
        parts = [net(as_input(x[i:i + 512])).argmax(1) for i in range(0, len(x), 512)]
        return torch.cat(parts)
    return classify


def spread(pictures, labels):
    """ Root mean square distance of a pixel from the mean of its class. """
    x = torch.from_numpy(pictures).flatten(1).double()
    square = 0
    for c in labels.unique():
        of_class = x[labels == c]
        square = square + (of_class - of_class.mean(0)).square().sum()
    return (square / x.numel()).sqrt().item()


def nearest_pictures(pictures, known):
    """ Which of the known pictures is nearest, (n,), and the root mean square distance of a pixel,
    (n,). """
    x = torch.from_numpy(pictures).flatten(1).float()
    y = torch.from_numpy(known).flatten(1).float()
    nearest = [torch.cdist(part, y).min(1) for part in x.split(128)]
    distance = torch.cat([found.values for found in nearest])
    at = torch.cat([found.indices for found in nearest])
    return at, distance / x.shape[1] ** 0.5
