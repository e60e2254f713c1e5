"""
What GIDD+ and HDLM share: a loss and a bound that sum an integrand over all scored positions of a
text.

    loss  = sum over positions of  weight * integrand(log p, x, z, t)
    bound = E_t,z  sum over positions of  integrand(log p, x, z, t)        nats per sample

x is the clean token, z what the network reads there, t the clock, p the network's prediction of x.
The integrand knows the clock by a few coefficients, such as log alpha_t. The host computes them in
float64: near t = 0 and t = 1 float32 has too few digits, and not every device has float64. The
device gets them in float32.
Letters: B rows, L tokens, P scored positions, C width, V vocabulary, p positions of one chunk, n
coefficients.
"""
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from diffusion import TextProcess, filled_up, in_chunks, sum_over_texts


class IntegralProcess(TextProcess):
    """
    Base class. A process has `loss_weight` (the kind of its loss), `corrupt`, and
        coefficients(t (B,) float64, kind) -> (B, n) float64
        integrand(log_p (P, V), x (P,), z (P,), coefficients (P, n)) -> (P,) nats
    """

    def training_weight(self, t):
        """ 1: the integrand holds all weights. """
        return torch.ones_like(t)

    def loss_coefficients(self, t):
        """ What `loss` needs of the clocks t (B,), on the host: (B, n) float32. Nearer to an end of
        (0, 1) float32 has too few digits. """
        t = t.double().clamp(1e-6, 1 - 1e-6)
        return self.coefficients(t, self.loss_weight).float()

    def loss(self, hidden, head, targets, weight, seen, coefficients):
        """ loss = sum over p of weight_p * integrand_p
        hidden (P, C); head (V, C), logits = hidden head^T; targets, weight (P,);
        seen (P,): what the network read there; coefficients (P, n): of loss_coefficients, those of
        its row.
        Returns the loss, the integrand (P,), and right (P,) bool, as MaskedText.loss does.

        It works on one chunk of positions at a time, and the backward pass computes the float32
        tables (p, V) again. To keep two to four tables of all positions would fill the memory. """
        rows, bias = filled_up(head)

        def chunk_of_loss(hidden, targets, seen, coefficients):
            # A view: autocast would cast the head itself once for all chunks, and the gradients of
            # the chunks would add up in bfloat16
            logits = F.linear(hidden, rows.view_as(rows), bias)
            log_p = logits.log_softmax(1, dtype=torch.float32)[:, :len(head)]    # (p, V)
            value = self.integrand(log_p, targets, seen, coefficients)
            return value, logits.argmax(1) == targets

        compute_twice = partial(checkpoint, chunk_of_loss, use_reentrant=False,
                                preserve_rng_state=False)
        value, right = in_chunks(compute_twice, hidden, targets, seen, coefficients,
                                 V=len(head))
        return (weight * value).sum(), value.detach(), right

    @torch.no_grad()
    def bound(self, model, tokens, latents, t_latent, u, known_mask=None):
        """ One draw of the bound, nats per sample (B,), float64, with t over all of (0, 1):
            t = y^3 (10 - 15 y + 6 y^2),   dt/dy = 30 y^2 (1 - y)^2,   y ~ U(0, 1)
        With t itself uniform the variance would be infinite: near t = 0 a wrong token has the
        weight 1/t and a probability of about sqrt(t).
        u (B, 1 + L) uniform: its first column is y. What lies where is as in MaskedText.bound. """
        y = u[:, 0].double()
        t = (y ** 3 * (10 - 15 * y + 6 * y * y)).clamp(1e-12, 1 - 1e-12)     # (B,)
        slope = 30 * (y * (1 - y)) ** 2                                      # dt/dy, (B,)
        seen, scored = self.corrupt(tokens, t, u[:, 1:], known_mask)
        coefficients = self.coefficients(t, 'bound').float()                 # (B, n)
        coefficients = coefficients[:, None].expand(-1, tokens.shape[1], -1)

        def integrand(logits, x, z, coefficients):
            return self.integrand(logits.log_softmax(1), x, z, coefficients)
        return slope * sum_over_texts(integrand, model, self.mask_id, seen, latents, t, t_latent,
                                      scored, tokens, seen, coefficients)
