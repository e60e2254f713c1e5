"""
What a sampler of the project writes in the toy world: drawn, and enumerated.
denoise(tokens, t, positions, rows) gives logits (P, V), as samplers.py asks for it.
"""
import itertools

import torch

from toy import L, MASK, TEXTS, V, BestNetwork
from diffusion import MaskedText
from noise import Noise, rows_of
from samplers import make_propose

DRAWS = 20_000


def denoise_best(tokens, t, positions, rows=None):
    logits, _ = BestNetwork()(tokens, None, None, None, positions)
    return logits


def draw(sampler, steps, denoise=denoise_best):
    """ (16,): how often it writes each of toy.TEXTS, in DRAWS texts from nothing but MASK. """
    noise = Noise(0, rows_of(DRAWS))                           # random numbers of each text
    tokens = torch.full((DRAWS, L), MASK)
    nothing_known = torch.zeros(DRAWS, L, dtype=torch.bool)
    propose = make_propose(1.0, 1.0)                           # temperature 1, the whole nucleus
    tokens = sampler(denoise, propose, MaskedText(V), tokens, nothing_known, steps, noise)
    return (tokens[:, None] == TEXTS).all(2).double().mean(0)


def law_of_steps(steps, denoise=denoise_best):
    """ P(text) of toy.TEXTS (16,), where place i gets its word at step steps[i]. Places of one step
    do not see each other. """
    steps = torch.tensor(steps)                            # (L,)
    law = torch.ones(16, dtype=torch.float64)
    for step in steps.unique():
        # what earlier steps wrote is seen. The places of this step do not see each other, so their
        # probabilities are multiplied
        x_t = torch.where(steps >= step, MASK, TEXTS)
        logits = denoise(x_t, None, torch.arange(16 * L)).view(16, L, V)
        p = logits.double().softmax(2)
        p_word = p.gather(2, TEXTS[..., None]).squeeze(2)                # (16, L)
        law = law * torch.where(steps == step, p_word, 1).prod(1)
    return law


def law_of_first_hitting(calls=L, denoise=denoise_best):
    """ (16,): the exact law of the sampler. Every order of the places is equally likely. """
    laws = []
    for turns in itertools.permutations(range(L)):             # whose turn it is: of place 0, 1, ..
        # with fewer calls than places, neighbours in the order share a step
        steps = [turn * calls // L for turn in turns]
        laws.append(law_of_steps(steps, denoise))
    return torch.stack(laws).mean(0)
