"""
Other ways to write a text, with diffusion.MaskedText's interface: autoregressive, GIDD+ and HDLM, on the same network.

    python train.py config/quickstart.py config/ar.py --out_dir=out/ar             # likewise gidd, hdlm, and ar_prefix: from latents
    python evaluate.py --out_dir=out/gidd --tasks=nelbo,text,self_correction --scorer=out/ar

What train.py, sample.py and evaluate.py ask of a text process, t from 0 (clean) to 1 (noise):
    corrupt(tokens, t, u, given)        what the network reads, (B, L), and where it is scored; u (B, L) uniform
    loss(hidden, head, targets, weight, seen, t), loss_weight(t), head_budget(...)          of training
    bound(model, tokens, latents, t_latent, u, given)     a draw of an upper bound on -log p, nats per sample
    samplers                            {name: function}, with the signature of samplers.py

Autoregressive      -log p(x) = sum over i of -log p(x^i | x^<i):  the network is causal and reads the text one place later, behind MASK

GIDD+ (arXiv:2503.04482): a token becomes MASK, or any other; the network may take back what it reads
    C = t^g + (1-t)^g + c,   c = B sqrt(t^g (1-t)^g),   B = 2 p_u / (1 - p_u)
    q_t(. | x) = a [x] + b on each of the V ids + m on MASK,   a = (1-t)^g / C,   b = c / (V C),   m = t^g / C
    bound = E_t,z sum over i of  w [ KL(q_t(. | x) || q_t(. | p)) + r - log r - 1 ],   r = q_t(z | x) / q_t(z | p)
    w = g / (t (1-t)) at MASK,  g / (2 t (1-t)) at z != x,  g c / (2 t (1-t) (V (1-t)^g + c)) at z = x
    where the network's p is of x^i given the *other* places: there the bound is the entropy, here and below

HDLM (arXiv:2510.08632): a token becomes its cluster, then MASK;  Q(k | v) = xi at its own cluster, (1 - xi) / (C - 1) at the others
    a = (1-t)^g,   c = g/(g-1) ((1-t) - (1-t)^g), or -(1-t) log(1-t) at g = 1,   m = 1 - a - c:  shares of token, cluster, MASK
    bound = E_t,z sum over i of  m'/m KL(Q(. | x) || sum_v p(v) Q(. | v))                     where z is MASK,
                                 g (1-t)^(g-1)/c  -log [ p(x) Q(k | x) / sum_v p(v) Q(k | v) ]       where z is cluster k

Letters: B rows, L tokens, P scored positions, V vocabulary, C clusters.
"""
import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from checkpoint import load_model
from diffusion import MaskedText, is_right
from files import read_array
from samplers import begin, nothing, positions_of, put, to


def text_process(config, vocab_size, cluster_of=None, lengths=None):
    """ The process that a run's knobs name. cluster_of (V,): of hdlm, may be filled later; lengths (n,): of the training texts, for
    autoregressive training. """
    kind, weight = config.get('text_process', 'masked'), config.get('text_loss_weight', 'bound')     # knobs younger than some runs
    if (config['causal'] or kind != 'masked') and config['text_schedule'] != 'loglinear':
        raise ValueError(f"text_schedule={config['text_schedule']} is of masked text, not of {kind}, causal={config['causal']}")
    if config['causal']:
        if kind != 'masked' or weight != 'bound':
            raise ValueError(f'causal=True predicts the next token: not with text_process={kind}, text_loss_weight={weight}')
        return NextToken(vocab_size, lengths)
    if kind == 'gidd':
        return GIDD(vocab_size, config['gidd_uniform'], config['gidd_gamma'], weight)
    if kind == 'hdlm':
        if weight != 'bound':
            raise ValueError(f'text_loss_weight={weight}: text_process=hdlm has bound alone')
        return HDLM(vocab_size, cluster_of, config['hdlm_gamma'], config['hdlm_xi'])
    if kind != 'masked':
        raise ValueError(f'text_process={kind!r}: choose from masked, gidd, hdlm')
    return MaskedText(vocab_size, config['text_schedule'], config['text_power'], weight)


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


# ---- autoregressive

