""" Sources: whatever holds documents, as one stream of them.

    counts = Counter()
    for document in documents(Source(input='captions.jsonl.gz', field='caption'), counts):
        document.text, document.latent              # latent: None, or a function that reads this document's own, (N, D) float32
    document.group                              # what must not be split between train and val: an image with all its captions

Files (.txt, .jsonl, .csv, .tsv, .parquet, .fasta; all but parquet also as .gz), folders and globs of them; hub datasets by name;
the interpreter's own documentation; images with captions, scikit-learn's digits among them; texts whose latents exist already, also
in the earlier layout of texts/, latents/ and train_data.json. Every document read is a document kept or a counted drop; what cannot
be read stops with its place. Of a document longer than document_limit no reader holds more than that: it is None, a counted drop.
"""
import ast
import codecs
import csv
import glob
import gzip
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import re
import reprlib
import sysconfig
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from data import RESIDUES
from encoders import reach_hub
from files import read_array


@dataclass(frozen=True)
class Source:
    """ All that decides which documents there are. """
    input: str = ''                    # files, folders, globs, comma-separated; 'builtin': the interpreter's own documentation;
                                       # 'digits': scikit-learn's 1,797 images of 8 x 8 pixels, with image_size=8, channels=1
    split_on: str = 'line'             # line | paragraph | file: what a document is in a text file
    encoding: str = 'utf-8'            # of text files: any of Python's codecs
    invalid_bytes: str = 'stop'        # stop | replace: bytes that are not of the encoding; replaced by U+FFFD, and counted
    field: str = 'text'                # of .jsonl, columns of .csv, .tsv, .parquet and of a hub dataset
    hub_dataset: str = ''              # instead of input: a name in HUB, or a hub id
    hub_split: str = 'train'
    hub_revision: str = ''             # a commit
    import_dir: str = ''               # instead of input: a folder in the earlier layout
    import_split: str = 'train'        # train | validation
    latents_from: str = ''             # .npy files, or folders of them: row i belongs to the i-th document
    image_size: int = 0                # not 0: input is digits, or a folder of images with metadata.csv or metadata.jsonl; pixels a side
    patch: int = 8                     # pixels a side of a patch, each is one latent vector
    channels: int = 3                  # 1: grey
    min_length: int = 0                # characters (residues)
    max_length: int = 0                # likewise; 0: any
    document_limit: int = 64_000_000   # characters: what has more is a counted drop, never held in memory
    distinct: bool = False             # drop a text that came before

    def __post_init__(self):
        origins = [name for name in ('input', 'hub_dataset', 'import_dir') if getattr(self, name)]
        if len(origins) != 1:
            raise ValueError(f'documents come from one of input, hub_dataset, import_dir; given: {" and ".join(origins) or "none"}')
        latents = [name for name in ('import_dir', 'latents_from', 'image_size') if getattr(self, name)]
        if len(latents) > 1:
            raise ValueError(f'{" and ".join(latents)} each say where latents come from: choose one')
        if self.input == 'digits' and (self.image_size, self.channels) != (8, 1):
            raise ValueError(f'input=digits needs image_size=8, channels=1, found {self.image_size} and {self.channels}')
        if self.image_size and self.input != 'digits' and not os.path.isdir(self.input):
            raise ValueError(f'image_size is set: input must be a folder of images, found {origins[0]}={getattr(self, origins[0])}')
        if self.split_on not in ('line', 'paragraph', 'file'):
            raise ValueError(f'split_on {self.split_on!r}: one of line, paragraph, file')
        if self.invalid_bytes not in ('stop', 'replace'):
            raise ValueError(f'invalid_bytes {self.invalid_bytes!r}: one of stop, replace')
        check_encoding(self.encoding)
        check_latent_names(self.latents_from)
        if self.patch < 1 or self.image_size < 0 or self.image_size % self.patch or self.channels not in (1, 3):
            raise ValueError(f'image_size {self.image_size} must be a multiple of patch {self.patch}, and channels {self.channels} 1 or 3')

    @property
    def has_latents(self):
        return bool(self.import_dir or self.latents_from or self.image_size)

    @property
    def is_fasta(self):
        return bool(self.input) and self.input != 'builtin' and not self.image_size and any(
            kind_of(name) in FASTA for name, _ in list_files(self.input))

    @property
    def names(self):
        """ How meta.json names the input: no path of this machine. """
        if self.import_dir or self.image_size or os.path.isdir(self.hub_dataset):
            return [os.path.basename(os.path.abspath(self.import_dir or self.hub_dataset or self.input))]
        return [self.hub_dataset or self.input] if self.hub_dataset or self.input == 'builtin' else [n for n, _ in list_files(self.input)]


