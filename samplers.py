"""
Every text sampler a function, one signature: from the network's logits to tokens.

    sampler(denoise, propose, text, tokens, given, steps, rng, on_step, its knobs) -> tokens (B, L):
    denoise(tokens, t, positions)   logits (P, V) at the flat positions (P,), the condition inside; t a number or (B,) clocks
    propose(logits, tilt)           x ~ Cat(p), (P,); ~ Cat(p tilt), where a tilt is given
    text                            diffusion.MaskedText: the schedule of training, M = 1 - a is the masked share; samplers of other
                                    processes are in baselines.py
    tokens (B, L), given (B, L)     what is MASK and not given is filled, nothing else is touched; given lives on the host
    rng                             a torch.Generator on the host, for what is released; on_step(tokens) sees every state
Which positions are released is known on the host, but for confidence, where its number is: no step waits for the device, and the
head runs only where it is asked.
"""
import math

import torch


# ---- from logits to tokens

def nucleus_filter(logits, p):
    """ Token i stays when the mass of the likelier ones is below p: the boundary token stays, and so does the top one always. """
    if p >= 1:
        return logits
    sorted_logits, order = logits.sort(-1, descending=True)
    mass = sorted_logits.softmax(-1)
    drop = mass.cumsum(-1) - mass >= p                                   # in sorted order
    drop[..., 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def make_propose(temperature, nucleus, rng):
    """ propose(logits (P, V)) -> x ~ Cat(tilt * softmax(logits / temperature)), filtered; tilt (P, V), if there is one: what is known of x
    beside. rng: a generator on the device. """
    def propose(logits, tilt=None):
        if temperature == 0:
            return (logits if tilt is None else logits.masked_fill(tilt == 0, -torch.inf)).argmax(-1)
        logits = logits / temperature
        p = nucleus_filter(logits if tilt is None else logits + tilt.log(), nucleus).softmax(-1)
        # p / Exp(1) is largest at i with probability p_i; this decides *what* a released token is, never *whether* one is
        # released: one categorical over V and MASK would get that rate wrong in float32 (arXiv:2409.02908)
        return (p / torch.empty_like(p).exponential_(generator=rng)).argmax(-1)
    return propose


# ---- text samplers

def begin(text, tokens, given):
    """ A copy of tokens to write into; masked (B, L), on the host: what is to be filled; and clock(n, t), what the network is told
    when n (B,) of it are left: t, the schedule's, where nothing is given; else, or without t, the solution of 1 - a(t) = n_masked / L
    per row, the clock of the bound (MaskedText.bound), in which the masks of later blocks count too. """
    is_mask = (tokens == text.mask_id).cpu()
    others, none_given = (is_mask & given).sum(1), not given.any()

    def clock(n, t=None):
        return t if t is not None and none_given else text.clock((n + to(others, n)).double() / tokens.shape[1]).float()
    return tokens.clone(), is_mask & ~given, clock


def positions_of(mask):
    """ Flat positions (P,) of a mask (B, L). """
    return mask.flatten().nonzero().squeeze(1)


def to(x, like):
    """ x on the device of `like`; from the host nothing waits for it. """
    return x.to(like.device, non_blocking=not x.is_cuda)


def put(tokens, positions, x):
    tokens.view(-1)[to(positions, tokens)] = x


def nothing(tokens):
    pass


def ancestral(denoise, propose, text, tokens, given, steps, rng, on_step=nothing, skip=False):
    """ From t to s each masked position is released with probability u = (M_t - M_s)/M_t, and if so x ~ Cat(p). The last step
    releases all that is left, by sampling.    MDLM arXiv:2406.07524 """
    tokens, masked, clock = begin(text, tokens, given)
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    for t, s in zip(times, times[1:]):
        u = text.release_share(t, s)
        release = masked & (torch.rand(masked.shape, generator=rng) < u) if s > 0 else masked
        now = clock(masked.sum(1), t.expand(len(masked)))                # (B,)
        if not skip:
            put(tokens, positions_of(release), propose(denoise(tokens, now, positions_of(release))))
        elif release.any():
            rows = release.any(1).nonzero().squeeze(1)
            x = propose(denoise(tokens[to(rows, tokens)], now[rows], positions_of(release[rows]), rows))
            put(tokens, positions_of(release), x)                        # the same positions in the same order
        masked = masked & ~release
        on_step(tokens)
    return tokens


def cached(*args, **knobs):
    """ ancestral, with the network run only on the rows that release something in this step: of the others nothing is used. At
    most L calls a row, however many steps. For fixed latents: in joint sampling the latents need every call. """
    return ancestral(*args, **knobs, skip=True)


def first_hitting(denoise, propose, text, tokens, given, steps, rng, on_step=nothing):
    """ One uniformly chosen masked position per call is released, in every row that has one: the exact law of the continuous-time
    process in at most L calls. Fewer `steps` release several at once.    arXiv:2409.02908 """
    tokens, masked, clock = begin(text, tokens, given)
    n = masked.sum(1, keepdim=True)                                      # (B, 1)
    steps = min(steps, int(n.max()))                                     # more would release nothing
    for i in range(steps):
        k = n // steps + (i < n % steps)                                 # (B, 1)
        lot = torch.rand(masked.shape, generator=rng).masked_fill(~masked, 2)
        release = masked & (lot.argsort(1).argsort(1) < k)
        positions = positions_of(release)
        put(tokens, positions, propose(denoise(tokens, clock(masked.sum(1)), positions)))
        masked = masked & ~release
        on_step(tokens)
    return tokens


def confidence(denoise, propose, text, tokens, given, steps, rng, on_step=nothing, score='top1', prefer='certain', threshold=0.9,
               importance=None):
    """ Propose x ~ Cat(p) at every masked position and release what is most certain: the n masked positions of a row are spread
    over the steps, the first n mod steps of them taking one more.    MaskGIT arXiv:2202.04200
    Not a sample of the model's distribution: it seeks likely texts.
    score: top1 (p of the proposal), margin (p of the best minus the second), entropy, threshold (all above .9, at least one).
    prefer='uncertain' releases in the opposite order. importance(tokens (B, L)) -> (B, L) in [0, 1], of the proposed text: uncertainty
    counts that much; with prefer='uncertain' this is ATAT's sampler, the important and uncertain first. """
    tokens, masked, clock = begin(text, tokens, given)
    n, masked = masked.sum(1, keepdim=True), to(masked, tokens)          # (B, 1) on the host, (B, L)
    steps, left = min(steps, int(n.max())), n.clone()
    for i in range(steps):
        if score == 'threshold':
            left = (n - i).clamp(min=0)                                  # at most; how many, only the device knows
        positions = masked.flatten().byte().argsort(descending=True, stable=True)[:int(left.sum())]
        told = clock(masked.sum(1) if score == 'threshold' else left.squeeze(1))
        logits = denoise(tokens, told, positions)                        # (P, V)
        x = propose(logits)
        proposal = tokens.clone()
        put(proposal, positions, x)
        certainty = certainty_of(logits, x, score)
        if importance:
            certainty = (certainty - int(score == 'margin')) * importance(proposal).flatten()[to(positions, tokens)]   # 0: certain
        certainty = certainty * (1 if prefer == 'certain' else -1)
        value = torch.full(tokens.shape, -torch.inf, device=tokens.device)
        put(value, positions, certainty)
        value = value.masked_fill(~masked, -torch.inf)
        place = value.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # (B, L), 0 is the highest
        k = n // steps + (i < n % steps)                                 # (B, 1)
        release = masked & (place < to(k, tokens))
        if score == 'threshold':
            release = masked & ((value > math.log(threshold)) | (place < 1)) if i < steps - 1 else masked
        tokens = torch.where(release, proposal, tokens)
        masked, left = masked & ~release, left - k
        on_step(tokens)
    return tokens


def certainty_of(logits, x, score):
    """ (P,) from logits (P, V) and the proposals x (P,): the higher, the more certain. """
    if score == 'margin':
        best, second = logits.softmax(-1).topk(2, -1).values.unbind(-1)
        return best - second
    if score == 'entropy':
        logp = logits.log_softmax(-1)
        return (logp.exp() * logp).nansum(-1)                            # minus the entropy; 0 log 0 = 0
    return logits.gather(-1, x[:, None]).squeeze(-1) - logits.logsumexp(-1)


def taking_back(denoise, propose, text, tokens, given, moves, rng, on_step):
    """ ancestral that takes back. moves: a step each, of t, what the network is told; u, the probability that a masked position is
    released; g, that a visible free one becomes MASK again. The last step releases all and takes nothing back. """
    tokens, masked, clock = begin(text, tokens, given)
    free = masked
    for i, (t, u, g) in enumerate(moves):
        u, g = (u, g) if i < len(moves) - 1 else (1, 0)
        coin = torch.rand(masked.shape, generator=rng)
        release, again = masked & (coin < u), free & ~masked & (coin < g)
        positions = positions_of(release)
        put(tokens, positions, propose(denoise(tokens, clock(masked.sum(1), t.expand(len(masked))), positions)))
        put(tokens, positions_of(again), text.mask_id)
        masked = masked & ~release | again
        on_step(tokens)
    return tokens


def remdm(denoise, propose, text, tokens, given, steps, rng, on_step=nothing, remask='cap', eta=0.02, loop=(0.55, 0.05, 0.9)):
    """ From t to s, with a = 1 - M,    arXiv:2503.00307
        a visible free token becomes MASK again with probability g <= g_max = min(1, M_s / a_t), 1 at a_t = 0
        a masked one is released with probability u = (a_s - (1-g) a_t) / (1 - a_t): the marginals stay those of ancestral
        cap: g = min(eta, g_max);   rescale: g = eta g_max
        loop: a runs from 0 to a_on for t in [1, t_on], rests there with g = min(eta, (1-a_on)/a_on) until t_off, then runs to 1 """
    t_on, t_off, a_on = loop

    def share(t):                                                        # M, by the schedule of training, in three pieces for loop
        if remask != 'loop':
            return float(text.masked_share(t))
        if t >= t_on:
            return 1 - a_on * (1 - float(text.masked_share((t - t_on) / (1 - t_on))))
        return 1 - a_on if t >= t_off else (1 - a_on) * float(text.masked_share(t / t_off))

    times, moves = torch.linspace(1, 0, steps + 1, dtype=torch.float64), []
    for t, s in zip(times, times[1:]):
        M_t, M_s = share(t), share(s)
        a_t, a_s = 1 - M_t, 1 - M_s
        g_max = min(1, M_s / a_t) if a_t > 0 else 1
        g = {'cap': min(eta, g_max), 'rescale': eta * g_max, 'loop': min(eta, g_max) if M_t == M_s else 0}[remask]
        moves.append((text.clock(torch.tensor(M_t)) if remask == 'loop' else t, (a_s - (1 - g) * a_t) / (1 - a_t), g))
    return taking_back(denoise, propose, text, tokens, given, moves, rng, on_step)


def dfm(denoise, propose, text, tokens, given, steps, rng, on_step=nothing, alpha=1.5):
    """ Discrete flow matching with its corrector, from t to s, r = M_s / M_t,    arXiv:2407.15595 (time runs the other way there)
        a visible free position becomes MASK again with probability g = min(1, M_s (1 - r^(alpha-1)) / (1 - M_t))
        a masked one is released with u = 1 - (M_s - (1 - M_t) g) / M_t, which is 1 - r^alpha where g < 1: so the marginals stay those
        of ancestral also in the first steps of a cosine, where that g would be above 1
    alpha = 1 is ancestral, and so is the step from t = 1. """
    times, moves = torch.linspace(1, 0, steps + 1, dtype=torch.float64), []
    for i, (t, s) in enumerate(zip(times, times[1:])):
        M_t, M_s = (float(text.masked_share(x)) for x in (t, s))
        g = min(1, M_s * (1 - (M_s / M_t) ** (alpha - 1)) / (1 - M_t)) if i else 0
        moves.append((t, 1 - (M_s - (1 - M_t) * g) / M_t, g))
    return taking_back(denoise, propose, text, tokens, given, moves, rng, on_step)


def reparam(denoise, propose, text, tokens, given, steps, rng, on_step=nothing, repeat_cap=0.0):
    """ Confidence that can change its mind: after step k of K the n (K-k) // K least certain of the n free positions are masked, by
    log p(x), which a visible one has from its release. Newly released ones take the new token, the others keep theirs.
    Not a sample of the model's distribution.    RDM arXiv:2302.05737, DPLM arXiv:2402.18567
    repeat_cap: where one token would fill more than this share of the free positions, its proposals are drawn again without it. """
    tokens, masked, clock = begin(text, tokens, given)
    n, masked = masked.sum(1, keepdim=True), to(masked, tokens)          # (B, 1) on the host, (B, L)
    steps, left, free = min(steps, int(n.max())), n, masked
    certainty = torch.full(tokens.shape, torch.inf, device=tokens.device)                # of what is given: never masked
    for k in range(1, steps + 1):
        positions = masked.flatten().byte().argsort(descending=True, stable=True)[:int(left.sum())]
        logits = denoise(tokens, clock(left.squeeze(1)), positions)      # (P, V)
        x, proposal = propose(logits), tokens.clone()
        if repeat_cap:
            put(proposal, positions, x)
            count = torch.zeros(len(tokens), text.mask_id, device=tokens.device).scatter_add_(1, proposal * free, free.float())  # (B, V)
            often = (count > repeat_cap * to(n, tokens))[to(positions, tokens) // tokens.shape[1], x]
            x = torch.where(often, propose(logits.scatter(1, x[:, None], -torch.inf)), x)
        put(proposal, positions, x)
        put(certainty, positions, certainty_of(logits, x, 'top1').float())
        left = n * (steps - k) // steps
        again = certainty.argsort(1).argsort(1) < to(left, tokens)       # (B, L), 0 is the least certain
        tokens = torch.where(again, text.mask_id, proposal)
        masked = again
        on_step(tokens)
    return tokens


SAMPLERS = dict(ancestral=ancestral, cached=cached, first_hitting=first_hitting, confidence=confidence, remdm=remdm, dfm=dfm,
                reparam=reparam)
KNOBS_OF = dict(confidence=('score', 'prefer'), remdm=('remask', 'eta', 'loop'), dfm=('alpha',), reparam=('repeat_cap',))


def in_blocks(sampler, size):
    """ Any sampler, from left to right, `size` positions at a time: to it all other positions are given, masked or not. The steps
    are shared among the blocks by what there is to fill.    arXiv:2503.09573 """
    def blocks(denoise, propose, text, tokens, given, steps, rng, on_step=nothing, **knobs):
        free = (tokens == text.mask_id).cpu() & ~given
        for first in range(0, tokens.shape[1], size):
            others = torch.ones_like(given)
            others[:, first:first + size] = False
            if not (free & ~others).any():
                continue
            share = max(1, round(steps * (free & ~others).sum().item() / free.sum().item()))
            tokens = sampler(denoise, propose, text, tokens, given | others, share, rng, on_step, **knobs)
        return tokens
    return blocks


def make_sampler(how, text):
    """ (sampler, its keyword knobs, temperature) from the text knobs; ValueError for what does not exist. A process that is not
    diffusion.MaskedText has samplers of its own (baselines.py). """
    samplers = getattr(text, 'samplers', SAMPLERS)
    for name, legal in (('sampler', tuple(samplers)), ('score', ('top1', 'margin', 'entropy', 'threshold')),
                        ('prefer', ('certain', 'uncertain')), ('remask', ('cap', 'rescale', 'loop'))):
        if how[name] not in legal:
            raise ValueError(f"{name}={how[name]!r}: choose from {', '.join(legal)}")
    if how['score'] == 'threshold' and how['prefer'] == 'uncertain':
        raise ValueError('score=threshold releases what is certain: it has no prefer=uncertain')
    if how['self_correct'] and 'self_correct' not in getattr(text, 'knobs', ()):
        raise ValueError(f"self_correct={how['self_correct']}: only text_process=gidd takes back what is written")
    if how['by_importance'] and (how['sampler'] != 'confidence' or how['score'] == 'threshold'):
        raise ValueError(f"by_importance goes with sampler=confidence and a score but threshold, not with {how['sampler']}, {how['score']}")
    if len(how['loop']) != 3 or not 0 < how['loop'][1] <= how['loop'][0] < 1 or not 0 < how['loop'][2] < 1 or not 0 <= how['eta'] <= 1:
        raise ValueError(f"loop={how['loop']}, eta={how['eta']}: expected 0 < t_off <= t_on < 1, 0 < a_on < 1, 0 <= eta <= 1")
    for name, fine in (('steps', how['steps'] >= 0), ('block_size', how['block_size'] >= 0), ('nucleus', how['nucleus'] > 0),
                       ('temperature', math.isfinite(how['temperature'])), ('alpha', 1 <= how['alpha'] <= 2),
                       ('repeat_cap', 0 <= how['repeat_cap'] < 1), ('self_correct', how['self_correct'] >= 0),
                       ('guidance', math.isfinite(how['guidance']))):
        if not fine:
            raise ValueError(f'{name}={how[name]} is out of range')
    sampler = samplers[how['sampler']]
    temperature = how['temperature'] if how['temperature'] >= 0 else 0.0 if sampler is confidence else 1.0
    of_it = KNOBS_OF.get(how['sampler'], ()) if samplers is SAMPLERS else getattr(text, 'knobs', ())
    knobs = {name: how[name] for name in of_it}
    if samplers is not SAMPLERS and (how['block_size'] or how['by_importance']):
        raise ValueError('block_size and by_importance are of masked text')
    return (in_blocks(sampler, how['block_size']) if how['block_size'] else sampler), knobs, temperature
