"""
Why is the loss of masked diffusion weighted by 1/t?

A text of L words can be written in L steps, one word at a time, in any order. By the chain rule its
nats are the sum over these steps, so each step must count once. Training does not walk through the
steps: it draws a time t and masks each word with probability t. Few words are masked only while t
is small, so those last steps are seen too rarely. The weight 1/t makes up for exactly that.

    step n (n words still masked) is counted  E_t [ w(t) * n * C(L,n) t^n (1-t)^(L-n) ]  times,
    which is 1 for every n if w = 1/t;  in general w = M'/M with M(t) the masked share

    python examples/why_one_over_t.py      prints how often each step counts under four weights.
Only a bound's weight gives the entropy. The others give less, and would be a "perplexity" that is
too good to be true.
"""
import itertools
import math

import torch

from toy import ENTROPY, L, MASK, PROBABILITIES, TOKENS, V, BestNetwork
from diffusion import MaskedText

STEPS = range(L, 0, -1)                # words still masked: 4, 3, 2, 1


def nats_of_a_word(n):
    """ Mean of -log p(word | visible words) over all texts, and all ways to mask n words. """
    # the best network, on each text with each choice of n places
    network = BestNetwork()
    total = 0.0
    ways = list(itertools.combinations(range(L), n))
    for places in ways:
        x_t = TOKENS.clone()
        x_t[:, places] = MASK
        logits, _ = network(x_t, None, None, None)                       # (4, L, V)
        logp = logits.log_softmax(2)
        nll = -logp.gather(2, TOKENS[..., None]).squeeze(2)              # (4, L)
        of_masked = nll[:, places].mean(1)                               # (4,)
        total += (PROBABILITIES * of_masked).sum().item()
    return total / len(ways)


def times_counted(text, n):
    """ The expectation above, by the midpoint rule. """
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    M = text.masked_share(t)
    chance = math.comb(L, n) * M ** n * (1 - M) ** (L - n)               # that n words are masked
    return (text.training_weight(t) * n * chance).mean().item()


def main():
    weights = {
        '1/t': MaskedText(V),
        'cosine': MaskedText(V, schedule='cosine'),
        '1': MaskedText(V, loss_weight='uniform'),
        '1 - t': MaskedText(V, loss_weight='rdm'),
    }

    # the sum over the steps is the loss: nats of a step, times how often it counts
    nats = {n: nats_of_a_word(n) for n in STEPS}
    counted = {}
    sums = {}
    for name, text in weights.items():
        counted[name] = [times_counted(text, n) for n in STEPS]
        sums[name] = sum(times * nats[n] for times, n in zip(counted[name], STEPS))

    print('                        times that a step is counted, with the weight')
    print('masked   nats of a word' + ''.join(f'{name:>10}' for name in weights))
    for i, n in enumerate(STEPS):
        row = ''.join(f'{counted[name][i]:10.3f}' for name in weights)
        print(f'{n} of {L}  {nats[n]:15.3f}{row}')
    print('sum: nats of a sentence' + ''.join(f'{sums[name]:10.3f}' for name in weights))
    print('entropy: the truth     ' + f'{ENTROPY:10.3f}' * len(weights))
    return dict(counted=counted, nats=sums, entropy=ENTROPY)


if __name__ == '__main__':
    main()
