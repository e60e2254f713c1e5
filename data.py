""" The packed dataset (written by prepare.py) and its tokenizer: everything between the disk and a batch.

A sample is a text and, unless the dataset is text only, the latent vectors of that very text. A batch is
    tokens   (B, L)     int64     the text, one EOS, then PAD up to L
    latents  (B, N, D)  float32   standardised per dimension; dead dimensions are 0
Letters: B batch, L text tokens, N latent vectors, D latent dimensions, V token ids (EOS and PAD among them); MASK is id V.

Order and noise are pure functions of (seed, step, purpose), drawn on the host for the whole global batch: nothing is
replayed after a resume, and nothing depends on how many ranks share the rows.
"""
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from configurator import run_config
from files import MAX_HEADER, check_fields, read_array, read_arrays, read_json, sha256
from rules import short

FORMAT = 1                     # of meta.json; a reader refuses any other
DEAD = 1e-3                    # a latent dimension whose std is below DEAD * median std carries nothing: MiniLM has three
RESIDUES = 'LAGVSERTIDPKQNFYMHWCXBUZO.-'    # ESM's letters, in its order
MAX_META = 2**26               # bytes of a meta.json, which lists every shard, or of a tokenizer.json
CHECK_ALL_TOKENS = 2**27       # splits up to this many tokens are checked id by id when opened (well under a second)

# The form of meta.json, in the rules of rules.py. What only prepare.py's summary reads has a '?'.
COUNT = 'int [0, 2**50]'
FILES = {'*': {'bytes': COUNT, 'sha256': '<a digest>'}}
SUMS = {'documents?': COUNT, 'bytes?': COUNT, 'nonfinite?': COUNT, 'longer_than_max_tokens?': COUNT, 'truncated?': COUNT}
LATENT_SHAPE = (None, ['int [1, 2**24]'])
SHARD = {'name': '<a name>', 'samples': COUNT, 'tokens': COUNT, 'longest?': COUNT, 'latent_shape?': LATENT_SHAPE,
         'key?': '<a digest>', 'files': FILES, **SUMS}
META = {
    'format': '1',
    'name?': "'' | <a name>",
    'tokenizer': {'kind': '<a name>', 'vocab_size': 'int [2, 2**32]', 'eos': 'int [0, 2**32]', 'pad': 'int [0, 2**32]'},
    'encoder': (None, {
        'id': '<a name>', 'revision?': 'None | <a commit or a digest>', 'pooling?': '<a name>', 'prefix?': "'' | <a text>",
        'normalize?': 'bool', 'dimension?': 'int [1, 2**24]', 'max_length?': 'None | int [1, 2**62]', 'dtype?': '<a name>',
        'language?': 'None | <a code>'}),
    'latent_shape': LATENT_SHAPE,
    'token_dtype': 'uint16 | uint32',
    'max_tokens': 'int [1, 65535]',
    'splits': {'*': {'samples': COUNT, 'tokens?': COUNT, 'shards': [SHARD], **SUMS}},
    'files': FILES,
    'source?': {'image_size?': 'int [0, 4096]', 'patch?': 'int [1, 4096]', 'channels?': '1 | 3'},
    'counts?': {'*': {'read': COUNT, 'kept': COUNT, '*': COUNT}},
}

# -----------------------------------------------------------------------------
# Tokenizers: each is an encoder and a table of the bytes behind every id, so decoding is one join whatever the kind

class Tokenizer:
    """ encode(text) -> ids, decode(ids) -> text. Text never produces EOS, PAD or MASK, and decode(encode(x)) == x. """

    def __init__(self, kind, encode_batch, pieces, eos=None):
        self.kind = kind                                     # 'bpe', 'byte', 'esm' or the name of a tiktoken encoding
        self.eos = len(pieces) if eos is None else eos
        self.pad = len(pieces) + (eos is None)
        self.vocab_size = self.pad + 1                       # V; the head has V columns, MASK = V has none
        self.pieces = [*pieces, *[b''] * (self.vocab_size - len(pieces)), b'[MASK]']   # V + 1 byte strings; EOS and PAD are empty
        self.encode_batch = encode_batch                     # list[str] -> list[list[int]]

    def encode(self, text):
        return self.encode_batch([text])[0]

    def decode(self, ids):
        """ Stops at the first EOS, passes over PAD, writes MASK as [MASK]; bytes that are no UTF-8 become U+FFFD. """
        ids = ids.tolist() if hasattr(ids, 'tolist') else list(ids)
        if self.eos in ids:
            ids = ids[:ids.index(self.eos)]
        return b''.join([self.pieces[i] for i in ids]).decode('utf-8', 'replace')

    @property
    def record(self):
        return dict(kind=self.kind, vocab_size=self.vocab_size, eos=self.eos, pad=self.pad)


