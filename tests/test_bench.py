""" bench.py at a tiny shape: every table is printed, and a library that is missing costs its row, not the run. """
import itertools
import json
import os
import random
import re
import subprocess
import sys

import pytest
import torch

from data import PackedDataset
from launch import HANGS, ROOT, run, texts_in
from sample import Run
from tasks.common import chosen_rows

TINY = dict(depth=2, width=32, heads=2, batch=2, length=16, n_latents=1, latent_dim=6, vocab_size=50)
TINY_RUN = ['--depth=1', '--width=32', '--heads=2', '--latent_tokens=1', '--batch_size=8', '--global_batch=16', '--max_iters=4', '--device=cpu',
            '--log_interval=2', '--eval_iters=1', '--warmup_iters=0']


def bench(*args, **env):
    code = f"""
import runpy, sys
sys.argv = ['bench.py', *{list(args)!r}, '--device=cpu', '--threads=1', '--rounds=2', '--seconds=0.05']
from benchmarks import peers
peers.SHAPES['small'] = {TINY!r}
runpy.run_path('bench.py', run_name='__main__')
"""
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
                            env={**os.environ, **env})
    return result.returncode, result.stdout, result.stderr


def run_code(code, *args):
    return subprocess.run([sys.executable, '-c', code, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=HANGS)


def test_step_compares_what_is_there_and_names_what_is_not(tmp_path):
    (tmp_path / 'mmdit.py').write_text("raise ImportError('no mmdit on this machine')")
    rc, out, err = bench('--what=step', '--sides=ours,bert,mmdit', '--settings=as shipped,bfloat16', f'--save={tmp_path}/table.json',
                         PYTHONPATH=str(tmp_path))
    assert rc == 0, err
    rows = {(row['side'], row['setting']): row for row in json.loads((tmp_path / 'table.json').read_text())['rows']}
    assert set(rows) == {('ours', 'bfloat16'), ('bert', 'bfloat16'), ('bert', 'as shipped')}
    assert out.count('no mmdit on this machine') == 2 and out.count('round ') == 2, out
    for row in rows.values():
        assert row['ms'] > 0 and row['flops'] > 0 and row['utilisation'] > 0
        assert row['ratio_least'] <= row['ratio'] <= row['ratio_most']
    assert rows['ours', 'bfloat16']['ratio'] == 1
    assert bench('--what=step', '--sides=nobody')[0] == 2
    rc, _, err = bench('--what=step', '--sides=mmdit', '--settings=bfloat16', PYTHONPATH=str(tmp_path))
    assert rc == 2 and 'no side' in err and 'Traceback' not in err


def test_samplers_print_their_table():
    assert bench('--what=samplers', '--batch_sizes=2', '--rounds=1', '--dtype=bfloat16')[0] == 0
    rc, out, err = bench('--what=samplers', '--batch_sizes=1,2', '--rounds=1')
    assert rc == 0, err
    table = re.findall(r'^(.+), batch (\d) +([\d.]+) ms a text$', out, re.M)
    assert [(side, int(n)) for side, n, _ in table] == [(side, n) for n in (1, 2) for side in ('GPT-2', 'left to right', 'confidence, 16 calls',
                                                                                               'confidence, 2 calls')], out
    assert min(float(ms) for _, _, ms in table) > 0


def test_trainings_take_turns_and_an_unknown_bench_is_refused(dataset):
    line = f'--dataset={dataset} --batch_size=4 --depth=1 --width=32 --heads=1 --latent_tokens=2'
    rc, out, err = bench('--max_iters=20', f'--lines={line} | {line} --optimizer=muon', '--rounds=1')
    assert rc == 0, err
    table = out[out.index('speed, relative to'):]
    assert len(re.findall(r'[\d,]+ +[\d.]+ \([\d.]+, [\d.]+\)', table)) == 2, 'tokens per second, and the ratio to the first'
    rc, out, err = bench('--what=speed')
    assert rc == 2 and "'speed'" in err and err.count('\n') == 1 and 'round 1' not in out


def test_our_configs_train_on_random_data_of_their_shape(tmp_path):
    from benchmarks.random_data import LATENT_DIMS, write_dataset
    rc, out, err = bench('--what=gpu', '--max_iters=4')
    assert rc == 0, err
    table = out[out.index('config  '):].splitlines()[1:]
    assert [line.split()[0] for line in table] == list(LATENT_DIMS) and not re.search(r'\b0 +0\.0', out)
    data = PackedDataset(write_dataset(f'{tmp_path}/data', 50_258, 12, 5, n=20, n_val=4), 'train')
    tokens, latents = data.rows(range(20))
    assert tokens.shape == (20, 12) and latents.shape == (20, 1, 5) and data.vocab_size == 50_258
    assert (tokens[:, -1] == data.eos).all() and tokens[:, :-1].max() > 40_000 and 0.7 < latents.std() < 1.3


BREAKS = """
import json, sys
from contextlib import nullcontext
from unittest.mock import patch
import torch
import model as m
from benchmarks.agreement import SETS, difference, numbers

mask, attention, embed, angles, groups = m.causal_mask, m.attention, m.Model.embed_inputs, m.rotary_angles, m.Model.parameter_groups

def prefix_of(K, L):
    return torch.arange(K + L) < K

def without(name):
    return patch.object(m.Model, 'parameter_groups', lambda self: {**groups(self), name: groups(self)[name][:1]})

breaks = {
    'nothing': nullcontext(),
    'causal rows see the future': patch.object(m, 'causal_mask', lambda K, L: torch.ones(K + L, K + L, dtype=torch.bool)),
    'causal rows see one token ahead': patch.object(
        m, 'causal_mask', lambda K, L: torch.ones(K + L, K + L, dtype=torch.bool).tril(1) | prefix_of(K, L)),
    'the prefix sees the text': patch.object(m, 'causal_mask', lambda K, L: mask(K, L) | prefix_of(K, L)[:, None]),
    'attention returns 0': patch.object(m, 'attention', lambda *of: 0 * attention(*of)),
    'the clock of latents': patch.object(m.Model, 'embed_inputs', lambda self, x, z, t, s: embed(self, x, z, t, 0 * s)),
    'the clock of text': patch.object(m.Model, 'embed_inputs', lambda self, x, z, t, s: embed(self, x, z, 0 * t, s)),
    'rotary positions by one': patch.object(m, 'rotary_angles', lambda L, d: angles(L + 1, d)[1:]),
    'vectors stay': without('vectors'),
    'matrices stay': without('matrices'),
    'embeddings and heads stay': without('embeddings_and_heads')}
found, folder = {}, sys.argv[1]                           # a training changes sys.argv
torch.set_num_threads(1)
right = numbers(folder, [*SETS['four modes'], '--device=cpu', '--dtype=float32'])
for name, broken in breaks.items():
    with broken:
        found[name] = difference(right, numbers(folder, [*SETS['four modes'], '--device=cpu', '--dtype=float32']))[0]
    torch.set_num_threads(2)                               # after the first: another order of sums
bfloat16 = numbers(folder, [*SETS['four modes'], '--device=cpu', '--dtype=bfloat16'])
found['bfloat16'] = difference(*({key: x for key, x in of.items() if key[1] != 'grad_norm'} for of in (right, bfloat16)))[0]
found['bfloat16, gradients too'] = difference(right, bfloat16)[0]
print('FOUND' + json.dumps(found))
"""


def test_a_device_that_computes_something_else_differs_from_the_cpu_and_an_honest_one_does_not(tmp_path):
    """ Each break differs by ten times the tolerance, an honest training by a tenth of it; a gradient in bfloat16 by a third. """
    from benchmarks.agreement import TOLERANCE
    result = run_code(BREAKS, tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.split('FOUND')[1])
    assert found.pop('nothing') < TOLERANCE['float32'] / 10
    assert found.pop('bfloat16') < TOLERANCE['bfloat16'] / 10
    assert found.pop('bfloat16, gradients too') < TOLERANCE['bfloat16'] / 3, '.0129 and .0138 where a CPU has bfloat16 instructions'
    assert min(found.values()) > 10 * TOLERANCE['float32'], found
    for name in ('attention returns 0', 'the clock of latents', 'embeddings and heads stay', 'matrices stay'):
        assert found[name] > TOLERANCE['bfloat16'], name


def test_what_is_not_finite_or_missing_is_a_difference():
    from benchmarks.agreement import difference
    assert difference({(1, 'loss'): 2.0}, {(1, 'loss'): 2.5}) == (.2, 'loss of step 1')
    assert difference({(1, 'loss'): 2.0}, {(1, 'loss'): float('nan')})[0] == float('inf')
    assert difference({(1, 'loss'): 2.0}, {})[0] == difference({}, {})[0] == float('inf')


def test_a_timed_training_that_skips_diverges_or_differs_is_a_row_that_fails_and_exit_code_1():
    """ Three steps without a finite loss; then all of them, which ends train.py; then a card that differs. """
    code = """
import sys, torch
import benchmarks.gpu as gpu
import loss
from types import SimpleNamespace
of_steps, n_bad = loss.Loss.text_loss, [0]

def text_loss(self, hidden, batch):
    found = of_steps(self, hidden, batch)
    n_bad[0] -= 1
    return {**found, 'text_loss': found['text_loss'] * float('nan')} if n_bad[0] >= 0 else found

loss.Loss.text_loss = text_loss
gpu.LATENT_DIMS = {'quickstart': 512}
knobs = SimpleNamespace(device='cpu', max_iters=12)
for bad, wrong in ((0, []), (3, []), (99, []), (0, ['four modes, float32'])):
    gpu.disagreements = lambda *of, **more: list(wrong)
    n_bad[0] = bad
    try:
        gpu.run(knobs)
        print('CODE 0')
    except SystemExit as end:
        print('CODE', end.code)
    torch.set_num_threads(1)
"""
    result = run_code(code)
    first, skipped, stopped, differs = result.stdout.split('CODE')[:4]
    assert result.stdout.split('CODE ')[1:] and [part.split()[0] for part in result.stdout.split('CODE ')[1:]] == ['0', '1', '1', '1'], result
    assert 'FAILED' not in first and 'quickstart eager' in first
    assert '3 steps skipped' in skipped and 'exit code 3' in stopped and 'FAILED' not in differs
    assert '1 rows above failed: four modes, float32' in result.stderr


@pytest.mark.parametrize('side', ['ours', 'bert', 'gpt'])
def test_every_side_learns_from_its_batch(side):
    from benchmarks import peers
    module, loss = peers.build(side, TINY, 'cpu', 'float32')
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    first = loss().item()
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < .8 * first

def test_the_log_has_mfu_where_the_peak_is_known_and_only_there(dataset, tmp_path):
    code = f"""
import runpy, sys
import runs.log
for name, peak in (('unknown', None), ('known', 1e12)):
    runs.log.peak_of = lambda device: peak
    sys.argv = ['train.py', '--dataset={dataset}', f'--out_dir={tmp_path}/' + name, *{TINY_RUN!r}]
    g = runpy.run_path('train.py', run_name='__main__')
print('FLOP', g['stages'][0].flops)
"""
    result = run_code(code)
    assert result.returncode == 0, result.stderr
    entries = {name: [json.loads(line) for line in open(tmp_path / name / 'training_log.jsonl')] for name in ('unknown', 'known')}
    assert not any('mfu' in entry for entry in entries['unknown']) and result.stdout.count(' | MFU ') == 2
    steps = [entry for entry in entries['known'] if 'loss' in entry]
    flops = float(result.stdout.split('FLOP ')[-1])
    for entry in steps:
        seconds_a_step = 8 * 2 * 32 / entry['tokens_per_s']
        assert abs(entry['mfu'] / (flops / seconds_a_step / 1e12) - 1) < 1e-6


def test_only_cards_in_the_table_have_a_peak(monkeypatch):
    from runs import log
    names = {'cuda:0': 'NVIDIA H200', 'cuda:1': 'NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'cuda:2': 'NVIDIA GeForce RTX 4090 Laptop GPU'}
    monkeypatch.setattr('torch.cuda.get_device_name', names.get)
    assert [log.peak_of(device) for device in ('cpu', *names)] == [None, 989e12, None, None]


# a clone of nanoGPT, whose network looks up how likely a character follows another
NANOGPT = '''
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    vocab_size: int = 0

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(config.vocab_size, config.vocab_size))

    def forward(self, ids, targets=None):
        return self.table[ids], None
'''


def test_windows_are_scored_behind_their_first_character_by_nanogpt_and_by_both_kinds_of_run(tmp_path):
    clone, rng = tmp_path / 'clone', random.Random(0)
    for folder in ('data/shakespeare_char', 'out-shakespeare-char'):
        (clone / folder).mkdir(parents=True)
    text = ' '.join(''.join(rng.choices('abcde', k=rng.randint(2, 9))) for _ in range(3000))
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    (clone / 'data/shakespeare_char/input.txt').write_text(text)
    (clone / 'model.py').write_text(NANOGPT)
    torch.save({'model': {'_orig_mod.table': table}, 'model_args': {'vocab_size': 6}}, clone / 'out-shakespeare-char/ckpt.pt')

    # windows of 65 characters, those of validation from the last tenth, one after the other
    windows, decoder, masked = tmp_path / 'windows', tmp_path / 'ar', tmp_path / 'mdlm'
    compare = 'benchmarks/nanogpt.py', f'--folder={clone}', f'--dataset={windows}'
    assert run(*compare, '--windows=true').returncode == 0
    shown = [json.loads(line)['text'] for line in (windows / 'val.jsonl').read_text().splitlines()]
    assert all(len(window) == 65 and window == window.strip() for window in shown)
    places = [text.index(window) for window in shown]
    assert places[0] >= int(.9 * len(text)) and all(b - a >= 65 for a, b in zip(places, places[1:]))

    # two small runs
    data = ['--tokenizer=byte', '--max_tokens=65', '--encoder=none', f'--out={windows}']
    assert run('prepare.py', f'--input={windows}/train.jsonl', f'--val_input={windows}/val.jsonl', *data).returncode == 0
    for config, out in (('config/ar.py', decoder), ('config/mdlm.py', masked)):
        result = run('train.py', config, f'--dataset={windows}', f'--out_dir={out}', *TINY_RUN[:-1], '--max_iters=30')
        assert result.returncode == 0, result.stderr
    result = run(*compare, f'--decoder={decoder}', f'--masked={masked}', '--n=8', '--n_orders=4', '--draws=64', f'--save={tmp_path}/found.json')
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / 'found.json').read_text())

    # nanoGPT: each character given the one before it
    val = PackedDataset(str(windows), 'val')
    rows = chosen_rows(len(val), 8, 'random', 0)
    log_p = table.log_softmax(1)
    texts = texts_in(val)
    pairs = [(' abcde'.index(a), ' abcde'.index(b)) for row in rows for a, b in itertools.pairwise(texts[row])]
    assert len(pairs) == 8 * 64
    assert found['nanoGPT/nats'] == pytest.approx(-sum(log_p[a, b].item() for a, b in pairs) / len(pairs), rel=1e-5)

    # the decoder: all that Run says of a window, without its first character and its EOS
    def nll_of_all(out_dir, tokens, **how):
        """ -log p of all tokens (n, L), read as `tokens`. """
        loaded = Run(str(out_dir), dtype='float32')
        n = len(tokens)
        with torch.inference_mode():
            logits, _ = loaded.model(tokens, None, torch.zeros(n), torch.ones(n), torch.arange(tokens.numel()), predict=('text',), **how)
        right = val.rows(rows)[0].flatten()
        return torch.nn.functional.cross_entropy(logits.float(), right, reduction='none').view(tokens.shape)

    tokens, _ = val.rows(rows)
    nll = nll_of_all(decoder, tokens, n_causal=8)
    assert nll.sum(1).numpy() / 66 == pytest.approx(Run(str(decoder), dtype='float32').nats([texts[row] for row in rows]), rel=1e-5)
    assert found['decoder/nats'] == pytest.approx(nll[:, 1:65].mean().item(), rel=1e-5)
    assert found['decoder/lead'] == pytest.approx(found['decoder/nats'] - found['nanoGPT/nats'], abs=1e-6)

    # the masked run from left to right: the positions before are visible, and so are the first and the EOS
    total = 0
    for i in range(1, 65):
        gaps = tokens.clone()
        gaps[:, i:65] = val.vocab_size
        total += nll_of_all(masked, gaps)[:, i].sum().item()
    assert found['masked, left to right/nats'] == pytest.approx(total / 8 / 64, rel=1e-5)
    orders = [found[f'masked, {name}/nats'] for name in ('iw bound of 4 orders', 'mean of 4 orders', 'the bound')]
    assert orders[0] <= orders[1] + 1e-9 and orders[1] == pytest.approx(orders[2], abs=.05), orders