def check_encoding(encoding):
    """ ValueError unless a TextIOWrapper takes it. """
    try:
        io.TextIOWrapper(io.BytesIO(b'x'), encoding, 'replace').read()
    except (LookupError, ValueError):
        raise ValueError(f'encoding {encoding!r}: no encoding of texts that Python knows; name one such as utf-8, latin-1, cp1252, '
                         'utf-16') from None


def check_latent_names(spec):
    """ ValueError unless each part of latents_from is a folder or the name of a .npy file. """
    for part in (p.strip() for p in spec.split(',')):
        if spec and not os.path.isdir(part) and not part.endswith('.npy'):
            how = 'it may hold several arrays: save the one' if part.endswith('.npz') else 'save them'
            raise ValueError(f'latents_from={part}: expected a .npy file or a folder of them; {how} with numpy.save')


class Document(NamedTuple):
    text: str                          # None: longer than document_limit
    latent: object = None
    group: str = ''


FASTA = ('.fasta', '.fa', '.faa', '.fas')
KINDS = ('.txt', '.jsonl', '.csv', '.tsv', '.parquet', *FASTA)    # taken from a folder; a text file named outright may end otherwise
NOT_TEXT = ('.arrow', '.json', '.zip', '.tar', '.bz2', '.xz', '.zst', '.npy', '.npz', '.bin', '.pt', '.safetensors', '.pdf', '.docx',
            '.png', '.jpg')
HUB = {'openwebtext':  dict(path='Skylion007/openwebtext'),
       'wikitext-103': dict(path='Salesforce/wikitext', name='wikitext-103-raw-v1', val='validation'),
       'lm1b':         dict(path='dvruette/lm1b', val='test'),
       'fineweb-edu':  dict(path='HuggingFaceFW/fineweb-edu', name='sample-10BT')}


def documents(source, counts, limit=0):
    """ The documents of a source, stripped and valid. `counts` gets read, kept and each reason for a drop: read = kept + drops. """
    seen = set()
    for text, latent, group in read(source, counts):
        counts['read'] += 1
        if text is None or len(text) > source.document_limit:
            counts['over_document_limit'] += 1
            continue
        text = text if source.import_dir else text.strip()   # imported latents are of the text as it stands
        text, invalid = re.subn('[\ud800-\udfff]', '\ufffd', text)  # bytes to be replaced, and JSON's escapes of half a character
        counts['invalid_utf8'] += bool(invalid)              # replaced and kept
        reason = 'empty' if not text else 'too_short' if len(text) < source.min_length else \
            'too_long' if source.max_length and len(text) > source.max_length else None
        if source.distinct and not reason:
            h = text_hash(text)
            reason = 'duplicate' if h in seen else None
            seen.add(h)
        if reason:
            counts[reason] += 1
            continue
        counts['kept'] += 1
        yield Document(text, latent, group)
        if counts['kept'] == limit:
            return


DROPS = ('empty', 'too_short', 'too_long', 'over_document_limit', 'duplicate')


