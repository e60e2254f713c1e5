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
from corpora.layouts import verify_dataset
from corpora.tokenizers import bpe_tokenizer, load_tokenizer
from data import PackedDataset
from launch import ROOT, TINY, assert_refused, flags, flip, forge_file, run_each, run_together
from runs import checkpoint
from sampling.run import Run
from toys import new_run

NEWEST = 'step-00000012'       # of the run `finished`
QKV = 'blocks.0.text.qkv.weight'


class Command:
    """ What runs a command when it is unpickled. """

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def a_run(finished, tmp_path):
    """ a_run(name) -> a copy of the run `finished`. """
    return lambda name='run': shutil.copytree(finished, tmp_path / name)


@pytest.fixture
def a_dataset(dataset, tmp_path):
    """ a_dataset(name) -> a copy of the dataset. """
    return lambda name='data': shutil.copytree(dataset, tmp_path / name)


def training(dataset, out, *more):
    return ['train.py', *flags(dataset=dataset, out_dir=out), *TINY, *more]


def sampling(out, text='a dog'):
    return ['sample.py', *flags(out_dir=out, text=text, device='cpu')]


def state_of(out):
    """ The training state of the newest checkpoint, without its digest. """
    state = read_json(out / NEWEST / 'training_state.json')
    del state['sha256']
    return state


def forge(out, where=NEWEST, **changes):
    """ Change a training state and make all digests fit again, as an attacker would. """
    folder = out / where
    state = {**read_json(folder / 'training_state.json'), **changes}
    del state['sha256']
    state['files'] = {name: entry_of(folder / name) for name in state['files']}
    (folder / 'training_state.json').write_text(sealed(state))


def forge_all(out, identity):
    for folder in checkpoint.steps(out):
        forge(out, folder.name, identity=identity)


def change_tensors(out, kind, change):
    """ Other tensors in the newest checkpoint, with their digests. """
    path = out / NEWEST / f'{kind}.safetensors'
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    forge(out)
    (out / 'best').write_text(f'{NEWEST}\n')


# ---- arrays

def test_a_compressed_array_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / 'a.npz', mean=np.zeros(2**16))
    monkeypatch.setattr(zipfile.ZipFile, 'open', lambda *args: pytest.fail('it is unpacked'))
    with pytest.raises(ValueError, match='a.npz: .*compressed'):
        read_arrays(tmp_path / 'a.npz')


# ---- nothing runs

@pytest.fixture
def evil(tmp_path):
    """ Contents of files that would run a command. None has run it when the test ends. """
    ran, path = tmp_path / 'ran', tmp_path / 'evil'
    command = Command(f'touch {ran}')
    contents = [pickle.dumps(command)]
    array = np.array([command], object)
    for save in (lambda file: torch.save(command, file),
                 lambda file: np.save(file, array, allow_pickle=True),
                 lambda file: np.savez(file, mean=array, std=np.zeros(16))):
        with open(path, 'wb') as file:
            save(file)
        contents.append(path.read_bytes())
    yield contents
    assert not ran.exists()


@pytest.mark.parametrize('name', ['train-00000.latents.npy', 'train-00000.offsets.npy',
                                  'latent_stats.npz', 'meta.json', 'tokenizer.json'])
def test_no_file_of_a_dataset_runs_a_command(dataset, a_dataset, evil, name):
    folder = a_dataset()
    for content in evil:
        if name == 'meta.json':
            (folder / name).write_bytes(content)
        else:
            forge_file(folder, name, content)
        with pytest.raises(Exception):
            load_tokenizer(folder)
            PackedDataset(folder, 'train').rows([0])
        shutil.copy(dataset / 'meta.json', folder)


def test_fault_23_no_checkpoint_runs_a_command(dataset, a_run, evil):
    """ Neither where the environment makes torch.load unpickle. """
    kinds = ('optimizer', 'rng', 'model')
    commands = []
    for i, kind in enumerate(kinds):
        out = a_run(kind)
        (out / NEWEST / f'{kind}.safetensors').write_bytes(evil[i % 2])
        forge(out)
        commands.append(training(dataset, out))
    results = run_each(*commands, env=dict(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD='1'))
    for kind, result in zip(kinds, results):
        assert_refused(result, f'{kind}.safetensors')


# ---- what does not match its digest

