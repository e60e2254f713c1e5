"""
Shards: how texts and their latents are packed, and the files of one shard.

    chunks = Chunker(tokenizer, max_tokens)(ids)         # a long document becomes several samples
    entry = write_shard(folder, 'train-00000', ...)      # tokens, latents and what meta.json says

A shard holds samples, one after the other:
    .tokens.bin     (T,) uint16 or uint32, little-endian
    .offsets.npy    (n + 1,) int64: where the tokens of each sample begin
    .latents.npy    (n, N, D) float16, where the dataset has latents
    .whole.json     the shard's entry of meta.json, with a key, the digest of what decides its bytes
Letters: T tokens, n samples, N latent vectors, D latent dimensions.
"""
import hashlib
import io
import itertools
import json
import os
import re

import numpy as np

from base.console import progress_bar
from base.files import check, read_array, read_sealed, short
from base.writing import sealed, write_whole
from corpora.latents import flaw_of
from corpora.lsa import NO_KNOWN_WORD
from corpora.tokenizers import LONGEST_PART, short_parts
from encoders import far_off

LATIN = re.compile('[A-Za-z]')
MOST_TOKENS = 127              # max_tokens=None stands for at most this, unless latents are given
ENCODED = 2**12                # documents that are tokenized at a time: lists of ids take much room

# what a dataset's folder holds
ENDINGS = ('tokens.bin', 'offsets.npy', 'latents.npy', 'whole.json')     # of the files of a shard
NAMES = ('meta.json', 'tokenizer.json', 'encoder.npz', 'latent_stats.npz', 'bag.npy',
         *(f'{split}-[0-9]*.{end}' for split in ('train', 'val') for end in ENDINGS))

# counts of a shard; those of a split are their sums
SUMS = ('samples', 'documents', 'tokens', 'bytes', 'nonfinite', 'longer_than_max_tokens',
        'truncated', 'unknown', 'zero')

# -----------------------------------------------------------------------------
# Files

def check_same(folder, name, now, finished):
    """ ValueError where a file or a shard of a finished dataset would change. now: its digest or
    key as it would be written; None: it would not be there. finished: what it has now, {name: the
    digest of a file, or the key of a shard}; {} where the dataset is not finished. """
    if finished and finished.get(name) != now:
        raise ValueError(f'{folder} holds a finished dataset, and {name} would become another: its '
                         'documents, latents or encoder have changed; choose another --out= or '
                         'delete that folder')


def write_files(claim, contents, finished=None):
    """ Writes {name: bytes, or an array of them} into the folder of a Claim, and returns {name: the
    file's entry in meta.json}. An equal file is left alone. """
    entries = {}
    for name, data in contents.items():
        path = os.path.join(claim.folder, name)
        digest = hashlib.sha256(data).hexdigest()
        check_same(claim.folder, name, digest, finished)
        entries[name] = dict(bytes=len(data), sha256=digest)
        try:
            check(path, entries[name])
        except (ValueError, FileNotFoundError):
            claim.check()
            with write_whole(path) as f:
                f.write(data)
    return entries


def as_bytes(save, *arrays, **named):
    """ What np.save, np.savez or a `save` method writes. """
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()

# -----------------------------------------------------------------------------
# Chunking

class Chunker:
    """ Cuts the ids of a document into runs of at most max_tokens. The runs join to the document,
    and each of them is valid text.

    A cut lies in the second half of a run: at the end of a sentence if there is one, else before a
    word. Else it lies between characters, anywhere.
    """

    def __init__(self, tokenizer, max_tokens):
        pieces = tokenizer.pieces
        self.max_tokens = max_tokens

        # of each id: begins inside a character (bytes 0x80 to 0xBF continue one of UTF-8), begins
        # with a space, ends a sentence
        self.inside = np.array([b'\x80' <= piece[:1] < b'\xC0' for piece in pieces])
        self.space = np.array([piece[:1].isspace() for piece in pieces])
        marks = (b'.', b'!', b'?')
        self.ends = np.array([piece.endswith(b'\n') or piece.rstrip(b' "\')').endswith(marks)
                              for piece in pieces])

    def __call__(self, ids):
        ids = np.asarray(ids)
        while len(ids) > self.max_tokens:
            cut = self.last_cut(ids)
            yield ids[:cut]
            ids = ids[cut:]
        yield ids

    def last_cut(self, ids):
        """ Where to cut, from 1 to max_tokens: a cut at k lies before ids[k]. """
        most = self.max_tokens
        after = ids[1:most + 1]                                          # the id after each cut
        is_late = np.arange(1, most + 1) > most // 2
        before_word = is_late & self.space[after]
        after_sentence = before_word & self.ends[ids[:most]]
        for allowed in (after_sentence, before_word, ~self.inside[after]):
            if allowed.any():
                return int(np.flatnonzero(allowed)[-1]) + 1
        return most                              # every piece begins inside a character


