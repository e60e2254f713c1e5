""" prepare.py as sentences, on corpora of a few lines, in this process or as a command. """
import hashlib
import json
import os
import re
import shutil
import sys
from unicodedata import normalize

import numpy as np
import pytest
import torch

import prepare
from base.writing import DATASET, Claim
from corpora import shards, sources, tokenizers
from corpora.builtin import builtin_corpus
from corpora.shards import NAMES, Chunker, token_ids
from corpora.tokenizers import byte_tokenizer, load_tokenizer, train_bpe
from data import PackedDataset, read_meta
from encoders import load_encoder
from launch import prepared, texts_in, texts_of
from runs.checkpoint import SAMPLES, check_same, of_dataset
from toys import LINES, WORDS, save_encoder, write_lines

def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.iterdir())}

# -----------------------------------------------------------------------------
# Splits and samples

def test_every_document_is_in_one_split_and_the_same_one_whatever_its_neighbours(tmp_path):
    a, b = write_lines(tmp_path / 'a.txt'), write_lines(tmp_path / 'b.txt', LINES[::-2])
    folder = prepared(input=a, out=tmp_path / 'a', val_fraction=.2)
    train, val = texts_of(folder, 'train'), texts_of(folder, 'val')
    assert sorted(train + val) == sorted(LINES) and not set(train) & set(val)
    assert 10 < len(val) < 60
    other = prepared(input=b, out=tmp_path / 'b', val_fraction=.2, max_documents=60)
    assert set(texts_of(other, 'val')) == set(val) & set(LINES[::-2][:60])


def test_no_split_is_ever_empty_and_a_validation_input_leaves_the_input_whole(tmp_path, capsys):
    a, b = write_lines(tmp_path / 'a.txt', LINES[:30]), write_lines(tmp_path / 'b.txt', LINES[30:])
    knobs = dict(encoder='none', tokenizer='byte', max_tokens=99, input=a)
    for name, fraction, n_val in (('few', 1e-9, 1), ('most', 1 - 1e-9, 29)):
        folder = prepared(out=tmp_path / name, val_fraction=fraction, **knobs)
        assert len(texts_of(folder, 'val')) == n_val == 30 - len(texts_of(folder, 'train'))
        assert ('val has 1 documents, too few' in capsys.readouterr().err) == (n_val == 1)
    folder = prepared(out=tmp_path / 'two', val_input=b, **knobs)
    assert texts_of(folder, 'train') == LINES[:30] and texts_of(folder, 'val') == LINES[30:]
    with pytest.raises(ValueError, match='cannot be split.*val_input'):
        one_line = write_lines(tmp_path / 'c.txt', LINES[:1])
        prepared(out=tmp_path / 'one', **knobs | dict(input=one_line))


def test_latents_are_the_encoding_of_exactly_the_text_that_the_tokens_decode_to(tmp_path):
    long = [' '.join(LINES[i:i + 5]) for i in range(0, 150, 5)]
    path = write_lines(tmp_path / 'a.txt', [*long, 'unheard', 'strangers'])
    folder = prepared(input=path, out=tmp_path / 'a', max_tokens=24)
    ds = PackedDataset(folder, 'train')
    rows = np.arange(len(ds))
    assert len(ds) > ds.meta['splits']['train']['documents'], 'several samples of a document'
    encoder = load_encoder(ds.meta['encoder'], folder=folder)
    texts, tokenizer = texts_in(ds), load_tokenizer(folder)
    assert torch.equal(ds.raw_latents(rows), encoder(texts).half().float())
    assert [tokenizer.decode(row) for row in ds.rows(rows)[0]] == texts
    raw = ds.raw_latents(rows).double().reshape(-1, 8)
    assert torch.allclose(ds.stats.mean.double(), raw.mean(0), atol=1e-6)
    assert torch.allclose(ds.stats.std.double(), raw.std(0, unbiased=False), atol=1e-6)
    assert ds.meta['splits']['train']['unknown'] == (raw == 0).all(1).sum() >= 2


