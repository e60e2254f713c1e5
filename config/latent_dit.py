""" An overlay: a diffusion transformer for latents alone. config/t2l.py also reads text. The config
before it sets data, sizes and steps.

    python train.py config/quickstart.py config/latent_dit.py --out_dir=out/latent_dit
    python sample.py --out_dir=out/latent_dit --num_samples=4 --save=z.npy
    python evaluate.py --out_dir=out/latent_dit --tasks=nelbo
"""
streams = ('latent',)
mode = 'unconditional'
