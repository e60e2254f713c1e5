""" Texts and latents from a person, and gaps whose length is not known. """
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from encoders import far_off
from sampling.inputs import pack, read_latents, read_template, read_texts
from sampling.knobs import SamplingKnobs
from sampling.likelihood import nats_per_token
from sampling.texts import write
from toys import L, MASK, TEXTS, Known, Network, Toy, denoiser_of, net_of, toy_run

END = 2                                              # EOS and PAD are one; the words are a and b
WORDS = SimpleNamespace(eos=END, pad=END, kind='bpe', decode=lambda ids: ids,
                        encode=lambda text: ['ab'.index(word) for word in text.split()])


def law_of_words(seed):
    """ (81,) a law over all texts of one to three words, with END behind them. """
    is_end = (TEXTS == END).long()
    is_text = (is_end.diff(dim=1) >= 0).all(1) & (is_end[:, 0] == 0) & (is_end[:, -1] == 1)
    rng = torch.Generator().manual_seed(seed)
    p = torch.rand(len(TEXTS), generator=rng, dtype=torch.float64) ** 4 * is_text
    for n in (1, 2, 3):                              # and one length that it likes
        of_length = (TEXTS != END).sum(1) == n
        p[of_length] *= (30 if n == 1 + seed % 3 else 1) / p[of_length].sum()
    return p / p.sum()


def run_of_words(model):
    return toy_run(net_of(model, eos=END, pad=END), tokenizer=WORDS)


def exact_nats(p, tokens):
    """ -log p(x) / (words of x), (n,). """
    place = {tuple(text): i for i, text in enumerate(TEXTS.tolist())}
    nats = -p[[place[tuple(text)] for text in tokens.tolist()]].log()
    return nats / (tokens != END).sum(1)


# ---- [MASK:2-6]

def test_a_range_of_lengths_stands_for_each_of_them_and_several_for_all_combinations():
    run_ = run_of_words(Known(seq_len=9))

    def rows(text):
        tokens, known_mask, inner = read_template(run_, text)
        assert known_mask.equal(tokens != MASK) and inner.equal(tokens == MASK)
        return [row[:row.index(END)] for row in tokens.tolist()]
    assert rows('a [MASK:2-4] b') == [[0, *[MASK] * k, 1] for k in (2, 3, 4)]
    assert read_template(run_, 'a [MASK:*]')[0].tolist() == [[0] + [MASK] * 8]
    assert rows('[MASK:0-1] a [MASK] [MASK:2-3]') == [
        [*[MASK] * i, 0, *[MASK] * (1 + j)] for i in (0, 1) for j in (2, 3)]


@pytest.mark.parametrize('wrong, words', [
    ('[MASK:6-2]', 'is not a gap'), ('[MASK:-2]', 'is not a gap'), ('[MASK:2-*]', 'is not a gap'),
    ('[MASK:1-9999999]', 'is not a gap'), ('[MASK:*] a', 'stands at the end'), ('a', 'nothing to'),
    ('[MASK:9]', 'at most 8'),
    ('[MASK:1-999999] [MASK:1-999999]', 'stands for 999,998,000,001 texts')])
def test_a_silly_gap_is_refused_in_one_line(wrong, words):
    with pytest.raises(ValueError, match=words) as found:
        read_template(run_of_words(Known(seq_len=9)), wrong)
    assert '\n' not in str(found.value)


def test_the_length_of_the_fewest_nats_per_token_wins_as_the_law_says():
    """ A network that knows the law: it finds -log p / words, and the best length is kept. """
    won = []
    for seed in range(12):
        p = law_of_words(seed)
        run_ = run_of_words(Toy(denoiser_of(p)))
        for template in ('[MASK:1-3]', 'a [MASK:1-2]', '[MASK:1-2] b', '[MASK:1-2] [MASK:0-1]'):
            masked, known_mask, inner = read_template(run_, template)
            each = write(run_.net, masked, known_mask, None, SamplingKnobs(), inner)
            exact, found = exact_nats(p, each), run_.nats(each)
            knobs = SamplingKnobs(sample_batch=4096)
            many = nats_per_token(run_.net, each, None, knobs, draws=4096)
            assert torch.allclose(many, exact, atol=0.03, rtol=0.03)
            texts, nats = run_.fill([template])
            chosen = each.tolist().index(texts[0])
            assert exact[chosen] <= exact.min() + 0.1
            assert nats.item() == pytest.approx(found.min().item())
            won.append(sum(i != END for i in texts[0]))
    assert min(won.count(n) for n in (1, 2, 3)) >= 3, 'the laws say nothing'