def test_a_real_encoder_of_tiny_size_and_no_encoder_at_all(tmp_path):
    path = write_lines(tmp_path / 'a.txt', [*LINES, '\U0001f642', '...'])
    (tmp_path / 'bert').mkdir()
    encoder = save_encoder(tmp_path / 'bert')
    knobs = dict(input=path, encoder=encoder, encoder_dims=0, pooling='mean')
    ds = PackedDataset(prepared(**knobs, out=tmp_path / 'a', normalize=True), 'train')
    assert ds.latent_shape == (1, 32) and ds.meta['encoder']['pooling'] == 'mean'
    counts = ds.meta['splits']['train']
    assert (counts['truncated'], counts['unknown']) == (0, 2), 'an emoji, dots'
    (tmp_path / 'bert/more.json').write_text('{}')           # another encoder now
    with pytest.raises(ValueError, match='finished dataset, and train-00000 would become another'):
        prepared(**knobs, out=tmp_path / 'a', normalize=True)

    # [CLS], four words, [SEP]: shorter than the lines
    (tmp_path / 'bert/sentence_bert_config.json').write_text('{"max_seq_length": 6}')
    found = read_meta(prepared(**knobs, out=tmp_path / 'c'))['splits'].values()
    assert sum(split['truncated'] for split in found) == len(LINES)
    plain = prepared(input=path, out=tmp_path / 'b', encoder='none', tokenizer='byte')
    ds = PackedDataset(plain, 'train')
    assert ds.latent_shape is None and ds.meta['encoder'] is None and ds.rows([0])[1] is None
    assert not [name for name in os.listdir(plain) if 'latent' in name or 'bag' in name]


def test_max_tokens_follows_the_lengths_of_the_texts(tmp_path):
    short = [f'{WORDS[i % 20]} {i:05d}' for i in range(1500)]            # bytes: at most 11
    odd = 'one text that is longer than the others'                      # 39
    path = write_lines(tmp_path / 'a.txt', [*short, odd])
    knobs = dict(encoder='none', tokenizer='byte', shard_size=400)
    meta = read_meta(prepared(input=path, out=tmp_path / 'a', **knobs))
    assert meta['max_tokens'] == 15 and meta['source']['max_tokens'] is None
    assert sum(split['samples'] for split in meta['splits'].values()) > 1501
    long = write_lines(tmp_path / 'b.txt', [odd * 9] * 150 + short)
    meta = read_meta(prepared(input=long, out=tmp_path / 'b', **knobs))
    assert meta['max_tokens'] == 127, 'at most'

    # a latent of one's own is that of a whole text
    np.save(tmp_path / 'z.npy', np.random.default_rng(0).normal(size=(1501, 4)))
    meta = read_meta(prepared(input=path, latents_from=tmp_path / 'z.npy', out=tmp_path / 'z',
                                  **knobs))
    assert meta['max_tokens'] == 39
    assert not any(split['longer_than_max_tokens'] for split in meta['splits'].values())

# -----------------------------------------------------------------------------
# Tokens

def fitted(tmp_path, texts, vocab_size):
    (tmp_path / 'tokenizer.json').write_text(train_bpe(texts, vocab_size))
    return tokenizers.bpe_tokenizer(tmp_path / 'tokenizer.json')


@pytest.mark.parametrize('kind', ['byte', 'bpe'])
@pytest.mark.parametrize('text', [
    'word ' * 99, 'One two. Three four five! Six? ' * 20, 'x' * 333, '東京🙂é' * 50, ' \n\t' * 60,
    'a\x00b' * 40, 'ab'])
def test_chunks_join_to_the_document_and_each_is_whole_utf8(tmp_path, kind, text):
    tok = byte_tokenizer()
    if kind == 'bpe':
        tok = fitted(tmp_path, ['One two. Three four five! Six? word'] * 3, 280)
    chunks = list(Chunker(tok, 16)(tok.encode(text)))
    assert [i for run in chunks for i in run] == tok.encode(text)
    assert all(1 <= len(run) <= 16 for run in chunks)
    for run in chunks:
        b''.join(tok.pieces[i] for i in run).decode('utf-8')             # strict
    assert ''.join(tok.decode(run) for run in chunks) == text


@pytest.mark.parametrize('text, first', [
    ('It was a dog. It ran far away.', 'It was a dog.'),
    ('It was a dog that ran far away', 'It was a dog that'),
    ('A. Pneumonoultramicroscopicsilicovolcano', 'A. Pneumonoultramicr')])
def test_a_document_is_cut_after_a_sentence_or_before_a_word_where_it_can_be(text, first):
    tok = byte_tokenizer()
    runs = [tok.decode(run) for run in Chunker(tok, 20)(tok.encode(text))]
    assert runs[0] == first and ''.join(runs) == text


