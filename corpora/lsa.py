"""
LSA, an encoder for machines without any model: TF-IDF weights, projected by a truncated SVD.

    lsa = fit_lsa(texts, dims=128)                         # prepare.py writes encoder.npz
    lsa = load_lsa('data/quickstart', record)
    latents = lsa(['A dog runs on the beach.'])            # (n, 1, D) float32

    weight[term] = (1 + log count[term]) * idf[term]       of a text, then divided by its L2 norm
    idf[term]    = 1 + log((1 + n) / (1 + df[term]))       df: how many of the n texts have the term
    z            = L2(weight P)                            P (W, D): the leading right singular
                                                           vectors of the training texts' weights

A term is a word. With ngrams=2, a pair of neighbouring words is a term too; ^ stands before the
first word, $ after the last. So z depends on the order of the words. The idf of a pair is
multiplied by NGRAM_WEIGHT. A text without a known pair is embedded by its words alone.
Letters: n texts, W terms, D latent dimensions.
"""
import hashlib
import os
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F

from base.files import read_arrays
from corpora.words import words

# the idf of a term of two or more words is multiplied by it; 1, as for a word, was worse (LOG.md)
NGRAM_WEIGHT = .5
NO_KNOWN_WORD = 'has no word that the encoder knows, so its embedding says nothing'


def split_terms(text, ngrams):
    """ The words of a text, then the terms of 2 to `ngrams` words: 'a dog', 'dog runs', ... """
    terms = words(text)
    marked = ['^', *terms, '$']                            # no word is ^ or $
    for n in range(2, ngrams + 1):
        for i in range(len(marked) - n + 1):
            terms.append(' '.join(marked[i:i + n]))
    return terms


def tfidf(texts, row, idf, ngrams):
    """
    The weights of the known terms, text after text, as embedding_bag reads them:
    index    the row of each term, as the dict `row` has it
    weight   of each term; the weights of one text have unit L2 norm
    offsets  where each text begins, and the end of the last one
    """
    # how often each known term occurs in each text
    index, counts, offsets = [], [], [0]
    for text in texts:
        count_of_row = Counter(row[term] for term in split_terms(text, ngrams) if term in row)
        index += count_of_row
        counts += count_of_row.values()
        offsets.append(len(index))
    index = torch.tensor(index, dtype=torch.long)
    offsets = torch.tensor(offsets)

    # its weight, before the norm
    weight = (1 + torch.tensor(counts, dtype=torch.float32).log()) * idf[index]

    # divided by the norm of the text that each belongs to
    text = torch.repeat_interleave(torch.arange(len(texts)), offsets.diff())
    norm = torch.zeros(len(texts)).index_add_(0, text, weight ** 2).sqrt()
    return index, weight / norm[text], offsets


class LSA:
    """ The encoder: terms, their idf and their projection.

    Called on a list of texts: (n, 1, D) float32. A text without a known term gives zeros. The
    dtype is always float32, and there is nothing to batch: all texts are one sparse product. """

    def __init__(self, terms, idf, projection, record):
        self.terms = terms
        self.idf = idf                                                   # (W,)
        self.projection = projection                                     # (W, D)
        self.record = record
        self.row = {term: i for i, term in enumerate(terms)}
        self.ngrams = 1 + max(term.count(' ') for term in terms)
        self.truncated = 0                                               # it reads all of a text

    def __call__(self, texts, progress=lambda n: None):
        index, weight, offsets = tfidf(texts, self.row, self.idf, self.ngrams)
        z = F.embedding_bag(index, self.projection, offsets, per_sample_weights=weight, mode='sum',
                            include_last_offset=True)                    # (n, D)
        progress(len(texts))
        return F.normalize(z, dim=-1)[:, None]

    def remark(self, text):
        """ What keeps it from embedding this text as it stands, or ''. """
        # by its words alone: a pair of known words that is new is no loss worth a remark
        found = words(text)
        unknown = [word for word in found if word not in self.row]
        if len(unknown) == len(found):
            return NO_KNOWN_WORD
        if not unknown:
            return ''
        return (f'has {len(unknown)} of {len(found)} words that the encoder does not know and '
                f'leaves out ({", ".join(dict.fromkeys(unknown))})')

    def arrays(self):
        """ {name: array}, all that encoder.npz holds. """
        terms = np.frombuffer('\n'.join(self.terms).encode(), np.uint8)
        return dict(words=terms, idf=self.idf.numpy(), projection=self.projection.numpy())


