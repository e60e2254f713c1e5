import json, os, shutil, sys, lzma, io, bz2
import numpy as np
sys.path.insert(0, '.')
from runs.files import digest_of, sha256
SRC, DST, OUT = 'DATA/multi30k', 'DATA/multi30k_q', 'CARD'
shutil.rmtree(DST, ignore_errors=True); shutil.copytree(SRC, DST)
parts = sorted(n for n in os.listdir(SRC) if n.endswith('.latents.npy'))
X = np.concatenate([np.load(f'{SRC}/{n}').reshape(-1, 384) for n in parts]).astype(np.float32)
step = (X.std(0) / 10).astype(np.float32); step[step == 0] = 1
blobs = {}
for n in parts:
    x = np.load(f'{SRC}/{n}')
    c = np.clip(np.rint(x.reshape(-1, 384).astype(np.float32) / step), -127, 127).astype(np.int8)
    y = (c * step).astype(np.float16).reshape(x.shape)
    np.save(f'{DST}/{n}', y)
    blobs[n] = c
    print(n, np.abs(c).max())
def patch(d):
    if isinstance(d, dict):
        for k, v in d.items():
            if k.endswith('.latents.npy') and isinstance(v, dict) and 'sha256' in v:
                v['sha256'] = sha256(f'{DST}/{k}'); v['bytes'] = os.path.getsize(f'{DST}/{k}')
            else: patch(v)
    elif isinstance(d, list):
        for v in d: patch(v)
for n in os.listdir(DST):
    if n.endswith('.json') and n != 'tokenizer.json':
        d = json.load(open(f'{DST}/{n}')); d.pop('sha256'); patch(d)
        json.dump({**d, 'sha256': digest_of(d)}, open(f'{DST}/{n}', 'w'), indent=1, ensure_ascii=False)
np.save(f'{OUT}/step.npy', step)
b = np.concatenate([blobs[n] for n in parts]).T.tobytes()
z = bz2.compress(b, 9); open(f'{OUT}/codes.bz2', 'wb').write(z); print('bz2', len(z) / 2**20)
json.dump([(n, len(blobs[n])) for n in parts], open(f'{OUT}/parts.json', 'w'))
rest = [n for n in os.listdir(DST) if not n.endswith('.latents.npy')]
os.system(f"cd {DST}; tar cJf {OUT}/rest.tar.xz {' '.join(rest)}")
