""" Many nodes: the rows of a step whatever the number of processes, processes that srun starts, checkpoints that every rank writes. """
import inspect
import os
import pickle
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch import TINY, cut, fork_ranks, log, run_each, train_ranks, weights, whole
from runs import checkpoint, distributed, preflight
from runs.export import export
from test_checkpoint import Command, forge, same
from test_faults import tell

ARGS = ['--dropout=0', '--ema_decay=0.9', '--mode=unconditional+l2t+t2l', '--max_iters=8', '--keep=9', '--batch_size=12', '--global_batch=24']
FILES = [f'{kind}_rank{rank}.safetensors' for kind in ('ema', 'model', 'optimizer') for rank in range(4)]
LAST = 'step-00000008'


@pytest.fixture(scope='module')
def runs(dataset, tmp_path_factory):
    """ One run by one process, with its rows of a step given in two ways, and by four that share its model out. """
    folder = tmp_path_factory.mktemp('nodes')
    codes = train_ranks(dataset, (folder / 'one', 1, *ARGS), (folder / 'accum', 1, *ARGS[:-1], '--grad_accum=2', '--max_iters=4'),
                        (folder / 'none', 1, *ARGS, '--global_batch=20'), (folder / 'four', 4, *ARGS, '--parallel=fsdp'))
    assert codes == [[0], [0], [2], [0] * 4], (folder / 'four.0.err').read_text()
    return folder


def assert_same_losses(a, b, first=1, rel=1e-5):
    a, b = log(a), log(b)
    steps = range(first, 9)
    assert [b[step, False]['loss'] for step in steps] == pytest.approx([a[step, False]['loss'] for step in steps], rel=rel)
    assert b[8, True]['val_text'] == pytest.approx(a[8, True]['val_text'], rel=rel)


# ---- the rows of a step

def rows(world, monkeypatch, **knobs):
    """ (micro_batch, grad_accum, global_batch) of so many processes. """
    monkeypatch.setattr(preflight, 'world', world)
    run = SimpleNamespace()
    preflight.share_rows(run, SimpleNamespace(**{'batch_size': 128, 'grad_accum': 1, 'global_batch': 512, **knobs}))
    return run.micro_batch, run.grad_accum, run.global_batch


def test_a_step_has_the_same_rows_on_any_number_of_processes(monkeypatch):
    assert [rows(world, monkeypatch) for world in (1, 2, 4, 8, 64)] == [
        (128, 4, 512), (128, 2, 512), (128, 1, 512), (64, 1, 512), (8, 1, 512)]
    assert rows(8, monkeypatch, global_batch=None, grad_accum=4) == (128, 4, 4096), 'as it was'
    for world, knobs, words in ((3, {}, ['512', '3 processes']), (1024, {}, ['512', '1024 processes']),
                                (1, dict(grad_accum=4), ['grad_accum=4', 'leave it at 1']),
                                (2, dict(global_batch=384), ['192 rows', 'batch_size=128', '--batch_size=96'])):
        with pytest.raises(ValueError) as error:
            rows(world, monkeypatch, **knobs)
        assert all(word in str(error.value) for word in words), error


def test_global_batch_equals_accumulation_to_the_bit(runs):
    one, accum = log(runs / 'one'), log(runs / 'accum')
    fields = [name for name in accum[3, False] if name != 'lr']
    assert [one[step, False][name] for step in (1, 2, 3) for name in fields] == [accum[step, False][name] for step in (1, 2, 3) for name in fields]


def test_how_the_rows_are_shared_is_said_in_one_line(runs):
    assert '24 rows a step: 1 processes x 2 micro-steps x 12 rows' in (runs / 'one.0.out').read_text()
    assert '24 rows a step: 4 processes x 1 micro-steps x 6 rows' in (runs / 'four.0.out').read_text()
    assert 'rows a step' not in (runs / 'accum.0.out').read_text()
    err = (runs / 'none.0.err').read_text()
    assert err.count('\n') == 1 and '--batch_size=10' in err and '✓' not in (runs / 'none.0.out').read_text()


def test_four_processes_that_share_the_model_out_equal_one(runs):
    assert_same_losses(runs / 'one', runs / 'four')


# ---- srun

