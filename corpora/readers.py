"""
Readers of files: text, FASTA, SMILES, JSON lines, tables, parquet and arrow, as streams of texts.

    for text in read_file('captions.csv.gz', source, counts):
        ...

`source` has the knobs of prepare.py; a reader uses its split_on, encoding, invalid_bytes and field.
All but parquet and arrow may be compressed (.gz). Any line ending is read as \\n. What cannot be
read is a ValueError that names the file and the line. What is unpacked is asked for its size first.

To add a kind of file, write a generator of (record, where) and name its ending in RECORDS.
"""
import codecs
import csv
import gzip
import io
import itertools
import json
import os
import re
import struct
import zlib
from collections import Counter
from typing import NamedTuple

from base.console import warn_once
from base.files import MOST_MEMORY, short, stand_in, why
from corpora.tokenizers import RESIDUES

NOT_TEXT = ('.json', '.tar')   # they would pass as text
MARKED = ('.html', '.htm', '.xhtml', '.xml', '.svg')       # text with marks, as its name says
COMPRESSED = ('.gz', '.xz', '.bz2', '.zst', '.lz4', '.br', '.z')

# how a file begins that is no text, whatever its name says -> what it is, and what to do
CONTROL = rb'.{0,9}?[\0-\x08\x0e-\x1f]'      # not in a text, which may begin with such a word
NO_TEXT = {
    rb'\xff\xfe\0\0|\0\0\xfe\xff': ('UTF-32', 'convert it, or --encoding=utf-32'),
    rb'\xff\xfe|\xfe\xff': ('UTF-16', 'convert it, or --encoding=utf-16'),
    rb'\x1f\x8b': ('gzip', 'name it .gz'),
    rb'BZh' + CONTROL: ('bzip2', 'unpack it'),
    rb'\xfd7zXZ': ('xz', 'unpack it'),
    rb'\x28\xb5\x2f\xfd': ('zstd', 'unpack it'),
    rb'PK\x03\x04|7z\xbc\xaf|Rar!\x1a': ('zip', 'unpack it; save an office file as text'),
    rb'PAR1' + CONTROL: ('parquet', 'name it .parquet'),
    rb'ARROW1' + CONTROL: ('arrow', 'name it .arrow'),
    rb'\x93NUMPY': ('npy', 'name it in --latents_from'),
    rb'SQLite format 3\0': ('SQLite', 'write its texts into a .csv'),
    rb'%PDF|%!PS|\{\\rtf|\xd0\xcf\x11\xe0': ('PDF, PostScript, RTF or Word', 'save it as text'),
    rb'\x89PNG|\xff\xd8\xff|GIF8': ('a picture', 'see --image_size'),
    rb'@[^\r\n]*\r?\n([ACGTUNacgtun.]+\r?\n\+|[ACGTUNacgtun.]{50,}\Z)':
        ('FASTQ', 'convert it to FASTA'),
}
# of the documents that were read, and of the samples of a split: what happened to some of them
COUNTED = dict(
    empty='empty',
    nul='dropped (with a NUL)',
    duplicate='duplicate',
    known='also in the input',
    invalid_utf8='with invalid UTF-8, now U+FFFD',
    unknown_residues='unknown residues, now X',
    stops='stops inside, now X',
    nucleotides='of A, C, G, T, U and N alone',
    gaps='gaps, left out',
    names='with a name behind the SMILES, cut off',
    headers='header line(s), left out',
    trimmed='with white space at their ends, taken off',
    copies='file(s) with the texts of another, left out',
    nonfinite='dropped (NaN, inf, of another scale, or no molecule)',
    longer_than_max_tokens='dropped (too many tokens)',
)

# Characters of a record's line or text: a quote that is never closed would make one of the whole
# file. A character takes up to four bytes, and a text is copied
LONGEST = MOST_MEMORY // 16
ROWS = 4                       # of a parquet file that are read at a time, at most: a small file
                               # may hold texts of any length


class Document(NamedTuple):
    text: str
    latent: object = None              # a function that reads its latent vectors, (N, D) float32
    group: str = ''                    # documents of one group go to the same split
    split: str = ''                    # that the source gives it; '': by its hash
    place: str = ''                    # where its latent comes from, for an error
    hash: int = None                   # of the text, however it is spelled; sources.py adds it


def stem_of(path):
    """ 'd/a' of d/a.CSV.gz: a path without its kind. """
    return os.path.splitext(path[:-3] if path.lower().endswith('.gz') else path)[0]


def kind_of(name):
    """ '.csv' of a.CSV.gz. """
    return os.path.splitext(name.lower().removesuffix('.gz'))[1]


