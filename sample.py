"""
All that one two-clock model writes, in every direction, and the command line.

    python sample.py --out_dir=out/quickstart --text="Return the number of items."            # l2t: encode, then write it anew
    python sample.py --out_dir=out/quickstart --text="Return a list." --rerank=8 --refine=2   # of 8 texts the nearest, mended
    python sample.py --out_dir=out/quickstart --latents=z.npy --steps=64 --sampler=first_hitting
    python sample.py --out_dir=out/mixed --mode=t2l --text="Return a list." --save=z.npy      # an embedding from text
    python sample.py --out_dir=out/mixed --mode=unconditional --num_samples=4                 # both from noise
    python sample.py --out_dir=out/mixed --mode=infill --text="Return the [MASK] of the [MASK:3]." [--like="..."]
    python sample.py --out_dir=out/mixed --mode=t2l2t --text="Return a list."                 # text -> latent -> text
    python sample.py --out_dir=out/mixed --mode=embed --texts=my.txt --save=h.npy             # mean hidden state of each text
    python sample.py --out_dir=out/protein_tiny --num_samples=8 --length=120 --sampler=reparam --fasta=new.fasta
    python sample.py --out_dir=out/protein_tiny --given="MKV[MASK:40]HHHHHH" --num_samples=8 # what is given stays
    python sample.py --out_dir=out/image_text --mode=t2l --text="a bold seven" --png=seven.png    # a picture from its caption
    python sample.py --out_dir=out/image_text --mode=l2t --image=seven.png                    # and back

A text sampler is a function of samplers.py, a latent solver a method of diffusion.GaussianLatents: step(z, t, s, denoise, memory, noise).
"""
import difflib
import glob
import math
import os
import re
import shutil
import sys
from collections import Counter
from types import SimpleNamespace

# before torch reads it: threads that wait sleep, where spinning would take the core of whom they wait for
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import configurator
import rules
from baselines import GIDD, NextToken, text_process
from checkpoint import find_checkpoint, load_model, pick_device
from configurator import configure, on_command_line, stop_on_error
from data import RESIDUES, is_end, load_stats, load_tokenizer
from diffusion import GaussianLatents, MaskedText, mode_shares
from encoders import check_texts, load_encoder
from files import read_array
from samplers import certainty_of, make_propose, make_sampler, nothing, positions_of, put
from sources import Source, documents, image_patches, kind_of, to_pixels

out_dir = 'out/quickstart'      # <a run folder>: model, data records and schedules all come from it
which = 'best'                  # best | latest | <a step, as step-00001000>: best is the latest one before the first evaluation
mode = ''                       # '' | l2t | t2l | unconditional | mixed | text | latent | infill | t2l2t | embed
                                # text, latent: one alone; '': as it was trained
text = ''                       # l2t, t2l, t2l2t: this text; infill: with [MASK], [MASK:3] for three tokens, [MASK:*] for the whole rest
texts = ''                      # or every line of this text file, or every record of a .jsonl, .csv, .tsv, .parquet or .fasta file;
                                # all but parquet also as .gz
field = 'text'                  # where a record of such a file has its text
latents = ''                    # l2t, infill: the raw embeddings in this .npy file: (n, D) or (n, N, D)
image = ''                      # l2t, infill: or this picture, or the .png and .jpg files of this folder, where the run is of images
given = ''                      # infill: or this template, as text: what it shows is kept (a protein's: 'MKT[MASK:20]GG')
like = ''                       # infill: or the embedding of this text
num_samples = 1                 # [1, 1e6]: per text or latent
# ---- text
sampler = ''                    # '' | ancestral | cached | first_hitting | confidence | remdm | dfm | reparam
                                # '': ancestral where both or text alone is drawn, else confidence; gidd, hdlm and autoregressive
                                # runs have ancestral alone
steps = 0                       # [0, 1e6]: network calls; 0: one per token for confidence, reparam, first_hitting, else 128; threshold may
                                # need all; an autoregressive run makes one per token
length = 0                      # [0, 65536]: tokens of each text, where the run does not learn lengths (proteins); 0: drawn from the
                                # training texts'
block_size = 0                  # [0, 65536]: release only the leftmost unfinished block of so many positions; 0: all at once
score = 'top1'                  # top1 | margin | entropy | threshold: confidence
prefer = 'certain'              # certain | uncertain; confidence: what is released first
by_importance = False           # confidence: uncertainty counts as much as the token is important, where the run has learned that
remask = 'cap'                  # cap | rescale | loop: remdm
eta = 0.02                      # [0, 1]; remdm: how much is masked again
loop = (0.55, 0.05, 0.9)        # [0, 1]; remdm loop: t_on, t_off, a_on: the share visible in between
alpha = 1.5                     # [1, 2]; dfm: 1 is ancestral, up to 2: how much is masked again
repeat_cap = 0.0                # [0, 1]; reparam: a token that fills more than this share of a text is drawn again; 0: never
self_correct = 0                # [0, 1e6]; gidd: rounds in which a finished text is mended, a token each
temperature = -1.0              # -1 | [0, 100]: 0 takes the likeliest token; -1: 1, but 0 for confidence and for an autoregressive text
                                # from latents, or 0.7 where one source gets several texts
nucleus = 1.0                   # (0, 1]: keep the likeliest tokens that hold this much probability, and the one on the boundary
guidance = 1.0                  # [0, 100]; g: 1 is the conditional model, 0 the unconditional, more weighs the condition up
rerank = 1                      # [1, 4096]; l2t: draw so many texts, embed them, keep the one nearest to the latent
refine = 0                      # [0, 4096]; l2t: rounds of masking its least certain part again, and keeping what comes nearer
# ---- latents
solver = 'dpmpp_2m'             # ddim | dpmpp_2m | heun | ancestral
latent_steps = 32               # [1, 1e5]; unconditional: `steps` for both
# ---- machine
sample_batch = 128              # [1, 65536]: rows per network call
seed = 0                        # [0, 2**63)
encoder_folder = ''             # where the encoder lies now; '': where it was when the data were prepared
watch = False                   # see the text being uncovered
save = ''                       # write the generated latents, raw, or the vectors of mode=embed, to this .npy file
png = ''                        # write the generated latents as pictures to this .png file, where the run is of images
fasta = ''                      # write the texts to this FASTA file, not to the screen
device = 'auto'                 # auto | cpu | cuda | <cuda:1 or the like>
dtype = 'bfloat16'              # bfloat16 | float32

