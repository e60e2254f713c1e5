""" prepare.py as sentences, on corpora of a few lines, in this process or as the command a user types. """
import csv
import errno
import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import prepare
from configurator import read_knobs
from corpora import shards, sources, splits, tokenizers
from corpora.builtin import builtin_corpus
from corpora.shards import Chunker
from corpora.sources import Source, documents
from corpora.tokenizers import Tokenizer, byte_tokenizer, load_tokenizer
from data import PackedDataset
from launch import texts_in, texts_of
from encoders import load_encoder
from runs import manifest
from test_encoders import save_encoder

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORDS = 'a the dog cat runs sits on beach mat and red big small man woman walks along river in snow'.split()
LINES = [f'{WORDS[i % 20]} {WORDS[i * 7 % 20]} {WORDS[i * 3 % 19]} walks number {i}.' for i in range(150)]


def knobs_of(**knobs):
    """ All knobs of prepare.py, these among them. """
    given = {name: str(value) if isinstance(value, os.PathLike) else value for name, value in knobs.items()}
    defaults = {name: knob.default for name, knob in read_knobs(os.path.join(ROOT, 'prepare.py')).items()}
    return SimpleNamespace(**defaults | given)


def run(**knobs):
    threads = torch.get_num_threads()
    try:
        prepare.prepare(knobs_of(**dict(vocab_size=300, encoder='lsa', encoder_dims=8, shard_size=40) | knobs))
    finally:
        torch.set_num_threads(threads)
    return str(knobs['out'])


def write_lines(path, lines=LINES):
    path.write_text('\n'.join(lines) + '\n')
    return path


def digests(folder):
    return {name: hashlib.sha256(open(os.path.join(folder, name), 'rb').read()).hexdigest() for name in sorted(os.listdir(folder))}


def read_all(path, **knobs):
    counts = Counter()
    return [document.text for document in documents(Source(input=str(path), **knobs), counts)], counts

# -----------------------------------------------------------------------------

def test_every_document_is_in_exactly_one_split_and_the_same_one_whatever_its_neighbours(tmp_path):
    folder = run(input=write_lines(tmp_path / 'a.txt'), out=tmp_path / 'a', val_fraction=.2)
    train, val = texts_of(folder, 'train'), texts_of(folder, 'val')
    assert sorted(train + val) == sorted(LINES) and not set(train) & set(val) and 10 < len(val) < 60
    other = run(input=write_lines(tmp_path / 'b.txt', LINES[::-2]), out=tmp_path / 'b', val_fraction=.2)
    assert set(texts_of(other, 'val')) == set(val) & set(LINES[::-2])


def test_val_is_never_empty_and_neither_is_train(tmp_path):
    folder = run(input=write_lines(tmp_path / 'a.txt', LINES[:30]), out=tmp_path / 'a', val_fraction=1e-9)
    assert len(texts_of(folder, 'val')) == 1 and len(texts_of(folder, 'train')) == 29
    folder = run(input=write_lines(tmp_path / 'a.txt', LINES[:30]), out=tmp_path / 'most', val_fraction=1 - 1e-9, encoder='none', max_tokens=99)
    assert len(texts_of(folder, 'val')) == 29 and len(texts_of(folder, 'train')) == 1
    with pytest.raises(ValueError, match='val_input'):
        run(input=write_lines(tmp_path / 'b.txt', LINES[:1]), out=tmp_path / 'b')


def test_a_validation_input_leaves_the_input_whole(tmp_path):
    folder = run(input=write_lines(tmp_path / 'a.txt', LINES[:100]), val_input=write_lines(tmp_path / 'b.txt', LINES[100:]),
                 out=tmp_path / 'a')
    assert texts_of(folder, 'train') == LINES[:100] and texts_of(folder, 'val') == LINES[100:]


