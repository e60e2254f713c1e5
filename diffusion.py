"""
The two noise processes, one for text and one for latents, the clocks that drive them, and what a
training step computes with both. Each process has a schedule, a corruption (from clean to noisy)
and a loss. The steps back are in samplers.py (text) and sampling/solvers.py (latents). Time t runs
from 0 (clean) to 1 (noise).

One training step, without what makes it fast or optional:
    t_text, t_latent = draw_clocks(mode)
    x_t = where(u < M(t_text), MASK, tokens)              M(t): the masked share, t by default
    z_t = alpha z + sigma e                               alpha, sigma of t_latent
    logits, found = model(x_t, z_t, t_text, t_latent)
    loss = sum over masked of w(t) nll / (B L)            w = M' / M, 1/t by default
         + latent_weight * mean of (target - found)^2     target: v, or z (latent_target)
The text loss is in nats per position, PAD among them. With this w it is a bound on -log p as t_min,
where the clocks begin, goes to 0.

Noising makes the noisy Batch of clean rows, on the host. Loss computes its losses on the device,
and validates.

A mode says, for each row, how its two clocks are drawn and which of the two losses count. The
losses never see the mode. Each loss is a mean over all rows, selected with torch.where, so modes
mix inside a batch and every rank does the same work. Rows of the mode `causal` are not masked: the
network reads them from left to right. They come last in the batch, and the network is told how many
they are. ATAT masks by importance, by its own noisy_text (processes/adaptive.py).

Masked text                                        MDLM arXiv:2406.07524, MD4 arXiv:2406.04329
    x_t^i    = MASK with probability M(t), the masked share, else x^i;   M(0) = 0, M(1) = 1
    bound    = E_t [ w(t) * sum over masked i of -log p(x^i | x_t) ],    w = M' / M
             = E_n [ L/n  * sum over masked i of -log p(x^i | x_t) ],    n ~ U{1..L} are masked
    Both lines are the same upper bound on -log p(x), in nats per sample.

Text from left to right: rows of the mode `causal`
    -log p(x) = sum over i of -log p(x^i | x^<i)

Gaussian latents                              vp and v: arXiv:2202.00512, rf: arXiv:2209.03003
    z_t = alpha_t z + sigma_t e,    e ~ N(0, 1)
    vp:  alpha_t = cos(pi t/2),  sigma_t = sin(pi t/2)             alpha_t^2 + sigma_t^2 = 1
    rf:  alpha_t = 1 - t,        sigma_t = t                       alpha_t   + sigma_t   = 1
    The network predicts x0 = z, or v = alpha_t e - sigma_t z, or flow = e - z, or eps = e, or
    rest = z - alpha_t z_t: with vp, a network that says 0 draws N(0, 1), and not its mean.

Letters: B batch, L text tokens, N latent vectors, D latent dims, V vocabulary, C width,
P positions that the text head scores. t_next is the time after a step back, so t_next < t.
"""
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.quasirandom import SobolEngine

from noise import below_1, normals, uniforms


# ---- modes

# DRAWN: the clock is drawn from U(t_min, 1)
# GIVEN: the modality is given, so its clock is 0
# causal: the network reads the text from left to right and predicts the next token. Nothing is
# masked. Every token and the EOS are scored, PAD is not
# complete: t2l where a part of the latent is given too, some of its vectors (given_parts)
DRAWN, GIVEN = True, False

MODES = {
    #                 text clock, latent clock, text_on,     latent_on: has it a loss?
    'unconditional': (DRAWN,      DRAWN,        1,           1),
    'l2t':           (DRAWN,      GIVEN,        1,           0),
    't2l':           (GIVEN,      DRAWN,        0,           1),
    'causal':        (GIVEN,      GIVEN,        1,           0),
    'complete':      (GIVEN,      DRAWN,        0,           1),
}
CAUSAL = list(MODES).index('causal')
COMPLETE = list(MODES).index('complete')


def check_choice(name, value, choices):
    """ ValueError unless the value of a knob is one of its choices. """
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose from {', '.join(choices)}")


