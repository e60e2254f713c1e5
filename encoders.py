""" Text -> latent encoders: one table, one function. Everything runs on plain `transformers`, from a local folder or the hub.

    encoder = load_encoder('minilm')                   # or a hub id, a folder, or the record of a dataset
    latents = encoder(['A dog runs on the beach.'])    # (n, N, D) float32 on the CPU; N = 1 for sentence embeddings
    encoder.record                                     # what must be known to embed another text the same way

    mean  (h * m[..., None]).sum(1) / m.sum(1)         m (B, L) is the attention mask: padding is never pooled
    last  h[last real token]       cls  h[first real token]

A wrong embedding looks like a right one, so there is no fallback: missing or unexpected weights, an unknown pooling or a
changed folder stop with a ValueError. Only safetensors are read and no remote code runs.
Also here: `lsa`, TF-IDF and a truncated SVD in a screenful of torch, for machines without any model.
"""
import glob
import hashlib
import os
import re
import sys
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from runs import rules
from runs.files import check_fields, read_arrays, sha256
from runs.files import read_json as read_json_file

# normalize is L2; dimension is the model's own; max_length counts prefix and special tokens; revision is the hub's commit (None: the
# newest, no pin is known to us; the commit found goes into the dataset's record, and from there on it is pinned)
TABLE = dict(
    minilm = dict(id='sentence-transformers/all-MiniLM-L6-v2', revision='c9745ed1d9f207416be6d2e6f8de32d1f16199bf',
                  pooling='mean', prefix='', normalize=True, max_length=256, dimension=384),
    e5     = dict(id='intfloat/multilingual-e5-large', revision='0dc5580a448e4284468b8909bae50fa925907bc5',
                  pooling='mean', prefix='query: ', normalize=True, max_length=512, dimension=1024),
    bge    = dict(id='BAAI/bge-m3', revision='5617a9f61b028005a4858fdac845db406aefb181',
                  pooling='cls', prefix='', normalize=True, max_length=8192, dimension=1024),
    qwen   = dict(id='Qwen/Qwen3-Embedding-0.6B', revision='c54f2e6e80b2d7b7de06f51cec4959f6b3e03418',
                  pooling='last', prefix='', normalize=True, max_length=8192, dimension=1024),
    sonar  = dict(id='cointegrated/SONAR_200_text_encoder', revision=None,
                  pooling='mean', prefix='', normalize=False, max_length=512, dimension=1024, language='eng_Latn'),
    t5     = dict(id='google/t5-v1_1-large', revision=None,
                  pooling='mean', prefix='', normalize=False, max_length=512, dimension=1024),
    esm2   = dict(id='facebook/esm2_t12_35M_UR50D', revision=None,                  # of proteins, residue by residue
                  pooling='mean', prefix='', normalize=False, max_length=1024, dimension=480),
)
POOLINGS = ('mean', 'cls', 'last')
RECORD = {'id': '<a name>', 'revision': 'None | <a commit>', 'pooling': '<a name>', 'prefix': "'' | <a text>", 'normalize': 'bool',
          'dimension': 'int [1, 2**24]', 'max_length': 'None | int [1, 2**62]', 'dtype': 'float32 | bfloat16 | float16',
          'language': 'None | <a code>'}           # of a dataset's meta.json: all that embeds another text the same way
# weights of a checkpoint that no embedding reads, or that are computed rather than learned
UNUSED = re.compile(r'(^|\.)pooler\.|position_ids$|^cls\.|^lm_head\.')


def check_texts(texts):
    """ ValueError unless it is a list of texts. One bare text would be taken for a list of its characters. """
    if isinstance(texts, (str, bytes)):
        raise ValueError(f'expected a list of texts, found one {type(texts).__name__}: write [{rules.short(texts)}]')
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f'expected a list of texts, found {rules.short(text)} in it')


def pool(h, m, pooling):
    """ Hidden states (B, L, D) and attention mask (B, L) -> (B, D), for padding on either side. """
    row = torch.arange(len(h), device=h.device)
    if pooling == 'mean':
        return (h * m[..., None]).sum(1) / m.sum(1, keepdim=True)
    if pooling == 'last':
        return h[row, m.shape[1] - 1 - m.flip(1).argmax(1)]
    if pooling == 'cls':
        return h[row, m.argmax(1)]
    raise ValueError(f'unknown pooling {pooling!r}: {", ".join(POOLINGS)}')


