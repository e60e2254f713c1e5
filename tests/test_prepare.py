""" prepare.py as sentences, on corpora of a few lines, in this process or as a command. """
import json
import os
import shutil
import sys
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
import torch

import prepare
from base.writing import DATASET, Claim
from corpora import shards, sources, tokenizers
from corpora.shards import NAMES, Chunker, token_ids
from corpora.tokenizers import byte_tokenizer, load_tokenizer, train_bpe
from data import PackedDataset, read_meta
from encoders import load_encoder
from launch import prepared, texts_in, texts_of
from runs.checkpoint import SAMPLES, check_equal, of_dataset
from toys import LINES, WORDS, save_encoder, write_lines

pytestmark = pytest.mark.usefixtures('here')


def content_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def packed(out='./out', **knobs):
    """ A dataset of text alone, in bytes. """
    return prepared(**dict(input='a.txt', encoder='none', tokenizer='byte', out=out) | knobs)


def of_both(folder):
    return texts_of(folder, 'train') + texts_of(folder, 'val')


def counted(folder, what):
    """ The sum of a count of both splits. """
    return sum(split[what] for split in read_meta(folder)['splits'].values())

# -----------------------------------------------------------------------------
# Splits and samples

def test_every_document_is_in_one_split_and_the_same_one_whatever_its_neighbours():
    write_lines('a.txt')
    write_lines('b.txt', LINES[::-2])
    folder = prepared(input='a.txt', out='./a', val_fraction=.2)
    train, val = texts_of(folder, 'train'), texts_of(folder, 'val')
    assert sorted(train + val) == sorted(LINES) and not set(train) & set(val)
    assert 10 < len(val) < 60
    other = prepared(input='b.txt', out='./b', val_fraction=.2, max_documents=60)
    assert set(texts_of(other, 'val')) == set(val) & set(LINES[::-2][:60])


def test_no_split_is_ever_empty_and_a_validation_input_leaves_the_input_whole(capsys):
    write_lines('a.txt', LINES[:30])
    write_lines('b.txt', LINES[30:])
    for name, fraction, n_val in (('./few', 1e-9, 1), ('./most', 1 - 1e-9, 29)):
        folder = packed(name, val_fraction=fraction, max_tokens=99)
        assert len(texts_of(folder, 'val')) == n_val == 30 - len(texts_of(folder, 'train'))
        assert ('val has 1 documents, too few' in capsys.readouterr().err) == (n_val == 1)
    folder = packed('./two', val_input='b.txt', max_tokens=99)
    assert texts_of(folder, 'train') == LINES[:30] and texts_of(folder, 'val') == LINES[30:]
    write_lines('a.txt', LINES[:1])
    with pytest.raises(ValueError, match='cannot be split.*val_input'):
        packed('./one')


def test_latents_are_the_encoding_of_exactly_the_text_that_the_tokens_decode_to():
    long = [' '.join(LINES[i:i + 5]) for i in range(0, 150, 5)]
    write_lines('a.txt', [*long, 'unheard', 'strangers'])
    folder = prepared(input='a.txt', out='./a', max_tokens=24)
    ds = PackedDataset(folder, 'train')
    split = ds.meta['splits']['train']
    assert len(ds) > split['documents'], 'several samples of a document'
    encoder = load_encoder(ds.meta['encoder'], folder=folder)
    texts, tokenizer = texts_in(ds), load_tokenizer(folder)
    raw = ds.raw_latents(np.arange(len(ds)))
    assert torch.equal(raw, encoder(texts).half().float())
    tokens, _ = ds.rows(np.arange(len(ds)))
    assert [tokenizer.decode(row) for row in tokens] == texts
    flat = raw.double().reshape(-1, 8)
    assert torch.allclose(ds.stats.mean.double(), flat.mean(0), atol=1e-6)
    assert torch.allclose(ds.stats.std.double(), flat.std(0, unbiased=False), atol=1e-6)
    assert split['unknown'] == (flat == 0).all(1).sum() >= 2


def test_a_real_encoder_of_tiny_size(here):
    write_lines('a.txt', [*LINES, '\U0001f642', '...'])
    (here / 'bert').mkdir()
    encoder = save_encoder(here / 'bert')
    knobs = dict(input='a.txt', encoder=encoder, encoder_dims=0, pooling='mean')
    ds = PackedDataset(prepared(**knobs, out='./a', normalize=True), 'train')
    assert ds.latent_shape == (1, 32) and ds.meta['encoder']['pooling'] == 'mean'
    counts = ds.meta['splits']['train']
    assert (counts['truncated'], counts['unknown']) == (0, 2), 'an emoji, dots'
    (here / 'bert/more.json').write_text('{}')               # another encoder now
    with pytest.raises(ValueError, match='finished dataset, and train-00000 would become another'):
        prepared(**knobs, out='./a', normalize=True)

    # [CLS], four words, [SEP]: shorter than the lines
    (here / 'bert/sentence_bert_config.json').write_text('{"max_seq_length": 6}')
    assert counted(prepared(**knobs, out='./c'), 'truncated') == len(LINES)


