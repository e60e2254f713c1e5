"""
Sources: anything that holds documents, as one stream of them.

    for document in documents(source, Counter()):
        ...
    plan, texts = survey(source, None)                     # rank 0 reads all of them, once
    for split, i, docs in own_shards(plan, source, None, rank, world):
        ...                                                # those of the shards of one rank

`source` has the knobs of prepare.py, and `split`: train, or what the hub or an earlier layout calls
its validation split. What holds the documents, and what brings their latents along:

    input             readers.py: text, JSON lines, tables, parquet, FASTA, SMILES, also as .gz
    input='builtin'   builtin.py: documentation on this machine
    hub_dataset       hub.py: datasets of the hub, by name
    latents_from      latents.py: texts whose latents exist already
    image_size        images.py: images with captions; icons.py: icons and their names
    import_dir        latents.py: the layout of earlier systems

The hash of a document decides whether it is train or val, before it is cut, unless the source says
it. So no document is in both, however it is spelled, and its neighbours do not matter. In the order
of reading, document n of a split goes to shard n // shard_size. The ranks take shards in turn; each
of them reads all documents, which is fast. (Icons are drawn, by each rank: minutes.)
"""
import glob
import hashlib
import heapq
import itertools
import os
import re
from array import array
from collections import Counter
from dataclasses import dataclass
from sys import getsizeof
from unicodedata import normalize

import numpy as np

from base.console import progress_bar, warn, warn_once
from base.files import MOST_MEMORY
from corpora.latents import COLUMN, by_name, read_earlier, with_column, with_latents
from corpora.morgan import Morgan
from corpora.readers import (FASTA, KINDS, NOT_TEXT, Document, count_endings, counted, kind_of,
                             passed_over, read_file, stem_of, walk, walk_folders)
from data import read_meta

SPLITS = ('train', 'val', 'pairs', 'sets')                   # the last two of icons.py alone
# the knobs that bring latents along with the documents. Each but latents_from has a reader of its
# own, which decides what the input is
BRING_LATENTS = ('import_dir', 'latents_from', 'image_size')
FIT_DOCUMENTS = 100_000        # tokenizer and lsa are fitted on at most so many documents of train

SURROGATE = re.compile('[\ud800-\udfff]')                    # half a character
# a character that shows: no white space, mark of direction, filler or control
VISIBLE = re.compile('[^\\s\x01-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f'
                     '\u200b-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0'
                     '\ufff0-\ufffb\U000e0000-\U000e0fff]')


def has_latents(source):
    return any(getattr(source, knob) for knob in BRING_LATENTS)


def has_own_reader(source):
    return has_latents(source) and not source.latents_from


def is_fasta(source):
    if not source.input or source.input == 'builtin' or has_own_reader(source):
        return False
    return any(kind_of(name) in FASTA for name, _ in list_files(source.input))


def is_icons(source):
    """ Whether the input is Iconify's sets, or those icons that come along, and no folder of
    pictures with their list. """
    if come_along(source.input):
        return True
    if not source.image_size or not os.path.isdir(source.input):
        return bool(source.image_size) and source.input.endswith('.json')
    # a folder: not with a list of pictures, which may be many, nor with pictures
    if any(os.path.exists(os.path.join(source.input, f'metadata.{kind}'))
           for kind in ('csv', 'jsonl')):
        return False
    kinds = {kind_of(path) for path in walk(source.input)}
    return '.json' in kinds and not kinds & {'.png', '.jpg', '.jpeg'}


def come_along(spec):
    """ Whether an input means the icons of the sheet: `icons`, which is no file or folder here. """
    return spec == 'icons' and not os.path.exists(spec)


def names_of(source):
    """ How meta.json names the input. No path of this machine is in it. """
    is_of_sheet = come_along(source.input)
    if is_icons(source) and not is_of_sheet and not os.path.isdir(source.input):
        return [name for name, _ in list_files(source.input, ('.json',))]
    if has_own_reader(source) or os.path.isdir(source.hub_dataset):
        folder = source.import_dir or source.hub_dataset or source.input
        return [os.path.basename(os.path.abspath(folder))]
    if source.hub_dataset or source.input == 'builtin':
        return [source.hub_dataset or source.input]
    return [name for name, _ in list_files(source.input)]

