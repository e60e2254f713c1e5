"""
One training of masked captions, and its bound: what makes MDLM's network learn faster than ours?

MDLM is a clone of github.com/kuleshov-group/mdlm (c112c52), in the folder mdlm; its network needs
`pip install einops`. RAW holds the captions (docs/results.md).

    python prepare.py config/captions.py --encoder=none --out=data/captions_text \
        --input="RAW/train.*.en.gz" --val_input="RAW/val.*.en.gz"
    python benchmarks/mdlm.py VARIANT OPT SEED STEPS OUT.jsonl

OPT: muon, the recipe of config/captions.py, or adamw, at 1e-3 (docs/peers.md). Appends a line of
JSON. VARIANT: base, ours; mdlm, MDLM's own DIT; or changes, joined by +:
    n<s>            matrices of the blocks and embeddings N(0, s^2)
    w<c> e<c> b<c>  matrices, embeddings, the constant of the conditioning vector, times c; wqkv<c>
                    and the like: only those
    wtorch etorch   as nn.Linear does it, and as MDLM does its embeddings
    enorm           embeddings are normed once they are read
    ada             a modulation of each block beside the shared one; const: none is shared
    gelu hbias mbias gain noqk   GELU; biases of head and MLP; no norm of queries and keys
    g<c> h<s>       gates begin at c; head N(0, s^2)
    lr<c> elr<c> mlr<c> wd<c> f32   rates of all, of embeddings, of Muon, decay, times c; float32
All were run on one H200 (torch 2.11, a CUDA graph of forward and backward): results/mdlm.json.
"""
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

began = time.perf_counter()
sys.path.insert(0, os.getcwd())
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import model as ours
from data import PackedDataset
from diffusion import MaskedText, uniforms
from loss import BatchMaker
from runs.muon import Muon
from runs.stages import lr_factor, read_stages, row_order
from tasks.common import chosen_rows

variant, opt_name, seed, steps, out = sys.argv[1:6]
seed, steps = int(seed), int(steps)
words = variant.split('+')
device = 'cuda' if torch.cuda.is_available() else 'cpu'
if device == 'cpu':
    torch.set_num_threads(1)
dtype = os.environ.get('BIS_DTYPE') or ('bfloat16' if device == 'cuda' else 'float32')
bf16 = dtype == 'bfloat16' and 'f32' not in words
N_EVAL = int(os.environ.get('BIS_EVAL', 1000))

# ---- data

data = PackedDataset('data/captions_text', 'train')
val = PackedDataset('data/captions_text', 'val')
V, L, pad = data.vocab_size, data.seq_len, data.pad
val = val.rows(chosen_rows(len(val), N_EVAL, 0))[0]

# ---- the recipe

if opt_name.startswith('muon'):
    c = dict(learning_rate=3e-3, weight_decay=.5, betas=(.9, .95), warmup_iters=200, min_lr=0.,
             ema_decay=.999, t_min=.1)
else:
    c = dict(learning_rate=1e-3, weight_decay=0., betas=(.9, .999), warmup_iters=100, min_lr=1.,
             ema_decay=.99, t_min=1e-3)
c.update(max_iters=steps)
SHAPE = dict(width=int(os.environ.get('BIS_WIDTH', 128)),
             depth=int(os.environ.get('BIS_DEPTH', 4)), heads=4)
if os.environ.get('BIS_TMIN'):
    c['t_min'] = float(os.environ['BIS_TMIN'])


def number(name, default=None):
    """ The number of the word name<number> in the variant. """
    for word in words:
        found = re.fullmatch(re.escape(name) + r'(\d*\.?\d+(?:e-?\d+)?)', word)
        if found:
            return float(found[1])
    return default


c['learning_rate'] *= number('lr', 1)
c['weight_decay'] *= number('wd', 1)

# ---- the networks

