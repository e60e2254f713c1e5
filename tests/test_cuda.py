"""
What a device computes, by promises that need no second device. Each test runs on the CPU, and under
`make gpu` on the card too, which conftest.py hides from all other tests. There a test that is
skipped has failed. Speed, and losses beside the CPU's, are bench.py's.
"""
import contextlib
import io
import runpy
import shutil
import sys
import threading
import warnings
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import diffusion
from base import distributed
from data import Loader, PackedDataset, Rows
from diffusion import Batch, GaussianLatents, Loss, MaskedText, Noising, mode_shares
from launch import MAY_LACK, ROOT, TINY, Job, cut, log, saved, train
from model import (attention, attention_of_rows, attention_with_prefix, causal_mask, norm,
                   rms_norm, squared_relu)
from runs.muon import Muon
from samplers import SAMPLERS
from sampling.beams import fill_by_beams
from sampling.run import Run
from sampling.solvers import SOLVERS
from toys import l2t, net_of, random_inputs, random_network

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a card: make gpu')
DEVICES = ['cpu', pytest.param('cuda', marks=needs_card)]
on_each_device = pytest.mark.parametrize('device', DEVICES)
B, L, N, D, V = 6, 12, 2, 6, 20


@pytest.fixture(autouse=True)
def whole_float32_products():
    """ Not rounded to TF32, whatever a script has set in this process. """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')
    yield
    torch.set_float32_matmul_precision(before)


def network(device, **more):
    return random_network(V, L, **more).to(device)


def inputs(device):
    return [x.to(device) for x in random_inputs(B, L, V, N, D)]


# ---- attention and its masks

@on_each_device
@pytest.mark.parametrize('n_causal', [1, 4, B])
def test_a_causal_row_sees_no_later_token_and_its_latents_no_text(device, n_causal):
    model, (x, z, t, s) = network(device), inputs(device)
    with torch.no_grad():
        logits, latents = model(x, z, t, s, n_causal=n_causal)
        for j in (0, 5, L - 1):
            changed = x.clone()
            changed[:, j] = (x[:, j] + 1) % V
            other, other_latents = model(changed, z, t, s, n_causal=n_causal)
            causal, full = (logits - other).abs().amax(2).split([B - n_causal, n_causal])[::-1]
            assert (causal[:, :j + 1] < 1e-5).all(), 'position j predicts token j'
            assert j == L - 1 or (causal[:, j + 1] > 1e-3).all(), 'the next one reads it'
            assert (full > 1e-4).all(), 'a row that is not causal reads it everywhere'
            of_latents = (latents - other_latents).abs().amax((1, 2))
            assert (of_latents[B - n_causal:] < 1e-5).all()
            assert (of_latents[:B - n_causal] > 1e-4).all()


