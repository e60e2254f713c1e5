""" Iconify's sets: what becomes a document, what is left out and counted, and what is held out. """
import json
from collections import Counter, defaultdict

import numpy as np
import pytest

from corpora import icons
from corpora.icons import Icon, icons_of, splits_of, words_of
from corpora.images import to_pixels
from data import PackedDataset, read_meta
from launch import prepared, run, source_of, texts_of

MIT = dict(license=dict(spdx='MIT'), palette=False)


def square(x, y=0):
    return dict(body=f'<path d="M{x} {y}h8v8h-8z"/>', width=16, height=16)


def write_set(folder, name='one', icons=None, **more):
    found = dict(prefix=name, info=MIT, icons=icons or dict(heart=square(0))) | more
    path = folder / f'{name}.json'
    path.write_text(json.dumps(found))
    return str(path)


def read(*paths, size=8):
    pytest.importorskip('resvg_py', reason='draws icons: pip install resvg-py')
    counts = Counter()
    return icons_of(paths, size, counts), dict(counts)


def test_words_of_a_name():
    assert words_of('arrow-left-24') == ('arrow', 'left')
    assert words_of('Clipboard_Heart-16-filled') == ('clipboard', 'heart', 'filled')
    assert words_of('number-7') == ('number', '7')
    assert words_of('24') == words_of('сердце') == words_of('a+b') == ()


def test_a_drawing_has_the_name_of_its_set_its_words_and_its_ink(tmp_path):
    found, counts = read(write_set(tmp_path, icons={'bell-ring-20': square(8)}))
    [icon] = found
    assert icon[:2] == ('one', ('bell', 'ring')) and counts == {}
    picture = np.frombuffer(icon.ink, np.uint8).reshape(8, 8)
    assert (picture[:4, 4:] == 255).all() and picture.sum() == 16 * 255


def test_an_alias_is_the_drawing_of_its_parent_perhaps_turned(tmp_path):
    aliases = dict(same=dict(parent='heart'), mirrored=dict(parent='same', hFlip=True),
                   turned=dict(parent='heart', rotate=1), lost=dict(parent='nobody'),
                   circle=dict(parent='circle'))
    found, counts = read(write_set(tmp_path, aliases=aliases))
    corners = {}
    for icon in found:
        picture = np.frombuffer(icon.ink, np.uint8).reshape(8, 8)
        corners[icon.words[0]] = [bool(picture[y, x]) for y in (0, 7) for x in (0, 7)]
    assert corners == dict(heart=[True, False, False, False], same=[True, False, False, False],
                           mirrored=[False, True, False, False], turned=[False, True, False, False])
    assert counts == {'icons: an alias without its parent': 2}


def test_what_is_left_out_is_counted_by_its_reason(tmp_path):
    long = '-'.join('abcdef')
    drawings = {'heart': square(0), 'heart-24': square(0), long: square(0), 'сердце': square(0),
                'empty': dict(body='<g/>'), 'full': dict(body='<path d="M0 0h16v16H0z"/>'),
                'bad': dict(body='<path'), 'far': dict(body='<image href="a.png"/>')}
    no_licence = write_set(tmp_path, 'none', info=dict(palette=False))
    closed = write_set(tmp_path, 'closed', info=dict(license=dict(spdx='GPL-3.0'), palette=False))
    colours = write_set(tmp_path, 'colours', info=MIT | dict(palette=True))
    other = tmp_path / 'other.json'
    other.write_text('{"name": "no set"}')
    others = no_licence, closed, colours, str(other)
    found, counts = read(write_set(tmp_path, icons=drawings), *others)
    assert [icon.words for icon in found] == [('heart',)]
    assert counts == {
        'icons: the same twice': 1, 'icons: a name of no or many words': 2, 'icons: empty': 1,
        'icons: full': 1, 'icons: broken': 1, 'icons: reaches out': 1,
        'icons: licence unknown': 1, 'icons: licence GPL-3.0': 1, 'icons: of many colours': 1,
        'passed over .json': 1}


