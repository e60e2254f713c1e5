"""
GIDD+ (arXiv:2503.04482): a token becomes MASK, or a random token. The network may change what it
reads, so a text can be corrected.

    alpha_t   = (1-t)^gamma / Z_t       q_t(z | x) = alpha_t [z = x] + uniform_t   at the V ids
    uniform_t = c_t / (V Z_t)           q_t(MASK | x) = mask_t
    mask_t    = t^gamma / Z_t
    c_t = ratio sqrt(t^gamma (1-t)^gamma),   ratio = 2 p_u / (1 - p_u)
    Z_t = t^gamma + (1-t)^gamma + c_t

    bound = E_t,z  sum over i of  w [ KL(q_t(. | x) || q_t(. | p)) + r - log r - 1 ]
        q_t(. | p) = sum over v of p(v) q_t(. | v)
        r = q_t(z | x) / q_t(z | p)
        w = gamma / (t (1-t))            at z = MASK
            gamma / (2 t (1-t))          at z != x
            gamma c_t / (2 t (1-t) (V (1-t)^gamma + c_t))     at z = x

The network's p is that of x^i given the *other* positions. For the exact p the bound is the
entropy.
Letters: B rows, L tokens, P positions, V vocabulary; x the clean token, z what the network reads.
"""
import torch
import torch.nn.functional as F

from diffusion import check_choice, positions_of, to_device
from processes.integral import IntegralProcess
from samplers import Sampler, draw_from, no_callback, numbers_at, scatter_at, schedule_times


