""" Pictures and their names in the two streams: every step between a file of pixels and a file of
pixels, and what the task image measures. """
import base64
import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
from corpora import icons
from corpora.icons import Icon
from corpora.images import image_patches, to_patches, to_pixels
from data import PackedDataset
from launch import ROOT, TINY, flags, measured, prepared, run_together, texts_of
from runs.results import read_results
from sampling.run import Run
from tasks import image, judge
from tasks.common import Context
from tasks.judge import Classes, Judge, parse, train_judge

SETS = dict(ash=255, elm=190, fir=130, oak=80, yew=230)      # the ink of each
SHAPES = dict(square=lambda y, x, r: np.maximum(abs(y), abs(x)) <= r,
              cross=lambda y, x, r: (abs(y) == abs(x)) & (abs(x) <= r),
              line=lambda y, x, r: (abs(y) < 1) & (abs(x) <= r))


def drawings(n=12):
    """ Icons of 8 x 8 pixels: five sets draw six names, n times each. One has a second name. """
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:8, :8]
    found = []
    for name_of_set, ink in SETS.items():
        for shape, inside in SHAPES.items():
            for size, radius in (('big', 3), ('small', 1)):
                for _ in range(n):
                    cy, cx = rng.integers(3, 5, 2)
                    picture = ink * inside(y - cy, x - cx, radius) + rng.integers(0, 20, (8, 8))
                    bytes_ = picture.clip(0, 255).astype(np.uint8).tobytes()
                    found.append(Icon(name_of_set, (size, shape), bytes_))
    return found + [Icon(name_of_set, ('little', 'square'), ink)
                    for name_of_set, name, ink in found if name == ('small', 'square')]


def make_small(put):
    """ These icons in place of Iconify's, and a judge that learns from few. put: setattr, or that
    of monkeypatch. """
    put(icons, 'icons_of', lambda paths, size, counts: drawings())
    put(icons, 'N_SETS', 1)
    put(icons, 'SET_SIZE', range(1, 999))
    put(icons, 'HELD_OUT', .2)
    put(judge, 'STEPS', 150)
    put(judge, 'MANY', 3)
    put(judge, 'MANY_WORDS', 40)


BEFORE = f"""
import sys
sys.path += [{str(ROOT / 'tests')!r}, {str(ROOT / 'tests/tasks')!r}]
import test_image
test_image.make_small(setattr)
"""
PREPARE = flags(input='./sets.json', image_size=8, patch=4, vocab_size=300)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """ The icons prepared, a tiny model trained on them, and what the command line says about it:
    a folder, and {name: stdout}. """
    pytest.importorskip('PIL', reason='reads and writes images: pip install pillow')
    pytest.importorskip('matplotlib', reason='draws: pip install matplotlib')
    folder = tmp_path_factory.mktemp('image')
    (folder / 'sets.json').write_text('{}')
    config = ROOT / 'config/icons.py'
    here = flags(out_dir='./run', dtype='float32', device='cpu')
    sample = ['sample.py', *here, '--latent_steps=2']
    commands = dict(
        prepare=['prepare.py', config, *PREPARE, '--out=./data'],
        train=['train.py', config, *flags(dataset='./data', out_dir='./run'), *TINY,
               *flags(latent_tokens=1, latent_width=32)],
        draw=[*sample, *flags(mode='t2l', text='ash: big square', save='one.npy', png='one.png')],
        sheet=[*sample, *flags(mode='latent', num_samples=5, png='five.png')],
        moving=[*sample, *flags(mode='t2l', text='a big square', num_samples=10, sample_batch=3,
                                svg='ten.svg', png='ten.png')],
        joint=[*sample, *flags(mode='unconditional', png='joint.png', steps=2)],
        half=[*sample, *flags(mode='complete', image='one.png', box='4,0,8,8', text='a big square',
                              png='half.png')],
        read=[*sample[:-1], *flags(mode='l2t', image='one.png')],
        again=[*sample[:-1], *flags(mode='l2t', latents='one.npy')],
        fill=[*sample[:-1], *flags(mode='infill', image='one.png', text='a [MASK] square')],
        evaluate=['evaluate.py', *here,
                  *flags(tasks='nelbo,image', n=30, show=66, steps=2, draws=2, latent_steps=2)],
        sweep=['evaluate.py', *here, *flags(tasks='image', n=30, sweep='guidance=0,1')],
        plot=['plot.py', *flags(out_dir='./run', what='images')])
    results = run_together(*commands.values(), cwd=folder, before=BEFORE)
    for name, (code, _, err) in zip(commands, results):
        assert code == 0, (name, err)
    return folder, {name: out for name, (_, out, _) in zip(commands, results)}


