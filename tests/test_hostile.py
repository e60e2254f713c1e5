"""
Damaged and hostile files: datasets and run folders in which bits are flipped, fields changed, arrays exchanged.

Each is read as the scripts read it. It may load, where the change does no harm, or it is a ValueError of one line that names
the file; never another exception, and never much memory. All of it runs in one process (`python tests/test_hostile.py
DATASET RUN FOLDER`), which may take 256 MiB more than it has before the first damage.
"""
import collections
import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from runs.files import sealed

ROOT = Path(__file__).resolve().parent.parent
MEMORY = 2**28
DELETED = object()
MUTATIONS = [DELETED, None, -1, 10**12, 'x', [], {}, [[[[{}]]]]]
EACH = 2                                                   # of these, for every node


# ---- the tests: what the process below has found

@pytest.fixture(scope='module')
def found(dataset, finished, tmp_path_factory):
    """ {what was damaged: {outcome: how often}}, and under 'bad' what should not have come out. """
    folder = tmp_path_factory.mktemp('hostile')
    command = [sys.executable, __file__, str(dataset), str(finished), str(folder)]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize('what', ['sound files', 'bits of array headers', 'bits of meta.json', 'bits of config.json',
                                  'nodes of meta.json', "nodes of a run's meta.json", 'nodes of config.json',
                                  'nodes of training_state.json', 'hostile arrays', 'hostile text files', 'bomb'])
def test_a_damaged_or_hostile_file_is_one_line_that_names_it_or_does_no_harm(found, what):
    assert [case for case in found['bad'] if case[0] == what] == []
    assert sum(found[what].values()) > 0


def test_what_must_be_refused_is_refused_and_what_is_sound_loads(found):
    assert set(found['sound files']) == {'loads'}
    for what in ('hostile arrays', 'hostile text files', 'bomb'):
        assert set(found[what]) == {'refused'}, what
    for what in ('bits of array headers', 'nodes of meta.json', 'nodes of config.json'):
        assert found[what]['refused'] > 50, what


def test_the_reader_of_arrays_gives_what_numpy_gives(tmp_path):
    from runs.files import read_array, read_arrays
    arrays = dict(a=np.arange(6, dtype=np.float16).reshape(2, 3), b=np.zeros((0, 4)), c=np.asfortranarray(np.eye(3)),
                  d=np.array(5), e=np.array(['a', 'bc']))
    expected = {name: ('texts' if name == 'e' else 'numbers', None) for name in arrays}
    np.savez(tmp_path / 'all.npz', **arrays)
    again = read_arrays(tmp_path / 'all.npz', {**expected, 'not there?': ('floats', (3,))})
    assert sorted(again) == sorted(arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f'{name}.npy', array)
        for found in (again[name], *(read_array(tmp_path / f'{name}.npy', expected[name][0], mmap=mmap) for mmap in (False, True))):
            assert type(found) is np.ndarray and found.dtype == array.dtype and np.array_equal(found, array)


def test_a_compressed_array_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    from runs.files import read_arrays
    np.savez_compressed(tmp_path / 'a.npz', mean=np.zeros(16))
    monkeypatch.setattr(zipfile.ZipFile, 'open', lambda *args: pytest.fail('it is unpacked'))
    with pytest.raises(ValueError, match='a.npz: .*mean.npy is compressed'):
        read_arrays(tmp_path / 'a.npz', {'mean': ('floats', (None,))})


def test_the_reader_of_arrays_names_dtype_shape_and_size_found_and_expected(tmp_path):
    from runs.files import read_array
    path = tmp_path / 'a.npy'
    np.save(path, np.zeros((2, 3), np.float32))
    for expected, words in ((('float16', (2, 3)), r'float32 \(2, 3\), expected float16 \(2, 3\)'),
                            (('floats', (None, 4)), r'float32 \(2, 3\), expected floats \(n, 4\)'),
                            (('floats', (2, 3, 1)), r'expected floats \(2, 3, 1\)')):
        with pytest.raises(ValueError, match=f'a.npy: .*{words}'):
            read_array(path, *expected)
    os.truncate(path, os.path.getsize(path) - 4)
    with pytest.raises(ValueError, match=r'a.npy: .*24 bytes, found 20'):
        read_array(path)


# ---- the process: reads one damaged file after another

