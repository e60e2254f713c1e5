""" The tour on a CPU: write sentences of documentation from their embeddings. Nothing is
downloaded: the corpus is the documentation of Python and of installed packages, and the encoder
(lsa, of words and word pairs) is fitted on it. A quarter of the rows is masked, the others are read
from left to right: docs/both_ways.md.

    make quickstart       or:
    python prepare.py config/quickstart.py
    python train.py config/quickstart.py
    python sample.py config/quickstart.py --text="Return the number of items in the list."
    python evaluate.py config/quickstart.py

2 CPU cores, 4 minutes of training; seed 0, commit 522da6f: BLEU 27.8 (nearest training text 24.1),
F1 78.2, cosine .930, retrieval@1 100 %; 3.25 nats per token (bound), 2.15 (left to right).
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
mode = 'l2t+3*causal'
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
weight_decay = 1.0             # the corpus is small: .1 overfits (LOG.md)
batch_size = 64
max_iters = 2200
warmup_iters = 50
ema_decay = 0.99
dropout = 0.05
log_interval = 10
eval_interval = 200
eval_iters = 10
# sampling and evaluation: the nearest of 24 drafts
rerank = 24
n = 300
