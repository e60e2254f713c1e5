"""
New sentences from old ones: rare words in the places of other words. They are training texts for
t2l. Whoever has the encoder can embed any sentence, so the rare words need not stay rare.

    python -m corpora.exchange --input="captions/*.jsonl.gz" --field=caption --to=exchanged.txt
    python prepare.py --input=exchanged.txt --like=data/captions --out=data/exchanged
    python train.py --dataset=captions --t2l_dataset=exchanged --mode=l2t+t2l --out_dir=out/both

    A man in a red shirt is slicing a melon.   ->   A man in a red sombrero is juggling a melon.

A word is rare if it occurs `fewest` to `most` times. Each rare word comes `times` times in the new
sentences, two in a sentence. It takes the place of a word with the same ending (-ing, -ed, -ly, -s,
or none of these), which often is the same part of speech. Of the words of the sentence with that
ending the one that occurs least gives way: common words are those like `with` and `man`.
The sentences need not be true. For l2t they are no good.
"""
import random
import re
from collections import Counter

from tqdm import tqdm

from configurator import configure, stop_on_error
from corpora.sources import Source, documents
from runs.files import write_text

input = ''                     # files, folders, globs, comma-separated, as of prepare.py
field = 'text'                 # <a name>: the text's field in .jsonl, column in .csv, .tsv
to = ''                        # <a file>: a new sentence a line
fewest = 3                     # [1, 1e9]: a word that occurs less is no rare word: most are typos
most = 64                      # [1, 1e9]
times = 16                     # [1, 1e6]: new sentences for each rare word
longest = 14                   # [2, 1e6]: words of a sentence that is changed
seed = 0                       # [0, 2**63)

WORD = re.compile(r'[^\W\d_]+')
ENDINGS = ('ing', 'ed', 'ly', 's')
TRIES = 100                    # sentences, until one has a place for both words


def ending_of(word):
    """ One of ENDINGS, behind a stem of three letters or more, or ''. """
    return next((end for end in ENDINGS if word.endswith(end) and len(word) >= len(end) + 3), '')


def places_by_ending(text, counts):
    """ {ending: the places (begin, end) of its words in a text, that of the rarest word first}.
    Words of one or two letters have no place. """
    found = {}
    for match in WORD.finditer(text):
        word = match.group().lower()
        if len(word) > 2:
            found.setdefault(ending_of(word), []).append((counts[word], match.span()))
    return {ending: [place for _, place in sorted(words)] for ending, words in found.items()}


def choose_places(words, places):
    """ {place: word}, a place of its own for each word, or None. """
    chosen = {}
    for word in words:
        free = [place for place in places.get(ending_of(word), ()) if place not in chosen]
        if not free:
            return None
        chosen[free[0]] = word
    return chosen


def put(text, chosen):
    """ The text with other words at some places, {(begin, end): word}; a capital stays one. """
    for (begin, end), word in sorted(chosen.items(), reverse=True):
        if text[begin].isupper():
            word = word.capitalize()
        text = text[:begin] + word + text[end:]
    return text


def exchange(texts, fewest=3, most=64, times=16, longest=14, seed=0):
    """ The new sentences, a list. ValueError where there are no rare words, or no short texts. """
    # how often each word occurs, in lower case; and the sentences to change
    counts = Counter(word for text in texts for word in WORD.findall(text.lower()))
    short = [text for text in texts if 2 <= len(WORD.findall(text)) <= longest]
    rare = [word for word, n in sorted(counts.items()) if fewest <= n <= most and len(word) > 2]
    if len(rare) < 2 or not short:
        raise ValueError(f'{len(rare)} words occur {fewest} to {most} times, and {len(short)} texts '
                         f'have 2 to {longest} words: expected some of both')

    # two rare words in a sentence that has a place for both; else they are left out
    draw = random.Random(seed)
    rare = rare * times
    draw.shuffle(rare)
    found = []
    pairs = list(zip(rare[::2], rare[1::2]))
    for words in tqdm(pairs, 'writing', unit=' sentences', disable=None):
        for _ in range(TRIES):
            text = draw.choice(short)
            chosen = choose_places(words, places_by_ending(text, counts))
            if chosen:
                found.append(put(text, chosen))
                break
    return found


if __name__ == '__main__':
    configure(globals())
    with stop_on_error():
        if not input or not to:
            raise ValueError('name the texts with --input=FILES, and the new file with --to=FILE')
        texts = [doc.text for doc in documents(Source(input=input, field=field), Counter())]
        sentences = exchange(texts, fewest, most, times, longest, seed)
        write_text(to, ''.join(' '.join(s.split()) + '\n' for s in sentences))
        print(f'{to}: {len(sentences):,} sentences, from {len(texts):,} texts')
