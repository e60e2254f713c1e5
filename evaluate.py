"""
Measure a run on its validation split, each figure beside the controls that would expose it.

    python evaluate.py --out_dir=out/quickstart                              # what the run was trained for
    python evaluate.py --out_dir=out/mixed --tasks=nelbo,l2t,t2l,unconditional,infill --n=200
    python evaluate.py --out_dir=out/mixed --tasks=sts --sts=stsb-en-dev.csv
    python evaluate.py --out_dir=out/quickstart --tasks=l2t --sweep="sampler=ancestral,first_hitting,confidence; steps=4,8,16,32"
    python evaluate.py --out_dir=out/quickstart --texts=my.txt               # other texts, embedded on the spot

nelbo   the exact bound on -log p(text | latent), nats per real token (text and one EOS; the nats of PAD are in the total), and
        latent_mse, the squared error of x0 per dimension given the text, over uniform clocks
l2t     texts written from latents, against the texts the latents came from: sentence BLEU, word-set F1, exact match, and the
        round trip: embed what was written, cosine with the source latent, retrieval of the source among all n
t2l     latents made from texts, against the encoder's: cosine, centred cosine (less the mean of the training latents), squared error
        per dimension (standardised), retrieval among all n and mean reciprocal rank, mean and spread of every dimension
sts     correlation of the cosine of generated latents with what people said, over all pairs, and over the known ones: the pairs
        whose every word occurs in the training texts
unconditional   joint samples: entropy, distinct n-grams, repetition, coherence cos(z, encoder(x)), perplexity under a scorer,
        network calls and milliseconds a text
text    the same of texts alone, the latents' clock at 1
protein recovery of masked residues at shares .1 to .9, composition and repeats of new sequences (nelbo has the bound per residue)
image   of captions and pictures: is what a caption says (classes) to be seen in the picture made from it? The eye is a small network
        trained on the real training pictures, the real validation pictures (real) show how well it sees. image_: pictures from
        captions; caption_: captions from pictures, of those that say anything about it (named_); joint_: both from noise, do they
        agree? spread: how far pictures are from the mean of their class, nearest_training: from the nearest training picture, in
        grey levels of 255 a pixel, root mean square; out_dir/images.npz has the first 100 (plot.py --what=images)
importance  the loss by quarters of frequency and of importance, rank correlation of importance and loss (adaptive.py)
self_correction   gidd: of its own samples the share of tokens that the network would keep, before and after it has mended them
infill  a share of each text's tokens masked and written again: token accuracy, and as l2t
Controls: shuffled (another text's condition), null (noise at clock 1), nearest (the training text whose latent is nearest: what
copying the training set would get), mean and ridge (the mean latent; ridge regression from the bag of tokens), encoder, data.

Figures are means over texts with standard errors, printed and written to out_dir/results.json as "task/metric",
"task/control/metric", "..._se". A task replaces its own keys where it is measured again with the same settings, on a later
checkpoint or on more texts. Nothing else overwrites, but by removing the file: other settings have a name that says what is other,
    nelbo[texts=my.txt]/...     a file of texts; nelbo/ is of the validation split
    nelbo[n=20]/...             fewer texts than nelbo/ has
    l2t[guidance=2.0]/...       another value of a knob that decides the figures, which are listed in SETTINGS
A sweep has keys of its own, l2t_sweep_steps/steps=8/..., and keeps the points that it does not measure again.
"""
import itertools
import json
import os
import sys
import time

# before torch reads it: threads that wait sleep, where spinning would take the core of whom they wait for
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import numpy as np

from runs.checkpoint import git_commit
from configurator import configure, from_text, read_knobs, settle, stop_on_error
from data import dataset_folder
from runs.files import read_json, sha256
from tasks.measures import (compare, compare_latents, embed, evaluate_from_noise, evaluate_image, evaluate_importance, evaluate_infill,
                      evaluate_l2t, evaluate_protein, evaluate_self_correction, evaluate_sts, evaluate_t2l, chosen_rows, latent_mse,
                      load_file, load_scorer, load_texts, make_latents, means, nelbo, read_classes, read_pairs, write_from)
from sample import LATENT_KNOBS, TEXT_KNOBS, check_task, check_writable, encoder_of, load_run, trained_for, why_not

