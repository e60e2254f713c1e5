"""
nelbo: how likely the network finds texts, and how well it predicts latents.

Measured, each where the run was trained for it
    nats_per_token          the exact bound on -log p(text | latent). Real tokens are counted (the
                            text and one EOS); the nats of PAD are in the total
    causal_nats_per_token   -log p of the text written from left to right, exact
    latent_mse              the squared error of x0 per dimension given the text, over uniform
                            clocks
Controls
    shuffled                another text's condition
    null                    noise at clock 1
"""
import math

import torch

from noise import normals, uniforms
from sampling.likelihood import taken, what_is_scored
from sampling.run import MAKES, Needs
from tasks.common import Figures, Task, progress_bar, with_controls
from tasks.measures import perplexity_of


def measure(run, ctx):
    learned = run.net.learned
    draws = ctx.knobs['draws']

    # by diffusion, and from left to right: a network may have learned both
    figures = Figures(ctx.n)
    if run.net.fills_masks and 'text' in run.net.streams:
        figures |= nelbo(run, ctx, draws)
    if run.net.is_causal:
        figures |= nelbo(run, ctx, draws=0)
    if learned & set(MAKES) and 'latent' in run.net.streams:
        figures |= latent_mse(run, ctx.tokens, ctx.raw, draws, ctx.knobs['seed'],
                              ctx.knobs['sample_batch'])
    return figures


def spread_clocks(seed, n, k, draws):
    """ The clocks (n,) of draw k: over the draws, those of a text cover (0, 1) evenly. """
    return (uniforms(seed, 0, 'evaluation clock', 0, n, 1)[:, 0] + k / draws) % 1


def conditions_of(run, raw, seed):
    """ {control: (standardised latents (n, N, D), their clock)}. Of text alone there is no
    control. """
    if raw is None or 'latent' not in run.net.model.config.streams:
        return {'': (None, 1.0)}

    # `null` is noise, drawn once: every draw of the bound reads the same
    noise = normals(seed, 0, 'evaluation latent', 0, *raw.shape) * run.stats.live
    return with_controls(run.stats.standardise(raw), noise, seed)


def nats_of(net, tokens, latents, clock, known_mask, draws, seed, batch, desc):
    """ Nats of each text (n,): the mean of so many draws of the bound on -log p, or with draws=0
    -log p itself, read from left to right. """
    n, L = tokens.shape

    # an exact likelihood is read once, a bound is a mean over draws
    n_readings = max(1, draws)
    nats = torch.zeros(n, dtype=torch.float64)
    with progress_bar(total=n * n_readings, desc=desc, unit='draw') as bar:
        for k in range(n_readings):
            # which positions are masked, and the clock
            u = None
            if draws:
                u = uniforms(seed, k, 'evaluation', 0, n, 1 + L)
                u[:, 0] = spread_clocks(seed, n, k, draws)

            for rows in torch.arange(n).split(batch):
                found = net.nats(tokens[rows], taken(latents, rows), clock, taken(u, rows),
                                 taken(known_mask, rows))
                nats[rows] += found / n_readings
                bar.update(len(rows))
    return nats


@torch.inference_mode()
def nelbo(run, ctx, draws):
    """ Figures: total nats / total real tokens, its standard error (of the ratio, over texts),
    perplexity, bits per byte. Of one text there is no shuffled control and no standard error.
    draws: of the bound; 0: exact, from left to right. """
    tokens = ctx.tokens
    seed = ctx.knobs['seed']
    prefix = '' if draws else 'causal_'
    known_mask, n_real = what_is_scored(run.net, tokens)
    n_bytes = sum(len(text.encode()) for text in ctx.texts)

    figures = Figures(ctx.n)
    for control, (latents, clock) in conditions_of(run, ctx.raw, seed).items():
        nats = nats_of(run.net, tokens, latents, clock, known_mask, draws, seed,
                       ctx.knobs['sample_batch'], f'{prefix}nats {control or "right"}')
        total = nats.sum().item()

        # bits per byte do not depend on the tokenizer, so models with other tokens compare
        bits_per_byte = math.nan
        if n_bytes:
            bits_per_byte = total / math.log(2) / n_bytes
        figures.enter(control, {
            f'{prefix}nats_per_token': (nats, n_real),
            f'{prefix}perplexity': perplexity_of(total, n_real.sum().item()),
            f'{prefix}bits_per_byte': bits_per_byte})
    return figures


@torch.inference_mode()
def latent_mse(run, tokens, raw, draws, seed, batch):
    """ Figures: E_t |x0_hat - z|^2 per live dimension, standardised, given the text; 1 is what
    the mean latent gets. """
    net = run.net
    live = run.stats.live
    n = len(tokens)
    z = run.stats.standardise(raw)
    all_masked = torch.where(net.ends(tokens), tokens, net.text.mask_id)

    # the texts, those of others, and texts of nothing but MASK
    figures = Figures(n)
    for control, (x, clock) in with_controls(tokens, all_masked, seed).items():
        error = torch.zeros(n)
        for k in range(draws):
            t = spread_clocks(seed, n, k, draws) * (1 - 1e-3)            # eps says nothing at t = 1
            e = normals(seed, k, 'evaluation latent', 0, *z.shape)
            for rows in torch.arange(n).split(batch):
                z_t, _ = net.latent.corrupt(z[rows].to(net.device), t[rows],
                                            e[rows].to(net.device))
                x0, _ = net.latent_at(x[rows].to(net.device), clock, z_t, t[rows])
                squared = (x0.cpu() - z[rows]).square() * live           # (B, N, D)
                error[rows] += squared.mean(1).sum(1) / live.sum() / draws
        figures.enter(control, {'latent_mse': error})
    return figures


TASK = Task(
    Needs(), ('draws',), measure,
    headlines=(('diffusion, nats, a bound', '', 'nats_per_token'),
               ('left to right, nats, exact', '', 'causal_nats_per_token')))
