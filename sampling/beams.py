"""
Beam search: a text is written from left to right, and the K beginnings of the largest score go on.

    score = sum over i of log p(x^i | x^<i, z)

It seeks likely texts: there is no temperature and no guidance. The likeliest text is often too
short, as each token costs something. So of the K that are found the first one is the likeliest per
token, by score / (number of its tokens, the EOS among them).

Letters: n texts, K beams of each, L text tokens, V vocabulary, N latent vectors, D latent dims.
"""
from dataclasses import replace

import torch

from samplers import SAMPLERS, before
from sampling.texts import check_together, settle

OF_DRAFTS = 4                  # beams, where the knob leaves it open


def fill_by_beams(net, tokens, masked, z, K=8, batch=128):
    """ The masked positions of tokens (n, L), filled from standardised latents z (n, N, D): texts
    (n, L). Known tokens count in the score. No EOS or PAD is written. """
    found = [beams(net, tokens[part], masked[part], z[part], K, may_end=False)[:, 0]
             for part in net.batches(len(tokens), max(1, batch // K), n_asked=K, n_caches=K)]
    return torch.cat(found)


def write_by_beams(net, z, knobs):
    """ Whole texts from standardised latents z (n, N, D): (n, K, L) with K = knobs.beams, the
    likeliest per token first. knobs: SamplingKnobs; ValueError for those that beams do not have.
    """
    check_beams(net, knobs)
    K = knobs.beams
    s = knobs.latent_clock
    if s:
        z = net.at_clock(z, s)
    tokens = torch.full((len(z), net.L), net.text.mask_id)
    masked = torch.ones_like(tokens, dtype=torch.bool)
    size = max(1, knobs.sample_batch // K)
    found = [beams(net, tokens[part], masked[part], z[part], K, may_end=True, s=s)
             for part in net.batches(len(z), size, n_asked=K, n_caches=K)]
    return torch.cat(found)


def check_beams(net, knobs):
    """ ValueError for knobs that a search does not have, and for a run that cannot search. """
    _, settled = settle(net, replace(knobs, sampler=knobs.sampler or 'autoregressive'),
                        from_latent=True)
    if settled.sampler != 'autoregressive':
        raise ValueError(f'beams={knobs.beams} search from left to right: leave sampler='
                         f'{knobs.sampler} out')
    check_together(net, settled, SAMPLERS['autoregressive'])
    for name in not_sought(knobs):
        raise ValueError(f'{name}={getattr(knobs, name)}: beams seek the likeliest text, '
                         f'without {name}')


def check_one_text(knobs, num_samples):
    """ ValueError where beams are asked for several texts of a latent. """
    if knobs.beams > 1 and num_samples > 1:
        raise ValueError(f'beams={knobs.beams} find one text of each latent: leave num_samples out')


def not_sought(knobs):
    """ The names of knobs that are set, and that a search does not have. """
    has = dict(temperature=0, guidance=1, nucleus=1, length=0)
    return [name for name, wants in has.items() if getattr(knobs, name) not in (None, wants)]


def for_drafts(net, knobs):
    """ SamplingKnobs of drafts, in which beams is not left open: 4 where they are written from left
    to right, unless a knob asks for random texts. Of as many drafts the nearest is nearer than of
    random ones, and in as much time it is at least as near (docs/both_ways.md). """
    sampler, _ = settle(net, knobs, from_latent=True)
    if knobs.beams or not_sought(knobs) or not sampler.is_causal:
        return knobs
    return replace(knobs, beams=OF_DRAFTS)


@torch.inference_mode()
def beams(net, tokens, masked, z, K, may_end, s=0.0):
    """ One batch: (n, K, L) on the host, the likeliest per token first. may_end: an EOS may be
    written. """
    n, V = len(tokens), net.text.mask_id
    longest = int((tokens != net.pad).sum(1).max())
    tokens, masked, z = (x.to(net.device) for x in (tokens, masked, z))

    # what may be written; after its EOS a text has PAD, by rule
    ids = torch.arange(V, device=net.device)
    inside = (ids != net.pad) & (may_end | (ids != net.eos))             # (V,)
    inside = inside.index_fill(0, net.banned, False)
    is_pad = ids == net.pad

    # K rows of each text. At first they are all alike, so only one of them counts
    first = K * torch.arange(n, device=net.device)[:, None]              # (n, 1)
    x = tokens.repeat_interleave(K, 0)                                   # (n K, L)
    z = z.repeat_interleave(K, 0)
    score = torch.full((n, K), -torch.inf, device=net.device)
    score[:, 0] = 0
    has_ended = torch.zeros(n, K, 1, dtype=torch.bool, device=net.device)
    cache = {}
    for i in range(longest):
        logits = net.next_logits(before(x, i, V), cache, z, s)
        log_p = logits.masked_fill(is_pad, -torch.inf).log_softmax(-1).view(n, K, V)
        log_p = log_p.masked_fill(is_pad, 0)

        # a known token alone, or any that may be written
        known = ids == tokens[:, i, None]                                # (n, V)
        allowed = torch.where(masked[:, i, None], inside, known)[:, None]
        if may_end:
            allowed = torch.where(has_ended, is_pad, allowed)            # (n, K, V)
        log_p = log_p.masked_fill(~allowed, -torch.inf)

        # the best K of the K V continuations: which beginnings they go on from, and with which
        # token. The cache keeps the rows of these beginnings
        score, best = (score[:, :, None] + log_p).flatten(1).topk(K)     # (n, K)
        rows = (first + best // V).flatten()
        x = x[rows]
        x[:, i] = best.flatten() % V
        net.keep(cache, rows)

        # have all ended? On a card the question waits for it: every eighth token
        if may_end:
            has_ended = (x[:, :i + 1] == net.eos).any(1).view(n, K, 1)
            is_asked = i % 8 == 7 or not x.is_cuda
            if is_asked and has_ended.all():
                x[:, i + 1:] = net.pad
                break

    # their order. Where no EOS may be written, all have the same number of tokens
    x = x.view(n, K, -1)
    n_tokens = (x != net.pad).sum(2)                                     # (n, K)
    order = (score / n_tokens).argsort(dim=1, descending=True, stable=True)
    return x.take_along_dim(order[:, :, None], 1).cpu()
