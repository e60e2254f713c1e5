"""
Corpora -> packed dataset: read, split, tokenize, chunk, embed, write.

    python prepare.py config/quickstart.py
    python prepare.py --input=captions.txt --encoder=minilm --out=data/captions
    torchrun --standalone --nproc_per_node=8 prepare.py --hub_dataset=openwebtext --encoder=e5
    python prepare.py --inspect=data/captions                # verify its files, and sum it up
    python prepare.py --export_dir=OLD --out=data/captions   # a file per text: the earlier layout

Documents. A document is a line, a paragraph, a file, a record or a sequence (corpora/sources.py).
Its hash decides whether it is train or val (corpora/splits.py). One of more than max_tokens becomes
several samples; where latents are given, or of molecules, it is dropped. The encoder embeds exactly
the text that the tokens decode to. What is read is written, or is a counted drop.

Shards. Rank 0 reads all documents once, then each rank writes its own shards. The bytes of a shard
depend on its documents and the knobs, never on who wrote it or when. A file appears by rename when
it is whole, and meta.json comes last. After a kill or with a damaged file, run the same command
again: what is missing or broken is written, and a finished dataset never becomes another.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))   # PYTHONSAFEPATH=1 leaves it out
if __name__ == '__main__':
    import base.begin                                      # before torch

import itertools
import re
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from base import distributed
from base.console import stop_on_error, warn
from base.distributed import all_gather_object, on_rank0, rank, world
from base.files import read_sealed
from base.machine import pick_device, pick_dtype
from base.writing import DATASET, Claim, sealed
from configurator import configure, on_command_line
from corpora.fitting import fit_lsa, train_bpe
from corpora.latents import COLUMN, check_given, check_stats, given_latents
from corpora.layouts import earlier_index, export, summary, verify
from corpora.shards import (NAMES, SUMS, as_bytes, check_same, fitting_max_tokens, latent_stats,
                            shard_key, token_dtype, write_files, write_shard, written_before)
from corpora.sources import documents, has_latents, is_fasta, names_of, paths_in
from corpora.splits import own_shards, survey
from corpora.tokenizers import bpe_tokenizer, load_tokenizer
from data import FORMAT, LatentStats, check_file, dataset_folder, read_meta
from encoders import find_encoder, load_encoder

# ---- what is read, details in corpora/sources.py
input = 'builtin'            # files, folders, globs (** too), comma-separated: text, .jsonl, .csv,
                             # .tsv, FASTA, .smi (each may be .gz), .parquet, .arrow, .feather;
                             # builtin: documentation of Python and of packages; digits:
                             # scikit-learn's
val_input = ''               # validation documents of their own; then the input is not split
hub_dataset = ''      # instead of input: openwebtext | wikitext-103 | lm1b | fineweb-edu | a hub id
hub_revision = ''            # a commit; '': the newest
import_dir = ''              # instead of input: a folder of texts/, latents/, train_data.json;
                             # nothing is embedded again
latents_from = ''            # latents of the input's documents: .npy files or folders of them, a
                             # row a document. Files of two folders are paired by their names. Or
                             # column:NAME, lists of numbers in a column of the input's own records
image_size = 0               # [0, 4096]; pixels a side, where input is digits or a folder of images
                             # with metadata.csv; the latents are its patches
patch = 8                    # [1, 4096]: pixels a side of a patch
channels = 3                 # 1 | 3; 1 is grey
split_on = 'line'            # line | paragraph | file | <the line between two documents, without
                             # letters, such as %>: what a document is in a text file
encoding = 'utf-8'          # of text files: any of Python's codecs, such as latin-1, cp1252, utf-16
invalid_bytes = 'stop'       # stop | replace: for bytes that are not of the encoding; replaced by
                             # U+FFFD, they are counted
field = 'text'               # <a name>: the document's field in .jsonl, column in .csv, .tsv,
                             # .parquet, .arrow, hub datasets
distinct = None              # None | bool: drop what was read before; None: of FASTA only
val_fraction = .01           # (0, 1): of the documents, chosen by hash; at least one. An image goes
                             # with all its captions
max_documents = 0            # [0, 1e12]: only the first so many of the input; 0: all
# ---- what it becomes
same_as = ''                 # a dataset's folder, or its name in data/: with tokenizer, encoder,
                             # scale of the latents and max_tokens, as init_from of a training on
                             # the new one needs; --encoder=FOLDER: where its encoder lies now
tokenizer = ''               # bpe (fitted here) | byte | esm | smiles | a tiktoken name such as
                             # r50k_base; '': bpe, of FASTA esm
vocab_size = 4096            # [258, 5e5]: of bpe, EOS and PAD included
max_tokens = None            # None | int [8, 65535]; None: what 99.9 % of the texts need, at most
                             # 127; with given latents what all need. A longer document becomes
                             # several samples; the model's seq_len is one more (EOS)
encoder = 'none'             # <a hub id, or a folder>: or none (text only) | lsa (fitted here) |
                             # minilm | e5 | bge | qwen | sonar | t5 | esm2 | morgan (of SMILES)
encoder_dims = 0             # [0, 65536]; lsa: dimensions (0: 128); others: Matryoshka cut (0: all)
encoder_ngrams = 1           # [1, 4]; lsa: reads up to so many words that follow each other as one
                             # term; 1: the order of the words is not embedded
encoder_dtype = None         # None | float32 | bfloat16 | float16, of the encoder's weights; None:
                             # bfloat16 on a GPU with instructions for it, else float32
pooling = None               # None | mean | cls | last; None, here and below: the encoder's own
normalize = None             # None | bool: L2
prefix = None                # None | '' | <a text>: put before every text
language = None              # None | <a code>; sonar: such as eng_Latn
embed_batch_size = 64        # [1, 65536]
device = 'auto'              # auto | cpu | cuda | <cuda:1 or the like>; of the encoder
threads = 1                # [1, 1024]: of torch, a process; it changes the last bits of the latents
shard_size = 16_384          # [1, 1e9]: documents per shard
out = ''                     # '': data/<name of input>
seed = 1337                  # [0, 1e18]: of lsa
# ---- what exists already
inspect = ''                 # a dataset folder: verify and sum up, make nothing
export_dir = ''             # write the dataset `out` there in the earlier layout, make nothing else

OF_SAME_AS = ('tokenizer', 'vocab_size', 'max_tokens', 'encoder_dims', 'encoder_ngrams',
              'encoder_dtype', 'pooling', 'normalize', 'prefix', 'language')
MAX_NONFINITE = 1e-3         # share of the samples, here and below
MAX_ZERO = .1
MOST_SHARDS = 10_000         # meta.json says about 1 kB of each, and is read whole (MOST_JSON)
MONTH = 30 * 86400.0         # seconds that a process waits for the others

# -----------------------------------------------------------------------------
# Knobs. `knobs` is a namespace of all of them, a source has a copy of them

def sources_of(knobs):
    """ Gives the knobs that are '' or None their values. Returns two sources (corpora/sources.py):
    that of train, and that of val, or None where val is split off train. ValueError where knobs
    exclude each other. """
    if knobs.same_as:
        take_settings(knobs)
    if (knobs.hub_dataset or knobs.import_dir) and knobs.input == 'builtin':
        knobs.input = ''                                     # the default gives way

    def given(*names):
        return [name for name in names if getattr(knobs, name)]
    origins = given('input', 'hub_dataset', 'import_dir')
    latents = given('import_dir', 'latents_from', 'image_size')
    is_digits = knobs.input == 'digits'
    is_known = knobs.split_on in ('line', 'paragraph', 'file')
    refuse([
        (len(origins) != 1, 'documents come from one of input, hub_dataset, import_dir; given: '
         f'{" and ".join(origins) or "none"}'),
        (len(latents) > 1, f'{" and ".join(latents)} each say where latents come from: choose one'),
        (is_digits and (knobs.image_size, knobs.channels) != (8, 1),
         f'input=digits needs image_size=8, channels=1, found {knobs.image_size} and '
         f'{knobs.channels}'),
        (knobs.image_size % knobs.patch,
         f'image_size {knobs.image_size} must be a multiple of patch {knobs.patch}'),
        (knobs.val_input and (not knobs.input or latents),
         'val_input goes with an input of texts, without latents_from or image_size'),
        (knobs.latents_from.startswith(COLUMN) and knobs.input in ('', 'builtin'),
         f'latents_from={knobs.latents_from} is in the records of your own files: --input=FILES'),
        (latents and (knobs.same_as or knobs.encoder == 'lsa'),
         'the latents are given, so they are not those of same_as or of an lsa that is fitted '
         'here: name their encoder, or --encoder=none'),
        # a misspelled 'lines' would make one document of each file
        (not is_known and re.search(r'\w', knobs.split_on),
         f'split_on={knobs.split_on!r}: expected line | paragraph | file, or the line between two '
         'documents, which has no letters, such as %'),
    ])
    try:
        ''.encode(knobs.encoding)
    except LookupError as error:
        raise ValueError(f'{error}; name one such as utf-8, latin-1, cp1252, utf-16') from None

    # what follows from the source
    is_protein = is_fasta(knobs)
    if knobs.distinct is None:
        knobs.distinct = is_protein
    knobs.tokenizer = knobs.tokenizer or ('esm' if is_protein else 'bpe')

    # validation documents of their own, or None: they are split off the input
    source = SimpleNamespace(**vars(knobs), split='train')
    others = {}
    if knobs.val_input:
        others = dict(input=knobs.val_input)
    elif knobs.hub_dataset:
        from corpora.hub import HUB
        if 'val' in HUB.get(knobs.hub_dataset, {}):
            others = dict(split=HUB[knobs.hub_dataset]['val'])
    elif knobs.import_dir and os.path.exists(earlier_index(knobs.import_dir, 'validation')):
        others = dict(split='validation')
    val = others and SimpleNamespace(**vars(source) | dict(max_documents=0) | others)
    return source, val or None


def refuse(mistakes):
    """ ValueError for the first of [(whether it was made, what to say)] that was made. """
    for is_made, message in mistakes:
        if is_made:
            raise ValueError(message)


def take_settings(knobs):
    """ With same_as: the knobs of OF_SAME_AS are those of the other dataset, also where a config
    file sets them. ValueError where the command line does, or where no text can be embedded as the
    other dataset's. """
    other = knobs.same_as
    named = [knob for knob in OF_SAME_AS if on_command_line(knob)]
    if named:
        raise ValueError(f'{named[0]} is that of same_as={other}: run without --{named[0]}')
    if not on_command_line('encoder'):
        knobs.encoder = 'none'
    elif not os.path.isdir(knobs.encoder):
        raise ValueError(f'encoder is that of same_as={other}: run without --encoder, or name the '
                         f'folder where it lies now; found encoder={knobs.encoder}')

    knobs.same_as = dataset_folder(other)
    meta = read_meta(knobs.same_as)
    if meta['latent_shape'] and not meta['encoder']:
        raise ValueError(f'same_as={other}: nobody knows what made its latents, so no other text '
                         'can be embedded in the same way')
    for knob in OF_SAME_AS:
        setattr(knobs, knob, meta['source'][knob])
    knobs.max_tokens = meta['max_tokens']


