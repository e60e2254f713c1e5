"""
Does a card compute what the CPU computes (agreement.py)? And how fast does train.py train our
configs there, on random data of their shape, eager and compiled, by the numbers of its own log?
Exit code 1 where a row differs from the CPU, and where a timed training stopped, skipped a step or
had a loss that is not finite.

    python bench.py --what=gpu
    python bench.py --what=gpu --device=cpu --max_iters=8      # a tiny size: does it run?
"""
import math
import tempfile

from benchmarks.agreement import disagreements
from benchmarks.random_data import LATENT_DIMS, R50K, write_dataset
from benchmarks.trainings import log_of, timed
from configurator import run_config, stop
from runs.machine import pick_device

TINY = ['--depth=2', '--width=64', '--heads=2', '--batch_size=4', '--latent_tokens=2']


def fault_of(entries):
    """ What is wrong with a training that was timed, in words; '' for nothing. """
    of_steps = [entry for entry in entries if 'tokens_per_s' in entry]
    if not timed(entries):
        return 'nothing was timed'
    if skipped := of_steps[-1]['skipped']:
        return f'{skipped} steps skipped'
    values = [entry.get(name, math.nan) for entry in of_steps for name in ('loss', 'grad_norm')]
    return '' if all(map(math.isfinite, values)) else 'a loss or gradient that is not finite'


def row_of(label, arguments, max_iters):
    """ Prints a row. Returns whether the training is sound. """
    try:
        entries = log_of(arguments, max_iters)
        fault = fault_of(entries)
    except SystemExit as end:                              # train.py has said why on stderr
        fault = f'exit code {end.code}'
    if fault:
        print(f'{label:<24}  FAILED: {fault}', flush=True)
        return False
    entry = timed(entries)[-1]
    print(f'{label:<24}{entry["tokens_per_s"]:>12,.0f}{100 * entry.get("mfu", 0):>8.1f}'
          f'{entry["memory_gb"]:>8.2f}', flush=True)
    return True


def run(knobs):
    on_gpu = pick_device(knobs.device) != 'cpu'
    with tempfile.TemporaryDirectory() as folder:
        wrong = disagreements(folder, knobs.device, compiled=on_gpu)

        print(f'\n{"config":<24}{"tokens/s":>12}{"MFU %":>8}{"GB":>8}')
        for name, latent_dim in LATENT_DIMS.items():
            config = run_config(f'config/{name}.py')
            length = config['max_tokens'] + 1 if on_gpu else 32
            data = write_dataset(f'{folder}/{name}', config.get('vocab_size', R50K), length,
                                 latent_dim)

            # one micro-step each, so that the optimizer weighs most
            arguments = [f'config/{name}.py', f'--dataset={data}', f'--device={knobs.device}',
                         '--length_schedule=', *([] if on_gpu else TINY)]
            if 'global_batch' in config:
                arguments.append(f'--global_batch={config["batch_size"]}')
            for compiled in (False, True) if on_gpu else (False,):
                label = f'{name} {"compiled" if compiled else "eager"}'
                if not row_of(label, [*arguments, f'--compile={compiled}'], knobs.max_iters):
                    wrong.append(label)
    if wrong:
        stop(f'{len(wrong)} rows above failed: {", ".join(wrong)}', code=1)
