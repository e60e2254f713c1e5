"""
Icons and their names, from Iconify's JSON (github.com/iconify/icon-sets, or npm's @iconify-json):
one name is drawn by many designers, and one drawing has several names.

    json/tabler.json     {"prefix": "tabler", "info": {...}, "icons": {"heart": {"body": "<path"}}}

Each drawing becomes two documents: "tabler: heart", and "heart" or "a heart". What is left out is
counted by its reason: sets of other licences or of many colours, names that are not one to five
words of the letters a to z, drawings that are broken, empty or full.

Held out are splits of their own, and no drawing is in two of them:
    sets     some whole sets
    val      names whose words are all known, each from other names
    pairs    pairs of a set and a name, each of which is known from others
"""
import glob
import hashlib
import itertools
import math
import os
import re
import sys
from collections import Counter, defaultdict
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from base.console import progress_bar
from base.files import read_json
from base.writing import write_whole
from corpora.images import to_patches
from corpora.readers import Document
from corpora.svg import Painter

LICENCES = ('MIT', 'Apache-2.0', 'ISC', 'CC0-1.0', 'CC-BY-4.0', 'CC-BY-3.0')
MOST_BYTES = 2**27             # of a file; the largest set has 2**25
XMLNS = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
MOST_WORDS = 5                 # of a name
SIZES = {str(n) for n in (8, 10, 12, 14, 15, 16, 18, 20, 24, 28, 30, 32, 36, 40, 48, 64, 96, 128)}
STYLES = set('fill filled outline outlined line linear bold light thin fat solid duotone twotone '
             'sharp round rounded regular broken alt o'.split())
SHEET = os.path.join(os.path.dirname(os.path.realpath(__file__)), 'icons')
SHEET_SIZE = 32                # pixels a side of a drawing in it
EMPTY, FULL = 1, 250           # mean ink, 0 to 255: what has less or more is left out
HELD_OUT = .03                 # of the names, and of the pairs
N_SETS = 5                     # that are held out, of those with so many drawings:
SET_SIZE = range(150, 2000)


class Icon(NamedTuple):
    set: str                   # the prefix: tabler
    words: tuple               # of its name: ('clipboard', 'heart', 'filled')
    ink: bytes                 # size * size, 0 to 255

    @property
    def thing(self):
        return thing_of(self.words)


def thing_of(words):
    """ A name, a tuple of words, without those of style. """
    return tuple(word for word in words if word not in STYLES) or words


def words_of(name):
    """ ('arrow', 'left') of arrow-left-24; () where it has no words that can be read. """
    words = [word for word in re.split(r'[-_\s]+', name.lower()) if word and word not in SIZES]
    is_readable = all(re.fullmatch('[a-z0-9]+', word) for word in words)
    return tuple(words) if is_readable and re.search('[a-z]', name) else ()


