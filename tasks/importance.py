"""
importance: the loss at masked positions by quarters of the tokens: by their frequency in the
training split (rare last), and by their importance (processes/adaptive.py), with the rank
correlation of importance and a token's mean loss. n ~ U{1..L} positions are masked.
genmd4: the bound for the rates that a run with importance=freq was trained at.
"""
import torch

from corpora.statistics import counts
from diffusion import nll_of, positions_of, sum_over_texts, to_device, uniforms
from processes.adaptive import Adaptive, rarity
from sampling.denoise import call, rows_that_fit
from sampling.run import FILLS
from sampling.writing import ends_of
from tasks.common import Figures, TaskNeeds, open_split, progress_bar
from tasks.measures import correlations

NEEDS = TaskNeeds(('text',), (FILLS,), masked_text=True)
SETTINGS = ('draws',)


@torch.inference_mode()
def measure(run, ctx):
    tokens = ctx.tokens
    draws, seed, batch = (ctx.knobs[name] for name in ('draws', 'seed', 'sample_batch'))
    batch = rows_that_fit(run, batch, run.L)
    z = None if ctx.raw is None else run.stats.standardise(ctx.raw)
    loss, count = losses(run, tokens, z, draws, seed, batch)
    used = (count > 0) & (tokens != run.tokenizer.pad)

    # (n, L) each
    rare = rarity(counts(open_split(run, ctx.folder, 'train')), run.tokenizer.pad)      # (V,)
    values = {'frequency': rare[tokens]}
    if run.model.importance:
        parts = [run.model.importance(x.to(run.device))[0] for x in tokens.split(batch)]
        values['importance'] = torch.cat(parts).float().cpu()

    # by quarters
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
        correlation = correlations(value[used].numpy(), loss[used].numpy())
        figures.enter(name, {'spearman_with_loss': correlation['spearman'].value,
                             'std': value[used].std().item()})

    if run.config['importance'] == 'freq':
        bound = rated_bound(run, tokens, z, rare, draws, seed, batch)
        figures.enter('genmd4', {'nats_per_token': bound})
    return figures


def losses(run, tokens, z, draws, seed, batch):
    """ Of every token (n, L): its mean loss in nats, and how often it was masked. """
    n, L = tokens.shape
    nats = torch.zeros(n, L, dtype=torch.float64)
    count = torch.zeros(n, L)
    for i in progress_bar(range(0, n, batch), desc='importance', unit='batch'):
        rows = slice(i, i + batch)
        x = tokens[rows]
        latents = None if z is None else z[rows].to(run.device)
        ends = ends_of(run, x)
        n_free = (~ends).sum(1).clamp(min=1)
        for k in range(draws):
            # mask so many positions of each text, evenly over 1..L
            u = uniforms(seed, k, 'evaluation', i, len(x), 1 + L)
            share = (u[:, 0] + k / draws) % 1
            size = 1 + (share * n_free).long().clamp(max=n_free - 1)
            noisy, mask = run.text.corrupt_exactly(x, size, u[:, 1:], ends)
            positions = positions_of(mask)                               # (P,)
            t = run.text.time_of_share(size.double() / L)
            logits, _ = call(run, noisy.to(run.device), latents, t, 0.0, positions)

            # the loss where it was masked
            targets = x.flatten()[positions].to(run.device)
            nll = nll_of(logits, targets).cpu().double()
            nats[rows].view(-1)[positions] += nll
            count[rows] += mask
    return nats / count.clamp(min=1), count


def rated_bound(run, tokens, z, rare, draws, seed, batch):
    """ Nats per real token of the bound for the rates that the run was trained at, at its end
    (genmd4_bound). """
    c = run.config
    trained = Adaptive(
        masking=c['masking'],
        beta=c['beta'],
        curriculum=False,
        stages=(.3, .7),
        focus=1,
        max_iters=c['max_iters'],
        pad=run.tokenizer.pad,
        rarity=rare,
        learns=False)
    w = trained.exponents(rare.double(), c['max_iters'] - 1)
    n, L = tokens.shape
    total = 0.0
    for i in range(0, n, batch):
        x = tokens[i:i + batch]
        latents = None if z is None else z[i:i + batch].to(run.device)
        B, zeros = len(x), torch.zeros(len(x), device=run.device)
        for k in range(draws):
            u = uniforms(seed, k, 'evaluation', i, B, 1 + L)
            t = (torch.arange(B) + u[:, 0]) / B                          # spread over (0, 1)
            nats = genmd4_bound(run.model, run.text, x, latents, zeros, t, u[:, 1:], w,
                                ends_of(run, x))
            total += nats.sum().item() / draws
    is_real = (tokens != run.tokenizer.pad) & ~ends_of(run, tokens)
    return total / is_real.sum().item()


@torch.no_grad()
def genmd4_bound(model, text, tokens, latents, t_latent, t, u, w, known_mask=None):
    """
    One draw, nats per sample (B,), float64, of the bound for rates l_v = w_v w(t) that belong to
    the token:
        E_t [ sum over masked of  l_x (-log mu_x) - l_x + sum over v of l_v mu_v ]
        mu = p(. | x_t, t)
    The last two terms are the price of rates that the network cannot know. They vanish where all w
    are equal, and in expectation at the true posterior, which depends on the text clock t.
    tokens (B, L); t (B,) spread over (0, 1); u (B, L) uniform; w (V,); known_mask (B, L): True is
    not masked. What lies where is as in MaskedText.bound: all of these, and the result, on the
    host.                                                              GenMD4, arXiv:2406.04329
    """
    noisy, mask = text.corrupt(tokens, t, u, known_mask, w[tokens])
    weight = text.bound_weight(t).float()[:, None].expand(tokens.shape)              # (B, L)
    w_device = to_device(w.float(), t_latent)

    # the terms of the bound
    def terms(logits, x, weight):
        log_mu = logits.log_softmax(1)                                   # (p, V)
        l_v = w_device * weight[:, None]                                 # (p, V)
        l_x = l_v.gather(1, x[:, None]).squeeze(1)
        log_mu_x = log_mu.gather(1, x[:, None]).squeeze(1)
        return l_x * -log_mu_x - l_x + (l_v * log_mu.exp()).sum(1)

    return sum_over_texts(terms, model, text.mask_id, noisy, latents, t, t_latent, mask, tokens,
                          weight)
