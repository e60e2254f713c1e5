""" The scripts on a CUDA device that is not there (fake_cuda.py): may all tensors meet that do, for what does the host wait, is anything
float64, and are losses and samples those of the CPU? """
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from launch import HANGS, ROOT, log

PINNED = re.search(r'^torch==(\S+)', (ROOT / 'requirements.txt').read_text(), re.MULTILINE)[1]
pytestmark = [
    pytest.mark.skipif(sys.platform != 'linux' or not shutil.which('g++'), reason='builds guard.cpp: needs Linux and g++'),
    pytest.mark.skipif(torch.__version__.partition('+')[0] != PINNED, reason=f'replaces internals of torch {PINNED}'),
    pytest.mark.skipif(torch.version.cuda is not None, reason='a torch with CUDA has guards of its own: needs the one for CPUs')]

# ---- the fake device itself: what a GPU would refuse, what it would wait for, and what it would not

X = 'x = torch.ones(3, device="cuda"); '
REFUSED = {'x + torch.ones(3)': 'same device',
           'torch.rand(3, device="cuda", generator=torch.Generator().manual_seed(0))': 'cuda generator',
           'torch.rand(3, generator=torch.Generator("cuda").manual_seed(0))': 'cpu generator'}
WAITED_FOR = ['float(x[0])', 'x.nonzero()', 'x[x > 0]', 'x.cpu()', 'x.tolist()', 'torch.ones(3).to("cuda")', 'x[torch.tensor([0])]',
              'torch.tensor([1.], device="cuda")', 'x[x.long()[:1]] = 2.', 'torch.where(torch.tensor(True), x, 0)', 'x.copy_(torch.ones(3))',
              'x[0] = 2.']
FREE = ['x + torch.ones(())', 'torch.ones(3).to("cuda", non_blocking=True)', 'torch.where(x > 0, x, 0)', 'x.median()',
        'x.index_select(0, x.long()[:1])', 'torch.full((3,), 2., device="cuda")']
LINES = [*REFUSED, *WAITED_FOR, *FREE, 'x.double()']

# ---- trainings

STEPS = 2
TINY = ['--depth=2', '--width=32', '--heads=2', '--latent_tokens=2', '--batch_size=8', f'--max_iters={STEPS}', '--log_interval=2',
        '--eval_interval=2', '--eval_iters=1', '--warmup_iters=1', '--dropout=0.1', '--learning_rate=0.03',
        '--ema_decay=0.5']
TEXT = ['--streams=text,', '--mode=unconditional']

OPTION_SETS = {
    'adamw': [],
    'muon': ['--optimizer=muon'],
    'three modes': ['--mode=unconditional+l2t+t2l'],
    't2l': ['--mode=t2l'],
    'unconditional': ['--mode=unconditional'],
    'l2t+causal by Muon': ['--mode=l2t+causal', '--optimizer=muon'],
    'four modes': ['--mode=unconditional+l2t+t2l+causal'],
    'causal': ['--mode=causal', '--text_clock=false'],
    'importance freq': ['--importance=freq', '--masking=proportional', '--curriculum=true'],
    'importance learned': ['--importance=learned', '--masking=balanced'],
    'importance hybrid': ['--importance=hybrid', '--masking=inverse', '--curriculum=true'],
    'gidd': [*TEXT, '--text_process=gidd', '--text_loss_weight=dynamic'],
    'hdlm': ['--text_process=hdlm', '--clusters=8', '--hdlm_xi=0.9'],
    'ar': ['--streams=text,', '--mode=causal', '--text_clock=false'],
    'mode and length schedules': ['--mode=l2t:1,l2t+causal', '--length_schedule=16:1,32'],
    'no EMA, no guard': ['--ema_decay=0', '--guard=0', '--global_batch=16'],
    'predict_length=False': [*TEXT, '--predict_length=false', '--text_clock=false', '--seq_len=12'],
    'latents alone': ['--streams=latent,', '--mode=unconditional', '--latent_target=x0'],
    'flow in float32': ['--mode=unconditional+l2t+t2l', '--latent_schedule=rf', '--latent_target=flow', '--dtype=float32'],
}

