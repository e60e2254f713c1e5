""" l2t at a large size: width 1024, 24 blocks, Qwen3 embeddings cut to 32 dimensions. It has 727M
parameters, since its blocks share their modulation. It needs GPUs (docs/cluster.md), and has not
been run to its end. docs/reproduction.md says what to expect.

    python prepare.py config/l2t_892m.py --input="openwebtext/*.jsonl.gz"
    torchrun --standalone --nproc_per_node=8 train.py config/l2t_892m.py    # or 1
"""
# data
dataset = 'openwebtext_qwen32'
out = 'data/openwebtext_qwen32'
input = 'openwebtext'
tokenizer = 'r50k_base'
encoder = 'qwen'
encoder_dims = 32
max_tokens = 1015                        # with its EOS and 8 latent tokens 1,024: whole tiles
threads = 8
# run
out_dir = 'out/l2t_892m'
# at first 1/8 of the rows is masked and the others are read from left to right, later half and
# half: this was best for captions (docs/both_ways.md)
mode = 'l2t+7*causal:40%,l2t+causal'
causal_weight = 1.5
t_min = 0.1
# model
depth = 24
width = 1024
heads = 16
latent_width = 1024
latent_tokens = 8
# optimisation
optimizer = 'muon'
learning_rate = 6e-4
batch_size = 16
global_batch = 512
max_iters = 100_000
warmup_iters = 2000
ema_decay = 0.9999
compile = True
eval_interval = 2000
log_interval = 100
