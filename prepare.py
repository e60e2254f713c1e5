"""
Corpora -> packed dataset: read, split, tokenize, chunk, embed, write.

    python prepare.py config/quickstart.py
    python prepare.py --input=captions.txt --encoder=minilm --out=data/captions
    torchrun --standalone --nproc_per_node=8 prepare.py --hub_dataset=openwebtext --encoder=e5
    python prepare.py --inspect=data/captions                # verify its files, and sum it up
    python prepare.py --export_dir=OLD --out=data/captions   # a file per text: the earlier layout

Documents. A document is a line, a paragraph, a file, a record or a sequence (corpora/sources.py).
Its hash decides whether it is train or val. One of more than max_tokens becomes
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
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from base import distributed
from base.console import stop_on_error
from base.distributed import on_rank0, rank, world
from base.files import read_sealed
from base.machine import pick_device, pick_dtype
from base.writing import DATASET, Claim
from configurator import configure, on_command_line
from corpora.icons import SHEET_SIZE
from corpora.latents import COLUMN, earlier_index
from corpora.layouts import export, inspected
from corpora.lsa import fit_lsa, load_lsa
from corpora.shards import (NAMES, finish, fitting_max_tokens, given_latents, write_files,
                            write_shards)
from corpora.sources import (BRING_LATENTS, documents, has_latents, is_fasta, is_icons, names_of,
                             paths_in, survey)
from corpora.tokenizers import bpe_tokenizer, load_tokenizer, train_bpe
from data import FORMAT, check_file, dataset_folder, read_meta
from encoders import CODE, find_encoder, load_encoder

# ---- what is read, details in corpora/sources.py
input = 'builtin'            # files, folders, globs (** too), comma-separated: text, .jsonl, .csv,
                             # .tsv, FASTA, .smi (each may be .gz), .parquet, .arrow, .feather;
                             # builtin: documentation of Python and of packages; icons: those
                             # that come along; with image_size also Iconify's sets, .json
val_input = ''               # validation documents of their own; then the input is not split
hub_dataset = ''      # instead of input: openwebtext | wikitext-103 | lm1b | fineweb-edu | a hub id
hub_revision = ''            # a commit; '': the newest
import_dir = ''              # instead of input: a folder of texts/, latents/, train_data.json;
                             # nothing is embedded again
latents_from = ''            # latents of the input's documents: .npy files or folders of them, a
                             # row a document. Files of two folders are paired by their names. Or
                             # column:NAME, lists of numbers in a column of the input's own records
image_size = 0               # [0, 4096]; pixels a side, where input is icons or a folder of
                             # images with metadata.csv; the latents are patches
patch = 8                    # [1, 4096]: pixels a side of a patch
channels = 3                 # 1 | 3; 1 is grey
shared_by = 0                # [0, 10_000]; of Iconify's sets only the names that at least so many
                             # sets draw, each drawing once; 0: all
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
device = 'auto'              # auto | cpu | cuda | mps | <cuda:1 or the like>; of the encoder
threads = 1                # [1, 1024]: of torch, a process; it changes the last bits of the latents
shard_size = 16_384          # [1, 1e9]: documents per shard
out = ''                     # '': data/<name of input>
seed = 1337                  # [0, 1e18]: of lsa
# ---- what exists already
inspect = ''                 # a dataset folder: verify and sum up, make nothing
export_dir = ''             # write the dataset `out` there in the earlier layout, make nothing else

OF_SAME_AS = ('tokenizer', 'vocab_size', 'max_tokens', 'encoder_dims', 'encoder_ngrams',
              'encoder_dtype', 'pooling', 'normalize', 'prefix', 'language')
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
    latents = given(*BRING_LATENTS)
    is_known = knobs.split_on in ('line', 'paragraph', 'file')
    refuse([
        (len(origins) != 1, 'documents come from one of input, hub_dataset, import_dir; given: '
         f'{" and ".join(origins) or "none"}'),
        (len(latents) > 1, f'{" and ".join(latents)} each say where latents come from: choose one'),
        (is_icons(knobs) and knobs.channels != 1,
         f'icons are grey: channels=1, found {knobs.channels}'),
        (knobs.input == 'icons' and knobs.image_size != SHEET_SIZE,
         f'input=icons needs image_size={SHEET_SIZE}, channels=1, found {knobs.image_size} and '
         f'{knobs.channels}'),
        (knobs.shared_by and (knobs.input == 'icons' or not is_icons(knobs)),
         f'shared_by={knobs.shared_by} is of Iconify\'s sets, .json'),
        (knobs.image_size % knobs.patch,
         f'image_size {knobs.image_size} must be a multiple of patch {knobs.patch}'),
        (knobs.val_input and (not knobs.input or knobs.latents_from or is_icons(knobs)),
         'val_input goes with an input of texts or a folder of pictures, without latents_from'),
        (knobs.latents_from.startswith(COLUMN) and knobs.input in ('', 'builtin'),
         f'latents_from={knobs.latents_from} is in the records of your own files: --input=FILES'),
        (os.path.isfile(os.path.join(knobs.tokenizer, 'meta.json')),
         f'tokenizer={knobs.tokenizer} is a dataset: --same_as takes its tokenizer, and its '
         'encoder'),
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
    own = Path(os.path.realpath(folder))
    encoder = Path(os.path.realpath(knobs.encoder))
    refuse([(encoder.is_dir() and own.is_relative_to(encoder),
             f'{folder} lies in the folder of the encoder {knobs.encoder}, which would become '
             'another one: choose another --out=')])
    return folder


def make_record(knobs, val):
    """ The knobs that decide what is in the dataset. No path of this machine is in it. """
    left_out = ('out', 'device', 'inspect', 'export_dir')
    record = {knob: value for knob, value in vars(knobs).items() if knob not in left_out}

    # of a path its last part
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


def on_rank0_or_raise(function, *args):
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
    what is in it, as shards.check_same reads it. """
    try:
        meta = read_sealed(os.path.join(folder, 'meta.json'))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f'{error}: the dataset was finished, and is damaged; delete {folder}, or '
                         'choose another --out=') from None

    # the first knob that differs is named
    earlier = {'format': meta.get('format'), **meta.get('source', {})}
    for knob, value in {'format': FORMAT, **record}.items():
        found = earlier.get(knob)
        if found != value:
            raise ValueError(f'{folder} holds a dataset with {knob} = {found!r}, not {value!r}; '
                             'choose another --out= or delete that folder')

    # its files by their digests, its shards by their keys
    finished = {name: entry['sha256'] for name, entry in meta['files'].items()}
    for split in meta['splits'].values():
        finished |= {shard['name']: shard['key'] for shard in split['shards']}
    return finished


