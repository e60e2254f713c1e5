"""
Guidance makes a sample agree more with its condition, and makes samples alike.

The same network predicts with the condition (c) and without it (u). Guidance takes a step g times
as long from u to c, in log p. At g = 0 the condition is ignored, g = 1 is the model, and above 1
words that the condition makes likelier become likelier still. Rare but right texts disappear, so
the entropy falls. The texts are not exactly those of p_c^g p_u^(1-g): the formula is applied to one
word at a time, and later words do not enter into the first ones.

    log p_g(x^i) = g log p_c(x^i) + (1-g) log p_u(x^i) - log of the sum

    python examples/guidance_on_a_toy.py      the condition is a noisy latent of "she walks her
dog". It prints, for five g, how often first_hitting writes each sentence, and below it the truth.
"""
import torch

from toy import HEADS, L, LATENTS, MASK, PROBABILITIES, BestNetwork, posterior
from toy_sampling import draw, law_of_first_hitting
from diffusion import GaussianLatents
from samplers import first_hitting
from sampling.denoise import guided_logits

NETWORK = BestNetwork()

# the condition: the latent of "she walks her dog", at a clock where it is mostly noise
CLOCK = torch.tensor([0.7])
Z = LATENTS[3][None, None]                                     # (1, 1, 2)
Z_T, _ = GaussianLatents(torch.ones(2)).corrupt(Z, CLOCK, torch.zeros(1, 1, 2))


def make_denoise(g):
    def denoise(tokens, t, positions, rows=None):
        B = len(tokens)

        def conditional():
            return NETWORK(tokens, Z_T.expand(B, 1, 2), None, CLOCK.expand(B), positions)[0]

        def unconditional():
            return NETWORK(tokens, None, None, None, positions)[0]
        return guided_logits(g, conditional, unconditional)
    return denoise


def entropy(p):
    return torch.special.entr(p).sum().item()


def main():
    found = {}

    # the sentences without the condition, and with it, by Bayes' rule
    p_u = PROBABILITIES
    p_c = posterior(torch.full((1, L), MASK), Z_T[:, 0], CLOCK)[0]
    print('g                     ' + ''.join(f'{head:>11}' for head in HEADS) + '   entropy')
    for g in (0.0, 1.0, 2.0, 4.0, 8.0):
        denoise = make_denoise(g)

        # what guidance would give if it were applied to whole texts, and not word by word
        tilted = p_c ** g * p_u ** (1 - g)
        rows = {'drawn': draw(first_hitting, L, denoise)[:4],
                'enumerated': law_of_first_hitting(L, denoise)[:4],
                'p_c^g p_u^(1-g)': tilted / tilted.sum()}
        for name, p in rows.items():
            start = f'{g:.0f}' if name == 'drawn' else ' '
            shares = ''.join(f'{x:11.3f}' for x in p)
            print(f'{start}  {name:19}{shares}{entropy(p):10.3f}')
        found[g] = rows
    return found


if __name__ == '__main__':
    main()
