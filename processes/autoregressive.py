"""
Autoregressive text on the same network.

    -log p(x) = sum over i of -log p(x^i | x^<i)

The network is causal and reads the text one place later, behind MASK.
Letters: B rows, L tokens, P scored positions, V vocabulary.
"""
import math

import torch
import torch.nn.functional as F

from diffusion import MaskedText, positions_of
from model import attention, rotate
from processes.integral import one
from samplers import init_state, no_callback, to_device

# ---- autoregressive

class NextToken:
    """ A causal text: every token and the EOS are scored, PAD is not. lengths (n,): tokens of the training texts. """

    def __init__(self, vocab_size, lengths=None):
        self.mask_id, self.pad, self.lengths = vocab_size, vocab_size - 1, lengths

    def shift(self, tokens):
        """ What is read where x^i is predicted: x^(i-1), and MASK before the first. """
        return F.pad(tokens[:, :-1], (1, 0), value=self.mask_id)

    def corrupt(self, tokens, t, u=None, given=None, exponent=None):
        return self.shift(tokens), tokens != self.pad

    loss_weight, loss = one, MaskedText.loss

    def head_budget(self, rows, length, text_share=1.0, t_min=0.):
        """ 5 sd of the sum of the texts' lengths, and of the number of texts, above its mean: see MaskedText.head_budget. """
        n = torch.as_tensor(self.lengths, dtype=torch.float64).clamp(max=length - 1) + 1
        spread = 5 * math.sqrt(rows) * n.std(correction=0).item() + (2 * n.mean().item() if text_share < 1 else 0)
        return min(rows * length, math.ceil(rows * n.mean().item() * text_share + spread))

    @torch.no_grad()
    def bound(self, model, tokens, latents, t_latent, u=None, given=None):
        """ -log p itself, nats per sample (B,), float64. """
        positions = positions_of(tokens != self.pad)
        zeros = torch.zeros(len(tokens), device=tokens.device)
        logits, _ = model(self.shift(tokens), latents, zeros, t_latent, positions, predict=('text',))
        nll = F.cross_entropy(logits, tokens.flatten()[positions], reduction='none').double()
        return zeros.double().index_add_(0, positions // tokens.shape[1], nll)

    @property
    def samplers(self):
        return {'ancestral': (self.left_to_right, {})}

    def left_to_right(self, denoise, propose, text, tokens, given, steps, rng, on_step=no_callback):
        """ One token after the other; the network keeps the keys and values of what it has read. A text that has its EOS is filled
        with PAD. What is given must stand before what is written. """
        _, masked, _ = init_state(self, tokens, given)
        if (masked[:, :-1].cumsum(1) > 0)[given[:, 1:] & (tokens[:, 1:] < self.pad - 1).cpu()].any():
            raise ValueError('an autoregressive model continues a text: all [MASK] must stand at its end')
        tokens, L = tokens.clone(), tokens.shape[1]
        eos, ended = self.pad - 1, torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for i in masked.any(0).nonzero().flatten().tolist():
            positions = torch.arange(len(tokens)) * L + i
            logits = denoise(self.shift(tokens)[:, :i + 1], 0., positions)
            logits[:, self.pad] = -torch.inf                             # it was never taught: PAD comes after EOS by itself
            x = propose(logits)
            ended = (tokens[:, :i] == eos).any(1) if i else ended
            tokens[:, i] = torch.where(to_device(masked[:, i], tokens), torch.where(ended, self.pad, x), tokens[:, i])
            on_step(tokens)
            if i % 8 == 7 and (ended | (tokens[:, i] == eos)).all():     # looks now and then: on a GPU it waits
                tokens[:, i + 1:] = self.pad
                break
        return tokens


    # ---- decoding with a cache of keys and values

    def decode_step(self, model, tokens, latents, t_text, t_latent, cache):
        """ Logits (B, V), float32, of what comes behind `tokens` (B, L). `cache` is a dict that the caller
        keeps, empty at first. It holds the keys and values of what was read, so that each call reads
        only the tokens that are new. latents and clocks are read in the first call only. """
        c = model.config
        L = tokens.shape[1]
        latent = None
        if not cache:
            text, latent, condition = model.embed_inputs(tokens, latents, t_text, t_latent)
            cache.update(self.conditioning(model, latents, condition), read=0,
                         keys_values=[None] * c.depth)
        else:
            text = model.embed(tokens[:, cache['read']:])                # (B, new, C)
        if c.shortcut:
            text = text + cache['into_text'][:, None]

        # positions, and what each new place may look at: K latents and all places up to itself
        K = c.n_latents * c.latent_tokens if 'latent' in c.streams else 0
        first = cache['read'] + (0 if latent is not None else K)
        modulation = cache['text_modulation']
        cos = model.cos[cache['read']:L].to(modulation.dtype)
        sin = model.sin[cache['read']:L].to(modulation.dtype)
        mask = model.causal_mask[first:K + L, :K + L]

        for i, block in enumerate(model.blocks):
            is_last = i == c.depth - 1
            text, latent, cache['keys_values'][i] = self.block_step(
                block, text, latent, modulation, cache['latent_modulation'], cos, sin, mask,
                cache['keys_values'][i], is_last)
        cache['read'] = L
        hidden = model.finish_text(text, cache['text_final'], cache['into_head'])
        return model.text_head(hidden[:, -1]).float()

    def conditioning(self, model, latents, condition):
        """ What the clocks and the latents give to every step. """
        c = model.config
        found = dict(latent_modulation=None, into_text=None, into_head=None)
        modulation = model.text_modulation(condition)
        found['text_modulation'], found['text_final'] = modulation.split([6 * c.width, 2 * c.width], dim=1)
        if 'latent' in c.streams:
            parts = [6 * c.latent_width, 2 * c.latent_width] + [1, 1] * c.shortcut
            found['latent_modulation'], _, *gates = model.latent_modulation(condition).split(parts, dim=1)
        if c.shortcut:
            found['into_text'], found['into_head'] = model.shortcuts(latents, gates)
        return found

    def block_step(self, block, text, latent, text_modulation, latent_modulation, cos, sin, mask,
                   keys_values, is_last):
        """ model.Block.forward for what is new, beside the keys and values of what was read. """
        keys, values = ([], []) if keys_values is None else ([keys_values[0]], [keys_values[1]])
        queries = []
        if latent is not None:
            shift, scale, *latent_rest = block.latent.modulation(latent_modulation)
            q, k, v = block.latent.queries_keys_values(latent, shift, scale)         # (B, H, K, d)
            queries.append(q)
            keys.append(k)
            values.append(v)
        shift, scale, *text_rest = block.text.modulation(text_modulation)
        q, k, v = block.text.queries_keys_values(text, shift, scale)                 # (B, H, new, d)
        queries.append(rotate(q, cos, sin))
        keys.append(rotate(k, cos, sin))
        values.append(v)
        keys, values = torch.cat(keys, 2), torch.cat(values, 2)

        attended = attention(torch.cat(queries, 2), keys, values, mask)
        attended = attended.transpose(1, 2).flatten(2)
        K = 0 if latent is None else latent.shape[1]
        if latent is not None and not is_last:
            latent = block.latent.finish(latent, attended[:, :K], *latent_rest)
        text = block.text.finish(text, attended[:, K:], *text_rest)
        return text, latent, (keys, values)
