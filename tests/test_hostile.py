"""
Damaged and hostile files. No file executes code, allocates without bound, leads out of its folder,
or lets a script go on silently wrong. What does not match its digest is one line; a file whose
digest was forged may end in the library's exception.
"""
import gzip
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from base.files import check, read_array, read_arrays, read_json, sha256
from base.writing import entry_of, sealed
from corpora.images import image_patches
from corpora.layouts import verify
from corpora.tokenizers import bpe_tokenizer, load_tokenizer
from data import PackedDataset
from launch import ROOT, TINY, flip, forge_file, run, run_each
from runs import checkpoint
from sampling.run import Run
from toys import new_run

NEWEST = 'step-00000012'       # of the run `finished`


class Command:
    """ What runs a command when it is unpickled. """

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def copy_of(folder, tmp_path, name='copy'):
    return shutil.copytree(folder, tmp_path / name)


def forge(folder, **changes):
    """ Change the training state and make all digests fit again, as an attacker would. """
    path = folder / 'training_state.json'
    state = {**read_json(path), **changes}
    state['files'] = {name: entry_of(folder / name) for name in state['files']}
    path.write_text(sealed({name: state[name] for name in state if name != 'sha256'}))


# ---- arrays

def test_a_compressed_array_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / 'a.npz', mean=np.zeros(2**16))
    monkeypatch.setattr(zipfile.ZipFile, 'open', lambda *args: pytest.fail('it is unpacked'))
    with pytest.raises(ValueError, match='a.npz: .*compressed'):
        read_arrays(tmp_path / 'a.npz')


# ---- nothing runs

def evil_files(tmp_path):
    """ Files that would run a command, and the file that the command makes. """
    ran = tmp_path / 'ran'
    evil = Command(f'touch {ran}')
    path = tmp_path / 'evil'
    torch.save(evil, path)
    contents = [path.read_bytes(), pickle.dumps(evil)]
    for save in (lambda f: np.save(f, np.array([evil], object), allow_pickle=True),
                 lambda f: np.savez(f, mean=np.array([evil], object), std=np.zeros(16))):
        with open(path, 'wb') as f:
            save(f)
        contents.append(path.read_bytes())
    return contents, ran


@pytest.mark.parametrize('name', ['train-00000.latents.npy', 'train-00000.offsets.npy',
                                  'latent_stats.npz', 'meta.json', 'tokenizer.json'])
def test_no_file_of_a_dataset_runs_a_command(dataset, tmp_path, name):
    folder = copy_of(dataset, tmp_path)
    contents, ran = evil_files(tmp_path)
    for content in contents:
        if name == 'meta.json':
            (folder / name).write_bytes(content)
        else:
            forge_file(folder, name, content)
        with pytest.raises(Exception):
            load_tokenizer(folder)
            PackedDataset(folder, 'train').rows([0])
        shutil.copy(dataset / 'meta.json', folder)
    assert not ran.exists()


