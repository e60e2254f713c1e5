"""
The state of a training: how it is saved, how it goes on from its newest checkpoint, or begins with
the weights of another run.

Two notions of "the same":
    compatible   model, process, tokenizer and encoder are equal: one run may begin with the weights
                 of the other (init_from)
    identity     the samples of both splits are equal too: one run may go on as the other (resume)
"""
import json
import math
import sys
from contextlib import contextmanager
from dataclasses import asdict

import torch

from configurator import read_knobs
from data import load_bag
from processes import after_loading, tables_of
from runs import checkpoint, distributed, run_folder
from runs.distributed import rank
from runs.manifest import dataset_identity, split_digests
from runs.stages import modes_of

# these leave what a resumed run learns as it is
HARMLESS = {'dataset', 'out_dir', 'resume', 'init_from', 'clusters_from', 'device', 'compile',
            'parallel', 'dist_timeout', 'master_timeout', 'preflight_only', 'keep',
            'save_interval', 'eval_interval', 'log_interval', 'wandb_project'}

SCORE_OF_ENDS = -8.0           # of EOS and PAD in a new bag: e^-8 of the weight of a token


def compatibility(model_config, knobs, meta):
    """ What two runs must share for one to begin with the weights of the other, as JSON gives it
    back. """
    names = ['text_schedule', 'latent_schedule', 'latent_target']
    kind = knobs['text_process']
    if kind != 'masked':
        # a process has the knobs that begin with its name: gidd_gamma, hdlm_xi
        names += ['text_process', *(name for name in knobs if name.startswith(f'{kind}_'))]
    process = {name: knobs[name] for name in names}
    model = {**asdict(model_config), 'importance': knobs['importance']}
    return json.loads(json.dumps(dict(model=model, process=process, **dataset_identity(meta))))


