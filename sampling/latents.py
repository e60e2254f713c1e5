"""
Latents, made by diffusion: of texts, of nothing, or with a text of their own.
Letters: n texts, L text tokens, N latent vectors, D latent dims.
"""
from dataclasses import replace

import torch

from noise import Noise, rows_of
from samplers import no_callback
from sampling.denoise import guided_latents
from sampling.solvers import solve
from sampling.texts import blank, tidied, write


def settle_latents(net, knobs, from_text):
    """ SamplingKnobs in which solver, latent_steps and guidance are not left open. """
    # a vector made from a text is the mean of what fits it. A network that predicts eps says little
    # of that at clock 1
    is_embedding = from_text and net.model.config.n_latents == 1 and net.latent.target != 'eps'
    is_picture = from_text and net.model.config.spatial
    latent_steps = knobs.latent_steps or (1 if is_embedding else 8 if is_picture else 32)
    solver = knobs.solver or ('dpmpp_2m' if from_text else 'ancestral')

    # pictures become clearer with guidance, and less various
    guidance = knobs.guidance
    if guidance is None:
        guidance = 2.0 if is_picture else 1.0
    return replace(knobs, latent_steps=latent_steps, solver=solver, guidance=guidance)


@torch.inference_mode()
def make_latents(net, tokens, n, knobs, rows=None, known=None, given=None, on_step=no_callback):
    """ n standardised latents (n, N, D) of texts tokens (n, L), or of no text: tokens None. rows
    (n, 2): of noise.py, by default those of n sources. known (n, N, D): latents of which the
    vectors given (n, N) stay as they are; None: all are drawn. on_step(z): gets the noise of a
    batch, and then what the network thinks clean at each call (heun calls twice a step). """
    rows = rows_of(n) if rows is None else rows
    knobs = settle_latents(net, knobs, from_text=tokens is not None)
    g = 0 if tokens is None else knobs.guidance
    if tokens is None:
        tokens, _ = blank(net, n, knobs, rows=rows)
    out = []
    for part in net.batches(n, knobs.sample_batch):
        # the texts, and the same with every token MASK
        x = tokens[part].to(net.device)
        null = torch.where(net.ends(x), x, net.text.mask_id)

        # what is given of the latents
        clean = is_given = None
        if known is not None:
            clean = known[part].to(net.device)
            is_given = given[part].to(net.device)

        def with_given(z):
            return z if clean is None else torch.where(is_given[..., None], clean, z)

        def denoise(z, t):
            z = with_given(z)
            x0, e = guided_latents(
                g,
                conditional=lambda: net.latent_at(x, 0.0, z, t, is_given),
                unconditional=lambda: net.latent_at(null, 1.0, z, t, is_given))
            on_step(x0)
            return x0, e

        noise = Noise(knobs.seed, rows[part])
        z = net.nothing(noise, 'start')
        on_step(z)
        z = solve(net.latent, knobs.solver, z, knobs.latent_steps, denoise, noise)
        out.append(with_given(z).cpu())
    return torch.cat(out)


@torch.inference_mode()
def write_both(run, n, knobs, on_step=no_callback):
    """
    Text and latent from noise: tokens (n, L) and standardised latents (n, N, D). A latent is drawn
    as a plan, and is not kept: the text says it only in part.
        plan ~ p(z),    x = the likeliest text of the plan,    z ~ p(z | x)
    """
    # on the sphere, where latents lie there
    plan = make_latents(run.net, None, n, knobs)
    plan = run.stats.standardise(run.raw_latents(plan))

    knobs = replace(knobs, latent_clock=0.0)               # a plan has no errors
    tokens, known_mask = blank(run.net, n, knobs)
    tokens = write(run.net, tokens, known_mask, plan, knobs, on_step=on_step)
    tokens_read = tidied(run.net, tokens)
    z = make_latents(run.net, tokens_read, n, replace(knobs, seed=knobs.seed + 1))
    return tokens, z
