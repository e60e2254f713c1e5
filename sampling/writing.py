"""
Texts, written by a sampler: all that is MASK and not known is filled, batch by batch.

    tokens, known_mask = blank(run, 4, knobs)              # four texts of which nothing is known
    tokens = write(run, tokens, known_mask, None, knobs)   # from text alone
    tokens = write(run, tokens, known_mask, z, knobs)      # or from standardised latents

A text sampler is a function of samplers.py, or of the run's own text process.
Letters: n texts, B rows of a batch, L text tokens, N latent vectors, D latent dims.
"""
from functools import partial

import numpy as np
import torch

from diffusion import MaskedText, check_choice, is_end
from samplers import SAMPLERS, in_blocks, make_propose, no_callback
from sampling.denoise import at_clock, batches, make_denoise, null_latents
from sampling.knobs import TEXT_KNOBS, settle
from sampling.noise import Noise, rows_of

# -----------------------------------------------------------------------------
# What is written, and what is known of it

def ends_of(run, tokens):
    """ (n, L): EOS and PAD, where the run is given them. """
    return is_end(tokens, run.tokenizer) & bool(run.lengths)


def tidied(run, tokens):
    """ Texts (n, L) as training has them: no PAD inside, one EOS, and PAD behind it. `decode` reads
    the same in both. A run that is given its ends keeps them. """
    if run.lengths:
        return tokens
    eos, pad = run.tokenizer.eos, run.tokenizer.pad
    is_text = ((tokens == eos).cumsum(1) == 0) & (tokens != pad)

    # the text first, in its order
    order = (~is_text).byte().argsort(dim=1, stable=True)
    tokens = tokens.gather(1, order)
    n_text = is_text.sum(1, keepdim=True)                                # (n, 1)
    column = torch.arange(tokens.shape[1])
    tokens = torch.where(column > n_text, pad, tokens)
    return torch.where(column == n_text, eos, tokens)


def blank(run, n, knobs, lengths_of=None, rows=None):
    """
    n texts of which nothing is known: tokens, all MASK, and known_mask, all False.
    Where the run does not learn lengths, EOS and PAD are known: after `length` tokens, or where the
    texts lengths_of (n, L) have them, or after a length drawn from the training texts'.
    rows (n, 2): of noise.py, by default those of n sources.
    """
    rows = rows_of(n) if rows is None else rows
    length = knobs.length
    tokens = torch.full((n, run.L), run.text.mask_id)
    if not run.lengths:
        if length:
            raise ValueError(f'length={length}: {run.out_dir} writes texts of its own length (it '
                             'was trained with predict_length=True)')
        return tokens, torch.zeros_like(tokens, dtype=torch.bool)
    if lengths_of is not None and not length:
        ends = ends_of(run, lengths_of)
        return torch.where(ends, lengths_of, run.text.mask_id), ends
    if length > run.L:
        raise ValueError(f'length={length}: {run.out_dir} writes at most {run.L} tokens')

    # as asked, or by a draw of the quantiles of the training texts' lengths
    if length:
        lengths = torch.full((n, 1), length)
    else:
        quantile = Noise(knobs.seed, rows).uniforms('length', 1)[:, 0].numpy()
        shares = np.linspace(0, 1, len(run.lengths))
        drawn = np.interp(quantile, shares, run.lengths).round()
        lengths = torch.from_numpy(drawn).long().clamp(min=1)[:, None]   # (n, 1)

    # MASK up to there, then an EOS and PAD
    column = torch.arange(run.L)
    end = torch.where(column == lengths, run.tokenizer.eos, run.tokenizer.pad)
    return torch.where(column < lengths, tokens, end), column >= lengths

# -----------------------------------------------------------------------------
# Which sampler

def pick_sampler(run, knobs):
    """ The sampler that settled knobs name, and the text process that it samples. ValueError where
    the run has not learned it, and for knobs that exclude each other. """
    name = knobs.sampler
    process = run.text
    if name == 'autoregressive':
        process = run.next_token
        if process is None:
            raise ValueError(f'sampler={name}: {run.out_dir} was trained without causal rows '
                             '(mode=l2t+causal)')
    elif not run.fills_masks:
        raise ValueError(f'sampler={name} fills masks: {run.out_dir} was trained for '
                         'mode=causal alone')
    table = getattr(process, 'samplers', SAMPLERS)                       # it may have its own
    check_choice('sampler', name, table)
    check_together(run, knobs, table)

    # with all knobs: a sampler reads those that it names
    more = {knob: getattr(knobs, knob) for knob in TEXT_KNOBS if knob != 'steps'}
    more['ends'] = run.tokenizer.eos, run.tokenizer.pad
    if knobs.by_importance:
        more['importance'] = lambda tokens: run.model.importance(tokens)[0].float()
    sampler = partial(table[name], **more)
    return in_blocks(sampler, knobs.block_size) if knobs.block_size else sampler, process


