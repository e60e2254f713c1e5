""" The page that draws and names: its JavaScript, in node, computes what the network in Python
computes, and a browser shows it. """
import base64
import json
import math
import os
import re
import shutil
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from corpora.images import to_patches, to_pixels
from corpora.tokenizers import load_tokenizer
from data import LatentStats
from diffusion import GaussianLatents
from launch import HANGS, ROOT, assert_refused, flags, run_together
from model import Model, ModelConfig
from sampling import try_page
from sampling.knobs import SamplingKnobs
from sampling.latents import make_latents
from sampling.texts import blank, write
from toys import net_of, toy_run

NODE = pytest.mark.skipif(not shutil.which('node'), reason='needs node, to run the page\'s script')
L, SIDE, PATCH = 9, 8, 2
MODE = 'unconditional+t2l+causal'

# ---- a run of pictures with random weights, and the page's script in node


def picture_run(mode=MODE, channels=1, process=None, tokenizer='byte', **shape):
    """ A run whose heads and gates are random, too. """
    tokenizer = load_tokenizer(tokenizer)
    D = PATCH * PATCH * channels
    shape = dict(latent_dim=D, n_latents=(SIDE // PATCH) ** 2, latent_tokens=1, depth=2, heads=2,
                 width=24, latent_width=18, spatial=True, bag=True, parts=True, text_clock=False,
                 shift=True) | shape
    model = Model(ModelConfig(vocab_size=tokenizer.vocab_size, seq_len=L, **shape)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(.15 * torch.randn(p.shape))

    # a pixel that is the same in all pictures is dead
    std = .5 + torch.rand(D)
    std[1] = 0
    stats = LatentStats(.3 * torch.randn(D), std)
    net = net_of(model, mode, eos=tokenizer.eos, pad=tokenizer.pad)
    net.latent = GaussianLatents(stats.live, **process or {})
    source = dict(image_size=SIDE, patch=PATCH, channels=channels)
    return toy_run(net, tokenizer=tokenizer, stats=stats, config=dict(mode=mode),
                   meta=dict(source=source), folder='nowhere')


def dequantised(model, weights):
    """ {name: tensor} as the page has them. """
    floats = np.frombuffer(base64.b64decode(weights['floats']), np.float32)
    numbers = np.frombuffer(base64.b64decode(weights['bytes']), np.int8).astype(np.float32)
    found = {}
    for name, shape in weights['shapes'].items():
        vector, floats = np.split(floats, [shape[0]])
        if len(shape) == 2:
            matrix, numbers = np.split(numbers, [math.prod(shape)])
            vector = matrix.reshape(shape) * vector[:, None]
        found[name] = torch.from_numpy(vector.copy())
    assert not len(floats) and not len(numbers)

    # there the grid is a part of the positions
    found['latent_pos_emb'] -= model.grid.repeat_interleave(model.config.latent_tokens, 0)
    return found


def given_to_page(run):
    """ What the page has of a run, which from here on has the page's weights. """
    given = try_page.as_dict(run)
    model = run.net.model
    model.load_state_dict(dequantised(model, given['weights']))
    return given


HARNESS = """{
  const {script, run, code, data} = JSON.parse(require('fs').readFileSync(0, 'utf8'));
  const vm = require('vm');
  global.onmessage = global.postMessage = null;
  vm.runInThisContext(script);
  vm.runInThisContext('start')(run);
  Promise.resolve(vm.runInThisContext(code)(data)).then((found) => {
    const asList = (key, value) => ArrayBuffer.isView(value) ? Array.from(value) : value;
    require('fs').writeFileSync(1, JSON.stringify(found, asList));
  });
}"""


def in_node(given, code, data=None, script=None):
    """ What a function of the page's script gives for some data. """
    script = script or (ROOT / 'sampling/try.js').read_text()
    wish = json.dumps(dict(script=script, run=given, code=code, data=data))
    result = subprocess.run(['node', '-e', HARNESS], input=wish, capture_output=True, text=True,
                            timeout=HANGS)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return json.loads(result.stdout)


def as_lists(*tensors):
    return [tensor.tolist() for tensor in tensors]


def assert_close(found, expected):
    found = torch.tensor(found).view(expected.shape)
    assert (found - expected).abs().max() < 1e-4 * max(1, expected.abs().max())


# ---- the network

SHAPES = [dict(), dict(bag=False), dict(text_clock=True, latent_tokens=2, heads=3),
          dict(channels=3, mlp_ratio=1.5, depth=1, latent_width=None)]


@NODE
@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('is_causal', [False, True])
def test_logits_and_latents_are_those_of_the_network_in_python(shape, is_causal):
    run = picture_run(**shape)
    given = given_to_page(run)
    c = run.net.model.config
    B = 3
    x = torch.randint(0, c.vocab_size + 1, (B, L))
    z = torch.randn(B, c.n_latents, c.latent_dim)
    t_text, t_latent = torch.rand(2, B)
    with torch.no_grad():
        logits, found = run.net.model(x, z, t_text, t_latent, n_causal=B * is_causal)
    assert logits.std() > .1 and found.std() > .1
    code = '''([x, z, tText, tLatent, isCausal]) =>
        network.forward(x, Float32Array.from(z), tText, tLatent, isCausal)'''
    data = [*as_lists(x, z.flatten(), t_text, t_latent), is_causal]
    for one, expected in zip(in_node(given, code, data), (logits, found), strict=True):
        assert_close(one, expected)


def test_a_weight_is_off_by_half_a_step_of_its_row_at_most():
    run = picture_run()
    model = run.net.model
    with torch.no_grad():
        model.embed.weight[3] = 0
    found = dequantised(model, try_page.weights_of(model))
    assert found.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        step = 0 * weight
        if weight.ndim == 2:
            step = weight.abs().amax(1, keepdim=True) / 127
        if name == 'latent_pos_emb':
            step = step + 1 / 127                            # the grid has sines
        assert ((found[name] - weight).abs() <= .501 * step).all(), name


# ---- drawing

SOLVE = '''([x, z]) => Array.from(solve(x, Float32Array.from(z)), ({t, clean}) => [t, clean])'''


@NODE
@pytest.mark.parametrize('guidance, process', [
    (3, {}), (1, {}), (2, dict(schedule='rf', target='flow')), (3, dict(target='x0')),
    (1.5, dict(target='eps')), (3, dict(target='rest'))])
def test_all_steps_from_the_same_noise_think_the_same_clean(monkeypatch, guidance, process):
    run = picture_run(process=process, text_clock=True)
    given = given_to_page(run)
    given['latent']['guidance'] = guidance
    c = run.net.model.config
    x = run.pack(['ab', 'heart', ''])
    noise = torch.randn(3, c.n_latents, c.latent_dim)
    monkeypatch.setattr(run.net, 'nothing', lambda *args: noise * run.net.latent.live)
    expected = []
    z = make_latents(run.net, x, 3, SamplingKnobs(guidance=guidance), on_step=expected.append)
    assert len(expected) == 9, 'the noise, and eight steps'

    *found, (t, last) = in_node(given, SOLVE, as_lists(x, noise.flatten()))
    times = [t for t, _ in found]
    assert times[0] == pytest.approx(1, abs=.002) and times == sorted(times, reverse=True)
    assert t == 0 and len(times) == 8
    for (_, clean), one in zip(found, expected[1:], strict=True):
        assert_close(clean, one)
    assert_close(last, z)


@NODE
@pytest.mark.parametrize('channels', [1, 3])
def test_latents_are_shown_as_the_pixels_of_python_and_read_back(channels):
    run = picture_run(channels=channels)
    c = run.net.model.config
    z = torch.randn(c.n_latents, c.latent_dim)
    expected = to_pixels(run.stats.destandardise(z)[None].numpy(), PATCH, channels)[0]
    pixels, again = in_node(try_page.as_dict(run), '''(z) => {
        const pixels = pixelsOf(Float32Array.from(z));
        return [pixels, latentsOf(pixels)];
    }''', z.flatten().tolist())
    pixels = np.array(pixels).reshape(SIDE, SIDE, 4)
    assert abs(pixels[..., :3] - expected.astype(float)).max() <= 1
    assert (pixels[..., 3] == 255).all()
    raw = to_patches(pixels[..., :channels].astype(np.float32) / 127.5 - 1, PATCH)
    assert_close(again, run.stats.standardise(raw))


@NODE
def test_the_noise_of_a_seed_is_normal_and_of_another_seed_other():
    code = '(n) => [normals(n, 1), normals(n, 2), normals(n, 1)]'
    one, other, again = in_node(try_page.as_dict(picture_run()), code, 20_000)
    assert one == again and abs(np.corrcoef(one, other)[0, 1]) < .03
    for z in (np.array(one), np.array(other)):
        assert abs(z.mean()) < .03 and abs(z.std() - 1) < .03 and abs((z ** 4).mean() - 3) < .3
        assert abs(np.corrcoef(z[1:], z[:-1])[0, 1]) < .03


# ---- names

def likeliest(run, z):
    """ (text, [probability of each token]) that is written greedily from a latent (N, D). """
    net = run.net
    said = []

    def on_step(tokens, logits=None, positions=None):
        if logits is not None:
            said.append(logits.softmax(-1).max().item())
    knobs = SamplingKnobs(sampler='autoregressive', temperature=0.0)
    tokens = write(net, *blank(net, 1, knobs), z[None], knobs, on_step=on_step)
    return run.decode(tokens)[0], said


@NODE
def test_a_picture_is_named_as_the_greedy_decoder_names_it():
    run = picture_run()
    head = run.net.model.text_head.weight.detach()
    head[128:256] = 0                                        # names of ASCII letters,
    head[256] *= 3                                           # which may end,
    head[257] = 2 * head[256]                                # and then PAD would be likelier
    given = given_to_page(run)
    texts = set()
    for seed in range(4):
        pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 1)).repeat(4, 2)
        raw = to_patches(pixels[..., :1].astype(np.float32) / 127.5 - 1, PATCH)
        text, said = likeliest(run, run.stats.standardise(raw))
        found = in_node(given, '(pixels) => [...naming({pixels})]', pixels.flatten().tolist())
        assert found[-1]['text'] == text
        assert [one['likely'][0][1] for one in found] == [pytest.approx(p, abs=1e-4) for p in said]
        assert [one['isFirst'] for one in found] == [True] + [False] * (len(found) - 1)
        texts.add(text)
    assert len(texts) > 1 and min(map(len, texts)) < L, 'some end'


