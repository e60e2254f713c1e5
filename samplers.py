"""
Samplers of text, from the network's logits to tokens. Every sampler is a function of one signature.
(The solvers of latents are in sampling/solvers.py.)

    sampler(denoise, propose, text, tokens, known_mask, steps, noise, on_step, **knobs)
        -> tokens (B, L)

    denoise(tokens, t, positions, rows)
                                    logits (P, V) at the flat positions (P,), given the condition;
                                    t is a number, or the clocks (B,) of the rows; rows: which rows
                                    of the batch these are (left out: all)
    propose(logits, u, tilt)        x ~ softmax(logits), (P,); times tilt (P, V), where it is given;
                                    by uniform numbers u (P, 2) of numbers_at
    text                            diffusion.MaskedText, the process that the run was trained on;
                                    samplers of other processes are methods of those processes
    tokens, known_mask (B, L)       a sampler fills what is MASK and not known, and changes nothing
                                    else; known_mask lies on the host
    noise                           noise.Noise: the random numbers of the rows. A sampler
                                    asks for as many whatever the other rows are, so that a row is
                                    written the same in any batch
    on_step(tokens, logits, positions)
                                    called after every step, with what the network said in it
    knobs                           all of sampling/knobs.py; a sampler names those that it reads

A step from t to t_next, with M the masked share of the schedule:
    unmask    a masked position gets a token, with probability p_unmask
    remask    a visible position becomes MASK again, with probability p_remask (remdm, dfm)
    The marginals stay those of training if  M_next = M_t (1 - p_unmask) + (1 - M_t) p_remask.

The host knows which positions are masked, so the head runs only where its logits are used. No step
waits for the device but those of confidence, which reads how certain its proposals are.

Letters: B batch, L text tokens, P positions asked for, V vocabulary, K steps.
"""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from diffusion import positions_of, rank_in_row, to_device

LEAST_TEMPERATURE = 1e-9       # below it the likeliest token is taken: a smaller quotient of logits
                               # would only choose among equal ones


# ---- from logits to tokens

def nucleus_filter(logits, p):
    """ Keeps token i while the likelier ones hold a mass below p, and sets the others to -inf.
    So the token on the boundary stays, and the likeliest token always stays. """
    if p >= 1:
        return logits
    # in sorted order: the mass of the likelier ones
    sorted_logits, order = logits.sort(-1, descending=True)
    mass = sorted_logits.softmax(-1)
    drop = mass.cumsum(-1) - mass >= p
    drop[..., 0] = False

    # back in the order of the ids
    drop = torch.zeros_like(drop).scatter(-1, order, drop)
    return logits.masked_fill(drop, -torch.inf)


def pick(p, u):
    """ The first index (P,) at which the sum of p (P, n) from the left exceeds the share u (P,) of
    the whole. p >= 0; where it is 0, the index is never picked, however the sums are rounded. """
    sums = p.cumsum(1)
    is_beyond = sums > u[:, None] * sums[:, -1:]
    return ((p > 0) * (1 + is_beyond.byte())).argmax(1)


def draw_from(p, u):
    """
    x (P,) with probabilities proportional to p (P, V), from two uniform numbers each, u (P, 2).
    The first number picks a block of about sqrt(V) ids, the second an id in it. One sum over all
    ids would lose the unlikely ones in float32: behind the first half a step is 6e-8.

    This decides what an unmasked token is, never whether a position is unmasked: one draw over V
    and MASK together would get that rate wrong in float32 (arXiv:2409.02908).
    """
    P, V = p.shape
    size = math.ceil(V ** 0.5)
    n_blocks = math.ceil(V / size)
    missing = n_blocks * size - V
    blocks = F.pad(p, (0, missing)).view(P, n_blocks, size)
    block = pick(blocks.sum(2), u[:, 0])
    inside = blocks[torch.arange(P, device=p.device), block]             # (P, size)
    return size * block + pick(inside, u[:, 1])


