"""
Unmasking several words in one call is fast. What does it break?

Words that are unmasked in one call do not see each other. Each is drawn from its own probability,
so words that belong together (he .. his) are drawn as if they had nothing to do with each other.
The damage, in nats, is exactly the information that the words of a call share. Words that share
little can be unmasked together at nearly no cost, so it matters which words a call takes.

    KL(p || law of the sampler) = I(words of call 1) + I(words of call 2 | call 1) + ...
    with I = sum of H(each word) - H(these words), for calls that take fixed places

    python examples/what_parallel_unmasking_breaks.py      prints the share of wrong sentences if
first_hitting takes 4, 2 or 1 calls, and the damage of 2 calls for each choice of the first pair.
"""
import itertools

import torch

from toy import L, MASK, PROBABILITIES, TOKENS, V, WORDS, BestNetwork, law_of_steps, shares

from diffusion import MaskedText
from samplers import first_hitting, make_propose

DRAWS = 20_000


def denoise(tokens, t, positions, rows=None):
    return BestNetwork()(tokens, None, None, None, positions)[0]


def draw(calls):
    """ (16,): how often first_hitting writes each of toy.TEXTS, in so many calls. """
    rng = torch.Generator().manual_seed(0)
    tokens = torch.full((DRAWS, L), MASK)
    nothing_known = torch.zeros(DRAWS, L, dtype=torch.bool)
    propose = make_propose(1.0, 1.0, rng)
    return shares(first_hitting(denoise, propose, MaskedText(V), tokens, nothing_known, calls, rng))


def law_of_calls(calls):
    """ (16,): its exact probabilities: every order of the places is equally likely. """
    laws = []
    for turns in itertools.permutations(range(L)):             # whose turn it is: of place 0, 1, ..
        laws.append(law_of_steps(denoise, [turn * calls // L for turn in turns]))
    return torch.stack(laws).mean(0)


def entropy(places):
    """ H of the words at these places, in nats. """
    p = {}
    for words, probability in zip(TOKENS[:, places].tolist(), PROBABILITIES.tolist()):
        p[tuple(words)] = p.get(tuple(words), 0) + probability
    return -sum(x * torch.tensor(x).log().item() for x in p.values())


def damage(law):
    return (PROBABILITIES * (PROBABILITIES / law[:4]).log()).sum().item()


def main():
    found = {}
    print('calls   wrong: drawn   enumerated')
    for calls in (4, 2, 1):
        found[calls] = draw(calls)[4:].sum().item(), law_of_calls(calls)[4:].sum().item()
        print(f'{calls}         {found[calls][0]:10.3f}   {found[calls][1]:10.3f}')

    print('\ncall 1        call 2          wrong   damage   information shared in call 1 + in call 2')
    for first in itertools.combinations(range(L), 2):
        second = [i for i in range(L) if i not in first]
        law = law_of_steps(denoise, [0 if i in first else 1 for i in range(L)])
        in_1 = sum(entropy([i]) for i in first) - entropy(first)
        in_2 = sum(entropy([*first, i]) - entropy(first) for i in second)
        in_2 = in_2 - (entropy(range(L)) - entropy(first))
        found[first] = law[4:].sum().item(), damage(law), in_1 + in_2

        names = [' '.join(WORDS[TOKENS[0, i]] for i in pair) for pair in (first, second)]
        print(f'{names[0]:14}{names[1]:14}{found[first][0]:7.3f}{found[first][1]:9.3f}'
              f'{in_1 + in_2:10.3f} = {in_1:.3f} + {in_2:.3f}')
    return found


if __name__ == '__main__':
    main()
