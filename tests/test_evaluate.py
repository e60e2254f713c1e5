""" What evaluate.py reports, against enumeration, and controls that expose a model which ignores
its condition. """
import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evaluate
from base.files import read_sealed
from base.writing import Held, sealed
from corpora import bag
from corpora.words import words
from data import read_meta
from launch import measured, run_each
from runs.results import add_results, find, read_results
from sampling.knobs import SamplingKnobs
from tasks import TASKS, edit, infill, l2t, measures, scorer, sts, t2l, text, unconditional
from tasks.common import Context, Figures, Task, chosen_rows, derangement
from tasks.measures import compare, correlation, describe_texts, retrieval
from tasks.nelbo import latent_mse, nelbo
from toys import (L, TEXTS, V, Known, Network, Toy, as_v, exact_bound, flat, net_of,
                  optimal_denoiser, toy_run)

# ---- statistics

def nelbo_of(table, texts, tokens, seed, batch, pad=99):
    """ Figures of 4 draws, by a network that is a table. """
    ctx = Context(dict(seed=seed, sample_batch=batch), '', texts, tokens)
    return nelbo(toy_run(net_of(Toy(table), pad=pad)), ctx, 4)


def test_nelbo_is_the_enumerated_bound_and_its_standard_error_is_honest():
    p, table = optimal_denoiser()
    exact = exact_bound(p, table, 'count') / L                           # the entropy, per token
    g = torch.Generator().manual_seed(0)
    z = []
    for seed in range(40):
        tokens = TEXTS[torch.multinomial(p, 500, replacement=True, generator=g)]
        r = nelbo_of(table, ['abcd'] * 500, tokens, seed, 128)
        nats, se = r['', 'nats_per_token']
        z.append((nats - exact) / se)
        assert r['', 'perplexity'].value == pytest.approx(math.exp(nats))
        # four bytes, four tokens
        assert r['', 'bits_per_byte'].value == pytest.approx(nats / math.log(2))
    assert abs(np.mean(z)) < 5 / math.sqrt(len(z)) and .5 < np.std(z) < 1.6
    # nats of PAD, 2 here, are in the total, and PAD is not in the divisor: 2 + 1 real tokens
    tokens = torch.tensor([[0, 1, 2, 2], [0, 2, 2, 2]])
    r = nelbo_of(torch.zeros(4 ** L, L, V), ['ab', 'a'], tokens, 0, 8, pad=2)
    assert r['', 'nats_per_token'].value == pytest.approx(2 * L * math.log(V) / 3)


def test_a_figure_is_a_number_a_mean_or_a_ratio_of_sums_and_a_lead_is_of_paired_texts():
    figures = Figures(3)
    x, size = torch.tensor([1., 2, 6]), torch.tensor([1., 2, 3])
    figures.enter('null', {'a': 3, 'b': x, 'c': (x, size), 'd': [4.]})
    error = (x - 1.5 * size).std().item() / 2 / 3 ** .5
    assert flat(figures) == {
        'null/a': 3, 'null/b': 3, 'null/b_se': pytest.approx(x.std().item() / 3 ** .5),
        'null/c': 1.5, 'null/c_se': pytest.approx(error), 'null/d': 4}

    ours, rival = np.array([3., 5, 10]), np.array([1., 4, 6])
    measured_texts = {'': {'a': ours, 'b': 7.0}, 'rival': {'a': rival, 'b': 5.0}}
    figures = Figures(3)
    figures.enter_with_lead(measured_texts, 'rival')
    se = (ours - rival).std(ddof=1) / 3 ** .5
    assert figures['lead', 'a'] == pytest.approx(((2 + 1 + 4) / 3, se))
    assert figures['', 'a'].value == 6 and ('lead', 'b') not in figures


def test_retrieval_finds_the_right_latent_and_ranks_it():
    raw = torch.eye(5)[:, None]
    texts = list('abcde')
    r = retrieval(raw, raw, texts)
    assert r['retrieval@1'].tolist() == [100] * 5
    # every one is nearest to its neighbour, then to itself
    second = torch.eye(5) + 1.5 * torch.eye(5).roll(1, 1)
    r = retrieval(second[:, None], raw, texts)
    assert r['retrieval@1'].sum() == 0
    assert r['retrieval@10'].tolist() == [100] * 5
    r = retrieval(torch.ones(5, 1, 5), raw, texts)                       # all alike: at chance
    assert r['retrieval@1'].tolist() == pytest.approx([20] * 5)


