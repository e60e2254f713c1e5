"""
What prepare.py fits on the training texts: a byte-level BPE (tokenizers.py), and LSA (lsa.py).
"""
import signal
import sys
import threading

import torch

from base.console import progress_bar
from corpora.lsa import LSA, lsa_hash, split_terms, tfidf
from corpora.tokenizers import short_parts, words_of_bytes
from encoders import DEFAULTS

# the idf of a term of two or more words is multiplied by it; 1, as for a word, was worse (LOG.md)
NGRAM_WEIGHT = .5


def train_bpe(texts, vocab_size):
    """ The tokenizer.json of a byte-level BPE of at most vocab_size ids, EOS and PAD included. """
    from tokenizers import Tokenizer as HFTokenizer, models, pre_tokenizers, trainers
    if vocab_size < 258:
        raise ValueError(f'vocab_size {vocab_size} is too small: 256 bytes, EOS and PAD need 258')
    bpe = HFTokenizer(models.BPE())
    bpe.pre_tokenizer = words_of_bytes()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 2, min_frequency=2,
                                  show_progress=sys.stderr.isatty(),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    # the library does not listen to Ctrl-C: meanwhile it ends the process at once, unless the
    # process ignores it or this is another thread, which may not say so
    handler = signal.getsignal(signal.SIGINT)
    listens = callable(handler) and threading.current_thread() is threading.main_thread()
    if listens:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        bar = progress_bar(texts, desc='tokenizer', unit=' texts')
        bpe.train_from_iterator((part for text in bar for part in short_parts(text)), trainer)
    finally:
        if listens:
            signal.signal(signal.SIGINT, handler)
    return bpe.to_str()


def fit_lsa(texts, dims, seed=0, ngrams=1, max_terms=20_000):
    """ Fitted on a list of texts. The same texts, dims, seed and threads give the same bits.
    At most max_terms words are known, and as many terms of two or more words. """
    # terms of at least two texts, those of most texts first
    df = {}
    for text in progress_bar(texts, desc='lsa', unit=' texts'):
        for term in set(split_terms(text, ngrams)):
            df[term] = df.get(term, 0) + 1
    repeated = sorted((term for term in df if df[term] > 1), key=lambda term: (-df[term], term))
    words = [term for term in repeated if ' ' not in term][:max_terms]
    terms = words + [term for term in repeated if ' ' in term][:max_terms]
    if dims > min(len(texts), len(terms)):
        raise ValueError(f'lsa: {dims} dimensions from {len(texts)} documents with {len(terms)} '
                         'repeated words; lower --encoder_dims to '
                         f'{max(1, min(len(texts), len(terms)) // 2)} or so, or give more text')

    # the weights of all texts as one sparse matrix A (n, W)
    df_of_terms = torch.tensor([df[term] for term in terms], dtype=torch.float32)
    idf = torch.log((1 + len(texts)) / (1 + df_of_terms)) + 1
    idf[len(words):] *= NGRAM_WEIGHT
    index, weight, offsets = tfidf(texts, {term: i for i, term in enumerate(terms)}, idf, ngrams)
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
    record = DEFAULTS | dict(id='lsa', pooling='sum', normalize=True, dimension=dims)
    lsa = LSA(terms, idf, projection, record)
    record['revision'] = lsa_hash(lsa.arrays())
    return lsa