# a clone of MDLM, whose network is a table: how likely a token is at a position. It notes the texts that its loss sees
MDLM = {'models/dit.py': '''
import flash_attn
import flash_attn.layers.rotary
import omegaconf
import torch

class DIT(torch.nn.Module):
    def __init__(self, config, vocab_size):
        super().__init__()
        size = config.model
        assert (size.hidden_size, size.n_blocks, size.n_heads, size.dropout) == (32, 1, 2, 0)
        self.table = torch.nn.Parameter(torch.zeros(size.length, vocab_size))

    def forward(self, indices, sigma):
        return self.table.expand(len(indices), -1, -1)
''', 'noise_schedule.py': '''
class LogLinearNoise:
    pass
''', 'diffusion.py': '''
import hydra.utils
import lightning as L
import torch
import torchmetrics
from types import SimpleNamespace

import dataloader
import models
import noise_schedule
import utils

class NLL(torchmetrics.aggregation.MeanMetric):
    pass

seen = models.seen = []

class Diffusion(L.LightningModule):
    def forward(self, x, sigma):
        assert self.parameterization == 'subs' and sigma.shape == (len(x),)
        logits = self.backbone(x, sigma) + torch.zeros(())
        return logits.index_fill(2, torch.tensor([self.mask_index]), self.neg_infinity).log_softmax(2)

    def _loss(self, x0, attention_mask):
        assert attention_mask.shape == x0.shape and attention_mask.all()
        seen.append(x0)
        return SimpleNamespace(loss=-self(x0, torch.zeros(len(x0))).gather(2, x0[..., None]).mean())
'''}


