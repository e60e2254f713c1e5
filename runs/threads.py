"""
How the threads of one process wait for one another on a CPU.

By default a waiting thread of torch's OpenMP (libgomp) spins for some milliseconds and then sleeps.
On free cores that is the fastest. Beside other work on the same cores, it keeps the core from the
very thread that it waits for, and a step can take many times as long.

libgomp lets a thread sleep at once where a process has more of its threads than cores. So while
others run, further teams of threads are kept here, which do nothing. The number of threads that
compute stays the same, and so does every bit of their results.
"""
import functools
import os
import threading
import time

SET_BY_USER = {'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'}


def busy_seconds(path='/proc/stat'):
    """ Seconds that the cores of this process have worked, for whomever: idle time and waiting for
    a disk are not counted. """
    cores = {f'cpu{i}' for i in os.sched_getaffinity(0)}
    ticks = 0
    with open(path) as f:
        for line in f:
            name, *counts = line.split()
            if name in cores:
                user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf('SC_CLK_TCK')


@functools.cache                           # once a process, also where it runs several scripts
def watch():
    """ From now on looks every second whether others run. A variable that you set wins, and where
    the system does not say (no Linux), nothing is done. """
    if not SET_BY_USER & set(os.environ) and os.path.exists('/proc/stat'):
        threading.Thread(target=keep_looking, daemon=True).start()


def keep_looking(seconds=1.0):
    others_have_left = None                                # an event, while teams are kept
    before = time.monotonic(), busy_seconds(), time.process_time()
    while True:
        time.sleep(seconds)
        now = time.monotonic(), busy_seconds(), time.process_time()
        wall, busy, own = (b - a for a, b in zip(before, now))
        before = now

        # others: what the cores have worked beyond this process's share
        others_run = busy - own > wall * len(os.sched_getaffinity(0)) / 4
        if others_run and not others_have_left:
            others_have_left = threading.Event()
            add_teams(others_have_left)
        elif others_have_left and not others_run:
            others_have_left.set()
            others_have_left = None


def add_teams(end):
    """ Makes teams of OpenMP's threads, until the process has more of them than cores. They sleep,
    and end with the event `end`. """
    import torch

    # a thread that computes has a team of its own
    def hold():
        torch.zeros(n_threads * 2**16).add_(1)             # torch computes 2**15 numbers a thread
        end.wait()

    n_threads, n_cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    n_teams = 0
    if n_threads > 1:
        n_teams = max(1, (n_cores - n_threads) // (n_threads - 1) + 1)
    for _ in range(n_teams):
        threading.Thread(target=hold, daemon=True).start()
