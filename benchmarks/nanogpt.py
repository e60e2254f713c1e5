"""
nanoGPT's own network beside ours on the characters of tinyshakespeare, in nats per character.

NANOGPT is a clone of github.com/karpathy/nanoGPT (3adf61e), where its recipe for a CPU was run:

    # there: python data/shakespeare_char/prepare.py
    # there: python train.py config/train_shakespeare_char.py --device=cpu --compile=False
    #     --eval_iters=20 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
    #     --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
    python -m benchmarks.nanogpt --folder=NANOGPT --windows=true
    python prepare.py --input=data/shakespeare/train.jsonl --val_input=data/shakespeare/val.jsonl \
        --tokenizer=byte --max_tokens=65 --encoder=none --out=data/shakespeare
    python train.py config/ar.py --dataset=shakespeare --depth=4 --width=128 --batch_size=12 \
        --max_iters=2000 --min_lr=0.1 --betas=0.9,0.99 --out_dir=out/shakespeare_ar
    python train.py config/mdlm.py --dataset=shakespeare --depth=4 --width=128 --batch_size=12 \
        --max_iters=2000 --min_lr=0.1 --betas=0.9,0.99 --out_dir=out/shakespeare_mdlm
    python -m benchmarks.nanogpt --folder=NANOGPT

A window has 65 characters. The first is given and the other 64 are scored, as nanoGPT's own loss
does with a block of 64. All are of the last tenth of the text, and none overlap.

    nanoGPT              -log p(x^2..x^65 | x^1), exact
    decoder              the same, of a run of config/ar.py
    masked, in orders    as in tasks/orders.py, of a run of config/mdlm.py, x^1 always visible:
                         from left to right (exact), the iw bound and the mean of K orders
    masked, the bound    as in tasks/nelbo.py

What differs: ours have 1.0M parameters for 0.8M, average their weights, and choose among 258 bytes.
A window of ours neither begins nor ends in white space, which prepare.py would cut off, and so they
may know that x^65 is none: at most -log(1 - .19) / 64 = .003 nats per character.

Letters: n windows, L = 66 positions with the EOS, which is given too.
"""
import importlib.util
import json
import os

import torch

from configurator import configure, stop_on_error
from data import PackedDataset
from diffusion import nll_of
from runs.files import write_text
from runs.manifest import dataset_folder
from sampling.loading import load_run
from tasks.common import chosen_rows, enter
from tasks.nelbo import mean_bound
from tasks.orders import draw_steps, iw_bound, nats_of_orders

folder = 'nanoGPT'             # <a folder>: a clone of nanoGPT
windows = False                # write data/shakespeare/train.jsonl and val.jsonl, and stop
dataset = 'shakespeare'        # <a folder under data/, or a path to one>
decoder = 'out/shakespeare_ar'     # <a run folder>: of config/ar.py
masked = 'out/shakespeare_mdlm'    # <a run folder>: of config/mdlm.py; '': none
n = 300                        # [2, 1e6]: windows, drawn by lot
n_orders = 8                   # [1, 1e4]: K of the masked run
draws = 16                     # [1, 1e4]: of its bound, for each window
seed = 0                       # [0, 2**63)
save = ''                      # a .json for the figures

WINDOW = 65

# -----------------------------------------------------------------------------
# The windows

def write_windows():
    """ data/<dataset>/train.jsonl and val.jsonl of nanoGPT's own split. Those of training overlap:
    nanoGPT's begin anywhere too. """
    text = characters()
    n_train = int(0.9 * len(text))
    target = dataset_folder(dataset)
    os.makedirs(target, exist_ok=True)
    for split, part, step in (('train', text[:n_train], 24), ('val', text[n_train:], WINDOW)):
        lines, i = [], 0
        while i + WINDOW <= len(part):
            window = part[i:i + WINDOW]
            is_whole = window == window.strip()
            if is_whole:
                lines.append(json.dumps({'text': window}))
            i += step if is_whole else 1
        path = os.path.join(target, f'{split}.jsonl')
        write_text(path, '\n'.join(lines) + '\n')
        print(f'{path}: {len(lines):,} windows')


