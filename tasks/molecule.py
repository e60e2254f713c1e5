"""
molecule: SMILES written from fingerprints (encoder morgan), some bits of which may be wrong:
exactly the molecule, %; the Tanimoto similarity of its fingerprint with the right one; valid, %.
Controls: as of l2t. A molecule that is written in another way counts as the same.
"""
from dataclasses import replace

import numpy as np
import torch

from sampling.knobs import TEXT_KNOBS
from sampling.run import WRITES
from tasks import l2t
from tasks.common import Figures, TaskNeeds, derangement
from tasks.l2t import nearest_training_texts

NEEDS = TaskNeeds(('text', 'latent'), (WRITES,), encoder=True, shuffled=True)
SETTINGS = (*TEXT_KNOBS, 'latent_clock', 'rerank', 'wrong_bits')
RIVAL = 'nearest'
HEADLINES = (
    ('exactly the molecule, %', '', 'exact'),
    ('Tanimoto', '', 'tanimoto'),
)


def prepare(run, knobs):
    if (run.meta['encoder'] or {}).get('id') != 'morgan':
        raise ValueError(f'{run.out_dir} was not trained on fingerprints (encoder morgan)')


def measure(run, ctx):
    other = derangement(ctx.n, ctx.knobs['seed'])
    asked = with_wrong_bits(ctx, ctx.knobs['wrong_bits'])
    written = {'': generate(run, ctx),
               'shuffled': generate(run, ctx, other),
               'null': generate(run, ctx, guidance=0.0),
               RIVAL: nearest_training_texts(run, ctx.folder, asked)}
    figures = Figures(ctx.n)
    judged = {control: judge(run, ctx, texts) for control, texts in written.items()}
    figures.enter_with_lead(judged, RIVAL)
    ctx.shown += [f'   {text}\n-> {out}\n' for text, out in zip(ctx.texts, written[''])]
    return figures


def generate(run, ctx, rows=slice(None), **knobs):
    """ Texts written from these rows, wrong bits among them. A sweep calls it too. """
    share = knobs.pop('wrong_bits', ctx.knobs['wrong_bits'])
    return l2t.generate(run, replace(ctx, raw=with_wrong_bits(ctx, share)), rows, **knobs)


def with_wrong_bits(ctx, share):
    """ Fingerprints (n, 1, D): ones are lost with probability `share`, as many zeros won. """
    rng = np.random.Generator(np.random.Philox(ctx.knobs['seed']))
    bits = ctx.raw.numpy() > 0
    lost = bits & (rng.random(bits.shape) < share)
    order = np.where(bits, 2, rng.random(bits.shape))      # the smallest are won
    won = order.argsort(2).argsort(2) < lost.sum(2, keepdims=True)
    return torch.from_numpy((bits & ~lost | won).astype(np.float32))


def judge(run, ctx, written):
    """ {metric: values (n,)} of what was written, beside the texts and their fingerprints. """
    found = run.encode(written)
    valid = found.any(2)[:, 0].numpy()
    common = torch.minimum(found, ctx.raw).sum((1, 2))
    union = torch.maximum(found, ctx.raw).sum((1, 2))
    canonical = run.encoder.canonical
    same = [canonical(a) == canonical(b) for a, b in zip(ctx.texts, written)]
    return {
        'exact': 100. * (valid & same),
        'tanimoto': common / union.clamp(min=1),
        'valid': 100. * valid,
    }
