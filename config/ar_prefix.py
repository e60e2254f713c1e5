""" Overlay: text from latents by an autoregressive decoder, which reads the latents' tokens as a
prefix. It is what to compare l2t with. It sets neither data, sizes, steps nor out_dir.

    python train.py config/quickstart.py config/ar_prefix.py --out_dir=out/ar_prefix
    python sample.py --out_dir=out/ar_prefix --text="Return a list."
    python evaluate.py --out_dir=out/ar_prefix --tasks=nelbo,l2t
"""
mode = 'causal'
causal_weight = 1.0
text_clock = False
