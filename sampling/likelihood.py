"""
What the network says of a text. How likely it is, from a latent or from none: in nats, by the exact
law where the network writes from left to right, else by the bound. How likely each of its tokens
is.

Letters: n texts, L text tokens, N latent vectors, D latent dims, P positions, K draws of the bound.
"""
import torch

from diffusion import is_end, positions_of, rank_in_row, uniforms
from samplers import log_p_of, scatter_at
from sampling.denoise import at_clock, batches, call, null_latents, rows_that_fit
from sampling.noise import Noise, rows_of
from sampling.writing import ends_of, tidied

# -----------------------------------------------------------------------------
# A whole text

def what_is_scored(run, tokens):
    """ known_mask (n, L), or None where nothing is known; and the real tokens of each text (n,),
    float64: the text, and one EOS where that is predicted. """
    known_mask = ends_of(run, tokens) if run.lengths else None
    is_real = tokens != run.tokenizer.pad if known_mask is None else ~known_mask
    return known_mask, is_real.sum(1).double()


@torch.inference_mode()
def nats_per_token(run, tokens, z, knobs, draws=64):
    """
    How unlikely the network finds texts tokens (n, L), from standardised latents z (n, N, D) or
    from none: (n,) float64. A token is one of the text, or its EOS.
        nats = -log p(x | z)                      exact, where the run has learned mode=causal
        nats = 1/K sum over k of bound_k(x | z)   else: the bound of the task nelbo, K = draws
    All texts share their K draws of masked positions, and these spread the number of positions
    evenly, so that texts differ by what they say, not by luck. Only what `decode` reads counts:
    equal texts have equal nats, whatever stands behind their EOS (writing.tidied).
    """
    tokens = tidied(run, tokens)
    process = run.next_token or run.text
    if process is run.next_token:
        draws = 1
    known_mask, n_real = what_is_scored(run, tokens)

    # the same numbers for each text
    n, L = tokens.shape
    u = uniforms(knobs.seed, 0, 'evaluation', 0, draws, 1 + L)                 # (K, 1 + L)
    u[:, 0] = (torch.arange(draws) + 0.5) / draws
    latents, clock = z, 1.0
    if z is not None:
        latents, clock = at_clock(run, z, knobs.latent_clock), knobs.latent_clock
    elif 'latent' in run.streams:
        latents = null_latents(run, Noise(knobs.seed, rows_of(1))).expand(n, -1, -1)

    # a row for each draw of each text, some rows a call
    nats = torch.zeros(n, dtype=torch.float64)
    for row in torch.arange(n * draws).split(rows_that_fit(run, knobs.sample_batch)):
        text = row // draws
        draw = row % draws
        some_latents = None if latents is None else latents[text].to(run.device)
        some_known = None if known_mask is None else known_mask[text]
        run.row_calls += len(row)
        t_latent = torch.full((len(row),), clock, device=run.device)
        found = process.bound(run.model, tokens[text], some_latents, t_latent, u[draw], some_known)
        nats.index_add_(0, text, found.double() / draws)
    return nats / n_real.clamp(min=1)

# -----------------------------------------------------------------------------
# Its tokens

@torch.inference_mode()
def log_p_given_half(run, tokens, z, s, knobs, rows):
    """
    log p(x^i | z, half of the other tokens) of tokens (n, L), from standardised latents z
    (n, N, D) at clock s: (n, L) nats; inf for EOS and PAD that the run is given.
    The halves are drawn row by row, so the samples of a text come out differently. rows (n, 2): of
    noise.py.
    """
    z = at_clock(run, z, s)
    in_first_half = Noise(knobs.seed, rows).uniforms('half', tokens.shape[1]) < 0.5
    ends = ends_of(run, tokens)
    log_p = torch.zeros(tokens.shape).masked_fill(ends, torch.inf)

    # one call for each half, given the other
    for part in batches(run, len(tokens), knobs.sample_batch, run.L):
        for half in (in_first_half[part], ~in_first_half[part]):
            mask = half & ~ends[part]
            positions = positions_of(mask)                               # (P,)
            noisy = torch.where(mask, run.text.mask_id, tokens[part]).to(run.device)
            t = run.text.time_of_share(mask.double().mean(1))
            logits, _ = call(run, noisy, z[part].to(run.device), t, s, positions)
            x = tokens[part].flatten()[positions].to(run.device)
            scatter_at(log_p[part], positions, log_p_of(logits, x).cpu())
    return log_p


def changed_by(run, tokens, z_now, z, knobs, rows=None):
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
    gain = (log_p_given_half(run, tokens, z, knobs.latent_clock, knobs, rows)
            - log_p_given_half(run, tokens, z_now, 0.0, knobs, rows))         # (n, L): -loss
    is_text = ~is_end(tokens, run.tokenizer)
    n_changed = (knobs.strength * is_text.sum(1, keepdim=True)).ceil()   # (n, 1)
    return rank_in_row(gain.masked_fill(~is_text, torch.inf)) < n_changed
