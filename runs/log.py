"""
The log of a run: training_log.jsonl, the lines on the screen, and wandb where it is asked for.

    step  1,100/1,100 | loss 1.6658 | text 3.7347 per token, 23.9 % right | norm 0.99 | ...
"""
import json
import math
import os
import sys
import time
from datetime import timedelta

import torch

from diffusion import MODES
from runs import distributed, run_folder
from runs.distributed import rank, world
from runs.flops import flops_of_step, peak_of


def in_units(n, unit):
    """ '850 kB', '1.25 MB', '32.1 TFLOP': three digits, with the prefix that fits. """
    prefixes = (('E', 1e18), ('P', 1e15), ('T', 1e12), ('G', 1e9), ('M', 1e6), ('k', 1e3))
    for prefix, size in prefixes:
        if n >= size:
            digits = 2 if n < 10 * size else 1 if n < 100 * size else 0
            return f'{n / size:.{digits}f} {prefix}{unit}'
    return f'{n:.0f} {unit}'


def in_words(seconds):
    """ '183 ms', '4.0 s', '12.5 min' or '11.1 h'. """
    if seconds < 1:
        return f'{1000 * seconds:.0f} ms'
    if seconds < 100:
        return f'{seconds:.1f} s'
    return f'{seconds / 60:.1f} min' if seconds < 6000 else f'{seconds / 3600:.1f} h'


def summary(sums, micro_batches):
    """ The log entry and the line on the screen. sums: loss.statistics as lists, means per step of
    sums over so many micro-batches. """
    def ratio(totals, counts):
        return [a / b if b else None for a, b in zip(totals, counts)]

    entry = dict(loss=sums['loss'][0] / micro_batches)
    line = f'loss {entry["loss"]:.4f}'
    if 'text_loss' in sums:
        # per real token, as in validation: PAD is not counted
        entry.update(text_loss=sums['text_loss'][0] / micro_batches,
                     text_accuracy=sums['correct'][0] / max(sums['real_count'][0], 1e-9),
                     text_nll_by_t=ratio(sums['text_bins'], sums['text_count']))
        line += ' | '
        if sums['n_real'][0]:
            entry['text_nats_per_token'] = sums['text_nats'][0] / sums['n_real'][0]
            line += f'text {entry["text_nats_per_token"]:.4f} per token, '
        if sums['n_real_causal'][0]:
            found = sums['causal_nats'][0] / sums['n_real_causal'][0]
            entry['causal_nats_per_token'] = found
            line += f'causal {found:.4f}, '
        line += f'{100 * entry["text_accuracy"]:.1f} % right'

        # the masked share, and what ATAT adds
        entry['mask_share'] = sums['mask_share'][0] / micro_batches
        if 'importance' in sums:
            for name, x in zip(('mean', 'std', 'min', 'max'), sums['importance']):
                entry[f'importance_{name}'] = x / micro_batches
        if 'importance_loss' in sums:
            entry['importance_loss'] = sums['importance_loss'][0] / micro_batches

    # the latents
    if 'latent_loss' in sums:
        entry.update(latent_loss=sums['latent_loss'][0] / micro_batches,
                     latent_mse_by_t=ratio(sums['latent_bins'], sums['latent_count']))
        line += f' | latent {entry["latent_loss"]:.4f}'
    return entry, line


def say_cost(model, run, config):
    """ One line of what a whole run will take: steps, epochs, floating-point operations. """
    max_iters = config['max_iters']
    ends = [*(stage.first for stage in run.stages[1:]), max_iters]
    total = 0
    for stage, end in zip(run.stages, ends):
        total += (end - stage.first) * flops_of_step(model, run, run.grad_accum, stage, world)
    n_samples, seq_len = len(run.train_data), run.train_data.seq_len
    epochs = run.global_batch * max_iters / n_samples
    print(f'{max_iters:,} steps of {run.global_batch:,} x {seq_len} tokens: '
          f'{epochs:,.{0 if epochs >= 100 else 2}f} epochs of {n_samples:,} samples, '
          f'{in_units(total / max_iters, "FLOP")} a step, {in_units(total, "FLOP")} in all; '
          f'{world} x {run.device}, {config["dtype"]}', flush=True)


