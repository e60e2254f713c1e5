""" Proteins: lengths that are given, crops, residues and nothing else, FASTA. """
import re

import numpy as np
import pytest
import torch

from corpora.tokenizers import RESIDUES
from data import Loader, PackedDataset, lengths
from diffusion import MaskedText, Noising, is_end, mode_shares
from encoders import find_encoder
from launch import TINY, assert_refused, flags, measured, run_each, run_together, texts_in
from noise import uniforms
from sampling.knobs import SamplingKnobs
from sampling.run import Run
from sampling.texts import blank, write
from toys import FILL_MASKS, write_lines

STANDARD = set('ACDEFGHIKLMNPQRSTVWY')


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """ A folder with 120 sequences of 5 to 60 residues, a few of them X, and a run on crops of 24
    residues. """
    folder, rng = tmp_path_factory.mktemp('proteins'), np.random.default_rng(0)
    letters = np.array(list('ACDEFGHIKLMNPQRSTVWYX'))
    law = np.array([*rng.dirichlet(np.full(20, 2.)) * .98, .02])
    sequences = [''.join(rng.choice(letters, rng.integers(5, 61), p=law)) for _ in range(120)]
    write_lines(folder / 'p.fasta', [f'>p{i}\n{s}' for i, s in enumerate(sequences)])
    small = [knob for knob in TINY if not knob.startswith('--latent_tokens')]
    prepare = flags(input=folder / 'p.fasta', max_tokens=100, val_fraction=.2,
                    out=folder / 'packed')
    train = flags(dataset=folder / 'packed', out_dir=folder / 'run', seq_len=24, max_iters=8,
                  eval_interval=8, optimizer='adamw')
    for code, _, err in run_each(['prepare.py', *prepare],
                                 ['train.py', 'config/protein_tiny.py', *small, *train]):
        assert code == 0, err
    return folder


@pytest.fixture(scope='module')
def proteins(made):
    return made / 'packed'


@pytest.fixture(scope='module')
def trained(made):
    return made / 'run'


@pytest.fixture
def loaded(trained):
    return Run(str(trained), 'latest', dtype='float32')


@pytest.fixture(scope='module')
def data(proteins):
    return PackedDataset(str(proteins), 'train', 24, crop=True)


def batch_of(data, n, step=0, L=24, text=None, **knobs):
    """ A Batch of n rows of a step, and the rows of the dataset. """
    loader = Loader(data, seed=0, micro_batch=n)
    noising = Noising(text or MaskedText(data.vocab_size), None, ('text',), **knobs)
    batch = noising(loader.clean_rows(step, 0, L), mode_shares('unconditional'), data)
    return batch, loader.row_numbers(step, 0, 0)[1]


def test_crops_begin_anywhere_uniformly_and_hold_no_EOS(proteins, data):
    whole = PackedDataset(str(proteins), 'train')
    with pytest.raises(ValueError, match='seq_len 24'):
        PackedDataset(str(proteins), 'train', 24)
    i, n = int(lengths(data).argmax()), int(lengths(data).max())
    windows = whole.rows([i])[0][0][:n].unfold(0, 24, 1)                 # (n - 23, 24)
    starts = []
    for u in np.linspace(0, .9999, 500):
        tokens, _ = data.rows([i], np.array([u]))
        starts.append(int((windows == tokens).all(1).nonzero()[0]))
    assert set(starts) == set(range(n - 23)) and np.ptp(np.bincount(starts)) <= 2
    short = np.flatnonzero(lengths(data) < 24)
    tokens, _ = data.rows(short, np.full(len(short), .7))
    assert ((tokens == data.eos).sum(1) == 1).all(), 'what fits is whole, with its EOS'


def test_where_the_length_is_given_EOS_and_PAD_are_seen_and_never_scored(data):
    for step in range(4):
        b, rows = batch_of(data, 64, step, predict_length=False)
        scored = b.positions[b.weight > 0]
        ends = is_end(data.rows(rows, uniforms(0, step, 'crop', 0, 64, 1)[:, 0])[0], data)
        assert len(scored) > 100 and ends.any() and not ends.flatten()[scored].any()
        assert (is_end(b.x_t, data) == ends).all(), 'a masked end'

    # the control: else they are scored
    other, _ = batch_of(data, 64)
    assert is_end(other.targets[other.weight > 0], data).any()