class Encoder:
    """ Called on a list of texts: (n, 1, D) float32. `truncated` counts the texts longer than max_length so far. """

    def __init__(self, model, tokenizer, record, device='cpu', batch_size=64):
        self.model, self.tokenizer, self.record = model.eval().to(device), tokenizer, record
        self.device, self.batch_size, self.truncated = device, batch_size, 0

    @torch.inference_mode()
    def __call__(self, texts, progress=lambda n: None, window=2**14):
        check_texts(texts)
        out = [self.embed(texts[i:i + window], progress) for i in range(0, len(texts), window)]
        return torch.cat(out)[:, None] if out else torch.empty(0, 1, self.record['dimension'])

    def embed(self, texts, progress):
        """ Batches of similar length, each padded to its own longest; the order of `texts` is restored. """
        r = self.record
        ids = self.tokenizer([r['prefix'] + text for text in texts], truncation=True, max_length=r['max_length'])['input_ids']
        full = [text for text, i in zip(texts, ids) if len(i) == r['max_length']]
        self.truncated += sum(len(self.tokenizer(r['prefix'] + text, verbose=False)['input_ids']) > r['max_length'] for text in full)
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))   # stable, the longest first: memory runs out at once or never
        out = torch.empty(len(texts), r['dimension'])
        for i in range(0, len(order), self.batch_size):
            rows = order[i:i + self.batch_size]
            batch = self.tokenizer.pad({'input_ids': [ids[j] for j in rows]}, return_tensors='pt').to(self.device)
            h = self.model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).last_hidden_state   # (b, l, D')
            z = pool(h.float(), batch['attention_mask'], r['pooling'])[:, :r['dimension']]                           # (b, D)
            out[rows] = (F.normalize(z, dim=-1) if r['normalize'] else z).cpu()
            progress(len(rows))
        return out

    def remark(self, text):
        """ What keeps it from embedding this text as it stands, or ''. """
        tokenizer, most = self.tokenizer, self.record['max_length']
        ids = tokenizer(self.record['prefix'] + text, verbose=False)['input_ids']
        if len(ids) > most:
            return f'is longer than the encoder reads ({len(ids):,} tokens, at most {most:,}): its end was not read'

        # an unknown word is [UNK] in some tokenizers, beside a mark of where it begins
        own = tokenizer(text, add_special_tokens=False, verbose=False)['input_ids']
        known = [i for i in own if i != tokenizer.unk_token_id and tokenizer.decode([i]).strip()]
        return '' if known else 'has no word that the encoder knows, so its embedding says nothing'


def folder_hash(folder):
    """ A digest of what decides an embedding: weights, configuration and tokenizer, by relative name. """
    digest = hashlib.sha256()
    for path in sorted(glob.glob('**', root_dir=folder, recursive=True)):
        if path.endswith(('.json', '.safetensors', '.txt', '.model')):
            digest.update(f'{path} {sha256(os.path.join(folder, path))}\n'.encode())
    return 'sha256:' + digest.hexdigest()


HUB_TIMEOUT = 5.0                                            # seconds


@lru_cache
def reach_hub():
    """ Asks the hub once whether it is there: '', or why not. Its libraries would try each file for half a minute, and print two
    lines a try; after this they work offline, from what they have stored. """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, logging
    logging.set_verbosity_error()
    if constants.HF_HUB_OFFLINE:
        return 'HF_HUB_OFFLINE is set'
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
        return ''
    except Exception as error:                               # whatever its library for HTTP raises
        constants.HF_HUB_OFFLINE = True
        if 'datasets' in sys.modules:                        # it has its own copy
            sys.modules['datasets'].config.HF_HUB_OFFLINE = True
        return f'{constants.ENDPOINT} does not answer: {type(error).__name__}'


def fetch(hub_id, revision, kind='encoder', instead=f'name a local folder or one of {", ".join(TABLE)}, lsa'):
    """ (folder, commit hash) of a hub model, from the cache when there is no network; kind and instead are words of the error. """
    from huggingface_hub import snapshot_download
    trouble = reach_hub()
    try:
        folder = snapshot_download(hub_id, revision=revision, allow_patterns=['*.json', '*.safetensors', '*.txt', '*.model'],
                                   ignore_patterns=['onnx/*', 'openvino/*'])
    except Exception as error:                                    # a dozen kinds, all of which mean: not there
        raise ValueError(f'{kind} {hub_id}: no such folder, and the hub did not give it ({trouble or type(error).__name__}); '
                         f'{instead}') from None
    return folder, os.path.basename(folder)


def read_json(folder, name, schema=None, kind=dict):
    """ What a JSON file of a model's folder holds; empty where there is none. """
    path = os.path.join(folder, name)
    return read_json_file(path, schema, kind) if os.path.isfile(path) else kind()