def test_a_file_that_does_not_match_its_digest_is_one_line_and_code_2(a_dataset, tmp_path):
    folder, other = a_dataset(), a_dataset('other')
    flip(folder / 'train-00000.latents.npy')
    flip(other / 'latent_stats.npz', at=300)
    with pytest.raises(ValueError, match='latents.npy: its sha256 is not the one'):
        verify_dataset(folder)
    out = tmp_path / 'run'
    for result in run_each(['prepare.py', f'--inspect={other}'], training(folder, out),
                           training(other, out)):
        assert_refused(result, 'sha256')


# ---- moments of another form: a fused kernel would read beyond them

def test_moments_and_averages_have_exactly_the_names_shapes_and_dtypes_of_the_run(dataset, a_run):
    forms = [
        ('optimizer', f'exp_avg.{QKV}', lambda x: x[:48]),
        ('optimizer', f'exp_avg.{QKV}', lambda x: x[0, :1]),
        ('optimizer', f'exp_avg_sq.{QKV}', lambda x: x.double()),
        ('optimizer', f'step.{QKV}', None),
        ('ema', QKV, lambda x: x[:1]),
        ('model', QKV, lambda x: x.half()),
    ]
    commands = []
    for i, (kind, name, change) in enumerate(forms):
        def other(tensors):
            tensor = tensors.pop(name)
            if change:
                tensors[name] = change(tensor).contiguous()

        out = a_run(f'run{i}')
        change_tensors(out, kind, other)
        commands.append(training(dataset, out))
    for (kind, name, _), result in zip(forms, run_together(*commands)):
        assert_refused(result, f'{kind}.safetensors: {name} is ', ', expected ')


# ---- what no training saves, though its digest is right

def test_a_tensor_that_is_not_finite_is_named_by_all_that_read_it(dataset, tmp_path, a_run):
    ema, muon = a_run(), tmp_path / 'muon'
    (made,) = run_each(training(dataset, muon, '--max_iters=4', '--optimizer=muon'))
    assert made[0] == 0
    (muon / 'step-00000004').rename(muon / NEWEST)
    forge(muon, step=12)
    moment = f'momentum_buffer.{QKV}'
    change_tensors(ema, 'ema', lambda tensors: tensors['bias'][-1].fill_(np.nan))
    change_tensors(muon, 'optimizer', lambda tensors: tensors[moment][-1, -1].fill_(np.inf))
    of_muon, *of_ema = run_together(
        training(dataset, muon, '--max_iters=14', '--optimizer=muon'),
        training(dataset, ema, '--max_iters=14'), sampling(ema),
        ['evaluate.py', *flags(out_dir=ema, dataset=dataset, device='cpu')],
        ['runs/export.py', *flags(out_dir=ema, to=tmp_path / 'given')])
    assert_refused(of_muon, f'optimizer.safetensors: {moment} holds nan or inf')
    for result in of_ema:
        assert_refused(result, 'ema.safetensors: bias holds nan or inf')


def without(kind):
    """ A change: no file of this kind, nor a word of it. """
    def change(out):
        (out / NEWEST / f'{kind}.safetensors').unlink()
        files = {name: entry for name, entry in state_of(out)['files'].items() if kind not in name}
        forge(out, files=files)
    return change


def other_generator(out):
    change_tensors(out, 'rng', lambda tensors: tensors.update(x=tensors.pop('rank0.cpu')))


def test_a_resume_asks_for_every_generator_average_and_counter(dataset, a_run):
    changes = {
        'rng.safetensors: x is ': other_generator,
        'expected rng.safetensors': without('rng'),
        'expected ema.safetensors': without('ema'),
        'expected optimizer.safetensors': without('optimizer'),
        'rng.safetensors: rank1.cpu is None': dict(generators=['rank0.cpu', 'rank1.cpu']),
        'cannot go on from': dict(generators=5),
        'expected rank0.cpu': dict(generators=[]),
        'history is [1.0], expected 64 numbers': dict(history=[1.0]),
        "best_val is 'x', expected a number": dict(best_val='x'),
        'best_val is nan, expected a number': dict(best_val=float('nan')),
        'streak is None': dict(streak=None),
        'evaluated_at is [3]': dict(evaluated_at=[3])}
    commands = []
    for i, change in enumerate(changes.values()):
        out = a_run(f'run{i}')
        if isinstance(change, dict):
            forge(out, **change)
        else:
            change(out)
        commands.append(training(dataset, out, '--max_iters=14'))
    for words, result in zip(changes, run_together(*commands)):
        assert_refused(result, words)


