"""
The two processes, each with schedule, corruption, loss and reverse steps; and the clocks that drive them in training.
Time runs from 0 (clean) to 1 (noise).

Masked text (MDLM arXiv:2406.07524, MD4 arXiv:2406.04329)
    a(t)  probability that a token is still visible, a(0) = 1, a(1) = 0;   M = 1 - a  is the masked share
    x_t^i = MASK with probability 1 - a(t), else x^i
    bound = E_t [ w(t) * sum over masked of -log p(x^i | x_t) ],           w = -a'/(1 - a), nats per sample
          = E_n [ L/n  * sum over masked of -log p(x^i | x_t) ],           n ~ U{1..L} positions masked exactly

Gaussian latents
    z_t = a(t) z + s(t) e,   e ~ N(0, 1);      VP: a = sin(pi (1-t)/2), s = sin(pi t/2);    RF: a = 1 - t, s = t
    the network predicts x0 = z, v = a e - s z, the flow f = e - z, or e (eps)

Letters: B batch, L text tokens, N latent vectors, D latent dims, V vocabulary, P scored positions.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.quasirandom import SobolEngine


# ---- noise: pure functions of (seed, step, purpose, row), so that a resume needs no replay and any split draws the same

PURPOSES = {'clocks': 1, 'mask': 2, 'latent': 3, 'evaluation': 4, 'evaluation clock': 5, 'evaluation latent': 6, 'crop': 7}


def uniforms(seed, step, purpose, first, rows, columns):
    """ Rows first .. first + rows of an endless table of U(0,1), float64 (rows, columns), never exactly 0 or 1.
    The counter of Philox jumps there: a rank draws its own rows only, and row i is row i whatever the split. One purpose, one
    number of columns: tables of two widths would share their numbers. """
    blocks = -(-columns // 4)                                            # one count of Philox yields four 64-bit words
    philox = np.random.Philox(key=[seed % 2 ** 64, PURPOSES[purpose]], counter=[0, 0, step, 0])
    words = philox.advance(first * blocks).random_raw(rows * blocks * 4).reshape(rows, blocks * 4)[:, :columns]
    return torch.from_numpy(((words >> np.uint64(12)) + 0.5) * 2.0 ** -52)


def normals(seed, step, purpose, first, rows, *shape):
    """ The same for N(0,1), float32 (rows, *shape). """
    return torch.special.ndtri(uniforms(seed, step, purpose, first, rows, math.prod(shape))).float().view(rows, *shape)


# ---- clocks

# mode: (text clock, latent clock, text loss weight, latent loss weight);
# a clock is drawn from U(0,1), is given (0 or, for latents, U(0, latent_noise)), or follows the other modality's
DRAWN, GIVEN = True, False
MODES = {'unconditional': (DRAWN, DRAWN, 1, 1),
         'l2t':           (DRAWN, GIVEN, 1, 0),
         't2l':           (GIVEN, DRAWN, 0, 1)}


def mode_shares(mode, mode_weights):
    """ {name: share of the rows}, in the order of MODES: a single mode, or 'mixed' by its weights. """
    if mode != 'mixed':
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: choose from {', '.join(MODES)}, mixed")
        return {name: float(name == mode) for name in MODES}
    if len(mode_weights) != len(MODES) or min(mode_weights) < 0 or sum(mode_weights) <= 0:
        raise ValueError(f"mode_weights={mode_weights} must be {len(MODES)} shares >= 0, of {', '.join(MODES)}")
    return {name: weight / sum(mode_weights) for name, weight in zip(MODES, mode_weights)}


def draw_clocks(seed, step, first, rows, batch, shares, cond_drop=0.1, latent_noise=0.0, t_min=1e-3):
    """
    Clocks and loss weights of rows first .. first + rows of the global batch at this step.
    One Sobol' point per row of the global batch plus one random shift per step, modulo 1: each clock is exactly uniform, and
    every contiguous slice covers (0, 1) evenly, in each dimension and jointly.
    Returns {mode (rows,) int64; t_text, t_latent, text_weight, latent_weight (rows,) float64}.
    """
    assert 0 <= first and first + rows <= batch, (first, rows, batch)
    points = SobolEngine(4, scramble=False).fast_forward(first).draw(rows, dtype=torch.float64)
    shift = uniforms(seed, step, 'clocks', 0, 1, 4)
    u_text, u_latent, u_mode, u_drop = ((points + shift) % 1).T          # the clocks in the two dimensions that mix best
    mode = torch.searchsorted(torch.tensor(list(shares.values()), dtype=torch.float64).cumsum(0), u_mode.contiguous(), right=True)
    mode = mode.clamp(max=len(shares) - 1)                               # the shares may sum to 1 - 1e-16
    table = torch.tensor([MODES[name] for name in shares], dtype=torch.float64)[mode]
    text_drawn, latent_drawn, text_weight, latent_weight = table.T
    clock_text = t_min + (1 - t_min) * u_text
    clock_latent = t_min + (1 - t_min) * u_latent
    t_text = torch.where(text_drawn > 0, clock_text, 0.0)
    t_latent = torch.where(latent_drawn > 0, clock_latent, latent_noise * u_latent)
    dropped = u_drop < cond_drop                                         # the condition's clock to 1: the null condition
    t_text = torch.where(dropped & (text_drawn == 0), 1.0, t_text)
    t_latent = torch.where(dropped & (latent_drawn == 0), 1.0, t_latent)
    return dict(mode=mode, t_text=t_text, t_latent=t_latent, text_weight=text_weight, latent_weight=latent_weight)


# ---- masked text

class MaskedText:
    """
    Schedules, 1 - a(t):  loglinear t;   cosine sin(pi t/2);   polynomial t^power;   ddpm (1 - e^-b(t)) / (1 - e^-b(1)), where
    b(t) = .1 t + 9.95 t^2 is the integral of DDPM's linear beta (arXiv:2006.11239), divided so that nothing is visible at 1.
    loss_weight: bound, w(t);  uniform, 1: discrete flow matching's (arXiv:2407.15595);  rdm, 1 - t: RDM's and DPLM's (arXiv:2302.05737).
    """
    B0, B1 = 0.1, 9.95

    def __init__(self, vocab_size, schedule='loglinear', power=2.0, loss_weight='bound'):
        for name, value, legal in (('text_schedule', schedule, ('loglinear', 'cosine', 'polynomial', 'ddpm')),
                                   ('text_loss_weight', loss_weight, ('bound', 'uniform', 'rdm'))):
            if value not in legal:
                raise ValueError(f"{name}={value!r}: choose from {', '.join(legal)}")
        if schedule == 'polynomial' and power <= 0:
            raise ValueError(f'text_power={power} must be positive')
        self.mask_id, self.schedule, self.power, self.which_weight = vocab_size, schedule, power, loss_weight

    def masked_share(self, t):
        """ 1 - a(t). """
        return {'loglinear': lambda: t, 'cosine': lambda: torch.sin(math.pi / 2 * t), 'polynomial': lambda: t ** self.power,
                'ddpm': lambda: torch.expm1(-(self.B0 + self.B1 * t) * t) / math.expm1(-self.B0 - self.B1)}[self.schedule]()

    def clock(self, share):
        """ The t with 1 - a(t) = share. """
        def ddpm():                                                      # .1 t + 9.95 t^2 = b
            b = -torch.log1p(share * math.expm1(-self.B0 - self.B1))
            return 2 * b / (self.B0 + torch.sqrt(self.B0 ** 2 + 4 * self.B1 * b))
        return {'loglinear': lambda: share, 'cosine': lambda: torch.asin(share) * (2 / math.pi),
                'polynomial': lambda: share ** (1 / self.power), 'ddpm': ddpm}[self.schedule]()

    def weight(self, t):
        """ w(t) = -a'(t) / (1 - a(t)):  1/t;   (pi/2) / tan(pi t/2);   power/t;   b'(t) / (e^b(t) - 1). """
        return {'loglinear': lambda: 1 / t, 'cosine': lambda: (math.pi / 2) / torch.tan(math.pi / 2 * t),
                'polynomial': lambda: self.power / t,
                'ddpm': lambda: (self.B0 + 2 * self.B1 * t) / torch.expm1((self.B0 + self.B1 * t) * t)}[self.schedule]()

    def loss_weight(self, t):
        """ What training weighs a row's losses with; only w(t) makes it a bound. """
        return {'bound': self.weight, 'uniform': torch.ones_like, 'rdm': lambda t: 1 - t}[self.which_weight](t)

    def mean_share(self, t_min=0.):
        """ E_t [1 - a(t)], t ~ U(t_min, 1). """
        t = t_min + (1 - t_min) * (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
        return self.masked_share(t).mean().item()

    def corrupt(self, tokens, t, u, given=None, exponent=None):
        """ x_t and its mask. tokens (B, L), t (B,), u (B, L) uniform; given (B, L): True is never masked; exponent (B, L): the masked
        share of each token is (1 - a)^exponent (adaptive.py). """
        share = self.masked_share(t)[:, None]
        mask = u < (share if exponent is None else share ** exponent)    # (B, L)
        if given is not None:
            mask &= ~given
        return torch.where(mask, self.mask_id, tokens), mask

    def corrupt_exactly(self, tokens, n, u, given=None):
        """ As corrupt, with exactly n (B,) of the free positions masked: those with the smallest u. """
        if given is not None:
            u = torch.where(given, torch.inf, u)
        mask = u.argsort(1).argsort(1) < n[:, None]                      # rank of each position
        if given is not None:
            mask &= ~given                                               # a row may have no free position at all
        return torch.where(mask, self.mask_id, tokens), mask

    def head_budget(self, rows, length, text_share=1.0, t_min=0.):
        """ Positions that the head is run on in a micro-batch: a static number that hardly any count of scored ones exceeds. Around the
        expected count vary the coins, of variance t (1 - t), at uniform t 3/16 at most and never above 1/4: 5 sd; and the clocks: of 2^k
        rows (draw_clocks) the sum of t is within 1/2 of its mean, of a monotone function of t within 1, and m 2^k rows are m of these, or
        2 log2 of all rows. """
        expected = rows * length * self.mean_share(t_min) * text_share
        coins = 5 * math.sqrt(rows * length * (3 / 16 if self.schedule == 'loglinear' else 1 / 4))
        pieces = min(rows // (rows & -rows), 2 * rows.bit_length())
        clocks = pieces * (.5 if self.schedule == 'loglinear' else 1) + (2 if text_share < 1 else 0)
        return min(rows * length, math.ceil(expected + coins + clocks * length))

    def loss(self, hidden, head, targets, weight, seen=None, t=None):
        """
        sum of weight * -log p(x)  /  (B L), with weight = w(t), 0 where nothing is scored     nats per token, a bound
        hidden (P, C); head (V, C), logits = hidden head'; targets (P,); weight (P,) float32, already divided by B * L.
        Returns the loss, nll (P,) in nats, and right (P,) bool: no token is likelier than the target. seen, t: baselines.py's read them.
        """
        return HeadLoss.apply(hidden, head, targets, weight)

    @torch.no_grad()
    def bound(self, model, tokens, latents, t_latent, u, given=None):
        """
        One draw of the exact discrete bound, nats per sample (B,), float64:
            n ~ U{1..F},  F / n * sum over the n masked of -log p(x^i | x_t),  F = number of free positions (L, if none is given)
        MDLM's bound without a t_min; equal to the any-order autoregressive bound; a network that reads the text clock is fed the
        t_n with 1 - a(t_n) = n / L, a function of x_t, so it is a bound for that network too, sampled with that clock.
        tokens (B, L); latents (B, N, D) as the model shall see them, at clock t_latent (B,); u (B, 1 + L) uniforms: the first
        column draws n, spread evenly over the rows given.
        """
        B, L = tokens.shape
        free = torch.full((B,), L, device=tokens.device) if given is None else (~given).sum(1).clamp(min=1)
        n = 1 + (u[:, 0] * free).long().clamp(max=free - 1)                  # (B,)
        noisy, mask = self.corrupt_exactly(tokens, n, u[:, 1:], given)
        t_text = self.clock(n / L).float()
        positions = mask.flatten().nonzero().squeeze(1)
        logits, _ = model(noisy, latents, t_text, t_latent, positions, predict=('text',))
        nll = F.cross_entropy(logits, tokens.flatten()[positions], reduction='none').double()
        total = torch.zeros(B, dtype=torch.float64, device=tokens.device).index_add_(0, positions // L, nll)
        return total * free / n

    # reverse

    def release_share(self, t, s):
        """ u = (M_t - M_s) / M_t: the share of the masked positions that is released from t to s. """
        return 1 - self.masked_share(s) / self.masked_share(t)


def is_right(nll, best, V):
    """ (P,): the target's nll is the smallest of the V tokens', `best` (P,); where all are equally likely, none is right. """
    return (nll <= best) & (best < math.log(V) - 1e-4)


class HeadLoss(torch.autograd.Function):
    """
    sum over p of weight_p nll_p,   nll = logsumexp(logits) - logits[target],   logits = hidden head'
    d / d logits = weight (softmax(logits) - onehot(target))
    The gradient takes the place of the logits while they are at hand, some rows at a time in float32: so there is one (P, V) table in
    the precision of the products, where cross_entropy keeps three, two of them in float32.
    """
    NUMBERS = {'cpu': 2 ** 20}                                           # of a float32 chunk: there it should stay in a cache

    @staticmethod
    def forward(ctx, hidden, head, targets, weight):
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.dtypes, hidden, head = (hidden.dtype, head.dtype), hidden.to(dtype), head.to(dtype)
        with torch.autocast(kind, enabled=False):
            table = hidden @ head.T                                      # (P, V)
            nll, best = torch.empty_like(weight), torch.empty_like(weight)
            size = max(1, HeadLoss.NUMBERS.get(kind, 2 ** 26) // len(head))
            for first in range(0, len(targets), size):
                i = slice(first, first + size)
                target, w = targets[i, None], weight[i, None]            # (p, 1)
                logp = table[i].log_softmax(1, dtype=torch.float32)      # (p, V)
                nll[i], best[i] = -logp.gather(1, target).squeeze(1), -logp.amax(1)
                if any(ctx.needs_input_grad):
                    table[i] = logp.exp_().mul_(w).scatter_add_(1, target, -w)
        ctx.save_for_backward(table, hidden, head)
        right = is_right(nll, best, len(head))
        ctx.mark_non_differentiable(nll, right)
        return torch.where(weight > 0, weight * nll, 0).sum(), nll, right

    @staticmethod
    def backward(ctx, d_loss, *_):
        table, hidden, head = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            d_hidden = (table @ head) * d_loss if ctx.needs_input_grad[0] else None
            d_head = table.T @ (hidden * d_loss) if ctx.needs_input_grad[1] else None
        return *(g if g is None else g.to(dtype) for g, dtype in zip((d_hidden, d_head), ctx.dtypes)), None, None


def positions_and_targets(scored, tokens, weight, budget):
    """
    Where the head runs, at a static size. scored, tokens (B, L), weight (B, 1) or (B, L): w(t) times the row's loss weight.
    Returns positions, targets (P,) int64 and weight (P,) float32, P the next multiple of `budget`, or all (that is: budget itself, but
    for a batch beyond 5 sd); unused places point at position 0 and weigh 0. Weights are divided by B * L: all rows count.
    """
    found = scored.flatten().nonzero().squeeze(1)
    P = min(max(1, -(-len(found) // budget)) * budget, scored.numel())
    positions = F.pad(found, (0, P - len(found)))
    weight = F.pad((weight / scored.numel()).expand(scored.shape).flatten()[found], (0, P - len(found)))
    return positions, tokens.flatten()[positions], weight.float()


# ---- Gaussian latents

class GaussianLatents:
    """
    schedule 'vp' or 'rf'; target 'v', 'x0', 'flow' or 'eps'; loss_weight 'none' (1 on the target), 'snr' or 'min_snr' (as
    weights of the x0 error: SNR = a^2/s^2, or min(SNR, 5)). live (D,) is 0 for dead dimensions: there z, noise and prediction
    are 0, in training and in sampling, and the loss does not count them.
    """

    def __init__(self, live, schedule='vp', target='v', loss_weight='none'):
        for name, value, legal in (('latent_schedule', schedule, ('vp', 'rf')), ('latent_target', target, ('v', 'x0', 'flow', 'eps')),
                                   ('latent_loss_weight', loss_weight, ('none', 'snr', 'min_snr'))):
            if value not in legal:
                raise ValueError(f"{name}={value!r}: choose from {', '.join(legal)}")
        self.live, self.schedule, self.target, self.loss_weight = live, schedule, target, loss_weight

    def alpha_sigma(self, t):
        """ a(t), s(t), exact at both ends: sin(pi (1-t)/2), because cos(pi/2) is -4e-8 in float32. """
        if self.schedule == 'vp':
            return torch.sin(math.pi / 2 * (1 - t)), torch.sin(math.pi / 2 * t)
        return 1 - t, t

    def corrupt(self, z, t, e):
        """ z_t, and the noise as used. z, e (B, N, D), t (B,). """
        a, s = (x.to(z.dtype)[:, None, None] for x in self.alpha_sigma(t))
        e = e * self.live
        return a * z * self.live + s * e, e

    def target_of(self, z, e, t):
        a, s = (x.to(z.dtype)[:, None, None] for x in self.alpha_sigma(t))
        return {'x0': lambda: z, 'v': lambda: a * e - s * z, 'flow': lambda: e - z, 'eps': lambda: e}[self.target]()

    def x0_and_e(self, out, z_t, t):
        """ The network's output as a clean latent and a noise, exact wherever defined; t (B,), or a scalar tensor.
            v: x0 = (a z_t - s v)/(a^2 + s^2), e = (s z_t + a v)/(a^2 + s^2)       flow: x0 = (z_t - s f)/(a + s), e = (z_t + a f)/(a + s)
            x0: e = (z_t - a x0)/s, 0 at s = 0                                     eps: x0 = (z_t - s e)/a, undefined at t = 1
        """
        a, s = (x.to(z_t.dtype) for x in self.alpha_sigma(t))
        a, s = (x[:, None, None] if x.ndim else x for x in (a, s))
        if self.target == 'v':
            x0, e = (a * z_t - s * out) / (a * a + s * s), (s * z_t + a * out) / (a * a + s * s)
        elif self.target == 'flow':
            x0, e = (z_t - s * out) / (a + s), (z_t + a * out) / (a + s)
        elif self.target == 'x0':
            x0, e = out, torch.where(s > 0, (z_t - a * out) / torch.where(s > 0, s, 1), 0)
        else:
            if (a == 0).any():
                raise ValueError("latent_target='eps' says nothing at t=1, where the input is the answer: start at t=0.999")
            x0, e = (z_t - s * out) / a, out
        return x0 * self.live, e * self.live

    def weight(self, t):
        """ What the squared error of the target weighs: W(SNR) * (d x0 / d target)^2, or 1.
            With W = SNR that is SNR for x0, 1 for eps, SNR/(SNR + 1) for v on VP. """
        if self.loss_weight == 'none':
            return torch.ones_like(t)
        a, s = self.alpha_sigma(t)
        snr = (a / s) ** 2
        slope = {'x0': torch.ones_like(t), 'v': s / (a * a + s * s), 'flow': s / (a + s), 'eps': s / a}[self.target]
        return (snr if self.loss_weight == 'snr' else snr.clamp(max=5)) * slope ** 2

    def loss(self, out, target, row_weight):
        """ Mean over all B rows of row_weight * mean squared error per live dimension. row_weight (B,): weight(t) times the
        row's loss weight. Returns the loss and the error per row (B,), unweighted. """
        error = ((out - target).square() * self.live).mean(1).sum(1) / self.live.sum()  # (B,)
        return torch.where(row_weight > 0, row_weight * error, 0).mean(), error

    # reverse steps from t to s, one signature:
    #   denoise(z, t) -> x0, e;  memory: a dict that lives as long as the trajectory;  noise (B, N, D) ~ N(0, 1)
    # t and s are scalar tensors, float64 on the host: no call at t = 0, the last step ends exactly at z = x0.

    def ddim(self, z, t, s, denoise, memory=None, noise=None):
        """ z_s = a_s x0 + s_s e. Order 1.    arXiv:2010.02502 """
        x0, e = denoise(z, t)
        a_s, s_s = self.alpha_sigma(s)
        return a_s * x0 + s_s * e

    def dpmpp_2m(self, z, t, s, denoise, memory, noise=None):
        """ h = log(a_s/s_s) - log(a_t/s_t), E = exp(-h) = a_t s_s / (a_s s_t), which is 0 at t = 1 and at s = 0
            Dm = x0 + (h / 2 h_prev) (x0 - x0_prev);    z_s = (s_s/s_t) z - a_s (E - 1) Dm. Order 2.    arXiv:2211.01095 """
        x0, _ = denoise(z, t)
        (a_t, s_t), (a_s, s_s) = self.alpha_sigma(t), self.alpha_sigma(s)
        E = (a_t * s_s) / (a_s * s_t)
        h = -torch.log(E)                                                # inf in the first and in the last step
        Dm = x0
        if memory and s > 0:                                             # step 2: h_prev is inf, the term vanishes
            Dm = x0 + (0.5 * h / memory['h']) * (x0 - memory['x0'])
        memory.update(x0=x0, h=h)
        return (s_s / s_t) * z - a_s * (E - 1) * Dm

    def heun(self, z, t, s, denoise, memory=None, noise=None):
        """ dz/dt = a'(t) x0 + s'(t) e, trapezoid: two calls a step, one in the last. Order 2.    arXiv:2206.00364 """
        x0, e = denoise(z, t)
        if s == 0:
            return x0
        slope = self._velocity(x0, e, t)
        x0, e = denoise(z + (s - t) * slope, s)
        return z + (s - t) * 0.5 * (slope + self._velocity(x0, e, s))

    def _velocity(self, x0, e, t):
        if self.schedule == 'rf':
            return e - x0                                                # a' = -1, s' = 1
        a, s = self.alpha_sigma(t)
        return math.pi / 2 * (a * e - s * x0)                            # a' = -(pi/2) s, s' = (pi/2) a

    def ancestral(self, z, t, s, denoise, memory=None, noise=None):
        """ A draw of q(z_s | z_t, x0):   a_ts = a_t/a_s,   s_ts^2 = s_t^2 - a_ts^2 s_s^2,
            mean = a_ts s_s^2/s_t^2 z + a_s s_ts^2/s_t^2 x0,   variance = s_ts^2 s_s^2/s_t^2.    arXiv:2006.11239 """
        x0, _ = denoise(z, t)
        (a_t, s_t), (a_s, s_s) = self.alpha_sigma(t), self.alpha_sigma(s)
        a_ts = a_t / a_s
        var_ts = (s_t ** 2 - a_ts ** 2 * s_s ** 2).clamp(min=0)
        mean = (a_ts * s_s ** 2 / s_t ** 2) * z + (a_s * var_ts / s_t ** 2) * x0
        return mean + torch.sqrt(var_ts * s_s ** 2 / s_t ** 2) * noise * self.live
