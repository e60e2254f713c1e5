"""
What GIDD+ and HDLM share: a loss and a bound that are sums of an integrand over all places of a text.

    loss   = sum over places of weight * integrand(log p, x, z, t)
    bound  = E_t,z sum over places of integrand(log p, x, z, t)     nats per sample

Letters: B rows, L tokens, P scored positions, V vocabulary, p the positions of one piece.
"""
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from diffusion import is_right, positions_of

# ---- methods of more than one class

def one(self, t):
    """ loss_weight: all weights are in the integrand. """
    return torch.ones_like(t)


PIECE = {'cpu': 2 ** 22}                                                 # numbers in a table (p, V); 2^26 elsewhere


def integral_loss(self, hidden, head, targets, weight, seen, t):
    """ MaskedText.loss of self.integrand(log_p (P, V), x, z, t), (P,). seen (P,): what the network read there; t (P,): its row's clock.
    Some places at a time, whose float32 tables (p, V) are made anew in the backward pass: two to four of all would fill the memory. """
    used, size = weight > 0, max(1, PIECE.get(hidden.device.type, 2 ** 26) // len(head))
    t = torch.where(used, t.double(), 0.5).clamp(1e-6, 1 - 1e-6)         # at the ends 0 * inf would be the gradient of an unused place

    def part(hidden, targets, seen, t):
        # a view: else autocast casts the head once for all pieces, and their gradients add up in bfloat16
        log_p = F.linear(hidden, head.view_as(head)).log_softmax(1, dtype=torch.float32)     # (p, V)
        value, nll = self.integrand(log_p, targets, seen, t, self.training_weight), -log_p.detach().gather(1, targets[:, None]).squeeze(1)
        return value, is_right(nll, -log_p.detach().amax(1), len(head))
    pieces = zip(*(x.split(size) for x in (hidden, targets, seen, t)))
    value, right = (torch.cat(x) for x in zip(*(checkpoint(part, *x, use_reentrant=False, preserve_rng_state=False) for x in pieces)))
    return torch.where(used, weight * value, 0).sum(), value.detach(), right


@torch.no_grad()
def integral_bound(self, model, tokens, latents, t_latent, u, given=None):
    """ One draw, nats per sample (B,), float64, over all of (0, 1): t = y^3 (10 - 15 y + 6 y^2), y the first column of u (B, 1 + L),
    weighed by dt/dy = 30 y^2 (1 - y)^2. With t uniform the variance is infinite: near 0 a wrong token weighs 1/t and has a probability of
    sqrt(t). """
    y, L = u[:, 0].double(), tokens.shape[1]
    t, slope = (y ** 3 * (10 - 15 * y + 6 * y * y)).clamp(1e-12, 1 - 1e-12), 30 * (y * (1 - y)) ** 2
    seen, scored = self.corrupt(tokens, t, u[:, 1:], given)
    positions = positions_of(scored)
    logits, _ = model(seen, latents, t.float(), t_latent, positions, predict=('text',))
    x, z, row = tokens.flatten()[positions], seen.flatten()[positions], positions // L
    value = torch.zeros(len(positions), dtype=torch.float64, device=tokens.device)
    for i in torch.arange(len(positions), device=tokens.device).split(max(1, 2 ** 24 // logits.shape[1])):     # or float64 fills the memory
        value[i] = self.integrand(logits[i].double().log_softmax(1), x[i], z[i], t[row[i]])
    return torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device).index_add_(0, row, value * slope[row])
