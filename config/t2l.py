""" An overlay: an embedding from text. The config before it sets data, sizes and steps.

    python train.py config/quickstart.py config/t2l.py --out_dir=out/t2l
    python sample.py --out_dir=out/t2l --text="Return a list."
    python evaluate.py --out_dir=out/t2l --tasks=nelbo,t2l
"""
mode = 't2l'
length_schedule = ''               # texts that are cut teach no latents
