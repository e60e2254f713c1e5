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
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from tqdm import tqdm

import distributed
from checkpoint import pick_device
from configurator import configure, stop_on_error
from data import FORMAT, PackedDataset, bpe_tokenizer, check_file, load_tokenizer, read_meta, sha256, train_bpe
from distributed import everyone, on_first, rank, world
from encoders import fit_lsa, load_encoder
from sources import DROPS, HUB, Source, documents, earlier_index, hub_commit, is_fasta, list_files, text_hash

# ---- what is read, details in sources.py
input = 'builtin'            # files, folders, globs, comma-separated: text, .jsonl, .csv, .tsv, .parquet, .fasta; each may be .gz;
                             # builtin: the interpreter's own documentation
val_input = ''               # validation documents of their own; then nothing is split off the input
hub_dataset = ''             # instead of input: openwebtext | wikitext-103 | lm1b | fineweb-edu | a hub id
hub_revision = ''            # a commit; '': the newest, which is then written down
import_dir = ''              # instead of input: a folder of texts/, latents/, train_data.json; nothing is embedded again
latents_from = ''            # latents of the input's documents: .npy files or folders of them, a row a document
image_size = 0               # input is a folder of images with metadata.csv: pixels a side; the latents are its patches
patch = 8                    # pixels a side of a patch
channels = 3                 # 1: grey
split_on = 'line'            # line | paragraph | file: what a document is in a text file
field = 'text'               # the document's field in .jsonl, column in .csv, .tsv, .parquet, hub datasets
min_length = 0               # characters; residues of a protein
max_length = 0               # 0: any
distinct = None              # drop what was read before; None: of FASTA only
homology = 0.0               # FASTA: proteins of so much sequence identity go to one split; needs mmseqs
val_fraction = .01           # of the documents, chosen by hash; at least one
max_documents = 0            # only the first so many of the input; 0: all
# ---- what it becomes
tokenizer = ''               # bpe (fitted here) | byte | esm | a tiktoken name such as r50k_base; '': bpe, of FASTA esm
vocab_size = 4096            # of bpe, EOS and PAD among them
max_tokens = 127             # longer documents become several samples; the model's seq_len is one more (EOS)
encoder = 'none'             # none (text only) | lsa (fitted here) | minilm | e5 | bge | qwen | sonar | t5 | hub id | folder
encoder_dims = 0             # lsa: dimensions (0: 128); others: Matryoshka cut (0: all)
encoder_dtype = 'float32'    # float32 | bfloat16 | float16, of the encoder's weights
pooling = None               # mean | cls | last; None: the encoder's own, as with the next three
normalize = None             # L2
prefix = None                # put before every text
language = None              # sonar: such as eng_Latn
embed_batch_size = 64
device = 'auto'              # cuda when there is one, else cpu; for the encoder
threads = 1                  # of torch, a process; it changes the last bits of the latents
shard_size = 16384           # documents per shard
out = ''                     # '': data/<name of input>
seed = 1337                  # of lsa
# ---- what exists already
inspect = ''                 # a dataset folder: verify and sum up, make nothing
export_dir = ''              # write the dataset `out` there in the earlier layout, make nothing else

SPLIT_ON = ('line', 'paragraph', 'file')
FIT_DOCUMENTS = 100_000      # tokenizer and lsa are fitted on at most so many documents of train
MAX_NONFINITE = 1e-3         # share of the samples
MONTH = 30 * 86400.0         # seconds that a process waits for the others

# -----------------------------------------------------------------------------
# Splitting and chunking

