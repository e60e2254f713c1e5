"""
A run folder from before 2026-11-23, when some parameters and fields had other names, is loaded, resumed,
sampled and evaluated. The old folder is a fresh one, renamed.
"""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch import run_each, train_each, weights, TINY
from test_checkpoint import forge

SHORT = ['--max_iters=8', '--save_interval=4', '--keep=9']
RUNS = {
    'importance': ['--mode=mixed', '--bag=true', '--importance=hybrid', '--masking=proportional'],
    'clusters': ['--mode=unconditional', '--streams=text', '--text_process=hdlm', '--clusters=16'],
}


def old_name(name):
    """ What a parameter was called then. """
    if name == 'latent_pos_emb':
        return 'slots'
    if name.endswith('.scale_shift_table'):
        return name.removesuffix('.scale_shift_table') + '.table'
    return name


def old_fields(model_config, importance):
    """ The fields of ModelConfig as they were then. """
    fields = dict(model_config)
    fields['clusters'] = fields.pop('extra_ids')
    fields['importance'] = importance
    return fields


def make_old(folder, importance):
    """ Gives a checkpoint its old names. """
    for kind in ('model', 'ema'):
        path = folder / f'{kind}.safetensors'
        tensors = load_file(path)
        save_file({old_name(name): tensor for name, tensor in tensors.items()}, path)

    moments = torch.load(folder / 'optimizer.pt', weights_only=True)
    moments['names'] = [old_name(name) for name in moments['names']]
    torch.save(moments, folder / 'optimizer.pt')

    state = json.loads((folder / 'training_state.json').read_text())
    identity = state['identity']
    identity['model'] = old_fields(identity['model'], importance)
    forge(folder, model_config=old_fields(state['model_config'], importance), identity=identity)


@pytest.fixture(scope='module', params=RUNS)
def runs(request, dataset, tmp_path_factory):
    """ A whole run, its first half under the old names, and the arguments of both. """
    args = RUNS[request.param]
    importance = 'hybrid' if request.param == 'importance' else 'none'
    folder = tmp_path_factory.mktemp('old')
    whole, old = folder / 'whole', folder / 'old'
    train_each(dataset, {whole: [*SHORT, *args]})

    shutil.copytree(whole, old)
    shutil.rmtree(old / 'step-00000008')
    for name in ('latest', 'best'):
        (old / name).write_text('step-00000004\n')
    make_old(old / 'step-00000004', importance)
    return whole, old, args


def test_the_folder_of_this_test_has_the_old_names_and_none_of_today(runs):
    _, old, args = runs
    names = set(load_file(old / 'step-00000004' / 'model.safetensors'))
    text = (old / 'step-00000004' / 'training_state.json').read_text()
    assert any(name.endswith('.table') for name in names)
    assert ('slots' in names) == ('--mode=mixed' in args)
    assert 'cluster_of' in names or 'importance.net.blocks.0.text.table' in names
    assert not any('scale_shift_table' in name or 'latent_pos_emb' in name for name in names)
    assert 'extra_ids' not in text and '"clusters"' in text


def test_an_old_run_is_sampled_and_evaluated_as_it_would_be_under_the_new_names(runs, tmp_path):
    whole, old, _ = runs
    new = tmp_path / 'new'
    shutil.copytree(whole, new)
    shutil.rmtree(new / 'step-00000008')
    for name in ('latest', 'best'):
        (new / name).write_text('step-00000004\n')

    here = ['--device=cpu', '--mode=text', '--num_samples=3', '--steps=6']
    there = ['--device=cpu', '--tasks=nelbo', '--n=6', '--draws=2']
    results = run_each(*(command for out in (old, new) for command in (
        ['sample.py', f'--out_dir={out}', *here], ['evaluate.py', f'--out_dir={out}', *there])))
    assert all(rc == 0 for rc, _, _ in results), results

    def texts(printed):
        return [line for line in printed.splitlines() if line.startswith('  -> ')]
    assert texts(results[0][1]) == texts(results[2][1]) and len(texts(results[0][1])) == 3

    def numbers(out):
        found = json.loads((out / 'results.json').read_text())
        return {key: value for key, value in found.items() if key != 'meta'}
    assert numbers(old) == numbers(new) and numbers(old)


def test_an_old_run_goes_on_to_the_bit(runs, dataset, tmp_path):
    whole, old, args = runs
    out = tmp_path / 'run'
    shutil.copytree(old, out)
    train_each(dataset, {out: [*SHORT, *args]})
    for kind in ('model', 'ema'):
        ours, theirs = weights(out, kind), weights(whole, kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), kind


def test_init_from_begins_with_the_weights_of_an_old_run(runs, dataset, tmp_path):
    _, old, args = runs
    out = tmp_path / 'run'
    start = ['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY, *args, '--max_iters=1',
             f'--init_from={old}', '--learning_rate=1e-12', '--warmup_iters=0']
    (rc, printed, err), = run_each(start)
    assert rc == 0 and 'begins with the best weights' in printed, err
    best = load_file(old / 'step-00000004' / 'ema.safetensors')
    for name, weight in weights(out).items():
        assert torch.allclose(weight, best[old_name(name)], atol=1e-6), name
