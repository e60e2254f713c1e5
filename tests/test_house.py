"""
What makes the repository readable, as tests: imports point one way, the root is small and names no
baseline, no line is too long.

    root core  <-  processes, runs, corpora  <-  sampling  <-  scripts, tasks, benchmarks, examples
"""
import ast
import io
import re
import subprocess
import sys
import tokenize

import pytest

from launch import ROOT

CORE = {'model', 'diffusion', 'loss', 'samplers', 'data', 'encoders', 'configurator'}
SCRIPTS = {'train', 'sample', 'evaluate', 'prepare', 'bench', 'plot', 'nanoldlm'}
FOLDERS = {'processes', 'runs', 'corpora'}
SAMPLING = {'sampling'}
LEAVES = {'tasks', 'benchmarks', 'examples'}
OURS = CORE | SCRIPTS | FOLDERS | SAMPLING | LEAVES

BASELINES = 'gidd|hdlm|atat'
MODALITIES = 'protein|residue|image|picture|pixel'         # sample.py and prepare.py have knobs of them


def files_of(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).glob('*.py'))


def imports_of(path):
    """ [(module of ours, whether the import is inside a function)] of a file. """
    found = []

    def visit(node, is_inside):
        for child in ast.iter_child_nodes(node):
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and not child.level:
                names = [child.module]
            found.extend((name.split('.')[0], is_inside) for name in names)
            visit(child, is_inside or isinstance(child, (ast.FunctionDef, ast.Lambda)))
    visit(ast.parse(path.read_text()), False)
    return [(name, is_inside) for name, is_inside in found if name in OURS]


def test_every_module_of_the_root_has_its_place_and_there_are_at_most_14():
    names = {path.stem for path in files_of('.')}
    assert names == CORE | SCRIPTS and len(names) <= 14


def test_the_core_imports_no_script_and_at_its_top_no_folder_but_runs():
    for name in CORE:
        for module, is_inside in imports_of(ROOT / f'{name}.py'):
            assert module not in SAMPLING | SCRIPTS | LEAVES, f'{name}.py imports {module}'
            assert is_inside or module in CORE | {'runs'}, f'{name}.py imports {module} at its top'


def test_the_root_imports_no_folder_at_its_top_but_runs_and_the_one_that_a_script_is_for():
    """ What a knob asks for is imported in the function that needs it. """
    is_for = {'sample': {'sampling.inputs', 'sampling'}, 'nanoldlm': {'sampling.inputs', 'sampling'}, 'evaluate': {'sampling', 'tasks.common'}, 'bench': {'benchmarks'}, 'plot': {'benchmarks'},
              'prepare': {'corpora.latents', 'corpora.layouts', 'corpora.shards', 'corpora.sources', 'corpora.tokenizers',
                          'corpora.writing'}}
    for name in CORE | SCRIPTS:
        for node in ast.parse((ROOT / f'{name}.py').read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in names:
                folder = module.split('.')[0]
                if folder in FOLDERS | SAMPLING | LEAVES and folder != 'runs':
                    assert is_for.get(name, set()) & {module, folder}, f'{name}.py imports {module} at its top'


def test_no_folder_imports_a_script_or_a_folder_above_it():
    for path in files_of(*FOLDERS):
        for module, _ in imports_of(path):
            assert module in CORE | FOLDERS, f'{path} imports {module}'
    for path in files_of(*SAMPLING):
        for module, _ in imports_of(path):
            assert module in CORE | FOLDERS | SAMPLING, f'{path} imports {module}'
    for path in files_of(*LEAVES):
        for module, _ in imports_of(path):
            assert module not in SCRIPTS, f'{path} imports {module}'


def test_inside_sampling_imports_point_one_way_too():
    order = ['knobs', 'denoise', 'solvers', 'writing', 'likelihood', 'directions', 'search']
    assert {path.stem for path in files_of(*SAMPLING)} == set(order)
    for i, name in enumerate(order):
        found = re.findall(r'from sampling\.(\w+) import', (ROOT / 'sampling' / f'{name}.py').read_text())
        assert set(found) <= set(order[:i]), f'sampling/{name}.py imports {found}'


def test_only_the_scripts_that_need_them_import_the_leaves():
    may = {'evaluate': {'tasks', 'sample'}, 'bench': {'benchmarks'}, 'plot': {'benchmarks'}}
    for name in SCRIPTS:
        for module, _ in imports_of(ROOT / f'{name}.py'):
            is_allowed = module in CORE | FOLDERS | SAMPLING | may.get(name, set())
            assert is_allowed, f'{name}.py imports {module}'


def test_every_module_can_be_imported_first():
    """ No circle of imports: each module alone, before any other of ours. """
    modules = sorted(CORE | SCRIPTS - {'train'})
    for path in files_of(*FOLDERS, *SAMPLING, *LEAVES):
        if path.parent.name == 'examples':
            modules.append(path.stem)                      # as `python examples/NAME.py` finds them
        elif path.stem != '__init__':
            modules.append(f'{path.parent.name}.{path.stem}')
    code = f"""
import importlib, sys
sys.path.append('examples')
ours = {sorted(OURS | {path.stem for path in files_of('examples')})!r}
for name in {modules!r}:
    for loaded in [m for m in sys.modules if m.split('.')[0] in ours]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
"""
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and not result.stdout, result.stdout + result.stderr


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
