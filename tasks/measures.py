"""
What evaluate.py measures: a function a task, from a run (sample.load_run) and its texts to {metric: value}, controls as "control/metric",
standard errors as "metric_se"; evaluate.py's header says what each is. Letters: n texts, L tokens, N latent vectors, D dimensions.
"""
import csv
import math
import os
import re
import time
from functools import lru_cache

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from processes.adaptive import Adaptive, genmd4_bound, rarity
from runs.checkpoint import difference
from data import PackedDataset, dataset_identity, is_end
from diffusion import normals, positions_of, uniforms
from encoders import fetch, reach_hub
from sample import (blank, call, encode, ends_of, l2t, load_run, most_tokens, null_latents, pack, pixels, raw_latents, read_texts,
                    search, t2l, trained_for, unconditional, warn, why_not, write)


# ---- what is evaluated

def chosen_rows(total, n, order, seed):
    """ Which n of `total` rows are measured: the first, or random ones drawn with the seed. """
    if order not in ('random', 'first'):
        raise ValueError(f'order={order!r}: choose from random, first')
    rows = np.random.Generator(np.random.Philox(seed)).permutation(total) if order == 'random' else np.arange(total)
    return rows[:n]


def load_file(run, path, field, n):
    """ (texts, tokens (n, L), raw latents (n, N, D) or None, how many were skipped) of the first n texts of a file that are short
    enough for the run. """
    if run.stats and not run.meta['encoder']:
        raise ValueError(f'texts={path}: {run.out_dir} has latents that no encoder made, so none of other texts: leave it out')
    texts, skipped = [], []
    for place, text in read_texts(path, field):
        n_tokens = len(run.tokenizer.encode(text))
        if n_tokens > most_tokens(run):
            skipped.append(f'{place.rpartition(", ")[2]} ({n_tokens:,})')
        else:
            texts.append(text)
        if len(texts) == n:
            break
    if skipped:
        shown = ', '.join(skipped[:5]) + (', ...' if len(skipped) > 5 else '')
        warn(f'texts={path}: {len(skipped):,} of {len(skipped) + len(texts):,} texts skipped, which have more than '
             f'the {most_tokens(run)} tokens that {run.out_dir} reads: {shown}')
    if not texts:
        raise ValueError(f'texts={path}: no text in it is short enough for {run.out_dir}')

    raw = embed(run, texts)
    n_zero = 0 if raw is None else int((raw.flatten(1) == 0).all(1).sum())
    if n_zero:
        warn(f'texts={path}: {n_zero:,} of {len(texts):,} texts have no word that the encoder knows: their latent is zero')
    return texts, pack(run, texts), raw, len(skipped)


def load_texts(run, folder, n, order, seed):
    """ (texts, tokens (n, L), raw latents (n, N, D) or None): n rows of the validation split. """
    data = open_split(run, folder, 'val')                                # cropped as in training, always at the same places
    rows = chosen_rows(len(data), n, order, seed)
    tokens, _ = data.rows(rows, uniforms(seed, 0, 'crop', 0, len(rows), 1)[:, 0] if data.cropped else None)
    sources = [run.tokenizer.decode(row) for row in tokens.tolist()] if data.cropped else [data.text(int(r)) for r in rows]
    return sources, tokens, data.raw_latents(rows) if run.stats else None


def open_split(run, folder, split):
    data = PackedDataset(folder, split, run.L, crop=run.lengths is not None)
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


def means(results, control, metrics):
    """ Enter {metric: values (n,)} as mean and, from two values on, standard error. """
    for metric, values in metrics.items():
        values = np.asarray(values, np.float64)
        results[f'{control}{metric}'] = float(values.mean())
        if len(values) > 1:
            results[f'{control}{metric}_se'] = float(values.std(ddof=1) / math.sqrt(len(values)))


def ratio_se(total, size):
    """ {'_se': standard error} of sum(total) / sum(size) over n texts, total and size (n,); {} of one text. """
    n, ratio = len(total), total.sum() / size.sum()
    return {'_se': ((total - ratio * size).std() / size.mean() / math.sqrt(n)).item()} if n > 1 else {}


# ---- nelbo

@torch.inference_mode()
def nelbo(run, texts, tokens, raw, draws, seed, batch):
    """ {key: value}: total nats / total real tokens, its standard error (of the ratio, over texts), perplexity, bits per byte. Of one
    text there is no shuffled control and no standard error. """
    n, L = tokens.shape
    draws = 1 if hasattr(run.text, 'decode_step') else draws              # it is no draw, but -log p
    fixed = ends_of(run, tokens) if run.lengths else None
    real = (tokens != run.tokenizer.pad if fixed is None else ~fixed).sum(1).double()        # text and one EOS, if that is predicted
    n_bytes = sum(len(t.encode()) for t in texts)
    conditions = {'': None}
    if raw is not None and 'latent' in run.model.config.streams:
        z, noise = run.stats.standardise(raw), normals(seed, 0, 'evaluation latent', 0, n, *raw.shape[1:]) * run.stats.live
        conditions = {'': (z, 0.0), 'null/': (noise, 1.0)}
        if n > 1:
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
                    ends = None if fixed is None else fixed[rows].to(run.device)
                    with run.autocast():
                        nats[rows] += run.text.bound(run.model, x, z, torch.full((len(x),), clock, device=run.device),
                                                 u[rows].to(run.device), ends).cpu() / draws
                    bar.update(len(x))
        ratio = (nats.sum() / real.sum()).item()
        results[f'{control}nats_per_token'] = ratio
        results |= {f'{control}nats_per_token{key}': value for key, value in ratio_se(nats, real).items()}
        results[f'{control}perplexity'] = math.exp(ratio)
        results[f'{control}bits_per_byte'] = nats.sum().item() / math.log(2) / n_bytes
    return results


