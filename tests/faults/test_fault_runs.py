""" Broken checkpoints, full disks, broken data, and what a run may not go on with. """
import os
import shutil

import numpy as np
import pytest

from faulty import assert_same_run, names
from launch import (Job, assert_refused, change_meta, flags_of, flip, forge_file, held, run_each,
                    train_each)
from runs import checkpoint


def test_fault_15_to_17_the_newest_checkpoint_is_broken_and_then_all_are(
        dataset, finished, tmp_path):
    """ In every way that it can be broken: runs/test_checkpoint.py. """
    out = shutil.copytree(finished, tmp_path / 'run')
    flip(out / 'step-00000012/ema.safetensors')
    job = Job(dataset, out).ends()
    assert 'going on from' in job.out()
    assert 'step-00000012 is broken and set aside' in job.err()
    assert_same_run(out, finished)
    for folder in checkpoint.steps(out):
        os.truncate(folder / 'model.safetensors', 100)
    for _ in range(2):                                         # it never begins anew
        job = Job(dataset, out).ends(2)
        assert 'no whole checkpoint left' in job.error()


def test_fault_18_the_disk_is_full(dataset, tmp_path):
    out = tmp_path / 'run'
    train_each(dataset, {out: ['--max_iters=4 --global_batch=16']})
    limit = 'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))'
    job = Job(dataset, out, '--max_iters=40', ranks=2, before=limit).ends(5)
    assert not job.err(1)
    lines = job.err().splitlines()
    assert len(lines) == 3
    for n, line in zip((8, 12, 16), lines):
        assert f'cannot save {out}/step-{n:08d}: ' in line
    assert lines[0].startswith('warning') and lines[2].startswith('error')
    assert not list(out.glob('.*')) and names(out) == [4]
    train_each(dataset, {out: []})                             # room again: it goes on


# ---- broken data

@pytest.mark.parametrize('name', ['train-00000.tokens.bin', 'train-00000.latents.npy',
                                  'val-00000.offsets.npy', 'latent_stats.npz'])
def test_fault_19_a_truncated_dataset(dataset, tmp_path, name):
    data = shutil.copytree(dataset, tmp_path / 'data')
    size = (data / name).stat().st_size
    os.truncate(data / name, size - 8)
    result, = run_each(['train.py', *flags_of(data, tmp_path / 'run', [])])
    assert_refused(result, name, str(size), str(size - 8))
    assert 'parameters' not in result[1], 'before the model is built'


def large_id(folder):
    tokens = np.memmap(folder / 'train-00000.tokens.bin', np.uint16, 'r+')
    tokens[5] = 60_000
    tokens.flush()


def large_vocabulary(folder):
    change_meta(folder, lambda meta: meta['tokenizer'].update(vocab_size=10 ** 9))


def wide_latents(folder):
    change_meta(folder, lambda meta: meta.update(latent_shape=[1, 17]))


@pytest.mark.parametrize('damage, words', [
    (wide_latents, ['1, 17)', '1, 16)']), (large_vocabulary, ['1000000000', 'uint16']),
    (large_id, ['60000', '300'])])
def test_fault_21_data_that_contradicts_its_manifest(dataset, tmp_path, damage, words):
    data = shutil.copytree(dataset, tmp_path / 'data')
    damage(data)
    result, = run_each(['train.py', *flags_of(data, tmp_path / 'run', [])])
    assert_refused(result, *words)


def cut_off(data):
    path = data / 'train-00000.latents.npy'
    os.truncate(path, path.stat().st_size - 8)


def overwritten(data):
    """ As many tokens, and in place. """
    tokens = np.memmap(data / 'train-00000.tokens.bin', np.uint16, 'r+')
    tokens[:] = 0
    tokens.flush()


def moved_away(data):
    os.rename(data, data.with_name('aside'))


@pytest.mark.parametrize('change, ranks, code, saved, words', [
    (cut_off, 1, 2, 4, 'latents.npy: found'),
    (overwritten, 2, 2, 8, 'train-00000.tokens.bin: its sha256 is not'),
    (moved_away, 1, 0, 8, 'were moved away: nobody knows')])
def test_data_that_change_meanwhile_end_the_run_before_or_after_it_is_saved(
        dataset, tmp_path, change, ranks, code, saved, words):
    """ What is moved away is still mapped, and whole. """
    data, go = shutil.copytree(dataset, tmp_path / 'data'), tmp_path / 'go'
    out = tmp_path / 'run'
    job = Job(data, out, '--max_iters=8', ranks=ranks, before=held(5, go))
    job.until('step      5/')
    change(data)
    go.touch()
    job.ends(code)
    assert words in job.err() and (change is not overwritten or 'whole at step 0' in job.error())
    assert names(out)[0] == saved and checkpoint.verify(checkpoint.newest(out))


# ---- another run, model or dataset

def other_texts(dataset, folder, split):
    """ As many, but backwards. """
    shutil.copytree(dataset, folder)
    name = f'{split}-00000.tokens.bin'
    forge_file(folder, name, np.fromfile(folder / name, np.uint16)[::-1].tobytes())
    return f'--dataset={folder}'


def other_encoder(dataset, folder):
    shutil.copytree(dataset, folder)
    change_meta(folder, lambda meta: meta['encoder'].update(revision='sha256:0'))
    return f'--dataset={folder}'


def test_fault_22_resume_with_another_model_or_dataset(dataset, finished, tmp_path):
    train_texts = other_texts(dataset, tmp_path / 'train', 'train')
    val_texts = other_texts(dataset, tmp_path / 'val', 'val')
    cases = [('--width=64', 'width is 32, expected 64'),
             ('--latent_target=x0', "latent_target is 'v', expected 'x0'"),
             ('--optimizer=muon', "optimizer is 'adamw', expected 'muon'"),
             (other_encoder(dataset, tmp_path / 'encoder'), 'encoder revision is '),
             (train_texts, 'sha256 of train is '), (val_texts, 'sha256 of val is ')]
    out = shutil.copytree(finished, tmp_path / 'run')
    for arg, words in cases:
        result, = run_each(['train.py', *flags_of(dataset, out, [arg])])
        assert_refused(result, words)

    # harmless knobs; and other texts can be evaluated, and the weights can go on with them
    train_each(dataset, {
        out: ['--device=auto --max_iters=14 --eval_interval=7 --learning_rate=1e-4'],
        tmp_path / 'tuned': [val_texts, f'--init_from={out}', '--max_iters=2']})
    (code, _, err), = run_each(f'evaluate.py --out_dir={out} {val_texts} --tasks=nelbo --n=8 '
                               '--draws=1 --device=cpu')
    assert code == 0, err
    assert names(out)[0] == 14
