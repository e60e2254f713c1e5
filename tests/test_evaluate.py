""" What evaluate.py reports, against enumeration, and controls that expose a model which ignores its condition. """
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evaluate
import sample
from diffusion import GaussianLatents, MaskedText
from evaluate import name_of_results, read_results, read_sweep, write_results
from model import Model, ModelConfig
from launch import HANGS, ROOT, run_code, run_each
from sampling.knobs import SamplingKnobs
from tasks import common, edit, infill, l2t, scorer, sts, t2l, text, unconditional
from tasks.common import (Context, chosen_rows, compare, correlations, derangement, describe_texts, enter, ranks, retrieval, word_f1)
from tasks.nelbo import latent_mse, nelbo
from tasks.sts import read_pairs
from toys import L, TEXTS, V, Network, Toy, exact_bound, optimal_denoiser


def toy_run(table, pad=99):
    model = Toy(table)
    model.config = SimpleNamespace(streams=('text',))
    return SimpleNamespace(lengths=None, banned=[], model=model, text=MaskedText(V), next_token=None, fills_masks=True,
                           device='cpu', dtype='float32',
                           tokenizer=SimpleNamespace(pad=pad))


def test_nelbo_is_the_enumerated_bound_and_its_standard_error_is_honest():
    p, table = optimal_denoiser()
    exact = exact_bound(p, table, 'count') / L                           # the entropy, per token
    g = torch.Generator().manual_seed(0)
    z = []
    for seed in range(40):
        tokens = TEXTS[torch.multinomial(p, 500, replacement=True, generator=g)]
        r = nelbo(toy_run(table), ['abcd'] * 500, tokens, None, 4, seed, 128)
        z.append((r['nats_per_token'] - exact) / r['nats_per_token_se'])
        assert r['perplexity'] == pytest.approx(math.exp(r['nats_per_token']))
        assert r['bits_per_byte'] == pytest.approx(r['nats_per_token'] / math.log(2))   # four bytes, four tokens
    z = np.array(z)
    assert abs(z.mean()) < 5 / math.sqrt(len(z)) and .5 < z.std() < 1.6, 'the error must be about one standard error'


def test_nats_of_padding_are_in_the_total_and_padding_is_not_in_the_divisor():
    uniform = torch.zeros(4 ** L, L, V)
    tokens = torch.tensor([[0, 1, 2, 2], [0, 2, 2, 2]])                   # 2 is PAD: 2 + 1 real tokens
    r = nelbo(toy_run(uniform, pad=2), ['ab', 'a'], tokens, None, 4, 0, 8)
    assert r['nats_per_token'] == pytest.approx(2 * L * math.log(V) / 3)


