"""
A page of a run: one HTML file that holds all it needs (plot.py --what=report). It shows
    losses by clock, validation          from training_log.jsonl
    figures beside their controls        from results.json of evaluate.py
    quality against network calls        from the sweeps in it
    texts being written, step by step    by the run: the ids that its samplers wrote, and the
                                         probabilities that they drew from
    the same texts at each checkpoint    by the checkpoints that the folder keeps
    latents, and what they say           by the run, from its dataset
A part that cannot be made says why, and the others stand. The page asks no server for anything, and
forbids itself to. Its frame, its style and its script are in report.html.
Letters: n texts, L tokens, N latent vectors, D latent dimensions, K steps.
"""
import base64
import io
import json
import os
import re
from html import escape

import torch
import torch.nn.functional as F

from benchmarks import pictures
from diffusion import MaskedText
from runs import checkpoint
from runs.files import read_json
from sampling.loading import load_run, raw_latents
from runs.manifest import dataset_folder
from sampling.unmasking import Recorder, pieces_of, printable
from sampling.directions import NEEDS, check_direction, l2t, t2l
from sampling.writing import blank, write
from tasks.common import load_texts

TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'report.html')
N_WATCHED, MOST_STEPS = 3, 48      # texts of the scrubber, and steps that it shows of each
N_OVER_TIME = 6                    # texts written by each checkpoint
N_LATENTS = 120                    # dots in the picture of the latents

# of a sweep, the first of these that it has is drawn
METRICS = ('bleu', 'centred_cosine', 'f1', 'gen_ppl', 'mrr', 'cosine', 'retrieval@1', 'class')

# -----------------------------------------------------------------------------
# From the files of the run folder

def facts_of(out_dir):
    """ The run in a few words. """
    config = read_json(os.path.join(out_dir, 'config.json'))
    n_steps = config.get('max_iters')
    facts = {'dataset': config.get('dataset'), 'mode': config.get('mode'),
             'streams': ' + '.join(config.get('streams', ())),
             'network': f'depth {config.get("depth")}, width {config.get("width")}',
             'steps': f'{n_steps:,}' if isinstance(n_steps, int) else n_steps,
             'seed': config.get('seed'), 'commit': str(config.get('commit'))[:7],
             'command': ' '.join(map(str, config.get('argv', ())))}
    rows = [f'<dt>{name}</dt><dd>{escape(str(value))}</dd>' for name, value in facts.items()]
    return f'<dl>{"".join(rows)}</dl>'


def image_of(figure):
    """ A picture of matplotlib as an element of the page. """
    figure.tight_layout()
    file = io.BytesIO()
    figure.savefig(file, format='svg')
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="" src="data:image/svg+xml;base64,{data}">'


def losses(out_dir):
    """ Each stream's loss with its validation, and by clock; the gradient norm, and speed. """
    entries = pictures.read_log(os.path.join(out_dir, 'training_log.jsonl'))
    return image_of(pictures.draw_curves(entries, pictures.pyplot()))


def controls(out_dir):
    """ A table of each task that was evaluated: a column for the run, one for each control. """
    results = pictures.read_results(os.path.join(out_dir, 'results.json'))
    tables = {}                    # {task: {metric: {control: (value, standard error)}}}
    for key, value in results.items():
        task, *control, metric = key.split('/')
        if '_sweep_' in task or metric.endswith('_se') or f'{key}_se' not in results:
            continue
        cell = value, results[f'{key}_se']
        tables.setdefault(task, {}).setdefault(metric, {})['/'.join(control)] = cell
    if not tables:
        raise ValueError(f'{out_dir}/results.json has no figure with a standard error')

    shown = []
    for task, metrics in tables.items():
        columns = list(dict.fromkeys(control for cells in metrics.values() for control in cells))
        head = ''.join(f'<th scope="col">{escape(column or "the run")}</th>' for column in columns)
        rows = []
        for metric, cells in metrics.items():
            row = ''.join(cell_of(*cells.get(column, (None, None))) for column in columns)
            rows.append(f'<tr><th scope="row">{escape(metric)}</th>{row}</tr>')
        n = results.get(f'{task}/n')
        of = f' of {n} texts' if n else ''
        shown.append(f'<h3>{escape(task)}{of}</h3><div class="wide"><table><tr><td></td>{head}</tr>'
                     f'{"".join(rows)}</table></div>')
    return ''.join(shown)