def test_an_equal_text_is_as_right_as_the_source_itself():
    raw = torch.eye(6)[[0, 1, 1, 1, 2, 3]][:, None]
    texts = ['a', 'b', 'b', 'b', 'c', 'd']
    assert retrieval(raw, raw, texts)['retrieval@1'].tolist() == [100] * 6
    # nearest to the third b, then to c; the fourth of them is no b
    found = torch.zeros(6, 1, 6)
    found[:, 0, 1], found[:, 0, 2] = 2, 1
    r = retrieval(found, raw, texts)
    assert r['retrieval@1'].tolist() == [0, 100, 100, 100, 0, 0]
    assert r['cosine'].tolist() == pytest.approx([0, *[2 / 5 ** .5] * 3, 1 / 5 ** .5, 0])

    # all alike: the chance that one of the right ones is among k of n, drawn at random
    n = 20
    texts = ['twice', 'twice', *map(str, range(n - 2))]
    r = retrieval(torch.zeros(n, 1, n), torch.eye(n)[:, None], texts)
    assert r['retrieval@1'].tolist() == pytest.approx([10, 10, *[5] * 18])
    expected = 100 * (1 - math.comb(n - 2, 10) / math.comb(n, 10))
    assert r['retrieval@10'].tolist() == pytest.approx([expected, expected, *[50] * 18])


def test_comparison_scores_copies_full_and_collapsed_embeddings_at_chance():
    sources = ['A dog runs.', 'The cat sits.', 'A red car', 'Two men']
    raw = torch.eye(4)[:, None]
    r = compare(sources, sources, raw, raw)
    for metric in ('bleu', 'f1', 'exact', 'retrieval@1', 'retrieval@10', 'corpus_bleu'):
        assert np.mean(r[metric]) == pytest.approx(100), metric
    r = compare(sources, [''] * 4, raw, torch.zeros(4, 1, 4))
    assert r['retrieval@1'].mean() == pytest.approx(25)
    assert r['bleu'].mean() == 0 and r['exact'].mean() == 0
    r = compare(sources, sources[1:] + sources[:1], raw, raw[[1, 2, 3, 0]])
    assert r['retrieval@1'].mean() == 0 and r['exact'].mean() == 0
    assert measures.word_f1('A dog runs.', 'a DOG sits') == pytest.approx(2 * 2 / 6)
    r = compare(['a dog', 'a cat'], ['A dog', 'a cat'], raw, None)
    assert r['exact'].tolist() == [0, 100], 'to the letter'


def test_words_are_those_of_their_script_whatever_its_normal_form():
    for text, found in (("A dog's 3_x", 'a dog s 3_x'), ('Cafe\u0301', 'caf\u00e9'),
                        ('काल माल है', 'काल माल है'), ('\U0001f600 \u2764\ufe0f', ''),
                        ('iPhone手机3个，好', 'iphone 手 机 3 个 好'), ('한국어 단어', '한국어 단어'),
                        ('ดีครับ', 'ดี ค รั บ')):
        assert words(text) == found.split()

    def scores(text, written):
        r = compare([text], [written], None, None)
        return [r[name][0] for name in ('bleu', 'f1', 'exact')]
    # one character of ten differs: sacreBLEU's own value of 中 characters
    bleu, f1, exact = scores('红色的猫坐在小的桌上。', '红色的猫坐在小的山上。')
    assert bleu == pytest.approx(74.19, abs=.01) and f1 == pytest.approx(1600 / 18) and not exact
    assert scores('काल माल है', 'कील मील हो')[:2] == scores('😀 😃', '😢 😡')[:2] == [0, 0]
    assert scores('a cafe\u0301 in the sun', 'a caf\u00e9 in the sun') == pytest.approx([100] * 3)
    assert edit.replaced('कला कल, Man', 'कल', 'आज') == 'कला आज, Man'


def test_texts_are_described_without_their_ends_and_repetition_is_told_from_variety():
    run = SimpleNamespace(tokenizer=SimpleNamespace(eos=8, pad=9))
    rows = torch.tensor([[1, 2, 8, 9, 9], [9, 1, 9, 2, 8], [1, 2, 3, 4, 5], [8, 1, 2, 9, 9]])
    assert measures.real_ids(run, rows) == [[1, 2], [1, 2], [1, 2, 3, 4, 5], []]

    figures = Figures(2)
    describe_texts(figures, 'dull', ['a b c a b c a b c'] * 2, [[1, 2, 3] * 3] * 2)
    rich = ['a b c d e f g h i', 'j k l m n o p q r']
    describe_texts(figures, 'rich', rich, [list(range(9))] * 2)
    r = flat(figures)
    assert r['dull/repetition'] == pytest.approx(100 * (1 - 3 / 7)) and r['rich/repetition'] == 0
    assert r['dull/entropy'] == pytest.approx(math.log(3)) and r['dull/length'] == 9


def test_a_derangement_leaves_no_one_in_place_and_rows_are_chosen_with_the_seed():
    for n in (2, 3, 100):
        order = derangement(n, 0)
        assert (order != torch.arange(n)).all() and sorted(order.tolist()) == list(range(n))
    with pytest.raises(ValueError, match='at least 2'):
        derangement(1, 0)

    few, more = chosen_rows(100, 10, 1), chosen_rows(100, 20, 1)
    assert more[:10].tolist() == few.tolist() != chosen_rows(100, 10, 2).tolist()
    assert len(set(more.tolist())) == 20


# ---- rivals and controls

