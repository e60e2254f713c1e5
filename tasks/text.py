"""
text: as unconditional, of texts alone: the latents' clock stays at 1.
Control: data, the texts themselves.
"""
import time

from tqdm import tqdm

from sample import WRITES, blank, write
from tasks.common import FREE_KNOBS, Measured, TaskNeeds, decode, describe_texts, prepare_scorer

NEEDS = TaskNeeds(('text',), (WRITES,))
SETTINGS = (*FREE_KNOBS, 'scorer', 'scorer_revision')
prepare = prepare_scorer


def measure(run, ctx):
    # the samples, and what they cost
    n, results = ctx.n, {'n': ctx.n}
    run.row_calls, began = 0, time.perf_counter()
    with tqdm(total=n, desc='text', unit='text', leave=False, disable=None) as bar:
        sampling = ctx.sampling | dict(progress=bar.update, guidance=1.0)
        nothing = blank(run, n, sampling['length'], sampling['seed'])
        tokens = write(run, *nothing, None, **sampling)
    results['calls'] = run.row_calls / n
    results['ms'] = 1000 * (time.perf_counter() - began) / n

    # what they are like
    written = decode(run, tokens)
    describe_texts(results, run, '', written, tokens, ctx.prepared)
    describe_texts(results, run, 'data/', ctx.texts, ctx.tokens, ctx.prepared)
    return Measured(results, [f'-> {text}' for text in written])
