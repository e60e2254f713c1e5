"""
unconditional: as many joint samples of text and latent as there are texts: entropy, distinct
n-grams, repetition, coherence cos(z, encoder(x)), perplexity under a scorer, network calls and
milliseconds a text. (The slow first calls of a process are among them; a sweep leaves them out.)
Controls: data, the texts themselves; shuffled, another sample's latent.
"""
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

from runs.loading import raw_latents
from sample import unconditional
from tasks.common import (FREE_KNOBS, Measured, TaskNeeds, decode, derangement, describe_texts,
                          embed, means, prepare_scorer)

NEEDS = TaskNeeds(('text', 'latent'), (('unconditional',),), masked_text=True,
                  encoder='if there is one', shuffled=True)
SETTINGS = (*FREE_KNOBS, 'solver', 'latent_steps', 'scorer', 'scorer_revision')
prepare = prepare_scorer


def measure(run, ctx):
    # the samples, and what they cost
    n, results = ctx.n, {'n': ctx.n}
    run.row_calls, began = 0, time.perf_counter()
    with tqdm(total=n, desc='unconditional', unit='text', leave=False, disable=None) as bar:
        sampling = ctx.sampling | dict(progress=bar.update, guidance=1.0)
        tokens, z = unconditional(run, n, **sampling)
    results['calls'] = run.row_calls / n
    results['ms'] = 1000 * (time.perf_counter() - began) / n

    # what they are like
    written = decode(run, tokens)
    describe_texts(results, run, '', written, tokens, ctx.prepared)
    describe_texts(results, run, 'data/', ctx.texts, ctx.tokens, ctx.prepared)

    # does the text say what its latent says?
    embedded, raw = embed(run, written), raw_latents(run, z)
    if embedded is not None:
        other = derangement(n, ctx.knobs['seed'])
        for control, rows in (('', torch.arange(n)), ('shuffled/', other)):
            cosine = F.cosine_similarity(embedded.flatten(1), raw[rows].flatten(1))
            means(results, control, {'coherence': cosine.numpy()})
    return Measured(results, [f'-> {text}' for text in written])