def survey(source, has_val, clusters):
    """ One pass: counts, the hash below which a document is validation, how many are, and a sample of train to fit on.

    The sample is the train documents of smallest hash: uniform, and the same whatever the order of reading.
    """
    counts, limit = Counter(), 0 if has_val else int(val_fraction * 2**64)
    sample, lowest, highest, below = [], 2**64, -1, 0
    for text, _ in tqdm(documents(source, counts, max_documents), 'reading', unit=' documents', disable=None):
        h = split_hash(text, clusters)
        lowest, highest, below = min(lowest, h), max(highest, h), below + (h < limit)
        if h >= limit:
            (heapq.heappush if len(sample) <= FIT_DOCUMENTS else heapq.heappushpop)(sample, (-h, text))
    if not counts['kept']:
        raise ValueError(f'{spec_of(source)}: no documents ({dropped(counts) or "nothing"} among {counts["read"]} read)')
    if not has_val and not below:
        limit = lowest + 1                                   # val is never empty
        below = sum(-h < limit for h, _ in sample)
    if limit > highest:
        raise ValueError(f'{spec_of(source)}: {counts["kept"]} document(s) cannot be split into train and val; '
                         'give --val_input= or a finer --split_on=')
    texts = [text for h, text in sorted(sample, reverse=True) if -h >= limit][:FIT_DOCUMENTS]
    return counts, limit, below, texts


def split_hash(text, clusters):
    """ The hash that puts a document into train or val: its own, or that of its cluster's representative. """
    h = text_hash(text)
    return clusters.get(h, h)


def homology_clusters(source):
    """ {hash of a sequence: hash of its cluster's representative}, by mmseqs easy-cluster at `homology` sequence identity. """
    if not shutil.which('mmseqs'):
        raise ValueError(f'homology={homology}: mmseqs is not on PATH (https://github.com/soedinglab/MMseqs2), or set --homology=0')
    with tempfile.TemporaryDirectory() as scratch:
        fasta, result = os.path.join(scratch, 'all.fasta'), os.path.join(scratch, 'result')
        with open(fasta, 'w') as f:
            for text, _ in documents(source, Counter(), max_documents):
                f.write(f'>{text_hash(text)}\n{text}\n')
        command = ['mmseqs', 'easy-cluster', fasta, result, os.path.join(scratch, 'tmp'), '--min-seq-id', str(homology), '-c', '0.8']
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f'mmseqs failed with code {done.returncode}: {(done.stderr or done.stdout).strip()[-200:]}')
        with open(result + '_cluster.tsv') as f:
            return {int(member): int(representative) for representative, member in map(str.split, f)}


def dropped(counts):
    return ', '.join(f'{counts[reason]:,} {reason}' for reason in DROPS if counts.get(reason))


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

# -----------------------------------------------------------------------------
# Writing

def write_file(path, data):
    """ Write whole or not at all; an equal file is left alone. Returns its manifest entry.

    meta.json goes before anything it describes changes: where it stands, the dataset is complete.
    """
    entry = dict(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    if not is_whole(path, entry):
        meta = os.path.join(os.path.dirname(path), 'meta.json')
        with suppress(FileNotFoundError):
            os.remove(meta)
        with open(path + '.tmp', 'wb') as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + '.tmp', path)
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
    for text, _ in docs:
        data = text.encode()
        digest.update(f'{len(data)}:'.encode() + data)
    if given is not None:
        digest.update(f'{given.shape}'.encode() + given.tobytes())
    return digest.hexdigest()


def token_dtype(tok):
    return 'uint16' if tok.vocab_size <= 2**16 else 'uint32'


def given_latents(docs):
    """ The latents that documents bring along, (n, N, D) float32, or None. """
    if docs[0].latent is None:
        return None
    latents = [doc.latent() for doc in docs]
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


def latent_stats(folder, entries):
    """ Per-dimension mean and std over the latents as stored, accumulated in float64, shard after shard. """
    n, total, square = 0, 0., 0.
    for entry in entries:
        latents = np.load(os.path.join(folder, f'{entry["name"]}.latents.npy'), mmap_mode='r')
        for i in range(0, len(latents), 2**14):
            z = latents[i:i + 2**14].astype(np.float64).reshape(-1, latents.shape[-1])
            n, total, square = n + len(z), total + z.sum(0), square + (z * z).sum(0)
    mean = total / n
    return dict(mean=mean, std=np.sqrt(np.maximum(square / n - mean**2, 0)))