def header_text(text):
    """ The header of an .npy file, version 1. """
    text = text.encode() + b' ' * (-(len(text) + 11) % 64) + b'\n'
    return b'\x93NUMPY\x01\x00' + len(text).to_bytes(2, 'little') + text


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def bomb(path):
    """ An .npz file of a few megabytes, of arrays that say they are of 384 MiB, and are. """
    n_bytes, block = 384 * 2**20, bytes(2**22)
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, dtype in (('mean', '<f8'), ('words', '|u1')):
            n = n_bytes // np.dtype(dtype).itemsize
            with file.open(f'{name}.npy', 'w') as f:
                f.write(header_text("{'descr': '%s', 'fortran_order': False, 'shape': (%d,), }" % (dtype, n)))
                for _ in range(n_bytes // len(block)):
                    f.write(block)


def nodes(value, path=()):
    """ The path of every value in nested dicts and lists. """
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from nodes(value[key], (*path, key))


def mutated(value, path, new):
    value = parent = copy.deepcopy(value)
    for key in path[:-1]:
        parent = parent[key]
    if new is DELETED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = new
    return value


@contextlib.contextmanager
def as_it_was(path):
    """ Afterwards, the file is again what it was. """
    whole = path.read_bytes() if path.exists() else None
    yield whole
    if whole is None:
        path.unlink()
    else:
        path.write_bytes(whole)


class Outcomes:
    """ Counts what comes out of reading damaged files, and keeps what should not have. """

    def __init__(self, folder):
        self.folder, self.counts, self.bad = folder, collections.defaultdict(collections.Counter), []

    def note(self, what, change, read):
        outcome = 'loads'
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                read()
        except ValueError as error:
            text, outcome = str(error), 'refused'
            if str(self.folder) not in text or len(text.splitlines()) != 1 or len(text) > 1000:
                self.bad.append((what, str(change), f'no line that names the file: {text[:200]}'))
        except BaseException as error:
            outcome = 'another exception'
            self.bad.append((what, str(change), f'{type(error).__name__}: {str(error)[:200]}'))
        self.counts[what][outcome] += 1


def main(dataset, finished, folder):
    import torch

    from runs import checkpoint, manifest
    from data import PackedDataset
    import encoders
    from corpora import layouts as inspection
    import prepare
    from benchmarks import pictures
    from corpora import latents
    from sampling.inputs import read_latents
    from evaluate import read_results
    from sampling.loading import load_run
    from sampling import directions
    torch.set_num_threads(1)
    rng, outcomes = random.Random(0), Outcomes(folder)
    packed, run_folder = Path(folder, 'packed'), Path(folder, 'run')
    shutil.copytree(dataset, packed)
    shutil.copytree(finished, run_folder)
    record = manifest.read_meta(packed)['source']
    given = packed / 'z.npy'
    np.save(given, np.load(packed / 'val-00000.latents.npy').astype(np.float32)[:5])

    # the readers

    def read_dataset():
        for split in ('train', 'val'):
            ds = PackedDataset(packed, split)
            for read in (ds.rows, ds.ids):
                read(np.arange(8))
            manifest.dataset_identity(ds.meta)
            ds.counts()

    def read_meta():
        read_dataset()
        inspection.verify(packed)
        inspection.summary(packed)
        meta = manifest.read_meta(packed)
        if meta['encoder'] and meta['encoder']['id'] == 'lsa':
            encoders.load_encoder(meta['encoder'], folder=packed)
        prepare.earlier_dataset(packed, record)

    def read_given():
        run = SimpleNamespace(meta={'latent_shape': [1, 16]}, out_dir='a run')
        read_latents(run, given)

    def read_given_as_source():
        for document in latents.with_latents('abcde', str(given)):
            document.latent()

    def read_run():
        run = load_run(str(run_folder), 'latest', 'cpu', 'float32')
        for task in directions.NEEDS:
            directions.NEEDS[task].missing(run)
        directions.l2t(run, torch.zeros(1, 1, 16), steps=1, seed=0, batch=1)
        manifest.dataset_folder(run.config['dataset'])

    def read_state():
        checkpoint.load(run_folder / (run_folder / 'latest').read_text().strip())

    def read_lsa():
        encoders.load_encoder(manifest.read_meta(packed)['encoder'], folder=packed)

    for read in (read_dataset, read_meta, read_given, read_given_as_source, read_run, read_state, read_lsa):
        outcomes.note('sound files', read.__name__, read)
    pages = int(Path('/proc/self/statm').read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)

    # flipped bits

    def flip(path, what, read, n_bytes, count):
        with as_it_was(path) as whole:
            for bit in rng.sample(range(8 * n_bytes), count):
                content = bytearray(whole)
                content[bit // 8] ^= 1 << bit % 8
                path.write_bytes(content)
                outcomes.note(what, f'{path.name}, bit {bit}', read)
    for name in ('offsets', 'ids', 'latents'):
        flip(packed / f'train-00000.{name}.npy', 'bits of array headers', read_dataset, 128, 24)
    for read in (read_given, read_given_as_source):
        flip(given, 'bits of array headers', read, 128, 24)
    meta, config = packed / 'meta.json', run_folder / 'config.json'
    flip(meta, 'bits of meta.json', read_meta, meta.stat().st_size, 24)
    flip(config, 'bits of config.json', read_run, config.stat().st_size, 24)

    # changed fields

    def mutate(path, what, read, most_deep=99):
        with as_it_was(path) as whole:
            value = json.loads(whole)
            for node in nodes(value):
                for new in rng.sample(MUTATIONS, EACH) if len(node) <= most_deep else ():
                    path.write_text(json.dumps(mutated(value, node, new)))
                    outcomes.note(what, f'{node}: {new}', read)
    mutate(meta, 'nodes of meta.json', read_meta)
    mutate(run_folder / 'data' / 'meta.json', "nodes of a run's meta.json", read_run, most_deep=2)
    mutate(config, 'nodes of config.json', read_run)
    mutate(run_folder / (run_folder / 'latest').read_text().strip() / 'training_state.json', 'nodes of training_state.json',
           read_state, most_deep=2)

    # arrays that are none, or not what they say; the digests in meta.json are those of the hostile files

    def exchange(name, content, read, what='hostile arrays'):
        with as_it_was(packed / 'meta.json') as whole, as_it_was(packed / name):
            (packed / name).write_bytes(content)
            meta = json.loads(whole)
            shards = [shard for split in meta['splits'].values() for shard in split['shards']]
            for files in [meta['files'], *(shard['files'] for shard in shards)]:
                if name in files:
                    files[name] = checkpoint.describe(packed / name)
            (packed / 'meta.json').write_text(sealed(meta))
            outcomes.note(what, (name, content[:80]), read)
    offsets = np.load(packed / 'train-00000.offsets.npy')
    for place, value in ((5, 10**12), (5, -3), (0, 1), (-1, 7)):
        wrong = offsets.copy()
        wrong[place] = value
        exchange('train-00000.offsets.npy', npy(wrong), read_dataset)
    overflowing = offsets.copy()
    overflowing[1:-1:2], overflowing[2:-1:2] = 2**62, -2**62
    exchange('train-00000.offsets.npy', npy(overflowing), read_dataset)
    zip_start, shape = b'PK\x03\x04' + bytes(200), "{'descr': '%s', 'fortran_order': False, 'shape': %s, }"
    for name in ('train-00000.offsets.npy', 'train-00000.latents.npy', 'train-00000.ids.npy', 'val-00000.tokens.bin'):
        for content in (b'', zip_start):
            exchange(name, content, read_dataset)
    for content in (npy(np.array([{}], object)), header_text(shape % ('<f2', '(-1, 1, 16)')) + bytes(64),
                    header_text(shape % ('<f2', f'({10**12}, {10**12}, {10**12})')), header_text('(' * 9000),
                    b'\x93NUMPY\x02\x00' + b'\xff' * 4 + bytes(99)):
        exchange('train-00000.latents.npy', content, read_dataset)
        exchange('z.npy', content, read_given)
        exchange('z.npy', content, read_given_as_source)
    for content in (b'', b'none', zip_start, npy(np.zeros(16)), npz(mean=np.zeros(16)), npz(mean=np.zeros(16), std=np.zeros(3)),
                    npz(mean=np.zeros(16), std=np.full(16, np.nan)), npz(mean=np.zeros(16), std=-np.ones(16)),
                    npz(mean=np.zeros(16), std=np.array([{}] * 16, object)), npz(mean=np.zeros(16), std=np.array(['x'] * 16))):
        exchange('latent_stats.npz', content, read_dataset)
        exchange('encoder.npz', content, read_lsa)
    bomb(Path(folder, 'bomb.npz'))
    content = Path(folder, 'bomb.npz').read_bytes()
    exchange('latent_stats.npz', content, read_dataset, 'bomb')
    exchange('encoder.npz', content, read_lsa, 'bomb')

    # other files of a run folder
    for text in ('', '{', '[' * 10**5, '[]', '{"l2t/bleu": [1]}', '{"meta": 3}', '\x00', '1' * 5000):
        for name, read in (('results.json', lambda: pictures.read_results(run_folder / 'results.json')),
                           ('results.json', lambda: read_results(str(run_folder / 'results.json'))),
                           ('training_log.jsonl', lambda: pictures.read_log(run_folder / 'training_log.jsonl')),
                           ('config.json', read_run), ('data/meta.json', read_run)):
            harmless = name == 'training_log.jsonl' and not text or text.startswith('{"')
            with as_it_was(run_folder / name):
                (run_folder / name).write_text(text)
                outcomes.note('changed text files' if harmless else 'hostile text files', (name, text[:30]), read)
    for content in (b'', b'\xff\xfe', b'step-00000099', b'../run', bytes(10**6)):
        with as_it_was(run_folder / 'latest'):
            (run_folder / 'latest').write_bytes(content)
            outcomes.note('hostile text files', ('latest', content[:30]), read_run)
    print(json.dumps({**outcomes.counts, 'bad': outcomes.bad}))


if __name__ == '__main__':
    main(*sys.argv[1:])
