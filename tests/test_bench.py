""" bench.py at a tiny shape: every table is printed, and a library that is missing costs its row, not the run. """
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch

from configurator import run_config
from launch import HANGS, ROOT

TINY = dict(depth=2, width=32, heads=2, batch=2, length=16, n_latents=1, latent_dim=6, vocab_size=50)
TINY_RUN = ['--depth=1', '--width=32', '--heads=2', '--latent_tokens=1', '--batch_size=8', '--grad_accum=2', '--max_iters=4', '--device=cpu',
            '--log_interval=2', '--eval_iters=1', '--warmup_iters=0']


def bench(*args, **env):
    code = f"""
import runpy, sys
sys.argv = ['bench.py', *{list(args)!r}, '--device=cpu', '--threads=1', '--rounds=2', '--seconds=0.05']
from benchmarks import peers
peers.SHAPES['small'] = {TINY!r}
runpy.run_path('bench.py', run_name='__main__')
"""
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
                            env={**os.environ, **env})
    return result.returncode, result.stdout, result.stderr


def run_code(code):
    return subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS)


def test_step_compares_what_is_there_and_names_what_is_not(tmp_path):
    (tmp_path / 'mmdit.py').write_text("raise ImportError('no mmdit on this machine')")
    rc, out, err = bench('--what=step', '--sides=ours,bert,mmdit', '--settings=as shipped,bfloat16', f'--save={tmp_path}/table.json',
                         PYTHONPATH=str(tmp_path))
    assert rc == 0, err
    rows = {(row['side'], row['setting']): row for row in json.loads((tmp_path / 'table.json').read_text())['rows']}
    assert set(rows) == {('ours', 'bfloat16'), ('bert', 'bfloat16'), ('bert', 'as shipped')}
    assert out.count('no mmdit on this machine') == 2, out
    for row in rows.values():
        assert row['ms'] > 0 and row['flops'] > 0 and row['utilisation'] > 0
        assert row['ratio_least'] <= row['ratio'] <= row['ratio_most']
    assert rows['ours', 'bfloat16']['ratio'] == 1
    assert bench('--what=step', '--sides=nobody')[0] == 2
    rc, _, err = bench('--what=step', '--sides=mmdit', '--settings=bfloat16', PYTHONPATH=str(tmp_path))
    assert rc == 2 and 'no side' in err and 'Traceback' not in err


def test_scaling_and_samplers_print_their_tables():
    rc, out, err = bench('--what=scaling', '--scale=depth', '--settings=bfloat16')
    assert rc == 0 and all(line in out for line in ('as it is', 'depth 1', 'depth 4')), err
    work = {line.split()[1]: float(line.split()[6]) for line in out.splitlines() if line.startswith('depth ')}
    assert work['1'] < 1 < work['4'], out
    rc, out, err = bench('--what=samplers', '--batch_size=2')
    assert rc == 0, err
    calls = {line.split(' steps')[0]: float(line.split()[-3]) for line in out.splitlines() if 'batch 2' in line and 'network calls' in line}
    assert calls['first_hitting, 16'] == 16 and calls['ancestral, 2'] == 2 and calls['cached, 16'] < 16


def test_several_benches_run_in_turn_and_an_unknown_one_is_refused_before_any(dataset, tmp_path):
    tiny = [f'--dataset={dataset}', '--batch_size=4', '--depth=1', '--width=32', '--heads=1',
            '--max_iters=60', '--rounds=1']
    line = ' '.join([*tiny[:-2], '--latent_tokens=2', '--log_interval=10'])
    rc, out, err = bench('--what=guard,loader,trainings', f'--lines={line} | {line} --optimizer=muon', *tiny)
    assert rc == 0, err
    assert out.index('guard, 1 threads') < out.index('loader, 1 threads') < out.index('trainings, 1 threads')
    table = out[out.index('speed, relative to', out.index('trainings, 1 threads')):]
    assert len(re.findall(r'[\d,]+ +[\d.]+ \([\d.]+, [\d.]+\)', table)) == 2, 'tokens per second, and the ratio to the first'
    assert 'guard and a log line every 10 steps' in out and 'a step of 4 rows takes' in out
    rc, out, err = bench('--what=guard,speed', *tiny)
    assert rc == 2 and "what='speed'" in err and err.count('\n') == 1 and 'round 1' not in out
    rc, out, err = bench('--what=gpu', '--parts=speed,nothing', f'--save={tmp_path}/table.json')
    assert rc == 2 and 'parts=' in err and err.count('\n') == 1 and not list(tmp_path.iterdir())


