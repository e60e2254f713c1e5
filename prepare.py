""" Corpora -> packed dataset: read, split, tokenize, chunk, embed, write.

    python prepare.py config/quickstart.py
    python prepare.py --input=captions.txt --encoder=minilm --out=data/captions
    python prepare.py --input=a.jsonl,b.csv.gz,folder --field=text --split_on=paragraph --tokenizer=r50k_base

A document is a line, a paragraph or a file. Documents are split by their hash before chunking, so none straddles train and
val; what is longer than max_tokens is cut into several samples and nothing is lost. Latents are embedded from exactly the
text that the tokens decode to.

The shard is the unit: its bytes depend on its documents and the knobs, never on who wrote it or when. A file appears by
rename when it is whole, meta.json comes last. Run again after a kill or a damaged file, and only what is missing or broken
is redone. Every document read is a document written or a counted drop.
"""
import ast
import csv
import glob
import gzip
import hashlib
import heapq
import inspect
import io
import itertools
import json
import os
import platform
import re
import sysconfig
import zlib
from collections import Counter
from functools import lru_cache

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import pick_device
from configurator import configure, stop_on_error
from data import FORMAT, PackedDataset, bpe_tokenizer, load_tokenizer, sha256, train_bpe
from encoders import fit_lsa, load_encoder

input = 'builtin'            # files, folders, globs, comma-separated: text, .jsonl, .csv, each may be .gz;
                             # builtin: the interpreter's own documentation
val_input = ''               # validation documents of their own; then nothing is split off the input
split_on = 'line'            # line | paragraph | file: what a document is in a text file
field = 'text'               # the document's field in .jsonl and column in .csv
val_fraction = .01           # of the documents, chosen by hash; at least one
max_documents = 0            # only the first so many of the input; 0: all
tokenizer = 'bpe'            # bpe (fitted here) | byte | a tiktoken name such as r50k_base
vocab_size = 4096            # of bpe, EOS and PAD among them
max_tokens = 127             # longer documents become several samples; the model's seq_len is one more (EOS)
encoder = 'none'             # none (text only) | lsa (fitted here) | minilm | e5 | bge | qwen | sonar | t5 | hub id | folder
encoder_dims = 0             # lsa: dimensions (0: 128); others: Matryoshka cut (0: all)
pooling = None               # mean | cls | last; None: the encoder's own, as with the next two
normalize = None             # L2
prefix = None                # put before every text
embed_batch_size = 64
device = 'auto'              # cuda when there is one, else cpu; for the encoder
threads = 1                  # of torch; it changes the last bits of the latents
shard_size = 16384           # documents per shard
out = ''                     # '': data/<name of input>
seed = 1337                  # of lsa

SPLIT_ON = ('line', 'paragraph', 'file')
TEXT_FILES = ('.txt', '.jsonl', '.csv')           # taken from a folder, with and without .gz; a file named outright may end otherwise
NOT_TEXT = ('.parquet', '.arrow', '.json', '.zip', '.tar', '.bz2', '.xz', '.zst', '.npy', '.npz', '.bin', '.pt', '.safetensors',
            '.fasta', '.fa', '.pdf', '.docx')
FIT_DOCUMENTS = 100_000                           # tokenizer and lsa are fitted on at most so many documents of train
MAX_NONFINITE = 1e-3                              # share of the samples

# -----------------------------------------------------------------------------
# Reading: every source yields documents as str; a byte that is no UTF-8 arrives as a lone surrogate and is replaced in clean()

def list_files(spec):
    """ [(name, path)] of a comma-separated list; inside a folder sorted by name, so the directory's order plays no part. """
    files = []
    for part in (p.strip() for p in spec.split(',') if p.strip()):
        if os.path.isdir(part):
            names = sorted(glob.glob('**', root_dir=part, recursive=True))
            found = [(n, os.path.join(part, n)) for n in names if n.removesuffix('.gz').endswith(TEXT_FILES)]
            hint = f'no file ending in {", ".join(TEXT_FILES)} or these with .gz'
        else:
            paths = [part] if os.path.exists(part) else sorted(glob.glob(part))
            found = [(os.path.basename(path), path) for path in paths]
            hint = 'no such file, folder or glob'
        if not found:
            raise ValueError(f'{part}: {hint}')
        files += found
    for name, path in files:
        if name.removesuffix('.gz').endswith(NOT_TEXT):
            raise ValueError(f'{path}: cannot read this kind of file; convert it to text, .jsonl or .csv')
    return files