def text_hash(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')


def read(source, counts):
    """ Documents as they stand in the source. """
    if source.import_dir:
        return read_earlier(source)
    if source.image_size:
        return read_digits(source) if source.input == 'digits' else read_images(source)
    if source.hub_dataset:
        texts = read_hub(source)
    elif source.input == 'builtin':
        texts = builtin_corpus()
    else:
        texts = itertools.chain.from_iterable(read_file(path, source, counts) for _, path in list_files(source.input))
    return with_latents(texts, source.latents_from) if source.latents_from else (Document(text) for text in texts)


shown = reprlib.Repr()                                       # of a value in an error: short, however deep or long it is
shown.maxlevel, shown.maxdict, shown.maxstring = 2, 8, 60


def as_text(value, field, where):
    """ A record's text; one without is an empty document. """
    if value is None or isinstance(value, str):
        return value or ''
    raise ValueError(f'{where}: no text in field {field!r}, found {shown.repr(value)}; choose with --field=')


def inside(folder, path, where):
    """ A path that a file names, which must lie in the folder. """
    root = os.path.realpath(folder)
    full = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([root, full]) != root:
        raise ValueError(f'{where}: {path} lies outside of {folder}')
    return full

# -----------------------------------------------------------------------------
# Files

def list_files(spec):
    """ [(name, path)] of a comma-separated list; inside a folder sorted by name, so the directory's order plays no part. """
    files = []
    parts = [spec] if os.path.isfile(spec) else spec.split(',')   # a file's name may have commas
    for part in (p if p == spec else p.strip() for p in parts if p.strip()):
        if os.path.isdir(part):
            names = sorted(glob.glob('**', root_dir=part, recursive=True))
            found = [(n, os.path.join(part, n)) for n in names if kind_of(n) in KINDS]
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
            raise ValueError(f'{path}: cannot read this kind of file; convert it to text, .jsonl, .csv or .parquet')
    return files


def kind_of(name):
    """ '.csv' of a.CSV.gz. """
    return os.path.splitext(name.lower().removesuffix('.gz'))[1]


def read_file(path, source, counts):
    """ The texts of one file. """
    kind = kind_of(path)
    if kind == '.parquet':
        yield from read_parquet(path, source)
        return
    if kind in ('.csv', '.tsv'):
        for row, where in read_table(path, source, source.field):
            yield row and as_text(row[source.field], source.field, where)
        return
    with open_text(path, source) as f:
        if kind == '.jsonl':
            for line, is_whole in f.lines():
                where = f'{path}, line {f.line}'
                yield None if not is_whole else '' if not line.strip() else json_text(read_json(line, where, source.field), source.field, where)
        elif kind in FASTA:
            yield from read_fasta(f, counts)
        elif source.split_on == 'file':
            yield f.whole()
        elif source.split_on == 'paragraph':
            yield from read_paragraphs(f)
        else:
            for line, is_whole in f.lines():
                yield line if is_whole else None


@contextmanager
def open_text(path, source, newline='\n', skip_bom=True):
    """ A TextFile. What is wrong with the file as a whole is a ValueError that names it. """
    opened = gzip.open(path, 'rb') if path.lower().endswith('.gz') else open(path, 'rb')
    is_utf8 = codecs.lookup(source.encoding).name == 'utf-8'
    encoding = 'utf-8-sig' if is_utf8 and skip_bom else source.encoding
    try:
        with opened, io.TextIOWrapper(opened, encoding, 'surrogateescape', newline) as f:
            if is_utf8 and opened.peek(2)[:2] in (b'\xff\xfe', b'\xfe\xff'):
                raise ValueError(f'{path}: UTF-16, expected UTF-8: convert it; prepare.py reads it with --encoding=utf-16')
            yield TextFile(f, path, source)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f'{path}: broken gzip file ({error}); get it again') from None


