"""
The state of a training: how it is saved, how it goes on from its newest checkpoint, or begins with
the weights of another run. What makes two runs the same is in checkpoint.py.
"""
import math
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict,
    set_optimizer_state_dict)

from base import distributed
from base.distributed import print0, rank
from base.files import read_array, short
from data import check_file
from diffusion import GaussianLatents, modes_of
from runs import checkpoint, run_folder
from runs.checkpoint import OF_TRAINING, as_json, check_equal, differences, identity_of
from runs.stages import lr_factor, read_stages

# knobs that decide where in its schedule a run is, and with the modes what validation measures
OF_SCHEDULE = {'max_iters', 'warmup_iters', 'min_lr', 'learning_rate', 'mode', 'length_schedule'}
OF_VALIDATION = {'eval_rows', 'seed', 'latent_weight', 'predict_length'}
SCORE_OF_ENDS = -8.0           # of EOS and PAD in a new bag: e^-8 of the weight of a token

# tensors are whole in a checkpoint: gathered on rank 0's host, and read by every process
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_WHOLE = StateDictOptions(full_state_dict=True)


class State:
    """ All that a checkpoint holds and a resume fills: weights, their average, moments, counters,
    generators. """
    counters = ('step', 'evaluated_at', 'best_val')
    counters_on_device = ('skipped', 'streak', 'history')

    def __init__(self, loss, optimizers, ema_decay, n_norms, device):
        self.loss = loss                                   # the module that FSDP has sharded
        self.model = loss.model
        self.optimizers = optimizers
        self.device = device
        self.parameters = list(self.model.parameters())
        self.begin_moments()

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
    def averaged_weights(self):
        """ Inside, the model has its average weights. """
        @torch.no_grad()
        def swap():
            if hasattr(self.loss, 'reshard'):
                self.loss.reshard()                        # or FSDP would use what it gathered

            # exchanged one by one, so that no third copy of all weights is needed
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

    def begin_moments(self):
        """ Makes all moments now, so that every checkpoint has the same names. torch makes them by
        a step with learning rate 0, whose count is set back to 0. """
        get_optimizer_state_dict(self.model, self.optimizers)
        for optimizer in self.optimizers:
            for moments in optimizer.state.values():
                if 'step' in moments:
                    moments['step'].zero_()

    def moments(self, options=None):
        """ {'exp_avg.<parameter>': tensor} of all optimizers, and the groups of parameters. """
        found = get_optimizer_state_dict(self.model, self.optimizers, options=options)

        # torch gives {parameter: {kind: value}}; a safetensors file is a flat list of names
        flat = {}
        for name, moments in found.get('state', {}).items():
            for kind, value in moments.items():
                flat[f'{kind}.{name}'] = value
        return flat, found.get('param_groups')

    def generators(self):
        """ {'rank0.cpu': its state} of every rank's generators. """
        # the rank is in the name: later there may be more processes, or fewer
        own = {'cpu': torch.get_rng_state()}
        if torch.device(self.device).type == 'cuda':
            own['cuda'] = torch.cuda.get_rng_state()
        found = {}
        for i, of_rank in enumerate(distributed.all_gather_object(own)):
            found |= {f'rank{i}.{kind}': value for kind, value in of_rank.items()}
        return found

    def save(self, config, is_best):
        """ Writes a checkpoint of this step. Returns the error, or None. Every rank must call: rank
        0 writes, all know how it went. """
        # the averages are copied: they leave the model again
        tensors = {}
        if self.ema is not None:
            with self.averaged_weights():
                averages = get_model_state_dict(self.model, options=WHOLE)
                tensors['ema'] = {name: value.clone() for name, value in averages.items()}
        tensors['model'] = get_model_state_dict(self.model, options=WHOLE)
        tensors['optimizer'], _ = self.moments(WHOLE)
        tensors['rng'] = self.generators()

        # counters as plain values: reading those on the device waits for it
        known = {name: getattr(self, name) for name in self.counters}
        known |= {name: getattr(self, name).tolist() for name in self.counters_on_device}
        known |= {'identity': self.identity, 'knobs': config, 'generators': [*tensors['rng']]}
        _, error = distributed.on_rank0(checkpoint.write_checkpoint, config['out_dir'], self.step,
                                        tensors, known, config['keep'], is_best)
        if error:
            # train.py gives up after three in a row
            self.failed_saves += 1
        else:
            self.failed_saves = 0
            self.saved_at = self.step
        return error

    def load(self, folder, known):
        """ What save has written to a folder, on any number of processes. known: its
        training_state.json. """
        self.check_counters(folder / 'training_state.json', known)

        # what this run expects there: names, shapes, dtypes. An average is there if the run had one
        # then, whether it has one now or not
        own = self.model.state_dict()
        own_moments, groups = self.moments()
        expected = {'model': own, 'optimizer': own_moments}
        if known['knobs'].get('ema_decay'):
            expected['ema'] = own
        read = {}
        for kind in (*expected, 'rng'):
            path = folder / f'{kind}.safetensors'
            if path.name not in known['files']:
                raise ValueError(f'{folder}/training_state.json: its files are '
                                 f'{", ".join(known["files"])}, expected {path.name} as well')
            read[kind] = checkpoint.read_tensors(path)

        # generators of the CPU have one form; those of another device are not known here
        cpu = torch.get_rng_state()
        expected['rng'] = {name: cpu if name.endswith('.cpu') else read['rng'].get(name, cpu)
                           for name in known['generators']}
        for kind, like in expected.items():
            checkpoint.check_tensors(folder / f'{kind}.safetensors', read[kind], like)

        # averages are read as weights are
        if self.ema is not None:
            fill(self.model, read.get('ema', read['model']))
            self.begin_average()
        fill(self.model, read['model'])

        # moments, in memory of their own: the fused kernels read bare pointers. The groups hold
        # knobs, so they are those of today
        moments = {}
        for key, value in read['optimizer'].items():
            kind, _, name = key.partition('.')
            moments.setdefault(name, {})[kind] = value.clone()
        set_optimizer_state_dict(self.model, self.optimizers,
                                 {'state': moments, 'param_groups': groups}, options=FROM_WHOLE)

        # counters; those of the guard stay on the device
        for name in self.counters:
            setattr(self, name, known[name])
        for name in self.counters_on_device:
            getattr(self, name).copy_(torch.tensor(known[name]))
        self.saved_at = self.step

        # generators; there may have been fewer processes than now
        of_cpu = read['rng'].get(f'rank{rank()}.cpu')
        of_cuda = read['rng'].get(f'rank{rank()}.cuda')
        if of_cpu is not None:
            torch.set_rng_state(of_cpu)
        if of_cuda is not None and torch.device(self.device).type == 'cuda':
            torch.cuda.set_rng_state(of_cuda)

    def check_counters(self, path, known):
        """ ValueError where a counter in training_state.json is none, or a generator is not named:
        the first process has one. """
        for name in (*self.counters, *self.counters_on_device):
            # whatever JSON has there, it must be as many numbers as the counter holds
            form = torch.as_tensor(getattr(self, name)).shape
            try:
                found = torch.tensor(known[name], dtype=torch.float64)
            except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
                found = torch.empty(0)
            if found.shape != form or found.isnan().any() and name != 'history':
                raise ValueError(f'{path}: {name} is {short(known.get(name))}, expected '
                                 f'{"a number" if not form else f"{form[0]} numbers"}')
        if 'rank0.cpu' not in known.get('generators', ()):
            raise ValueError(f'{path}: generators are {short(known.get("generators"))}, expected '
                             'rank0.cpu among them')


