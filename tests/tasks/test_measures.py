""" What the tasks report, against enumeration and closed forms, and controls that expose a model
which ignores its condition. """
import csv
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from corpora import bag
from corpora.words import words
from sampling.knobs import SamplingKnobs
from tasks import edit, infill, l2t, measures, scorer, sts, t2l, text, unconditional
from tasks.common import Context, Figures, chosen_rows, derangement
from tasks.measures import compare, describe_texts, retrieval
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
    assert abs(np.mean(z)) < 5 / math.sqrt(len(z)) and .5 < np.std(z) < 1.6
    assert r['', 'perplexity'].value == pytest.approx(math.exp(nats))
    # four bytes, four tokens
    assert r['', 'bits_per_byte'].value == pytest.approx(nats / math.log(2))

    # nats of PAD, 2 here, are in the total, and PAD is not in the divisor: 2 + 1 real tokens
    tokens = torch.tensor([[0, 1, 2, 2], [0, 2, 2, 2]])
    r = nelbo_of(torch.zeros(4 ** L, L, V), ['ab', 'a'], tokens, 0, 8, pad=2)
    assert r['', 'nats_per_token'].value == pytest.approx(2 * L * math.log(V) / 3)


def test_a_figure_is_a_number_a_mean_or_a_ratio_of_sums_and_a_lead_is_of_paired_texts():
    figures = Figures(3)
    x, size = torch.tensor([1., 2, 6]), torch.tensor([1., 2, 3])
    figures.enter('null', {'a': 3, 'b': x, 'c': (x, size), 'd': [4.]})
    assert flat(figures) == {
        'null/a': 3, 'null/d': 4,
        'null/b': 3, 'null/b_se': pytest.approx(x.std().item() / 3 ** .5),
        'null/c': 1.5, 'null/c_se': pytest.approx((x - 1.5 * size).std().item() / 2 / 3 ** .5)}

    ours, rival = np.array([3., 5, 10]), np.array([1., 4, 6])
    figures = Figures(3)
    figures.enter_with_lead({'': {'a': ours, 'b': 7.0}, 'rival': {'a': rival, 'b': 5.0}}, 'rival')
    se = (ours - rival).std(ddof=1) / 3 ** .5
    assert figures['lead', 'a'] == pytest.approx((7 / 3, se))
    assert figures['', 'a'].value == 6 and ('lead', 'b') not in figures


def test_retrieval_ranks_the_right_latents_of_which_there_may_be_several():
    raw, texts = torch.eye(5)[:, None], list('abcde')
    # every one is nearest to its neighbour, then to itself
    second = torch.eye(5) + 1.5 * torch.eye(5).roll(1, 1)
    r = retrieval(second[:, None], raw, texts)
    assert r['retrieval@1'].sum() == 0
    assert r['retrieval@10'].tolist() == [100] * 5

    # an equal text is as right as the source itself
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

    def mean_of(r, *metrics):
        return [np.mean(r[metric]) for metric in metrics]
    every = ('bleu', 'f1', 'exact', 'retrieval@1', 'retrieval@10', 'corpus_bleu')
    assert mean_of(compare(sources, sources, raw, raw), *every) == pytest.approx([100] * 6)
    collapsed = compare(sources, [''] * 4, raw, torch.zeros(4, 1, 4))
    assert mean_of(collapsed, 'retrieval@1', 'bleu', 'exact') == pytest.approx([25, 0, 0])
    exchanged = compare(sources, sources[1:] + sources[:1], raw, raw[[1, 2, 3, 0]])
    assert mean_of(exchanged, 'retrieval@1', 'exact') == [0, 0]
    assert measures.word_f1('A dog runs.', 'a DOG sits') == pytest.approx(2 * 2 / 6)
    r = compare(['a dog', 'a cat'], ['A dog', 'a cat'], raw, None)
    assert r['exact'].tolist() == [0, 100], 'to the letter'


@pytest.mark.parametrize('text, found', [
    ("A dog's 3_x", 'a dog s 3_x'), ('Cafe\u0301', 'caf\u00e9'), ('काल माल है', 'काल माल है'),
    ('\U0001f600 \u2764\ufe0f', ''), ('iPhone手机3个，好', 'iphone 手 机 3 个 好'),
    ('한국어 단어', '한국어 단어'), ('ดีครับ', 'ดี ค รั บ')])
