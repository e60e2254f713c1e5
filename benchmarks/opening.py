"""
Opening a large dataset: time, memory, and what a batch and its order of rows cost. The datasets
are made here, in a temporary folder: a text of 0 to 126 tokens (id 0) and a latent of 384 zeros in
each row. Tokens and latents are sparse files, and all full shards share one file of offsets. So
10^9 rows take a few MB of the disk, and the disk's own time is not in these numbers. Times are
those that the processor spends on the process, since others may use it too; `wall` is the time
that opening took on the clock.

Each round opens the dataset in a new process:
    opening      PackedDataset(folder, 'train')
    first order  the first row_order of an epoch, which may have to make a table
    order        each further one, of a batch
    batch        PackedDataset.rows of that order
    memory       the peak of opening and first order, above what the process had before; pages of
                 the files that were touched count too
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.step import begin_peak, peak_gb
from runs.files import sha256, write_text

D = 384                        # of a latent
MAX_TOKENS = 127
VAL_ROWS = 1000
N_BATCHES = 20

# -----------------------------------------------------------------------------
# A dataset of zeros

def write_sparse(path, header, n_bytes):
    """ A file of a header and n_bytes of zeros, which take no room on the disk. """
    with open(path, 'wb') as f:
        f.write(header)
        f.truncate(len(header) + n_bytes)


def npy_header(shape, dtype):
    """ The bytes that np.save writes before the numbers. """
    with tempfile.TemporaryFile() as f:
        fields = dict(descr=dtype, fortran_order=False, shape=shape)
        np.lib.format.write_array_header_1_0(f, fields)
        f.seek(0)
        return f.read()


def write_shard(folder, name, n, offsets_path):
    """ The files of a shard of n rows, and its entry of meta.json. offsets_path: the offsets of an
    earlier shard of n rows. """
    paths = {end: folder / f'{name}.{end}' for end in ('tokens.bin', 'offsets.npy', 'latents.npy')}
    if offsets_path:
        os.link(offsets_path, paths['offsets.npy'])
    else:
        lengths = np.random.default_rng(0).integers(0, MAX_TOKENS, n)
        np.save(paths['offsets.npy'], np.concatenate([[0], lengths.cumsum()]))
    n_tokens = int(np.load(paths['offsets.npy'], mmap_mode='r')[-1])
    write_sparse(paths['tokens.bin'], b'', 2 * n_tokens)
    write_sparse(paths['latents.npy'], npy_header((n, 1, D), '<f2'), 2 * n * D)

    # nothing reads these digests
    files = {path.name: dict(bytes=path.stat().st_size, sha256='0' * 64) for path in paths.values()}
    return dict(name=name, samples=n, tokens=n_tokens, longest=MAX_TOKENS, files=files)


def write_split(folder, split, n_rows, shard_rows):
    shards = []
    offsets_path = None                                    # of a full shard
    for i, first in enumerate(range(0, n_rows, shard_rows)):
        n = min(shard_rows, n_rows - first)
        known = offsets_path if n == shard_rows else None
        shards.append(write_shard(folder, f'{split}-{i:05d}', n, known))
        offsets_path = offsets_path or folder / f'{split}-00000.offsets.npy'
    return dict(samples=n_rows, shards=shards)


def write_dataset(folder, n_rows, shard_rows):
    folder = Path(folder)
    splits = dict(train=write_split(folder, 'train', n_rows, shard_rows),
                  val=write_split(folder, 'val', VAL_ROWS, shard_rows))
    stats = folder / 'latent_stats.npz'
    np.savez(stats, mean=np.zeros(D), std=np.ones(D))
    meta = dict(format=1, tokenizer=dict(kind='byte', vocab_size=258, eos=256, pad=257),
                encoder=None, latent_shape=[1, D], token_dtype='uint16', max_tokens=MAX_TOKENS,
                splits=splits,
                files={stats.name: dict(bytes=stats.stat().st_size, sha256=sha256(stats))})
    write_text(folder / 'meta.json', json.dumps(meta))

# -----------------------------------------------------------------------------
# One process that opens it

def seconds_of(function):
    began = time.process_time()
    result = function()
    return result, time.process_time() - began


def measure(folder, batch_size):
    """ Prints the numbers of one round as JSON. """
    from data import PackedDataset, row_order
    begin_peak('cpu')
    gb_before = peak_gb('cpu')
    began = time.perf_counter()
    data, opening = seconds_of(lambda: PackedDataset(folder, 'train'))
    wall = time.perf_counter() - began
    _, first_order = seconds_of(lambda: row_order(len(data), 0, 0, batch_size))
    mb = None if gb_before is None else 1000 * (peak_gb('cpu') - gb_before)

    orders, batches = [], []
    for step in range(1, N_BATCHES + 1):
        rows, seconds = seconds_of(lambda: row_order(len(data), 0, step * batch_size, batch_size))
        orders.append(seconds)
        batches.append(seconds_of(lambda: data.rows(rows))[1])
    print(json.dumps(dict(opening=opening, wall=wall, first_order=1000 * first_order, memory=mb,
                          order=1000 * statistics.median(orders),
                          batch=1000 * statistics.median(batches))))


# ---- the table

COLUMNS = dict(opening=('opening s', 2), wall=('wall s', 2), first_order=('first order ms', 1),
               order=('order ms', 3), batch=('batch ms', 1), memory=('memory MB', 0))


def medians(n_rows, shard_rows, knobs):
    """ {column: the median over rounds}, each in a process of its own. """
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(folder, n_rows, shard_rows)
        command = [sys.executable, '-m', 'benchmarks.opening', folder, str(knobs.batch_size)]
        for _ in range(knobs.rounds):
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise ValueError(f'{n_rows:,} rows: {result.stderr.strip().splitlines()[-1]}')
            rounds.append(json.loads(result.stdout))
    return {key: statistics.median(one[key] or 0 for one in rounds) for key in COLUMNS}


def run(knobs):
    print(f'batches of {knobs.batch_size} rows, medians of {knobs.rounds} processes')
    print(f'{"rows":>14}{"shards":>8}' + ''.join(f'{name:>16}' for name, _ in COLUMNS.values()))
    for n_rows in (int(float(n)) for n in knobs.rows.split(',')):
        shard_rows = knobs.shard_rows
        if not shard_rows:
            from corpora.shards import fitting_shard_size
            shard_rows = fitting_shard_size(n_rows)
        found = medians(n_rows, shard_rows, knobs)
        numbers = [f'{found[key]:>16.{digits}f}' for key, (_, digits) in COLUMNS.items()]
        print(f'{n_rows:>14,}{-(-n_rows // shard_rows):>8,}' + ''.join(numbers), flush=True)


if __name__ == '__main__':
    measure(sys.argv[1], int(sys.argv[2]))