@pytest.fixture(scope='module')
def run(made):
    return Run(str(made[0] / 'run'), device='cpu', dtype='float32')


def context(made, n, **knobs):
    """ What the task gets of n texts. """
    knobs = {name: knob.default for name, knob in evaluate.KNOBS.items()} | knobs
    return Context(knobs | dict(latent_steps=2, steps=2), str(made[0] / 'data'),
                   texts=['a text'] * n, prepared={})


class Pictures:
    """ Stands for a split of such pictures (n, S, S, C), cut into patches of 4 x 4. """
    folder = 'data/mine'

    def __init__(self, pictures):
        scaled = pictures / np.float32(127.5) - 1
        self.raw = torch.from_numpy(np.stack([to_patches(one, 4) for one in scaled]))

    def __len__(self):
        return len(self.raw)

    def raw_latents(self, rows):
        return self.raw[rows]


def run_of_pictures(size=8, channels=1):
    source = dict(image_size=size, patch=4, channels=channels)
    return SimpleNamespace(net=SimpleNamespace(device=torch.device('cpu')),
                           meta=dict(source=source))


def flat(*greys):
    """ A picture of each grey, (n, 8, 8, 1). """
    return np.array(greys, np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2)


# ---- patches and files

def test_patches_are_the_pixels_row_by_row_and_back():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3), np.uint8)
    scaled = pixels / np.float32(127.5) - 1
    patches = np.stack([to_patches(image, 4) for image in scaled])
    assert patches.shape == (5, 9, 48)
    assert np.array_equal(patches[2, 5].reshape(4, 4, 3), scaled[2, 4:8, 8:])
    assert np.array_equal(to_pixels(patches.astype(np.float16), 4, 3), pixels), 'as stored'
    assert to_pixels(np.array([[[-3.]], [[3.]]], np.float32), 1, 1).ravel().tolist() == [0, 255]


def test_a_pixel_that_never_changes_is_dead_and_comes_back(tmp_path, monkeypatch):
    make_small(monkeypatch.setattr)
    with_edge = [one._replace(ink=bytes(8) + one.ink[8:]) for one in drawings(4)]
    monkeypatch.setattr(icons, 'icons_of', lambda *args: with_edge)
    icons.drawn.cache_clear()
    (tmp_path / 'sets.json').write_text('{}')
    out = prepared(input=tmp_path / 'sets.json', image_size=8, patch=8, channels=1, encoder='none',
                   tokenizer='byte', out=tmp_path / 'data')
    icons.drawn.cache_clear()
    train = PackedDataset(out, 'train')
    stats, raw = train.stats, train.raw_latents(np.arange(4))
    is_dead = stats.live == 0
    assert train.latent_shape == (1, 64) and is_dead.tolist() == [True] * 8 + [False] * 56
    assert torch.allclose(stats.destandardise(stats.standardise(raw)), raw, atol=.01)
    drawn = stats.destandardise(torch.ones(2, 1, 64))
    assert (drawn[..., is_dead] > .99).all(), 'an edge without ink comes back as paper'


