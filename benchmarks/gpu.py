"""
Everything that one wants to know of a card, in one command and a few minutes: does all of it run
there, is it right, how fast is it?

    python bench.py --what=gpu                                   # or: make gpu
    python bench.py --what=gpu --minutes=30 --parts=speed,peers  # a part of it, with more time
    python bench.py --what=gpu --device=cpu                      # at a tiny size: does this work?

    machine    versions; rates of a matrix product and of a copy
    head       the text head with its loss, at two vocabularies
    attention  which kernel attends at the shapes of our configs, and what others would take
    data       a small dataset and a run, for what follows
    tests      the tests of what is particular to CUDA
    losses     three steps of every option set in float32, beside the CPU's
    options    the same sets in bfloat16: a step that waits for the card is an error
    texts      every sampler and solver, and the evaluation
    resume     SIGTERM, resume, and the weights of a run that was never stopped
    cards      ddp, fsdp and a killed rank, where there are two cards
    speed      train.py with our configs on random data: eager and compiled
    peers      a training step of other libraries at the same shapes (benchmarks/peers.py)
    training   config/multi30k_l2t.py for the rest of the time, where its dataset is there

A job is a function that returns {row: {field: value}}. It runs in a forked process: what it breaks
dies with it. A job that fails is a row with one line that says why, and the next one runs; its
whole output is in a file beside the table. A job for which no time is left is skipped.
"""
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from benchmarks import checks, speeds
from benchmarks.machine import attention, head, rates, versions
from benchmarks.watched import ROOT, Skipped
from configurator import stop
from runs.checkpoint import pick_device
from runs.run_folder import git_commit
from samplers import SAMPLERS
from sampling.solvers import SOLVERS

PARTS = ('machine', 'head', 'attention', 'data', 'tests', 'losses', 'options', 'texts', 'resume',
         'cards', 'speed', 'peers', 'training')

# -----------------------------------------------------------------------------
# The jobs of each part: (name, function, arguments). On a CPU everything has a tiny size

def jobs_of_the_card(device, on_gpu):
    """ What it can do, before any of our trainings. """
    n = 8192 if on_gpu else 256
    of_head = (8192, 768, (4096, 50_258, 50_304)) if on_gpu else (64, 32, (300, 304))
    of_attention = []
    for name, sizes in speeds.shapes(on_gpu).items():
        shape = speeds.attention_shape(sizes)
        of_attention.append((name, attention, (device, name, *shape)))
    return {'machine': [('versions', versions, (device,)), ('rates', rates, (device, n))],
            'head': [('head', head, (device, *of_head))],
            'attention': of_attention}


def jobs_of_checks(device, on_gpu, n_cards, folder, end):
    """ Does everything run there, and is it right? """
    data = [('prepare.py', checks.prepare_data, (folder,)),
            ('train.py', checks.train_run, (folder, device))]
    tests = [('tests/test_cuda.py', speeds.run_tests, (device, end))]

    # on a CPU both sides of a comparison are the CPU: one is enough
    compared = checks.OPTIONS if on_gpu else ['mixed']
    losses = [(name, checks.compare_losses, (folder, name, device)) for name in compared]
    options = [(name, checks.run_options, (folder, name, device)) for name in checks.OPTIONS]

    texts = [(f'sampler {name}', checks.sample, (folder, name, device)) for name in SAMPLERS]
    texts += [(f'solver {name}', checks.sample_latents, (folder, name, device))
              for name in SOLVERS]
    texts += [('evaluate.py', checks.evaluate, (folder, device))]

    resume = [('SIGTERM, resume', checks.preempt, (folder, device))]
    cards = [('ddp', checks.two_cards, (folder, 'ddp', device, n_cards)),
             ('fsdp', checks.two_cards, (folder, 'fsdp', device, n_cards)),
             ('a killed rank', checks.kill_a_rank, (folder, device, n_cards))]
    return dict(data=data, tests=tests, losses=losses, options=options, texts=texts,
                resume=resume, cards=cards)


def jobs_of_speed(device, on_gpu, folder, end):
    """ How fast is it? """
    speed = []
    for name in speeds.shapes(on_gpu):
        for how in ('eager', 'compiled'):
            speed.append((f'{name} {how}', speeds.time_config, (folder, name, how, device)))

    # two sides at a time: all of them might not fit into the memory
    pairs = [('ours', 'gpt') if on_gpu else ('ours',), ('diffusers', 'mmdit')]
    peers = []
    for name in speeds.of_peers(on_gpu):
        for sides in pairs:
            peers.append((f'{name} {" ".join(sides)}', speeds.time_peers, (name, sides, device)))

    training = [('config/multi30k_l2t.py', speeds.train_for_real, (device, end))]
    return dict(speed=speed, peers=peers, training=training)


def list_jobs(device, n_cards, folder, end):
    """ {part: its jobs}. end: when the time is up, as time.monotonic() has it. """
    on_gpu = device != 'cpu'
    jobs = {**jobs_of_the_card(device, on_gpu),
            **jobs_of_checks(device, on_gpu, n_cards, folder, end),
            **jobs_of_speed(device, on_gpu, folder, end)}
    assert tuple(jobs) == PARTS
    return jobs

# -----------------------------------------------------------------------------
# A process that does one job after the other, until one fails

def reason_of(error):
    """ What a job failed with, and the innermost line of ours. """
    first = (str(error).strip() or 'no message').split('\n')[0]
    lines = [frame for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename.startswith(str(ROOT)) and '.venv' not in frame.filename]
    where = f' ({Path(lines[-1].filename).name}:{lines[-1].lineno})' if lines else ''
    return f'{type(error).__name__}: {first}{where}'