class State:
    """ All that a checkpoint holds and a resume fills: weights, their average, moments, counters,
    generators. """

    def __init__(self, model, optimizers, ema_decay, n_norms, device):
        self.model = model
        self.optimizers = optimizers
        self.device = device
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.parameters = zip(*trained)

        # the running average of the weights, in float32
        self.ema = [p.detach().clone() for p in self.parameters] if ema_decay else None

        self.step = self.saved_at = self.evaluated_at = 0
        self.best_val = math.inf
        self.failed_saves = 0
        # the guard's memory lives on the device: it is read only at log, save and evaluation steps
        self.skipped = torch.zeros((), device=device)      # steps of the run so far
        self.streak = torch.zeros((), device=device)       # steps skipped in a row
        # the gradient norms of the last steps that were taken
        self.history = torch.full((n_norms,), math.nan, device=device)

    @contextmanager
    def averaged_weights(self, loss):
        """ Inside, the model has its average weights. loss: the module that FSDP has sharded. """
        @torch.no_grad()
        def swap():
            if hasattr(loss, 'reshard'):
                loss.reshard()                             # or FSDP would use what it gathered
            for parameter, average in zip(self.parameters, self.ema or ()):
                now = parameter.clone()
                parameter.copy_(average)
                average.copy_(now)
        swap()
        yield
        swap()

    # ---- as tensors by name, and back

    def moments(self):
        """ {'exp_avg.<parameter>': tensor} of all optimizers. """
        name_of = {p: name for name, p in zip(self.names, self.parameters)}
        found = {}
        for optimizer, _ in self.optimizers:
            for parameter, state in optimizer.state.items():
                found |= {f'{kind}.{name_of[parameter]}': value for kind, value in state.items()}
        return found

    def generators(self):
        """ {'rank0.cpu': its state} of every rank's generators. """
        own = {'cpu': torch.get_rng_state()}
        if torch.device(self.device).type == 'cuda':
            own['cuda'] = torch.cuda.get_rng_state()
        found = {}
        for i, of_rank in enumerate(distributed.all_gather_object(own)):
            found |= {f'rank{i}.{kind}': value for kind, value in of_rank.items()}
        return found

    def counters(self):
        """ What is no tensor, for training_state.json. """
        return dict(evaluated_at=self.evaluated_at,
                    best_val=None if math.isinf(self.best_val) else self.best_val,
                    skipped=self.skipped.item(), streak=self.streak.item(),
                    history=self.history[self.history.isfinite()].tolist())

    def save(self, run, config, is_best):
        """ The error, or None. Every rank must call: rank 0 writes, all know how it went. """
        weights = self.model.state_dict()
        tensors = {'model': distributed.whole(weights)}
        if self.ema is not None:
            # what is frozen is its own average
            tensors['ema'] = distributed.whole({**weights, **dict(zip(self.names, self.ema))})
        tensors['optimizer'] = distributed.whole(self.moments())
        tensors['rng'] = self.generators()
        known = {**self.counters(), 'global_batch': run.global_batch,
                 'model_config': asdict(run.model_config), 'identity': run.identity}
        _, error = distributed.on_rank0(checkpoint.save, config['out_dir'], self.step, tensors,
                                        known, config['keep'], is_best)
        self.failed_saves = self.failed_saves + 1 if error else 0
        if not error:
            self.saved_at = self.step
        return error

    @torch.no_grad()
    def load(self, folder, known):
        """ What save has written to a folder, on any number of processes. known: its
        training_state.json. """
        read = {name: checkpoint.read_tensors(folder / name) for name in known['files']}
        fill(self.model, read['model.safetensors'])
        averages = read.get('ema.safetensors', read['model.safetensors'])
        for name, average in zip(self.names, self.ema or ()):
            average.copy_(distributed.distribute(averages[name], average))
        self.load_moments(folder, read['optimizer.safetensors'])

        # counters
        self.step = self.saved_at = known['step']
        self.evaluated_at = known['evaluated_at']
        self.best_val = math.inf if known['best_val'] is None else known['best_val']
        self.skipped.fill_(known['skipped'])
        self.streak.fill_(known['streak'])
        if known['history']:
            self.history[-len(known['history']):] = torch.tensor(known['history'])

        # generators; there may have been fewer processes than now
        rng = read['rng.safetensors']
        if f'rank{rank}.cpu' in rng:
            torch.set_rng_state(rng[f'rank{rank}.cpu'])
        if f'rank{rank}.cuda' in rng and torch.device(self.device).type == 'cuda':
            torch.cuda.set_rng_state(rng[f'rank{rank}.cuda'])

    def load_moments(self, folder, saved):
        """ The moments are shared out as their parameters are. The groups hold knobs, so they are
        those of today. """
        parameter_of = dict(zip(self.names, self.parameters))
        for optimizer, _ in self.optimizers:
            kinds = {'AdamW': ('step', 'exp_avg', 'exp_avg_sq')}.get(type(optimizer).__name__,
                                                                     ('momentum_buffer',))
            own = [p for group in optimizer.param_groups for p in group['params']]
            number = {p: i for i, p in enumerate(own)}
            state = {}
            for name, parameter in parameter_of.items():
                found = {kind: saved.pop(f'{kind}.{name}') for kind in kinds
                         if parameter in number and f'{kind}.{name}' in saved}
                for kind, value in found.items():
                    # contiguous and in memory of its own: the fused kernels read bare pointers
                    found[kind] = distributed.distribute(value, parameter).clone()
                if found:
                    state[number[parameter]] = found
            groups = optimizer.state_dict()['param_groups']
            optimizer.load_state_dict(dict(state=state, param_groups=groups))
        if saved:
            raise ValueError(f'{folder} was trained with other parameters or another optimizer '
                             f'({next(iter(saved))}): choose another --out_dir')


def fill(model, weights):
    own = model.state_dict()
    shared = {}
    for name, weight in weights.items():
        shared[name] = distributed.distribute(weight, own[name]) if name in own else weight
    model.load_state_dict(shared)


def begin_from(folder, state, compatible, device):
    """ The best weights of another run of the same model, process and data. """
    source, knobs, meta = checkpoint.load_model(folder, 'best', device=device)
    other = compatibility(source.config, knobs, meta)
    other['model']['dropout'] = compatible['model']['dropout']
    if found := checkpoint.difference(other, compatible):
        raise ValueError(f'init_from={folder} was trained with {found}; texts prepared with '
                         '--same_as=ITS_DATASET have its vocabulary and its latents')
    fill(state.model, source.state_dict())
    for average, parameter in zip(state.ema or (), state.parameters):
        average.copy_(parameter.detach())


@torch.no_grad()
def begin_with_bag(state, run):
    """ The bag of a new run begins as the linear model that prepare.py has fitted: the network
    learns what is left. That model predicts one clean latent from a whole text. """
    model, data = state.model, run.train_data
    c = model.config
    predicts_clean = c.bag and run.latent.target == 'x0'
    values = load_bag(run.folder, data.meta) if predicts_clean else None
    if values is None:
        return

    # MASK has value 0, and weighs as much as a token; EOS and PAD weigh next to nothing
    n_ids = c.vocab_size + 1 + c.extra_ids
    first = {'bag_values.weight': torch.zeros(n_ids, c.latent_dim),
             'bag_scores.weight': torch.zeros(n_ids, 1)}
    first['bag_values.weight'][:c.vocab_size] = values
    first['bag_scores.weight'][[data.tokenizer.eos, data.tokenizer.pad]] = SCORE_OF_ENDS
    own = dict(model.named_parameters())
    for name, value in first.items():
        own[name].copy_(distributed.distribute(value.to(own[name].device), own[name]))
    for average, parameter in zip(state.ema or (), state.parameters):
        average.copy_(parameter.detach())


