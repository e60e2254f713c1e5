"""
Other text processes on the same network: GIDD+, HDLM, and ATAT (adaptive.py), which decides which
tokens are masked first.

    python train.py config/quickstart.py config/ar.py --out_dir=out/ar    # or gidd, hdlm, atat

What training, sampling and evaluation ask of a text process. diffusion.MaskedText has all of it,
and a new process may inherit what it does not change. Time t runs from 0 (clean) to 1 (noise):
    corrupt(tokens, t, u, known_mask)    what the network reads, and where it is scored, (B, L) each
    training_weight(t)                   the weight of a row's loss in training
    noisy_text(tokens, t, text_on, u, step, known_mask)
                                         a diffusion.NoisyText, which the two above make
    loss_coefficients(t)                 (B, n), if the loss needs more of the clock than its weight
    loss(hidden, head, targets, weight, seen, coefficients)
                                         the loss, and of the scored positions nats and whether
                                         right
    bound(model, tokens, latents, t_latent, u, known_mask)
                                         a draw of an upper bound on -log p, nats per sample
    logged(step)                         {name: value} for the log
    samplers                             {name: samplers.Sampler}, or None: those of samplers.py
    corrects                             whether it may take back what it wrote
    masks_on_device                      whether Loss masks, and not the host: then it also has what
                                         adaptive.AdaptiveText has below noisy_text
    mask_id                              MASK

To add a process, write a module here and a line in MAKERS, add its knobs to those of train.py, and
its name to the choices of the knob text_process. The module has a function
    make(config, vocab_size, data=None)  the process; ValueError for wrong knobs. data: the training
                                         split, where it trains
"""
from diffusion import MaskedText
from processes import adaptive, gidd, hdlm

# {the name of a process: what makes it}. Masked text is diffusion.MaskedText
MAKERS = {
    'gidd': gidd.make,
    'hdlm': hdlm.make,
    'atat': adaptive.make,
}


def text_process(config, vocab_size, data=None):
    """ The process that a run's knobs name. ValueError for knobs that do not go together. """
    name, schedule = config['text_process'], config['text_schedule']
    if name == 'masked':
        return MaskedText(vocab_size, schedule, config['text_loss_weight'])
    if schedule != 'loglinear' and name != 'atat':
        raise ValueError(f'text_schedule={schedule} is of masked text, not of {name}')
    return MAKERS[name](config, vocab_size, data)
