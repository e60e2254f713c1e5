"""
t2l: latents made from texts, against the encoder's.

Measured
    cosine, centred_cosine      the second less the mean of the training latents
    squared_error               per dimension, standardised
    retrieval                   of the right one among all n
Controls
    shuffled    another text's
    null        every token MASK
    ridge       a regression from the bag of tokens: what a model gets that reads words but no
                order. lead: how far ahead of it, text by text (of squared_error: below 0 is better)
"""
import numpy as np
import torch.nn.functional as F

from corpora.bag import Counts, read_texts, without_ends
from sampling.knobs import LATENT_KNOBS
from sampling.run import BOTH, MAKES, Needs
from tasks.common import Figures, Task, derangement, open_split
from tasks.measures import retrieval

RIVAL = 'ridge'


def measure(run, ctx):
    figures = Figures(ctx.n)

    # with guidance 0 the text is not read
    made = {'': generate(run, ctx),
            'shuffled': generate(run, ctx, derangement(ctx.n, ctx.knobs['seed'])),
            'null': generate(run, ctx, guidance=0.0),
            RIVAL: ridge(run, ctx.folder, ctx.tokens)}
    judged = {control: judge(run, ctx, found) for control, found in made.items()}
    figures.enter_with_lead(judged, RIVAL)
    return figures


def generate(run, ctx, rows=slice(None), **knobs):
    """ Raw latents made from these rows. A sweep calls it too. """
    return run.embed(ctx.tokens[rows], **ctx.sampling | knobs)


def judge(run, ctx, found):
    """ {metric: values (n,)} of raw latents made from all rows, against the encoder's. """
    stats, raw = run.stats, ctx.raw

    # per live dimension: one that is constant in the training data is 0 on both sides
    difference = stats.standardise(found) - stats.standardise(raw)
    error = difference.square().mean(1).sum(1) / stats.live.sum()

    # all embeddings of an encoder point much the same way; less their mean they do not
    centred = (found - stats.mean).flatten(1)
    centred_raw = (raw - stats.mean).flatten(1)
    return {'centred_cosine': F.cosine_similarity(centred, centred_raw).numpy(),
            'squared_error': error.numpy(),
            **retrieval(found, raw, ctx.texts)}


def ridge(run, folder, tokens, penalties=(0.1, 0.3, 1.0, 3.0, 10.0)):
    """ Latents (n, N, D) predicted from bags of tokens by ridge regression on the training split,
    or on an even share of it, by at most 30 steps of conjugate gradients: the linear model of
    corpora/bag.py, without an encoder. The penalty is chosen on a random tenth of it. """
    train = open_split(run, folder, 'train')
    texts, z = read_texts(train)                                         # z (n_train, N D)
    V = run.net.text.mask_id

    # the penalty that is best on a random tenth; with fewer than ten texts the first
    order = np.random.Generator(np.random.Philox(0)).permutation(len(texts))
    held_out, fitted = np.split(order, [len(texts) // 10])
    best_penalty = penalties[0]
    if len(held_out):
        counts = Counts([texts[i] for i in fitted], V)
        tried = Counts([texts[i] for i in held_out], V)
        of_fitted = z[fitted]
        of_tried = z[held_out]
        errors = [(tried.times(counts.solve(of_fitted, penalty)) - of_tried).square().mean()
                  for penalty in penalties]
        del of_fitted
        best_penalty = penalties[int(np.argmin(errors))]

    # with it, fitted on all
    W = Counts(texts, V).solve(z, best_penalty)                          # (V, N D)
    z = Counts(without_ends(tokens, run.tokenizer), V).times(W)
    return run.raw_latents(z.view(len(tokens), *train.latent_shape))


TASK = Task(
    Needs(BOTH, (MAKES,)), LATENT_KNOBS, measure,
    generate=generate, judge=judge, rival=RIVAL, takes_two=True,
    headlines=(('embedding from text, centred', '', 'centred_cosine'),))