class Codebook(Network):
    """ A perfect two-stream network over texts k k EOS PAD with latents on a circle: it reads k off
    its condition, says id 0 and the mean latent without one. """
    n, L, EOS, PAD, MASK = 6, 4, 6, 7, 8
    angles = torch.arange(6) * math.pi / 3
    code = torch.stack([angles.cos(), angles.sin()], 1)                  # (6, 2)
    ends = torch.tensor([[EOS, PAD]]).expand(6, 2)
    texts = torch.cat([torch.arange(6)[:, None].expand(6, 2), ends], 1)

    def __init__(self):
        super().__init__(vocab_size=8, seq_len=self.L)

    def logits_of(self, tokens, z, t_text, t_latent):
        k = torch.where(t_latent == 1, 0, (z[:, 0] @ self.code.T).argmax(1))
        return 9. * F.one_hot(self.texts[k], 8)                          # (B, L, V)

    def latents_of(self, tokens, z, t_text, t_latent):
        named = self.code[tokens[:, 0].clamp(max=5)]
        x0 = torch.where((t_text == 1)[:, None], 0., named)[:, None]
        return as_v(z, x0, t_latent)

    def run(self):
        def decode(ids):
            return ' '.join(f'word{i}' for i in ids if i < 6)
        return toy_run(
            net_of(self, eos=self.EOS, pad=self.PAD), encoder=lambda texts: embed(None, texts),
            tokenizer=SimpleNamespace(eos=self.EOS, pad=self.PAD, kind='bpe', decode=decode),
            stats=SimpleNamespace(standardise=lambda z: z, destandardise=lambda z: z,
                                  mean=torch.zeros(2), live=torch.ones(2)),
            meta={'encoder': dict(normalize=True)})


def embed(run, texts):
    return torch.stack([Codebook.code[int(t.split()[0].removeprefix('word'))] if t
                        else torch.zeros(2) for t in texts])[:, None]


class Latents(list):
    """ A training split of these latents. """
    def raw_latents(self, rows):
        return torch.stack([self[i] for i in rows])


def test_latents_are_described_as_closed_forms_say_and_faults_are_seen(monkeypatch):
    white = torch.randn(2, 500, 2, dtype=torch.float64)
    white = white - white.mean(1, keepdim=True)
    white = white @ torch.linalg.cholesky(white.mT @ white / 499).inverse().mT
    roots = torch.tensor([[[2., 0], [1, 1]], [[1, 0], [-2, 3]]], dtype=torch.float64)
    A, B = C = roots @ roots.mT
    x, y = white @ roots.mT + torch.tensor([[[3.]], [[1.]]])
    r = unconditional.describe_latents(x[:, None], y[:, None])
    # of matrices of 2 x 2: (tr M^1/2)^2 = tr M + 2 (det M)^1/2
    cross = (A @ B).trace() + 2 * (A @ B).det().sqrt()
    assert r['frechet'] / 1000 == pytest.approx(8 + sum(map(torch.trace, C)) - 2 * cross.sqrt())
    assert r['participation'] == pytest.approx(A.trace() ** 2 / (A @ A).trace())

    real, same = torch.randn(2, 300, 1, 4).unbind()
    collapsed, far = real[:1] + .01 * same, same + 9
    found = [unconditional.describe_latents(x, real) for x in (same, collapsed, far)]
    precision, coverage = ([r[name].mean() for r in found] for name in ('precision', 'coverage'))
    assert precision[0] > 80 and coverage[0] > 80
    assert precision[1] == 100 and coverage[1] < 10 and precision[2] == coverage[2] == 0

    monkeypatch.setattr(measures, 'open_split', lambda run, folder, split: Latents(real))
    cosine, row = measures.nearest_training_latents(None, '', 2 * real[290:], block=7)
    assert row.tolist() == list(range(290, 300)) and cosine.tolist() == pytest.approx([1] * 10)


