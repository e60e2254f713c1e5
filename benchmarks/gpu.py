"""
How fast a card trains: train.py with our configs on random data of their shape, eager and compiled,
by the numbers of its own log. `make gpu` runs the tests that need a card before it.

    python bench.py --what=gpu
    python bench.py --what=gpu --device=cpu --max_iters=8      # a tiny size: does it run?
"""
import tempfile

from benchmarks.random_data import LATENT_DIMS, R50K, write_dataset
from benchmarks.trainings import log_of
from configurator import run_config
from runs.checkpoint import pick_device

TINY = ['--depth=2', '--width=64', '--heads=2', '--batch_size=4', '--latent_tokens=2']


def run(knobs):
    on_gpu = pick_device(knobs.device) != 'cpu'
    print(f'{"config":<24}{"tokens/s":>12}{"MFU %":>8}{"GB":>8}')
    with tempfile.TemporaryDirectory() as folder:
        for name, latent_dim in LATENT_DIMS.items():
            config = run_config(f'config/{name}.py')
            data = write_dataset(f'{folder}/{name}', config.get('vocab_size', R50K),
                                 config['max_tokens'] + 1, latent_dim)

            # one micro-step each, so that the optimizer weighs most
            arguments = [f'config/{name}.py', f'--dataset={data}', f'--device={knobs.device}',
                         '--length_schedule=', *([] if on_gpu else TINY)]
            if 'global_batch' in config:
                arguments.append(f'--global_batch={config["batch_size"]}')
            for compiled in (False, True) if on_gpu else (False,):
                entry = log_of([*arguments, f'--compile={compiled}'], knobs.max_iters)[-1]
                label = f'{name} {"compiled" if compiled else "eager"}'
                print(f'{label:<24}{entry["tokens_per_s"]:>12,.0f}'
                      f'{100 * entry.get("mfu", 0):>8.1f}{entry["memory_gb"]:>8.2f}', flush=True)
