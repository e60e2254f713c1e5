"""
Encoders, from text to latents: one function.

    encoder = find_encoder('minilm')                   # or a hub id, or a folder
    encoder = load_encoder(record)                     # of a dataset: how it embeds
    latents = encoder(['A dog runs on the beach.'])    # (n, N, D) float32 on the CPU
    encoder.record                                     # all one must know to embed another text so

An encoder is a model of plain `transformers`, from a folder or the hub; corpora/ has lsa.py,
morgan.py and static.py, without a network. A wrong embedding looks like a right one, so there is no
fallback.
Missing or unexpected weights, or a changed folder stop with a ValueError. No remote code runs.
To add an encoder, add a row to TABLE, or to CODE.
Letters: B batch, L tokens, n texts, N latent vectors (1 of a sentence), D latent dimensions.
"""
import glob
import hashlib
import math
import os
import re
import sys
from collections.abc import Sized
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from base.files import in_one_line, read_json, regular, sha256, short, stand_in_at
from corpora.lsa import NO_KNOWN_WORD, load_lsa
from corpora.morgan import Morgan
from corpora.readers import walk
from corpora.static import StaticEncoder

# -----------------------------------------------------------------------------
# Which encoders there are by name

# what meta.json keeps of an encoder, where neither its row, its folder nor a knob says otherwise.
# revision, dimension, max_length (tokens, prefix included): None is the newest, and the model's own
DEFAULTS = dict(id='', revision=None, pooling=None, prefix='', normalize=False, dimension=None,
                max_length=None, dtype='float32', language=None)
TABLE = dict(
    minilm=dict(
        id='sentence-transformers/all-MiniLM-L6-v2',
        revision='c9745ed1d9f207416be6d2e6f8de32d1f16199bf',
        pooling='mean', normalize=True, max_length=256),
    e5=dict(
        id='intfloat/multilingual-e5-large',
        revision='0dc5580a448e4284468b8909bae50fa925907bc5',
        pooling='mean', prefix='query: ', normalize=True, max_length=512),
    bge=dict(
        id='BAAI/bge-m3',
        revision='5617a9f61b028005a4858fdac845db406aefb181',
        pooling='cls', normalize=True, max_length=8192),
    qwen=dict(
        id='Qwen/Qwen3-Embedding-0.6B',
        revision='c54f2e6e80b2d7b7de06f51cec4959f6b3e03418',
        pooling='last', normalize=True, max_length=8192),
    sonar=dict(
        id='cointegrated/SONAR_200_text_encoder',
        pooling='mean', max_length=512, language='eng_Latn'),
    t5=dict(id='google/t5-v1_1-large', pooling='mean', max_length=512),
    esm2=dict(id='facebook/esm2_t12_35M_UR50D', pooling='mean', max_length=1024),
)

# encoders that are code alone, without a model and without settings: {name: class}. The id of its
# record is that name
CODE = {
    'morgan': Morgan,
}

# the poolings, by the names that sentence-transformers has for them
POOLINGS = dict(mean='mean', mean_tokens='mean', cls='cls', cls_token='cls', lasttoken='last')

# -----------------------------------------------------------------------------
# What an encoder is

# copies of a model that others give away: SHA-256 of model.safetensors and tokenizer.json -> the
# hub's commit
COPIES = {('53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db',
           'be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037'):
          'c9745ed1d9f207416be6d2e6f8de32d1f16199bf'}

FILES = ('.json', '.safetensors', '.txt', '.model')        # of an encoder, that decide what it says
MOST_LAYERS = 1000
FAR = 20                       # a latent so many times as long as usual is a mistake, as of -9999
ACTIVATIONS = dict(Identity=lambda z: z, Tanh=torch.tanh)            # of a Dense module

# weights of a checkpoint that no embedding reads, or that are computed rather than learned
UNUSED = re.compile(r'(^|\.)pooler\.|position_ids$|^cls\.|^lm_head\.')


