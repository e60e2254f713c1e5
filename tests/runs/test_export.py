""" runs/export.py: a run as a folder that can be given away. """
import json
import shutil

import pytest
import torch

from base.files import read_sealed
from base.writing import sealed
from data import read_meta
from launch import TINY, flags, run_code, run_together
from runs.checkpoint import of_dataset
from runs.export import export, results_of
from runs.results import read_results, write_results
from sampling.run import Run

TEXT = 'a red dog runs near the park number 3'
TRAIN = ['train.py', *TINY, '--mode=unconditional+l2t+t2l+causal']


def on_command_line(out, to, *more):
    as_a_module = "import runpy; runpy.run_module('runs.export', run_name='__main__')"
    return run_code(as_a_module, *flags(out_dir=out, to=to), *more)


def trained(*args):
    (code, _, err), = run_together([*TRAIN, *args])
    assert code == 0, err


@pytest.fixture(scope='module')
def exported(mixed, tmp_path_factory):
    to = tmp_path_factory.mktemp('given') / 'away'
    (code, _, err), = run_together(['evaluate.py', *flags(out_dir=mixed, tasks='nelbo', n=8,
                                                          draws=2)])
    assert code == 0, err
    result = on_command_line(mixed, to, '--license=mit', '--hardware=one core')
    assert result.returncode == 0 and result.stdout.endswith(f'exported to {to}\n'), result.stderr
    return to


@pytest.fixture
def a_run(mixed, tmp_path):
    """ A copy of the run. """
    return shutil.copytree(mixed, tmp_path / 'run')


def test_an_export_writes_the_same_texts_and_holds_no_more_than_it_needs(of_mixed, mixed, exported):
    again = Run(str(exported), device='cpu', dtype='float32')
    assert again.write([TEXT]) == of_mixed.write([TEXT])
    assert torch.equal(again.embed([TEXT]), of_mixed.embed([TEXT]))
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
        dataset, a_run, tmp_path):
    def rate_of(folder):
        return json.loads((folder / 'config.json').read_text())['learning_rate']

    before = (a_run / 'config.json').read_text()
    here = flags(dataset=dataset, out_dir=a_run, learning_rate=5)
    trained(*here)
    assert (a_run / 'config.json').read_text() == before
    trained(*here, '--max_iters=13')
    assert rate_of(a_run) == 5
    export(a_run, tmp_path / 'away', which='step-00000012')
    assert rate_of(tmp_path / 'away') == json.loads(before)['learning_rate']


def test_a_config_without_versions_is_no_config_of_a_run(a_run, tmp_path):
    (a_run / 'config.json').write_text('{"versions": null}')
    with pytest.raises(ValueError, match='config.json: found versions None, expected those'):
        export(a_run, tmp_path / 'away')


def be_of(out, meta):
    """ The run and its checkpoints say that it was trained on this dataset. """
    (out / 'data/meta.json').write_text(sealed(meta))
    for path in out.glob('step-*/training_state.json'):
        state = read_sealed(path)
        kept = {name: value for name, value in state['identity'].items()
                if not name.startswith('encoder ')}
        path.write_text(sealed({**state, 'identity': kept | of_dataset(meta)}))


PRIVATE, DIGEST = '/home/someone/private', 'sha256:' + '5' * 64


# runs whose encoder is of the hub, of a folder, and not known; what is no path stays
@pytest.mark.parametrize('encoder, words', [
    (dict(id='a/b', revision='c' * 40),
     ['`a/b` of the hub', 'c' * 40, 'You supply the encoder']),
    (dict(id=f'{PRIVATE}/bert', revision=DIGEST),
     ['`bert`', DIGEST, "encoder='FOLDER'", 'You supply the encoder']),
    (None, ['cannot embed a text']), (dict(id='morgan'), ['pip install rdkit']),
    ('pictures', ['pictures of 8 x 8 pixels, so it needs nothing'])])
def test_an_export_says_what_the_reader_supplies_and_names_no_folder_of_this_machine(
        a_run, tmp_path, encoder, words):
    meta = json.loads((a_run / 'data/meta.json').read_text())
    config = json.loads((a_run / 'config.json').read_text())
    if encoder == 'pictures':
        encoder = None
        meta['source']['image_size'] = 8
    meta['encoder'] = encoder and meta['encoder'] | encoder
    meta['source']['latents_from'] = [f'{PRIVATE}/z.npy']
    config['dataset'] = f'{PRIVATE}/packed'
    (a_run / 'config.json').write_text(json.dumps(config))
    be_of(a_run, meta)
    to = tmp_path / 'away'
    export(a_run, to)
    card = (to / 'README.md').read_text()
    assert all(word in card for word in words), card
    for path in to.rglob('*'):
        content = path.read_bytes() if path.is_file() else b''
        assert PRIVATE.encode() not in content and bytes(a_run) not in content, path
    assert of_dataset(read_meta(to / 'data')) == of_dataset(meta), 'known as its own'
    if 'You supply the encoder' in words and encoder['id'] != 'a/b':
        with pytest.raises(ValueError, match='bert: no such folder.*--encoder=FOLDER'):
            Run(str(to)).write([TEXT])


def test_a_training_begins_with_an_export(dataset, exported, tmp_path):
    assert '`lsa`, is in `data/`' in (exported / 'README.md').read_text()
    trained(*flags(dataset=dataset, out_dir=tmp_path / 'run', init_from=exported, max_iters=2))


def test_an_export_replaces_nothing(mixed, exported):
    result = on_command_line(mixed, exported)
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