def test_every_task_tells_a_perfect_model_from_its_controls(monkeypatch):
    run, tokens, raw = Codebook().run(), Codebook.texts, Codebook.code[:, None]
    sources = [run.tokenizer.decode(row) for row in tokens.tolist()]
    for module in (measures, unconditional):
        monkeypatch.setattr(module, 'open_split', lambda run, folder, split: Latents(raw))
    monkeypatch.setattr(l2t, 'nearest_training_texts', lambda *args: sources[1:] + sources[:1])
    monkeypatch.setattr(l2t, 'train_texts', lambda *args: iter(sources[:4]))
    monkeypatch.setattr(t2l, 'ridge', lambda run, folder, tokens: raw[[1, 2, 3, 4, 5, 0]])
    knobs = dict(vars(SamplingKnobs(rerank=3)), sample_batch=4, infill_share=1.0,
                 damage='')
    ctx, other = Context(knobs, '', sources, tokens, raw), derangement(6, 0)
    # the mean cosine with the shuffled one
    shared = (raw[other] * raw).sum((1, 2)).mean().item()

    r = flat(l2t.measure(run, ctx))
    assert r['exact'] == r['retrieval@1'] == 100 and r['cosine'] == pytest.approx(1)
    assert r['shuffled/exact'] == 0 and r['shuffled/cosine'] == pytest.approx(shared, abs=1e-6)
    assert r['null/exact'] == pytest.approx(100 / 6) and r['nearest/cosine'] == pytest.approx(.5)
    assert r['n_near'] == 4 and r['lead/exact'] == 100 and r['lead/cosine'] == pytest.approx(.5)

    r = flat(t2l.measure(run, ctx))
    assert r['centred_cosine'] == pytest.approx(1, abs=1e-3)
    assert r['squared_error'] < 1e-6 and r['retrieval@1'] == 100
    assert r['shuffled/cosine'] == pytest.approx(shared, abs=1e-4)
    assert r['null/squared_error'] == pytest.approx(.5) == r['ridge/cosine']

    # on the circle |a - b|^2 / 2 = 1 - a.b
    r = flat(latent_mse(run, tokens, raw, 3, 0, 4))
    assert r['latent_mse'] < 1e-6 and r['null/latent_mse'] == pytest.approx(.5, abs=1e-5)
    assert r['shuffled/latent_mse'] == pytest.approx(1 - shared, abs=1e-5)

    r = flat(infill.measure(run, ctx))
    assert r['token_accuracy'] == r['exact'] == 100 and r['shuffled/token_accuracy'] == 0
    assert r['null/token_accuracy'] == r['null/exact'] == pytest.approx(100 / 6)

    knobs |= dict(steps=4, temperature=0.0)
    for task in (text, unconditional):
        ctx.shown.clear()
        r = flat(task.measure(run, ctx))
        assert r['data/length'] == 2 and len(ctx.shown) == 6
        assert ('coherence' in r) == (task is unconditional)
    # of the last; the training latents are those of the texts
    assert r['data/coherence'] == pytest.approx(1) and r['data/copies'] == 100
    assert r['data/frechet'] < 1e-3 < r['gaussian/frechet']


def test_ridge_recovers_a_linear_code_of_bags(monkeypatch):
    torch.manual_seed(0)
    vocabulary, W = 12, torch.randn(12, 2, 3)
    tokens = torch.randint(0, 9, (2000, 6))                              # 10 is EOS, 11 PAD
    tokens[1900::4, 0] = 9                                   # a token of the last texts alone
    tokens[::2, 4], tokens[::2, 5] = 10, 11                  # every other text has four tokens

    def code(x):
        is_text = (x < 10).float()
        return torch.einsum('nl,nlkd->nkd', is_text / is_text.sum(1, keepdim=True) ** .5, W[x])

    class Data:
        latent_shape, size, eos, pad = (2, 3), 2000, 10, 11

        def __len__(self):
            return self.size

        def rows(self, i):
            return tokens[i], code(tokens[i])
    monkeypatch.setattr(t2l, 'open_split', lambda run, folder, split: Data())
    run = toy_run(net_of(Known(vocab_size=vocabulary), eos=10, pad=11))
    new = torch.randint(0, 10, (50, 6))
    assert torch.allclose(t2l.ridge(run, '', new), code(new), atol=.05)
    monkeypatch.setattr(bag, 'MOST_NUMBERS', 500 * 6)
    monkeypatch.setattr(bag, 'ROWS', 100)
    assert torch.allclose(t2l.ridge(run, '', new), code(new), atol=.1)
    Data.size = 5
    assert t2l.ridge(run, '', new).isfinite().all()


def test_an_edit_asks_for_one_word_and_counts_what_became_of_it_and_of_the_others(monkeypatch):
    words = ['man', 'woman', 'red', 'blue']

    def said(run, texts):
        return torch.tensor([[[1.0 + t.lower().split().count(w) for w in words]] for t in texts])
    for module, name in ((edit, 'encode'), (sys.modules['sampling.inputs'], 'embeddings')):
        monkeypatch.setattr(module, name, said)
    texts = ['A man runs .', 'a man sees a man', 'nobody', 'Red dogs and cats', 'A mankind']
    tokens = torch.arange(5)[:, None]
    ctx = Context({'seed': 0}, texts=texts, tokens=tokens, raw=said(None, texts))
    ctx.prepared = {'person': ['man', 'woman'], 'colour': ['red', 'blue']}
    asked = edit.what_is_asked(None, ctx)
    assert asked.texts == [texts[0], texts[3]] and asked.tokens.tolist() == [[0], [3]]
    assert asked.wanted == ['A woman runs .', 'Blue dogs and cats']
    assert (asked.old, asked.new) == (['man', 'red'], ['woman', 'blue'])
    # 2 1 1 1 + 1 2 1 1 - 2 1 1 1: of its own length
    assert torch.allclose(asked.raw, torch.tensor([[[1., 2, 1, 1]], [[1., 1, 1, 2]]]))

    monkeypatch.setattr(edit, 'pack', lambda run, texts, cut: texts)
    run = SimpleNamespace(nats=lambda texts, raw: torch.zeros(len(texts)))
    for written, *expected in ((asked.wanted, [100, 100], [100, 100], [100, 100]),
                               (asked.texts, [0, 0], [100, 100], [0, 0]),
                               (['A man woman', 'blue dogs'], [0, 100],
                                [50, pytest.approx(100 / 3)], [0, 0])):
        found = edit.compare_edits(run, asked, written)
        assert [list(found[name]) for name in ('carries', 'kept', 'exact')] == expected
    assert edit.compare_edits(run, asked, asked.wanted)['cosine'] == pytest.approx([1, 1])

    for bad in ('a: Red, blue', 'a: light blue, red', 'a: red, red'):
        with pytest.raises(ValueError, match='single words'):
            edit.prepare(SimpleNamespace(meta=dict(encoder='lsa')), dict(classes=bad))


