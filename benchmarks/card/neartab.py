import json,numpy as np
from rdkit import Chem,RDLogger
from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator
g=GetMorganGenerator(radius=2,fpSize=2048)
T=open('CARD/test.txt').read().split()
f=lambda s: g.GetFingerprintAsNumPy(Chem.MolFromSmiles(s)).astype(bool)
F=[f(s) for s in T]; N=json.load(open('MOSES/near.json'))
asked=np.load('CARD/asked.npz')['test']
st=np.load('MOSES/data/molecules_rms/latent_stats.npz'); pd=np.load('MOSES/data/molecules/latent_stats.npz')
R=np.stack(F).astype(float)
for j,share in enumerate((0,.01,.03,.05,.1)):
    t=np.array([ (a&b).sum()/(a|b).sum() for a,b in ((f(x),F[i]) for i,x in enumerate(N[j]))])
    e=np.mean([x==y for x,y in zip(N[j],T)])
    W=np.unpackbits(asked[j],axis=1).astype(float)
    d=W-R
    tw=np.array([np.minimum(w,r).sum()/np.maximum(w,r).sum() for w,r in zip(W,R)])
    rc=np.sqrt(((d/st['std'])**2).mean()); rp=np.sqrt(((d/pd['std'])**2).mean())
    print(share,'exact',e,'tanimoto of nearest %.3f ± %.3f'%(t.mean(),t.std(ddof=1)/len(t)**.5),'of the wrong fingerprint itself %.3f'%tw.mean(),'sigma/alpha common %.3f clock %.3f'%(rc,np.arctan(rc)*2/np.pi),'per dim %.3f clock %.3f'%(rp,np.arctan(rp)*2/np.pi))
