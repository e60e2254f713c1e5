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
from functools import partial

import torch

from corpora.statistics import counts
from diffusion import MaskedText, in_float32, where_scored
from loss import BatchMaker, Loss

importance = 'freq'            # freq | learned | hybrid: what masking and curriculum go by
masking = 'time_only'          # time_only | proportional | inverse | balanced; proportional: the
                               # important are masked first
beta = 0.5                     # [0, 100]; rates are exp(-beta) to exp(beta) times the common one,
                               # within 1/2 and 2
curriculum = False             # easy, medium, then hard tokens weigh more
curriculum_stages = (0.3333, 0.6666)   # (0, 1): shares of training at which medium and hard begin
curriculum_focus = 2.0         # [1, 1e3]: how much more they weigh

QUANTILES = (0.3, 0.7)          # of importance: where easy ends and where hard begins
STAGES = ('easy', 'medium', 'hard')
IMPORTANCE_WEIGHT = 0.1         # of the loss of a learned importance


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
        return torch.exp(-self.beta_at(step) * (2 * importance - 1)).clamp(0.5, 2)

    def stage(self, step):
        """ 0, 1, 2: easy, medium, hard. """
        return sum(step >= share * self.max_iters for share in self.stages)

    def stage_name(self, step):
        """ 'easy', 'medium' or 'hard'; None without a curriculum. """
        return STAGES[self.stage(step)] if self.curriculum else None

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


# ---- batches and losses of a run that masks by importance

@dataclass
class AdaptiveBatchMaker(BatchMaker):
    """
    A BatchMaker whose texts are masked and weighted by importance. A batch also has
        importance (4,)                mean, deviation, least and largest of its tokens, for the log
    Where importance is learned, its network must read the clean text first. Then the device masks
    (AdaptiveLoss), the text of the batch is None, and in its place are the arguments of mask_by:
        tokens, known_mask (B, L)      the clean text, and where it is given (None: nowhere)
        t, text_on (B,), u (B, L)      clock, whether the row has a text loss, uniform numbers: in
                                       float32, since not every device has float64
        step
    """
    adaptive: Adaptive = None

    def mask(self, tokens, t, text_on, u, step, known_mask, real, n_causal):
        """ As in BatchMaker, without causal rows. """
        if self.adaptive.learns:
            return dict(tokens=tokens, t=t.float(), text_on=text_on.float(), u=in_float32(u),
                        step=step, known_mask=known_mask)
        importance = self.adaptive.rarity[tokens]
        return self.mask_by(importance, tokens, t, text_on, u, step, known_mask)

    def mask_by(self, importance, tokens, t, text_on, u, step, known_mask):
        """ BatchMaker.mask by the importance (B, L) of each token, and what is logged of it. """
        exponent = self.adaptive.exponents(importance.to(u.dtype), step)
        x_t, mask = self.text_process.corrupt(tokens, t, u, known_mask, exponent)
        scored = mask & (text_on > 0)[:, None]
        weight = self.text_process.training_weight(t)[:, None] * exponent
        weight = weight * self.adaptive.emphasis(importance, scored, tokens, step)

        real = importance[tokens != self.adaptive.pad]
        logged = torch.stack((real.mean(), real.std(), real.min(), real.max()))
        batch = where_scored(scored, tokens, weight)
        return dict(batch, x_t=x_t, importance=logged)


class AdaptiveLoss(Loss):
    """ Where importance is learned: first its network, then the masking, then the losses. """

    def __init__(self, model, make_batch, autocast, latent_weight=1.0):
        super().__init__(model, make_batch, autocast, latent_weight)
        self.weights = {'text_loss': 1.0, 'importance_loss': IMPORTANCE_WEIGHT,
                        'latent_loss': latent_weight}

    def forward(self, batch, predict):
        if self.make_batch.adaptive.learns:
            with self.autocast():
                importance, learned = self.model.importance(batch['tokens'])
                names = ('tokens', 't', 'text_on', 'u', 'step', 'known_mask')
                masked = self.make_batch.mask_by(importance.detach(),
                                                 *[batch[name] for name in names])
            batch = {**batch, **masked, 'learned': learned}
        loss, sums = super().forward(batch, predict)
        return loss, {**sums, 'importance': batch['importance']}

    def text_loss(self, hidden, batch):
        result = super().text_loss(hidden, batch)
        if self.make_batch.adaptive.learns:
            learned = batch['learned'].flatten()[batch['positions']]
            result['importance_loss'] = self.make_batch.adaptive.regression(
                learned, result['nll'], batch['targets'])
        return result


# ---- for a run

class AdaptiveText(MaskedText):
    """ Masked text: only the batches and the loss of its training are others. """

    def batches_and_loss(self, config, data):
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
        return partial(AdaptiveBatchMaker, adaptive=adaptive), AdaptiveLoss


def make(config, vocab_size):
    return AdaptiveText(vocab_size, config['text_schedule'], config['text_loss_weight'])