def test_a_picture_is_drawn_as_its_latent_says_and_read_back_the_same(made):
    pil = pytest.importorskip('PIL.Image')
    folder, outputs = made
    pixels = to_pixels(np.load(folder / 'one.npy'), 4, 1)
    picture = np.asarray(pil.open(folder / 'one.png'))
    assert np.array_equal(picture, pixels[0, :, :, 0].repeat(16, 0).repeat(16, 1))
    read = image_patches(str(folder / 'one.png'), 8, 4, 1)
    assert np.array_equal(to_pixels(read[None], 4, 1), pixels)
    five = np.asarray(pil.open(folder / 'five.png'))
    assert five.shape == (2 * 132 - 4, 3 * 132 - 4), 'five in three columns'
    half = np.asarray(pil.open(folder / 'half.png'))
    assert np.array_equal(half[:, :64], picture[:, :64]), 'the half that was given'
    assert not np.array_equal(half[:, 64:], picture[:, 64:])

    (read,), (again,), (filled,) = ([line for line in outputs[name].splitlines() if '->' in line]
                                    for name in ('read', 'again', 'fill'))
    assert read == again, 'as from the latent itself'
    assert 'a ' in filled and ' square' in filled


def test_an_animated_picture_begins_with_noise_and_ends_with_the_first_eight_drawings(made):
    pil = pytest.importorskip('PIL.Image')
    folder, _ = made
    frames = re.findall('href="data:image/png;base64,([^"]+)"', (folder / 'ten.svg').read_text())
    frames = [np.asarray(pil.open(io.BytesIO(base64.b64decode(frame)))) for frame in frames]
    assert len(frames) == 3, 'noise, and what is thought clean at two calls'
    assert {frame.shape for frame in frames} == {(64, 8 * 68 - 4)}
    assert not np.array_equal(frames[0], frames[1])

    # a sheet of 4 columns at twice the size
    sheet = np.asarray(pil.open(folder / 'ten.png'))
    for i in range(8):
        y, x = 132 * (i // 4), 132 * (i % 4)
        assert np.array_equal(frames[-1][:, 68 * i:68 * i + 64],
                              sheet[y:y + 128:2, x:x + 128:2])


def test_pictures_may_have_validation_pictures_of_their_own(tmp_path):
    pil = pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')
    for name, greys in (('mine', (10, 90, 170)), ('theirs', (30, 110))):
        folder = tmp_path / name
        folder.mkdir()
        lines = ['file_name,text']
        for grey in greys:
            pil.new('L', (8, 8), grey).save(folder / f'{grey}.png')
            lines.append(f'{grey}.png,a grey picture')
        (folder / 'metadata.csv').write_text('\n'.join(lines))
    out = prepared(input=tmp_path / 'mine', val_input=tmp_path / 'theirs', image_size=8, patch=4,
                   channels=1, encoder='none', tokenizer='byte', out=tmp_path / 'data')
    greys = {}
    for split in ('train', 'val'):
        data = PackedDataset(out, split)
        raw = data.raw_latents(np.arange(len(data))).numpy()
        greys[split] = sorted(np.unique(to_pixels(raw, 4, 1)).tolist())
    assert greys == dict(train=[10, 90, 170], val=[30, 110])


# ---- the judge

def test_a_caption_may_name_a_set_and_its_article_goes():
    assert parse('tabler: clipboard heart') == ('tabler', ('clipboard', 'heart'))
    assert parse('a heart') == parse('Heart!') == ('', ('heart',))
    assert parse('x: a') == ('x', ('a',)) and parse('x: two: one') == ('x', ('two', 'one'))
    assert parse('a sign: stop') == ('', ('sign', 'stop')), 'a set is one word'
    assert parse('...') == ('', ())


def test_a_class_is_what_many_captions_say(monkeypatch):
    monkeypatch.setattr(judge, 'MANY', 2)
    monkeypatch.setattr(judge, 'MANY_WORDS', 4)
    captions = ['a: big heart', 'b: big heart filled', 'big big heart', 'a: heart', 'a: star',
                'a star', 'big star', '...', '...', '...', 'big', 'big heart']
    classes = Classes(captions)
    assert classes.names == {('big', 'heart'): 0, ('star',): 1}, 'in any style; twice is another'
    assert classes.words == dict(big=0, heart=1) and classes.sets == {}
    classes = Classes([*captions, 'a: moon'])
    assert classes.sets == dict(a=0)
    assert classes.names == {('big', 'heart'): 0}, 'where there are sets, of two of them'
    name, of_set, has_word = classes.of(['a: the big heart', 'big heart filled', 'c: star', '...'])
    assert name.tolist() == [-1, 0, -1, -1] and of_set.tolist() == [0, -1, -1, -1]
    assert has_word.int().tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize('size, channels', [(8, 1), (64, 3), (4, 3)])
def test_a_judge_learns_what_pictures_show_and_leaves_the_random_numbers_alone(
        size, channels, monkeypatch):
    monkeypatch.setattr(judge, 'STEPS', 20)
    monkeypatch.setattr(judge, 'MANY', 1)
    monkeypatch.setattr(judge, 'MANY_WORDS', 30)
    rng = np.random.default_rng(0)
    is_bright = np.arange(60) % 2
    pictures = (rng.integers(0, 60, (60, size, size, channels))
                + 150 * is_bright[:, None, None, None]).astype(np.uint8)
    captions = [('sun: day', 'moon: night')[1 - one] for one in is_bright]
    before = torch.random.get_rng_state()
    found = train_judge(run_of_pictures(size, channels), Pictures(pictures), captions, 0)
    assert torch.equal(before, torch.random.get_rng_state())

    name, of_set, has_word = found.classes.of(captions)
    seen_name, seen_set, seen_words = found.of(pictures)
    assert torch.equal(seen_name, name) and torch.equal(seen_set, of_set)
    assert torch.equal(seen_words, has_word), 'of two words the likelier one'
    assert found.features(pictures).shape == (60, 1, judge.FEATURES)


def test_pictures_whose_captions_have_hardly_a_word_in_common_have_no_judge(monkeypatch):
    monkeypatch.setattr(judge, 'STEPS', 1)
    captions = [f'picture{i}' for i in range(50)]
    with pytest.raises(ValueError, match='data/mine: no word is in the captions of 100 training'):
        train_judge(run_of_pictures(), Pictures(flat(*range(50))), captions, 0)


def test_without_names_or_sets_that_many_have_words_alone_are_judged():
    classes = Classes([f'dog {i}' for i in range(judge.MANY_WORDS)])
    blind = Judge(1, classes).eval()
    found = image.judged(blind, flat(0, 9), ['a dog', 'a cat'])
    assert set(found) == {'words'} and found['words'][1].tolist() == [1, 0]
    assert image.judged(blind, flat(0, 9), ['...', 'a cat']) == {}
    assert len(blind.features(flat(0, 9)[:, :1, :1])) == 2, 'of one pixel'


def test_of_what_the_judge_knows_it_counts_what_it_sees(monkeypatch):
    monkeypatch.setattr(judge, 'MANY', 1)
    classes = Classes(['a: big heart'] * 100 + ['b: star'] * 100)
    says = (torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1]),
            torch.tensor([[True, False, True], [True, True, False], [False, False, True]]))
    oracle = SimpleNamespace(classes=classes, of=lambda pictures: says)
    found = image.judged(oracle, None, ['b: big heart', 'heart', 'b: star'])
    assert list(classes.words) == ['big', 'heart', 'star'] and len(classes.names) == 2
    assert found['named'].tolist() == [100, 0], 'of big heart and star; heart alone is no class'
    assert found['style'].tolist() == [0, 100]
    hits, sizes = found['words']
    assert hits.tolist() == [100, 100, 100] and sizes.tolist() == [2, 1, 1]


