"""
Imports point one way, and the root is small:

    root core  <-  processes, runs, corpora  <-  sampling  <-  scripts, tasks, benchmarks, examples

And the ratchet: no figure of the tree is above its limit in limits.json. A limit is never raised.
Who takes something away lowers it in the same commit:

    python tests/test_house.py          # prints the figures, and lowers the limits to them
"""
import ast
import io
import json
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CORE = {'model', 'diffusion', 'loss', 'samplers', 'data', 'encoders', 'configurator', 'nano'}
SCRIPTS = {'train', 'sample', 'evaluate', 'prepare', 'bench', 'plot'}
FOLDERS, SAMPLING = {'processes', 'runs', 'corpora'}, {'sampling'}
LEAVES = {'tasks', 'benchmarks', 'examples'}


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
    """ Core and folders know nothing of sampling, sampling nothing of scripts, and only a script
    knows the leaves. """
    groups = (CORE | FOLDERS, SAMPLING, LEAVES, SCRIPTS)
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


# -----------------------------------------------------------------------------
# The ratchet

LIMITS = ROOT / 'tests/limits.json'
MORE_IS_BETTER = {'comment_percent'}


def page(source):
    """ {lines, code, tokens, bodies, comments} of a file: its lines; those of code, without blanks,
    comments and docstrings, and the syntax tokens on them; lines of function bodies, and those of
    them that are comments. """
    lines = source.splitlines()
    docstrings, bodies = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if ast.get_docstring(node) is not None:
                first = node.body[0]
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
        if isinstance(node, ast.FunctionDef):
            bodies |= set(range(node.body[0].lineno, node.end_lineno + 1))
    bodies -= docstrings

    comments = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith('#')}
    code = [number for number, line in enumerate(lines, 1)
            if line.strip() and number not in comments | docstrings]
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline)
              if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
              and token.start[0] not in docstrings]
    return dict(lines=len(lines), code=len(code), tokens=len(tokens), bodies=len(bodies),
                comments=len(comments & bodies))


def lines_behind(start, graph, pages):
    """ Lines of a module and of all that it imports, also inside functions. """
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return sum(pages[name]['lines'] for name in seen)


def words_in(*paths):
    return sum(len(path.read_text().split()) for path in paths)


def figures():
    """ {name: figure} of the tree as it is. """
    graph = imports()
    pages = {name: page(path.read_text()) for name, path in modules().items()}
    examples = [page(path.read_text()) for path in files_of('examples')]
    tree = [*pages.values(), *examples]
    total = {key: sum(one[key] for one in tree) for key in tree[0]}
    folders = ('.', 'config', 'tests', *sorted(FOLDERS | SAMPLING | LEAVES))
    lines = [line for path in files_of(*folders) for line in path.read_text().splitlines()]
    return dict(
        tree_lines=total['lines'],
        test_lines=sum(len(path.read_text().splitlines()) for path in files_of('tests')),
        wide_lines=sum(len(line) > 100 for line in lines),
        **{f'behind_{name}': lines_behind(name, graph, pages)
           for name in ('train', 'sample', 'evaluate', 'prepare', 'nano')},
        train_lines=pages['train']['lines'],
        readme_lines=len((ROOT / 'README.md').read_text().splitlines()),
        docs_words=words_in(*(ROOT / 'docs').glob('*.md')), log_words=words_in(ROOT / 'LOG.md'),
        tokens_a_line=round(total['tokens'] / total['code'], 1),
        comment_percent=round(100 * total['comments'] / total['bodies'], 1))


def is_worse(name, figure, limit):
    return figure < limit if name in MORE_IS_BETTER else figure > limit


def test_no_figure_of_the_tree_is_above_its_limit():
    limits, found = json.loads(LIMITS.read_text()), figures()
    assert found.keys() == limits.keys()
    over = [f'{name}: {found[name]}, limit {limit}' for name, limit in limits.items()
            if is_worse(name, found[name], limit)]
    assert not over, f'make room first: {"; ".join(over)}'


if __name__ == '__main__':
    limits, found = json.loads(LIMITS.read_text()), figures()
    for name, figure in found.items():
        print(f'{name:<20}{figure:>10}   limit {limits.get(name)}')
        if name not in limits or is_worse(name, limits[name], figure):
            limits[name] = figure
    LIMITS.write_text(json.dumps({name: limits[name] for name in found}, indent=1) + '\n')
