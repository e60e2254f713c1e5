"""
sts: correlation of the cosine of generated latents with what people said of pairs of sentences,
over all pairs, over the known ones, whose every word occurs in the training texts, and over the
clean ones of these: neither of the two is a training text.
Controls: shuffled, another sentence's latent; encoder, the encoder's own latents.
"""
import csv
import os
import re

import numpy as np
import torch.nn.functional as F

from sampling.inputs import pack
from encoders import reach_hub
from sampling.directions import MAKES
from sampling.knobs import LATENT_KNOBS
from tasks.common import (TaskNeeds, chosen_rows, correlations, derangement, embed, enter,
                          make_latents, train_texts, words)

NEEDS = TaskNeeds(('text', 'latent'), (MAKES,), encoder=True)
SETTINGS = (*LATENT_KNOBS, 'seeds', 'sts', 'sts_revision')
HAS_OWN_TEXTS = True           # --texts= is not read

# the columns of a table of pairs, by the names that data sets give them
COLUMNS = (('sentence1', 'sentence_a', 'sentence_A'),
           ('sentence2', 'sentence_b', 'sentence_B'),
           ('score', 'relatedness_score'))


def prepare(run, knobs):
    """ (sentences, sentences, scores) of the pairs that are chosen. """
    if not run.meta['encoder']:
        raise ValueError(f'{run.out_dir} has latents that were given without their encoder: no sts '
                         'from it')
    if not knobs['sts']:
        raise ValueError('tasks=sts reads --sts=FILE.csv of sentence, sentence, score')
    first, second, scores = read_pairs(knobs['sts'], knobs['sts_revision'])
    rows = np.arange(len(first))
    if knobs['n'] is not None:
        rows = chosen_rows(len(first), knobs['n'], knobs['order'], knobs['seed'])
    if len(rows) < 3:
        raise ValueError(f'sts={knobs["sts"]}, n={knobs["n"]}: a correlation needs at least 3 '
                         f'pairs, found {len(rows)}')
    return [first[i] for i in rows], [second[i] for i in rows], scores[rows]


def measure(run, ctx):
    """ Several draws of the latents of all sentences; the correlations are means over the
    draws. """
    # the sentences
    first, second, scores = ctx.prepared
    seed, seeds = ctx.knobs['seed'], ctx.knobs['seeds']
    n, sentences = len(first), first + second
    tokens = pack(run, sentences, cut=True)
    n_cut = sum(len(run.tokenizer.encode(sentence)) >= run.L for sentence in sentences)
    vocabulary, training = set(), set()
    asked_for = set(map(plain, sentences))
    for text in train_texts(run, ctx.folder):
        vocabulary |= words(text)
        training |= {plain(text)} & asked_for
    is_known = np.array([words(a) | words(b) <= vocabulary for a, b in zip(first, second)])
    is_clean = is_known & [plain(a) not in training and plain(b) not in training
                           for a, b in zip(first, second)]

    # {control: cosines (n,) of the pairs, one array a draw}
    other = derangement(2 * n, seed)
    cosines = {'': [], 'shuffled/': []}
    for i in range(seeds):
        sampling = ctx.sampling | dict(seed=seed + i)
        z = make_latents(run, tokens, **sampling)
        cosines[''].append(cosine_of_halves(z))
        cosines['shuffled/'].append(cosine_of_halves(z[other]))
    cosines['encoder/'] = [cosine_of_halves(embed(run, sentences))]

    # the correlations
    results = {'n': n, 'seeds': seeds, 'n_known': int(is_known.sum()),
               'n_clean': int(is_clean.sum()), 'n_cut_sentences': n_cut}
    subsets = {'': np.ones(n, bool), 'known_': is_known, 'clean_': is_clean}
    for subset, rows in subsets.items():
        if rows.sum() < 3:
            continue
        for control, draws in cosines.items():
            each = [correlations(x[rows], scores[rows]) for x in draws]
            mean = {key: np.mean([e[key] for e in each]) for key in each[0]}
            enter(results, f'{control}{subset}', mean)
            if control == '':
                spread = np.std([e['spearman'] for e in each])
                enter(results, subset, {'spearman_sd_over_seeds': spread})
    return results


def cosine_of_halves(z):
    """ Cosine (n,) of the i-th latent of the first half with that of the second. """
    first, second = z.flatten(1).chunk(2)
    return F.cosine_similarity(first, second).numpy()


def plain(text):
    """ A text without its case, punctuation and spaces. """
    return re.sub(r'[\W_]+', ' ', text.lower()).strip()


def read_pairs(path, revision=''):
    """ (sentences, sentences, scores) from a csv or tsv, with or without a header, or a hub
    dataset's validation split. """
    rows, header = read_table(path) if os.path.isfile(path) else fetch_table(path, revision)
    try:
        at = [next(i for i, name in enumerate(header) if name in legal) for legal in COLUMNS]
        first, second, scores = ([row[i] for row in rows] for i in at)
        scores = np.array(scores, float)
        is_finite = np.isfinite(scores)
        if not is_finite.all():
            raise ValueError(f'the score of pair {is_finite.argmin() + 1} is no finite number')
        return first, second, scores
    except (StopIteration, IndexError, ValueError, TypeError) as error:
        raise ValueError(f'{path}: expected columns sentence1, sentence2, score, found {header} '
                         f'({error})') from None


def read_table(path):
    """ The rows of a csv or tsv, and the names of its columns. """
    form = {}
    if path.endswith(('.tsv', '.txt')):
        form = dict(delimiter='\t', quoting=csv.QUOTE_NONE)
    with open(path, encoding='utf-8', newline='') as f:
        rows = [row for row in csv.reader(f, **form) if row]
    legal = {name for names in COLUMNS for name in names}
    if rows and legal & set(rows[0]):
        return rows[1:], rows[0]
    return rows, [names[0] for names in COLUMNS]


def fetch_table(name, revision):
    """ The same of a dataset on the hub. """
    if not re.fullmatch(r'[\w.-]+/[\w.-]+', name):
        raise ValueError(f'sts={name!r}: no such file, nor a hub id')
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f'sts={name!r} is no file; to read it from the hub: pip install '
                         'datasets') from None
    trouble = reach_hub()
    try:
        table = load_dataset(name, split='validation', revision=revision or None)
    except Exception as error:                 # a dozen kinds, all of which mean: not there
        raise ValueError(f'sts={name!r}: no such file, and the hub did not give it '
                         f'({trouble or type(error).__name__})') from None
    return [list(row.values()) for row in table], table.column_names
