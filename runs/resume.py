"""
The state of a training: how it is saved, how it goes on from its newest checkpoint, or begins with
the weights of another run.

Two notions of "the same":
    compatible   model, process, tokenizer and encoder are equal: one run may begin with the weights
                 of the other (init_from)
    identity     optimizer, freeze and the samples of both splits are equal also: one run may go on
                 as the other (resume)
"""
import json
import math
from contextlib import contextmanager
from dataclasses import asdict

import torch

from processes.clusters import cluster_table
from runs import checkpoint, distributed, run_folder
from runs.distributed import rank
from runs.files import read_array
from runs.manifest import check_file, dataset_identity, split_digests
from runs.stages import lr_factor

RATE_KNOBS = ('learning_rate', 'muon_lr', 'max_iters', 'warmup_iters', 'min_lr')
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
    model = asdict(model_config)
    return json.loads(json.dumps(dict(model=model, process=process, **dataset_identity(meta))))


class State:
    """ All that a checkpoint holds and a resume fills: weights, their average, moments, counters,
    generators. """
    counters = ('step', 'evaluated_at', 'best_val')
    counters_on_device = ('skipped', 'streak', 'history')

    def __init__(self, model, optimizers, ema_decay, n_norms, device, global_batch, modes):
        self.model = model
        self.optimizers = optimizers
        self.device = device
        self.global_batch = global_batch                   # rows of a step, over all processes
        self.modes = modes                                 # {name}, that have a share in any stage
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

    def begin_average(self):
        for average, parameter in zip(self.ema or (), self.parameters):
            average.copy_(parameter.detach())

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

    def save(self, config, is_best):
        """ The error, or None. Every rank must call: rank 0 writes, all know how it went. """
        weights = self.model.state_dict()
        tensors = {'model': distributed.whole(weights)}
        if self.ema is not None:
            # what is frozen is its own average
            tensors['ema'] = distributed.whole({**weights, **dict(zip(self.names, self.ema))})
        tensors['optimizer'] = distributed.whole(self.moments())
        tensors['rng'] = self.generators()

        known = {name: getattr(self, name) for name in self.counters}
        known |= {name: getattr(self, name).tolist() for name in self.counters_on_device}
        known |= {'global_batch': self.global_batch, 'model_config': asdict(self.model.config),
                  'identity': self.identity, 'modes': sorted(self.modes),
                  'rate_knobs': {name: config[name] for name in RATE_KNOBS}}
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
        self.load_moments(read['optimizer.safetensors'])
        for name in self.counters:
            setattr(self, name, known[name])
        for name in self.counters_on_device:
            getattr(self, name).copy_(torch.tensor(known[name]))
        self.saved_at = self.step

        # generators; there may have been fewer processes than now
        rng = read['rng.safetensors']
        if f'rank{rank()}.cpu' in rng:
            torch.set_rng_state(rng[f'rank{rank()}.cpu'])
        if f'rank{rank()}.cuda' in rng and torch.device(self.device).type == 'cuda':
            torch.cuda.set_rng_state(rng[f'rank{rank()}.cuda'])

    def load_moments(self, saved):
        """ The moments are shared out as their parameters are. The groups hold knobs, so they are
        those of today. """
        parameter_of = dict(zip(self.names, self.parameters))
        states = {p: optimizer.state for optimizer, _ in self.optimizers
                  for group in optimizer.param_groups for p in group['params']}
        for name, value in saved.items():
            kind, _, name = name.partition('.')
            parameter = parameter_of[name]
            value = distributed.distribute(value.to(parameter.device), parameter)
            # contiguous and in memory of its own: the fused kernels read bare pointers
            states[parameter][parameter][kind] = value.clone()


def fill(model, weights):
    """ Whole weights {name: tensor} into a model that may be sharded. """
    own = model.state_dict()
    model.load_state_dict({name: distributed.distribute(weight, own[name])
                           for name, weight in weights.items()})


def begin_from(folder, state, compatible):
    """ The best weights of another run of the same model, process and data. """
    source, knobs, meta = checkpoint.load_model(folder, 'best', device=state.device)
    other = compatibility(source.config, knobs, meta)
    other['model']['dropout'] = compatible['model']['dropout']
    if found := checkpoint.difference(other, compatible):
        raise ValueError(f'init_from={folder} was trained with {found}; texts prepared with '
                         '--same_as=ITS_DATASET have its vocabulary and its latents')
    fill(state.model, source.state_dict())


def load_bag(folder, meta):
    """ The values (V, D) float32 of a dataset's linear model from tokens to the latent
    (corpora/bag.py); None where it has none. """
    if 'bag.npy' not in meta['files']:
        return None
    path = check_file(folder, 'bag.npy', meta['files'])
    shape = (meta['tokenizer']['vocab_size'], meta['latent_shape'][1])
    return torch.from_numpy(read_array(path, 'float16', shape)).float()