@torch.inference_mode()
def latent_mse(run, tokens, raw, draws, seed, batch):
    """ {key: value}: E_t |x0_hat - z|^2 per live dimension, standardised, given the text; 1 is what the mean latent gets. """
    n, z, results = len(tokens), run.stats.standardise(raw), {}
    conditions = [('', tokens, 0.0), ('null/', torch.where(ends_of(run, tokens), tokens, run.text.mask_id), 1.0)]
    if n > 1:
        conditions.insert(1, ('shuffled/', tokens[derangement(n, seed)], 0.0))
    for control, x, clock in conditions:
        error = torch.zeros(n)
        for k in range(draws):
            t = (uniforms(seed, 0, 'evaluation clock', 0, n, 1)[:, 0] + k / draws) % 1 * (1 - 1e-3)   # eps says nothing at 1
            e = normals(seed, k, 'evaluation latent', 0, n, *z.shape[1:])
            for i in range(0, n, batch):
                rows = slice(i, i + batch)
                z_t, _ = run.latent.corrupt(z[rows].to(run.device), t[rows].to(run.device), e[rows].to(run.device))
                out = call(run, x[rows].to(run.device), z_t, clock, t[rows], predict=('latent',))[1]
                x0, _ = run.latent.x0_and_e(out, z_t, t[rows].to(run.device))
                error[rows] += ((x0.cpu() - z[rows]).square() * run.stats.live).mean(1).sum(1) / run.stats.live.sum() / draws
        means(results, control, {'latent_mse': error})
    return results


# ---- l2t

def words(text):
    return set(re.findall(r'\w+', text.lower()))


def word_f1(a, b):
    """ F1 between the sets of words. """
    a, b = words(a), words(b)
    return 2 * len(a & b) / (len(a) + len(b)) if a or b else 1.0


def retrieval(found, raw):
    """ {metric: per-text values (n,)} of latents found (n, N, D) against the right ones among all n of raw. """
    a, b = (F.normalize(x.flatten(1), dim=1) for x in (found, raw))
    similarity = a @ b.T                                                 # (n, n)
    right = similarity.diagonal()
    nearer, equal = (similarity > right[:, None]).sum(1), (similarity == right[:, None]).sum(1)
    hit = lambda k: 100.0 * ((k - nearer) / equal).clamp(0, 1).numpy()   # noqa: E731  ties by lot: all-zero embeddings score chance
    H = F.pad((1 / torch.arange(1, len(a) + 1)).cumsum(0), (1, 0))       # harmonic numbers: the mean of 1/rank over equal ones
    return {'cosine': right.numpy(), 'retrieval@1': hit(1), 'retrieval@10': hit(10),
            'mrr': ((H[nearer + equal] - H[nearer]) / equal).numpy()}


def embed(run, texts):
    """ Raw latents (n, N, D) of written texts; None where the latents were given without their encoder. """
    return encode(run, texts) if run.meta['encoder'] else None


def compare(sources, written, raw, embedded):
    """ {metric: per-text values (n,)} of written texts against their sources, and of their embeddings, if there are any, against the
    source latents. """
    from sacrebleu.metrics import BLEU
    bleu = BLEU(effective_order=True)                                    # sentence BLEU: a three-word text has no 4-grams
    return {'bleu': np.array([bleu.sentence_score(w, [s]).score for w, s in zip(written, sources)]),
            'f1': np.array([100 * word_f1(w, s) for w, s in zip(written, sources)]),
            'exact': np.array([100.0 * (w == s) for w, s in zip(written, sources)]),
            **(retrieval(embedded, raw) if embedded is not None else {})}


def nearest_training_texts(run, folder, raw):
    """ The training text whose latent has the highest cosine with each of raw (n, N, D). """
    train, best = open_split(run, folder, 'train'), None
    q = F.normalize(raw.flatten(1), dim=1)
    for i in tqdm(range(0, len(train), 16384), desc='nearest training latent', unit='block', leave=False):
        block = train.raw_latents(np.arange(i, min(i + 16384, len(train)))).flatten(1)
        value, at = (q @ F.normalize(block, dim=1).T).max(1)
        found = (value, at + i)
        best = found if best is None else tuple(torch.where(value > best[0], new, old) for new, old in zip(found, best))
    return [train.text(int(i)) for i in best[1]]


def write_from(run, raw, name, like, rerank=1, refine=0, **how):
    """ Texts written from raw latents (n, N, D), by trial where rerank or refine ask for it; like: sample.blank. """
    with tqdm(total=len(raw) * rerank, desc=name, unit='text', leave=False) as bar:
        how = how | dict(progress=bar.update, like=like if run.lengths and not how.get('length') else None)
        ids = search(run, raw, rerank, refine, **how)[0] if rerank > 1 or refine else l2t(run, run.stats.standardise(raw), **how)
    return [run.tokenizer.decode(row) for row in ids.tolist()]


