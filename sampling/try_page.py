"""
A page that draws what one types and names what one draws (plot.py --what=try): one HTML file that
holds a network of pictures, and runs it. It asks no server for anything, and forbids itself to. Its
frame, its style and what it shows are in try.html; the network, in plain JavaScript, is in try.js,
where a worker runs it.

The weights have 8 bits a number, with a scale for each row of a matrix. Vectors stay float32.
"""
import base64
import json
import os
import re
from dataclasses import asdict
from html import escape
from pathlib import Path

import torch

from base.files import read_json
from base.writing import write_text
from corpora.icons import SHEET, thing_of
from corpora.images import images_of
from sampling.knobs import SamplingKnobs
from sampling.latents import settle_latents
from sampling.report import as_json
from sampling.run import BOTH, MAKES, Needs, Run
from sampling.solvers import latent_times

HERE = os.path.dirname(os.path.abspath(__file__))
NEEDS = Needs(BOTH, (MAKES, ('causal',)))


def check(run):
    """ ValueError where the page cannot draw and name as the run does. """
    images_of(run)
    c = run.net.model.config
    kind = run.tokenizer.kind
    can_be_shown = (c.spatial and not c.shortcut and kind in ('bpe', 'byte')
                    and not NEEDS.missing(run.net))
    if not can_be_shown:
        raise ValueError(
            f'{run.out_dir} has spatial={c.spatial}, n_latents={c.n_latents}, tokenizer={kind} and '
            f'mode={run.config["mode"]}: the page needs pictures of several patches, with '
            '--spatial=true, --mode=t2l+causal, and the tokenizer bpe or byte')

# -----------------------------------------------------------------------------
# The run, as JSON

def weights_of(model):
    """ The shapes {name: shape} in the order of the weights; all vectors and scales, and all
    matrices, each as one text. """
    shapes = {}
    floats = []
    matrices = []
    for name, weight in model.state_dict().items():
        if name == 'latent_pos_emb':                       # with the fixed part of the positions
            weight = weight + model.grid.repeat_interleave(model.config.latent_tokens, 0)
        shapes[name] = list(weight.shape)
        if weight.ndim == 1:
            floats.append(weight)
            continue
        scale = weight.abs().amax(1) / 127                 # of each row
        numbers = weight / torch.where(scale > 0, scale, 1)[:, None]
        floats.append(scale)
        matrices.append(numbers.round().to(torch.int8).flatten())
    return dict(shapes=shapes, floats=as_base64(floats), bytes=as_base64(matrices))


def as_base64(tensors):
    return base64.b64encode(torch.cat(tensors).numpy().tobytes()).decode()


def schedule_of(latent, steps):
    """ Of each time from 1 to 0: [t, alpha, sigma, a, b]. There z_t = alpha z + sigma e, and the
    network says a z + b e. """
    t = latent_times(latent, steps)
    alpha, sigma = latent.alpha_sigma(t)
    numbers = (t, alpha, sigma, *latent.combination(alpha, sigma))
    columns = torch.broadcast_tensors(*[torch.as_tensor(x, dtype=torch.float64) for x in numbers])
    return torch.stack(columns, 1).tolist()


def tokenizer_of(run):
    """ The id of each byte, and what may be joined, the first first: [left id, right id, id]. """
    tokenizer = run.tokenizer
    merges = []
    if tokenizer.kind == 'bpe':
        model = read_json(os.path.join(run.folder, 'tokenizer.json'))['model']
        id_of = model['vocab']
        merges = [[id_of[left], id_of[right], id_of[left + right]]
                  for left, right in model['merges']]
    id_of_byte = [tokenizer.pieces.index(bytes([byte])) for byte in range(256)]
    return dict(idOfByte=id_of_byte, merges=merges, eos=tokenizer.eos, pad=tokenizer.pad)


def as_dict(run):
    """ What try.js reads of a run. It draws as sample.py does by default. """
    knobs = settle_latents(run.net, SamplingKnobs(), from_text=True)
    stats = {name: getattr(run.stats, name).tolist() for name in ('mean', 'std', 'live')}
    image = {name: images_of(run)[name] for name in ('image_size', 'patch', 'channels')}
    return dict(
        config=asdict(run.net.model.config),
        tokenizer=tokenizer_of(run),
        latent=dict(schedule=schedule_of(run.net.latent, knobs.latent_steps),
                    guidance=knobs.guidance),
        stats=stats,
        image=image,
        weights=weights_of(run.net.model))

# -----------------------------------------------------------------------------
# The page

def read(name):
    with open(os.path.join(HERE, name), encoding='utf-8') as f:
        return f.read()


def learned_from(meta):
    """ Of a dataset of the icons that come along: a sentence that says whose they are, and their
    names. Of others nothing is known: '' and no names. meta: the dataset's meta.json. """
    if meta['source'].get('input') != ['icons']:
        return '', []

    # a folder of one's own may have this name. Of the icons that come along each has two texts
    lines = Path(f'{SHEET}.tsv').read_text(encoding='utf-8').splitlines()
    n_texts = sum(split['documents'] for split in meta['splits'].values())
    if n_texts != 2 * len(lines):
        return '', []
    icons = [line.split('\t') for line in lines]
    things = {' '.join(thing_of(tuple(name.split()))) for _, name in icons}
    n_sets = len({name_of_set for name_of_set, _ in icons})
    n_learned = meta['splits']['train']['documents'] // 2
    about = (f'It has learned from {n_learned:,} icons with {len(things)} names, of {n_sets} sets of '
             'Iconify. Each set keeps its own licence. In the repository corpora/icons.md names the '
             'authors.')
    return about, sorted(things)


def page(out_dir):
    """ The whole page as a text. ValueError where the run is not of pictures with names. """
    run = Run(out_dir, device='cpu', dtype='float32')
    check(run)
    found = as_dict(run)
    about, names = learned_from(run.meta)
    n_parameters = sum(p.numel() for p in run.net.model.parameters())
    shown = dict(
        title=os.path.basename(os.path.normpath(out_dir)),
        checkpoint=run.checkpoint,
        parameters=f'{n_parameters / 1e6:.1f}',
        steps=len(found['latent']['schedule']) - 1,
        side=found['image']['image_size'],
        about=about,
        names=names)
    return page_of(found | dict(shown=shown))


def page_of(found):
    """ The page of what as_dict gives, and what is shown besides. """
    parts = {name: escape(str(value)) for name, value in found['shown'].items()}
    parts['names'] = as_json(found['shown']['names'])
    parts['network'] = read('try.js')
    parts['run'] = as_json(found)
    return re.sub(r'\{\{(\w+)\}\}', lambda match: parts[match[1]], read('try.html'))


def renewed(page):
    """ A page of earlier with the frame and the script of today: all that it needs is in it. """
    run = re.search('<script type="application/json" id="run">(.*?)</script>', page, re.DOTALL)
    return page_of(json.loads(run[1]))


def renew(path):
    """ Writes the page of this path anew, after try.html or try.js has changed. """
    write_text(path, renewed(Path(path).read_text(encoding='utf-8')), named=True)
