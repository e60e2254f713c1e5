""" docs/extending.md: every extension on that page is made here as the page says, word for word, in
a copy of the tree, and used. """
import json
import re
import shutil

import pytest

from launch import ROOT, TINY, log, run_code, run_each
from runs import checkpoint
from test_commands import EXTENDING, commands_of, problems
from toys import save_encoder

# a fenced block with the line above it; one that ends in "`path`:" says what file a block is of
BLOCK = re.compile(r'(?:^(?!```)([^\n]+)\n+)?^```(python|diff)\n(.*?)^```$', re.M | re.S)
CPU = ['--device=cpu', '--dtype=float32']


def apply_diff(tree, diff, named):
    """ Changes the one file of the tree that has the old lines of a diff, in a row and once. It
    must be one of those named. """
    lines = diff.splitlines(keepends=True)
    old = ''.join(line[1:] for line in lines if line[0] != '+')
    new = ''.join(line[1:] for line in lines if line[0] != '-')
    folders = ('.', 'processes', 'corpora', 'sampling', 'runs', 'tasks')
    holders = [path for folder in folders for path in (tree / folder).glob('*.py')
               if old in path.read_text()]
    assert len(holders) == 1 and holders[0].read_text().count(old) == 1, (diff, holders)
    assert str(holders[0].relative_to(tree)) in named, (diff, holders, named)
    holders[0].write_text(holders[0].read_text().replace(old, new))


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    """ A copy of the tree with all extensions of the page. """
    tree = tmp_path_factory.mktemp('extended') / 'tree'
    hidden = shutil.ignore_patterns('.*', 'data', 'out', 'tests', 'results', '__pycache__')
    shutil.copytree(ROOT, tree, ignore=hidden)
    n_blocks = 0
    for section in re.split(r'^## ', (ROOT / EXTENDING).read_text(), flags=re.M):
        prose = re.sub(r'^```.*?^```$', '', section, flags=re.M | re.S)
        for before, kind, text in BLOCK.findall(section):
            path = re.search(r'(?:The file|In) `([\w/]+\.py)`:$', before)
            n_blocks += kind == 'diff' or bool(path)
            if kind == 'diff':
                apply_diff(tree, text, set(re.findall(r'`([\w/]+\.py)`', prose)))
            elif path and (tree / path[1]).exists():       # a function, above its table
                source = (tree / path[1]).read_text()
                assert source.count('\nSAMPLERS = {') == 1
                source = source.replace('\nSAMPLERS = {', f'\n{text}\n\nSAMPLERS = {{')
                (tree / path[1]).write_text(source)
            elif path:
                (tree / path[1]).write_text(text)
    assert n_blocks >= 14, 'the blocks are not found any more'
    return tree


def works(tree, tmp_path, *commands):
    """ (stdout, stderr) of commands in the copy, each of which ends well. """
    results = run_each(*commands, cwd=tmp_path, root=tree)
    for (code, _, err), command in zip(results, commands):
        assert code == 0, (command, err)
    return [(out, err) for _, out, err in results]


def test_the_commands_of_the_page_are_right_where_its_extensions_are_made(tree):
    commands = commands_of(EXTENDING)
    wrong = problems(commands, tree)
    assert len(commands) >= 10 and not wrong, '\n'.join(wrong)


def test_a_sampler_a_text_process_and_a_task_work_in_training_sampling_and_evaluation(
        tree, dataset, finished, tmp_path):
    data, here, whole = f'--dataset={dataset}', f'--out_dir={tmp_path}/early', tmp_path / 'whole'
    shutil.copytree(finished, whole)                       # evaluate.py writes into the run folder
    works(tree, tmp_path,
          ['train.py', data, here, *TINY, '--text_process=early', '--text_clock=false',
           '--mode=l2t'],
          ['evaluate.py', here, '--tasks=nelbo', '--n=8', *CPU],
          ['train.py', data, f'--out_dir={tmp_path}/plain', *TINY, '--mode=l2t'],
          ['sample.py', f'--out_dir={tmp_path}/plain', '--text=a red dog runs',
           '--sampler=leftmost', '--steps=4', *CPU],
          ['evaluate.py', f'--out_dir={tmp_path}/plain', '--tasks=length', '--n=8',
           '--sampler=leftmost', '--steps=4', *CPU])
    config = json.loads((tmp_path / 'early/config.json').read_text())
    assert config['text_process'] == 'early'
    found = (tmp_path / 'plain/results.json').read_text()
    assert 'difference' in found and 'shuffled' in found and 'null' in found


def test_the_loss_weighting_and_the_block_train_and_are_used(tree, dataset, tmp_path):
    both = [['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/{weight}', *TINY,
             '--mode=l2t', f'--text_loss_weight={weight}'] for weight in ('root', 'bound')]
    works(tree, tmp_path, *both)
    root, bound = (log(tmp_path / weight)[1, False]['loss'] for weight in ('root', 'bound'))
    assert root < bound
    model = checkpoint.read_tensors(tmp_path / 'root/step-00000012/model.safetensors')
    up, down = (model[f'blocks.0.text.{name}.weight'] for name in ('up', 'down'))
    assert up.shape[0] == 2 * down.shape[1] and model['blocks.0.text.down.weight'].any()


def test_the_row_of_an_encoder_and_the_encoder_class_embed(tree, tmp_path):
    folder = save_encoder(tmp_path / 'bert')
    code = f"""
import sys
sys.path.insert(0, {str(tree)!r})
from corpora import encoder_table
encoder_table.find_folder = lambda where, revision: ({folder!r}, revision)
encoder = encoder_table.find_encoder('e5_small', dimension=32)
assert encoder.record['id'] == 'intfloat/e5-small-v2' and encoder.record['prefix'] == 'query: '
assert encoder(['a dog runs', 'a cat']).shape == (2, 1, 32)
"""
    result = run_code(code)
    assert result.returncode == 0, result.stderr
    lines = '\n'.join(f'a dog number {i} runs near house {i % 7}' for i in range(120))
    (tmp_path / 'lines.txt').write_text(lines)
    data, here = f'{tmp_path}/packed', f'--out_dir={tmp_path}/run'
    *_, (out, _) = works(
        tree, tmp_path, ['prepare.py', f'--input={tmp_path}/lines.txt', '--encoder=hashed',
                         '--vocab_size=300', '--val_fraction=.1', f'--out={data}'],
        ['train.py', f'--dataset={data}', here, *TINY, '--mode=l2t'],
        ['sample.py', here, '--text=a dog runs', '--device=cpu'])
    assert '  -> ' in out