class Base(ours.Model):
    """ Ours: text alone, clock not read. Words of the variant change one thing each. """

    def tweak(self):
        C = self.config.width
        with torch.no_grad():
            w = number('w', 1)
            for block in self.blocks:
                s = block.text
                for name in ('qkv', 'out', 'up', 'down'):
                    getattr(s, name).weight.mul_(w * number('w' + name, 1))
                # torch's own rule of nn.Linear
                if 'wtorch' in words:
                    for name in ('qkv', 'out', 'up', 'down'):
                        getattr(s, name).reset_parameters()
                g = number('g', 0)
                s.scale_shift_table[2] += g
                s.scale_shift_table[5] += g
            self.embed.weight.mul_(number('e', 1))
            if 'etorch' in words:
                bound = C ** -.5
                self.embed.weight.uniform_(-bound, bound)
            if number('n') is not None:                    # GPT-2's rule
                for name, p in self.named_parameters():
                    if is_block_matrix(name, p) and 'table' not in name or 'embed' in name:
                        p.normal_(std=number('n'))
            if number('h') is not None:
                self.text_head.weight.normal_(std=number('h'))
            self.bias.mul_(number('b', 1))
        if 'mbias' in words:
            for block in self.blocks:
                s = block.text
                s.up = biased(s.up)
                s.down = biased(s.down)
        if 'ada' in words:                                 # modulation of each block, as MDLM
            self.ada = nn.ModuleList(nn.Linear(C, 6 * C) for _ in self.blocks)
            for one in self.ada:
                nn.init.zeros_(one.weight)
                nn.init.zeros_(one.bias)
        if 'const' in words:                               # the tables alone
            self.text_modulation.weight.requires_grad_(False)
            self.text_modulation.bias.requires_grad_(False)
            self.final = nn.Parameter(torch.zeros(2 * C))
            self.bias.requires_grad_(False)
        if 'hbias' in words:
            self.head_bias = nn.Parameter(torch.zeros(V))
        if 'gain' in words:
            self.gains = nn.Parameter(torch.ones(self.config.depth, 2, C))

    def hidden(self, tokens):
        read, (B, L) = tokens, tokens.shape
        text, _, condition = self.embed_inputs(read, None, None, None)
        if 'enorm' in words:
            text = ours.rms_norm(text)
        mod, final = self.split_text_modulation(condition)
        if 'const' in words:
            final = self.final.expand(B, -1).to(mod.dtype)
        cos, sin = self.cos[:L].to(mod.dtype), self.sin[:L].to(mod.dtype)
        for i, block in enumerate(self.blocks):
            m = self.ada[i](condition) if 'ada' in words else mod
            text, _ = block(text, None, m, None, cos, sin, 0, ('text',))
        return self.finish_text(text, final)

    def logits(self, tokens, positions=None):
        h = self.hidden(tokens).flatten(0, 1)
        if positions is not None:
            h = h.index_select(0, positions)
        found = F.linear(h, self.text_head.weight).float()
        return found + self.head_bias if 'hbias' in words else found

    def groups(self):
        g = self.parameter_groups()
        return g['matrices'], g['embeddings_and_heads'], g['vectors']


def biased(layer):
    new = nn.Linear(layer.in_features, layer.out_features)
    new.weight = layer.weight
    nn.init.zeros_(new.bias)
    return new


if 'gelu' in words:
    ours.squared_relu = lambda x: F.gelu(x, approximate='tanh')
if 'relu' in words:
    ours.squared_relu = F.relu
if 'noqk' in words:                                        # no norm of queries and keys
    ours.rms_norm = lambda x: x


def mdlm_module():
    """ MDLM's models/dit.py, with PyTorch in place of flash_attn. """
    def stand_in(name, **contents):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
        return sys.modules[name]

    def rotary(qkv, cos, sin):
        q, k, v = qkv.unbind(2)
        cos, sin = cos[:, None], sin[:, None]
        return torch.stack([ours.rotate(q, cos, sin), ours.rotate(k, cos, sin), v], 2)

    def full_attention(qkv, cu_seqlens, length, dropout_p, causal):
        q, k, v = qkv.unflatten(0, (-1, length)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)

    layers = stand_in('flash_attn.layers', rotary=stand_in('flash_attn.layers.rotary',
                                                           apply_rotary_emb_qkv_=rotary))
    stand_in('flash_attn', layers=layers, flash_attn_interface=SimpleNamespace(
        flash_attn_varlen_qkvpacked_func=full_attention))
    stand_in('omegaconf')
    stand_in('huggingface_hub', PyTorchModelHubMixin=type('Mixin', (), {}))

    # without the fusion of jit, which a CUDA graph does not take. Scripted, modulate is the first
    # of the two functions of that name
    text = Path('mdlm/models/dit.py').read_text()
    text = re.sub(r'^torch\._C.*$|^@torch.jit.script$', '', text, flags=re.M)
    text = text.replace('torch.cuda.amp.autocast(enabled=False)',
                        'torch.autocast("cuda", enabled=False)')
    text = text.replace('  return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)',
                        '  return x * (1 + scale) + shift')
    text = text.replace('dtype=torch.float32)\n      / half).to(device=t.device)',
                        'dtype=torch.float32, device=t.device)\n      / half)')
    dit = ModuleType('dit')
    exec(text, vars(dit))
    return dit