def attention_by_equation(q, k, v, mask):
    """ softmax(q k' / sqrt(d)) v in float64 on the CPU. """
    q, k, v = (x.detach().cpu().double().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** .5
    out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return out, torch.autograd.grad(out.square().sum(), (q, k, v))


def close_to_the_equation(q, k, v, mask, compute, tolerance):
    """ Output and gradients of compute(q, k, v), each relative to its own size. """
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = compute(*inputs)
    gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    expected, expected_gradients = attention_by_equation(q, k, v, mask)
    for a, b in zip((out, *gradients), (expected, *expected_gradients)):
        assert (a.detach().cpu().double() - b.detach()).norm() < tolerance * b.norm()


@on_each_device
@pytest.mark.parametrize('K', [0, 1, 5])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_of_rows_and_with_a_prefix_is_the_dense_mask_forward_and_backward(
        device, K, dtype, tolerance):
    q, k, v = torch.randn(3, 4, 2, K + L, 16).to(device, dtype)
    mask = causal_mask(K, L)
    close_to_the_equation(q, k, v, mask, lambda *qkv: attention_with_prefix(*qkv, K), tolerance)
    for n_causal in (0, 1, 4):
        of_rows = mask | (torch.arange(4) < 4 - n_causal)[:, None, None, None]
        close_to_the_equation(q, k, v, of_rows, lambda *qkv: attention_of_rows(*qkv, K, n_causal),
                              tolerance)


@needs_card
@pytest.mark.parametrize('heads, S', [(12, 256), (16, 1024)], ids=['l2t', 'l2t_892m'])
def test_the_attention_of_cudnn_which_trains_on_hopper_is_the_equation(heads, S):
    q, k, v = torch.randn(3, 2, heads, S, 64, device='cuda', dtype=torch.bfloat16)
    if not torch.backends.cuda.can_use_cudnn_attention(
            torch.backends.cuda.SDPAParams(q, k, v, None, 0., True, False)):
        assert torch.cuda.get_device_capability() < (9, 0), 'a Hopper card has it'
        pytest.skip(f'{MAY_LACK} the attention of cuDNN')
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        close_to_the_equation(q, k, v, causal_mask(S, 0), attention, 2e-2)
        close_to_the_equation(q, k, v, causal_mask(0, S),
                              lambda *qkv: attention_with_prefix(*qkv, 0), 2e-2)


@on_each_device
def test_compiled_gradients_of_masked_and_causal_rows_are_those_of_the_plain_code(device):
    """ A concatenation of the attention of two slices had nan gradients, compiled for a CPU. """
    if not shutil.which('g++'):
        pytest.skip(f'{MAY_LACK} a C++ compiler')
    found = []
    for compiled in (False, True):
        model = network(device, depth=2, width=64, latent_width=64, latent_tokens=4)
        for block in model.blocks if compiled else ():
            block.compile(dynamic=False)
        with torch.autocast(device, torch.bfloat16):
            logits, latents = model(*inputs(device), n_causal=2)
        (logits.float().square().mean() + latents.float().square().mean()).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert found[1].isfinite().all() and (found[0] - found[1]).norm() < .1 * found[0].norm()


@needs_card
def test_under_autocast_a_block_computes_in_bfloat16():
    model, outs, x = network('cuda'), [], torch.randn(2, 3, 4).cuda().bfloat16()
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: outs.extend(out))
    with torch.autocast('cuda', torch.bfloat16):
        model(*inputs('cuda'), n_causal=2)
        outs += [norm(x), rms_norm(x), squared_relu(x)]
    assert len(outs) == 9
    assert all(out.dtype == torch.bfloat16 for out in outs), 'float32 takes twice the memory'


# ---- writing

@on_each_device
def test_a_run_trains_writes_by_every_sampler_and_embeds_by_every_solver(
        device, dataset, tmp_path):
    result = train(dataset, tmp_path / 'run', '--mode=unconditional+l2t+t2l+causal',
                   '--max_iters=2', f'--device={device}')
    assert result.returncode == 0, result.stderr
    run, text = Run(str(tmp_path / 'run'), device=device), 'a red dog runs near the park'
    rounded = Run(str(tmp_path / 'run'), device=device, dtype='bfloat16')
    for sampler in SAMPLERS:
        for one in (run, rounded):
            assert len(one.write([text], sampler=sampler, steps=3, guidance=2.)) == 1
    for solver in SOLVERS:
        z = run.embed([text], solver=solver, latent_steps=3, guidance=2.)
        assert z.shape == (1, 1, 16) and z.isfinite().all(), solver
    assert len(run.infill(['a [MASK:2] dog'])) == len(run.sample(2, steps=3)) // 2 == 1
    assert len(run.edit([text], towards=['blue'], away=['red'])) == 1
    assert len(run.write([text], rerank=3)) == 1           # the nearest of three drafts
    tokens, is_gap = run.pack([text]), torch.arange(run.net.L)[None] == 2
    z = run.latents_of([text], run.encode([text]))
    beams = fill_by_beams(run.net, tokens, is_gap, z, K=3)
    assert torch.equal(beams.cpu()[~is_gap], tokens[~is_gap])


@on_each_device
def test_the_tokens_that_are_written_with_a_cache_are_the_likeliest_of_the_whole_network(device):
    model, (_, z, _, _) = network(device), inputs(device)
    with torch.no_grad():
        for p in model.text_modulation.parameters():  # or the clocks alone would choose the tokens
            p.mul_(.1)
    eos, pad = V - 2, V - 1
    net = net_of(model, 'l2t+causal', eos=eos, pad=pad)
    tokens = l2t(net, z.cpu(), sampler='autoregressive', temperature=0.).to(device)
    zero = torch.zeros(B, device=device)
    with torch.no_grad():
        logits = model(tokens, z, zero, zero, predict=('text',), n_causal=B)[0]
    logits[..., pad] = -torch.inf
    behind_the_end = (tokens == eos).cumsum(1) - (tokens == eos).long() > 0
    missed = logits.amax(2) - logits.gather(2, tokens[..., None])[..., 0]
    assert (missed[~behind_the_end] < 1e-4).all() and (~behind_the_end).sum() > 2 * B
    assert tokens.unique().numel() > 3


