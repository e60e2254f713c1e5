""" The nearest training molecule by cosine of fingerprints with wrong bits: near.py OUT.json """
import numpy as np,json,sys,time
D='MOSES/data/molecules/'; import glob
cols=[]; t=time.time()
packs=[np.packbits(np.load(f)[:,0]>0,axis=1) for f in sorted(glob.glob(D+'train-*.latents.npy'))]
P=np.concatenate(packs); n=len(P); print(n,time.time()-t)
C=np.ascontiguousarray(np.unpackbits(P,axis=1).T)          # (2048, n) uint8
size=np.sqrt(C.sum(0,dtype=np.float32)); print('cols',time.time()-t,flush=True)
asked=np.load('CARD/asked.npz')['test']; out=[]
for j in range(5):
    rows=[]
    for q in asked[j]:
        on=np.flatnonzero(np.unpackbits(q)); s=np.zeros(n,np.uint8)
        for d in on: s+=C[d]
        rows.append(int((s/size).argmax()))
    out.append(rows); print(j,time.time()-t,flush=True)
texts=open('MOSES/raw/train600k.txt').read().split()
json.dump([[texts[i] for i in r] for r in out],open(sys.argv[1],'w'))
