"""
nanoGPT's own network beside ours on the characters of tinyshakespeare, in nats per character.

    python -m benchmarks.nanogpt --folder=NANOGPT --data=true      # the windows, as .jsonl
    python -m benchmarks.nanogpt --folder=NANOGPT --decoder=out/shakespeare_ar \
        --masked=out/shakespeare_mdlm

folder: a clone of github.com/karpathy/nanoGPT (3adf61e) with its shakespeare_char prepared and
trained. A window has 65 characters. The first is given and the other 64 are scored, as in
nanoGPT's own loss; all are of the last tenth of the text, and none overlap. A window neither begins
nor ends in white space, which prepare.py would cut off.

    nanoGPT              -log p(x^2..x^65 | x^1), exact
    decoder              the same, of a run of config/ar.py
    masked, in orders    as in tasks/orders.py, of a run of config/mdlm.py, x^1 always visible:
                         from left to right (exact), the iw bound and the mean of K orders
    masked, the bound    as in tasks/nelbo.py

Letters: n windows, L = 66 positions with the EOS, which is given too.
"""
import importlib.util
import json
import os

import torch

from configurator import configure, stop_on_error
from data import PackedDataset
from diffusion import nll_of, sum_over_texts, uniforms
from runs.files import write_text
from runs.manifest import dataset_folder
from sampling.likelihood import bound_of
from sampling.loading import load_run
from tasks.common import chosen_rows, enter, progress_bar
from tasks.nelbo import spread_clocks
from tasks.orders import draw_steps, iw_bound, nats_of_orders

folder = 'nanoGPT'             # <a folder>: a clone of nanoGPT
data = False                   # write data/shakespeare/train.jsonl and val.jsonl, and stop
decoder = ''                   # <a run folder>: of config/ar.py
masked = ''                    # <a run folder>: of config/mdlm.py
dataset = 'shakespeare'        # <a folder under data/, or a path to one>
n = 300                        # [2, 1e6]: windows, drawn by lot
n_orders = 8                   # [1, 1e4]: K of the masked run
draws = 16                     # [1, 1e4]: of its bound, for each window
seed = 0                       # [0, 2**63)
save = ''                      # a .json for the figures

# -----------------------------------------------------------------------------
# The windows

def write_windows():
    """ data/<dataset>/train.jsonl and val.jsonl of nanoGPT's own split. Those of training overlap:
    nanoGPT's begin anywhere too. """
    text = characters()
    n_train = int(0.9 * len(text))
    target = dataset_folder(dataset)
    os.makedirs(target, exist_ok=True)
    for split, part, step in (('train', text[:n_train], 24), ('val', text[n_train:], 65)):
        lines, i = [], 0
        while i + 65 <= len(part):
            window = part[i:i + 65]
            is_whole = window == window.strip()
            if is_whole:
                lines.append(json.dumps({'text': window}))
            i += step if is_whole else 1
        path = os.path.join(target, f'{split}.jsonl')
        write_text(path, '\n'.join(lines) + '\n')
        print(f'{path}: {len(lines):,} windows')


def characters():
    with open(os.path.join(folder, 'data', 'shakespeare_char', 'input.txt'), newline='') as f:
        return f.read()

# -----------------------------------------------------------------------------
# Their nats, and ours, of each window (n,)

@torch.inference_mode()
def nats_of_nanogpt(texts):
    """ By the code and the checkpoint in the clone. """
    path = os.path.join(folder, 'model.py')
    spec = importlib.util.spec_from_file_location('nanogpt_model', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    checkpoint = torch.load(os.path.join(folder, 'out-shakespeare-char', 'ckpt.pt'),
                            map_location='cpu', weights_only=True)
    gpt = module.GPT(module.GPTConfig(**checkpoint['model_args'])).eval()
    gpt.load_state_dict(checkpoint['model'])

    # its ids are the places of the characters in the alphabet
    alphabet = sorted(set(characters()))
    ids = torch.tensor([[alphabet.index(c) for c in text] for text in texts])    # (n, 65)
    logits, _ = gpt(ids[:, :-1], ids[:, 1:])                                     # (n, 64, V)
    return nll_of(logits.flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1).double().sum(1)


@torch.inference_mode()
def nats_of_decoder(run, tokens, known_mask):
    n = len(tokens)
    return sum_over_texts(nll_of, run.model, run.model.config.vocab_size, tokens, None,
                          torch.zeros(n), torch.ones(n), ~known_mask, tokens, n_causal=n)


@torch.inference_mode()
def nats_of_masked(run, tokens, known_mask):
    """ {name: nats (n,)}, from the exact likelihood of one order to the bounds. """
    steps = draw_steps(tokens, known_mask, n_orders, seed)
    of_order = nats_of_orders(run, tokens, None, 1.0, steps, 128).sum(2)         # (n, 1 + K)
    n_windows, L = tokens.shape
    bound = torch.zeros(n_windows, dtype=torch.float64)
    for k in progress_bar(range(draws), desc='bound', unit='draw'):
        u = uniforms(seed, k, 'evaluation', 0, n_windows, 1 + L)
        u[:, 0] = spread_clocks(seed, n_windows, k, draws)
        bound += bound_of(run, run.text, slice(None), tokens, None, 1.0, u, known_mask) / draws
    return {'masked, left to right': of_order[:, 0],
            f'masked, iw bound of {n_orders} orders': iw_bound(of_order[:, 1:]),
            f'masked, mean of {n_orders} orders': of_order[:, 1:].mean(1),
            'masked, the bound': bound}


def main():
    if data:
        return write_windows()
    val = PackedDataset(dataset_folder(dataset), 'val')
    rows = chosen_rows(len(val), n, 'random', seed)
    texts = [val.text(int(row)) for row in rows]
    found = {'nanoGPT': nats_of_nanogpt(texts)}
    for out_dir, name in ((decoder, 'decoder'), (masked, 'masked')):
        if not out_dir:
            continue
        run = load_run(out_dir, dtype='float32')
        tokens, _ = val.rows(rows)
        # the first character is given, and where the text ends
        known_mask = torch.ones(len(rows), run.L, dtype=torch.bool)
        known_mask[:, 1:65] = False
        if name == 'decoder':
            found['decoder'] = nats_of_decoder(run, tokens, known_mask)
        else:
            found |= nats_of_masked(run, tokens, known_mask)

    # in nats per character, and beside nanoGPT, window by window
    results = {'n': len(rows), 'n_orders': n_orders, 'draws': draws}
    n_scored = torch.full((len(rows),), 64.0)
    for name, nats in found.items():
        enter(results, f'{name}/', {'nats': (nats, n_scored),
                                    'behind_nanogpt': (nats - found['nanoGPT'], n_scored)})
        print(f'{name:<32} {results[f"{name}/nats"]:.3f} ± {results[f"{name}/nats_se"]:.3f}   '
              f'behind nanoGPT {results[f"{name}/behind_nanogpt"]:+.3f} '
              f'± {results[f"{name}/behind_nanogpt_se"]:.3f}')
    if save:
        write_text(save, json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    configure(globals())
    with stop_on_error():
        main()