def copy_task(mode, read_condition=True, steps=400, objective='v'):
    """ Train a tiny model where latents and text say the same; returns the loss with the right and with a shuffled condition.
    objective='copy': the earlier systems' t2l, a noise prediction at t = 1 only, where the input is the target. """
    torch.manual_seed(0)
    vocabulary, length, dims = 8, 4, 8
    model = Model(ModelConfig(vocab_size=vocabulary, seq_len=length, latent_dim=dims, latent_tokens=2, depth=2, heads=2, width=32))
    text, latent = MaskedText(vocabulary), GaussianLatents(torch.ones(dims))
    code = torch.randn(length, vocabulary, dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def loss_of(B, shuffle):
        tokens = torch.randint(0, vocabulary, (B, length))
        z = code[torch.arange(length), tokens].sum(1, keepdim=True) / 2
        t, zeros = 1e-3 + (1 - 1e-3) * torch.rand(B), torch.zeros(B)
        other = torch.randperm(B) if shuffle else torch.arange(B)
        if mode == 'l2t':
            noisy, mask = text.corrupt(tokens, t, torch.rand(B, length))
            condition = z[other] if read_condition else torch.zeros_like(z)
            weight = (text.bound_weight(t)[:, None] * mask).flatten() / mask.numel()
            hidden, _ = model(noisy, condition, t, zeros, None, ('text',), return_hidden=True)
            return text.loss(hidden.flatten(0, 1), model.text_head.weight, tokens.flatten(), weight)[0]
        if objective == 'copy':
            t = torch.ones(B)
        z_t, e = latent.corrupt(z, t, torch.randn(z.shape))
        condition = tokens[other] if read_condition else torch.zeros_like(tokens)
        _, out = model(condition, z_t, zeros, t, predict=('latent',))
        return latent.loss(out, e if objective == 'copy' else latent.target_of(z, e, t), torch.ones(B))[0]
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(64, False).backward()
        optimizer.step()
    with torch.no_grad():
        return loss_of(4096, False).item(), loss_of(4096, True).item()


def test_an_edit_asks_for_one_word_and_counts_what_became_of_it_and_of_the_others(monkeypatch):
    words = ['man', 'woman', 'red', 'blue']
    said = lambda run, texts: torch.tensor([[[1.0 + t.lower().split().count(w) for w in words]] for t in texts])  # noqa: E731
    for module, name in ((edit, 'embed'), (common, 'encode'), (sys.modules['sampling.inputs'], 'embeddings')):
        monkeypatch.setattr(module, name, said)
    texts = ['A man runs .', 'a man sees a man', 'nobody', 'Red dogs and cats', 'A mankind']
    ctx = Context({'seed': 0}, texts=texts, tokens=torch.arange(5)[:, None], raw=said(None, texts))
    ctx.prepared = {'person': ['man', 'woman'], 'colour': ['red', 'blue']}
    asked = edit.what_is_asked(None, ctx)
    assert asked.texts == [texts[0], texts[3]] and asked.wanted == ['A woman runs .', 'Blue dogs and cats']
    assert (asked.old, asked.new) == (['man', 'red'], ['woman', 'blue']) and asked.tokens.tolist() == [[0], [3]]
    there = torch.tensor([[[1., 2, 1, 1]], [[1., 1, 1, 2]]])             # 2 1 1 1 + 1 2 1 1 - 2 1 1 1: of its own length
    assert torch.allclose(asked.raw, there) and torch.equal(asked.raw_wanted, said(None, asked.wanted))

    monkeypatch.setattr(edit, 'pack', lambda run, texts, cut: texts)
    monkeypatch.setattr(edit, 'nats_per_token', lambda run, tokens, z: torch.zeros(len(tokens)))
    run = SimpleNamespace(stats=SimpleNamespace(standardise=lambda z: z))
    for written, carries, kept, exact in ((asked.wanted, [100, 100], [100, 100], [100, 100]), (asked.texts, [0, 0], [100, 100], [0, 0]),
                                          (['A man woman', 'blue dogs'], [0, 100], [50, pytest.approx(100 / 3)], [0, 0])):
        found = edit.compare(run, asked, written)
        assert [list(found[name]) for name in ('carries', 'kept', 'exact')] == [carries, kept, exact]
    assert edit.compare(run, asked, asked.wanted)['cosine'] == pytest.approx([1, 1])
    for bad in ('a: Red, blue', 'a: light blue, red', 'a: red, red'):
        with pytest.raises(ValueError, match='single words'):
            edit.prepare(SimpleNamespace(meta=dict(encoder='lsa')), dict(classes=bad))
    ctx.texts = texts[1:3]
    with pytest.raises(ValueError, match='classes: 0 of 2 texts'):
        edit.what_is_asked(None, ctx)


@pytest.mark.parametrize('mode', ['l2t', 't2l'])
def test_a_shuffled_condition_costs_a_model_that_reads_it_and_exposes_one_that_does_not(mode):
    right, shuffled = copy_task(mode)
    assert shuffled > 1.5 * right, (right, shuffled)
    right, shuffled = copy_task(mode, read_condition=False, steps=100)
    assert shuffled == pytest.approx(right, rel=.15), 'a model that ignores its condition does not care'


def test_the_earlier_t2l_objective_falls_by_copying_and_the_shuffled_control_exposes_it():
    """ At t = 1 the noised latent is the noise: its loss looks like learning, and the text means nothing to it. """
    right, shuffled = copy_task('t2l', objective='copy')
    assert right < .1, 'it looks solved'
    assert shuffled == pytest.approx(right, rel=.1), 'and another text does as well'
    right, shuffled = copy_task('t2l')
    assert shuffled > 1.5 * right, 'ours pays for the wrong text'


def test_retrieval_finds_the_right_latent_and_ranks_it():
    raw = torch.eye(5)[:, None]
    r = retrieval(raw, raw)
    assert r['retrieval@1'].tolist() == [100] * 5 and r['mrr'].tolist() == [1] * 5
    second = torch.eye(5) + 1.5 * torch.eye(5).roll(1, 1)                # every one is nearest to its neighbour, then to itself
    r = retrieval(second[:, None], raw)
    assert r['retrieval@1'].sum() == 0 and r['mrr'].tolist() == [.5] * 5 and r['retrieval@10'].tolist() == [100] * 5
    r = retrieval(torch.ones(5, 1, 5), raw)                              # all alike: at chance
    assert r['retrieval@1'].tolist() == pytest.approx([20] * 5)
    assert r['mrr'].tolist() == pytest.approx([(1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 5] * 5)


def test_a_figure_is_a_number_a_mean_or_a_ratio_of_sums_with_its_standard_error():
    found = {}
    x, size = torch.tensor([1., 2, 6]), torch.tensor([1., 2, 3])
    enter(found, 'null/', {'a': 3, 'b': x, 'c': (x, size), 'd': [4.]})
    residual = x - 1.5 * size
    assert found == {'null/a': 3, 'null/b': 3, 'null/b_se': pytest.approx(x.std().item() / 3 ** .5), 'null/c': 1.5,
                     'null/c_se': pytest.approx(residual.std().item() / 2 / 3 ** .5), 'null/d': 4}


def test_rank_and_linear_correlation_with_ties():
    assert ranks(np.array([10., 20., 20., 5.])).tolist() == [2, 3.5, 3.5, 1]
    x = np.array([1., 2, 3, 4, 5])
    c = correlations(x, np.exp(x))
    assert c['spearman'] == pytest.approx(1) and .8 < c['pearson'] < .95
    rng = np.random.default_rng(0)
    draws = [correlations(*rng.multivariate_normal([0, 0], [[1, .5], [.5, 1]], 400).T) for _ in range(200)]
    assert np.std([d['pearson'] for d in draws]) == pytest.approx(np.mean([d['pearson_se'] for d in draws]), rel=.25)


def test_sentence_pairs_are_read_with_or_without_a_header(tmp_path):
    (tmp_path / 'a.csv').write_text('"A, b",C d,4.5\nE,F,0\n')
    (tmp_path / 'b.tsv').write_text('pair_ID\tsentence_A\tsentence_B\trelatedness_score\n1\tA, b\tC d\t4.5\n2\tE\tF\t0\n')
    for name in ('a.csv', 'b.tsv'):
        first, second, scores = read_pairs(str(tmp_path / name))
        assert (first, second, scores.tolist()) == (['A, b', 'E'], ['C d', 'F'], [4.5, 0])
    (tmp_path / 'd.csv').write_text('A,B,1\nC,D,nan\n')
    with pytest.raises(ValueError, match='score of pair 2'):
        read_pairs(str(tmp_path / 'd.csv'))
    (tmp_path / 'c.csv').write_text('A,B\n')
    for path, word in ((tmp_path / 'c.csv', 'columns'), (tmp_path / 'nowhere.csv', 'no such file')):
        with pytest.raises(ValueError, match=word):
            read_pairs(str(path))


def test_statistics_are_of_the_text_that_is_read_not_of_its_end():
    run = SimpleNamespace(tokenizer=SimpleNamespace(eos=8, pad=9))
    rows = torch.tensor([[1, 2, 8, 9, 9], [1, 2, 9, 9, 9], [9, 1, 9, 2, 8], [1, 2, 3, 4, 5], [8, 1, 2, 9, 9]])
    assert common.real_ids(run, rows) == [[1, 2], [1, 2], [1, 2], [1, 2, 3, 4, 5], []]


def test_text_statistics_tell_repetition_from_variety():
    dull, rich = {}, {}
    describe_texts(dull, '', ['a b c a b c a b c'] * 2, [[1, 2, 3] * 3] * 2)
    describe_texts(rich, '', ['a b c d e f g h i', 'j k l m n o p q r'], [list(range(9))] * 2)
    assert dull['repetition'] == pytest.approx(100 * (1 - 3 / 7)) and rich['repetition'] == 0
    assert dull['distinct_1'] == pytest.approx(3 / 18) and rich['distinct_1'] == rich['distinct_4'] == 1
    assert dull['entropy'] == pytest.approx(math.log(3)) and rich['entropy'] == pytest.approx(math.log(9))
    assert dull['length'] == 9


def test_ridge_recovers_a_linear_code_of_bags(monkeypatch):
    torch.manual_seed(0)
    vocabulary, W = 12, torch.randn(12, 2, 3)
    tokens = torch.randint(0, 9, (2000, 6))                              # 10 is EOS, 11 PAD
    tokens[1900::4, 0] = 9                                               # a token of the last texts alone
    tokens[::2, 4], tokens[::2, 5] = 10, 11                              # every other text has four tokens

    def code(x):
        is_text = (x < 10).float()
        return torch.einsum('nl,nlkd->nkd', is_text / is_text.sum(1, keepdim=True) ** .5, W[x])

    class Data:
        latent_shape = (2, 3)
        __len__ = lambda self: 2000  # noqa: E731
        rows = lambda self, i: (tokens[i], code(tokens[i]))  # noqa: E731
    monkeypatch.setattr(t2l, 'open_split', lambda run, folder, split: Data())
    run = SimpleNamespace(lengths=None, banned=[], text=MaskedText(vocabulary), next_token=None, fills_masks=True,
                          tokenizer=SimpleNamespace(eos=10, pad=11),
                          meta=dict(encoder=None), stats=SimpleNamespace(destandardise=lambda z: z))
    new = torch.randint(0, 10, (50, 6))
    assert torch.allclose(t2l.ridge(run, '', new), code(new), atol=.05)
    monkeypatch.setattr(t2l, 'MOST_TEXTS', 500)
    assert torch.allclose(t2l.ridge(run, '', new, block=100), code(new), atol=.1)
    monkeypatch.setattr(Data, '__len__', lambda self: 5)
    assert t2l.ridge(run, '', new).isfinite().all()


def test_a_sweep_is_the_product_of_its_knobs_in_their_own_types():
    config = dict(sampler='', steps=0, guidance=1.0, loop=(.5, .1, .9), rerank=1)
    product = [dict(sampler=s, steps=k) for s in ('ancestral', 'cached') for k in (2, 4)]
    assert read_sweep('sampler=ancestral,cached; steps=2,4', config) == product
    assert read_sweep('guidance=0,1.5', config) == [dict(guidance=0.0), dict(guidance=1.5)]
    assert read_sweep('by_importance=false,true', dict(by_importance=False)) == [dict(by_importance=False), dict(by_importance=True)]
    for wrong in ('magic=1', 'steps', 'steps=a', 'loop=1', 'steps=', 'steps=-1', 'guidance=nan', 'sampler=fast'):
        with pytest.raises(ValueError, match='sweep'):
            read_sweep(wrong, config)


def test_a_causal_scorer_reads_the_perplexity_of_texts(tmp_path):
    """ A tiny GPT-2 with a tokenizer of its own, both made here: the loading code is the real one. """
    transformers = pytest.importorskip('transformers')
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(['<unk>', 'a', 'b', 'c'])}, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token='<unk>').save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=4, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    ids = [torch.tensor([[1, 2, 3]]), torch.tensor([[3, 3, 3, 0]])]
    nats = sum(3 - 1 if i.shape[1] == 3 else 3 for i in ids)
    expected = sum(torch.nn.functional.cross_entropy(model(i).logits[0, :-1], i[0, 1:], reduction='sum').item() for i in ids) / nats
    perplexity = scorer.load_scorer(str(tmp_path), '', 'cpu')
    assert perplexity(['a b c', 'c c c z', 'a']) == pytest.approx(math.exp(expected), rel=1e-4)
    assert perplexity(['a', '']) == math.inf, 'texts of one token are not perfect'


