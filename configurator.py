"""
Config files and --key=value over a script's own globals, nanoGPT's idea without the exec into them.

    python train.py config/quickstart.py config/mixed.py --batch_size=8 --learning_rate=1e-3

A knob is a top-level `name = literal` in the block below a script's imports; its default fixes its type and the
comment beside it is its documentation, so `--help` is that block as it stands in the source. The comment opens with the
knob's range, `# [0, 1): share of ...` or `# auto | never: ...` (rules.py), and a value outside is refused; so is nan or
inf, whatever the knob. The block ends at the first other statement. Later arguments win. A default of None means "derived
below".

Config files are the user's own Python and run as such (they may import and compute); what they leave behind is then
checked like a flag. One file serves all scripts, so a name that only another script knows is passed over; on the command
line only the script's own knobs count. Every mistake is one line on stderr and exit code 2.
"""
import ast
import contextlib
import difflib
import os
import sys
import textwrap
import types

import rules

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPTS = ('prepare', 'train', 'sample', 'evaluate', 'bench', 'plot')


def stop(message, code=2):
    """ Leave with one line on stderr. SystemExit('text') would do the same, but with code 1. """
    print('error: ' + ' '.join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(code)


@contextlib.contextmanager
def stop_on_error(code=2):
    """ Around whatever reads the user's files: what is wrong with them is one line, not a traceback. """
    try:
        yield
    except (ValueError, OSError) as error:
        stop(error, code)


def is_plain(value):
    if isinstance(value, (tuple, list)):
        return all(is_plain(v) for v in value)
    return value is None or type(value) in (str, int, float, bool)


def read_knobs(path):
    """ A script's knobs {name: default}, its help text, and the rules {name: rule} of knobs whose comment opens with one. The
    source is read, never run. """
    with open(path, 'rb') as f:
        source = f.read()
    lines, knobs, found_rules, start, end = source.decode().splitlines(), {}, {}, 0, 0
    tree = ast.parse(source, path)
    doc = ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or node is tree.body[0] and doc is not None:
            start = start if knobs else node.end_lineno
            continue
        if not knobs and isinstance(node, (ast.If, ast.Expr)):  # among the imports: a guard, a setting
            start = node.end_lineno
            continue
        try:
            [target], value = node.targets, ast.literal_eval(node.value)
            name = target.id
        except (AttributeError, ValueError):  # no assignment, not to one name, or of no literal: the block ends
            break
        if not is_plain(value):
            break
        if name.islower() and not name.startswith('_'):
            knobs[name], end = value, node.end_lineno
            comment = lines[end - 1].encode()[node.end_col_offset:].decode().strip(' #')
            if rule := rules.rule_of(comment):
                found_rules[name] = rule
    while end < len(lines) and lines[end].startswith(' ') and lines[end].lstrip().startswith('#'):
        end += 1  # the last knob's comment may go on below it
    block = '\n'.join(lines[start:end])
    return knobs, f'{doc or ""}\n\n{block.strip()}'.strip(), found_rules


def settle(value, default, rule, convert):
    """ A value as `convert` (from_text or from_value) makes it of the default's type; ValueError where it is none, or breaks the
    rule. """
    if default is None and rule and convert is from_text:
        # the rule says what is meant: 12 may be a number or a name
        found = from_text(value, None)
        value = found if rules.follows(whole(found, rule), rule) else value
    else:
        try:
            value = convert(given := value, default)
        except (ValueError, OverflowError):
            kind = repr(default) if isinstance(default, (tuple, list)) else 'plain value' if default is None else type(default).__name__
            raise ValueError(f'{rules.short(given)} is no {kind}') from None
    value = whole(value, rule) if default is None else value

    if not rules.is_finite(value):
        raise ValueError(f'{rules.short(value)} is no finite number' + (f', expected {rule}' if rule else ''))
    if rule:
        if isinstance(default, (tuple, list)) and default:
            is_text = isinstance(default[0], str)
            if not value or not is_text and len(value) != len(default):
                raise ValueError(f'{rules.short(value)}, expected ' + ('at least one' if is_text else f'{len(default)} numbers'))
        rules.check(value, rule)
    return value


def whole(value, rule):
    """ 1e5 is a whole number where the rule wants one, and 1 is true where it wants a bool. """
    if rule and 'bool' in rules.parts_of(rule) and type(value) is int and value in (0, 1):
        return bool(value)
    return int(value) if rule and 'int ' in rule and isinstance(value, float) and value.is_integer() else value


def from_text(text, default):
    """ A flag's text as a value of the default's type; ValueError where it is none. """
    if isinstance(default, str):
        return text
    if isinstance(default, (tuple, list)):
        parts = [part.strip(' \'"') for part in text.strip('()[] ').split(',') if part.strip()]
        return type(default)(from_text(part, like(default, i)) for i, part in enumerate(parts))
    if isinstance(default, float):
        return float(text)
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


def like(default, i):
    """ The element of a sequence's default that fixes the type of element i. """
    return default[min(i, len(default) - 1)] if default else None


def from_value(value, default):
    """ A Python value as one of the default's type: 1 may be a float and 1e5 an int, nothing else changes type. """
    kind = type(default)
    if default is None and is_plain(value):
        return value
    if isinstance(default, (tuple, list)) and isinstance(value, (tuple, list)):
        return kind(from_value(v, like(default, i)) for i, v in enumerate(value))
    if type(value) is kind and is_plain(value):
        return value
    if kind is float and type(value) is int or kind is int and type(value) is float and value.is_integer():
        return kind(value)
    raise ValueError(f'{rules.short(value)} is no {kind.__name__}')


# what sampling and evaluation read of a run's config.json
READ_OF_A_RUN = {
    'dataset', 'mode', 'mode_weights', 'mode_schedule', 'streams', 'causal', 'predict_length',
    'text_clock', 'text_process', 'text_schedule', 'text_power', 'text_loss_weight', 'gidd_uniform',
    'gidd_gamma', 'hdlm_gamma', 'hdlm_xi', 'latent_schedule', 'latent_target', 'importance',
    'masking', 'beta', 'max_iters',
}


def read_run_config(path):
    """
    config.json of a run: each of train.py's knobs, held to its type, and those that are read of a run to their rules too
    (the others may be older than their rules); one that is younger than the run has its
    default. What is no knob is there as it was written: argv, commit, versions, lengths. ValueError names file and field.
    """
    from files import read_json                              # numpy is behind it, which --help does without
    fields = {'argv?': ["'' | <a text>"], 'commit?': "None | '' | <a commit>", 'versions?': {'*': '<a version>'},
              'lengths?': ['int [0, 2**31]']}
    found = read_json(path, fields, limit=2**20)
    knobs, _, rule_of = read_knobs(os.path.join(HERE, 'train.py'))
    for name, default in knobs.items():
        try:
            if name not in found:
                found[name] = default
            elif name in READ_OF_A_RUN:
                found[name] = settle(found[name], default, rule_of.get(name), from_value)
            else:
                found[name] = from_value(found[name], default)
        except ValueError as error:
            raise ValueError(f'{path}: {name}={error}') from None

    # lengths stand in for learning when a text ends: rising quantiles, to be interpolated
    lengths = found.get('lengths')
    if (lengths is None) != found['predict_length'] or lengths is not None and (not lengths or lengths != sorted(lengths)):
        raise ValueError(f'{path}: predict_length={found["predict_length"]}, lengths={rules.short(lengths)}; '
                         'expected rising lengths where predict_length is false, and else none')
    return found


def run_config(path):
    """ Run a config file wherever it lies (else beside this file); its globals that may be knobs. """
    file = path if os.path.exists(path) else os.path.join(HERE, path)
    try:
        with open(file, 'rb') as f:
            source = f.read()
    except OSError as error:
        stop(f'no config file {path}: {error.strerror}')
    space = {'__name__': 'config', '__file__': os.path.abspath(file)}
    try:
        exec(compile(source, file, 'exec'), space)
    except Exception as error:  # a typo in the user's Python deserves a place, not a traceback through ours
        line, trace = getattr(error, 'lineno', None), error.__traceback__
        while trace:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
            trace = trace.tb_next
        stop(f'config file {path}, line {line}: {type(error).__name__}: {getattr(error, "msg", error)}')
    imported = {(a.asname or a.name) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) for a in node.names}
    for name, value in space.items():  # capitals are the file's own constants, _names its own variables
        if not (name.startswith('_') or name.isupper() or isinstance(value, types.ModuleType) or callable(value)):
            yield name, value, name in imported


