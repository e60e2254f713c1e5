#!/usr/bin/env bash
# The day of a card in 12 minutes, the most important first. Each part has a limit in seconds, and
# the next one begins whatever became of it. What failed is said at the end: exit code 1.
#
#     bash benchmarks/gpu.sh                      # all parts, or some: gpu.sh tests rows
#     DEVICE=cpu bash benchmarks/gpu.sh           # a rehearsal on a CPU, tiny
#
# DATA: what prepare.py config/captions.py has made. MINILM: the folder of MiniLM; set it if the
# folder has moved since prepare.py. PYTHON: the interpreter. The logs are in $OUT/out/gpu. The
# parts evaluate and figures are of the run that captions has just trained.
LOGS=$(realpath -m "${OUT:-$(dirname "$0")/..}")/out/gpu
cd "$(dirname "$0")/.." || exit 2
export PYTHON=${PYTHON:-python} DEVICE=${DEVICE:-cuda} DATA=${DATA:-data/multi30k}
export WORK=$(mktemp -d) HF_HUB_OFFLINE=1 NANOLDLM_NEEDS_CUDA=1
export TINY= BENCH='--rounds=3 --batch_sizes=1,64,512' EVALUATE= LEFT_OUT=nothing SUITE=tests
ALL='tests rows captions evaluate figures samplers resume fsdp suite'
PARTS=" ${*:-$ALL} " FAILED= TIMES=1
for name in $PARTS; do
    [[ " $ALL " = *" $name "* ]] || { echo "gpu.sh: no part $name; there are $ALL" >&2; exit 2; }
done
if [ "$DEVICE" = cpu ]; then
    export TINY='--depth=2 --width=32 --heads=2 --latent_width=32 --compile=false'
    export BENCH='--rounds=1 --batch_sizes=1,2 --threads=1' OMP_NUM_THREADS=1 NANOLDLM_NEEDS_CUDA=
    export EVALUATE='--n=4 --draws=1 --tasks=nelbo,t2l' LEFT_OUT=compiled
    export SUITE=tests/test_house.py
    TIMES=5                                            # as long, on a machine that is shared
fi
mkdir -p "$LOGS" && trap 'rm -rf "$WORK"' EXIT
trap 'kill $JOB; exit 130' INT TERM                    # the part that runs ends, too

# part NAME LIMIT SHOWN: runs the function NAME, for LIMIT seconds at most, and fewer where the 12
# minutes are nearly over. SHOWN: a pattern of the lines of its log that a person reads
part() {
    [[ $PARTS = *" $1 "* ]] || return
    local began=$SECONDS log=$LOGS/$1.log limit=$(($2 * TIMES)) left=$((720 * TIMES - SECONDS)) code
    [ $left -lt $limit ] && limit=$left
    [ $limit -lt 10 ] && echo "---- $1: not run: no time left" && FAILED="$FAILED $1" && return
    timeout -k 20 $limit bash -c "$1" > "$log" 2>&1 &
    JOB=$!
    wait $JOB
    code=$?
    echo "---- $1: $((SECONDS - began)) s"
    grep -E "$3" "$log" | cut -c -160
    [ $code = 0 ] && return
    FAILED="$FAILED $1"
    # timeout ends with 124, or with 137 where it had to kill
    [[ $code =~ ^(124|137)$ ]] && echo "FAILED: over its limit of $limit s, or killed" && return
    echo "FAILED: $( (grep '^error' "$log" || grep 'Error: ' "$log" || grep . "$log") | tail -n 1)"
}

tests() { $PYTHON -m pytest -q -rfE tests/test_cuda.py -k "not $LEFT_OUT"; }
rows() { $PYTHON bench.py --what=gpu --device=$DEVICE $BENCH; }
captions() {
    $PYTHON train.py config/captions.py --dataset=$DATA --out_dir=$WORK/captions \
        --device=$DEVICE ${TINY:+$TINY --batch_size=8 --max_iters=9}
}
evaluate() {
    local it="$PYTHON evaluate.py config/captions.py --out_dir=$WORK/captions --dataset=$DATA"
    it="$it --show=0 --device=$DEVICE ${MINILM:+--encoder=$MINILM} $EVALUATE"
    $it && return
    echo '= it failed; what needs no encoder:'
    $it --tasks=nelbo,t2l
    return 1
}
figures() {
    $PYTHON - << END
from runs.results import find, read_results
found = False
ours, theirs = map(read_results, ('$WORK/captions/results.json', 'weights/captions/results.json'))
for name in ('nelbo nats_per_token', 'nelbo causal_nats_per_token', 'l2t bleu', 'l2t f1',
             't2l centred_cosine', 'infill token_accuracy', 'edit exact'):
    pair = [find(records, *name.split()) for records in (ours, theirs)]
    if all(pair):
        print(f'= {name:<28} %8.3f of {pair[0]["n"]:>4}, weights/captions %8.3f of {pair[1]["n"]}'
              % tuple(record['value'] for record in pair))
        found = True
assert found, 'no figure that both have'
END
}
samplers() { $PYTHON bench.py --what=samplers --shape=captions --device=$DEVICE $BENCH; }

