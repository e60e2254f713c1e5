""" Run folders: what survives kills, full disks, flipped bits and hostile files. """
import json
import os
import pickle
import random
import shutil
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import launch
from launch import ROOT
from model import Model, ModelConfig
from runs import checkpoint, run_folder
from runs.files import read_sealed, sealed

CONFIG = ModelConfig(vocab_size=50, seq_len=8, latent_dim=6, latent_tokens=2, depth=2, heads=2, width=16)
META = dict(format=2, name='tiny', tokenizer=dict(kind='byte', vocab_size=258, eos=256, pad=257), encoder=None, latent_shape=None,
            token_dtype='uint16', max_tokens=7, splits={}, files={})


def states(step):
    """ All that `save` takes, every number of it a function of the step. """
    torch.manual_seed(step)
    model = {name: torch.randn_like(tensor) for name, tensor in Model(CONFIG).state_dict().items()}
    tensors = dict(model=model, ema={name: tensor + 1 for name, tensor in model.items()},
                   optimizer={f'exp_avg.{name}': tensor * 2 for name, tensor in model.items()},
                   rng={f'rank{rank}.cpu': torch.get_rng_state() for rank in range(2)})
    known = {'model_config': asdict(CONFIG), 'history': [.5, 1e-30, float(step)], 'identity': dict(process={})}
    return tensors, known


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def begin(out, data, fresh=False, step=0, wandb_project='', **knobs):
    return run_folder.begin(dict(out_dir=out, wandb_project=wandb_project, **knobs), data, fresh, step)


def new_run(tmp_path, *steps):
    """ out_dir of a run with these checkpoints. """
    data = tmp_path / 'dataset'
    data.mkdir()
    (data / 'meta.json').write_text(sealed(META))
    (data / 'train-00000.tokens.bin').write_bytes(b'not for the run folder')
    np.savez(data / 'latent_stats.npz', mean=np.zeros(6))
    out = tmp_path / 'out' / 'run'
    begin(str(out), data, fresh=True, seed=1, betas=(.9, .95))
    for step in steps:
        checkpoint.save(out, step, *states(step), keep=9)
    return out


def forge(folder, **changes):
    """ Change the training state and make all digests fit again, as an attacker would. """
    state = {**json.loads((folder / 'training_state.json').read_text()), **changes}
    if 'files' not in changes:
        state['files'] = {name: checkpoint.describe(folder / name) for name in state['files']}
    (folder / 'training_state.json').write_text(sealed(state))


def run_code(code, *args):
    """ Some lines in a process of their own, with the imports of a script. """
    head = 'import os, resource, sys\nfrom runs import checkpoint\nfrom configurator import stop_on_error\nout = sys.argv[1]\n'
    return launch.run_code(head + code, *args, PYTHONPATH=f'{ROOT}{os.pathsep}{ROOT}/tests')


# ---- what is written is what is read

def test_everything_saved_comes_back_to_the_bit(tmp_path):
    out = new_run(tmp_path, 1, 2)
    tensors, known = states(2)
    folder = checkpoint.newest(out)
    found = checkpoint.verify(folder)
    assert found['step'] == 2 and found['history'] == known['history'] and found['model_config'] == json.loads(json.dumps(asdict(CONFIG)))
    for kind, state in tensors.items():
        assert same(dict(sorted(checkpoint.read_tensors(folder / f'{kind}.safetensors').items())), dict(sorted(state.items())))


def test_a_run_folder_is_complete_in_itself(tmp_path):
    out = new_run(tmp_path)
    config = run_folder.read_config(out)
    assert config['seed'] == 1 and config['betas'] == (.9, .95) and config['argv'] == sys.argv
    assert config['versions']['torch'] == torch.__version__ and 'commit' in config
    assert sorted(p.name for p in (out / 'data').iterdir()) == ['latent_stats.npz', 'meta.json']
    (tmp_path / 'dataset' / 'meta.json').write_text('{"name": "another"}')
    begin(str(out), tmp_path / 'dataset', seed=2)  # as a resumed run does
    assert read_sealed(out / 'data' / 'meta.json') == META and run_folder.read_config(out)['seed'] == 2
    with pytest.raises(OSError, match='meta.json'):
        begin(str(tmp_path / 'out' / 'other'), tmp_path / 'nowhere')
    assert not (tmp_path / 'out' / 'other' / 'data').exists()


