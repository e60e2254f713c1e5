"""
unconditional: as many joint samples of text and latent as there are texts: entropy, distinct
n-grams, repetition, coherence cos(z, encoder(x)), perplexity under a scorer, network calls and
milliseconds a text. (Of fewer than 192 texts the slow first calls of a process are among them; a
sweep leaves them out.)
Controls: data, the texts themselves; shuffled, another sample's latent.
"""
import torch
import torch.nn.functional as F

from sampling.latents import write_both
from tasks.common import FREE_SETTINGS, TaskNeeds, derangement, describe_samples, embed
from tasks.scorer import prepare_scorer as prepare

NEEDS = TaskNeeds(('text', 'latent'), (('unconditional',),), masked_text=True, encoder=True,
                  shuffled=True)
SETTINGS = (*FREE_SETTINGS, 'solver', 'latent_steps')
HEADLINES = (('both from noise, cosine', '', 'coherence'),)


def measure(run, ctx):
    def draw(knobs):
        return write_both(run, ctx.n, knobs)
    figures, written, (_, z) = describe_samples(run, ctx, draw)

    # does the text say what its latent says?
    embedded, raw = embed(run, written), run.raw_latents(z)
    if embedded is not None:
        other = derangement(ctx.n, ctx.knobs['seed'])
        for control, rows in (('', torch.arange(ctx.n)), ('shuffled', other)):
            cosine = F.cosine_similarity(embedded.flatten(1), raw[rows].flatten(1))
            figures.enter(control, {'coherence': cosine})
    return figures
