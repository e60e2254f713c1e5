import json,sys,numpy as np
r=json.load(open(sys.argv[1]))
def d(a,b):
    if a in r and b in r:
        x=np.array(r[a])-np.array(r[b]); print(a,'-',b,'%.2f ± %.2f'%(x.mean(),x.std(ddof=1)/len(x)**.5),'n',len(x))
for s in ('0.1','0.2','0.3','0.4'):
    d(f'left to right, told {s}',f'left to right, not told {s}'); d(f'left to right, denoised first {s}',f'left to right, not told {s}')
    d(f'diffusion, told {s}',f'diffusion, not told {s}'); d(f'decoder, denoised first {s}',f'decoder, not told {s}'); d(f'diffusion, told {s}',f'left to right, told {s}'); d(f'decoder, not told {s}',f'left to right, told {s}')
