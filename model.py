"""
The network: a dual-stream MMDiT (Stable Diffusion 3, arXiv:2403.03206). It reads masked text and
noised latents, each with its own clock, and predicts both clean.

    tokens  (B, L)     ids below V, or V itself: MASK    t_text   (B,)  0 is clean, 1 is pure noise
    latents (B, N, D)  standardised, noised              t_latent (B,)  likewise
    -> logits over V ids at the positions asked for, and the latent prediction
       (whether that is v, x0 or another target is diffusion.py's to say)

Each stream has its own weights (norm, modulation, qkv, out, MLP). They meet only in the attention,
which runs over both sequences joined. Other models are shapes of this one: streams=('text',) is
MDLM's network, streams=('latent',) a latent DiT, and rows that are all causal a decoder.

A row may be causal: its text sees the latents and the text before it, its latents see only
latents. The last n_causal rows of a batch are. So one network writes both ways: token by token, and
by diffusion.

Where this departs from SD3, and why:
    each latent vector becomes `latent_tokens` tokens     one token is a bottleneck
    the latent stream may be narrower                     it serves few tokens
    modulation shared by all blocks, plus a table         adaLN-single (PixArt, arXiv:2310.00426);
                                                          vanilla adaLN is a third of the parameters
    rotary positions for text (arXiv:2104.09864)          squared-ReLU MLP (arXiv:2109.08668)
    bag=True: a bag of the tokens past the blocks         an embedding of a text is nearly linear in
                                                          its words; attention is slow to find that.
                                                          Pictures also read it, before the blocks
    shortcut=True: a linear map from latents to tokens    the same in the other direction

Letters: B batch, L text tokens, N latent vectors, K = N * latent_tokens, S = K + L, D latent dims,
C width, H heads, d = C / H, V vocabulary, P positions where the head runs.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class ModelConfig:
    vocab_size: int = 4096                # V, with EOS, and PAD, the last id; MASK is id V and has
                                          # no logit
    seq_len: int = 64                     # L, the longest text
    latent_dim: int = 384                 # D
    n_latents: int = 1                    # N
    latent_tokens: int = 8                # tokens that each latent vector becomes
    depth: int = 8
    heads: int = 4
    width: int = 256                      # C of the text stream, and of the attention
    latent_width: int | None = None       # C of the latent stream; None: width
    mlp_ratio: float = 4.0
    shift: bool = False                   # True: every row reads token i - 1 at position i (set
                                          # where any row is causal). False: only causal rows do.
                                          # (It is not the shift of the modulation)
    streams: tuple = ('text', 'latent')
    bag: bool = False                     # the latent prediction adds a bag of the tokens; where
                                          # spatial, the latent stream reads it, too
    shortcut: bool = False                # tokens and logits read a linear map of the latents
    text_clock: bool = True               # False: the text clock is not read; costs no likelihood
    spatial: bool = False                 # the N latents are a square grid: add 2-D positions
    parts: bool = False                   # some of the N vectors may be given: they are marked
    dropout: float = 0.0
    importance: str = 'none'              # none | freq | learned | hybrid: of tokens, to mask by
    clusters: int = 0                     # of tokens (processes/hdlm.py): ids V + 1 .. V + clusters
                                          # are read, never predicted

    def __post_init__(self):
        # from JSON streams is a list
        self.streams = tuple(self.streams)
        if self.latent_width is None:
            self.latent_width = self.width

        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f'width={self.width} must be an even multiple of heads={self.heads}')

        if self.spatial and math.isqrt(self.n_latents) ** 2 != self.n_latents:
            raise ValueError('spatial=True needs a square number of latents, found '
                             f'n_latents={self.n_latents}')


# -----------------------------------------------------------------------------
# Leaves

def in_compute_dtype(x, weight):
    """ x, which is to enter the blocks, in the dtype of their weights: sampling casts these weights
    once. On a GPU under autocast it becomes bfloat16, as the products are: that halves the memory
    to read and write. """
    if x.is_cuda and torch.is_autocast_enabled('cuda'):
        return x.to(torch.get_autocast_dtype('cuda'))
    return x.to(weight.dtype)


# Autocast on a GPU would make the results of these two float32, and then all that follows. Their
# kernels sum in float32 in any case. On a CPU autocast leaves them alone

@torch.autocast('cuda', enabled=False)
def norm(x):
    return F.layer_norm(x, x.shape[-1:])  # no gain or bias of its own: the modulation has both


@torch.autocast('cuda', enabled=False)
def rms_norm(x):
    return F.rms_norm(x, x.shape[-1:])


def squared_relu(x):
    x = F.relu(x)
    return x * x                          # square() would become float32, as the norms above


def modulate(x, shift, gain):
    """ A layer norm of x (B, S, C) with the gain and the shift of each row, (B, 1, C); or with one
    gain and one shift (C,) for all rows, which is faster. """
    if gain.ndim == 1:
        return F.layer_norm(x, gain.shape, gain, shift)
    return norm(x) * gain + shift


def attention(q, k, v, mask=None):
    """ softmax(q k' / sqrt(d)) v over (B, H, S, d); mask is True where a query may look. """
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    # on a CPU this beats SDPA: 803 to 1,212 ms a training step (LOG.md)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=q.dtype) @ v


def causal_mask(K, L, device=None):
    """ (K + L, K + L), True where a query may look: at the K latents of the prefix, and at what
    is before it, itself included. """
    is_before = torch.ones(K + L, K + L, dtype=torch.bool, device=device).tril()
    is_prefix = torch.arange(K + L, device=device) < K
    return is_before | is_prefix


def attention_of_rows(q, k, v, K, n_causal):
    """ Attention in which the last n_causal rows look as causal_mask(K, S - K) says. """
    n_full = len(q) - n_causal
    if n_causal == 0:
        return attention(q, k, v)
    if q.is_cuda and n_full == 0:
        return attention_with_prefix(q, k, v, K)

    # on a GPU rows of a kind together, so that no table of S x S is made
    if q.is_cuda:
        full, causal = zip(*(x.split([n_full, n_causal]) for x in (q, k, v)))
        return torch.cat([attention(*full), attention_with_prefix(*causal, K)])

    # on a CPU one table: of all rows, or where they differ one of each row
    mask = causal_mask(K, q.shape[2] - K)
    if n_full:
        mask = mask | (torch.arange(len(q)) < n_full)[:, None, None, None]
    return attention(q, k, v, mask)


def attention_with_prefix(q, k, v, K):
    """ attention with causal_mask(K, S - K): causal, but the prefix sees all of itself. """
    if K == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    prefix = F.scaled_dot_product_attention(q[:, :, :K], k[:, :, :K], v[:, :, :K])
    text = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, K:]
    return torch.cat([prefix, text], 2)


