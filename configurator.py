"""
Config files and --key=value over a script's own globals: nanoGPT's idea. The knobs of a script are
read from its source, a config file is run.

    python train.py config/quickstart.py config/stable.py --batch_size=8 --learning_rate=1e-3

A knob is a top-level `name = literal` in the block below a script's imports, or a field of a class.
The block ends at the first statement of another kind. The default of a knob fixes its type. The
comment next to it documents it, and --help prints the block as it stands in the source. The comment
may open with a rule, which ends at a colon or a semicolon, and which a value must follow:

    [0, 1)                     a number x with 0 <= x < 1; never nan
    int [1, 1e6]               a whole number; a knob with a whole default needs no `int`
    auto | never               one of these words; '' is the empty text
    None | bool | [0, 100]     one of several rules; None: chosen by the script
    best | <name of a step>    a word, or any text that is not empty

Below a line as this one, knobs are read where text_process=gidd, and refused elsewhere:
    # ---- read where text_process=gidd

A config file is the user's own Python and runs as such. Its globals in small letters, but modules
and functions, are then taken like flags. Later arguments win. One file serves all scripts, so a
name that is a knob of another script is passed over in it. A mistake is one line and exit code 2.
"""
import ast
import difflib
import functools
import itertools
import os
import re
import runpy
import sys
import textwrap
import traceback
import types
from pathlib import Path
from typing import NamedTuple

from base.console import stop
from base.files import short

HERE = os.path.dirname(os.path.abspath(__file__))
# {script: the file where it has more knobs}
SCRIPTS = {'prepare': '', 'train': '', 'sample': 'sampling/knobs.py',
           'evaluate': 'sampling/knobs.py', 'bench': '', 'plot': ''}
FLAG = 'the command line'
# texts, and no paths
VERBATIM = ('text', 'like', 'towards', 'away', 'prefix', 'split_on', 'classes', 'sweep')
set_by = {}                     # {knob: where it was set}, of the last `configure`


# ---- a knob, and what its value may be

INTERVAL = re.compile(r'(int )?([\[(])(\S+), (\S+)([\])])')
# parts of a rule with | between them: an interval, <a text>, or a word
ONE = r"(?:(?:int )?[\[(]\S+, \S+[\])]|<[^>]+>|[\w'-]+)"
RULE = re.compile(rf'{ONE}( \|\s{ONE})*(?=$|[;:,.\n])')


def follows(value, rule):
    """ Whether a value follows a rule. """
    return any(follows_one(value, one) for one in rule.split(' | '))


def follows_one(value, one):
    """ Whether a value follows a rule without | in it. """
    if one == 'bool':
        return isinstance(value, bool)
    if one[0] == '<':
        return isinstance(value, str) and value != ''
    if one == 'None':
        return value is None
    interval = INTERVAL.fullmatch(one)
    if not interval:
        return one in (value, repr(value).removesuffix('.0'))

    # a number between its bounds; nan compares false with both
    whole, left, low, high, right = interval.groups()
    low, high = float(low), float(high)
    if type(value) is not int and (whole or type(value) is not float):
        return False
    is_above = value >= low if left == '[' else value > low
    is_below = value <= high if right == ']' else value < high
    return is_above and is_below


