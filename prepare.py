""" Corpora -> packed dataset: read, split, tokenize, chunk, embed, write.

    python prepare.py config/quickstart.py
    python prepare.py --input=captions.txt --encoder=minilm --out=data/captions
    python prepare.py --input=a.jsonl,b.csv.gz,folder --field=text --split_on=paragraph --tokenizer=r50k_base
    torchrun --standalone --nproc_per_node=8 prepare.py --hub_dataset=openwebtext --encoder=e5 --out=data/openwebtext
    python prepare.py --inspect=data/captions                                 # verify its files, and sum it up
    python prepare.py --export_dir=OLD --out=data/captions                    # a file a text, as systems before this one had it

A document is a line, a paragraph, a file, a record or a sequence (sources.py). Documents are split by their hash before chunking, so
none straddles train and val; what is longer than max_tokens is cut into several samples and nothing is lost. Latents are embedded from
exactly the text that the tokens decode to; where they are given, a document is one sample, and what is too long for that is dropped.

The shard is the unit: its bytes depend on its documents and the knobs, never on who wrote it or when; ranks take shards in turn. A file
appears by rename when it is whole, meta.json comes last. Run again after a kill or a damaged file, with any number of processes, and only
what is missing or broken is redone. Every document read is a document written or a counted drop.
"""
import errno
import fcntl
import glob
import hashlib
import heapq
import io
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path

# before torch reads it: threads that wait sleep, where spinning would take the core of whom they wait for
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import numpy as np
import torch
from tqdm import tqdm

import distributed
from checkpoint import pick_device
from configurator import configure, read_knobs, stop_on_error
from data import (COUNT, FORMAT, LATENT_SHAPE, SHARD, LatentStats, bpe_tokenizer, check_shard, has_fitting_sizes, load_tokenizer,
                  read_meta, sha256, train_bpe)
from distributed import everyone, on_first, rank, world
from encoders import fit_lsa, load_encoder
from files import check_fields, read_array, read_json, write_text
from inspection import covering, dropped, export, summary, verify
from sources import HUB, Source, documents, earlier_index, hub_commit, list_files, text_hash

# ---- what is read, details in sources.py
input = 'builtin'            # files, folders, globs, comma-separated: text, .jsonl, .csv, .tsv, .parquet, .fasta; each may be .gz;
                             # builtin: the interpreter's own documentation; digits: scikit-learn's
val_input = ''               # validation documents of their own; then nothing is split off the input
hub_dataset = ''             # instead of input: openwebtext | wikitext-103 | lm1b | fineweb-edu | a hub id
hub_revision = ''            # a commit; '': the newest, which is then written down
import_dir = ''              # instead of input: a folder of texts/, latents/, train_data.json; nothing is embedded again
latents_from = ''            # latents of the input's documents: .npy files or folders of them, a row a document
image_size = 0               # [0, 4096]; pixels a side, where input is digits or a folder of images with metadata.csv; the latents are
                             # its patches
patch = 8                    # [1, 4096]: pixels a side of a patch
channels = 3                 # 1 | 3; 1 is grey
split_on = 'line'            # line | paragraph | file: what a document is in a text file
encoding = 'utf-8'           # of text files: any of Python's codecs, such as latin-1, cp1252, utf-16
invalid_bytes = 'stop'       # stop | replace: what bytes do that are not of the encoding; replaced by U+FFFD, they are counted
field = 'text'               # <a name>: the document's field in .jsonl, column in .csv, .tsv, .parquet, hub datasets
min_length = 0               # [0, 1e9]: characters; residues of a protein
max_length = 0               # [0, 1e9]; 0: any
document_limit = 64_000_000  # [1, 1e9]: characters; a longer document, line of JSON or row of a table is never held in memory: it
                             # is dropped and counted
distinct = None              # None | bool: drop what was read before; None: of FASTA only
homology = 0.0               # [0, 1]; FASTA: clusters of so much sequence identity (over 80 % of their length) go to one split;
                             # needs mmseqs
