"""
Measure a run on its validation split, each figure beside the controls that would expose it.

    python evaluate.py --out_dir=out/quickstart                              # tasks nelbo and l2t
    python evaluate.py --out_dir=out/quickstart --tasks=nelbo --n=200
    python evaluate.py --out_dir=out/quickstart --texts=my.txt               # other text, a line each, embedded on the spot

nelbo   the exact bound on -log p(text | latent), nats per real token (text and one EOS; the nats of PAD are in the total)
        controls: shuffled (another text's latent), null (noise at clock 1)
l2t     texts written from latents, against the texts the latents came from: sentence BLEU, word-set F1, exact match, and the
        round trip: embed what was written, cosine with the source latent, retrieval of the source among all n
        controls: shuffled, null, nearest (the training text whose latent is nearest: what copying the training set would get)

Figures are means over texts with standard errors, printed and written to out_dir/results.json as "task/metric",
"task/control/metric", "..._se"; a task replaces its own keys.
"""
import json
import math
import os
import re
import sys

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import difference, git_commit
from configurator import configure, stop_on_error
from data import PackedDataset, dataset_folder, dataset_identity
from diffusion import normals, text_bound, uniforms
from sample import encode, l2t, load_run

out_dir = 'out/quickstart'
which = 'best'                  # best | latest | step-00001000
tasks = 'nelbo,l2t'             # which of nelbo, l2t
texts = ''                      # a text file, one text a line; '': the validation split
dataset = ''                    # where the run's dataset lies; '': where it was trained from
encoder_folder = ''             # where the encoder lies now; '': where it was when the data were prepared
n = 1000                        # texts of the split; all if it has fewer
order = 'random'                # which: random ones, drawn with the seed, or the first
draws = 16                      # nelbo: draws of the bound per text, spread evenly over the number of masked positions
sampler = 'confidence'          # l2t: as in sample.py, with the knobs below
steps = 0
score = 'top1'
temperature = -1.0
nucleus = 1.0
guidance = 1.0
sample_batch = 128              # rows per network call
show = 10                       # l2t: pairs to print, the first ones
seed = 0
device = 'auto'
dtype = 'bfloat16'              # bfloat16 | float32


# ---- what is evaluated

def load_texts(run, folder, path, n, order, seed):
    """ (texts, tokens (n, L), raw latents (n, N, D) or None): n rows of the validation split, or the lines of a file. """
    if path:
        with open(path, encoding='utf-8') as f:
            lines = [line.strip() for line in f if line.strip()][:n]
        if not lines:
            raise ValueError(f'{path}: no text in it')
        ids = [run.tokenizer.encode(line) for line in lines]
        longest = max(map(len, ids))
        if longest >= run.L:
            raise ValueError(f'{path}: a line has {longest} tokens, the model writes at most {run.L - 1} and an EOS')
        rows = [i + [run.tokenizer.eos] + [run.tokenizer.pad] * (run.L - 1 - len(i)) for i in ids]
        return lines, torch.tensor(rows), encode(run, lines) if run.meta['encoder'] else None
    data = open_split(run, folder, 'val')
    if order not in ('random', 'first'):
        raise ValueError(f'order={order!r}: choose from random, first')
    rows = (np.random.Generator(np.random.Philox(seed)).permutation(len(data)) if order == 'random' else np.arange(len(data)))[:n]
    tokens, _ = data.rows(rows)
    return [data.text(int(r)) for r in rows], tokens, data.raw_latents(rows) if run.stats else None


def open_split(run, folder, split):
    data = PackedDataset(folder, split, run.L)
    other = difference(dataset_identity(run.meta), dataset_identity(data.meta))
    if other:
        raise ValueError(f'{run.out_dir} was trained with {other} in {folder}: name its own dataset with --dataset=')
    return data


def derangement(n, seed):
    """ A permutation that leaves no one in place: a random cycle. """
    if n < 2:
        raise ValueError(f'{n} text: shuffled controls need at least 2')
    order = np.random.Generator(np.random.Philox(seed + 1)).permutation(n)
    out = np.empty(n, np.int64)
    out[order] = np.roll(order, 1)
    return torch.from_numpy(out)


# ---- nelbo

