""" python unpack.py DEST: the data set of captions again. """
import bz2, json, os, sys
import numpy as np
here = os.path.dirname(os.path.abspath(__file__)); dest = sys.argv[1]; os.makedirs(dest, exist_ok=True)
assert os.system(f'tar xJf {here}/rest.tar.xz -C {dest}') == 0
step = np.load(f'{here}/step.npy'); parts = json.load(open(f'{here}/parts.json'))
n = sum(k for _, k in parts)
codes = np.frombuffer(bz2.decompress(open(f'{here}/codes.bz2', 'rb').read()), np.int8).reshape(384, n).T
at = 0
for name, k in parts:
    np.save(f"{dest}/{name}", np.ascontiguousarray(codes[at:at + k] * step).astype(np.float16).reshape(k, 1, 384)); at += k
