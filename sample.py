"""
Text and latents of a trained run, in every direction.

    python sample.py --out_dir=out/quickstart --text="Return the number of items."    # l2t
    python sample.py --out_dir=out/quickstart --text="Return a list." --rerank=8
    python sample.py --out_dir=out/quickstart --text="Return a list." --sampler=confidence
    python sample.py --out_dir=out/quickstart --latents=z.npy --sampler=first_hitting --steps=64
    python sample.py --out_dir=out/quickstart --text="Return a list." --svg=writing.svg
    python sample.py --mode=t2l --text="Return a list." --save=z.npy
    python sample.py --mode=unconditional --num_samples=4
    python sample.py --text="Return the [MASK:2-6] of [MASK]."    # infill
    python sample.py --mode=edit --text="Return a new list." --away=list --towards=dictionary
    python sample.py --mode=t2l2t --text="Return a list."
    python sample.py --text="Return a list." --interpolate="Read a file." --num_samples=5
    python sample.py --ask=true
    python sample.py --mode=embed --texts=my.txt --save=h.npy
    python sample.py --out_dir=out/protein_tiny --num_samples=8 --length=120 --fasta=new.fasta
    python sample.py --out_dir=out/protein_tiny --text="MKV[MASK:40]HHHHHH" --num_samples=8
    python sample.py --out_dir=out/image_text --mode=t2l --text="a bold seven" --png=seven.png
    python sample.py --out_dir=out/image_text --mode=l2t --image=seven.png

mode          the condition, at clock 0            what is drawn, from clock 1 to 0
l2t           a latent (of a text: its embedding)  a text
t2l           a text                               a latent
unconditional nothing                              both: the two clocks run down together
text, latent  nothing: the other's clock stays 1   one alone
infill        part of a text, and maybe a latent   the rest of the text
edit          a text, and another latent           the part of the text that does not fit the latent
t2l2t         a text                               a latent, and a text from that latent
embed         a text                               nothing: mean hidden state of each text

The same from Python, where an import reads no command line. The keywords are the knobs below:

    from sample import Run
    run = Run('out/quickstart')
    run.write(['Return a list.'], rerank=8)

The functions behind it are in sampling/directions.py. sampling/ also has guidance, the choice
among drafts (--rerank) and the solvers of latents. Samplers of text are in samplers.py.
Letters: n texts, L text tokens, N latent vectors, D latent dims.
"""
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from configurator import configure, on_command_line, read_knobs, stop_on_error
from diffusion import check_choice
from encoders import check_texts
from runs.console import shown, warn
from runs.machine import keep_freed_memory
from runs.files import check_writable, write_text, write_whole
from sampling import directions
from sampling.directions import NEEDS, check_direction
from sampling.drafts import nearest_of
from sampling.inputs import embeddings, moved, pack, read_sources, read_template, slerp
from sampling.knobs import LATENT_KNOBS, RULES, TEXT_KNOBS
from sampling.likelihood import nats_per_token
from sampling.loading import encode, load_run, raw_latents, trained_for
from sampling.unmasking import Recorder, watcher
from sampling.writing import blank, write

out_dir = 'out/quickstart'  # <a run folder>: model, data records and schedules all come from it
which = 'best'              # best | latest | <a step, as step-00001000>: best is the latest one
                            # before the first evaluation
mode = ''                   # '' | <l2t, t2l, unconditional, text, latent, infill, edit, t2l2t or
                            # embed>
                            # text, latent: one alone; '', or a mode of training: infill where
                            # `text` has a [MASK], else as it was trained
text = ''                   # this text; to be filled in where it has a [MASK], [MASK:3] for three
                            # tokens, [MASK:*] for the whole rest, [MASK:2-6] for the length
                            # that the network finds likeliest
texts = ''                  # or every line of this text file, or every record of a .jsonl, .csv,
                            # .tsv, .parquet or .fasta file; all but parquet also as .gz
field = 'text'              # where a record of such a file has its text
latents = ''                # l2t, infill, edit: the raw embeddings in this .npy file: (n, D) or
                            # (n, N, D)
image = ''                  # l2t, infill: or this picture, or the .png and .jpg files of this
                            # folder, where the run is of images
like = ''                   # infill, edit: or towards the embedding of this text
towards = ''                # edit: or towards that of `text` itself, to which the embedding of this
                            # text is added
away = ''                   # edit: and from which the embedding of this text is subtracted
interpolate = ''            # l2t: num_samples texts on the way from the embedding of `text` to
                            # that of this text
