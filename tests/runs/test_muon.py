""" Muon for all matrices of one shape at once: the update of torch.optim.Muon, shared out. """
import copy

import pytest
import torch

from runs import muon
from runs.muon import Muon, gather_shares, share_of

SHAPES = [(24, 16), (16, 16), (16, 24), (24, 16), (16, 16), (24, 16)]


def matrices():
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in SHAPES]


def give_gradients(parameters, step):
    g = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=g)


def test_the_steps_are_those_of_torch_and_so_are_the_moments():
    theirs, ours = matrices(), matrices()
    reference = torch.optim.Muon(theirs, lr=.02, weight_decay=.3, adjust_lr_fn='match_rms_adamw')
    optimizer = Muon(ours, lr=.02, weight_decay=.3)
    for step in range(4):
        give_gradients(theirs, step)
        give_gradients(ours, step)
        if step > 1:                                       # frozen in a later stage
            theirs[3].grad = ours[3].grad = None
        if step > 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        reference.step()
        optimizer.step()
        stored = {x.data_ptr(): x.nbytes() for state in optimizer.state.values()
                  for x in [state['momentum_buffer'].untyped_storage()]}
        assert step > 2 or sum(stored.values()) == sum(x.nbytes for x in ours), 'no old stack'
    for a, b, before in zip(theirs, ours, matrices()):
        assert torch.allclose(a, b, atol=2e-4), 'bfloat16 rounds to 2e-4 of these'
        assert (b - before).abs().max() > .01
    saved, expected = optimizer.state_dict()['state'], reference.state_dict()['state']
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)


@pytest.mark.parametrize('iterations', [1, 3, 5])
def test_a_step_is_made_of_so_many_iterations(iterations):
    parameters = matrices()
    give_gradients(parameters, 0)
    before = parameters[0].detach().clone()
    Muon(parameters, lr=.02, weight_decay=0, iterations=iterations, dtype=torch.float32).step()
    looked_ahead = parameters[0].grad * (1 - .95 ** 2)
    U, S, V = torch.linalg.svd(looked_ahead.double(), full_matrices=False)
    s = S / S.norm()
    for a, b, c in muon.POLAR_EXPRESS[:iterations]:
        s = a * s + b * s ** 3 + c * s ** 5
    expected = -.02 * .2 * 24 ** .5 * (U * s) @ V
    assert (parameters[0].detach() - before - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize('world', [1, 2, 3, 8])
@pytest.mark.parametrize('n', [1, 5, 6])
def test_the_shares_of_all_processes_are_all_matrices_once_and_in_order(monkeypatch, world, n):
    monkeypatch.setenv('WORLD_SIZE', str(world))
    shares = []
    for rank in range(world):
        monkeypatch.setenv('RANK', str(rank))
        shares.append(share_of(n))
    assert len({len(share) for share in shares}) == 1

    # gather_shares on the last rank, with all_gather in place of the others
    def all_gather(found, mine):
        for out, share in zip(found, shares):
            out.copy_(torch.tensor(share)[:, None, None].expand(out.shape))
    monkeypatch.setattr(muon.dist, 'all_gather', all_gather)
    mine = torch.tensor(shares[-1], dtype=torch.float32)[:, None, None].expand(-1, 2, 2)
    assert gather_shares(mine, n)[:, 0, 0].tolist() == list(range(n))
