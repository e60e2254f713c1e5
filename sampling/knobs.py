"""
The knobs of sampling: of sample.py and evaluate.py, and keywords of the methods of Run (run.py).

    run.write(texts, sampler='ancestral', steps=64)

`settle` and `settle_latents` choose what a knob leaves open ('' or None).
"""
from dataclasses import dataclass, replace

import numpy as np

from configurator import read_knobs
from diffusion import check_choice
from samplers import SAMPLERS


@dataclass(frozen=True)
class SamplingKnobs:
    """ A value of another type raises ValueError, and so does one against the rule next to it. """
    # ---- text
    sampler: str = ''               # '' | autoregressive | ancestral | cached | first_hitting |
                                    # confidence | remdm | dfm; '': by the direction
    steps: int | None = None        # None | int [1, 1e6]: network calls; None: one per token for
                                    # confidence and first_hitting, else 128
    length: int = 0                 # [0, 65536]: tokens of each text, where the run does not learn
                                    # lengths (proteins); 0: drawn from the training texts'
    block_size: int = 0             # [0, 65536]: unmask only the leftmost unfinished block of so
                                    # many positions, in its share of the steps; 0: all at once
    prefer: str = 'certain'         # certain | uncertain; confidence: what is unmasked first
    end_penalty: float = 3.0        # [0, inf); confidence: nats off the certainty of EOS and
                                    # PAD, as texts that end when that is certain are too short
    by_importance: bool = False     # confidence: uncertainty counts as much as the token is
                                    # important, where the run has learned that
    eta: float = 0.02               # [0, 1]; remdm: how much is masked again
    alpha: float = 1.5              # [1, 2]; dfm: 1 is ancestral, up to 2: how much is masked again
    self_correct: int = 0           # [0, 1e6]; gidd: rounds in which a finished text is mended, a
                                    # token each
    temperature: float | None = None    # None | [0, 100]: 0 takes the likeliest token, as all below
                                    # 1e-9 do; None: chosen by the direction (docs/sampling.md)
    nucleus: float = 1.0            # (0, 1]: keep the likeliest tokens that hold this much
                                    # probability, and the one on the boundary
    guidance: float = 1.0           # [0, 100]; g: 1 is the conditional model, 0 the unconditional,
                                    # more weighs the condition up
    latent_clock: float = 0.0       # [0, 1); s: where the latent that is given has errors. It is
                                    # taken as z + (sigma_s / alpha_s) e, in standard deviations of
                                    # the data's latents, and the network reads it at clock s
    rerank: int = 1                 # [1, 4096]; l2t: draw so many texts, embed them, keep the one
                                    # nearest to the latent
    strength: float = 0.02          # (0, 1]; edit: the share of the tokens that may change, at
                                    # least one
    # ---- latents
    solver: str = ''                # '' | ddim | dpmpp_2m | heun | ancestral; '': ancestral where
                                    # a latent is drawn from nothing, else dpmpp_2m
    latent_steps: int | None = None     # None | int [1, 1e5]; None: 1 where one vector is made from
                                    # a text: the mean of what fits it; else 32
    # ---- how
    sample_batch: int = 128         # [1, 65536]: rows per network call, at most: where so many rows
                                    # would need more than 6 GB, fewer
    seed: int = 0                   # [0, 1e18]; text i of a seed is the same alone and among others

    def __post_init__(self):
        for name, knob in RULES.items():
            value = getattr(self, name)
            try:
                value = value.item() if isinstance(value, np.generic) else value
                object.__setattr__(self, name, knob.checked(value))
            except ValueError as error:
                raise ValueError(f'{name}: {error}') from None


RULES = read_knobs(__file__)
LATENT_KNOBS = ('solver', 'latent_steps', 'guidance')
# those of all texts, whatever the direction
TEXT_KNOBS = tuple(name for name in RULES if name not in (
    'solver', 'latent_steps', 'latent_clock', 'rerank', 'strength', 'sample_batch', 'seed'))


def sampler_of(net, name):
    """ The Sampler that a knob names. ValueError where the network cannot be sampled so. """
    if name == 'autoregressive':
        if not net.is_causal:
            raise ValueError(f'sampler={name}: this run was trained without causal rows '
                             '(mode=l2t+causal)')
        return SAMPLERS[name]

    # all others fill masks, and a process may have its own
    if not net.fills_masks:
        raise ValueError(f'sampler={name} fills masks: this run was trained for mode=causal alone')
    table = net.text.samplers or SAMPLERS
    check_choice('sampler', name, table)
    return table[name]


def settle(net, knobs, from_latent=False, from_text=False, must_differ=False):
    """
    SamplingKnobs in which nothing is left open: which sampler, how many steps, which temperature.
    from_latent, from_text   what is read: a latent, and a text or a part of it
    must_differ              more than one text of a source is wanted, and they shall differ
    """
    # which sampler? From left to right where the run has learned it and no part of the text is
    # given, or it can do nothing else. Else confidence, which seeks the likeliest text, where
    # there is something to write from, and ancestral, which draws a sample, where there is not.
    # Text processes other than MaskedText have samplers of their own: there it is ancestral
    has_source = from_latent or from_text
    name = knobs.sampler
    if not name and net.is_causal and not (from_text and net.fills_masks):
        name = 'autoregressive'
    elif not name and net.text.samplers is None and has_source:
        name = 'confidence'
    name = name or 'ancestral'
    sampler = sampler_of(net, name)

    # which temperature? Samplers that do not seek the likeliest text draw from the model: 1. The
    # others take 0, the likeliest text, where there is something to write from; but where more than
    # one text of a source is wanted, these shall differ. From left to right a text without a latent
    # is drawn as well, and drafts need a lower temperature than by diffusion, as each token is
    # given all that is before it
    are_drafts = knobs.rerank > 1 and from_latent and not from_text
    if not sampler.seeks:
        temperature = 1.0
    elif are_drafts and sampler.is_causal:
        temperature = 0.4
    elif must_differ:
        temperature = 0.7
    elif sampler.is_causal and not from_latent:
        temperature = 1.0
    else:
        temperature = 0.0
    if knobs.temperature is not None:
        temperature = knobs.temperature
    steps = knobs.steps or sampler.steps or net.L
    return replace(knobs, sampler=name, steps=steps, temperature=temperature)


def settle_latents(net, knobs, from_text):
    """ SamplingKnobs in which solver and latent_steps are not left open. """
    # a vector made from a text is the mean of what fits it. A network that predicts eps says little
    # of that at clock 1
    is_embedding = from_text and net.model.config.n_latents == 1 and net.latent.target != 'eps'
    latent_steps = knobs.latent_steps or (1 if is_embedding else 32)
    solver = knobs.solver or ('dpmpp_2m' if from_text else 'ancestral')
    return replace(knobs, latent_steps=latent_steps, solver=solver)
