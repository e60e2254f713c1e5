"""
The machine of this process: its device, and the numbers that the device is fast in.
"""
import ctypes
import os
import re
import sys

import torch

from base.console import warn_once
from base.files import one_line

# instructions for products in bfloat16: two of x86, one of ARM
CPU_BFLOAT16 = ('amx_bf16', 'avx512_bf16', 'bf16')


def pick_device(name='auto'):
    """ The name of a device. auto, cuda: the GPU of this process, and auto is the CPU where there
    is none. mps, a Mac's GPU, has never been tried, so auto does not choose it. ValueError where
    the device cannot be used. """
    name = str(name)                                       # it may be a torch.device
    if not re.fullmatch(r'auto|cpu|mps|cuda(:\d+)?', name, re.ASCII):
        raise ValueError(f'device={name!r} is of a kind that nothing here was tried on: choose '
                         'from auto, cpu, cuda, mps, cuda:1 or the like; --device=cpu works '
                         'everywhere')
    n_gpus = torch.cuda.device_count()
    if name in ('auto', 'cuda') and n_gpus:
        number = int(os.environ.get('LOCAL_RANK') or os.environ.get('RANK') or 0)
        name = f'cuda:{number}'
    elif name == 'auto':
        name = 'cpu'
    try:
        torch.empty(0, device=name)
        if name == 'mps':
            warn_once('device=mps was never tried: compare what it gives with --device=cpu')
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f'device={name!r} cannot be used here, on a machine with {n_gpus} GPUs: '
                         f'{one_line(error)}; --device=cpu, or auto') from None
    return name


def pick_dtype(name, device):
    """ 'auto' is bfloat16 where the device has instructions for its products, else float32: a CPU
    without them is many times slower in bfloat16 (docs/speed.md). ValueError for another name. """
    if name not in ('auto', 'bfloat16', 'float32'):
        raise ValueError(f'dtype={name!r}: choose from auto, bfloat16, float32')
    if name != 'auto':
        return name
    device_type = torch.device(device).type
    if device_type == 'mps':
        return 'float32'
    if device_type == 'cuda':
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        # without oneDNN torch does not use the instructions
        capabilities = torch.cpu.get_capabilities()
        has_bfloat16 = (torch.backends.mkldnn.is_available()
                        and any(capabilities.get(instruction) for instruction in CPU_BFLOAT16))
    return 'bfloat16' if has_bfloat16 else 'float32'


def keep_freed_memory():
    """ By default glibc returns every large temporary tensor to Linux, and its pages are faulted in
    again at the next step. Now glibc keeps what is free. """
    if sys.platform == 'linux':
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)                                # M_MMAP_MAX: no large block of its own
        libc.mallopt(-1, 2 ** 31 - 1)                      # M_TRIM_THRESHOLD
