""" A run from Python: strings in, strings or latents out; and runs/export.py. """
import json
import re
import shutil

import pytest
import torch

from base.console import shown as as_shown
from base.files import read_sealed
from base.writing import sealed
from data import read_meta
from launch import ROOT, run, run_code, train
from runs.checkpoint import of_dataset
from runs.export import export as write_export, results_of
from runs.results import read_results, write_results
from sampling.run import Run
from toys import WORDS, save_encoder

TEXT = 'a red dog runs near the park number 3'


@pytest.fixture(scope='module')
def mixed(dataset, tmp_path_factory):
    """ A run of all four modes. """
    out = tmp_path_factory.mktemp('mixed') / 'run'
    result = train(dataset, out, '--mode=unconditional+l2t+t2l+causal')
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope='module')
def loaded(mixed):
    return Run(str(mixed))


def test_the_page_runs_word_for_word_and_an_import_reads_no_command_line(mixed, tmp_path):
    page, = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/python.md').read_text(), re.S)
    page = page.replace("'out/quickstart'", repr(str(mixed))).replace('Return a list.', TEXT)
    page = page.replace('Return the', 'a').replace('Return', 'a')
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['kernel', '--seed=7']\n"
            f'{page}\nassert z.shape == e.shape == (1, 1, 16) and abs(e.norm() - 1) < 1e-5')
    result = run_code(code, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout == '', result.stderr


def test_a_users_own_model_py_is_not_taken_for_ours(tmp_path):
    (tmp_path / 'model.py').write_text('')
    result = run_code('from sample import Run', cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_encoder_names_the_folder_of_an_encoder_in_every_script_and_here(tmp_path):
    """ prepare.py, sample.py and Run; a config file's `encoder` is prepare.py's alone. """
    (tmp_path / 'before').mkdir()
    encoder = save_encoder(tmp_path / 'before')
    lines = [f'{a} {b} walks on the {c}' for a in WORDS[:4] for b in WORDS[4:8] for c in WORDS[:6]]
    (tmp_path / 'lines.txt').write_text('\n'.join(lines))
    (tmp_path / 'config.py').write_text(f'encoder = {encoder!r}\npooling = "mean"')
    result = run('prepare.py', f'{tmp_path}/config.py', f'--input={tmp_path}/lines.txt',
                 '--tokenizer=byte', '--val_fraction=.1', f'--out={tmp_path}/data')
    assert result.returncode == 0, result.stderr
    assert train(tmp_path / 'data', tmp_path / 'run', '--max_iters=2').returncode == 0
    expected = Run(tmp_path / 'run').encode(lines[:2])

    sample = ['sample.py', f'--out_dir={tmp_path}/run', '--text=the dog', '--device=cpu']
    (tmp_path / 'another.py').write_text('encoder = "lsa"')
    assert run(*sample, f'{tmp_path}/another.py').returncode == 0

    # it is moved away
    (tmp_path / 'before').rename(tmp_path / 'now')
    assert torch.equal(Run(tmp_path / 'run', encoder=str(tmp_path / 'now')).encode(lines[:2]),
                       expected)
    assert run(*sample, f'--encoder={tmp_path}/now').returncode == 0
    result = run(*sample, f'{tmp_path}/config.py')
    assert result.returncode == 2 and '--encoder=FOLDER' in result.stderr, result.stderr
    again = run('prepare.py', f'--input={tmp_path}/lines.txt', f'--same_as={tmp_path}/data',
                f'--encoder={tmp_path}/now', '--val_fraction=.1', f'--out={tmp_path}/again')
    assert again.returncode == 0, again.stderr


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
    def shown(**flags):
        return run('sample.py', f'--out_dir={mixed}', *(f'--{k}={v}' for k, v in flags.items()))
    told = dict(sampler='ancestral', steps=4, seed=3)
    written, = loaded.write([TEXT], **told)
    assert f'  -> {as_shown(written)}\n' in shown(mode='l2t', text=TEXT, **told).stdout and written
    filled, = loaded.infill(['a [MASK:2] dog'], seed=5)
    result = shown(mode='infill', text='a [MASK:2] dog', seed=5)
    assert f'  -> {as_shown(filled)}\n' in result.stdout
    assert filled.startswith('a') and filled.endswith('dog')
    for given in (dict(like='a blue cat'), dict(towards='blue', away='red')):
        edited, = loaded.edit([TEXT], strength=.3, **{name: [some] for name, some in given.items()})
        result = shown(mode='edit', text=TEXT, strength=.3, **given)
        assert f'  -> {as_shown(edited)}   cosine ' in result.stdout, result.stderr


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
GAPS = ['[MASK:*]', 'a [MASK] cat [MASK:1-2]', 'a [MASK:2] dog']
HOT = dict(temperature=1.0, seed=3)
DIRECTIONS = {                     # texts or latents of texts [i], so many of each
    **{f'write {name}': lambda run, some, n, name=name, **how: run.write(
        some, num_samples=n, sampler=name, steps=5, **HOT, **how)
       for name in ('autoregressive', 'confidence', 'ancestral', 'first_hitting', 'remdm')},
    'guided': lambda run, some, n, **how: run.write(
        some, num_samples=n, guidance=2.0, **HOT, **how),
    'blocks': lambda run, some, n, **how: run.write(
        some, num_samples=n, sampler='first_hitting', block_size=8, steps=8, **HOT, **how),
    'drafts': lambda run, some, n, **how: run.write(some, num_samples=n, rerank=5, **HOT, **how),
    'infill': lambda run, some, n, **how: run.infill(
        [GAPS[TEXTS.index(text)] for text in some], num_samples=n, **HOT, **how),
    'edit': lambda run, some, n, **how: run.edit(
        some, like=['a green bird'], strength=.4, num_samples=n, **HOT, **how),
    'embed': lambda run, some, n, **how: list(run.embed(
        some, num_samples=n, solver='ancestral', latent_steps=3, guidance=2.0, **HOT, **how)),
    'round trip': lambda run, some, n, **how: run.round_trip(some, num_samples=n, **HOT, **how)[0],
}


@pytest.mark.parametrize('name', DIRECTIONS)
def test_the_first_text_of_a_seed_is_the_same_alone_and_among_others(loaded, name):
    direction = DIRECTIONS[name]

    def same(some, others):
        if isinstance(some[0], str):
            return some == others
        return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(some, others))
    of_three = direction(loaded, TEXTS, 2)
    for how in (dict(sample_batch=1), dict(sample_batch=2)):
        assert same(direction(loaded, TEXTS, 2, **how), of_three)
    for n in (1, 2):
        assert same(direction(loaded, TEXTS[:n], 2), of_three[:2 * n])
    assert same(direction(loaded, TEXTS, 1), of_three[::2])
    assert same(direction(loaded, TEXTS, 3)[:2], of_three[:2])
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


@pytest.mark.parametrize('wrong, kind, words', [
    (lambda r: r.write(), ValueError, 'give texts, or latents'),
    (lambda r: r.write(latents=torch.zeros(1, 15)), ValueError, 'shape (1, 15), expected (n, 16)'),
    (lambda r: r.write(latents=torch.full((1, 16), torch.nan)), ValueError, 'nan or inf'),
    (lambda r: r.write([TEXT], temprature=1), TypeError, "keyword argument 'temprature'"),
    (lambda r: r.infill(['no gap']), ValueError, 'nothing to fill'),
    (lambda r: r.edit([TEXT]), ValueError, 'give like, or towards and away, or latents'),
    (lambda r: r.edit([TEXT], like=['a'], away=['b']), ValueError, 'give like, or towards'),
    (lambda r: r.edit([TEXT], like=['a'], strength=0), ValueError, 'strength: 0'),
    (lambda r: r.edit(['red'], away=['red']), ValueError, 'leave nothing of the embedding'),
    (lambda r: r.nats([TEXT], torch.ones(2, 16)), ValueError, '1 texts, 2 latents'),
    (lambda r: r.infill(['a [MASK]'], like=['a'], latents=torch.ones(1, 16)), ValueError,
     'infill: give like, or latents'),
    *((ask, ValueError, 'at least one') for ask in (
        lambda r: r.write([]), lambda r: r.write(latents=torch.zeros(0, 16)), lambda r: r.sample(0),
        lambda r: r.edit([], like=['a']), lambda r: r.infill([]), lambda r: r.embed([]),
        lambda r: r.nats([]), lambda r: r.round_trip([]), lambda r: r.write(latents=[]),
        lambda r: r.sample_latents(0), lambda r: r.sample(-1), lambda r: r.sample_text(-2),
        lambda r: r.sample_both(2.0), lambda r: r.sample(True), lambda r: r.sample('3'),
        lambda r: r.write(x for x in [TEXT]), lambda r: r.infill(x for x in ['a [MASK]']),
        lambda r: r.edit((x for x in [TEXT]), like=['a']), lambda r: r.embed(iter([TEXT])),
        lambda r: r.encode(None), lambda r: r.nats(3),
        *(lambda r, n=n, name=name: getattr(r, name)([given], num_samples=n)
          for name, given in (('write', TEXT), ('embed', TEXT), ('round_trip', TEXT),
                              ('infill', 'a [MASK]'))
          for n in (0, -1, 2.0, None)))),
    (lambda r: r.edit([TEXT], like=(x for x in ['a'])), ValueError, 'expected a list of 1'),
    (lambda r: r.edit([TEXT], like=['a'], num_samples=1.5), ValueError, 'num_samples: 1.5'),
    (lambda r: r.write(latents='abc'), ValueError, 'latents: expected a tensor'),
    (lambda r: r.write(latents=(x for x in [1.])), ValueError, 'latents: expected a tensor'),
    (lambda r: r.write(latents=[torch.zeros(16), torch.zeros(3)]), ValueError, 'latents: expected'),
    (lambda r: r.edit([TEXT], like='a'), ValueError, "like='a': expected a list of 1 or 1 texts"),
    (lambda r: Run('no/such'), ValueError, 'no run in no/such'),
])
def test_what_is_wrong_is_said_in_one_line(loaded, wrong, kind, words):
    with pytest.raises(kind, match=re.escape(words)) as found:
        wrong(loaded)
    assert '\n' not in str(found.value)


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


# ---- export

def export(out, to, *more):
    as_a_module = "import runpy; runpy.run_module('runs.export', run_name='__main__')"
    return run_code(as_a_module, f'--out_dir={out}', f'--to={to}', *more)


@pytest.fixture(scope='module')
def exported(mixed, tmp_path_factory):
    to = tmp_path_factory.mktemp('given') / 'away'
    measured = run('evaluate.py', f'--out_dir={mixed}', '--tasks=nelbo', '--n=8', '--draws=2')
    assert measured.returncode == 0, measured.stderr
    result = export(mixed, to, '--license=mit', '--hardware=one core')
    assert result.returncode == 0 and result.stdout.endswith(f'exported to {to}\n'), result.stderr
    return to


def test_an_export_writes_the_same_texts_and_holds_no_more_than_it_needs(loaded, mixed, exported):
    again = Run(str(exported))
    assert again.write([TEXT]) == loaded.write([TEXT])
    assert torch.equal(again.embed([TEXT]), loaded.embed([TEXT]))
    files = {path.name for path in exported.rglob('*') if path.is_file()}
    assert files == {'README.md', 'config.json', 'results.json', 'meta.json', 'model.safetensors',
                     'training_state.json', 'tokenizer.json', 'latent_stats.npz', 'encoder.npz'}
    card = (exported / 'README.md').read_text()
    assert str(mixed) not in card and '\nlicense: mit\n' in card and 'one core' in card
    assert 'argv' not in json.loads((exported / 'config.json').read_text())


def test_an_export_has_the_figures_of_its_checkpoint_alone(mixed, exported, tmp_path):
    of_export = read_results(exported / 'results.json')
    other = [{**record, 'checkpoint': 'step-00000001'} for record in of_export]
    write_results(tmp_path / 'results.json', other + read_results(mixed / 'results.json'))
    assert of_export[0]['task'] == 'nelbo'
    assert results_of(tmp_path / 'results.json', of_export[0]['checkpoint']) == of_export


def test_a_run_with_nothing_left_to_train_keeps_its_config_and_a_card_has_that_of_the_weights(
        dataset, mixed, tmp_path):
    out, mode = shutil.copytree(mixed, tmp_path / 'run'), '--mode=unconditional+l2t+t2l+causal'
    before = (out / 'config.json').read_text()
    assert train(dataset, out, mode, '--learning_rate=5').returncode == 0
    assert (out / 'config.json').read_text() == before
    assert train(dataset, out, mode, '--max_iters=13', '--learning_rate=5').returncode == 0
    assert json.loads((out / 'config.json').read_text())['learning_rate'] == 5
    write_export(out, tmp_path / 'away', which='step-00000012')
    found = json.loads((tmp_path / 'away/config.json').read_text())
    assert found['learning_rate'] == json.loads(before)['learning_rate']


def test_a_config_without_versions_is_no_config_of_a_run(mixed, tmp_path):
    out = shutil.copytree(mixed, tmp_path / 'run')
    (out / 'config.json').write_text('{"versions": null}')
    with pytest.raises(ValueError, match='config.json: found versions None, expected those'):
        write_export(out, tmp_path / 'away')


def be_of(out, meta):
    """ The checkpoints of a run say that it was trained on this dataset. """
    for path in out.glob('step-*/training_state.json'):
        state = read_sealed(path)
        kept = {name: value for name, value in state['identity'].items()
                if not name.startswith('encoder ')}
        path.write_text(sealed({**state, 'identity': kept | of_dataset(meta)}))


def test_an_export_says_what_the_reader_supplies_and_names_no_folder_of_this_machine(
        mixed, exported, tmp_path):
    assert '`lsa`, is in `data/`' in (exported / 'README.md').read_text()
    private, digest = '/home/someone/private', 'sha256:' + '5' * 64

    # runs whose encoder is of the hub, of a folder, and not known; what is no path stays
    of_hub = dict(id='a/b', revision='c' * 40)
    of_folder = dict(id=f'{private}/bert', revision=digest)
    cases = [(of_hub, ['`a/b` of the hub', 'c' * 40, 'You supply the encoder']),
             (of_folder, ['`bert`', digest, "encoder='FOLDER'", 'You supply the encoder']),
             (None, ['cannot embed a text']), (dict(id='morgan'), ['pip install rdkit'])]
    for i, (changes, words) in enumerate(cases):
        out, to = tmp_path / f'run{i}', tmp_path / f'away{i}'
        shutil.copytree(mixed, out)
        meta = json.loads((out / 'data/meta.json').read_text())
        config = json.loads((out / 'config.json').read_text())
        meta['encoder'] = changes and meta['encoder'] | changes
        meta['source']['latents_from'] = [f'{private}/z.npy']
        config['dataset'] = f'{private}/packed'
        (out / 'data/meta.json').write_text(sealed(meta))
        be_of(out, meta)
        (out / 'config.json').write_text(json.dumps(config))
        write_export(out, to)
        card = (to / 'README.md').read_text()
        assert all(word in card for word in words), card
        files = [path.read_bytes() for path in to.rglob('*') if path.is_file()]
        assert not any(private.encode() in data or bytes(out) in data for data in files)
        assert of_dataset(read_meta(to / 'data')) == of_dataset(meta), 'known as its own'
    with pytest.raises(ValueError, match='bert: no such folder.*--encoder=FOLDER'):
        Run(str(tmp_path / 'away1')).write([TEXT])


def test_a_training_begins_with_an_export(dataset, exported, tmp_path):
    result = train(dataset, tmp_path / 'run', '--mode=unconditional+l2t+t2l+causal',
                   f'--init_from={exported}', '--max_iters=2')
    assert result.returncode == 0, result.stderr


def test_an_export_replaces_nothing(mixed, exported):
    result = export(mixed, exported)
    assert result.returncode == 2 and 'exists: choose another folder' in result.stderr


def test_a_hub_id_is_read_by_its_revision(exported, monkeypatch):
    """ The download is replaced by a folder that is here; what it is asked for is the promise. """
    import huggingface_hub
    asked = []

    def snapshot_download(repo, revision):
        asked.append((repo, revision))
        return str(exported)
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    commit = '0123456789abcdef' * 2 + '01234567'
    assert Run('someone/away', revision=commit).write([TEXT]) == Run(str(exported)).write([TEXT])
    for branch in ('main', commit[:7]):
        with pytest.raises(ValueError, match='expected a whole commit'):
            Run('someone/away', revision=branch)
    assert asked == [('someone/away', commit)], 'a branch was asked for'
