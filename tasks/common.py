"""
What the tasks of this folder share. A task is a file with

    NEEDS                the run that it can measure (TaskNeeds)
    SETTINGS             the knobs of evaluate.py that decide its figures, beside its texts
    measure(run, ctx)    the figures: a Measured
    prepare(run, knobs)  if there is one: reads or checks what the task's own knobs name, before
                         anything is computed; ctx.prepared is what it returned

and evaluate.py finds it by its name. Figures are {'metric': value}, those of a control
{'control/metric': value}, and a standard error is 'metric_se'.

Letters: n texts, L text tokens, N latent vectors, D latent dimensions, V vocabulary.
"""
import math
import os
import re
import time
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from sampling.inputs import most_tokens, pack, read_texts
from data import PackedDataset, row_order
from diffusion import uniforms
from encoders import fetch
from runs.checkpoint import difference
from runs.console import warn
from sampling.loading import Needs, encode, load_run, raw_latents
from runs.manifest import dataset_identity
from sampling.directions import l2t, t2l
from sampling.knobs import LATENT_KNOBS, TEXT_KNOBS
from sampling.png import image_record
from sampling.search import search

# the text knobs of samples from noise, which have nothing to guide them
FREE_KNOBS = tuple(name for name in TEXT_KNOBS if name != 'guidance')

# -----------------------------------------------------------------------------
# What a task declares, gets and gives

@dataclass
class TaskNeeds(Needs):
    """ What a run must have for a task; Needs has its streams and modes. """
    encoder: str = ''              # texts are embedded: always, or where the run has an encoder
    shuffled: bool = False         # a control gives a text the latent of another: it takes two
    tokenizer: str = ''            # the kind of its tokens
    images: bool = False           # its latents are patches of images
    corrects: bool = False         # its text process takes back what it wrote (gidd)
    fills_gaps: bool = False       # its text process writes between known tokens

    def missing(self, run):
        """ What the run lacks, as the rest of a sentence that begins with its name, or ''. """
        missing = super().missing(run)
        if missing:
            return missing
        if self.corrects and not hasattr(run.text, 'correct'):
            return 'was not trained with text_process=gidd, which can take back what it wrote'
        if self.fills_gaps and not run.fills_masks:
            return 'is autoregressive: it continues a text, and fills no gaps'
        if self.tokenizer and run.tokenizer.kind != self.tokenizer:
            return f'was trained on {run.tokenizer.kind} tokens'
        if self.encoder == 'always' and not run.meta['encoder']:
            return 'has latents that were given without their encoder'
        if self.images and not image_record(run.meta):
            return 'was not trained on images'
        return ''


@dataclass
class Context:
    """ What is measured, and how. """
    knobs: dict                    # of evaluate.py
    folder: str = ''               # of the run's dataset
    texts: list = ()               # n
    tokens: object = None          # (n, L)
    raw: object = None             # raw latents (n, N, D), or None
    prepared: object = None        # what the task's `prepare` returned

    @property
    def n(self):
        return len(self.texts)

    @property
    def sampling(self):
        """ The keywords of write and t2l in sampling/. """
        sampling = {name: self.knobs[name] for name in TEXT_KNOBS + LATENT_KNOBS}
        return sampling | dict(seed=self.knobs['seed'], batch=self.knobs['sample_batch'])


@dataclass
class Measured:
    figures: dict
    shown: list = ()               # lines for a reader: what was written
    arrays: dict = field(default_factory=dict)     # {name: array}, for a file beside results.json

# -----------------------------------------------------------------------------
# The texts that are measured

def chosen_rows(total, n, order, seed):
    """ Which n of `total` rows are measured: the first, or random ones drawn with the seed. """
    if order not in ('random', 'first'):
        raise ValueError(f'order={order!r}: choose from random, first')
    if order == 'first':
        return np.arange(min(n, total))
    if total > 2**24:                                      # an order of all would take long
        return row_order(total, seed, 0, min(n, total))
    return np.random.Generator(np.random.Philox(seed)).permutation(total)[:n]


