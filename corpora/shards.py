"""
Shards: how texts and their latents are packed, from the documents of a rank to meta.json.

    entries = write_shards(claim, plan, source, val, ...)    # each rank its own
        chunks = Chunker(tokenizer, max_tokens)(ids)         # a long document: several samples
        entry = write_shard(claim, 'train-00000', ...)       # what meta.json says of a shard
    finish(claim, plan, record, entries, ...)                # rank 0: statistics, bag, meta.json

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
import time
from datetime import timedelta

import numpy as np

from base.console import progress_bar, warn
from base.distributed import all_gather_object, rank, world
from base.files import check, read_array, read_sealed, short
from base.writing import sealed, write_whole
from corpora.bag import fit_bag, has_bag
from corpora.layouts import print_summary
from corpora.lsa import NO_KNOWN_WORD
from corpora.sources import SPLITS, own_shards
from corpora.tokenizers import LONGEST_PART, short_parts
from data import FORMAT, PackedDataset
from encoders import FAR, far_off

LATIN = re.compile('[A-Za-z]')
MOST_TOKENS = 127              # max_tokens=None stands for at most this, unless latents are given
ENCODED = 2**12                # documents that are tokenized at a time: lists of ids take much room
MOST_SHARDS = 10_000           # meta.json says about 1 kB of each, and is read whole (MOST_JSON)
MAX_NONFINITE = 1e-3           # share of the samples, here and below
MAX_ZERO = .1

# what a dataset's folder holds
ENDINGS = ('tokens.bin', 'offsets.npy', 'latents.npy', 'whole.json')     # of the files of a shard
NAMES = ('meta.json', 'tokenizer.json', 'encoder.npz', 'latent_stats.npz', 'bag.npy',
         *(f'{split}-[0-9]*.{end}' for split in SPLITS for end in ENDINGS))

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
    """ Writes {name: what a file holds, as as_bytes takes it} into the folder of a Claim, and
    returns {name: the file's entry in meta.json}. An equal file is left alone. """
    entries = {}
    for name, value in contents.items():
        # a finished dataset keeps its files, whatever happens
        path = os.path.join(claim.folder, name)
        data = as_bytes(name, value)
        digest = hashlib.sha256(data).hexdigest()
        check_same(claim.folder, name, digest, finished)
        entries[name] = dict(bytes=len(data), sha256=digest)

        # written where it is missing, damaged, or another one; only as long as the folder is ours
        try:
            check(path, entries[name])
        except (ValueError, FileNotFoundError):
            claim.check()
            with write_whole(path) as f:
                f.write(data)
    return entries


def as_bytes(name, value):
    """ What a file of this name holds: a dict as JSON with a digest of itself, or as .npz with an
    array of each name; an array as .npy; and bytes, or an array of them, as they are. """
    if name.endswith('.json') and isinstance(value, dict):
        return sealed(value).encode()
    buffer = io.BytesIO()
    if name.endswith('.npz') and isinstance(value, dict):
        np.savez(buffer, **value)
    elif name.endswith('.npy'):
        np.save(buffer, value)
    else:
        return value
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
        # of each cut, from 1 on: does it lie late enough, before a word, behind a sentence?
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
    share = .999
    most = MOST_TOKENS
    fate = 'become several samples'
    if has_latents:
        share = 1
        most = 65535
        fate = 'are dropped'

    # with an EOS it is a multiple of 8
    needed = max(np.quantile(lengths, share, method='inverted_cdf'), 8)
    n = min(int(needed) // 8 * 8 + 7, most)
    print(f'max_tokens={n}: {(lengths <= n).sum():,} of {len(lengths):,} texts fit, longer ones '
          f'{fate} (the median has {np.median(lengths):,.0f} tokens, the longest '
          f'{lengths.max():,})', flush=True)
    return n

# -----------------------------------------------------------------------------
# Latents of documents

def given_latents(docs):
    """ The latents that the documents bring along, (n, N, D) as as_latent gives them, or None. """
    if docs[0].latent is None:
        return None
    latents = [doc.latent() for doc in docs]
    for doc, latent in zip(docs, latents):
        if latent.shape != latents[0].shape:
            raise ValueError(f'latents are of shapes {latents[0].shape} and {latent.shape}, '
                             f'the latter of {doc.text[:40]!r}')
    return np.stack(latents)


def flaw_of(latent):
    """ What keeps a latent (N, D) from being stored, and what to do. """
    # only a fingerprint of zeros is a flaw: it is what morgan.py gives for no molecule
    largest = np.abs(latent).max()
    if not largest:
        return 'is no molecule that RDKit can read'
    if not np.isfinite(largest):
        return 'NaN or inf: mend it, or leave out the row and its text'
    if largest >= 65520:                                   # from here on it is rounded to inf
        return (f'{largest:,.6g}, and float16 ends at 65,504: divide all latents by one number, '
                'such as their standard deviation, or each column of a table by its own')
    return (f'{FAR} times as long as the others or more, it has {largest:,.6g}: mend it, or leave '
            'out the row and its text')

# -----------------------------------------------------------------------------
# A shard

def token_dtype(tokenizer):
    return 'uint16' if tokenizer.vocab_size <= 2**16 else 'uint32'


def shard_key(docs, given, settings):
    """ A digest of all that decides a shard's bytes: its documents, the latents that they bring
    along (n, N, D) or None, and the settings. """
    # the length of each text comes before it: else two texts might be taken for other two
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


def samples_of(docs, tokenizer, max_tokens, is_whole):
    """ The samples of documents, one after the other. is_whole: a document of more than max_tokens
    is dropped, since a latent is of a whole text; else it becomes several samples. Returns

    tokens      (T,) of all samples
    lengths     (n,) int64, how many tokens each sample has
    owners      (n,) int64, the document that each comes from
    n_too_long  how many documents were dropped
    """
    chunk = Chunker(tokenizer, max_tokens)
    # bytes in one buffer: a list of Python's numbers would take many times as much room
    dtype = np.dtype(token_dtype(tokenizer)).newbyteorder('<')
    tokens = bytearray()
    lengths, owners = [], []
    n_too_long = 0
    for i, doc_ids in enumerate(token_ids(tokenizer, (doc.text for doc in docs))):
        ids = np.array(doc_ids, dtype)
        cuts = [len(run) for run in chunk(ids)]
        if len(cuts) > 1 and is_whole:
            n_too_long += 1
            continue
        tokens += ids.tobytes()
        lengths += cuts
        owners += [i] * len(cuts)
    lengths, owners = np.array([lengths, owners], np.int64)              # (n,) each
    return np.frombuffer(tokens, dtype), lengths, owners, n_too_long


def embed(encoder, tokenizer, tokens, lengths, name):
    """ By the encoder: latents (n, N, D) of exactly the texts that the tokens decode to; how many
    of the texts it cut, and how many have no word that it knows. """
    texts = [tokenizer.decode(tokens[begin:end])
             for begin, end in itertools.pairwise(offsets_of(lengths))]
    with progress_bar(total=len(texts), desc=name, unit=' samples') as bar:
        latents = np.asarray(encoder(texts, progress=bar.update))
    n_truncated = encoder.truncated
    encoder.truncated = 0

    # to ask the encoder about all texts would take too long, so it is asked about those with a
    # latent of zeros, or without a Latin letter
    odd = [text for text, z in zip(texts, latents) if not (z.any() and LATIN.search(text))]
    n_unknown = sum(encoder.remark(text) == NO_KNOWN_WORD for text in odd)
    return latents, n_truncated, n_unknown


def write_shard(claim, name, key, docs, given, tokenizer, encoder, max_tokens):
    """ Tokenizes, chunks and embeds the documents `docs`, and writes the files of the shard into
    the folder of a Claim. Returns its entry for meta.json. given: their latents (n, N, D), if these
    exist already. """
    # the samples, and their latents
    is_morgan = encoder is not None and encoder.record['id'] == 'morgan'
    tokens, lengths, owners, n_too_long = samples_of(
        docs, tokenizer, max_tokens, is_whole=given is not None or is_morgan)
    latents = None
    n_truncated = n_unknown = 0
    if given is not None:
        latents = given[owners]
    elif encoder is not None:
        latents, n_truncated, n_unknown = embed(encoder, tokenizer, tokens, lengths, name)

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
            lengths = lengths[is_good]
            owners = owners[is_good]
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
        f'{name}.offsets.npy': offsets_of(lengths),
    }
    if latents is not None:
        content[f'{name}.latents.npy'] = latents
    files = write_files(claim, content)

    # how many bytes of text the tokens are, a part of them at a time: each part is cast to int64
    n_bytes_of_id = np.array([len(piece) for piece in tokenizer.pieces])
    parts = np.array_split(tokens, 1 + len(tokens) // 2**24)
    n_of_id = sum(np.bincount(part, minlength=len(n_bytes_of_id)) for part in parts)

    # the note comes last: from now on the shard is whole
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
    write_files(claim, {f'{name}.whole.json': entry})
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

# -----------------------------------------------------------------------------
# All shards of a rank

def keep_or_write(claim, name, docs, plan, settings, tokenizer, encoder):
    """ The entry of a shard of these documents, and whether it was there already: then an earlier
    run wrote it from the same documents, latents and settings. """
    given = given_latents(docs)
    key = shard_key(docs, given, settings)
    check_same(claim.folder, name, key, plan.finished)
    entry = written_before(claim.folder, name, key)
    if entry:
        return entry, True
    return write_shard(claim, name, key, docs, given, tokenizer, encoder, plan.max_tokens), False


def write_shards(claim, plan, source, val, tokenizer, encoder):
    """ Writes the shards of this rank, and keeps the whole ones of an earlier run. Returns the
    entries for meta.json of the shards of all ranks, sorted by name. """
    here, n_ranks = rank(), world()
    n_shards = {}
    n_left = 0                                               # of this rank
    for split in SPLITS:
        n_shards[split] = -(-plan.totals[split] // source.shard_size)
        n_left += len(range(here, n_shards[split], n_ranks))
        # does a finished dataset have more shards than that? Then one of them would vanish
        check_same(claim.folder, f'{split}-{n_shards[split]:05d}', None, plan.finished)
    n_all = sum(n_shards.values())
    if n_all > MOST_SHARDS:
        raise ValueError(f'shard_size={source.shard_size:,} makes {n_all:,} shards, at most '
                         f'{MOST_SHARDS:,} expected: choose a larger --shard_size=')

    # what decides a shard's bytes, besides its documents
    settings = dict(
        counted=SUMS,                                        # another version counts other things
        files=plan.files,
        tokenizer=tokenizer.record,
        encoder=encoder and encoder.record,
        max_tokens=plan.max_tokens,
        threads=source.threads,
        embed_batch_size=source.embed_batch_size,
    )
    entries = []
    for split, i, docs in own_shards(plan, source, val, here, n_ranks):
        began = time.monotonic()
        name = f'{split}-{i:05d}'
        entry, is_old = keep_or_write(claim, name, docs, plan, settings, tokenizer, encoder)
        entries.append(entry)

        # how far it is
        n_left -= 1
        progress = 'there already'
        if not is_old:
            seconds = time.monotonic() - began
            eta = timedelta(seconds=int(n_left * seconds))
            progress = f'{len(docs) / seconds:,.0f} documents/s | ETA {eta}'
        print(f'{name} of {n_shards[split]}: {entry["documents"]:,} documents, '
              f'{entry["samples"]:,} samples, {entry["tokens"]:,} tokens | {progress}', flush=True)
        check_latents(entries, at_least=source.shard_size)
    entries = itertools.chain(*all_gather_object(entries))
    return sorted(entries, key=lambda entry: entry['name'])


def check_latents(entries, at_least=0):
    """ ValueError if too large a share of the latents cannot be stored in float16 (NaN, inf, or too
    large), or of the given ones is zeros. at_least: while shards are still being written, the share
    is of so many at least. In the end a warning where a few are so. """
    # they cannot be stored
    n_bad = sum(entry['nonfinite'] for entry in entries)
    n_good = sum(entry['samples'] for entry in entries)
    first = next((entry['flaw'] for entry in entries if entry.get('flaw')), '')
    said = f'{n_bad} of {n_bad + n_good} latents cannot be stored'
    if n_bad > MAX_NONFINITE * max(n_bad + n_good, at_least):
        raise ValueError(f'{said}, more than {MAX_NONFINITE:.1%}; the first: {first}')
    if n_bad and not at_least:
        warn(f'{said} and are dropped; the first: {first}')

    # they are zeros
    n_zero = sum(entry['zero'] for entry in entries)
    first = next((entry['first_zero'] for entry in entries if entry['first_zero']), '')
    said = f'{n_zero} of {n_good} latents are zeros, which say nothing of their texts'
    if n_zero > MAX_ZERO * max(n_good, at_least):
        raise ValueError(f'{said}, more than {MAX_ZERO:.0%}; the first: {first}: mend them, or '
                         'leave out these rows and their texts')
    if n_zero and not at_least:
        warn(f'{said}; the first: {first}')

# -----------------------------------------------------------------------------
# The dataset, on rank 0 alone

def latent_stats(folder, entries):
    """ Mean and std per dimension over the latents as stored, in float64, shard after shard. """
    # sums over parts of the shards, which are mapped: they may be larger than the memory
    n = 0
    total = 0.0
    square = 0.0
    for entry in entries:
        path = os.path.join(folder, f'{entry["name"]}.latents.npy')
        shape = (entry['samples'], *entry['latent_shape'])
        latents = read_array(path, 'float16', shape, mmap=True)
        for i in range(0, len(latents), 2**14):
            z = latents[i:i + 2**14].astype(np.float64).reshape(-1, latents.shape[-1])
            n = n + len(z)
            total = total + z.sum(0)
            square = square + (z * z).sum(0)

    # the variance of a constant may come out below 0 by rounding
    mean = total / n
    return dict(mean=mean, std=np.sqrt(np.maximum(square / n - mean**2, 0)))


def check_stats(stats):
    """ ValueError where no dimension of the latents varies, or most vary by less than a step of
    float16, in which they are stored: what they say is lost. A warning where some do. """
    if not stats.live.any():
        raise ValueError('all latents of train are the same, so nothing can be learned from them: '
                         'check what made them (--encoder, --latents_from), or prepare text only '
                         '(--encoder=none, no --latents_from)')

    # a step of float16 is large where the mean is far from 0
    mean = stats.mean.numpy()
    std = stats.std.numpy()
    steps = np.spacing(mean.astype(np.float16)).astype(np.float32)       # (D,)
    coarse = np.flatnonzero(stats.live.numpy() * (std < np.abs(steps)))
    if not len(coarse):
        return
    d = coarse[0]
    said = (f'{len(coarse)} of {len(mean)} dimensions of the latents vary by less than float16 '
            f'shows: dimension {d} is {mean[d]:.5g} +- {std[d]:.2g}, where its steps are '
            f'{abs(steps[d]):.2g}; subtract the mean of all latents from them, then divide by '
            'their spread')
    if len(coarse) > len(mean) / 2:
        raise ValueError(said)
    warn(said)


def splits_of(entries, max_tokens):
    """ {split: its entry in meta.json}: its shards, and the sums of their counts. ValueError where
    a split has no sample. """
    splits = {}
    for name in SPLITS:
        shards = [entry for entry in entries if entry['name'].startswith(f'{name}-')]
        if not shards and name not in ('train', 'val'):
            continue
        split = {key: sum(entry[key] for entry in shards) for key in SUMS}
        if not split['samples']:
            raise ValueError(f'{name}: none of {split["documents"]} documents is left, '
                             f'{split["longer_than_max_tokens"]} have more than '
                             f'max_tokens={max_tokens} tokens')
        splits[name] = split | dict(shards=shards)
    return splits


def finish(claim, plan, record, entries, tokenizer, encoder):
    """ Writes latent statistics, the bag and meta.json, and shows a summary. entries: of all
    shards. ValueError where they are no dataset. """
    check_latents(entries)
    shapes = {tuple(entry['latent_shape']) for entry in entries if entry['latent_shape']}
    if len(shapes) > 1:
        raise ValueError(f'latents of several shapes: {sorted(shapes)}')
    meta = dict(
        format=FORMAT,
        tokenizer=tokenizer.record,
        encoder=encoder and encoder.record,
        latent_shape=list(*shapes) or None,
        token_dtype=token_dtype(tokenizer),
        max_tokens=plan.max_tokens,
        splits=splits_of(entries, plan.max_tokens),
        files=dict(plan.files),
        source=record,
        counts=plan.counts,
    )

    # statistics of the latents; with same_as they are those of the other dataset
    own_stats = bool(shapes) and 'latent_stats.npz' not in plan.files
    if own_stats:
        stats = latent_stats(claim.folder, meta['splits']['train']['shards'])
        # a fingerprint gets one scale for all its bits. With a scale of its own a rare bit would
        # weigh more than the others, and so would an error in it
        if encoder and encoder.record['id'] == 'morgan':
            live = stats['std'] > 0
            stats['std'][live] = np.sqrt(np.mean(stats['std'][live] ** 2))
        meta['files'] |= write_files(claim, {'latent_stats.npz': stats})
    train = PackedDataset(claim.folder, 'train', meta=meta)
    val = PackedDataset(claim.folder, 'val', meta=meta)
    if own_stats:
        check_stats(train.stats)

    # a linear model from the tokens to the latent
    is_picture = bool(record.get('image_size'))
    if shapes and has_bag(meta['latent_shape'], is_picture, tokenizer.vocab_size):
        bag = fit_bag(train, tokenizer, encoder).numpy()
        meta['files'] |= write_files(claim, {'bag.npy': bag})
    write_files(claim, {'meta.json': meta})
    print_summary(train, val, tokenizer)
