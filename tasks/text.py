"""
text: as unconditional, of texts alone: the latents' clock stays at 1.
Control: data, the texts themselves.
"""
from sampling.run import WRITES
from sampling.writing import blank, write
from tasks.common import FREE_SETTINGS, TaskNeeds
from tasks.measures import describe_samples
from tasks.scorer import prepare_scorer as prepare

NEEDS = TaskNeeds(('text',), (WRITES,))
SETTINGS = FREE_SETTINGS


def measure(run, ctx):
    def draw(knobs):
        return [write(run.net, *blank(run.net, ctx.n, knobs), None, knobs)]
    return describe_samples(run, ctx, draw)[0]
