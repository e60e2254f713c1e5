""" A run from Python: strings in, strings or latents out. """
import re

import pytest
import torch

from base.console import shown as as_shown
from launch import ROOT, TINY, flags, run_code, run_together
from sampling.run import Run
from toys import WORDS, put, save_encoder, write_lines

TEXT = 'a red dog runs near the park number 3'


@pytest.fixture(scope='module')
def loaded(of_mixed):
    return of_mixed


def works(*commands, **kw):
    """ The output of each command. """
    results = run_together(*commands, **kw)
    for code, _, err in results:
        assert code == 0, err
    return [out for _, out, _ in results]


def test_the_page_runs_word_for_word_and_an_import_reads_no_command_line(mixed, tmp_path):
    page, = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/python.md').read_text(), re.S)
    page = page.replace("'out/quickstart'", repr(str(mixed))).replace('Return a list.', TEXT)
    page = page.replace('Return the', 'a').replace('Return', 'a')
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['kernel', '--seed=7']\n"
            f'{page}\nassert z.shape == e.shape == (1, 1, 16) and abs(e.norm() - 1) < 1e-5')
    result = run_code(code, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout == '', result.stderr


def test_a_users_own_model_py_is_not_taken_for_ours(tmp_path):
    put(tmp_path / 'model.py')
    result = run_code('from sample import Run', cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_encoder_names_the_folder_of_an_encoder_in_every_script_and_here(here):
    """ prepare.py, sample.py and Run; a config file's `encoder` is prepare.py's alone. """
    encoder = save_encoder(here / put('before/a').parent)
    lines = [f'{a} {b} walks on the {c}' for a in WORDS[:4] for b in WORDS[4:8] for c in WORDS[:6]]
    write_lines('lines.txt', lines)
    put('config.py', f'encoder = {encoder!r}\npooling = "mean"')
    put('another.py', 'encoder = "lsa"')
    prepare = ['prepare.py', *flags(input='lines.txt', val_fraction=.1)]
    sample = ['sample.py', *flags(out_dir='run', text='the dog', device='cpu')]
    works([*prepare, 'config.py', *flags(tokenizer='byte', out='data/x')],
          ['train.py', *flags(dataset='x', out_dir='run'), *TINY, '--max_iters=2'],
          [*sample, 'another.py'], cwd=here)
    expected = Run('run').encode(lines[:2])

    # it is moved away
    (here / 'before').rename('now')
    assert torch.equal(Run('run', encoder='./now').encode(lines[:2]), expected)
    works([*sample, '--encoder=./now'],
          [*prepare, *flags(same_as='x', encoder='./now', out='data/again')], cwd=here)
    (code, _, err), = run_together([*sample, 'config.py'], cwd=here)
    assert code == 2 and '--encoder=FOLDER' in err, err


def test_an_encoder_that_lies_in_no_folder_is_known_by_its_name_alone(mixed, tmp_path,
                                                                      monkeypatch):
    assert torch.equal(Run(mixed, encoder='lsa').encode([TEXT]), Run(mixed).encode([TEXT]))
    with pytest.raises(ValueError, match='that of .* is lsa, which lies in no folder'):
        Run(mixed, encoder=str(tmp_path)).encode([TEXT])

    # a name of prepare.py stands for its id on the hub
    asked, of_hub = [], Run(mixed, encoder='minilm')
    of_hub.meta['encoder'] = dict(id='a/folder')
    monkeypatch.setattr('sampling.run.load_encoder', lambda record, folder, device:
                        asked.append(folder))
    of_hub.load_encoder()
    assert asked == ['sentence-transformers/all-MiniLM-L6-v2']


def test_it_writes_what_the_command_line_writes(mixed, loaded):
    sample = ['sample.py', *flags(out_dir=mixed, device='cpu', dtype='float32')]
    asked = dict(sampler='ancestral', steps=4, seed=3)
    edit = dict(mode='edit', text=TEXT, strength=.3)
    like, towards = dict(like='a blue cat'), dict(towards='blue', away='red')
    outputs = works(
        [*sample, *flags(mode='l2t', text=TEXT, **asked)],
        [*sample, *flags(mode='infill', text='a [MASK:2] dog', seed=5)],
        [*sample, *flags(**edit, **like)], [*sample, *flags(**edit, **towards)])
    written = [loaded.write([TEXT], **asked), loaded.infill(['a [MASK:2] dog'], seed=5),
               loaded.edit([TEXT], strength=.3, like=['a blue cat']),
               loaded.edit([TEXT], strength=.3, towards=['blue'], away=['red'])]
    for (text,), end, output in zip(written, ('\n', '\n', '   cosine ', '   cosine '), outputs):
        assert text and f'  -> {as_shown(text)}{end}' in output
    (filled,) = written[1]
    assert filled.startswith('a') and filled.endswith('dog')


def test_an_edit_goes_to_the_embedding_that_is_asked_for(loaded):
    texts, told = [TEXT, 'a blue cat'], dict(strength=.5, seed=2)
    now, green, red, blue = map(loaded.encode, (texts, ['a green bird'], ['red'], ['blue']))
    z = now + blue - red
    z = z / z.norm(dim=2, keepdim=True) * now.norm(dim=2, keepdim=True)
    moved = loaded.edit(texts, towards=['blue'], away=['red'], **told)
    assert moved == loaded.edit(texts, latents=z, **told)
    like = loaded.edit(texts, like=['a green bird'], **told)
    assert moved != like == loaded.edit(texts, latents=green, **told)


def test_latents_of_a_text_are_written_like_the_text(loaded):
    z = loaded.encode([TEXT, 'a blue cat'])
    written = loaded.write([TEXT, 'a blue cat'])
    assert written == loaded.write(latents=z) == loaded.write(latents=z[:, 0].numpy())
    assert written == loaded.write(latents=list(z))
    three = loaded.write(latents=z, num_samples=3)
    assert len(three) == 6 and len(set(three[:3])) > 1, 'of each latent, one below the other'


TEXTS = [TEXT, 'a blue cat', 'a small old man sits near the house number 5']
GAPS = dict(zip(TEXTS, ['[MASK:*]', 'a [MASK] cat [MASK:1-2]', 'a [MASK:2] dog']))
LIKE = ['a green bird']
WAYS = [                           # a method of Run, and its knobs
    *(('write', dict(sampler=name, steps=5))
      for name in ('autoregressive', 'confidence', 'ancestral', 'first_hitting', 'remdm')),
    ('write', dict(guidance=2.0)),
    ('write', dict(sampler='first_hitting', block_size=8, steps=8)),
    ('write', dict(rerank=5)),
    ('infill', {}),
    ('edit', dict(like=LIKE, strength=.4)),
    ('embed', dict(solver='ancestral', latent_steps=3, guidance=2.0)),
    ('round_trip', {}),
]


@pytest.mark.parametrize('way, knobs', WAYS)
def test_the_first_text_of_a_seed_is_the_same_alone_and_among_others(loaded, way, knobs):
    def made(texts, n, **how):
        if way == 'infill':
            texts = [GAPS[text] for text in texts]
        found = getattr(loaded, way)(texts, num_samples=n, temperature=1.0, seed=3, **knobs, **how)
        return list(found[0] if way == 'round_trip' else found)

    def same(some, others):
        if isinstance(some[0], str):
            return some == others
        return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(some, others, strict=True))
    of_three = made(TEXTS, 2)
    for batch in (1, 2):
        assert same(made(TEXTS, 2, sample_batch=batch), of_three)
    for n in (1, 2):
        assert same(made(TEXTS[:n], 2), of_three[:2 * n])
    assert same(made(TEXTS, 1), of_three[::2])
    assert same(made(TEXTS, 3)[:2], of_three[:2])
    assert not same(of_three[::2], of_three[1::2]), 'two samples differ'


def test_a_sample_from_noise_is_the_same_alone_and_among_others(loaded):
    knobs = dict(temperature=1.0, steps=5, latent_steps=3, seed=3)
    for ask in (loaded.sample, loaded.sample_text):
        texts = ask(4, **knobs)
        assert texts[:1] == ask(1, **knobs) and texts == ask(4, sample_batch=3, **knobs)
        assert len(set(texts)) == 4 and texts[0] != ask(1, **knobs | dict(seed=4))[0]
    z = loaded.sample_latents(4, **knobs)
    assert torch.allclose(loaded.sample_latents(1, **knobs), z[:1], atol=1e-5)
    assert torch.allclose(loaded.sample_latents(4, sample_batch=3, **knobs), z, atol=1e-5)


@pytest.mark.parametrize('wrong, words', [
    (lambda r: r.write(), 'give texts, or latents'),
    (lambda r: r.write(latents=torch.zeros(1, 15)), 'shape (1, 15), expected (n, 16)'),
    (lambda r: r.write(latents=torch.full((1, 16), torch.nan)), 'nan or inf'),
    (lambda r: r.infill(['no gap']), 'nothing to fill'),
    (lambda r: r.infill(['a [MASK]'], like=['a'], latents=torch.ones(1, 16)),
     'infill: give like, or latents'),
    (lambda r: r.edit([TEXT]), 'give like, or towards and away, or latents'),
    (lambda r: r.edit([TEXT], like=['a'], away=['b']), 'give like, or towards'),
    (lambda r: r.edit([TEXT], like=['a'], strength=0), 'strength: 0'),
    (lambda r: r.edit([TEXT], like=iter(['a'])), 'expected a list of 1'),
    (lambda r: r.edit([TEXT], like='a'), "like='a': expected a list of 1 or 1 texts"),
    (lambda r: r.edit([TEXT], like=['a'], num_samples=1.5), 'num_samples: 1.5'),
    (lambda r: r.edit(['red'], away=['red']), 'leave nothing of the embedding'),
    (lambda r: r.nats([TEXT], torch.ones(2, 16)), '1 texts, 2 latents'),
    (lambda r: Run('no/such'), 'no run in no/such')])
def test_what_is_wrong_is_said_in_one_line(loaded, wrong, words):
    with pytest.raises(ValueError, match=re.escape(words)) as found:
        wrong(loaded)
    assert '\n' not in str(found.value)


def test_a_knob_that_is_not_there_is_an_argument_that_is_not_there(loaded):
    with pytest.raises(TypeError, match="keyword argument 'temprature'"):
        loaded.write([TEXT], temprature=1)


def refuses(words, function, *args, **kw):
    with pytest.raises(ValueError, match=words) as found:
        function(*args, **kw)
    assert '\n' not in str(found.value)


@pytest.mark.parametrize('name', ['write', 'infill', 'edit', 'embed', 'round_trip', 'nats',
                                  'encode'])
def test_texts_are_a_list_of_at_least_one_and_so_many_of_each(loaded, name):
    ask, more = getattr(loaded, name), dict(like=LIKE) if name == 'edit' else {}
    given = ['a [MASK]' if name == 'infill' else TEXT]
    for texts in (iter(given), None, 3) if name == 'encode' else ([], iter(given), 3):
        refuses('at least one', ask, texts, **more)
    if name not in ('nats', 'encode'):
        for n in (0, -1, 2.0, None):
            refuses('at least one', ask, given, num_samples=n, **more)


@pytest.mark.parametrize('name', ['sample', 'sample_text', 'sample_latents', 'sample_both'])
@pytest.mark.parametrize('n', [0, -2, 2.0, True, '3'])
def test_a_number_of_samples_is_a_whole_number_of_at_least_one(loaded, name, n):
    refuses('at least one', getattr(loaded, name), n)


@pytest.mark.parametrize('latents, words', [
    ([], 'at least one'), (torch.zeros(0, 16), 'at least one'),
    ('abc', 'latents: expected a tensor'), (iter([1.]), 'latents: expected a tensor'),
    ([torch.zeros(16), torch.zeros(3)], 'latents: expected')])
def test_latents_are_a_tensor_or_make_one(loaded, latents, words):
    refuses(words, loaded.write, latents=latents)


def test_one_latent_is_that_of_all_texts(loaded):
    z = loaded.encode([TEXT])
    assert torch.equal(loaded.nats([TEXT] * 3, z), loaded.nats([TEXT] * 3, z.repeat(3, 1, 1)))
    gaps = dict(templates=['a [MASK]', 'a red [MASK]'], num_samples=2)
    assert loaded.infill(latents=z, **gaps) == loaded.infill(latents=z.repeat(2, 1, 1), **gaps)


def test_scores_of_texts_are_those_by_which_a_gap_is_filled(loaded):
    z = loaded.encode(['a red dog runs'])
    texts, nats = loaded.fill(['a red [MASK:1-3] runs'], z)
    assert torch.allclose(loaded.nats(texts, z), nats)
    right, other, alone = (loaded.nats([TEXT], latents).item()
                           for latents in (loaded.encode([TEXT]), z, None))
    assert len({right, other, alone}) == 3
    assert loaded.cosines([TEXT], loaded.encode([TEXT])).item() == pytest.approx(1, abs=1e-5)


def test_a_text_that_is_longer_when_it_is_read_again_is_scored_without_its_end(loaded, capsys):
    tokens = loaded.pack([TEXT * 9], cut=True)
    assert loaded.nats([TEXT * 9]).equal(loaded.nats(tokens)) and tokens.shape == (1, loaded.net.L)
    assert '1 of 1 texts have more tokens than' in capsys.readouterr().err
    with pytest.raises(ValueError, match='reads at most'):
        loaded.embed([TEXT * 9])