def evaluate_l2t(run, folder, sources, tokens, raw, **how):
    """ ({key: value}, {'': written texts, 'shuffled/': ..., 'null/': ..., 'nearest/': ...}). """
    n, other = len(sources), derangement(len(sources), how['seed'])
    written = {'': write_from(run, raw, 'l2t', tokens, **how),
               'shuffled/': write_from(run, raw[other], 'l2t shuffled', tokens[other], **how),
               'null/': write_from(run, raw, 'l2t null', tokens, **how | dict(guidance=0.0, refine=0)),
               'nearest/': nearest_training_texts(run, folder, raw)}
    results = {'n': n}
    for control, out in written.items():
        means(results, control, compare(sources, out, raw, embed(run, out)))
    return results, written


# ---- t2l

def make_latents(run, tokens, name, seed, **how):
    """ Raw latents (n, N, D) generated from tokens (n, L). """
    with tqdm(total=len(tokens), desc=name, unit='text', leave=False) as bar:
        return raw_latents(run, t2l(run, tokens, seed=seed, progress=bar.update, **how))


def compare_latents(run, found, raw):
    """ {metric: per-text values (n,)} of raw latents found against the encoder's. """
    centre = lambda x: x - run.stats.mean                                # noqa: E731
    a, b = run.stats.standardise(found), run.stats.standardise(raw)
    return {'centred_cosine': F.cosine_similarity(centre(found).flatten(1), centre(raw).flatten(1)).numpy(),
            'squared_error': ((a - b).square().mean(1).sum(1) / run.stats.live.sum()).numpy(),
            **retrieval(found, raw)}


def dimensions(run, found, raw):
    """ Of each live dimension: how far the mean is from the data's, in its standard deviations, and the ratio of the deviations. """
    live = run.stats.live > 0
    a, b = (run.stats.standardise(x).flatten(0, 1)[:, live] for x in (found, raw))
    return {'mean_offset': ((a.mean(0) - b.mean(0)).abs() / b.std(0)).mean().item(), 'std_ratio': (a.std(0) / b.std(0)).mean().item()}


def bag_of_tokens(run, tokens):
    """ Counts (n, V) of the tokens before the EOS, and a 1 for the intercept, (n, V + 1). """
    bag = torch.zeros(len(tokens), run.text.mask_id + 1)
    bag.scatter_add_(1, tokens, torch.ones(tokens.shape))
    bag[:, [run.tokenizer.eos, run.tokenizer.pad]] = 0
    bag[:, -1] = 1
    return bag


def ridge(run, folder, tokens, penalties=(1.0, 10.0, 100.0, 1000.0), block=4096):
    """ Latents (n, N, D) predicted from bags of tokens by ridge regression on the training split, the penalty chosen on its last
    tenth. What a model that reads words but no order gets. """
    train = open_split(run, folder, 'train')
    V1, ND, held = run.text.mask_id + 1, int(np.prod(train.latent_shape)), len(train) - len(train) // 10
    A, b = torch.zeros(V1, V1), torch.zeros(V1, ND)
    for i in tqdm(range(0, held, block), desc='ridge regression', unit='block', leave=False):
        x, z = train.rows(np.arange(i, min(i + block, held)))
        x = bag_of_tokens(run, x)
        A, b = A + x.T @ x, b + x.T @ z.flatten(1)
    x, z = train.rows(np.arange(held, len(train)))
    best, (e, Q) = (math.inf, None), torch.linalg.eigh(A.double())       # A = Q diag(e) Q'
    for penalty in penalties:
        W = (Q @ ((Q.T @ b.double()) / (e.clamp(min=0) + penalty)[:, None])).float()
        error = sum((bag_of_tokens(run, part) @ W - target.flatten(1)).square().sum().item()
                    for part, target in zip(x.split(block), z.split(block)))
        best = min(best, (error, W), key=lambda pair: pair[0])
    return run.stats.destandardise((bag_of_tokens(run, tokens) @ best[1]).view(len(tokens), *train.latent_shape))


def evaluate_t2l(run, folder, tokens, raw, seed, seeds, **how):
    n, results = len(tokens), {'n': len(tokens), 'seeds': seeds}
    runs = [make_latents(run, tokens, f't2l {i + 1}/{seeds}', seed + i, **how) for i in range(seeds)]
    each = [compare_latents(run, found, raw) for found in runs]
    means(results, '', {metric: np.mean([e[metric] for e in each], 0) for metric in each[0]})
    results |= dimensions(run, runs[0], raw)
    if seeds > 1:                                                        # how far apart are two draws from one text?
        means(results, '', {'cosine_between_draws': F.cosine_similarity(runs[0].flatten(1), runs[1].flatten(1)).numpy()})
    mean = run.stats.destandardise(torch.zeros_like(raw))
    controls = {'shuffled/': make_latents(run, tokens[derangement(n, seed)], 't2l shuffled', seed, **how),
                'null/': make_latents(run, tokens, 't2l null', seed, **how | dict(guidance=0.0)), 'mean/': mean}
    if run.text.mask_id < 20_000:
        controls['ridge/'] = ridge(run, folder, tokens)
    else:
        print(f'no ridge control: its normal equations over {run.text.mask_id:,} ids do not fit')
    for control, found in controls.items():
        means(results, control, compare_latents(run, found, raw))
        results |= {f'{control}{key}': value for key, value in dimensions(run, found, raw).items()}
    return results


# ---- sts

