""" How our training step grows: one of its sizes at a time, halved and doubled. """
import statistics
import sys

import torch

from benchmarks import peers
from benchmarks.step import Worker, matmul_rate, write_table
from configurator import stop


def points_of(scale, base):
    """ {label: shape}: the base, whose label is empty, and what `scale` changes in it. """
    if set(scale.split(',')) - {'depth', 'width', 'length', 'batch'}:
        stop(f'scale={scale!r}: choose from depth, width, length, batch')
    points = {'': base}
    for name in scale.split(','):
        for factor in (.5, 2):
            size = int(base[name] * factor)
            points[f'{name} {size}'] = base | {name: size}
    return points


def measure(label, shape, setting, knobs):
    """ Seconds, memory, operations and parameters of a step, and the rate of a matrix product. """
    shape = shape | dict(heads=max(1, shape['width'] // 64))
    worker = Worker('ours', shape, setting, knobs)
    answer = worker.turn(knobs.seconds)
    worker.end()
    if 'error' in answer:
        stop(f'{label or "as it is"}: {answer["error"]}')
    tokens = shape['batch'] * shape['length']
    return answer | worker.ready | dict(peak=matmul_rate(knobs.device), tokens=tokens)


def print_row(label, answers, base):
    """ A line of the table: medians over rounds, beside those of the base. """
    seconds = statistics.median(a['seconds'] for a in answers)
    base_seconds = statistics.median(a['seconds'] for a in base)
    share = statistics.median(a['flops'] / a['seconds'] / a['peak'] for a in answers)
    a = answers[0]
    work = a['flops'] / base[0]['flops']
    print(f'{label or "as it is":<12}{1000 * seconds:>8.1f}{a["tokens"] / seconds:>10,.0f}'
          f'{seconds / base_seconds:>7.2f}{a["flops"] / 1e9:>8.0f}{work:>7.2f}'
          f'{share:>10.0%}{a["parameters"] / 1e6:>9.1f}{a["memory_gb"] or 0:>6.2f}')


def run(knobs):
    base = peers.SHAPES[knobs.shape]
    points = points_of(knobs.scale, base)
    setting = knobs.settings.split(',')[-1]
    table = {label: [] for label in points}
    for i in range(knobs.rounds):
        for label, shape in points.items():
            table[label].append(measure(label, shape, setting, knobs))
        print(f'round {i + 1}/{knobs.rounds}', flush=True)

    sizes = ', '.join(f'{name} {value:,}' for name, value in base.items())
    print(f'\n{knobs.shape}: {sizes}; {setting}')
    print(f'{"":<12}{"ms":>8}{"tokens/s":>10}{"time":>7}{"GFLOP":>8}{"work":>7}{"of matmul":>10}'
          f'{"M params":>9}{"GB":>6}')
    for label, answers in table.items():
        print_row(label, answers, table[''])
    if knobs.save:
        write_table(knobs.save, dict(command=sys.argv[1:], shape=base, setting=setting,
                                     torch=torch.__version__, threads=knobs.threads, rows=table))