def test_the_draws_are_shared_by_the_texts_and_the_rows_of_a_call_change_nothing():
    p = law_of_words(0)
    texts, run_ = TEXTS[p > 0], run_of_words(Toy(denoiser_of(p)))
    whole = run_.nats(texts)
    assert torch.allclose(run_.nats(texts, sample_batch=7), whole)
    assert torch.allclose(run_.nats(texts.flip(0)).flip(0), whole)


def test_each_text_has_its_own_lengths_copies_and_latent():
    def reads_z(tokens, z, t_text, t_latent):
        logits = 9. * torch.nn.functional.one_hot(z[:, 0, 0].long(), 3).float()
        return logits[:, None].expand(-1, L, 3)
    run_ = run_of_words(Network(reads_z))
    z = torch.tensor([1., 0., 1.])[:, None, None].expand(3, 1, 2)
    templates = ['[MASK:1-3]', 'b [MASK:2]', 'a [MASK:0-2]']
    texts, nats = run_.fill(templates, z, num_samples=2, temperature=0)
    assert len(texts) == len(nats) == 6 and texts[::2] == texts[1::2]
    expected = [[1, 1, 1, END], [1, 0, 0, END], [0, 1, 1, END]]
    assert texts[::2] == expected, 'the more words, the fewer nats a word'
    assert run_.fill(['a [MASK:2]'], z[:1])[1] is None, 'nothing to choose from'


# ---- texts and latents from a person

@pytest.fixture
def scaled():
    """ A run of latents whose usual length is the root of 11. """
    run = toy_run()
    run.stats.mean, run.stats.std, run.stats.live = torch.tensor([3., 0.]), torch.ones(2), 1
    return run


@pytest.mark.parametrize('latents, words', [
    ([[3., 0.], [0., 60.], [99., 0.]], ['row 2 is 20 times as long', 'so are 0']),
    ([[3., 0.], [0., 0.], [0., 0.]],
     ['2 of 3 latents are zeros, which say nothing; the first is row 1'])])
def test_latents_of_another_scale_and_zeros_are_said(scaled, tmp_path, capsys, latents, words):
    np.save(tmp_path / 'z.npy', np.array(latents))
    read_latents(scaled, str(tmp_path / 'z.npy'))
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_latents_are_fractions_and_one_is_far_off_beside_the_median(scaled, tmp_path):
    np.save(tmp_path / 'z.npy', np.array([[3, 0]]))
    with pytest.raises(ValueError, match='found int64'):
        read_latents(scaled, str(tmp_path / 'z.npy'))
    assert far_off(np.array([[1.], [9.], [21.], [1.], [1.]])).tolist() == [0, 0, 1, 0, 0]
    assert not far_off(np.array([[0.], [0.], [0.], [2.], [3.]])).any()


@pytest.mark.parametrize('name, content, field, texts', [
    ('a.jsonl', '{"b": "one"}\n\n{"b": " two "}\n', 'b', ['one', 'two']),
    ('a.JSONL', r'{"text": "a dog\r\nruns\rand\nsits"}', 'text', ['a dog\nruns\nand\nsits']),
    ('a.csv', 'id;text\n1;a dog\n2;"b; c"\n', 'text', ['a dog', 'b; c']),
    ('a.txt', '\ufeffa dog\n\u200b\n\nb\0\n', 'text', ['a dog'])])
def test_texts_are_read_as_prepare_reads_them(tmp_path, capsys, name, content, field, texts):
    (tmp_path / name).write_text(content)
    assert list(read_texts(str(tmp_path / name), field)) == texts
    said = capsys.readouterr().err
    assert ('a.txt: 1 dropped (with a NUL)' in said) == (name == 'a.txt')


def test_texts_of_another_encoding_are_refused(tmp_path):
    (tmp_path / 'a.txt').write_text('a dog\n', 'utf-16-le')
    with pytest.raises(ValueError, match='a.txt: UTF-16-LE, expected UTF-8'):
        list(read_texts(str(tmp_path / 'a.txt')))


def test_a_text_that_is_too_long_or_no_list_is_refused():
    run = toy_run()
    for function in (run.encode, run.pack):
        with pytest.raises(ValueError, match="at least one, found 'a text'"):
            function('a text')
    with pytest.raises(ValueError, match="2 of 2, 'a long text', has 11 tokens.* reads at most 3"):
        pack(run, ['ab', 'a long text'])
    assert pack(run, ['a long text'], cut=True).shape == (1, L)
