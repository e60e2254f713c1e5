"""
Corpora -> packed dataset: read, split, tokenize, chunk, embed, write.

    python prepare.py config/quickstart.py
    python prepare.py --input=captions.txt --encoder=minilm --out=data/captions
    python prepare.py --input=a.jsonl,b.csv.gz,folder --field=text --split_on=paragraph
    torchrun --standalone --nproc_per_node=8 prepare.py --hub_dataset=openwebtext --encoder=e5
    python prepare.py --inspect=data/captions                # verify its files, and sum it up
    python prepare.py --export_dir=OLD --out=data/captions   # a file per text: the earlier layout

Documents. A document is a line, a paragraph, a file, a record or a sequence (corpora/sources.py).
Its hash decides whether it is train or val, before it is cut, so no document is in both. A document
of more than max_tokens becomes several samples, and nothing is lost. The encoder embeds exactly the
text that the tokens decode to. If latents are given, a document is one sample, and one that is too
long is dropped. Every document that is read is written or is a counted drop.

Shards. The bytes of a shard depend on its documents and the knobs, never on who wrote it or when.
The ranks take shards in turn. A rank reads only the input files that its own shards come from,
where the files do not depend on each other (sources.parts). A file appears by rename when it is
whole, and meta.json comes last. After a kill or with a damaged file, run the same command again,
with any number of processes: only what is missing or broken is written again.
"""
import glob
import heapq
import itertools
import os
import re
import sys
import time
from collections import Counter
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path

import runs.threads    # before torch: it sets how threads wait for one another

import numpy as np
import torch
from tqdm import tqdm

from configurator import configure, on_command_line, read_knobs, stop_on_error
from corpora.latents import check_given, given_latents
from corpora.layouts import dropped, earlier_index, export, summary, verify
from corpora.shards import (SUMS, fitting_max_tokens, fitting_shard_size, latent_stats, shard_key,
                            token_dtype, write_entry, write_shard, written_before)
from corpora.sources import Source, documents, list_files, parts, text_hash
from corpora.tokenizers import bpe_tokenizer, train_bpe
from corpora.writing import as_bytes, in_use, names_path, write_file
from data import LatentStats
from encoders import load_encoder
from runs import distributed, meeting
from runs.checkpoint import pick_device, pick_dtype
from runs.distributed import all_gather_object, on_rank0, rank, world
from runs.files import read_json, read_sealed, sealed
from runs.manifest import FORMAT, check_file, dataset_folder, read_meta
from data import load_tokenizer

# ---- what is read, details in corpora/sources.py
input = 'builtin'            # files, folders, globs, comma-separated: text, .jsonl, .csv, .tsv,
                             # .fasta (each may be .gz), .parquet; builtin: documentation of
                             # Python and of installed packages; digits: scikit-learn's
val_input = ''               # validation documents of their own; then the input is not split
hub_dataset = ''      # instead of input: openwebtext | wikitext-103 | lm1b | fineweb-edu | a hub id
hub_revision = ''            # a commit; '': the newest, which is then written down
import_dir = ''              # instead of input: a folder of texts/, latents/, train_data.json;
                             # nothing is embedded again
latents_from = ''            # latents of the input's documents: .npy files or folders of them, a
                             # row a document
image_size = 0               # [0, 4096]; pixels a side, where input is digits or a folder of images
                             # with metadata.csv; the latents are its patches
patch = 8                    # [1, 4096]: pixels a side of a patch
channels = 3                 # 1 | 3; 1 is grey
split_on = 'line'            # line | paragraph | file: what a document is in a text file
encoding = 'utf-8'          # of text files: any of Python's codecs, such as latin-1, cp1252, utf-16
invalid_bytes = 'stop'       # stop | replace: for bytes that are not of the encoding; replaced by
                             # U+FFFD, they are counted
field = 'text'               # <a name>: the document's field in .jsonl, column in .csv, .tsv,
                             # .parquet, hub datasets
min_length = 0               # [0, 1e9]: characters; residues of a protein
max_length = 0               # [0, 1e9]; 0: any
document_limit = 64_000_000  # [1, 1e9]: characters; a longer document, line of JSON or row of a
                             # table is never held in memory: it is dropped and counted
distinct = None              # None | bool: drop what was read before; None: of FASTA only
homology = 0.0               # [0, 1]; FASTA: clusters of so much sequence identity (over 80 % of
                             # their length) go to one split; needs mmseqs
