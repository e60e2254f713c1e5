"""
Text written from left to right, by a network that has learned causal rows (mode='causal', alone or
among others): one token after the other, with a cache of keys and values.

Letters: B rows, L tokens, P positions, V vocabulary, K latent tokens, C width, H heads, d = C / H.
"""
import math
from functools import lru_cache

import torch
import torch.nn.functional as F

from diffusion import exact_nll, to_device
from model import attention, causal_mask, pad_of
from samplers import init_state, no_callback


class LeftToRight:
    """ The process that a causal row is of, as sampling asks it: compare processes/__init__.py.
    eos: where writing ends. """

    def __init__(self, vocab_size, eos):
        self.mask_id = vocab_size
        self.pad = pad_of(vocab_size)
        self.eos = eos

    def bound(self, model, tokens, latents, t_latent, u=None, known_mask=None):
        """ -log p itself, nats per sample (B,), float64. """
        return exact_nll(model, tokens, latents, t_latent, known_mask)

    def shift(self, tokens):
        """ What is read where x^i is predicted: x^(i-1), and MASK before the first. """
        return F.pad(tokens[:, :-1], (1, 0), value=self.mask_id)

    @property
    def samplers(self):
        return {'autoregressive': self.left_to_right, 'speculative': self.speculative}

    def left_to_right(self, denoise, propose, text, tokens, known_mask, steps, rng,
                      on_step=no_callback, **knobs):
        """ One token after the other; `text`, `steps` and `rng` are not read. A text that has its
        EOS is filled with PAD. What is known behind a token stays, unseen until then. """
        _, masked, _ = init_state(self, tokens, known_mask)
        tokens = tokens.clone()
        B, L = tokens.shape
        ended = torch.zeros(B, dtype=torch.bool, device=tokens.device)   # has its EOS
        for i in masked.any(0).nonzero().flatten().tolist():
            # x^i given what is before it. PAD was never learned: it follows EOS by rule
            positions = torch.arange(B) * L + i
            logits = denoise(self.shift(tokens)[:, :i + 1], 0., positions)           # (B, V)
            logits[:, self.pad] = -torch.inf
            x = propose(logits)                                          # (B,)

            # write it where the text has not ended and the position is free
            if i > 0:
                ended = (tokens[:, :i] == self.eos).any(1)
            x = torch.where(ended, self.pad, x)
            tokens[:, i] = torch.where(to_device(masked[:, i], tokens), x, tokens[:, i])

            # have all texts ended? On a card the question waits for the device: every eighth step
            asks = i % 8 == 7 or not tokens.is_cuda
            is_last = asks and bool((ended | (tokens[:, i] == self.eos)).all())
            if is_last:
                rest = to_device(masked[:, i + 1:], tokens)
                tokens[:, i + 1:] = torch.where(rest, self.pad, tokens[:, i + 1:])
            on_step(tokens, logits, positions)
            if is_last:
                break
        return tokens

    def speculative(self, denoise, propose, text, tokens, known_mask, steps, rng,
                    on_step=no_callback, n_guesses=2, **knobs):
        """
        The same law in fewer calls: tokens are guessed, and one call checks G guesses.
            x^i ~ p(x^i | x^<i)    as in left_to_right, for the next token and behind each guess
        These stand up to the first one that is not what was guessed there, itself included. So what
        stands is a draw of the decoder, whatever the guesses were. It is the rule of speculative
        sampling (arXiv:2211.17192), for guesses that are certain of themselves.
        The same call guesses anew, as in TiDAR (arXiv:2511.08923): behind the next token, and
        behind each guess, stand G MASKs. The guess there is the likeliest token.
        """
        G = n_guesses
        B, L = tokens.shape
        offset, _, _ = fan(G, tokens.device)                             # (W,)
        row = torch.arange(B, device=tokens.device)
        column = torch.arange(G + 1, device=tokens.device)

        # seen (B, L + 2 G + 1): what is written, guesses, MASK, and room behind the text
        _, masked, _ = init_state(self, tokens, known_mask)
        free = to_device(F.pad(masked, (0, 2 * G + 1)), tokens)
        seen = F.pad(tokens, (0, 2 * G + 1), value=self.pad)

        # the first so many tokens of each text are written; those of a beginning are read at once
        first = free.int().argmax(1).min().expand(B)                     # (B,)
        if first[0] > 0:
            denoise(self.shift(seen)[:, :first[0]], 0., row * L)

        while (first < L).any():
            # one call reads the last token and the guesses, and MASKs behind each
            places = first[:, None] + offset                             # (B, W)
            checked = places[:, :G + 1]                                  # (B, G + 1)
            read = torch.full_like(places, self.mask_id)
            read[:, :G + 1] = self.shift(seen).gather(1, checked)
            positions = row[:, None] * L + places.clamp(max=L - 1)
            logits = denoise(read, 0., positions.flatten()).view(*places.shape, -1)  # (B, W, V)
            logits[:, :, self.pad] = -torch.inf

            # a token for each place that is checked, and how many of the guesses are right
            guess = seen.gather(1, checked)
            x = propose(logits[:, :G + 1].flatten(0, 1)).view(B, G + 1)
            x = torch.where(free.gather(1, checked), x, guess)
            n_right = (x == guess)[:, :G].cumprod(1).sum(1)              # (B,)
            seen.scatter_(1, checked, x)
            first = (first + n_right + 1).clamp(max=L)

            # new guesses, behind the last token that stands; known tokens are their own guess
            of_masks = logits[:, G + 1:].unflatten(1, (G + 1, G))        # (B, G + 1, G, V)
            guess = of_masks[row, n_right].argmax(2)                     # (B, G)
            places = first[:, None] + column[:G]
            guess = torch.where(free.gather(1, places), guess, seen.gather(1, places))
            seen.scatter_(1, places, guess)

            # a text that has its EOS is filled with PAD
            is_end = (x == self.eos) & (column <= n_right[:, None])
            has_end = is_end.any(1)
            if has_end.any():
                end = checked.gather(1, is_end.int().argmax(1, keepdim=True))
                is_behind = torch.arange(seen.shape[1], device=seen.device) > end
                seen = torch.where(has_end[:, None] & is_behind & free, self.pad, seen)
                first = torch.where(has_end, L, first)

            # what is shown: not the guesses
            if on_step is not no_callback:
                is_guess = free & (torch.arange(seen.shape[1], device=seen.device)
                                   >= first[:, None])
                in_text = checked < L
                on_step(torch.where(is_guess, self.mask_id, seen)[:, :L],
                        logits[:, :G + 1][in_text], positions[:, :G + 1][in_text])
        return seen[:, :L]

    def check_known(self, tokens, known_mask):
        """ ValueError where a known token (not EOS or PAD) stands behind a position to write. """
        masked = ~known_mask
        behind = masked[:, :-1].cumsum(1) > 0                            # (B, L - 1)
        is_end = (tokens[:, 1:] == self.eos) | (tokens[:, 1:] == self.pad)
        known_token = known_mask[:, 1:] & ~is_end
        if (behind & known_token).any():
            raise ValueError('an autoregressive model continues a text: '
                             'all [MASK] must stand at its end')

    def decode_step(self, model, tokens, latents, t_text, t_latent, cache, positions=None):
        """
        Logits (B, V), float32, of the token after `tokens` (B, L). Where each row has several
        positions (B W,), `tokens` (B, W) are a fan, and the logits (B W, V) those of its places.
        cache: a dict that the caller keeps, empty at first. It holds what was read, so each call
        reads only the new tokens. Latents and clocks are read in the first call, and all rows have
        the clocks of the first.
        """
        if not cache:
            cache['reader'] = Reader(model, len(tokens), latents, t_text, t_latent)
        if positions is None or len(positions) == len(tokens):
            return cache['reader'].read(tokens)
        first = positions.view(tokens.shape)[:, 0] % model.config.seq_len
        return cache['reader'].read_fan(tokens, first)


