"""
unconditional: as many joint samples of text and latent as there are texts: entropy, repetition,
coherence cos(z, encoder(x)), perplexity under a scorer, network calls and milliseconds a text (with
the slow first calls of a process).
Controls: data, the texts themselves; shuffled, another sample's latent; text_first, where the
network also writes so: a text from left to right, of no latent, then its latent in one step.
"""
import torch.nn.functional as F

from sampling.latents import write_both
from sampling.writing import blank, write
from tasks.common import FREE_SETTINGS, TaskNeeds, derangement, encode
from tasks.measures import describe_samples
from tasks.scorer import prepare_scorer as prepare

NEEDS = TaskNeeds(('text', 'latent'), (('unconditional',),), masked_text=True, encoder=True,
                  shuffled=True)
SETTINGS = (*FREE_SETTINGS, 'solver', 'latent_steps')
RIVAL = 'text_first'
HEADLINES = (('both from noise, cosine', '', 'coherence'),)


def measure(run, ctx):
    def draw(knobs):
        return write_both(run, ctx.n, knobs)
    figures, written, (_, z) = describe_samples(run, ctx, draw)
    if not run.meta['encoder']:
        return figures

    # does the text say what its latent says?
    raw = run.raw_latents(z)
    other = derangement(ctx.n, ctx.knobs['seed'])
    pairs = {'': (written, raw), 'shuffled': (written, raw[other])}
    if run.next_token and not ctx.knobs['sampler']:
        knobs = ctx.sampling_knobs(sampler='autoregressive', block_size=0, guidance=1.0,
                                   latent_steps=1)
        tokens = write(run, *blank(run, ctx.n, knobs), None, knobs)
        pairs[RIVAL] = run.decode(tokens), run.embed(tokens, **vars(knobs))
    for control, (texts, latents) in pairs.items():
        cosine = F.cosine_similarity(encode(run, texts).flatten(1), latents.flatten(1))
        figures.enter(control, {'coherence': cosine})
    return figures
