"""
Texts, written by a sampler: all that is MASK and not known is filled, batch by batch.

    tokens, known_mask = blank(run, 4)                     # four texts of which nothing is known
    tokens = write(run, tokens, known_mask, None)          # from text alone
    tokens = write(run, tokens, known_mask, z)             # or from standardised latents

A text sampler is a function of samplers.py, or of the run's own text process.
Letters: n texts, B rows of a batch, L text tokens, N latent vectors, D latent dims.
"""
import numpy as np
import torch

from data import is_end
from diffusion import MaskedText
from corpora.lsa import no_progress
from sampling.unmasking import no_observer
from samplers import make_propose, make_sampler, no_callback
from sampling.denoise import make_denoise, null_latents, rows_that_fit
from sampling.knobs import sampling_knobs

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
    place = torch.arange(tokens.shape[1])
    tokens = torch.where(place > n_text, pad, tokens)
    return torch.where(place == n_text, eos, tokens)


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

def process_of(run, sampling):
    """ The text process that the sampler belongs to. ValueError where the run has not learned
    it. """
    name = sampling['sampler']
    if name == 'autoregressive':
        if run.next_token is None:
            raise ValueError(f'sampler={name}: {run.out_dir} was trained without causal rows '
                             '(mode=l2t+causal)')
        return run.next_token
    if not run.fills_masks:
        raise ValueError(f'sampler={name} fills masks: {run.out_dir} was trained for '
                         'mode=causal alone')
    return run.text


def default_sampler(run, has_latents, some_known):
    """ The likeliest text where there is something to write from, else a sample. """
    if run.next_token and not (some_known and run.fills_masks):
        return 'autoregressive'
    # processes other than MaskedText have ancestral alone
    seeks_likely = isinstance(run.text, MaskedText) and (has_latents or some_known)
    return 'confidence' if seeks_likely else 'ancestral'


def text_sampler(run, sampling):
    """ (sampler, its knobs, temperature) of the text knobs, as samplers.make_sampler gives
    them. """
    sampler, knobs, temperature = make_sampler(sampling, process_of(run, sampling))
    if 'end_penalty' in knobs:
        knobs['ends'] = (run.tokenizer.eos, run.tokenizer.pad)
    if sampling['by_importance']:
        if not run.model.importance:
            raise ValueError(f'by_importance: {run.out_dir} was trained with importance=none')
        knobs['importance'] = lambda tokens: run.model.importance(tokens)[0].float()
    return sampler, knobs, temperature

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
def write(run, tokens, known_mask, z, seed=0, batch=128, inner=None, on_step=no_callback,
          observe=no_observer, progress=no_progress, i_round=0, **sampling):
    """
    Fills the MASKs of tokens (n, L) that are not in known_mask (n, L), from standardised latents
    z (n, N, D), or from text alone: z None. Returns tokens (n, L).
    inner (n, L): positions where EOS and PAD are not allowed.
    observe(denoise, tokens, first, i_round): a denoise in its place, which looks on
    (sampling/unmasking.py); first is the row at which the batch begins, i_round is not 0 where
    texts are mended.
    """
    sampling = sampling_knobs(sampling)

    # what the run can write, and the defaults of what is not asked for
    if 'text' not in run.streams:
        raise ValueError(f'{run.out_dir} has no text stream: nothing to write')
    if not sampling['sampler']:
        some_known = bool((known_mask & ~ends_of(run, tokens)).any())    # more than its length
        sampling['sampler'] = default_sampler(run, z is not None, some_known)
    text = process_of(run, sampling)
    is_causal = text is run.next_token
    if is_causal and z is not None and sampling['temperature'] < 0:
        sampling['temperature'] = 0.0

    # the sampler, and what it costs
    sampler, knobs, temperature = text_sampler(run, sampling)
    calls_per_token = sampling['sampler'] in ('confidence', 'reparam', 'first_hitting')
    steps = sampling['steps'] or (run.L if calls_per_token else 128)
    g = sampling['guidance'] if z is not None else 0
    n_caches = 0
    if is_causal:
        n_caches = 1 if g in (0, 1) else 2
    batch = rows_that_fit(run, batch, n_caches)

    # batch by batch
    rng, device_rng = generators(run, seed)
    out = []
    for first in range(0, len(tokens), batch):
        part = slice(first, first + batch)
        x = tokens[part].to(run.device)
        condition = None if z is None else z[part].to(run.device)
        null = None
        if 'latent' in run.streams:                                      # one draw per text, kept
            null = null_latents(run, len(x), device_rng)
        denoise = make_denoise(run, g, condition, null,
                               None if inner is None else inner[part].to(run.device), is_causal)
        denoise = observe(denoise, x, first, i_round)
        propose = make_propose(temperature, sampling['nucleus'], device_rng)
        x = sampler(denoise, propose, text, x, known_mask[part], steps, rng, on_step, **knobs)
        out.append(x.cpu())
        progress(len(x))
    return torch.cat(out)
