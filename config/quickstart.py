""" The two-minute tour on a CPU: the interpreter's own documentation, the built-in lsa encoder, no download.

    python prepare.py config/quickstart.py
"""
input = 'builtin'
out = 'data/quickstart'
encoder = 'lsa'
encoder_dims = 64
vocab_size = 2048
max_tokens = 63
val_fraction = .05
