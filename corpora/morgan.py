"""
morgan: the Morgan fingerprint of a molecule, whose text is SMILES, by RDKit.

    latents = Morgan()(['CCO'])          # (n, 1, 2048) float32, bits: 0 or 1; no molecule: all 0
"""
import numpy as np


class Morgan:
    truncated = 0
    record = dict(id='morgan', revision='1', pooling=None, prefix='', normalize=False,
                  dimension=2048, max_length=None, dtype='float32', language=None)

    def __init__(self):
        try:
            from rdkit import Chem, RDLogger
            from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator
        except ImportError:
            raise ValueError('encoder morgan: pip install rdkit') from None
        # RDKit would print a warning for each text that is no molecule; such texts are counted
        RDLogger.DisableLog('rdApp.*')
        self.from_smiles = Chem.MolFromSmiles              # .2 ms a molecule, as to_smiles
        self.to_smiles = Chem.MolToSmiles
        self.bits_of = GetMorganGenerator(radius=2, fpSize=2048).GetFingerprintAsNumPy

    def __call__(self, texts, progress=lambda n: None):
        latents = np.zeros((len(texts), 1, 2048), np.float32)
        for i, text in enumerate(texts):
            # what is no molecule keeps zeros: prepare.py drops and counts it
            molecule = self.read(text)
            if molecule is not None:
                latents[i, 0] = self.bits_of(molecule)
            progress(1)
        return latents

    def read(self, text):
        """ RDKit's molecule, or None. Behind white space RDKit reads a name: no SMILES. """
        return self.from_smiles(text) if text.split() == [text] else None

    def canonical(self, text):
        """ The one way that RDKit writes a molecule; of what is none, the text. """
        molecule = self.read(text)
        return text if molecule is None else self.to_smiles(molecule)

    def remark(self, text):
        return '' if self.read(text) else 'is no molecule that RDKit can read'
