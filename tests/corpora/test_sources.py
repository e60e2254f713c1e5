"""
Every kind of source as sentences: the same documents whatever holds them, each of them counted, and
latents that stay with their text. Each test has an empty folder to itself, and is in it.
"""
import csv
import gzip
import json
import os
from collections import Counter

import numpy as np
import pytest

from corpora import hub, images, readers, sources
from corpora.images import image_patches
from corpora.layouts import export
from corpora.sources import documents
from corpora.tokenizers import RESIDUES, load_tokenizer
from data import PackedDataset, read_meta
from encoders import CODE, find_encoder
from launch import prepared, source_of, texts_of
from toys import LINES, WORDS, put, save_encoder, write_lines

pytestmark = pytest.mark.usefixtures('here')


def read_all(**knobs):
    """ (documents, counts) of a source. """
    counts = Counter()
    return list(documents(source_of(**knobs), counts)), counts


def texts(path, **knobs):
    return [document.text for document in read_all(input=path, **knobs)[0]]


def refused(words, path, **knobs):
    with pytest.raises(ValueError, match=words):
        texts(path, **knobs)


def packed(out='./out', **knobs):
    """ A dataset of text alone, or of latents that are given. """
    return prepared(**dict(encoder='none', tokenizer='byte', out=out) | knobs)


def n_of(folder, what):
    """ The sum of a count of both splits. """
    return sum(split[what] for split in read_meta(folder)['splits'].values())


def of_both(folder):
    return texts_of(folder, 'train') + texts_of(folder, 'val')

# -----------------------------------------------------------------------------
# Text, records, tables

@pytest.mark.parametrize('split_on, expected', [
    ('line', ['one', 'two\x0cstill two', 'thr\u2028ee', '%', 'joined']),
    ('paragraph', ['one\ntwo\x0cstill two', 'thr\u2028ee\n%\njoined']),
    ('file', ['one\ntwo\x0cstill two\n\n  \nthr\u2028ee\n%\njoined']),
    ('%', ['one\ntwo\x0cstill two\n\n  \nthr\u2028ee', 'joined'])])
def test_what_a_document_is_whatever_ends_the_lines(split_on, expected):
    content = '\ufeffone\ntwo\x0cstill two\n\n  \nthr\u2028ee\n%\n\ufeffjoined'
    for end in ('\n', '\r\n', '\r'):
        put('a.txt', content.replace('\n', end))
        assert texts('a.txt', split_on=split_on) == expected
    if split_on == 'line':
        assert read_all(input='a.txt')[1] == Counter(read=7, kept=5, empty=2, invalid_utf8=0)


def test_every_kind_of_file_folders_and_globs_give_the_same_documents():
    expected = ['one, "quoted"', 'two\nlines', 'naïve 🙂', 'x' * 200_000]
    records = ''.join(json.dumps(dict(text=text, n=1)) + '\n\n' for text in expected)
    of_records = ['a/a.jsonl', 'a/b.ndjson', 'a/c.JSONLINES']
    for path in of_records:
        put(path, records)
    os.mkdir('a/s')
    for path, delimiter in (('a/s/d.csv', ','), ('a/s/e.tsv', '\t')):
        with open(path, 'w', newline='') as f:
            csv.writer(f, delimiter=delimiter).writerows([['id', 'text'], *enumerate(expected)])
    put('a/c.txt.gz', 'zipped\n')
    put('a/notes.cfg', 'not taken from a folder')
    put('a/d5²6.md', 'marked\n')
    assert texts('a') == expected * 3 + ['zipped', 'marked'] + expected * 2
    for path in [*of_records, 'a/s/d.csv', 'a/s/e.tsv']:
        assert texts(path) == expected
    assert texts('a/*.gz, a/notes.cfg') == ['zipped', 'not taken from a folder']
    os.mkfifo('a/pipe.txt')
    refused('pipe.txt: .*cannot be read twice', 'a')


def test_a_table_is_read_as_pandas_writes_it():
    put('a.tsv', 'id\ttext\tlabel\n1\tHe said "no\tx\n2\t"He said ""stop""\tand\r\nleft"\tnews\n\n'
                 '3\tplain\t""\n')
    assert texts('a.tsv') == ['He said "no', 'He said "stop"\tand\nleft', 'plain']


@pytest.fixture
def pyarrow():
    pyarrow = pytest.importorskip('pyarrow', reason='reads parquet: pip install pyarrow')
    import pyarrow.parquet
    return pyarrow


