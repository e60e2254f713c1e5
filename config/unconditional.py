""" An overlay: text and embedding together, from noise. The config before it sets data, sizes and
steps.

    python train.py config/quickstart.py config/unconditional.py --out_dir=out/unconditional
    python sample.py --out_dir=out/unconditional --num_samples=4
    python evaluate.py --out_dir=out/unconditional --tasks=unconditional
"""
mode = 'unconditional'
length_schedule = ''               # texts that are cut teach no latents