def begin_with_bag(state, data, config):
    """ The bag of a new run begins as the linear model that prepare.py has fitted: the network
    learns what is left. That model predicts one clean latent from a whole text. """
    model = state.model
    c = model.config
    predicts_clean = c.bag and config['latent_target'] == 'x0'
    fitted = load_bag(data.folder, data.meta) if predicts_clean else None
    if fitted is None:
        return

    # MASK has value 0, and weighs as much as a token; EOS and PAD weigh next to nothing
    n_ids = c.vocab_size + 1 + c.clusters
    values = torch.zeros(n_ids, c.latent_dim)
    values[:c.vocab_size] = fitted
    scores = torch.zeros(n_ids, 1)
    scores[[data.eos, data.pad]] = SCORE_OF_ENDS
    bag = {'bag_values.weight': values, 'bag_scores.weight': scores}
    fill(model, {**model.state_dict(), **bag})


# ---- the whole

def resume_or_begin(state, data, text, config):
    """
    Fills the state of a training: from the newest checkpoint of out_dir, from the best weights of
    init_from, or from scratch; takes the run folder, and writes config.json there. Every rank must
    call. Stops all with exit code 2 where that cannot be. Returns the run's id in wandb, or None.
    data: the training split. text: the process.
    """
    model, init_from = state.model, config['init_from']
    compatible = compatibility(model.config, config, data.meta)
    knobs = {name: config[name] for name in ('optimizer', 'freeze')}
    state.identity = {**compatible, 'knob': knobs, 'data': split_digests(data.meta)}
    newest = distributed.rank0_or_stop(2, take_run_folder, config)

    # the clusters of a new run are made from its training split; else they lie with the weights
    if model.config.clusters and not newest and not init_from:
        table = distributed.rank0_or_stop(2, cluster_table, config['clusters_from'], data,
                                          config['clusters'])
        model.cluster_of.copy_(table)
        if rank() == 0:
            sizes = table.bincount()
            print(f'{len(sizes):,} clusters of {sizes.min():,} to {sizes.max():,} tokens',
                  flush=True)

    # load; if one rank fails, all stop
    error = None
    try:
        if newest:
            resume_from(newest, state, config)
        elif init_from:
            begin_from(init_from, state, compatible)
            state.begin_average()
        else:
            begin_with_bag(state, data, config)
            state.begin_average()
    except (ValueError, OSError) as failure:
        error = str(failure)
    except Exception as failure:                           # a checkpoint of another version
        error = f'cannot go on from {newest or init_from}: {type(failure).__name__}: {failure}'
    errors = [e for e in distributed.all_gather_object(error) if e]
    if errors:
        distributed.stop_all(errors[0], code=2)
    if model.config.clusters:
        text.take_clusters(model.cluster_of.cpu())

    # say so; and only now overwrite config.json
    words = ''
    if newest:
        words = f'going on from {newest}'
    elif init_from:
        words = f'begins with the best weights of {init_from}'
    elif config['freeze'] == 'modality':
        words = ('warning: freeze=modality without init_from freezes an encoder at its random '
                 'start: its modality will not be understood')
    if words and rank() == 0:
        print(words, flush=True)
    return distributed.rank0_or_stop(2, run_folder.begin, config, data.folder,
                                     fresh=newest is None, step=state.step)


def take_run_folder(config):
    """ For rank 0: nobody else writes there until this process ends, however it ends. Returns the
    newest checkpoint that the run goes on from. """
    run_folder.lock(config['out_dir'])
    return checkpoint.newest(config['out_dir'])


def resume_from(newest, state, config):
    """ The state of a checkpoint, where it is of the same run: with the same model, process and
    samples in both splits, or `best` would compare losses of two validation splits. """
    known = checkpoint.verify(newest)
    if found := checkpoint.difference(known['identity'], state.identity):
        raise ValueError(f'{newest} was trained with {found}: choose another --out_dir, '
                         'or the --dataset and the knobs that it had')
    state.load(newest, known)
    if known['modes'] != sorted(state.modes):
        state.best_val = math.inf                          # it is of other losses
    if known['global_batch'] != state.global_batch and rank() == 0:
        print(f'warning: the global batch was {known["global_batch"]} rows and is now '
              f'{state.global_batch}: not the run it would have been')
    if rank() == 0:
        for line in jumps_of_rate(known['rate_knobs'], config, state.step):
            print(line, flush=True)


def jumps_of_rate(old, new, step):
    """ A line for each learning rate that jumps at a resume: for AdamW, and for Muon where that
    has another one. old, new: the knobs of the last step and of the next one, which is number
    `step`, counted from 0. """
    def rates(knobs, step):
        bases = knobs['learning_rate'], knobs['muon_lr'] or knobs['learning_rate']
        return [base * lr_factor(knobs, step) for base in bases]

    changes = [f'{name} {old[name]} -> {new[name]}'
               for name in RATE_KNOBS if old[name] != new[name]]
    lines = []
    for was, before, now in zip(rates(old, step - 1), rates(new, step - 1), rates(new, step)):
        # the schedule itself goes from `before` to `now`; the knobs move it by more than that
        is_jump = abs(before - was) > abs(now - before) and f'{now:.1e}' != f'{was:.1e}'
        if is_jump and step < new['max_iters']:
            lines.append(f'resume: the rate moves from {was:.1e} to {now:.1e} '
                         f'({", ".join(changes)})')
    return list(dict.fromkeys(lines))                      # both rates may be one
