"""
importance: which tokens does the network find hard? The loss at masked positions, by quarters of
the tokens: by their frequency in the training split (rare last), and by their importance
(processes/adaptive.py). And the rank correlation of both with a token's mean loss.

In each draw n ~ U{1..L} positions of a text are masked.
"""
import torch

from data import counts
from noise import uniforms
from processes.adaptive import rarity
from sampling.likelihood import taken
from sampling.run import FILLS, Needs
from tasks.common import Figures, Task, open_split, progress_bar
from tasks.measures import correlation


@torch.inference_mode()
def measure(run, ctx):
    tokens = ctx.tokens
    draws = ctx.knobs['draws']
    batch = run.net.rows_that_fit(ctx.knobs['sample_batch'], run.net.L)
    z = None
    if ctx.raw is not None:
        z = run.stats.standardise(ctx.raw)
    loss, count = losses(run.net, tokens, z, draws, ctx.knobs['seed'], batch)

    # the tokens that were masked at least once; PAD is none that counts
    used = (count > 0) & (tokens != run.tokenizer.pad)
    if used.sum() < 2:
        raise ValueError(f'importance: {used.sum()} tokens were masked in {draws} draws of {ctx.n} '
                         'texts: raise --draws or --n')

    # what the tokens are sorted by, (n, L) each
    rare = rarity(counts(open_split(run, ctx.folder, 'train')), run.tokenizer.pad)      # (V,)
    values = {'frequency': rare[tokens]}
    if run.net.model.importance:
        parts = [run.net.model.importance(x.to(run.net.device))[0] for x in tokens.split(batch)]
        values['importance'] = torch.cat(parts).float().cpu()

    # by quarters of the tokens, over all texts
    figures = Figures(ctx.n)
    shares = torch.tensor([.25, .5, .75], dtype=torch.float64)
    for name, value in values.items():
        edges = value[used].double().quantile(shares)
        quarters = torch.bucketize(value.double(), edges)                # (n, L)
        for quarter in range(4):
            inside = used & (quarters == quarter)
            # (n,) each: the tokens of a text are not independent
            total = (loss * inside).sum(1)
            size = inside.sum(1).double()
            if size.sum() > 0:
                figures.enter(name, {f'nats_quarter_{quarter + 1}': (total, size)})
        with_loss = correlation(value[used].numpy(), loss[used].numpy())
        figures.enter(name, {
            'spearman_with_loss': with_loss.value,
            'std': value[used].std().item()
        })
    return figures


def losses(net, tokens, z, draws, seed, batch):
    """ Of every token (n, L): its mean loss in nats, and how often it was masked. """
    n, L = tokens.shape
    nats = torch.zeros(n, L, dtype=torch.float64)
    count = torch.zeros(n, L)
    ends = net.ends(tokens)
    n_free = (~ends).sum(1).clamp(min=1)
    for k in progress_bar(range(draws), desc='importance', unit='draw'):
        # mask so many positions of each text, evenly over 1..L
        u = uniforms(seed, k, 'evaluation', 0, n, 1 + L)
        share = (u[:, 0] + k / draws) % 1
        size = 1 + (share * n_free).long().clamp(max=n_free - 1)
        _, mask = net.text.corrupt_exactly(tokens, size, u[:, 1:], ends)
        count += mask

        for first in range(0, n, batch):
            rows = slice(first, first + batch)
            positions, log_p = net.log_p_hidden(tokens[rows], mask[rows], taken(z, rows), 0.0)
            nats[rows].view(-1)[positions] -= log_p.double()
    return nats / count.clamp(min=1), count


TASK = Task(
    Needs(('text',), (FILLS,), masked_text=True), ('draws',), measure)