class TextFile:
    """ A text file, read in pieces of bounded length. Line ends are those of `newline` when it was opened, so that other
    characters of this kind (U+2028, form feed, ...) are text. """

    def __init__(self, f, path, source):
        self.f, self.path, self.source = f, path, source
        self.line, self.is_new_line = 0, True                # the number of the line that the last piece is of

    def piece(self, most):
        """ The next `most` characters, or less: up to the line's end. '' at the file's end. """
        self.line += self.is_new_line
        try:
            piece = self.f.readline(most)
        except UnicodeError as error:                        # most are read as lone surrogates, and found by check_bytes
            raise ValueError(f'{self.path}, at line {self.line} or soon after: {error}; name the encoding with --encoding=') from None
        self.is_new_line = piece.endswith(('\n', '\r'))
        if self.source.invalid_bytes == 'stop' and not piece.isascii():
            self.check_bytes(piece)
        return piece

    def check_bytes(self, piece):
        if found := re.search('[\udc80-\udcff]', piece):
            raise ValueError(f'{self.path}, line {self.line}: byte 0x{ord(found[0]) - 0xDC00:02X} is no {self.source.encoding}; '
                             'name the encoding, such as --encoding=latin-1, or count and replace: --invalid_bytes=replace')

    def lines(self):
        """ (line, whether it is whole): of a line longer than document_limit only the beginning. """
        most = self.source.document_limit + 1                # with the line's end
        while line := self.piece(most):
            is_whole = len(line) < most or self.is_new_line
            yield line, is_whole
            while not is_whole and not self.is_new_line and self.piece(2**16):
                pass

    def whole(self):
        """ All of it, or None if that is longer than document_limit. """
        parts, room = [], self.source.document_limit
        while piece := self.piece(room + 1):
            parts.append(piece)
            room -= len(piece)
            if room < 0:
                return None
        return ''.join(parts)


def read_paragraphs(f):
    """ What stands between blank lines. """
    limit, parts, size = f.source.document_limit, [], 0
    for line, is_whole in itertools.chain(f.lines(), [('', True)]):
        if line.strip() or not is_whole:
            size += len(line)
            if size <= limit:
                parts.append(line)
        elif size:
            yield ''.join(parts) if size <= limit else None
            parts, size = [], 0


class TableLines:
    """ The lines of a table, for csv. A row may have several. Of one longer than document_limit csv is given only what decides
    where it ends: quotes that are not in pairs, and the characters beside a quote or an end. """

    DECIDES = re.compile(r'''^[^"\r\n]|[^"\r\n]?"[^"\r\n]?|[^"\r\n]$''')

    def __init__(self, f):
        self.f, self.limit = f, f.source.document_limit
        self.begin_row()

    def begin_row(self):
        self.length, self.given = 0, 0                       # characters of the row: read, and given to csv

    @property
    def is_over(self):
        return self.length > self.limit

    def __iter__(self):
        return self

    def __next__(self):
        parts = []
        while piece := self.f.piece(2**16):
            self.length += len(piece)
            if self.is_over:
                piece = piece.replace('""', '')
                text = piece.rstrip('\r\n')
                piece = ''.join(self.DECIDES.findall(piece)) if '"' in piece else text[:1] + text[1:][-1:]
            parts.append(piece)
            self.given += len(piece)
            if self.given > 2 * self.limit:
                raise ValueError(f'{self.f.path}, line {self.f.line}: no end of a row of {self.length:,} characters; is it a table?')
            if self.f.is_new_line:
                break
        if not parts:
            raise StopIteration
        return ''.join(parts) if self.given else 'x'         # csv would pass over an empty row


