"""
HDLM (arXiv:2510.08632): a token becomes its cluster, and the cluster becomes MASK.

    alpha_t   = (1-t)^gamma                                       the token
    cluster_t = gamma/(gamma-1) ((1-t) - (1-t)^gamma)             a cluster
                (at gamma = 1: -(1-t) log(1-t))
    mask_t    = 1 - alpha_t - cluster_t                           MASK
    Q(k | v)  = xi at the token's own cluster, (1 - xi) / (n_clusters - 1) at the others

    bound = E_t,z  sum over i of
        mask_t' / mask_t  KL(Q(. | x) || sum over v of p(v) Q(. | v))                z is MASK
        -alpha_t' / cluster_t  -log [ p(x) Q(k | x) / sum over v of p(v) Q(k | v) ]  z is cluster k

where ' is d/dt. The network's p is that of x^i given the *other* positions. For the exact p the
bound is the entropy. The network reads id V as MASK and id V + 1 + k as cluster k.
Letters: B rows, L tokens, P positions, V vocabulary; x the clean token, z what the network reads, k
and v a cluster and a token.
"""
import math

import torch

from diffusion import positions_of, to_device
from processes.clusters import cluster_table
from processes.integral import IntegralProcess
from samplers import Sampler, init_state, no_callback, numbers_at, scatter_at, schedule_times