TEXT_KNOBS = ('sampler', 'steps', 'length', 'block_size', 'score', 'prefer', 'by_importance', 'remask', 'eta', 'loop', 'alpha',
              'repeat_cap', 'self_correct', 'temperature', 'nucleus', 'guidance')
SOLVERS = ('ddim', 'dpmpp_2m', 'heun', 'ancestral')
LATENT_KNOBS = ('solver', 'latent_steps', 'guidance')
DEFAULTS = {name: globals()[name] for name in TEXT_KNOBS + LATENT_KNOBS}
RULES = configurator.read_knobs(__file__)[2]


def sampling_knobs(how):
    """ DEFAULTS with the keywords of a call in them. A name that is none raises TypeError, a value against its rule ValueError. """
    others = ('seed', 'batch', 'progress', 'on_step', 'like', 'rerank', 'refine', 'inner')
    knobs = dict(DEFAULTS)
    for name, value in how.items():
        if name not in DEFAULTS:
            legal = [*DEFAULTS, *(other for other in others if other != name)]
            near = difflib.get_close_matches(name, legal, 1, cutoff=0.5)
            raise TypeError(f'unknown keyword {name!r}, ' + (
                f'did you mean {near[0]!r}?' if near else f'expected one of {", ".join(DEFAULTS)}'))
        value = value.item() if isinstance(value, np.generic) else value
        try:
            knobs[name] = configurator.settle(value, DEFAULTS[name], RULES.get(name), configurator.from_value)
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from None
    return knobs


# ---- a run, ready to sample

def load_run(out_dir, which='best', device='auto', dtype='bfloat16', encoder_folder=''):
    """ Everything sampling needs from a run folder: model (EMA weights), tokenizer, stats, processes, encoder record. """
    device = pick_device(device)
    if dtype not in ('float32', 'bfloat16'):
        raise ValueError(f'dtype={dtype!r}: choose from float32, bfloat16')
    name = find_checkpoint(out_dir, which)
    model, config, meta = load_model(out_dir, name, device=device)
    cluster_of = getattr(model, 'cluster_of', None)
    if config['causal'] != model.config.causal or (config['text_process'] == 'hdlm') != (cluster_of is not None) or (
            cluster_of is not None and not 0 <= cluster_of.min() <= cluster_of.max() < model.config.clusters):
        raise ValueError(f'{out_dir}: config.json and the checkpoint are not of one run, or its clusters are broken')
    folder = os.path.join(out_dir, 'data')
    tokenizer, stats = load_tokenizer(folder), load_stats(folder)
    if (model.config.vocab_size != tokenizer.vocab_size or
            (model.config.n_latents, model.config.latent_dim) != tuple(meta['latent_shape'] or (0, 0))):
        raise ValueError(f'{out_dir}: data/meta.json and the checkpoint are not of one run')
    kind = torch.device(device).type
    return SimpleNamespace(
        out_dir=out_dir, checkpoint=name, model=model, config=config, meta=meta, folder=folder, encoder_folder=encoder_folder, encoder=None,
        device=device, tokenizer=tokenizer, stats=stats, L=model.config.seq_len, streams=model.config.streams,
        row_calls=0,                                                     # rows that the network has read: what sampling costs
        text=text_process(config, tokenizer.vocab_size, cluster_of),
        lengths=config.get('lengths'),                                   # quantiles, where the run does not learn when a text ends
        banned=never_written(tokenizer, 'lengths' in config).to(device),
        latent=GaussianLatents(stats.live.to(device), config['latent_schedule'], config['latent_target']) if stats else None,
        autocast=lambda: torch.autocast(kind, torch.bfloat16, enabled=dtype == 'bfloat16'))


def never_written(tokenizer, has_length):
    """ Ids (n,) that no sampler writes: of proteins all but the 20 standard residues; EOS and PAD where the length is given. """
    ends = [tokenizer.eos, tokenizer.pad] if has_length else []
    return torch.tensor([*(range(20, len(RESIDUES)) if tokenizer.kind == 'esm' else []), *ends], dtype=torch.int64)


def encode(run, texts, progress=lambda n: None):
    """ Raw latents (n, N, D) float32 of a list of texts, by the encoder that made the run's data. """
    check_texts(texts)
    return encoder_of(run)(texts, progress=progress)


def encoder_of(run):
    """ The encoder that made the run's data; ValueError where there is none, or it is not what it was. """
    if run.encoder is None:                                              # once: weights are read and their digest compared
        record = run.meta['encoder']
        if record is None:
            raise ValueError(f'{run.out_dir}: its latents were given without their encoder, so no text can be embedded')
        run.encoder = load_encoder(record, folder=run.folder if record['id'] == 'lsa' else run.encoder_folder or None, device=run.device)
    return run.encoder


def trained_for(run):
    """ The modes that the run's losses cover. """
    knobs, names = run.config, set()
    for part in (knobs['mode_schedule'] or knobs['mode']).split(','):
        try:
            shares = mode_shares(part.split(':')[0].strip(), knobs['mode_weights'])
        except ValueError as error:
            raise ValueError(f'{run.out_dir}/config.json: {error}') from None
        names |= {name for name, share in shares.items() if share}
    return names


# task: the streams that it needs, and modes, of each set of which the run was trained for one
TEXT, LATENT, BOTH, WRITES, MAKES = {'text'}, {'latent'}, {'text', 'latent'}, {'l2t', 'unconditional'}, {'t2l', 'unconditional'}
NEEDS = dict(text=(TEXT, WRITES), infill=(TEXT, WRITES), embed=(TEXT, WRITES), importance=(TEXT, WRITES), protein=(TEXT, WRITES),
             self_correction=(TEXT, WRITES), latent=(LATENT, MAKES), l2t=(BOTH, WRITES), t2l=(BOTH, MAKES), sts=(BOTH, MAKES),
             t2l2t=(BOTH, WRITES, MAKES), unconditional=(BOTH, {'unconditional'}), image=(BOTH,), nelbo=(set(),))