# -----------------------------------------------------------------------------
# Files

def matches(pattern):
    """ As glob.glob, `**` any folders, but where links lead in a circle it ends. """
    # the part before the first `**`, and all that stands behind it
    head, *tail = re.split(r'(?:^|(?<=/))\*\*(?:/|$)', pattern, maxsplit=1)
    if not tail:
        return glob.glob(pattern)

    # what stands behind it is looked for in each folder on the way, and may have a `**`, too
    found = []
    for top in glob.glob(head) if head else ['.']:
        for folder, _ in walk_folders(top):
            found += matches(os.path.join(glob.escape(folder), tail[0] or '*'))
    return found


def paths_in(spec):
    """ The paths and globs of a comma-separated list. A comma may belong to a name: parts are
    joined until something is there. """
    def is_there(part):
        return os.path.exists(part) or bool(matches(part))

    if is_there(spec):
        return [spec]
    parts = []
    words = spec.split(',')
    while words:
        # the shortest run of words that is there; where none is, the first word, which list_files
        # then names as missing
        n, part = 1, words[0].strip()
        for k in range(1, len(words) + 1):
            joined = ','.join(words[:k]).strip()
            if is_there(joined):
                n, part = k, joined
                break
        if part:
            parts.append(part)
        words = words[n:]
    return parts


def natural_order(path):
    """ A sort key: 2.npy comes before 10.npy. """
    return [int(part) if part.isdecimal() else part for part in re.split(r'(\d+)', path)]


def list_files(spec, kinds=KINDS, passed=None):
    """ [(name, path)] of a comma-separated list, by name, 2 before 10. Each real file once. Of a
    folder these are the files of certain kinds; the paths of the others are added to the set
    `passed`. """
    found = {}                             # {real path: (name, path)}
    for part in paths_in(spec):
        # a folder, or a file, or a glob of both
        is_there = os.path.exists(part)
        paths = []
        others = []
        for match in [part] if is_there else matches(part):
            if not os.path.isdir(match):
                paths.append(match)
                continue
            for path in walk(match):
                (paths if kind_of(path) in kinds else others).append(path)
        if passed is not None:
            passed.update(others)
        if not paths:
            hint = 'no such file, folder or glob'
            if os.path.isdir(part) or others:
                hint = (f'{passed_over(count_endings(others)) or "no file in it"}; expected one '
                        f'ending in {", ".join(kinds)} or these with .gz')
            raise ValueError(f'{part}: {hint}' + (f' (of {spec})' if part != spec else ''))

        # a file's name is its path below the folder, or below what comes before a `*`
        base = part if os.path.isdir(part) else os.path.dirname(part)
        while not is_there and glob.has_magic(base):
            base = os.path.dirname(base)
        for path in sorted(paths, key=natural_order):
            name = os.path.relpath(path, base or '.')
            found.setdefault(os.path.realpath(path), (name, path))

    if not found:
        raise ValueError(f'input={spec}: name files, folders or globs, comma-separated, or builtin')

    # can each of them be read, and more than once?
    for name, path in found.values():
        if SURROGATE.search(name):
            raise ValueError(f'{path!r}: this name is not UTF-8: rename the file')
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f'{path}: a pipe or a device, which cannot be read twice: write it '
                             'into a file')
        if kind_of(name) in NOT_TEXT and kind_of(name) not in kinds:
            raise ValueError(f'{path}: cannot read this kind of file; '
                             'convert it to text, .jsonl, .csv or .parquet')
    return list(found.values())


def without_copies(files, source, counts):
    """ The files, without those that hold the same texts as another file of the same folder and
    name, as notes.txt.gz next to notes.txt. """
    def texts_of(path):
        texts = (text.strip() for text in read_file(path, source, Counter()))
        return filter(None, texts)

    # each file is compared, text by text, with those of its name that are kept
    kept = []
    by_stem = {}
    for name, path in files:
        twins = by_stem.setdefault(stem_of(path), [])
        for twin in twins:
            pairs = itertools.zip_longest(texts_of(twin), texts_of(path))
            if all(a == b for a, b in pairs):
                counts['copies'] += 1
                warn_once(f'{path} has the texts of {twin}, so it is left out')
                break
        else:
            twins.append(path)
            kept.append((name, path))
    return kept

