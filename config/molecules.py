""" Molecules in every direction: SMILES from a fingerprint, also where some of its bits are wrong,
a fingerprint from SMILES, both from noise, and gaps filled. The texts are MOSES's (MIT), in a form
that RDKit writes (pip install rdkit; docs/molecules.md). 80 minutes on a CPU core, compiled.

    python prepare.py config/molecules.py --input=train.txt --val_input=val.txt
    python train.py config/molecules.py --compile=true
    python sample.py config/molecules.py --text="CC(=O)Nc1ccc(O)cc1" --rerank=8
    python evaluate.py config/molecules.py --damage=flips:.05
"""
# data
dataset = 'molecules'
out = 'data/molecules'
tokenizer = 'smiles'
encoder = 'morgan'
max_tokens = 55
# run
out_dir = 'out/molecules'
# first nearly all rows are read from left to right, which teaches the language soonest
mode = 'l2t+7*causal:35%,unconditional+4*l2t+t2l+2*causal'
causal_weight = 1.5
length_schedule = '40:70%,all'
t_min = 0.1
# model
depth = 4
width = 192
heads = 6
latent_width = 64
latent_tokens = 4
text_clock = False
# optimisation
optimizer = 'muon'
learning_rate = 3e-3
weight_decay = 0.1
batch_size = 64
max_iters = 5000
warmup_iters = 100
eval_interval = 1000
# evaluation
tasks = 'nelbo,molecule'