val_fraction = .01           # (0, 1): of the documents, chosen by hash; at least one. An image goes
                             # with all its captions
max_documents = 0            # [0, 1e12]: only the first so many of the input; 0: all
# ---- what it becomes
same_as = ''                 # a dataset's folder, or its name in data/: with its tokenizer, its
                             # encoder, the scale of its latents and its max_tokens, so that a
                             # training on the new one may begin with a network of the other
                             # (init_from); --encoder=FOLDER then says where its encoder lies now
tokenizer = ''               # bpe (fitted here) | byte | esm | a tiktoken name such as r50k_base;
                             # '': bpe, of FASTA esm
vocab_size = 4096            # [258, 2**20]: of bpe, EOS and PAD included
max_tokens = None            # None | int [8, 65535]; None: what 99.9 % of the texts need, at most
                             # 127; with given latents what all need. A longer document becomes
                             # several samples; the model's seq_len is one more (EOS)
encoder = 'none'             # <a hub id, or a folder>: or none (text only) | lsa (fitted here) |
                             # minilm | e5 | bge | qwen | sonar | t5 | esm2
encoder_dims = 0             # [0, 65536]; lsa: dimensions (0: 128); others: Matryoshka cut (0: all)
encoder_ngrams = 1           # [1, 4]; lsa: reads up to so many words that follow each other as one
                             # term; 1: the order of the words is not embedded
encoder_dtype = None         # None | float32 | bfloat16 | float16, of the encoder's weights; None:
                             # bfloat16 on a GPU with instructions for it, else float32
pooling = None               # None | mean | cls | last | first; None: the encoder's own, as with
                             # the next three
normalize = None             # None | bool: L2
prefix = None                # None | '' | <a text>: put before every text
language = None              # None | <a code>; sonar: such as eng_Latn
embed_batch_size = 64        # [1, 65536]
device = 'auto'              # auto | cpu | cuda | <cuda:1 or the like>; of the encoder
threads = 1                # [1, 1024]: of torch, a process; it changes the last bits of the latents
shard_size = None            # None | int [1, 1e9]: documents per shard; None: 16,384, and more
                             # beyond 67 million documents (shards.fitting_shard_size)
out = ''                     # '': data/<name of input>
seed = 1337                  # [0, 2**63): of lsa
# ---- what exists already
inspect = ''                 # a dataset folder: verify and sum up, make nothing
export_dir = ''             # write the dataset `out` there in the earlier layout, make nothing else

OF_SAME_AS = ('tokenizer', 'vocab_size', 'max_tokens', 'encoder_dims', 'encoder_ngrams',
              'encoder_dtype', 'pooling', 'normalize', 'prefix', 'language')
FIT_DOCUMENTS = 100_000      # tokenizer and lsa are fitted on at most so many documents of train
MAX_NONFINITE = 1e-3         # share of the samples
MONTH = 30 * 86400.0         # seconds that a process waits for the others
OF_A_DATASET = re.compile(
    r'((train|val)-\d{5}\..*|encoder\.npz|bag\.npy|tokenizer\.json|latent_stats\.npz|meta\.json)')

# -----------------------------------------------------------------------------
# Knobs

