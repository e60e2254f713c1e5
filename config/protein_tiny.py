""" A protein language model that a CPU can train (docs/proteins.md). It writes sequences of a given
length, and does inpainting and scaffolding. It reads and writes FASTA.

    python prepare.py config/protein_tiny.py --input=proteins.fasta
    python train.py config/protein_tiny.py
    python sample.py config/protein_tiny.py --num_samples=8 --length=120 --fasta=new.fasta
    python sample.py config/protein_tiny.py --text="MKV[MASK:40]HHHHHH" --num_samples=4
    python evaluate.py config/protein_tiny.py
"""
# data: a letter is a residue; sequences are stored whole and cropped at random while training
out = 'data/protein_tiny'
dataset = 'protein_tiny'
tokenizer = 'esm'
max_tokens = 4096
val_fraction = 0.1
seq_len = 256
predict_length = False
# run
out_dir = 'out/protein_tiny'
mode = 'unconditional'
streams = ('text',)
# model
depth = 4
width = 128
heads = 4
text_clock = False
dropout = 0.1
# optimisation
optimizer = 'muon'
learning_rate = 2e-3
batch_size = 32
max_iters = 1500
warmup_iters = 100
ema_decay = 0.99
eval_interval = 250
eval_rows = 256
# sampling and evaluation
sampler = 'ancestral'              # the likeliest sequence of so weak a model is one residue,
                                   # repeated (LOG.md)
steps = 128
tasks = 'nelbo,protein'
n = 200
