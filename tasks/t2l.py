"""
t2l: latents made from texts, against the encoder's: cosine, centred cosine (less the mean of the
training latents), squared error per dimension (standardised), retrieval among all n and mean
reciprocal rank, mean and spread of every dimension.
Controls: shuffled, another text's; null, every token MASK; mean, the mean latent; ridge, a
regression from the bag of tokens: what a model that reads words but no order gets.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from sampling.directions import MAKES
from sampling.knobs import LATENT_KNOBS
from tasks.common import (Measured, TaskNeeds, derangement, enter, make_latents, means, open_split,
                          retrieval)

NEEDS = TaskNeeds(('text', 'latent'), (MAKES,), shuffled=True)
SETTINGS = (*LATENT_KNOBS, 'seeds')
MOST_IDS = 20_000              # beyond it the normal equations of ridge do not fit


def measure(run, ctx):
    n, seed, seeds = ctx.n, ctx.knobs['seed'], ctx.knobs['seeds']
    results = {'n': n, 'seeds': seeds}

    # several draws of every latent
    draws = [generate(run, ctx, f't2l {i + 1}/{seeds}', seed=seed + i) for i in range(seeds)]
    each = [compare_latents(run, found, ctx.raw) for found in draws]
    means(results, '', {metric: np.mean([e[metric] for e in each], 0) for metric in each[0]})
    results |= dimensions(run, draws[0], ctx.raw)
    if seeds > 1:
        between = F.cosine_similarity(draws[0].flatten(1), draws[1].flatten(1)).numpy()
        means(results, '', {'cosine_between_draws': between})

    # the controls
    mean = run.stats.destandardise(torch.zeros_like(ctx.raw))
    controls = {'shuffled/': generate(run, ctx, 't2l shuffled', derangement(n, seed)),
                'null/': generate(run, ctx, 't2l null', guidance=0.0),
                'mean/': mean}
    if run.text.mask_id < MOST_IDS:
        controls['ridge/'] = ridge(run, ctx.folder, ctx.tokens)
    else:
        print(f'no ridge control: its normal equations over {run.text.mask_id:,} ids do not fit')
    for control, found in controls.items():
        means(results, control, compare_latents(run, found, ctx.raw))
        enter(results, control, dimensions(run, found, ctx.raw))
    return Measured(results)


def generate(run, ctx, name, rows=slice(None), **knobs):
    """ Raw latents made from these rows. A sweep calls it too. """
    return make_latents(run, ctx.tokens[rows], name, **ctx.sampling | knobs)


def judge(run, ctx, found):
    """ {metric: values (n,)} of the latents that were made from all rows. """
    return compare_latents(run, found, ctx.raw)


def compare_latents(run, found, raw):
    """ {metric: per-text values (n,)} of raw latents found against the encoder's. """
    difference = run.stats.standardise(found) - run.stats.standardise(raw)
    error = difference.square().mean(1).sum(1) / run.stats.live.sum()
    centred = (found - run.stats.mean).flatten(1)
    centred_raw = (raw - run.stats.mean).flatten(1)
    return {'centred_cosine': F.cosine_similarity(centred, centred_raw).numpy(),
            'squared_error': error.numpy(),
            **retrieval(found, raw)}


def dimensions(run, found, raw):
    """ Of each live dimension: how far the mean is from the data's, in its standard deviations, and
    the ratio of the deviations. """
    live = run.stats.live > 0
    a = run.stats.standardise(found).flatten(0, 1)[:, live]
    b = run.stats.standardise(raw).flatten(0, 1)[:, live]
    offset = (a.mean(0) - b.mean(0)).abs() / b.std(0)
    return {'mean_offset': offset.mean().item(), 'std_ratio': (a.std(0) / b.std(0)).mean().item()}


def bag_of_tokens(run, tokens):
    """ Counts (n, V) of the tokens before the EOS, and a 1 for the intercept, (n, V + 1). """
    bag = torch.zeros(len(tokens), run.text.mask_id + 1)
    bag.scatter_add_(1, tokens, torch.ones(tokens.shape))
    bag[:, [run.tokenizer.eos, run.tokenizer.pad]] = 0
    bag[:, -1] = 1
    return bag


def ridge(run, folder, tokens, penalties=(1.0, 10.0, 100.0, 1000.0), block=4096):
    """ Latents (n, N, D) predicted from bags of tokens by ridge regression on the training split.
    The penalty is chosen on its last tenth. """
    train = open_split(run, folder, 'train')
    V1 = run.text.mask_id + 1
    n_fit = len(train) - len(train) // 10

    # the normal equations A W = b
    A = torch.zeros(V1, V1)
    b = torch.zeros(V1, int(np.prod(train.latent_shape)))
    firsts = range(0, n_fit, block)
    for i in tqdm(firsts, desc='ridge regression', unit='block', leave=False, disable=None):
        x, z = train.rows(np.arange(i, min(i + block, n_fit)))
        x = bag_of_tokens(run, x)
        A = A + x.T @ x
        b = b + x.T @ z.flatten(1)

    # one decomposition A = Q diag(e) Q' for all penalties
    x, z = train.rows(np.arange(n_fit, len(train)))
    e, Q = torch.linalg.eigh(A.double())
    best, best_W = math.inf, None
    for penalty in penalties:
        W = (Q @ ((Q.T @ b.double()) / (e.clamp(min=0) + penalty)[:, None])).float()
        error = 0
        for part, target in zip(x.split(block), z.split(block)):
            error += (bag_of_tokens(run, part) @ W - target.flatten(1)).square().sum().item()
        if error < best:
            best, best_W = error, W
    z = (bag_of_tokens(run, tokens) @ best_W).view(len(tokens), *train.latent_shape)
    return run.stats.destandardise(z)