# ---- the loss

def batch_and_loss(device, dtype):
    """ A batch of all four modes on the device, and Loss. """
    g = torch.Generator().manual_seed(2)
    tokens, latents = torch.randint(V - 2, (16, L), generator=g), torch.randn(16, N, D, generator=g)
    tokens[:, 8:] = V - 1                                  # PAD
    tokens[:, 7] = V - 2                                   # EOS
    noising = Noising(MaskedText(V), GaussianLatents(torch.ones(D, device=device)),
                      ('text', 'latent'), cond_drop=0., t_min=.1)
    shares = mode_shares('unconditional+l2t+t2l+causal')
    ids = SimpleNamespace(pad=V - 1, eos=V - 2)
    batch = noising(Rows(tokens, latents, False, 0, 0), shares, ids)
    if device != 'cpu':
        batch = batch.to(device)
    assert 0 < batch.n_causal < 16
    return batch, Loss(network(device), noising, dtype)


def loss_and_gradients(device, dtype='float32', sharded=False):
    batch, loss = batch_and_loss(device, dtype)
    if sharded:
        distributed.shard(loss, device, in_bfloat16=False)
    value = loss(batch, ('text', 'latent')).loss
    value.backward()
    gradients = [p.grad for p in loss.parameters() if p.grad is not None]
    assert all(g.dtype == torch.float32 for g in gradients)
    gradients = [g.full_tensor() if sharded else g for g in gradients]
    return value.detach(), torch.cat([g.flatten() for g in gradients])


@on_each_device
def test_sharded_over_one_process_losses_and_gradients_are_the_same(device):
    """ What one card can see of FSDP: a block is gathered before it runs, and given back. """
    value, gradients = loss_and_gradients(device)
    dist.init_process_group({'cpu': 'gloo', 'cuda': 'nccl'}[device], store=dist.HashStore(),
                            rank=0, world_size=1)
    try:
        other, of_shards = loss_and_gradients(device, sharded=True)
    finally:
        dist.destroy_process_group()
    assert torch.allclose(other, value, rtol=1e-5)
    assert (of_shards - gradients).norm() < 1e-4 * gradients.norm()


@on_each_device
def test_in_bfloat16_losses_and_gradients_are_those_of_float32_to_rounding(device):
    value, gradients = loss_and_gradients(device)
    rounded, rounded_gradients = loss_and_gradients(device, dtype='bfloat16')
    assert 0 < (rounded - value).abs() < .01 * value
    assert (gradients - rounded_gradients).norm() < .1 * gradients.norm()


@on_each_device
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_no_loss_sees_that_its_head_is_filled_up(device, dtype, tolerance, monkeypatch):
    """ As on a card, where it is compiled. Rows of 0 would be the likeliest, if they were seen. """
    targets, ones = torch.randint(50, (40,)).to(device), torch.ones(40, device=device)
    leaves = [x.to(device).requires_grad_() for x in (torch.rand(40, 8), -torch.rand(50, 8))]
    targets[:9] = (leaves[0] @ leaves[1].mT)[:9].argmax(1)
    plain, backend = MaskedText(50).loss, 'inductor' if device == 'cuda' else 'aot_eager'

    def found(loss):
        with torch.autocast(device, dtype, enabled=dtype == torch.bfloat16):
            value, nll, right = loss(*leaves, targets, ones)
        return value, nll, right.float(), *torch.autograd.grad(value, leaves)
    monkeypatch.setitem(diffusion.ROWS_OF_HEAD, device, 1)
    expected = found(plain)
    monkeypatch.setitem(diffusion.ROWS_OF_HEAD, device, 64)
    assert len(diffusion.filled_up(leaves[1])[0]) == 64 and expected[2].any()
    for loss in (plain, torch.compile(plain, dynamic=True, backend=backend)):
        for a, b in zip(found(loss), expected):
            assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize('device', [*DEVICES, 'meta'])