ask = False                 # read texts from the terminal, or lines from a pipe, until an empty
                            # one: each is a new `text`, of mode=infill where it has a [MASK]
num_samples = 1             # [1, 1e6]: per text or latent
# ---- machine
encoder_folder = ''         # where the encoder lies now; '': where it was when the data were
                            # prepared
watch = False               # see the texts being written, in shades of how certain each token was
svg = ''                    # write this animated picture of the first text being written, one draw
                            # of it: from left to right and by unmasking, where the run does both
save = ''                   # write the generated latents, raw, or the vectors of mode=embed, to
                            # this .npy file
png = ''                    # write the generated latents as pictures to this .png file, where the
                            # run is of images
fasta = ''                  # write the texts to this FASTA file as well
device = 'auto'             # auto | cpu | cuda | <cuda:1 or the like>
dtype = 'auto'              # auto | bfloat16 | float32; auto: as in train.py

ROOMS = {'sampling/knobs.py': ''}   # which has the knobs of all that samples

# -----------------------------------------------------------------------------
# A run: strings in, strings or arrays out

class Run(SimpleNamespace):
    """
    A trained run, with the fields that sampling/loading.py lists: `model` is a torch.nn.Module.
    folder: of a run, or of an export; or the id of an export on the Hugging Face hub, with
    `revision`, a whole commit. A folder that is there is never looked up. which: best, latest, or a
    step as step-00001000. encoder_folder: where the encoder lies now.

    An unknown keyword of a method is a TypeError, and what the run has not learned a ValueError of
    one line.
    """

    def __init__(self, folder, which='best', device='auto', dtype='auto', encoder_folder='',
                 revision=None):
        if revision is not None and not os.path.isdir(folder):
            if not re.fullmatch('[0-9a-f]{40}', revision):
                raise ValueError(f'revision={revision!r}: expected a whole commit, 40 of 0-9 and '
                                 'a-f; what a branch names may change')
            from huggingface_hub import snapshot_download
            folder = snapshot_download(folder, revision=revision)
        super().__init__(**vars(load_run(folder, which, device, dtype, encoder_folder)))

    def write(self, texts=None, latents=None, rerank=1, **knobs):
        """
        l2t: a text from each latent, a list of n str. Give texts, which the run's encoder embeds,
        or latents, raw embeddings (n, D) or (n, N, D). rerank: the nearest of so many drafts
        (sampling/drafts.py).
        """
        if (texts is None) == (latents is None):
            raise ValueError('write: give texts, or latents')
        if not len(latents if texts is None else texts):
            return []
        check_direction(self, 'l2t')
        raw = self.to_raw(latents) if texts is None else embeddings(self, texts)
        if rerank > 1:
            tokens, _ = nearest_of(self, raw, rerank, **knobs)
        else:
            tokens = directions.l2t(self, self.stats.standardise(raw), **knobs)
        return self.decode(tokens)

    def infill(self, templates, like=None, **knobs):
        """ Fills the gaps of each template: [MASK], [MASK:3] for three tokens, [MASK:*] for the
        whole rest, [MASK:2-6] for the length that the network finds likeliest. like: a text for
        each template, whose embedding the result shall have. Returns a list of n str. """
        raw = None
        if like is not None:
            if len(like) != len(templates):
                raise ValueError(f'{len(templates)} templates, {len(like)} texts in like')
            raw = embeddings(self, like)
        return self.fill(templates, raw, **knobs)[0]

    def fill(self, templates, raw=None, **knobs):
        """ The same from raw latents (n, N, D) or none. Returns the texts, and nats per token (n,)
        of each, or None where no gap has a range of lengths. """
        check_direction(self, 'infill')
        check_texts(templates)
        z = None if raw is None else self.stats.standardise(raw)
        tokens, nats = directions.infill(self, templates, z, **knobs)
        return self.decode(tokens), nats

    def edit(self, texts, like=(), towards=(), away=(), strength=0.02, **knobs):
        """ Each text, changed towards the embedding of a text in `like`, or towards its own plus
        that of a text in `towards`, minus that of one in `away`. These are lists, of n texts or of
        one for all. strength: the share of the tokens that may change. Returns a list of n str. """
        check_direction(self, 'edit')
        if bool(like) == bool(towards or away):
            raise ValueError('edit: give like, or towards and away')
        for name, some in (('like', like), ('towards', towards), ('away', away)):
            if isinstance(some, str) or len(some) not in (0, 1, len(texts)):
                raise ValueError(f'{name}={some!r}: expected a list of 1 or {len(texts)} texts')
        if not len(texts):
            return []
        if like:
            raw = embeddings(self, like)
        else:
            raw = moved(self, encode(self, texts), towards, away)
        return self.change(texts, raw.expand(len(texts), -1, -1), strength, **knobs)

    def change(self, texts, raw, strength=0.02, **knobs):
        """ The same towards raw latents (n, D) or (n, N, D). """
        check_direction(self, 'edit')
        try:
            RULES['strength'].settle(strength)
        except ValueError as error:
            raise ValueError(f'strength: {error}') from None
        if not len(texts):
            return []
        z_now, z = map(self.stats.standardise, (embeddings(self, texts), self.one_each(texts, raw)))
        return self.decode(directions.edit(self, pack(self, texts), z_now, z, strength, **knobs))

    def interpolate(self, first, last, n=5, **knobs):
        """ l2t on the way from the embedding of one text to that of another: n texts, from the two
        embeddings and from n - 2 between them, along the great circle. Returns a list of n str. """
        return self.write(latents=slerp(*embeddings(self, [first, last]), n), **knobs)

    def embed(self, texts, **knobs):
        """ t2l: a raw embedding of each text, written by diffusion: (n, D) float32, or (n, N, D)
        where a text has several vectors. """
        check_direction(self, 't2l')
        z = directions.t2l(self, pack(self, texts), **knobs)
        return as_array(raw_latents(self, z))

    def encode(self, texts):
        """ The embeddings of the encoder that made the run's data, of the same shape. """
        return as_array(encode(self, texts))

    def nats(self, texts, latents=None, **knobs):
        """ How unlikely the network finds each text, from raw latents (n, D) or (n, N, D), or from
        text alone: nats per token, (n,) float64. Exact where the run has learned mode=causal, else
        the bound of diffusion (sampling/likelihood.py). """
        check_direction(self, 'text')
        z = None if latents is None else self.stats.standardise(self.one_each(texts, latents))
        return nats_per_token(self, pack(self, texts), z, **knobs).numpy()

    def cosines(self, texts, latents):
        """ Of the embeddings of texts, by the encoder, with raw latents (n, D) or (n, N, D): (n,).
        """
        return np.array(cosines(self, texts, self.one_each(texts, latents)))

    def sample(self, n, **knobs):
        """ n texts from nothing: from both clocks where the run has learned that, else text alone.
        Returns a list of str. """
        if not NEEDS['unconditional'].missing(self):
            return self.decode(directions.unconditional(self, n, **knobs)[0])
        return self.sample_text(n, **knobs)

    def sample_text(self, n, length=0, seed=0, **knobs):
        """ n texts from text alone. """
        check_direction(self, 'text')
        return self.decode(write(self, *blank(self, n, length, seed), None, seed, **knobs))

    def export(self, folder, license=''):
        """ Writes the run as a folder that can be given away: averaged weights as safetensors,
        config.json, tokenizer, model card. Run reads it. """
        from runs.export import export
        export(self.out_dir, folder, self.checkpoint, license)

    # ---- between strings, arrays and tensors

    def decode(self, tokens):
        return [self.tokenizer.decode(ids) for ids in tokens.tolist()]

    def one_each(self, texts, latents):
        """ to_raw, where there must be one for each text. """
        raw = self.to_raw(latents)
        if len(raw) != len(texts):
            raise ValueError(f'{len(texts)} texts, {len(raw)} latents')
        return raw

    def to_raw(self, latents):
        """ (n, N, D) float32 of an array (n, D) or (n, N, D). """
        N, D = self.model.config.n_latents, self.model.config.latent_dim
        raw = torch.as_tensor(np.asarray(latents, np.float32))
        is_one_vector = N == 1 and raw.shape[1:] == (D,)
        if not is_one_vector and raw.shape[1:] != (N, D):
            expected = f'(n, {D})' if N == 1 else f'(n, {N}, {D})'
            raise ValueError(f'latents of shape {tuple(raw.shape)}, expected {expected}')
        if not raw.isfinite().all():
            raise ValueError('latents hold nan or inf')
        return raw.reshape(-1, N, D)


