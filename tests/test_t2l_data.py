""" t2l_dataset as sentences: rows of t2l read texts of another dataset too, and no other row does. """
import shutil
from collections import Counter

import pytest
import torch

from data import Joined, PackedDataset, row_order
from diffusion import GaussianLatents, MaskedText, T2L
from launch import cut, run, run_each, train, train_each, weights
from loss import BatchMaker
from processes.autoregressive import NextToken
from test_causal import stage_of


@pytest.fixture(scope='module')
def more(dataset, tmp_path_factory):
    """ 60 more texts, none of which is in the dataset, prepared like it. """
    folder = tmp_path_factory.mktemp('more')
    lines = [f'a purple horse swims near the harbour number {i}' for i in range(60)]
    (folder / 'lines.txt').write_text('\n'.join(lines))
    out = run('prepare.py', f'--input={folder}/lines.txt', f'--like={dataset}', '--val_fraction=.1', f'--out={folder}/packed')
    assert out.returncode == 0, out.stderr
    return folder / 'packed'


def test_only_rows_of_t2l_read_the_texts_of_t2l_dataset(dataset, more):
    data = PackedDataset(str(dataset), 'train')
    extra = PackedDataset(str(more), 'train', data.seq_len, stats=data.stats)
    text, process = MaskedText(data.tokenizer.vocab_size), NextToken(data.tokenizer.vocab_size, data.lengths())
    knobs = dict(next_token=process, causal_weight=1.)
    of_batches = (text, GaussianLatents(data.live), ('text', 'latent'), 0, 0., 0., .1)
    plain = BatchMaker(*of_batches, **knobs)
    joined = BatchMaker(*of_batches, **knobs, t2l_data=Joined(data, extra))
    stage = stage_of('unconditional+l2t+t2l+causal', text, process, 16, data.seq_len)
    texts = {tuple(row.tolist()): (z, name) for name, split in (('dataset', data), ('more', extra))
             for row, z in zip(*split.rows(list(range(len(split)))))}

    found = Counter()
    for step in range(60):
        rows = row_order(len(data), 0, step * 16, 16)
        a, b = plain(data, rows, step, 0, 16, stage), joined(data, rows, step, 0, 16, stage)
        is_t2l = b['mode'] == T2L
        for name in ('mode', 't_text', 't_latent', 'noise', 'positions', 'targets', 'weight'):
            assert torch.equal(a[name], b[name]), name
        for name in ('x_t', 'clean'):
            assert torch.equal(a[name][~is_t2l], b[name][~is_t2l]), name
        for i in is_t2l.nonzero().flatten():
            z, name = texts[tuple(b['x_t'][i].tolist())]               # t2l reads whole texts
            assert torch.equal(b['clean'][i], z), 'the latent is that of the text'
            found[name] += 1
    # in 240 rows each of the 600 texts or so has the same chance
    share = len(extra) / (len(data) + len(extra))
    assert abs(found['more'] / found.total() - share) < 4 * (share * (1 - share) / found.total()) ** .5

    # two processes read what one reads
    halves = [joined(data, rows[i:i + 8], 59, i, 16, stage_of('unconditional+l2t+t2l+causal', text, process, 8, data.seq_len))
              for i in (0, 8)]
    assert sorted(torch.cat([half['x_t'] for half in halves]).tolist()) == sorted(b['x_t'].tolist())


def test_a_run_with_texts_of_its_own_for_t2l_goes_on_bit_for_bit_with_those_only(dataset, more, tmp_path):
    knobs = ['--mode=l2t+t2l', '--max_iters=8', '--save_interval=5', '--keep=9']
    its = f'--t2l_dataset={more}'
    train_each(dataset, {tmp_path / 'whole': [*knobs, its], tmp_path / 'without': knobs})
    assert weights(tmp_path / 'whole').keys() == weights(tmp_path / 'without').keys()
    cut(tmp_path / 'whole', tmp_path / 'cut', 'step-00000005')
    shutil.copytree(tmp_path / 'cut', tmp_path / 'other')
    train_each(dataset, {tmp_path / 'cut': [*knobs, its]})
    whole, resumed = weights(tmp_path / 'whole'), weights(tmp_path / 'cut')
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(not torch.equal(x, weights(tmp_path / 'without')[name]) for name, x in whole.items())
    result = train(dataset, tmp_path / 'other', *knobs)
    assert result.returncode == 2 and 'was trained on another dataset' in result.stderr and 't2l_dataset' in result.stderr


def test_what_t2l_dataset_does_not_go_with_is_one_line(dataset, more, tmp_path):
    lines = tmp_path / 'lines.txt'
    lines.write_text('\n'.join(f'a green bird sings number {i}' for i in range(60)))
    made = run('prepare.py', f'--input={lines}', '--tokenizer=byte', '--max_tokens=31',
               f'--out={tmp_path}/other')
    assert made.returncode == 0, made.stderr
    base = ['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/run', '--preflight_only=true', '--mode=t2l']
    results = run_each([*base, f'--t2l_dataset={tmp_path}/other'], [*base, f'--t2l_dataset={tmp_path}/none'],
                       [*base, f'--t2l_dataset={more}', '--streams=latent'], [*base, f'--t2l_dataset={more}', '--mode=l2t'])
    for (code, _, err), words in zip(results, (f'prepare it with --like={dataset}', 'no dataset in', 'streams=', 'no row of t2l')):
        assert code == 2 and words in err and len(err.splitlines()) == 1, err
