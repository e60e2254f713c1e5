"""
Drafts: many texts are written from a latent and embedded, and the nearest is kept.

A network errs in much the same way at a latent and near it. So a draft that was written from the
latent a, and misses the wanted z with its embedding e, says where to aim next:

    a <- a + (z - e) / 2         from each of the nearest drafts so far; at first a = z

Letters: n texts, N latent vectors, D latent dims, K drafts of a text in a round.
"""
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from noise import rows_of_parts
from samplers import part_of_step
from sampling.beams import write_by_beams
from sampling.texts import blank, tidied, write

MOST_DRAFTS = 4096             # that the knob rerank allows
ROUNDS = 6                     # at most, with at least AIMS drafts in each
AIMS = 4
HIT = 0.999                    # the cosine of a draft that needs no others


class Draft(NamedTuple):
    cosine: float
    text: str
    aim: torch.Tensor          # (N, D), of what is written next


def nearest_drafts(run, raw, rows, knobs, lengths_of, on_step):
    """ The nearest of knobs.rerank drafts to each of the raw latents (n, N, D), a list of n texts.
    rows (n, 2): of noise.py. lengths_of (n, L): as in Run.write. """
    found = [[] for _ in raw]                              # the nearest first
    missed = list(range(len(raw)))
    n_rounds = min(ROUNDS, max(1, knobs.rerank // AIMS))
    n_written = 0                                          # drafts of each text that is missed
    for i in range(n_rounds):
        # K drafts of each text, from its aims: (the text, an aim, how many from this aim)
        K = part_of_step(knobs.rerank, i, n_rounds)
        asked = []
        for j in missed:
            aims = [draft.aim for draft in found[j][:AIMS]] or [raw[j]]
            for a, aim in enumerate(aims):
                asked.append((j, aim, part_of_step(K, a, len(aims))))

        # write them
        if knobs.beams > 1:
            z = run.stats.standardise(torch.stack([aim for _, aim, _ in asked]))
            written = [run.decode(texts) for texts in write_by_beams(run.net, z, knobs)]
        else:
            # each draft is a sample of its own, whatever other texts are still missed
            now = rows_of_parts(rows[missed], np.full(len(missed), K), MOST_DRAFTS)
            now[:, 1] += n_written
            written = draw_drafts(run, asked, now, knobs, lengths_of, on_step)
        n_written += K

        # those that are new, each once: {(the text it is a draft of, the draft): its aim}
        new = {}
        for (j, aim, n), texts in zip(asked, written):
            known = [draft.text for draft in found[j]]
            fresh = [text for text in dict.fromkeys(texts)
                     if text not in known and (j, text) not in new]
            for text in fresh[:n]:
                new[j, text] = aim

        # embed them, and aim at the other side of what they miss
        if new:
            z = raw[[j for j, _ in new]]
            e = run.encode([text for _, text in new])
            cosine = F.cosine_similarity(e.flatten(1), z.flatten(1))
            a = torch.stack(list(new.values()))
            next_a = a + (z - e) / 2
            has_none = ~e.flatten(1).any(1)                # no embedding, so no miss
            next_a[has_none] = z[has_none]
            for (j, text), c, aim in zip(new, cosine.tolist(), next_a):
                found[j].append(Draft(c, text, aim))

        # what needs no more
        for j in missed:
            found[j].sort(key=lambda draft: -draft.cosine)
        missed = [j for j in missed if found[j][0].cosine < HIT]
        if knobs.beams > 1:
            # without a new draft the next round would have the same aims, and find the same beams
            has_new = {j for j, _ in new}
            missed = [j for j in missed if j in has_new]
        if not missed:
            break
    return [drafts[0].text for drafts in found]


def draw_drafts(run, asked, rows, knobs, lengths_of, on_step):
    """ Of each (text, aim, n) n random texts, a list of lists. rows (their sum, 2): of noise.py.
    """
    n_each = [n for _, _, n in asked]
    text_of = np.repeat([j for j, _, _ in asked], n_each)
    aims = torch.stack([aim for _, aim, _ in asked])
    z = run.stats.standardise(aims.repeat_interleave(torch.tensor(n_each), 0))
    lengths = None
    if lengths_of is not None:
        lengths = lengths_of[text_of]
    tokens, known_mask = blank(run.net, len(z), knobs, lengths, rows)
    tokens = write(run.net, tokens, known_mask, z, knobs, must_differ=True, on_step=on_step,
                   rows=rows)

    # tidied, as diffusion may leave tokens after an EOS, or write no EOS at all
    texts = iter(run.decode(tidied(run.net, tokens)))
    return [[*islice(texts, n)] for n in n_each]
