"""
unconditional: text and latent, both from noise, as many pairs as there are texts.

Measured
    entropy, repetition     of the texts
    coherence               cos(z, encoder(x)): do text and latent fit?
    nats                    per token of the text by itself
    perplexity              of the text under a scorer (--scorer=)
    text_frechet            how far the texts' embeddings are from real ones (describe_latents)
    of the latents          what describe_latents says; copies, the % whose cosine with a training
                            latent is above .95
    calls, ms               network calls and milliseconds a text, the slow first calls among them
Controls
    data            the texts, and as many training latents
    shuffled        another sample's latent
    text_first      where the network also writes so: a text from left to right, of no latent, and
                    then its latent in one step
    latent_first    a latent of nothing, and then its text
    gaussian        a latent of the normal law with the mean and covariance of training latents, and
                    then its text
"""
import math

import numpy as np
import torch
import torch.nn.functional as F

from sampling.latents import write_both
from sampling.run import BOTH, Needs
from sampling.texts import blank, write
from tasks.common import FREE_SETTINGS, Task, derangement, encode, open_split
from tasks.measures import describe_samples, nearest_training_latents
from tasks.scorer import prepare_scorer

RIVAL = 'text_first'
MOST_TRAINING = 20_000         # latents whose mean and covariance the Gaussian has


def measure(run, ctx):
    def sample(knobs):
        return write_both(run, ctx.n, knobs)
    figures, written, (_, z) = describe_samples(run, ctx, sample)
    raw = run.raw_latents(z)

    # the latents by themselves
    latents = enter_latents(run, ctx, figures, raw)
    if not run.meta['encoder']:
        return figures

    # pairs of texts and latents: our own, and those of the controls. The rival writes a text from
    # left to right, which is what it does best, and only then makes a latent of it
    other = derangement(ctx.n, ctx.knobs['seed'])
    pairs = {'': (written, raw), 'shuffled': (written, raw[other])}
    if run.net.is_causal and not ctx.knobs['sampler']:
        knobs = ctx.sampling_knobs(sampler='autoregressive', block_size=0, guidance=1.0,
                                   latent_steps=1)
        tokens, z = text_first(run, ctx.n, knobs)
        pairs[RIVAL] = run.decode(tokens), z
    for control in ('gaussian', 'data'):
        texts = run.write(latents=latents[control], sample_batch=ctx.knobs['sample_batch'])
        pairs[control] = texts, latents[control]

    # does the text say what its latent says? The encoder judges
    for control, (texts, some) in pairs.items():
        embedded = encode(run, texts)
        cosine = F.cosine_similarity(embedded.flatten(1), some.flatten(1))
        figures.enter(control, {'coherence': cosine})

        # what the text is like by itself: a pair may fit, and say nothing
        if run.net.is_causal and control not in ('shuffled', 'data'):
            distance = describe_latents(embedded, ctx.raw)['frechet']
            figures.enter(control, {'text_frechet': distance, 'nats': run.nats(texts)})
    return figures


def text_first(run, n, knobs):
    """ Tokens (n, L) of no latent, and then raw latents of them. """
    tokens, known_mask = blank(run.net, n, knobs)
    tokens = write(run.net, tokens, known_mask, None, knobs)
    return tokens, run.embed(tokens, **vars(knobs))


def enter_latents(run, ctx, figures, raw):
    """ Enters what these raw latents are like, and those of the controls, which it returns. """
    data = open_split(run, ctx.folder, 'train')
    rng = np.random.Generator(np.random.Philox(ctx.knobs['seed']))
    train = data.raw_latents(rng.permutation(len(data))[:MOST_TRAINING])

    # the best that a Gaussian can do: with e ~ N(0, 1) the covariance of e R is R'R, that of the
    # training latents
    mean, R = centred(train)
    e = torch.from_numpy(rng.standard_normal((ctx.n, len(R))))
    gaussian = (mean + e @ R).float().view_as(ctx.raw)
    controls = {
        'latent_first': run.sample_latents(ctx.n, **ctx.sampling),
        'gaussian': run.raw_latents(run.stats.standardise(gaussian)),
        'data': ctx.raw}
    for control, some in {'': raw, **controls}.items():
        # of the data, training latents are compared with the texts' own
        described = train[:ctx.n] if control == 'data' else some
        figures.enter(control, describe_latents(described, ctx.raw))
        cosine, _ = nearest_training_latents(run, ctx.folder, some)
        is_copy = cosine > 0.95
        figures.enter(control, {'copies': 100.0 * is_copy})
    return controls


def centred(latents):
    """ Latents (n, N, D) as their mean (N D,) and R (n, N D): their covariance is R'R. """
    x = latents.flatten(1).double()
    return x.mean(0), (x - x.mean(0)) / math.sqrt(len(x) - 1)


def describe_latents(latents, real, k=5):
    """
    {metric: value} of latents (n, N, D) and real ones, with means m, s, covariances R'R, S'S:
        frechet         1000 (|m - s|^2 + tr(R'R + S'S) - 2 |R S'|_nuclear)      arXiv:1706.08500
        participation   tr(R'R)^2 / tr((R'R)^2): in how many directions they vary
        precision       % that are nearer to a real one than its k-th real neighbour is
        coverage        % of the real ones that have such a latent               arXiv:2002.09797
    """
    m, R = centred(latents)
    s, S = centred(real)
    variance = R.square().sum()
    distance = ((m - s).square().sum()
                + variance
                + S.square().sum()
                - 2 * torch.linalg.matrix_norm(R @ S.T, 'nuc'))

    # nearest neighbours; the first of a real one is itself, so it is one more than k
    real = real.flatten(1)
    between = torch.cdist(real, real)
    radius = between.kthvalue(min(k + 1, len(real)), 1).values
    is_near = torch.cdist(latents.flatten(1), real) < radius             # (n, n of real)
    return {
        'frechet': 1000 * distance,
        'participation': variance ** 2 / (R @ R.T).square().sum(),
        'precision': 100.0 * is_near.any(1),
        'coverage': 100.0 * is_near.any(0)}


TASK = Task(
    Needs(BOTH, (('unconditional',),), masked_text=True),
    (*FREE_SETTINGS, 'solver', 'latent_steps'), measure,
    prepare=prepare_scorer, rival=RIVAL, embeds=True, takes_two=True,
    headlines=(('both from noise, cosine', '', 'coherence'),
               ('  its text, Frechet distance', '', 'text_frechet'),
               ('  its text, nats per token', '', 'nats')))