def test_latents_are_the_encoding_of_exactly_the_text_that_the_tokens_decode_to(tmp_path):
    long = [' '.join(LINES[i:i + 5]) for i in range(0, 150, 5)]
    folder = run(input=write_lines(tmp_path / 'a.txt', long), out=tmp_path / 'a', max_tokens=24)
    ds = PackedDataset(folder, 'train')
    assert len(ds) > ds.meta['splits']['train']['documents']        # chunked
    encoder = load_encoder(ds.meta['encoder'], folder=folder)
    texts = texts_in(ds)
    assert torch.equal(ds.raw_latents(np.arange(len(ds))), encoder(texts).half().float())
    decode = load_tokenizer(folder).decode
    assert [decode(row) for row in ds.rows(np.arange(len(ds)))[0]] == texts
    raw = ds.raw_latents(np.arange(len(ds))).double().reshape(-1, 8)
    assert torch.allclose(ds.stats.mean.double(), raw.mean(0), atol=1e-6)
    assert torch.allclose(ds.stats.std.double(), raw.std(0, unbiased=False), atol=1e-6)


def test_a_real_encoder_of_tiny_size_and_no_encoder_at_all(tmp_path):
    path = write_lines(tmp_path / 'a.txt')
    (tmp_path / 'bert').mkdir()
    folder = run(input=path, out=tmp_path / 'a', encoder=save_encoder(tmp_path / 'bert'), encoder_dims=0, pooling='mean', normalize=True)
    ds = PackedDataset(folder, 'train')
    assert ds.latent_shape == (1, 32) and ds.meta['encoder']['pooling'] == 'mean'
    # [CLS], four words, [SEP]: shorter than the lines
    (tmp_path / 'bert/sentence_bert_config.json').write_text('{"max_seq_length": 6}')
    short = run(input=path, out=tmp_path / 'c', encoder=str(tmp_path / 'bert'), encoder_dims=0, pooling='mean')
    splits = manifest.read_meta(short)['splits'].values()
    assert sum(s['truncated'] for s in splits) == sum(s['samples'] for s in splits) == len(LINES)
    assert ds.meta['splits']['train']['truncated'] == 0
    plain = PackedDataset(run(input=path, out=tmp_path / 'b', encoder='none', tokenizer='byte'), 'train')
    assert plain.latent_shape is None and plain.meta['encoder'] is None and plain.rows([0, 1])[1] is None
    assert not [name for name in os.listdir(tmp_path / 'b') if 'latent' in name or 'json' in name and name != 'meta.json']

# -----------------------------------------------------------------------------

@pytest.mark.parametrize('tok', ['byte', 'bpe'])
@pytest.mark.parametrize('text', ['word ' * 99, 'One two. Three four five! Six? ' * 20, 'x' * 333,
                                  '東京🙂é' * 50, ' \n\t' * 60, 'a\x00b' * 40, 'ab'])
def test_chunks_join_to_the_document_and_each_is_whole_utf8(tmp_path, tok, text):
    if tok == 'byte':
        tok = byte_tokenizer()
    else:
        (tmp_path / 'tokenizer.json').write_text(tokenizers.train_bpe(['One two. Three four five! Six? word'] * 3, 280))
        tok = tokenizers.bpe_tokenizer(tmp_path / 'tokenizer.json')
    chunks = list(Chunker(tok, 16)(tok.encode(text)))
    assert [i for run in chunks for i in run] == tok.encode(text)
    assert all(1 <= len(run) <= 16 for run in chunks)
    for run in chunks:
        b''.join(tok.pieces[i] for i in run).decode('utf-8')        # strict
    assert ''.join(tok.decode(run) for run in chunks) == text


def test_a_document_is_cut_after_a_sentence_where_it_can_be_else_before_a_word():
    tok = byte_tokenizer()
    def cut(text):
        return [tok.decode(run) for run in Chunker(tok, 20)(tok.encode(text))]
    assert cut('It was a dog. It ran far away.') == ['It was a dog.', ' It ran far away.']
    assert cut('It was a dog that ran far away') == ['It was a dog that', ' ran far away']
    assert cut('A. Pneumonoultramicroscopicsilicovolcano')[0] == 'A. Pneumonoultramicr'


def test_a_vocabulary_that_hides_every_character_boundary_is_spelled_in_bytes():
    pieces = [bytes([i]) for i in range(256)] + [b'\xa9\xc3']        # the end of one é and the start of the next
    tok = Tokenizer('odd', None, pieces)
    ids = [0xC3] + [256] * 40 + [0xA9]
    chunks = list(Chunker(tok, 8)(ids))
    assert all(len(run) <= 8 for run in chunks)
    assert ''.join(b''.join(tok.pieces[i] for i in run).decode('utf-8') for run in chunks) == 'é' * 41

# -----------------------------------------------------------------------------

