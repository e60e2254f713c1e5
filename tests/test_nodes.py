""" Many nodes: the rows of a step whatever the number of processes, processes that srun starts, checkpoints of a sharded model. """
import shutil

import pytest
import torch
from safetensors.torch import load_file

from launch import TINY, Job, cut, log, run_each, saved, weights
from runs import checkpoint, distributed, preflight
from runs.export import export
from test_checkpoint import same

ARGS = ['--dropout=0', '--ema_decay=0.9', '--mode=unconditional+l2t+t2l', '--max_iters=8', '--keep=9', '--batch_size=12', '--global_batch=24']
LAST = 'step-00000008'


@pytest.fixture(scope='module')
def runs(dataset, tmp_path_factory):
    """ One run by one process, with the rows of a step at once or in parts, and by four that share its model out. """
    folder = tmp_path_factory.mktemp('nodes')
    for name, ranks, code, *args in (('one', 1, 0), ('whole', 1, 0, '--batch_size=24', '--max_iters=4'),
                                     ('none', 1, 2, '--global_batch=20'), ('four', 4, 0, '--parallel=fsdp')):
        job = Job(dataset, folder / name, *ARGS, *args, ranks=ranks)
        assert job.wait() == [code] * ranks, job.err()
    return folder


def assert_same_losses(a, b, first=1, rel=1e-5):
    a, b = log(a), log(b)
    steps = range(first, 9)
    assert [b[step, False]['loss'] for step in steps] == pytest.approx([a[step, False]['loss'] for step in steps], rel=rel)
    assert b[8, True]['val_text'] == pytest.approx(a[8, True]['val_text'], rel=rel)


# ---- the rows of a step

def test_a_step_has_the_same_rows_on_any_number_of_processes(monkeypatch):
    for world, expected in ((1, (128, 4)), (2, (128, 2)), (4, (128, 1)), (8, (64, 1)), (64, (8, 1))):
        monkeypatch.setattr(preflight, 'world', world)
        assert preflight.share_rows(128, 512) == expected
    assert preflight.share_rows(128, None) == (128, 1)
    for world, n, words in ((3, 512, ['512', '3 processes']), (1024, 512, ['512', '1024 processes']),
                            (2, 384, ['192 rows', 'batch_size=128', '--batch_size=96'])):
        monkeypatch.setattr(preflight, 'world', world)
        with pytest.raises(ValueError) as error:
            preflight.share_rows(128, n)
        assert all(word in str(error.value) for word in words), error


def test_accumulation_equals_the_large_batch(runs):
    one, whole = log(runs / 'one'), log(runs / 'whole')
    assert [one[step, False]['loss'] for step in (1, 2, 3)] == pytest.approx([whole[step, False]['loss'] for step in (1, 2, 3)], rel=1e-5)


def test_how_the_rows_are_shared_is_said_in_one_line(runs):
    assert '24 rows a step: 1 processes x 2 micro-steps x 12 rows' in (runs / 'one.0.out').read_text()
    assert '24 rows a step: 4 processes x 1 micro-steps x 6 rows' in (runs / 'four.0.out').read_text()
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
rank, ranks = (os.environ.pop(name, default) for name, default in (('RANK', '0'), ('WORLD_SIZE', '1')))
os.environ.pop('MASTER_ADDR', None)
os.environ.setdefault('MASTER_PORT', '29500')
os.environ.update(SLURM_JOB_ID='7', SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_STEP_NUM_TASKS=ranks, SLURM_STEP_NODELIST='localhost')
"""


# ---- checkpoints that all ranks write

def test_one_two_and_three_processes_of_srun_go_on_from_the_checkpoint_of_four(dataset, runs, tmp_path):
    moments = saved(runs / 'one' / LAST)['optimizer']
    for ranks, kind in ((1, 'ddp'), (2, 'fsdp'), (3, 'fsdp')):
        out = tmp_path / f'of{ranks}'
        cut(runs / 'four', out, 'step-00000004')
        job = Job(dataset, out, *ARGS, f'--parallel={kind}', ranks=ranks, before=AS_SRUN)
        assert job.wait() == [0] * ranks, job.err()
        assert 'going on from' in job.out() and f'{ranks} x cpu' in job.out(), job.out()
        assert_same_losses(runs / 'four', out, first=5)
        ours = saved(out / LAST)['optimizer']
        assert ours.keys() == moments.keys() and all(torch.allclose(ours[name], value, atol=1e-5) for name, value in moments.items())


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
