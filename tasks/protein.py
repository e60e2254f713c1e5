"""
protein: recovery of masked residues in one call, by the share that is masked, .1 to .9; and as many
new sequences as there are texts: how far their composition is from the training split's (total
variation), and how they repeat. (nelbo has the bound per residue.)
Controls: unigram, residues drawn one by one from the training frequencies, at the lengths of the
texts; data, the texts.
"""
from itertools import groupby

import torch

from data import counts
from diffusion import is_end, positions_of
from noise import Noise, rows_of, uniforms
from sampling.knobs import TEXT_KNOBS
from sampling.run import FILLS, Needs
from sampling.writing import blank, write
from tasks.common import Figures, Task, open_split
from tasks.measures import real_ids


def prepare(run, knobs):
    kind = run.tokenizer.kind
    if kind != 'esm':
        raise ValueError(f'{run.out_dir} was trained on {kind} tokens: no protein from it')


@torch.inference_mode()
def measure(run, ctx):
    tokens, knobs = ctx.tokens, ctx.sampling_knobs()
    n, seed = ctx.n, knobs.seed
    ends = is_end(tokens, run.tokenizer)
    rng = torch.Generator().manual_seed(seed)

    # the frequencies of the training split
    frequency = counts(open_split(run, ctx.folder, 'train')).double()   # (V,)
    frequency[[run.tokenizer.eos, run.tokenizer.pad]] = 0
    frequency /= frequency.sum()
    log_frequency = frequency.clamp(min=1e-12).log()
    figures = Figures(n)
    figures.enter('unigram', {'nats_per_residue': -log_frequency[tokens[~ends]].mean().item()})

    # recovery
    for share in range(1, 10):
        u = uniforms(seed, share, 'evaluation', 0, n, 1 + run.net.L)[:, 1:]
        t = run.net.text.time_of_share(torch.full((n,), share / 10, dtype=torch.float64))
        noisy, mask = run.net.text.corrupt(tokens, t, u, ends)
        first_choice = predict(run, noisy, mask, knobs)
        n_right = ((first_choice == tokens) & mask).sum(1).double()
        n_commonest = ((frequency.argmax() == tokens) & mask).sum(1)
        for control, found in (('', n_right), ('unigram', n_commonest)):
            percent = 100.0 * found / mask.sum(1)
            figures.enter(control, {f'recovery@0.{share}': percent[mask.any(1)]})

    # new sequences
    written = write(run.net, *blank(run.net, n, knobs), None, knobs)
    by_lot = torch.multinomial(frequency, tokens.numel(), True, generator=rng).view(tokens.shape)
    of_unigram = torch.where(ends, tokens, by_lot)
    for control, x in (('', written), ('unigram', of_unigram), ('data', tokens)):
        rows = real_ids(run, x)
        residues = torch.tensor([i for row in rows for i in row], dtype=torch.int64)
        share = torch.bincount(residues, minlength=len(frequency)).double()
        share /= share.sum()
        distance = (share - frequency).abs().sum() / 2
        figures.enter(control, {
            'composition_distance': distance.item(),
            'runs': [share_in_runs(row) for row in rows],
            'length': [len(row) for row in rows]
        })
    ctx.shown += [f'-> {text}' for text in run.decode(written)]
    return figures


def predict(run, noisy, mask, knobs):
    """ noisy (n, L) with the network's first choice at the masked positions. """
    found = noisy.clone()
    rows, batch = rows_of(len(noisy)), knobs.sample_batch
    for i in range(0, len(noisy), batch):
        x, masked = noisy[i:i + batch], mask[i:i + batch]
        positions = positions_of(masked)                                 # (P,)
        z = run.net.nothing(Noise(knobs.seed, rows[i:i + batch]))
        t = run.net.text.time_of_share(masked.double().mean(1))          # the clock of the bound
        logits = run.net.logits(x.to(run.net.device), t, positions, z)
        first_choice = logits.argmax(1)                                  # (P,)
        found[i:i + batch].view(-1)[positions] = first_choice.cpu()
    return found


def share_in_runs(row):
    """ How many of its residues are in runs of three or more equal ones, %. """
    runs = [len(list(equal)) for _, equal in groupby(row)]
    return 100 * sum(n for n in runs if n >= 3) / max(1, len(row))


TASK = Task(
    Needs(('text',), (FILLS,), masked_text=True), TEXT_KNOBS, measure,
    prepare=prepare)