def lsa_hash(arrays):
    content = b''.join(array.tobytes() for array in arrays.values())
    return 'sha256:' + hashlib.sha256(content).hexdigest()


def load_lsa(folder, record):
    """ The LSA that is stored with a dataset or a run, as its record in meta.json describes it. """
    path = os.path.join(folder or '', 'encoder.npz')
    arrays = read_arrays(path)
    revision = lsa_hash(arrays)
    if revision != record['revision']:
        raise ValueError(f'{path}: revision {revision}, expected {record["revision"]}; '
                         'this is not the encoder that the data was made with')
    terms = arrays['words'].tobytes().decode().split('\n')
    return LSA(terms, torch.from_numpy(arrays['idf']), torch.from_numpy(arrays['projection']),
               record)


def fit_lsa(texts, dims, seed=0, ngrams=1, max_terms=20_000):
    """ An LSA of `dims` dimensions, fitted on a list of texts. ValueError where there are fewer
    texts or repeated words than dimensions.

    The same texts, dims, seed and threads give the same bits. At most max_terms words are known,
    and as many terms of two or more words. """
    # terms of at least two texts, those of most texts first
    df = Counter()
    for text in texts:
        df.update(set(split_terms(text, ngrams)))
    repeated = sorted((term for term in df if df[term] > 1), key=lambda term: (-df[term], term))
    single = [term for term in repeated if ' ' not in term][:max_terms]
    longer = [term for term in repeated if ' ' in term][:max_terms]
    terms = single + longer
    if dims > min(len(texts), len(terms)):
        raise ValueError(f'lsa: {dims} dimensions from {len(texts)} documents with {len(terms)} '
                         'repeated words; lower --encoder_dims to '
                         f'{max(1, min(len(texts), len(terms)) // 2)} or so, or give more text')

    # the weights of all texts as one sparse matrix A (n, W). A pair of words is rarer than its
    # words, so its idf would drown them: it counts less
    df_of_terms = torch.tensor([df[term] for term in terms], dtype=torch.float32)
    idf = torch.log((1 + len(texts)) / (1 + df_of_terms)) + 1
    idf[len(single):] *= NGRAM_WEIGHT
    row = {term: i for i, term in enumerate(terms)}
    index, weight, offsets = tfidf(texts, row, idf, ngrams)
    text = torch.repeat_interleave(torch.arange(len(texts)), offsets.diff())
    with torch.sparse.check_sparse_tensor_invariants():
        A = torch.sparse_coo_tensor(torch.stack([text, index]), weight,
                                    (len(texts), len(terms))).coalesce()

    # A ~ U S P'; torch's own generator is left as it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _, _, projection = torch.svd_lowrank(A, q=min(dims + 16, *A.shape), niter=4)   # (W, q)
    projection = projection[:, :dims].contiguous()

    # an SVD leaves the signs open: the largest entry of each column becomes positive
    largest = projection.abs().argmax(0, keepdim=True)
    projection = projection * projection.gather(0, largest).sign()

    # how meta.json describes it; its revision is a digest of what was fitted
    record = dict(id='lsa', revision=None, pooling='sum', prefix='', normalize=True,
                  dimension=dims, max_length=None, dtype='float32', language=None)
    lsa = LSA(terms, idf, projection, record)
    record['revision'] = lsa_hash(lsa.arrays())
    return lsa