def ending_of(name):
    """ '.txt.xz' of a.TXT.xz; '' where there is none. """
    stem, ending = os.path.splitext(os.path.basename(name).lower())
    if ending in COMPRESSED:
        ending = os.path.splitext(stem)[1] + ending
    # behind the last dot of a name may stand anything: a number, a part of a sentence
    return ending if re.search('[a-z]', ending) and not re.search(r'\s', ending) else ''


def count_endings(paths):
    """ The files of a folder that are passed over, as counts: {"passed over .json": 2}. They come
    in the order of the names, so that meta.json is the same every time: `paths` may be a set. """
    return Counter(f'passed over {ending_of(path)}' for path in sorted(paths))


def passed_over(counts):
    """ '3 files passed over: 2 .json, 1 without an ending', of such counts; '' of none. """
    found = Counter()                                        # {ending: how many}
    for name, n in counts.items():
        if name.startswith('passed over '):
            found[name.removeprefix('passed over ')] = n
    n_files = sum(found.values())
    if not n_files:
        return ''

    # the eight endings that most of them have, then how many others there are
    said = []
    n_others = n_files
    for ending, n in found.most_common(8):
        said.append(f'{n:,} {ending or "without an ending"}')
        n_others -= n
    if n_others:
        said.append(f'{n_others:,} others')
    what = 'file' if n_files == 1 else 'files'
    return f'{n_files:,} {what} passed over: {", ".join(said)}'


def counted(counts):
    """ ['3 empty', '2 duplicate'] of the counts of a source, or of a split. """
    said = [f'{counts[name]:,} {words}' for name, words in COUNTED.items() if counts.get(name)]
    said += [f'{n:,} {name}' for name, n in counts.items() if name.startswith('icons: ')]
    return [*said, *filter(None, [passed_over(counts)])]


def read_file(path, source, counts):
    """ The texts of one file. """
    kind = kind_of(path)
    if kind in RECORDS:
        for record, where in RECORDS[kind](path, source):
            yield text_of(record, source.field, where)
    elif kind in FASTA:
        yield from read_fasta(path, lines_of(path, source), counts)
    elif kind in SMILES:
        yield from read_smiles(path, lines_of(path, source), counts)
    else:
        # plain text, whatever its name. Its first lines may look like another kind: then we say so,
        # and go on, for a text may begin like one
        lines = lines_of(path, source)
        first = list(itertools.islice(lines, 9))
        look = looks_like(first, source.field)
        if look:
            warn_once(f'{path} is read as plain text, but looks like {look}: name it so')
        lines = itertools.chain(first, lines)
        yield from lines if source.split_on == 'line' else read_blocks(path, lines, source.split_on)


def text_of(record, field, where):
    """ The text in a field of a record. None is an empty text. """
    text = record.get(field, 0)                              # 0: there is none
    if not isinstance(text, str | None):
        raise ValueError(f'{where}: no text in field {field!r}, found {short(record)}; '
                         'choose with --field=')
    check_length(len(text or ''), where)
    return text or ''


def check_length(n, where):
    """ ValueError for a text of a record with more than LONGEST characters. """
    if n > LONGEST:
        raise ValueError(f'{where}: a text of {n:,.0f} characters or more, at most {LONGEST:,}')


def inside(folder, path, where):
    """ The full path of a file that another file names. It must lie in the folder. """
    root = os.path.realpath(folder)
    full = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([root, full]) != root:
        raise ValueError(f'{where}: {path} lies outside of {folder}')
    return full


def walk_folders(folder):
    """ (folder, names of its files) of this folder and all below it, but hidden ones. Links are
    followed, each real folder once. """
    # by default os.walk passes over a folder that it may not read
    def stop(error):
        raise error

    seen = set()
    for root, folders, files in os.walk(folder, onerror=stop, followlinks=True):
        if os.path.realpath(root) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        folders[:] = [name for name in sorted(folders) if name[0] != '.']
        yield root, [name for name in files if name[0] != '.']


def walk(folder):
    """ The paths of all files below a folder, but hidden ones. """
    return [os.path.join(root, name) for root, names in walk_folders(folder) for name in names]

# -----------------------------------------------------------------------------
# Text

def longest_of(path):
    """ How many characters a line or a document of plain text may have. It may be larger than
    LONGEST where its file is as large on the disk: text8 is one line. A text becomes three to ten
    times as large when it is unpacked; what grows more is no usual text. """
    most = os.path.getsize(path) * (16 if path.lower().endswith('.gz') else 1)
    return max(LONGEST, most)


