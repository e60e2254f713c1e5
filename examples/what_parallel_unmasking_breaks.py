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
import math

from toy import L, PROBABILITIES, TOKENS, WORDS
from toy_sampling import draw, law_of_first_hitting, law_of_steps
from samplers import first_hitting


def entropy(places):
    """ H of the words at these places, in nats. """
    p = {}
    for words, probability in zip(TOKENS[:, places].tolist(), PROBABILITIES.tolist()):
        p[tuple(words)] = p.get(tuple(words), 0) + probability
    return -sum(x * math.log(x) for x in p.values())


def damage(law):
    """ KL(p || law), in nats. """
    return (PROBABILITIES * (PROBABILITIES / law[:4]).log()).sum().item()


def main():
    found = {}
    print('calls   wrong: drawn   enumerated')
    for calls in (4, 2, 1):
        drawn, law = draw(first_hitting, calls), law_of_first_hitting(calls)
        found[calls] = drawn[4:].sum().item(), law[4:].sum().item()
        print(f'{calls}       {found[calls][0]:12.3f} {found[calls][1]:12.3f}')

    print('\ncall 1        call 2          wrong   damage   shared in call 1 + in call 2')
    for first in itertools.combinations(range(L), 2):
        second = [i for i in range(L) if i not in first]
        law = law_of_steps([0 if i in first else 1 for i in range(L)])
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