def say_what_changed(script, config):
    """ One line of the knobs that are others than in config.json, which the last start wrote. """
    try:
        before = run_folder.read_config(config['out_dir'])
    except ValueError as error:
        print(f'warning: {error}: whether knobs have changed is not known', file=sys.stderr)
        return

    changed = []
    for name, default in read_knobs(script)[0].items():
        new = config[name]
        old = before.get(name, default)                    # a knob may be younger than the run
        old = tuple(old) if isinstance(old, list) else old
        is_younger = old is None and default is None       # and the run goes on without it
        if name not in HARMLESS and old != new and not is_younger:
            changed.append(f'{name} {old!r} -> {new!r}')
    if changed:
        print(f'resumed with other knobs: {", ".join(changed)}', flush=True)


# ---- the whole

def resume_or_begin(state, run, config, script):
    """
    Fills the state of a training: from the newest checkpoint of out_dir, from the best weights of
    init_from, or from scratch; takes the run folder, and writes config.json there. Every rank must
    call. Stops all with exit code 2 where that cannot be. Returns the run's id in wandb, or None.
    run: of preflight.plan. script: the path of train.py.
    """
    model, init_from = state.model, config['init_from']
    compatible = compatibility(run.model_config, config, run.train_data.meta)
    run.identity = {**compatible, 'data': split_digests(run.train_data.meta)}
    newest = distributed.rank0_or_stop(2, take_run_folder, config)

    # the tables of a new run are made from its training split; else they lie with the weights
    if not newest and not init_from:
        tables = distributed.rank0_or_stop(2, tables_of, config, run.train_data)
        for name, table in tables.items():
            getattr(model, name).copy_(table)

    # load; if one rank fails, all stop
    error = None
    try:
        if newest:
            resume_from(newest, state, run, config)
        elif init_from:
            begin_from(init_from, state, compatible, run.device)
        else:
            begin_with_bag(state, run)
    except (ValueError, OSError) as failure:
        error = str(failure)
    except Exception as failure:                           # a checkpoint of another version
        source = newest or init_from or run.folder
        error = f'cannot go on from {source}: {type(failure).__name__}: {failure}'
    errors = [e for e in distributed.all_gather_object(error) if e]
    if errors:
        distributed.stop_all(errors[0], code=2)
    after_loading(model, run.text)

    # say so; and only now overwrite config.json
    if rank == 0:
        if newest:
            print(f'going on from {newest}')
            say_what_changed(script, config)
        else:
            say_how_it_begins(model, run, config)
    return distributed.rank0_or_stop(2, run_folder.begin, config, run.folder,
                                     fresh=newest is None, step=state.step)


def take_run_folder(config):
    """ For rank 0: nobody else writes there until this process ends, however it ends. Returns the
    newest checkpoint that the run goes on from. """
    run_folder.lock(config['out_dir'])
    return checkpoint.newest(config['out_dir']) if config['resume'] == 'auto' else None


def resume_from(newest, state, run, config):
    """ The state of a checkpoint, where it is of the same run: with the same model, process and
    samples in both splits, or `best` would compare losses of two validation splits. """
    known = checkpoint.verify(newest)
    saved, now = known['identity'], run.identity
    if found := checkpoint.difference({**saved, 'data': None}, {**now, 'data': None}):
        raise ValueError(f'{newest} was trained with {found}: choose another --out_dir')
    if found := checkpoint.difference({'data': saved['data']}, {'data': now['data']}):
        raise ValueError(f'{newest} was trained on another dataset than {run.folder} ({found}): '
                         'name its own with --dataset=, or choose another --out_dir')
    state.load(newest, known)

    # with other modes the validation is of other losses, and the old best says nothing
    before = None
    try:
        before = modes_of(run_folder.read_config(config['out_dir'])['mode'])
    except ValueError:                                     # a broken config.json: it is not known
        pass
    if before not in (None, modes_of(config['mode'])):
        state.best_val = math.inf
    if known['global_batch'] != run.global_batch and rank == 0:
        print(f'warning: the global batch was {known["global_batch"]} rows and is now '
              f'{run.global_batch}: not the run it would have been')


def say_how_it_begins(model, run, config):
    if config['init_from']:
        print(f'begins with the best weights of {config["init_from"]}')
    elif config['freeze'] == 'modality':
        print('warning: freeze=modality without init_from freezes an encoder at its random '
              'start: its modality will not be understood')
