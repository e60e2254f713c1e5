"""
What a training step computes: a batch with its noise, its two losses, what is logged of them, and
the validation.

One step, without what makes it fast or optional:

    t_text, t_latent = draw_clocks(mode)                  from 0 (clean) to 1 (noise)
    x_t = where(u < M(t_text), MASK, tokens)              M(t): the masked share, t by default
    z_t = alpha z + sigma e                               alpha, sigma of t_latent
    logits, found = model(x_t, z_t, t_text, t_latent)
    loss = sum over masked of w(t) nll / (B L)            w = M' / M, 1/t by default: a bound
         + latent_weight * mean of (target - found)^2     target: v, or z (latent_target)

A mode says, for each row, how its two clocks are drawn and which of the two losses count. The
losses never see the mode. Each loss is a mean over all rows, selected with torch.where, so modes
mix inside a batch and every rank does the same work. Rows of the mode `causal` are not masked: the
network reads them from left to right. They come last in the batch, and the network is told how many
they are. ATAT masks by importance: its batches and its loss are subclasses of these
(processes/adaptive.py).

Read downward: BatchMaker makes a batch on the host, `prefetch` brings it to the device, Loss
computes its losses there and validates, `statistics` sums what is logged.
Letters: B rows, L text tokens, N latent vectors, D latent dimensions, P positions of the head.
"""
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.quasirandom import SobolEngine

from diffusion import CAUSAL, MODES, exact_nll, is_end, normals, to_device, uniforms, where_scored

# -----------------------------------------------------------------------------
# A batch: made on the host, a pure function of (seed, step, rows)

def draw_clocks(seed, step, first, rows, shares, cond_drop=0.1, t_min=1e-3, latent_noise=0.0):
    """
    Clocks of rows first .. first + rows of the global batch at this step, and 1 or 0 for each loss:
    whether the row has it.
    shares: from mode_shares. cond_drop: how often the null condition replaces a given modality;
    latent_noise: how often a clock that is drawn replaces that of a given latent.
    Returns {mode (rows,) int64; t_text, t_latent, text_on, latent_on (rows,) float64}.
    """
    # One Sobol' point per row of the global batch, plus one random shift per step, modulo 1.
    # So each clock is exactly uniform, and contiguous rows cover (0, 1) evenly, alone and jointly.
    engine = SobolEngine(4, scramble=False).fast_forward(first)
    points = engine.draw(rows, dtype=torch.float64)
    shift = uniforms(seed, step, 'clocks', 0, 1, 4)
    u_text, u_latent, u_mode, u_drop = ((points + shift) % 1).T    # the first two mix best

    # the mode of each row; the clamp is there because the shares may sum to 1 - 1e-16
    edges = torch.tensor(list(shares.values()), dtype=torch.float64).cumsum(0)
    mode = torch.searchsorted(edges, u_mode.contiguous(), right=True)
    mode = mode.clamp(max=max(i for i, share in enumerate(shares.values()) if share))
    table = torch.tensor([MODES[name] for name in shares], dtype=torch.float64)
    text_drawn, latent_drawn, text_on, latent_on = table[mode].T

    # the clocks
    drawn_text = t_min + (1 - t_min) * u_text
    drawn_latent = t_min + (1 - t_min) * u_latent
    t_text = torch.where(text_drawn > 0, drawn_text, 0.0)
    t_latent = torch.where(latent_drawn > 0, drawn_latent, 0.0)

    # a given latent is noisy
    is_noisy = (u_drop > 1 - latent_noise) & (latent_on == 0)
    t_latent = torch.where(is_noisy, drawn_latent, t_latent)

    # the null condition: a given modality is pure noise, at clock 1
    dropped = u_drop < cond_drop
    t_text = torch.where(dropped & (text_on == 0), 1.0, t_text)
    t_latent = torch.where(dropped & (latent_on == 0), 1.0, t_latent)
    return dict(mode=mode, t_text=t_text, t_latent=t_latent,
                text_on=text_on, latent_on=latent_on)


