""" Two ranks under torchrun. """
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import HANGS, ROOT, flags_of, held


class Torchrun:
    """ torchrun with two ranks of train.py, which are held after step 5 until the file `go` is
    there. The output goes to a file beside the run. """

    def __init__(self, folder):
        self.out, self.go, self.output = (folder / name for name in ('torchrun', 'go', 'said.txt'))
        self.script = folder / 'torchrun.py'
        self.script.write_text(f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
{held(5, self.go)}
runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')
""")

    def start(self, flags, dataset, args, shutdown):
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone',
                   '--nproc_per_node=2', *flags, self.script, *flags_of(dataset, self.out, args)]
        env = {**os.environ, 'OMP_NUM_THREADS': '1',
               'TORCH_ELASTIC_SHUTDOWN_TIMEOUT': str(shutdown)}
        with open(self.output, 'w') as file:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=env)
        end = time.monotonic() + HANGS
        while 'step      5/' not in self.said():
            assert time.monotonic() < end and self.process.poll() is None, self.said()
            time.sleep(0.005)

    def said(self):
        return self.output.read_text()

    def wait(self):
        return self.process.wait(HANGS)

    def alive(self):
        """ Processes whose command line names this run. """
        found = []
        for path in Path('/proc').glob('[0-9]*/cmdline'):
            try:
                if str(self.out).encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                pass
        return found

    def rank_1(self):
        pid, = (pid for pid in self.alive()
                if b'\0RANK=1\0' in Path(f'/proc/{pid}/environ').read_bytes())
        return pid


@pytest.fixture
def torchrun(dataset, tmp_path):
    """ Starts it and waits until both are held. shutdown: seconds after a signal in which torchrun
    kills nobody. What is left of it after the test is killed. """
    agent = Torchrun(tmp_path)

    def start(*args, flags=(), shutdown=HANGS):
        agent.start(flags, dataset, args, shutdown)
        return agent

    yield start
    for pid in agent.alive():
        os.kill(pid, signal.SIGKILL)