val_fraction = .01           # (0, 1): of the documents, chosen by hash; at least one. An image goes with all its captions
max_documents = 0            # [0, 1e12]: only the first so many of the input; 0: all
# ---- what it becomes
tokenizer = ''               # bpe (fitted here) | byte | esm | a tiktoken name such as r50k_base; '': bpe, of FASTA esm
vocab_size = 4096            # [258, 2**20]: of bpe, EOS and PAD among them
max_tokens = None            # None | int [8, 65535]; None: what 99.9 % of the texts need, at most 127, with given latents what all need;
                             # longer documents become several samples; the model's seq_len is one more (EOS)
encoder = 'none'             # <a hub id, or a folder>: or none (text only) | lsa (fitted here) | minilm | e5 | bge | qwen | sonar | t5 |
                             # esm2
encoder_dims = 0             # [0, 65536]; lsa: dimensions (0: 128); others: Matryoshka cut (0: all)
encoder_dtype = 'float32'    # float32 | bfloat16 | float16, of the encoder's weights
pooling = None               # None | mean | cls | last | first; None: the encoder's own, as with the next three
normalize = None             # None | bool: L2
prefix = None                # None | '' | <a text>: put before every text
language = None              # None | <a code>; sonar: such as eng_Latn
embed_batch_size = 64        # [1, 65536]
device = 'auto'              # auto | cpu | cuda | <cuda:1 or the like>; of the encoder
threads = 1                  # [1, 1024]: of torch, a process; it changes the last bits of the latents
shard_size = 16384           # [1, 1e9]: documents per shard
out = ''                     # '': data/<name of input>
seed = 1337                  # [0, 2**63): of lsa
# ---- what exists already
inspect = ''                 # a dataset folder: verify and sum up, make nothing
export_dir = ''              # write the dataset `out` there in the earlier layout, make nothing else

FIT_DOCUMENTS = 100_000      # tokenizer and lsa are fitted on at most so many documents of train
MOST_TOKENS = 127            # is what max_tokens=None stands for at most, unless latents are given
MAX_NONFINITE = 1e-3         # share of the samples
MONTH = 30 * 86400.0         # seconds that a process waits for the others
OF_A_DATASET = r'((train|val)-\d{5}\..*|encoder\.npz|tokenizer\.json|latent_stats\.npz|meta\.json)'

# -----------------------------------------------------------------------------
# Splitting and chunking

def split_hash(doc, clusters):
    """ The hash that puts a document into train or val: its group's or its own, or that of its cluster's representative. """
    h = text_hash(doc.group or doc.text)
    return clusters.get(h, h)


def survey(source, has_val, clusters):
    """ One pass: counts, the hash below which a document is validation, how many are, and a sample of train to fit on.

    The sample is the train documents of smallest hash: uniform, and the same whatever the order of reading.
    """
    counts, limit = Counter(), 0 if has_val else int(val_fraction * 2**64)
    sample, lowest, highest, below = [], 2**64, -1, 0
    rarely = {} if sys.stderr.isatty() else dict(mininterval=60, delay=60)            # a log file gets a line a minute
    for doc in tqdm(documents(source, counts, max_documents), 'reading', unit=' documents', **rarely):
        h = split_hash(doc, clusters)
        lowest, highest, below = min(lowest, h), max(highest, h), below + (h < limit)
        if h >= limit:
            (heapq.heappush if len(sample) <= FIT_DOCUMENTS else heapq.heappushpop)(sample, (-h, doc.text))
    name = ', '.join(source.names)
    if not counts['kept']:
        raise ValueError(f'{name}: no documents ({dropped(counts) or "nothing"} among {counts["read"]} read)')
    if not has_val and not below:
        limit = lowest + 1                                   # val is never empty
        below = sum(-h < limit for h, _ in sample)
    if limit > highest:
        raise ValueError(f'{name}: {counts["kept"]} document(s) cannot be split into train and val; '
                         'give --val_input= or a finer --split_on=')
    texts = [text for h, text in sorted(sample, reverse=True) if -h >= limit][:FIT_DOCUMENTS]
    return counts, limit, below, texts


