"""
Which split and which shard a document goes to.

    plan, texts = survey(source, None, val_fraction=.01)         # rank 0 reads all of it, once
    for split, i, docs in own_shards(plan, shard_size, source, None):
        ...                                                      # of this rank

The hash of a document decides whether it is train or val, before it is cut, so no document is in
both, however it is spelled (sources.hash_function), and its neighbours do not matter. In the order
of reading, document n of a split goes to shard n // shard_size. The ranks take shards in turn; each
reads all documents, which is fast.
"""
import hashlib
import heapq
import itertools
from array import array
from collections import Counter
from dataclasses import dataclass
from sys import getsizeof

import numpy as np

from base.console import progress_bar, warn
from base.distributed import rank, world
from base.files import MOST_MEMORY
from corpora.layouts import counted
from corpora.readers import passed_over
from corpora.sources import documents, hash_function, names_of, text_hash

FIT_DOCUMENTS = 100_000        # tokenizer and lsa are fitted on at most so many documents of train


@dataclass
class Plan:
    """ What rank 0 finds in one pass over the documents, and decides; every rank gets it. """
    is_val: np.ndarray         # a bit for each document of the input, in the order of reading
    totals: Counter            # documents of train and val
    digest: str                # of all documents, in the order of reading
    counts: dict               # {input, val_input: a Counter of documents read, kept and dropped}
    # prepare.py adds
    finished: dict = None      # what is there already, as shards.check_same reads it
    files: dict = None         # {tokenizer.json, encoder.npz, ...: its entry in meta.json}
    lsa: dict = None           # the record of the encoder that was fitted
    max_tokens: int = 0


def survey(source, val, val_fraction):
    """ A Plan for the documents of `source`, of which a part becomes val, unless `val` is a source
    of its own; and the texts of train that tokenizer and lsa are fitted on, a list. """
    # read all. A document whose hash is below the limit goes to val. Where this leaves a split
    # empty, the limit moves just enough to give it one document, and all are read again
    limit = 0 if val else int(val_fraction * 2**64)
    counts, sizes, digest, sample, hashes = read_once(source, limit)
    if len(hashes) and not val:
        fitting = min(max(limit, int(hashes.min()) + 1), int(hashes.max()))
        if fitting != limit:
            limit = fitting
            counts, sizes, digest, sample, hashes = read_once(source, limit)
    is_val = hashes < np.uint64(limit)
    counts_of = dict(input=counts)
    name = ', '.join(names_of(source))
    if val:
        # which of its documents are among those of train, all of them?
        counts_of['val_input'] = Counter()
        hash_of = hash_function(val)
        of_val = array('Q')
        for doc in noted(documents(val, counts_of['val_input'], hash_of), digest):
            of_val.append(hash_of(doc.text))
            sizes.add('val', doc)
        counts_of['val_input']['known'] = int(np.isin(np.array(of_val, np.uint64), hashes).sum())

    # neither split may be empty
    totals = sizes.documents
    for one, found in zip((source, val), counts_of.values()):
        if not found['kept']:
            dropped = ', '.join(counted(found)) or 'nothing'
            raise ValueError(f'{", ".join(names_of(one))}: no documents ({dropped} among '
                             f'{found["read"]} read)')
    if not totals['train'] or not totals['val']:
        hint = 'are all the same text' if counts['kept'] > 1 else 'cannot be split'
        raise ValueError(f'{name}: {counts["kept"]} document(s) {hint}, so there is none for val; '
                         'give --val_input=, or a finer --split_on=, as line')

    # what a person may not have meant
    if val and counts_of['val_input']['known']:
        warn(f'{counts_of["val_input"]["known"]:,} of {totals["val"]:,} documents of val_input are '
             'in the input, too')
    if totals['val'] < 20:
        warn(f'val has {totals["val"]} documents, too few to measure anything: give more with '
             '--val_fraction= or --val_input=')
    for knob, found in counts_of.items():
        if passed_over(found):
            warn(f'{knob}: {passed_over(found)}')
    if counts['nucleotides'] > counts['read'] / 2:
        warn(f'{name}: {counts["nucleotides"]} of {counts["read"]} sequences have no letters but '
             'ACGTUN: nucleotides, and they are read as residues')
    plan = Plan(np.packbits(is_val), totals, digest.hexdigest(), counts_of)
    return plan, [text for _, text in sorted(sample, reverse=True)]