def lines_of(path, source):
    """ The lines of a text file, each with a \\n at its end. A line ends with \\n, \\r\\n or \\r;
    other characters of this kind (U+2028, form feed, ...) are text. """
    open_file = gzip.open if path.lower().endswith('.gz') else open
    opened = open_file(path, 'rb')
    # an invalid byte becomes a lone surrogate, which sources.py replaces
    errors = 'surrogateescape' if source.invalid_bytes == 'replace' else 'strict'
    most = LONGEST if kind_of(path) in RECORDS else longest_of(path)
    number = 0
    try:
        with opened, io.TextIOWrapper(opened, source.encoding, errors) as f:
            check_beginning(path, opened.peek(4096)[:4096], source)
            while line := f.readline(most + 1):
                number += 1
                if len(line) > most:
                    raise ValueError(f'{path}, line {number}: longer than {most:,} characters; '
                                     'cut it')
                yield line.removeprefix('\ufeff')             # also where files were joined
    except UnicodeError as error:
        # a block of the file was decoded, from some byte of the next line on
        before = error.object[:error.start] if isinstance(error, UnicodeDecodeError) else b''
        number += 1 + before.count(b'\n')
        raise ValueError(f'{path}, line {number}: {error}; name the encoding, such as '
                         '--encoding=latin-1 or --encoding=utf-16, or count and replace: '
                         '--invalid_bytes=replace'
                         ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f'{path}: broken gzip file ({why(path, error)}); get it again') from None


def check_beginning(path, begin, source):
    """ ValueError where the first bytes of a file are of no text. """
    # something that lies in the place of the file, as a page that a server sent. A file with marks
    # may begin as such a page does
    words = stand_in(begin)
    if begin.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b'<'):
        words = '' if kind_of(path) in MARKED else words and f'{words}; or, as text, name it .html'
    if words:
        raise ValueError(f'{path}: {words}')

    # a file of another kind. UTF-16 is text, where the user has named that encoding
    is_utf8 = codecs.lookup(source.encoding).name == 'utf-8'
    found = unmarked(begin) if is_utf8 else None
    for pattern, kind in NO_TEXT.items():
        if re.match(pattern, begin, re.DOTALL) and (is_utf8 or not kind[0].startswith('UTF')):
            found = kind
            break
    if found:
        raise ValueError(f'{path}: {found[0]}, expected UTF-8 text: {found[1]}')


def unmarked(begin):
    """ As in NO_TEXT, of UTF-16 or UTF-32 without a mark: the upper half of the bytes of many
    characters is 0, the lowest byte of hardly any. """
    for width in (4, 2):
        # how often each byte of a character is 0
        zeros = [begin[i::width].count(0) for i in range(width)]
        half = width // 2
        for order, lowest, upper in (('le', zeros[0], zeros[half:]),
                                     ('be', zeros[-1], zeros[:half])):
            if min(upper) > 2 + 20 * lowest and min(upper) > len(begin) / 100:
                codec = f'utf-{8 * width}-{order}'
                return codec.upper(), f'convert it, or --encoding={codec}'
    return None


def looks_like(lines, field):
    """ The ending that the first lines of a text file call for, or ''. """
    # the first two that are not blank
    texts = filter(None, (line[:1000].strip() for line in lines))
    first = next(texts, '')
    second = next(texts, '')
    if re.fullmatch(r'\[|\[?\s*{("(\\.|[^"\\])*"\s*:.*)?', first):
        return '.jsonl'
    if first.startswith('>') and re.fullmatch('[A-Za-z*-]{5,}', second):
        return '.fasta'

    # a table: the names of columns, or a name or two rows in quotes
    cells = [cell.strip('"') for cell in re.split(f'[{DELIMITERS}]', first)]
    is_named = field in cells and (len(cells) > 1 or first != field)
    quoted = re.compile(f'"[^"]*"([{DELIMITERS}]"[^"]*")+')
    is_quoted = quoted.fullmatch(first) and quoted.fullmatch(second)
    return '.csv or .tsv' if is_named or is_quoted else ''


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
    most = longest_of(path)
    for line in lines:
        parts.append(line)
        n_characters += len(line)
        if n_characters > most:
            raise ValueError(f'{path}: a document of more than {most:,} characters; cut it, or '
                             'choose another --split_on=')
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
# Molecules: a line of SMILES, and behind white space a name and whatever else

SMILES = ('.smi', '.smiles', '.ism', '.can')
# atoms, or anything in brackets, at least one; bonds, branches, rings, reactions
MOLECULE = re.compile(r'(?=.*[A-Za-z*])(\[[^\]\s]+\]|Cl|Br|[BCNOPSFIbcnops*]|[-=#$:/\\.~()%\d>])+')