def read_file(path):
    """ Documents of one file, as they stand in it. """
    kind = os.path.splitext(path.removesuffix('.gz'))[1]
    opened = gzip.open(path, 'rb') if path.endswith('.gz') else open(path, 'rb')
    newline = '' if kind == '.csv' else '\n'                 # other line ends are text (U+2028, form feed, ...)
    try:
        with opened, io.TextIOWrapper(opened, 'utf-8-sig', 'surrogateescape', newline) as f:
            if kind == '.jsonl':
                for number, line in enumerate(f, 1):
                    yield '' if not line.strip() else json_field(line, f'{path}, line {number}')
            elif kind == '.csv':
                csv.field_size_limit(2**31 - 1)
                rows = csv.DictReader(f)
                if field not in (rows.fieldnames or []):
                    raise ValueError(f'{path}: no column {field!r}, found {rows.fieldnames}; choose with --field=')
                yield from (row[field] or '' for row in rows)
            elif split_on == 'file':
                yield f.read()
            elif split_on == 'paragraph':
                for blank, lines in itertools.groupby(f, key=lambda line: not line.strip()):
                    if not blank:
                        yield ''.join(lines)
            else:
                yield from f
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f'{path}: broken gzip file ({error}); get it again') from None
    except csv.Error as error:
        raise ValueError(f'{path}: broken csv ({error})') from None


def json_field(line, where):
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f'{where}: no JSON ({error})') from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{where}: no text in field {field!r}, found {str(record)[:80]}; choose with --field=')
    return text


def documents(spec, counts, limit=0):
    """ The documents of an input: stripped, valid, not empty. `counts` gets read, kept and the drops: read = kept + empty. """
    texts = builtin_corpus() if spec == 'builtin' else itertools.chain.from_iterable(read_file(path) for _, path in list_files(spec))
    for text in texts:
        counts['read'] += 1
        text, invalid = re.subn('[\ud800-\udfff]', '\ufffd', text.strip())
        counts['invalid_utf8'] += bool(invalid)              # replaced and kept
        if not text:
            counts['empty'] += 1
            continue
        counts['kept'] += 1
        yield text
        if counts['kept'] == limit:
            return

# -----------------------------------------------------------------------------
# The built-in corpus: English sentences of the interpreter's own documentation, read by ast; no module of it is imported

@lru_cache
def builtin_corpus():
    """ Distinct sentences from pydoc_data's topics and the standard library's docstrings, in the order of the files. """
    root = sysconfig.get_path('stdlib')
    names = sorted(glob.glob('**/*.py', root_dir=root, recursive=True))
    skip = re.compile(r'(^|/)(site-packages|dist-packages|test|tests|idlelib|lib2to3|turtledemo|ensurepip|lib-dynload)/|_sysconfigdata')
    sentences = {}
    for name in names:
        if skip.search(name.replace(os.sep, '/')):
            continue
        try:
            with open(os.path.join(root, name), 'rb') as f:
                tree = ast.parse(f.read())
        except SyntaxError:
            continue
        for text in prose_of(tree, topics=name.startswith('pydoc_data')):
            sentences |= dict.fromkeys(sentences_of(text))
    return list(sentences)


def prose_of(tree, topics):
    """ The docstrings of a module; of pydoc_data all its string constants. """
    for node in ast.walk(tree):
        if topics and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ''


def sentences_of(text):
    """ Whole English sentences: no code, doctests, tables, headings or signatures. """
    for paragraph in re.split(r'\n\s*\n', inspect.cleandoc(text)):
        if re.search(r'>>>|::=|\.\. |^\s*[|+*=~^-]{3}|\s{3,}\S+\s{3,}|^\s*:\w+', paragraph, re.MULTILINE):
            continue
        paragraph = re.sub(r'^\s*(?:[*-]|\d+\.)\s+', '', paragraph)       # the bullet of a list's item
        paragraph = ' '.join(paragraph.split()).replace('``', '"').replace('`', '"')
        for sentence in re.split(r'(?<=[a-z")][.!?])\s+(?=[A-Z"])', paragraph):
            words = sentence.split()
            plain = sum(bool(re.fullmatch(r'"?\(?[A-Za-z][a-z\'-]*\)?"?[.,;:!?]?"?', word)) for word in words)
            if 5 <= len(words) <= 40 and plain >= .85 * len(words) and re.fullmatch(r'[A-Z][^{}<>=|\\_@#$%*/\[\]]*[a-z")][.!?]', sentence):
                yield sentence