def read_table(path, source, *columns):
    """ (row, where) of a .csv or .tsv, which must have these columns: a dict, or None if it is longer than document_limit. In a
    .tsv a quote is a character like any other. """
    csv.field_size_limit(2**31 - 1)
    is_tsv = kind_of(path) == '.tsv'
    form = dict(delimiter='\t', quoting=csv.QUOTE_NONE) if is_tsv else dict(strict=True)
    with open_text(path, source, newline='') as f:
        lines = TableLines(f)
        rows = csv.DictReader(lines, **form)
        try:
            check_columns(path, rows.fieldnames or [], columns)
            lines.begin_row()
            for row in rows:
                where = f'{path}, line {f.line}'
                if None in row and not lines.is_over:        # a comma in a text that is not quoted
                    raise ValueError(f'{where}: {len(row[None])} more fields than the {len(rows.fieldnames)} columns')
                yield None if lines.is_over else row, where
                lines.begin_row()
        except csv.Error as error:
            raise ValueError(f'{path}, line {f.line}: broken table ({error})') from None


def check_columns(path, found, columns):
    for column in columns:
        if column not in found:
            raise ValueError(f'{path}: no column {column!r}, found {shown.repr(found)}; choose with --field=')
        if found.count(column) > 1:
            raise ValueError(f'{path}: {found.count(column)} columns are called {column!r}; rename all but one')


def read_json(text, where, *fields):
    """ A value of JSON. Of a record none of the fields may come twice: which one counts, nobody could tell. """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{where}: no JSON ({error})') from None

    # a closer look, which takes longer, only where a field may come twice: a name can be escaped
    is_escaped = '\\u' in text or '\\/' in text if fields else False
    for field in fields:
        if is_escaped or text.count(f'"{field}"') > 1:
            if names_of_record(text).count(field) > 1:
                raise ValueError(f'{where}: field {field!r} comes twice; keep one')
    return value


def names_of_record(text):
    """ The names in an object of JSON, each as often as it comes; not those of objects in it. """
    objects = []
    record = json.loads(text, object_pairs_hook=lambda pairs: objects.append(pairs) or {})
    return [name for name, _ in objects[-1]] if isinstance(record, dict) else []   # the outermost ends last


def json_text(record, field, where):
    """ The text of a record's field. """
    if not isinstance(record, dict) or field not in record:
        raise ValueError(f'{where}: no text in field {field!r}, found {shown.repr(record)}; choose with --field=')
    return as_text(record[field], field, where)


def read_parquet(path, source):
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f'{path}: to read parquet: pip install datasets') from None
    field = source.field
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            kinds = {column.name: str(column.type) for column in schema}
            if schema.names.count(field) > 1:
                check_columns(path, schema.names, [field])
            if kinds.get(field) not in ('string', 'large_string'):
                raise ValueError(f'{path}: no column {field!r} of text, found {kinds}; choose with --field=')
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(parquet_rows(file, group, field), row_groups=[group], columns=[field]):
                    yield from parquet_texts(batch.column(0), source.document_limit)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f'{path}: broken parquet file ({error})') from None


