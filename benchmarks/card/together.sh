export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=WORK/ind
S=$SECONDS; LIMIT=${1:-285}; mkdir -p WORK/small; ls .gpu WORK/in WORK/d2data
( OMP_NUM_THREADS=3 WRITE=60 bash CARD/m/run.sh WORK/mout $LIMIT > WORK/small/m.log 2>&1; cp WORK/mout/*.tar $OUT/; cp WORK/mout/write* WORK/mout/*.log WORK/small/; echo "m: $((SECONDS-S)) s" ) & M=$!
( for i in $(seq 60); do [ -e WORK/d2data/captions/meta.json ] && break; sleep 1; done
  OMP_NUM_THREADS=2 timeout -s TERM -k 10 170 python3 train.py config/captions.py --mode=causal --init_from=CARD/dec_export --dataset=WORK/d2data/captions \
    --out_dir=WORK/dec --device=cuda --compile=false --learning_rate=4e-4 --warmup_iters=20 --max_iters=950 --length_schedule= --ema_decay=0.99 --eval_interval=475 > WORK/small/dec.log 2>&1
  echo "decoder: rc $? $((SECONDS-S)) s"
  python3 -m runs.export --out_dir=WORK/dec --to=WORK/dec_export --license=mit --hardware="one H100" --weights_dtype=float16 2>&1 | tail -1
  tar cf - -C /tmp dec_export | split -b 15M - $OUT/dec. ) & C=$!
( for i in $(seq 60); do [ -e WORK/d2data/captions/meta.json ] && [ -e WORK/d2data/quickstart/meta.json ] && break; sleep 1; done; sleep 3
  cp -r WORK/in/d2 CARD/; cp -r WORK/in/d CARD/; bash CARD/d2/all.sh WORK/small 200 10 > WORK/small/d2.log 2>&1; echo "d2: $((SECONDS-S)) s" ) & D=$!
while kill -0 $M 2>/dev/null || kill -0 $C 2>/dev/null || kill -0 $D 2>/dev/null; do
  sleep 15; tar cJf $OUT/small.tar.xz -C /tmp small; echo "$((SECONDS-S)) $(tail -c 130 WORK/small/dec.log | tr '\r' '\n' | tail -1) | $(nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader)"; done
cp -r WORK/mout/*.log WORK/small/ 2>/dev/null; tar cJf $OUT/small.tar.xz -C /tmp small; tail -25 WORK/small/molecules.log; tail -3 WORK/small/d2.log; ls -la $OUT
