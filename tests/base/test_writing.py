""" What is written appears whole, and nothing of anybody else is overwritten, removed or written
through: files, folders of runs and datasets, and the commands that write them. """
import fcntl
import os
import shutil
import stat
from pathlib import Path

import pytest

from base.writing import (DATASET, RUN, WRITTEN_BY, Claim, check_ours, clear, remove_folder,
                          write_folder, write_text, write_whole)
from corpora import shards
from launch import TINY, assert_refused, flags, run_each
from runs import checkpoint, run_folder
from toys import new_run, put, save_each, states, write_lines


def tree(folder):
    """ {path: what is there}: the bytes of a file, where a link leads, or the kind. """
    found = {}
    for path in sorted(Path(folder).rglob('*')):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = stat.S_IFMT(path.stat().st_mode)
    return found


def precious(folder, *names):
    """ What is there, with files of the user of these names. """
    for name in names:
        put(folder / name, 'precious')
    return tree(folder)


def mode(path):
    return path.stat().st_mode & 0o777


# ---- files

def test_a_file_keeps_its_mode_and_a_new_one_follows_the_umask(tmp_path):
    old, new = tmp_path / 'old', tmp_path / 'new'
    old.write_text('secret')
    old.chmod(0o600)
    umask = os.umask(0o027)
    try:
        for path in (old, new):
            write_text(path, 'written', named=True)
        with write_folder(tmp_path / 'folder') as tmp:
            (tmp / 'a').touch()
    finally:
        os.umask(umask)
    assert (mode(old), mode(new), mode(tmp_path / 'folder')) == (0o600, 0o640, 0o750)
    assert old.read_text() == new.read_text() == 'written'


def test_no_temporary_name_is_anybody_elses_and_none_is_left(tmp_path):
    before = precious(tmp_path, 'a.tmp', 'folder.tmp', '.a.tmp')
    write_text(tmp_path / 'a', 'whole')
    with write_folder(tmp_path / 'folder') as tmp:
        write_text(tmp / 'b', 'whole')
    with pytest.raises(ZeroDivisionError), write_whole(tmp_path / 'a') as f:
        f.write(b'half')
        1 / 0
    with pytest.raises(ZeroDivisionError), write_folder(tmp_path / 'other') as tmp:
        1 / 0
    added = {'a': b'whole', 'folder': stat.S_IFDIR, 'folder/b': b'whole'}
    assert tree(tmp_path) == before | added


def test_a_link_is_followed_only_where_the_user_has_named_it(tmp_path):
    (tmp_path / 'mine').write_text('precious')
    for name in ('config.json', 'save.npy'):
        (tmp_path / name).symlink_to('mine')
    write_text(tmp_path / 'config.json', 'ours')
    assert (tmp_path / 'mine').read_text() == 'precious'
    assert not (tmp_path / 'config.json').is_symlink()
    write_text(tmp_path / 'save.npy', 'asked for', named=True)
    assert (tmp_path / 'mine').read_text() == 'asked for' and (tmp_path / 'save.npy').is_symlink()


def test_a_file_whose_name_nobody_chose_is_replaced_only_where_it_says_that_we_wrote_it(tmp_path):
    path = tmp_path / 'report.html'
    check_ours(path, '')
    path.write_text('my own page, on nanoLDLM')
    with pytest.raises(ValueError, match='report.html is there, and no script of nanoLDLM wrote'):
        check_ours(path, '')
    path.write_text(f'<meta name="generator" content="{WRITTEN_BY}">')
    check_ours(path, '')


# ---- folders of ours

NAMES = {RUN: run_folder.NAMES, DATASET: shards.NAMES}


def a_run(folder):
    """ It is claimed as the folder of a run. """
    return Claim(folder, RUN, run_folder.NAMES)


@pytest.mark.parametrize('mark, name', [
    *((RUN, name) for name in ('config.json', 'data/raw/notes.txt', 'best', 'training_log.jsonl',
                               'preempted.json', 'step-00000004/notes.txt', 'step-1', 'lock')),
    *((DATASET, name) for name in ('meta.json', 'tokenizer.json', 'encoder.npz', 'bag.npy',
                                   'latent_stats.npz', 'train-00000.tokens.bin', 'lock',
                                   'val-00012.whole.json', 'train-00000.latents.npy'))])
