""" val and test of 1,000 with wrong bits: a share of the ones is lost, as many zeros are won """
import numpy as np,sys
sys.path.insert(0,'.')
from corpora.morgan import Morgan
m=Morgan(); out={}
for k,name in enumerate(('val','test')):
    T=open(f'MOSES/raw/{name}.txt').read().split()[:1000]
    open(f'CARD/{name}.txt','w').write('\n'.join(T)+'\n')
    B=m(T)[:,0]>0; A=[]
    for j,share in enumerate((0,.01,.03,.05,.1)):
        r=np.random.default_rng([k,j])
        lost=B&(r.random(B.shape)<share)
        lot=np.where(B,2,r.random(B.shape)); rank=lot.argsort(1).argsort(1)
        won=rank<lost.sum(1,keepdims=True)
        C=B&~lost|won; assert (C.sum(1)==B.sum(1)).all()
        A.append(np.packbits(C,axis=1)); print(name,share,lost.sum(1).mean())
    out[name]=np.stack(A)
np.savez_compressed('CARD/asked.npz',**out)
