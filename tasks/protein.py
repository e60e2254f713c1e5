"""
protein: recovery of masked residues in one call, by the share that is masked, .1 to .9; and as many
new sequences as there are texts: how far their composition is from the training split's (total
variation), and how they repeat. (nelbo has the bound per residue.)
Controls: unigram, residues drawn one by one from the training frequencies, at the lengths of the
texts; data, the texts.
"""
from itertools import groupby

import torch

from data import is_end
from diffusion import in_chunks, positions_of, uniforms
from sampling.denoise import call, null_latents
from sampling.directions import FILLS
from sampling.knobs import TEXT_KNOBS
from sampling.writing import blank, write
from tasks.common import TaskNeeds, decode, enter, open_split, real_ids, repeated


def reads_proteins(run):
    kind = run.tokenizer.kind
    return '' if kind == 'esm' else f'was trained on {kind} tokens'


NEEDS = TaskNeeds(('text',), (FILLS,), masked_text=True, more=reads_proteins)
SETTINGS = TEXT_KNOBS


@torch.inference_mode()
def measure(run, ctx):
    tokens, sampling = ctx.tokens, ctx.sampling
    n, seed, batch = ctx.n, sampling['seed'], sampling['batch']
    ends = is_end(tokens, run.tokenizer)
    rng = torch.Generator().manual_seed(seed)

    # the frequencies of the training split
    frequency = open_split(run, ctx.folder, 'train').counts().double()   # (V,)
    frequency[[run.tokenizer.eos, run.tokenizer.pad]] = 0
    frequency /= frequency.sum()
    log_frequency = frequency.clamp(min=1e-12).log()
    results = {'n': n, 'unigram/nats_per_residue': -log_frequency[tokens[~ends]].mean().item()}

    # recovery
    for share in range(1, 10):
        name = f'recovery@0.{share}'
        u = uniforms(seed, share, 'evaluation', 0, n, 1 + run.L)[:, 1:]
        t = run.text.time_of_share(torch.full((n,), share / 10, dtype=torch.float64))
        noisy, mask = run.text.corrupt(tokens, t, u, ends)
        some = mask.any(1)
        found = recovery(run, tokens, noisy, mask, batch, rng)
        enter(results, '', {name: found[some]})
        n_commonest = ((tokens == frequency.argmax()) & mask).sum(1)
        commonest = 100.0 * n_commonest / mask.sum(1).clamp(min=1)
        enter(results, 'unigram/', {name: commonest[some]})

    # new sequences
    nothing = blank(run, n, sampling['length'], seed)
    written = write(run, *nothing, None, **sampling)
    by_lot = torch.multinomial(frequency, tokens.numel(), True, generator=rng).view(tokens.shape)
    of_unigram = torch.where(ends, tokens, by_lot)
    for control, x in (('', written), ('unigram/', of_unigram), ('data/', tokens)):
        rows = real_ids(run, x)
        residues = torch.tensor([i for row in rows for i in row])
        share = torch.bincount(residues, minlength=len(frequency)).double()
        distance = (share / share.sum() - frequency).abs().sum() / 2
        enter(results, control, {'composition_distance': distance.item(),
                                 'runs': [share_in_runs(row) for row in rows],
                                 'repeated_3grams': [repeated(row) for row in rows],
                                 'length': [len(row) for row in rows]})
    ctx.shown += [f'-> {text}' for text in decode(run, written)]
    return results


def recovery(run, tokens, noisy, mask, batch, rng):
    """ Per sequence, %: the masked residues of noisy (n, L) that are the network's first
    choice. """
    right = torch.zeros(len(tokens), dtype=torch.float64)
    for i in range(0, len(tokens), batch):
        rows = slice(i, i + batch)
        positions = positions_of(mask[rows])                             # (P,)
        z = null_latents(run, len(noisy[rows]), rng) if 'latent' in run.streams else None
        model_t = run.text.time_of_share(mask[rows].double().mean(1))    # the clock of the bound
        logits, _ = call(run, noisy[rows].to(run.device), z, model_t, 1.0, positions)
        found = torch.zeros_like(mask[rows])
        first_choice = in_chunks(lambda some: some.argmax(1), logits)    # (P,)
        found.view(-1)[positions] = first_choice.cpu() == tokens[rows].flatten()[positions]
        right[rows] = 100 * found.sum(1).double() / mask[rows].sum(1).clamp(min=1)
    return right


def share_in_runs(row):
    """ How many of its residues are in runs of three or more equal ones, %. """
    runs = [len(list(equal)) for _, equal in groupby(row)]
    return 100 * sum(n for n in runs if n >= 3) / max(1, len(row))
