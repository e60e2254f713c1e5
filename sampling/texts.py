"""
Texts, written by a sampler: all that is MASK and not known is filled, batch by batch.

    tokens, known_mask = blank(net, 4, knobs)              # four texts of which nothing is known
    tokens = write(net, tokens, known_mask, None, knobs)   # from text alone
    tokens = write(net, tokens, known_mask, z, knobs)      # or from standardised latents

A text sampler is a function of samplers.py, or of the run's own text process.
Letters: n texts, B rows of a batch, L text tokens, N latent vectors, D latent dims.
"""
import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from diffusion import check_choice
from noise import Noise, rows_of
from samplers import SAMPLERS, in_blocks, make_propose, no_callback

# -----------------------------------------------------------------------------
# What is written, and what is known of it

def tidied(net, tokens):
    """ Texts (n, L) as training has them: no PAD inside, one EOS, and PAD behind it. `decode` reads
    the same in both. A run that is given its ends keeps them. """
    if net.lengths:
        return tokens
    eos, pad = net.eos, net.pad
    n_eos = (tokens == eos).cumsum(1)                                    # up to each position
    is_text = (n_eos == 0) & (tokens != pad)

    # the text first, in its order
    order = (~is_text).byte().argsort(dim=1, stable=True)
    tokens = tokens.gather(1, order)
    n_text = is_text.sum(1, keepdim=True)                                # (n, 1)
    column = torch.arange(tokens.shape[1])
    tokens = torch.where(column > n_text, pad, tokens)
    return torch.where(column == n_text, eos, tokens)


def blank(net, n, knobs, lengths_of=None, rows=None):
    """
    n texts of which nothing is known: tokens, all MASK, and known_mask, all False.
    Where the run does not learn lengths, EOS and PAD are known: after `length` tokens, or where the
    texts lengths_of (n, L) have them, or after a length drawn from the training texts'.
    rows (n, 2): of noise.py, by default those of n sources.
    """
    rows = rows_of(n) if rows is None else rows
    length = knobs.length
    tokens = torch.full((n, net.L), net.text.mask_id)
    if not net.lengths:
        if length:
            raise ValueError(f'length={length}: this run writes texts of its own length (it '
                             'was trained with predict_length=True)')
        return tokens, torch.zeros_like(tokens, dtype=torch.bool)
    if lengths_of is not None and not length:
        ends = net.ends(lengths_of)
        return torch.where(ends, lengths_of, net.text.mask_id), ends
    if length > net.L:
        raise ValueError(f'length={length}: this run writes at most {net.L} tokens')

    # as asked, or by a draw of the quantiles of the training texts' lengths
    if length:
        lengths = torch.full((n, 1), length)
    else:
        quantile = Noise(knobs.seed, rows).uniforms('length', 1)[:, 0].numpy()
        shares = np.linspace(0, 1, len(net.lengths))
        drawn = np.interp(quantile, shares, net.lengths).round()
        lengths = torch.from_numpy(drawn).long().clamp(min=1)[:, None]   # (n, 1)

    # MASK up to there, then an EOS and PAD
    column = torch.arange(net.L)
    known_mask = column >= lengths
    end = torch.where(column == lengths, net.eos, net.pad)
    return torch.where(known_mask, end, tokens), known_mask

# -----------------------------------------------------------------------------
# What the knobs leave open

def sampler_of(net, name):
    """ The Sampler that a knob names. ValueError where the network cannot be sampled so. """
    if name == 'autoregressive':
        if not net.is_causal:
            raise ValueError(f'sampler={name}: this run was trained without causal rows '
                             '(mode=l2t+causal)')
        return SAMPLERS[name]

    # all others fill masks, and a process may have its own
    if not net.fills_masks:
        raise ValueError(f'sampler={name} fills masks: this run was trained for mode=causal alone')
    table = net.text.samplers or SAMPLERS
    check_choice('sampler', name, table)
    return table[name]


def settle(net, knobs, from_latent=False, from_text=False, must_differ=False):
    """
    The Sampler, and SamplingKnobs in which nothing is left open: which sampler, how many steps,
    which temperature, which guidance.
    from_latent, from_text   what is read: a latent, and a text or a part of it
    must_differ              more than one text of a source is wanted, and they shall differ
    """
    # which sampler? From left to right where the run has learned it and no part of the text is
    # given, or it can do nothing else. Else confidence, which seeks the likeliest text, where
    # there is something to write from, and ancestral, which draws a sample, where there is not.
    # Text processes other than MaskedText have samplers of their own: there it is ancestral
    has_source = from_latent or from_text
    name = knobs.sampler
    if not name and net.is_causal and not (from_text and net.fills_masks):
        name = 'autoregressive'
    elif not name and net.text.samplers is None and has_source:
        name = 'confidence'
    name = name or 'ancestral'
    sampler = sampler_of(net, name)

    # which temperature? Samplers that do not seek the likeliest text draw from the model: 1. The
    # others take 0, the likeliest text, where there is something to write from; but where more than
    # one text of a source is wanted, these shall differ. From left to right a text without a latent
    # is drawn as well, and drafts need a lower temperature than by diffusion, as each token is
    # given all that is before it
    are_drafts = knobs.rerank > 1 and from_latent and not from_text
    if not sampler.seeks:
        temperature = 1.0
    elif are_drafts and sampler.is_causal:
        temperature = 0.4
    elif must_differ:
        temperature = 0.7
    elif sampler.is_causal and not from_latent:
        temperature = 1.0
    else:
        temperature = 0.0
    if knobs.temperature is not None:
        temperature = knobs.temperature
    steps = knobs.steps or sampler.steps or net.L
    guidance = 1.0 if knobs.guidance is None else knobs.guidance
    return sampler, replace(knobs, sampler=name, steps=steps, temperature=temperature,
                            guidance=guidance)


