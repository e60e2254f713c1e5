""" Overlay: text and embedding together, from noise. It sets neither data, sizes, steps nor
out_dir.

    python train.py config/quickstart.py config/unconditional.py --out_dir=out/unconditional
    python sample.py --out_dir=out/unconditional --num_samples=4
    python evaluate.py --out_dir=out/unconditional --tasks=unconditional
"""
mode = 'unconditional'
length_schedule = ''               # texts that are cut teach no latents
