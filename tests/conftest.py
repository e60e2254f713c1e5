import os
import random
import re
import shutil
import sys
import zlib

import numpy as np
import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

os.environ.setdefault('HF_HUB_OFFLINE', '1')                 # no test asks the hub

# make gpu: a test that is skipped there has failed, unless the reason begins with MAY_LACK.
# Elsewhere a card is hidden from the tests and their processes, which compare with figures of a
# CPU: --device=auto would take it.
NEEDS_CUDA = bool(os.environ.get('NANOLDLM_NEEDS_CUDA'))
if not NEEDS_CUDA:
    os.environ['CUDA_VISIBLE_DEVICES'] = ''

import launch
from launch import EXTENDING, MAY_LACK, ROOT, run, train
from sampling.run import Run


SEED = os.environ.get('NANOLDLM_TEST_SEED', '0')


@pytest.fixture(autouse=True)
def every_global_generator_is_seeded(request):
    """ From NANOLDLM_TEST_SEED (0) and the name of the test: neither the order of the tests nor the
    worker that runs one changes its numbers. Scripts seed themselves, by their own knob. """
    # crc32, because python's own hash of a text differs from process to process
    number = zlib.crc32(f'{SEED} {request.path.name} {request.node.name}'.encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def pytest_configure(config):
    if NEEDS_CUDA and not torch.cuda.is_available():
        raise pytest.UsageError('no CUDA device: torch finds none on this machine, so the tests '
                                'that need one cannot run')


# the files that take longest begin, so that no worker is left with one at the end
LONGEST = ['test_knobs', 'test_bench', 'test_commands', 'test_causal', 'test_fault_signals',
           'test_fault_numbers', 'test_fault_prepare', 'test_fault_processes', 'test_train',
           'test_distributed', 'test_clusters']


def pytest_collection_modifyitems(items):
    turn = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turn.get(item.path.stem, len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if NEEDS_CUDA and report.skipped and MAY_LACK not in report.longrepr[2]:
        report.outcome = 'failed'
        report.longrepr = f'skipped, where a CUDA device is needed: {report.longrepr[2]}'
    return report


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    yield
    for process in (process for job in launch.started for process in job.processes):
        process.kill()
    launch.started.clear()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """ The working directory is an empty folder. """
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope='session')
def dataset(tmp_path_factory):
    """ A small real one, by prepare.py: sentences from a grammar, lsa latents. """
    folder = tmp_path_factory.mktemp('corpus')
    rng = np.random.default_rng(0)
    who, does = 'man woman child dog cat'.split(), 'runs sits eats jumps sleeps'.split()
    where, color = 'street house park river market'.split(), 'red blue small old'.split()
    pick = rng.choice
    lines = {f'a {pick(color)} {pick(who)} {pick(does)} near the {pick(where)} number '
             f'{rng.integers(40)}' for _ in range(600)}
    (folder / 'lines.txt').write_text('\n'.join(sorted(lines)))
    out = run('prepare.py', f'--input={folder}/lines.txt', '--encoder=lsa', '--encoder_dims=16',
              '--vocab_size=300', '--max_tokens=31', '--val_fraction=.1', f'--out={folder}/packed')
    assert out.returncode == 0, out.stderr
    return folder / 'packed'


@pytest.fixture(scope='session')
def finished(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'whole'
    result = train(dataset, out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope='session')
def mixed(dataset, tmp_path_factory):
    """ A run of all four modes. """
    out = tmp_path_factory.mktemp('mixed') / 'run'
    result = train(dataset, out, '--mode=unconditional+l2t+t2l+causal')
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope='session')
def of_mixed(mixed):
    """ It, from Python. """
    return Run(str(mixed), device='cpu', dtype='float32')


@pytest.fixture(scope='session')
def finished_by_two(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'two'
    launch.Job(dataset, out, ranks=2).ends()
    return out


# ---- docs/extending.md

# a fenced block with the line above it; one that ends in "`path`:" says what file a block is of
BLOCK = re.compile(r'(?:^(?!```)([^\n]+)\n+)?^```(python|diff)\n(.*?)^```$', re.M | re.S)


def apply_diff(tree, diff, named):
    """ Changes the one file of the tree that has the old lines of a diff, in a row and once. It
    must be one of those named. """
    lines = diff.splitlines(keepends=True)
    old = ''.join(line[1:] for line in lines if line[0] != '+')
    new = ''.join(line[1:] for line in lines if line[0] != '-')
    folders = ('.', 'base', 'processes', 'corpora', 'sampling', 'runs', 'tasks')
    holders = [path for folder in folders for path in (tree / folder).glob('*.py')
               if old in path.read_text()]
    assert len(holders) == 1 and holders[0].read_text().count(old) == 1, (diff, holders)
    assert str(holders[0].relative_to(tree)) in named, (diff, holders, named)
    holders[0].write_text(holders[0].read_text().replace(old, new))


@pytest.fixture(scope='session')
def tree(tmp_path_factory):
    """ A copy of the tree with all extensions of docs/extending.md. """
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
