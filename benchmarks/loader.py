"""
Batches of random rows: from the memory maps of a packed dataset, and from a .npy and a .npz file a
sample, as systems before this one stored them. Both are in the page cache. Then what share of a
step of train.py the reading takes.
"""
import tempfile
import time

import numpy as np
import torch

from benchmarks.compare import compare
from benchmarks.trainings import model_arguments, tokens_per_s
from configurator import stop
from data import PackedDataset
from runs.manifest import dataset_folder


def write_files(folder, tokens, latents):
    """ A .npz with the tokens and a .npy with the latents of each row. """
    for i in range(len(tokens)):
        np.savez(f'{folder}/{i}.npz', input_ids=tokens[i].numpy())
        np.save(f'{folder}/{i}.npy', latents[i].numpy())


def read_files(folder, batch):
    pairs = []
    for i in batch:
        with np.load(f'{folder}/{i}.npz') as arrays:
            pairs.append((arrays['input_ids'], np.load(f'{folder}/{i}.npy')))
    tokens, latents = zip(*pairs)
    return [torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(latents))]


def samples_per_s(read, n_rows, batch_size, generator):
    """ Rows per second that `read` gives, in random order, over a second or more. """
    count = 0
    began = time.perf_counter()
    while time.perf_counter() < began + 1:
        order = generator.permutation(n_rows)
        for i in range(0, n_rows - batch_size + 1, batch_size):
            read(order[i:i + batch_size])
            count += batch_size
    return count / (time.perf_counter() - began)


def run(knobs):
    data = PackedDataset(dataset_folder(knobs.dataset), 'train')
    batch_size = knobs.batch_size
    if data.stats is None or len(data) < batch_size:
        stop(f'{data.folder}: the loader is measured on {batch_size} pairs of text and latent '
             'or more')
    n_rows = min(knobs.samples, len(data))
    generator = np.random.default_rng(0)

    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, *data.rows(np.arange(n_rows)))

        def a_file_a_sample(batch):
            return read_files(folder, batch)

        # both sides read the same
        theirs, ours = a_file_a_sample([3, 1]), data.rows(np.array([3, 1]))
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours))

        def files_side():
            return samples_per_s(a_file_a_sample, n_rows, batch_size, generator)

        def packed_side():
            return samples_per_s(data.rows, n_rows, batch_size, generator)

        sides = {'a file a sample': files_side, 'packed': packed_side}
        medians = compare(sides, 'samples/s', knobs.rounds)

    log_interval = f'--log_interval={max(1, knobs.max_iters // 3)}'
    speed = tokens_per_s([*model_arguments(knobs), log_interval], knobs.max_iters)
    step = batch_size * data.seq_len / speed
    read = batch_size / medians['packed']
    print(f'a step of {batch_size} rows takes {1000 * step:.1f} ms, '
          f'reading them {1000 * read:.3f} ms: {read / step:.2%}')
