"""
What the network says of a text. How likely it is, from a latent or from none: in nats, by the exact
law where the network writes from left to right, else by the bound. How likely each of its tokens
is.

Letters: n texts, L text tokens, N latent vectors, D latent dims, P positions, K draws of the bound.
"""
import torch

from diffusion import is_end, rank_in_row
from noise import Noise, rows_of, uniforms
from samplers import scatter_at
from sampling.texts import tidied

# -----------------------------------------------------------------------------
# A whole text

def taken(values, rows):
    """ These rows of a tensor; None where there is none. """
    return None if values is None else values[rows]


def what_is_scored(net, tokens):
    """ known_mask (n, L), or None where nothing is known; and the real tokens of each text (n,),
    float64: the text, and one EOS where that is predicted. """
    known_mask = net.ends(tokens) if net.lengths else None
    is_real = tokens != net.pad if known_mask is None else ~known_mask
    return known_mask, is_real.sum(1).double()


@torch.inference_mode()
def nats_per_token(net, tokens, z, knobs, draws=64):
    """
    How unlikely the network finds texts tokens (n, L), from standardised latents z (n, N, D) or
    from none: (n,) float64. A token is one of the text, or its EOS.
        nats = -log p(x | z)                      exact, where the run has learned mode=causal
        nats = 1/K sum over k of bound_k(x | z)   else: the bound of the task nelbo, K = draws
    All texts share their K draws of masked positions, and these spread the number of positions
    evenly, so that texts differ by what they say, not by luck. Only what `decode` reads counts:
    equal texts have equal nats, whatever stands behind their EOS (writing.tidied).
    """
    tokens = tidied(net, tokens)
    known_mask, n_real = what_is_scored(net, tokens)
    draws = 1 if net.is_causal else draws

    # the same numbers for each text
    n, L = tokens.shape
    u = uniforms(knobs.seed, 0, 'evaluation', 0, draws, 1 + L)                 # (K, 1 + L)
    u[:, 0] = (torch.arange(draws) + 0.5) / draws
    clock = 1.0
    if z is not None:
        clock = knobs.latent_clock
        z = net.at_clock(z, clock)
    elif 'latent' in net.streams:
        z = net.nothing(Noise(knobs.seed, rows_of(1))).expand(n, -1, -1)

    # a row for each draw of each text, some rows a call
    nats = torch.zeros(n, dtype=torch.float64)
    size = net.rows_that_fit(knobs.sample_batch)
    for row in torch.arange(n * draws).split(size):
        text = row // draws
        some_z = None if z is None else z[text]
        some_u = None if net.is_causal else u[row % draws]
        some_known = None if known_mask is None else known_mask[text]
        found = net.nats(tokens[text], some_z, clock, some_u, some_known)
        nats.index_add_(0, text, found / draws)
    return nats / n_real.clamp(min=1)

# -----------------------------------------------------------------------------
# Its tokens

@torch.inference_mode()
def log_p_given_half(net, tokens, z, s, knobs, rows):
    """
    log p(x^i | z, half of the other tokens) of tokens (n, L), from standardised latents z
    (n, N, D) at clock s: (n, L) nats; inf for EOS and PAD that the run is given.
    The halves are drawn row by row, so the samples of a text come out differently. rows (n, 2): of
    noise.py.
    """
    z = net.at_clock(z, s)
    in_first_half = Noise(knobs.seed, rows).uniforms('half', tokens.shape[1]) < 0.5
    ends = net.ends(tokens)
    log_p = torch.zeros(tokens.shape).masked_fill(ends, torch.inf)

    # one call for each half, given the other
    for part in net.batches(len(tokens), knobs.sample_batch, net.L):
        for half in (in_first_half[part], ~in_first_half[part]):
            mask = half & ~ends[part]
            positions, found = net.log_p_hidden(tokens[part], mask, z[part], s)
            scatter_at(log_p[part], positions, found)
    return log_p


def changed_by(net, tokens, z_now, z, knobs, rows=None):
    """
    Which positions of texts tokens (n, L) are to change where their standardised latents z_now
    (n, N, D) become z: (n, L) bool, those of the text (not EOS and PAD) whose tokens lose most,
    as many as a share of it, `strength`, at least one.
        loss_i = log p(x^i | z_now, half of the others) - log p(x^i | z, the same half)
    rows (n, 2): of noise.py, by default those of n sources.
    """
    rows = rows_of(len(tokens)) if rows is None else rows
    if knobs.length:
        raise ValueError(f'length={knobs.length}: an edit keeps the length of its text')
    log_p = log_p_given_half(net, tokens, z, knobs.latent_clock, knobs, rows)        # (n, L)
    log_p_now = log_p_given_half(net, tokens, z_now, 0.0, knobs, rows)

    # those of the smallest gain lose most; what is no text comes last
    is_text = ~is_end(tokens, net)
    gain = (log_p - log_p_now).masked_fill(~is_text, torch.inf)
    n_changed = (knobs.strength * is_text.sum(1, keepdim=True)).ceil()   # (n, 1)
    return rank_in_row(gain) < n_changed
