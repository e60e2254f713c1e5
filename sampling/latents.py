"""
Latents, made by diffusion: of texts, of nothing, or along with a text.
Letters: n texts, B rows of a batch, L text tokens, N latent vectors, D latent dims.
"""
import torch

from samplers import make_propose, no_callback
from sampling.denoise import allowed, batches, call, guided_latents, null_latents
from sampling.knobs import settle
from sampling.solvers import SOLVERS, latent_times, solve, x0_and_e
from sampling.writing import asked_of_a_row, blank, ends_of, generators, pick_sampler


@torch.inference_mode()
def make_latents(run, tokens, n, knobs):
    """ n standardised latents (n, N, D) of texts tokens (n, L), or of no text: tokens None. """
    knobs = settle(run, knobs, from_text=tokens is not None)
    g = 0 if tokens is None else knobs.guidance
    if tokens is None:
        tokens, _ = blank(run, n, knobs)
    rng = torch.Generator(run.device).manual_seed(knobs.seed)
    out = []
    for part in batches(run, n, knobs.sample_batch):
        # the texts, and the same with every token MASK
        x = tokens[part].to(run.device)
        null = torch.where(ends_of(run, x), x, run.text.mask_id)

        def denoise(z, t):
            def beside(tokens, t_text):
                prediction = call(run, tokens, z, t_text, t, predict=('latent',))[1]
                return x0_and_e(run.latent, prediction, z, t)
            return guided_latents(g, lambda: beside(x, 0.0), lambda: beside(null, 1.0))

        noise = null_latents(run, len(x), rng)
        z = solve(run.latent, knobs.solver, noise, knobs.latent_steps, denoise, rng)
        out.append(z.cpu())
    return torch.cat(out)

# -----------------------------------------------------------------------------
# A latent and a text together

JOINT = ('ancestral', 'confidence', 'remdm', 'dfm')   # samplers of one call a step


class JointDenoise:
    """
    denoise(tokens, t, positions) of samplers.py, in which each network call is also a
    step of the latents.
    z (n, N, D): the latents, noise at first; i: how many of their steps they have taken.
    """

    def __init__(self, run, n, steps, solver, rng):
        self.run = run
        self.step = SOLVERS[solver]
        self.times = latent_times(run.latent, steps)
        self.rng = rng
        self.z = null_latents(run, n, rng)
        self.i = 0
        self.memory = {}

    def __call__(self, tokens, t_text, positions):
        run = self.run
        t = self.times[self.i]
        t_next = self.times[self.i + 1]
        logits, prediction = call(run, tokens, self.z, t_text, t, positions,
                                  predict=('text', 'latent'))

        # the step of the latents
        def predicted(z, t):
            return x0_and_e(run.latent, prediction, z, t)

        noise = null_latents(run, len(tokens), self.rng)
        z = self.step(run.latent, self.z, t, t_next, predicted, self.memory, noise)
        self.z = z.float()
        self.i += 1
        return allowed(run, logits)


@torch.inference_mode()
def write_both(run, n, knobs, on_step=no_callback):
    """ Text and latent from noise: both clocks run down together, one call a step for both. Returns
    tokens (n, L) and standardised latents (n, N, D). """
    knobs = settle(run, knobs, is_joint=True)
    if knobs.sampler not in JOINT or knobs.block_size or knobs.guidance != 1:
        raise ValueError(f'sampler={knobs.sampler}, block_size={knobs.block_size}, '
                         f'guidance={knobs.guidance}: joint sampling takes {", ".join(JOINT)}, '
                         'all positions at once, and has no condition to weigh')
    sampler, _ = pick_sampler(run, knobs)

    # batch by batch
    rng, device_rng = generators(run, knobs.seed)
    propose = make_propose(knobs.temperature, knobs.nucleus, device_rng)
    all_tokens, all_known = blank(run, n, knobs)
    out = []
    n_asked = asked_of_a_row(run, knobs)
    for part in batches(run, n, knobs.sample_batch, n_asked, 0, on_step is not no_callback):
        tokens = all_tokens[part].to(run.device)
        known_mask = all_known[part]
        steps = knobs.steps
        if knobs.sampler == 'confidence':                                # it makes no more calls
            steps = min(steps, int((~known_mask).sum(1).max()))

        # the text sampler asks for logits, and the latents go along
        joint = JointDenoise(run, len(tokens), steps, knobs.solver, device_rng)
        on_step(tokens)
        tokens = sampler(joint, propose, run.text, tokens, known_mask, steps, rng, on_step)
        out.append((tokens.cpu(), joint.z.cpu()))
    return tuple(torch.cat(parts) for parts in zip(*out))