def test_crops_of_a_length_schedule_are_of_that_length_from_anywhere(data):
    short, rows = batch_of(data, 64, L=10, predict_length=False)
    expected = data.rows(rows, uniforms(0, 0, 'crop', 0, 64, 1)[:, 0], 10)[0]
    seen = short.x_t != data.vocab_size
    assert short.x_t.shape == (64, 10) and torch.equal(short.x_t[seen], expected[seen])
    assert not torch.equal(expected, data.rows(rows)[0][:, :10])


@pytest.mark.parametrize('which, law', [('bound', lambda t: 1 / t), ('uniform', torch.ones_like),
                                        ('rdm', lambda t: 1 - t)])
def test_loss_weights_are_those_of_the_bound_of_flow_matching_and_of_RDM(data, which, law):
    text = MaskedText(data.vocab_size, loss_weight=which)
    b, _ = batch_of(data, 16, text=text, predict_length=False)
    scored = b.weight > 0
    t = b.t_text[b.positions[scored] // 24]
    assert torch.allclose(b.weight[scored] * 16 * 24, law(t), rtol=1e-4)


@pytest.mark.parametrize('sampler', FILL_MASKS)
def test_no_sampler_writes_anything_but_the_20_residues_at_the_length_that_is_asked(loaded,
                                                                                   sampler):
    head = loaded.net.model.text_head.weight
    with torch.no_grad():                          # a network that wants every other symbol
        head.zero_()
        head[20:] = 3 * torch.randn(*head[20:].shape)
    for length in (1, 13, 24):
        knobs = SamplingKnobs(sampler=sampler, steps=9, length=length)
        for row in write(loaded.net, *blank(loaded.net, 6, knobs), None, knobs).tolist():
            text = loaded.tokenizer.decode(row)
            assert len(text) == length and set(text) <= STANDARD


def test_lengths_are_drawn_from_the_training_sequences_and_residues_at_random(loaded):
    def drawn(n):
        return blank(loaded.net, n, SamplingKnobs(seed=1))[1].logical_not().sum(1)

    two = loaded.sample_text(2, length=12)
    assert two[0] != two[1], 'ends that are given are no condition'
    lengths, quantiles = drawn(400), np.array(loaded.net.lengths)
    assert lengths.min() >= quantiles[0] and lengths.max() <= 24
    assert abs(lengths.double().mean() - quantiles.mean()) < 1.5
    assert drawn(3).equal(lengths[:3]) and loaded.sample_text(1) == loaded.sample_text(3)[:1]


def test_the_command_line_inpaints_and_writes_FASTA(made):
    sample = ['sample.py', '--out_dir=./run']
    drawn, filled, read = run_each(
        [*sample, *flags(text='MKV[MASK:9]HHHHHH', num_samples=3, fasta='new.fasta')],
        # with the config of training, whose mode is the run's own
        [*sample, 'config/protein_tiny.py', *flags(out_dir='./run', text='MKV[MASK:*]', length=24,
                                                   steps=9)],
        ['prepare.py', *flags(input='new.fasta', out='./again', val_fraction=.4)], cwd=made)
    assert drawn[0] == filled[0] == read[0] == 0, (drawn, filled, read)
    assert re.search('-> MKV[A-Z]{21}\n', filled[1])
    records = re.findall(r'>\S+ length=18\n((?:[A-Z]+\n)+)', (made / 'new.fasta').read_text())
    assert len(records) == 3
    for lines in records:
        residues = lines.replace('\n', '')
        assert re.fullmatch('MKV[A-Z]{9}HHHHHH', residues) and set(residues) <= STANDARD


@pytest.mark.parametrize('args, words', [
    (['--mode=text', '--length=99'], 'at most 24'), (['--text=MKV[MASK:*]'], 'length'),
    (['--text=MKV[MASK:3]', '--length=9'], 'length')])
def test_a_length_that_does_not_fit_is_refused(trained, args, words):
    (rc, _, err), = run_together(['sample.py', f'--out_dir={trained}', *args])
    assert rc == 2 and words in err, err


def test_residues_in_small_letters_are_those_in_capitals(loaded):
    assert torch.equal(loaded.pack(['mktaYI']), loaded.pack(['MKTAYI']))
    filled, = loaded.infill(['mk[MASK:3]yi'], seed=3)
    assert [filled] == loaded.infill(['MK[MASK:3]YI'], seed=3) and filled.isupper()
    with pytest.raises(ValueError, match='is none of LAGV.*it is in .MK\\\\tT'):
        loaded.pack(['MK\tT'])
    seen = []
    loaded.encoder = lambda texts: seen.append(texts) or torch.zeros(len(texts), 1, 2)
    loaded.encode(['mkt'])
    assert seen == [['MKT']]


def test_evaluation_has_the_bound_per_residue_recovery_and_composition(proteins, trained):
    (code, _, err), = run_together(['evaluate.py', *flags(
        out_dir=trained, tasks='nelbo,protein,importance', draws=2, steps=4, n=20)])
    assert code == 0, err
    found = measured(trained)
    data, val = (PackedDataset(str(proteins), split, 24, crop=True) for split in ('train', 'val'))
    residues = [RESIDUES.index(c) for text in texts_in(data) for c in text]
    law = np.bincount(residues, minlength=27) / len(residues)
    entropy = -np.sum(law[law > 0] * np.log(law[law > 0]))
    assert abs(found['protein/unigram/nats_per_residue'] - entropy) < .2
    assert 2 < found['nelbo/nats_per_token'] < 4
    assert found['protein/data/composition_distance'] < .15
    assert found['protein/data/length'] <= 24
    n_commonest = (val.rows(np.arange(len(val)))[0] == int(law.argmax())).sum().item()
    commonest = 100 * n_commonest / np.minimum(lengths(val), 24).sum()
    recovery = [found[f'protein/unigram/recovery@0.{share}'] for share in range(1, 10)]
    assert abs(np.mean(recovery) - commonest) < 5 and 'protein/recovery@0.9_se' in found
    assert found['importance/frequency/nats_quarter_4'] > 0
    assert 'importance/importance/std' not in found, 'it has no importance of its own'


def test_what_does_not_go_together_ends_in_one_line(proteins, dataset, tmp_path):
    given = '--predict_length=false'
    wrong = ((proteins, [given, '--streams=text', '--mode=unconditional'], 'text_clock'),
             (dataset, [given, '--text_clock=false', '--seq_len=12'], 'latents'),
             (dataset, ['--text_loss_weight=best'], 'rdm'))
    results = run_together(*[
        ['train.py', *flags(dataset=data, out_dir=tmp_path / 'run'), *TINY, *args]
        for data, args, _ in wrong])
    for result, (_, _, words) in zip(results, wrong):
        assert_refused(result, words)


def test_a_protein_encoder_of_ESMs_layout_is_read_from_a_folder(tmp_path):
    transformers = pytest.importorskip('transformers')
    symbols = ['<cls>', '<pad>', '<eos>', '<unk>', *RESIDUES, '<null_1>', '<mask>']
    (tmp_path / 'vocab.txt').write_text('\n'.join(symbols))
    transformers.EsmTokenizer(str(tmp_path / 'vocab.txt')).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.EsmConfig(
        vocab_size=33, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, pad_token_id=1, mask_token_id=32, token_dropout=True,
        position_embedding_type='rotary')
    transformers.EsmForMaskedLM(config).save_pretrained(tmp_path)
    encoder = find_encoder(str(tmp_path), pooling='mean', normalize=False)
    one, other = encoder(['MKVLA', 'GGGGGHHHHHKK'])
    assert one.shape == (1, 32) and (one - other).abs().max() > 1e-3
    assert torch.allclose(encoder(['MKVLA'])[0], one, atol=1e-5), 'alone as in a batch'