def noted(docs, digest):
    """ Passes the documents on, and adds each to a digest. """
    for doc in docs:
        digest.update(f'{len(doc.text)}:{doc.text}'.encode())
        yield doc


class Sizes:
    """ How many documents a split has, and how many bytes the texts of its newest shard take. """

    def __init__(self, shard_size):
        self.shard_size = shard_size
        self.documents = Counter()
        self.bytes = Counter()

    def add(self, split, doc):
        """ ValueError where the documents of a shard, which are in memory together, are too large
        for that. """
        n = self.documents[split] % self.shard_size
        self.documents[split] += 1
        self.bytes[split] = getsizeof(doc.text) + (self.bytes[split] if n else 0)
        if self.bytes[split] > MOST_MEMORY and n:
            raise ValueError(f'{n + 1:,} documents of one shard take {self.bytes[split]:,} bytes, '
                             f'more than the {MOST_MEMORY:,} that are held in memory: '
                             f'--shard_size={(n + 1) // 2}, or shorter documents')


def read_once(source, limit):
    """ Reads all documents once. Returns
    counts    what was read, kept and dropped
    sizes     the Sizes of the splits
    digest    of all documents, in the order of reading
    sample    texts of train to fit on, [(-hash, text)]: those with the smallest hashes. So it is
              uniform, the same in any order of reading, and fits into memory
    hashes    (n,) uint64, of each document: the hash of its group, or where it has none of its
              text. A document whose hash is below the limit is val
    """
    counts = Counter()
    sizes = Sizes(source.shard_size)
    digest = hashlib.sha256()
    sample = []                                              # a heap
    n_bytes = 0                                              # that its texts take
    highest_of_sample = 2**64
    hashes = array('Q')                                      # 8 bytes a document
    hash_of = hash_function(source)
    with progress_bar(desc='reading', unit=' documents') as bar:
        for doc in noted(documents(source, counts, hash_of), digest):
            h = text_hash(doc.group) if doc.group else hash_of(doc.text)
            hashes.append(h)
            sizes.add('val' if h < limit else 'train', doc)
            if limit <= h < highest_of_sample:
                heapq.heappush(sample, (-h, doc.text))
                n_bytes += getsizeof(doc.text)
            # too many: the one with the highest hash leaves, and from now on none with a higher
            # hash enters
            while len(sample) > FIT_DOCUMENTS or n_bytes > MOST_MEMORY and len(sample) > 1:
                minus_h, text = heapq.heappop(sample)
                highest_of_sample = -minus_h
                n_bytes -= getsizeof(text)
            bar.update()
    return counts, sizes, digest, sample, np.array(hashes, np.uint64)


def own_shards(plan, shard_size, source, val):
    """ (split, number of the shard, its documents) of the shards of this rank, as each fills up.
    ValueError at the end, where the documents are not those of the survey. """
    # all documents in the order of reading, those of val_input last. If there are more of them now,
    # the digest is another one, too
    digest = hashlib.sha256()
    is_val = itertools.chain(np.unpackbits(plan.is_val), itertools.repeat(0))
    stream = (('val' if bit else 'train', doc)
              for doc, bit in zip(noted(documents(source, Counter()), digest), is_val))
    if val:
        more = noted(documents(val, Counter()), digest)
        stream = itertools.chain(stream, (('val', doc) for doc in more))

    seen = Counter()
    waiting = dict(train=[], val=[])
    for split, doc in stream:
        shard = seen[split] // shard_size
        seen[split] += 1
        if shard % world() != rank():
            continue
        waiting[split].append(doc)
        if len(waiting[split]) == shard_size:
            yield split, shard, waiting[split]
            waiting[split] = []

    # the last ones are not full
    for split, docs in waiting.items():
        if docs:
            yield split, seen[split] // shard_size, docs
    if digest.hexdigest() != plan.digest:
        raise ValueError('the documents are not those that were read first: the input has changed '
                         'meanwhile; run again')
