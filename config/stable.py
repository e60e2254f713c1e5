""" An overlay, for a run that must not diverge: the conservative recipe. Lay it over any other
config.

    python train.py config/l2t.py config/stable.py --out_dir=out/l2t_stable
"""
learning_rate = 5e-5
grad_clip = 0.5
warmup_iters = 2000
latent_weight = 0.1