def is_end(tokens, tokenizer):
    """ Where tokens (B, L) are EOS or PAD. """
    return (tokens == tokenizer.eos) | (tokens == tokenizer.pad)


def byte_tokenizer():
    return Tokenizer('byte', lambda texts: [list(text.encode()) for text in texts], [bytes([i]) for i in range(256)])


def esm_tokenizer():
    """ A letter per residue, ESM's alphabet (its special tokens are ours: EOS, PAD, MASK). """
    letters = RESIDUES.encode()
    table = np.full(256, -1, np.int64)
    table[list(letters)] = np.arange(len(letters))

    def encode_batch(texts):
        out = [table[np.frombuffer(text.encode(), np.uint8)] for text in texts]
        for text, ids in zip(texts, out):
            if len(ids) and ids.min() < 0:
                raise ValueError(f'tokenizer esm: {text[:60]!r} is no protein, its letters are {RESIDUES}')
        return [ids.tolist() for ids in out]
    return Tokenizer('esm', encode_batch, [bytes([letter]) for letter in letters])


def check_bpe(path):
    """ ValueError unless a tokenizer.json is a byte-level BPE and nothing else, as train_bpe writes it:
    what else the library would do for it can end the process, or take memory without end. """
    found = read_json(path, limit=MAX_META)
    model, splitter = found.get('model'), found.get('pre_tokenizer')
    if not isinstance(model, dict) or model.get('type') != 'BPE':
        raise ValueError(f'{path}: its model is no BPE; run prepare.py again')
    if not isinstance(splitter, dict) or splitter.get('type') != 'ByteLevel':
        raise ValueError(f'{path}: its pre_tokenizer is not ByteLevel; run prepare.py again')

    absent = ('normalizer', 'truncation', 'padding', 'post_processor', 'decoder', 'added_tokens')
    absent_in_model = ('dropout', 'unk_token', 'continuing_subword_prefix', 'end_of_word_suffix')
    for part, names in ((found, absent), (model, absent_in_model)):
        for name in names:
            if part.get(name) not in (None, []):
                raise ValueError(f'{path}: {name} is {short(part[name])}, expected none; run prepare.py again')


def bpe_tokenizer(path):
    """ Byte-level BPE from a tokenizer.json of the tokenizers library. """
    from tokenizers import Tokenizer as HFTokenizer
    check_bpe(path)
    try:
        bpe = HFTokenizer.from_file(str(path))
    except Exception as error:                               # the library raises a bare Exception
        raise ValueError(f'{path}: not a tokenizer.json ({error}); run prepare.py again') from None
    # GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(b): b for b in plain}
    byte_of |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in plain)}
    words = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    if [i for _, i in words] != list(range(len(words))) or not all(c in byte_of for word, _ in words for c in word):
        raise ValueError(f'{path}: its words are no byte-level ones, numbered from 0; run prepare.py again')
    pieces = [bytes(byte_of[c] for c in word) for word, _ in words]
    return Tokenizer('bpe', lambda texts: [e.ids for e in bpe.encode_batch_fast(texts, add_special_tokens=False)], pieces)


def train_bpe(texts, vocab_size):
    """ The tokenizer.json of a byte-level BPE with V = vocab_size ids, EOS and PAD among them (fewer for little text). """
    from tokenizers import Tokenizer as HFTokenizer, models, pre_tokenizers, trainers
    if vocab_size < 258:
        raise ValueError(f'vocab_size {vocab_size} is too small: 256 bytes, EOS and PAD need 258')
    bpe = HFTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size - 2, min_frequency=2,
                                                       initial_alphabet=alphabet, show_progress=False))
    return bpe.to_str()


