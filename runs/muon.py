"""
Muon (https://kellerjordan.github.io/posts/muon/), the update of torch.optim.Muon with
adjust_lr_fn='match_rms_adamw', for all matrices of one shape at once:

    m = 0.95 m + 0.05 g                                   the momentum, of the gradient g
    O = newton_schulz(0.95 m + 0.05 g)                    nearly U V^T of the SVD U S V^T
    w = (1 - lr decay) w - 0.2 sqrt(max(rows, columns)) lr O

The last factor gives O the size of an AdamW update (arXiv:2502.16982), so one rate fits both.
With iterations > 0, newton_schulz has the coefficients of Polar Express, which is another update.

torch.optim.Muon works matrix by matrix. Here the matrices of one shape are one batch: a tenth of
the launches. Each of many processes orthogonalises its share of a batch, and all gather the
results. The momentum is whole on every process, and a checkpoint is that of torch.optim.Muon.
"""
import torch
import torch.distributed as dist

from base.distributed import rank, world


MOMENTUM = 0.95

# (a, b, c) of each iteration s <- a s + b s^3 + c s^5
OF_TORCH = 5 * [(3.4445, -4.7750, 2.0315)]
# Polar Express: the best polynomials for singular values from 0.001 to 1, one after the other
# (arXiv:2505.16932, with its margin of 1 % for rounding)
POLAR_EXPRESS = [(a / 1.01, b / 1.01 ** 3, c / 1.01 ** 5) for a, b, c in [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673)]]


def newton_schulz(x, coefficients=OF_TORCH, dtype=torch.bfloat16, eps=1e-7):
    """ (n, rows, columns) -> the same, in dtype: each singular value s becomes nearly 1, by
    s <- a s + b s^3 + c s^5 for each (a, b, c). (After three of Polar Express .13 to 1.87, if it
    was .001 to 1.) """
    is_tall = x.shape[1] > x.shape[2]
    x = x.to(dtype)
    x = x.mT if is_tall else x                             # the products of rows are the small ones

    # no singular value is larger than the norm: divided by it all are at most 1, where the
    # polynomials work
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norms.clamp(min=eps)
    for a, b, c in coefficients:
        # a s + b s^3 + c s^5 of the singular values is a x + (b G + c G G) x with G = x x^T
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def share_of(n):
    """ The numbers of those of n matrices that this process works on. All shares have the same
    size: the last ones repeat the last matrix. """
    size = -(-n // world())
    return [min(i, n - 1) for i in range(rank() * size, (rank() + 1) * size)]


def gather_shares(mine, n):
    """ The n matrices of all processes' shares (size, rows, columns), in order. """
    found = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(found, mine.contiguous())

    # the last shares may repeat a matrix
    return torch.cat(found)[:n]


class Muon(torch.optim.Optimizer):

    def __init__(self, params, lr, weight_decay=0.1, iterations=0, dtype=torch.bfloat16):
        """ iterations: 0: the five of torch.optim.Muon; n: the first n of Polar Express. dtype: of
        the matrix products; torch.optim.Muon has bfloat16. found_inf: (), on the parameters'
        device; where it is 1, step() moves nothing. As in fused AdamW, the host does not wait. """
        self.dtype = dtype
        self.is_shared = world() > 1                       # by several processes
        self.found_inf = torch.zeros(())
        self.coefficients = POLAR_EXPRESS[:iterations] if iterations else OF_TORCH
        self.stacks = {}                                   # {shape: (momenta, its rows, whose)}
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):                          # torch passes None
        for group in self.param_groups:
            # matrices of one shape are updated together
            by_shape = {}
            for parameter in group['params']:
                if parameter.grad is not None:             # None: frozen in this stage
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self.step_of_shape(parameters, group['lr'], group['weight_decay'])

    def momenta_of(self, parameters):
        """ (n, rows, columns): the momentum of each is a row of one tensor. It is stacked anew only
        where momenta were loaded, or where other parameters have a gradient. """
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]['momentum_buffer'] = torch.zeros_like(parameter)

        # are they the rows that the last step has left?
        own = [self.state[parameter]['momentum_buffer'] for parameter in parameters]
        momenta, rows, owners = self.stacks.get(own[0].shape, (None, (), ()))
        if [*map(id, own)] != [*map(id, rows)]:
            # one row that is not stacked anew would keep the whole old stack in memory
            for parameter, row in zip(owners, rows):
                if self.state[parameter]['momentum_buffer'] is row:
                    self.state[parameter]['momentum_buffer'] = row.clone()
            momenta = torch.stack(own)
            rows = momenta.unbind()
            self.stacks[own[0].shape] = momenta, rows, parameters
            for parameter, row in zip(parameters, rows):
                self.state[parameter]['momentum_buffer'] = row
        return momenta

    def step_of_shape(self, parameters, lr, weight_decay):
        """ The update above, of the matrices of one shape. """
        n = len(parameters)
        longer_side = max(parameters[0].shape)
        # found_inf lies on the host until train.py sets it
        is_bad = self.found_inf.to(parameters[0].device) > 0

        # the momentum, an average of the gradients. In a bad step the gradient is replaced by the
        # momentum, so the average does not change
        momenta = self.momenta_of(parameters)
        gradients = torch.stack([parameter.grad for parameter in parameters])
        torch.where(is_bad, momenta, gradients, out=gradients)
        momenta.lerp_(gradients, 1 - MOMENTUM)

        # the updates: this process's share, then all
        looked_ahead = gradients.lerp_(momenta, MOMENTUM)
        if self.is_shared:
            looked_ahead = torch.stack([looked_ahead[i] for i in share_of(n)])
        updates = newton_schulz(looked_ahead, self.coefficients, self.dtype)
        if self.is_shared:
            updates = gather_shares(updates, n)

        # the step. In a bad one the updates are multiplied by 0, and the weights by 1
        is_good = (~is_bad).float()
        updates = torch.mul(updates, is_good.view(1, 1, 1), out=gradients)
        torch._foreach_mul_(parameters, torch.where(is_bad, 1.0, 1 - lr * weight_decay))
        torch._foreach_add_(parameters, updates.unbind(), alpha=-lr * 0.2 * longer_side ** 0.5)