def test_words_are_those_of_their_script_whatever_its_normal_form(text, found):
    assert words(text) == found.split()


@pytest.mark.parametrize('text, written, bleu, f1, exact', [
    # one character of ten differs: sacreBLEU's own value of 中 characters
    ('红色的猫坐在小的桌上。', '红色的猫坐在小的山上。', 74.19, 1600 / 18, 0),
    ('काल माल है', 'कील मील हो', 0, 0, 0), ('😀 😃', '😢 😡', 0, 0, 0),
    ('a cafe\u0301 in the sun', 'a caf\u00e9 in the sun', 100, 100, 100)])
def test_texts_of_any_script_are_compared_word_by_word(text, written, bleu, f1, exact):
    r = compare([text], [written], None, None)
    assert r['bleu'][0] == pytest.approx(bleu, abs=.01)
    assert r['f1'][0] == pytest.approx(f1) and r['exact'][0] == exact


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
    EOS, PAD = 6, 7
    angles = torch.arange(6) * math.pi / 3
    code = torch.stack([angles.cos(), angles.sin()], 1)                  # (6, 2)
    texts = torch.tensor([[k, k, 6, 7] for k in range(6)])

    def __init__(self):
        super().__init__(vocab_size=8, seq_len=4)

    def logits_of(self, tokens, z, t_text, t_latent):
        k = torch.where(t_latent == 1, 0, (z[:, 0] @ self.code.T).argmax(1))
        return 9. * F.one_hot(self.texts[k], 8)                          # (B, L, V)

    def latents_of(self, tokens, z, t_text, t_latent):
        named = self.code[tokens[:, 0].clamp(max=5)]
        x0 = torch.where((t_text == 1)[:, None], 0., named)[:, None]
        return as_v(z, x0, t_latent)

    def encode(self, texts):
        found = torch.zeros(len(texts), 1, 2)
        for row, text in zip(found, texts):
            if text:
                row[0] = self.code[int(text.split()[0].removeprefix('word'))]
        return found

    def run(self):
        run = toy_run(net_of(self, eos=self.EOS, pad=self.PAD), encoder=self.encode,
                      meta={'encoder': dict(normalize=True)})
        run.tokenizer.decode = lambda ids: ' '.join(f'word{i}' for i in ids if i < 6)
        run.stats.mean, run.stats.live = torch.zeros(2), torch.ones(2)
        return run


class Latents(list):
    """ A training split of these latents. """
    def raw_latents(self, rows):
        return torch.stack([self[i] for i in rows])


def test_latents_are_described_as_closed_forms_say():
    """ Of samples whose mean and covariance are exact. """
    white = torch.randn(2, 500, 2, dtype=torch.float64)
    white = white - white.mean(1, keepdim=True)
    white = white @ torch.linalg.cholesky(white.mT @ white / 499).inverse().mT
    roots = torch.tensor([[[2., 0], [1, 1]], [[1, 0], [-2, 3]]], dtype=torch.float64)
    A, B = roots @ roots.mT
    x, y = white @ roots.mT + torch.tensor([[[3.]], [[1.]]])
    r = unconditional.describe_latents(x[:, None], y[:, None])
    # of matrices of 2 x 2: (tr M^1/2)^2 = tr M + 2 (det M)^1/2
    cross = (A @ B).trace() + 2 * (A @ B).det().sqrt()
    frechet = 8 + A.trace() + B.trace() - 2 * cross.sqrt()
    assert r['frechet'] / 1000 == pytest.approx(frechet)
    assert r['participation'] == pytest.approx(A.trace() ** 2 / (A @ A).trace())


def test_latents_that_collapse_or_are_far_off_are_seen(monkeypatch):
    real, same = torch.randn(2, 300, 1, 4).unbind()

    def precision_and_coverage(x):
        r = unconditional.describe_latents(x, real)
        return r['precision'].mean(), r['coverage'].mean()
    assert min(precision_and_coverage(same)) > 80
    precision, coverage = precision_and_coverage(real[:1] + .01 * same)
    assert precision == 100 and coverage < 10
    assert precision_and_coverage(same + 9) == (0, 0)

    monkeypatch.setattr(measures, 'open_split', lambda run, folder, split: Latents(real))
    cosine, row = measures.nearest_training_latents(None, '', 2 * real[290:], block=7)
    assert row.tolist() == list(range(290, 300)) and cosine.tolist() == pytest.approx([1] * 10)


