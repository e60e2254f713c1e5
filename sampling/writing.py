"""
Texts, written by a sampler: all that is MASK and not known is filled, batch by batch.

    tokens, known_mask = blank(run, 4)                     # four texts of which nothing is known
    tokens = write(run, tokens, known_mask, None)          # from text alone
    tokens = write(run, tokens, known_mask, z)             # or from standardised latents

A text sampler is a function of samplers.py, or of the run's own text process.
Letters: n texts, B rows of a batch, L text tokens, N latent vectors, D latent dims.
"""
import inspect
from functools import partial

import numpy as np
import torch

from data import is_end
from diffusion import MaskedText, check_choice
from samplers import SAMPLERS, in_blocks, make_propose, no_callback
from sampling.denoise import batches, make_denoise, null_latents
from sampling.knobs import SamplingKnobs

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


def blank(run, n, length=0, seed=0, lengths_of=None):
    """
    n texts of which nothing is known: tokens, all MASK, and known_mask, all False.
    Where the run does not learn lengths, EOS and PAD are known: where the texts lengths_of (n, L)
    have them, or after `length` tokens, or after a length drawn from the training texts'.
    """
    tokens = torch.full((n, run.L), run.text.mask_id)
    if not run.lengths:
        if length:
            raise ValueError(f'length={length}: {run.out_dir} writes texts of its own length (it '
                             'was trained with predict_length=True)')
        return tokens, torch.zeros_like(tokens, dtype=torch.bool)
    if lengths_of is not None:
        ends = ends_of(run, lengths_of)
        return torch.where(ends, lengths_of, run.text.mask_id), ends

    if not 0 <= length <= run.L:
        raise ValueError(f'length={length}: {run.out_dir} writes at most {run.L} tokens')

    # as asked, or by a draw of the quantiles of the training texts' lengths
    if length:
        lengths = torch.full((n, 1), length)
    else:
        quantile = np.random.default_rng(seed).random(n)
        drawn = np.interp(quantile, np.linspace(0, 1, len(run.lengths)), run.lengths).round()
        lengths = torch.from_numpy(drawn).long().clamp(min=1)[:, None]   # (n, 1)

    # MASK up to there, then an EOS and PAD
    column = torch.arange(run.L)
    end = torch.where(column == lengths, run.tokenizer.eos, run.tokenizer.pad)
    return torch.where(column < lengths, tokens, end), column >= lengths

# -----------------------------------------------------------------------------
# Which sampler

def default_sampler(run, has_latents, some_known):
    """ The likeliest text where there is something to write from, else a sample. """
    if run.next_token and not (some_known and run.fills_masks):
        return 'autoregressive'
    # processes other than MaskedText have ancestral alone
    seeks_likely = isinstance(run.text, MaskedText) and (has_latents or some_known)
    return 'confidence' if seeks_likely else 'ancestral'


def default_temperature(name, has_latents, several):
    """ 0, the likeliest text, where there is something to write from; but several texts of one
    source shall differ. Other samplers than these two draw from the model: 1. """
    if name not in ('autoregressive', 'confidence'):
        return 1.0
    if several:
        return 0.7
    return 0.0 if name == 'confidence' or has_latents else 1.0


