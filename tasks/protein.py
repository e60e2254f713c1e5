"""
protein: masked residues recovered, and new sequences. (nelbo has the bound per residue.)

Measured
    recovery@SHARE          % of the masked residues that are found in one call, by the share that
                            is masked, .1 to .9
    of as many new sequences as there are texts:
    composition_distance    from the training split's (total variation)
    runs                    % of the residues that are in runs of three or more equal ones
    length                  in residues
Controls
    unigram                 residues drawn one by one from the training frequencies, at the lengths
                            of the texts; in a recovery, the commonest one
    data                    the texts
"""
from itertools import groupby

import torch

from data import counts
from diffusion import is_end, positions_of
from noise import Noise, rows_of, uniforms
from sampling.knobs import TEXT_KNOBS
from sampling.run import FILLS, Needs
from sampling.texts import blank, write
from tasks.common import Figures, Task, open_split
from tasks.measures import real_ids


def prepare(run, knobs):
    kind = run.tokenizer.kind
    if kind != 'esm':
        raise ValueError(f'{run.out_dir} was trained on {kind} tokens: no protein from it')


@torch.inference_mode()
def measure(run, ctx):
    tokens = ctx.tokens
    knobs = ctx.sampling_knobs()
    ends = is_end(tokens, run.tokenizer)

    # the frequencies of the training split
    frequency = counts(open_split(run, ctx.folder, 'train')).double()   # (V,)

    # residues alone, without EOS and PAD
    frequency[[run.tokenizer.eos, run.tokenizer.pad]] = 0
    frequency /= frequency.sum()
    log_frequency = frequency.clamp(min=1e-12).log()
    figures = Figures(ctx.n)
    figures.enter('unigram', {'nats_per_residue': -log_frequency[tokens[~ends]].mean().item()})

    # recovery: a share of the residues is masked, and all are guessed in one call
    for share in range(1, 10):
        u = uniforms(knobs.seed, share, 'evaluation', 0, ctx.n, 1 + run.net.L)[:, 1:]
        t = run.net.text.time_of_share(torch.full((ctx.n,), share / 10, dtype=torch.float64))
        noisy, mask = run.net.text.corrupt(tokens, t, u, ends)
        first_choice = predict(run, noisy, mask, knobs)
        n_right = ((first_choice == tokens) & mask).sum(1).double()
        n_commonest = ((frequency.argmax() == tokens) & mask).sum(1)
        for control, found in (('', n_right), ('unigram', n_commonest)):
            percent = 100.0 * found / mask.sum(1)
            figures.enter(control, {f'recovery@0.{share}': percent[mask.any(1)]})

    # new sequences, and as many that know nothing but the frequencies
    written = write(run.net, *blank(run.net, ctx.n, knobs), None, knobs)
    rng = torch.Generator().manual_seed(knobs.seed)
    at_random = torch.multinomial(frequency, tokens.numel(), True, generator=rng)
    of_unigram = torch.where(ends, tokens, at_random.view(tokens.shape))
    for control, x in (('', written), ('unigram', of_unigram), ('data', tokens)):
        rows = real_ids(run, x)
        residues = torch.tensor([i for row in rows for i in row], dtype=torch.int64)

        # total variation: half of the sum of all differences, from 0 to 1
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
    net = run.net
    rows = rows_of(len(noisy))
    found = noisy.clone()
    for part in net.batches(len(noisy), knobs.sample_batch):
        positions = positions_of(mask[part])                             # (P,)
        z = net.nothing(Noise(knobs.seed, rows[part]))
        t = net.text.time_of_share(mask[part].double().mean(1))          # the clock of the bound
        logits = net.logits(noisy[part].to(net.device), t, positions, z)
        found[part].view(-1)[positions] = logits.argmax(1).cpu()
    return found


def share_in_runs(row):
    """ How many of its residues are in runs of three or more equal ones, %. """
    runs = [len(list(equal)) for _, equal in groupby(row)]
    return 100 * sum(n for n in runs if n >= 3) / max(1, len(row))


TASK = Task(
    Needs(('text',), (FILLS,), masked_text=True), TEXT_KNOBS, measure,
    prepare=prepare)
