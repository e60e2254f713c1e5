"""
What a training step computes: a batch with its noise, its two losses, what is logged of them, and the validation.

    loss = text loss (nats per token, an upper bound)  +  latent_weight * latent loss (squared error per dimension)
                                                       +  .1 * importance loss, where importance is learned (adaptive.py)

A mode draws four numbers per row: two clocks and two loss weights (diffusion.draw_clocks); nothing else here switches by mode.
Each loss is a mean over all rows, selected with torch.where, so modes mix inside a batch and every rank does the same work.
Letters: B rows of a micro-batch, L text tokens, N latent vectors, D latent dimensions.
"""
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from adaptive import Adaptive
from data import is_end
from diffusion import MODES, draw_clocks, mode_shares, normals, positions_and_targets, uniforms

REGRESSION = 0.1               # weight of the loss of a learned importance


def read_schedule(name, schedule, what, max_iters):
    """ [(first step, value)] of 'VALUE:STEPS,VALUE:STEPS,VALUE': the last one fills the run. ValueError says what is wrong. """
    found, first = [], 0
    for part in schedule.split(','):
        value, _, steps = part.strip().partition(':')
        if not value or steps and not (steps.isascii() and steps.isdecimal() and int(steps)) or first is None:
            raise ValueError(f'{name}={schedule!r}: {part.strip()!r}: expected {what}:STEPS,{what}:STEPS,{what}')
        found.append((first, value))
        first = first + int(steps) if steps else None
    if found[-1][0] >= max_iters or first not in (None, max_iters):
        raise ValueError(f'{name}={schedule!r}: its steps do not fill max_iters={max_iters}; leave the last {what.lower()} without steps')
    return found


def read_stages(schedule, lengths, mode_weights, streams, freeze, max_iters, seq_len, head_budget):
    """ 'l2t', or 't2l:2000,l2t:3000,mixed', and '' or '24:1200,40': a stage for every stretch of one mode and one length, with its first
    step, what its mode draws, the streams that have a loss, the tokens of a text, and the positions that the head runs on:
    head_budget(share of rows that have a text loss, length). ValueError says what is wrong. """
    modes = read_schedule('mode_schedule', schedule, 'MODE', max_iters)
    cuts = read_schedule('length_schedule', lengths or str(seq_len), 'LENGTH', max_iters)
    for _, length in cuts:
        if not (length.isascii() and length.isdecimal()) or not 1 <= int(length) <= seq_len:
            raise ValueError(f'length_schedule={lengths!r}: {length!r}: expected lengths of 1 to {seq_len} tokens')
    found = []
    for first in sorted({step for step, _ in modes + cuts}):
        name, length = ([value for step, value in part if step <= first][-1] for part in (modes, cuts))
        shares = mode_shares(name, mode_weights)
        text_share = shares['unconditional'] + shares['l2t']             # of the rows that have the loss
        latent_share = shares['unconditional'] + shares['t2l']
        if int(length) < seq_len and shares['t2l'] and 'latent' in streams:
            raise ValueError(f'length_schedule={lengths!r}: mode={name} learns the latents of whole texts from texts that are cut')
        losses = tuple(s for s, share in (('text', text_share), ('latent', latent_share)) if share and s in streams)
        if not losses:
            raise ValueError(f'mode={name} has no loss on streams={streams}')
        if freeze == 'modality' and name not in ('l2t', 't2l'):
            raise ValueError(f'freeze=modality fine-tunes one direction, l2t or t2l, not mode={name}')
        found.append(SimpleNamespace(mode=name, first=first, seq_len=int(length), shares=shares, predict=losses,
                                     budget=head_budget(text_share, int(length))))
    return found


