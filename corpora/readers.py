"""
Readers of files: text, FASTA, JSON lines, tables, parquet and arrow, as streams of texts.

    for text in read_file('captions.csv.gz', source, counts):
        ...

`source` has the knobs of prepare.py; a reader uses its split_on, encoding, invalid_bytes and field.
All but parquet and arrow may be compressed (.gz). Any line ending is read as \\n. What cannot be
read is a ValueError that names the file and the line.

To add a kind of file, write a generator of (record, where) and name its ending in RECORDS.
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
from typing import NamedTuple

from corpora.tokenizers import RESIDUES
from runs.console import warn
from runs.files import short

NOT_TEXT = ('.json', '.tar')   # they would pass as text
# how a file begins that is no text in UTF-8, whatever its name says
BEGINNINGS = {
    b'\xff\xfe\0\0': 'UTF-32',
    b'\0\0\xfe\xff': 'UTF-32',
    b'\xff\xfe': 'UTF-16',
    b'\xfe\xff': 'UTF-16',
    b'\x1f\x8b': 'gzip',
    b'BZh': 'bzip2',
    b'\xfd7zXZ': 'xz',
    b'\x28\xb5\x2f\xfd': 'zstd',
    b'PK\x03\x04': 'zip',
    b'PAR1': 'parquet',
    b'ARROW1': 'arrow',
    b'\x93NUMPY': 'npy',
    b'%PDF': 'PDF',
    b'\x89PNG': 'PNG',
}
CONTROL = re.compile(rb'[\0-\x08\x0e-\x1f]')   # not in a text, which may begin with such a word
SURROGATE = re.compile('[\ud800-\udfff]')                    # half a character
LONGEST = 2**24                # characters of a record's line or text: a quote that is never closed
                               # would make one of the whole file
LONGEST_LINE = 2**28           # of plain text, and of a document of it: text8 is one line
ROWS = 4                       # of a parquet file that are read at a time: a small file may hold
                               # texts of any length
warn_once = functools.cache(warn)


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
    if kind in RECORDS:
        for record, where in RECORDS[kind](path, source):
            yield text_of(record, source.field, where)
    elif kind in FASTA:
        yield from read_fasta(path, lines_of(path, source), counts)
    else:
        look = looks_like(path, source)
        if look and os.environ.get('RANK', '0') == '0':
            warn_once(f'{path} is read as plain text, but looks like {look}: name it so')
        lines = lines_of(path, source)
        yield from lines if source.split_on == 'line' else read_blocks(path, lines, source.split_on)


def text_of(record, field, where):
    """ The text in a field of a record. None is an empty text. """
    text = record.get(field, 0)                              # 0: there is none
    if not isinstance(text, str | None):
        raise ValueError(f'{where}: no text in field {field!r}, found {short(record)}; '
                         'choose with --field=')
    if text and len(text) > LONGEST:
        raise ValueError(f'{where}: a text of {len(text):,} characters, at most {LONGEST:,}')
    return text or ''


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

def lines_of(path, source):
    """ The lines of a text file, each with a \\n at its end. A line ends with \\n, \\r\\n or \\r;
    other characters of this kind (U+2028, form feed, ...) are text. """
    open_file = gzip.open if path.lower().endswith('.gz') else open
    opened = open_file(path, 'rb')
    is_utf8 = codecs.lookup(source.encoding).name == 'utf-8'
    # an invalid byte becomes a lone surrogate, which `cleaned` replaces
    errors = 'surrogateescape' if source.invalid_bytes == 'replace' else 'strict'
    most = LONGEST if kind_of(path) in RECORDS else LONGEST_LINE
    number = 0
    try:
        with opened, io.TextIOWrapper(opened, source.encoding, errors) as f:
            check_beginning(path, opened.peek(16) if is_utf8 else b'')
            while line := f.readline(most):
                number += 1
                if len(line) == most:
                    raise ValueError(f'{path}, line {number}: longer than {most:,} characters; '
                                     'cut it')
                yield line.removeprefix('\ufeff')             # also where files were joined
    except UnicodeError as error:
        # a block of the file was decoded, from some byte of the next line on
        before = error.object[:error.start] if isinstance(error, UnicodeDecodeError) else b''
        number += 1 + before.count(b'\n')
        raise ValueError(f'{path}, line {number}: {error}; name the encoding, such as '
                         '--encoding=latin-1, or count and replace: --invalid_bytes=replace'
                         ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f'{path}: broken gzip file ({error}); get it again') from None


def check_beginning(path, begin):
    for magic, kind in BEGINNINGS.items():
        if begin.startswith(magic) and (CONTROL.search(begin) or not magic.isalnum()):
            hint = 'name it by its kind'
            if kind.startswith('UTF'):
                hint = f'prepare.py reads it with --encoding={kind.lower()}'
            raise ValueError(f'{path}: {kind}, expected UTF-8: convert it, or {hint}')


def looks_like(path, source):
    """ The ending that the first two lines of a text file call for, or ''. """
    lines = filter(None, map(str.strip, lines_of(path, source)))
    first, second = next(lines, ''), next(lines, '')
    if re.fullmatch(r'\[|\[?\s*{("(\\.|[^"\\])*"\s*:.*)?', first):
        return '.jsonl'
    if first.startswith('>') and re.fullmatch('[A-Za-z*-]{5,}', second):
        return '.fasta'
    cells = re.split('[,\t]', first)
    return '.csv or .tsv' if source.field in cells and len(cells) > 1 else ''


def read_blocks(path, lines, split_on):
    """ The texts between blank lines; split_on='file': all of it; else between the lines that are
    split_on. """
    # a blank line, none at all, or the line that the user names
    between = dict(paragraph='', file=None).get(split_on, split_on)
    for is_between, block in itertools.groupby(lines, lambda line: line.strip() == between):
        if not is_between:
            yield joined(block, path)


def joined(lines, path):
    """ The lines as one text. """
    parts = []
    n_characters = 0
    for line in lines:
        parts.append(line)
        n_characters += len(line)
        if n_characters > LONGEST_LINE:
            raise ValueError(f'{path}: a document of more than {LONGEST_LINE:,} characters; cut '
                             'it, or choose another --split_on=')
    return ''.join(parts)

# -----------------------------------------------------------------------------
# Proteins in FASTA: a line that begins with '>' and names a protein, then lines of residues

FASTA = ('.fasta', '.fa', '.faa', '.fas', '.fsa', '.fna', '.ffn', '.frn', '.pep')
NUCLEOTIDES = re.compile('[ACGTUN]+')
GAP = re.compile('[.-]')
UNKNOWN = re.compile(f'[^{re.escape(RESIDUES)}]')
COMMENTS = (';', '#', '!')
SEQUENCE = re.compile('[A-Za-z*.-]+')                        # residues, gaps and stops


def read_fasta(path, lines, counts):
    """ The sequences of a file, in capital letters. A letter that is not in ESM's alphabet and a
    stop inside become X and are counted; gaps are left out and counted. ValueError at a line that
    is no name, comment or sequence. """
    sequence = None                                          # before the first record
    for number, line in enumerate(itertools.chain(lines, ['>']), 1):
        line = line.strip()
        where = f'{path}, line {number}'
        if line.startswith('>'):
            # the record before this line is complete
            if sequence is not None:
                sequence = sequence.upper().rstrip('*')
                n_stops = sequence.count('*')
                sequence, n_unknown = UNKNOWN.subn('X', sequence)
                counts['stops'] += n_stops
                counts['unknown_residues'] += n_unknown - n_stops
                counts['nucleotides'] += bool(NUCLEOTIDES.fullmatch(sequence))
                yield sequence
            sequence = ''
        if not line or line.startswith(('>', *COMMENTS)):
            continue
        if sequence is None or not SEQUENCE.fullmatch(line):
            expected = '">name"' if sequence is None else 'residues, ">name" or a comment with ;'
            raise ValueError(f'{where}: found {short(line)}, expected {expected}')
        letters, n_gaps = GAP.subn('', line)
        counts['gaps'] += n_gaps
        sequence += letters
        if len(sequence) > LONGEST:
            raise ValueError(f'{where}: a sequence of more than {LONGEST:,} letters')

# -----------------------------------------------------------------------------
# Records

# each reader yields (record, where); `column` is read beside source.field

def read_json_lines(path, source, column=''):
    for number, line in enumerate(lines_of(path, source), 1):
        if not line.strip():
            continue
        where = f'{path}, line {number}'
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{where}: no JSON ({error})') from None
        if not isinstance(record, dict):
            raise ValueError(f'{where}: found {short(record)}, expected a record of JSON, {{...}}')
        yield record, where


def read_table(path, source, column=''):
    """ A record of each row, as a spreadsheet reads it: a field that begins with a quote ends with
    one; between them are commas, tabs, line ends and doubled quotes. """
    csv.field_size_limit(LONGEST)
    delimiter = '\t' if kind_of(path) == '.tsv' else ','
    rows = csv.reader(lines_of(path, source), delimiter=delimiter, strict=True)
    try:
        # the names of its columns, then its rows
        names = next(rows, [])
        check_columns(path, names, source.field, column)
        for row in filter(None, rows):
            where = f'{path}, line {rows.line_num}'
            if len(row) != len(names):
                raise ValueError(f'{where}: {len(row)} fields, expected {len(names)}, one a '
                                 'column; put a text with a comma or a tab into quotes')
            if row == names != [source.field]:
                raise ValueError(f'{where}: the names of the columns again, as where two files '
                                 'were joined: take that line out')
            yield dict(zip(names, row)), where
    except csv.Error as error:
        raise ValueError(f'{path}, line {rows.line_num}: broken table ({error}); a field that '
                         'begins with a quote ends with one, and quotes in it are doubled'
                         ) from None


def check_columns(path, names, field, column=''):
    """ ValueError unless one column has each name. """
    for name, knob in ((field, '--field='), (column, '--latents_from=column:')):
        if name and names.count(name) != 1:
            raise ValueError(f'{path}: {names.count(name)} columns are called {name!r}, expected '
                             f'1, found {short(names)}; choose with {knob}')


def read_columns(path, source, column=''):
    """ Parquet and arrow: one column or two, a few rows at a time. """
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f'{path}: to read this kind of file: pip install pyarrow') from None

    field = source.field
    wanted = list(filter(None, (field, column)))
    try:
        with pyarrow.memory_map(path) as file:
            if kind_of(path) in ('.parquet', '.pq'):
                table = pyarrow.parquet.ParquetFile(file)
                check_columns(path, table.schema_arrow.names, field, column)
                groups = map(table.metadata.row_group, range(table.num_row_groups))
                largest = max((group.total_byte_size for group in groups), default=0)
                if largest > max(2**28, 200 * os.path.getsize(path)):
                    raise ValueError(f'{path}: a small file that unpacks to {largest:,} bytes')
                batches = table.iter_batches(ROWS, columns=wanted)
            elif file.read_at(6, 0) == b'ARROW1':
                table = pyarrow.ipc.open_file(file)
                check_columns(path, table.schema.names, field, column)
                batches = map(table.get_batch, range(table.num_record_batches))
            else:
                # a stream without an index, as `datasets` writes it
                batches = pyarrow.ipc.open_stream(file)
                check_columns(path, batches.schema.names, field, column)
            n_rows = 0
            for batch in batches:
                for first in range(0, batch.num_rows, ROWS):
                    for row in batch.slice(first, ROWS).select(wanted).to_pylist():
                        yield row, f'{path}, row {n_rows}'
                        n_rows += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        kind = kind_of(path)[1:]
        raise ValueError(f'{path}: broken {kind} file ({error})') from None


RECORDS = {
    '.jsonl': read_json_lines,
    '.ndjson': read_json_lines,
    '.jsonlines': read_json_lines,
    '.csv': read_table,
    '.tsv': read_table,
    '.parquet': read_columns,
    '.pq': read_columns,
    '.arrow': read_columns,
    '.feather': read_columns,
}
# what is taken from a folder; a text file that the user names may have any ending
KINDS = ('.txt', '.md', '.rst', *RECORDS, *FASTA)
