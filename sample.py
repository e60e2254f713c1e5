"""
All that one two-clock model writes, in every direction, and the command line.

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

Guidance g mixes two predictions of the one network, with the condition (c) and with nothing (u):
its clock at 1, and noise or MASK in its place.
    text      log p = g log p_c + (1 - g) log p_u
    latents   x0 = g x0_c + (1 - g) x0_u, and e likewise

A text sampler is a function of samplers.py, and so is a latent solver.
Letters: n texts, B rows of a batch, L text tokens, N latent vectors, D latent dims, C width,
P positions where the head runs, V vocabulary.
"""
import difflib
import sys
from types import SimpleNamespace

import runs.threads    # before torch: it sets how threads wait for one another

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import configurator
from configurator import configure, on_command_line, stop_on_error
from corpora.inputs import (READ_BY, pack, read_sources, read_template, warn_of_texts,
                            with_each_length)
from data import is_end
from diffusion import (Logits, MaskedText, check_choice, in_chunks, positions_of, rank_in_row,
                       run_head, to_device, uniforms)
from runs.console import check_writable, warn
from runs.distributed import keep_freed_memory
from runs.loading import Needs, encode, load_run, no_progress, raw_latents, trained_for
from runs.unmasking import Recorder, no_observer, watcher
from samplers import SOLVERS, log_p_of, make_propose, make_sampler, no_callback, scatter_at

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
                            # one source gets several texts (0.4 for autoregressive drafts)
nucleus = 1.0               # (0, 1]: keep the likeliest tokens that hold this much probability, and
                            # the one on the boundary
guidance = 1.0              # [0, 100]; g: 1 is the conditional model, 0 the unconditional, more
                            # weighs the condition up
rerank = 1                  # [1, 4096]; l2t: draw so many texts, embed them, keep the one nearest
                            # to the latent
refine = 0                  # [0, 4096]; l2t: rounds of masking its least certain part again, and
                            # keeping what comes nearer
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
dtype = 'bfloat16'          # bfloat16 | float32

TEXT_KNOBS = ('sampler', 'steps', 'length', 'block_size', 'score', 'prefer', 'end_penalty',
              'by_importance', 'remask', 'eta', 'loop', 'alpha', 'repeat_cap', 'self_correct',
              'temperature', 'nucleus', 'guidance')
LATENT_KNOBS = ('solver', 'latent_steps', 'guidance')
DEFAULTS = {name: globals()[name] for name in TEXT_KNOBS + LATENT_KNOBS}
RULES = configurator.read_knobs(__file__)[2]
OTHER_KEYWORDS = ('seed', 'batch', 'progress', 'on_step', 'observe', 'like', 'rerank', 'refine',
                  'inner')


def sampling_knobs(given):
    """ DEFAULTS, and over them the keywords of a call. A name that is none raises TypeError, a
    value against its rule ValueError. """
    sampling = dict(DEFAULTS)
    for name, value in given.items():
        if name not in DEFAULTS:
            legal = [*DEFAULTS, *(other for other in OTHER_KEYWORDS if other != name)]
            near = difflib.get_close_matches(name, legal, 1, cutoff=0.5)
            hint = f'expected one of {", ".join(DEFAULTS)}'
            if near:
                hint = f'did you mean {near[0]!r}?'
            raise TypeError(f'unknown keyword {name!r}, {hint}')

        # as the knob's type, as on the command line
        value = value.item() if isinstance(value, np.generic) else value
        try:
            sampling[name] = configurator.settle(value, DEFAULTS[name], RULES.get(name),
                                                 configurator.from_value)
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from None
    return sampling

# -----------------------------------------------------------------------------
# What a run must have for each direction

FILLS = ('l2t', 'unconditional')   # modes that teach to fill masks
WRITES = (*FILLS, 'causal')        # modes that teach to write a text
MAKES = ('t2l', 'unconditional')   # modes that teach to make a latent

NEEDS = {
    'text': Needs(('text',), (WRITES,)),
    'latent': Needs(('latent',), (MAKES,)),
    'l2t': Needs(('text', 'latent'), (WRITES,)),
    't2l': Needs(('text', 'latent'), (MAKES,)),
    't2l2t': Needs(('text', 'latent'), (WRITES, MAKES)),
    'unconditional': Needs(('text', 'latent'), (('unconditional',),), masked_text=True),
    'infill': Needs(('text',), (WRITES,)),
    'embed': Needs(('text',), (FILLS,), masked_text=True),
}


def check_direction(run, direction):
    """ ValueError where the run cannot do it. """
    missing = NEEDS[direction].missing(run)
    if missing:
        hint = ''
        if direction == 'unconditional':
            hint = '; --mode=text or --mode=latent samples one alone'
        raise ValueError(f'{run.out_dir} {missing}: no {direction} from it{hint}')

