"""
An animated picture of texts being written (sample.py --svg): a panel for each way of writing, a
frame for each step, all at the same pace. CSS moves it, so no library is needed, and it moves where
a page shows it as a picture, such as a README on GitHub. Where motion is not wanted it shows the
finished texts.
"""
from html import escape

from sampling.unmasking import MASK, pieces_of, printable

WIDTH, MARGIN = 720, 24            # of the picture
ADVANCE, LINE, SIZE = 9.04, 24, 15 # a character, a line, the font, in pixels
COLUMNS = int((WIDTH - 2 * MARGIN) / ADVANCE)
BLOCK = '█'                        # a mask
SECONDS, REST = 0.35, 4.0          # of a frame, and of the finished texts
MOST_FRAMES = 64                   # of a panel: of a longer writing every second step is shown, ...

STYLE = """
text { font: %(size)dpx ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
       monospace; fill: #1f2328 }
.h { font-family: -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif;
     font-size: 13px; fill: #57606a }
.card { fill: #fff; stroke: #d0d7de } .bar { stroke: #eaeef2; stroke-width: 3 }
.done { stroke: #0550ae; stroke-width: 3 }
.m { fill: #d0d7de; font-size: 11px; letter-spacing: 2px }
.u { fill: #8c959f } .n { fill: #0550ae } .a { fill: #8250df }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .h { fill: #9198a1 } .card { fill: #0d1117; stroke: #3d444d }
  .bar { stroke: #262c36 } .done { stroke: #4493f8 }
  .m { fill: #3d444d } .u { fill: #79828d } .n { fill: #58a6ff } .a { fill: #bc8cff }
}
.f { opacity: 0; animation: %(total).2fs step-end infinite } .z { opacity: 1 }
@media (prefers-reduced-motion: reduce) { .f { animation: none } }
"""


def chosen_frames(frames):
    """ At most MOST_FRAMES of them, evenly, the first and the last among them. """
    every = -(-(len(frames) - 1) // MOST_FRAMES) or 1
    return frames[:-1:every] + frames[-1:]


def spans_of(tokenizer, frame, mask_id, is_last=False):
    """ [(text, class)] of the first text of a frame, one for each token. m: masked, u: written
    with a probability below a half, n: written in this step, not the last, a: written again. """
    ids = frame.tokens[0].tolist()
    spans = []
    for i, piece in enumerate(pieces_of(tokenizer, ids, mask_id)):
        if ids[i] >= mask_id:
            name = 'm'
            piece = piece.replace(MASK, BLOCK)
        elif frame.is_new[0, i] and not is_last:
            name = 'n'
        elif frame.is_again[0, i]:
            name = 'a'
        else:
            name = 'u' if frame.p[0, i] < 0.5 else ''
        spans.append((piece, name))
    return spans


def lines_of(spans):
    """ The spans cut into lines of COLUMNS characters; neighbours of one class become one span. """
    lines, n_in_line = [[]], 0
    for text, name in spans:
        if n_in_line and n_in_line + len(text) > COLUMNS:
            lines.append([])
            n_in_line = 0
            text = text.removeprefix(' ')
        line = lines[-1]
        if line and line[-1][1] == name:
            line[-1] = (line[-1][0] + text, name)
        else:
            line.append((text, name))
        n_in_line += len(text)
    return lines


def draw_lines(lines, y):
    """ One text element for each line. """
    drawn = []
    for i, line in enumerate(lines):
        spans = ''
        for text, name in line:
            text = escape(text)
            spans += f'<tspan class="{name}">{text}</tspan>' if name else text
        drawn.append(f'<text x="{MARGIN}" y="{y + LINE * i}" xml:space="preserve">{spans}</text>')
    return ''.join(drawn)


def keyframes(name, first, last, total):
    """ Shown from the second `first` to `last` of `total`. """
    shown = f'{100 * first / total:.3f}% {{ opacity: 1 }}'
    hidden = f' {100 * last / total:.3f}% {{ opacity: 0 }}' if last < total else ''
    start = '0% { opacity: 0 } ' if first else ''
    return f'@keyframes {name} {{ {start}{shown}{hidden} }}\n.{name} {{ animation-name: {name} }}'


def draw_panel(label, frames, texts, y):
    """ (The frames of one way of writing, each a group with its time; where they end, in pixels).
    texts: of each frame its lines. """
    height = LINE * max(map(len, texts))
    below = y + height + 10
    width = WIDTH - 2 * MARGIN
    n_steps = max(1, frames[-1].step)

    groups = [f'<path class="bar" d="M{MARGIN} {below}h{width}"/>']
    for i, (frame, lines) in enumerate(zip(frames, texts)):
        name = f'z z{i}' if frame is frames[-1] else f'k{i}'
        says = escape(f'{label}: step {frame.step} of {n_steps}')
        done = width * frame.step / n_steps
        groups.append(f'<g class="f {name}"><text class="h" x="{MARGIN}" y="{y}">{says}</text>'
                      f'{draw_lines(lines, y + LINE)}'
                      f'<path class="done" d="M{MARGIN} {below}h{done:.0f}"/></g>')
    return groups, below


def animation(tokenizer, mask_id, panels, title):
    """ The picture as SVG text. panels: [(what writes, frames of a Recorder)]; title: a line above
    them. """
    panels = [(label, chosen_frames(frames)) for label, frames in panels]
    most = max(len(frames) for _, frames in panels)
    total = (most - 1) * SECONDS + REST
    title = printable(title)

    # the timing of the frames; of the last of each panel: until the end
    rules = [STYLE % dict(size=SIZE, total=total)]
    for i in range(most):
        rules.append(keyframes(f'k{i}', i * SECONDS, (i + 1) * SECONDS, total))
    for count in sorted({len(frames) for _, frames in panels}):
        rules.append(keyframes(f'z{count - 1}', (count - 1) * SECONDS, total, total))

    # the title, then panel below panel
    body, y = [], 34
    for line in lines_of([(word + ' ', 'h') for word in title.split()]):
        text = ''.join(text for text, _ in line)
        body.append(f'<text class="h" x="{MARGIN}" y="{y}">{escape(text.strip())}</text>')
        y += 20
    for label, frames in panels:
        texts = [lines_of(spans_of(tokenizer, frame, mask_id, frame is frames[-1]))
                 for frame in frames]
        groups, below = draw_panel(label, frames, texts, y + 14)
        body += groups
        y = below + 24

    # all of it on a card
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    card = f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{y - 1}" rx="8"/>'
    return '\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                      f'<title>{escape(title)}</title>', '<style>', *rules, '</style>', card,
                      *body, '</svg>', ''])
