""" Overlay: every direction from one checkpoint. Each row of a batch draws its mode. It sets
neither data, sizes, steps nor out_dir. It sets the weight decay: over another config than
quickstart or multi30k_l2t give `--weight_decay=` again.

    python train.py config/quickstart.py config/mixed.py --out_dir=out/mixed
    python sample.py --out_dir=out/mixed --mode=t2l --text="Return a list."
    python evaluate.py --out_dir=out/mixed --tasks=nelbo,l2t,t2l,unconditional,infill

Other modes of sample.py: l2t, unconditional, infill, t2l2t, text, latent.
"""
mode = 'unconditional+l2t+t2l+causal'
length_schedule = ''               # texts that are cut teach no latents
weight_decay = 0.1                 # quickstart's 1 was not better here: LOG.md
