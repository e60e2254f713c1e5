""" The dataset of molecules from its packed form: fingerprints are gaps between the molecules that
have a bit. train.py compares every file with its digest.

    python unpack.py FOLDER/packed TARGET
"""
import io
import json
import lzma
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np


def as_file(path, array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    with open(path, 'wb') as f:
        f.write(buffer.getvalue())


def shard(job):
    source, target, name = job
    def read(kind):
        with open(f'{source}/{name}.{kind}.xz', 'rb') as f:
            return lzma.decompress(f.read())

    tokens = np.frombuffer(read('tokens'), np.uint8).astype('<u2')
    lengths = np.frombuffer(read('lengths'), np.uint8)
    with open(f'{target}/{name}.tokens.bin', 'wb') as f:
        f.write(tokens.tobytes())
    as_file(f'{target}/{name}.offsets.npy', np.cumsum([0, *lengths.tolist()], dtype=np.int64))

    # counts of the 2,048 columns, the most frequent first; low bytes of the gaps, high bytes
    data = read('bits')
    counts = np.frombuffer(data[:4096], '<u2').astype(int)
    low, high = np.frombuffer(data[4096:], np.uint8).reshape(2, -1).astype(np.int64)
    gaps = low + 256 * high
    order = np.argsort(-np.load(f'{target}/latent_stats.npz')['mean'], kind='stable')
    bits = np.zeros((2048, len(lengths)), np.float16)
    first = 0
    for d, n in zip(order, counts):
        bits[d, np.cumsum(gaps[first:first + n]) - 1] = 1
        first += n
    as_file(f'{target}/{name}.latents.npy', np.ascontiguousarray(bits.T[:, None]))


def main():
    source, target = sys.argv[1:]
    os.makedirs(target)
    for name in ('meta.json', 'latent_stats.npz', 'bag.npy'):
        shutil.copy(f'{source}/{name}', target)
    meta = json.load(open(f'{source}/meta.json'))
    names = [s['name'] for split in meta['splits'].values() for s in split['shards']]
    with ProcessPoolExecutor(min(16, os.cpu_count())) as pool:
        list(pool.map(shard, [(source, target, name) for name in names]))


if __name__ == '__main__':
    main()
