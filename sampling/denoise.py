"""
The network as a sampler asks it: its dtype, one call, the rows of a call, guidance.

Guidance g mixes two predictions of the one network, with the condition (c) and with nothing (u):
its clock at 1, and noise or MASK in its place.
    text      log p = g log p_c + (1 - g) log p_u
    latents   x0 = g x0_c + (1 - g) x0_u, and e likewise

Letters: B rows of a batch, L text tokens, N latent vectors, D latent dims, P positions where the
head runs, V vocabulary.
"""
import torch

from corpora.tokenizers import RESIDUES
from diffusion import to_device
from runs.console import progress_bar

MOST_BYTES = 6 * 10 ** 9           # that a network call keeps for its rows
N_STANDARD = 20                    # residues that a protein is written of: the first of RESIDUES
# what stays float32: clocks, and where latents come in or pass by the blocks
IN_FLOAT32 = ('text_clock', 'latent_clock', 'latent_in', 'shortcut', 'bag', 'importance')

# -----------------------------------------------------------------------------
# The network

def cast(model, dtype):
    """ The model, with the weights of its products cast once to the dtype it computes in: autocast
    would cast them at every call. """
    for name, module in model.named_modules():
        is_product = isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
        if is_product and not name.startswith(IN_FLOAT32):
            module.to(getattr(torch, dtype))
    return model


def call(run, tokens, z, t_text, t_latent, positions=None, predict=('text',), cache=None):
    """ One call of the network: logits (P, V) float32 at the flat positions (P,), and the latent
    prediction (B, N, D); None for what is not predicted. Clocks are numbers or (B,). cache: a dict,
    where a process decodes step by step: then the logits are those of the last position, (B, V). """
    B = len(z if tokens is None else tokens)
    run.row_calls += B

    def clock(t):
        t = torch.as_tensor(t, dtype=torch.float32)
        return t.to(run.device, non_blocking=True).expand(B)

    # everything on the device; from the host this does not wait
    t_text = clock(t_text)
    t_latent = clock(t_latent)
    if cache is not None:
        found = run.next_token.decode_step(run.model, tokens, z, t_text, t_latent, cache)
        return found, None
    if positions is not None:
        positions = positions.to(run.device, non_blocking=True)
    return run.model(tokens, z, t_text, t_latent, positions, predict)


def rows_that_fit(run, batch, n_asked=0, n_caches=0):
    """ The rows of a network call: batch, or as many as MOST_BYTES hold, where these are fewer.
    n_asked: positions of a row at which the head runs. n_caches: of keys and values, where a text
    is written from left to right. """
    c = run.model.config

    # numbers of a row: 25 for each position and dimension are alive at the widest point of a block,
    # the MLP. A cache has two more in each block
    n_positions = c.seq_len + c.n_latents * c.latent_tokens
    numbers = n_positions * c.width * (25 + 2 * c.depth * n_caches)
    n_bytes = numbers * (2 if run.dtype == 'bfloat16' else 4)
    # eight tables of the vocabulary's width are alive where a token is drawn
    n_bytes += n_asked * run.text.mask_id * 8 * 4
    return max(1, min(batch, MOST_BYTES // n_bytes))


def batches(run, n, batch, n_asked=0, n_caches=0, is_watched=False):
    """ The slices of n rows that go through the network together. There is a progress bar
    where there are several, and nothing else is shown. """
    if n == 0:
        raise ValueError('expected at least one text or latent, found none')
    size = rows_that_fit(run, batch, n_asked, n_caches)
    with progress_bar(total=n, unit='row', disable=n <= size or is_watched) as bar:
        for first in range(0, n, size):
            part = slice(first, min(n, first + size))
            yield part
            bar.update(part.stop - part.start)


def null_latents(run, noise, purpose='null'):
    """ Latents (B, N, D) that say nothing: random numbers of these rows, for clock 1. """
    z = noise.normals(purpose, run.model.config.n_latents, run.model.config.latent_dim)
    return z.to(run.device) * run.latent.live


def at_clock(run, z, s):
    """ Latents as they are given, z + (sigma_s / alpha_s) e, as the network reads them at clock s,
    alpha_s z + sigma_s e. """
    alpha_s, _ = run.latent.alpha_sigma(torch.tensor(s))
    return alpha_s * z

# -----------------------------------------------------------------------------
# Guidance

def guided_logits(g, conditional, unconditional):
    """ log p = g log p_c + (1 - g) log p_u. Both are functions without arguments that give logits
    (P, V), by one network call each. A model that weighs nothing is not called. """
    if g == 1:
        return conditional()
    if g == 0:
        return unconditional()
    return g * conditional().log_softmax(-1) + (1 - g) * unconditional().log_softmax(-1)


def guided_latents(g, conditional, unconditional):
    """ The same for latents: the functions give x0 and e. """
    if g == 1:
        return conditional()
    if g == 0:
        return unconditional()
    x0_c, e_c = conditional()
    x0_u, e_u = unconditional()
    return g * x0_c + (1 - g) * x0_u, g * e_c + (1 - g) * e_u

# -----------------------------------------------------------------------------
# What a text sampler gets

def never_written(tokenizer, has_length):
    """ Ids (n,) that no sampler writes: the residues of a protein but the 20 standard ones, and EOS
    and PAD where the length of a text is given. """
    ids = []
    if tokenizer.kind == 'esm':
        ids += range(N_STANDARD, len(RESIDUES))
    if has_length:
        ids += [tokenizer.eos, tokenizer.pad]
    return torch.tensor(ids, dtype=torch.int64)


def allowed(run, logits, is_inner=None):
    """ The logits (P, V), in place, with -inf for the ids that are never written, and for EOS and
    PAD where is_inner (P,) is True. """
    # -inf is made on the device: for a number of the host the host would wait
    logits[:, run.banned] = logits.new_full((), -torch.inf)
    if is_inner is not None:
        penalty = torch.where(is_inner, -torch.inf, 0.0)
        for i in (run.tokenizer.eos, run.tokenizer.pad):
            logits[:, i] += penalty
    return logits


def make_denoise(run, g, condition, null, inner=None, is_causal=False, s=0.0):
    """ denoise(tokens, t, positions, rows) of samplers.py, with guidance g.
    condition, null (B, N, D): standardised latents, which stand at clock s, and noise in their
    place; None: there are none.
    inner (B, L): positions where EOS and PAD are not allowed.
    is_causal: the text is written from left to right, with a cache of keys and values. """
    cache_c = {} if is_causal else None
    cache_u = {} if is_causal else None

    def denoise(tokens, t, positions, rows=slice(None)):
        if isinstance(rows, torch.Tensor):
            rows = to_device(rows, tokens)

        def conditional():
            return call(run, tokens, condition[rows], t, s, positions, cache=cache_c)[0]

        def unconditional():
            z = None if null is None else null[rows]
            return call(run, tokens, z, t, 1.0, positions, cache=cache_u)[0]

        logits = guided_logits(g, conditional, unconditional)            # (P, V)
        is_inner = None
        if inner is not None:
            is_inner = inner[rows].flatten()[positions.to(run.device)]   # (P,)
        return allowed(run, logits, is_inner)
    return denoise
