"""
The network as samplers, likelihoods, drafts, beams and tasks ask it.

    net = Denoiser(model, text, latent, eos, pad, learned={'l2t'})
    logits = net.logits(tokens, t, positions, z, s)        # one call: log p(x | x_t, z_s) there
    x0, e = net.latent_at(tokens, t, z_s, s)               # one call: the clean latent, the noise
    denoise = net.given(z, null=noise, guidance=1.5)       # what a text sampler calls

Guidance g mixes two predictions of the one network, with the condition (c) and with nothing (u):
its clock at 1, and noise or MASK in its place.
    text      log p = g log p_c + (1 - g) log p_u
    latents   x0 = g x0_c + (1 - g) x0_u, and e likewise

Letters: B rows of a batch, L text tokens, N latent vectors, D latent dims, P positions where the
head runs, V vocabulary.
"""
import torch

from base.console import progress_bar
from diffusion import exact_nll, is_end, positions_of, to_device
from samplers import log_p_of
from sampling.reader import Reader
from sampling.solvers import x0_and_e

MOST_BYTES = 6 * 10 ** 9           # that a network call keeps for its rows
# what stays float32: clocks, and where latents come in or pass by the blocks
IN_FLOAT32 = ('text_clock', 'latent_clock', 'latent_in', 'shortcut', 'bag', 'importance')
FILLS = ('l2t', 'unconditional')   # modes that teach to fill masks


def cast(model, dtype):
    """ The model, with the weights of its products cast once to the dtype it computes in: autocast
    would cast them at every call. """
    for name, module in model.named_modules():
        is_product = isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
        if is_product and not name.startswith(IN_FLOAT32):
            module.to(getattr(torch, dtype))
    return model


def guided_logits(g, conditional, unconditional):
    """ log p = g log p_c + (1 - g) log p_u. Both are functions without arguments that give logits
    (P, V), by one network call each. A model that weighs nothing is not called. """
    if g == 1:
        return conditional()
    if g == 0:
        return unconditional()
    log_p_c = conditional().log_softmax(-1)
    log_p_u = unconditional().log_softmax(-1)
    return g * log_p_c + (1 - g) * log_p_u


def guided_latents(g, conditional, unconditional):
    """ The same for latents: the functions give x0 and e. """
    if g == 1:
        return conditional()
    if g == 0:
        return unconditional()
    x0_c, e_c = conditional()
    x0_u, e_u = unconditional()
    x0 = g * x0_c + (1 - g) * x0_u
    e = g * e_c + (1 - g) * e_u
    return x0, e


