"""
Datasets of the hub, by name, streamed: nothing is stored but what is read.

To add a name, add a row to HUB: the hub's path, maybe a configuration, and the split for
validation.
"""
import os

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

    # a folder needs no hub
    row = HUB.get(name, dict(path=name))
    trouble = '' if os.path.isdir(row['path']) else reach_hub()

    try:
        records = load_dataset(row['path'], row.get('name'), split=source.hub_split, streaming=True,
                               revision=source.hub_revision or None)
        for record in records:
            yield text_of(record, source.field, 'a record')
    except Exception as error:        # a dozen kinds, and each means: not there, or no longer there
        message = (str(error).splitlines() or [''])[0][:200]
        reason = f'{type(error).__name__}: {message}'
        if trouble:
            reason = f'{trouble}; {reason}'
        raise ValueError(f'hub_dataset={name}: cannot be read ({reason})') from None


def hub_commit(name):
    """ The newest commit of a hub dataset. """
    from huggingface_hub import HfApi
    path = HUB.get(name, dict(path=name))['path']
    trouble = reach_hub()
    try:
        return HfApi().dataset_info(path).sha
    except Exception as error:
        raise ValueError(f'hub_dataset={name}: the hub did not give {path} '
                         f'({trouble or type(error).__name__}); '
                         'check the network and the name') from None
