"""
Config files and --key=value over a script's own globals: nanoGPT's idea. The knobs of a script are
read from its source, a config file is run.

    python train.py config/quickstart.py config/mixed.py --batch_size=8 --learning_rate=1e-3

A knob is a top-level `name = literal` in the block below a script's imports. The block ends at the
first statement of another kind. The default of a knob fixes its type; None means "derived below".
The comment beside it documents it, and --help prints the block as it stands in the source. The
comment may open with a rule, `# [0, 1): share of ...` or `# auto | never: ...` (runs/rules.py). A
value that breaks the rule is refused, and so is nan or inf. Later arguments win over earlier ones.

A config file is the user's own Python and runs as such: it may import and compute. Its globals are
then checked like flags. One file serves all scripts, so a name that is a knob of another script is
passed over. On the command line only the script's own knobs count. A mistake is one line on stderr
and exit code 2.
"""
import ast
import contextlib
import difflib
import os
import re
import shutil
import sys
import types

from runs import rules
from runs.rules import from_text, from_value, settle

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPTS = ('prepare', 'train', 'sample', 'evaluate', 'bench', 'plot')
set_by = {}                     # {knob: where it was set}, of the last `configure`


# ---- errors

def stop(message, code=2):
    """ Leave with one line on stderr. SystemExit('text') would do the same, but with code 1. """
    print('error: ' + ' '.join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(code)


@contextlib.contextmanager
def stop_on_error(code=2):
    """ Around code that reads the user's files: an error there is one line, not a traceback. """
    try:
        yield
    except (ValueError, OSError) as error:
        stop(error, code)


# ---- the knobs of a script

def literal_of(node):
    """ (name, value) of a statement `name = literal`; None for another statement. """
    is_assignment = isinstance(node, ast.Assign) and len(node.targets) == 1
    if not is_assignment or not isinstance(node.targets[0], ast.Name):
        return None
    try:
        value = ast.literal_eval(node.value)
    except ValueError:
        return None
    return (node.targets[0].id, value) if rules.is_plain(value) else None


def read_knobs(path):
    """ A script's knobs {name: default}, its help text, and the rules {name: rule} of the knobs
    whose comment opens with one. The source is read, never run. """
    with open(path, 'rb') as f:
        source = f.read()

    # the statements at the top of the script, one after the other
    lines = source.decode().splitlines()
    tree = ast.parse(source, path)
    knobs, rule_of = {}, {}
    first = last = 0                                       # lines of the block

    for node in tree.body:
        # the block begins below the docstring, the imports, and a guard or a setting among them
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        if is_import or not knobs and isinstance(node, (ast.If, ast.Expr)):
            if not knobs:
                first = node.end_lineno
            continue

        # it ends at the first statement of another kind
        found = literal_of(node)
        if found is None:
            break
        name, value = found
        if name.islower() and not name.startswith('_'):
            knobs[name] = value
            last = node.end_lineno
            comment = lines[last - 1].encode()[node.end_col_offset:].decode().strip(' #')
            if comment.endswith(' |'):                     # the rule goes on in the next line
                comment += ' ' + lines[last].strip(' #')
            if rule := rules.rule_of(comment):
                rule_of[name] = rule

    # the comment of the last knob may go on below it
    while last < len(lines) and re.match(' +#', lines[last]):
        last += 1
    block = '\n'.join(lines[first:last]).strip()
    doc = ast.get_docstring(tree) or ''
    shared, shared_rules, shared_block = imported_knobs(tree)
    help_text = f'{doc}\n\n{block}\n{shared_block}'.strip()
    return knobs | shared, help_text, rule_of | shared_rules


def imported_knobs(tree):
    """ The knobs that a script takes over from another one by importing them, as evaluate.py does
    those of sampling: `from sample import steps, solver`. Returns them, their rules, and their
    lines. """
    knobs, found_rules, lines = {}, {}, []
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or node.module not in SCRIPTS:
            continue
        theirs, text, their_rules = read_knobs(os.path.join(HERE, f'{node.module}.py'))
        names = [alias.name for alias in node.names if alias.name in theirs]
        knobs |= {name: theirs[name] for name in names}
        found_rules |= {name: their_rules[name] for name in names if name in their_rules}

        # a knob's lines: its own, and those below it that go on with its comment
        is_shared = False
        for line in text.splitlines():
            if not line.startswith(' '):
                is_shared = line.partition(' = ')[0] in names
            if is_shared:
                lines.append(line)
    return knobs, found_rules, '\n'.join(lines)


def other_knobs():
    """ {knob: script} of all scripts beside this file. """
    found = {}
    for script in SCRIPTS:
        path = os.path.join(HERE, f'{script}.py')
        if os.path.exists(path):
            for name in read_knobs(path)[0]:
                found.setdefault(name, f'{script}.py')
    return found


def on_command_line(name):
    """ Whether a knob was given as a flag, not by a config file or by default. """
    return any(arg.startswith(f'--{name}=') for arg in sys.argv[1:])


# ---- config files

def run_config(path):
    """ Runs a config file. Yields (name, value, whether it was imported) of its globals that may be
    knobs. A file that is not there is looked for beside this module. """
    file = path if os.path.exists(path) else os.path.join(HERE, path)
    try:
        with open(file, 'rb') as f:
            source = f.read()
    except OSError as error:
        stop(f'no config file {path}: {error.strerror}')

    space = {'__name__': 'config', '__file__': os.path.abspath(file)}
    try:
        exec(compile(source, file, 'exec'), space)
    except Exception as error:
        what = f'{type(error).__name__}: {getattr(error, "msg", error)}'
        stop(f'config file {path}, line {line_of(error, file)}: {what}')

    # what it imports from elsewhere may be no knob
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
    for name, value in space.items():
        # CAPITALS are the file's own constants, _names its own variables
        is_private = name.startswith('_') or name.isupper()
        if not is_private and not isinstance(value, types.ModuleType) and not callable(value):
            yield name, value, name in imported


def line_of(error, file):
    """ The line of a file where an error arose. """
    line, trace = getattr(error, 'lineno', None), error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


# ---- the command line

def read_argument(argv, i):
    """ One argument: [(name, value, whether it was imported)], where from, and how to convert it.
    """
    arg = argv[i]
    name, equals, text = arg.partition('=')
    if name.startswith('--') and equals:
        return [(name[2:], text, False)], 'the command line', from_text
    if arg.endswith('.py') and not arg.startswith('-'):
        return run_config(arg), arg, from_value

    hint = ''
    if arg.startswith('--'):
        has_value = i + 1 < len(argv) and not argv[i + 1].startswith('--')
        value = f'"{argv[i + 1]}"' if has_value else 'VALUE'
        hint = f': write {arg}={value}'
    stop(f'{arg!r} is neither a config file (*.py) nor --key=value{hint}')


def stop_at_unknown(name, source, knobs, others):
    """ others: {knob: script} of all scripts. In a config file their names could be meant too. """
    candidates = knobs if source == 'the command line' else {**knobs, **others}
    near = difflib.get_close_matches(name, candidates, 1, cutoff=.5)
    if name in others:
        hint = f': it is one of {others[name]}'
    elif near:
        hint = f', did you mean {near[0]!r}?'
    else:
        hint = ', --help lists them'
    stop(f'unknown knob {name!r} in {source}{hint}')


def configure(globals_, argv=None, show=True):
    """ Applies the command line to the knobs of the calling script, in place, and returns all of
    them as a plain dict. Call it right below the knobs: `config = configure(globals())`. It prints
    what was set; with show=False the script calls show_knobs(config) after checks of its own. """
    knobs, help_text, rule_of = read_knobs(globals_['__file__'])
    argv = sys.argv[1:] if argv is None else argv
    if '--help' in argv or '-h' in argv:
        if is_rank0():
            print_help(help_text)
        raise SystemExit(0)

    # arguments in their order: the last one wins
    config = dict(knobs)
    others = None                                          # read once, where a name is unknown
    set_by.clear()
    for i in range(len(argv)):
        settings, source, convert = read_argument(argv, i)
        for name, value, is_imported in settings:
            if name not in knobs:
                others = others or other_knobs()
                if convert is from_value and (name in others or is_imported):
                    continue                               # in a file, for another script
                stop_at_unknown(name, source, knobs, others)
            try:
                config[name] = settle(value, knobs[name], rule_of.get(name), convert)
            except ValueError as error:
                stop(f'knob {name!r} in {source}: {error}')
            set_by[name] = source
    globals_.update(config)
    if show:
        show_knobs(config)
    return config


# ---- what is printed

def is_rank0():
    """ Every process configures itself; the first one prints. """
    return os.environ.get('RANK', '0') == '0'


def print_help(text):
    """ A reader may close early, as `head` does. Python would complain about that once more as it
    ends. """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_knobs(config):
    """ One line for each knob that was set: its value and where it was set. --help lists the
    others. """
    if not set_by or not is_rank0():
        return

    # the widths of three columns: name, value, where from
    width = shutil.get_terminal_size((100, 24)).columns
    name_width = max(map(len, set_by))
    source_width = min(width // 3, max(map(len, set_by.values())))
    value_width = min(max(len(repr(config[name])) for name in set_by),
                      width - name_width - source_width - 4)
    for name, source in set_by.items():
        value = shorten(repr(config[name]), value_width)
        if len(source) > source_width:                     # of a path the end says most
            source = '...' + source[3 - source_width:]
        line = f'{name:<{name_width}}  {value:<{max(0, value_width)}}  {source}'
        print(line[:width].rstrip())
    sys.stdout.flush()


def shorten(text, width):
    return text if len(text) <= width else text[:max(0, width - 3)] + '...'
