"""
text: as unconditional, of texts alone: the latents' clock stays at 1.
Control: data, the texts themselves.
"""
from sampling.run import WRITES, Needs
from sampling.writing import blank, write
from tasks.common import FREE_SETTINGS, Task
from tasks.measures import describe_samples
from tasks.scorer import prepare_scorer


def measure(run, ctx):
    def draw(knobs):
        return [write(run.net, *blank(run.net, ctx.n, knobs), None, knobs)]
    return describe_samples(run, ctx, draw)[0]


TASK = Task(
    Needs(('text',), (WRITES,)), FREE_SETTINGS, measure,
    prepare=prepare_scorer)