class NextToken:
    """ A causal text: every token and the EOS are scored, PAD is not. lengths (n,): tokens of the training texts. """

    def __init__(self, vocab_size, lengths=None):
        self.mask_id, self.pad, self.lengths = vocab_size, vocab_size - 1, lengths

    def shift(self, tokens):
        """ What is read where x^i is predicted: x^(i-1), and MASK before the first. """
        return F.pad(tokens[:, :-1], (1, 0), value=self.mask_id)

    def corrupt(self, tokens, t, u=None, given=None, exponent=None):
        return self.shift(tokens), tokens != self.pad

    loss_weight, loss = one, MaskedText.loss

    def head_budget(self, rows, length, text_share=1.0, t_min=0.):
        """ 5 sd of the sum of the texts' lengths, and of the number of texts, above its mean: see MaskedText.head_budget. """
        n = torch.as_tensor(self.lengths, dtype=torch.float64).clamp(max=length - 1) + 1
        spread = 5 * math.sqrt(rows) * n.std(correction=0).item() + (2 * n.mean().item() if text_share < 1 else 0)
        return min(rows * length, math.ceil(rows * n.mean().item() * text_share + spread))

    @torch.no_grad()
    def bound(self, model, tokens, latents, t_latent, u=None, given=None):
        """ -log p itself, nats per sample (B,), float64. """
        positions = positions_of(tokens != self.pad)
        zeros = torch.zeros(len(tokens), device=tokens.device)
        logits, _ = model(self.shift(tokens), latents, zeros, t_latent, positions, predict=('text',))
        nll = F.cross_entropy(logits, tokens.flatten()[positions], reduction='none').double()
        return zeros.double().index_add_(0, positions // tokens.shape[1], nll)

    @property
    def samplers(self):
        return dict(ancestral=self.left_to_right)

    def left_to_right(self, denoise, propose, text, tokens, given, steps, rng, on_step=nothing):
        """ One token after the other; the network keeps the keys and values of what it has read. A text that has its EOS is filled
        with PAD. What is given must stand before what is written. """
        _, masked, _ = begin(self, tokens, given)
        if (masked[:, :-1].cumsum(1) > 0)[given[:, 1:] & (tokens[:, 1:] < self.pad - 1).cpu()].any():
            raise ValueError('an autoregressive model continues a text: all [MASK] must stand at its end')
        tokens, L = tokens.clone(), tokens.shape[1]
        eos, ended = self.pad - 1, torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for i in masked.any(0).nonzero().flatten().tolist():
            positions = torch.arange(len(tokens)) * L + i
            logits = denoise(self.shift(tokens)[:, :i + 1], 0., positions)
            logits[:, self.pad] = -torch.inf                             # it was never taught: PAD comes after EOS by itself
            x = propose(logits)
            ended = (tokens[:, :i] == eos).any(1) if i else ended
            tokens[:, i] = torch.where(to(masked[:, i], tokens), torch.where(ended, self.pad, x), tokens[:, i])
            on_step(tokens)
            if i % 8 == 7 and (ended | (tokens[:, i] == eos)).all():     # looks now and then: on a GPU it waits
                tokens[:, i + 1:] = self.pad
                break
        return tokens


# ---- GIDD+

class GIDD:
    """ p_u in [0, 1): share of uniform noise at t = 1/2; g > 0. training_weight: bound, w; dynamic, w 2 t (1-t) / g; clip, min(w, 2). """
    knobs = ('self_correct',)
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
        return dict(ancestral=self.ancestral)

    def ancestral(self, denoise, propose, text, tokens, given, steps, rng, on_step=nothing, self_correct=0):
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
            z = tokens.flatten()[to(positions, tokens)]
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
            coin, lot = to(coin, tokens)
            coin = coin * (stay + to_x + to_mask + by_lot)
            new = torch.where(coin < stay, z, torch.where(coin < stay + to_x, x, torch.where(
                coin < stay + to_x + to_mask, V, (lot * V).long().clamp(max=V - 1))))
            put(tokens, positions, new)
            on_step(tokens)
        return self.correct(denoise, tokens, given, self_correct, rng, on_step)[0] if self_correct else tokens

    def correct(self, denoise, tokens, given, rounds, rng, on_step=nothing, temperature=0.1):
        """ Self-correction: in each round every row draws x' ~ p at a low temperature, and of the free places where it differs takes the
        one whose x' is likeliest beside what stands there; a row that has none is done. Returns tokens (B, L), the share of the free places
        that the network would not change, before and after, the rounds that each row took (B,), and whether it ended by itself. Every round
        waits for the device. """
        tokens, positions, B = tokens.clone(), positions_of(~given), len(tokens)
        row = to(positions, tokens) // tokens.shape[1]
        taken, agreed = torch.zeros(B, device=tokens.device), []
        for i in range(rounds + 1):
            logits = denoise(tokens, 0., positions)
            z = tokens.flatten()[to(positions, tokens)]
            same = torch.zeros(B, device=tokens.device).index_add_(0, row, (logits.argmax(1) == z).float())
            agreed.append(same / torch.zeros_like(same).index_add_(0, row, torch.ones_like(row, dtype=same.dtype)).clamp(min=1))
            p = (logits / temperature).softmax(1)
            coin = to(torch.rand(len(positions), 1, generator=rng), tokens)
            x = (p.cumsum(1) < coin).sum(1, keepdim=True).clamp(max=self.mask_id - 1)
            gain = (p.gather(1, x) - p.gather(1, z[:, None])).squeeze(1)
            value = torch.full(tokens.shape, -torch.inf, device=tokens.device)
            put(value, positions, torch.where(x.squeeze(1) == z, -torch.inf, gain))
            proposal = tokens.clone()
            put(proposal, positions, x.squeeze(1))
            best, at = value.max(1)
            moves = best > 0
            if i == rounds or not moves.any():
                break
            tokens = torch.where(moves[:, None] & F.one_hot(at, tokens.shape[1]).bool(), proposal, tokens)
            taken += moves
            on_step(tokens)
        return tokens, agreed[0], agreed[-1], taken, ~moves


# ---- HDLM

class HDLM:
    """ cluster_of (V,) in 0 .. C - 1; g > 0; xi in (0, 1]. The network reads id V as MASK and V + 1 + k as cluster k. """
    loss_weight, loss, bound, training_weight = one, integral_loss, integral_bound, 'bound'

    def __init__(self, vocab_size, cluster_of, g=1.0, xi=1.0):
        self.mask_id, self.C, self.g, self.xi = vocab_size, int(cluster_of.max()) + 1, g, xi
        self.tables = {cluster_of.device: cluster_of}                    # by device
        if not 0 < g < math.inf or not 0 < xi <= 1 or self.C == 1 and xi < 1:
            raise ValueError(f'hdlm_gamma={g}, hdlm_xi={xi}: expected a gamma > 0 and an xi in (0, 1], 1 for a single cluster')

    def masses(self, t):
        """ a, c, m, and the rates m' and -a' at which tokens become MASK and clusters; t float64. """
        g, log_a = self.g, torch.log1p(-t)
        if g == 1:
            c, dm = torch.where(t < 1, -(1 - t) * log_a, 0), -log_a
        else:
            c, dm = g / (g - 1) * ((1 - t) - (1 - t) ** g), g / (g - 1) * (1 - (1 - t) ** (g - 1))
        a = (1 - t) ** g
        return a, c, 1 - a - c, dm, g * (1 - t) ** (g - 1)

    schedule = 'hdlm'                                                    # the number of scored places is that of masked text, at 1 - a
    mean_share, head_budget = MaskedText.mean_share, MaskedText.head_budget

    def masked_share(self, t):
        return 1 - (1 - t) ** self.g

    def cluster_of(self, x):
        if x.device not in self.tables:
            self.tables[x.device] = next(iter(self.tables.values())).to(x.device)
        return self.tables[x.device][x]

    def cluster_draw(self, x, u):
        """ k ~ Q(. | x) from u uniform, of the same shape. """
        own = self.cluster_of(x)
        other = ((u - self.xi) / max(1 - self.xi, 1e-300) * (self.C - 1)).long().clamp(0, max(self.C - 2, 0))
        return torch.where(u < self.xi, own, other + (other >= own))

    def corrupt(self, tokens, t, u, given=None, exponent=None):
        """ One uniform a place: below m MASK, below m + c a cluster, else the token. """
        _, c, m, _, _ = (x[:, None] for x in self.masses(t.double()))
        cluster = self.mask_id + 1 + self.cluster_draw(tokens, ((u - m) / c.clamp(min=1e-300)).clamp(0, 1 - 1e-12))
        scored = u < m + c
        if given is not None:
            scored = scored & ~given
        return torch.where(scored, torch.where(u < m, self.mask_id, cluster), tokens), scored

    def integrand(self, log_p, x, z, t, kind='bound'):
        """ m'/m KL(Q(. | x) || sum_v p(v) Q(. | v)) at MASK,  -a'/c -log [ p(x) Q(k | x) / sum_v p(v) Q(k | v) ] at cluster k. """
        _, c, m, dm, da = self.masses(t)
        xi, V, C = self.xi, self.mask_id, self.C
        cluster_of = self.cluster_of(torch.arange(V, device=x.device))
        S = torch.zeros(len(x), C, dtype=log_p.dtype, device=log_p.device).index_add(1, cluster_of, log_p.exp())   # p(cluster)
        other = (1 - xi) / max(C - 1, 1)
        log_Q = (xi * S + other * (1 - S)).clamp(min=torch.finfo(S.dtype).tiny).log()        # sum_v p(v) Q(k | v), (P, C)
        own, k = cluster_of[x][:, None], (z - V - 1).clamp(min=0)[:, None]
        at_own = log_Q.gather(1, own).squeeze(1)
        entropy = xi * math.log(xi) + (C - 1) * (other * math.log(other) if other else 0)
        KL = entropy - (xi - other) * at_own - (other * log_Q.sum(1) if other else 0)
        log_likely = torch.where(k == own, math.log(xi), math.log(other) if other else -math.inf).squeeze(1)
        at_cluster = -(log_p.gather(1, x[:, None]) - log_Q.gather(1, k)).squeeze(1) - log_likely
        return torch.where(z == V, (dm / m).to(KL.dtype) * KL, (da / c).to(KL.dtype) * at_cluster)

    @property
    def samplers(self):
        return dict(ancestral=self.ancestral)

    def ancestral(self, denoise, propose, text, tokens, given, steps, rng, on_step=nothing):
        """ From t to s, with x ~ p, at cluster k ~ p(x) Q(k | x): MASK stays with m_s / m_t, becomes a cluster with
        c_s (t-s) / ((1-s) m_t), else x; a cluster stays with c_s (1-t) / ((1-s) c_t), else becomes x. What is left only the device knows:
        every step waits for it. """
        V, xi = self.mask_id, self.xi
        tokens, left, _ = begin(self, tokens, given)
        others, cluster_of = (1 - xi) / max(self.C - 1, 1), self.cluster_of(torch.arange(V, device=tokens.device))
        times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        for t, s in zip(times, times[1:]):
            (_, c_t, m_t, *_), (_, c_s, m_s, *_) = ([float(y) for y in self.masses(when)] for when in (t, s))
            t, s = float(t), float(s)
            positions = positions_of(left)
            logits = denoise(tokens, t, positions)
            z = tokens.flatten()[to(positions, tokens)]
            is_mask, k = z == V, (z - V - 1).clamp(min=0)
            fits = torch.where(cluster_of == k[:, None], xi, others)     # Q(k | v), (P, V)
            x = propose(logits, torch.where(is_mask[:, None], 1.0, fits))
            coin, lot = to(torch.rand(2, len(positions), generator=rng, dtype=torch.float64), tokens)
            stay = torch.where(is_mask, m_s / m_t, c_s * (1 - t) / ((1 - s) * c_t) if c_t > 0 else 0.0)
            to_cluster = torch.where(is_mask, c_s * (t - s) / ((1 - s) * m_t), 0.0)
            new = torch.where(coin < stay, z, torch.where(coin < stay + to_cluster, V + 1 + self.cluster_draw(x, lot), x))
            put(tokens, positions, new)
            left.view(-1)[positions] = (new >= V).cpu()
            on_step(tokens)
        return tokens


# ---- clusters

def cluster_table(source, data, C):
    """ Cluster of each id, (V,) int64: by k-means on the token embedding of a run folder, on an .npy file of V rows, or, source '', on
    neighbours(data); or an .npy file of V cluster ids, as it is. PAD goes with the EOS. """
    V = data.tokenizer.vocab_size
    if not 1 <= C < V:
        raise ValueError(f'clusters={C}: expected 1 to {V - 1}')
    if os.path.isdir(source):
        model, _, meta = load_model(source, 'best')
        if meta['tokenizer'] != data.meta['tokenizer'] or 'text' not in model.config.streams:
            raise ValueError(f'clusters_from={source}: its tokens are not those of {data.folder}')
        rows = model.embed.weight.detach()
    elif source:
        try:
            array = read_array(source)
            rows = torch.from_numpy(array.astype(array.dtype.newbyteorder('=')))
        except (TypeError, ValueError) as error:
            raise ValueError(f'clusters_from={source}: no run folder, and no array in an .npy file ({error})') from None
        if rows.shape == (V,) and not rows.is_floating_point() and rows.min() == 0 and rows.max() == C - 1:
            return rows.long()
        if rows.ndim != 2 or len(rows) < V:
            raise ValueError(f'clusters_from={source}: shape {tuple(rows.shape)}, expected ({V}, dims), or {V} ids from 0 to {C - 1}')
    else:
        rows = neighbours(data)
    which = kmeans(rows[:V - 1], C)
    return torch.cat((which, which[-1:]))


def clusters_in_words(cluster_of, data, shown=4, words=5):
    """ Lines: how large the clusters are, and of those that fill most of the split's texts the most frequent tokens. """
    counts, sizes = data.counts(), torch.bincount(cluster_of)
    share = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, cluster_of, counts.double() / counts.sum())
    lines = [f'{len(sizes):,} clusters of {sizes.min():,} to {sizes.max():,} tokens; those that are met most often:']
    for k in share.argsort(descending=True)[:shown].tolist():
        own = counts * (cluster_of == k)
        ids = own.argsort(descending=True)[:min(words, (own > 0).sum())]
        names = ('EOS' if i == data.tokenizer.eos else repr(data.tokenizer.decode([i])) for i in ids.tolist())
        lines.append(f'  {100 * share[k]:4.1f} %  ' + '  '.join(names))
    return lines


