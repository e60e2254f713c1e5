""" How many floating-point operations a step takes, counted from the sizes alone. """


def flops(model, batch, length, head_positions, predict=('text', 'latent'), training=True):
    """ Operations of one step: 2 per multiply-add, forward once, backward twice. Matrix products
    only. """
    c = model.config
    K = c.n_latents * c.latent_tokens if 'latent' in c.streams else 0
    L = length if 'text' in c.streams else 0
    multiply_adds = 0

    # the blocks: projections and MLP of each stream, then the attention's two products
    for stream, rows, width in (('text', L, c.width), ('latent', K, c.latent_width)):
        if stream in c.streams:
            qkv = 3 * width * c.width
            rest = width * c.width + 2 * int(c.mlp_ratio * width) * width
            unread = 0 if stream in predict else rest                    # in the last block
            multiply_adds += batch * rows * (c.depth * (qkv + rest) - unread)
            multiply_adds += batch * 8 * width * c.width                 # modulation
    multiply_adds += c.depth * 2 * batch * (K + L) ** 2 * c.width

    # the ends of the text
    if 'text' in predict and L:
        multiply_adds += head_positions * c.width * c.vocab_size
        net = getattr(getattr(model, 'importance', None), 'net', None)
        if net is not None:
            multiply_adds += flops(net, batch, length, 0, training=False) // 2

    # the ends of the latents, with the gates of bag and shortcut
    if K:
        ends = batch * c.n_latents * c.latent_dim * c.latent_tokens * c.latent_width
        multiply_adds += ends * (2 if 'latent' in predict else 1)
        multiply_adds += batch * c.latent_dim * c.width * c.bag
        if c.shortcut:
            multiply_adds += batch * c.width * (2 + 2 * c.n_latents * c.latent_dim)
    return 2 * multiply_adds * (3 if training else 1)