def test_sts_correlates_the_cosine_of_pairs_with_their_scores(monkeypatch):
    n, g = 8, torch.Generator().manual_seed(0)
    scores, vectors = np.arange(8.), F.normalize(torch.randn(2 * n, 1, 4, generator=g), dim=-1)
    monkeypatch.setattr(sts, 'pack', lambda *args, **more: torch.zeros(2 * n, 3))
    monkeypatch.setattr(sts, 'encode', lambda *args: vectors)
    run = toy_run(net_of(Known(seq_len=3)), embed=lambda *args, **more: vectors)
    ctx = Context(vars(SamplingKnobs()), prepared=(['ab'] * n, ['abc'] * n, scores))
    r = flat(sts.measure(run, ctx))
    found = []
    for some in (vectors, vectors[derangement(2 * n, 0)]):
        rank = (some[:n] * some[n:]).sum((1, 2)).argsort().argsort()
        found.append(1 - 6 * (rank - torch.arange(n)).square().sum().item() / (n ** 3 - n))
    assert r['spearman'] == r['encoder/spearman'] == pytest.approx(found[0])
    assert r['n_cut_sentences'] == n and r['shuffled/spearman'] == pytest.approx(found[1])


def test_sentence_pairs_are_read_with_or_without_a_header(tmp_path):
    (tmp_path / 'a.csv').write_text('"A, b",C d,4.5\nE,F,0\n')
    (tmp_path / 'b.tsv').write_text('id\tscore\tsentence1\tsentence2\n1\t4.5\tA, b\tC d\n'
                                    '2\t0\tE\tF\n')
    (tmp_path / 'f.csv').write_text('\ufeffsentence1,sentence2,score\n"A, b",C d,4.5\nE,F,0\n')
    (tmp_path / 'g.csv').write_text('\ufeffA, b;C d;4.5\r\nE;F;0\r\n')
    (tmp_path / 'h.csv').write_text('sep=;\nscore;sentence1;sentence2\n4.5;A, b;C d\n0;E;F\n')
    for name in ('a.csv', 'b.tsv', 'f.csv', 'g.csv', 'h.csv'):
        first, second, scores = sts.read_pairs(str(tmp_path / name))
        assert (first, second, scores.tolist()) == (['A, b', 'E'], ['C d', 'F'], [4.5, 0])
    (tmp_path / 'c.csv').write_text('A,B\n')
    (tmp_path / 'd.csv').write_text('A,B,1\nC,D,nan\n')
    (tmp_path / 'i.csv').write_text('version https://git-lfs.github.com/spec/v1\n')
    (tmp_path / 'e.csv').write_text(f'A,{"B" * 2 ** 18},1\n')
    for name, word in (('c.csv', 'columns'), ('d.csv', 'pair 2'), ('no.csv', 'no such file'),
                       ('e.csv', 'field limit'), ('i.csv', 'Git LFS')):
        with pytest.raises(ValueError, match=word):
            sts.read_pairs(str(tmp_path / name))


def test_a_causal_scorer_reads_the_perplexity_of_texts(tmp_path):
    """ A tiny GPT-2 with a tokenizer of its own, both made here: the loading code is the real
    one. """
    transformers = pytest.importorskip('transformers')
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(['<unk>', 'a', 'b', 'c'])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token='<unk>')
    fast.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=4, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    nats = sum(F.cross_entropy(model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]),
                               reduction='sum').item() for ids in ([1, 2, 3], [3, 3, 3, 0]))
    perplexity = scorer.load_scorer(str(tmp_path), '', 'cpu')
    expected = math.exp(nats / (2 + 3))
    assert perplexity(['a b c', 'c c c z', 'a']) == pytest.approx(expected, rel=1e-4)
    assert math.isnan(perplexity(['a', ''])), 'texts of one token are not perfect'

    # a head that was tied, and is not in the file: drawn at random, it would judge all the same
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(config | dict(tie_word_embeddings=False)))
    scorer.load_scorer.cache_clear()
    with pytest.raises(ValueError, match='1 of its weights are missing, e.g. lm_head.weight'):
        scorer.load_scorer(str(tmp_path), '', 'cpu')


