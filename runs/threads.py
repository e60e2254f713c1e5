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
    """ Whether other processes use the cores now, and have done so for a while. False where the
    system does not say. """
    try:
        with open(path) as f:
            load_of_a_minute, _, _, runnable, _ = f.read().split()
        n_runnable = int(runnable.partition('/')[0])                     # this process is one
        return float(load_of_a_minute) > 1 and n_runnable > 1
    except (OSError, ValueError):
        return False


if 'OMP_WAIT_POLICY' not in os.environ and others_run():
    os.environ.setdefault('GOMP_SPINCOUNT', '1000')
