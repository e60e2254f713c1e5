#!/bin/sh
# Nearly every figure of README.md, anew, from the commit that is checked out. What was stopped
# goes on.
#
#     sh results/release.sh quickstart     three seeds, at most 15 minutes each on 2 cores
#     sh results/release.sh captions       all modes, and a decoder, 1 to 2 hours each on a core
#     sh results/release.sh weights        weights/captions, from the captions of seed 0
#     sh results/release.sh icons          weights/icons and results/icons.json, 2 to 6 hours on a core
#     sh results/release.sh tables         the tables of README.md and docs/results.md
#
# RAW: the folder of Multi30k's train.*.en.gz and val.*.en.gz (docs/results.md). MINILM: a folder of
# all-MiniLM-L6-v2, or minilm, which is fetched from the hub. ICONS: a clone of
# github.com/iconify/icon-sets. TRAIN, EVAL: more arguments of all trainings and evaluations, for a
# rehearsal of minutes:
#
#     TRAIN=--max_iters=20 EVAL="--n=8 --draws=1" sh results/release.sh quickstart
set -e
PY=${PY:-python}
MINILM=${MINILM:-minilm}
FOLDER=; [ "$MINILM" = minilm ] || FOLDER=--encoder=$MINILM

# results.json of a run as results/NAME.json, without paths of this machine; of its best checkpoint,
# or the latest
keep() {
    $PY - "$1" "$2" "${3:-best}" << 'END'
import sys
from pathlib import Path
from runs.checkpoint import find_checkpoint
from runs.export import results_of
from runs.results import write_results
out, name, which = sys.argv[1:]
write_results(f'results/{name}.json',
              results_of(Path(out) / 'results.json', find_checkpoint(out, which)))
END
}

quickstart() {
    $PY prepare.py config/quickstart.py
    for seed in 0 1 2; do
        out=out/quickstart_seed$seed
        $PY train.py config/quickstart.py --seed=$seed --out_dir=$out $TRAIN
        $PY evaluate.py config/quickstart.py --out_dir=$out --n=1000 $EVAL   # all there are
        keep $out quickstart_seed$seed
    done
}

captions() {
    $PY prepare.py config/captions.py --encoder="$MINILM" --input="$RAW/train.*.en.gz" \
        --val_input="$RAW/val.*.en.gz"
    out=out/captions_seed0
    evaluate="$PY evaluate.py config/captions.py --out_dir=$out $FOLDER"
    $PY train.py config/captions.py --out_dir=$out $TRAIN
    $evaluate --tasks=nelbo,l2t,t2l,infill,edit $EVAL
    $evaluate --tasks=unconditional --n=200 $EVAL
    write="$evaluate --tasks=l2t"
    $write --sweep="sampler=autoregressive; rerank=1" $EVAL
    $write --sweep="sampler=autoregressive; beams=1; rerank=4,8,12,24" $EVAL
    $write --sweep="sampler=autoregressive; beams=4,8" $EVAL
    $write --sweep="sampler=autoregressive; beams=4; rerank=4,8,12" $EVAL
    $write --sweep="sampler=confidence; threshold=1.,.9,.8,.7,.6,.5,.4" $EVAL
    $evaluate --tasks=edit --sweep="strength=.02,.05,.1,.2,.4" $EVAL
    keep $out captions_seed0
    out=out/captions_decoder
    $PY train.py config/captions.py --mode=causal --out_dir=$out $TRAIN
    evaluate="$PY evaluate.py config/captions.py --out_dir=$out $FOLDER"
    $evaluate --tasks=nelbo,l2t $EVAL
    $evaluate --tasks=l2t --sweep="sampler=autoregressive; rerank=1" $EVAL
    $evaluate --tasks=l2t --sweep="sampler=autoregressive; beams=1; rerank=24" $EVAL
    keep $out captions_decoder
}

# the export, and ten embeddings of validation captions, drawn at random
weights() {
    ls out/captions_seed0/best                   # nothing goes before its successor is there
    rm -r weights/captions
    $PY -m runs.export --out_dir=out/captions_seed0 --to=weights/captions --weights_dtype=float16 \
        --license=other --hardware="${HARDWARE:-a CPU core}" --data="Multi30k's English captions \
(task 2, Flickr30k's images); captions and weights are for research use"
    $PY - << 'END'
import numpy as np
from corpora.tokenizers import load_tokenizer
from data import PackedDataset
from tasks.common import chosen_rows
val, tokenizer = PackedDataset('data/multi30k', 'val'), load_tokenizer('data/multi30k')
rows = chosen_rows(len(val), 10, 0)
np.save('weights/captions/ten.npy', val.raw_latents(rows)[:, 0].numpy())
with open('weights/captions/ten.txt', 'w') as f:
    f.writelines(f'{tokenizer.decode(val.ids(int(row)))}\n' for row in rows)
END
}

