"""
Text and latents of a trained run, in every direction.

    python sample.py --out_dir=out/quickstart --text="Return a list." --rerank=8      # l2t
    python sample.py --out_dir=out/quickstart --latents=z.npy --sampler=first_hitting --steps=64
    python sample.py --out_dir=out/quickstart --text="Return a list." --svg=writing.svg
    python sample.py --mode=t2l --text="Return a list." --save=z.npy
    python sample.py --mode=unconditional --num_samples=4
    python sample.py --text="Return the [MASK:2-6] of [MASK]."    # infill
    python sample.py --mode=edit --text="Return a new list." --away=list --towards=dictionary
    python sample.py --mode=t2l2t --text="Return a list."
    python sample.py --out_dir=out/protein_tiny --num_samples=8 --length=120 --fasta=new.fasta
    python sample.py --out_dir=out/protein_tiny --text="MKV[MASK:40]HHHHHH" --num_samples=8
    python sample.py --out_dir=out/icons --mode=t2l --text="tabler: heart" --png=heart.png
    python sample.py --out_dir=out/icons --mode=l2t --image=heart.png
    python sample.py --out_dir=out/icons --mode=complete --image=half.png --text="tabler: heart"

mode          the condition, at clock 0            what is drawn, from clock 1 to 0
l2t           a latent (of a text: its embedding)  a text
t2l           a text                               a latent
unconditional nothing                              both: a latent as a plan, its text, and the
                                                   latent of that
text, latent  nothing: the other's clock stays 1   one alone
infill        part of a text, and maybe a latent   the rest of the text
edit          a text, and another latent           the part of the text that does not fit the latent
t2l2t         a text                               a latent, and a text from that latent
complete      a part of a picture, maybe a text    the rest of the picture

The directions are the methods of Run (sampling/run.py), which do the same from Python.
Letters: n texts, N latent vectors, D latent dims.
"""
import os
import sys

# before the user's own model.py; and PYTHONSAFEPATH=1 leaves it out
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
if __name__ == '__main__':
    import base.begin                                      # before torch

import itertools
from contextlib import suppress
from types import SimpleNamespace
from typing import Callable, NamedTuple

import numpy as np
import torch.nn.functional as F

from base.console import shown, stop_on_error, warn
from base.machine import keep_freed_memory
from base.writing import check_writable, write_text, write_whole
from configurator import configure, on_command_line
from corpora.images import (images_of, pixels, read_in_part, read_pictures, sheet_of,
                            write_png)
from diffusion import check_choice
from samplers import no_callback
from sampling.inputs import embeddings, moved, read_latents, read_template, read_texts
from sampling.knobs import LATENT_KNOBS, RULES, TEXT_KNOBS
from sampling.recorder import Recorder, watcher
from sampling.run import Run

out_dir = 'out/quickstart'  # <a run folder>: model, data records and schedules all come from it
which = 'best'              # best | latest | <a step, as step-00001000>: best is the latest one
                            # before the first evaluation
mode = ''                   # '' | <l2t, t2l, unconditional, text, latent, infill, edit, t2l2t or
                            # complete>
                            # text, latent: one alone; '', or a mode of training: infill where
                            # `text` has a [MASK], else as it was trained
text = ''                   # this text; to be filled in where it has a [MASK], [MASK:3] for three
                            # tokens, [MASK:*] for the whole rest, [MASK:2-6] for the length
                            # that the network finds likeliest
texts = ''                  # or every line of this text file, or every record of a .jsonl file, a
                            # table, ..., as prepare.py reads it
field = 'text'              # where a record has its text
latents = ''                # l2t, infill, edit: the raw embeddings in this .npy file: (n, D) or
                            # (n, N, D)
image = ''                  # l2t, infill: or this picture, or the .png and .jpg files of this
                            # folder, where the run is of images. complete: a picture; what is
                            # transparent in it is drawn
box = ''                    # complete: or this box of it, X0,Y0,X1,Y1, in pixels of the run's
                            # pictures
