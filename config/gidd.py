""" An overlay: GIDD+ (arXiv:2503.04482, processes/gidd.py), for text alone. The noise is MASK and
other tokens, so a written token can be corrected. The config before it sets data, sizes and steps.

    python train.py config/quickstart.py config/gidd.py --out_dir=out/gidd
    python sample.py --out_dir=out/gidd --num_samples=4 --self_correct=32
    python evaluate.py --out_dir=out/gidd --tasks=nelbo,text --self_correct=32
"""
text_process = 'gidd'
gidd_uniform = 0.1
text_loss_weight = 'dynamic'
streams = ('text',)
mode = 'unconditional'