# -----------------------------------------------------------------------------
# Documents

def read(source, counts):
    """ The documents as they stand in the source. A reader that only some knob needs is imported
    when it is needed. """
    # documents with latents of their own
    if source.import_dir:
        return read_earlier(source)
    if source.image_size:
        from corpora.icons import read_icons
        from corpora.images import read_images
        if is_icons(source):
            return read_icons(icon_files(source.input, counts), source, counts)
        return read_images(source, counts)

    # texts
    files = []
    passed = set()
    if source.hub_dataset:
        from corpora.hub import read_hub
        texts = read_hub(source)
    elif source.input == 'builtin':
        from corpora.builtin import builtin_corpus
        texts = builtin_corpus()
    else:
        files = without_copies(list_files(source.input, passed=passed), source, counts)
        texts = (text for _, path in files for text in read_file(path, source, counts))

    # with latents: in a column of the records
    if source.latents_from.startswith(COLUMN):
        counts.update(count_endings(passed))
        return with_column(files, source.latents_from.removeprefix(COLUMN), source)

    # or in files: files of two folders or globs are paired by their names, lists by their order
    arrays = latent_files(source.latents_from, passed) if source.latents_from else []
    read_too = [path for _, path in files] + arrays          # of a folder that both are in
    counts.update(count_endings(passed.difference(read_too)))
    if not arrays:
        return map(Document, texts)
    is_list = len(paths_in(source.input)) > 1 or len(paths_in(source.latents_from)) > 1
    if min(len(files), len(arrays)) > 1 and not is_list:
        files = [(name, read_file(path, source, counts)) for name, path in files]
        return by_name(files, arrays)
    return with_latents(texts, arrays)


def icon_files(spec, counts):
    """ The .json files of an input of icons; [] for those that come along. """
    if come_along(spec):
        return []
    passed = set()
    paths = [path for _, path in list_files(spec, ('.json',), passed)]
    counts.update(count_endings(passed))
    return paths


def latent_files(spec, passed):
    """ The .npy files of latents_from, in order. ValueError where a part of it is none, nor a
    folder of them. """
    hint = 'expected a .npy file, a glob or a folder of them; save each array with numpy.save'
    try:
        paths = [path for _, path in list_files(spec, ('.npy',), passed)]
    except ValueError as error:
        raise ValueError(f'latents_from={spec}: {hint} ({error})') from None
    for path in paths:
        if not path.lower().endswith('.npy'):
            raise ValueError(f'latents_from={path}: {hint}')
    return paths