# 40 steps in the folder $1, by the launcher $2; $3 is one more argument
forty() {
    [ -e $WORK/random ] || $PYTHON -c "from benchmarks.random_data import *
write_dataset('$WORK/random', 300, 32, 12)"
    exec $2 train.py config/quickstart.py --dataset=$WORK/random --out_dir=$WORK/$1 \
        --device=$DEVICE --max_iters=40 --log_interval=1 --eval_interval=20 --batch_size=8 \
        --global_batch=16 --length_schedule= --optimizer=adamw --dropout=0 --dtype=float32 $TINY $3
}
# by how much the logs of two such runs differ
differ() {
    $PYTHON - << END
import json
from benchmarks.agreement import TOLERANCE, difference, numbers_in
logs = [map(json.loads, open(f'$WORK/{name}/training_log.jsonl')) for name in ('$1', '$2')]
found, where = difference(*map(numbers_in, logs))
print(f'= $1 and $2 differ by {found:.1e} at most, in {where}')
assert found < TOLERANCE['float32'], 'more than rounding'
END
}
resume() {
    (forty unbroken $PYTHON)
    forty killed $PYTHON &
    while kill -0 $! && [ ! -e $WORK/killed/step-00000020 ]; do sleep .01; done
    kill -9 $!; wait $!
    [ ! -e $WORK/killed/step-00000040 ] || { echo 'error: it ended before the kill'; return 1; }
    (forty killed $PYTHON) && differ unbroken killed || return
    # the log of a run that has begun anew has its first step twice
    [ "$(grep -c '"step": 1,' $WORK/killed/training_log.jsonl)" = 1 ] ||
        { echo 'error: the killed run began anew'; return 1; }
}
fsdp() {
    if [ "$($PYTHON -c 'import torch; print(torch.cuda.device_count())')" = 1 ]; then
        echo '= train.py shares nothing out over one card; test_cuda.py shards over one process'
        return
    fi
    [ -e $WORK/unbroken ] || (forty unbroken $PYTHON)
    (forty sharded "$PYTHON -m torch.distributed.run --standalone --nproc_per_node=2" \
        --parallel=fsdp) && differ unbroken sharded
}
suite() { NANOLDLM_NEEDS_CUDA= OMP_NUM_THREADS=1 $PYTHON -m pytest -q -n $(nproc) -rfE $SUITE; }
export -f tests rows captions evaluate figures samplers forty differ resume fsdp suite

$PYTHON - << 'END'
import os, sys, torch
from runs.run_folder import git_commit
card = torch.cuda.get_device_name() if torch.cuda.is_available() else 'no card'
print(f'{card}, torch {torch.__version__}, commit {git_commit()}', flush=True)
if card == 'no card' and os.environ['DEVICE'] != 'cpu':
    sys.exit('error: torch finds no card; DEVICE=cpu rehearses without one')
END
[ $? = 0 ] || exit 2
part tests 120 '^(FAILED|ERROR)|passed|failed'
part rows 220 '^(config|l2t|captions|quickstart|against)| of step|FAILED'
if [ -e "$DATA/meta.json" ]; then
    part captions 220 '\| val_|^step +5,000/|steps in'
    part evaluate 110 '^(= |error|in short|diffusion|left to|text from|embedding|gaps|a word|both)'
    part figures 20 '^= '
else
    echo "---- captions, evaluate, figures: skipped, as there is no $DATA/meta.json"
fi
part samplers 60 'ms a text'
part resume 60 '^= '
part fsdp 40 '^= '
part suite 720 '^(FAILED|ERROR)|passed|failed'
echo "---- ${FAILED:+FAILED:$FAILED; }$SECONDS s, logs in $LOGS"
[ -z "$FAILED" ]