class Denoiser:
    """
    model        model.Model; its products are cast to dtype
    text         its text process: diffusion.MaskedText, or one of processes/
    latent       diffusion.GaussianLatents; None of a network without latents
    eos, pad     their ids
    learned      the modes that it was trained for
    lengths      quantiles of the training texts' lengths, where it does not learn when a text ends
    banned (n,)  ids that no sampler writes
    """

    def __init__(self, model, text, latent=None, eos=None, pad=None, learned=('l2t',),
                 lengths=None, banned=(), dtype='float32'):
        self.model = cast(model, dtype)
        self.text = text
        self.latent = latent
        self.eos, self.pad = eos, pad
        self.learned = set(learned)
        self.is_causal = 'causal' in self.learned          # it writes from left to right
        self.fills_masks = bool(self.learned & set(FILLS))
        self.lengths = lengths
        self.dtype = dtype
        self.device = model.bias.device
        self.streams = model.config.streams
        self.L = model.config.seq_len                      # the longest text, in tokens
        self.banned = torch.as_tensor(banned, dtype=torch.int64, device=self.device)
        self.row_calls = 0                                 # rows the network has read: the cost

    # ---- one call

    def clock(self, t, B):
        """ A clock, a number or (B,), as the network reads it; nothing waits. """
        t = torch.as_tensor(t, dtype=torch.float32)
        return t.to(self.device, non_blocking=True).expand(B)

    def logits(self, tokens, t, positions, z=None, s=1.0):
        """ (P, V) float32 at the flat positions (P,) of noisy texts tokens (B, L) at clock t, from
        latents z (B, N, D) as they stand at clock s. """
        B = len(tokens)
        self.row_calls += B
        found, _ = self.model(tokens, z, self.clock(t, B), self.clock(s, B),
                              to_device(positions, tokens), predict=('text',))
        return found

    def next_logits(self, tokens, cache, z=None, s=1.0):
        """ (B, V) of the token after `tokens` (B, l), which are read from left to right. cache: a
        dict that the caller keeps, empty at first: of what it holds, nothing is read again. """
        B = len(tokens)
        self.row_calls += B
        if not cache:
            cache['reader'] = Reader(self.model, B, z, self.clock(0., B), self.clock(s, B))
        last = tokens[:, -1]
        return cache['reader'].read(tokens, has_ended=(last == self.eos) | (last == self.pad))

    def keep(self, cache, texts):
        """ Goes on with these of the texts that were read into a cache, by their numbers (B,). A
        text may be among them repeatedly, as in a beam search. """
        cache['reader'].keep(texts)

    def latent_at(self, tokens, t, z_s, s, given=None):
        """ x0 and e (B, N, D), the clean latent and the noise in z_s, given texts (B, L). given
        (B, N): vectors of z_s that are clean, or None. """
        B = len(z_s)
        self.row_calls += B
        _, out = self.model(tokens, z_s, self.clock(t, B), self.clock(s, B), predict=('latent',),
                            given=given)
        return x0_and_e(self.latent, out, z_s, s)

    def nats(self, tokens, z, s, u=None, known_mask=None):
        """ Of texts tokens (B, L), (B,) float64 on the host: -log p read from left to right where
        u is None, else a draw of the bound of their process by u (B, 1 + L). known_mask (B, L) or
        None: what is given, and not scored. """
        self.row_calls += len(tokens)
        z = None if z is None else z.to(self.device)
        s = self.clock(s, len(tokens))
        if u is None:
            return exact_nll(self.model, tokens, z, s, known_mask)
        return self.text.bound(self.model, tokens, z, s, u, known_mask)

    def log_p_hidden(self, tokens, mask, z=None, s=1.0, positions=None):
        """ log p(x^i | the tokens that are not masked, z) of texts tokens (B, L) at the flat
        positions (P,), by default those of mask (B, L): the positions, and (P,), on the host. The
        clock of each text is that of its share of MASK. """
        if positions is None:
            positions = positions_of(mask)
        noisy = torch.where(mask, self.text.mask_id, tokens)
        t = self.text.time_of_share(mask.double().mean(1))
        if z is not None:
            z = z.to(self.device)
        logits = self.logits(noisy.to(self.device), t, positions, z, s)
        targets = tokens.flatten()[positions].to(self.device)
        return positions, log_p_of(logits, targets).cpu()

    # ---- conditions

    def at_clock(self, z, s):
        """ Latents as they are given, z + (sigma_s / alpha_s) e, as the network reads them at clock
        s: alpha_s z + sigma_s e. """
        alpha_s, _ = self.latent.alpha_sigma(torch.tensor(s))
        return alpha_s * z

    def nothing(self, noise, purpose='null'):
        """ Latents (B, N, D) that say nothing: random numbers of these rows, for clock 1. None of a
        network without latents. """
        c = self.model.config
        if 'latent' not in self.streams:
            return None
        return noise.normals(purpose, c.n_latents, c.latent_dim).to(self.device) * self.latent.live

    def ends(self, tokens):
        """ (B, L): EOS and PAD, where they are given to the network. """
        if not self.lengths:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return is_end(tokens, self)

    def given(self, z=None, s=0.0, null=None, guidance=1.0, inner=None, is_causal=False):
        """ denoise(tokens, t, positions, rows) of samplers.py.
        z (B, N, D): the latents, as they are read at clock s; null (B, N, D): noise, which the
        unconditional call reads in their place. None: none.
        guidance: g. With 1 the unconditional call is not made, with 0 the conditional one is not.
        inner (B, L): positions where EOS and PAD are not allowed.
        is_causal: the text is written from left to right. Then `tokens` are those before the next
        one, with MASK first, t is not read, and the keys and values of both calls are kept in two
        caches from one call of denoise to the next. """
        cache_c = {}
        cache_u = {}

        def call(tokens, t, positions, z, s, cache):
            if is_causal:
                return self.next_logits(tokens, cache, z, s)
            return self.logits(tokens, t, positions, z, s)

        def denoise(tokens, t, positions, rows=slice(None)):
            if isinstance(rows, torch.Tensor):
                rows = to_device(rows, tokens)

            def conditional():
                return call(tokens, t, positions, z[rows], s, cache_c)

            def unconditional():
                nothing = None if null is None else null[rows]
                return call(tokens, t, positions, nothing, 1.0, cache_u)

            logits = guided_logits(guidance, conditional, unconditional)             # (P, V)
            is_inner = None
            if inner is not None:
                is_inner = inner[rows].flatten()[to_device(positions, tokens)]       # (P,)
            return self.allowed(logits, is_inner)
        return denoise

    def allowed(self, logits, is_inner=None):
        """ The logits (P, V), in place, with -inf for the ids that are never written, and for EOS
        and PAD where is_inner (P,) is True. """
        # -inf is made on the device: for a number of the host the host would wait
        logits[:, self.banned] = logits.new_full((), -torch.inf)
        if is_inner is not None:
            penalty = torch.where(is_inner, -torch.inf, 0.0)
            for i in (self.eos, self.pad):
                logits[:, i] += penalty
        return logits

    # ---- how many rows at a time

    def rows_that_fit(self, batch, n_asked=0, n_caches=0):
        """ The rows of a network call: batch, or as many as MOST_BYTES hold, where these are fewer.
        n_asked: positions of a row at which the head runs. n_caches: of keys and values, where a
        text is written from left to right. """
        c = self.model.config

        # numbers of a row: 25 for each position and dimension are alive at the widest point of a
        # block, the MLP. A cache has two more in each block
        n_positions = c.seq_len + c.n_latents * c.latent_tokens
        numbers = n_positions * c.width * (25 + 2 * c.depth * n_caches)
        n_bytes = numbers * (2 if self.dtype == 'bfloat16' else 4)
        # eight tables of the vocabulary's width are alive where a token is drawn
        n_bytes += n_asked * self.text.mask_id * 8 * 4
        return max(1, min(batch, MOST_BYTES // n_bytes))

    def batches(self, n, batch, n_asked=0, n_caches=0, is_watched=False):
        """ The slices of n rows that go through the network together. There is a progress bar
        where there are several, and nothing else is shown. """
        size = self.rows_that_fit(batch, n_asked, n_caches)
        with progress_bar(total=n, unit='row', disable=n <= size or is_watched) as bar:
            for first in range(0, n, size):
                part = slice(first, min(n, first + size))
                yield part
                bar.update(part.stop - part.start)
