""" train.py as a process: it runs, it logs what it did, it freezes what it should, it refuses what is wrong. """
import ast
import json
import math
import os
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from configurator import run_config
from corpora.statistics import lengths
from data import PackedDataset
from diffusion import GaussianLatents, MaskedText
from model import Model, ModelConfig
from loss import BatchMaker, statistics
from runs.machine import pick_dtype
from sampling.loading import load_run
from runs.log import summary
from runs.preflight import flops_of
from runs.resume import jumps_of_rate
from runs.stages import lr_factor, read_schedule, read_stages
from launch import ROOT, TINY, Job, cut, log, measured, run, run_code, run_each, train, train_each, weights
from runs.results import find, read_results
from samplers import SAMPLERS


def test_a_run_folder_without_a_checkpoint_takes_the_data_of_now(dataset, tmp_path):
    out = tmp_path / 'run'
    (out / 'data').mkdir(parents=True)
    (out / 'data' / 'tokenizer.json').write_text('of an earlier attempt')
    assert train(dataset, out, '--max_iters=2').returncode == 0
    assert (out / 'data' / 'tokenizer.json').read_bytes() == (dataset / 'tokenizer.json').read_bytes()


def test_accumulation_equals_the_large_batch(dataset, tmp_path):
    train_each(dataset, {tmp_path / 'a': ['--dropout=0'], tmp_path / 'b': ['--dropout=0', '--batch_size=4', '--global_batch=8']})
    a, b = log(tmp_path / 'a'), log(tmp_path / 'b')
    for key in a:
        if not key[1]:
            assert a[key]['loss'] == pytest.approx(b[key]['loss'], rel=1e-4)


def test_the_run_folder_holds_what_the_design_says(dataset, finished):
    names = {p.name for p in finished.iterdir()}
    assert {'config.json', 'data', 'training_log.jsonl', 'latest', 'best', 'step-00000012'} <= names
    assert {p.name for p in (finished / 'step-00000012').iterdir()} == {
        'model.safetensors', 'ema.safetensors', 'optimizer.safetensors', 'training_state.json', 'rng.safetensors'}
    assert {p.name for p in (finished / 'data').iterdir()} == {'meta.json', 'tokenizer.json', 'latent_stats.npz', 'encoder.npz'}
    entry = next(e for e in map(json.loads, open(finished / 'training_log.jsonl')) if 'loss' in e)
    assert set(entry) >= {'step', 'epoch', 'tokens', 'loss', 'text_loss', 'text_accuracy', 'lr', 'grad_norm', 'tokens_per_s', 'skipped',
                          'modes', 'text_nll_by_t'}


def test_ema_is_the_average_of_the_weights_after_each_step(dataset, tmp_path):
    """ With decay .5 and its warm-up min(.5, (1 + n) / (10 + n)), recomputed from the checkpoints of every step. """
    out = tmp_path / 'run'
    assert train(dataset, out, '--eval_interval=1', '--keep=20', '--ema_decay=0.5').returncode == 0
    ema = None
    for n in range(1, 13):
        now = load_file(out / f'step-{n:08d}' / 'model.safetensors')
        saved = load_file(out / f'step-{n:08d}' / 'ema.safetensors')
        if ema is not None:
            d = min(.5, (1 + n) / (10 + n))
            for name in now:
                ema[name] = d * ema[name] + (1 - d) * now[name]
                assert torch.allclose(ema[name], saved[name], atol=1e-6), (n, name)
        ema = saved


@pytest.mark.parametrize('args, words', [
    (['--dataset=nowhere'], ['data/nowhere', 'prepare.py']),
    (['--bach_size=3'], ['bach_size', 'batch_size']),
    (['--dtype=float16'], ['float16', 'bfloat16 | float32']),
    (['--mode=l3t'], ['l3t', 'l2t']),
    (['--heads=3'], ['heads=3']),
    (['--heads=0'], ['heads', '[1, 256]']),
    (['--seq_len=abc'], ['abc']),
    (['--device=gpu'], ['gpu']),
    (['--betas=0.9'], ['betas']),
    (['--optimizer=muon', '--muon_lr=abc'], ['abc']),
    (['--mode=l2t,t2l:3'], ["mode='l2t,t2l:3'", 'MODE:STEPS']),
    (['--mode=l2t:x,t2l'], ["'l2t:x,t2l'", 'MODE:STEPS']),
    (['--mode=l2t:50,t2l'], ['max_iters=12']),
    (['--length_schedule=8:5,33'], ['length_schedule', '33', '32']),
    (['--length_schedule=8:12,32'], ['length_schedule', "before '32' add up to 12", 'max_iters=12']),
    (['--length_schedule=8:5'], ['length_schedule', 'LENGTH:STEPS']),
    (['--length_schedule=8:100%,32'], ['length_schedule', 'max_iters=12']),
    (['--length_schedule=8:1.5%,32'], ['length_schedule', "'8:1.5%,32'"]),
    (['--length_schedule=8:00,32'], ['length_schedule', '8:00']),
    (['--seq_len=5'], ['seq_len 5']),
    (['--text_schedule=linear'], ['linear', 'loglinear']),
])
def test_bad_knobs_end_in_one_line_and_code_2(dataset, tmp_path, args, words):
    result = train(dataset, tmp_path / 'run', *args)
    assert result.returncode == 2 and result.stderr.count('\n') == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize('device, mkldnn, machine, expected', [
    ('cpu', True, {'amx_bf16': True}, 'bfloat16'), ('cpu', True, {'avx512_bf16': True, 'amx_bf16': False}, 'bfloat16'),
    ('cpu', True, {'bf16': True}, 'bfloat16'), ('cpu', True, {'avx2': True, 'avx512_f': True, 'avx512_bf16': False}, 'float32'),
    ('cpu', False, {'bf16': True}, 'float32'), ('cpu', True, None, 'float32'),
    ('cuda:0', True, {'cuda:0': (8, 0), 'cuda:1': (7, 5)}, 'bfloat16'), ('cuda:1', True, {'cuda:0': (8, 0), 'cuda:1': (7, 5)}, 'float32')])
