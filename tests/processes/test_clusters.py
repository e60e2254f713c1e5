""" Clusters of HDLM, and the baselines as commands: what they do, and what they refuse. """
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data import PackedDataset
from launch import assert_refused, log, measured, run_each, same, train_each, weights
from processes.clusters import cluster_table

OVERLAYS = {'ar': '', 'ar_prefix': '', 'mdlm': '', 'latent_dit': '', 'gidd': '',
            'hdlm': '--clusters=8'}


class Sentences:
    """ One of five subjects, one of five verbs, one of five places, EOS, as PackedDataset has it.
    """
    vocab_size, eos, pad, n_shards = 17, 15, 16, 1

    def __init__(self):
        draw = torch.randint(0, 5, (5000, 3), generator=torch.Generator().manual_seed(0))
        self.words = draw + torch.tensor([0, 5, 10])

    def __len__(self):
        return len(self.words)

    def rows(self, indices):
        words = self.words[torch.as_tensor(list(indices))]
        return F.pad(F.pad(words, (0, 1), value=self.eos), (0, 1), value=self.pad), None

    def shard(self, i):
        return SimpleNamespace(tokens=self.words.flatten().numpy(), offsets=np.arange(0, 15_001, 3),
                               check_ids=lambda tokens: None)


def test_words_that_keep_the_same_company_share_a_cluster():
    which = cluster_table('', Sentences(), 4).tolist()
    assert [len(set(which[i:i + 5])) for i in (0, 5, 10)] == [1, 1, 1]
    assert len(set(which)) == 4 and which[16] == which[15]

    # an EOS that is another id than the last but one
    data = Sentences()
    for data.eos in (2, 12):
        which = cluster_table('', data, 4).tolist()
        assert which[16] == which[data.eos]


@pytest.fixture(scope='module')
def baselines(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp('baselines')
    train_each(dataset, {folder / name: [f'config/{name}.py', more]
                         for name, more in OVERLAYS.items()})
    return folder


def test_clusters_come_from_a_run_and_anything_else_is_one_line(baselines, dataset, tmp_path):
    data, ar = PackedDataset(dataset, 'train'), str(baselines / 'ar')
    assert cluster_table(ar, data, 7).unique().tolist() == list(range(7))
    with pytest.raises(ValueError, match='no run in'):
        cluster_table(str(tmp_path / 'none'), data, 4)
    with pytest.raises(ValueError, match='expected 1 to'):
        cluster_table(ar, data, data.vocab_size)


@pytest.mark.parametrize('name, args', [
    ('ar', '--num_samples=2'), ('mdlm', '--num_samples=2'), ('latent_dit', '--num_samples=2'),
    ('gidd', '--num_samples=2'), ('hdlm', '--num_samples=2'),
    ('hdlm', '--num_samples=2 --watch=true --nucleus=.5'),
    ('ar_prefix', '--text="a red dog runs" --guidance=1.5 --rerank=2'),
    ('ar_prefix', '--text="a red dog runs" --rerank=5'),
    ('ar', '--mode=infill --text="a red [MASK:*]"'),
    ('gidd', '--mode=infill --text="a [MASK] dog" --self_correct=3')])
def test_every_baseline_writes(baselines, name, args):
    steps = {'ar': '', 'ar_prefix': '', 'latent_dit': '--latent_steps=4'}.get(name, '--steps=4')
    (code, out, err), = run_each(f'sample.py --out_dir={baselines}/{name} {args} {steps} '
                                 '--device=cpu --dtype=float32')
    assert code == 0, err
    assert '[MASK]' not in out.split('->')[-1]


@pytest.mark.parametrize('name, args', [
    ('latent_dit', ''), *((name, '--tasks=nelbo,text --scorer=HERE/ar --steps=4')
                          for name in ('ar', 'mdlm', 'hdlm', 'gidd'))])
def test_every_baseline_is_evaluated(baselines, name, args):
    args = args.replace('HERE', str(baselines))
    (code, _, err), = run_each(f'evaluate.py --out_dir={baselines}/{name} {args} --n=6 --draws=2 '
                               '--device=cpu --dtype=float32')
    assert code == 0, err
    if args:
        found = set(measured(baselines / name))
        assert {'text/gen_ppl', 'text/ms'} <= found
        assert name == 'ar' or 'nelbo/nats_per_token' in found


def test_a_run_begun_from_another_keeps_its_clusters(baselines, dataset, tmp_path):
    mixed = '--streams=text,latent --mode=unconditional+l2t+t2l --cond_drop=.3'
    hdlm = 'config/hdlm.py --clusters=8'
    train_each(dataset, {
        tmp_path / 'hdlm': [hdlm, mixed], tmp_path / 'gidd': ['config/gidd.py', mixed],
        tmp_path / 'next': [hdlm, f'--clusters_from={baselines}/ar --init_from={baselines}/hdlm']})
    for name in ('hdlm', 'gidd'):
        assert all(entry.get('skipped', 0) == 0 for entry in log(tmp_path / name).values())
    assert torch.equal(weights(tmp_path / 'next')['cluster_of'],
                       weights(baselines / 'hdlm')['cluster_of'])


def test_a_run_with_clusters_goes_on_bit_for_bit(dataset, tmp_path):
    args, run, whole = 'config/hdlm.py --clusters=8 --min_lr=1', tmp_path / 'a', tmp_path / 'whole'
    train_each(dataset, {run: [args, '--max_iters=4'], whole: [args, '--max_iters=8']})
    train_each(dataset, {run: [args, '--max_iters=8']})
    assert log(run) == log(whole) and same(weights(run), weights(whole))


@pytest.mark.parametrize('args, words', [
    ('config/ar.py --text_process=gidd', 'causal rows'),
    ('--mode=l2t+causal --text_process=atat', 'causal rows'),
    ('--masking=inverse', 'text_process=atat'),
    ('config/hdlm.py --text_loss_weight=uniform', 'bound alone'),
    ('--text_loss_weight=dynamic', 'choose from'),
    ('config/gidd.py --text_schedule=cosine', 'masked text'),
    ('config/gidd.py --streams=latent', 'has no text')])
def test_what_does_not_go_together_in_a_training_is_one_line(dataset, tmp_path, args, words):
    result, = run_each(f'train.py --dataset={dataset} --out_dir={tmp_path}/x {args}')
    assert_refused(result, words)


@pytest.mark.parametrize('script, name, args, words', [
    ('sample.py', 'ar', '--sampler=confidence', 'causal alone'),
    ('sample.py', 'mdlm', '--self_correct=3', 'takes back'),
    ('sample.py', 'hdlm', '--block_size=4', 'masked text'),
    ('evaluate.py', 'ar', '--n=4 --tasks=infill', 'no infill'),
    ('evaluate.py', 'latent_dit', '--n=4 --tasks=unconditional', 'no unconditional'),
    ('evaluate.py', 'mdlm', '--n=4 --scorer=HERE/mdlm', 'left to right')])
def test_what_a_baseline_cannot_do_is_one_line(baselines, script, name, args, words):
    args = args.replace('HERE', str(baselines))
    result, = run_each(f'{script} --out_dir={baselines}/{name} --device=cpu {args}')
    assert_refused(result, words)
