"""
Speed as a ratio in one run: one side beside the other, interleaved, medians.

    python bench.py                                              # guard: what guard and logging cost a training step
    python bench.py --what=loader                                # batches from the packed dataset beside a file a sample; share of a step
    python bench.py --what=encoder --encoder=FOLDER              # embedding beside sentence-transformers (pip install it)

Times of training are those of train.py itself, run in this process from the same seed: the tokens per second of its own log, without the
first line. guard=False decides nothing and skips nothing, and still keeps the few numbers that a log line needs.
"""
import gc
import json
import os
import runpy
import statistics
import sys
import tempfile
import time

import numpy as np
import torch

from configurator import configure, stop, stop_on_error
from data import PackedDataset, dataset_folder
from encoders import load_encoder

what = 'guard'                  # guard | loader | encoder, comma-separated
dataset = 'quickstart'          # a folder under data/, or a path to one
rounds = 5                      # each side so many times
max_iters = 60                  # of each training
batch_size = 32
depth = 4
width = 256
heads = 4
dtype = 'bfloat16'
samples = 4096                  # loader, encoder
encoder = 'minilm'              # of texts: a name, hub id or folder
embed_batch_size = 64
threads = 2                     # of torch

HERE = os.path.dirname(os.path.abspath(__file__))


def compare(sides, unit):
    """ {name: function that returns its speed}, by turns; prints each speed and its ratio to the first side's. Returns medians. """
    speeds = {name: [] for name in sides}
    for i in range(rounds):
        for name, run in sides.items():                                  # interleaved: what disturbs the machine disturbs all
            speeds[name].append(run())
            print(f'round {i + 1}/{rounds}  {name:<40} {speeds[name][-1]:>12,.0f} {unit}', flush=True)
    base = next(iter(sides))
    print(f'\n{"":<40} {unit:>12}   speed, relative to {base!r}: median (least, most) over rounds')
    for name in sides:
        ratios = [s / b for b, s in zip(speeds[base], speeds[name])]
        print(f'{name:<40} {statistics.median(speeds[name]):>12,.0f}   {statistics.median(ratios):.3f} '
              f'({min(ratios):.3f}, {max(ratios):.3f})')
    print()
    return {name: statistics.median(values) for name, values in speeds.items()}


# ---- guard

def tokens_per_s(*arguments):
    """ Median over the log lines of one training, but the first, which waits for the first steps to warm up. """
    with tempfile.TemporaryDirectory() as out_dir:
        sys.argv = ['train.py', f'--dataset={dataset}', f'--out_dir={out_dir}', f'--max_iters={max_iters}', f'--batch_size={batch_size}',
                    f'--depth={depth}', f'--width={width}', f'--heads={heads}', f'--dtype={dtype}', '--eval_interval=1000000',
                    '--save_interval=1000000', '--eval_iters=1', *arguments]
        stdout, sys.stdout = sys.stdout, open(os.devnull, 'w')
        try:
            runpy.run_path(os.path.join(HERE, 'train.py'), run_name='__main__')
        finally:
            sys.stdout.close()
            sys.stdout = stdout
            gc.collect()                                                 # the script's model
        with open(os.path.join(out_dir, 'training_log.jsonl')) as f:
            entries = [json.loads(line) for line in f]
    return statistics.median([e['tokens_per_s'] for e in entries if 'tokens_per_s' in e][1:])


def guard():
    compare({'off': lambda: tokens_per_s('--guard=false', '--log_interval=30'),
             'guard': lambda: tokens_per_s('--guard=true', '--log_interval=30'),
             'guard and a log line every 10 steps': lambda: tokens_per_s('--guard=true', '--log_interval=10')}, 'tokens/s')


# ---- loader

def loader():
    """ Batches of random rows, from the memory maps and from a .npy and a .npz a sample, as systems before this one had it; both are in the
    page cache. Then the share of the memory maps in a step of train.py. """
    data = PackedDataset(dataset_folder(dataset), 'train')
    if data.stats is None or len(data) < batch_size:
        stop(f'{data.folder}: the loader is measured on {batch_size} pairs of text and latent or more')
    rows, generator = min(samples, len(data)), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        tokens, latents = data.rows(np.arange(rows))
        for i in range(rows):
            np.savez(f'{folder}/{i}.npz', input_ids=tokens[i].numpy())
            np.save(f'{folder}/{i}.npy', latents[i].numpy())

        def samples_per_s(read):
            count, start = 0, time.perf_counter()
            while time.perf_counter() < start + 1:
                order = generator.permutation(rows)
                for i in range(0, rows - batch_size + 1, batch_size):
                    read(order[i:i + batch_size])
                    count += batch_size
            return count / (time.perf_counter() - start)

        def a_file_a_sample(batch):
            pairs = []
            for i in batch:
                with np.load(f'{folder}/{i}.npz') as arrays:
                    pairs.append((arrays['input_ids'], np.load(f'{folder}/{i}.npy')))
            return [torch.from_numpy(np.stack(column)) for column in zip(*pairs)]
        assert all(torch.equal(a, b) for a, b in zip(a_file_a_sample([3, 1]), data.rows(np.array([3, 1]))))
        medians = compare({'a file a sample': lambda: samples_per_s(a_file_a_sample),
                           'packed': lambda: samples_per_s(data.rows)}, 'samples/s')
    step = batch_size * data.seq_len / tokens_per_s(f'--log_interval={max(1, max_iters // 3)}')
    read = batch_size / medians['packed']
    print(f'a step of {batch_size} rows takes {1000 * step:.1f} ms, reading them {1000 * read:.3f} ms: {read / step:.2%}')


# ---- encoder

def embedding():
    """ The same model, texts and batch size, in float32. """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        stop('to compare with it: pip install sentence-transformers')
    data = PackedDataset(dataset_folder(dataset), 'train')
    texts = [data.text(int(i)) for i in np.random.default_rng(0).permutation(len(data))[:samples]]
    ours = load_encoder(encoder, batch_size=embed_batch_size)
    theirs = SentenceTransformer(encoder if os.path.isdir(encoder) else ours.record['id'], device='cpu')

    def encode_ours():
        return ours(texts)[:, 0]

    def encode_theirs():
        return theirs.encode(texts, batch_size=embed_batch_size, convert_to_tensor=True, show_progress_bar=False)

    def texts_per_s(encode):
        start = time.perf_counter()
        encode()
        return len(texts) / (time.perf_counter() - start)
    print(f'largest difference of an embedding: {(encode_ours() - encode_theirs()).abs().max():.1e}')
    compare({'sentence-transformers': lambda: texts_per_s(encode_theirs), 'encoders.py': lambda: texts_per_s(encode_ours)}, 'texts/s')


def main():
    configure(globals())
    torch.set_num_threads(threads)
    benches = dict(guard=guard, loader=loader, encoder=embedding)
    for name in what.split(','):
        if name not in benches:
            stop(f'what={name!r}: choose from {", ".join(benches)}')
        print(f'{name}, {torch.get_num_threads()} threads')
        with stop_on_error():
            benches[name]()


if __name__ == '__main__':
    main()