# what may wait, and when
BEGIN = {'train.py: live = train_data.live.to(device) if train_data.latent_shape else None',
         'train.py: model = processes.add_modules(Model(model_config), config).to(device)',
         'train.py: model.importance.rarity.copy_(adaptive.rarity)', 'runs/resume.py fill'}
A_LOG_LINE = {'train.py report', 'runs/log.py StepLog.report', 'train.py check_streak'}
AN_EVALUATION = {'loss.py Loss.validate', 'diffusion.py sum_over_texts'}
A_CHECKPOINT = {'runs/resume.py State.save', 'runs/checkpoint.py save', 'runs/checkpoint.py write_files'}
NOW_AND_THEN = BEGIN | A_LOG_LINE | AN_EVALUATION | A_CHECKPOINT

# a step waits for nothing, but where an importance is learned: the device alone knows what is masked by it
LEARNED = {'processes/adaptive.py AdaptiveBatchMaker.mask_by', 'processes/adaptive.py Adaptive.emphasis', 'diffusion.py positions_of'}
OF_STEPS = {'importance learned': LEARNED, 'importance hybrid': LEARNED}
OF_BEGIN = {'hdlm': {'runs/resume.py resume_or_begin', 'processes/__init__.py after_loading', 'processes/hdlm.py HDLM.cluster_of'}}


@pytest.fixture(scope='module')
def fake_cuda(tmp_path_factory):
    """ A function: what fake_cuda.py finds in commands [script, *args], one after the other in one process. """
    folder = os.path.dirname(importlib.util.find_spec('torch').origin)
    guard = tmp_path_factory.mktemp('guard') / 'guard.so'
    subprocess.run(['g++', '-std=c++20', '-shared', '-fPIC', f'-I{folder}/include', ROOT / 'tests' / 'guard.cpp',
                    f'-L{folder}/lib', '-ltorch_cpu', '-lc10', '-o', guard], check=True)

    def execute(kind, commands):
        result = subprocess.run([sys.executable, ROOT / 'tests' / 'fake_cuda.py', guard, kind], capture_output=True, text=True,
                                input=json.dumps([list(map(str, command)) for command in commands]), timeout=HANGS)
        assert 'FOUND' in result.stdout, result.stderr
        return json.loads(result.stdout.split('FOUND')[1])
    return execute


@pytest.fixture(scope='module')
def on_shapes(fake_cuda, dataset, tmp_path_factory):
    """ {option set, or a line of LINES: what is found}, on tensors without values. """
    out = tmp_path_factory.mktemp('shapes')
    commands = {name: ['train.py', f'--dataset={dataset}', f'--out_dir={out}/{i}', '--device=cuda', *TINY, *args]
                for i, (name, args) in enumerate(OPTION_SETS.items())}
    commands |= {line: ['-c', X + line] for line in LINES}
    return dict(zip(commands, fake_cuda('shapes', commands.values())))


@pytest.mark.parametrize('name', OPTION_SETS)
def test_a_training_meets_no_tensor_of_another_device_and_waits_for_what_it_may(on_shapes, name):
    found = on_shapes[name]
    assert found['code'] == 0, found['err'][-3000:]
    waits = found['waits']
    assert set(waits) <= NOW_AND_THEN | OF_BEGIN.get(name, set()) | OF_STEPS.get(name, set())
    assert not found['float64'], 'a device without float64 could not train this'


def test_every_wait_that_is_allowed_happens(on_shapes):
    """ Else a list above would be stale. (Tensors without values are not saved.) """
    found = {place for name in OPTION_SETS for place in on_shapes[name]['waits']}
    allowed = NOW_AND_THEN - A_CHECKPOINT | {'runs/resume.py State.save'}
    assert found == allowed.union(*OF_STEPS.values(), *OF_BEGIN.values())


# ---- the values: trainings, samples and figures of a device that keeps them, and of the CPU

VALUED = ['three modes', 'four modes', 'importance freq', 'importance hybrid', 'gidd', 'hdlm', 'causal', 'predict_length=False']
RESUMED = 'four modes'

SAY = '--text=a red man runs near the park'
L2T = [SAY, '--mode=l2t', '--num_samples=2']
# (what, of which run, sample.py's arguments); those with steps are asked for 2 and for 4
STEPWISE = [(' '.join(['l2t', name, *more]), RESUMED, [*L2T, f'--sampler={name}', *more]) for name, *more in (
    ('ancestral', '--guidance=2'), ('cached',), ('first_hitting', '--nucleus=0.9'), ('confidence', '--guidance=2'), ('remdm',), ('dfm',),
    ('confidence', '--score=margin', '--end_penalty=1'), ('reparam', '--repeat_cap=0.2'))]
