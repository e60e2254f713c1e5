#!/bin/bash
# bash m/run.sh OUT_FOLDER SECONDS, from the root of the repository: trains config/molecules.py and a
# decoder alone, side by side on one card, within so many seconds, and leaves in OUT_FOLDER
# molecules.tar, decoder.tar (exports, float16) and molecules.log.
# WRITE: of these seconds, so many for what the networks write (write.jsonl.xz).
# TINY, PROBE, N: more arguments for all trainings, the steps of the probe, test molecules: for a
# test on a CPU.
begin=$(date +%s)
here=$(cd "$(dirname "$0")" && pwd)
limit=330
for word in "$@"; do
    case $word in *[!0-9]*) out=$word ;; *) limit=$word ;; esac
done
mkdir -p "$out" && out=$(cd "$out" && pwd)
work=$(mktemp -d)
python=$(command -v python || command -v python3)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
probe=${PROBE:-60}
end=$((begin + limit - ${WRITE:-110} - 8))                  # of the training
left() { echo $((end - $(date +%s))); }
say() { echo "$(($(date +%s) - begin)) s: $*"; }
{
set -e
"$python" "$here/unpack.py" "$here/packed" "$work/data"
say unpacked

declare -A mode=([molecules]= [decoder]=--mode=causal)
start() {   # name, folder, more
    $before "$python" train.py config/molecules.py ${mode[$1]} --dataset="$work/data" --out_dir="$work/$2" \
        $TINY "${@:3}" > "$work/$2.log" 2>&1
}

# how long does a step take, with the other training beside it?
for name in molecules decoder; do
    start $name probe_$name --log_interval=10 --max_iters=$probe --warmup_iters=5 --eval_interval=100000 \
        --eval_iters=1 &
done
wait
tail -n 3 "$work"/probe_*.log
say probed
declare -A steps
for name in molecules decoder; do
    steps[$name]=$("$python" "$here/steps.py" "$work/probe_$name/training_log.jsonl" $(left) $TINY)
done
say steps ${steps[@]}
rm -rf "$work"/probe_*/step-*

# whoever is not done in time is asked to save, and does
for name in molecules decoder; do
    before="timeout -s TERM $(left)" start $name $name --max_iters=${steps[$name]} \
        --eval_interval=100000 --eval_iters=4 & pids+=($!)
done
wait ${pids[@]} || true
say trained
for name in molecules decoder; do
    ( "$python" -m runs.export --out_dir="$work/$name" --to="$work/export_$name" --which=latest \
        --weights_dtype=float16 --license=mit
      cp "$work/$name/training_log.jsonl" "$work/export_$name/"
      tar -cf "$out/$name.tar" -C "$work/export_$name" . ) & exports+=($!)
done
"$python" "$here/write.py" "$work" "$out/write.jsonl.xz" $((begin + limit - 4 - $(date +%s))) ${N:-1000} || true
wait ${exports[@]} || true
say exported
} > "$out/molecules.log" 2>&1
cat "$work"/molecules.log "$work"/decoder.log >> "$out/molecules.log"
rm -rf "$work"
tail -n 60 "$out/molecules.log"; ls -la "$out"
