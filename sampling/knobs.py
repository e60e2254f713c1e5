"""
The knobs of sampling, which are also the keywords of its functions:

    l2t(run, z, sampler='ancestral', steps=64)

They stand in sample.py, with their defaults, ranges and comments, and --help prints them there.
Here they are read from its source, which is not run.
"""
import difflib
import os

import numpy as np

from configurator import HERE, read_knobs

TEXT_KNOBS = ('sampler', 'steps', 'length', 'block_size', 'score', 'prefer', 'end_penalty',
              'by_importance', 'remask', 'eta', 'loop', 'alpha', 'repeat_cap', 'self_correct',
              'temperature', 'nucleus', 'guidance')
LATENT_KNOBS = ('solver', 'latent_steps', 'guidance')

KNOBS = read_knobs(os.path.join(HERE, 'sample.py'))
DEFAULTS = {name: KNOBS[name].default for name in TEXT_KNOBS + LATENT_KNOBS}

# keywords that are no knobs of a sampler or a solver
OTHER_KEYWORDS = ('seed', 'batch', 'progress', 'on_step', 'observe', 'lengths_of', 'rerank',
                  'refine', 'inner', 'i_round')


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
            sampling[name] = KNOBS[name].settle(value)
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from None
    return sampling