@pytest.fixture
def perfect(monkeypatch):
    """ The run and the Context of a Codebook, whose rivals read or find the next text. """
    run, tokens, raw = Codebook().run(), Codebook.texts, Codebook.code[:, None]
    sources = [run.tokenizer.decode(row) for row in tokens.tolist()]
    for module in (measures, unconditional):
        monkeypatch.setattr(module, 'open_split', lambda run, folder, split: Latents(raw))
    monkeypatch.setattr(l2t, 'nearest_training_texts', lambda *args: sources[1:] + sources[:1])
    monkeypatch.setattr(l2t, 'train_texts', lambda *args: iter(sources[:4]))
    monkeypatch.setattr(t2l, 'ridge', lambda run, folder, tokens: raw.roll(-1, 0))
    knobs = dict(vars(SamplingKnobs(rerank=3)), sample_batch=4, infill_share=1.0, damage='')
    return run, Context(knobs, '', sources, tokens, raw)


def mean_cosine_with_the_shuffled(raw):
    return (raw[derangement(6, 0)] * raw).sum((1, 2)).mean().item()


def test_text_from_embedding_tells_a_perfect_model_from_its_controls(perfect):
    run, ctx = perfect
    r = flat(l2t.measure(run, ctx))
    assert r['exact'] == r['retrieval@1'] == 100 and r['cosine'] == pytest.approx(1)
    shared = mean_cosine_with_the_shuffled(ctx.raw)
    assert r['shuffled/exact'] == 0 and r['shuffled/cosine'] == pytest.approx(shared, abs=1e-6)
    assert r['null/exact'] == pytest.approx(100 / 6) and r['nearest/cosine'] == pytest.approx(.5)
    assert r['n_near'] == 4 and r['lead/exact'] == 100 and r['lead/cosine'] == pytest.approx(.5)


def test_embedding_from_text_tells_a_perfect_model_from_its_controls(perfect):
    run, ctx = perfect
    r = flat(t2l.measure(run, ctx))
    shared = mean_cosine_with_the_shuffled(ctx.raw)
    assert r['centred_cosine'] == pytest.approx(1, abs=1e-3)
    assert r['squared_error'] < 1e-6 and r['retrieval@1'] == 100
    assert r['shuffled/cosine'] == pytest.approx(shared, abs=1e-4)
    assert r['null/squared_error'] == pytest.approx(.5) == r['ridge/cosine']

    # on the circle |a - b|^2 / 2 = 1 - a.b
    r = flat(latent_mse(run, ctx.tokens, ctx.raw, 3, 0, 4))
    assert r['latent_mse'] < 1e-6 and r['null/latent_mse'] == pytest.approx(.5, abs=1e-5)
    assert r['shuffled/latent_mse'] == pytest.approx(1 - shared, abs=1e-5)


def test_gaps_and_texts_from_noise_tell_a_perfect_model_from_its_controls(perfect):
    run, ctx = perfect
    r = flat(infill.measure(run, ctx))
    assert r['token_accuracy'] == r['exact'] == 100 and r['shuffled/token_accuracy'] == 0
    assert r['null/token_accuracy'] == r['null/exact'] == pytest.approx(100 / 6)

    ctx.knobs |= dict(steps=4, temperature=0.0)
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
    EOS, PAD, W = 10, 11, torch.randn(12, 2, 3)
    tokens = torch.randint(0, 9, (2000, 6))
    tokens[1900::4, 0] = 9                                   # a token of the last texts alone
    tokens[::2, 4], tokens[::2, 5] = EOS, PAD                # every other text has four tokens

    def code(x):
        is_text = (x < EOS).float()
        return torch.einsum('nl,nlkd->nkd', is_text / is_text.sum(1, keepdim=True) ** .5, W[x])

    class Data:
        latent_shape, size, eos, pad = (2, 3), 2000, EOS, PAD

        def __len__(self):
            return self.size

        def rows(self, i):
            return tokens[i], code(tokens[i])
    monkeypatch.setattr(t2l, 'open_split', lambda run, folder, split: Data())
    run = toy_run(net_of(Known(vocab_size=12), eos=EOS, pad=PAD))
    new = torch.randint(0, 10, (50, 6))
    assert torch.allclose(t2l.ridge(run, '', new), code(new), atol=.05)
    monkeypatch.setattr(bag, 'MOST_NUMBERS', 500 * 6)
    monkeypatch.setattr(bag, 'ROWS', 100)
    assert torch.allclose(t2l.ridge(run, '', new), code(new), atol=.1)
    Data.size = 5
    assert t2l.ridge(run, '', new).isfinite().all()