def make_plan(knobs, folder, source, val, record, tok):
    """ Looks at what is there, counts what there is to do, and fits the tokenizer and lsa, alone in
    the folder. tok: the tokenizer, where none is to be fitted. """
    with Claim(folder, DATASET, NAMES) as claim:
        if knobs.encoder == 'none' and not (has_latents(source) or knobs.same_as):
            print('no encoder: a dataset of text alone, for --streams=text; --encoder=lsa fits one '
                  'on the text', flush=True)
        finished = check_earlier(folder, record)

        # the first reading
        print('reading the documents', flush=True)
        plan, texts = survey(source, val)

        # tokenizer and encoder: of another dataset, or fitted once. The ranks read their files
        content = {}
        if knobs.same_as:
            listed = read_meta(knobs.same_as)['files']
            for name in ('encoder.npz', 'latent_stats.npz', 'tokenizer.json'):
                if name in listed:
                    path = check_file(knobs.same_as, name, listed)
                    content[name] = Path(path).read_bytes()
        elif knobs.tokenizer == 'bpe':
            print(f'fitting the tokenizer on {len(texts):,} documents', flush=True)
            content['tokenizer.json'] = train_bpe(texts, knobs.vocab_size).encode()
        if knobs.encoder == 'lsa':
            print(f'fitting lsa on {len(texts):,} documents', flush=True)
            lsa = fit_lsa(texts, knobs.encoder_dims or 128, knobs.seed, knobs.encoder_ngrams)
            content['encoder.npz'] = lsa.arrays()
            plan.lsa = lsa.record
        plan.finished = finished
        plan.files = write_files(claim, content, finished)

        # the length of a sample. Where latents are given, all texts must fit, so all are read
        plan.max_tokens = knobs.max_tokens
        if not knobs.max_tokens:
            if has_latents(source):
                sources = [source, val] if val else [source]
                texts = (doc.text for one in sources for doc in documents(one, Counter()))
            tok = tok or fitted_tokenizer(folder)
            plan.max_tokens = fitting_max_tokens(tok, texts, has_latents(source))
        return plan


