""" docs/extending.md: every extension on that page is made here as the page says, word for word, in
a copy of the tree, and used. """
import json
import runpy
import shutil
import wave

import numpy as np
import torch

from data import PackedDataset
from launch import TINY, log, run_code, run_each
from runs import checkpoint
from toys import l2t, net_of, random_inputs, random_network, save_encoder

CPU = ['--device=cpu', '--dtype=float32']


def works(tree, tmp_path, *commands):
    """ (stdout, stderr) of commands in the copy, each of which ends well. """
    results = run_each(*commands, cwd=tmp_path, root=tree)
    for (code, _, err), command in zip(results, commands):
        assert code == 0, (command, err)
    return [(out, err) for _, out, err in results]


def test_a_sampler_a_text_process_and_a_task_work_in_training_sampling_and_evaluation(
        tree, dataset, finished, tmp_path):
    data, here, whole = f'--dataset={dataset}', f'--out_dir={tmp_path}/early', tmp_path / 'whole'
    shutil.copytree(finished, whole)                       # evaluate.py writes into the run folder
    works(tree, tmp_path,
          ['train.py', data, here, *TINY, '--text_process=early', '--text_clock=false',
           '--mode=l2t'],
          ['evaluate.py', here, '--tasks=nelbo', '--n=8', *CPU],
          ['train.py', data, f'--out_dir={tmp_path}/plain', *TINY, '--mode=l2t'],
          ['sample.py', f'--out_dir={tmp_path}/plain', '--text=a red dog runs',
           '--sampler=leftmost', '--steps=4', *CPU],
          ['evaluate.py', f'--out_dir={tmp_path}/plain', '--tasks=length', '--n=8',
           '--sampler=leftmost', '--steps=4', *CPU])
    config = json.loads((tmp_path / 'early/config.json').read_text())
    assert config['text_process'] == 'early'
    found = (tmp_path / 'plain/results.json').read_text()
    assert 'difference' in found and 'shuffled' in found and 'null' in found


def test_the_loss_weighting_and_the_block_train_and_are_used(tree, dataset, tmp_path):
    both = [['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/{weight}', *TINY,
             '--mode=l2t', f'--text_loss_weight={weight}'] for weight in ('root', 'bound')]
    works(tree, tmp_path, *both)
    root, bound = (log(tmp_path / weight)[1, False]['loss'] for weight in ('root', 'bound'))
    assert root < bound
    model = checkpoint.read_tensors(tmp_path / 'root/step-00000012/model.safetensors')
    up, down = (model[f'blocks.0.text.{name}.weight'] for name in ('up', 'down'))
    assert up.shape[0] == 2 * down.shape[1] and model['blocks.0.text.down.weight'].any()


def test_texts_are_written_with_a_cache_as_without_one_by_the_changed_block(tree, monkeypatch):
    """ From left to right, where sampling/reader.py has the cache, and by masks. """
    changed = runpy.run_path(str(tree / 'model.py'))
    monkeypatch.setattr('toys.Model', changed['Model'])
    B, L, MASK, EOS, PAD = 6, 12, 20, 18, 19
    model = random_network(MASK, L, shortcut=True)
    torch.nn.init.normal_(model.embed.weight, std=10.)     # or the clocks would choose the tokens
    with torch.no_grad():
        model.text_modulation.weight.mul_(.3)
    stream = model.blocks[0].text
    assert stream.up.out_features == 2 * stream.down.in_features, 'it is not the changed one'
    net = net_of(model, 'l2t+causal', eos=EOS, pad=PAD)
    _, z, _, _ = random_inputs(B)
    zero, rows = torch.zeros(B), torch.arange(B)

    # the likeliest token after those before it, which are all read anew
    x = torch.full((B, L), MASK)
    for i in range(L):
        with torch.no_grad():
            logits, _ = model(x, z, zero, zero, predict=('text',), n_causal=B)
        ended = (x[:, :i] == EOS).any(1)
        x[:, i] = torch.where(ended, PAD, logits[:, i, :PAD].argmax(1))
    assert l2t(net, z, sampler='autoregressive').equal(x) and x.unique().numel() > 3, x

    # the likeliest token where the network is surest
    x = torch.full((B, L), MASK)
    for i in range(L):
        with torch.no_grad():
            logits, _ = model(x, z, zero + (L - i) / L, zero, predict=('text',))
        log_p, likeliest = logits.log_softmax(2).max(2)
        surest = log_p.masked_fill(x != MASK, -torch.inf).argmax(1)
        x[rows, surest] = likeliest[rows, surest]
    assert l2t(net, z, sampler='confidence', end_penalty=0.).equal(x) and x.unique().numel() > 3, x