def check_texts(texts):
    """ ValueError unless it is a list of texts. A bare text would pass as a list of characters, and
    a generator is empty when it is read again. """
    is_list = isinstance(texts, Sized) and not isinstance(texts, (str, bytes))
    if not is_list or not len(texts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'expected a list of texts, at least one, found {short(texts)}')


def far_off(raw, usual=None):
    """ Which of n raw latents (n, N, D) are FAR times as long as usual, or as the median of those
    that are not zeros. """
    flat = raw.reshape(len(raw), math.prod(raw.shape[1:]))              # n may be 0
    with np.errstate(over='ignore'):                       # a length, and FAR of them, may be inf
        length = np.nan_to_num(np.linalg.norm(flat, axis=1), nan=0.0)
        if usual is None:
            usual = np.median(length[length > 0]) if length.any() else np.inf
        return length > FAR * usual


def pool(h, m, pooling):
    """ Hidden states (B, L, D) and attention mask (B, L), padded on the right -> (B, D). """
    if pooling == 'mean':
        return (h * m[..., None]).sum(1) / m.sum(1, keepdim=True)
    if pooling == 'last':
        return h[torch.arange(len(h)), m.sum(1) - 1]
    return h[:, 0]                                                       # cls


class Encoder:
    """ A network of transformers, its tokenizer, and what is done with its hidden states.

    Called on a list of texts: (n, 1, D) float32 on the CPU. record: its entry in meta.json.
    truncated: how many texts were too long, since somebody set it to 0. """

    def __init__(self, model, tokenizer, record, device, batch_size, head):
        self.model = model.eval().to(device)
        self.head = head
        self.tokenizer = tokenizer
        self.record = record
        self.device = device
        self.batch_size = batch_size
        self.truncated = 0

    def ids_of(self, texts, **how):
        """ The ids of a text, or of each text of a list. """
        with in_one_line(f'the tokenizer of {self.record["id"]}'):
            return self.tokenizer(texts, verbose=False, **how)['input_ids']

    @torch.inference_mode()
    def __call__(self, texts, progress=lambda n: None):
        """ Texts of similar length share a batch, and each batch is padded to its own longest text.
        The result is in the order of `texts`. Calls progress(n) after every n texts. """
        if len(texts) == 0:
            return torch.empty(0, 1, self.record['dimension'])
        check_texts(texts)

        # the ids of all texts. Those that are too long are cut by the tokenizer itself, since it
        # knows which marks stand at the end of a text; they are counted
        record = self.record
        most = record['max_length']
        prefixed = [record['prefix'] + text for text in texts]
        ids = self.ids_of(prefixed)
        for i in range(len(ids)):
            if len(ids[i]) > most:
                self.truncated += 1
                ids[i] = self.ids_of(prefixed[i], truncation=True, max_length=most)

        # the longest first: if memory does not suffice, we see it at once
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        out = torch.empty(len(texts), record['dimension'])
        for i in range(0, len(order), self.batch_size):
            rows = order[i:i + self.batch_size]
            batch = {'input_ids': [ids[row] for row in rows]}
            batch = self.tokenizer.pad(batch, return_tensors='pt').to(self.device)
            mask = batch['attention_mask']                                         # (b, l)

            # pooled in float32, also where the network computes in bfloat16
            h = self.model(input_ids=batch['input_ids'], attention_mask=mask).last_hidden_state
            z = pool(h.float(), mask, record['pooling'])                           # (b, model's D)
            for weight, bias, activation in self.head:
                z = activation(F.linear(z, weight, bias))

            # a Matryoshka cut comes first: what is left must have length 1
            z = z[:, :record['dimension']]                                         # (b, D)
            if record['normalize']:
                z = F.normalize(z, dim=-1)
            out[rows] = z.cpu()
            progress(len(rows))
        return out[:, None]

    def remark(self, text):
        """ What keeps it from embedding this text as it stands, or ''. """
        # its prefix and its marks count, too
        most = self.record['max_length']
        ids = self.ids_of(self.record['prefix'] + text)
        if len(ids) > most:
            return (f'is longer than the encoder reads ({len(ids):,} tokens, at most {most:,}): '
                    'its end was not read')

        # some tokenizers put a mark where a word begins, also before an unknown word, [UNK]
        own = self.ids_of(text, add_special_tokens=False)
        known = [i for i in own if i != self.tokenizer.unk_token_id]
        return '' if self.tokenizer.decode(known).strip() else NO_KNOWN_WORD