class HDLM(IntegralProcess):
    """ cluster_of (V,): the cluster of each token, from 0 to n_clusters - 1. gamma > 0: how much
    faster tokens become clusters than clusters become MASK. xi in (0, 1]. """
    loss_weight = 'bound'

    def __init__(self, vocab_size, cluster_of, gamma=1.0, xi=1.0):
        self.mask_id = vocab_size
        self.n_clusters = int(cluster_of.max()) + 1
        self.gamma = gamma
        self.xi = xi
        if self.n_clusters == 1 and xi < 1:
            raise ValueError(f'hdlm_xi={xi}: expected 1 for a single cluster')
        self.take_clusters(cluster_of)

        # Q(k | v) at each cluster that is not the token's own
        self.xi_other = (1 - xi) / max(self.n_clusters - 1, 1)

    def new_clusters(self, config, data):
        """ The clusters of a new run, (V,), from its training split or another run. """
        return cluster_table(config['clusters_from'], data, config['clusters'])

    def take_clusters(self, cluster_of):
        """ The clusters of a run, (V,), in place of any. """
        self.tables = {cluster_of.device: cluster_of}                    # one copy on each device

    # ---- from clean to noisy

    def masses(self, t):
        """ alpha_t, cluster_t, mask_t, and the rates mask_t' and -alpha_t', of clocks t, float64.
        """
        gamma = self.gamma
        left = 1 - t
        alpha = left ** gamma
        slope = left ** (gamma - 1)
        alpha_rate = gamma * slope

        # gamma = 1 is the limit of the other formulas
        if gamma == 1:
            log_alpha = torch.log1p(-t)
            cluster = torch.where(t < 1, -left * log_alpha, 0)
            mask_rate = -log_alpha
        else:
            factor = gamma / (gamma - 1)
            cluster = factor * (left - alpha)
            mask_rate = factor * (1 - slope)
        mask = 1 - alpha - cluster
        return alpha, cluster, mask, mask_rate, alpha_rate

    def cluster_of(self, x):
        """ The clusters of tokens x, on the device of x. """
        if x.device not in self.tables:
            table = next(iter(self.tables.values()))
            self.tables[x.device] = table.to(x.device)
        return self.tables[x.device][x]

    def draw_cluster(self, x, u):
        """ k ~ Q(. | x) from uniform numbers u, float64 on the host, of the shape of x. """
        # above xi: one of the n_clusters - 1 others, with the own one left out of the count
        n_others = self.n_clusters - 1
        rest = (u - self.xi) / max(1 - self.xi, 1e-300)
        other = (rest * n_others).long()
        other = to_device(other.clamp(0, max(n_others - 1, 0)), x)

        # the count goes past the own one
        own = self.cluster_of(x)
        other = other + (other >= own)
        is_own = to_device(u < self.xi, x)
        return torch.where(is_own, own, other)

    def corrupt(self, tokens, t, u, known_mask=None):
        """ From one uniform number per position: MASK below mask_t, a cluster below mask_t +
        cluster_t, else the token. What is no token is scored. """
        _, cluster, mask, _, _ = self.masses(t.double())
        cluster = cluster[:, None]                                       # (B, 1)
        mask = mask[:, None]

        # the number within the stretch of the clusters says which of them
        u_cluster = (u - mask) / cluster.clamp(min=1e-300)
        k = self.draw_cluster(tokens, u_cluster.clamp(0, 1 - 1e-12))
        cluster_id = self.mask_id + 1 + k

        # what is scored
        scored = u < mask + cluster                                      # (B, L)
        if known_mask is not None:
            scored = scored & ~known_mask
        noisy = torch.where(u < mask, self.mask_id, cluster_id)
        return torch.where(scored, noisy, tokens), scored

    # ---- the loss and the bound

    def coefficients(self, t, kind):
        """ mask_t' / mask_t and -alpha_t' / cluster_t of clocks t (B,), float64: (B, 2). """
        _, cluster, mask, mask_rate, alpha_rate = self.masses(t)
        return torch.stack((mask_rate / mask, alpha_rate / cluster), 1)

    def integrand(self, log_p, x, z, coefficients):
        """ The term of the bound, (P,). log_p (P, V); x, z (P,); coefficients (P, 2). """
        V, n_clusters = self.mask_id, self.n_clusters
        xi, xi_other = self.xi, self.xi_other
        mask_weight, cluster_weight = coefficients.T                     # (P,)

        # log sum over v of p(v) Q(k | v), from the sum of p over each cluster
        cluster_of = self.cluster_of(torch.arange(V, device=x.device))
        p_cluster = torch.zeros(len(x), n_clusters, dtype=log_p.dtype, device=log_p.device)
        p_cluster = p_cluster.index_add(1, cluster_of, log_p.exp())      # (P, n_clusters)
        Q = xi * p_cluster + xi_other * (1 - p_cluster)
        tiny = torch.finfo(p_cluster.dtype).tiny
        log_Q = Q.clamp(min=tiny).log()
        own = cluster_of[x][:, None]                                     # (P, 1)
        k = (z - V - 1).clamp(min=0)[:, None]                            # (P, 1)

        # at MASK: KL(Q(. | x) || sum over v of p(v) Q(. | v))
        log_Q_own = log_Q.gather(1, own).squeeze(1)
        log_xi_other = -math.inf
        entropy_other = 0                                                # 0 log 0 = 0
        of_others = 0
        if xi_other:
            log_xi_other = math.log(xi_other)
            entropy_other = xi_other * log_xi_other
            of_others = xi_other * log_Q.sum(1)
        entropy = xi * math.log(xi) + (n_clusters - 1) * entropy_other
        KL = entropy - (xi - xi_other) * log_Q_own - of_others

        # at cluster k: -log [ p(x) Q(k | x) / sum over v of p(v) Q(k | v) ]
        log_Q_of_x = torch.where(k == own, math.log(xi), log_xi_other).squeeze(1)
        log_posterior = log_p.gather(1, x[:, None]) - log_Q.gather(1, k)
        at_cluster = -log_posterior.squeeze(1) - log_Q_of_x

        at_mask = mask_weight * KL
        at_cluster = cluster_weight * at_cluster
        return torch.where(z == V, at_mask, at_cluster)

    # ---- samplers

    @property
    def samplers(self):
        return {'ancestral': Sampler(self.ancestral)}

    def ancestral(self, denoise, propose, text, tokens, known_mask, steps, noise,
                  on_step=no_callback, **knobs):
        """
        From t to t_next, with x ~ p(x), and at cluster k with x ~ p(x) Q(k | x):
            MASK stays        with mask_next / mask_t
                 becomes k    with cluster_next (t - t_next) / ((1 - t_next) mask_t),  k ~ Q(. | x)
                 becomes x    else
            k    stays        with cluster_next (1 - t) / ((1 - t_next) cluster_t)
                 becomes x    else
        Only the device knows what is left, so every step waits for it. """
        V = self.mask_id
        tokens, left, _ = init_state(self, tokens, known_mask)
        cluster_of = self.cluster_of(torch.arange(V, device=tokens.device))

        for t, t_next in schedule_times(steps):
            cluster_t, mask_t = [float(mass) for mass in self.masses(t)[1:3]]
            cluster_next, mask_next = [float(mass) for mass in self.masses(t_next)[1:3]]
            t, t_next = float(t), float(t_next)

            # x ~ p(x) Q(k | x); a MASK fits any x
            positions = positions_of(left)
            logits = denoise(tokens, t, positions)                       # (P, V)
            z = tokens.flatten()[to_device(positions, tokens)]
            is_mask = z == V
            k = (z - V - 1).clamp(min=0)
            fit = torch.where(cluster_of == k[:, None], self.xi, self.xi_other)      # (P, V)
            fit.masked_fill_(is_mask[:, None], 1.0)
            x = propose(logits, numbers_at(positions, noise, tokens), fit)           # (P,)

            # the probabilities above
            cluster_stays = 0.0
            if cluster_t > 0:
                cluster_stays = cluster_next * (1 - t) / ((1 - t_next) * cluster_t)
            mask_to_cluster = cluster_next * (t - t_next) / ((1 - t_next) * mask_t)
            stay = torch.where(is_mask, mask_next / mask_t, cluster_stays)
            to_cluster = torch.where(is_mask, mask_to_cluster, 0.0)

            # one of the three, by a coin
            L = tokens.shape[1]
            coin = noise.uniforms('unmask', L, torch.float32).flatten()[positions]
            lot = noise.uniforms('unmask', L).flatten()[positions]
            coin = to_device(coin, tokens)
            cluster_id = V + 1 + self.draw_cluster(x, lot)
            new = torch.where(coin < stay + to_cluster, cluster_id, x)
            new = torch.where(coin < stay, z, new)
            scatter_at(tokens, positions, new)
            left.view(-1)[positions] = (new >= V).cpu()
            on_step(tokens, logits, positions)
        return tokens


def make(config, vocab_size, data=None):
    """ The process of a run's knobs. Its clusters are any, until it takes those of the run. """
    weight = config['text_loss_weight']
    if weight != 'bound':
        raise ValueError(f'text_loss_weight={weight}: text_process=hdlm has bound alone')
    cluster_of = torch.arange(vocab_size) % config['clusters']
    return HDLM(vocab_size, cluster_of, config['hdlm_gamma'], config['hdlm_xi'])
