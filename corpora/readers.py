"""
Readers of files: text, JSON lines, tables and parquet, as streams of texts.

    for text in read_file('captions.csv.gz', source, counts):
        ...

`source` is a corpora.sources.Source; a reader uses its split_on, encoding, invalid_bytes, field and
document_limit. All but parquet may be compressed (.gz). A text file is read in pieces: a reader
of text or FASTA holds little more than document_limit characters: of a longer document it gives so
many, and sources.documents drops it. Any line ending is read as \\n. What cannot be read is a
ValueError that names the file and the line.

To add a kind of file, write a generator of texts and name its ending in read_file and in KINDS.
"""
import codecs
import csv
import functools
import gzip
import io
import itertools
import json
import os
import re
import zlib
from contextlib import contextmanager
from typing import NamedTuple

from corpora.proteins import FASTA, read_fasta
from runs.console import warn
from runs.distributed import rank
from runs.files import short

# why a document is left out
DROPS = ('empty', 'too_short', 'over_document_limit', 'duplicate')
# what is taken from a folder; a text file that the user names may have any ending
JSON_LINES = ('.jsonl', '.ndjson', '.jsonlines')
TABLES = {'.csv': ',', '.tsv': '\t'}
KINDS = ('.txt', *JSON_LINES, *TABLES, '.parquet', *FASTA)
NOT_TEXT = ('.arrow', '.json', '.zip', '.tar', '.bz2', '.xz', '.zst', '.npy', '.npz', '.bin', '.pt',
            '.safetensors', '.pdf', '.docx', '.png', '.jpg')
# how a file begins that is no text in UTF-8, whatever its name says
BEGINNINGS = {b'\xff\xfe': 'UTF-16', b'\xfe\xff': 'UTF-16', b'\x1f\x8b': 'gzip', b'BZh': 'bzip2',
              b'\xfd7zXZ': 'xz', b'\x28\xb5\x2f\xfd': 'zstd', b'PK\x03\x04': 'zip',
              b'PAR1': 'parquet', b'ARROW1': 'arrow', b'\x93NUMPY': 'npy', b'%PDF': 'PDF',
              b'\x89PNG': 'PNG', b'SQLite format': 'SQLite'}
SURROGATE = re.compile('[\ud800-\udfff]')                    # half a character
LONGEST_RECORD = 10**9         # characters. In a table, a quote that is never closed would make a
                               # field of the whole file
ROWS = 64                      # of a parquet file that are read at a time: its texts may be long


class Document(NamedTuple):
    text: str
    latent: object = None              # a function that reads its latent vectors, (N, D) float32
    group: str = ''                    # documents of one group go to the same split
    place: str = ''                    # where its latent comes from, for an error


def kind_of(name):
    """ '.csv' of a.CSV.gz. """
    return os.path.splitext(name.lower().removesuffix('.gz'))[1]


def read_file(path, source, counts):
    """ The texts of one file. """
    kind = kind_of(path)
    if kind == '.parquet':
        yield from read_parquet(path, source)
    elif kind in JSON_LINES or kind in TABLES:
        for record, where in read_records(path, source):
            yield text_of(record, source.field, where, source)
    elif kind in FASTA:
        with open_text(path, source) as f:
            yield from read_fasta(f, counts)
    else:
        warn_of_kind(path, source)
        with open_text(path, source) as f:
            if source.split_on == 'line':
                yield from f.lines()
            else:
                yield from read_blocks(f, source.split_on)


def inside(folder, path, where):
    """ The full path of a file that another file names. It must lie in the folder. """
    root = os.path.realpath(folder)
    full = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([root, full]) != root:
        raise ValueError(f'{where}: {path} lies outside of {folder}')
    return full

# -----------------------------------------------------------------------------
# Text