def check_knobs():
    """ (name, folder, train's source, val's or None, record). The record goes into meta.json: all
    that decides what is in the dataset. Also settles the knobs that are '' or None. """
    global tokenizer, hub_revision, encoder_dtype
    knobs = {name: knob.default for name, knob in read_knobs(__file__).items()}
    if same_as:
        take_settings(knobs)

    # the source
    names = [field.name for field in fields(Source) if field.name in knobs]
    settings = {name: globals()[name] for name in names}
    settings['distinct'] = False                             # settled below
    if (hub_dataset or import_dir) and input == 'builtin':               # the default gives way
        settings['input'] = ''
    source = Source(**settings)
    if not source.names:
        raise ValueError('input: name files, folders or globs, comma-separated, or builtin')
    is_protein = source.is_fasta
    source = replace(source, distinct=is_protein if distinct is None else distinct)
    if hub_dataset and not hub_revision and not os.path.isdir(hub_dataset):
        from corpora.hub import hub_commit
        hub_revision = on_rank_0(hub_commit, hub_dataset)
        source = replace(source, hub_revision=hub_revision)

    # knobs that exclude each other
    if val_input and (not source.input or source.has_latents or homology):
        raise ValueError('val_input goes with an input of texts, without latents_from, image_size '
                         'or homology')
    if homology and not is_protein:
        raise ValueError(f'homology={homology} is for FASTA')
    if encoder == 'lsa' and source.has_latents:
        raise ValueError('encoder=lsa is fitted here, so it is not that of latents made elsewhere: '
                         'name theirs, or --encoder=none')
    if same_as and source.has_latents:
        raise ValueError(f'same_as={same_as} embeds texts: give no latents')

    # what follows from them
    val = validation_source(source)
    if not same_as:
        tokenizer = tokenizer or ('esm' if is_protein else 'bpe')
    if encoder_dtype is None:
        reads_texts = encoder not in ('none', 'lsa')
        where = pick_device(device)
        on_gpu = reads_texts and torch.device(where).type == 'cuda'
        encoder_dtype = pick_dtype('auto', where) if on_gpu else 'float32'
    name = name_of(source)
    if not name and not out:
        raise ValueError('no name for the dataset: give --out=data/NAME')
    folder = os.path.normpath(out or os.path.join('data', name))
    return name, folder, source, val, make_record(knobs, source)


def take_settings(knobs):
    """ With same_as: max_tokens is that of the other dataset, which brings tokenizer and encoder. A
    config file may set these knobs for other datasets; here they are at their defaults. ValueError
    where the command line sets one, or where no text can be embedded as the other dataset's. """
    for knob in OF_SAME_AS:
        if on_command_line(knob):
            raise ValueError(f'{knob} is that of same_as={same_as}: run without --{knob}')
        globals()[knob] = knobs[knob]
    if not on_command_line('encoder'):
        globals()['encoder'] = 'none'
    if encoder != 'none' and not os.path.isdir(encoder):
        raise ValueError(f'encoder is that of same_as={same_as}: run without --encoder, or name '
                         f'the folder where it lies now; found encoder={encoder}')
    globals()['same_as'] = dataset_folder(same_as)
    if not os.path.exists(os.path.join(same_as, 'meta.json')):
        raise ValueError(f'same_as={same_as}: no dataset there (no meta.json)')
    meta = read_meta(same_as)
    if meta['latent_shape'] and not meta['encoder']:
        raise ValueError(f'same_as={same_as}: nobody knows what made its latents, so no other text '
                         'can be embedded in the same way')
    globals()['max_tokens'] = meta['max_tokens']


def validation_source(source):
    """ Where validation documents of their own come from; None if they are split off the input. """
    if val_input:
        return replace(source, input=val_input)
    if hub_dataset:
        from corpora.hub import HUB
        if 'val' in HUB.get(hub_dataset, {}):
            return replace(source, hub_split=HUB[hub_dataset]['val'])
    if import_dir and os.path.exists(earlier_index(import_dir, 'validation')):
        return replace(source, import_split='validation')
    return None


def name_of(source):
    """ The name of the dataset: that of the input's folder or first file, up to the first dot. """
    path = source.names[0]
    if source.import_dir or os.path.isdir(source.input):
        path = os.path.abspath(source.import_dir or source.input)
    return os.path.basename(path).split('.')[0]


def make_record(knobs, source):
    """ The knobs that decide what is in the dataset. No path of this machine is in it. """
    beside = ('out', 'device', 'inspect', 'export_dir')
    record = {knob: globals()[knob] for knob in knobs if knob not in beside}
    parts = [part for part in latents_from.split(',') if part]
    mmseqs = versions = None
    if source.input == 'builtin':
        from corpora.builtin import builtin_versions
        versions = builtin_versions()
    if homology:
        from corpora.proteins import run_mmseqs
        mmseqs = on_rank_0(run_mmseqs, homology, 'version')
    record |= dict(
        input=source.names,
        same_as=os.path.basename(os.path.normpath(same_as)) if same_as else '',
        val_input=[name for name, _ in list_files(val_input)],
        distinct=source.distinct,
        hub_dataset=source.names[0] if hub_dataset else '',
        import_dir=source.names[0] if import_dir else '',
        latents_from=[os.path.basename(os.path.normpath(part)) for part in parts],
        mmseqs=mmseqs,
        python=versions,
    )
    return record


def on_rank_0(function, *args):
    """ Calls a function on rank 0; every rank gets its result. Rank 0 raises its error. """
    result, error = on_rank0(function, *args)
    if error:
        raise error if rank == 0 else SystemExit(2)
    return result