def in_clone(*names):
    """ The path of a file of the clone; ValueError where it is not there. """
    path = os.path.join(folder, *names)
    if not os.path.isfile(path):
        raise ValueError(f'{path}: missing; clone nanoGPT, prepare shakespeare_char and train it '
                         'as the first lines of benchmarks/nanogpt.py say')
    return path


def characters():
    with open(in_clone('data', 'shakespeare_char', 'input.txt'), newline='') as f:
        return f.read()

# -----------------------------------------------------------------------------
# Their nats, and ours, of each window (n,)

@torch.inference_mode()
def nats_of_nanogpt(texts):
    """ By the code and the checkpoint in the clone. """
    spec = importlib.util.spec_from_file_location('nanogpt_model', in_clone('model.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = in_clone('out-shakespeare-char', 'ckpt.pt')
    checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    gpt = module.GPT(module.GPTConfig(**checkpoint['model_args'])).eval()
    # a compiled network has a prefix
    gpt.load_state_dict({name.removeprefix('_orig_mod.'): weight
                         for name, weight in checkpoint['model'].items()})

    # its ids are the positions of the characters in the alphabet
    alphabet = sorted(set(characters()))
    ids = torch.tensor([[alphabet.index(c) for c in text] for text in texts])    # (n, 65)
    logits, _ = gpt(ids[:, :-1], ids[:, 1:].contiguous())                        # (n, 64, V)
    return nll_of(logits.flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1).double().sum(1)


def read_run(out_dir, val, rows):
    """ A run, the tokens (n, L) of windows, and where they are given, (n, L): the first character,
    and where the text ends. """
    run = load_run(out_dir, dtype='float32')
    tokens, _ = val.rows(rows)
    known_mask = torch.ones(tokens.shape, dtype=torch.bool)
    known_mask[:, 1:WINDOW] = False
    return run, tokens, known_mask


def nats_of_decoder(run, tokens, known_mask):
    t_latent = torch.ones(len(tokens), device=run.device)
    return run.next_token.bound(run.model, tokens, None, t_latent, known_mask=known_mask)


@torch.inference_mode()
def nats_of_masked(run, tokens, known_mask):
    """ {name: nats (n,)}: the exact likelihood of one order, and bounds. """
    # position by position
    steps = draw_steps(tokens, known_mask, n_orders, seed)
    of_order = nats_of_orders(run, tokens, None, 1.0, steps, 128).sum(2)         # (n, 1 + K)

    # by draws of how many positions are masked
    bound = mean_bound(run, run.text, tokens, None, 1.0, known_mask, draws, seed, 128, 'bound')
    return {'masked, left to right': of_order[:, 0],
            f'masked, iw bound of {n_orders} orders': iw_bound(of_order[:, 1:]),
            f'masked, mean of {n_orders} orders': of_order[:, 1:].mean(1),
            'masked, the bound': bound}


def main():
    if windows:
        return write_windows()
    val = PackedDataset(dataset_folder(dataset), 'val')
    rows = chosen_rows(len(val), n, 'random', seed)
    found = {'nanoGPT': nats_of_nanogpt([val.text(int(row)) for row in rows])}
    found['decoder'] = nats_of_decoder(*read_run(decoder, val, rows))
    if masked:
        found |= nats_of_masked(*read_run(masked, val, rows))

    # per character, and how far ahead nanoGPT is, window by window
    results = {'n': len(rows), 'n_orders': n_orders, 'draws': draws}
    n_scored = torch.full((len(rows),), float(WINDOW - 1))
    print(f'{"nats per character":<52}more than nanoGPT')
    for name, nats in found.items():
        lead = nats - found['nanoGPT']
        enter(results, f'{name}/', {'nats': (nats, n_scored), 'lead': (lead, n_scored)})
        print(name.ljust(32) + '   '.join(
            f' {results[f"{name}/{key}"]:6.3f} ± {results[f"{name}/{key}_se"]:.3f}'
            for key in ('nats', 'lead')))
    if save:
        write_text(save, json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    configure(globals())
    with stop_on_error():
        main()
