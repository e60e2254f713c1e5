""" BLEU of captions from MiniLM embeddings with Gaussian noise: told the clock or not, denoised first. """
import sys,math,json,time
sys.path.insert(0,'.')
import torch,numpy as np
torch.set_num_threads(1)
from sampling.run import Run
from sampling.denoise import call
from sampling.solvers import x0_and_e
from tasks.common import open_split, chosen_rows
from sacrebleu.metrics import BLEU
n=int(sys.argv[1]); out=sys.argv[2]; nets=sys.argv[3:]
bleu=BLEU(effective_order=True)
def score(w,t): return np.array([bleu.sentence_score(a,[b]).score for a,b in zip(w,t)])
def se(x): return '%.1f ± %.1f'%(x.mean(),x.std(ddof=1)/len(x)**.5)
run=Run('./weights/captions',device='cpu')
dec=Run(nets[0],device='cpu') if nets else None
data=open_split(run,'DATA/multi30k','val'); rows=chosen_rows(len(data),n,0)
texts=[run.tokenizer.decode(data.ids(i)) for i in rows]
z=run.stats.standardise(data.raw_latents(rows))
e=torch.randn(z.shape,generator=torch.Generator().manual_seed(0))*run.stats.live
res={}
def go(net,name,s,zz,**k):
    t=time.time(); r=net
    w=r.write(latents=r.stats.destandardise(zz),temperature=0.0,**k); x=score(w,texts); res[f'{name} {s}']=x.tolist()
    print(s,name,se(x),'%.0f s'%(time.time()-t),flush=True); json.dump(res,open(out,'w'))
@torch.inference_mode()
def denoised(zz,s):
    a=float(run.latent.alpha_sigma(torch.tensor(s))[0])
    x=torch.full((len(zz),run.L),run.text.mask_id)
    p=call(run,x,a*zz,1.0,s,predict=('latent',))[1]
    return x0_and_e(run.latent,p,a*zz,torch.tensor(s))[0]
L=dict(sampler='autoregressive'); D=dict(sampler='confidence')
for s in (0.0,.2,.3):
    zz=z+math.tan(math.pi/2*s)*e
    go(run,'left to right, not told',s,zz,**L)
    if s:
        go(run,'left to right, told',s,zz,latent_clock=s,**L)
        d=denoised(zz,s); go(run,'left to right, denoised first',s,d,**L)
        print('   error of latent %.3f, denoised %.3f'%(((zz-z)**2).mean(),((d-z)**2).mean()))
    if dec: go(dec,'decoder, not told',s,zz,**L); 
    if dec and s: go(dec,'decoder, denoised first',s,d,**L)
for s in (.3,.2,0.0):
    zz=z+math.tan(math.pi/2*s)*e
    go(run,'diffusion, not told',s,zz,**D)
    if s:
        go(run,'diffusion, told',s,zz,latent_clock=s,**D)

