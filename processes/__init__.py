"""
Other text processes on the same network: GIDD+ and HDLM. Causal rows (autoregressive.py). And ATAT
(adaptive.py), which decides which tokens are masked first.

    python train.py config/quickstart.py config/ar.py --out_dir=out/ar    # or gidd, hdlm, atat

What loss.py, sample.py and evaluate.py ask of a text process. Time t runs from 0 (clean) to 1
(noise):
    corrupt(tokens, t, u, known_mask)    what the network reads, and where it is scored, (B, L) each
    training_weight(t)                   the weight of a row's loss in training
    loss(hidden, head, targets, weight, seen, coefficients)
                                         the loss, and of the scored places nats and whether right
    loss_coefficients(t)                 (B, n), if the loss depends on the clock beside its weight
    head_budget(rows, length, text_share, t_min)
                                         how many places are scored, at most
    bound(model, tokens, latents, t_latent, u, known_mask)
                                         a draw of an upper bound on -log p, nats per sample
    samplers                             {name: function}, as in samplers.py
    mask_id                              MASK

To add a process, write a module here and add one line to MODULES. The module has a function
    make(config, vocab_size, cluster_of)                the process; ValueError for wrong knobs
and, only where the process needs them, functions by these names:
    extra_ids(config), add_modules(model), tables_of(config, data), check_tables(model),
    after_loading(model, text), describe(model, data)          what they do is said below
The choices of the knob text_process are in train.py.
"""
from importlib import import_module

from diffusion import MaskedText

# the name of a process: its module. Masked text is diffusion.MaskedText
MODULES = {
    'masked': None,
    'gidd': 'processes.gidd',
    'hdlm': 'processes.hdlm',
}


# ---- the text process of a run

def module_of(config):
    """ The module of a run's process, or None for masked text. """
    path = MODULES[config['text_process']]
    return None if path is None else import_module(path)


def text_process(config, vocab_size, cluster_of=None):
    """
    The process that a run's knobs name. ValueError for knobs that do not go together.
    cluster_of (V,): HDLM's clusters; None: train.py fills them in later.
    """
    name = config['text_process']
    if name != 'masked' and config['text_schedule'] != 'loglinear':
        schedule = config['text_schedule']
        raise ValueError(f'text_schedule={schedule} is of masked text, not of {name}')

    module = module_of(config)
    if module is not None:
        return module.make(config, vocab_size, cluster_of)
    return MaskedText(vocab_size, config['text_schedule'], config['text_loss_weight'])


# ---- what a process keeps beside the network

def extra_ids(config):
    """ How many ids beyond MASK the network reads and never predicts. """
    module = module_of(config)
    return module.extra_ids(config) if hasattr(module, 'extra_ids') else 0


def add_modules(model, config):
    """ Adds to a model what its run saves with the weights: ATAT's importance network
    (model.importance) and the tables of the process. Returns the model. """
    kind = config['importance']
    model.importance = None
    if kind != 'none':
        from processes.adaptive import Importance
        model.importance = Importance(kind, model.config.vocab_size, model.config.seq_len)

    module = module_of(config)
    if hasattr(module, 'add_modules'):
        module.add_modules(model)
    return model


def tables_of(config, data):
    """ {name: tensor}: the tables of add_modules for a new run, made from its training split. """
    module = module_of(config)
    return module.tables_of(config, data) if hasattr(module, 'tables_of') else {}


def check_tables(model, config):
    """ ValueError where a table that lies with the weights cannot be one of this process. """
    module = module_of(config)
    if hasattr(module, 'check_tables'):
        module.check_tables(model)


def after_loading(model, text, config):
    """ The process takes the tables that lie with the weights. A resumed run so keeps its own. """
    module = module_of(config)
    if hasattr(module, 'after_loading'):
        module.after_loading(model, text)


def describe(model, config, data):
    """ Lines that a new run prints about its process. """
    module = module_of(config)
    return module.describe(model, data) if hasattr(module, 'describe') else []


# ---- which tokens are masked first

def adaptive_masking(config, data):
    """ ATAT's masking by importance (adaptive.py), or None where the knobs do not ask for it. """
    kind = config['importance']
    if kind == 'none':
        if config['masking'] != 'time_only' or config['curriculum']:
            raise ValueError(f"masking={config['masking']}, curriculum={config['curriculum']}: "
                             'choose an --importance= for them')
        return None
    if config['text_process'] != 'masked' or 'text' not in config['streams']:
        raise ValueError(f'importance={kind} is of masked text: not with '
                         f"text_process={config['text_process']}, streams={config['streams']}")

    from processes.adaptive import Adaptive, rarity
    pad = data.tokenizer.pad
    return Adaptive(config['masking'], config['beta'], config['curriculum'],
                    config['curriculum_stages'], config['curriculum_focus'], config['max_iters'],
                    pad, rarity(data.counts(), pad), learns=kind != 'freq')