@lru_cache
def fan(G, device):
    """
    The W = (G + 1)^2 tokens of a call that checks G guesses: the last token that is written, the
    guesses, and behind each of these G + 1 a chain of G MASKs.
    offset (W,)    how far behind the first of them each predicts
    n_seen (W,)    how many guesses are before it
    sees (W, W)    True where a MASK sees a MASK: those of its chain, up to itself
    """
    token = torch.arange(G + 1, device=device)
    chain = token.repeat_interleave(G)                                   # (W - G - 1,)
    in_chain = token[:G].repeat(G + 1)
    offset = torch.cat([token, chain + 1 + in_chain])
    n_seen = torch.cat([token, chain])
    sees = (chain[:, None] == chain) & (in_chain[:, None] >= in_chain)
    return offset, n_seen, F.pad(sees, (G + 1, 0, G + 1, 0))

# -----------------------------------------------------------------------------
# The network, read token by token

class Reader:
    """
    model.Model for causal rows, one position after the other. Keys and values of what was read lie
    in a cache that has room for the longest text.

    The clocks do not move while a text is written, so what they modulate is computed once:
        norm(x) (1 + scale) + shift    is a layer norm of weight 1 + scale and bias shift
    Likewise the rotary positions with the gains g. With x = [x1, x2], the halves of the channels:
        rotate(g x) = x [g1 cos, g2 cos] + [x2, x1] [-g2 sin, g1 sin]
    """

    def __init__(self, model, B, latents, t_text, t_latent):
        c = model.config
        self.model = model
        self.streams = [block.text for block in model.blocks]
        self.K = c.n_latents * c.latent_tokens if 'latent' in c.streams else 0
        self.n_read = 0
        dtype = model.embed.weight.dtype
        no_tokens = torch.empty((B, 0), dtype=torch.int64, device=model.bias.device)
        _, latent, condition = model.embed_inputs(no_tokens, latents, t_text, t_latent)

        # modulation by the clocks: shift, 1 + scale, gate, and these of the MLP
        of_blocks, final = model.split_text_modulation(condition[:1])
        tables = torch.stack([s.scale_shift_table for s in self.streams])  # (depth, 6, C)
        modulation = tables + of_blocks.view(6, -1)
        modulation[:, 1::3] += 1
        self.modulation = [block.unbind() for block in modulation.to(dtype)]
        shift, scale = final.to(dtype).view(2, -1)
        self.final = shift, 1 + scale

        # positions and gains: (depth, L, 2, 1, d). rms_norm(x) = sqrt(d) x / |x|. The sqrt(d) of
        # queries and the 1 / sqrt(d) of attention cancel; that of keys is in their gain
        d = c.width // c.heads
        q_gains = torch.stack([s.q_gain for s in self.streams])
        k_gains = torch.stack([s.k_gain for s in self.streams]) * d ** .5
        gains = torch.stack([q_gains, k_gains], 1)[:, None, :, None]
        cos = torch.cat([model.cos, model.cos], 1)[:, None, None]        # (L, 1, 1, d)
        sin = torch.cat([-model.sin, model.sin], 1)[:, None, None]
        self.by_cos = (gains * cos).to(dtype)
        self.by_sin = (gains.roll(d // 2, -1) * sin).to(dtype)

        # keys and values
        shape = (c.depth, 2, B, c.heads, self.K + c.seq_len, d)
        self.cache = torch.zeros(shape, dtype=dtype, device=model.bias.device)
        self.into_text = self.into_head = 0
        if latent is not None:
            modulation, _, _, *gates = model.split_latent_modulation(condition)
            self.read_latents(latent, modulation)
        if c.shortcut:
            into_text, into_head = model.shortcuts(latents, gates)       # (B, C) each
            self.into_text = into_text[:, None].to(dtype)
            self.into_head = into_head[:, None].to(dtype)

    def read_latents(self, latent, modulation):
        """ Keys and values of the latents (B, K, C), which see only one another. """
        for block, cache in zip(self.model.blocks, self.cache):
            shift, scale, *rest = block.latent.modulation(modulation)
            (q, k), v = block.latent.queries_keys_values(latent, shift, scale)       # (B, H, K, d)
            cache[:, :, :, :self.K] = torch.stack([k, v])
            attended = attention(q, k, v).transpose(1, 2).flatten(2)                 # (B, K, C)
            latent = block.latent.finish(latent, attended, *rest)

    def keep(self, rows):
        """ Goes on with these rows (B,) of what was read; one may stand there several times. """
        read = self.cache[:, :, :, :, :self.K + self.n_read]
        read.copy_(read[:, :, rows])
        if self.model.config.shortcut:
            self.into_text = self.into_text[rows]
            self.into_head = self.into_head[rows]

    def read(self, tokens):
        """ Logits (B, V), float32, of the token after `tokens` (B, L), of which the new ones are
        read. """
        # each new token may look at the latents and at all tokens up to itself
        L = tokens.shape[1]
        new = slice(self.n_read, L)
        self.n_read = L
        mask = None
        if new.stop - new.start > 1:
            mask = causal_mask(self.K, L, tokens.device)[self.K + new.start:]

        here = slice(None), slice(None), slice(self.K + new.start, self.K + L)
        hidden = self.hidden(tokens[:, new], new, here, self.K + L, mask)
        return self.model.text_head(hidden[:, -1]).float()

    def read_fan(self, tokens, first):
        """ Logits (B W, V), float32, of a fan of tokens (B, W). first (B,): the position that the
        first one predicts. Before it all of a row is read. """
        B, W = tokens.shape
        G = math.isqrt(W) - 1
        L = self.model.config.seq_len
        offset, n_seen, sees = fan(G, tokens.device)
        places = first[:, None] + offset                                 # (B, W)

        # the cache has a slot for each place of the text, as many more as there are guesses, and
        # last one for each token of a fan, where its MASKs lie
        end = self.K + L + G + W
        if self.cache.shape[4] < end:
            self.cache = F.pad(self.cache, (0, 0, 0, end - self.cache.shape[4]))
        slots = self.K + places
        slots[:, G + 1:] = torch.arange(end - W + G + 1, end, device=tokens.device)
        row, head = (torch.arange(n, device=tokens.device) for n in self.cache.shape[2:4])
        here = row[:, None, None], head[:, None], slots[:, None]         # (B, H, W)

        # all see the latents, what is written, and the guesses before them
        last_seen = (first[:, None] + n_seen)[:, :, None]                # (B, W, 1)
        is_before = torch.arange(L + G, device=tokens.device) <= last_seen
        mask = torch.cat([is_before, sees.expand(B, W, W)], 2)
        mask = F.pad(mask, (self.K, 0), value=True)[:, None]             # (B, 1, W, end)
        hidden = self.hidden(tokens, places.clamp(max=L - 1), here, end, mask)
        return self.model.text_head(hidden.flatten(0, 1)).float()

    def hidden(self, tokens, positions, here, end, mask):
        """ What the head reads (B, n, C) of tokens (B, n) at their positions. here: where in the
        cache their keys and values are kept. """
        text = self.model.embed(tokens) + self.into_text                 # (B, n, C)
        by_cos, by_sin = self.by_cos[:, positions], self.by_sin[:, positions]
        for i in range(len(self.streams)):
            text = self.read_block(i, text, by_cos[i], by_sin[i], here, end, mask)
        shift, scale = self.final
        return F.layer_norm(text, shift.shape, scale, shift) + self.into_head

    def read_block(self, i, text, by_cos, by_sin, here, end, mask):
        """ model.Block.forward for the text (B, n, C). """
        stream = self.streams[i]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation[i]

        # queries and keys of length 1, turned by their positions
        qkv = stream.qkv(F.layer_norm(text, shift.shape, scale, shift))
        qkv = qkv.unflatten(2, (3, stream.heads, stream.head_dim))
        qk = qkv[:, :, :2]                                               # (B, n, 2, H, d)
        turned = torch.addcmul(qk * by_cos, qk.roll(stream.head_dim // 2, -1), by_sin)
        length = torch.linalg.vector_norm(qk, dim=-1, keepdim=True).clamp_min(1e-12)
        q, k = (turned / length).unbind(2)                               # (B, n, H, d)

        # the new keys and values join those that were read before
        keys, values = self.cache[i, :, :, :, :end]                      # (B, H, S, d) each
        keys[here] = k.transpose(1, 2)
        values[here] = qkv[:, :, 2].transpose(1, 2)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, scale=1.)
        attended = attended.transpose(1, 2).flatten(2)                   # (B, n, C)

        text = torch.addcmul(text, gate, stream.out(attended))
        hidden = stream.up(F.layer_norm(text, shift.shape, mlp_scale, mlp_shift))
        return torch.addcmul(text, mlp_gate, stream.down(F.relu_(hidden).square_()))
