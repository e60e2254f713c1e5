"""
Solvers of the latents: from noise at t = 1 to a clean latent at t = 0. A solver is one step back,
from t to t_next. All have one signature:

    solver(latent, z, t, t_next, denoise, memory, noise) -> z at t_next

    latent          diffusion.GaussianLatents
    z (B, N, D)     the latents at t
    t, t_next       scalar tensors, float64 on the host
    denoise(z, t)   x0 and e, the network's prediction of the clean latent and of the noise
    memory          a dict that lives as long as the trajectory
    noise()         draws (B, N, D) ~ N(0, 1), for a solver that needs it

No solver calls the network at t = 0, and the last step ends exactly at z = x0.

Letters: B batch, N latent vectors, D latent dims.
"""
import math

import torch

from diffusion import to_device


def x0_and_e(latent, out, z_t, t):
    """
    The network's output as a clean latent and a noise. t (B,), or a scalar tensor.
    They solve  z_t = alpha_t x0 + sigma_t e,  out = a x0 + b e:
        d  = alpha_t b - sigma_t a
        x0 = (b z_t - sigma_t out) / d,    e = (alpha_t out - a z_t) / d
    With target x0 the noise at sigma_t = 0 is 0. With target eps there is no x0 at t = 1.
    """
    alpha_t, sigma_t = latent.alpha_sigma_like(t, z_t)
    a, b = latent.combination(alpha_t, sigma_t)
    d = alpha_t * b - sigma_t * a
    if latent.target == 'eps' and (alpha_t == 0).any():
        raise ValueError("latent_target='eps' says nothing at t=1, where the input is the "
                         'answer: start at t=0.999')
    d = torch.where(d == 0, torch.inf, d)                                # x / inf is 0

    # what the network says itself stays as it is
    x0 = out if latent.target == 'x0' else (b * z_t - sigma_t * out) / d
    e = out if latent.target == 'eps' else (alpha_t * out - a * z_t) / d
    return x0 * latent.live, e * latent.live


def ddim(latent, z, t, t_next, denoise, memory=None, noise=None):
    """ z_next = alpha_next x0 + sigma_next e. Order 1.              arXiv:2010.02502 """
    x0, e = denoise(z, t)
    alpha_next, sigma_next = latent.alpha_sigma(t_next)
    return alpha_next * x0 + sigma_next * e


def dpmpp_2m(latent, z, t, t_next, denoise, memory, noise=None):
    """
    Second order, from the x0 of this step and of the one before.    arXiv:2211.01095
        h        = log(alpha_next / sigma_next) - log(alpha_t / sigma_t)
        x0_ahead = x0 + (h / (2 h_before)) (x0 - x0_before)
        z_next   = (sigma_next / sigma_t) z - alpha_next (exp(-h) - 1) x0_ahead
    exp(-h) is 0 in the first step, where alpha_t = 0, and in the last, where sigma_next = 0.
    """
    x0, _ = denoise(z, t)
    alpha_t, sigma_t = latent.alpha_sigma(t)
    alpha_next, sigma_next = latent.alpha_sigma(t_next)

    exp_minus_h = (alpha_t * sigma_next) / (alpha_next * sigma_t)
    h = -torch.log(exp_minus_h)                                          # inf at both ends
    # in the second step h_before is inf, and the correction vanishes
    x0_ahead = x0
    if memory and t_next > 0:
        x0_ahead = x0 + (0.5 * h / memory['h']) * (x0 - memory['x0'])
    memory.update(x0=x0, h=h)
    return (sigma_next / sigma_t) * z - alpha_next * (exp_minus_h - 1) * x0_ahead


def heun(latent, z, t, t_next, denoise, memory=None, noise=None):
    """ dz/dt = alpha'(t) x0 + sigma'(t) e by the trapezoidal rule. Order 2.
    Two network calls per step, one in the last.                     arXiv:2206.00364 """
    x0, e = denoise(z, t)
    if t_next == 0:
        return x0
    velocity = velocity_of(latent, x0, e, t)

    # a step along the first velocity, then a step along the mean of the two
    x0, e = denoise(z + (t_next - t) * velocity, t_next)
    return z + (t_next - t) * 0.5 * (velocity + velocity_of(latent, x0, e, t_next))


def velocity_of(latent, x0, e, t):
    """ dz/dt = alpha'(t) x0 + sigma'(t) e, with x0 and e held fixed. """
    if latent.schedule == 'rf':
        return e - x0                                                    # alpha' = -1, sigma' = 1
    alpha_t, sigma_t = latent.alpha_sigma(t)
    return math.pi / 2 * (alpha_t * e - sigma_t * x0)                    # of the sines


def latent_ancestral(latent, z, t, t_next, denoise, memory=None, noise=None):
    """
    A draw of q(z_next | z_t, x0), as in DDPM.                       arXiv:2006.11239
        alpha_step = alpha_t / alpha_next
        var_step   = sigma_t^2 - alpha_step^2 sigma_next^2           of z_t given z_next
        mean       = (alpha_step sigma_next^2 z + alpha_next var_step x0) / sigma_t^2
        variance   = var_step sigma_next^2 / sigma_t^2
    """
    x0, _ = denoise(z, t)
    alpha_t, sigma_t = latent.alpha_sigma(t)
    alpha_next, sigma_next = latent.alpha_sigma(t_next)

    alpha_step = alpha_t / alpha_next
    var_step = (sigma_t ** 2 - alpha_step ** 2 * sigma_next ** 2).clamp(min=0)

    from_z = alpha_step * sigma_next ** 2 / sigma_t ** 2
    from_x0 = alpha_next * var_step / sigma_t ** 2
    mean = from_z * z + from_x0 * x0
    variance = var_step * sigma_next ** 2 / sigma_t ** 2
    return mean + torch.sqrt(variance) * noise() * latent.live


# the knob `solver`
SOLVERS = {
    'ddim': ddim,
    'dpmpp_2m': dpmpp_2m,
    'heun': heun,
    'ancestral': latent_ancestral,
}

# -----------------------------------------------------------------------------
# All steps

def latent_times(latent, steps):
    """ From 1 to 0. A network that predicts eps says nothing at t = 1, where its input is the
    answer. """
    first = 1 - 1e-3 if latent.target == 'eps' else 1
    return torch.linspace(first, 0, steps + 1, dtype=torch.float64)


def solve(latent, solver, z, steps, denoise, noise):
    """ z (B, N, D) from noise at t = 1 to a clean latent at t = 0. noise: noise.Noise of the rows.
    """
    def draw():
        return to_device(noise.normals('solver', *z.shape[1:]), z)

    step = SOLVERS[solver]
    times = latent_times(latent, steps)
    memory = {}
    for t, t_next in zip(times, times[1:]):
        z = step(latent, z, t, t_next, denoise, memory, draw)
    return z.float()