def tiktoken_tokenizer(name):
    import tiktoken
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f'unknown tokenizer {name!r}: bpe, byte, esm or one of {", ".join(tiktoken.list_encoding_names())}')
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:                               # whatever its download raises
        raise ValueError(f'tokenizer {name}: cannot load its ranks ({type(error).__name__}); '
                         'without a network put them in the folder TIKTOKEN_CACHE_DIR') from None
    pieces = [b''] * encoding.n_vocab                        # some encodings have holes
    for piece in encoding.token_byte_values():
        pieces[encoding.encode_single_token(piece)] = piece
    return Tokenizer(name, encoding.encode_ordinary_batch, pieces, eos=encoding.eot_token)


def load_tokenizer(folder_or_name, meta=None):
    """ The tokenizer of a dataset folder (or of a run's data/), or one by name: byte, esm or a tiktoken encoding. meta: what
    read_meta(folder) has returned, where it is known. """
    if not os.path.isdir(folder_or_name):
        return tokenizer_named(folder_or_name)
    meta = meta or read_meta(folder_or_name)
    kind = meta['tokenizer']['kind']
    if kind == 'bpe':
        tokenizer = bpe_tokenizer(check_file(folder_or_name, 'tokenizer.json', meta['files']))
    else:
        try:
            tokenizer = tokenizer_named(kind)
        except ValueError as error:
            raise ValueError(f'{folder_or_name}: {error}') from None
    if tokenizer.record != meta['tokenizer']:
        raise ValueError(f'{folder_or_name}: the tokenizer is {tokenizer.record}, meta.json says {meta["tokenizer"]}; '
                         'run prepare.py again')
    return tokenizer


def tokenizer_named(name):
    own = dict(byte=byte_tokenizer, esm=esm_tokenizer)
    return own[name]() if name in own else tiktoken_tokenizer(name)

# -----------------------------------------------------------------------------
# Files: what meta.json promises, checked before anything is read

def how_to_mend(folder):
    """ What to do about a broken file of a dataset folder, or of a run's data/. """
    is_of_a_run = os.path.isfile(os.path.join(folder, os.pardir, 'config.json'))
    return 'copy it from the dataset' if is_of_a_run else 'run prepare.py again, it redoes what is broken'


def check_file(folder, name, files, digest=True):
    """ The path of a file after comparing it with the manifest `files` {name: {bytes, sha256}}; ValueError if it differs. """
    path = os.path.join(folder, name)
    if name not in files:
        raise ValueError(f'{folder}/meta.json does not list {name}; run prepare.py again')
    found = os.path.getsize(path) if os.path.isfile(path) else None
    if found is None:
        raise ValueError(f'{path}: missing, expected {files[name]["bytes"]} bytes; {how_to_mend(folder)}')
    if found != files[name]['bytes']:
        raise ValueError(f'{path}: found {found} bytes, expected {files[name]["bytes"]}; {how_to_mend(folder)}')
    if digest and sha256(path) != files[name]['sha256']:
        raise ValueError(f'{path}: its sha256 is not the one in meta.json; {how_to_mend(folder)}')
    return path


def dataset_folder(name):
    """ A folder under data/ by name, or a path as it is. """
    return name if os.path.sep in name else os.path.join('data', name)


def dataset_identity(meta):
    """ What two datasets must share for a model of one to read the other. """
    return dict(tokenizer=meta['tokenizer'], encoder=meta['encoder'],
                files={name: entry['sha256'] for name, entry in meta['files'].items()})


def how_to_prepare(folder, configs=()):
    """ What to do for a dataset in this very folder: with the configs of the command line, or config/<its name>.py, if their
    `out` is the folder; else with an input of one's own. """
    name = os.path.basename(os.path.normpath(folder))
    own = os.path.join('config', f'{name}.py')
    for paths in (configs, [own] if os.path.exists(own) else []):
        out = [value for path in paths for knob, value, _ in run_config(path) if knob == 'out']
        if out and os.path.abspath(str(out[-1])) == os.path.abspath(folder):
            return f"make it with `python prepare.py {' '.join(paths)}` (the config's first lines name the input)"
    return f'make it with `python prepare.py --input=... --out={folder}`, or name another --dataset'