def write_arrow(pyarrow, path, table, rows=None, **options):
    """ A file of the kind that its name says: .feather, which is a file, or .arrow, a stream. """
    write = pyarrow.ipc.new_file if path.endswith('.feather') else pyarrow.ipc.new_stream
    with write(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as f:
        f.write_table(table, max_chunksize=rows)


def test_parquet_and_arrow_read_as_the_lines_do(pyarrow):
    words = pyarrow.array(LINES[:149] + [None])
    table = pyarrow.table(dict(text=words, category=words.dictionary_encode(), n=[7] * 150))
    pyarrow.parquet.write_table(table, 'a.pq', row_group_size=40)
    for name in ('b.feather', 'c.arrow'):
        write_arrow(pyarrow, name, table, 40)
    found, counts = read_all(input='.')
    assert [document.text for document in found] == LINES[:149] * 3
    assert counts == Counter(read=450, kept=447, empty=3, invalid_utf8=0)
    for name in ('a.pq', 'b.feather', 'c.arrow'):
        assert texts(name, field='category') == LINES[:149]
        refused(f"{name}: 0 columns are called 'body'.*--field", name, field='body')
        refused(f'{name}(, row 0)?: no text in field.*--field', name, field='n')
        os.truncate(name, 300)
        refused(f'{name}: broken', name)


LFS = b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n'
FASTQ = b'@read 1\nACGTACGT\n+\nIIIIIIII\n'


@pytest.mark.parametrize('name, content, words', [
    ('a.txt', b'\n \n', 'no documents'),
    ('a.csv', b'text\n' * 10, r'9 document\(s\) are all the same text'),

    # bytes of another encoding
    ('a.txt', 'hello'.encode('utf-16'), 'UTF-16, expected UTF-8.*--encoding=utf-16'),
    ('a.txt', 'hello'.encode('utf-32'), 'UTF-32, expected UTF-8.*--encoding=utf-32'),
    ('a.jsonl', '{"text": "a"}\n'.encode('utf-16-le'), '--encoding=utf-16-le'),
    ('a.txt', 'привет, dog\n'.encode('utf-16-be') * 9, '--encoding=utf-16-be'),
    ('a.csv', 'id,text\n1,a\n'.encode('utf-32-le'), '--encoding=utf-32-le'),
    ('a.txt', b'one\ntwo\ncaf\xe9\n', "line 3: 'utf-8' codec .* 0xe9 .*--encoding=latin-1"),
    ('a.txt', b'one\n' * 9999 + b'\xe9', "line 10000: 'utf-8' codec .* 0xe9"),
    ('a.txt.gz', b'a\nb\n\xff', "line 3: 'utf-8' codec .* 0xff"),
    ('a.fasta', b'>a\nMK\n>caf\xe9\nMK\n', "line 3: 'utf-8' codec"),

    # what is no text
    ('a.txt', b'PAR1\x15', 'parquet, expected UTF-8'),
    ('a.csv', b'PK\x03\x04', 'zip, expected UTF-8'),
    ('a.fa', gzip.compress(b'one', mtime=0), 'gzip, expected UTF-8'),
    ('a.json', b'[]', 'cannot read this kind'),
    ('a.txt', LFS, 'a Git LFS pointer: .*git lfs pull'),
    ('a.html', LFS, 'a Git LFS pointer'),
    ('a.txt.gz', LFS, 'a Git LFS pointer'),
    ('a.csv', b'\n<!doctype HTML>\n<p>404</p>\n', 'a page of HTML'),
    ('a.jsonl', b'\xef\xbb\xbf<?xml version="1.0"?><Error>', 'a page of HTML or XML'),
    ('a.txt', b'404: Not Found', 'what a server says'),
    ('a.txt', FASTQ, 'FASTQ, .*FASTA'),
    ('a.fa', FASTQ, 'FASTQ, .*FASTA'),
    ('a.txt', b'@a\n' + b'ACGT' * 9999, 'FASTQ'),
    ('a.txt', b'{\\rtf1 a dog}', 'RTF'),

    # records
    ('a.jsonl', b'{"text": "a"}\n{"body": "b"}\n', "line 2.*'text'.*--field"),
    ('a.jsonl', b'{"text": 3}\n', "no text in field 'text', found {'text': 3}"),
    ('a.jsonl', b'{oops\n', 'line 1: no JSON'),
    ('a.jsonl', b'\n' + b'[' * 100_000, 'line 2: no JSON .*recursion'),
    ('a.jsonl', b'{"text": "a"}\nnull\n', 'line 2: found None, expected a record of JSON'),
    ('a.csv', b'x,y\n1,2\n', "0 columns are called 'text'.*x.*--field"),
    ('a.csv', b'id;body\n1;a\n', r"0 columns are called 'text'.*\['id', 'body'\]"),
    ('a.csv', b'text,id,text\na,1,b\n', "2 columns are called 'text'"),
    ('a.csv', b'text,n\na,1\ntext,n\n', 'line 3: the names of the columns again'),
    ('a.csv', b'id,text\n1,A dog, running\n', 'line 2: 3 fields, expected 2, one a column'),
    ('a.csv', b'sep=;\nid;text\n1;a;b\n', 'line 3: 3 fields, expected 2'),
    ('a.csv', b'id,text\n1,a\n2,"b"c\n', 'line 3: broken table'),
    ('a.csv', b'text\n"a\nb\n', 'broken table'),
    ('a.smi', b'CCO ethanol\nsome words\n', "line 2: found 'some words.*expected SMILES")])
def test_what_cannot_be_read_stops_with_file_and_line(name, content, words):
    put(name, content)
    with pytest.raises(ValueError, match=f'{name}.*{words}'):
        prepared(input=name, out='./out')


def test_a_file_that_is_not_packed_or_not_whole_is_a_broken_gzip():
    whole = put('whole.gz', 'hello\n' * 999).read_bytes()
    for content in (b'plain', whole[:-20]):
        with open('a.txt.gz', 'wb') as f:
            f.write(content)
        refused('a.txt.gz: broken gzip', 'a.txt.gz')


def test_other_encodings_are_read_and_what_is_not_of_them_is_replaced_and_counted():
    expected = ['naïve café', 'größer', 'plain']
    for encoding in ('utf-8-sig', 'latin-1', 'cp1252', 'utf-16', 'UTF8'):
        put('a.txt', '\n'.join(expected).encode(encoding))
        assert texts('a.txt', encoding=encoding) == expected, encoding
    refused('a.txt, line 1: .*--encoding=', 'a.txt', encoding='utf-16')
    put('a.txt', b'one\ncaf\xe9\n\0\0no text\n')
    found, counts = read_all(input='a.txt', invalid_bytes='replace')
    assert [document.text for document in found] == ['one', 'caf\ufffd'] and counts['nul'] == 1

    # JSON can write half a character
    put('a.jsonl', '{"text": "b \\ud800"}')
    found, also = read_all(input='a.jsonl')
    assert found[0].text == 'b \ufffd' and counts['invalid_utf8'] == also['invalid_utf8'] == 1


def test_a_page_that_is_named_so_is_text():
    put('a.html', '<!doctype html>\n<p>a dog</p>\n')
    assert texts('a.html') == ['<!doctype html>', '<p>a dog</p>']


def test_what_shows_nothing_is_an_empty_document():
    lines = ['a dog', r'\N', '\u200b', '\ufeff\u2060', '\u3164', '\xad', '\u2800', '\x1b',
             'b\u200bc']
    found, counts = read_all(input=write_lines('a.txt', lines))
    assert [document.text for document in found] == ['a dog', 'b\u200bc']
    assert +counts == Counter(read=9, kept=2, empty=7)
    put('a.tsv', 'id\ttext\n1\t\\N\n2\ta\n')
    assert texts('a.tsv') == ['a']


@pytest.mark.parametrize('name, content, split_on, n', [
    ('a.txt', '    return 2\n\tx\nplain\ntrail \r\n\n', 'line', 3),
    ('a.txt', '\n  one\n  two\n\nthree\n\n', 'paragraph', 1),
    ('a.txt', 'one\n  two\n\n', 'file', 0),
    ('a.jsonl', '{"text": " a"}\n{"text": "a\\n"}\n{"text": "a "}\n', 'line', 2)])
def test_white_space_that_is_taken_off_is_counted(name, content, split_on, n):
    put(name, content)
    assert read_all(input=name, split_on=split_on)[1]['trimmed'] == n


@pytest.mark.parametrize('name, content', [
    ('a.csv', 'id;text;price\n1;"a, b";0,50\n'), ('a.csv', '"id";"text"\n"1";"a, b"\n'),
    ('a.csv', 'sep=;\nid;text\n1;a, b\n'), ('a.csv', '\ufeff"sep=,"\nid,text\n1,"a, b"\n'),
    ('a.csv', 'id|text\n1|a, b\n'), ('a.csv', 'id\ttext\n1\ta, b\n'),
    ('a.tsv', 'id,text\n1,"a, b"\n'), ('a.csv', 'text\n"a, b"\n'), ('a.tsv', 'text\na, b\n')])
def test_the_delimiter_of_a_table_is_found(name, content):
    put(name, content)
    assert texts(name) == ['a, b']


def test_of_smiles_the_first_column_is_read_and_the_rest_counted():
    put('a.smi', 'SMILES Name\nCCO ethanol\n  C[C@@H](N)C(=O)O\tL-alanine x\n[Na+].[Cl-]\n\n')
    put('b.smi.gz', '# smiles\tid\nClCCBr\t7\n')
    found, counts = read_all(input='.')
    assert [document.text for document in found] == ['CCO', 'C[C@@H](N)C(=O)O', '[Na+].[Cl-]',
                                                     'ClCCBr']
    assert +counts == Counter(read=5, kept=4, empty=1, names=3, headers=2)


@pytest.mark.parametrize('name, content, words', [
    ('a.txt.gz', 'x\n' + 'x' * 10_001, 'line 2: longer than 10,000'),
    ('a.jsonl', 'x' * 10_001, 'line 1: longer than 10,000'),
    ('b.txt.gz', 'many lines\n' * 1000, 'a document of more than 10,000'),
    ('a.csv', 'text\n"' + 'never closed\n' * 1000, 'broken table'),
    ('a.fasta', '>a\n' + 'MKV\n' * 4000, 'a sequence of more than 10,000')])
def test_no_line_is_held_in_memory_without_an_end(monkeypatch, name, content, words):
    monkeypatch.setattr(readers, 'LONGEST', 10_000)                      # else 2^24
    put(name, content)
    refused(f'{name}.*{words}', name, split_on='file' if name == 'b.txt.gz' else 'line')


def test_what_is_as_large_on_the_disk_is_no_surprise(monkeypatch):
    monkeypatch.setattr(readers, 'LONGEST', 10_000)
    usual = np.random.default_rng(0).bytes(10_000).hex()                 # packed to about a half
    for name in ('c.txt', 'd.txt.gz'):
        put(name, usual)
        assert texts(name) == texts(name, split_on='file') == [usual]
    with pytest.raises(ValueError, match='a.pq: a text of 10,001 characters'):
        readers.text_of(dict(text='x' * 10_001), 'text', 'a.pq')


@pytest.mark.parametrize('packed', ['zstd', 'lz4'])
def test_a_column_is_refused_by_its_size_before_it_is_unpacked(pyarrow, monkeypatch, packed):
    plain = pyarrow.array(['a' * 200_000, 'a' * 200_000 + 'b'])

    # in any kind of file; what is not packed may be as large as its file
    for name, column in (('plain', plain), ('dictionary', plain.dictionary_encode())):
        table = pyarrow.table(dict(text=column))
        pyarrow.parquet.write_table(table, f'{name}.parquet', compression=packed)
        for kind in ('feather', 'arrow'):
            write_arrow(pyarrow, f'{name}.{kind}', table, compression=packed)
            write_arrow(pyarrow, f'large_{name}.{kind}', table)
    names = sorted(os.listdir())
    assert len(names) == 10 and all(len(texts(name)[0]) == 200_000 for name in names)
    monkeypatch.setattr(readers, 'MOST_MEMORY', 100_000)
    monkeypatch.setattr(readers, 'text_of_cell', lambda *args: pytest.fail('it is unpacked'))
    for name in names:
        if not name.startswith('large'):
            refused(f'{name}: .* unpack to ', name)


def test_a_column_of_no_texts_is_refused_by_its_type(pyarrow):
    """ A list of a few bytes may unpack to any length. """
    table = pyarrow.table(dict(text=pyarrow.array([['a'] * 100_000])))
    pyarrow.parquet.write_table(table, 'a.parquet')
    write_arrow(pyarrow, 'a.feather', table)
    for name in ('a.parquet', 'a.feather'):
        refused(f'{name}: no text in .* column of .list', name)


def test_documents_that_would_not_fit_into_memory_together_stop_at_once(monkeypatch):
    lines = [f'{i} ' + 'x' * (i * 617 % 2000) for i in range(40)]
    knobs = dict(input=write_lines('a.txt', lines), val_fraction=.2)
    monkeypatch.setattr(sources, 'MOST_MEMORY', 20_000)
    with pytest.raises(ValueError, match='documents of one shard take .*--shard_size=10'):
        packed(**knobs)
    packed('./b', shard_size=9, **knobs)

    # nor does the sample that is fitted on; it is the same in any order
    def sample(path):
        _, _, found, _, _ = sources.read_once(source_of(shard_size=9, input=path), 0)
        return sorted(found)
    found = sample('a.txt')
    assert 5 < len(found) < 30 and sample(write_lines('b.txt', lines[::-1])) == found


# ---- files of a folder, of a glob, of a list

def test_two_stars_go_through_all_folders_and_a_comma_may_belong_to_a_name():
    for i, name in enumerate(('top.txt', 'c/middle.txt', 'c/d/deep, er.txt', 'c/d/x.md')):
        put(f'a, b/{name}', f'{i}\n')
    for spec, expected in (('a, b/**/*.txt', '120'), ('a, b/**', '1230'), ('a, b', '1230'),
                           ('a, b/c/*', '123'), ('a, b/c/d/deep, er.txt', '2'),
                           ('a, b/top.txt, a, b/c/d/*.md', '03')):
        assert sorted(texts(spec)) == sorted(expected), spec
    assert ('c/d/deep, er.txt', 'a, b/c/d/deep, er.txt') in sources.list_files('a, b/**/*.txt')
    assert sources.list_files('**/d/*.md') == [('a, b/c/d/x.md', './a, b/c/d/x.md')]
    os.symlink('..', 'a, b/c/up')                            # 2 of them were followed 2^40 times
    assert sorted(sources.matches('a, b/**/*.md')) == ['a, b/c/d/x.md']
    np.save('a, b/z.npy', np.arange(8.).reshape(4, 2))
    found, _ = read_all(input='a, b', latents_from='a, b/z.npy')
    assert [document.latent()[0, 0] for document in found] == [0, 2, 4, 6]
    meta = read_meta(packed(input='a, b/top.txt,a, b/c/d/x.md', val_input='a, b/c/middle.txt'))
    assert meta['source']['input'] == ['top.txt', 'x.md']
    refused(r'a, b/\*\*/\*.csv: no such file|a: no such file', 'a, b/**/*.csv')


def test_files_of_a_folder_that_are_passed_over_are_counted_by_their_endings(capsys):
    write_lines('in/a.txt')
    for name in ('b.json', 'sub/c.JSON', 'd', 'e.txt.xz', 'f.text', '.hidden', 'sub/.also.txt'):
        put(f'in/{name}', 'not taken\n')
    counts = read_meta(packed(input='in'))['counts']['input']
    said = '5 files passed over: 2 .json'
    printed = capsys.readouterr()
    assert said in printed.err and said in printed.out and '1 without an ending' in printed.err
    assert counts['passed over .json'] == 2 and counts['passed over .txt.xz'] == 1
    os.remove('in/a.txt')
    refused(f'in: {said}.*expected one ending', 'in')

    # texts and latents may share a folder
    for i in range(2):
        put(f'in/{i}.txt', f'{i}\n')
        np.save(f'in/{i}.npy', np.full((1, 3), i, np.float32))
    found, counts = read_all(input='in', latents_from='in')
    assert [document.latent()[0, 0] for document in found] == [0, 1]
    assert sum(n for name, n in counts.items() if name.startswith('passed over')) == 5


@pytest.mark.parametrize('names, n_copies', [
    (('n.txt', 'n.txt.gz'), 1), (('n.TXT', 'n.txt.GZ'), 1), (('n.csv', 'n.jsonl', 'n.txt.gz'), 2),
    (('n.txt', 'm.txt.gz'), 0), (('n.txt', 'sub/n.txt'), 0)])
def test_a_file_in_two_forms_is_read_once(capsys, names, n_copies):
    forms = {'.csv': 'id,text\n1,a\n2,b\n', '.jsonl': '{"text": "a"}\n{"text": "b"}\n'}
    paths = [f'in/{name}' for name in names]
    for path in paths:
        put(path, forms.get(os.path.splitext(path)[1], 'a\nb\n'))
    for spec in ('in', ','.join(paths)):
        found, counts = read_all(input=spec)
        assert [document.text for document in found] == ['a', 'b'] * (len(names) - n_copies)
        assert counts['copies'] == n_copies
    assert capsys.readouterr().err.count('so it is left out') == n_copies
    put(paths[-1], 'a\nc\n')                                 # of other texts both
    assert 'c' in texts('in')


def test_each_real_file_of_a_folder_comes_once():
    put('d/b.txt', 'one\n')
    put('d/sub/c.txt', 'two\n')
    for link, target in (('self', '.'), ('sub/up', '..'), ('x', 'y'), ('y', 'sub'),
                         ('other.txt', 'b.txt'), ('more.txt', 'b.txt')):
        os.symlink(target, f'd/{link}')
    assert sorted(texts('d')) == ['one', 'two'] and texts('d/*.txt') == ['one']
    assert sources.names_of(source_of(input='d'))[0] == 'b.txt'
    os.symlink('round.txt', 'd/round.txt')
    with pytest.raises(OSError, match='round.txt'):
        texts('d')
    open(b'd/caf\xe9.txt', 'w').close()
    refused(r"caf.udce9.txt': this name is not UTF-8", 'd')


@pytest.mark.parametrize('text, end', [
    ('\n{"text": "one"}\n', '.jsonl'), ('[\n  {"text": 1}', '.jsonl'), ('>a\nMKTAYIAK', '.fasta'),
    ('id\ttext\n1\tone', '.csv'), ('"text"\n"a dog"', '.csv'),
    ('"id";"text"\n"1";"a"', '.csv'), ('"n";"words"\n"1";"a"', '.csv'),
    ('"Yes," he said, "no"\n"Go"', ''), ('{curly} words, text', ''), ('> quoted\nmail', ''),
    ('[1]', '')])
def test_a_text_that_looks_like_another_kind_of_file_is_named_once(tmp_path, capsys, text, end):
    path = put(tmp_path / 'a.txt', text)                     # a warning comes once for each path
    assert texts(path) == texts(path)
    assert capsys.readouterr().err.count(f'looks like {end}') == bool(end)

# -----------------------------------------------------------------------------
# The hub

def test_a_dataset_of_the_hub_is_streamed_by_name_field_and_split(tmp_path, monkeypatch):
    """ load_dataset takes a folder as it takes a hub id: the same code reads both. """
    pytest.importorskip('datasets', reason='reads hub datasets: pip install datasets')
    records = [json.dumps(dict(body=line)) for line in LINES]
    write_lines('hub/train.jsonl', records[:100])
    write_lines('hub/validation.jsonl', records[100:])
    monkeypatch.setitem(hub.HUB, 'tiny', dict(path=str(tmp_path / 'hub'), val='validation'))
    folder = prepared(hub_dataset='tiny', field='body', encoder='none', hub_revision='main',
                      out='./out')
    assert texts_of(folder, 'train') == LINES[:100] and texts_of(folder, 'val') == LINES[100:]
    meta = read_meta(folder)
    assert meta['source']['hub_revision'] == 'main' and str(tmp_path) not in json.dumps(meta)
    refused("no text in field 'text', found .*body", '', hub_dataset='tiny')
    refused('hub_dataset=.*nowhere: cannot be read', '', hub_dataset='./nowhere')

# -----------------------------------------------------------------------------
# Proteins

@pytest.mark.parametrize('name', ['a.fasta', 'a.pep', 'a.fa.gz'])
@pytest.mark.parametrize('text, sequences, counted', [
    ('>a first\nMKTAYIAKQR\nQISFVKSHFS*\n>b\nmktayiak\n>empty\n\n>c\nMJ*KV\n',
     ['MKTAYIAKQRQISFVKSHFS', 'MKTAYIAK', 'MXXKV'],
     dict(read=4, empty=1, unknown_residues=1, stops=1)),
    ('>a\nacgu\n>b\nMKV**', ['ACGU', 'MKV'], dict(read=2, nucleotides=1)),
    ('; all of it\n#A3M#\n>a\n; a helix\nMKT\n!note\nAYI\n\n>b\n# signal\nMKH',
     ['MKTAYI', 'MKH'], dict(read=2)),
    ('>a\rMK--T..A\r>b\r\n MKTA \r\n', ['MKTA', 'MKTA'], dict(read=2, gaps=4))])
def test_fasta_records_are_sequences_and_what_is_no_residue_is_counted(name, text, sequences,
                                                                       counted):
    found, counts = read_all(input=put(name, text))
    assert [document.text for document in found] == sequences
    assert +counts == Counter(kept=len(sequences), **counted)
    assert sources.is_fasta(source_of(input=name))


@pytest.mark.parametrize('line', ['MK7A', 'a comment about the helix', '//', 'MKT@A', '40 40 38',
                                  'MK\u017fT', 'MKT,AYI'])
def test_a_line_that_is_no_sequence_stops_with_its_file_and_line(line):
    put('a.fa', f'>a\nMKT\n>b\n{line}\nMKT\n')
    refused('a.fa, line 4: found .*expected residues', 'a.fa')
    put('a.fa', 'MKV\n')
    refused('a.fa, line 1: found .*expected ">name"', 'a.fa')


def test_fasta_becomes_a_dataset_of_residues_without_duplicates_by_default(capsys):
    g = np.random.default_rng(0)
    letters = list(RESIDUES[:20])
    sequences = [''.join(g.choice(letters, g.integers(20, 60))) for _ in range(60)]

    def fasta(name, sequences):
        return put(name, ''.join(f'>{i}\n{s}\n' for i, s in enumerate(sequences)))

    knobs = dict(input=fasta('a.fasta', sequences + sequences[:7]), encoder='none')
    folder = prepared(**knobs, out='./out', val_fraction=.2)
    meta = read_meta(folder)
    assert meta['tokenizer']['kind'] == 'esm' and meta['tokenizer']['vocab_size'] == 29
    assert meta['counts']['input']['duplicate'] == 7
    assert sorted(of_both(folder)) == sorted(sequences)
    both = prepared(**knobs, val_input='a.fasta', out='./both')
    assert texts_of(both, 'train') == texts_of(both, 'val') == sequences, 'within val too'
    assert '60 of 60 documents of val_input are in the input, too' in capsys.readouterr().err
    with pytest.raises(ValueError, match='is none of LAGV'):
        load_tokenizer(folder).encode('hello you')
    dna = [f'ACGT{a}{b}' for a in 'ACGT' for b in 'ACGT']
    prepared(input=fasta('dna.fasta', dna), out='./dna', encoder='none')
    assert '16 of 16 sequences' in capsys.readouterr().err


# -----------------------------------------------------------------------------
# Latents that are there already

OWN = dict(input='a.txt', latents_from='z.npy')


def own_latents(shape=(6,)):
    """ Latents that say which of LINES they belong to, which are written. """
    write_lines('a.txt')
    z = np.random.default_rng(0).standard_normal((150, *shape)).astype(np.float32)
    z.reshape(150, -1)[:, 0] = np.arange(150)
    return z


def latents_of(folder):
    """ {text: its raw latent} of both splits. """
    found = {}
    for split in ('train', 'val'):
        data = PackedDataset(folder, split)
        raw = data.raw_latents(np.arange(len(data)))
        found |= dict(zip(texts_of(folder, split), raw.numpy()))
    return found


@pytest.mark.parametrize('shape', [(6,), (4, 6)])
def test_given_latents_stay_with_their_texts(monkeypatch, shape):
    z = own_latents(shape)
    os.mkdir('z')
    for i in range(12):                                                  # 2.npy comes before 10.npy
        part = z[13 * i:13 * (i + 1)]
        np.save(f'z/{i}.npy', part.astype(np.float16) if i == 3 else part)
    knobs = dict(input='a.txt', latents_from='z', out='./out', encoder='none')
    found = latents_of(prepared(**knobs))
    assert len(found) == 150
    for line, latent in zip(LINES, z):
        assert np.allclose(found[line], np.atleast_2d(latent), rtol=1e-3)

    np.save('z/3.npy', -z[39:52])                                        # of the same texts
    with pytest.raises(ValueError, match='train-0000[01] would become another'):
        prepared(**knobs)
    monkeypatch.setattr('configurator.set_by', {})
    with pytest.raises(ValueError, match='nobody knows what made its latents'):
        prepared(input='a.txt', out='./like', same_as='./out')


def test_files_of_two_folders_belong_together_by_their_names():
    os.mkdir('z')
    for i in range(1, 13):                                               # 2 comes before 10
        put(f't/{i}.txt', f'file\t{i}')
        np.save(f'z/{i}.npy', np.full((1, 6), i, np.float32))
    for path, latents in (('t', 'z'), ('t/*.txt', 'z/*.npy')):
        found, _ = read_all(input=path, latents_from=latents)
        numbers = [int(document.text.split()[1]) for document in found]
        assert numbers == [document.latent()[0, 0] for document in found] == [*range(1, 13)]

    # as many rows as texts, but not file by file; then other names
    put('t/4.txt', 'one\ntwo')
    np.save('z/5.npy', np.ones((2, 6), np.float32))
    refused('z/4.npy: 1 rows for 2 documents', 't', latents_from='z')
    os.rename('z/7.npy', 'z/7b.npy')
    refused('input has 7 where latents_from has 7b', 't/*.txt', latents_from='z/*.npy')


@pytest.mark.parametrize('change, words', [
    (lambda z: z[:149], '149 rows for 150 documents'),
    (lambda z: np.vstack([z, z[:1]]), '151 rows for 150'),
    (lambda z: z[:100], '100 rows for 150 documents of the input, expected a row for each'),
    (lambda z: z[:, 0], r'z.npy: latents are float32 \(150,\), expected floats \(n, D\)'),
    (lambda z: np.array([{}] * 150, object), 'z.npy: latents cannot be read')])
def test_given_latents_that_do_not_fit_are_refused(change, words):
    np.save('z.npy', change(own_latents()), allow_pickle=True)
    with pytest.raises(ValueError, match=words):
        packed(**OWN)


def test_what_is_no_array_is_refused():
    own_latents()
    put('z.npy', b'PK\x03\x04' + b'\0' * 50)
    with pytest.raises(ValueError, match='z.npy: latents cannot be read'):
        packed(**OWN)


def with_columns(pyarrow, lists, texts=LINES):
    """ The same texts and lists of numbers in each kind of file that has columns. """
    rows = [[text, json.dumps(row)] for text, row in zip(texts, lists)]
    records = [json.dumps(dict(text=text, embedding=row)) for text, row in zip(texts, lists)]
    put('in/a.jsonl', '\n'.join(records))
    with open('in/b.csv', 'w', newline='') as f:
        csv.writer(f).writerows([['text', 'embedding'], *rows])
    table = pyarrow.table(dict(embedding=lists, text=texts, n=range(len(texts))))
    pyarrow.parquet.write_table(table, 'in/c.parquet')
    write_arrow(pyarrow, 'in/d.arrow', table)
    return ['in/a.jsonl', 'in/b.csv', 'in/c.parquet', 'in/d.arrow']


@pytest.mark.parametrize('shape', [(6,), (4, 6)])
def test_latents_in_a_column_stay_with_their_texts(pyarrow, shape):
    z = own_latents(shape)
    found = []
    for path in with_columns(pyarrow, z.tolist()):
        docs, counts = read_all(input=path, latents_from='column:embedding')
        assert [doc.text for doc in docs] == LINES and counts['read'] == counts['kept'] == 150
        for doc, latent in zip(docs, z):
            assert np.array_equal(doc.latent(), np.atleast_2d(latent)), path
        found.append([doc.place.rpartition(', ')[2] for doc in docs[:2]])
    assert found == [['line 1', 'line 2'], ['line 2', 'line 3'], *[['row 0', 'row 1']] * 2]

    # as a dataset; a blank text takes its latent with it
    texts = ['', *LINES[1:]]
    with_columns(pyarrow, z.tolist(), texts)
    folder = prepared(input='in/c.parquet', latents_from='column:embedding', out='./out',
                      encoder='none')
    stored, meta = latents_of(folder), read_meta(folder)
    assert len(stored) == 149 and meta['counts']['input']['empty'] == 1
    for text, latent in zip(texts[1:], z[1:]):
        assert np.allclose(stored[text], np.atleast_2d(latent), rtol=1e-3)
    assert meta['source']['latents_from'] == 'column:embedding'


@pytest.mark.parametrize('value, words', [
    ('null', 'no latent in .embedding., found'), ('[]', 'no latent'), ('7', 'no latent'),
    ('"none"', 'no latent'), ('[1, "a", 2, 3, 4, 5]', 'no latent'),
    ('[1.0]', r'a latent \(1, 1\) in .embedding., and .*(line|row) [012] has one \(1, 6\)'),
    ('[[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]',
     r'a latent \(2, 6\) .*expected lists of one length')])
def test_a_column_that_is_no_list_of_numbers_is_named_by_file_and_row(value, words):
    lists = ['[1, 2, 3, 4, 5, 6]'] * 9
    lists[5] = value
    write_lines('a.jsonl', [f'{{"text": "a", "embedding": {one}}}' for one in lists])
    with open('a.csv', 'w', newline='') as f:
        cells = [one.strip('"') for one in lists]
        csv.writer(f).writerows([['text', 'embedding'], *(['a', one] for one in cells)])
    for name, where in (('a.jsonl', 'line 6'), ('a.csv', 'line 7')):
        refused(f'{name}, {where}: {words}', name, latents_from='column:embedding')


def test_a_column_that_is_not_there_and_a_file_without_columns_are_refused(pyarrow):
    for path in with_columns(pyarrow, [[1.]] * 150):
        refused(f'{path}.*--latents_from=column:', path, latents_from='column:vector')
    write_lines('a.txt')
    for knobs, words in ((dict(input='a.txt'), 'a.txt: .*with records'),
                         (dict(), 'your own files: --input=')):
        with pytest.raises(ValueError, match=words):
            packed(**knobs, latents_from='column:vector')


def test_a_text_too_long_for_one_sample_is_dropped_and_counted_when_its_latent_is_given():
    np.save('z.npy', own_latents())
    long = ' '.join(LINES[:9])
    write_lines('a.txt', [long, *LINES[1:]])
    folder = prepared(**OWN, out='./out', encoder='none', max_tokens=40)
    found = [n_of(folder, key) for key in ('documents', 'samples', 'longer_than_max_tokens')]
    assert found == [150, 149, 1] and long not in latents_of(folder)


@pytest.mark.parametrize('value, reason', [
    (np.nan, 'NaN or inf: mend it'), (-np.inf, 'NaN or inf: mend it'),
    (-70000, '70,000, and float16 ends at 65,504: divide')])
def test_a_latent_that_float16_cannot_hold_is_named_by_its_row(value, reason):
    z = own_latents()
    z[107, 3] = value
    np.save('z.npy', z[:100])
    np.save('y.npy', z[100:])
    said = f'latents cannot be stored, more than 0.1%; the first: y.npy, row 7: {reason}'
    with pytest.raises(ValueError, match=said):
        packed(input='a.txt', latents_from='z.npy,y.npy')


@pytest.mark.filterwarnings('error')
def test_a_column_that_float16_cannot_hold_is_named_without_a_warning_of_numpy():
    z = own_latents()
    z[:, 2] = np.linspace(120_000, 20_000, len(z))
    np.save('z.npy', z)
    with pytest.raises(ValueError, match='float16 ends at 65,504: .* each column of a table'):
        packed(**OWN)


def test_dimensions_that_float16_cannot_tell_apart_are_counted_and_most_stop(capsys):
    z = own_latents()

    def prepare(name, latents):
        np.save('z.npy', latents.astype(np.float32))
        packed(name, **OWN)
        return capsys.readouterr().err

    noise = np.random.default_rng(0).normal(size=(150, 6))
    with pytest.raises(ValueError, match='6 of 6 dim.* where its steps are 0.5; subtract the mean'):
        prepare('./coarse', .1 * noise + 1000)
    z[:, 4] = 1000 + .1 * z[:, 4]
    assert 'warning: 1 of 6 dimensions of the latents vary by less' in prepare('./one', z)
    z[:, 4] = 1000.1                                         # the same everywhere: nothing is lost
    assert 'dimensions of the latents' not in prepare('./none', z)
    with pytest.raises(ValueError, match='all latents of train are the same.*--latents_from'):
        prepare('./same', np.full_like(z, .3))


@pytest.mark.parametrize('form', ['>f4', '>f8', '>f2', np.longdouble])
def test_latents_in_any_order_of_bytes_are_the_same(form):
    z = own_latents()
    np.save('z.npy', z.astype(form))
    for document, latent in zip(read_all(**OWN)[0], z, strict=True):
        found = document.latent()
        assert found.dtype.isnative and found.itemsize <= 8
        assert np.allclose(found[0], latent, rtol=1e-3)


def test_a_text_is_hashed_once_in_a_reading_also_where_copies_are_left_out(monkeypatch):
    lines = [f'line {i // 2}' for i in range(40)]
    path = write_lines('a.txt', lines)
    hashed = []
    text_hash = sources.text_hash
    monkeypatch.setattr(sources, 'text_hash', lambda text: hashed.append(text) or text_hash(text))
    sources.read_once(source_of(input=path, encoder='none', tokenizer='byte', distinct=True), 0)
    assert hashed == lines


def test_where_no_document_is_short_enough_for_its_latent_the_error_says_so():
    np.save('z.npy', own_latents())
    with pytest.raises(ValueError, match='none of .* documents is left, .* max_tokens=8 tokens'):
        packed(max_tokens=8, **OWN)


def test_files_that_are_passed_over_are_counted_in_the_order_of_their_names():
    """ They come as a set, whose order changes from one process to the next. """
    names = [f'{letter}.{letter}' for letter in 'abcdefghijklmnopqrstuvwxyz']
    assert list(readers.count_endings(set(names))) == [f'passed over .{n[0]}' for n in names]


def test_latents_of_zeros_are_counted_and_many_stop(capsys):
    z = own_latents() + 1
    z[[7, 90]] = 0
    np.save('z.npy', z)
    assert n_of(packed(**OWN), 'zero') == 2
    printed = capsys.readouterr()
    said = '2 of 150 latents are zeros, which say nothing of their texts; the first: z.npy, row '
    assert said in printed.err and '2 samples have a latent of zeros' in printed.out
    for n in (20, 30):                                       # of the first 40: also if most are
        z[:n] = 1e-9                                         # what float16 holds of it
        np.save('z.npy', z)
        said = f'{n} of 40 latents are zeros, .* more than 10%; the first: z.npy'
        with pytest.raises(ValueError, match=said):
            packed(f'./many {n}', **OWN)


def test_an_encoder_named_beside_given_latents_must_be_theirs(tmp_path):
    os.mkdir('bert')
    encoder = save_encoder(tmp_path / 'bert')
    z = find_encoder(encoder, pooling='mean')(LINES)[:, 0].numpy()
    write_lines('a.txt')
    knobs = dict(OWN, encoder=encoder, encoder_dims=0, pooling='mean')
    np.save('z.npy', z)
    meta = read_meta(prepared(**knobs, out='./out'))
    assert meta['encoder']['pooling'] == 'mean' and meta['latent_shape'] == [1, 32]
    np.save('z.npy', z[::-1])
    with pytest.raises(ValueError, match='not those of encoder'):
        prepared(**knobs, out='./other')


@pytest.mark.parametrize('n_vectors', [1, 3])
def test_given_latents_may_be_those_of_an_encoder_of_arrays_and_of_several_vectors(
        monkeypatch, n_vectors):
    class Lengths:
        truncated = 0
        record = dict(id='lengths', revision='1', pooling=None, prefix='', normalize=False,
                      dimension=8, max_length=None, dtype='float32', language=None)

        def __call__(self, texts, progress=lambda n: None):
            seeds = [np.random.default_rng(len(text)) for text in texts]
            return np.stack([rng.normal(size=(n_vectors, 8)) for rng in seeds]).astype(np.float32)

        def remark(self, text):
            return ''

    monkeypatch.setitem(CODE, 'lengths', Lengths)
    z = Lengths()(LINES)
    write_lines('a.txt')
    knobs = dict(OWN, encoder='lengths', encoder_dims=0)
    np.save('z.npy', z)
    assert read_meta(prepared(**knobs, out='./out'))['latent_shape'] == [n_vectors, 8]

    # all vectors of a text are compared
    z[:, -1] = z[::-1, -1]
    np.save('z.npy', z)
    with pytest.raises(ValueError, match='not those of encoder lengths'):
        prepared(**knobs, out='./other')
    np.save('z.npy', z[..., :4])
    said = rf'given are \({n_vectors}, 4\), encoder lengths makes \({n_vectors}, 8\)'
    with pytest.raises(ValueError, match=said):
        prepared(**knobs, out='./another')


@pytest.mark.parametrize('knobs, words', [
    (dict(input='builtin', hub_dataset='lm1b', import_dir='x'),
     'given: hub_dataset and import_dir'),
    (dict(hub_dataset='lm1b'), 'given: input and hub_dataset'),
    (dict(input='builtin', import_dir='x', latents_from='z.npy'),
     'import_dir and latents_from each say'),
    (dict(image_size=8), 'image_size is set, but input=a.fasta is no folder'),
    (dict(image_size=10, patch=4), 'multiple of patch 4'),
    (dict(shared_by=9), 'shared_by=9 is of Iconify'),
    (dict(val_input='a.fasta', latents_from='z.npy'), 'val_input goes with'),
    (dict(tokenizer='other'), 'tokenizer=other is a dataset: --same_as'),
    (dict(latents_from='z.npy', encoder='lsa'), 'name their encoder')])
def test_knobs_that_contradict_each_other_are_refused(knobs, words):
    put('a.fasta', '>a\nMKV\n')
    put('other/meta.json', '{}')
    with pytest.raises(ValueError, match=words):
        prepared(**dict(out='./out', input='a.fasta', encoder='none') | knobs)

# -----------------------------------------------------------------------------
# The earlier layout

def test_chunks_survive_export_and_import_with_their_latents():
    write_lines('a.txt', [' '.join(LINES[i:i + 5]) for i in range(0, 150, 5)])
    folder = prepared(input='a.txt', out='./a', max_tokens=24)
    assert any(text.startswith(' ') for text in texts_of(folder, 'train')), 'the case to be tested'
    os.mkdir('old')
    export(folder, 'old')
    back = packed(import_dir='old', max_tokens=500)
    assert of_both(back) == of_both(folder)
    a, b = latents_of(folder), latents_of(back)
    assert a.keys() == b.keys() and all(np.array_equal(a[text], b[text]) for text in a)
    with pytest.raises(ValueError, match='is there already'):
        export(folder, folder)


def test_the_earlier_layout_is_imported_without_embedding():
    for split, lines in (('train', LINES[:120]), ('validation', LINES[120:])):
        os.makedirs(f'old/latents/{split}')
        items = []
        for i, line in enumerate(lines):
            path = f'latents/{split}/{i}.npy'
            latent = np.full(6, i, np.float32) + np.arange(6) / 8
            np.save(f'old/{path}', latent if i % 2 else latent[None])
            items.append(dict(text=line, latent_path=path))
            if i % 3 == 0:                                   # the file counts, not its preview
                put(f'old/texts/{split}/{i}.txt', line)
                items[i]['text'] = line[:10]
        put(f'old/{split}_data.json', json.dumps(items))
    folder = prepared(import_dir='old', out='./new', encoder='none')
    assert texts_of(folder, 'train') == LINES[:120] and texts_of(folder, 'val') == LINES[120:]
    z = PackedDataset(folder, 'val').raw_latents([7, 8])
    assert np.array_equal(z[:, 0, 0], [7, 8]) and z.shape == (2, 1, 6)


@pytest.mark.parametrize('item, words', [
    (dict(text='a'), 'item 0: no latent_path'),
    (dict(text='a', latent_path='../out.npy'), 'lies outside'),
    (dict(text='a', latent_path='latents/gone.npy'), 'gone.npy: missing'),
    (dict(latent_path='latents/a.npy'), 'no "text", and no file'),
    (dict(text='a', latent_path='latents/cube.npy'), r'a latent is float32 \(1, 1, 4\), expected')])
def test_an_earlier_layout_that_is_broken_stops_with_its_place(item, words):
    put('train_data.json', json.dumps([item]))
    os.mkdir('latents')
    np.save('latents/a.npy', np.zeros(4, np.float32))
    np.save('latents/cube.npy', np.zeros((1, 1, 4), np.float32))
    with pytest.raises(ValueError, match=words):
        [document.latent() for document in read_all(import_dir='.')[0]]

# -----------------------------------------------------------------------------
# Images

@pytest.fixture
def Image():
    return pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')


@pytest.fixture
def pixels(Image):
    """ 40 random images, of five captions each. """
    found = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    rows = ['file_name,text']
    for i, image in enumerate(found):
        Image.fromarray(image).save(f'{i}.png')
        rows += [f'{i}.png,"{word}, {i}"' for word in WORDS[:5]]
    write_lines('metadata.csv', rows)
    return found


IMAGES = dict(input='.', image_size=8, patch=4)


def test_captioned_images_become_patches_and_go_to_one_split_with_all_captions(pixels):
    put('more.png', 'no caption names it')
    found, counts = read_all(**IMAGES)
    assert counts['passed over .png'] == 1
    assert [d.text for d in found[:3]] == ['a, 0', 'the, 0', 'dog, 0'] and len(found) == 200
    z = found[15].latent()
    assert z.shape == (4, 48)
    assert np.allclose(z[1].reshape(4, 4, 3), pixels[3, :4, 4:] / 127.5 - 1, atol=1e-6)
    assert image_patches('0.png', 4, 2, 1).shape == (4, 4)

    folder = prepared(**IMAGES, out='./out', encoder='none', val_fraction=.2)
    meta = read_meta(folder)
    assert meta['latent_shape'] == [4, 48] and np.allclose(latents_of(folder)['a, 3'], z, atol=1e-3)
    assert [meta['source'][knob] for knob in ('image_size', 'patch', 'channels')] == [8, 4, 3]
    train = {text.split()[1] for text in texts_of(folder, 'train')}
    val = {text.split()[1] for text in texts_of(folder, 'val')}
    assert len(train | val) == 40 and not train & val


def test_an_image_that_cannot_be_read_is_named(pixels, Image, monkeypatch):
    def cut(path, words):
        with pytest.raises(ValueError, match=f'{path}: .*{words}'):
            image_patches(path, 8, 8, 1)

    put('3.png', 'no image')
    with pytest.raises(ValueError, match='3.png: no image that can be read'):
        prepared(**IMAGES, out='./other', encoder='none')
    Image.new('1', (13_400, 13_400)).save('3.png')                       # a small file
    cut('3.png', '179560000 pixels. exceeds limit of 178956970')
    monkeypatch.setattr(images, 'MOST_MEMORY', 4 * 63)                   # else 2^28
    cut('4.png', '8 x 8 pixels, at most 63')
    put('4.png', LFS)
    cut('4.png', 'a Git LFS pointer')
    os.remove('5.png')
    refused('5.png: missing', '.', image_size=8, patch=4)


def test_what_is_transparent_lies_on_white_and_other_depths_are_refused(Image):
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    plain = Image.fromarray(grey)
    half = Image.fromarray(np.uint8([[0, 128] * 4] * 8))
    on_white = 255 - (255. - grey) * np.array(half) / 255
    colour = Image.merge('RGB', [plain] * 3)
    plain.save('8.png')
    plain.save('clear.png', transparency=8)
    Image.merge('LA', [plain, half]).save('la.png')
    Image.merge('RGBA', [plain, plain, plain, half]).save('rgba.png')
    colour.convert('CMYK').save('cmyk.tif')
    for name, expected in (('8.png', grey), ('clear.png', np.where(grey == 8, 255, grey)),
                           ('la.png', on_white), ('rgba.png', on_white), ('cmyk.tif', grey)):
        for channels in (1, 3):
            z = image_patches(name, 8, 8, channels).reshape(8, 8, channels)
            assert np.abs((z + 1) * 127.5 - expected[..., None]).max() < .8, (name, channels)
    Image.fromarray(grey.astype(np.int32)).save('i.tif')
    with pytest.raises(ValueError, match='i.tif: no image .* whose white is unknown'):
        image_patches('i.tif', 8, 8, 1)
