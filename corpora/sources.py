"""
Sources: anything that holds documents, as one stream of them.

    counts = Counter()
    for document in documents(Source(input='captions.jsonl.gz', field='caption'), counts):
        document.text
        document.latent        # None, or a function that reads its latent vectors, (N, D) float32
        document.group         # an image with all its captions: not split between train and val

    files, folders, globs     readers.py: text, JSON lines, tables, parquet, FASTA, also as .gz
    input='builtin'           builtin.py: documentation on this machine
    hub_dataset               hub.py: datasets of the hub, by name
    latents_from              latents.py: texts whose latents exist already
    image_size                images.py: images with captions, scikit-learn's digits among them
    import_dir                layouts.py: the layout of earlier systems
"""
import glob
import hashlib
import os
from dataclasses import dataclass

from corpora.latents import with_latents
from corpora.proteins import FASTA
from corpora.readers import KINDS, NOT_TEXT, SURROGATE, Document, cleaned, kind_of, read_file

LATENTS = ('import_dir', 'latents_from', 'image_size')         # where latents may come from


@dataclass(frozen=True)
class Source:
    """ Everything that decides which documents there are: knobs of prepare.py, which explains them,
    and two splits, of a hub dataset and of an earlier layout (train | validation). """
    input: str = ''
    split_on: str = 'line'
    encoding: str = 'utf-8'
    invalid_bytes: str = 'stop'
    field: str = 'text'
    hub_dataset: str = ''
    hub_split: str = 'train'
    hub_revision: str = ''
    import_dir: str = ''
    import_split: str = 'train'
    latents_from: str = ''
    image_size: int = 0
    patch: int = 8
    channels: int = 3
    min_length: int = 0
    max_documents: int = 0
    distinct: bool = False

    def __post_init__(self):
        # the documents come from one place, and so do the latents
        origins = [name for name in ('input', 'hub_dataset', 'import_dir') if getattr(self, name)]
        if len(origins) != 1:
            raise ValueError('documents come from one of input, hub_dataset, import_dir; '
                             f'given: {" and ".join(origins) or "none"}')
        latents = [name for name in LATENTS if getattr(self, name)]
        if len(latents) > 1:
            raise ValueError(f'{" and ".join(latents)} each say where latents come from: '
                             'choose one')
        try:
            ''.encode(self.encoding)
        except LookupError:
            raise ValueError(f'encoding {self.encoding!r}: no encoding of texts that Python knows; '
                             'name one such as utf-8, latin-1, cp1252, utf-16') from None

        # images
        if self.input == 'digits' and (self.image_size, self.channels) != (8, 1):
            raise ValueError('input=digits needs image_size=8, channels=1, '
                             f'found {self.image_size} and {self.channels}')
        if self.image_size % self.patch:
            raise ValueError(f'image_size {self.image_size} must be a multiple of patch '
                             f'{self.patch}')

    @property
    def has_latents(self):
        return any(getattr(self, name) for name in LATENTS)

    @property
    def is_fasta(self):
        if not self.input or self.input == 'builtin' or self.image_size:
            return False
        return any(kind_of(name) in FASTA for name, _ in list_files(self.input))

    @property
    def names(self):
        """ How meta.json names the input. No path of this machine is in it. """
        if self.import_dir or self.image_size or os.path.isdir(self.hub_dataset):
            folder = self.import_dir or self.hub_dataset or self.input
            return [os.path.basename(os.path.abspath(folder))]
        if self.hub_dataset or self.input == 'builtin':
            return [self.hub_dataset or self.input]
        return [name for name, _ in list_files(self.input)]


def walk(folder):
    """ The paths of all files below a folder, by name. Links are followed, and each real folder
    comes once. """
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
        folders[:] = sorted(name for name in folders if name[0] != '.')
        paths += [os.path.join(root, name) for name in files if name[0] != '.']
    return sorted(paths)


def list_files(spec):
    """ [(name, path)] of a comma-separated list. Inside a folder they are sorted by name, so the
    order in which the disk lists them does not matter. A file of several names comes once. """
    # the name of a file may have commas and spaces
    parts = [spec]
    if not os.path.isfile(spec):
        parts = [part.strip() for part in spec.split(',')]

    files = []
    for part in parts:
        if not part:
            continue

        # a folder, or a file or a glob
        if os.path.isdir(part):
            paths = [path for path in walk(part) if kind_of(path) in KINDS]
            start = part
            hint = f'no file ending in {", ".join(KINDS)} or these with .gz'
        else:
            paths = [part] if os.path.exists(part) else sorted(glob.glob(part))
            start = ''
            hint = 'no such file, folder or glob'
        if not paths:
            raise ValueError(f'{part}: {hint}')

        # each real file once, by the first of its names
        real = {}
        for path in paths:
            real.setdefault(os.path.realpath(path), path)
        for path in real.values():
            name = os.path.relpath(path, start) if start else os.path.basename(path)
            files.append((name, path))

    if not files:
        raise ValueError(f'input={spec}: name files, folders or globs, comma-separated, or builtin')
    for name, path in files:
        if SURROGATE.search(name):
            raise ValueError(f'{path!r}: this name is not UTF-8: rename the file')
        if kind_of(name) in NOT_TEXT:
            raise ValueError(f'{path}: cannot read this kind of file; '
                             'convert it to text, .jsonl, .csv or .parquet')
    return files


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
    if source.hub_dataset:
        from corpora.hub import read_hub
        texts = read_hub(source)
    elif source.input == 'builtin':
        from corpora.builtin import builtin_corpus
        texts = builtin_corpus()
    else:
        texts = (text for _, path in list_files(source.input)
                 for text in read_file(path, source, counts))
    if source.latents_from:
        return with_latents(texts, source.latents_from)
    return map(Document, texts)


def text_hash(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')


def documents(source, counts):
    """ The documents of a source, stripped and valid. `counts` gets read, kept and each reason for
    a drop: read = kept + drops. """
    seen = set()
    for doc in read(source, counts):
        text = doc.text
        counts['read'] += 1

        # latents that were imported belong to the text as it stands, with its spaces
        text = text if source.import_dir else text.strip()

        # halves of a character: bytes to be replaced, and JSON's escapes
        text, n_invalid = cleaned(text)
        counts['invalid_utf8'] += bool(n_invalid)

        reason = None
        if not text:
            reason = 'empty'
        elif len(text) < source.min_length:
            reason = 'too_short'
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
