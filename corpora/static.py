"""
Static embeddings, an encoder without a network, in the folders of model2vec and of
sentence-transformers (StaticEmbedding):

    z = mean of table[token] over the tokens of a text, divided by its L2 norm where a Normalize
        stands behind it

The tokens are those of tokenizer.json, without special ones such as [CLS]; [UNK] has a row like any
other, as in sentence-transformers. A text without a token gives zeros.
Letters: n texts, V rows of the table, D latent dimensions.
"""
import os

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from corpora.lsa import NO_KNOWN_WORD


class StaticEncoder:
    """ Called on a list of texts: (n, 1, D) float32. truncated: how many were too long. """

    def __init__(self, folder, record, batch_size):
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, 'tokenizer.json'))
        self.tokenizer.no_padding()                        # a bag of tokens needs none
        self.batch_size = batch_size
        self.truncated = 0
        if record['pooling'] != 'mean' or record['language']:
            raise ValueError('StaticEmbedding is a mean, in no language of its own: leave out '
                             'pooling and language')

        # a row for each token
        table = read_table(os.path.join(folder, 'model.safetensors'))    # (V, D)
        self.table = table.to(getattr(torch, record['dtype'])).float()
        n_rows, own = table.shape
        n_tokens = self.tokenizer.get_vocab_size()
        if n_tokens > n_rows:
            raise ValueError(f'tokenizer.json has {n_tokens:,} tokens, the table {n_rows:,} rows')
        dimension = record['dimension'] or own
        if dimension > own:
            raise ValueError(f'dimension {dimension} is more than its {own}')
        most = (self.tokenizer.truncation or {}).get('max_length')       # None: it reads all
        self.record = record | dict(dimension=dimension, max_length=most)

    def tokenize(self, texts):
        prefixed = [self.record['prefix'] + text for text in texts]
        return self.tokenizer.encode_batch(prefixed, add_special_tokens=False)

    def __call__(self, texts, progress=lambda n: None):
        out = torch.zeros(len(texts), self.record['dimension'])
        for i in range(0, len(texts), self.batch_size):
            found = self.tokenize(texts[i:i + self.batch_size])
            self.truncated += sum(bool(one.overflowing) for one in found)

            # the mean over the tokens of each text: all tokens in one row, and where each text
            # begins. A text without a token has the mean 0
            ids = torch.tensor([token for one in found for token in one.ids], dtype=torch.long)
            starts = torch.tensor([0] + [len(one.ids) for one in found[:-1]]).cumsum(0)
            z = F.embedding_bag(ids, self.table, starts, mode='mean')    # (n, D)
            z = z[:, :self.record['dimension']]
            if self.record['normalize']:
                z = F.normalize(z, dim=-1)
            out[i:i + len(found)] = z
            progress(len(found))
        return out[:, None]

    def remark(self, text):
        """ What keeps it from embedding this text as it stands, or ''. """
        found, = self.tokenize([text])
        if found.overflowing:
            return (f'is longer than the encoder reads (at most {self.record["max_length"]:,} '
                    'tokens): its end was not read')
        unknown = getattr(self.tokenizer.model, 'unk_token', None)
        is_known = any(token != unknown for token in found.tokens)
        return '' if is_known else NO_KNOWN_WORD


def read_table(path):
    """ The rows (V, D) of each token, as sentence-transformers stores them, or model2vec: there
    tokens may share rows (`mapping`) and weigh more or less (`weights`). """
    # the names tell who wrote the file; names that we do not know would mean something else
    tensors = load_file(path)
    if tensors.keys() == {'embedding.weight'}:
        table = tensors['embedding.weight']
    elif {'embeddings'} <= tensors.keys() <= {'embeddings', 'mapping', 'weights'}:
        # a token's row, times its weight: both are folded into one table here
        table = tensors['embeddings']
        if 'mapping' in tensors:
            table = table[tensors['mapping'].long()]
        if 'weights' in tensors:
            table = table.float() * tensors['weights'].float()[:, None]
    else:
        raise ValueError(f'{path} has {sorted(tensors)}, expected embedding.weight, or embeddings')
    if table.ndim != 2 or not table.is_floating_point() or not table.isfinite().all():
        raise ValueError(f'{path}: a table of {table.dtype} {tuple(table.shape)}, expected finite '
                         'floats (V, D)')
    return table
