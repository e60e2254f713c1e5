"""
How a run goes on from its newest checkpoint, or begins with the weights of another run.

Two notions of "the same":
    compatible   model, process, tokenizer and encoder are equal: one run may begin with the weights
                 of the other (init_from)
    identity     the samples of both splits are equal too: one run may go on as the other (resume)
"""
import json
import math
import sys
from dataclasses import asdict

import torch

import processes
from configurator import read_knobs
from runs import checkpoint, distributed, run_folder
from runs.distributed import rank
from runs.manifest import dataset_identity, split_digests
from data import load_bag
from runs.stages import modes_of

# these leave what a resumed run learns as it is
HARMLESS = {'dataset', 'out_dir', 'resume', 'init_from', 'clusters_from', 'device', 'compile',
            'parallel', 'dist_timeout', 'master_timeout', 'preflight_only', 'max_bad_steps', 'keep',
            'save_interval', 'eval_interval', 'log_interval', 'wandb_project'}


SCORE_OF_ENDS = -8.0           # of EOS and PAD in a new bag: e^-8 of the weight of a token


def compatibility(model_config, knobs, meta):
    """ What two runs must share for one to begin with the weights of the other, as JSON gives it
    back. """
    names = ['text_schedule', 'text_power', 'latent_schedule', 'latent_target']
    kind = knobs['text_process']
    if kind != 'masked':
        # a process has the knobs that begin with its name: gidd_gamma, hdlm_xi
        names += ['text_process', *(name for name in knobs if name.startswith(f'{kind}_'))]
    process = {name: knobs[name] for name in names}
    model = {**asdict(model_config), 'importance': knobs['importance']}
    return json.loads(json.dumps(dict(model=model, process=process, **dataset_identity(meta))))


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


def check_identity(saved, newest, out_dir, folder, identity):
    """ ValueError unless the run of training_state.json `saved` may go on with this model and
    dataset. identity: compatibility(...) and 'data', split_digests(...). """
    compatible = {key: value for key, value in identity.items() if key != 'data'}
    if found := checkpoint.difference(saved['identity'], compatible):
        raise ValueError(f'{newest} was trained with {found}: choose another --out_dir')

    # the same samples in both splits, or `best` would compare losses of two validation splits
    data = saved['identity']['data']
    if found := checkpoint.difference({'data': data}, {'data': identity['data']}):
        raise ValueError(f'{newest} was trained on another dataset than {folder} ({found}): '
                         'name its own with --dataset=, or choose another --out_dir')


def load_everything(saved, newest, state, device_type):
    """ Weights, moments, average, counters and generators as they were when they were saved, on any
    number of processes. saved: of checkpoint.load. """
    model, names, optimizers, ema = state.model, state.names, state.optimizers, state.ema
    known = saved['training_state']
    n_norms, most = len(known['history']), len(state.history)
    if n_norms > most:
        raise ValueError(f'{newest}/training_state.json: a history of {n_norms} norms, '
                         f'expected at most {most}')
    saved_names = [checkpoint.todays_name(name) for name in saved['optimizer']['names']]
    if saved_names != list(names) or len(saved['optimizer']['states']) != len(optimizers):
        raise ValueError(f'{newest} was trained with other parameters or another optimizer: '
                         'choose another --out_dir')
    fill(model, saved['model'])

    # the moments are shared out as their parameters are; the groups hold knobs, so they are today's
    name_of = {p: name for name, p in model.named_parameters()}
    for (optimizer, _), saved_optimizer in zip(optimizers, saved['optimizer']['states']):
        owners = [(name_of[p], p) for group in optimizer.param_groups for p in group['params']]
        path = newest / 'optimizer.pt'
        moments = checkpoint.checked_moments(path, saved_optimizer, optimizer, owners)
        for i, of_one in moments.items():
            for kind, value in of_one.items():
                of_one[kind] = distributed.distribute(value, owners[i][1])
        todays_groups = optimizer.state_dict()['param_groups']
        optimizer.load_state_dict(dict(state=moments, param_groups=todays_groups))

    # the average
    averages = saved['ema'] or saved['model']
    for name, average in zip(names, ema or ()):
        checkpoint.check_average(newest / 'ema.safetensors', name, averages[name], average)
        average.copy_(distributed.distribute(averages[name], average))

    # counters
    state.step = state.saved_at = int(known['step'])
    state.evaluated_at = int(known['evaluated_at'])
    state.best_val = math.inf if known['best_val'] is None else float(known['best_val'])
    state.skipped.fill_(known['skipped'])
    state.streak.fill_(known['streak'])
    if known['history']:
        state.history[-len(known['history']):] = torch.tensor(known['history'])

    # generators: None where there were fewer processes than now
    if saved['rng']:
        torch.set_rng_state(saved['rng']['cpu'].cpu())
        if device_type == 'cuda' and 'cuda' in saved['rng']:
            torch.cuda.set_rng_state(saved['rng']['cuda'].cpu())


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
    init_from, or from scratch. Every rank must call. Stops all with exit code 2 where that cannot
    be. Returns the folder of the checkpoint, or None for a new run.
    state: of train.py. run: of preflight.plan. script: the path of train.py.
    """
    model, init_from = state.model, config['init_from']
    compatible = compatibility(run.model_config, config, run.train_data.meta)
    state.identity = {**compatible, 'data': split_digests(run.train_data.meta)}
    newest = distributed.rank0_or_stop(2, take_run_folder, config)

    # the tables of a new run are made from its training split; else they lie with the weights
    if not newest and not init_from:
        tables = distributed.rank0_or_stop(2, processes.tables_of, config, run.train_data)
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
    except Exception as failure:                   # whatever a hostile or older checkpoint provokes
        source = newest or init_from or run.folder
        error = f'cannot go on from {source}: {type(failure).__name__}: {failure}'
    errors = [e for e in distributed.all_gather_object(error) if e]
    if errors:
        distributed.stop_all(errors[0], code=2)
    processes.after_loading(model, run.text, config)

    if rank == 0:
        if newest:
            print(f'going on from {newest}')
            say_what_changed(script, config)
        else:
            say_how_it_begins(model, run, config)
    return newest


def take_run_folder(config):
    """ For rank 0: nobody else writes there until this process ends, however it ends. Returns the
    newest checkpoint that the run goes on from. """
    run_folder.lock(config['out_dir'])
    return checkpoint.newest(config['out_dir']) if config['resume'] == 'auto' else None


def resume_from(newest, state, run, config):
    """ The state of a checkpoint, where it is of the same run. """
    place = 'cpu' if run.is_sharded else run.device
    saved = checkpoint.load(newest, map_location=place, rank=rank)
    known = saved['training_state']
    check_identity(known, newest, config['out_dir'], run.folder, state.identity)
    load_everything(saved, newest, state, torch.device(run.device).type)

    # with other modes the validation is of other losses, and the old best says nothing
    try:
        before = modes_of(run_folder.read_config(config['out_dir'])['mode'])
    except ValueError:
        before = modes_of(config['mode'])
    if before != modes_of(config['mode']):
        state.best_val = math.inf
    if known['global_batch'] != run.global_batch and rank == 0:
        print(f'warning: the global batch was {known["global_batch"]} rows and is now '
              f'{run.global_batch}: not the run it would have been')


def say_how_it_begins(model, run, config):
    for line in processes.describe(model, config, run.train_data):
        print(line)
    if config['init_from']:
        print(f'begins with the best weights of {config["init_from"]}')
    elif config['freeze'] == 'modality':
        print('warning: freeze=modality without init_from freezes an encoder at its random '
              'start: its modality will not be understood')
