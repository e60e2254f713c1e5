""" The report is one page that holds all it needs: what it shows is what the run wrote, and no text
of a run can break it. """
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from launch import HANGS, ROOT, flags, run_together, train_each
from sampling import report
from sampling.run import Run
from tasks.common import load_texts
from toys import l2t, put

HOSTILE = '</script><script>alert(1)</script>{{title}} <img src=x onerror=alert(1)> "\'&\u2028\x1b'
RUNS = {'both': ['--mode=l2t+causal'], 't2l': ['--mode=t2l'],
        'text': ['--mode=unconditional', '--streams=text'],
        'gidd': ['--mode=unconditional', '--streams=text', '--text_process=gidd']}


@pytest.fixture(scope='module')
def runs(dataset, tmp_path_factory):
    """ {name: folder} of a short run of each kind. """
    folder = tmp_path_factory.mktemp('runs')
    train_each(dataset, {folder / name: [*args, '--max_iters=4', '--eval_interval=2']
                         for name, args in RUNS.items()})
    return {name: folder / name for name in RUNS}


@pytest.fixture(scope='module')
def pages(runs, dataset):
    """ {name: text} """
    def texts_of(run, n):
        return load_texts(run, str(dataset), n, 0)[::2]
    return {name: report.page(str(folder), texts_of, lambda: '<img alt="losses">')
            for name, folder in runs.items()}


def data_of(page):
    return json.loads(re.search(r'id="unmasking-data">(.*?)</script>', page, re.DOTALL)[1])


def test_every_kind_of_run_has_a_page_that_asks_for_nothing_and_says_what_is_missing(pages):
    for name, page in pages.items():
        rest = re.sub(r'<[^>]*http-equiv[^>]*>', '', page)
        assert not re.search(r'https?:|//\w+\.\w|url\(|@import|src="(?!data)', rest), name
        assert "default-src 'none'" in page and '{{' not in page
        assert page.count('Not shown:') == {'t2l': 1}.get(name, 0)
        assert bool(data_of(page)) == (name != 't2l') and 'alt="losses"' in page


@pytest.mark.parametrize('name, text', [
    ('config.json', '{"argv": null}'), ('config.json', '{"argv": 5}'), ('config.json', '[]'),
    ('config.json', r'{"mode": "\ud800"}'),
    ('training_log.jsonl', '{"step": 1, "skips": [{}]}'), ('training_log.jsonl', '5'),
    ('ten.txt', '5'), ('data/tokenizer.json', '{}')])
def test_a_damaged_file_costs_its_own_part_of_the_page(runs, dataset, here, name, text):
    pytest.importorskip('matplotlib', reason='needs matplotlib')
    shutil.copytree(runs['both'], 'run')
    put(f'run/{name}', text)
    told = flags(out_dir='./run', what='report', save='page.html')
    if name == 'ten.txt':
        np.save('run/ten.npy', np.float32(1))
    else:
        told += flags(dataset=dataset)
    (code, _, err), = run_together(['plot.py', *told], cwd=here)
    assert code == 0, err
    page = (here / 'page.html').read_text()
    assert page.count('Not shown:') == ('ud800' not in text)
    assert ('argv is ' in page) == ('argv' in text)


def test_the_slider_has_the_tokens_and_probabilities_of_the_sampler(runs, pages, dataset):
    run = Run(str(runs['both']))
    net, eos, pad = run.net, run.tokenizer.eos, run.tokenizer.pad
    texts, _, raw = load_texts(run, str(dataset), report.N_TEXTS, 0)
    z = run.stats.standardise(raw[:3])
    ways = {'diffusion (confidence)': 'confidence', 'autoregressive': 'autoregressive'}
    written = {way: l2t(net, z, sampler=name, steps=net.L) for way, name in ways.items()}
    expected = [(i, way) for i in range(3) for way in ways]
    for one, (i, way) in zip(data_of(pages['both']), expected, strict=True):
        title, calls = one['title'].split(', calls ')
        assert title == f'{i + 1}, {way}' and one['source'] == texts[i]
        start, *steps = one['steps']
        n_calls, n_free = map(int, calls.split(' of '))
        assert n_free == net.L == len(start) and n_calls == len(steps), 'of this text alone'
        assert all('m' in kinds and number == -1 for _, kinds, number in start)
        ends = [cell[0] in ('EOS', 'PAD') for cell in steps[-1]]
        assert ends == torch.isin(written[way][i], torch.tensor([eos, pad])).tolist()

        # each token is new in one step, which wrote the likeliest one: both are greedy here
        for place, token in enumerate(written[way][i].tolist()):
            k, = [k for k, step in enumerate(steps) if 'n' in step[place][1]]
            number, = {step[place][2] for step in steps[k:]}    # said in the step that wrote it
            said = one['said'][number] if number != -1 else []
            assert [p for _, p, _ in said] == sorted((p for _, p, _ in said), reverse=True)
            if said and token != pad:                        # PAD follows an EOS by rule
                assert [p for _, p, is_it in said if is_it] == [pytest.approx(said[0][1])]


