"""
Datasets of the hub, by name, streamed: nothing is stored but what is read.

To add a name, add a row to HUB.
"""
import os

from base.files import one_line
from corpora.readers import text_of
from encoders import reach_hub

HUB = {
    'openwebtext': dict(path='Skylion007/openwebtext'),
    'wikitext-103': dict(path='Salesforce/wikitext', name='wikitext-103-raw-v1', val='validation'),
    'lm1b': dict(path='dvruette/lm1b', val='test'),
    'fineweb-edu': dict(path='HuggingFaceFW/fineweb-edu', name='sample-10BT'),
}


def read_hub(source):
    """ The texts of source.hub_dataset: a name in HUB, a hub id, or a folder. """
    name = source.hub_dataset
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f'hub_dataset={name}: pip install datasets') from None

    # a folder needs no hub. Else we ask once whether the hub is there, so that a missing network is
    # one line of an error, and not minutes of retries
    row = HUB.get(name, dict(path=name))
    trouble = '' if os.path.isdir(row['path']) else reach_hub()
    try:
        records = load_dataset(row['path'], row.get('name'), split=source.split, streaming=True,
                               revision=source.hub_revision or None)

        # the hub may fail at any record: then what was read so far is no dataset
        for record in records:
            yield text_of(record, source.field, 'a record')
    except Exception as error:        # a dozen kinds, and each means: not there, or no longer there
        reason = f'{type(error).__name__}: {one_line(error)}' + (trouble and f'; {trouble}')
        raise ValueError(f'hub_dataset={name}: cannot be read ({reason})') from None