def cell_of(value, error):
    if value is None:
        return '<td></td>'
    error = '' if error is None else f'<small> ± {error:.3f}</small>'
    return f'<td>{value:.3f}{error}</td>'


def frontier(out_dir):
    """ A chart of each sweep: quality against the network calls that a text took, or against the
    knob that was swept. """
    results = pictures.read_results(os.path.join(out_dir, 'results.json'))
    images, drawn = [], set()
    for metric in METRICS:
        sweeps = pictures.read_sweeps(results, metric)
        new = {name: points for name, points in sweeps.items() if name not in drawn}
        if new or metric == METRICS[-1] and not images:
            images.append(image_of(pictures.draw_sweeps(new, metric, pictures.pyplot())))
        drawn |= new.keys()
    return ''.join(images)

# -----------------------------------------------------------------------------
# Texts being written

def ways_of(run):
    """ {name: settings} of the ways in which the run writes. """
    steps = min(run.L, MOST_STEPS)
    ways = {}
    if run.fills_masks and isinstance(run.text, MaskedText):
        # it asks at every mask; from nothing the likeliest texts would all be the same
        temperature = 0.0 if 'latent' in run.streams else 1.0
        ways['diffusion (confidence)'] = dict(sampler='confidence', steps=steps,
                                              temperature=temperature)
    elif run.fills_masks:
        ways['diffusion'] = dict(sampler='ancestral', steps=steps)
    if run.next_token is not None:
        ways['autoregressive'] = dict(sampler='autoregressive')
    return ways


def write_texts(run, raw, n, **settings):
    """ Tokens (n, L) from raw latents (n, N, D), or from nothing where the run has no latents. """
    if 'latent' in run.streams:
        return l2t(run, run.stats.standardise(raw[:n]), **settings)
    return write(run, *blank(run, n), None, **settings)


def unmaskings(run, texts, raw):
    """ The data of the scrubber: for each of the first texts and each way, every step. """
    check_writes(run)
    found = []
    n = min(N_WATCHED, len(texts))
    for way, settings in ways_of(run).items():
        recorder = Recorder(run.text.mask_id)
        write_texts(run, raw, n, on_step=recorder, **settings)
        for row in range(n):
            steps = [step_of(run.tokenizer, frames, row, run.text.mask_id)
                     for frames in grouped(recorder.frames)]
            source = texts[row] if 'latent' in run.streams else ''
            found.append(dict(title=f'{row + 1}, {way}', source=source, steps=steps))

    # the text of every id that occurs
    ids = {i for one in found for step in one['steps'] for said in step['said'].values()
           for i, _ in said}
    names = {i: name_of(run, i) for i in sorted(ids)}
    return dict(found=sorted(found, key=lambda one: int(one['title'].split(',')[0])), names=names)