# ---- the training pictures

def trained_on(monkeypatch, captions, pictures):
    """ A Training of these pictures. """
    data = Pictures(pictures)
    monkeypatch.setattr(image, 'open_split', lambda *args: data)
    monkeypatch.setattr(image, 'train_texts', lambda *args: captions)
    train = image.Training(run_of_pictures(), '', 0)
    train.judge = SimpleNamespace(
        features=lambda pictures: torch.from_numpy(pictures).float().mean((1, 2, 3))[:, None, None])
    return train


def test_the_nearest_name_has_the_highest_f1_of_words(monkeypatch):
    captions = ['a: big heart', 'heart', 'a: star', 'big red star', 'b: big heart', 'big heart']
    train = trained_on(monkeypatch, captions, flat(*range(6)))
    nearest = {name: ' '.join(train.nearest_name(tuple(name.split())))
               for name in ('big heart', 'heart beat', 'red big', 'moon', '')}
    assert nearest == {'big heart': 'big heart', 'heart beat': 'heart', 'red big': 'big red star',
                       'moon': 'big heart', '': 'big heart'}

    # rows that name their set, where some do
    assert {*train.some_rows(('big', 'heart'), 2)} == {0, 4}
    assert train.some_rows(('heart',), 1) == [1] and train.some_rows(('heart',), 2) is None