class GIDD(IntegralProcess):
    """
    p_u in [0, 1): the share of random tokens at t = 1/2. gamma > 0.
    loss_weight, the weight in the loss:
        bound     w
        dynamic   w 2 t (1-t) / gamma: 2 at MASK, 1 at z != x, less at z = x
        clip      min(w, 2) """

    corrects = True

    def __init__(self, vocab_size, p_u=0.1, gamma=1.0, loss_weight='dynamic'):
        check_choice('text_loss_weight', loss_weight, ('bound', 'dynamic', 'clip'))
        self.mask_id = vocab_size
        self.ratio = 2 * p_u / (1 - p_u)
        self.gamma = gamma
        self.loss_weight = loss_weight

    # ---- from clean to noisy

    def masses(self, t):
        """ alpha_t, uniform_t, mask_t, c_t of clocks t, float64. """
        # as in the head of this file, before they are divided by Z
        of_mask = t ** self.gamma
        of_token = (1 - t) ** self.gamma
        c = self.ratio * torch.sqrt(of_mask * of_token)
        Z = of_mask + of_token + c

        alpha = of_token / Z
        uniform = c / (self.mask_id * Z)
        mask = of_mask / Z
        return alpha, uniform, mask, c

    def corrupt(self, tokens, t, u, known_mask=None):
        """ z ~ q_t(. | x) from one uniform number per position: the token below alpha, MASK below
        alpha + mask, and the rest is divided among the V ids. All free positions are scored. """
        masses = self.masses(t.double())
        alpha, uniform, mask, _ = [mass[:, None] for mass in masses]     # (B, 1) each

        # above alpha + mask each id has a stretch of the length `uniform`
        beyond = u - alpha - mask
        random_id = (beyond / uniform.clamp(min=1e-300)).long()
        random_id = random_id.clamp(0, self.mask_id - 1)                 # (B, L)

        # what is read
        is_mask = (u < alpha + mask) | (uniform == 0)
        changed = torch.where(is_mask, self.mask_id, random_id)
        seen = torch.where(u < alpha, tokens, changed)

        # known tokens stay
        if known_mask is None:
            known_mask = torch.zeros_like(tokens, dtype=torch.bool)
        free = ~known_mask
        return torch.where(free, seen, tokens), free

    # ---- the loss and the bound

    def weights(self, t, kind):
        """ w at MASK, at z != x and at z = x, (B,) each, or what the kind of loss_weight makes of
        it. """
        *_, c = self.masses(t)
        at_mask = torch.full_like(t, 2)
        at_other = torch.ones_like(t)
        at_x = c / (self.mask_id * (1 - t) ** self.gamma + c)
        relative = torch.stack((at_mask, at_other, at_x))
        if kind == 'dynamic':
            return relative

        # the true weights, and for `clip` those of at most 2
        w = relative * self.gamma / (2 * t * (1 - t))
        if kind == 'clip':
            return w.clamp(max=2)
        assert kind == 'bound', kind
        return w

    def coefficients(self, t, kind):
        """ Of clocks t (B,), float64, (B, 7): the logarithms of alpha, uniform and alpha + uniform;
        the sum of q log q over q_t(. | x) at the V ids, which is alpha + uniform at x and uniform
        at the V - 1 others; and the three weights. """
        alpha, uniform, _, _ = self.masses(t)
        at_x = alpha + uniform
        of_others = (self.mask_id - 1) * torch.xlogy(uniform, uniform)
        q_log_q = at_x * at_x.log() + of_others
        logarithms = alpha.log(), uniform.log(), at_x.log()
        weights = self.weights(t, kind)
        return torch.stack((*logarithms, q_log_q, *weights), 1)

    def integrand(self, log_p, x, z, coefficients):
        """ w [ KL(q(. | x) || q(. | p)) + r - log r - 1 ], with log q(v | p) = log(alpha p_v +
        uniform). log_p (P, V); x, z (P,); coefficients (P, 7). """
        log_alpha, log_uniform, log_at_x, q_log_q, w_mask, w_other, w_same = coefficients.T  # (P,)
        is_mask = z == self.mask_id

        # q_t(. | p) at the V ids; at MASK it is mask_t, whatever p
        log_q = torch.logaddexp(log_p + log_alpha[:, None], log_uniform[:, None])    # (P, V)

        # KL: the sum of q log q(. | x), less that of q log q(. | p)
        log_q_x = log_q.gather(1, x[:, None]).squeeze(1)
        at_x = log_alpha.exp() * log_q_x
        everywhere = log_uniform.exp() * log_q.sum(1)
        KL = q_log_q - at_x - everywhere

        # r - log r - 1; at MASK r is 1, and any id may stand for z
        log_q_z_of_x = torch.where(z == x, log_at_x, log_uniform)
        id_of_z = torch.where(is_mask, x, z)
        log_q_z = log_q.gather(1, id_of_z[:, None]).squeeze(1)
        log_r = torch.where(is_mask, 0.0, log_q_z_of_x - log_q_z)
        divergence = torch.expm1(log_r) - log_r

        # the weight by what z is
        w_visible = torch.where(z != x, w_other, w_same)
        w = torch.where(is_mask, w_mask, w_visible)
        return w * (KL + divergence)

    # ---- samplers

    @property
    def samplers(self):
        return {'ancestral': Sampler(self.ancestral)}

    def masses_between(self, t, t_next):
        """ Of one step as numbers: the masses at t, those at t_next, and those of q(z_t | z_next),
        each (alpha, uniform, mask). """
        at_t = [float(mass) for mass in self.masses(t)[:3]]
        at_next = [float(mass) for mass in self.masses(t_next)[:3]]
        alpha = at_t[0] / at_next[0]
        uniform = max(0., at_t[1] - alpha * at_next[1])
        mask = at_t[2] - alpha * at_next[2]
        return at_t, at_next, (alpha, uniform, mask)

    def ancestral(self, denoise, propose, text, tokens, known_mask, steps, noise,
                  on_step=no_callback, self_correct=0, **knobs):
        """ From t to t_next at every free position: x ~ p(x) q_t(z_t | x), then z_next ~ q(z_t |
        z_next) q_next(z_next | x). Afterwards `self_correct` rounds of `correct`. """
        V = self.mask_id
        tokens = tokens.clone()
        positions = positions_of(~known_mask)
        for t, t_next in schedule_times(steps):
            at_t, at_next, between = self.masses_between(t, t_next)
            alpha_t, uniform_t, _ = at_t
            alpha_next, uniform_next, mask_next = at_next
            alpha, uniform, mask = between                               # of q(z_t | z_next)

            # x ~ p(x) q_t(z_t | x); a MASK fits any x
            logits = denoise(tokens, t, positions)                       # (P, V)
            z = tokens.flatten()[to_device(positions, tokens)]           # (P,)
            is_mask = z == V
            visible = z.clamp(max=V - 1)[:, None]
            fit = torch.full_like(logits, uniform_t).scatter_(1, visible, alpha_t + uniform_t)
            fit.masked_fill_(is_mask[:, None], 1.0)
            x = propose(logits, numbers_at(positions, noise, tokens), fit)           # (P,)
            is_same = x == z

            # weights, proportional to the probabilities, of: z stays, it becomes x (a different
            # one), it becomes MASK, it becomes any of the V ids
            visible_stays = alpha * (alpha_next * is_same + uniform_next)
            stay = torch.where(is_mask, (alpha + mask) * mask_next, visible_stays)
            by_noise = torch.where(is_mask, mask, uniform)               # q(z_t | another z_next)
            to_x = by_noise * alpha_next
            to_mask = torch.where(is_mask, 0.0, uniform * mask_next)
            to_any = by_noise * uniform_next * V

            # one of the four, by a coin
            L = tokens.shape[1]
            coin = noise.uniforms('unmask', L, torch.float32).flatten()[positions]
            lot = noise.uniforms('unmask', L).flatten()[positions]
            any_id = to_device((lot * V).long().clamp(max=V - 1), tokens)
            whole = stay + to_x + to_mask + to_any
            coin = to_device(coin, tokens) * whole
            new = torch.where(coin < stay + to_x + to_mask, V, any_id)
            new = torch.where(coin < stay + to_x, x, new)
            new = torch.where(coin < stay, z, new)
            scatter_at(tokens, positions, new)
            on_step(tokens, logits, positions)

        if self_correct:
            tokens = self.correct(denoise, tokens, known_mask, self_correct, noise, on_step)
        return tokens

    def correct(self, denoise, tokens, known_mask, rounds, noise, on_step=no_callback,
                temperature=0.1):
        """
        Self-correction. In each round every row draws x' ~ p at a low temperature. Of the free
        positions where x' differs from the token, it changes the one where p(x') - p(token) is
        largest. A row where no such difference is positive is done. Every round waits for the
        device. Returns the tokens (B, L). """
        positions = positions_of(~known_mask)                            # (P,)
        is_done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for _ in range(rounds):
            logits = denoise(tokens, 0., positions)                      # (P, V)
            z = tokens.flatten()[to_device(positions, tokens)]

            # x' ~ p, and what it would gain
            p = (logits / temperature).softmax(1)
            x = draw_from(p, numbers_at(positions, noise, tokens))       # (P,)
            p_new = p.gather(1, x[:, None])
            p_now = p.gather(1, z[:, None])
            gain = (p_new - p_now).squeeze(1)
            gain = torch.where(x == z, -torch.inf, gain)

            # the best position of each row
            value = torch.full(tokens.shape, -torch.inf, device=tokens.device)
            scatter_at(value, positions, gain)
            best, position = value.max(1)                                   # (B,)
            is_done = is_done | (best <= 0)
            if is_done.all():
                break

            # change it
            proposal = tokens.clone()
            scatter_at(proposal, positions, x)
            is_best = F.one_hot(position, tokens.shape[1]).bool()        # (B, L)
            change = is_best & ~is_done[:, None]
            tokens = torch.where(change, proposal, tokens)
            on_step(tokens, logits, positions)
        return tokens


def make(config, vocab_size, data=None):
    """ The process of a run's knobs. """
    return GIDD(vocab_size, config['gidd_uniform'], config['gidd_gamma'],
                config['text_loss_weight'])