def test_a_folder_with_a_name_of_ours_and_without_our_mark_is_left_as_it_is(tmp_path, mark, name):
    path = tmp_path / 'a' / name
    path.parent.mkdir(parents=True)
    for content in (b'precious', b'', f'{DATASET if mark == RUN else RUN}\n'.encode()):
        path.write_bytes(content)
        before = tree(tmp_path)
        with pytest.raises(ValueError, match=f'a holds {name.split("/")[0]}, and no file lock'):
            Claim(tmp_path / 'a', mark, NAMES[mark])
        assert tree(tmp_path) == before


@pytest.mark.parametrize('mark', [RUN, DATASET])
def test_a_folder_of_other_files_is_taken_and_they_stay(tmp_path, mark):
    before = precious(
        tmp_path, 'notes.txt', 'slurm-17.out', 'step-by-step.md', 'train-00000-of-00002.parquet',
        'data.tmp', 'z.latents.npy', '.hidden', 'train.bin')
    with Claim(tmp_path, mark, NAMES[mark]):
        pass
    assert tree(tmp_path) == before | {'lock': f'{mark}\n'.encode()}
    (tmp_path / NAMES[mark][0]).touch()                        # now it is of ours, with all names
    Claim(tmp_path, mark, NAMES[mark]).__exit__()


KINDS = {'link': lambda path: path.symlink_to('../mine'),
         'dangling link': lambda path: path.symlink_to('../nowhere'),
         'device': lambda path: path.symlink_to('/dev/zero'), 'pipe': os.mkfifo}


@pytest.mark.parametrize('mark, name', [
    *((RUN, name) for name in ('config.json', 'best', 'training_log.jsonl', 'data', 'step-00000004',
                               'lock')),
    *((DATASET, name) for name in ('meta.json', 'train-00000.tokens.bin', 'lock'))])
@pytest.mark.parametrize('kind', KINDS)
def test_in_a_folder_of_ours_no_name_is_a_link_a_pipe_or_a_device(tmp_path, mark, name, kind):
    here = tmp_path / 'a'
    Claim(here, mark, NAMES[mark]).__exit__()
    put(tmp_path / 'mine', f'{mark}\n')
    (here / name).unlink(missing_ok=True)
    KINDS[kind](here / name)
    before = tree(tmp_path)
    words = 'and no file lock with' if name == 'lock' else 'this is a link, a pipe or a device'
    with pytest.raises(ValueError, match=f'{name}.* {words}'):
        Claim(here, mark, NAMES[mark])
    assert tree(tmp_path) == before


def test_what_killed_processes_have_left_is_removed_and_nothing_that_looks_like_it(tmp_path):
    a_run(tmp_path).__exit__()
    before = precious(tmp_path, 'step-00000004.tmp', '.step-00000004', '.nanoLDLM',
                      '.nanoLDLM-a-b-12345678', '.nanoLDLM-results.json-12345678')
    put(tmp_path / '.nanoLDLM-step-00000004-abcdefgh/model.safetensors')
    put(tmp_path / '.nanoLDLM-config.json-abcdefgh')
    with a_run(tmp_path):
        assert tree(tmp_path) == before
    clear(tmp_path, 'results.json', 'a')           # and not of a-b, which may be written now
    assert tree(tmp_path).keys() == before.keys() - {'.nanoLDLM-results.json-12345678'}


def test_of_processes_that_begin_at_once_one_has_the_folder_and_no_other_harms_it(
        tmp_path, monkeypatch):
    """ The one that has it removes what it takes for left over: the mark that another makes. """
    others = []
    link, rmtree, unlink = os.link, shutil.rmtree, os.unlink

    def overtaken(*args):
        monkeypatch.setattr(os, 'link', link)
        others.append(a_run(tmp_path / 'run'))
        link(*args)
    monkeypatch.setattr(os, 'link', overtaken)
    with pytest.raises(ValueError, match='in use by another process'):
        a_run(tmp_path / 'run')
    others[0].check()
    others[0].__exit__()

    # what is left over is removed by two at once
    def twice(path, **kw):
        rmtree(path)
        rmtree(path, **kw)
    (tmp_path / 'run/.nanoLDLM-data-abcdefgh').mkdir()
    monkeypatch.setattr(shutil, 'rmtree', twice)
    with a_run(tmp_path / 'run'):
        assert tree(tmp_path / 'run').keys() == {'lock'}

    # one that fails leaves no trace, but another begins there
    def begun(path, **kw):
        unlink(path, **kw)
        if path == str(tmp_path / 'new/lock'):
            Path(path).touch()
    monkeypatch.setattr(os, 'unlink', begun)
    with pytest.raises(KeyError), a_run(tmp_path / 'new'):
        raise KeyError