def fill(model, weights):
    """ Whole weights {name: tensor} into a model that may be sharded. """
    set_model_state_dict(model, dict(weights), options=FROM_WHOLE)


def begin_from(folder, state):
    """ The best weights of another run of the same model, process and data. """
    source, knobs, meta, _ = checkpoint.load_model(folder, 'best', device=state.device)
    advice = '; texts prepared with --same_as=ITS_DATASET have its vocabulary and its latents'

    # of all that an identity holds, only samples, dropout and optimizer may have been others
    check_equal(f'init_from={folder}', identity_of(source.config, knobs, meta), state.identity,
                advice, but=OF_TRAINING)
    fill(state.model, source.state_dict())


def load_bag(folder, meta):
    """ The values (V, N D) float32 of a dataset's linear model from tokens to the latent
    (corpora/bag.py); None where it has none. """
    if 'bag.npy' not in meta['files']:
        return None
    path = check_file(folder, 'bag.npy', meta['files'])
    N, D = meta['latent_shape']
    shape = (meta['tokenizer']['vocab_size'], N * D)
    return torch.from_numpy(read_array(path, 'float16', shape)).float()


def begin_with_bag(state, data, config):
    """ The bag of a new run begins as the linear model that prepare.py has fitted: the network
    learns what is left. That model predicts a clean latent from a whole text, and the bag what the
    network does at clock 1. """
    c = state.model.config
    fitted = load_bag(data.folder, data.meta) if c.bag else None
    if fitted is None:
        return
    latent = GaussianLatents(data.live, config['latent_schedule'], config['latent_target'])
    a, _ = latent.combination(*latent.alpha_sigma(torch.ones(())))

    # MASK has value 0, and weighs as much as a token; EOS and PAD weigh hardly anything
    n_ids = c.vocab_size + 1 + c.clusters
    values = torch.zeros(n_ids, c.n_latents * c.latent_dim)
    values[:c.vocab_size] = a * fitted
    scores = torch.zeros(n_ids, 1)
    scores[[data.eos, data.pad]] = SCORE_OF_ENDS
    fill(state.model, {'bag_values.weight': values, 'bag_scores.weight': scores})


