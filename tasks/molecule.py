"""
molecule: SMILES written from fingerprints (encoder morgan), some bits of which may be wrong
(damage=flips:.1).

Measured: exactly the molecule, %; the Tanimoto similarity of its fingerprint with the right one;
valid, %. A molecule that is written in another way counts as the same.
Controls: as of l2t.
"""
import torch

from tasks import l2t
from tasks.common import Figures, Task
from tasks.damage import read_damage


def prepare(run, knobs):
    if (run.meta['encoder'] or {}).get('id') != 'morgan':
        raise ValueError(f'{run.out_dir} was not trained on fingerprints (encoder morgan)')
    read_damage(knobs['damage'])


def measure(run, ctx):
    figures = Figures(ctx.n)

    # as in l2t, with other measures
    written = l2t.write_with_controls(run, ctx)
    judged = {control: judge(run, ctx, texts) for control, texts in written.items()}
    figures.enter_with_lead(judged, l2t.RIVAL)
    ctx.show_written(ctx.texts, written[''])
    return figures


def judge(run, ctx, written):
    """ {metric: values (n,)} of what was written, against the texts and their fingerprints. """
    found = run.encode(written)
    valid = found.any(2)[:, 0].numpy()                     # of no molecule, no bit is set

    # the Tanimoto similarity: bits of both, as a share of the bits of either
    common = torch.minimum(found, ctx.raw).sum((1, 2))
    union = torch.maximum(found, ctx.raw).sum((1, 2))

    # one molecule has many spellings
    canonical = run.encoder.canonical
    same = [canonical(a) == canonical(b) for a, b in zip(ctx.texts, written)]
    return {
        'exact': 100. * (valid & same),
        'tanimoto': common / union.clamp(min=1),
        'valid': 100. * valid,
    }


TASK = Task(
    l2t.TASK.needs, l2t.TASK.settings, measure,
    prepare=prepare, generate=l2t.generate, judge=judge, rival=l2t.RIVAL,
    embeds=True, takes_two=True,
    headlines=(('exactly the molecule, %', '', 'exact'),
               ('Tanimoto', '', 'tanimoto')))