# ---- edits

def counts_of_words(run, texts):
    """ An embedding: how often each of four words is there, and one more. (n, 1, 4) """
    found = torch.ones(len(texts), 1, 4)
    for row, text in zip(found, texts):
        for i, word in enumerate(['man', 'woman', 'red', 'blue']):
            row[0, i] += text.lower().split().count(word)
    return found


@pytest.fixture
def asked(monkeypatch):
    """ What an edit asks for of five texts: three of them do not have just one of the words. """
    for module, name in ((edit, 'encode'), (sys.modules['sampling.inputs'], 'embeddings')):
        monkeypatch.setattr(module, name, counts_of_words)
    texts = ['A man runs .', 'a man sees a man', 'nobody', 'Red dogs and cats', 'A mankind']
    ctx = Context({'seed': 0}, texts=texts, tokens=torch.arange(5)[:, None],
                  raw=counts_of_words(None, texts))
    ctx.prepared = {'person': ['man', 'woman'], 'colour': ['red', 'blue']}
    return edit.what_is_asked(None, ctx)


def test_an_edit_asks_for_one_word_in_the_place_of_another_of_its_class(asked):
    assert asked.texts == ['A man runs .', 'Red dogs and cats']
    assert asked.tokens.tolist() == [[0], [3]]
    assert asked.wanted == ['A woman runs .', 'Blue dogs and cats']
    assert (asked.old, asked.new) == (['man', 'red'], ['woman', 'blue'])
    # 2 1 1 1 + 1 2 1 1 - 2 1 1 1: of its own length
    assert torch.allclose(asked.raw, torch.tensor([[[1., 2, 1, 1]], [[1., 1, 1, 2]]]))
    assert edit.replaced('कला कल, Man', 'कल', 'आज') == 'कला आज, Man'


@pytest.mark.parametrize('bad', ['a: Red, blue', 'a: light blue, red', 'a: red, red'])
def test_classes_of_an_edit_are_single_words(bad):
    with pytest.raises(ValueError, match='single words'):
        edit.prepare(SimpleNamespace(meta=dict(encoder='lsa')), dict(classes=bad))


@pytest.mark.parametrize('written, carries, kept, exact', [
    ('wanted', [100, 100], [100, 100], [100, 100]), ('texts', [0, 0], [100, 100], [0, 0]),
    (['A man woman', 'blue dogs'], [0, 100], [50, 100 / 3], [0, 0])])
def test_an_edit_counts_what_became_of_the_word_and_of_the_others(
        asked, written, carries, kept, exact):
    run = SimpleNamespace(nats=lambda texts, raw: torch.zeros(len(texts)))
    written = getattr(asked, written) if isinstance(written, str) else written
    found = edit.compare_edits(run, asked, written)
    assert list(found['carries']) == carries and list(found['kept']) == pytest.approx(kept)
    assert list(found['exact']) == exact
    if written is asked.wanted:
        assert found['cosine'] == pytest.approx([1, 1])


# ---- sentence pairs, and a scorer

