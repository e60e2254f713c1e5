""" Overlay: a diffusion transformer of latents alone. config/t2l.py is the one that reads text as
well. It sets neither data, sizes, steps nor out_dir.

    python train.py config/quickstart.py config/latent_dit.py --out_dir=out/latent_dit
    python sample.py --out_dir=out/latent_dit --num_samples=4 --save=z.npy
    python evaluate.py --out_dir=out/latent_dit --tasks=nelbo
"""
streams = ('latent',)
mode = 'unconditional'
