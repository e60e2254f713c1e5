"""
HDLM (arXiv:2510.08632): a token becomes its cluster, then MASK.

    Q(k | v) = xi at the token's own cluster, (1 - xi) / (C - 1) at the others
    shares of token, cluster, MASK:
        a = (1-t)^g,   c = g/(g-1) ((1-t) - (1-t)^g), or -(1-t) log(1-t) at g = 1,   m = 1 - a - c
    bound = E_t,z sum over i of
        m'/m KL(Q(. | x) || sum_v p(v) Q(. | v))                          where z is MASK
        g (1-t)^(g-1)/c  -log [ p(x) Q(k | x) / sum_v p(v) Q(k | v) ]     where z is cluster k

where the network's p is that of x^i given the *other* places: for this p the bound is the entropy.
Letters: B rows, L tokens, P scored positions, V vocabulary, C clusters.
"""
import math
import os

import torch
import torch.nn.functional as F

from diffusion import MaskedText, positions_of
from processes.integral import integral_bound, integral_loss, one
from runs.checkpoint import load_model
from runs.files import read_array
from samplers import init_state, no_callback, scatter_at, to_device

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
        return {'ancestral': (self.ancestral, {})}

    def ancestral(self, denoise, propose, text, tokens, given, steps, rng, on_step=no_callback):
        """ From t to s, with x ~ p, at cluster k ~ p(x) Q(k | x): MASK stays with m_s / m_t, becomes a cluster with
        c_s (t-s) / ((1-s) m_t), else x; a cluster stays with c_s (1-t) / ((1-s) c_t), else becomes x. What is left only the device knows:
        every step waits for it. """
        V, xi = self.mask_id, self.xi
        tokens, left, _ = init_state(self, tokens, given)
        others, cluster_of = (1 - xi) / max(self.C - 1, 1), self.cluster_of(torch.arange(V, device=tokens.device))
        times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        for t, s in zip(times, times[1:]):
            (_, c_t, m_t, *_), (_, c_s, m_s, *_) = ([float(y) for y in self.masses(when)] for when in (t, s))
            t, s = float(t), float(s)
            positions = positions_of(left)
            logits = denoise(tokens, t, positions)
            z = tokens.flatten()[to_device(positions, tokens)]
            is_mask, k = z == V, (z - V - 1).clamp(min=0)
            fits = torch.where(cluster_of == k[:, None], xi, others)     # Q(k | v), (P, V)
            x = propose(logits, torch.where(is_mask[:, None], 1.0, fits))
            coin, lot = to_device(torch.rand(2, len(positions), generator=rng, dtype=torch.float64), tokens)
            stay = torch.where(is_mask, m_s / m_t, c_s * (1 - t) / ((1 - s) * c_t) if c_t > 0 else 0.0)
            to_cluster = torch.where(is_mask, c_s * (t - s) / ((1 - s) * m_t), 0.0)
            new = torch.where(coin < stay, z, torch.where(coin < stay + to_cluster, V + 1 + self.cluster_draw(x, lot), x))
            scatter_at(tokens, positions, new)
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

def add_cluster_table(model):
    """ model.cluster_of (V,): saved with the weights, filled by train.py. """
    model.register_buffer('cluster_of', torch.zeros(model.config.vocab_size, dtype=torch.int64))