def why_not(run, task):
    """ What a run lacks for a task of sample.py or evaluate.py, or ''. """
    (streams, *modes), learned = NEEDS[task], trained_for(run)
    if not streams <= set(run.streams) or not all(learned & some for some in modes):
        return f'has streams {run.streams} and was trained for {", ".join(sorted(learned))}'
    if task in ('embed', 'importance', 'protein', 'unconditional') and not isinstance(run.text, MaskedText):
        return 'was not trained on masked text'
    if task == 'self_correction' and not isinstance(run.text, GIDD):
        return 'was not trained with text_process=gidd, which can take back what it wrote'
    if task == 'protein' and run.tokenizer.kind != 'esm':
        return f'was trained on {run.tokenizer.kind} tokens'
    if task == 'sts' and not run.meta['encoder']:
        return 'has latents that were given without their encoder'
    return ''


def check_task(run, task):
    """ ValueError where a run cannot do a task. """
    if why := why_not(run, task):
        instead = '; --mode=text or --mode=latent samples one alone' if task == 'unconditional' else ''
        raise ValueError(f'{run.out_dir} {why}: no {task} from it{instead}')
    if task == 'image':
        of_images(run)


def most_tokens(run):
    """ How many tokens a text may have: where the run learns lengths, one place is its EOS's. """
    return run.L - (not run.lengths)


def pack(run, texts, cut=False, places=None):
    """ A list of texts as the model reads them: tokens (n, L), an EOS after the text, then PAD; too long ones are cut, or an error,
    in which `places` name them. """
    check_texts(texts)
    ids = [run.tokenizer.encode(t)[:run.L - 1 if cut else None] for t in texts]
    for i, text in enumerate(texts):
        if len(ids[i]) > most_tokens(run):
            most = f'{run.L}' if run.lengths else f'{run.L - 1} and an EOS'
            place = places[i] if places else f'text {i + 1} of {len(texts)}'
            raise ValueError(f'{place}, {rules.short(text)}, has {len(ids[i]):,} tokens, '
                             f'{run.out_dir} reads at most {most}')
    return torch.tensor([(i + [run.tokenizer.eos] + [run.tokenizer.pad] * (run.L - len(i)))[:run.L] for i in ids])


def of_images(run):
    """ The record of how the run's images were cut: image_size, patch, channels. """
    record = run.meta.get('source') or {}
    if not record.get('image_size'):
        raise ValueError(f'{run.out_dir} was not trained on images: it neither reads nor draws a picture')
    return record


def pixels(run, raw):
    """ Raw latents (n, N, D) as pictures (n, S, S, channels), uint8. """
    record = of_images(run)
    return to_pixels(raw.numpy(), record['patch'], record['channels'])


