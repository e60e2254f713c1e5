""" Masked text diffusion on OpenWebText at MDLM's size (arXiv:2406.07524), text alone. It needs
GPUs, and has not been run. The second torchrun line is the same with ATAT (docs/adaptive.md).

    python prepare.py config/openwebtext.py
    torchrun --standalone --nproc_per_node=8 train.py config/openwebtext.py
    torchrun --standalone --nproc_per_node=8 train.py config/openwebtext.py config/atat.py \
        --out_dir=out/openwebtext_atat
    python evaluate.py config/openwebtext.py --tasks=nelbo,importance
"""
# data
dataset = 'openwebtext'
out = 'data/openwebtext'
hub_dataset = 'openwebtext'
tokenizer = 'r50k_base'
max_tokens = 1023
# run
out_dir = 'out/openwebtext'
mode = 'unconditional'
streams = ('text',)
# model
depth = 12
width = 768
heads = 12
text_clock = False
# optimisation: 524,288 tokens a step on 8 GPUs
learning_rate = 3e-4
betas = (0.9, 0.999)
weight_decay = 0.0
min_lr = 1.0
batch_size = 64
max_iters = 500_000
warmup_iters = 2500
ema_decay = 0.9999
compile = True
eval_interval = 2500
log_interval = 100
# sampling and evaluation
sampler = 'cached'
steps = 128
