""" pack.py DATASET TARGET: the reverse of unpack.py """
import json,lzma,os,shutil,sys
import numpy as np
src,dst=sys.argv[1:]; os.makedirs(dst)
names=[f[:-12] for f in sorted(os.listdir(src)) if f.endswith('.offsets.npy')]

order=np.argsort(-np.load(f'{src}/latent_stats.npz')['mean'],kind='stable')
def w(name,kind,raw):
    with open(f'{dst}/{name}.{kind}.xz','wb') as f: f.write(lzma.compress(raw,preset=6))

for name in names:

    tok=np.fromfile(f'{src}/{name}.tokens.bin','<u2'); assert tok.max()<256
    w(name,'tokens',tok.astype(np.uint8).tobytes())
    off=np.load(f'{src}/{name}.offsets.npy'); w(name,'lengths',np.diff(off).astype(np.uint8).tobytes())
    B=(np.load(f'{src}/{name}.latents.npy')[:,0]>0)
    cols=[np.flatnonzero(B[:,d]) for d in order]
    counts=np.array([len(c) for c in cols]); assert counts.max()<65536
    g=np.concatenate([np.diff(np.r_[-1,c]) for c in cols])
    assert g.max()<65536
    w(name,'bits',counts.astype('<u2').tobytes()+(g&255).astype(np.uint8).tobytes()+(g>>8).astype(np.uint8).tobytes())
    print(name,flush=True)
