"""
Search with the encoder: write several texts from a latent, keep the one whose embedding is nearest
to it, mend it. A network that writes both ways mends with both, by turns: it writes the ending
again from left to right, and it fills gaps by diffusion. How likely a text is from left to right
also counts: without that, mending finds texts that are nearer but no longer fluent.

Letters: n texts, L text tokens, N latent vectors, D latent dims, K candidates of each text.
"""
from functools import partial

import torch
import torch.nn.functional as F

from data import is_end
from diffusion import MaskedText, rank_in_row
from samplers import no_callback
from sampling.loading import encode
from sampling.directions import l2t
from sampling.likelihood import log_p_given_half, nats_per_token
from sampling.writing import default_sampler, ends_of, tidied, write

# where texts are mended: the cosine that one nat a token is worth. The best of 0, .02 and .05 on
# 200 captions (docs/both_ways.md)
LOG_P_WEIGHT = 0.02


def closeness(run, tokens, raw):
    """ Cosine (n,) of the embeddings of tokens (n, L) with raw latents (n, N, D). """
    embedded = encode(run, [run.tokenizer.decode(ids) for ids in tokens.tolist()])
    return F.cosine_similarity(embedded.flatten(1), raw.flatten(1))


def best_of(run, candidates, raw, K, z=None, batch=128):
    """
    Of each K candidates (n K, L) the one of the highest score: tokens (n, L), cosine with raw
    (n, N, D) and score (n,). The score is the cosine. Given the standardised latents z (n K, N, D),
    a run that writes from left to right adds how likely it finds a text, without guidance:
        score = cosine + LOG_P_WEIGHT * log p(x | z) / tokens
    """
    # diffusion may write behind an EOS what nobody reads, or no EOS at all
    candidates = tidied(run, candidates)
    cosine = closeness(run, candidates, raw.repeat_interleave(K, 0))     # (n K,)
    score = cosine
    if z is not None and run.next_token is not None:
        score = cosine - LOG_P_WEIGHT * nats_per_token(run, candidates, z, batch=batch).float()
    score, best = score.view(-1, K).max(1)                               # (n,)
    row = torch.arange(len(raw)) * K + best
    return candidates[row], cosine[row], score


def search_settings(run, several, sampling):
    """ The settings of drafts, and those of the rounds of mending, which take turns: [(what masks
    a text, how it is filled)]. From left to right several drafts need a lower temperature than by
    diffusion, as each token is given all that is before it. Endings are sampled, because a greedy
    rewrite would reproduce the same text. """
    sampler = sampling.get('sampler') or default_sampler(run, True, False)
    is_causal = sampler == 'autoregressive'
    drafting = ending = filling = sampling | dict(several=several)
    if is_causal:
        drawn = dict(temperature=0.4) if sampling.get('temperature') is None else {}
        ending = sampling | drawn | dict(sampler='autoregressive')
        filling = filling | dict(sampler='confidence')
        if several:
            drafting = drafting | drawn

    rounds = []
    if is_causal:
        rounds.append((mask_ending, ending))
    if isinstance(run.text, MaskedText) and run.fills_masks:
        rounds.append((mask_least_certain, filling))
    return drafting, rounds


def mask_ending(run, tokens, z, seed, batch):
    """ tokens (n, L), masked from a position on that is drawn evenly from the first token of each
    text to its EOS. """
    rng = torch.Generator().manual_seed(seed)
    n_text = (~is_end(tokens, run.tokenizer)).sum(1, keepdim=True)       # (n, 1)
    first = (torch.rand(n_text.shape, generator=rng) * (n_text + 1)).long()
    return torch.where(torch.arange(tokens.shape[1]) < first, tokens, run.text.mask_id)


def mask_least_certain(run, tokens, z, seed, batch, share=0.4):
    """ tokens (n, L), in which the least likely positions are masked, given half of the rest: as
    many as a share of the text's own tokens. A PAD may be among them, so a text can grow. """
    certainty = log_p_given_half(run, tokens, z, seed, batch)            # (n, L)
    is_text = (tokens != run.tokenizer.pad) & ~ends_of(run, tokens)
    n_masked = (share * is_text.sum(1, keepdim=True)).ceil()             # (n, 1)
    return torch.where(rank_in_row(certainty) < n_masked, run.text.mask_id, tokens)


def in_round(on_step, i):
    """ An on_step that is told in which round texts are mended. """
    return on_step if on_step is no_callback else partial(on_step, i_round=i)


def search(run, raw, rerank=1, refine=0, seed=0, batch=128, lengths_of=None, several=False,
           on_step=no_callback, **sampling):
    """
    l2t by trial. From each raw latent (n, N, D) `rerank` drafts are written, and the nearest stays.
    With `refine` the draft of the highest score stays (best_of), and each of so many rounds writes
    a part of it again, in `rerank` ways, and keeps the best of all. Returns tokens (n, L), cosine
    (n,).
    several: as in `write`. on_step is also told i_round=i in round i of mending.
    """
    K = rerank
    if rerank < 1 or refine < 0:
        raise ValueError(f'rerank={rerank}, refine={refine}: expected at least 1 and 0')
    drafting, rounds = search_settings(run, several or K > 1, sampling)
    if refine and not rounds and run.next_token is None:
        raise ValueError(f'refine={refine}: {run.out_dir} can mend no text, as it was trained '
                         'neither on masked text nor from left to right')

    z = run.stats.standardise(raw).repeat_interleave(K, 0)               # (n K, N, D)
    if lengths_of is not None:
        lengths_of = lengths_of.repeat_interleave(K, 0)
    drafts = l2t(run, z, seed=seed, batch=batch, lengths_of=lengths_of, on_step=on_step, **drafting)
    best, cosine, score = best_of(run, drafts, raw, K, z if refine else None, batch)

    # mend it: write a part of it again, keep what scores higher. Each use of chance has a seed of
    # its own
    seeds = torch.randint(2**40, (refine, 2), generator=torch.Generator().manual_seed(seed))
    for i, (mask_seed, write_seed) in enumerate(seeds.tolist()):
        hide, settings = rounds[i % len(rounds)]
        tokens = hide(run, best.repeat_interleave(K, 0), z, mask_seed, batch)
        tokens = write(run, tokens, tokens != run.text.mask_id, z, seed=write_seed, batch=batch,
                       on_step=in_round(on_step, i + 1), **settings)
        found, found_cosine, found_score = best_of(run, tokens, raw, K, z, batch)
        is_better = found_score > score
        best = torch.where(is_better[:, None], found, best)
        cosine = torch.where(is_better, found_cosine, cosine)
        score = torch.where(is_better, found_score, score)
    return best, cosine