@pytest.fixture(scope='module')
def icons():
    """ The tokenizer of weights/icons, and what the page has of it. """
    folder = str(ROOT / 'weights/icons/data')
    tokenizer = load_tokenizer(folder)
    return tokenizer, try_page.tokenizer_of(SimpleNamespace(tokenizer=tokenizer, folder=folder))


@NODE
def test_names_have_the_ids_of_the_tokenizer_in_python(icons):
    tokenizer, given = icons
    lines = (ROOT / 'corpora/icons.tsv').read_text().splitlines()[::60]
    texts = [line.replace('\t', ': ') for line in lines] + [line.split('\t')[1] for line in lines]
    assert len(texts) > 400
    texts += ['', ' ', 'Heart', "it's we'll  two   spaces ",
              'a\tb\n\nc \u0085d\ufeff e\u00a0f\x1cg',
              '12 hearts, 3½ ⅔', 'straße ΝΑΙ наука 心脏 ❤️ 👩‍👩‍👧 e\u0301', 'heart' * 120,
              '-' * 300, '"<b>&\\']
    run = try_page.as_dict(picture_run()) | dict(tokenizer=given)
    code = '(texts) => texts.map((text) => [encode(text), decode(encode(text))])'
    for text, (ids, again) in zip(texts, in_node(run, code, texts), strict=True):
        assert ids == tokenizer.encode(text), text
        assert again == text


