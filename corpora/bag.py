"""
The bag: a linear model from the tokens of a text to its latent, in closed form. Latents of one
vector have it, and pictures whose bag is not too large.

    values = fit_bag(train, tokenizer, encoder)              # (V, D); prepare.py writes bag.npy

A training begins with it (runs/resume.py), so the network learns only what words alone do not say.
In standardised latents, for a text of l tokens:

    z(x) = sum over i of value[x_i] / sqrt(l)

Why sqrt(l): an embedding of unit length is about a sum of words, divided by the length of the sum,
and that grows like sqrt(l) where the words point in unlike directions.

A rare token has few texts to learn from. But the encoder can embed the token itself. So the values
are a linear map of these embeddings, and what the texts add to it (ridge regression, twice):

    value = E M + R       E  (V, D)  the encoder's embedding of each token's own characters
    M = argmin |X E M - Z|^2 + |M|^2
    R = argmin |X R - (Z - X E M)|^2 + |R|^2

Letters: n texts, V token ids, D numbers of a latent, T tokens of all texts, X (n, V) the numbers of
each token in each text, divided by sqrt(l), Z (n, D) latents.

The control `ridge` of tasks/t2l.py is the same model without an encoder.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F

from base.console import progress_bar

MOST_NUMBERS = 10 ** 8         # of latents that it is fitted on, 400 MB: texts of train, evenly
                               # spaced
ROWS = 4096                    # that are read at a time
MOST_VALUES = 10 ** 7          # of a bag of pictures, 40 MB
COLUMNS = 128                  # of latents that are fitted at a time
STEPS = 30                     # of conjugate gradients, at most
TOLERANCE = 1e-2               # they end where what is left is so small a part


def has_bag(latent_shape, is_picture, vocab_size):
    """ Whether latents of this shape (N, D) have one. """
    N, D = latent_shape
    return N == 1 or is_picture and vocab_size * N * D <= MOST_VALUES


def fit_bag(data, tokenizer, encoder=None):
    """ Values (V, N D) float16 of the tokens. data: the training split, a PackedDataset. encoder:
    of its latents; None, where nobody has it: then E M is 0. """
    V = tokenizer.vocab_size
    if encoder is None:
        # the columns are independent: in parts, to save memory
        values = []
        for first in range(0, math.prod(data.latent_shape), COLUMNS):
            texts, Z = read_texts(data, slice(first, first + COLUMNS))
            values.append(Counts(texts, V).solve(Z))
        values = torch.cat(values, 1)
    else:
        texts, Z = read_texts(data)
        values = fit_with_encoder(Counts(texts, V), Z, data, tokenizer, encoder)
    most = torch.finfo(torch.float16).max
    return values.clamp(-most, most).half()


def fit_with_encoder(X, Z, data, tokenizer, encoder):
    """ E M + R (V, D). """
    # what the encoder says of each token that occurs; the others stay at 0, the mean of all texts
    E = torch.zeros(tokenizer.vocab_size, Z.shape[1])
    occurring = X.tokens.unique()
    strings = [tokenizer.decode([i]) for i in occurring.tolist()]
    strings = [string.strip() or '.' for string in strings]
    with progress_bar(total=len(strings), desc='embedding tokens') as bar:
        raw = encoder(strings, progress=bar.update)                      # (u, 1, D)
    E[occurring] = data.standardise(raw[:, 0]).nan_to_num(0, 0, 0)

    # M, and what it leaves to the texts
    XE = X.times(E)                                                      # (n, D)
    identity = torch.eye(XE.shape[1])
    M = torch.linalg.solve(XE.T @ XE + identity, XE.T @ Z)               # (D, D)
    R = X.solve(Z - XE @ M)
    return E @ M + R


def read_texts(data, columns=slice(None)):
    """ The texts of a split, or an even share of them: a list of their tokens (l,) int64, and their
    standardised latents (n, N D) float32, or some columns of them. They are read as rows, which are
    padded, so not all of them at once. """
    most = MOST_NUMBERS // math.prod(data.latent_shape)
    chosen = np.arange(0, len(data), -(-len(data) // most))
    texts = []
    latents = []
    for i in range(0, len(chosen), ROWS):
        tokens, z = data.rows(chosen[i:i + ROWS])
        texts += without_ends(tokens, data)
        latents.append(z.flatten(1)[:, columns].clone())
    return texts, torch.cat(latents)


def without_ends(tokens, ids):
    """ The texts of tokens (n, L): a list of (l,), without EOS and PAD, as `ids` has them. """
    is_text = (tokens != ids.eos) & (tokens != ids.pad)
    return list(tokens[is_text].split(is_text.sum(1).tolist()))


class Counts:
    """ The sparse matrix X (n, V), as bags of tokens for each text and of texts for each token. """

    def __init__(self, texts, n_ids):
        """ texts: a list of (l,), their tokens without EOS and PAD. n_ids: V. """
        lengths = torch.tensor([len(text) for text in texts])
        self.tokens = tokens = torch.cat(texts)                          # (T,)
        self.offsets = F.pad(lengths.cumsum(0), (1, 0))                  # (n + 1,)

        # of each of the T tokens: its weight, and its text
        text = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        self.weight = lengths[text].float() ** -0.5

        # the same in the order of the ids
        order = tokens.argsort(stable=True)
        self.texts = text[order]
        self.weight_by_id = self.weight[order]
        count_of_id = tokens.bincount(minlength=n_ids)
        self.offsets_by_id = F.pad(count_of_id.cumsum(0), (1, 0))

    def times(self, W):
        """ X W: (V, D) -> (n, D). """
        return F.embedding_bag(self.tokens, W, self.offsets, per_sample_weights=self.weight,
                               mode='sum', include_last_offset=True)

    def transposed_times(self, Y):
        """ X' Y: (n, D) -> (V, D). """
        return F.embedding_bag(self.texts, Y, self.offsets_by_id, mode='sum',
                               per_sample_weights=self.weight_by_id, include_last_offset=True)

    def solve(self, Z, penalty=1.0):
        """ R (V, D) that minimises |X R - Z|^2 + penalty |R|^2: (X'X + penalty) R = X'Z, by
        conjugate gradients in each column. They are preconditioned with the diagonal, where it
        takes no token to occur twice in a text. """
        squares = torch.zeros(len(self.offsets_by_id) - 1)
        squares.index_add_(0, self.tokens, self.weight ** 2)
        diagonal = penalty + squares[:, None]                            # (V, 1)
        target = self.transposed_times(Z)

        R = torch.zeros_like(target)
        left = target                                                    # less (X'X + penalty) R
        scaled = left / diagonal
        direction = scaled
        product = (left * scaled).sum(0)                                 # (D,)
        for _ in range(STEPS):
            ahead = self.transposed_times(self.times(direction)) + penalty * direction
            # a dead dimension has 0 / 0
            step = product / (direction * ahead).sum(0).clamp(min=1e-30)
            R = R + step * direction
            left = left - step * ahead
            if left.norm() <= TOLERANCE * target.norm():
                break
            scaled = left / diagonal
            before, product = product, (left * scaled).sum(0)
            direction = scaled + product / before.clamp(min=1e-30) * direction
        return R
