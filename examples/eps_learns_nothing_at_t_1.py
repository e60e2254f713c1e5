"""
Why a network that predicts the noise (eps) learns nothing at t = 1.

At t = 1 the input is the noise itself. A network that is asked for the noise copies its input, and
its loss is 0 whatever the text says: the text is worth nothing. But t = 1 is where sampling starts,
and there all must come from the text. Asked for the clean latent (x0) or for v, the network has to
read the text, and a text that is shuffled costs. A low loss is no proof that anything was learned.

    z_t = alpha z + sigma e,   v = alpha e - sigma z,   latent z = what the text says + the rest
    error of the best network, with Var = 1 if it does not read the text, and VAR_REST if it does:
    x0: S = Var sigma^2 / (alpha^2 Var + sigma^2)      eps: S alpha^2 / sigma^2      v: S / sigma^2

    python examples/eps_learns_nothing_at_t_1.py      fits the best linear network without and with
the text, at some t, on 50,000 draws. It prints the errors, and the formula's below each.
"""
import torch

import toy                             # it lets Python find the modules of the project
from diffusion import GaussianLatents
from sampling.solvers import x0_and_e

DRAWS = 50_000
VAR_REST = 0.2                         # of z, which has variance 1: 0.8 of it is in the text
TARGETS = ('eps', 'x0', 'v')


def fitted_error(target, t):
    """ Squared error of the best linear prediction of the target, without and with the text. """
    latent = GaussianLatents(torch.ones(1), target=target)
    text = (1 - VAR_REST) ** 0.5 * torch.randn(DRAWS, 1, 1)
    z = text + VAR_REST ** 0.5 * torch.randn(DRAWS, 1, 1)
    t = torch.full((DRAWS,), t)
    z_t, e = latent.corrupt(z, t, torch.randn(DRAWS, 1, 1))
    goal = latent.target_of(z, e, t)

    errors = []
    for read in ([z_t], [z_t, text]):
        inputs = torch.cat(read, 2)[:, 0]                      # (DRAWS, 1 or 2)
        weight = torch.linalg.lstsq(inputs, goal[:, 0]).solution
        out = (inputs @ weight)[:, None]
        errors.append(latent.loss(out, goal, torch.ones(DRAWS))[0].item())
    return errors


def exact_error(target, t):
    """ The formulas above, without and with the text. """
    alpha, sigma = GaussianLatents(torch.ones(1)).alpha_sigma(torch.tensor(t, dtype=torch.float64))
    errors = []
    for var in (1.0, VAR_REST):
        of_x0 = var * sigma ** 2 / (alpha ** 2 * var + sigma ** 2)
        factor = {'x0': 1.0, 'eps': alpha ** 2 / sigma ** 2, 'v': 1 / sigma ** 2}[target]
        errors.append(float(of_x0 * factor))
    return errors


def main():
    torch.manual_seed(0)
    found = {}
    print('error of the target, without the text > with the text')
    print('t                ' + ''.join(f'{target:>14}     ' for target in TARGETS))
    for t in (0.1, 0.5, 0.9, 0.99, 1.0):
        for name, error in (('fitted', fitted_error), ('exact', exact_error)):
            pairs = found[name, t] = {target: error(target, t) for target in TARGETS}
            start = f'{t:<9}' if name == 'fitted' else ' ' * 9
            row = ''.join(f'{a:10.3f} > {b:.3f} ' for a, b in pairs.values())
            print(f'{start}{name:8}{row}'.rstrip())

    # and so the project refuses to start from there
    z, one = torch.randn(1, 1, 1), torch.ones(1)
    try:
        x0_and_e(GaussianLatents(one, target='eps'), z, z, one)
    except ValueError as error:
        found['refused'] = str(error)
        print(f'ValueError: {error}')
    return found


if __name__ == '__main__':
    main()
