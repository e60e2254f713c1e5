"""
What a card can do, before any of our trainings: its matrix products, its memory, the head at two
vocabularies, and which kernel attends. Each function returns {row: {field: value}} for the table of
bench.py --what=gpu.

Letters: B batch, H heads, S = K + L tokens of both streams, d size of a head, C width, V
vocabulary, P positions where the head runs.
"""
import platform
import time
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.step import begin_peak, matmul_rate, peak_gb
from diffusion import MaskedText
from runs.checkpoint import pick_dtype
from runs.flops import peak_of

BACKENDS = {'flash': SDPBackend.FLASH_ATTENTION, 'efficient': SDPBackend.EFFICIENT_ATTENTION,
            'cudnn': SDPBackend.CUDNN_ATTENTION, 'math': SDPBackend.MATH}


def wait(device):
    """ Until the device has done what it was given. """
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize(device)


def seconds_of(call, device, at_least=0.2):
    """ Seconds of one call: a mean over as many as fit into `at_least` seconds. """
    for _ in range(3):                                     # the first calls are slower
        call()
    wait(device)

    count = 0
    began = time.perf_counter()
    while time.perf_counter() < began + at_least:
        for _ in range(5):
            call()
        wait(device)
        count += 5
    return (time.perf_counter() - began) / count


def versions(device):
    found = dict(python=platform.python_version(), torch=torch.__version__)
    found['device'] = platform.processor() or platform.machine()
    if torch.device(device).type == 'cuda':
        card = torch.cuda.get_device_properties(device)
        found.update(device=card.name, capability=f'{card.major}.{card.minor}',
                     memory=f'{card.total_memory / 2 ** 30:.1f} GiB',
                     cards=torch.cuda.device_count(), cuda=torch.version.cuda,
                     cudnn=torch.backends.cudnn.version(),
                     nccl='.'.join(map(str, torch.cuda.nccl.version())))
    return {name: dict(value=value) for name, value in found.items()}


def rates(device, n):
    """ Of a product of two n x n matrices in the dtype that is fast here, and of a copy of 32 n^2
    bytes (read and written). """
    matmul = matmul_rate(device, n=n, seconds=1.0 if n > 1000 else .05)
    row = {'TFLOP/s': matmul / 1e12}
    if peak_of(device):
        row['% of peak'] = 100 * matmul / peak_of(device)

    source = torch.empty(32 * n * n, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device, .2 if n > 1000 else .02)
    return {f'matmul {n:,} cubed, {pick_dtype("auto", device)}': row,
            'copy': {'GB/s': 2 * len(source) / seconds / 1e9}}


def head(device, P, C, vocabularies):
    """ The text head with its loss, forward and backward, as a training runs it. """
    rows = {}
    for V in vocabularies:
        hidden = torch.randn(P, C, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(V, C, device=device, requires_grad=True)
        targets = torch.randint(V, (P,), device=device)
        of_positions = torch.full((P,), 1 / P, device=device)
        text = MaskedText(V)

        def step():
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss, _, _ = text.loss(hidden, weight, targets, of_positions)
            loss.backward()
            hidden.grad = weight.grad = None

        begin_peak(device)
        seconds = seconds_of(step, device)
        rows[f'V {V:,}, {P:,} positions of width {C}'] = {
            'ms': 1000 * seconds, 'TFLOP/s': 6 * P * C * V / seconds / 1e12,
            'GB': peak_gb(device)}
    return rows


def attention_ms(q, k, v, is_causal, backend=None):
    """ Milliseconds of attention, forward and backward; None where the backend cannot. """
    def step():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        out.backward(out)
        q.grad = k.grad = v.grad = None

    if backend is None:
        return 1000 * seconds_of(step, q.device, .1)
    try:
        with sdpa_kernel(backend):
            return 1000 * seconds_of(step, q.device, .1)
    except RuntimeError:                                   # no such kernel for this shape or device
        return None


def attention(device, name, B, H, S, d):
    """ Which kernel PyTorch chooses for a model's shape, what it takes, and what others take. """
    rows = {}
    for kind, is_causal in (('full', False), ('causal', True)):
        q, k, v = (torch.randn(B, H, S, d, device=device, dtype=torch.bfloat16, requires_grad=True)
                   for _ in range(3))
        chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=is_causal))
        row = {'chosen': chosen.name.removesuffix('_ATTENTION').lower(),
               'ms': attention_ms(q, k, v, is_causal)}

        # PyTorch warns at length of why a backend cannot
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            for backend, value in BACKENDS.items():
                row[f'{backend} ms'] = attention_ms(q, k, v, is_causal, value)
        rows[f'{name} {kind}, {B} x {H} x {S} x {d}'] = row
    return rows
