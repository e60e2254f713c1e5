"""
The sides of `bench.py --what=step`: our network and other people's at one shape, each with the
loss of a training step on the same batch.

    ours       model.py with loss.py, as train.py runs them
    diffusers  JointTransformerBlock, the block of Stable Diffusion 3         pip install diffusers
    bert       transformers' BertForMaskedLM: text only, a masked language model
    gpt        transformers' GPT2LMHeadModel: text only, autoregressive

diffusers has blocks without ends or loss. `Ends` adds what its users write around them: embeddings,
clocks, heads over all positions, and the loss
    1/(B L) * sum over masked of 1/t * -log p(x | x_t, z_t)   +   mean squared error of v
bert and gpt compute their own loss: a mean over the masked tokens, and over all tokens. Depth,
width, heads, MLP, tokens and vocabulary are the same for all sides.

Letters: B batch, L text tokens, N latent vectors of D dimensions, C width, V vocabulary.
"""
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from diffusion import GaussianLatents, MaskedText, mode_shares
from loss import BatchMaker, Loss
from model import Model, ModelConfig, TimestepEmbedding

SHAPES = {'small':     dict(depth=6, width=256, heads=4, batch=8, length=128,
                            n_latents=1, latent_dim=384, vocab_size=4096),
          'captions':  dict(depth=8, width=256, heads=4, batch=8, length=40, n_latents=1,
                            latent_dim=384, vocab_size=4096, latent_tokens=8, latent_width=128),
          'gpt2vocab': dict(depth=6, width=384, heads=6, batch=4, length=256,
                            n_latents=8, latent_dim=48, vocab_size=50304)}

# -----------------------------------------------------------------------------
# Each side: (shape, make_batch, autocast) -> the module, and its loss(batch)

class Ends(nn.Module):
    """ What the user of such blocks writes around them.
    blocks: (text (B, L, C), latent (B, N, C), condition (B, C)) -> text, latent. """

    def __init__(self, shape, blocks):
        super().__init__()
        C = shape['width']
        self.embed = nn.Embedding(shape['vocab_size'] + 1, C)
        self.text_positions = nn.Parameter(torch.randn(shape['length'], C) / 50)
        self.latent_in = nn.Linear(shape['latent_dim'], C)
        self.latent_positions = nn.Parameter(torch.randn(shape['n_latents'], C) / 50)
        self.text_clock = TimestepEmbedding(C)
        self.latent_clock = TimestepEmbedding(C)
        self.blocks = blocks
        self.text_norm = nn.LayerNorm(C)
        self.text_head = nn.Linear(C, shape['vocab_size'], bias=False)
        self.latent_norm = nn.LayerNorm(C)
        self.latent_head = nn.Linear(C, shape['latent_dim'])

    def forward(self, batch):
        text = self.embed(batch.x_t) + self.text_positions               # (B, L, C)
        latent = self.latent_in(batch.z_t) + self.latent_positions       # (B, N, C)
        condition = self.text_clock(batch.t_text) + self.latent_clock(batch.t_latent)
        text, latent = self.blocks(text, latent, condition)

        logits = self.text_head(self.text_norm(text)).float()            # (B, L, V)
        v = self.latent_head(self.latent_norm(latent)).float()           # (B, N, D)
        nll = F.cross_entropy(logits.flatten(0, 1), batch.tokens.flatten(), reduction='none')
        nll = nll.view_as(batch.tokens)
        return (batch.mask * nll / batch.t_text[:, None]).mean() + F.mse_loss(v, batch.v)


def ours(shape, make_batch, autocast=None, **_):
    config = ModelConfig(
        vocab_size=shape['vocab_size'],
        seq_len=shape['length'],
        latent_dim=shape['latent_dim'],
        n_latents=shape['n_latents'],
        latent_tokens=shape.get('latent_tokens', 1),
        latent_width=shape.get('latent_width'),
        depth=shape['depth'],
        heads=shape['heads'],
        width=shape['width'])
    model = Model(config)
    if make_batch is None:                                 # samplers.py wants the network alone
        return model, None
    loss = Loss(model, make_batch, autocast)
    return model, lambda batch: loss(batch.ours, ('text', 'latent'))[0]


