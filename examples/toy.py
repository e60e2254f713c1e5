"""
The toy world of these examples: four sentences, so few that every probability is a short sum.

    0.4  he eats his soup      0.3  she eats her soup      each has a latent z of two numbers:
    0.2  he walks his dog      0.1  she walks her dog      -1 he, +1 she; and -1 eats, +1 walks

The best network is known here. It weighs each sentence by how well it fits what is read:
    P(x | x_t, z_t)       ~  p(x) * [x fits the visible words of x_t] * N(z_t; alpha z, sigma^2)
    P(x^i = v | x_t, z_t) =  sum of P(x | x_t, z_t) over the sentences with the word v at place i
If no sentence fits, those with the fewest wrong words count.

Importing this module also lets Python find the modules of the project.
Letters: B rows, L places of a text, V words, P positions.
"""
import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diffusion import GaussianLatents

WORDS = ['he', 'she', 'eats', 'walks', 'his', 'her', 'soup', 'dog', '<eos>', '<pad>', '__']
L, V, MASK = 4, 10, 10                 # <eos> and <pad> are words that no sentence here uses


def ids(text):
    """ (L,): the ids of a text, as 'she __ her dog'. """
    return torch.tensor([WORDS.index(word) for word in text.split()])


# the four right sentences: their probabilities (4,), tokens (4, L), latents (4, 2)
HEADS = ['he eats', 'she eats', 'he walks', 'she walks']                 # enough to name them
SENTENCES = ['he eats his soup', 'she eats her soup', 'he walks his dog', 'she walks her dog']
PROBABILITIES = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
TOKENS = torch.stack([ids(sentence) for sentence in SENTENCES])
LATENTS = torch.tensor([[-1., -1.], [1., -1.], [-1., 1.], [1., 1.]])
ENTROPY = -(PROBABILITIES * PROBABILITIES.log()).sum().item()            # nats per sentence

# these two words at each place make 16 texts: the four sentences first, then 12 that are wrong
ALL = torch.tensor(list(itertools.product((0, 1), (2, 3), (4, 5), (6, 7))))
IS_RIGHT = (ALL[:, None] == TOKENS).all(2).any(1)
TEXTS = torch.cat([TOKENS, ALL[~IS_RIGHT]])                              # (16, L)


def posterior(tokens, z_t=None, t_latent=None):
    """ P(x | x_t, z_t) of the four sentences, (B, 4). tokens (B, L), z_t (B, 2), t_latent (B,). """
    # a sentence that contradicts a visible word weighs e^-50 for each: nearly 0
    seen = tokens[:, None]                                               # (B, 1, L)
    n_wrong = ((seen != TOKENS) & (seen != MASK)).sum(2)                 # (B, 4)
    log_p = PROBABILITIES.log() - 50 * n_wrong
    if z_t is not None:
        # and z_t is drawn around alpha_t times the latent of its sentence: Bayes' rule
        process = GaussianLatents(torch.ones(2))
        alpha_t, sigma_t = process.alpha_sigma(t_latent.double()[:, None])               # (B, 1)
        distance = (z_t[:, None] - alpha_t[:, None] * LATENTS).square().sum(2)           # (B, 4)
        log_p = log_p - distance / (2 * sigma_t.clamp(min=1e-3) ** 2)
    return log_p.softmax(1)


class BestNetwork:
    """ It is called as Model is. blur: how much of each prediction is spread over all V words. """

    def __init__(self, blur=0.0):
        self.blur = blur

    def __call__(self, tokens, latents, t_text, t_latent, positions=None, predict=('text',),
                 return_hidden=False):
        z_t = None if latents is None else latents[:, 0]

        # a word is as likely as the sentences that have it there
        has_word = F.one_hot(TOKENS, V).double()                         # (4, L, V)
        p = torch.einsum('bx,xlv->blv', posterior(tokens, z_t, t_latent), has_word)
        p = (1 - self.blur) * p + self.blur / V
        logits = p.clamp(min=1e-30).log().float()                        # (B, L, V)
        if positions is not None:
            logits = logits.flatten(0, 1)[positions]                     # (P, V)
        return logits, None

    def text_head(self, hidden):
        return hidden                  # its hidden states are its logits