# -----------------------------------------------------------------------------
# The network, and guidance

MOST_BYTES = 6 * 10 ** 9           # that a network call keeps for its rows, beside the logits


def call(run, tokens, z, t_text, t_latent, positions=None, predict=('text',), cache=None):
    """ One call of the network: Logits (P, V) or None, and the latent prediction (B, N, D) or None.
    Clocks are numbers or (B,). cache: a dict, where a process decodes step by step: then the logits
    are a tensor (B, V). """
    B = len(z if tokens is None else tokens)
    run.row_calls += B

    def clock(t):
        t = torch.as_tensor(t, dtype=torch.float32)
        return t.to(run.device, non_blocking=True).expand(B)

    # everything on the device; from the host this does not wait
    t_text, t_latent = clock(t_text), clock(t_latent)
    if positions is not None:
        positions = positions.to(run.device, non_blocking=True)
    with run.autocast():
        if cache is not None:
            found = run.next_token.decode_step(run.model, tokens, z, t_text, t_latent, cache)
            return found, None
        hidden, prediction = run.model(tokens, z, t_text, t_latent, positions, predict,
                                       return_hidden=True)
        logits = None if hidden is None else run_head(run.model, hidden, run.text.mask_id)
        return logits, prediction


def rows_that_fit(run, batch, n_caches=0):
    """ The rows of a network call: batch, or as many as MOST_BYTES hold, where these are fewer.
    n_caches: of keys and values, where a text is written from left to right. """
    c = run.model.config
    with run.autocast():
        is_half = torch.is_autocast_enabled(torch.device(run.device).type)

    # numbers of a row: 25 for each place and dimension are alive at the widest point of a block,
    # the MLP. A cache has two more in each block
    places = c.seq_len + c.n_latents * c.latent_tokens
    numbers = places * c.width * (25 + 2 * c.depth * n_caches)
    return max(1, min(batch, MOST_BYTES // (numbers * (2 if is_half else 4))))


def guided_logits(g, conditional, unconditional):
    """ log p = g log p_c + (1 - g) log p_u. Both are functions without arguments that give Logits,
    by one network call each. A model that weighs nothing is not called. """
    if g == 1:
        return conditional()
    if g == 0:
        return unconditional()
    logits_c, logits_u = conditional(), unconditional()

    def mixture(part):
        return g * logits_c[part].log_softmax(-1) + (1 - g) * logits_u[part].log_softmax(-1)
    return Logits(logits_c.shape, mixture)


def guided_latents(g, conditional, unconditional):
    """ The same for latents: the functions give x0 and e. """
    if g == 1:
        return conditional()
    if g == 0:
        return unconditional()
    x0_c, e_c = conditional()
    x0_u, e_u = unconditional()
    return g * x0_c + (1 - g) * x0_u, g * e_c + (1 - g) * e_u


def null_latents(run, n, rng):
    """ Latents (n, N, D) that say nothing: noise, for clock 1. """
    shape = (n, run.model.config.n_latents, run.model.config.latent_dim)
    noise = torch.randn(shape, generator=rng, device=rng.device)
    return (noise * run.latent.live.to(rng.device)).to(run.device)


def ban(run, logits):
    """ Logits (P, V) of ids that are never written become -inf. That number is made on the device:
    for one of the host the host would wait. """
    logits[:, run.banned] = logits.new_full((), -torch.inf)


def make_denoise(run, g, condition, null, inner=None, is_causal=False):
    """ denoise(tokens, t, positions, rows) of samplers.py, with guidance g.
    condition, null (B, N, D): standardised latents, and noise in their place; None: there are none.
    inner (B, L): positions where EOS and PAD are not allowed.
    is_causal: the text is written from left to right, with a cache of keys and values. """
    specials = torch.tensor([run.tokenizer.eos, run.tokenizer.pad], device=run.device)
    cache_c, cache_u = ({}, {}) if is_causal else (None, None)

    def denoise(tokens, t, positions, rows=slice(None)):
        if isinstance(rows, torch.Tensor):
            rows = to_device(rows, tokens)

        def conditional():
            return call(run, tokens, condition[rows], t, 0.0, positions, cache=cache_c)[0]

        def unconditional():
            z = None if null is None else null[rows]
            return call(run, tokens, z, t, 1.0, positions, cache=cache_u)[0]

        guided = guided_logits(g, conditional, unconditional)            # (P, V)
        if inner is not None:
            is_inner = inner[rows].flatten()[positions.to(run.device)]   # (P,)

        def allowed(part):
            # without what is never written, and what is not written here
            logits = guided[part]                                        # (p, V)
            ban(run, logits)
            if inner is not None:
                logits[:, specials] += torch.where(is_inner[part], -torch.inf, 0.0)[:, None]
            return logits
        return Logits(guided.shape, allowed)
    return denoise

# -----------------------------------------------------------------------------
# Text

def generators(run, seed):
    """ One on the host, which decides what is unmasked, and one on the device, for the rest. On a
    CPU they are the same. """
    rng = torch.Generator().manual_seed(seed)
    if torch.device(run.device).type == 'cpu':
        return rng, rng
    return rng, torch.Generator(run.device).manual_seed(seed)


def process_of(run, sampling):
    """ The text process that the sampler belongs to. ValueError where the run has not learned
    it. """
    name = sampling['sampler']
    if name == 'autoregressive':
        if run.next_token is None:
            raise ValueError(f'sampler={name}: {run.out_dir} was trained without causal rows '
                             '(mode=l2t+causal)')
        return run.next_token
    if not run.fills_masks and run.text is not run.next_token:
        raise ValueError(f'sampler={name} fills masks: {run.out_dir} was trained for '
                         'mode=causal alone')
    return run.text


def default_sampler(run, z, some_known):
    """ The likeliest text where there is something to write from, else a sample. """
    if run.next_token and not (some_known and run.fills_masks):
        return 'autoregressive'
    # processes other than MaskedText have ancestral alone
    seeks_likely = isinstance(run.text, MaskedText) and (z is not None or some_known)
    return 'confidence' if seeks_likely else 'ancestral'


def text_sampler(run, sampling):
    """ (sampler, its knobs, temperature) of the text knobs, as samplers.make_sampler gives
    them. """
    sampler, knobs, temperature = make_sampler(sampling, process_of(run, sampling))
    if sampling['by_importance']:
        if not run.model.importance:
            raise ValueError(f'by_importance: {run.out_dir} was trained with importance=none')
        knobs['importance'] = lambda tokens: run.model.importance(tokens)[0].float()
    return sampler, knobs, temperature


@torch.inference_mode()
def write(run, tokens, known_mask, z, seed=0, batch=128, inner=None, on_step=no_callback,
          observe=no_observer, progress=no_progress, **sampling):
    """
    Fills the MASKs of tokens (n, L) that are not in known_mask (n, L), from standardised latents
    z (n, N, D), or from text alone: z None. Returns tokens (n, L).
    inner (n, L): positions where EOS and PAD are not allowed.
    observe(denoise, tokens): a denoise in its place, which looks on (runs/unmasking.py).
    """
    sampling = sampling_knobs(sampling)

    # what is not asked for
    if 'text' not in run.streams:
        raise ValueError(f'{run.out_dir} has no text stream: nothing to write')
    if not sampling['sampler']:
        some_known = bool((known_mask & ~ends_of(run, tokens)).any())    # more than its length
        sampling['sampler'] = default_sampler(run, z, some_known)
    text = process_of(run, sampling)
    is_causal = text is run.next_token
    if is_causal and z is not None and sampling['temperature'] < 0:
        sampling['temperature'] = 0.0

    # the sampler, and what it costs
    sampler, knobs, temperature = text_sampler(run, sampling)
    calls_per_token = sampling['sampler'] in ('confidence', 'reparam', 'first_hitting')
    steps = sampling['steps'] or (run.L if calls_per_token else 128)
    g = sampling['guidance'] if z is not None else 0
    n_caches = 0
    if is_causal:
        n_caches = 1 if g in (0, 1) else 2
    batch = rows_that_fit(run, batch, n_caches)

    # batch by batch
    rng, device_rng = generators(run, seed)
    out = []
    for first in range(0, len(tokens), batch):
        part = slice(first, first + batch)
        x = tokens[part].to(run.device)
        condition = None if z is None else z[part].to(run.device)
        null = None
        if 'latent' in run.streams:                                      # one draw per text, kept
            null = null_latents(run, len(x), device_rng)
        denoise = make_denoise(run, g, condition, null,
                               None if inner is None else inner[part].to(run.device), is_causal)
        denoise = observe(denoise, x)
        propose = make_propose(temperature, sampling['nucleus'], device_rng)
        x = sampler(denoise, propose, text, x, known_mask[part], steps, rng, on_step, **knobs)
        out.append(x.cpu())
        progress(len(x))
    return torch.cat(out)


def ends_of(run, tokens):
    """ (n, L): EOS and PAD, where the run is given them. """
    return is_end(tokens, run.tokenizer) & bool(run.lengths)


def blank(run, n, length=0, seed=0, like=None):
    """
    n texts of which nothing is known: tokens, all MASK, and known_mask, all False.
    Where the run does not learn lengths, EOS and PAD are known: where the texts `like` (n, L) have
    them, or after `length` tokens, or after a length drawn from the training texts'.
    """
    tokens = torch.full((n, run.L), run.text.mask_id)
    if not run.lengths:
        if length:
            raise ValueError(f'length={length}: {run.out_dir} writes texts of its own length (it '
                             'was trained with predict_length=True)')
        return tokens, torch.zeros_like(tokens, dtype=torch.bool)
    if like is not None:
        ends = ends_of(run, like)
        return torch.where(ends, like, run.text.mask_id), ends

    if not 0 <= length <= run.L:
        raise ValueError(f'length={length}: {run.out_dir} writes at most {run.L} tokens')
    # as asked, or by a draw of the quantiles of the training texts' lengths
    if length:
        lengths = torch.full((n, 1), length)
    else:
        quantile = np.random.default_rng(seed).random(n)
        drawn = np.interp(quantile, np.linspace(0, 1, len(run.lengths)), run.lengths).round()
        lengths = torch.from_numpy(drawn).long().clamp(min=1)[:, None]   # (n, 1)

    # MASK up to there, then an EOS and PAD
    column = torch.arange(run.L)
    end = torch.where(column == lengths, run.tokenizer.eos, run.tokenizer.pad)
    return torch.where(column < lengths, tokens, end), column >= lengths


def l2t(run, z, seed=0, like=None, **sampling):
    """ Tokens (n, L) written from standardised latents z (n, N, D). like (n, L): texts of the
    lengths that are wanted (see blank). """
    tokens, known_mask = blank(run, len(z), sampling.get('length', 0), seed, like)
    return write(run, tokens, known_mask, z, seed, **sampling)

# -----------------------------------------------------------------------------
# Gaps, also of a length that is not known

def what_is_scored(run, tokens):
    """ known_mask (n, L), or None where nothing is known; and the real tokens of each text (n,),
    float64: the text, and one EOS where that is predicted. """
    known_mask = ends_of(run, tokens) if run.lengths else None
    is_real = tokens != run.tokenizer.pad if known_mask is None else ~known_mask
    return known_mask, is_real.sum(1).double()


def bound_of(run, process, rows, tokens, latents, clock, u, known_mask):
    """ A draw of the bound on -log p of these rows, nats per text. """
    latents = None if latents is None else latents[rows].to(run.device)
    known_mask = None if known_mask is None else known_mask[rows]
    t_latent = torch.full((len(tokens[rows]),), clock, device=run.device)
    with run.autocast():
        return process.bound(run.model, tokens[rows], latents, t_latent, u[rows], known_mask)


@torch.inference_mode()
def nats_per_token(run, tokens, z=None, seed=0, batch=128, draws=64):
    """
    How unlikely the network finds texts tokens (n, L), from standardised latents z (n, N, D) or
    from none: (n,) float64. A token is one of the text, or its EOS.
        nats = -log p(x | z)                      exact, where the run has learned mode=causal
        nats = 1/K sum over k of bound_k(x | z)   else: the bound of the task nelbo, K = draws
    All texts share their K draws of masked places, and these spread the number of places evenly,
    so that texts differ by what they say, not by luck.
    """
    process = run.next_token or run.text
    if process is run.next_token:
        draws = 1
    known_mask, n_real = what_is_scored(run, tokens)

    # the same numbers for each text
    n, L = tokens.shape
    u = uniforms(seed, 0, 'evaluation', 0, draws, 1 + L)                 # (K, 1 + L)
    u[:, 0] = (torch.arange(draws) + 0.5) / draws
    latents, clock = z, 0.0
    if z is None:
        latents, clock = None, 1.0
        if 'latent' in run.streams:
            rng = torch.Generator(run.device).manual_seed(seed)
            latents = null_latents(run, 1, rng).expand(n, -1, -1)

    # some texts a call, each with all of its draws
    nats = torch.zeros(n, dtype=torch.float64)
    n_texts = max(1, rows_that_fit(run, batch) // draws)
    for first in range(0, n, n_texts):
        texts = torch.arange(first, min(first + n_texts, n))
        rows = texts.repeat_interleave(draws)
        some_latents = None if latents is None else latents[rows]
        some_known = None if known_mask is None else known_mask[rows]
        found = bound_of(run, process, slice(None), tokens[rows], some_latents, clock,
                         u.repeat(len(texts), 1), some_known)
        nats[texts] = found.view(-1, draws).mean(1)
    return nats / n_real.clamp(min=1)


def infill(run, templates, z=None, n_each=1, seed=0, batch=128, **sampling):
    """
    n_each texts of each template, from standardised latents z (n, N, D) or from text alone. Where a
    gap has a range of lengths, [MASK:2-6], each length is written, and the text of the fewest
    nats_per_token stays. Returns tokens (n n_each, L) and the nats of each text (n n_each,): None
    where no gap has a range.
    """
    # a row for each length of each text
    read, text_of_row = [], []
    for template in templates:
        lengths = [read_template(run, one, sampling.get('length', 0))
                   for one in with_each_length(template)]
        for _ in range(n_each):
            i = text_of_row[-1] + 1 if text_of_row else 0
            text_of_row += [i] * len(lengths)
            read += lengths
    tokens, known_mask, inner = (torch.stack(part) for part in zip(*read))
    text_of_row = torch.tensor(text_of_row)
    if z is not None:
        z = z[text_of_row // n_each]

    tokens = write(run, tokens, known_mask, z, seed, batch, inner=inner, **sampling)
    n = len(templates) * n_each
    if len(tokens) == n:
        return tokens, None

    # the best length of each text
    nats = nats_per_token(run, tokens, z, seed, batch)
    best = []
    for i in range(n):
        rows = (text_of_row == i).nonzero().flatten()
        best.append(rows[nats[rows].argmin()])
    best = torch.stack(best)
    return tokens[best], nats[best]

# -----------------------------------------------------------------------------
# Latents

def latent_times(latent, steps):
    """ From 1 to 0. A network that predicts eps says nothing at t = 1, where its input is the
    answer. """
    first = 1 - 1e-3 if latent.target == 'eps' else 1
    return torch.linspace(first, 0, steps + 1, dtype=torch.float64)


def solve(latent, solver, z, steps, denoise, rng):
    """ z (B, N, D) from noise at t = 1 to a clean latent at t = 0. """
    step = SOLVERS[solver]
    times = latent_times(latent, steps)
    memory = {}
    for t, t_next in zip(times, times[1:]):
        noise = torch.randn(z.shape, generator=rng, device=z.device)
        z = step(latent, z, t, t_next, denoise, memory, noise)
    return z.float()


@torch.inference_mode()
def t2l(run, tokens, n=None, seed=0, batch=128, progress=no_progress, **sampling):
    """ Standardised latents (n, N, D) of texts tokens (n, L); tokens None: n latents of no
    text. """
    sampling = sampling_knobs(sampling)
    solver, steps = sampling['solver'], sampling['latent_steps']
    if 'latent' not in run.streams or steps < 1:
        raise ValueError(f'{run.out_dir} has no latent stream, or latent_steps={steps} < 1: '
                         'nothing to solve')
    g = 0 if tokens is None else sampling['guidance']
    n = n if tokens is None else len(tokens)
    batch = rows_that_fit(run, batch)

    rng = torch.Generator(run.device).manual_seed(seed)
    out = []
    for first in range(0, n, batch):
        # the texts, and the same with every token MASK
        if tokens is None:
            x, _ = blank(run, min(batch, n - first), seed=seed + first)
        else:
            x = tokens[first:first + batch]
        x = x.to(run.device)
        null = torch.where(ends_of(run, x), x, run.text.mask_id)

        def denoise(z, t):
            def x0_and_e(tokens, t_text):
                prediction = call(run, tokens, z, t_text, t, predict=('latent',))[1]
                return run.latent.x0_and_e(prediction, z, t)
            return guided_latents(g, lambda: x0_and_e(x, 0.0), lambda: x0_and_e(null, 1.0))

        z = solve(run.latent, solver, null_latents(run, len(x), rng), steps, denoise, rng)
        out.append(z.cpu())
        progress(len(x))
    return torch.cat(out)

# -----------------------------------------------------------------------------
# Both, and neither

@torch.inference_mode()
def unconditional(run, n, seed=0, batch=128, on_step=no_callback, observe=no_observer,
                  progress=no_progress, **sampling):
    """ Text and latent from noise: both clocks run down together, one call a step for both. Returns
    tokens (n, L) and standardised latents (n, N, D). """
    sampling = sampling_knobs(sampling)
    sampling['sampler'] = name = sampling['sampler'] or 'ancestral'
    solver = sampling['solver']
    sampler, knobs, temperature = text_sampler(run, sampling)
    check_direction(run, 'unconditional')

    # what does not make one call a step, and what needs a condition
    other_calls = name in ('autoregressive', 'first_hitting', 'cached', 'reparam')
    other_calls = other_calls or solver == 'heun'
    if other_calls or sampling['block_size']:
        raise ValueError(f'sampler={name}, block_size={sampling["block_size"]}, solver={solver}: '
                         'joint sampling makes one call a step for both; choose from ancestral, '
                         'confidence, remdm, dfm, no blocks, and from ddim, dpmpp_2m, ancestral')
    if name == 'remdm' and sampling['remask'] == 'loop' or sampling['guidance'] != 1:
        raise ValueError('remask=loop and guidance need a fixed condition: joint sampling has none')

    latent_step = SOLVERS[solver]
    batch = rows_that_fit(run, batch)
    rng, device_rng = generators(run, seed)
    all_tokens, all_known = blank(run, n, sampling['length'], seed)
    out = []
    for first in range(0, n, batch):
        tokens, known_mask = all_tokens[first:first + batch], all_known[first:first + batch]
        steps = sampling['steps'] or 128
        if name == 'confidence':                                         # it makes no more calls
            steps = min(steps, int((~known_mask).sum(1).max()))
        # state: the latents, and how many steps they have taken
        times = latent_times(run.latent, steps)
        state = SimpleNamespace(z=null_latents(run, len(tokens), device_rng), i=0, memory={})

        def denoise(tokens, t_text, positions):
            # the text sampler asks for logits, and the latent takes its step with the same call
            if state.i == steps:
                raise ValueError(f'sampler={name} makes more than steps={steps} network calls; '
                                 'joint sampling makes one a step for both')
            t, t_next = times[state.i], times[state.i + 1]
            logits, prediction = call(run, tokens, state.z, t_text, t, positions,
                                      predict=('text', 'latent'))

            def predicted(z, t):
                return run.latent.x0_and_e(prediction, z, t)

            noise = null_latents(run, len(tokens), device_rng)
            z = latent_step(run.latent, state.z, t, t_next, predicted, state.memory, noise)
            state.z = z.float()
            state.i += 1

            def allowed(part):
                some = logits[part]
                ban(run, some)
                return some
            return Logits(logits.shape, allowed)

        propose = make_propose(temperature, sampling['nucleus'], device_rng)
        tokens = tokens.to(run.device)
        tokens = sampler(observe(denoise, tokens), propose, run.text, tokens, known_mask, steps,
                         rng, on_step, **knobs)
        if state.i < steps:
            raise ValueError(f'sampler={name} made {state.i} of {steps} network calls; joint '
                             f'sampling makes one a step for both: --steps={state.i}')
        out.append((tokens.cpu(), state.z.cpu()))
        progress(len(tokens))
    return tuple(torch.cat(parts) for parts in zip(*out))


@torch.inference_mode()
def embed(run, tokens, z=None, seed=0, batch=128, progress=no_progress):
    """ Mean over each text's own tokens (not EOS and PAD) of what the text head reads, (n, C)
    float32. The network gets clean text, and its standardised latents z (n, N, D) or noise at clock
    1. """
    rng = torch.Generator(run.device).manual_seed(seed)
    batch = rows_that_fit(run, batch)
    out = []
    for first in range(0, len(tokens), batch):
        x = tokens[first:first + batch].to(run.device)
        t = torch.zeros(len(x), device=run.device)
        latents = None
        if 'latent' in run.streams and z is None:
            latents = null_latents(run, len(x), rng)
        elif 'latent' in run.streams:
            latents = z[first:first + batch].to(run.device)

        # clocks: text 0, latents 0 or 1
        with run.autocast():
            hidden, _ = run.model(x, latents, t, t + (z is None), predict=('text',),
                                  return_hidden=True)
        hidden = hidden.float().view(*x.shape, -1)                       # (B, L, C)
        is_text = (~is_end(x, run.tokenizer)).float()                    # (B, L)
        if run.model.config.shift:                                       # a token is read one later
            is_text = F.pad(is_text[:, :-1], (1, 0))

        # the mean over the text alone
        total = torch.einsum('blc,bl->bc', hidden, is_text)
        out.append((total / is_text.sum(1, keepdim=True).clamp(min=1)).cpu())
        progress(len(x))
    return torch.cat(out)

# -----------------------------------------------------------------------------
# Search with the encoder: draw several texts, keep the nearest, mend it

def closeness(run, tokens, raw):
    """ Cosine (n,) of the embeddings of tokens (n, L) with raw latents (n, N, D). """
    embedded = encode(run, [run.tokenizer.decode(ids) for ids in tokens.tolist()])
    return F.cosine_similarity(embedded.flatten(1), raw.flatten(1))


def nearest(run, candidates, raw, K):
    """ Of each K candidates (n K, L) the one whose embedding is nearest to raw (n, N, D): tokens
    (n, L), cosine (n,). """
    cosine = closeness(run, candidates, raw.repeat_interleave(K, 0))
    cosine, best = cosine.view(-1, K).max(1)
    return candidates.view(len(raw), K, -1)[torch.arange(len(raw)), best], cosine


def search_settings(run, K, sampling):
    """ The settings of K drafts, and of mending them. Several greedy texts would be equal, so they
    are drawn at a temperature: a lower one from left to right, where each token is given all that
    is before it. Mending fills masks. """
    sampler = sampling.get('sampler', '')
    is_causal = run.next_token is not None and (sampler in ('', 'autoregressive')
                                                or run.text is run.next_token)
    drafting = mending = sampling
    if is_causal:
        mending = sampling | dict(sampler='confidence')
    is_greedy = is_causal or sampler in ('', 'confidence')
    if K > 1 and is_greedy and sampling.get('temperature', -1.0) < 0:
        drafting = drafting | dict(temperature=0.4 if is_causal else 0.7)
        mending = mending | dict(temperature=0.7)
    return drafting, mending


def search(run, raw, rerank=1, refine=0, seed=0, share=0.4, like=None, **sampling):
    """
    l2t by trial. From each raw latent (n, N, D) `rerank` candidates are drawn, and the nearest
    stays. Then come `refine` rounds: each draws so many variants of it, with the least certain
    `share` of its tokens masked again, and the nearest of all stays. Returns tokens (n, L), cosine
    (n,).
    """
    K = rerank
    if rerank < 1 or refine < 0:
        raise ValueError(f'rerank={rerank}, refine={refine}: expected at least 1 and 0')
    if refine and not (isinstance(run.text, MaskedText) and run.fills_masks):
        raise ValueError(f'refine={refine} masks again what is least certain: {run.out_dir} was '
                         'not trained on masked text')

    drafting, mending = search_settings(run, K, sampling)
    z = run.stats.standardise(raw).repeat_interleave(K, 0)               # (n K, N, D)
    like = None if like is None else like.repeat_interleave(K, 0)
    best, cosine = nearest(run, l2t(run, z, seed=seed, like=like, **drafting), raw, K)

    # mend it: write its least certain part again, keep what comes nearer
    for i in range(1, refine + 1):
        tokens = mask_least_certain(run, best.repeat_interleave(K, 0), z, share, seed + i,
                                    sampling.get('batch', 128))
        tokens = write(run, tokens, tokens != run.text.mask_id, z, seed=seed + i, **mending)
        found, found_cosine = nearest(run, tokens, raw, K)
        is_better = found_cosine > cosine
        best = torch.where(is_better[:, None], found, best)
        cosine = torch.where(is_better, found_cosine, cosine)
    return best, cosine


@torch.inference_mode()
def mask_least_certain(run, tokens, z, share, seed, batch):
    """ tokens (n, L) with a share of each text masked: where log p(x^i | z, half of the other
    tokens) is lowest. The halves are drawn row by row, so equal rows come out differently. """
    rng = torch.Generator().manual_seed(seed)
    in_first_half = torch.rand(tokens.shape, generator=rng) < 0.5
    ends = ends_of(run, tokens)
    certainty = torch.zeros(tokens.shape).masked_fill(ends, torch.inf)
    # one call for each half, given the other
    batch = rows_that_fit(run, batch)
    for first in range(0, len(tokens), batch):
        part = slice(first, first + batch)
        for half in (in_first_half[part], ~in_first_half[part]):
            mask = half & ~ends[part]
            positions = positions_of(mask)                               # (P,)
            noisy = torch.where(mask, run.text.mask_id, tokens[part]).to(run.device)
            t = run.text.time_of_share(mask.double().mean(1))
            logits, _ = call(run, noisy, z[part].to(run.device), t, 0.0, positions)
            x = tokens[part].flatten()[positions].to(run.device)
            scatter_at(certainty[part], positions, in_chunks(log_p_of, logits, x).cpu())

    # the least certain of each text
    n_tokens = ((tokens != run.tokenizer.pad) & ~ends).sum(1, keepdim=True)
    is_least = rank_in_row(certainty) < (share * n_tokens).ceil()
    return torch.where(is_least, run.text.mask_id, tokens)

# -----------------------------------------------------------------------------
# The command line

def direction_of(run):
    """ What is asked for by mode: a direction of NEEDS. By default that which the run was trained
    for. A config of training may say mixed, or unconditional of a run with one stream. """
    learned = trained_for(run)
    if len(run.streams) == 1:
        default = run.streams[0]
    else:
        default = 'l2t' if learned & {'l2t', 'causal'} else min(learned)
    if mode == 'mixed' and len(learned) == 1:
        raise ValueError(f'mode=mixed, but {out_dir} was trained for {default}: name the mixed run '
                         'with --out_dir=')
    of_training = mode in ('', 'mixed', 'causal') or '+' in mode or '*' in mode
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
        from corpora.png import images_of
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


def draw(run, direction, sources, n_each, sampling):
    """ n_each samples of each source: tokens (n, L), standardised latents (n, N, D), and a note on
    each sample; None for what the direction does not give. """
    def repeat(x):
        return x.repeat_interleave(n_each, 0)

    # latents, and for t2l2t a text from them
    total = len(sources.names) * n_each
    if direction in ('t2l', 't2l2t', 'latent'):
        names = (*LATENT_KNOBS, 'seed', 'batch')
        read = None
        if sources.lines:
            read = repeat(pack(run, sources.lines, places=sources.places))
        z = t2l(run, read, n=total, **{name: sampling[name] for name in names})
        if direction != 't2l2t':
            return None, z, None
        again = run.stats.standardise(raw_latents(run, z))
        return l2t(run, again, like=None if length else read, **sampling), z, None

    # texts
    if direction == 'l2t' and (rerank > 1 or refine):
        tokens, cosine = search(run, repeat(sources.raw), rerank, refine, **sampling)
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


def write_animation(run, direction, sources, sampling):
    """ An animated picture of the first text being written: from left to right and by unmasking,
    where both write it from its latents and no sampler is named; else as it is asked for. """
    from runs.animation import animation
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


def save_array(path, x):
    with open(path, 'wb') as f:                # numpy.save would add .npy to another name
        np.save(f, x.numpy())


def respond(run, direction, config):
    """ Draws what is asked for, and writes the files that are. Returns what is to be shown: names
    of the sources, and for each of their n_each samples the text written, and a note. """
    sampling = {name: config[name] for name in TEXT_KNOBS + LATENT_KNOBS}
    sampling |= dict(seed=seed, batch=sample_batch)
    sources = read_sources(run, direction, config)

    # defaults that depend on the direction
    n_each = 1 if sources.lines is None else num_samples
    total = len(sources.names) * n_each
    is_likeliest = temperature < 0 and sampler in ('', 'autoregressive', 'confidence')
    if n_each > 1 and is_likeliest and not (direction == 'l2t' and rerank > 1):
        sampling['temperature'] = 0.7
    if direction == 'unconditional' and guidance != 1 and not on_command_line('guidance'):
        print(f'guidance={guidance:g} is for the other directions: samples from noise have no '
              'condition to guide them')
        sampling['guidance'] = 1.0

    # rows that are drawn for the samples
    n_rows = total
    if direction == 'l2t':
        n_rows = total * rerank
    if direction == 'infill':
        n_rows = n_each * sum(len(with_each_length(line)) for line in sources.lines)
        if svg and len(with_each_length(sources.lines[0])) > 1:
            raise ValueError(f'svg={svg!r} shows one text being written: give its gap one length')

    # draw
    is_one_batch = n_rows <= sample_batch
    with tqdm(total=n_rows, unit='sample', disable=True if is_one_batch else None) as bar:
        if direction == 'embed':
            read = pack(run, sources.lines, places=sources.places)
            hidden = embed(run, read, seed=seed, batch=sample_batch, progress=bar.update)
            save_array(save, hidden)
            print(f'{total} vectors of {hidden.shape[1]} numbers written to {save}')
            return None
        sampling['progress'] = bar.update
        if watch:
            watched = watcher(run, n_rows)
            sampling |= dict(on_step=watched.on_step, observe=watched.observe)
        tokens, z, notes = draw(run, direction, sources, n_each, sampling)

    # write what is to be kept
    if svg:
        write_animation(run, direction, sources, sampling)
        print(f'a picture of the first text being written: {svg}')
    if z is not None and save:
        save_array(save, raw_latents(run, z))
    if z is not None and png:
        from corpora.png import pixels, write_png
        columns = n_each if n_each > 1 and len(sources.names) > 1 else 0
        write_png(png, pixels(run, raw_latents(run, z)), columns)

    # what is to be shown
    written = [''] * total
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
        from corpora.fasta import write_fasta
        write_fasta(fasta, written)
        print(f'{total} sequences written to {fasta}')
    return SimpleNamespace(names=sources.names, n_each=n_each, written=written,
                           notes=notes or [''] * total, has_text=tokens is not None,
                           has_latents=z is not None)


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
             'another --seed, --temperature or --sampler may write more')
    if found.has_latents and save:
        print(f'\n{total} latents written to {save}')
    if found.has_latents and png:
        print(f'\n{total} pictures written to {png}')


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