# -----------------------------------------------------------------------------
# Survey and split

def split_hash(doc, clusters):
    """ The hash that puts a document into train or val: that of its group or else its own text, or
    that of its cluster's representative. """
    h = text_hash(doc.group or doc.text)
    return clusters.get(h, h)


def survey(source, has_val, clusters):
    """ One pass over the documents. Returns their counts, the limit below which a hash means
    validation, how many documents are below it, a sample of train to fit on, and the numbers of
    documents (train, val) in each part of the source.

    The sample is the documents of train with the smallest hashes. So it is uniform, and the same in
    any order of reading.
    """
    counts = Counter()
    limit = 0 if has_val else int(val_fraction * 2**64)
    sample = []                                              # a heap of (-hash, text)
    lowest, highest = 2**64, -1
    n_below = 0
    n_kept, n_val = [], []                                   # of each part, (p,)

    def of_parts():
        for part in parts(source, max_documents):
            n_kept.append(-counts['kept'])
            n_val.append(-n_below)
            yield from documents(part, counts, max_documents)
            n_kept[-1] += counts['kept']
            n_val[-1] += n_below

    stream = of_parts()
    if sys.stderr.isatty():
        stream = tqdm(stream, 'reading', unit=' documents')
    else:                                                    # a log file gets a line a minute
        stream = tqdm(stream, 'reading', unit=' documents', mininterval=60, delay=60)
    for doc in stream:
        h = split_hash(doc, clusters)
        lowest = min(lowest, h)
        highest = max(highest, h)
        if h < limit:
            n_below += 1
        elif len(sample) <= FIT_DOCUMENTS:                 # one more: the first may go to val below
            heapq.heappush(sample, (-h, doc.text))
        else:
            heapq.heappushpop(sample, (-h, doc.text))

    # neither split may be empty
    name = ', '.join(source.names)
    if not counts['kept']:
        raise ValueError(f'{name}: no documents ({dropped(counts) or "nothing"} among '
                         f'{counts["read"]} read)')
    if not has_val and not n_below:
        limit = lowest + 1
        n_below = sum(-h < limit for h, _ in sample)
        n_val = None                                         # not known for each part
    if limit > highest:
        raise ValueError(f'{name}: {counts["kept"]} document(s) cannot be split into train and '
                         'val; give --val_input=, or a finer --split_on=, as line')
    texts = [text for h, text in sorted(sample, reverse=True) if -h >= limit]
    sizes = None
    if n_val is not None:
        sizes = [dict(train=n - below, val=below) for n, below in zip(n_kept, n_val)]
    return counts, limit, n_below, texts[:FIT_DOCUMENTS], sizes


def route(source, val, limit, clusters, sizes=None, seen=None):
    """ (split, document) of all documents. sizes: the numbers of documents in each part of the
    source, as of survey; then a part is skipped where none of its documents is of this rank, and
    `seen`, a Counter of the documents of each split up to here, moves on. """
    for i, part in enumerate(parts(source, max_documents)):
        size = sizes and Counter(sizes[i])
        if size and not any(is_mine(split, seen[split], seen[split] + n)
                            for split, n in size.items()):
            seen.update(size)
            continue
        until = size and seen + size
        for doc in documents(part, Counter(), max_documents):
            yield 'val' if split_hash(doc, clusters) < limit else 'train', doc
        if size and +seen != until:
            raise ValueError(f'{", ".join(part.names)}: {dict(until)} documents were counted up to '
                             f'here, and then {dict(seen)} read: the input has changed meanwhile; '
                             'run again')
    if val:
        for doc in documents(val, Counter()):
            yield 'val', doc