def rotary_angles(length, head_dim):
    """ l * 10000^(-j / (d/2)) of position l and channel pair j: (L, d/2), float64. """
    of_pair = torch.arange(0, head_dim, 2, dtype=torch.float64, device='cpu') / head_dim
    position = torch.arange(length, dtype=torch.float64, device='cpu')
    return torch.outer(position, 10_000 ** -of_pair)


def rotate(x, cos, sin):
    """ Rotary positions: each pair (x1, x2) of channels turns by its angle. """
    x1, x2 = x.chunk(2, dim=-1)
    y1 = x1 * cos - x2 * sin
    y2 = x1 * sin + x2 * cos
    return torch.cat([y1, y2], dim=-1)


def grid_positions(n, width):
    """ Fixed sines and cosines of row and column for a square grid of n cells: (n, width). """
    side = math.isqrt(n)
    quarter = width // 4
    frequency = 10_000 ** (-torch.arange(quarter, dtype=torch.float64, device='cpu') / quarter)
    cell = torch.arange(n, device='cpu')
    row = cell // side
    column = cell % side

    of_row = torch.outer(row.double(), frequency)
    of_column = torch.outer(column.double(), frequency)
    angles = torch.cat([of_row, of_column], dim=1)                       # (n, 2 quarter)
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return F.pad(table, (0, width - 4 * quarter)).float()


