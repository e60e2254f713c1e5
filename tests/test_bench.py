""" bench.py at a tiny shape: each comparison prints its table. """
import re

from benchmarks.agreement import SETS
from launch import run_code

SHAPE = dict(depth=2, width=32, heads=2, batch=2, length=16, n_latents=1, latent_dim=6,
             vocab_size=50)


def bench(*args, before=''):
    """ What it prints. before: code that runs first. """
    code = f"""
import runpy, sys
sys.argv = ['bench.py', *{list(args)!r}, '--device=cpu', '--threads=1', '--rounds=2']
from benchmarks import peers
peers.SHAPES['small'] = {SHAPE!r}
{before}
runpy.run_path('bench.py', run_name='__main__')
"""
    result = run_code(code)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_step_compares_ours_with_the_others():
    out = bench('--what=step', '--max_iters=2', '--dtype=bfloat16')
    table = out[out.index('speed, relative to'):]
    rows = re.findall(r'^(\w+) +([\d,]+) +([\d.]+) \(', table, re.M)
    assert [row[0] for row in rows] == ['ours', 'bert', 'gpt'] and float(rows[0][2]) == 1


def test_samplers_print_their_table():
    out = bench('--what=samplers', '--batch_sizes=1,2', '--rounds=1')
    table = re.findall(r'^(.+), batch (\d) +([\d.]+) ms a text$', out, re.M)
    ways = ['GPT-2', 'left to right', 'confidence']
    assert [(side, int(n)) for side, n, _ in table] == [(side, n) for n in (1, 2) for side in ways]


def test_trainings_take_turns(dataset):
    line = f'--dataset={dataset} --batch_size=4 --depth=1 --width=32 --heads=1 --latent_tokens=2'
    out = bench('--max_iters=20', f'--lines={line}|{line} --optimizer=muon', '--rounds=1')
    table = out[out.index('speed, relative to'):]
    assert len(re.findall(r'[\d,]+ +[\d.]+ \([\d.]+, [\d.]+\)', table)) == 2


# two small configs, and each set in bfloat16
LESS = """
from benchmarks import agreement, gpu
gpu.LATENT_DIMS = dict(quickstart=512, captions=384)
agreement.TOLERANCE = dict(bfloat16=agreement.TOLERANCE['bfloat16'])
"""


def test_gpu_times_each_config_on_random_data_and_compares_with_the_cpu():
    out = bench('--what=gpu', before=LESS)
    table, compared = out[out.index('config  '):].rstrip().split('\n\n')
    assert [line.split()[0] for line in table.splitlines()[1:]] == ['quickstart,', 'captions,']
    rows = re.findall(r'^(.+), (bfloat16|float32) +\d', compared, re.M)
    assert [name for name, _ in rows] == [*SETS][:6] + ['importance'] * 2
    assert not re.search('WRONG|FAILED', out)