def mode_shares(mode):
    """ {mode: share of the rows}, in the order of MODES. mode: one of MODES, or several with their
    weights, as 'l2t+causal' or 'l2t+3*causal'. """
    weights = dict.fromkeys(MODES, 0)
    for part in mode.split('+'):
        weight, times, name = part.strip().rpartition('*')
        check_choice('mode', name, MODES)
        if times and not (weight.isascii() and weight.isdecimal() and int(weight) > 0):
            raise ValueError(f'mode={mode!r}: {weight!r} is no weight: expected a whole number '
                             f'above 0, as in 3*{name}')
        weights[name] += int(weight) if times else 1

    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def modes_of(mode):
    """ The modes {name} that have a share in any stage of a run with this knob `mode`. """
    names = set()
    for part in mode.split(','):
        shares = mode_shares(part.split(':')[0].strip())
        names |= {name for name, share in shares.items() if share}
    return names


# ---- clocks

class Clocks(NamedTuple):
    """ Of the rows of a batch, (B,) each. """
    mode: torch.Tensor             # index into MODES, int64
    t_text: torch.Tensor           # the two clocks, float64
    t_latent: torch.Tensor
    text_on: torch.Tensor          # 1 or 0: whether the row has this loss
    latent_on: torch.Tensor


def draw_clocks(seed, step, first, rows, shares, cond_drop=0.1, t_min=1e-3):
    """ The Clocks of rows first .. first + rows of the global batch at this step.
    shares: from mode_shares. cond_drop: how often the null condition replaces a given modality. """
    # One Sobol' point per row of the global batch, plus one random shift per step, modulo 1.
    # So each clock is exactly uniform, and contiguous rows cover (0, 1) evenly, alone and jointly.
    engine = SobolEngine(4, scramble=False).fast_forward(first)
    points = engine.draw(rows, dtype=torch.float64)
    shift = uniforms(seed, step, 'clocks', 0, 1, 4)
    # The first two of Sobol's dimensions fill their square most evenly, so the clocks have them.
    u_text, u_latent, u_mode, u_drop = ((points + shift) % 1).T

    # the mode of each row; the clamp is there because the shares may sum to 1 - 1e-16
    edges = torch.tensor(list(shares.values()), dtype=torch.float64).cumsum(0)
    mode = torch.searchsorted(edges, u_mode.contiguous(), right=True)
    mode = mode.clamp(max=max(i for i, share in enumerate(shares.values()) if share))
    table = torch.tensor([MODES[name] for name in shares], dtype=torch.float64)
    text_drawn, latent_drawn, text_on, latent_on = table[mode].T

    # the clocks
    t_text = torch.where(text_drawn > 0, t_min + (1 - t_min) * u_text, 0.0)
    t_latent = torch.where(latent_drawn > 0, t_min + (1 - t_min) * u_latent, 0.0)

    # the null condition: a given modality is pure noise, at clock 1. Given is what has no loss: in
    # a causal row the text has clock 0 and a loss, so only its latents may be dropped
    dropped = u_drop < cond_drop
    t_text = torch.where(dropped & (text_on == 0), 1.0, t_text)
    t_latent = torch.where(dropped & (latent_on == 0), 1.0, t_latent)
    return Clocks(mode, t_text, t_latent, text_on, latent_on)


def given_parts(seed, step, first, rows, N):
    """ Which of the N vectors of a latent, a square grid, are given in rows of the mode `complete`:
    (rows, N) bool. A box is drawn at random; given is all but the box, or the box alone. """
    side = math.isqrt(N)
    u = uniforms(seed, step, 'parts', first, rows, 5)
    # one edge of three lies outside, so that half pictures are among them
    edges = side * (1.5 * u[:, :4] - 0.25)
    middles = torch.arange(side) + 0.5                     # of the lines and columns of the grid
    is_before = middles < edges[:, :, None]                # (rows, 4, side)
    box_lines = is_before[:, 0] ^ is_before[:, 1]
    box_columns = is_before[:, 2] ^ is_before[:, 3]
    box = (box_lines[:, :, None] & box_columns[:, None]).flatten(1)

    # where nothing would be left to draw, nothing is given
    given = box ^ (u[:, 4:] < 0.5)
    return given & ~given.all(1, keepdim=True)


# ---- logits, a chunk of the positions at a time

# {device: its fast kernels need a multiple of so many rows}
ROWS_OF_HEAD = {'cuda': 64}


