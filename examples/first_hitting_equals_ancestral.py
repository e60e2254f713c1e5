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

from toy import HEADS, L, PROBABILITIES
from toy_sampling import draw, law_of_first_hitting, law_of_steps
from samplers import ancestral, first_hitting


def law_of_ancestral(T):
    """ (16,): its exact probabilities. Each place falls into one of T steps, evenly. """
    # only the steps count in which any place falls: k of them, chosen from T
    law = torch.zeros(16, dtype=torch.float64)
    for steps in itertools.product(range(L), repeat=L):
        k = max(steps) + 1
        if set(steps) == set(range(k)):
            law += math.comb(T, k) / T ** L * law_of_steps(steps)
    return law


def show(name, calls, law):
    row = ''.join(f'{p:11.3f}' for p in law[:4])
    print(f'{name:20}{calls:>5}{row}{law[4:].sum():9.3f}')


def main():
    found = {}
    print('sampler             calls' + ''.join(f'{head:>11}' for head in HEADS) + '    wrong')
    show('the sentences', '', torch.cat([PROBABILITIES, torch.zeros(12)]))

    # first_hitting takes L calls; ancestral is tried with ever more steps
    samplers = [(first_hitting, L, law_of_first_hitting)]
    samplers += [(ancestral, T, law_of_ancestral) for T in (1, 4, 16, 64)]
    for sampler, calls, law_of in samplers:
        drawn = draw(sampler, calls)
        law = law_of(calls)
        found[sampler.__name__, calls] = drawn, law
        show(sampler.__name__, calls, drawn)
        show('    enumerated', '', law)
    return found


if __name__ == '__main__':
    main()
