"""
GIDD+ (arXiv:2503.04482): a token becomes MASK, or any other token. The network may take back what it
reads.

    C = t^g + (1-t)^g + c,   c = B sqrt(t^g (1-t)^g),   B = 2 p_u / (1 - p_u)
    q_t(. | x) = a [x] + b on each of the V ids + m on MASK
        a = (1-t)^g / C,   b = c / (V C),   m = t^g / C
    bound = E_t,z sum over i of  w [ KL(q_t(. | x) || q_t(. | p)) + r - log r - 1 ]
        r = q_t(z | x) / q_t(z | p)
        w = g / (t (1-t)) at MASK,  g / (2 t (1-t)) at z != x,
            g c / (2 t (1-t) (V (1-t)^g + c)) at z = x

where the network's p is that of x^i given the *other* places: for this p the bound is the entropy.
Letters: B rows, L tokens, P scored positions, V vocabulary.
"""
import math

import torch
import torch.nn.functional as F

from diffusion import positions_of

from processes.integral import integral_bound, integral_loss, one
from samplers import no_callback, scatter_at, to_device

# ---- GIDD+

class GIDD:
    """ p_u in [0, 1): share of uniform noise at t = 1/2; g > 0. training_weight: bound, w; dynamic, w 2 t (1-t) / g; clip, min(w, 2). """
    loss_weight, loss, bound = one, integral_loss, integral_bound

    def __init__(self, vocab_size, p_u=0.1, g=1.0, training_weight='dynamic'):
        if not 0 <= p_u < 1 or not 0 < g < math.inf or training_weight not in ('bound', 'dynamic', 'clip'):
            raise ValueError(f'gidd_uniform={p_u}, gidd_gamma={g}, text_loss_weight={training_weight}: expected a share in [0, 1), a gamma '
                             '> 0, and bound, dynamic or clip')
        self.mask_id, self.B, self.g, self.training_weight = vocab_size, 2 * p_u / (1 - p_u), g, training_weight

    def masses(self, t):
        """ a, b, m of q_t, and c; t float64. """
        V, g = self.mask_id, self.g
        c = self.B * torch.sqrt(t ** g * (1 - t) ** g)
        C = t ** g + (1 - t) ** g + c
        return (1 - t) ** g / C, c / (V * C), t ** g / C, c

    def corrupt(self, tokens, t, u, given=None, exponent=None):
        """ z ~ q_t(. | x) from one uniform a place: below a the token, below a + m MASK, the rest shared by the V ids. """
        a, b, m, _ = (x[:, None] for x in self.masses(t.double()))
        other = ((u - a - m) / b.clamp(min=1e-300)).long().clamp(0, self.mask_id - 1)
        seen = torch.where(u < a, tokens, torch.where((u < a + m) | (b == 0), self.mask_id, other))
        free = torch.ones_like(tokens, dtype=torch.bool) if given is None else ~given
        return torch.where(free, seen, tokens), free

    def head_budget(self, rows, length, text_share=1.0, t_min=0.):
        return rows * length

    def weight(self, x, z, t, kind):
        _, _, _, c = self.masses(t)
        relative = torch.where(z == self.mask_id, 2.0, torch.where(z != x, 1.0, c / (self.mask_id * (1 - t) ** self.g + c)))
        w = relative * self.g / (2 * t * (1 - t))
        return {'bound': w, 'dynamic': relative, 'clip': w.clamp(max=2)}[kind]

    def integrand(self, log_p, x, z, t, kind='bound'):
        """ w [ KL(q(. | x) || q(. | p)) + r - log r - 1 ], with log q(v | p) = log(a p_v + b). """
        a, b, _, _ = self.masses(t)
        dtype, is_mask = log_p.dtype, z == self.mask_id
        log_q = torch.logaddexp(log_p + a.log().to(dtype)[:, None], b.log().to(dtype)[:, None])                  # (P, V)
        q_x = log_q.gather(1, x[:, None]).squeeze(1)
        KL = torch.xlogy(a + b, a + b) + (self.mask_id - 1) * torch.xlogy(b, b) - a * q_x - b * log_q.sum(1)
        log_r = torch.where(z == x, a + b, b).clamp(min=1e-300).log() - log_q.gather(1, torch.where(is_mask, x, z)[:, None]).squeeze(1)
        divergence = torch.where(is_mask, 0.0, torch.expm1(log_r) - log_r)
        return (self.weight(x, z, t, kind) * (KL + divergence)).to(dtype)

    @property
    def samplers(self):
        return {'ancestral': (self.ancestral, {'self_correct': '[0, inf)'})}

    def ancestral(self, denoise, propose, text, tokens, given, steps, rng, on_step=no_callback, self_correct=0):
        """ From t to s: x ~ p(x) q_t(z_t | x), then z_s ~ q_{t|s}(z_t | z_s) q_s(z_s | x), at every free place. Then so many
        rounds of self-correction. """
        V, free = self.mask_id, ~given
        tokens, positions = tokens.clone(), positions_of(free)
        times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        for t, s in zip(times, times[1:]):
            (a_t, b_t, m_t, _), (a_s, b_s, m_s, _) = ([float(y) for y in self.masses(when)] for when in (t, s))
            a = a_t / a_s                                                # a_{t|s}, b_{t|s}, m_{t|s}
            b, m = max(0., b_t - a * b_s), m_t - a * m_s
            logits = denoise(tokens, t, positions)                       # (P, V)
            z = tokens.flatten()[to_device(positions, tokens)]
            is_mask, visible = z == V, z.clamp(max=V - 1)[:, None]
            tilt = torch.full_like(logits, b_t).scatter_(1, visible, a_t + b_t)              # q_t(z | x) of each x
            x = propose(logits, torch.where(is_mask[:, None], 1.0, tilt))
            # what is proportional to the probability of: z stays; it becomes x (if x is another); MASK; any of the V ids by lot
            same = x == z
            stay = torch.where(is_mask, (a + m) * m_s, a * (a_s * same + b_s))
            to_x = torch.where(is_mask, m, b) * a_s
            to_mask = torch.where(is_mask, 0.0, b * m_s)
            by_lot = torch.where(is_mask, m, b) * b_s * V
            coin = torch.rand(2, len(positions), generator=rng, dtype=torch.float64)
            coin, lot = to_device(coin, tokens)
            coin = coin * (stay + to_x + to_mask + by_lot)
            new = torch.where(coin < stay, z, torch.where(coin < stay + to_x, x, torch.where(
                coin < stay + to_x + to_mask, V, (lot * V).long().clamp(max=V - 1))))
            scatter_at(tokens, positions, new)
            on_step(tokens)
        return self.correct(denoise, tokens, given, self_correct, rng, on_step)[0] if self_correct else tokens

    def correct(self, denoise, tokens, given, rounds, rng, on_step=no_callback, temperature=0.1):
        """ Self-correction: in each round every row draws x' ~ p at a low temperature, and of the free places where it differs takes the
        one whose x' is likeliest beside what stands there; a row that has none is done. Returns tokens (B, L), the share of the free places
        that the network would not change, before and after, the rounds that each row took (B,), and whether it ended by itself. Every round
        waits for the device. """
        tokens, positions, B = tokens.clone(), positions_of(~given), len(tokens)
        row = to_device(positions, tokens) // tokens.shape[1]
        taken, agreed = torch.zeros(B, device=tokens.device), []
        for i in range(rounds + 1):
            logits = denoise(tokens, 0., positions)
            z = tokens.flatten()[to_device(positions, tokens)]
            same = torch.zeros(B, device=tokens.device).index_add_(0, row, (logits.argmax(1) == z).float())
            agreed.append(same / torch.zeros_like(same).index_add_(0, row, torch.ones_like(row, dtype=same.dtype)).clamp(min=1))
            p = (logits / temperature).softmax(1)
            coin = to_device(torch.rand(len(positions), 1, generator=rng), tokens)
            x = (p.cumsum(1) < coin).sum(1, keepdim=True).clamp(max=self.mask_id - 1)
            gain = (p.gather(1, x) - p.gather(1, z[:, None])).squeeze(1)
            value = torch.full(tokens.shape, -torch.inf, device=tokens.device)
            scatter_at(value, positions, torch.where(x.squeeze(1) == z, -torch.inf, gain))
            proposal = tokens.clone()
            scatter_at(proposal, positions, x.squeeze(1))
            best, at = value.max(1)
            moves = best > 0
            if i == rounds or not moves.any():
                break
            tokens = torch.where(moves[:, None] & F.one_hot(at, tokens.shape[1]).bool(), proposal, tokens)
            taken += moves
            on_step(tokens)
        return tokens, agreed[0], agreed[-1], taken, ~moves
