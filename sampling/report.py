"""
A page of a run (plot.py --what=report): one HTML file that holds all it needs. It shows
    texts being written, step by step    by the run: what its samplers wrote, and the probabilities
                                         that they drew from
    losses                               a chart, which plot.py draws
A part that cannot be made says why, and the others stand. The page asks no server for anything, and
forbids itself to. Its frame, its style and its script are in report.html.
"""
import json
import os
import re
from html import escape

from base.console import shown
from base.files import read_json, short
from diffusion import MaskedText
from sampling.animation import chosen_frames
from sampling.recorder import Recorder, name_of, spans_of
from sampling.run import Run

TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'report.html')
N_TEXTS, MOST_STEPS = 3, 48
FACTS = ('streams', 'depth', 'width', 'dataset', 'mode', 'max_iters', 'seed', 'commit')


def facts_of(out_dir):
    """ The run in a few words. """
    path = os.path.join(out_dir, 'config.json')
    config = read_json(path)
    argv = config.get('argv', [])
    if not isinstance(argv, list):
        raise ValueError(f'{path}: argv is {short(argv)}, expected a list')
    facts = {name: config.get(name) for name in FACTS}
    facts['command'] = ' '.join(map(str, argv))
    rows = [f'<dt>{name}</dt><dd>{escape(shown(value))}</dd>' for name, value in facts.items()
            if value not in (None, '')]                    # released weights have no command
    return f'<dl>{"".join(rows)}</dl>'

# -----------------------------------------------------------------------------
# Texts being written

def ways_of(run):
    """ {name: settings} of the ways in which the run writes, diffusion first. """
    steps = min(run.net.L, MOST_STEPS)
    ways = {}
    if run.net.fills_masks and isinstance(run.net.text, MaskedText):
        # it asks at every mask; from nothing the likeliest texts would all be the same
        temperature = 0.0 if 'latent' in run.net.streams else 1.0
        ways['diffusion (confidence)'] = dict(sampler='confidence', steps=steps,
                                              temperature=temperature)
    elif run.net.fills_masks:
        ways['diffusion'] = dict(sampler='ancestral', steps=steps)
    if run.net.is_causal:
        ways['autoregressive'] = dict(sampler='autoregressive')
    return ways


def unmaskings(run, texts, raw):
    """ The data of the slider: for each of the first texts and each way, every step. """
    run.check('l2t' if 'latent' in run.net.streams else 'text')
    found = []
    for row, source in enumerate(texts):
        for way, settings in ways_of(run).items():
            # each by itself, so that its calls and its steps are its own
            recorder = Recorder(run.net.text.mask_id)
            run.net.row_calls = 0
            if 'latent' in run.net.streams:
                run.write(latents=raw[row:row + 1], on_step=recorder, **settings)
            else:
                run.sample_text(1, recorder, seed=row, **settings)
                source = ''
            steps = steps_of(run.tokenizer, recorder.frames, 0, run.net.text.mask_id)
            title = f'{row + 1}, {way}, calls {run.net.row_calls} of {run.net.L}'
            found.append(dict(title=title, source=source, **steps))
    return found


def steps_of(tokenizer, frames, row, mask_id):
    """ A text as the page reads it. steps: the cells [text, kinds, number] of each frame that is
    shown. said: what the network said, by that number; -1: it was not asked. Of a mask that is what
    it said in this step, and of a token what it said in the step that wrote it. """
    shown = {id(frame) for frame in chosen_frames(frames, MOST_STEPS)}
    numbers, said, steps = {}, [], []
    for frame in frames:
        is_open = (frame.tokens[row] >= mask_id) | frame.is_new[row]
        for i in is_open.nonzero().flatten().tolist():
            numbers.pop(i, None)
            if frame.asked[row, i]:
                numbers[i] = len(said)
                said.append(candidates(tokenizer, frame, row, i))

        if id(frame) in shown:
            spans = spans_of(tokenizer, frame, row, mask_id, least_draft=0, to_end=True)
            cells = [[*span, numbers.get(i, -1)] for i, span in enumerate(spans)]
            steps.append(cells)
    return dict(steps=steps, said=said)


def candidates(tokenizer, frame, row, i):
    """ [[text, probability, whether it was written]]: the likeliest tokens at a position, and last
    the one that was written, where it is none of them. """
    written = frame.tokens[row, i].item()
    ids = frame.top_ids[row, i].tolist()
    p = frame.top_p[row, i].tolist()
    if frame.is_new[row, i] and written not in ids:
        ids.append(written)
        p.append(frame.p[row, i].item())
    return [[name_of(tokenizer, token), round(p_token, 4), token == written]
            for token, p_token in zip(ids, p) if p_token > 0]

# -----------------------------------------------------------------------------
# The page

def as_json(value):
    """ JSON that may stand inside a script element: no text in it can end the element. """
    text = json.dumps(value, separators=(',', ':'), ensure_ascii=True)
    return text.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')


def attempt(make, *inputs):
    """ What it makes; where an input is missing or it cannot, the ValueError that says why. """
    for one in inputs:
        if isinstance(one, ValueError):
            return one
    try:
        return make(*inputs)
    except (ValueError, OSError) as error:
        return ValueError(error)
    except Exception as error:                 # what was never written in this form, or is a bug
        return ValueError('a file of this run is not as train.py and prepare.py write it '
                          f'({type(error).__name__}: {error})')


def page(out_dir, texts_of, losses):
    """ The whole page as a text. texts_of(run, n): n texts and their raw latents. losses(): a chart
    as HTML. """
    run = attempt(Run, out_dir)
    found = attempt(texts_of, run, N_TEXTS)
    texts, raw = [found] * 2 if isinstance(found, ValueError) else found
    unmasking = attempt(unmaskings, run, texts, raw)
    is_missing = isinstance(unmasking, ValueError)
    parts = dict(
        title=escape(os.path.basename(os.path.normpath(out_dir))),
        checkpoint=escape(getattr(run, 'checkpoint', 'no checkpoint')),
        facts=attempt(facts_of, out_dir),
        losses=attempt(losses),
        unmasking_missing=unmasking if is_missing else '',
        unmasking_hidden='hidden' if is_missing else '',
        unmasking=as_json([] if is_missing else unmasking))

    # the template, with each {{name}} replaced
    def part(match):
        value = parts[match[1]]
        if isinstance(value, ValueError):
            return f'<p class="missing">Not shown: {escape(shown(value))}</p>'
        return value
    with open(TEMPLATE, encoding='utf-8') as f:
        return re.sub(r'\{\{(\w+)\}\}', part, f.read())