def check_together(net, knobs, sampler):
    """ ValueError for settled knobs that exclude each other. """
    if knobs.by_importance and knobs.sampler != 'confidence':
        raise ValueError(f'by_importance goes with sampler=confidence, not with {knobs.sampler}')
    if knobs.threshold < 1 and knobs.sampler != 'confidence':
        raise ValueError(f'threshold={knobs.threshold} goes with sampler=confidence, not with '
                         f'{knobs.sampler}')
    if knobs.threshold < 1 and (knobs.by_importance or knobs.prefer == 'uncertain'):
        raise ValueError(f'threshold={knobs.threshold}: the most certain tokens come first; leave '
                         'by_importance and prefer out')
    if knobs.by_importance and not net.model.importance:
        raise ValueError('by_importance: this run was not trained with text_process=atat')
    if knobs.self_correct and not net.text.corrects:
        raise ValueError(f'self_correct={knobs.self_correct}: only a run with text_process=gidd '
                         'takes back what it wrote')
    if knobs.block_size and (net.text.samplers or sampler.is_causal):
        raise ValueError('block_size is of masked text')


def asked_of_a_row(net, sampler, steps):
    """ The most positions of a row, about, at which one call of the network asks for logits. """
    if sampler.is_causal:
        return 1
    if sampler.asks_few:
        # a schedule unmasks up to about twice the mean in a step
        twice = math.ceil(2 * net.L / steps)
        return min(net.L, twice)
    return net.L

# -----------------------------------------------------------------------------
# Writing

@torch.inference_mode()
def write(net, tokens, known_mask, z, knobs, inner=None, must_differ=False, on_step=no_callback,
          rows=None):
    """
    Fills the MASKs of tokens (n, L) that are not in known_mask (n, L), from standardised latents
    z (n, N, D), or from text alone: z None. Returns tokens (n, L).
    knobs: SamplingKnobs. inner (n, L): positions where EOS and PAD are not allowed.
    must_differ: some rows are equal, as more than one text of a source is wanted, and shall not get
    equal texts.
    rows (n, 2): as noise.rows_of gives them, by default those of n sources.
    on_step(tokens, logits, positions): of samplers.py. For each batch it is also called before the
    first step, without logits.
    """
    rows = rows_of(len(tokens)) if rows is None else rows

    # some texts may have known tokens besides EOS and PAD, and others none. For these two kinds
    # another sampler or temperature may be chosen (settle), so each kind is written by itself
    from_text = (known_mask & ~net.ends(tokens)).any(1)                  # (n,)
    if from_text.any() and not from_text.all():
        out = tokens.clone()
        for these in (from_text, ~from_text):
            some_z = None if z is None else z[these]
            some_inner = None if inner is None else inner[these]
            out[these] = write(net, tokens[these], known_mask[these], some_z, knobs, some_inner,
                               must_differ, on_step, rows[these.numpy()])
        return out

    # which sampler; it gets all knobs, and reads those that are among its own arguments
    sampler, knobs = settle(net, knobs, z is not None, bool(from_text.any()), must_differ)
    check_together(net, knobs, sampler)
    if knobs.beams > 1:
        raise ValueError(f'beams={knobs.beams}: beams search for a whole text from a given latent '
                         '(mode=l2t): leave beams out')
    more = {name: value for name, value in vars(knobs).items() if name != 'steps'}
    sample = partial(sampler.function, **more, ends=(net.eos, net.pad))
    if knobs.by_importance:
        sample = partial(sample, importance=lambda x: net.model.importance(x)[0].float())
    if knobs.block_size:
        sample = in_blocks(sample, knobs.block_size)
    propose = make_propose(knobs.temperature, knobs.nucleus)

    # guidance, and the caches of keys and values that it takes
    g = 0 if z is None else knobs.guidance
    n_caches = 0
    if sampler.is_causal:
        n_caches = 1 if g in (0, 1) else 2
    n_asked = asked_of_a_row(net, sampler, knobs.steps)

    # batch by batch
    if z is not None and knobs.latent_clock:
        z = net.at_clock(z, knobs.latent_clock)
    is_watched = on_step is not no_callback
    out = []
    for part in net.batches(len(tokens), knobs.sample_batch, n_asked, n_caches, is_watched):
        x = tokens[part].to(net.device)
        noise = Noise(knobs.seed, rows[part])
        denoise = net.given(
            z=None if z is None else z[part].to(net.device),
            s=knobs.latent_clock,
            # with g = 1 nothing is asked without the condition. It is drawn once for each text
            null=None if g == 1 else net.nothing(noise),
            guidance=g,
            inner=None if inner is None else inner[part].to(net.device),
            is_causal=sampler.is_causal)
        if is_watched:
            on_step(x)
        x = sample(denoise, propose, net.text, x, known_mask[part], knobs.steps, noise, on_step)
        out.append(x.cpu())
    return torch.cat(out)
