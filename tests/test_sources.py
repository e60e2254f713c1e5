""" Every kind of source as sentences: the same documents whatever holds them, each counted, latents that stay with their text. """
import csv
import gzip
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

from configurator import configure
from corpora import hub, readers
from corpora.images import image_patches
from corpora.layouts import export
from corpora.lsa import check_texts
from corpora.sources import Source, documents
from corpora.tokenizers import RESIDUES, load_tokenizer
from data import PackedDataset
from encoders import load_encoder
from launch import ROOT, TINY, measured, run_each, texts_of
from runs import manifest
from test_encoders import save_encoder
from test_prepare import LINES, WORDS, run, write_lines

PROTEINS = '>a first\nMKTAYIAKQR\nQISFVKSHFS*\n>b\nmktayiakqrqisfvkshfs\n>empty\n\n>c\nMJ*KV\n>d\nMKVLAAGIVGLLLA\n'


def read_all(**knobs):
    counts = Counter()
    return list(documents(Source(**{k: str(v) if isinstance(v, os.PathLike) else v for k, v in knobs.items()}), counts)), counts


def test_a_tsv_is_read_as_pandas_writes_it_and_by_column(tmp_path):
    (tmp_path / 'a.tsv').write_text('id\ttext\tlabel\n1\tHe said "no\tx\n2\t"He said ""stop""\tand\r\nleft"\tnews\n\n3\tplain\t""\n')
    assert [d.text for d in read_all(input=tmp_path / 'a.tsv')[0]] == ['He said "no', 'He said "stop"\tand\nleft', 'plain']
    with pytest.raises(ValueError, match="a.tsv: 0 columns are called 'body', expected 1, found .*id.*--field"):
        read_all(input=tmp_path / 'a.tsv', field='body')


def test_parquet_reads_as_the_lines_do(tmp_path):
    pyarrow = pytest.importorskip('pyarrow', reason='pyarrow reads parquet: pip install datasets')
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table(dict(n=list(range(150)), text=LINES[:149] + [None])), tmp_path / 'a.parquet')
    found, counts = read_all(input=tmp_path)
    assert [d.text for d in found] == LINES[:149] and counts == Counter(read=150, kept=149, empty=1, invalid_utf8=0)
    words = pyarrow.array(LINES[:149] + [None])
    lists = pyarrow.array([[line] for line in LINES[:150]])
    odd = dict(category=words.dictionary_encode(), large=words.cast(pyarrow.large_string()), view=words.cast(pyarrow.string_view()),
               large_category=words.cast(pyarrow.large_string()).dictionary_encode(), list=lists, bytes=words.cast(pyarrow.binary()))
    pyarrow.parquet.write_table(pyarrow.table(odd), tmp_path / 'b.parquet', row_group_size=40)
    for column in odd:
        if column in ('list', 'bytes'):
            with pytest.raises(ValueError, match=f"b.parquet: no text in field '{column}', found .*choose with --field="):
                read_all(input=tmp_path / 'b.parquet', field=column)
        else:
            assert [d.text for d in read_all(input=tmp_path / 'b.parquet', field=column)[0]] == LINES[:149], column
    os.remove(tmp_path / 'b.parquet')
    for field, message in (('body', "0 columns are called 'body'"), ('n', "no text in field 'n', found {'n': 0}")):
        with pytest.raises(ValueError, match=f'a.parquet: {message}.*--field'):
            read_all(input=tmp_path, field=field)
    (tmp_path / 'a.parquet').write_bytes(b'PAR1')
    with pytest.raises(ValueError, match='a.parquet: broken parquet file'):
        read_all(input=tmp_path)


def test_a_dataset_of_the_hub_is_streamed_by_name_field_and_split(tmp_path, monkeypatch):
    """ load_dataset takes a folder as it takes a hub id: the same code reads both. """
    pytest.importorskip('datasets', reason='reads hub datasets: pip install datasets')
    (tmp_path / 'hub').mkdir()
    for split, lines in (('train', LINES[:100]), ('validation', LINES[100:])):
        (tmp_path / f'hub/{split}.jsonl').write_text('\n'.join(json.dumps(dict(body=line)) for line in lines))
    monkeypatch.setitem(hub.HUB, 'tiny', dict(path=str(tmp_path / 'hub'), val='validation'))
    folder = run(input='', hub_dataset='tiny', hub_revision='main', field='body', out=tmp_path / 'out', encoder='none')
    assert texts_of(folder, 'train') == LINES[:100] and texts_of(folder, 'val') == LINES[100:]
    assert manifest.read_meta(folder)['source']['hub_revision'] == 'main' and str(tmp_path) not in (tmp_path / 'out/meta.json').read_text()
    monkeypatch.setattr('corpora.hub.hub_commit', lambda name: f'commit of {name}')
    newest = run(input='builtin', hub_dataset='tiny', field='body', out=tmp_path / 'newest', encoder='none')
    assert manifest.read_meta(newest)['source']['hub_revision'] == 'commit of tiny' and texts_of(newest, 'val') == LINES[100:]
    with pytest.raises(ValueError, match="no text in field 'text', found .*body"):
        read_all(hub_dataset='tiny')
    with pytest.raises(ValueError, match='hub_dataset=.*nowhere: cannot be read'):
        read_all(hub_dataset=str(tmp_path / 'nowhere'))


def test_the_hub_is_asked_for_its_commit_and_a_missing_library_is_one_line(monkeypatch):
    import huggingface_hub

    class Api:
        def dataset_info(self, path):
            return type('Info', (), dict(sha=f'commit of {path}'))
    monkeypatch.setattr(huggingface_hub, 'HfApi', Api)
    assert hub.hub_commit('wikitext-103') == 'commit of Salesforce/wikitext' and hub.hub_commit('a/b') == 'commit of a/b'
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ValueError, match='pip install datasets'):
        read_all(hub_dataset='lm1b')


