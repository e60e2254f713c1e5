"""
What makes the repository readable, as tests: imports point one way, the root is small and names no
baseline, no line is too long.

    root core  <-  processes, runs, corpora  <-  sampling  <-  scripts, tasks, benchmarks, examples
"""
import ast
import io
import re
import tokenize

import pytest

from launch import ROOT

CORE = {'model', 'diffusion', 'loss', 'samplers', 'data', 'encoders', 'configurator', 'nano'}
SCRIPTS = {'train', 'sample', 'evaluate', 'prepare', 'bench', 'plot'}
FOLDERS = {'processes', 'runs', 'corpora'}
SAMPLING = {'sampling'}
LEAVES = {'tasks', 'benchmarks', 'examples'}

BASELINES = 'gidd|hdlm|atat'
MODALITIES = 'protein|residue|image|picture|pixel'         # sample.py and prepare.py have knobs of them


def files_of(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).glob('*.py'))


def modules():
    """ {name of a module of ours: its path}; examples are left out, since nothing imports them. """
    found = {}
    for path in files_of('.', *sorted(FOLDERS | SAMPLING | LEAVES - {'examples'})):
        parts = path.relative_to(ROOT).with_suffix('').parts
        found['.'.join(parts).removesuffix('.__init__')] = path
    return found


def imports():
    """ {module of ours: the modules of ours that it imports, also inside functions}. """
    ours = modules()
    found = {}
    for name, path in ours.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                inside = [f'{node.module}.{alias.name}' for alias in node.names]
                names = [one if one in ours else node.module for one in inside]
            found[name] |= {one for one in names if one in ours and one != name}
    return found


def test_the_root_has_at_most_14_modules_and_each_has_its_place():
    names = {path.stem for path in files_of('.')}
    assert names == CORE | SCRIPTS and len(names) <= 14


def test_no_import_runs_backwards():
    """ Core and folders know nothing of sampling, sampling nothing of scripts, and only a script knows the leaves. """
    layers = {**dict.fromkeys(CORE | FOLDERS, 0), **dict.fromkeys(SAMPLING, 1), **dict.fromkeys(LEAVES, 2), **dict.fromkeys(SCRIPTS, 3)}
    for name, found in imports().items():
        here = layers[name.split('.')[0]]
        wrong = [other for other in found if layers[other.split('.')[0]] > here]
        assert not wrong, f'{name} imports {wrong}'


def test_there_is_no_circle_of_imports():
    graph = imports()
    while graph:
        free = [name for name, found in graph.items() if not found & graph.keys()]
        assert free, f'a circle: {sorted(graph)}'
        graph = {name: found for name, found in graph.items() if name not in free}


def code_lines(path):
    """ {number: the names and texts on a line}, without comments and docstrings. """
    source = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_said = token.type in (tokenize.NAME, tokenize.STRING) or token.type > tokenize.OP
        if is_said and token.type != tokenize.COMMENT and token.start[0] not in docstrings:
            found.setdefault(token.start[0], []).append(token.string)
    return {number: ' '.join(words) for number, words in found.items()}


@pytest.mark.parametrize('name', sorted(CORE | SCRIPTS))
def test_the_root_names_no_baseline_protein_or_picture_but_in_knobs(name):
    words_of_others = BASELINES
    if name == 'configurator':                           # its table of rooms names them
        return
    if name in CORE | {'train'}:
        words_of_others += f'|{MODALITIES}'
    source = (ROOT / f'{name}.py').read_text().splitlines()
    for number, words in code_lines(ROOT / f'{name}.py').items():
        is_knob = re.match(r'[a-z]\w* = ', source[number - 1]) and name in SCRIPTS
        words = re.sub(r'\w+=\w+', '', words)            # an error line may say text_process=gidd
        found = re.search(words_of_others, words, re.IGNORECASE)
        assert is_knob or not found, f'{name}.py:{number} names {found[0]}'


def is_table(line):
    """ Columns of numbers or words: three gaps of three blanks or more, or bars. """
    return len(re.findall(r'\S {3,}(?=\S)', line)) >= 3 or line.count('|') >= 3


@pytest.mark.parametrize('folder', ['.', *sorted(FOLDERS | SAMPLING | LEAVES), 'config'])
def test_no_line_is_wider_than_100_columns_but_addresses_and_tables(folder):
    for path in files_of(folder):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            is_short = len(line) <= 100 or 'https://' in line or is_table(line)
            assert is_short, f'{path.relative_to(ROOT)}:{number}: {len(line)} columns'
