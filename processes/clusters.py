"""
HDLM's clusters of tokens: k-means on a vector of each token.

The vectors come from the token embedding of a run, or from co-occurrence counts of the training
texts. Letters: V vocabulary.
"""
import torch
import torch.nn.functional as F

from data import counts
from runs.checkpoint import load_model


def cluster_table(source, data, n_clusters):
    """ The cluster of each id of a new run, (V,) int64. source: a run folder (its token embedding),
    or '' (co-occurrence counts of `data`). PAD has the cluster of EOS. ValueError says what is
    wrong. """
    V = data.vocab_size
    if not 1 <= n_clusters < V:
        raise ValueError(f'clusters={n_clusters}: expected 1 to {V - 1}')

    rows = embedding_of(source, data) if source else cooccurrence(data)

    # PAD, which is the last id, goes where EOS is
    cluster_of = kmeans(rows[:data.pad], n_clusters)
    return torch.cat((cluster_of, cluster_of[[data.eos]]))


def embedding_of(run_folder, data):
    """ The token embedding of a run, (V, C). """
    model, _, meta, _ = load_model(run_folder, 'best')
    if meta['tokenizer'] != data.meta['tokenizer'] or 'text' not in model.config.streams:
        raise ValueError(f'clusters_from={run_folder}: its tokens are not those of {data.folder}')
    return model.embed.weight.detach()


def cooccurrence(data, dims=128, reach=2, most=2 ** 24, seed=0):
    """
    A vector for each id, (V, dims), from its co-occurrence counts in the training texts: how often
    each other id stands at each distance of -reach to reach. The counts, divided by the root of the
    other id's frequency, are projected to `dims` by fixed random vectors (random indexing), so the
    V x V table is never made. Reads the first `most` tokens. """
    V = data.vocab_size
    distances = [d for d in range(-reach, reach + 1) if d != 0]
    rng = torch.Generator().manual_seed(seed)
    label = torch.randn(len(distances), V, dims, generator=rng)
    frequency = counts(data).clamp(min=1).float()
    label /= frequency.sqrt()[:, None]

    vectors = torch.zeros(V, dims)
    n_read = 0
    for first in range(0, len(data), 4096):
        tokens, _ = data.rows(range(first, min(first + 4096, len(data))))
        real = tokens != data.pad                              # (B, L)
        L = tokens.shape[1]
        for j, distance in enumerate(distances):
            # the positions that have a neighbour at this distance, and the neighbours
            here = slice(max(0, -distance), L - max(0, distance))
            there = slice(max(0, distance), L - max(0, -distance))
            pair = real[:, here] & real[:, there]
            token = tokens[:, here][pair]
            neighbour = tokens[:, there][pair]
            vectors.index_add_(0, token, label[j][neighbour])
        n_read += int(real.sum())
        if n_read > most:
            break
    return vectors


def kmeans(rows, n_clusters, seed=0, rounds=50):
    """ The cluster of each of `rows` (V, dims), (V,) in 0 .. n_clusters - 1. Lloyd's algorithm on
    the unit sphere. No cluster is empty: an empty one gets the row that is furthest from its
    centre. """
    rows = F.normalize(rows.float(), dim=1)
    rng = torch.Generator().manual_seed(seed)
    centres = rows[torch.randperm(len(rows), generator=rng)[:n_clusters]]
    for _ in range(rounds):
        # each row to its nearest centre
        similarity, cluster_of = (rows @ centres.T).max(1)

        # fill the empty clusters
        sizes = torch.bincount(cluster_of, minlength=n_clusters)
        for k in (sizes == 0).nonzero().flatten():
            sizes = torch.bincount(cluster_of, minlength=n_clusters)
            furthest = torch.where(sizes[cluster_of] > 1, similarity, torch.inf).argmin()
            cluster_of[furthest] = k
            similarity[furthest] = 1

        # each centre to the mean of its rows
        sums = torch.zeros_like(centres).index_add_(0, cluster_of, rows)
        centres = F.normalize(sums, dim=1)
    return cluster_of