SRUN = dict(SLURM_JOB_ID='123456', SLURM_PROCID='9', SLURM_LOCALID='1', SLURM_NTASKS='16', SLURM_STEP_NUM_TASKS='16',
            SLURM_STEP_NODELIST='gpu[03-06,09],big1', SLURM_JOB_NODELIST='gpu[03-06,09],big1')


@pytest.mark.parametrize('nodes, first', [('gpu[03-06,09],big1', 'gpu03'), ('a1,b2', 'a1'), ('gpu-7', 'gpu-7'), ('n[1,4]', 'n1'),
                                          ('rack[2-3]n[007-009].lan', 'rack2n007.lan')])
def test_a_process_of_srun_finds_its_place(nodes, first):
    found = distributed.from_srun({**SRUN, 'SLURM_STEP_NODELIST': nodes})
    assert found == dict(RANK='9', LOCAL_RANK='1', WORLD_SIZE='16', MASTER_ADDR=first, MASTER_PORT='23456')


def test_a_batch_script_and_other_launchers_are_no_process_of_srun():
    in_a_script = {name: value for name, value in SRUN.items() if 'STEP' not in name}
    assert distributed.from_srun(in_a_script) == {} and distributed.from_srun({}) == {}
    assert distributed.from_srun({**SRUN, 'RANK': '0', 'WORLD_SIZE': '2'}) == {}


def test_with_one_gpu_for_each_task_every_process_takes_the_first(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(checkpoint, 'pick_device', lambda name: name)
    monkeypatch.setattr(distributed, 'local_rank', 3)
    for n_gpus, by_srun, device in ((1, True, 'cuda:0'), (4, True, 'cuda:3'), (4, False, 'cuda:3'), (1, False, None), (2, True, None)):
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: n_gpus)
        monkeypatch.setattr(distributed, 'by_srun', by_srun)
        if device:
            assert preflight.pick_device('auto') == preflight.pick_device('cuda') == device
        else:
            with pytest.raises(SystemExit):
                preflight.pick_device('auto')
            assert f'cuda:3 is asked for, this machine has {n_gpus}' in capsys.readouterr().err


# what srun sets, and a port of the user's choice
AS_SRUN = """
for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR'):
    os.environ.pop(name, None)
os.environ.update(SLURM_JOB_ID='7', SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_STEP_NUM_TASKS=str(job[1]),
                  SLURM_STEP_NODELIST='localhost', MASTER_PORT=str(port))
"""


# ---- checkpoints that all ranks write

def test_every_rank_writes_its_rows_and_nobody_the_whole(runs):
    folder = runs / 'four' / LAST
    assert sorted(path.name for path in folder.glob('*.safetensors')) == FILES
    sizes = [(folder / name).stat().st_size for name in FILES]
    one = sum(path.stat().st_size for path in (runs / 'one' / LAST).iterdir() if 'rng' not in path.name)
    assert max(sizes) < .2 * one and sum(sizes) < 1.1 * one
    for kind in ('model', 'ema'):
        ours, theirs = weights(runs / 'four', kind), weights(runs / 'one', kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs), kind


def test_one_two_and_three_processes_of_srun_go_on_from_the_checkpoint_of_four(dataset, runs, tmp_path):
    jobs = []
    for ranks, kind in ((1, 'ddp'), (2, 'fsdp'), (3, 'fsdp')):
        cut(runs / 'four', tmp_path / f'of{ranks}', 'step-00000004')
        jobs.append((tmp_path / f'of{ranks}', ranks, *ARGS, f'--parallel={kind}'))
    codes = train_ranks(dataset, *jobs, before=AS_SRUN)
    assert codes == [[0], [0] * 2, [0] * 3], [(tmp_path / f'of{n}.0.err').read_text() for n in (1, 2, 3)]
    moments = whole(checkpoint.load(runs / 'one' / LAST))['optimizer']
    for out, ranks, *_ in jobs:
        said = (tmp_path / f'of{ranks}.0.out').read_text()
        assert 'going on from' in said and (f'{ranks} x cpu' in said), said
        assert_same_losses(runs / 'four', out, first=5)
        ours = whole(checkpoint.load(out / LAST))['optimizer']
        assert ours['names'] == moments['names']
        assert all(torch.allclose(ours['states'][0]['state'][i][kind], value, atol=1e-5)
                   for i, of_one in moments['states'][0]['state'].items() for kind, value in of_one.items())
        assert (out / LAST / 'model.safetensors').exists() == (ranks == 1)


