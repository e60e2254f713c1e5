"""
Readers of files: text, JSON lines, tables and parquet, as streams of texts.

    for text in read_file('captions.csv.gz', source, counts):
        ...

`source` is a corpora.sources.Source; a reader uses its split_on, encoding, invalid_bytes, field and
document_limit. All but parquet may be compressed (.gz). A text file is read in pieces: a reader
holds at most document_limit characters of a document, and gives None for a longer one. What cannot
be read is a ValueError that names the file and the line.

To add a kind of file, write a generator of texts and name its ending in read_file and in KINDS.
"""
import codecs
import csv
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
from runs.files import short

# why a document is left out
DROPS = ('empty', 'too_short', 'over_document_limit', 'duplicate')
# what is taken from a folder; a text file that the user names may have any ending
KINDS = ('.txt', '.jsonl', '.csv', '.tsv', '.parquet', *FASTA)
NOT_TEXT = ('.arrow', '.json', '.zip', '.tar', '.bz2', '.xz', '.zst', '.npy', '.npz', '.bin', '.pt',
            '.safetensors', '.pdf', '.docx', '.png', '.jpg')
LONGEST_FIELD = 10**9          # characters; of a table. A quote that is never closed would make a
                               # field of the whole file
ROWS = 64                      # of a parquet file that are read at a time: its texts may be long


class Document(NamedTuple):
    text: str                          # None: longer than document_limit
    latent: object = None              # a function that reads its latent vectors, (N, D) float32
    group: str = ''                    # documents of one group go to the same split


def kind_of(name):
    """ '.csv' of a.CSV.gz. """
    return os.path.splitext(name.lower().removesuffix('.gz'))[1]


def read_file(path, source, counts):
    """ The texts of one file. """
    kind = kind_of(path)
    if kind == '.parquet':
        yield from read_parquet(path, source)
    elif kind in ('.csv', '.tsv', '.jsonl'):
        for record, where in read_records(path, source):
            # else a blank line, '', which is an empty document, or a line that is too long, None
            is_record = isinstance(record, dict)
            yield text_of(record, source.field, where) if is_record else record
    else:
        with open_text(path, source) as f:
            if kind in FASTA:
                yield from read_fasta(f, counts)
            elif source.split_on == 'file':
                yield f.whole()
            elif source.split_on == 'paragraph':
                yield from read_paragraphs(f)
            else:
                yield from f.lines()


def inside(folder, path, where):
    """ The full path of a file that another file names. It must lie in the folder. """
    root = os.path.realpath(folder)
    full = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([root, full]) != root:
        raise ValueError(f'{where}: {path} lies outside of {folder}')
    return full

# -----------------------------------------------------------------------------
# Text

def check_encoding(encoding):
    """ ValueError unless Python reads text in this encoding. """
    try:
        io.TextIOWrapper(io.BytesIO(b'x'), encoding, 'replace').read()
    except (LookupError, ValueError):
        raise ValueError(f'encoding {encoding!r}: no encoding of texts that Python knows; '
                         'name one such as utf-8, latin-1, cp1252, utf-16') from None


@contextmanager
def open_text(path, source, newline='\n', skip_bom=True):
    """ A TextFile. If the file as a whole is wrong, a ValueError names it. """
    opened = gzip.open(path, 'rb') if path.lower().endswith('.gz') else open(path, 'rb')
    is_utf8 = codecs.lookup(source.encoding).name == 'utf-8'
    encoding = 'utf-8-sig' if is_utf8 and skip_bom else source.encoding
    try:
        # surrogateescape: an invalid byte becomes a lone surrogate, which TextFile looks for
        with opened, io.TextIOWrapper(opened, encoding, 'surrogateescape', newline) as f:
            if is_utf8 and opened.peek(2)[:2] in (b'\xff\xfe', b'\xfe\xff'):
                raise ValueError(f'{path}: UTF-16, expected UTF-8: convert it; prepare.py reads it '
                                 'with --encoding=utf-16')
            yield TextFile(f, path, source)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f'{path}: broken gzip file ({error}); get it again') from None


