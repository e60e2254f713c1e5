"""
Causal rows: text from left to right on the same network.

    -log p(x) = sum over i of -log p(x^i | x^<i)

The network reads such a row one position later, with MASK before the first token (model.py), and
a position sees only what is before it. Every token and the EOS are scored, PAD is not. Rows of the
mode `causal` stand alone (a decoder), or beside others that are masked: then one network writes
both ways. sampling/left_to_right.py writes.
Letters: B rows, L tokens, P scored positions.
"""
import math

import torch

from diffusion import nll_of, sum_over_texts


def causal_budget(lengths, rows, length, share):
    """ How many positions of causal rows are scored in a micro-batch, at most: the mean, plus five
    standard deviations of the sum of the lengths. Where not every row is causal, two rows more.
    lengths (n,): tokens of the training texts; length: L; share: of the rows that are causal. """
    n_scored = torch.as_tensor(lengths, dtype=torch.float64).clamp(max=length - 1) + 1
    mean = n_scored.mean().item()
    spread = 5 * math.sqrt(rows) * n_scored.std(correction=0).item()
    if share < 1:
        spread += 2 * mean
    return min(rows * length, math.ceil(rows * mean * share + spread))


@torch.no_grad()
def exact_nll(model, tokens, latents, t_latent):
    """ -log p of each text, nats per sample (B,), float64. tokens (B, L) and the result lie on the
    host; latents (B, N, D), at clock t_latent (B,), on the device. """
    B, V = len(tokens), model.config.vocab_size
    is_real = tokens != V - 1                                            # PAD is the last id
    return sum_over_texts(nll_of, model, V, tokens, latents, torch.zeros(B), t_latent, is_real,
                          tokens, n_causal=B)