def make_propose(temperature, nucleus):
    """
    propose(logits (P, V), u (P, 2), tilt) -> x (P,), a draw of tilt * softmax(logits / temperature)
    by the uniform numbers u.
    temperature: below LEAST_TEMPERATURE the likeliest token, and u is not read.
    nucleus: of these probabilities only the largest stay, see nucleus_filter.
    tilt (P, V): a factor on the probabilities, for processes that know more of x.
    """
    def propose(logits, u, tilt=None):
        if tilt is not None:
            logits = logits.masked_fill(tilt == 0, -torch.inf)
        if temperature < LEAST_TEMPERATURE:
            return logits.argmax(-1)

        # the likeliest token has 0 before the division, so no quotient is inf
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        if tilt is not None:
            logits = logits + tilt.log()
        p = nucleus_filter(logits, nucleus).softmax(-1)
        return draw_from(p, u)
    return propose


def log_p_of(logits, x):
    """ log p(x) (P,) of tokens x (P,) under logits (P, V). """
    logit = logits.gather(-1, x[:, None]).squeeze(-1)
    return logit - logits.logsumexp(-1)


# ---- what all samplers share

def no_callback(tokens, logits=None, positions=None):
    pass


def scatter_at(values, positions, x):
    """ values (B, L) gets x (P,) at the flat positions (P,), in place. """
    values.view(-1)[to_device(positions, values)] = x


