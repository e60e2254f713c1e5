"""
The knobs of sampling: of sample.py and evaluate.py, and keywords of the methods of Run (run.py).

    run.write(texts, sampler='ancestral', steps=64)

What a knob leaves open ('' or None) is chosen where it is read: texts.settle, and
latents.settle_latents.
"""
from dataclasses import dataclass

import numpy as np

from configurator import read_knobs


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
    threshold: float = 1.0          # [0, 1]; confidence: below 1 a call also unmasks all tokens
                                    # whose probability is at least this; then it takes fewer calls
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
    guidance: float | None = None   # None | [0, 100]; g: 1 is the conditional model, 0 the
                                    # unconditional, more weighs the condition up; None: 1, but 2
                                    # where a picture is drawn from a text
    latent_clock: float = 0.0       # [0, 1); s: where the latent that is given has errors. It is
                                    # taken as z + (sigma_s / alpha_s) e, in standard deviations of
                                    # the data's latents, and the network reads it at clock s
    rerank: int = 1                 # [1, 4096]; l2t: draw so many texts, embed them, and keep the
                                    # one whose embedding is nearest to the given latent
    beams: int = 0                  # [0, 64]; l2t, from left to right: the text that is likeliest per
                                    # token, of those that so many beams find, in place of greedy or
                                    # random tokens. With rerank all that they find are drafts. 0: 4
                                    # for drafts, unless they are watched, or several, or a knob
                                    # asks for random texts; else 1
    strength: float = 0.02          # (0, 1]; edit: the share of the tokens that may change, at
                                    # least one
    # ---- latents
    solver: str = ''                # '' | ddim | dpmpp_2m | heun | ancestral; '': ancestral where
                                    # a latent is drawn from nothing, else dpmpp_2m
    latent_steps: int | None = None     # None | int [1, 1e5]; None: 1 where one vector is made from
                                    # a text: the mean of what fits it; 8 where a picture is;
                                    # else 32
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
    'solver', 'latent_steps', 'latent_clock', 'rerank', 'beams', 'strength', 'sample_batch',
    'seed'))
