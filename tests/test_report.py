""" The report is one page that holds all it needs: what it shows is what the run wrote, and no text of a run can break it. """
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

from benchmarks import report
from corpora.tokenizers import byte_tokenizer
from launch import ROOT, run_each, train_each
from sampling.loading import load_run
from sampling.unmasking import Frame
from sampling import directions

BYTES = byte_tokenizer()
NODE = shutil.which('node')
BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
VOID = {'meta', 'link', 'input', 'br', 'hr', 'img'}
HOSTILE = '</script><script>alert(1)</script>{{says}} <img src=x onerror=alert(1)> "\'&\u2028\x1b'


class Page(HTMLParser):
    """ A page as a tree is checked: every element is closed, ids are unique. """

    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.tags, self.attributes, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open
        ids = [value for name, value in self.attributes if name == 'id']
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == 'script':
            self.scripts.append((dict(attributes), ''))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):                       # <path/> of an svg
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == 'script':
            attributes, before = self.scripts[-1]
            self.scripts[-1] = attributes, before + text
        elif 'style' not in self.open:
            self.words.append(text)

    def data(self, name):
        return json.loads(next(text for attributes, text in self.scripts if attributes.get('id') == name))

    @property
    def text(self):
        return ' '.join(self.words)


RUNS = {'l2t': ['--mode=l2t'], 'both': ['--mode=l2t+causal'], 't2l': ['--mode=t2l'],
        'text': ['--mode=unconditional', '--streams=text'], 'latent': ['--mode=unconditional', '--streams=latent'],
        'gidd': ['--mode=unconditional', '--streams=text', '--text_process=gidd']}


@pytest.fixture(scope='module')
def runs(dataset, tmp_path_factory):
    """ {name: folder} of a short run of each kind, and one of l2t with evaluations. """
    folder = tmp_path_factory.mktemp('runs')
    train_each(dataset, {folder / name: [*args, '--max_iters=4', '--eval_interval=2'] for name, args in RUNS.items()})
    results = {'nelbo/n': 20, 'nelbo/nats_per_token': 3.25, 'nelbo/nats_per_token_se': .125, 'nelbo/shuffled/nats_per_token': 6.5,
               'nelbo/shuffled/nats_per_token_se': .25, 'nelbo/perplexity': 25.8}
    for sampler in ('ancestral', 'confidence'):
        for steps in (2, 4):
            label = f'l2t_sweep_sampler_steps/sampler={sampler},steps={steps}'
            results |= {f'{label}/calls': float(steps), f'{label}/bleu': 10. * steps, f'{label}/bleu_se': 1.}
    (folder / 'both/results.json').write_text(json.dumps(results))
    return {name: folder / name for name in RUNS}


@pytest.fixture(scope='module')
def pages(runs):
    """ {name: text} """
    pytest.importorskip('matplotlib', reason='draws the charts')
    return {name: report.page(str(folder)) for name, folder in runs.items()}


def test_every_kind_of_run_has_a_page_that_holds_all_it_needs_and_says_what_is_missing(pages):
    for name, text in pages.items():
        page = Page(text)
        outside = [(key, value) for key, value in page.attributes
                   if key in ('src', 'href', 'srcset', 'action', 'data', 'poster', 'style') and not value.startswith('data:')]
        assert not outside and not re.search(r'https?:|//\w+\.\w|url\(|@import', re.sub(r'<[^>]*http-equiv[^>]*>', '', text)), name
        assert not {'iframe', 'object', 'embed', 'form', 'base'} & set(page.tags)
        assert "default-src 'none'" in dict(page.attributes).get('content', '') or "default-src 'none'" in text
        writes = name not in ('t2l', 'latent')
        assert bool(page.data('unmasking-data')['found']) == writes, name
        missing = page.text.count('Not shown:')
        assert missing == {'both': 0, 'l2t': 2, 't2l': 4, 'text': 3, 'gidd': 3, 'latent': 4}[name], (name, page.text)