def test_without_an_encoder_there_is_nothing_of_latents():
    write_lines('a.txt')
    folder = packed()
    ds = PackedDataset(folder, 'train')
    assert ds.latent_shape is None and ds.meta['encoder'] is None and ds.rows([0])[1] is None
    assert not [name for name in os.listdir(folder) if 'latent' in name or 'bag' in name]


def test_max_tokens_follows_the_lengths_of_the_texts():
    short = [f'{WORDS[i % 20]} {i:05d}' for i in range(1500)]            # bytes: at most 11
    odd = 'one text that is longer than the others'                      # 39
    write_lines('a.txt', [*short, odd])
    meta = read_meta(packed('./a', shard_size=400))
    assert meta['max_tokens'] == 15 and meta['source']['max_tokens'] is None
    assert counted('./a', 'samples') > 1501
    write_lines('b.txt', [odd * 9] * 150 + short)
    meta = read_meta(packed('./b', input='b.txt', shard_size=400))
    assert meta['max_tokens'] == 127, 'at most'

    # a latent of one's own is that of a whole text
    np.save('z.npy', np.random.default_rng(0).normal(size=(1501, 4)))
    meta = read_meta(packed('./z', latents_from='z.npy', shard_size=400))
    assert meta['max_tokens'] == 39 and not counted('./z', 'longer_than_max_tokens')

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


def test_more_shards_than_meta_json_can_hold_are_refused_before_one_is_written(here, monkeypatch):
    monkeypatch.setattr(shards, 'MOST_SHARDS', len(LINES) - 1)
    write_lines('a.txt')
    with pytest.raises(ValueError, match=f'shard_size=1 makes {len(LINES)} shards.*--shard_size='):
        packed('./x', shard_size=1)
    assert not list(here.glob('x/train-*'))
    packed('./y', shard_size=2)


@pytest.mark.parametrize('knobs, words', [
    (dict(max_tokens=64), 'max_tokens = None, not 64'),
    (dict(encoding='latin-1'), "encoding = 'utf-8', not 'latin-1'"),
    (dict(shard_size=50), 'shard_size = 40, not 50')])
def test_a_finished_dataset_never_becomes_one_of_other_knobs(knobs, words):
    write_lines('a.txt')
    packed()
    before = content_of('./out')
    with pytest.raises(ValueError, match=f'{words}; choose another --out='):
        packed(**knobs)
    assert content_of('./out') == before


@pytest.mark.parametrize('lines, knobs', [
    (LINES[:90], dict(encoder='lsa', tokenizer='bpe')),
    (LINES[::-1], dict(encoder='lsa', tokenizer='bpe')),
    (LINES[:-1], dict(shard_size=1))])
def test_a_finished_dataset_never_becomes_one_of_other_documents(lines, knobs):
    write_lines('a.txt')
    packed(**knobs)
    before = content_of('./out')
    write_lines('a.txt', lines)
    with pytest.raises(ValueError, match='(tokenizer.json|-00...) would become another'):
        packed(**knobs)
    assert content_of('./out') == before


