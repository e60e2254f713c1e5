""" Which parameters are frozen: those that no loss reaches, and those that fine-tuning keeps. """

# How the names of a stream's parameters begin, at its input and at its head. The bag belongs to
# the head of the latents. The shortcut leads from the latents to the head of the text.
INPUT = {'text': ('embed.',), 'latent': ('latent_in.', 'latent_pos_emb', 'shortcut_in.')}
HEAD = {'text': ('text_head.', 'shortcut_out.'), 'latent': ('latent_head.', 'bag_')}


def names_that_begin(model, prefixes):
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(prefixes))]


def unreachable(model, predict):
    """ Names of the parameters that no loss on the streams `predict` reaches: the other stream's
    head, and in the last block its out-projection, its MLP and the gain of its queries. """
    last = f'blocks.{model.config.depth - 1}'
    prefixes = []
    for stream in model.config.streams:
        if stream not in predict:
            prefixes += HEAD[stream]
            prefixes += [f'{last}.{stream}.{part}' for part in ('out.', 'up.', 'down.', 'q_gain')]
    if 'text' in model.config.streams and 'text' not in predict:
        prefixes.append('importance.')
    return names_that_begin(model, prefixes)


def input_and_head(model, stream):
    """ Names of the parameters through which a stream comes in and goes out: what freeze='modality'
    keeps still. """
    return names_that_begin(model, INPUT[stream] + HEAD[stream])