def fitted_tokenizer(folder):
    """ The tokenizer that make_plan has fitted, or taken from another dataset. """
    return bpe_tokenizer(os.path.join(folder, 'tokenizer.json'))

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

    # on a CPU float32, the encoder's default; code has no weights
    dtype = knobs.encoder_dtype
    if dtype is None and where.startswith('cuda') and knobs.encoder not in CODE:
        dtype = pick_dtype('auto', where)
    return find_encoder(
        knobs.encoder, where, knobs.embed_batch_size, pooling=knobs.pooling,
        normalize=knobs.normalize, prefix=knobs.prefix, dimension=knobs.encoder_dims or None,
        dtype=dtype, language=knobs.language)


def check_given(stream, encoder, name):
    """ ValueError unless the latents of the documents are those of the encoder `name`: over a few
    texts, both centred on their mean, the mean cosine is at least .95. """
    docs = itertools.islice(stream, 32)
    docs = [doc for doc in docs if np.isfinite(doc.latent()).all()]
    if len(docs) < 3:
        return
    hint = 'name their encoder, with its --prefix and --pooling, or --encoder=none'

    # of one shape
    own = torch.as_tensor(encoder([doc.text for doc in docs])).float()   # (n, N, D)
    given = torch.from_numpy(given_latents(docs)).float()                # (n, N, D)
    if given.shape != own.shape:
        raise ValueError(f'the latents given are {tuple(given.shape[1:])}, encoder {name} makes '
                         f'{tuple(own.shape[1:])}: {hint}')

    # of one direction, once the mean is taken off: raw embeddings all look alike
    given = given - given.mean(0)
    own = own - own.mean(0)
    cosine = torch.nn.functional.cosine_similarity(own, given, dim=2).mean()
    if not cosine >= .95:
        raise ValueError(f'the latents given are not those of encoder {name}: over {len(docs)} '
                         f'texts their mean centred cosine with its own is {cosine:.3f}; {hint}')

# -----------------------------------------------------------------------------
# The whole

def prepare(knobs):
    """ Makes the dataset. Every process calls it. ValueError or OSError where that fails. """
    # what is read, where it goes, and what the dataset will say of itself
    source, val = sources_of(knobs)
    folder = folder_of(knobs)
    record = make_record(knobs, val)

    # what can fail here fails before the corpus is read
    torch.set_num_threads(knobs.threads)
    tok = None
    if knobs.same_as or knobs.tokenizer != 'bpe':
        tok = load_tokenizer(knobs.same_as or knobs.tokenizer)
    encode = make_encoder(knobs)

    # rank 0 reads all documents and fits, alone in the folder
    plan = on_rank0_or_raise(make_plan, knobs, folder, source, val, record, tok)

    # then all ranks write. While a process of this run lives, no other run gets the folder for
    # itself
    with Claim(folder, DATASET, NAMES, shared=True) as claim:
        tok = tok or fitted_tokenizer(folder)
        if plan.lsa:
            encode = load_lsa(folder, plan.lsa)
        if encode and has_latents(source):
            check_given(documents(source, Counter()), encode, knobs.encoder)
        entries = write_shards(claim, plan, source, val, tok, encode)
        on_rank0_or_raise(finish, claim, plan, record, entries, tok, encode)


def main():
    knobs = SimpleNamespace(**configure(globals()))
    if rank() and (knobs.inspect or knobs.export_dir):
        return
    with stop_on_error():
        if knobs.inspect:
            inspected(knobs.inspect)
        elif knobs.export_dir:
            export(os.path.normpath(knobs.out), knobs.export_dir)
        else:
            with stop_on_error(code=4):
                distributed.join('cpu', MONTH)
            prepare(knobs)
            distributed.leave()


if __name__ == '__main__':
    main()
