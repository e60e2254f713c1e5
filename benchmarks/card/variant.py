import sys,os,json,shutil; sys.path.insert(0,'.')
import numpy as np
from runs.files import read_sealed
from runs.writing import sealed
from corpora.shards import write_files, as_bytes
src,dst=sys.argv[1:3]; os.makedirs(dst,exist_ok=True)
for f in os.listdir(src):
    if f.endswith(('.bin','.npy')) : 
        if not os.path.exists(f'{dst}/{f}'): os.link(f'{src}/{f}',f'{dst}/{f}')
meta=read_sealed(f'{src}/meta.json')
s=dict(np.load(f'{src}/latent_stats.npz')); rms=np.sqrt((s['std']**2).mean()); print(rms)
s['std']=np.full_like(s['std'],rms)
meta['files']|=write_files(dst,{'latent_stats.npz':as_bytes(np.savez,**s)})
write_files(dst,{'meta.json':sealed(meta).encode()})
std=dict(np.load(f'{src}/latent_stats.npz'))['std']
bag=(np.load(f'{src}/bag.npy').astype(np.float32)*(std/rms)[None]).astype(np.float16)
meta=read_sealed(f'{dst}/meta.json')
meta['files']|=write_files(dst,{'bag.npy':as_bytes(np.save,bag)})
write_files(dst,{'meta.json':sealed(meta).encode()})
