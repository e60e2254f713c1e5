"""
Sources: anything that holds documents, as one stream of them.

    for document in documents(source, Counter()):
        ...

`source` has the knobs of prepare.py, and `split`: train, or what the hub or an earlier layout calls
its validation split. What holds the documents, and what brings their latents along:

    input             readers.py: text, JSON lines, tables, parquet, FASTA, also as .gz
    input='builtin'   builtin.py: documentation on this machine
    hub_dataset       hub.py: datasets of the hub, by name
    latents_from      latents.py: texts whose latents exist already
    image_size        images.py: images with captions, scikit-learn's digits among them
    import_dir        layouts.py: the layout of earlier systems
"""
import glob
import hashlib
import os

from corpora.latents import (COLUMN, by_name, latent_files, natural_order, with_column,
                             with_latents)
from corpora.readers import (FASTA, KINDS, NOT_TEXT, SURROGATE, Document, cleaned, kind_of,
                             read_file)


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


def walk(folder):
    """ The paths of all files below a folder. Links are followed, each real folder once. """
    # by default os.walk passes over a folder that it may not read
    def stop(error):
        raise error

    seen = set()
    paths = []
    for root, folders, files in os.walk(folder, onerror=stop, followlinks=True):
        if os.path.realpath(root) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        folders[:] = [name for name in sorted(folders) if name[0] != '.']
        paths += [os.path.join(root, name) for name in files if name[0] != '.']
    return paths


def list_files(spec):
    """ [(name, path)] of a comma-separated list, by name, 2 before 10. Each real file once. """
    # the name of a file may have commas and spaces
    parts = [spec]
    if not os.path.isfile(spec):
        parts = [part.strip() for part in spec.split(',')]

    found = {}                             # {real path: (name, path)}
    for part in filter(None, parts):
        # a folder, or a file or a glob
        is_folder = os.path.isdir(part)
        if is_folder:
            paths = [path for path in walk(part) if kind_of(path) in KINDS]
            hint = f'no file ending in {", ".join(KINDS)} or these with .gz'
        else:
            paths = [part] if os.path.exists(part) else glob.glob(part)
            hint = 'no such file, folder or glob'
        if not paths:
            raise ValueError(f'{part}: {hint}')
        for path in sorted(paths, key=natural_order):
            name = os.path.relpath(path, part) if is_folder else os.path.basename(path)
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


def read(source, counts):
    """ Documents as they stand in the source. What a knob asks for is imported here. """
    # documents with latents of their own
    if source.import_dir:
        from corpora.layouts import read_earlier
        return read_earlier(source)
    if source.image_size:
        from corpora.images import read_digits, read_images
        return read_digits(source) if source.input == 'digits' else read_images(source)

    # texts
    files = []
    if source.hub_dataset:
        from corpora.hub import read_hub
        texts = read_hub(source)
    elif source.input == 'builtin':
        from corpora.builtin import builtin_corpus
        texts = builtin_corpus()
    else:
        files = list_files(source.input)
        texts = (text for _, path in files for text in read_file(path, source, counts))
    if not source.latents_from:
        return map(Document, texts)

    # with latents: in a column of the records
    if source.latents_from.startswith(COLUMN):
        return with_column(files, source.latents_from.removeprefix(COLUMN), source)

    # or in files: files of two folders or globs are paired by their names, lists by their order
    paths = latent_files(source.latents_from)
    is_list = ',' in source.input + source.latents_from
    if min(len(files), len(paths)) > 1 and not is_list:
        files = [(name, read_file(path, source, counts)) for name, path in files]
        return by_name(files, paths)
    return with_latents(texts, paths)


def text_hash(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')


def documents(source, counts):
    """ The documents of a source, stripped and valid. `counts` gets read, kept and each reason for
    a drop: read = kept + drops. """
    seen = set()
    for doc in read(source, counts):
        counts['read'] += 1

        # latents that were imported belong to the text as it stands, with its spaces
        text = doc.text if source.import_dir else doc.text.strip()

        # halves of a character: bytes to be replaced, and JSON's escapes
        text, n_invalid = cleaned(text)
        counts['invalid_utf8'] += bool(n_invalid)

        reason = None
        if not text:
            reason = 'empty'
        elif '\0' in text:
            reason = 'nul'
        elif source.distinct:
            h = text_hash(text)
            reason = 'duplicate' if h in seen else None
            seen.add(h)
        if reason:
            counts[reason] += 1
            continue

        counts['kept'] += 1
        yield doc._replace(text=text)
        if counts['kept'] == source.max_documents:
            return