def split_digests(meta):
    """ What two datasets share only if they hold the same samples: for each split how many there
    are, and one SHA-256 over those of its files, as meta.json lists them. """
    found = {}
    for split, entry in meta['splits'].items():
        digests = hashlib.sha256()
        for shard in entry['shards']:
            for name, file in sorted(shard['files'].items()):
                digests.update(f'{name} {file["sha256"]}\n'.encode())
        found[f'samples of {split}'] = entry['samples']
        found[f'sha256 of {split}'] = digests.hexdigest()
    return found


def read_meta(folder):
    """ meta.json of a dataset folder, with the shape of its fields checked. """
    path = os.path.join(folder, 'meta.json')
    if not os.path.isfile(path):
        raise ValueError(f'no dataset in {folder} (no meta.json): {how_to_prepare(folder)}')
    meta = read_json(path, limit=MAX_META)
    if meta.get('format') != FORMAT:
        raise ValueError(f'{path}: format {meta.get("format")!r}, this code reads {FORMAT}; run prepare.py again')
    try:
        check_fields(meta, META, path)
        check_meta(meta, path)
    except ValueError as error:
        raise ValueError(f'{error}; {how_to_mend(folder)}') from None
    return meta


def check_meta(meta, path):
    """ ValueError unless the fields of meta.json agree with each other, and every file that they need is listed. """
    def refuse(what, expected):
        raise ValueError(f'{path}: {what}, expected {expected}')

    has_latents, kind = meta['latent_shape'] is not None, meta['tokenizer']['kind']
    if has_latents and len(meta['latent_shape']) != 2:
        refuse(f'latent_shape is {short(meta["latent_shape"])}', 'two numbers')
    source = meta.get('source', {})
    if size := source.get('image_size'):
        patch, channels = source.get('patch'), source.get('channels')
        if not patch or not channels or meta['latent_shape'] != [(size // patch) ** 2, patch * patch * channels]:
            refuse(f'image_size={size}, patch={patch}, channels={channels}', f'those of latent_shape {meta["latent_shape"]}')
    needed = {'tokenizer.json': kind == 'bpe', 'latent_stats.npz': has_latents, 'encoder.npz': False}
    for name in meta['files']:
        if name not in needed:
            refuse(f'files has {short(name)}', ', '.join(needed))
    for name, is_needed in needed.items():
        if is_needed and name not in meta['files']:
            refuse(f'files has no {name}', 'one')

    for split, entry in meta['splits'].items():
        if split not in ('train', 'val'):
            refuse(f'a split {short(split)}', 'train or val')
        seen = set()
        for shard in entry['shards']:
            check_shard(shard, split, has_latents, path)
            if shard['samples'] and (shard.get('latent_shape', meta['latent_shape']) is not None) != has_latents:
                refuse(f'{shard["name"]} has latent_shape {short(shard["latent_shape"])}', f'{meta["latent_shape"]}')
            if shard['name'] in seen:
                refuse(f'{shard["name"]} is there twice', 'once')
            seen.add(shard['name'])
        for key in ('samples', 'tokens'):
            found = sum(shard[key] for shard in entry['shards'])
            if entry.get(key, found) != found:
                refuse(f'the shards of {split} hold {found} {key}', f'{entry[key]}')


def check_shard(shard, split, has_latents, path):
    """ ValueError unless a shard's name is of its split, and its files are listed under that name and no other. """
    name = shard['name']
    if not re.fullmatch(rf'{split}-\d{{5,9}}', name, re.ASCII):
        raise ValueError(f'{path}: shard name {short(name)}, expected {split}-00000 or the like')
    ends = ['tokens.bin', 'offsets.npy', 'latents.npy', 'ids.npy']
    legal = [f'{name}.{end}' for end in ends]
    for file in shard['files']:
        if file not in legal:
            raise ValueError(f'{path}: {name} has a file {short(file)}, expected {", ".join(legal)}')
    for file in legal[:2 + has_latents]:
        if file not in shard['files']:
            raise ValueError(f'{path}: {name} lists no {file}, expected one')


def has_fitting_sizes(shard, itemsize):
    """ Whether the bytes of a shard's files are those of so many samples and tokens. """
    name, n, files = shard['name'], shard['samples'], shard['files']
    N, D = shard.get('latent_shape') or (0, 0)
    needs = {'offsets.npy': 8 * (n + 1), 'ids.npy': 16 * n, 'latents.npy': 2 * n * N * D}
    fits = files[f'{name}.tokens.bin']['bytes'] == itemsize * shard['tokens']
    for end, n_bytes in needs.items():
        if f'{name}.{end}' in files:
            fits = fits and 0 < files[f'{name}.{end}']['bytes'] - n_bytes <= MAX_HEADER
    return fits

# -----------------------------------------------------------------------------
# Latent statistics: the networks see latents of unit variance, whatever the encoder's own scale

class LatentStats:
    """ z = live * (raw - mean) / std and back, per dimension. A dead dimension is 0 inside and its mean outside. """

    def __init__(self, mean, std):
        std = torch.as_tensor(std, dtype=torch.float32)
        live = std >= DEAD * std.median()
        if std.median() == 0:
            live = std > 0
        self.mean = torch.as_tensor(mean, dtype=torch.float32)  # (D,)
        self.std = torch.where(live, std, 1.0)                  # (D,), 1 where dead
        self.live = live.float()                                # (D,), 0 where dead

    def standardise(self, raw):
        mean, std, live = (x.to(raw.device) for x in (self.mean, self.std, self.live))
        return (raw.float() - mean) / std * live

    def destandardise(self, z):
        mean, std, live = (x.to(z.device) for x in (self.mean, self.std, self.live))
        return z.float() * live * std + mean


def load_stats(folder, meta=None):
    """ LatentStats of a dataset folder or of a run's data/; None for text only. meta: as in load_tokenizer. """
    meta = meta or read_meta(folder)
    if meta['latent_shape'] is None:
        return None
    path = check_file(folder, 'latent_stats.npz', meta['files'])
    D = meta['latent_shape'][1]
    arrays = read_arrays(path, {'mean': ('floats', (D,)), 'std': ('floats', (D,))})
    with np.errstate(over='ignore'):                         # too large becomes inf
        mean, std = (arrays[name].astype(np.float32) for name in ('mean', 'std'))
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std >= 0).all()):
        raise ValueError(f'{path}: a mean or std that is not finite, or a std below 0; run prepare.py again')
    return LatentStats(mean, std)