# ---- what is printed, and results.json


def test_the_summary_puts_each_direction_beside_its_controls(capsys):
    figures = dict(nelbo=Figures(9), l2t=Figures(9))
    figures['nelbo']['', 'nats_per_token'] = 3.208, .042
    figures['l2t'] |= {('', 'bleu'): (24.12, 1.36), ('shuffled', 'bleu'): (3.9, None),
                       ('null', 'bleu'): (6.2, None), ('nearest', 'bleu'): (20.0, None),
                       ('lead', 'bleu'): (-.0123, .001), ('diffusion', 'bleu'): (19.1, None)}
    evaluate.print_summary({name: TASKS[name] for name in figures}, figures)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [re.split('  +', line.strip()) for line in lines] == [
        ['in short', 'ours', 'shuffled', 'null', 'rival', 'lead'],
        ['diffusion, nats, a bound', '3.208 ± .042'],
        ['text from embedding, BLEU', '24.1 ± 1.4', '3.9', '6.2', '20.0', '-.0 ± .0'],
        ['by diffusion, greedy', '19.1'], ['rival: nearest (l2t)'],
        ['lead: over the rival, text by text']]


def test_what_is_measured_again_replaces_its_records_and_nothing_else(tmp_path):
    path = str(tmp_path / 'results.json')

    def add(value, task='nelbo', n=100, texts='', point={}, checkpoint='step-1', **knobs):
        add_results(path, [dict(task=task, metric=metric, control='', value=value, se=None, n=n,
                                texts=texts, point=point, knobs=knobs, checkpoint=checkpoint,
                                commit='') for metric in ('a', 'b')])
    different = [dict(), dict(n=20), dict(draws=4), dict(texts='my.txt'), dict(task='t2l'),
                 dict(point=dict(steps=4)), dict(loop=(.5, 1))]
    for value in (1, 2):
        for i, settings in enumerate(different):
            add(10 * value + i, **settings)
    records = read_results(path)
    assert [record['value'] for record in records] == [20 + i for i in range(7) for _ in 'ab']

    # of the most texts, and the last of these
    assert find(records, 'nelbo', 'a')['value'] == 26
    assert find(records, 'nelbo', 'a', point=dict(steps=4))['value'] == 25

    # the points of a sweep are of one checkpoint; a sweep over other knobs is another
    add(31, point=dict(steps=8, rerank=2))
    add(32, point=dict(steps=16), checkpoint='step-2')
    swept = [record for record in read_results(path) if record['point']]
    assert [record['value'] for record in swept] == [31, 31, 32, 32]

    for broken in ('{}', '{"nelbo/n": 8}', '[1]', '[{"task": "l2t"}]', '3',
                   *[json.dumps([records[0] | wrong]) for wrong in (
                       dict(value='high'), dict(point=[]), dict(se='low'), dict(knobs=None))]):
        (tmp_path / 'broken.json').write_text(broken)
        with pytest.raises(ValueError, match='broken.json.*move it away'):
            read_results(tmp_path / 'broken.json')
    (tmp_path / 'large.json').write_text(f'[{"[]," * 2 ** 22}[]]')
    with pytest.raises(ValueError, match='at most'):
        read_results(tmp_path / 'large.json')


# ---- sweeps, and the command line

def test_a_sweep_is_the_product_of_its_knobs_in_their_own_types():
    config = {name: knob.default for name, knob in evaluate.KNOBS.items()}
    product = [dict(sampler=s, steps=k) for s in ('ancestral', 'cached') for k in (2, 4)]
    assert evaluate.read_sweep('sampler=ancestral,cached; steps=2,4', config) == product
    assert evaluate.read_sweep('guidance=0,1.5', config) == [{'guidance': 0.0}, {'guidance': 1.5}]
    for wrong in ('magic=1', 'steps', 'steps=a', 'steps=', 'guidance=nan', 'sampler=fast'):
        with pytest.raises(ValueError, match='sweep'):
            evaluate.read_sweep(wrong, config)


def test_a_record_tells_other_texts(monkeypatch, dataset, tmp_path):
    own = SimpleNamespace(meta=read_meta(dataset))
    assert evaluate.source_of(own, str(dataset)) == ('', {})
    other = SimpleNamespace(meta=json.loads(json.dumps(own.meta)))
    for ending, source in (('latents.npy', ''), ('.npy', str(dataset))):
        for shard in other.meta['splits']['val']['shards']:
            for name, file in shard['files'].items():
                file['sha256'] = 'f' * 64 if name.endswith(ending) else file['sha256']
        assert evaluate.source_of(other, str(dataset))[0] == source
    file = tmp_path / 'own.txt'
    monkeypatch.setattr(evaluate, 'texts', str(file))
    found = [file.write_text(text) and evaluate.source_of(own, '') for text in 'aab']
    assert found[0] == found[1] != found[2] and found[2][0] == str(file)


