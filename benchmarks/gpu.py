"""
The speed of our configs on a card, from train.py's own log. Each has the micro-steps of its config,
and random data in the shape of its own. Then: does the card compute what the CPU computes
(agreement.py)? Exit code 1 where it does not, and where a timed training stopped, or skipped a step
since its loss or gradient was not finite.

    python bench.py --what=gpu --device=cpu      # a tiny size: does it run?
"""
import tempfile

from base.console import stop
from base.machine import pick_device
from benchmarks.agreement import disagreements
from benchmarks.random_data import LATENT_DIMS, R50K, write_dataset
from benchmarks.trainings import timed
from configurator import run_config

# a config, its knob compile, and so many steps
ROWS = (
    ('l2t_892m', 'true', 4),
    ('l2t', 'true', 8),
    ('captions', 'false', 60),
    ('captions', 'true', 60),
)
TINY = ['--depth=2', '--width=64', '--heads=2', '--batch_size=4', '--global_batch=8',
        '--latent_tokens=2']


def arguments_of(name, folder, on_gpu):
    """ Of train.py: random data, as long as the texts of its first steps, and its last mode. """
    # of a config with stages: texts of the first length. Real data are not needed, since the time
    # does not depend on what a text says
    config = run_config(f'config/{name}.py')
    length = config['max_tokens'] + 1
    if schedule := config.get('length_schedule'):
        length = int(schedule.partition(':')[0])
    data = write_dataset(f'{folder}/{name}', config.get('vocab_size', R50K),
                         length if on_gpu else 32, LATENT_DIMS[name])

    # and the mode of the last stage, with no schedule of lengths
    mode = config['mode'].split(',')[-1]
    return [f'config/{name}.py', f'--dataset={data}', f'--mode={mode}', '--length_schedule=']


def row_of(label, arguments, max_iters):
    """ Prints a row. Returns whether the training is sound. """
    try:
        # the last line of its log: before that, the speed still settles
        entry = timed(arguments, max_iters)[-1]
        fault = ''
        if entry['skipped']:
            fault = f'{entry["skipped"]} steps skipped'
    except (SystemExit, RuntimeError) as error:            # train.py has said why on stderr
        fault = f'{type(error).__name__} {error}'.splitlines()[0]
    if fault:
        print(f'{label:<28}  FAILED: {fault}', flush=True)
        return False

    # PAD counts as a token: it takes as long as any other
    tokens = entry['tokens'] / entry['step']
    ms = 1000 * tokens / entry['tokens_per_s']
    mfu = 100 * entry.get('mfu', 0)
    print(f'{label:<28}{tokens:>12,.0f}{ms:>10,.1f}{entry["tokens_per_s"]:>12,.0f}'
          f'{mfu:>8.1f}{entry["memory_gb"]:>8.2f}', flush=True)
    return True


def run(knobs):
    device = pick_device(knobs.device)
    on_gpu = device != 'cpu'
    with tempfile.TemporaryDirectory() as folder:
        print(f'{"config":<28}{"tokens a step":>12}{"ms":>10}{"tokens/s":>12}{"MFU %":>8}{"GB":>8}')

        # without a card: each config once, at a tiny size, to see whether it runs
        rows = ROWS
        more = []
        if not on_gpu:
            rows = [(name, 'false', 4) for name in LATENT_DIMS]
            more = TINY
        wrong = []
        for name, compiled, steps in rows:
            label = f'{name}, compile={compiled}'
            arguments = [*arguments_of(name, folder, on_gpu), f'--device={device}',
                         f'--compile={compiled}', *more]
            if not row_of(label, arguments, steps):
                wrong.append(label)

        # a card that is fast and wrong is of no use
        wrong += disagreements(folder, device)
    if wrong:
        stop(f'{len(wrong)} rows above failed: {", ".join(wrong)}', code=1)
