""" corpora/exchange.py as sentences: each rare word gets its new sentences, and nothing else changes in them. """
import re
from collections import Counter

import pytest

from corpora.exchange import choose_places, ending_of, exchange, places_by_ending, put
from launch import run_code

COMMON = ['a man is walking near the river', 'The woman is sitting in a garden', 'two dogs jumped over fences',
          'dogs and cats walking and sitting jumped and rested'] * 20
RARE = ['a chef was slicing a melon', 'a chef is juggling potatoes', 'she painted a melon', 'he tiptoed, slicing potatoes'] * 2


def words(text):
    return re.findall(r'[^\W\d_]+', text.lower())


def test_each_rare_word_comes_so_often_with_one_other_and_the_rest_is_an_old_sentence():
    texts = COMMON + RARE
    counts = Counter(word for text in texts for word in words(text))
    rare = {word for word, n in counts.items() if 2 <= n <= 4 and len(word) > 2}
    assert rare == {'chef', 'was', 'slicing', 'melon', 'juggling', 'potatoes', 'she', 'painted', 'tiptoed'}
    found = exchange(texts, fewest=2, most=4, times=30, longest=9)
    assert found == exchange(texts, fewest=2, most=4, times=30, longest=9) != exchange(texts, 2, 4, 30, 9, seed=1)

    new = Counter()
    for sentence in found:
        # one of the old ones, but for two words, of the endings that they take the place of
        changes = []
        for old in texts:
            pairs = [(a, b) for a, b in zip(words(old), words(sentence)) if a != b]
            if len(words(old)) == len(words(sentence)):
                changes.append(pairs)
        pairs = min(changes, key=len)
        assert len(pairs) <= 2 and all(b in rare and ending_of(a) == ending_of(b) for a, b in pairs), sentence
        new.update(word for word in words(sentence) if word in rare)
    # 9 words, 30 times each, two a sentence; old sentences have some of them too
    assert len(found) == 135 and all(new[word] >= 30 for word in rare), (len(found), new)


def test_the_rarest_word_with_the_ending_gives_way_and_a_capital_stays():
    counts = Counter(dict(a=99, the=90, man=50, melon=2, near=40, Walking=0, walking=9, river=5))
    places = places_by_ending('Walking near the river', counts)
    assert places == {'ing': [(0, 7)], '': [(17, 22), (8, 12), (13, 16)]}
    chosen = choose_places(('juggling', 'melon'), places)
    assert put('Walking near the river', chosen) == 'Juggling near the melon'
    assert put('Walking near the river', choose_places(('melon', 'sofa'), places)) == 'Walking sofa the melon'
    assert choose_places(('juggling', 'slicing'), places) is None
    assert [ending_of(word) for word in ('ring', 'string', 'red', 'painted', 'his', 'dogs', 'fly', 'slowly')] == [
        '', 'ing', '', 'ed', '', 's', '', 'ly']


def test_texts_without_rare_words_or_short_ones_are_refused():
    with pytest.raises(ValueError, match='0 words occur 3 to 64 times'):
        exchange(['one two three'])
    with pytest.raises(ValueError, match='0 texts have 2 to 3 words'):
        exchange(RARE * 2, longest=3, fewest=2)


def test_the_command_writes_the_file_and_nothing_beside_it(tmp_path):
    (tmp_path / 'meta.json').write_text('another dataset lies here')
    (tmp_path / 'a.csv').write_text('caption\n' + ''.join(f'"{text}"\n' for text in COMMON + RARE))
    code = "import runpy, sys; sys.argv[0] = 'exchange'; runpy.run_module('corpora.exchange', run_name='__main__')"
    knobs = [f'--input={tmp_path}/a.csv', '--field=caption', '--fewest=2', '--most=4', '--times=2']
    result = run_code(code, *knobs, f'--to={tmp_path}/new.txt')
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / 'new.txt').read_text().splitlines()
    assert lines == exchange(COMMON + RARE, 2, 4, times=2) and f'{len(lines)} sentences, from 88 texts' in result.stdout
    assert (tmp_path / 'meta.json').read_text() == 'another dataset lies here'
    result = run_code(code, *knobs)
    assert result.returncode == 2 and result.stderr.count('\n') == 1 and '--to=FILE' in result.stderr