like = ''                   # infill, edit: or towards the embedding of this text
towards = ''                # edit: or towards that of `text` itself, to which the embedding of this
                            # text is added
away = ''                   # edit: and from which the embedding of this text is subtracted
num_samples = 1             # [1, 1e6]: per text or latent
# ---- machine
encoder = ''                # the folder where the run's encoder lies now; '': where it was for
                            # prepare.py. In a config file it is prepare.py's, and not read here
watch = False               # see the texts being written, in shades of how certain each token was
svg = ''                    # write this animated picture of the first text being written, one draw
                            # of it: from left to right and by unmasking, where the run does
                            # both; or of the first pictures being drawn
save = ''                   # write the generated latents, raw, to this .npy file
png = ''                    # write the generated latents as pictures to this .png file, where the
                            # run is of images
fasta = ''                  # write the texts to this FASTA file as well
device = 'auto'             # auto | cpu | cuda | mps | <cuda:1 or the like>
dtype = 'auto'              # auto | bfloat16 | float32; auto: as in train.py

# -----------------------------------------------------------------------------
# What is asked for

def direction_of(run):
    """ The direction that the knob mode asks for. Where it is '', a mix as l2t+causal, or another
    mode that only training has, as in the config of a training, it follows from the run: infill
    where the text has a [MASK], else what the run was trained for. """
    if len(run.net.streams) == 1:
        default = run.net.streams[0]
    else:
        # a run that completes pictures also draws whole ones
        learned = run.net.learned - {'complete'}
        default = 'l2t' if learned & {'l2t', 'causal'} else min(learned)
    of_training = mode in ('', 'causal') or set('+*:') & set(mode)
    if of_training or mode == 'unconditional' and len(run.net.streams) == 1:
        return 'infill' if '[MASK' in text else default
    check_choice('mode', mode, DIRECTIONS)
    return mode


def not_read(direction):
    """ The names of knobs that only other directions read. In a config file they are passed over.
    """
    read_by_some = set().union(*(row.reads for row in DIRECTIONS.values()))
    return read_by_some - DIRECTIONS[direction].reads


def check_knobs(run, direction, config):
    """ ValueError for flags that the direction does not read, and for files that cannot be
    written. """
    run.check(direction)
    for name in sorted(not_read(direction)):
        if on_command_line(name):
            raise ValueError(f'{name}: mode={direction} does not read it')
    for name in ('text', 'like', 'towards', 'away'):
        if on_command_line(name) and not config[name].strip():
            raise ValueError(f'{name} is blank: the model has nothing to go by')

    is_search = config['beams'] > 1 and 'beams' in DIRECTIONS[direction].reads
    if is_search and (svg or watch):
        raise ValueError(f'beams={config["beams"]}: a search has no steps to show; leave svg and '
                         'watch out')

    # where to write
    if png or svg and direction == 't2l':
        images_of(run)
    if png and not png.lower().endswith('.png'):
        raise ValueError(f'png={png!r}: pictures are written as PNG, to a file that ends in .png')
    for path in (save, png, fasta, svg):
        if path:
            check_writable(path)


