"""
Readers of files: text, JSON lines, tables, parquet and arrow, as streams of texts.

    for text in read_file('captions.csv.gz', source, counts):
        ...

`source` is a corpora.sources.Source; a reader uses its split_on, encoding, invalid_bytes and field.
All but parquet and arrow may be compressed (.gz). Any line ending is read as \\n. What cannot be
read is a ValueError that names the file and the line.

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
from runs.files import short

# why a document is left out
DROPS = ('empty', 'too_short', 'duplicate')
# what is taken from a folder; a text file that the user names may have any ending
JSON_LINES = ('.jsonl', '.ndjson', '.jsonlines')
TABLES = {'.csv': ',', '.tsv': '\t'}
COLUMNAR = ('.parquet', '.arrow')
RECORDS = (*JSON_LINES, *TABLES, *COLUMNAR, *FASTA)
KINDS = ('.txt', *RECORDS)
NOT_TEXT = ('.json', '.tar')   # they would pass as text
# how a file begins that is no text in UTF-8, whatever its name says
BEGINNINGS = {b'\xff\xfe\0\0': 'UTF-32', b'\xff\xfe': 'UTF-16', b'\xfe\xff': 'UTF-16',
              b'\x1f\x8b': 'gzip', b'BZh': 'bzip2', b'\xfd7zXZ': 'xz',
              b'\x28\xb5\x2f\xfd': 'zstd', b'PK\x03\x04': 'zip', b'PAR1': 'parquet',
              b'ARROW1': 'arrow', b'\x93NUMPY': 'npy', b'%PDF': 'PDF', b'\x89PNG': 'PNG'}
SURROGATE = re.compile('[\ud800-\udfff]')                    # half a character
LONGEST_LINE = 2**28           # characters; also of a field of a table, where a quote that is never
                               # closed would make one of the whole file
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
    if kind in COLUMNAR:
        for text in read_column(path, source.field):
            yield text_of({source.field: text}, source.field, path)
    elif kind in JSON_LINES or kind in TABLES:
        for record, where in read_records(path, source):
            yield text_of(record, source.field, where)
    elif kind in FASTA:
        with open_text(path, source) as f:
            yield from read_fasta(f, counts)
    else:
        warn_of_kind(path, source)
        with open_text(path, source) as f:
            yield from f if source.split_on == 'line' else read_blocks(f, source.split_on)


def cleaned(text):
    """ (a text with \\n at its line ends and U+FFFD for half a character, how many of these). """
    return SURROGATE.subn('\ufffd', text.replace('\r\n', '\n').replace('\r', '\n'))


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
        lines = [line.strip() for line in itertools.islice(filter(str.strip, f), 2)]
    first, second = [*lines, '', ''][:2]
    kind = ''
    if re.fullmatch(r'\[|\[?\s*{("(\\.|[^"\\])*"\s*:.*)?', first):
        kind = 'JSON (records, one a line: name it .jsonl)'
    elif first.startswith('>') and re.fullmatch('[A-Za-z*-]{5,}', second):
        kind = 'FASTA (name it .fasta)'
    elif source.field in (cells := re.split('[,\t]', first)) and len(cells) > 1:
        kind = f'a table with a column {source.field} (name it .csv or .tsv)'
    elif len(first) > 1 and not (first[::2].strip('\0') and first[1::2].strip('\0')):
        kind = 'UTF-16 (read it with --encoding=utf-16-le or utf-16-be)'
    if kind and os.environ.get('RANK', '0') == '0':
        warn(f'{path} looks like {kind}; it is read as plain text')


@contextmanager
def open_text(path, source):
    """ A TextFile. If the file as a whole is wrong, a ValueError names it. """
    opened = gzip.open(path, 'rb') if path.lower().endswith('.gz') else open(path, 'rb')
    is_utf8 = codecs.lookup(source.encoding).name == 'utf-8'
    encoding = 'utf-8-sig' if is_utf8 else source.encoding
    try:
        # surrogateescape: an invalid byte becomes a lone surrogate, which TextFile looks for
        with opened, io.TextIOWrapper(opened, encoding, 'surrogateescape') as f:
            begin = opened.peek(16) if is_utf8 else b''
            for magic, kind in BEGINNINGS.items():
                if begin.startswith(magic):
                    hint = 'name it by its kind'
                    if kind.startswith('UTF'):
                        hint = f'prepare.py reads it with --encoding={kind.lower()}'
                    raise ValueError(f'{path}: {kind}, expected UTF-8: convert it, or {hint}')
            yield TextFile(f, path, source)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f'{path}: broken gzip file ({error}); get it again') from None


class TextFile:
    """ The lines of a text file, with a \\n at their ends. A line ends with \\n, \\r\\n or \\r;
    other characters of this kind (U+2028, form feed, ...) are text. """

    def __init__(self, f, path, source):
        self.f = f
        self.path = path
        self.source = source
        self.number = 0                # of the last line

    @property
    def place(self):
        return f'{self.path}, line {self.number}'

    def __iter__(self):
        try:
            while line := self.f.readline(LONGEST_LINE):
                self.number += 1
                self.check(line)
                yield line
        except UnicodeError as error:  # rare: most invalid bytes become lone surrogates
            raise ValueError(f'{self.path}, at line {self.number + 1} or soon after: {error}; '
                             'name the encoding with --encoding=') from None

    def check(self, line):
        if len(line) == LONGEST_LINE:
            raise ValueError(f'{self.place}: longer than {LONGEST_LINE:,} characters; cut it')
        if self.source.invalid_bytes == 'replace' or line.isascii():
            return
        if found := re.search('[\udc80-\udcff]', line):      # an invalid byte, now a surrogate
            byte = ord(found[0]) - 0xDC00
            raise ValueError(f'{self.place}: byte 0x{byte:02X} is no {self.source.encoding}; name '
                             'the encoding, such as --encoding=latin-1, or count and replace: '
                             '--invalid_bytes=replace')


def read_blocks(f, split_on):
    """ The texts between blank lines; split_on='file': all of it; else between the lines that are
    split_on. """
    # a blank line, none at all, or the line that the user names
    between = dict(paragraph='', file=None).get(split_on, split_on)
    block = []
    for line in f:
        if line.strip() != between:
            block.append(line)
        elif block:
            yield ''.join(block)
            block = []
    if block:
        yield ''.join(block)

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
    """ (record, where) of a file of JSON lines or a table: a dict of each line, or of each row.
    Blank ones are passed over. """
    read = read_table if kind_of(path) in TABLES else read_json_lines
    with open_text(path, source) as f:
        for record in read(f):
            yield record, f.place


def read_json_lines(f):
    for line in filter(str.strip, f):
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
    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader(f, delimiter=TABLES[kind_of(f.path)], strict=True)
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
# Parquet and arrow

def read_column(path, field):
    """ The values of one column, a few rows at a time. """
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f'{path}: to read this kind of file: pip install pyarrow') from None

    # arrow comes in two forms: a file, and a stream without an index
    try:
        with pyarrow.memory_map(path) as file:
            if kind_of(path) == '.parquet':
                table = pyarrow.parquet.ParquetFile(file)
                names = table.schema_arrow.names
                batches = table.iter_batches(ROWS, columns=[field])
            elif file.read(6) == b'ARROW1':
                table = pyarrow.ipc.open_file(file)
                names = table.schema.names
                batches = map(table.get_batch, range(table.num_record_batches))
            else:                                            # as `datasets` writes it
                file.seek(0)
                batches = table = pyarrow.ipc.open_stream(file)
                names = table.schema.names
            check_columns(path, names, field)
            for batch in batches:
                yield from batch.column(field).to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        kind = kind_of(path)[1:]
        raise ValueError(f'{path}: broken {kind} file ({error})') from None
