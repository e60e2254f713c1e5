"""
How much a network reads from one embedding, over the length of the text.

    python -m benchmarks.lengths --runs=weights/captions,out/quickstart --encoder_folder=MINILM \
        --save=results/lengths.json --picture=results/lengths.png

Of texts drawn by lot from the validation split, and the first ones of the file `texts`, in groups
by tokens (of the run's own vocabulary, with the EOS where it is predicted):

    read      -log p(x) - (-log p(x | z)), nats a text, both exact, from left to right. -log p(x) is
              that of the same network with noise at clock 1: where it is poor, `read` is too large
    unread    -log p(x | z), nats a text
    exact     % of the texts that come back word for word, as the nearest of `rerank` drafts
"""
import json

from benchmarks.pictures import pyplot
from configurator import configure, stop_on_error
from runs.files import write_text
from runs.manifest import dataset_folder
from sampling.likelihood import nats_per_token, what_is_scored
from sampling.loading import load_run
from tasks.common import compare, enter, load_file, load_texts, write_from

runs = 'weights/captions,out/quickstart'   # <run folders>, with commas between them
encoder_folder = ''            # <a folder>: of the encoder of the first run; '': from the hub
datasets = ''                  # <dataset folders>, as many as runs; '': the runs' own
texts = ''                     # a file of other texts, which the first run also reads
n = 1000                       # [2, 1e6]: texts of each run
size = 4                       # [1, 1e4]: how many lengths make a group
least = 20                     # [2, 1e6]: texts; a smaller group is left out
rerank = 24                    # [1, 1e6]
seed = 0                       # [0, 2**63)
save = ''                      # a .json for the figures
picture = ''                   # a .png


def measured(run, sources, tokens, raw):
    """ {name: values (n,)} of texts (n,), tokens (n, L) and their raw latents (n, N, D). The values
    of `tokens` are the lengths, with the EOS. """
    _, n_real = what_is_scored(run, tokens)
    unread = nats_per_token(run, tokens, run.stats.standardise(raw)) * n_real
    read = nats_per_token(run, tokens) * n_real - unread
    written = write_from(run, raw, tokens, rerank=rerank, seed=seed)
    scores = compare(sources, written, raw, None)
    return dict(tokens=n_real, read=read, unread=unread, exact=scores['exact'], bleu=scores['bleu'])


def in_groups(found):
    """ One {name: mean, name_se} for each group of lengths, with its first length and its n. """
    first = (found['tokens'] // size * size).int().tolist()
    groups = []
    for low in sorted(set(first)):
        rows = [i for i, x in enumerate(first) if x == low]
        if len(rows) >= least:
            group = {'from': low, 'to': low + size - 1, 'n': len(rows)}
            enter(group, '', {name: values[rows] for name, values in found.items()})
            groups.append(group)
    return groups


def draw(results):
    """ Nats on the left, word for word on the right, over the length, with standard errors. A color
    for each source of texts. """
    figure, (nats, words) = pyplot().subplots(1, 2, figsize=(9, 3.4))
    for i, (name, groups) in enumerate(results.items()):
        def curve(axes, key, style, label):
            x, y, error = ([group[of] for group in groups] for of in ('tokens', key, f'{key}_se'))
            axes.errorbar(x, y, error, color=f'C{i}', linestyle=style, marker='.', label=label)
        curve(nats, 'read', '-', 'read from the embedding' if i == 0 else None)
        curve(nats, 'unread', '--', 'not read from it' if i == 0 else None)
        curve(words, 'exact', '-', name)
    for axes, label in ((nats, 'nats a text'), (words, '% word for word')):
        axes.set(xlabel='tokens', ylabel=label, ylim=(0, None))
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture)


def chosen():
    """ (name, run, texts, tokens, raw latents) of each curve. """
    folders, of_runs = runs.split(','), datasets.split(',')
    if datasets and len(of_runs) != len(folders):
        raise ValueError(f'datasets={datasets}: expected {len(folders)}, one for each run')
    for i, out_dir in enumerate(folders):
        run = load_run(out_dir, dtype='float32', encoder_folder='' if i else encoder_folder)
        if run.next_token is None or not run.meta['encoder']:
            raise ValueError(f'{out_dir}: expected a run that has learned mode=causal and whose '
                             'latents are an encoder\'s')
        dataset = of_runs[i] if datasets else run.config['dataset']
        encoder = run.meta['encoder']['id'].rpartition('/')[2]
        yield encoder, run, *load_texts(run, dataset_folder(dataset), n, 'random', seed)
        if texts and i == 0:
            yield f'{encoder}, other texts', run, *load_file(run, texts, 'text', n)[:3]


def main():
    results = {}
    for name, *source in chosen():
        if name in results:
            raise ValueError(f'runs={runs}: two of them read {name}; name runs of unlike encoders')
        results[name] = in_groups(measured(*source))
        print(f'{name}\ntokens          n    nats read         unread  word for word, %   BLEU')
        for group in results[name]:
            print(f'{group["from"]:3} to {group["to"]:3} {group["n"]:6,}'
                  + ''.join(f'{group[key]:9.1f} ± {group[f"{key}_se"]:.1f}'
                            for key in ('read', 'unread', 'exact', 'bleu')))
    if save:
        write_text(save, json.dumps(results, indent=1) + '\n')
    if picture:
        draw(results)


if __name__ == '__main__':
    configure(globals())
    with stop_on_error():
        main()