def parquet_rows(file, group, field):
    """ How many rows of a row group to read at once: 1,024, fewer where the mean text is long. """
    rows = file.metadata.row_group(group)
    columns = [rows.column(i) for i in range(rows.num_columns)]
    size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == field)
    return max(1, min(1024, 2**26 * rows.num_rows // max(size, 1)))


def parquet_texts(column, limit):
    """ The texts of an Arrow array. One of more bytes than `limit` characters can have is None, and never becomes a str. """
    import pyarrow.compute
    longest = pyarrow.compute.max(pyarrow.compute.binary_length(column)).as_py() or 0
    if longest <= 4 * limit:
        return (text or '' for text in column.to_pylist())
    return (None if value.is_valid and value.as_buffer().size > 4 * limit else value.as_py() or '' for value in column)


def read_fasta(f, counts):
    """ Sequences in capital letters. What the alphabet of ESM has no letter for becomes X and is counted; so is an empty record. """
    unknown = re.compile(f'[^{re.escape(RESIDUES)}]')
    parts, room = None, 0
    for line, _ in itertools.chain(f.lines(), [('>', True)]):
        if line.startswith('>'):
            if parts is not None and room >= 0:
                sequence, n = unknown.subn('X', ''.join(parts).upper().removesuffix('*'))
                counts['unknown_residues'] += n
                yield sequence
            elif parts is not None:
                yield None
            parts, room = [], f.source.document_limit
        elif parts is not None:
            room -= len(line)
            if room >= 0:
                parts.append(''.join(line.split()))
        elif line.strip():
            raise ValueError(f'{f.path}: no FASTA, its first line is {line.strip()[:40]!r}, expected ">name"')


def read_hub(source):
    """ Texts of a dataset on the hub, streamed: nothing is stored but what is read. """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f'hub_dataset={source.hub_dataset}: pip install datasets') from None
    row = HUB.get(source.hub_dataset, dict(path=source.hub_dataset))
    trouble = '' if os.path.isdir(row['path']) else reach_hub()
    try:
        for record in load_dataset(row['path'], row.get('name'), split=source.hub_split, streaming=True,
                                   revision=source.hub_revision or None):
            if source.field not in record:
                raise ValueError(f'no text in field {source.field!r}, found {list(record)}; choose with --field=')
            yield as_text(record[source.field], source.field, 'a record')
    except Exception as error:                               # a dozen kinds, all of which mean: not there, or not there any more
        reason = f'{trouble}{"; " * bool(trouble)}{type(error).__name__}: {(str(error).splitlines() or [""])[0][:200]}'
        raise ValueError(f'hub_dataset={source.hub_dataset}: cannot be read ({reason})') from None


def hub_commit(name):
    """ The commit that a hub dataset is at now. """
    from huggingface_hub import HfApi
    path = HUB.get(name, dict(path=name))['path']
    trouble = reach_hub()
    try:
        return HfApi().dataset_info(path).sha
    except Exception as error:
        raise ValueError(f'hub_dataset={name}: the hub did not give {path} ({trouble or type(error).__name__}); '
                         'name a commit with --hub_revision=') from None

# -----------------------------------------------------------------------------
# Texts that have latents already

def as_latent(array, path):
    """ (D,) or (N, D) -> (N, D) float32: a copy, that keeps no file open. """
    if array.ndim not in (1, 2) or array.dtype.kind != 'f':
        raise ValueError(f'{path}: a latent is {array.dtype} {array.shape}, expected floats (D,) or (N, D)')
    return np.atleast_2d(np.array(array, np.float32))


def in_order(path):
    """ Sort key: 2.npy before 10.npy. """
    return [int(part) if part.isdigit() else part for part in re.split(r'(\d+)', path)]


def with_latents(texts, spec):
    """ Each text with its row of the arrays (n, D) or (n, N, D), one after the other. """
    paths = []
    for part in (p.strip() for p in spec.split(',') if p.strip()):
        found = sorted(glob.glob(os.path.join(glob.escape(part), '*.npy')), key=in_order) if os.path.isdir(part) else [part]
        if not found:
            raise ValueError(f'latents_from: no .npy file in {part}')
        paths += found
    arrays = [read_array(path, mmap=True, what='latents') for path in paths]
    for path, array in zip(paths, arrays):
        if array.ndim not in (2, 3) or array.shape[1:] != arrays[0].shape[1:] or array.dtype.kind != 'f':
            raise ValueError(f'{path}: latents are {array.dtype} {array.shape}, expected floats (n, D) or (n, N, D), alike in all files')
    rows, n_texts = ((path, array, i) for path, array in zip(paths, arrays) for i in range(len(array))), 0
    for text in texts:
        row = next(rows, None)
        if row is None:
            raise ValueError(f'latents_from={spec}: {n_texts} rows for more documents than that')
        n_texts += 1
        yield Document(text, lambda path=row[0], array=row[1], i=row[2]: as_latent(array[i], path))
    if more := sum(1 for _ in rows):
        raise ValueError(f'latents_from={spec}: {n_texts + more} rows for {n_texts} documents')


def read_earlier(source):
    """ The earlier layout: a list {text, latent_path, ...} in train_data.json, a .npy a text, maybe a .txt too, which then counts. """
    index = earlier_index(source.import_dir, source.import_split)
    with open(index, 'rb') as f:
        items = read_json(f.read(), index)
    if not isinstance(items, list):
        raise ValueError(f'{index}: expected a list of {{"text", "latent_path"}}, found {type(items).__name__}')
    for i, item in enumerate(items):
        if not isinstance(item, dict) or not isinstance(item.get('latent_path'), str):
            raise ValueError(f'{index}, item {i}: no latent_path, found {shown.repr(item)}')
        stem = os.path.splitext(os.path.basename(item['latent_path']))[0]
        text_path = inside(source.import_dir, item.get('text_path') or os.path.join('texts', source.import_split, f'{stem}.txt'), index)
        if os.path.isfile(text_path):
            with open_text(text_path, source, newline='', skip_bom=False) as f:
                text = f.whole()
        elif isinstance(item.get('text'), str):
            text = item['text']
        else:
            raise ValueError(f'{index}, item {i}: no "text", and no file {text_path}')
        path = inside(source.import_dir, item['latent_path'], index)
        if not os.path.isfile(path):
            raise ValueError(f'{path}: missing, {index} names it in item {i}')
        yield Document(text, lambda path=path: as_latent(read_array(path, mmap=True, what='a latent'), path))


def earlier_index(folder, split):
    return os.path.join(folder, f'{split}_data.json')


def read_images(source):
    """ Captions with their images: metadata.csv or metadata.jsonl names file_name and the caption's field (the hub's imagefolder). """
    if not find_spec('PIL'):
        raise ValueError('image_size is set; to read images: pip install pillow')
    for name in ('metadata.csv', 'metadata.jsonl'):
        index = os.path.join(source.input, name)
        if os.path.isfile(index):
            break
    else:
        raise ValueError(f'{source.input}: no metadata.csv or metadata.jsonl with file_name and {source.field} in it')
    for record, where in read_table(index, source, 'file_name', source.field) if name.endswith('csv') else read_records(index, source):
        if record is None:                                   # a row longer than document_limit
            yield Document(None)
            continue
        file_name, text = json_text(record, 'file_name', where), json_text(record, source.field, where)
        path = inside(source.input, file_name, where)
        if not os.path.isfile(path):
            raise ValueError(f'{path}: missing, {where} names it')
        yield Document(text, partial(image_patches, path, source.image_size, source.patch, source.channels), group=file_name)


def read_records(path, source):
    """ (record, where) of each line of a .jsonl file that is not blank: None for one longer than document_limit. """
    with open_text(path, source) as f:
        for line, is_whole in f.lines():
            where = f'{path}, line {f.line}'
            if line.strip() or not is_whole:
                yield read_json(line, where, 'file_name', source.field) if is_whole else None, where


def image_patches(path, size, patch, channels):
    """ The image's middle square at size x size pixels, in [-1, 1], as patches. Shrinking averages areas: what was enlarged by a whole
    factor comes back as it was. """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError(f'{path}: to read images: pip install pillow') from None
    try:
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image).convert('L' if channels == 1 else 'RGB')
            image = ImageOps.fit(image, (size, size), Image.Resampling.BOX if min(image.size) >= size else Image.Resampling.BICUBIC)
    except Exception as error:                               # pillow's readers raise what they like
        raise ValueError(f'{path}: no image that can be read ({(str(error).splitlines() or [type(error).__name__])[0]})') from None
    return to_patches(np.asarray(image, np.float32).reshape(size, size, channels) / 127.5 - 1, patch)


