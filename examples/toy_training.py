"""
Trains a small network on the toy world, with the batches, the clocks and the losses of the project.
What train.py adds to this: a schedule of the learning rate, an average of the weights, checkpoints.
"""
from types import SimpleNamespace

import torch

from toy import L, LATENTS, PROBABILITIES, TOKENS, V
from diffusion import GaussianLatents, MaskedText, mode_shares
from loss import BatchMaker, Loss
from model import Model, ModelConfig

TEXT = MaskedText(V)
LATENT = GaussianLatents(torch.ones(2), target='x0')


def small_model():
    torch.manual_seed(0)
    return Model(ModelConfig(vocab_size=V, seq_len=L, latent_dim=2, latent_tokens=1, depth=2,
                             heads=2, width=32))


def train(model, mode, steps, batch_size=256, learning_rate=1e-2, cond_drop=0.1):
    """ mode: as in train.py, such as 'l2t+t2l' or 'l2t+causal'. cond_drop: how often what is given
    is replaced by noise. """
    # a dataset is its rows, their length and its special ids; a stage is what its mode draws
    data = SimpleNamespace(eos=V - 2, pad=V - 1, seq_len=L,
                           rows=lambda rows, crop, length: (TOKENS[rows], LATENTS[rows][:, None]))
    streams = ('text', 'latent')
    stage = SimpleNamespace(shares=mode_shares(mode), seq_len=L, predict=streams)

    make_batch = BatchMaker(TEXT, LATENT, streams, seed=0, cond_drop=cond_drop,
                            t_min=1e-2)
    loss_fn = Loss(model, make_batch, lambda: torch.autocast('cpu', enabled=False))
    optimizer = torch.optim.Adam(model.parameters())

    for step in range(steps):
        for group in optimizer.param_groups:
            group['lr'] = learning_rate * (1 - step / steps)
        rows = torch.multinomial(PROBABILITIES, batch_size, replacement=True)
        batch = make_batch(data, rows, step, 0, stage)
        loss, _ = loss_fn(batch, stage.predict)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
