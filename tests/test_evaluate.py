""" evaluate.py: what it prints and records, of which texts, and what it refuses. """
import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
from base.files import read_sealed
from base.writing import Held, sealed
from data import read_meta
from launch import measured, run_each
from runs.results import add_results, find, read_results
from tasks import TASKS, measures
from tasks.common import Context, Figures, Task
from tasks.measures import correlation


@pytest.fixture
def unmeasured(finished, tmp_path):
    """ A copy of the run, without results. """
    ignored = shutil.ignore_patterns('results.json')
    return shutil.copytree(finished, tmp_path / 'run', ignore=ignored)


# ---- what is printed, and results.json

def test_the_summary_puts_each_direction_beside_its_controls(monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', '100')                     # of the terminal
    figures = dict(nelbo=Figures(9), l2t=Figures(9))
    figures['nelbo']['', 'nats_per_token'] = 3.208, .042
    figures['l2t'] |= {('', 'bleu'): (24.12, 1.36), ('shuffled', 'bleu'): (3.9, None),
                       ('null', 'bleu'): (6.2, None), ('nearest', 'bleu'): (20.0, None),
                       ('lead', 'bleu'): (-.0123, .001), ('diffusion', 'bleu'): (19.1, None)}
    evaluate.print_summary({name: TASKS[name] for name in figures}, figures)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [re.split('  +', line.strip()) for line in lines] == [
        ['in short', 'ours', 'shuffled', 'null', 'rival', 'lead'],
        ['diffusion, nats, a bound', '3.208 ± .042'],
        ['text from embedding, BLEU', '24.1 ± 1.4', '3.9', '6.2', '20.0', '-.0 ± .0'],
        ['by diffusion, greedy', '19.1'], ['rival: nearest (l2t)'],
        ['lead: over the rival, text by text']]


def record(value, task='nelbo', metric='a', **changes):
    """ A row of results.json. """
    usual = dict(control='', se=None, n=100, texts='', point={}, knobs={}, checkpoint='step-1',
                 commit='')
    return dict(usual, task=task, metric=metric, value=value) | changes


def test_what_is_measured_again_replaces_its_records_and_nothing_else(tmp_path):
    path = str(tmp_path / 'results.json')

    def add(value, **changes):
        add_results(path, [record(value, metric=metric, **changes) for metric in 'ab'])
    different = [dict(), dict(n=20), dict(knobs=dict(draws=4)), dict(texts='my.txt'),
                 dict(task='t2l'), dict(point=dict(steps=4)), dict(knobs=dict(loop=(.5, 1)))]
    for value in (1, 2):
        for i, changes in enumerate(different):
            add(10 * value + i, **changes)
    records = read_results(path)
    assert [record['value'] for record in records] == [20 + i for i in range(7) for _ in 'ab']

    # of the most texts, and the last of these
    assert find(records, 'nelbo', 'a')['value'] == 26
    assert find(records, 'nelbo', 'a', point=dict(steps=4))['value'] == 25

    # the points of a sweep are of one checkpoint; a sweep over other knobs is another
    add(31, point=dict(steps=8, rerank=2))
    add(32, point=dict(steps=16), checkpoint='step-2')
    swept = [record['value'] for record in read_results(path) if record['point']]
    assert swept == [31, 31, 32, 32]


@pytest.mark.parametrize('broken', [
    '{}', '{"nelbo/n": 8}', '[1]', '[{"task": "l2t"}]', '3',
    *(json.dumps([record(1.0) | wrong]) for wrong in (
        dict(value='high'), dict(point=[]), dict(se='low'), dict(knobs=None)))])
def test_results_that_are_none_are_refused(tmp_path, broken):
    (tmp_path / 'broken.json').write_text(broken)
    with pytest.raises(ValueError, match='broken.json.*move it away'):
        read_results(tmp_path / 'broken.json')


def test_results_of_any_size_are_not_read(tmp_path):
    (tmp_path / 'large.json').write_text(f'[{"[]," * 2 ** 22}[]]')
    with pytest.raises(ValueError, match='at most'):
        read_results(tmp_path / 'large.json')


def refuse(word):
    raise AssertionError(f'{word} is no JSON')


def test_what_is_not_defined_is_nan_without_a_warning_and_null_in_the_results(tmp_path, recwarn,
                                                                            capsys):
    figures = Figures(0)
    figures.enter('', dict(none=[], ratio=(torch.zeros(3), torch.zeros(3)), one=[2.0]))
    figures['', 'spearman'] = correlation(np.ones(5), np.arange(5.))
    figures['', 'alone'] = correlation(np.ones(1), np.ones(1))
    figures.enter('shuffled', dict(one=[3.0, 5.0], none=[1.0, 2.0], perplexity=math.inf))
    undefined = ['none', 'ratio', 'spearman', 'alone']
    for name in undefined:
        assert math.isnan(figures['', name].value) and figures['', name].se is None
    assert measures.perplexity_of(1e6, 1) == math.inf and math.isnan(measures.perplexity_of(0., 0))
    assert math.copysign(1, measures.entropy([])) == 1 and measures.entropy([]) == 0
    assert not recwarn.list

    path = tmp_path / 'results.json'
    add_results(path, [record(value, 't', metric, control=control, se=se)
                       for (control, metric), (value, se) in figures.items()])
    json.loads(path.read_text(), parse_constant=refuse)
    records = read_results(path)
    assert [find(records, 't', name)['value'] for name in undefined] == [None] * 4
    assert find(records, 't', 'perplexity', 'shuffled')['value'] is None
    add_results(path, [record(1.0, 't', 'none')])          # beside what is null

    evaluate.print_figures('t', figures, 5)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith('none'))
    assert row.split()[1:3] == ['undefined', '1.500']
    cells = evaluate.summary_cells(figures, ['', 'shuffled'], 'none')
    assert cells == ['undefined', '1.500 ± .500']