def as_array(raw):
    raw = raw.squeeze(1) if raw.shape[1] == 1 else raw
    return raw.float().numpy()

# -----------------------------------------------------------------------------
# The command line: what is asked for

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
        return 'infill' if '[MASK' in text else default
    check_choice('mode', mode, NEEDS)
    return mode


def check_knobs(run, direction, config):
    """ ValueError for knobs that the direction does not read, and for files that cannot be
    written. """
    check_direction(run, direction)
    # where to write
    if direction == 'embed' and (not save or num_samples > 1):
        raise ValueError('mode=embed writes one vector a text to --save=FILE.npy')
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

    # an edit goes to one embedding
    goals = bool(latents) + bool(like) + bool(towards or away)
    if direction == 'edit' and goals != 1:
        raise ValueError('mode=edit changes a text towards another embedding: give --like="...", '
                         'or --latents=FILE.npy, or --towards="..." and --away="..."')

    # what this direction reads, and others
    readers = {knob for needs in NEEDS.values() for knob in needs.reads}
    read = set(NEEDS[direction].reads)
    if ask:
        # the texts come one after the other
        read &= {'ask', 'like', 'towards', 'away', 'strength', 'rerank'}
    for name in sorted(readers - read):
        # a run's config may set it for the direction that reads it
        is_of_file = name == 'rerank' and not on_command_line(name)
        if config[name] != read_knobs(__file__)[name].default and not is_of_file:
            who = f'mode={direction}, ask=true' if ask else f'mode={direction}'
            raise ValueError(f'{name}={config[name]!r}: {who} does not read it')

