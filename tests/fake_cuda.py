"""
A CUDA device where there is none. Tensors say cuda:0, and the scripts of the repository run on them unchanged, with CUDA's branches,
its rules of autocast and its optimizers.

    python tests/fake_cuda.py GUARD.so KIND < commands.json        # [[script, *args], ..]; prints FOUND and a JSON list

    shapes   a device tensor has a shape and no values (FakeTensor): torch itself says which tensors may meet
    values   a device tensor keeps its values on the host, so losses, ids and checkpoints are real ones

A command ends as on a GPU where tensors of two devices meet, or where a generator draws for another device. What a GPU does
silently is counted, by the file and the function that ask for it (of a script's own lines: by the line):
    waits    the host waits until the device has done all that is queued
    float64  a float64 tensor is made on the device; other devices than CUDA have none
What it cannot see is in docs/troubleshooting.md. It holds for the torch that requirements.txt names: it replaces internals.
"""
import contextlib
import ctypes
import importlib.util
import io
import json
import linecache
import os
import runpy
import sys
import traceback
from collections import Counter

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def load_guard(path):
    """ guard.cpp, as test_fake_cuda.py has built it: before torch. """
    folder = os.path.dirname(importlib.util.find_spec('torch').origin)
    ctypes.CDLL(os.path.join(folder, 'lib', 'libtorch_cpu.so'), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(path)


if __name__ == '__main__':
    load_guard(sys.argv[1])

import torch
import torch._dynamo                                       # before anything of torch is replaced
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

CUDA, HOST = torch.device('cuda:0'), torch.device('cpu')

# the host needs a number or a size that only the device knows
WAITS = {'_local_scalar_dense', 'nonzero', 'masked_select', '_unique2', 'unique_dim', 'unique_consecutive', 'equal', 'bincount'}
INDEXING = {'index', 'index_put', 'index_put_', '_index_put_impl_'}
COPIES = {'_to_copy', 'copy_'}
# where tensors of the host, of one dimension or more, may meet those of the device
MAY_MIX = INDEXING | COPIES | {'lift_fresh'}


def place():
    """ Who asks: 'loss.py Loss.validate', or of a script's own lines 'train.py: model = ...'. """
    frame = sys._getframe()
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and '/tests/' not in path and '/.venv/' not in path:
            file = os.path.relpath(path, ROOT)
            name = frame.f_code.co_qualname.split('.<locals>')[0]
            line = linecache.getline(path, frame.f_lineno).partition('#')[0].strip()
            return f'{file}: {line}' if name == '<module>' else f'{file} {name}'
        frame = frame.f_back
    return 'no file of ours'


# ---- what happens to an operation

def tensors_in(*values):
    """ Those among values, and in lists of them. (torch's pytree would take half of the time.) """
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_in(*x)


def replace_tensors(function, values):
    """ function of each tensor in a list or a tuple of values. """
    found = []
    for x in values:
        if isinstance(x, torch.Tensor):
            x = function(x)
        elif isinstance(x, (list, tuple)):
            x = replace_tensors(function, x)
        found.append(x)
    return found


class Device(TorchDispatchMode):
    """ Looks at every operation; a subclass computes those of the device. """

    def __init__(self):
        super().__init__()
        self.waits, self.float64 = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        name = func._schema.name.partition('::')[2]
        tensors = list(tensors_in(*args, *kwargs.values()))
        ours = [x for x in tensors if x.device.type == 'cuda']
        hosts = [x for x in tensors if x.device.type != 'cuda']

        # where its result lies
        asked = kwargs.get('device')
        if asked is not None:
            on_device = torch.device(asked).type == 'cuda'
        elif name == 'copy_':
            on_device = args[0].device.type == 'cuda'
        else:
            on_device = bool(ours)
        generator = kwargs.get('generator')
        if generator is not None and on_device != is_of_device(generator):
            raise RuntimeError(f"{name}: expected a {'cuda' if on_device else 'cpu'} generator, in {place()}")
        if not ours and not on_device:
            return func(*args, **kwargs)

        if ours and any(x.ndim for x in hosts) and name not in MAY_MIX:
            raise RuntimeError(f'{name}: expected all tensors to be on the same device, found cuda:0 and cpu, in {place()}')
        if self.is_wait(name, args, kwargs, ours, hosts, on_device):
            self.waits[place()] += 1
        out = self.compute(func, name, args, kwargs, on_device)
        for x in tensors_in(out):
            if x.dtype == torch.float64 and x.device.type == 'cuda':
                self.float64[place()] += 1
        return out

    def is_wait(self, name, args, kwargs, ours, hosts, on_device):
        """ As torch.cuda.set_sync_debug_mode would count it. """
        if name in COPIES:
            is_blocking = not (kwargs.get('non_blocking') or name == 'copy_' and args[2:] == (True,))
            crosses = (bool(ours), bool(hosts)) == (True, True) if name == 'copy_' else on_device != bool(ours)
            return crosses and (is_blocking or not on_device)
        if name in INDEXING and ours:
            # a mask becomes positions first; what lies on the host is copied to the device first
            return bool(hosts) or any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        return bool(ours) and (name in WAITS or name == 'where' and bool(hosts))


class Shapes(Device):
    """ Device tensors without values. What the host asks them for is made up. """

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode()

    def compute(self, func, name, args, kwargs, on_device):
        if name == '_local_scalar_dense':
            return 0.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if name == 'equal':
            return True
        if name == 'copy_' and not on_device:
            return args[0].zero_()
        if not on_device:
            return torch.zeros(args[0].shape, dtype=kwargs.get('dtype') or args[0].dtype)
        args = replace_tensors(self.without_values, args)
        with self.fake:
            if name == 'nonzero':
                return self.nonzero(args[0])
            if name in INDEXING:
                args = (args[0], self.without_masks(args[1]), *args[2:])
            return func(*args, **kwargs)

    def without_values(self, x):
        return x if isinstance(x, FakeTensor) else self.fake.from_tensor(x)

    def nonzero(self, mask):
        """ Half of the elements of a mask are true. """
        return torch.zeros(max(1, mask.numel() // 2), mask.ndim, dtype=torch.int64, device=CUDA)

    def without_masks(self, indices):
        found = []
        for x in indices:
            is_mask = x is not None and x.dtype == torch.bool
            found += self.nonzero(x).unbind(1) if is_mask else [x]
        return found


class OnDevice(torch.Tensor):
    """ A tensor that says cuda:0, and has its values in `values`, on the host. """

    @staticmethod
    def __new__(cls, values):
        out = torch.Tensor._make_wrapper_subclass(cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(),
                                                  dtype=values.dtype, device=CUDA)
        out.values = values
        return out

    def __repr__(self):
        return f'OnDevice({self.values!r})'

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return device.run(func, args, kwargs or {})


class Values(Device):
    """ Device tensors with values: an operation of the device is computed on the host. """

    def compute(self, func, name, args, kwargs, on_device):
        def inner(x):
            return x.values if isinstance(x, OnDevice) else x

        def outer(x):
            return x if isinstance(x, OnDevice) else OnDevice(x)

        of_host = dict(zip(kwargs, replace_tensors(inner, kwargs.values())))
        if 'device' in of_host:
            of_host['device'] = HOST
        of_host.pop('pin_memory', None)
        with torch._C._DisableTorchDispatch():
            out = func(*replace_tensors(inner, args), **of_host)
            # a copy to the other side shares no memory with what it was made from
            if name == '_to_copy' and isinstance(args[0], OnDevice) != on_device:
                out = out.clone()
        if name == 'copy_':
            return args[0]
        if not on_device:
            return out

        out, = replace_tensors(outer, [out])
        is_view = any(result.alias_info for result in func._schema.returns)
        if not is_view and not func._schema.is_mutable:
            return out
        try:
            return return_and_correct_aliasing(func, args, kwargs, out)
        except RuntimeError:                               # it knows no operation on lists of tensors
            return args[0] if func._schema.is_mutable and func._schema.returns else out


# ---- what the scripts ask of torch.cuda

MARK = 2 ** 62                                             # in the seed of a generator: it is the device's
OfHost = torch.Generator


def is_of_device(generator):
    return generator.initial_seed() >= MARK


class Generator(OfHost):
    """ torch.Generator('cuda'): the host's, of the same numbers, and known by its seed. """

    def __new__(cls, device='cpu'):
        return OfHost.__new__(cls)

    def __init__(self, device='cpu'):
        self.of = torch.device(device)

    def manual_seed(self, seed):
        super().manual_seed(seed)
        if self.of.type == 'cuda':
            state = self.get_state()                       # which begins with the seed
            state[:8] = torch.tensor([seed + MARK]).view(torch.uint8)
            self.set_state(state)
        return self

    @property
    def device(self):
        return CUDA if self.of.type == 'cuda' else HOST


class AtOnce:
    """ ThreadPoolExecutor, in this thread: a dispatch mode belongs to one. """

    def __init__(self, n):
        pass

    def submit(self, function):
        result = function()

        class Future:
            def result(self):
                return result
        return Future()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def on_host(state):
    return tree_map(lambda x: x.to(HOST) if isinstance(x, torch.Tensor) else x, state)


def pretend():
    """ A machine with one GPU. """
    cuda = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda.get_device_name = lambda *of: 'a fake'
    cuda._lazy_init = cuda.set_device = cuda.synchronize = cuda.manual_seed_all = lambda *of: None
    cuda.max_memory_allocated = lambda *of: 0
    cuda.get_rng_state = lambda *of: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = lambda state, *of: None
    cuda.is_bf16_supported = lambda *of, **more: True
    cuda.get_device_capability = lambda *of: (9, 0)
    cuda.amp.common.amp_definitely_not_available = lambda: False         # or autocast switches itself off
    cuda.nccl.version = lambda: (0, 0)

    torch.Generator = Generator
    torch.Tensor.pin_memory = lambda self: self
    tensor, tolist = torch.tensor, torch.Tensor.tolist
    torch.tensor = lambda data, device=None, **more: tensor(data, **more).to(device or HOST)
    torch.Tensor.tolist = FakeTensor.tolist = lambda self: tolist(self.to(HOST))
    torch.inference_mode = lambda mode=True: torch.no_grad()             # OnDevice cannot be a view in it
    torch.__future__.set_overwrite_module_params_on_conversion(True)     # Module.to makes new parameters, it swaps no storages
    from torch.utils import _foreach_utils
    _foreach_utils._foreach_supported_types += [FakeTensor, OnDevice]    # as a GPU's tensors are


def two_generators(run, seed):
    """ writing.generators as it is on a GPU, on a CPU too: there they would be one, and the numbers others. """
    return torch.Generator().manual_seed(seed), torch.Generator(run.device).manual_seed(seed)


# ---- commands

def execute(kind, script, *args):
    """ One script, or -c and some lines of Python: {code, out, err, waits, float64}. """
    global device
    device = Shapes() if kind == 'shapes' else Values()
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = [script, *args]
    torch.manual_seed(0)
    watched = contextlib.nullcontext() if '--device=cpu' in args else device
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with torch.autograd.set_multithreading_enabled(False), watched:
                if script == '-c':
                    exec(args[0], {'torch': torch})
                elif script == 'train.py':
                    runpy.run_path(os.path.join(ROOT, script), run_name='__main__')
                else:
                    importlib.import_module(script.removesuffix('.py')).main()
        except SystemExit as stop:
            code = stop.code or 0
        except Exception:
            code = 1
            traceback.print_exc()
    return dict(code=code, out=out.getvalue(), err=err.getvalue(), waits=device.waits, float64=device.float64)


def main():
    kind = sys.argv[2]
    commands = json.load(sys.stdin)
    sys.path.insert(0, ROOT)
    pretend()
    import data
    from runs import checkpoint
    from sampling import directions, writing
    data.ThreadPoolExecutor = AtOnce
    directions.generators = writing.generators = two_generators
    save_file = checkpoint.save_file
    checkpoint.save_file = lambda state, path: save_file(on_host(state), path)
    if kind == 'shapes':                                   # nothing to save
        checkpoint.save = lambda *args, **more: None
    print('FOUND' + json.dumps([execute(kind, *command) for command in commands]))


if __name__ == '__main__':
    main()