def hang_up(server, seen):
    """ Takes each call, says nothing and hangs up, until the server is closed. """
    with suppress(OSError):
        while True:
            caller, _ = server.accept()
            seen.append(1)
            caller.close()


def test_a_hub_that_is_not_there_is_one_line_whatever_is_asked_of_it_and_is_asked_once(tmp_path):
    """ Its libraries would call six times for each file. """
    server, seen = socket.create_server(('127.0.0.1', 0)), []
    endpoint = f'http://127.0.0.1:{server.getsockname()[1]}'
    threading.Thread(target=hang_up, args=(server, seen), daemon=True).start()
    code = f"""
import os, runpy, sys
for args in (['--encoder=e5'], ['--hub_dataset=lm1b'], ['--hub_dataset=lm1b', '--hub_revision=x']):
    sys.argv = ['prepare.py', '--out={tmp_path}/x', *args]
    try:
        runpy.run_path({str(ROOT / 'prepare.py')!r}, run_name='__main__')
    except SystemExit as stop:
        print('code', stop.code)
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, 'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '', 'HF_ENDPOINT': endpoint, 'HF_HOME': str(tmp_path)})
    server.close()
    lines = done.stderr.strip().splitlines()
    assert len(seen) == 1, 'calls'
    assert done.stdout.count('code 2') == 3 and len(lines) == 3, done.stderr
    assert all(line.startswith('error: ') and f'{endpoint} does not answer' in line for line in lines)


# -----------------------------------------------------------------------------
# longer than the limit, other encodings

LONG = 'word, ' * 999                                        # where the limit is 1,000 characters


def write_long(path, kind):
    """ Three documents of which the second is too long, as a file of this kind. """
    texts = ['first here', LONG, 'last here']
    if kind == 'line.txt.gz':
        path.write_bytes(gzip.compress('\n'.join(texts).encode()))
    elif kind == 'paragraph.txt':
        path.write_text('\n\n'.join([texts[0], 'word\n' * 999, texts[2]]))
    elif kind == 'jsonl':
        path.write_text('\n'.join(json.dumps(dict(text=text)) for text in texts))
    elif kind == 'csv':                                      # with commas, quotes and line ends in it
        with open(path, 'w', newline='') as f:
            csv.writer(f).writerows([['text', 'n'], *((text, 1) for text in (texts[0], 'word, "word" word, word\n' * 200, texts[2]))])
    elif kind == 'tsv':
        path.write_text('n\ttext\n' + ''.join(f'1\t{text}\n' for text in texts))
    elif kind == 'fasta':
        path.write_text('>a\nMKV\n>b\n' + 'MKVM\n' * 999 + '>c\nVKM\n')
    else:
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table(dict(text=texts)), path)


@pytest.mark.parametrize('kind', ['line.txt.gz', 'paragraph.txt', 'jsonl', 'csv', 'tsv', 'fasta', 'parquet'])
def test_a_document_longer_than_the_limit_is_a_counted_drop_and_its_neighbours_stay(tmp_path, kind):
    path = tmp_path / f'a.{kind}'
    if kind == 'parquet':
        pytest.importorskip('pyarrow', reason='pyarrow reads parquet: pip install datasets')
    write_long(path, kind)
    knobs = dict(input=path, split_on='paragraph' if kind == 'paragraph.txt' else 'line')
    found, counts = read_all(**knobs, document_limit=1000)
    whole, all_counts = read_all(**knobs)
    assert len(found) == 2 and counts == Counter(read=3, kept=2, over_document_limit=1, invalid_utf8=0) | (
        Counter(unknown_residues=0) if kind == 'fasta' else Counter())
    assert [d.text for d in whole][::2] == [d.text for d in found] and len(whole[1].text) > 3000 and all_counts['kept'] == 3
    limit = len(whole[1].text) - 1                           # by one character
    assert read_all(**knobs, document_limit=limit)[1]['over_document_limit'] == 1
    exact = max(len(whole[1].text) * 2, 1000)                # a limit that holds it, quotes and line ends too
    assert read_all(**knobs, document_limit=exact)[1]['kept'] == 3


def test_beside_a_text_that_is_too_long_rows_of_latents_and_captions_stay_with_their_texts(tmp_path):
    (tmp_path / 'a.txt').write_text(LONG)
    assert read_all(input=tmp_path / 'a.txt', split_on='file', document_limit=1000)[1] == Counter(read=1, over_document_limit=1)
    (tmp_path / 'b.txt').write_text(f'one\n{LONG}\nthree\n')
    np.save(tmp_path / 'z.npy', np.arange(6, dtype=np.float32).reshape(3, 2))
    found, _ = read_all(input=tmp_path / 'b.txt', latents_from=tmp_path / 'z.npy', document_limit=1000)
    assert [(d.text, d.latent().tolist()) for d in found] == [('one', [[0, 1]]), ('three', [[4, 5]])]
    (tmp_path / 'pictures').mkdir()
    pytest.importorskip('PIL.Image', reason='reads images: pip install pillow').new('RGB', (8, 8)).save(tmp_path / 'pictures/a.png')
    captions = [dict(file_name='a.png', text=text) for text in ('one', LONG, 'three')]
    (tmp_path / 'pictures/metadata.jsonl').write_text('\n'.join(map(json.dumps, captions)))
    found, counts = read_all(input=tmp_path / 'pictures', image_size=8, document_limit=1000)
    assert [d.text for d in found] == ['one', 'three'] and counts['over_document_limit'] == 1


@pytest.mark.parametrize('name, content', [
    ('a.txt', 'one\nt\u2028wo\n\nthree'), ('a.jsonl', '{"text": "one"}\n{"text": "t\u2028wo"}\n\n{"text": "three"}\n'),
    ('a.csv', 'id,text\n1,one\n2,"t\u2028wo"\n\n3,three\n'), ('a.tsv', 'id\ttext\n1\tone\n2\tt\u2028wo\n3\tthree')])
def test_any_line_ending_is_a_line_ending(tmp_path, name, content):
    for end in ('\n', '\r\n', '\r'):
        (tmp_path / name).write_bytes(content.replace('\n', end).encode())
        assert [d.text for d in read_all(input=tmp_path / name)[0]] == ['one', 't\u2028wo', 'three'], end
    (tmp_path / 'b.txt').write_bytes(b'one\r\ntwo\rthree\n\r\nfour\r\r\nfive')
    for split_on, texts in (('line', ['one', 'two', 'three', 'four', 'five']), ('paragraph', ['one\ntwo\nthree', 'four', 'five']),
                            ('file', ['one\ntwo\nthree\n\nfour\n\nfive'])):
        assert [d.text for d in read_all(input=tmp_path / 'b.txt', split_on=split_on)[0]] == texts
    (tmp_path / 'c.jsonl').write_text(json.dumps(dict(text='one\r\ntwo\rthree')))
    assert read_all(input=tmp_path / 'c.jsonl')[0][0].text == 'one\ntwo\nthree'


def test_documents_between_lines_of_ones_own(tmp_path):
    (tmp_path / 'fortunes').write_text('A day.\n  -- Someone\n%\n\nNo % here.\n%\n%\nThe last.\n')
    texts = [d.text.strip() for d in read_all(input=tmp_path / 'fortunes', split_on='%')[0]]
    assert texts == ['A day.\n  -- Someone', 'No % here.', 'The last.']


def test_a_document_at_the_limit_is_whole_and_beyond_it_is_dropped_never_cut(tmp_path):
    for split_on in ('paragraph', 'file'):
        for lines in (['abc', 'de'], ['abcdef'], ['ab', 'cd', 'ef'], ['abcde', 'x', 'y'], ['ab', 'cdef'], ['a', 'b', 'c', 'd']):
            (tmp_path / 'a.txt').write_text('\n'.join(lines))
            for limit in range(1, 12):
                texts = [d.text for d in read_all(input=tmp_path / 'a.txt', split_on=split_on, document_limit=limit)[0]]
                assert texts == ['\n'.join(lines)] * (len('\n'.join(lines)) <= limit)


def test_no_piece_that_is_read_of_a_long_line_is_longer_than_the_limit(tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_text('x' * 1_000_000 + '\nend\n')
    asked, read_piece = [], readers.TextFile.piece
    monkeypatch.setattr(readers.TextFile, 'piece', lambda f, most: asked.append(most) or read_piece(f, most))
    assert [d.text for d in read_all(input=tmp_path / 'a.txt', document_limit=70_000)[0]] == ['end']
    assert max(asked) <= 70_001 and len(asked) > 10
    (tmp_path / 'a.csv').write_text('text\n' + '""' * 500_000 + '\nend\n')        # a quoted text of quotes
    found, counts = read_all(input=tmp_path / 'a.csv', document_limit=1000)
    assert [d.text for d in found] == ['end'] and counts['over_document_limit'] == 1
    (tmp_path / 'a.csv').write_text('text\n' + '" ' * 500_001)
    with pytest.raises(ValueError, match='a.csv, line 2: broken table'):
        read_all(input=tmp_path / 'a.csv')
    (tmp_path / 'a.csv').write_text('text\n"' + 'never closed\n' * 1000)
    monkeypatch.setattr(readers, 'LONGEST_RECORD', 10_000)                        # else of the size of a memory
    with pytest.raises(ValueError, match='a.csv, line 77[0-9]: broken table .field larger than field limit'):
        read_all(input=tmp_path / 'a.csv')


def test_half_a_character_stops_with_its_file_and_line_or_knob(tmp_path, capsys):
    for name in ('a.jsonl', 'train_data.json'):
        (tmp_path / name).write_text('[{"latent_path": "x", "text": "a \\ud800"}]' if 'train' in name else '{"text": "a"}\n{"text": "b \\ud800"}')
    for knobs, message in ((dict(input=tmp_path / 'a.jsonl'), r"a.jsonl, line 2: '\\ud800' in field 'text' is half a character"),
                           (dict(import_dir=tmp_path), r"train_data.json, item 0: '\\ud800' in field 'text'")):
        with pytest.raises(ValueError, match=message):
            read_all(**knobs)
    assert [d.text for d in read_all(input=tmp_path / 'a.jsonl', invalid_bytes='replace')[0]] == ['a', 'b \ufffd']
    (tmp_path / 'metadata.jsonl').write_text('{"file_name": "\\udfff.png", "text": "a"}')
    with pytest.raises(ValueError, match='metadata.jsonl, line 1: .* half a character'):
        read_all(input=tmp_path, image_size=8, invalid_bytes='replace')
    (tmp_path / 'in').mkdir()
    with open(os.fsencode(tmp_path / 'in') + b'/caf\xe9.txt', 'w') as f:
        f.write('a')
    with pytest.raises(ValueError, match=r"caf.udce9.txt': this name is not UTF-8"):
        read_all(input=tmp_path / 'in')
    with pytest.raises(ValueError, match='half a character'):
        check_texts(['b \ud800'])
    with pytest.raises(SystemExit):
        configure(dict(__file__=str(ROOT / 'sample.py')), ['--text=caf\udce9'])
    assert capsys.readouterr().err == "error: knob 'text' in the command line: 'caf\\udce9' is not UTF-8\n"


def test_each_real_file_of_a_folder_comes_once(tmp_path):
    (tmp_path / 'd/sub').mkdir(parents=True)
    (tmp_path / 'd/b.txt').write_text('one\n')
    (tmp_path / 'd/sub/c.txt').write_text('two\n')
    for link, target in (('self', '.'), ('sub/up', '..'), ('x', 'y'), ('y', 'sub'), ('other.txt', 'b.txt'), ('more.txt', 'b.txt')):
        os.symlink(target, tmp_path / 'd' / link)
    os.link(tmp_path / 'd/b.txt', tmp_path / 'd/hard.txt')
    assert sorted(d.text for d in read_all(input=tmp_path / 'd')[0]) == ['one', 'two']
    assert [d.text for d in read_all(input=tmp_path / 'd/*.txt')[0]] == ['one'] and Source(input=str(tmp_path / 'd')).names[0] == 'b.txt'
    os.symlink('round.txt', tmp_path / 'd/round.txt')
    with pytest.raises(OSError, match='round.txt'):
        read_all(input=tmp_path / 'd')


def test_endings_of_json_lines_are_read_and_a_text_that_looks_like_another_kind_is_named(tmp_path, capsys):
    for ending in ('ndjson', 'jsonlines', 'NDJSON', 'jsonl.gz'):
        content = b'{"text": "one"}\n\n{"text": "two"}\n'
        (tmp_path / f'a.{ending}').write_bytes(gzip.compress(content) if 'gz' in ending else content)
        assert [d.text for d in read_all(input=tmp_path / f'a.{ending}')[0]] == ['one', 'two']
    for text, kind in (('{"text": "one"}\n', 'JSON'), ('[\n  {"text": 1}', 'JSON'), ('>a\nMKTAYIAK\n', 'FASTA'),
                       ('id,text\n1,one\n', 'a table'), ('id\ttext\n1\tone\n', 'a table'), ('o\0n\0e\0\n\0', 'UTF-16'), ('\0o\0n\0e\0\n', 'UTF-16')):
        readers.warn_of_kind.cache_clear()
        (tmp_path / 'a.txt').write_text(text)
        assert read_all(input=tmp_path / 'a.txt')[0] and read_all(input=tmp_path / 'a.txt')[0]
        err = capsys.readouterr().err
        assert err.count('\n') == 1 and f'a.txt looks like {kind}' in err
    for text in ('{curly} words, text of a line\n', '> quoted\nmail', '[1] a footnote', 'plain text'):
        readers.warn_of_kind.cache_clear()
        (tmp_path / 'a.txt').write_text(text)
        assert read_all(input=tmp_path / 'a.txt')[0] and not capsys.readouterr().err
    for content, kind in ((gzip.compress(b'one'), 'gzip'), (b'PAR1\x15', 'parquet'), (b'PK\x03\x04', 'zip'), (b'\x93NUMPY', 'npy')):
        for name in ('a.txt', 'a.csv', 'a.jsonl', 'a.fa'):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=f'{name}: {kind}, expected UTF-8'):
                read_all(input=tmp_path / name)


def test_every_encoding_that_is_named_reads_the_same_texts_and_a_wrong_one_stops_with_file_and_line(tmp_path):
    texts = ['naïve café', 'größer', 'plain']
    for encoding in ('utf-8', 'utf-8-sig', 'latin-1', 'cp1252', 'utf-16', 'UTF8'):
        (tmp_path / 'a.txt').write_bytes('\n'.join(texts).encode(encoding))
        assert [d.text for d in read_all(input=tmp_path / 'a.txt', encoding=encoding)[0]] == texts, encoding
    (tmp_path / 'a.txt').write_bytes('one\ntwo\ncafé\n'.encode('latin-1'))
    for encoding, split_on in (('utf-8', 'line'), ('utf-8', 'file'), ('ascii', 'paragraph')):
        with pytest.raises(ValueError, match=f'a.txt, line 3: byte 0xE9 is no {encoding}; .*--encoding=latin-1'):
            read_all(input=tmp_path / 'a.txt', encoding=encoding, split_on=split_on)
    with pytest.raises(ValueError, match='a.txt, at line 1 or soon after: .*--encoding='):
        read_all(input=tmp_path / 'a.txt', encoding='utf-16')
    assert [d.text for d in read_all(input=tmp_path / 'a.txt', invalid_bytes='replace')[0]] == ['one', 'two', 'caf\ufffd']


# -----------------------------------------------------------------------------
# proteins

def test_fasta_records_are_sequences_and_every_letter_that_is_no_residue_is_counted(tmp_path):
    with gzip.open(tmp_path / 'a.fasta.gz', 'wt') as f:
        f.write(PROTEINS)
    found, counts = read_all(input=tmp_path)
    assert [d.text for d in found] == ['MKTAYIAKQRQISFVKSHFS'] * 2 + ['MXXKV', 'MKVLAAGIVGLLLA']
    assert counts == Counter(read=5, kept=4, empty=1, unknown_residues=2, invalid_utf8=0)
    found, counts = read_all(input=tmp_path, distinct=True, min_length=6)
    assert [d.text for d in found] == ['MKTAYIAKQRQISFVKSHFS', 'MKVLAAGIVGLLLA']
    assert counts['read'] == counts['kept'] + counts['empty'] + counts['too_short'] + counts['duplicate'] == 5
    (tmp_path / 'b.fa').write_text('MKV\n')
    with pytest.raises(ValueError, match='b.fa, line 1: no FASTA'):
        read_all(input=tmp_path)


@pytest.mark.parametrize('text, sequences', [
    ('; all of it\n#A3M#\n>a\n; a helix\nMKT\n!note\nAYI\n\n>b\n# signal\nMKH', ['MKTAYI', 'MKH']),
    ('>P1;CRAB_ANAPL\nALPHA CRYSTALLIN B CHAIN\n  MDITIHNPLI\n  RRPLFSWLAP SRI*\nC;Species: duck\n>F1;B\n\nMKT*\n', ['MDITIHNPLIRRPLFSWLAPSRI', 'MKT']),
    ('>a\n        1 mktayiakqr qisfvkshfs\n       21 rqle\n>b\nMKTAYIAKQR QISF        14\n', ['MKTAYIAKQRQISFVKSHFSRQLE', 'MKTAYIAKQRQISF']),
    ('>a\rMK--T..A\r>b\r\nM K T A\r\n', ['MKTA', 'MKTA'])])
def test_what_fasta_pir_and_numbered_blocks_know_is_no_residue(tmp_path, text, sequences):
    for ending in ('fasta', 'pep', 'fsa', 'faa', 'fna'):
        (tmp_path / f'a.{ending}').write_bytes(text.encode())
        found, counts = read_all(input=tmp_path / f'a.{ending}')
        assert [d.text for d in found] == sequences and counts['gaps'] == 4 * ('--' in text)
    assert Source(input=str(tmp_path)).is_fasta


@pytest.mark.parametrize('line', ['MK7A', 'a comment about the helix', '//', 'MKT@A', '40 40 38', 'MK\u017fT', ' >c', 'MKT,AYI', '60'])
def test_a_line_that_is_no_sequence_stops_with_its_file_and_line(tmp_path, line):
    (tmp_path / 'a.fa').write_text(f'>a\nMKT\n>b\n{line}\nMKT\n')
    with pytest.raises(ValueError, match='a.fa, line 4: found .*expected residues'):
        read_all(input=tmp_path)
    (tmp_path / 'a.fa').write_text('>P1;a\ntitle\nMKT\n>P1;b\ntitle\nMKT*\n')
    with pytest.raises(ValueError, match='a.fa, line 4: before it a record of PIR ends without'):
        read_all(input=tmp_path)


def test_fasta_becomes_a_dataset_of_residues_without_duplicates_by_default(tmp_path):
    g = np.random.default_rng(0)
    sequences = [''.join(g.choice(list(RESIDUES[:20]), g.integers(20, 60))) for _ in range(60)]
    (tmp_path / 'a.fasta').write_text(''.join(f'>{i}\n{s}\n' for i, s in enumerate(sequences + sequences[:7])))
    folder = run(input=tmp_path / 'a.fasta', out=tmp_path / 'out', encoder='none', val_fraction=.2)
    ds = PackedDataset(folder, 'train')
    assert ds.meta['tokenizer']['kind'] == 'esm' and ds.vocab_size == 29 and ds.meta['counts']['input']['duplicate'] == 7
    assert sorted(texts_of(folder, 'train') + texts_of(folder, 'val')) == sorted(sequences)
    both = run(input=tmp_path / 'a.fasta', val_input=tmp_path / 'a.fasta', out=tmp_path / 'both', encoder='none')
    assert texts_of(both, 'train') == texts_of(both, 'val') == sequences, 'within val too'
    with pytest.raises(ValueError, match='is no protein'):
        load_tokenizer(folder).encode('hello')


@pytest.mark.parametrize('kind, message', [('fails', 'mmseqs .* failed with code 3: out of luck'), ('absent', 'mmseqs is not on PATH'),
                                           ('works', '')])
def test_homologous_proteins_fall_into_one_split(tmp_path, monkeypatch, kind, message):
    """ mmseqs itself cannot be had here: a script in its place clusters by the first five residues, with its arguments and output. """
    g = np.random.default_rng(0)
    families = [''.join(g.choice(list(RESIDUES[:20]), 5)) for _ in range(30)]
    sequences = [family + ''.join(g.choice(list(RESIDUES[:20]), 20)) for family in families for _ in range(8)]
    (tmp_path / 'a.fasta').write_text(''.join(f'>{i}\n{s}\n' for i, s in enumerate(sequences)))
    (tmp_path / 'bin').mkdir()
    if kind != 'absent':
        script = tmp_path / 'bin/mmseqs'
        script.write_text(f'#!{sys.executable}\n' + '''
import sys
if sys.argv[1:] == ['version']:
    print('15-6f452')
    sys.exit()
command, fasta, result, scratch, *flags = sys.argv[1:]
assert command == 'easy-cluster' and flags == ['--min-seq-id', '0.3', '-c', '0.8'], sys.argv
lines, first = open(fasta).read().split(), {}
with open(result + '_cluster.tsv', 'w') as f:
    for name, sequence in zip(lines[::2], lines[1::2]):
        f.write(first.setdefault(sequence[:5], name[1:]) + '\\t' + name[1:] + '\\n')
''' if kind == 'works' else '#!/bin/sh\necho out of luck >&2\nexit 3\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
    knobs = dict(input=tmp_path / 'a.fasta', out=tmp_path / 'out', encoder='none', val_fraction=.3, homology=.3)
    if message:
        with pytest.raises(ValueError, match=message):
            run(**knobs)
        return
    folder = run(**knobs)
    train, val = ({text[:5] for text in texts_of(folder, split)} for split in ('train', 'val'))
    assert train | val == set(families) and not train & val and 3 < len(val) < 20
    assert manifest.read_meta(folder)['source']['mmseqs'] == '15-6f452'
    without = run(**knobs | dict(homology=0.0, out=tmp_path / 'without'))
    assert {t[:5] for t in texts_of(without, 'train')} & {t[:5] for t in texts_of(without, 'val')}, 'the control'


# -----------------------------------------------------------------------------
# latents that are there already

def with_own_latents(tmp_path, n=150, shape=(6,)):
    """ LINES, and latents that say which line they belong to. """
    z = np.random.default_rng(0).standard_normal((n, *shape)).astype(np.float32)
    z.reshape(n, -1)[:, 0] = np.arange(n)
    return write_lines(tmp_path / 'a.txt', LINES[:n]), z


def latents_of(folder):
    """ {text: its raw latent} of both splits. """
    return {text: z for split in ('train', 'val') for ds in [PackedDataset(folder, split)]
            for text, z in zip(texts_of(folder, split), ds.raw_latents(np.arange(len(ds))).numpy())}


@pytest.mark.parametrize('shape', [(6,), (4, 6)])
def test_given_latents_stay_with_their_texts(tmp_path, shape):
    path, z = with_own_latents(tmp_path, shape=shape)
    (tmp_path / 'z').mkdir()
    for i in range(12):                                                  # 2.npy is read before 10.npy
        np.save(tmp_path / f'z/{i}.npy', z[13 * i:13 * (i + 1)].astype(np.float16 if i == 3 else np.float32))
    folder = run(input=path, latents_from=tmp_path / 'z', out=tmp_path / 'out', encoder='none')
    found = latents_of(folder)
    assert len(found) == 150
    for line, latent in zip(LINES, z):
        assert np.allclose(found[line], np.atleast_2d(latent), rtol=1e-3)
    assert np.load(f'{folder}/train-00000.ids.npy')[:2].tolist() == [[0, 0], [1, 0]]
    np.save(tmp_path / 'z/3.npy', -z[39:52])                             # other latents for the same texts: shards are redone
    again = latents_of(run(input=path, latents_from=tmp_path / 'z', out=tmp_path / 'out', encoder='none'))
    assert np.allclose(again[LINES[40]], -np.atleast_2d(z[40]), rtol=1e-3) and np.allclose(again[LINES[60]], found[LINES[60]])


def test_given_latents_that_do_not_fit_are_refused_with_both_numbers(tmp_path):
    path, z = with_own_latents(tmp_path)
    for rows, message in ((149, '149 rows for more documents'), (151, '151 rows for 150 documents')):
        np.save(tmp_path / 'z.npy', np.zeros((rows, 6), np.float32))
        with pytest.raises(ValueError, match=message):
            run(input=path, latents_from=tmp_path / 'z.npy', out=tmp_path / 'out', encoder='none')
    np.save(tmp_path / 'z.npy', np.array([{}] * 150, object), allow_pickle=True)
    with pytest.raises(ValueError, match='z.npy: latents cannot be read'):
        run(input=path, latents_from=tmp_path / 'z.npy', out=tmp_path / 'out', encoder='none')
    for content in (b'PK\x03\x04' + b'\0' * 50, b'', b'\x93NUMPY\x01\0\x10\0{((((((((((((((((\n'):
        (tmp_path / 'z.npy').write_bytes(content)
        with pytest.raises(ValueError, match='z.npy: latents cannot be read'):
            run(input=path, latents_from=tmp_path / 'z.npy', out=tmp_path / 'out', encoder='none')
    np.savez(tmp_path / 'z.npz', np.zeros((150, 6), np.float32))
    os.rename(tmp_path / 'z.npz', tmp_path / 'z.npy')
    with pytest.raises(ValueError, match='z.npy: latents cannot be read .an .npz file, expected .npy'):
        run(input=path, latents_from=tmp_path / 'z.npy', out=tmp_path / 'out', encoder='none')
    for name in ('z.npz', 'z', 'z.npy,,'):
        with pytest.raises(ValueError, match='latents_from=.*: expected a .npy file or a folder of them'):
            run(input=path, latents_from=name, out=tmp_path / 'out', encoder='none')
    np.save(tmp_path / 'z.npy', np.zeros(150, np.float32))
    with pytest.raises(ValueError, match=r'z.npy: latents are float32 \(150,\), expected floats \(n, D\)'):
        run(input=path, latents_from=tmp_path / 'z.npy', out=tmp_path / 'out', encoder='none')


def test_a_text_too_long_for_one_sample_is_dropped_and_counted_when_its_latent_is_given(tmp_path):
    path, z = with_own_latents(tmp_path)
    long = [' '.join(LINES[:9])] + LINES[1:]
    np.save(tmp_path / 'z.npy', z)
    folder = run(input=write_lines(path, long), latents_from=tmp_path / 'z.npy', out=tmp_path / 'out', encoder='none', max_tokens=40)
    splits = manifest.read_meta(folder)['splits'].values()
    assert sum(s['documents'] for s in splits) == 150 and sum(s['samples'] for s in splits) == 149
    assert sum(s['longer_than_max_tokens'] for s in splits) == 1 and long[0] not in latents_of(folder)


def test_a_latent_that_float16_cannot_hold_is_named_by_its_row(tmp_path, capsys):
    path, z = with_own_latents(tmp_path)
    (tmp_path / 'old/latents').mkdir(parents=True)
    knobs = dict(input=path, latents_from=f'{tmp_path}/z.npy,{tmp_path}/y.npy', out=tmp_path / 'out', encoder='none', tokenizer='byte')
    for value, message in ((np.nan, 'NaN or inf: mend it'), (-np.inf, 'NaN or inf: mend it'), (-70000, '70,000, and float16 ends at 65,504: divide')):
        bad = z.copy()
        bad[107, 3] = value
        np.save(tmp_path / 'z.npy', bad[:100])
        np.save(tmp_path / 'y.npy', bad[100:])
        with pytest.raises(ValueError, match=f'1 of [0-9]+ latents cannot be stored, more than 0.1%; the first: y.npy, row 7: {message}'):
            run(**knobs)
    np.save(tmp_path / 'y.npy', z[100:])
    for scale, offset in ((.1, 1000), (.3, -1000), (1e-8, 0)):                       # steps of .5, and of 6e-8
        np.save(tmp_path / 'z.npy', (scale * np.random.default_rng(0).normal(size=(100, 6)) + offset).astype(np.float32))
        with pytest.raises(ValueError, match='6 of 6 dimensions .* dimension 0 is .* where its steps are .*subtract the mean'):
            run(**knobs | dict(out=tmp_path / 'coarse'))
    capsys.readouterr()
    z[:, 4] = 1000 + .1 * z[:, 4]
    np.save(tmp_path / 'z.npy', z[:100])
    np.save(tmp_path / 'y.npy', z[100:])
    run(**knobs | dict(out=tmp_path / 'one'))
    assert 'warning: train-00000: 1 of 6 dimensions of the latents vary by less' in capsys.readouterr().err
    z[:, 4] = 1000.1                                                                 # the same everywhere: nothing is lost
    np.save(tmp_path / 'z.npy', z[:100])
    np.save(tmp_path / 'y.npy', z[100:])
    run(**knobs | dict(out=tmp_path / 'none'))
    assert not re.search('warning.*dimensions of the latents', capsys.readouterr().err)


def test_an_encoder_named_beside_given_latents_must_be_theirs(tmp_path):
    (tmp_path / 'bert').mkdir()
    folder = save_encoder(tmp_path / 'bert')
    path = write_lines(tmp_path / 'a.txt')
    z = load_encoder(str(folder), pooling='mean')(LINES)[:, 0].numpy()
    np.save(tmp_path / 'z.npy', z)
    knobs = dict(input=path, latents_from=tmp_path / 'z.npy', encoder=str(folder), encoder_dims=0, pooling='mean')
    meta = manifest.read_meta(run(**knobs, out=tmp_path / 'out'))
    assert meta['encoder']['pooling'] == 'mean' and meta['latent_shape'] == [1, 32]
    np.save(tmp_path / 'z.npy', z[::-1])
    with pytest.raises(ValueError, match='not those of encoder'):
        run(**knobs, out=tmp_path / 'other')


def test_chunks_with_spaces_at_their_ends_survive_export_and_import_with_their_latents(tmp_path):
    path = write_lines(tmp_path / 'a.txt', [' '.join(LINES[i:i + 5]) for i in range(0, 150, 5)])
    folder = run(input=path, out=tmp_path / 'a', max_tokens=24)
    assert any(text.startswith(' ') for text in texts_of(folder, 'train')), 'the case to be tested'
    export(folder, str(tmp_path / 'old'))
    back = run(input='', import_dir=tmp_path / 'old', out=tmp_path / 'back', encoder='none', tokenizer='byte', max_tokens=500)
    assert texts_of(back, 'train') == texts_of(folder, 'train') and texts_of(back, 'val') == texts_of(folder, 'val')
    a, b = latents_of(folder), latents_of(back)
    assert a.keys() == b.keys() and all(np.array_equal(a[text], b[text]) for text in a)


def test_knobs_that_contradict_each_other_are_refused(tmp_path):
    (tmp_path / 'a.fasta').write_text('>a\nMKV\n')
    fasta = dict(input=tmp_path / 'a.fasta')
    for knobs, message in ((dict(hub_dataset='lm1b', import_dir='x'), 'one of input, .* given: hub_dataset and import_dir'),
                           (dict(input='a.txt', hub_dataset='lm1b'), 'given: input and hub_dataset'),
                           (dict(input='', import_dir='x', latents_from='z.npy'), 'import_dir and latents_from each say'),
                           (dict(input='', hub_dataset='lm1b', image_size=8, hub_revision='x'), 'image_size is set: input must be'),
                           (dict(val_input=tmp_path / 'a.fasta', homology=.3, encoder='none') | fasta, 'val_input goes with'),
                           (dict(latents_from='z.npy', encoder='lsa') | fasta, 'lsa is fitted here'),
                           (dict(input=tmp_path, image_size=10, patch=4), 'multiple of patch 4')):
        with pytest.raises(ValueError, match=message):
            run(**{'out': tmp_path / 'out'} | knobs)


def test_the_earlier_layout_is_imported_without_embedding_and_exported_again(tmp_path):
    old = tmp_path / 'old'
    for split, name, lines in (('train', 'train', LINES[:120]), ('validation', 'validation', LINES[120:])):
        for kind in ('texts', 'latents'):
            (old / kind / name).mkdir(parents=True)
        items = []
        for i, line in enumerate(lines):
            latent = np.full(6, i, np.float32) + np.arange(6) / 8
            np.save(old / 'latents' / name / f'{i:05d}.npy', latent if i % 2 else latent[None])
            items.append(dict(id=i, text=line, latent_path=f'latents/{name}/{i:05d}.npy'))
            if i % 3 == 0:                                               # a file of the text goes before the list's preview of it
                (old / 'texts' / name / f'{i:05d}.txt').write_text(line)
                items[-1]['text'] = line[:10]
        (old / f'{split}_data.json').write_text(json.dumps(items))
    folder = run(input='', import_dir=old, out=tmp_path / 'new', encoder='none')
    assert texts_of(folder, 'train') == LINES[:120] and texts_of(folder, 'val') == LINES[120:]
    assert np.array_equal(PackedDataset(folder, 'val').raw_latents([7])[0], (7 + np.arange(6) / 8)[None])
    export(folder, str(tmp_path / 'again'))
    assert (tmp_path / 'again/texts/train/00000005.txt').read_text() == LINES[5]
    assert np.load(tmp_path / 'again/latents/validation/00000002.npy').shape == (1, 6)
    back = run(input='', import_dir=tmp_path / 'again', out=tmp_path / 'back', encoder='none')
    for split in ('train', 'val'):
        a, b = PackedDataset(folder, split), PackedDataset(back, split)
        assert all(np.array_equal(x, y) for x, y in zip(a.rows(np.arange(len(a))), b.rows(np.arange(len(b)))))
    with pytest.raises(ValueError, match='not an empty folder'):
        export(folder, folder)


def test_an_imported_dataset_trains_is_sampled_and_evaluated_at_once(tmp_path):
    (tmp_path / 'old/latents/train').mkdir(parents=True)
    for i in range(len(LINES)):
        np.save(tmp_path / f'old/latents/train/{i}.npy', np.random.default_rng(i).standard_normal((1, 6)).astype(np.float32))
    items = [dict(id=i, text=line, latent_path=f'latents/train/{i}.npy') for i, line in enumerate(LINES)]
    (tmp_path / 'old/train_data.json').write_text(json.dumps(items))
    np.save(tmp_path / 'z.npy', np.zeros((2, 6), np.float32))
    here, cpu = f'--out_dir={tmp_path}/run', '--device=cpu'
    results = run_each(['prepare.py', f'--import_dir={tmp_path}/old', '--vocab_size=300', '--val_fraction=.2', f'--out={tmp_path}/new'],
                       ['train.py', f'--dataset={tmp_path}/new', here, '--mode=unconditional+l2t+t2l', *TINY],
                       ['sample.py', here, cpu, f'--latents={tmp_path}/z.npy', '--steps=3'],
                       ['evaluate.py', here, cpu, '--n=20', '--tasks=nelbo,l2t,t2l,unconditional,infill', '--steps=3', '--latent_steps=2'],
                       ['sample.py', here, cpu, '--mode=l2t', '--text=a dog'], ['evaluate.py', here, cpu, '--tasks=sts', '--sts=x.csv'])
    assert [rc for rc, _, _ in results] == [0, 0, 0, 0, 2, 2], [err for _, _, err in results]
    found = measured(tmp_path / 'run')
    assert {'nelbo/nats_per_token', 'l2t/bleu', 't2l/centred_cosine', 'infill/token_accuracy', 'unconditional/entropy'} <= found.keys()
    assert not {'l2t/cosine', 'unconditional/coherence'} & found.keys(), 'nothing can embed a text here'
    assert all('without their encoder' in err and err.strip().count('\n') == 0 for _, _, err in results[4:])


@pytest.mark.parametrize('item, message', [
    (dict(text='a'), 'item 0: no latent_path'), (dict(text='a', latent_path='../out.npy'), 'lies outside'),
    (dict(text='a', latent_path='latents/gone.npy'), 'gone.npy: missing'), (dict(latent_path='latents/a.npy'), 'no "text", and no file'),
    (dict(text='a', latent_path='latents/cube.npy'), r'cube.npy: a latent is float32 \(1, 1, 4\), expected floats')])
def test_an_earlier_layout_that_is_broken_stops_with_its_place(tmp_path, item, message):
    (tmp_path / 'latents').mkdir()
    np.save(tmp_path / 'latents/a.npy', np.zeros(4, np.float32))
    np.save(tmp_path / 'latents/cube.npy', np.zeros((1, 1, 4), np.float32))
    (tmp_path / 'train_data.json').write_text(json.dumps([item]))
    with pytest.raises(ValueError, match=message):
        [document.latent() for document in read_all(import_dir=tmp_path)[0]]


# -----------------------------------------------------------------------------
# images

def test_captioned_images_become_patches_row_by_row(tmp_path):
    Image = pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f'{i}.png')
    (tmp_path / 'metadata.csv').write_text('file_name,text\n' + ''.join(f'{i}.png,"picture {i}, red"\n' for i in range(40)))
    found, _ = read_all(input=tmp_path, image_size=8, patch=4)
    assert [d.text for d in found] == [f'picture {i}, red' for i in range(40)]
    z = found[3].latent()
    assert z.shape == (4, 48) and np.allclose(z[1].reshape(4, 4, 3), pixels[3, :4, 4:] / 127.5 - 1, atol=1e-6)
    assert image_patches(str(tmp_path / '0.png'), 4, 2, 1).shape == (4, 4)
    folder = run(input=tmp_path, image_size=8, patch=4, out=tmp_path / 'out', encoder='none')
    ds = PackedDataset(folder, 'train')
    assert ds.latent_shape == (4, 48) and [ds.meta['source'][knob] for knob in ('image_size', 'patch', 'channels')] == [8, 4, 3]
    assert np.allclose(latents_of(folder)['picture 3, red'], z, atol=1e-3)
    (tmp_path / 'metadata.csv').write_text('file_name,text\n' + ''.join(f'{i}.png,"{w} {i}"\n' for i in range(40) for w in WORDS[:5]))
    folder = run(input=tmp_path, image_size=8, patch=4, out=tmp_path / 'five', encoder='none', val_fraction=.2)
    train, val = ({text.split()[1] for text in texts_of(folder, split)} for split in ('train', 'val'))
    assert len(train | val) == 40 and not train & val, 'an image goes to one split with all its captions'
    (tmp_path / '3.png').write_bytes(b'no image')
    with pytest.raises(ValueError, match='3.png: no image that can be read'):
        run(input=tmp_path, image_size=8, patch=4, out=tmp_path / 'other', encoder='none')
    os.remove(tmp_path / '5.png')
    with pytest.raises(ValueError, match='5.png: missing'):
        read_all(input=tmp_path, image_size=8, patch=4)


def test_pictures_of_every_depth_are_scaled_and_what_is_transparent_is_white_or_a_mode_is_refused(tmp_path):
    Image = pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    plain, opaque, half = Image.fromarray(grey), Image.new('L', (8, 8), 255), Image.fromarray(np.uint8([[0, 128] * 4] * 8))
    shown = np.where(half, 255 - (255. - grey) * np.array(half) / 255, 255)                      # alpha laid on white
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    clear = np.where(grey == 8, 255, grey)                                                       # where 8 stands for transparent
    rgb = Image.merge('RGB', [plain] * 3)
    for name, image, expected, more in (
            ('8.png', plain, grey, {}), ('16.png', deep, grey, {}), ('16.tif', deep, grey, {}), ('16.pgm', deep, grey, {}),
            ('la.png', Image.merge('LA', [plain, half]), shown, {}), ('rgba.png', Image.merge('RGBA', [plain] * 3 + [half]), shown, {}),
            ('opaque.png', Image.merge('RGBA', [plain] * 3 + [opaque]), grey, {}), ('p.png', plain.convert('P'), grey, {}),
            ('clear.png', plain, clear, dict(transparency=8)), ('clear_p.png', plain.convert('P'), clear, dict(transparency=8)),
            ('clear_rgb.png', rgb, clear, dict(transparency=(8, 8, 8))), ('cmyk.tif', rgb.convert('CMYK'), grey, {})):
        image.save(tmp_path / name, **more)
        for channels in (1, 3):
            z = image_patches(str(tmp_path / name), 8, 8, channels).reshape(8, 8, channels)
            assert np.abs((z + 1) * 127.5 - expected[..., None]).max() < .8, (name, channels)
    for name, image in (('i.tif', Image.fromarray(grey.astype(np.int32))), ('f.tif', Image.fromarray(grey / np.float32(255)))):
        image.save(tmp_path / name)
        with pytest.raises(ValueError, match=f'{name}: no image that can be read .mode [IF], whose white is unknown'):
            image_patches(str(tmp_path / name), 8, 8, 1)
