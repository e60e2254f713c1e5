"""
Config files and --key=value over a script's own globals: nanoGPT's idea. The knobs of a script are
read from its source, a config file is run.

    python train.py config/quickstart.py config/mixed.py --batch_size=8 --learning_rate=1e-3

A knob is a top-level `name = literal` in the block below a script's imports. The block ends at the
first statement of another kind. The default of a knob fixes its type; None means "derived below".
The comment beside it documents it, and --help prints the block as it stands in the source. The
comment may open with a rule, which a value must follow:

    [0, 1)                     a number x with 0 <= x < 1; never nan; inf only if the rule names it
    int [1, 2**20]             a whole number; a knob with a whole default needs no `int`
    auto | never               one of these words; '' is the empty text
    None | -1 | [0, 100]       one of several rules; -1 is that number
    best | <name of a step>    a word, or any text that is not empty

A room is a file with knobs of its own, which count where a switch names it: gidd_gamma stands in
processes/gidd.py, and is read where text_process=gidd. Later arguments win over earlier ones.

A config file is the user's own Python and runs as such: it may import and compute. Its globals are
then checked like flags. One file serves all scripts, so a name that is a knob of another script is
passed over. On the command line only the script's own knobs count. A mistake is one line on stderr
and exit code 2.
"""
import ast
import contextlib
import difflib
import math
import os
import re
import shutil
import sys
import types

from runs.files import short

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPTS = ('prepare', 'train', 'sample', 'evaluate', 'bench', 'plot')
# {room of train.py: (its switch, the values that name it)}
ROOMS = {'processes/gidd.py': ('text_process', ('gidd',)),
         'processes/hdlm.py': ('text_process', ('hdlm',)),
         'processes/adaptive.py': ('importance', ('freq', 'learned', 'hybrid')),
         'runs/muon.py': ('optimizer', ('muon',))}
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


# ---- a rule: what a value may be

# the grammar of a rule; in ONE words stand before numbers, since infill opens with inf
NUMBER = r'-?(?:inf|\d+\*\*\d+|\d+(?:\.\d+)?(?:e-?\d+)?)'
INTERVAL = rf'(?:int )?[\[(]{NUMBER}, {NUMBER}[\])]'
ONE = rf"(?:{INTERVAL}|<[^<>]+>|''|[A-Za-z_][\w-]*|{NUMBER})"
RULE = re.compile(rf'{ONE}(?: \| {ONE})*(?=$|[;:,.] ?)')


def rule_of(comment):
    """ The rule that opens a comment, or None. A single word is prose, not a rule; only `bool` is
    one. """
    found = RULE.match(comment)
    if not found:
        return None
    rule = found[0]
    is_rule = ' | ' in rule or rule[0] in '[(<' or rule.startswith('int ') or rule == 'bool'
    return rule if is_rule else None


def number(text):
    """ '2**20', '1e-3' or 'inf' as a number. Whole numbers stay exact. """
    base, power, exponent = text.partition('**')
    if power:
        return int(base) ** int(exponent)
    return int(text) if text.lstrip('-').isdigit() else float(text)


def parts_of(rule):
    return re.findall(ONE, rule)


def interval_of(one):
    """ (whether whole, '[' or '(', low, high, ']' or ')') of an interval; None for another rule.
    """
    found = re.fullmatch(rf'(int )?([\[(])({NUMBER}), ({NUMBER})([\])])', one)
    if found:
        whole, left, low, high, right = found.groups()
        return bool(whole), left, number(low), number(high), right


def follows(value, rule):
    """ Whether a value follows a rule. """
    return any(follows_one(value, one) for one in parts_of(rule))


def follows_one(value, one):
    """ Whether a value follows a rule without | in it. """
    if one == 'None':
        return value is None
    if one == 'bool':
        return isinstance(value, bool)
    if one == 'nan':
        return isinstance(value, float) and math.isnan(value)
    if one[0] == '<':
        return isinstance(value, str) and value != ''
    interval = interval_of(one)
    if interval is None and re.fullmatch(NUMBER, one):
        return type(value) in (int, float) and value == number(one)
    if not interval:
        return isinstance(value, str) and value == one.strip("'")

    # a number between its bounds; nan compares false with both
    whole, left, low, high, right = interval
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds:
        return False
    is_above = low <= value if left == '[' else low < value
    is_below = value <= high if right == ']' else value < high
    return is_above and is_below


def check(value, rule):
    """ ValueError unless a value, or each of a sequence, follows the rule. """
    for one in value if isinstance(value, (tuple, list)) else [value]:
        if not follows(one, rule):
            raise ValueError(f'{short(one)}, expected {rule}')


def is_finite(value):
    """ Whether no number in it is nan or inf. """
    if isinstance(value, (tuple, list)):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


# ---- a value as one of a knob's type

def is_plain(value):
    if isinstance(value, (tuple, list)):
        return all(is_plain(v) for v in value)
    return value is None or type(value) in (str, int, float, bool)