def folder_settings(folder):
    """ What sentence-transformers left in a folder about pooling, normalisation and length. """
    flags = read_json(folder, '1_Pooling/config.json')
    modes = dict(pooling_mode_mean_tokens='mean', pooling_mode_cls_token='cls', pooling_mode_lasttoken='last')
    found = {}
    if flags:
        on = [key for key, value in flags.items() if key.startswith('pooling_mode') and value is True]
        if len(on) != 1 or on[0] not in modes:
            raise ValueError(f'{folder}/1_Pooling/config.json: found {on}, expected one of {list(modes)}; choose with --pooling=')
        found['pooling'] = modes[on[0]]
        found['normalize'] = any('Normalize' in module.get('type', '')
                                 for module in read_json(folder, 'modules.json', [{'type?': "'' | <a class>"}], list))
    schema = {'max_seq_length?': 'None | int [1, 2**31]'}
    if length := read_json(folder, 'sentence_bert_config.json', schema).get('max_seq_length'):
        found['max_length'] = length
    return found


def load_model(folder, dtype):
    """ The text encoder in `folder`, refused unless every weight comes from the file. """
    import transformers
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder   # SONAR: AutoModel would build a random encoder
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
    cls = dict(t5=transformers.T5EncoderModel, m2m_100=M2M100Encoder).get(kind, transformers.AutoModel)
    model, info = cls.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False,
                                      output_loading_info=True)
    for what in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
        names = sorted(str(name) for name in info[what] if not UNUSED.search(str(name)))
        if names:
            raise ValueError(f'{len(names)} {what.replace("_", " ")} for {cls.__name__}, e.g. {names[0]}')
    return model


def load_encoder(name, device='cpu', pooling=None, normalize=None, prefix=None, dimension=None, max_length=None, dtype='float32',
                 language=None, batch_size=64, folder=None):
    """ An Encoder from a name in TABLE, a hub id, a folder, or the record of a dataset.

    None means the encoder's own setting. `dimension` below the model's own is a Matryoshka cut, made before normalising.
    `folder`: for a record, where the model lies now (lsa: the dataset folder with encoder.npz). Raises ValueError.
    """
    given = dict(pooling='cls' if pooling == 'first' else pooling, normalize=normalize, prefix=prefix, dimension=dimension,
                 max_length=max_length, language=language)
    settings = dict(prefix='', language=None)
    if isinstance(name, dict):
        check_fields(name, RECORD, f'{folder or "the dataset"}/meta.json, encoder')
        settings, dtype = dict(name), name['dtype']
        if settings['id'] == 'lsa':
            return load_lsa(folder, settings)
    else:
        rows = TABLE | {row['id']: row for row in TABLE.values()}
        settings |= rows.get(name, dict(id=name))
    revision = settings.get('revision')
    where = folder or settings['id']
    if os.path.isdir(where):                                      # a hub's snapshot folder is named by its commit
        found_revision = revision if os.path.basename(os.path.realpath(where)) == revision else folder_hash(where)
    else:
        where, found_revision = fetch(where, revision)
    settings = folder_settings(where) | settings
    settings |= {key: value for key, value in given.items() if value is not None}
    if revision not in (None, found_revision):
        raise ValueError(f'encoder {where}: revision {found_revision}, expected {revision}; '
                         'these are not the weights the data was made with')
    if settings.get('pooling') not in POOLINGS:
        raise ValueError(f'encoder {where}: pooling {settings.get("pooling")!r} is not known for it; choose --pooling={"|".join(POOLINGS)}')
    from transformers import AutoTokenizer
    try:
        model = load_model(where, dtype)
        language = dict(src_lang=settings['language']) if settings['language'] else {}
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **language)
    except Exception as error:                                    # transformers raises what it likes; the cause is its first line
        raise ValueError(f'encoder {where} cannot be used: {type(error).__name__}: {str(error).strip().splitlines()[0]}') from None
    tokenizer.padding_side = tokenizer.truncation_side = 'right'  # right for every pooling, also with absolute positions
    full, cut = model.config.hidden_size, settings.get('dimension') or model.config.hidden_size
    if cut > full:
        raise ValueError(f'encoder {where}: dimension {cut} is more than its {full}')
    limit = min(tokenizer.model_max_length, getattr(model.config, 'max_position_embeddings', 512), 8192)
    record = dict(id=settings['id'], revision=found_revision, pooling=settings['pooling'], prefix=settings['prefix'],
                  normalize=bool(settings.get('normalize')), dimension=cut, max_length=settings.get('max_length') or limit,
                  dtype=dtype, language=settings['language'])
    return Encoder(model, tokenizer, record, device, batch_size)

# -----------------------------------------------------------------------------
# lsa: words weighted by tf-idf, projected on the leading right singular vectors of the training texts