STEPWISE += [(f'joint, {name}', RESUMED, ['--mode=unconditional', f'--sampler={name}']) for name in ('ancestral', 'remdm')]
STEPWISE += [('infill', RESUMED, ['--text=a red [MASK] runs near the [MASK:3]', '--mode=infill']),
             ('by importance', 'importance hybrid', [*L2T, '--sampler=confidence', '--by_importance=true', '--prefer=uncertain']),
             ('length', 'predict_length=False', ['--num_samples=2']),
             ('gidd', 'gidd', ['--num_samples=2'])]
OTHERS = [(f't2l, {name}', RESUMED, [SAY, '--mode=t2l', f'--solver={name}', '--latent_steps=3', '--guidance=2'])
          for name in ('ddim', 'heun', 'ancestral')]
OTHERS += [('t2l of x0', 'three modes', [SAY, '--mode=t2l', '--latent_steps=3']),
           ('autoregressive', RESUMED, L2T),
           ('autoregressive alone', 'causal', L2T),
           ('continued', 'causal', ['--text=a red man runs [MASK:*]', '--mode=infill']),
           ('rerank', RESUMED, [SAY, '--rerank=2', '--steps=3']),
           ('blocks', RESUMED, [*L2T, '--sampler=ancestral', '--block_size=8', '--steps=6']),
           ('t2l2t', RESUMED, [SAY, '--mode=t2l2t', '--latent_steps=3', '--steps=3']),
           ('embed', RESUMED, [SAY, '--mode=embed']),
           ('corrected', 'gidd', ['--steps=3', '--self_correct=2']),
           ('hdlm', 'hdlm', [*L2T, '--steps=3'])]
SAMPLES = [(f'{what}, {n} steps', run, [*args, f'--steps={n}']) for what, run, args in STEPWISE for n in (2, 4)] + OTHERS

# tasks whose figures are functions of the weights, and tasks that sample
FIGURES = [(RESUMED, 'nelbo,orders'), ('three modes', 'nelbo'), ('importance freq', 'importance'),
           ('importance hybrid', 'importance'), ('gidd', 'nelbo'), ('hdlm', 'nelbo'), ('causal', 'nelbo'), ('predict_length=False', 'nelbo')]
TASKS = [(RESUMED, 'l2t,t2l,infill,unconditional'), ('gidd', 'self_correction')]

# what sampling may wait for, once a batch: the weights and the texts on their way, and the results
A_BATCH = {'runs/checkpoint.py load_model', 'sampling/loading.py load_run', 'sampling/writing.py write', 'sampling/denoise.py make_denoise',
           'samplers.py init_state', 'sampling/directions.py t2l', 'sampling/directions.py unconditional'}


@pytest.fixture(scope='module')
def on_values(fake_cuda, dataset, tmp_path_factory):
    """ {(script, what, device): what is found}, and the folder with the runs. """
    folder = tmp_path_factory.mktemp('values')
    commands = {}
    for device in ('cpu', 'cuda'):
        def of(name, device=device):
            return f'--out_dir={folder}/{device}/{VALUED.index(name)}'
        common = [f'--device={device}', '--dtype=float32']
        for name in VALUED:
            train = ['train.py', f'--dataset={dataset}', of(name), *common, *TINY, *OPTION_SETS[name]]
            commands['train', name, device] = train
        commands['resume', RESUMED, device] = [*commands['train', RESUMED, device], f'--max_iters={2 * STEPS}']

        # the same weights for both devices
        for i, (what, name, args) in enumerate(SAMPLES):
            if '--mode=t2l' in args or '--mode=embed' in args:
                args = [*args, f'--save={folder}/{device}/{i}.npy']
            commands['sample', what, device] = ['sample.py', of(name, 'cpu'), *common, *args]
        for name, tasks in FIGURES + (TASKS if device == 'cuda' else []):
            commands['evaluate', f'{name}: {tasks}', device] = [
                'evaluate.py', of(name), *common, f'--dataset={dataset}', f'--tasks={tasks}', '--n=2', '--draws=2', '--steps=2',
                '--latent_steps=2', '--seeds=1', '--n_orders=1']
    for line in LINES:
        commands['-c', line, 'cuda'] = ['-c', X + line]
    return dict(zip(commands, fake_cuda('values', commands.values()))), folder


