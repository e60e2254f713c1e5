"""
Write text from an embedding (l2t): every sampler, one function each, one signature, and the command line.

    python sample.py --out_dir=out/quickstart --text="Return the number of items."          # encode, then write it anew
    python sample.py --out_dir=out/quickstart --text="Return a list." --num_samples=4 --watch=true
    python sample.py --out_dir=out/quickstart --latents=z.npy --steps=64 --sampler=first_hitting

A text sampler is  sampler(denoise, propose, text, tokens, given, steps, rng, on_step) -> tokens (B, L):
    denoise(tokens, t)  logits (B, L, V) of the network with its condition inside; t (B,) clocks
    propose(logits)     x ~ Cat(p) at every position, and log p of what was drawn: (B, L) each
    text                diffusion.MaskedText: the schedule of training
    tokens, given       (B, L); given (True = never touched) are not counted; the rest starts as MASK
    rng                 a torch.Generator on the device; on_step(tokens) sees every state
Rows never wait for the host: no loop over rows, no sync per step. The text clock, where the network reads one, is the schedule's
t for ancestral, and the solution of 1 - a(t) = n_masked / L per row for the others: the clock of the bound (text_bound).
"""
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import load_model, pick_device
from configurator import configure, stop, stop_on_error
from data import load_stats, load_tokenizer
from diffusion import GaussianLatents, MaskedText
from encoders import load_encoder

out_dir = 'out/quickstart'      # the run folder: model, data records and schedule all come from it
which = 'best'                  # best | latest | step-00001000
text = ''                       # l2t of this text's embedding
latents = ''                    # or of the raw embeddings in this .npy file: (n, D) or (n, N, D)
num_samples = 1                 # per text or latent
sampler = 'confidence'          # ancestral | first_hitting | confidence
steps = 0                       # network calls; 0: one per token for confidence and first_hitting, 128 for ancestral
score = 'top1'                  # confidence: top1 | margin | entropy | threshold
temperature = -1.0              # 0 takes the likeliest token; -1: 1, but for confidence 0, or 0.7 where one source gets several texts
nucleus = 1.0                   # keep the likeliest tokens that hold this much probability, and the one on the boundary
guidance = 1.0                  # log p = g log p(.|z) + (1 - g) log p(.); 1 is the conditional model, 0 the unconditional
sample_batch = 128              # rows per network call
seed = 0
encoder_folder = ''             # where the encoder lies now; '': where it was when the data were prepared
watch = False                   # see the text being uncovered
device = 'auto'                 # auto | cpu | cuda
dtype = 'bfloat16'              # bfloat16 | float32


# ---- from logits to tokens

def nucleus_filter(logits, p):
    """ Token i stays when the mass of the likelier ones is below p: the boundary token stays, and so does the top one always. """
    if p >= 1:
        return logits
    sorted_logits, order = logits.sort(-1, descending=True)
    mass = sorted_logits.softmax(-1)
    drop = (mass.cumsum(-1) - mass >= p).scatter(-1, order, mass.cumsum(-1) - mass >= p)
    drop.scatter_(-1, order[..., :1], False)
    return logits.masked_fill(drop, -torch.inf)


def make_propose(temperature, nucleus, rng):
    """ propose(logits (B, L, V)) -> x ~ Cat(softmax(logits / temperature)), filtered, and log p(x) of the unfiltered model. """
    def propose(logits):
        if temperature == 0:
            x = logits.argmax(-1)
        else:
            p = nucleus_filter(logits / temperature, nucleus).softmax(-1)
            # p / Exp(1) is largest at i with probability p_i; this decides *what* a released token is, never *whether* one is
            # released: one categorical over V and MASK would get that rate wrong in float32 (arXiv:2409.02908)
            x = (p / torch.empty_like(p).exponential_(generator=rng)).argmax(-1)
        return x, logits.log_softmax(-1).gather(-1, x[..., None]).squeeze(-1)
    return propose


def make_denoise(model, latents, t_latent, null, guidance, autocast):
    """ denoise(tokens, t) -> logits (B, L, V) float32, guided:  log p = g log p_c + (1 - g) log p_0,  p_0 the same network with
    the latents' clock at 1 and their content noise `null` (B, N, D). g = 1 and g = 0 cost one call. """
    ones = torch.ones_like(t_latent)

    def denoise(tokens, t):
        def run(z, clock):
            with autocast():
                return model(tokens, z, t, clock, predict=('text',))[0]
        if guidance == 1:
            return run(latents, t_latent)
        if guidance == 0:
            return run(null, ones)
        return guidance * run(latents, t_latent).log_softmax(-1) + (1 - guidance) * run(null, ones).log_softmax(-1)
    return denoise


def bound_clock(text, masked):
    """ Per row the t with 1 - a(t) = n_masked / L. (B,) """
    return text.clock(masked.float().mean(1))


