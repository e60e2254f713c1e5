"""
infill: a share of each text's tokens (not the EOS) is masked and written again, from the rest and
the right latent: token accuracy, and what l2t measures.

Controls
    shuffled        another text's latent
    null            none
    left_to_right   where the network also writes so, a beam search. What stands behind a gap is not
                    seen when the gap is filled, but then it decides among 8 beams. lead: how far
                    ahead of it, text by text

Letters: n texts, L text tokens.
"""
import torch

from diffusion import is_end, rank_in_row
from noise import uniforms
from sampling.beams import fill_by_beams
from sampling.knobs import TEXT_KNOBS
from sampling.run import FILLS, Needs
from sampling.texts import write
from tasks.common import Figures, Task, encode, with_controls
from tasks.measures import compare

RIVAL = 'left_to_right'


def measure(run, ctx):
    seed = ctx.knobs['seed']
    masked = gaps_of(run, ctx.tokens, ctx.knobs['infill_share'], seed)
    tokens = torch.where(masked, run.net.text.mask_id, ctx.tokens)

    # {control: (latents, their clock)}
    conditions = {'null': (None, 1.0)}
    if ctx.raw is not None and 'latent' in run.net.streams:
        conditions = with_controls(run.stats.standardise(ctx.raw), None, seed)

    # what is written, and what the beams find
    knobs = ctx.sampling_knobs()
    filled = {control: write(run.net, tokens, ~masked, z, knobs, inner=masked)
              for control, (z, _) in conditions.items()}
    if run.net.is_causal and '' in conditions and not ctx.knobs['sampler']:
        z, _ = conditions['']
        filled[RIVAL] = fill_by_beams(run.net, tokens, masked, z, batch=knobs.sample_batch)

    # against the texts
    judged = {}
    for control, ids in filled.items():
        n_right = ((ids == ctx.tokens) & masked).sum(1)
        right = n_right / masked.sum(1).clamp(min=1)
        judged[control] = {'token_accuracy': 100 * right}
        if ctx.raw is not None:
            written = run.decode(ids)
            judged[control] |= compare(ctx.texts, written, ctx.raw, encode(run, written))

    figures = Figures(ctx.n)
    figures.enter_with_lead(judged, RIVAL)
    return figures


def gaps_of(run, tokens, share, seed):
    """ Where texts tokens (n, L) are masked, (n, L): a share of each text, drawn with the seed. """
    n, L = tokens.shape
    length = (~is_end(tokens, run.tokenizer)).sum(1, keepdim=True)       # (n, 1)
    u = uniforms(seed, 0, 'evaluation', 0, n, 1 + L)[:, 1:]
    # the positions with the smallest numbers
    u = u.masked_fill(torch.arange(L) >= length, torch.inf)
    return rank_in_row(u) < (share * length).ceil()


TASK = Task(
    Needs(('text',), (FILLS,)), (*TEXT_KNOBS, 'infill_share'), measure,
    rival=RIVAL, embeds=True, takes_two=True,
    headlines=(('gaps filled, % right', '', 'token_accuracy'),))