@pytest.mark.parametrize('value', [5, 'x', None, [1], {}])
def test_a_sealed_state_of_other_types_is_one_line(a_run, value):
    out = a_run('copy')
    (out / 'best').write_text(f'{NEWEST}\n')
    state = state_of(out)
    inside = dict(identity=('heads', 'streams'), knobs=('mode', 'text_process', 'text_schedule'))
    changes = [{name: value} for name in ('identity', 'knobs', 'files')]
    for name, keys in inside.items():
        changes += [{name: {**state[name], key: value}} for key in keys]
    changes += [{'files': {name: value}} for name in ('model.safetensors', '../../x')]
    for change in changes:
        (out / NEWEST / 'training_state.json').write_text(sealed({**state, **change}))
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


def test_fault_24_hostile_metadata(dataset, a_run, a_dataset, tmp_path):
    identity = state_of(a_run('first'))['identity']
    refused, gone_on = [], []
    out = tmp_path / 'run'

    # a network that the weights cannot be of
    for i, lie in enumerate((dict(depth=10 ** 6), dict(vocab_size=10 ** 9), dict(width=2 ** 40),
                             dict(seq_len=10 ** 12), dict(latent_tokens=10 ** 9),
                             dict(mlp_ratio=1e300))):
        lying = a_run(f'lie{i}')
        forge_all(lying, {**identity, **lie})
        refused.append(sampling(lying))

    def rewrite(path, lie):
        path.write_text(json.dumps({**json.loads(path.read_text()), **lie}))

    # a dataset
    huge = {'name': 'train-00000', 'samples': 10 ** 12, 'files': {}}
    for i, lie in enumerate((dict(max_tokens=10 ** 12), dict(latent_shape=[10 ** 9, 10 ** 9]),
                             dict(splits=dict(train=dict(shards=[huge]))))):
        folder = a_dataset(f'data{i}')
        rewrite(folder / 'meta.json', lie)
        refused.append(training(folder, out))

    # an array whose header says more than there is
    folder = a_dataset('header')
    text = f"{{'descr': '<f2', 'fortran_order': False, 'shape': ({10**9}, 1, 16), }}".encode()
    text += b' ' * (-(len(text) + 11) % 64) + b'\n'
    content = b'\x93NUMPY\x01\x00' + len(text).to_bytes(2, 'little') + text + bytes(64)
    forge_file(folder, 'train-00000.latents.npy', content)
    refused.append(training(folder, out))

    # a state that is not the one that was sealed: a training goes on from the one before
    for i, lie in enumerate((dict(identity=5), dict(history=[1.0] * 99), dict(step='many'),
                             dict(identity=None))):
        lying = a_run(f'state{i}')
        rewrite(lying / NEWEST / 'training_state.json', lie)
        gone_on.append(training(dataset, lying))

    results = measured(refused + gone_on)
    for command, (rc, err, seconds, mib) in zip(refused + gone_on, results):
        assert seconds < 5 and mib < 1000, (command, rc, err, seconds, mib)
    for rc, err, *_ in results[:len(refused)]:
        assert_refused((rc, '', err))
    for rc, err, *_ in results[len(refused):]:
        assert rc == 0 and f'{NEWEST} is broken and set aside' in err, err


# ---- a small file that unpacks to a large one

def test_what_unpacks_to_gigabytes_is_refused_by_its_size(here, a_run, a_dataset):
    pyarrow = pytest.importorskip('pyarrow', reason='reads parquet: pip install pyarrow')
    Image = pytest.importorskip('PIL.Image', reason='reads images: pip install pillow')
    import pyarrow.parquet

    def write_parquet(name, column):
        table = pyarrow.table(dict(text=column))
        pyarrow.parquet.write_table(table, name, compression='zstd')
        return table

    with gzip.open('line.txt.gz', 'wb', compresslevel=1) as f:
        for _ in range(265):
            f.write(b'a dog sees the moon ' * 50_000)
    big = write_parquet('page.parquet', pyarrow.array(['a' * 150 * 2**20] * 3))
    write_parquet('list.parquet', pyarrow.array([[''] * 10_000_000]))
    numbers = np.zeros(99_999, np.int32)
    write_parquet('same.parquet', pyarrow.DictionaryArray.from_arrays(numbers, ['a' * 10 * 2**20]))
    packed = pyarrow.ipc.IpcWriteOptions(compression='zstd')
    with pyarrow.ipc.new_file('zstd.arrow', big.schema, options=packed) as f:
        f.write_table(big)
    os.mkdir('in')
    Image.new('1', (9000, 9000)).save('in/a.png')
    (here / 'in/metadata.csv').write_text('file_name,text\na.png,a\na.png,b\n')
    names = ('line.txt.gz', 'zstd.arrow', 'page.parquet', 'list.parquet', 'same.parquet')
    prepare = ['prepare.py', *flags(tokenizer='byte', out=here / 'out')]
    commands = [[*prepare, f'--input={here}/{name}'] for name in names]
    commands += [[*prepare, f'--input={here}/in', '--image_size=16']]

    # a name in `best`, and a dataset that says what it is in 40 MB
    out, folder = a_run(), a_dataset()
    os.truncate(out / 'best', 2**32)
    (folder / 'meta.json').write_text('[' + '{},' * 13_000_000 + '{}]')
    commands += [sampling(out), ['prepare.py', f'--inspect={folder}']]
    for command, (rc, err, _, mib) in zip(commands, measured(commands), strict=True):
        lines = [line for line in err.splitlines() if not line.startswith('warning: val has')]
        assert rc == 2 and len(lines) == 1 and mib < 1000, (command, err, mib)