def test_a_hostile_text_is_text(runs, dataset, monkeypatch):
    """ In a caption, in what the network writes, in a knob. """
    load, folder = report.Run, runs['both']

    def hostile_run(*args, **kw):
        run = load(*args, **kw)
        run.tokenizer.pieces = [HOSTILE.encode()] * len(run.tokenizer.pieces)
        return run
    monkeypatch.setattr(report, 'Run', hostile_run)
    config = json.loads((folder / 'config.json').read_text())
    monkeypatch.setattr(report, 'read_json', lambda path: config | {'argv': [HOSTILE]})

    def texts_of(run, n):
        return [HOSTILE] * n, load_texts(run, str(dataset), n, 0)[2]
    page = report.page(str(folder), texts_of, str)
    assert page.count('<script') == 2 and '<img src=x' not in page
    found = data_of(page)
    assert found[0]['source'] == HOSTILE and 'alert(1)' in found[0]['said'][0][0][0]


NODE = pytest.mark.skipif(not shutil.which('node'), reason='needs node, to run the page\'s script')


def browse(page, texts, *events):
    """ What the page shows of these texts after each event. """
    scripts = dict(re.findall(r'<script( [^>]*)?>(.*?)</script>', page, re.DOTALL))
    given = dict(data=json.dumps(texts), script=scripts[''], events=events)
    result = subprocess.run(['node', str(ROOT / 'tests/dom.js')], input=json.dumps(given),
                            capture_output=True, text=True, timeout=HANGS)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return json.loads(result.stdout)


@NODE
@pytest.mark.parametrize('text, opens', [
    ('one two three four', 'one two . . . .'), ('one', 'one . . . . .'),
    ('', 'EOS PAD PAD . . .')])
def test_the_page_opens_where_half_of_the_words_are_written(pages, text, opens):
    """ Here the words come one by one from the left, then the end; a mask shows a draft. """
    words = text.split()
    final = [*words, 'EOS', *['PAD'] * 5][:6]
    n_written = [0, *range(1, len(words) + 1), 6] if words else [0, 3, 6]
    steps = [[[word, 'n' if i < n else 'm', -1] for i, word in enumerate(final)]
             for n in n_written]
    one = dict(title='1, diffusion', source='', steps=steps, said=[])
    shown, = browse(pages['both'], [one], ['source', 'nothing', ''])
    seen = ['.' if 'm' in kinds.split() else cell
            for cell, kinds in zip(shown['cells'], shown['kinds'])]
    assert ' '.join(seen) == opens


@NODE
def test_the_slider_shows_its_step_and_what_the_network_says_there(pages):
    found = data_of(pages['both'])
    steps, said = found[1]['steps'], found[1]['said']         # from left to right
    last = len(steps) - 1
    _, first, pointed, end, other = browse(
        pages['both'], found, ['which', 'change', '1'], ['step', 'input', '1'],
        ['cells', 'pointerover', 2], ['step', 'input', str(last)], ['which', 'change', '0'])
    assert first['at'] == f'step 1 of {last}'
    assert other['at'].endswith(f'of {len(found[0]["steps"]) - 1}')
    for shown, step in ((first, steps[1]), (end, steps[-1])):
        assert shown['cells'] == [text or ' ' for text, _, _ in step]
        for name, (_, kinds, _) in zip(shown['kinds'], step, strict=True):
            assert set(kinds) <= set(name.split())
    assert 'Position 3, a mask' in pointed['candidates'] and 'not asked' in pointed['candidates']
    name, p, _ = said[steps[-1][2][2]][0]
    for words in ('Position 3, “', f'{100 * p:.1f}%', name):
        assert words in end['candidates']