# -----------------------------------------------------------------------------
# What is drawn, shown and kept

def draw(run, direction, sources, n_each, sampling):
    """ n_each samples of each source: texts, standardised latents (n, N, D), and a note on each
    sample; None for what the direction does not give. """
    def repeat(x):
        return None if x is None else x.repeat_interleave(n_each, 0)

    # from nothing
    n = len(sources.names) * n_each
    of_latents = {name: sampling[name] for name in (*LATENT_KNOBS, 'seed', 'batch')}
    if direction == 'text':
        return run.sample_text(n, **sampling), None, None
    if direction == 'latent':
        return None, directions.t2l(run, None, n, **of_latents), None
    if direction == 'unconditional':
        tokens, z = directions.unconditional(run, n, **sampling)
        return run.decode(tokens), z, None

    # a text from a latent, or from a template
    of_text = sampling | dict(several=n_each > 1)
    if direction == 'l2t':
        raw, notes = repeat(sources.raw), None
        texts = run.write(latents=raw, rerank=rerank, **of_text)
        if rerank > 1:
            notes = [f'   cosine {c:.3f}' for c in cosines(run, texts, raw)]
        return texts, None, notes
    if direction == 'infill':
        templates = [line for line in sources.lines for _ in range(n_each)]
        texts, nats = run.fill(templates, repeat(sources.raw), **of_text)
        notes = None if nats is None else [f'   {x:.2f} nats per token' for x in nats.tolist()]
        return texts, None, notes

    if direction == 'edit':
        tokens = pack(run, sources.lines, places=sources.places)
        z_now, z = map(run.stats.standardise, (embeddings(run, sources.lines), sources.raw))
        tokens = directions.edit(run, *map(repeat, (tokens, z_now, z)), strength, **of_text)
        texts = run.decode(tokens)
        notes = [f'   cosine {c:.3f}' for c in cosines(run, texts, repeat(sources.raw))]
        return texts, None, notes

    # a latent from a text, and for t2l2t a text from that
    tokens = repeat(pack(run, sources.lines, places=sources.places))
    z = directions.t2l(run, tokens, **of_latents)
    if direction == 't2l':
        return None, z, None
    lengths_of = None if length else tokens
    return run.write(latents=raw_latents(run, z), lengths_of=lengths_of, **of_text), z, None


def cosines(run, texts, raw):
    """ Of the embeddings of n texts with raw latents (n, N, D). """
    return F.cosine_similarity(encode(run, texts).flatten(1), raw.flatten(1)).tolist()


