""" Run folders: what is written comes back to the bit, and what is broken is noticed. """
import os
import random
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from base import files
from base.writing import sealed
from launch import same
from model import Model, ModelConfig
from runs import checkpoint
from toys import CONFIG, KNOBS, META, new_run, save_each, states

FILES = [*(f'{kind}.safetensors' for kind in ('model', 'ema', 'optimizer', 'rng')),
         'training_state.json']


def names(out):
    return sorted(path.name for path in out.iterdir())


# ---- what is written is what is read

def test_everything_saved_comes_back_to_the_bit(tmp_path):
    tensors, known = states(2)
    folder = checkpoint.newest(save_each(tmp_path, 1, 2))
    found = checkpoint.verify(folder)
    assert found['step'] == 2 and found['history'] == known['history']
    assert checkpoint.config_of(found['identity'], folder) == CONFIG
    for kind, state in tensors.items():
        assert same(checkpoint.read_tensors(folder / f'{kind}.safetensors'), state)


def test_load_model_takes_the_weights_of_the_checkpoint_asked_for(tmp_path):
    out = new_run(tmp_path, 1, 2, 3, best=[2])
    for which, step in (('latest', 3), ('best', 2), ('step-00000001', 1)):
        model, knobs, meta, _ = checkpoint.load_model(out, which)
        assert same(model.state_dict(), states(step)[0]['ema'])
        assert not model.training and (knobs, meta, model.config) == (KNOBS, META, CONFIG)

    # without averages: the weights themselves
    shutil.rmtree(out / 'step-00000003')
    tensors, known = states(3)
    checkpoint.write_checkpoint(out, 3, {'model': tensors['model']}, known)
    assert same(checkpoint.load_model(out, 'latest')[0].state_dict(), tensors['model'])


def test_readers_take_the_best_checkpoint_and_before_the_first_evaluation_the_latest(tmp_path):
    out = save_each(tmp_path, 1)
    assert checkpoint.find_checkpoint(out) == 'step-00000001'
    assert checkpoint.find_checkpoint(out, 'latest') == 'step-00000001'
    save_each(out, 2, 3, best=[2])
    assert checkpoint.find_checkpoint(out) == 'step-00000002'
    shutil.rmtree(out / 'step-00000002')
    with pytest.raises(ValueError, match="no checkpoint 'step-00000002', only .*step-00000003"):
        checkpoint.find_checkpoint(out)
    os.truncate(out / 'best', 2**28)                         # of which no byte is on the disk
    tracemalloc.start()
    with pytest.raises(ValueError, match='no checkpoint'):
        checkpoint.find_checkpoint(out)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    with pytest.raises(ValueError, match='no run in .*nowhere: train it'):
        checkpoint.find_checkpoint(tmp_path / 'nowhere')


@pytest.mark.parametrize('keep, best, kept', [
    (2, [2], '2 5 6'), (3, [6], '4 5 6'), (1, [2], '2 6')])
def test_the_last_ones_and_the_best_are_kept(tmp_path, keep, best, kept):
    save_each(tmp_path, *range(1, 7), keep=keep, best=best)
    folders = [f'step-{int(step):08d}' for step in kept.split()]
    assert names(tmp_path) == ['best', *folders]
    assert (tmp_path / 'best').read_text() == f'step-{best[0]:08d}\n'


@pytest.mark.parametrize('kind, name', [('ema', 'bias'), ('optimizer', 'exp_avg.bias')])
def test_averages_and_moments_that_are_not_finite_are_not_saved(tmp_path, kind, name):
    tensors, known = states(3)
    tensors[kind][name].view(-1)[-1] = torch.inf
    with pytest.raises(ValueError, match=f'{kind}.{name} holds nan or inf'):
        checkpoint.write_checkpoint(tmp_path, 3, tensors, known)
    assert not names(tmp_path)


# ---- broken bytes

@pytest.mark.parametrize('name', FILES)
@pytest.mark.parametrize('cut', ['half', 'all', 'gone'])
def test_a_torn_checkpoint_is_named_set_aside_and_passed_over(tmp_path, capsys, name, cut):
    path = save_each(tmp_path, 1, 2) / 'step-00000002' / name
    size = path.stat().st_size
    if cut == 'gone':
        path.unlink()
    else:
        os.truncate(path, size // 2 if cut == 'half' else 0)
    assert checkpoint.newest(tmp_path).name == 'step-00000001'
    err = capsys.readouterr().err
    assert err.count('\n') == 1 and 'step-00000002' in err and name in err
    assert name == 'training_state.json' or cut == 'gone' or f'expected {size}' in err
    assert names(tmp_path) == ['step-00000001', 'step-00000002.broken']
    assert checkpoint.newest(tmp_path).name == 'step-00000001' and not capsys.readouterr().err


def test_any_flipped_bit_is_found(tmp_path):
    folder = save_each(tmp_path, 1) / 'step-00000001'
    draw = random.Random(0)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        n = 100 if path.suffix == '.json' else 10
        for position in [0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(n))]:
            broken = bytearray(whole)
            broken[position] ^= 1 << draw.randrange(8)
            path.write_bytes(broken)
            with pytest.raises(ValueError):
                checkpoint.verify(folder)
        path.write_bytes(whole)
    assert checkpoint.verify(folder)


