"""
The network: a dual-stream MMDiT (Stable Diffusion 3, arXiv:2403.03206) that reads masked text and noised latents, each with
its own clock, and predicts both clean.

    tokens  (B, L)     ids below V, or V itself: MASK          t_text   (B,)  0 is clean, 1 is pure noise
    latents (B, N, D)  standardised, noised                    t_latent (B,)  likewise
    -> logits over V ids at the positions asked for, and the latent prediction (what it predicts, v or x0 or ..., is
       diffusion.py's to say)

Each stream has its own weights (norm, modulation, qkv, out, MLP); they meet only in the attention, which runs over both
sequences joined. Shapes of the same model: streams=('text',) is MDLM's network, streams=('latent',) a latent DiT,
causal=True an autoregressive decoder, with the latents as a prefix if there is a latent stream.

Where this departs from SD3, and why:
    each latent vector becomes `latent_tokens` tokens   one token is a bottleneck
    the latent stream may be narrower                   it serves few tokens
    modulation shared by all blocks, plus a table       adaLN-single (PixArt, arXiv:2310.00426): vanilla adaLN is a third of
                                                        all block parameters
    rotary positions for text (arXiv:2104.09864)        squared-ReLU MLP (arXiv:2109.08668)
    a bag of the tokens beside the blocks, if bag=True  an embedding of a text is nearly linear in its words, and attention is
                                                        slow to find that (LOG.md)
    a shortcut from the latents to each token, if       the same the other way: what words a text has is nearly linear in its
    shortcut=True                                       embedding

Letters: B batch, L text tokens, N latent vectors, K = N * latent_tokens, S = K + L, D latent dims, C width, V vocabulary.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class ModelConfig:
    vocab_size: int = 4096                # V, with EOS and PAD; MASK is id V: an embedding row, no head column
    seq_len: int = 64                     # L, the longest text
    latent_dim: int = 384                 # D
    n_latents: int = 1                    # N
    latent_tokens: int = 8                # tokens that each latent vector becomes
    depth: int = 8
    heads: int = 4
    width: int = 256                      # C of the text stream, and of the attention
    latent_width: int | None = None       # C of the latent stream; None: width
    mlp_ratio: float = 4.0
    causal: bool = False                  # text sees only text before it, latents only latents
    streams: tuple = ('text', 'latent')
    bag: bool = False                     # the latent prediction adds a weighted average over the tokens, learned per token
    shortcut: bool = False                # every token, and what the head reads of it, adds a linear map of the latents
    text_clock: bool = True               # False: text loses nothing, and a sampler may keep rows that did not change
    spatial: bool = False                 # the N latents are a square grid: add 2-D positions
    dropout: float = 0.0
    importance: str = 'none'              # of text tokens: none | freq | learned | hybrid (adaptive.py)
    clusters: int = 0                     # ids V + 1 .. V + clusters are read too, never written: HDLM's (baselines.py)

    def __post_init__(self):
        self.streams = tuple(self.streams)
        if self.latent_width is None:
            self.latent_width = self.width
        for name in ('vocab_size', 'seq_len', 'depth', 'heads', 'width', 'latent_width', 'latent_tokens', 'mlp_ratio'):
            if getattr(self, name) <= 0:
                raise ValueError(f'{name}={getattr(self, name)} must be positive')
        if not self.streams or not set(self.streams) <= {'text', 'latent'}:
            raise ValueError(f"streams={self.streams}: choose from ('text', 'latent'), ('text',), ('latent',)")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f'width={self.width} must be an even multiple of heads={self.heads}')
        if self.clusters < 0:
            raise ValueError(f'clusters={self.clusters} must be 0 or more')
        if self.bag and (self.causal or len(self.streams) < 2):
            raise ValueError(f'bag=True predicts latents from all of a text: it goes neither with causal nor with streams={self.streams}')
        if self.shortcut and len(self.streams) < 2:
            raise ValueError(f'shortcut=True leads from the latents to the text: it does not go with streams={self.streams}')
        if self.importance not in ('none', 'freq', 'learned', 'hybrid'):
            raise ValueError(f'importance={self.importance!r}: choose from none, freq, learned, hybrid')
        if self.importance != 'none' and ('text' not in self.streams or self.causal):
            raise ValueError(f'importance={self.importance} is of masked text: it goes neither with causal nor with streams={self.streams}')
        if self.spatial and math.isqrt(self.n_latents) ** 2 != self.n_latents:
            raise ValueError(f'spatial=True needs a square number of latents, found n_latents={self.n_latents}')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout={self.dropout} must lie in [0, 1)')


# ---- leaves

def norm(x):
    return F.layer_norm(x, x.shape[-1:])  # no gain or bias of its own: the modulation has both


def modulate(x, shift, scale):
    return norm(x) * (1 + scale) + shift


def attention(q, k, v, mask=None):
    """ softmax(q k' / sqrt(d)) v over (B, H, S, d); mask (S, S) is True where a query may look. """
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT             # on a CPU this beats SDPA: 803 to 1,212 ms a training step (LOG.md)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=q.dtype) @ v


def rotate(x, cos, sin):
    """ Rotary positions: the pair (x1, x2) of channel j at position l turns by the angle l * 10000^(-j/(d/2)). """
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


def rotary_angles(length, head_dim):
    frequency = 10_000 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.outer(torch.arange(length, dtype=torch.float64), frequency)             # (L, d/2)


def grid_positions(n, width):
    """ Fixed sines and cosines of row and column for a square grid of n cells: (n, width). """
    side, quarter = math.isqrt(n), width // 4
    frequency = 10_000 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    row, column = torch.arange(n) // side, torch.arange(n) % side
    angles = torch.cat([torch.outer(row.double(), frequency), torch.outer(column.double(), frequency)], dim=1)
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width - 4 * quarter)).float()


