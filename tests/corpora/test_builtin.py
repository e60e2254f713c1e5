""" The built-in corpus: of all that documentation holds, the whole sentences. """
import sysconfig

import pytest

from corpora import builtin
from toys import put

MODULE = """
'''Here are two sentences of one paragraph. Too short a one. And this is the second one!

    * A bullet stands before this sentence, which is longer
      than a line.
It has ``code in quotes`` and a `name`, both of them kept.

>>> "A paragraph with a doctest is not read, whatever it says."

    a   column   of a table, and after it there is a whole sentence of words.

:param x: This field of a signature is no prose for a reader.

a heading without a capital letter is not taken for one.

This sentence names aVariable, and so it is one of code.
This sentence has 1 2 3 numbers in it and is not of words.

Five words are just enough. Four words are not.
A text of as many words as this has at most is read here.
A text of one word more than it may have at most is left out.
Extraordinarily incomprehensible characteristics disproportionately overwhelm us everyday.
Extraordinarily incomprehensible characteristics disproportionately overwhelm all everyday.
The two words ABC and DEF stand here among twelve of the usual kind.
The two words ABC and DEF stand here among eleven of usual kind.
'''
import os

class Thing:
    ''' What a class says of itself is read. '''

    def method(self):
        ''' A method is read as a function is. '''
        def inside():
            ''' And what is defined inside of it is read. '''

if True:
    pass
else:
    def hidden():
        ''' What stands below an else is not read. '''

async def again():
    ''' What a class says of itself is read.

    What comes for the second time is left out. '''

TEXT = 'No other string of a module is documentation, however long it is.'
"""

EXPECTED = [
    'The files are read in the order of names.',
    'Here are two sentences of one paragraph.',
    'And this is the second one!',
    'A bullet stands before this sentence, which is longer than a line.',
    'It has "code in quotes" and a "name", both of them kept.',
    'Five words are just enough.',
    'A text of as many words as this has at most is read here.',
    'Extraordinarily incomprehensible characteristics disproportionately overwhelm us everyday.',
    'The two words ABC and DEF stand here among twelve of the usual kind.',
    'What a class says of itself is read.',
    'A method is read as a function is.',
    'And what is defined inside of it is read.',
    'What comes for the second time is left out.',
    'Of this file all strings are read.',
    'A package comes behind the library itself.',
]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """ A standard library and a package, of a few files. """
    monkeypatch.setattr(sysconfig, 'get_path', lambda name: str(tmp_path / 'lib'))
    monkeypatch.setattr(builtin, 'PACKAGES', ('a_small_package', 'no_package_of_this_name'))
    monkeypatch.syspath_prepend(str(tmp_path))
    put(tmp_path / 'lib/b.py', MODULE)
    put(tmp_path / 'lib/a.py', '""" The files are read in the order of names. """')
    put(tmp_path / 'lib/broken.py', '""" This file is not valid Python at all. """\n(')
    put(tmp_path / 'lib/pydoc_data/topics.py',
        "topics = {'a': 'Of this file all strings are read.'}")
    for name in ('test/a.py', 'site-packages/b.py', 'test_c.py', 'd.txt'):
        put(tmp_path / 'lib' / name, '""" What is in the tests is left out. """')
    put(tmp_path / 'a_small_package/__init__.py', '')
    put(tmp_path / 'a_small_package/sub/c.py', '""" A package comes behind the library itself. """')
    builtin.builtin_corpus.cache_clear()
    yield
    builtin.builtin_corpus.cache_clear()


def test_the_builtin_corpus_is_the_distinct_short_sentences_of_documentation(library):
    assert builtin.builtin_corpus() == EXPECTED