# ---- sweeps

CONFIG = {name: knob.default for name, knob in evaluate.KNOBS.items()}


def test_a_sweep_is_the_product_of_its_knobs_in_their_own_types():
    product = [dict(sampler=s, steps=k) for s in ('ancestral', 'cached') for k in (2, 4)]
    assert evaluate.read_sweep('sampler=ancestral,cached; steps=2,4', CONFIG) == product
    assert evaluate.read_sweep('guidance=0,1.5', CONFIG) == [{'guidance': 0.0}, {'guidance': 1.5}]


@pytest.mark.parametrize('wrong', ['magic=1', 'steps', 'steps=a', 'steps=', 'guidance=nan',
                                   'sampler=fast'])
def test_a_sweep_of_what_is_no_knob_or_no_value_is_refused(wrong):
    with pytest.raises(ValueError, match='sweep'):
        evaluate.read_sweep(wrong, CONFIG)


# ---- which texts

def test_a_record_tells_other_texts(monkeypatch, dataset, tmp_path):
    own = SimpleNamespace(meta=read_meta(dataset))
    assert evaluate.source_of(own, str(dataset)) == ('', {})
    other = SimpleNamespace(meta=json.loads(json.dumps(own.meta)))
    for ending, source in (('latents.npy', ''), ('.npy', str(dataset))):
        for shard in other.meta['splits']['val']['shards']:
            for name, file in shard['files'].items():
                if name.endswith(ending):
                    file['sha256'] = 'f' * 64
        assert evaluate.source_of(other, str(dataset))[0] == source
    file = tmp_path / 'own.txt'
    monkeypatch.setattr(evaluate, 'texts', str(file))
    found = [file.write_text(text) and evaluate.source_of(own, '') for text in 'aab']
    assert found[0] == found[1] != found[2] and found[2][0] == str(file)


def test_nothing_is_measured_on_shards_that_are_not_those_of_the_dataset(
        dataset, unmeasured, tmp_path):
    data = shutil.copytree(dataset, tmp_path / 'data')
    tokens = data / 'val-00000.tokens.bin'
    np.fromfile(tokens, np.uint16)[::-1].tofile(tokens)
    here = f'--out_dir={unmeasured} --dataset={data}'
    figures, drawn, exported = run_each(
        f'evaluate.py {here} --tasks=nelbo --n=8 --draws=1 --device=cpu',
        f'plot.py {here} --what=report --save={tmp_path}/report.html',
        f'prepare.py --export_dir={tmp_path}/old --out={data}')
    for code, _, err in (figures, exported):
        assert code == 2 and 'val-00000.tokens.bin: its sha256 is not the one' in err, err
    assert not (unmeasured / 'results.json').exists() and not (tmp_path / 'old').exists()
    assert 'val-00000.tokens.bin: its sha256' in (tmp_path / 'report.html').read_text()


def test_figures_of_a_run_that_was_replaced_are_not_recorded(monkeypatch, tmp_path):
    out = tmp_path / 'run'
    out.mkdir()
    ctx = Context(dict.fromkeys(('which', 'seed', 'field', 'dtype')), held=Held(out))
    shutil.rmtree(out)
    out.mkdir()
    monkeypatch.setattr(evaluate, 'out_dir', str(out))
    monkeypatch.setattr(evaluate, 'KNOBS',
                        dict.fromkeys(ctx.knobs, SimpleNamespace(default=None)))
    run = SimpleNamespace(checkpoint='step-00000001')
    task = Task(needs=None, settings=(), measure=None)
    with pytest.raises(ValueError, match='run was removed, moved or replaced'):
        evaluate.record_figures(run, ctx, 'nelbo', task, Figures(1))
    assert not list(out.iterdir())