out_dir = 'out/quickstart'      # <a run folder>
which = 'best'                  # best | latest | <a step, as step-00001000>: best is the latest one before the first evaluation
tasks = ''                      # nelbo, l2t, t2l, sts, unconditional, text, infill, protein, image, importance, self_correction; '':
                                # nelbo and what it was trained for
sweep = ''                      # l2t, t2l over values of their knobs: 'guidance=0,1,2' or 'sampler=ancestral,confidence; steps=8,16'
texts = ''                      # a text file, one text a line, or a .jsonl, .csv, .tsv, .parquet or .fasta file, a record each, all
                                # but parquet also as .gz; too long ones are skipped and counted; '': the validation split
field = 'text'                  # where a record of such a file has its text
dataset = ''                    # where the run's dataset lies; '': where it was trained from
encoder_folder = ''             # where the encoder lies now; '': where it was when the data were prepared
n = None                        # None | int [1, 1e9]: texts, or pairs of sts; all if there are fewer; None: 1000 texts, and all pairs
order = 'random'                # random | first: random ones are drawn with the seed
draws = 16                      # [1, 1e5]; nelbo: draws of the bound per text, spread evenly over the number of masked positions
sts = ''                        # sts: a csv or tsv of sentence, sentence, score (STS-B, SICK), or a hub dataset's id
sts_revision = ''               # of the hub dataset: a commit
scorer = ''                     # unconditional, text, self_correction: who says how likely the texts are: a run of config/ar.py, or a
                                # causal language model, hub id or folder
scorer_revision = ''            # of the hub model: a commit
infill_share = 0.5              # (0, 1]; infill: of each text's tokens
classes = ''                    # image: what captions say, and by which words: 'animal: cat, dog; colour: red, blue'
seeds = 3                       # [1, 1000]; t2l, sts: draws of every latent
# ---- sampling, as in sample.py
sampler = ''                    # '' | ancestral | cached | first_hitting | confidence | remdm | dfm | reparam
                                # '': confidence, but ancestral where there is nothing to write from
steps = 0                       # [0, 1e6]
length = 0                      # [0, 65536]
block_size = 0                  # [0, 65536]
score = 'top1'                  # top1 | margin | entropy | threshold: confidence
prefer = 'certain'              # certain | uncertain; confidence: what is released first
by_importance = False
remask = 'cap'                  # cap | rescale | loop: remdm
eta = 0.02                      # [0, 1]
loop = (0.55, 0.05, 0.9)        # [0, 1]
alpha = 1.5                     # [1, 2]
repeat_cap = 0.0                # [0, 1]
self_correct = 0                # [0, 1e6]
temperature = -1.0              # -1 | [0, 100]
nucleus = 1.0                   # (0, 1]
guidance = 1.0                  # [0, 100]
rerank = 1                      # [1, 4096]
refine = 0                      # [0, 4096]
solver = 'dpmpp_2m'             # ddim | dpmpp_2m | heun | ancestral
latent_steps = 32               # [1, 1e5]
sample_batch = 128              # [1, 65536]: rows per network call
show = 10                       # [0, 1e6]; l2t: pairs to print, the first ones
seed = 0                        # [0, 2**63)
device = 'auto'                 # auto | cpu | cuda | <cuda:1 or the like>
dtype = 'bfloat16'              # bfloat16 | float32
compile = False                 # torch.compile every block: a minute at first, then faster calls


# what decides the figures of a task, beside its texts
FREE_KNOBS = tuple(name for name in TEXT_KNOBS if name != 'guidance')    # samples from noise have nothing to guide them
SETTINGS = dict(nelbo=('draws',), l2t=(*TEXT_KNOBS, 'rerank', 'refine'), t2l=(*LATENT_KNOBS, 'seeds'),
                sts=(*LATENT_KNOBS, 'seeds', 'sts', 'sts_revision'),
                unconditional=(*FREE_KNOBS, 'solver', 'latent_steps', 'scorer', 'scorer_revision'),
                text=(*FREE_KNOBS, 'scorer', 'scorer_revision'), infill=(*TEXT_KNOBS, 'infill_share'), protein=TEXT_KNOBS,
                image=(*dict.fromkeys(TEXT_KNOBS + LATENT_KNOBS), 'classes'), importance=('draws',),
                self_correction=(*FREE_KNOBS, 'scorer', 'scorer_revision'))