def grouped(frames):
    """ The start, and then the steps: one by one, or where they are too many in groups of equally
    many, each of which the page shows as one step. """
    steps = frames[1:]
    size = -(-len(steps) // MOST_STEPS) or 1
    return [frames[:1], *(steps[i:i + size] for i in range(0, len(steps), size))]


def step_of(tokenizer, frames, row, mask_id):
    """ A row of a group of frames, as the page reads it: how it stands after the last of them, and
    what was written and said in any. said: {position: [(id, probability), ...]}. """
    said = {}
    for frame in frames:
        for i in frame.asked[row].nonzero().flatten().tolist():
            pairs = zip(frame.top_ids[row, i].tolist(), frame.top_p[row, i].tolist())
            said[i] = [(token, round(p, 4)) for token, p in pairs if p > 0]
    is_new = torch.stack([frame.is_new[row] for frame in frames]).any(0)

    last = frames[-1]
    ids = last.tokens[row].tolist()
    p = [None if x != x else round(x, 4) for x in last.p[row].tolist()]
    return dict(ids=ids, text=pieces_of(tokenizer, ids, mask_id, to_end=True), p=p, said=said,
                masked=[i for i, token in enumerate(ids) if token >= mask_id],
                new=is_new.nonzero().flatten().tolist(),
                again=last.is_again[row].nonzero().flatten().tolist())


def name_of(run, i):
    """ The text of an id. """
    if i == run.tokenizer.eos:
        return 'EOS'
    if i == run.tokenizer.pad:
        return 'PAD'
    return printable(run.tokenizer.pieces[i].decode('utf-8', 'replace'))


def check_writes(run):
    """ ValueError where the run writes no text. """
    direction = 'l2t' if 'latent' in run.streams else 'text'
    check_direction(run, direction)

# -----------------------------------------------------------------------------
# The same texts at each checkpoint

def over_time(out_dir, texts, raw):
    """ A table of what each checkpoint in the folder writes, by the default sampler. """
    n = min(N_OVER_TIME, len(texts))
    written = {}                   # {step: texts}
    for folder in reversed(checkpoint.steps(out_dir)):
        run = load_run(out_dir, which=folder.name)
        check_writes(run)
        tokens = write_texts(run, raw, n)
        written[int(folder.name[5:])] = [run.tokenizer.decode(row) for row in tokens.tolist()]
    has_source = 'latent' in run.streams

    rows = []
    for i in range(n):
        lines = [('the text', texts[i])] if has_source else []
        lines += [(f'step {step:,}', found[i]) for step, found in written.items()]
        cells = ''.join(f'<dt>{name}</dt><dd>{escape(printable(line))}</dd>'
                        for name, line in lines)
        rows.append(f'<dl class="texts">{cells}</dl>')
    return ''.join(rows)

# -----------------------------------------------------------------------------
# Latents

def principal_axes(x):
    """ (mean (D,), the two axes (D, 2) of most variance, the share of the variance of each) of
    x (n, D). An axis points to where its largest weight is positive. """
    mean = x.mean(0)
    _, s, axes = torch.linalg.svd(x - mean, full_matrices=False)
    axes = axes[:2]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    variance = s.square() / s.square().sum()
    return mean, (axes * largest.sign()).T, variance[:2].tolist()


def scatter(points, others, labels):
    """ Dots that can be pointed at: points (n, 2), the number of each as data-i. others (m, 2) or
    None: where the first m of them came out, drawn as rings and joined by a line. """
    everything = points if others is None else torch.cat([points, others])
    lo, hi = everything.amin(0), everything.amax(0)

    def pixels(x):
        share = (x - lo) / (hi - lo).clamp(min=1e-9)
        return (torch.tensor([10, 210]) + share * torch.tensor([340, -200])).tolist()
    dots, drawn = pixels(points), []
    for (x, y), (a, b) in zip(dots, [] if others is None else pixels(others)):
        drawn.append(f'<path class="grid" d="M{x:.1f} {y:.1f}L{a:.1f} {b:.1f}"/>'
                     f'<circle class="ring" cx="{a:.1f}" cy="{b:.1f}" r="3"/>')
    for i, (x, y) in enumerate(dots):
        drawn.append(f'<circle class="dot" data-i="{i}" tabindex="{0 if i == 0 else -1}" '
                     f'role="button" aria-label="text {i + 1}" cx="{x:.1f}" cy="{y:.1f}" r="3.6"/>')
    return ('<svg viewBox="0 0 360 220" role="group" aria-label="latents of validation texts">'
            f'{"".join(drawn)}</svg><figcaption>{"; ".join(labels)}</figcaption>')


def latent_picture(run, texts, tokens, raw):
    """ (The figure, what each dot says): latents on their two principal axes. """
    if 'latent' not in run.streams or len(texts) < 3:
        raise ValueError(f'{run.out_dir} has no latents, or its dataset fewer than 3 of them')
    n = min(N_LATENTS, len(texts))
    mean, axes, shares = principal_axes(raw.flatten(1))

    # what the network makes of them: a text from each latent, a latent from each text
    says = [dict(text=printable(text)) for text in texts[:n]]
    others = None
    if not NEEDS['l2t'].missing(run):
        for one, row in zip(says, write_texts(run, raw, n).tolist()):
            one['written'] = printable(run.tokenizer.decode(row))
    if not NEEDS['t2l'].missing(run):
        made = raw_latents(run, t2l(run, tokens[:n])).flatten(1)
        others = (made - mean) @ axes
        cosine = F.cosine_similarity(made, raw[:n].flatten(1))
        for one, c in zip(says, cosine.tolist()):
            one['cosine'] = round(c, 3)

    labels = [f'{way}: {100 * share:.1f} % of the variance'
              for way, share in zip(('across', 'upwards'), shares)]
    return scatter((raw[:n].flatten(1) - mean) @ axes, others, labels), says

# -----------------------------------------------------------------------------
# The page

def as_json(value):
    """ JSON that may stand inside a script element: no text in it can end the element. """
    text = json.dumps(value, separators=(',', ':'), ensure_ascii=True)
    return text.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')


def missing(error):
    return f'<p class="missing">Not shown: {escape(str(error))}</p>'


def attempt(make, *inputs):
    """ What it makes; where an input is missing or it cannot, the ValueError that says why. """
    for one in inputs:
        if isinstance(one, ValueError):
            return one
    try:
        return make(*inputs)
    except (ValueError, OSError) as error:
        return ValueError(error)


def page(out_dir, dataset=''):
    """ The whole page as a text. dataset: where the run's dataset lies; '': where it was trained
    from. ValueError where there is no run at all. """
    pictures.check_file(os.path.join(out_dir, 'config.json'), 'train the run first')
    parts = {
        'facts': attempt(facts_of, out_dir),
        'losses': attempt(losses, out_dir),
        'controls': attempt(controls, out_dir),
        'frontier': attempt(frontier, out_dir),
    }

    # what the run itself makes
    def some_texts(run):
        folder = dataset_folder(dataset or run.config['dataset'])
        return load_texts(run, folder, N_LATENTS, 'random', 0)
    run = attempt(load_run, out_dir)
    found = attempt(some_texts, run)
    texts, tokens, raw = [found] * 3 if isinstance(found, ValueError) else found
    parts['over_time'] = attempt(over_time, out_dir, texts, raw)
    unmasking = attempt(unmaskings, run, texts, raw)
    latents = attempt(latent_picture, run, texts, tokens, raw)

    # where a part is missing, its place in the page says so, and its data are empty
    has_unmasking = not isinstance(unmasking, ValueError)
    has_latents = not isinstance(latents, ValueError)
    parts['unmasking_missing'] = '' if has_unmasking else unmasking
    parts['unmasking_hidden'] = '' if has_unmasking else 'hidden'
    parts['unmasking'] = as_json(unmasking if has_unmasking else {'found': [], 'names': {}})
    parts['latents'] = latents[0] if has_latents else latents
    parts['latents_hidden'] = '' if has_latents else 'hidden'
    parts['says'] = as_json(latents[1] if has_latents else [])
    parts['title'] = escape(os.path.basename(os.path.normpath(out_dir)))
    name = getattr(run, 'checkpoint', 'no checkpoint')
    parts['checkpoint'] = escape(name)
    return fill(parts)


def fill(parts):
    """ The template with each {{name}} replaced. """
    with open(TEMPLATE, encoding='utf-8') as f:
        template = f.read()

    def part(match):
        value = parts[match[1]]
        return missing(value) if isinstance(value, ValueError) else value
    return re.sub(r'\{\{(\w+)\}\}', part, template)