def test_the_row_of_an_encoder_and_the_encoder_class_embed(tree, tmp_path):
    folder = save_encoder(tmp_path / 'bert')
    code = f"""
import sys
sys.path.insert(0, {str(tree)!r})
import encoders
encoders.find_folder = lambda where, revision: ({folder!r}, revision)
encoder = encoders.find_encoder('e5_small', dimension=32)
assert encoder.record['id'] == 'intfloat/e5-small-v2' and encoder.record['prefix'] == 'query: '
assert encoder(['a dog runs', 'a cat']).shape == (2, 1, 32)
"""
    result = run_code(code)
    assert result.returncode == 0, result.stderr
    lines = '\n'.join(f'a dog number {i} runs near house {i % 7}' for i in range(120))
    (tmp_path / 'lines.txt').write_text(lines)
    data, here = f'{tmp_path}/packed', f'--out_dir={tmp_path}/run'
    *_, (out, _) = works(
        tree, tmp_path, ['prepare.py', f'--input={tmp_path}/lines.txt', '--encoder=hashed',
                         '--vocab_size=300', '--val_fraction=.1', f'--out={data}'],
        ['train.py', f'--dataset={data}', here, *TINY, '--mode=l2t'],
        ['sample.py', here, '--text=a dog runs', '--device=cpu'])
    assert '  -> ' in out

    # it has no settings, and another revision of its code does not embed as the data were
    (code, _, err), = run_each(
        ['prepare.py', f'--input={tmp_path}/lines.txt', '--encoder=hashed', '--pooling=cls',
         f'--out={tmp_path}/other'], cwd=tmp_path, root=tree)
    assert code == 2 and 'encoder=hashed has no settings' in err, err
    path = tree / 'corpora/hashed.py'
    before = path.read_text()
    path.write_text(before.replace("revision='1'", "revision='2'"))
    (code, _, err), = run_each(['sample.py', here, '--text=a dog runs', '--device=cpu'],
                               cwd=tmp_path, root=tree)
    path.write_text(before)
    assert code == 2 and 'encoder hashed: revision 2, expected 1' in err, err


def test_a_reader_brings_latents_along_and_texts_are_read_without_it(
        tree, dataset, tmp_path):
    rng = np.random.default_rng(0)
    titles = [f'a sound number {i} of kind {i % 7}' for i in range(120)]
    (tmp_path / 'sounds').mkdir()
    with open(tmp_path / 'sounds/titles.tsv', 'w') as table:
        for i, title in enumerate(titles):
            table.write(f'{i}.wav\t{title}\n')
            with wave.open(f'{tmp_path}/sounds/{i}.wav', 'wb') as sound:
                sound.setparams((1, 2, 8000, 0, 'NONE', ''))
                sound.writeframes(rng.integers(-2**14, 2**14, 250 + i).astype('<i2').tobytes())
    lines, data, run = tmp_path / 'lines.txt', tmp_path / 'packed', f'--out_dir={tmp_path}/plain'
    lines.write_text('\n'.join(titles[:10]))

    # its latents are given: no text may be cut, and an encoder is not missing
    (out, _), *_ = works(
        tree, tmp_path,
        ['prepare.py', f'--input={tmp_path}/sounds', '--frames=4', '--tokenizer=byte',
         '--val_fraction=.1', f'--out={data}'],
        ['train.py', f'--dataset={dataset}', run, *TINY, '--mode=l2t'],
        ['evaluate.py', run, '--tasks=nelbo', f'--texts={lines}', '--n=4', *CPU])
    assert 'text alone' not in out and 'are dropped' in out, out
    train = PackedDataset(data, 'train')
    assert train.latent_shape == (4, 64) and train.meta['source']['input'] == ['sounds']
    (code, _, err), = run_each(
        ['prepare.py', f'--input={tmp_path}/sounds', '--frames=4', '--latents_from=z.npy',
         f'--out={tmp_path}/other'], cwd=tmp_path, root=tree)
    assert code == 2 and 'latents_from and frames each say' in err, err