# -----------------------------------------------------------------------------

class Shard:
    """ The memory maps of one shard: tokens (T,), offsets (n + 1,), latents (n, N, D) or None. """

    def __init__(self, folder, meta, entry):
        name, files, n = entry['name'], entry['files'], entry['samples']
        self.name, self.files = name, files

        # tokens: as many as meta.json says, and some: a text has one at least
        path = check_file(folder, f'{name}.tokens.bin', files, digest=False)
        dtype = np.dtype(meta['token_dtype']).newbyteorder('<')
        n_bytes = os.path.getsize(path)
        if n_bytes != entry['tokens'] * dtype.itemsize:
            raise ValueError(f'{path}: {n_bytes} bytes, expected {entry["tokens"]} tokens of {dtype.itemsize}; '
                             'run prepare.py again')
        if not n_bytes:
            raise ValueError(f'{path}: no tokens, expected some for {n} samples; run prepare.py again')
        self.tokens = np.memmap(path, dtype, mode='r').view(np.ndarray)

        # offsets: from 0 to the end of the tokens, never falling; differences of hostile ones could overflow
        path = check_file(folder, f'{name}.offsets.npy', files, digest=False)
        self.offsets = read_array(path, 'int64', (n + 1,), what='offsets')
        is_rising = (self.offsets[1:] >= self.offsets[:-1]).all()
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens) or not is_rising:
            raise ValueError(f'{path}: offsets run to {int(self.offsets[-1])}, expected rising from 0 to the '
                             f'{len(self.tokens)} tokens of {name}.tokens.bin; run prepare.py again')
        self.longest = int(np.diff(self.offsets).max())

        self.latents = None
        if meta['latent_shape'] is not None:
            path = check_file(folder, f'{name}.latents.npy', files, digest=False)
            self.latents = read_array(path, 'float16', (n, *meta['latent_shape']), mmap=True, what='latents')


