"""
nano.py as a plain decoder: one network reads text, and predicts the next token. So it writes text
from left to right, and nothing else. What is equal stands in the same words, so that

    diff nano.py examples/nano_decoder.py

shows what latent diffusion adds (docs/idea.md).

    python prepare.py config/quickstart.py        the data: sentences
    python examples/nano_decoder.py               trains on a CPU, about 20 minutes, and writes

Letters: B rows, L tokens, C width, V vocabulary.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
if __name__ == '__main__':
    import base.begin                                      # before torch

import torch
import torch.nn as nn
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders

from data import PackedDataset

folder = 'data/quickstart'
depth = 4
width = 128
heads = 4
batch_size = 64
max_iters = 3000
learning_rate = 2e-3

# ---- the network: one stream

class Stream(nn.Module):
    """ A block, all but the attention. """

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.q_norm = nn.RMSNorm(width // heads)
        self.k_norm = nn.RMSNorm(width // heads)
        self.norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)

    def begin(self, x):
        """ Queries, keys and values of x (B, S, C). """
        qkv = self.qkv(self.norm(x))                                     # (B, S, 3 C)

        # a row of each head
        qkv = qkv.unflatten(2, (3, heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                             # (B, heads, S, C / heads)
        q = self.q_norm(q)
        k = self.k_norm(k)
        return q, k, v

    def finish(self, x, attended):
        """ Adds to x what the attention has found, and then an MLP of it. """
        x = x + self.out(attended)
        hidden = self.up(self.mlp_norm(x))
        hidden = F.relu(hidden).square()
        return x + self.down(hidden)


class Nano(nn.Module):

    def __init__(self, V, L):
        super().__init__()
        self.V = V

        # text: id V is what stands before the first token
        self.embed = nn.Embedding(V + 1, width)
        self.norm = nn.LayerNorm(width)
        self.text_head = nn.Linear(width, V, bias=False)
        self.text = nn.ModuleList(Stream() for _ in range(depth))

        # at the start no word is likelier than another
        nn.init.zeros_(self.text_head.weight)

        # rotary positions: each pair of channels turns with the position, at its own speed
        size = width // heads
        exponent = -torch.arange(0, size, 2) / size
        speed = 10_000 ** exponent
        self.angles = torch.outer(torch.arange(L), speed)                # (L, C / heads / 2)

    def rotate(self, x):
        cos = self.angles.cos()
        sin = self.angles.sin()
        x1, x2 = x.chunk(2, -1)                                          # a pair: (x1_i, x2_i)
        y1 = x1 * cos - x2 * sin
        y2 = x1 * sin + x2 * cos
        return torch.cat([y1, y2], -1)

    def forward(self, x):
        """ Ids x (B, L) -> logits (B, L, V): of each token, by those before it. """
        # input i is token i - 1, and output i predicts token i
        before = F.pad(x[:, :-1], (1, 0), value=self.V)
        text = self.embed(before)                                        # (B, L, C)

        # the blocks
        for on_text in self.text:
            q, k, v = on_text.begin(text)
            q = self.rotate(q)
            k = self.rotate(k)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            attended = attended.transpose(1, 2).flatten(2)               # (B, L, C)
            text = on_text.finish(text, attended)

        # the head
        return self.text_head(self.norm(text))

# ---- loss

def loss_of(model, x, pad):
    """ The loss of rows x (B, L), in nats: the sum over the tokens is -log p(x) itself. """
    logits = model(x)
    nll = F.cross_entropy(logits.transpose(1, 2), x, reduction='none')   # (B, L)
    return (nll * (x != pad)).mean()

# ---- writing

@torch.no_grad()
def write_from_left_to_right(model, B, L):
    """ Each token is drawn, given those before it. """
    x = torch.full((B, L), model.V)
    for i in range(L):
        p = model(x)[:, i].softmax(1)
        x[:, i] = torch.multinomial(p, 1)[:, 0]
    return x

# ---- train, and write

def main():
    torch.manual_seed(0)
    data = PackedDataset(folder, 'train')
    L = data.seq_len
    model = Nano(data.vocab_size, L)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    for step in range(max_iters):
        # random rows
        rows = torch.randint(len(data), (batch_size,))
        x, z = data.rows(rows)                                           # (B, L), z is not read
        loss = loss_of(model, x, data.pad)
        loss.backward()

        # the learning rate goes up for 100 steps, and then down to 0
        factor = min((step + 1) / 100, 1 - step / max_iters)
        optimizer.param_groups[0]['lr'] = learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f'step {step:,} of {max_iters:,}, loss {loss.item():.3f}', flush=True)

    # texts
    tokenizer = Tokenizer.from_file(f'{folder}/tokenizer.json')
    tokenizer.decoder = decoders.ByteLevel()
    for ids in write_from_left_to_right(model, 4, L):
        n_eos = (ids == data.eos).cumsum(0)
        text = tokenizer.decode(ids[n_eos == 0].tolist())
        print(repr(text))


if __name__ == '__main__':
    if not os.path.isfile(f'{folder}/meta.json'):
        raise SystemExit(f'no data in {os.path.abspath(folder)}: '
                         'python prepare.py config/quickstart.py')
    main()