def settle(value, default, rule, convert):
    """ A value as one of the default's type, by `convert`: from_text or from_value. ValueError
    where it has no such type, or breaks the rule. """
    is_sequence = isinstance(default, (tuple, list))
    if default is None and rule and convert is from_text:
        # a default of None has no type, so the rule decides: 12 may be a number or a name
        found = whole(from_text(value, None), rule)
        value = found if follows(found, rule) else value
    else:
        try:
            converted = convert(value, default)
        except (ValueError, OverflowError):
            kind = type(default).__name__
            if is_sequence:
                kind = repr(default)
            elif default is None:
                kind = 'plain value'
            raise ValueError(f'{short(value)} is no {kind}') from None
        value = whole(converted, rule) if default is None else converted

    if not is_finite(value):
        expected = f', expected {rule}' if rule else ''
        raise ValueError(f'{short(value)} is no finite number{expected}')
    if rule and is_sequence and default:
        # a sequence of words may have any length but 0, one of numbers has that of the default
        if isinstance(default[0], str):
            if not value:
                raise ValueError(f'{short(value)}, expected at least one')
        elif len(value) != len(default):
            raise ValueError(f'{short(value)}, expected {len(default)} numbers')
    if rule:
        check(value, rule)
    return value


def whole(value, rule):
    """ A value as the rule wants it: 1e5 as a whole number, 1 as true and 0 as false. """
    if not rule:
        return value
    if 'bool' in parts_of(rule) and type(value) is int and value in (0, 1):
        return bool(value)
    wants_int = 'int ' in rule
    return int(value) if wants_int and isinstance(value, float) and value.is_integer() else value


def like(default, i):
    """ The element of a sequence's default that fixes the type of element i. """
    return default[min(i, len(default) - 1)] if default else None


def from_text(text, default):
    """ A flag's text as a value of the default's type; ValueError where it has no such type. """
    if isinstance(default, str):
        return text
    if isinstance(default, (tuple, list)):
        parts = [part.strip(' \'"') for part in text.strip('()[] ').split(',') if part.strip()]
        return type(default)(from_text(part, like(default, i)) for i, part in enumerate(parts))
    if isinstance(default, float):
        return float(text)

    # a literal of Python, also as true and false; else the text itself
    if text.lower() in ('true', 'false'):
        value = text.lower() == 'true'
    else:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = text
    if default is None:
        return value if is_plain(value) else text
    if isinstance(default, bool) and value in (0, 1):
        value = bool(value)
    return from_value(value, default)


def from_value(value, default):
    """ A Python value as one of the default's type. 1 may be a float and 1e5 an int; nothing else
    changes its type. """
    kind = type(default)
    if default is None and is_plain(value):
        return value
    if isinstance(default, (tuple, list)) and isinstance(value, (tuple, list)):
        return kind(from_value(v, like(default, i)) for i, v in enumerate(value))
    if type(value) is kind and is_plain(value):
        return value
    is_whole = kind is int and type(value) is float and value.is_integer()
    if is_whole or kind is float and type(value) is int:
        return kind(value)
    raise ValueError(f'{short(value)} is no {kind.__name__}')


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
    return (node.targets[0].id, value) if is_plain(value) else None


def read_knobs(path):
    """ A script's knobs {name: default}, its help text, and the rules {name: rule} of the knobs
    whose comment opens with one. The source is read, never run. """
    with open(path, 'rb') as f:
        source = f.read()

    # the statements at the top of the script, one after the other
    lines = source.decode().splitlines()
    tree = ast.parse(source, path)
    knobs, rules = {}, {}
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
            if rule := rule_of(comment):
                rules[name] = rule

    # the comment of the last knob may go on below it
    while last < len(lines) and re.match(' +#', lines[last]):
        last += 1
    block = '\n'.join(lines[first:last]).strip()
    doc = ast.get_docstring(tree) or ''
    for more, more_rules, more_block in (imported_knobs(tree), *rooms_of(path)):
        knobs |= more
        rules |= more_rules
        block += f'\n{more_block}'
    return knobs, f'{doc}\n\n{block}'.strip(), rules


def rooms_of(path):
    """ The knobs, rules and lines of each room of a script. """
    if os.path.basename(path) != 'train.py':
        return
    for room, (switch, values) in ROOMS.items():
        knobs, text, rules = read_knobs(os.path.join(HERE, room))
        block = text[text.index(f'\n{next(iter(knobs))} = ') + 1:]
        yield knobs, rules, f'# ---- read where {switch} is {" or ".join(values)} ({room})\n{block}'


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


def stop_at_a_closed_room(path, config):
    """ A flag for a knob whose room no switch names would do nothing. """
    if os.path.basename(path) != 'train.py':
        return
    for room, (switch, values) in ROOMS.items():
        if config[switch] not in values:
            for name in read_knobs(os.path.join(HERE, room))[0]:
                if set_by.get(name) == 'the command line':
                    stop(f'{name} is read where {switch} is {" or ".join(values)}, '
                         f'and {switch}={config[switch]}')


def configure(globals_, argv=None, show=True):
    """ Applies the command line to the knobs of the calling script, in place, and returns all of
    them as a plain dict. Call it right below the knobs: `config = configure(globals())`. It prints
    what was set; with show=False the script calls show_knobs(config) after checks of its own. """
    knobs, help_text, rules = read_knobs(globals_['__file__'])
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
                config[name] = settle(value, knobs[name], rules.get(name), convert)
            except ValueError as error:
                stop(f'knob {name!r} in {source}: {error}')
            set_by[name] = source
    stop_at_a_closed_room(globals_['__file__'], config)
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