def test_the_near_set_is_that_whose_pictures_look_most_alike(monkeypatch):
    captions = ['a: heart', 'b: heart', 'c: heart', 'd: star', 'heart', 'd: moon']
    train = trained_on(monkeypatch, captions, flat(0, 90, 200, 100, 101, 140))
    assert train.row_of_near_set(('heart',), 'd') == 1, '120 is nearer to 90 than to 200'
    assert train.row_of_near_set(('star',), 'a') == 3
    assert train.row_of_near_set(('heart',), 'new') is None
    assert train.row_of_near_set(('sun',), 'a') is None


def test_the_nearest_picture_is_found_block_by_block_also_by_a_part(monkeypatch):
    monkeypatch.setattr(image, 'BLOCK', 40)
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (90, 8, 8, 1), np.uint8)
    train = trained_on(monkeypatch, ['x'] * 90, pictures)
    asked = rng.integers(0, 256, (30, 8, 8, 1), np.uint8)
    asked[4] = pictures[9]
    far, rows = train.nearest(Pictures(asked).raw)
    by_hand = np.array([image.distance(one[None].repeat(90, 0), pictures) for one in asked])
    assert rows.tolist() == by_hand.argmin(1).tolist()
    assert np.allclose(far, by_hand.min(1), atol=1e-3) and rows[4] == 9
    far, rows = train.nearest(Pictures(pictures).raw)
    assert rows.tolist() == [*range(90)] and (far == 0).all()

    given = torch.tensor([True, False, False, False])        # the first patch
    far, rows = train.nearest(Pictures(asked).raw, given)
    by_hand = [image.distance(one[None, :4, :4].repeat(90, 0), pictures[:, :4, :4])
               for one in asked]
    assert rows.tolist() == np.argmin(by_hand, 1).tolist()
    assert np.allclose(far, np.min(by_hand, 1), atol=1e-3)


def test_distances_are_root_mean_squares_of_grey_levels():
    assert image.distance(flat(0, 200), flat(30, 190)).tolist() == [30, 10]
    half = flat(0)
    half[:, :4] = 40
    assert image.distance(half, flat(0)).tolist() == pytest.approx([40 / 2 ** .5])


def test_the_right_half_is_regressed_on_the_left_one():
    rng = np.random.default_rng(0)
    raw, regressed = torch.from_numpy(rng.standard_normal((2, 30, 9, 2)).astype(np.float32))
    halves = image.Halves(raw, regressed)
    columns = halves.given.view(3, 3)
    assert columns.tolist() == [[True, False, False]] * 3, 'of three columns one'
    left, right = (x.numpy() for x in halves.split(raw - regressed))
    A = np.concatenate([left, np.eye(6)])
    M = np.linalg.lstsq(A, np.concatenate([right, np.zeros((6, 12))]), rcond=None)[0]
    assert np.allclose(halves.M, M, atol=1e-4)
    found = halves.regressed(raw, regressed)
    assert torch.equal(found[:, halves.given], raw[:, halves.given])
    expected = left @ M + halves.split(regressed)[1].numpy()
    assert np.allclose(halves.split(found)[1], expected, atol=1e-4)

    a, b = np.zeros((2, 1, 12, 12, 1), np.uint8)
    b[:, :, :4] = 99
    assert halves.distance(a, b) == 0, 'the left four of twelve columns do not count'
    b[:, :, 4:8] = 7
    assert halves.distance(a, b) == pytest.approx(7 / 2 ** .5), 'half of the other eight'


# ---- the parts