@pytest.mark.parametrize('change', [
    dict(aliases={'h2': 'heart'}), dict(aliases={'h2': dict(parent=['heart'])}),
    dict(aliases={'h2': dict(parent='heart', rotate='90deg')}), dict(aliases={'h2': {}}),
    dict(icons=dict(heart=square(0), h2=dict(body=7))), dict(icons=dict(heart=square(0), h2='x')),
    dict(icons=dict(heart=square(0), h2=square(0) | dict(width='wide')))])
def test_an_icon_that_is_not_as_iconify_writes_them_is_counted(tmp_path, change):
    found, counts = read(write_set(tmp_path, **change))
    assert [icon.words for icon in found] == [('heart',)]
    assert counts == {'icons: not as Iconify writes them': 1}


def test_npm_has_the_licence_in_a_file_of_its_own(tmp_path):
    path = tmp_path / 'icons.json'
    path.write_text(json.dumps(dict(prefix='one', icons=dict(heart=square(0)))))
    (tmp_path / 'info.json').write_text(json.dumps(MIT))
    assert len(read(str(path))[0]) == 1


def many_icons():
    """ Three sets that draw 40 x 40 names of two words, each in its own way; some drawings are the
    same in two sets. """
    found = []
    for name in ('one', 'two', 'three'):
        for i in range(40):
            for j in range(40):
                ink = f'{i} {j}' if (i + j) % 9 == 0 else f'{name} {i} {j}'
                found.append(Icon(name, (f'w{i}', f'v{j}', 'filled'), ink.encode()))
    return found


def test_held_out_names_are_new_and_their_words_are_known(monkeypatch):
    monkeypatch.setattr(icons, 'N_SETS', 0)
    found = many_icons()
    in_split = defaultdict(set)
    for icon, split in zip(found, splits_of(found)):
        in_split[split].add(icon)
    names = {split: {icon.thing for icon in some} for split, some in in_split.items()}
    words = {word for name in names['train'] for word in name}
    assert 30 <= len(names['val']) <= 60
    assert not names['val'] & (names['train'] | names['pairs'])
    assert all(word in words for name in names['val'] for word in name)

    # a pair is new, its name and its set are not
    pairs = {split: {(icon.set, icon.thing) for icon in some} for split, some in in_split.items()}
    assert 100 <= len(pairs['pairs']) <= 300
    assert not pairs['pairs'] & pairs['train']
    assert all(name in names['train'] for _, name in pairs['pairs'])

    # no drawing is in two
    drawings = {split: {icon.ink for icon in some} for split, some in in_split.items()}
    assert sum(map(len, drawings.values())) == len({icon.ink for icon in found})


def test_a_held_out_drawing_is_not_trained_under_another_name_and_no_unknown_word_is_held_out(
        monkeypatch):
    monkeypatch.setattr(icons, 'N_SETS', 0)
    found = many_icons()
    found += [Icon('one', (f'unique{i}', 'w1'), f'unique {i}'.encode()) for i in range(300)]
    splits = splits_of(found)
    assert set(splits[-300:]) == {'train'}

    # one more name, for a drawing that is held out
    held = found[splits.index('val')]
    splits = splits_of([*found, Icon('three', ('w1', 'v1'), held.ink)])
    assert splits[found.index(held)] == splits[-1] == 'val'


def test_whole_sets_are_held_out(monkeypatch):
    monkeypatch.setattr(icons, 'N_SETS', 1)
    monkeypatch.setattr(icons, 'SET_SIZE', range(1600, 1700))
    found = many_icons()
    split_of = dict(zip(found, splits_of(found)))
    [held] = {icon.set for icon in found if all(split_of[other] == 'sets' for other in found
                                                if other.set == icon.set)}
    others = {split_of[icon] for icon in found if icon.set != held and icon.ink.count(b' ') == 2}
    assert others == {'train', 'val', 'pairs'}


def test_the_texts_of_a_drawing():
    heart = Icon('tabler', ('heart', 'filled'), b'')
    with_set, without = zip(*(icons.texts_of(heart._replace(set=f's{i}')) for i in range(200)))
    assert with_set[7] == 's7: heart filled'
    assert set(without) == {'heart filled', 'a heart filled'}
    assert 70 < without.count('heart filled') < 130
    assert 'an arrow' in {icons.texts_of(Icon(f's{i}', ('arrow',), b''))[1] for i in range(20)}


