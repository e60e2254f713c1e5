"""
Text and latents of a trained run, in every direction.

    python sample.py --out_dir=out/quickstart --text="Return the number of items."    # l2t
    python sample.py --out_dir=out/quickstart --text="Return a list." --rerank=8 --refine=2
    python sample.py --out_dir=out/quickstart --text="Return a list." --sampler=confidence
    python sample.py --out_dir=out/quickstart --latents=z.npy --sampler=first_hitting --steps=64
    python sample.py --out_dir=out/quickstart --text="Return a list." --svg=writing.svg
    python sample.py --out_dir=out/mixed --mode=t2l --text="Return a list." --save=z.npy
    python sample.py --out_dir=out/mixed --mode=unconditional --num_samples=4
    python sample.py --out_dir=out/mixed --mode=infill --text="Return the [MASK] of [MASK:3]."
    python sample.py --out_dir=out/mixed --mode=infill --text="Return the [MASK:2-6] of a list."
    python sample.py --out_dir=out/mixed --mode=t2l2t --text="Return a list."
    python sample.py --text="Return a list." --interpolate="Read a file." --num_samples=5
    python sample.py --out_dir=out/mixed --ask=true
    python sample.py --out_dir=out/mixed --mode=embed --texts=my.txt --save=h.npy
    python sample.py --out_dir=out/protein_tiny --num_samples=8 --length=120 --fasta=new.fasta
    python sample.py --out_dir=out/protein_tiny --given="MKV[MASK:40]HHHHHH" --num_samples=8
    python sample.py --out_dir=out/image_text --mode=t2l --text="a bold seven" --png=seven.png
    python sample.py --out_dir=out/image_text --mode=l2t --image=seven.png

mode          the condition, at clock 0            what is drawn, from clock 1 to 0
l2t           a latent (of a text: its embedding)  a text
t2l           a text                               a latent
unconditional nothing                              both: the two clocks run down together
text, latent  nothing: the other's clock stays 1   one alone
infill        part of a text, and maybe a latent   the rest of the text
t2l2t         a text                               a latent, and a text from that latent
embed         a text                               nothing: mean hidden state of each text

The functions behind them are in sampling/directions.py. sampling/ also has guidance, the search
with the encoder (--rerank, --refine) and the solvers of latents. Samplers of text are in
samplers.py.
Letters: n texts, L text tokens, N latent vectors, D latent dims.
"""
import sys
from types import SimpleNamespace

import runs.threads    # before torch: it sets how threads wait for one another

import numpy as np
import torch.nn.functional as F
from tqdm import tqdm

from configurator import configure, on_command_line, stop_on_error
from sampling.inputs import READ_BY, pack, read_sources, warn_of_texts, with_each_length
from diffusion import check_choice
from corpora.lsa import no_progress
from runs.console import check_writable, warn
from runs.distributed import keep_freed_memory
from sampling.loading import encode, load_run, raw_latents, trained_for
from sampling.unmasking import Recorder, watcher
from sampling.denoise import rows_that_fit
from sampling.directions import NEEDS, check_direction, embed, infill, l2t, t2l, unconditional
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS
from sampling.search import closeness, search
from sampling.writing import blank, default_sampler, write

out_dir = 'out/quickstart'  # <a run folder>: model, data records and schedules all come from it
which = 'best'              # best | latest | <a step, as step-00001000>: best is the latest one
                            # before the first evaluation
mode = ''                   # '' | <l2t, t2l, unconditional, text, latent, infill, t2l2t or embed>
                            # text, latent: one alone; '', or a mode of training: as it was trained
text = ''                   # l2t, t2l, t2l2t: this text; infill: with [MASK], [MASK:3] for three
                            # tokens, [MASK:*] for the whole rest, [MASK:2-6] for the length
                            # that the network finds likeliest
texts = ''                  # or every line of this text file, or every record of a .jsonl, .csv,
                            # .tsv, .parquet or .fasta file; all but parquet also as .gz
field = 'text'              # where a record of such a file has its text
latents = ''                # l2t, infill: the raw embeddings in this .npy file: (n, D) or (n, N, D)
image = ''                  # l2t, infill: or this picture, or the .png and .jpg files of this
                            # folder, where the run is of images
