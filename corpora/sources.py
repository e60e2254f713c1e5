"""
Sources: anything that holds documents, as one stream of them.

    counts = Counter()
    for document in documents(Source(input='captions.jsonl.gz', field='caption'), counts):
        document.text
        document.latent        # None, or a function that reads its latent vectors, (N, D) float32
        document.group         # an image with all its captions: not split between train and val

    files, folders, globs     readers.py: text, .jsonl, .csv, .tsv, .parquet, .fasta, also as .gz
    input='builtin'           builtin.py: documentation on this machine
    hub_dataset               hub.py: datasets of the hub, by name
    latents_from              latents.py: texts whose latents exist already
    image_size                images.py: images with captions, scikit-learn's digits among them
    import_dir                layouts.py: the layout of earlier systems

Every document that is read is kept or is a counted drop: read = kept + drops. A text longer than
document_limit is never held in memory; it is such a drop.
"""
import glob
import hashlib
import os
import re
from dataclasses import dataclass, replace

from corpora.latents import check_latent_names, with_latents
from corpora.proteins import FASTA
from corpora.readers import KINDS, NOT_TEXT, Document, check_encoding, kind_of, read_file

SPLIT_ON = ('line', 'paragraph', 'file')
INVALID_BYTES = ('stop', 'replace')


@dataclass(frozen=True)
class Source:
    """ Everything that decides which documents there are. """
    input: str = ''                    # files, folders, globs, comma-separated; 'builtin':
                                       # documentation on this machine; 'digits': scikit-learn's
                                       # 1,797 images of 8 x 8 pixels, with image_size=8, channels=1
    split_on: str = 'line'             # line | paragraph | file: what a document is in a text file
    encoding: str = 'utf-8'            # of text files: any of Python's codecs
    invalid_bytes: str = 'stop'        # stop | replace: bytes that are not of the encoding;
                                       # replaced by U+FFFD, and counted
    field: str = 'text'                # of .jsonl, hub datasets; column of .csv, .tsv, .parquet
    hub_dataset: str = ''              # instead of input: a name in HUB, or a hub id
    hub_split: str = 'train'
    hub_revision: str = ''             # a commit
    import_dir: str = ''               # instead of input: a folder in the earlier layout
    import_split: str = 'train'        # train | validation
    latents_from: str = ''             # .npy files, or folders of them: row i belongs to document i
    image_size: int = 0                # pixels a side; not 0: input is digits, or a folder of
                                       # images with metadata.csv or metadata.jsonl
    patch: int = 8                     # pixels a side of a patch; each is one latent vector
    channels: int = 3                  # 1: grey
    min_length: int = 0                # characters (residues)
    max_length: int = 0                # likewise; 0: any
    document_limit: int = 64_000_000   # characters: a longer one is a counted drop, never in memory
    distinct: bool = False             # drop a text that came before

    def __post_init__(self):
        # the documents come from one place, and so do the latents
        origins = [name for name in ('input', 'hub_dataset', 'import_dir') if getattr(self, name)]
        if len(origins) != 1:
            raise ValueError('documents come from one of input, hub_dataset, import_dir; '
                             f'given: {" and ".join(origins) or "none"}')
        knobs = ('import_dir', 'latents_from', 'image_size')
        latents = [name for name in knobs if getattr(self, name)]
        if len(latents) > 1:
            raise ValueError(f'{" and ".join(latents)} each say where latents come from: '
                             'choose one')

        # images
        if self.input == 'digits' and (self.image_size, self.channels) != (8, 1):
            raise ValueError('input=digits needs image_size=8, channels=1, '
                             f'found {self.image_size} and {self.channels}')
        if self.image_size and self.input != 'digits' and not os.path.isdir(self.input):
            raise ValueError('image_size is set: input must be a folder of images, '
                             f'found {origins[0]}={getattr(self, origins[0])}')

        # text files and arrays
        if self.split_on not in SPLIT_ON:
            raise ValueError(f'split_on {self.split_on!r}: one of {", ".join(SPLIT_ON)}')
        if self.invalid_bytes not in INVALID_BYTES:
            raise ValueError(f'invalid_bytes {self.invalid_bytes!r}: '
                             f'one of {", ".join(INVALID_BYTES)}')
        check_encoding(self.encoding)
        check_latent_names(self.latents_from)

        is_multiple = self.patch >= 1 and self.image_size >= 0 and self.image_size % self.patch == 0
        if not is_multiple or self.channels not in (1, 3):
            raise ValueError(f'image_size {self.image_size} must be a multiple of patch '
                             f'{self.patch}, and channels {self.channels} 1 or 3')

    @property
    def has_latents(self):
        return bool(self.import_dir or self.latents_from or self.image_size)

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


def list_files(spec):
    """ [(name, path)] of a comma-separated list. Inside a folder they are sorted by name, so the
    order in which the disk lists them does not matter. """
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
            names = sorted(glob.glob('**', root_dir=part, recursive=True))
            found = [(name, os.path.join(part, name)) for name in names if kind_of(name) in KINDS]
            hint = f'no file ending in {", ".join(KINDS)} or these with .gz'
        else:
            paths = [part] if os.path.exists(part) else sorted(glob.glob(part))
            found = [(os.path.basename(path), path) for path in paths]
            hint = 'no such file, folder or glob'
        if not found:
            raise ValueError(f'{part}: {hint}')
        files += found

    for name, path in files:
        if kind_of(name) in NOT_TEXT:
            raise ValueError(f'{path}: cannot read this kind of file; '
                             'convert it to text, .jsonl, .csv or .parquet')
    return files


def read_files(source, counts):
    """ The texts of all files of source.input. """
    for _, path in list_files(source.input):
        yield from read_file(path, source, counts)


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
        texts = read_files(source, counts)
    if source.latents_from:
        return with_latents(texts, source.latents_from)
    return map(Document, texts)


def parts(source, limit=0):
    """ A source for each file, where the documents of a file do not depend on the files before it;
    else the source alone. Their documents, one part after the other, are those of the source. """
    is_of_files = source.input not in ('', 'builtin') and not source.has_latents
    if not is_of_files or source.distinct or limit:
        return [source]
    return [replace(source, input=path) for _, path in list_files(source.input)]


def text_hash(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')


def why_drop(text, source):
    """ The reason to drop a text, or None. """
    if not text:
        return 'empty'
    if len(text) < source.min_length:
        return 'too_short'
    if source.max_length and len(text) > source.max_length:
        return 'too_long'
    return None


def documents(source, counts, limit=0):
    """ The documents of a source, stripped and valid; limit: at most so many. `counts` gets read,
    kept and each reason for a drop: read = kept + drops. """
    seen = set()
    for text, latent, group in read(source, counts):
        counts['read'] += 1
        if text is None or len(text) > source.document_limit:
            counts['over_document_limit'] += 1
            continue

        # latents that were imported belong to the text as it stands, with its spaces
        if not source.import_dir:
            text = text.strip()

        # halves of a character: bytes to be replaced, and JSON's escapes
        text, n_invalid = re.subn('[\ud800-\udfff]', '\ufffd', text)
        counts['invalid_utf8'] += bool(n_invalid)

        reason = why_drop(text, source)
        if source.distinct and not reason:
            h = text_hash(text)
            if h in seen:
                reason = 'duplicate'
            seen.add(h)
        if reason:
            counts[reason] += 1
            continue

        counts['kept'] += 1
        yield Document(text, latent, group)
        if counts['kept'] == limit:
            return