@pytest.mark.parametrize('word', ['a' * 20_000, 'ab\u6771' * 9000, '0123456789abcdef' * 2000])
def test_a_long_word_is_fitted_and_encoded_in_pieces(tmp_path, word):
    tok = fitted(tmp_path, [word, 'a short line'], 500)
    assert 2 < max(map(len, tok.pieces)) <= tokenizers.LONGEST_PIECE < len(word)
    assert tok.decode(tok.encode(word)) == word


@pytest.mark.parametrize('kind', ['byte', 'bpe', 'tabs'])
def test_a_long_document_is_tokenized_in_parts_as_it_is_whole(tmp_path, monkeypatch, kind):
    text = ' '.join(LINES * 9)
    if kind == 'tabs':                                       # no word ends with a space
        text = text.replace(' ', '\t')
    tok = byte_tokenizer() if kind == 'byte' else fitted(tmp_path, LINES, 400)
    whole = tok.encode(text)
    monkeypatch.setattr(tokenizers, 'LONGEST_PART', 100)
    monkeypatch.setattr(shards, 'LONGEST_PART', 100)
    parts = list(tokenizers.short_parts(text))
    assert ''.join(parts) == text and len(parts) > 100 and max(map(len, parts)) <= 100
    ids, *others = token_ids(tok, [text, *LINES])
    assert tok.decode(ids) == text and [list(one) for one in others] == tok.encode_batch(LINES)
    if kind != 'tabs':
        assert ids.tolist() == whole


def test_the_builtin_corpus_is_distinct_short_sentences_of_english():
    texts = builtin_corpus()
    assert len(texts) > 15_000 and len(set(texts)) == len(texts)
    for text in texts:
        assert re.fullmatch(r'[A-Z].*[.!?]', text) and 5 <= len(text.split()) <= 14
        assert not re.search(r'>>>|::=|[{}<>=|\\_0-9]|\n|  |[a-z][A-Z]', text)


def test_more_shards_than_meta_json_can_hold_are_refused_before_one_is_written(tmp_path,
                                                                               monkeypatch):
    monkeypatch.setattr(shards, 'MOST_SHARDS', len(LINES) - 1)
    knobs = dict(input=write_lines(tmp_path / 'a.txt'), tokenizer='byte', encoder='none')
    with pytest.raises(ValueError, match=f'shard_size=1 makes {len(LINES)} shards.*--shard_size='):
        prepared(**knobs, out=tmp_path / 'x', shard_size=1)
    assert not list(tmp_path.glob('x/train-*'))
    prepared(**knobs, out=tmp_path / 'y', shard_size=2)


def test_a_finished_dataset_never_becomes_one_of_other_documents_or_knobs(tmp_path):
    path = write_lines(tmp_path / 'a.txt')
    prepared(input=path, out=tmp_path / 'x')
    small = dict(out=tmp_path / 'y', tokenizer='byte', encoder='none', shard_size=1)
    prepared(input=path, **small)
    for knobs, message in ((dict(max_tokens=64), 'max_tokens = None, not 64'),
                           (dict(encoding='latin-1'), "encoding = 'utf-8', not 'latin-1'"),
                           (dict(shard_size=50), 'shard_size = 40, not 50')):
        with pytest.raises(ValueError, match=f'{message}; choose another --out='):
            prepared(input=path, out=tmp_path / 'x', **knobs)
    before = digests(tmp_path / 'x')
    for lines, knobs in ((LINES[:90], {}), (LINES[::-1], {}), (LINES[:-1], small)):
        write_lines(path, lines)
        with pytest.raises(ValueError, match='(tokenizer.json|-00...) would become another'):
            prepared(input=path, **dict(out=tmp_path / 'x') | knobs)
        assert digests(tmp_path / 'x') == before


