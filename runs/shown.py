"""
Nothing that a text, the name of a file or a damaged file holds reaches a terminal raw: a character
that a terminal would obey is shown as its escape. configurator.configure puts this below every
print of a script. Files, and who imports a script, have their texts exactly.
"""
import os
import re
import sys

# What a terminal obeys: C0 but tab and newline, DEL, C1; what turns the direction of writing, or
# ends a line; half of a UTF-16 pair, which stands for a byte that is no text
OBEYED = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')
# how tqdm redraws a bar: a write of its own goes back to the first column, or up by some lines
OF_A_BAR = re.compile(r'\r|\n*(\x1b\[A)+\Z')


def shown(text):
    """ A text as it may be printed: every character that a terminal would obey is its escape, as
    \\x1b. Newline and tab stay. """
    return OBEYED.sub(lambda found: found[0].encode('unicode_escape').decode(), text)


class ShownStream:
    """ stdout or stderr, where all that is written is `shown`. terminal: the stream itself, for
    code that draws and knows each character. has_bars: progress bars may move. """

    def __init__(self, terminal, has_bars=False):
        self.terminal = terminal
        self.has_bars = has_bars

    def __getattr__(self, name):
        return getattr(self.terminal, name)

    def write(self, text):
        bar = OF_A_BAR.match(text) if self.has_bars else None
        start = bar[0] if bar else ''
        self.terminal.write(start + shown(text[len(start):]))
        return len(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)


def show_all_output():
    """ From here on this process shows all that it prints: texts, names of files, tracebacks. """
    for name in ('stdout', 'stderr'):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, ShownStream):   # None: it was closed
            setattr(sys, name, ShownStream(stream, has_bars=name == 'stderr'))
    os.environ.setdefault('PYTHON_COLORS', '0')            # or Python colours its tracebacks