def test_nothing_is_measured_on_shards_that_are_not_those_of_the_dataset(
        dataset, finished, tmp_path):
    data, out = shutil.copytree(dataset, tmp_path / 'data'), tmp_path / 'run'
    shutil.copytree(finished, out, ignore=shutil.ignore_patterns('results.json'))
    tokens = data / 'val-00000.tokens.bin'
    np.fromfile(tokens, np.uint16)[::-1].tofile(tokens)
    here = [f'--out_dir={out}', f'--dataset={data}']
    commands = [['evaluate.py', *here, '--tasks=nelbo', '--n=8', '--draws=1', '--device=cpu'],
                ['plot.py', *here, '--what=report', f'--save={tmp_path}/report.html'],
                ['prepare.py', f'--export_dir={tmp_path}/old', f'--out={data}']]
    measured, drawn, exported = run_each(*commands)
    for rc, _, err in (measured, exported):
        assert rc == 2 and 'val-00000.tokens.bin: its sha256 is not the one' in err, err
    assert not (out / 'results.json').exists() and not (tmp_path / 'old').exists()
    assert 'val-00000.tokens.bin: its sha256' in (tmp_path / 'report.html').read_text()


def test_figures_of_a_run_that_was_replaced_are_not_recorded(monkeypatch, tmp_path):
    out = tmp_path / 'run'
    out.mkdir()
    ctx = Context({}, held=Held(out))
    shutil.rmtree(out)
    out.mkdir()
    monkeypatch.setattr(evaluate, 'out_dir', str(out))
    run = SimpleNamespace(checkpoint='step-00000001')
    ctx.knobs = dict.fromkeys(('which', 'seed', 'field', 'dtype'))
    task = Task(needs=None, settings=(), measure=None)
    monkeypatch.setattr(evaluate, 'KNOBS',
                        {name: SimpleNamespace(default=None) for name in ctx.knobs})
    with pytest.raises(ValueError, match='run was removed, moved or replaced'):
        evaluate.record_figures(run, ctx, 'nelbo', task, Figures(1))
    assert not list(out.iterdir())


def test_a_run_is_measured_on_its_own_dataset_whatever_a_config_names(dataset, finished, tmp_path):
    """ A config is of a training, perhaps of another one: out/v3 was trained on other texts. """
    out, own = tmp_path / 'run', tmp_path / 'own'
    shutil.copytree(finished, out, ignore=shutil.ignore_patterns('results.json'))
    shutil.copytree(dataset, own)
    config = json.loads((out / 'config.json').read_text())
    for step in out.glob('step-*/training_state.json'):
        state = read_sealed(step)
        state['knobs']['dataset'] = str(own)
        step.write_text(sealed(state))
    (out / 'config.json').write_text(json.dumps(config | dict(dataset=str(own))))
    more = [f'a green dog sits near the park number {i}' for i in range(60)]
    (tmp_path / 'more.txt').write_text('\n'.join(more))
    other = str(tmp_path / 'other')
    (tmp_path / 'of_training.py').write_text(f'dataset = {other!r}\nencoder = "e"')
    measure = ['evaluate.py', f'{tmp_path}/of_training.py', f'--out_dir={out}', '--device=cpu',
               '--tasks=nelbo', '--n=9', '--draws=1']
    results = run_each(
        ['prepare.py', f'--input={tmp_path}/more.txt', f'--same_as={own}', '--val_fraction=.3',
         f'--out={other}'],
        measure, [*measure, f'--dataset={other}'])
    shutil.rmtree(own)                                       # then a config may say where it lies
    results += run_each(measure)
    assert [rc for rc, _, _ in results] == [0] * 4, results
    said = [f'{own} ' in out and f'that of {tmp_path}' in out for _, out, _ in results[1:]]
    assert said == [True, False, False]
    records = read_results(out / 'results.json')
    assert {record['texts'] for record in records} == {'', other}


