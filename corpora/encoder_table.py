"""
Which encoders there are by name, and how each embeds: the record that meta.json keeps.

    encoder = find_encoder('minilm')                   # or a hub id, or a folder

An unknown pooling stops with a ValueError. To add an encoder, add a row to TABLE.
"""
import os

from encoders import find_folder, open_encoder
from runs.files import read_json

# what meta.json keeps of an encoder, where neither its row, its folder nor a knob says otherwise:
# revision    the hub's commit; None: the newest, whose commit goes into the record
# normalize   L2
# dimension   None: the model's own
# max_length  tokens, prefix and special ones included; None: as many as the model reads
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
    t5=dict(
        id='google/t5-v1_1-large',
        pooling='mean', max_length=512),
    esm2=dict(
        id='facebook/esm2_t12_35M_UR50D',
        pooling='mean', max_length=1024),
)

# the poolings, by the names that sentence-transformers has for them
POOLINGS = dict(pooling_mode_mean_tokens='mean', pooling_mode_cls_token='cls',
                pooling_mode_lasttoken='last')


def folder_settings(folder):
    """ Pooling, normalisation and length, from the files that sentence-transformers leaves. """
    def read(name, kind=dict):
        path = os.path.join(folder, name)
        return read_json(path, kind) if os.path.isfile(path) else kind()

    found = {}
    flags = read('1_Pooling/config.json')
    if flags:
        on = [key for key in flags if key.startswith('pooling_mode') and flags[key] is True]
        if len(on) != 1 or on[0] not in POOLINGS:
            raise ValueError(f'{folder}/1_Pooling/config.json: found {on}, '
                             f'expected one of {list(POOLINGS)}; choose with --pooling=')
        found['pooling'] = POOLINGS[on[0]]
        modules = read('modules.json', list)
        found['normalize'] = any('Normalize' in module.get('type', '') for module in modules)
    length = read('sentence_bert_config.json').get('max_seq_length')
    return found | (dict(max_length=length) if length else {})


def find_encoder(name, device='cpu', batch_size=64, **chosen):
    """ An Encoder from a name in TABLE, a hub id or a folder. chosen: of its record; None means the
    encoder's own setting. A `dimension` below the model's own is a Matryoshka cut: first the cut,
    then the normalisation. Raises ValueError. """
    rows = TABLE | {row['id']: row for row in TABLE.values()}
    row = rows.get(name, dict(id=name))
    where, revision = find_folder(row['id'], row.get('revision'))
    copies = {row['revision']: row for row in TABLE.values() if 'revision' in row}
    row = copies.get(revision, {}) | row

    # the folder's own settings count less than its row's, and what is chosen most
    chosen = {key: value for key, value in chosen.items() if value is not None}
    record = DEFAULTS | folder_settings(where) | row | chosen | dict(revision=revision)
    if record['pooling'] not in POOLINGS.values():
        raise ValueError(f'encoder {where}: pooling {record["pooling"]!r} is not known for '
                         f'it; choose --pooling={"|".join(POOLINGS.values())}')
    return open_encoder(where, record, device, batch_size)