class PackedDataset:
    """ One split of a dataset folder. Raises ValueError (file, found, expected, what to do) before any batch is read.

    seq_len is L, text plus EOS and PAD; by default max_tokens + 1, never less than the longest text plus its EOS, unless texts may be
    cropped: then of a longer one rows() shows L tokens without EOS.
    """

    def __init__(self, folder, split, seq_len=None, crop=False):
        self.folder, self.split, self.meta = str(folder), split, read_meta(folder)
        if split not in self.meta['splits']:
            raise ValueError(f'{folder}: no split {split!r}, it has {", ".join(self.meta["splits"])}')
        self.tokenizer = load_tokenizer(folder, self.meta)
        self.stats = load_stats(folder, self.meta)
        self.latent_shape = None if self.stats is None else tuple(self.meta['latent_shape'])   # (N, D)
        if self.stats is not None:
            self.mean, self.std, self.live = self.stats.mean, self.stats.std, self.stats.live   # (D,) each
            self.standardise, self.destandardise = self.stats.standardise, self.stats.destandardise
        entry = self.meta['splits'][split]
        self.shards = [Shard(folder, self.meta, shard) for shard in entry['shards'] if shard['samples']]
        self.first = np.cumsum([0] + [len(s.offsets) - 1 for s in self.shards])   # row number of each shard's first row
        if len(self) != entry['samples'] or not len(self):
            raise ValueError(f'{folder}/meta.json: the shards of {split} hold {len(self)} samples, expected {entry["samples"]} and not 0')
        if sum(len(s.tokens) for s in self.shards) <= CHECK_ALL_TOKENS:
            for s in self.shards:
                self.check_ids(s.tokens)
        longest = max(s.longest for s in self.shards)
        self.seq_len = self.meta['max_tokens'] + 1 if seq_len is None else seq_len
        self.cropped = longest > self.seq_len
        if not crop and self.seq_len < longest + 1:
            raise ValueError(f'seq_len {self.seq_len} is too short for {folder}: its longest {split} text has {longest} tokens and '
                             f'an EOS; use seq_len {longest + 1} or more, or prepare with a smaller max_tokens')

    def __len__(self):
        return int(self.first[-1])

    def check_ids(self, tokens):
        if len(tokens) and tokens.max() >= self.tokenizer.vocab_size:
            raise ValueError(f'{self.folder}: token id {tokens.max()} in {self.split}, expected ids below vocab_size '
                             f'{self.tokenizer.vocab_size}; run prepare.py again')

    def by_shard(self, indices):
        """ (shard, positions in `indices`, rows in the shard) for each shard that is touched. """
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f'row {indices.min()} or {indices.max()} is outside 0..{len(self) - 1}')
        owner = np.searchsorted(self.first, indices, side='right') - 1
        for s in np.unique(owner):
            where = np.flatnonzero(owner == s)
            yield self.shards[s], where, indices[where] - self.first[s]

    def rows(self, indices, where_from=None, length=None):
        """ tokens (B, L) int64 and latents (B, N, D) float32, standardised (None for text only); L is seq_len, or less: length.
        where_from (B,) in [0, 1): of a text longer than L, where between the first and the last possible place its L tokens begin;
        None: at the first. """
        L, eos, pad = length or self.seq_len, self.tokenizer.eos, self.tokenizer.pad
        column = np.arange(L)
        tokens = np.empty((len(indices), L), np.int64)
        for shard, where, rows in self.by_shard(indices):
            start = shard.offsets[rows, None]                                 # (b, 1)
            length = shard.offsets[rows + 1, None] - start                    # (b, 1)
            if where_from is not None:
                more = np.maximum(length - L, 0)
                start = start + (np.asarray(where_from)[where, None] * (more + 1)).astype(np.int64)
                length = length - more                                        # L at most
            text = shard.tokens[np.minimum(start + column, len(shard.tokens) - 1)]   # (b, L), rubbish from `length` on
            tokens[where] = np.where(column < length, text, np.where(column == length, eos, pad))
        self.check_ids(tokens)
        latents = None if self.stats is None else self.standardise(self.raw_latents(indices))
        return torch.from_numpy(tokens), latents

    def raw_latents(self, indices):
        """ (B, N, D) float32, as the encoder gave them. """
        latents = np.empty((len(indices), *self.latent_shape), np.float32)
        for shard, where, rows in self.by_shard(indices):
            latents[where] = shard.latents[rows]
        return torch.from_numpy(latents)

    def ids(self, indices):
        """ (B, 2) int64: the number of a sample's document in its split, and of the chunk in its document. """
        ids = np.empty((len(indices), 2), np.int64)
        for shard, where, rows in self.by_shard(indices):
            path = check_file(self.folder, f'{shard.name}.ids.npy', shard.files, digest=False)
            ids[where] = read_array(path, 'int64', (len(shard.offsets) - 1, 2), mmap=True, what='ids')[rows]
        return ids

    def counts(self):
        """ How often each id occurs in the split, (V,) int64: one EOS after every text, PAD never. """
        out = np.zeros(self.tokenizer.vocab_size, np.int64)
        for shard in self.shards:
            for i in range(0, len(shard.tokens), 2 ** 24):
                out += np.bincount(shard.tokens[i:i + 2 ** 24], minlength=len(out))
        out[self.tokenizer.eos] += len(self)
        return torch.from_numpy(out)

    def lengths(self):
        """ Tokens of every text of the split, (n,) int64. """
        return np.concatenate([np.diff(shard.offsets) for shard in self.shards])

    def text(self, i):
        (shard, _, (row,)), = self.by_shard([i])
        return self.tokenizer.decode(shard.tokens[shard.offsets[row]:shard.offsets[row + 1]])