def read_given(run, direction):
    """ What a direction is given to read, in four fields. names: a line for each source, which
    is printed above its samples; '' prints none. texts: n texts, or None. raw: raw latents
    (n, N, D), or None. parts (n, N): which of their vectors are given, where not all are. """
    given = SimpleNamespace(names=[''] * num_samples, texts=None, raw=None, parts=None)
    if direction in ('unconditional', 'text', 'latent'):
        return given

    if direction == 'complete' and (texts or not image):
        raise ValueError('mode=complete reads one picture, --image=FILE.png, and maybe its name, '
                         '--text="..."')

    # one text, and one embedding where both are read
    n_embeddings = bool(latents) + bool(image) + bool(like) + bool(towards or away)
    has_both = (text or texts) and n_embeddings
    takes_both = direction in ('infill', 'edit', 'complete')
    if text and texts or n_embeddings > 1 or has_both and not takes_both:
        raise ValueError('text, texts, latents, image, like, and towards with away: give one text, '
                         'and one embedding where both are read')
    if not (text or texts) and not (direction in ('l2t', 'complete') and n_embeddings):
        raise ValueError(f'mode={direction} reads {", or ".join(what_it_reads(run, direction))}')
    if n_embeddings and 'latent' not in run.net.streams:
        raise ValueError(f'{run.out_dir} was trained without latents: it reads none')
    if direction == 'edit' and not n_embeddings:
        raise ValueError('mode=edit changes a text towards another embedding: give --like="...", '
                         'or --latents=FILE.npy, or --towards="..." and --away="..."')
    if text or texts:
        given.texts = list(read_texts(texts, field)) if texts else [text]
    given.names = given.texts

    # the latents
    if direction == 'complete':
        files, given.raw, given.parts = read_in_part(run, image, box)
        given.names = given.texts or files
    elif image:
        files, given.raw = read_pictures(run, image)
        given.names = given.texts or files
    elif latents:
        given.raw = read_latents(run, latents)
        given.names = given.texts or names_of_latents(len(given.raw))
    elif towards or away:
        to, off = ([some] if some else [] for some in (towards, away))
        given.raw = moved(run, run.encode(given.texts), to, off)
    elif like or direction == 'l2t':
        given.raw = embeddings(run, [like] if like else given.texts)
    return given


def what_it_reads(run, direction):
    """ The flags that give a direction of this run what it begins with. """
    flags = ['--text="..."', '--texts=FILE']
    if direction == 'complete':
        flags = ['--image=FILE.png']
    if direction == 'l2t':
        if not run.meta['encoder']:
            flags = []                                     # nothing embeds a text
        flags.append('--latents=FILE.npy')
        if run.meta.get('source', {}).get('image_size'):
            flags.append('--image=FILE.png')
    return flags


def names_of_latents(n):
    """ The names of the n latents of FILE.npy: the lines of FILE.txt next to it, if these are n;
    else FILE.npy[0], FILE.npy[1], ... """
    path = os.path.splitext(latents)[0] + '.txt'
    lines = []
    with suppress(ValueError, OSError), open(path, encoding='utf-8') as f:
        # they are only shown. No more than n + 1 lines are read, in case it is another, large file
        lines = [line.strip() for line in itertools.islice(f, n + 1)]
    return lines if len(lines) == n else [f'{latents}[{i}]' for i in range(n)]

# -----------------------------------------------------------------------------
# What is drawn, shown and kept

def draw_text(run, given, n_each, on_step, **knobs):
    return run.sample_text(len(given.names), on_step, **knobs), None, None


def draw_latent(run, given, n_each, on_step, **knobs):
    return None, run.sample_latents(len(given.names), **knobs), None


def draw_both(run, given, n_each, on_step, **knobs):
    texts, raw = run.sample_both(len(given.names), on_step, **knobs)
    return texts, raw, None


def draw_embedding(run, given, n_each, on_step, **knobs):
    return None, run.embed(given.texts, n_each, **knobs), None


def draw_rest(run, given, n_each, on_step, **knobs):
    return None, run.complete(given.raw, given.parts, given.texts, n_each, **knobs), None


def draw_round_trip(run, given, n_each, on_step, **knobs):
    texts, raw = run.round_trip(given.texts, n_each, on_step, **knobs)
    return texts, raw, None


def draw_from_latent(run, given, n_each, on_step, **knobs):
    texts = run.write(None, given.raw, n_each, on_step=on_step, **knobs)
    notes = None
    if knobs['rerank'] > 1:
        notes = cosines_of(run, texts, given.raw, n_each)
    return texts, None, notes


def draw_gaps(run, given, n_each, on_step, **knobs):
    texts, nats = run.fill(given.texts, given.raw, n_each, on_step, **knobs)
    notes = None
    if nats is not None:
        notes = [f'{x:.2f} nats per token' for x in nats]
    return texts, None, notes