given = ''                  # infill: or this template, as text: what it shows is kept (a protein's:
                            # 'MKT[MASK:20]GG')
like = ''                   # infill: or the embedding of this text
interpolate = ''            # l2t: num_samples texts on the way from the embedding of `text` to
                            # that of this text
ask = False                 # read texts from the terminal, or lines from a pipe, until an empty
                            # one: each is a new `text`, of mode=infill where it has a [MASK]
num_samples = 1             # [1, 1e6]: per text or latent
# ---- text
sampler = ''                # '' | autoregressive | ancestral | cached | first_hitting |
                            # confidence | remdm | dfm | reparam
                            # '': autoregressive where the run has learned it and no token is given;
                            # else confidence, or ancestral where both or text alone is drawn; gidd
                            # and hdlm runs have ancestral alone
steps = 0                   # [0, 1e6]: network calls; 0: one per token for confidence, reparam,
                            # first_hitting, else 128; threshold may need all; an autoregressive run
                            # makes one per token
length = 0                  # [0, 65536]: tokens of each text, where the run does not learn lengths
                            # (proteins); 0: drawn from the training texts'
block_size = 0              # [0, 65536]: unmask only the leftmost unfinished block of so many
                            # positions; 0: all at once
score = 'top1'              # top1 | margin | entropy | threshold: confidence
prefer = 'certain'          # certain | uncertain; confidence: what is unmasked first
end_penalty = 0.0           # [0, inf); confidence: off the certainty of EOS and PAD (nats, for
                            # score=top1), as texts that end when that is certain are too short
by_importance = False       # confidence: uncertainty counts as much as the token is important,
                            # where the run has learned that
remask = 'cap'              # cap | rescale | loop: remdm
eta = 0.02                  # [0, 1]; remdm: how much is masked again
loop = (0.55, 0.05, 0.9)    # (0, 1); remdm loop: t_on, t_off, and the share visible in between
alpha = 1.5                 # [1, 2]; dfm: 1 is ancestral, up to 2: how much is masked again
repeat_cap = 0.0            # [0, 1); reparam: a token that fills more than this share of a text is
                            # drawn again; 0: never
self_correct = 0            # [0, 1e6]; gidd: rounds in which a finished text is mended, a token
                            # each
temperature = -1.0          # -1 | [0, 100]: 0 takes the likeliest token; -1: 1, but 0 for
                            # confidence and for an autoregressive text from latents, or 0.7 where
                            # one source gets several texts (0.4 for autoregressive drafts, and
                            # for the endings of refine)
nucleus = 1.0               # (0, 1]: keep the likeliest tokens that hold this much probability, and
                            # the one on the boundary
guidance = 1.0              # [0, 100]; g: 1 is the conditional model, 0 the unconditional, more
                            # weighs the condition up
rerank = 1                  # [1, 4096]; l2t: draw so many texts, embed them, keep the one nearest
                            # to the latent
refine = 0                  # [0, 4096]; l2t: rounds of writing a part of it again, and keeping what
                            # is better: its end from left to right, then its least certain part by
                            # diffusion, and so on; or always that which the run has learned
# ---- latents
solver = 'dpmpp_2m'         # ddim | dpmpp_2m | heun | ancestral
latent_steps = 32           # [1, 1e5]; unconditional: `steps` for both
# ---- machine
sample_batch = 128          # [1, 65536]: rows per network call, at most: where so many rows would
                            # need more than 6 GB, fewer
seed = 0                    # [0, 2**63)
encoder_folder = ''         # where the encoder lies now; '': where it was when the data were
                            # prepared
watch = False               # see the texts being written, in shades of how certain each token was
svg = ''                    # write this animated picture of the first text being written, one draw
                            # of it: from left to right and by unmasking, where the run does both
save = ''                   # write the generated latents, raw, or the vectors of mode=embed, to
                            # this .npy file
png = ''                    # write the generated latents as pictures to this .png file, where the
                            # run is of images
fasta = ''                  # write the texts to this FASTA file, too
device = 'auto'             # auto | cpu | cuda | <cuda:1 or the like>
dtype = 'auto'              # auto | bfloat16 | float32; auto: as in train.py

# -----------------------------------------------------------------------------
# What is asked for