@lru_cache
def reach_hub():
    """ Asks the hub once whether it is there: '', or why not. Without an answer its libraries work
    offline from then on, from what they have stored. Else they would try each file for half a
    minute, and print two lines a try. """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, logging
    logging.set_verbosity_error()
    if constants.HF_HUB_OFFLINE:
        return 'HF_HUB_OFFLINE is set'
    try:
        get_session().head(constants.ENDPOINT, timeout=5.0)
        return ''
    except Exception as error:                     # its library for HTTP can raise anything
        constants.HF_HUB_OFFLINE = True
        if 'datasets' in sys.modules:              # which has its own copy
            sys.modules['datasets'].config.HF_HUB_OFFLINE = True
        return f'{constants.ENDPOINT} does not answer: {type(error).__name__}'


def fetch(hub_id, revision, kind='encoder'):
    """ (folder, commit) of a hub model; without a network, of its copy in the cache. """
    from huggingface_hub import snapshot_download
    trouble = reach_hub()
    try:
        folder = snapshot_download(
            hub_id, revision=revision, ignore_patterns=['onnx/*', 'openvino/*'],
            allow_patterns=['*.json', '*.safetensors', '*.txt', '*.model'])
    except Exception as error:                     # a dozen kinds, and each means: not there
        raise ValueError(f'{kind} {hub_id}: no such folder, and the hub did not give it '
                         f'({trouble or type(error).__name__}): name a local folder, '
                         f'--{kind}=FOLDER') from None
    return folder, os.path.basename(folder)


def folder_hash(folder):
    """ A digest of all files that decide an embedding: weights, configuration and tokenizer. """
    # each with its path, in one order on all machines
    digest = hashlib.sha256()
    for path in sorted(os.path.relpath(path, folder) for path in walk(folder)):
        if path.endswith(FILES):
            digest.update(f'{path} {sha256(os.path.join(folder, path))}\n'.encode())
    return 'sha256:' + digest.hexdigest()


def check_files(folder):
    """ ValueError where something else lies in the place of a model's file, as in a copy without
    the large ones. """
    for pattern in ('*', '*/*'):                   # a module of sentence-transformers has a folder
        for name in glob.glob(pattern, root_dir=folder):
            path = os.path.join(folder, name)
            if name.endswith(FILES) and stand_in_at(path):
                raise ValueError(f'{path} is {stand_in_at(path)}')


def load_model(folder, dtype):
    """ The text encoder in `folder`. ValueError unless each of its weights comes from the file. """
    # what the library says of missing weights is a warning; here it is an error, below
    import transformers
    # SONAR: AutoModel would build an encoder of random weights
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    layers = getattr(config, 'num_hidden_layers', 0)
    if layers > MOST_LAYERS:                       # to build them would take hours
        raise ValueError(f'config.json has {layers:,} layers, at most {MOST_LAYERS} expected')

    # of a model with two halves only the encoder is built
    encoder_only = dict(t5=transformers.T5EncoderModel, m2m_100=M2M100Encoder)
    cls = encoder_only.get(config.model_type, transformers.AutoModel)
    model, info = cls.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True,
                                      trust_remote_code=False, output_loading_info=True)

    # a weight that is missing would be random, and one too many belongs to another network
    for what in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
        names = sorted(str(name) for name in info[what] if not UNUSED.search(str(name)))
        if names:
            raise ValueError(f'{len(names)} {what.replace("_", " ")} for {cls.__name__}, '
                             f'e.g. {names[0]}')
    return model


