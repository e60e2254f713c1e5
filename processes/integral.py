"""
What GIDD+ and HDLM share: a loss and a bound that sum an integrand over all scored places of a
text.

    loss  = sum over places of  weight * integrand(log p, x, z, t)
    bound = E_t,z  sum over places of  integrand(log p, x, z, t)        nats per sample

x is the clean token, z what the network reads there, t the clock, p the network's prediction of x.
The integrand knows the clock by a few coefficients, such as log alpha_t. The host computes them in
float64: near t = 0 and t = 1 float32 has too few digits, and not every device has float64. The
device gets them in float32.
Letters: B rows, L tokens, P scored places, C width, V vocabulary, p places of one chunk, n
coefficients.
"""
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from diffusion import LOGITS_CHUNK, in_chunks, positions_of, run_head, to_device


class IntegralProcess:
    """
    Base class. A process has `loss_weight` (the kind of its loss), `corrupt`, and
        coefficients(t (B,) float64, kind) -> (B, n) float64
        integrand(log_p (P, V), x (P,), z (P,), coefficients (P, n)) -> (P,) nats
    """

    def training_weight(self, t):
        """ 1: the integrand holds all weights. """
        return torch.ones_like(t)

    def loss_coefficients(self, t):
        """ What `loss` needs of the clocks t (B,), on the host: (B, n) float32. At an end of (0, 1)
        the gradient of a place that is not scored would be 0 * inf. """
        t = t.double().clamp(1e-6, 1 - 1e-6)
        return self.coefficients(t, self.loss_weight).float()

    def loss(self, hidden, head, targets, weight, seen, coefficients):
        """
        loss = sum over p of weight_p * integrand_p
        hidden (P, C); head (V, C), logits = hidden head^T; targets (P,); weight (P,), 0 at places
        that are not scored; seen (P,): what the network read there; coefficients (P, n): of
        loss_coefficients, those of its row.
        Returns the loss, the integrand (P,), and right (P,) bool, as MaskedText.loss does.

        It works on one chunk of places at a time, and the backward pass computes the float32 tables
        (p, V) again. To keep two to four tables of all places would fill the memory.
        """
        def chunk_of_loss(hidden, targets, seen, coefficients):
            # A view of the head. Autocast would cast the head itself once for all chunks, and the
            # gradients of the chunks would add up in bfloat16.
            logits = F.linear(hidden, head.view_as(head))
            log_p = logits.log_softmax(1, dtype=torch.float32)               # (p, V)
            value = self.integrand(log_p, targets, seen, coefficients)
            return value, logits.argmax(1) == targets

        size = max(1, LOGITS_CHUNK // len(head))
        chunks = zip(*(x.split(size) for x in (hidden, targets, seen, coefficients)))
        values, rights = [], []
        for chunk in chunks:
            value, right = checkpoint(chunk_of_loss, *chunk, use_reentrant=False,
                                      preserve_rng_state=False)
            values.append(value)
            rights.append(right)
        value = torch.cat(values)                                            # (P,)
        right = torch.cat(rights)                                            # (P,)
        return torch.where(weight > 0, weight * value, 0).sum(), value.detach(), right

    @torch.no_grad()
    def bound(self, model, tokens, latents, t_latent, u, known_mask=None):
        """
        One draw of the bound, nats per sample (B,), float64, with t over all of (0, 1):
            t = y^3 (10 - 15 y + 6 y^2),   dt/dy = 30 y^2 (1 - y)^2,   y ~ U(0, 1)
        With t itself uniform the variance would be infinite: near t = 0 a wrong token has the
        weight 1/t and a probability of about sqrt(t).
        u (B, 1 + L) uniform: its first column is y. What lies where is as in MaskedText.bound.
        """
        B, L = tokens.shape
        y = u[:, 0].double()
        t = (y ** 3 * (10 - 15 * y + 6 * y * y)).clamp(1e-12, 1 - 1e-12)     # (B,)
        slope = 30 * (y * (1 - y)) ** 2                                      # dt/dy, (B,)

        # the network's prediction at the scored places
        seen, scored = self.corrupt(tokens, t, u[:, 1:], known_mask)
        positions = positions_of(scored)                                     # (P,)
        hidden, _ = model(to_device(seen, t_latent), latents, to_device(t.float(), t_latent),
                          t_latent, to_device(positions, t_latent), predict=('text',),
                          return_hidden=True)

        # the integrand there
        def integrand(logits, x, z, coefficients):
            return self.integrand(logits.log_softmax(1), x, z, coefficients)

        row = positions // L
        x = to_device(tokens.flatten()[positions], t_latent)                 # (P,)
        z = to_device(seen.flatten()[positions], t_latent)                   # (P,)
        coefficients = self.coefficients(t, 'bound').float()                 # (B, n)
        coefficients = to_device(coefficients[row], t_latent)                # (P, n)
        logits = run_head(model, hidden, self.mask_id)                       # (P, V)
        value = in_chunks(integrand, logits, x, z, coefficients).cpu()       # (P,)

        # the sum over each row
        total = torch.zeros(B, dtype=torch.float64)
        return total.index_add_(0, row, value * slope[row])
