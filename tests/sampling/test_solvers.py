""" Solvers of latents against closed forms: data whose denoiser is known. """
import numpy as np
import pytest
import torch

from diffusion import GaussianLatents
from sampling.solvers import SOLVERS, x0_and_e

PROCESSES = [('vp', 'v'), ('vp', 'x0'), ('vp', 'eps'), ('vp', 'rest'),
             ('rf', 'flow'), ('rf', 'x0'), ('rf', 'v')]

# data N(mu, diag(var)) has a known denoiser: x0 = mu + a var (z_t - a mu) / (a^2 var + s^2)
MU, VAR = torch.tensor([[1., -2.], [.25, 4.]], dtype=torch.float64)


@pytest.mark.parametrize('schedule, target', PROCESSES)
def test_conversions_round_trip_wherever_they_are_defined(schedule, target):
    latent = GaussianLatents(torch.ones(5), schedule, target)
    t = torch.linspace(0, 1, 11)
    if target in ('x0', 'rest'):
        t = t[1:]
    if target == 'eps':
        t = t[:-1]
    z, e = torch.randn(len(t), 1, 5), torch.randn(len(t), 1, 5)
    z_t, e = latent.corrupt(z, t, e)
    x0, e_hat = x0_and_e(latent, latent.target_of(z, e, t), z_t, t)
    assert torch.allclose(x0, z, atol=2e-5) and torch.allclose(e_hat, e, atol=2e-5)


def known_denoiser(latent):
    def denoise(z, t):
        a, s = latent.alpha_sigma(t)
        x0 = MU + a * VAR * (z - a * MU) / (a * a * VAR + s * s)
        return x0, (z - a * x0) / s
    return denoise


def solve(latent, solver, z, times, generator=None):
    memory, step = {}, SOLVERS[solver]
    times = torch.as_tensor(times, dtype=torch.float64)
    for t, s in zip(times, times[1:]):
        def noise():
            return torch.randn(z.shape, generator=generator, dtype=z.dtype)
        z = step(latent, z, t, s, known_denoiser(latent), memory, noise)
    return z


@pytest.mark.parametrize('schedule', ['vp', 'rf'])
@pytest.mark.parametrize('solver', SOLVERS)
def test_each_solver_reaches_mean_and_covariance_of_gaussian_data(schedule, solver):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(20_000, 1, 2, generator=g, dtype=torch.float64)
    latent = GaussianLatents(torch.ones(2), schedule)
    out = solve(latent, solver, z, torch.linspace(1, 0, 201), g)[:, 0]
    assert out.isfinite().all()
    assert torch.allclose(out.mean(0), MU, atol=.08)
    assert torch.allclose(out.T.cov(), torch.diag(VAR), atol=.25)


@pytest.mark.parametrize('schedule', ['vp', 'rf'])
@pytest.mark.parametrize('solver, order', [('ddim', 1), ('dpmpp_2m', 2), ('heun', 2)])
def test_solvers_converge_to_the_exact_flow_at_their_order(schedule, solver, order):
    latent = GaussianLatents(torch.ones(2), schedule)
    ends = torch.tensor([.95, .05], dtype=torch.float64)
    a, s = latent.alpha_sigma(ends)
    # the flow keeps w = (z - a mu) / sd
    w = torch.tensor([[[1., -1.]], [[.5, 2.]]], dtype=torch.float64)
    start, end = (a[i] * MU + (a[i] ** 2 * VAR + s[i] ** 2).sqrt() * w for i in (0, 1))
    n = [16, 32, 64, 128]
    errors = []
    for k in n:
        found = solve(latent, solver, start, torch.linspace(.95, .05, k + 1, dtype=torch.float64))
        errors.append((found - end).abs().max().item())
    slope = -np.polyfit(np.log(n), np.log(errors), 1)[0]
    assert abs(slope - order) < .25, (slope, errors)