def test_parts_are_pairs_with_their_sets_and_known_names_without(made, run, monkeypatch):
    make_small(monkeypatch.setattr)
    monkeypatch.setattr(judge, 'STEPS', 2)
    folder, _ = made
    ctx = context(made, 10)
    train, parts = image.known(run, ctx)
    assert image.known(run, ctx) == (train, parts), 'once'
    assert [*parts] == ['val', 'pairs', 'sets', 'shared']
    assert all(parts['pairs'].sets) and not any(parts['shared'].sets)
    known = {parse(text)[1] for text in train.captions}
    assert not known & {*parts['val'].names} and known >= {*parts['shared'].names}
    names, _, _ = train.judge.classes.of(parts['shared'].texts)
    assert (names >= 0).all()
    of_val = texts_of(folder / 'data', 'val')
    assert not {*parts['shared'].texts} & {*of_val}, 'whose names are new'

    # texts and pictures belong together
    for name in ('val', 'pairs', 'sets'):
        data = PackedDataset(folder / 'data', name)
        raw = data.raw_latents(np.arange(len(data)))
        for text, z in zip(parts[name].texts, parts[name].raw):
            rows = [i for i in range(len(data)) if torch.equal(raw[i], z)]
            assert text in [run.tokenizer.decode(data.ids(i)) for i in rows]

    # each drawing comes twice in a split, and once in its part
    for part in parts.values():
        assert part.real.shape == (10, 8, 8, 1) and part.others.shape[1:] == (8, 8, 1)
        all_of_it = np.concatenate([part.real, part.others])
        assert len(np.unique(all_of_it, axis=0)) == len(all_of_it)
    assert 20 < len(parts['val'].others) + 10 <= len(of_val) / 2


def test_a_part_of_one_picture_is_left_out_and_one_that_is_measured_whole_has_no_floor(
        made, run, monkeypatch, capsys):
    make_small(monkeypatch.setattr)
    monkeypatch.setattr(judge, 'STEPS', 2)
    monkeypatch.setattr(image, 'parse', lambda text: ('', ('big', 'square')))
    _, parts = image.known(run, context(made, 500))
    assert [*parts] == ['val', 'sets', 'shared'], 'no row of pairs names a set'
    assert len(parts['val'].others) == 0 and 'a smaller --n' in capsys.readouterr().err
    assert image.described(None, parts['val'].real, parts['val'].others) == {}


@pytest.mark.parametrize('learned, expected, n', [
    ({'l2t'}, {'val_exact', 'pairs_any', 'sets_f1', 'val_n', 'pairs_others'}, 100),
    ({'t2l'}, {'val_words', 'pairs_distance', 'shared_variety'}, 2),
    ({'complete'}, {'half_distance'}, 2)])
def test_a_run_is_measured_in_what_it_has_learned(made, run, learned, expected, n, monkeypatch):
    make_small(monkeypatch.setattr)
    monkeypatch.setattr(judge, 'STEPS', 2)
    monkeypatch.setattr(run.net, 'learned', learned)
    monkeypatch.setattr(run.net, 'is_causal', False)
    monkeypatch.setattr(run.net, 'fills_masks', True)
    if learned == {'l2t'}:
        monkeypatch.setattr(image, 'train_judge', None)    # nobody asks for it
    ctx = context(made, n)
    figures = image.measure(run, ctx)
    found = {metric for control, metric in figures if control == ''}
    assert expected <= found
    assert figures['', 'val_n'][0] == min(n, 48), 'pictures, of 96 captions'
    kinds = dict(l2t='exact', t2l='nearest', complete='half')
    others = {kind for mode, kind in kinds.items() if mode not in learned}
    assert not {metric for metric in found if set(metric.split('_')) & others}
    assert ('lead', 'half_distance') not in figures, 'it cannot draw alone'


# ---- all of it