@pytest.mark.parametrize('force', ['0', '1'])
def test_fault_23_no_checkpoint_runs_a_command(dataset, finished, tmp_path, force):
    """ Neither where the environment makes torch.load unpickle. """
    contents, ran = evil_files(tmp_path)
    commands = []
    for i, name in enumerate(('optimizer', 'rng', 'model')):
        out = copy_of(finished, tmp_path, name)
        (out / NEWEST / f'{name}.safetensors').write_bytes(contents[i % 2])
        forge(out / NEWEST)
        commands.append(['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY])
    results = run_each(*commands, env=dict(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=force))
    for name, (rc, _, err) in zip(('optimizer', 'rng', 'model'), results):
        assert rc == 2 and err.count('\n') == 1 and f'{name}.safetensors' in err, err
    assert not ran.exists()


# ---- what does not match its digest

def test_a_file_that_does_not_match_its_digest_is_one_line_and_code_2(dataset, tmp_path):
    folder = copy_of(dataset, tmp_path)
    flip(folder / 'train-00000.latents.npy')
    with pytest.raises(ValueError, match='latents.npy: its sha256 is not the one'):
        verify(folder)
    other = copy_of(dataset, tmp_path, 'other')
    flip(other / 'latent_stats.npz', at=300)
    commands = (['prepare.py', f'--inspect={other}'],
                *(['train.py', f'--dataset={where}', f'--out_dir={tmp_path}/run', *TINY]
                  for where in (folder, other)))
    for rc, _, err in run_each(*commands):
        assert rc == 2 and err.count('\n') == 1 and 'sha256' in err, err


# ---- moments of another form: a fused kernel would read beyond them

def test_moments_and_averages_have_exactly_the_names_shapes_and_dtypes_of_the_run(
        dataset, finished, tmp_path):
    first = 'blocks.0.text.qkv.weight'
    forms = {
        'shape': ('optimizer', f'exp_avg.{first}', lambda x: x[:48]),
        'scalar': ('optimizer', f'exp_avg.{first}', lambda x: x[0, :1]),
        'dtype': ('optimizer', f'exp_avg_sq.{first}', lambda x: x.double()),
        'gone': ('optimizer', f'step.{first}', None),
        'average': ('ema', first, lambda x: x[:1]),
        'weights': ('model', first, lambda x: x.half()),
    }
    commands = []
    for case, (kind, name, change) in forms.items():
        path = copy_of(finished, tmp_path, case) / NEWEST / f'{kind}.safetensors'
        tensors = load_file(path)
        tensor = tensors.pop(name)
        if change:
            tensors[name] = change(tensor).contiguous()
        save_file(tensors, path)
        forge(path.parent)
        commands.append(['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/{case}', *TINY])
    for (kind, name, _), (rc, _, err) in zip(forms.values(), run_each(*commands)):
        assert rc == 2 and err.count('\n') == 1, err
        assert f'{kind}.safetensors: {name} is ' in err and ', expected ' in err


# ---- what no training saves, though its digest is right

def change_tensors(out, kind, change):
    """ Other tensors in the newest checkpoint of a copy of a run, with their digests. """
    path = out / NEWEST / f'{kind}.safetensors'
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    forge(path.parent)
    (out / 'best').write_text(f'{NEWEST}\n')


def test_a_tensor_that_is_not_finite_is_named_by_all_that_read_it(dataset, tmp_path, finished):
    muon = tmp_path / 'muon'
    assert run('train.py', f'--dataset={dataset}', f'--out_dir={muon}', *TINY, '--max_iters=4',
               '--optimizer=muon').returncode == 0
    shutil.copytree(muon / 'step-00000004', muon / NEWEST)
    shutil.rmtree(muon / 'step-00000004')
    forge(muon / NEWEST, step=12)
    moment = 'momentum_buffer.blocks.0.text.qkv.weight'
    ema = copy_of(finished, tmp_path)
    for out, kind, name, bad in ((ema, 'ema', 'bias', np.nan), (muon, 'optimizer', moment, np.inf)):
        change_tensors(out, kind, lambda tensors: tensors[name].view(-1)[-1].fill_(bad))

    def go_on(out):
        return ['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY, '--max_iters=14']
    results = run_each(['sample.py', f'--out_dir={ema}', '--text=a dog', '--device=cpu'],
                       ['evaluate.py', f'--out_dir={ema}', f'--dataset={dataset}', '--device=cpu'],
                       go_on(ema), [*go_on(muon), '--optimizer=muon'],
                       ['runs/export.py', f'--out_dir={ema}', f'--to={tmp_path}/given'])
    for i, (rc, _, err) in enumerate(results):
        words = f'optimizer.safetensors: {moment}' if i == 3 else 'ema.safetensors: bias'
        assert rc == 2 and err.count('\n') == 1 and f'{words} holds nan or inf' in err, err


def test_a_resume_asks_for_every_generator_average_and_counter(dataset, finished, tmp_path):
    def without(kind):
        def change(out):
            (out / NEWEST / f'{kind}.safetensors').unlink()
            state = read_json(out / NEWEST / 'training_state.json')
            files = {name: entry for name, entry in state['files'].items() if kind not in name}
            forge(out / NEWEST, files=files)
        return change

    def state(**changes):
        return lambda out: forge(out / NEWEST, **changes)

    def generators(**renamed):
        def change(tensors):
            for old, new in renamed.items():
                tensors[new] = tensors.pop(f'rank0.{old}')
        return lambda out: change_tensors(out, 'rng', change)
    cases = [
        (generators(cpu='x'), 'rng.safetensors: x is '),
        (without('rng'), 'expected rng.safetensors'),
        (without('ema'), 'expected ema.safetensors'),
        (without('optimizer'), 'expected optimizer.safetensors'),
        (state(generators=['rank0.cpu', 'rank1.cpu']), 'rng.safetensors: rank1.cpu is None'),
        (state(generators=5), 'cannot go on from'), (state(generators=[]), 'expected rank0.cpu'),
        (state(history=[1.0]), 'history is [1.0], expected 64 numbers'),
        (state(best_val='x'), "best_val is 'x', expected a number"),
        (state(best_val=float('nan')), 'best_val is nan, expected a number'),
        (state(streak=None), 'streak is None'), (state(evaluated_at=[3]), 'evaluated_at is [3]')]
    commands = []
    for i, (change, _) in enumerate(cases):
        out = copy_of(finished, tmp_path, str(i))
        change(out)
        commands.append(['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY,
                         '--max_iters=14'])
    for (_, words), (rc, _, err) in zip(cases, run_each(*commands)):
        assert rc == 2 and err.count('\n') == 1 and words in err, (words, err)


@pytest.mark.parametrize('value', [5, 'x', None, [1], {}])
def test_a_sealed_state_of_other_types_is_one_line(finished, tmp_path, value):
    out = copy_of(finished, tmp_path)
    (out / 'best').write_text(f'{NEWEST}\n')
    state = read_json(out / NEWEST / 'training_state.json')
    changes = [{name: value} for name in ('identity', 'knobs', 'files')]
    changes += [{'identity': {**state['identity'], name: value}} for name in ('heads', 'streams')]
    changes += [{'knobs': {**state['knobs'], name: value}}
                for name in ('mode', 'text_process', 'text_schedule')]
    changes += [{'files': {name: value}} for name in ('model.safetensors', '../../x')]
    for change in changes:
        (out / NEWEST / 'training_state.json').write_text(
            sealed({**{k: v for k, v in state.items() if k != 'sha256'}, **change}))
        with pytest.raises(ValueError, match='copy'):
            Run(out, device='cpu')


# ---- names that lead out of a folder

@pytest.mark.parametrize('name', ['../run/step-00000001', '/step-00000001', '..', 'step-1',
                                  'step-00000009', 'step-00000001/../step-00000001', 'x' * 10 ** 6])
def test_no_name_leads_out_of_a_run(tmp_path, name):
    out = new_run(tmp_path, 1)
    (out / 'best').write_text(name)
    for which in ('best', name):
        with pytest.raises(ValueError, match='has no checkpoint'):
            checkpoint.load_model(out, which)


# ---- what lies about its size

# commands in one process: [exit code, error, seconds, peak MiB] of each; ru_maxrss has its parent's
MEASURED = r"""
import contextlib, io, json, re, runpy, sys, time
import torch, transformers
for script, *args in json.loads(sys.argv.pop()):
    sys.argv, err, rc, begin = [script, *args], io.StringIO(), 0, time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name='__main__')
        except SystemExit as stop:
            rc = stop.code
    mib = int(re.search(r'VmHWM:\s+(\d+)', open('/proc/self/status').read())[1]) // 1024
    print(json.dumps([rc, err.getvalue(), time.process_time() - begin, mib]))
"""


def measured(commands):
    """ [exit code, error, seconds, peak MiB] of each command. The memory is what it takes beyond
    one that finds nothing: a torch for CUDA alone has 600 MiB. """
    commands = [['prepare.py', '--inspect=nothing'], *commands]
    result = subprocess.run([sys.executable, '-c', MEASURED, json.dumps(commands)], cwd=ROOT,
                            capture_output=True, text=True,
                            env={**os.environ, 'PYTHONPATH': str(ROOT)})
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == len(commands), result.stderr
    (*_, least), *found = found
    return [[code, error, seconds, mib - least] for code, error, seconds, mib in found]


def test_fault_24_hostile_metadata(dataset, finished, tmp_path):
    commands, codes = [], []

    # a network that the weights cannot be of
    identity = read_json(finished / NEWEST / 'training_state.json')['identity']
    for lie in (dict(depth=10 ** 6), dict(vocab_size=10 ** 9), dict(width=2 ** 40),
                dict(seq_len=10 ** 12), dict(latent_tokens=10 ** 9), dict(mlp_ratio=1e300)):
        out = copy_of(finished, tmp_path, f'lie{len(commands)}')
        for folder in checkpoint.steps(out):
            forge(folder, identity={**identity, **lie})
        commands.append(['sample.py', f'--out_dir={out}', '--text=a dog', '--device=cpu'])
        codes.append(2)

    # a state that is not the one that was sealed: a training goes on from the one before
    for lie in (dict(identity=5), dict(history=[1.0] * 99), dict(step='many'), dict(identity=None)):
        out = copy_of(finished, tmp_path, f'state{len(commands)}')
        path = out / NEWEST / 'training_state.json'
        path.write_text(json.dumps({**json.loads(path.read_text()), **lie}))
        commands.append(['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY])
        codes.append(0)

    # a dataset
    huge = {'name': 'train-00000', 'samples': 10 ** 12, 'files': {}}
    for lie in (dict(max_tokens=10 ** 12), dict(latent_shape=[10 ** 9, 10 ** 9]),
                dict(splits=dict(train=dict(shards=[huge])))):
        path = copy_of(dataset, tmp_path, f'data{len(commands)}') / 'meta.json'
        path.write_text(json.dumps({**json.loads(path.read_text()), **lie}))
        commands.append(['train.py', f'--dataset={path.parent}', f'--out_dir={tmp_path}/run',
                         *TINY])
        codes.append(2)

    # an array whose header says more than there is
    folder = copy_of(dataset, tmp_path, 'header')
    text = f"{{'descr': '<f2', 'fortran_order': False, 'shape': ({10**9}, 1, 16), }}".encode()
    text += b' ' * (-(len(text) + 11) % 64) + b'\n'
    content = b'\x93NUMPY\x01\x00' + len(text).to_bytes(2, 'little') + text + bytes(64)
    forge_file(folder, 'train-00000.latents.npy', content)
    commands.append(['train.py', f'--dataset={folder}', f'--out_dir={tmp_path}/run', *TINY])
    codes.append(2)

    for command, code, (rc, err, seconds, mib) in zip(commands, codes, measured(commands)):
        assert rc == code and seconds < 5 and mib < 1000, (command, rc, err, seconds, mib)
        assert code == 0 or err.count('\n') == 1, err
        assert code == 2 or f'{NEWEST} is broken and set aside' in err, err


# ---- a small file that unpacks to a large one

def test_what_unpacks_to_gigabytes_is_refused_by_its_size(dataset, finished, tmp_path):
    pyarrow = pytest.importorskip('pyarrow', reason='reads parquet: pip install pyarrow')
    Image = pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')
    import pyarrow.parquet
    with gzip.open(tmp_path / 'line.txt.gz', 'wb', compresslevel=1) as f:
        for _ in range(265):
            f.write(b'a dog sees the moon ' * 50_000)
    big = pyarrow.table(dict(text=pyarrow.array(['a' * 150 * 2**20] * 3)))
    packed = pyarrow.ipc.IpcWriteOptions(compression='zstd')
    with pyarrow.ipc.new_file(tmp_path / 'zstd.arrow', big.schema, options=packed) as f:
        f.write_table(big)
    pyarrow.parquet.write_table(big, tmp_path / 'page.parquet', compression='zstd')
    lists = pyarrow.table(dict(text=pyarrow.array([[''] * 10_000_000])))
    pyarrow.parquet.write_table(lists, tmp_path / 'list.parquet', compression='zstd')
    same = pyarrow.DictionaryArray.from_arrays(np.zeros(99_999, np.int32), ['a' * 10 * 2**20])
    pyarrow.parquet.write_table(pyarrow.table(dict(text=same)), tmp_path / 'same.parquet')
    (tmp_path / 'in').mkdir()
    Image.new('1', (9000, 9000)).save(tmp_path / 'in/a.png')
    (tmp_path / 'in/metadata.csv').write_text('file_name,text\na.png,a\na.png,b\n')
    names = ['line.txt.gz', 'zstd.arrow', 'page.parquet', 'list.parquet', 'same.parquet']
    commands = [['prepare.py', f'--input={tmp_path}/{name}', '--tokenizer=byte',
                 f'--out={tmp_path}/out'] for name in names]
    commands += [['prepare.py', f'--input={tmp_path}/in', '--image_size=16', '--tokenizer=byte',
                  f'--out={tmp_path}/out']]

    # a name in `best`, and a dataset that says what it is in 40 MB
    out = copy_of(finished, tmp_path, 'run')
    os.truncate(out / 'best', 2**32)
    commands += [['sample.py', f'--out_dir={out}', '--text=a dog', '--device=cpu']]
    folder = copy_of(dataset, tmp_path)
    (folder / 'meta.json').write_text('[' + '{},' * 13_000_000 + '{}]')
    commands += [['prepare.py', f'--inspect={folder}']]
    for command, (rc, err, _, mib) in zip(commands, measured(commands), strict=True):
        lines = [line for line in err.splitlines() if not line.startswith('warning: val has')]
        assert rc == 2 and len(lines) == 1 and mib < 1000, (command, err, mib)


# ---- a version whose state has another shape

def test_a_checkpoint_of_another_version_is_named_as_such_and_stays(dataset, finished, tmp_path):
    known = read_json(finished / NEWEST / 'training_state.json')['identity']
    shapes = ({'model': known, 'files': {}}, {k: v for k, v in known.items() if k != 'bag'})
    commands = []
    for i, identity in enumerate(shapes):
        out = copy_of(finished, tmp_path, f'run{i}')
        for folder in checkpoint.steps(out):
            forge(folder, identity=identity)
        here = f'--out_dir={out}'
        commands += [['train.py', f'--dataset={dataset}', here, *TINY],
                     ['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/new',
                      f'--init_from={out}', *TINY],
                     ['sample.py', here, '--text=a dog', '--device=cpu'],
                     ['evaluate.py', here, '--device=cpu']]
    for rc, _, err in run_each(*commands):
        assert rc == 2 and err.count('\n') == 1 and 'written by another version' in err, err
    assert (out / NEWEST).is_dir()


# ---- files without a digest

@pytest.mark.parametrize('text', ['', '{', '[1]', '[' * 10 ** 5, '\x00'])
def test_a_broken_meta_or_state_names_its_file(tmp_path, text):
    out = new_run(tmp_path, 1)
    for path in (out / 'data/meta.json', out / 'step-00000001/training_state.json'):
        path.write_text(text)
        with pytest.raises(ValueError, match=path.name):
            checkpoint.load_model(out)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / 'a.json')
    with pytest.raises(ValueError, match='a.json: this is a pipe, expected a file'):
        read_json(tmp_path / 'a.json')


@pytest.mark.parametrize('kind', ['pipe', 'socket', 'device', 'folder'])
def test_no_reader_waits_for_what_is_no_file(tmp_path, kind):
    path = tmp_path / 'a'
    if kind == 'pipe':
        os.mkfifo(path)
    elif kind == 'socket':
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == 'device':
        path.symlink_to('/dev/zero')
    else:
        path.mkdir()
    readers = [sha256, read_json, read_array, read_arrays, checkpoint.read_tensors, bpe_tokenizer,
               lambda path: check(path, {'bytes': 0, 'sha256': ''}),
               lambda path: image_patches(path, 8, 4, 1)]
    for read in readers:
        with pytest.raises(ValueError, match=f'this is a {kind}, expected a file'):
            read(path)


def test_commands_stop_at_a_pipe_in_the_place_of_a_file(dataset, finished, tmp_path):
    outs = [copy_of(finished, tmp_path, name) for name in 'abc']
    (tmp_path / 'encoder').mkdir()
    places = [outs[0] / NEWEST / 'ema.safetensors', outs[1] / 'results.json', outs[2] / 'lock',
              tmp_path / 'encoder/vocab.txt', tmp_path / 'z.npy', tmp_path / 'texts.txt']
    for place in places:
        place.unlink(missing_ok=True)
        os.mkfifo(place)
    (outs[0] / 'best').write_text(f'{NEWEST}\n')
    (tmp_path / 'lines.txt').write_text('a\nb\nc\n' * 9)
    state = read_json(outs[0] / NEWEST / 'training_state.json')
    files = state['files'] | {'ema.safetensors': {'bytes': 0, 'sha256': ''}}
    state = {k: v for k, v in state.items() if k != 'sha256'} | {'files': files}
    (outs[0] / NEWEST / 'training_state.json').write_text(sealed(state))
    results = run_each(
        ['sample.py', f'--out_dir={outs[0]}', '--text=a', '--device=cpu'],
        ['evaluate.py', f'--out_dir={outs[1]}', f'--dataset={dataset}', '--device=cpu'],
        ['train.py', f'--dataset={dataset}', f'--out_dir={outs[2]}', *TINY],
        ['prepare.py', f'--input={tmp_path}/lines.txt', f'--encoder={tmp_path}/encoder',
         f'--out={tmp_path}/x'],
        ['sample.py', f'--out_dir={finished}', f'--latents={places[4]}', '--device=cpu'],
        ['sample.py', f'--out_dir={finished}', f'--texts={places[5]}', '--device=cpu'])
    for place, (rc, _, err) in zip(places, results):
        assert rc == 2 and err.count('error: ') == 1 and place.name in err, (place, err)


def test_a_run_is_evaluated_on_texts_of_its_own_tokenizer_only(dataset, finished, tmp_path):
    folder, out = copy_of(dataset, tmp_path), copy_of(finished, tmp_path, 'run')
    tokenizer = json.loads((folder / 'tokenizer.json').read_text())
    forge_file(folder, 'tokenizer.json', json.dumps(tokenizer, indent=7).encode())
    result = run('evaluate.py', f'--out_dir={out}', '--tasks=nelbo', '--n=6', '--draws=1',
                 f'--dataset={folder}')
    assert result.returncode == 2 and 'name its own dataset' in result.stderr
