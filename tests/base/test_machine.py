""" Which device, and which numbers. """
import pytest
import torch

from base import console
from base.machine import pick_device, pick_dtype


@pytest.mark.parametrize('n_gpus, device', [(4, 'cuda:3'), (1, None)])
def test_a_process_takes_its_own_gpu(monkeypatch, n_gpus, device):
    def empty(size, device):
        if int(device[5:]) >= n_gpus:
            raise RuntimeError('CUDA error: invalid device ordinal')
    monkeypatch.setattr(torch, 'empty', empty)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: n_gpus)
    monkeypatch.setenv('LOCAL_RANK', '3')
    if device:
        assert pick_device('auto') == pick_device('cuda') == device
    else:
        with pytest.raises(ValueError, match="device='cuda:3' .* a machine with 1 GPUs"):
            pick_device('auto')


def test_the_gpu_of_a_mac_is_taken_where_it_is_asked_for_and_said_to_be_untried(
        monkeypatch, capsys):
    console.warn_once.cache_clear()
    with pytest.raises(ValueError, match="device='mps' cannot be used here"):
        pick_device('mps')
    assert not capsys.readouterr().err, 'nothing is said of a device that is not there'

    monkeypatch.setattr(torch, 'empty', lambda size, device: None)
    assert pick_device('mps') == 'mps'
    assert 'device=mps was never tried' in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    assert pick_device('auto') == 'cpu' and pick_dtype('auto', 'mps') == 'float32'


@pytest.mark.parametrize('name', ['xpu', 'meta', 'gpu', 'cuda:', 'cuda:x', 'cpu:0'])
def test_another_device_is_refused_without_a_word_on_gpus(name):
    with pytest.raises(ValueError, match=f"device='{name}' is of a kind ") as error:
        pick_device(name)
    assert 'GPU' not in str(error.value)
    assert pick_device(torch.device('cpu')) == 'cpu'


@pytest.mark.parametrize('device, mkldnn, machine, expected', [
    ('cpu', True, {'avx512_bf16': True, 'amx_bf16': False}, 'bfloat16'),
    ('cpu', True, {'bf16': True}, 'bfloat16'),
    ('cpu', True, {'avx2': True, 'avx512_f': True, 'avx512_bf16': False}, 'float32'),
    ('cpu', False, {'bf16': True}, 'float32'),
    ('cuda:0', True, {'cuda:0': (8, 0), 'cuda:1': (7, 5)}, 'bfloat16'),
    ('cuda:1', True, {'cuda:0': (8, 0), 'cuda:1': (7, 5)}, 'float32')])
def test_the_numbers_are_those_whose_products_the_machine_has_instructions_for(
        monkeypatch, device, mkldnn, machine, expected):
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: mkldnn)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', machine.get)
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: machine)
    assert pick_dtype('auto', device) == expected
    assert pick_dtype('bfloat16', device) == 'bfloat16'
    with pytest.raises(ValueError, match="'float16'"):
        pick_dtype('float16', device)