def work(jobs, outputs, answers):
    """ In a process of its own: sends the rows of each job, and stops at the first that fails. """
    os.setsid()                                            # so that its children end with it
    for (name, function, arguments), path in zip(jobs, outputs):
        # what it prints, and what its own processes print, goes into a file
        sys.stdout = sys.stderr = open(path, 'w', buffering=1)
        for number in (1, 2):
            os.dup2(sys.stdout.fileno(), number)
        try:
            rows = function(*arguments)
        except Skipped as reason:
            rows = {name: dict(skipped=str(reason))}
        except BaseException as error:                     # a script may leave by SystemExit
            traceback.print_exc()
            answers.send({name: dict(failed=reason_of(error))})
            return
        answers.send(rows)


def run_jobs(jobs, outputs, end, method):
    """ Yields the rows of each job; its prints go into the file of `outputs` in its place. After a
    job that fails, the others go on in a new process. """
    context = multiprocessing.get_context(method)
    while jobs and time.monotonic() < end:
        answers, send = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(jobs, outputs, send))
        process.start()
        send.close()

        try:
            is_well = True
            while jobs and is_well:
                rows = receive(answers, jobs[0][0], end)
                is_well = not any('failed' in row for row in rows.values())
                jobs, outputs = jobs[1:], outputs[1:]
                yield rows
        finally:                                           # nothing of it stays behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    if jobs:
        yield {name: dict(skipped='no time left') for name, _, _ in jobs}


def receive(answers, name, end):
    """ The rows of a job, or why there are none. """
    if not answers.poll(max(0, end - time.monotonic())):
        return {name: dict(failed='it was not done when the time was up')}
    try:
        return answers.recv()
    except EOFError:
        return {name: dict(failed='its process died')}

# -----------------------------------------------------------------------------
# The table

def in_table(value):
    """ A cell. """
    if value is None:
        return '-'
    if isinstance(value, float):
        return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'
    return f'{value:,}' if isinstance(value, int) else str(value)


def print_part(title, rows):
    """ One line a row, with the fields of all rows as columns; what failed or was skipped says so.
    """
    fields = []
    for row in rows.values():
        fields += [name for name in row if name not in fields and name not in ('failed', 'skipped')
                   and not isinstance(row[name], list)]
    cells = {name: [in_table(row[field]) if field in row else '' for field in fields]
             for name, row in rows.items()}
    widths = [max(len(field), *(len(line[i]) for line in cells.values()))
              for i, field in enumerate(fields)]

    print('  '.join([f'{title:<44}'] + [f'{field:>{w}}' for field, w in zip(fields, widths)]))
    for name, row in rows.items():
        line = [f'  {name:<42}'] + [f'{cell:>{w}}' for cell, w in zip(cells[name], widths)]
        for why in ('failed', 'skipped'):
            if why in row:
                line = [f'  {name:<42}', f'{why}: {row[why]}']
        print('  '.join(line).rstrip())
    print(flush=True)


def look_around(name):
    """ The device, which must work, and how many cards there are. """
    device = pick_device(name)
    torch.zeros(1, device=device)
    return {'device': dict(device=str(device), cards=torch.cuda.device_count())}


def find_device(name, output, end):
    """ (device, number of cards, how to start processes). This process itself never asks the CUDA
    driver, or the forked ones could not use it; where they cannot, new ones are started. """
    for method in ('fork', 'spawn'):
        rows, = run_jobs([('device', look_around, (name,))], [output], end, method)
        if 'failed' not in rows['device']:
            return rows['device']['device'], rows['device']['cards'], method
    stop(f'device={name}: {rows["device"]["failed"]}')


def run(knobs):
    if torch.cuda.is_initialized():
        stop('what=gpu goes alone: its processes are forked, and CUDA is in use here already')
    chosen = set(knobs.parts.split(',') if knobs.parts else PARTS)
    if chosen - set(PARTS):
        stop(f'parts={knobs.parts!r}: choose from {", ".join(PARTS)}')
    if chosen & {'losses', 'options', 'texts', 'resume', 'cards'}:
        chosen.add('data')

    save = Path(knobs.save or 'out/gpu/table.json').resolve()
    logs = save.parent / f'{save.stem}-jobs'
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=save.parent) as folder:
        run_parts(chosen, knobs, save, logs, Path(folder))


def run_parts(chosen, knobs, save, logs, folder):
    """ Prints the rows of each part, and writes the table anew after each row. logs: for what the
    jobs print. folder: for the data to work on. """
    began = time.monotonic()
    end = began + 60 * knobs.minutes
    device, n_cards, method = find_device(knobs.device, logs / 'device.txt', end)
    if device != 'cpu':
        torch.set_num_threads(len(os.sched_getaffinity(0)))              # as train.py has them
    table = dict(command=sys.argv[1:], commit=git_commit(), device=device, minutes=knobs.minutes,
                 threads=torch.get_num_threads(), seconds={}, parts={})

    for part, jobs in list_jobs(device, n_cards, folder, end).items():
        if part not in chosen:
            continue
        rows = table['parts'][part] = {}
        part_began = time.monotonic()
        outputs = [logs / f'{part} {name}.txt'.replace('/', '-') for name, _, _ in jobs]
        for found in run_jobs(jobs, outputs, end, method):
            rows.update(found)
            table['seconds'][part] = round(time.monotonic() - part_began, 1)
            save.write_text(json.dumps(table, indent=1))
        print_part(f'{part}, {table["seconds"][part]:.0f} s', rows)

    failed = sum('failed' in row for rows in table['parts'].values() for row in rows.values())
    print(f'{device}, commit {table["commit"]}, {time.monotonic() - began:.0f} s, {failed} failed; '
          f'{save}')
