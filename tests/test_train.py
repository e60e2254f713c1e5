""" train.py as a process: what it learns, logs, resumes and refuses. """
import gc
import json
import os
import re
import shlex
import shutil
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from base.writing import RUN
from data import PackedDataset, Rows, lengths
from diffusion import GaussianLatents, Loss, Losses, MaskedText, Noising, mode_shares
from launch import ROOT, Job, cut, log, run, same, train, train_each, weights
from runs.log import StepLog, statistics, summary
from sampling.run import Run

BOTH = ('text', 'latent')
MIXED = '--mode=unconditional+l2t+t2l'


def refused(result, *words):
    """ Whether a script ended with one line on stderr, with these words in it, and code 2. """
    has_words = all(word in result.stderr for word in words)
    return result.returncode == 2 and result.stderr.count('\n') == 1 and has_words


def weights_at(out, step, kind='model'):
    return load_file(out / f'step-{step:08d}' / f'{kind}.safetensors')


def moved(out, first, last):
    """ Names of the weights that changed between two checkpoints of a run. """
    before, after = weights_at(out, first), weights_at(out, last)
    return {name for name in after if not torch.equal(before[name], after[name])}


@pytest.fixture(scope='module')
def joint(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'joint'
    train_each(dataset, {out: [MIXED, '--max_iters=30 --learning_rate=1e-2']})
    return out


# ---- the last words

@pytest.fixture(scope='module')
def given(tmp_path_factory):
    """ A dataset whose latents were given, nobody knows by what. z.npy in its folder has two. """
    folder = tmp_path_factory.mktemp('given')
    lines = [f'a red dog number {i} runs' for i in range(60)]
    (folder / 'lines.txt').write_text('\n'.join(lines))
    z = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    np.save(folder / 'all.npy', z)
    np.save(folder / 'z.npy', z[:2])
    result = run('prepare.py', f'--input={folder}/lines.txt', f'--latents_from={folder}/all.npy',
                 '--tokenizer=byte', '--val_fraction=.2', f'--out={folder}/packed')
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize('data, args, reads', [
    ('its own', ['--mode=l2t'], '--latents=FILE.npy'), ('lsa', ['--mode=causal'], '--text='),
    ('its own', ['--mode=t2l'], '--text='),
    ('lsa', ['--mode=unconditional', '--text_process=gidd'], '--num_samples='),
    ('lsa', ['--mode=unconditional', '--streams=text'], '--num_samples=')])
def test_a_training_ends_with_commands_that_work_in_this_folder_and_for_this_run(
        dataset, given, tmp_path, data, args, reads):
    packed = dataset if data == 'lsa' else given / 'packed'
    trained = train(packed, tmp_path / 'a run', *args, '--max_iters=2', cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    commands = trained.stdout.splitlines()[-2:]
    assert reads in commands[0]
    for command, script in zip(commands, ('sample.py', 'evaluate.py')):
        command = command.replace('...', 'a red dog').replace('FILE.npy', f'{given}/z.npy')
        _, path, *flags = shlex.split(command)
        assert os.path.realpath(tmp_path / path) == str(ROOT / script)
        few = ['--n=4', '--draws=1', '--latent_steps=2'] if script == 'evaluate.py' else []
        result = run(script, *flags, *few, '--device=cpu', cwd=tmp_path)
        assert result.returncode == 0, (command, result.stderr)


def test_what_a_run_without_an_encoder_reads_is_said(given, tmp_path):
    train_each(given / 'packed', {tmp_path / 'run': ['--max_iters=2']})
    here = [f'--out_dir={tmp_path}/run', '--device=cpu']
    for flags, words in (([], 'mode=l2t reads --latents=FILE.npy'),
                         (['--text=a red dog'], 'give it latents, --latents=FILE.npy')):
        result = run('sample.py', *here, *flags)
        assert refused(result, words) and '--image' not in result.stderr, result.stderr


# ---- knobs, and the machine

def test_a_head_that_is_tied_to_the_embedding_stops_before_the_first_step(dataset, tmp_path):
    """ init_weights would fill both with zeros, and no checkpoint could be saved. """
    tie = '''
import model
init = model.Model.init_weights
def tied(self):
    self.text_head.weight = self.embed.weight
    init(self)
model.Model.init_weights = tied
'''
    job = Job(dataset, tmp_path / 'run', before=tie)
    assert job.wait() == [2]
    assert 'error: text_head.weight is embed.weight, one tensor' in job.err()
    assert job.err().count('\n') == 1 and 'step ' not in job.out()


@pytest.mark.parametrize('args, words', [
    ('--dataset=nowhere', ['data/nowhere, seen from', '(no meta.json): make it with `python ']),
    ('--dtype=float16', ['float16', 'bfloat16 | float32']), ('--mode=l3t', ['l3t', 'l2t']),
    ('--heads=3', ['heads=3']), ('--seq_len=5', ['seq_len 5']),
    ('--optimizer=muon --muon_lr=abc', ['abc']),
    ('--mode=l2t,t2l:3', ["mode='l2t,t2l:3'", 'MODE:STEPS']),
    ('--mode=l2t:50,t2l', ['max_iters=12']),
    ('--length_schedule=8:5,33', ['length_schedule', '33', '32 tokens, or all']),
    ('--length_schedule=8:12,32', ["before '32' add up to 12", 'max_iters=12']),
    ('--length_schedule=8:1.5%,32', ["'8:1.5%,32'"]),
    ('--device=cuda', ["device='cuda'", '--device=cpu']),
    ('--device=cuda:1', ["device='cuda:1'", '--device=cpu']),
    ('--device=gpu', ["device='gpu'", 'choose from auto, cpu, cuda'])])
def test_bad_knobs_end_in_one_line_and_code_2(dataset, tmp_path, args, words):
    result = train(dataset, tmp_path / 'run', args)
    assert refused(result, *words), result.stderr


# ---- what a run learns

@pytest.mark.parametrize('args', [
    '--mode=t2l', '--mode=unconditional --streams=text', '--mode=unconditional --streams=latent',
    '--mode=unconditional --latent_schedule=rf --latent_target=flow',
    '--dtype=bfloat16 --ema_decay=0'])
def test_every_mode_trains_three_steps(dataset, tmp_path, args):
    """ Mixed modes: test_every_training_knob_changes_the_validated_loss. """
    out = tmp_path / 'run'
    train_each(dataset, {out: ['--max_iters=3 --eval_interval=1 --keep=3', args]})
    assert log(out)[3, False]['skipped'] == 0
    assert all(w.isfinite().all() for w in weights(out).values()) and moved(out, 1, 3)


def test_ema_is_the_average_of_the_weights_after_each_step(dataset, tmp_path):
    """ With decay .5 and its warm-up min(.5, (1 + n) / (10 + n)). """
    out = tmp_path / 'run'
    train_each(dataset, {out: ['--eval_interval=1 --keep=20 --ema_decay=0.5']})
    ema = weights_at(out, 1, 'ema')
    for n in range(2, 13):
        now, saved = weights_at(out, n), weights_at(out, n, 'ema')
        d = min(.5, (1 + n) / (10 + n))
        for name in now:
            ema[name] = d * ema[name] + (1 - d) * now[name]
            assert torch.allclose(ema[name], saved[name], atol=1e-6), (n, name)


def test_init_from_begins_where_the_other_run_was_best_and_refuses_another_model(dataset, joint,
                                                                                tmp_path):
    result = train(dataset, tmp_path / 'run', f'--init_from={joint}', MIXED,
                   '--max_iters=1 --learning_rate=1e-12')
    assert result.returncode == 0 and 'begins with the best weights' in result.stdout
    best = (joint / 'best').read_text().strip()
    torch.testing.assert_close(weights(tmp_path / 'run'),
                               load_file(joint / best / 'ema.safetensors'), rtol=1e-5, atol=1e-6)
    other = train(dataset, tmp_path / 'other', f'--init_from={joint}', MIXED, '--width=64')
    none = train(dataset, tmp_path / 'none', f'--init_from={tmp_path}/nowhere')
    assert refused(other, 'width') and refused(none, 'nowhere'), (other.stderr, none.stderr)


# ---- schedules

def test_a_mode_schedule_trains_its_modes_in_turn_and_resumes_bitwise(dataset, tmp_path):
    schedule = ('--mode=t2l:4,l2t:5,unconditional+l2t+t2l --eval_interval=1 --keep=20 '
                '--weight_decay=1 --dropout=0')
    whole, part = tmp_path / 'whole', tmp_path / 'cut'
    train_each(dataset, {whole: [schedule]})
    entries = log(whole)
    for step, mode in ((4, 't2l'), (5, 'l2t'), (9, 'l2t')):
        entry = entries[step, False]
        assert entry['modes'][mode] == 1
        assert ('text_loss' in entry) == (mode == 'l2t') != ('latent_loss' in entry)
    assert all(entries[10, False]['modes'][mode] > 0 for mode in ('unconditional', 'l2t', 't2l'))

    # neither momentum nor decay moves what has no loss
    assert not any(name.startswith('text_head') for name in moved(whole, 1, 4))
    assert not any(name.startswith('latent_head') for name in moved(whole, 4, 9))
    assert any(name.startswith('text_head') for name in moved(whole, 4, 9))
    assert moved(whole, 9, 12) == set(weights(whole))

    # killed in the second stage
    cut(whole, part, 'step-00000006')
    train_each(dataset, {part: [schedule]})
    assert same(weights(part), weights(whole))


def test_a_length_schedule_cuts_the_texts_and_goes_with_a_mode_schedule(dataset, tmp_path):
    result = train(dataset, tmp_path / 'run', '--mode=l2t:6,unconditional+l2t+t2l',
                   '--length_schedule=8:4,all')
    assert result.returncode == 0, result.stderr
    said = re.findall(r'\| (mode .* of \d+ tokens)', result.stdout)
    assert said == ['mode l2t, texts of 8 tokens', 'mode l2t, texts of 32 tokens',
                    'mode unconditional+l2t+t2l, texts of 32 tokens']
    entries = log(tmp_path / 'run')
    assert [entries[step, False]['tokens'] for step in (1, 4, 5, 12)] == [64, 256, 512, 2304]
    n_tokens = lengths(PackedDataset(str(dataset), 'train'))
    n, share = n_tokens[0], (n_tokens >= n_tokens[0]).mean()             # an EOS more does not fit
    cut = train(dataset, tmp_path / 'cut', f'--length_schedule={n}', '--preflight_only=true').stdout
    assert f'{share:.1%} of the texts are cut to {n} ' in cut and 'cut to' not in result.stdout


@pytest.mark.parametrize('mode', ['t2l', 'unconditional', 'unconditional+l2t+t2l'])
def test_latents_are_learned_beside_whole_texts_only(dataset, mode):
    data = PackedDataset(str(dataset), 'train')
    text, latent = MaskedText(data.vocab_size), GaussianLatents(data.live, target='x0')
    L = int(np.median(lengths(data))) + 1                  # about half of the texts fit
    noising = Noising(text, latent, BOTH, t_min=.1)
    short, whole = (noising(Rows(*data.rows(np.arange(64), length=length), length < 32, 0, 0),
                            mode_shares(mode), data) for length in (L, 32))
    fits = torch.from_numpy(lengths(data)[:64] < L)
    assert 8 < fits.sum() < 56
    assert torch.equal(short.row_weight, torch.where(fits, whole.row_weight, 0))
    assert (short.row_weight > 0).any()
    for name in ('mode', 't_text', 't_latent', 'clean', 'noise'):
        assert torch.equal(getattr(short, name), getattr(whole, name)), name
    if 'unconditional' in mode:                            # a text that is cut is learned as text
        cut_rows = (~fits & (short.mode == 0)).nonzero().flatten()
        scored = (short.positions // L)[short.weight > 0]
        assert set(cut_rows.tolist()) & set(scored.tolist())

    # what is logged is per row that has this loss
    error = torch.full((64,), 2.)
    zero = torch.tensor(0.)
    sums = statistics(short, Losses(zero, latent_loss=zero, error=error))
    entry, _ = summary({name: x.tolist() for name, x in sums.items()}, 1)
    assert sums['latent_count'].sum() == (short.row_weight > 0).sum()
    assert set(entry['latent_mse_by_t']) - {None} == {2.}


KNOBS = ['--seed=0', '--cond_drop=0.9', '--latent_weight=3', '--t_min=0.3', '--grad_clip=1e-3',
         '--mode=unconditional+9*l2t+t2l', '--text_schedule=cosine', '--global_batch=16',
         '--seed=1', '--weight_decay=9', '--betas=0.1,0.1', '--learning_rate=0.1', '--min_lr=0.9',
         '--warmup_iters=9', '--ema_decay=0.1', '--text_clock=false --predict_length=false',
         '--mode=l2t:3,unconditional+l2t+t2l', '--text_loss_weight=rdm',
         *(f'--optimizer=muon{more}' for more in ('', ' --muon_lr=0.1', ' --muon_iterations=3')),
         *(f'--latent_{it}' for it in ('schedule=rf', 'target=v', 'target=flow', 'target=eps')),
         *(f'--text_process={it}' for it in (
             'atat', 'atat --masking=proportional', 'atat --masking=inverse --beta=0.1',
             'atat --curriculum=true', 'gidd', 'gidd --gidd_uniform=0.4', 'gidd --gidd_gamma=2',
             'hdlm', 'hdlm --hdlm_gamma=2', 'hdlm --hdlm_xi=0.5'))]


def test_every_training_knob_changes_the_validated_loss_and_no_run_differs_from_itself(dataset,
                                                                                      tmp_path):
    common = f'{MIXED} --max_iters=6 --eval_interval=6'        # 9 steps of warm-up become 3
    runs = {knob: tmp_path / str(i) for i, knob in enumerate(['', *KNOBS])}
    train_each(dataset, {out: [common, knob] for knob, out in runs.items()})
    found = {knob: json.dumps(log(out)[6, True]) for knob, out in runs.items()}
    base = found.pop('')
    unchanged = [knob for knob, entry in found.items() if entry == base]
    assert unchanged == ['--seed=0', '--text_process=atat'], 'importance alone does nothing'
    assert len(set(found.values())) == len(found) - 1, 'two knobs do the same'


def test_a_run_folder_without_a_checkpoint_takes_the_data_of_now(dataset, tmp_path):
    copied = tmp_path / 'run/data/tokenizer.json'
    copied.parent.mkdir(parents=True)
    copied.write_text('of an earlier attempt')
    (tmp_path / 'run/lock').write_text(f'{RUN}\n')
    assert train(dataset, tmp_path / 'run', '--max_iters=2').returncode == 0
    assert copied.read_bytes() == (dataset / 'tokenizer.json').read_bytes()


def test_a_resume_says_which_knobs_are_others(dataset, tmp_path):
    out, lines = tmp_path / 'run', []
    others = '--seed=1 --betas=0.9,0.99 --ema_decay=0.9'
    for args in ('--max_iters=4 --ema_decay=0', f'--max_iters=8 {others}',
                 f'--max_iters=8 {others} --log_interval=2 --eval_interval=2',
                 '--max_iters=12 --ema_decay=0'):
        result = train(dataset, out, '--keep=9', args)
        assert result.returncode == 0, result.stderr
        lines.append(re.findall('^resumed.*', result.stdout, re.MULTILINE))
    assert lines[:3] == [[], ['resumed with other knobs: seed 0 -> 1, max_iters 4 -> 8, ema_decay '
                              '0.0 -> 0.9, betas [0.9, 0.95] -> [0.9, 0.99]'],
                         ['resumed with other knobs: eval_interval 4 -> 2, log_interval 1 -> 2']]

    # an average begins where the run was, and ends with it
    average, now, before = (weights_at(out, step, kind)['blocks.0.text.up.weight']
                            for step, kind in ((8, 'ema'), (8, 'model'), (4, 'model')))
    assert not (out / 'step-00000012/ema.safetensors').exists()
    assert (average - before).norm() < (now - before).norm()


def test_validation_measures_the_same_rows_in_any_batches(dataset, finished):
    """ With the same clocks, masks and noise, and none of them twice. """
    data, net = PackedDataset(str(dataset), 'val'), Run(str(finished), device='cpu').net
    loss = Loss(net.model, Noising(net.text, net.latent, BOTH))
    modes, n = {'unconditional', 't2l', 'causal'}, 17
    assert len(data) > n

    def sums(B, ranks=1):
        # each rank makes as many calls as the first
        n_batches = -(-n // B)
        calls = [i for rank in range(ranks) for i in range(rank, rank + n_batches, ranks)]
        return sum(loss.validate(data, i * B, B, n, BOTH, modes) for i in calls)
    whole = sums(n)
    assert whole[3] == n and (whole > 0).all()
    for B, ranks in ((1, 1), (3, 1), (3, 2), (16, 1), (16, 3), (40, 2)):
        assert torch.allclose(sums(B, ranks), whole, rtol=1e-5), (B, ranks)
    assert loss.validate(data, 40, 8, n, BOTH, modes).tolist() == [0] * 5

    # however many rows are measured, the clocks of their latents are even
    for k in (8, 16):
        clocks = []
        latents = loss.latent.corrupt
        loss.latent.corrupt = lambda z, t, e: clocks.append(t) or latents(z, t, e)
        loss.validate(data, 0, k, k, ('latent',), {'t2l'})
        loss.latent.corrupt = latents
        assert sorted((k * clocks[0]).long().tolist()) == list(range(k))


def test_a_resume_with_other_batches_validates_as_before_and_keeps_the_best_step(dataset, tmp_path):
    args = ('--dropout=0 --eval_interval=2 --keep=9 --global_batch=8 --min_lr=1 --warmup_iters=0 '
            '--learning_rate=.05')
    train_each(dataset, {tmp_path / 'whole': [args]})
    for steps, batch in ((4, 8), (8, 2), (12, 1)):
        result = train(dataset, tmp_path / 'parts', args,
                       f'--batch_size={batch} --max_iters={steps}')
        assert result.returncode == 0 and 'is the best so far' not in result.stdout
    whole, parts = log(tmp_path / 'whole'), log(tmp_path / 'parts')
    steps = [step for step, is_validation in whole if is_validation]
    assert steps == [2, 4, 6, 8, 10, 12]
    for step in steps:
        expected = whole[step, True]
        assert parts[step, True] == {**expected, 'val_text': pytest.approx(expected['val_text'],
                                                                           rel=1e-4)}
    assert (tmp_path / 'parts/best').read_text() == (tmp_path / 'whole/best').read_text()


def test_where_validation_measures_something_else_the_best_step_begins_anew(dataset, tmp_path):
    train_each(dataset, {tmp_path / 'run': [MIXED, '--keep=9 --max_iters=8']})
    worse = f'{MIXED} --keep=9 --max_iters=12 --learning_rate=1 --min_lr=1 --guard=0'
    for changed in ('', '--eval_rows=40', '--seed=3', '--latent_weight=.01'):
        out = shutil.copytree(tmp_path / 'run', tmp_path / f'with{changed}')
        result = train(dataset, out, worse, changed)
        assert result.returncode == 0, result.stderr
        name = changed.partition('=')[0].strip('-')
        said = f'with another {name} the earlier ones do not compare' in result.stdout
        assert said == bool(changed)
        assert (out / 'best').read_text().strip() == f'step-000000{"12" if changed else "08"}'


def test_a_longer_schedule_says_what_the_learning_rate_and_the_stage_become(dataset, tmp_path):
    def lines(out, *args):
        result = train(dataset, out, '--mode=t2l:50%,l2t --learning_rate=.002', *args)
        assert result.returncode == 0, result.stderr
        return re.findall('^at step .*', result.stdout, re.MULTILINE)
    out = tmp_path / 'run'
    assert lines(out) == []
    said, = lines(out, '--max_iters=40')
    assert said.startswith('at step 12 the learning rate goes from 4.89e-05 to 0.00168, and the run'
                           ' goes back from mode l2t, texts of 32 tokens, to mode t2l, texts of 32')
    assert lines(out, '--max_iters=40') == [], 'nothing has changed, and nothing is left to do'
    assert len(lines(out, '--max_iters=41 --eval_interval=50')) == 1


# ---- what a run says of itself

def test_a_compiled_run_compiles_nothing_after_its_first_evaluation(dataset, tmp_path):
    # traced as ever, but without the minute of C++; the evaluation after step 4 is past
    job = Job(dataset, tmp_path / 'run', '--compile=true', before="""
import torch, diffusion
compile, forward, calls = torch.nn.Module.compile, diffusion.Loss.forward, []
torch.nn.Module.compile = lambda *args, **how: compile(*args, backend='eager', **how)
def counted(*args):
    calls.append(1)
    torch._dynamo.config.error_on_recompile = len(calls) > 5
    return forward(*args)
diffusion.Loss.forward = counted
""", after="""
from torch._dynamo.utils import counters
breaks, programs = sum(counters['graph_break'].values()), counters['stats']['unique_graphs']
print('BREAKS', breaks, 'PROGRAMS', programs, 'CALLS', len(calls))
""", env=dict(CXX='/bin/sh'))                               # a compiler is asked for, and not used
    assert job.wait() == [0], job.err()
    found = re.search(r'BREAKS (\d+) PROGRAMS (\d+) CALLS (\d+)', job.out()).groups()
    breaks, programs, calls = map(int, found)
    assert breaks == 0 and programs > 1 and calls == 12


def test_accuracy_and_nats_per_token_do_not_count_padding(dataset):
    """ A batch by hand: every PAD right, of the real tokens none. """
    data = PackedDataset(str(dataset), 'train')
    noising = Noising(MaskedText(data.vocab_size), GaussianLatents(data.live), BOTH)
    rows = Rows(*data.rows(np.arange(8)), False, 0, 0)
    batch = noising(rows, mode_shares('l2t'), data)
    is_pad = batch.targets == data.pad
    assert is_pad.any() and not is_pad.all()
    nll = torch.ones(len(is_pad))
    loss = (batch.weight * nll).sum()

    def entry_of(right):
        sums = statistics(batch, Losses(loss, text_loss=loss, nll=nll, right=right))
        return summary({name: x.tolist() for name, x in sums.items()}, 1)[0]
    entry = entry_of(is_pad)
    assert entry['text_accuracy'] == 0 and entry_of(~is_pad)['text_accuracy'] == 1
    n_real = (rows.tokens != data.pad).sum().item()
    assert n_real < 8 * 32 and entry['text_loss'] == loss.item()
    assert entry['text_nats_per_token'] == pytest.approx(loss.item() * 8 * 32 / n_real)


def test_the_log_keeps_sums_of_micro_batches_and_not_the_batches(dataset, tmp_path):
    data = PackedDataset(str(dataset), 'train')
    noising = Noising(MaskedText(data.vocab_size), GaussianLatents(data.live), BOTH)
    config = dict(mode='l2t', text_process='masked', wandb_project='')
    step_log = StepLog(tmp_path, 'cpu', 1, None, config)
    kept, sums, zero = [], [], torch.zeros(())
    for first in (0, 8):
        rows = Rows(*data.rows(np.arange(first, first + 8)), False, 0, first)
        batch = noising(rows, mode_shares('l2t'), data)
        nll = torch.full((len(batch.targets),), 1. + first)
        losses = Losses(nll.mean(), text_loss=nll.mean(), nll=nll, right=nll > 1)
        step_log.add(batch, losses)
        kept += [weakref.ref(batch), weakref.ref(nll)]
        sums.append(torch.cat(list(statistics(batch, losses).values())))
        del batch, nll, losses
    gc.collect()
    assert [one() for one in kept] == 4 * [None]

    # bad, loss, norm; the loss of each micro-batch; the sums
    step_log.end_step(zero, zero + 10, zero + 2)
    assert torch.equal(step_log.steps[0][:5], torch.tensor([0., 10, 2, 1, 9]))
    assert torch.equal(step_log.steps[0][5:], sums[0] + sums[1])


WANDB = """
import json, os
def note(*call):
    with open(os.environ['CALLS'], 'a') as f:
        f.write(json.dumps(call) + '\\n')
def init(project, name, config):
    note('init', project, name)
def log(entry, step):
    note('log', step, sorted(entry))
"""


def test_what_a_run_needs_is_asked_before_it_begins(dataset, tmp_path):
    env = {**os.environ, 'PATH': '', 'PYTHONPATH': str(ROOT)}
    result = train(dataset, tmp_path / 'run', '--compile=true', env=env)
    assert result.returncode == 4 and result.stderr.count('\n') == 1
    assert 'the C++ compiler g++' in result.stderr and not (tmp_path / 'run').exists()
    old = 'import torch\ntorch.cpu.get_capabilities = dict'       # a CPU
    for dtype, warns in (('bfloat16', True), ('auto', False)):
        job = Job(dataset, tmp_path / 'r', '--preflight_only=true', f'--dtype={dtype}', before=old)
        assert job.wait() == [0] and ('has no bfloat16 instructions' in job.out()) == warns


def test_a_run_logs_to_wandb_where_asked(dataset, tmp_path):
    (tmp_path / 'modules').mkdir()
    (tmp_path / 'modules/wandb.py').write_text(WANDB)
    env = dict(PYTHONPATH=f'{ROOT}:{tmp_path}/modules', CALLS=str(tmp_path / 'calls'))
    job = Job(dataset, tmp_path / 'run', '--wandb_project=captions', '--max_iters=6', env=env)
    assert job.wait() == [0], job.err()
    first, *logged = [json.loads(line) for line in open(tmp_path / 'calls')]
    assert first == ['init', 'captions', 'run']
    logged = [call[1:] for call in logged]
    assert [step for step, keys in logged if 'loss' in keys] == [1, 2, 3, 4, 5, 6]
    assert [step for step, keys in logged if 'val_text' in keys] == [4, 6]

    # and goes on where it does not begin: no key, no network
    (tmp_path / 'modules/wandb.py').write_text('def init(**how):\n    raise RuntimeError("no key")')
    job = Job(dataset, tmp_path / 'other', '--wandb_project=x', '--max_iters=1', env=env)
    assert job.wait() == [0] and 'goes on without wandb: no key' in job.err()
    assert 'evaluate.py --out_dir=' in job.out(), 'what to do next'
