"""
Shards: how texts and their latents are packed, and the files of one shard.

    chunks = Chunker(tokenizer, max_tokens)(ids)         # a long document becomes several samples
    entry = write_shard(folder, 'train-00000', ...)      # tokens, latents and what meta.json says

A shard holds samples, one after the other:
    .tokens.bin     (T,) uint16 or uint32, little-endian
    .offsets.npy    (n + 1,) int64: where the tokens of each sample begin
    .ids.npy        (n, 2) int64: the number of its document in the split, and of its chunk in that
    .latents.npy    (n, N, D) float16, where the dataset has latents
    .whole.json     the shard's entry of meta.json, with a key: a digest of all that decides its
                    bytes. So a later run knows which shards it need not write again
Letters: T tokens, n samples, N latent vectors, D latent dimensions.
"""
import hashlib
import itertools
import json
import os

import numpy as np
from tqdm import tqdm

from corpora.latents import check_steps, flaw_of
from corpora.writing import as_bytes, is_whole, write_file
from runs.files import read_array, read_sealed
from runs.writing import sealed, write_text

MOST_TOKENS = 127              # max_tokens=None stands for at most this, unless latents are given
ENCODED = 2**12                # documents that are tokenized at a time: lists of ids take ten times
                               # the room of an array

# counts of a shard; those of a split are their sums
SUMS = ('samples', 'documents', 'tokens', 'bytes', 'nonfinite', 'longer_than_max_tokens',
        'truncated')

def token_dtype(tokenizer):
    return 'uint16' if tokenizer.vocab_size <= 2**16 else 'uint32'

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
        ids = np.asarray(ids, np.int64)
        while len(ids) > self.max_tokens:
            cut = self.last_cut(ids)
            yield ids[:cut]
            ids = ids[cut:]
        yield ids

    def last_cut(self, ids):
        """ The best position of a cut, from 1 to max_tokens. A cut at k lies before ids[k]. """
        most = self.max_tokens
        after = ids[1:most + 1]                                          # the id after each cut
        is_late = np.arange(1, most + 1) > most // 2
        before_word = is_late & self.space[after]
        after_sentence = before_word & self.ends[ids[:most]]
        for allowed in (after_sentence, before_word, ~self.inside[after]):
            if allowed.any():
                return int(np.flatnonzero(allowed)[-1]) + 1
        return most                              # every piece begins inside a character