def test_the_image_task_has_every_figure_beside_its_controls(made):
    folder, outputs = made
    found = {name.removeprefix('image/'): value
             for name, value in measured(folder / 'run').items() if name.startswith('image/')}
    drawn = ('', 'real/', 'shuffled/', 'null/', 'ridge/', 'mean/', 'copy/')
    for control in drawn:
        assert {f'{control}{name}' for name in (
            'val_words', 'val_style', 'val_frechet', 'val_precision', 'val_coverage', 'pairs_named',
            'pairs_style', 'shared_named', 'shared_frechet')} <= {*found}, control
    for part in ('val', 'pairs', 'sets'):
        for control in ('', 'shuffled/', 'diffusion/', 'nearest/', 'lead/'):
            assert {f'{control}{part}_{name}' for name in ('exact', 'any', 'f1')} <= {*found}
    for control in ('', 'alone/', 'ridge/', 'nearest/'):
        assert {f'{control}half_named', f'{control}half_distance'} <= {*found}
    assert {'both_words', 'text_first/both_words', 'lead/half_distance'} <= {*found}

    # real pictures and copies are named; ours, nearly untrained, as often as ridge regression's,
    # with which their bag begins
    assert found['real/shared_named'] > 80 and found['copy/shared_named'] > 90
    assert found['near_set/pairs_named'] > 90
    assert max(found['null/shared_named'], found['shuffled/shared_named']) < 35
    assert found['shared_named'] > 45 and found['ridge/shared_named'] > 45
    assert found['real/val_style'] > found['val_style'] + 20
    assert found['real/val_frechet'] < .5 * found['val_frechet']
    assert found['val_frechet'] < .5 * found['null/val_frechet']
    assert found['real/val_precision'] > 60 > found['val_precision']

    # they are not near; the captions of pairs are those of other training pictures
    assert found['ridge/pairs_distance'] < found['pairs_distance']
    for metric in ('pairs_distance', 'pairs_named', 'pairs_style'):
        assert found[f'lead/{metric}'] == pytest.approx(
            found[metric] - found[f'near_set/{metric}']), metric
    assert found['real/pairs_nearest'] < found['pairs_nearest']
    assert found['nearest/pairs_any'] > 40 and found['nearest/val_exact'] == 0
    assert found['lead/pairs_f1'] == pytest.approx(found['pairs_f1'] - found['nearest/pairs_f1'])
    assert found['lead/half_distance'] == pytest.approx(
        found['half_distance'] - found['alone/half_distance'])
    assert found['nearest/sets_any'] > found['nearest/sets_exact'] + 2, 'one of its two names'
    assert found['ridge/half_distance'] < found['nearest/half_distance']
    assert found['nearest/half_distance'] < found['alone/half_distance']
    assert found['shared_variety'] > 0 and found['real/shared_variety'] > 0


def test_the_first_pictures_of_each_kind_are_kept_and_drawn(made):
    folder, outputs = made
    with np.load(folder / 'run/images.npz') as file:
        arrays = dict(file)
    for name in ('val', 'pairs', 'shared', 'half', 'both'):
        texts, pictures = arrays[f'{name}_texts'], arrays[f'{name}_made']
        assert len(texts) == len(pictures) == 30
        assert pictures.shape[1:] == (8, 8, 1) and pictures.dtype == np.uint8
    assert np.array_equal(arrays['half_given'][:, :, :4], arrays['half_real'][:, :, :4])
    assert np.array_equal(arrays['half_made'][:, :, :4], arrays['half_real'][:, :, :4])
    assert (arrays['half_given'][:, :, 4:] == 128).all()
    is_same = (arrays['val_shuffled'] == arrays['val_made']).all((1, 2, 3))
    assert not is_same.any() and not np.array_equal(arrays['val_null'], arrays['val_made'])
    assert {one.tobytes() for one in arrays['val_shuffled']} == {
        one.tobytes() for one in arrays['val_made']}

    # what is shown is of the part that it was written for
    lines = outputs['evaluate'].split('image: n 30')[0].splitlines()
    shown = [line.strip() for line in lines if line.startswith('   ')]
    assert shown[-66:] == [*arrays['val_texts'], *arrays['pairs_texts'], *arrays['sets_texts'][:6]]
    assert (folder / 'run/images.png').stat().st_size > 20_000

    # a sweep is of the part shared
    records = read_results(folder / 'run/results.json')
    points = {(one['point']['guidance'], one['metric']): one['value']
              for one in records if one['point']}
    assert {metric for _, metric in points} >= {'named', 'words', 'frechet', 'calls'}
    assert points[0.0, 'calls'] == points[1.0, 'calls'] == 8