def share(*names):
    """ A number in [0, 1) of these names, at random but always the same. """
    digest = hashlib.blake2b('\n'.join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') / 2**64

# -----------------------------------------------------------------------------
# Reading and drawing

def read_set(path):
    """ A set, and its info, such as its licence. npm has a file of its own for that. """
    found = read_json(path, limit=MOST_BYTES)
    info = found.get('info')
    beside = os.path.join(os.path.dirname(path), 'info.json')
    if not info and os.path.isfile(beside):
        info = read_json(beside)
    return found, info if isinstance(info, dict) else {}


def drawings_of(found, size, counts):
    """ (name, SVG, turns) of each icon and alias of a set. turns: how often it is mirrored from
    left to right, mirrored from top to bottom, and turned by 90 degrees. """
    icons = found['icons']
    aliases = found.get('aliases')
    aliases = aliases if isinstance(aliases, dict) else {}
    for name in [*icons, *aliases]:
        try:
            icon, turns = icon_of(name, icons, aliases)
            if icon is None:
                counts['icons: an alias without its parent'] += 1
                continue
            body = icon['body'] + ''                         # it must be a text
            left, top, width, height = (
                float(icon.get(key, found.get(key, default)))
                for key, default in (('left', 0), ('top', 0), ('width', 16), ('height', 16)))
        except (TypeError, ValueError, AttributeError, KeyError):
            counts['icons: not as Iconify writes them'] += 1
            continue

        box = f'{left:g} {top:g} {width:g} {height:g}'
        head = f'<svg {XMLNS} width="{size}" height="{size}" viewBox="{box}">'
        yield name, f'{head}{body}</svg>', turns


def icon_of(name, icons, aliases):
    """ The icon that a name stands for, None where its last parent is missing; and how often it is
    turned on the way, as drawings_of has it. """
    turns = [0, 0, 0]
    seen = set()
    while name not in icons and name in aliases and name not in seen:
        seen.add(name)
        alias = aliases[name]
        for i, key in enumerate(('hFlip', 'vFlip', 'rotate')):
            turns[i] += int(alias.get(key) or 0)
        name = alias['parent']
    return icons.get(name), turns


def why_left_out(found, info):
    """ Why a set is not used; '' where it is. """
    licence = info.get('license')
    spdx = licence.get('spdx') if isinstance(licence, dict) else None
    if spdx not in LICENCES:
        return f'icons: licence {spdx or "unknown"}'
    if info.get('palette') is not False:
        return 'icons: of many colours'
    return ''


def turned(ink, size, turns):
    """ Ink, mirrored and turned as drawings_of says. """
    hflip, vflip, quarters = turns
    picture = np.frombuffer(ink, np.uint8).reshape(size, size)
    if hflip % 2:
        picture = picture[:, ::-1]
    if vflip % 2:
        picture = picture[::-1]
    return np.rot90(picture, -quarters).tobytes()


def icons_of_set(found, paint, counts):
    """ Draws the icons of a set, and yields each Icon; counts those that are left out. """
    seen = set()
    for name, svg, turns in drawings_of(found, paint.size, counts):
        words = words_of(name)
        if not 1 <= len(words) <= MOST_WORDS:
            counts['icons: a name of no or many words'] += 1
            continue

        # the drawing, or a word that says why there is none
        ink = paint(svg)
        if isinstance(ink, bytes):
            ink = turned(ink, paint.size, turns)
            mean = sum(ink) / len(ink)
            if mean < EMPTY:
                ink = 'empty'
            elif mean > FULL:
                ink = 'full'
            elif (words, ink) in seen:
                ink = 'the same twice'
        if isinstance(ink, str):
            counts[f'icons: {ink}'] += 1
            continue
        seen.add((words, ink))
        yield Icon(found['prefix'], words, ink)


def icons_of(paths, size, counts):
    """ Draws the icons of all sets: a list of Icons, in the order of the files. """
    icons = []
    with Painter(size) as paint, progress_bar(desc='drawing', unit=' icons') as bar:
        for path in paths:
            found, info = read_set(path)
            if not isinstance(found.get('icons'), dict) or not isinstance(found.get('prefix'), str):
                counts['passed over .json'] += 1
                continue
            reason = why_left_out(found, info)
            if reason:
                counts[reason] += len(found['icons'])
                continue
            for icon in icons_of_set(found, paint, counts):
                icons.append(icon)
                bar.update()
    return icons

# -----------------------------------------------------------------------------
# Holding out

def splits_of(icons):
    """ The split of each icon. All icons with one drawing go to the same. """
    # sets
    sizes = Counter(icon.set for icon in icons)
    sets = sorted((name for name, n in sizes.items() if n in SET_SIZE), key=share)[:N_SETS]

    # names: things of two words or more, as long as each word is left in another name
    things = sorted({icon.thing for icon in icons if icon.set not in sets})
    names_with = Counter(word for thing in things for word in set(thing))
    names = set()
    for thing in sorted(things, key=lambda thing: share(*thing))[:int(HELD_OUT * len(things))]:
        if len(thing) > 1 and all(names_with[word] > 1 for word in thing):
            names.add(thing)
            names_with.subtract(set(thing))

    # pairs: a thing that another set draws, too, with a drawing that stays
    icons_with = defaultdict(list)
    for icon in icons:
        if icon.set not in sets and icon.thing not in names:
            icons_with[icon.thing].append(icon)
    pairs = set()
    gone = set()                                             # drawings
    for thing, some in icons_with.items():
        for name in sorted({icon.set for icon in some}):
            drawings = {icon.ink for icon in some if icon.set == name}
            stays = any(icon.ink not in drawings | gone for icon in some)
            if stays and share(name, *thing) < HELD_OUT:
                pairs.add((name, thing))
                gone |= drawings

    # a drawing that two of them have goes to the first
    order = ('sets', 'val', 'pairs', 'train')
    of_drawing = {}
    for icon in icons:
        split = 'train'
        if icon.set in sets:
            split = 'sets'
        elif icon.thing in names:
            split = 'val'
        elif (icon.set, icon.thing) in pairs:
            split = 'pairs'
        found = of_drawing.get(icon.ink, 'train')
        of_drawing[icon.ink] = min(found, split, key=order.index)
    of_icon = [of_drawing[icon.ink] for icon in icons]

    # a name that lost its words, or a pair that lost its thing, in this way says nothing
    known = {icon.thing for icon, split in zip(icons, of_icon) if split == 'train'}
    words = {word for thing in known for word in thing}
    for i, icon in enumerate(icons):
        if of_icon[i] == 'val' and not words.issuperset(icon.thing):
            of_icon[i] = ''
        if of_icon[i] == 'pairs' and icon.thing not in known:
            of_icon[i] = ''
    return of_icon


def texts_of(icon):
    """ With the set's name, and without it: of these every second begins with an article. """
    name = ' '.join(icon.words)
    article = ''
    if share(icon.set, name) < .5:
        article = 'an ' if name[0] in 'aeiou' else 'a '
    return f'{icon.set}: {name}', article + name

# -----------------------------------------------------------------------------
# The source

@lru_cache(1)
def drawn(paths, size, shared_by):
    """ (icons, their splits, what was left out), drawn once in a process. """
    counts = Counter()
    icons = icons_of(paths, size, counts)
    if shared_by:
        n_all = len(icons)
        icons = shared(icons, shared_by)
        counts['icons: a name of few sets, or a drawing again'] += n_all - len(icons)
    splits = splits_of(icons)
    counts['icons: a name whose words are held out'] += splits.count('')
    kept = [i for i, split in enumerate(splits) if split]
    return [icons[i] for i in kept], [splits[i] for i in kept], +counts


def as_patches(ink, size, patch):
    """ Ink as latent vectors (N, D) float32: paper is 1, ink is -1, as in a grey picture. """
    grey = 1 - np.frombuffer(ink, np.uint8).reshape(size, size, 1) / np.float32(127.5)
    return to_patches(grey, patch)


def read_icons(paths, source, counts):
    """ Two documents of each icon, in the order of the files. No paths: of the sheet that comes
    along, whose drawings are held out by their hashes. """
    if paths:
        icons, splits, left_out = drawn(tuple(paths), source.image_size, source.shared_by)
        counts.update(left_out)
    else:
        icons = read_sheet(SHEET, SHEET_SIZE)
        splits = itertools.repeat('')
    for icon, split in zip(icons, splits):
        latent = partial(as_patches, icon.ink, source.image_size, source.patch)
        group = '' if split else icon.ink.hex()
        for text in texts_of(icon):
            yield Document(text, latent, group, split, place=f'{icon.set}: {" ".join(icon.words)}')

# -----------------------------------------------------------------------------
# A sheet: drawings in one picture, square by square, with 16 greys; and a line for each in a table.
# That which comes along was made by
#
#     python -m corpora.icons "icon-sets/json/*.json" corpora/icons

def write_sheet(icons, size, path):
    """ PATH.png, and PATH.tsv with the set and the name of each drawing, row by row. """
    from PIL import Image
    columns = math.ceil(math.sqrt(len(icons)))
    sheet = Image.new('L', (columns * size, -(-len(icons) // columns) * size))
    lines = []
    for i, icon in enumerate(icons):
        square = Image.frombytes('L', (size, size), icon.ink)
        sheet.paste(square, (i % columns * size, i // columns * size))
        lines.append(f'{icon.set}\t{" ".join(icon.words)}\n')

    # 16 greys, the nearest ones
    greys = sheet.point(lambda ink: (ink + 8) // 17)
    greys.putpalette([17 * grey for grey in range(16) for _ in 'RGB'])
    with write_whole(f'{path}.png', named=True) as f:
        greys.save(f, 'PNG', optimize=True, bits=4)
    with write_whole(f'{path}.tsv', named=True) as f:
        f.write(''.join(lines).encode())


def read_sheet(path, size):
    """ The Icons of PATH.png and PATH.tsv. """
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(f'{path}.png: to read icons: pip install pillow') from None
    sheet = np.asarray(Image.open(f'{path}.png').convert('L'))
    columns = sheet.shape[1] // size
    icons = []
    for i, line in enumerate(Path(f'{path}.tsv').read_text(encoding='utf-8').splitlines()):
        name_of_set, name = line.split('\t')
        y, x = i // columns * size, i % columns * size
        ink = sheet[y:y + size, x:x + size].tobytes()
        icons.append(Icon(name_of_set, tuple(name.split()), ink))
    return icons


def shared(icons, n_sets):
    """ The icons of the things that at least so many sets draw, each drawing once. """
    sets_with = defaultdict(set)
    for icon in icons:
        sets_with[icon.thing].add(icon.set)
    once = {}
    for icon in icons:
        if len(sets_with[icon.thing]) >= n_sets:
            once.setdefault(icon.ink, icon)
    return list(once.values())


if __name__ == '__main__':
    files, target = sys.argv[1:]
    found = icons_of(sorted(glob.glob(files)), SHEET_SIZE, Counter())
    write_sheet(shared(found, 40), SHEET_SIZE, target)