@torch.inference_mode()
def nelbo(run, texts, tokens, raw, draws, seed, batch):
    """ {key: value}: total nats / total real tokens, its standard error (of the ratio, over texts), perplexity, bits per byte. """
    n, L = tokens.shape
    real = (tokens != run.tokenizer.pad).sum(1).double()                 # text and one EOS
    n_bytes = sum(len(t.encode()) for t in texts)
    conditions = {'': None}
    if raw is not None and 'latent' in run.model.config.streams:
        z, noise = run.stats.standardise(raw), normals(seed, 0, 'evaluation latent', 0, n, *raw.shape[1:]) * run.stats.live
        conditions = {'': (z, 0.0), 'shuffled/': (z[derangement(n, seed)], 0.0), 'null/': (noise, 1.0)}
    results = {'draws': draws, 'n': n}
    for control, condition in conditions.items():
        nats = torch.zeros(n, dtype=torch.float64)
        with tqdm(total=n * draws, desc=f'nelbo {control.rstrip("/") or "right"}', unit='draw', leave=False) as bar:
            for k in range(draws):
                u = uniforms(seed, k, 'evaluation', 0, n, 1 + L)
                u[:, 0] = (uniforms(seed, 0, 'evaluation clock', 0, n, 1)[:, 0] + k / draws) % 1   # a text's draws cover (0, 1) evenly
                for i in range(0, n, batch):
                    rows = slice(i, i + batch)
                    x = tokens[rows].to(run.device)
                    z, clock = (condition[0][rows].to(run.device), condition[1]) if condition else (None, 1.0)
                    with run.autocast():
                        nats[rows] += text_bound(run.model, run.text, x, z, torch.full((len(x),), clock, device=run.device),
                                                 u[rows].to(run.device)).cpu() / draws
                    bar.update(len(x))
        ratio = (nats.sum() / real.sum()).item()
        results[f'{control}nats_per_token'] = ratio
        results[f'{control}nats_per_token_se'] = ((nats - ratio * real).std() / real.mean() / math.sqrt(n)).item()
        results[f'{control}perplexity'] = math.exp(ratio)
        results[f'{control}bits_per_byte'] = nats.sum().item() / math.log(2) / n_bytes
    return results


# ---- l2t

def words(text):
    return set(re.findall(r'\w+', text.lower()))


def word_f1(a, b):
    """ F1 between the sets of words. """
    a, b = words(a), words(b)
    return 2 * len(a & b) / (len(a) + len(b)) if a or b else 1.0


def compare(sources, written, raw, embedded):
    """ {metric: per-text values (n,)} of written texts against their sources, and of their embeddings against the source latents. """
    from sacrebleu.metrics import BLEU
    bleu = BLEU(effective_order=True)                                    # sentence BLEU: a three-word text has no 4-grams
    a, b = (torch.nn.functional.normalize(x.flatten(1), dim=1) for x in (embedded, raw))
    similarity = a @ b.T                                                 # (n, n)
    right = similarity.diagonal()
    nearer, equal = (similarity > right[:, None]).sum(1), (similarity == right[:, None]).sum(1)
    hit = lambda k: 100.0 * ((k - nearer) / equal).clamp(0, 1).numpy()   # noqa: E731  ties by lot: all-zero embeddings score chance
    return {'bleu': np.array([bleu.sentence_score(w, [s]).score for w, s in zip(written, sources)]),
            'f1': np.array([100 * word_f1(w, s) for w, s in zip(written, sources)]),
            'exact': np.array([100.0 * (w == s) for w, s in zip(written, sources)]),
            'cosine': right.numpy(), 'retrieval@1': hit(1), 'retrieval@10': hit(10)}


def nearest_training_texts(run, folder, raw):
    """ The training text whose latent has the highest cosine with each of raw (n, N, D). """
    train, best = open_split(run, folder, 'train'), None
    q = torch.nn.functional.normalize(raw.flatten(1), dim=1)
    for i in tqdm(range(0, len(train), 16384), desc='nearest training latent', unit='block', leave=False):
        block = train.raw_latents(np.arange(i, min(i + 16384, len(train)))).flatten(1)
        value, where = (q @ torch.nn.functional.normalize(block, dim=1).T).max(1)
        found = (value, where + i)
        best = found if best is None else tuple(torch.where(value > best[0], new, old) for new, old in zip(found, best))
    return [train.text(int(i)) for i in best[1]]