def test_evaluations_of_other_texts_and_one_text_and_a_sweep_as_commands(finished, tmp_path):
    out = tmp_path / 'run'
    shutil.copytree(finished, out, ignore=shutil.ignore_patterns('results.json'))
    line = 'a red dog runs near the park number 3'
    captions = [json.dumps({'caption': text}) for text in (line, line * 9, 'a old cat sits')]
    (tmp_path / 'one.txt').write_text(line)
    (tmp_path / 'own.jsonl').write_text('\n'.join(captions))
    here = ['evaluate.py', f'--out_dir={out}', '--device=cpu', '--dtype=float32', '--draws=1',
            '--steps=2']
    of_file = [*here, '--tasks=nelbo', '--field=caption']
    good = run_each([*here, '--tasks=nelbo,orders', '--n=8', '--n_orders=3'],
                    [*here, '--tasks=nelbo', '--n=1'],
                    [*of_file, f'--texts={tmp_path}/one.txt'],
                    [*of_file, f'--texts={tmp_path}/own.jsonl'],
                    [*here, '--tasks=l2t', '--n=6', '--sweep=steps=1,2'],
                    [*here, '--tasks=l2t', '--n=6', '--sweep=steps=3'])
    assert [rc for rc, _, _ in good] == [0] * 6, good
    records = read_results(out / 'results.json')
    of_nelbo = {(record['texts'], record['n']) for record in records if record['task'] == 'nelbo'}
    assert of_nelbo == {('', 8), ('', 1), (f'{tmp_path}/one.txt', 1), (f'{tmp_path}/own.jsonl', 2)}
    assert '1 texts skipped' in good[3][2]
    assert {record['knobs']['dtype'] for record in records} == {'float32'}
    points = [record['point'] for record in records if record['metric'] == 'ms']
    assert points == [dict(steps=k) for k in (1, 2, 3)]

    # of one text there is no other, and no standard error
    alone = [record for record in records if record['n'] == 1]
    assert alone and all(record['se'] is None for record in alone)
    assert {record['control'] for record in alone} == {'', 'null'}
    r = measured(out)
    for control in ('', 'shuffled/', 'null/'):
        plain, tighter = (r[f'orders/{control}nats_{name}'] for name in ('plain_bound', 'iw_bound'))
        assert tighter < plain == pytest.approx(r[f'nelbo/{control}nats_per_token'], rel=.2)

    # nothing is computed before all that is named is there
    before = (out / 'results.json').read_text()
    (tmp_path / 'long.txt').write_text(line * 9)
    wrong = [(['--tasks=nelbo,l2t', '--n=1'], 'at least 2'),
             (['--tasks=nelbo', f'--texts={tmp_path}/long.txt'], 'short enough'),
             (['--tasks=text', '--scorer=out/nothing/here'], 'scorer'),
             (['--tasks=nelbo', f'--texts={tmp_path}'], 'folder'),
             (['--tasks=nelbo', '--texts=nowhere.txt'], 'no such file')]
    results = run_each(*([*here, *args] for args, _ in wrong))
    for (rc, _, err), (args, word) in zip(results, wrong):
        errors = [row for row in err.splitlines() if row.startswith('error: ')]
        assert rc == 2 and len(errors) == 1 and word in errors[0], (args, err)
        assert 'Traceback' not in err
    assert (out / 'results.json').read_text() == before


# ---- what is not defined

def test_what_is_not_defined_is_nan_without_a_warning_and_null_in_the_results(tmp_path, recwarn,
                                                                            capsys):
    figures = Figures(0)
    figures.enter('', dict(none=[], ratio=(torch.zeros(3), torch.zeros(3)), one=[2.0]))
    figures['', 'spearman'] = correlation(np.ones(5), np.arange(5.))
    figures['', 'alone'] = correlation(np.ones(1), np.ones(1))
    figures.enter('shuffled', dict(one=[3.0, 5.0], none=[1.0, 2.0], perplexity=math.inf))
    undefined = ['none', 'ratio', 'spearman', 'alone']
    assert all(math.isnan(figures['', name].value) and figures['', name].se is None
               for name in undefined)
    assert measures.perplexity_of(1e6, 1) == math.inf and math.isnan(measures.perplexity_of(0., 0))
    assert measures.entropy([]) == 0 and math.copysign(1, measures.entropy([])) == 1
    assert not recwarn.list

    path = tmp_path / 'results.json'
    same = dict(task='t', n=5, texts='', point={}, knobs={}, checkpoint='', commit=None)
    add_results(path, [dict(metric=metric, control=control, value=value, se=se, **same)
                       for (control, metric), (value, se) in figures.items()])

    def refuse(word):
        raise AssertionError(f'{word} is no JSON')
    json.loads(path.read_text(), parse_constant=refuse)
    records = read_results(path)
    assert [find(records, 't', name)['value'] for name in undefined] == [None] * 4
    assert find(records, 't', 'perplexity', 'shuffled')['value'] is None
    add_results(path, [dict(records[0], value=1.0)])       # beside what is null
    evaluate.print_figures('t', figures, 5)
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith('none')).split()[1:3] == ['undefined',
                                                                                   '1.500']
    cells = evaluate.summary_cells(figures, ['', 'shuffled'], 'none')
    assert cells == ['undefined', '1.500 ± .500']


def test_scores_that_are_all_the_same_stop_sts_in_one_line(tmp_path):
    path = tmp_path / 'same.csv'
    run = toy_run(meta=dict(encoder=dict(id='lsa')))
    for scores, n, words in (([3, 3, 3, 3], None, 'all 4 pairs have the score 3'),
                             ([2.5] * 99 + [1], 4, 'all 4 pairs have the score 2.5')):
        pairs = [f'a red man runs {i},a blue dog sits {i},{x}' for i, x in enumerate(scores)]
        path.write_text('\n'.join(['sentence1,sentence2,score', *pairs]))
        with pytest.raises(ValueError, match=words) as found:
            sts.prepare(run, dict(sts=str(path), n=n, seed=0))
        assert '\n' not in str(found.value)
