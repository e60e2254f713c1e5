"""
Drafts: many texts are written from a latent and embedded, and the nearest is kept.

A network errs in much the same way at a latent and beside it. So a draft that was written from the
latent a, and misses the wanted z with its embedding e, says where to aim next:

    a <- a + (z - e) / 2         from each of the nearest drafts so far; at first a = z

Letters: n texts, A aims of each, K drafts of each in a round, N latent vectors, D latent dims.
"""
from dataclasses import replace

import torch
import torch.nn.functional as F

from samplers import part_of_step
from sampling.writing import blank, tidied, write

ROUNDS = 6
AIMS = 4
HIT = 0.999                    # the cosine of a draft that needs no others


def nearest_drafts(run, raw, knobs, lengths_of, on_step):
    """ The nearest of knobs.rerank drafts to each of the raw latents (n, N, D), a list of n texts.
    lengths_of (n, L): as in Run.write. """
    found = [{} for _ in raw]                              # {text: its embedding, and its aim}
    best = [''] * len(raw)
    missed = list(range(len(raw)))
    aims = raw[:, None]                                    # (n, A, N, D) of those that are missed
    for i in range(min(ROUNDS, knobs.rerank)):
        # write K drafts of each, from its aims in turn
        K = part_of_step(knobs.rerank, i, ROUNDS)
        aims = aims[:, torch.arange(K) % aims.shape[1]].flatten(0, 1)
        of_draft = [j for j in missed for _ in range(K)]
        lengths = None
        if lengths_of is not None:
            lengths = lengths_of[of_draft]
        knobs_now = replace(knobs, seed=knobs.seed + 1000 * i)
        tokens, known_mask = blank(run, len(aims), knobs_now, lengths)
        z = run.stats.standardise(aims)
        tokens = write(run, tokens, known_mask, z, knobs_now, several=True, on_step=on_step)

        # embed the new ones. Diffusion may leave tokens after an EOS, or write no EOS at all
        drafts = {}
        for j, text, aim in zip(of_draft, run.decode(tidied(run, tokens)), aims):
            if text not in found[j]:
                drafts[j, text] = aim
        if drafts:
            embedded = run.encode([text for _, text in drafts])
            for (j, text), e in zip(drafts, embedded):
                found[j][text] = e, drafts[j, text]

        # the nearest so far, and where to aim next
        going, aims = [], []
        for j in missed:
            e, aim = (torch.stack(some) for some in zip(*found[j].values()))
            cosine = F.cosine_similarity(e.flatten(1), raw[j].flatten(), dim=1)
            order = cosine.argsort(descending=True)
            best[j] = list(found[j])[order[0]]
            if cosine.max() < HIT:
                near = order[torch.arange(AIMS) % len(order)]
                going.append(j)
                aims.append(aim[near] + (raw[j] - e[near]) / 2)
        missed = going
        if not missed:
            break
        aims = torch.stack(aims)
    return best
