""" bench.py at a tiny shape: every table is printed, and a library that is missing costs its row, not the run. """
import json
import os
import subprocess
import sys

import pytest

from launch import HANGS, ROOT

TINY = dict(depth=2, width=32, heads=2, batch=2, length=16, n_latents=1, latent_dim=6, vocab_size=50)


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
    rc, out, err = bench('--what=guard,loader', *tiny)
    assert rc == 0, err
    assert out.index('guard, 1 threads') < out.index('loader, 1 threads')
    assert 'guard and a log line every 10 steps' in out and 'a step of 4 rows takes' in out
    rc, out, err = bench('--what=guard,speed', *tiny)
    assert rc == 2 and "what='speed'" in err and err.count('\n') == 1 and 'round 1' not in out


@pytest.mark.parametrize('side', ['ours', 'bert', 'gpt'])
def test_every_side_learns_from_its_batch(side):
    from benchmarks import peers
    import torch
    module, loss = peers.build(side, TINY, 'cpu', 'float32')
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    first = loss().item()
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < .8 * first