@functools.cache
def warn_of_kind(path, source):
    """ A warning, once, where the first lines of a text file look like a file of another kind. """
    with open_text(path, source) as f:
        first, second = itertools.islice(itertools.chain(f.lines(), ['', '']), 2)
    kind = ''
    if re.fullmatch(r'\s*(\[|\[?\s*{("(\\.|[^"\\])*"\s*:.*)?)\s*', first):
        kind = 'JSON (records, one a line: name it .jsonl)'
    elif first.startswith('>') and re.fullmatch('[A-Z*-]{5,}', second):
        kind = 'FASTA (name it .fasta)'
    elif source.field in (cells := re.split('[,\t]', first)) and len(cells) > 1:
        kind = f'a table with a column {source.field} (name it .csv or .tsv)'
    elif len(first) > 1 and not (first[::2].strip('\0') and first[1::2].strip('\0')):
        kind = 'UTF-16 (read it with --encoding=utf-16-le or utf-16-be)'
    if kind and rank == 0:
        warn(f'{path} looks like {kind}; it is read as plain text')


def check_encoding(encoding):
    """ ValueError unless Python reads text in this encoding. """
    try:
        io.TextIOWrapper(io.BytesIO(b'x'), encoding, 'replace').read()
    except (LookupError, ValueError):
        raise ValueError(f'encoding {encoding!r}: no encoding of texts that Python knows; '
                         'name one such as utf-8, latin-1, cp1252, utf-16') from None


@contextmanager
def open_text(path, source, skip_bom=True):
    """ A TextFile. If the file as a whole is wrong, a ValueError names it. """
    opened = gzip.open(path, 'rb') if path.lower().endswith('.gz') else open(path, 'rb')
    is_utf8 = codecs.lookup(source.encoding).name == 'utf-8'
    encoding = 'utf-8-sig' if is_utf8 and skip_bom else source.encoding
    try:
        # surrogateescape: an invalid byte becomes a lone surrogate, which TextFile looks for
        with opened, io.TextIOWrapper(opened, encoding, 'surrogateescape') as f:
            begin = opened.peek(16) if is_utf8 else b''
            for magic, kind in BEGINNINGS.items():
                if begin.startswith(magic):
                    hint = 'name it by its kind'
                    if kind == 'UTF-16':
                        hint = 'prepare.py reads it with --encoding=utf-16'
                    raise ValueError(f'{path}: {kind}, expected UTF-8: convert it, or {hint}')
            yield TextFile(f, path, source)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f'{path}: broken gzip file ({error}); get it again') from None


class TextFile:
    """ A text file, read in pieces of bounded length. A line ends with \\n, \\r\\n or \\r. Other
    characters of this kind (U+2028, form feed, ...) are text. """

    def __init__(self, f, path, source):
        self.f = f
        self.path = path
        self.source = source
        self.line = 0                  # the number of the line that the last piece belongs to
        self.is_new_line = True        # whether the next piece begins a line

    @property
    def place(self):
        return f'{self.path}, line {self.line}'

    def piece(self, most):
        """ The next `most` characters; fewer at the end of a line. '' at the end of the file. """
        self.line += self.is_new_line
        try:
            piece = self.f.readline(most)
        except UnicodeError as error:  # rare: most invalid bytes become lone surrogates
            raise ValueError(f'{self.path}, at line {self.line} or soon after: {error}; '
                             'name the encoding with --encoding=') from None
        self.is_new_line = piece.endswith('\n')

        # an invalid byte, now a surrogate
        is_checked = self.source.invalid_bytes == 'stop' and not piece.isascii()
        if is_checked and (found := re.search('[\udc80-\udcff]', piece)):
            byte = ord(found[0]) - 0xDC00
            raise ValueError(f'{self.place}: byte 0x{byte:02X} is no '
                             f'{self.source.encoding}; name the encoding, such as '
                             '--encoding=latin-1, or count and replace: --invalid_bytes=replace')
        return piece

    def lines(self, most=0):
        """ Each line without its end. Of a longer one than `most`, or else document_limit: that
        many characters and one more. """
        most = most or self.source.document_limit
        while line := self.piece(most + 1):
            while not self.is_new_line and self.piece(2**16):            # the rest of a long line
                pass
            yield line.removesuffix('\n')

    def whole(self):
        return ''.join(iter(lambda: self.piece(LONGEST_RECORD), ''))