def read_pairs(path, revision=''):
    """ (sentences, sentences, scores) from a csv or tsv, with or without a header, or a hub dataset's validation split. """
    names = ({'sentence1', 'sentence_a', 'sentence_A'}, {'sentence2', 'sentence_b', 'sentence_B'}, {'score', 'relatedness_score'})
    if not os.path.isfile(path):
        if not re.fullmatch(r'[\w.-]+/[\w.-]+', path):
            raise ValueError(f'sts={path!r}: no such file, nor a hub id')
        try:
            from datasets import load_dataset
        except ImportError:
            raise ValueError(f'sts={path!r} is no file; to read it from the hub: pip install datasets') from None
        trouble = reach_hub()
        try:
            table = load_dataset(path, split='validation', revision=revision or None)
        except Exception as error:                                       # a dozen kinds, all of which mean: not there
            raise ValueError(f'sts={path!r}: no such file, and the hub did not give it ({trouble or type(error).__name__})') from None
        rows, header = [list(row.values()) for row in table], table.column_names
    else:
        with open(path, encoding='utf-8', newline='') as f:
            tabs = dict(delimiter='\t', quoting=csv.QUOTE_NONE) if path.endswith(('.tsv', '.txt')) else {}
            rows = [row for row in csv.reader(f, **tabs) if row]
        header = rows.pop(0) if rows and set(rows[0]) & set().union(*names) else ['sentence1', 'sentence2', 'score']
    try:
        at = [next(i for i, name in enumerate(header) if name in legal) for legal in names]
        first, second = ([row[i] for row in rows] for i in at[:2])
        scores = np.array([float(row[at[2]]) for row in rows])
        if not np.isfinite(scores).all():
            raise ValueError(f'the score of pair {np.isfinite(scores).argmin() + 1} is no finite number')
        return first, second, scores
    except (StopIteration, IndexError, ValueError, TypeError) as error:
        raise ValueError(f'{path}: expected columns sentence1, sentence2, score, found {header} ({error})') from None


def ranks(x):
    """ Ranks, equal values sharing their mean rank. """
    _, which, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[which]


def correlations(x, y):
    """ Pearson and Spearman, with the large-sample standard error (1 - r^2) / sqrt(n - 1). """
    out = {}
    for name, r in (('spearman', np.corrcoef(ranks(x), ranks(y))[0, 1]), ('pearson', np.corrcoef(x, y)[0, 1])):
        out |= {name: float(r), f'{name}_se': float((1 - r * r) / math.sqrt(len(x) - 1))}
    return out


def training_words(run, folder):
    """ Every word of the training texts. """
    train, found = open_split(run, folder, 'train'), set()
    for i in tqdm(range(len(train)), desc='words of the training texts', unit='text', leave=False):
        found |= words(train.text(i))
    return found


def evaluate_sts(run, folder, pairs, seed, seeds, **how):
    """ Generated latents of the sentences of all pairs (read_pairs), `seeds` draws; the correlations are means over the draws. """
    first, second, scores = pairs
    tokens = pack(run, first + second, cut=True)
    cut = sum(len(run.tokenizer.encode(sentence)) >= run.L for sentence in first + second)
    n, vocabulary = len(first), training_words(run, folder)
    known = np.array([words(a) | words(b) <= vocabulary for a, b in zip(first, second)])
    other = derangement(2 * n, seed)
    cosines = {'': [], 'shuffled/': []}
    for i in range(seeds):
        z = make_latents(run, tokens, f'sts {i + 1}/{seeds}', seed + i, **how)
        for control, x in (('', z), ('shuffled/', z[other])):            # another sentence's text, hence its latent
            cosines[control].append(F.cosine_similarity(x[:n].flatten(1), x[n:].flatten(1)).numpy())
    z = encode(run, first + second)
    cosines['encoder/'] = [F.cosine_similarity(z[:n].flatten(1), z[n:].flatten(1)).numpy()]
    results = {'n': n, 'seeds': seeds, 'n_known': int(known.sum()), 'n_cut_sentences': cut}
    for subset, rows in (('', np.ones(n, bool)), ('known_', known)):
        if rows.sum() < 3:
            continue
        for control, draws in cosines.items():
            each = [correlations(x[rows], scores[rows]) for x in draws]
            results |= {f'{control}{subset}{key}': float(np.mean([e[key] for e in each])) for key in each[0]}
            if control == '':
                results[f'{subset}spearman_sd_over_seeds'] = float(np.std([e['spearman'] for e in each]))
    return results


# ---- from noise

def text_statistics(texts, ids):
    """ Of n texts and their token ids: entropy (nats, of a text's own tokens, mean over texts), distinct-k (share of different word
    k-grams in all texts), repetition (share of a text's word 3-grams that it has had before), length in tokens. """
    results, entropy, repeated = {}, [], []
    for row in ids:
        _, count = np.unique(row, return_counts=True)
        p = count / max(1, count.sum())
        entropy.append(float(-(p * np.log(p)).sum()))
    split = [re.findall(r'\w+|[^\w\s]', t.lower()) for t in texts]
    grams = lambda w, k: [tuple(w[i:i + k]) for i in range(len(w) - k + 1)]   # noqa: E731
    for k in (1, 2, 3, 4):
        every = [g for w in split for g in grams(w, k)]
        results[f'distinct_{k}'] = len(set(every)) / max(1, len(every))
    for w in split:
        g = grams(w, 3)
        repeated.append(100 * (1 - len(set(g)) / len(g)) if g else 0.0)
    means(results, '', {'entropy': entropy, 'repetition': repeated, 'length': [len(row) for row in ids]})
    return results


