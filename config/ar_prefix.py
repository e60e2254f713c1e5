""" An overlay: an autoregressive decoder writes text from latents. It reads the latents' tokens as
a prefix. Compare l2t with it. The config before it sets data, sizes and steps.

    python train.py config/quickstart.py config/ar_prefix.py --out_dir=out/ar_prefix
    python sample.py --out_dir=out/ar_prefix --text="Return a list."
    python evaluate.py --out_dir=out/ar_prefix --tasks=nelbo,l2t
"""
mode = 'causal'
causal_weight = 1.0
text_clock = False