def in_batches(texts):
    """ Yields lists of texts to be tokenized together. A long text is alone in its list. """
    batch = []
    n_characters = 0
    for text in texts:
        is_full = len(batch) == ENCODED or n_characters + len(text) > LONGEST_PART
        if batch and is_full:
            yield batch
            batch = []
            n_characters = 0
        batch.append(text)
        n_characters += len(text)
    if batch:
        yield batch


def token_ids(tokenizer, texts):
    """ The ids of each text. `texts` may be any number of them, of any length. """
    for batch in in_batches(texts):
        if len(batch[0]) > LONGEST_PART:
            parts = short_parts(batch[0])
            yield np.concatenate([np.array(tokenizer.encode(part), np.int32) for part in parts])
        else:
            yield from tokenizer.encode_batch(batch)


def fitting_max_tokens(tokenizer, texts, has_latents):
    """ The max_tokens that None stands for: what 99.9 % of the texts fit into, a sample of train;
    if latents are given, what all texts fit into, since then a longer one is dropped. """
    lengths = np.array([len(ids) for ids in token_ids(tokenizer, texts)])
    share, most, fate = (.999, MOST_TOKENS, 'become several samples')
    if has_latents:
        share, most, fate = (1, 65535, 'are dropped')

    # with an EOS it is a multiple of 8
    needed = max(np.quantile(lengths, share, method='inverted_cdf'), 8)
    n = min(int(needed) // 8 * 8 + 7, most)
    print(f'max_tokens={n}: {(lengths <= n).sum():,} of {len(lengths):,} texts fit, longer ones '
          f'{fate} (the median has {np.median(lengths):,.0f} tokens, the longest '
          f'{lengths.max():,})', flush=True)
    return n

# -----------------------------------------------------------------------------
# Latents

def latent_stats(folder, entries):
    """ Mean and std per dimension over the latents as stored, in float64, shard after shard. """
    n, total, square = 0, 0., 0.
    for entry in entries:
        path = os.path.join(folder, f'{entry["name"]}.latents.npy')
        shape = (entry['samples'], *entry['latent_shape'])
        latents = read_array(path, 'float16', shape, mmap=True)
        for i in range(0, len(latents), 2**14):
            z = latents[i:i + 2**14].astype(np.float64).reshape(-1, latents.shape[-1])
            n = n + len(z)
            total = total + z.sum(0)
            square = square + (z * z).sum(0)
    mean = total / n
    return dict(mean=mean, std=np.sqrt(np.maximum(square / n - mean**2, 0)))

# -----------------------------------------------------------------------------
# A shard

def token_dtype(tokenizer):
    return 'uint16' if tokenizer.vocab_size <= 2**16 else 'uint32'


def shard_key(docs, given, settings):
    """ A digest of all that decides a shard's bytes: its documents, the latents that they bring
    along (n, N, D) or None, and the settings. """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for doc in docs:
        data = doc.text.encode()
        digest.update(f'{len(data)}:'.encode() + data)
    if given is not None:
        digest.update(f'{given.shape}'.encode())
        digest.update(given)
    return digest.hexdigest()


def offsets_of(lengths):
    """ Where each sample begins, and the last one ends, (n + 1,) int64. """
    return np.cumsum([0, *lengths], dtype=np.int64)


def write_shard(claim, name, key, docs, given, tokenizer, encoder, max_tokens):
    """ Tokenizes, chunks and embeds the documents `docs`, and writes the files of the shard into
    the folder of a Claim. Returns its entry for meta.json. given: their latents (n, N, D), if these
    exist already. """
    # the samples: their tokens, and the document that each comes from
    is_morgan = encoder is not None and encoder.record['id'] == 'morgan'
    chunk = Chunker(tokenizer, max_tokens)
    dtype = np.dtype(token_dtype(tokenizer)).newbyteorder('<')
    tokens = bytearray()
    lengths, owners = [], []
    n_too_long = 0
    for i, doc_ids in enumerate(token_ids(tokenizer, (doc.text for doc in docs))):
        ids = np.array(doc_ids, dtype)
        cuts = [len(run) for run in chunk(ids)]
        if len(cuts) > 1 and (given is not None or is_morgan):      # a latent is of a whole text
            n_too_long += 1
            continue
        tokens += ids.tobytes()
        lengths += cuts
        owners += [i] * len(cuts)
    tokens = np.frombuffer(tokens, dtype)                                # (T,)
    lengths, owners = np.array([lengths, owners], np.int64)              # (n,) each

    # their latents, given or of exactly the texts that the tokens decode to
    latents = None
    n_truncated = n_unknown = 0
    if given is not None:
        latents = given[owners]
    elif encoder is not None:
        texts = [tokenizer.decode(tokens[begin:end])
                 for begin, end in itertools.pairwise(offsets_of(lengths))]
        with progress_bar(total=len(texts), desc=name, unit=' samples') as bar:
            latents = np.asarray(encoder(texts, progress=bar.update))    # (n, N, D)
        n_truncated = encoder.truncated
        encoder.truncated = 0
        # how many texts have no word that the encoder knows. All would take too long to ask, so
        # only those with a latent of zeros, or without a Latin letter
        odd = [text for text, z in zip(texts, latents) if not (z.any() and LATIN.search(text))]
        n_unknown = sum(encoder.remark(text) == NO_KNOWN_WORD for text in odd)

    # samples that cannot be stored are dropped; the first is named, without its folder
    n_nonfinite = 0
    flaw = ''
    if latents is not None:
        with np.errstate(over='ignore'):
            stored = latents.astype(np.float16)
        is_good = np.isfinite(stored).all((1, 2))
        if given is not None:
            is_good &= ~far_off(stored.astype(np.float32))      # by what is stored
        elif is_morgan:                                    # what is no molecule has no bit
            is_good &= latents.any((1, 2))
        n_nonfinite = int((~is_good).sum())
        if n_nonfinite:
            worst = is_good.argmin()
            doc = docs[owners[worst]]
            place = os.path.basename(doc.place) or short(doc.text)
            flaw = f'{place}: {flaw_of(latents[worst])}'
            stored = stored[is_good]
            tokens = tokens[np.repeat(is_good, lengths)]
            lengths, owners = lengths[is_good], owners[is_good]
        latents = stored

    # given latents that are zeros say nothing of their texts, so they are counted. (Those of an
    # encoder were counted above, as unknown)
    n_zero = 0
    first_zero = ''
    if given is not None:
        is_zero = ~latents.any((1, 2))
        n_zero = int(is_zero.sum())
        if n_zero:
            first_zero = os.path.basename(docs[owners[is_zero.argmax()]].place)

    content = {
        f'{name}.tokens.bin': tokens.view(np.uint8),
        f'{name}.offsets.npy': as_bytes(np.save, offsets_of(lengths)),
    }
    if latents is not None:
        content[f'{name}.latents.npy'] = as_bytes(np.save, latents)
    files = write_files(claim, content)

    # the note comes last: from now on the shard is whole
    n_bytes_of_id = np.array([len(piece) for piece in tokenizer.pieces])
    parts = np.array_split(tokens, 1 + len(tokens) // 2**24)             # each cast to int64
    n_of_id = sum(np.bincount(part, minlength=len(n_bytes_of_id)) for part in parts)
    entry = dict(
        name=name,
        key=key,
        samples=len(lengths),
        documents=len(docs),
        tokens=len(tokens),
        bytes=int(n_of_id @ n_bytes_of_id),
        longest=int(lengths.max(initial=0)),
        nonfinite=n_nonfinite,
        flaw=flaw,
        longer_than_max_tokens=n_too_long,
        truncated=n_truncated,
        unknown=n_unknown,
        zero=n_zero,
        first_zero=first_zero,
        latent_shape=None if latents is None else list(latents.shape[1:]),
        files=files,
    )
    write_files(claim, {f'{name}.whole.json': sealed(entry).encode()})
    return entry


def written_before(folder, name, key):
    """ The entry of a shard that an earlier run wrote from the same documents and settings, and
    whose files and note are whole; else None. """
    try:
        entry = read_sealed(os.path.join(folder, f'{name}.whole.json'))
        if entry['key'] != key:
            return None
        for file, known in entry['files'].items():
            check(os.path.join(folder, file), known)
    except (ValueError, FileNotFoundError):      # no note, half of one, or a file is not as it says
        return None
    return entry