class StepLog:
    """ The steps since the last line. What they add up to stays on the device until `report`.
    rows_of(step, micro, rank) -> (first row, rows of the dataset); tokens_until(step) -> tokens,
    PAD among them. """

    def __init__(self, out_dir, step, max_iters, interval, grad_accum, global_batch, n_samples,
                 device, rows_of, tokens_until, config, wandb_id=None):
        self.out_dir = out_dir
        self.max_iters = max_iters
        self.interval = interval
        self.grad_accum = grad_accum
        self.global_batch = global_batch
        self.n_samples = n_samples
        self.device = device
        self.peak = peak_of(device)                        # None: not known, and no MFU is logged
        self.rows_of = rows_of
        self.tokens_until = tokens_until
        self.wandb = None
        if wandb_id and not rank:
            import wandb
            wandb.init(project=config['wandb_project'], name=os.path.basename(out_dir),
                       config=config, id=wandb_id, resume='allow')
            self.wandb = wandb

        self.since = time.perf_counter()                   # of the last line
        self.steps = 0                                     # since the last line
        self.first_step = step                             # of this process
        self.first_seconds = 0.0                           # of that step; None: estimate is done

    def begin_step(self):
        if self.steps == 0:
            self.sums = 0                                  # over the steps that were taken
            self.recent = torch.zeros(self.interval, 3, device=self.device)      # bad, loss, norm
            self.is_finite = torch.ones(self.interval, self.grad_accum, device=self.device)
        self.now = 0

    def add_micro_batch(self, micro, loss, sums):
        """ sums: {name: (n,)} of loss.statistics. """
        self.is_finite[self.steps, micro] = loss.isfinite()
        self.sizes = {name: x.numel() for name, x in sums.items()}
        self.now = self.now + torch.cat(tuple(sums.values()))

    def end_step(self, bad, loss, norm):
        """ bad: 1 where the step was skipped; all on the device. """
        taken = torch.cat((self.now, norm[None], torch.ones_like(norm)[None]))
        self.sums = self.sums + torch.where(bad > 0, 0, taken)
        self.recent[self.steps] = torch.stack((bad, loss, norm))
        self.steps += 1

    # ---- lines

    def finish(self, state, signal_name, start_step, seconds):
        """ The last words of a run that is done, or that a signal of this name has ended. Every
        rank must call. """
        if signal_name:
            distributed.rank0_or_stop(5, run_folder.note_preemption, self.out_dir, state.saved_at,
                                      signal_name)
            done = 'no step was done, nothing to save'
            if state.saved_at:
                done = f'saved step {state.saved_at:,}'
            line = f'{signal_name}: {done}; run the same command again to go on\n'
        best = '' if math.isinf(state.best_val) else f'best validation {state.best_val:.4f}; '
        n_steps = state.step - start_step
        if start_step >= self.max_iters:
            line = (f'{self.out_dir} is finished: {state.step:,} of {self.max_iters:,} steps; '
                    f'{best}raise --max_iters to go on\n')
        elif n_steps:
            line = (line if signal_name else '') + (
                f'{n_steps:,} steps in {timedelta(seconds=int(seconds))}; {best}checkpoints in '
                f'{self.out_dir}\n')
        if rank == 0:
            print(line, end='', flush=True)

    def write(self, **entry):
        """ A line of training_log.jsonl. A full disk is a warning, and no half line stays behind.
        """
        if rank:
            return
        try:
            line = (json.dumps(entry) + '\n').encode()
            with open(os.path.join(self.out_dir, 'training_log.jsonl'), 'ab', buffering=0) as f:
                end = f.tell()
                if f.write(line) < len(line):
                    f.truncate(end)
                    raise OSError('no room for a line')
        except OSError as error:
            print(f'warning: cannot log: {error}', file=sys.stderr, flush=True)
        if self.wandb:
            self.wandb.log(entry, step=entry['step'])

    def report(self, step, lr, skipped, flops, more=()):
        """ One line of the log and one on the screen, of the steps since the last one. Every rank
        must call; here the device is waited for. flops: of one step, on all ranks. more: further
        fields of the entry. """
        if not self.steps:
            return

        # sums over steps and ranks, and means per step and rank that was taken
        skips = self.describe_skips(step)
        sums = distributed.all_reduce_sum(self.sums.clone()).cpu()       # one read of the device
        *sums, norm, taken = sums.split([*self.sizes.values(), 1, 1])
        taken = taken.item()
        means = {name: (x / max(1, taken)).tolist() for name, x in zip(self.sizes, sums)}
        seconds = time.perf_counter() - self.since
        tokens = self.tokens_until(step) - self.tokens_until(step - self.steps)

        # the entry
        entry = dict(step=step, epoch=step * self.global_batch / self.n_samples,
                     tokens=self.tokens_until(step))
        line = 'no step was taken'
        if taken:
            losses, line = summary(means, self.grad_accum)
            entry.update(losses, grad_norm=norm.item() / taken)
            line += f' | norm {entry["grad_norm"]:.2f}'
        entry.update(lr=lr, tokens_per_s=tokens / seconds, memory_gb=self.memory(),
                     skipped=int(skipped), **dict(more))
        shares = [rows * world / self.global_batch for rows in means['rows']]
        entry['modes'] = dict(zip(MODES, shares))
        if self.peak:
            entry['mfu'] = flops * self.steps / seconds / (self.peak * world)
        if skips:
            entry['skips'] = skips
        self.write(**entry)

        # the screen
        if rank == 0:
            for skip in skips:
                words = [f'step {skip["step"]:>6,} skipped: {skip["why"]}', f'loss {skip["loss"]}',
                         f'norm {skip["grad_norm"]}']
                words += [f'rank {w["rank"]} rows {w["rows"][0]}...' for w in skip['where']]
                print(', '.join(words), flush=True)
            eta = timedelta(seconds=int((self.max_iters - step) * seconds / self.steps))
            parts = [f'step {step:>6,}/{self.max_iters:,}', line,
                     f'{tokens / seconds:,.0f} tokens/s']
            if self.peak:
                parts.append(f'MFU {entry["mfu"]:.1%}')
            parts.append(f'ETA {eta}')
            if entry['skipped']:
                parts.append(f'skipped {entry["skipped"]}')
            print(' | '.join(parts), flush=True)
        self.since += seconds
        self.steps = 0

    def memory(self):
        """ The peak in GB, or None where the system does not say (Windows). """
        if torch.device(self.device).type == 'cuda':
            return round(torch.cuda.max_memory_allocated() / 1e9, 3)
        try:
            import resource
        except ImportError:
            return None
        unit = 1 if sys.platform == 'darwin' else 1024
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)

    def describe_skips(self, step):
        """ What was wrong with each step skipped since the last line; for a loss also on which
        rank, in which rows. Every rank must call. """
        recent = self.recent.tolist()
        if not any(bad for bad, _, _ in recent):
            return []
        is_finite = distributed.all_gather_object(self.is_finite.tolist())
        found = []
        for i, (bad, loss, norm) in enumerate(recent):
            if not bad:
                continue
            if not math.isfinite(loss):
                why = 'loss'
            elif not math.isfinite(norm):
                why = 'gradient'
            else:
                why = 'spike'

            # the micro-batches whose loss is not finite
            number = step - self.steps + i
            where = []
            for r in range(world):
                for micro in range(self.grad_accum):
                    if not is_finite[r][i][micro]:
                        _, rows = self.rows_of(number, micro, r)
                        where.append(dict(rank=r, rows=rows.tolist()))
            found.append(dict(step=number + 1, why=why, loss=f'{loss:.4g}', grad_norm=f'{norm:.4g}',
                              where=where))
        return found

    def estimate(self, step):
        """ One line after the first few steps of this process: a slow run's first log line is
        minutes away. The very first step is slow and left out. Waits for the device twice. """
        if rank or self.steps != step - self.first_step or self.first_seconds is None:
            return
        seconds = time.perf_counter() - self.since
        is_due = self.steps == 5 or self.steps > 1 and seconds - self.first_seconds > 5
        if self.steps != 1 and not is_due:
            return
        if torch.device(self.device).type == 'cuda':
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.since
        if self.steps == 1:
            self.first_seconds = seconds
            return
        a_step = (seconds - self.first_seconds) / (self.steps - 1)
        self.first_seconds = None
        print(f'step {step:>6,}/{self.max_iters:,} | {in_words(a_step)} a step, '
              f'about {in_words(a_step * (self.max_iters - step))} to go', flush=True)
