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
max_tokens = 47
val_fraction = .05
# run
out_dir = 'out/quickstart'
mode = 'l2t'
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
max_iters = 1100
warmup_iters = 50
ema_decay = 0.99
log_interval = 10
eval_interval = 200
eval_iters = 7
save_interval = 500
# evaluation
n = 300