# ---- the samplers

def ancestral(denoise, propose, text, tokens, given, steps, rng, on_step=lambda tokens: None):
    """ From t to s each masked position is released with probability (M_t - M_s)/M_t, and if so x ~ Cat(p). The last step
    releases all that is left, by sampling.    MDLM arXiv:2406.07524 """
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
    any_given = bool(given.any())
    for t, s in zip(times, times[1:]):
        masked = tokens == text.mask_id
        u = float(text.release_share(torch.tensor(t, dtype=torch.float64), torch.tensor(s, dtype=torch.float64)))
        clock = bound_clock(text, masked) if any_given else torch.full((len(tokens),), t, device=tokens.device)
        x, _ = propose(denoise(tokens, clock))
        release = masked & (torch.rand(tokens.shape, generator=rng, device=tokens.device) < u) if s > 0 else masked
        tokens = torch.where(release, x, tokens)
        on_step(tokens)
    return tokens


def first_hitting(denoise, propose, text, tokens, given, steps, rng, on_step=lambda tokens: None):
    """ One uniformly chosen masked position per call is released, in every row that has one: the exact law of the continuous-time
    process in at most L calls. Fewer `steps` release several at once.    arXiv:2409.02908 """
    return release_by_rank(denoise, propose, text, tokens, steps, on_step,
                           lambda logits, x, logp: torch.rand(tokens.shape, generator=rng, device=tokens.device))


def confidence(denoise, propose, text, tokens, given, steps, rng, on_step=lambda tokens: None, score='top1', threshold=0.9):
    """ Propose x ~ Cat(p) everywhere and release what is most certain: the n masked positions of a row are spread over the steps,
    the first n mod steps of them taking one more.    MaskGIT arXiv:2202.04200
    Not a sample of the model's distribution: it seeks likely texts.
    score: top1 (p of the proposal), margin (p of the best minus the second), entropy, threshold (all above .9, at least one). """
    def certainty(logits, x, logp):
        if score in ('top1', 'threshold'):
            return logp
        p = logits.softmax(-1)
        if score == 'margin':
            best, second = p.topk(2, -1).values.unbind(-1)
            return best - second
        return (p * logits.log_softmax(-1)).nansum(-1)                   # minus the entropy; 0 log 0 = 0
    return release_by_rank(denoise, propose, text, tokens, steps, on_step, certainty,
                           above=float(np.log(threshold)) if score == 'threshold' else None)


def release_by_rank(denoise, propose, text, tokens, steps, on_step, rank_by, above=None):
    """ The loop the two share: per step and row, the k masked positions with the highest rank_by(logits, x, logp) are released. """
    n = (tokens == text.mask_id).sum(1, keepdim=True)                    # (B, 1)
    steps = min(steps, tokens.shape[1])                                  # more would release nothing
    for i in range(steps):
        masked = tokens == text.mask_id
        logits = denoise(tokens, bound_clock(text, masked))
        x, logp = propose(logits)
        value = rank_by(logits, x, logp).masked_fill(~masked, -torch.inf)
        place = value.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # (B, L), 0 is the highest
        k = n // steps + (i < n % steps)                                 # (B, 1)
        release = masked & (place < k)
        if above is not None and i < steps - 1:
            release = masked & ((value > above) | (place < 1))
        elif above is not None:
            release = masked
        tokens = torch.where(release, x, tokens)
        on_step(tokens)
    return tokens


SAMPLERS = dict(ancestral=ancestral, first_hitting=first_hitting, confidence=confidence)


# ---- a run, ready to sample

def load_run(out_dir, which='best', device='auto', dtype='bfloat16', encoder_folder=''):
    """ Everything sampling needs from a run folder: model (EMA weights), tokenizer, stats, processes, encoder record. """
    device = pick_device(device)
    if dtype not in ('float32', 'bfloat16'):
        raise ValueError(f'dtype={dtype!r}: choose from float32, bfloat16')
    model, config, meta = load_model(out_dir, which, device=device)
    folder = os.path.join(out_dir, 'data')
    tokenizer, stats = load_tokenizer(folder), load_stats(folder)
    kind = torch.device(device).type
    return SimpleNamespace(
        out_dir=out_dir, model=model, config=config, meta=meta, folder=folder, encoder_folder=encoder_folder, encoder=None,
        device=device, tokenizer=tokenizer, stats=stats, L=model.config.seq_len,
        text=MaskedText(tokenizer.vocab_size, config['text_schedule'], config['text_power']),
        latent=GaussianLatents(stats.live.to(device), config['latent_schedule'], config['latent_target']) if stats else None,
        autocast=lambda: torch.autocast(kind, torch.bfloat16, enabled=dtype == 'bfloat16'))