@dataclass
class BatchMaker:
    """ Makes the micro-batches of a run: rows of the dataset, with their clocks and noise. All that
    is random is drawn here. A batch is a dict of these, and has all of them; what belongs to a
    stream that the model does not have is None:
        mode (B,)                      index into MODES
        t_text, t_latent (B,)          the two clocks
        n_causal                       how many rows are causal, the last ones
        x_t (B, L)                     the text as the network reads it
        positions, targets (P,)        where it is scored, and the tokens that are right there
        weight (P,)                    w(t) / (B L), in causal rows causal_weight / (B L)
        coefficients (P, n)            what else a process of processes/ needs of the text clocks;
                                       None where it needs nothing
        clean, noise (B, N, D)         the latents; Loss mixes them
        row_weight (B,)                1, or 0 where a row has no latent loss
        n_real, n_real_causal (1,)     the real tokens of rows that are masked and have a text loss,
                                       and of causal rows: for the log
        pad                            the id of PAD
    """
    text_process: object               # diffusion.MaskedText, or a process of processes/
    latent_process: object             # diffusion.GaussianLatents
    streams: tuple
    seed: int
    cond_drop: float
    t_min: float
    predict_length: bool = True        # False: EOS and PAD are given, not scored
    causal_weight: float = 1.0         # of the loss of causal rows
    latent_noise: float = 0.0          # of given latents, the share that is noisy

    def __call__(self, data, rows, step, first, stage):
        """ Rows of the dataset as they enter the network at this step, with what the losses need.
        first: the number of the first row in the global batch. stage: of runs/stages.py: shares of
        the modes, streams with a loss, text length. """
        seed = self.seed
        B = len(rows)
        L = stage.seq_len

        # rows of the dataset: tokens (B, L), latents (B, N, D)
        crop = None if self.predict_length else uniforms(seed, step, 'crop', first, B, 1)[:, 0]
        tokens, latents = data.rows(rows, crop, L)

        # clocks, and which losses count, (B,) each; and the noise
        clocks = draw_clocks(seed, step, first, B, stage.shares, self.cond_drop, self.t_min,
                             self.latent_noise)
        u = noise = None
        if 'text' in self.streams:
            u = uniforms(seed, step, 'mask', first, B, L)
        if 'latent' in self.streams:
            noise = normals(seed, step, 'latent', first, *latents.shape)

        # latents are those of whole texts: beside a text that is cut they have no loss
        if L < data.seq_len and set(self.streams) == {'text', 'latent'}:
            is_whole = is_end(tokens[:, -1], data)
            clocks['latent_on'] = torch.where(is_whole, clocks['latent_on'], 0)

        # causal rows last
        is_causal = clocks['mode'] == CAUSAL
        n_causal = int(is_causal.sum())
        order = is_causal.byte().argsort(stable=True)
        clocks = {name: x[order] for name, x in clocks.items()}
        tokens, latents, u, noise = (None if x is None else x[order]
                                     for x in (tokens, latents, u, noise))

        # the text, masked, and where it is scored
        real = (clocks['text_on'] > 0)[:, None] & (tokens != data.pad)
        text = dict.fromkeys(('x_t', 'positions', 'targets', 'weight', 'coefficients'))
        if 'text' in self.streams:
            known_mask = None if self.predict_length else is_end(tokens, data)
            text.update(self.mask(tokens, clocks['t_text'], clocks['text_on'], u, step,
                                  known_mask, real, n_causal))

        return dict(text, mode=clocks['mode'], n_causal=n_causal, pad=data.pad,
                    t_text=clocks['t_text'].float(), t_latent=clocks['t_latent'].float(),
                    clean=None if noise is None else latents, noise=noise,
                    row_weight=clocks['latent_on'].float(),
                    n_real=real[:B - n_causal].sum()[None].float(),
                    n_real_causal=real[B - n_causal:].sum()[None].float())

    def mask(self, tokens, t, text_on, u, step, known_mask, real, n_causal):
        """ The text as the network reads it, and where it is scored: {x_t, positions, targets,
        weight}, and the coefficients of a process that has some. step: for AdaptiveBatchMaker. """
        x_t, mask = self.text_process.corrupt(tokens, t, u, known_mask)
        scored = mask & (text_on > 0)[:, None]
        weight = self.text_process.training_weight(t)[:, None]           # (B, 1)

        # causal rows have clock 0, so nothing is masked: each token and the EOS are scored
        first_causal = len(tokens) - n_causal
        scored[first_causal:] = real[first_causal:]
        weight[first_causal:] = self.causal_weight

        batch = dict(where_scored(scored, tokens, weight), x_t=x_t)
        if hasattr(self.text_process, 'loss_coefficients'):
            row = batch['positions'] // tokens.shape[1]
            batch['coefficients'] = self.text_process.loss_coefficients(t)[row]
        return batch