class TimestepEmbedding(nn.Module):
    """ A time in [0, 1] as a vector: sinusoids of 1000 t in float32, then a two-layer MLP. Without
    the 1000, t = .500 and .501 would be the same number in bfloat16. """

    def __init__(self, width, n_frequencies=128):
        super().__init__()
        exponent = torch.arange(n_frequencies, dtype=torch.float64, device='cpu') / n_frequencies
        self.register_buffer('frequency', (10_000 ** -exponent).float(), persistent=False)
        self.up = nn.Linear(2 * n_frequencies, width)
        self.down = nn.Linear(width, width)

    def forward(self, t):                                                # (B,)
        angles = 1000 * t.float()[:, None] * self.frequency              # (B, n_frequencies)
        sinusoids = torch.cat([angles.cos(), angles.sin()], dim=1)
        return self.down(F.silu(self.up(sinusoids)))                     # (B, C)

# -----------------------------------------------------------------------------
# A block: two streams, one attention

class Stream(nn.Module):
    """ One modality's half of a block: all of it but the attention. Modulation is six vectors:
    shift, gain and gate for the attention, and the same for the MLP. They are those of the clocks,
    shared by all blocks, plus this block's own table, which has 0 where a gain is 1. """

    def __init__(self, width, attention_width, heads, mlp_ratio, dropout):
        super().__init__()
        self.heads = heads
        self.head_dim = attention_width // heads
        self.qkv = nn.Linear(width, 3 * attention_width, bias=False)
        self.out = nn.Linear(attention_width, width, bias=False)
        self.up = nn.Linear(width, int(mlp_ratio * width), bias=False)
        self.down = nn.Linear(int(mlp_ratio * width), width, bias=False)
        self.q_gain = nn.Parameter(torch.empty(self.head_dim))
        self.k_gain = nn.Parameter(torch.empty(self.head_dim))
        self.scale_shift_table = nn.Parameter(torch.empty(6, width))
        self.p_drop = dropout

    def modulation(self, shared):                                        # (B, 6C)
        modulation = shared.unflatten(1, (6, -1)) + self.scale_shift_table
        modulation = in_compute_dtype(modulation, self.qkv.weight)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation[:, :, None].unbind(1)
        return shift, 1 + scale, gate, mlp_shift, 1 + mlp_scale, mlp_gate            # (B, 1, C)

    def project(self, x, shift, gain):                                   # (B, S, C)
        qkv = self.qkv(modulate(x, shift, gain))                         # (B, S, 3 H d)
        return qkv.unflatten(2, (3, self.heads, self.head_dim))          # (B, S, 3, H, d)

    def queries_keys_values(self, x, shift, gain):                       # (B, S, C)
        qkv = self.project(x, shift, gain)
        qk, v = qkv.permute(2, 0, 3, 1, 4).split([2, 1])                 # (2, B, H, S, d), (1, ...)
        gains = torch.stack([self.q_gain, self.k_gain])[:, None, None, None]
        return rms_norm(qk) * gains.to(qk.dtype), v.squeeze(0)

    def mlp(self, x):                                                    # (B, S, C), each alone
        hidden = squared_relu(self.up(x))
        return self.down(hidden)

    def finish(self, x, attended, gate, mlp_shift, mlp_gain, mlp_gate):
        x = x + gate * self.dropout(self.out(attended))                  # (B, S, C)
        changed = self.mlp(modulate(x, mlp_shift, mlp_gain))
        return x + mlp_gate * self.dropout(changed)

    def dropout(self, x):
        return F.dropout(x, self.p_drop, self.training)


