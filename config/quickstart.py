""" The tour on a CPU: write the sentences of Python's documentation from their embeddings. Nothing
is downloaded: the corpus is the interpreter's own documentation, and the encoder (lsa) is fitted
on it.

    make quickstart       or:
    python prepare.py config/quickstart.py
    python train.py config/quickstart.py
    python sample.py config/quickstart.py --num_samples=3 \
        --text="Return the number of items in the list."
    python evaluate.py config/quickstart.py

2 CPU cores, 2 1/2 minutes of training; seed 0, commit 6439fec: 4.08 nats per token, 6.20 with a
shuffled latent. (That was with 256 dimensions of words alone: encoder_dims=256, encoder_ngrams=1.)
"""
# data
dataset = 'quickstart'
input = 'builtin'
out = 'data/quickstart'
encoder = 'lsa'
encoder_dims = 512
encoder_ngrams = 2
vocab_size = 2048
max_tokens = 31
val_fraction = .03
# run
out_dir = 'out/quickstart'
mode = 'l2t+causal'
causal_weight = 2.0
t_min = 0.1
# model
depth = 4
width = 128
heads = 4
latent_tokens = 8
text_clock = False
# optimisation
optimizer = 'muon'
learning_rate = 4e-3
batch_size = 64
max_iters = 2200
warmup_iters = 50
ema_decay = 0.99
dropout = 0.05
log_interval = 10
eval_interval = 200
eval_iters = 10
save_interval = 800
# sampling and evaluation: the nearest of 8 drafts
rerank = 8
n = 300
