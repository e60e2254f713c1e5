""" Overlay: text from latents by an autoregressive decoder, the latents' tokens a prefix: the natural rival of l2t. Sets neither data,
sizes, steps nor out_dir.

    python train.py config/quickstart.py config/ar_prefix.py --out_dir=out/ar_prefix
    python sample.py --out_dir=out/ar_prefix --text="Return a list."
    python evaluate.py --out_dir=out/ar_prefix --tasks=nelbo,l2t
"""
causal = True
mode = 'l2t'
text_clock = False