def test_opening_makes_a_dataset_of_so_many_rows_and_prints_a_line_for_it(tmp_path):
    from benchmarks import opening
    from data import PackedDataset
    opening.write_dataset(tmp_path, 70, 30)
    for split, n, n_shards in (('train', 70, 3), ('val', opening.VAL_ROWS, 34)):
        data = PackedDataset(tmp_path, split)
        assert len(data) == n and len(list(tmp_path.glob(f'{split}-*.tokens.bin'))) == n_shards
    tokens, latents = PackedDataset(tmp_path, 'train').rows(range(70))
    lengths = (tokens == 0).sum(1)                                       # tokens of id 0, then EOS and PAD
    assert tokens.shape == (70, 128) and latents.shape == (70, 1, 384) and not latents.any()
    assert torch.equal(lengths[:30], lengths[30:60]) and 40 < lengths.float().mean() < 90, 'full shards share their offsets'

    rc, out, err = bench('--what=opening', '--rows=7e1', '--shard_rows=30', '--batch_size=4')
    assert rc == 0, err
    head, line = out.splitlines()[-2:]
    assert head.split()[:2] == ['rows', 'shards'] and all(name in head for name, _ in opening.COLUMNS.values())
    rows, n_shards, *numbers = line.split()
    assert (rows, n_shards) == ('70', '3') and len(numbers) == len(opening.COLUMNS)
    assert all(float(number) >= 0 for number in numbers) and float(numbers[-2]) > 0


@pytest.mark.parametrize('side', ['ours', 'bert', 'gpt'])
def test_every_side_learns_from_its_batch(side):
    from benchmarks import peers
    module, loss = peers.build(side, TINY, 'cpu', 'float32')
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    first = loss().item()
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < .8 * first

# -----------------------------------------------------------------------------
# --what=gpu

def test_all_of_a_card_is_measured_in_one_command_and_on_a_cpu_at_a_tiny_size(tmp_path):
    from benchmarks.gpu import PARTS
    out = tmp_path / 'table.json'
    result = subprocess.run([sys.executable, 'bench.py', '--what=gpu', '--device=cpu', '--threads=1', f'--save={out}', '--minutes=20'],
                            cwd=ROOT, capture_output=True, text=True, timeout=2 * HANGS)
    assert result.returncode == 0, result.stderr
    table = json.loads(out.read_text())
    assert tuple(table['parts']) == PARTS and ', 0 failed; ' in result.stdout
    rows = {f'{part}: {name}': row for part, of_part in table['parts'].items() for name, row in of_part.items()}
    assert not [row for row in rows.values() if 'failed' in row]
    skipped = {name: row['skipped'] for name, row in rows.items() if 'skipped' in row}
    assert {name.split(':')[0] for name in skipped} <= {'tests', 'cards', 'speed', 'peers', 'training'} and all(skipped.values())

    # what was found, and that it stands in the table that is printed
    assert rows['losses: mixed']['largest difference'] == 0 == rows['resume: SIGTERM, resume']['largest difference']
    assert rows['resume: SIGTERM, resume']['saved at step'] == 4
    assert 'bad.item()' not in rows['options: adamw']['waits']
    assert ('bad.item() x 5' in rows['options: muon']['waits']) == ('bad.item()' in (ROOT / 'train.py').read_text())
    assert len(table['parts']['options']) == 11 and len(table['parts']['texts']) == 12
    speed = rows['speed: quickstart eager']
    parts_ms = [value for name, value in speed.items() if name.endswith(' ms')]
    assert len(parts_ms) >= 4 and all(ms > 0 for ms in parts_ms) and speed['kernels'] > 100
    assert abs(speed['tokens/s'] * speed['ms'] / 1000 / (4 * 16) - 1) < 1e-6
    for name in rows:
        assert any(line.startswith(f'  {name.partition(": ")[2]}') for line in result.stdout.splitlines()), name
    assert {path.name for path in tmp_path.iterdir()} == {'table.json', 'table-jobs'}
    assert 'parameters' in (tmp_path / 'table-jobs' / 'speed quickstart eager.txt').read_text()


def end_process():
    print('last words', flush=True)
    os._exit(3)


def raise_error(message):
    raise ValueError(message)


def skip(reason):
    from benchmarks.watched import Skipped
    raise Skipped(reason)


def sleep(seconds):
    time.sleep(seconds)
    return {'asleep': dict(pid=os.getpid())}


def test_a_job_that_fails_is_one_row_and_the_next_ones_run(tmp_path):
    from benchmarks.gpu import run_jobs
    jobs = [('asleep', sleep, (0,)), ('wrong', raise_error, ('this is wrong\nand more',)), ('dies', end_process, ()),
            ('needs', skip, ('no card',)), ('asleep', sleep, (0,))]
    outputs = [tmp_path / f'{i}.txt' for i in range(len(jobs))]
    found = list(run_jobs(jobs, outputs, time.monotonic() + HANGS, 'fork'))
    assert found[1] == {'wrong': {'failed': found[1]['wrong']['failed']}} and found[1]['wrong']['failed'].startswith('ValueError: this is wrong (')
    assert 'and more' in outputs[1].read_text() and 'last words' in outputs[2].read_text()
    assert found[2] == {'dies': {'failed': 'its process died'}} and found[3] == {'needs': {'skipped': 'no card'}}
    assert 'asleep' in found[0] and 'asleep' in found[4]
    slow, later = run_jobs([('slow', sleep, (HANGS,)), ('later', sleep, (0,))], outputs, time.monotonic() + 0.5, 'fork')
    assert 'time was up' in slow['slow']['failed'] and later == {'later': {'skipped': 'no time left'}}