@lru_cache(maxsize=1)                                                    # two tasks of one command may ask for it
def load_scorer(name, revision, device):
    """ perplexity(texts): exp of the mean nats per token under a causal language model, each text on its own, after its first token; or
    under a run of config/ar.py, the first token and an EOS among them. """
    if os.path.isdir(os.path.join(name, 'data')):
        run = load_run(name, device=device, dtype='float32')
        if not hasattr(run.text, 'decode_step') or 'latent' in run.streams:
            raise ValueError(f'scorer={name} is a run of ours that is no autoregressive one of text alone (config/ar.py)')

        def by_run(texts):
            tokens = pack(run, texts, cut=True).to(device)
            nats = sum(run.text.bound(run.model, part, None, None).sum().item() for part in tokens.split(128))
            return math.exp(nats / (tokens != run.tokenizer.pad).sum().item())
        return by_run
    where = name
    if not os.path.isdir(name):
        # a path beside folders that exist is a mistyped path; only what is left can be a hub's id
        folder = os.path.dirname(name)
        if not re.fullmatch(r'[\w.-]+(/[\w.-]+)?', name) or folder and os.path.isdir(folder):
            raise ValueError(f'scorer={name}: no such folder; name a run of config/ar.py, or a causal language model')
        where, _ = fetch(name, revision or None, 'scorer', 'name a run of config/ar.py, or a folder with a causal language model')
    import transformers
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, use_safetensors=True, trust_remote_code=False)
    except Exception as error:                                           # transformers raises what it likes
        raise ValueError(f'scorer={name}: neither a run with a checkpoint nor a causal language model: '
                         f'{type(error).__name__}: {str(error).strip().splitlines()[0]}') from None
    model, limit = model.to(device).eval(), getattr(model.config, 'max_position_embeddings', 1024)

    @torch.inference_mode()
    def perplexity(texts):
        nats = count = 0
        for text in tqdm(texts, desc='scorer', unit='text', leave=False):
            ids = tokenizer(text, return_tensors='pt').input_ids[:, :limit].to(device)
            if ids.shape[1] > 1:
                logits = model(ids).logits[0, :-1].float()
                nats, count = nats + F.cross_entropy(logits, ids[0, 1:], reduction='sum').item(), count + ids.shape[1] - 1
        return math.exp(nats / count) if count else math.inf
    return perplexity


def real_ids(run, tokens):
    """ The tokens of each text as it is decoded: before its EOS, without PAD (a weak sampler may write PAD and no EOS). """
    eos, pad = run.tokenizer.eos, run.tokenizer.pad
    return [[i for i in (row[:row.index(eos)] if eos in row else row) if i != pad] for row in tokens.tolist()]


def evaluate_from_noise(run, task, sources, tokens, scorer, revision, **how):
    """ As many samples as there are texts: of text and latent (unconditional) or of the text alone (text); control: data, the texts
    themselves, and shuffled, another sample's latent. calls, ms: network calls and milliseconds a text, the slow first calls of a
    process among them (a sweep leaves them out). """
    n, results, joint = len(sources), {'n': len(sources)}, task == 'unconditional'
    perplexity = load_scorer(scorer, revision, run.device) if scorer else None
    run.row_calls, began = 0, time.perf_counter()
    with tqdm(total=n, desc=task, unit='text', leave=False) as bar:
        how = how | dict(progress=bar.update, guidance=1.0)              # it has no condition to guide by
        ids, z = (unconditional(run, n, **how) if joint else
                  (write(run, *blank(run, n, how.get('length', 0), how['seed']), None, **how), None))
    results |= {'calls': run.row_calls / n, 'ms': 1000 * (time.perf_counter() - began) / n}
    written = [run.tokenizer.decode(row) for row in ids.tolist()]
    for control, texts, rows in (('', written, ids), ('data/', sources, tokens)):
        results |= {f'{control}{key}': value for key, value in text_statistics(texts, real_ids(run, rows)).items()}
        if scorer:
            results[f'{control}gen_ppl'] = perplexity(texts)
    if joint and run.meta['encoder']:
        embedded, raw = encode(run, written), raw_latents(run, z)
        for control, other in (('', torch.arange(n)), ('shuffled/', derangement(n, how['seed']))):
            means(results, control, {'coherence': F.cosine_similarity(embedded.flatten(1), raw[other].flatten(1)).numpy()})
    return results, written


# ---- self-correction