# -----------------------------------------------------------------------------
# Order and noise as pure functions

def noise_generator(seed, step, purpose):
    """ A numpy Generator for (seed, step, purpose). The key of Philox is (seed, purpose), the step is a high word of its
    counter: two streams never overlap, however much is drawn from one (2**128 blocks fit below the step's word). """
    word = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), 'little')
    key = np.array([seed % 2**64, word], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, step, 0], np.uint64)))


@lru_cache(maxsize=2)                                          # a batch may straddle two epochs
def epoch_permutation(n, seed, epoch):
    return noise_generator(seed, epoch, 'row order').permutation(n)


def row_order(n, seed, start, count):
    """ Rows start..start+count-1 of an endless sequence of shuffled epochs over n rows, int64. """
    if n < 1 or start < 0 or count < 0:
        raise ValueError(f'row_order needs n >= 1, start >= 0, count >= 0, found n {n}, start {start}, count {count}')
    parts, end = [np.empty(0, np.int64)], start + count
    while start < end:
        epoch, i = divmod(start, n)
        parts.append(epoch_permutation(n, seed, epoch)[i:i + end - start])
        start += len(parts[-1])
    return np.concatenate(parts)

# -----------------------------------------------------------------------------

def prefetch(batches, device):
    """ Yields the batches (dicts of tensors) on `device`. On CUDA a thread reads, pins and copies the next batch meanwhile. """
    device = torch.device(device)
    if device.type != 'cuda':
        yield from batches
        return
    batches, copies = iter(batches), torch.cuda.Stream(device)

    def fetch():
        batch = next(batches, None)
        with torch.cuda.stream(copies):
            return batch and {k: v.pin_memory().to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(fetch)
        while (batch := ahead.result()) is not None:
            compute = torch.cuda.current_stream(device)
            compute.wait_stream(copies)                        # before the next copy is queued, so it waits for this one only
            for v in batch.values():
                if torch.is_tensor(v):
                    v.record_stream(compute)                   # or its memory could be reused while a kernel still reads it
            ahead = pool.submit(fetch)
            yield batch
