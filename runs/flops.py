"""
How many floating-point operations a step takes, counted from the sizes alone, and how many a card
can do. Their ratio is the share of the card's peak that a training uses:

    MFU = operations of a step / seconds of a step / peak      model FLOPs utilization

(arXiv:2204.02311). Operations that a step would do twice to save memory would count once.
"""
import torch

# Dense bfloat16 operations per second, summed in float32, by torch.cuda.get_device_name(). From the
# makers' data sheets; those that give a figure with sparsity have twice the dense one. A card by
# another name, or a part of a card (MIG), has no entry, and no MFU is logged.
PEAKS = {
    'NVIDIA H200': 989e12,
    'NVIDIA H200 NVL': 835e12,
    'NVIDIA GH200 480GB': 989e12,
    'NVIDIA H100 80GB HBM3': 989e12,           # SXM
    'NVIDIA H100 NVL': 835e12,
    'NVIDIA H100 PCIe': 756e12,
    'NVIDIA A100-SXM4-40GB': 312e12,
    'NVIDIA A100-SXM4-80GB': 312e12,
    'NVIDIA A100-PCIE-40GB': 312e12,
    'NVIDIA A100 80GB PCIe': 312e12,
    'NVIDIA L40S': 362e12,
    'NVIDIA L4': 121e12,
    'NVIDIA GeForce RTX 4090': 165e12,
}


def peak_of(device):
    """ Operations per second of a device in bfloat16; None for a CPU and for a card that is not in
    the table. """
    if torch.device(device).type != 'cuda':
        return None
    return PEAKS.get(torch.cuda.get_device_name(device))


def flops_of_step(model, run, grad_accum, stage, world=1):
    """ Operations of one step of all processes, in a stage of train.py. """
    head_positions = stage.budget * grad_accum * world
    return flops(model, run.global_batch, stage.seq_len, head_positions, stage.predict)


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