def covering(lengths, of_1000=999):
    """ The max_tokens that `of_1000` of 1,000 texts fit into; `lengths` are sorted numbers of
    tokens. With an EOS it is a multiple of 8. """
    rank = -(-of_1000 * len(lengths) // 1000)                # rounded up
    needed = max(lengths[rank - 1], 8)
    return int(-(-(needed + 1) // 8) * 8 - 1)


def token_ids(tokenizer, texts):
    """ The ids of each text. `texts` may be any number of them. """
    texts = iter(texts)
    while batch := list(itertools.islice(texts, ENCODED)):
        yield from tokenizer.encode_batch(batch)


def fitting_max_tokens(tokenizer, texts, has_latents):
    """ The max_tokens that None stands for. texts: a sample of train; if latents are given, all
    texts, since then a longer text is dropped. """
    lengths = sorted(len(ids) for ids in token_ids(tokenizer, texts))
    if has_latents:
        n = min(covering(lengths, of_1000=1000), 65535)
        fate = 'are dropped'
    else:
        n = min(covering(lengths), MOST_TOKENS)
        fate = 'become several samples'
    n_fit = sum(length <= n for length in lengths)
    median = lengths[len(lengths) // 2]
    print(f'max_tokens={n}: {n_fit:,} of {len(lengths):,} texts fit, longer ones {fate} '
          f'(the median has {median:,} tokens, the longest {lengths[-1]:,})', flush=True)
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


def write_shard(folder, name, first, docs, given, tokenizer, encoder, max_tokens):
    """ Tokenizes, chunks and embeds the documents `docs`, and writes the files of the shard.
    Returns its entry for meta.json. first: the number of the first document in its split. given:
    their latents (n, N, D), if these exist already. """
    # the samples: their tokens, and the numbers of document and chunk
    chunk = Chunker(tokenizer, max_tokens)
    dtype = np.dtype(token_dtype(tokenizer)).newbyteorder('<')
    runs, ids = [], []
    n_too_long = 0
    for i, doc_ids in enumerate(token_ids(tokenizer, (doc.text for doc in docs))):
        chunks = [run.astype(dtype) for run in chunk(doc_ids)]
        if given is not None and len(chunks) > 1:        # one latent cannot belong to several texts
            n_too_long += 1
            continue
        runs += chunks
        ids += [(first + i, k) for k in range(len(chunks))]

    # their latents, given or of exactly the texts that the tokens decode to
    latents = None
    n_truncated = 0
    if given is not None:
        latents = given[[i - first for i, _ in ids]]
    elif encoder is not None:
        texts = [tokenizer.decode(run) for run in runs]
        with tqdm(total=len(runs), desc=name, unit=' samples', leave=False, disable=None) as bar:
            latents = np.asarray(encoder(texts, progress=bar.update))    # (n, N, D)
        n_truncated = encoder.truncated
        encoder.truncated = 0

    # samples that float16 cannot hold are dropped; the first is named, without its folder
    n_nonfinite = 0
    flaw = ''
    if latents is not None:
        with np.errstate(over='ignore'):
            stored = latents.astype(np.float16)
        is_finite = np.isfinite(stored).all((1, 2))
        n_nonfinite = int((~is_finite).sum())
        if n_nonfinite:
            worst = is_finite.argmin()
            number = ids[worst][0]                           # of its document
            place = os.path.basename(docs[number - first].place) or f'document {number}'
            flaw = f'{place}: {flaw_of(latents[worst])}'
            if given is None:
                flaw = f'document {number}: NaN, inf or too large, the encoder is broken'
        elif given is not None:
            check_steps(latents, stored, name)
        latents = stored[is_finite]
        runs = [run for run, keep in zip(runs, is_finite) if keep]
        ids = [pair for pair, keep in zip(ids, is_finite) if keep]

    # the arrays
    lengths = [len(run) for run in runs]
    tokens = np.concatenate([np.empty(0, dtype), *runs])
    offsets = np.cumsum([0] + lengths, dtype=np.int64)
    content = {
        f'{name}.tokens.bin': tokens.tobytes(),
        f'{name}.offsets.npy': as_bytes(np.save, offsets),
        f'{name}.ids.npy': as_bytes(np.save, np.array(ids, np.int64).reshape(-1, 2)),
    }
    if latents is not None:
        content[f'{name}.latents.npy'] = as_bytes(np.save, latents)
    files = {file: write_file(os.path.join(folder, file), data) for file, data in content.items()}

    n_bytes_of_id = np.array([len(piece) for piece in tokenizer.pieces])
    n_of_id = np.bincount(tokens, minlength=len(n_bytes_of_id))
    return dict(
        name=name,
        samples=len(runs),
        documents=len(docs),
        tokens=len(tokens),
        bytes=int(n_of_id @ n_bytes_of_id),
        longest=max(lengths, default=0),
        nonfinite=n_nonfinite,
        flaw=flaw,
        longer_than_max_tokens=n_too_long,
        truncated=n_truncated,
        latent_shape=None if latents is None else list(latents.shape[1:]),
        files=files,
    )


def note_name(name):
    return f'{name}.whole.json'


def write_entry(folder, entry):
    """ The note beside a whole shard: what meta.json will say of it. """
    write_text(os.path.join(folder, note_name(entry['name'])), sealed(entry))


def written_before(folder, name, key):
    """ The entry of a shard that an earlier run wrote from the same documents and settings, and
    whose files and note are whole; else None. """
    # there may be no note, or half of one
    try:
        entry = read_sealed(os.path.join(folder, note_name(name)))
    except (ValueError, FileNotFoundError):
        return None
    if entry.get('key') != key:
        return None
    are_whole = all(is_whole(os.path.join(folder, file), known)
                    for file, known in entry['files'].items())
    return entry if are_whole else None
