"""
LSA, an encoder for machines without any model: TF-IDF weights, projected by a truncated SVD.

    lsa = fit_lsa(texts, dims=128)
    latents = lsa(['A dog runs on the beach.'])            # (n, 1, D) float32

    weight[word] = (1 + log count[word]) * idf[word]       of a text, then divided by its L2 norm
    idf[word]    = 1 + log((1 + n) / (1 + df[word]))       df: how many of the n texts have the word
    z            = L2(weight P)                            P (W, D): the leading right singular
                                                           vectors of the training texts' weights

prepare.py fits it on the training texts and stores it with the dataset, as encoder.npz.
Letters: n texts, W words, D latent dimensions.
"""
import hashlib
import os
import re

import numpy as np
import torch
import torch.nn.functional as F

from encoders import NO_KNOWN_WORD, check_texts, no_progress
from runs.files import read_arrays


def split_words(text):
    return re.findall(r'\w+', text.lower())


def tfidf(texts, row, idf):
    """
    The weights of the known words, text after text, as embedding_bag reads them:
    index    the row of each word, as the dict `row` has it
    weight   of each word; the weights of one text have unit L2 norm
    offsets  where each text begins, and the end of the last one
    """
    index = []
    counts = []
    offsets = [0]
    for text in texts:
        count_of_row = {}
        for word in split_words(text):
            if word in row:
                count_of_row[row[word]] = count_of_row.get(row[word], 0) + 1
        index += count_of_row
        counts += count_of_row.values()
        offsets.append(len(index))
    index = torch.tensor(index, dtype=torch.long)
    offsets = torch.tensor(offsets)
    weight = (1 + torch.tensor(counts, dtype=torch.float32).log()) * idf[index]

    # divided by the norm of the text that each belongs to
    text = torch.repeat_interleave(torch.arange(len(texts)), offsets.diff())
    norm = torch.zeros(len(texts)).index_add_(0, text, weight ** 2).sqrt()
    return index, weight / norm[text], offsets


class LSA:
    """ Called on a list of texts: (n, 1, D) float32. A text without a known word gives zeros. """

    def __init__(self, words, idf, projection, record):
        self.words = words
        self.idf = idf                                                   # (W,)
        self.projection = projection                                     # (W, D)
        self.record = record
        self.row = {word: i for i, word in enumerate(words)}
        self.truncated = 0                                               # it reads all of a text

    def __call__(self, texts, progress=no_progress):
        check_texts(texts)
        index, weight, offsets = tfidf(texts, self.row, self.idf)
        z = F.embedding_bag(index, self.projection, offsets, per_sample_weights=weight, mode='sum',
                            include_last_offset=True)                    # (n, D)
        progress(len(texts))
        return F.normalize(z, dim=-1)[:, None]

    def remark(self, text):
        """ What keeps it from embedding this text as it stands, or ''. """
        is_known = any(word in self.row for word in split_words(text))
        return '' if is_known else NO_KNOWN_WORD

    def save(self, path):
        words = np.frombuffer('\n'.join(self.words).encode(), np.uint8)
        np.savez(path, words=words, idf=self.idf.numpy(), projection=self.projection.numpy())


def fit_lsa(texts, dims, seed=0, max_words=20_000):
    """ Fitted on a list of texts. The same texts, dims, seed and threads give the same bits. """
    # the vocabulary: words of at least two texts, those of most texts first
    df = {}
    for text in texts:
        for word in set(split_words(text)):
            df[word] = df.get(word, 0) + 1
    repeated = sorted(word for word in df if df[word] > 1)
    words = sorted(repeated, key=lambda word: -df[word])[:max_words]
    if dims > min(len(texts), len(words)):
        raise ValueError(f'lsa: {dims} dimensions from {len(texts)} documents with {len(words)} '
                         'repeated words; lower --encoder_dims to '
                         f'{max(1, min(len(texts), len(words)) // 2)} or so, or give more text')

    # the weights of all texts as one sparse matrix A (n, W)
    df_of_words = torch.tensor([df[word] for word in words], dtype=torch.float32)
    idf = torch.log((1 + len(texts)) / (1 + df_of_words)) + 1
    index, weight, offsets = tfidf(texts, {word: i for i, word in enumerate(words)}, idf)
    text = torch.repeat_interleave(torch.arange(len(texts)), offsets.diff())
    A = torch.sparse_coo_tensor(torch.stack([text, index]), weight, (len(texts), len(words)),
                                check_invariants=True).coalesce()

    # A ~ U S P'; torch's own generator is left as it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _, _, projection = torch.svd_lowrank(A, q=min(dims + 16, *A.shape), niter=4)   # (W, q)
    projection = projection[:, :dims].contiguous()

    # an SVD leaves the signs open: the largest entry of each column becomes positive
    largest = projection.abs().argmax(0, keepdim=True)
    projection = projection * projection.gather(0, largest).sign()
    record = dict(id='lsa', revision=lsa_hash(words, idf, projection), pooling='sum', prefix='',
                  normalize=True, dimension=dims, max_length=None, dtype='float32', language=None)
    return LSA(words, idf, projection, record)


def lsa_hash(words, idf, projection):
    content = '\n'.join(words).encode() + idf.numpy().tobytes() + projection.numpy().tobytes()
    return 'sha256:' + hashlib.sha256(content).hexdigest()


def load_lsa(folder, record):
    """ The LSA that is stored with a dataset or a run, as its record in meta.json describes it. """
    path = os.path.join(folder or '', 'encoder.npz')
    if not os.path.isfile(path):
        raise ValueError(f'{path}: missing; lsa is fitted by prepare.py and lies in the dataset '
                         'folder')
    arrays = read_arrays(path, {'words': ('uint8', (None,)), 'idf': ('float32', (None,)),
                                'projection': ('float32', (None, record['dimension']))})
    words = arrays['words'].tobytes().decode(errors='replace').split('\n')
    idf = torch.from_numpy(arrays['idf'])
    projection = torch.from_numpy(arrays['projection'])

    if not len(words) == len(idf) == len(projection):
        raise ValueError(f'{path}: {len(words)} words, {len(idf)} weights and '
                         f'{len(projection)} rows, expected as many of each')
    if lsa_hash(words, idf, projection) != record['revision']:
        raise ValueError(f'{path}: revision {lsa_hash(words, idf, projection)}, '
                         f'expected {record["revision"]}; '
                         'this is not the encoder that the data was made with')
    return LSA(words, idf, projection, record)
