"""
An animated picture of texts being written (sample.py --svg): a panel for each way of writing, a
frame for each step, all at the same pace; or of pictures that come out of noise. CSS moves it, so
no library is needed, and it moves where a page shows it as a picture, such as a README on GitHub.
Where motion is not wanted it shows what is finished.
"""
import base64
import io
from html import escape

from sampling.recorder import MASK, lines_of, printable, spans_of

WIDTH, MARGIN = 720, 24            # of the picture
ADVANCE, LINE = 9.04, 24           # a character and a line, in pixels
COLUMNS = int((WIDTH - 2 * MARGIN) / ADVANCE)
BLOCK = '█'                        # a mask
SECONDS, REST = 0.35, 4.0          # of a frame, and of the finished texts
MOST_STEPS = 64                    # of a panel; where there are more, every second one is shown, or
                                   # every third, ...

MOST_PICTURES = 8                  # in a row

LOOK = """
text { font: 15px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
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
"""
# .k shows a frame for its SECONDS. Its delay is negative: the picture runs on as if it had begun
# that long ago. .z shows the finished text until the end
MOTION = """
.k { opacity: 0; animation: k %(total).2fs step-end infinite }
.z { opacity: 1; animation: z %(total).2fs step-end infinite }
@keyframes k { 0%% { opacity: 1 } %(share).3f%% { opacity: 0 } }
@keyframes z { 0%% { opacity: 1 } %(rest).3f%% { opacity: 0 } }
@media (prefers-reduced-motion: reduce) { .k, .z { animation: none } }
"""


def chosen_frames(frames, most_steps):
    """ The start and at most so many steps, evenly, the last among them. """
    every = -(-(len(frames) - 1) // most_steps) or 1
    return frames[:-1:every] + frames[-1:]


def text_at(y, spans):
    """ A line of the picture. A span has one class, the first of m, n, a and u among its kinds. """
    inside = ''
    for text, kinds in spans:
        text = escape(text.replace(MASK, BLOCK))
        name = next((kind for kind in 'mnau' if kind in kinds), '')
        inside += f'<tspan class="{name}">{text}</tspan>' if name else text
    return f'<text x="{MARGIN}" y="{y}" xml:space="preserve">{inside}</text>'


def lines_of_frames(tokenizer, mask_id, frames):
    """ The lines of the first text in each frame. In the last one nothing is new. """
    found = []
    for frame in frames:
        spans = spans_of(tokenizer, frame, 0, mask_id)
        if frame is frames[-1]:
            spans = [(text, kinds.replace('n', '')) for text, kinds in spans]
        found.append(lines_of(spans, COLUMNS))
    return found


def panel_of(label, frames, texts, y, total):
    """ (The frames of one way of writing, each a group with its time; where they end, in pixels).
    texts: of each frame its lines; total: seconds of the picture. """
    below = y + LINE * max(map(len, texts)) + 10
    width = WIDTH - 2 * MARGIN
    n_steps = max(1, frames[-1].step)

    groups = [f'<path class="bar" d="M{MARGIN} {below}h{width}"/>']
    for i, (frame, lines) in enumerate(zip(frames, texts)):
        says = escape(f'{label}: step {frame.step} of {n_steps}')
        of_text = ''
        for j, line in enumerate(lines, 1):
            of_text += text_at(y + LINE * j, line)
        done = width * frame.step / n_steps
        kind = 'z' if i == len(frames) - 1 else 'k'
        delay = i * SECONDS - total
        groups.append(f'<g class="{kind}" style="animation-delay: {delay:.2f}s">'
                      f'<text class="h" x="{MARGIN}" y="{y}">{says}</text>{of_text}'
                      f'<path class="done" d="M{MARGIN} {below}h{done:.0f}"/></g>')
    return groups, below


def animation(tokenizer, mask_id, panels, title):
    """ The picture as SVG text. panels: [(what writes, frames of a Recorder)]; title: a line above
    them. """
    panels = [(label, chosen_frames(frames, MOST_STEPS)) for label, frames in panels]
    most = max(len(frames) for _, frames in panels)
    total = (most - 1) * SECONDS + REST

    # the title, then panel below panel
    body, y = title_of(title)
    for label, frames in panels:
        frames += frames[-1:] * (most - len(frames))       # all panels end together
        texts = lines_of_frames(tokenizer, mask_id, frames)
        groups, below = panel_of(label, frames, texts, y + 14, total)
        body += groups
        y = below + 24

    return on_a_card(body, WIDTH, y, total, title)


def title_of(title):
    """ The lines of a title, and where they end, in pixels. """
    lines = []
    y = 34
    words = [(word + ' ', '') for word in printable(title).split()]
    for line in lines_of(words, COLUMNS):
        text = ''.join(text for text, _ in line)
        lines.append(f'<text class="h" x="{MARGIN}" y="{y}">{escape(text.strip())}</text>')
        y += 20
    return lines, y


def on_a_card(body, width, height, total, title):
    """ The whole SVG text. total: seconds until it begins anew. """
    motion = MOTION % dict(total=total, share=100 * SECONDS / total, rest=100 * REST / total)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    card = f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    return '\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                      f'<title>{escape(printable(title))}</title>', '<style>', LOOK, motion,
                      '</style>', card, *body, '</svg>', ''])


def animation_of_pictures(sheets, title):
    """ Pictures coming out of noise, as SVG text. sheets: a PIL image of each step. """
    sheets = chosen_frames(sheets, MOST_STEPS)
    total = (len(sheets) - 1) * SECONDS + REST
    body, y = title_of(title)
    width, height = sheets[0].size
    for i, sheet in enumerate(sheets):
        file = io.BytesIO()
        sheet.save(file, 'PNG', optimize=True)
        data = base64.b64encode(file.getvalue()).decode()
        kind = 'z' if i == len(sheets) - 1 else 'k'
        delay = i * SECONDS - total
        body.append(f'<image class="{kind}" style="animation-delay: {delay:.2f}s" x="{MARGIN}" '
                    f'y="{y}" width="{width}" height="{height}" '
                    f'href="data:image/png;base64,{data}"/>')
    return on_a_card(body, max(WIDTH, width + 2 * MARGIN), y + height + MARGIN, total, title)