class Block(nn.Module):
    """ Two streams that meet in one attention. `text` or `latent` is None where the model has no
    such stream, or where it is not read. `predict` names the streams whose output is read: in the
    last block the other one serves only as keys and values. The last `n_causal` rows are causal.
    `cache` (2, B, H, S, d): where keys and values are kept. """

    def __init__(self, config):
        super().__init__()
        c = config
        self.text = self.latent = None
        if 'text' in c.streams:
            self.text = Stream(c.width, c.width, c.heads, c.mlp_ratio, c.dropout)
        if 'latent' in c.streams:
            self.latent = Stream(c.latent_width, c.width, c.heads, c.mlp_ratio, c.dropout)

    def forward(self, text, latent, text_modulation, latent_modulation, cos, sin, n_causal,
                predict, cache=None):
        # latents come first: they are a prefix, should the text be causal
        queries_keys, values = [], []
        if latent is not None:
            shift, gain, *latent_rest = self.latent.modulation(latent_modulation)
            qk, v = self.latent.queries_keys_values(latent, shift, gain)
            queries_keys.append(qk)                                      # (2, B, H, K, d)
            values.append(v)                                             # (B, H, K, d)
        if text is not None:
            shift, gain, *text_rest = self.text.modulation(text_modulation)
            qk, v = self.text.queries_keys_values(text, shift, gain)
            queries_keys.append(rotate(qk, cos, sin))                    # (2, B, H, L, d)
            values.append(v)                                             # (B, H, L, d)

        # one attention over both sequences
        K = 0 if latent is None else latent.shape[1]
        q, k = torch.cat(queries_keys, 3).unbind()                       # (B, H, K + L, d) each
        v = torch.cat(values, 2)
        if cache is not None:
            cache[0], cache[1] = k, v
        attended = attention_of_rows(q, k, v, K, n_causal)
        attended = attended.transpose(1, 2).flatten(2)                   # (B, K + L, C)
        to_latent, to_text = attended.split([K, q.shape[2] - K], 1)

        # each stream goes on with its own part, or ends here
        next_text = next_latent = None
        if 'latent' in predict:
            next_latent = self.latent.finish(latent, to_latent, *latent_rest)
        if 'text' in predict:
            next_text = self.text.finish(text, to_text, *text_rest)
        return next_text, next_latent

# -----------------------------------------------------------------------------
# The whole