def folder_of(knobs):
    """ The dataset's folder: out, or data/ and the name of the input's folder or first file, up to
    the first dot. """
    if knobs.out:
        folder = os.path.normpath(knobs.out)
    else:
        path = names_of(knobs)[0]
        if os.path.isdir(knobs.input):
            path = os.path.abspath(knobs.input)
        name = os.path.basename(path).split('.')[0]
        refuse([(not name, 'no name for the dataset: give --out=data/NAME')])
        folder = os.path.join('data', name)

    # one more tokenizer.json, and it would be another encoder
    own, encoder = Path(os.path.realpath(folder)), Path(os.path.realpath(knobs.encoder))
    refuse([(encoder.is_dir() and own.is_relative_to(encoder),
             f'{folder} lies in the folder of the encoder {knobs.encoder}, which would become '
             'another one: choose another --out=')])
    return folder


def make_record(knobs, val):
    """ The knobs that decide what is in the dataset. No path of this machine is in it. """
    left_out = ('out', 'device', 'inspect', 'export_dir')
    record = {knob: value for knob, value in vars(knobs).items() if knob not in left_out}
    for knob in ('same_as', 'latents_from'):
        if record[knob].startswith(COLUMN):
            continue
        paths = [os.path.normpath(path) for path in paths_in(record[knob])]
        record[knob] = ','.join(map(os.path.basename, paths))
    names = names_of(knobs)
    return record | dict(
        input=names, val_input=names_of(val) if knobs.val_input else [],
        hub_dataset=knobs.hub_dataset and names[0],
        import_dir=knobs.import_dir and names[0])


