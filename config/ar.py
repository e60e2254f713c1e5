""" An overlay: an autoregressive decoder of the same blocks, for text alone. The config before it
sets data, sizes and steps.

    python train.py config/quickstart.py config/ar.py --out_dir=out/ar
    python sample.py --out_dir=out/ar --num_samples=4
    python sample.py --out_dir=out/ar --mode=infill --text="Return the [MASK:*]"    # continues it
    python evaluate.py --out_dir=out/ar --tasks=nelbo,text
"""
streams = ('text',)
mode = 'causal'
causal_weight = 1.0
text_clock = False