@pytest.mark.parametrize('damage', [
    lambda text: text.replace('"counts"', '"Counts"'), lambda text: text[:len(text) // 2],
    lambda text: '', lambda text: '{"mine": 1}'])
def test_a_finished_dataset_with_a_damaged_meta_stays_as_it_is(tmp_path, damage):
    path, out = write_lines(tmp_path / 'a.txt'), tmp_path / 'x'
    small = dict(out=out, tokenizer='byte', encoder='none')
    prepared(input=path, **small)
    (out / 'meta.json').write_text(damage((out / 'meta.json').read_text()))
    before = digests(out)
    for lines in (LINES, LINES[::-1]):
        write_lines(path, lines)
        with pytest.raises(ValueError, match='meta.json: .* damaged; delete .*x, or choose'):
            prepared(input=path, **small)
        assert digests(out) == before


@pytest.mark.parametrize('module, moment', [
    (prepare, 'train_bpe'), (shards, 'shard_key'), (shards, 'latent_stats')])
def test_a_folder_that_is_replaced_while_it_is_written_is_left_alone(tmp_path, monkeypatch, module,
                                                                     moment):
    out, function = tmp_path / 'x', getattr(module, moment)

    def replaced(*args):
        result = function(*args)
        shutil.rmtree(out)
        Claim(out, DATASET, NAMES)
        return result
    monkeypatch.setattr(module, moment, replaced)
    with pytest.raises(ValueError, match='x/lock was removed, moved or replaced'):
        prepared(input=write_lines(tmp_path / 'a.txt'), out=out)
    assert os.listdir(out) == ['lock']


@pytest.mark.parametrize('given', ['input', 'val_input'])
def test_documents_that_change_while_they_are_read_make_no_dataset(tmp_path, monkeypatch, given):
    """ As many texts in each split, but others; they are read a second time after the fit. """
    knobs = dict(input=write_lines(tmp_path / 'a.txt'), out=tmp_path / 'out')
    knobs[given] = write_lines(tmp_path / 'b.txt')

    def fit(*args):
        write_lines(knobs[given], LINES[::-1])
        return train_bpe(*args)
    monkeypatch.setattr(prepare, 'train_bpe', fit)
    with pytest.raises(ValueError, match='not those that were read first'):
        prepared(**knobs)
    assert not (tmp_path / 'out/meta.json').exists()


@pytest.mark.parametrize('knobs', [
    dict(), dict(tokenizer='byte', encoder='none'), dict(max_tokens=9)])
def test_a_dataset_like_another_reads_and_embeds_a_text_as_that_one_does(tmp_path, capsys, knobs):
    lines = write_lines(tmp_path / 'a.txt')
    first = PackedDataset(prepared(input=lines, out=tmp_path / 'a', **knobs), 'train')
    more = [*LINES[40:80], *(f'{line} again' for line in LINES[:20])]
    like = dict(input=write_lines(tmp_path / 'b.txt', more), same_as=tmp_path / 'a',
                out=tmp_path / 'b')
    second = PackedDataset(prepared(**like), 'train')
    check_same('b', of_dataset(second.meta), of_dataset(first.meta), but=SAMPLES)
    assert first.meta['max_tokens'] == second.meta['max_tokens']
    assert second.meta['source']['same_as'] == 'a' and str(tmp_path) not in json.dumps(second.meta)

    # the texts that are in both
    def samples(ds):
        latents = ds.raw_latents(np.arange(len(ds))) if ds.latent_shape else [None] * len(ds)
        return dict(zip(texts_in(ds), zip(ds.rows(np.arange(len(ds)))[0], latents)))
    a, b = samples(first), samples(second)
    assert len(a.keys() & b.keys()) > 20
    for text in a.keys() & b.keys():
        assert torch.equal(a[text][0], b[text][0])
        assert a[text][1] is None or torch.equal(a[text][1], b[text][1])

    # the same command finds all of it there
    before = digests(tmp_path / 'b')
    capsys.readouterr()
    prepared(**like)
    n_shards = sum(len(split['shards']) for split in second.meta['splits'].values())
    assert capsys.readouterr().out.count('there already') == n_shards
    assert digests(tmp_path / 'b') == before

@pytest.mark.parametrize('there', ['', 'data', 'data/new'])
@pytest.mark.parametrize('what', ['no such input', 'a latent', 'Ctrl-C'])
def test_a_failed_command_leaves_no_empty_folder_but_one_that_was_there(tmp_path, monkeypatch,
                                                                        there, what):
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    path = write_lines(tmp_path / 'a.txt')
    knobs = dict(input=path, encoder='none', tokenizer='byte', out=tmp_path / 'data/new')
    expected = ValueError
    if what == 'no such input':
        knobs['tokenizer'] = 'nope'
    elif what == 'a latent':                                 # found when the first shard is written
        np.save(tmp_path / 'z.npy', np.zeros((150, 6), np.float32))
        knobs['latents_from'] = tmp_path / 'z.npy'
        monkeypatch.setattr(shards, 'given_latents', lambda docs: {}['no latent'])
        expected = KeyError
    else:
        def interrupt(*args):
            raise KeyboardInterrupt
        monkeypatch.setattr(prepare, 'survey', interrupt)
        expected = KeyboardInterrupt
    before = {str(found.relative_to(tmp_path)) for found in tmp_path.rglob('*')}
    with pytest.raises(expected):
        prepared(**knobs)
    assert {str(found.relative_to(tmp_path)) for found in tmp_path.rglob('*')} == before


def test_a_failed_command_keeps_what_it_has_written(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'finish', lambda *args: {}['nothing'])
    with pytest.raises(KeyError):
        prepared(input=write_lines(tmp_path / 'a.txt'), out=tmp_path / 'data/new')
    assert (tmp_path / 'data/new/tokenizer.json').is_file()

# -----------------------------------------------------------------------------
# The command

@pytest.mark.parametrize('args, message', [
    ('--input=nothing.txt', 'nothing.txt'),
    ('--input=', 'one of input, hub_dataset, import_dir; given: none'),
    ('--input=,', 'input=,: name files'),
    ('--split_on=word', 'line | paragraph | file'),
    ('--encoding=nope', 'unknown encoding: nope; name one'),
    ('--tokenizer=bqe', 'bpe, byte'),
    ('--encoder=lsa --encoder_dims=4000', '--encoder_dims'),
    ('--encoder=./nowhere', './nowhere'),
    ('--latents_from=z.npz', 'latents_from=z.npz: expected a .npy file'),
    ('--same_as=nowhere', 'no dataset in data/nowhere'),
    ('--same_as=o --encoder_dims=4', 'run without --encoder_dims'),
    ('--same_as=o --encoder=lsa', 'run without --encoder, or name the folder')])
def test_what_is_wrong_with_the_command_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, args,
                                                               message):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError('no network')
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', offline)
    write_lines(tmp_path / 'captions.txt')
    monkeypatch.chdir(tmp_path)
    argv = ['prepare.py', '--input=captions.txt', '--out=o', *args.split()]
    monkeypatch.setattr(sys, 'argv', argv)
    with pytest.raises(SystemExit) as stopped:
        prepare.main()
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code == 2 and line.startswith('error: ') and message in line


