"""
The jobs of bench.py --what=gpu that take time: our training at the sizes of our configs, other
libraries at the same sizes, the tests that need a GPU, and a real training.
"""
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace

import torch

from benchmarks.random_data import LATENT_DIMS, R50K, write_dataset
from benchmarks.step import Worker
from benchmarks.timed import time_training
from benchmarks.watched import ROOT, Skipped, log_entries
from configurator import read_knobs, run_config
from runs.flops import peak_of

TINY = dict(depth=2, width=64, heads=2, batch_size=4, latent_tokens=2, vocab_size=300, length=16,
            latent_dim=6)
NEEDS = {'gpt': 'transformers', 'diffusers': 'diffusers', 'mmdit': 'mmdit'}
MICRO_STEPS = 4                # of a step, at most; with more the optimizer weighs less


def shapes(on_gpu):
    """ {config: its sizes with those of its data}; on a CPU one of them, tiny. """
    if not on_gpu:
        return {'quickstart': TINY}
    found = {}
    defaults = read_knobs(ROOT / 'train.py')[0]
    for name, latent_dim in LATENT_DIMS.items():
        config = {knob: value for knob, value, _ in run_config(f'config/{name}.py')}
        sizes = {knob: config.get(knob, defaults[knob]) for knob in TINY if knob in defaults}
        found[name] = dict(sizes, vocab_size=config.get('vocab_size', R50K), latent_dim=latent_dim,
                           length=config['max_tokens'] + 1)
    return found


def micro_steps_of(name, batch_size):
    """ Arguments of train.py: the micro-steps of a config, but not too many. """
    config = {knob: value for knob, value, _ in run_config(f'config/{name}.py')}
    if rows := config.get('global_batch'):
        return [f'--global_batch={min(rows, MICRO_STEPS * batch_size)}']
    return [f'--grad_accum={min(config.get("grad_accum", 1), MICRO_STEPS)}']


def attention_shape(sizes):
    """ B, H, S, d. """
    S = sizes['latent_tokens'] + sizes['length']
    return sizes['batch_size'], sizes['heads'], S, sizes['width'] // sizes['heads']


def of_peers(on_gpu):
    """ The configs in whose shapes the others are measured; those that say most come first. """
    return ('l2t', 'multi30k_l2t', 'quickstart', 'l2t_892m') if on_gpu else ('quickstart',)

# -----------------------------------------------------------------------------
# Our training, and a step of other libraries

def time_config(folder, name, how, device):
    """ train.py with a config, on random data of its shape. """
    on_gpu = device != 'cpu'
    if how == 'compiled' and not on_gpu:
        raise Skipped('on a CPU to compile takes a minute')
    sizes = shapes(on_gpu)[name]
    data = write_dataset(f'{folder}/random-{name}', sizes['vocab_size'], sizes['length'],
                         sizes['latent_dim'])

    arguments = [f'config/{name}.py', f'--dataset={data}', f'--out_dir={folder}/{name}-{how}',
                 f'--device={device}', f'--compile={how == "compiled"}']
    if on_gpu:
        arguments += micro_steps_of(name, sizes['batch_size'])
    else:
        knobs = ('depth', 'width', 'heads', 'batch_size', 'latent_tokens')
        arguments += [f'--{knob}={sizes[knob]}' for knob in knobs]
    return time_training(f'{name} {how}', arguments, window=.5 if on_gpu else .02)


def time_peers(name, sides, device):
    """ A training step of some sides of benchmarks/peers.py, with a fused AdamW, by turns. """
    on_gpu = device != 'cpu'
    sizes = shapes(on_gpu)[name]
    shape = dict(sizes, batch=sizes['batch_size'], n_latents=1)
    setting = 'bfloat16 compiled' if on_gpu else 'bfloat16'
    knobs = SimpleNamespace(device=device, threads=torch.get_num_threads())

    rows, found = {}, []
    for side in sides:
        library = NEEDS.get(side)
        if library and not find_spec(library):
            rows[f'{name} {side}'] = dict(skipped=f'pip install {library}')
        else:
            found.append(side)

    # they compile at the same time, and are measured by turns
    with ThreadPoolExecutor(len(sides)) as pool:
        workers = dict(zip(found, pool.map(lambda side: Worker(side, shape, setting, knobs),
                                           found)))
    answers = {side: [] for side in found}
    for _ in range(3):
        for side, worker in workers.items():
            answers[side].append(worker.turn(1.0 if on_gpu else .05))

    for side, worker in workers.items():
        worker.end()
        rows[f'{name} {side}'] = row_of_peer(worker.ready, answers[side], shape, device)
    return rows


def row_of_peer(ready, answers, shape, device):
    """ The row of a side: medians over its turns. """
    errors = [answer['error'] for answer in [ready, *answers] if 'error' in answer]
    if errors:
        return dict(failed=errors[0])
    seconds = statistics.median(answer['seconds'] for answer in answers)
    rate = ready['flops'] / seconds
    row = {'ms': 1000 * seconds, 'tokens/s': shape['batch'] * shape['length'] / seconds,
           'TFLOP/s': rate / 1e12}
    if peak := peak_of(device):
        row['MFU %'] = 100 * rate / peak
    return {**row, 'GB': answers[-1]['memory_gb'], 'M params': ready['parameters'] / 1e6}

# -----------------------------------------------------------------------------
# Tests, and a real training

def run_tests(device, end):
    """ The tests of what is particular to CUDA. """
    if device == 'cpu':
        raise Skipped('make test runs them too')
    path = 'tests/test_cuda.py'
    if not (ROOT / path).exists() or not find_spec('pytest'):
        raise Skipped(f'no {path}, or pytest is not installed')
    result = subprocess.run([sys.executable, '-m', 'pytest', '-q', path], cwd=ROOT, text=True,
                            capture_output=True, timeout=max(1, end - time.monotonic()))
    print(result.stdout, result.stderr)
    last = result.stdout.strip().split('\n')[-1]
    if result.returncode:
        raise RuntimeError(last)
    return {path: dict(result=last)}


def train_for_real(device, end):
    """ config/multi30k_l2t.py, until it is done or the time is up: then it gets a SIGTERM, saves,
    and can be resumed. """
    seconds = end - time.monotonic() - 30                  # of them it may need some to save
    if device == 'cpu':
        raise Skipped('it needs a GPU')
    if not (ROOT / 'data/multi30k/meta.json').exists():
        raise Skipped('no data/multi30k: the first lines of config/multi30k_l2t.py say how')
    if seconds < 30:
        raise Skipped('no time left')

    out_dir = ROOT / 'out/multi30k_l2t_gpu'
    process = subprocess.Popen([sys.executable, 'train.py', 'config/multi30k_l2t.py',
                                f'--device={device}', f'--out_dir={out_dir}'], cwd=ROOT)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
    if process.wait():
        raise RuntimeError(f'train.py ended with exit code {process.returncode}')

    last = log_entries(out_dir)[-1]
    row = {'step': last['step'], 'loss': last['loss'], 'tokens/s': last['tokens_per_s'],
           'GB': last['memory_gb']}
    if 'mfu' in last:
        row['MFU %'] = 100 * last['mfu']
    return {'config/multi30k_l2t.py': row}
