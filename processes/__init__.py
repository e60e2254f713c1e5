"""
Other text processes on the same network: GIDD+, HDLM, and ATAT (adaptive.py), which decides which
tokens are masked first.

    python train.py config/quickstart.py config/ar.py --out_dir=out/ar    # or gidd, hdlm, atat

What loss.py, sample.py and evaluate.py ask of a text process. Time t runs from 0 (clean) to 1
(noise):
    corrupt(tokens, t, u, known_mask)    what the network reads, and where it is scored, (B, L) each
    training_weight(t)                   the weight of a row's loss in training
    loss(hidden, head, targets, weight, seen, coefficients)
                                         the loss, and of the scored positions nats and whether
                                         right
    loss_coefficients(t)                 (B, n), if the loss depends on the clock beside its weight
    bound(model, tokens, latents, t_latent, u, known_mask)
                                         a draw of an upper bound on -log p, nats per sample
    batches_and_loss(config, data)       (BatchMaker, Loss), if it has subclasses of loss.py's
    samplers                             {name: function}, if it has its own; else samplers.py's
    mask_id                              MASK

To add a process, write a module here and add one line to MODULES,
and its knobs to ROOMS of train.py. The module has a function
    make(config, vocab_size)             the process; ValueError for wrong knobs
The choices of the knob text_process are in train.py.
"""
from importlib import import_module

from diffusion import MaskedText

# the name of a process: its module. Masked text is diffusion.MaskedText
MODULES = {
    'gidd': 'processes.gidd',
    'hdlm': 'processes.hdlm',
    'atat': 'processes.adaptive',
}


def text_process(config, vocab_size):
    """ The process that a run's knobs name. ValueError for knobs that do not go together. """
    name, schedule = config['text_process'], config['text_schedule']
    if name == 'masked':
        return MaskedText(vocab_size, schedule, config['text_loss_weight'])
    if schedule != 'loglinear' and name != 'atat':
        raise ValueError(f'text_schedule={schedule} is of masked text, not of {name}')
    return import_module(MODULES[name]).make(config, vocab_size)
