"""
Which encoders there are by name, and how each embeds: the record that meta.json keeps.

    encoder = find_encoder('minilm')                   # or a hub id, or a folder
To add an encoder, add a row to TABLE.
"""
import os

from encoders import find_folder, load_encoder, open_encoder, read_modules
from runs.files import in_one_line, read_json

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
    morgan=dict(id='morgan'),                              # corpora/morgan.py
)

# the poolings, by the names that sentence-transformers has for them
POOLINGS = dict(mean='mean', mean_tokens='mean', cls='cls', cls_token='cls', lasttoken='last')


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
    """ An Encoder from a name in TABLE, a hub id or a folder. chosen: of its record; None: its own.
    A smaller `dimension` is a Matryoshka cut, made before the normalisation. """
    rows = TABLE | {row['id']: row for row in TABLE.values()}
    row = rows.get(name, dict(id=name))
    if name == 'morgan':
        if any(value is not None for value in chosen.values()):
            raise ValueError('encoder=morgan has no settings: leave out pooling, encoder_dims, ...')
        return load_encoder(row)
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