class Clock(nn.Module):
    """ A time in [0, 1] as a vector of the model: sinusoids of 1000 t in float32 (t itself would make .500 and .501 the
    same number in bfloat16), then a two-layer MLP. """

    def __init__(self, width, n_frequencies=128):
        super().__init__()
        frequency = 10_000 ** (-torch.arange(n_frequencies, dtype=torch.float64) / n_frequencies)
        self.register_buffer('frequency', frequency.float(), persistent=False)
        self.up = nn.Linear(2 * n_frequencies, width)
        self.down = nn.Linear(width, width)

    def forward(self, t):                                                # (B,)
        angles = 1000 * t.float()[:, None] * self.frequency              # (B, n_frequencies)
        return self.down(F.silu(self.up(torch.cat([angles.cos(), angles.sin()], dim=1))))  # (B, C)


class Stream(nn.Module):
    """ One modality's half of a block: all of it but the attention. Modulation is six vectors: shift, scale and gate for the
    attention, and for the MLP: those of the clocks, shared by all blocks, plus this block's own table. """

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
        self.table = nn.Parameter(torch.empty(6, width))
        self.dropout = nn.Dropout(dropout)

    def modulation(self, shared):                                        # (B, 6C)
        return (shared.unflatten(1, (6, -1)) + self.table)[:, :, None].unbind(1)  # six of (B, 1, C)

    def queries_keys_values(self, x, shift, scale):                      # (B, S, C)
        qkv = self.qkv(modulate(x, shift, scale))                        # (B, S, 3 H d)
        q, k, v = qkv.unflatten(2, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)  # each (B, H, S, d)
        q = F.rms_norm(q, (self.head_dim,)) * self.q_gain.to(q.dtype)
        k = F.rms_norm(k, (self.head_dim,)) * self.k_gain.to(k.dtype)
        return q, k, v

    def finish(self, x, attended, gate, mlp_shift, mlp_scale, mlp_gate):
        x = x + gate * self.dropout(self.out(attended))                  # (B, S, C)
        hidden = F.relu(self.up(modulate(x, mlp_shift, mlp_scale))).square()
        return x + mlp_gate * self.dropout(self.down(hidden))


