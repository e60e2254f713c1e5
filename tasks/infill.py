"""
infill: a share of each text's tokens (not the EOS) is masked and written again, from the rest and
the right latent: token accuracy, and as l2t.
Controls: shuffled, another text's latent; null, none; where the network also writes so,
left_to_right, which does not see what comes behind a gap, and lead, how far ahead of that, text by
text.
"""
import torch

from data import is_end
from diffusion import rank_in_row, uniforms
from sampling.directions import FILLS
from sampling.knobs import TEXT_KNOBS
from sampling.writing import write
from tasks.common import (TaskNeeds, compare, decode, embed, enter_with_lead,
                          with_controls)

NEEDS = TaskNeeds(('text',), (FILLS,), encoder=True, shuffled=True)
SETTINGS = (*TEXT_KNOBS, 'infill_share')
RIVAL = 'left_to_right'
HEADLINES = (('gaps filled, % right', '', 'token_accuracy'),)


def measure(run, ctx):
    n, seed, share = ctx.n, ctx.knobs['seed'], ctx.knobs['infill_share']
    L = ctx.tokens.shape[1]

    # mask the positions with the smallest numbers of each text
    length = (~is_end(ctx.tokens, run.tokenizer)).sum(1, keepdim=True)   # (n, 1)
    u = uniforms(seed, 0, 'evaluation', 0, n, 1 + L)[:, 1:]
    u = u.masked_fill(torch.arange(L) >= length, torch.inf)
    masked = rank_in_row(u) < (share * length).ceil()                    # (n, L)
    tokens = torch.where(masked, run.text.mask_id, ctx.tokens)

    # {control: (latents, their clock)}
    conditions = {'null/': (None, 1.0)}
    if ctx.raw is not None and 'latent' in run.streams:
        conditions = with_controls(run.stats.standardise(ctx.raw), None, seed)

    # against the texts
    sampling = {control: ctx.sampling for control in conditions}
    if run.next_token and '' in conditions and not ctx.knobs['sampler']:
        conditions['left_to_right/'] = conditions['']
        sampling['left_to_right/'] = ctx.sampling | dict(sampler='autoregressive')
    judged = {}
    for control, (z, _) in conditions.items():
        ids = write(run, tokens, ~masked, z, inner=masked, **sampling[control])
        n_right = ((ids == ctx.tokens) & masked).sum(1)
        right = n_right / masked.sum(1).clamp(min=1)
        judged[control] = {'token_accuracy': 100 * right}
        if ctx.raw is not None:
            written = decode(run, ids)
            judged[control] |= compare(ctx.texts, written, ctx.raw, embed(run, written))

    results = {'n': n, 'share': share}
    enter_with_lead(results, judged, 'left_to_right/')
    return results
