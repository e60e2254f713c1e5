"""
One rule for every value that comes from outside: a knob, or a field of a JSON file.

A rule is a short text. Beside a knob it opens the comment, so `--help` shows it; a schema of a JSON file has it as a leaf.

    [0, 1)                     a number x with 0 <= x < 1; nan never, inf only where the rule names it
    nan                        that number
    int [1, 2**20]             a whole number; a knob whose default is whole needs no `int`
    auto | never               one of these words; '' is the empty text
    -1 | [0, 100]              one of several rules; -1 is that number
    None | int [1, 2**20]      likewise
    bool                       true or false
    best | <name of a step>    a word, or any text that is not empty
"""
import math
import re
from functools import lru_cache

NUMBER = r'-?(?:inf|\d+\*\*\d+|\d+(?:\.\d+)?(?:e-?\d+)?)'
INTERVAL = rf'(?:int )?[\[(]{NUMBER}, {NUMBER}[\])]'
ONE = rf"(?:{INTERVAL}|<[^<>]+>|''|[A-Za-z_][\w-]*|{NUMBER})"   # words first: infill opens with inf
RULE = re.compile(rf'{ONE}(?: \| {ONE})*(?=$|[;:,.] ?)')


def rule_of(comment):
    """ The rule that opens a comment, or None. One word alone is prose, not a rule; only `bool` stands alone. """
    found = RULE.match(comment)
    is_rule = found and (' | ' in found[0] or found[0][0] in '[(<' or found[0].startswith('int ') or found[0] == 'bool')
    return found[0] if is_rule else None


def number(text):
    """ '2**20', '1e-3' or 'inf'. Whole numbers stay exact. """
    base, power, exponent = text.partition('**')
    if power:
        return int(base) ** int(exponent)
    return int(text) if text.lstrip('-').isdigit() else float(text)


def follows(value, rule):
    """ Whether a value follows a rule. """
    return any(follows_one(value, one) for one in parts_of(rule))


@lru_cache(maxsize=1000)                # meta.json has as many fields as there are shards, and a few rules for them
def parts_of(rule):
    return re.findall(ONE, rule)


@lru_cache(maxsize=1000)
def interval_of(one):
    """ (whether whole, '[' or '(', low, high, ']' or ')') of an interval; None for another rule. """
    found = re.fullmatch(rf'(int )?([\[(])({NUMBER}), ({NUMBER})([\])])', one)
    if found:
        whole, left, low, high, right = found.groups()
        return bool(whole), left, number(low), number(high), right


def follows_one(value, one):
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

    # a number between its bounds: nan compares false with both
    whole, left, low, high, right = interval
    if type(value) not in ((int,) if whole else (int, float)):
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
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + '...'


def check_json(value, schema, where):
    """
    ValueError unless a value read from JSON has the form of a schema; `where` names it in the error.
        'int [0, 10]'            a rule
        {'a': ..., 'b?': ...}    an object with field a, and maybe b; other fields are not looked at
        {'*': ...}               an object of any fields, each of this form
        [...]                    a list, each element of this form
        (None, {...})            null, or this form
    """
    def refuse(expected):
        raise ValueError(f'{where}: {short(value)}, expected {expected}')
    if isinstance(schema, tuple):
        if value is not None:
            check_json(value, schema[1], where)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            refuse('a list')
        for i, one in enumerate(value):
            check_json(one, schema[0], f'{where}[{i}]')
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            refuse('an object')
        for key, one in schema.items():
            name = key.removesuffix('?')
            if key == '*':
                for field in value:
                    check_json(value[field], one, f'{where}.{short(field)}')
            elif name in value:
                check_json(value[name], one, f'{where}.{name}')
            elif name == key:
                raise ValueError(f'{where}: no field {name!r}')
    elif not follows(value, schema):
        refuse(schema)