@NODE
def test_a_name_is_packed_as_in_python_and_one_that_is_too_long_is_refused():
    run = picture_run()
    given = try_page.as_dict(run)
    for text in ('', 'heart', 'eight ch'):
        assert in_node(given, 'pack', text) == run.pack([text])[0].tolist()
    code = '''async (text) => {
        const said = [];
        postMessage = (message) => said.push(message);
        await onmessage({data: {task: 'draw', job: 7, text, seed: 1}});
        return said;
    }'''
    said, = in_node(given, code, 'nine char')
    assert said == dict(job=7, error='This name has 9 tokens. The network reads at most 8.')
    with pytest.raises(ValueError, match='9 tokens'):
        run.pack(['nine char'])


# ---- the page

def scripts_of(page):
    """ (what a worker runs, the run). """
    script = re.search(r'<script type="text/plain" id="network">(.*?)</script>', page, re.DOTALL)
    run = re.search(r'id="run">(.*?)</script>', page, re.DOTALL)
    return script[1], json.loads(run[1])


@NODE
def test_the_page_of_weights_icons_draws_a_heart_and_reads_it(here):
    """ By the messages of the page. The later wish ends the earlier one. """
    (code, out, err), = run_together(['plot.py', *flags(out_dir='weights/icons', what='try')],
                                     cwd=here)
    assert code == 0 and not err and 'written to ./try.html' in out
    page = (here / 'try.html').read_text()
    rest = re.sub(r'<[^>]*http-equiv[^>]*>', '', page)
    assert not re.search(r'https?:|//\w+\.\w|url\(|@import|src="(?!data)', rest)
    assert "default-src 'none'" in page and '{{' not in page and 'written by nanoLDLM' in page
    assert len(page) < 1.5 * 5.3e6, 'a byte a number, as base64'

    script, given = scripts_of(page)
    given['latent']['schedule'] = given['latent']['schedule'][::2]       # half of the time
    found = in_node(given, '''async () => {
        const said = [];
        postMessage = (message) => said.push(message);
        const dropped = onmessage({data: {task: 'draw', job: 1, text: 'a bell', seed: 1}});
        await onmessage({data: {task: 'draw', job: 2, text: 'heart', seed: 1}});
        await dropped;
        const pixels = said[said.length - 1].clean;
        await onmessage({data: {task: 'name', job: 3, pixels}});
        return said;
    }''', script=script)
    assert [one['job'] for one in found].count(1) == 1
    drawn = [one for one in found if one['job'] == 2]
    assert [one['t'] for one in drawn] == [1, .75, .5, .25, 0]
    assert drawn[-1]['now'] == drawn[-1]['clean'] != drawn[-2]['now']
    ink = 255 - np.array(drawn[-1]['clean']).reshape(32, 32, 4)[..., 0]
    assert ink.max() > 225 and .05 < (ink > 127).mean() < .5, 'strokes, no fog'
    assert found[-1]['job'] == 3 and 'heart' in found[-1]['text'], found[-1]


