""" The main job: OpenWebText from its E5 embeddings, at a size for one 80 GB GPU. It has not been
run to its end. docs/reproduction.md says what to expect.

    python prepare.py config/l2t.py --input="openwebtext/*.jsonl.gz"
    torchrun --standalone --nproc_per_node=8 train.py config/l2t.py    # or 1: the same rows
    python evaluate.py config/l2t.py

--input is the folder of text that you have. prepare.py embeds on the GPU with --device=cuda.
"""
# data: paragraphs of web text as GPT-2 tokens, 1024-dimensional latents
dataset = 'openwebtext_e5'
out = 'data/openwebtext_e5'
input = 'openwebtext'
tokenizer = 'r50k_base'
encoder = 'e5'
max_tokens = 247                         # with its EOS and 8 latent tokens 256: whole tiles
threads = 8
# run
out_dir = 'out/l2t'
# at first 1/8 of the rows is masked and the others are read from left to right, later half and
# half: this was best for captions (docs/both_ways.md)
mode = 'l2t+7*causal:40%,l2t+causal'
causal_weight = 1.5
t_min = 0.1
# model: small, about 200M with the embedding and the head of 50,258 ids
depth = 12
width = 768
heads = 12
latent_width = 384
text_clock = False
# optimisation: 126,976 tokens a step
optimizer = 'muon'
learning_rate = 1e-3
batch_size = 128
global_batch = 512
max_iters = 100_000
warmup_iters = 1000
ema_decay = 0.9999
compile = True
eval_interval = 2000
log_interval = 100
