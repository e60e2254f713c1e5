"""
Tokenizers: from a text to its ids, and back.

    tokenizer = load_tokenizer('data/captions')  # of a dataset folder, or of a run's data/
    tokenizer = load_tokenizer('byte')           # esm, smiles, or the name of a tiktoken encoding
    tokenizer.decode(tokenizer.encode('A dog runs.')) == 'A dog runs.'

Each is an encoder and a table, the bytes of every id: to decode, join them.

Ids: V = vocab_size of them, EOS and PAD included. MASK is id V. No text contains EOS, PAD or MASK.
"""
import os
import re
import signal
import sys
import threading

from base.files import MOST_JSON, in_one_line, read_json, short
from data import check_file, read_meta

LONGEST_PART = 2**18           # characters that are tokenized at a time: ids take much room
LONGEST_PIECE = 252            # bytes that BPE joins at most. To fit a word takes the square of its
                               # length; whole characters of 1, 2, 3 or 4 bytes fill a piece
BEFORE_WORD = re.compile(r'(?<=\S) (?=\S)')
RESIDUES = 'LAGVSERTIDPKQNFYMHWCXBUZO.-'         # ESM's letters, in ESM's order
SMILES = ('Cl', 'Br', '[nH]', *map(chr, range(32, 127)))     # atoms of two letters or more first


class Tokenizer:
    """ encode(text) -> ids, decode(ids) -> text, and decode(encode(text)) == text. """

    def __init__(self, kind, encode_batch, pieces, eos=None):
        """ pieces: the bytes of each id. eos: its id, if it is among them; else it follows. """
        self.kind = kind                         # bpe, byte, esm, smiles, or the name in tiktoken
        self.encode_batch = encode_batch         # list[str] -> list[list[int]]
        self.eos = len(pieces) if eos is None else eos
        self.pad = max(len(pieces), self.eos + 1)
        self.vocab_size = self.pad + 1           # V: the head has V columns, and none for MASK

        # V + 1 byte strings; those of EOS and PAD are empty
        n_empty = self.vocab_size - len(pieces)
        self.pieces = [*pieces, *[b''] * n_empty, b'[MASK]']

        # how meta.json describes it
        self.record = dict(kind=kind, vocab_size=self.vocab_size, eos=self.eos, pad=self.pad)

    def encode(self, text):
        return self.encode_batch([text])[0]

    def decode(self, ids):
        """ Stops at the first EOS, skips PAD, writes [MASK]. Invalid UTF-8 becomes U+FFFD. """
        # the bytes of all ids are joined first: a character may be in two of them
        ids = ids.tolist() if hasattr(ids, 'tolist') else list(ids)
        if self.eos in ids:
            ids = ids[:ids.index(self.eos)]
        return b''.join([self.pieces[i] for i in ids]).decode('utf-8', 'replace')


def spelled(kind, text):
    """ A text as a tokenizer of this kind reads it: residues in capital letters, as of FASTA. """
    return text.upper() if kind == 'esm' and text.isascii() else text


def short_parts(text):
    """ Cuts a long text into parts; joined, they are the text. A cut lies before a word, where a
    tokenizer cuts as well. Only where no word ends for a long stretch, it lies between any two
    characters. """
    begin = 0
    while len(text) - begin > LONGEST_PART:
        middle = begin + LONGEST_PART // 2
        found = BEFORE_WORD.search(text, middle, begin + LONGEST_PART)
        end = found.start() if found else begin + LONGEST_PART
        yield text[begin:end]
        begin = end
    yield text[begin:]


def load_tokenizer(folder_or_name, meta=None):
    """ The tokenizer of a dataset folder or of a run's data/, or one by name. meta: of the folder,
    where it was read already. """
    name = folder_or_name
    if os.path.isdir(name):
        meta = meta or read_meta(name)
        if meta['tokenizer']['kind'] == 'bpe':
            return bpe_tokenizer(check_file(name, 'tokenizer.json', meta['files']))
        name = meta['tokenizer']['kind']
    if name == 'byte':
        return byte_tokenizer()
    if pieces := dict(esm=RESIDUES, smiles=SMILES).get(name):
        return piece_tokenizer(name, pieces)
    return tiktoken_tokenizer(name)

# -----------------------------------------------------------------------------
# An id per byte, per residue or per atom

def byte_tokenizer():
    return Tokenizer('byte', lambda texts: [list(text.encode()) for text in texts],
                     [bytes([i]) for i in range(256)])