@pytest.mark.parametrize('damage', [
    lambda text: text.replace('"counts"', '"Counts"'), lambda text: text[:len(text) // 2],
    lambda text: '', lambda text: '{"mine": 1}'])
def test_a_finished_dataset_with_a_damaged_meta_stays_as_it_is(damage):
    write_lines('a.txt')
    path = Path(packed()) / 'meta.json'
    path.write_text(damage(path.read_text()))
    before = content_of('./out')
    for lines in (LINES, LINES[::-1]):
        write_lines('a.txt', lines)
        with pytest.raises(ValueError, match='meta.json: .* damaged; delete .*out, or choose'):
            packed()
        assert content_of('./out') == before


@pytest.mark.parametrize('module, moment', [
    (prepare, 'train_bpe'), (shards, 'shard_key'), (shards, 'latent_stats')])
def test_a_folder_that_is_replaced_while_it_is_written_is_left_alone(monkeypatch, module, moment):
    function = getattr(module, moment)

    def replaced(*args):
        result = function(*args)
        shutil.rmtree('x')
        Claim('x', DATASET, NAMES)
        return result
    monkeypatch.setattr(module, moment, replaced)
    with pytest.raises(ValueError, match='x/lock was removed, moved or replaced'):
        prepared(input=write_lines('a.txt'), out='./x')
    assert os.listdir('x') == ['lock']


@pytest.mark.parametrize('given', ['input', 'val_input'])
def test_documents_that_change_while_they_are_read_make_no_dataset(monkeypatch, given):
    """ As many texts in each split, but others; they are read a second time after the fit. """
    write_lines('a.txt')
    knobs = dict(input='a.txt', out='./out') | {given: write_lines('b.txt')}

    def fit(*args):
        write_lines('b.txt', LINES[::-1])
        return train_bpe(*args)
    monkeypatch.setattr(prepare, 'train_bpe', fit)
    with pytest.raises(ValueError, match='not those that were read first'):
        prepared(**knobs)
    assert not os.path.exists('out/meta.json')


@pytest.mark.parametrize('knobs', [
    dict(), dict(tokenizer='byte', encoder='none'), dict(max_tokens=9)])
def test_a_dataset_like_another_reads_and_embeds_a_text_as_that_one_does(here, capsys, knobs):
    write_lines('a.txt')
    write_lines('b.txt', [*LINES[40:80], *(f'{line} again' for line in LINES[:20])])
    like = dict(input='b.txt', same_as='./a', out='./b')
    first = PackedDataset(prepared(input='a.txt', out='./a', **knobs), 'train')
    second = PackedDataset(prepared(**like), 'train')
    check_equal('b', of_dataset(second.meta), of_dataset(first.meta), but=SAMPLES)
    assert first.meta['max_tokens'] == second.meta['max_tokens']
    assert second.meta['source']['same_as'] == 'a' and str(here) not in json.dumps(second.meta)

    # the texts that are in both
    def samples(ds):
        rows = np.arange(len(ds))
        found = ds.rows(rows)[0].tolist()
        if ds.latent_shape:
            found = zip(found, ds.raw_latents(rows).tolist())
        return dict(zip(texts_in(ds), found))
    a, b = samples(first), samples(second)
    assert len(a.keys() & b.keys()) > 20
    assert all(a[text] == b[text] for text in a.keys() & b.keys())

    # the same command finds all of it there
    before = content_of('b')
    capsys.readouterr()
    prepared(**like)
    n_shards = sum(len(split['shards']) for split in second.meta['splits'].values())
    assert capsys.readouterr().out.count('there already') == n_shards
    assert content_of('b') == before


def interrupt(*args):
    raise KeyboardInterrupt


def fail(*args):
    raise KeyError


@pytest.mark.parametrize('there', ['', 'data', 'data/new'])
@pytest.mark.parametrize('what', ['no such tokenizer', 'a latent', 'Ctrl-C'])
def test_a_failed_command_leaves_no_empty_folder_but_one_that_was_there(here, monkeypatch, there,
                                                                        what):
    (here / there).mkdir(parents=True, exist_ok=True)
    write_lines('a.txt')
    knobs = dict(out='data/new')
    if what == 'no such tokenizer':
        knobs['tokenizer'] = 'nope'
    elif what == 'a latent':                                 # found when the first shard is written
        np.save('z.npy', np.zeros((150, 6), np.float32))
        knobs['latents_from'] = 'z.npy'
        monkeypatch.setattr(shards, 'given_latents', fail)
    else:
        monkeypatch.setattr(prepare, 'survey', interrupt)
    before = sorted(here.rglob('*'))
    with pytest.raises((ValueError, KeyError, KeyboardInterrupt)):
        packed(**knobs)
    assert sorted(here.rglob('*')) == before


def test_a_failed_command_keeps_what_it_has_written(monkeypatch):
    monkeypatch.setattr(prepare, 'finish', fail)
    with pytest.raises(KeyError):
        prepared(input=write_lines('a.txt'), out='data/new')
    assert os.path.isfile('data/new/tokenizer.json')

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
def test_what_is_wrong_with_the_command_is_one_line_and_code_2(monkeypatch, capsys, args, message):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError('no network')
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', offline)
    write_lines('captions.txt')
    argv = ['prepare.py', '--input=captions.txt', '--out=o', *args.split()]
    monkeypatch.setattr(sys, 'argv', argv)
    with pytest.raises(SystemExit) as stopped:
        prepare.main()
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code == 2 and line.startswith('error: ') and message in line


# ---- one text in two spellings

ACCENTS = [f'{word} {i}' for i in range(12)
           for word in ('caf\u00e9', '\u00c5ngstr\u00f6m', '\ud55c\uae00')]


def test_two_spellings_of_a_text_are_in_one_split_and_one_of_them_where_texts_are_distinct():
    both = [normalize(form, text) for text in ACCENTS for form in ('NFC', 'NFD')]
    write_lines('a.txt', both)
    folder = packed(val_fraction=.3)
    assert sorted(of_both(folder)) == sorted(both), 'as they are written'
    train, val = ({normalize('NFC', text) for text in texts_of(folder, split)}
                  for split in ('train', 'val'))
    assert val and not train & val
    folder = packed('./distinct', val_fraction=.3, distinct=True)
    assert sorted(of_both(folder)) == sorted(both[::2])


def test_what_is_known_of_val_input_is_counted_over_all_of_the_input(monkeypatch, capsys):
    monkeypatch.setattr(sources, 'FIT_DOCUMENTS', 5)        # of which the sample is
    write_lines('a.txt', [*LINES, *ACCENTS])
    known = [*LINES[:20], *(normalize('NFD', text) for text in ACCENTS)]
    write_lines('b.txt', [*known, *(f'new {text}' for text in LINES)])
    counts = read_meta(packed(val_input='b.txt'))['counts']
    assert counts['val_input']['known'] == len(known) == 56
    said = capsys.readouterr()
    assert '56 of 206 documents of val_input are in the input, too' in said.err
    assert '56 also in the input' in said.out