def test_sts_correlates_the_cosine_of_pairs_with_their_scores(monkeypatch):
    n, g = 8, torch.Generator().manual_seed(0)
    vectors = F.normalize(torch.randn(2 * n, 1, 4, generator=g), dim=-1)
    monkeypatch.setattr(sts, 'pack', lambda *args, **more: torch.zeros(2 * n, 3))
    monkeypatch.setattr(sts, 'encode', lambda *args: vectors)
    run = toy_run(net_of(Known(seq_len=3)), embed=lambda *args, **more: vectors)
    ctx = Context(vars(SamplingKnobs()), prepared=(['ab'] * n, ['abc'] * n, np.arange(8.)))

    def spearman(vectors):
        rank = (vectors[:n] * vectors[n:]).sum((1, 2)).argsort().argsort()
        return 1 - 6 * (rank - torch.arange(n)).square().sum().item() / (n ** 3 - n)
    r = flat(sts.measure(run, ctx))
    assert r['spearman'] == r['encoder/spearman'] == pytest.approx(spearman(vectors))
    assert r['n_cut_sentences'] == n
    shuffled = vectors[derangement(2 * n, 0)]
    assert r['shuffled/spearman'] == pytest.approx(spearman(shuffled))


@pytest.mark.parametrize('name, content', [
    ('a.csv', '"A, b",C d,4.5\nE,F,0\n'),
    ('b.tsv', 'id\tscore\tsentence1\tsentence2\n1\t4.5\tA, b\tC d\n2\t0\tE\tF\n'),
    ('c.csv', '\ufeffsentence1,sentence2,score\n"A, b",C d,4.5\nE,F,0\n'),
    ('d.csv', '\ufeffA, b;C d;4.5\r\nE;F;0\r\n'),
    ('e.csv', 'sep=;\nscore;sentence1;sentence2\n4.5;A, b;C d\n0;E;F\n')])
def test_sentence_pairs_are_read_with_or_without_a_header(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    first, second, scores = sts.read_pairs(str(tmp_path / name))
    assert (first, second, scores.tolist()) == (['A, b', 'E'], ['C d', 'F'], [4.5, 0])


@pytest.mark.parametrize('content, words', [
    ('A,B\n', 'columns'), ('A,B,1\nC,D,nan\n', 'pair 2'), (None, 'no such file'),
    ('version https://git-lfs.github.com/spec/v1\n', 'Git LFS'),
    (f'A,{"B" * 2 ** 18},1\n', 'field limit')])
def test_a_file_without_sentence_pairs_is_refused(tmp_path, content, words):
    # it is Python's for all readers, and another test may have raised it
    before = csv.field_size_limit(2 ** 17)
    if content:
        (tmp_path / 'a.csv').write_text(content)
    with pytest.raises(ValueError, match=words):
        sts.read_pairs(str(tmp_path / 'a.csv'))
    csv.field_size_limit(before)


@pytest.mark.parametrize('scores, n, words', [
    ([3, 3, 3, 3], None, 'all 4 pairs have the score 3'),
    ([2.5] * 99 + [1], 4, 'all 4 pairs have the score 2.5')])
def test_scores_that_are_all_the_same_stop_sts_in_one_line(tmp_path, scores, n, words):
    pairs = [f'a red man runs {i},a blue dog sits {i},{x}' for i, x in enumerate(scores)]
    path = tmp_path / 'same.csv'
    path.write_text('\n'.join(['sentence1,sentence2,score', *pairs]))
    with pytest.raises(ValueError, match=words) as found:
        sts.prepare(toy_run(meta=dict(encoder=dict(id='lsa'))), dict(sts=str(path), n=n, seed=0))
    assert '\n' not in str(found.value)


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

    def nats(ids):
        logits = model(torch.tensor([ids])).logits[0, :-1]
        return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction='sum').item()
    perplexity = scorer.load_scorer(str(tmp_path), '', 'cpu')
    expected = math.exp((nats([1, 2, 3]) + nats([3, 3, 3, 0])) / (2 + 3))
    assert perplexity(['a b c', 'c c c z', 'a']) == pytest.approx(expected, rel=1e-4)
    assert math.isnan(perplexity(['a', ''])), 'texts of one token are not perfect'

    # a head that was tied, and is not in the file: drawn at random, it would judge all the same
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(config | dict(tie_word_embeddings=False)))
    scorer.load_scorer.cache_clear()
    with pytest.raises(ValueError, match='1 of its weights are missing, e.g. lm_head.weight'):
        scorer.load_scorer(str(tmp_path), '', 'cpu')
