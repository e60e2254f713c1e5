"""
Latents, made by diffusion: of texts, of nothing, or with a text of their own.
Letters: n texts, L text tokens, N latent vectors, D latent dims.
"""
from dataclasses import replace

import torch

from samplers import no_callback
from sampling.denoise import batches, call, guided_latents, null_latents
from sampling.knobs import settle
from sampling.noise import Noise, rows_of
from sampling.solvers import solve, x0_and_e
from sampling.writing import blank, ends_of, tidied, write


@torch.inference_mode()
def make_latents(run, tokens, n, knobs, rows=None):
    """ n standardised latents (n, N, D) of texts tokens (n, L), or of no text: tokens None. rows
    (n, 2): of noise.py, by default those of n sources. """
    rows = rows_of(n) if rows is None else rows
    knobs = settle(run, knobs, from_text=tokens is not None)
    g = 0 if tokens is None else knobs.guidance
    if tokens is None:
        tokens, _ = blank(run, n, knobs, rows=rows)
    out = []
    for part in batches(run, n, knobs.sample_batch):
        # the texts, and the same with every token MASK
        x = tokens[part].to(run.device)
        null = torch.where(ends_of(run, x), x, run.text.mask_id)

        def denoise(z, t):
            def beside(tokens, t_text):
                prediction = call(run, tokens, z, t_text, t, predict=('latent',))[1]
                return x0_and_e(run.latent, prediction, z, t)
            return guided_latents(g, lambda: beside(x, 0.0), lambda: beside(null, 1.0))

        noise = Noise(knobs.seed, rows[part])
        z = null_latents(run, noise, 'start')
        z = solve(run.latent, knobs.solver, z, knobs.latent_steps, denoise, noise)
        out.append(z.cpu())
    return torch.cat(out)


@torch.inference_mode()
def write_both(run, n, knobs, on_step=no_callback):
    """
    Text and latent from noise: tokens (n, L) and standardised latents (n, N, D). A latent is drawn
    as a plan, and is not kept: the text says it only in part.
        plan ~ p(z),    x = the likeliest text of the plan,    z ~ p(z | x)
    """
    # on the sphere, where latents lie there
    plan = make_latents(run, None, n, knobs)
    plan = run.stats.standardise(run.raw_latents(plan))

    knobs = replace(knobs, latent_clock=0.0)               # a plan has no errors
    tokens, known_mask = blank(run, n, knobs)
    tokens = write(run, tokens, known_mask, plan, knobs, on_step=on_step)
    z = make_latents(run, tidied(run, tokens), n, replace(knobs, seed=knobs.seed + 1))
    return tokens, z