def to_patches(pixels, patch):
    """ (S, S, C) -> (N, D): N = (S/patch)^2 patches row by row, D = patch^2 * C. """
    S, _, C = pixels.shape
    grid = pixels.reshape(S // patch, patch, S // patch, patch, C).transpose(0, 2, 1, 3, 4)
    return grid.reshape(-1, patch * patch * C)


def to_pixels(patches, patch, channels):
    """ And back, of many: (n, N, D) in [-1, 1] -> (n, S, S, C) uint8. What lies outside is black or white. """
    n, side = len(patches), math.isqrt(patches.shape[1])
    grid = patches.reshape(n, side, side, patch, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    pixels = grid.reshape(n, side * patch, side * patch, channels)
    return ((pixels.clip(-1, 1) + 1) * 127.5).round().astype(np.uint8)


DIGITS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')


def read_digits(source):
    """ scikit-learn's handwritten digits, which it brings along, each with four captions of what is seen: the digit, and its strokes by how
    much ink there is, in thirds of the images of that digit. """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError('input=digits: pip install scikit-learn') from None
    found = load_digits()
    images, labels = found.images.astype(np.float32), found.target         # (n, 8, 8), 0 to 16
    ink = images.sum((1, 2))
    limits = [np.quantile(ink[labels == digit], (1 / 3, 2 / 3)) for digit in range(10)]
    for i, (image, label) in enumerate(zip(images, labels)):
        digit, strokes = DIGITS[label], ('thin', 'plain', 'bold')[np.searchsorted(limits[label], ink[i])]
        patches = to_patches(image[..., None] / 8 - 1, source.patch)
        a = 'an' if digit == 'eight' else 'a'
        for text in (f'{a} {digit}', f'a {strokes} {digit}', f'the digit {digit}', f'the digit {digit} in {strokes} strokes'):
            yield Document(text, lambda patches=patches: patches, group=f'digit {i}')

# -----------------------------------------------------------------------------
# The built-in corpus: English sentences of the interpreter's own documentation, read by ast; no module of it is imported

@lru_cache
def builtin_corpus():
    """ Distinct sentences from pydoc_data's topics and the standard library's docstrings, in the order of the files. """
    root = sysconfig.get_path('stdlib')
    names = sorted(glob.glob('**/*.py', root_dir=root, recursive=True))
    skip = re.compile(r'(^|/)(site-packages|dist-packages|test|tests|idlelib|lib2to3|turtledemo|ensurepip|lib-dynload)/|_sysconfigdata')
    sentences = {}
    for name in names:
        if skip.search(name.replace(os.sep, '/')):
            continue
        try:
            with open(os.path.join(root, name), 'rb') as f:
                tree = ast.parse(f.read())
        except SyntaxError:
            continue
        for text in prose_of(tree, topics=name.startswith('pydoc_data')):
            sentences |= dict.fromkeys(sentences_of(text))
    return list(sentences)


def prose_of(tree, topics):
    """ The docstrings of a module; of pydoc_data all its string constants. """
    for node in ast.walk(tree):
        if topics and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ''


def sentences_of(text):
    """ Whole English sentences: no code, doctests, tables, headings or signatures. """
    for paragraph in re.split(r'\n\s*\n', inspect.cleandoc(text)):
        if re.search(r'>>>|::=|\.\. |^\s*[|+*=~^-]{3}|\s{3,}\S+\s{3,}|^\s*:\w+', paragraph, re.MULTILINE):
            continue
        paragraph = re.sub(r'^\s*(?:[*-]|\d+\.)\s+', '', paragraph)       # the bullet of a list's item
        paragraph = ' '.join(paragraph.split()).replace('``', '"').replace('`', '"')
        for sentence in re.split(r'(?<=[a-z")][.!?])\s+(?=[A-Z"])', paragraph):
            words = sentence.split()
            plain = sum(bool(re.fullmatch(r'"?\(?[A-Za-z][a-z\'-]*\)?"?[.,;:!?]?"?', word)) for word in words)
            if 5 <= len(words) <= 40 and plain >= .85 * len(words) and re.fullmatch(r'[A-Z][^{}<>=|\\_@#$%*/\[\]]*[a-z")][.!?]', sentence):
                yield sentence
