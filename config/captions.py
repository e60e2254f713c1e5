""" One network for captions in every direction: a text from its MiniLM embedding, an embedding from
a text, both from noise, and gaps filled. It writes by diffusion and from left to right. The texts
are Multi30k's, five English captions for each image (github multi30k/dataset, task 2 raw, for
research use).

    python prepare.py config/captions.py --input="RAW/train.*.en.gz" --val_input="RAW/val.*.en.gz"
    python train.py config/captions.py
    python evaluate.py config/captions.py
"""
# data
dataset = 'multi30k'
out = 'data/multi30k'
encoder = 'minilm'
vocab_size = 4096
max_tokens = 39
threads = 2
# run
out_dir = 'out/captions'
# first nearly all rows are read from left to right, which teaches the language soonest
mode = 'l2t+7*causal:35%,unconditional+2*l2t+t2l+4*causal'
causal_weight = 1.5
t_min = 0.1
# model
depth = 8
width = 256
heads = 4
latent_width = 128
latent_tokens = 8
text_clock = False
# optimisation
optimizer = 'muon'
learning_rate = 3e-3
weight_decay = 0.5
batch_size = 128
max_iters = 5000
# texts are cut to 24 tokens, then whole
length_schedule = '24:81%,all'
warmup_iters = 200
eval_interval = 1000
compile = True
# evaluation
tasks = 'nelbo,l2t,t2l,infill,edit,unconditional'
draws = 8
# edit: a word becomes another of its class
classes = '''person: man, woman; child: boy, girl; number: two, three, four, five;
colour: red, blue, green, yellow, black, white, pink, brown;
place: beach, street, park, field, snow, pool, kitchen'''
