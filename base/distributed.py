"""
Many processes that act as one run: they meet, agree, and share a model. In a single process nothing
is sent.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Any other launcher may set
them too (docs/cluster.md).

Gradients and losses are summed on their device: over nccl on a GPU, over gloo on a CPU. Agreements
of a few bytes, such as "a signal has come", are CPU tensors and always go over gloo. So they do not
wait for the device, and the failure of another rank is noticed at once. Only a rank that is blocked
in an NCCL collective when its peer dies notices it late: after dist_timeout.
"""
import atexit
import ctypes
import os
import signal
import sys
import traceback
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from base.console import say_error, warn

MEETING = 300.0                # seconds in which all processes must be found at the start

exit_code = None               # with which this process ends, once all are leaving


# ---- which process is this?

def rank():
    """ The number of this process. """
    return int(os.environ.get('RANK') or 0)


def world():
    """ The number of processes. """
    return int(os.environ.get('WORLD_SIZE') or 1)


def print0(*words, file=None):
    """ Prints a line, on rank 0 alone. Where it cannot be written, the run goes on without it. """
    if rank() == 0:
        try:
            print(*words, file=file, flush=True)
        except OSError as error:                           # base/begin.py raises it once
            warn(f'{error}; the run goes on')


# ---- meeting and parting

def join(device, timeout):
    """ Meets the other processes; from then on every collective fails after `timeout` seconds.
    ConnectionError names host, port and variables. """
    if world() == 1:
        return
    host = os.environ.get('MASTER_ADDR')
    port = os.environ.get('MASTER_PORT')
    backend = 'cpu:gloo,cuda:nccl' if torch.device(device).type == 'cuda' else 'gloo'
    try:
        # a process may end between the store and the first collective, which connects them: so
        # until then they wait no longer than for each other
        meeting = timedelta(seconds=MEETING)
        store, *_ = next(dist.rendezvous('env://', timeout=meeting))
        dist.init_process_group(backend, store=store, rank=rank(), world_size=world(),
                                timeout=meeting)
        all_gather_object(rank())
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    except (OSError, RuntimeError, ValueError) as error:
        raise ConnectionError(f'rank {rank()} of {world()} cannot meet the others at '
                              f'MASTER_ADDR={host} MASTER_PORT={port}: '
                              f'{str(error).splitlines()[0]}; is rank 0 running there, and is the '
                              'port open?') from None

    # how this process ends from now on
    sys.excepthook = leave_at_once
    atexit.register(end)                       # what was registered later, as by wandb, comes first
    if 'TORCHELASTIC_RUN_ID' in os.environ and sys.platform == 'linux':
        # its workers would go on without torchrun, where it is killed: so SIGTERM comes to them
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)         # PR_SET_PDEATHSIG


def leave(code=0):
    """ All leave together, and this process will end with the exit code. Without the barrier some
    clean runs would end with an error. """
    global exit_code
    if dist.is_initialized():
        exit_code = code
        dist.barrier()
        if torch.cuda.is_initialized():        # nccl wants it; gloo's threads simply end
            dist.destroy_process_group()


def end():
    """ The last that this process does after `leave`. Python and C++ would take apart what threads
    of torch and gloo may still use, and now and then that crashes. """
    if exit_code is not None:
        exit_at_once(exit_code)


def exit_at_once(code):
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):              # closed, or none
            file.flush()
    os._exit(code)


def leave_at_once(kind, error, trace):
    """ sys.excepthook, for an error that no rank has caught. The ranks cannot agree any more, so
    this one saves nothing and waits for nobody. """
    words = str(error)

    # is another one gone? The last is what gloo says of a bucket of gradients when another one has
    # timed out
    says_so = any(word in words for word in ('gloo', 'NCCL', 'timeout caused pair closure'))
    is_lost = isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and says_so
    code = 1
    if is_lost:
        code = 4
        print(f'error: rank {rank()} lost the other processes ({words.splitlines()[0]}): nothing '
              'is saved now, what was saved before stands', file=sys.stderr, flush=True)
    elif issubclass(kind, KeyboardInterrupt):
        print('error: interrupted', file=sys.stderr, flush=True)
        code = 130
    else:
        traceback.print_exception(kind, error, trace)
    exit_at_once(code)


def stop_all(message, code):
    """ For an error that all ranks know: rank 0 prints it, all leave with the same exit code. It
    stays the same where one of them dies meanwhile. """
    if rank() == 0:
        say_error(message)
    with suppress(RuntimeError):
        leave(code)
    raise SystemExit(code)


# ---- agreeing

def all_reduce_max(number):
    """ The largest of all ranks' numbers. """
    if world() == 1:
        return number
    box = torch.tensor(number)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


def all_reduce_sum(tensor):
    """ The sum over ranks, in place, on the tensor's device. """
    if world() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_gather_object(value):
    """ A list of every rank's value. """
    values = [value]
    if world() > 1:
        values = [None] * world()
        dist.all_gather_object(values, value)
    return values


def on_rank0(function, *args, **kw):
    """ Calls a function on rank 0 alone, such as one that writes the run folder. Every rank gets
    [result, error]; one of the two is None. """
    box = [None, None]
    if rank() == 0:
        try:
            box[0] = function(*args, **kw)
        except (ValueError, OSError) as error:
            kind = ValueError if isinstance(error, ValueError) else OSError
            box[1] = kind(str(error))                      # of a plain kind, that can be sent
    if world() > 1:
        dist.broadcast_object_list(box)
    return box


def rank0_or_stop(code, function, *args, **kw):
    """ The result of on_rank0. Where there is an error, all leave with the exit code. """
    result, error = on_rank0(function, *args, **kw)
    if error:
        stop_all(error, code)
    return result


def first_error(function, *args):
    """ Calls a function on every rank. All get the first error, as a text; None without one. """
    error = None
    try:
        function(*args)
    except (ValueError, OSError) as failure:
        error = str(failure)
    return next(filter(None, all_gather_object(error)), None)


# ---- the model on many processes

def replicate(loss, has_unused):
    """ DDP, which sums gradients over ranks. has_unused: parameters without a gradient must not be
    waited for. The buffers never change, so they are not sent. """
    net = DistributedDataParallel(loss, gradient_as_bucket_view=True,
                                  find_unused_parameters=has_unused)
    net.broadcast_buffers = False                          # its argument is renamed in torch 2.13
    return net


def shard(loss, device, in_bfloat16):
    """ FSDP2, in place, before optimizer and average are made. Every process keeps its share of
    each parameter, gradient and moment, in float32. A block is gathered when it is run.
    in_bfloat16: in bfloat16, as autocast will use its matrices; gradients are summed in float32.
    The rest of the model is gathered in float32: autocast does not cast all of it. """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (MixedPrecisionPolicy, fully_shard,
                                        register_fsdp_forward_method)
    of_blocks = MixedPrecisionPolicy()
    if in_bfloat16:
        of_blocks = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                         cast_forward_inputs=False)
    mesh = init_device_mesh(torch.device(device).type, (world(),))
    for block in loss.model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=of_blocks)
    fully_shard(loss, mesh=mesh)
    register_fsdp_forward_method(loss, 'validate')


def sync_gradients(net, is_last):
    """ Before each micro-step: gradients are summed over ranks at the last one only. """
    if hasattr(net, 'set_requires_gradient_sync'):         # FSDP2
        net.set_requires_gradient_sync(is_last)
    elif isinstance(net, DistributedDataParallel):
        net.require_backward_grad_sync = is_last           # as its context no_sync does