def test_a_run_is_measured_on_its_own_dataset_whatever_a_config_names(
        dataset, unmeasured, tmp_path):
    """ A config is of a training, perhaps of another one: out/v3 was trained on other texts. """
    own, other = tmp_path / 'own', tmp_path / 'other'
    shutil.copytree(dataset, own)
    for path in unmeasured.glob('step-*/training_state.json'):
        state = read_sealed(path)
        state['knobs']['dataset'] = str(own)
        path.write_text(sealed(state))
    config = json.loads((unmeasured / 'config.json').read_text())
    (unmeasured / 'config.json').write_text(json.dumps(config | dict(dataset=str(own))))
    more = [f'a green dog sits near the park number {i}' for i in range(60)]
    (tmp_path / 'more.txt').write_text('\n'.join(more))
    (tmp_path / 'of_training.py').write_text(f'dataset = {str(other)!r}\nencoder = "e"')

    measure = (f'evaluate.py {tmp_path}/of_training.py --out_dir={unmeasured} --device=cpu '
               '--tasks=nelbo --n=9 --draws=1')
    results = run_each(f'prepare.py --input={tmp_path}/more.txt --same_as={own} --val_fraction=.3 '
                       f'--out={other}', measure, f'{measure} --dataset={other}')
    shutil.rmtree(own)                                       # then a config may say where it lies
    results += run_each(measure)
    assert [code for code, _, _ in results] == [0] * 4, results
    said = [f'{own} ' in out and f'that of {tmp_path}' in out for _, out, _ in results[1:]]
    assert said == [True, False, False]
    records = read_results(unmeasured / 'results.json')
    assert {record['texts'] for record in records} == {'', str(other)}


LINE = 'a red dog runs near the park number 3'


def test_evaluations_of_other_texts_and_one_text_and_a_sweep_as_commands(unmeasured, tmp_path):
    captions = [json.dumps({'caption': text}) for text in (LINE, LINE * 9, 'a old cat sits')]
    (tmp_path / 'one.txt').write_text(LINE)
    (tmp_path / 'own.jsonl').write_text('\n'.join(captions))
    here = (f'evaluate.py --out_dir={unmeasured} --device=cpu --dtype=float32 --draws=1 '
            '--steps=2 --field=caption')
    good = run_each(f'{here} --tasks=nelbo,orders --n=8 --n_orders=3',
                    f'{here} --tasks=nelbo --n=1',
                    f'{here} --tasks=nelbo --texts={tmp_path}/one.txt',
                    f'{here} --tasks=nelbo --texts={tmp_path}/own.jsonl',
                    f'{here} --tasks=l2t --n=6 --sweep=steps=1,2',
                    f'{here} --tasks=l2t --n=6 --sweep=steps=3')
    assert [code for code, _, _ in good] == [0] * 6, good
    assert '1 texts skipped' in good[3][2]
    records = read_results(unmeasured / 'results.json')
    of_nelbo = {(record['texts'], record['n']) for record in records if record['task'] == 'nelbo'}
    assert of_nelbo == {('', 8), ('', 1), (f'{tmp_path}/one.txt', 1), (f'{tmp_path}/own.jsonl', 2)}
    assert {record['knobs']['dtype'] for record in records} == {'float32'}
    points = [record['point'] for record in records if record['metric'] == 'ms']
    assert points == [dict(steps=k) for k in (1, 2, 3)]

    # of one text there is no other, and no standard error
    alone = [record for record in records if record['n'] == 1]
    assert alone and all(record['se'] is None for record in alone)
    assert {record['control'] for record in alone} == {'', 'null'}
    r = measured(unmeasured)
    for control in ('', 'shuffled/', 'null/'):
        plain = r[f'orders/{control}nats_plain_bound']
        assert r[f'orders/{control}nats_iw_bound'] < plain
        assert plain == pytest.approx(r[f'nelbo/{control}nats_per_token'], rel=.2)


def test_nothing_is_computed_before_all_that_is_named_is_there(unmeasured, tmp_path):
    (tmp_path / 'long.txt').write_text(LINE * 9)
    here = f'evaluate.py --out_dir={unmeasured} --device=cpu'
    wrong = {'--tasks=nelbo,l2t --n=1': 'at least 2',
             f'--tasks=nelbo --texts={tmp_path}/long.txt': 'short enough',
             '--tasks=text --scorer=out/nothing/here': 'scorer',
             f'--tasks=nelbo --texts={tmp_path}': 'folder',
             '--tasks=nelbo --texts=nowhere.txt': 'no such file'}
    results = run_each(*(f'{here} {args}' for args in wrong))
    for (code, _, err), words in zip(results, wrong.values()):
        errors = [row for row in err.splitlines() if row.startswith('error: ')]
        assert code == 2 and len(errors) == 1 and words in errors[0], err
        assert 'Traceback' not in err
    assert not (unmeasured / 'results.json').exists()
