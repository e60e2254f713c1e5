"""
Charts as SVG text, for a page that holds all it needs (benchmarks/report.py). Colours are classes:
c0, c1, ... for names and o0, o1, ... for what has an order; the page says what they look like, by
day and by night. A chart is small, so that its letters stay readable on a narrow window.
"""
import math
from html import escape

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 38          # margins around the plotted area
N_COLOURS = 7


class Axis:
    """ From values to pixels. lo, hi: the values at the ends; start, end: their pixels. """

    def __init__(self, values, start, end, log=False, zero=False):
        values = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        lo, hi = (min(values), max(values)) if values else (1, 10) if log else (0, 1)
        if zero:
            lo = min(lo, 0)
        if lo == hi:
            lo, hi = (lo / 1.5, hi * 1.5) if log else (lo - 0.5, hi + 0.5)

        # a little room, so that no line lies on the frame
        room = 0.04
        if log:
            grow = (hi / lo) ** room
            lo, hi = lo / grow, hi * grow
        else:
            grow = (hi - lo) * room
            lo, hi = lo - grow * (lo != 0), hi + grow
        self.lo, self.hi, self.start, self.end, self.log = lo, hi, start, end, log

    def __call__(self, value):
        share = (value - self.lo) / (self.hi - self.lo)
        if self.log:
            share = math.log(value / self.lo) / math.log(self.hi / self.lo)
        return round(self.start + share * (self.end - self.start), 1)

    def shows(self, value):
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self):
        """ Round values, about five. """
        if self.log:
            first, last = math.floor(math.log10(self.lo)), math.ceil(math.log10(self.hi))
            found = [m * 10.0 ** e for e in range(first, last + 1) for m in (1, 2, 5)]
            if last - first > 3:
                found = [10.0 ** e for e in range(first, last + 1, -(-(last - first) // 6))]
            found = [v for v in found if self.lo <= v <= self.hi]
            if len(found) >= 2:
                return found
        raw = (self.hi - self.lo) / 4
        step = 10.0 ** math.floor(math.log10(raw))
        step *= next(m for m in (1, 2, 5, 10) if m * step >= raw * 0.99)
        first = math.ceil(self.lo / step)
        return [i * step for i in range(first, math.floor(self.hi / step) + 1) if self.shows(i)]


def number(value):
    """ As it stands beside an axis. """
    if abs(value) >= 10_000:
        return f'{value / 1000:g}k'
    return f'{value:.4g}'


def frame(x, y, x_label, y_label):
    """ Grid, ticks and labels. """
    parts = []
    for value in y.ticks():
        at = y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>'
                     f'<text class="tick" x="{LEFT - 5}" y="{at + 3.5}" text-anchor="end">'
                     f'{number(value)}</text>')
    for value in x.ticks():
        at = x(value)
        parts.append(f'<path class="grid" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>'
                     f'<text class="tick" x="{at}" y="{HEIGHT - BOTTOM + 14}" '
                     f'text-anchor="middle">{number(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">'
                 f'{escape(x_label)}</text>')
    height = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="label" transform="translate(11 {height}) rotate(-90)" '
                 f'text-anchor="middle">{escape(y_label)}</text>')
    return ''.join(parts)


def path_of(points, x, y):
    """ A line through the points; what cannot be drawn (nan, inf, 0 on a log axis) is a gap. """
    steps, is_gap = [], True
    for a, b in points:
        if not (x.shows(a) and y.shows(b)):
            is_gap = True
            continue
        steps.append(f'{"M" if is_gap else "L"}{x(a)} {y(b)}')
        is_gap = False
    return ''.join(steps)


def line_chart(title, lines, x_label, y_label, log_x=False, log_y=False, zero=False,
               is_ordered=False):
    """
    A figure with its legend. lines: {name: [(x, y)] or [(x, y, standard error)]}; few points are
    drawn as dots that tell their numbers. is_ordered: the names have an order, and so the colours.
    """
    x = Axis([p[0] for line in lines.values() for p in line], LEFT, WIDTH - RIGHT, log_x)
    heights = []
    for line in lines.values():
        for _, value, *error in line:
            heights += [value, value - sum(error), value + sum(error)]
    y = Axis(heights, HEIGHT - BOTTOM, TOP, log_y, zero)

    drawn, legend = [], []
    for i, (name, line) in enumerate(lines.items()):
        colour = f'o{min(i, 3)}' if is_ordered else f'c{i % N_COLOURS}'
        drawn.append(f'<path class="line {colour}" d="{path_of([p[:2] for p in line], x, y)}"/>')
        for a, b, *error in line if len(line) <= 40 else ():
            if not (x.shows(a) and y.shows(b)):
                continue
            says = f'{name}: {b:.4g} at {number(a)}'
            if error and error[0] and y.shows(b - error[0]):
                says += f' ± {error[0]:.2g}'
                drawn.append(f'<path class="line {colour}" '
                             f'd="M{x(a)} {y(b - error[0])}V{y(b + error[0])}"/>')
            drawn.append(f'<circle class="dot {colour}" cx="{x(a)}" cy="{y(b)}" r="2.6">'
                         f'<title>{escape(says)}</title></circle>')
        legend.append(f'<li class="{colour}">{escape(name)}</li>')

    picture = (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
               f'{frame(x, y, x_label, y_label)}{"".join(drawn)}</svg>')
    return (f'<figure><figcaption>{escape(title)}</figcaption>{picture}'
            f'<ul class="legend">{"".join(legend)}</ul></figure>')


def scatter(title, points, others, x_label, y_label):
    """ Dots that can be pointed at: points (n, 2), the number of each as data-i. others (m, 2) or
    None: where the first m of them came out, drawn as rings and joined by a line. """
    everything = [*points, *(others if others is not None else [])]
    x = Axis([p[0] for p in everything], LEFT, WIDTH - RIGHT)
    y = Axis([p[1] for p in everything], HEIGHT - BOTTOM, TOP)
    drawn = []
    for (a, b), (c, d) in zip(points, others if others is not None else []):
        drawn.append(f'<path class="grid" d="M{x(a)} {y(b)}L{x(c)} {y(d)}"/>'
                     f'<circle class="ring" cx="{x(c)}" cy="{y(d)}" r="3"/>')
    for i, (a, b) in enumerate(points):
        drawn.append(f'<circle class="dot c0" data-i="{i}" tabindex="{0 if i == 0 else -1}" '
                     f'role="button" aria-label="text {i + 1}" cx="{x(a)}" cy="{y(b)}" r="3.6"/>')
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="{escape(title)}">'
            f'{frame(x, y, x_label, y_label)}{"".join(drawn)}</svg>')