def test_the_scrubber_has_the_ids_and_probabilities_of_the_sampler(runs, pages, dataset):
    run = load_run(str(runs['both']))
    texts, tokens, raw = report.load_texts(run, str(dataset), report.N_LATENTS, 'random', 0)
    data = Page(pages['both']).data('unmasking-data')
    assert [one['title'] for one in data['found']] == [f'{i}, {way}' for i in (1, 2, 3) for way in ('diffusion (confidence)', 'autoregressive')]
    for number, (way, sampler) in enumerate((('diffusion (confidence)', 'confidence'), ('autoregressive', 'autoregressive'))):
        states = []
        written = directions.l2t(run, run.stats.standardise(raw[:3]), sampler=sampler, steps=run.L, on_step=lambda x, *said: states.append(x.clone()))
        for row in range(3):
            one = data['found'][2 * row + number]
            start, *steps = one['steps']
            assert [step['ids'] for step in one['steps']] == [state[row].tolist() for state in states]
            assert start['ids'] == [run.text.mask_id] * run.L and start['masked'] == list(range(run.L)) and not start['said']
            assert steps[-1]['ids'] == written[row].tolist() and one['source'] == texts[row]
            for before, step in zip([start, *steps], steps):
                assert step['new'] == [i for i in range(run.L) if step['ids'][i] != before['ids'][i]]
                for i in step['new']:
                    if str(i) in step['said'] and step['ids'][i] != run.tokenizer.pad:   # PAD follows an EOS by rule
                        said = step['said'][str(i)]
                        likeliest = [token for token, p in said if p == said[0][1]]          # several, where they are equal
                        assert step['ids'][i] in likeliest and said[0][1] == pytest.approx(step['p'][i], abs=2e-4), 'both are greedy here'
                        assert said == sorted(said, key=lambda pair: -pair[1]) and sum(p for _, p in said) <= 1.001
                        assert all(str(token) in data['names'] for token, _ in said)


def test_of_a_long_writing_several_steps_are_shown_as_one():
    n = 2 * report.MOST_STEPS + 1                                        # from left to right, a token a step
    frames = []
    for k in range(n + 1):
        place = torch.arange(n)[None]
        frames.append(Frame(torch.where(place < k, ord('a') + place % 26, BYTES.vocab_size), torch.where(place < k, .5, torch.nan),
                            place == k - 1, place < 0, place == k - 1, (ord('a') + place % 26)[..., None], torch.full((1, n, 1), .5), k))
    groups = report.grouped(frames)
    steps = [report.step_of(BYTES, group, 0, BYTES.vocab_size) for group in groups]
    assert len(steps) <= report.MOST_STEPS + 1 and steps[0]['masked'] == list(range(n)) and steps[-1]['ids'] == frames[-1].tokens[0].tolist()
    assert [i for step in steps for i in step['new']] == list(range(n)), 'each token is new in one step'
    assert all(sorted(step['said']) == step['new'] for step in steps)
    assert report.grouped(frames[:10]) == [[frame] for frame in frames[:10]]


def test_samples_of_text_alone_are_drawn_and_their_probabilities_stand_beside_them(pages):
    found = Page(pages['text']).data('unmasking-data')['found']
    assert len(found) == 3 and found[0]['source'] == '' and found[0]['title'] == '1, diffusion (confidence)'
    for one in found:
        for before, step in zip(one['steps'], one['steps'][1:]):
            assert sorted(map(int, step['said'])) == before['masked'], 'every mask was asked about'
        assert one['steps'][-1]['masked'] == []


def test_tables_show_the_evaluated_numbers_and_there_is_a_picture_of_each_chart(runs, pages):
    page = Page(pages['both'])
    assert page.tags.count('img') == 2, 'losses, and the sweep'
    for word in ('3.250', '± 0.125', '6.500', 'shuffled', 'nelbo of 20 texts'):
        assert word in page.text, word
    assert 'perplexity' not in page.text, 'it has no error of its own'
    assert 'step 2' in page.text and 'step 4' in page.text, 'a text of each checkpoint'