def direction_of(run):
    """ What is asked for by mode: a direction of NEEDS. By default that which the run was trained
    for. A config of training may name a mix, or unconditional of a run with one stream. """
    learned = trained_for(run)
    if len(run.streams) == 1:
        default = run.streams[0]
    else:
        default = 'l2t' if learned & {'l2t', 'causal'} else min(learned)
    of_training = mode in ('', 'causal') or set('+*:') & set(mode)
    if of_training or mode == 'unconditional' and len(run.streams) == 1:
        return 'infill' if given else default
    check_choice('mode', mode, NEEDS)
    return mode


def check_knobs(run, direction, config):
    """ ValueError for knobs that the direction does not read, and for files that cannot be
    written. """
    check_direction(run, direction)

    # where to write
    if direction == 'embed' and (not save or num_samples > 1):
        raise ValueError('mode=embed writes one vector a text to --save=FILE.npy')
    if fasta and direction in ('t2l', 'latent', 'embed'):
        raise ValueError(f'fasta={fasta!r}: mode={direction} writes no text')
    if fasta and run.tokenizer.kind != 'esm':
        raise ValueError(f'fasta={fasta!r}: {out_dir} was trained on {run.tokenizer.kind} tokens, '
                         'not on proteins')
    if png:
        from sampling.png import images_of
        images_of(run)
        if not png.endswith('.png'):
            raise ValueError(f'png={png}: expected a name that ends in .png')
    for path in (save, png, fasta, svg):
        if path:
            check_writable(path)

    # what to read
    for name, readers in READ_BY.items():
        default = dict(rerank=1, refine=0, ask=False).get(name, '')
        from_config = name in ('rerank', 'refine') and not on_command_line(name)
        if config[name] != default and direction not in readers and not from_config:
            raise ValueError(f'{name}={config[name]!r}: mode={direction} does not read it')
    if svg and direction in ('t2l', 'latent', 'embed'):
        raise ValueError(f'svg={svg!r}: mode={direction} writes no text')


def sampling_of(run, direction, config, n_each):
    """ The keywords of the functions that sample, with the defaults that depend on the direction.
    """
    sampling = {name: config[name] for name in TEXT_KNOBS + LATENT_KNOBS}
    sampling |= dict(seed=seed, batch=sample_batch)

    # several texts of one source: the likeliest text would be the same each time. (search sets the
    # temperatures of its own)
    name = sampler or default_sampler(run, True, direction == 'infill')
    is_likeliest = temperature < 0 and name in ('autoregressive', 'confidence')
    is_search = direction == 'l2t' and (rerank > 1 or refine > 0)
    if n_each > 1 and is_likeliest and not is_search:
        sampling['temperature'] = 0.7
    if direction == 'unconditional' and guidance != 1 and not on_command_line('guidance'):
        print(f'guidance={guidance:g} is for the other directions: samples from noise have no '
              'condition to guide them')
        sampling['guidance'] = 1.0
    return sampling


def rows_to_draw(direction, sources, n_each):
    """ How many rows are drawn for n_each samples of each source. """
    total = len(sources.names) * n_each
    if direction == 'l2t':
        return total * rerank * (1 + refine)               # drafts, and those of each round
    if direction == 't2l2t':
        return 2 * total                                   # latents, and their texts
    if direction == 'infill':
        return n_each * sum(len(with_each_length(line)) for line in sources.lines)
    return total

# -----------------------------------------------------------------------------
# Drawing

def draw(run, direction, sources, n_each, sampling):
    """ n_each samples of each source: tokens (n, L), standardised latents (n, N, D), and a note on
    each sample; None for what the direction does not give. """
    def repeat(x):
        return x.repeat_interleave(n_each, 0)

    # latents, and for t2l2t a text from them
    total = len(sources.names) * n_each
    if direction in ('t2l', 't2l2t', 'latent'):
        names = (*LATENT_KNOBS, 'seed', 'batch', 'progress')
        read = None
        if sources.lines:
            read = repeat(pack(run, sources.lines, places=sources.places))
        z = t2l(run, read, n=total, **{name: sampling[name] for name in names})
        if direction != 't2l2t':
            return None, z, None
        again = run.stats.standardise(raw_latents(run, z))
        return l2t(run, again, lengths_of=None if length else read, **sampling), z, None

    # texts
    if direction == 'l2t' and (rerank > 1 or refine):
        tokens, cosine = search(run, repeat(sources.raw), rerank, refine, several=n_each > 1,
                                **sampling)
        return tokens, None, [f'   cosine {c:.3f}' for c in cosine.tolist()]
    if direction == 'l2t':
        return l2t(run, repeat(run.stats.standardise(sources.raw)), **sampling), None, None
    if direction == 'text':
        return write(run, *blank(run, total, length, seed), None, **sampling), None, None
    if direction == 'unconditional':
        return *unconditional(run, total, **sampling), None

    # infill
    z = None if sources.raw is None else run.stats.standardise(sources.raw)
    tokens, nats = infill(run, sources.lines, z, n_each, **sampling)
    notes = None if nats is None else [f'   {x:.2f} nats per token' for x in nats.tolist()]
    return tokens, None, notes