def encode(run, texts, progress=lambda n: None):
    """ Raw latents (n, N, D) float32 of texts, by the encoder that made the run's data. """
    if run.encoder is None:                                              # once: weights are read and their digest compared
        record = run.meta['encoder']
        run.encoder = load_encoder(record, folder=run.folder if record['id'] == 'lsa' else run.encoder_folder or None, device=run.device)
    return run.encoder(texts, progress=progress)


@torch.inference_mode()
def l2t(run, z, sampler='confidence', steps=0, temperature=-1.0, nucleus=1.0, guidance=1.0, score='top1', seed=0, batch=128,
        on_step=lambda tokens: None, progress=lambda n: None):
    """ Token ids (n, L) written from standardised latents z (n, N, D). """
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler={sampler!r}: choose from {', '.join(SAMPLERS)}")
    if score not in ('top1', 'margin', 'entropy', 'threshold'):
        raise ValueError(f'score={score!r}: choose from top1, margin, entropy, threshold')
    if temperature < 0:
        temperature = 0.0 if sampler == 'confidence' else 1.0
    steps = steps or (128 if sampler == 'ancestral' else run.L)
    extra = dict(score=score) if sampler == 'confidence' else {}
    rng = torch.Generator(run.device).manual_seed(seed)
    out = []
    for part in z.split(batch):
        part = part.to(run.device)
        null = torch.randn(part.shape, generator=rng, device=run.device) * run.latent.live   # one draw per sample, kept
        denoise = make_denoise(run.model, part, torch.zeros(len(part), device=run.device), null, guidance, run.autocast)
        tokens = torch.full((len(part), run.L), run.text.mask_id, device=run.device)
        given = torch.zeros_like(tokens, dtype=torch.bool)
        out.append(SAMPLERS[sampler](denoise, make_propose(temperature, nucleus, rng), run.text, tokens, given, steps, rng,
                                     on_step, **extra).cpu())
        progress(len(part))
    return torch.cat(out)


# ---- the command line

def watcher(tokenizer, mask_id, rows):
    """ on_step that redraws the texts in place on a terminal, and prints the first one line by line elsewhere. """
    drawn = 0

    def on_step(tokens):
        nonlocal drawn
        lines = [show(tokenizer, ids, mask_id) for ids in tokens[:rows].tolist()]
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            lines = [line[:width] for line in lines]
            print(f'\x1b[{drawn}A\x1b[J' * (drawn > 0) + '\n'.join(lines), flush=True)
            drawn = len(lines)
        else:
            print(lines[0], flush=True)
    return on_step


def show(tokenizer, ids, mask_id):
    """ A half-written text: what is still masked shows as a block; ends at the EOS where all before it is known. """
    pieces, known = [], []
    for i in ids + [tokenizer.eos]:
        if i in (mask_id, tokenizer.eos):
            pieces.append(tokenizer.decode(known))
            known = []
            if i == tokenizer.eos:
                break
            pieces.append('░')
        else:
            known.append(i)
    return ''.join(pieces).replace('\n', ' ')


def main():
    configure(globals())
    with stop_on_error():
        run = load_run(out_dir, which, device, dtype, encoder_folder)
        N, D = run.meta['latent_shape'] or (0, 0)
        if 'latent' not in run.model.config.streams or not N:
            raise ValueError(f'{out_dir} was trained without latents: l2t has nothing to start from')
        if bool(text) == bool(latents):
            raise ValueError('give --text="..." or --latents=FILE.npy, one of them')
        if text:
            sources, raw = [text], encode(run, [text])
        else:
            raw = torch.from_numpy(np.load(latents, allow_pickle=False)).float()
            raw = raw[:, None] if raw.ndim == 2 else raw
            if raw.ndim != 3 or raw.shape[1:] != (N, D):
                raise ValueError(f'{latents}: shape {tuple(raw.shape)}, expected (n, {N}, {D}) as {out_dir} was trained')
            if not raw.isfinite().all():
                raise ValueError(f'{latents}: rows {(~raw.isfinite().all((1, 2))).nonzero().flatten().tolist()[:5]} are not finite')
            sources = [f'{latents}[{i}]' for i in range(len(raw))]
        z = run.stats.standardise(raw).repeat_interleave(num_samples, 0)
        warmth = 0.7 if temperature < 0 and sampler == 'confidence' and num_samples > 1 else temperature
        on_step = watcher(run.tokenizer, run.text.mask_id, len(z)) if watch else lambda tokens: None
        with tqdm(total=len(z), unit='sample', disable=len(z) <= sample_batch) as bar:
            tokens = l2t(run, z, sampler, steps, warmth, nucleus, guidance, score, seed, sample_batch, on_step, bar.update)
    for i, source in enumerate(sources):
        print(f'\n{source}')
        for ids in tokens[i * num_samples:(i + 1) * num_samples].tolist():
            print(f'  -> {run.tokenizer.decode(ids)}')


if __name__ == '__main__':
    main()