def mmseqs(*arguments):
    if not shutil.which('mmseqs'):
        raise ValueError(f'homology={homology}: mmseqs is not on PATH (https://github.com/soedinglab/MMseqs2), or set --homology=0')
    done = subprocess.run(['mmseqs', *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f'mmseqs {arguments[0]} failed with code {done.returncode}: {(done.stderr or done.stdout).strip()[-200:]}')
    return done.stdout.strip()


def homology_clusters(source):
    """ {hash of a sequence: hash of its cluster's representative}, by mmseqs easy-cluster at `homology` sequence identity. """
    with tempfile.TemporaryDirectory() as scratch:
        fasta, result = os.path.join(scratch, 'all.fasta'), os.path.join(scratch, 'result')
        with names_path(fasta), open(fasta, 'w') as f:
            for doc in documents(source, Counter(), max_documents):
                f.write(f'>{text_hash(doc.text)}\n{doc.text}\n')
        mmseqs('easy-cluster', fasta, result, os.path.join(scratch, 'tmp'), '--min-seq-id', str(homology), '-c', '0.8')
        with open(result + '_cluster.tsv') as f:
            return {int(member): int(representative) for representative, member in map(str.split, f)}


def routed(source, val, limit, clusters):
    """ (split, document), of all there are. """
    for doc in documents(source, Counter(), max_documents):
        yield 'val' if split_hash(doc, clusters) < limit else 'train', doc
    for doc in documents(val, Counter()) if val else ():
        yield 'val', doc


def shards(stream):
    """ (split, number, documents) of each shard, as it fills up. """
    waiting, numbers = dict(train=[], val=[]), Counter()
    for split, doc in stream:
        waiting[split].append(doc)
        if len(waiting[split]) == shard_size:
            yield split, numbers[split], waiting[split]
            waiting[split] = []
            numbers[split] += 1
    yield from ((split, numbers[split], docs) for split, docs in waiting.items() if docs)


class Chunker:
    """ Cuts the ids of a document into runs of at most max_tokens that join to the document, each of them valid text.

    A cut lies in the second half of the run, at a sentence's end if there is one, else before a word, else between
    characters. A vocabulary may hide every character's boundary inside its pieces; those are then spelled byte by byte.
    """

    def __init__(self, tokenizer, max_tokens):
        self.pieces, self.max_tokens = tokenizer.pieces, max_tokens
        self.byte_id = {piece[0]: i for i, piece in enumerate(self.pieces) if len(piece) == 1}
        self.inside = np.array([piece[:1] >= b'\x80' and piece[0] < 0xC0 for piece in self.pieces])   # begins inside a character
        self.space = np.array([piece[:1].isspace() for piece in self.pieces])
        self.ends = np.array([piece.endswith(b'\n') or piece.rstrip(b' "\')').endswith((b'.', b'!', b'?')) for piece in self.pieces])

    def __call__(self, ids):
        ids, most = np.asarray(ids, np.int64), self.max_tokens
        while len(ids) > most:
            here = ids[1:most + 1]                           # a cut at k lies before ids[k], k = 1..most
            late = np.arange(1, most + 1) > most // 2
            word = late & self.space[here]
            for allowed in (word & self.ends[ids[:most]], word, ~self.inside[here]):
                if allowed.any():
                    k = int(np.flatnonzero(allowed)[-1]) + 1
                    yield ids[:k]
                    ids = ids[k:]
                    break
            else:
                spelled = [self.byte_id[byte] for i in ids[:most] for byte in self.pieces[i]]
                ids = np.concatenate([spelled, ids[most:]])
        yield ids

def token_lengths(tok, texts):
    """ The number of tokens of each text, of any number of texts. """
    texts = iter(texts)
    while batch := list(itertools.islice(texts, 1024)):
        yield from (len(ids) for ids in tok.encode_batch(batch))


def fitting_max_tokens(tok, texts, every_document):
    """ The max_tokens that None stands for. `texts` is a sample of train. Where latents are given a longer text would be dropped,
    so there `every_document` counts, an iterable of all there is; else that is None. """
    if every_document is None:
        lengths = sorted(token_lengths(tok, texts))
        n = min(covering(lengths), MOST_TOKENS)
    else:
        lengths = sorted(token_lengths(tok, (doc.text for doc in every_document)))
        n = min(covering(lengths, of_1000=1000), 65535)
    covered = sum(length <= n for length in lengths)
    many = 'are dropped' if every_document else 'become several samples'
    print(f'max_tokens={n}: {covered:,} of {len(lengths):,} texts fit, longer ones {many} (the median has {lengths[len(lengths) // 2]:,} '
          f'tokens, the longest {lengths[-1]:,})', flush=True)
    return n

# -----------------------------------------------------------------------------
# Writing

@contextmanager
def names_path(path, size=0):
    """ Inside, a write that fails is an OSError that names the path, and on a full disk what is needed and what is free. """
    try:
        yield
    except OSError as error:
        if error.filename:                                   # it names its path itself
            raise
        reason = f'{path}: cannot be written ({error.strerror or error})'
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(os.path.dirname(path) or '.').free
            needed = f'it needs {size:,} bytes, ' if size else ''
            reason += f': {needed}{free:,} are free there; make room and run again'
        raise OSError(reason) from None


def write_file(path, data):
    """ Write whole or not at all; an equal file is left alone. Returns its manifest entry.

    meta.json goes before anything it describes changes: where it stands, the dataset is complete.
    """
    entry = dict(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    if not is_whole(path, entry):
        meta = os.path.join(os.path.dirname(path), 'meta.json')
        with suppress(FileNotFoundError):
            os.remove(meta)
        with names_path(path, len(data)):
            try:
                with open(path + '.tmp', 'wb') as f:
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
                os.replace(path + '.tmp', path)
            except OSError:
                with suppress(OSError):
                    os.remove(path + '.tmp')
                raise
    return entry


def is_whole(path, entry):
    return os.path.isfile(path) and os.path.getsize(path) == entry['bytes'] and sha256(path) == entry['sha256']


def as_bytes(save, *arrays, **named):
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


def as_json(value):
    return (json.dumps(value, indent=1, ensure_ascii=False) + '\n').encode()


def shard_key(docs, given, settings):
    """ A digest of all that decides a shard's bytes: its documents, the latents that they bring along, and the settings. """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for doc in docs:
        data = doc.text.encode()
        digest.update(f'{len(data)}:'.encode() + data)
    if given is not None:
        digest.update(f'{given.shape}'.encode())
        digest.update(given)
    return digest.hexdigest()


def token_dtype(tok):
    return 'uint16' if tok.vocab_size <= 2**16 else 'uint32'


def given_latents(docs):
    """ The latents that documents bring along, (n, N, D) float16, or None. """
    if docs[0].latent is None:
        return None
    with np.errstate(over='ignore'):                         # too large becomes inf, which is counted
        latents = [doc.latent().astype(np.float16) for doc in docs]
    for doc, latent in zip(docs, latents):
        if latent.shape != latents[0].shape:
            raise ValueError(f'latents are of shapes {latents[0].shape} and {latent.shape}, the latter of {doc.text[:40]!r}')
    return np.stack(latents)


def write_shard(folder, name, first, docs, given, tok, encode):
    """ Tokenize, chunk and embed the documents `docs`, the first of which is number `first` of its split; write the shard's files; its
    entry for meta.json. given: their latents (n, N, D), where these exist already. """
    chunk = Chunker(tok, max_tokens)
    runs, ids, latents, too_long, nonfinite, truncated = [], [], None, 0, 0, 0
    for i, encoded in enumerate(tok.encode_batch([doc.text for doc in docs])):
        parts = list(chunk(encoded))
        if given is not None and len(parts) > 1:
            too_long += 1
            continue
        runs += parts
        ids += [(first + i, k) for k in range(len(parts))]
    if given is not None:
        latents = given[[i - first for i, _ in ids]]
    elif encode is not None:
        with tqdm(total=len(runs), desc=name, unit=' samples', leave=False, disable=None) as bar:
            latents = encode([tok.decode(run) for run in runs], progress=bar.update).numpy()      # (n, N, D)
        truncated, encode.truncated = encode.truncated, 0    # texts longer than the encoder reads
    if latents is not None:
        with np.errstate(over='ignore'):
            latents = latents.astype(np.float16)
        finite = np.isfinite(latents).all((1, 2))
        nonfinite = int((~finite).sum())
        latents, runs, ids = latents[finite], [r for r, ok in zip(runs, finite) if ok], [i for i, ok in zip(ids, finite) if ok]
    lengths = [len(run) for run in runs]
    tokens = np.concatenate(runs or [np.empty(0)]).astype(np.dtype(token_dtype(tok)).newbyteorder('<'))
    sizes = np.array([len(piece) for piece in tok.pieces])
    path = os.path.join(folder, name)
    files = {f'{name}.tokens.bin': write_file(path + '.tokens.bin', tokens.tobytes()),
             f'{name}.offsets.npy': write_file(path + '.offsets.npy', as_bytes(np.save, np.cumsum([0] + lengths, dtype=np.int64))),
             f'{name}.ids.npy': write_file(path + '.ids.npy', as_bytes(np.save, np.array(ids, np.int64).reshape(-1, 2)))}
    if latents is not None:
        files[f'{name}.latents.npy'] = write_file(path + '.latents.npy', as_bytes(np.save, latents))
    return dict(name=name, samples=len(runs), documents=len(docs), tokens=len(tokens), bytes=int(sizes[tokens].sum()),
                longest=max(lengths, default=0), nonfinite=nonfinite, longer_than_max_tokens=too_long, truncated=truncated,
                latent_shape=None if latents is None else list(latents.shape[1:]), files=files)


SUMS = ('samples', 'documents', 'tokens', 'bytes', 'nonfinite', 'longer_than_max_tokens', 'truncated')
WRITTEN = {key: COUNT for key in SUMS} | dict(key='<a digest>', latent_shape=LATENT_SHAPE)    # what this script writes of a shard


def latent_stats(folder, entries):
    """ Per-dimension mean and std over the latents as stored, accumulated in float64, shard after shard. """
    n, total, square = 0, 0., 0.
    for entry in entries:
        shape = (entry['samples'], *entry['latent_shape'])
        latents = read_array(os.path.join(folder, f'{entry["name"]}.latents.npy'), 'float16', shape, mmap=True)
        for i in range(0, len(latents), 2**14):
            z = latents[i:i + 2**14].astype(np.float64).reshape(-1, latents.shape[-1])
            n, total, square = n + len(z), total + z.sum(0), square + (z * z).sum(0)
    mean = total / n
    return dict(mean=mean, std=np.sqrt(np.maximum(square / n - mean**2, 0)))


def write_shards(folder, stream, totals, settings, tok, encode):
    """ This rank's shards; whole ones of an earlier run are kept. Returns {split: its entry for meta.json}, of all ranks. """
    entries, seen, done, seconds = [], Counter(), 0, 0.0
    n_shards = {split: -(-total // shard_size) for split, total in totals.items()}
    for turn, (split, i, docs) in enumerate(shards(stream)):
        seen[split] += len(docs)
        if turn % world != rank:
            continue
        began, given = time.monotonic(), given_latents(docs)
        name, key = f'{split}-{i:05d}', shard_key(docs, given, settings)
        entry, line = read_entry(folder, name, tok), 'there already'
        if not entry or entry.get('key') != key or not all(is_whole(os.path.join(folder, f), e) for f, e in entry['files'].items()):
            entry = write_shard(folder, name, i * shard_size, docs, given, tok, encode) | dict(key=key)
            write_entry(folder, entry)
            done, seconds = done + len(docs), seconds + time.monotonic() - began
            to_come = (sum(n_shards.values()) - turn - 1) // world * shard_size
            line = f'{done / seconds:,.0f} documents/s{" a rank" * (world > 1)} | ETA {timedelta(seconds=int(to_come * seconds / done))}'
        entries.append(entry)
        print(f'{name} of {n_shards[split]}: {entry["documents"]:,} documents, {entry["samples"]:,} samples, {entry["tokens"]:,} tokens | '
              + line, flush=True)
        check_nonfinite(entries, at_least=shard_size)
    if seen != totals:
        raise ValueError(f'{dict(totals)} documents were counted, and then {dict(seen)} read: the input has changed meanwhile; run again')
    entries = sorted(itertools.chain(*everyone(entries)), key=lambda entry: entry['name'])
    check_nonfinite(entries)
    own = {split: [entry for entry in entries if entry['name'].startswith(f'{split}-')] for split in totals}
    return {split: {key: sum(entry[key] for entry in own[split]) for key in SUMS} | dict(shards=own[split]) for split in own}


def check_nonfinite(entries, at_least=0):
    bad, seen = (sum(entry[key] for entry in entries) for key in ('nonfinite', 'samples'))
    if bad > MAX_NONFINITE * max(bad + seen, at_least):
        raise ValueError(f'{bad} of {bad + seen} latents are NaN or inf, more than {MAX_NONFINITE:.1%}: the encoder is broken')


def write_entry(folder, entry):
    """ A note beside a whole shard: what meta.json will say of it. """
    path, text = Path(folder, f'{entry["name"]}.whole.json'), json.dumps(entry, indent=1)
    with names_path(path, len(text)):
        write_text(path, text)


def read_entry(folder, name, tok):
    """ The note beside a shard; None where there is none, or one that cannot be right: the shard is then done again. """
    path = os.path.join(folder, f'{name}.whole.json')
    with suppress(ValueError):
        entry = read_json(path, SHARD)
        check_fields(entry, WRITTEN, path)
        check_shard(entry, name.split('-')[0], entry['latent_shape'] is not None, path)
        if entry['name'] == name and has_fitting_sizes(entry, np.dtype(token_dtype(tok)).itemsize):
            return entry

# -----------------------------------------------------------------------------
# The whole

def check_knobs():
    """ (name, folder, train's source, val's or None, and for meta.json all that decides what is in the dataset). Settles what is ''. """
    global tokenizer, hub_revision
    knobs = read_knobs(__file__)[0]
    given = {field.name: globals()[field.name] for field in fields(Source) if field.name in knobs}
    if (hub_dataset or import_dir) and input == 'builtin':   # the default gives way
        given['input'] = ''
    source = Source(**given | dict(distinct=False))
    if not source.names:
        raise ValueError('input: name files, folders or globs, comma-separated, or builtin')
    is_protein = source.is_fasta
    source = replace(source, distinct=is_protein if distinct is None else distinct)
    if hub_dataset and not hub_revision and not os.path.isdir(hub_dataset):
        hub_revision = on_rank_0(hub_commit, hub_dataset)
        source = replace(source, hub_revision=hub_revision)
    if val_input and (not source.input or source.has_latents or homology):
        raise ValueError('val_input goes with an input of texts, without latents_from, image_size or homology')
    if homology and not is_protein:
        raise ValueError(f'homology={homology} is for FASTA')
    if encoder == 'lsa' and source.has_latents:
        raise ValueError('encoder=lsa is fitted here, so it is not that of latents made elsewhere: name theirs, or --encoder=none')
    val = replace(source, input=val_input) if val_input else \
        replace(source, hub_split=HUB[hub_dataset]['val']) if 'val' in HUB.get(hub_dataset, {}) else \
        replace(source, import_split='validation') if import_dir and os.path.exists(earlier_index(import_dir, 'validation')) else None
    tokenizer = tokenizer or ('esm' if is_protein else 'bpe')
    is_folder = source.import_dir or os.path.isdir(source.input)
    name = os.path.basename(os.path.abspath(source.import_dir or source.input) if is_folder else source.names[0]).split('.')[0]
    if not name and not out:
        raise ValueError('no name for the dataset: give --out=data/NAME')
    record = {knob: globals()[knob] for knob in knobs if knob not in ('out', 'device', 'inspect', 'export_dir')}
    record |= dict(input=source.names, val_input=[name for name, _ in list_files(val_input)], distinct=source.distinct,
                   hub_dataset=source.names[0] if hub_dataset else '', import_dir=source.names[0] if import_dir else '',
                   latents_from=[os.path.basename(os.path.normpath(part)) for part in latents_from.split(',') if part],
                   mmseqs=on_rank_0(mmseqs, 'version') if homology else None,
                   python=platform.python_version() if source.input == 'builtin' else None)
    return name, os.path.normpath(out or os.path.join('data', name)), source, val, record


def on_rank_0(function, *args):
    """ What it returns, everywhere. Its error is rank 0's to tell. """
    result, error = on_first(function, *args)
    if error:
        raise error if rank == 0 else SystemExit(2)
    return result


@contextmanager
def in_use(folder):
    """ Inside, nobody else may hold(fcntl.LOCK_EX) the folder, which rank 0 does until all ranks hold(fcntl.LOCK_SH) it: neither another
    prepare.py nor what a killed one left running writes there. The lock leaves no file, and dies with its process. """
    handle = os.open(folder, os.O_RDONLY)

    def hold(kind):
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f'{folder} is in use by another prepare.py: wait for it, end it, or choose another --out=') from None
        except OSError as error:
            print(f'warning: {folder} cannot be locked ({error}): see to it that one prepare.py runs at a time', file=sys.stderr)
    try:
        yield hold
    finally:
        os.close(handle)


def known_shards(folder, record):
    """ What an earlier run has written stays known though meta.json may go (write_file): a note beside each whole shard. """
    for path in glob.glob(os.path.join(glob.escape(folder), '*.tmp')):
        if re.fullmatch(OF_A_DATASET, os.path.basename(path)[:-4]):
            os.remove(path)
    path = Path(folder, 'meta.json')
    try:
        json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):  # none, or a torn one: what has no note is redone
        return
    try:
        meta = read_meta(folder)
    except ValueError as error:                              # of another version, or not ours: nobody's to overwrite
        reason = str(error).partition('; run prepare.py again')[0]
        raise ValueError(f'{reason}; delete that folder or choose another --out=') from None
    source = dict(meta.get('source', {}))
    entries = [entry for split in meta['splits'].values() for entry in split['shards']]
    defaults = read_knobs(__file__)[0]
    if record['max_tokens'] == meta.get('max_tokens'):       # the number that None stood for is the same number
        source['max_tokens'] = record['max_tokens']
    for key in record:
        found = source.get(key, defaults.get(key))           # a knob younger than the dataset was at its default
        if found != record[key]:
            keep = f'--max_tokens={found} keeps it, or ' if key == 'max_tokens' and found else ''
            raise ValueError(f'{folder} holds a dataset with {key} = {found!r}, not {record[key]!r}; '
                             f'{keep}choose another --out= or delete that folder')
    for entry in entries:
        write_entry(folder, entry)


def plan(folder, source, val, record, hold, tok):
    """ Rank 0 alone: what was there, what there is to do, and what is fitted on it. """
    hold(fcntl.LOCK_EX)
    known_shards(folder, record)
    clusters = homology_clusters(source) if homology else {}
    counts, limit, n_val, texts = survey(source, val is not None, clusters)
    n_train, counts = counts['kept'] - n_val, dict(input=counts)
    if val is not None:
        counts['val_input'] = Counter()
        n_val = sum(1 for _ in documents(val, counts['val_input']))
        if not n_val:
            raise ValueError(f'{", ".join(val.names)}: no documents for val ({counts["val_input"]["read"]} read)')
    files, lsa = {}, None                                    # fitted once; all ranks read them from their files
    if tokenizer == 'bpe':
        files['tokenizer.json'] = write_file(os.path.join(folder, 'tokenizer.json'), train_bpe(texts, vocab_size).encode())
    if encoder == 'lsa':
        lsa = fit_lsa(texts, encoder_dims or 128, seed)
        files['encoder.npz'] = write_file(os.path.join(folder, 'encoder.npz'), as_bytes(lambda f: lsa.save(f)))
    tok = tok or bpe_tokenizer(os.path.join(folder, 'tokenizer.json'))
    every_document = (doc for _, doc in routed(source, val, limit, clusters)) if source.has_latents else None
    most = max_tokens or fitting_max_tokens(tok, texts, every_document)
    hold(fcntl.LOCK_SH)
    return limit, clusters, Counter(train=n_train, val=n_val), counts, files, lsa and lsa.record, most


def make_encoder():
    """ The encoder, if it is one that exists already. """
    if encoder in ('none', 'lsa'):
        return None
    where = pick_device(device)
    if where == 'cuda':
        where = f'cuda:{distributed.local_rank % torch.cuda.device_count()}'
    return load_encoder(encoder, where, pooling=pooling, normalize=normalize, prefix=prefix, dimension=encoder_dims or None,
                        dtype=encoder_dtype, language=language, batch_size=embed_batch_size)


def check_given(stream, encode):
    """ Given latents must be what the encoder named beside them would give: centred on their mean, a mean cosine of .95 at least. """
    docs = [doc for doc in itertools.islice(stream, 32) if np.isfinite(doc.latent()).all()]
    if len(docs) < 3:
        return
    own, given = encode([doc.text for doc in docs])[:, 0], torch.from_numpy(given_latents(docs)).float()
    if given.shape[1:] != (1, own.shape[1]):
        raise ValueError(f'the latents given are {tuple(given.shape[1:])}, encoder {encoder} makes (1, {own.shape[1]}): '
                         'name their encoder, or none')
    cosine = torch.nn.functional.cosine_similarity(own - own.mean(0), given[:, 0] - given[:, 0].mean(0)).mean().item()
    if not cosine >= .95:
        raise ValueError(f'the latents given are not those of encoder {encoder}: over {len(docs)} texts their mean centred cosine '
                         f'with its own is {cosine:.3f}; name their encoder, with its --prefix and --pooling, or --encoder=none')


def prepare():
    global max_tokens
    name, folder, source, val, record = check_knobs()
    torch.set_num_threads(threads)
    os.makedirs(folder, exist_ok=True)
    with in_use(folder) as hold:
        tok, encode = None if tokenizer == 'bpe' else load_tokenizer(tokenizer), make_encoder()   # what fails does so before the reading
        limit, clusters, totals, counts, files, lsa, max_tokens = on_rank_0(plan, folder, source, val, record, hold, tok)
        hold(fcntl.LOCK_SH)
        tok = tok or bpe_tokenizer(os.path.join(folder, 'tokenizer.json'))
        encode = load_encoder(lsa, folder=folder) if lsa else encode
        if encode and source.has_latents:
            check_given(documents(source, Counter()), encode)
        settings = dict(files=files, tokenizer=tok.record, encoder=encode and encode.record, max_tokens=max_tokens, threads=threads,
                        embed_batch_size=embed_batch_size)
        splits = write_shards(folder, routed(source, val, limit, clusters), totals, settings, tok, encode)
        on_rank_0(finish, name, folder, record, tok, encode, splits, files, counts)


def finish(name, folder, record, tok, encode, splits, files, counts):
    """ Rank 0 alone: statistics, meta.json, and a look at it. """
    shapes = {tuple(entry['latent_shape']) for split in splits.values() for entry in split['shards'] if entry['latent_shape']}
    if len(shapes) > 1:
        raise ValueError(f'latents of several shapes: {sorted(shapes)}')
    for split, totals in splits.items():
        if not totals['samples']:
            raise ValueError(f'{split}: none of {totals["documents"]} documents is left, {totals["longer_than_max_tokens"]} have more than '
                             f'max_tokens={max_tokens} tokens')
    if shapes:
        stats = latent_stats(folder, splits['train']['shards'])
        if not LatentStats(**stats).live.any():
            n = splits['train']['samples']
            raise ValueError(f'train: all {n} latents are the same, no dimension varies, so nothing can '
                             'be learned from them: check what made them (--encoder, --latents_from), '
                             'or prepare text only (--encoder=none, no --latents_from)')
        files = files | {'latent_stats.npz': write_file(os.path.join(folder, 'latent_stats.npz'), as_bytes(np.savez, **stats))}
    meta = dict(format=FORMAT, name=name, tokenizer=tok.record, encoder=encode and encode.record, latent_shape=list(*shapes) or None,
                token_dtype=token_dtype(tok), max_tokens=max_tokens, splits=splits, files=files, source=record,
                counts={key: dict(count) for key, count in counts.items()})
    write_file(os.path.join(folder, 'meta.json'), as_json(meta))
    listed = {*files, 'meta.json', *(f for split in splits.values() for entry in split['shards'] for f in entry['files'])}
    for path in glob.glob(os.path.join(glob.escape(folder), '*')):       # notes, and files of an earlier attempt
        if os.path.basename(path) not in listed and re.fullmatch(OF_A_DATASET, os.path.basename(path)):
            os.remove(path)
    summary(folder)


def main():
    configure(globals())
    if (inspect or export_dir) and rank:
        return
    with stop_on_error():
        if inspect:
            verify(inspect)
            summary(inspect)
        elif export_dir:
            with names_path(os.path.join(export_dir, '')):
                export(os.path.normpath(out), export_dir)
        else:
            with stop_on_error(code=4):
                distributed.reach_master(6.0)
                distributed.join('cpu', MONTH)
            prepare()
            distributed.leave()


if __name__ == '__main__':
    main()