def respond(run, direction, config):
    """ Draws what is asked for, shows it, and writes the files that are asked for. """
    sources = read_sources(run, direction, config)
    n_each = 1 if sources.lines is None else num_samples
    if direction == 'embed':
        tokens = pack(run, sources.lines, places=sources.places)
        hidden = directions.embed(run, tokens, seed=seed, batch=sample_batch)
        save_array(save, hidden)
        print(f'{len(hidden)} vectors of {hidden.shape[1]} numbers written to {save}')
        return
    if svg and direction == 'infill' and len(read_template(run, sources.lines[0], length)[0]) > 1:
        raise ValueError(f'svg={svg!r} shows one text being written: give its gap one length')

    # draw
    sampling = {name: config[name] for name in TEXT_KNOBS + LATENT_KNOBS}
    sampling |= dict(seed=seed, batch=sample_batch)
    if direction == 'unconditional' and guidance != 1 and not on_command_line('guidance'):
        print(f'guidance={guidance:g} is for the other directions: samples from noise have no '
              'condition to guide them')
        sampling['guidance'] = 1.0
    watched = {}
    if watch and direction not in ('t2l', 'latent'):
        n_rows = len(sources.names) * n_each * (config['rerank'] if direction == 'l2t' else 1)
        watched = dict(on_step=watcher(run, n_rows))
    texts, z, notes = draw(run, direction, sources, n_each, sampling | watched)
    raw = None if z is None else raw_latents(run, z)

    # what is said of each sample
    if sources.ends is not None:
        to_first, to_last = (cosines(run, texts, end.expand(len(texts), -1, -1))
                             for end in sources.ends)
        notes = [f'   cosine {a:.3f} to the first, {b:.3f} to the last'
                 for a, b in zip(to_first, to_last)]
    if texts is None:
        notes = describe_latents(run, direction, sources, n_each, z)
    written = texts or [''] * len(raw)
    notes = notes or [''] * len(written)

    # files
    if svg:
        write_animation(run, direction, sources, sampling)
    if raw is not None and save:
        save_array(save, raw)
    if raw is not None and png:
        from sampling.png import pixels, write_png
        columns = n_each if n_each > 1 and len(sources.names) > 1 else 0
        write_png(png, pixels(run, raw), columns)
    if fasta:
        from sampling.fasta import write_fasta
        write_fasta(fasta, written)
        print(f'{len(written)} sequences written to {fasta}')

    # the samples below their sources
    for i, (text, note) in enumerate(zip(written, notes)):
        name = sources.names[i // n_each]
        if i % n_each == 0 and name:
            print(shown(f'\n{name}'))
        print(shown(f'  -> {text}{note}'))
    n_empty = sum(not text.strip() for text in texts or [])
    if n_empty:
        warn(f'{n_empty} of {len(texts)} texts are empty: the model wrote their end (EOS) first; '
             'another --temperature or --sampler, or a longer training, may write more')
    if raw is not None and save:
        print(f'\n{len(raw)} latents written to {save}')
    if raw is not None and png:
        print(f'\n{len(raw)} pictures written to {png}')


def save_array(path, x):
    with write_whole(path) as f:
        np.save(f, x.numpy())


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
        expected = embeddings(run, sources.lines).repeat_interleave(n_each, 0)
    except ValueError as error:
        reason = str(error).split(';')[0]
        return [f'{shape}; not compared: {reason}'] * len(z)
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
        settings = sampling | dict(sampler=name, on_step=recorder)
        if direction == 'l2t':
            run.write(latents=sources.raw[:1], **settings)
        else:
            draw(run, direction, sources, 1, settings)
        panels.append((label, recorder.frames))
    title = sources.names[0] or 'from noise'
    if direction == 'l2t' and sources.lines:
        title = f'from the embedding of: {title}'
    write_text(svg, animation(run.tokenizer, run.text.mask_id, panels, f'Written {title}'))
    print(f'a picture of the first text being written: {svg}')

# -----------------------------------------------------------------------------
# Asking, and the command

def asked_texts():
    """ What a person types, or the lines of a pipe, up to an empty one. """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print('A text is written anew from its embedding, or changed (mode=edit), gaps like '
              '[MASK:2-6] are filled. An empty line ends this.')
    while True:
        try:
            line = input('\n> ') if is_terminal else sys.stdin.readline()
        except EOFError:
            line = ''
            print()                                        # the next prompt has a line of its own
        if not line.strip():
            return
        yield line.strip()


def answer(run, direction, config):
    """ The loop of --ask=true. A text with [MASK] is filled in. A text that the run cannot read
    costs a line, not the loop. """
    for line in asked_texts():
        wanted = 'infill' if '[MASK' in line else direction
        try:
            check_direction(run, wanted)
            respond(run, wanted, config | dict(text=line))
        except ValueError as error:
            warn(error)


def main():
    config = configure(globals())
    keep_freed_memory()
    with stop_on_error():
        run = Run(out_dir, which, device, dtype, encoder_folder)
        direction = direction_of(run)
        check_knobs(run, direction, config)
        if ask:
            answer(run, direction, config)
        else:
            respond(run, direction, config)


if __name__ == '__main__':
    main()