def test_a_file_system_without_locks_or_links_is_a_warning(tmp_path, monkeypatch, capsys):
    def cannot(*args):
        raise OSError(95, 'not supported')
    monkeypatch.setattr(os, 'link', cannot)
    monkeypatch.setattr(fcntl, 'flock', cannot)
    with a_run(tmp_path), a_run(tmp_path):
        assert tree(tmp_path) == {'lock': f'{RUN}\n'.encode()}
    assert capsys.readouterr().err.count('cannot be locked') == 2


REPLACED = {'moved': lambda here: here.rename(here.with_name('b')),
            'removed': shutil.rmtree,
            'made anew': lambda here: (shutil.rmtree(here), a_run(here)),
            'emptied': lambda here: ((here / 'lock').unlink(), a_run(here))}


@pytest.mark.parametrize('replace', REPLACED)
def test_whoever_has_a_folder_knows_that_it_is_no_longer_there(tmp_path, replace):
    here = tmp_path / 'a'
    ours = a_run(here)
    ours.check()
    REPLACED[replace](here)
    with pytest.raises(ValueError, match='a/lock was removed, moved or replaced'):
        ours.check()


def test_a_folder_that_was_begun_in_vain_is_not_left(tmp_path):
    (tmp_path / 'mine').mkdir()
    for name, written in (('new', ()), ('begun', ('config.json',)), ('mine', ())):
        with pytest.raises(ZeroDivisionError), a_run(tmp_path / name):
            for file in written:
                write_text(tmp_path / name / file, '')
            1 / 0
    assert not (tmp_path / 'new').exists() and (tmp_path / 'mine').exists()
    assert sorted(os.listdir(tmp_path / 'begun')) == ['config.json', 'lock']


def test_a_folder_is_removed_only_where_all_that_is_in_it_is_ours(tmp_path):
    ours = put(tmp_path / 'ours/meta.json').parent
    assert remove_folder(ours, run_folder.DATA_FILES) and not ours.exists()
    for name in ('notes.txt', 'raw/a.txt'):
        before = precious(tmp_path / 'mixed', 'meta.json', name)
        assert not remove_folder(tmp_path / 'mixed', run_folder.DATA_FILES)
        assert tree(tmp_path / 'mixed') == before
    put(tmp_path / 'a/meta.json')
    (tmp_path / 'link').symlink_to('a')
    assert not remove_folder(tmp_path / 'link', run_folder.DATA_FILES)
    assert (tmp_path / 'a/meta.json').exists()


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning_and_the_new_one_is_saved(
        tmp_path, monkeypatch, capsys):
    save_each(tmp_path, 1, 2)

    def cannot(path, ignore_errors=False):
        if not ignore_errors:                                  # a file that is still read, on NFS
            raise OSError(39, 'Directory not empty')
    monkeypatch.setattr(shutil, 'rmtree', cannot)
    save_each(tmp_path, 3, keep=2)
    assert [path.name[-1] for path in checkpoint.steps(tmp_path)] == ['3', '2']
    assert 'step-00000001 cannot be removed: [Errno 39]' in capsys.readouterr().err


def test_a_checkpoint_with_a_file_of_the_user_is_kept_and_so_is_one_that_was_set_aside(tmp_path,
                                                                                     capsys):
    save_each(tmp_path, 1, 2)
    (tmp_path / 'step-00000001/notes.txt').write_text('precious')
    (tmp_path / 'step-00000002.broken').write_text('precious')
    before = tree(tmp_path / 'step-00000001')
    save_each(tmp_path, 3, 4, 5, keep=1)
    assert tree(tmp_path / 'step-00000001') == before
    assert not (tmp_path / 'step-00000003').exists()
    assert capsys.readouterr().err.count('step-00000001 is kept: it holds files that no') == 1

    # a broken one goes under another name
    checkpoint.write_checkpoint(tmp_path, 2, *states(2))
    for step in (4, 5):
        shutil.rmtree(tmp_path / f'step-{step:08d}', ignore_errors=True)
    os.truncate(tmp_path / 'step-00000002/model.safetensors', 9)
    assert checkpoint.newest(tmp_path).name == 'step-00000001'
    assert (tmp_path / 'step-00000002.broken').read_text() == 'precious'
    assert (tmp_path / 'step-00000002.broken.broken/model.safetensors').exists()