# ---- sweeps

def read_sweep(spec, config):
    """ 'sampler=ancestral,confidence; steps=8,16' -> [{sampler: .., steps: ..}, ...], values of the knobs' own types. """
    axes, rule_of = {}, read_knobs(__file__)[2]
    for part in spec.split(';'):
        name, _, values = part.strip().partition('=')
        if name not in TEXT_KNOBS + LATENT_KNOBS + ('rerank', 'refine') or not values or isinstance(config[name], tuple):
            raise ValueError(f'sweep={spec!r}: {part.strip()!r} is no KNOB=VALUE,VALUE of a sampling knob')
        try:
            axes[name] = [settle(value.strip(), config[name], rule_of.get(name), from_text) for value in values.split(',')]
        except ValueError as error:
            raise ValueError(f'sweep={spec!r}: {name}: {error}') from None
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def evaluate_sweep(run, task, points, sources, tokens, raw, **how):
    """ {'name=value,.../metric': value}: quality beside the network calls and the milliseconds that a text took. """
    def make(rows, label, point):
        rows = slice(rows)
        if task == 'l2t':
            return write_from(run, raw[rows], label, tokens[rows], **how | point)
        of_latents = {key: value for key, value in (how | point).items() if key not in ('rerank', 'refine')}
        return make_latents(run, tokens[rows], label, **of_latents)
    results = {'n': len(sources)}
    make(how['batch'], 'warming up', points[0])                          # the first calls of a process, or of a compiled one, are slow
    for point in points:
        label = ','.join(f'{key}={value}' for key, value in point.items())
        run.row_calls, began = 0, time.perf_counter()
        out = make(len(sources), label, point)
        cost = {'calls': run.row_calls / len(sources), 'ms': 1000 * (time.perf_counter() - began) / len(sources)}
        entry = {}
        means(entry, '', compare(sources, out, raw, embed(run, out)) if task == 'l2t' else compare_latents(run, out, raw))
        results |= {f'{label}/{key}': value for key, value in (cost | entry).items()}
        print(f'{label:<40}' + ''.join(f'{key} {value:<9.4g}' for key, value in (cost | entry).items() if not key.endswith('_se')),
              flush=True)
    return results


# ---- results

def read_results(path):
    """ results.json, flat, with how each task was measured in 'meta'; {} where there is none yet. """
    if not os.path.exists(path):
        return {}
    try:
        return read_json(path, {'meta?': {'*': {}}})
    except ValueError as error:
        raise ValueError(f'{error}: move it away, and results start anew') from None


def name_of_results(task, settings, n, texts, old):
    """
    The name under which the figures of a task go into results.json, `old`: 'nelbo', or 'nelbo[texts=my.txt,n=20]'.
    A name belongs to the settings {knob: value} that it was first used with, and to the most texts n: what was
    measured otherwise gets a name with the knobs that differ from them. texts: the file they are from, or ''.
    """
    settings = json.loads(json.dumps(settings))                          # as they are recorded: tuples are lists
    differences = {'texts': os.path.basename(texts)} if texts else {}
    while True:
        label = ','.join(f'{knob}={value}' for knob, value in differences.items())
        name = task + (f'[{label}]' if label else '').replace('/', ':')  # a / ends the name in a key
        meta = old.get('meta', {}).get(name)
        if meta is None or meta.get('texts') and not texts:              # earlier versions wrote other texts under these keys
            return name
        found = {knob: value for knob, value in settings.items() if meta.get(knob, value) != value}
        n_before = old.get(f'{name}/n')
        if isinstance(n_before, int) and n < n_before:
            found['n'] = n
        if found.keys() <= differences.keys():
            return name
        differences |= found


def write_results(path, name, metrics, meta, old, keep=False):
    """ {key: value} into results.json, which holds `old`, as 'name/key'; the name's other keys go, unless they are to keep. """
    flat = {key: value for key, value in old.items() if key != 'meta' and (keep or key.split('/')[0] != name)}
    flat |= {f'{name}/{key}': value for key, value in metrics.items()}
    flat['meta'] = old.get('meta', {}) | {name: meta}
    with open(path + '.tmp', 'w') as f:
        json.dump(flat, f, indent=1)
    os.replace(path + '.tmp', path)


