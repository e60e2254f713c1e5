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
from tasks.common import TaskNeeds, compare, decode, derangement, embed, enter


def fills_gaps(run):
    return '' if run.fills_masks else 'is autoregressive: it continues a text, and fills no gaps'


NEEDS = TaskNeeds(('text',), (FILLS,), encoder=True, shuffled=True, more=fills_gaps)
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

    results = {'n': n, 'share': share}
    for control, z in conditions.items():
        ids = write(run, tokens, ~masked, z, inner=masked, **ctx.sampling)

        # against the texts
        assert torch.equal(ids[~masked], ctx.tokens[~masked]), 'a known token changed'
        n_right = ((ids == ctx.tokens) & masked).sum(1)
        right = n_right / masked.sum(1).clamp(min=1)
        enter(results, control, {'token_accuracy': 100 * right})
        if ctx.raw is not None:
            written = decode(run, ids)
            enter(results, control, compare(ctx.texts, written, ctx.raw, embed(run, written)))
    return results