def kmeans(rows, C, seed=0, rounds=50):
    """ Cluster of each of `rows` (V, dims), (V,) in 0 .. C - 1, by Lloyd's rounds on the unit sphere; no cluster is empty: the row that is
    furthest from its centre begins it anew. """
    rows = F.normalize(rows.float(), dim=1)
    rng = torch.Generator().manual_seed(seed)
    centres = rows[torch.randperm(len(rows), generator=rng)[:C]]
    for _ in range(rounds):
        near, which = (rows @ centres.T).max(1)
        for k in (torch.bincount(which, minlength=C) == 0).nonzero().flatten():
            furthest = torch.where(torch.bincount(which, minlength=C)[which] > 1, near, torch.inf).argmin()
            which[furthest], near[furthest] = k, 1
        centres = F.normalize(torch.zeros_like(centres).index_add_(0, which, rows), dim=1)
    return which


def neighbours(data, dims=128, reach=2, most=2 ** 24, seed=0):
    """ A vector (V, dims) of each id from the company it keeps in the split: the sum over its places of fixed random vectors of the ids up
    to `reach` before and after, each divided by the root of its count (random indexing; the first `most` tokens). """
    V = data.tokenizer.vocab_size
    label = torch.randn(2 * reach, V, dims, generator=torch.Generator().manual_seed(seed))
    label /= data.counts().clamp(min=1).float().sqrt()[:, None]
    out, seen = torch.zeros(V, dims), 0
    for first in range(0, len(data), 4096):
        tokens, _ = data.rows(range(first, min(first + 4096, len(data))))
        real = tokens != data.tokenizer.pad
        for j, step in enumerate(d for d in range(-reach, reach + 1) if d):
            here, there = (slice(max(0, -step), tokens.shape[1] - max(0, step)), slice(max(0, step), tokens.shape[1] - max(0, -step)))
            pair = real[:, here] & real[:, there]
            out.index_add_(0, tokens[:, here][pair], label[j][tokens[:, there][pair]])
        seen += int(real.sum())
        if seen > most:
            break
    return out