def read_modules(folder):
    """ [(kind, its folder)] of the modules.json of sentence-transformers; [] without one. """
    # a type is the path of a class, whose last part says what it does
    path = os.path.join(folder, 'modules.json')
    modules = read_json(path, list) if os.path.isfile(path) else []
    modules = [(module['type'].rpartition('.')[2], module['path']) for module in modules]
    for _, path in modules:
        if re.search(r'^/|\.\.', path):
            raise ValueError(f'modules.json: {path} lies outside of the folder')

    # another module, or another order of them, would be another embedding
    kinds = ' '.join(kind for kind, _ in modules)
    known = '(Transformer Pooling( Dense)*|StaticEmbedding)( Normalize)?'
    if kinds and not re.fullmatch(known, kinds):
        raise ValueError(f'modules.json has {kinds}, not Transformer Pooling (Dense) (Normalize), '
                         'nor StaticEmbedding (Normalize)')
    return modules


def load_head(folder, device):
    """ [(weight, bias, activation)] of a folder's Dense modules, for its pooled vectors. """
    head = []
    for kind, path in read_modules(folder):
        if kind == 'Dense':
            settings = read_json(os.path.join(folder, path, 'config.json'))
            name = settings['activation_function'].rpartition('.')[2]
            if name not in ACTIVATIONS:
                raise ValueError(f'activation {name} of a Dense module: not known here')
            file = os.path.join(folder, path, 'model.safetensors')
            weights = load_file(regular(file), device)
            weights = {name: weight.float() for name, weight in weights.items()}
            head.append((weights['linear.weight'], weights.get('linear.bias'), ACTIVATIONS[name]))
    return head


def find_folder(where, revision):
    """ (folder, revision) of a model in a folder or on the hub. ValueError where it is not of the
    revision, if one is expected. """
    if not os.path.isdir(where) and str(revision).startswith('sha256:'):
        raise ValueError(f'encoder {where}: no such folder, and no hub has it; name the folder '
                         f'where it lies now, --encoder=FOLDER (its digest is {revision})')
    check_files(where)

    # its revision: a commit of the hub, where we know that, else a digest of its files
    if not os.path.isdir(where):
        where, found = fetch(where, revision)
    elif os.path.basename(os.path.realpath(where)) == revision:          # a snapshot of the hub
        found = revision
    else:
        files = [os.path.join(where, name) for name in ('model.safetensors', 'tokenizer.json')]
        copy = tuple(map(sha256, files)) if all(map(os.path.isfile, files)) else None
        found = COPIES.get(copy) or folder_hash(where)
    if revision not in (None, found):
        raise ValueError(f'encoder {where}: revision {found}, expected {revision}; '
                         'these are not the weights the data was made with')
    return where, found


def load_encoder(record, folder=None, device='cpu', batch_size=64):
    """ The Encoder of a dataset's record: it embeds another text exactly as that dataset's were.
    ValueError where the model is not there, or is another one by now.

    folder: where its model lies now (lsa: the dataset folder with encoder.npz). """
    if record['id'] == 'lsa':
        return load_lsa(folder, record)
    if record['id'] in CODE:
        encoder = CODE[record['id']]()
        now = encoder.record['revision']
        if record['revision'] != now:
            raise ValueError(f'encoder {record["id"]}: revision {now}, expected '
                             f'{record["revision"]}; this is not the code the data was made with')
        return encoder
    where, _ = find_folder(folder or record['id'], record['revision'])
    with in_one_line(f'encoder {where}'):
        return open_encoder(where, record, device, batch_size)