def test_mdlm_trains_on_the_rows_of_our_run_and_is_measured_with_its_bound(dataset, tmp_path, monkeypatch):
    from benchmarks import mdlm
    from data import row_order
    from sampling.loading import load_run
    for name, code in MDLM.items():
        (tmp_path / 'clone' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'clone' / name).write_text(code)
    args = ['--streams=text', '--mode=unconditional', '--optimizer=adamw', '--global_batch=8', '--ema_decay=0.5', '--max_iters=40', '--learning_rate=0.1',
            '--warmup_iters=4', '--min_lr=1']
    for name, more in (('ours', []), ('muon', ['--optimizer=muon']), ('other', ['--seed=1'])):
        result = run('train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/{name}', *TINY_RUN, *args, *more)
        assert result.returncode == 0, result.stderr
    code = f"""
import sys
from benchmarks import mdlm
ours, muon, other = {[str(tmp_path / name) for name in ('ours', 'muon', 'other')]!r}
mdlm.folder, mdlm.runs, mdlm.n, mdlm.draws, mdlm.save = {str(tmp_path / 'clone')!r}, f'{{ours}},{{muon}},{{other}}', 30, 64, {str(tmp_path / 'found.json')!r}
mdlm.main()
import torch
table = mdlm.trained(mdlm.load_run(ours, dtype='float32')).diffusion.backbone.table
torch.save(table.detach()[:, :-1].clone(), {str(tmp_path / 'table.pt')!r})
torch.save(torch.stack(sys.modules['models'].seen), {str(tmp_path / 'seen.pt')!r})
"""
    result = run_code(code)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / 'found.json').read_text())

    # the rows of each step are those of train.py
    ours = load_run(str(tmp_path / 'ours'), dtype='float32')
    train = PackedDataset(str(dataset), 'train', ours.L)
    seen = torch.load(tmp_path / 'seen.pt', weights_only=True)
    assert seen.tolist() == [train.rows(row_order(len(train), 0, 8 * step, 8))[0].tolist() for step in range(40)]

    # the averaged table of 40 steps by hand: AdamW, the rate after a warm-up, half of the average stays
    table = torch.zeros(ours.L, ours.tokenizer.vocab_size, requires_grad=True)
    optimizer = torch.optim.AdamW([table], lr=.1, betas=(.9, .95), weight_decay=ours.config['weight_decay'])
    average = None
    for step, x in enumerate(seen):
        optimizer.param_groups[0]['lr'] = .1 * min(1, (step + 1) / 4)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(table.expand(8, -1, -1).mT, x).backward()
        torch.nn.utils.clip_grad_norm_(table, 1.0)
        optimizer.step()
        average = table.detach().clone() if average is None else .5 * average + .5 * table.detach()

    assert torch.allclose(torch.load(tmp_path / 'table.pt', weights_only=True), average, atol=1e-4)

    # of positions that do not see one another the bound is -log p, but for the clocks' spread
    val = PackedDataset(str(dataset), 'val', ours.L)
    tokens, _ = val.rows(chosen_rows(len(val), 30, 'random', 0))
    nats = torch.nn.functional.cross_entropy(average.expand(30, -1, -1).mT, tokens, reduction='none').sum() / (tokens != ours.tokenizer.pad).sum()
    assert found['seed 0/MDLM'] == pytest.approx(nats.item(), rel=.03)
    for name, out in (('adamw', 'ours'), ('muon', 'muon')):
        bound = run('evaluate.py', f'--out_dir={tmp_path}/{out}', '--tasks=nelbo', '--n=30', '--draws=64', '--order=random', '--dtype=float32')
        assert bound.returncode == 0, bound.stderr
        assert found[f'seed 0/{name}'] == pytest.approx(json.loads((tmp_path / out / 'results.json').read_text())['nelbo/nats_per_token'], rel=1e-5)
    for kind in ('seed 0/MDLM', 'seed 1/MDLM', 'seed 0/muon'):
        assert found[f'{kind} less adamw'] == pytest.approx(found[kind] - found[f'{kind[:6]}/adamw'], abs=1e-6)
    of_seeds = [found['seed 0/adamw'], found['seed 1/adamw']]
    assert found['mean/adamw'] == pytest.approx(sum(of_seeds) / 2) and found['mean/muon'] == found['seed 0/muon']
    assert found['mean/adamw_se'] == pytest.approx(abs(of_seeds[0] - of_seeds[1]) / 2)
    assert found['millions of parameters/ours'] == pytest.approx(sum(p.numel() for p in ours.model.parameters()) / 1e6)
    for wrong in ('muon', 'ours,ours', 'ours,muon,muon'):
        with pytest.raises(ValueError, match='of each seed --runs names'):
            mdlm.check_runs([load_run(str(tmp_path / name), dtype='float32') for name in wrong.split(',')])

    # without a clone
    monkeypatch.setattr(mdlm, 'folder', str(tmp_path))
    with pytest.raises(ValueError, match='missing; name a clone of github.com/kuleshov-group/mdlm'):
        mdlm.Theirs(ours.model.config)


def test_what_stands_in_for_flash_attn_is_the_attention_and_the_rotation_of_our_network():
    from benchmarks import mdlm
    import model
    B, L, H, d = 2, 5, 3, 8
    qkv = torch.randn(B, L, 3, H, d, dtype=torch.float64)
    angles = model.rotary_angles(L, d)
    cos, sin = angles.cos(), angles.sin()
    turned = mdlm.rotary(qkv, cos, sin)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    q, k = model.rotate(q, cos, sin), model.rotate(k, cos, sin)
    assert torch.allclose(turned.transpose(1, 3)[:, :, 0], q) and torch.allclose(turned.transpose(1, 3)[:, :, 1], k)
    assert torch.equal(turned[:, :, 2], qkv[:, :, 2])
    for causal, mask in ((False, None), (True, model.causal_mask(0, L))):
        found = mdlm.full_attention(turned.flatten(0, 1), None, L, 0., causal)
        assert torch.allclose(found.unflatten(0, (B, L)), model.attention(q, k, v, mask).transpose(1, 2))
