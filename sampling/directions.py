"""
What one two-clock network writes, by direction.

    l2t(run, z)                  texts from latents
    infill(run, templates, z)    the rest of texts, also of a length that is not known
    edit(run, tokens, z_now, z)  texts, changed where another latent wants other tokens
    t2l(run, tokens)             latents from texts; of no text, latents alone
    unconditional(run, n)        both from noise: the two clocks run down together
    embed(run, tokens)           the mean hidden state of each text: nothing is drawn

Text alone is `write` of sampling/writing.py; t2l2t is t2l, and l2t of what it gives.
`run` is what sampling.loading.load_run returns. The other keywords are the knobs of sample.py
(sampling/knobs.py). A direction that the run has not learned is a ValueError of check_direction.
Letters: n texts, B rows of a batch, L text tokens, N latent vectors, D latent dims, C width.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sampling.inputs import read_template
from data import is_end
from diffusion import rank_in_row
from sampling.loading import Needs
from samplers import make_propose, no_callback
from sampling.denoise import allowed, batches, call, guided_latents, null_latents
from sampling.knobs import SamplingKnobs
from sampling.likelihood import log_p_given_half, nats_per_token
from sampling.solvers import SOLVERS, latent_times, solve, x0_and_e
from sampling.writing import (blank, choose_sampler, default_sampler, ends_of, generators,
                              write)

# -----------------------------------------------------------------------------
# What each direction needs

FILLS = ('l2t', 'unconditional')   # modes that teach to fill masks
WRITES = (*FILLS, 'causal')        # modes that teach to write a text
MAKES = ('t2l', 'unconditional')   # modes that teach to make a latent


@dataclass
class Direction(Needs):
    """ What a run must have for it, and which knobs of sample.py it reads beside those that all
    directions read. """
    reads: tuple = ()


TEXT = ('text', 'texts')           # from a person
LATENT = ('latents', 'image')
TEXT_TO = ('svg', 'fasta')         # into a file
LATENT_TO = ('save', 'png')

NEEDS = {
    'text': Direction(('text',), (WRITES,), reads=TEXT_TO),
    'latent': Direction(('latent',), (MAKES,), reads=LATENT_TO),
    'l2t': Direction(('text', 'latent'), (WRITES,),
                     reads=(*TEXT, *LATENT, *TEXT_TO, 'interpolate', 'rerank', 'ask')),
    't2l': Direction(('text', 'latent'), (MAKES,), reads=(*TEXT, *LATENT_TO, 'ask')),
    't2l2t': Direction(('text', 'latent'), (WRITES, MAKES),
                       reads=(*TEXT, *TEXT_TO, *LATENT_TO, 'ask')),
    'unconditional': Direction(('text', 'latent'), (('unconditional',),), masked_text=True,
                               reads=(*TEXT_TO, *LATENT_TO)),
    'infill': Direction(('text',), (WRITES,), reads=(*TEXT, *LATENT, *TEXT_TO, 'like', 'ask')),
    'edit': Direction(('text', 'latent'), (FILLS,), masked_text=True,
                      reads=(*TEXT, *TEXT_TO, 'latents', 'like', 'towards', 'away', 'strength',
                             'ask')),
    'embed': Direction(('text',), (FILLS,), masked_text=True, reads=(*TEXT, 'save')),
}


def check_direction(run, direction):
    """ ValueError where the run cannot do it. """
    missing = NEEDS[direction].missing(run)
    if missing:
        hint = ''
        if direction == 'unconditional':
            hint = '; --mode=text or --mode=latent samples one alone'
        elif direction in ('t2l', 't2l2t', 'infill') and len(run.streams) == 2:
            hint = '; --mode=unconditional+l2t+t2l+causal trains every direction'
        raise ValueError(f'{run.out_dir} {missing}: no {direction} from it{hint}')

# -----------------------------------------------------------------------------
# Text

def l2t(run, z, seed=0, lengths_of=None, **sampling):
    """ Tokens (n, L) written from standardised latents z (n, N, D). lengths_of (n, L): texts of the
    lengths that are wanted (see blank). """
    tokens, known_mask = blank(run, len(z), sampling.get('length', 0), seed, lengths_of)
    return write(run, tokens, known_mask, z, seed, **sampling)


def infill(run, templates, z=None, seed=0, batch=128, **sampling):
    """
    The n templates, filled from standardised latents z (n, N, D) or from text alone. Where a gap
    has a range of lengths, [MASK:2-6], each length is written, and the text of the fewest
    nats_per_token stays. Returns tokens (n, L) and the nats of each text (n,): None where no gap
    has a range.
    """
    # a row for each length of each template
    read = [read_template(run, template, sampling.get('length', 0)) for template in templates]
    tokens, known_mask, inner = (torch.cat(parts) for parts in zip(*read))
    n_rows = torch.tensor([len(rows) for rows, *_ in read])
    if z is not None:
        z = z.repeat_interleave(n_rows, 0)
    sampler = sampling.get('sampler') or default_sampler(run, z is not None, some_known=True)
    if sampler == 'autoregressive' and run.next_token:
        run.next_token.check_known(tokens, known_mask)

    tokens = write(run, tokens, known_mask, z, seed, batch, inner, **sampling)
    if len(tokens) == len(templates):
        return tokens, None

    # the best length of each
    nats = nats_per_token(run, tokens, z, seed, batch)
    first = n_rows.cumsum(0) - n_rows                                    # (n,)
    best = first + torch.stack([some.argmin() for some in nats.split(n_rows.tolist())])
    return tokens[best], nats[best]


def changed_by(run, tokens, z_now, z, strength, seed=0, batch=128):
    """
    Which positions of texts tokens (n, L) are to change where their standardised latents z_now
    (n, N, D) become z: (n, L) bool, those of the text (not EOS and PAD) whose tokens lose most,
    as many as a share of it, at least one.
        loss_i = log p(x^i | z_now, half of the others) - log p(x^i | z, the same half)
    """
    gain = (log_p_given_half(run, tokens, z, seed, batch)
            - log_p_given_half(run, tokens, z_now, seed, batch))         # (n, L): -loss
    is_text = ~is_end(tokens, run.tokenizer)
    n_changed = (strength * is_text.sum(1, keepdim=True)).ceil()         # (n, 1)
    return rank_in_row(gain.masked_fill(~is_text, torch.inf)) < n_changed


def edit(run, tokens, z_now, z, strength=0.02, seed=0, batch=128, **sampling):
    """ Tokens (n, L) of the texts tokens (n, L), with the positions of changed_by written anew from
    z and from all others. A text keeps its number of tokens. """
    if sampling.get('length'):
        raise ValueError(f"length={sampling['length']}: an edit keeps the length of its text")
    masked = changed_by(run, tokens, z_now, z, strength, seed, batch)
    tokens = torch.where(masked, run.text.mask_id, tokens)
    return write(run, tokens, ~masked, z, seed, batch, inner=masked, **sampling)

# -----------------------------------------------------------------------------
# Latents

@torch.inference_mode()
def t2l(run, tokens, n=None, seed=0, batch=128, **sampling):
    """ Standardised latents (n, N, D) of texts tokens (n, L); tokens None: n latents of no
    text. """
    knobs = SamplingKnobs(**sampling)
    if 'latent' not in run.streams:
        raise ValueError(f'{run.out_dir} has no latent stream: no latents from it')
    g = 0 if tokens is None else knobs.guidance
    n = n if tokens is None else len(tokens)
    is_embedding = (tokens is not None and run.model.config.n_latents == 1
                    and run.latent.target != 'eps')        # which says little of z at clock 1
    steps = knobs.latent_steps or (1 if is_embedding else 32)

    rng = torch.Generator(run.device).manual_seed(seed)
    out = []
    for part in batches(run, n, batch):
        # the texts, and the same with every token MASK
        if tokens is None:
            x, _ = blank(run, part.stop - part.start, seed=seed + part.start)
        else:
            x = tokens[part]
        x = x.to(run.device)
        null = torch.where(ends_of(run, x), x, run.text.mask_id)

        def denoise(z, t):
            def beside(tokens, t_text):
                prediction = call(run, tokens, z, t_text, t, predict=('latent',))[1]
                return x0_and_e(run.latent, prediction, z, t)
            return guided_latents(g, lambda: beside(x, 0.0), lambda: beside(null, 1.0))

        noise = null_latents(run, len(x), rng)
        z = solve(run.latent, knobs.solver, noise, steps, denoise, rng)
        out.append(z.cpu())
    return torch.cat(out)

# -----------------------------------------------------------------------------
# Both, and neither

class JointDenoise:
    """
    denoise(tokens, t, positions) of samplers.py, in which each network call is also a
    step of the latents.
    z (n, N, D): the latents, noise at first; i: how many of their `steps` they have taken.
    """

    def __init__(self, run, n, steps, solver, rng):
        self.run = run
        self.step = SOLVERS[solver]
        self.times = latent_times(run.latent, steps)
        self.steps = steps
        self.rng = rng
        self.z = null_latents(run, n, rng)
        self.i = 0
        self.memory = {}

    def __call__(self, tokens, t_text, positions):
        if self.i == self.steps:
            raise ValueError(f'the sampler makes more than steps={self.steps} network calls; '
                             'joint sampling makes one a step for both')
        run = self.run
        t, t_next = self.times[self.i], self.times[self.i + 1]
        logits, prediction = call(run, tokens, self.z, t_text, t, positions,
                                  predict=('text', 'latent'))

        # the step of the latents
        def predicted(z, t):
            return x0_and_e(run.latent, prediction, z, t)

        noise = null_latents(run, len(tokens), self.rng)
        z = self.step(run.latent, self.z, t, t_next, predicted, self.memory, noise)
        self.z = z.float()
        self.i += 1
        return allowed(run, logits)


def check_joint(knobs):
    """ ValueError for what does not make one call a step, and for what needs a condition. """
    name, solver, block_size = knobs.sampler, knobs.solver, knobs.block_size
    makes_other_calls = name in ('autoregressive', 'first_hitting', 'cached', 'reparam')
    if makes_other_calls or solver == 'heun' or block_size:
        raise ValueError(f'sampler={name}, block_size={block_size}, solver={solver}: '
                         'joint sampling makes one call a step for both; choose from ancestral, '
                         'confidence, remdm, dfm, no blocks, and from ddim, dpmpp_2m, ancestral')
    if knobs.guidance != 1:
        raise ValueError('guidance needs a fixed condition: joint sampling has none')


@torch.inference_mode()
def unconditional(run, n, seed=0, batch=128, on_step=no_callback, **sampling):
    """ Text and latent from noise: both clocks run down together, one call a step for both. Returns
    tokens (n, L) and standardised latents (n, N, D). on_step: as in `write`. """
    knobs = SamplingKnobs(**sampling)
    knobs.sampler = knobs.sampler or 'ancestral'
    check_direction(run, 'unconditional')
    _, sampler = choose_sampler(run, knobs, has_latents=True)
    check_joint(knobs)

    # batch by batch
    rng, device_rng = generators(run, seed)
    propose = make_propose(knobs.temperature, knobs.nucleus, device_rng)
    all_tokens, all_known = blank(run, n, knobs.length, seed)
    out = []
    for part in batches(run, n, batch, is_watched=on_step is not no_callback):
        tokens, known_mask = all_tokens[part].to(run.device), all_known[part]
        steps = knobs.steps
        if knobs.sampler == 'confidence':                                # it makes no more calls
            steps = min(steps, int((~known_mask).sum(1).max()))

        # the text sampler asks for logits, and the latents go along
        joint = JointDenoise(run, len(tokens), steps, knobs.solver, device_rng)
        on_step(tokens)
        tokens = sampler(joint, propose, run.text, tokens, known_mask, steps, rng, on_step)
        if joint.i < steps:
            raise ValueError(f'sampler={knobs.sampler} made {joint.i} of {steps} network calls; '
                             f'joint sampling makes one a step for both: --steps={joint.i}')
        out.append((tokens.cpu(), joint.z.cpu()))
    return tuple(torch.cat(parts) for parts in zip(*out))


@torch.inference_mode()
def embed(run, tokens, z=None, seed=0, batch=128):
    """ Mean over each text's own tokens (not EOS and PAD) of what the text head reads, (n, C)
    float32. The network gets clean text, and its standardised latents z (n, N, D) or noise at clock
    1. """
    rng = torch.Generator(run.device).manual_seed(seed)
    out = []
    for part in batches(run, len(tokens), batch):
        x = tokens[part].to(run.device)
        t = torch.zeros(len(x), device=run.device)
        latents = None
        if 'latent' in run.streams and z is None:
            latents = null_latents(run, len(x), rng)
        elif 'latent' in run.streams:
            latents = z[part].to(run.device)

        # clocks: text 0, latents 0 or 1
        hidden, _ = run.model(x, latents, t, t + (z is None), predict=('text',),
                              return_hidden=True)
        hidden = hidden.float().view(*x.shape, -1)                       # (B, L, C)
        is_text = (~is_end(x, run.tokenizer)).float()                    # (B, L)
        if run.model.config.shift:                                       # a token is read one later
            is_text = F.pad(is_text[:, :-1], (1, 0))

        # the mean over the text alone
        total = torch.einsum('blc,bl->bc', hidden, is_text)
        out.append((total / is_text.sum(1, keepdim=True).clamp(min=1)).cpu())
    return torch.cat(out)