def test_points_land_where_they_lie_and_equal_ones_are_drawn():
    page = Page(report.scatter(torch.tensor([[0., 0], [2, 1], [1, 3]]), torch.tensor([[0., 0]]), ['x', 'y']))
    x, y = ([float(value) for key, value in page.attributes if key == name] for name in ('cx', 'cy'))
    assert x == [10, 10, 350, 180] and y[0] == y[1] == 210 and y[3] == 10
    assert 'nan' not in report.scatter(torch.ones(3, 2), None, ['x', 'y'])


def test_the_axes_are_the_principal_ones():
    x = torch.randn(500, 6) * torch.tensor([1., 5., .1, 3., .1, .1]) + 7
    mean, axes, shares = report.principal_axes(x)
    assert axes[1, 0] > .99 and axes[3, 1] > .99 and shares == pytest.approx([25 / 35, 9 / 35], abs=.06)
    assert torch.allclose(mean, x.mean(0))


def test_a_hostile_text_is_text(runs, monkeypatch):
    """ In a caption, in what the network writes, in a token, in a knob, in a metric. """
    load_texts = report.load_texts

    def hostile_texts(*args):
        texts, tokens, raw = load_texts(*args)
        return [HOSTILE] * len(texts), tokens, raw
    monkeypatch.setattr(report, 'load_texts', hostile_texts)
    load = report.load_run

    def hostile_run(*args, **kw):
        run = load(*args, **kw)
        run.tokenizer.pieces = [HOSTILE.encode()] * len(run.tokenizer.pieces)
        return run
    monkeypatch.setattr(report, 'load_run', hostile_run)
    folder = runs['l2t']
    (folder / 'results.json').write_text(json.dumps({f'{HOSTILE}'.replace('/', '') + '/a': 1., f'{HOSTILE}'.replace('/', '') + '/a_se': 1.}))
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | {'argv': [HOSTILE]}))
    try:
        text = report.page(str(folder))
    finally:
        (folder / 'results.json').unlink()
        (folder / 'config.json').write_text(json.dumps(config))
    page = Page(text)
    assert len(page.scripts) == 3 and text.count('<script') == 3 and '<img src=x' not in text
    data, says = page.data('unmasking-data'), page.data('says-data')
    assert data['found'][0]['source'] == HOSTILE and all('alert(1)' in name for name in data['names'].values() if name not in ('EOS', 'PAD'))
    assert 'alert(1)' in says[0]['text'] and 'alert(1)' in page.text


def test_a_folder_without_a_checkpoint_has_a_page_and_one_without_a_run_has_none(runs, tmp_path):
    folder = tmp_path / 'young'
    folder.mkdir()
    for name in ('config.json', 'training_log.jsonl'):
        shutil.copy(runs['l2t'] / name, folder)
    (code, out, err), (nothing, _, error), (_, _, unwritable) = run_each(
        ['plot.py', f'--out_dir={folder}', '--what=report'], ['plot.py', f'--out_dir={tmp_path}/nope', '--what=report'],
        ['plot.py', f'--out_dir={folder}', '--what=report', f'--save={tmp_path}/no/a.html'])
    assert code == 0 and 'written to' in out, err
    page = Page((folder / 'report.html').read_text())
    assert 'img' in page.tags and 'no checkpoint' in page.text and page.data('says-data') == []
    assert nothing == 2 and error.startswith('error: ') and 'train it first' in error and error.count('\n') == 1
    assert unwritable.startswith('error: ') and 'No such file' in unwritable


EVENTS = [['step', 'input', '0'], ['cells', 2, None], ['cells', 'keydown', 'ArrowRight'], ['step', 'input', '3'], ['step', 'input', '999'],
          ['which', 'change', '1'], ['latents', 2, None]]


