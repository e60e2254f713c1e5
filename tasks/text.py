"""
text: as unconditional, of texts alone: the latents' clock stays at 1.
Control: data, the texts themselves.
"""
from sampling.directions import WRITES
from sampling.writing import blank, write
from tasks.common import FREE_KNOBS, Measured, TaskNeeds, describe_samples, prepare_scorer

NEEDS = TaskNeeds(('text',), (WRITES,))
SETTINGS = (*FREE_KNOBS, 'scorer', 'scorer_revision')
prepare = prepare_scorer


def measure(run, ctx):
    def draw(**sampling):
        tokens, known_mask = blank(run, ctx.n, sampling['length'], sampling['seed'])
        return [write(run, tokens, known_mask, None, **sampling)]

    results, written, _ = describe_samples(run, ctx, 'text', draw)
    return Measured(results, [f'-> {text}' for text in written])
