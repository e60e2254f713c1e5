""" Run of sample.py: a run from Python, strings in, strings or arrays out; and runs/export.py. """
import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from launch import ROOT, measured, run, run_code, train
from runs.checkpoint import find_checkpoint, write_files
from runs.export import export as write_export, results_of
from runs.files import read_sealed, sealed
from runs.results import read_results, write_results
from runs.manifest import dataset_identity, encoder_identity, read_meta
from runs.console import shown as as_shown
from sample import Run

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


def blocks(name):
    """ The Python blocks of a page of docs/. """
    return re.findall(r'```python\n(.*?)```', (ROOT / 'docs' / name).read_text(), re.S)


def test_the_page_runs_word_for_word(mixed):
    (page,) = blocks('python.md')
    names = {}
    for ours, theirs in (("'out/quickstart'", repr(str(mixed))), ('Return a list.', TEXT),
                         ('Return the', 'a'), ('Return', 'a')):
        page = page.replace(ours, theirs)
    exec(page, names)
    assert names['z'].shape == names['e'].shape == (1, 16) and names['z'].dtype == np.float32
    assert np.linalg.norm(names['e']) == pytest.approx(1, abs=1e-5)


def test_it_writes_what_the_command_line_writes(mixed, loaded):
    told = dict(sampler='ancestral', steps=4, seed=3)
    shown = run('sample.py', f'--out_dir={mixed}', '--mode=l2t', f'--text={TEXT}',
                *(f'--{name}={value}' for name, value in told.items()))
    written, = loaded.write([TEXT], **told)
    assert f'  -> {as_shown(written)}\n' in shown.stdout and written
    shown = run('sample.py', f'--out_dir={mixed}', '--mode=infill', '--text=a [MASK:2] dog',
                '--seed=5')
    filled, = loaded.infill(['a [MASK:2] dog'], seed=5)
    assert f'  -> {as_shown(filled)}\n' in shown.stdout and filled.startswith('a')
    assert filled.endswith('dog')
    edit = ['sample.py', f'--out_dir={mixed}', '--mode=edit', f'--text={TEXT}', '--strength=0.3',
            '--seed=5']
    for given in (dict(like=['a blue cat']), dict(towards=['blue'], away=['red'])):
        shown = run(*edit, *(f'--{name}={some}' for name, (some,) in given.items()))
        edited, = loaded.edit([TEXT], strength=.3, seed=5, **given)
        assert f'  -> {as_shown(edited)}   cosine ' in shown.stdout, shown.stderr


def test_an_edit_goes_to_the_embedding_that_is_asked_for(loaded):
    texts = [TEXT, 'a blue cat']
    now, wanted, red, blue = (torch.from_numpy(loaded.encode(some)) for some in (
        texts, ['a green bird'], ['red'], ['blue']))
    z = now + blue - red
    z = z / z.norm(dim=1, keepdim=True) * now.norm(dim=1, keepdim=True)
    told = dict(strength=.5, seed=2)
    moved = loaded.edit(texts, towards=['blue'], away=['red'], **told)
    assert moved == loaded.change(texts, loaded.to_raw(z), **told)
    alike = loaded.edit(texts, like=['a green bird'], **told)
    assert alike == loaded.change(texts, loaded.to_raw(wanted.expand(2, -1)), **told)
    assert loaded.edit([], like=['a']) == []
    assert alike != loaded.edit(texts, towards=['blue'], **told)


def test_latents_of_a_text_are_written_like_the_text(loaded):
    z = loaded.encode([TEXT, 'a blue cat'])
    assert loaded.write(latents=z) == loaded.write([TEXT, 'a blue cat'])
    assert loaded.write([]) == loaded.write(latents=z[:0]) == []
    assert loaded.write(latents=z[:, None]) == loaded.write(latents=z.tolist())


def test_a_text_whose_embedding_says_nothing_has_a_warning(loaded, capsys):
    asked = {'write': lambda text: loaded.write([text]),
             'like': lambda text: loaded.infill(['a [MASK:2] dog'], like=[text]),
             'interpolate': lambda text: loaded.interpolate(TEXT, text, n=2),
             'edit': lambda text: loaded.edit([text], towards=['red'])}
    for name, ask in asked.items():
        ask(TEXT)
        assert capsys.readouterr().err == '', name
        ask('qqxx zzyy')
        assert capsys.readouterr().err.count(
            "warning: 'qqxx zzyy' has no word that the encoder knows") == 1, name