def piece_tokenizer(kind, pieces):
    """ An id for each piece; where two begin at a place, the first of them is taken. """
    # in a regular expression the first alternative counts, so atoms of two letters come first. A
    # character that is no piece matches the dot, and is then not found
    id_of = {piece: i for i, piece in enumerate(pieces)}
    cut = re.compile('|'.join(map(re.escape, pieces)) + '|.', re.DOTALL)

    def encode_batch(texts):
        batch = []
        for text in texts:
            try:
                batch.append([id_of[piece] for piece in cut.findall(spelled(kind, text))])
            except KeyError as error:
                raise ValueError(f'tokenizer {kind}: {error} is none of {"".join(pieces)}; it is '
                                 f'in {short(text)}') from None
        return batch
    return Tokenizer(kind, encode_batch, [piece.encode() for piece in pieces])

# -----------------------------------------------------------------------------
# Byte-level BPE, fitted here on the training texts

def bytes_of_characters():
    """ {character: byte} of GPT-2's alphabet. A printable byte stands for itself; the others are
    the characters from 256 on. """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return ({chr(byte): byte for byte in printable}
            | {chr(256 + i): byte for i, byte in enumerate(others)})


def words_of_bytes():
    """ What cuts a text into words of GPT-2's alphabet, and long words into pieces. """
    from tokenizers import pre_tokenizers
    return pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False),
                                    pre_tokenizers.FixedLength(LONGEST_PIECE)])


def train_bpe(texts, vocab_size):
    """ The tokenizer.json of a byte-level BPE of at most vocab_size ids, EOS and PAD included. """
    from tokenizers import Tokenizer as HFTokenizer, models, pre_tokenizers, trainers
    if vocab_size < 258:
        raise ValueError(f'vocab_size {vocab_size} is too small: 256 bytes, EOS and PAD need 258')

    # all bytes are in its vocabulary, so every text can be encoded. EOS and PAD come behind them
    bpe = HFTokenizer(models.BPE())
    bpe.pre_tokenizer = words_of_bytes()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 2, min_frequency=2,
                                  show_progress=sys.stderr.isatty(),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())

    # the library does not listen to Ctrl-C: meanwhile it ends the process at once, unless the
    # process ignores it or this is another thread, which may not say so
    handler = signal.getsignal(signal.SIGINT)
    listens = callable(handler) and threading.current_thread() is threading.main_thread()
    if listens:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        parts = (part for text in texts for part in short_parts(text))
        bpe.train_from_iterator(parts, trainer)
    finally:
        if listens:
            signal.signal(signal.SIGINT, handler)
    return bpe.to_str()


def bpe_tokenizer(path):
    """ Byte-level BPE from a tokenizer.json as train_bpe writes it. Only its words and merges are
    read: another part could make the library end the process, or take any amount of memory. """
    from tokenizers import Tokenizer as HFTokenizer, models
    try:
        model = read_json(path, limit=2 * MOST_JSON)['model']
        words = sorted(model['vocab'].items(), key=lambda item: item[1])
        merges = [tuple(pair) for pair in model['merges']]

        # the bytes of every word, in the order of the ids
        byte_of = bytes_of_characters()
        pieces = [bytes(byte_of[character] for character in word) for word, _ in words]
        if [i for _, i in words] != list(range(len(words))):
            raise ValueError('its words are not numbered from 0')
        bpe = HFTokenizer(models.BPE(model['vocab'], merges))
    except Exception as error:                   # the library raises a bare Exception
        reason = f'{type(error).__name__}: {error}'
        raise ValueError(f'{path}: no byte-level BPE ({reason}); run prepare.py again') from None
    bpe.pre_tokenizer = words_of_bytes()

    def encode_batch(texts):
        return [found.ids for found in bpe.encode_batch_fast(texts, add_special_tokens=False)]
    return Tokenizer('bpe', encode_batch, pieces)

# -----------------------------------------------------------------------------
# OpenAI's encodings

def tiktoken_tokenizer(name):
    import tiktoken
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:                   # its download can raise anything
        known = ', '.join(tiktoken.list_encoding_names())
        raise ValueError(f'tokenizer {name!r}: cannot be loaded ({type(error).__name__}); choose '
                         f'bpe, byte, esm, smiles, or one of tiktoken ({known}), whose files it '
                         'downloads, or finds in the folder TIKTOKEN_CACHE_DIR') from None

    # some encodings have ids without bytes
    pieces = [b''] * encoding.n_vocab
    for piece in encoding.token_byte_values():
        pieces[encoding.encode_single_token(piece)] = piece

    def encode_batch(texts):
        with in_one_line(f'tokenizer {name}'):   # a text may be too much for its regular expression
            return encoding.encode_ordinary_batch(texts)
    return Tokenizer(name, encode_batch, pieces, eos=encoding.eot_token)