# ---- the whole

def resume_or_begin(state, data, text_process, config):
    """ Fills the state of a training: from the newest checkpoint of out_dir, from the best weights
    of init_from, or from scratch; takes the run folder, and writes config.json there. Every rank
    must call. Stops all with exit code 2 where that cannot be. data: the training split. """
    model, init_from = state.model, config['init_from']
    state.identity = identity_of(model.config, config, data.meta)
    # nobody else writes there until this process ends, however it ends
    distributed.rank0_or_stop(2, run_folder.take, config['out_dir'])
    newest = distributed.rank0_or_stop(2, checkpoint.newest, config['out_dir'])

    # the clusters of a new run are made from its training split; else they lie with the weights
    if model.config.clusters and not newest and not init_from:
        table = distributed.rank0_or_stop(2, text_process.new_clusters, config, data)
        model.cluster_of.copy_(table)
        sizes = table.bincount()
        print0(f'{len(sizes):,} clusters of {sizes.min():,} to {sizes.max():,} tokens')

    # load; if one rank fails, all stop
    error = None
    try:
        if newest:
            resume_from(newest, state, data, config)
        elif init_from:
            begin_from(init_from, state)
        else:
            begin_with_bag(state, data, config)
        if not newest:
            state.begin_average()
    except (ValueError, OSError) as failure:
        error = str(failure)
    except Exception as failure:                           # a checkpoint of another version
        error = f'cannot go on from {newest or init_from}: {type(failure).__name__}: {failure}'
    errors = [e for e in distributed.all_gather_object(error) if e]
    if errors:
        distributed.stop_all(errors[0], code=2)
    if model.config.clusters:
        text_process.take_clusters(model.cluster_of.cpu())

    # say so; and only now overwrite config.json
    if newest:
        print0(f'going on from {newest}')
    elif init_from:
        print0(f'begins with the best weights of {init_from}')
    distributed.rank0_or_stop(2, run_folder.begin, config, data.folder, state.step)


def resume_from(newest, state, data, config):
    """ The state of a checkpoint, where it is of the same run: with the same model, process and
    samples in both splits, or `best` would compare losses of two validation splits. Says which
    knobs are others now, and what follows from them. """
    known = checkpoint.read_state(newest)                  # rank 0 has verified its files
    check_equal(newest, known['identity'], state.identity,
                ': choose another --out_dir, or the --dataset and the knobs that it had')
    state.load(newest, known)

    # other knobs
    before, now = known['knobs'], as_json(config)
    changed = differences(before, now)
    if changed:
        print0('resumed with other knobs: '
               + ', '.join(f'{name} {old!r} -> {new!r}' for name, (old, new) in changed.items()))
    if changed.keys() & OF_SCHEDULE and state.step:
        print_schedule(state.step, data.seq_len, before, now)

    # is the best loss so far one of other rows, other noise or other losses?
    anew = sorted(changed.keys() & OF_VALIDATION)
    if modes_of(before['mode']) != modes_of(config['mode']):
        anew.append('mode')
    if anew:
        state.best_val = math.inf
        print0(f'the next evaluation is the best so far: with another {", ".join(anew)} the '
               'earlier ones do not compare with it')


def print_schedule(step, seq_len, before, now):
    """ From where to where the learning rate and the stage go: of the last step with the knobs
    `before`, and of the next step with those of now. """
    old_rate, old_number, old_stage = place_in_schedule(before, step - 1, seq_len)
    rate, number, stage = place_in_schedule(now, step, seq_len)
    words = f'at step {step:,} the learning rate goes from {old_rate:.3g} to {rate:.3g}'
    if stage != old_stage:
        back = 'back ' if number < old_number else ''
        words += f', and the run goes {back}from {old_stage}, to {stage}'
    print0(words)


def place_in_schedule(knobs, step, seq_len):
    """ (learning rate, number of the stage, what the stage is) of a step. """
    stages = read_stages(knobs['mode'], knobs['length_schedule'], knobs['streams'],
                         knobs['max_iters'], seq_len)

    # after its last step a schedule is still in its last stage
    number = next((i for i, stage in enumerate(stages) if step < stage.end), len(stages) - 1)
    stage = stages[number]
    rate = knobs['learning_rate'] * lr_factor(knobs, step)
    return rate, number, f'mode {stage.mode}, texts of {stage.seq_len} tokens'