def filled_up(head):
    """ A head (V, C) with further rows of 0, for the fast kernels of a card, and the bias of its
    logits: -inf for these rows, so that their probability is 0; None where there are none. """
    missing = -len(head) % ROWS_OF_HEAD.get(head.device.type, 1)
    if not missing:
        return head, None
    is_id = torch.arange(len(head) + missing, device=head.device) < len(head)
    rows = F.pad(head, (0, 0, 0, missing))
    bias = torch.where(is_id, 0., -torch.inf)
    return rows, bias


# numbers in the table (p, V) of one chunk: 128 MiB in float32, and a few such tables live at once
LOGITS_CHUNK = 2 ** 25


def in_chunks(function, hidden, *others, V):
    """ function(hidden (p, C), *others (p, ...)) of one chunk of the positions after the other: no
    table of V columns that it makes is larger than a chunk. It returns a tensor (p, ...), or
    several, and this does so of all positions. """
    size = max(1, LOGITS_CHUNK // V)
    found = []
    for first in range(0, max(len(hidden), 1), size):                    # no positions: one chunk
        part = slice(first, first + size)
        found.append(function(hidden[part], *[x[part] for x in others]))

    if isinstance(found[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*found))
    return torch.cat(found)


def nll_of(logits, targets):
    """ -log p(x) (P,), nats, of targets (P,) under logits (P, V). """
    return F.cross_entropy(logits, targets, reduction='none')


def sum_over_texts(term, model, V, seen, latents, t_text, t_latent, scored, *others, **more):
    """ For each text, the sum of a term over its scored positions: (B,) float64.
    term         term(logits (p, V), *others (p, ...)) -> (p,), of some scored positions
    seen         (B, L): what the network reads, at clock t_text (B,)
    latents      (B, N, D) or None, at clock t_latent (B,)
    scored       (B, L) bool
    others       (B, L, ...) each: what the term needs besides logits, such as the right tokens
    more         further arguments of the network
    latents and t_latent lie on the device, all others and the result on the host. """
    # the network runs its head at the scored positions only
    positions = positions_of(scored)                                     # (P,)
    hidden, _ = model(
        to_device(seen, t_latent),
        latents,
        to_device(t_text.float(), t_latent),
        t_latent,
        to_device(positions, t_latent),
        predict=('text',),
        return_hidden=True,
        **more)
    others = [to_device(x.flatten(0, 1)[positions], t_latent) for x in others]

    def term_of_hidden(hidden, *others):
        return term(model.text_head(hidden).float(), *others)
    value = in_chunks(term_of_hidden, hidden, *others, V=V).cpu()        # (P,)

    # the sum over each row
    B, L = seen.shape
    total = torch.zeros(B, dtype=torch.float64)
    return total.index_add_(0, positions // L, value.double())


@torch.no_grad()
def exact_nll(model, tokens, latents, t_latent, known_mask=None):
    """ -log p of each text read from left to right, nats per sample (B,), float64. tokens (B, L),
    known_mask (B, L), True where a token is given and not scored, and the result lie on the host;
    latents (B, N, D), at clock t_latent (B,), on the device. """
    B = len(tokens)
    V = model.config.vocab_size
    scored = tokens != V - 1                               # PAD is the last id
    if known_mask is not None:
        scored = scored & ~known_mask
    return sum_over_texts(nll_of, model, V, tokens, latents, torch.zeros(B), t_latent, scored,
                          tokens, n_causal=B)


# ---- masked text

def positions_of(mask):
    """ Flat positions (P,) of the True elements of a mask. """
    return mask.flatten().nonzero().squeeze(1)


def is_end(tokens, ids):
    """ Where tokens (B, L) are EOS or PAD. ids: a tokenizer, or a dataset. """
    return (tokens == ids.eos) | (tokens == ids.pad)


def to_device(x, like):
    """ x on the device of `like`, from the host without a wait; x itself where that is None. """
    return x if like is None else x.to(like.device, non_blocking=not x.is_cuda)


def rank_in_row(values):
    """ (B, L): how many values of its row are smaller, so 0 is the smallest. """
    return values.argsort(1).argsort(1)


# {name: (M(t), the time t with M(t) = share, w(t) = M' / M)}
SCHEDULES = {
    'loglinear': (lambda t: t, lambda share: share, lambda t: 1 / t),
    'cosine': (lambda t: torch.sin(math.pi / 2 * t),
               lambda share: torch.asin(share) * (2 / math.pi),
               lambda t: (math.pi / 2) / torch.tan(math.pi / 2 * t)),
}


class NoisyText(NamedTuple):
    """ What a text process makes of clean texts for a training step. """
    x_t: torch.Tensor              # (B, L) ids that the network reads
    scored: torch.Tensor           # (B, L) bool
    weight: torch.Tensor           # (B, L) of the loss, w(t) by default
    importance: torch.Tensor | None = None     # as in Batch

    def fields(self, tokens):
        """ {field of a Batch: value}: the positions where the head runs, and for each of them the
        right token and the weight. The weight is divided by B L: rows without a text loss count,
        too. """
        positions = positions_of(self.scored)                            # (P,)
        weight = self.weight / self.scored.numel()
        return dict(
            x_t=self.x_t,
            positions=positions,
            targets=tokens.flatten()[positions],
            weight=weight.flatten()[positions].float(),
            importance=self.importance)


class TextProcess:
    """ What training asks of a text process besides its corrupt, training_weight and loss. """
    masks_on_device = False        # True: a network decides what is masked, so Loss calls it
    samplers = None                # {name: samplers.Sampler}; None: all of samplers.py
    corrects = False               # True: it may take back what it wrote (self_correct)

    def noisy_text(self, tokens, t, text_on, u, step, known_mask):
        """ The NoisyText that training reads, of clean texts (B, L). t (B,): their clocks; text_on
        (B,): whether a row has a text loss; u (B, L) uniform; step: of the run. """
        x_t, mask = self.corrupt(tokens, t, u, known_mask)
        scored = mask & (text_on > 0)[:, None]
        weight = self.training_weight(t)[:, None].expand(scored.shape)
        return NoisyText(x_t, scored, weight)

    def loss_coefficients(self, t):
        """ What the loss needs of the clocks t (B,) besides the weight: (B, n), or None. """

    def logged(self, step):
        """ {name: value} for the log, besides the losses. """
        return {}


class MaskedText(TextProcess):
    """ Masked text with one of the SCHEDULES. Loss weights; only `bound` makes the loss a bound:
        bound        w(t)
        uniform      1, as in discrete flow matching (arXiv:2407.15595)
        rdm          1 - t, as in RDM and DPLM (arXiv:2302.05737) """
    LOSS_WEIGHTS = {
        'bound': lambda self, t: self.bound_weight(t),
        'uniform': lambda self, t: torch.ones_like(t),
        'rdm': lambda self, t: 1 - t,
    }

    def __init__(self, vocab_size, schedule='loglinear', loss_weight='bound'):
        check_choice('text_loss_weight', loss_weight, self.LOSS_WEIGHTS)
        self.mask_id = vocab_size
        self.loss_weight = loss_weight
        self.schedule = SCHEDULES[schedule]

    def masked_share(self, t):
        """ M(t). """
        return self.schedule[0](t)

    def time_of_share(self, share):
        """ The time t with M(t) = share. """
        return self.schedule[1](share)

    def bound_weight(self, t):
        """ w(t) = M' / M. """
        return self.schedule[2](t)

    def training_weight(self, t):
        """ The weight of a row's text loss in training. """
        return self.LOSS_WEIGHTS[self.loss_weight](self, t)

    def corrupt(self, tokens, t, u, known_mask=None, exponent=None):
        """ x_t (B, L) and the mask (B, L): True where a token became MASK. tokens (B, L), t (B,),
        u (B, L) uniform. known_mask (B, L): True is never masked. exponent (B, L): a token is
        masked with probability M(t)^exponent (adaptive masking). """
        share = self.masked_share(t)[:, None]                            # (B, 1)
        if exponent is not None:
            share = share ** exponent                                    # (B, L)
        mask = u < share                                                 # (B, L)
        if known_mask is not None:
            mask &= ~known_mask
        return torch.where(mask, self.mask_id, tokens), mask

    def corrupt_exactly(self, tokens, n, u, known_mask=None):
        """ As corrupt, but masks exactly n (B,) free positions: those with the smallest u. """
        if known_mask is not None:
            u = torch.where(known_mask, torch.inf, u)
        mask = (rank_in_row(u) < n[:, None]) & (u < torch.inf)           # not all n may be free
        return torch.where(mask, self.mask_id, tokens), mask

    def loss(self, hidden, head, targets, weight, seen=None, coefficients=None):
        """ loss = sum over p of weight_p * -log p(x_p)          nats per position, PAD among them
        hidden (P, C); head (V, C), logits = hidden head^T; targets (P,);
        weight (P,) float32: w(t) / (B L).
        Returns the loss, nll (P,) in nats, and right (P,) bool: the target is the likeliest token.
        Other text processes also need seen (P,), what the network read there, and coefficients
        (P, n), functions of its row's clock. Compiled for a card, it keeps no float32 logits. """
        rows, bias = filled_up(head)
        logits = F.linear(hidden, rows, bias).float()  # argmax is slow in bfloat16 on a CPU
        nll = nll_of(logits, targets)
        right = logits.argmax(1) == targets
        return (weight * nll).sum(), nll, right

    @torch.no_grad()
    def bound(self, model, tokens, latents, t_latent, u, known_mask=None):
        """ One draw of the exact discrete bound, nats per sample (B,), float64:
            n ~ U{1..F},   F / n * sum over the n masked i of -log p(x^i | x_t)
        F is the number of free positions: L, if none is known. There is no t_min here. The bound is
        MDLM's, and equal to the any-order autoregressive bound. The text clock is the t with
        M(t) = n / L: a function of x_t, so the bound holds for a network that reads the clock.

        tokens (B, L); latents (B, N, D) as the model shall see them, at clock t_latent (B,);
        u (B, 1 + L) uniform: the first column draws n, and is spread evenly over the rows.
        tokens, u and known_mask lie on the host, which chooses the masks and has the result;
        latents and t_latent lie on the device. """
        B, L = tokens.shape

        # mask n of the free positions
        if known_mask is None:
            known_mask = torch.zeros(B, L, dtype=torch.bool)
        free = (~known_mask).sum(1).clamp(min=1)
        n = (u[:, 0] * free).long()
        n = 1 + n.clamp(max=free - 1)                                    # (B,)
        noisy, mask = self.corrupt_exactly(tokens, n, u[:, 1:], known_mask)

        # -log p(x^i | x_t) of the masked ones
        t_text = self.time_of_share(n / L)                               # (B,)
        total = sum_over_texts(nll_of, model, self.mask_id, noisy, latents, t_text, t_latent, mask,
                               tokens)
        return total * free / n


# ---- Gaussian latents

class GaussianLatents:
    """ schedule: vp | rf. target: v | x0 | rest | flow | eps, what is predicted. live (D,):
    0 for dead dimensions; there z, noise and prediction are 0, and no loss counts them. """

    def __init__(self, live, schedule='vp', target='v'):
        self.live = live
        self.schedule = schedule
        self.target = target

    def alpha_sigma(self, t):
        """ alpha_t and sigma_t, exact at both ends: in float32 cos(pi t/2) is -4e-8 at t = 1. """
        if self.schedule == 'rf':
            return 1 - t, t
        alpha_t = torch.sin(math.pi / 2 * (1 - t))
        sigma_t = torch.sin(math.pi / 2 * t)
        return alpha_t, sigma_t

    def alpha_sigma_like(self, t, z):
        """ The same in the precision of z (B, N, D), on its device, and of a shape that multiplies
        it. A scalar t of the host stays there. """
        alpha_t, sigma_t = [x.to(z.dtype) for x in self.alpha_sigma(t)]
        if t.ndim == 0:
            return alpha_t, sigma_t
        return to_device(alpha_t[:, None, None], z), to_device(sigma_t[:, None, None], z)

    def corrupt(self, z, t, e):
        """ z_t, and the noise as used. z, e (B, N, D), t (B,). """
        alpha_t, sigma_t = self.alpha_sigma_like(t, z)
        e = e * self.live
        return alpha_t * z * self.live + sigma_t * e, e

    def combination(self, alpha_t, sigma_t):
        """ a and b of the target a z + b e. """
        if self.target == 'v':
            return -sigma_t, alpha_t
        if self.target == 'rest':
            return 1 - alpha_t ** 2, -alpha_t * sigma_t
        return dict(x0=(1, 0), flow=(-1, 1), eps=(0, 1))[self.target]

    def target_of(self, z, e, t):
        """ The network's target (B, N, D) for clean latents z and noise e. """
        a, b = self.combination(*self.alpha_sigma_like(t, z))
        return a * z + b * e

    def loss(self, out, target, row_weight, given=None):
        """ loss = mean over rows of row_weight * (mean squared error per live dimension)
        row_weight (B,): 1, or 0 where the row has no latent loss. All B rows count. given (B, N):
        vectors that are given, so that the mean is over the others; None: none.
        Returns the loss, and the error per row (B,), unweighted. """
        squared = (out - target).square() * self.live                    # (B, N, D)
        if given is None:
            squared = squared.mean(1)                                    # (B, D)
        else:
            unknown = (~given)[..., None].float()
            squared = (squared * unknown).sum(1) / unknown.sum(1).clamp(min=1)
        error = squared.sum(1) / self.live.sum()                         # (B,)
        return torch.where(row_weight > 0, row_weight * error, 0).mean(), error


# ---- a micro-batch: made on the host, a pure function of (seed, step, rows)

@dataclass
class Batch:
    """ Rows as they enter the network, with what the losses need. What belongs to a stream that the
    model does not have is None. """
    mode: torch.Tensor             # (B,) index into MODES; causal rows are the last ones
    t_text: torch.Tensor           # (B,) float32, the two clocks
    t_latent: torch.Tensor
    n_causal: int                  # how many rows are causal
    # the text, and the P positions where it is scored
    x_t: torch.Tensor              # (B, L) as the network reads it
    positions: torch.Tensor        # (P,) in the flattened B L
    targets: torch.Tensor          # (P,) the right token at each of these positions
    weight: torch.Tensor           # (P,) w(t) / (B L), in causal rows causal_weight / (B L)
    coefficients: torch.Tensor     # (P, n) what else a process of processes/ needs of the clocks
    # the latents and their noise, which Loss.forward mixes on the device
    clean: torch.Tensor            # (B, N, D)
    noise: torch.Tensor            # (B, N, D)
    row_weight: torch.Tensor       # (B,) 1, or 0 where a row has no latent loss
    # for the log: real tokens of masked rows that have a text loss, and of causal rows, (1,)
    n_real: torch.Tensor
    n_real_causal: torch.Tensor
    pad: int                       # the id of PAD
    # masking by importance (processes/adaptive.py)
    unmasked: dict | None = None   # where the device masks: the arguments of noisy_text
    importance: torch.Tensor | None = None     # (4,) of its tokens: mean, deviation, least, largest
    # where parts of latents are given: (B, N) bool, the vectors that stay clean
    given: torch.Tensor | None = None

    def to(self, device):
        """ On a card: by way of pinned memory, so that nothing waits. """
        if torch.device(device).type == 'cpu':
            return self

        def move(x):
            if isinstance(x, dict):
                return {name: move(value) for name, value in x.items()}
            return x.pin_memory().to(device, non_blocking=True) if torch.is_tensor(x) else x
        return Batch(**move(vars(self)))


@dataclass
class Noising:
    """ How clean rows become noisy ones. """
    text: object                   # MaskedText, or a process of processes/
    latent: object                 # GaussianLatents
    streams: tuple                 # of the model
    seed: int = 0
    cond_drop: float = 0.1
    t_min: float = 1e-3
    predict_length: bool = True    # False: EOS and PAD are given, not scored
    causal_weight: float = 1.0     # of the loss of causal rows

    def __call__(self, rows, shares, ids):
        """ The Batch of clean rows (data.Rows). shares: from mode_shares. ids: whatever has `eos`
        and `pad`, such as their dataset. """
        seed, step = self.seed, rows.step
        tokens, latents = rows.tokens, rows.latents
        B, L = tokens.shape

        # clocks, and which losses count; and the noise
        clocks = draw_clocks(seed, step, rows.first, B, shares, self.cond_drop, self.t_min)
        u = noise = None
        if 'text' in self.streams:
            u = uniforms(seed, step, 'mask', rows.first, B, L)
        if 'latent' in self.streams:
            noise = normals(seed, step, 'latent', rows.first, *latents.shape)

        # a latent is that of the whole text: a row whose text was cut has no latent loss
        if rows.is_cut and set(self.streams) == {'text', 'latent'}:
            is_whole = is_end(tokens[:, -1], ids)
            clocks = clocks._replace(latent_on=torch.where(is_whole, clocks.latent_on, 0))

        # in rows of the mode complete, a part of the latents is given
        given = None
        if shares['complete']:
            given = given_parts(seed, step, rows.first, B, latents.shape[1])
            given = given & (clocks.mode == COMPLETE)[:, None]

        # causal rows last
        is_causal = clocks.mode == CAUSAL
        order = is_causal.byte().argsort(stable=True)
        first_causal = B - int(is_causal.sum())
        clocks = Clocks(*[x[order] for x in clocks])
        tokens = tokens[order]
        u = None if u is None else u[order]
        noise = None if noise is None else noise[order]

        real = (clocks.text_on > 0)[:, None] & (tokens != ids.pad)           # (B, L)
        batch = Batch(
            mode=clocks.mode,
            t_text=clocks.t_text.float(),
            t_latent=clocks.t_latent.float(),
            n_causal=B - first_causal,
            x_t=None, positions=None, targets=None, weight=None, coefficients=None,
            clean=None if noise is None else latents[order],
            noise=noise,
            row_weight=clocks.latent_on.float(),
            given=None if given is None else given[order],
            n_real=real[:first_causal].sum()[None].float(),
            n_real_causal=real[first_causal:].sum()[None].float(),
            pad=ids.pad)
        if 'text' not in self.streams:
            return batch

        # the text, masked
        known_mask = None if self.predict_length else is_end(tokens, ids)
        t, text_on = clocks.t_text, clocks.text_on
        if self.text.masks_on_device:                      # not every device has float64
            unmasked = dict(
                tokens=tokens,
                t=t.float(),
                text_on=text_on.float(),
                u=below_1(u, torch.float32),
                step=step,
                known_mask=known_mask)
            return replace(batch, unmasked=unmasked)
        noisy = self.text.noisy_text(tokens, t, text_on, u, step, known_mask)

        # causal rows have clock 0, so nothing is masked: each token and the EOS are scored
        noisy.scored[first_causal:] = real[first_causal:]
        weight = noisy.weight.clone()
        weight[first_causal:] = self.causal_weight
        batch = replace(batch, **noisy._replace(weight=weight).fields(tokens))
        coefficients = self.text.loss_coefficients(t)
        if coefficients is not None:
            batch.coefficients = coefficients[batch.positions // L]
        return batch


# ---- the losses of a batch

class Losses(NamedTuple):
    """ Of a micro-batch. What a stream without a loss would have is None. """
    loss: torch.Tensor                         # the weighted sum of the others: what is minimised
    text_loss: torch.Tensor | None = None      # nats per position of all rows, PAD among them
    latent_loss: torch.Tensor | None = None    # squared error per dimension, a mean over all rows
    importance_loss: torch.Tensor | None = None        # of a learned importance
    # for the log
    nll: torch.Tensor | None = None            # (P,) nats
    right: torch.Tensor | None = None          # (P,) bool: the target is the likeliest token
    error: torch.Tensor | None = None          # (B,) squared error of a row


class Loss(nn.Module):
    """ The network with its losses: the module that DDP and FSDP wrap. """

    def __init__(self, model, noising, dtype='float32', latent_weight=1.0):
        super().__init__()
        self.model = model
        self.text = noising.text
        self.latent = noising.latent
        self.seed = noising.seed               # of the validation
        self.predict_length = noising.predict_length
        self.dtype = dtype                     # that of its products, by autocast
        self.latent_weight = latent_weight

    def autocast(self):
        device_type = self.model.bias.device.type
        return torch.autocast(device_type, torch.bfloat16, enabled=self.dtype == 'bfloat16')

    def forward(self, batch, predict):
        """ The Losses of a Batch. predict: the streams that have one. """
        nll = right = error = None
        text_loss = latent_loss = importance_loss = None
        with self.autocast():
            # where importance is learned, its network reads the clean text first
            if batch.unmasked:
                learned = self.text.mask_on_device(self.model, batch)

            # z_t = alpha z + sigma noise
            z_t = None
            if batch.clean is not None:
                z_t, noise = self.latent.corrupt(batch.clean, batch.t_latent, batch.noise)
            if batch.given is not None:
                z_t = torch.where(batch.given[..., None], batch.clean, z_t)

            # the network; its text head runs on the scored positions only
            hidden, latent_out = self.model(                             # (P, C), (B, N, D)
                batch.x_t, z_t, batch.t_text, batch.t_latent, batch.positions, predict,
                return_hidden=True, n_causal=batch.n_causal, given=batch.given)
            if 'text' in predict:
                seen = batch.x_t.flatten()[batch.positions]              # (P,)
                text_loss, nll, right = self.text.loss(
                    hidden, self.model.text_head.weight, batch.targets, batch.weight, seen,
                    batch.coefficients)

        # the latent loss, in float32
        if 'latent' in predict:
            target = self.latent.target_of(batch.clean, noise, batch.t_latent)
            latent_loss, error = self.latent.loss(latent_out, target, batch.row_weight,
                                                   batch.given)
        if batch.unmasked and 'text' in predict:
            importance_loss = self.text.importance_loss(learned, nll, batch)

        # their sum
        loss = torch.zeros((), device=batch.t_text.device)
        if text_loss is not None:
            loss = loss + text_loss
        if importance_loss is not None:
            loss = loss + self.text.IMPORTANCE_WEIGHT * importance_loss
        if latent_loss is not None:
            loss = loss + self.latent_weight * latent_loss
        return Losses(loss, text_loss, latent_loss, importance_loss, nll, right, error)

    # ---- validation

    @torch.no_grad()
    def validate(self, data, first, B, n, predict, modes):
        """ Sums of rows first .. first + B of a split, of which those below n count, (5,) float64:
        nats of the exact text bound, real tokens (text and one EOS); squared error of the latent
        target per dimension, rows; nats of causal rows. A row has the same clock, masks and noise
        in any batch. Each stream is given what the modes give: clean text, clean latents, or
        nothing (noise at clock 1). """
        # the rows. All batches have one shape: behind the last row that counts stand others
        device = self.model.bias.device
        counted = slice(max(0, min(B, n - first)))
        rows = torch.arange(first, first + B) % len(data)
        crop = None
        if data.cropped:
            crop = uniforms(self.seed, 0, 'crop', first, B, 1)[:, 0]
        tokens, latents = data.rows(rows, crop)
        known_mask = None if self.predict_length else is_end(tokens, data)
        real = tokens != data.pad if known_mask is None else ~known_mask
        ones = torch.ones(B, device=device)
        zeros = torch.zeros(B, device=device)

        # one clock per row, as Sobol' points, so that rows cover (0, 1) evenly, however many they
        # are; the text is masked on the host
        u = uniforms(self.seed, 0, 'evaluation', first, B, 1 + data.seq_len)
        points = SobolEngine(1, scramble=False).fast_forward(first).draw(B, dtype=torch.float64)
        shift = uniforms(self.seed, 0, 'evaluation clock', 0, 1, 1)
        u[:, 0] = (points + shift)[:, 0] % 1
        spread = u[:, 0].float()
        noise = None
        if 'latent' in self.model.config.streams:
            noise = normals(self.seed, 0, 'evaluation latent', first, *latents.shape)
            noise = to_device(noise, ones)
            latents = to_device(latents, ones)

        def latents_at(clock):
            return None if noise is None else self.latent.corrupt(latents, clock, noise)[0]

        nats = causal_nats = error = torch.zeros(B)
        with self.autocast():
            # nats of the text, given clean latents or none
            if 'text' in predict and {'l2t', 'unconditional'} & modes:
                clock = zeros if 'l2t' in modes else ones
                nats = self.text.bound(self.model, tokens, latents_at(clock), clock, u, known_mask)
            if 'causal' in modes:
                causal_nats = exact_nll(self.model, tokens, latents_at(zeros), zeros)

            # the error of the latents, given a clean text or none
            if 'latent' in predict:
                t_text = torch.zeros(B) if {'t2l', 'complete'} & modes else torch.ones(B)
                x_t = None
                if 'text' in self.model.config.streams:
                    x_t, _ = self.text.corrupt(tokens, t_text, u[:, 1:], known_mask)
                    x_t = to_device(x_t, ones)
                z_t = latents_at(spread)
                _, out = self.model(x_t, z_t, to_device(t_text, ones), to_device(spread, ones),
                                    predict=('latent',))
                target = self.latent.target_of(latents, noise, spread)
                _, error = self.latent.loss(out, target, ones)
        sums = [x[counted].sum() for x in (nats, real, error, ones, causal_nats)]
        return torch.tensor([float(x) for x in sums], dtype=torch.float64)
