""" Overlay: HDLM (arXiv:2510.08632, baselines.py): a token becomes its cluster, then MASK. Text alone. The clusters are made at the start:
k-means on the company that tokens keep in the training texts, or with --clusters_from= on a run's token embedding or an .npy file.
Sets neither data, sizes, steps nor out_dir.

    python train.py config/quickstart.py config/hdlm.py --out_dir=out/hdlm
    python sample.py --out_dir=out/hdlm --num_samples=4
    python evaluate.py --out_dir=out/hdlm --tasks=nelbo,text
"""
text_process = 'hdlm'
clusters = 64
streams = ('text',)
mode = 'unconditional'