def read_smiles(path, lines, counts):
    """ The first column. The others are cut off, and counted, and so is a first line of names.
    ValueError at another line that is no SMILES. """
    for number, line in enumerate(lines, 1):
        smiles, *others = line.split() or ['']
        if smiles and not MOLECULE.fullmatch(smiles):
            if number == 1:
                counts['headers'] += 1
                continue
            raise ValueError(f'{path}, line {number}: found {short(line)}, expected SMILES, and '
                             'behind white space what else there is')
        counts['names'] += bool(others)
        yield smiles

# -----------------------------------------------------------------------------
# Records

# each reader yields (record, where); it reads `column` as well as source.field

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


DELIMITERS = ',;\t|'


def table_of(path, lines, fits, **form):
    """ (a csv.reader of a table's lines, how many lines stand before them). A first line `sep=;`
    names the delimiter. Else it is that by which the first row `fits`, (list of its fields) ->
    bool, or else has several; a comma or a tab, as the file is named, comes first. """
    # a line that names the delimiter, as Excel writes it
    first = next(lines, '')
    named = re.fullmatch(r'"?sep=(.)"?\s*', first, re.IGNORECASE)
    if named:
        return csv.reader(lines, delimiter=named[1], **form), 1

    # the first row, cut by each delimiter that there may be. It is not judged yet, so a quote that
    # is never closed is no error here
    usual = '\t' if kind_of(path) == '.tsv' else ','
    columns = {one: next(csv.reader([first], delimiter=one, **form | dict(strict=False)), [])
               for one in (usual, *DELIMITERS)}
    likely = [one for one in columns if fits(columns[one])]
    likely += [one for one in columns if len(columns[one]) > 1]
    delimiter = [*likely, usual][0]
    return csv.reader(itertools.chain([first], lines), delimiter=delimiter, **form), 0


def read_table(path, source, column=''):
    """ A record of each row, as a spreadsheet reads it: a field that begins with a quote ends with
    one; between them are delimiters, line ends and doubled quotes. """
    csv.field_size_limit(LONGEST)
    lines = lines_of(path, source)
    table, n_before = table_of(path, lines, lambda names: source.field in names, strict=True)
    try:
        # the names of its columns, then its rows
        rows = filter(None, table)
        names = next(rows, [])
        check_columns(path, names, source.field, column)
        for row in rows:
            where = f'{path}, line {n_before + table.line_num}'
            if len(row) != len(names):
                raise ValueError(f'{where}: {len(row)} fields, expected {len(names)}, one a '
                                 f'column; put a text with {table.dialect.delimiter!r} into '
                                 'quotes')
            if row == names != [source.field]:
                raise ValueError(f'{where}: the names of the columns again, as where two files '
                                 'were joined: take that line out')
            yield dict(zip(names, row)), where
    except csv.Error as error:
        raise ValueError(f'{path}, line {n_before + table.line_num}: broken table ({error}); a '
                         'field that begins with a quote ends with one, and quotes in it are '
                         'doubled') from None


def check_columns(path, names, field, column=''):
    """ ValueError unless one column has each name. """
    for name, knob in ((field, '--field='), (column, '--latents_from=column:')):
        if name and names.count(name) != 1:
            raise ValueError(f'{path}: {names.count(name)} columns are called {name!r}, expected '
                             f'1, found {short(names)}; choose with {knob}')

# ---- columns of parquet and arrow

def read_columns(path, source, column=''):
    """ A column of texts, and one of latents if it is named, a few rows at a time. """
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f'{path}: to read this kind of file: pip install pyarrow') from None

    # both give batches of a few rows; only the columns that are wanted are unpacked
    batches_of = parquet_batches if kind_of(path) in ('.parquet', '.pq') else arrow_batches
    n_rows = 0
    try:
        with pyarrow.memory_map(path) as file:
            for batch in batches_of(path, file, source.field, column):
                latents = batch.column(column).to_pylist() if column else [None] * len(batch)
                for cell, latent in zip(batch.column(source.field), latents):
                    yield ({source.field: text_of_cell(cell, path), column: latent},
                           f'{path}, row {n_rows}')
                    n_rows += 1
    except (pyarrow.ArrowException, UnicodeDecodeError, struct.error) as error:
        kind = kind_of(path)[1:]
        raise ValueError(f'{path}: broken {kind} file ({why(path, error)})') from None


def text_of_cell(cell, path):
    """ The text of a scalar of arrow, or None. One that is too long is not copied first. """
    cell = getattr(cell, 'value', cell)                      # which that of a dictionary stands for
    if cell is None or not cell.is_valid:
        return None
    check_length(cell.as_buffer().size / 4, path)
    return cell.as_py()


