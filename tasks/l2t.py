"""
l2t: texts written from latents, against the texts that the latents came from.

Measured
    bleu, corpus_bleu   mean of sentences, and of all n-grams
    f1, exact           F1 of the sets of words; % that are the source, word for word
    cosine, retrieval   the round trip: what was written is embedded, and compared with the source
                        latent; the source is sought among all n
    n_near              how many of the n texts are nearly a training text (a Jaccard index of the
                        sets of words of .8 or more)
Controls
    shuffled            another text's latent
    null                noise at clock 1
    nearest             the training text whose latent is nearest: what copying the training set
                        would get. lead: how far ahead of it, text by text
    diffusion, left_to_right        where a network writes both ways, one greedy text of each

With rerank the nearest to the latent is chosen of all, also of null. Null is written without beams.
A damage (tasks/damage.py) is done to the latents that are read, also by `nearest`. What is written
is compared with the right ones.
"""
from collections import defaultdict

import numpy as np

from corpora.words import words
from sampling.knobs import TEXT_KNOBS
from sampling.run import BOTH, WRITES, Needs
from tasks.common import Figures, Task, derangement, encode, open_split, train_texts
from tasks.damage import damaged, read_damage
from tasks.measures import compare, nearest_training_latents

RIVAL = 'nearest'


def prepare(run, knobs):
    # a damage that is misspelt is found now, and not after an hour of writing
    read_damage(knobs['damage'])


def measure(run, ctx):
    # where it writes both ways, one greedy text of each as well
    written = write_with_controls(run, ctx)
    if run.net.is_causal and run.net.fills_masks and not ctx.knobs['sampler']:
        greedy = dict(rerank=1, beams=1, temperature=0.0)
        written['diffusion'] = generate(run, ctx, sampler='confidence', **greedy)
        written['left_to_right'] = generate(run, ctx, sampler='autoregressive', block_size=0,
                                             **greedy)

    # against the sources
    figures = Figures(ctx.n)
    figures.enter('', {'n_near': count_near(ctx.texts, train_texts(run, ctx.folder))})
    judged = {control: judge(run, ctx, texts) for control, texts in written.items()}
    figures.enter_with_lead(judged, RIVAL)
    ctx.show_written(ctx.texts, written[''])
    return figures


def write_with_controls(run, ctx):
    """ {control: n texts}: what is written, and what each control has. """
    # `shuffled` reads another's latent, and is compared with this text
    other = derangement(ctx.n, ctx.knobs['seed'])
    asked = damaged(run, ctx.raw, ctx.knobs['damage'], ctx.knobs['seed'])
    return {'': generate(run, ctx),
            'shuffled': generate(run, ctx, other),
            'null': generate(run, ctx, guidance=0.0, beams=1),
            RIVAL: nearest_training_texts(run, ctx.folder, asked)}


def generate(run, ctx, rows=slice(None), **knobs):
    """ Texts written from these rows, with their damage. A sweep calls it too. """
    own = {name: ctx.knobs[name] for name in ('latent_clock', 'rerank', 'beams', 'damage')}
    knobs = ctx.sampling | own | knobs

    # all rows are damaged before some are chosen: so a row has the same damage in any part of them
    raw = damaged(run, ctx.raw, knobs.pop('damage'), ctx.knobs['seed'])
    return run.write(latents=raw[rows], lengths_of=ctx.tokens[rows], **knobs)


def judge(run, ctx, written):
    """ {metric: values (n,)} of the texts that were written from all rows. """
    return compare(ctx.texts, written, ctx.raw, encode(run, written))


def nearest_training_texts(run, folder, raw):
    """ The training text whose latent has the highest cosine with each of raw (n, N, D). """
    train = open_split(run, folder, 'train')
    _, rows = nearest_training_latents(run, folder, raw)
    return [run.tokenizer.decode(train.ids(i)) for i in rows.tolist()]


def count_near(texts, others, threshold=0.8):
    """ How many texts share so much with one of the others: |A and B| / |A or B| of their sets of
    words. The others come one by one: there may be millions. """
    having = defaultdict(list)                             # {word: which of the texts have it}
    sizes = np.zeros(len(texts), np.int64)
    for i, text in enumerate(texts):
        mine = {*words(text)}
        sizes[i] = len(mine)
        for word in mine:
            having[word].append(i)

    # only texts with a word in common can be near, and few have one: so most pairs are never looked
    # at
    is_near = np.zeros(len(texts), bool)
    for other in others:
        theirs = {*words(other)}
        those = [i for word in theirs for i in having.get(word, ())]
        common = np.bincount(those, minlength=len(texts))
        union = sizes + len(theirs) - common
        is_near |= (common > 0) & (common >= threshold * union)
    return int(is_near.sum())


TASK = Task(
    Needs(BOTH, (WRITES,)), (*TEXT_KNOBS, 'latent_clock', 'rerank', 'beams', 'damage'), measure,
    prepare=prepare, generate=generate, judge=judge, rival=RIVAL, embeds=True, takes_two=True,
    headlines=(('text from embedding, BLEU', '', 'bleu'),
               ('  by diffusion, greedy', 'diffusion', 'bleu'),
               ('  from left to right, greedy', 'left_to_right', 'bleu'),
               ('text, F1 of sets of words', '', 'f1')))