def evaluate_l2t(run, folder, sources, raw, seed, batch, **knobs):
    """ ({key: value}, {'': written texts, 'shuffled/': ..., 'null/': ..., 'nearest/': ...}). """
    n, z = len(sources), run.stats.standardise(raw)
    conditions = {'': (z, knobs), 'shuffled/': (z[derangement(n, seed)], knobs), 'null/': (z, knobs | dict(guidance=0.0))}
    written = {}
    for control, (latents, how) in conditions.items():
        with tqdm(total=n, desc=f'l2t {control.rstrip("/") or "right"}', unit='text', leave=False) as bar:
            ids = l2t(run, latents, seed=seed, batch=batch, progress=bar.update, **how)
        written[control] = [run.tokenizer.decode(row) for row in ids.tolist()]
    written['nearest/'] = nearest_training_texts(run, folder, raw)
    results = {'n': n}
    for control, out in written.items():
        for metric, values in compare(sources, out, raw, encode(run, out)).items():
            results[f'{control}{metric}'] = float(values.mean())
            results[f'{control}{metric}_se'] = float(values.std(ddof=1) / math.sqrt(n))
    return results, written


# ---- results

def write_results(out_dir, results, meta):
    """ results: {task: {key: value}}. Merged into out_dir/results.json: a task's own keys are replaced, others stay. """
    path = os.path.join(out_dir, 'results.json')
    old = {}
    if os.path.exists(path):
        with open(path) as f:
            old = json.load(f)
    flat = {key: value for key, value in old.items() if key != 'meta' and key.split('/')[0] not in results}
    flat |= {f'{task}/{key}': value for task, metrics in results.items() for key, value in metrics.items()}
    flat['meta'] = old.get('meta', {}) | {task: meta for task in results}
    with open(path + '.tmp', 'w') as f:
        json.dump(flat, f, indent=1)
    os.replace(path + '.tmp', path)
    return path


def print_table(task, results):
    """ Metrics down, controls across; value +- standard error. """
    controls = list(dict.fromkeys(key.split('/')[0] if '/' in key else '' for key in results if not key.endswith('_se')))
    metrics = [key for key in results if '/' not in key and not key.endswith('_se') and key not in ('n', 'draws')]
    print(f'\n{task}, n = {results["n"]}' + (f', {results["draws"]} draws each' if 'draws' in results else ''))
    print(f'{"":<16}' + ''.join(f'{control or task:>20}' for control in controls))
    for metric in metrics:
        row = f'{metric:<16}'
        for control in controls:
            key = f'{control}/{metric}' if control else metric
            se = results.get(f'{key}_se')
            row += f'{results[key]:>12.3f}' + (f' ± {se:<5.3f}' if se is not None else ' ' * 8)
        print(row.rstrip())


def main():
    config = configure(globals())
    with stop_on_error():
        chosen = [task.strip() for task in tasks.split(',')]
        for task in chosen:
            if task not in ('nelbo', 'l2t'):
                raise ValueError(f'tasks={tasks!r}: choose from nelbo, l2t')
        run = load_run(out_dir, which, device, dtype, encoder_folder)
        folder = dataset_folder(dataset or run.config['dataset'])
        sources, tokens, raw = load_texts(run, folder, texts, n, order, seed)
        if 'l2t' in chosen and raw is None:
            raise ValueError(f'{out_dir} was trained without latents: it has no l2t')
        results = {}
        if 'nelbo' in chosen:
            results['nelbo'] = nelbo(run, sources, tokens, raw, draws, seed, sample_batch)
            print_table('nelbo', results['nelbo'])
        if 'l2t' in chosen:
            knobs = {key: config[key] for key in ('sampler', 'steps', 'score', 'temperature', 'nucleus', 'guidance')}
            results['l2t'], written = evaluate_l2t(run, folder, sources, raw, seed, sample_batch, **knobs)
            for source, out in list(zip(sources, written['']))[:show]:
                print(f'\n   {source}\n-> {out}')
            print_table('l2t', results['l2t'])
    checkpoint_name = which
    if which in ('best', 'latest'):
        with open(os.path.join(out_dir, which)) as f:
            checkpoint_name = f.read().strip()
    path = write_results(out_dir, results, dict(config, checkpoint=checkpoint_name, commit=git_commit(), argv=sys.argv,
                                                n_texts=len(sources)))
    print(f'\nwritten to {path}')


if __name__ == '__main__':
    main()