def load_file(run, path, field, n):
    """ (texts, tokens (n, L), raw latents (n, N, D) or None, how many were skipped): the first n
    texts of a file that are short enough for the run. """
    if run.stats and not run.meta['encoder']:
        raise ValueError(f'texts={path}: {run.out_dir} has latents that no encoder made, so none '
                         'of other texts: leave it out')

    # the first n that fit
    texts, skipped = [], []
    for place, text in read_texts(path, field):
        n_tokens = len(run.tokenizer.encode(text))
        if n_tokens > most_tokens(run):
            skipped.append(f'{place.rpartition(", ")[2]} ({n_tokens:,})')
        else:
            texts.append(text)
        if len(texts) == n:
            break

    # say what was skipped
    if skipped:
        shown = ', '.join(skipped[:5]) + (', ...' if len(skipped) > 5 else '')
        warn(f'texts={path}: {len(skipped):,} of {len(skipped) + len(texts):,} texts skipped, '
             f'which have more than the {most_tokens(run)} tokens that {run.out_dir} reads: '
             f'{shown}')
    if not texts:
        raise ValueError(f'texts={path}: no text in it is short enough for {run.out_dir}')

    # their latents
    raw = embed(run, texts)
    n_zero = 0 if raw is None else int((raw.flatten(1) == 0).all(1).sum())
    if n_zero:
        warn(f'texts={path}: {n_zero:,} of {len(texts):,} texts have no word that the encoder '
             'knows: their latent is zero')
    return texts, pack(run, texts), raw, len(skipped)


def load_texts(run, folder, n, order, seed):
    """ (texts, tokens (n, L), raw latents (n, N, D) or None): n rows of the validation split. """
    data = open_split(run, folder, 'val')
    rows = chosen_rows(len(data), n, order, seed)

    # proteins are cropped
    crop = None
    if data.cropped:                           # as in training, always at the same places
        crop = uniforms(seed, 0, 'crop', 0, len(rows), 1)[:, 0]
    tokens, _ = data.rows(rows, crop)
    if data.cropped:
        texts = [run.tokenizer.decode(row) for row in tokens.tolist()]
    else:
        texts = [data.text(int(row)) for row in rows]
    return texts, tokens, data.raw_latents(rows) if run.stats else None


def open_split(run, folder, split):
    """ A split of the run's dataset; ValueError where the folder holds another dataset. """
    data = PackedDataset(folder, split, run.L, crop=run.lengths is not None)
    other = difference(dataset_identity(run.meta), dataset_identity(data.meta))
    if other:
        raise ValueError(f'{run.out_dir} was trained with {other} in {folder}: name its own '
                         'dataset with --dataset=')
    return data


def decode(run, tokens):
    """ The n texts of tokens (n, L). """
    return [run.tokenizer.decode(row) for row in tokens.tolist()]


def embed(run, texts):
    """ Raw latents (n, N, D) of written texts; None where the latents were given without their
    encoder. """
    return encode(run, texts) if run.meta['encoder'] else None

# -----------------------------------------------------------------------------
# Figures

def derangement(n, seed):
    """ A permutation that leaves no one in place: a random cycle. """
    if n < 2:
        raise ValueError(f'{n} text: shuffled controls need at least 2')
    order = np.random.Generator(np.random.Philox(seed + 1)).permutation(n)
    out = np.empty(n, np.int64)
    out[order] = np.roll(order, 1)
    return torch.from_numpy(out)


def means(results, control, metrics):
    """ Enters {metric: values (n,)} into results as mean and, from two values on, standard
    error. """
    for metric, values in metrics.items():
        values = np.asarray(values, np.float64)
        results[f'{control}{metric}'] = float(values.mean())
        if len(values) > 1:
            results[f'{control}{metric}_se'] = float(values.std(ddof=1) / math.sqrt(len(values)))


def enter(results, control, figures):
    """ Enters {metric: value} into results. """
    for metric, value in figures.items():
        results[f'{control}{metric}'] = value


def ratio_se(total, size):
    """ {'_se': standard error} of sum(total) / sum(size) over n texts, total and size (n,); {} of
    one text. """
    n = len(total)
    if n == 1:
        return {}
    ratio = total.sum() / size.sum()
    return {'_se': ((total - ratio * size).std() / size.mean() / math.sqrt(n)).item()}


def ranks(x):
    """ Ranks, equal values sharing their mean rank. """
    _, which, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[which]


def correlations(x, y):
    """ Pearson and Spearman, with the large-sample standard error (1 - r^2) / sqrt(n - 1). """
    found = {}
    for name, a, b in (('spearman', ranks(x), ranks(y)), ('pearson', x, y)):
        r = np.corrcoef(a, b)[0, 1]
        found[name] = float(r)
        found[f'{name}_se'] = float((1 - r * r) / math.sqrt(len(x) - 1))
    return found