def test_a_mistyped_scorer_asks_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer, 'fetch', lambda *args: pytest.fail('the hub was asked'))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'out').mkdir()
    for name in ('out/arr', str(tmp_path / 'nowhere'), 'a/b/c', 'no such'):
        with pytest.raises(ValueError, match='scorer=.*no such folder'):
            scorer.load_scorer(name, '', 'cpu')
    asked = []

    def fetch(*args):
        asked.append(args[:3])
        raise ValueError('the hub did not give it')
    monkeypatch.setattr(scorer, 'fetch', fetch)
    with pytest.raises(ValueError, match='did not give it'):
        scorer.load_scorer('org/name', '', 'cpu')
    assert asked == [('org/name', None, 'scorer')]


# ---- the command line

def test_a_table_is_no_wider_than_the_terminal(capsys):
    controls = ('', 'shuffled/', 'null/', 'nearest/', 'a_longer_control_than_these/')
    figures = {f'{c}{metric}': 1234.5 for c in controls for metric in ('bleu', 'f1')} | {'n': 7, 'mean/cosine': 1.0, 'f1_se': .5}
    for width in (40, 80, 100):
        evaluate.print_table('l2t', figures, width)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width and sum(line.count('1234.500') for line in lines) == 10 and lines[1] == 'l2t: n 7'