def respond(run, direction, config):
    """ Draws what is asked for, and writes the files that are. Returns what is to be shown: names
    of the sources, and for each of their n_each samples the text written, and a note. None for
    mode=embed, of which nothing is. """
    sources = read_sources(run, direction, config)
    n_each = 1 if sources.lines is None else num_samples
    total = len(sources.names) * n_each
    sampling = sampling_of(run, direction, config, n_each)
    n_rows = rows_to_draw(direction, sources, n_each)
    if svg and direction == 'infill' and len(with_each_length(sources.lines[0])) > 1:
        raise ValueError(f'svg={svg!r} shows one text being written: give its gap one length')

    # draw, with a progress bar where it takes several network calls (two caches are the most)
    is_one_batch = n_rows <= rows_that_fit(run, sample_batch, 2 if run.next_token else 0)
    is_hidden = is_one_batch or watch                      # what is watched moves by itself
    with tqdm(total=n_rows, unit='sample', disable=True if is_hidden else None) as bar:
        sampling['progress'] = bar.update
        if direction == 'embed':
            write_vectors(run, sources, bar.update)
            return None
        if watch:
            watched = watcher(run, n_rows)
            sampling |= dict(on_step=watched.on_step, observe=watched.observe)
        tokens, z, notes = draw(run, direction, sources, n_each, sampling)

    # what each sample is
    written = [''] * total
    if svg:
        write_animation(run, direction, sources, sampling)
    if z is not None and (save or png):
        keep_latents(run, sources, n_each, z)
    if tokens is not None:
        written = [run.tokenizer.decode(ids) for ids in tokens.tolist()]
    else:
        notes = describe_latents(run, direction, sources, n_each, z)
    if sources.ends is not None:
        to_first, to_last = (closeness(run, tokens, end.expand(total, -1, -1)).tolist()
                             for end in sources.ends)
        notes = [f'   cosine {a:.3f} to the first, {b:.3f} to the last'
                 for a, b in zip(to_first, to_last)]
    if fasta:
        from sampling.fasta import write_fasta
        write_fasta(fasta, written)
        print(f'{total} sequences written to {fasta}')
    return SimpleNamespace(names=sources.names, n_each=n_each, written=written,
                           notes=notes or [''] * total, has_text=tokens is not None,
                           has_latents=z is not None)

# -----------------------------------------------------------------------------
# Files, and what is said of each sample

def save_array(path, x):
    with open(path, 'wb') as f:                # numpy.save would add .npy to another name
        np.save(f, x.numpy())


def write_vectors(run, sources, progress):
    """ The vectors of mode=embed, one a text. """
    read = pack(run, sources.lines, places=sources.places)
    hidden = embed(run, read, seed=seed, batch=sample_batch, progress=progress)
    save_array(save, hidden)
    print(f'{len(hidden)} vectors of {hidden.shape[1]} numbers written to {save}')


def keep_latents(run, sources, n_each, z):
    """ Writes latents (n, N, D) as numbers and as pictures, where that is asked for. """
    raw = raw_latents(run, z)
    if save:
        save_array(save, raw)
    if png:
        from sampling.png import pixels, write_png
        columns = n_each if n_each > 1 and len(sources.names) > 1 else 0
        write_png(png, pixels(run, raw), columns)


