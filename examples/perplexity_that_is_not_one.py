"""
A perplexity can fall below the truth if the loss is not a bound. Here a fair bit has half its nats.

Give each token a code of two sub-tokens, and mask the sub-tokens independently. It is tempting to
score the token as a whole: the cross-entropy of the token, given what is visible of its code. But
one visible sub-token may give the whole token away, and that sub-token is never paid for. The sum
over the masked sub-tokens pays for each of them. So it is a bound, and the other is not.

    sub-tokens   E_t [ 1/t * sum over masked a of -log p(c^a | c_t) ]  =  H(c^1, c^2)
    whole token  E_t [ 1/t * -log p(token | c_t) ]                     =  H(c^1, c^2) - I / 2
    for the best network; H is the entropy, I the mutual information of the two sub-tokens

    python examples/perplexity_that_is_not_one.py      prints both for three codes, and the two
right-hand sides. For a bit that is written twice the whole token has 0.347 nats, its entropy 0.693.
"""
import math

import torch

import toy                             # it lets Python find the modules of the project
from diffusion import MaskedText

CODES = {                              # the sub-tokens (c^1, c^2) of each token: its probability
    'two fair bits': {(0, 0): 0.25, (0, 1): 0.25, (1, 0): 0.25, (1, 1): 0.25},
    'the second mostly a copy': {(0, 0): 0.45, (1, 1): 0.45, (0, 1): 0.05, (1, 0): 0.05},
    'one bit, written twice': {(0, 0): 0.5, (1, 1): 0.5},
}


def weight_of_mask(n):
    """ E_t [ w(t) P(these n of the two sub-tokens are masked) ], by the midpoint rule. """
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    return (MaskedText(2).bound_weight(t) * t ** n * (1 - t) ** (2 - n)).mean().item()


def chance(code, **seen):
    """ P(the sub-tokens that are seen), as chance(code, c1=0). """
    return sum(p for (c1, c2), p in code.items()
               if seen.get('c1', c1) == c1 and seen.get('c2', c2) == c2)


def losses(code):
    """ Nats per token of the sum over sub-tokens, and of the whole token. """
    of_parts = of_whole = 0.0
    for (c1, c2), p in code.items():
        # both sub-tokens are masked
        nll_1 = -math.log(chance(code, c1=c1))
        nll_2 = -math.log(chance(code, c2=c2))
        of_parts += p * weight_of_mask(2) * (nll_1 + nll_2)
        of_whole += p * weight_of_mask(2) * -math.log(p)

        # one is masked, the other is visible: p(c1 | c2), then p(c2 | c1); the token follows
        nll = -math.log(p / chance(code, c2=c2)) - math.log(p / chance(code, c1=c1))
        of_parts += p * weight_of_mask(1) * nll
        of_whole += p * weight_of_mask(1) * nll
    return of_parts, of_whole


def main():
    found = {}
    print(' ' * 26 + 'nats: sub-tokens (H)   whole token (H - I/2)   perplexity (truth)')
    for name, code in CODES.items():
        entropy = -sum(p * math.log(p) for p in code.values())
        information = sum(p * math.log(p / chance(code, c1=c1) / chance(code, c2=c2))
                          for (c1, c2), p in code.items())
        too_good = entropy - information / 2
        of_parts, of_whole = losses(code)
        found[name] = of_parts, entropy, of_whole, too_good
        print(f'{name:26}{of_parts:12.3f} ({entropy:.3f}){of_whole:16.3f} ({too_good:.3f})'
              f'{math.exp(of_whole):15.2f} ({math.exp(entropy):.2f})')
    return found


if __name__ == '__main__':
    main()