def on_rank_0(function, *args):
    """ Calls a function on rank 0; every rank gets its result. ValueError or OSError where that
    fails; where there are several ranks, all leave with exit code 2. """
    result, error = on_rank0(function, *args)
    if error and world() > 1:
        distributed.stop_all(error, code=2)
    if error:
        raise error
    return result

# -----------------------------------------------------------------------------
# Plan, on rank 0 alone

def check_earlier(folder, record):
    """ ValueError where the folder holds a dataset of other knobs: it is not overwritten. Returns
    what is in it, as check_same reads it. """
    try:
        meta = read_sealed(os.path.join(folder, 'meta.json'))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f'{error}: the dataset was finished, and is damaged; delete {folder}, or '
                         'choose another --out=') from None
    earlier = {'format': meta.get('format'), **meta.get('source', {})}
    # the first knob that differs is named
    for knob, value in {'format': FORMAT, **record}.items():
        found = earlier.get(knob)
        if found != value:
            raise ValueError(f'{folder} holds a dataset with {knob} = {found!r}, not {value!r}; '
                             'choose another --out= or delete that folder')
    finished = {name: entry['sha256'] for name, entry in meta['files'].items()}
    for split in meta['splits'].values():
        finished |= {shard['name']: shard['key'] for shard in split['shards']}
    return finished


