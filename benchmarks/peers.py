"""
Our network and transformers' of the same depth, width, heads, tokens and vocabulary, with the loss
of a training step on the same batch: the sides of `bench.py --what=step`.

    ours       model.py with diffusion.Loss, as train.py runs them
    bert       BertForMaskedLM: text only, a masked language model
    gpt        GPT2LMHeadModel: text only, from left to right

The loss of bert is a mean over the masked tokens, and of gpt over all tokens.
Letters: B batch, L text tokens, V vocabulary.
"""
from types import SimpleNamespace

import torch

from data import Rows
from diffusion import GaussianLatents, Loss, MaskedText, Noising, mode_shares
from model import Model, ModelConfig

SHAPES = {'small':     dict(depth=6, width=256, heads=4, batch=8, length=128,
                            n_latents=1, latent_dim=384, vocab_size=4096),
          'captions':  dict(depth=8, width=256, heads=4, batch=8, length=40, n_latents=1,
                            latent_dim=384, vocab_size=4096, latent_tokens=8, latent_width=128),
          'gpt2vocab': dict(depth=6, width=384, heads=6, batch=4, length=256,
                            n_latents=8, latent_dim=48, vocab_size=50304)}


def our_network(shape):
    return Model(ModelConfig(
        vocab_size=shape['vocab_size'],
        seq_len=shape['length'],
        latent_dim=shape['latent_dim'],
        n_latents=shape['n_latents'],
        latent_tokens=shape.get('latent_tokens', 1),
        latent_width=shape.get('latent_width'),
        depth=shape['depth'],
        heads=shape['heads'],
        width=shape['width']))


def bert_network(shape):
    from transformers import BertConfig, BertForMaskedLM

    # its MASK is the id V, as ours, so it has an id more. No dropout: ours has none either
    return BertForMaskedLM(BertConfig(
        vocab_size=shape['vocab_size'] + 1,
        hidden_size=shape['width'],
        num_hidden_layers=shape['depth'],
        num_attention_heads=shape['heads'],
        intermediate_size=4 * shape['width'],
        max_position_embeddings=shape['length'],
        hidden_dropout_prob=0.,
        attention_probs_dropout_prob=0.))


def gpt_network(shape):
    from transformers import GPT2Config, GPT2LMHeadModel

    # a position more than tokens: to write, it begins with a token that stands for nothing
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=shape['vocab_size'],
        n_positions=shape['length'] + 1,
        n_embd=shape['width'],
        n_layer=shape['depth'],
        n_head=shape['heads'],
        resid_pdrop=0.,
        embd_pdrop=0.,
        attn_pdrop=0.))


def random_batch(shape, noising, device):
    """ Random tokens (B, L), and their batch as train.py's mode 'unconditional' corrupts it. """
    B, L, V = shape['batch'], shape['length'], shape['vocab_size']

    # what the tokens are changes no time, so they are drawn evenly
    tokens = torch.randint(V, (B, L))
    latents = torch.randn(B, shape['n_latents'], shape['latent_dim'])
    rows = Rows(tokens, latents, is_cut=False, step=0, first=0)
    batch = noising(rows, mode_shares('unconditional'), SimpleNamespace(eos=V - 2, pad=V - 1))
    return tokens.to(device), batch.to(device)


def build(side, shape, device, dtype):
    """ The module of a side, and its loss() on the batch. """
    # the same seed for each side, so all read the same batch
    torch.manual_seed(0)
    text = MaskedText(shape['vocab_size'])
    latent = GaussianLatents(torch.ones(shape['latent_dim'], device=device))
    noising = Noising(text, latent, ('text', 'latent'), cond_drop=0.)
    tokens, batch = random_batch(shape, noising, device)
    labels = torch.where(batch.x_t == text.mask_id, tokens, -100)        # -100 is not scored

    # the side, and its loss on this batch: bert reads x_t, gpt the tokens themselves
    module = SIDES[side](shape).to(device).train()
    ours = Loss(module, noising, dtype) if side == 'ours' else None
    device_type = torch.device(device).type

    def loss():
        if side == 'ours':
            return ours(batch, ('text', 'latent')).loss
        with torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16'):
            if side == 'bert':
                return module(input_ids=batch.x_t, labels=labels).loss
            return module(input_ids=tokens, labels=tokens, use_cache=False).loss
    return module, loss


SIDES = {'ours': our_network, 'bert': bert_network, 'gpt': gpt_network}