class Theirs(nn.Module):

    def __init__(self):
        super().__init__()
        sizes = SimpleNamespace(hidden_size=SHAPE['width'], cond_dim=128, n_blocks=SHAPE['depth'],
                                n_heads=SHAPE['heads'], dropout=0.0, scale_by_sigma=True, length=L)
        self.net = mdlm_module().DIT(SimpleNamespace(model=sizes), vocab_size=V + 1)

    def tweak(self):
        """ Words as of ours, on top of mdlm. """
        with torch.no_grad():
            if number('e') is not None:
                self.net.vocab_embed.embedding.normal_(std=number('e'))
            if number('n') is not None:
                for name, p in self.named_parameters():
                    if is_block_matrix(name, p) or 'vocab_embed' in name:
                        p.normal_(std=number('n'))
            if number('w') is not None:                    # matrices N(0, 1/fan_in) times w
                for name, p in self.net.named_parameters():
                    if is_block_matrix(name, p):
                        p.normal_(std=number('w') * p.shape[1] ** -.5)

    def logits(self, tokens, positions=None):
        net = self.net
        x = net.vocab_embed(tokens)
        cond = F.silu(net.sigma_map(torch.zeros(len(tokens), device=tokens.device)))
        cos_sin = net.rotary_emb(x)
        for block in net.blocks:
            x = block(x, cos_sin, cond, seqlens=None)
        x = x.flatten(0, 1)
        if positions is not None:
            x = x.index_select(0, positions)
        return net.output_layer(x[None], cond[:1])[0, :, :V].float()

    def groups(self):
        matrices, others, vectors = [], [], []
        for name, p in self.named_parameters():
            if is_block_matrix(name, p):
                matrices.append((name, p))
            elif p.ndim == 2:
                others.append((name, p))
            else:
                vectors.append((name, p))
        return matrices, others, vectors


def is_block_matrix(name, p):
    return 'blocks.' in name and p.ndim == 2 and 'adaLN' not in name


torch.manual_seed(seed)
if 'mdlm' in words:
    net = Theirs()
else:
    net = Base(ours.ModelConfig(vocab_size=V, seq_len=L, streams=('text',), text_clock=False,
                                **SHAPE))
net.tweak()
net.to(device)
params = [p for p in net.parameters() if p.requires_grad]

matrices, others, vectors = net.groups()
rate_of_embed = number('elr', 1)
embed = [(n, p) for n, p in others if 'embed' in n]
others = [(n, p) for n, p in others if 'embed' not in n]
if not opt_name.startswith('muon'):
    others = others + matrices
wd = c['weight_decay']
adamw = torch.optim.AdamW([dict(params=[p for _, p in others if p.requires_grad], weight_decay=wd),
                           dict(params=[p for _, p in embed], weight_decay=wd),
                           dict(params=[p for _, p in vectors if p.requires_grad],
                                weight_decay=0.)],
                          lr=c['learning_rate'], betas=c['betas'], fused=True)
scales, optimizers = [1, rate_of_embed, 1], [adamw]
if opt_name.startswith('muon'):
    muon = Muon([p for _, p in matrices], c['learning_rate'], wd, 0,
                torch.bfloat16 if bf16 else torch.float32)
    muon.found_inf = torch.zeros((), device=device)
    optimizers.append(muon)
muon_scale = number('mlr', 1)

# ---- batches and loss

text_process = MaskedText(V)
make = BatchMaker(text_process, None, ('text',), seed, .1, c['t_min'])
stage, = read_stages('unconditional', '', ('text',), steps, L)
B = 64


def batch_of(step):
    """ x_t, targets (B, L) and weight (B, L), or on a CPU the scored positions alone. """
    b = make(data, row_order(len(data), seed, step * B, B), step, 0, stage)
    if device == 'cpu':
        return b['x_t'], b['positions'], b['targets'], b['weight']
    targets, weight = torch.zeros(B * L, dtype=torch.int64), torch.zeros(B * L)
    targets[b['positions']], weight[b['positions']] = b['targets'], b['weight']
    return b['x_t'], None, targets, weight


