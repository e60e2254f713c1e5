"""
docs/extending.md as sentences: every extension on that page is made here as the page says, word for
word, in a copy of the tree, and used.
"""
import ast
import json
import re
import shutil
import wave

import numpy as np
import pytest

from launch import ROOT, TINY, run_code, run_each
from runs import checkpoint
from test_commands import commands_of, problems
from test_encoders import save_encoder

PAGE = (ROOT / 'docs/extending.md').read_text()
EXTENSIONS = ['A loss weighting', 'A change inside the block', 'A sampler', 'An encoder', 'A text process', 'A task', 'A modality']

# a fenced block with the line above it; a line that ends in "`path`:" says what file a python block is of
BLOCK = re.compile(r'(?:^(?!```)([^\n]+)\n+)?^```(python|diff)\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks_of(extension):
    """ [(path or None, kind, text)] of the section of an extension, and the files that its prose names. """
    section = re.split(r'^## ', PAGE.split(f'\n## {extension}\n')[1], flags=re.MULTILINE)[0]
    found = []
    assert len(BLOCK.findall(section)) == section.count('```python') + section.count('```diff')
    for before, kind, text in BLOCK.findall(section):
        path = re.search(r'(?:The file|In) `([\w/]+\.py)`:$', before)
        if kind == 'diff' or path:
            found.append((path and path[1], kind, text))
    prose = re.sub(r'^```.*?^```$', '', section, flags=re.MULTILINE | re.DOTALL)
    return found, set(re.findall(r'`([\w/]+\.py)`', prose))


def n_code_lines(source):
    """ Lines of a Python source without comments, docstrings and blank lines. """
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith('#') and number not in docstrings for number, line in lines)


def apply_diff(tree, diff, named):
    """ Changes the one file of the tree that has the old lines of a diff, in a row and once. It must be one of those named. """
    lines = diff.splitlines(keepends=True)
    old = ''.join(line[1:] for line in lines if line[0] != '+')
    new = ''.join(line[1:] for line in lines if line[0] != '-')
    files = [path for folder in ('.', 'processes', 'corpora', 'sampling') for path in sorted((tree / folder).glob('*.py'))]
    holders = [path for path in files if old in path.read_text()]
    assert len(holders) == 1 and holders[0].read_text().count(old) == 1, (diff, holders)
    assert str(holders[0].relative_to(tree)) in named, (diff, holders, named)
    holders[0].write_text(holders[0].read_text().replace(old, new))


def extended(tmp_path_factory, extensions):
    """ A copy of the tree with these extensions of the page. """
    tree = tmp_path_factory.mktemp('extended') / 'tree'
    hidden = shutil.ignore_patterns('.*', 'data', 'out', 'tests', 'results', '__pycache__')
    shutil.copytree(ROOT, tree, ignore=hidden)
    for extension in extensions:
        blocks, named = blocks_of(extension)
        for path, kind, text in blocks:
            if kind == 'diff':
                apply_diff(tree, text, named)
            elif (tree / path).exists():                                 # a function, above the table that will name it
                source = (tree / path).read_text()
                assert source.count('\nSAMPLERS = {') == 1
                (tree / path).write_text(source.replace('\nSAMPLERS = {', f'\n{text}\n\nSAMPLERS = {{'))
            else:
                (tree / path).write_text(text)
    return tree


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    return extended(tmp_path_factory, [name for name in EXTENSIONS if name != 'A change inside the block'])


@pytest.mark.parametrize('extension', EXTENSIONS)
def test_an_extension_is_under_30_lines_of_code_in_one_file_and_a_few_that_enter_it(extension):
    blocks, _ = blocks_of(extension)
    entered = sum(line.startswith('+') for _, kind, text in blocks if kind == 'diff' for line in text.splitlines())
    written = sum(n_code_lines(text) for _, kind, text in blocks if kind == 'python')
    assert blocks and written < 35 and written + entered < 40, (written, entered)
    assert sum(kind == 'python' for _, kind, _ in blocks) <= 1


def test_the_commands_of_the_page_are_right_where_its_extensions_are_made(tree):
    commands = commands_of('docs/extending.md')
    wrong = problems(commands, tree)
    assert len(commands) >= 10 and not wrong, '\n'.join(wrong)


