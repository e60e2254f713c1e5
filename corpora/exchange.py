"""
New sentences from old ones: a rare word in the place of another word. An encoder embeds them, and
t2l learns from them what the rare word means (train.py --t2l_dataset).

    python -m corpora.exchange --input="captions/*.txt.gz" --to=exchanged.txt

    A man is slicing a melon.      A man is juggling a melon.

A word is rare if it occurs at least `fewest` and at most `most` times. Each rare word gets `times`
new sentences, and a sentence has two of them. A rare word takes the place of a word with the same
ending (-ing, -ed, -ly, -s, or none of these), which often is the same part of speech. Of the words
of a sentence with that ending the rarest gives way, since common ones are a, with, man.
The sentences are not meant to be true, or good: their words are what counts.
"""
import argparse
import os
import random
import re
from collections import Counter, defaultdict

from tqdm import tqdm

from corpora.sources import Source, documents

WORD = re.compile(r"[^\W\d_]+")
ENDINGS = ('ing', 'ed', 'ly', 's')


def ending(word):
    return next((end for end in ENDINGS if word.endswith(end) and len(word) > len(end) + 2), '')


def rare_words(counts, fewest, most):
    """ The words, sorted, that occur fewest to most times. """
    return sorted(word for word, n in counts.items() if fewest <= n <= most and len(word) > 2)


def put(text, places):
    """ The text with other words at some places, {(begin, end): word}. A capital stays one. """
    for (begin, end), word in sorted(places.items(), reverse=True):
        if text[begin].isupper():
            word = word.capitalize()
        text = text[:begin] + word + text[end:]
    return text


def exchange(texts, fewest, most, times, longest, seed=0):
    """ Yields the new sentences. longest: of how many words the old ones may be. """
    # how often each word occurs, and the sentences to change
    counts = Counter(word for text in texts for word in WORD.findall(text.lower()))
    short = [text for text in texts if 3 <= len(WORD.findall(text)) <= longest]
    rare = rare_words(counts, fewest, most) * times
    if not rare or not short:
        raise ValueError(f'{len(rare)} rare words, {len(short)} short texts: expected some of both')
    draw = random.Random(seed)
    draw.shuffle(rare)

    # two rare words a sentence; where no place fits, another sentence is tried
    for words in tqdm(list(zip(rare[::2], rare[1::2])), unit='sentence', disable=None):
        for _ in range(100):
            text = draw.choice(short)
            found = defaultdict(list)                      # ending: [(count, place)]
            for match in WORD.finditer(text):
                old = match.group().lower()
                if len(old) > 2:
                    found[ending(old)].append((counts[old], match.span()))
            places = {}
            for word in words:
                fits = sorted(found[ending(word)])
                fits = [place for _, place in fits if place not in places]
                if fits:
                    places[fits[0]] = word
            if len(places) == 2:
                yield put(text, places)
                break


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--input', required=True, help='files, folders, globs, comma-separated')
    parser.add_argument('--to', required=True, help='the text file to write, a sentence a line')
    parser.add_argument('--fewest', type=int, default=3)
    parser.add_argument('--most', type=int, default=64)
    parser.add_argument('--times', type=int, default=16)
    parser.add_argument('--longest', type=int, default=14, help='words of a sentence')
    parser.add_argument('--seed', type=int, default=0)
    a = parser.parse_args()
    texts = [doc.text for doc in documents(Source(input=a.input), Counter())]
    lines = list(exchange(texts, a.fewest, a.most, a.times, a.longest, a.seed))
    with open(a.to, 'w', encoding='utf-8') as f:
        f.writelines(line + '\n' for line in lines)
    print(f'{a.to}: {len(lines):,} sentences of {len(texts):,} texts')


if __name__ == '__main__':
    main()
