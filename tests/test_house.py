"""
Imports point one way, and the root is small:

    base  <-  root core, processes, runs, corpora  <-  sampling  <-  tasks, benchmarks, examples,
                                                                     scripts
"""
import ast
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent

CORE = {'model', 'diffusion', 'noise', 'samplers', 'data', 'encoders', 'configurator', 'nano'}
SCRIPTS = {'train', 'sample', 'evaluate', 'prepare', 'bench', 'plot'}
BASE = {'base'}
FOLDERS, SAMPLING = {'processes', 'runs', 'corpora'}, {'sampling'}
LEAVES = {'tasks', 'benchmarks', 'examples'}


def files_of(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).glob('*.py'))


def modules():
    """ {name of a module of ours: its path}; examples are left out, since nothing imports them. """
    found = {}
    for path in files_of('.', *sorted(BASE | FOLDERS | SAMPLING | LEAVES - {'examples'})):
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
    """ The base knows nothing else. Core and folders know nothing of sampling, sampling nothing of
    scripts, and only a script knows the leaves. """
    groups = (BASE, CORE | FOLDERS, SAMPLING, LEAVES, SCRIPTS)
    layers = {name: layer for layer, group in enumerate(groups) for name in group}
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


def test_the_versions_that_are_tested_are_in_the_ranges_that_may_be_installed():
    """ requirements.txt has exact versions, pyproject.toml ranges. """
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    extras = project['optional-dependencies']
    ranges = [Requirement(line) for line in sum(extras.values(), project['dependencies'])]
    tested = {}
    for name in ('requirements.txt', 'tests/requirements.txt'):
        for line in (ROOT / name).read_text().splitlines():
            package, _, version = line.partition('#')[0].partition('==')
            if version:
                tested[package] = version.strip()
    known = {one.name: one.specifier for one in ranges}
    assert known.keys() - {'nanoldlm', 'rdkit'} == tested.keys()
    for package, version in tested.items():
        assert known[package].contains(version), package