def test_prepared_icons_have_splits_that_are_held_out(tmp_path):
    pytest.importorskip('resvg_py', reason='draws icons: pip install resvg-py')
    # ten sets that draw 8 x 8 names, each a square at a place of its own; and a name of two sets
    for k in range(10):
        drawings = {f'w{i}-v{j}': dict(body=f'<path d="M{i} {j}h{k + 3}v{k + 4}z"/>')
                    for i in range(8) for j in range(8)}
        if k < 2:
            drawings['rare'] = square(k)
        write_set(tmp_path, f's{k}', drawings)
    (tmp_path / 'two').mkdir()
    out = f'{tmp_path}/two/data'
    result = run('prepare.py', f'--input={tmp_path}/*.json', '--image_size=8', '--patch=4',
                 '--channels=1', '--vocab_size=300', '--shard_size=300', '--shared_by=3',
                 f'--out={out}')
    assert result.returncode == 0, result.stderr

    # the texts of each split, and the same without the set's name and the article
    texts = {}
    for split in ('train', 'val', 'pairs'):
        assert PackedDataset(out, split).latent_shape == (4, 16)
        texts[split] = set(texts_of(out, split))
    bare = {split: {text.split(': ')[-1].removeprefix('a ') for text in some}
            for split, some in texts.items()}
    named = {split: {text for text in some if ': ' in text} for split, some in texts.items()}
    assert len(bare['val']) >= 1 and not bare['val'] & bare['train']
    assert bare['pairs'] <= bare['train'] and not named['pairs'] & named['train']
    assert not any('rare' in text for some in texts.values() for text in some)
    counts = read_meta(out)['counts']['input']
    assert counts['icons: a name of few sets, or a drawing again'] == 2
    assert sum(map(len, named.values())) == 640


def test_the_icons_that_come_along_are_read_without_resvg():
    pytest.importorskip('PIL', reason='reads icons: pip install pillow')
    source = source_of(input='icons', image_size=32, patch=4, channels=1)
    documents = list(icons.read_icons([], source, Counter()))
    assert len(documents) == 2 * 13_728 and len({doc.group for doc in documents}) == 13_724
    z = documents[0].latent()
    assert z.shape == (64, 16) and z.dtype == np.float32 and z.min() == -1 and z.max() == 1
    heart = next(doc for doc in documents if doc.text == 'tabler: heart')
    picture = to_pixels(heart.latent()[None], 4, 1)[0, ..., 0]
    assert picture[0, 0] == 255 and (picture < 128).mean() < .3


def test_a_set_without_a_name_to_hold_out_is_refused_in_one_line(tmp_path):
    path = write_set(tmp_path, icons={'heart': square(0), 'star': square(4)})
    pytest.importorskip('resvg_py', reason='draws icons: pip install resvg-py')
    knobs = dict(input=path, image_size=8, patch=4, channels=1, encoder='none', tokenizer='byte')
    with pytest.raises(ValueError, match='have no name of two words that can be held out'):
        prepared(out=tmp_path / 'out', **knobs)


def test_a_sheet_gives_back_names_and_drawings_in_16_greys(tmp_path):
    pytest.importorskip('PIL', reason='writes icons: pip install pillow')
    rng = np.random.default_rng(0)
    found = [Icon(f's{i}', ('w', str(i)), rng.integers(0, 256, 64, np.uint8).tobytes())
             for i in range(7)]
    icons.write_sheet(found, 8, tmp_path / 'sheet')
    for icon, again in zip(found, icons.read_sheet(tmp_path / 'sheet', 8), strict=True):
        before, after = (np.frombuffer(one.ink, np.uint8).astype(int) for one in (icon, again))
        assert again[:2] == icon[:2] and abs(before - after).max() <= 8


def test_shared_icons_are_of_things_that_many_sets_draw_each_drawing_once():
    heart = [Icon(f's{i}', ('heart', 'filled'), bytes([i // 2])) for i in range(4)]
    star = [Icon('s1', ('star',), b'7')]
    assert icons.shared(heart + star, n_sets=4) == heart[::2]
