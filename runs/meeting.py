"""
How the processes of a run meet, and what one of them does when it loses the others.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. For SLURM's srun,
distributed.py sets them. Any other launcher may set them too (docs/cluster.md).
"""
import os
import queue
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from runs.distributed import all_gather_object, rank, world


def reach_master(seconds):
    """ Tries for so many seconds to reach rank 0; torch itself needs twice as long, and prints a
    trace of C++. Returns what was found, in words. ConnectionError, with host, port and variable,
    where the processes cannot meet. """
    if world == 1:
        return 'one process'
    missing = [name for name in ('RANK', 'MASTER_ADDR', 'MASTER_PORT') if not os.environ.get(name)]
    if missing:
        raise ConnectionError(f'WORLD_SIZE={world}, but {", ".join(missing)} not set: launch with '
                              'torchrun, or set them as docs/cluster.md says')
    host, port = os.environ['MASTER_ADDR'], os.environ['MASTER_PORT']
    found = f'rank 0 of {world} at {host}:{port}'
    if 'TORCHELASTIC_RUN_ID' in os.environ:                # torchrun's agents have met already
        return found

    # rank 0 will be the one that listens, so it only looks its own name up
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.2, deadline - time.monotonic())
        try:
            look_up(host, port, left)
            if rank > 0:
                socket.create_connection((host, port), timeout=left).close()
            return found
        except OSError as error:
            is_unknown = error.errno == socket.EAI_NONAME
            if is_unknown or time.monotonic() > deadline - 0.2:
                raise ConnectionError(f'rank {rank} cannot reach rank 0 at MASTER_ADDR={host} '
                                      f'MASTER_PORT={port}: {error}; is it running there, and is '
                                      'the port open?') from None
            time.sleep(0.2)


def look_up(host, port, seconds):
    """ OSError where a name is not known, also where no name server answers in so many seconds:
    the call itself would wait for longer. """
    answer = queue.SimpleQueue()

    def ask():
        try:
            answer.put(socket.getaddrinfo(host, port))
        except OSError as error:
            answer.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        found = answer.get(timeout=seconds)
    except queue.Empty:
        found = TimeoutError('no name server answers')
    if isinstance(found, OSError):
        raise found


def join(device, seconds):
    """ Meets the other processes. Every collective then fails after so many seconds.
    ConnectionError where they do not come. """
    if world == 1:
        return
    backend = 'cpu:gloo,cuda:nccl' if torch.device(device).type == 'cuda' else 'gloo'
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
        all_gather_object(rank)                            # the first collective connects them
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(f'rank {rank}: {world} processes did not meet at '
                              f'MASTER_ADDR={os.environ["MASTER_ADDR"]} '
                              f'MASTER_PORT={os.environ["MASTER_PORT"]}: '
                              f'{str(error).splitlines()[0]}') from None
    sys.excepthook = leave_at_once


def leave_at_once(kind, error, trace):
    """ sys.excepthook, for an error that no rank has caught. The ranks cannot agree any more, so
    this one saves nothing and waits for nobody. """
    words = str(error)
    # the last is what gloo says of a bucket of gradients when another one has timed out
    says_so = any(word in words for word in ('gloo', 'NCCL', 'timeout caused pair closure'))
    is_lost = isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and says_so
    if is_lost:
        print(f'error: rank {rank} lost the other processes ({words.splitlines()[0]}): nothing is '
              'saved now, what was saved before stands', file=sys.stderr, flush=True)
    else:
        traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    os._exit(4 if is_lost else 1)