def parquet_batches(path, file, field, column):
    import pyarrow.parquet
    table = pyarrow.parquet.ParquetFile(file)
    wanted = check_kinds(path, table.schema_arrow, field, column)

    # a page of a column may be all of a group's
    largest = 0
    for i in range(table.num_row_groups):
        group = table.metadata.row_group(i)
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema.split('.')[0] in wanted:
                check_unpacked(path, chunk.total_uncompressed_size, chunk.total_compressed_size)
                largest = max(largest, chunk.total_uncompressed_size)
    n_rows = min(ROWS, max(1, MOST_MEMORY // max(1, largest)))
    return table.iter_batches(n_rows, columns=wanted)


def arrow_batches(path, file, field, column):
    """ Of a stream, as `datasets` writes it, or of a file, which is a stream between two marks. """
    import pyarrow.ipc
    begin = 8 if file.read_at(6, 0) == b'ARROW1' else 0
    file.seek(begin)
    schema = pyarrow.ipc.open_stream(file).schema
    wanted = check_kinds(path, schema, field, column)

    # every message is asked how large it is when it is unpacked, before one of them is
    file.seek(begin)
    for message in pyarrow.ipc.MessageReader.open_stream(file):
        if message.type != 'schema':
            check_unpacked(path, unpacked_bytes(message), message.body.size)

    # then they are read, a slice of each at a time
    file.seek(begin)
    fields = sorted(map(schema.get_field_index, wanted))
    options = pyarrow.ipc.IpcReadOptions(included_fields=fields)
    for batch in pyarrow.ipc.open_stream(file, options=options):
        for first in range(0, len(batch), ROWS):
            yield batch.slice(first, ROWS)


TEXTS = re.compile('(large_)?string(_view)?|null')
LATENTS = re.compile('(large_|fixed_size_)?list<.*: (halffloat|float|double)( not null)?>.*')


def check_kinds(path, schema, field, column):
    """ The names of the columns that are wanted. ValueError unless `field` holds texts, and
    `column`, if it is named, texts or lists of floats. Another kind could unpack to any size. """
    check_columns(path, schema.names, field, column)
    kind = schema.field(field).type
    kind = str(getattr(kind, 'value_type', kind) if 'dictionary' in str(kind) else kind)
    if not TEXTS.fullmatch(kind):
        raise ValueError(f'{path}: no text in field {field!r}, found a column of {short(kind)}; '
                         'choose with --field=')
    if not column:
        return [field]
    kind = str(schema.field(column).type)
    if not TEXTS.fullmatch(kind) and not LATENTS.fullmatch(kind):
        raise ValueError(f'{path}: no latent in {column!r}, found a column of {short(kind)}, '
                         'expected lists of floats; choose with --latents_from=column:')
    return [field, column]


def check_unpacked(path, n_bytes, n_packed):
    """ ValueError where a part of a file becomes much larger when it is unpacked, and large. """
    if n_bytes > max(MOST_MEMORY, 16 * n_packed):
        raise ValueError(f'{path}: {n_packed:,} bytes of it unpack to {n_bytes:,}, at most '
                         f'{MOST_MEMORY:,}: write it in smaller groups of rows')


def unpacked_bytes(message):
    """ How many bytes the buffers of a batch of arrow have when they are unpacked. Each begins with
    this number. Where they lie is said in flatbuffers, by arrow's Message.fbs. """
    head = message.metadata

    def number(form, at):
        return struct.unpack_from(f'<{form}', head, at)[0]

    def field(table, i):
        """ Where field i of a table lies, or None. """
        fields = table - number('i', table)
        is_there = 4 + 2 * i < number('H', fields) and number('H', fields + 4 + 2 * i)
        return table + is_there if is_there else None

    def follow(at):
        return at + number('I', at)

    # the batch of a message, or of a dictionary in it; whether it is packed; its buffers
    batch = follow(field(follow(0), 2))
    if message.type == 'dictionary':
        batch = follow(field(batch, 1))
    if field(batch, 2) is None or field(batch, 3) is None:
        return 0
    buffers = follow(field(batch, 2))
    n_bytes = 0
    for i in range(number('I', buffers)):
        begin, length = struct.unpack_from('<qq', head, buffers + 4 + 16 * i)
        if length:
            n_bytes += max(0, struct.unpack_from('<q', message.body, begin)[0])
    return n_bytes


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
KINDS = ('.txt', '.md', '.rst', *RECORDS, *FASTA, *SMILES)