def read_blocks(f, split_on):
    """ The texts between blank lines; split_on='file': all of it; else between the lines that are
    split_on. """
    parts = []
    room = f.source.document_limit + 1           # characters that it may still have
    for line in itertools.chain(f.lines(), [None]):                      # which ends the file
        if split_on == 'paragraph':
            is_between = line is None or not line.strip()
        else:
            is_between = line is None or (split_on != 'file' and line.strip() == split_on)
        if not is_between and room >= 0:
            parts.append(line)
            room -= len(line) + 1
        elif is_between and parts:
            yield '\n'.join(parts)
            parts = []
            room = f.source.document_limit + 1

# -----------------------------------------------------------------------------
# Records: JSON lines and tables

def text_of(record, field, where, source=None):
    """ The text in a field of a record. None is an empty text. A half of a character, which JSON
    can write (\\ud800), is an error, unless the source has invalid_bytes='replace'. """
    text = record.get(field, 0)                              # 0: there is none
    if text is not None and not isinstance(text, str):
        raise ValueError(f'{where}: no text in field {field!r}, found {short(record)}; '
                         'choose with --field=')
    stops = source is None or source.invalid_bytes == 'stop'
    if text and stops and (found := SURROGATE.search(text)):
        raise ValueError(f'{where}: {found[0]!r} in field {field!r} is half a character; count and '
                         'replace such halves: --invalid_bytes=replace')
    return text or ''


def read_records(path, source):
    """ (record, where) of a file of JSON lines or a table: a dict of each line, or of each row.
    Blank ones are passed over. """
    read = read_table if kind_of(path) in TABLES else read_json_lines
    with open_text(path, source) as f:
        for record in read(f):
            yield record, f.place


def read_json_lines(f):
    for line in filter(str.strip, f.lines(LONGEST_RECORD)):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{f.place}: no JSON ({error})') from None
        if not isinstance(record, dict):
            raise ValueError(f'{f.place}: found {short(record)}, expected a record of JSON, '
                             '{...}')
        yield record


def read_table(f):
    """ A dict of each row, as a spreadsheet reads it: a field that begins with a quote ends with
    one; between them are commas, tabs, line ends and doubled quotes. """
    csv.field_size_limit(LONGEST_RECORD)
    lines = iter(lambda: f.piece(LONGEST_RECORD), '')
    rows = csv.reader(lines, delimiter=TABLES[kind_of(f.path)], strict=True)
    try:
        # the names of its columns, then its rows
        names = next(rows, [])
        check_columns(f.path, names, f.source.field)
        for row in filter(None, rows):
            if len(row) != len(names):
                raise ValueError(f'{f.place}: {len(row)} fields, expected {len(names)}, one a '
                                 'column; put a text with a comma or a tab into quotes')
            yield dict(zip(names, row))
    except csv.Error as error:
        raise ValueError(f'{f.place}: broken table ({error}); a field that begins with a quote '
                         'ends with one, and quotes in it are doubled') from None


def check_columns(path, names, field):
    """ ValueError unless one column has this name. """
    if names.count(field) != 1:
        raise ValueError(f'{path}: {names.count(field)} columns are called {field!r}, expected 1, '
                         f'found {short(names)}; choose with --field=')

# -----------------------------------------------------------------------------
# Parquet

def read_parquet(path, source):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f'{path}: to read parquet: pip install datasets') from None

    # a few rows at a time, of this column only
    field = source.field
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_columns(path, file.schema_arrow.names, field)
            for batch in file.iter_batches(ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield text_of({field: text}, field, path, source)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f'{path}: broken parquet file ({error})') from None