def is_mine(split, begin, end):
    """ Whether documents begin .. end - 1 of a split are in a shard of this rank. """
    shards = range(begin // shard_size, -(-end // shard_size))
    return begin < end and (len(shards) >= world or any(i % world == rank for i in shards))


def group_shards(stream, seen):
    """ (split, number of the shard, its documents) of the shards of this rank, as each fills up.
    seen: a Counter of the documents of each split up to here; the stream may move it on. """
    waiting = dict(train=[], val=[])
    for split, doc in stream:
        n = seen[split]
        seen[split] += 1
        if not is_mine(split, n, n + 1):
            continue
        waiting[split].append(doc)
        if len(waiting[split]) == shard_size:
            yield split, n // shard_size, waiting[split]
            waiting[split] = []

    # the last ones are not full
    for split, docs in waiting.items():
        if docs:
            yield split, seen[split] // shard_size, docs

# -----------------------------------------------------------------------------
# Plan

def earlier_dataset(folder, record):
    """ meta.json of an earlier run in this folder, or None. Refuses a dataset of other knobs. """
    for path in glob.glob(os.path.join(glob.escape(folder), '*.tmp')):
        if OF_A_DATASET.fullmatch(os.path.basename(path)[:-4]):
            os.remove(path)

    # no meta.json, or a damaged one: shards without a note are written again
    try:
        path = os.path.join(folder, 'meta.json')
        if read_json(path).get('format') == FORMAT:
            read_sealed(path)
    except ValueError:
        return None

    # a whole one that cannot be read is of another version, or not ours: never overwrite it
    try:
        meta = read_meta(folder)
    except ValueError as error:
        reason = str(error).partition('; run prepare.py again')[0]
        raise ValueError(f'{reason}; delete that folder or choose another --out=') from None

    # the same knobs? If max_tokens was None, the number that it stood for is the same number
    source = dict(meta.get('source', {}))
    if record['max_tokens'] == meta.get('max_tokens'):
        source['max_tokens'] = record['max_tokens']
    if record['shard_size'] is None:                         # it is settled, and compared, later
        record = record | dict(shard_size=source.get('shard_size'))
    defaults = {name: knob.default for name, knob in read_knobs(__file__).items()}
    for key in record:
        found = source.get(key, defaults.get(key))           # a newer knob was at its default then
        if found != record[key]:
            keep = ''
            if key == 'max_tokens' and found:
                keep = f'--max_tokens={found} keeps it, or '
            raise ValueError(f'{folder} holds a dataset with {key} = {found!r}, '
                             f'not {record[key]!r}; '
                             f'{keep}choose another --out= or delete that folder')

    return meta


def settle_shard_size(folder, earlier, n):
    """ The number of documents per shard, where the larger split has n documents. Refuses a folder
    with a dataset of another shard_size. """
    size = shard_size or fitting_shard_size(n)
    found = (earlier or {}).get('source', {}).get('shard_size', size)
    if found != size:
        raise ValueError(f'{folder} holds a dataset with shard_size = {found}, not {size}; '
                         f'--shard_size={found} keeps it, or choose another --out= or delete that '
                         'folder')
    return size


def note_shards(folder, earlier):
    """ Writes a note beside each shard of an earlier run. So the shards stay known even if
    meta.json goes (writing.write_file). """
    for split in earlier['splits'].values():
        for entry in split['shards']:
            write_entry(folder, entry)


def plan(folder, source, val, record, hold, tok):
    """ On rank 0 alone: looks at what is there, counts what there is to do, and fits the tokenizer
    and lsa on it. Returns what every rank needs. """
    hold(is_shared=False)
    earlier = earlier_dataset(folder, record)

    # which document goes to which split
    clusters = {}
    if homology:
        from corpora.proteins import homology_clusters
        stream = documents(source, Counter(), max_documents)
        clusters = homology_clusters(((text_hash(doc.text), doc.text) for doc in stream), homology)
    counts, limit, n_val, texts, sizes = survey(source, val is not None, clusters)
    n_train = counts['kept'] - n_val
    counts = dict(input=counts)
    if val is not None:
        counts['val_input'] = Counter()
        n_val = sum(1 for _ in documents(val, counts['val_input']))
        if not n_val:
            raise ValueError(f'{", ".join(val.names)}: no documents for val '
                             f'({counts["val_input"]["read"]} read)')

    # the size of a shard, and those that are there
    record['shard_size'] = settle_shard_size(folder, earlier, max(n_train, n_val))
    if earlier:
        note_shards(folder, earlier)

    # those of another dataset
    files, lsa = {}, None
    if same_as:
        listed = read_meta(same_as)['files']
        for name in set(listed) - {'bag.npy'}:               # that is fitted on the own texts
            content = Path(check_file(same_as, name, listed)).read_bytes()
            files[name] = write_file(os.path.join(folder, name), content)

    # or fitted once; the ranks read both from their files
    bpe_path = os.path.join(folder, 'tokenizer.json')
    if tokenizer == 'bpe':
        print(f'fitting the tokenizer on {len(texts):,} documents', flush=True)
        files['tokenizer.json'] = write_file(bpe_path, train_bpe(texts, vocab_size).encode())
    if encoder == 'lsa':
        from corpora.lsa import fit_lsa
        print(f'fitting lsa on {len(texts):,} documents', flush=True)
        lsa = fit_lsa(texts, encoder_dims or 128, seed, encoder_ngrams)
        files['encoder.npz'] = write_file(os.path.join(folder, 'encoder.npz'), as_bytes(lsa.save))

    # the length of a sample
    n_tokens = max_tokens
    if not n_tokens:
        every_document = None
        if source.has_latents:
            every_document = (doc for _, doc in route(source, val, limit, clusters))
        n_tokens = fitting_max_tokens(tok or bpe_tokenizer(bpe_path), texts, every_document)

    hold(is_shared=True)
    totals = Counter(train=n_train, val=n_val)
    return (limit, clusters, sizes, totals, counts, files, lsa and lsa.record, n_tokens,
            record['shard_size'])

# -----------------------------------------------------------------------------
# Encoder

def make_encoder():
    """ The encoder, if it is one that exists already. """
    name = read_meta(same_as)['encoder'] if same_as else encoder
    if name in ('none', 'lsa', None):
        return None
    where = pick_device(device)
    if where == 'cuda':
        where = f'cuda:{distributed.local_rank % torch.cuda.device_count()}'
    if same_as:
        lies = None if encoder == 'none' else encoder
        if name['id'] == 'lsa':
            lies = same_as
        return load_encoder(name, where, batch_size=embed_batch_size, folder=lies)
    return load_encoder(encoder, where, pooling=pooling, normalize=normalize, prefix=prefix,
                        dimension=encoder_dims or None, dtype=encoder_dtype, language=language,
                        batch_size=embed_batch_size)


# -----------------------------------------------------------------------------
# Write

def write_shards(folder, stream, seen, totals, settings, tok, encode):
    """ Writes this rank's shards, and keeps the whole ones of an earlier run. Returns {split: its
    entry for meta.json}, of all ranks. """
    entries = []
    n_done, seconds = 0, 0.0
    n_shards = {split: -(-total // shard_size) for split, total in totals.items()}
    own = sum(len(range(rank, n, world)) for n in n_shards.values())
    for split, i, docs in group_shards(stream, seen):
        began = time.monotonic()
        given = given_latents(docs)
        name = f'{split}-{i:05d}'
        key = shard_key(docs, given, settings)

        entry = written_before(folder, name, key)
        progress = 'there already'
        if not entry:
            first = i * shard_size
            entry = write_shard(folder, name, first, docs, given, tok, encode, max_tokens)
            entry['key'] = key
            write_entry(folder, entry)
            n_done += len(docs)
            seconds += time.monotonic() - began
            to_come = (own - len(entries) - 1) * shard_size
            eta = timedelta(seconds=int(to_come * seconds / n_done))
            speed = f'{n_done / seconds:,.0f} documents/s'
            progress = f'{speed} a rank | ETA {eta}' if world > 1 else f'{speed} | ETA {eta}'
        entries.append(entry)
        print(f'{name} of {n_shards[split]}: {entry["documents"]:,} documents, '
              f'{entry["samples"]:,} samples, {entry["tokens"]:,} tokens | {progress}', flush=True)
        check_nonfinite(entries, at_least=shard_size)
    if seen != totals:
        raise ValueError(f'{dict(totals)} documents were counted, and then {dict(seen)} read: '
                         'the input has changed meanwhile; run again')

    # the shards of all ranks, and their sums
    entries = sorted(itertools.chain(*all_gather_object(entries)), key=lambda entry: entry['name'])
    check_nonfinite(entries)
    splits = {}
    for split in totals:
        shards = [entry for entry in entries if entry['name'].startswith(f'{split}-')]
        splits[split] = {key: sum(entry[key] for entry in shards) for key in SUMS}
        splits[split]['shards'] = shards
    return splits


def check_nonfinite(entries, at_least=0):
    """ ValueError if many latents are NaN or inf. at_least: early in a run, a share of so many. """
    n_bad = sum(entry['nonfinite'] for entry in entries)
    n_good = sum(entry['samples'] for entry in entries)
    if n_bad > MAX_NONFINITE * max(n_bad + n_good, at_least):
        raise ValueError(f'{n_bad} of {n_bad + n_good} latents are NaN or inf, '
                         f'more than {MAX_NONFINITE:.1%}: the encoder is broken')


def finish(name, folder, record, tok, encode, splits, files, counts):
    """ On rank 0 alone: writes latent statistics and meta.json, and shows a summary. """
    # all latents have one shape, and both splits have samples
    shapes = set()
    for split in splits.values():
        for shard in split['shards']:
            if shard['latent_shape']:
                shapes.add(tuple(shard['latent_shape']))
    if len(shapes) > 1:
        raise ValueError(f'latents of several shapes: {sorted(shapes)}')
    for split, entry in splits.items():
        if not entry['samples']:
            raise ValueError(f'{split}: none of {entry["documents"]} documents is left, '
                             f'{entry["longer_than_max_tokens"]} have more than '
                             f'max_tokens={max_tokens} tokens')

    # statistics of the latents
    if shapes and not same_as:
        stats = latent_stats(folder, splits['train']['shards'])
        if not LatentStats(**stats).live.any():
            n = splits['train']['samples']
            raise ValueError(f'train: all {n} latents are the same, no dimension varies, so '
                             'nothing can be learned from them: check what made them '
                             '(--encoder, --latents_from), or prepare text only '
                             '(--encoder=none, no --latents_from)')
        path = os.path.join(folder, 'latent_stats.npz')
        files = files | {'latent_stats.npz': write_file(path, as_bytes(np.savez, **stats))}

    meta = dict(
        format=FORMAT,
        name=name,
        tokenizer=tok.record,
        encoder=encode and encode.record,
        latent_shape=list(*shapes) or None,
        token_dtype=token_dtype(tok),
        max_tokens=max_tokens,
        splits=splits,
        files=files,
        source=record,
        counts={key: dict(count) for key, count in counts.items()},
    )

    # a linear model from the tokens to the latent, where that is one vector
    if meta['latent_shape'] and meta['latent_shape'][0] == 1:
        from corpora.bag import fit_bag
        values = fit_bag(folder, meta, tok, encode)
        path = os.path.join(folder, 'bag.npy')
        files['bag.npy'] = write_file(path, as_bytes(np.save, values.numpy()))
        meta['files'] = files
    write_file(os.path.join(folder, 'meta.json'), sealed(meta).encode())

    # the notes, and files of an earlier attempt, are no part of the dataset
    listed = {*files, 'meta.json'}
    for split in splits.values():
        for shard in split['shards']:
            listed |= set(shard['files'])
    for path in glob.glob(os.path.join(glob.escape(folder), '*')):
        file = os.path.basename(path)
        if file not in listed and OF_A_DATASET.fullmatch(file):
            os.remove(path)
    summary(folder)

# -----------------------------------------------------------------------------
# The whole

def prepare():
    global max_tokens, shard_size
    name, folder, source, val, record = check_knobs()
    torch.set_num_threads(threads)
    os.makedirs(folder, exist_ok=True)
    with in_use(folder) as hold:
        # what can fail here fails before the corpus is read
        tok = None if tokenizer == 'bpe' else load_tokenizer(same_as or tokenizer)
        encode = make_encoder()

        # rank 0 reads and fits
        planned = on_rank_0(plan, folder, source, val, record, hold, tok)
        limit, clusters, sizes, totals, counts, files, lsa_record, max_tokens, shard_size = planned
        hold(is_shared=True)
        tok = tok or bpe_tokenizer(os.path.join(folder, 'tokenizer.json'))
        if lsa_record:
            encode = load_encoder(lsa_record, folder=folder)
        if encode and source.has_latents:
            check_given(documents(source, Counter()), encode, encoder)

        # all ranks write. A shard's key is a digest of its documents and of these settings
        settings = dict(files=files, tokenizer=tok.record, encoder=encode and encode.record,
                        max_tokens=max_tokens, threads=threads, embed_batch_size=embed_batch_size)
        seen = Counter()
        stream = route(source, val, limit, clusters, sizes, seen)
        splits = write_shards(folder, stream, seen, totals, settings, tok, encode)
        on_rank_0(finish, name, folder, record, tok, encode, splits, files, counts)


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
                meeting.reach_master(6.0)
                meeting.join('cpu', MONTH)
            prepare()
            distributed.leave()


if __name__ == '__main__':
    main()
