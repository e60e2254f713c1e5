""" prepare.py that is killed, and documents, latents and files that are broken. """
import os
import random
import signal
import time

import numpy as np
import torch

from corpora.sources import text_hash
from data import PackedDataset
from faulty import corpus, files_of
from launch import Job, assert_refused, flip, run, run_each, texts_in
from toys import save_encoder


def both(folder):
    return [PackedDataset(folder, split) for split in ('train', 'val')]


def is_of_val(line, fraction):
    return text_hash(line) < fraction * 2**64


def test_a_prepare_that_fails_takes_nothing_apart_either(tmp_path):
    (tmp_path / 'empty.txt').touch()
    crash = """
import atexit, os, signal
atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))
"""
    job = Job(None, tmp_path / 'job', f'--input={tmp_path}/empty.txt', '--encoder=none',
              f'--out={tmp_path}/x', ranks=2, before=crash, script='prepare.py').ends(2)
    assert 'no documents' in job.error() and 'error' not in job.err(1)


def test_fault_20_latents_that_are_not_finite_at_prepare(tmp_path):
    path = corpus(tmp_path / 'a.txt', 3000)
    lines = path.read_text().splitlines()
    in_val = next(i for i, line in enumerate(lines) if is_of_val(line, .01))
    z = np.random.default_rng(0).standard_normal((3000, 4)).astype(np.float32)
    commands = []
    for name, bad in (('few', [7, in_val]), ('many', range(0, 3000, 100))):
        spoiled = z.copy()
        spoiled[list(bad), 1] = [np.nan, np.inf] * (len(bad) // 2)
        np.save(tmp_path / f'{name}.npy', spoiled)
        commands.append(f'prepare.py --input={path} --latents_from={tmp_path}/{name}.npy '
                        f'--tokenizer=byte --out={tmp_path}/{name}')
    few, many = run_each(*commands)
    assert few[0] == 0 and 'dropped (NaN, inf, of another scale, ' in few[1], few
    splits = both(tmp_path / 'few')
    assert [ds.meta['splits'][ds.split]['nonfinite'] for ds in splits] == [1, 1]
    assert sum(map(len, splits)) == 2998
    for ds in splits:
        assert torch.isfinite(ds.rows(np.arange(len(ds)))[1]).all()
    assert_refused(many, 'latents cannot be stored, more than 0.1%; the first: ')
    assert not (tmp_path / 'many/meta.json').exists()


def begun_and_noted(out):
    """ The shards of which a file is there, and those that are noted as whole. """
    begun = {path.name.split('.')[0] for path in out.glob('*-0*.*') if path.name[0] != '.'}
    return begun, {path.name.split('.')[0] for path in out.glob('*.whole.json')}


def times(out, shards):
    paths = [path for shard in shards for path in out.glob(f'{shard}.*')]
    return {path: path.stat().st_mtime_ns for path in paths if 'whole' not in path.name}


def test_fault_26_prepare_is_killed_at_random_and_goes_on_with_another_number_of_ranks(tmp_path):
    """ The encoder is a BERT: its embeddings do depend on how texts are batched, so batches must be
    the shard's own. """
    (tmp_path / 'bert').mkdir()
    args = [f'--input={corpus(tmp_path / "a.txt", 300)}', '--pooling=mean', '--vocab_size=300',
            f'--encoder={save_encoder(tmp_path / "bert")}', '--shard_size=20', '--val_fraction=.1',
            '--device=cpu']
    # kills fall inside a shard too, and before meta.json is there, however late they come: rank 1,
    # which is killed each time, waits for that in the last shard
    slow = """
import os, time
replace = os.replace
def slowly(source, target):
    is_late = 'val-00001' in str(target) or str(target).endswith('meta.json')
    time.sleep(999 if is_late else .03)
    replace(source, target)
os.replace = slowly
"""

    def start(out, ranks, before=''):
        return Job(None, out, *args, f'--out={out}', script='prepare.py', ranks=ranks,
                   before=before)

    start(tmp_path / 'whole', 1).ends()
    chance = random.Random(0)
    for ranks, killed, at in ((1, (0, 1), 'train-0000'), (2, (1,), 'train-0001'),
                              (4, (0, 1), 'val-0000')):
        out = tmp_path / f'killed{ranks}'
        job = start(out, 2, before=slow)
        job.until(at)
        time.sleep(chance.random() / 5)
        for i in killed:
            job.processes[i].send_signal(signal.SIGKILL)
        job.ends(-signal.SIGKILL if 0 in killed else 4, -signal.SIGKILL)
        assert not (out / 'meta.json').exists()

        # of each rank at most the shard that it was writing is begun
        begun, noted = begun_and_noted(out)
        assert noted and len(begun - noted) <= 2

        # what was whole is not written again
        before = times(out, noted)
        start(out, ranks).ends()
        assert times(out, noted) == before
        assert files_of(out) == files_of(tmp_path / 'whole')


def test_fault_26_an_orphan_of_a_killed_prepare_keeps_the_next_one_out(tmp_path):
    args = [f'--input={corpus(tmp_path / "a.txt")}', '--encoder=lsa', '--encoder_dims=16',
            '--vocab_size=300', '--shard_size=20', f'--out={tmp_path / "x"}']
    stuck = """
import os, time
replace = os.replace
os.replace = lambda *p: time.sleep(999) if 'train-00003' in str(p[1]) else replace(*p)
"""
    job = Job(None, tmp_path / 'x', *args, script='prepare.py', ranks=2, before=stuck)
    job.until('train-00002')
    first, orphan = job.processes
    first.kill()                                   # rank 1 is asleep in its own shard, and lives on
    first.wait()
    second, = run_each(['prepare.py', *args])
    assert_refused(second, 'in use by another process')
    assert orphan.poll() is None
    orphan.kill()
    orphan.wait()
    assert run('prepare.py', *args).returncode == 0


def test_fault_27_bad_documents_and_broken_files_at_prepare(tmp_path):
    lines = corpus(tmp_path / 'good.txt').read_bytes().splitlines()
    large = b'word ' * 400_000                                           # 2 MB
    bad = [b'', b'   ', b'\xff\xfe broken \x80', b'nul \x00 inside', large]
    (tmp_path / 'a.txt').write_bytes(b'\n'.join(lines + bad))
    (tmp_path / 'empty.txt').write_bytes(b'\n\n')
    x = tmp_path / 'x'
    strict = (f'prepare.py --input={tmp_path}/a.txt --encoder=lsa --encoder_dims=16 '
              f'--vocab_size=300 --shard_size=100 --out={x}')
    replace = f'{strict} --invalid_bytes=replace'
    stopped, (code, _, err) = run_each(strict, replace)
    assert_refused(stopped,
                   f"a.txt, line {len(lines) + 3}: 'utf-8' codec can't decode byte 0xff")
    assert code == 0, err

    # nothing is dropped without a count, and chunks join to their documents
    splits = both(x)
    counts = dict(read=405, kept=402, empty=2, nul=1, invalid_utf8=1, trimmed=1)
    assert splits[0].meta['counts']['input'] == counts
    found = ''.join(text for ds in splits for text in texts_in(ds))
    expected = [line.decode() for line in (*lines, large.strip())]
    expected.append('\ufffd\ufffd broken \ufffd')
    assert len(found) == sum(map(len, expected)) and all(text in found for text in expected)

    # what is broken is redone, and nothing else
    first = files_of(x)
    flip(x / 'train-00001.latents.npy')
    os.truncate(x / 'train-00000.tokens.bin', 100)
    (x / '.nanoLDLM-train-00000.tokens.bin-12345678').write_bytes(b'stale')
    for name in ('latent_stats.npz', 'tokenizer.json'):
        os.remove(x / name)
    inspect = f'prepare.py --inspect={x}'
    none = f'prepare.py --input={tmp_path}/empty.txt --out={tmp_path}/y'
    seen, again, empty, good = run_each(inspect, replace, none, inspect)
    assert_refused(seen, 'run prepare.py again')
    assert again[0] == 0 and files_of(x) == first, again
    assert again[1].count('there already') == sum(ds.n_shards for ds in splits) - 2
    assert_refused(empty, 'no documents (2 empty among 2 read)')
    assert good[0] == 0 and '405 documents, 402 kept, 2 empty, 1 dropped (with a NUL)' in good[1]
