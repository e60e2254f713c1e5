"""
Embedding texts with encoders.py, beside sentence-transformers: the same model, texts and batch
size, in float32. Needs it: pip install sentence-transformers
"""
import os
import time

import numpy as np

from benchmarks.compare import compare
from configurator import stop
from data import PackedDataset
from encoders import load_encoder
from runs.manifest import dataset_folder


def run(knobs):
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        stop('to compare with it: pip install sentence-transformers')
    data = PackedDataset(dataset_folder(knobs.dataset), 'train')
    rows = np.random.default_rng(0).permutation(len(data))[:knobs.samples]
    texts = [data.text(int(i)) for i in rows]

    ours = load_encoder(knobs.encoder, batch_size=knobs.embed_batch_size)
    name = knobs.encoder if os.path.isdir(knobs.encoder) else ours.record['id']
    theirs = SentenceTransformer(name, device='cpu')

    def encode_ours():
        return ours(texts)[:, 0]

    def encode_theirs():
        return theirs.encode(texts, batch_size=knobs.embed_batch_size, convert_to_tensor=True,
                             show_progress_bar=False)

    def texts_per_s(encode):
        began = time.perf_counter()
        encode()
        return len(texts) / (time.perf_counter() - began)

    difference = (encode_ours() - encode_theirs()).abs().max()
    print(f'largest difference of an embedding: {difference:.1e}')
    compare({'sentence-transformers': lambda: texts_per_s(encode_theirs),
             'encoders.py': lambda: texts_per_s(encode_ours)}, 'texts/s', knobs.rounds)