class Knob(NamedTuple):
    default: object
    rule: str                   # '' where any value of the default's type will do
    text: str                   # its lines in the source, and those above it
    where: str = ''             # read where a knob has one of these values: 'knob=value,value'

    def checked(self, value):
        """ A value as one of the default's type. ValueError where that or the rule is broken. """
        kind = type(self.default)
        if kind is tuple:
            # words may be any number but none, numbers are as many as in the default
            n = len(value) if isinstance(value, (tuple, list)) else 0
            any_number = isinstance(self.default[0], str)
            if n == 0 or not any_number and n != len(self.default):
                raise ValueError(f'{short(value)}, expected values like {self.default}')
            return tuple(self._replace(default=self.default[0]).checked(one) for one in value)

        # a default of None has no type, so the rule decides
        if self.default is None:
            kind = int if 'int ' in self.rule else bool if 'bool' in self.rule else None

        # 1 may be a float, 1e5 a whole number, 0 and 1 a bool; nothing else changes its type
        if kind is float and type(value) is int:
            value = float(value)
        elif kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        elif kind is bool and type(value) is int and value in (0, 1):
            value = bool(value)
        if self.default is not None and type(value) is not kind:
            raise ValueError(f'{short(value)} is no {kind.__name__}')
        if self.rule and not follows(value, self.rule):
            raise ValueError(f'{short(value)}, expected {self.rule}')
        if isinstance(value, str) and re.search('[\ud800-\udfff]', value):
            raise ValueError(f'{short(value)} is not UTF-8')
        return value

    def read(self, text):
        """ A flag's text as a value; ValueError as in `checked`. """
        if isinstance(self.default, str):
            return self.checked(text)
        if isinstance(self.default, tuple):
            parts = [part.strip(' \'"') for part in text.strip('()[] ').split(',')]
            one = self._replace(default=self.default[0])
            return self.checked([one.read(part) for part in parts if part])

        # as Python would read it, also true and false; else, or where a name is meant, the text
        try:
            value = ast.literal_eval({'true': 'True', 'false': 'False'}.get(text.lower(), text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = text
        is_name = self.default is None and '<' in self.rule and not follows(value, self.rule)
        return self.checked(text if is_name else value)


# ---- the knobs of a script

def assigned(node):
    """ (name, value) of `name = literal` or `name: type = literal`, else ('', None). """
    try:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        return target.id, ast.literal_eval(node.value)
    except (AttributeError, ValueError):
        return '', None


def read_knobs(path):
    """ The knobs {name: Knob} of a script, also those in another file. The source is read, never
    run. """
    path = Path(path)
    source = path.read_text('utf-8')
    lines = source.splitlines()
    body = []
    for node in ast.parse(source).body:
        body += node.body if isinstance(node, ast.ClassDef) else [node]

    knobs, where, last = {}, '', 0
    for node in body:
        # above the knobs stand other statements, and the first one below ends the block
        name, default = assigned(node)
        if not name and knobs:
            break

        # a comment may go on below its knob
        first, last = last, node.end_lineno
        while name and last < len(lines) and re.match(' +#', lines[last]):
            last += 1
        comment = [line.partition('# ')[2] for line in lines[node.end_lineno - 1:last]]
        for line in lines[first:node.lineno]:
            if line.lstrip().startswith('# ----'):
                where = line.partition(' read where ')[2]
        if name.islower() and not name.startswith('_'):
            text = textwrap.dedent('\n'.join(lines[first:last]))
            knobs[name] = Knob(default, rule_of('\n'.join(comment)), text, where)

    more = SCRIPTS.get(path.stem)
    return knobs | read_knobs(os.path.join(HERE, more)) if more else knobs


def rule_of(comment):
    """ The rule that opens a comment, or ''. A word alone is prose. """
    found = RULE.match(comment)
    rule = ' '.join(found[0].split()) if found else ''
    return rule if ' | ' in rule or rule.startswith(('[', '(', '<', 'int ')) else ''


def help_of(path):
    """ What --help prints: the docstring of a script, and the lines of its knobs. """
    text = ast.get_docstring(ast.parse(Path(path).read_text('utf-8'))) or ''
    return '\n'.join([text, *(knob.text for knob in read_knobs(path).values())])


def on_command_line(name):
    """ Whether a knob was given as a flag, not by a config file or by default. """
    return set_by.get(name) == FLAG


def here_or_beside(path):
    """ Where a file or folder lies that is only read: here, or else next to this module. The path
    as it is given where it is in neither place. """
    next_to_scripts = os.path.join(HERE, path)
    if path and not os.path.exists(path) and os.path.exists(next_to_scripts):
        return next_to_scripts
    return path


def seen_from(path):
    """ For an error about a path that is relative: where one is. """
    return '' if os.path.isabs(path) else f', seen from {os.getcwd()}'


# ---- config files and the command line

def run_config(path):
    """ Runs a config file. Returns {name: value} of its globals that may be knobs. A file that is
    not there is looked for next to this module. """
    file = here_or_beside(path)
    if os.path.exists(file) and not os.path.isfile(file):                # a pipe would wait
        stop(f'config file {path}: this is a folder, a pipe or a device, expected a file')
    try:
        space = runpy.run_path(file, run_name='config')
    except OSError as error:
        stop(f'no config file {path}: {error.strerror}{near_config(path)}')
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == file]
        line = getattr(error, 'lineno', None) or (line or ['?'])[-1]
        what = f'{type(error).__name__}: {getattr(error, "msg", error)}'
        stop(f'config file {path}, line {line}: {what}')

    # CAPITALS are the file's own constants, _names its own variables
    found = {}
    for name, value in space.items():
        is_its_own = name.startswith('_') or name.isupper()
        is_code = isinstance(value, types.ModuleType) or callable(value)
        if not is_its_own and not is_code:
            found[name] = value
    return found


def configure(globals_, argv=None, show=True):
    """ Applies the command line to the knobs of the calling script, in place, and returns all of
    them as a plain dict. Call it right below the knobs: `config = configure(globals())`. It prints
    what was set; with show=False the script calls show_knobs(config) after checks of its own. """
    script = globals_['__file__']
    if argv is None:
        # UTF-8 also where the terminal's locale is C, and Python takes it for ASCII
        argv = [os.fsencode(arg).decode('utf-8', 'surrogateescape') for arg in sys.argv[1:]]
    if '--help' in argv or '-h' in argv:
        print(help_of(script))
        raise SystemExit(0)

    knobs = read_knobs(script)
    config = {name: knob.default for name, knob in knobs.items()}
    set_by.clear()
    # a word that is out of place says more than the value before it
    for i, arg in enumerate(argv):
        if not is_config(arg) and not (arg.startswith('--') and '=' in arg):
            stop(f'{arg!r} is neither a config file (*.py) nor --key=value'
                 + what_is_meant(argv, i, knobs))
    for arg in argv:
        if is_config(arg):
            source = arg
            settings = run_config(arg)
        else:
            source = FLAG
            name, _, text = arg.removeprefix('--').partition('=')
            settings = {name: text}
        for name, value in settings.items():
            if name not in knobs:
                pass_over(name, source, knobs)
                continue
            config[name] = value_of(name, knobs[name], value, source)
            set_by[name] = source

    # a knob that is not read would do nothing
    for name, source in set_by.items():
        switch, _, values = knobs[name].where.partition('=')
        if switch and config[switch] not in values.split(','):
            stop(f'knob {name!r} in {source} is read where {switch}={values}, '
                 f'and {switch}={config[switch]}')
    globals_.update(config)
    if show:
        show_knobs(config)
    return config


def value_of(name, knob, value, source):
    """ The value of a knob, from the text of a flag or the value in a file. Stops where it is no
    value of this knob. """
    try:
        value = knob.read(value) if source == FLAG else knob.checked(value)
    except ValueError as error:
        stop(f'knob {name!r} in {source}: {error}')
    if not isinstance(value, str) or name in VERBATIM:
        return value

    # a script with the line ends of Windows gives --out=X the name 'X\r'
    if re.search(r'[\0-\x1f\x7f-\x9f]', value):
        stop(f'knob {name!r} in {source}: {value!r} has a control character, which no name has; '
             '\\r is the line end of a script that was written on Windows')
    # a shell leaves the ~ of --out=~/here alone
    return re.sub('(?<![^,])~(?=/)', os.path.expanduser('~'), value)


@functools.cache
def knobs_of_scripts():
    """ {knob: script} of all scripts. """
    found = {}
    for script in reversed(SCRIPTS):
        path = os.path.join(HERE, f'{script}.py')
        found.update(dict.fromkeys(read_knobs(path), f'{script}.py'))
    return found


def is_config(arg):
    return arg.endswith('.py') and not arg.startswith('-')


def what_is_meant(argv, i, knobs):
    """ How to write argument i, which is neither a config file nor --key=value: the end of a
    sentence. """
    def words_from(n):
        return list(itertools.takewhile(lambda word: not word.startswith('--'), argv[n:]))

    # a value begins in the argument before, as in --text=A list, or in this one, as in --steps 8
    for first in range(max(i - 1, 0), i + 1):
        name, _, begin = argv[first].lstrip('-\u2013\u2014').partition('=')
        name = name.replace('-', '_')
        if name not in knobs:
            continue
        knob = knobs[name]
        has_spaces = isinstance(knob.default, (str, tuple))
        # what has spaces was in quotes, so it is no part of what stands before it
        is_other = ' ' in argv[i] or near_config(argv[i]) or os.path.exists(argv[i])
        goes_on = has_spaces and (name in VERBATIM or begin.endswith(',') or not is_other)
        if first < i and begin and not goes_on:
            continue

        # up to the next knob
        words = [word for word in (begin, *words_from(first + 1)) if word not in ('', '=')]
        if has_spaces and len(words) > 1 or ' ' in ''.join(words[:1]):
            return f': put quotes around it, --{name}="{" ".join(words)}"'
        is_switch = isinstance(knob.default, bool) or 'bool' in knob.rule
        value = 'true' if is_switch else 'VALUE'
        if words:
            value = words[0].removeprefix('=')
        return f': write --{name}={value}'

    # no value: a knob that is not there, a file, a text
    if argv[i].startswith('-'):
        pass_over(argv[i].lstrip('-'), FLAG, knobs)
    meant = knob_of_file(argv[i], knobs)
    if not os.path.exists(argv[i]):
        meant = near_config(argv[i]) or meant
    if not meant and 'text' in knobs:
        meant = f': put quotes around it, --text="{" ".join(words_from(i))}"'
    return meant or ', as --watch=true'


def near_config(path):
    """ Which file in config/ may be meant, the end of a sentence; '' where no name is near. """
    names = sorted(file.stem for file in Path(HERE, 'config').glob('*.py'))
    near = difflib.get_close_matches(os.path.basename(path).removesuffix('.py'), names, 1, .8)
    return f': did you mean config/{near[0]}.py?' if near else ''


def knob_of_file(path, knobs):
    """ Which of a script's knobs takes such a file or folder, the end of a sentence; or ''. """
    kind = os.path.splitext(path)[1]
    takers = {'.npy': ['latents', 'latents_from'], '.png': ['image'], '.jpg': ['image']}
    takers = takers.get(kind, ['input', 'texts'])
    if os.path.exists(os.path.join(path, 'config.json')):                # a run
        takers = ['out_dir']
    elif os.path.isdir(path):
        takers = ['input', 'dataset']
    for name in takers:
        if name in knobs and (kind or os.path.exists(path)):
            return f': write --{name}={path}'
    return ''


def pass_over(name, source, knobs):
    """ Stops at a name that is no knob of this script, but where a file sets one of another. """
    others = knobs_of_scripts()
    if name in others and source != FLAG:
        return
    near = difflib.get_close_matches(name, {**knobs, **others}, 1)
    hint = f', did you mean {near[0]!r}?' if near else ', --help lists them'
    hint = f': it is one of {others[name]}' if name in others else hint
    hint = ': a config file stands alone, as config/quickstart.py' if name == 'config' else hint
    stop(f'unknown knob {name!r} in {source}{hint}')


def show_knobs(config):
    """ The first process prints a line for each knob that was set: its value, and where. """
    if set_by and os.environ.get('RANK', '0') == '0':
        lines = [f'{name:<18} {short(config[name]):<30} {source}'
                 for name, source in set_by.items()]
        print('\n'.join(lines), flush=True)
