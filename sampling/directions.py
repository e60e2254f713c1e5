"""
What one two-clock network writes, by direction. sample.py has a table of the directions.

    l2t(run, z)                  texts from latents
    infill(run, templates, z)    the rest of texts, also of a length that is not known
    t2l(run, tokens)             latents from texts; of no text, latents alone
    unconditional(run, n)        both from noise: the two clocks run down together
    embed(run, tokens)           the mean hidden state of each text: nothing is drawn

Text alone is `write` of sampling/writing.py; t2l2t is t2l, and l2t of what it gives.
`run` is what sampling.loading.load_run returns. The other keywords are the knobs of sample.py
(sampling/knobs.py). A direction that the run has not learned is a ValueError of check_direction.
Letters: n texts, B rows of a batch, L text tokens, N latent vectors, D latent dims, C width.
"""
import torch
import torch.nn.functional as F

from sampling.inputs import read_template, with_each_length
from data import is_end
from corpora.lsa import no_progress
from sampling.loading import Needs
from sampling.unmasking import no_observer
from samplers import make_propose, no_callback
from sampling.denoise import allowed, call, guided_latents, null_latents, rows_that_fit
from sampling.knobs import sampling_knobs
from sampling.likelihood import nats_per_token
from sampling.solvers import SOLVERS, latent_times, solve
from sampling.writing import blank, ends_of, generators, text_sampler, write

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
        elif direction in ('t2l', 't2l2t', 'infill') and len(run.streams) == 2:
            hint = '; config/mixed.py trains every direction'
        raise ValueError(f'{run.out_dir} {missing}: no {direction} from it{hint}')

# -----------------------------------------------------------------------------
# Text

def l2t(run, z, seed=0, lengths_of=None, **sampling):
    """ Tokens (n, L) written from standardised latents z (n, N, D). lengths_of (n, L): texts of the
    lengths that are wanted (see blank). """
    tokens, known_mask = blank(run, len(z), sampling.get('length', 0), seed, lengths_of)
    return write(run, tokens, known_mask, z, seed, **sampling)


def infill(run, templates, z=None, n_each=1, seed=0, batch=128, **sampling):
    """
    n_each texts of each template, from standardised latents z (n, N, D) or from text alone. Where a
    gap has a range of lengths, [MASK:2-6], each length is written, and the text of the fewest
    nats_per_token stays. Returns tokens (n n_each, L) and the nats of each text (n n_each,): None
    where no gap has a range.
    """
    # a row for each length of each of the n texts
    read, text_of_row, n = [], [], 0
    for template in templates:
        rows = [read_template(run, one, sampling.get('length', 0))
                for one in with_each_length(template)]
        for _ in range(n_each):
            read += rows
            text_of_row += [n] * len(rows)
            n += 1
    tokens, known_mask, inner = (torch.stack(part) for part in zip(*read))
    text_of_row = torch.tensor(text_of_row)
    if z is not None:
        z = z[text_of_row // n_each]

    tokens = write(run, tokens, known_mask, z, seed, batch, inner=inner, **sampling)
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

@torch.inference_mode()
def t2l(run, tokens, n=None, seed=0, batch=128, progress=no_progress, **sampling):
    """ Standardised latents (n, N, D) of texts tokens (n, L); tokens None: n latents of no
    text. """
    sampling = sampling_knobs(sampling)
    solver, steps = sampling['solver'], sampling['latent_steps']
    if 'latent' not in run.streams:
        raise ValueError(f'{run.out_dir} has no latent stream: no latents from it')
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

class JointDenoise:
    """
    denoise(tokens, t, positions) of samplers.py, in which each network call is a step of the
    latents, too.
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
            return run.latent.x0_and_e(prediction, z, t)

        noise = null_latents(run, len(tokens), self.rng)
        z = self.step(run.latent, self.z, t, t_next, predicted, self.memory, noise)
        self.z = z.float()
        self.i += 1
        return allowed(run, logits)


def check_joint(sampling):
    """ ValueError for what does not make one call a step, and for what needs a condition. """
    name, solver, block_size = (sampling[knob] for knob in ('sampler', 'solver', 'block_size'))
    makes_other_calls = name in ('autoregressive', 'first_hitting', 'cached', 'reparam')
    if makes_other_calls or solver == 'heun' or block_size:
        raise ValueError(f'sampler={name}, block_size={block_size}, solver={solver}: '
                         'joint sampling makes one call a step for both; choose from ancestral, '
                         'confidence, remdm, dfm, no blocks, and from ddim, dpmpp_2m, ancestral')
    if name == 'remdm' and sampling['remask'] == 'loop' or sampling['guidance'] != 1:
        raise ValueError('remask=loop and guidance need a fixed condition: joint sampling has none')


@torch.inference_mode()
def unconditional(run, n, seed=0, batch=128, on_step=no_callback, observe=no_observer,
                  progress=no_progress, **sampling):
    """ Text and latent from noise: both clocks run down together, one call a step for both. Returns
    tokens (n, L) and standardised latents (n, N, D). """
    sampling = sampling_knobs(sampling)
    sampling['sampler'] = name = sampling['sampler'] or 'ancestral'
    sampler, knobs, temperature = text_sampler(run, sampling)
    check_direction(run, 'unconditional')
    check_joint(sampling)

    # batch by batch
    batch = rows_that_fit(run, batch)
    rng, device_rng = generators(run, seed)
    all_tokens, all_known = blank(run, n, sampling['length'], seed)
    out = []
    for first in range(0, n, batch):
        tokens, known_mask = all_tokens[first:first + batch], all_known[first:first + batch]
        steps = sampling['steps'] or 128
        if name == 'confidence':                                         # it makes no more calls
            steps = min(steps, int((~known_mask).sum(1).max()))

        # the text sampler asks for logits, and the latents go along
        joint = JointDenoise(run, len(tokens), steps, sampling['solver'], device_rng)
        propose = make_propose(temperature, sampling['nucleus'], device_rng)
        tokens = tokens.to(run.device)
        denoise = observe(joint, tokens, first)
        tokens = sampler(denoise, propose, run.text, tokens, known_mask, steps, rng, on_step,
                         **knobs)
        if joint.i < steps:
            raise ValueError(f'sampler={name} made {joint.i} of {steps} network calls; joint '
                             f'sampling makes one a step for both: --steps={joint.i}')
        out.append((tokens.cpu(), joint.z.cpu()))
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