def words(text):
    return set(re.findall(r'\w+', text.lower()))


def word_f1(a, b):
    """ F1 between the sets of words. """
    a, b = words(a), words(b)
    return 2 * len(a & b) / (len(a) + len(b)) if a or b else 1.0


def retrieval(found, raw):
    """ {metric: per-text values (n,)} of latents found (n, N, D) against the right ones among all n
    of raw. Equal similarities are ranked by lot: all-zero embeddings score chance. """
    a = F.normalize(found.flatten(1), dim=1)
    b = F.normalize(raw.flatten(1), dim=1)
    similarity = a @ b.T                                                 # (n, n)
    right = similarity.diagonal()                                        # (n,)
    nearer = (similarity > right[:, None]).sum(1)
    equal = (similarity == right[:, None]).sum(1)

    def hit(k):
        return 100.0 * ((k - nearer) / equal).clamp(0, 1).numpy()

    # the mean of 1 / rank over the ranks that equal ones share, by harmonic numbers
    H = F.pad((1 / torch.arange(1, len(a) + 1)).cumsum(0), (1, 0))
    reciprocal_rank = (H[nearer + equal] - H[nearer]) / equal
    return {'cosine': right.numpy(), 'retrieval@1': hit(1), 'retrieval@10': hit(10),
            'mrr': reciprocal_rank.numpy()}


def compare(texts, written, raw, embedded):
    """ {metric: per-text values (n,)} of written texts against their sources, and of their
    embeddings, if there are any, against the source latents. """
    from sacrebleu.metrics import BLEU
    bleu = BLEU(effective_order=True)          # sentence BLEU: a three-word text has no 4-grams
    pairs = list(zip(written, texts))
    n_words = np.array([(len(w.split()), len(s.split())) for w, s in pairs])
    found = {'bleu': np.array([bleu.sentence_score(w, [s]).score for w, s in pairs]),
             'f1': np.array([100 * word_f1(w, s) for w, s in pairs]),
             'exact': np.array([100.0 * (w == s) for w, s in pairs]),
             'length': 100.0 * n_words[:, 0] / n_words[:, 1].mean()}     # so its mean is of sums
    if embedded is not None:
        found |= retrieval(embedded, raw)
    return found

# -----------------------------------------------------------------------------
# The directions

def write_from(run, raw, name, lengths_of, rerank=1, refine=0, **sampling):
    """ Texts written from raw latents (n, N, D), by search where rerank or refine ask for it.
    lengths_of (n, L): their lengths are taken where the run does not learn lengths (see blank). """
    if not run.lengths or sampling.get('length'):
        lengths_of = None
    sampling = sampling | dict(lengths_of=lengths_of)
    if rerank > 1 or refine:
        tokens, _ = search(run, raw, rerank, refine, **sampling)
    else:
        tokens = l2t(run, run.stats.standardise(raw), **sampling)
    return decode(run, tokens)


def make_latents(run, tokens, name, seed, **sampling):
    """ Raw latents (n, N, D) generated from tokens (n, L). """
    return raw_latents(run, t2l(run, tokens, seed=seed, **sampling))

# -----------------------------------------------------------------------------
# Texts from noise: what they are like

def real_ids(run, tokens):
    """ The tokens of each text as it is decoded: before its EOS, without PAD. (A weak sampler may
    write PAD and no EOS.) """
    eos, pad = run.tokenizer.eos, run.tokenizer.pad
    found = []
    for row in tokens.tolist():
        if eos in row:
            row = row[:row.index(eos)]
        found.append([i for i in row if i != pad])
    return found


def n_grams(items, k):
    return [tuple(items[i:i + k]) for i in range(len(items) - k + 1)]


