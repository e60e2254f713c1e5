"""
ATAT, adaptive time-aware token masking: which tokens are masked sooner, and which weigh more, by how important they are.

Importance imp in [0, 1], of every token of a clean text; PAD has 1/2, the mean, so it is masked and weighed as ever
    freq      the rank of its rarity: the share of the training tokens that are more frequent, and half of those equally frequent
    learned   Importance, which reads the clean text and regresses the rank, among the masked tokens of its micro-batch, of the
              loss that the denoiser has there, detached
    hybrid    .7 learned + .3 freq

Masking, with M = 1 - a the masked share of the schedule
    P(x_t^i = MASK) = M(t)^w_i,   w_i = exp(-beta (2 imp_i - 1)) in [1/2, 2],   at the rate w_i w(t)
    loss = sum over masked of w_i w(t) nll_i / (B L)
So every token is clean at t = 0 and MASK at t = 1, and beta = 0 is plain masking, bit for bit.
    proportional  beta > 0: the important are masked first, so written last      inverse  beta < 0
    balanced      beta runs from -b to b over the run                           time_only  beta = 0

This trains on other states; it is no bound. The rate belongs to a token that is hidden: the loss is least where p is tilted by w, and there
it is below the entropy. What is reported is always the plain bound (MaskedText.bound), which knows of no importance; for freq there
is also a bound that counts what the rates tell, genmd4_bound (GenMD4, arXiv:2406.04329).

Curriculum: an easy, a medium and a hard stage of training, in which masked tokens of low, middle or high importance weigh `focus` times
the others; weights have mean 1 over the masked tokens. These and the ranks are those of a micro-batch, as each process sees it: a run is
the same on another number of processes, or with other accumulation, only without them.
Letters: B rows, L tokens, P scored positions, V vocabulary.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn

from diffusion import positions_of

from model import Model, ModelConfig

QUANTILES = (0.3, 0.7)          # of importance: where easy ends and where hard begins
STAGES = ('easy', 'medium', 'hard')


def rarity(counts, pad):
    """ (V,) float32 in (0, 1), mean 1/2 over the counted tokens: the share of tokens that are more frequent than v, and half of those as
    frequent. counts (V,): how often each id occurs in the training split; PAD is not counted and has 1/2. """
    counts = torch.as_tensor(counts, dtype=torch.float64).clone()
    counts[pad] = 0
    levels, level = counts.unique(return_inverse=True)                   # rising: the rare first
    mass = torch.zeros_like(levels).index_add_(0, level, counts)         # of all ids of that count
    more = mass.sum() - mass.cumsum(0)
    out = ((more + mass / 2) / mass.sum())[level]
    out[pad] = 0.5
    return out.float()


@dataclass
class Adaptive:
    masking: str                # time_only | proportional | inverse | balanced
    beta: float                 # b >= 0
    curriculum: bool
    stages: tuple               # shares of training at which the medium and the hard stage begin
    focus: float
    max_iters: int
    pad: int
    rarity: torch.Tensor        # (V,) on the host: freq
    learns: bool                # importance comes from the network, on its device

    def __post_init__(self):
        if self.masking not in ('time_only', 'proportional', 'inverse', 'balanced'):
            raise ValueError(f'masking={self.masking!r}: choose from time_only, proportional, inverse, balanced')
        if self.beta < 0 or self.focus < 1 or len(self.stages) != 2 or not 0 < self.stages[0] < self.stages[1] < 1:
            raise ValueError(f'beta={self.beta}, curriculum_focus={self.focus}, curriculum_stages={self.stages}: expected a beta >= 0 (the '
                             'sign is the masking\'s), a focus >= 1, and two rising shares of training')

    def beta_at(self, step):
        progress = step / max(1, self.max_iters - 1)
        return self.beta * {'time_only': 0, 'proportional': 1, 'inverse': -1, 'balanced': 2 * progress - 1}[self.masking]

    def exponents(self, imp, step):
        """ w = exp(-beta (2 imp - 1)), in [1/2, 2]. """
        return torch.exp(-self.beta_at(step) * (2 * imp.double() - 1)).clamp(0.5, 2)

    def share(self, text, t_min):
        """ E_t,imp [M^w] / E_t [M] for imp ~ U(0,1): what it changes in the masked share, at most over training. Near 1: for M = t and
        without the clamp E_imp 1/(1+w) is 1/2 whatever beta. """
        t = t_min + (1 - t_min) * (torch.arange(1000, dtype=torch.float64) + .5) / 1000
        imp = (torch.arange(100, dtype=torch.float64)[:, None] + .5) / 100
        return max((text.masked_share(t) ** self.exponents(imp, step)).mean().item() / text.masked_share(t).mean().item()
                   for step in (0, self.max_iters - 1))

    def stage(self, step):
        """ 0, 1, 2: easy, medium, hard. """
        return sum(step >= share * self.max_iters for share in self.stages)

    def stage_name(self, step):
        """ 'easy', 'medium' or 'hard'; None without a curriculum. """
        return STAGES[self.stage(step)] if self.curriculum else None

    def emphasis(self, imp, scored, tokens, step):
        """ Loss weights (B, L), mean 1 over the scored tokens of this micro-batch, PAD apart, which has 1. In the hard stage the focus
        falls to 1, where it is for the last tenth of training. """
        counted = scored & (tokens != self.pad)
        if not self.curriculum or not counted.any():
            return torch.ones_like(imp)
        left = (0.9 - step / self.max_iters) / (0.9 - min(self.stages[1], 0.8))
        focus = 1 + (self.focus - 1) * min(1, max(0, left))
        bounds = imp[counted].quantile(torch.tensor(QUANTILES, dtype=imp.dtype, device=imp.device))
        weight = torch.where(torch.bucketize(imp, bounds) == self.stage(step), focus, 1.0)
        return torch.where(counted, weight / weight[counted].mean(), 1.0)

    def regression(self, imp, nll, targets, weight):
        """ Mean of (imp - rank of nll)^2 over what is scored of (P,), PAD apart: which tokens are hard, from 0 to 1, whatever the loss. """
        scored = (weight > 0) & (targets != self.pad)
        n = scored.sum().clamp(min=1)
        rank = nll.masked_fill(~scored, torch.inf).argsort().argsort()   # the scored come first
        return torch.where(scored, (imp - (rank + 0.5) / n).square(), 0).sum() / n


class Importance(nn.Module):
    """ How important each token of a clean text is, (B, L) -> (B, L) in [0, 1], and the learned part of
    it, or None. freq reads the table `rarity`. The network is a text model of two layers with one
    number per token for a head: 1/2 at the start. PAD has 1/2, and so has MASK in a text that is being
    written. """

    def __init__(self, kind, vocab_size, seq_len, width=128):
        super().__init__()
        if kind not in ('freq', 'learned', 'hybrid'):
            raise ValueError(f'importance={kind!r}: choose from none, freq, learned, hybrid')
        self.kind = kind
        self.register_buffer('rarity', torch.full((vocab_size,), 0.5))   # `rarity` of the training split
        if kind in ('learned', 'hybrid'):
            self.net = Model(ModelConfig(vocab_size=vocab_size, seq_len=seq_len, depth=2, heads=2, width=width,
                                         streams=('text',), text_clock=False))
            self.net.text_head = nn.Linear(width, 1, bias=False)
            nn.init.zeros_(self.net.text_head.weight)

    def forward(self, tokens):
        pad = len(self.rarity) - 1                                       # the last id; MASK comes after it
        rare = self.rarity[tokens.clamp(max=pad)]
        if self.kind == 'freq':
            return rare, None
        learned = self.net(tokens, None, None, None)[0].squeeze(2).sigmoid()
        learned = torch.where(tokens >= pad, 0.5, learned)
        return (learned if self.kind == 'learned' else 0.7 * learned + 0.3 * rare), learned


@torch.no_grad()
def genmd4_bound(model, text, tokens, latents, t_latent, t, u, w, given=None):
    """
    One draw, nats per sample (B,), of the bound for rates l_v = w_v w(t) that belong to the token:
        E_t [ sum over masked of  l_x (-log mu_x) - l_x + sum_v l_v mu_v ],   mu = p(. | x_t, t)
    The last two terms pay for rates that the network cannot know: they vanish where all w are equal and, in expectation, at the true
    posterior, where the whole is the entropy. That posterior depends on t, so the network should read the text clock.
    tokens (B, L), t (B,) spread over (0, 1), u (B, L) uniform, w (V,); given (B, L): True is not masked.    GenMD4, arXiv:2406.04329
    """
    noisy, mask = text.corrupt(tokens, t, u, given, w[tokens])
    positions = positions_of(mask)
    log_mu = model(noisy, latents, t.float(), t_latent, positions, predict=('text',))[0].double().log_softmax(1)     # (P, V)
    x, L = tokens.flatten()[positions], tokens.shape[1]
    l_v = w * text.weight(t)[positions // L, None]                       # (P, V)
    l_x, log_mu_x = (table.gather(1, x[:, None]).squeeze(1) for table in (l_v, log_mu))
    integrand = l_x * -log_mu_x - l_x + (l_v * log_mu.exp()).sum(1)
    return torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device).index_add_(0, positions // L, integrand)