class Model(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = c = config

        # embedding and head of the text, its clock, and the modulation of its stream
        if 'text' in c.streams:
            self.embed = nn.Embedding(c.vocab_size + 1 + c.clusters, c.width)
            self.text_clock = TimestepEmbedding(c.width) if c.text_clock else None
            # 6 vectors for the blocks, 2 for the head
            self.text_modulation = nn.Linear(c.width, 8 * c.width)
            self.text_head = nn.Linear(c.width, c.vocab_size, bias=False)
            angles = rotary_angles(c.seq_len, c.width // c.heads)
            self.register_buffer('cos', angles.cos().float(), persistent=False)
            self.register_buffer('sin', angles.sin().float(), persistent=False)

        # the same for the latents; the layer of their modulation also gives the gates of bag and
        # shortcut
        if 'latent' in c.streams:
            K = c.n_latents * c.latent_tokens
            n_gates = c.latent_dim * c.bag + 2 * c.shortcut
            self.latent_in = nn.Linear(c.latent_dim, c.latent_tokens * c.latent_width)
            self.latent_pos_emb = nn.Parameter(torch.empty(K, c.latent_width))
            self.latent_clock = TimestepEmbedding(c.width)
            self.latent_modulation = nn.Linear(c.width, 8 * c.latent_width + n_gates)
            self.latent_head = nn.Linear(c.latent_tokens * c.latent_width, c.latent_dim)
            if c.parts:
                self.latent_given = nn.Parameter(torch.empty(c.latent_width))
            if c.spatial:
                grid = grid_positions(c.n_latents, c.latent_width)
                self.register_buffer('grid', grid, persistent=False)

        # past the blocks: two linear maps from latents to text, a bag of tokens to latents
        if c.shortcut:
            self.shortcut_in = nn.Linear(c.n_latents * c.latent_dim, c.width, bias=False)
            self.shortcut_out = nn.Linear(c.n_latents * c.latent_dim, c.width, bias=False)
        if c.bag:
            n_ids = c.vocab_size + 1 + c.clusters
            self.bag_values = nn.Embedding(n_ids, c.n_latents * c.latent_dim)
            self.bag_scores = nn.Embedding(n_ids, 1)
            if c.spatial:
                self.bag_in = nn.Linear(c.latent_dim, c.latent_tokens * c.latent_width, bias=False)

        # the constant part of the conditioning vector
        self.bias = nn.Parameter(torch.empty(c.width))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.init_weights()

        # what is saved with the weights, besides the network
        self.importance = None
        if c.importance != 'none':
            self.importance = Importance(c.importance, c.vocab_size, c.seq_len)
        if c.clusters:                                     # of each token; a new run fills it in
            table = torch.zeros(c.vocab_size, dtype=torch.int64)
            self.register_buffer('cluster_of', table)

    def forward(self, tokens, latents, t_text, t_latent, positions=None, predict=('text', 'latent'),
                return_hidden=False, n_causal=0, given=None):
        """
        tokens (B, L) int64, latents (B, N, D) float, clocks (B,) float; None for a missing stream.
        positions (P,) int64: where the head runs, in the flattened B * L; None: everywhere.
        predict: the streams whose prediction is wanted; the others only condition.
        return_hidden: the text's hidden states in place of its logits; a loss runs the head itself.
        n_causal: how many rows are causal, the last ones of the batch.
        given (B, N) bool: the latent vectors that are clean, whatever t_latent says; None: none.
        Returns logits (P, V) or (B, L, V) float32 (hidden (P, C) or (B, L, C)), and the latent
        prediction (B, N, D) float32; None where not wanted.
        """
        c = self.config
        predict = tuple(stream for stream in predict if stream in c.streams)
        read = self.shifted(tokens, n_causal)
        bag = None
        if c.bag and (c.spatial or 'latent' in predict):
            bag = self.bag_of(tokens)                                    # (B, N, D)
        text, latent, condition = self.embed_inputs(
            read, latents, t_text, t_latent, given, self.readable(bag, n_causal))

        # both clocks, as one vector, modulate every block and the ends of both streams
        text_modulation = latent_modulation = cos = sin = None
        if text is not None:
            L = tokens.shape[1]
            text_modulation, text_final = self.split_text_modulation(condition)
            cos = self.cos[:L].to(text_modulation.dtype)
            sin = self.sin[:L].to(text_modulation.dtype)
        if latent is not None:
            parts = self.split_latent_modulation(condition)
            latent_modulation, latent_final, bag_gate, *shortcut_gates = parts
        into_head = None
        if c.shortcut:
            into_text, into_head = self.shortcuts(latents, shortcut_gates)           # (B, C) each
            text = text + into_text[:, None].to(text.dtype)

        # the blocks
        for i, block in enumerate(self.blocks):
            is_last = i == c.depth - 1
            text, latent = block(text, latent, text_modulation, latent_modulation, cos, sin,
                                 n_causal, predict if is_last else c.streams)

        # the heads
        logits = prediction = None
        if 'text' in predict:
            hidden = self.finish_text(text, text_final, into_head)       # (B, L, C)
            if positions is not None:
                hidden = hidden.flatten(0, 1).index_select(0, positions)  # (P, C)
            logits = hidden if return_hidden else self.text_head(hidden).float()
        if 'latent' in predict:
            shift, scale = latent_final.chunk(2, dim=1)
            latent = modulate(latent, shift[:, None], 1 + scale[:, None])            # (B, K, C)
            latent = latent.reshape(*latents.shape[:2], -1)              # (B, N, K/N * C)
            prediction = self.latent_head(latent).float()                # (B, N, D)
            if c.bag:
                prediction = prediction + (1 + bag_gate)[:, None] * bag
        return logits, prediction

    def shifted(self, tokens, n_causal):
        """ Tokens (B, L) as the blocks read them. In causal rows, and with config.shift in all,
        each token stands one position later, and MASK stands first. So position i predicts token i
        from those before it, and the last token is not read. """
        if tokens is None or not (self.config.shift or n_causal):
            return tokens
        later = F.pad(tokens[:, :-1], (1, 0), value=self.config.vocab_size)
        n_full = 0 if self.config.shift else len(tokens) - n_causal
        return torch.cat([tokens[:n_full], later[n_full:]])

    def readable(self, bag, n_causal):
        """ The bag (B, N, D) as pictures read it; None where nothing does. In causal rows it is 0:
        there a text is written that sees the picture, and the bag would say its words. """
        if bag is None or not self.config.spatial:
            return None
        is_full = torch.arange(len(bag), device=bag.device) < len(bag) - n_causal
        return bag * is_full[:, None, None]

    def embed_inputs(self, tokens, latents, t_text, t_latent, given=None, bag=None):
        """ Both streams as the first block reads them, (B, L, C) and (B, K, C), and the vector
        (B, C) that both clocks make. """
        # a clock adds its embedding to the constant part of the conditioning vector
        c = self.config
        text = latent = None
        weight = getattr(self.blocks[0], c.streams[0]).qkv.weight
        condition = self.bias                                            # (C,), then (B, C)
        if 'text' in c.streams:
            text = in_compute_dtype(self.embed(tokens), weight)          # (B, L, C)
            condition = condition.expand(tokens.shape[0], -1)
            if c.text_clock:
                condition = condition + self.text_clock(t_text)

        # each latent vector becomes K / N tokens
        if 'latent' in c.streams:
            latent = self.latent_in(latents)                             # (B, N, K/N * C)
            if bag is not None:
                latent = latent + self.bag_in(bag)
            latent = latent.unflatten(2, (c.latent_tokens, c.latent_width))
            if c.spatial:
                latent = latent + self.grid[:, None]
            if given is not None:
                latent = latent + given[..., None, None] * self.latent_given
            latent = in_compute_dtype(latent.flatten(1, 2) + self.latent_pos_emb, weight)
            condition = condition + self.latent_clock(t_latent)
        return text, latent, in_compute_dtype(F.silu(condition), weight)

    def split_text_modulation(self, condition):
        """ Of the text stream: for the blocks (B, 6C), and for the head (B, 2C). """
        width = self.config.width
        return self.text_modulation(condition).split([6 * width, 2 * width], dim=1)

    def split_latent_modulation(self, condition):
        """ Of the latent stream: for the blocks (B, 6C), for the head (B, 2C), for the bag
        (B, D or 0), and where there is a shortcut its two gates (B, 1). """
        c = self.config
        sizes = [6 * c.latent_width, 2 * c.latent_width, c.latent_dim * c.bag]
        if c.shortcut:
            sizes += [1, 1]
        return self.latent_modulation(condition).split(sizes, dim=1)

    def shortcuts(self, latents, gates):
        """ Linear maps (B, C) of the latents: one is added to every token, one to what the head
        reads. """
        into_text = (1 + gates[0]) * self.shortcut_in(latents.flatten(1))
        into_head = (1 + gates[1]) * self.shortcut_out(latents.flatten(1))
        return into_text, into_head

    def finish_text(self, text, final, into_head=None):
        """ What the text head reads, (B, L, C). """
        shift, scale = final.chunk(2, dim=1)                             # (B, C)
        text = modulate(text, shift[:, None], 1 + scale[:, None])
        return text if into_head is None else text + into_head[:, None].to(text.dtype)

    def bag_of(self, tokens):
        """ sum over l of weight[l] * value[x_l]: (B, L) -> (B, N, D). The weights are in proportion
        to exp(score[x_l]), and their squares add up to 1. An embedding of unit length is about a
        sum of its words, divided by the length of the sum. That grows like sqrt(l), where words
        point in unlike directions. MASK, EOS and PAD have rows like any token. """
        score = self.bag_scores(tokens).squeeze(2)                       # (B, L)
        largest = score.detach().amax(1, keepdim=True)                   # so that none is inf
        weight = F.normalize((score - largest).exp(), dim=1)
        bag = F.embedding_bag(tokens, self.bag_values.weight, per_sample_weights=weight, mode='sum')
        return bag.unflatten(1, (self.config.n_latents, -1))             # (B, N D) -> (B, N, D)

    @torch.no_grad()
    def init_weights(self):
        """ Matrices N(0, 1/fan_in). All gates and both heads start at 0, so each block is the
        identity, the text prediction is uniform and the latent prediction is 0. """
        # the rule: matrices N(0, 1/fan_in), biases and gates 0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features ** -0.5)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Stream):
                module.q_gain.fill_(1)
                module.k_gain.fill_(1)
                module.scale_shift_table.zero_()                         # the gates are in it

        # the exceptions: embeddings N(0, 1); what begins at 0
        self.bias.normal_()
        if 'text' in self.config.streams:
            self.embed.weight.normal_()
            self.text_modulation.weight.zero_()
            self.text_head.weight.zero_()
        if 'latent' in self.config.streams:
            self.latent_pos_emb.normal_()
            if self.config.parts:
                self.latent_given.normal_()
            self.latent_modulation.weight.zero_()
            self.latent_head.weight.zero_()
        if self.config.bag:
            self.bag_values.weight.zero_()
            self.bag_scores.weight.zero_()

    def parameter_groups(self):
        """ Lists of (name, parameter):
            matrices               the blocks', for Muon, or AdamW with weight decay
            embeddings_and_heads   with the matrices of clocks and modulation: AdamW with decay
            vectors                biases, gains, tables and the bag, which mostly begins as what
                                   ridge regression has found: AdamW without weight decay
        ValueError where two modules share a weight, as a head that is tied to the embedding. """
        # init_weights would fill it twice, the embedding with the zeros of the head; and a
        # checkpoint has each tensor once
        first_name = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first = first_name.setdefault(parameter, name)
            if first != name:
                raise ValueError(f'{name} is {first}, one tensor under two names, which would be '
                                 'initialised twice and in no checkpoint: use the first one twice '
                                 'in forward')

        groups = {'matrices': [], 'embeddings_and_heads': [], 'vectors': []}
        for name, parameter in self.named_parameters():
            # tables have two dimensions too, and are no matrices
            is_table = name.endswith(('scale_shift_table', 'latent_pos_emb'))
            is_table = is_table or name.startswith('bag_')
            is_matrix = parameter.ndim == 2 and not is_table
            if not is_matrix:
                group = 'vectors'
            elif name.startswith('blocks.'):
                group = 'matrices'
            else:
                group = 'embeddings_and_heads'
            groups[group].append((name, parameter))
        return groups

# -----------------------------------------------------------------------------
# How important a token is, for adaptive masking

class Importance(nn.Module):
    """ The importance of each token of a clean text, (B, L) -> (B, L) in [0, 1], and its learned
    part or None. freq reads the table `rarity`. The network is a text model of two layers whose
    head gives one number per token; at the start that is 1/2. PAD has 1/2, and so has MASK in a
    text that is being written.                                        processes/adaptive.py """

    def __init__(self, kind, vocab_size, seq_len, width=128):
        super().__init__()
        self.kind = kind
        self.register_buffer('rarity', torch.full((vocab_size,), 0.5))   # filled by train.py
        if kind != 'freq':
            self.net = Model(ModelConfig(vocab_size=vocab_size, seq_len=seq_len, depth=2, heads=2,
                                         width=width, streams=('text',), text_clock=False))
            self.net.text_head = nn.Linear(width, 1, bias=False)
            nn.init.zeros_(self.net.text_head.weight)

    def forward(self, tokens):
        pad = len(self.rarity) - 1                                       # MASK is the id above it
        rare = self.rarity[tokens.clamp(max=pad)]
        if self.kind == 'freq':
            return rare, None

        logits, _ = self.net(tokens, None, None, None)                   # (B, L, 1)
        learned = logits.squeeze(2).sigmoid()
        learned = torch.where(tokens >= pad, 0.5, learned)
        if self.kind == 'learned':
            return learned, learned
        return 0.7 * learned + 0.3 * rare, learned
