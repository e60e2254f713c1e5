"""
The whole idea on one page: one network reads masked text and a noised latent, each with its own
clock, and predicts both clean. So it writes text from an embedding, an embedding from text, both
from noise, and text from left to right.

    python prepare.py config/quickstart.py        the data: sentences and their embeddings
    python nano.py                                trains for some minutes on a CPU, and writes

A clock runs from 0 (clean) to 1 (noise). A mode says how the two clocks of a row are drawn:
    mode            text clock   latent clock   learns
    unconditional   drawn        drawn          both from noise
    l2t             drawn        0              text from a latent
    t2l             0            drawn          a latent from text
    causal          0            0              the next token, from a latent and the tokens before
train.py adds what a real run needs.
Letters: B rows, L tokens, D latent dims, K tokens of the latent, C width, V vocabulary.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from data import PackedDataset

depth, width, heads, K = 4, 128, 4, 8
batch_size, max_iters, learning_rate, t_min = 64, 3000, 2e-3, 0.1
UNCONDITIONAL, L2T, T2L, CAUSAL = range(4)

# ---- the network: two streams that meet in one attention (an MMDiT)

def modulated(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def sinusoids(t):
    angles = 1000 * t[:, None] * 10_000 ** (-torch.arange(128) / 128)
    return torch.cat([angles.cos(), angles.sin()], 1)                    # (B, 256)


class Stream(nn.Module):
    """ One modality's half of a block: all but the attention. """
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.scale_shift_table = nn.Parameter(torch.zeros(6, width))

    def begin(self, x, shared):                                          # (B, S, C), (B, 6, C)
        shift, scale, *rest = (shared + self.scale_shift_table)[:, :, None].unbind(1)
        qkv = self.qkv(modulated(x, shift, scale)).unflatten(2, (3, heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                             # (B, heads, S, C / heads)
        return self.q_norm(q), self.k_norm(k), v, *rest

    def finish(self, x, attended, gate, mlp_shift, mlp_scale, mlp_gate):
        x = x + gate * self.out(attended)
        hidden = F.relu(self.up(modulated(x, mlp_shift, mlp_scale))).square()
        return x + mlp_gate * self.down(hidden)


class Nano(nn.Module):
    def __init__(self, V, L, D):
        super().__init__()
        self.embed = nn.Embedding(V + 1, width)                          # id V is MASK
        self.text_clock, self.latent_clock = [nn.Sequential(
            nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(2)]
        self.text_modulation = nn.Linear(width, 8 * width)
        self.latent_modulation = nn.Linear(width, 8 * width)
        self.latent_in = nn.Linear(D, K * width)
        self.latent_pos_emb = nn.Parameter(torch.randn(K, width))
        self.bias = nn.Parameter(torch.randn(width))
        self.text = nn.ModuleList(Stream() for _ in range(depth))
        self.latent = nn.ModuleList(Stream() for _ in range(depth))
        self.text_head = nn.Linear(width, V, bias=False)
        self.latent_head = nn.Linear(K * width, D)
        self.bag_values = nn.Embedding.from_pretrained(torch.zeros(V + 1, D), freeze=False)
        for layer in (self.text_modulation, self.latent_modulation, self.text_head):
            nn.init.zeros_(layer.weight)                                 # then no word is likelier
        frequency = 10_000 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        self.angles = torch.outer(torch.arange(L), frequency)            # of rotary positions

    def rotate(self, x):
        (x1, x2), cos, sin = x.chunk(2, -1), self.angles.cos(), self.angles.sin()
        return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)

    def forward(self, x, z, t_text, t_latent, n_causal=0):
        """ x (B, L) ids, z (B, D), clocks (B,) -> logits (B, L, V), clean latent (B, D). In the
        last n_causal rows a position sees the latent and what is before it. """
        (B, L), V = x.shape, self.text_head.out_features
        clocks = self.text_clock(sinusoids(t_text)) + self.latent_clock(sinusoids(t_latent))
        condition = F.silu(self.bias + clocks)
        of_text = self.text_modulation(condition).unflatten(1, (8, width))
        of_latent = self.latent_modulation(condition).unflatten(1, (8, width))

        # position i reads token i - 1, so that every row predicts the next one; MASK comes first
        text = self.embed(F.pad(x[:, :-1], (1, 0), value=V))
        latent = self.latent_in(z).unflatten(1, (K, width)) + self.latent_pos_emb
        mask = torch.ones(K + L, K + L).tril().bool() | (torch.arange(K + L) < K)
        mask = mask | (torch.arange(B) < B - n_causal)[:, None, None, None]
        for on_text, on_latent in zip(self.text, self.latent):
            q, k, v, *text_rest = on_text.begin(text, of_text[:, :6])
            q_z, k_z, v_z, *latent_rest = on_latent.begin(latent, of_latent[:, :6])
            q, k = torch.cat([q_z, self.rotate(q)], 2), torch.cat([k_z, self.rotate(k)], 2)
            attended = F.scaled_dot_product_attention(q, k, torch.cat([v_z, v], 2), mask)
            attended = attended.transpose(1, 2).flatten(2)
            text = on_text.finish(text, attended[:, K:], *text_rest)
            latent = on_latent.finish(latent, attended[:, :K], *latent_rest)
        text = modulated(text, *of_text[:, 6:, None].unbind(1))
        latent = modulated(latent, *of_latent[:, 6:, None].unbind(1))
        bag = self.bag_values(x).sum(1) / L ** 0.5                       # nearly an embedding
        return self.text_head(text), self.latent_head(latent.flatten(1)) + bag

# ---- noise and loss

def alpha_sigma(t):
    return torch.sin(math.pi / 2 * (1 - t))[:, None], torch.sin(math.pi / 2 * t)[:, None]


def draw_clocks(mode):
    drawn = t_min + (1 - t_min) * torch.rand(2, len(mode))
    t_text = torch.where((mode == T2L) | (mode == CAUSAL), 0, drawn[0])
    return t_text, torch.where((mode == L2T) | (mode == CAUSAL), 0, drawn[1])


def loss_of(model, x, z, mode, t_text, t_latent, u, e, pad):
    V, is_causal = model.text_head.out_features, mode == CAUSAL          # causal rows are the last
    masked, (alpha, sigma) = u < t_text[:, None], alpha_sigma(t_latent)
    x_t, z_t = torch.where(masked, V, x), alpha * z + sigma * e
    logits, z_hat = model(x_t, z_t, t_text, t_latent, is_causal.sum())

    # nats of what is masked, times 1/t: the bound on -log p, but for t < t_min. Causal: -log p
    nll = F.cross_entropy(logits.flatten(0, 1), x.flatten(), reduction='none').view(x.shape)
    weight = masked / t_text.clamp(min=t_min)[:, None]                   # t2l: nothing is masked
    weight = torch.where(is_causal[:, None], x != pad, weight)
    error = (z_hat - z).square().mean(1)
    return (weight * nll).mean() + (error * ((mode == UNCONDITIONAL) | (mode == T2L))).mean()

# ---- writing: a sampler of each kind

@torch.no_grad()
def write_by_diffusion(model, z, L, steps=32):
    """ All is MASK; each step keeps the most certain of the tokens that are left. """
    x = torch.full((len(z), L), V := model.text_head.out_features)
    for n_visible in torch.linspace(0, L, steps + 1)[1:].round():
        masked = x == V
        p, token = model(x, z, masked.float().mean(1), torch.zeros(len(z)))[0].softmax(2).max(2)
        rank = torch.where(masked, p, 2).argsort(1, descending=True).argsort(1)
        x = torch.where(masked & (rank < n_visible), token, x)
    return x


@torch.no_grad()
def write_from_left_to_right(model, z, L):
    x, zero = torch.full((len(z), L), model.text_head.out_features), torch.zeros(len(z))
    for i in range(L):
        x[:, i] = model(x, z, zero, zero, len(z))[0][:, i].argmax(1)
    return x


@torch.no_grad()
def latent_of_text(model, x, D, steps=32):
    """ DDIM from noise: z = alpha z_hat + sigma e, so z_hat says which noise e is in z. """
    z, zero = torch.randn(len(x), D), torch.zeros(len(x))
    for t, t_next in torch.linspace(1, 0, steps + 1).unfold(0, 2, 1):
        (alpha, sigma), (alpha_next, sigma_next) = alpha_sigma(zero + t), alpha_sigma(zero + t_next)
        z_hat = model(x, z, zero, zero + t)[1]
        z = alpha_next * z_hat + sigma_next * (z - alpha * z_hat) / sigma
    return z


def main():
    torch.manual_seed(0)
    data, val = [PackedDataset('data/quickstart', split) for split in ('train', 'val')]
    L, D, tokenizer = data.seq_len, data.latent_shape[1], data.tokenizer
    model = Nano(tokenizer.vocab_size, L, D)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    mode = torch.arange(batch_size) * 4 // batch_size                    # a quarter of the rows
    for step in range(max_iters):
        x, z = data.rows(torch.randint(len(data), (batch_size,)).numpy())
        noise = *draw_clocks(mode), torch.rand(x.shape), torch.randn(batch_size, D)
        loss = loss_of(model, x, z[:, 0], mode, *noise, tokenizer.pad)
        loss.backward()
        up_and_down = min((step + 1) / 100, 1 - step / max_iters)
        optimizer.param_groups[0]['lr'] = learning_rate * up_and_down
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f'step {step:,} of {max_iters:,}, loss {loss.item():.3f}', flush=True)
    x, z = val.rows(range(64))
    print('cosine', F.cosine_similarity(latent_of_text(model, x, D), z[:, 0]).mean().item())
    written = write_by_diffusion(model, z[:4, 0], L), write_from_left_to_right(model, z[:4, 0], L)
    for texts in zip(x, *written):
        print('\n -> '.join(repr(tokenizer.decode(ids)) for ids in texts))


if __name__ == '__main__':
    main()
