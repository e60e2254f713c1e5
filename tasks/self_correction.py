"""
self_correction: gidd takes back what it wrote. Of its own samples, the share of tokens that are the
network's own first choice (accuracy), before and after as many rounds as self_correct says (0: as
many as there are positions), and what the texts are like.
Controls: before; data, the texts themselves.
"""
import torch

from sampling.denoise import batches, make_denoise, null_latents
from sampling.run import FILLS
from sampling.writing import blank, ends_of, write
from tasks.common import FREE_SETTINGS, Figures, TaskNeeds
from tasks.measures import describe_texts, real_ids
from tasks.scorer import prepare_scorer

NEEDS = TaskNeeds(('text',), (FILLS,))
SETTINGS = FREE_SETTINGS


def prepare(run, knobs):
    if not hasattr(run.text, 'correct'):
        raise ValueError(f'{run.out_dir} was not trained with text_process=gidd, which can take '
                         'back what it wrote: no self_correction from it')
    return prepare_scorer(run, knobs)


@torch.inference_mode()
def measure(run, ctx):
    knobs = ctx.sampling_knobs(self_correct=0, guidance=1.0)
    rounds = ctx.knobs['self_correct'] or run.L
    batch = knobs.sample_batch
    rng = torch.Generator().manual_seed(knobs.seed)

    # samples that are not corrected yet
    tokens, known_mask = blank(run, ctx.n, knobs)
    before = write(run, tokens, known_mask, None, knobs)

    # correct them
    after, accuracy_before, accuracy, n_rounds, is_done = correct(
        run, before, known_mask, rounds, batch, rng)
    _, accuracy_of_data, *_ = correct(run, ctx.tokens, ends_of(run, ctx.tokens), 0, batch, rng)
    changed = (after != before).sum(1) / (~known_mask).sum(1)
    figures = Figures(ctx.n)
    figures.enter('', {'accuracy': 100 * accuracy, 'changed': 100 * changed, 'rounds': n_rounds,
                       'converged': 100.0 * is_done})
    figures.enter('before', {'accuracy': 100 * accuracy_before})
    figures.enter('data', {'accuracy': 100 * accuracy_of_data})
    for control, x in (('', after), ('before', before), ('data', ctx.tokens)):
        describe_texts(figures, control, run.decode(x), real_ids(run, x), ctx.prepared)
    ctx.shown += [f'-> {text}' for text in run.decode(after)]
    return figures


def correct(run, tokens, known_mask, rounds, batch, rng):
    """ What run.text.correct gives, of all rows: the tokens (n, L) after so many rounds, and (n,)
    each: accuracy before and after, rounds that changed a token, whether no more would. """
    parts = []
    for rows in batches(run, len(tokens), batch, run.L):
        x, known = tokens[rows], known_mask[rows]
        null = null_latents(run, len(x), rng) if 'latent' in run.streams else None
        denoise = make_denoise(run, 0, None, null)
        parts.append(run.text.correct(denoise, x.to(run.device), known, rounds, rng))
    return [torch.cat(part).cpu() for part in zip(*parts)]
