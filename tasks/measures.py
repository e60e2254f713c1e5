"""
What the tasks measure of texts and of latents: how near they are to those they came from, and what
texts from noise are like. Letters: n texts, L text tokens, N latent vectors, D latent dimensions.
"""
import math
import re
import time
from unicodedata import normalize

import numpy as np
import torch
import torch.nn.functional as F

from corpora.words import ALONE, words
from tasks.common import Figure, Figures, open_split, progress_bar

# -----------------------------------------------------------------------------
# Correlations, and how near a text or a latent is to another

def ranks(x):
    """ Ranks, equal values sharing their mean rank. """
    _, which, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[which]


def correlation(x, y):
    """ Spearman's, with the large-sample standard error (1 - r^2) / sqrt(n - 1). There is none
    where all values are the same. """
    if len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return Figure(math.nan)
    r = float(np.corrcoef(ranks(x), ranks(y))[0, 1])
    return Figure(r, (1 - r * r) / math.sqrt(len(x) - 1))


def perplexity_of(nats, count):
    """ exp of the mean: nan of nothing, inf where that has no floating-point number. """
    if not count:
        return math.nan
    return math.exp(nats / count) if nats / count < 700 else math.inf


def spaced(text):
    """ A text, in NFC, with spaces around each character of a script without spaces. """
    return re.sub(ALONE, r' \g<0> ', normalize('NFC', text))


def word_f1(a, b):
    """ F1 between the sets of words; of characters, where neither has a word. A word that is said
    again changes nothing: `length` shows that. """
    # a text may have no word, such as '...'; two texts of nothing are equal
    mine, theirs = {*words(a)}, {*words(b)}
    if not mine | theirs:
        mine, theirs = {*''.join(a.split())}, {*''.join(b.split())}
    if not mine | theirs:
        return 1.0
    return 2 * len(mine & theirs) / (len(mine) + len(theirs))


def retrieval(found, raw, texts):
    """ {metric: per-text values (n,)} of latents found (n, N, D) against the right ones among all n
    of raw, those of n texts. An equal text is as right. Equal similarities are ranked at random:
    all-zero embeddings score as chance does. """
    a = F.normalize(found.flatten(1), dim=1)
    b = F.normalize(raw.flatten(1), dim=1)
    similarity = a @ b.T                                                 # (n, n)

    # the best of the right ones, what is nearer than it, and what is as near
    number_of = {text: i for i, text in enumerate(texts)}
    number = torch.tensor([number_of[text] for text in texts])
    is_right = number[:, None] == number                                 # (n, n)
    best = similarity.masked_fill(~is_right, -torch.inf).amax(1, keepdim=True)
    nearer = ((similarity > best) & ~is_right).sum(1)
    equal = similarity == best
    n_equal = equal.sum(1)
    n_wrong = (equal & ~is_right).sum(1)

    def hit(k):
        # %: not all that are drawn of the equal ones, for the places that are left, are wrong
        all_wrong = torch.ones(len(similarity))
        for i in range(k):
            is_wrong = (n_wrong - i).clamp(min=0) / (n_equal - i).clamp(min=1)
            all_wrong = torch.where(i < k - nearer, all_wrong * is_wrong, all_wrong)
        return 100.0 * (1 - all_wrong).numpy()
    return {'cosine': similarity.diagonal().numpy(),
            'retrieval@1': hit(1),
            'retrieval@10': hit(10)}


def nearest_training_latents(run, folder, raw, block=16384):
    """ The highest cosine of each of raw (n, N, D) with a training latent, and whose it is, (n,)
    each. """
    train = open_split(run, folder, 'train')
    query = F.normalize(raw.flatten(1), dim=1)
    best = torch.full((len(raw),), -torch.inf)
    best_at = torch.zeros(len(raw), dtype=torch.int64)

    # block by block of the training split
    firsts = range(0, len(train), block)
    for i in progress_bar(firsts, desc='nearest training latent', unit='block'):
        rows = np.arange(i, min(i + block, len(train)))
        latents = F.normalize(train.raw_latents(rows).flatten(1), dim=1)
        cosine, at = (query @ latents.T).max(1)
        best_at = torch.where(cosine > best, at + i, best_at)
        best = torch.maximum(cosine, best)
    return best, best_at