# -----------------------------------------------------------------------------
# The parts

def fit(folder, texts):
    """ What is fitted here, once, by rank 0; all read it from its file: (manifest entries, the record of lsa or None). """
    files, record = {}, None
    if tokenizer == 'bpe':
        files['tokenizer.json'] = write_file(os.path.join(folder, 'tokenizer.json'), train_bpe(texts, vocab_size).encode())
    if encoder == 'lsa' and not has_given_latents():
        lsa = fit_lsa(texts, encoder_dims or 128, seed)
        files['encoder.npz'] = write_file(os.path.join(folder, 'encoder.npz'), as_bytes(lambda f: lsa.save(f)))
        record = lsa.record
    return files, record


def make_tokenizer(folder):
    return bpe_tokenizer(os.path.join(folder, 'tokenizer.json')) if tokenizer == 'bpe' else load_tokenizer(tokenizer)


def make_encoder(folder, record):
    """ The encoder, or None; record: of an lsa that is fitted already. """
    if encoder == 'none':
        return None
    if record:
        return load_encoder(record, folder=folder)
    where = pick_device(device)
    if where == 'cuda':
        where = f'cuda:{distributed.local_rank % torch.cuda.device_count()}'
    return load_encoder(encoder, where, pooling=pooling, normalize=normalize, prefix=prefix, dimension=encoder_dims or None,
                        dtype=encoder_dtype, language=language, batch_size=embed_batch_size)


def has_given_latents():
    return bool(import_dir or latents_from or image_size)


def check_given(docs, encode):
    """ Given latents must be what the encoder named beside them would give: centred on their mean, a cosine of .95 at least. """
    docs = list(itertools.islice(docs, 32))
    own, given = encode([doc.text for doc in docs])[:, 0], torch.from_numpy(given_latents(docs))
    if given.shape[1:] != (1, own.shape[1]):
        raise ValueError(f'the latents given are {tuple(given.shape[1:])}, encoder {encoder} makes (1, {own.shape[1]}): '
                         'name their encoder, or none')
    cosine = torch.nn.functional.cosine_similarity(own - own.mean(0), given[:, 0] - given[:, 0].mean(0)).mean().item()
    if len(docs) > 2 and not cosine > .95:
        raise ValueError(f'the latents given are not those of encoder {encoder}: over {len(docs)} texts their mean centred cosine '
                         f'with its own is {cosine:.3f}; name their encoder, with its --prefix and --pooling, or --encoder=none')


def known_shards(folder, source):
    """ What an earlier run has written stays known though meta.json may go (write_file): a note beside each whole shard. """
    for stale in glob.glob(os.path.join(glob.escape(folder), '*.tmp')):
        os.remove(stale)
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        with open(path, encoding='utf-8') as f:
            meta = json.load(f)
        for key in source:
            if meta['source'].get(key) != source[key]:
                raise ValueError(f'{folder} holds a dataset with {key} = {meta["source"].get(key)!r}, not {source[key]!r}; '
                                 'choose another --out= or delete that folder')
        for split in meta['splits'].values():
            for entry in split['shards']:
                write_entry(folder, entry)


def write_entry(folder, entry):
    path = os.path.join(folder, f'{entry["name"]}.whole.json')
    with open(path + '.tmp', 'wb') as f:
        f.write(as_json(entry))
    os.replace(path + '.tmp', path)


def read_entry(folder, name):
    with suppress(FileNotFoundError, ValueError), open(os.path.join(folder, f'{name}.whole.json'), encoding='utf-8') as f:
        return json.load(f)


