"""
How the threads of one process wait for one another on a CPU. Import this module before torch, whose
OpenMP (libgomp) reads the environment once, when it is loaded.

By default a waiting thread spins for some milliseconds and then sleeps. On free cores that is the
fastest. Beside other work on the same cores, it keeps the core from the very thread that it waits
for, and a step can take many times as long. So where others run already, it spins for a moment
only. A variable that you set wins. Measured in docs/speed.md.
"""
import os


def others_run(path='/proc/loadavg'):
    """ Whether other processes use a good part of the cores, now and in the last minute. False
    where the system does not say. """
    try:
        with open(path) as f:
            load_of_a_minute, _, _, runnable, _ = f.read().split()
        n_runnable = int(runnable.partition('/')[0])                     # this process is one
        n_cores = len(os.sched_getaffinity(0))
        return float(load_of_a_minute) > n_cores / 4 and n_runnable > 1
    except (OSError, ValueError, AttributeError):                        # AttributeError: no Linux
        return False


wait_asleep = False            # whether this module has decided so
if not {'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'} & set(os.environ) and others_run():
    os.environ['GOMP_SPINCOUNT'] = '1000'
    wait_asleep = True
