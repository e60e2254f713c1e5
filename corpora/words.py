"""
The words of a text in any language: what LSA reads, and what BLEU, F1 and edits compare.
"""
import re
from unicodedata import category, normalize

# what belongs to the letter before it, such as accents and vowel signs: `re` has no name for it
MARKS = '\u200c\u200d' + ''.join(c for c in map(chr, range(0x300, 2**17)) if category(c)[0] == 'M')
# scripts without spaces between words: Thai, Lao, Myanmar, Khmer, Kana, Han
UNSPACED = '\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff'
ALONE = rf'[{UNSPACED}](?<=\w)[{MARKS}]*'
WORD = re.compile(rf'{ALONE}|(?:[^\W{UNSPACED}][{MARKS}]*)+')


def words(text):
    """ The words in small letters: letters and digits with their marks. """
    if text.isascii():
        # the same, ten times as fast
        return re.findall(r'\w+', text.lower())
    return WORD.findall(normalize('NFC', text.lower()))