def test_the_page_in_docs_is_that_of_today_and_small():
    page = (ROOT / 'docs/try.html').read_text()
    assert len(page) < 3e6
    is_of_today = try_page.renewed(page) == page
    assert is_of_today, 'call sampling.try_page.renew("docs/try.html")'


def test_a_page_of_earlier_gets_the_frame_and_the_script_of_today(tmp_path):
    path = tmp_path / 'try.html'
    today = (ROOT / 'docs/try.html').read_text()
    path.write_text(today.replace('<h1>', '<h2>').replace("'use strict';", ''))
    assert path.read_text() != today
    try_page.renew(path)
    assert path.read_text() == today


def test_a_page_says_whose_the_icons_are_that_come_along():
    meta = dict(source=dict(input=['icons']),
                splits=dict(train=dict(documents=26_106), val=dict(documents=1_350)))
    about, names = try_page.learned_from(meta)
    assert 'from 13,053 icons with 162 names, of 145 sets of Iconify' in about
    assert len(names) == 162 and {'heart', 'arrow left'} < set(names) and 'heart fill' not in names
    page = (ROOT / 'docs/try.html').read_text()
    assert about in page
    assert json.loads(re.search(r'NAMES = (.*?);', page)[1]) == names

    # a folder of one's own has the same name, and pictures of other files another one
    meta['splits']['val']['documents'] = 12
    assert try_page.learned_from(meta) == ('', [])
    assert try_page.learned_from(picture_run().meta) == ('', [])


