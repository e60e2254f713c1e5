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
from sampling.knobs import LATENT_KNOBS
from sampling.run import MAKES
from tasks.common import Figure, Figures, TaskNeeds, chosen_rows, derangement, embed, train_texts
from tasks.measures import correlations, words

NEEDS = TaskNeeds(('text', 'latent'), (MAKES,), encoder=True)
SETTINGS = (*LATENT_KNOBS, 'seeds', 'sts')
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
    first, second, scores = read_pairs(knobs['sts'])
    rows = np.arange(len(first))
    if knobs['n'] is not None:
        rows = chosen_rows(len(first), knobs['n'], knobs['order'], knobs['seed'])
    if len(rows) < 3:
        raise ValueError(f'sts={knobs["sts"]}: a correlation needs 3 pairs, found {len(rows)}')
    return [first[i] for i in rows], [second[i] for i in rows], scores[rows]


def measure(run, ctx):
    """ The correlations are means over several draws of the latents. """
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
    cosines = {'': [], 'shuffled': []}
    for i in range(seeds):
        sampling = ctx.sampling | dict(seed=seed + i)
        z = run.embed(tokens, **sampling)
        cosines[''].append(cosine_of_halves(z))
        cosines['shuffled'].append(cosine_of_halves(z[other]))
    cosines['encoder'] = [cosine_of_halves(embed(run, sentences))]

    # the correlations
    figures = Figures(n)
    figures.enter('', {'n_known': int(is_known.sum()), 'n_clean': int(is_clean.sum()),
                       'n_cut_sentences': n_cut})
    subsets = {'': np.ones(n, bool), 'known_': is_known, 'clean_': is_clean}
    for subset, rows in subsets.items():
        if rows.sum() < 3:
            continue
        for control, draws in cosines.items():
            each = [correlations(x[rows], scores[rows]) for x in draws]
            for name in each[0]:
                r, se = np.mean([of_draw[name] for of_draw in each], 0)
                figures[control, f'{subset}{name}'] = Figure(float(r), float(se))
    return figures


def cosine_of_halves(z):
    """ Cosine (n,) of the i-th latent of the first half with that of the second. """
    first, second = z.flatten(1).chunk(2)
    return F.cosine_similarity(first, second).numpy()


def plain(text):
    """ A text without its case, punctuation and spaces. """
    return re.sub(r'[\W_]+', ' ', text.lower()).strip()


def read_pairs(path):
    """ (sentences, sentences, scores) from a csv or tsv, with or without a header. """
    if not os.path.isfile(path):
        raise ValueError(f'sts={path}: no such file')
    form = {}
    if path.endswith(('.tsv', '.txt')):
        form = dict(delimiter='\t', quoting=csv.QUOTE_NONE)
    with open(path, encoding='utf-8', newline='') as f:
        rows = [row for row in csv.reader(f, **form) if row]

    # which column is which
    header = [names[0] for names in COLUMNS]
    if rows and {name for names in COLUMNS for name in names} & set(rows[0]):
        header, *rows = rows
    try:
        at = [next(i for i, name in enumerate(header) if name in legal) for legal in COLUMNS]
        first, second, scores = ([row[i] for row in rows] for i in at)
        scores = np.array(scores, float)
    except (StopIteration, IndexError, ValueError) as error:
        raise ValueError(f'{path}: expected columns sentence1, sentence2, score, found {header} '
                         f'({error})') from None
    is_finite = np.isfinite(scores)
    if not is_finite.all():
        raise ValueError(f'{path}: the score of pair {is_finite.argmin() + 1} is no finite number')
    return first, second, scores
