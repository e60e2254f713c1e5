""" A text distribution small enough to enumerate (V = 3, L = 4), and networks that are tables over
its 4^4 noisy states. """
import itertools
import math
from types import SimpleNamespace

import torch

from diffusion import GaussianLatents, MaskedText, modes_of
from samplers import no_callback
from sampling.knobs import SamplingKnobs
from sampling.run import FILLS, Run
from sampling.writing import blank, write

V, L, MASK = 3, 4, 3
TEXTS = torch.tensor(list(itertools.product(range(V), repeat=L)))        # (81, 4)
STATES = torch.tensor(list(itertools.product(range(V + 1), repeat=L)))   # (256, 4), with MASK
WEIGHTS = (V + 1) ** torch.arange(L - 1, -1, -1)


def index(states):
    """ Row of STATES of each state (..., L). """
    return (states * WEIGHTS).sum(-1)


class Network:
    """ What is asked of a model, from a function that gives logits: its hidden states are the
    logits, and its head leaves them alone. """

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *args, return_hidden=False, **kw):
        return self.forward(*args, **kw)

    def text_head(self, hidden):
        return hidden


class Toy(Network):
    """ A network by table (256, L, V) of logits, with Model's forward; it ignores latents and
    clocks. """

    def __init__(self, table):
        self.table = table

    def forward(self, tokens, latents, t_text, t_latent, positions=None, predict=('text',)):
        logits = self.table[index(tokens)].float()                       # (B, L, V)
        return (logits if positions is None else logits.flatten(0, 1)[positions]), None


def text_law(seed=0):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(len(TEXTS), generator=g, dtype=torch.float64) ** 3
    return p / p.sum()


def optimal_denoiser(seed=0):
    """ p (81,) and the table of its network. """
    p = text_law(seed)
    return p, denoiser_of(p)


def denoiser_of(p):
    """ The table of log P(x^i = v | visible tokens of the state), of the law p (81,). """
    fits = ((STATES[:, None] == MASK) | (STATES[:, None] == TEXTS)).all(-1) * p      # (256, 81)
    onehot = torch.nn.functional.one_hot(TEXTS, V).double()                          # (81, L, V)
    table = torch.einsum('sx,xlv->slv', fits, onehot)
    return (table / fits.sum(1)[:, None, None]).clamp(min=1e-300).log()


def random_denoiser(seed=1):
    """ A network that knows nothing of the data. """
    g = torch.Generator().manual_seed(seed)
    return torch.randn(len(STATES), L, V, generator=g, dtype=torch.float64)


def exact_bound(p, table, kind):
    """ Expected bound, nats per text, by enumerating texts and masks.  count: n ~ U{1..L}, L/n;
    continuous: E_t [1/t sum], with integral of t^(n-1) (1-t)^(L-n) dt = (n-1)! (L-n)! / L!. """
    logp, total = table.log_softmax(-1), 0.0
    for bits in itertools.product([False, True], repeat=L):
        n, mask = sum(bits), torch.tensor(bits)
        if not n:
            continue
        nll = -logp[index(torch.where(mask, MASK, TEXTS))].gather(-1, TEXTS[..., None])[..., 0]
        by_time = math.factorial(n - 1) * math.factorial(L - n) / math.factorial(L)
        weight = {'count': 1 / n / math.comb(L, n), 'continuous': by_time}[kind]
        total += weight * (p * (nll * mask).sum(1)).sum().item()
    return total


def chain_law(table, shares):
    """ Law over TEXTS of the chain that, step by step, releases each masked position with
    probability u of `shares`. """
    return release_chain(table, [(u, 0.0) for u in shares])


def release_chain(table, steps):
    """ The same with remasking: steps of (probability that a masked position is released, that a
    visible one is masked again). """
    law = torch.zeros(len(STATES), dtype=torch.float64)
    law[-1] = 1                                                          # all MASK
    probs = table.softmax(-1)
    for u, g in steps:
        new = torch.zeros_like(law)
        for i in law.nonzero().flatten().tolist():
            moves = []                                     # per position: (token, probability)
            for position, token in enumerate(STATES[i].tolist()):
                written = [(v, u * probs[i, position, v].item()) for v in range(V)]
                moves.append([(token, 1 - g), (MASK, g)] if token != MASK
                             else [(MASK, 1 - u), *written])
            for combination in itertools.product(*moves):
                tokens, factors = zip(*combination)
                if math.prod(factors):
                    new[index(torch.tensor(tokens))] += law[i] * math.prod(factors)
        law = new
    return law[index(TEXTS)]


