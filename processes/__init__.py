"""
Other ways to write a text, on the same network: autoregressive, GIDD+, HDLM; and ATAT, which decides
what is masked. They are imported only where a knob asks for them.

    python train.py config/quickstart.py config/ar.py --out_dir=out/ar      # likewise gidd, hdlm, atat

What loss.py, sample.py and evaluate.py ask of a text process, t from 0 (clean) to 1 (noise):
    corrupt(tokens, t, u, known_mask)   what the network reads, (B, L), and where it is scored
    loss(hidden, head, targets, weight, seen, t), loss_weight(t), head_budget(...)     of training
    bound(model, tokens, latents, t_latent, u, known_mask)
                                        a draw of an upper bound on -log p, nats per sample
    samplers                            {name: function}, with the signature of samplers.py

A new process is a class with these methods in a file here, and a line in `text_process`.
"""
import torch

from diffusion import MaskedText


def text_process(config, vocab_size, cluster_of=None, lengths=None):
    """ The process that a run's knobs name. cluster_of (V,): HDLM's table, which may be filled later;
    lengths (n,): of the training texts, for autoregressive training. ValueError for what does not go
    together. """
    # some runs are older than these two knobs
    kind = config.get('text_process', 'masked')
    weight = config.get('text_loss_weight', 'bound')

    if (config['causal'] or kind != 'masked') and config['text_schedule'] != 'loglinear':
        raise ValueError(f"text_schedule={config['text_schedule']} is of masked text, not of {kind}, "
                         f"causal={config['causal']}")
    if config['causal']:
        from processes.autoregressive import NextToken
        if kind != 'masked' or weight != 'bound':
            raise ValueError('causal=True predicts the next token: not with '
                             f'text_process={kind}, text_loss_weight={weight}')
        return NextToken(vocab_size, lengths)
    if kind == 'gidd':
        from processes.gidd import GIDD
        return GIDD(vocab_size, config['gidd_uniform'], config['gidd_gamma'], weight)
    if kind == 'hdlm':
        from processes.hdlm import HDLM
        if weight != 'bound':
            raise ValueError(f'text_loss_weight={weight}: text_process=hdlm has bound alone')
        if cluster_of is None:                             # any, until train.py has found them
            cluster_of = torch.arange(vocab_size) % config['clusters']
        return HDLM(vocab_size, cluster_of, config['hdlm_gamma'], config['hdlm_xi'])
    if kind != 'masked':
        raise ValueError(f'text_process={kind!r}: choose from masked, gidd, hdlm')
    return MaskedText(vocab_size, config['text_schedule'], config['text_power'], weight)


def extra_ids(config):
    """ Ids beyond MASK that the network reads and never predicts: HDLM's clusters. """
    return config['clusters'] if config.get('text_process', 'masked') == 'hdlm' else 0


def adaptive_masking(config, data):
    """ ATAT's masking by importance (processes/adaptive.py) where a run's knobs ask for it, else None. """
    kind = config['importance']
    if kind == 'none':
        if config['masking'] != 'time_only' or config['curriculum']:
            raise ValueError(f"masking={config['masking']}, curriculum={config['curriculum']}: "
                             'choose an --importance= for them')
        return None
    if config['causal'] or config['text_process'] != 'masked' or 'text' not in config['streams']:
        raise ValueError(f"importance={kind} is of masked text: not with causal={config['causal']}, "
                         f"text_process={config['text_process']}, streams={config['streams']}")
    from processes.adaptive import Adaptive, rarity
    pad = data.tokenizer.pad
    return Adaptive(config['masking'], config['beta'], config['curriculum'], config['curriculum_stages'],
                    config['curriculum_focus'], config['max_iters'], pad, rarity(data.counts(), pad),
                    learns=kind != 'freq')


def add_modules(model, config):
    """ What the process of a run's knobs keeps beside the network and saves with it: ATAT's importance
    (model.importance), HDLM's table of clusters (model.cluster_of). Returns the model. """
    kind = config.get('importance', 'none')
    model.importance = None
    if kind != 'none':
        from processes.adaptive import Importance
        model.importance = Importance(kind, model.config.vocab_size, model.config.seq_len)
    if extra_ids(config):
        from processes.hdlm import add_cluster_table
        add_cluster_table(model)
    return model


def tables_of(config, data):
    """ {name: (V,)} of what a new run's process takes from its data, for the modules of add_modules. """
    if config['text_process'] == 'hdlm':
        from processes.hdlm import cluster_table
        return {'cluster_of': cluster_table(config['clusters_from'], data, config['clusters'])}
    return {}


def after_loading(model, text, config):
    """ The process reads the tables that lie with the weights: those of the run that goes on, if one does. """
    if config['text_process'] == 'hdlm':
        text.tables = {torch.device('cpu'): model.cluster_of.cpu()}


def describe(model, config, data):
    """ Lines that a new run prints of its process. """
    if config['text_process'] == 'hdlm':
        from processes.hdlm import clusters_in_words
        return clusters_in_words(model.cluster_of.cpu(), data)
    return []
