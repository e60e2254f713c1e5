"""
infill: a share of each text's tokens (not the EOS) is masked and written again, from the rest and
the right latent: token accuracy, and as l2t.
Controls: shuffled, another text's latent; null, none; where the network also writes so,
left_to_right, the likeliest of 8 texts whose gaps are filled token by token (what stands behind a
gap is not seen when it is filled, but counts in log p), and lead, how far ahead of it, text by
text.
"""
import torch

from data import is_end
from diffusion import rank_in_row, uniforms
from sampling.directions import FILLS
from sampling.knobs import TEXT_KNOBS
from sampling.likelihood import nats_per_token
from sampling.writing import write
from tasks.common import (TaskNeeds, compare, decode, embed, enter_with_lead,
                          with_controls)

NEEDS = TaskNeeds(('text',), (FILLS,), encoder=True, shuffled=True)
SETTINGS = (*TEXT_KNOBS, 'infill_share')
RIVAL = 'left_to_right'
HEADLINES = (('gaps filled, % right', '', 'token_accuracy'),)


def measure(run, ctx):
    n, seed, share = ctx.n, ctx.knobs['seed'], ctx.knobs['infill_share']
    masked = gaps_of(run, ctx.tokens, share, seed)
    tokens = torch.where(masked, run.text.mask_id, ctx.tokens)

    # {control: (latents, their clock)}
    conditions = {'null/': (None, 1.0)}
    if ctx.raw is not None and 'latent' in run.streams:
        conditions = with_controls(run.stats.standardise(ctx.raw), None, seed)

    # against the texts
    filled = {control: write(run, tokens, ~masked, z, inner=masked, **ctx.sampling)
              for control, (z, _) in conditions.items()}
    if run.next_token and '' in conditions and not ctx.knobs['sampler']:
        filled[f'{RIVAL}/'] = left_to_right(run, ctx, tokens, masked, conditions[''][0])
    judged = {}
    for control, ids in filled.items():
        n_right = ((ids == ctx.tokens) & masked).sum(1)
        right = n_right / masked.sum(1).clamp(min=1)
        judged[control] = {'token_accuracy': 100 * right}
        if ctx.raw is not None:
            written = decode(run, ids)
            judged[control] |= compare(ctx.texts, written, ctx.raw, embed(run, written))

    results = {'n': n, 'share': share}
    enter_with_lead(results, judged, f'{RIVAL}/')
    return results


def gaps_of(run, tokens, share, seed):
    """ Where texts tokens (n, L) are masked, (n, L): a share of each text, drawn with the seed. """
    n, L = tokens.shape
    length = (~is_end(tokens, run.tokenizer)).sum(1, keepdim=True)       # (n, 1)
    u = uniforms(seed, 0, 'evaluation', 0, n, 1 + L)[:, 1:]
    # the positions with the smallest numbers
    u = u.masked_fill(torch.arange(L) >= length, torch.inf)
    return rank_in_row(u) < (share * length).ceil()


def left_to_right(run, ctx, tokens, masked, z, k=8):
    """ Tokens (n, L): of k drafts that are written token by token the one with the largest log p,
    which is exact. """
    n = len(tokens)
    sampling = ctx.sampling | dict(sampler='autoregressive', block_size=0)
    tokens, masked, z = (x.repeat_interleave(k, 0) for x in (tokens, masked, z))
    drafts = write(run, tokens, ~masked, z, inner=masked, several=True, **sampling)
    nats = nats_per_token(run, drafts, z, ctx.knobs['seed'], ctx.knobs['sample_batch'])
    best = k * torch.arange(n) + nats.view(n, k).argmin(1)
    return drafts[best]