def make_plan(knobs, claim, source, val, record, tok):
    """ Looks at what is there, counts what there is to do, and fits the tokenizer and lsa. tok: the
    tokenizer, where none is to be fitted. """
    folder = claim.folder
    finished = check_earlier(folder, record)
    print('reading the documents', flush=True)
    plan, texts = survey(source, val, knobs.val_fraction)

    # tokenizer and encoder: of another dataset, or fitted once. The ranks read them from the files
    content = {}
    if knobs.same_as:
        listed = read_meta(knobs.same_as)['files']
        for name in ('encoder.npz', 'latent_stats.npz', 'tokenizer.json'):
            if name in listed:
                content[name] = Path(check_file(knobs.same_as, name, listed)).read_bytes()
    elif knobs.tokenizer == 'bpe':
        print(f'fitting the tokenizer on {len(texts):,} documents', flush=True)
        content['tokenizer.json'] = train_bpe(texts, knobs.vocab_size).encode()
    if knobs.encoder == 'lsa':
        print(f'fitting lsa on {len(texts):,} documents', flush=True)
        lsa = fit_lsa(texts, knobs.encoder_dims or 128, knobs.seed, knobs.encoder_ngrams)
        content['encoder.npz'] = as_bytes(np.savez, **lsa.arrays())
        plan.lsa = lsa.record
    plan.finished = finished
    plan.files = write_files(claim, content, finished)

    # the length of a sample
    plan.max_tokens = knobs.max_tokens
    if not knobs.max_tokens:
        if has_latents(source):
            sources = [source, val] if val else [source]
            texts = (doc.text for one in sources for doc in documents(one, Counter()))
        tok = tok or bpe_tokenizer(os.path.join(folder, 'tokenizer.json'))
        plan.max_tokens = fitting_max_tokens(tok, texts, has_latents(source))
    return plan

# -----------------------------------------------------------------------------
# Encoder

def make_encoder(knobs):
    """ The encoder, if it is one that exists already. """
    where = pick_device(knobs.device)

    # that of the other dataset, with all its settings
    if knobs.same_as:
        record = read_meta(knobs.same_as)['encoder']
        folder = None if knobs.encoder == 'none' else knobs.encoder
        if record and record['id'] == 'lsa':
            folder = knobs.same_as
        return record and load_encoder(record, folder, where, knobs.embed_batch_size)
    if knobs.encoder in ('none', 'lsa'):
        return None

    # on a CPU float32, the encoder's default; morgan has no settings
    dtype = knobs.encoder_dtype
    if dtype is None and where.startswith('cuda') and knobs.encoder != 'morgan':
        dtype = pick_dtype('auto', where)
    return find_encoder(
        knobs.encoder, where, knobs.embed_batch_size, pooling=knobs.pooling,
        normalize=knobs.normalize, prefix=knobs.prefix, dimension=knobs.encoder_dims or None,
        dtype=dtype, language=knobs.language)