def any_order_law(table, block=L):
    """ Law over TEXTS of: a uniformly chosen masked position of the leftmost unfinished block at a
    time, x ~ Cat(p). """
    law = torch.zeros(len(STATES), dtype=torch.float64)
    law[-1] = 1
    probs = table.softmax(-1)
    for _ in range(L):
        new = torch.zeros_like(law)
        for i in law.nonzero().flatten().tolist():
            masked = (STATES[i] == MASK).nonzero().flatten().tolist()
            masked = [position for position in masked if position // block == masked[0] // block]
            for position in masked:
                for v in range(V):
                    state = STATES[i].clone()
                    state[position] = v
                    new[index(state)] += law[i] / len(masked) * probs[i, position, v]
        law = new
    return law[index(TEXTS)]


def chi_square_z(samples, law):
    """ How many standard deviations the chi-square of samples (n, L) lies above its mean under
    `law` (81,). """
    counts = torch.bincount(index(samples), minlength=len(STATES))[index(TEXTS)].double()
    assert counts.sum() == len(samples), 'a sample still holds MASK'
    expected = law * len(samples)
    keep = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[keep].sum()
    return ((statistic - (keep.sum() - 1)) / math.sqrt(2 * (keep.sum() - 1))).item()


def flat(figures):
    """ {'control/metric': value} of a task's Figures, '..._se': its standard error. """
    found = {}
    for (control, metric), (value, se) in figures.items():
        key = f'{control}/{metric}' if control else metric
        found[key] = value
        if se is not None:
            found[f'{key}_se'] = se
    return found


# ---- a run that is known

EOS, PAD = 1, 2                                              # of the V = 3 ids of the toy


class Known(Network):
    """ A two-stream network that says what its condition tells it: text logits that differ where
    the latents say nothing, and latents, as v, whose x0 is the first token of the text, or -1 where
    that is all MASK. It keeps its clocks. """
    streams, n_latents, latent_dim, seq_len, latent_tokens = ('text', 'latent'), 1, 2, L, 1
    depth = width = 1

    def __init__(self):
        self.config, self.clocks, self.latent = self, [], GaussianLatents(torch.ones(2))

    def forward(self, tokens, z, t_text, t_latent, positions=None, predict=('text', 'latent')):
        self.clocks.append((t_text[0].item(), t_latent[0].item()))
        logits = out = None
        if 'text' in predict:
            conditional, null = torch.tensor([1., 0., 2.]), torch.tensor([0., 3., 0.])
            logits = torch.where((t_latent == 1)[:, None, None], null, conditional)
            logits = logits.expand(len(tokens), L, 3).clone().flatten(0, 1)[positions]
        if 'latent' in predict:
            all_masked = (tokens == MASK).all(1)
            x0 = torch.where(all_masked, -1., tokens[:, 0].float())[:, None, None].expand(z.shape)
            a, s = (x[:, None, None] for x in self.latent.alpha_sigma(t_latent))
            out = (a * z - x0) / s                           # from x0 = a z_t - s v
        return logits, out


def toy_run(mode='unconditional+l2t+t2l', **changes):
    """ A run.Run of the toy, without a folder. A text is a list of its ids. """
    tokenizer = SimpleNamespace(eos=EOS, pad=PAD, kind='bpe', decode=lambda ids: ids,
                                encode=lambda text: [0] * len(text))
    stats = SimpleNamespace(standardise=lambda z: z, destandardise=lambda z: z)
    run = Run.__new__(Run)
    learned = modes_of(mode)
    vars(run).update(
        next_token=None, learned=learned, fills_masks=bool(learned & set(FILLS)), model=Known(),
        streams=('text', 'latent'), out_dir='out/toy', device='cpu', dtype='float32', L=L,
        row_calls=0, lengths=None, banned=[], text=MaskedText(V), stats=stats, encoder=None,
        latent=GaussianLatents(torch.ones(2)), tokenizer=tokenizer, config=dict(mode=mode),
        meta=dict(encoder=None))
    vars(run).update(changes)
    return run


def l2t(run, z, on_step=no_callback, **knobs):
    """ Tokens (n, L) written from standardised latents z (n, N, D). """
    knobs = SamplingKnobs(**knobs)
    return write(run, *blank(run, len(z), knobs), z, knobs, on_step=on_step)