def configure(globals_, argv=None):
    """ Apply the command line to the knobs of the calling script, in place; returns them all as a plain dict.
    Call it right below the knobs: `config = configure(globals())`. """
    knobs, help_text, rule_of = read_knobs(globals_['__file__'])
    argv = sys.argv[1:] if argv is None else argv
    is_first = os.environ.get('RANK', '0') == '0'  # every rank configures itself, one of them says so
    if '--help' in argv or '-h' in argv:
        if is_first:
            print_help(help_text)
        raise SystemExit(0)

    config, origin = dict(knobs), {}
    for i, arg in enumerate(argv):
        key, equals, text = arg.partition('=')
        if key.startswith('--') and equals:
            settings, source, convert = [(key[2:], text, False)], 'the command line', from_text
        elif arg.endswith('.py') and not arg.startswith('-'):
            settings, source, convert = run_config(arg), arg, from_value
        else:
            value = f'"{argv[i + 1]}"' if i + 1 < len(argv) and not argv[i + 1].startswith('--') else 'VALUE'
            stop(f'{arg!r} is neither a config file (*.py) nor --key=value' + (f': write {arg}={value}' if arg.startswith('--') else ''))
        for name, value, imported in settings:
            if name not in knobs:
                in_file = convert is from_value
                others = other_knobs()
                if in_file and (name in others or imported):
                    continue
                near = difflib.get_close_matches(name, {**knobs, **others} if in_file else knobs, 1, cutoff=.5)
                hint = (f': it is one of {others[name]}' if name in others else
                        f', did you mean {near[0]!r}?' if near else ', --help lists them')
                stop(f'unknown knob {name!r} in {source}{hint}')
            try:
                config[name], origin[name] = settle(value, knobs[name], rule_of.get(name), convert), source
            except ValueError as error:
                stop(f'knob {name!r} in {source}: {error}')
    globals_.update(config)
    if is_first:
        show(config, origin)
    return config


def print_help(text):
    """ To a reader that may close early, as `head` does. """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())   # or Python would complain once more as it ends


def on_command_line(name):
    """ Whether a knob was given as a flag, not by a config file or by default. """
    return any(arg.startswith(f'--{name}=') for arg in sys.argv[1:])


def other_knobs():
    """ {knob: script} of all scripts beside this file; read only when a name is not the caller's own. """
    paths = [os.path.join(HERE, f'{script}.py') for script in SCRIPTS]
    return {name: os.path.basename(path) for path in paths if os.path.exists(path) for name in read_knobs(path)[0]}


def show(config, origin):
    """ The resolved values: those that were set, each with its source, then the rest in a paragraph. """
    for name in origin:
        print(f'{name:<20} {config[name]!r:<28} {origin[name]}')
    rest = ' '.join(f'{name}={value!r}' for name, value in config.items() if name not in origin)
    print(textwrap.fill(rest, 118, initial_indent='at default: ', subsequent_indent='  ',
                        break_long_words=False, break_on_hyphens=False), flush=True)
