""" Every knob of every script, asked for what no knob should believe: the script does what it says,
or refuses it in one line. """
import os
import re

import pytest
from safetensors.torch import load_file

import configurator
from launch import ROOT, flags, run_together

VALUES = ('nan', 'inf', '-1', '0', '1e30', '')
SHORT = ['--depth=1', '--width=16', '--heads=1', '--latent_tokens=1', '--batch_size=4',
         '--max_iters=1', '--eval_rows=4', '--device=cpu', '--dtype=float32', '--warmup_iters=0']


def knobs_of(script):
    return configurator.read_knobs(os.path.join(ROOT, f'{script}.py'))


def knob_refuses(knob, value):
    """ Whether the knob itself refuses the value: then the script stops in `configure`. """
    try:
        knob.read(value)
    except ValueError as error:
        assert '\n' not in str(error), error
        return True
    return False


def asked_for(script):
    """ The flags of a script: each knob with each value. Of the values that a knob itself refuses
    one is asked for. """
    refused, asked = [], []
    for name, knob in knobs_of(script).items():
        # a knob that takes any text, such as a path, has a text and none
        is_text = isinstance(knob.default, str) and not knob.rule
        for value in ('nan', '') if is_text else VALUES:
            (refused if knob_refuses(knob, value) else asked).append(f'--{name}={value}')
    return asked + refused[:1]


@pytest.mark.parametrize('script', configurator.SCRIPTS)
def test_every_knob_that_is_a_number_or_a_word_has_a_range_and_help_shows_it(script):
    help_text = configurator.help_of(os.path.join(ROOT, f'{script}.py'))
    for name, knob in knobs_of(script).items():
        values = knob.default if isinstance(knob.default, tuple) else (knob.default,)
        assert knob.rule or all(type(value) in (str, bool) for value in values), name
        assert knob.checked(knob.default) == knob.default, name
        assert re.search(f'\n{name}(: [a-z |A-Z]+)? = ', help_text), name


@pytest.fixture(scope='module')
def a_run(dataset, tmp_path_factory):
    """ A short run. """
    out = tmp_path_factory.mktemp('knobs') / 'run'
    (code, _, err), = run_together(['train.py', *flags(dataset=dataset, out_dir=out), *SHORT,
                                    '--mode=unconditional+l2t+t2l'])
    assert code == 0, err
    return out


def base_of(script, a_run, dataset):
    """ The arguments of a short command; it writes into the folder out{i}, if it writes one. """
    run = f'--out_dir={a_run}'
    small = flags(steps=2, latent_steps=2, device='cpu')
    training = ' '.join([f'--dataset={dataset}', *(arg for arg in SHORT if 'max_iters' not in arg)])
    return {
        'train': [*flags(out_dir='out{i}', dataset=dataset), *SHORT],
        'prepare': flags(out='out{i}', input=dataset.parent / 'lines.txt', max_documents=60,
                         encoder='lsa', encoder_dims=4, vocab_size=260, max_tokens=31,
                         val_fraction=.2),
        'sample': [run, '--text=a red man runs', *small],
        'evaluate': [run, '--tasks=nelbo,l2t,t2l', '--n=3', '--draws=2', *small],
        'plot': [run],
        'bench': flags(what='trainings', lines=training, rounds=1, max_iters=4,
                       device='cpu')}[script]


@pytest.mark.parametrize('script', configurator.SCRIPTS)
def test_a_script_does_what_a_knob_says_or_refuses_it(dataset, a_run, here, script):
    base, asked = base_of(script, a_run, dataset), asked_for(script)
    commands = [[f'{script}.py', *(one.format(i=i) for one in base), flag]
                for i, flag in enumerate(asked)]
    for flag, (code, _, err) in zip(asked, run_together(*commands, cwd=here)):
        lines = [line for line in err.splitlines() if line.strip() and 'warning: ' not in line]
        is_refused = code == 2 and len(lines) == 1 and lines[0].startswith('error: ')
        assert code == 0 or is_refused, (flag, code, err[-300:])

    # what was trained is finite
    for path in here.glob('out*/step-*/*.safetensors'):
        assert all(w.isfinite().all() for w in load_file(path).values()), path