def write_split(folder, split, docs, total, settings, tok, encode):
    """ This rank's shards of a split; the split's entry for meta.json. Whole shards of an earlier run are kept. """
    entries, n_shards, seen, done, start = [], -(-total // shard_size), 0, 0, time.monotonic()
    for i in itertools.count():
        batch = list(itertools.islice(docs, shard_size))
        seen += len(batch)
        if not batch:
            break
        if i % world != rank:
            continue
        given = given_latents(batch)
        name, key = f'{split}-{i:05d}', shard_key(batch, given, settings)
        entry, is_new = read_entry(folder, name), False
        if not entry or entry.get('key') != key or not all(is_whole(os.path.join(folder, f), e) for f, e in entry['files'].items()):
            entry, is_new = write_shard(folder, name, i * shard_size, batch, given, tok, encode) | dict(key=key), True
            write_entry(folder, entry)
        entries.append(entry)
        done += len(batch) if is_new else 0
        speed = done / (time.monotonic() - start)
        to_come = max(0, n_shards - i - 1) // world * shard_size
        print(f'{name} of {n_shards}: {entry["documents"]:,} documents, {entry["samples"]:,} samples, {entry["tokens"]:,} tokens | '
              + (f'{speed:,.0f} documents/s | ETA {clock(to_come / speed)}' if is_new else 'there already'), flush=True)
        check_nonfinite(split, entries, shard_size if len(entries) * world < n_shards else 0)
    if seen != total:
        raise ValueError(f'{split}: {total} documents were counted, and then {seen} read: the input has changed meanwhile; run again')
    entries = sorted(itertools.chain(*everyone(entries)), key=lambda entry: entry['name'])
    check_nonfinite(split, entries)
    return {key: sum(entry[key] for entry in entries) for key in SUMS} | dict(shards=entries)


def clock(seconds):
    return f'{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}'


def check_nonfinite(split, entries, at_least=0):
    bad, seen = (sum(entry[key] for entry in entries) for key in ('nonfinite', 'samples'))
    if bad > MAX_NONFINITE * max(bad + seen, at_least):
        raise ValueError(f'{bad} of {bad + seen} latents of {split} are NaN or inf, more than {MAX_NONFINITE:.1%}: the encoder is broken')


def clean(folder, meta):
    """ Remove progress notes, and the files of an earlier attempt that meta.json does not list. """
    listed = {*meta['files'], *(f for split in meta['splits'].values() for entry in split['shards'] for f in entry['files'])}
    for path in glob.glob(os.path.join(glob.escape(folder), '*')):
        name = os.path.basename(path)
        if name not in listed and re.fullmatch(r'(train|val)-\d{5}\..*|encoder\.npz|tokenizer\.json|latent_stats\.npz', name):
            os.remove(path)

# -----------------------------------------------------------------------------
# The whole

def check_knobs():
    """ (name, folder, train's source, val's or None, and for meta.json all that decides what is in the dataset). Settles what is ''. """
    global tokenizer, hub_revision
    for knob, value, low in (('shard_size', shard_size, 1), ('threads', threads, 1), ('embed_batch_size', embed_batch_size, 1),
                             ('patch', patch, 1), ('max_documents', max_documents, 0), ('max_tokens', max_tokens, 8),
                             ('image_size', image_size, 0)):
        if value < low:
            raise ValueError(f'{knob} {value}: give {low} or more')
    if split_on not in SPLIT_ON:
        raise ValueError(f'split_on {split_on!r}: one of {", ".join(SPLIT_ON)}')
    if encoder_dtype not in ('float32', 'bfloat16', 'float16'):
        raise ValueError(f'encoder_dtype {encoder_dtype!r}: float32, bfloat16 or float16')
    if not 0 < val_fraction < 1:
        raise ValueError(f'val_fraction {val_fraction}: between 0 and 1')
    if image_size % patch or channels not in (1, 3):
        raise ValueError(f'image_size {image_size} must be a multiple of patch {patch}, and channels {channels} 1 or 3')
    named = {knob: value for knob, value in (('hub_dataset', hub_dataset), ('import_dir', import_dir)) if value}
    if len(named) > 1 or named and input not in ('', 'builtin'):
        raise ValueError(f'{", ".join(named)} and input={input}: choose one, and set the others to ""')
    if val_input and (named or latents_from or image_size):
        raise ValueError(f'val_input goes with texts in files, not with {", ".join(named) or "latents_from or image_size"}')
    if hub_dataset and not hub_revision:
        hub_revision = on_rank_0(hub_commit, hub_dataset)
    source = Source(input='' if named else input, split_on=split_on, field=field, hub_dataset=hub_dataset, hub_revision=hub_revision,
                    import_dir=import_dir, latents_from=latents_from, image_size=image_size, patch=patch, channels=channels,
                    min_length=min_length, max_length=max_length)
    is_protein = is_fasta(source)
    source = replace(source, distinct=is_protein if distinct is None else distinct)
    val = replace(source, input=val_input) if val_input else \
        replace(source, hub_split=HUB[hub_dataset]['val']) if 'val' in HUB.get(hub_dataset, {}) else \
        replace(source, import_split='validation') if import_dir and os.path.exists(earlier_index(import_dir, 'validation')) else None
    if homology and not is_protein:
        raise ValueError(f'homology={homology} is for FASTA')
    tokenizer = tokenizer or ('esm' if is_protein else 'bpe')
    names, val_names = spec_names(source), [name for name, _ in list_files(val_input)]
    if not names:
        raise ValueError('input: name files, folders or globs, comma-separated, or builtin')
    whole_folder = os.path.normpath(import_dir or input)
    name = (os.path.basename(whole_folder) if os.path.isdir(whole_folder) else os.path.basename(names[0])).split('.')[0]
    record = dict(input=names, val_input=val_names, hub_revision=hub_revision, split_on=split_on, field=field, min_length=min_length,
                  max_length=max_length, distinct=source.distinct, homology=homology, val_fraction=val_fraction,
                  max_documents=max_documents, latents_from=[os.path.basename(p.rstrip('/')) for p in latents_from.split(',') if p],
                  image=dict(size=image_size, patch=patch, channels=channels) if image_size else None,
                  tokenizer=tokenizer, vocab_size=vocab_size, max_tokens=max_tokens, encoder=encoder, encoder_dims=encoder_dims,
                  encoder_dtype=encoder_dtype, pooling=pooling, normalize=normalize, prefix=prefix, language=language,
                  embed_batch_size=embed_batch_size, threads=threads, shard_size=shard_size, seed=seed,
                  python=platform.python_version() if input == 'builtin' and not named else None)
    return name, os.path.normpath(out or os.path.join('data', name)), source, val, record


def spec_of(source):
    return source.import_dir or source.hub_dataset or source.input


def spec_names(source):
    """ How meta.json names the input: no path of this machine. """
    if source.hub_dataset or source.input == 'builtin':
        return [source.hub_dataset or source.input]
    if source.import_dir or source.image_size:
        return [os.path.basename(os.path.normpath(source.import_dir or source.input))]
    return [name for name, _ in list_files(source.input)]


def on_rank_0(function, *args):
    result, error = on_first(function, *args)
    if error:
        raise error
    return result


def plan(folder, source, val, record):
    """ Rank 0 alone: what was there, what there is to do, and what is fitted on it. """
    known_shards(folder, record)
    clusters = homology_clusters(source) if homology else {}
    counts, limit, n_val, texts = survey(source, val is not None, clusters)
    n_train, counts = counts['kept'] - n_val, dict(input=counts)
    if val is not None:
        counts['val_input'] = Counter()
        n_val = sum(1 for _ in documents(val, counts['val_input']))
        if not n_val:
            raise ValueError(f'{spec_of(val)}: no documents ({counts["val_input"]["read"]} read) for val')
    return limit, clusters, n_train, n_val, counts, fit(folder, texts)


def prepare():
    name, folder, source, val_source, record = check_knobs()
    torch.set_num_threads(threads)
    os.makedirs(folder, exist_ok=True)
    limit, clusters, n_train, n_val, counts, (files, fitted) = on_rank_0(plan, folder, source, val_source, record)
    tok, encode = make_tokenizer(folder), make_encoder(folder, fitted)
    settings = dict(files=dict(files), tokenizer=tok.record, encoder=encode and encode.record, max_tokens=max_tokens, threads=threads,
                    embed_batch_size=embed_batch_size)

    def read_again(is_val):
        return (doc for doc in documents(source, Counter(), max_documents) if (split_hash(doc.text, clusters) < limit) == is_val)
    if has_given_latents() and encode is not None:
        check_given(read_again(is_val=False), encode)
    val = read_again(is_val=True) if val_source is None else documents(val_source, Counter())
    splits = dict(train=write_split(folder, 'train', read_again(is_val=False), n_train, settings, tok, encode),
                  val=write_split(folder, 'val', val, n_val, settings, tok, encode))
    on_rank_0(finish, name, folder, record, tok, encode, splits, files, counts)


def finish(name, folder, record, tok, encode, splits, files, counts):
    """ Rank 0 alone: statistics, meta.json, and a look at it. """
    shards = [entry for split in splits.values() for entry in split['shards']]
    shapes = {tuple(entry['latent_shape']) for entry in shards if entry['latent_shape']}
    if len(shapes) > 1:
        raise ValueError(f'latents of several shapes: {sorted(shapes)}')
    for split, totals in splits.items():
        if not totals['samples']:
            raise ValueError(f'{split}: none of {totals["documents"]} documents is left, {totals["longer_than_max_tokens"]} have more than '
                             f'max_tokens={max_tokens} tokens')
    if shapes:
        stats = latent_stats(folder, splits['train']['shards'])
        files['latent_stats.npz'] = write_file(os.path.join(folder, 'latent_stats.npz'), as_bytes(np.savez, **stats))
    meta = dict(format=FORMAT, name=name, tokenizer=tok.record, encoder=encode and encode.record, latent_shape=list(*shapes) or None,
                token_dtype=token_dtype(tok), max_tokens=max_tokens, splits=splits, files=files, source=record,
                counts={key: dict(count) for key, count in counts.items()})
    write_file(os.path.join(folder, 'meta.json'), as_json(meta))
    clean(folder, meta)
    summary(folder)


def verify(folder):
    """ Every file of a dataset against its digest in meta.json; ValueError names the first that differs. """
    meta = read_meta(folder)
    manifest = dict(meta['files'])
    for split in meta['splits'].values():
        for entry in split['shards']:
            manifest |= entry['files']
    with tqdm(total=sum(entry['bytes'] for entry in manifest.values()), desc='verifying', unit='B', unit_scale=True, disable=None) as bar:
        for file, entry in manifest.items():
            check_file(folder, file, manifest)
            bar.update(entry['bytes'])
    print(f'{len(manifest)} files, {sum(entry["bytes"] for entry in manifest.values()) / 1e6:,.1f} MB, each as meta.json says')


def sample_hashes(ds):
    """ A hash per sample of a split, of its tokens. """
    return np.concatenate([np.fromiter((hash(tokens[a:b]) for a, b in itertools.pairwise((shard.offsets * shard.tokens.itemsize).tolist())),
                                       np.int64, len(shard.offsets) - 1) for shard in ds.shards for tokens in [shard.tokens.tobytes()]])


def summary(folder):
    """ What is in a dataset, as a reader finds it. """
    def line(name, text):
        print(f'{name:<20} {text}')
    train, val = PackedDataset(folder, 'train'), PackedDataset(folder, 'val')
    meta = train.meta
    print()
    line('dataset', folder)
    for name, count in meta['counts'].items():
        words = [f'{count["read"]:,} documents', f'{count["kept"]:,} kept', *filter(None, [dropped(count)])]
        words += [f'{count[key]:,} {word}' for key, word in (('invalid_utf8', 'with invalid UTF-8, kept'),
                                                             ('unknown_residues', 'unknown residues, now X')) if count.get(key)]
        line(f'read {name}', ', '.join(words))
    for ds in (train, val):
        m = meta['splits'][ds.split]
        lost = [f'{m[key]:,} dropped ({word})' for key, word in (('nonfinite', 'NaN or inf'), ('longer_than_max_tokens', 'too many tokens'))
                if m.get(key)]
        line(ds.split, ', '.join([f'{m["documents"]:,} documents, {m["samples"]:,} samples, {m["tokens"]:,} tokens, '
                                  f'{m["bytes"] / m["tokens"]:.2f} bytes per token', *lost]))
    lengths = np.sort(np.concatenate([np.diff(s.offsets) for s in train.shards]))
    line('tokens per sample', ', '.join(f'{q:g} %: {lengths[int(q / 100 * (len(lengths) - 1))]}' for q in (50, 95, 99, 99.5, 100)))
    line('vocabulary', f'{train.tokenizer.vocab_size} ids, {train.tokenizer.kind}')
    t, v = sample_hashes(train), sample_hashes(val)
    line('duplicates', f'{len(t) - len(np.unique(t)):,} in train, {len(v) - len(np.unique(v)):,} in val, '
                       f'{np.isin(v, t).sum():,} of val in train')
    if train.stats is not None:
        z, live = val.raw_latents(np.arange(min(len(val), 4096))), train.live > 0
        norm, mean, std = z.norm(dim=-1), train.mean[live], train.std[live]
        line('latents', f'{train.latent_shape}, {meta["encoder"]["id"] if meta["encoder"] else "given"}, '
                        f'norm {norm.mean():.3f} +- {norm.std(correction=0):.3f}')
        line('per dimension', f'mean {mean.min():.3g} to {mean.max():.3g}, std {std.min():.3g} to {std.max():.3g}, '
                              f'{int((~live).sum())} dead')
        if truncated := sum(split['truncated'] for split in meta['splits'].values()):
            line('warning', f'{truncated:,} samples are longer than the encoder reads ({meta["encoder"]["max_length"]} of its tokens); '
                            'lower --max_tokens')
    for i in range(min(3, len(val))):
        line(f'val {i}', repr(val.text(i))[:100])


def export(folder, target):
    """ A dataset in the earlier layout: texts/<split>/*.txt, latents/<split>/*.npy (N, D) float32, and <split>_data.json. """
    for split, name in (('train', 'train'), ('val', 'validation')):
        ds = PackedDataset(folder, split)
        if os.path.realpath(target) == os.path.realpath(folder):
            raise ValueError(f'export_dir={target} is the dataset itself')
        if ds.stats is None:
            raise ValueError(f'{folder} has no latents: the earlier layout is for pairs')
        for kind in ('texts', 'latents'):
            os.makedirs(os.path.join(target, kind, name), exist_ok=True)
        items = []
        for i in tqdm(range(len(ds)), f'writing {name}', unit=' samples', disable=None):
            text, text_path, latent_path = ds.text(i), f'texts/{name}/{i:08d}.txt', f'latents/{name}/{i:08d}.npy'
            with open(os.path.join(target, text_path), 'w', encoding='utf-8', newline='') as f:
                f.write(text)
            np.save(os.path.join(target, latent_path), ds.raw_latents([i])[0].numpy())
            items.append(dict(id=i, text=text, text_path=text_path, latent_path=latent_path))
        write_file(earlier_index(target, name), as_json(items))
        print(f'{earlier_index(target, name)}: {len(items):,} samples')


def main():
    configure(globals())
    with stop_on_error():
        if inspect:
            verify(inspect)
            summary(inspect)
        elif export_dir:
            export(os.path.normpath(out), export_dir)
        else:
            with stop_on_error(code=4):
                distributed.reach_master(8.0)
                distributed.join('cpu', MONTH)
            prepare()
            distributed.leave()


if __name__ == '__main__':
    main()
