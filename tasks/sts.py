"""
sts: do the latents that are made from two sentences agree as much as people say that the sentences
do? The rank correlation (Spearman) of the cosine with the scores that people gave.

Controls: shuffled, another sentence's latent; encoder, the encoder's own latents.
"""
import csv
import os
from types import SimpleNamespace

import numpy as np
import torch.nn.functional as F

from corpora.readers import lines_of, table_of
from sampling.inputs import pack
from sampling.knobs import LATENT_KNOBS
from sampling.run import BOTH, MAKES, Needs
from tasks.common import Figures, Task, chosen_rows, derangement, encode
from tasks.measures import correlation

COLUMNS = ['sentence1', 'sentence2', 'score']


def prepare(run, knobs):
    """ (sentences, sentences, scores) of the pairs that are chosen. """
    if not run.meta['encoder']:
        raise ValueError(f'{run.out_dir} has latents that were given without their encoder: no sts '
                         'from it')
    if not knobs['sts']:
        raise ValueError('tasks=sts reads --sts=FILE.csv of sentence, sentence, score')
    first, second, scores = read_pairs(knobs['sts'])
    rows = chosen_rows(len(first), knobs['n'], knobs['seed'])
    if len(rows) < 3:
        raise ValueError(f'sts={knobs["sts"]}: a correlation needs 3 pairs, found {len(rows)}')
    if (scores[rows] == scores[rows[0]]).all():
        raise ValueError(f'sts={knobs["sts"]}: all {len(rows)} pairs have the score '
                         f'{scores[rows[0]]:g}: a correlation needs scores that differ')
    return [first[i] for i in rows], [second[i] for i in rows], scores[rows]


def measure(run, ctx):
    first, second, scores = ctx.prepared
    n = len(first)
    sentences = first + second

    # what is too long is cut, and counted
    tokens = pack(run, sentences, cut=True)
    n_cut = sum(len(run.tokenizer.encode(sentence)) >= run.net.L for sentence in sentences)

    # the latents of all 2 n sentences, ours and those of the controls
    z = run.embed(tokens, **ctx.sampling)
    other = derangement(2 * n, ctx.knobs['seed'])
    latents = {'': z, 'shuffled': z[other], 'encoder': encode(run, sentences)}
    figures = Figures(n)
    figures.enter('', {'n_cut_sentences': n_cut})
    for control, some in latents.items():
        z1, z2 = some.flatten(1).chunk(2)
        cosine = F.cosine_similarity(z1, z2)
        figures[control, 'spearman'] = correlation(cosine.numpy(), scores)
    return figures


def read_pairs(path):
    """ (sentences, sentences, scores) of a csv, or of a tsv without quotes: of its three columns,
    or those that its first line calls so. """
    if not os.path.isfile(path):
        raise ValueError(f'sts={path}: no such file')

    # in a .tsv a quotation mark is a character like any other
    quoting = csv.QUOTE_NONE if path.lower().endswith('.tsv') else csv.QUOTE_MINIMAL
    lines = lines_of(path, SimpleNamespace(encoding='utf-8', invalid_bytes='stop'))
    try:
        table, _ = table_of(path, lines, lambda row: len(row) == 3 or {*COLUMNS} <= {*row},
                            quoting=quoting)
        rows = [row for row in table if row]

        # the first line may name the columns, in any order and with others among them
        names = COLUMNS
        if rows and {*COLUMNS} <= {*rows[0]}:
            names, *rows = rows
        first, second, scores = ([row[names.index(name)] for row in rows] for name in COLUMNS)
        scores = np.array(scores, float)
    except (csv.Error, IndexError, ValueError) as error:
        raise ValueError(f'{path}: expected columns {", ".join(COLUMNS)} ({error})') from None

    # nan and inf are no scores
    is_finite = np.isfinite(scores)
    if not is_finite.all():
        raise ValueError(f'{path}: the score of pair {is_finite.argmin() + 1} is no finite number')
    return first, second, scores


TASK = Task(
    Needs(BOTH, (MAKES,)), (*LATENT_KNOBS, 'sts'), measure,
    prepare=prepare, embeds=True, has_own_texts=True)