def test_the_numbers_are_those_whose_products_the_machine_has_instructions_for(monkeypatch, device, mkldnn, machine, expected):
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: mkldnn)
    if device != 'cpu':
        monkeypatch.setattr(torch.cuda, 'get_device_capability', machine.get)
    elif machine is None:                                  # an older torch
        monkeypatch.delattr(torch.cpu, 'get_capabilities', raising=False)
    else:
        monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: machine, raising=False)
    assert pick_dtype('auto', device) == expected
    assert pick_dtype('bfloat16', device) == 'bfloat16' and pick_dtype('float32', device) == 'float32'
    with pytest.raises(ValueError, match="'float16'"):
        pick_dtype('float16', device)


def test_every_product_of_a_training_is_of_these_numbers(dataset, tmp_path, monkeypatch):
    """ Forward, backward and Muon's; config.json, the line before the first step, and sampling say the same. A machine that
    would have to emulate what it is asked for warns. """
    watch = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
capable = %r
torch.cpu.get_capabilities = lambda: {'avx512_bf16': capable}
torch.backends.mkldnn.is_available = lambda: True
products = set()
class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ('mm', 'bmm', 'addmm', 'baddbmm') and found.device.type != 'meta':
            products.add((function.overloadpacket.__name__, str(found.dtype)))
        return found
Watched().__enter__()
"""
    for capable, asked, expected in ((True, 'auto', 'bfloat16'), (False, 'auto', 'float32'), (False, 'bfloat16', 'bfloat16')):
        out = tmp_path / f'{capable} {asked}'
        job = Job(dataset, out, '--optimizer=muon', '--max_iters=2', '--eval_interval=9', f'--dtype={asked}',
                  before=watch % capable, after="print('PRODUCTS', sorted(products))")
        assert job.wait() == [0], job.err()
        words = job.out()
        assert f'1 x cpu, {expected}, ' in words
        kinds = ast.literal_eval(words.split('PRODUCTS')[1].strip())
        assert {('mm', f'torch.{expected}'), ('bmm', f'torch.{expected}')} <= set(kinds)
        assert {dtype for _, dtype in kinds} == {f'torch.{expected}'}, kinds
        assert ('has no bfloat16 instructions' in words) == (asked != 'auto') and json.load(open(out / 'config.json'))['dtype'] == expected

        # sampling asks its own machine
        monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {'avx512_bf16': capable}, raising=False)
        monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: True)
        loaded = load_run(str(out), device='cpu')
        assert loaded.dtype == ('bfloat16' if capable else 'float32')
        assert {str(loaded.model.embed.weight.dtype), str(loaded.model.blocks[0].text.up.weight.dtype)} == {f'torch.{loaded.dtype}'}


MODES = [['--mode=t2l'], ['--mode=unconditional', '--latent_schedule=rf', '--latent_target=flow'],
         ['--mode=unconditional+l2t+t2l', '--latent_target=x0', '--text_schedule=cosine'],
         ['--mode=unconditional+l2t+t2l', '--latent_target=eps'],
         ['--mode=unconditional', '--streams=text'], ['--mode=unconditional', '--streams=latent'],
         ['--dtype=bfloat16', '--ema_decay=0']]


def test_every_mode_trains_three_steps(dataset, tmp_path):
    runs = {tmp_path / str(i): ['--max_iters=3', '--eval_interval=1', '--keep=3', *args] for i, args in enumerate(MODES)}
    train_each(dataset, runs)
    for out, args in runs.items():
        assert log(out)[3, False]['skipped'] == 0 and all(torch.isfinite(w).all() for w in weights(out).values()), args
        first = load_file(out / 'step-00000001' / 'model.safetensors')
        assert any(not torch.equal(w, first[k]) for k, w in weights(out).items()), ('nothing moved', args)


def moved(out, first=1):
    """ Names of the weights that changed between a run's first and its latest checkpoint. """
    before, after = load_file(out / f'step-{first:08d}' / 'model.safetensors'), weights(out)
    return {name for name in after if not torch.equal(before[name], after[name])}