def test_the_trainings_of_the_page_train_where_its_extensions_are_made(tree, dataset, tmp_path):
    here = [f'--dataset={dataset}', *TINY, '--max_iters=2', '--eval_iters=1']
    trainings = [command.line.split()[1:] for command in commands_of('docs/extending.md')
                 if ' train.py ' in command.line and '--dataset=' not in command.line]
    assert len(trainings) >= 2
    for rc, _, err in run_each(*([*args, *here, f'--out_dir={tmp_path}/{i}'] for i, args in enumerate(trainings)), cwd=tmp_path, root=tree):
        assert rc == 0, err


def test_a_sampler_a_text_process_and_a_task_of_the_page_work_in_training_sampling_and_evaluation(tree, dataset, finished, tmp_path):
    data, here, whole = f'--dataset={dataset}', f'--out_dir={tmp_path}/early', tmp_path / 'whole'
    shutil.copytree(finished, whole)                                     # evaluate.py writes into the run folder
    small = ['--device=cpu', '--dtype=float32']
    sampled, trained, joint, bound, measured, refused = run_each(
        ['sample.py', f'--out_dir={whole}', '--text=a red dog runs near the park number 7', '--sampler=leftmost', '--steps=4', *small],
        ['train.py', data, here, *TINY, '--text_process=early', '--text_clock=false', '--mode=unconditional+l2t+t2l'],
        ['sample.py', here, '--mode=unconditional', '--sampler=leftmost', *small],
        ['evaluate.py', here, '--tasks=nelbo', '--n=8', *small],
        ['evaluate.py', f'--out_dir={whole}', '--tasks=length', '--n=8', '--sampler=leftmost', '--steps=4', *small],
        ['train.py', data, f'--out_dir={tmp_path}/late', *TINY, '--text_process=late'],
        cwd=tmp_path, root=tree)
    for rc, out, err in (sampled, trained, bound, measured):
        assert rc == 0 and not err, err
    assert '12/12' in trained[1] and 'nelbo' in bound[1]
    assert joint[0] == 2 and '32 of 128 network calls; joint sampling' in joint[2] and joint[2].count('\n') == 1, joint[2]
    assert refused[0] == 2 and 'masked | gidd | hdlm | early' in refused[2]

    # the task has its controls, and the process its schedule, in what is written
    figures = json.loads((whole / 'results.json').read_text())
    assert {key.split('length/')[-1] for key in figures if key.startswith('length/')} >= {'difference', 'shuffled/difference', 'null/difference'}
    assert json.loads((tmp_path / 'early/config.json').read_text())['text_process'] == 'early'


def test_the_sampler_of_the_page_unmasks_from_left_to_right_and_draws_from_the_model(tree):
    """ On the toy of 81 texts, whose optimal denoiser is a table. In a process of its own: the modules are those of the copy. """
    code = f"""
import sys
sys.path[:0] = [{str(tree)!r}, {str(ROOT / 'tests')!r}]
import torch
import samplers, toys
from diffusion import MaskedText
assert samplers.__file__.startswith({str(tree)!r})
p, table = toys.optimal_denoiser()
n, rng, seen = 20_000, torch.Generator().manual_seed(0), []

def denoise(tokens, t, positions):
    return table[toys.index(tokens)].flatten(0, 1)[positions]

tokens = torch.full((n, toys.L), toys.MASK)
drawn = samplers.leftmost(denoise, samplers.make_propose(1.0, 1.0, rng), MaskedText(toys.V), tokens,
                          torch.zeros(n, toys.L, dtype=torch.bool), toys.L, rng,
                          lambda x, *said: seen.append((x == toys.MASK).unique(dim=0).tolist()))
expected = [[[i > step for i in range(toys.L)]] for step in range(toys.L)]
assert seen == expected, seen

# counts of the 81 texts: chi squared with 80 degrees of freedom, at most six standard deviations above its mean
counts = toys.TEXTS.eq(drawn[:, None]).all(-1).sum(0)
chi_squared = ((counts - n * p) ** 2 / (n * p)).sum().item()
assert chi_squared < 80 + 6 * 160 ** .5, chi_squared
"""
    result = run_code(code)
    assert result.returncode == 0, result.stderr