@pytest.mark.skipif(not NODE, reason='needs node, to run the script of the page')
def test_the_scrubber_shows_the_state_of_its_step_and_what_the_network_says_there(pages):
    page = Page(pages['both'])
    scripts = {attributes.get('id', ''): text for attributes, text in page.scripts}
    data, says = page.data('unmasking-data'), page.data('says-data')
    last = len(data['found'][0]['steps']) - 1
    events = [[name, what, str(last) if value == '999' else value] for name, what, value in EVENTS]
    given = dict(unmasking=scripts['unmasking-data'], says=scripts['says-data'], script=scripts[''], events=events)
    result = subprocess.run([NODE, str(ROOT / 'tests/dom.js')], input=json.dumps(given),
                            capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and not result.stderr, result.stderr
    start, pointed, moved, later, end, other, latent = json.loads(result.stdout)
    steps = data['found'][0]['steps']

    def best(k, i):
        return data['names'][str(steps[k]['said'][str(i)][0][0])]
    assert start['at'] == f'step 0 of {last}' and all(start['masked']) and len(start['masked']) == len(steps[0]['ids'])
    assert start['cells'] == [best(1, i) or ' ' for i in range(len(start['cells']))], 'of a mask, the likeliest token'
    assert 'Position 3, a mask' in pointed['candidates'] and best(1, 2) in pointed['candidates']
    assert 'Position 4, a mask' in moved['candidates'], 'the arrow key goes to the next'
    assert [i for i, masked in enumerate(later['masked']) if masked] == steps[3]['masked']
    assert not any(end['masked']) and end['cells'] == [text or ' ' for text in steps[-1]['text']]
    written_in = next(k for k, step in enumerate(steps) if 3 in step['new'])
    p = 100 * steps[written_in]['said']['3'][0][1]
    assert 'Position 4, “' in end['candidates'] and f'{p:.1f} %' in end['candidates'], 'of a token, what was said when it was written'
    assert other['at'].endswith(f'of {len(data["found"][1]["steps"]) - 1}') and says[2]['text'] in latent['says']


DRIVE = """
<script>
var broken = [];
addEventListener('securitypolicyviolation', function (event) { broken.push('csp ' + event.blockedURI); });
var slider = document.getElementById('step');
slider.value = 3;
slider.dispatchEvent(new Event('input'));
document.getElementById('cells').children[2].dispatchEvent(new Event('pointerover', {bubbles: true}));
setTimeout(function () {
  var asked = performance.getEntriesByType('resource').map(function (entry) { return entry.name; });
  var wide = document.documentElement.scrollWidth > innerWidth;
  document.title = JSON.stringify({asked: asked, broken: broken, wide: wide});
}, 200);
</script>
</body>"""


@pytest.mark.skipif(not BROWSER, reason='needs a browser: chromium, chromium-browser or google-chrome')
@pytest.mark.parametrize('size', ['360,800', '1600,900'])
def test_in_a_browser_the_page_opens_the_scrubber_moves_and_nothing_is_asked_for(pages, tmp_path, size):
    path = tmp_path / 'page.html'
    path.write_text(pages['both'].replace('</body>', DRIVE))
    result = subprocess.run([BROWSER, '--headless', '--no-sandbox', '--disable-gpu', f'--user-data-dir={tmp_path}/profile',
                             '--enable-logging=stderr', f'--window-size={size}', '--virtual-time-budget=3000', '--dump-dom',
                             path.as_uri()], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and 'CONSOLE' not in result.stderr, result.stderr
    title = re.search(r'<title>(.*?)</title>', result.stdout, re.DOTALL)[1].replace('&quot;', '"')
    assert json.loads(title) == dict(asked=[], broken=[], wide=False)
    assert '>step 3 of ' in result.stdout and 'Position 3, ' in result.stdout
