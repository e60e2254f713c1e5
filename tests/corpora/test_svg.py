""" Drawings come from strangers: each becomes ink or a word, and none reads a file, hangs or fills
the memory. """
import os

import pytest

pytest.importorskip('resvg_py', reason='draws icons: pip install resvg-py')
pytest.importorskip('PIL', reason='draws icons: pip install pillow')

from corpora.svg import Painter

HEAD = ('<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        'width="32" height="32" viewBox="0 0 24 24">')
HALF = '<path d="M0 0h12v24H0z"/>'


def doubled(tag, inside, n=30):
    """ Each element uses the one before it twice: 2^n of them are drawn. """
    parts = [f'<g id="a0">{HALF}</g>']
    for i in range(n):
        parts.append(f'<{tag} id="a{i + 1}">{inside.format(i) * 2}</{tag}>')
    return ''.join(parts)


@pytest.fixture(scope='module')
def paint():
    with Painter(32) as painter:
        yield lambda body: painter(f'{HEAD}{body}</svg>')


def test_ink_is_where_the_drawing_is(paint):
    ink = paint(HALF)
    rows = [ink[i:i + 32] for i in range(0, 1024, 32)]
    assert rows == [b'\xff' * 16 + b'\0' * 16] * 32


COSTLY = {
    'use': doubled('g', '<use href="#a{0}"/>') + '<use href="#a30"/>',
    'mask': doubled('mask', '<g mask="url(#a{0})">' + HALF + '</g>') +
            f'<g mask="url(#a30)">{HALF}</g>',
    'pattern': '<pattern id="p" width="1000000" height="1000000" patternUnits="userSpaceOnUse">'
               '<path d="M0 0h1000000v1000000z"/></pattern><path fill="url(#p)" d="M0 0h24v24z"/>',
    'long': f'<path d="{"M0 0h1" * 30_000}"/>',
    'deep': '<g>' * 20_000 + '</g>' * 20_000,
}


@pytest.mark.parametrize('name', COSTLY)
def test_a_costly_drawing_is_left_out_and_the_next_one_is_drawn(paint, name):
    before = os.times().children_user
    assert paint(COSTLY[name]) in ('costly', 'broken')
    assert os.times().children_user - before < 10, 'seconds of the processor'
    assert sum(paint(HALF)) == 512 * 255


@pytest.mark.parametrize('side, is_drawn', [(4000, True), (8000, False)])
def test_a_drawing_has_at_most_300_mb(paint, side, is_drawn):
    # a tile of side * 4/3 pixels a side, of four bytes each: 114 and 455 MB
    tile = (f'<pattern id="p" width="{side}" height="{side}" patternUnits="userSpaceOnUse">'
            f'<path d="M0 0h{side}v{side}z"/></pattern>')
    found = paint(f'{tile}<path fill="url(#p)" d="M0 0h24v24h-24z"/>')
    assert isinstance(found, bytes) if is_drawn else found == 'costly'


@pytest.mark.parametrize('body', [
    '<image href="/etc/hostname"/>', '<x:image xmlns:x="http://www.w3.org/2000/svg" href="a.png"/>',
    '<use href="other.svg#a"/>', "<use xlink:href='http://127.0.0.1/a.svg#a'/>",
    '<filter id="f"><feImage href="a.png"/></filter>', '<style>@import "a.css";</style>',
    '<!DOCTYPE x [<!ENTITY y SYSTEM "file:///etc/hostname">]>'])
def test_what_names_a_file_or_an_address_is_not_drawn(paint, body):
    assert paint(body + HALF) == 'reaches out'


@pytest.mark.parametrize('body', ['<path d="M0 0', '</svg></svg>', '\0', '\ud800'])
def test_a_broken_drawing_is_a_word(paint, body):
    assert paint(body) == 'broken'


def test_letters_are_not_drawn_because_fonts_differ_between_machines(paint):
    assert not any(paint('<text y="20">heart</text>'))