@pytest.mark.parametrize('changes', [
    dict(mode='t2l'), dict(mode='l2t+causal'), dict(spatial=False), dict(tokenizer='smiles'),
    dict(shortcut=True)])
def test_a_run_that_cannot_draw_and_name_pictures_has_no_page(changes):
    run = picture_run(**changes)
    with pytest.raises(ValueError, match='out/toy has spatial=.*the page needs pictures'):
        try_page.check(run)
    try_page.check(picture_run())


def test_a_run_without_pictures_is_refused_in_one_line(here):
    captions, nowhere = run_together(
        ['plot.py', *flags(out_dir='weights/captions', what='try')],
        ['plot.py', *flags(out_dir='./nowhere', what='try')], cwd=here)
    assert_refused(captions, 'weights/captions was not trained on images')
    assert_refused(nowhere, 'nowhere', 'train it first')
    assert not os.path.exists('try.html')


# ---- in a browser

CHROMES = ('chromium', 'chromium-browser', 'chromium-headless-shell', 'google-chrome', 'chrome')
CHROME = next(filter(None, map(shutil.which, CHROMES)), None)


class Browser:
    """ A page in headless Chromium, driven over a pipe: messages of JSON that end with a 0. """

    def __init__(self, folder, address):
        to_read, self.write_to = os.pipe()
        self.read_from, to_write = os.pipe()

        # Chromium reads from 3 and writes to 4
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self.process = subprocess.Popen(
            ['bash', '-c', shell, '', CHROME, '--headless', '--no-sandbox', '--disable-gpu',
             '--remote-debugging-pipe', f'--user-data-dir={folder}'],
            pass_fds=[to_read, to_write], stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.unread = b''
        self.said = []                                     # what the page logs, and asks for
        self.session = {}
        page = self.ask('Target.createTarget', url='about:blank')['targetId']
        session = self.ask('Target.attachToTarget', targetId=page, flatten=True)['sessionId']
        self.session = dict(sessionId=session)
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.ask(f'{domain}.enable')
        self.ask('Page.navigate', url=address)

    def ask(self, method, **params):
        wish = dict(id=1, method=method, params=params) | self.session
        os.write(self.write_to, json.dumps(wish).encode() + b'\0')
        while True:
            while b'\0' not in self.unread:
                more = os.read(self.read_from, 2**16)
                assert more, 'the browser has ended'
                self.unread += more
            answer, self.unread = self.unread.split(b'\0', 1)
            answer = json.loads(answer)
            if 'id' in answer:
                assert 'result' in answer, answer
                return answer['result']
            self.said.append(answer)

    def value(self, expression):
        return self.ask('Runtime.evaluate', expression=expression,
                        returnByValue=True)['result'].get('value')

    def until(self, expression):
        """ Its value, once that is true. """
        end = time.monotonic() + HANGS
        while not (found := self.value(expression)):
            assert time.monotonic() < end, (expression, self.said)
            time.sleep(.05)
        return found

    def mouse(self, kind, x, y):
        self.ask('Input.dispatchMouseEvent', type=f'mouse{kind}', x=x, y=y, button='left',
                 buttons=int(kind != 'Released'), clickCount=1)


@pytest.fixture
def browser(tmp_path, monkeypatch):
    """ The page of a small run, in a browser. """
    run = picture_run()
    run.checkpoint = 'step-00000001'
    monkeypatch.setattr(try_page, 'Run', lambda *args, **more: run)
    monkeypatch.setattr(try_page, 'learned_from', lambda meta: ('', ['heart', 'star', 'eye']))
    (tmp_path / 'try.html').write_text(try_page.page('toy'))
    browser = Browser(tmp_path / 'profile', f'file://{tmp_path}/try.html')
    yield browser
    browser.process.kill()
    browser.process.wait()
    os.close(browser.write_to)
    os.close(browser.read_from)


PICTURES = '''[...document.querySelectorAll('canvas.now')].map((canvas) =>
    Array.from(canvas.getContext('2d').getImageData(0, 0, 8, 8).data).join())'''
ALL_CLEAN = "[...document.querySelectorAll('.drawing')].every((one) => one.dataset.clock === '0')"


@pytest.mark.skipif(not CHROME, reason='needs Chromium, to open the page')
def test_a_browser_draws_what_is_typed_and_names_what_is_drawn(browser):
    browser.until(f"document.readyState === 'complete' && {ALL_CLEAN}")
    first = browser.value(PICTURES)
    assert len(set(first)) == 3, 'three drawings, all different'

    # type, and draw
    browser.value("document.getElementById('text').select()")
    browser.ask('Input.insertText', text='A Star')
    browser.value("document.querySelector('form button').click()")
    browser.until(f'{PICTURES}.join() !== {json.dumps(",".join(first))} && {ALL_CLEAN}')
    drawn = browser.value(PICTURES)
    assert len({*first, *drawn}) == 6 and browser.value('text') == 'a star'
    unknown = "document.getElementById('unknown').textContent"
    assert browser.value(unknown) == ''
    names = ['heart', 'a heart', 'an eye', 'mdi: star fill', 'hearts', 'ant', 'dog: a dog']
    known = [True, True, True, True, False, False, False]
    assert browser.value(f'{json.dumps(names)}.map(isKnown)') == known
    browser.value("document.querySelectorAll('.another')[1].click()")
    browser.until(f'{PICTURES}[1] !== {json.dumps(drawn[1])} && {ALL_CLEAN}')
    assert browser.value(PICTURES)[::2] == drawn[::2]

    # a name that is too long, and then another
    browser.value("document.getElementById('text').value = 'much too long'")
    browser.value("document.querySelector('form button').click()")
    browser.until("document.getElementById('wrong').textContent.includes('13 tokens')")
    assert 'not one of the 3 names' in browser.value(unknown)
    browser.value("document.querySelector('#examples button').click()")
    browser.until(f"!document.getElementById('wrong').textContent && {ALL_CLEAN}")

    # a line on paper
    browser.value("document.getElementById('to-name').click()")
    x, y, width = browser.value('''(() => {
        const box = document.getElementById('paper').getBoundingClientRect();
        return [box.left, box.top, box.width];
    })()''')
    for kind, at in (('Pressed', .25), ('Moved', .5), ('Released', .5)):
        browser.mouse(kind, x + at * width, y + at * width)
    n_tokens = "document.querySelectorAll('.token').length"
    browser.until(f'{n_tokens} === {L}')
    ink = 255 - np.array(browser.value('Array.from(seen())')).reshape(8, 8, 4)
    assert not ink[..., 3].any() and (ink[..., 0] == ink[..., 2]).all()
    ink = ink[..., 0]
    assert abs(ink - ink.T).max() < 16, 'a line from left above to the middle'
    assert ink[2, 2] == ink[3, 3] == 255 and not ink[6:].any()
    assert ((ink > 60) & (ink < 200)).any(), 'its edge is grey'
    browser.value("document.getElementById('clear').click()")
    assert browser.value(n_tokens) == 0 and browser.value('seen().every((value) => value === 255)')

    # nothing went wrong, and nobody was asked
    wrong = [one for one in browser.said if one['method'] == 'Runtime.exceptionThrown'
             or one['params'].get('entry', {}).get('level') == 'error']
    assert not wrong
    asked = [one['params']['request']['url'] for one in browser.said
             if one['method'] == 'Network.requestWillBeSent']
    assert asked and all(url.startswith(('file:', 'blob:', 'data:')) for url in asked)
