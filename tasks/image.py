"""
image: of captions and pictures: is what a caption says (classes) to be seen in the picture made
from it? A classifier judges: a small network trained on the real training pictures. The real
validation pictures (real) show how well it sees.
    image_     pictures from captions
    caption_   captions from pictures, of those that say anything about it (named_)
    joint_     both from noise: do they agree?
    nearest_training   how far from the nearest training picture
nearest_training is a root mean square of grey levels. images.npz has the first 100 pictures.
Controls: shuffled, another's; null, of nothing; nearest, the caption of the nearest known picture.
"""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from corpora.images import images_of, pixels
from corpora.words import words
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS
from sampling.run import BOTH, Needs
from tasks.common import Figures, Task, derangement, open_split, progress_bar, read_classes

MOST_TRAINING = 20_000         # pictures that the classifier learns from
N_KEPT = 100                   # of each kind, in images.npz


def prepare(run, knobs):
    images_of(run)
    return read_classes(knobs['classes'])


def measure(run, ctx):
    """ Pictures are judged as a .png has them. """
    seed = ctx.knobs['seed']
    other = derangement(ctx.n, seed)

    # real pictures and captions, to learn from
    train = open_split(run, ctx.folder, 'train')
    rows = np.random.Generator(np.random.Philox(seed)).permutation(len(train))[:MOST_TRAINING]
    known = pixels(run, train.raw_latents(rows))
    known_captions = [run.tokenizer.decode(train.ids(int(i))) for i in rows]

    # what the run draws and writes
    real = pixels(run, ctx.raw)
    pictures = {**draw(run, ctx, other), 'real': real}
    captions = write_captions(run, ctx, other, real, known, known_captions)
    joint_captions, joint = both_from_noise(run, ctx)

    figures = Figures(ctx.n)
    for name, class_words in ctx.prepared.items():
        # what the captions say, and a judge of pictures
        labels = classes_of(known_captions, class_words)
        right = classes_of(ctx.texts, class_words)                       # (n,), -1: says none
        is_labelled = labels >= 0
        if len(labels[is_labelled].unique()) < 2 or (right >= 0).sum() < 2:
            raise ValueError(f'classes: next to no caption of {ctx.folder} has one of '
                             f'{", ".join(class_words)}')
        classify = train_classifier(known[is_labelled.numpy()], labels[is_labelled],
                                    len(class_words), seed)

        # pictures, captions, and pairs of them
        for control, some in pictures.items():
            enter_agreement(figures, control, f'image_{name}', classify(some), right)
        for control, texts in captions.items():
            said = classes_of(texts, class_words)
            figures.enter(control, {f'named_{name}': 100.0 * (said >= 0)})
            enter_agreement(figures, control, f'caption_{name}', said, right)
        if joint is not None:
            said, seen = classes_of(joint_captions, class_words), classify(joint)
            enter_agreement(figures, '', f'joint_{name}', said, seen)
            enter_agreement(figures, 'shuffled', f'joint_{name}', said, seen[other])
    for control in ('', 'real'):
        if control in pictures:
            distance = nearest_pictures(pictures[control], known)[1]
            figures.enter(control, {'nearest_training': distance})

    # what is to be looked at, by the names that plot.py knows
    arrays = dict(captions=ctx.texts, real=real, made=pictures.get(''), written=captions.get(''),
                  joint_captions=joint_captions, joint=joint)
    for name, value in arrays.items():
        if value is not None:
            ctx.arrays[name] = np.array(value[:N_KEPT])
    return figures


def draw(run, ctx, other):
    """ {control: pictures (n, S, S, C)} made from the captions. """
    if not run.can('t2l'):
        return {}
    null = ctx.sampling | dict(guidance=0.0)
    pictures = pixels(run, run.embed(ctx.tokens, **ctx.sampling))
    of_null = pixels(run, run.embed(ctx.tokens, **null))
    return {'': pictures, 'shuffled': pictures[other], 'null': of_null}


def write_captions(run, ctx, other, real, known, known_captions):
    """ {control: n captions} written from the real pictures. """
    if not run.can('l2t'):
        return {}
    null = ctx.sampling | dict(guidance=0.0)
    written = run.write(latents=ctx.raw, lengths_of=ctx.tokens, **ctx.sampling)
    nearest, _ = nearest_pictures(real, known)
    return {'': written,
            'shuffled': [written[i] for i in other],
            'null': run.write(latents=ctx.raw, lengths_of=ctx.tokens, **null),
            'nearest': [known_captions[i] for i in nearest.tolist()]}


def both_from_noise(run, ctx):
    """ As many captions, and their pictures; None, None where the run makes no pairs. """
    if not run.can('unconditional'):
        return None, None
    texts, raw = run.sample_both(ctx.n, **ctx.sampling)
    return texts, pixels(run, raw)


def enter_agreement(figures, control, metric, a, b):
    """ How often the classes a, b (n,) of two things are the same, %, where both have one. """
    both = (a >= 0) & (b >= 0)
    if both.sum() > 1:
        figures.enter(control, {metric: 100.0 * (a == b)[both]})


def classes_of(texts, class_words):
    """ Which of these words each text has, (n,) int64; -1: none, or several. """
    named = [f' {" ".join(words(name))} ' for name in class_words]
    found = []
    for text in texts:
        said = f' {" ".join(words(text))} '
        which = [i for i, name in enumerate(named) if name in said]
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
        for _ in progress_bar(range(steps), desc='training the classifier'):
            rows = torch.randint(len(pictures), (batch,))
            F.cross_entropy(net(as_input(pictures[rows.numpy()])), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    net.eval().requires_grad_(False)

    def classify(x):
        parts = [net(as_input(x[i:i + 512])).argmax(1)
                 for i in range(0, len(x), 512)]
        return torch.cat(parts)
    return classify


def nearest_pictures(pictures, known):
    """ Which of the known pictures is nearest, (n,), and the root mean square distance of a pixel,
    (n,). """
    x = torch.from_numpy(pictures).flatten(1).float()
    y = torch.from_numpy(known).flatten(1).float()
    nearest = [torch.cdist(part, y).min(1) for part in x.split(128)]
    distance, at = (torch.cat(parts) for parts in zip(*nearest))
    return at, distance / x.shape[1] ** 0.5


TASK = Task(
    Needs(BOTH), (*TEXT_KNOBS, *LATENT_KNOBS, 'classes'), measure,
    prepare=prepare, takes_two=True)
