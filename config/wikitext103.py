""" Masked text diffusion on WikiText-103 at MDLM's size (arXiv:2406.07524), text alone. It needs
GPUs, and has not been run. The second torchrun line is the same with ATAT (docs/adaptive.md). The
last training line shows whether it runs at all.

    python prepare.py config/wikitext103.py
    torchrun --standalone --nproc_per_node=8 train.py config/wikitext103.py
    torchrun --standalone --nproc_per_node=8 train.py config/wikitext103.py config/atat.py \
        --out_dir=out/wikitext103_atat
    python train.py config/wikitext103.py --max_iters=100
    python evaluate.py config/wikitext103.py --tasks=nelbo,importance

Its figures are not comparable with MDLM's. A record of the hub is a line or an article. Here a
short one is filled with PAD, and MDLM packs several into a row.
"""
# data
dataset = 'wikitext103'
out = 'data/wikitext103'
hub_dataset = 'wikitext-103'
tokenizer = 'r50k_base'
max_tokens = 511
# run
out_dir = 'out/wikitext103'
mode = 'unconditional'
streams = ('text',)
# model
depth = 12
width = 768
heads = 12
text_clock = False
# optimisation: 262,144 tokens a step on 8 GPUs
learning_rate = 3e-4
betas = (0.9, 0.999)
weight_decay = 0.0
min_lr = 1.0
batch_size = 64
max_iters = 50_000
warmup_iters = 2500
ema_decay = 0.9999
compile = True
eval_interval = 2500
log_interval = 100
# sampling and evaluation
sampler = 'cached'
steps = 128