@torch.inference_mode()
def evaluate_self_correction(run, sources, tokens, scorer, revision, seed, batch, **how):
    """ Samples before and after so many rounds (as many as places, if self_correct is 0); accuracy: % of the tokens that are the network's
    own first choice; control: data, the texts themselves. """
    n, rounds = len(sources), how['self_correct'] or run.L
    perplexity = load_scorer(scorer, revision, run.device) if scorer else None
    rng = torch.Generator().manual_seed(seed)
    ids, given = blank(run, n, how['length'], seed)
    ids = write(run, ids, given, None, seed=seed, batch=batch, **how | dict(self_correct=0, guidance=1.0))

    results = {'n': n, 'rounds_at_most': rounds}

    def corrected(x, given, rounds):
        parts = []
        for part, fixed in zip(x.split(batch), given.split(batch)):
            z = null_latents(run, len(part), rng) if 'latent' in run.streams else None

            def denoise(tokens, t, positions):
                logits = call(run, tokens, z, t, 1.0, positions)[0]
                logits[:, run.banned] = -torch.inf
                return logits
            parts.append(run.text.correct(denoise, part.to(run.device), fixed, rounds, rng))
        return (torch.cat(part).cpu() for part in zip(*parts))
    after, before, accuracy, taken, done = corrected(ids, given, rounds)
    _, of_data, *_ = corrected(tokens, ends_of(run, tokens), 0)
    means(results, '', {'accuracy': 100 * accuracy, 'changed': 100 * (after != ids).sum(1) / (~given).sum(1), 'rounds': taken,
                        'converged': 100.0 * done})
    means(results, 'before/', {'accuracy': 100 * before})
    means(results, 'data/', {'accuracy': 100 * of_data})
    for control, x in (('', after), ('before/', ids), ('data/', tokens)):
        texts = [run.tokenizer.decode(row) for row in x.tolist()]
        results |= {f'{control}{key}': value for key, value in text_statistics(texts, real_ids(run, x)).items()}
        if scorer:
            results[f'{control}gen_ppl'] = perplexity(texts)
    return results, [run.tokenizer.decode(row) for row in after.tolist()]


# ---- infill

def evaluate_infill(run, sources, tokens, raw, share, **how):
    """ A share of each text's tokens (not the EOS) is masked and written again, from the rest and the right, a shuffled or no latent. """
    n, seed = len(sources), how['seed']
    length = (~is_end(tokens, run.tokenizer)).sum(1, keepdim=True)
    u = uniforms(seed, 0, 'evaluation', 0, n, 1 + tokens.shape[1])[:, 1:].masked_fill(torch.arange(tokens.shape[1]) >= length, torch.inf)
    masked = u.argsort(1).argsort(1) < (share * length).ceil()
    masked_tokens = torch.where(masked, run.text.mask_id, tokens)
    conditions = {'null/': None}
    if raw is not None and 'latent' in run.streams:
        z = run.stats.standardise(raw)
        conditions = {'': z, 'shuffled/': z[derangement(n, seed)], 'null/': None}
    results, written = {'n': n, 'share': share}, {}
    for control, z in conditions.items():
        with tqdm(total=n, desc=f'infill {control.rstrip("/")}', unit='text', leave=False) as bar:
            ids = write(run, masked_tokens, ~masked, z, inner=masked, progress=bar.update, **how)
        assert torch.equal(ids[~masked], tokens[~masked]), 'a given token changed'
        right = ((ids == tokens) & masked).sum(1) / masked.sum(1).clamp(min=1)
        means(results, control, {'token_accuracy': 100 * right})
        written[control] = [run.tokenizer.decode(row) for row in ids.tolist()]
        if raw is not None:
            means(results, control, compare(sources, written[control], raw, embed(run, written[control])))
    return results, written


# ---- proteins

def repeats(rows):
    """ Per sequence, %: residues in runs of three or more equal ones; 3-grams that the sequence has had before. """
    text = [''.join(map(chr, row)) for row in rows]
    runs = [100 * sum(len(m[0]) for m in re.finditer(r'(.)\1{2,}', t, re.DOTALL)) / max(1, len(t)) for t in text]
    grams = [[t[i:i + 3] for i in range(len(t) - 2)] for t in text]
    return {'runs': runs, 'repeated_3grams': [100 * (1 - len(set(g)) / len(g)) if g else 0.0 for g in grams]}


@torch.inference_mode()
def evaluate_protein(run, folder, tokens, seed, batch, **how):
    """ Recovery of masked residues in one call, by the share that is masked; and as many new sequences as there are texts: how far their
    composition is from the training split's (total variation), and how they repeat. Controls: unigram, residues drawn one by one from the
    training frequencies, at the lengths of the texts; data, the texts. """
    n, ends, train = len(tokens), is_end(tokens, run.tokenizer), open_split(run, folder, 'train')
    rng = torch.Generator().manual_seed(seed)
    law = train.counts().double()
    law[[run.tokenizer.eos, run.tokenizer.pad]] = 0
    law /= law.sum()
    results = {'n': n, 'unigram/nats_per_residue': -law.clamp(min=1e-12).log()[tokens[~ends]].mean().item()}
    for share in range(1, 10):
        u = uniforms(seed, share, 'evaluation', 0, n, 1 + run.L)[:, 1:]
        noisy, mask = run.text.corrupt(tokens, run.text.clock(torch.full((n,), share / 10, dtype=torch.float64)), u, ends)
        right = torch.zeros(n, dtype=torch.float64)
        for i in range(0, n, batch):
            rows = slice(i, i + batch)
            positions = positions_of(mask[rows])
            z = None
            if 'latent' in run.streams:
                z = null_latents(run, len(noisy[rows]), rng)
            model_t = run.text.clock(mask[rows].double().mean(1))           # the clock of the bound
            logits, _ = call(run, noisy[rows].to(run.device), z, model_t, 1.0, positions)
            found = torch.zeros_like(mask[rows])
            found.view(-1)[positions] = logits.argmax(1).cpu() == tokens[rows].flatten()[positions]
            right[rows] = 100 * found.sum(1).double() / mask[rows].sum(1).clamp(min=1)
        some = mask.any(1)
        means(results, '', {f'recovery@0.{share}': right[some].numpy()})
        commonest = 100.0 * ((tokens == law.argmax()) & mask).sum(1) / mask.sum(1).clamp(min=1)
        means(results, 'unigram/', {f'recovery@0.{share}': commonest[some].numpy()})
    with tqdm(total=n, desc='protein', unit='sequence', leave=False) as bar:
        ids = write(run, *blank(run, n, how['length'], seed), None, seed=seed, batch=batch, progress=bar.update, **how)
    by_lot = torch.multinomial(law, tokens.numel(), True, generator=rng).view(tokens.shape)
    for control, x in (('', ids), ('unigram/', torch.where(ends, tokens, by_lot)), ('data/', tokens)):
        own = real_ids(run, x)
        share = torch.bincount(torch.tensor([i for row in own for i in row]), minlength=len(law)).double()
        results[f'{control}composition_distance'] = ((share / share.sum() - law).abs().sum() / 2).item()
        means(results, control, {**repeats(own), 'length': [len(row) for row in own]})
    return results, [run.tokenizer.decode(row) for row in ids.tolist()]


