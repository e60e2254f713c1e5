"""
Readers of files: text, JSON lines, tables and parquet, as streams of texts.

    for text in read_file('captions.csv.gz', source):      # None: longer than source.document_limit
        ...

`source` is a corpora.sources.Source; a reader uses its split_on, encoding, invalid_bytes, field and
document_limit. All but parquet may be compressed (.gz). A file is read in pieces: no reader holds
more than document_limit characters of a document. What cannot be read is a ValueError that names
the file and the line.

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
import reprlib
import zlib
from contextlib import contextmanager
from typing import NamedTuple

from corpora.proteins import FASTA, read_fasta

# what is taken from a folder; a text file that the user names may have any ending
# why a document is left out
DROPS = ('empty', 'too_short', 'too_long', 'over_document_limit', 'duplicate')
KINDS = ('.txt', '.jsonl', '.csv', '.tsv', '.parquet', *FASTA)
NOT_TEXT = ('.arrow', '.json', '.zip', '.tar', '.bz2', '.xz', '.zst', '.npy', '.npz', '.bin', '.pt',
            '.safetensors', '.pdf', '.docx', '.png', '.jpg')

# shows a value in an error: short, however deep or long the value is
shown = reprlib.Repr()
shown.maxlevel = 2
shown.maxdict = 8
shown.maxstring = 60


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
    elif kind in ('.csv', '.tsv'):
        yield from read_column(path, source)
    elif kind == '.jsonl':
        yield from read_json_lines(path, source)
    else:
        with open_text(path, source) as f:
            if kind in FASTA:
                yield from read_fasta(f, counts)
            elif source.split_on == 'file':
                yield f.whole()
            elif source.split_on == 'paragraph':
                yield from read_paragraphs(f)
            else:
                yield from read_lines(f)


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
        if self.source.invalid_bytes == 'stop' and not piece.isascii():
            self.check_bytes(piece)
        return piece

    def check_bytes(self, piece):
        found = re.search('[\udc80-\udcff]', piece)
        if found:
            byte = ord(found[0]) - 0xDC00
            raise ValueError(f'{self.path}, line {self.line}: byte 0x{byte:02X} is no '
                             f'{self.source.encoding}; name the encoding, such as '
                             '--encoding=latin-1, or count and replace: --invalid_bytes=replace')

    def lines(self):
        """ (line, is_whole). Of a line longer than document_limit it gives only the beginning. """
        most = self.source.document_limit + 1                            # with the end of the line
        while line := self.piece(most):
            is_whole = len(line) < most or self.is_new_line
            yield line, is_whole

            # skip the rest of the line
            while not is_whole and not self.is_new_line and self.piece(2**16):
                pass

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


def read_lines(f):
    for line, is_whole in f.lines():
        yield line if is_whole else None


def read_paragraphs(f):
    """ The texts between blank lines. """
    limit = f.source.document_limit
    parts = []                         # the lines of the paragraph
    size = 0                           # its characters, also those that are not kept

    # a blank line after the last one ends the last paragraph
    for line, is_whole in itertools.chain(f.lines(), [('', True)]):
        if line.strip() or not is_whole:
            size += len(line)
            if size <= limit:
                parts.append(line)
        elif size:
            yield ''.join(parts) if size <= limit else None
            parts = []
            size = 0

# -----------------------------------------------------------------------------
# Records: JSON lines and tables

def as_text(value, field, where):
    """ The text in a record's field. None is an empty document. """
    if value is None:
        return ''
    if isinstance(value, str):
        return value
    raise ValueError(f'{where}: no text in field {field!r}, found {shown.repr(value)}; '
                     'choose with --field=')


def json_text(record, field, where):
    """ The text in a field of a record, which may be any value of JSON. """
    if not isinstance(record, dict) or field not in record:
        raise ValueError(f'{where}: no text in field {field!r}, found {shown.repr(record)}; '
                         'choose with --field=')
    return as_text(record[field], field, where)


def names_of_record(text):
    """ The names in an object of JSON, each as often as it comes; not those of objects in it. """
    objects = []

    def note(pairs):
        objects.append(pairs)
        return {}

    record = json.loads(text, object_pairs_hook=note)
    if not isinstance(record, dict):
        return []
    return [name for name, _ in objects[-1]]             # the outermost object ends last


def read_json(text, where, *fields):
    """ A value of JSON. If it is a record, each of `fields` may come only once in it: of two, which
    one would count? """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{where}: no JSON ({error})') from None

    # parse it a second time only where a field may come twice; a name can be written with escapes
    has_escapes = bool(fields) and ('\\u' in text or '\\/' in text)
    for field in fields:
        may_come_twice = has_escapes or text.count(f'"{field}"') > 1
        if may_come_twice and names_of_record(text).count(field) > 1:
            raise ValueError(f'{where}: field {field!r} comes twice; keep one')
    return value


def read_records(path, source):
    """ (record, where) of each line of a .jsonl file that is not blank; record None: the line is
    longer than document_limit. """
    with open_text(path, source) as f:
        for line, is_whole in f.lines():
            where = f'{path}, line {f.line}'
            if not is_whole:
                yield None, where
            elif line.strip():
                yield read_json(line, where, 'file_name', source.field), where