# one network of the names that 20 sets share, its figures, and the export with the sets and their
# licences
icons() {
    out=out/icons_shared
    $PY prepare.py config/icons.py --input="$ICONS/json/*.json" --shared_by=20 --vocab_size=1024 \
        --out=data/icons_shared
    $PY train.py config/icons.py --dataset=icons_shared --out_dir=$out --compile=true \
        --mode="unconditional+l2t+complete+7*t2l+2*causal" $TRAIN
    # the last one: drawings become better when the bound of names that are new no longer does
    evaluate="$PY evaluate.py config/icons.py --dataset=icons_shared --out_dir=$out --which=latest"
    $evaluate --n=600 $EVAL
    for sweep in guidance=1,1.5,2,3,4 latent_steps=1,2,4,8,16,32; do
        $evaluate --tasks=image --n=300 --sweep=$sweep $EVAL
    done
    keep $out icons latest
    rm -rf weights/icons
    $PY -m runs.export --out_dir=$out --which=latest --to=weights/icons --weights_dtype=float16 \
        --license=cc-by-4.0 --hardware="${HARDWARE:-a CPU core}" \
        --data="icons of Iconify's sets, each under its own licence: sets.md"
    $PY - "$ICONS/json" << 'END'
import json
import sys
from pathlib import Path
from corpora.icons import thing_of
from corpora.tokenizers import load_tokenizer
from data import PackedDataset
from tasks.judge import parse

# the sets of all splits, and the names of train, without words of style
sets = set()
held_out = set()
names = set()
tokenizer = load_tokenizer('data/icons_shared')
for split in ('train', 'val', 'pairs', 'sets'):
    data = PackedDataset('data/icons_shared', split)
    for i in range(len(data)):
        of_set, name = parse(tokenizer.decode(data.ids(i)))
        sets.add(of_set)
        if split == 'sets':
            held_out.add(of_set)
        if split == 'train':
            names.add(' '.join(thing_of(name)))
with open('weights/icons/names.txt', 'w') as file:
    file.writelines(f'{name}\n' for name in sorted(names))

def linked(name, of):
    return f'[{name}]({of["url"]})' if of.get('url') else name

lines = ['# The sets of the data', '',
         'Each is under its own licence. Names and licences are those that Iconify records. '
         'Logos are marks of their owners.', '',
         f'The network has not seen these sets: {", ".join(sorted(held_out - {""}))}.', '',
         '| set | name | authors | licence |', '|---|---|---|---|']
for prefix in sorted(sets - {''}):
    info = json.loads((Path(sys.argv[1]) / f'{prefix}.json').read_text())['info']
    author, licence = info['author'], info['license']
    lines.append(f'| {prefix} | {info["name"]} | {linked(author["name"], author)} '
                 f'| {linked(licence["spdx"], licence)} |')
Path('weights/icons/sets.md').write_text('\n'.join(lines) + '\n')
END
}