def test_a_step_that_waits_for_the_device_is_found_by_its_line(dataset, tmp_path):
    """ A training script that reads the norm in every step. """
    source = (ROOT / 'train.py').read_text()
    changed = source.replace('    bad = torch.zeros((), device=device)\n', '    bad = torch.zeros((), device=device)\n    norm.item()\n')
    assert changed != source
    (tmp_path / 'train.py').write_text(changed)
    code = f"""
from pathlib import Path
from benchmarks import checks, watched
base = checks.arguments_of(Path({str(tmp_path)!r}), 'run', 'cpu', 4, '--dataset={dataset}')
print(watched.check_waits('as it is', base))
watched.ROOT = Path({str(tmp_path)!r})
base = checks.arguments_of(Path({str(tmp_path)!r}), 'changed', 'cpu', 4, '--dataset={dataset}')
watched.check_waits('changed', base)
"""
    result = run_code(code)
    assert "{'as it is': {'waits': '" in result.stdout
    assert result.stderr.strip().endswith('waits for the device: norm.item()'), result.stderr


def test_random_data_has_the_shapes_of_the_real_data(tmp_path):
    from benchmarks import random_data, speeds
    from data import PackedDataset
    sizes = speeds.shapes(on_gpu=True)
    assert set(sizes) == set(speeds.of_peers(on_gpu=True)) == {'quickstart', 'multi30k_l2t', 'l2t', 'l2t_892m'}
    assert sizes['l2t_892m']['depth'] == 24 and sizes['l2t']['vocab_size'] == 50_258 and sizes['l2t']['latent_tokens'] == 8
    assert speeds.micro_steps_of('quickstart', 64) == ['--grad_accum=1']
    assert speeds.micro_steps_of('l2t_892m', 16) in (['--grad_accum=4'], ['--global_batch=64'])
    for name, shape in sizes.items():
        config = {knob: value for knob, value, _ in run_config(f'config/{name}.py')}
        assert shape['length'] == config.get('seq_len', config['max_tokens'] + 1)
        assert shape['vocab_size'] == config.get('vocab_size', 50_258) and speeds.attention_shape(shape)[0] == config['batch_size']
    data = PackedDataset(random_data.write_dataset(f'{tmp_path}/data', 50_258, 12, 5, n=20, n_val=4), 'train')
    tokens, latents = data.rows(range(20))
    assert tokens.shape == (20, 12) and latents.shape == (20, 1, 5) and data.tokenizer.vocab_size == 50_258
    assert (tokens[:, -1] == data.tokenizer.eos).all() and tokens[:, :-1].max() > 40_000 and 0.7 < latents.std() < 1.3


def test_the_log_has_mfu_where_the_peak_is_known_and_only_there(dataset, tmp_path):
    code = f"""
import runpy, sys
import runs.log
for name, peak in (('unknown', None), ('known', 1e12)):
    runs.log.peak_of = lambda device: peak
    sys.argv = ['train.py', '--dataset={dataset}', f'--out_dir={tmp_path}/' + name, *{TINY_RUN!r}]
    g = runpy.run_path('train.py', run_name='__main__')
print('FLOP', g['flops_of_step'](g['model'], g['run'], 2, g['run'].stages[0]))
"""
    result = run_code(code)
    assert result.returncode == 0, result.stderr
    entries = {name: [json.loads(line) for line in open(tmp_path / name / 'training_log.jsonl')] for name in ('unknown', 'known')}
    assert not any('mfu' in entry for entry in entries['unknown']) and result.stdout.count(' | MFU ') == 2
    steps = [entry for entry in entries['known'] if 'loss' in entry]
    flops = float(result.stdout.split('FLOP')[-1])
    for entry in steps:
        seconds_a_step = 8 * 2 * 32 / entry['tokens_per_s']
        assert abs(entry['mfu'] / (flops / seconds_a_step / 1e12) - 1) < 1e-6


def test_only_cards_in_the_table_have_a_peak(monkeypatch):
    from runs import flops
    names = {'cuda:0': 'NVIDIA H200', 'cuda:1': 'NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'cuda:2': 'NVIDIA GeForce RTX 4090 Laptop GPU'}
    monkeypatch.setattr('torch.cuda.get_device_name', names.get)
    assert [flops.peak_of(device) for device in ('cpu', *names)] == [None, 989e12, None, None]
