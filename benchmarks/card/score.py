""" Tables from write.jsonl.xz: score.py FILE OUT.json """
import lzma,json,sys,math,collections
import numpy as np
from rdkit import Chem,RDLogger
from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator
RDLogger.DisableLog('rdApp.*')
gen=GetMorganGenerator(radius=2,fpSize=2048)
SH=(0.0,.01,.03,.05,.1)
asked=np.load('CARD/asked.npz'); T={k:open(f'CARD/{k}.txt').read().split() for k in ('val','test')}
from functools import lru_cache
@lru_cache(None)
def look(s):
    m=Chem.MolFromSmiles(s) if s else None
    if m is None or m.GetNumAtoms()==0: return None,None
    return Chem.MolToSmiles(m),np.packbits(gen.GetFingerprintAsNumPy(m))
pop=np.array([bin(i).count('1') for i in range(256)],np.uint16)
def tani(a,b):
    if a is None: return 0.0
    return pop[a&b].sum()/pop[a|b].sum()
def cosine(a,b):
    if a is None: return -1
    return pop[a&b].sum()/math.sqrt(float(pop[a].sum())*float(pop[b].sum()))
def se(x): x=np.asarray(x,float); return x.mean(), x.std(ddof=1)/math.sqrt(len(x))
rows=[]
for line in lzma.open(sys.argv[1],'rt'):
    r=json.loads(line); x=r.pop('texts')
    if 'set' not in r:
        rows.append(r|dict(n=len(x),texts=x)); continue
    if r['set']=='val':
        m=len(x)//len(r['shares']); 
        for i,s in enumerate(r['shares']):
            e=[look(x[m*i+k])[0]==T['val'][k] for k in range(m)]
            rows.append(r|dict(share=s,n=m,exact=100*float(np.mean(e))))
        continue
    s=r['shares'][0]; K=r['drafts']; n=len(x)//K; want=asked['test'][SH.index(s)]
    out=dict(e=[],t=[],v=[])
    for i in range(n):
        d=x[K*i:K*(i+1)]; best=max(d,key=lambda q:cosine(look(q)[1],want[i])) if K>1 else d[0]
        c,f=look(best); out['e'].append(100.0*(c==T['test'][i])); out['t'].append(tani(f,look(T['test'][i])[1])); out['v'].append(100.0*np.mean([look(q)[0] is not None for q in d]))
    rows.append(r|dict(share=s,n=n,exact=se(out['e']),tanimoto=se(out['t']),valid=se(out['v']),e=out['e'],t=out['t']))
    q=rows[-1]; print(q['net'],q['how'],q['drafts'],'told',q['told'],'clock',q['clock'],'share',s,'exact %.1f±%.1f'%q['exact'],'tani %.3f±%.3f'%q['tanimoto'],'valid %.1f'%q['valid'][0],'%.1f s'%q['seconds'],flush=True)
json.dump(rows,open(sys.argv[2],'w'))
print('VAL grid'); g=collections.defaultdict(dict)
for r in rows:
    if r.get('set')=='val': g[r['net'],r['how'],r['told'],r['share']][r['clock']]=round(r['exact'],1)
for k,v in sorted(g.items()): print(k,v)