# ---- a version whose state has another shape

def test_a_checkpoint_of_another_version_is_named_as_such_and_stays(dataset, a_run, tmp_path):
    out = a_run()
    known = state_of(out)['identity']
    for identity in ({'model': known, 'files': {}}, {k: v for k, v in known.items() if k != 'bag'}):
        forge_all(out, identity)
        for result in run_together(training(dataset, out), sampling(out),
                                   training(dataset, tmp_path / 'new', f'--init_from={out}'),
                                   ['evaluate.py', *flags(out_dir=out, device='cpu')]):
            assert_refused(result, 'written by another version')
    assert (out / NEWEST).is_dir()


# ---- files without a digest

@pytest.mark.parametrize('text', ['', '{', '[1]', '[' * 10 ** 5, '\x00'])
def test_a_broken_meta_or_state_names_its_file(tmp_path, text):
    out = new_run(tmp_path, 1)
    for path in (out / 'data/meta.json', out / 'step-00000001/training_state.json'):
        path.write_text(text)
        with pytest.raises(ValueError, match=path.name):
            checkpoint.load_model(out)


READERS = [sha256, read_json, read_array, read_arrays, checkpoint.read_tensors, bpe_tokenizer,
           lambda path: check(path, {'bytes': 0, 'sha256': ''}),
           lambda path: image_patches(path, 8, 4, 1)]


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
    for read in READERS:
        with pytest.raises(ValueError, match=f'/a: .*this is a {kind}, expected a file'):
            read(path)


def test_commands_stop_at_a_pipe_in_the_place_of_a_file(here, dataset, finished, a_run):
    def pipe(path):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return path

    weights, results, lock = a_run('a'), a_run('b'), a_run('c')
    encoder = here / 'encoder'
    encoder.mkdir()
    (here / 'lines.txt').write_text('a\nb\nc\n' * 9)
    pipe(weights / NEWEST / 'ema.safetensors')
    (weights / 'best').write_text(f'{NEWEST}\n')
    state = state_of(weights)
    state['files']['ema.safetensors'] = {'bytes': 0, 'sha256': ''}
    (weights / NEWEST / 'training_state.json').write_text(sealed(state))
    pipe(results / 'results.json')
    pipe(lock / 'lock')
    pipe(encoder / 'vocab.txt')
    sample = ['sample.py', *flags(out_dir=finished, device='cpu')]
    commands = {
        'ema.safetensors': sampling(weights),
        'results.json': ['evaluate.py', *flags(out_dir=results, dataset=dataset, device='cpu')],
        'lock': training(dataset, lock),
        'vocab.txt': ['prepare.py', *flags(input=here / 'lines.txt', encoder=encoder,
                                           out=here / 'x')],
        'z.npy': [*sample, f'--latents={pipe(here / "z.npy")}'],
        'texts.txt': [*sample, f'--texts={pipe(here / "texts.txt")}']}
    for name, (rc, _, err) in zip(commands, run_together(*commands.values())):
        assert rc == 2 and err.count('error: ') == 1 and name in err, (name, err)


def test_a_run_is_evaluated_on_texts_of_its_own_tokenizer_only(a_dataset, finished):
    folder = a_dataset()
    tokenizer = json.loads((folder / 'tokenizer.json').read_text())
    forge_file(folder, 'tokenizer.json', json.dumps(tokenizer, indent=7).encode())
    asked = flags(out_dir=finished, dataset=folder, tasks='nelbo', n=6, draws=1)
    (result,) = run_each(['evaluate.py', *asked])
    assert result[0] == 2 and 'name its own dataset' in result[2]
