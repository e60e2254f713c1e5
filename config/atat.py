""" An overlay: ATAT (processes/adaptive.py, docs/adaptive.md). It learns which tokens are hard. It
masks hard tokens sooner, and gives them more weight as training goes on. The config before it sets
data, sizes and steps.

    python train.py config/quickstart.py config/atat.py --out_dir=out/atat
    python sample.py --out_dir=out/atat --text="Return a list." --by_importance=true \
        --prefer=uncertain
    python evaluate.py --out_dir=out/atat --tasks=nelbo,importance

The line of sample.py is ATAT's own sampler.
"""
mode = 'l2t'
text_process = 'atat'
importance = 'hybrid'
masking = 'proportional'
beta = 0.5
curriculum = True
