"""
protein: recovery of masked residues in one call, by the share that is masked, .1 to .9; and as many
new sequences as there are texts: how far their composition is from the training split's (total
variation), and how they repeat. (nelbo has the bound per residue.)
Controls: unigram, residues drawn one by one from the training frequencies, at the lengths of the
texts; data, the texts.
"""
import re

import torch

from data import is_end
from diffusion import in_chunks, positions_of, uniforms
from sampling.denoise import call, null_latents
from sampling.directions import FILLS
from sampling.knobs import TEXT_KNOBS
from sampling.writing import blank, write
from tasks.common import Measured, TaskNeeds, decode, means, open_split, real_ids

NEEDS = TaskNeeds(('text',), (FILLS,), masked_text=True, tokenizer='esm')
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
        means(results, '', {name: found[some].numpy()})
        n_commonest = ((tokens == frequency.argmax()) & mask).sum(1)
        commonest = 100.0 * n_commonest / mask.sum(1).clamp(min=1)
        means(results, 'unigram/', {name: commonest[some].numpy()})

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
        results[f'{control}composition_distance'] = distance.item()
        means(results, control, {**repeats(rows), 'length': [len(row) for row in rows]})
    return Measured(results, [f'-> {text}' for text in decode(run, written)])


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


def repeats(rows):
    """ Per sequence, %: residues in runs of three or more equal ones; 3-grams that the sequence has
    had before. """
    in_runs, repeated = [], []
    for row in rows:
        text = ''.join(map(chr, row))
        n_in_runs = sum(len(found[0]) for found in re.finditer(r'(.)\1{2,}', text, re.DOTALL))
        in_runs.append(100 * n_in_runs / max(1, len(text)))
        grams = [text[i:i + 3] for i in range(len(text) - 2)]
        repeated.append(100 * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
    return {'runs': in_runs, 'repeated_3grams': repeated}