# -----------------------------------------------------------------------------
# From the host to the device

def prefetch(make, calls, device):
    """ Yields make(*call) of each call in turn: batches, with their tensors on `device`. On a card
    threads make the next ones meanwhile, and copy them among the kernels of this step. """
    if torch.device(device).type == 'cpu':
        yield from (make(*call) for call in calls)
        return

    def fetch(call):
        batch = make(*call)
        for name, x in batch.items():
            if torch.is_tensor(x):
                batch[name] = x.pin_memory().to(device, non_blocking=True)
        return batch

    # one thread of torch each, not one for every core; threads that begin later have one, too
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        ahead = deque()
        for call in calls:
            ahead.append(pool.submit(fetch, call))
            if len(ahead) > 4:
                yield ahead.popleft().result()
        for batch in ahead:
            yield batch.result()

# -----------------------------------------------------------------------------
# The losses of a batch: the module that DDP and FSDP wrap

class Loss(nn.Module):

    def __init__(self, model, make_batch, autocast, latent_weight=1.0):
        super().__init__()
        self.model = model
        self.make_batch = make_batch
        self.text_process, self.latent_process = make_batch.text_process, make_batch.latent_process
        self.autocast = autocast               # () -> a context for the forward
        self.weights = {'text_loss': 1.0, 'latent_loss': latent_weight}

    def forward(self, batch, predict):
        """ The loss of one micro-batch, and {name: sums} of it that are logged, detached.
        predict: the streams that have a loss. """
        with self.autocast():
            # z_t = alpha z + sigma noise
            z_t = None
            if 'latent' in self.model.config.streams:
                z_t, noise = self.latent_process.corrupt(batch['clean'], batch['t_latent'],
                                                         batch['noise'])

            # the network, without the text head: text_loss runs it
            hidden, latent_out = self.model(                             # (P, C), (B, N, D)
                batch['x_t'], z_t, batch['t_text'], batch['t_latent'], batch['positions'],
                predict, return_hidden=True, n_causal=batch['n_causal'])
            result = {}
            if 'text' in predict:
                result = self.text_loss(hidden, batch)

        # the latent loss, in float32
        if 'latent' in predict:
            target = self.latent_process.target_of(batch['clean'], noise, batch['t_latent'])
            latent_loss, error = self.latent_process.loss(latent_out, target, batch['row_weight'])
            result.update(latent_loss=latent_loss, error=error)

        # their weighted sum
        loss = torch.zeros((), device=batch['t_text'].device)
        for name, weight in self.weights.items():
            if name in result:
                loss = loss + weight * result[name]
        return loss, statistics(batch, {**result, 'loss': loss})

    def text_loss(self, hidden, batch):
        """ The head runs on the scored positions only. Returns {text_loss, nll (P,) in nats, right
        (P,) bool}. """
        # what the network read at the scored positions
        x_t = batch['x_t'].flatten()[batch['positions']]                 # (P,)
        loss, nll, right = self.text_process.loss(
            hidden, self.model.text_head.weight, batch['targets'], batch['weight'], x_t,
            batch['coefficients'])
        return dict(text_loss=loss, nll=nll, right=right)

    # ---- validation

    @torch.no_grad()
    def validate(self, data, first, B, n, predict, modes):
        """ Sums of rows first .. first + B of a split, of which those below n count, (5,) float64:
        nats of the exact text bound, real tokens (text and one EOS); squared error of the latent
        target per dimension, rows; nats of causal rows. A row has the same clock, masks and noise
        in any batch. Each stream is given what the modes give: clean text, clean latents, or
        nothing (noise at clock 1). """
        # the rows. All batches have one shape: behind the last row that counts stand others
        make = self.make_batch
        device = self.model.bias.device
        counted = slice(max(0, min(B, n - first)))
        rows = [r % len(data) for r in range(first, first + B)]
        crop = None
        if data.cropped:
            crop = uniforms(make.seed, 0, 'crop', first, B, 1)[:, 0]
        tokens, latents = data.rows(rows, crop)
        known_mask = None if make.predict_length else is_end(tokens, data)
        real = tokens != data.pad if known_mask is None else ~known_mask
        ones, zeros = torch.ones(B, device=device), torch.zeros(B, device=device)

        # one clock per row, as Sobol' points, so that rows cover (0, 1) evenly, however many they
        # are; the text is masked on the host
        u = uniforms(make.seed, 0, 'evaluation', first, B, 1 + data.seq_len)
        points = SobolEngine(1, scramble=False).fast_forward(first).draw(B, dtype=torch.float64)
        shift = uniforms(make.seed, 0, 'evaluation clock', 0, 1, 1)
        u[:, 0] = (points + shift)[:, 0] % 1
        spread = u[:, 0].float()
        noise = None
        if 'latent' in make.streams:
            noise = normals(make.seed, 0, 'evaluation latent', first, *latents.shape)
            noise, latents = to_device(noise, ones), to_device(latents, ones)

        def latents_at(clock):
            return None if noise is None else self.latent_process.corrupt(latents, clock, noise)[0]

        nats = causal_nats = error = torch.zeros(B)
        with self.autocast():
            # nats of the text, beside clean latents or none
            if 'text' in predict and {'l2t', 'unconditional'} & modes:
                clock = zeros if 'l2t' in modes else ones
                nats = self.text_process.bound(self.model, tokens, latents_at(clock), clock, u,
                                               known_mask)
            if 'causal' in modes:
                causal_nats = exact_nll(self.model, tokens, latents_at(zeros), zeros)

            # the error of the latents, beside a clean text or none
            if 'latent' in predict:
                t_text = torch.zeros(B) if 't2l' in modes else torch.ones(B)
                x_t = None
                if 'text' in make.streams:
                    x_t, _ = self.text_process.corrupt(tokens, t_text, u[:, 1:], known_mask)
                    x_t = to_device(x_t, ones)
                _, out = self.model(x_t, latents_at(spread), to_device(t_text, ones),
                                    to_device(spread, ones), predict=('latent',))
                target = self.latent_process.target_of(latents, noise, spread)
                _, error = self.latent_process.loss(out, target, ones)
        sums = [x[counted].sum() for x in (nats, real, error, ones, causal_nats)]
        return torch.tensor([float(x) for x in sums], dtype=torch.float64)