def asked_of_a_row(run, knobs):
    """ At how many positions of a row, about, a call asks for logits at most. """
    asks_where_it_unmasks = knobs.sampler in ('ancestral', 'cached', 'first_hitting')
    if isinstance(run.text, MaskedText) and asks_where_it_unmasks:
        # a schedule unmasks up to about twice the mean in a step
        return min(run.L, -(-2 * run.L // knobs.steps))
    return run.L


def check_together(run, knobs, table):
    """ ValueError for knobs that exclude each other. table: the samplers of the process. """
    if knobs.by_importance and knobs.sampler != 'confidence':
        raise ValueError(f'by_importance goes with sampler=confidence, not with {knobs.sampler}')
    if knobs.by_importance and not run.model.importance:
        raise ValueError(f'by_importance: {run.out_dir} was not trained with text_process=atat')
    if knobs.self_correct and not hasattr(run.text, 'correct'):
        raise ValueError(f'self_correct={knobs.self_correct}: only a run with text_process=gidd '
                         'takes back what it wrote')
    if knobs.block_size and table is not SAMPLERS:
        raise ValueError('block_size is of masked text')

# -----------------------------------------------------------------------------
# Writing

@torch.inference_mode()
def write(run, tokens, known_mask, z, knobs, inner=None, several=False, on_step=no_callback,
          rows=None):
    """
    Fills the MASKs of tokens (n, L) that are not in known_mask (n, L), from standardised latents
    z (n, N, D), or from text alone: z None. Returns tokens (n, L).
    knobs: SamplingKnobs. inner (n, L): positions where EOS and PAD are not allowed.
    several: equal rows are among them, and shall not get equal texts.
    rows (n, 2): of noise.py, by default those of n sources.
    on_step(tokens, logits, positions): of samplers.py. For each batch it is also called before the
    first step, without logits.
    """
    rows = rows_of(len(tokens)) if rows is None else rows

    # of which texts is a part known, not the length alone? Their knobs may be settled otherwise
    from_text = (known_mask & ~ends_of(run, tokens)).any(1)              # (n,)
    if from_text.any() and not from_text.all():
        out = tokens.clone()
        for these in (from_text, ~from_text):
            some_z, some_inner = (None if x is None else x[these] for x in (z, inner))
            out[these] = write(run, tokens[these], known_mask[these], some_z, knobs, some_inner,
                               several, on_step, rows[these.numpy()])
        return out
    knobs = settle(run, knobs, z is not None, bool(from_text.any()), several)
    sampler, process = pick_sampler(run, knobs)

    # guidance, and the caches of keys and values that it takes
    g = knobs.guidance if z is not None else 0
    is_causal = process is run.next_token
    n_caches = 0
    if is_causal:
        n_caches = 1 if g in (0, 1) else 2
    n_asked = 1 if is_causal else asked_of_a_row(run, knobs)

    # batch by batch
    z = None if z is None else at_clock(run, z, knobs.latent_clock)
    propose = make_propose(knobs.temperature, knobs.nucleus)
    out = []
    for part in batches(run, len(tokens), knobs.sample_batch, n_asked, n_caches,
                        on_step is not no_callback):
        x = tokens[part].to(run.device)
        condition, is_inner = (None if rows is None else rows[part].to(run.device)
                               for rows in (z, inner))
        noise = Noise(knobs.seed, rows[part])
        null = None
        if 'latent' in run.streams:                                      # one draw per text, kept
            null = null_latents(run, noise)
        denoise = make_denoise(run, g, condition, null, is_inner, is_causal,
                               knobs.latent_clock)
        on_step(x)
        x = sampler(denoise, propose, process, x, known_mask[part], knobs.steps, noise, on_step)
        out.append(x.cpu())
    return torch.cat(out)
