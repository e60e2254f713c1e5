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
    # sentences with the same words at these places are one case
    p = {}
    for words, probability in zip(TOKENS[:, places].tolist(), PROBABILITIES.tolist()):
        p[tuple(words)] = p.get(tuple(words), 0) + probability
    return -sum(x * math.log(x) for x in p.values())


def named(places):
    """ The words of the first sentence at these places. """
    return ' '.join(WORDS[TOKENS[0, i]] for i in places)


def damage(law):
    """ KL(p || law), in nats. """
    return (PROBABILITIES * (PROBABILITIES / law[:4]).log()).sum().item()


def main():
    found = {}
    print('calls   wrong: drawn   enumerated')
    for calls in (4, 2, 1):
        # the share of wrong sentences
        drawn = draw(first_hitting, calls)[4:].sum().item()
        enumerated = law_of_first_hitting(calls)[4:].sum().item()
        found[calls] = drawn, enumerated
        print(f'{calls}       {drawn:12.3f} {enumerated:12.3f}')

    print('\ncall 1        call 2          wrong   damage   shared in call 1 + in call 2')
    for first in itertools.combinations(range(L), 2):
        # two calls: these two places first, then the other two
        second = [i for i in range(L) if i not in first]
        law = law_of_steps([0 if i in first else 1 for i in range(L)])
        wrong = law[4:].sum().item()

        # the information that the words of a call share
        in_1 = sum(entropy([i]) for i in first) - entropy(first)
        alone = sum(entropy([*first, i]) - entropy(first) for i in second)
        together = entropy(range(L)) - entropy(first)
        in_2 = alone - together
        found[first] = wrong, damage(law), in_1 + in_2
        print(f'{named(first):14}{named(second):14}{wrong:7.3f}{damage(law):9.3f}'
              f'{in_1 + in_2:10.3f} = {in_1:.3f} + {in_2:.3f}')
    return found


if __name__ == '__main__':
    main()
