"""
ATAT, adaptive time-aware token masking: which tokens are masked sooner, and which tokens weigh
more, by their importance.

Importance imp in [0, 1], of each token of a clean text. PAD has 1/2, the mean.
    freq      the rank of the token's rarity: the share of the training tokens that are more
              frequent, plus half of those equally frequent
    learned   a small network (model.Importance) reads the clean text and predicts the rank of the
              denoiser's loss there, among the masked tokens of the micro-batch
    hybrid    .7 learned + .3 freq

Masking, with M(t) the masked share of the schedule and w(t) the weight of its bound
    P(x_t^i = MASK) = M(t)^w_i,     w_i = exp(-beta (2 imp_i - 1)) within [1/2, 2]
    loss = sum over masked i of  w_i w(t) nll_i / (B L)
    So every token is clean at t = 0 and MASK at t = 1. beta = 0 is plain masking, bit for bit.
    proportional   beta > 0: important tokens are masked first, so they are written last
    inverse        beta < 0
    balanced       beta goes from -b to b over the run
    time_only      beta = 0

This loss is not an upper bound: the weight w_i depends on the hidden token. The loss is least where
p is proportional to w times the posterior, and there it is below the entropy. So what is reported
is always the plain bound (MaskedText.bound), which does not use importance.

Curriculum: an easy, a medium and a hard stage of training. In each stage the masked tokens of low,
middle or high importance weigh `focus` times the others. The weights have mean 1 over the masked
tokens.

The ranks and these means are those of a micro-batch on one process. With them a run is not the same
on another number of processes or with another accumulation.
Letters: B rows, L tokens, P scored positions, V vocabulary.
"""
from dataclasses import dataclass

import torch

from data import counts
from diffusion import MaskedText, NoisyText


QUANTILES = (0.3, 0.7)          # of importance: where easy ends and where hard begins
STAGES = ('easy', 'medium', 'hard')


# ---- importance

def rarity(counts, pad):
    """ The importance `freq` of each id, (V,) float32 in (0, 1), with mean 1/2 over the counted
    tokens. counts (V,): how often each id occurs in the training split. PAD is not counted and has
    1/2. """
    counts = torch.as_tensor(counts, dtype=torch.float64).clone()
    counts[pad] = 0

    # ids of equal count share a level; the levels rise, so the rare come first
    levels, level = counts.unique(return_inverse=True)
    mass = torch.zeros_like(levels).index_add_(0, level, counts)         # tokens of each level
    more_frequent = mass.sum() - mass.cumsum(0)
    rank = ((more_frequent + mass / 2) / mass.sum())[level]              # (V,)
    rank[pad] = 0.5
    return rank.float()


# ---- masking and curriculum

@dataclass
class Adaptive:
    masking: str                # as the knob
    beta: float                 # b >= 0
    curriculum: bool
    stages: tuple               # shares of training at which the medium and the hard stage begin
    focus: float
    max_iters: int
    pad: int
    rarity: torch.Tensor        # (V,) on the host: freq
    learns: bool                # importance comes from the network, on its device

    def __post_init__(self):
        if len(self.stages) != 2 or self.stages[0] >= self.stages[1]:
            raise ValueError(f'curriculum_stages={self.stages}: expected two rising shares of '
                             'training')

    def beta_at(self, step):
        """ beta with its sign. """
        progress = step / max(1, self.max_iters - 1)
        sign = dict(time_only=0, proportional=1, inverse=-1, balanced=2 * progress - 1)
        return self.beta * sign[self.masking]

    def exponents(self, importance, step):
        """ w = exp(-beta (2 imp - 1)), within [1/2, 2]. """
        signed = 2 * importance - 1                                      # from -1 to 1
        return torch.exp(-self.beta_at(step) * signed).clamp(0.5, 2)

    def stage(self, step):
        """ 0, 1, 2: easy, medium, hard. """
        return sum(step >= share * self.max_iters for share in self.stages)

    def emphasis(self, importance, scored, tokens, step):
        """ Loss weights (B, L) of the curriculum: mean 1 over the scored tokens of this
        micro-batch. PAD is not among them and has 1. In the hard stage the focus falls linearly to
        1, which it reaches after 9/10 of training. """
        counted = scored & (tokens != self.pad)
        if not self.curriculum or not counted.any():
            return torch.ones_like(importance)

        left = (0.9 - step / self.max_iters) / (0.9 - min(self.stages[1], 0.8))
        focus = 1 + (self.focus - 1) * min(1, max(0, left))
        quantiles = torch.tensor(QUANTILES, dtype=importance.dtype, device=importance.device)
        bounds = importance[counted].quantile(quantiles)
        is_in_focus = torch.bucketize(importance, bounds) == self.stage(step)
        weight = torch.where(is_in_focus, focus, 1.0)
        return torch.where(counted, weight / weight[counted].mean(), 1.0)

    def regression(self, importance, nll, targets):
        """ The loss of a learned importance: the mean of (imp - rank of nll)^2 over the scored
        positions of (P,), without PAD. Ranks go from 0 to 1 whatever the size of the losses. """
        scored = targets != self.pad
        n = scored.sum().clamp(min=1)
        rank = nll.masked_fill(~scored, torch.inf).argsort().argsort()   # the scored come first
        error = (importance - (rank + 0.5) / n).square()
        return torch.where(scored, error, 0).sum() / n