# -----------------------------------------------------------------------------
# Splitting and chunking

def split_hash(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')


def survey(spec, has_val_input):
    """ One pass: counts, the hash below which a document is validation, and a sample of train to fit tokenizer and lsa on.

    The sample is the train documents of smallest hash: uniform, and the same whatever the order of reading.
    """
    counts, limit = Counter(), 0 if has_val_input else int(val_fraction * 2**64)
    sample, lowest, highest, below = [], 2**64, -1, 0
    for text in tqdm(documents(spec, counts, max_documents), 'reading', unit=' documents', disable=None):
        h = split_hash(text)
        lowest, highest, below = min(lowest, h), max(highest, h), below + (h < limit)
        if h >= limit:
            (heapq.heappush if len(sample) <= FIT_DOCUMENTS else heapq.heappushpop)(sample, (-h, text))
    if not counts['kept']:
        raise ValueError(f'{spec}: no documents ({counts["read"]} read, {counts["empty"]} of them empty)')
    if not has_val_input and not below:
        limit = lowest + 1                                   # val is never empty
        below = sum(-h < limit for h, _ in sample)
    if limit > highest:
        raise ValueError(f'{spec}: {counts["kept"]} document(s) cannot be split into train and val; '
                         'give --val_input= or a finer --split_on=')
    texts = [text for h, text in sorted(sample, reverse=True) if -h >= limit][:FIT_DOCUMENTS]
    return counts, limit, below, texts


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
        if os.path.exists(meta):
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


def shard_key(texts, settings):
    """ A digest of all that decides a shard's bytes: its documents and the settings. """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for text in texts:
        data = text.encode()
        digest.update(f'{len(data)}:'.encode() + data)
    return digest.hexdigest()


def token_dtype(tok):
    return 'uint16' if tok.vocab_size <= 2**16 else 'uint32'


def write_shard(folder, name, texts, tok, encode):
    """ Tokenize, chunk and embed the documents `texts`; write the shard's files; its entry for meta.json. """
    chunk = Chunker(tok, max_tokens)
    chunks = [run for ids in tok.encode_batch(texts) for run in chunk(ids)]
    latents, dropped, truncated = None, 0, 0
    if encode is not None:
        with tqdm(total=len(chunks), desc=name, unit=' samples', leave=False, disable=None) as bar:
            latents = encode([tok.decode(run) for run in chunks], progress=bar.update)   # (n, N, D)
        truncated, encode.truncated = encode.truncated, 0           # texts longer than the encoder reads
        latents = latents.numpy().astype(np.float16)
        finite = np.isfinite(latents).all((1, 2))
        dropped = int((~finite).sum())
        latents, chunks = latents[finite], [run for run, ok in zip(chunks, finite) if ok]
    lengths = [len(run) for run in chunks]
    tokens = np.concatenate(chunks or [np.empty(0)]).astype(np.dtype(token_dtype(tok)).newbyteorder('<'))
    sizes = np.array([len(piece) for piece in tok.pieces])
    path = os.path.join(folder, name)
    files = {f'{name}.tokens.bin': write_file(path + '.tokens.bin', tokens.tobytes()),
             f'{name}.offsets.npy': write_file(path + '.offsets.npy', as_bytes(np.save, np.cumsum([0] + lengths, dtype=np.int64)))}
    if latents is not None:
        files[f'{name}.latents.npy'] = write_file(path + '.latents.npy', as_bytes(np.save, latents))
    return dict(name=name, samples=len(chunks), documents=len(texts), tokens=len(tokens),
                bytes=int(sizes[tokens].sum()), longest=max(lengths, default=0),
                nonfinite=dropped, truncated=truncated, files=files)


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

def make_encoder(folder, texts):
    """ (encoder or None, its manifest entries). lsa is fitted here; the others exist already. """
    if encoder == 'none':
        return None, {}
    if encoder == 'lsa':
        lsa = fit_lsa(texts, encoder_dims or 128, seed)
        return lsa, {'encoder.npz': write_file(os.path.join(folder, 'encoder.npz'), as_bytes(lambda f: lsa.save(f)))}
    return load_encoder(encoder, pick_device(device), pooling=pooling, normalize=normalize, prefix=prefix, dimension=encoder_dims or None,
                        batch_size=embed_batch_size), {}


def make_tokenizer(folder, texts):
    if tokenizer != 'bpe':
        return load_tokenizer(tokenizer), {}
    path = os.path.join(folder, 'tokenizer.json')
    entry = write_file(path, train_bpe(texts, vocab_size).encode())
    return bpe_tokenizer(path), {'tokenizer.json': entry}


def known_shards(folder, source):
    """ Entries of the shards that are written already, from meta.json or from a run that was interrupted. """
    known, path = {}, os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        with open(path, encoding='utf-8') as f:
            meta = json.load(f)
        for key in source:
            if meta['source'].get(key) != source[key]:
                raise ValueError(f'{folder} holds a dataset with {key} = {meta["source"].get(key)!r}, not {source[key]!r}; '
                                 'choose another --out= or delete that folder')
        for split in meta['splits'].values():
            for entry in split['shards']:                    # meta.json may go (write_file): what it knew stays beside the shard
                known[entry['name']] = entry
                write_entry(folder, entry)
    for path in glob.glob(os.path.join(glob.escape(folder), '*.whole.json')):
        with open(path, encoding='utf-8') as f:
            entry = json.load(f)
        known[entry['name']] = entry
    return known


def write_entry(folder, entry):
    path = os.path.join(folder, f'{entry["name"]}.whole.json')
    with open(path + '.tmp', 'wb') as f:
        f.write(as_json(entry))
    os.replace(path + '.tmp', path)


def write_split(folder, split, texts, total, known, settings, tok, encode):
    """ All shards of a split, and its entry for meta.json. Whole shards of an earlier run are kept. """
    entries, number = [], -(-total // shard_size)
    texts = iter(texts)
    while batch := list(itertools.islice(texts, shard_size)):
        name, key = f'{split}-{len(entries):05d}', shard_key(batch, settings)
        entry = known.get(name, {})
        if entry.get('key') != key or not all(is_whole(os.path.join(folder, f), e) for f, e in entry['files'].items()):
            entry = write_shard(folder, name, batch, tok, encode) | dict(key=key)
            write_entry(folder, entry)
        entries.append(entry)
        print(f'{name} of {number}: {entry["documents"]} documents, {entry["samples"]} samples, {entry["tokens"]} tokens', flush=True)
        bad, seen = (sum(e[k] for e in entries) for k in ('nonfinite', 'samples'))
        if bad > MAX_NONFINITE * max(bad + seen, shard_size if len(entries) < number else 0):
            raise ValueError(f'{bad} of {bad + seen} latents of {split} are NaN or inf, more than {MAX_NONFINITE:.1%}: '
                             'the encoder is broken')
    totals = {k: sum(e[k] for e in entries) for k in ('samples', 'documents', 'tokens', 'bytes', 'nonfinite', 'truncated')}
    return totals | dict(shards=entries)


def summary(folder, counts, encode):
    """ What was made, as a reader finds it. """
    def line(name, text):
        print(f'{name:<20} {text}')
    train, val = PackedDataset(folder, 'train'), PackedDataset(folder, 'val')
    print()
    line('dataset', folder)
    for name, count in counts.items():
        words = dict(read='documents', kept='kept', empty='empty', invalid_utf8='with invalid UTF-8 (kept)')
        line(f'read {name}', ', '.join(f'{count[key]:,} {word}' for key, word in words.items()))
    for ds in (train, val):
        m = ds.meta['splits'][ds.split]
        line(ds.split, f'{m["documents"]:,} documents, {m["samples"]:,} samples, {m["tokens"]:,} tokens, '
                       f'{m["bytes"] / m["tokens"]:.2f} bytes per token'
                       + f', {m["nonfinite"]:,} dropped (NaN or inf)' * (m['nonfinite'] > 0))
    lengths = np.sort(np.concatenate([np.diff(s.offsets) for s in train.shards]))
    line('tokens per sample', ', '.join(f'{q:g} %: {lengths[int(q / 100 * (len(lengths) - 1))]}' for q in (50, 95, 99, 99.5, 100)))
    line('vocabulary', f'{train.tokenizer.vocab_size} ids, {train.tokenizer.kind}')
    if encode is not None:
        z = val.raw_latents(np.arange(min(len(val), 4096)))
        line('latents', f'{train.latent_shape}, norm {z.norm(dim=-1).mean():.3f}, {int((train.live == 0).sum())} dead dimensions')
        if truncated := sum(split['truncated'] for split in train.meta['splits'].values()):
            line('warning', f'{truncated:,} samples are longer than the encoder reads ({encode.record["max_length"]} of its tokens); '
                            'lower --max_tokens')
    for i in range(min(3, len(val))):
        line(f'val {i}', repr(val.text(i))[:100])


def check_knobs():
    """ (name, folder, source): the dataset's name, where it goes, and all that decides what is in it, for meta.json. """
    for knob, value, low in (('shard_size', shard_size, 1), ('threads', threads, 1), ('embed_batch_size', embed_batch_size, 1),
                             ('max_documents', max_documents, 0), ('max_tokens', max_tokens, 8)):
        if value < low:
            raise ValueError(f'{knob} {value}: give {low} or more')
    if split_on not in SPLIT_ON:
        raise ValueError(f'split_on {split_on!r}: one of {", ".join(SPLIT_ON)}')
    if not 0 < val_fraction < 1:
        raise ValueError(f'val_fraction {val_fraction}: between 0 and 1')
    names = ['builtin'] if input == 'builtin' else [name for name, _ in list_files(input)]
    val_names = [name for name, _ in list_files(val_input)]
    if not names:
        raise ValueError('input: name files, folders or globs, comma-separated, or builtin')
    name = (os.path.basename(os.path.normpath(input)) if os.path.isdir(input) else names[0]).split('.')[0]
    source = dict(input=names, val_input=val_names, split_on=split_on, field=field, val_fraction=val_fraction, max_documents=max_documents,
                  tokenizer=tokenizer, vocab_size=vocab_size, max_tokens=max_tokens, encoder=encoder, encoder_dims=encoder_dims,
                  pooling=pooling, normalize=normalize, prefix=prefix, embed_batch_size=embed_batch_size, threads=threads,
                  shard_size=shard_size, seed=seed, python=platform.python_version() if input == 'builtin' else None)
    return name, os.path.normpath(out or os.path.join('data', name)), source


def prepare():
    name, folder, source = check_knobs()
    torch.set_num_threads(threads)
    os.makedirs(folder, exist_ok=True)
    for stale in glob.glob(os.path.join(glob.escape(folder), '*.tmp')):
        os.remove(stale)
    known = known_shards(folder, source)

    counts, limit, n_val, texts = survey(input, bool(val_input))
    tok, files = make_tokenizer(folder, texts)
    encode, more_files = make_encoder(folder, texts)
    files |= more_files
    record = None if encode is None else encode.record
    settings = dict(files=dict(files), tokenizer=tok.record, encoder=record, max_tokens=max_tokens, threads=threads,
                    embed_batch_size=embed_batch_size)

    def read_again():
        return documents(input, Counter(), max_documents)
    train = (text for text in read_again() if split_hash(text) >= limit)
    n_train, counts = counts['kept'] - n_val, dict(input=counts)
    if val_input:
        counts['val_input'] = Counter()
        val = list(documents(val_input, counts['val_input']))
        n_val = len(val)
        if not val:
            raise ValueError(f'{val_input}: no documents ({counts["val_input"]["read"]} read)')
    else:
        val = (text for text in read_again() if split_hash(text) < limit)
    splits = dict(train=write_split(folder, 'train', train, n_train, known, settings, tok, encode),
                  val=write_split(folder, 'val', val, n_val, known, settings, tok, encode))
    shape = None
    if encode is not None:
        shape = list(np.load(os.path.join(folder, 'train-00000.latents.npy'), mmap_mode='r').shape[1:])
        stats = latent_stats(folder, splits['train']['shards'])
        files['latent_stats.npz'] = write_file(os.path.join(folder, 'latent_stats.npz'), as_bytes(np.savez, **stats))
    meta = dict(format=FORMAT, name=name, tokenizer=tok.record, encoder=record, latent_shape=shape, token_dtype=token_dtype(tok),
                max_tokens=max_tokens, splits=splits, files=files, source=source,
                counts={key: dict(count) for key, count in counts.items()})
    write_file(os.path.join(folder, 'meta.json'), as_json(meta))
    clean(folder, meta)
    summary(folder, counts, encode)


def clean(folder, meta):
    """ Remove progress notes, and the files of an earlier attempt that meta.json does not list. """
    listed = {*meta['files'], *(f for split in meta['splits'].values() for entry in split['shards'] for f in entry['files'])}
    for path in glob.glob(os.path.join(glob.escape(folder), '*')):
        name = os.path.basename(path)
        if name not in listed and re.fullmatch(r'(train|val)-\d{5}\..*|encoder\.npz|tokenizer\.json|latent_stats\.npz', name):
            os.remove(path)


def main():
    configure(globals())
    with stop_on_error():
        prepare()


if __name__ == '__main__':
    main()
