""" Damaged and hostile files: nothing executes code, nothing allocates without bound, nothing runs on silently wrong. A file that does
not match its digest is one line; one whose digest was forged may end in the library's exception. """
import json
import os
import pickle
import random
import re
import shutil
import zipfile

import numpy as np
import pytest

from corpora.layouts import verify
from corpora.tokenizers import load_tokenizer
from data import PackedDataset
from launch import TINY, measured, run, run_code, run_each, train
from runs import run_folder
from runs.export import results_of
from runs.files import read_array, read_arrays, read_sealed, sealed, sha256
from sampling.run import Run
from test_checkpoint import Command


def copy_of(dataset, tmp_path):
    return shutil.copytree(dataset, tmp_path / 'packed')


def forge(folder, name, content):
    """ Another content of a file, with its size and digest in meta.json. """
    (folder / name).write_bytes(content)
    meta = read_sealed(folder / 'meta.json')
    shards = [shard for split in meta['splits'].values() for shard in split['shards']]
    for files in [meta['files'], *(shard['files'] for shard in shards)]:
        if name in files:
            files[name] = dict(bytes=len(content), sha256=sha256(folder / name))
    (folder / 'meta.json').write_text(sealed(meta))


def header_text(text):
    """ The header of an .npy file, version 1. """
    text = text.encode() + b' ' * (-(len(text) + 11) % 64) + b'\n'
    return b'\x93NUMPY\x01\x00' + len(text).to_bytes(2, 'little') + text


def test_the_reader_of_arrays_gives_what_numpy_gives(tmp_path):
    arrays = dict(a=np.arange(6, dtype=np.float16).reshape(2, 3), b=np.zeros((0, 4)), c=np.asfortranarray(np.eye(3)),
                  d=np.array(5), e=np.array(['a', 'bc']))
    np.savez(tmp_path / 'all.npz', **arrays)
    again = read_arrays(tmp_path / 'all.npz')
    assert sorted(again) == sorted(arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f'{name}.npy', array)
        dtype = '<U2' if name == 'e' else 'numbers'
        for found in (again[name], *(read_array(tmp_path / f'{name}.npy', dtype, mmap=mmap) for mmap in (False, True))):
            assert type(found) is np.ndarray and found.dtype == array.dtype and np.array_equal(found, array)


def test_an_array_of_another_dtype_shape_or_size_is_refused_with_both(tmp_path):
    path = tmp_path / 'a.npy'
    np.save(path, np.zeros((2, 3), np.float32))
    for expected, words in ((('float16', (2, 3)), r'float32 \(2, 3\), expected float16 \(2, 3\)'),
                            (('float32', (2, 4)), r'float32 \(2, 3\), expected float32 \(2, 4\)'),
                            (('<U2',), r'float32 \(2, 3\), expected <U2 of any shape')):
        with pytest.raises(ValueError, match=f'a.npy: .*{words}'):
            read_array(path, *expected)
    os.truncate(path, os.path.getsize(path) - 4)
    with pytest.raises(ValueError, match='a.npy: array cannot be read'):
        read_array(path)


def test_a_compressed_array_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / 'a.npz', mean=np.zeros(2**16))
    monkeypatch.setattr(zipfile.ZipFile, 'open', lambda *args: pytest.fail('it is unpacked'))
    with pytest.raises(ValueError, match='a.npz: .*compressed'):
        read_arrays(tmp_path / 'a.npz')


def test_any_flipped_bit_and_any_changed_field_of_meta_json_is_refused(dataset, tmp_path):
    folder, draw = copy_of(dataset, tmp_path), random.Random(0)
    path = folder / 'meta.json'
    whole = path.read_bytes()
    for _ in range(60):
        content = bytearray(whole)
        content[draw.randrange(len(whole))] ^= 1 << draw.randrange(7)
        path.write_bytes(content)
        # white space and escapes may be written in another way; what they say may not differ
        try:
            assert json.loads(path.read_bytes()) == json.loads(whole)
        except (ValueError, AssertionError):
            with pytest.raises(ValueError, match='meta.json'):
                PackedDataset(folder, 'train')
    meta = json.loads(whole)
    for key in meta:
        path.write_text(json.dumps({**meta, key: 1}))
        with pytest.raises(ValueError, match='meta.json'):
            PackedDataset(folder, 'train')


