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
        return HDLM(vocab_size, cluster_of, config['hdlm_gamma'], config['hdlm_xi'])
    if kind != 'masked':
        raise ValueError(f'text_process={kind!r}: choose from masked, gidd, hdlm')
    return MaskedText(vocab_size, config['text_schedule'], config['text_power'], weight)


def extra_ids(config):
    """ Ids beyond MASK that the network reads and never predicts: HDLM's clusters. """
    return config['clusters'] if config.get('text_process', 'masked') == 'hdlm' else 0


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