class LSA:
    """ z = L2(tfidf(text) P), (n, 1, D). A text without a known word is the zero vector. """

    def __init__(self, words, idf, projection, record):
        self.idf, self.projection, self.record = idf, projection, record   # (W,), (W, D)
        self.words = words
        self.row = {word: i for i, word in enumerate(words)}
        self.truncated = 0

    def __call__(self, texts, progress=lambda n: None):
        check_texts(texts)
        index, weight, offsets = tfidf(texts, self.row, self.idf)
        z = F.embedding_bag(index, self.projection, offsets, per_sample_weights=weight, mode='sum', include_last_offset=True)
        progress(len(texts))
        return F.normalize(z, dim=-1)[:, None]

    def remark(self, text):
        """ What keeps it from embedding this text as it stands, or ''. """
        is_known = any(word in self.row for word in split_words(text))
        return '' if is_known else 'has no word that the encoder knows, so its embedding says nothing'

    def save(self, path):
        words = np.frombuffer('\n'.join(self.words).encode(), np.uint8)
        np.savez(path, words=words, idf=self.idf.numpy(), projection=self.projection.numpy())


def split_words(text):
    return re.findall(r'\w+', text.lower())


def tfidf(texts, row, idf):
    """ (word indices, weights, offsets) of the known words, text after text; the weights of a text have unit L2 norm. """
    index, weight, offsets = [], [], [0]
    for text in texts:
        counts = {}
        for word in split_words(text):
            if word in row:
                counts[row[word]] = counts.get(row[word], 0) + 1
        index += counts
        weight += counts.values()
        offsets.append(len(index))
    index, offsets = torch.tensor(index, dtype=torch.long), torch.tensor(offsets)
    weight = (1 + torch.tensor(weight, dtype=torch.float32).log()) * idf[index]
    text = torch.repeat_interleave(torch.arange(len(texts)), offsets.diff())
    norm = torch.zeros(len(texts)).index_add_(0, text, weight ** 2).sqrt()
    return index, weight / norm[text], offsets


def fit_lsa(texts, dims, seed=0, max_words=20_000):
    """ Fit on a list of texts; the same texts, dims, seed and thread count give the same bits. """
    seen = {}
    for text in texts:
        for word in set(split_words(text)):
            seen[word] = seen.get(word, 0) + 1
    words = sorted(sorted(w for w in seen if seen[w] > 1), key=lambda w: -seen[w])[:max_words]
    if dims > min(len(texts), len(words)):
        raise ValueError(f'lsa: {dims} dimensions from {len(texts)} documents with {len(words)} repeated words; '
                         'lower --encoder_dims or give more text')
    df = torch.tensor([seen[w] for w in words], dtype=torch.float32)
    idf = torch.log((1 + len(texts)) / (1 + df)) + 1
    index, weight, offsets = tfidf(texts, {w: i for i, w in enumerate(words)}, idf)
    text = torch.repeat_interleave(torch.arange(len(texts)), offsets.diff())
    A = torch.sparse_coo_tensor(torch.stack([text, index]), weight, (len(texts), len(words)), check_invariants=True).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _, _, projection = torch.svd_lowrank(A, q=min(dims + 16, *A.shape), niter=4)   # (W, q), A ~ U S P^T
    projection = projection[:, :dims].contiguous()
    flip = projection.gather(0, projection.abs().argmax(0, keepdim=True)).sign()       # an SVD leaves the signs open
    projection = projection * flip
    record = dict(id='lsa', revision=lsa_hash(words, idf, projection), pooling='sum', prefix='', normalize=True, dimension=dims, max_length=None,
                  dtype='float32', language=None)
    return LSA(words, idf, projection, record)


def lsa_hash(words, idf, projection):
    digest = hashlib.sha256('\n'.join(words).encode() + idf.numpy().tobytes() + projection.numpy().tobytes())
    return 'sha256:' + digest.hexdigest()


def load_lsa(folder, record):
    """ The lsa encoder stored with a dataset or a run. """
    path = os.path.join(folder or '', 'encoder.npz')
    if not os.path.isfile(path):
        raise ValueError(f'{path}: missing; lsa is fitted by prepare.py and lies in the dataset folder')
    arrays = read_arrays(path, {'words': ('uint8', (None,)), 'idf': ('float32', (None,)),
                                'projection': ('float32', (None, record['dimension']))})
    words = arrays['words'].tobytes().decode(errors='replace').split('\n')
    idf, projection = torch.from_numpy(arrays['idf']), torch.from_numpy(arrays['projection'])
    if not len(words) == len(idf) == len(projection):
        raise ValueError(f'{path}: {len(words)} words, {len(idf)} weights and {len(projection)} rows, expected as many of each')
    if lsa_hash(words, idf, projection) != record['revision']:
        raise ValueError(f'{path}: revision {lsa_hash(words, idf, projection)}, expected {record["revision"]}; '
                         'this is not the encoder that the data was made with')
    return LSA(words, idf, projection, record)
