""" valid, unique, novel, FCD to MOSES's test (its stored statistics) of samples: fcd.py write.jsonl.xz """
import sys,json,lzma,pickle,gzip,numpy as np,time
from rdkit import Chem,RDLogger; RDLogger.DisableLog('rdApp.*')
from fcd_torch import FCD
import torch; torch.set_num_threads(1)
st=np.load('MOSES/moses/moses/dataset/data/test_stats.npz',allow_pickle=True)['stats'].item()
print(st.keys(), {k:type(v) for k,v in st.items()})
mos=set(l.split(',')[0].strip() for l in gzip.open('MOSES/moses/moses/dataset/data/train.csv.gz','rt'))
fcd=FCD(device='cpu',n_jobs=1,batch_size=512)
N=int(sys.argv[2]) if len(sys.argv)>2 else 30000
for line in lzma.open(sys.argv[1],'rt'):
    r=json.loads(line); x=r.pop('texts')
    if 'set' in r: continue
    x=x[:N]; t=time.time()
    can=[]
    for s in x:
        m=Chem.MolFromSmiles(s) if s else None
        can.append(Chem.MolToSmiles(m) if m is not None and m.GetNumAtoms() else None)
    ok=[c for c in can if c]; u=set(ok)
    f=fcd(gen=ok,pref=st['FCD']) if len(ok)>100 else float('nan')
    print(r,'n',len(x),'valid %.4f'%(len(ok)/len(x)),'unique %.4f'%(len(u)/max(1,len(ok))),'novel %.4f'%(sum(c not in mos for c in u)/max(1,len(u))),'FCD %.4f'%f,'%.0f s'%(time.time()-t),flush=True)
