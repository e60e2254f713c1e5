"""
The built-in corpus: short English sentences of documentation that is on this machine anyway.

They come from the docstrings of the standard library and of the packages that this repository
installs, and from pydoc_data's topics. The files are read by `ast`; no module is imported.
"""
import ast
import glob
import importlib.util
import inspect
import os
import re
import sysconfig
from functools import lru_cache

from base.console import progress_bar

PACKAGES = ('numpy', 'torch', 'sympy', 'networkx')         # torch installs the last two

# folders and files that are left out
SKIP = re.compile(r'(^|/)(site-packages|dist-packages|test|tests|testing|idlelib|lib2to3|turtledemo'
                  r'|ensurepip|lib-dynload)/|(^|/)test_|_sysconfigdata')

# a paragraph of code, doctests, tables or fields
NO_PROSE = re.compile(r'>>>|::=|\.\. |^\s*[|+*=~^-]{3}|\s{3,}\S+\s{3,}|^\s*:\w+', re.MULTILINE)
BULLET = re.compile(r'^\s*(?:[*-]|\d+\.)\s+')
SENTENCE_END = re.compile(r'(?<=[a-z")][.!?])\s+(?=[A-Z"])')
SENTENCE = re.compile(r'[A-Z][A-Za-z ,.;:\'"()-]*[a-z")][.!?]')
NAME_OF_CODE = re.compile(r'[a-z][A-Z]|[A-Z]{5}|\(s\)|Args|:class')
PLAIN_WORD = re.compile(r'"?\(?[A-Za-z][a-z\'-]*\)?"?[.,;:!?]?"?')


@lru_cache
def builtin_corpus():
    """ The distinct sentences, in the order of the files. """
    # find_spec looks where a package is, and does not import it
    roots = [sysconfig.get_path('stdlib')]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        roots += spec.submodule_search_locations if spec else []

    files = [(root, name) for root in roots
             for name in sorted(glob.glob('**/*.py', root_dir=root, recursive=True))
             if not SKIP.search(name.replace(os.sep, '/'))]

    print(f'reading the documentation of {len(files):,} Python files', flush=True)
    sentences = {}
    for root, name in progress_bar(files, desc='documentation', unit='file'):
        # some files of the library are not valid Python, on purpose
        try:
            with open(os.path.join(root, name), 'rb') as f:
                tree = ast.parse(f.read())
        except SyntaxError:
            continue

        # a dict keeps the order and drops what comes twice
        for text in prose_of(tree, all_strings=name.startswith('pydoc_data')):
            sentences.update(dict.fromkeys(sentences_of(text)))
    return list(sentences)


def prose_of(tree, all_strings):
    """ The docstrings of a module, or all its string constants. """
    if all_strings:
        constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
        yield from (node.value for node in constants if isinstance(node.value, str))
        return
    for node in definitions(tree):
        yield ast.get_docstring(node) or ''


def definitions(node):
    """ A module and its classes and functions, also nested ones, but not those below an else or
    except. Only bodies are visited: ast.walk would visit twenty times as many nodes. """
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node
    for child in getattr(node, 'body', ()):
        if hasattr(child, 'body'):
            yield from definitions(child)


def sentences_of(text):
    """ Whole English sentences of 5 to 14 words: no code, doctests, tables, headings or signatures.
    """
    for paragraph in re.split(r'\n\s*\n', inspect.cleandoc(text)):
        if NO_PROSE.search(paragraph):
            continue

        # one line, without the bullet of a list's item
        paragraph = BULLET.sub('', paragraph)
        paragraph = ' '.join(paragraph.split())
        paragraph = paragraph.replace('``', '"').replace('`', '"')

        # most words of a sentence are plain words
        for sentence in SENTENCE_END.split(paragraph):
            words = sentence.split()
            n_plain = sum(bool(PLAIN_WORD.fullmatch(word)) for word in words)
            is_short = 5 <= len(words) <= 14 and len(sentence) <= 90
            is_prose = is_short and n_plain >= .85 * len(words)
            if is_prose and SENTENCE.fullmatch(sentence) and not NAME_OF_CODE.search(sentence):
                yield sentence
