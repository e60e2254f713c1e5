""" Molecules: SMILES as tokens, and their fingerprints. """
import itertools
import sys

import pytest
import torch

from base.console import warn_once
from corpora.tokenizers import load_tokenizer
from data import PackedDataset
from encoders import find_encoder
from launch import prepared, texts_of
from tasks import molecule
from tasks.common import Context
from toys import toy_run, write_lines

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
    bits = AllChem.GetMorganFingerprintAsBitVect(MolFromSmiles(ETHANOL), 2, 2048).GetOnBits()
    z = morgan([ETHANOL, 'OCC', 'CCN', NONE, ''])
    assert z.shape == (5, 1, 2048) and bits_of(z[0]) == {*bits}
    assert (z[0] == z[1]).all() and (z[0] != z[2]).any() and not z[3:].any()
    none = (NONE, '', 'CCO ethanol', 'CCO\tethanol', ' CCO', 'CCO\n')
    assert not morgan.remark(ETHANOL) and all(map(morgan.remark, none))


def bits_of(z):
    """ The places of the ones of a fingerprint (1, D). """
    return set(z[0].nonzero()[0].tolist())


def test_a_text_that_is_no_molecule_is_never_the_nearest_and_no_crash(morgan):
    loaded = toy_run(encoder=morgan)
    loaded.to_raw = torch.as_tensor
    cosine = loaded.cosines([NONE, ETHANOL, 'c1ccccc1O'], morgan([ETHANOL]))
    assert cosine[0] == 0 and cosine[1] == pytest.approx(1) and 0 < cosine[2] < 1


def test_a_dataset_of_molecules_drops_and_counts_what_is_none(morgan, tmp_path, capsys):
    chains = [''.join(atoms) for atoms in itertools.product('CNO', repeat=7)][:1100]
    path = write_lines(tmp_path / 'a.txt', [*chains, NONE, 20 * 'C'])
    folder = prepared(input=path, out=tmp_path / 'out', tokenizer='smiles', encoder='morgan',
                      encoder_dims=0, max_tokens=15)
    train, val = texts_of(folder, 'train'), texts_of(folder, 'val')
    assert sorted(train + val) == sorted(chains)
    assert f"the first: {NONE!r}: is no molecule" in capsys.readouterr().err
    data = PackedDataset(folder, 'train')
    assert data.stats.std[data.live > 0].unique().numel() == 1 and not data.live.all()
    assert (data.raw_latents([0])[0].numpy() == morgan(train[:1])[0]).all()
    with pytest.raises(ValueError, match='morgan has no settings'):
        prepared(input=path, out=tmp_path / 'b', encoder='morgan')


SPELLINGS = ['CCO', 'OCC', 'C-C-O', 'Oc1ccccc1', 'C1=CC=CC=C1O', 'CC(=O)O', 'C(C)(O)=O', 'F/C=C/F',
             'C(/F)=C\\F', '[Na+].[Cl-]', '[Cl-].[Na+]', 'C', '[CH4]']


def written_in_two_ways(path):
    """ Molecules, two or three SMILES of each. """
    chains = [way + i * 'C' for way in ('CCN', 'C-C-N') for i in range(25)]
    return write_lines(path, chains + SPELLINGS)


@pytest.mark.parametrize('knobs', [dict(encoder='morgan', encoder_dims=0, vocab_size=300),
                                   dict(encoder='none', tokenizer='smiles')])
def test_two_smiles_of_a_molecule_are_in_one_split(morgan, tmp_path, knobs):
    knobs = knobs | dict(input=written_in_two_ways(tmp_path / 'a.txt'), val_fraction=.3,
                         max_tokens=63)

    def molecules(folder, split):
        return [morgan.canonical(text) for text in texts_of(folder, split)]

    folder = prepared(out=tmp_path / 'out', **knobs)
    train, val = ({*molecules(folder, split)} for split in ('train', 'val'))
    assert len(val) > 5 and not train & val
    again = prepared(out=tmp_path / 'distinct', distinct=True, **knobs)
    once = molecules(again, 'train') + molecules(again, 'val')
    assert sorted(once) == sorted(train | val), 'each is there once'


def test_without_rdkit_molecules_are_split_by_how_they_are_written_and_this_is_said(
        monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, 'rdkit', None)
    warn_once.cache_clear()
    prepared(input=written_in_two_ways(tmp_path / 'a.txt'), out=tmp_path / 'out', encoder='none',
             tokenizer='smiles', val_fraction=.3)
    said = [line for line in capsys.readouterr().err.splitlines() if 'RDKit' in line]
    assert len(said) == 1 and 'pip install rdkit' in said[0]


def test_a_molecule_is_judged_by_what_it_is_not_by_how_it_is_written(morgan):
    loaded, texts = toy_run(encoder=morgan), [ETHANOL, ETHANOL, 'CCC', NONE]
    ctx = Context({}, texts=texts, raw=torch.from_numpy(morgan(texts)))
    named = molecule.judge(loaded, ctx, [f'{ETHANOL}\tethanol'] * 4)
    assert not named['exact'].any() and not named['valid'].any()
    found = molecule.judge(loaded, ctx, ['OCC', 'CCN', NONE, NONE])
    assert found['exact'].tolist() == [100, 0, 0, 0] and found['valid'].sum() == 200
    a, b = map(bits_of, morgan([ETHANOL, 'CCN']))
    assert found['tanimoto'].tolist() == pytest.approx([1, len(a & b) / len(a | b), 0, 0])