def draw_edit(run, given, n_each, on_step, **knobs):
    texts = run.edit(given.texts, latents=given.raw, num_samples=n_each, on_step=on_step, **knobs)
    return texts, None, cosines_of(run, texts, given.raw, n_each)


def cosines_of(run, texts, raw, n_each):
    """ A note on each text: how near its embedding is to the latent that it was to have. """
    n = len(texts) // n_each
    raw = raw.expand(n, -1, -1).repeat_interleave(n_each, 0)
    return [f'cosine {c:.3f}' for c in run.cosines(texts, raw)]


class Direction(NamedTuple):
    """ How the command draws in a direction. What a run needs for it: sampling/run.py. """
    draw: Callable             # (run, given, n_each, on_step, **knobs) -> texts, raw latents
                               # (n, N, D), and a note on each; None for what it does not give.
                               # n_each: samples of each source
    reads: set                 # the flags that it reads, besides those that all read


# what is read, how much is written, and where to
FROM_TEXT = {'text', 'texts'}
FROM_LATENT = {'latents', 'image', 'latent_clock'}
TO_TEXT = {'num_samples', 'svg', 'fasta', 'watch', *TEXT_KNOBS}
TO_LATENT = {'num_samples', 'save', 'png', *LATENT_KNOBS}

DIRECTIONS = {
    'text': Direction(draw_text, TO_TEXT),
    'latent': Direction(draw_latent, TO_LATENT),
    'unconditional': Direction(draw_both, TO_TEXT | TO_LATENT),
    't2l': Direction(draw_embedding, FROM_TEXT | TO_LATENT | {'svg'}),
    'complete': Direction(draw_rest, {'text', 'image', 'box'} | TO_LATENT),
    't2l2t': Direction(draw_round_trip,
                       FROM_TEXT | TO_TEXT | TO_LATENT | {'rerank', 'beams', 'latent_clock'}),
    'l2t': Direction(draw_from_latent, FROM_TEXT | FROM_LATENT | TO_TEXT | {'rerank', 'beams'}),
    'infill': Direction(draw_gaps, FROM_TEXT | FROM_LATENT | TO_TEXT | {'like'}),
    'edit': Direction(draw_edit, FROM_TEXT | TO_TEXT | {
        'latents', 'latent_clock', 'like', 'towards', 'away', 'strength'}),
}


