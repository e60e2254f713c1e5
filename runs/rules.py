"""
One rule for each value that comes from outside: a knob, or a field of a JSON file.

A rule is a short text. Beside a knob it opens the comment, so --help shows it. In the schema of a
JSON file (files.check_json) it is a leaf.

    [0, 1)                     a number x with 0 <= x < 1; never nan; inf only if the rule names it
    nan                        that number
    int [1, 2**20]             a whole number; a knob with a whole default needs no `int`
    auto | never               one of these words; '' is the empty text
    -1 | [0, 100]              one of several rules; -1 is that number
    None | int [1, 2**20]      likewise
    bool                       true or false
    best | <name of a step>    a word, or any text that is not empty
"""
import ast
import math
import re
from functools import lru_cache

# the grammar of a rule; in ONE words stand before numbers, since infill opens with inf
NUMBER = r'-?(?:inf|\d+\*\*\d+|\d+(?:\.\d+)?(?:e-?\d+)?)'
INTERVAL = rf'(?:int )?[\[(]{NUMBER}, {NUMBER}[\])]'
ONE = rf"(?:{INTERVAL}|<[^<>]+>|''|[A-Za-z_][\w-]*|{NUMBER})"
RULE = re.compile(rf'{ONE}(?: \| {ONE})*(?=$|[;:,.] ?)')


# ---- a rule

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


# cached: meta.json has as many fields as there are shards, and only a few rules for them
@lru_cache(maxsize=1000)
def parts_of(rule):
    return re.findall(ONE, rule)


@lru_cache(maxsize=1000)
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


def short(value):
    """ A value in an error line: its first 60 characters. """
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + '...'


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
