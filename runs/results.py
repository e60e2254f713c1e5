"""
results.json of a run folder: what evaluate.py measured, as a list of records, one for each figure.

    {"task": "l2t", "metric": "bleu", "control": "shuffled", "value": 3.9, "se": 0.05, "n": 673,
     "texts": "", "point": {}, "knobs": {"rerank": 24}, "checkpoint": "step-00002000",
     "commit": "378cabf..."}

    value      a number, or null where there is none, as a correlation with constant scores
    control    '': what the task measures. Else what it is compared with: shuffled, null, a rival
    se         the standard error over texts, or null
    n, texts   how many texts, and of which file or other dataset; '': of the validation split
    point      in a sweep, its knobs and their values
    knobs      what else decides the figure: knobs that are not at their defaults (of this commit),
               and a digest of texts that are not the run's own. Without a dtype it is not known

Records with the same task, texts, n, point and knobs are of one measurement: new ones replace old
ones, perhaps of an earlier checkpoint. All points of a sweep are of one checkpoint.
"""
import json
import math
import os

from base.files import read_json
from base.writing import Lock, clear, json_line, write_text

NUMBER = (int, float, type(None))
FIELDS = dict(task=str, metric=str, control=str, value=NUMBER, n=int, texts=str, point=dict,
              se=NUMBER, knobs=dict, checkpoint=str, commit=(str, type(None)))


def read_results(path):
    """ The records of results.json. ValueError where it is not as evaluate.py writes it. """
    records = read_json(path, kind=object, limit=2**23)    # 30,000 records

    # a list of dicts that have all fields, each of its type; a field more is allowed
    for record in records if isinstance(records, list) else [None]:
        if not isinstance(record, dict) or not all(
                isinstance(record.get(name, ()), kind) for name, kind in FIELDS.items()):
            raise ValueError(f'{path} is not as evaluate.py writes it: move it away')
    return records


def write_results(path, records):
    """ A record a line. """
    lines = ',\n'.join(json_line(record) for record in records)
    write_text(path, f'[\n{lines}\n]\n')


def add_results(path, records):
    """ Records into results.json, in place of those of the same measurements. Another evaluation
    of the run may end now, so one process at a time reads and writes. """
    records = json.loads(json_line(records))               # as they are read: tuples are lists
    folder, name = os.path.split(path)
    with Lock(folder or '.', wait=True):
        clear(folder, name)
        old = read_results(path) if os.path.exists(path) else []
        kept = [record for record in old if not any(replaces(new, record) for new in records)]
        write_results(path, kept + records)


def replaces(new, old):
    """ Whether two records are of one measurement, or of a sweep with an earlier checkpoint. """
    # the points of a sweep are compared with each other, so all are of one checkpoint: a new point
    # also replaces those of an earlier one
    is_same = all(new[name] == old[name] for name in ('task', 'texts', 'n', 'knobs'))
    same_axes = new['point'].keys() == old['point'].keys()
    repeats = new['point'] == old['point'] or new['checkpoint'] != old['checkpoint']
    return is_same and same_axes and repeats


def find(records, task, metric, control='', **fields):
    """ The record of a figure, or None: of several that of the most texts, the last of these.
    fields: what else is asked for, as n=200; else it is of the validation split, and no sweep. """
    # of equally many texts the last record wins: max takes the first that it meets, so they are
    # read backwards
    wanted = dict(task=task, metric=metric, control=control, texts='', point={}) | fields
    found = [record for record in records if wanted.items() <= record.items()]
    return max(reversed(found), key=lambda record: record['n'], default=None)


def figure_text(value, se, digits=3):
    """ A figure in a table: '0.920 ± 0.003', or 'undefined' (null in results.json). """
    if value is None or math.isnan(value):
        return 'undefined'
    error = ''
    if se is not None:
        error = f' ± {se:.{digits}f}'
    return f'{value:.{digits}f}{error}'
