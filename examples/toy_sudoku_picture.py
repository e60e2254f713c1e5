""" A sudoku that is filled in several ways, side by side: a picture that moves. """
from toy_sudoku import L, MASK


SIDE = 34                      # of a cell, in pixels
PACE, REST = 0.25, 5.0         # seconds of a call, and of the full grids
STYLE = """
text { font: 16px -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif;
       fill: #0550ae; text-anchor: middle }
.clue { fill: #1f2328; font-weight: 600 } .wrong { fill: #cf222e; font-weight: 600 }
.says { text-anchor: start; fill: #57606a; font-size: 14px } .card { fill: #fff }
.line { stroke: #d0d7de } .thick { stroke: #57606a; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #58a6ff } .clue { fill: #e6edf3 } .wrong { fill: #ff7b72 } .says { fill: #9198a1 }
  .card { fill: #0d1117 } .line { stroke: #3d444d } .thick { stroke: #9198a1 } }
@media (prefers-reduced-motion: reduce) { text { animation: none !important } }
"""


def picture(puzzle, right, panels):
    """ Grids being filled, side by side, as SVG text. puzzle, right (81,): the gaps, and the grid.
    panels: [(what fills it, its grid (81,), the call that wrote each cell (81,), from 1)]. """
    most_calls = max(int(calls.max()) for _, _, calls in panels)
    seconds = PACE * most_calls + REST
    width = len(panels) * 10 * SIDE + SIDE
    height = 12 * SIDE
    body = [f'<rect class="card" width="{width}" height="{height}" rx="8"/>']
    times = set()
    for i, (says, grid, calls) in enumerate(panels):
        x0 = SIDE + 10 * SIDE * i
        y0 = 2 * SIDE
        body.append(f'<text class="says" x="{x0}" y="{SIDE * 1.3:.0f}">{says}</text>')
        for k in range(10):
            kind = 'line' if k % 3 else 'thick'
            d = k * SIDE
            body += [f'<path class="{kind}" d="M{x0 + d} {y0}v{9 * SIDE}"/>',
                     f'<path class="{kind}" d="M{x0} {y0 + d}h{9 * SIDE}"/>']
        for cell in range(L):
            kind, motion = 'clue', ''
            if puzzle[cell] == MASK:
                kind = 'wrong' if grid[cell] != right[cell] else ''
                call = int(calls[cell])
                times.add(call)
                motion = f' style="animation: c{call} {seconds:.1f}s step-end infinite"'
            x = x0 + SIDE * (cell % 9 + .5)
            y = y0 + SIDE * (cell // 9 + .68)
            body.append(f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}"{motion}>{grid[cell] + 1}'
                        '</text>')

    # a digit is not seen before its call
    steps = [f'@keyframes c{call} {{ 0% {{ opacity: 0 }} '
             f'{100 * PACE * call / seconds:.1f}% {{ opacity: 1 }} }}' for call in sorted(times)]
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return '\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', '<style>',
                      STYLE, *steps, '</style>', *body, '</svg>', ''])