def test_load_model_takes_the_ema_weights_of_the_checkpoint_asked_for(tmp_path):
    out = new_run(tmp_path, 1)
    checkpoint.save(out, 2, *states(2), keep=9, best=True)
    checkpoint.save(out, 3, *states(3), keep=9)
    for which, step in (('latest', 3), ('best', 2), ('step-00000001', 1)):
        for ema in (True, False):
            model, config, meta = checkpoint.load_model(out, which, ema=ema)
            expected = states(step)[0]['ema' if ema else 'model']
            assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
            assert not model.training and config['seed'] == 1 and meta == META and model.config == CONFIG
    shutil.rmtree(out / 'step-00000003')
    tensors, known = states(3)
    checkpoint.save(out, 3, {'model': tensors['model']}, known)
    assert torch.equal(checkpoint.load_model(out, 'latest')[0].bias, tensors['model']['bias'])  # no EMA: the weights themselves


def test_every_reader_takes_the_best_checkpoint_and_before_the_first_evaluation_the_latest(tmp_path, capsys):
    out = new_run(tmp_path, 1)
    assert checkpoint.find_checkpoint(out) == 'step-00000001' and 'no best checkpoint' in capsys.readouterr().err
    checkpoint.save(out, 2, *states(2), keep=9, best=True)
    checkpoint.save(out, 3, *states(3), keep=9)
    assert torch.equal(checkpoint.load_model(out, ema=False)[0].bias, states(2)[0]['model']['bias'])
    assert checkpoint.find_checkpoint(out) == 'step-00000002' and not capsys.readouterr().err
    shutil.rmtree(out / 'step-00000002')
    with pytest.raises(ValueError, match="has no checkpoint 'step-00000002', only .*step-00000003"):
        checkpoint.load_model(out)
    with pytest.raises(ValueError, match='no run in'):
        checkpoint.find_checkpoint(tmp_path / 'nowhere')


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    def folders():
        return [int(p.name[5:]) for p in sorted(tmp_path.glob('step-*'))]
    for step in range(1, 7):
        checkpoint.save(tmp_path, step, *states(step), keep=2, best=step == 2)
    assert folders() == [2, 5, 6]
    assert (tmp_path / 'latest').read_text() == 'step-00000006\n' and (tmp_path / 'best').read_text() == 'step-00000002\n'
    checkpoint.save(tmp_path, 7, *states(7), keep=3, best=True)
    assert folders() == [5, 6, 7] and sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ['best', 'latest']


def test_one_is_kept_beside_the_best_where_one_is_asked_for(tmp_path, capsys):
    for step in range(1, 5):
        folder = checkpoint.save(tmp_path, step, *states(step), keep=1, best=step == 2)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ['step-00000004', 'step-00000002']
    (folder / 'optimizer.safetensors').write_bytes(b'')
    assert checkpoint.newest(tmp_path).name == 'step-00000002' and 'step-00000004 is broken' in capsys.readouterr().err


def test_the_id_for_wandb_is_drawn_once_and_read_again(tmp_path):
    out, data = str(new_run(tmp_path)), tmp_path / 'dataset'
    first = begin(out, data, fresh=True, wandb_project='p')
    assert begin(out, data, wandb_project='p') == first != begin(out, data, fresh=True, wandb_project='p')
    assert begin(out, data) is None


def test_a_step_saved_twice_is_written_once(tmp_path):
    folder = checkpoint.save(tmp_path, 1, *states(1))
    before = os.stat(folder / 'model.safetensors').st_ino
    checkpoint.save(tmp_path, 1, *states(1), best=True)
    assert os.stat(folder / 'model.safetensors').st_ino == before and (tmp_path / 'best').read_text() == folder.name + '\n'


@pytest.mark.parametrize('value', [float('nan'), float('-inf')])
@pytest.mark.parametrize('part, name', [('model', 'bias'), ('ema', 'bias'), ('optimizer', 'exp_avg.bias')])
def test_what_is_not_finite_is_not_saved_and_the_older_ones_stay(tmp_path, part, name, value):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, *states(step), best=step == 1)
    files = sorted(tmp_path.rglob('*'))
    spoiled = states(3)
    spoiled[0][part][name].view(-1)[-1] = value
    with pytest.raises(ValueError, match=f'step-00000003 is not saved: {part}.{name} holds nan or inf'):
        checkpoint.save(tmp_path, 3, *spoiled, best=True)
    assert sorted(tmp_path.rglob('*')) == files and checkpoint.newest(tmp_path).name == 'step-00000002'
    assert (tmp_path / 'best').read_text() == 'step-00000001\n'