def found_of(on_values, script):
    """ {what: found on the CPU, found on CUDA}. """
    found, _ = on_values
    return {what: (found[kind, what, 'cpu'], found[kind, what, 'cuda']) for kind, what, device in found
            if kind == script and device == 'cpu'}


def close(a, b):
    """ Equal to 1e-4, or so small that float32 has no digits of it. """
    return abs(a - b) <= 1e-4 * max(abs(a), abs(b), 0.1)


def numbers_of(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers_of(part)]
    return [value] if isinstance(value, (int, float)) else []


def test_losses_are_those_of_the_cpu_also_after_a_resume(on_values):
    _, folder = on_values
    for script in ('train', 'resume'):
        for name, (cpu, cuda) in found_of(on_values, script).items():
            assert cpu['code'] == cuda['code'] == 0, (name, cpu['err'], cuda['err'])
    for i, name in enumerate(VALUED):
        cpu, cuda = log(folder / 'cpu' / str(i)), log(folder / 'cuda' / str(i))
        assert cpu.keys() == cuda.keys() and len(cpu) == (4 if name == RESUMED else 2)
        for step in cpu:
            a, b = numbers_of(cpu[step]), numbers_of(cuda[step])
            assert len(a) == len(b) and all(map(close, a, b)), (name, cpu[step], cuda[step])


def test_samples_are_those_of_the_cpu(on_values):
    _, folder = on_values
    for i, (what, (cpu, cuda)) in enumerate(found_of(on_values, 'sample').items()):
        assert cpu['code'] == cuda['code'] == 0, (what, cpu['err'], cuda['err'])
        arrays = [folder / device / f'{i}.npy' for device in ('cpu', 'cuda')]
        if arrays[0].exists():
            assert np.allclose(*map(np.load, arrays), rtol=1e-4, atol=1e-5), what
            continue
        # without the table of knobs
        cpu, cuda = (re.sub(r'.* the command line\n', '', found['out']) for found in (cpu, cuda))
        assert '->' in cpu and cpu == cuda, what


def test_figures_are_those_of_the_cpu(on_values):
    _, folder = on_values
    for (kind, what, _), result in on_values[0].items():
        assert kind != 'evaluate' or result['code'] == 0, (what, result['err'])
    for name, tasks in FIGURES:
        cpu, cuda = (json.loads((folder / device / str(VALUED.index(name)) / 'results.json').read_text()) for device in ('cpu', 'cuda'))
        keys = [key for key in cpu if key.split('/')[0] in tasks.split(',')]
        assert len(keys) > 5 and all(close(cpu[key], cuda[key]) for key in keys), (name, cpu, cuda)


def test_no_step_of_a_sampler_waits(on_values):
    """ As many waits in four steps as in two, and all of them once a batch. """
    found = found_of(on_values, 'sample')
    for what, _, _ in STEPWISE:
        (_, two), (_, four) = found[f'{what}, 2 steps'], found[f'{what}, 4 steps']
        assert two['waits'] == four['waits'] and set(four['waits']) <= A_BATCH, (what, two['waits'], four['waits'])
    assert set(found['t2l of x0'][1]['waits']) <= A_BATCH


def test_nothing_is_float64_on_the_device(on_values):
    """ In training, sampling and evaluation. """
    for (kind, what, device), found in on_values[0].items():
        assert kind == '-c' or not found['float64'], (kind, what, found['float64'])


@pytest.mark.parametrize('line', LINES)
def test_the_fake_device_sees_what_a_gpu_would_refuse_and_what_it_would_wait_for(on_shapes, on_values, line):
    for found in (on_shapes[line], on_values[0]['-c', line, 'cuda']):
        if line in REFUSED:
            assert found['code'] == 1 and REFUSED[line] in found['err']
            continue
        assert found['code'] == 0, found['err']
        assert sum(found['waits'].values()) == (line in WAITED_FOR)
        assert bool(found['float64']) == (line == 'x.double()')
