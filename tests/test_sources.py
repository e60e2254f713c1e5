"""
Every kind of source as sentences: the same documents whatever holds them, each of them counted, and
latents that stay with their text.
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
from encoders import find_encoder
from launch import prepared, source_of, texts_of
from toys import LINES, WORDS, save_encoder, write_lines


def read_all(**knobs):
    """ (documents, counts) of a source. """
    counts = Counter()
    return list(documents(source_of(**knobs), counts)), counts


def texts(path, **knobs):
    return [document.text for document in read_all(input=path, **knobs)[0]]

# -----------------------------------------------------------------------------
# Text, records, tables

@pytest.mark.parametrize('split_on, expected', [
    ('line', ['one', 'two\x0cstill two', 'thr\u2028ee', '%', 'joined']),
    ('paragraph', ['one\ntwo\x0cstill two', 'thr\u2028ee\n%\njoined']),
    ('file', ['one\ntwo\x0cstill two\n\n  \nthr\u2028ee\n%\njoined']),
    ('%', ['one\ntwo\x0cstill two\n\n  \nthr\u2028ee', 'joined'])])
def test_what_a_document_is_whatever_ends_the_lines(tmp_path, split_on, expected):
    path = tmp_path / 'a.txt'
    content = '\ufeffone\ntwo\x0cstill two\n\n  \nthr\u2028ee\n%\n\ufeffjoined'
    for end in ('\n', '\r\n', '\r'):
        path.write_bytes(content.replace('\n', end).encode())
        assert texts(path, split_on=split_on) == expected
    if split_on == 'line':
        assert read_all(input=path)[1] == Counter(read=7, kept=5, empty=2, invalid_utf8=0)


def test_every_kind_of_file_folders_and_globs_give_the_same_documents(tmp_path):
    folder = tmp_path / 'in'
    (folder / 'sub').mkdir(parents=True)
    expected = ['one, "quoted"', 'two\nlines', 'naïve 🙂', 'x' * 200_000]
    records = ''.join(json.dumps(dict(text=text, n=1)) + '\n\n' for text in expected)
    for ending in ('jsonl', 'ndjson', 'JSONLINES'):
        (folder / f'a_{ending}.{ending}').write_text(records)
    for ending, delimiter in (('csv', ','), ('tsv', '\t')):
        with open(folder / f'sub/b_{ending}.{ending}', 'w', newline='') as f:
            csv.writer(f, delimiter=delimiter).writerows([['id', 'text'], *enumerate(expected)])
    with gzip.open(folder / 'c.txt.gz', 'wt') as f:
        f.write('zipped\n')
    (folder / 'notes.cfg').write_text('not taken from a folder')
    (folder / 'd5²6.md').write_text('marked\n')
    assert texts(folder) == expected * 3 + ['zipped', 'marked'] + expected * 2
    for name in ('a_jsonl.jsonl', 'a_JSONLINES.JSONLINES', 'sub/b_csv.csv', 'sub/b_tsv.tsv'):
        assert texts(folder / name) == expected
    assert texts(f'{folder}/*.gz, {folder}/notes.cfg') == ['zipped', 'not taken from a folder']
    os.mkfifo(folder / 'pipe.txt')
    with pytest.raises(ValueError, match='pipe.txt: .*cannot be read twice'):
        texts(folder)


def test_a_table_is_read_as_pandas_writes_it(tmp_path):
    (tmp_path / 'a.tsv').write_text('id\ttext\tlabel\n1\tHe said "no\tx\n2\t"He said ""stop""'
                                    '\tand\r\nleft"\tnews\n\n3\tplain\t""\n')
    assert texts(tmp_path / 'a.tsv') == ['He said "no', 'He said "stop"\tand\nleft', 'plain']


def test_parquet_and_arrow_read_as_the_lines_do(tmp_path):
    pyarrow = pytest.importorskip('pyarrow', reason='reads parquet: pip install pyarrow')
    import pyarrow.parquet
    words = pyarrow.array(LINES[:149] + [None])
    table = pyarrow.table(dict(text=words, category=words.dictionary_encode(), n=[7] * 150))
    pyarrow.parquet.write_table(table, tmp_path / 'a.pq', row_group_size=40)
    for write, name in ((pyarrow.ipc.new_file, 'b.feather'), (pyarrow.ipc.new_stream, 'c.arrow')):
        with write(tmp_path / name, table.schema) as f:
            f.write_table(table, max_chunksize=40)
    found, counts = read_all(input=tmp_path)
    assert [document.text for document in found] == LINES[:149] * 3
    assert counts == Counter(read=450, kept=447, empty=3, invalid_utf8=0)
    for name in ('a.pq', 'b.feather', 'c.arrow'):
        assert texts(tmp_path / name, field='category') == LINES[:149]
        for field, message in (('body', "0 columns are called 'body'"), ('n', 'no text in field')):
            with pytest.raises(ValueError, match=f'{name}(, row 0)?: {message}.*--field'):
                texts(tmp_path / name, field=field)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:300])
        with pytest.raises(ValueError, match=f'{name}: broken'):
            texts(tmp_path / name)


LFS = b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n'
FASTQ = b'@read 1\nACGTACGT\n+\nIIIIIIII\n'


@pytest.mark.parametrize('name, content, message', [
    ('a.txt', b'\n \n', 'no documents'),
    ('a.txt', 'hello'.encode('utf-16'), 'UTF-16, expected UTF-8.*--encoding=utf-16'),
    ('a.txt', 'hello'.encode('utf-32'), 'UTF-32, expected UTF-8.*--encoding=utf-32'),
    ('a.csv', b'text\n' * 10, r'9 document\(s\) are all the same text'),
    ('a.csv', b'text,n\na,1\ntext,n\n', 'line 3: the names of the columns again'),
    ('a.txt', b'one\ntwo\ncaf\xe9\n', "line 3: 'utf-8' codec .* 0xe9 .*--encoding=latin-1"),
    ('a.txt', b'one\n' * 9999 + b'\xe9', "line 10000: 'utf-8' codec .* 0xe9"),
    ('a.txt.gz', gzip.compress(b'a\nb\n\xff', mtime=0), "line 3: 'utf-8' codec .* 0xff"),
    ('a.txt.gz', gzip.compress(b'hello\n' * 999, mtime=0)[:-20], 'broken gzip'),
    ('a.txt.gz', b'plain', 'broken gzip'),
    ('a.txt', b'PAR1\x15', 'parquet, expected UTF-8'),
    ('a.csv', b'PK\x03\x04', 'zip, expected UTF-8'),
    ('a.fa', gzip.compress(b'one', mtime=0), 'gzip, expected UTF-8'),
    ('a.json', b'[]', 'cannot read this kind'),
    ('a.jsonl', b'{"text": "a"}\n{"body": "b"}\n', "line 2.*'text'.*--field"),
    ('a.jsonl', b'{"text": 3}\n', "no text in field 'text', found {'text': 3}"),
    ('a.jsonl', b'{oops\n', 'line 1: no JSON'),
    ('a.jsonl', b'\n' + b'[' * 100_000, 'line 2: no JSON .*recursion'),
    ('a.jsonl', b'{"text": "a"}\nnull\n', 'line 2: found None, expected a record of JSON'),
    ('a.csv', b'x,y\n1,2\n', "0 columns are called 'text'.*x.*--field"),
    ('a.csv', b'text,id,text\na,1,b\n', "2 columns are called 'text'"),
    ('a.csv', b'id,text\n1,A dog, running\n', 'line 2: 3 fields, expected 2, one a column'),
    ('a.csv', b'id,text\n1,a\n2,"b"c\n', 'line 3: broken table'),
    ('a.csv', b'text\n"a\nb\n', 'broken table'),
    ('a.fasta', b'>a\nMK\n>caf\xe9\nMK\n', "line 3: 'utf-8' codec"),
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
    ('a.jsonl', '{"text": "a"}\n'.encode('utf-16-le'), '--encoding=utf-16-le'),
    ('a.txt', 'привет, dog\n'.encode('utf-16-be') * 9, '--encoding=utf-16-be'),
    ('a.csv', 'id,text\n1,a\n'.encode('utf-32-le'), '--encoding=utf-32-le'),
    ('a.csv', b'id;body\n1;a\n', r"0 columns are called 'text'.*\['id', 'body'\]"),
    ('a.csv', b'sep=;\nid;text\n1;a;b\n', 'line 3: 3 fields, expected 2'),
    ('a.smi', b'CCO ethanol\nsome words\n', "line 2: found 'some words.*expected SMILES")])
def test_what_cannot_be_read_stops_with_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f'{name}.*{message}'):
        prepared(input=tmp_path / name, out=tmp_path / 'out')


def test_other_encodings_are_read_and_what_is_not_of_them_is_replaced_and_counted(tmp_path):
    path, expected = tmp_path / 'a.txt', ['naïve café', 'größer', 'plain']
    for encoding in ('utf-8-sig', 'latin-1', 'cp1252', 'utf-16', 'UTF8'):
        path.write_bytes('\n'.join(expected).encode(encoding))
        assert texts(path, encoding=encoding) == expected, encoding
    with pytest.raises(ValueError, match='a.txt, line 1: .*--encoding='):
        texts(path, encoding='utf-16')
    path.write_bytes(b'one\ncaf\xe9\n\0\0no text\n')
    found, counts = read_all(input=path, invalid_bytes='replace')
    assert [document.text for document in found] == ['one', 'caf\ufffd'] and counts['nul'] == 1

    # JSON can write half a character
    (tmp_path / 'a.jsonl').write_text('{"text": "b \\ud800"}')
    found, also = read_all(input=tmp_path / 'a.jsonl')
    assert found[0].text == 'b \ufffd' and counts['invalid_utf8'] == also['invalid_utf8'] == 1


def test_a_page_that_is_named_so_is_text(tmp_path):
    (tmp_path / 'a.html').write_text('<!doctype html>\n<p>a dog</p>\n')
    assert texts(tmp_path / 'a.html') == ['<!doctype html>', '<p>a dog</p>']


def test_what_shows_nothing_is_an_empty_document(tmp_path):
    lines = ['a dog', r'\N', '\u200b', '\ufeff\u2060', '\u3164', '\xad', '\u2800', '\x1b',
             'b\u200bc']
    found, counts = read_all(input=write_lines(tmp_path / 'a.txt', lines))
    assert [document.text for document in found] == ['a dog', 'b\u200bc']
    assert +counts == Counter(read=9, kept=2, empty=7)
    (tmp_path / 'a.tsv').write_text('id\ttext\n1\t\\N\n2\ta\n')
    assert texts(tmp_path / 'a.tsv') == ['a']


@pytest.mark.parametrize('name, content, split_on, n', [
    ('a.txt', '    return 2\n\tx\nplain\ntrail \r\n\n', 'line', 3),
    ('a.txt', '\n  one\n  two\n\nthree\n\n', 'paragraph', 1),
    ('a.txt', 'one\n  two\n\n', 'file', 0),
    ('a.jsonl', '{"text": " a"}\n{"text": "a\\n"}\n{"text": "a "}\n', 'line', 2)])
def test_white_space_that_is_taken_off_is_counted(tmp_path, name, content, split_on, n):
    (tmp_path / name).write_text(content)
    assert read_all(input=tmp_path / name, split_on=split_on)[1]['trimmed'] == n


@pytest.mark.parametrize('name, content', [
    ('a.csv', 'id;text;price\n1;"a, b";0,50\n'), ('a.csv', '"id";"text"\n"1";"a, b"\n'),
    ('a.csv', 'sep=;\nid;text\n1;a, b\n'), ('a.csv', '\ufeff"sep=,"\nid,text\n1,"a, b"\n'),
    ('a.csv', 'id|text\n1|a, b\n'), ('a.csv', 'id\ttext\n1\ta, b\n'),
    ('a.tsv', 'id,text\n1,"a, b"\n'), ('a.csv', 'text\n"a, b"\n'), ('a.tsv', 'text\na, b\n')])
def test_the_delimiter_of_a_table_is_found(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert texts(tmp_path / name) == ['a, b']


def test_of_smiles_the_first_column_is_read_and_the_rest_counted(tmp_path):
    content = b'SMILES Name\nCCO ethanol\n  C[C@@H](N)C(=O)O\tL-alanine x\n[Na+].[Cl-]\n\n'
    (tmp_path / 'a.smi').write_bytes(content)
    (tmp_path / 'b.smi.gz').write_bytes(gzip.compress(b'# smiles\tid\nClCCBr\t7\n'))
    found, counts = read_all(input=tmp_path)
    assert [document.text for document in found] == ['CCO', 'C[C@@H](N)C(=O)O', '[Na+].[Cl-]',
                                                     'ClCCBr']
    assert +counts == Counter(read=5, kept=4, empty=1, names=3, headers=2)


def test_no_line_is_held_in_memory_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, 'LONGEST', 10_000)                      # else 2^24
    for name, content, message in (
            ('a.txt.gz', 'x\n' + 'x' * 10_001, 'line 2: longer than 10,000'),
            ('a.jsonl', 'x' * 10_001, 'line 1: longer than 10,000'),
            ('b.txt.gz', 'many lines\n' * 1000, 'a document of more than 10,000'),
            ('a.csv', 'text\n"' + 'never closed\n' * 1000, 'broken table'),
            ('a.fasta', '>a\n' + 'MKV\n' * 4000, 'a sequence of more than 10,000')):
        content = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith('gz') else content)
        with pytest.raises(ValueError, match=f'{name}.*{message}'):
            texts(tmp_path / name, split_on='file' if name == 'b.txt.gz' else 'line')

    # on the disk as large as in memory: it is no surprise
    usual = np.random.default_rng(0).bytes(10_000).hex()                 # packed to about a half
    (tmp_path / 'd.txt.gz').write_bytes(gzip.compress(usual.encode()))
    (tmp_path / 'c.txt').write_text(usual)
    for name in ('c.txt', 'd.txt.gz'):
        assert texts(tmp_path / name) == texts(tmp_path / name, split_on='file') == [usual]
    with pytest.raises(ValueError, match='a.pq: a text of 10,001 characters'):
        readers.text_of(dict(text='x' * 10_001), 'text', 'a.pq')


@pytest.mark.parametrize('packed', ['zstd', 'lz4'])
def test_a_column_is_refused_by_its_size_before_it_is_unpacked(tmp_path, monkeypatch, packed):
    pyarrow = pytest.importorskip('pyarrow', reason='reads parquet: pip install pyarrow')
    import pyarrow.parquet
    big = 'a' * 200_000
    tables = {'plain': pyarrow.array([big, big]), 'dictionary': pyarrow.array([big, big + 'b'])}
    tables['dictionary'] = tables['dictionary'].dictionary_encode()

    # in any kind of file; what is not packed may be as large as its file
    paths = []
    for name, column in tables.items():
        table = pyarrow.table(dict(text=column))
        pyarrow.parquet.write_table(table, tmp_path / f'{name}.parquet', compression=packed)
        for how in (packed, None):
            options = pyarrow.ipc.IpcWriteOptions(compression=how)
            for write, kind in ((pyarrow.ipc.new_file, f'{how}.feather'),
                                (pyarrow.ipc.new_stream, f'{how}.arrow')):
                with write(tmp_path / f'{name}_{kind}', table.schema, options=options) as f:
                    f.write_table(table)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 10 and all(len(texts(path)[0]) == 200_000 for path in paths)
    monkeypatch.setattr(readers, 'MOST_MEMORY', 100_000)
    monkeypatch.setattr(readers, 'text_of_cell', lambda *args: pytest.fail('it is unpacked'))
    for path in paths:
        if 'None' not in path.name:
            with pytest.raises(ValueError, match=f'{path.name}: .* unpack to '):
                texts(path)


def test_a_column_of_no_texts_is_refused_by_its_type(tmp_path):
    """ A list of a few bytes may unpack to any length. """
    pyarrow = pytest.importorskip('pyarrow', reason='reads parquet: pip install pyarrow')
    import pyarrow.feather
    import pyarrow.parquet
    table = pyarrow.table(dict(text=pyarrow.array([['a'] * 100_000])))
    pyarrow.parquet.write_table(table, tmp_path / 'a.parquet')
    pyarrow.feather.write_feather(table, tmp_path / 'a.feather')
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=f'{path.name}: no text in .* column of .list'):
            texts(path)


def test_documents_that_would_not_fit_into_memory_together_stop_at_once(tmp_path, monkeypatch):
    path = write_lines(tmp_path / 'a.txt', [f'{i} ' + 'x' * (i * 617 % 2000) for i in range(40)])
    knobs = dict(encoder='none', tokenizer='byte', input=path, val_fraction=.2)
    monkeypatch.setattr(sources, 'MOST_MEMORY', 20_000)
    with pytest.raises(ValueError, match='documents of one shard take .*--shard_size=10'):
        prepared(out=tmp_path / 'a', **knobs)
    prepared(out=tmp_path / 'b', **knobs | dict(shard_size=9))

    # nor does the sample that is fitted on; it is the same in any order
    def sample(**more):
        _, _, found, _ = sources.read_once(source_of(shard_size=9, **more), 0)
        return sorted(found)
    found = sample(input=path)
    assert 5 < len(found) < 30
    lines = path.read_text().splitlines()
    assert sample(input=write_lines(tmp_path / 'b.txt', lines[::-1])) == found


# ---- files of a folder, of a glob, of a list

def test_two_stars_go_through_all_folders_and_a_comma_may_belong_to_a_name(tmp_path, monkeypatch):
    (tmp_path / 'a, b/c/d').mkdir(parents=True)
    for i, name in enumerate(('top.txt', 'c/middle.txt', 'c/d/deep, er.txt', 'c/d/x.md')):
        (tmp_path / 'a, b' / name).write_text(f'{i}\n')
    monkeypatch.chdir(tmp_path)
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
    knobs = dict(encoder='none', tokenizer='byte', input='a, b/top.txt,a, b/c/d/x.md')
    meta = read_meta(prepared(val_input='a, b/c/middle.txt', out=tmp_path / 'out', **knobs))
    assert meta['source']['input'] == ['top.txt', 'x.md']
    with pytest.raises(ValueError, match=r'a, b/\*\*/\*.csv: no such file|a: no such file'):
        texts('a, b/**/*.csv')


def test_files_of_a_folder_that_are_passed_over_are_counted_by_their_endings(tmp_path, capsys):
    folder = tmp_path / 'in'
    (folder / 'sub').mkdir(parents=True)
    write_lines(folder / 'a.txt')
    for name in ('b.json', 'sub/c.JSON', 'd', 'e.txt.xz', 'f.text', '.hidden', 'sub/.also.txt'):
        (folder / name).write_text('not taken\n')
    out = prepared(input=folder, encoder='none', tokenizer='byte', out=tmp_path / 'out')
    said = '5 files passed over: 2 .json'
    printed = capsys.readouterr()
    assert said in printed.err and said in printed.out and '1 without an ending' in printed.err
    counts = read_meta(out)['counts']['input']
    assert counts['passed over .json'] == 2 and counts['passed over .txt.xz'] == 1
    os.remove(folder / 'a.txt')
    with pytest.raises(ValueError, match='in: 5 files passed over: 2 .json.*expected one ending'):
        texts(folder)

    # texts and latents may share a folder
    for i in range(2):
        (folder / f'{i}.txt').write_text(f'{i}\n')
        np.save(folder / f'{i}.npy', np.full((1, 3), i, np.float32))
    found, counts = read_all(input=folder, latents_from=folder)
    assert [document.latent()[0, 0] for document in found] == [0, 1]
    assert sum(n for name, n in counts.items() if name.startswith('passed over')) == 5


@pytest.mark.parametrize('names, content, n_copies', [
    (('n.txt', 'n.txt.gz'), 'a\nb\n', 1), (('n.TXT', 'n.txt.GZ'), 'a\nb', 1),
    (('n.csv', 'n.jsonl', 'n.txt.gz'), None, 2), (('n.txt', 'm.txt.gz'), 'a\nb\n', 0),
    (('n.txt', 'sub/n.txt'), 'a\nb\n', 0)])
def test_a_file_in_two_forms_is_read_once(tmp_path, capsys, names, content, n_copies):
    folder = tmp_path / 'in'
    (folder / 'sub').mkdir(parents=True)
    forms = {'.csv': 'id,text\n1,a\n2,b\n', '.jsonl': '{"text": "a"}\n{"text": "b"}\n'}
    for name in names:
        text = (content or forms.get(os.path.splitext(name)[1], 'a\nb\n')).encode()
        (folder / name).write_bytes(gzip.compress(text) if name[-2:] in ('gz', 'GZ') else text)
    for spec in (folder, ','.join(str(folder / name) for name in names)):
        found, counts = read_all(input=spec)
        assert [document.text for document in found] == ['a', 'b'] * (len(names) - n_copies)
        assert counts['copies'] == n_copies
    assert capsys.readouterr().err.count('so it is left out') == n_copies

    # of other texts both
    (folder / names[-1]).write_bytes(gzip.compress(b'a\nc\n') if names[-1][-2:] in ('gz', 'GZ')
                                     else b'a\nc\n')
    assert 'c' in texts(folder)


def test_each_real_file_of_a_folder_comes_once(tmp_path):
    folder = tmp_path / 'd'
    (folder / 'sub').mkdir(parents=True)
    (folder / 'b.txt').write_text('one\n')
    (folder / 'sub/c.txt').write_text('two\n')
    for link, target in (('self', '.'), ('sub/up', '..'), ('x', 'y'), ('y', 'sub'),
                         ('other.txt', 'b.txt'), ('more.txt', 'b.txt')):
        os.symlink(target, folder / link)
    assert sorted(texts(folder)) == ['one', 'two'] and texts(folder / '*.txt') == ['one']
    assert sources.names_of(source_of(input=folder))[0] == 'b.txt'
    os.symlink('round.txt', folder / 'round.txt')
    with pytest.raises(OSError, match='round.txt'):
        texts(folder)
    open(os.fsencode(folder) + b'/caf\xe9.txt', 'w').close()
    with pytest.raises(ValueError, match=r"caf.udce9.txt': this name is not UTF-8"):
        texts(folder)


@pytest.mark.parametrize('text, end', [
    ('\n{"text": "one"}\n', '.jsonl'), ('[\n  {"text": 1}', '.jsonl'), ('>a\nMKTAYIAK', '.fasta'),
    ('id\ttext\n1\tone', '.csv'), ('"text"\n"a dog"', '.csv'),
    ('"id";"text"\n"1";"a"', '.csv'), ('"n";"words"\n"1";"a"', '.csv'),
    ('"Yes," he said, "no"\n"Go"', ''), ('{curly} words, text', ''), ('> quoted\nmail', ''),
    ('[1]', '')])
def test_a_text_that_looks_like_another_kind_of_file_is_named_once(tmp_path, capsys, text, end):
    (tmp_path / 'a.txt').write_text(text)
    assert texts(tmp_path / 'a.txt') == texts(tmp_path / 'a.txt')
    assert capsys.readouterr().err.count(f'looks like {end}') == bool(end)

# -----------------------------------------------------------------------------
# The hub

def test_a_dataset_of_the_hub_is_streamed_by_name_field_and_split(tmp_path, monkeypatch):
    """ load_dataset takes a folder as it takes a hub id: the same code reads both. """
    pytest.importorskip('datasets', reason='reads hub datasets: pip install datasets')
    (tmp_path / 'hub').mkdir()
    for split, lines in (('train', LINES[:100]), ('validation', LINES[100:])):
        records = '\n'.join(json.dumps(dict(body=line)) for line in lines)
        (tmp_path / f'hub/{split}.jsonl').write_text(records)
    monkeypatch.setitem(hub.HUB, 'tiny', dict(path=str(tmp_path / 'hub'), val='validation'))
    knobs = dict(hub_dataset='tiny', field='body', encoder='none', hub_revision='main')
    folder = prepared(**knobs, out=tmp_path / 'out')
    assert texts_of(folder, 'train') == LINES[:100] and texts_of(folder, 'val') == LINES[100:]
    meta = read_meta(folder)
    assert meta['source']['hub_revision'] == 'main' and str(tmp_path) not in json.dumps(meta)
    with pytest.raises(ValueError, match="no text in field 'text', found .*body"):
        read_all(hub_dataset='tiny')
    with pytest.raises(ValueError, match='hub_dataset=.*nowhere: cannot be read'):
        read_all(hub_dataset=str(tmp_path / 'nowhere'))

# -----------------------------------------------------------------------------
# Proteins

@pytest.mark.parametrize('text, sequences, counted', [
    ('>a first\nMKTAYIAKQR\nQISFVKSHFS*\n>b\nmktayiak\n>empty\n\n>c\nMJ*KV\n',
     ['MKTAYIAKQRQISFVKSHFS', 'MKTAYIAK', 'MXXKV'],
     dict(empty=1, unknown_residues=1, stops=1)),
    ('>a\nacgu\n>b\nMKV**', ['ACGU', 'MKV'], dict(nucleotides=1)),
    ('; all of it\n#A3M#\n>a\n; a helix\nMKT\n!note\nAYI\n\n>b\n# signal\nMKH',
     ['MKTAYI', 'MKH'], {}),
    ('>a\rMK--T..A\r>b\r\n MKTA \r\n', ['MKTA', 'MKTA'], dict(gaps=4))])
def test_fasta_records_are_sequences_and_what_is_no_residue_is_counted(tmp_path, text, sequences,
                                                                       counted):
    for name in ('a.fasta', 'a.pep', 'a.fa.gz'):
        content = text.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith('gz') else content)
        found, counts = read_all(input=path)
        assert [document.text for document in found] == sequences
        n_read = len(sequences) + counted.get('empty', 0)
        assert +counts == Counter(read=n_read, kept=len(sequences), **counted)
        assert sources.is_fasta(source_of(input=path))


@pytest.mark.parametrize('line', ['MK7A', 'a comment about the helix', '//', 'MKT@A', '40 40 38',
                                  'MK\u017fT', 'MKT,AYI'])
def test_a_line_that_is_no_sequence_stops_with_its_file_and_line(tmp_path, line):
    (tmp_path / 'a.fa').write_text(f'>a\nMKT\n>b\n{line}\nMKT\n')
    with pytest.raises(ValueError, match='a.fa, line 4: found .*expected residues'):
        read_all(input=tmp_path)
    (tmp_path / 'a.fa').write_text('MKV\n')
    with pytest.raises(ValueError, match='a.fa, line 1: found .*expected ">name"'):
        read_all(input=tmp_path)


def test_fasta_becomes_a_dataset_of_residues_without_duplicates_by_default(tmp_path, capsys):
    g = np.random.default_rng(0)
    letters = list(RESIDUES[:20])
    sequences = [''.join(g.choice(letters, g.integers(20, 60))) for _ in range(60)]
    records = ''.join(f'>{i}\n{s}\n' for i, s in enumerate([*sequences, *sequences[:7]]))
    (path := tmp_path / 'a.fasta').write_text(records)
    knobs = dict(input=path, encoder='none')
    folder = prepared(**knobs, out=tmp_path / 'out', val_fraction=.2)
    ds = PackedDataset(folder, 'train')
    assert ds.meta['tokenizer']['kind'] == 'esm' and ds.vocab_size == 29
    counts = ds.meta['counts']['input']
    assert counts['duplicate'] == 7
    assert sorted(texts_of(folder, 'train') + texts_of(folder, 'val')) == sorted(sequences)
    both = prepared(**knobs, val_input=path, out=tmp_path / 'both')
    assert texts_of(both, 'train') == texts_of(both, 'val') == sequences, 'within val too'
    assert '60 of 60 documents of val_input are in the input, too' in capsys.readouterr().err
    with pytest.raises(ValueError, match='is none of LAGV'):
        load_tokenizer(folder).encode('hello you')
    path.write_text(''.join(f'>{i}\nACGT{"ACGT"[i % 4]}{"ACGT"[i // 4]}\n' for i in range(16)))
    prepared(input=path, out=tmp_path / 'dna', encoder='none')
    assert '16 of 16 sequences' in capsys.readouterr().err


# -----------------------------------------------------------------------------
# Latents that are there already

def own_latents(tmp_path, shape=(6,)):
    """ What writes LINES, and latents that say which line they belong to. """
    z = np.random.default_rng(0).standard_normal((150, *shape)).astype(np.float32)
    z.reshape(150, -1)[:, 0] = np.arange(150)
    return write_lines(tmp_path / 'a.txt'), z


def latents_of(folder):
    """ {text: its raw latent} of both splits. """
    found = {}
    for split in ('train', 'val'):
        raw = (ds := PackedDataset(folder, split)).raw_latents(np.arange(len(ds)))
        found |= dict(zip(texts_of(folder, split), raw.numpy()))
    return found


@pytest.mark.parametrize('shape', [(6,), (4, 6)])
def test_given_latents_stay_with_their_texts(tmp_path, monkeypatch, shape):
    path, z = own_latents(tmp_path, shape)
    (tmp_path / 'z').mkdir()
    for i in range(12):                                                  # 2.npy comes before 10.npy
        part = z[13 * i:13 * (i + 1)]
        np.save(tmp_path / f'z/{i}.npy', part.astype(np.float16) if i == 3 else part)
    knobs = dict(input=path, latents_from=tmp_path / 'z', out=tmp_path / 'out', encoder='none')
    folder = prepared(**knobs)
    found = latents_of(folder)
    assert len(found) == 150
    for line, latent in zip(LINES, z):
        assert np.allclose(found[line], np.atleast_2d(latent), rtol=1e-3)

    np.save(tmp_path / 'z/3.npy', -z[39:52])                             # of the same texts
    with pytest.raises(ValueError, match='train-0000[01] would become another'):
        prepared(**knobs)
    monkeypatch.setattr('configurator.set_by', {})
    with pytest.raises(ValueError, match='nobody knows what made its latents'):
        prepared(input=path, out=tmp_path / 'like', same_as=folder)


def test_files_of_two_folders_belong_together_by_their_names(tmp_path):
    (tmp_path / 'texts').mkdir(), (tmp_path / 'z').mkdir()
    for i in range(1, 13):                                               # 2 comes before 10
        (tmp_path / f'texts/{i}.txt').write_text(f'file\t{i}')
        np.save(tmp_path / f'z/{i}.npy', np.full((1, 6), i, np.float32))
    both = dict(input=tmp_path / 'texts', latents_from=tmp_path / 'z')
    globs = dict(input=f'{tmp_path}/texts/*.txt', latents_from=f'{tmp_path}/z/*.npy')
    for knobs in (both, globs):
        found, _ = read_all(**knobs)
        numbers = [int(document.text.split()[1]) for document in found]
        assert numbers == [document.latent()[0, 0] for document in found] == [*range(1, 13)]
    # as many rows as texts, but not file by file; then other names
    (tmp_path / 'texts/4.txt').write_text('one\ntwo')
    np.save(tmp_path / 'z/5.npy', np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match='z/4.npy: 1 rows for 2 documents'):
        read_all(**both)
    os.rename(tmp_path / 'z/7.npy', tmp_path / 'z/7b.npy')
    with pytest.raises(ValueError, match='input has 7 where latents_from has 7b'):
        read_all(**globs)


def test_given_latents_that_do_not_fit_are_refused(tmp_path):
    path, z = own_latents(tmp_path)
    for array, message in (
            (z[:149], '149 rows for 150 documents'), (np.vstack([z, z[:1]]), '151 rows for 150'),
            (z[:100], '100 rows for 150 documents of the input, expected a row for each'),
            (z[:, 0], r'z.npy: latents are float32 \(150,\), expected floats \(n, D\)'),
            (np.array([{}] * 150, object), 'z.npy: latents cannot be read'),
            (None, 'z.npy: latents cannot be read')):
        np.save(tmp_path / 'z.npy', z if array is None else array, allow_pickle=True)
        if array is None:
            (tmp_path / 'z.npy').write_bytes(b'PK\x03\x04' + b'\0' * 50)
        with pytest.raises(ValueError, match=message):
            prepared(input=path, latents_from=tmp_path / 'z.npy', out=tmp_path / 'out',
                     encoder='none')


def with_columns(folder, lists, texts=LINES):
    """ The same texts and lists of numbers in each kind of file that has columns. """
    import pyarrow
    import pyarrow.parquet
    folder.mkdir()
    records = [json.dumps(dict(text=text, embedding=row)) for text, row in zip(texts, lists)]
    (folder / 'a.jsonl').write_text('\n'.join(records))
    with open(folder / 'b.csv', 'w', newline='') as f:
        rows = [[text, json.dumps(row)] for text, row in zip(texts, lists)]
        csv.writer(f).writerows([['text', 'embedding'], *rows])
    table = pyarrow.table(dict(embedding=lists, text=texts, n=range(len(texts))))
    pyarrow.parquet.write_table(table, folder / 'c.parquet')
    with pyarrow.ipc.new_file(folder / 'd.arrow', table.schema) as f:
        f.write_table(table)
    return sorted(folder.iterdir())


@pytest.mark.parametrize('shape', [(6,), (4, 6)])
def test_latents_in_a_column_stay_with_their_texts(tmp_path, shape):
    pytest.importorskip('pyarrow', reason='reads parquet: pip install pyarrow')
    _, z = own_latents(tmp_path, shape)
    found = []
    for path in with_columns(tmp_path / 'in', z.tolist()):
        docs, counts = read_all(input=path, latents_from='column:embedding')
        assert [doc.text for doc in docs] == LINES and counts['read'] == counts['kept'] == 150
        for doc, latent in zip(docs, z):
            assert np.array_equal(doc.latent(), np.atleast_2d(latent)), path
        found.append([doc.place.rpartition(', ')[2] for doc in docs[:2]])
    assert found == [['line 1', 'line 2'], ['line 2', 'line 3'], *[['row 0', 'row 1']] * 2]

    # as a dataset; a blank text takes its latent with it
    texts = ['', *LINES[1:]]
    with_columns(tmp_path / 'one', z.tolist(), texts)
    folder = prepared(input=tmp_path / 'one/c.parquet', latents_from='column:embedding',
                      out=tmp_path / 'out', encoder='none')
    stored = latents_of(folder)
    assert len(stored) == 149 and read_meta(folder)['counts']['input']['empty'] == 1
    for text, latent in zip(texts[1:], z[1:]):
        assert np.allclose(stored[text], np.atleast_2d(latent), rtol=1e-3)
    assert read_meta(folder)['source']['latents_from'] == 'column:embedding'


@pytest.mark.parametrize('value, message', [
    (None, 'no latent in .embedding., found'), ([], 'no latent'), (7, 'no latent'),
    ('none', 'no latent'), ([1, 'a', 2, 3, 4, 5], 'no latent'),
    ([1.], r'a latent \(1, 1\) in .embedding., and .*(line|row) [012] has one \(1, 6\)'),
    ([[1.] * 6] * 2, r'a latent \(2, 6\) .*expected lists of one length')])
def test_a_column_that_is_no_list_of_numbers_is_named_by_file_and_row(tmp_path, value, message):
    lists = [[float(i)] * 6 for i in range(9)]
    lists[5] = value
    records = [json.dumps(dict(text='a', embedding=one)) for one in lists]
    (tmp_path / 'a.jsonl').write_text('\n'.join(records))
    with open(tmp_path / 'a.csv', 'w', newline='') as f:
        cells = [one if isinstance(one, str) else json.dumps(one) for one in lists]
        csv.writer(f).writerows([['text', 'embedding'], *(['a', one] for one in cells)])
    for where in ('a.jsonl, line 6', 'a.csv, line 7'):
        with pytest.raises(ValueError, match=f'{where}: {message}'):
            read_all(input=tmp_path / where.split(',')[0], latents_from='column:embedding')


def test_a_column_that_is_not_there_and_a_file_without_columns_are_refused(tmp_path):
    pytest.importorskip('pyarrow', reason='reads parquet: pip install pyarrow')
    for path in with_columns(tmp_path / 'in', [[1.]] * 150):
        with pytest.raises(ValueError, match=f'{path.name}.*--latents_from=column:'):
            read_all(input=path, latents_from='column:vector')
    for knobs, message in ((dict(input=write_lines(tmp_path / 'a.txt')), 'a.txt: .*with records'),
                           (dict(), 'your own files: --input=')):
        with pytest.raises(ValueError, match=message):
            prepared(**knobs, latents_from='column:vector', encoder='none', out=tmp_path / 'out')


def test_a_text_too_long_for_one_sample_is_dropped_and_counted_when_its_latent_is_given(tmp_path):
    path, z = own_latents(tmp_path)
    long = ' '.join(LINES[:9])
    write_lines(path, [long, *LINES[1:]])
    np.save(tmp_path / 'z.npy', z)
    folder = prepared(input=path, latents_from=tmp_path / 'z.npy', out=tmp_path / 'out',
                      encoder='none', max_tokens=40)
    splits = read_meta(folder)['splits'].values()
    for key, n in (('documents', 150), ('samples', 149), ('longer_than_max_tokens', 1)):
        assert sum(split[key] for split in splits) == n
    assert long not in latents_of(folder)


def test_a_latent_that_float16_cannot_hold_is_named_by_its_row(tmp_path, capsys):
    path, z = own_latents(tmp_path)
    knobs = dict(input=path, latents_from=f'{tmp_path}/z.npy,{tmp_path}/y.npy', encoder='none',
                 tokenizer='byte')

    def prepare(name, latents):
        np.save(tmp_path / 'z.npy', latents[:100].astype(np.float32))
        np.save(tmp_path / 'y.npy', latents[100:].astype(np.float32))
        prepared(**knobs, out=tmp_path / name)
    for value, reason in ((np.nan, 'NaN or inf: mend it'), (-np.inf, 'NaN or inf: mend it'),
                          (-70000, '70,000, and float16 ends at 65,504: divide')):
        bad = z.copy()
        bad[107, 3] = value
        message = f'latents cannot be stored, more than 0.1%; the first: y.npy, row 7: {reason}'
        with pytest.raises(ValueError, match=message):
            prepare('out', bad)

    noise = np.random.default_rng(0).normal(size=(150, 6))
    with pytest.raises(ValueError, match='6 of 6 dim.* where its steps are 0.5; subtract the mean'):
        prepare('coarse', .1 * noise + 1000)
    z[:, 4] = 1000 + .1 * z[:, 4]
    capsys.readouterr()
    prepare('one', z)
    said = 'warning: 1 of 6 dimensions of the latents vary by less'
    assert said in capsys.readouterr().err
    z[:, 4] = 1000.1                                         # the same everywhere: nothing is lost
    prepare('none', z)
    assert 'dimensions of the latents' not in capsys.readouterr().err
    with pytest.raises(ValueError, match='all latents of train are the same.*--latents_from'):
        prepare('same', np.full_like(z, .3))


@pytest.mark.parametrize('form', ['>f4', '>f8', '>f2', np.longdouble])
def test_latents_in_any_order_of_bytes_are_the_same(tmp_path, form):
    path, z = own_latents(tmp_path)
    np.save(tmp_path / 'z.npy', z.astype(form))
    found, _ = read_all(input=path, latents_from=tmp_path / 'z.npy')
    for document, latent in zip(found, z):
        assert document.latent().dtype.isnative and document.latent().itemsize <= 8
        assert np.allclose(document.latent()[0], latent, rtol=1e-3)


def test_a_text_is_hashed_once_in_a_reading_also_where_copies_are_left_out(tmp_path, monkeypatch):
    lines = [f'line {i // 2}' for i in range(40)]
    path = write_lines(tmp_path / 'a.txt', lines)
    hashed = []
    text_hash = sources.text_hash
    monkeypatch.setattr(sources, 'text_hash', lambda text: hashed.append(text) or text_hash(text))
    sources.read_once(source_of(input=path, encoder='none', tokenizer='byte', distinct=True), 0)
    assert hashed == lines


def test_where_no_document_is_short_enough_for_its_latent_the_error_says_so(tmp_path):
    path, z = own_latents(tmp_path)
    np.save(tmp_path / 'z.npy', z)
    with pytest.raises(ValueError, match='none of .* documents is left, .* max_tokens=8 tokens'):
        prepared(input=path, latents_from=tmp_path / 'z.npy', encoder='none', tokenizer='byte',
                 max_tokens=8, out=tmp_path / 'out')


def test_files_that_are_passed_over_are_counted_in_the_order_of_their_names():
    """ They come as a set, whose order changes from one process to the next. """
    names = [f'{letter}.{letter}' for letter in 'abcdefghijklmnopqrstuvwxyz']
    assert list(readers.count_endings(set(names))) == [f'passed over .{n[0]}' for n in names]


def test_latents_of_zeros_are_counted_and_many_stop(tmp_path, capsys):
    path, z = own_latents(tmp_path)
    z = z + 1
    knobs = dict(input=path, latents_from=tmp_path / 'z.npy', encoder='none', tokenizer='byte')
    z[[7, 90]] = 0
    np.save(tmp_path / 'z.npy', z)
    folder = prepared(**knobs, out=tmp_path / 'out')
    splits = read_meta(folder)['splits'].values()
    assert sum(split['zero'] for split in splits) == 2
    printed = capsys.readouterr()
    said = '2 of 150 latents are zeros, which say nothing of their texts; the first: z.npy, row '
    assert said in printed.err and '2 samples have a latent of zeros' in printed.out
    for n in (20, 30):                                       # of the first 40: also if most are
        z[:n] = 1e-9                                         # what float16 holds of it
        np.save(tmp_path / 'z.npy', z)
        said = f'{n} of 40 latents are zeros, .* more than 10%; the first: z.npy'
        with pytest.raises(ValueError, match=said):
            prepared(**knobs, out=tmp_path / f'many {n}')


def test_an_encoder_named_beside_given_latents_must_be_theirs(tmp_path):
    (tmp_path / 'bert').mkdir()
    encoder = save_encoder(tmp_path / 'bert')
    z = find_encoder(encoder, pooling='mean')(LINES)[:, 0].numpy()
    knobs = dict(input=write_lines(tmp_path / 'a.txt'), latents_from=tmp_path / 'z.npy',
                 encoder=encoder, encoder_dims=0, pooling='mean')
    np.save(tmp_path / 'z.npy', z)
    meta = read_meta(prepared(**knobs, out=tmp_path / 'out'))
    assert meta['encoder']['pooling'] == 'mean' and meta['latent_shape'] == [1, 32]
    np.save(tmp_path / 'z.npy', z[::-1])
    with pytest.raises(ValueError, match='not those of encoder'):
        prepared(**knobs, out=tmp_path / 'other')


@pytest.mark.parametrize('knobs, message', [
    (dict(hub_dataset='lm1b', import_dir='x'), 'given: hub_dataset and import_dir'),
    (dict(input='a.fasta', hub_dataset='lm1b'), 'given: input and hub_dataset'),
    (dict(import_dir='x', latents_from='z.npy'), 'import_dir and latents_from each say'),
    (dict(input='a.fasta', image_size=8), 'image_size is set, but input=a.fasta is no folder'),
    (dict(input='a.fasta', image_size=10, patch=4), 'multiple of patch 4'),
    (dict(input='a.fasta', val_input='a.fasta', latents_from='z.npy'), 'val_input goes with'),
    (dict(input='a.fasta', latents_from='z.npy', encoder='lsa'), 'name their encoder')])
def test_knobs_that_contradict_each_other_are_refused(tmp_path, monkeypatch, knobs, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a.fasta').write_text('>a\nMKV\n')
    with pytest.raises(ValueError, match=message):
        prepared(**dict(out='out', encoder='none') | knobs)

# -----------------------------------------------------------------------------
# The earlier layout

def test_chunks_survive_export_and_import_with_their_latents(tmp_path):
    path = write_lines(tmp_path / 'a.txt', [' '.join(LINES[i:i + 5]) for i in range(0, 150, 5)])
    folder = prepared(input=path, out=tmp_path / 'a', max_tokens=24)
    assert any(text.startswith(' ') for text in texts_of(folder, 'train')), 'the case to be tested'
    os.mkdir(tmp_path / 'old')
    export(folder, str(tmp_path / 'old'))
    back = prepared(import_dir=tmp_path / 'old', out=tmp_path / 'back', encoder='none',
                    tokenizer='byte', max_tokens=500)
    for split in ('train', 'val'):
        assert texts_of(back, split) == texts_of(folder, split)
    a, b = latents_of(folder), latents_of(back)
    assert a.keys() == b.keys() and all(np.array_equal(a[text], b[text]) for text in a)
    with pytest.raises(ValueError, match='is there already'):
        export(folder, folder)


def test_the_earlier_layout_is_imported_without_embedding(tmp_path):
    old, items = tmp_path / 'old', []
    for split, lines in (('train', LINES[:120]), ('validation', LINES[120:])):
        (old / f'texts/{split}').mkdir(parents=True)
        (old / f'latents/{split}').mkdir(parents=True)
        items = [dict(text=line, latent_path=f'latents/{split}/{i}.npy')
                 for i, line in enumerate(lines)]
        for i, item in enumerate(items):
            latent = np.full(6, i, np.float32) + np.arange(6) / 8
            np.save(old / item['latent_path'], latent if i % 2 else latent[None])
            if i % 3 == 0:                                   # the file counts, not its preview
                (old / f'texts/{split}/{i}.txt').write_text(lines[i])
                item['text'] = lines[i][:10]
        (old / f'{split}_data.json').write_text(json.dumps(items))
    folder = prepared(import_dir=old, out=tmp_path / 'new', encoder='none')
    assert texts_of(folder, 'train') == LINES[:120] and texts_of(folder, 'val') == LINES[120:]
    z = PackedDataset(folder, 'val').raw_latents([7, 8])
    assert np.array_equal(z[:, 0, 0], [7, 8]) and z.shape == (2, 1, 6)


@pytest.mark.parametrize('item, message', [
    (dict(text='a'), 'item 0: no latent_path'),
    (dict(text='a', latent_path='../out.npy'), 'lies outside'),
    (dict(text='a', latent_path='latents/gone.npy'), 'gone.npy: missing'),
    (dict(latent_path='latents/a.npy'), 'no "text", and no file'),
    (dict(text='a', latent_path='latents/cube.npy'), r'a latent is float32 \(1, 1, 4\), expected')])
def test_an_earlier_layout_that_is_broken_stops_with_its_place(tmp_path, item, message):
    (tmp_path / 'latents').mkdir()
    np.save(tmp_path / 'latents/a.npy', np.zeros(4, np.float32))
    np.save(tmp_path / 'latents/cube.npy', np.zeros((1, 1, 4), np.float32))
    (tmp_path / 'train_data.json').write_text(json.dumps([item]))
    with pytest.raises(ValueError, match=message):
        [document.latent() for document in read_all(import_dir=tmp_path)[0]]

# -----------------------------------------------------------------------------
# Images

def test_captioned_images_become_patches_and_go_to_one_split_with_all_captions(tmp_path,
                                                                               monkeypatch):
    Image = pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f'{i}.png')
    rows = ''.join(f'{i}.png,"{word}, {i}"\n' for i in range(40) for word in WORDS[:5])
    (tmp_path / 'metadata.csv').write_text(f'file_name,text\n{rows}')
    knobs = dict(input=tmp_path, image_size=8, patch=4)
    (tmp_path / 'more.png').write_bytes(b'no caption names it')
    found, counts = read_all(**knobs)
    assert counts['passed over .png'] == 1
    assert [d.text for d in found[:3]] == ['a, 0', 'the, 0', 'dog, 0'] and len(found) == 200
    z = found[15].latent()
    assert z.shape == (4, 48)
    assert np.allclose(z[1].reshape(4, 4, 3), pixels[3, :4, 4:] / 127.5 - 1, atol=1e-6)
    assert image_patches(str(tmp_path / '0.png'), 4, 2, 1).shape == (4, 4)

    folder = prepared(**knobs, out=tmp_path / 'out', encoder='none', val_fraction=.2)
    ds = PackedDataset(folder, 'train')
    assert ds.latent_shape == (4, 48) and np.allclose(latents_of(folder)['a, 3'], z, atol=1e-3)
    assert [ds.meta['source'][knob] for knob in ('image_size', 'patch', 'channels')] == [8, 4, 3]
    train, val = ({text.split()[1] for text in texts_of(folder, split)}
                  for split in ('train', 'val'))
    assert len(train | val) == 40 and not train & val

    (tmp_path / '3.png').write_bytes(b'no image')
    with pytest.raises(ValueError, match='3.png: no image that can be read'):
        prepared(**knobs, out=tmp_path / 'other', encoder='none')
    Image.new('1', (13_400, 13_400)).save(tmp_path / '3.png')            # a small file
    with pytest.raises(ValueError, match='3.png: .*179560000 pixels. exceeds limit of 178956970'):
        image_patches(str(tmp_path / '3.png'), 8, 8, 1)
    monkeypatch.setattr(images, 'MOST_MEMORY', 4 * 63)                   # else 2^28
    with pytest.raises(ValueError, match='4.png: .*8 x 8 pixels, at most 63'):
        image_patches(str(tmp_path / '4.png'), 8, 8, 1)
    (tmp_path / '4.png').write_bytes(LFS)
    with pytest.raises(ValueError, match='4.png: .*a Git LFS pointer'):
        image_patches(str(tmp_path / '4.png'), 8, 8, 1)
    os.remove(tmp_path / '5.png')
    with pytest.raises(ValueError, match='5.png: missing'):
        read_all(**knobs)


def test_what_is_transparent_lies_on_white_and_other_depths_are_refused(tmp_path):
    Image = pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    plain, half = Image.fromarray(grey), Image.fromarray(np.uint8([[0, 128] * 4] * 8))
    on_white = 255 - (255. - grey) * np.array(half) / 255
    plain.save(tmp_path / 'clear.png', transparency=8)
    for name, image, expected in (
            ('8.png', plain, grey),
            ('la.png', Image.merge('LA', [plain, half]), on_white),
            ('rgba.png', Image.merge('RGBA', [plain] * 3 + [half]), on_white),
            ('clear.png', None, np.where(grey == 8, 255, grey)),
            ('cmyk.tif', Image.merge('RGB', [plain] * 3).convert('CMYK'), grey)):
        if image:
            image.save(tmp_path / name)
        for channels in (1, 3):
            z = image_patches(str(tmp_path / name), 8, 8, channels).reshape(8, 8, channels)
            assert np.abs((z + 1) * 127.5 - expected[..., None]).max() < .8, (name, channels)
    Image.fromarray(grey.astype(np.int32)).save(tmp_path / 'i.tif')
    with pytest.raises(ValueError, match='i.tif: no image .* whose white is unknown'):
        image_patches(str(tmp_path / 'i.tif'), 8, 8, 1)