def test_config_json_keeps_what_each_resume_replaced(tmp_path, capsys):
    out = new_run(tmp_path)
    for step, seed in ((5, 2), (7, 2), (9, 3)):
        begin(str(out), tmp_path / 'dataset', step=step, seed=seed, betas=(.9, .95))
    config = run_folder.read_config(out)
    assert config['seed'] == 3 and config['resumed_from'] == [{'step': 5, 'seed': 1}, {'step': 9, 'seed': 2}]
    assert capsys.readouterr().out.splitlines() == ['resumed with other knobs: seed 1 -> 2', 'resumed with other knobs: seed 2 -> 3']
    (out / 'config.json').write_text('{')
    begin(str(out), tmp_path / 'dataset', step=10, seed=4)
    assert run_folder.read_config(out)['seed'] == 4 and 'whether knobs have changed is not known' in capsys.readouterr().err


# ---- kills and full disks

@pytest.mark.parametrize('large', ['model', 'optimizer', 'training_state'])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path, large):
    code = """
import test_checkpoint, torch
tensors, known = test_checkpoint.states(1)
checkpoint.save(out, 1, tensors, known)
more = torch.zeros(100_000)
where = known if sys.argv[2] == 'training_state' else tensors[sys.argv[2]]
where['more'] = more.tolist() if sys.argv[2] == 'training_state' else more
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    checkpoint.save(out, 2, tensors, known)
except OSError as error:
    print('error:', error)
print('left:', sorted(os.listdir(out)))
del where['more']
checkpoint.save(out, 3, tensors, known)
"""
    out = tmp_path / 'out'
    done = run_code(code, out, large)
    assert done.returncode == 0 and not done.stderr, done
    for word in ('cannot save step-00000002', 'needs', 'has', f'at {out}'):
        assert word in done.stdout
    assert "left: ['latest', 'step-00000001']" in done.stdout
    assert sorted(p.name for p in out.iterdir()) == ['latest', 'step-00000001', 'step-00000003']
    assert checkpoint.verify(out / 'step-00000001') and checkpoint.newest(out).name == 'step-00000003'


def test_free_space_is_asked_for_before_anything_is_written(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, *states(1))
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(10 ** 9, 10 ** 9, 1000))
    monkeypatch.setattr(checkpoint, 'write_files', None)
    with pytest.raises(OSError, match='needs 1,[0-9,]+ bytes, has 1,000 at'):
        checkpoint.save(tmp_path, 2, *states(2))
    assert checkpoint.newest(tmp_path).name == 'step-00000001'


# ---- broken bytes

