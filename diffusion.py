"""
The two noise processes, one for text and one for latents, and the clocks that drive them.
Each has a schedule, a corruption (from clean to noisy) and a loss. The steps back are in
samplers.py (text) and sampling/solvers.py (latents). Time t runs from 0 (clean) to 1 (noise).

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

import numpy as np
import torch
import torch.nn.functional as F

from model import pad_of


# ---- noise: a pure function of (seed, step, purpose, row)
# A resumed run draws the same noise without replaying anything. Processes that share a batch draw
# together what one process would draw alone.

# one key word for each, so that no two purposes share their numbers
PURPOSES = ('clocks', 'mask', 'latent', 'evaluation', 'evaluation clock', 'evaluation latent',
            'crop', 'unmask', 'token', 'null', 'start', 'solver', 'length', 'half')


def philox(seed, step, purpose):
    """ The bit generator at the start of the stream of (seed, step, purpose), of the first sample.
    Philox turns a key and a 256-bit counter into numbers. The key is (seed, purpose). The step is
    the third word of the counter, and the sample the fourth: two of them overlap only after 2^128
    counts. """
    key = np.array([seed % 2 ** 64, 1 + PURPOSES.index(purpose)], np.uint64)
    counter = np.array([0, 0, step, 0], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def uniforms(seed, step, purpose, first, rows, columns):
    """ Rows first .. first + rows of an endless table of U(0, 1): float64, (rows, columns). No
    number is exactly 0 or 1. Row i is the same however the rows are split. Use one number of
    columns per (seed, step, purpose): tables of two widths would share their numbers. """
    return uniforms_of(seed, step, purpose, [(first, rows, 0)], columns)


def uniforms_of(seed, step, purpose, stretches, columns):
    """ Such rows of several tables, one for each sample (sampling/noise.py), one below the other.
    stretches: [(first, rows, sample)]. """
    # one count of Philox yields four words of 64 bits, and each row starts at a new count. To set
    # the state of a generator takes a tenth of the time of making one
    counts_per_row = -(-columns // 4)
    generator = philox(seed, step, purpose)
    state = generator.state
    words = []
    for first, rows, sample in stretches:
        state['state']['counter'][:] = first * counts_per_row, 0, step, sample
        generator.state = state
        words.append(generator.random_raw(rows * counts_per_row * 4))
    words = np.concatenate(words).reshape(-1, counts_per_row * 4)[:, :columns]

    # the upper 52 bits, moved by half a unit to stay off 0 and 1
    bits = words >> np.uint64(12)
    return torch.from_numpy((bits + 0.5) * 2.0 ** -52)


def normals(seed, step, purpose, first, rows, *shape):
    """ The same for N(0, 1): float32, (rows, *shape). """
    u = uniforms(seed, step, purpose, first, rows, math.prod(shape))
    return torch.special.ndtri(u).float().view(rows, *shape)


# ---- modes

# DRAWN: the clock is drawn from U(t_min, 1)
# GIVEN: the modality is given, so its clock is 0
# causal: the network reads the text from left to right and predicts the next token. Nothing is
# masked. Every token and the EOS are scored, PAD is not
DRAWN, GIVEN = True, False

MODES = {
    #                 text clock, latent clock, text_on,     latent_on: has it a loss?
    'unconditional': (DRAWN,      DRAWN,        1,           1),
    'l2t':           (DRAWN,      GIVEN,        1,           0),
    't2l':           (GIVEN,      DRAWN,        0,           1),
    'causal':        (GIVEN,      GIVEN,        1,           0),
}
CAUSAL = list(MODES).index('causal')


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
    """ The sum over the scored positions of each text of term(logits (p, V), *others (p, ...)) ->
    (p,). seen, scored (B, L): what the network reads, and where it is scored; t_text (B,); others
    (B, L, ...), such as the right tokens: all on the host, as is the result, (B,) float64. latents
    (B, N, D) or None, at clock t_latent (B,), lie on the device. more: of the network. """
    # the network runs its head at the scored positions only
    positions = positions_of(scored)                                     # (P,)
    hidden, _ = model(to_device(seen, t_latent), latents, to_device(t_text.float(), t_latent),
                      t_latent, to_device(positions, t_latent), predict=('text',),
                      return_hidden=True, **more)
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
    B, V = len(tokens), model.config.vocab_size
    scored = tokens != pad_of(V)
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


def in_float32(u):
    """ Uniform numbers of (0, 1), float64, in float32, and still below 1. """
    return u.float().clamp(max=1 - 2 ** -24)


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


class MaskedText:
    """ Masked text with one of the SCHEDULES. Loss weights; only `bound` makes the loss a bound:
        bound        w(t)
        uniform      1, as in discrete flow matching (arXiv:2407.15595)
        rdm          1 - t, as in RDM and DPLM (arXiv:2302.05737) """
    LOSS_WEIGHTS = ('bound', 'uniform', 'rdm')

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
        if self.loss_weight == 'bound':
            return self.bound_weight(t)
        if self.loss_weight == 'uniform':
            return torch.ones_like(t)
        return 1 - t                                                     # rdm

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
        """ loss = sum over p of weight_p * -log p(x_p)                      nats per token, a bound
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


def where_scored(scored, tokens, weight):
    """ Where the text head runs: {positions, targets (P,) int64, weight (P,) float32}. scored
    (B, L) bool; tokens (B, L) clean; weight (B, 1) or (B, L): the training weight. It is divided by
    B L: rows without a text loss count too. """
    positions = positions_of(scored)                                     # (P,)
    weight = (weight / scored.numel()).expand(scored.shape)              # (B, L)
    return dict(positions=positions,
                targets=tokens.flatten()[positions],
                weight=weight.flatten()[positions].float())


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
        found = [x.to(z.dtype) for x in self.alpha_sigma(t)]
        return found if t.ndim == 0 else [to_device(x[:, None, None], z) for x in found]

    def corrupt(self, z, t, e):
        """ z_t, and the noise as used. z, e (B, N, D), t (B,). """
        alpha_t, sigma_t = self.alpha_sigma_like(t, z)
        e = e * self.live
        return alpha_t * z * self.live + sigma_t * e, e

    def combination(self, alpha_t, sigma_t):
        """ a and b of the target a z + b e. """
        return {'v': (-sigma_t, alpha_t), 'x0': (1, 0), 'flow': (-1, 1), 'eps': (0, 1),
                'rest': (1 - alpha_t ** 2, -alpha_t * sigma_t)}[self.target]

    def target_of(self, z, e, t):
        """ The network's target (B, N, D) for clean latents z and noise e. """
        a, b = self.combination(*self.alpha_sigma_like(t, z))
        return a * z + b * e

    def loss(self, out, target, row_weight):
        """ loss = mean over rows of row_weight * (mean squared error per live dimension)
        row_weight (B,): 1, or 0 where the row has no latent loss. All B rows count.
        Returns the loss, and the error per row (B,), unweighted. """
        squared = (out - target).square() * self.live                    # (B, N, D)
        error = squared.mean(1).sum(1) / self.live.sum()                 # (B,)
        return torch.where(row_weight > 0, row_weight * error, 0).mean(), error
