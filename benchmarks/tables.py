"""
The tables of README.md and docs/results.md, from the figures that results/release.sh has left in
results/.

    python -m benchmarks.tables
"""
import os

from configurator import HERE, configure
from runs.files import read_json

# (what, task, metric, digits, rival, what that is)
DIRECTIONS = (
    ('text from embedding, BLEU', 'l2t', 'bleu', 1, 'nearest', 'nearest training text'),
    ('embedding from text, centred cosine', 't2l', 'centred_cosine', 3, 'ridge',
     'ridge regression'),
    ('half of the tokens filled in, % right', 'infill', 'token_accuracy', 1, 'left_to_right',
     '8 beams'),
    ('one word changed, all others kept, {n} captions, %', 'edit', 'exact', 1, 'left_to_right',
     '8 beams'),
    ('both from noise, {n} samples, cosine', 'unconditional', 'coherence', 3, '', ''),
    ('bound of diffusion, nats per token', 'nelbo', 'nats_per_token', 3, '', ''),
    ('from left to right, exact nats per token', 'nelbo', 'causal_nats_per_token', 3, '', ''),
)

# of the same, but not beside controls of their own: the two ways of writing, greedy
GREEDY = (('by diffusion, greedy, BLEU', 'l2t', 'diffusion/bleu', 1, '', ''),
          ('from left to right, greedy, BLEU', 'l2t', 'left_to_right/bleu', 1, '', ''))
QUICKSTART = ('quickstart_seed0', 'quickstart_seed1', 'quickstart_seed2')

# (what, file, sweep, point, texts that are embedded for each)
SWEEP = 'l2t_sweep_sampler_rerank'
WAYS = (
    ('diffusion, greedy', 'captions_seed0', SWEEP, 'sampler=confidence,rerank=1', 0),
    ('from left to right, greedy', 'captions_seed0', SWEEP, 'sampler=autoregressive,rerank=1', 0),
    ('diffusion, nearest of 24 drafts', 'captions_seed0', f'{SWEEP}[n=200]',
     'sampler=confidence,rerank=24', 24),
    ('from left to right, nearest of 24', 'captions_seed0', SWEEP,
     'sampler=autoregressive,rerank=24', 24),
    ('from left to right, nearest of 24', 'captions_seed0', f'{SWEEP}[n=200]',
     'sampler=autoregressive,rerank=24', 24),
    ('from left to right, nearest of 150', 'captions_seed0', f'{SWEEP}[n=200]',
     'sampler=autoregressive,rerank=150', 150),
    ('a decoder alone, greedy', 'captions_decoder', SWEEP, 'sampler=autoregressive,rerank=1', 0),
    ('a decoder alone, nearest of 24', 'captions_decoder', SWEEP,
     'sampler=autoregressive,rerank=24', 24),
    ('a decoder alone, nearest of 150', 'captions_decoder', f'{SWEEP}[n=200]',
     'sampler=autoregressive,rerank=150', 150),
)


def read(name):
    path = os.path.join(HERE, 'results', f'{name}.json')
    return read_json(path) if os.path.isfile(path) else {}


def cell(found, key, digits):
    """ '48.1 ± 1.0', or '' where it was not measured. """
    if key not in found:
        return ''
    error = found.get(f'{key}_se')
    return f'{found[key]:.{digits}f}' + ('' if error is None else f' ± {error:.{digits}f}')


def directions(name, again):
    """ Ours, with another seed beside it where that was measured, the controls, and the rival. """
    found, second = read(name), read(again)
    for what, task, metric, digits, rival, its_name in DIRECTIONS:
        if f'{task}/{metric}' not in found:
            continue
        cells = [cell(found, f'{task}/{control}{metric}', digits)
                 for control in ('', 'shuffled/', 'null/')]
        if second:
            cells.insert(1, cell(second, f'{task}/{metric}', digits))
        against = ''
        if rival:
            lead = cell(found, f'{task}/lead/{metric}', digits)
            of_second = cell(second, f'{task}/lead/{metric}', digits)
            if of_second:
                lead += f', {of_second}'
            against = f'{cell(found, f"{task}/{rival}/{metric}", digits)} {its_name}; lead {lead}'
        what = what.format(n=found.get(f'{task}/n'))
        print(f'| {what} | {" | ".join(cells)} | {against} |')


def seeds(names):
    """ A column for each seed, and the lead over the rival in each. """
    runs = [read(name) for name in names]
    for what, task, metric, digits, rival, its_name in (DIRECTIONS[0], *GREEDY, *DIRECTIONS[1:]):
        cells = [cell(found, f'{task}/{metric}', digits) for found in runs]
        leads = [cell(found, f'{task}/lead/{metric}', digits) for found in runs]
        if any(cells):
            what = what.format(n=runs[0].get(f'{task}/n'))
            against = f'{its_name}: {"; ".join(leads)}' if rival else ''
            print(f'| {what} | {" | ".join(cells)} | {against} |')


def ways():
    for what, name, sweep, point, n_embedded in WAYS:
        found, key = read(name), f'{sweep}/{point}'
        if f'{key}/ms' in found:
            cells = [cell(found, f'{key}/{metric}', 1) for metric in ('bleu', 'f1', 'exact')]
            n = f'{found[f"{sweep}/n"]:,}'
            print(f'| {what} | {n} | {n_embedded} | {found[f"{key}/ms"]:.0f} | '
                  f'{" | ".join(cells)} |')
        elif found:
            print(f'{what}: results/{name}.json has no {key}')


if __name__ == '__main__':
    configure(globals())
    print('quickstart, three seeds, and their leads')
    seeds(QUICKSTART)
    print('\ncaptions, two seeds')
    directions('captions_seed0', 'captions_seed1')
    print('\nwriting captions')
    ways()
