"""
text: as unconditional, of texts alone: the latents' clock stays at 1.
Control: data, the texts themselves.
"""
from sampling.directions import WRITES
from sampling.writing import blank, write
from tasks.common import FREE_SETTINGS, TaskNeeds, describe_samples
from tasks.scorer import prepare_scorer as prepare

NEEDS = TaskNeeds(('text',), (WRITES,))
SETTINGS = FREE_SETTINGS


def measure(run, ctx):
    def draw(**sampling):
        tokens, known_mask = blank(run, ctx.n, sampling['length'], sampling['seed'])
        return [write(run, tokens, known_mask, None, **sampling)]
    return describe_samples(run, ctx, draw)[0]
