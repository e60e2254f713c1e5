"""
The nearest of several drafts: texts are written from a latent, embedded, and compared with it.

Letters: n texts, L text tokens, N latent vectors, D latent dims, K drafts of each text.
"""
import torch
import torch.nn.functional as F

from sampling.directions import l2t
from sampling.loading import encode
from sampling.writing import default_sampler, tidied


def closeness(run, tokens, raw):
    """ Cosine (n,) of the embeddings of tokens (n, L) with raw latents (n, N, D). """
    embedded = encode(run, [run.tokenizer.decode(ids) for ids in tokens.tolist()])
    return F.cosine_similarity(embedded.flatten(1), raw.flatten(1))


def nearest_of(run, raw, K, lengths_of=None, **sampling):
    """
    From each raw latent (n, N, D) K drafts are written, and the nearest stays: tokens (n, L), and
    their cosine (n,). The other keywords are those of directions.l2t.
    """
    # drafts of one latent shall differ. From left to right they need a lower temperature than by
    # diffusion, as each token is given all that is before it
    sampling['several'] = True
    sampler = sampling.get('sampler') or default_sampler(run, True, False)
    if sampler == 'autoregressive' and sampling.get('temperature') is None:
        sampling['temperature'] = 0.4

    z = run.stats.standardise(raw).repeat_interleave(K, 0)               # (n K, N, D)
    if lengths_of is not None:
        lengths_of = lengths_of.repeat_interleave(K, 0)
    # diffusion may write behind an EOS what nobody reads, or no EOS at all
    drafts = tidied(run, l2t(run, z, lengths_of=lengths_of, **sampling))

    cosine = closeness(run, drafts, raw.repeat_interleave(K, 0)).view(-1, K)
    cosine, best = cosine.max(1)                                         # (n,)
    return drafts[torch.arange(len(raw)) * K + best], cosine