@pytest.mark.parametrize('name', ['model.safetensors', 'ema.safetensors', 'optimizer.safetensors', 'rng.safetensors', 'training_state.json'])
@pytest.mark.parametrize('cut', ['half', '100 bytes', 'all', 'gone'])
def test_a_torn_checkpoint_is_named_set_aside_and_passed_over(tmp_path, capsys, name, cut):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, *states(step))
    path = tmp_path / 'step-00000002' / name
    size = path.stat().st_size
    if cut == 'gone':
        path.unlink()
    else:
        os.truncate(path, {'half': size // 2, '100 bytes': size - 100, 'all': 0}[cut])
    assert checkpoint.newest(tmp_path).name == 'step-00000001'
    err = capsys.readouterr().err
    assert err.count('\n') == 1 and 'step-00000002' in err and name in err
    assert name == 'training_state.json' or 'found' in err and f"'bytes': {size}" in err
    assert (tmp_path / 'step-00000002.broken').is_dir() and (tmp_path / 'latest').read_text() == 'step-00000001\n'
    assert checkpoint.newest(tmp_path).name == 'step-00000001' and not capsys.readouterr().err


def test_any_flipped_bit_is_found(tmp_path):
    folder = checkpoint.save(tmp_path, 1, *states(1))
    draw = random.Random(0)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        n = 200 if path.suffix == '.json' else 20
        for position in [0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(n))]:
            broken = bytearray(whole)
            broken[position] ^= 1 << draw.randrange(8)
            path.write_bytes(broken)
            with pytest.raises(ValueError, match=path.name if path.suffix != '.json' else None):
                checkpoint.verify(folder)
        path.write_bytes(whole)
    assert checkpoint.verify(folder)


def test_when_all_are_broken_it_stops_now_and_the_next_time(tmp_path):
    assert checkpoint.newest(tmp_path) is None  # no run here yet
    for step in (1, 2):
        os.truncate(checkpoint.save(tmp_path, step, *states(step)) / 'model.safetensors', 10)
    for _ in range(2):
        done = run_code('with stop_on_error():\n    checkpoint.newest(out)\nprint("started afresh")', tmp_path)
        assert done.returncode == 2 and not done.stdout and 'Traceback' not in done.stderr
        assert done.stderr.splitlines()[-1].startswith('error: ') and 'no whole checkpoint left' in done.stderr
    (tmp_path / 'latest').unlink()
    with pytest.raises(ValueError, match='no whole checkpoint'):  # the broken ones say that there was one
        checkpoint.newest(tmp_path)
    for folder in tmp_path.glob('*.broken'):
        shutil.rmtree(folder)
    (tmp_path / 'latest').write_text('step-00000002\n')
    with pytest.raises(ValueError, match='no whole checkpoint'):  # and so does `latest`
        checkpoint.newest(tmp_path)


# ---- hostile files

class Command:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize('name', ['optimizer.safetensors', 'ema.safetensors'])
def test_a_checkpoint_cannot_run_a_command(tmp_path, name):
    out, ran = new_run(tmp_path, 1), tmp_path / 'ran'
    for write in (lambda path: torch.save(Command(f'touch {ran}'), path),
                  lambda path: path.write_bytes(pickle.dumps(Command(f'touch {ran}')))):
        write(out / 'step-00000001' / name)
        forge(out / 'step-00000001')
        with pytest.raises(ValueError, match=name):
            checkpoint.read_tensors(checkpoint.newest(out) / name)
    assert not ran.exists()


def test_a_lying_checkpoint_is_refused_soon_and_within_little_memory(tmp_path):
    out = new_run(tmp_path, 1)
    lies = [('depth', 3), ('vocab_size', 10 ** 9), ('width', 2 ** 30), ('seq_len', 10 ** 9), ('latent_tokens', 10 ** 9),
            ('latent_dim', 10 ** 12), ('mlp_ratio', 1e300)]
    cases = []
    for i, (key, value) in enumerate(lies):
        shutil.copytree(out, tmp_path / f'lie{i}')
        forge(tmp_path / f'lie{i}' / 'step-00000001', model_config={**asdict(CONFIG), key: value})
        cases.append(tmp_path / f'lie{i}')
    code = """
import time
for path in sys.argv[2:]:
    begin = time.process_time()
    try:
        checkpoint.load_model(path)
        print('loaded', path)
    except Exception as error:
        pass
    if time.process_time() - begin > 5:
        print('slow', path, time.process_time() - begin)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, 'MiB')
"""
    done = run_code(code, out, *cases)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count('\n') == 1 and int(done.stdout.split()[0]) < 1000, [done.stdout, list(enumerate(lies))]


def test_a_lying_header_is_refused(tmp_path):
    out = new_run(tmp_path, 1)
    path = out / 'step-00000001' / 'ema.safetensors'
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], 'little')
    header = json.loads(whole[8:8 + length])
    header['bias']['shape'] = [10 ** 12]
    text = json.dumps(header).encode()
    for content in (len(text).to_bytes(8, 'little') + text + whole[8 + length:], (2 ** 62).to_bytes(8, 'little') + whole[8:], b''):
        path.write_bytes(content)
        forge(out / 'step-00000001')
        with pytest.raises(ValueError, match='ema.safetensors'):
            checkpoint.load_model(out)
    save_file({'bias': torch.zeros(16)}, path)
    forge(out / 'step-00000001')
    with pytest.raises(ValueError, match='ema.safetensors: found another network.*'):
        checkpoint.load_model(out)


@pytest.mark.parametrize('name', ['../run/step-00000001', '/step-00000001', '..', '', 'step-1', 'step-00000009',
                                  'step-00000001/../step-00000001', 'x' * 10 ** 6])
def test_no_name_leads_out_of_the_new_run(tmp_path, name):
    out = new_run(tmp_path, 1)
    (out / 'latest').write_text(name)
    for which in ('latest', name):
        with pytest.raises(ValueError, match='has no checkpoint'):
            checkpoint.load_model(out, which)


@pytest.mark.parametrize('text', ['', '{', '[1]', '[' * 10 ** 5, '\x00'])
def test_a_broken_config_or_meta_names_its_file(tmp_path, text):
    out = new_run(tmp_path, 1)
    for path in (out / 'data' / 'meta.json', out / 'config.json'):
        path.write_text(text)
        with pytest.raises(ValueError, match=path.name):
            checkpoint.load_model(out)
