"""
Many processes that act as one run: rendezvous, agreement, sharding. In a single process all of it is the identity.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; so may any other launcher (SLURM: see the README).
Gradients and losses travel on the device (nccl; gloo on a CPU). Agreements of a few bytes, such as "a signal has come", are
always CPU tensors over gloo: they wait for no device, and a rank that died is noticed there at once. Only a host that already
waits for its GPU, and that for a collective of the dead, is not woken before dist_timeout.
"""
import ctypes
import inspect
import os
import queue
import socket
import sys
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from configurator import stop

world, rank, local_rank = (int(os.environ.get(name) or default) for name, default in
                           (('WORLD_SIZE', 1), ('RANK', 0), ('LOCAL_RANK', os.environ.get('RANK', 0))))


# ---- this process

def keep_freed_memory():
    """ On Linux glibc would hand every large temporary back and fault it in anew at the next step; now it keeps what is free. """
    if sys.platform == 'linux':
        with suppress(AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(-4, 0)                            # M_MMAP_MAX: no mapping of its own for a large block
            libc.mallopt(-1, 2 ** 31 - 1)                  # M_TRIM_THRESHOLD


# ---- to meet and to part

def reach_master(seconds):
    """ ConnectionError, with host, port and variable, where the others cannot be met; tried for so many seconds. """
    if world == 1:
        return 'one process'
    missing = [name for name in ('RANK', 'MASTER_ADDR', 'MASTER_PORT') if not os.environ.get(name)]
    if missing:
        raise ConnectionError(f'WORLD_SIZE={world}, but {", ".join(missing)} not set: launch with torchrun, or set them as the README says')
    host, port = os.environ['MASTER_ADDR'], os.environ['MASTER_PORT']
    if not port.isdigit() or not 0 < int(port) < 2 ** 16:
        raise ConnectionError(f'MASTER_PORT={port!r} is no port')
    deadline = time.monotonic() + seconds
    while 'TORCHELASTIC_RUN_ID' not in os.environ:         # torchrun's agents have met already
        answer = queue.SimpleQueue()                       # a thread, as a silent name server would hold this one for longer
        threading.Thread(target=lambda: answer.put(try_connect(host, int(port), seconds)), daemon=True).start()
        try:
            error = answer.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            error = 'timed out'
        if error is None:
            break
        if time.monotonic() > deadline - 0.2 or getattr(error, 'errno', None) == socket.EAI_NONAME:
            raise ConnectionError(f'rank {rank} cannot reach rank 0 at MASTER_ADDR={host} MASTER_PORT={port}: {error}; is it running '
                                  'there, and is the port open?')
        time.sleep(0.2)
    return f'rank 0 of {world} at {host}:{port}'


def try_connect(host, port, seconds):
    """ None, or why nobody opens. Rank 0 is the one who will listen: it only looks its own name up. """
    try:
        socket.getaddrinfo(host, port)
        if rank > 0:
            socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return error


def join(device, seconds):
    """ Meet the other processes; every collective then fails after so many seconds. ConnectionError where they do not come. """
    if world == 1:
        return
    backend = 'cpu:gloo,cuda:nccl' if torch.device(device).type == 'cuda' else 'gloo'
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
        all_gather_object(rank)                                     # connections are made at the first collective
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(f'rank {rank}: {world} processes did not meet at MASTER_ADDR={os.environ["MASTER_ADDR"]} '
                              f'MASTER_PORT={os.environ["MASTER_PORT"]}: {str(error).splitlines()[0]}') from None
    sys.excepthook = leave_at_once


def leave():
    """ Together; without it some clean runs would end with an error. """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank0_or_stop(code, function, *args):
    """ The result of what only rank 0 does; where it fails, all leave with the code. """
    result, error = on_rank0(function, *args)
    if error:
        stop_all(error, code)
    return result


def stop_all(message, code):
    """ For what all ranks know: one of them says it, all leave with the same exit code. """
    leave()
    if rank == 0:
        stop(message, code)
    raise SystemExit(code)


def leave_at_once(kind, error, trace):
    """ What no rank caught: the others cannot agree on anything any more, so nothing is saved and nobody is waited for. """
    words = str(error)
    lost = isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or 'gloo' in words or 'NCCL' in words)
    if lost:
        print(f'error: rank {rank} lost the other processes ({(words.splitlines() or [""])[0]}): nothing is saved now, '
              'what was saved before stands', file=sys.stderr, flush=True)
    else:
        traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    os._exit(4 if lost else 1)


# ---- to agree

def all_reduce_max(number):
    """ The largest of all ranks' numbers. """
    if world == 1:
        return number
    box = torch.tensor(number)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


def all_reduce_sum(tensor):
    """ The sum over ranks, in place, where the tensor lives. """
    if world > 1:
        dist.all_reduce(tensor)
    return tensor


def all_gather_object(value):
    """ A list of every rank's value. """
    values = [value]
    if world > 1:
        values = [None] * world
        dist.all_gather_object(values, value)
    return values


def on_rank0(function, *args, **kw):
    """ (result, error) of what only rank 0 does, such as to read and write the run folder, on every rank; None for the other one. """
    box = [None, None]
    if rank == 0:
        try:
            box[0] = function(*args, **kw)
        except (ValueError, OSError) as error:
            box[1] = (ValueError if isinstance(error, ValueError) else OSError)(str(error))
    if world > 1:
        dist.broadcast_object_list(box)
    return box


# ---- to share a model

# the buffers never change; torch 2.13 has renamed the switch
_ddp_arguments = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
NO_BUFFER_SYNC = {'forward_sync_buffers' if 'forward_sync_buffers' in _ddp_arguments else 'broadcast_buffers': False}


def shard(loss, device):
    """ FSDP2, in place, before optimizer and average are made: every process keeps its share of each
    parameter, gradient and moment. A block is gathered when it is run. """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    mesh = init_device_mesh(torch.device(device).type, (world,))
    for block in loss.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(loss, mesh=mesh)
    register_fsdp_forward_method(loss, 'validate')


def gradient_sync(net, is_last):
    """ A context for one micro-step of an accumulation: gradients are added up over ranks at the last
    one only. """
    if hasattr(net, 'set_requires_gradient_sync'):         # FSDP2
        net.set_requires_gradient_sync(is_last)
    return net.no_sync() if hasattr(net, 'no_sync') and not is_last else nullcontext()


def gather(value):
    """ What is shared out comes back whole, tensor by tensor, in the memory of rank 0's host; None elsewhere. Every rank must ask.
    Through dicts, lists and tuples; what is not shared out stays as it is. """
    if isinstance(value, dict):
        return {key: gather(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(gather(v) for v in value)
    if not hasattr(value, 'full_tensor'):
        return value
    full = value.full_tensor()
    return full.cpu() if rank == 0 else None


def distribute(value, like):
    """ A rank's share of a whole tensor, as `like` is shared out; the tensor itself where it is not. """
    if not hasattr(like, 'full_tensor') or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
