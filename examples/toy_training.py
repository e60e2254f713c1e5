"""
Trains a small network on the toy world, with the batches, the clocks and the losses of the project.
What train.py adds to this: a schedule of the learning rate, an average of the weights, checkpoints.
"""
from types import SimpleNamespace

import torch

from toy import L, LATENTS, PROBABILITIES, TOKENS, V
from data import Rows
from diffusion import GaussianLatents, Loss, MaskedText, Noising, mode_shares
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
    streams = ('text', 'latent')
    ids = SimpleNamespace(eos=V - 2, pad=V - 1)
    noising = Noising(TEXT, LATENT, streams, seed=0, cond_drop=cond_drop, t_min=1e-2)
    loss_fn = Loss(model, noising)
    optimizer = torch.optim.Adam(model.parameters())

    for step in range(steps):
        # the rate falls to 0 in a straight line
        for group in optimizer.param_groups:
            group['lr'] = learning_rate * (1 - step / steps)

        # clean rows of the toy world, made noisy as the mode says
        i = torch.multinomial(PROBABILITIES, batch_size, replacement=True)
        rows = Rows(TOKENS[i], LATENTS[i][:, None], is_cut=False, step=step, first=0)
        batch = noising(rows, mode_shares(mode), ids)
        loss_fn(batch, predict=streams).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