# ---- results.json

def test_figures_of_other_settings_never_overwrite(tmp_path):
    path = str(tmp_path / 'results.json')

    def measure(value, task='nelbo', n=100, texts='', keep=False, **settings):
        old = read_results(path)
        name = name_of_results(task, settings, n, texts, old)
        write_results(path, name, {'bound': value, 'n': n}, settings | dict(texts=texts), old, keep)
        return name
    assert measure(1, draws=16) == 'nelbo'
    assert measure(2, draws=16, n=20) == 'nelbo[n=20]'
    assert measure(3, draws=4) == 'nelbo[draws=4]'
    assert measure(4, draws=4, n=20) == 'nelbo[draws=4,n=20]'
    assert measure(5, draws=16, texts='my/own.txt', texts_sha256='a') == 'nelbo[texts=own.txt]'
    assert measure(6, draws=16, texts='their/own.txt', texts_sha256='b') == 'nelbo[texts=own.txt,texts_sha256=b]'
    assert measure(7, 'text', scorer='') == 'text'
    assert measure(8, 'text', scorer='out/ar') == 'text[scorer=out:ar]', 'a / ends the name in a key'
    assert measure(9, 'l2t', loop=(.5, .1, .9)) == measure(10, 'l2t', loop=(.5, .1, .9)) == 'l2t', 'JSON has lists alone'
    found = read_results(path)
    assert [found[f'{name}/bound'] for name in found['meta']] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert measure(11, draws=16) == measure(12, draws=16, n=200) == 'nelbo', 'the same settings, and more texts, replace'
    assert measure(13, draws=16, n=100) == 'nelbo[n=100]'
    found = read_results(path)
    assert (found['nelbo/bound'], found['nelbo[n=20]/bound'], found['nelbo/n']) == (12, 2, 200)


