"""
image: captions and pictures. Is what a caption says (the knob classes) to be seen in the picture
made from it? A classifier judges: a small network trained on the real training pictures.

Measured
    image_CLASS         pictures from captions: % whose picture shows what the caption says
    caption_CLASS       captions from pictures: the same, of those that say anything about it
    named_CLASS         % of the captions that say anything about it
    joint_CLASS         both from noise: do they agree?
    nearest_training    how far the nearest training picture is: of all pixels, the root mean square
                        of the difference in grey levels
Controls
    real                the validation pictures: how well does the classifier see?
    shuffled            another's
    null                of nothing
    nearest             the caption of the nearest training picture

images.npz has the first 100 pictures.
"""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from corpora.images import images_of, pixels
from corpora.words import words
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS
from sampling.run import BOTH, Needs
from tasks.common import (Figures, Task, chosen_rows, derangement, open_split, progress_bar,
                          read_classes)

MOST_TRAINING = 20_000         # pictures that the classifier learns from
N_KEPT = 100                   # of each kind, in images.npz


def prepare(run, knobs):
    images_of(run)
    return read_classes(knobs['classes'])


def measure(run, ctx):
    """ Pictures are judged as a .png has them. """
    seed = ctx.knobs['seed']
    other = derangement(ctx.n, seed)

    # real pictures and captions: the classifier learns from them, and what is made is compared with
    # them
    train = open_split(run, ctx.folder, 'train')
    rows = chosen_rows(len(train), MOST_TRAINING, seed)
    known = pixels(run, train.raw_latents(rows))
    known_captions = [run.tokenizer.decode(train.ids(int(i))) for i in rows]

    # what the run makes, in each direction that it has learned
    real = pixels(run, ctx.raw)
    pictures = {**make_pictures(run, ctx, other), 'real': real}
    captions = write_captions(run, ctx, other, real, known, known_captions)
    joint_captions, joint = both_from_noise(run, ctx)

    figures = Figures(ctx.n)
    for name, class_words in ctx.prepared.items():
        # what the captions say, and a judge of pictures, which learns from those that say it
        labels = classes_of(known_captions, class_words)
        right = classes_of(ctx.texts, class_words)                       # (n,), -1: says none
        is_labelled = labels >= 0
        if len(labels[is_labelled].unique()) < 2 or (right >= 0).sum() < 2:
            raise ValueError(f'classes: hardly a caption of {ctx.folder} has one of '
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
            said = classes_of(joint_captions, class_words)
            seen = classify(joint)
            enter_agreement(figures, '', f'joint_{name}', said, seen)
            enter_agreement(figures, 'shuffled', f'joint_{name}', said, seen[other])

    # are they copies of training pictures? New real ones are not, so they show what is normal
    for control in ('', 'real'):
        if control in pictures:
            _, distance = nearest_pictures(pictures[control], known)
            figures.enter(control, {'nearest_training': distance})

    # what is to be looked at, by the names that plot.py knows
    arrays = dict(captions=ctx.texts, real=real, made=pictures.get(''), written=captions.get(''),
                  joint_captions=joint_captions, joint=joint)
    for name, value in arrays.items():
        if value is not None:
            ctx.arrays[name] = np.array(value[:N_KEPT])
    return figures


def make_pictures(run, ctx, other):
    """ {control: pictures (n, S, S, C)} made from the captions. """
    if not run.can('t2l'):
        return {}
    null = ctx.sampling | dict(guidance=0.0)

    # with guidance 0 the caption is not read. Pictures of others are the same ones in another order
    pictures = pixels(run, run.embed(ctx.tokens, **ctx.sampling))
    of_null = pixels(run, run.embed(ctx.tokens, **null))
    return {'': pictures, 'shuffled': pictures[other], 'null': of_null}


def write_captions(run, ctx, other, real, known, known_captions):
    """ {control: n captions} written from the real pictures. """
    if not run.can('l2t'):
        return {}
    null = ctx.sampling | dict(guidance=0.0)

    # the same for captions; the nearest picture's caption needs no network
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
    # with spaces around, so that `red` is not found in `bored`
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
            nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(512, n_classes))
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in progress_bar(range(steps), desc='training the classifier'):
            rows = torch.randint(len(pictures), (batch,))
            logits = net(as_input(pictures[rows.numpy()]))
            F.cross_entropy(logits, labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    net.eval().requires_grad_(False)

    def classify(x):
        # part by part, to save memory
        parts = [net(as_input(x[i:i + 512])).argmax(1)
                 for i in range(0, len(x), 512)]
        return torch.cat(parts)
    return classify


def nearest_pictures(pictures, known):
    """ Which of the known pictures is nearest, (n,), and the root mean square distance of a pixel,
    (n,). """
    x = torch.from_numpy(pictures).flatten(1).float()
    y = torch.from_numpy(known).flatten(1).float()

    # part by part: a table of all distances may be too large
    nearest = [torch.cdist(part, y).min(1) for part in x.split(128)]
    distance, at = (torch.cat(parts) for parts in zip(*nearest))
    return at, distance / x.shape[1] ** 0.5


TASK = Task(
    Needs(BOTH), (*TEXT_KNOBS, *LATENT_KNOBS, 'classes'), measure,
    prepare=prepare, takes_two=True)
