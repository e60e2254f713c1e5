"""
The tensors of a sharded model (FSDP2) in files. Each rank writes its own rows, so saving needs the
whole model in no place, and any number of ranks can read it back.

    step-N/model_rank{R}.safetensors, ema_rank{R}.safetensors, optimizer_rank{R}.safetensors

FSDP2 cuts every parameter along its first axis: of n rows and r ranks, rank 0 holds the first
ceil(n / r), rank 1 the next ones, and so on. So the whole tensor is the rows of all files, one
below the other in the order of ranks, and no index of offsets is needed. What is whole on every
rank, as a table or a count of steps is, lies in the file of rank 0 only.

Why not torch.distributed.checkpoint: its default format has an index that is read with pickle.load,
so a checkpoint could run code. Its safetensors format needs no pickle, but an index of offsets in
every file, which would have to be checked as well.
"""
import re

import torch
from safetensors import SafetensorError, safe_open

KINDS = ('model', 'ema', 'optimizer')


# ---- writing

def own_rows(state, rank):
    """ {name: tensor}: what a rank writes of a flat state dict. """
    from torch.distributed.tensor import Shard
    found = {}
    for name, value in state.items():
        if hasattr(value, 'full_tensor'):
            assert value.placements == (Shard(0),), (name, value.placements)
            found[name] = value.detach().to_local()
        elif rank == 0:
            found[name] = value
    return found


def shares_of(model_state, ema_state, optimizer_state, rank):
    """ {kind: {name: tensor}}: what a rank writes of the arguments of checkpoint.save. A moment is
    named '<number of the optimizer>.<number of the parameter>.<its kind>'. """
    moments = {}
    for i, of_one in enumerate(optimizer_state['states']):
        for number, found in of_one['state'].items():
            for kind, value in found.items():
                moments[f'{i}.{number}.{kind}'] = value

    states = dict(zip(KINDS, (model_state, ema_state, moments)))
    return {kind: own_rows(state, rank) for kind, state in states.items() if state is not None}


# ---- reading

class ShardedTensor:
    """ A tensor whose rows lie in several files. Nothing is read before it is asked for. """

    def __init__(self):
        self.pieces = []                                   # (open file, name there, its rows)
        self.shape = None

    def add(self, file, name):
        """ The rows of one more file, below those of the files before. """
        shape = file.get_slice(name).get_shape()
        if self.shape is None:
            self.shape = list(shape)
        elif shape and self.shape and shape[1:] == self.shape[1:]:
            self.shape[0] += shape[0]
        else:
            raise ValueError(f'{name} {shape}, in a file before it {self.shape}')
        self.pieces.append((file, name, shape[0] if shape else 1))

    def whole(self):
        parts = [file.get_tensor(name) for file, name, _ in self.pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def rows(self, first, last):
        """ The rows from `first` up to `last`, which is not among them; a list, from each file a
        tensor. """
        found = []
        for file, name, n in self.pieces:
            begin, end = max(first, 0), min(last, n)
            if begin < end:
                found.append(file.get_slice(name)[begin:end])
            first, last = first - n, last - n
        return found

    def like(self, parameter):
        """ The tensor, sharded as a parameter is: this rank's rows, no others are read. Whole,
        where the parameter is not sharded or has another shape. """
        if not hasattr(parameter, 'full_tensor') or self.shape != list(parameter.shape):
            return self.whole()
        from torch.distributed.tensor import DTensor
        own, mesh = parameter.to_local(), parameter.device_mesh
        most = -(-self.shape[0] // mesh.size())
        first = min(self.shape[0], mesh.get_local_rank() * most)
        found = self.rows(first, first + own.shape[0])
        own = torch.cat(found).to(own.device) if found else torch.empty_like(own)
        return DTensor.from_local(own, mesh, parameter.placements, run_check=False,
                                  shape=parameter.shape, stride=parameter.stride())


def as_tensor(value, parameter):
    """ A moment as a tensor: sharded as its parameter is, where it comes from sharded files. """
    return value.like(parameter) if isinstance(value, ShardedTensor) else torch.as_tensor(value)


def paths_of(folder, files, kind):
    """ The files of a checkpoint that hold a kind of tensors: one; or one a rank, in the order of
    ranks; or none. files: their names, of training_state.json. """
    if f'{kind}.safetensors' in files:
        return [folder / f'{kind}.safetensors']
    n = sum(name.startswith(f'{kind}_rank') for name in files)
    names = [f'{kind}_rank{rank}.safetensors' for rank in range(n)]
    missing = [name for name in names if name not in files]
    if missing:
        raise ValueError(f'{folder}: found {n} files {kind}_rank*.safetensors, '
                         f'but not {missing[0]}')
    return [folder / name for name in names]


def read(paths, device='cpu'):
    """ {name: ShardedTensor} of these files, one below the other. """
    found = {}
    for path in paths:
        try:
            file = safe_open(path, 'pt', device=str(device))
            for name in file.keys():
                found.setdefault(name, ShardedTensor()).add(file, name)
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f'cannot read {path}: {error}') from None
    return found


def read_optimizer(paths, names):
    """ What optimizer.pt holds for a model that is not sharded: the names of the trained
    parameters, and the moments of each optimizer. """
    states = {}
    for key, tensor in read(paths).items():
        found = re.fullmatch(r'(\d{1,2})\.(\d{1,6})\.(\w+)', key, re.ASCII)
        if not found:
            raise ValueError(f'cannot read {paths[0]}: no moment has the name {key[:60]!r}')
        optimizer, number, kind = found.groups()
        moments = states.setdefault(int(optimizer), {})
        moments.setdefault(int(number), {})[kind] = tensor
    return {'names': names, 'states': [{'state': states[i]} for i in sorted(states)]}