def text_statistics(texts, ids):
    """ Of n texts and their token ids: entropy (nats, of a text's own tokens, mean over texts),
    distinct-k (share of different word k-grams in all texts), repetition (share of a text's word
    3-grams that it has had before), length in tokens. """
    entropy = []
    for row in ids:
        _, count = np.unique(row, return_counts=True)
        p = count / max(1, count.sum())
        entropy.append(float(-(p * np.log(p)).sum()))

    # word k-grams
    results = {}
    words_of = [re.findall(r'\w+|[^\w\s]', text.lower()) for text in texts]
    for k in (1, 2, 3, 4):
        grams = [gram for text in words_of for gram in n_grams(text, k)]
        results[f'distinct_{k}'] = len(set(grams)) / max(1, len(grams))
    repetition = []
    for text in words_of:
        grams = n_grams(text, 3)
        repetition.append(100 * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
    length = [len(row) for row in ids]
    means(results, '', {'entropy': entropy, 'repetition': repetition, 'length': length})
    return results


def describe_texts(results, run, control, texts, tokens, perplexity=None):
    """ Enters text_statistics of texts and their tokens (n, L), and their perplexity under a
    scorer. """
    enter(results, control, text_statistics(texts, real_ids(run, tokens)))
    if perplexity:
        results[f'{control}gen_ppl'] = perplexity(texts)


def describe_samples(run, ctx, name, draw):
    """
    Draws as many samples as there are texts, and describes them beside the texts themselves
    (data/). name: of the task. draw(**sampling) -> what it has drawn, the tokens (n, L) first.
    Returns ({metric: value}, with the network calls and milliseconds of a text; the texts; what
    was drawn).
    """
    run.row_calls, began = 0, time.perf_counter()
    drawn = draw(**ctx.sampling | dict(guidance=1.0))
    seconds = time.perf_counter() - began
    results = {'n': ctx.n, 'calls': run.row_calls / ctx.n, 'ms': 1000 * seconds / ctx.n}

    written = decode(run, drawn[0])
    describe_texts(results, run, '', written, drawn[0], ctx.prepared)
    describe_texts(results, run, 'data/', ctx.texts, ctx.tokens, ctx.prepared)
    return results, written, drawn


def prepare_scorer(run, knobs):
    """ perplexity(texts) of the scorer that the knobs name, or None: `prepare` of the tasks that
    read it. """
    if not knobs['scorer']:
        return None
    return load_scorer(knobs['scorer'], knobs['scorer_revision'], run.device)


@lru_cache(maxsize=1)                          # two tasks of one command may ask for it
def load_scorer(name, revision, device):
    """ perplexity(texts): exp of the mean nats per token, each text on its own. Under a run of
    config/ar.py the first token and an EOS count; under a causal language model what is after the
    first token. """
    if os.path.isdir(os.path.join(name, 'data')):
        return scorer_of_run(name, device)

    where = name
    if not os.path.isdir(name):
        # a path beside folders that exist is a mistyped path; only what is left can be a hub's id
        folder = os.path.dirname(name)
        is_id = re.fullmatch(r'[\w.-]+(/[\w.-]+)?', name)
        if not is_id or folder and os.path.isdir(folder):
            raise ValueError(f'scorer={name}: no such folder; name a run of config/ar.py, or a '
                             'causal language model')
        where, _ = fetch(name, revision or None, 'scorer',
                         'name a run of config/ar.py, or a folder with a causal language model')

    # a causal language model
    import transformers
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where, use_safetensors=True, trust_remote_code=False)
    except Exception as error:                 # transformers raises what it likes
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(f'scorer={name}: neither a run with a checkpoint nor a causal language '
                         f'model: {type(error).__name__}: {first_line}') from None

    # text by text
    model = model.to(device).eval()
    limit = getattr(model.config, 'max_position_embeddings', 1024)

    @torch.inference_mode()
    def perplexity(texts):
        nats = count = 0
        for text in tqdm(texts, desc='scorer', unit='text', leave=False, disable=None):
            ids = tokenizer(text, return_tensors='pt').input_ids[:, :limit].to(device)
            if ids.shape[1] > 1:
                logits = model(ids).logits[0, :-1].float()
                nats += F.cross_entropy(logits, ids[0, 1:], reduction='sum').item()
                count += ids.shape[1] - 1
        return math.exp(nats / count) if count else math.inf
    return perplexity


def scorer_of_run(out_dir, device):
    """ perplexity(texts) under an autoregressive run of ours. """
    run = load_run(out_dir, device=device, dtype='float32')
    if run.next_token is None or 'latent' in run.streams:
        raise ValueError(f'scorer={out_dir} is a run of ours that does not read text alone from '
                         'left to right (config/ar.py)')

    def perplexity(texts):
        tokens = pack(run, texts, cut=True)
        nats = 0
        for part in tokens.split(128):
            ones = torch.ones(len(part), device=run.device)
            nats += run.next_token.bound(run.model, part, None, ones).sum().item()
        return math.exp(nats / (tokens != run.tokenizer.pad).sum().item())
    return perplexity