@pytest.mark.parametrize('wrong, kind, words', [
    (lambda r: r.write(), ValueError, 'give texts, or latents'),
    (lambda r: r.write([TEXT], latents=np.zeros((1, 16))), ValueError, 'give texts, or latents'),
    (lambda r: r.write(latents=np.zeros((1, 15))), ValueError, 'shape (1, 15), expected (n, 16)'),
    (lambda r: r.write(latents=np.full((1, 16), np.nan)), ValueError, 'nan or inf'),
    (lambda r: r.write([TEXT], temprature=1), TypeError,
     "unexpected keyword argument 'temprature'"),
    (lambda r: r.infill(['no gap']), ValueError, 'nothing to fill'),
    (lambda r: r.edit([TEXT]), ValueError, 'give like, or towards and away'),
    (lambda r: r.edit([TEXT], like=['a'], away=['b']), ValueError,
     'give like, or towards and away'),
    (lambda r: r.edit([TEXT], like=['a'], strength=0), ValueError, 'strength: 0'),
    (lambda r: r.edit(['red'], away=['red']), ValueError, 'leave nothing of the embedding'),
    (lambda r: r.change([TEXT], np.ones((2, 16))), ValueError, '1 texts, 2 latents'),
    (lambda r: r.edit([TEXT], like='a'), ValueError, "like='a': expected a list of 1 or 1 texts"),
    (lambda r: Run('no/such'), ValueError, 'no run in no/such'),
])
def test_what_is_wrong_is_said_in_one_line(loaded, wrong, kind, words):
    with pytest.raises(kind, match=re.escape(words)) as found:
        wrong(loaded)
    assert '\n' not in str(found.value)


def test_a_run_that_has_not_learned_a_direction_says_what_it_has(dataset, tmp_path):
    assert train(dataset, tmp_path / 'run', '--mode=l2t', '--max_iters=2').returncode == 0
    with pytest.raises(ValueError, match='was trained for l2t: no t2l'):
        Run(str(tmp_path / 'run')).embed([TEXT])