def test_batches_come_in_order_and_an_error_comes_in_its_turn(device, dataset, monkeypatch):
    n_threads, together, got, made = threading.active_count(), threading.Barrier(4), [], []
    if device == 'meta':                                   # as on a card, without one
        monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda x: x)

    def noising(rows, shares, data):
        i = rows.step
        made.append(i)
        if device != 'cpu' and i < 4:
            together.wait(timeout=60)                      # for three others
        nothing = {field.name: None for field in fields(Batch)}
        return Batch(**nothing | dict(n_causal=i, x_t=torch.full((3,), 9 // (7 - i))))

    data = PackedDataset(str(dataset), 'train')
    stage = SimpleNamespace(first=0, end=99, shares=None, seq_len=L)
    with pytest.raises(ZeroDivisionError):
        for batch in Loader(data, 0, B).batches(noising, [stage], 0, device):
            got.append(batch.n_causal)
            assert batch.x_t.device.type == device
            assert device == 'meta' or batch.x_t.tolist() == 3 * [9 // (7 - batch.n_causal)]
    assert got == [*range(7)] and len(made) < 13 and threading.active_count() == n_threads


# ---- the step

@on_each_device
@pytest.mark.parametrize('optimizer', [lambda p: torch.optim.AdamW(p, lr=.1, fused=True),
                                       lambda p: Muon(p, lr=.1)], ids=['adamw', 'muon'])
@pytest.mark.parametrize('value', [float('nan'), float('inf'), 1.])
def test_a_step_that_the_guard_refuses_moves_neither_weights_nor_moments(device, optimizer, value):
    parameters = [torch.nn.Parameter(torch.randn(8, 4, device=device)) for _ in range(3)]
    opt = optimizer(parameters)

    def step(bad, gradient):
        for p in parameters:
            p.grad = torch.full_like(p, gradient)
        opt.found_inf = torch.tensor(bad, device=device)
        opt.step()
        moments = [x for state in opt.state.values() for x in state.values()]
        return [x.detach().clone() for x in [*parameters, *moments]]

    first = step(0., .5)
    assert all(map(torch.equal, first, step(1., value)))
    after = step(0., .5)
    assert not any(map(torch.equal, first, after)) and all(x.isfinite().all() for x in after)


@needs_card
@pytest.mark.parametrize('args', [[], ['--optimizer=muon', '--mode=l2t+causal'],
                                  ['--mode=unconditional+l2t+t2l+causal'],
                                  ['--mode=l2t', '--compile=true']],
                         ids=['adamw', 'muon', 'four modes', 'compiled'])
def test_no_step_of_a_training_waits_for_the_card(dataset, tmp_path, args):
    """ torch warns of each wait: as many in twelve steps as in six, all of the start, of the log
    and of the end. """
    def waits(steps):
        sys.argv = ['train.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/{steps}', *TINY,
                    '--device=cuda', f'--max_iters={steps}',
                    '--log_interval=100', '--eval_interval=100', '--warmup_iters=1', *args]
        with warnings.catch_warnings(record=True) as found, contextlib.redirect_stdout(
                io.StringIO()):
            warnings.simplefilter('always')
            torch.cuda.set_sync_debug_mode('warn')
            try:
                runpy.run_path(str(ROOT / 'train.py'), run_name='__main__')
            finally:
                torch.cuda.set_sync_debug_mode('default')
                torch._dynamo.reset()
        return sum('synchroniz' in str(warning.message) for warning in found)

    waits(3)                                               # what happens once in a process
    assert 0 < waits(6) == waits(12)


# ---- a run

@on_each_device
def test_a_run_that_was_killed_goes_on_to_where_the_unbroken_one_ends(device, dataset, tmp_path):
    args = [f'--device={device}', '--max_iters=4', '--eval_interval=2']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    assert train(dataset, whole, *args).returncode == 0
    cut(whole, killed, 'step-00000002')
    assert train(dataset, killed, *args).returncode == 0
    assert min(log(killed)) == (3, False), 'or it began anew'
    at_2, at_4, resumed = (
        torch.cat([x.flatten() for x in saved(out / f'step-0000000{step}')['model'].values()])
        for out, step in ((whole, 2), (whole, 4), (killed, 4)))
    assert (resumed - at_4).norm() < .01 * (at_4 - at_2).norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f'{MAY_LACK} two cards')
@pytest.mark.parametrize('parallel', ['ddp', 'fsdp'])
def test_two_processes_over_nccl_have_the_losses_of_one(dataset, tmp_path, parallel):
    losses = []
    for ranks, out in enumerate((tmp_path / 'one', tmp_path / 'two'), 1):
        job = Job(dataset, out, '--device=cuda', '--dropout=0', '--max_iters=4',
                  '--global_batch=16', f'--parallel={parallel}', ranks=ranks)
        assert job.wait() == [0] * ranks, job.err()
        losses.append([entry['loss'] for entry in log(out).values() if 'loss' in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
