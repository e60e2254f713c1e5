"""
Sides of `bench.py --what=step`: our network and other people's at one shape, each with the loss of a training step on the same batch.

    ours       model.py with objective.py, as train.py runs them
    diffusers  JointTransformerBlock, the block of Stable Diffusion 3         pip install diffusers
    mmdit      lucidrains' MMDiT                                              pip install mmdit
    bert       transformers' BertForMaskedLM: text only, a masked LM          gpt  GPT2LMHeadModel: text only, autoregressive

The two libraries of blocks have neither ends nor loss: embeddings, clocks, heads over all positions and the loss are written as their
users write them,
    1/(B L) * sum over masked of 1/t * -log p(x | x_t, z_s)   +   mean squared error of v,
bert and gpt compute their own (a mean over masked, over all tokens). Depth, width, heads, MLP, tokens and vocabulary are the same for all.
Letters: B batch, L text tokens, N latent vectors of D dimensions, C width, V vocabulary.
"""
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from diffusion import GaussianLatents, MaskedText, mode_shares
from model import Clock, Model, ModelConfig
from objective import Objective

SHAPES = {'small':     dict(depth=6, width=256, heads=4, batch=8, length=128, n_latents=1, latent_dim=384, vocab_size=4096),
          'gpt2vocab': dict(depth=6, width=384, heads=6, batch=4, length=256, n_latents=8, latent_dim=48, vocab_size=50304)}


class Ends(nn.Module):
    """ What the user of such blocks writes around them. blocks(text (B, L, C), latent (B, N, C), condition (B, C)) -> text, latent. """

    def __init__(self, shape, blocks):
        super().__init__()
        s, C = shape, shape['width']
        self.embed, self.text_positions = nn.Embedding(s['vocab_size'] + 1, C), nn.Parameter(torch.randn(s['length'], C) / 50)
        self.latent_in, self.latent_positions = nn.Linear(s['latent_dim'], C), nn.Parameter(torch.randn(s['n_latents'], C) / 50)
        self.text_clock, self.latent_clock, self.blocks = Clock(C), Clock(C), blocks
        self.text_norm, self.text_head = nn.LayerNorm(C), nn.Linear(C, s['vocab_size'], bias=False)
        self.latent_norm, self.latent_head = nn.LayerNorm(C), nn.Linear(C, s['latent_dim'])

    def forward(self, b):
        text = self.embed(b.tokens_t) + self.text_positions
        latent = self.latent_in(b.z_t) + self.latent_positions
        text, latent = self.blocks(text, latent, self.text_clock(b.t_text) + self.latent_clock(b.t_latent))
        logits, v = self.text_head(self.text_norm(text)).float(), self.latent_head(self.latent_norm(latent)).float()
        nll = F.cross_entropy(logits.flatten(0, 1), b.tokens.flatten(), reduction='none').view_as(b.tokens)
        return (b.mask * nll / b.t_text[:, None]).mean() + F.mse_loss(v, b.v)


def ours(shape, objective, **_):
    s = shape
    model = Model(ModelConfig(s['vocab_size'], s['length'], s['latent_dim'], s['n_latents'], latent_tokens=1, depth=s['depth'],
                              heads=s['heads'], width=s['width']))
    return model, lambda b: objective.losses(model, b.ours, ('text', 'latent'))['loss']


def diffusers(shape, **_):
    from diffusers.models.attention import JointTransformerBlock
    s = shape

    class Blocks(nn.ModuleList):
        def forward(self, text, latent, condition):
            for block in self:
                latent, text = block(hidden_states=text, encoder_hidden_states=latent, temb=condition)
            return text, latent
    model = Ends(s, Blocks(JointTransformerBlock(s['width'], s['heads'], s['width'] // s['heads'], qk_norm='rms_norm')
                           for _ in range(s['depth'])))
    return model, model


def mmdit(shape, as_shipped, **_):
    from mmdit.mmdit_generalized_pytorch import MMDiT
    s = shape
    streams = {} if as_shipped else dict(num_residual_streams=1)         # 4 by default

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = MMDiT(depth=s['depth'], dim_modalities=(s['width'],) * 2, dim_cond=s['width'], heads=s['heads'],
                               dim_head=s['width'] // s['heads'], qk_rmsnorm=True, **streams)

        def forward(self, text, latent, condition):
            return self.stack(modality_tokens=(text, latent), time_cond=condition)
    model = Ends(s, Blocks())
    return model, model


def bert(shape, as_shipped, **_):
    from transformers import BertConfig, BertForMaskedLM
    s = shape
    rates = {} if as_shipped else dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
    model = BertForMaskedLM(BertConfig(vocab_size=s['vocab_size'] + 1, hidden_size=s['width'], num_hidden_layers=s['depth'],
                                       num_attention_heads=s['heads'], intermediate_size=4 * s['width'],
                                       max_position_embeddings=s['length'], **rates))
    return model, lambda b: model(input_ids=b.tokens_t, labels=torch.where(b.mask, b.tokens, -100)).loss


def gpt(shape, as_shipped, **_):
    from transformers import GPT2Config, GPT2LMHeadModel
    s = shape
    rates = {} if as_shipped else dict(resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=s['vocab_size'], n_positions=s['length'], n_embd=s['width'], n_layer=s['depth'],
                                       n_head=s['heads'], use_cache=False, **rates))
    return model, lambda b: model(input_ids=b.tokens, labels=b.tokens).loss


SIDES = dict(ours=ours, diffusers=diffusers, mmdit=mmdit, bert=bert, gpt=gpt)


def build(side, shape, device, dtype, as_shipped=False):
    """ The module, its loss(batch), and a batch: random tokens and latents as train.py's joint mode corrupts them. ImportError where
    the library is missing. """
    torch.manual_seed(0)
    s, (B, L) = shape, (shape['batch'], shape['length'])
    text, latent = MaskedText(s['vocab_size']), GaussianLatents(torch.ones(s['latent_dim'], device=device))

    def autocast():
        return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == 'bfloat16')
    objective = Objective(text, latent, ('text', 'latent'), device, autocast, seed=0, cond_drop=0.,
                          latent_noise=0., latent_weight=1., t_min=1e-3)
    tokens, z = torch.randint(s['vocab_size'], (B, L)), torch.randn(B, s['n_latents'], s['latent_dim'])
    stage = SimpleNamespace(shares=mode_shares('unconditional', ()), predict=('text', 'latent'), seq_len=L,
                            budget=text.head_budget(B, L))
    data = SimpleNamespace(rows=lambda *_: (tokens, z), tokenizer=SimpleNamespace(pad=s['vocab_size'] - 1))
    b = objective.batch(data, range(B), 0, 0, B, stage)
    b = {name: value.to(device) for name, value in b.items()}
    z_t, e = latent.corrupt(b['clean'], b['t_latent'], b['noise'])
    batch = SimpleNamespace(ours=b, tokens=tokens.to(device), tokens_t=b['tokens'], mask=b['tokens'] == s['vocab_size'], z_t=z_t,
                            v=latent.target_of(b['clean'], e, b['t_latent']), t_text=b['t_text'], t_latent=b['t_latent'])
    module, loss = SIDES[side](shape=s, objective=objective, as_shipped=as_shipped)
    module.to(device).train()

    def autocast_loss():
        with autocast():
            return loss(batch)
    return module, autocast_loss
