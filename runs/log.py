"""
The log of a run: training_log.jsonl, the lines on the screen, and wandb where it is asked for.

    step  1,100/1,100 | loss 1.6658 | text 3.7347 per token, 23.9 % right | norm 0.99 | ...

`text` is the loss of the masked rows, per real token. There PAD is scored as well, but the sum is
divided by the real tokens alone, so at first it may lie above ln V, which a uniform guess has per
position. It is no bound on -log p, as clocks begin at t_min; val_text, of the validation, is one.
"""
import math
import os
import resource
import shlex
import sys
import time
from datetime import timedelta

import torch

from base.console import warn
from base.distributed import all_gather_object, all_reduce_sum, print0, rank, world
from base.files import one_line
from base.writing import json_line
from configurator import HERE
from diffusion import CAUSAL, MODES, modes_of
from runs import run_folder

# Dense bfloat16 operations per second, from the makers' data sheets, by torch's name of the card. A
# card that is not here, or a part of one (MIG), has no MFU in the log
PEAKS = {
    'NVIDIA H200': 989e12,
    'NVIDIA H100 80GB HBM3': 989e12,
    'NVIDIA A100-SXM4-80GB': 312e12,
    'NVIDIA GeForce RTX 4090': 165e12,
}


# means over micro-batches, in the log
LOSSES = ('loss', 'text_loss', 'importance_loss', 'latent_loss')


def peak_of(device):
    """ Operations per second of a device in bfloat16; None where the table has none. """
    if torch.device(device).type != 'cuda':
        return None
    return PEAKS.get(torch.cuda.get_device_name(device))


def memory(device):
    """ The peak in GB. """
    if torch.device(device).type == 'cuda':
        return round(torch.cuda.max_memory_allocated() / 1e9, 3)

    # the peak of this process, which macOS gives in bytes, and Linux in kB
    unit = 1 if sys.platform == 'darwin' else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)


def sums_by_clock(clock, values):
    """ (4,): the sums over the quarters of the clock. """
    quarter = (4 * clock).long().clamp(max=3)
    return torch.zeros(4, device=values.device).index_add_(0, quarter, values)


@torch.no_grad()
def statistics(batch, losses):
    """ {name: (n,)}: sums over a micro-batch that are worth a log line, texts in nats, latents in
    squared errors per dimension. They stay on the device; nothing waits.

    Losses also by quarters of their clock: the one diagnostic that a diffusion run needs. """
    modes = torch.arange(len(MODES), device=batch.mode.device)
    sums = dict(rows=(batch.mode[:, None] == modes).sum(0))
    for name in LOSSES:
        value = getattr(losses, name)
        if value is not None:
            sums[name] = value
    if batch.importance is not None:
        sums['importance'] = batch.importance

    if losses.text_loss is not None:
        # which of the P scored positions are no PAD: of these it is said how many are right
        nll = losses.nll
        is_real = batch.targets != batch.pad
        sums['correct'] = (losses.right & is_real).sum()
        sums['n_real_scored'] = is_real.sum()

        # what is by clock, or weighted, is of masked rows alone. n_real also counts their tokens
        # that were not masked and so are not scored
        B, L = batch.x_t.shape
        row = batch.positions // L
        is_masked = batch.mode[row] != CAUSAL
        clock = batch.t_text[row]
        sums['text_nats'] = (is_masked * batch.weight * nll).sum() * (B * L)
        sums['n_real'] = batch.n_real
        sums['causal_nats'] = (~is_masked * nll).sum()
        sums['n_real_causal'] = batch.n_real_causal
        sums['text_bins'] = sums_by_clock(clock, is_masked * nll)
        sums['text_count'] = sums_by_clock(clock, is_masked.float())

    if losses.latent_loss is not None:
        is_scored = batch.row_weight > 0
        error = torch.where(is_scored, losses.error, 0)
        sums['latent_bins'] = sums_by_clock(batch.t_latent, error)
        sums['latent_count'] = sums_by_clock(batch.t_latent, is_scored.float())
    return {name: value.detach().reshape(-1) for name, value in sums.items()}


def summary(sums, micro_batches):
    """ The log entry and the line on the screen. sums: statistics as lists, means per step of
    sums over so many micro-batches. """
    def ratios(total, count):
        return [a / b if b else None for a, b in zip(sums[total], sums[count])]

    # what is a mean over micro-batches
    entry = {name: sums[name][0] / micro_batches for name in LOSSES if name in sums}
    if 'importance' in sums:
        for name, x in zip(('mean', 'std', 'min', 'max'), sums['importance']):
            entry[f'importance_{name}'] = x / micro_batches
    line = f'loss {entry["loss"]:.4f}'

    # the text, per real token, as in validation: PAD is not counted
    if 'text_loss' in sums:
        entry['text_accuracy'] = sums['correct'][0] / max(sums['n_real_scored'][0], 1e-9)
        entry['text_nll_by_t'] = ratios('text_bins', 'text_count')
        words = []
        if sums['n_real'][0]:
            nats = sums['text_nats'][0] / sums['n_real'][0]
            entry['text_nats_per_token'] = nats
            words.append(f'text {nats:.4f} per token')
        if sums['n_real_causal'][0]:
            nats = sums['causal_nats'][0] / sums['n_real_causal'][0]
            entry['causal_nats_per_token'] = nats
            words.append(f'causal {nats:.4f}')
        words.append(f'{100 * entry["text_accuracy"]:.1f} % right')
        line += ' | ' + ', '.join(words)

    # the latents
    if 'latent_loss' in sums:
        entry['latent_mse_by_t'] = ratios('latent_bins', 'latent_count')
        line += f' | latent {entry["latent_loss"]:.4f}'
    return entry, line