# ---- images

def read_classes(spec):
    """ {name: its words} of 'animal: cat, dog; colour: red, blue'. """
    groups = {}
    for part in spec.split(';'):
        name, _, listed = part.partition(':')
        groups[name.strip()] = [word.strip() for word in listed.split(',') if word.strip()]
        if not name.strip() or len(groups[name.strip()]) < 2:
            raise ValueError(f'classes={spec!r}: tasks=image reads --classes="animal: cat, dog; colour: red, blue", two words or more each')
    return groups


def classes_of(texts, listed):
    """ Which of these words each text has, (n,) int64; -1: none, or several. """
    found = [[i for i, word in enumerate(listed) if re.search(rf'\b{re.escape(word)}\b', text)] for text in texts]
    return torch.tensor([f[0] if len(f) == 1 else -1 for f in found])


def train_eye(pictures, labels, n_classes, seed, steps=600, batch=64):
    """ eye(pictures (n, S, S, C) uint8) -> classes (n,): a small convolutional network, trained on these pictures and labels. """
    scale = lambda x: torch.from_numpy(x).permute(0, 3, 1, 2).float() / 127.5 - 1   # noqa: E731
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(pictures.shape[3], 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
                            nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, n_classes))
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in tqdm(range(steps), desc='training the eye', leave=False):
            rows = torch.randint(len(pictures), (batch,))
            F.cross_entropy(net(scale(pictures[rows.numpy()])), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    net.eval().requires_grad_(False)
    return lambda x: torch.cat([net(scale(x[i:i + 512])).argmax(1) for i in range(0, len(x), 512)])


def spread(pictures, labels):
    """ Root mean square distance of a pixel from the mean of its class. """
    x = torch.from_numpy(pictures).flatten(1).double()
    square = sum((x[labels == c] - x[labels == c].mean(0)).square().sum() for c in labels.unique())
    return (square / x.numel()).sqrt().item()


def nearest_pictures(pictures, known):
    """ Which of the known pictures is nearest, (n,), and the root mean square distance of a pixel, (n,). """
    x, y = (torch.from_numpy(p).flatten(1).float() for p in (pictures, known))
    distance, at = zip(*(torch.cdist(part, y).min(1) for part in x.split(128)))
    return torch.cat(at), torch.cat(distance) / x.shape[1] ** 0.5


def evaluate_image(run, folder, sources, tokens, raw, groups, seed, **how):
    """ ({key: value}, {name: array} of captions and pictures to be looked at). Pictures are judged as a .png has them. """
    n, learned, other, how = len(sources), trained_for(run), derangement(len(sources), seed), how | dict(seed=seed)
    train = open_split(run, folder, 'train')
    rows = np.random.Generator(np.random.Philox(seed)).permutation(len(train))[:20_000]
    known, captions = pixels(run, train.raw_latents(rows)), [train.text(int(i)) for i in rows]
    pictures, texts, results = {'real/': pixels(run, raw)}, {}, {'n': n}
    shown = dict(captions=sources, real=pictures['real/'])
    if learned & {'t2l', 'unconditional'}:
        shown['made'] = pixels(run, make_latents(run, tokens, 'image', **how))
        pictures |= {'': shown['made'], 'shuffled/': shown['made'][other],
                     'null/': pixels(run, make_latents(run, tokens, 'image null', **how | dict(guidance=0.0)))}
    if learned & {'l2t', 'unconditional'}:
        shown['written'] = write_from(run, raw, 'caption', tokens, **how)
        texts = {'': shown['written'], 'shuffled/': [shown['written'][i] for i in other],
                 'null/': write_from(run, raw, 'caption null', tokens, **how | dict(guidance=0.0)),
                 'nearest/': [captions[i] for i in nearest_pictures(pictures['real/'], known)[0].tolist()]}
    if not why_not(run, 'unconditional'):
        ids, z = unconditional(run, n, **how | dict(guidance=1.0))
        shown |= dict(joint_captions=[run.tokenizer.decode(row) for row in ids.tolist()], joint=pixels(run, raw_latents(run, z)))
    for name, listed in groups.items():
        own, labels = classes_of(sources, listed), classes_of(captions, listed)
        if len(labels[labels >= 0].unique()) < 2 or (own >= 0).sum() < 2:
            raise ValueError(f'classes: next to no caption of {folder} has one of {", ".join(listed)}')
        eye = train_eye(known[(labels >= 0).numpy()], labels[labels >= 0], len(listed), seed)
        for control, x in pictures.items():
            means(results, control, {f'image_{name}': 100.0 * (eye(x) == own)[own >= 0]})
        for control, x in texts.items():
            said = classes_of(x, listed)
            means(results, control, {f'named_{name}': 100.0 * (said >= 0)})
            if ((said >= 0) & (own >= 0)).sum() > 1:
                means(results, control, {f'caption_{name}': 100.0 * (said == own)[(said >= 0) & (own >= 0)]})
        if 'joint' in shown:
            said, seen = classes_of(shown['joint_captions'], listed), eye(shown['joint'])
            for control, x in (('', seen), ('shuffled/', seen[other])):
                if (said >= 0).sum() > 1:
                    means(results, control, {f'joint_{name}': 100.0 * (x == said)[said >= 0]})
        for control in [control for control in ('', 'real/') if control in pictures]:
            results[f'{control}spread_{name}'] = spread(pictures[control][(own >= 0).numpy()], own[own >= 0])
    for control in [control for control in ('', 'real/') if control in pictures]:
        means(results, control, {'nearest_training': nearest_pictures(pictures[control], known)[1]})
    return results, {key: np.array(value[:100]) for key, value in shown.items()}


# ---- importance

@torch.inference_mode()
def evaluate_importance(run, folder, tokens, raw, draws, seed, batch):
    """ The loss at masked positions (n ~ U{1..L} of them, importance unused) by quarters of the tokens: by their frequency in the
    training split, rare last, and by their importance, with the rank correlation of importance and a token's mean loss. """
    n, L = tokens.shape
    rare = rarity(open_split(run, folder, 'train').counts(), run.tokenizer.pad)
    z = None if raw is None or 'latent' not in run.streams else run.stats.standardise(raw)
    importance, nats, count = rare[tokens], torch.zeros(n, L, dtype=torch.float64), torch.zeros(n, L)
    for i in tqdm(range(0, n, batch), desc='importance', unit='batch', leave=False):
        rows = slice(i, i + batch)
        x, latents = tokens[rows].to(run.device), None if z is None else z[rows].to(run.device)
        if run.model.importance:
            importance[rows] = run.model.importance(x)[0].float().cpu()
        for k in range(draws):
            u = uniforms(seed, k, 'evaluation', i, len(x), 1 + L).to(run.device)
            free = (~ends_of(run, x)).sum(1).clamp(min=1)
            size = 1 + ((u[:, 0] + k / draws) % 1 * free).long().clamp(max=free - 1)
            noisy, mask = run.text.corrupt_exactly(x, size, u[:, 1:], ends_of(run, x))
            positions = positions_of(mask)
            logits, _ = call(run, noisy, latents, run.text.clock(size.double() / L), 0.0, positions)
            nll = torch.zeros(x.numel(), device=run.device)
            nll[positions] = F.cross_entropy(logits, x.flatten()[positions], reduction='none')
            nats[rows] += nll.view(x.shape).double().cpu()
            count[rows] += mask.cpu()
    used = (count > 0) & (tokens != run.tokenizer.pad)
    loss, results = nats / count.clamp(min=1), {'n': n, 'draws': draws}
    for name, value in {'frequency': rare[tokens], **({'importance': importance} if run.model.importance else {})}.items():
        edges = value[used].double().quantile(torch.tensor([.25, .5, .75], dtype=torch.float64))
        quarters = torch.bucketize(value.double(), edges)
        for quarter in range(4):
            inside = used & (quarters == quarter)
            total, size = (loss * inside).sum(1), inside.sum(1).double()                     # (n,): tokens of a text are not independent
            if size.sum() > 0:
                key = f'{name}/nats_quarter_{quarter + 1}'
                results[key] = (total.sum() / size.sum()).item()
                results |= {f'{key}{suffix}': value for suffix, value in ratio_se(total, size).items()}
        results[f'{name}/spearman_with_loss'] = correlations(value[used].numpy(), loss[used].numpy())['spearman']
        results[f'{name}/std'] = value[used].std().item()
    if run.config.get('importance') == 'freq':
        results['genmd4/nats_per_token'] = rated_bound(run, tokens, z, rare, draws, seed, batch)
    return results


def rated_bound(run, tokens, z, rare, draws, seed, batch):
    """ Nats per real token of the bound for the rates that the run was trained at, at its end (adaptive.genmd4_bound). """
    c = run.config
    trained = Adaptive(c['masking'], c['beta'], False, (.3, .7), 1, c['max_iters'], run.tokenizer.pad, rare, False)
    w = trained.exponents(rare, c['max_iters'] - 1)
    n, L, total = *tokens.shape, 0.0
    for i in range(0, n, batch):
        x, latents = tokens[i:i + batch].to(run.device), None if z is None else z[i:i + batch].to(run.device)
        for k in range(draws):
            u = uniforms(seed, k, 'evaluation', i, len(x), 1 + L).to(run.device)
            t = (torch.arange(len(x), device=run.device) + u[:, 0]) / len(x)                 # spread over (0, 1)
            with run.autocast():
                total += genmd4_bound(run.model, run.text, x, latents, torch.zeros(len(x), device=run.device), t, u[:, 1:],
                                      w.to(run.device), ends_of(run, x)).sum().item() / draws
    return total / ((tokens != run.tokenizer.pad) & ~ends_of(run, tokens)).sum().item()
