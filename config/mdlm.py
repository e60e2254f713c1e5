""" Overlay: masked text alone, as in MDLM (arXiv:2406.07524): no latents, and the network reads no
clock. It sets neither data, sizes, steps nor out_dir.

    python train.py config/quickstart.py config/mdlm.py --out_dir=out/mdlm
    python sample.py --out_dir=out/mdlm --num_samples=4
    python evaluate.py --out_dir=out/mdlm --tasks=nelbo,text
"""
streams = ('text',)
mode = 'unconditional'
text_clock = False