# ---- one text in two spellings

ACCENTS = [f'{word} {i}' for i in range(12) for word in ('caf\u00e9', '\u00c5ngstr\u00f6m', '\ud55c\uae00')]


def test_two_spellings_of_a_text_are_in_one_split_and_one_of_them_where_texts_are_distinct(tmp_path):
    both = [normalize(form, text) for text in ACCENTS for form in ('NFC', 'NFD')]
    path = write_lines(tmp_path / 'a.txt', both)
    byte = dict(input=path, tokenizer='byte', encoder='none', val_fraction=.3)
    folder = prepared(**byte, out=tmp_path / 'out')
    texts = {split: texts_of(folder, split) for split in ('train', 'val')}
    assert sorted(texts['train'] + texts['val']) == sorted(both), 'as they are written'
    train, val = ({normalize('NFC', text) for text in texts[split]} for split in texts)
    assert val and not train & val
    folder = prepared(**byte, out=tmp_path / 'distinct', distinct=True)
    assert sorted(texts_of(folder, 'train') + texts_of(folder, 'val')) == sorted(both[::2])


def test_what_is_known_of_val_input_is_counted_over_all_of_the_input(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, 'FIT_DOCUMENTS', 5)       # of which the sample is
    write_lines(tmp_path / 'a.txt', [*LINES, *ACCENTS])
    known = [*LINES[:20], *(normalize('NFD', text) for text in ACCENTS)]
    write_lines(tmp_path / 'b.txt', [*known, *(f'new {text}' for text in LINES)])
    folder = prepared(input=tmp_path / 'a.txt', val_input=tmp_path / 'b.txt', tokenizer='byte',
                      encoder='none', out=tmp_path / 'out')
    assert read_meta(folder)['counts']['val_input']['known'] == len(known) == 56
    said = capsys.readouterr()
    assert '56 of 206 documents of val_input are in the input, too' in said.err
    assert '56 also in the input' in said.out