def diffusers(shape, **_):
    from diffusers.models.attention import JointTransformerBlock

    class Blocks(nn.ModuleList):
        def forward(self, text, latent, condition):
            for block in self:
                latent, text = block(hidden_states=text, encoder_hidden_states=latent,
                                     temb=condition)
            return text, latent

    width, heads = shape['width'], shape['heads']
    blocks = Blocks(JointTransformerBlock(width, heads, width // heads, qk_norm='rms_norm')
                    for _ in range(shape['depth']))
    model = Ends(shape, blocks)
    return model, model


def bert(shape, **_):
    from transformers import BertConfig, BertForMaskedLM
    config = BertConfig(
        vocab_size=shape['vocab_size'] + 1,
        hidden_size=shape['width'],
        num_hidden_layers=shape['depth'],
        num_attention_heads=shape['heads'],
        intermediate_size=4 * shape['width'],
        max_position_embeddings=shape['length'],
        hidden_dropout_prob=0.,
        attention_probs_dropout_prob=0.)
    model = BertForMaskedLM(config)

    def loss(batch):
        labels = torch.where(batch.mask, batch.tokens, -100)             # -100 is not scored
        return model(input_ids=batch.x_t, labels=labels).loss
    return model, loss


def gpt(shape, **_):
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(
        vocab_size=shape['vocab_size'],
        n_positions=shape['length'],
        n_embd=shape['width'],
        n_layer=shape['depth'],
        n_head=shape['heads'],
        use_cache=False,
        resid_pdrop=0.,
        embd_pdrop=0.,
        attn_pdrop=0.)
    model = GPT2LMHeadModel(config)
    return model, lambda batch: model(input_ids=batch.tokens, labels=batch.tokens).loss


SIDES = {'ours': ours, 'diffusers': diffusers, 'bert': bert, 'gpt': gpt}

# -----------------------------------------------------------------------------
# A side with its batch

def random_batch(shape, make_batch, device):
    """ Random tokens and latents, as train.py's mode 'unconditional' corrupts them. """
    B, L, V = shape['batch'], shape['length'], shape['vocab_size']
    tokens = torch.randint(V, (B, L))
    latents = torch.randn(B, shape['n_latents'], shape['latent_dim'])
    data = SimpleNamespace(rows=lambda *_: (tokens, latents), pad=V - 1, seq_len=L)
    stage = SimpleNamespace(shares=mode_shares('unconditional'), predict=('text', 'latent'),
                            seq_len=L)
    b = make_batch(data, range(B), 0, 0, stage)
    b = {name: value.to(device) if torch.is_tensor(value) else value for name, value in b.items()}

    # what `Ends` reads, mixed beforehand; Loss mixes it in every step
    z_t, noise = make_batch.latent_process.corrupt(b['clean'], b['t_latent'], b['noise'])
    v = make_batch.latent_process.target_of(b['clean'], noise, b['t_latent'])
    return SimpleNamespace(
        ours=b,
        tokens=tokens.to(device),
        x_t=b['x_t'],
        mask=b['x_t'] == V,
        z_t=z_t,
        v=v,
        t_text=b['t_text'],
        t_latent=b['t_latent'])


def build(side, shape, device, dtype):
    """ The module of a side, and its loss() on the batch. ImportError: its library is missing. """
    torch.manual_seed(0)

    def autocast():
        device_type = torch.device(device).type
        return torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16')

    text = MaskedText(shape['vocab_size'])
    latent = GaussianLatents(torch.ones(shape['latent_dim'], device=device))
    make_batch = BatchMaker(text, latent, ('text', 'latent'), seed=0, cond_drop=0., t_min=1e-3)
    batch = random_batch(shape, make_batch, device)
    module, loss = SIDES[side](shape=shape, make_batch=make_batch, autocast=autocast)
    module.to(device).train()

    def autocast_loss():
        with autocast():
            return loss(batch)
    return module, autocast_loss
