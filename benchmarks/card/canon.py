""" MOSES, canonical by RDKit: train.txt (a random order), val.txt and test.txt of the test split. """
import gzip, random, sys
from rdkit import Chem, RDLogger
RDLogger.DisableLog('rdApp.*')
from itertools import islice
D='MOSES/moses/moses/dataset/data/'
def lines(n): return [l.split(',')[0].strip() for l in gzip.open(D+n,'rt')][1:]
tr,te=lines('train.csv.gz'),lines('test.csv.gz')
random.Random(0).shuffle(tr); random.Random(0).shuffle(te)
def canon(L): return [Chem.MolToSmiles(Chem.MolFromSmiles(s)) for s in L]
te=canon(te[:12000])
open('MOSES/raw/val.txt','w').write('\n'.join(te[:4000])+'\n')
open('MOSES/raw/test.txt','w').write('\n'.join(te[4000:])+'\n')
with open('MOSES/raw/train.txt','w') as f:
    for i,s in enumerate(tr[:int(sys.argv[1])]):
        f.write(Chem.MolToSmiles(Chem.MolFromSmiles(s))+'\n')
        if i%50000==0: print(i,flush=True)