@pytest.fixture(scope='session')
def joint(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'joint'
    result = train(dataset, out, '--mode=unconditional+l2t+t2l', '--max_iters=30', '--learning_rate=1e-2')
    assert result.returncode == 0, result.stderr
    return out


def best_average(out):
    return load_file(out / (out / 'best').read_text().strip() / 'ema.safetensors')


@pytest.mark.parametrize('mode, ends, last', [('l2t', ('latent_in.', 'latent_pos_emb', 'latent_head.', 'bag_', 'shortcut_in.'), 'latent'),
                                              ('t2l', ('embed.', 'text_head.', 'shortcut_out.'), 'text')])
def test_freezing_a_modality_keeps_exactly_its_encoder_and_head_and_what_no_loss_reaches(dataset, joint, tmp_path, mode, ends, last):
    out = tmp_path / 'run'
    args = [f'--mode={mode}', '--freeze=modality', f'--init_from={joint}', '--eval_interval=1', '--keep=20',
            '--weight_decay=1', '--optimizer=muon', '--dropout=0']
    result = train(dataset, out, *args)
    assert result.returncode == 0 and 'warning' not in result.stdout, result.stderr
    still = {name for name in weights(out) if name.startswith(ends)
             or name.startswith(tuple(f'blocks.1.{last}.{part}' for part in ('out.', 'up.', 'down.', 'q_gain')))}
    assert moved(out) == set(weights(out)) - still
    start, now = best_average(joint), weights(out)                       # not in the first step either
    assert all(torch.equal(start[name], now[name]) for name in still)
    assert 'begins with the best weights' in result.stdout


def test_freezing_a_random_modality_warns_and_joint_modes_refuse_it(dataset, tmp_path):
    result = train(dataset, tmp_path / 'a', '--freeze=modality', '--max_iters=1')
    assert result.returncode == 0 and 'warning: freeze=modality without init_from' in result.stdout
    result = train(dataset, tmp_path / 'b', '--freeze=modality', '--mode=unconditional+l2t+t2l')
    assert result.returncode == 2 and 'freeze=modality' in result.stderr and result.stderr.count('\n') == 1


def test_init_from_begins_where_the_other_run_was_best_and_refuses_another_model(dataset, joint, tmp_path):
    result = train(dataset, tmp_path / 'run', f'--init_from={joint}', '--mode=unconditional+l2t+t2l', '--max_iters=1',
                   '--learning_rate=1e-12')
    assert result.returncode == 0, result.stderr
    best = best_average(joint)
    for name, w in weights(tmp_path / 'run').items():
        assert torch.allclose(w, best[name], atol=1e-6)
    result = train(dataset, tmp_path / 'other', f'--init_from={joint}', '--width=64')
    assert result.returncode == 2 and 'width' in result.stderr and result.stderr.count('\n') == 1
    result = train(dataset, tmp_path / 'none', f'--init_from={tmp_path}/nowhere')
    assert result.returncode == 2 and 'nowhere' in result.stderr and result.stderr.count('\n') == 1


def test_a_training_on_other_texts_begins_with_these_weights_if_they_were_prepared_like_the_first(dataset, finished, tmp_path):
    lines = tmp_path / 'lines.txt'
    verbs, places = 'sits sings sleeps eats hops'.split(), 'tree house pond fence garden'.split()
    lines.write_text('\n'.join(f'a green bird {verb} near the {place} number {i}' for verb in verbs for place in places for i in range(4)))
    made = [run('prepare.py', f'--input={lines}', '--val_fraction=.1', f'--out={tmp_path}/{name}', *knobs) for name, knobs in (
        ('like', [f'--same_as={dataset}']), ('other', ['--encoder=lsa', '--encoder_dims=4', '--vocab_size=300', '--max_tokens=31']))]
    assert [done.returncode for done in made] == [0, 0], made
    before = weights(finished, 'ema')
    knobs = [f'--init_from={finished}', '--max_iters=1', '--learning_rate=1e-12', '--warmup_iters=0', '--ema_decay=0']
    result = train(tmp_path / 'like', tmp_path / 'run', *knobs)
    assert result.returncode == 0, result.stderr
    after = weights(tmp_path / 'run')
    assert all(torch.allclose(after[name], x, atol=1e-9) for name, x in before.items())
    result = train(tmp_path / 'other', tmp_path / 'no', *knobs)
    assert result.returncode == 2 and 'was trained with' in result.stderr


def test_a_mode_schedule_trains_its_modes_in_turn_and_resumes_bitwise(dataset, tmp_path):
    schedule = ['--mode=t2l:4,l2t:5,unconditional+l2t+t2l', '--eval_interval=1', '--keep=20', '--weight_decay=1', '--dropout=0']
    result = train(dataset, tmp_path / 'whole', *schedule)
    assert result.returncode == 0, result.stderr
    entries = log(tmp_path / 'whole')
    for step, mode in ((4, 't2l'), (5, 'l2t'), (9, 'l2t')):
        entry = entries[step, False]
        assert entry['modes'][mode] == 1 and ('text_loss' in entry) == (mode == 'l2t') and ('latent_loss' in entry) == (mode == 't2l')
    assert all(entries[10, False]['modes'][mode] > 0 for mode in ('unconditional', 'l2t', 't2l')) and {'text_loss', 'latent_loss'} <= entries[10, False].keys()

    def moved_between(a, b):
        a, b = (load_file(tmp_path / 'whole' / f'step-{n:08d}' / 'model.safetensors') for n in (a, b))
        return {name for name in a if not torch.equal(a[name], b[name])}
    assert not any(name.startswith('text_head') for name in moved_between(1, 4))
    assert not any(name.startswith('latent_head') for name in moved_between(4, 9)), 'momentum or decay moved what has no loss'
    assert any(name.startswith('text_head') for name in moved_between(4, 9))
    assert moved_between(9, 12) == set(weights(tmp_path / 'whole'))
    cut(tmp_path / 'whole', tmp_path / 'cut', 'step-00000006')          # killed in the second stage
    assert train(dataset, tmp_path / 'cut', *schedule).returncode == 0
    assert all(torch.equal(a, b) for a, b in zip(weights(tmp_path / 'cut').values(), weights(tmp_path / 'whole').values()))


def test_a_share_of_the_run_in_a_schedule_is_that_of_its_steps_whatever_their_number():
    def firsts(schedule, max_iters):
        return read_schedule('mode', schedule, 'MODE', max_iters)
    assert firsts('t2l:40%,l2t:3000,causal', 10_000) == [(0, 't2l'), (4000, 'l2t'), (7000, 'causal')]
    assert firsts('l2t:40%,causal', 7) == [(0, 'l2t'), (2, 'causal')]
    assert firsts('l2t:40%,causal', 1) == [(0, 'l2t'), (0, 'causal')], 'a stage may have no step in a short run'
    for wrong in ('l2t:25%,causal:75%', 'l2t:0%,causal', 'l2t:%,causal', 'l2t:101%,causal'):
        with pytest.raises(ValueError, match=wrong.split(',')[0]):
            firsts(wrong, 8)

    # a run of one step is in the second stage
    short = read_stages('l2t:40%,causal', '8:80%,32', ('text', 'latent'), 1, 32)
    assert [(stage.mode, stage.first, stage.seq_len) for stage in short] == [('causal', 0, 32)]


def test_a_length_schedule_cuts_the_texts_counts_its_tokens_and_goes_with_a_mode_schedule(dataset, tmp_path):
    schedules = ['--mode=l2t:6,unconditional+l2t+t2l', '--length_schedule=8:4,32']
    result = train(dataset, tmp_path / 'run', *schedules)
    assert result.returncode == 0, result.stderr
    assert [line.split('| ')[1] for line in result.stdout.splitlines() if ' tokens' in line and '| mode' in line] == [
        'mode l2t, texts of 8 tokens', 'mode l2t, texts of 32 tokens', 'mode unconditional+l2t+t2l, texts of 32 tokens']
    entries = log(tmp_path / 'run')
    assert [entries[step, False]['tokens'] for step in (1, 4, 5, 12)] == [64, 256, 512, 256 + 8 * 8 * 32]
    data = PackedDataset(str(dataset), 'train')
    stages = read_stages('l2t', '8:4,32', ('text', 'latent'), 12, 32)
    text, latent = MaskedText(data.vocab_size), GaussianLatents(data.live)
    make_batch = BatchMaker(text, latent, ('text', 'latent'), 0, .1, 1e-3)
    rows = np.arange(8)
    short, whole = (make_batch(data, rows, 0, 0, stage) for stage in stages)
    assert short['x_t'].shape == (8, 8) and whole['x_t'].shape == (8, 32) and torch.equal(short['clean'], whole['clean'])
    seen = short['x_t'] != text.mask_id
    assert torch.equal(short['x_t'][seen], data.rows(rows)[0][:, :8][seen]), 'the beginning of each text'


@pytest.mark.parametrize('mode', ['t2l', 'unconditional', 'unconditional+l2t+t2l'])
def test_latents_are_learned_beside_whole_texts_only(dataset, mode):
    data = PackedDataset(str(dataset), 'train')
    text, latent = MaskedText(data.vocab_size), GaussianLatents(data.live, target='x0')
    L = int(np.median(lengths(data))) + 1                               # so that about half of the texts fit, with their EOS
    stages = read_stages(mode, f'{L}:4,32', ('text', 'latent'), 12, 32)
    rows = np.arange(64)
    short, whole = (BatchMaker(text, latent, ('text', 'latent'), 0, .1, .1)(data, rows, 0, 0, stage) for stage in stages)
    fits = torch.from_numpy(lengths(data)[:64] < L)
    assert 8 < fits.sum() < 56
    assert torch.equal(short['row_weight'], torch.where(fits, whole['row_weight'], 0)) and (short['row_weight'] > 0).any()
    for name in ('mode', 't_text', 't_latent', 'clean', 'noise'):
        assert torch.equal(short[name], whole[name]), name
    if 'unconditional' in mode:                                          # a text that is cut is still learned as text
        cut_rows = (~fits & (short['mode'] == 0)).nonzero().flatten()
        assert set(cut_rows.tolist()) & set((short['positions'] // L)[short['weight'] > 0].tolist())

    # what is logged is per row that has this loss
    n, error = (short['row_weight'] > 0).sum(), torch.full((64,), 2.)
    sums = statistics(short, dict(loss=torch.tensor(0.), latent_loss=torch.tensor(0.), error=error))
    entry, _ = summary({name: x.tolist() for name, x in sums.items()}, 1)
    assert sums['latent_count'].sum() == n and set(entry['latent_mse_by_t']) - {None} == {2.}

    # without a text nothing is cut
    alone = BatchMaker(text, latent, ('latent',), 0, .1, .1)(data, rows, 0, 0, read_stages(
        'unconditional', f'{L}:4,32', ('latent',), 12, 32)[0])
    assert (alone['row_weight'] > 0).all()


def test_a_stage_without_a_whole_text_is_refused_and_the_share_of_whole_ones_is_said(dataset, tmp_path):
    base = ['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/run', *TINY, '--preflight_only=true', '--mode=t2l']
    of_texts = lengths(PackedDataset(str(dataset), 'train'))
    L = int(np.median(of_texts)) + 1
    none, some, whole, alone = run_each([*base, '--length_schedule=4:5,32'], [*base, f'--length_schedule={L}:5,32'], base,
                                        [*base, '--length_schedule=4:5,32', '--mode=unconditional', '--streams=latent'])
    assert none[0] == 2 and 'no text ends within 4 tokens' in none[2] and none[2].count('\n') == 1
    assert some[0] == 0 and f'beside {100 * (of_texts < L).mean():.0f} % of the texts, those that end within {L} tokens' in some[1]
    assert whole[0] == alone[0] == 0 and 'learned beside' not in whole[1] + alone[1]


def test_the_logged_loss_is_the_sum_of_its_parts(dataset, tmp_path):
    result = train(dataset, tmp_path / 'run', '--mode=unconditional+l2t+t2l', '--batch_size=32', '--global_batch=64', '--max_iters=3')
    assert result.returncode == 0, result.stderr
    for entry in (e for e in log(tmp_path / 'run').values() if 'loss' in e):
        assert entry['loss'] == pytest.approx(entry['text_loss'] + entry['latent_loss'], rel=1e-4)


def test_overlays_set_nothing_of_the_run():
    """ tests/test_commands.py trains with them. """
    for overlay in ('t2l', 'unconditional', 'stable', 'atat'):
        names = set(run_config(str(ROOT / 'config' / f'{overlay}.py')))
        assert names and not names & {'dataset', 'out', 'out_dir', 'depth', 'width', 'max_iters', 'batch_size', 'global_batch'}, overlay


KNOBS = ['--seed=0', '--cond_drop=0.9', '--latent_weight=3', '--t_min=0.3', '--mode=unconditional+9*l2t+t2l',
         '--text_schedule=polynomial', '--grad_clip=1e-3', '--seed=1', '--weight_decay=9',
         '--betas=0.1,0.1', '--learning_rate=0.1', '--warmup_iters=9', '--min_lr=0.9', '--optimizer=muon', '--ema_decay=0.1',
         '--optimizer=muon --muon_lr=0.1', '--optimizer=muon --muon_iterations=3', '--global_batch=16', '--mode=l2t:3,unconditional+l2t+t2l',
         '--text_loss_weight=rdm', '--text_schedule=ddpm', '--text_clock=false --predict_length=false', *(
             f'--importance=freq {knob}' for knob in ('', '--masking=proportional', '--masking=inverse --beta=0.1', '--curriculum=true'))]


def test_every_training_knob_changes_the_validated_loss_and_no_run_differs_from_itself(dataset, tmp_path):
    common = ['--mode=unconditional+l2t+t2l', '--max_iters=6', '--eval_interval=6']
    runs = {tmp_path / f'run{i}': [*common, *knob.split()] for i, knob in enumerate(KNOBS)}
    train_each(dataset, {tmp_path / 'base': common, **runs})
    base = log(tmp_path / 'base')[6, True]
    found = {args[-1] if len(args) == len(common) + 1 else ' '.join(args[len(common):]): log(out)[6, True] for out, args in runs.items()}
    unchanged = [knob for knob, entry in found.items() if entry == base]
    assert unchanged == ['--seed=0', '--importance=freq'], 'importance alone does nothing'
    others = [json.dumps(entry) for knob, entry in found.items() if knob not in unchanged]
    assert len(set(others)) == len(others), 'two knobs do the same'


def test_without_clipping_a_run_is_that_of_a_bound_out_of_reach(dataset, tmp_path):
    runs = {}
    for guard in ('10', '0'):
        for clip in ('0', '1e9'):
            runs[tmp_path / f'{clip}-{guard}'] = [f'--grad_clip={clip}', f'--guard={guard}', '--max_iters=4', '--eval_interval=1', '--keep=9']
    train_each(dataset, runs)
    whole = tmp_path / '0-10'
    for out in runs:
        assert log(out) == log(whole)
        assert all(torch.equal(w, weights(whole)[name]) for name, w in weights(out).items())
    norms = [entry['grad_norm'] for entry in log(whole).values() if 'grad_norm' in entry]
    assert len(norms) == 4 and all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert moved(whole), 'nothing moved'


def test_a_resume_says_which_knobs_are_others_and_config_json_keeps_the_old_ones(dataset, tmp_path):
    out = tmp_path / 'run'

    def go_on(steps, *args):
        return ['train.py', f'--dataset={dataset}', f'--out_dir={out}', *TINY, '--keep=9', f'--max_iters={steps}', *args]
    same = ['--seed=1', '--betas=0.9,0.99', '--cond_drop=0.5', '--ema_decay=0.9', '--latent_weight=2']
    results = run_each(go_on(4, '--ema_decay=0'), go_on(8, *same), go_on(8, *same, '--log_interval=2', '--eval_interval=2'),
                       go_on(12, '--ema_decay=0'))
    assert all(rc == 0 for rc, _, _ in results), results
    lines = [[line for line in out.splitlines() if line.startswith('resumed')] for _, out, _ in results]
    assert lines == [[], ['resumed with other knobs: seed 0 -> 1, cond_drop 0.1 -> 0.5, latent_weight 1.0 -> 2.0, max_iters 4 -> 8, '
                          'ema_decay 0.0 -> 0.9, betas (0.9, 0.95) -> (0.9, 0.99)'], [],
                     ['resumed with other knobs: seed 1 -> 0, cond_drop 0.5 -> 0.1, latent_weight 2.0 -> 1.0, max_iters 8 -> 12, '
                      'ema_decay 0.9 -> 0.0, betas (0.9, 0.99) -> (0.9, 0.95)']]
    # the rate of the last step and of the next one, as the log has them; the schedule's own step is not worth a line
    rates = {step: entry['lr'] for (step, is_best), entry in log(out).items() if not is_best}
    moves = [[line for line in out.splitlines() if line.startswith('resume: the rate')] for _, out, _ in results]
    assert moves == [[], [f'resume: the rate moves from {rates[4]:.1e} to {rates[5]:.1e} (max_iters 4 -> 8)'], [],
                     [f'resume: the rate moves from {rates[8]:.1e} to {rates[9]:.1e} (max_iters 8 -> 12)']]
    assert rates[5] > 1.2 * rates[4]
    earlier = json.loads((out / 'config.json').read_text())['resumed_from']
    assert [entry['step'] for entry in earlier] == [4, 8, 8] and [entry.get('seed') for entry in earlier] == [0, None, 1]

    # an average begins where the run was, and ends with it
    average, now = (load_file(out / 'step-00000008' / f'{name}.safetensors') for name in ('ema', 'model'))
    before = load_file(out / 'step-00000004' / 'model.safetensors')
    first = 'blocks.0.text.up.weight'
    assert not (out / 'step-00000012' / 'ema.safetensors').exists()
    assert (average[first] - before[first]).norm() < (now[first] - before[first]).norm()


def test_every_sampler_writes_from_the_run_folder_alone(finished, tmp_path):
    np.save(tmp_path / 'z.npy', np.random.default_rng(0).normal(size=(3, 16)))
    np.save(tmp_path / 'bad.npy', np.zeros((3, 17)))
    (tmp_path / 'empty.npy').write_bytes(b'')
    here, z = ['sample.py', f'--out_dir={finished}', '--device=cpu'], f'--latents={tmp_path}/z.npy'
    names = [*SAMPLERS, [*SAMPLERS][-1]]                                 # the last one twice: the same seed gives the same text
    (rc, out, err), *each = run_each([*here, '--text=a red dog runs near the river', '--num_samples=2'],
                                     *([*here, z, f'--sampler={s}', '--steps=4', '--watch=true'] for s in names),
                                     [*here, f'--latents={tmp_path}/bad.npy'], [*here, f'--latents={tmp_path}/empty.npy'],
                                     [*here, '--mode=t2l', '--text=a'], [*here, '--mode=text', '--text=a'], [*here, z, '--like=b'],
                                     [*here, z, '--sample_batch=0'], [*here, z, '--sampler=foo'])
    assert rc == 0 and out.count('\n  -> ') == 2, err
    for name, (rc, out, err) in zip(names, each):
        assert rc == 0 and out.count('\n  -> ') == 3 and '░' in out, (name, err)
    assert names[-2] == names[-1] and each[len(names) - 2][1] == each[len(names) - 1][1]
    wrong = each[len(names):]
    for (rc, out, err), word in zip(wrong, ('17', 'empty.npy', 'no t2l', 'does not read', 'does not read', 'sample_batch', 'foo')):
        assert rc == 2 and err.count('\n') == 1 and word in err, err


def test_every_direction_is_sampled_and_evaluated_from_one_mixed_checkpoint(joint, tmp_path):
    here, text = ['sample.py', f'--out_dir={joint}', '--device=cpu', '--steps=5'], '--text=a red dog runs near the river number 3'
    (tmp_path / 'guided.py').write_text('guidance = 2.0')
    template = [*here, '--mode=infill', '--text=a red [MASK] runs near the [MASK:2] 3']
    good = run_each([*here, '--mode=t2l', text, '--num_samples=2', f'--save={tmp_path}/z.npy', '--solver=heun'],
                    [*here, f'--latents={tmp_path}/z.npy'],
                    [*here, '--mode=t2l2t', text],
                    [*here, f'{tmp_path}/guided.py', '--mode=unconditional', '--num_samples=3'],
                    [*here, '--mode=unconditional', f'--save={tmp_path}/one.npy'],
                    [*here, '--mode=text', '--num_samples=3'],
                    [*here, '--mode=latent', '--num_samples=3'],
                    template, [*template, '--like=a red dog runs near the park'],
                    [*template, f'--latents={tmp_path}/one.npy', '--num_samples=2'],
                    [*here, text, '--rerank=3'])
    assert all(rc == 0 for rc, _, _ in good), [err for rc, _, err in good if rc]
    counts = [out.count('  -> ') for _, out, _ in good]
    assert counts == [2, 2, 1, 3, 1, 3, 3, 1, 1, 2, 1]
    assert 'guidance=2 is for the other directions' in good[3][1], 'of a config; on the command line it is an error, below'
    assert good[0][1].count('cosine with the encoder') == 2 and good[6][1].count('mean square') == 3 and 'cosine' in good[10][1]
    z = np.load(tmp_path / 'z.npy')
    assert z.shape == (2, 1, 16) and np.allclose(np.linalg.norm(z, axis=-1), 1, atol=1e-5), 'lsa latents lie on the sphere'
    assert np.load(tmp_path / 'one.npy').shape == (1, 1, 16)
    for _, out, _ in good[7:10]:
        assert all(line.startswith('  -> a red') for line in out.splitlines() if line.startswith('  -> '))
    wrong = run_each(*([*here, *args] for args in (['--mode=t2l'], ['--mode=fly'], ['--mode=infill', '--text=no gap'],
                                                   ['--mode=unconditional', '--solver=heun'], ['--mode=unconditional', '--guidance=2'])))
    assert all(rc == 2 and err.count('\n') == 1 for rc, _, err in wrong), wrong

    (tmp_path / 'sts.csv').write_text(''.join(f'a red dog runs near the {a},a old cat sits near the {b},{i}\n'
                                              for i, (a, b) in enumerate([('park', 'park'), ('river', 'zeppelin'), ('house', 'street'),
                                                                          ('market', 'market'), ('park', 'house')])))
    here = ['evaluate.py', f'--out_dir={joint}', '--device=cpu']
    runs = run_each([*here, '--tasks=nelbo,l2t,t2l,sts,unconditional,text,infill', '--n=12', '--draws=2', '--steps=4', '--latent_steps=4',
                     f'--sts={tmp_path}/sts.csv', '--guidance=1.5'],
                    [*here, '--tasks=l2t,t2l', '--n=8', '--sweep=sampler=ancestral,cached; steps=2,30'],
                    [*here, '--tasks=l2t', '--sweep=magic=1'], [*here, '--tasks=nelbo', '--sweep=steps=1'])
    assert [rc for rc, _, _ in runs] == [0, 0, 2, 2], runs
    assert all(err.count('\n') == 1 for _, _, err in runs[2:])
    results = measured(joint)
    for key in ('nelbo/nats_per_token', 'nelbo/latent_mse', 'nelbo/shuffled/latent_mse', 'l2t/bleu', 't2l/centred_cosine', 't2l/mrr',
                't2l/shuffled/retrieval@1', 't2l/mean/cosine', 't2l/ridge/centred_cosine', 't2l/std_ratio', 'sts/spearman',
                'sts/encoder/pearson', 'sts/shuffled/spearman', 'unconditional/entropy', 'unconditional/coherence', 'text/entropy',
                'unconditional/shuffled/coherence', 'unconditional/data/distinct_2', 'infill/token_accuracy',
                'infill/null/token_accuracy', 'infill/shuffled/bleu'):
        assert math.isfinite(results[key]), key
    assert results['sts/n_known'] == 4
    records = read_results(joint / 'results.json')
    calls = {sampler: find(records, 'l2t', 'calls', point=dict(sampler=sampler, steps=30))['value']
             for sampler in ('ancestral', 'cached')}
    assert calls['ancestral'] == 30 > calls['cached']


def test_a_compiled_run_compiles_nothing_after_its_first_evaluation(dataset, tmp_path):
    job = Job(dataset, tmp_path / 'run', '--compile=true', before="""
import torch, loss
compile, forward, calls = torch.nn.Module.compile, loss.Loss.forward, []
torch.nn.Module.compile = lambda *args, **how: compile(*args, backend='eager', **how)      # traced as ever, no minute of C++
def counted(*args):
    calls.append(1)
    torch._dynamo.config.error_on_recompile = len(calls) > 5             # the evaluation after step 4 is past
    return forward(*args)
loss.Loss.forward = counted
""", after="""
from torch._dynamo.utils import counters
print('GRAPH BREAKS', sum(counters['graph_break'].values()), 'PROGRAMS', counters['stats']['unique_graphs'], 'CALLS', len(calls))
""")
    assert job.wait() == [0], job.err()
    breaks, programs, calls = re.search(r'GRAPH BREAKS (\d+) PROGRAMS (\d+) CALLS (\d+)', job.out()).groups()
    assert int(breaks) == 0 and int(programs) > 1 and int(calls) == 12


# ---- what a run says of itself

def test_the_operations_of_a_step_are_those_of_its_matrices():
    """ Two for each multiply-add; the backward has twice as many as the forward. """
    with torch.device('meta'):
        sketch = Model(ModelConfig(vocab_size=300, seq_len=64, latent_dim=0, n_latents=0, depth=4, heads=4, width=128,
                                   streams=('text',), text_clock=False))
    stage, = read_stages('unconditional', '', ('text',), 9, 64)
    matrices = sum(p.numel() for name, p in sketch.blocks.named_parameters() if not name.endswith(('gain', 'table')))
    attention, head = 4 * 2 * 8 * 64 ** 2 * 128, 256 * 128 * 300      # at half of 8 x 64 positions
    assert flops_of(sketch, 8, stage) == pytest.approx(6 * (8 * 64 * matrices + attention + head), rel=.01)


def test_importing_train_starts_nothing(tmp_path):
    result = run_code('import train', cwd=tmp_path)
    assert result.returncode == 1 and 'ImportError: train.py is a script' in result.stderr and not result.stdout
    assert 'torch' not in result.stderr and not list(tmp_path.iterdir())


def test_the_cost_is_said_before_the_first_step_and_again_after_the_second(dataset, tmp_path):
    slow = ['--log_interval=10', '--eval_interval=100']
    result = train(dataset, tmp_path / 'run', *slow)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    before, estimate, first_log = (next(i for i, line in enumerate(lines) if text in line)
                                   for text in ('12 steps of 8 x 32 tokens', 'a step, about', 'loss '))
    assert before < estimate < first_log and lines[estimate].startswith('step      2/12 | ')
    n = len(PackedDataset(str(dataset), 'train'))
    assert f': {12 * 8 / n:.2f} epochs of {n} samples, ' in lines[before] and re.search(r'FLOP a step, .*FLOP in all', lines[before])
    assert result.stdout.count('a step, about') == 1 and result.stdout.count('M parameters') == 1

    # a second after which each step is reported needs no estimate; the steps themselves are the same
    other = train(dataset, tmp_path / 'other', *slow[1:])
    assert 'a step, about' not in other.stdout
    assert all(torch.equal(a, b) for a, b in zip(weights(tmp_path / 'run').values(), weights(tmp_path / 'other').values()))


def test_a_batch_that_is_mostly_padding_is_a_warning_with_the_length_that_would_do(dataset, tmp_path):
    of_texts = np.concatenate([lengths(PackedDataset(str(dataset), split)) for split in ('train', 'val')])
    train_lengths = lengths(PackedDataset(str(dataset), 'train'))
    here = ['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/run', *TINY, '--preflight_only=true']
    (rc, out, err), (_, fits, _) = run_each([*here, '--seq_len=128'], [*here, f'--seq_len={of_texts.max() + 1}'])
    share = 1 - (train_lengths + 1).mean() / 128
    assert rc == 0 and not err
    warning, = [line for line in out.splitlines() if line.startswith('warning: ')]
    assert f'{100 * share:.0f} % of a batch is PAD' in warning and f'{train_lengths.mean():.1f} tokens on average' in warning
    assert f'--seq_len={of_texts.max() + 1} ' in warning and 'warning' not in fits


def test_accuracy_and_nats_per_token_do_not_count_padding(dataset):
    """ A batch by hand: every PAD right, of the real tokens none. """
    data = PackedDataset(str(dataset), 'train')
    stages = read_stages('l2t', '', ('text', 'latent'), 12, 32)
    text = MaskedText(data.vocab_size)
    make_batch = BatchMaker(text, GaussianLatents(data.live), ('text', 'latent'), 0, .1, 1e-3)
    rows = np.arange(8)
    batch = make_batch(data, rows, 0, 0, stages[0])
    is_pad = batch['targets'] == data.pad
    scored = batch['weight'] > 0
    assert (scored & is_pad).any() and (scored & ~is_pad).any()
    nll = torch.ones(len(is_pad))
    loss = (batch['weight'] * nll).sum()
    result = dict(loss=loss, text_loss=loss, nll=nll, right=is_pad)

    def entry_of(result):
        sums = statistics(batch, result)
        return summary({name: x.tolist() for name, x in sums.items()}, 1)[0]
    assert entry_of(result)['text_accuracy'] == 0
    assert entry_of({**result, 'right': ~is_pad})['text_accuracy'] == 1
    n_real = (data.rows(rows)[0] != data.pad).sum().item()
    assert entry_of(result)['text_nats_per_token'] == pytest.approx(loss.item() * 8 * 32 / n_real) and n_real < 8 * 32
    assert entry_of(result)['text_loss'] == loss.item()


def test_a_finished_run_says_so_and_speaks_of_no_validation_that_was_not(dataset, finished, tmp_path):
    again = train(dataset, finished)
    assert again.returncode == 0 and again.stdout.splitlines()[-1].startswith(f'{finished} is finished: 12 of 12 steps; best validation ')
    assert 'raise --max_iters to go on' in again.stdout and '0 steps in' not in again.stdout
    # a signal after one step: nothing was validated
    job = Job(dataset, tmp_path / 'run', '--eval_interval=100', before="""
import signal, loss
statistics = loss.statistics
def stopped(*args):
    signal.raise_signal(signal.SIGTERM)
    return statistics(*args)
loss.statistics = stopped
""")
    assert job.wait() == [0], job.err()
    assert job.out().splitlines()[-1].startswith('1 steps in 0:00:0') and 'inf' not in job.out().splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason='needs a machine without a GPU')
def test_cuda_where_there_is_none_is_the_machine_s_fault(dataset, tmp_path):
    for device in ('cuda', 'cuda:1'):
        result = train(dataset, tmp_path / 'run', f'--device={device}')
        assert result.returncode == 2 and result.stderr.count('\n') == 1, result.stderr
        assert f'device={device!r} ' in result.stderr and '--device=cpu' in result.stderr and 'nproc' not in result.stderr


def test_a_missing_dataset_is_answered_with_what_makes_that_very_one(tmp_path):
    (tmp_path / 'c.py').write_text("dataset = 'none_of_ours'")
    results = run_each(['train.py', f'{tmp_path}/c.py'], ['train.py', f'{tmp_path}/c.py', '--dataset=nope'])
    for (rc, _, err), words in zip(results, (f'data/none_of_ours (no meta.json): make it with `python prepare.py {tmp_path}/c.py`',
                                             'data/nope (no meta.json): make it with `python prepare.py --input=... --out=data/nope`')):
        assert rc == 2 and err.count('\n') == 1 and words in err, err


def test_a_resume_says_where_the_rate_jumps_and_why():
    old = dict(learning_rate=1e-3, muon_lr=None, max_iters=200, warmup_iters=100, min_lr=0.0)

    def said(step, **changes):
        return jumps_of_rate(old, {**old, **changes}, step)
    assert lr_factor({**old, 'warmup_iters': 0}, 100) == lr_factor(old, 150) == pytest.approx(.5) and lr_factor(old, 0) == .01

    # the rate of the last step, counted from 0, and of the next one: (1 + cos(pi 99 / 100)) / 2, (1 + cos(pi / 3)) / 2
    assert said(200, max_iters=400) == ['resume: the rate moves from 2.5e-07 to 7.5e-04 (max_iters 200 -> 400)']
    assert said(150, learning_rate=2e-3) == ['resume: the rate moves from 5.2e-04 to 1.0e-03 (learning_rate 0.001 -> 0.002)']
    assert said(199, min_lr=.1) == ['resume: the rate moves from 9.9e-07 to 1.0e-04 (min_lr 0.0 -> 0.1)']
    assert said(20, warmup_iters=0) == ['resume: the rate moves from 2.0e-04 to 9.8e-04 (warmup_iters 100 -> 0)']
    assert said(150, muon_lr=2e-3) == ['resume: the rate moves from 5.2e-04 to 1.0e-03 (muon_lr None -> 0.002)']

    # nothing has changed, or next to nothing; no step is left
    for step in (1, 50, 99, 100, 101, 150, 199, 200):
        assert said(step) == [] and said(step, max_iters=step) == []
    assert said(150, max_iters=201) == said(100, max_iters=210) == said(20, max_iters=400) == []


# what wandb does: a run has a count of its own, which goes on at a resume. What is logged for a step below it is dropped
WANDB = """
import json, os
axes = {}
def note(**call):
    with open(os.environ['CALLS'], 'a') as f:
        f.write(json.dumps(call) + '\\n')
def calls():
    return [json.loads(line) for line in open(os.environ['CALLS'])]
def init(**how):
    note(init={name: how[name] for name in ('project', 'name', 'id', 'resume')})
    init.id = how['id']
def define_metric(name, step_metric=None):
    axes[name] = step_metric
def log(entry, step=None):
    last = max([call['count'] for call in calls() if call.get('id') == init.id], default=-1)
    step = last + 1 if step is None else step
    if step >= last:
        axis = axes.get('*')
        note(id=init.id, count=step, x=entry[axis] if axis else step, keys=sorted(entry))
"""


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb_and_no_step_is_dropped(dataset, tmp_path):
    (tmp_path / 'modules').mkdir()
    (tmp_path / 'modules' / 'wandb.py').write_text(WANDB)

    def start(out, *args):
        env = dict(PYTHONPATH=f'{ROOT}:{tmp_path}/modules', CALLS=str(tmp_path / 'calls'))
        job = Job(dataset, out, '--wandb_project=captions', *args, env=env)
        return job.wait()
    run_folder, other = tmp_path / 'run', tmp_path / 'other'
    assert start(run_folder, '--max_iters=6', '--keep=9') == [0]
    os.truncate(run_folder / 'step-00000006' / 'model.safetensors', 9)   # so it goes on from the one before
    assert start(run_folder, '--max_iters=8') == start(other, '--max_iters=2') == [0]
    calls = [json.loads(line) for line in open(tmp_path / 'calls')]
    first, second, third = (call['init'] for call in calls if 'init' in call)
    assert first == second and first['resume'] == 'allow' and first['project'] == 'captions' and first['name'] == 'run'
    assert re.fullmatch(r'[0-9a-f]{8}', first['id']) and third['id'] != first['id']
    steps = [call['x'] for call in calls if 'keys' in call and 'loss' in call['keys']]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 1, 2]
    assert [call['x'] for call in calls if 'val_text' in call.get('keys', ())] == [4, 6, 8, 2]