# ---- the process

class AdaptiveText(MaskedText):
    """ Masked text that is masked, and weighs, by importance in training. adaptive: None where only
    texts are written. """
    IMPORTANCE_WEIGHT = 0.1        # of the loss of a learned importance

    def __init__(self, vocab_size, schedule, loss_weight, adaptive=None):
        super().__init__(vocab_size, schedule, loss_weight)
        self.adaptive = adaptive
        self.masks_on_device = bool(adaptive and adaptive.learns)

    def noisy_text(self, tokens, t, text_on, u, step, known_mask):
        return self.masked_by(self.adaptive.rarity[tokens], tokens, t, text_on, u, step, known_mask)

    def masked_by(self, importance, tokens, t, text_on, u, step, known_mask):
        """ NoisyText by the importance (B, L) of each token. """
        exponent = self.adaptive.exponents(importance.to(u.dtype), step)
        x_t, mask = self.corrupt(tokens, t, u, known_mask, exponent)
        scored = mask & (text_on > 0)[:, None]
        weight = self.training_weight(t)[:, None] * exponent
        weight = weight * self.adaptive.emphasis(importance, scored, tokens, step)

        real = importance[tokens != self.adaptive.pad]
        logged = torch.stack((real.mean(), real.std(), real.min(), real.max()))
        return NoisyText(x_t, scored, weight, logged)

    # ---- where importance is learned: first its network, then the masking, both on the device

    def mask_on_device(self, model, batch):
        """ Masks the text of a Batch, in place. Returns the importance (B, L) that the network
        predicts. """
        tokens = batch.unmasked['tokens']
        importance, learned = model.importance(tokens)
        noisy = self.masked_by(importance.detach(), **batch.unmasked)
        for name, value in noisy.fields(tokens).items():
            setattr(batch, name, value)
        return learned

    def importance_loss(self, learned, nll, batch):
        return self.adaptive.regression(learned.flatten()[batch.positions], nll, batch.targets)

    def logged(self, step):
        """ What the log has besides the losses. """
        if not self.adaptive.curriculum:
            return {}
        return dict(curriculum_stage=STAGES[self.adaptive.stage(step)])


def make(config, vocab_size, data=None):
    """ The process of a run's knobs. data: the training split, where it trains. """
    adaptive = None
    if data is not None:
        adaptive = Adaptive(
            masking=config['masking'],
            beta=config['beta'],
            curriculum=config['curriculum'],
            stages=config['curriculum_stages'],
            focus=config['curriculum_focus'],
            max_iters=config['max_iters'],
            pad=data.pad,
            rarity=rarity(counts(data), data.pad),
            learns=config['importance'] != 'freq')
    return AdaptiveText(vocab_size, config['text_schedule'], config['text_loss_weight'], adaptive)