def write_png(path, pictures, columns=0, side=128):
    """ Pictures (n, S, S, channels) in rows of `columns` (0: as many columns as rows), each enlarged to about `side` where it is less. """
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(f'png={path}: pip install pillow') from None
    n, S, _, channels = pictures.shape
    columns, scale = columns or math.ceil(math.sqrt(n)), max(1, side // S)
    large = pictures.repeat(scale, 1).repeat(scale, 2)
    gap, step = 4, S * scale + 4
    sheet = np.full((-(-n // columns) * step - gap, columns * step - gap, channels), 255, np.uint8)
    for i, picture in enumerate(large):
        y, x = i // columns * step, i % columns * step
        sheet[y:y + S * scale, x:x + S * scale] = picture
    Image.fromarray(sheet.squeeze(2) if channels == 1 else sheet).save(path, 'PNG')


def raw_latents(run, z):
    """ Standardised latents as the encoder would give them: on the sphere, where its output is (what was given is taken as it is). """
    raw = run.stats.destandardise(z)
    return F.normalize(raw, dim=-1) if (run.meta['encoder'] or {}).get('normalize') else raw


def call(run, tokens, z, t_text, t_latent, positions=None, predict=('text',), past=None):
    """ The network; clocks are numbers or (B,). past: Model.forward's. """
    B = len(tokens if tokens is not None else z)
    here = lambda x: x.to(run.device, non_blocking=True)                 # noqa: E731
    clock = lambda t: here(torch.as_tensor(t, dtype=torch.float32)).expand(B)   # noqa: E731
    run.row_calls += B
    with run.autocast():
        return run.model(tokens, z, clock(t_text), clock(t_latent), None if positions is None else here(positions), predict,
                         **({} if past is None else {'past': past}))


def null_latents(run, n, rng):
    """ n latents of nothing, (n, N, D): noise, for clock 1. """
    shape = (n, run.model.config.n_latents, run.model.config.latent_dim)
    return (torch.randn(shape, generator=rng, device=rng.device) * run.latent.live.to(rng.device)).to(run.device)


def own_importance(run):
    """ importance(tokens (B, L)) -> (B, L) of the run. """
    if not run.model.importance:
        raise ValueError(f'by_importance: {run.out_dir} was trained with importance=none')
    return lambda tokens: run.model.importance(tokens)[0].float()


def generators(run, seed):
    """ One on the host, for what is released, and one on the device, for the rest: on a CPU the same. """
    rng = torch.Generator().manual_seed(seed)
    return rng, rng if torch.device(run.device).type == 'cpu' else torch.Generator(run.device).manual_seed(seed)


# ---- the directions. Guidance: p_0 is the same network with the condition's clock at 1 and its content noise.

@torch.inference_mode()
def write(run, tokens, given, z, seed=0, batch=128, inner=None, on_step=nothing, progress=lambda n: None, **how):
    """
    Fill the MASKs of tokens (n, L) that are not given (n, L), from standardised latents z (n, N, D), or from text alone: z None.
        log p = g log p(. | z) + (1 - g) log p(.)
    inner (n, L): where EOS and PAD are not allowed. Returns tokens (n, L).
    """
    how = sampling_knobs(how)
    some_given = (given & ~ends_of(run, tokens)).any()                   # more than its length
    is_masked = isinstance(run.text, MaskedText)                         # else ancestral is all there is
    how['sampler'] = how['sampler'] or ('confidence' if is_masked and (z is not None or some_given) else 'ancestral')
    if isinstance(run.text, NextToken) and z is not None and how['temperature'] < 0:
        how['temperature'] = 0.0                                         # the likeliest, as by confidence
    sampler, knobs, temperature = make_sampler(how, run.text)
    if 'text' not in run.streams:
        raise ValueError(f'{run.out_dir} has no text stream: nothing to write')
    if how['by_importance']:
        knobs['importance'] = own_importance(run)
    steps = how['steps'] or (run.L if how['sampler'] in ('confidence', 'reparam', 'first_hitting') else 128)
    g = how['guidance'] if z is not None else 0
    rng, device_rng = generators(run, seed)
    specials = torch.tensor([run.tokenizer.eos, run.tokenizer.pad], device=run.device)
    out = []
    for first in range(0, len(tokens), batch):
        part = slice(first, first + batch)
        x, condition = tokens[part].to(run.device), None if z is None else z[part].to(run.device)
        null = None
        if 'latent' in run.streams:                                      # one draw per sample, kept
            null = null_latents(run, len(x), device_rng)
        banned = None if inner is None else inner[part].flatten().to(run.device)
        pasts = [{}, {}] if isinstance(run.text, NextToken) else [None, None]    # of the two models that guidance asks

        def denoise(tokens, t, positions, rows=slice(None)):
            log_p = []
            for weight, latents, clock, past in ((g, condition, 0.0, pasts[0]), (1 - g, null, 1.0, pasts[1])):
                if weight:
                    logits, _ = call(run, tokens, None if latents is None else latents[rows], t, clock, positions, past=past)
                    log_p.append(logits if weight == 1 else weight * logits.log_softmax(-1))
            log_p = sum(log_p)
            log_p[:, run.banned] = -torch.inf
            if banned is not None:
                at = torch.where(banned.view(len(x), -1)[rows].flatten()[positions.to(run.device)], -torch.inf, 0.0)
                log_p[:, specials] += at[:, None]
            return log_p
        out.append(sampler(denoise, make_propose(temperature, how['nucleus'], device_rng), run.text, x, given[part], steps, rng,
                           on_step, **knobs).cpu())
        progress(len(x))
    return torch.cat(out)


def ends_of(run, tokens):
    """ (n, L): EOS and PAD, where the run is given them. """
    return is_end(tokens, run.tokenizer) & bool(run.lengths)


def blank(run, n, length=0, seed=0, like=None):
    """ n texts of which nothing is known: tokens, all MASK, and given, all False; where the run does not learn lengths, EOS and PAD are
    given where the texts `like` (n, L) have them, or after `length` tokens, or after a length drawn from the training texts'. """
    tokens = torch.full((n, run.L), run.text.mask_id)
    if not run.lengths:
        if length:
            raise ValueError(f'length={length}: {run.out_dir} writes texts of its own length (it was trained with predict_length=True)')
        return tokens, torch.zeros_like(tokens, dtype=torch.bool)
    if like is not None:
        return torch.where(ends_of(run, like), like, run.text.mask_id), ends_of(run, like)
    if not 0 <= length <= run.L:
        raise ValueError(f'length={length}: {run.out_dir} writes at most {run.L} tokens')
    drawn = np.interp(np.random.default_rng(seed).random(n), np.linspace(0, 1, len(run.lengths)), run.lengths).round()
    lengths = torch.full((n, 1), length) if length else torch.from_numpy(drawn).long().clamp(min=1)[:, None]
    column = torch.arange(run.L)
    tokens = torch.where(column < lengths, tokens, torch.where(column == lengths, run.tokenizer.eos, run.tokenizer.pad))
    return tokens, column >= lengths


def l2t(run, z, seed=0, like=None, **how):
    """ Tokens (n, L) written from standardised latents z (n, N, D); like (n, L): of the lengths of these texts (blank). """
    return write(run, *blank(run, len(z), how.get('length', 0), seed, like), z, seed, **how)


@torch.inference_mode()
def t2l(run, tokens, n=None, seed=0, batch=128, progress=lambda n: None, **how):
    """ Standardised latents (n, N, D) of texts tokens (n, L); tokens None: n latents of no text.
        x0 = x0_u + g (x0_c - x0_u), e likewise; u: every token MASK, at text clock 1 """
    how = sampling_knobs(how)
    if how['solver'] not in SOLVERS:
        raise ValueError(f"solver={how['solver']!r}: choose from {', '.join(SOLVERS)}")
    if 'latent' not in run.streams or how['latent_steps'] < 1:
        raise ValueError(f"{run.out_dir} has no latent stream, or latent_steps={how['latent_steps']} < 1: nothing to solve")
    n = n if tokens is None else len(tokens)
    g = how['guidance'] if tokens is not None else 0
    rng = torch.Generator(run.device).manual_seed(seed)
    out = []
    for first in range(0, n, batch):
        x = blank(run, min(batch, n - first), seed=seed + first)[0] if tokens is None else tokens[first:first + batch]
        x = x.to(run.device)
        empty = torch.where(ends_of(run, x), x, run.text.mask_id)

        def denoise(z, t):
            parts = []
            for weight, seen, clock in ((g, x, 0.0), (1 - g, empty, 1.0)):
                if weight:
                    prediction = call(run, seen, z, clock, t, predict=('latent',))[1]
                    parts.append([weight * y for y in run.latent.x0_and_e(prediction, z, t)])
            return tuple(sum(ys) for ys in zip(*parts))
        z = null_latents(run, len(x), rng)
        out.append(solve(run.latent, how['solver'], z, how['latent_steps'], denoise, rng).cpu())
        progress(len(x))
    return torch.cat(out)


def latent_times(latent, steps):
    """ From 1 to 0; eps says nothing at t = 1, where the input is the answer. """
    return torch.linspace(1 - 1e-3 if latent.target == 'eps' else 1, 0, steps + 1, dtype=torch.float64)


@torch.inference_mode()
def embed(run, tokens, z=None, seed=0, batch=128, progress=lambda n: None):
    """ Mean over each text's own tokens (not EOS and PAD) of what the text head reads, (n, C) float32: clean text, and its standardised
    latents z (n, N, D), or none (noise at clock 1). """
    out, rng = [], torch.Generator(run.device).manual_seed(seed)
    for first in range(0, len(tokens), batch):
        x, latents = tokens[first:first + batch].to(run.device), None
        clock = torch.zeros(len(x), device=run.device)
        if 'latent' in run.streams:
            latents = null_latents(run, len(x), rng) if z is None else z[first:first + batch].to(run.device)
        own = (~is_end(x, run.tokenizer)).float()                        # (B, L)
        with run.autocast():
            hidden = run.model(x, latents, clock, clock + (z is None), None, ('text',), lambda hidden, head: hidden)[0]
        hidden = hidden.float().view(*x.shape, -1)                       # (B, L, C)
        out.append((torch.einsum('blc,bl->bc', hidden, own) / own.sum(1, keepdim=True).clamp(min=1)).cpu())
        progress(len(x))
    return torch.cat(out)


def solve(latent, solver, z, steps, denoise, rng):
    """ z (B, N, D) from noise at t = 1 to a clean latent at t = 0. """
    times, memory, step = latent_times(latent, steps), {}, getattr(latent, solver)
    for t, s in zip(times, times[1:]):
        z = step(z, t, s, denoise, memory, torch.randn(z.shape, generator=rng, device=z.device))
    return z.float()


@torch.inference_mode()
def unconditional(run, n, seed=0, batch=128, on_step=nothing, progress=lambda n: None, **how):
    """ Text and latent from noise: both clocks run down together, one call a step for both. Tokens (n, L), standardised latents. """
    how = sampling_knobs(how)
    how['sampler'] = how['sampler'] or 'ancestral'
    sampler, knobs, temperature = make_sampler(how, run.text)
    if how['by_importance']:
        knobs['importance'] = own_importance(run)
    check_task(run, 'unconditional')
    if how['sampler'] in ('first_hitting', 'cached', 'reparam') or how['block_size'] or how['solver'] == 'heun':
        raise ValueError(f"sampler={how['sampler']}, block_size={how['block_size']}, solver={how['solver']}: joint sampling makes one call "
                         'a step for both; choose from ancestral, confidence, remdm, dfm, no blocks, and from ddim, dpmpp_2m, ancestral')
    if how['sampler'] == 'remdm' and how['remask'] == 'loop' or how['guidance'] != 1:
        raise ValueError('remask=loop and guidance need a fixed condition: joint sampling has none')
    steps = how['steps'] or 128
    rng, device_rng = generators(run, seed)
    step, out, most = getattr(run.latent, how['solver']), [], steps
    every_token, every_given = blank(run, n, how['length'], seed)
    for first in range(0, n, batch):
        B = min(batch, n - first)
        tokens, given = every_token[first:first + B], every_given[first:first + B]
        steps = min(most, int((~given).sum(1).max())) if how['sampler'] == 'confidence' else most        # it makes no more calls
        times = latent_times(run.latent, steps).tolist()
        state = SimpleNamespace(z=null_latents(run, B, device_rng), i=0, memory={})

        def denoise(tokens, t_text, positions):                          # the text sampler asks, and the latent takes its step too
            t, s = (torch.tensor(times[i], dtype=torch.float64) for i in (state.i, state.i + 1))
            logits, prediction = call(run, tokens, state.z, t_text, t, positions, ('text', 'latent'))
            state.z = step(state.z, t, s, lambda z, t: run.latent.x0_and_e(prediction, z, t), state.memory,
                           null_latents(run, B, device_rng)).float()
            state.i += 1
            logits[:, run.banned] = -torch.inf
            return logits
        tokens = sampler(denoise, make_propose(temperature, how['nucleus'], device_rng), run.text, tokens.to(run.device), given, steps,
                         rng, on_step, **knobs)
        assert state.i == steps, (state.i, steps)
        out.append((tokens.cpu(), state.z.cpu()))
        progress(B)
    return tuple(torch.cat(parts) for parts in zip(*out))


# ---- with the encoder: draw several, keep the nearest, mend it

def closeness(run, tokens, raw):
    """ Cosine (n,) of the embeddings of tokens (n, L) with raw latents (n, N, D). """
    embedded = encode(run, [run.tokenizer.decode(ids) for ids in tokens.tolist()])
    return F.cosine_similarity(embedded.flatten(1), raw.flatten(1))


def nearest(run, candidates, raw, K):
    """ Of each K candidates (n K, L) the one whose embedding is nearest to raw (n, N, D): tokens (n, L), cosine (n,). """
    score, best = closeness(run, candidates, raw.repeat_interleave(K, 0)).view(-1, K).max(1)
    return candidates.view(len(raw), K, -1)[torch.arange(len(raw)), best], score


def search(run, raw, rerank=1, refine=0, seed=0, share=0.4, like=None, **how):
    """
    l2t by trial: `rerank` candidates from each raw latent (n, N, D), the nearest stays; then `refine` rounds, in each of which so
    many variants of it are drawn, each with the least certain `share` of its tokens masked again, and the nearest of all stays.
    Several candidates by confidence are drawn at temperature .7: greedy ones would be equal. Returns tokens (n, L), cosine (n,).
    """
    K = rerank
    if rerank < 1 or refine < 0:
        raise ValueError(f'rerank={rerank}, refine={refine}: expected at least 1 and 0')
    if refine and not isinstance(run.text, MaskedText):
        raise ValueError(f'refine={refine} masks again what is least certain: {run.out_dir} was not trained on masked text')
    if K > 1 and how.get('temperature', -1.0) < 0 and how.get('sampler', '') in ('', 'confidence'):
        how = how | dict(temperature=0.7)
    z = run.stats.standardise(raw).repeat_interleave(K, 0)
    like = like if like is None else like.repeat_interleave(K, 0)
    best, score = nearest(run, l2t(run, z, seed=seed, like=like, **how), raw, K)
    for r in range(1, refine + 1):
        tokens = mask_least_certain(run, best.repeat_interleave(K, 0), z, share, seed + r, how.get('batch', 128))
        found, found_score = nearest(run, write(run, tokens, tokens != run.text.mask_id, z, seed=seed + r, **how), raw, K)
        better = found_score > score
        best, score = torch.where(better[:, None], found, best), torch.where(better, found_score, score)
    return best, score


@torch.inference_mode()
def mask_least_certain(run, tokens, z, share, seed, batch):
    """ tokens (n, L) with a share of the length of each text masked: where log p(x^i | z, half of the other tokens) is lowest. The
    halves are drawn by lot, row by row, so equal rows come out differently. """
    half = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    ends = ends_of(run, tokens)
    certainty = torch.zeros(tokens.shape).masked_fill(ends, torch.inf)
    for first in range(0, len(tokens), batch):
        part = slice(first, first + batch)
        for mask in (half[part] & ~ends[part], ~half[part] & ~ends[part]):
            positions = positions_of(mask)
            noisy = torch.where(mask, run.text.mask_id, tokens[part]).to(run.device)
            t = run.text.clock(mask.double().mean(1))
            logits, _ = call(run, noisy, z[part].to(run.device), t, 0.0, positions)
            x = tokens[part].flatten()[positions].to(run.device)
            put(certainty[part], positions, certainty_of(logits, x, 'top1').cpu())
    n = (share * ((tokens != run.tokenizer.pad) & ~ends).sum(1, keepdim=True)).ceil()
    return torch.where(certainty.argsort(1).argsort(1) < n, run.text.mask_id, tokens)


# ---- the command line

def read_template(run, text, length=0):
    """ 'A [MASK] runs on the [MASK:3].' -> tokens, given, inner, (L,) each. A space before a mask belongs to its token, where the
    tokenizer has such tokens. Without [MASK:*] the text has the length that it shows; inner: there EOS and PAD are not allowed. """
    space = ' ?' if run.tokenizer.kind != 'esm' and len(run.tokenizer.encode(' a')) == 1 else ''
    tokens, inner, rest = [], [], False
    pieces = re.split(space + r'\[MASK(|:\d+|:\*)\]', text)             # text, count, text, count, ..., text
    if len(pieces) == 1:
        raise ValueError(f'no [MASK] in {rules.short(text)}: nothing to fill')
    for i, piece in enumerate(pieces):
        if i % 2 and len(piece) > 6:
            raise ValueError(f'[MASK{piece}] is more than {run.out_dir} writes: {run.L - 1} tokens')
        if rest and piece:
            raise ValueError(f'[MASK:*] stands at the end of a text, found {piece!r} behind it')
        rest = rest or i % 2 and piece == ':*'
        added = [] if rest else run.tokenizer.encode(piece) if i % 2 == 0 else [run.text.mask_id] * int(piece[1:] or 1)
        tokens, inner = tokens + added, inner + [i % 2 == 1] * len(added)
    if rest and run.lengths:                                             # up to a length that must be said
        if length <= len(tokens):
            raise ValueError(f'[MASK:*] in {rules.short(text)} needs a --length above {len(tokens)}: {run.out_dir} does not learn when a text ends')
        added, rest = length - len(tokens), False
        tokens, inner = tokens + [run.text.mask_id] * added, inner + [True] * added
    elif length:
        raise ValueError(f'length={length} goes with [MASK:*] in a run that does not learn when a text ends, not with {rules.short(text)}')
    if len(tokens) > most_tokens(run):
        raise ValueError(f'{rules.short(text)} has {len(tokens)} tokens, {run.out_dir} writes at most '
                         + (f'{run.L}' if run.lengths else f'{run.L - 1} and an EOS'))
    open_end = run.L - len(tokens)
    tokens += [run.text.mask_id] * open_end if rest else ([run.tokenizer.eos] + [run.tokenizer.pad] * open_end)[:open_end]
    tokens = torch.tensor(tokens)
    return tokens, tokens != run.text.mask_id, torch.tensor(inner + [False] * open_end)


def watcher(tokenizer, mask_id, rows):
    """ on_step that redraws the texts in place on a terminal, and prints the first one line by line elsewhere. """
    drawn = 0

    def on_step(tokens):
        nonlocal drawn
        lines = [show(tokenizer, ids, mask_id) for ids in tokens[:rows].tolist()]
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            lines = [line[:width] for line in lines]
            print(f'\x1b[{drawn}A\x1b[J' * (drawn > 0) + '\n'.join(lines), flush=True)
            drawn = len(lines)
        else:
            print(lines[0], flush=True)
    return on_step


def show(tokenizer, ids, mask_id):
    """ A half-written text: what is still masked shows as a block; ends at the EOS where all before it is known. """
    pieces, known = [], []
    for i in ids + [tokenizer.eos]:
        if i >= mask_id or i == tokenizer.eos:                           # MASK; beyond it, a cluster
            pieces.append(tokenizer.decode(known))
            known = []
            if i == tokenizer.eos:
                break
            pieces.append('░')
        else:
            known.append(i)
    return ''.join(pieces).replace('\n', ' ')


def warn(message):
    print(f'warning: {message}', file=sys.stderr, flush=True)


def check_writable(path):
    """ ValueError unless a file can be written there. Nothing is left behind. """
    if not os.path.isdir(os.path.dirname(path) or '.'):
        raise ValueError(f'{path}: no such folder')
    if os.path.isdir(path):
        raise ValueError(f'{path}: this is a folder, expected the name of a file')
    is_new = not os.path.lexists(path)
    try:
        open(path, 'ab').close()
    except OSError as error:
        raise ValueError(f'{path}: cannot be written ({error.strerror})') from None
    if is_new:
        os.remove(path)


def read_texts(path, field='text'):
    """ (place, text) of each text of a file, as prepare.py reads it: a line of a text file, a record of a .jsonl, .csv, ... Blank
    ones are passed over; a place is 'FILE, line 3'. """
    if not os.path.isfile(path):
        raise ValueError(f'texts={path}: ' + ('this is a folder, expected a file' if os.path.isdir(path) else 'no such file'))
    unit, counts = 'record' if kind_of(path) in ('.csv', '.tsv', '.parquet') else 'line', Counter()
    source, first = Source(input=os.path.abspath(path), field=field, invalid_bytes='replace'), None
    for document in documents(source, counts):
        place = f'{path}, {unit} {counts["read"]}'
        first = first or counts['invalid_utf8'] and place
        yield place, document.text
    if first:
        warn(f'{first}: a byte that is no UTF-8 became U+FFFD, in {counts["invalid_utf8"]:,} of '
             f'{counts["kept"]:,} texts')
    if not counts['kept']:
        raise ValueError(f'texts={path}: no text in it')


def warn_of_texts(run, texts):
    """ One warning for each text, the first few, that the run's encoder cannot embed as the run would need it. """
    found = []
    for text in texts:
        n_tokens = len(run.tokenizer.encode(text))
        if remark := encoder_of(run).remark(text):
            found.append((text, remark))
        elif n_tokens > most_tokens(run):
            found.append((text, f'has {n_tokens:,} tokens, {run.out_dir} writes at most {most_tokens(run):,} '
                                'and has seen no embedding of a longer text'))
    for text, remark in found[:5]:
        warn(f'{rules.short(text)} {remark}')
    if len(found) > 5:
        warn(f'and {len(found) - 5:,} more texts like these')


def read_latents(run, path):
    """ Raw latents (n, N, D) from an .npy file of (n, D) or (n, N, D). """
    N, D = run.meta['latent_shape']
    array = read_array(path, 'numbers', mmap=True, what='latents')
    shape = (len(array), 1, array.shape[1]) if array.ndim == 2 else array.shape
    if shape[1:] != (N, D) or not shape[0]:
        raise ValueError(f'{path}: shape {array.shape}, expected (n, {N}, {D}) as {run.out_dir} was trained')
    with np.errstate(over='ignore'):                                     # too large becomes inf
        raw = torch.from_numpy(np.array(array, np.float32)).reshape(shape)
    if not raw.isfinite().all():
        raise ValueError(f'{path}: rows {(~raw.isfinite().all((1, 2))).nonzero().flatten().tolist()[:5]} are not finite')
    return raw


def read_images(run, path):
    """ (names, raw latents (n, N, D)) of a picture, or of all in a folder, by name. """
    record = of_images(run)
    files = sorted(glob.glob(os.path.join(glob.escape(path), '*.[pj][np]g'))) if os.path.isdir(path) else [path]
    if not files:
        raise ValueError(f'{path}: no .png or .jpg file in this folder')
    patches = [image_patches(file, record['image_size'], record['patch'], record['channels']) for file in files]
    return [os.path.basename(file) for file in files], torch.from_numpy(np.stack(patches))


def read_sources(run, mode):
    """ (names, texts or None, raw latents or None, places of the texts), by what the mode reads; a knob that it does not read is an
    error, not ignored. """
    reads = dict(l2t=('text', 'texts', 'latents', 'image', 'rerank', 'refine'),
                 t2l=('text', 'texts', 'save', 'png'), t2l2t=('text', 'texts', 'save', 'png'), embed=('text', 'texts', 'save'),
                 infill=('text', 'texts', 'latents', 'image', 'like', 'given'), text=(), latent=('save', 'png'),
                 unconditional=('save', 'png'))[mode]
    for name, value, default in (('text', text, ''), ('texts', texts, ''), ('latents', latents, ''), ('image', image, ''),
                                 ('like', like, ''), ('given', given, ''), ('save', save, ''), ('png', png, ''), ('rerank', rerank, 1),
                                 ('refine', refine, 0)):
        if value != default and name not in reads:
            raise ValueError(f'{name}={value!r}: mode={mode} does not read it')
    for name, value in (('text', text), ('given', given), ('like', like)):
        if not value.strip() and (value or on_command_line(name)) and name in reads:
            raise ValueError(f'{name}={value!r} is blank: the model has nothing to go by')
    embedding = bool(latents) + bool(image) + bool(like)
    if bool(text) + bool(texts) + bool(given) > 1 or (text or texts) and embedding and mode != 'infill' or embedding > 1:
        raise ValueError('text, texts, given, latents, image and like: give one text, and one embedding where both are read')
    lines = [text or given] if text or given else []
    places = [f'--{"text" if text else "given"}'] if lines else []
    if texts:
        places, lines = zip(*read_texts(texts, field))
        places, lines = list(places), list(lines)
    if mode in ('t2l', 't2l2t', 'infill', 'embed') and not lines or mode == 'l2t' and not lines and not embedding:
        raise ValueError(f'mode={mode} reads --text="...", or --texts=FILE'
                         + (', or --latents=FILE.npy, or --image=FILE.png' if mode == 'l2t' else ''))
    if mode in ('unconditional', 'text', 'latent'):
        return [''] * num_samples, None, None, None
    if embedding and 'latent' not in run.streams:
        raise ValueError(f'{run.out_dir} was trained without latents: it reads none')
    files, raw = read_images(run, image) if image else ([], read_latents(run, latents) if latents else encode(run, [like]) if like else
                                                        encode(run, lines) if mode == 'l2t' else None)
    if like or mode == 'l2t' and lines:                                  # after encode: it says what is wrong with the encoder
        warn_of_texts(run, [like] if like else lines)
    if mode == 'infill' and raw is not None:
        if len(raw) not in (1, len(lines)):
            raise ValueError(f'{latents or image}: {len(raw)} latents for {len(lines)} texts')
        raw = raw.expand(len(lines), -1, -1)
    names = lines or files or [f'{latents}[{i}]' for i in range(len(raw))]
    return names, lines, raw, places


def main():
    config = configure(globals())
    how = {name: config[name] for name in TEXT_KNOBS + LATENT_KNOBS} | dict(seed=seed, batch=sample_batch)
    with stop_on_error():
        run = load_run(out_dir, which, device, dtype, encoder_folder)
        learned = trained_for(run)
        own = run.streams[0] if len(run.streams) == 1 else 'l2t' if 'l2t' in learned else min(learned)
        if mode == 'mixed' and len(learned) == 1:
            raise ValueError(f'mode=mixed, but {out_dir} was trained for {own}: name the mixed run with --out_dir=')
        own_mode = mode in ('', 'mixed') or mode == 'unconditional' and len(run.streams) == 1    # as a config of training says it
        task = 'infill' if own_mode and given else own if own_mode else mode
        if task == 'embed' and (not save or num_samples > 1):
            raise ValueError('mode=embed writes one vector a text to --save=FILE.npy')
        if fasta and task in ('t2l', 'latent', 'embed'):
            raise ValueError(f'fasta={fasta!r}: mode={task} writes no text')
        if fasta and run.tokenizer.kind != 'esm':
            raise ValueError(f'fasta={fasta!r}: {out_dir} was trained on {run.tokenizer.kind} tokens, not on proteins')
        if png:
            of_images(run)
            if not png.endswith('.png'):
                raise ValueError(f'png={png}: expected a name that ends in .png')
        for path in (save, png, fasta):
            if path:
                check_writable(path)
        check_task(run, task)
        if watch and (rerank > 1 or refine):
            raise ValueError('watch shows one text being written: not with rerank or refine')
        sources, lines, raw, places = read_sources(run, task)
        each = 1 if lines is None and raw is None else num_samples
        total = len(sources) * each
        if each > 1 and temperature < 0 and sampler in ('', 'confidence'):
            how['temperature'] = 0.7
        if task == 'unconditional' and guidance != 1 and not on_command_line('guidance'):
            print(f'guidance={guidance:g} is for the other directions: samples from noise have no condition to guide them')
            how['guidance'] = 1.0
        how['on_step'] = watcher(run.tokenizer, run.text.mask_id, total) if watch else nothing
        tokens = z = notes = None
        with tqdm(total=total, unit='sample', disable=total <= sample_batch) as bar:
            how['progress'] = bar.update
            if task in ('t2l', 't2l2t', 'latent'):
                latent_how = {key: how[key] for key in (*LATENT_KNOBS, 'seed', 'batch')}
                read = pack(run, lines, places=places).repeat_interleave(each, 0) if lines else None
                z = t2l(run, read, n=total, **latent_how)
            if task == 'embed':
                hidden = embed(run, pack(run, lines, places=places), seed=seed, batch=sample_batch, progress=bar.update)
            elif task == 't2l2t':
                like = read if not length else None
                tokens = l2t(run, run.stats.standardise(raw_latents(run, z)), like=like, **how)
            elif task == 'l2t' and (rerank > 1 or refine):
                tokens, cosine = search(run, raw.repeat_interleave(each, 0), rerank, refine, **how)
                notes = [f'   cosine {c:.3f}' for c in cosine.tolist()]
            elif task == 'l2t':
                tokens = l2t(run, run.stats.standardise(raw).repeat_interleave(each, 0), **how)
            elif task == 'text':
                tokens = write(run, *blank(run, total, length, seed), None, **how)
            elif task == 'unconditional':
                tokens, z = unconditional(run, total, **how)
            elif task == 'infill':
                templates = zip(*(read_template(run, line, length) for line in lines))
                ids, fixed, inner = (torch.stack(part).repeat_interleave(each, 0) for part in templates)
                condition = None if raw is None else run.stats.standardise(raw).repeat_interleave(each, 0)
                tokens = write(run, ids, fixed, condition, inner=inner, **how)
        if z is not None and save:
            with open(save, 'wb') as f:
                np.save(f, raw_latents(run, z).numpy())
        if z is not None and png:
            write_png(png, pixels(run, raw_latents(run, z)), columns=each if each > 1 and len(sources) > 1 else 0)
        if task == 't2l' and png:
            notes = [f'picture {i + 1}' for i in range(total)]
        elif task == 't2l':                                              # what the encoder itself says of these texts
            try:
                own = encode(run, lines).repeat_interleave(each, 0)
                warn_of_texts(run, lines)
                cosine = F.cosine_similarity(raw_latents(run, z).flatten(1), own.flatten(1))
                notes = [f'latent of {tuple(z.shape[1:])}, cosine with the encoder\'s own {c:.3f}' for c in cosine.tolist()]
            except ValueError as error:
                notes = [f'latent of {tuple(z.shape[1:])}; not compared: {error}'] * total
        elif task == 'latent':
            notes = [f'latent of {tuple(z.shape[1:])}, mean square {x:.3f} per dimension, standardised'
                     for x in (z.square().sum((1, 2)) / run.stats.live.sum() / z.shape[1]).tolist()]
        if task == 'embed':
            with open(save, 'wb') as f:
                np.save(f, hidden.numpy())
            print(f'{total} vectors of {hidden.shape[1]} numbers written to {save}')
            return
        if fasta:
            with open(fasta, 'w') as f:
                for i, ids in enumerate(tokens.tolist()):
                    residues = run.tokenizer.decode(ids)
                    f.write(f'>sample_{i + 1} length={len(residues)}\n' + '\n'.join(re.findall('.{1,60}', residues)) + '\n')
            print(f'{total} sequences written to {fasta}')
    n_empty = 0
    for i in range(total):
        if i % each == 0 and sources[i // each]:
            print(f'\n{sources[i // each]}')
        written = '' if tokens is None else run.tokenizer.decode(tokens[i].tolist())
        print(f'  -> {written}{notes[i] if notes else ""}')
        n_empty += tokens is not None and not written.strip()
    if n_empty:
        warn(f'{n_empty} of {total} texts are empty: the model wrote their end (EOS) first; '
             'another --seed, --temperature or --sampler may write more')
    if z is not None and save:
        print(f'\n{total} latents written to {save}')
    if z is not None and png:
        print(f'\n{total} pictures written to {png}')


if __name__ == '__main__':
    main()