# -----------------------------------------------------------------------------
# What is logged

def sums_by_clock(clock, values):
    """ (4,): the sums over the quarters of the clock. """
    quarter = (4 * clock).long().clamp(max=3)
    return torch.zeros(4, device=values.device).index_add_(0, quarter, values)


@torch.no_grad()
def statistics(batch, result):
    """ {name: (n,)}: sums over a micro-batch that are worth a log line, texts in nats, latents in
    squared errors per dimension. They stay on the device; nothing waits. Losses also by quarters of
    their clock: the one diagnostic that a diffusion run needs. """
    mode = batch['mode']
    modes = torch.arange(len(MODES), device=mode.device)
    sums = dict(loss=result['loss'][None], rows=(mode[:, None] == modes).sum(0).float())
    for name in ('text_loss', 'importance_loss', 'latent_loss'):
        if name in result:
            sums[name] = result[name][None]

    if 'text_loss' in result:
        # which of the P positions are no PAD
        nll, real = result['nll'], batch['targets'] != batch['pad']

        # what is by clock, or a bound, is of masked rows alone
        B, L = batch['x_t'].shape
        row = batch['positions'] // L
        is_masked = mode[row] != CAUSAL
        clock = batch['t_text'][row]
        sums.update(text_nats=(is_masked * batch['weight'] * nll).sum()[None] * (B * L),
                    n_real=batch['n_real'],
                    causal_nats=(~is_masked * nll).sum()[None],
                    n_real_causal=batch['n_real_causal'],
                    correct=(result['right'] & real).sum()[None].float(),
                    real_count=real.sum()[None].float(),
                    text_bins=sums_by_clock(clock, is_masked * nll),
                    text_count=sums_by_clock(clock, is_masked.float()))

    if 'latent_loss' in result:
        scored = batch['row_weight'] > 0
        error = torch.where(scored, result['error'], 0)
        sums.update(latent_bins=sums_by_clock(batch['t_latent'], error),
                    latent_count=sums_by_clock(batch['t_latent'], scored.float()))
    return {name: value.detach() for name, value in sums.items()}
