""" A protein language model in the manner of DPLM (arXiv:2402.18567; docs/proteins.md): 512 wide,
32 layers, crops of 1,024 residues. It needs GPUs, and has not been trained.

    python prepare.py config/protein.py --input=uniref50.fasta.gz
    torchrun --standalone --nproc_per_node=8 train.py config/protein.py
    python sample.py config/protein.py --num_samples=8 --length=200 --fasta=new.fasta
    python evaluate.py config/protein.py

A step has 384 crops, 393,216 residues, on any number of GPUs that divides it.

Variants:
    latents with the residues        prepare with --encoder=esm2 --max_tokens=1022, train with
    (from an ESM-2 embedding)      --seq_len=None --streams=text,latent --mode=unconditional+l2t+t2l
    flow matching                    train with --text_loss_weight=uniform, sample with
                                     --sampler=dfm
    RDM's loss                       train with --text_loss_weight=rdm
"""
# data: a letter is a residue; sequences are stored whole and cropped at random while training
out = 'data/protein'
dataset = 'protein'
tokenizer = 'esm'
max_tokens = 16384
seq_len = 1024
predict_length = False
# run
out_dir = 'out/protein'
mode = 'unconditional'
streams = ('text',)
# model
depth = 32
width = 512
heads = 16
text_clock = False
# optimisation
learning_rate = 4e-4
batch_size = 8
global_batch = 384
max_iters = 100_000
warmup_iters = 10_000
ema_decay = 0.9999
betas = (0.9, 0.98)
weight_decay = 0.01
compile = True
# sampling and evaluation
sampler = 'confidence'
steps = 500
tasks = 'nelbo,protein'
