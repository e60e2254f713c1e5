"""
The network read token by token, with a cache of keys and values: how texts are written from left to
right, by a network that has learned causal rows (mode='causal', alone or among others).

Letters: B texts, R rows, L tokens, V vocabulary, K latent tokens, C width, H heads, d = C / H.
"""
import torch
import torch.nn.functional as F

from model import causal_mask


class Reader:
    """
    model.Model for causal rows, one position after the other. Keys and values of what was read lie
    in a cache that has room for the longest text. Texts that have read the same share a row of it,
    as drafts from one latent do until they part: R rows for B texts.

    A block is that of model.Block. Only how queries and keys are normalised and turned by their
    positions is written anew, in fewer operations: positions and gains g do not change while a
    text is written, so their product is computed once. With x = [x1, x2], the halves of the
    channels:
        rotate(g x) = x [g1 cos, g2 cos] + [x2, x1] [-g2 sin, g1 sin]
    """

    def __init__(self, model, B, latents, t_text, t_latent):
        c = model.config
        self.model = model
        self.streams = [block.text for block in model.blocks]
        self.K = c.n_latents * c.latent_tokens if 'latent' in c.streams else 0
        self.n_read = 0
        dtype = model.embed.weight.dtype

        # the row of each text
        self.row_of = torch.zeros(B, dtype=torch.int64, device=model.bias.device)
        R = 1
        if latents is not None:
            latents, self.row_of = latents.unique(dim=0, return_inverse=True)
            R = len(latents)
        self.n_rows = R
        no_tokens = self.row_of.new_empty((R, 0))
        _, latent, condition = model.embed_inputs(no_tokens, latents, t_text[:R], t_latent[:R])

        # the clocks do not change either, and are the same of all texts: of each block six vectors
        # (C,), and of the head two
        of_blocks, self.final = model.split_text_modulation(condition[:1])
        self.modulation = []
        for stream in self.streams:
            vectors = stream.modulation(of_blocks)                       # (1, 1, C) each
            self.modulation.append([vector.flatten() for vector in vectors])

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
        n_positions = self.K + c.seq_len
        shape = (c.depth, 2, B, c.heads, n_positions, d)
        self.cache = torch.empty(shape, dtype=dtype, device=model.bias.device)
        self.into_text = 0
        self.into_head = None

        # those of the latents (R, K, C), which see only one another
        if latent is not None:
            of_latents, _, _, *gates = model.split_latent_modulation(condition)
            for block, cache in zip(model.blocks, self.cache):
                _, latent = block(None, latent, None, of_latents, None, None, n_causal=0,
                                  predict=('latent',), cache=cache[:, :R, :, :self.K])
        if c.shortcut:
            into_text, into_head = model.shortcuts(latents, gates)       # (R, C) each
            self.into_text = into_text[:, None].to(dtype)
            self.into_head = into_head

    def keep(self, texts):
        """ Goes on with these texts, by their numbers (B,). A text may be among them repeatedly.
        """
        self.row_of = self.row_of[texts]
        self.n_rows = 0                                    # not known

    def share(self, tokens, has_ended):
        """ Finds the texts that have read the same so far, and now read the same new tokens
        (B, new): they share one row of the cache. Returns the new tokens of the rows, (R, new). """
        # while every text has a row of its own, we look for rows to share at every eighth token
        # only: looking makes the host wait for a card
        if self.n_rows == len(tokens) and self.n_read % 8:
            return tokens[self.row_of.argsort()]

        # a text that has ended needs no row: it joins one that goes on
        reads = torch.cat([self.row_of[:, None], tokens], 1)             # (B, 1 + new)
        other = reads[has_ended.byte().argmin()]
        reads = torch.where(has_ended[:, None], other, reads)
        reads, kind = reads.unique(dim=0, return_inverse=True)           # (R, 1 + new), (B,)
        before = reads[:, 0]                                             # (R,), sorted

        # the first that goes on from a row stays in it, others go where there is room
        stays = before < len(before)
        stays[1:] &= before[1:] != before[:-1]
        is_free = torch.ones_like(stays)
        is_free[before[stays]] = False
        row = before.clone()
        row[~stays] = is_free.nonzero().flatten()
        self.row_of = row[kind]
        self.n_rows = len(row)

        # what was read goes along
        moves = row != before
        cache = self.cache[:, :, :, :, :self.K + self.n_read]
        cache[:, :, row[moves]] = cache[:, :, before[moves]]
        order = row.argsort()
        if self.model.config.shortcut:
            self.into_text = self.into_text[before[order]]
            self.into_head = self.into_head[before[order]]
        return reads[order, 1:]

    def read(self, tokens, has_ended):
        """ Logits (B, V), float32, of the token after `tokens` (B, L), of which the new ones are
        read. has_ended (B,): texts that have their end, so that their logits do not matter. """
        L = tokens.shape[1]
        new = slice(self.n_read, L)
        tokens = self.share(tokens[:, new], has_ended)
        self.n_read = L

        # each new token may look at the latents and at all tokens up to itself; one alone at all
        mask = None
        if new.stop - new.start > 1:
            mask = causal_mask(self.K, L, tokens.device)
            mask = mask[self.K + new.start:]

        # the blocks: of each its modulation, its products of gains and positions, and its cache
        text = self.model.embed(tokens) + self.into_text                 # (R, new, C)
        of_blocks = zip(
            self.streams,
            self.modulation,
            self.by_cos[:, new],
            self.by_sin[:, new],
            self.cache[:, :, :len(text), :, :self.K + L])
        for of_block in of_blocks:
            text = read_block(text, mask, *of_block)

        # the head at the last position
        hidden = self.model.finish_text(text[:, -1:], self.final, self.into_head)    # (R, 1, C)
        logits = self.model.text_head(hidden[:, 0]).float()              # (R, V)
        return logits[self.row_of]


def read_block(text, mask, stream, modulation, by_cos, by_sin, cache):
    """ model.Block.forward for the new positions of the text, (R, new, C). cache (2, R, H, S, d):
    keys and values, of which the last `new` are yet to be filled in. """
    shift, gain, *rest = modulation
    qkv = stream.project(text, shift, gain)                              # (R, new, 3, H, d)

    # queries and keys of length 1, turned by their positions
    qk = qkv[:, :, :2]
    swapped = qk.roll(stream.head_dim // 2, -1)
    turned = torch.addcmul(qk * by_cos, swapped, by_sin)
    length = torch.linalg.vector_norm(qk, dim=-1, keepdim=True).clamp_min(1e-12)
    q, k = (turned / length).unbind(2)                                   # (R, new, H, d)

    # the new keys and values join those that were read before
    n_new = text.shape[1]
    keys, values = cache
    keys[:, :, -n_new:] = k.transpose(1, 2)
    values[:, :, -n_new:] = qkv[:, :, 2].transpose(1, 2)
    attended = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, scale=1.)
    attended = attended.transpose(1, 2).flatten(2)                       # (R, new, C)
    return stream.finish(text, attended, *rest)
