"""
Stages: stretches of a run with one mode and one text length. Most runs have one; a schedule in
`mode`, or in length_schedule, makes more.
"""
import re
from types import SimpleNamespace

from diffusion import mode_shares


def modes_of(mode):
    """ The modes {name} that have a share in any stage of a run with this knob `mode`. """
    names = set()
    for part in mode.split(','):
        shares = mode_shares(part.split(':')[0].strip())
        names |= {name for name, share in shares.items() if share}
    return names


def read_schedule(name, schedule, what, max_iters):
    """ [(first step, value)] of 'VALUE:STEPS,VALUE:STEPS,VALUE': the last one fills the run. STEPS
    is a number of steps, or a share of the run such as 40%. ValueError says what is wrong. """
    found, first = [], 0
    for part in schedule.split(','):
        value, _, steps = part.strip().partition(':')
        is_count = re.fullmatch('0*[1-9][0-9]*%?', steps)
        if not value or steps and not is_count or first is None:
            raise ValueError(f'{name}={schedule!r}: {part.strip()!r}: expected {what}:STEPS,'
                             f'{what}:STEPS,{what}, where STEPS is a number, or a share as 40%')
        found.append((first, value))
        if not steps:
            first = None
        elif steps.endswith('%'):
            first += max_iters * int(steps[:-1]) // 100
        else:
            first += int(steps)
    begins, last = found[-1]
    if begins >= max_iters:
        raise ValueError(f'{name}={schedule!r}: the steps before {last!r} add up to {begins}; '
                         f'of max_iters={max_iters} none is left for it')
    if first not in (None, max_iters):
        raise ValueError(f'{name}={schedule!r}: its steps add up to {first}, but '
                         f'max_iters={max_iters}; leave the last {what.lower()} without steps')
    return found


def read_stages(schedule, lengths, streams, max_iters, seq_len, head_budget):
    """
    A stage for every stretch of one mode and one text length: its first step, what its mode draws,
    the streams that have a loss, the tokens of a text, and the number of positions of the head.
    schedule: 'l2t', or 't2l:40%,l2t:3000,l2t+t2l'; lengths: '', or '24:80%,40'.
    head_budget(share of rows that are masked and have a text loss, share of causal rows, length)
    -> positions. ValueError says what is wrong.
    """
    modes = read_schedule('mode', schedule, 'MODE', max_iters)
    cuts = read_schedule('length_schedule', lengths or str(seq_len), 'LENGTH', max_iters)
    for _, length in cuts:
        if not (length.isascii() and length.isdecimal()) or not 1 <= int(length) <= seq_len:
            raise ValueError(f'length_schedule={lengths!r}: {length!r}: expected lengths of 1 to '
                             f'{seq_len} tokens')

    found = []
    for first in sorted({step for step, _ in modes + cuts}):
        mode = [value for step, value in modes if step <= first][-1]
        length = int([value for step, value in cuts if step <= first][-1])

        # the shares of rows that have a text loss, and a latent loss
        shares = mode_shares(mode)
        masked_rows = shares['unconditional'] + shares['l2t']
        causal_share = shares['causal']
        latent_share = shares['unconditional'] + shares['t2l']
        predict = ()
        if masked_rows + causal_share and 'text' in streams:
            predict += ('text',)
        if latent_share and 'latent' in streams:
            predict += ('latent',)

        if not predict:
            raise ValueError(f'mode={mode} has no loss on streams={streams}')
        found.append(SimpleNamespace(mode=mode, first=first, seq_len=length, shares=shares,
                                     predict=predict,
                                     budget=head_budget(masked_rows, causal_share, length)))
    return found