def print_table(task, results):
    """ Metrics down, controls across; value +- standard error. """
    facts = ('n', 'n_skipped', 'draws', 'seeds', 'share', 'n_known', 'n_cut_sentences', 'rounds_at_most')
    values = {key: value for key, value in results.items() if key not in facts and not key.endswith('_se')}
    controls = list(dict.fromkeys(key.split('/')[0] if '/' in key else '' for key in values))
    metrics = list(dict.fromkeys(key.split('/')[-1] for key in values))
    print(f'\n{task}: ' + ', '.join(f'{key} {results[key]}' for key in facts if key in results))
    widths = [max(20, 2 + len(control or task)) for control in controls]
    print(f'{"":<24}' + ''.join(f'{control or task:>{width}}' for control, width in zip(controls, widths)))
    for metric in metrics:
        row = f'{metric:<24}'
        for control, width in zip(controls, widths):
            key = f'{control}/{metric}' if control else metric
            se = results.get(f'{key}_se')
            cell = '' if key not in values else f'{values[key]:>12.3f}' + (f' ± {se:<5.3f}' if se is not None else ' ' * 8)
            row += f'{cell:>{width}}'
        print(row.rstrip())


def main():
    config = configure(globals())
    how = {key: config[key] for key in TEXT_KNOBS + LATENT_KNOBS} | dict(seed=seed, batch=sample_batch)
    n_texts = 1000 if n is None else n
    path = os.path.join(out_dir, 'results.json')

    def done(task, metrics, swept=()):
        """ Prints and writes the figures of a task, at once: what comes later may fail. Returns their name. """
        base = task.split('_sweep_')[0]
        file = texts if base != 'sts' else ''                            # sts has its own pairs
        settings = {knob: config[knob] for knob in ('which', 'seed', 'order', *SETTINGS[base]) if knob not in swept}
        if file:
            del settings['order']
            settings['texts_sha256'] = sha256(file)[:8]
            metrics = metrics | {'n_skipped': n_skipped}
        old = read_results(path)
        name = name_of_results(task, settings, metrics['n'], file, old)

        print_table(task, metrics)
        before = old.get('meta', {}).get(name, {})
        record = config | settings | dict(texts=file, checkpoint=run.checkpoint, commit=git_commit(), argv=sys.argv,
                                          n_texts=len(sources), n_skipped=n_skipped)
        keep = bool(swept) and before.get('checkpoint') == run.checkpoint and old.get(f'{name}/n') == metrics['n']
        write_results(path, name, metrics, record, old, keep)
        print(f'\nwritten to {path}' + (f' under {name}/, not under {task}/' if name != task else ''), flush=True)
        return name

    with stop_on_error():
        run = load_run(out_dir, which, device, dtype, encoder_folder)
        if compile:
            for block in run.model.blocks:
                block.compile()
        learned, alone = trained_for(run), run.streams == ('text',)
        own = ['text'] if alone else [task for task in ('l2t', 't2l', 'unconditional') if task in learned]
        chosen = [task.strip() for task in tasks.split(',') if task.strip()] or ['nelbo', *(task for task in own if not why_not(run, task))]
        if alone and 'unconditional' in chosen:
            print(f'{out_dir} is of text alone: unconditional is its task text')
            chosen[chosen.index('unconditional')] = 'text'
        for task in chosen:
            if task not in SETTINGS:
                raise ValueError(f"tasks={tasks!r}: choose from {', '.join(SETTINGS)}")
            check_task(run, task)
            if task == 'infill' and hasattr(run.text, 'decode_step'):
                raise ValueError(f'{out_dir} is autoregressive: it continues a text, and fills no gaps')
            if task == 'sts' and not sts:
                raise ValueError('tasks=sts reads --sts=FILE.csv of sentence, sentence, score')
        groups = read_classes(classes) if 'image' in chosen else None
        if scorer and not {'unconditional', 'text', 'self_correction'} & set(chosen):
            raise ValueError(f"scorer={scorer}: read by unconditional, text and self_correction, chosen are {', '.join(chosen)}")

        # what can be missing is asked for before anything is computed
        read_results(path)
        check_writable(path)
        if scorer:
            load_scorer(scorer, scorer_revision, run.device)
        if 'sts' in chosen:
            first, second, scores = read_pairs(sts, sts_revision)
            rows = np.arange(len(first)) if n is None else chosen_rows(len(first), n, order, seed)
            if len(rows) < 3:
                raise ValueError(f'sts={sts}, n={n}: a correlation needs at least 3 pairs, found {len(rows)}')
            pairs = [first[i] for i in rows], [second[i] for i in rows], scores[rows]
        if run.meta['encoder'] and {'l2t', 'sts', 'unconditional', 'infill'} & set(chosen):
            encoder_of(run)
        folder, n_skipped = dataset_folder(dataset or run.config['dataset']), 0
        if texts:
            sources, tokens, raw, n_skipped = load_file(run, texts, field, n_texts)
        else:
            sources, tokens, raw = load_texts(run, folder, n_texts, order, seed)
        if len(sources) == 1:
            for task in chosen:
                if task in ('l2t', 't2l', 'unconditional', 'image') or task == 'infill' and raw is not None:
                    raise ValueError(f'{task} of 1 text: its shuffled control needs at least 2; --tasks=nelbo takes one')

        if sweep:
            points, swept = read_sweep(sweep, config), [task for task in chosen if task in ('l2t', 't2l')]
            if not swept:
                raise ValueError(f'sweep={sweep!r} goes over tasks l2t and t2l, chosen are {", ".join(chosen)}')
            for task in swept:
                metrics = evaluate_sweep(run, task, points, sources, tokens, raw, rerank=rerank, refine=refine, **how)
                done(f'{task}_sweep_' + '_'.join(points[0]), metrics, swept=points[0])
            return
        if 'nelbo' in chosen:
            metrics = {'draws': draws, 'n': len(sources)}
            if learned & {'l2t', 'unconditional'} and 'text' in run.streams:
                metrics |= nelbo(run, sources, tokens, raw, draws, seed, sample_batch)
            if learned & {'t2l', 'unconditional'} and 'latent' in run.streams:
                metrics |= latent_mse(run, tokens, raw, draws, seed, sample_batch)
            done('nelbo', metrics)
        if 'l2t' in chosen:
            metrics, written = evaluate_l2t(run, folder, sources, tokens, raw, rerank=rerank, refine=refine, **how)
            for source, out in list(zip(sources, written['']))[:show]:
                print(f'\n   {source}\n-> {out}')
            done('l2t', metrics)
        if 't2l' in chosen:
            done('t2l', evaluate_t2l(run, folder, tokens, raw, seeds=seeds, **how))
        if 'sts' in chosen:
            done('sts', evaluate_sts(run, folder, pairs, seeds=seeds, **how))
        for task in ('unconditional', 'text'):
            if task in chosen:
                metrics, written = evaluate_from_noise(run, task, sources, tokens, scorer, scorer_revision, **how)
                print('\n' + '\n'.join(f'-> {out}' for out in written[:show]))
                done(task, metrics)
        if 'self_correction' in chosen:
            metrics, written = evaluate_self_correction(run, sources, tokens, scorer, scorer_revision, **how)
            print('\n' + '\n'.join(f'-> {out}' for out in written[:show]))
            done('self_correction', metrics)
        if 'protein' in chosen:
            metrics, written = evaluate_protein(run, folder, tokens, **how)
            print('\n' + '\n'.join(f'-> {out}' for out in written[:show]))
            done('protein', metrics)
        if 'image' in chosen:
            metrics, shown = evaluate_image(run, folder, sources, tokens, raw, groups, **how)
            name = done('image', metrics)
            np.savez(os.path.join(out_dir, name.replace('image', 'images', 1) + '.npz'), **shown)
        if 'importance' in chosen:
            done('importance', evaluate_importance(run, folder, tokens, raw, draws, seed, sample_batch))
        if 'infill' in chosen:
            done('infill', evaluate_infill(run, sources, tokens, raw, infill_share, **how)[0])


if __name__ == '__main__':
    main()