def test_two_writers_of_results_keep_what_the_other_wrote(tmp_path, monkeypatch):
    """ Two evaluations of one run end at once: each reads, adds its task and writes. """
    code = """
import os, sys, time
import evaluate, tasks.nelbo
from tasks.common import Context
evaluate.out_dir, evaluate.order = sys.argv[1], 'first'
read = evaluate.read_results
def slowly(path):
    found = read(path)
    time.sleep(.3)
    return found
evaluate.read_results = slowly
class Run: checkpoint = 'step-1'
knobs = dict(which='best', seed=0, draws=1)
pid = os.fork()
for i in range(3):
    evaluate.record(Run, Context(knobs, texts=['a']), tasks.nelbo, f'{"child" if pid == 0 else "parent"}{i}', {'n': 1})
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""
    result = run_code(code, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert set(read_results(str(tmp_path / 'results.json'))['meta']) == {f'{who}{i}' for who in ('child', 'parent') for i in range(3)}

    # whether it can be written is seen without touching it
    from runs.console import check_writable
    path = tmp_path / 'results.json'
    before = path.stat()
    check_writable(str(path))
    assert path.stat() == before and len(list(tmp_path.iterdir())) == 1
    path.unlink()
    removed = []
    monkeypatch.setattr(os, 'remove', lambda name: removed.append(str(name)) or os.unlink(name))
    check_writable(str(path))
    assert removed and str(path) not in removed and not list(tmp_path.iterdir()), 'another process may write it now'
    with pytest.raises(ValueError, match='no such folder'):
        check_writable(str(tmp_path / 'nowhere/results.json'))
    with pytest.raises(ValueError, match='too long'):
        check_writable(str(tmp_path / ('x' * 300)))


def test_no_output_ends_an_evaluation(finished, tmp_path):
    """ Neither a character that a terminal cannot show, nor a reader that leaves, nor a full disk. Ctrl-C is one line. """
    out = tmp_path / 'run\u2192'
    shutil.copytree(finished, out)
    (out / 'results.json').unlink(missing_ok=True)
    argv = [sys.executable, str(ROOT / 'evaluate.py'), f'--out_dir={out}', '--device=cpu', '--n=4', '--draws=1', '--steps=2', '--tasks=nelbo,l2t']
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONIOENCODING': 'ascii'}

    def evaluate_into(stdout, **kw):
        (out / 'results.json').unlink(missing_ok=True)
        return subprocess.Popen(argv, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, **kw)

    def measured():
        return list(json.loads((out / 'results.json').read_text())['meta'])

    shown = evaluate_into(subprocess.PIPE)
    text, err = shown.communicate(timeout=HANGS)
    assert (shown.returncode, measured()) == (0, ['nelbo', 'l2t']) and r'run\u2192' in text, err

    cut = evaluate_into(subprocess.PIPE)
    cut.stdout.readline()
    cut.stdout.close()
    assert (cut.wait(HANGS), cut.stderr.read(), measured()) == (0, '', ['nelbo', 'l2t'])

    with open('/dev/full', 'w') as full:
        lost = evaluate_into(full)
    assert lost.wait(HANGS) == 5 and lost.stderr.read().count('\n') == 1 and measured() == ['nelbo', 'l2t']

    argv[-1:] = ['--tasks=nelbo', '--draws=100000']
    stopped = evaluate_into(subprocess.PIPE)
    while 'tasks' not in stopped.stdout.readline():        # it has begun
        assert stopped.poll() is None
    stopped.send_signal(signal.SIGINT)
    assert (stopped.wait(HANGS), stopped.stderr.read()) == (130, 'interrupted\n')


def test_a_sweep_warms_up_with_one_draft_of_a_batch_and_then_measures_all_texts(monkeypatch):
    asked = []

    def generate(run, ctx, rows=slice(None), **knobs):
        asked.append((rows, knobs))
        return ctx.texts[rows]
    task = SimpleNamespace(SETTINGS=('rerank', 'steps'), generate=generate, judge=lambda run, ctx, made: {'bleu': 1.0})
    ctx = SimpleNamespace(n=5, texts='abcde', knobs=dict(sample_batch=2))
    points = [dict(rerank=24), dict(rerank=8, steps=3)]
    monkeypatch.setattr(evaluate, 'record', lambda *args: ('sweep', {}))
    evaluate.measure_sweep(SimpleNamespace(), ctx, task, 'sweep', points)
    assert asked == [(slice(2), dict(rerank=1))] + [(slice(None), point) for point in points]


def test_broken_results_name_their_file(tmp_path):
    for text in ('{', '[]', '{"meta": 1}', '{"meta": {"nelbo": 1}}'):
        (tmp_path / 'results.json').write_text(text)
        with pytest.raises(ValueError, match='results.json'):
            read_results(str(tmp_path / 'results.json'))


def test_evaluations_of_other_texts_and_one_text_and_some_pairs_as_commands(finished, tmp_path):
    out = tmp_path / 'run'
    shutil.copytree(finished, out)
    (out / 'results.json').unlink(missing_ok=True)                       # what other tests have measured
    line = 'a red dog runs near the park number 3'
    (tmp_path / 'one.txt').write_text(line)
    (tmp_path / 'own.jsonl').write_text('\n'.join(json.dumps({'caption': text}) for text in (line, line * 9, 'a old cat sits')))
    here = ['evaluate.py', f'--out_dir={out}', '--device=cpu', '--draws=1', '--steps=2']
    good = run_each([*here, '--tasks=nelbo', '--n=9'], [*here, '--tasks=nelbo', '--n=1'],
                    [*here, '--tasks=nelbo', f'--texts={tmp_path}/one.txt'],
                    [*here, '--tasks=nelbo', f'--texts={tmp_path}/own.jsonl', '--field=caption'],
                    [*here, '--tasks=l2t', '--n=6', '--sweep=steps=1,2'], [*here, '--tasks=l2t', '--n=6', '--sweep=steps=3'],
                    ['plot.py', f'--out_dir={out}', '--what=sweep'])
    assert [rc for rc, _, _ in good] == [0] * 7, good
    found = json.loads((out / 'results.json').read_text())
    assert [found[f'{name}/n'] for name in ('nelbo', 'nelbo[n=1]', 'nelbo[texts=one.txt]', 'nelbo[texts=own.jsonl]')] == [9, 1, 1, 2]
    assert 'nelbo/shuffled/nats_per_token' in found and 'nelbo/nats_per_token_se' in found
    for name in ('nelbo[n=1]', 'nelbo[texts=one.txt]'):
        assert found[f'{name}/null/nats_per_token'] > 0
        assert not [key for key in found if key.startswith(f'{name}/') and ('shuffled' in key or key.endswith('_se'))]
    assert 'under nelbo[n=1]/, not under nelbo/' in good[1][1]
    assert found['nelbo[texts=own.jsonl]/n_skipped'] == 1 and 'record 2 (' in good[3][2] and 'n_skipped 1' in good[3][1]
    assert {key.split('/')[1] for key in found if key.startswith('l2t_sweep_steps/s')} == {'steps=1', 'steps=2', 'steps=3'}

    before = (out / 'results.json').read_text()
    (tmp_path / 'long.txt').write_text(line * 9)
    wrong = [(['--tasks=nelbo,l2t', '--n=1'], 'at least 2'), (['--tasks=nelbo', f'--texts={tmp_path}/long.txt'], 'short enough'),
             (['--tasks=text', '--scorer=out/nothing/here'], 'scorer'), (['--tasks=nelbo', f'--texts={tmp_path}'], 'folder'),
             (['--tasks=nelbo', '--texts=nowhere.txt'], 'no such file')]
    for (rc, _, err), (args, word) in zip(run_each(*([*here, *args] for args, _ in wrong)), wrong):
        errors = [row for row in err.splitlines() if row.startswith('error: ')]
        assert rc == 2 and len(errors) == 1 and word in errors[0] and 'Traceback' not in err, (args, err)
    assert (out / 'results.json').read_text() == before, 'nothing is computed before all that is named is there'


def test_the_first_or_random_pairs_and_texts_are_chosen_with_the_seed():
    assert chosen_rows(5, 3, 'first', 0).tolist() == [0, 1, 2] and len(chosen_rows(5, 9, 'random', 0)) == 5
    few, more = chosen_rows(100, 10, 'random', 1), chosen_rows(100, 20, 'random', 1)
    assert more[:10].tolist() == few.tolist() != chosen_rows(100, 10, 'random', 2).tolist() and len(set(more.tolist())) == 20


class Codebook(Network):
    """ A perfect two-stream network over texts k k EOS PAD with latents on a circle: it reads k off its condition, says id 0 and the
    mean latent without one. """
    n, L, EOS, PAD, MASK = 6, 4, 6, 7, 8
    angles = torch.arange(6) * math.pi / 3
    code = torch.stack([angles.cos(), angles.sin()], 1)                  # (6, 2)
    texts = torch.stack([torch.arange(6), torch.arange(6), torch.full((6,), EOS), torch.full((6,), PAD)], 1)

    def __init__(self):
        self.config, self.latent = SimpleNamespace(streams=('text', 'latent'), n_latents=1, latent_dim=2, seq_len=self.L, latent_tokens=1,
                                                   depth=1, width=1), GaussianLatents(torch.ones(2))

    def forward(self, tokens, z, t_text, t_latent, positions=None, predict=('text', 'latent')):
        logits = out = None
        if 'text' in predict:
            k = torch.where(t_latent == 1, 0, (z[:, 0] @ self.code.T).argmax(1))
            logits = 9. * torch.nn.functional.one_hot(self.texts[k], 8)  # (B, L, V)
            logits = logits.flatten(0, 1)[positions]
        if 'latent' in predict:
            x0 = torch.where((t_text == 1)[:, None], 0., self.code[tokens[:, 0].clamp(max=5)])[:, None]
            a, s = (x[:, None, None] for x in self.latent.alpha_sigma(t_latent))
            out = (a * z - x0) / s
        return logits, out

    def run(self):
        tokenizer = SimpleNamespace(eos=self.EOS, pad=self.PAD, decode=lambda ids: ' '.join(f'word{i}' for i in ids if i < 6))
        stats = SimpleNamespace(standardise=lambda z: z, destandardise=lambda z: z, mean=torch.zeros(2), live=torch.ones(2))
        return SimpleNamespace(lengths=None, banned=[], model=self, text=MaskedText(8), next_token=None, fills_masks=True,
                               latent=self.latent, device='cpu',
                               dtype='float32', L=self.L, tokenizer=tokenizer, stats=stats,
                               streams=('text', 'latent'), row_calls=0, out_dir='out/code',
                               meta={'encoder': dict(normalize=True)}, config=dict(mode='unconditional+l2t+t2l'))


def embed(run, texts):
    return torch.stack([Codebook.code[int(t.split()[0].removeprefix('word'))] if t else torch.zeros(2) for t in texts])[:, None]


def test_every_task_tells_a_perfect_model_from_its_controls(monkeypatch):
    run, tokens, raw = Codebook().run(), Codebook.texts, Codebook.code[:, None]
    sources = [run.tokenizer.decode(row) for row in tokens.tolist()]
    monkeypatch.setattr(common, 'encode', embed)
    monkeypatch.setattr(l2t, 'nearest_training_texts', lambda *args: sources[1:] + sources[:1])
    monkeypatch.setattr(l2t, 'train_texts', lambda *args: iter(sources[:4]))
    monkeypatch.setattr(t2l, 'ridge', lambda run, folder, tokens: raw[[1, 2, 3, 4, 5, 0]])
    knobs = dict(vars(SamplingKnobs(sample_batch=4)), seeds=2, infill_share=1.0)
    ctx, other = Context(knobs, '', sources, tokens, raw), derangement(6, 0)
    apart = 1 - (raw[other] * raw).sum((1, 2)).mean().item()             # one minus the mean cosine with the shuffled one
    r = l2t.measure(run, ctx)
    assert r['exact'] == r['retrieval@1'] == 100 and r['cosine'] == pytest.approx(1) and r['mrr'] == 1
    assert r['shuffled/exact'] == 0 and r['shuffled/cosine'] == pytest.approx(1 - apart, abs=1e-6)
    assert r['null/exact'] == pytest.approx(100 / 6) and r['nearest/cosine'] == pytest.approx(.5)
    assert r['n_near'] == 4 and r['lead/exact'] == 100 and r['lead/exact_se'] == 0 and r['lead/cosine'] == pytest.approx(.5)
    r = t2l.measure(run, ctx)
    assert r['centred_cosine'] == pytest.approx(1, abs=1e-4) and r['squared_error'] < 1e-6 and r['retrieval@1'] == 100
    assert r['std_ratio'] == pytest.approx(1, abs=1e-3) and r['cosine_between_draws'] == pytest.approx(1, abs=1e-4)
    assert r['shuffled/cosine'] == pytest.approx(1 - apart, abs=1e-4) and r['shuffled/retrieval@1'] == 0
    assert r['mean/squared_error'] == pytest.approx(.5) and r['ridge/cosine'] == pytest.approx(.5)
    r = latent_mse(run, tokens, raw, 3, 0, 4)
    assert r['latent_mse'] < 1e-6 and r['null/latent_mse'] == pytest.approx(.5, abs=1e-5)
    assert r['shuffled/latent_mse'] == pytest.approx(apart, abs=1e-5)    # |a - b|^2 / 2 = 1 - a.b on the circle
    r = infill.measure(run, ctx)
    assert r['token_accuracy'] == r['exact'] == 100 and r['shuffled/token_accuracy'] == 0
    assert r['null/token_accuracy'] == pytest.approx(100 / 6) and r['null/exact'] == pytest.approx(100 / 6)
    knobs |= dict(steps=4, temperature=0.0)
    for task, has in ((unconditional, True), (text, False)):
        ctx.shown.clear()
        r = task.measure(run, ctx)
        assert r['data/length'] == 2 and r['data/distinct_1'] == .5 and len(ctx.shown) == 6 and ('coherence' in r) == has


def test_the_lead_over_a_rival_is_of_paired_texts():
    ours, rival = np.array([3., 5, 10]), np.array([1., 4, 6])
    found = {}
    common.enter_with_lead(found, {'': {'a': ours, 'b': 7.0}, 'rival/': {'a': rival, 'b': 5.0}}, 'rival/')
    assert found['lead/a'] == pytest.approx((2 + 1 + 4) / 3) and found['lead/a_se'] == pytest.approx((ours - rival).std(ddof=1) / 3 ** .5)
    assert found['a'] == 6 and found['rival/b'] == 5 and 'lead/b' not in found
    without = {}
    common.enter_with_lead(without, {'': {'a': ours}}, 'rival/')
    assert set(without) == {'a', 'a_se'}


def test_pairs_are_clean_whose_words_are_known_and_which_are_no_training_texts(monkeypatch):
    first = ['a dog', 'A dog.', 'a cat', 'a zebra', 'two dogs', 'the cat', 'two cats', 'the dogs']
    second = ['the dog', 'two cats', 'the cat sits', 'a cat', 'a cat', 'two dogs', 'the dog', 'a cat sits']
    scores, training = np.arange(8.), ['A cat sits!', 'The dog', 'two dogs', 'cats', 'the dogs sit', 'a dog, the']
    n = len(first)
    vectors = F.normalize(torch.randn(2 * n, 1, 4), dim=-1)
    monkeypatch.setattr(sts, 'train_texts', lambda *args: iter(training))
    monkeypatch.setattr(sts, 'pack', lambda *args, **more: torch.zeros(2 * n, 3))
    for name in ('make_latents', 'embed'):
        monkeypatch.setattr(sts, name, lambda *args, **more: vectors)
    knobs = dict(vars(SamplingKnobs(sample_batch=4)), seeds=1)
    run = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [0]), L=9)
    r = sts.measure(run, Context(knobs, prepared=(first, second, scores)))
    clean = [1, 2]                   # the others have a zebra, or the texts 'The dog', 'two dogs', 'A cat sits!'
    assert (r['n'], r['n_known'], r['n_clean']) == (8, 7, 2)
    monkeypatch.setattr(sts, 'train_texts', lambda *args: iter([*training, 'the cat sits on a dog']))
    training.remove('two dogs')
    training.append('two dogs sit')
    r = sts.measure(run, Context(knobs, prepared=(first, second, scores)))
    clean += [4, 5]
    cosines = F.cosine_similarity(vectors[:n].flatten(1), vectors[n:].flatten(1)).numpy()[clean]
    assert r['n_clean'] == 4 and r['clean_spearman'] == pytest.approx(correlations(cosines, scores[clean])['spearman'])


def test_near_duplicates_are_those_of_a_jaccard_index_of_four_fifths():
    rng = np.random.default_rng(0)
    texts, others = ([' '.join(rng.choice(list('abcdefgh'), size=rng.integers(0, 9), replace=False)) for _ in range(n)] for n in (200, 12))

    def index(a, b):
        a, b = common.words(a), common.words(b)
        return len(a & b) / len(a | b) if a | b else 0.
    expected = sum(max(index(a, b) for b in others) >= .8 for a in texts)
    assert 20 < expected < 180 and l2t.count_near(texts, iter(others)) == expected


def test_the_summary_puts_each_direction_beside_its_controls(capsys):
    known = evaluate.all_tasks()
    of_l2t = {'bleu': 24.12, 'bleu_se': 1.36, 'shuffled/bleu': 3.9, 'null/bleu': 6.2, 'nearest/bleu': 20.0, 'lead/bleu': 4.12, 'lead/bleu_se': .98,
              'diffusion/bleu': 19.1}
    of_t2l = {'centred_cosine': .9123, 'centred_cosine_se': .0031, 'ridge/centred_cosine': .9, 'lead/centred_cosine': -.0123, 'lead/centred_cosine_se': .001}
    evaluate.print_summary({'l2t': known['l2t'], 't2l': known['t2l']}, {'l2t': of_l2t, 't2l': of_t2l})
    lines = [line.split('  ') for line in capsys.readouterr().out.splitlines() if line]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[:4] == [['in short', 'ours', 'shuffled', 'null', 'rival', 'lead'], ['text from embedding, BLEU', '24.1 ± 1.4', '3.9', '6.2', '20.0', '4.1 ± 1.0'],
                         ['by diffusion, greedy', '19.1'], ['embedding from text, centred', '.912 ± .003', '.900', '-.012 ± .001']]
    assert cells[4] == ['rival: nearest (l2t), ridge (t2l); lead: over it, text by text']
    evaluate.print_summary({'t2l': known['t2l']}, {'t2l': of_t2l})
    assert not capsys.readouterr().out, 'one line is no summary'


def test_a_derangement_leaves_no_one_in_place_and_one_text_cannot_be_shuffled():
    for n in (2, 3, 100):
        order = derangement(n, 0)
        assert (order != torch.arange(n)).all() and order.sort().values.tolist() == list(range(n))
    with pytest.raises(ValueError, match='at least 2'):
        derangement(1, 0)


def test_comparison_scores_copies_full_and_collapsed_embeddings_at_chance():
    sources = ['A dog runs.', 'The cat sits.', 'A red car', 'Two men']
    raw = torch.eye(4)[:, None]
    r = compare(sources, sources, raw, raw)
    assert r['corpus_bleu'] == pytest.approx(100)
    assert all(r[metric].mean() == pytest.approx(100) for metric in ('bleu', 'f1', 'exact', 'retrieval@1', 'retrieval@10'))
    assert r['cosine'].mean() == pytest.approx(1)
    r = compare(sources, [''] * 4, raw, torch.zeros(4, 1, 4))
    assert r['retrieval@1'].mean() == pytest.approx(25) and r['bleu'].mean() == 0 and r['exact'].mean() == 0
    r = compare(sources, sources[1:] + sources[:1], raw, raw[[1, 2, 3, 0]])
    assert r['retrieval@1'].mean() == 0 and r['exact'].mean() == 0
    assert word_f1('A dog runs.', 'a DOG sits') == pytest.approx(2 * 2 / 6) and word_f1('', '') == 1