def test_a_file_that_does_not_match_its_digest_is_one_line_and_code_2(dataset, tmp_path):
    folder = copy_of(dataset, tmp_path)
    path = folder / 'train-00000.latents.npy'
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match='latents.npy: its sha256 is not the one in meta.json'):
        verify(folder)
    stats = folder / 'latent_stats.npz'
    content = bytearray(stats.read_bytes())
    content[len(content) // 2] ^= 1
    stats.write_bytes(content)
    inspected, trained = run_each(['prepare.py', f'--inspect={folder}'], ['train.py', f'--dataset={folder}', f'--out_dir={tmp_path}/run', *TINY])
    for rc, _, err in (inspected, trained):
        assert rc == 2 and err.count('\n') == 1 and 'sha256' in err, err


@pytest.mark.parametrize('name', ['train-00000.latents.npy', 'train-00000.offsets.npy', 'latent_stats.npz', 'meta.json', 'tokenizer.json'])
def test_no_file_of_a_dataset_runs_a_command(dataset, tmp_path, name):
    folder, ran = copy_of(dataset, tmp_path), tmp_path / 'ran'
    evil = Command(f'touch {ran}')
    for save in (lambda path: np.save(path, np.array([evil], object), allow_pickle=True), lambda path: path.write_bytes(pickle.dumps(evil)),
                 lambda path: np.savez(path, mean=np.array([evil], object), std=np.zeros(16))):
        save(tmp_path / 'evil')
        content = next(tmp_path.glob('evil*')).read_bytes()
        for path in tmp_path.glob('evil*'):
            path.unlink()
        (folder / name).write_bytes(content) if name == 'meta.json' else forge(folder, name, content)
        with pytest.raises(Exception):
            PackedDataset(folder, 'train').rows([0])
            load_tokenizer(folder)
        shutil.copy(dataset / 'meta.json', folder)
    assert not ran.exists()


def test_a_header_that_lies_of_its_size_takes_no_memory(dataset, tmp_path):
    folder = copy_of(dataset, tmp_path)
    shape = f'({10**9}, 1, 16)'
    forge(folder, 'train-00000.latents.npy', header_text(f"{{'descr': '<f2', 'fortran_order': False, 'shape': {shape}, }}") + bytes(64))
    code = f"""
import resource
from data import PackedDataset
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)
try:
    PackedDataset({str(folder)!r}, 'train')
except Exception as error:
    print('refused', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
    result = run_code(code)
    assert result.stdout.startswith('refused') and int(result.stdout.split()[1]) < 1000, result


def test_no_name_in_a_meta_json_leads_out_of_its_folder(dataset, tmp_path):
    """ prepare.py --same_as writes files by the names in another dataset's meta.json. """
    folder = copy_of(dataset, tmp_path)
    meta = read_sealed(folder / 'meta.json')
    (tmp_path / 'evil.py').write_text('evil')
    meta['files']['../evil.py'] = dict(bytes=4, sha256=sha256(tmp_path / 'evil.py'))
    (folder / 'meta.json').write_text(sealed(meta))
    (tmp_path / 'lines.txt').write_text('\n'.join(f'a dog number {i}' for i in range(50)))
    (tmp_path / 'a').mkdir()
    (rc, _, err), = run_each(['prepare.py', f'--same_as={folder}', f'--input={tmp_path}/lines.txt', f'--out={tmp_path}/a/b'])
    assert rc == 2 and err.count('\n') == 1 and '../evil.py' in err and not (tmp_path / 'a' / 'evil.py').exists(), err


def test_what_a_run_folder_says_wrong_is_one_line_that_names_the_file(finished, tmp_path):
    """ The files of a run that have no digest: config.json, results.json, the id in wandb. """
    out = shutil.copytree(finished, tmp_path / 'run')
    path = out / 'config.json'
    config = json.loads(path.read_text())
    forged = [dict(lengths=wrong) for wrong in ('3', 3, -1, True, [], {'a': 1}, ['a'], [1, 'a'], [[1]], [0.5], [True], [-1], [10**6])]
    for change in [*forged, dict(mode='l3t'), dict(depth='8')]:
        path.write_text(json.dumps({**config, **change}))
        name, = change
        with pytest.raises(ValueError, match=f'^{re.escape(str(path))}: {name}='):
            Run(out, device='cpu')
    path.write_text(json.dumps({**config, 'lengths': [0, 3, Run(finished, device='cpu').L]}))
    assert Run(out, device='cpu').lengths[1] == 3

    # what was measured
    results = tmp_path / 'results.json'
    for broken in ('{}', '[1'):
        results.write_text(broken)
        with pytest.raises(ValueError, match=re.escape(str(results))):
            results_of(results, 'step-1')

    # the id
    knobs = dict(out_dir=str(out), wandb_project='p')
    for wrong in (b'', b'a/../b', b'0123456\xff', b'\x1b[2J'):
        (out / 'wandb_id').write_bytes(wrong)
        with pytest.raises(ValueError, match=f'^{re.escape(str(out))}/wandb_id: found .*remove it'):
            run_folder.begin(knobs, finished, fresh=False)
    (out / 'wandb_id').unlink()
    assert run_folder.begin(knobs, finished, fresh=False) == (out / 'wandb_id').read_text().strip()


def test_a_dataset_that_another_machine_has_embedded_is_evaluated_and_no_training_goes_on_with_it(dataset, finished, tmp_path):
    """ Its statistics differ in the last bits: the run has its own. """
    folder, out = copy_of(dataset, tmp_path), shutil.copytree(finished, tmp_path / 'run')
    stats = read_arrays(folder / 'latent_stats.npz')
    np.savez(tmp_path / 'others.npz', **{name: x * (1 + 1e-6) if x.dtype.kind == "f" else x for name, x in stats.items()})
    forge(folder, 'latent_stats.npz', (tmp_path / 'others.npz').read_bytes())
    figures = []
    for data in (dataset, folder):
        result = run('evaluate.py', f'--out_dir={out}', '--tasks=nelbo', '--n=6', '--draws=1', f'--dataset={data}')
        assert result.returncode == 0, result.stderr
        figures.append(measured(out)['nelbo/nats_per_token'])
    assert figures[0] == figures[1]
    result = train(folder, out, '--max_iters=14')
    assert result.returncode == 2 and "latent_stats.npz" in result.stderr

    # texts of another tokenizer are not those of the run
    tokenizer = json.loads((folder / 'tokenizer.json').read_text())
    forge(folder, 'tokenizer.json', json.dumps(tokenizer, indent=7).encode())
    result = run('evaluate.py', f'--out_dir={out}', '--tasks=nelbo', '--n=6', f'--dataset={folder}')
    assert result.returncode == 2 and 'tokenizer' in result.stderr and 'name its own dataset' in result.stderr