def test_a_pointer_in_the_place_of_weights_is_named_as_such(tmp_path):
    """ As a copy by git has without git lfs. """
    out = new_run(tmp_path, 1)
    path = out / 'step-00000001/ema.safetensors'
    path.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12345\n')
    for read in (lambda: checkpoint.load_model(out), lambda: checkpoint.read_tensors(path)):
        with pytest.raises(ValueError, match='ema.safetensors: .*a Git LFS pointer'):
            read()


def test_a_folder_under_another_steps_number_is_broken(tmp_path, capsys):
    """ Two that were exchanged: the last steps would never be saved again. """
    save_each(tmp_path, 1, 2, 3)
    os.rename(tmp_path / 'step-00000002', tmp_path / 'aside')
    os.rename(tmp_path / 'step-00000003', tmp_path / 'step-00000002')
    os.rename(tmp_path / 'aside', tmp_path / 'step-00000003')
    assert checkpoint.newest(tmp_path).name == 'step-00000001'
    assert 'training_state.json is of step 2' in capsys.readouterr().err


@pytest.mark.parametrize('failure', [PermissionError(13, 'no'), OSError(5, 'no'), MemoryError()])
@pytest.mark.parametrize('where, function', [(files, 'sha256'), (Path, 'read_bytes')])
def test_a_checkpoint_that_cannot_be_read_now_is_not_set_aside(tmp_path, monkeypatch, failure,
                                                               where, function):
    def cannot(*args):
        raise failure
    save_each(tmp_path, 1, 2)
    monkeypatch.setattr(where, function, cannot)
    with pytest.raises(type(failure)):
        checkpoint.newest(tmp_path)
    assert names(tmp_path) == ['step-00000001', 'step-00000002']


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path):
    with pytest.raises(OSError, match='cannot save'):
        checkpoint.write_checkpoint(tmp_path / 'gone', 1, *states(1))
    assert not (tmp_path / 'gone').exists()


def test_a_reader_beside_a_training_takes_the_next_checkpoint_where_one_is_removed(tmp_path,
                                                                                  monkeypatch):
    out, read = new_run(tmp_path, 1, best=[1]), checkpoint.read_tensors

    def while_it_trains(path):
        if '00000001' in str(path):
            checkpoint.write_checkpoint(out, 2, *states(2), keep=1, best=True)
        return read(path)
    monkeypatch.setattr(checkpoint, 'read_tensors', while_it_trains)
    model, *_, name = checkpoint.load_model(out)
    assert name == 'step-00000002' and same(model.state_dict(), states(2)[0]['ema'])

    # and of a checkpoint only what it reads
    (out / name / 'optimizer.safetensors').unlink()
    assert checkpoint.load_model(out)[-1] == name


@pytest.mark.parametrize('target', ['/nowhere', 'step-00000099'])
def test_a_link_to_nowhere_or_to_itself_is_no_checkpoint(tmp_path, target):
    out = new_run(tmp_path, 1)
    (out / 'step-00000099').symlink_to(target)
    assert checkpoint.load_model(out, 'latest')[-1] == 'step-00000001'
    (out / 'best').write_text('step-00000099')
    with pytest.raises(ValueError, match="no checkpoint 'step-00000099', only .*step-00000001"):
        checkpoint.load_model(out)


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    out = new_run(tmp_path, 1)
    other = {**META, 'tokenizer': {**META['tokenizer'], 'vocab_size': 300}}
    (out / 'data/meta.json').write_text(sealed(other))
    with pytest.raises(ValueError, match='data: tokenizer vocab_size is 300, expected 258'):
        checkpoint.load_model(out)


def test_a_small_network_of_long_texts_is_read():
    """ Its tables of positions are as wide as a head, and need 67 MB at most. """
    config = ModelConfig(vocab_size=9, seq_len=2 ** 16, width=512, heads=8, depth=1,
                         streams=('text',))
    checkpoint.check_network('model.safetensors', config, Model(config).state_dict())
    with pytest.raises(ValueError, match='more memory'):
        checkpoint.check_network('model.safetensors', replace(config, seq_len=2 ** 30),
                                 Model(config).state_dict())