class Block(nn.Module):
    """ Two streams, one attention. `text` or `latent` is None where the model has no such stream. `predict` names the streams
    whose output is read: in the last block the other one serves only as keys and values. past: [] or [keys, values] of what was read before
    these, (B, H, S, d) each; it grows. """

    def __init__(self, config):
        super().__init__()
        c = config
        self.text = Stream(c.width, c.width, c.heads, c.mlp_ratio, c.dropout) if 'text' in c.streams else None
        self.latent = Stream(c.latent_width, c.width, c.heads, c.mlp_ratio, c.dropout) if 'latent' in c.streams else None

    def forward(self, text, latent, text_mod, latent_mod, cos, sin, mask, predict, past=None):
        q, k, v = [], [], []                                             # latents first: a prefix, should the text be causal
        if latent is not None:
            shift, scale, *latent_rest = self.latent.modulation(latent_mod)
            for parts, part in zip((q, k, v), self.latent.queries_keys_values(latent, shift, scale)):
                parts.append(part)                                       # (B, H, K, d)
        if text is not None:
            shift, scale, *text_rest = self.text.modulation(text_mod)
            tq, tk, tv = self.text.queries_keys_values(text, shift, scale)
            for parts, part in zip((q, k, v), (rotate(tq, cos, sin), rotate(tk, cos, sin), tv)):
                parts.append(part)                                       # (B, H, L, d)
        if past is not None:
            k, v = ([*past[i:i + 1], *parts] for i, parts in enumerate((k, v)))
            past[:] = torch.cat(k, 2), torch.cat(v, 2)
            k, v = past[:1], past[1:]
        attended = attention(torch.cat(q, 2), torch.cat(k, 2), torch.cat(v, 2), mask)  # (B, H, K + L, d)
        attended = attended.transpose(1, 2).flatten(2)                   # (B, K + L, C)
        K = 0 if latent is None else latent.shape[1]
        if 'latent' in predict:
            latent = self.latent.finish(latent, attended[:, :K], *latent_rest)
        if 'text' in predict:
            text = self.text.finish(text, attended[:, K:], *text_rest)
        return text, latent


class Importance(nn.Module):
    """ How important each token of a clean text is, (B, L) -> (B, L) in [0, 1], and what of that is learned, or None: adaptive.py says
    what for. freq reads the table of `rarity`; the network is a two-layer text model with one number per token for a head, 1/2 at the
    start. PAD has 1/2, and MASK in a text that is being written. """

    def __init__(self, kind, vocab_size, seq_len, width=128):
        super().__init__()
        self.kind = kind
        self.register_buffer('rarity', torch.full((vocab_size,), 0.5))   # adaptive.rarity of the training split
        if kind in ('learned', 'hybrid'):
            self.net = Model(ModelConfig(vocab_size=vocab_size, seq_len=seq_len, depth=2, heads=2, width=width, streams=('text',),
                                         text_clock=False))
            self.net.text_head = nn.Linear(width, 1, bias=False)
            nn.init.zeros_(self.net.text_head.weight)

    def forward(self, tokens):
        pad = len(self.rarity) - 1                                       # the last id; MASK comes after it
        rare = self.rarity[tokens.clamp(max=pad)]
        if self.kind == 'freq':
            return rare, None
        learned = self.net(tokens, None, None, None)[0].squeeze(2).sigmoid()
        learned = torch.where(tokens >= pad, 0.5, learned)
        return (learned if self.kind == 'learned' else 0.7 * learned + 0.3 * rare), learned


# ---- the whole