def test_lines_paragraphs_and_files(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_bytes(b'\xef\xbb\xbfone\r\ntwo\x0cstill two\n\n  \nthree\nthree on')
    assert read_all(path, split_on='line') == (['one', 'two\x0cstill two', 'three', 'three on'],
                                               Counter(read=6, kept=4, empty=2, invalid_utf8=0))
    assert read_all(path, split_on='paragraph')[0] == ['one\ntwo\x0cstill two', 'three\nthree on']
    assert len(read_all(path, split_on='file')[0]) == 1


def test_jsonl_csv_gz_folders_and_globs_read_the_same_documents(tmp_path):
    folder = tmp_path / 'in'
    (folder / 'sub').mkdir(parents=True)
    texts = ['one, "quoted"', 'two\nlines', 'naïve 🙂', 'x' * 200_000]
    (folder / 'a.jsonl').write_text(''.join(json.dumps(dict(text=t, n=1)) + '\n' for t in texts))
    with open(folder / 'sub/b.csv', 'w', newline='') as f:
        csv.writer(f).writerows([['id', 'text'], *enumerate(texts)])
    with gzip.open(folder / 'c.txt.gz', 'wt') as f:
        f.write('zipped\n')
    (folder / 'notes.md').write_text('not taken from a folder')
    assert read_all(folder / 'a.jsonl')[0] == texts
    assert read_all(folder / 'sub/b.csv')[0] == texts
    assert read_all(folder)[0] == texts + ['zipped'] + texts
    assert read_all(f'{folder}/*.gz, {folder}/notes.md')[0] == ['zipped', 'not taken from a folder']
    assert read_all(folder / 'a.jsonl', field='text')[1]['read'] == 4


def test_invalid_utf8_is_replaced_and_counted_where_asked_nul_is_kept_and_empty_documents_are_counted(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_bytes(b'good\nbad \xff\xfe byte\n\n   \nnul \x00 byte\n')
    texts, counts = read_all(path, invalid_bytes='replace')
    assert texts == ['good', 'bad \ufffd\ufffd byte', 'nul \x00 byte']
    assert counts == Counter(read=5, kept=3, empty=2, invalid_utf8=1)


def test_max_documents_takes_the_first_ones(tmp_path):
    folder = run(input=write_lines(tmp_path / 'a.txt'), out=tmp_path / 'a', max_documents=60)
    assert sorted(texts_of(folder, 'train') + texts_of(folder, 'val')) == sorted(LINES[:60])


@pytest.mark.parametrize('name, content, message', [
    ('a.txt', b'\n \n', 'no documents'), ('a.jsonl', b'{"text": "a"}\n{"body": "b"}\n', "line 2.*'text'.*--field"),
    ('a.jsonl', b'{oops\n', 'line 1: no JSON'), ('a.jsonl', b'{"text": "a"}\nnull\n', 'line 2: found None, expected a record of JSON'),
    ('a.csv', b'id,text\n1,A dog, running\n', 'line 2: 3 fields, expected 2, one a column'), ('a.csv', b'id,text\n1,a\n2\n', 'line 3: 1 fields, expected 2'), ('a.csv', b'text\n"a\nb\n', 'broken table'),
    ('a.txt', 'hello'.encode('utf-16'), 'UTF-16, expected UTF-8.*--encoding=utf-16'),
    ('a.jsonl', b'{"text": 3}\n', "no text in field 'text', found {'text': 3}"),
    ('a.jsonl', b'\n' + b'[' * 100_000, 'line 2: no JSON .*recursion'),
    ('a.csv', b'text,id,text\na,1,b\n', "2 columns are called 'text'"), ('a.tsv', b'text\ttext\na\tb\n', "2 columns are called 'text'"),
    ('a.csv', b'id,text\n1,a\n2,"b"c\n', 'line 3: broken table'), ('a.csv', b'id,text\n1,caf\xe9\n', 'line 2: byte 0xE9 is no utf-8'),
    ('a.jsonl', b'{"text": "a"}\n{"text": "caf\xe9"}\n', 'line 2: byte 0xE9 .*--encoding=latin-1'),
    ('a.fasta', b'>a\nMK\n>caf\xe9\nMK\n', 'line 3: byte 0xE9'), ('a.txt.gz', gzip.compress(b'a\nb\n\xff', mtime=0), 'line 3: byte 0xFF'),
    ('a.csv', b'x,y\n1,2\n', "0 columns are called 'text'.*x.*--field"),
    ('a.txt.gz', gzip.compress(b'hello\n' * 999, mtime=0)[:-20], 'broken gzip'),
    ('a.txt.gz', b'plain', 'broken gzip'), ('a.arrow', b'', 'cannot read this kind'), ('a.npy', b'', 'cannot read this kind')])
def test_what_cannot_be_read_stops_with_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f'{name}.*{message}'):
        run(input=tmp_path / name, out=tmp_path / 'out')

# -----------------------------------------------------------------------------

@pytest.mark.parametrize('word', ['a' * 20_000, 'ab\u6771' * 9000, '\u6771\u4eac' * 4000, '0123456789abcdef' * 2000])
def test_a_long_word_is_fitted_and_encoded_in_pieces(tmp_path, word):
    (tmp_path / 'tokenizer.json').write_text(tokenizers.train_bpe([word, 'a short line'], 500))
    tok = tokenizers.bpe_tokenizer(tmp_path / 'tokenizer.json')
    assert 2 < max(map(len, tok.pieces)) <= tokenizers.LONGEST_PIECE < len(word) and tok.decode(tok.encode(word)) == word


def test_the_fit_listens_to_ctrl_c():
    code = '''
import random, threading
from corpora.tokenizers import train_bpe
text = ''.join(random.Random(0).choices('abcdefghijklmnopqrstuvwxyz', k=6_000_000))
print('fitting', flush=True)
try:
    train_bpe([text], 4096)
except KeyboardInterrupt:
    print('heard, while as many threads run:', threading.active_count())
'''
    child = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == 'fitting\n'
    time.sleep(.3)
    child.send_signal(signal.SIGINT)
    assert child.communicate()[0] == 'heard, while as many threads run: 2\n'


@pytest.mark.parametrize('constant', [0.3, 0.0])
def test_latents_of_which_no_dimension_varies_are_refused_before_there_is_a_dataset(tmp_path, constant):
    path = write_lines(tmp_path / 'a.txt')
    latents = np.full((len(LINES), 8), constant, np.float32)
    np.save(tmp_path / 'z.npy', latents)
    knobs = dict(input=path, latents_from=tmp_path / 'z.npy', encoder='none', tokenizer='byte', out=tmp_path / 'x')
    with pytest.raises(ValueError, match='no dimension varies.*--latents_from'):
        run(**knobs)
    assert not (tmp_path / 'x/meta.json').exists()

    # one dimension that varies is enough
    latents[:, 3] = np.arange(len(LINES))
    np.save(tmp_path / 'z.npy', latents)
    assert PackedDataset(run(**knobs), 'train').live.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


# -----------------------------------------------------------------------------

def test_the_same_command_gives_the_same_bytes_anywhere_and_leaves_nothing_else_behind(tmp_path):
    path = write_lines(tmp_path / 'a.txt')
    for where in ('x', 'deeper/x'):
        run(input=path, out=tmp_path / where)
    assert digests(tmp_path / 'x') == digests(tmp_path / 'deeper/x')
    shards = [f'{split}-{i:05d}.{end}' for split, n in (('train', 4), ('val', 1)) for i in range(n)
              for end in ('tokens.bin', 'offsets.npy', 'ids.npy', 'latents.npy')]
    assert sorted(digests(tmp_path / 'x')) == sorted(shards + ['meta.json', 'tokenizer.json', 'encoder.npz', 'latent_stats.npz', 'bag.npy'])
    assert str(tmp_path) not in (tmp_path / 'x/meta.json').read_text()


def damage(folder, name):
    if name.startswith('flip '):
        path = folder / name.removeprefix('flip ')
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif name.startswith('cut '):
        os.truncate(folder / name.removeprefix('cut '), 10)
    else:
        os.remove(folder / name)


@pytest.mark.parametrize('names', [['flip train-00001.tokens.bin', 'cut train-00000.latents.npy', 'val-00000.offsets.npy'],
                                   ['flip latent_stats.npz', 'tokenizer.json', 'encoder.npz'], ['meta.json'], ['cut meta.json']])
def test_what_is_damaged_is_redone_and_the_rest_is_not(tmp_path, names):
    path = write_lines(tmp_path / 'a.txt')
    folder = tmp_path / 'x'
    run(input=path, out=folder)
    whole = digests(folder)
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    for name in names:
        damage(folder, name)
    (folder / 'train-00002.latents.npy.tmp').write_bytes(b'stale')
    (folder / 'train-00077.tokens.bin').write_bytes(b'of an earlier, larger attempt')
    run(input=path, out=folder)
    assert digests(folder) == whole
    touched = {file.name for file in folder.iterdir() if file.stat().st_mtime > 1}
    assert touched <= {name.split()[-1] for name in names} | {'meta.json'}


def test_a_dataset_that_this_version_cannot_read_is_not_overwritten(tmp_path):
    folder = run(input=write_lines(tmp_path / 'a.txt'), out=tmp_path / 'x')
    meta = tmp_path / 'x' / 'meta.json'
    meta.write_text(json.dumps({**json.loads(meta.read_text()), 'format': 1}))
    before = digests(folder)
    with pytest.raises(ValueError, match='meta.json: format 1, .*; delete that folder or choose another --out='):
        run(input=write_lines(tmp_path / 'b.txt', LINES[:50]), out=folder)
    assert digests(folder) == before


def test_a_run_that_dies_between_shards_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path = write_lines(tmp_path / 'a.txt')
    run(input=path, out=tmp_path / 'whole')
    write, done = prepare.write_shard, []
    def dying(folder, name, *args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(name)
        return write(folder, name, *args)
    monkeypatch.setattr(prepare, 'write_shard', dying)
    with pytest.raises(KeyboardInterrupt):
        run(input=path, out=tmp_path / 'x')
    with pytest.raises(ValueError, match='no dataset'):
        PackedDataset(tmp_path / 'x', 'train')
    redone = []
    monkeypatch.setattr(prepare, 'write_shard', lambda folder, name, *args: redone.append(name) or write(folder, name, *args))
    run(input=path, out=tmp_path / 'x')
    assert redone == ['train-00002', 'train-00003', 'val-00000'] and digests(tmp_path / 'x') == digests(tmp_path / 'whole')


def test_a_damaged_dataset_whose_repair_is_killed_still_keeps_its_whole_shards(tmp_path, monkeypatch):
    path = write_lines(tmp_path / 'a.txt')
    run(input=path, out=tmp_path / 'x')
    whole = digests(tmp_path / 'x')
    damage(tmp_path / 'x', 'cut train-00003.latents.npy')
    write = prepare.write_shard
    def dying(*args):
        write(*args)
        raise KeyboardInterrupt
    monkeypatch.setattr(prepare, 'write_shard', dying)
    with pytest.raises(KeyboardInterrupt):
        run(input=path, out=tmp_path / 'x')
    assert not (tmp_path / 'x/meta.json').exists()
    redone = []
    monkeypatch.setattr(prepare, 'write_shard', lambda folder, name, *args: redone.append(name) or write(folder, name, *args))
    run(input=path, out=tmp_path / 'x')
    assert redone == [] and digests(tmp_path / 'x') == whole


def test_changed_documents_replace_the_shards_and_changed_knobs_are_refused(tmp_path):
    path = write_lines(tmp_path / 'a.txt')
    run(input=path, out=tmp_path / 'x')
    with pytest.raises(ValueError, match='max_tokens = None, not 64; choose another --out='):
        run(input=path, out=tmp_path / 'x', max_tokens=64)
    with pytest.raises(ValueError, match="encoding = 'utf-8', not 'latin-1'; choose another --out="):
        run(input=path, out=tmp_path / 'x', encoding='latin-1')
    write_lines(path, LINES[:90])
    run(input=path, out=tmp_path / 'x')
    run(input=path, out=tmp_path / 'y')
    assert digests(tmp_path / 'x') == digests(tmp_path / 'y')

    # the same number, be it asked for or not
    run(input=path, out=tmp_path / 'y', max_tokens=manifest.read_meta(tmp_path / 'x')['max_tokens'])
    run(input=path, out=tmp_path / 'z', max_tokens=127)
    with pytest.raises(ValueError, match='max_tokens = 127, not None; --max_tokens=127 keeps it, or choose another --out='):
        run(input=path, out=tmp_path / 'z')

# -----------------------------------------------------------------------------

def test_max_tokens_follows_the_lengths_of_the_training_texts_and_is_written_down(tmp_path):
    short = [f'{WORDS[i % 20]} {i:05d}' for i in range(1500)]                        # bytes: at most 11
    odd = 'one text that is longer than the others'                                  # 39
    path = write_lines(tmp_path / 'a.txt', [*short, odd])
    knobs = dict(encoder='none', tokenizer='byte', shard_size=400)
    meta = manifest.read_meta(run(input=path, out=tmp_path / 'a', **knobs))
    assert meta['max_tokens'] == 15 and meta['source']['max_tokens'] is None
    assert sum(split['samples'] for split in meta['splits'].values()) > len(short) + 1, 'one of 1,501 became several samples'
    whole = digests(tmp_path / 'a')
    run(input=path, out=tmp_path / 'a', **knobs)
    assert digests(tmp_path / 'a') == whole
    long = manifest.read_meta(run(input=write_lines(tmp_path / 'b.txt', [odd * 9] * 150 + short), out=tmp_path / 'b', **knobs))
    assert long['max_tokens'] == 127, 'at most'
    np.save(tmp_path / 'z.npy', np.random.default_rng(0).normal(size=(1501, 4)).astype(np.float32))
    given = manifest.read_meta(run(input=path, latents_from=tmp_path / 'z.npy', out=tmp_path / 'z', **knobs))
    assert given['max_tokens'] == 39 and not any(split['longer_than_max_tokens'] for split in given['splits'].values())


def test_shards_hold_16384_documents_and_more_in_a_corpus_of_more_than_67_million(tmp_path, monkeypatch):
    for n, size in ((1, 2**14), (2**26, 2**14), (2**26 + 1, 2**15), (10**9, 2**18), (2**32, 2**20), (2 * 10**10, 2**20)):
        assert shards.fitting_shard_size(n) == size
    path = write_lines(tmp_path / 'a.txt')
    run(input=path, out=tmp_path / 'x', shard_size=None)
    run(input=path, out=tmp_path / 'y', shard_size=16384)
    assert digests(tmp_path / 'x') == digests(tmp_path / 'y'), 'meta.json has the number'

    # another size than the one that is there, be it asked for or not
    run(input=path, out=tmp_path / 'z', shard_size=50)
    with pytest.raises(ValueError, match='shard_size = 50, not 16384; --shard_size=50 keeps it, or choose another --out='):
        run(input=path, out=tmp_path / 'z', shard_size=None)
    before = digests(tmp_path / 'z')
    monkeypatch.setattr(prepare, 'fitting_shard_size', lambda n: 50)
    monkeypatch.setattr(shards, 'ENCODED', 7)
    run(input=path, out=tmp_path / 'z', shard_size=None)
    os.remove(tmp_path / 'z/train-00000.tokens.bin')
    run(input=path, out=tmp_path / 'z', shard_size=None)
    assert digests(tmp_path / 'z') == before


def test_ranks_read_only_the_files_of_their_own_shards(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for i, n in enumerate((70, 3, 0, 45, 90, 12, 33, 60)):                           # lines: shards begin and end inside files
        write_lines(tmp_path / f'{i}.txt', [f'file {i} line {j} {rng.integers(10**9)}' for j in range(n)])
    source = Source(input=str(tmp_path))
    found, _ = splits.survey(source, None, .2)
    assert sum(found.totals.values()) == 313 and [sum(size.values()) for size in found.sizes] == [70, 3, 0, 45, 90, 12, 33, 60]

    opened = []
    read_file = sources.read_file
    monkeypatch.setattr(sources, 'read_file', lambda path, *rest: opened.append(path) or read_file(path, *rest))

    def shards_of(rank, world):
        monkeypatch.setattr(splits, 'rank', rank)
        monkeypatch.setattr(splits, 'world', world)
        opened.clear()
        return {(split, i): [doc.text for doc in docs] for split, i, docs in splits.own_shards(found, 50, source, None)}
    whole = shards_of(0, 1)
    expected = [(split, i) for split in ('train', 'val') for i in range(-(-found.totals[split] // 50))]
    assert sorted(whole) == expected and len(expected) >= 6 and len(opened) == 7, 'one file is empty'
    assert all(len(texts) == min(50, found.totals[split] - 50 * i) for (split, i), texts in whole.items())
    for world in (2, 3, 7):
        together, n_opened = {}, []
        for rank in range(world):
            part = shards_of(rank, world)
            assert all(i % world == rank for _, i in part) and not part.keys() & together.keys()
            n_opened.append(len(opened))
            together |= part
        assert together == whole and (world == 2 or min(n_opened) < 7), (world, n_opened)
    shards_of(5, 7)
    assert len(opened) <= 3, 'a rank of one shard of 50 lines'

    # a file that is not what it was; and what depends on other files is read whole
    write_lines(tmp_path / '4.txt', ['another line'] * 91)
    with pytest.raises(ValueError, match='documents were counted, .*the input has changed meanwhile'):
        shards_of(0, 1)
    for knob in (dict(distinct=True), dict(latents_from='z.npy'), dict(max_documents=5)):
        assert len(sources.parts(Source(input=str(tmp_path), **knob))) == 1
    assert len(sources.parts(source)) == 8 and sources.parts(Source(input='builtin')) == [Source(input='builtin')]


def test_the_summary_warns_where_most_of_a_batch_would_be_pad(tmp_path, capsys):
    knobs = dict(input=write_lines(tmp_path / 'a.txt'), encoder='none', tokenizer='byte')
    run(out=tmp_path / 'x', **knobs)
    said = capsys.readouterr().out
    assert 'would be PAD' not in said and re.search(r'max_tokens=\d+: 14\d of 14\d texts fit', said)
    run(out=tmp_path / 'y', max_tokens=500, **knobs)
    assert re.search(r'9\d% of a batch would be PAD: 501 tokens a row.* fit into --max_tokens=\d\d;', capsys.readouterr().out)


@pytest.mark.parametrize('full', ['train-00001.tokens.bin', 'meta.json', 'train-00001.whole.json'])
def test_a_full_disk_is_one_line_with_path_and_free_bytes_and_the_next_run_goes_on(tmp_path, monkeypatch, full):
    path = write_lines(tmp_path / 'a.txt')
    fsync, is_full = os.fsync, [True]
    def fail(handle):
        if is_full and full in os.readlink(f'/proc/self/fd/{handle}'):
            raise OSError(errno.ENOSPC, 'No space left on device')
        fsync(handle)
    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(OSError, match=f'{tmp_path}/x/{full}: cannot be written .No space left on device.: it needs [0-9,]+ bytes, '
                                      '[0-9,]+ are free there; make room'):
        run(input=path, out=tmp_path / 'x')
    assert not list(tmp_path.glob('x/*.tmp')), 'what was written of it is given back'
    is_full.clear()
    run(input=path, out=tmp_path / 'x')
    run(input=path, out=tmp_path / 'y')
    assert digests(tmp_path / 'x') == digests(tmp_path / 'y')

# -----------------------------------------------------------------------------

def test_the_builtin_corpus_is_distinct_short_sentences_of_english():
    texts = builtin_corpus()
    assert len(texts) > 15_000 and len(set(texts)) == len(texts)
    for text in texts:
        assert re.fullmatch(r'[A-Z].*[.!?]', text) and 5 <= len(text.split()) <= 14 and len(text) < 300
        assert not re.search(r'>>>|::=|[{}<>=|\\_0-9]|\n|  |[a-z][A-Z]', text)


@pytest.mark.parametrize('knobs', [dict(), dict(tokenizer='byte', encoder='none'), dict(max_tokens=9)])
def test_a_dataset_like_another_reads_and_embeds_a_text_as_that_one_does(tmp_path, capsys, knobs):
    lines = write_lines(tmp_path / 'a.txt')
    first = PackedDataset(run(input=lines, out=tmp_path / 'a', **knobs), 'train')
    assert first.meta['source']['same_as'] == ''
    more = write_lines(tmp_path / 'b.txt', LINES[40:80] + [f'{line} again' for line in LINES[:20]])
    like = dict(input=more, same_as=tmp_path / 'a', out=tmp_path / 'b')
    second = PackedDataset(run(**like), 'train')
    assert manifest.dataset_identity(first.meta) == manifest.dataset_identity(second.meta)
    assert first.meta['max_tokens'] == second.meta['max_tokens']
    assert second.meta['source']['same_as'] == 'a' and str(tmp_path) not in json.dumps(second.meta)

    # the texts that are in both
    def samples(ds):
        latents = ds.raw_latents(np.arange(len(ds))) if ds.latent_shape else [None] * len(ds)
        return {text: (ds.rows([i])[0], z) for i, (text, z) in enumerate(zip(texts_in(ds), latents))}
    a, b = samples(first), samples(second)
    assert len(a.keys() & b.keys()) > 20
    for text in a.keys() & b.keys():
        assert torch.equal(a[text][0], b[text][0])
        assert a[text][1] is None or torch.equal(a[text][1], b[text][1])

    # the same command finds all of it there
    before = digests(tmp_path / 'b')
    capsys.readouterr()
    run(**like)
    assert digests(tmp_path / 'b') == before
    assert capsys.readouterr().out.count('there already') == sum(len(split['shards']) for split in second.meta['splits'].values())


def test_nothing_is_prepared_like_latents_of_which_nobody_knows_the_encoder(tmp_path):
    lines = write_lines(tmp_path / 'a.txt')
    np.save(tmp_path / 'z.npy', np.random.default_rng(0).normal(size=(len(LINES), 4)))
    run(input=lines, out=tmp_path / 'a', latents_from=tmp_path / 'z.npy', encoder='none')
    with pytest.raises(ValueError, match='nobody knows what made its latents'):
        run(input=lines, out=tmp_path / 'b', same_as=tmp_path / 'a')


def test_the_command_prepares_into_data_and_sums_up(tmp_path):
    write_lines(tmp_path / 'captions.txt')
    done = subprocess.run([sys.executable, os.path.join(ROOT, 'prepare.py'), '--input=captions.txt', '--tokenizer=byte',
                           '--val_fraction=.1'], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(texts_of(tmp_path / 'data/captions', 'train')) > 100 and 'tokens per sample' in done.stdout


@pytest.mark.parametrize('args, message', [
    ('--input=nothing.txt', 'nothing.txt'), ('--split_on=word', 'line | paragraph | file'), ('--tokenizer=bqe', 'bpe, byte'),
    ('--vocabsize=9', 'vocab_size'), ('--encoder=lsa --encoder_dims=4000', '--encoder_dims'),
    ('--input=', 'one of input, hub_dataset, import_dir; given: none'), ('--input=,', 'input=,: name files'),
    ('--encoder=./nowhere', './nowhere'), ('--shard_size=0', 'shard_size'), ('--max_tokens=3', 'max_tokens'),
    ('--encoding=nope', "encoding 'nope'"), ('--encoding=rot13', "encoding 'rot13'"), ('--invalid_bytes=drop', 'stop | replace'),
    ('--latents_from=z.npz', 'latents_from=z.npz: expected a .npy file'), ('--document_limit=0', 'document_limit'),
    ('--same_as=nowhere', 'no dataset in data/nowhere'), ('--same_as=o --encoder_dims=4', 'run without --encoder_dims'),
    ('--same_as=o --encoder=lsa', 'run without --encoder, or name the folder'),
    ('--same_as=o --max_tokens=20', 'run without --max_tokens')])
def test_what_is_wrong_with_the_command_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, args, message):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', lambda *a, **k: (_ for _ in ()).throw(OSError('no network')))
    write_lines(tmp_path / 'captions.txt')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['prepare.py', '--input=captions.txt', '--out=o', *args.split()])
    with pytest.raises(SystemExit) as stopped:
        prepare.main()
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and lines[-1].startswith('error: ') and message in lines[-1]
    assert len(lines) == 1


@pytest.mark.parametrize('encoder, device, asked, expected', [
    ('e5', 'cuda', None, 'bfloat16'), ('e5', 'cuda:1', None, 'float32'), ('e5', 'cpu', None, 'float32'),
    ('e5', 'cuda', 'float32', 'float32'), ('lsa', 'cuda', None, 'float32')])
def test_an_encoder_on_a_gpu_is_bfloat16_unless_another_is_asked_for(tmp_path, monkeypatch, encoder, device, asked, expected):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', {'cuda': (8, 0), 'cuda:1': (7, 5)}.get)
    monkeypatch.setattr(prepare, 'pick_device', lambda name: device)
    knobs = knobs_of(input=write_lines(tmp_path / 'a.txt'), encoder=encoder, encoder_dtype=asked)
    prepare.settle(knobs)
    assert knobs.encoder_dtype == expected
