"""
A Python that has imported torch and forks: its children begin in a tenth of a second, where a new
interpreter needs four.

launch.py starts one for each worker of pytest. A message to it is a number: 0 asks for a child, and
brings the files of its request and its stdin, stdout and stderr; a pid asks whether that child has
ended. The answer is a number as well. No module of the project is imported here: each child reads
the files as they are then, in its own environment.
"""
import atexit
import gc
import json
import os
import signal
import socket
import struct
import sys
import threading
import types

RUNS = 1000                        # in the place of an exit code: it has not ended


def serve(connection):
    """ Answers until the tests have ended, then kills what they left. In a child it returns the
    files of its request. """
    children = set()
    while message := socket.recv_fds(connection, 8, 4):
        number, = struct.unpack('q', message[0]) if message[0] else (None,)
        if number is None:
            break
        if number == 0:
            answer = os.fork()
            if answer == 0:
                connection.close()
                return message[1]
            children.add(answer)
            for fd in message[1]:
                os.close(fd)
        else:
            pid, status = os.waitpid(number, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else RUNS
            children.discard(pid)
        connection.sendall(struct.pack('q', answer))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def become(request, *streams):
    """ The code of a request, in the state in which a new interpreter would begin it. """
    with open(request) as file:
        code, argv, cwd, env = json.load(file)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    sys.path[:1] = ['', *filter(None, env.get('PYTHONPATH', '').split(os.pathsep))]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules['__main__'] = types.ModuleType('__main__')
    return compile(code, '<string>', 'exec')


def finish(code):
    """ The end of an interpreter, without taking all modules apart, which costs more than most
    children do. """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


if __name__ == '__main__':
    import numpy, safetensors.torch, tokenizers, torch._dynamo, torch.distributed.fsdp
    import torch.distributed.tensor, torch.utils.flop_counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)           # it is for the tests, which end
    gc.collect()
    gc.freeze()                    # no child searches what is here again: its pages stay shared
    files = serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        exec(become(*files), sys.modules['__main__'].__dict__)
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finish(code)