def test_the_encoder_of_the_page_is_a_row_with_all_its_settings(tree, tmp_path):
    folder = save_encoder(tmp_path / 'bert')
    code = f"""
import sys
sys.path.insert(0, {str(tree)!r})
import encoders
encoder = encoders.load_encoder('e5_small', dimension=32, folder={folder!r})
assert encoder.record['id'] == 'intfloat/e5-small-v2' and encoder.record['prefix'] == 'query: ', encoder.record
assert encoder(['a dog runs', 'a cat']).shape == (2, 1, 32)
"""
    result = run_code(code)
    assert result.returncode == 0, result.stderr


def test_the_loss_weighting_and_the_block_of_the_page_train_and_are_used(tmp_path_factory, dataset, tmp_path):
    tree = extended(tmp_path_factory, EXTENSIONS)
    data = f'--dataset={dataset}'
    root, other, sampled = run_each(['train.py', data, f'--out_dir={tmp_path}/root', *TINY, '--mode=l2t', '--text_loss_weight=root'],
                                    ['train.py', data, f'--out_dir={tmp_path}/bound', *TINY, '--mode=l2t'], ['train.py', '--help'],
                                    cwd=tmp_path, root=tree)
    assert root[0] == other[0] == 0, root[2] + other[2]
    losses = [json.loads((tmp_path / name / 'training_log.jsonl').read_text().split('\n')[0])['loss'] for name in ('root', 'bound')]
    assert losses[0] < losses[1] and 'root' in sampled[1]
    model = checkpoint.read_tensors(tmp_path / 'root' / 'step-00000012' / 'model.safetensors')
    up, down = (model[f'blocks.0.text.{name}.weight'] for name in ('up', 'down'))
    assert up.shape[0] == 2 * down.shape[1] and model['blocks.0.text.down.weight'].any()


def test_the_encoder_class_of_the_page_prepares_trains_and_embeds(tree, tmp_path):
    (tmp_path / 'lines.txt').write_text('\n'.join(f'a dog number {i} runs near house {i % 7}' for i in range(120)))
    prepared, trained, sampled = run_each(
        ['prepare.py', f'--input={tmp_path}/lines.txt', '--encoder=hashed', '--vocab_size=300', '--val_fraction=.1', f'--out={tmp_path}/packed'],
        ['train.py', f'--dataset={tmp_path}/packed', f'--out_dir={tmp_path}/run', *TINY, '--mode=l2t'],
        ['sample.py', f'--out_dir={tmp_path}/run', '--text=a dog runs', '--device=cpu'], cwd=tmp_path, root=tree)
    for rc, out, err in (prepared, trained, sampled):
        assert rc == 0, err
    assert '  -> ' in sampled[1]


def test_the_modality_of_the_page_goes_from_files_to_a_trained_model(tree, tmp_path):
    rng, sounds = np.random.default_rng(0), tmp_path / 'sounds'
    sounds.mkdir()
    rows = ['file_name,text']
    for i in range(40):
        with wave.open(str(sounds / f'{i}.wav'), 'wb') as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes((rng.standard_normal(400) * 3000).astype('<i2').tobytes())
        rows.append(f'{i}.wav,a sound number {i}')
    (sounds / 'metadata.csv').write_text('\n'.join(rows) + '\n')
    prepared, trained, measured = run_each(
        ['prepare.py', f'--input={sounds}', '--bands=16', '--tokenizer=byte', '--val_fraction=.2', f'--out={tmp_path}/packed'],
        ['train.py', f'--dataset={tmp_path}/packed', f'--out_dir={tmp_path}/run', *TINY, '--mode=t2l', '--latent_target=x0'],
        ['evaluate.py', f'--out_dir={tmp_path}/run', '--tasks=nelbo,t2l', '--n=4', '--draws=1', '--seeds=1', '--device=cpu', '--dtype=float32'],
        cwd=tmp_path, root=tree)
    for rc, out, err in (prepared, trained, measured):
        assert rc == 0 and not err, err
    meta = json.loads((tmp_path / 'packed/meta.json').read_text())
    assert meta['latent_shape'] == [1, 16] and sum(split['samples'] for split in meta['splits'].values()) == 40