def test_data_of_an_attempt_without_a_checkpoint_is_replaced_but_nothing_of_the_user(tmp_path):
    out = new_run(tmp_path)
    config = dict(out_dir=str(out), wandb_project='', seed=1, max_iters=9)
    (out / 'data/encoder.npz').write_text('of another dataset')
    run_folder.begin(config, tmp_path / 'dataset', 0)
    assert [path.name for path in (out / 'data').iterdir()] == ['meta.json']
    (out / 'data/raw').mkdir()
    (out / 'data/raw/notes.txt').write_text('precious')
    (out / 'config.json').write_text('as it was')
    before = tree(out)
    with pytest.raises(ValueError, match='data holds files that no run has put there'):
        run_folder.begin(config, tmp_path / 'dataset', 0)
    assert tree(out) == before
    run_folder.claim.__exit__()


# ---- the commands

def test_train_stops_in_a_folder_of_somebody_else_before_it_touches_anything(
        dataset, finished, tmp_path):
    user, own = tmp_path / 'user', tmp_path / 'dataset'
    precious(tmp_path, 'user/data/raw/notes.txt', 'user/config.json', 'mine')
    linked, hard = (shutil.copytree(finished, tmp_path / name) for name in ('linked', 'hard'))
    (linked / 'training_log.jsonl').unlink()
    (linked / 'training_log.jsonl').symlink_to(tmp_path / 'mine')
    os.link(hard / 'training_log.jsonl', tmp_path / 'other name')
    shutil.copytree(dataset, own)
    before = tree(tmp_path)
    expected = {user: 'user holds config.json, data, and no file lock',
                linked: 'training_log.jsonl: this is a link', hard: 'a hard link',
                own: "no file lock with the words 'nanoLDLM run'"}
    results = run_each(*[['train.py', *flags(dataset=dataset, out_dir=out), *TINY, '--max_iters=16']
                         for out in expected])
    for result, words in zip(results, expected.values()):
        assert_refused(result, words)
    assert tree(tmp_path) == before


def test_prepare_stops_in_a_folder_of_somebody_else_and_in_that_of_the_encoder(finished, here):
    write_lines('lines.txt', [f'a dog number {i}' for i in range(50)])
    put('user/tokenizer.json', '{"mine": 1}')
    put('encoder/config.json', '{}')
    shutil.copytree(finished, 'run')
    before = tree(here)
    prepare = ['prepare.py', *flags(input='lines.txt', tokenizer='byte')]
    user, own, encoder, inside = run_each(
        [*prepare, '--out=./user'], [*prepare, '--out=./run'],
        [*prepare, '--encoder=./encoder', '--out=./encoder'],
        [*prepare, '--encoder=./encoder', '--out=./encoder/data'], cwd=here)
    assert_refused(user, 'user holds tokenizer.json, and no file lock')
    assert_refused(own, "no file lock with the words 'nanoLDLM dataset'")
    assert_refused(encoder, 'lies in the folder of the encoder')
    assert_refused(inside, 'choose another --out')
    assert tree(here) == before


def test_sample_export_plot_and_evaluate_touch_nothing_that_they_did_not_write(
        dataset, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / 'run')
    precious(tmp_path, 'own.svg', 'own.svg.tmp', 'given.tmp', 'run/curves.png')
    put(tmp_path / 'mine', '[]')
    (tmp_path / 'own.svg').chmod(0o600)
    (tmp_path / 'named.svg').symlink_to('own.svg')
    (out / 'results.json').symlink_to(tmp_path / 'mine')
    before = tree(tmp_path)
    export = ['runs/export.py', *flags(out_dir=out, to=tmp_path / 'given')]
    sampled, exported, again, drawn, measured = run_each(
        ['sample.py', *flags(out_dir=out, text='a dog', svg=tmp_path / 'named.svg', device='cpu')],
        export, export, ['plot.py', f'--out_dir={out}'],
        ['evaluate.py', *flags(out_dir=out, dataset=dataset, tasks='nelbo', n=4, draws=1,
                               device='cpu')])
    assert sampled[0] == exported[0] == measured[0] == 0, (sampled, exported, measured)
    assert_refused(again, 'given exists')
    assert_refused(drawn, 'curves.png is there, and no script of nanoLDLM wrote it')
    after = tree(tmp_path)
    assert mode(tmp_path / 'own.svg') == 0o600 and b'<svg' in after['own.svg']
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {'own.svg', 'run/results.json'} and after['mine'] == b'[]'
    assert {name.split('/')[0] for name in after.keys() - before.keys()} == {'given'}
    assert not [name for name in after if '.nanoLDLM' in name]