def compare(texts, written, raw, embedded):
    """ {metric: per-text values (n,)} of written texts against their sources, and of their
    embeddings, if there are any, against the source latents. `bleu` is sentence BLEU, whose mean
    over texts is reported, corpus_bleu a number: one BLEU of all n-grams. """
    from sacrebleu.metrics import BLEU
    bleu = BLEU(effective_order=True)          # sentence BLEU: a three-word text has no 4-grams

    # in a script without spaces each character counts as a word
    written = [spaced(text) for text in written]
    sources = [spaced(text) for text in texts]
    pairs = list(zip(written, sources))
    n_words = np.array([len(text.split()) for text in written])
    mean_of_sources = np.mean([len(text.split()) for text in sources])
    found = {}
    found['bleu'] = np.array([bleu.sentence_score(w, [s]).score for w, s in pairs])
    found['corpus_bleu'] = BLEU().corpus_score(written, [sources]).score
    found['f1'] = np.array([100 * word_f1(w, s) for w, s in pairs])
    found['exact'] = np.array([100.0 * (w == s) for w, s in pairs])
    found['length'] = 100.0 * n_words / mean_of_sources                  # so its mean is of sums
    if embedded is not None:
        found |= retrieval(embedded, raw, sources)
    return found

# -----------------------------------------------------------------------------
# Texts from noise: what they are like

def real_ids(run, tokens):
    """ The tokens of each text as it is decoded: before its EOS, without PAD. (A weak sampler may
    write PAD and no EOS.) """
    eos, pad = run.tokenizer.eos, run.tokenizer.pad
    found = []
    for row in tokens.tolist():
        if eos in row:
            row = row[:row.index(eos)]
        found.append([i for i in row if i != pad])
    return found


def repeated(items):
    """ How many of its 3-grams a list has had before, %. """
    grams = list(zip(items, items[1:], items[2:]))
    return 100 * (1 - len(set(grams)) / len(grams)) if grams else 0.0


def entropy(ids):
    """ Of the tokens of a text, in nats. """
    _, count = np.unique(ids, return_counts=True)
    p = count / max(1, count.sum())
    return 0.0 - float((p * np.log(p)).sum())


def describe_texts(figures, control, texts, ids, perplexity=None):
    """ Enters of n texts and their token ids: entropy (nats, of a text's own tokens, mean over
    texts), repetition (share of a text's word 3-grams that it has had before), length in tokens;
    perplexity under a scorer. """
    figures.enter(control, {'entropy': [entropy(row) for row in ids],
                            'repetition': [repeated(words(text)) for text in texts],
                            'length': [len(row) for row in ids]})
    if perplexity:
        figures.enter(control, {'gen_ppl': perplexity(texts)})


def describe_samples(run, ctx, sample):
    """ Draws as many samples as there are texts, and describes them and the texts (the control
    `data`).
    sample(SamplingKnobs) -> what it has drawn, the tokens (n, L) first. Returns the Figures, with
    the network calls and milliseconds of a text; the texts; what was drawn. """
    # calls and time are those of our samples alone
    run.net.row_calls = 0
    began = time.perf_counter()
    drawn = sample(ctx.sampling_knobs(guidance=1.0))
    seconds = time.perf_counter() - began
    figures = Figures(ctx.n)
    figures.enter('', {'calls': run.net.row_calls / ctx.n, 'ms': 1000 * seconds / ctx.n})

    # what the texts are like, and what real ones are like
    written = run.decode(drawn[0])
    ctx.shown += [f'-> {text}' for text in written]
    describe_texts(figures, '', written, real_ids(run, drawn[0]), ctx.prepared)
    describe_texts(figures, 'data', ctx.texts, real_ids(run, ctx.tokens), ctx.prepared)
    return figures, written, drawn