@dataclass
class Objective:
    text: object                       # diffusion.MaskedText, or one of baselines.py
    latent: object                     # diffusion.GaussianLatents
    streams: tuple
    device: str
    autocast: object                   # a context for the forward
    seed: int
    cond_drop: float
    latent_noise: float
    latent_weight: float
    t_min: float
    adaptive: Adaptive | None = None
    predict_length: bool = True        # False: EOS and PAD are given, not scored

    def batch(self, data, rows, step, first, batch, stage):
        """ Rows of the dataset as they enter the network at this step, with what the losses need; first: number of the first row
        in the global batch, of `batch` rows. A pure function of its arguments and the seed, made on the host. """
        seed, B, L = self.seed, len(rows), stage.seq_len
        crop = None if self.predict_length else uniforms(seed, step, 'crop', first, B, 1)[:, 0]
        tokens, latents = data.rows(rows, crop, L)                       # (B, L), (B, N, D)
        given = None if self.predict_length else is_end(tokens, data.tokenizer)
        c = draw_clocks(seed, step, first, B, batch, stage.shares, self.cond_drop, self.latent_noise, self.t_min)
        out = dict(mode=c['mode'], t_text=c['t_text'].float(), t_latent=c['t_latent'].float())
        if 'text' in stage.predict:                        # text and EOS of the rows that have a text loss
            has_loss = (c['text_weight'] > 0)[:, None]
            out['n_real'] = (has_loss & (tokens != data.tokenizer.pad)).sum()[None].float()
        if 'text' in self.streams:
            u = uniforms(seed, step, 'mask', first, B, L)
            if 'text' not in stage.predict:
                out['tokens'], _ = self.text.corrupt(tokens, c['t_text'], u, given)
            elif self.adaptive and self.adaptive.learns:   # the network reads the clean text first: on the device, which waits
                out.update(tokens=tokens, u=u, t=c['t_text'], text_weight=c['text_weight'], budget=stage.budget, step=step, given=given)
            else:
                imp = self.adaptive.rarity[tokens] if self.adaptive else None
                out.update(self.masked(tokens, c['t_text'], c['text_weight'], u, stage.budget, step, given, imp))
        if 'latent' in self.streams:
            out['clean'], out['noise'] = latents, normals(seed, step, 'latent', first, *latents.shape)
            if 'latent' in stage.predict:
                out['row_weight'] = torch.where(c['latent_weight'] > 0, self.latent.weight(c['t_latent']) * c['latent_weight'], 0).float()
        return out

    def masked(self, tokens, t, text_weight, u, budget, step, given=None, imp=None):
        """ The text as the network sees it, and what is scored: {tokens, positions, targets, weight, what is logged of importance}. """
        exponent = None if imp is None else self.adaptive.exponents(imp, step)
        noisy, mask = self.text.corrupt(tokens, t, u, given, exponent)
        scored = mask & (text_weight > 0)[:, None]         # where: a row without this loss has clock 0, and the weight inf * 0
        weight, logged = torch.where(text_weight > 0, self.text.loss_weight(t) * text_weight, 0)[:, None], {}
        if imp is not None:
            weight = weight * exponent * self.adaptive.emphasis(imp, scored, tokens, step)
            real = imp[tokens != self.adaptive.pad]
            logged = dict(importance=torch.stack((real.mean(), real.std(), real.min(), real.max())))
        positions, targets, weight = positions_and_targets(scored, tokens, weight, budget)
        return dict(tokens=noisy, positions=positions, targets=targets, weight=weight, **logged)

    def losses(self, model, b, predict):
        """ Forward one micro-batch: {loss, and per stream its loss, its error per position or row; where the text is right}. """
        noisy = target = learned = None
        L = b['tokens'].shape[1] if 'text' in self.streams else None
        if 'latent' in self.streams:
            noisy, e = self.latent.corrupt(b['clean'], b['t_latent'], b['noise'])
            target = self.latent.target_of(b['clean'], e, b['t_latent'])

        def see(imp, part):
            nonlocal learned
            learned = part
            b.update(self.masked(b['tokens'], b['t'], b['text_weight'], b['u'], b['budget'], b['step'], b['given'], imp.detach()))
            return b['tokens'], b['positions']

        def score(hidden, head):
            at = b['positions']
            loss, nll, right = self.text.loss(hidden, head, b['targets'], b['weight'], b['tokens'].flatten()[at], b['t_text'][at // L])
            to_learn = 0 if learned is None else self.adaptive.regression(learned.flatten()[at], nll, b['targets'], b['weight'])
            return loss, nll, right, to_learn
        with self.autocast():
            scored, out = model(b.get('tokens'), noisy, b['t_text'], b['t_latent'], b.get('positions'), predict, score,
                                see if 'u' in b else None)
        r = dict(loss=torch.zeros((), device=self.device))
        if 'text' in predict:
            r['text_loss'], r['nll'], r['right'], regression = scored
            r['loss'] = r['loss'] + r['text_loss'] + REGRESSION * regression
            if learned is not None:
                r['importance_loss'] = regression
        if 'latent' in predict:
            r['latent_loss'], r['error'] = self.latent.loss(out, target, b['row_weight'])
            r['loss'] = r['loss'] + self.latent_weight * r['latent_loss']
        return r

    @torch.no_grad()
    def statistics(self, b, r):
        """ {name: (n,)} sums over a micro-batch that are worth a log line; on the device, nothing waits. Losses also in 4 bins of
        their clock: the one diagnostic that a diffusion run needs. """
        def sums_by(index, size, values):
            return torch.zeros(size, device=self.device).index_add_(0, index, values)

        def by_clock(clock, values):
            return sums_by((4 * clock).long().clamp(max=3), 4, values)
        sums = dict(loss=r['loss'][None], rows=sums_by(b['mode'], len(MODES), torch.ones_like(b['t_text'])))
        if 'text_loss' in r:
            scored, row = b['weight'] > 0, b['positions'] // b['tokens'].shape[1]
            real = scored & (b['targets'] != self.text.mask_id - 1)      # PAD is the last id before MASK
            weighted = torch.where(scored, b['weight'] * r['nll'], 0) * len(b['mode'])
            sums.update(text_loss=r['text_loss'][None],
                        text_nats=r['text_loss'][None] * b['tokens'].numel(), n_real=b['n_real'],
                        correct=(r['right'] & real).sum()[None].float(), real_count=real.sum()[None].float(),
                        text_bins=by_clock(b['t_text'][row], torch.where(scored, r['nll'], 0)),
                        text_count=by_clock(b['t_text'][row], scored.float()),
                        text_by_mode=sums_by(b['mode'][row], len(MODES), weighted),
                        mask_share=(scored.sum() / b['tokens'].numel())[None],
                        **({'importance': b['importance']} if 'importance' in b else {}),
                        **({'importance_loss': r['importance_loss'][None]} if 'importance_loss' in r else {}))
        if 'latent_loss' in r:
            scored = b['row_weight'] > 0
            sums.update(latent_loss=r['latent_loss'][None],
                        latent_bins=by_clock(b['t_latent'], torch.where(scored, r['error'], 0)),
                        latent_count=by_clock(b['t_latent'], scored.float()),
                        latent_by_mode=sums_by(b['mode'], len(MODES), torch.where(scored, b['row_weight'] * r['error'], 0)))
        return {name: value.detach() for name, value in sums.items()}

    def summary(self, s, micro_batches):
        """ The log entry and the line of s: the statistics as lists, means per step of sums over so many micro-batches. """
        def ratio(sums, counts):
            return [a / b if b else None for a, b in zip(sums, counts)]

        def by_mode(sums):
            return {mode: x for mode, x in zip(MODES, ratio(sums, s['rows'])) if x}
        entry = dict(loss=s['loss'][0] / micro_batches)
        line = f'loss {entry["loss"]:.4f}'
        if 'text_loss' in s:
            entry.update(text_loss=s['text_loss'][0] / micro_batches,
                         text_nats_per_token=s['text_nats'][0] / max(s['n_real'][0], 1e-9),      # as the validation counts
                         text_accuracy=s['correct'][0] / max(s['real_count'][0], 1e-9),          # of text and EOS, not PAD
                         text_nll_by_t=ratio(s['text_bins'], s['text_count']), text_nats_by_mode=by_mode(s['text_by_mode']))
            line += f' | text {entry["text_loss"]:.4f}, {100 * entry["text_accuracy"]:.1f} % right'
            entry['mask_share'] = s['mask_share'][0] / micro_batches
            if 'importance' in s:
                entry.update({f'importance_{name}': x / micro_batches for name, x in zip(('mean', 'std', 'min', 'max'), s['importance'])})
            if 'importance_loss' in s:
                entry['importance_loss'] = s['importance_loss'][0] / micro_batches
        if 'latent_loss' in s:
            entry.update(latent_loss=s['latent_loss'][0] / micro_batches, latent_mse_by_t=ratio(s['latent_bins'], s['latent_count']),
                         latent_mse_by_mode=by_mode(s['latent_by_mode']))
            line += f' | latent {entry["latent_loss"]:.4f}'
        return entry, line

    @torch.no_grad()
    def validation(self, model, data, i, B, predict, trains):
        """ Sums over the i-th B rows of a split, always with the same masks and noise, (4,) float64: nats of the exact text bound,
        real tokens (text and one EOS); squared error of the latent target per dimension, rows. Each given what the modes in
        `trains` give: clean text, clean latents, or nothing (noise at clock 1). """
        rows = [r % len(data) for r in range(i * B, (i + 1) * B)]
        tokens, latents = data.rows(rows, uniforms(self.seed, i, 'crop', 0, B, 1)[:, 0] if data.cropped else None)
        fixed = None if self.predict_length else is_end(tokens, data.tokenizer).to(self.device)
        tokens, ones, zeros = tokens.to(self.device), torch.ones(B, device=self.device), torch.zeros(B, device=self.device)
        nats = error = e = None
        if 'latent' in self.streams:
            latents, e = latents.to(self.device), normals(self.seed, i, 'evaluation latent', 0, *latents.shape).to(self.device)
        u = uniforms(self.seed, i, 'evaluation', 0, B, 1 + data.seq_len).to(self.device)
        spread = (u[0, 0] + torch.arange(B, device=self.device) / B) % 1                     # one clock per row, evenly
        with self.autocast():
            if 'text' in predict:
                t_latent = zeros if 'l2t' in trains else ones                                # mixed: given the latents
                z = self.latent.corrupt(latents, t_latent, e)[0] if e is not None else None
                u[:, 0] = spread
                nats = self.text.bound(model, tokens, z, t_latent, u, fixed).sum().item()
            if 'latent' in predict:
                z, e = self.latent.corrupt(latents, spread, e)
                given = zeros if 't2l' in trains else ones
                seen = self.text.corrupt(tokens, given, u[:, 1:], fixed)[0] if 'text' in self.streams else None
                out = model(seen, z, given, spread.float(), predict=('latent',))[1]
                error = self.latent.loss(out, self.latent.target_of(latents, e, spread), ones)[1].sum().item()
        real = tokens != data.tokenizer.pad if fixed is None else ~fixed
        return torch.tensor([nats or 0, real.sum().item(), error or 0, B], dtype=torch.float64)
