"""
Sources: anything that holds documents, as one stream of them.

    for document in documents(source, Counter()):
        ...

`source` has the knobs of prepare.py, and `split`: train, or what the hub or an earlier layout calls
its validation split. What holds the documents, and what brings their latents along:

    input             readers.py: text, JSON lines, tables, parquet, FASTA, SMILES, also as .gz
    input='builtin'   builtin.py: documentation on this machine
    hub_dataset       hub.py: datasets of the hub, by name
    latents_from      latents.py: texts whose latents exist already
    image_size        images.py: images with captions, scikit-learn's digits among them
    import_dir        layouts.py: the layout of earlier systems
"""
import functools
import glob
import hashlib
import itertools
import os
import re
from collections import Counter
from unicodedata import normalize

from base.console import warn_once
from corpora.latents import COLUMN, by_name, with_column, with_latents
from corpora.morgan import Morgan
from corpora.readers import (FASTA, KINDS, NOT_TEXT, SURROGATE, VISIBLE, Document, cleaned,
                             count_endings, kind_of, passed_over, read_file, stem_of, walk,
                             walk_folders)
from data import read_meta


def has_latents(source):
    return bool(source.import_dir or source.latents_from or source.image_size)


def is_fasta(source):
    if not source.input or source.input == 'builtin' or source.image_size:
        return False
    return any(kind_of(name) in FASTA for name, _ in list_files(source.input))


def names_of(source):
    """ How meta.json names the input. No path of this machine is in it. """
    if source.import_dir or source.image_size or os.path.isdir(source.hub_dataset):
        folder = source.import_dir or source.hub_dataset or source.input
        return [os.path.basename(os.path.abspath(folder))]
    if source.hub_dataset or source.input == 'builtin':
        return [source.hub_dataset or source.input]
    return [name for name, _ in list_files(source.input)]


# -----------------------------------------------------------------------------
# Files

def matches(pattern):
    """ As glob.glob, `**` any folders, but where links lead in a circle it ends. """
    head, *tail = re.split(r'(?:^|(?<=/))\*\*(?:/|$)', pattern, maxsplit=1)
    if not tail:
        return glob.glob(pattern)
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
        joined = (','.join(words[:n]).strip() for n in range(1, len(words) + 1))
        n, part = next(((n, part) for n, part in enumerate(joined, 1) if is_there(part)),
                       (1, words[0].strip()))
        parts += [part] if part else []
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
            inside = walk(match) if os.path.isdir(match) else []
            others += [path for path in inside if kind_of(path) not in kinds]
            paths += [path for path in inside if kind_of(path) in kinds]
            paths += [] if os.path.isdir(match) else [match]
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
    for name, path in found.values():
        if SURROGATE.search(name):
            raise ValueError(f'{path!r}: this name is not UTF-8: rename the file')
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f'{path}: a pipe or a device, which cannot be read twice: write it '
                             'into a file')
        if kind_of(name) in NOT_TEXT:
            raise ValueError(f'{path}: cannot read this kind of file; '
                             'convert it to text, .jsonl, .csv or .parquet')
    return list(found.values())


def without_copies(files, source, counts):
    """ The files, without those that hold the same texts as another file of the same folder and
    name, as notes.txt.gz next to notes.txt. """
    def texts_of(path):
        texts = (text.strip() for text in read_file(path, source, Counter()))
        return filter(None, texts)

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
        from corpora.layouts import read_earlier
        return read_earlier(source)
    if source.image_size:
        from corpora.images import read_digits, read_images
        return read_digits(source) if source.input == 'digits' else read_images(source, counts)

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
    if source.tokenizer == 'smiles' or encoder == 'morgan':
        try:
            canonical = Morgan().canonical
        except ValueError:                                   # RDKit is not installed
            canonical = str
            warn_once('without RDKit (pip install rdkit) two SMILES of one molecule are two texts: '
                      'one may be in train, the other in val')
    elif source.tokenizer == 'esm':
        canonical = str.upper
    else:
        canonical = str

    # read_once asks for the same text right after `documents` has: it is hashed once
    @functools.lru_cache(1)
    def hash_of(text):
        return text_hash(normalize('NFC', canonical(text)))
    return hash_of


def documents(source, counts, hash_of=None):
    """ The documents of a source, stripped and valid. `counts` gets read, kept and each reason for
    a drop: read = kept + drops. hash_of: that of hash_function, where the caller has it, too. """
    seen = set()
    if source.distinct and not hash_of:
        hash_of = hash_function(source)
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

        reason = None
        if not VISIBLE.search(text) or text == r'\N':        # which stands for NULL in a dump
            reason = 'empty'
        elif '\0' in text:
            reason = 'nul'
        elif source.distinct:
            h = hash_of(text)
            reason = 'duplicate' if h in seen else None
            seen.add(h)
        if reason:
            counts[reason] += 1
            continue

        counts['kept'] += 1
        yield doc._replace(text=text)
        if counts['kept'] == source.max_documents:
            return
