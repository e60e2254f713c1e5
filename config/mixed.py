""" Overlay: every direction from one checkpoint. Each row of a batch draws its mode. It sets
neither data, sizes, steps nor out_dir.

    python train.py config/quickstart.py config/mixed.py --out_dir=out/mixed
    python sample.py --out_dir=out/mixed --mode=t2l --text="Return a list."
    python evaluate.py --out_dir=out/mixed --tasks=nelbo,l2t,t2l,unconditional,infill

Other modes of sample.py: l2t, unconditional, infill, t2l2t, text, latent.
"""
mode = 'unconditional+l2t+t2l+causal'
length_schedule = ''               # latents are learned from whole texts
weight_decay = 0.1                 # each mode has few rows: quickstart's 1 is too much