def open_encoder(where, record, device, batch_size):
    """ The Encoder in a folder, by a record whose dimension and max_length may be open. """
    modules = dict(read_modules(where))
    if 'StaticEmbedding' in modules:
        return StaticEncoder(os.path.join(where, modules['StaticEmbedding']), record, batch_size)

    # the network, and what stands behind its pooling. Padding on the right suits every pooling, and
    # absolute positions
    from transformers import AutoTokenizer
    model = load_model(where, record['dtype'])
    head = load_head(where, device)
    options = dict(src_lang=record['language']) if record['language'] else {}
    tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    tokenizer.padding_side = 'right'
    tokenizer.truncation_side = 'right'

    # its limits. RoBERTa and MPNet count positions from behind that of padding
    own = len(head[-1][0]) if head else model.config.hidden_size
    record = record | dict(dimension=record['dimension'] or own)
    if record['dimension'] > own:
        raise ValueError(f'dimension {record["dimension"]} is more than its {own}')
    longest = min(tokenizer.model_max_length, 8192,
                  getattr(model.config, 'max_position_embeddings', 512))
    for name, module in model.named_modules():
        padding = getattr(module, 'padding_idx', None)
        if name.endswith('position_embeddings') and padding is not None:
            longest = min(longest, module.num_embeddings - padding - 1)
    record['max_length'] = min(record['max_length'] or longest, longest)
    return Encoder(model, tokenizer, record, device, batch_size, head)

# -----------------------------------------------------------------------------
# An encoder by its name

def folder_settings(folder, prefix):
    """ Of a record, what the files of sentence-transformers say; prefix: what is chosen. """
    def read(name):
        path = os.path.join(folder, name)
        return read_json(path) if os.path.isfile(path) else {}

    # the pooling is a word, or the one flag that is set
    modules = dict(read_modules(folder))
    found = dict(normalize='Normalize' in modules)
    pooling = read(os.path.join(modules.get('Pooling', '1_Pooling'), 'config.json'))
    flags = [name.removeprefix('pooling_mode_') for name, value in pooling.items()
             if name.startswith('pooling_mode_') and value is True]
    word = pooling.get('pooling_mode', ' and '.join(flags))
    if 'StaticEmbedding' in modules:
        found['pooling'] = 'mean'
    elif word:
        found['pooling'] = POOLINGS.get(str(word), word)

    # what is done to a text
    more = read('config_sentence_transformers.json') | read('sentence_bert_config.json')
    if more.get('default_prompt_name') and prefix is None:
        found['prefix'] = more['prompts'][more['default_prompt_name']]
    if (prefix or found.get('prefix')) and pooling.get('include_prompt') is False:
        raise ValueError('a prefix that is read but not pooled (include_prompt) is not known here')
    if more.get('do_lower_case'):
        raise ValueError('sentence_bert_config.json: do_lower_case is not known here')
    for name, theirs in (('dimension', 'truncate_dim'), ('max_length', 'max_seq_length')):
        if more.get(theirs):
            found[name] = more[theirs]
    return found


def find_encoder(name, device='cpu', batch_size=64, **chosen):
    """ An Encoder from a name in TABLE or CODE, a hub id or a folder. ValueError where there is
    none, or where it needs something that is not known here.

    chosen: entries of its record, such as pooling='mean'; None: its own. A smaller `dimension` is a
    Matryoshka cut, made before the normalisation. """
    if name in CODE:
        if any(value is not None for value in chosen.values()):
            raise ValueError(f'encoder={name} has no settings: leave out pooling, encoder_dims, '
                             '...')
        return CODE[name]()
    rows = TABLE | {row['id']: row for row in TABLE.values()}
    row = rows.get(name, dict(id=name))

    # the model. A folder may be a copy of one in TABLE: then it has that row's settings
    where, revision = find_folder(row['id'], row.get('revision'))
    copies = {row['revision']: row for row in TABLE.values() if 'revision' in row}
    row = copies.get(revision, {}) | row

    # the folder's own settings count less than its row's, and what is chosen most
    chosen = {key: value for key, value in chosen.items() if value is not None}
    with in_one_line(f'encoder {where}'):
        settings = folder_settings(where, chosen.get('prefix'))
        record = DEFAULTS | settings | row | chosen | dict(revision=revision)
        if record['pooling'] not in POOLINGS.values():
            raise ValueError(f'pooling {record["pooling"]!r} is not known for it; choose '
                             f'--pooling={"|".join(sorted(set(POOLINGS.values())))}')
        encoder = open_encoder(where, record, device, batch_size)

        # is there a token for padding, and are there so many positions?
        encoder(['a', 'a ' * min(encoder.record['max_length'] or 512, 512)])
        encoder.truncated = 0
        return encoder