class TextFile:
    """ A text file, read in pieces of bounded length. A line ends where `newline` said when the
    file was opened. Other characters of this kind (U+2028, form feed, ...) are text. """

    def __init__(self, f, path, source):
        self.f = f
        self.path = path
        self.source = source
        self.line = 0                  # the number of the line that the last piece belongs to
        self.is_new_line = True        # whether the next piece begins a line

    def piece(self, most):
        """ The next `most` characters; fewer at the end of a line. '' at the end of the file. """
        self.line += self.is_new_line
        try:
            piece = self.f.readline(most)
        except UnicodeError as error:  # rare: most invalid bytes become lone surrogates
            raise ValueError(f'{self.path}, at line {self.line} or soon after: {error}; '
                             'name the encoding with --encoding=') from None
        self.is_new_line = piece.endswith(('\n', '\r'))

        # an invalid byte, now a surrogate
        is_checked = self.source.invalid_bytes == 'stop' and not piece.isascii()
        if is_checked and (found := re.search('[\udc80-\udcff]', piece)):
            byte = ord(found[0]) - 0xDC00
            raise ValueError(f'{self.path}, line {self.line}: byte 0x{byte:02X} is no '
                             f'{self.source.encoding}; name the encoding, such as '
                             '--encoding=latin-1, or count and replace: --invalid_bytes=replace')
        return piece

    def lines(self):
        """ Each line without its end. Of one longer than document_limit: that many characters and
        one more. """
        most = self.source.document_limit + 1
        while line := self.piece(most):
            while not self.is_new_line and self.piece(2**16):            # the rest of a long line
                pass
            yield line.removesuffix('\n')

    def whole(self):
        """ All of it, or None if it is longer than document_limit. """
        parts = []
        room = self.source.document_limit
        while piece := self.piece(room + 1):
            parts.append(piece)
            room -= len(piece)
            if room < 0:
                return None
        return ''.join(parts)


def read_paragraphs(f):
    """ The texts between blank lines. """
    limit = f.source.document_limit
    parts = []                         # the lines of the paragraph
    size = 0                           # its characters, also those that are not kept
    for line in itertools.chain(f.lines(), ['']):            # which ends the last paragraph
        if line.strip():
            size += len(line) + 1
            if size <= limit + 1:
                parts.append(line)
        elif size:
            yield '\n'.join(parts) if size <= limit + 1 else None
            parts = []
            size = 0

# -----------------------------------------------------------------------------
# Records: JSON lines and tables

def text_of(record, field, where):
    """ The text in a field of a record. None is an empty text. """
    text = record.get(field, 0)                              # 0: there is none
    if text is not None and not isinstance(text, str):
        raise ValueError(f'{where}: no text in field {field!r}, found {short(record)}; '
                         'choose with --field=')
    return text or ''


def read_records(path, source):
    """ (record, where) of a .jsonl, .csv or .tsv file: a dict of each line, or of each row. Of a
    blank line of JSON the record is '', of one longer than document_limit it is None. """
    is_table = kind_of(path) != '.jsonl'
    with open_text(path, source, newline='' if is_table else '\n') as f:
        for record in read_table(f) if is_table else read_json_lines(f):
            yield record, f'{path}, line {f.line}'


def read_json_lines(f):
    for line in f.lines():
        if len(line) > f.source.document_limit:
            yield None
        elif not line.strip():
            yield ''
        else:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f'{f.path}, line {f.line}: no JSON ({error})') from None
            if not isinstance(record, dict):
                raise ValueError(f'{f.path}, line {f.line}: found {short(record)}, expected a '
                                 'record of JSON, {...}')
            yield record


def read_table(f):
    """ A dict of each row. In a .tsv file a quote is a character like any other. """
    # the module csv, with a limit of our own
    csv.field_size_limit(LONGEST_FIELD)
    dialect = dict(strict=True)
    if kind_of(f.path) == '.tsv':
        dialect = dict(delimiter='\t', quoting=csv.QUOTE_NONE)
    rows = csv.DictReader(iter(lambda: f.piece(LONGEST_FIELD), ''), **dialect)

    # the names of its columns, then its rows
    try:
        check_columns(f.path, rows.fieldnames or [], f.source.field)
        for row in rows:
            if None in row:                                  # a comma in a text without quotes
                raise ValueError(f'{f.path}, line {f.line}: {len(row[None])} more fields than the '
                                 f'{len(rows.fieldnames)} columns')
            yield row
    except csv.Error as error:
        raise ValueError(f'{f.path}, line {f.line}: broken table ({error})') from None


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
                    yield text_of({field: text}, field, path)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f'{path}: broken parquet file ({error})') from None