def test_a_sharded_run_is_sampled_evaluated_and_made_one_file(dataset, runs, tmp_path):
    out = shutil.copytree(runs / 'four', tmp_path / 'run')
    results = run_each(['sample.py', f'--out_dir={out}', '--text=a red dog', '--steps=2', '--latent_steps=2', '--device=cpu'],
                       ['evaluate.py', f'--out_dir={out}', '--tasks=nelbo', '--n=8', '--draws=1', '--device=cpu'],
                       ['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/tuned', *TINY, '--mode=unconditional+l2t+t2l', '--max_iters=1',
                        f'--init_from={out}'])
    assert all(rc == 0 for rc, _, _ in results), results
    export(out, tmp_path / 'given', LAST)
    assert [path.name for path in (tmp_path / 'given' / LAST).glob('*.safetensors')] == ['model.safetensors']
    assert same(load_file(tmp_path / 'given' / LAST / 'model.safetensors'), weights(out, 'ema'))


def test_a_flipped_byte_in_any_file_of_any_rank_is_found_and_the_older_checkpoint_used(runs, tmp_path, capsys):
    draw = random.Random(0)
    for name in FILES:
        out = tmp_path / name
        cut(runs / 'four', out, 'step-00000004')
        folder = shutil.copytree(runs / 'four' / LAST, out / LAST)
        content = bytearray((folder / name).read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (folder / name).write_bytes(content)
        assert checkpoint.newest(out).name == 'step-00000004'
        err = capsys.readouterr().err
        assert err.count('\n') == 1 and f'{LAST} is broken and set aside' in err and name in err
        (out / f'{LAST}.broken' / name).unlink()
        with pytest.raises(ValueError, match=f'{name}: found no file'):
            checkpoint.verify(out / f'{LAST}.broken')


def damaged(runs, out, change):
    """ A run whose newest checkpoint is changed, with digests that fit. """
    cut(runs / 'four', out, LAST)
    change(out / LAST)
    files = {p.name: checkpoint.describe(p) for p in (out / LAST).iterdir() if p.suffix != '.json'}
    forge(out / LAST, files=files)
    return out


def test_no_file_of_a_rank_runs_a_command(runs, tmp_path):
    ran = tmp_path / 'ran'
    for name in FILES[::4]:
        for i, write in enumerate((lambda path: torch.save(Command(f'touch {ran}'), path),
                                   lambda path: path.write_bytes(pickle.dumps(Command(f'touch {ran}'))))):
            out = damaged(runs, tmp_path / f'{name}{i}', lambda folder: write(folder / name))
            with pytest.raises(ValueError, match=f'cannot read .*{name}'):
                checkpoint.load(checkpoint.newest(out))
    assert not ran.exists()


def test_files_of_ranks_that_do_not_fit_together_are_refused_in_one_line(dataset, runs, tmp_path):
    def less_rows(folder):
        state = load_file(folder / 'ema_rank3.safetensors')
        save_file({name: t[:-1] if name == 'bias' else t for name, t in state.items()}, folder / 'ema_rank3.safetensors')

    def wider_rows(folder):
        state = load_file(folder / 'ema_rank2.safetensors')
        save_file({name: torch.cat((t, t), 1) if t.ndim == 2 else t for name, t in state.items()}, folder / 'ema_rank2.safetensors')

    def one_is_missing(folder):
        (folder / 'ema_rank1.safetensors').unlink()

    def without_moments(folder):
        state = load_file(folder / 'optimizer_rank0.safetensors')
        save_file({name: t for name, t in state.items() if not name.endswith('.step')}, folder / 'optimizer_rank0.safetensors')

    def other_moments(folder):
        state = load_file(folder / 'optimizer_rank1.safetensors')
        save_file({f'x{name}': t for name, t in state.items()}, folder / 'optimizer_rank1.safetensors')

    commands, expected = [], []
    for change, words in ((less_rows, 'found bias'), (wider_rows, 'in a file before it'), (one_is_missing, 'but not ema_rank1'),
                          (without_moments, 'expected exp_avg, exp_avg_sq, step'), (other_moments, 'no moment has the name')):
        out = damaged(runs, tmp_path / change.__name__, change)
        sample = ['sample.py', f'--out_dir={out}', '--text=a red dog', f'--which={LAST}', '--device=cpu']
        train = ['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY, *ARGS, '--max_iters=9']
        commands.append(sample if 'moments' not in words and 'exp_avg' not in words and 'no moment' not in words else train)
        expected.append(words)
    for words, (rc, _, err) in zip(expected, run_each(*commands)):
        assert rc == 2 and err.count('\n') == 1 and words in err, (words, err)


# ---- killed while saving

def tensors(step):
    """ What a rank of the next test saves: rows that only some ranks have, a table, a count. """
    generator = torch.Generator().manual_seed(step)
    model = {name: torch.randn(shape, generator=generator) for name, shape in (('w', (7, 4)), ('b', (3,)), ('one', (1, 5)))}
    moments = {i: {'exp_avg': value * 2, 'step': torch.tensor(float(step))} for i, value in enumerate(model.values())}
    return {**model, 'table': torch.arange(step)}, {**model, 'table': torch.arange(step)}, {'names': list(model), 'states': [{'state': moments}]}


SAVE_FOR_EVER = """
import resource
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from runs import checkpoint, meeting
meeting.join('cpu', 60)
mesh = init_device_mesh('cpu', (job[1],))
def share(value):
    if isinstance(value, dict):
        return {key: v if key in ('table', 'step') else share(v) for key, v in value.items()}
    if isinstance(value, list):
        return [v if isinstance(v, str) else share(v) for v in value]
    return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
for step in range(1, 10 ** 6):
    model, ema, optimizer = tensors(step)
    optimizer = {'names': optimizer['names'], 'states': share(optimizer['states'])}
    _, error = checkpoint.save_sharded(job[0], step, share(model), share(ema), optimizer, {'model_config': {}}, [{}] * job[1])
    assert not error, error
    if step == 1:
        # no room for one rank is an error on all, and leaves nothing
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == job[2]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
        _, error = checkpoint.save_sharded(job[0], 2, share(model), None, optimizer, {'model_config': {}}, [{}] * job[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert isinstance(error, OSError) and 'cannot save step-00000002: needs ' in str(error), error
        assert sorted(os.listdir(job[0])) == ['latest', 'step-00000001'], os.listdir(job[0])
        dist.barrier()
        if rank == job[2]:
            tell(pipe[1])
"""
KILL = inspect.getsource(tensors) + inspect.getsource(tell) + """
import select
pipe = os.pipe()
def after_fork(job, pids):
    for _ in range(job[3]):
        assert select.select([pipe[0]], [], [], 150)[0], 'both ended by themselves'
        assert os.read(pipe[0], 1)
    os.kill(pids[job[2]], 9)
    # first dead, then empty: what it wrote last must not count for the next job
    os.waitid(os.P_PID, pids[job[2]], os.WEXITED | os.WNOWAIT)
    while select.select([pipe[0]], [], [], 0)[0]:
        os.read(pipe[0], 65536)
"""


def test_a_rank_that_has_no_room_or_is_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    draw = random.Random(0)
    jobs = [(str(tmp_path / f'run{i}'), 2, i % 2, draw.randrange(1, 30)) for i in range(8)]
    codes = fork_ranks(KILL, SAVE_FOR_EVER, *jobs)
    torn, found = 0, set()
    for (out, _, victim, _), of_ranks in zip(jobs, codes):
        assert of_ranks[victim] == -9 and of_ranks[1 - victim] == 4, 'the other one leaves'
        out = tmp_path / os.path.basename(out)
        known = int((out / 'latest').read_text()[5:])
        torn += bool(list(out.glob('*.tmp')))
        loaded = whole(checkpoint.load(checkpoint.newest(out)))
        step = loaded['training_state']['step']
        model, ema, optimizer = tensors(step)
        assert step in (known, known + 1) and not list(out.glob('*.broken*'))
        assert all(torch.equal(loaded['model'][k], v) for k, v in model.items())
        assert all(torch.equal(loaded['ema'][k], v) for k, v in ema.items())
        for i, moments in optimizer['states'][0]['state'].items():
            assert all(torch.equal(loaded['optimizer']['states'][0]['state'][i][k], v) for k, v in moments.items())
        found.add(step)
        checkpoint.save(out, 10 ** 6, *tensors(5), {'model_config': {}}, [{}])
        assert not list(out.glob('*.tmp')), 'the next save clears away what was left'
    assert torn > 1 and len(found) > 1, (torn, found)