def respond(run, direction, config):
    """ Draws what is asked for, shows it, and writes the files that are asked for. """
    given = read_given(run, direction)
    knobs = {name: config[name] for name in RULES if name not in not_read(direction)}
    if svg and direction == 'infill':
        rows, *_ = read_template(run, given.texts[0])
        if len(rows) > 1:
            raise ValueError(f'svg={svg!r} shows one text being written: give its gap one length')

    # draw. From nothing there are num_samples names '', with one sample each; else num_samples of
    # each source
    n_each = 1 if given.texts is None and given.raw is None else num_samples
    on_step = no_callback
    if watch:
        n_drafts = knobs['rerank'] if direction in ('l2t', 't2l2t') else 1
        on_step = watcher(run, len(given.names) * n_each * n_drafts)
    draw = DIRECTIONS[direction].draw
    texts, raw, notes = draw(run, given, n_each, on_step, **knobs)
    if texts is None:
        notes = describe_latents(run, direction, given, n_each, raw)

    # the samples below their sources
    for i, sample in enumerate(texts or [''] * len(raw)):
        name = given.names[i // n_each]
        if i % n_each == 0 and name:
            print(shown(f'\n{name}'))
        line = '   '.join(filter(None, (sample, notes and notes[i])))
        print(shown(f'  -> {line}'))
    n_empty = sum(not sample.strip() for sample in texts or [])
    if n_empty:
        warn(f'{n_empty} of {len(texts)} texts are empty: the model wrote their end (EOS) first; '
             'another --temperature or --sampler, or a longer training, may write more')

    # files
    if svg and direction == 't2l':
        save_drawing(run, given, n_each, knobs)
    elif svg:
        save_animation(run, direction, given, knobs)
    if fasta:
        records = [f'>sample_{i} length={len(text)}\n{text}\n' for i, text in enumerate(texts, 1)]
        write_text(fasta, ''.join(records), named=True)
        print(f'\n{len(texts)} sequences written to {fasta}')
    if raw is not None and save:
        with write_whole(save, named=True) as f:
            np.save(f, raw.numpy())
        print(f'\n{len(raw)} latents written to {save}')
    if raw is not None and png:
        columns = n_each if n_each > 1 and len(given.names) > 1 else 0
        write_png(png, pixels(run, raw), columns)
        print(f'\n{len(raw)} pictures written to {png}')


def describe_latents(run, direction, given, n_each, raw):
    """ A line on each latent. """
    if run.net.model.config.spatial:
        hint = '' if png or save or svg else ' (--png=FILE writes it)'
        return [f'picture {i + 1}{hint}' for i in range(len(raw))]
    shape = f'latent of {tuple(raw.shape[1:])}'
    if direction == 'latent':
        return [shape] * len(raw)

    # of a text: what the encoder itself says
    try:
        expected = embeddings(run, given.texts).repeat_interleave(n_each, 0)
    except ValueError as error:
        return [f"{shape}; not compared: {str(error).split(';')[0]}"] * len(raw)
    cosine = F.cosine_similarity(raw.flatten(1), expected.flatten(1))
    return [f"{shape}, cosine with the encoder's own {c:.3f}" for c in cosine]


def save_animation(run, direction, given, knobs):
    """ An animated picture of the first text being written: from left to right and by unmasking,
    where both write it from its latents and no sampler is named; else as it is asked for. """
    from sampling.animation import animation
    first = SimpleNamespace(
        names=given.names[:1],
        texts=given.texts and given.texts[:1],
        raw=None if given.raw is None else given.raw[:1])

    # which samplers, and what is written above the panel of each
    samplers = {knobs['sampler']: f'mode {direction}'}
    if direction == 'l2t' and run.net.is_causal and run.net.fills_masks and not knobs['sampler']:
        samplers = {'autoregressive': 'autoregressive, from left to right',
                    'confidence': 'diffusion, the most certain tokens first'}

    # a panel of each: the text is drawn once more, and every step of it is kept
    panels = []
    for name, label in samplers.items():
        recorder = Recorder(run.net.text.mask_id)
        of_panel = knobs | dict(sampler=name, rerank=1)
        DIRECTIONS[direction].draw(run, first, 1, recorder, **of_panel)
        panels.append((label, recorder.frames))

    # what it was written from
    title = given.names[0] or 'from noise'
    if like or towards:
        title += f', towards: {like or towards}'
    if direction == 'l2t' and given.texts:
        title = f'from the embedding of: {title}'
    picture = animation(run.tokenizer, run.net.text.mask_id, panels, f'Written {title}')
    write_text(svg, picture, named=True)
    print(f'\na picture of the first text being written: {svg}')


def save_drawing(run, given, n_each, knobs):
    """ An animated picture of the first samples of the first text: what the network thinks clean
    at each step. """
    from sampling.animation import MOST_PICTURES, animation_of_pictures
    n = min(n_each, MOST_PICTURES)
    steps = []
    run.embed(given.texts[:1], n, on_step=steps.append, **knobs | dict(sample_batch=n))
    sheets = [sheet_of(pixels(run, run.raw_latents(z.cpu())), n, side=64) for z in steps]
    picture = animation_of_pictures(sheets, f'Drawn from noise: {given.names[0]}')
    write_text(svg, picture, named=True)
    print(f'\nthe pictures of the first text being drawn: {svg}')

# -----------------------------------------------------------------------------
# The command

def main():
    config = configure(globals())
    keep_freed_memory()
    with stop_on_error():
        where = encoder if on_command_line('encoder') else ''
        run = Run(out_dir, which, device, dtype, where)
        direction = direction_of(run)
        check_knobs(run, direction, config)
        respond(run, direction, config)


if __name__ == '__main__':
    main()
