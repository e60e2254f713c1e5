"""
Stages: stretches of a run with one mode and one text length. Most runs have one; a schedule in
`mode`, or in length_schedule, makes more. And the learning rate of a step.
"""
import math
import re
from dataclasses import dataclass

from diffusion import mode_shares

# {stream: the modes whose rows have a loss on it}
LOSSES = dict(text=('unconditional', 'l2t', 'causal'), latent=('unconditional', 't2l', 'complete'))


@dataclass
class Stage:
    mode: str                  # one mode or a mix of them, as 'l2t+3*causal'
    first: int                 # its first step
    end: int                   # the step after its last one
    seq_len: int               # to how many tokens texts are cut
    shares: dict               # {mode: share of the rows}
    predict: tuple             # the streams that have a loss
    flops: int = 0             # operations of a step, on all processes: preflight.flops_of


def read_schedule(name, schedule, what, max_iters):
    """ [(first step, value)] of 'VALUE:STEPS,VALUE:STEPS,VALUE': the last one fills the run. STEPS
    is a number of steps, or a share of the run such as 40%. ValueError says what is wrong. """
    found = []
    first = 0
    *parts, last = [part.strip() for part in schedule.split(',')]
    for part in [*parts, f'{last}:1']:                     # the last one has no count: any matches
        match = re.fullmatch('([^:]+):(0*[1-9][0-9]*)(%?)', part)
        if not match:
            raise ValueError(f'{name}={schedule!r}: expected {what}:STEPS,{what}:STEPS,{what}, '
                             'where STEPS is a number, or a share as 40%')

        # a share is rounded down to whole steps
        value, steps, percent = match.groups()
        found.append((first, value))
        if percent:
            first += max_iters * int(steps) // 100
        else:
            first += int(steps)

    # the last value needs a step, too
    begins, last = found[-1]
    if begins >= max_iters:
        raise ValueError(f'{name}={schedule!r}: the steps before {last!r} add up to {begins}; '
                         f'of max_iters={max_iters} none is left for it')
    return found


def read_stages(schedule, lengths, streams, max_iters, seq_len):
    """ The stages of a run. schedule: 'l2t', or 't2l:40%,l2t:3000,l2t+t2l'; lengths: '', or
    '24:80%,all'. ValueError says what is wrong. """
    modes = read_schedule('mode', schedule, 'MODE', max_iters)
    cuts = read_schedule('length_schedule', lengths or 'all', 'LENGTH', max_iters)

    # a length is looked up as it is written, so 024 is none
    length_of = {str(length): length for length in range(1, seq_len + 1)}
    length_of['all'] = seq_len
    for _, length in cuts:
        if length not in length_of:
            raise ValueError(f'length_schedule={lengths!r}: {length!r}: expected lengths of 1 to '
                             f'{seq_len} tokens, or all')

    # a stage begins where the mode or the length changes
    found = []
    firsts = sorted({step for step, _ in modes + cuts})
    for first, end in zip(firsts, [*firsts[1:], max_iters]):
        mode = value_at(modes, first)
        length = value_at(cuts, first)
        shares = mode_shares(mode)
        predict = tuple(stream for stream, losses in LOSSES.items()
                        if stream in streams and any(shares[name] for name in losses))
        if not predict:
            raise ValueError(f'mode={mode} has no loss on streams={streams}')
        found.append(Stage(mode, first, end, length_of[length], shares, predict))
    return found


def value_at(schedule, step):
    """ The value at a step of what read_schedule gives. """
    return [value for first, value in schedule if first <= step][-1]


def lr_factor(knobs, step):
    """ The factor on the base rates in a step, counted from 0: linear warm-up, then a cosine.
        (step + 1) / warmup                                          while step < warmup
        min_lr + (1 - min_lr) (1 + cos(pi done)) / 2                 done from 0 to 1 """
    end, min_lr = knobs['max_iters'], knobs['min_lr']

    # a short run warms up for half of its steps at most
    warmup = min(knobs['warmup_iters'], end // 2)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, end - warmup))
    return min_lr + (1 - min_lr) * 0.5 * (1 + math.cos(math.pi * done))
