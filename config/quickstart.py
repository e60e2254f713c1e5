""" The tour on a CPU: one network writes in every direction. It writes sentences from their
embeddings, embeddings from sentences, both from noise, and fills gaps, by diffusion and from left
to right. Nothing is downloaded. The corpus is the documentation of Python and of installed
packages, and the encoder (lsa, of words and word pairs) is fitted on it.

    make quickstart       or:
    python prepare.py config/quickstart.py
    python train.py config/quickstart.py
    python sample.py --text="Return the number of items in the list."
    python evaluate.py config/quickstart.py
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
# first to write from left to right, which teaches the language soonest, then everything
mode = 'l2t+7*causal:60%,unconditional+2*l2t+t2l+4*causal'
causal_weight = 2.0
t_min = 0.1
# model
depth = 4
width = 128
heads = 4
latent_width = 64
latent_tokens = 8
latent_target = 'rest'         # few steps: x0 would draw their mean from noise
text_clock = False
# optimisation
optimizer = 'muon'
muon_iterations = 3
learning_rate = 4e-3
weight_decay = 1.0             # the corpus is small: .1 overfits (LOG.md)
batch_size = 64
max_iters = 1000
length_schedule = '24:60%,all'     # texts are cut to 24 tokens, then whole
warmup_iters = 50
ema_decay = 0.99
dropout = 0.05
log_interval = 10
eval_interval = 200
eval_rows = 640
# sampling and evaluation: the nearest of 12 drafts
tasks = 'nelbo,l2t,t2l,infill,unconditional'
rerank = 12
n = 200
