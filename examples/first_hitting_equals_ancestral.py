"""
Two samplers, one distribution: first_hitting needs 4 network calls where ancestral needs many.

In masked diffusion every place is unmasked at a random time of its own. The network does not care
when that happens, only what is visible then. So just the order of the places counts, and every
order is equally likely. first_hitting draws the order: a random place in each call, L calls, exact.
ancestral walks through T small steps of time. Places that fall into the same step do not see each
other, which goes wrong, but rarely if T is large.

    P(all L places fall into different steps) = T (T-1) .. (T-L+1) / T^L,   which goes to 1

    python examples/first_hitting_equals_ancestral.py      prints how often each sampler writes
each sentence, or a wrong one: in 20,000 draws, and below that enumerated.
"""
import itertools
import math

import torch

from toy import HEADS, L, MASK, PROBABILITIES, V, BestNetwork, law_of_steps, shares

from diffusion import MaskedText
from samplers import ancestral, first_hitting, make_propose

DRAWS = 20_000
NETWORK = BestNetwork()


def denoise(tokens, t, positions, rows=None):
    return NETWORK(tokens, None, None, None, positions)[0]


def draw(sampler, steps):
    """ (16,): how often the sampler writes each of toy.TEXTS. """
    rng = torch.Generator().manual_seed(0)
    tokens = torch.full((DRAWS, L), MASK)
    nothing_known = torch.zeros(DRAWS, L, dtype=torch.bool)
    propose = make_propose(1.0, 1.0, rng)
    return shares(sampler(denoise, propose, MaskedText(V), tokens, nothing_known, steps, rng))


def law_of_ancestral(T):
    """ (16,): its exact probabilities. Each place falls into one of T steps, evenly. """
    # what counts is which place is in the first step that unmasks any, the second, ..., the k-th
    law = 0
    for steps in itertools.product(range(L), repeat=L):
        k = len(set(steps))
        if set(steps) == set(range(k)):
            law = law + math.comb(T, k) / T ** L * law_of_steps(denoise, steps)
    return law


def law_of_first_hitting(calls):
    """ (16,): likewise. Every order of the places is equally likely. """
    orders = list(itertools.permutations(range(L)))
    return sum(law_of_steps(denoise, order) for order in orders) / len(orders)


def show(name, calls, law):
    wrong = law[4:].sum()
    print(f'{name:18}{calls:>8}' + ''.join(f'{p:11.3f}' for p in law[:4]) + f'{wrong:9.3f}')


def main():
    found = dict(truth=PROBABILITIES)
    print('sampler              calls' + ''.join(f'{head:>11}' for head in HEADS) + '    wrong')
    show('the sentences', '', torch.cat([PROBABILITIES, torch.zeros(12)]))
    for sampler, law_of, calls in ((first_hitting, law_of_first_hitting, L),
                                   (ancestral, law_of_ancestral, 1),
                                   (ancestral, law_of_ancestral, 4),
                                   (ancestral, law_of_ancestral, 16),
                                   (ancestral, law_of_ancestral, 256)):
        found[sampler.__name__, calls] = draw(sampler, calls), law_of(calls)
        show(sampler.__name__, calls, found[sampler.__name__, calls][0])
        show('    enumerated', '', found[sampler.__name__, calls][1])
    return found


if __name__ == '__main__':
    main()
