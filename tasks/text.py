"""
text: as unconditional, of texts alone: the latents' clock stays at 1.
Control: data, the texts themselves.
"""
from sampling.run import WRITES, Needs
from sampling.texts import blank, write
from tasks.common import FREE_SETTINGS, Task
from tasks.measures import describe_samples
from tasks.scorer import prepare_scorer


def measure(run, ctx):
    def sample(knobs):
        tokens, known_mask = blank(run.net, ctx.n, knobs)
        return [write(run.net, tokens, known_mask, None, knobs)]
    figures, _, _ = describe_samples(run, ctx, sample)
    return figures


TASK = Task(
    Needs(('text',), (WRITES,)), FREE_SETTINGS, measure,
    prepare=prepare_scorer)
