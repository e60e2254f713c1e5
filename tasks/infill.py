"""
infill: a share of each text's tokens (not the EOS) is masked and written again, from the rest and
the right latent: token accuracy, and what l2t measures.

Controls
    shuffled        another text's latent
    null            none
    left_to_right   where the network also writes so, a beam search. What stands behind a gap is not
                    seen when the gap is filled, but then it decides among 8 beams. lead: how far
                    ahead of it, text by text

Letters: n texts, K beams of each, L text tokens, V vocabulary.
"""
import torch

from diffusion import is_end, rank_in_row
from noise import uniforms
from samplers import before
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
        filled[RIVAL] = left_to_right(run.net, tokens, masked, z, batch=knobs.sample_batch)

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


@torch.inference_mode()
def left_to_right(net, tokens, masked, z, K=8, batch=128):
    """
    The masked positions of tokens (n, L) filled from left to right, from standardised latents z
    (n, N, D), by beam search: the K beginnings of the largest score go on.
        score = sum over i of log p(x^i | x^<i, z),   known tokens x^i among them
    No EOS or PAD is written; there is no temperature and no guidance. Returns tokens (n, L). """
    found = [beams(net, tokens[part], masked[part], z[part], K)
             for part in net.batches(len(tokens), max(1, batch // K), n_asked=K, n_caches=K)]
    return torch.cat(found)


def beams(net, tokens, masked, z, K):
    """ The same in one batch. """
    n, V = len(tokens), net.text.mask_id
    longest = int((tokens != net.pad).sum(1).max())
    tokens, masked, z = (x.to(net.device) for x in (tokens, masked, z))

    # what may be written
    ids = torch.arange(V, device=net.device)
    inside = (ids != net.eos) & (ids != net.pad)                         # (V,)
    inside = inside.index_fill(0, net.banned, False)

    # K rows of each text. At first they are all alike, so only one of them counts
    first = K * torch.arange(n, device=net.device)[:, None]              # (n, 1)
    x = tokens.repeat_interleave(K, 0)                                   # (n K, L)
    z = z.repeat_interleave(K, 0)
    score = torch.full((n, K), -torch.inf, device=net.device)
    score[:, 0] = 0
    cache = {}
    for i in range(longest):
        logits = net.next_logits(before(x, i, V), cache, z, 0.0)
        log_p = logits.log_softmax(-1).view(n, K, V)
        log_p[:, :, net.pad] = 0                                         # it follows EOS by rule

        # a known token alone, or any that may be written
        known = ids == tokens[:, i, None]
        allowed = torch.where(masked[:, i, None], inside, known)         # (n, V)
        log_p = log_p.masked_fill(~allowed[:, None], -torch.inf)

        # the best K of the K V continuations: which beginnings they go on from, and with which
        # token. The cache keeps the rows of these beginnings
        score, best = (score[:, :, None] + log_p).flatten(1).topk(K)     # (n, K)
        rows = (first + best // V).flatten()
        x = x[rows]
        x[:, i] = best.flatten() % V
        net.keep(cache, rows)
    return x[first.flatten()].cpu()


TASK = Task(
    Needs(('text',), (FILLS,)), (*TEXT_KNOBS, 'infill_share'), measure,
    rival=RIVAL, embeds=True, takes_two=True,
    headlines=(('gaps filled, % right', '', 'token_accuracy'),))
