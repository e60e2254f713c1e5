"""
The knobs of sampling, which are also the keywords of its functions:

    l2t(run, z, sampler='ancestral', steps=64)

They stand in sample.py, with their defaults, ranges and comments, and --help prints them there.
Here they are read from its source, which is not run.
"""
import difflib
import os
from types import SimpleNamespace

import numpy as np

from configurator import HERE, read_knobs

TEXT_KNOBS = ('sampler', 'steps', 'length', 'block_size', 'score', 'prefer', 'end_penalty',
              'by_importance', 'remask', 'eta', 'alpha', 'repeat_cap', 'self_correct',
              'temperature', 'nucleus', 'guidance')
LATENT_KNOBS = ('solver', 'latent_steps', 'guidance')

KNOBS = read_knobs(os.path.join(HERE, 'sample.py'))
DEFAULTS = {name: KNOBS[name].default for name in TEXT_KNOBS + LATENT_KNOBS}


def sampling_knobs(given):
    """ A namespace of all knobs: DEFAULTS, and over them the keywords of a call. A name that is
    none raises TypeError, a value against its rule ValueError. """
    knobs = SimpleNamespace(**DEFAULTS)
    for name, value in given.items():
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name, DEFAULTS, 1)
            hint = f'did you mean {near[0]!r}?' if near else f'expected {", ".join(DEFAULTS)}'
            raise TypeError(f'unknown keyword {name!r}, {hint}')

        # as the knob's type, as on the command line
        value = value.item() if isinstance(value, np.generic) else value
        try:
            setattr(knobs, name, KNOBS[name].settle(value))
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from None
    return knobs
