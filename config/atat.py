""" Overlay: ATAT (processes/adaptive.py, docs/adaptive.md). It learns which tokens are hard. Hard
tokens are masked sooner, and weigh more as training goes on. It sets neither data, sizes, steps
nor out_dir.

    python train.py config/quickstart.py config/atat.py --out_dir=out/atat
    python sample.py --out_dir=out/atat --text="Return a list." --by_importance=true \
        --prefer=uncertain
    python evaluate.py --out_dir=out/atat --tasks=nelbo,importance

sample.py samples here as ATAT does.
"""
mode = 'l2t'
importance = 'hybrid'
masking = 'proportional'
beta = 0.5
curriculum = True
