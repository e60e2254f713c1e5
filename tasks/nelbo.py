"""
nelbo: the exact bound on -log p(text | latent), nats per real token (text and one EOS; the nats of
PAD are in the total). latent_mse: the squared error of x0 per dimension given the text, over
uniform clocks. causal_nats_per_token: -log p of the text written from left to right, exact, where
the run learned that beside. Each for the modes that the run was trained for.
Controls: shuffled, another text's condition; null, noise at clock 1.
"""
import math

import torch

from diffusion import normals, uniforms
from sampling.loading import trained_for
from sampling.denoise import call
from sampling.directions import FILLS, MAKES
from sampling.likelihood import bound_of, what_is_scored
from sampling.solvers import x0_and_e
from sampling.writing import ends_of
from tasks.common import TaskNeeds, derangement, enter, progress_bar

NEEDS = TaskNeeds()
SETTINGS = ('draws',)


def measure(run, ctx):
    learned = trained_for(run)
    draws, seed, batch = (ctx.knobs[name] for name in ('draws', 'seed', 'sample_batch'))
    results = {'draws': draws, 'n': ctx.n}
    arguments = (ctx.texts, ctx.tokens, ctx.raw, draws, seed, batch)
    if learned & set(FILLS) and 'text' in run.streams:
        results |= nelbo(run, *arguments)
    if 'causal' in learned:
        found = nelbo(run, *arguments, process=run.next_token, name='causal nats')
        for key, value in found.items():
            control, slash, metric = key.rpartition('/')
            if metric not in ('draws', 'n'):
                results[f'{control}{slash}causal_{metric}'] = value
    if learned & set(MAKES) and 'latent' in run.streams:
        results |= latent_mse(run, ctx.tokens, ctx.raw, draws, seed, batch)
    return results


def spread_clocks(seed, n, k, draws):
    """ The clocks (n,) of draw k: over the draws, those of a text cover (0, 1) evenly. """
    return (uniforms(seed, 0, 'evaluation clock', 0, n, 1)[:, 0] + k / draws) % 1


def conditions_of(run, raw, n, seed):
    """ {control: (standardised latents (n, N, D), their clock)}; the key '' is the right condition.
    A run of text alone has no controls, and one text has no shuffled one. """
    if raw is None or 'latent' not in run.model.config.streams:
        return {'': (None, 1.0)}

    z = run.stats.standardise(raw)
    noise = normals(seed, 0, 'evaluation latent', 0, n, *raw.shape[1:]) * run.stats.live
    conditions = {'': (z, 0.0)}
    if n > 1:
        conditions['shuffled/'] = (z[derangement(n, seed)], 0.0)
    conditions['null/'] = (noise, 1.0)
    return conditions


@torch.inference_mode()
def nelbo(run, texts, tokens, raw, draws, seed, batch, process=None, name='nelbo'):
    """ {key: value}: total nats / total real tokens, its standard error (of the ratio, over texts),
    perplexity, bits per byte. Of one text there is no shuffled control and no standard error. """
    n, L = tokens.shape
    process = process or run.text
    if process is run.next_token:              # it is no draw, but -log p
        draws = 1
    known_mask, n_real = what_is_scored(run, tokens)
    n_bytes = sum(len(text.encode()) for text in texts)

    results = {'draws': draws, 'n': n}
    for control, (latents, clock) in conditions_of(run, raw, n, seed).items():
        nats = torch.zeros(n, dtype=torch.float64)
        line = f'{name} {control.rstrip("/") or "right"}'
        with progress_bar(total=n * draws, desc=line, unit='draw') as bar:
            for k in range(draws):
                u = uniforms(seed, k, 'evaluation', 0, n, 1 + L)
                u[:, 0] = spread_clocks(seed, n, k, draws)
                for i in range(0, n, batch):
                    rows = slice(i, i + batch)
                    found = bound_of(run, process, rows, tokens, latents, clock, u, known_mask)
                    nats[rows] += found / draws
                    bar.update(len(nats[rows]))

        enter(results, control, {'nats_per_token': (nats, n_real)})
        perplexity = math.exp(results[f'{control}nats_per_token'])
        bits_per_byte = nats.sum().item() / math.log(2) / n_bytes
        enter(results, control, {'perplexity': perplexity, 'bits_per_byte': bits_per_byte})
    return results


@torch.inference_mode()
def latent_mse(run, tokens, raw, draws, seed, batch):
    """ {key: value}: E_t |x0_hat - z|^2 per live dimension, standardised, given the text; 1 is what
    the mean latent gets. """
    n = len(tokens)
    z = run.stats.standardise(raw)
    live = run.stats.live

    # {control: (tokens, their clock)}
    all_masked = torch.where(ends_of(run, tokens), tokens, run.text.mask_id)
    conditions = {'': (tokens, 0.0)}
    if n > 1:
        conditions['shuffled/'] = (tokens[derangement(n, seed)], 0.0)
    conditions['null/'] = (all_masked, 1.0)

    results = {}
    for control, (x, clock) in conditions.items():
        error = torch.zeros(n)
        for k in range(draws):
            t = spread_clocks(seed, n, k, draws) * (1 - 1e-3)            # eps says nothing at t = 1
            e = normals(seed, k, 'evaluation latent', 0, n, *z.shape[1:])
            for i in range(0, n, batch):
                rows = slice(i, i + batch)
                z_t, _ = run.latent.corrupt(z[rows].to(run.device), t[rows], e[rows].to(run.device))
                out = call(run, x[rows].to(run.device), z_t, clock, t[rows], predict=('latent',))[1]
                x0, _ = x0_and_e(run.latent, out, z_t, t[rows])
                squared = (x0.cpu() - z[rows]).square() * live           # (B, N, D)
                error[rows] += squared.mean(1).sum(1) / live.sum() / draws
        enter(results, control, {'latent_mse': error})
    return results