def choose_sampler(run, knobs, has_latents, some_known=False, several=False):
    """ The text process that is sampled, and its sampler with the knobs that it has. What was left
    open in knobs is entered there: sampler, steps, temperature. ValueError where the run has not
    learned it, and for knobs that exclude each other. """
    name = knobs.sampler = knobs.sampler or default_sampler(run, has_latents, some_known)
    if knobs.temperature is None:
        knobs.temperature = default_temperature(name, has_latents, several)
    call_per_token = name in ('confidence', 'reparam', 'first_hitting')
    knobs.steps = knobs.steps or (run.L if call_per_token else 128)

    # the process, which may have samplers of its own
    process = run.text
    if name == 'autoregressive':
        process = run.next_token
        if process is None:
            raise ValueError(f'sampler={name}: {run.out_dir} was trained without causal rows '
                             '(mode=l2t+causal)')
    elif not run.fills_masks:
        raise ValueError(f'sampler={name} fills masks: {run.out_dir} was trained for '
                         'mode=causal alone')
    table = getattr(process, 'samplers', SAMPLERS)
    check_choice('sampler', name, table)
    check_together(run, knobs, table)

    # the sampler, with those of its keywords that are knobs
    sampler = table[name]
    keywords = inspect.signature(sampler).parameters
    more = {knob: value for knob, value in vars(knobs).items()
            if knob in keywords and knob != 'steps'}
    if name == 'confidence':
        more['ends'] = (run.tokenizer.eos, run.tokenizer.pad)
    if knobs.by_importance:
        more['importance'] = lambda tokens: run.model.importance(tokens)[0].float()
    sampler = partial(sampler, **more)
    if knobs.block_size:
        sampler = in_blocks(sampler, knobs.block_size)
    return process, sampler


def check_together(run, knobs, table):
    """ ValueError for knobs that exclude each other. table: the samplers of the process. """
    if knobs.by_importance and knobs.sampler != 'confidence':
        raise ValueError(f'by_importance goes with sampler=confidence, not with {knobs.sampler}')
    if knobs.by_importance and not run.model.importance:
        raise ValueError(f'by_importance: {run.out_dir} was trained with importance=none')
    if knobs.self_correct and not hasattr(run.text, 'correct'):
        raise ValueError(f'self_correct={knobs.self_correct}: only a run with text_process=gidd '
                         'takes back what it wrote')
    if knobs.block_size and table is not SAMPLERS:
        raise ValueError('block_size is of masked text')

# -----------------------------------------------------------------------------
# Writing

def generators(run, seed):
    """ One on the host, which decides what is unmasked, and one on the device, for the rest. On a
    CPU they are the same. """
    rng = torch.Generator().manual_seed(seed)
    if torch.device(run.device).type == 'cpu':
        return rng, rng
    return rng, torch.Generator(run.device).manual_seed(seed)


@torch.inference_mode()
def write(run, tokens, known_mask, z, seed=0, batch=128, inner=None, several=False,
          on_step=no_callback, **sampling):
    """
    Fills the MASKs of tokens (n, L) that are not in known_mask (n, L), from standardised latents
    z (n, N, D), or from text alone: z None. Returns tokens (n, L).
    inner (n, L): positions where EOS and PAD are not allowed.
    several: equal rows are among them, and shall not get equal texts.
    on_step(tokens, logits, positions): of samplers.py. For each batch it is also called before the
    first step, without logits.
    """
    if 'text' not in run.streams:
        raise ValueError(f'{run.out_dir} has no text stream: nothing to write')
    knobs = SamplingKnobs(**sampling)
    some_known = bool((known_mask & ~ends_of(run, tokens)).any())        # more than its length
    process, sampler = choose_sampler(run, knobs, z is not None, some_known, several)

    # guidance, and the caches of keys and values that it takes
    g = knobs.guidance if z is not None else 0
    is_causal = process is run.next_token
    n_caches = 0
    if is_causal:
        n_caches = 1 if g in (0, 1) else 2

    # batch by batch
    rng, device_rng = generators(run, seed)
    propose = make_propose(knobs.temperature, knobs.nucleus, device_rng)
    out = []
    for part in batches(run, len(tokens), batch, n_caches, on_step is not no_callback):
        x = tokens[part].to(run.device)
        condition, is_inner = (None if rows is None else rows[part].to(run.device)
                               for rows in (z, inner))
        null = None
        if 'latent' in run.streams:                                      # one draw per text, kept
            null = null_latents(run, len(x), device_rng)
        denoise = make_denoise(run, g, condition, null, is_inner, is_causal)
        on_step(x)
        x = sampler(denoise, propose, process, x, known_mask[part], knobs.steps, rng, on_step)
        out.append(x.cpu())
    return torch.cat(out)