def text_hash(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')


def hash_function(source):
    """ hash_of(text): one number for all spellings of a text. An accent may be a character of its
    own or not (Unicode NFC has one form); a protein may be in small letters; and a molecule has
    many SMILES, of which RDKit writes one. """
    encoder = source.encoder
    if source.same_as:
        encoder = (read_meta(source.same_as)['encoder'] or {}).get('id')
    canonical = str
    if source.tokenizer == 'smiles' or encoder == 'morgan':
        try:
            canonical = Morgan().canonical
        except ValueError:                                   # RDKit is not installed
            warn_once('without RDKit (pip install rdkit) two SMILES of one molecule are two texts: '
                      'one may be in train, the other in val')
    elif source.tokenizer == 'esm':
        canonical = str.upper
    return lambda text: text_hash(normalize('NFC', canonical(text)))


def cleaned(text):
    """ (a text with \\n at its line ends and U+FFFD for half a character, how many of these). """
    if '\r' in text:
        text = text.replace('\r\n', '\n').replace('\r', '\n')
    return (text, 0) if text.isascii() else SURROGATE.subn('\ufffd', text)


def documents(source, counts, hashed=False):
    """ The documents of a source, stripped and valid. `counts` gets read, kept and each reason for
    a drop: read = kept + drops. hashed: whether each is to have its hash. """
    hash_of = hash_function(source) if hashed or source.distinct else None
    seen = set()
    for doc in read(source, counts):
        counts['read'] += 1

        # latents that were imported belong to the text as it stands, with its spaces
        text = doc.text
        if not source.import_dir:
            text = text.strip()
            if text and len(text) < len(doc.text) - doc.text.endswith('\n'):
                counts['trimmed'] += text != doc.text.strip('\r\n')

        # halves of a character: bytes to be replaced, and JSON's escapes
        text, n_invalid = cleaned(text)
        counts['invalid_utf8'] += bool(n_invalid)

        # is it dropped?
        reason = number = None
        if not VISIBLE.search(text) or text == r'\N':        # which stands for NULL in a dump
            reason = 'empty'
        elif '\0' in text:
            reason = 'nul'
        elif hash_of:
            number = hash_of(text)
            if source.distinct:
                reason = 'duplicate' if number in seen else None
                seen.add(number)
        if reason:
            counts[reason] += 1
            continue

        counts['kept'] += 1
        yield doc._replace(text=text, hash=number)
        if counts['kept'] == source.max_documents:
            return

# -----------------------------------------------------------------------------
# The first reading: what there is, and which split it goes to

@dataclass
class Plan:
    """ What rank 0 finds in one pass over the documents, and decides; every rank gets it. """
    splits: bytes              # of each document of the input, in the order of reading: i for
                               # SPLITS[i]
    totals: Counter            # documents of each split
    digest: str                # of all documents, in the order of reading
    counts: dict               # {input, val_input: a Counter of documents read, kept and dropped}
    # prepare.py adds
    finished: dict = None      # what is there already, as shards.check_same reads it
    files: dict = None         # {tokenizer.json, encoder.npz, ...: its entry in meta.json}
    lsa: dict = None           # the record of the encoder that was fitted
    max_tokens: int = 0


class Tally:
    """ What was read so far: how many documents of each split, and a digest of all texts. """

    def __init__(self, shard_size):
        self.shard_size = shard_size
        self.documents = Counter()                           # of each split
        self.bytes = Counter()                               # of the texts of its newest shard
        self.digest = hashlib.sha256()

    def add(self, split, text):
        """ The number of the shard that the text goes to. ValueError where the texts of a shard,
        which are in memory together, are too large for that. """
        self.digest.update(f'{len(text)}:{text}'.encode())
        shard, n = divmod(self.documents[split], self.shard_size)
        self.documents[split] += 1
        self.bytes[split] = getsizeof(text) + (self.bytes[split] if n else 0)
        if self.bytes[split] > MOST_MEMORY and n:
            raise ValueError(f'{n + 1:,} documents of one shard take {self.bytes[split]:,} bytes, '
                             f'more than the {MOST_MEMORY:,} that are held in memory: '
                             f'--shard_size={(n + 1) // 2}, or shorter documents')
        return shard


def survey(source, val):
    """ A Plan for the documents of `source`, of which a part becomes val, unless `val` is a source
    of its own; and the texts of train that tokenizer and lsa are fitted on, a list. """
    # read all. A document whose hash is below the limit goes to val. Where this leaves a split
    # empty, the limit moves just enough to give it one document, and all are read again
    limit = 0 if val else int(source.val_fraction * 2**64)
    counts, tally, sample, hashes, splits = read_once(source, limit)
    has_both = tally.documents['train'] and tally.documents['val']
    if len(hashes) and not val and not has_both:
        fitting = min(max(limit, int(hashes.min()) + 1), int(hashes.max()))
        if fitting != limit:
            limit = fitting
            counts, tally, sample, hashes, splits = read_once(source, limit)
    counts_of = dict(input=counts)
    if val:
        # which of its documents are among those of train, all of them?
        counts_of['val_input'] = of_val = Counter()
        hashes_of_val = array('Q')
        for doc in documents(val, of_val, hashed=True):
            tally.add('val', doc.text)
            hashes_of_val.append(doc.hash)
        # (of pictures the captions may well be equal)
        if not source.image_size:
            known = np.isin(np.array(hashes_of_val, np.uint64), hashes)
            of_val['known'] = int(known.sum())

    # neither split may be empty
    for one, found in zip((source, val), counts_of.values()):
        if not found['kept']:
            dropped = ', '.join(counted(found)) or 'nothing'
            raise ValueError(f'{", ".join(names_of(one))}: no documents ({dropped} among '
                             f'{found["read"]} read)')
    name = ', '.join(names_of(source))
    totals = tally.documents
    if not totals['train'] or not totals['val']:
        hint = 'are all the same text' if counts['kept'] > 1 else 'cannot be split'
        advice = 'give --val_input=, or a finer --split_on=, as line'
        # by hashes that differ both splits would have a document: the source itself says the split
        if hashes.min() < hashes.max():
            hint = 'have no name of two words that can be held out'
            advice = 'give more sets'
        raise ValueError(f'{name}: {counts["kept"]} document(s) {hint}, so there is none for val; '
                         f'{advice}')

    # what a person may not have meant
    if val and of_val['known']:
        warn(f'{of_val["known"]:,} of {totals["val"]:,} documents of val_input are in the input, '
             'too')
    if totals['val'] < 20:
        warn(f'val has {totals["val"]} documents, too few to measure anything: give more with '
             '--val_fraction= or --val_input=')
    for knob, found in counts_of.items():
        if passed_over(found):
            warn(f'{knob}: {passed_over(found)}')
    if counts['nucleotides'] > counts['read'] / 2:
        warn(f'{name}: {counts["nucleotides"]} of {counts["read"]} sequences have no letters but '
             'ACGTUN: nucleotides, and they are read as residues')
    plan = Plan(bytes(splits), totals, tally.digest.hexdigest(), counts_of)
    return plan, [text for _, text in sorted(sample, reverse=True)]


def read_once(source, limit):
    """ Reads all documents once. Returns

    counts    what was read, kept and dropped
    tally     their Tally
    sample    texts of train to fit on, [(-hash, text)]: those with the smallest hashes. So it is
              uniform, the same in any order of reading, and fits into memory
    hashes    (n,) uint64, of each document: the hash of its group, or where it has none of its
              text. A document whose hash is below the limit is val, unless the source says it
    splits    its split, i for SPLITS[i]
    """
    counts = Counter()
    tally = Tally(source.shard_size)
    sample = []                                              # a heap
    n_bytes = 0                                              # that its texts take
    highest_of_sample = 2**64
    hashes = array('Q')                                      # 8 bytes a document
    splits = bytearray()
    with progress_bar(desc='reading', unit=' documents') as bar:
        for doc in documents(source, counts, hashed=True):
            h = text_hash(doc.group) if doc.group else doc.hash
            hashes.append(h)
            split = doc.split or ('val' if h < limit else 'train')
            splits.append(SPLITS.index(split))
            tally.add(split, doc.text)
            if split == 'train' and h < highest_of_sample:
                heapq.heappush(sample, (-h, doc.text))
                n_bytes += getsizeof(doc.text)
            # too many: the one with the highest hash leaves, and from now on none with a higher
            # hash enters
            while len(sample) > FIT_DOCUMENTS or n_bytes > MOST_MEMORY and len(sample) > 1:
                minus_h, text = heapq.heappop(sample)
                highest_of_sample = -minus_h
                n_bytes -= getsizeof(text)
            bar.update()
    return counts, tally, sample, np.array(hashes, np.uint64), splits

# -----------------------------------------------------------------------------
# The second reading: documents in shards

def with_splits(plan, source, val):
    """ (split, document), in the order of reading, those of val_input last. """
    # if the input has grown meanwhile, the digest will differ and the run stops; so the extra ones
    # may be anything
    splits = itertools.chain(plan.splits, itertools.repeat(0))
    for doc, i in zip(documents(source, Counter()), splits):
        yield SPLITS[i], doc
    if val:
        for doc in documents(val, Counter()):
            yield 'val', doc


def own_shards(plan, source, val, rank, world):
    """ (split, number of the shard, its documents) of the shards of one rank, as each fills up.
    ValueError at the end, where the documents are not those of the survey. """
    tally = Tally(source.shard_size)
    waiting = {split: [] for split in SPLITS}
    for split, doc in with_splits(plan, source, val):
        shard = tally.add(split, doc.text)
        if shard % world != rank:
            continue
        waiting[split].append(doc)
        if len(waiting[split]) == source.shard_size:
            yield split, shard, waiting[split]
            waiting[split] = []

    # the last ones are not full
    for split, docs in waiting.items():
        if docs:
            yield split, tally.documents[split] // source.shard_size, docs
    if tally.digest.hexdigest() != plan.digest:
        raise ValueError('the documents are not those that were read first: the input has changed '
                         'meanwhile; run again')