def read_json_lines(path, source):
    """ The texts of a .jsonl file. A blank line is an empty document. """
    with open_text(path, source) as f:
        for line, is_whole in f.lines():
            where = f'{path}, line {f.line}'
            if not is_whole:
                yield None
            elif not line.strip():
                yield ''
            else:
                record = read_json(line, where, source.field)
                yield json_text(record, source.field, where)


class TableLines:
    """ The lines of a table, for the csv module. A row may have several lines. Of a row longer than
    document_limit, csv gets only what decides where the row ends: quotes that have no partner, and
    the characters beside a quote or an end of a line. """

    DECIDES = re.compile(r'''^[^"\r\n]|[^"\r\n]?"[^"\r\n]?|[^"\r\n]$''')

    def __init__(self, f):
        self.f = f
        self.limit = f.source.document_limit
        self.begin_row()

    def begin_row(self):
        self.length = 0                # characters of the row that were read
        self.given = 0                 # and those that csv got

    @property
    def is_over(self):
        return self.length > self.limit

    def __iter__(self):
        return self

    def __next__(self):
        # the pieces of one line
        parts = []
        while piece := self.f.piece(2**16):
            self.length += len(piece)
            if self.is_over:
                piece = self.shorten(piece)
            parts.append(piece)
            self.given += len(piece)

            # a quote that is never closed would make a row of the whole file
            if self.given > 2 * self.limit:
                raise ValueError(f'{self.f.path}, line {self.f.line}: no end of a row of '
                                 f'{self.length:,} characters; is it a table?')
            if self.f.is_new_line:
                break

        if not parts:
            raise StopIteration
        return ''.join(parts) if self.given else 'x'         # csv would skip an empty row

    def shorten(self, piece):
        piece = piece.replace('""', '')
        if '"' in piece:
            return ''.join(self.DECIDES.findall(piece))
        text = piece.rstrip('\r\n')
        return text[:1] + text[1:][-1:]                      # its first and its last character


def read_table(path, source, *columns):
    """ (row, where) of a .csv or .tsv file, which must have these columns. A row is a dict; None:
    it is longer than document_limit. In a .tsv file a quote is a character like any other. """
    csv.field_size_limit(2**31 - 1)    # document_limit is the limit, not the csv module's own
    if kind_of(path) == '.tsv':
        dialect = dict(delimiter='\t', quoting=csv.QUOTE_NONE)
    else:
        dialect = dict(strict=True)

    with open_text(path, source, newline='') as f:
        lines = TableLines(f)
        rows = csv.DictReader(lines, **dialect)
        try:
            # the first row has the names of the columns
            check_columns(path, rows.fieldnames or [], columns)
            lines.begin_row()

            for row in rows:
                where = f'{path}, line {f.line}'
                if None in row and not lines.is_over:        # a comma in a text without quotes
                    raise ValueError(f'{where}: {len(row[None])} more fields than the '
                                     f'{len(rows.fieldnames)} columns')
                yield None if lines.is_over else row, where
                lines.begin_row()
        except csv.Error as error:
            raise ValueError(f'{path}, line {f.line}: broken table ({error})') from None


def check_columns(path, found, columns):
    for column in columns:
        if column not in found:
            raise ValueError(f'{path}: no column {column!r}, found {shown.repr(found)}; '
                             'choose with --field=')
        if found.count(column) > 1:
            raise ValueError(f'{path}: {found.count(column)} columns are called {column!r}; '
                             'rename all but one')


def read_column(path, source):
    """ The texts in one column of a table. """
    for row, where in read_table(path, source, source.field):
        yield None if row is None else as_text(row[source.field], source.field, where)

# -----------------------------------------------------------------------------
# Parquet

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
            check_parquet_column(path, file.schema_arrow, field)

            # a batch of rows at a time, of this column only
            for group in range(file.num_row_groups):
                n_rows = parquet_rows(file, group, field)
                for batch in file.iter_batches(n_rows, row_groups=[group], columns=[field]):
                    yield from parquet_texts(batch.column(0), source.document_limit)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f'{path}: broken parquet file ({error})') from None


def check_parquet_column(path, schema, field):
    """ ValueError unless there is one such column, and it is of text. """
    if schema.names.count(field) > 1:
        check_columns(path, schema.names, [field])
    types = {column.name: str(column.type) for column in schema}
    if types.get(field) not in ('string', 'large_string'):
        raise ValueError(f'{path}: no column {field!r} of text, found {types}; '
                         'choose with --field=')


def parquet_rows(file, group, field):
    """ How many rows of a row group to read at once: 1,024, or fewer if the mean text is long. """
    metadata = file.metadata.row_group(group)
    size = 0
    for i in range(metadata.num_columns):
        column = metadata.column(i)
        if column.path_in_schema == field:
            size += column.total_uncompressed_size
    return max(1, min(1024, 2**26 * metadata.num_rows // max(size, 1)))


def parquet_texts(column, limit):
    """ The texts of an Arrow array. A text with more bytes than `limit` characters can have is
    None, and never becomes a str. """
    import pyarrow.compute
    most = 4 * limit                   # a character has at most 4 bytes
    longest = pyarrow.compute.max(pyarrow.compute.binary_length(column)).as_py() or 0
    if longest <= most:
        for text in column.to_pylist():
            yield text or ''
        return

    # one by one, since some must not become a str
    for value in column:
        is_over = value.is_valid and value.as_buffer().size > most
        yield None if is_over else value.as_py() or ''
