#!/bin/sh
# Every figure of README.md, anew, from the commit that is checked out. What was stopped goes on.
#
#     sh results/release.sh quickstart     three seeds, about 15 minutes each on 2 cores
#     sh results/release.sh captions       two seeds and a decoder, 2 to 3 hours each on a core
#     sh results/release.sh weights        weights/captions, from the captions of seed 0
#
# RAW: the folder of Multi30k's train.*.en.gz and val.*.en.gz (docs/results.md). MINILM: a folder of
# all-MiniLM-L6-v2, or minilm, which is fetched from the hub. SEEDS: of the captions. TRAIN, EVAL:
# more arguments of all trainings and evaluations, for a rehearsal of minutes:
#
#     TRAIN=--max_iters=20 EVAL="--n=8 --draws=1" sh results/release.sh quickstart
set -e
PY=${PY:-python}
MINILM=${MINILM:-minilm}
FOLDER=; [ "$MINILM" = minilm ] || FOLDER=--encoder_folder=$MINILM

# results.json of a run as results/NAME.json, without paths of this machine
keep() {
    $PY - "$1" "$2" << 'END'
import json, sys
from pathlib import Path
from runs.checkpoint import find_checkpoint
from runs.export import results_of
out, name = sys.argv[1:]
found = results_of(Path(out) / 'results.json', find_checkpoint(out))
Path(f'results/{name}.json').write_text(json.dumps(found, indent=1) + '\n')
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

# what is written from the embeddings of 1,000 random captions, one network's ways and their cost
writing() {
    write="$PY evaluate.py config/captions.py --out_dir=$1 --tasks=l2t $FOLDER"
    $write --sweep="sampler=autoregressive; rerank=1,24" $EVAL
    $write --n=200 --sweep="sampler=autoregressive; rerank=24,150" $EVAL
    if [ "$2" = both ]; then
        $write --sweep="sampler=confidence; rerank=1" $EVAL
        $write --n=200 --sweep="sampler=confidence; rerank=24" $EVAL
    fi
}

captions() {
    $PY prepare.py config/captions.py --encoder="$MINILM" --input="$RAW/train.*.en.gz" \
        --val_input="$RAW/val.*.en.gz"
    for seed in ${SEEDS:-0 1}; do
        out=out/captions_seed$seed
        evaluate="$PY evaluate.py config/captions.py --out_dir=$out $FOLDER"
        $PY train.py config/captions.py --seed=$seed --out_dir=$out $TRAIN
        $evaluate --tasks=nelbo,l2t,t2l,infill,edit $EVAL
        $evaluate --tasks=unconditional --n=200 $EVAL
        if [ $seed = 0 ]; then
            writing $out both
            $evaluate --tasks=edit --sweep="strength=.02,.05,.1,.2,.4" $EVAL
        fi
        keep $out captions_seed$seed
    done
    out=out/captions_decoder
    $PY train.py config/captions.py --mode=causal --out_dir=$out $TRAIN
    $PY evaluate.py config/captions.py --out_dir=$out --tasks=nelbo,l2t $FOLDER $EVAL
    writing $out decoder
    keep $out captions_decoder
}

# the export, and ten embeddings of validation captions, drawn by lot
weights() {
    ls out/captions_seed0/best                   # nothing goes before its successor is there
    rm -r weights/captions
    $PY -m runs.export --out_dir=out/captions_seed0 --to=weights/captions --weights_dtype=float16 \
        --license=other --hardware="${HARDWARE:-a CPU core}" --data="Multi30k's English captions \
(task 2, Flickr30k's images); captions and weights are for research use"
    $PY - << 'END'
import numpy as np
from data import PackedDataset
from tasks.common import chosen_rows
val = PackedDataset('data/multi30k', 'val')
rows = chosen_rows(len(val), 10, 'random', seed=0)
np.save('weights/captions/ten.npy', val.raw_latents(rows)[:, 0].numpy())
with open('weights/captions/ten.txt', 'w') as f:
    f.writelines(f'{val.text(int(row))}\n' for row in rows)
END
}

"$1"