def of_open_rows(denoise):
    """ denoise, but the network runs only on the rows of which a position is asked. """
    def denoise_some(tokens, t, positions):
        if not len(positions):
            return torch.empty(0, 1, device=tokens.device)
        L = tokens.shape[1]
        rows, row = (positions // L).unique(return_inverse=True)
        if len(rows) == len(tokens):
            return denoise(tokens, t, positions)
        some = tokens[to_device(rows, tokens)]
        return denoise(some, t[rows], row * L + positions % L, rows)
    return denoise_some


def numbers_at(positions, noise, tokens):
    """ Uniform numbers (P, 2) float32 for `propose`, two for each of the flat positions (P,), on
    the device of tokens (B, L). """
    u = noise.uniforms('token', 2 * tokens.shape[1], torch.float32)      # (B, 2 L)
    u = u.view(-1, 2)
    return to_device(to_device(u, positions)[positions], tokens)


def write_at(unmask, denoise, propose, noise, tokens, model_t):
    """ Tokens where unmask (B, L) is True, in place. Returns what on_step shows: the logits (P, V)
    that they were drawn from, and their positions (P,). """
    positions = positions_of(unmask)
    logits = denoise(tokens, model_t, positions)
    x = propose(logits, numbers_at(positions, noise, tokens))
    scatter_at(tokens, positions, x)
    return logits, positions


def part_of_step(n, i, steps):
    """ How many of n (B, 1) belong to step i: n // steps, and one more in the first n % steps. """
    return n // steps + (i < n % steps)


def init_state(text, tokens, known_mask):
    """
    What a sampler starts from:
    tokens           a copy, to write into
    masked (B, L)    on the host: the positions to fill
    model_time(n, t) the clock that the network gets while n (B,) positions are left to fill
    """
    is_mask = (tokens == text.mask_id).cpu()
    never_filled = (is_mask & known_mask).sum(1)                         # masks of later blocks
    nothing_known = ~known_mask.any(1)                                   # (B,)

    def model_time(n, t=None):
        # the t with M(t) = masked / L of each row: the clock of MaskedText.bound. The host computes
        # it for all counts, in float64, which not every device has
        L = tokens.shape[1]
        clocks = text.time_of_share(torch.arange(L + 1).double() / L).float()
        found = clocks[n + never_filled]
        # but the schedule's t, for a sampler that has one and a text of which nothing is known
        return found if t is None else torch.where(nothing_known, t.float(), found)

    return tokens.clone(), is_mask & ~known_mask, model_time


def schedule_times(steps):
    """ The pairs (t, t_next) of so many steps from 1 to 0. """
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return list(zip(times, times[1:]))


# ---- samples of the model's distribution

def ancestral(denoise, propose, text, tokens, known_mask, steps, noise, on_step=no_callback,
              **knobs):
    """ Each masked position is unmasked with p_unmask = (M_t - M_next) / M_t, and then x ~ Cat(p).
    The last step unmasks all that is left.    MDLM arXiv:2406.07524 """
    tokens, masked, model_time = init_state(text, tokens, known_mask)
    for t, t_next in schedule_times(steps):
        # choose the positions on the host
        unmask = masked
        if t_next > 0:
            coin = noise.uniforms('unmask', masked.shape[1])             # (B, L)
            p_unmask = 1 - text.masked_share(t_next) / text.masked_share(t)
            unmask = masked & (coin < p_unmask)

        # choose their tokens
        model_t = model_time(masked.sum(1), t.expand(len(masked)))       # (B,)
        said = write_at(unmask, denoise, propose, noise, tokens, model_t)
        masked = masked & ~unmask
        on_step(tokens, *said)
    return tokens


def cached(denoise, *args, **knobs):
    """ ancestral, but the network runs only on the rows that unmask something in this step: the
    others do not use its output. So a row costs at most L calls, whatever the steps. """
    return ancestral(of_open_rows(denoise), *args, **knobs)


def first_hitting(denoise, propose, text, tokens, known_mask, steps, noise, on_step=no_callback,
                  **knobs):
    """ Each call unmasks one masked position per row, chosen uniformly. In at most L calls this is
    an exact sample of the continuous-time process. With fewer steps a call unmasks several.
    arXiv:2409.02908 """
    tokens, masked, model_time = init_state(text, tokens, known_mask)
    n = masked.sum(1, keepdim=True)                                      # (B, 1)
    steps = min(steps, int(n.max()))                                     # more would unmask nothing
    for i in range(steps):
        # k masked positions of each row at random: those with the k smallest uniform numbers
        k = part_of_step(n, i, steps)                                    # (B, 1)
        u = noise.uniforms('unmask', masked.shape[1]).masked_fill(~masked, 2)
        unmask = masked & (rank_in_row(u) < k)

        # their tokens
        model_t = model_time(masked.sum(1))                              # (B,)
        said = write_at(unmask, denoise, propose, noise, tokens, model_t)
        masked = masked & ~unmask
        on_step(tokens, *said)
    return tokens


# ---- with remasking: a visible token may become MASK again, so the network can change its mind

def remask(p_remask_of, denoise, propose, text, tokens, known_mask, steps, noise,
           on_step=no_callback, **knobs):
    """
    From t to t_next, with p_remask = p_remask_of(M_t, M_next):
        p_unmask = 1 - (M_next - (1 - M_t) p_remask) / M_t
    So the marginals are those of ancestral, and the last step unmasks all that is left.
    """
    tokens, masked, model_time = init_state(text, tokens, known_mask)
    free = masked
    for t, t_next in schedule_times(steps):
        # in the first step nothing is visible, so there is nothing to remask
        M_t = float(text.masked_share(t))
        M_next = float(text.masked_share(t_next))
        p_remask = p_remask_of(M_t, M_next) if M_t < 1 else 0
        p_unmask = 1 - (M_next - (1 - M_t) * p_remask) / M_t

        # one coin per position: a position is either masked or visible
        coin = noise.uniforms('unmask', masked.shape[1])                 # (B, L)
        unmask = masked & (coin < p_unmask)
        again = free & ~masked & (coin < p_remask)

        # a token for those that are unmasked, MASK for those that are remasked
        model_t = model_time(masked.sum(1), t.expand(len(masked)))       # (B,)
        said = write_at(unmask, denoise, propose, noise, tokens, model_t)
        tokens.masked_fill_(to_device(again, tokens), text.mask_id)
        masked = (masked & ~unmask) | again
        on_step(tokens, *said)
    return tokens


def remdm(*args, eta=0.02, **knobs):
    """ p_remask = min(eta, M_next / (1 - M_t))                          ReMDM arXiv:2503.00307 """
    return remask(lambda M_t, M_next: min(eta, M_next / (1 - M_t)), *args, **knobs)


def dfm(*args, alpha=1.5, **knobs):
    """
    Discrete flow matching with its corrector.         arXiv:2407.15595, whose time runs from 0 to 1
        p_remask = min(1, M_next (1 - r^(alpha-1)) / (1 - M_t)),    r = M_next / M_t
    alpha = 1 is ancestral.
    """
    def p_remask_of(M_t, M_next):
        r = M_next / M_t
        return min(1, M_next * (1 - r ** (alpha - 1)) / (1 - M_t))
    return remask(p_remask_of, *args, **knobs)


# ---- in search of likely texts: not samples of the model's distribution

def confidence(denoise, propose, text, tokens, known_mask, steps, noise, on_step=no_callback,
               threshold=1.0, prefer='certain', end_penalty=0.0, ends=None, importance=None,
               **knobs):
    """
    Propose x ~ Cat(p) at every masked position, and unmask the most certain ones. The n masked
    positions of a row are spread evenly over the steps.                 MaskGIT arXiv:2202.04200
    Where all that is proposed for a row are EOS and PAD, all of it is unmasked. A row in which
    nothing is masked any more costs nothing.
    threshold   below 1: all whose probability is at least this are unmasked, too. The n positions
                are then spread over fewer calls.                      Fast-dLLM arXiv:2505.22618
    prefer      certain, or uncertain: the opposite order
    end_penalty nats that are subtracted from the certainty of a proposed EOS or PAD. The end of a
                text is certain early, from the right inwards: without a penalty texts are too short
    ends        their two ids
    importance  importance(tokens (B, L)) -> (B, L) in [0, 1] of the proposed text: a factor on the
                uncertainty. With prefer='uncertain' this is ATAT's sampler: the important and
                uncertain tokens first.
    """
    tokens, masked, model_time = init_state(text, tokens, known_mask)
    denoise = of_open_rows(denoise)
    n = masked.sum(1, keepdim=True)                                      # (B, 1)
    steps = min(steps, int(n.max()))
    due = 0                                                              # (B, 1): of n, by now

    for i in range(steps):
        # a proposal for every masked position, and how certain it is
        left = masked.sum(1, keepdim=True)                               # (B, 1)
        if not left.any():
            break
        positions = positions_of(masked)                                 # (P,)
        logits = denoise(tokens, model_time(left.squeeze(1)), positions)             # (P, V)
        x = propose(logits, numbers_at(positions, noise, tokens))        # (P,)
        certainty = log_p_of(logits, x)                                  # (P,)
        proposal = tokens.clone()
        scatter_at(proposal, positions, x)

        # what weighs on the certainty
        if importance:
            weight = importance(proposal).flatten()
            certainty = certainty * weight[to_device(positions, tokens)]
        if prefer == 'uncertain':
            certainty = -certainty
        is_end = torch.zeros_like(x, dtype=torch.bool)
        if ends:
            is_end = (x == ends[0]) | (x == ends[1])
        certainty = torch.where(is_end, certainty - end_penalty, certainty)
        # clamped, so that a masked position always ranks before the others, which have -inf
        certainty = certainty.clamp(min=torch.finfo(certainty.dtype).min)

        # the most certain ones of each row are unmasked, so many as are due, and at least one
        value = torch.full(masked.shape, -torch.inf, dtype=certainty.dtype)          # (B, L)
        scatter_at(value, positions, certainty.cpu())
        order = value.argsort(dim=1, descending=True, stable=True)
        rank = order.argsort(dim=1)                                      # (B, L), 0 is first
        due = due + part_of_step(n, i, steps)
        k = (due - (n - left)).clamp(min=1)
        unmask = rank < k

        # and those that are certain enough; and all, where the text is done
        if threshold < 1:
            least = math.log(threshold) if threshold > 0 else -math.inf
            unmask |= value >= least
        goes_on = torch.zeros_like(masked)
        scatter_at(goes_on, positions, ~is_end.cpu())
        unmask |= ~goes_on.any(1, keepdim=True)

        unmask &= masked
        tokens = torch.where(to_device(unmask, tokens), proposal, tokens)
        masked = masked & ~unmask
        on_step(tokens, logits, positions)
    return tokens


# ---- from left to right: a sample of the model's distribution, or with temperature 0 a likely text

def autoregressive(denoise, propose, text, tokens, known_mask, steps, noise, on_step=no_callback,
                   ends=None, **knobs):
    """ One token after the other, by a network that has learned causal rows. `steps` is not read.
    After its EOS a text is filled with PAD. A known token stays, and those before it are written
    without seeing it.
    Here denoise is that of Denoiser.given(is_causal=True). It gets only the tokens before i, and
    answers for the next one. The positions tell it where that stands.
    ends: the ids of EOS and PAD. """
    eos, pad = ends
    tokens, masked, _ = init_state(text, tokens, known_mask)
    B, L = tokens.shape
    u = noise.uniforms('token', 2 * L, torch.float32).view(B, L, 2)      # each is written once
    ended = torch.zeros(B, dtype=torch.bool, device=tokens.device)       # has its EOS
    for i in masked.any(0).nonzero().flatten().tolist():
        # x^i given what is before it. PAD was never learned: it follows EOS by rule
        positions = torch.arange(B) * L + i
        logits = denoise(before(tokens, i, text.mask_id), 0., positions)             # (B, V)
        logits[:, pad] = -torch.inf
        x = propose(logits, to_device(u[:, i], tokens))                  # (B,)

        # write it where the text has not ended and the position is free
        if i > 0:
            ended = (tokens[:, :i] == eos).any(1)
        x = torch.where(ended, pad, x)
        is_free = to_device(masked[:, i], tokens)
        tokens[:, i] = torch.where(is_free, x, tokens[:, i])

        # have all texts ended? On a GPU the question waits for the device: every eighth step
        is_asked = i % 8 == 7 or not tokens.is_cuda
        is_last = is_asked and bool((ended | (tokens[:, i] == eos)).all())
        if is_last:
            rest = to_device(masked[:, i + 1:], tokens)
            tokens[:, i + 1:] = torch.where(rest, pad, tokens[:, i + 1:])
        on_step(tokens, logits, positions)
        if is_last:
            break
    return tokens


def before(tokens, i, mask_id):
    """ What the network reads to predict x^i: MASK, and the tokens before i. (B, 1 + i). """
    return F.pad(tokens[:, :i], (1, 0), value=mask_id)


# ---- which there are

class Sampler(NamedTuple):
    """ A row of SAMPLERS: the function, and what is chosen where the knobs leave it open. """
    function: object
    is_causal: bool = False            # it reads from left to right; the others fill masks
    steps: int | None = 128            # None: as many as a text has positions
    seeks: bool = False                # likely texts: the likeliest, where there is a source
    asks_few: bool = False             # the head runs only where a position is unmasked


SAMPLERS = {
    'ancestral': Sampler(ancestral, asks_few=True),
    'cached': Sampler(cached, asks_few=True),
    'first_hitting': Sampler(first_hitting, steps=None, asks_few=True),
    'confidence': Sampler(confidence, steps=None, seeks=True),
    'remdm': Sampler(remdm),
    'dfm': Sampler(dfm),
    'autoregressive': Sampler(autoregressive, is_causal=True, seeks=True),
}


def in_blocks(sampler, size):
    """ Any sampler, from left to right, `size` positions at a time. To the sampler all positions
    outside the block are known, masked or not. Each block gets its part of the steps, by its
    size.    arXiv:2503.09573 """
    def block_sampler(denoise, propose, text, tokens, known_mask, steps, noise, on_step=no_callback,
                      **knobs):
        L = tokens.shape[1]
        free = (tokens == text.mask_id).cpu() & ~known_mask
        for first in range(0, L, size):
            block = slice(first, min(first + size, L))
            if not free[:, block].any():
                continue
            outside = torch.ones_like(known_mask)
            outside[:, block] = False
            block_steps = max(1, round(steps * (block.stop - first) / L))
            tokens = sampler(denoise, propose, text, tokens, known_mask | outside, block_steps,
                             noise.of_part(first), on_step, **knobs)
        return tokens
    return block_sampler
