""" Every knob of every script, asked for what no knob should believe: the script does what it says,
or refuses it in one line. """
from pathlib import Path

import pytest
from safetensors.torch import load_file

import configurator
from launch import ROOT, run_each

VALUES = ('nan', 'inf', '-1', '0', '1e30', '')
SHORT = ['--depth=1', '--width=16', '--heads=1', '--latent_tokens=1', '--batch_size=4',
         '--max_iters=1', '--eval_iters=1', '--device=cpu', '--dtype=float32', '--warmup_iters=0']


def knobs_of(script):
    return configurator.read_knobs(str(ROOT / f'{script}.py'))


def is_refused(knob, value):
    """ Whether the knob itself refuses the value: the script stops before it does anything. """
    try:
        knob.read(value)
    except ValueError as error:
        assert '\n' not in str(error), error
        return True
    return False


def asked_for(script, *base):
    """ The command lines of a script: each knob with each value, after `base`. '{i}' in it is the
    number of the command. Of the values that knobs refuse one is asked for: all end in the same
    line of configurator.py. """
    refused, pairs = [], []
    for name, knob in knobs_of(script).items():
        # to a knob that takes any text, such as a path, all numbers are texts
        is_text = isinstance(knob.default, str) and not knob.rule
        for value in ('nan', '') if is_text else VALUES:
            (refused if is_refused(knob, value) else pairs).append(f'--{name}={value}')
    return [[f'{script}.py', *(argument.format(i=i) for argument in base), pair]
            for i, pair in enumerate(pairs + refused[:1])]


def judge(commands, results):
    """ What is wrong: neither exit code 0 nor one line and exit code 2. """
    for command, (code, out, err) in zip(commands, results):
        lines = [line for line in err.splitlines() if line.strip()]
        is_refused = code == 2 and len(lines) == 1 and lines[0].startswith('error: ')
        if not is_refused and code != 0:
            yield command[-1], code, err[-300:]


@pytest.mark.parametrize('script', configurator.SCRIPTS)
def test_every_knob_that_is_a_number_or_one_of_several_words_has_a_range_and_help_shows_it(script):
    help_text = configurator.help_of(str(ROOT / f'{script}.py'))
    for name, knob in knobs_of(script).items():
        values = knob.default if isinstance(knob.default, tuple) else (knob.default,)
        assert knob.rule or all(type(value) in (str, bool) for value in values), name
        assert knob.settle(knob.default) == knob.default and f'\n{name} = ' in help_text, name


@pytest.fixture(scope='module')
def here(dataset, tmp_path_factory):
    """ A folder with a short run in it. """
    folder = tmp_path_factory.mktemp('knobs')
    (code, _, err), = run_each(['train.py', f'--dataset={dataset}', *SHORT,
                                '--mode=unconditional+l2t+t2l', f'--out_dir={folder}/run'])
    assert code == 0, err
    return folder


def test_train_does_what_a_knob_says_or_refuses_it(dataset, here):
    commands = asked_for('train', f'--out_dir={here}/train{{i}}', f'--dataset={dataset}', *SHORT)
    results = run_each(*commands, cwd=here)
    assert not list(judge(commands, results))
    for command, (code, _, _) in zip(commands, results):
        out = Path(command[1].split('=')[1])
        for path in out.glob('step-*/*.safetensors') if code == 0 else ():
            assert all(w.isfinite().all() for w in load_file(path).values()), command[-1]


def base_of(script, here, dataset):
    """ The arguments that a script needs beside the knob. """
    if script == 'prepare':
        return [f'--out={here}/packed{{i}}', f'--input={dataset.parent}/lines.txt',
                '--max_documents=60', '--encoder=lsa', '--encoder_dims=4', '--vocab_size=260',
                '--max_tokens=31', '--val_fraction=.2']
    if script == 'bench':
        training = [f'--dataset={dataset}', *(arg for arg in SHORT if 'max_iters' not in arg)]
        return ['--what=trainings', f'--lines={" ".join(training)}', '--rounds=1',
                '--max_iters=4', '--device=cpu']
    of_run = [f'--out_dir={here}/run']
    few = ['--steps=2', '--latent_steps=2', '--device=cpu']
    if script == 'sample':
        return [*of_run, '--text=a red man runs', *few]
    if script == 'evaluate':
        return [*of_run, '--tasks=nelbo,l2t,t2l', '--n=3', '--draws=2', '--seeds=1', *few]
    return of_run


@pytest.mark.parametrize('script', ['prepare', 'sample', 'evaluate', 'plot', 'bench'])
def test_the_other_scripts_do_what_a_knob_says_or_refuse_it(dataset, here, script):
    commands = asked_for(script, *base_of(script, here, dataset))
    results = run_each(*commands, cwd=here, env=dict(HF_HUB_OFFLINE='1'))
    assert not list(judge(commands, results))
