"""
orders: the likelihoods that a masked network gives a text when it is written one position at a
time, in nats per real token (text and one EOS). As in nelbo, the nats of PAD are in the total.
Controls: shuffled, another text's latent; null, noise at clock 1.

An order sigma says which position gets its token at which step. The network gives each order a
likelihood, and the orders differ unless the network is perfect:

    log p_sigma(x) = sum over k of log p(x^sigma_k | x^sigma_1 .. x^sigma_k-1, the rest is MASK)
    p_mix(x)       = E_sigma p_sigma(x),    sigma uniform over all orders
                     The sampler first_hitting, at temperature 1, writes texts of this law.

    nats_left_to_right  -log p_sigma(x) of the order 1..L, exact: above or below -log p_mix(x)
    nats_plain_bound    1/K sum over k of -log p_sigma_k(x), K random orders. It estimates an upper
                        bound on -log p_mix(x), which is the bound of nelbo.
    nats_iw_bound       -log [ 1/K sum over k of p_sigma_k(x) ], the same K orders: the importance-
                        weighted bound (IWAE arXiv:1509.00519, orders arXiv:2506.01928).
                        E[plain bound] >= E[iw bound] >= -log p_mix(x), and it falls as K grows.
K is the knob n_orders. Positions that the run knows (EOS and PAD of a run that does not learn
lengths) are visible from the start and are not scored. The text clock is as in MaskedText.bound.
Letters: n texts, K orders, L text tokens, B rows of a call, N latent vectors, D latent dimensions.
"""
import math

import torch

from diffusion import rank_in_row
from noise import uniforms
from sampling.likelihood import taken, what_is_scored
from sampling.run import FILLS, Needs
from tasks.common import Figures, Task, progress_bar
from tasks.nelbo import conditions_of


@torch.inference_mode()
def measure(run, ctx):
    seed = ctx.knobs['seed']
    tokens = ctx.tokens
    known_mask, n_real = what_is_scored(run.net, tokens)
    conditions = conditions_of(run, ctx.raw, seed)
    steps = draw_steps(tokens, known_mask, ctx.knobs['n_orders'], seed)

    figures = Figures(ctx.n)
    for control, (latents, clock) in conditions.items():
        nats = nats_of_orders(run, tokens, latents, clock, steps,
                              ctx.knobs['sample_batch'])

        # the nats of each text, (n,): the first order is from left to right
        of_order = nats.sum(2)                                           # (n, 1 + K)
        totals = {'nats_left_to_right': of_order[:, 0],
                  'nats_plain_bound': of_order[:, 1:].mean(1),
                  'nats_iw_bound': iw_bound(of_order[:, 1:])}
        figures.enter(control, {metric: (nats, n_real) for metric, nats in totals.items()})
    return figures


def draw_steps(tokens, known_mask, K, seed):
    """ (n, 1 + K, L): the step 0, 1, .. at which a position gets its token, from left to right and
    in K random orders of each text; -1 where the token is known. """
    n, L = tokens.shape
    # the positions of small numbers come first
    numbers = [torch.arange(L, dtype=torch.float64).expand(n, L)]
    for k in range(K):
        numbers.append(uniforms(seed, k, 'evaluation', 0, n, 1 + L)[:, 1:])        # as nelbo's
    if known_mask is None:
        known_mask = torch.zeros(n, L, dtype=torch.bool)
    steps = [rank_in_row(u.masked_fill(known_mask, torch.inf)) for u in numbers]
    return torch.stack(steps, 1).masked_fill(known_mask[:, None], -1)


def nats_of_orders(run, tokens, latents, clock, steps, batch):
    """
    -log p(x^i | the positions of earlier steps), nats (n, K, L), float64 on the host; 0 where the
    token is known. Their sum over L is -log p_sigma(x).
    tokens (n, L); latents (n, N, D) or None, at this clock; steps (n, K, L) of K orders, from
    draw_steps; batch: rows of a call. """
    L = tokens.shape[1]
    nats = torch.zeros(steps.shape, dtype=torch.float64)

    # all rows are known beforehand, so every call but the last is full
    rows = (steps >= 0).nonzero()
    for part in progress_bar(rows.split(batch), desc='orders', unit='call'):
        text, order, position = part.T                                   # (B,) each

        # a position is masked before its step, and this row is read just before the step of the
        # position that it scores
        now = steps[text, order, position]                               # (B,)
        mask = steps[text, order] >= now[:, None]                        # (B, L)
        positions = torch.arange(len(part)) * L + position               # in the flattened B * L
        _, log_p = run.net.log_p_hidden(tokens[text], mask, taken(latents, text), clock, positions)
        nats[text, order, position] = -log_p.double()
    return nats


def iw_bound(nats):
    """ -log [ 1/K sum over k of exp(-nats_k) ], (n,) from the nats (n, K) of K orders. """
    K = nats.shape[1]
    return math.log(K) - torch.logsumexp(-nats, 1)


TASK = Task(
    Needs(('text',), (FILLS,), masked_text=True), ('n_orders',), measure)
