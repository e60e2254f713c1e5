""" What a training asks and says before it begins. """
import math

import pytest
import torch

from diffusion import MaskedText
from launch import flags_of, run_each
from model import Model, ModelConfig
from processes.gidd import GIDD
from processes.hdlm import HDLM
from runs import preflight
from runs.preflight import flops_of
from runs.stages import read_stages


@pytest.mark.parametrize('world, expected', [(1, (128, 4)), (2, (128, 2)), (4, (128, 1)),
                                             (8, (64, 1))])
def test_a_step_has_the_same_rows_on_any_number_of_processes(monkeypatch, world, expected):
    monkeypatch.setenv('WORLD_SIZE', str(world))
    assert preflight.share_rows(128, 512) == expected
    assert preflight.share_rows(128, None) == (128, 1)


@pytest.mark.parametrize('world, n, words', [
    (3, 512, '512 .* 3 processes'), (1024, 512, '512 .* 1024 processes'),
    (2, 384, '384 .* 2 processes .* batch_size=128:')])
def test_rows_that_cannot_be_shared_are_refused(monkeypatch, world, n, words):
    monkeypatch.setenv('WORLD_SIZE', str(world))
    with pytest.raises(ValueError, match=words):
        preflight.share_rows(128, n)


def test_preflight_says_what_it_found_and_builds_nothing(dataset, tmp_path):
    here = ['train.py', *flags_of(dataset, tmp_path / 'run', ['--preflight_only=true'])]
    (code, out, err), (_, kept, _), (full, _, why) = run_each(
        here, [*here, '--keep=1000', '--eval_interval=5', '--max_iters=18'],
        [*here, '--keep=1000000', '--max_iters=1e9', '--eval_interval=1'])
    assert code == 0 and not err and not (tmp_path / 'run').exists()
    ticks = [line.split()[1] for line in out.splitlines() if line.startswith('✓')]
    assert ticks == ['data', 'model', 'batch', 'cost', 'device', 'disk']
    assert '1 x 16' in out and ' for 3 checkpoints to come' in out
    assert ' for 4 checkpoints to come' in kept, 'no more than are made: 5, 10, 15, 18'
    assert full == 4 and why.count('\n') == 1 and 'checkpoints to come need' in why


@pytest.mark.parametrize('process, share', [
    (MaskedText(50), 1 / 2), (MaskedText(50, 'cosine'), 2 / math.pi), (GIDD(50), 1),
    (HDLM(50, torch.arange(50) % 8, gamma=3.), 3 / 4)])
def test_the_floating_point_operations_count_the_head_where_a_text_is_scored(process, share):
    """ Of a masked text a mean of M(t), of GIDD's all; six of a matrix, three products. """
    with torch.device('meta'):
        sketch = Model(ModelConfig(vocab_size=50, seq_len=16, width=32, heads=2, depth=1,
                                   streams=('text',)))
    stage, = read_stages('unconditional', '', ('text',), 9, 16)
    more = flops_of(sketch, 64, stage, process) - flops_of(sketch, 64, stage, MaskedText(50))
    head = 6 * 64 * 16 * 50 * 32
    assert more / head == pytest.approx(share - 1 / 2, abs=.005)
