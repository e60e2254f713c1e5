"""
infill: a share of each text's tokens (not the EOS) is masked and written again, from the rest and
the right latent: token accuracy, and as l2t.
Controls: shuffled, another text's latent; null, none.
"""
import torch

from data import is_end
from diffusion import rank_in_row, uniforms
from sampling.directions import FILLS
from sampling.knobs import TEXT_KNOBS
from sampling.writing import write
from tasks.common import (Measured, TaskNeeds, compare, decode, derangement, embed, means)

NEEDS = TaskNeeds(('text',), (FILLS,), encoder='if there is one', shuffled=True, fills_gaps=True)
SETTINGS = (*TEXT_KNOBS, 'infill_share')


def measure(run, ctx):
    n, seed, share = ctx.n, ctx.knobs['seed'], ctx.knobs['infill_share']
    L = ctx.tokens.shape[1]

    # mask the positions with the smallest numbers of each text
    length = (~is_end(ctx.tokens, run.tokenizer)).sum(1, keepdim=True)   # (n, 1)
    u = uniforms(seed, 0, 'evaluation', 0, n, 1 + L)[:, 1:]
    u = u.masked_fill(torch.arange(L) >= length, torch.inf)
    masked = rank_in_row(u) < (share * length).ceil()                    # (n, L)
    tokens = torch.where(masked, run.text.mask_id, ctx.tokens)

    # {control: latents}
    conditions = {'null/': None}
    if ctx.raw is not None and 'latent' in run.streams:
        z = run.stats.standardise(ctx.raw)
        conditions = {'': z, 'shuffled/': z[derangement(n, seed)], 'null/': None}

    results, written = {'n': n, 'share': share}, {}
    for control, z in conditions.items():
        ids = write(run, tokens, ~masked, z, inner=masked, **ctx.sampling)

        # against the texts
        assert torch.equal(ids[~masked], ctx.tokens[~masked]), 'a known token changed'
        n_right = ((ids == ctx.tokens) & masked).sum(1)
        right = n_right / masked.sum(1).clamp(min=1)
        means(results, control, {'token_accuracy': 100 * right})
        written[control] = decode(run, ids)
        if ctx.raw is not None:
            embedded = embed(run, written[control])
            means(results, control, compare(ctx.texts, written[control], ctx.raw, embedded))
    return Measured(results)
