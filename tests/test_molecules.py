""" Molecules: SMILES as tokens, and their fingerprints. """
import itertools
import sys

import pytest
import torch

from corpora.encoder_table import find_encoder
from corpora.tokenizers import load_tokenizer
from data import PackedDataset
from launch import texts_of
from tasks import molecule
from tasks.common import Context
from test_prepare import run
from toys import toy_run

ETHANOL, NONE = 'CCO', 'no molecule'


def test_an_atom_of_two_letters_is_a_token_and_a_text_comes_back():
    smiles = load_tokenizer('smiles')
    text = 'Clc1c[nH]c2ccc(Br)cc12 ]~C@@l'
    assert smiles.decode(smiles.encode(text)) == text
    assert [smiles.pieces[i] for i in smiles.encode(text)[:5]] == [b'Cl', b'c', b'1', b'c', b'[nH]']
    with pytest.raises(ValueError, match='tokenizer smiles: .é. is none of'):
        smiles.encode('é')


def test_without_rdkit_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'rdkit', None)
    with pytest.raises(ValueError, match='pip install rdkit'):
        find_encoder('morgan')


@pytest.fixture
def morgan():
    pytest.importorskip('rdkit', reason='reads molecules: pip install rdkit')
    return find_encoder('morgan')


def test_a_fingerprint_is_that_of_rdkit_however_the_molecule_is_written(morgan):
    from rdkit.Chem import AllChem, MolFromSmiles
    bits = set(AllChem.GetMorganFingerprintAsBitVect(MolFromSmiles(ETHANOL), 2, 2048).GetOnBits())
    z = morgan([ETHANOL, 'OCC', 'CCN', NONE, ''])
    assert z.shape == (5, 1, 2048) and set(z[0, 0].nonzero()[0].tolist()) == bits
    assert (z[0] == z[1]).all() and (z[0] != z[2]).any() and not z[3:].any()
    assert not morgan.remark(ETHANOL) and all(map(morgan.remark, (NONE, '', 'CCO ethanol')))


def test_a_text_that_is_no_molecule_is_never_the_nearest_and_no_crash(morgan):
    loaded = toy_run(encoder=morgan)
    loaded.to_raw = torch.as_tensor
    cosine = loaded.cosines([NONE, ETHANOL, 'c1ccccc1O'], morgan([ETHANOL]))
    assert cosine[0] == 0 and cosine[1] == pytest.approx(1) and 0 < cosine[2] < 1


def test_a_dataset_of_molecules_drops_and_counts_what_is_none(morgan, tmp_path, capsys):
    chains = [''.join(atoms) for atoms in itertools.product('CNO', repeat=7)][:1100]
    (tmp_path / 'a.txt').write_text('\n'.join([*chains, NONE, 20 * 'C']))
    folder = run(input=tmp_path / 'a.txt', out=tmp_path / 'out', tokenizer='smiles',
                 encoder='morgan', encoder_dims=0, max_tokens=15)
    assert sorted(texts_of(folder, 'train') + texts_of(folder, 'val')) == sorted(chains)
    assert f"the first: {NONE!r}: is no molecule" in capsys.readouterr().err
    data = PackedDataset(folder, 'train')
    assert data.stats.std[data.live > 0].unique().numel() == 1 and not data.live.all()
    assert (data.raw_latents([0])[0].numpy() == morgan(texts_of(folder, 'train')[:1])[0]).all()
    with pytest.raises(ValueError, match='morgan has no settings'):
        run(input=tmp_path / 'a.txt', out=tmp_path / 'b', encoder='morgan')


def test_a_molecule_is_judged_by_what_it_is_not_by_how_it_is_written(morgan):
    loaded, texts = toy_run(encoder=morgan), [ETHANOL, ETHANOL, 'CCC', NONE]
    ctx = Context({}, texts=texts, raw=torch.from_numpy(morgan(texts)))
    found = molecule.judge(loaded, ctx, ['OCC', 'CCN', NONE, NONE])
    assert found['exact'].tolist() == [100, 0, 0, 0] and found['valid'].sum() == 200
    a, b = (set(morgan([text])[0, 0].nonzero()[0]) for text in (ETHANOL, 'CCN'))
    assert found['tanimoto'].tolist() == pytest.approx([1, len(a & b) / len(a | b), 0, 0])
