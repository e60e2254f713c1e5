"""
Text written from left to right, by a network that has learned causal rows (mode='causal', alone or
among others): one token after the other, with a cache of keys and values.

Letters: B rows, L tokens, P positions, V vocabulary, K latent tokens, C width, H heads, d = C / H.
"""
import torch
import torch.nn.functional as F

from diffusion import exact_nll, to_device
from model import attention, causal_mask, in_autocast_dtype, rotate
from samplers import init_state, no_callback


class LeftToRight:
    """ The process that a causal row is of, as sampling asks it: compare processes/__init__.py.
    eos: where writing ends. """

    def __init__(self, vocab_size, eos):
        self.mask_id = vocab_size
        self.pad = vocab_size - 1
        self.eos = eos

    def bound(self, model, tokens, latents, t_latent, u=None, known_mask=None):
        """ -log p itself, nats per sample (B,), float64. """
        return exact_nll(model, tokens, latents, t_latent)

    def shift(self, tokens):
        """ What is read where x^i is predicted: x^(i-1), and MASK before the first. """
        return F.pad(tokens[:, :-1], (1, 0), value=self.mask_id)

    @property
    def samplers(self):
        return {'autoregressive': self.left_to_right}

    def left_to_right(self, denoise, propose, text, tokens, known_mask, steps, rng,
                      on_step=no_callback):
        """ One token after the other. A text that has its EOS is filled with PAD. What is known
        must stand before what is written. """
        _, masked, _ = init_state(self, tokens, known_mask)
        self.check_known(tokens, masked, known_mask)
        tokens = tokens.clone()
        B, L = tokens.shape
        ended = torch.zeros(B, dtype=torch.bool, device=tokens.device)   # has its EOS
        for i in masked.any(0).nonzero().flatten().tolist():
            # x^i given what is before it. PAD was never learned: it follows EOS by rule
            positions = torch.arange(B) * L + i
            logits = denoise(self.shift(tokens)[:, :i + 1], 0., positions)[:]        # (B, V)
            logits[:, self.pad] = -torch.inf
            x = propose(logits)                                          # (B,)

            # write it where the text has not ended and the position is free
            if i > 0:
                ended = (tokens[:, :i] == self.eos).any(1)
            x = torch.where(ended, self.pad, x)
            tokens[:, i] = torch.where(to_device(masked[:, i], tokens), x, tokens[:, i])

            # every eighth step: have all texts ended? On a GPU the question waits for the device
            is_last = i % 8 == 7 and bool((ended | (tokens[:, i] == self.eos)).all())
            if is_last:
                tokens[:, i + 1:] = self.pad
            on_step(tokens, logits, positions)
            if is_last:
                break
        return tokens

    def check_known(self, tokens, masked, known_mask):
        """ ValueError where a known token (not EOS or PAD) stands behind a position to write. """
        behind = masked[:, :-1].cumsum(1) > 0                            # (B, L - 1)
        is_end = (tokens[:, 1:] == self.eos) | (tokens[:, 1:] == self.pad)
        known_token = known_mask[:, 1:] & ~is_end.cpu()
        if (behind & known_token).any():
            raise ValueError('an autoregressive model continues a text: '
                             'all [MASK] must stand at its end')

    # ---- decoding with a cache of keys and values

    def decode_step(self, model, tokens, latents, t_text, t_latent, cache):
        """
        Logits (B, V), float32, of the token after `tokens` (B, L).
        cache: a dict that the caller keeps, empty at first. It holds the keys and values of what
        was read, so each call reads only the new tokens. Latents and clocks are read in the first
        call.
        """
        c = model.config
        L = tokens.shape[1]
        latent = None
        if not cache:
            text, latent, condition = model.embed_inputs(tokens, latents, t_text, t_latent)
            cache.update(self.conditioning(model, latents, condition), read=0,
                         keys_values=[None] * c.depth)
        else:
            text = in_autocast_dtype(model.embed(tokens[:, cache['read']:]))         # (B, new, C)
        if c.shortcut:
            text = text + cache['into_text'][:, None]

        # positions, and what each new one may look at: K latents and all positions up to itself
        K = c.n_latents * c.latent_tokens if 'latent' in c.streams else 0
        first = cache['read'] + (0 if latent is not None else K)
        modulation = cache['text_modulation']
        cos = model.cos[cache['read']:L].to(modulation.dtype)
        sin = model.sin[cache['read']:L].to(modulation.dtype)
        is_one = latent is None and L == cache['read'] + 1           # it may look at everything
        mask = None if is_one else causal_mask(K, L, tokens.device)[first:]

        # the blocks, and the head at the last position
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
        found['text_modulation'], found['text_final'] = model.split_text_modulation(condition)
        if 'latent' in c.streams:
            parts = model.split_latent_modulation(condition)
            found['latent_modulation'], _, _, *gates = parts
        if c.shortcut:
            found['into_text'], found['into_head'] = model.shortcuts(latents, gates)
        return found

    def block_step(self, block, text, latent, text_modulation, latent_modulation, cos, sin, mask,
                   keys_values, is_last):
        """ model.Block.forward for the new positions, which also look at the cached keys
        and values. """
        queries, keys, values = [], [], []
        if keys_values is not None:
            keys.append(keys_values[0])
            values.append(keys_values[1])

        # the latents, in the first call only
        if latent is not None:
            shift, scale, *latent_rest = block.latent.modulation(latent_modulation)
            q, k, v = block.latent.queries_keys_values(latent, shift, scale)     # (B, H, K, d)
            queries.append(q)
            keys.append(k.to(v.dtype))
            values.append(v)

        # the new tokens; keys are kept in the precision in which attention reads them
        shift, scale, *text_rest = block.text.modulation(text_modulation)
        q, k, v = block.text.queries_keys_values(text, shift, scale)     # (B, H, new, d)
        queries.append(rotate(q, cos, sin))
        keys.append(rotate(k, cos, sin).to(v.dtype))
        values.append(v)

        # one attention over all
        keys = torch.cat(keys, 2)
        values = torch.cat(values, 2)
        attended = attention(torch.cat(queries, 2), keys, values, mask)
        attended = attended.transpose(1, 2).flatten(2)

        K = 0 if latent is None else latent.shape[1]
        if latent is not None and not is_last:
            latent = block.latent.finish(latent, attended[:, :K], *latent_rest)
        text = block.text.finish(text, attended[:, K:], *text_rest)
        return text, latent, (keys, values)