def loss_of(x_t, positions, targets, weight):
    with torch.autocast(device, torch.bfloat16, enabled=bf16, cache_enabled=device == 'cpu'):
        logits = net.logits(x_t, positions)
    return (weight * F.cross_entropy(logits, targets, reduction='none')).sum()


# on a card the forward and the backward are one CUDA graph
graph = static = static_loss = None
if device == 'cuda' and not os.environ.get('BIS_EAGER'):
    try:
        x_t, _, targets, weight = batch_of(0)
        static = [x_t.cuda(), targets.cuda(), weight.cuda()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                net.zero_grad(set_to_none=True)
                loss_of(static[0], None, *static[1:]).backward()
        torch.cuda.current_stream().wait_stream(side)
        net.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static_loss = loss_of(static[0], None, *static[1:])
            static_loss.backward()
    except Exception as error:
        print('no graph:', variant, repr(error)[:300], file=sys.stderr, flush=True)
        os.environ['BIS_EAGER'] = '1'
        os.execv(sys.executable, [sys.executable, *sys.argv])

# ---- the training, as in train.py

net.train()
ema = [p.detach().clone() for p in params]
curve, total = [], torch.zeros((), device=device)
trained_from = time.perf_counter()
for step in range(steps):
    found = batch_of(step)
    if graph is not None:
        for old, new in zip(static, (found[0], *found[2:])):
            old.copy_(new)
        graph.replay()
        loss = static_loss
    else:
        x_t, positions, targets, weight = (x if x is None else x.to(device) for x in found)
        net.zero_grad(set_to_none=True)
        loss = loss_of(x_t, positions, targets, weight)
        loss.backward()
    total += loss.detach()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    rate = c['learning_rate'] * lr_factor(c, step)
    for opt in optimizers:
        for i, group in enumerate(opt.param_groups):
            group['lr'] = rate * (scales[i] if opt is adamw else muon_scale)
        opt.step()
    with torch.no_grad():
        d = min(c['ema_decay'], (2 + step) / (11 + step))
        torch._foreach_lerp_(ema, params, 1 - d)
    if (step + 1) % 100 == 0:
        curve.append(round(total.item() / 100, 3))
        total.zero_()
seconds = time.perf_counter() - trained_from

# ---- the bound on the validation texts, with 8 draws, float32, averaged weights

with torch.no_grad():
    for p, e in zip(params, ema):
        p.copy_(e)
net.eval()


class Adapter:
    """ As MaskedText.bound calls a network. """

    def __call__(self, tokens, latents, t_text, t_latent, positions, **_):
        return net.logits(tokens, positions), None

    @staticmethod
    def text_head(logits):
        return logits


draws, n = 8, len(val)


def spread_clocks(seed, n, k, draws):
    return (uniforms(seed, 0, 'evaluation clock', 0, n, 1)[:, 0] + k / draws) % 1


nats = torch.zeros(n, dtype=torch.float64)
with torch.inference_mode():
    for k in range(draws):
        u = uniforms(0, k, 'evaluation', 0, n, 1 + L)
        u[:, 0] = spread_clocks(0, n, k, draws)
        for i in range(0, n, 128):
            rows = slice(i, i + 128)
            ones = torch.ones(len(val[rows]), device=device)
            nats[rows] += text_process.bound(Adapter(), val[rows], None, ones, u[rows]) / draws
n_real = (val != pad).sum(1)
ratio = (nats.sum() / n_real.sum()).item()
se = ((nats - ratio * n_real).std() * math.sqrt(n) / n_real.sum()).item()
with torch.no_grad():
    sizes = {name: round(p.float().square().mean().sqrt().item(), 4)
             for name, p in net.named_parameters() if 'block' not in name or '.0.' in name}
line = dict(variant=variant, opt=opt_name, seed=seed, steps=steps, bound=ratio, se=se,
            parameters=sum(p.numel() for p in params), seconds=round(seconds, 1),
            all_seconds=round(time.perf_counter() - began, 1), device=device,
            graph=graph is not None, curve=curve, rms=sizes,
            env={k: v for k, v in os.environ.items() if k.startswith('BIS_')})
line['nats'] = [round(x, 2) for x in nats.tolist()]
file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)          # one write: many processes append
os.write(file, (json.dumps(line) + '\n').encode())
os.close(file)
print(variant, opt_name, seed, steps, f'{ratio:.4f} +- {se:.4f}', f'{seconds:.0f} s', flush=True)
