""" Overlay: ATAT (adaptive.py). Which tokens are hard is learned; the hard ones are masked sooner, and weigh more as training goes on.
Sets neither data, sizes, steps nor out_dir.

    python train.py config/quickstart.py config/atat.py --out_dir=out/atat
    python sample.py --out_dir=out/atat --text="Return a list." --by_importance=true --prefer=uncertain     # ATAT's sampler
    python evaluate.py --out_dir=out/atat --tasks=nelbo,importance
"""
importance = 'hybrid'
masking = 'proportional'
beta = 0.5
curriculum = True
