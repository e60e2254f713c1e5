""" An overlay: HDLM (arXiv:2510.08632, processes/hdlm.py), for text alone. A token becomes its
cluster, then MASK. train.py makes the clusters at the start: k-means on co-occurrence counts of the
training texts. --clusters_from= takes a run's token embedding instead. The config before it sets
data, sizes and steps.

    python train.py config/quickstart.py config/hdlm.py --out_dir=out/hdlm
    python sample.py --out_dir=out/hdlm --num_samples=4
    python evaluate.py --out_dir=out/hdlm --tasks=nelbo,text
"""
text_process = 'hdlm'
clusters = 64
streams = ('text',)
mode = 'unconditional'