def test_importing_reads_no_command_line_and_prints_nothing(mixed, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ['kernel', '-f', 'kernel-1.json', '--num_samples=7']
from sample import Run
import sample
assert sample.num_samples == 1
print(len(Run({str(mixed)!r}).sample(2, steps=4)))
"""
    result = run_code(code, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout == '2\n' and result.stderr == '', result.stderr



def test_scores_of_texts_are_those_by_which_a_gap_is_filled_and_drafts_are_chosen(loaded):
    template, like = 'a red [MASK:1-3] runs', 'a red dog runs'
    z = loaded.encode([like])
    texts, nats = loaded.fill([template], loaded.to_raw(z))
    assert loaded.nats(texts, z) == pytest.approx(nats.tolist(), rel=1e-5)
    sources = loaded.encode([TEXT]), z, None
    right, other, alone = (loaded.nats([TEXT], latents)[0] for latents in sources)
    assert len({right, other, alone}) == 3 and np.isfinite([right, other, alone]).all()
    for scores in (loaded.nats, loaded.cosines):
        with pytest.raises(ValueError, match='1 texts, 2 latents'):
            scores([TEXT], np.concatenate([z, z]))
    e = loaded.encode([TEXT, like])
    assert loaded.cosines([TEXT, like], e) == pytest.approx([1, 1], abs=1e-5)
    cosine = e[0] @ e[1] / np.linalg.norm(e[0]) / np.linalg.norm(e[1])
    assert loaded.cosines([TEXT], e[1:])[0] == pytest.approx(cosine, abs=1e-5)


def test_an_embedding_of_one_vector_takes_one_call_unless_more_are_asked_for(loaded):
    for steps, more in ((1, {}), (5, dict(latent_steps=5))):
        loaded.row_calls = 0
        loaded.embed([TEXT, TEXT], **more)
        assert loaded.row_calls == 2 * steps


def test_a_run_that_writes_both_ways_is_measured_both_ways(mixed, tmp_path):
    out = tmp_path / 'run'
    shutil.copytree(mixed, out)
    result = run('evaluate.py', f'--out_dir={out}', '--tasks=l2t,infill,edit', '--n=6',
                 '--rerank=2',
                 '--classes=who: man, woman, child, dog, cat; where: street, house, park')
    assert result.returncode == 0, result.stderr
    found = measured(out)
    for key in ('l2t/diffusion/bleu', 'l2t/left_to_right/bleu', 'l2t/lead/bleu',
                'infill/left_to_right/token_accuracy', 'infill/lead/token_accuracy_se'):
        assert np.isfinite(found[key]), key
    asked = [found[f'edit/{column}/{metric}'] for column in ('copy', 'anew', 'lead')
             for metric in ('carries', 'kept', 'exact', 'cosine', 'nats')]
    assert asked[:3] == [0, 100, 0] and np.isfinite(asked).all()
    ours, beams = (found[f'infill/{of}token_accuracy'] for of in ('', 'left_to_right/'))
    assert found['infill/lead/token_accuracy'] == pytest.approx(ours - beams)
    summary = result.stdout[result.stdout.index('in short'):]
    assert re.search(r'\n  by diffusion, greedy +[\d.]', summary)
    assert 'rival: nearest (l2t), left_to_right (infill)' in summary


# ---- export

def export(out, to, *more):
    as_a_module = "import runpy; runpy.run_module('runs.export', run_name='__main__')"
    return run_code(as_a_module, f'--out_dir={out}', f'--to={to}', *more)


@pytest.fixture(scope='module')
def exported(mixed, tmp_path_factory):
    to = tmp_path_factory.mktemp('given') / 'away'
    assert run('evaluate.py', f'--out_dir={mixed}', '--tasks=nelbo', '--n=8',
               '--draws=2').returncode == 0
    result = export(mixed, to, '--license=mit', '--hardware=one core')
    assert result.returncode == 0 and result.stdout.endswith(f'exported to {to}\n'), result.stderr
    return to


def test_an_export_writes_the_same_texts_and_holds_no_more_than_it_needs(loaded, mixed, exported):
    again = Run(str(exported))
    assert again.write([TEXT]) == loaded.write([TEXT])
    assert np.array_equal(again.embed([TEXT]), loaded.embed([TEXT]))
    files = {path.name for path in exported.rglob('*') if path.is_file()}
    assert files == {'README.md', 'config.json', 'best', 'latest', 'results.json',
                     'model.safetensors', 'training_state.json',
                     'meta.json', 'tokenizer.json', 'latent_stats.npz', 'encoder.npz'}
    assert str(mixed) not in (exported / 'README.md').read_text()
    assert 'argv' not in json.loads((exported / 'config.json').read_text())


def test_an_export_in_float16_is_half_as_large_and_the_same_to_rounding(
        loaded, exported, mixed, tmp_path):
    assert export(mixed, tmp_path / 'half', '--weights_dtype=float16').returncode == 0
    half = Run(str(tmp_path / 'half'))
    size = [os.path.getsize(next(folder.glob('step-*/model.safetensors')))
            for folder in (exported, tmp_path / 'half')]
    assert .5 < size[1] / size[0] < .55
    assert np.allclose(half.embed([TEXT]), loaded.embed([TEXT]), atol=.02)

    # a weight that float16 cannot hold
    out = tmp_path / 'large'
    shutil.copytree(mixed, out)
    step = find_checkpoint(out)
    tensors = {kind: load_file(out / step / f'{kind}.safetensors') for kind in ('model', 'ema')}
    tensors['ema']['bias'].flatten()[0] = 1e5
    state = read_sealed(out / step / 'training_state.json')
    shutil.rmtree(out / step)
    write_files(out / step, tensors, state)
    found = export(out, tmp_path / 'not', '--weights_dtype=float16')
    assert found.returncode == 2 and 'bias is too large for float16' in found.stderr
    assert not (tmp_path / 'not').exists()


def test_the_card_says_what_was_measured(mixed, exported):
    card = (exported / 'README.md').read_text()
    found = measured(mixed)
    config = json.loads((mixed / 'config.json').read_text())
    assert card.startswith('---\nlibrary_name: nanoldlm\n')
    assert '\nlicense: mit\n' in card.split('---')[1]
    for kind in ('', 'shuffled/', 'null/'):
        name = f'nelbo/{kind}nats_per_token'
        assert f'{found[name]:.3f} ± {found[f"{name}_se"]:.3f}' in card
    assert 'one core' in card and (config['commit'] or 'not recorded') in card
    (page,) = re.findall(r'```python\n(.*?)```', card, re.S)
    assert 'Run(' in page


def test_an_export_has_the_figures_of_its_checkpoint_alone(mixed, exported, tmp_path):
    of_export = read_results(exported / 'results.json')
    other = [{**record, 'checkpoint': 'step-00000001'} for record in of_export]
    write_results(tmp_path / 'results.json', other + read_results(mixed / 'results.json'))
    name = of_export[0]['checkpoint']
    assert of_export[0]['task'] == 'nelbo' and name != 'step-00000001'
    assert results_of(tmp_path / 'results.json', name) == of_export
    assert results_of(exported / 'results.json', name) == of_export, 'it can be exported again'
    assert results_of(tmp_path / 'none', name) == []


def test_an_export_says_what_the_reader_supplies_and_names_no_folder_of_this_machine(
        mixed, exported, tmp_path):
    assert '`lsa`, is in `data/`' in (exported / 'README.md').read_text()
    private, digest = '/home/someone/private', 'sha256:' + '5' * 64

    # runs whose encoder is of the hub, of a folder, and not known; what is no path stays
    cases = [(dict(id='a/b', revision='c' * 40),
              ['`a/b` of the hub', 'c' * 40, 'You supply the encoder']),
             (dict(id=f'{private}/my-bert', revision=digest),
              ['`my-bert`', digest, "encoder_folder='FOLDER'", 'You supply the encoder']),
             (None, ['cannot embed a text'])]
    for i, (changes, words) in enumerate(cases):
        out, to = tmp_path / f'run{i}', tmp_path / f'away{i}'
        shutil.copytree(mixed, out)
        meta, config = (json.loads((out / name).read_text())
                        for name in ('data/meta.json', 'config.json'))
        meta['encoder'] = changes and meta['encoder'] | changes
        meta['source']['latents_from'] = [f'{private}/z.npy']
        config['dataset'] = f'{private}/packed'
        (out / 'data/meta.json').write_text(sealed(meta))
        (out / 'config.json').write_text(json.dumps(config))
        write_export(out, to)
        card = (to / 'README.md').read_text()
        assert all(word in card for word in words), card
        assert not [path for path in to.rglob('*') if path.is_file()
                    and (private.encode() in path.read_bytes() or bytes(out) in path.read_bytes())]
        exported_meta = read_meta(to / 'data')
        assert dataset_identity(exported_meta) == dataset_identity(meta), 'known as its own'
        assert exported_meta['source']['split_on'] == meta['source']['split_on']
    run_of_a_folder = Run(str(tmp_path / 'away1'))
    with pytest.raises(ValueError,
                       match='my-bert: no such folder, and no hub has it.*encoder_folder') as found:
        run_of_a_folder.write([TEXT])
    assert '\n' not in str(found.value) and run_of_a_folder.write(latents=np.zeros((1, 16)))


def test_two_folders_with_the_same_encoder_are_one():
    here, there = (dict(id=f'{folder}/bert', revision='sha256:5', dimension=8)
                   for folder in ('/home/a', '/mnt/b'))
    others = [{**here, 'revision': 'sha256:6'}, {**here, 'dimension': 4},
              {**here, 'id': '/home/a/gpt'}, None]
    assert encoder_identity(here) == encoder_identity(there) not in map(encoder_identity, others)
    of_hub = dict(id='a/bert', revision='5')
    assert encoder_identity(of_hub) == of_hub


def test_a_training_begins_with_an_export(dataset, exported, tmp_path):
    result = train(dataset, tmp_path / 'run', '--mode=unconditional+l2t+t2l+causal',
                   f'--init_from={exported}', '--max_iters=2')
    assert result.returncode == 0, result.stderr


def test_an_export_replaces_nothing_and_a_broken_one_is_noticed(mixed, exported, tmp_path):
    result = export(mixed, exported)
    assert result.returncode == 2 and 'exists: choose another folder' in result.stderr
    assert result.stderr.count('\n') == 1
    assert export(mixed, tmp_path / 'away').returncode == 0
    (weights,) = (tmp_path / 'away').glob('step-*/model.safetensors')
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match='model.safetensors'):
        Run(str(tmp_path / 'away'))


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
    assert asked == [('someone/away', commit)]
    for branch in ('main', commit[:7], commit + '\n', 'v1.0'):
        with pytest.raises(ValueError, match='expected a whole commit') as found:
            Run('someone/away', revision=branch)
        assert '\n' not in str(found.value)
    assert len(asked) == 1, 'a branch was asked for'