def describe_latents(run, direction, sources, n_each, z):
    """ A line on each latent. """
    shape = f'latent of {tuple(z.shape[1:])}'
    if direction == 'latent':
        size = z.square().sum((1, 2)) / run.stats.live.sum() / z.shape[1]
        return [f'{shape}, mean square {x:.3f} per dimension, standardised' for x in size.tolist()]
    if png:
        return [f'picture {i + 1}' for i in range(len(z))]

    # of a text: what the encoder itself says
    try:
        expected = encode(run, sources.lines).repeat_interleave(n_each, 0)
        warn_of_texts(run, sources.lines)
    except ValueError as error:
        return [f'{shape}; not compared: {error}'] * len(z)
    cosine = F.cosine_similarity(raw_latents(run, z).flatten(1), expected.flatten(1))
    return [f"{shape}, cosine with the encoder's own {c:.3f}" for c in cosine.tolist()]


def write_animation(run, direction, sources, sampling):
    """ An animated picture of the first text being written: from left to right and by unmasking,
    where both write it from its latents and no sampler is named; else as it is asked for. """
    from sampling.animation import animation
    samplers = {sampling['sampler']: f'mode {direction}'}
    if direction == 'l2t' and run.next_token and run.fills_masks and not sampling['sampler']:
        samplers = {'autoregressive': 'autoregressive, from left to right',
                    'confidence': 'diffusion, the most certain tokens first'}

    panels = []
    for name, label in samplers.items():
        recorder = Recorder(run.text.mask_id)
        settings = sampling | dict(sampler=name, on_step=recorder.on_step,
                                   observe=recorder.observe, progress=no_progress)
        if direction == 'l2t':
            l2t(run, run.stats.standardise(sources.raw[:1]), **settings)
        else:
            draw(run, direction, sources, 1, settings)
        panels.append((label, recorder.frames))
    with open(svg, 'w', encoding='utf-8') as f:
        title = sources.names[0] or 'from noise'
        if direction == 'l2t' and sources.lines:
            title = f'from the embedding of: {title}'
        f.write(animation(run.tokenizer, run.text.mask_id, panels, f'Written {title}'))
    print(f'a picture of the first text being written: {svg}')


def show(found):
    """ The samples below their sources. """
    total = len(found.written)
    for i in range(total):
        name = found.names[i // found.n_each]
        if i % found.n_each == 0 and name:
            print(f'\n{name}')
        print(f'  -> {found.written[i]}{found.notes[i]}')
    n_empty = sum(not line.strip() for line in found.written)
    if found.has_text and n_empty:
        warn(f'{n_empty} of {total} texts are empty: the model wrote their end (EOS) first; '
             'another --temperature or --sampler, or a longer training, may write more')
    if found.has_latents and save:
        print(f'\n{total} latents written to {save}')
    if found.has_latents and png:
        print(f'\n{total} pictures written to {png}')

# -----------------------------------------------------------------------------
# Asking, and the command

def asked_texts():
    """ What a person types, or the lines of a pipe, up to an empty one. """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print('A text is written anew from its embedding, gaps like [MASK:2-6] are filled. '
              'An empty line ends this.')
    while True:
        try:
            line = input('\n> ') if is_terminal else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            line = ''
            print()                                        # the next prompt has a line of its own
        if not line.strip():
            return
        yield line.strip()


def answer(run, direction, config):
    """ The loop of --ask=true. A text with [MASK] is filled in. A text that the run cannot read
    costs a line, not the loop. """
    for name in ('text', 'texts', 'given', 'latents', 'image', 'interpolate', 'svg', 'save', 'png',
                 'fasta'):
        if config[name]:
            raise ValueError(f'{name}={config[name]!r}: ask=True reads texts, one after the other, '
                             'and shows what is written')

    for line in asked_texts():
        wanted = 'infill' if '[MASK' in line else direction
        try:
            check_direction(run, wanted)
            show(respond(run, wanted, config | dict(text=line)))
        except ValueError as error:
            warn(error)


def main():
    config = configure(globals())
    keep_freed_memory()
    with stop_on_error():
        run = load_run(out_dir, which, device, dtype, encoder_folder)
        direction = direction_of(run)
        check_knobs(run, direction, config)
        if ask:
            answer(run, direction, config)
            return
        found = respond(run, direction, config)
    if found:
        show(found)


if __name__ == '__main__':
    main()
