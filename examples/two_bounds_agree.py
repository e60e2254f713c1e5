"""
The loss of training and the figure of evaluation are one bound, computed in two ways.

Training draws a time t, masks each word with probability t, and weighs by 1/t. Evaluation draws a
number n from 1 to L, masks exactly n words, and weighs by L/n. Both give every set of n masked
words the same weight, so both are the same upper bound on -log p(x). It equals the entropy only
for the best network. The second way varies less, because it draws no rare and heavy small t.

    E_t [ 1/t * sum over masked of nll ]  =  E_n [ L/n * sum over masked of nll ]
    weight of a set of n words:  integral of t^n (1-t)^(L-n) / t dt  =  1 / (n C(L,n))

    python examples/two_bounds_agree.py      prints both bounds, each enumerated over all texts and
masks and estimated from 100,000 draws, for the best network and for one that is a little worse.
"""
import itertools
import math

import torch

from toy import ENTROPY, L, MASK, PROBABILITIES, TOKENS, V, BestNetwork
from diffusion import MaskedText

TEXT = MaskedText(V)
DRAWS = 100_000


def weight_in_training(n):
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    return (TEXT.bound_weight(t) * t ** n * (1 - t) ** (L - n)).mean().item()


def weight_in_evaluation(n):
    return 1 / L * 1 / math.comb(L, n) * L / n     # P(n), P(these words if n), the weight


def nats_of(network, x_t, tokens):
    """ (B,): sum over the masked words of -log p(x^i | x_t). """
    logp = network(x_t, None, None, None)[0].double().log_softmax(2)
    nll = -logp.gather(2, tokens[..., None]).squeeze(2)
    return (nll * (x_t == MASK)).sum(1)


def enumerated(network, weight):
    """ The bound by its definition: a sum over all sets of masked words. """
    total = 0.0
    for mask in itertools.product((False, True), repeat=L):
        if any(mask):
            nats = nats_of(network, torch.where(torch.tensor(mask), MASK, TOKENS), TOKENS)
            total += weight(sum(mask)) * (PROBABILITIES * nats).sum().item()
    return total


def drawn(network, way):
    """ Mean and standard error over draws, with the functions that the project uses. """
    tokens = TOKENS[torch.multinomial(PROBABILITIES, DRAWS, replacement=True)]
    u = torch.rand(DRAWS, 1 + L, dtype=torch.float64)
    if way == 'L/n':
        nats = TEXT.bound(network, tokens, None, None, u)
    else:
        x_t, _ = TEXT.corrupt(tokens, u[:, 0], u[:, 1:])       # the first column is t
        nats = TEXT.bound_weight(u[:, 0]) * nats_of(network, x_t, tokens)
    return nats.mean().item(), nats.std().item() / math.sqrt(DRAWS)


def main():
    torch.manual_seed(0)
    found = {}
    print('nats of a sentence              enumerated    100,000 draws    entropy')
    for name, network in (('best network', BestNetwork()), ('worse network', BestNetwork(0.1))):
        for way, weight in (('1/t', weight_in_training), ('L/n', weight_in_evaluation)):
            exact = enumerated(network, weight)
            mean, error = drawn(network, way)
            found[name, way] = exact, mean, error
            print(f'{name:17}{way:9}{exact:16.4f}    {mean:.3f} ± {error:.3f}{ENTROPY:11.4f}')
    return found


if __name__ == '__main__':
    main()
