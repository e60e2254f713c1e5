"""
The whole idea on one page: one network reads masked text and a noised latent, each with its own
clock, and predicts both clean. So it writes text from an embedding, an embedding from text, both
from noise, and text from left to right.

    python prepare.py config/quickstart.py        the data: sentences and their embeddings
    python nano.py                                trains for half an hour on a CPU, and writes

A clock runs from 0 (clean) to 1 (noise). A mode says how the two clocks of a row are drawn:
    mode            text clock   latent clock   learns
    unconditional   drawn        drawn          both from noise
    l2t             drawn        0              text from a latent
    t2l             0            drawn          a latent from text
    causal          0            0              the next token, from a latent and the tokens before
train.py adds what a real run needs.
Letters: B rows, L tokens, D latent dims, K tokens of the latent, S = K + L, C width, V vocabulary.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))   # PYTHONSAFEPATH=1 leaves it out
if __name__ == '__main__':
    import base.begin                                      # before torch

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders

from data import PackedDataset

folder = 'data/quickstart'
depth = 4
width = 128
heads = 4
K = 8                                                  # tokens of a latent
batch_size = 64
max_iters = 3000
learning_rate = 2e-3
t_min = 0.1                                            # clocks are drawn from (t_min, 1)
UNCONDITIONAL, L2T, T2L, CAUSAL = range(4)

# ---- the network: two streams that meet in one attention (an MMDiT)

def modulate(x, shift, scale):
    """ A layer norm whose gain and bias come from the clocks. """
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def sinusoids(t):
    """ A clock (B,) as sines and cosines of many frequencies, (B, 256). """
    exponent = -torch.arange(128) / 128
    frequency = 10_000 ** exponent
    angles = 1000 * t[:, None] * frequency
    return torch.cat([angles.cos(), angles.sin()], 1)


def clock_embedding():
    return nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))


class Stream(nn.Module):
    """ One modality's half of a block: all but the attention. """

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.q_norm = nn.RMSNorm(width // heads)
        self.k_norm = nn.RMSNorm(width // heads)
        self.scale_shift_table = nn.Parameter(torch.zeros(6, width))

    def begin(self, x, shared):
        """ Queries, keys and values of x (B, S, C), and what `finish` needs of the modulation.
        shared (B, 6, C): the modulation of all blocks, to which each adds its own table. """
        modulation = shared + self.scale_shift_table                     # (B, 6, C)
        shift, scale, *rest = modulation[:, :, None].unbind(1)           # (B, 1, C) each
        qkv = self.qkv(modulate(x, shift, scale))                        # (B, S, 3 C)

        # a row of each head
        qkv = qkv.unflatten(2, (3, heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                             # (B, heads, S, C / heads)
        q = self.q_norm(q)
        k = self.k_norm(k)
        return q, k, v, rest

    def finish(self, x, attended, gate, mlp_shift, mlp_scale, mlp_gate):
        """ Adds to x what the attention has found, and then an MLP of it. """
        x = x + gate * self.out(attended)
        hidden = self.up(modulate(x, mlp_shift, mlp_scale))
        hidden = F.relu(hidden).square()
        return x + mlp_gate * self.down(hidden)


class Nano(nn.Module):

    def __init__(self, V, L, D):
        super().__init__()
        self.V = V

        # text: id V is MASK
        self.embed = nn.Embedding(V + 1, width)
        self.text_clock = clock_embedding()
        self.text_modulation = nn.Linear(width, 8 * width)     # 6 for the blocks, 2 for the head
        self.text_head = nn.Linear(width, V, bias=False)

        # latent: it becomes K tokens
        self.latent_in = nn.Linear(D, K * width)
        self.latent_pos_emb = nn.Parameter(torch.randn(K, width))
        self.latent_clock = clock_embedding()
        self.latent_modulation = nn.Linear(width, 8 * width)
        self.latent_head = nn.Linear(K * width, D)

        # an embedding is nearly a sum over its words, so this is a part of the answer
        self.bag_values = nn.Embedding(V + 1, D)

        self.bias = nn.Parameter(torch.randn(width))
        self.text = nn.ModuleList(Stream() for _ in range(depth))
        self.latent = nn.ModuleList(Stream() for _ in range(depth))

        # at the start no word is likelier than another, and the clocks change nothing
        zero = [self.text_modulation, self.latent_modulation, self.text_head, self.bag_values]
        for layer in zero:
            nn.init.zeros_(layer.weight)

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

    def forward(self, x, z, t_text, t_latent, n_causal=0):
        """ Ids x (B, L), latents z (B, D), clocks (B,) -> logits (B, L, V), clean latent (B, D). In
        the last n_causal rows a position sees the latent and what is before it. """
        B, L = x.shape

        # both clocks, as one vector, modulate both streams
        text_clock = self.text_clock(sinusoids(t_text))
        latent_clock = self.latent_clock(sinusoids(t_latent))
        clocks = text_clock + latent_clock
        condition = F.silu(self.bias + clocks)                           # (B, C)
        of_text = self.text_modulation(condition).unflatten(1, (8, width))
        of_latent = self.latent_modulation(condition).unflatten(1, (8, width))

        # input i is token i - 1, MASK first, and output i predicts token i: in masked rows too
        before = F.pad(x[:, :-1], (1, 0), value=self.V)
        text = self.embed(before)                                        # (B, L, C)

        # the latent is cut into K tokens
        latent = self.latent_in(z).unflatten(1, (K, width))              # (B, K, C)
        latent = latent + self.latent_pos_emb

        # who sees whom; the latent's tokens come first. In causal rows: the latent, and the past
        not_after = torch.ones(K + L, K + L).tril().bool()
        is_latent = torch.arange(K + L) < K
        sees_all = torch.arange(B) < B - n_causal
        mask = not_after | is_latent | sees_all[:, None, None, None]     # (B, 1, S, S)

        # the blocks: one attention over both, and then each goes on by itself
        for on_text, on_latent in zip(self.text, self.latent):
            q, k, v, text_rest = on_text.begin(text, of_text[:, :6])
            q_z, k_z, v_z, latent_rest = on_latent.begin(latent, of_latent[:, :6])
            q = torch.cat([q_z, self.rotate(q)], 2)                      # (B, heads, S, C / heads)
            k = torch.cat([k_z, self.rotate(k)], 2)
            v = torch.cat([v_z, v], 2)
            attended = F.scaled_dot_product_attention(q, k, v, mask)
            attended = attended.transpose(1, 2).flatten(2)               # (B, S, C)
            text = on_text.finish(text, attended[:, K:], *text_rest)
            latent = on_latent.finish(latent, attended[:, :K], *latent_rest)

        # the heads; the latent's adds the bag of the words
        shift, scale = of_text[:, 6:, None].unbind(1)
        logits = self.text_head(modulate(text, shift, scale))
        shift, scale = of_latent[:, 6:, None].unbind(1)
        latent = modulate(latent, shift, scale).flatten(1)               # (B, K C)
        bag = self.bag_values(x).sum(1) / L ** 0.5                       # (B, D)
        return logits, self.latent_head(latent) + bag

# ---- noise and loss

def alpha_sigma(t):
    """ The shares of latent and noise in z_t, (B, 1) each; their squares add up to 1. """
    angle = math.pi / 2 * t[:, None]
    return torch.cos(angle), torch.sin(angle)


def draw_clocks(mode):
    drawn = t_min + (1 - t_min) * torch.rand(2, len(mode))
    text_is_given = (mode == T2L) | (mode == CAUSAL)
    latent_is_given = (mode == L2T) | (mode == CAUSAL)
    t_text = torch.where(text_is_given, 0, drawn[0])
    t_latent = torch.where(latent_is_given, 0, drawn[1])
    return t_text, t_latent


def loss_of(model, x, z, mode, t_text, t_latent, u, e, pad):
    """ The loss of clean rows x (B, L), z (B, D); u (B, L) uniform and e (B, D) normal are the
    noise. Causal rows are the last ones. """
    # the noise: a token is MASK with probability t
    is_masked = u < t_text[:, None]
    x_t = torch.where(is_masked, model.V, x)
    alpha, sigma = alpha_sigma(t_latent)
    z_t = alpha * z + sigma * e

    is_causal = mode == CAUSAL
    logits, z_hat = model(x_t, z_t, t_text, t_latent, is_causal.sum())

    # text, in nats. Masked tokens weigh 1/t: a bound on -log p, less its part from t < t_min.
    # Causal rows score every token, and their sum is -log p itself
    nll = F.cross_entropy(logits.transpose(1, 2), x, reduction='none')   # (B, L)
    weight = is_masked / t_text.clamp(min=t_min)[:, None]
    weight = torch.where(is_causal[:, None], x != pad, weight)
    text_loss = (weight * nll).mean()

    # latents: the squared error, in the modes that predict them
    error = (z_hat - z).square().mean(1)                                 # (B,)
    is_predicted = (mode == UNCONDITIONAL) | (mode == T2L)
    return text_loss + (error * is_predicted).mean()

# ---- writing: a sampler of each kind

@torch.no_grad()
def write_by_diffusion(model, z, L, steps=32):
    """ At first all is MASK. Each step keeps the most certain of the tokens still masked. """
    x = torch.full((len(z), L), model.V)
    no_noise = torch.zeros(len(z))
    n_after_step = torch.linspace(0, L, steps + 1)[1:].round()
    for n_visible in n_after_step:
        is_masked = x == model.V
        logits, _ = model(x, z, is_masked.float().mean(1), no_noise)
        p, token = logits.softmax(2).max(2)                              # (B, L)

        # visible tokens come first in the ranking, then the most certain ones
        certainty = torch.where(is_masked, p, 2)
        rank = certainty.argsort(1, descending=True).argsort(1)
        is_kept = is_masked & (rank < n_visible)
        x = torch.where(is_kept, token, x)
    return x


@torch.no_grad()
def write_from_left_to_right(model, z, L):
    """ At first all is MASK; the causal mask hides what is not yet written. """
    x = torch.full((len(z), L), model.V)
    no_noise = torch.zeros(len(z))
    for i in range(L):
        logits, _ = model(x, z, no_noise, no_noise, n_causal=len(z))
        x[:, i] = logits[:, i].argmax(1)
    return x


@torch.no_grad()
def latent_of_text(model, x, D, steps=32):
    """ DDIM from noise: z = alpha z_hat + sigma e, so z_hat says which noise e is in z. """
    z = torch.randn(len(x), D)
    clean = torch.zeros(len(x))
    times = torch.linspace(1, 0, steps + 1)
    for t, t_next in zip(times, times[1:]):
        _, z_hat = model(x, z, clean, clean + t)

        # the noise that is in z now, and the same noise with the share of the next time
        alpha, sigma = alpha_sigma(t[None])
        e = (z - alpha * z_hat) / sigma
        alpha, sigma = alpha_sigma(t_next[None])
        z = alpha * z_hat + sigma * e
    return z

# ---- train, and write

def main():
    torch.manual_seed(0)
    data = PackedDataset(folder, 'train')
    val = PackedDataset(folder, 'val')
    L = data.seq_len
    D = data.latent_shape[1]
    model = Nano(data.vocab_size, L, D)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    mode = torch.arange(batch_size) * 4 // batch_size      # a quarter of the rows for each
    for step in range(max_iters):
        # random rows, their clocks and their noise
        rows = torch.randint(len(data), (batch_size,))
        x, z = data.rows(rows)                                           # (B, L), (B, 1, D)
        t_text, t_latent = draw_clocks(mode)
        u = torch.rand(batch_size, L)
        e = torch.randn(batch_size, D)
        loss = loss_of(model, x, z[:, 0], mode, t_text, t_latent, u, e, data.pad)
        loss.backward()

        # the learning rate goes up for 100 steps, and then down to 0
        factor = min((step + 1) / 100, 1 - step / max_iters)
        optimizer.param_groups[0]['lr'] = learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f'step {step:,} of {max_iters:,}, loss {loss.item():.3f}', flush=True)

    # an embedding from text, against the real one
    x, z = val.rows(range(64))
    z = z[:, 0]                                                          # (64, D)
    found = latent_of_text(model, x, D)
    cosine = F.cosine_similarity(found, z).mean()
    print(f'cosine {cosine.item():.3f}')

    # text from an embedding, in both ways, below the real one
    tokenizer = Tokenizer.from_file(f'{folder}/tokenizer.json')
    tokenizer.decoder = decoders.ByteLevel()
    by_diffusion = write_by_diffusion(model, z[:4], L)
    from_left = write_from_left_to_right(model, z[:4], L)
    for versions in zip(x, by_diffusion, from_left):
        texts = []
        for ids in versions:
            n_eos = (ids == data.eos).cumsum(0)
            text = tokenizer.decode(ids[n_eos == 0].tolist())
            texts.append(repr(text))
        print('\n -> '.join(texts))


if __name__ == '__main__':
    if not os.path.isfile(f'{folder}/meta.json'):
        raise SystemExit(f'no data in {os.path.abspath(folder)}: '
                         'python prepare.py config/quickstart.py')
    main()
