""" An overlay: masked text alone, as in MDLM (arXiv:2406.07524). There are no latents, and the
network reads no clock. The config before it sets data, sizes and steps.

    python train.py config/quickstart.py config/mdlm.py --out_dir=out/mdlm
    python sample.py --out_dir=out/mdlm --num_samples=4
    python evaluate.py --out_dir=out/mdlm --tasks=nelbo,text
"""
streams = ('text',)
mode = 'unconditional'
text_clock = False