# from the files that `keep` has left
tables() {
    $PY - << 'END'
from runs.results import figure_text, find, read_results

# label, task, control, metric, digits, rival, what that is
ROWS = (
    ('text from embedding, BLEU', 'l2t', '', 'bleu', 1, 'nearest', 'nearest training text'),
    ('by diffusion, greedy, BLEU', 'l2t', 'diffusion', 'bleu', 1, '', ''),
    ('from left to right, greedy, BLEU', 'l2t', 'left_to_right', 'bleu', 1, '', ''),
    ('text, F1 of sets of words, %', 'l2t', '', 'f1', 1, 'nearest', 'nearest training text'),
    ('embedding from text, centred cosine', 't2l', '', 'centred_cosine', 3, 'ridge',
     'ridge regression'),
    ('half of the tokens filled in, % right', 'infill', '', 'token_accuracy', 1, 'left_to_right',
     '8 beams'),
    ('one word changed, all others kept, {n} captions, %', 'edit', '', 'exact', 1,
     'left_to_right', '8 beams'),
    ('both from noise, {n} samples, cosine', 'unconditional', '', 'coherence', 3, 'text_first',
     'a text, then its embedding'),
    ('bound of diffusion, nats per token', 'nelbo', '', 'nats_per_token', 3, '', ''),
    ('from left to right, exact nats per token', 'nelbo', '', 'causal_nats_per_token', 3, '', ''),
)

# who writes, its file, and the knobs of the sweep
GREEDY = dict(sampler='autoregressive', rerank=1)
DRAFTS = dict(sampler='autoregressive', beams=1, rerank=24)
WAYS = (
    ('diffusion, greedy', 'captions_seed0', dict(sampler='confidence', threshold=1.0)),
    ('from left to right, greedy', 'captions_seed0', GREEDY),
    ('4 beams', 'captions_seed0', dict(sampler='autoregressive', beams=4)),
    ('4 beams, nearest of 4', 'captions_seed0', dict(sampler='autoregressive', beams=4, rerank=4)),
    ('4 beams, nearest of 8', 'captions_seed0', dict(sampler='autoregressive', beams=4, rerank=8)),
    ('from left to right, nearest of 24', 'captions_seed0', DRAFTS),
    ('a decoder alone, greedy', 'captions_decoder', GREEDY),
    ('a decoder alone, nearest of 24', 'captions_decoder', DRAFTS),
)

# of the icons: figures, and what stands beside them
ICONS = (
    ('shared_named shared_frechet shared_precision shared_coverage shared_variety shared_nearest '
     'val_words val_frechet val_precision val_coverage val_nearest',
     ',real,ridge,mean,copy,shuffled,null'),
    ('pairs_named pairs_style pairs_distance', ',real,ridge,copy,near_set,lead,shuffled,null'),
    ('val_f1 val_any pairs_f1 pairs_any sets_f1 sets_any', ',nearest,lead,diffusion,shuffled'),
    ('both_named both_words both_style', ',text_first,shuffled'),
    ('half_named half_words half_style half_distance', ',real,ridge,nearest,alone,lead'),
)


def cell(record, digits=1):
    """ '48.1 ± 1.0', or '' where it was not measured. """
    return figure_text(record['value'], record['se'], digits) if record else ''


def directions(runs, with_controls):
    for label, task, control, metric, digits, rival, its_name in ROWS:
        first = find(runs[0], task, metric, control)
        if first is None or with_controls and control:
            continue
        cells = [cell(find(run, task, metric, control), digits) for run in runs]
        # samples from noise are not paired with those of their rival: they have no lead
        leads = [cell(find(run, task, metric, 'lead'), digits) for run in runs if rival]
        against = f'{its_name}: {"; ".join(leads)}' if any(leads) else ''
        if with_controls:
            cells += [cell(find(runs[0], task, metric, kind), digits)
                      for kind in ('shuffled', 'null')]
            value = cell(find(runs[0], task, metric, rival or 'none'), digits)
            leads = ', '.join(lead for lead in leads if lead)
            against = f'{value} {its_name}' if value else ''
            against += f'; lead {leads}' if leads else ''
        print('|', ' | '.join([label.format(n=first['n']), *cells, against]), '|')


results = {name: read_results(f'results/{name}.json')
           for name in ('quickstart_seed0', 'quickstart_seed1', 'quickstart_seed2',
                        'captions_seed0', 'captions_decoder')}
print('captions')
directions([results['captions_seed0']], True)

print('\nicons')
icons = read_results('results/icons.json')
for metrics, controls in ICONS:
    print('|  |', ' | '.join(control or 'ours' for control in controls.split(',')), '|')
    for metric in metrics.split():
        cells = [cell(find(icons, 'image', metric, control)) for control in controls.split(',')]
        print('|', ' | '.join([metric, *cells]), '|')

print('\nwriting captions')
for label, name, point in WAYS:
    found = [find(results[name], 'l2t', metric, point=point) for metric in ('bleu', 'f1', 'exact')]
    ms = find(results[name], 'l2t', 'ms', point=point)
    if ms:
        rerank = point.get('rerank', 1)
        n_embedded = rerank if rerank > 1 else 0
        print('|', ' | '.join([label, str(n_embedded), f'{ms["value"]:.0f}',
                               *map(cell, found)]), '|')

print('\nquickstart, three seeds, and their leads')
directions([results[f'quickstart_seed{seed}'] for seed in range(3)], False)
END
}

"$1"
