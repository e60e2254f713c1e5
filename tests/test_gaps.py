""" Gaps whose length is not known, texts between two embeddings, and the loop that asks for texts. """
import io
import sys
from types import SimpleNamespace

import pytest
import torch

import sample
from sampling.inputs import read_template, slerp
from launch import run, run_each
from sampling import directions, likelihood, writing
from test_sample import Known, known_run
from toys import L, MASK, TEXTS, Network, Toy, denoiser_of

END = 2                                                                  # EOS and PAD are one; the words are a and b
WORDS = SimpleNamespace(eos=END, pad=END, kind='bpe', encode=lambda text: ['ab'.index(word) for word in text.split()])


def law_of_words(seed):
    """ (81,) a law over all texts of one to three words, with END behind them. """
    is_end = (TEXTS == END).long()
    is_text = (is_end.diff(dim=1) >= 0).all(1) & (is_end[:, 0] == 0) & (is_end[:, -1] == 1)
    p = torch.rand(len(TEXTS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4 * is_text
    for n in (1, 2, 3):                                                  # and one length that it likes
        of_length = (TEXTS != END).sum(1) == n
        p[of_length] *= (30 if n == 1 + seed % 3 else 1) / p[of_length].sum()
    return p / p.sum()


def run_of_words(p, **changes):
    model = Toy(denoiser_of(p))
    model.config = Known()
    return known_run(model=model, streams=('text',), tokenizer=WORDS, **changes)


def exact_nats(p, tokens):
    """ -log p(x) / (words of x), (n,). """
    place = {tuple(text): i for i, text in enumerate(TEXTS.tolist())}
    nats = -p[[place[tuple(text)] for text in tokens.tolist()]].log()
    return nats / (tokens != END).sum(1)


# ---- [MASK:2-6]

def test_a_range_of_lengths_stands_for_each_of_them_and_several_for_all_combinations():
    run_ = known_run(L=9, tokenizer=WORDS)

    def rows(text):
        tokens, known_mask, inner = read_template(run_, text)
        assert known_mask.equal(tokens != MASK) and inner.equal(tokens == MASK)
        return tokens.tolist()

    def expected(*row):
        return [*row, *[END] * (9 - len(row))]
    assert rows('a [MASK:2-4] b') == [expected(0, *[MASK] * k, 1) for k in (2, 3, 4)]
    assert rows('[MASK:0-1] a [MASK] [MASK:2-3]') == [expected(*[MASK] * i, 0, *[MASK] * (1 + j)) for i in (0, 1) for j in (2, 3)]


@pytest.mark.parametrize('wrong', ['[MASK:6-2]', '[MASK:-2]', '[MASK:2-]', '[MASK:2-*]', '[MASK:1-2-3]', '[MASK:a-b]', '[MASK:1-9999999]'])
def test_a_silly_range_is_refused_in_one_line(wrong):
    with pytest.raises(ValueError, match=r'is not a gap: expected \[MASK\]') as found:
        read_template(known_run(tokenizer=WORDS), f'a [MASK] {wrong}')
    assert wrong in str(found.value) and '\n' not in str(found.value)


def test_too_many_combinations_are_refused_before_they_are_made():
    run_ = known_run(L=20, tokenizer=WORDS)
    assert len(read_template(run_, '[MASK:1-8] [MASK:1-8]')[0]) == 64
    for text, n in (('[MASK:1-8] [MASK:1-9]', '72'), ('[MASK:1-999999] [MASK:1-999999]', '999,998,000,001')):
        with pytest.raises(ValueError, match=f'stands for {n} texts'):
            read_template(run_, text)


def test_the_length_of_the_fewest_nats_per_token_wins_as_the_law_says():
    """ A network that knows the law: what it finds is -log p / words, and the enumerated best length is kept. """
    won, by_total = [], 0
    for seed in range(12):
        p = law_of_words(seed)
        run_ = run_of_words(p)
        for template in ('[MASK:1-3]', 'a [MASK:1-2]', '[MASK:1-2] b', '[MASK:1-2] [MASK:0-1]'):
            masked, known_mask, inner = read_template(run_, template)
            each = writing.write(run_, masked, known_mask, None, inner=inner)
            exact, found = exact_nats(p, each), likelihood.nats_per_token(run_, each)
            many = likelihood.nats_per_token(run_, each, batch=4096, draws=4096)
            assert torch.allclose(many, exact, atol=0.03, rtol=0.03) and torch.allclose(found, exact, atol=0.2, rtol=0.2)
            tokens, nats = directions.infill(run_, [template])
            chosen = (each == tokens).all(1).nonzero()[0].item()
            assert exact[chosen] <= exact.min() + 0.1 and nats.item() == pytest.approx(found.min().item())
            won.append(int((tokens != END).sum()))
            by_total += (exact * (each != END).sum(1)).argmin().item() != exact.argmin().item()
    assert min(won.count(n) for n in (1, 2, 3)) >= 3 and by_total >= 2, 'the laws say nothing'


def test_the_draws_are_shared_by_the_texts_and_the_rows_of_a_call_change_nothing():
    p = law_of_words(0)
    texts = TEXTS[p > 0]
    run_, sizes = run_of_words(p), []
    whole = likelihood.nats_per_token(run_, texts)
    real = run_.text.bound
    run_.text = SimpleNamespace(bound=lambda model, tokens, *rest: sizes.append(len(tokens)) or real(model, tokens, *rest))
    assert torch.allclose(likelihood.nats_per_token(run_, texts, batch=7), whole)
    assert set(sizes[:-1]) == {7} and sum(sizes) == 64 * len(texts), 'a call has as many rows as are asked for'
    assert torch.allclose(likelihood.nats_per_token(run_of_words(p), texts.flip(0)).flip(0), whole)


def test_texts_that_read_the_same_are_scored_the_same():
    """ Without an EOS, with a PAD inside, and with words behind the EOS: `decode` reads 3 4 in each of them. """
    a, b, eos, pad = 3, 4, 8, 9
    run_ = known_run(lengths=None, tokenizer=SimpleNamespace(eos=eos, pad=pad))
    same = torch.tensor([[a, b, eos, pad, pad], [a, b, eos, a, eos], [a, b, pad, pad, pad], [a, pad, b, pad, eos], [pad, pad, a, b, eos]])
    assert writing.tidied(run_, same).tolist() == [[a, b, eos, pad, pad]] * 5
    for whole in ([a, b, a, b, a], [eos, pad, pad, pad, pad], [a, b, a, b, eos]):
        assert writing.tidied(run_, torch.tensor([whole])).tolist() == [whole], 'a text as in training stays as it is'
    given = known_run(lengths=[2], tokenizer=run_.tokenizer)
    assert writing.tidied(given, same).equal(same), 'a run that is given its ends keeps them'


def test_a_run_that_writes_from_left_to_right_is_asked_for_the_exact_nats():
    asked = []

    def bound(model, tokens, latents, t_latent, u, known_mask):
        asked.append((len(tokens), t_latent.tolist()))
        return torch.arange(len(tokens), dtype=torch.float64)
    run_ = run_of_words(law_of_words(0), next_token=SimpleNamespace(bound=bound))
    texts = torch.tensor([[0, 0, 0, END], [0, END, END, END], [0, 0, END, END]])
    assert likelihood.nats_per_token(run_, texts).tolist() == [0, 1, 1] and asked == [(3, [1.0] * 3)]
    likelihood.nats_per_token(run_, texts, torch.zeros(3, 1, 2))
    assert asked[1] == (3, [0.0] * 3), 'latents that are given stand at clock 0'


def test_each_text_has_its_own_lengths_copies_and_latent():
    def reads_z(tokens, z, t_text, t_latent, positions, predict):
        logits = 9. * torch.nn.functional.one_hot(z[:, 0, 0].long(), 3).float()[:, None].expand(-1, L, 3)
        return logits.flatten(0, 1)[positions], None
    model = Network(reads_z)
    model.config = Known()
    run_ = known_run(model=model, tokenizer=WORDS)
    z = torch.tensor([1., 0., 1.])[:, None, None].expand(3, 1, 2)
    templates = ['[MASK:1-3]', 'b [MASK:2]', 'a [MASK:0-2]']
    tokens, nats = directions.infill(run_, [one for one in templates for _ in (1, 2)], z.repeat_interleave(2, 0))
    assert len(tokens) == len(nats) == 6 and torch.equal(tokens[::2], tokens[1::2])
    first, second, third = tokens[::2].tolist()
    assert first == [1, 1, 1, END] and second == [1, 0, 0, END] and third == [0, 1, 1, END], 'the more words, the fewer nats a word'
    assert directions.infill(run_, ['a [MASK:2]'], z[:1])[1] is None, 'nothing to choose from'


# ---- between two embeddings

def test_the_way_between_two_embeddings_has_equal_angles_and_ends_where_they_are():
    a, b = torch.nn.functional.normalize(torch.randn(2, 3, 16), dim=-1)
    way = slerp(a, b, 7)
    assert way.shape == (7, 3, 16) and torch.allclose(way[0], a, atol=1e-6) and torch.allclose(way[-1], b, atol=1e-6)
    assert torch.allclose(way.norm(dim=-1), torch.ones(7, 3), atol=1e-6)
    angles = (way[1:] * way[:-1]).sum(-1).acos()
    assert torch.allclose(angles, ((a * b).sum(-1).acos() / 6).expand(6, 3), atol=1e-3)
    assert torch.allclose(slerp(a, 2 * a, 3)[1], 1.5 * a, atol=1e-6), 'parallel: the straight line'
    for last, n, words in ((-a, 5, 'opposite'), (b, 1, 'at least 2')):
        with pytest.raises(ValueError, match=words):
            slerp(a, last, n)


# ---- the command line

TEXT = 'a red dog runs near the park number 3'


def test_the_command_line_interpolates_tries_lengths_and_refuses_the_rest_in_a_line(finished):
    here = ['sample.py', f'--out_dir={finished}', '--device=cpu', '--steps=2']
    other = '--interpolate=a blue cat sits near the house number 7'
    good = [['--mode=l2t', f'--text={TEXT}', other, '--num_samples=4'],
            # rerank: infill does not read it, but this is its default
            ['--mode=infill', '--text=a [MASK:1-3] dog [MASK:0-1] near the park', '--num_samples=2', '--rerank=1'],
            ['--mode=l2t', '--text=a [MASK] dog']]
    wrong = [(['--mode=l2t', f'--text={TEXT}', other], 'at least 2'), (['--mode=infill', '--text=a [MASK]', other], 'does not read it'),
             (['--mode=l2t', other, '--latents=z.npy'], 'give --text'), (['--mode=infill', '--text=a [MASK:3-1]'], 'is not a gap'),
             (['--mode=infill', '--text=a [MASK:x] dog'], 'is not a gap'), (['--mode=infill', '--text=a [MASK] [MASK:x]'], 'is not a gap'),
             (['--mode=infill', '--text=a [MASK:1-3]', '--svg=a.svg'], 'one length'), (['--mode=l2t'], '--ask=true'),
             (['--ask=true', '--text=a'], 'ask=true does not read it'), (['--ask=true', '--mode=text'], 'does not read it')]
    results = run_each(*([*here, *args] for args in good), *([*here, *args] for args, _ in wrong))
    (rc, way, err), (rc_gaps, gaps, _), (rc_embedded, _, warned) = results[:3]
    assert rc == rc_gaps == rc_embedded == 0 and '[MASK' not in err, err
    assert warned.count('\n') == 1 and 'embedded as it stands' in warned, warned
    lines = [line for line in way.splitlines() if line.startswith('  -> ')]
    assert len(lines) == 4 and all(' to the first, ' in line and line.endswith(' to the last') for line in lines)
    assert gaps.count('  -> a') == gaps.count(' nats per token') == 2 and '[MASK' not in gaps.split('\n\n')[1].split('\n', 1)[1]
    for (rc, _, err), (args, words) in zip(results[3:], wrong):
        assert rc == 2 and words in err and err.count('\n') == 1, (args, err)


def test_asked_for_texts_it_answers_line_by_line_and_a_wrong_one_costs_a_line(finished):
    lines = f'{TEXT}\na [MASK:1-2] dog\na [MASK:2-1] dog\na [MASK] cat\n\nnot read\n'
    result = run('sample.py', f'--out_dir={finished}', '--device=cpu', '--mode=l2t', '--steps=2', '--ask=true', input=lines)
    shown = result.stdout
    assert result.returncode == 0 and shown.count('  -> ') == 3 and 'not read' not in shown and '> \n' not in shown
    assert shown.index(TEXT) < shown.index('a [MASK:1-2] dog') < shown.index('a [MASK] cat') and 'nats per token' in shown
    assert result.stderr.count('\n') == 1 and result.stderr.startswith("warning: a [MASK in 'a [MASK:2-1] dog' is not a gap")
    again = run('sample.py', f'--out_dir={finished}', '--device=cpu', '--mode=l2t', '--steps=2', f'--text={TEXT}').stdout
    assert again.split('\n\n')[1].strip() in shown, 'the answer is that of --text'


def test_a_person_is_asked_until_an_empty_line_or_the_end(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    for typed, seen in ((' one \ntwo\n\nthree\n', ['one', 'two']), ('one\n', ['one']), ('', [])):
        monkeypatch.setattr(sys, 'stdin', Terminal(typed))
        assert list(sample.asked_texts()) == seen
        shown = capsys.readouterr().out
        assert shown.count('\n> ') == len(seen) + 1 and '[MASK:2-6]' in shown
    monkeypatch.setattr(sys, 'stdin', io.StringIO('one\n\ntwo\n'))
    assert list(sample.asked_texts()) == ['one'] and capsys.readouterr().out == '', 'a pipe is not prompted'