def no_link(path, flags):
    """ Opens a file; OSError for a link, or a pipe that nobody reads. """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


class StepLog:
    """ Collects the steps since the last line of the log. What is known of them stays on the device
    until `log_steps`. row_numbers(step, micro, rank): that of the Loader, to say in which rows a
    loss was not finite. """

    def __init__(self, out_dir, device, max_iters, row_numbers, config):
        self.out_dir, self.device = out_dir, device
        self.max_iters = max_iters
        self.modes = modes_of(config['mode'])
        self.is_masked = config['text_process'] in ('masked', 'atat')
        self.row_numbers = row_numbers
        self.peak = peak_of(device)                        # None: not known, and no MFU is logged
        self.wandb = None
        if config['wandb_project'] and not rank():
            try:
                import wandb
                wandb.init(project=config['wandb_project'], name=os.path.basename(out_dir),
                           config=config)
                self.wandb = wandb
            except Exception as error:                     # its own kinds, or it is not installed
                warn(f'the run goes on without wandb: {one_line(error)}')

        self.micro_losses = []                             # of this step, one for each micro-batch
        self.sums = 0                                      # of this step: `statistics` in one row
        self.steps = []                                    # since the last line
        self.since = self.began = time.perf_counter()      # since: of the last line
        self.n_steps = 0                                   # of this process

    def add(self, batch, losses):
        """ Adds up what is to be logged of a micro-batch: a diffusion.Batch and its Losses. Only
        the sums stay, so a step takes no more memory where it has more micro-batches. """
        sums = statistics(batch, losses)
        self.sizes = {name: x.numel() for name, x in sums.items()}
        self.sums = self.sums + torch.cat(tuple(sums.values()))
        self.micro_losses.append(losses.loss.detach())

    def end_step(self, bad, loss, norm):
        """ Keeps what was added as that of one step. bad: 1 where it was skipped. """
        # a row of the table that log_steps reads: these three, the losses of the micro-batches, the
        # sums
        known = torch.stack((bad, loss, norm, *self.micro_losses))
        self.steps.append(torch.cat((known, self.sums)))
        self.n_losses = len(self.micro_losses)
        self.micro_losses = []
        self.sums = 0
        self.n_steps += 1

    def append(self, entry):
        """ A line of training_log.jsonl. A full disk is a warning, and so is a folder that is no
        longer this run's: the next save ends the run. """
        if rank():
            return
        path = os.path.join(self.out_dir, run_folder.LOG)
        try:
            run_folder.check()
            with open(path, 'a', opener=no_link) as f:
                f.write(json_line(entry) + '\n')
        except (OSError, ValueError) as error:
            why = getattr(error, 'strerror', None) or error
            print0(f'warning: cannot log in {path}: {why}', file=sys.stderr)
        if self.wandb:
            self.wandb.log(entry, step=entry['step'])

    def last_lines(self, state, signal_name, meta):
        """ Prints how the training ended, and what may come next. signal_name: of the signal that
        ended it, or ''; meta: of its dataset. """
        if signal_name:
            done = f'saved step {state.saved_at:,}' if state.saved_at else 'nothing to save'
            print0(f'{signal_name}: {done}; run the same command again to go on')
        if self.n_steps:
            seconds = timedelta(seconds=int(time.perf_counter() - self.began))
            print0(f'{self.n_steps:,} steps in {seconds}; checkpoints in {self.out_dir}')
        elif not signal_name:
            print0(f'{self.out_dir} is finished: {state.step:,} of {self.max_iters:,} steps; '
                   'raise --max_iters to go on')
        if not signal_name:
            print0(self.next_commands(state.model.config.streams, meta))

    def next_commands(self, streams, meta):
        """ Commands that write with the run, and that measure it. """
        # what sample.py reads by default. Not every latent has an encoder that a text goes through
        given = '--text="..."'
        if len(streams) == 1:
            given = '--num_samples=4'
        elif self.modes & {'l2t', 'causal'} and not meta['encoder']:
            given = '--image=FILE.png' if meta['source'].get('image_size') else '--latents=FILE.npy'
        elif self.modes == {'unconditional'}:
            given = '--num_samples=4'
            if not self.is_masked:                         # then it draws one at a time
                given = '--mode=text --num_samples=4'
        tasks = ''
        if meta['splits']['val']['samples'] == 1:          # no other text to shuffle it with
            tasks = ' --tasks=nelbo'

        # from the folder that one is in
        out_dir = shlex.quote(self.out_dir)
        sample, evaluate = (shlex.quote(os.path.relpath(os.path.join(HERE, f'{script}.py')))
                            for script in ('sample', 'evaluate'))
        return (f'python {sample} --out_dir={out_dir} {given}\n'
                f'python {evaluate} --out_dir={out_dir}{tasks}')

    def log_evaluation(self, step, val, guess, is_best, seconds):
        """ Logs an evaluation, and warns of a loss that is not better than a guess. val, guess:
        {name: loss}, of the network, and of a uniform guess. """
        words = []
        for name, value in val.items():
            unit = 'per dimension'
            if name != 'val_latent':
                unit = f'nats per token (a guess: {guess[name]:.2f})'
            words.append(f'{name} {value:.4f} {unit}')

            # so written that nan is worse than a guess, too
            if not value < guess[name]:
                print0(f'warning: {name} {value:.4g} is not finite, or worse than a guess',
                       file=sys.stderr)
        print0(f'step {step:>6,} | {", ".join(words)}{" | best" if is_best else ""}')
        self.append(dict(step=step, **val, best=is_best, seconds=round(seconds, 2)))

    def log_steps(self, step, tokens_a_step, flops, **more):
        """ One line of the log and one on the screen, of the steps since the last one. Every rank
        must call; here the device is waited for. tokens_a_step: PAD among them; flops: of a step;
        both on all ranks. more: further fields of the entry. """
        # one read of the device: what is known of each step, and its sums
        table = torch.stack(self.steps).cpu()
        known, sums = table.tensor_split([3 + self.n_losses], 1)
        is_taken = known[:, 0] == 0
        n_taken = int(is_taken.sum())
        seconds = time.perf_counter() - self.since
        seconds_a_step = seconds / len(self.steps)

        # means per step and rank that was taken
        means = all_reduce_sum(sums[is_taken].sum(0)) / max(1, n_taken * world())
        parts = means.split([*self.sizes.values()])
        means = {name: x.tolist() for name, x in zip(self.sizes, parts)}

        # the entry
        entry, line = dict(step=step), 'no step was taken'
        if n_taken:
            losses, line = summary(means, self.n_losses)
            entry.update(losses, grad_norm=known[is_taken, 2].mean().item())
            line += f' | norm {entry["grad_norm"]:.2f}'
        n_rows = max(1, sum(means['rows']))
        entry.update(
            tokens_per_s=tokens_a_step * len(self.steps) / seconds,
            memory_gb=memory(self.device),
            **more,
            modes={mode: rows / n_rows for mode, rows in zip(MODES, means['rows'])})
        if self.peak:
            entry['mfu'] = flops * len(self.steps) / seconds / (self.peak * world())
        skips = self.skips_of(step, known)
        if skips:
            entry['skips'] = skips
        self.append(entry)

        # the screen
        for skip in skips:
            print_skip(skip)
        line += f' | {entry["tokens_per_s"]:,.0f} tokens/s'
        if self.peak:
            line += f' | MFU {entry["mfu"]:.1%}'
        line += f' | ETA {timedelta(seconds=int((self.max_iters - step) * seconds_a_step))}'
        if entry['skipped']:
            line += f' | skipped {entry["skipped"]}'
        print0(f'step {step:>6,}/{self.max_iters:,} | {line}')
        self.since += seconds
        self.steps = []

    def skips_of(self, step, known):
        """ What was wrong with each step skipped since the last line; for a loss also on which
        rank, in which rows. Every rank must call. known (steps, 3 + micro-batches): whether it was
        skipped, loss, norm, the losses of this rank. """
        if not known[:, 0].any():
            return []

        # a rank knows the losses of its own rows alone, so all say which of theirs are finite
        is_finite = all_gather_object(known[:, 3:].isfinite().tolist())
        found = []
        for i, (bad, loss, norm, *_) in enumerate(known.tolist()):
            if not bad:
                continue

            # a loss that is not finite, or else a gradient; where both are finite the norm was too
            # large
            number = step - len(known) + i
            why = 'spike' if math.isfinite(norm) else 'gradient'
            where = []
            if not math.isfinite(loss):
                why = 'loss'
                for r in range(world()):
                    for micro in range(self.n_losses):
                        if not is_finite[r][i][micro]:
                            _, rows = self.row_numbers(number, micro, r)
                            where.append(dict(rank=r, rows=rows.tolist()))
            found.append(dict(
                step=number + 1,
                why=why,
                loss=f'{loss:.4g}',
                grad_norm=f'{norm:.4g}',
                where=where))
        return found


def print_skip(skip):
    """ A step that was skipped, as skips_of describes it. """
    words = [f'step {skip["step"]:>6,} skipped: {skip["why"]}', f'loss {skip["loss"]}',
             f'norm {skip["grad_norm"]}']
    for place in skip['where']:
        words.append(f'rank {place["rank"]} rows {place["rows"][0]}...')
    print0(', '.join(words))