class Model(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        has_text, has_latent = 'text' in c.streams, 'latent' in c.streams
        if has_text:
            self.embed = nn.Embedding(c.vocab_size + 1 + c.clusters, c.width)
            self.text_clock = Clock(c.width) if c.text_clock else None
            self.text_modulation = nn.Linear(c.width, 8 * c.width)       # 6 for the blocks, shift and scale for the head
            self.text_head = nn.Linear(c.width, c.vocab_size, bias=False)
            angles = rotary_angles(c.seq_len, c.width // c.heads)
            self.register_buffer('cos', angles.cos().float(), persistent=False)
            self.register_buffer('sin', angles.sin().float(), persistent=False)
        if has_latent:
            self.latent_in = nn.Linear(c.latent_dim, c.latent_tokens * c.latent_width)
            self.slots = nn.Parameter(torch.empty(c.n_latents * c.latent_tokens, c.latent_width))
            self.latent_clock = Clock(c.width)
            self.latent_modulation = nn.Linear(c.width, 8 * c.latent_width + c.latent_dim * c.bag + 2 * c.shortcut)  # and gates
            self.latent_head = nn.Linear(c.latent_tokens * c.latent_width, c.latent_dim)
            if c.spatial:
                self.register_buffer('grid', grid_positions(c.n_latents, c.latent_width), persistent=False)
        if c.shortcut:
            self.shortcut_in = nn.Linear(c.n_latents * c.latent_dim, c.width, bias=False)
            self.shortcut_out = nn.Linear(c.n_latents * c.latent_dim, c.width, bias=False)
        if c.bag:
            self.bag_values = nn.Embedding(c.vocab_size + 1 + c.clusters, c.n_latents * c.latent_dim)
            self.bag_scores = nn.Embedding(c.vocab_size + 1 + c.clusters, 1)
        self.bias = nn.Parameter(torch.empty(c.width))                   # the conditioning vector's constant part
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        if c.causal:
            K = c.n_latents * c.latent_tokens if has_latent else 0
            S = K + (c.seq_len if has_text else 0)
            may_look = torch.ones(S, S, dtype=torch.bool).tril() | (torch.arange(S) < K)  # any query may see the prefix
            self.register_buffer('causal_mask', may_look, persistent=False)  # latents sit in rows < K: their tril part ends there
        if c.clusters:
            self.register_buffer('cluster_of', torch.zeros(c.vocab_size, dtype=torch.int64))
        self.init_weights()
        self.importance = Importance(c.importance, c.vocab_size, c.seq_len) if c.importance != 'none' else None

    def forward(self, tokens, latents, t_text, t_latent, positions=None, predict=('text', 'latent'), score=None, see=None, past=None):
        """
        tokens (B, L) int64, latents (B, N, D) float, clocks (B,) float; None for a stream that the model has not.
        positions: (P,) int64 indices into the flattened B * L, where the head shall run; None: everywhere.
        predict: the streams whose prediction is wanted; the others only condition.
        score(hidden (P, C), head (V, C)): in place of the logits, what a loss makes of the head without keeping them.
        see(importance, what of it is learned): tokens are clean; what of them the network shall see, and where the head shall run.
        past: a dict that the caller keeps, {} at first, while a causal text grows: of tokens only what came since is read, and the logits
        are those of the last one, (B, V).
        Returns logits (P, V) or (B, L, V), float32, and the latent prediction (B, N, D), float32; None where not wanted.
        """
        if past:
            return self.go_on(tokens, past), None
        c = self.config
        predict = tuple(stream for stream in predict if stream in c.streams)
        text = latent = text_mod = latent_mod = cos = sin = mask = text_final = latent_final = None
        K = 0
        condition = self.bias                                            # (C,), then (B, C)
        if see:
            tokens, positions = see(*self.importance(tokens))
        if 'text' in c.streams:
            L = tokens.shape[1]
            text = self.embed(tokens)                                    # (B, L, C)
            condition = condition.expand(tokens.shape[0], -1)
            if c.text_clock:
                condition = condition + self.text_clock(t_text)
        if 'latent' in c.streams:
            B, N, _ = latents.shape
            latent = self.latent_in(latents).unflatten(2, (c.latent_tokens, c.latent_width))  # (B, N, K/N, C)
            if c.spatial:
                latent = latent + self.grid[:, None]
            latent = latent.flatten(1, 2) + self.slots                   # (B, K, C)
            K = latent.shape[1]
            condition = condition + self.latent_clock(t_latent)
        condition = F.silu(condition)
        if text is not None:
            text_mod, text_final = self.text_modulation(condition).split([6 * c.width, 2 * c.width], dim=1)
            cos, sin = (table[:L].to(text_mod.dtype) for table in (self.cos, self.sin))
        if latent is not None:
            latent_mod, latent_final, bag_gate, *gates = self.latent_modulation(condition).split(
                [6 * c.latent_width, 2 * c.latent_width, c.latent_dim * c.bag] + [1, 1] * c.shortcut, dim=1)
        if c.shortcut:
            way_in, way_out = ((1 + gate) * way(latents.flatten(1))      # (B, C)
                               for gate, way in zip(gates, (self.shortcut_in, self.shortcut_out)))
            text = text + way_in[:, None]
        if c.causal:
            S = K + (0 if text is None else L)
            mask = self.causal_mask[:S, :S]

        pasts = [None if past is None else [] for _ in self.blocks]
        for i, block in enumerate(self.blocks):
            last = i == c.depth - 1
            text, latent = block(text, latent, text_mod, latent_mod, cos, sin, mask, predict if last else c.streams, pasts[i])
        if past is not None:
            past.update(read=L, blocks=pasts, modulation=text_mod, final=text_final, ways=(way_in, way_out) if c.shortcut else (0, 0))
            positions = torch.arange(1, len(tokens) + 1, device=tokens.device) * L - 1

        logits = prediction = None
        if 'text' in predict:
            shift, scale = text_final.chunk(2, dim=1)                    # (B, C)
            text = modulate(text, shift[:, None], scale[:, None])        # (B, L, C)
            if c.shortcut:
                text = text + way_out[:, None]
            if positions is not None or score:
                text = text.flatten(0, 1)
            if positions is not None:
                text = text.index_select(0, positions)                   # (P, C)
            logits = score(text, self.text_head.weight) if score else self.text_head(text).float()  # (P, V) or (B, L, V)
        if 'latent' in predict:
            shift, scale = latent_final.chunk(2, dim=1)
            latent = modulate(latent, shift[:, None], scale[:, None])    # (B, K, C)
            prediction = self.latent_head(latent.reshape(B, N, -1)).float()  # (B, N, D)
            if c.bag:
                prediction = prediction + (1 + bag_gate)[:, None] * self.bag_of(tokens)
        return logits, prediction

    def go_on(self, tokens, past):
        """ Logits (B, V) behind the last of tokens (B, L), of which past['read'] are known (forward's `past`). """
        read, L = past['read'], tokens.shape[1]
        (way_in, way_out), S = past['ways'], past['blocks'][0][0].shape[2] + L - read       # keys, when these are read too
        text = self.embed(tokens[:, read:]) + (way_in[:, None] if self.config.shortcut else 0)
        cos, sin = (table[read:L].to(past['modulation'].dtype) for table in (self.cos, self.sin))
        for block, kv in zip(self.blocks, past['blocks']):
            text, _ = block(text, None, past['modulation'], None, cos, sin, self.causal_mask[S - L + read:S, :S], ('text',), kv)
        past['read'] = L
        return self.text_head(modulate(text[:, -1], *past['final'].chunk(2, dim=1)) + way_out).float()

    def bag_of(self, tokens):
        """ sqrt(L) * sum over l of softmax_l(score[x_l]) * value[x_l]: (B, L) -> (B, N, D). PAD, EOS and MASK have rows like any token
        and learn to weigh little; sqrt(L), L = seq_len, gives an average over that many rows the size of one. """
        share = self.bag_scores(tokens).squeeze(2).softmax(1) * self.config.seq_len ** 0.5                 # (B, L)
        bag = F.embedding_bag(tokens, self.bag_values.weight, per_sample_weights=share, mode='sum')        # (B, N D)
        return bag.unflatten(1, (self.config.n_latents, -1))

    @torch.no_grad()
    def init_weights(self):
        """ Matrices N(0, 1/fan_in); whatever ends a branch is 0, so that each block is the identity, the text prediction
        uniform and the latent prediction 0. """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features ** -0.5)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Stream):
                module.q_gain.fill_(1)
                module.k_gain.fill_(1)
                module.table.zero_()                                     # gates among them
        self.bias.normal_()
        if 'text' in self.config.streams:
            self.embed.weight.normal_()
            self.text_modulation.weight.zero_()
            self.text_head.weight.zero_()
        if 'latent' in self.config.streams:
            self.slots.normal_()
            self.latent_modulation.weight.zero_()
            self.latent_head.weight.zero_()
        if self.config.bag:
            self.bag_values.weight.zero_()
            self.bag_scores.weight.zero_()

    # ---- who trains, at which rate

    def parameter_groups(self):
        """ {'matrices': the trunk's, for Muon or AdamW with decay; 'ends': embeddings, heads and the clocks' and modulation's
        matrices, AdamW with decay; 'vectors': biases, gains, tables, AdamW without}: lists of (name, parameter), frozen ones left out. """
        groups = {'matrices': [], 'ends': [], 'vectors': []}
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            is_matrix = parameter.ndim == 2 and not name.endswith('table') and name != 'slots'
            groups['vectors' if not is_matrix else 'matrices' if name.startswith('blocks.') else 'ends'].append((name, parameter))
        assert sum(map(len, groups.values())) == sum(p.requires_grad for p in self.parameters())
        return groups

    def unreachable(self, predict):
        """ Names of the parameters that no loss on the streams `predict` can reach: the other stream's head (the bag belongs to the
        latents', the shortcut's end to the text's), and in the last block its out-projection, its MLP and the gain of its queries. """
        last = f'blocks.{self.config.depth - 1}.'
        idle = [stream for stream in self.config.streams if stream not in predict]
        prefixes = ['importance.'] if 'text' in idle else []
        prefixes += [p for s in idle for p in (*self.head(s), *(f'{last}{s}.{part}' for part in ('out.', 'up.', 'down.', 'q_gain')))]
        return [name for name, _ in self.named_parameters() if name.startswith(tuple(prefixes))]

    def head(self, stream):
        return {'text': ('text_head.', 'shortcut_out.'), 'latent': ('latent_head.', 'bag_')}[stream]

    def encoder_and_head(self, stream):
        """ Names of the parameters through which a stream comes in and goes out: what freeze='modality' keeps still. """
        prefixes = {'text': ('embed.',), 'latent': ('latent_in.', 'slots', 'shortcut_in.')}[stream] + self.head(stream)
        return [name for name, _ in self.named_parameters() if name.startswith(prefixes)]

    def n_parameters(self):
        return sum(p.numel() for p in self.parameters())

    def flops(self, batch, length, head_positions, predict=('text', 'latent'), training=True):
        """ Floating-point operations of one step: 2 per multiply-add, forward once, backward twice. Only matrix products. """
        c, multiply_adds = self.config, 0
        K = c.n_latents * c.latent_tokens if 'latent' in c.streams else 0
        L = length if 'text' in c.streams else 0
        for stream, rows, width in (('text', L, c.width), ('latent', K, c.latent_width)):
            if stream in c.streams:
                qkv, rest = 3 * width * c.width, width * c.width + 2 * int(c.mlp_ratio * width) * width
                multiply_adds += batch * rows * (c.depth * (qkv + rest) - (rest if stream not in predict else 0))
                multiply_adds += batch * 8 * width * c.width              # modulation
        multiply_adds += c.depth * 2 * batch * (K + L) ** 2 * c.width     # q k', and its product with v
        if c.importance in ('learned', 'hybrid') and 'text' in predict:
            multiply_adds += self.importance.net.flops(batch, length, 0, training=False) // 2
        if 'text' in predict and L:
            multiply_adds += head_positions * c.width * c.vocab_size
        if K:
            multiply_adds += batch * c.latent_dim * c.width * c.bag       # its gate
            if c.shortcut:                                               # two gates, two ways
                multiply_adds += batch * c.width * (2 + 2 * c.n_latents * c.latent_dim)
            ends = batch * c.n_latents * c.latent_dim * c.latent_tokens * c.latent_width
            multiply_adds += ends * (2 if 'latent' in predict else 1)
        return 2 * multiply_adds * (3 if training else 1)