# -----------------------------------------------------------------------------
# Write

def write_shards(knobs, claim, plan, shards, settings, tok, encode):
    """ Writes this rank's shards, and keeps the whole ones of an earlier run. settings: what
    decides a shard's bytes besides its documents. Returns {split: its entry for meta.json}, of all
    ranks. """
    folder = claim.folder
    entries = []
    n_shards = {}
    n_left = 0                                               # of this rank
    for split, n in plan.totals.items():
        n_shards[split] = -(-n // knobs.shard_size)
        n_left += len(range(rank(), n_shards[split], world()))
        # does a finished dataset have more shards than that? Then one of them would vanish
        check_same(folder, f'{split}-{n_shards[split]:05d}', None, plan.finished)
    n_all = sum(n_shards.values())
    if n_all > MOST_SHARDS:
        raise ValueError(f'shard_size={knobs.shard_size:,} makes {n_all:,} shards, at most '
                         f'{MOST_SHARDS:,} expected: choose a larger --shard_size=')
    for split, i, docs in shards:
        began = time.monotonic()
        given = given_latents(docs)
        name = f'{split}-{i:05d}'
        key = shard_key(docs, given, settings)
        n_left -= 1

        # the note of an earlier run counts only with the same key
        check_same(folder, name, key, plan.finished)
        entry = written_before(folder, name, key)
        progress = 'there already'
        if not entry:
            entry = write_shard(claim, name, key, docs, given, tok, encode, plan.max_tokens)
            seconds = time.monotonic() - began
            eta = timedelta(seconds=int(n_left * seconds))
            progress = f'{len(docs) / seconds:,.0f} documents/s | ETA {eta}'
        entries.append(entry)
        print(f'{name} of {n_shards[split]}: {entry["documents"]:,} documents, '
              f'{entry["samples"]:,} samples, {entry["tokens"]:,} tokens | {progress}', flush=True)
        check_latents(entries, at_least=knobs.shard_size)

    # the shards of all ranks, and their sums
    entries = list(itertools.chain(*all_gather_object(entries)))
    entries.sort(key=lambda entry: entry['name'])
    check_latents(entries)
    splits = {}
    for split in ('train', 'val'):
        shards = [entry for entry in entries if entry['name'].startswith(f'{split}-')]
        splits[split] = {key: sum(entry[key] for entry in shards) for key in SUMS}
        splits[split]['shards'] = shards
    return splits


def check_latents(entries, at_least=0):
    """ ValueError if too large a share of the latents cannot be stored in float16 (NaN, inf, or too
    large), or of the given ones is zeros; a warning if a few are so. at_least: while shards are
    still being written, the share is at least of so many. """
    n_bad = sum(entry['nonfinite'] for entry in entries)
    n_good = sum(entry['samples'] for entry in entries)
    first = next((entry['flaw'] for entry in entries if entry.get('flaw')), '')
    said = f'{n_bad} of {n_bad + n_good} latents cannot be stored'
    if n_bad > MAX_NONFINITE * max(n_bad + n_good, at_least):
        raise ValueError(f'{said}, more than {MAX_NONFINITE:.1%}; the first: {first}')
    if n_bad and not at_least and rank() == 0:
        warn(f'{said} and are dropped; the first: {first}')

    n_zero = sum(entry['zero'] for entry in entries)
    first = next((entry['first_zero'] for entry in entries if entry['first_zero']), '')
    said = f'{n_zero} of {n_good} latents are zeros, which say nothing of their texts'
    if n_zero > MAX_ZERO * max(n_good, at_least):
        raise ValueError(f'{said}, more than {MAX_ZERO:.0%}; the first: {first}: mend them, or '
                         'leave out these rows and their texts')
    if n_zero and not at_least and rank() == 0:
        warn(f'{said}; the first: {first}')


def finish(claim, plan, record, splits, tok, encode):
    """ On rank 0 alone: writes latent statistics, the bag and meta.json, and shows a summary. """
    folder = claim.folder
    # all latents have one shape, and both splits have samples
    shards = [shard for split in splits.values() for shard in split['shards']]
    shapes = {tuple(shard['latent_shape']) for shard in shards if shard['latent_shape']}
    if len(shapes) > 1:
        raise ValueError(f'latents of several shapes: {sorted(shapes)}')
    for split, entry in splits.items():
        if not entry['samples']:
            raise ValueError(f'{split}: none of {entry["documents"]} documents is left, '
                             f'{entry["longer_than_max_tokens"]} have more than '
                             f'max_tokens={plan.max_tokens} tokens')
    files = dict(plan.files)

    # statistics of the latents
    if shapes and 'latent_stats.npz' not in files:           # else it is that of same_as
        stats = latent_stats(folder, splits['train']['shards'])
        # a fingerprint gets one scale for all its bits. With a scale of its own a rare bit would
        # weigh more than the others, and so would an error in it
        if encode and encode.record['id'] == 'morgan':
            live = stats['std'] > 0
            stats['std'][live] = np.sqrt(np.mean(stats['std'][live] ** 2))
        check_stats(LatentStats(**stats))
        files |= write_files(claim, {'latent_stats.npz': as_bytes(np.savez, **stats)})

    meta = dict(
        format=FORMAT,
        tokenizer=tok.record,
        encoder=encode and encode.record,
        latent_shape=list(*shapes) or None,
        token_dtype=token_dtype(tok),
        max_tokens=plan.max_tokens,
        splits=splits,
        files=files,
        source=record,
        counts=plan.counts,
    )

    # a linear model from the tokens to the latent, where that is one vector
    if shapes and meta['latent_shape'][0] == 1:
        from corpora.bag import fit_bag
        bag = fit_bag(folder, meta, tok, encode).numpy()
        files |= write_files(claim, {'bag.npy': as_bytes(np.save, bag)})
    write_files(claim, {'meta.json': sealed(meta).encode()})
    summary(folder)

# -----------------------------------------------------------------------------
# The whole

def prepare(knobs):
    source, val = sources_of(knobs)
    folder = folder_of(knobs)
    if rank() == 0 and knobs.encoder == 'none' and not (has_latents(source) or knobs.same_as):
        print('no encoder: a dataset of text alone, for --streams=text; --encoder=lsa fits one on '
              'the text', flush=True)
    record = make_record(knobs, val)
    torch.set_num_threads(knobs.threads)
    # what can fail here fails before the corpus is read
    tok = None
    if knobs.same_as or knobs.tokenizer != 'bpe':
        tok = load_tokenizer(knobs.same_as or knobs.tokenizer)
    encode = make_encoder(knobs)

    # rank 0 reads and fits, alone in the folder
    def plan_alone():
        with Claim(folder, DATASET, NAMES) as claim:
            return make_plan(knobs, claim, source, val, record, tok)
    plan = on_rank_0(plan_alone)

    # while a process of this run lives, no other run gets the folder for itself
    with Claim(folder, DATASET, NAMES, shared=True) as claim:
        tok = tok or bpe_tokenizer(os.path.join(folder, 'tokenizer.json'))
        if plan.lsa:
            encode = load_encoder(plan.lsa, folder=folder)
        if encode and has_latents(source):
            check_given(documents(source, Counter()), encode, knobs.encoder)

        # all ranks write. A shard's key is a digest of its documents and of these settings
        settings = dict(
            counted=SUMS,                                    # another version counts other things
            files=plan.files,
            tokenizer=tok.record,
            encoder=encode and encode.record,
            max_tokens=plan.max_tokens,
            threads=knobs.threads,
            embed_batch_size=knobs.embed_batch_size,
        )
        shards = own_shards(plan, knobs.shard_size, source, val)
        splits = write_shards(knobs, claim, plan, shards, settings, tok, encode)
        on_rank_0(finish, claim, plan, record, splits, tok, encode)


def main():
    knobs = SimpleNamespace(**configure(globals()))
    if rank() and (knobs.inspect or knobs.export_dir):
        return
    with stop_on_error():
        if knobs.inspect:
            verify(knobs.inspect)
            summary(knobs.inspect)
        elif knobs.export_dir:
            export(os.path.normpath(knobs.out), knobs.export_dir)
        else:
            with stop_on_error(code=4):
                distributed.join('cpu', MONTH)
            prepare(knobs)
            distributed.leave()


if __name__ == '__main__':
    main()
