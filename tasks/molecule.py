"""
molecule: SMILES written from fingerprints (encoder morgan), some bits of which may be wrong:
exactly the molecule, %; the Tanimoto similarity of its fingerprint with the right one; valid, %.
Controls: shuffled, another molecule's fingerprint; null, noise at clock 1; nearest, the training
molecule whose fingerprint is nearest; lead, how far ahead of it, molecule by molecule.
"""
import numpy as np
import torch

from sampling.knobs import TEXT_KNOBS
from sampling.run import WRITES
from tasks.common import Figures, TaskNeeds, derangement
from tasks.l2t import generate, nearest_training_texts

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
    right = ctx.raw
    ctx.raw = with_wrong_bits(right, ctx.knobs['wrong_bits'], ctx.knobs['seed'])
    other = derangement(ctx.n, ctx.knobs['seed'])
    written = {'': generate(run, ctx),
               'shuffled': generate(run, ctx, other),
               'null': generate(run, ctx, guidance=0.0),
               RIVAL: nearest_training_texts(run, ctx.folder, ctx.raw)}
    figures = Figures(ctx.n)
    figures.enter_with_lead({control: judge(run, ctx.texts, texts, right)
                             for control, texts in written.items()}, RIVAL)
    ctx.shown += [f'   {text}\n-> {out}\n' for text, out in zip(ctx.texts, written[''])]
    return figures


def with_wrong_bits(raw, share, seed):
    """ Fingerprints (n, 1, D): a one is lost with probability `share`; as many zeros are won. """
    rng = np.random.Generator(np.random.Philox(seed))
    bits = raw.numpy() > 0
    lost = bits & (rng.random(bits.shape) < share)
    lot = np.where(bits, 2, rng.random(bits.shape))
    won = lot.argsort(2).argsort(2) < lost.sum(2, keepdims=True)
    return torch.from_numpy((bits & ~lost | won).astype(np.float32))


def canonical(text):
    """ The one way that RDKit writes a molecule; of what is none, the text. """
    from rdkit import Chem
    molecule = Chem.MolFromSmiles(text)
    return Chem.MolToSmiles(molecule) if molecule else text


def judge(run, texts, written, right):
    """ {metric: values (n,)} of what was written, beside the texts and their fingerprints. """
    found = run.encode(written)
    both = torch.minimum(found, right).sum((1, 2))
    either = torch.maximum(found, right).sum((1, 2))
    same = [canonical(a) == canonical(b) for a, b in zip(texts, written)]
    return {'exact': 100. * np.array(same),
            'tanimoto': both / either,
            'valid': 100. * found.any(2)[:, 0].double()}
