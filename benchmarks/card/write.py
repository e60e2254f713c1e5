""" What the trained networks write: from fingerprints with wrong bits, and from nothing.

    python write.py FOLDER OUT.jsonl.xz SECONDS [n]     FOLDER has molecules/ and decoder/, run folders

Jobs are done in their order, until the time is up. Each is a line of JSON: what it was, and texts.
"""
import itertools
import json
import lzma
import math
import os
import sys
import time

import numpy as np
import torch

sys.path.insert(0, os.getcwd())
from sample import Run

here = os.path.dirname(os.path.abspath(__file__))
folder, out, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
n = int(sys.argv[4]) if len(sys.argv) > 4 else 1000
began = time.time()
device = 'cuda' if torch.cuda.is_available() else 'cpu'
BATCH = 8192 if device == 'cuda' else 256
SHARES = (0.0, 0.01, 0.03, 0.05, 0.1)
CLOCKS = (0.0, .1, .2, .3, .4, .5, .6, .7)

asked = np.load(f'{here}/asked.npz')          # val, test (5, n, 256): fingerprints by share, packed
texts = {name: open(f'{here}/{name}.txt').read().split() for name in ('val', 'test')}
n = min(n, *(asked[name].shape[1] for name in ('val', 'test')))
file = lzma.open(out, 'wt', preset=2)


def latents(name, shares):
    m = n if name == 'test' else min(n, 300)
    bits = np.concatenate([asked[name][SHARES.index(share), :m] for share in shares])
    return torch.from_numpy(np.unpackbits(bits, axis=1).astype(np.float32))[:, None]


def left():
    return seconds - (time.time() - began)


def note(texts, t, **what):
    file.write(json.dumps(what | dict(seconds=round(t, 2), texts=texts)) + '\n')
    file.flush()
    print(f'{time.time() - began:.0f} s', what, f'{t:.2f} s', flush=True)


@torch.inference_mode()
def beams(run, z, clock, K=8):
    """ The best of K beams, standardised latents z (n, N, D) of clock `clock`, texts of any
    length. """
    n, V, L = len(z), run.text.mask_id, run.L
    eos, pad = run.tokenizer.eos, run.tokenizer.pad
    alpha = float(run.latent.alpha_sigma(torch.tensor(clock))[0])
    z = (alpha * z).to(run.device).repeat_interleave(K, 0)
    x = torch.full((n * K, L), run.text.mask_id, device=run.device)
    ids = torch.arange(V, device=run.device)
    first = K * torch.arange(n, device=run.device)[:, None]
    score = torch.full((n, K), -torch.inf, device=run.device)
    score[:, 0] = 0
    t = torch.zeros(n * K, device=run.device)
    cache = {}
    for i in range(L):
        read = run.next_token.shift(x)[:, :i + 1]
        logits = run.next_token.decode_step(run.model, read, z, t, t + clock, cache)
        logits[:, pad] = -torch.inf
        log_p = logits.log_softmax(-1).view(n, K, V)
        ended = (x[:, :i] == eos).any(1).view(n, K, 1)
        only_pad = torch.where(ids == pad, 0., -torch.inf)
        log_p = torch.where(ended, only_pad, log_p)
        score, best = (score[:, :, None] + log_p).flatten(1).topk(K)
        rows = (first + best // V).flatten()
        x = x[rows]
        x[:, i] = best.flatten() % V
        cache['reader'].keep(rows)
        if bool(((x[:, :i + 1] == eos).any(1)).all()):
            x[:, i + 1:] = pad
            break
    return run.decode(x[first.flatten()].cpu())


def write(run, net, name, shares, clock, how, drafts, told):
    """ told: 'no', the clock is 0; 'yes'; 'noised', and so much noise is added before. """
    raw = latents(name, shares)
    if told == 'noised':
        z = run.stats.standardise(raw)
        noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(5)) * run.stats.live
        raw = run.stats.destandardise(z + math.tan(math.pi / 2 * clock) * noise)
    t = time.time()
    if how == 'beams':
        z = run.stats.standardise(raw)
        found = [text for i in range(0, len(raw), BATCH // 8) for text in beams(run, z[i:i + BATCH // 8],
                                                                         clock)]
    else:
        sampler = 'autoregressive' if how == 'left_to_right' else 'confidence'
        more = dict(temperature=0.0)
        if drafts > 1:
            more = dict(temperature=0.4 if how == 'left_to_right' else 0.7)
        found = run.write(latents=raw, num_samples=drafts, sampler=sampler, latent_clock=clock,
                          sample_batch=BATCH, seed=1, **more)
    note(found, time.time() - t, net=net, set=name, shares=shares, clock=clock, how=how,
         drafts=drafts, told=told)
    return found


def main():
    nets = {}
    for net in ('molecules', 'decoder'):
        nets[net] = Run(f'{folder}/{net}', 'latest', device)
    ways = [('molecules', 'left_to_right'), ('decoder', 'left_to_right'),
            ('molecules', 'diffusion')]

    # which clock belongs to a share of wrong bits: the most texts that are exactly right, on val
    best = {}
    for (net, how), told in itertools.product(ways, ('yes', 'noised')):
        right = {}
        for clock in CLOCKS if how == 'left_to_right' else CLOCKS[1::3]:
            found = write(nets[net], net, 'val', SHARES, clock, how, 1, told)
            m = len(found) // len(SHARES)
            for i, share in enumerate(SHARES):
                some = found[m * i:m * (i + 1)]
                right[share, clock] = sum(a == b for a, b in zip(some, texts['val']))
        print(net, how, told, right, flush=True)
        for share in SHARES:
            here = {clock: x for (one, clock), x in right.items() if one == share}
            best[net, how, told, share] = max(here, key=here.get)

    # a table, of a draft, beams or several drafts
    def table(how_many, some, shares=SHARES, ways_to_tell=('no', 'yes', 'noised')):
        for share in shares:
            for told in ways_to_tell:
                for net, how in some:
                    way = 'left_to_right' if how == 'beams' else how
                    clock = 0.0 if told == 'no' else best[net, way, told, share]
                    if left() > 4 and (clock or told == 'no'):
                        write(nets[net], net, 'test', [share], clock, how, how_many, told)

    table(1, ways)
    # from nothing: text alone, and from a latent that is drawn as a plan
    m = 30 * n
    run = nets['molecules']

    def from_nothing(net, how, draw, **more):
        if left() > 8:
            t = time.time()
            found = draw(nets[net], sample_batch=BATCH, **more)
            note(found, time.time() - t, net=net, how=how, **more)

    for net in nets:
        from_nothing(net, 'from nothing', lambda run, **more: run.sample_text(m, **more),
                     sampler='autoregressive', temperature=1.0)
    from_nothing('molecules', 'plan', lambda run, **more: run.sample_both(m, **more)[0])
    from_nothing('molecules', 'plan', lambda run, **more: run.sample_both(m, **more)[0],
                 sampler='autoregressive', temperature=1.0)
    for steps in (64, 16, 4, 1):
        from_nothing('molecules', 'from nothing', lambda run, **more: run.sample_text(m, **more),
                     sampler='ancestral', steps=steps)
    table(8, ways, (0.0, 0.03, 0.1))
    table(1, [('molecules', 'beams'), ('decoder', 'beams')], (0.0, 0.03, 0.1))
    table(8, ways, (0.01, 0.05))
    table(24, ways, (0.0, 0.05))


main()
file.close()
