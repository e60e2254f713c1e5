"""
Train the two-clock model: text from an embedding (l2t), an embedding from text (t2l), both from noise, or all at once.

    python train.py config/quickstart.py                            # one process, CPU or GPU
    python train.py config/quickstart.py --max_iters=100            # any knob below, by name
    python train.py config/quickstart.py config/mixed.py --out_dir=out/mixed        # overlays: t2l, unconditional, mixed, stable
    torchrun --standalone --nproc_per_node=1 train.py config/l2t.py

Reads data/<dataset> (prepare.py), writes out_dir: config.json, data/, training_log.jsonl, step-N/ with the checkpoints.
Run again with the same out_dir, it goes on from the newest whole checkpoint, bit for bit as if it had never stopped (on a
CPU): row order, masks, clocks and noise are functions of (seed, step), nothing is replayed.
Exit codes: 0 done or preempted, 2 bad config, data or checkpoint, 3 diverged, 4 more than one process, 5 cannot save.
"""
import ctypes
import json
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import SimpleNamespace

import torch

import checkpoint
from configurator import configure, stop, stop_on_error
from data import PackedDataset, dataset_folder, dataset_identity, prefetch, row_order
from diffusion import (MODES, GaussianLatents, MaskedText, draw_clocks, mode_shares, normals, positions_and_targets, text_bound,
                       uniforms)
from model import Model, ModelConfig

# ---- data and run
dataset = 'quickstart'             # a folder under data/, or a path to one
out_dir = 'out/run'
resume = 'auto'                    # 'auto': go on from out_dir's newest whole checkpoint; 'never': refuse a non-empty out_dir
seed = 0
# ---- what is learned
mode = 'l2t'                       # l2t | t2l | unconditional | mixed
mode_weights = (1.0, 1.0, 1.0)     # mixed: shares of unconditional, l2t, t2l
mode_schedule = ''                 # or modes in turn: 't2l:2000,l2t:3000,mixed' is 2,000 steps of t2l, 3,000 of l2t, then mixed
cond_drop = 0.1                    # share of l2t and t2l rows whose condition is noise at clock 1
latent_noise = 0.0                 # l2t reads latents at a clock from U(0, latent_noise)
latent_weight = 1.0                # of the latent loss (per dimension) beside the text loss (nats per token)
init_from = ''                     # a run folder: begin with its best weights, at step 0
freeze = 'unused'                  # 'unused': what no loss of the mode can reach; 'modality': in l2t the latent encoder and head too, in
                                   # t2l the text ones, to fine-tune what init_from names; 'none'
# ---- the two processes, math in diffusion.py; sampling reads the same
text_schedule = 'loglinear'        # loglinear | cosine | polynomial
text_power = 2.0                   # polynomial: 1 - a(t) = t^power
latent_schedule = 'vp'             # vp | rf
latent_target = 'v'                # v | x0 | flow | eps
latent_loss_weight = 'none'        # none | snr | min_snr
t_min = 1e-3                       # clocks are drawn from (t_min, 1)
# ---- model
streams = ('text', 'latent')
seq_len = None                     # L; None: the dataset's max_tokens + 1
latent_tokens = 8                  # tokens per latent vector
depth = 8
heads = 4
width = 256
latent_width = None                # None: width
mlp_ratio = 4.0
causal = False
text_clock = True                  # False: the text clock is left out, costs no likelihood
spatial = False                    # the latents are a square grid
dropout = 0.0
# ---- optimisation
batch_size = 64                    # rows per process and micro-step
grad_accum = 1                     # micro-steps per step
max_iters = 10_000
optimizer = 'adamw'                # 'adamw', or 'muon': torch.optim.Muon for the trunk's matrices, AdamW for the rest
learning_rate = 1e-3
muon_lr = None                     # of the trunk's matrices under muon, in AdamW's scale; None: learning_rate
min_lr = 0.0                       # share of learning_rate at the end
warmup_iters = 100                 # at most half the run
decay_from = 0.0                   # share of the run after which the cosine decay begins
weight_decay = 0.1                 # on matrices only
betas = (0.9, 0.95)
grad_clip = 1.0
ema_decay = 0.999                  # warmed up as min(ema_decay, (1 + n) / (10 + n)); 0: no average
# ---- machine
device = 'auto'                    # auto | cpu | cuda | cuda:1 ...
dtype = 'bfloat16'                 # bfloat16 (autocast; weights and optimizer stay float32) | float32
compile = False                    # torch.compile every block: a minute or more at the first start, then faster steps (LOG.md)
# ---- guard, logs, checkpoints
guard = True                       # skip a step whose loss or gradient is not finite: nothing moves
max_bad_steps = 10                 # so many in a row end the run, exit code 3
keep = 2                           # checkpoints kept beside the best
save_interval = 1000
eval_interval = 500
eval_iters = 16                    # micro-batches of the validation split
log_interval = 50

config = configure(globals())

# ---- derived values, and everything a user can get wrong, before anything is built
for name, value, legal in (('resume', resume, ('auto', 'never')), ('freeze', freeze, ('none', 'unused', 'modality')),
                           ('optimizer', optimizer, ('adamw', 'muon'))):
    if value not in legal:
        stop(f"{name}={value!r}: choose from {', '.join(legal)}")
if dtype not in ('float32', 'bfloat16'):
    stop(f'dtype={dtype!r}: choose from float32, bfloat16 (float16 would need loss scaling)')
if int(os.environ.get('WORLD_SIZE', 1)) > 1:
    stop(f"{os.environ['WORLD_SIZE']} processes: train.py runs as one process so far; use --nproc_per_node=1", code=4)
if min(batch_size, grad_accum, log_interval, eval_interval, save_interval, eval_iters) < 1:
    stop('batch_size, grad_accum, eval_iters and the intervals must be at least 1')
for name, value in (('seq_len', seq_len), ('latent_width', latent_width)):
    if type(value) not in (int, type(None)):
        stop(f'{name}={value!r} must be a whole number, or None')
if type(muon_lr) not in (int, float, type(None)):
    stop(f'muon_lr={muon_lr!r} must be a number, or None')
if resume == 'never' and os.path.isdir(out_dir) and os.listdir(out_dir):
    stop(f'{out_dir} is not empty and resume=never: choose another --out_dir')


def read_stages(schedule):
    """ 'l2t', or 't2l:2000,l2t:3000,mixed': a stage each, with its first step, what its mode draws, the streams that have a loss,
    and the positions that the head runs on. """
    found, first = [], 0
    for part in schedule.split(','):
        name, _, length = part.strip().partition(':')
        if length and not length.isdigit() or length == '0' or found and found[-1].length is None:
            raise ValueError(f'mode_schedule={schedule!r}: {part.strip()!r}: expected MODE:STEPS,MODE:STEPS,MODE')
        shares = mode_shares(name, mode_weights)
        text_share = shares['unconditional'] + shares['l2t']             # of the rows that have the loss
        latent_share = shares['unconditional'] + shares['t2l']
        losses = tuple(s for s, share in (('text', text_share), ('latent', latent_share)) if share and s in streams)
        if not losses:
            raise ValueError(f'mode={name} has no loss on streams={streams}')
        if freeze == 'modality' and name not in ('l2t', 't2l'):
            raise ValueError(f'freeze=modality fine-tunes one direction, l2t or t2l, not mode={name}')
        found.append(SimpleNamespace(mode=name, first=first, length=int(length) if length else None, shares=shares, predict=losses,
                                     budget=text.head_budget(batch_size, L, text_share)))
        first += int(length or 0)
    if found[-1].first >= max_iters or found[-1].length not in (None, max_iters - found[-1].first):
        raise ValueError(f'mode_schedule={schedule!r}: its steps do not fill max_iters={max_iters}; leave the last mode without steps')
    return found


def stage_at(step):
    return [stage for stage in stages if stage.first <= step][-1]


folder = dataset_folder(dataset)
configs = [arg for arg in sys.argv[1:] if arg.endswith('.py')]
if configs and not os.path.exists(os.path.join(folder, 'meta.json')):
    stop(f"no dataset in {folder}: make it with `python prepare.py {' '.join(configs)}` (its docstring names the input)")
with stop_on_error():
    device = checkpoint.pick_device(device)
    train_data = PackedDataset(folder, 'train', seq_len)
    val_data = PackedDataset(folder, 'val', train_data.seq_len)
    if train_data.latent_shape is None and 'latent' in streams:
        raise ValueError(f"{folder} has no latents: prepare it with --encoder=..., or train with --streams=text, --mode=unconditional")
    N, D = train_data.latent_shape or (0, 0)
    model_config = ModelConfig(
        vocab_size=train_data.tokenizer.vocab_size, seq_len=train_data.seq_len, latent_dim=D, n_latents=N,
        **{name: config[name] for name in ('latent_tokens', 'depth', 'heads', 'width', 'latent_width', 'mlp_ratio', 'causal', 'streams',
                                           'text_clock', 'spatial', 'dropout')})
    text = MaskedText(model_config.vocab_size, text_schedule, text_power)
    latent = GaussianLatents(train_data.live.to(device) if N else None, latent_schedule, latent_target, latent_loss_weight)
    if model_config.causal:
        raise ValueError('causal=True has no training loss yet: masked diffusion looks both ways')
    L = train_data.seq_len
    stages = read_stages(mode_schedule or mode)
global_batch = batch_size * grad_accum
predict = tuple(s for s in streams if any(s in stage.predict for stage in stages))
trains = {name for stage in stages for name, share in stage.shares.items() if share}

# ---- device and seed
device_type = torch.device(device).type
torch.manual_seed(seed)
if device_type == 'cuda':
    torch.set_float32_matmul_precision('high')
elif sys.platform == 'linux':
    with suppress(AttributeError):                         # glibc would hand every large temporary back and fault it in anew
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)                                # M_MMAP_MAX: no mapping of its own for a large block
        libc.mallopt(-1, 2 ** 31 - 1)                      # M_TRIM_THRESHOLD: keep what is free
autocast = lambda: torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16')  # noqa: E731

# ---- model, and its running average in float32
model = Model(model_config).to(device)
for stage in stages:
    stage.frozen = set() if freeze == 'none' else set(model.unreachable(stage.predict))
    if freeze == 'modality':
        stage.frozen |= set(model.encoder_and_head('latent' if stage.mode == 'l2t' else 'text'))
always_frozen = set.intersection(*(stage.frozen for stage in stages))
names, parameters = zip(*((n, p) for n, p in model.named_parameters() if n not in always_frozen))


def freeze_all_but(trained):
    """ What is frozen gets no gradient, so no optimizer moves it: not by momentum, not by decay. """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


freeze_all_but(names)                                      # the optimizers take all that ever train
ema = [p.detach().clone() for p in parameters] if ema_decay else None


@contextmanager
def averaged_weights():
    """ Inside, the model has its EMA weights. """
    def swap():
        for p, e in zip(parameters, ema or ()):
            p.data, e.data = e.data, p.data
    swap()
    yield
    swap()


# ---- optimizers: [(optimizer, base rate)]
groups = model.parameter_groups()
if len(betas) != 2 or not all(0 <= b < 1 for b in betas) or learning_rate <= 0 or weight_decay < 0:
    stop(f'betas={betas}, learning_rate={learning_rate}, weight_decay={weight_decay}: two betas in [0, 1), a rate > 0, a decay >= 0')
adamw_matrices = groups['ends'] + (groups['matrices'] if optimizer == 'adamw' else [])
adamw_groups = [dict(params=adamw_matrices, weight_decay=weight_decay), dict(params=groups['vectors'], weight_decay=0.0)]
optimizers = [(torch.optim.AdamW(adamw_groups, lr=learning_rate, betas=betas, fused=True), learning_rate)]
if optimizer == 'muon':
    # match_rms_adamw scales Muon's update to the size of AdamW's, so that one rate serves both (arXiv:2502.16982)
    optimizers.append((torch.optim.Muon(groups['matrices'], lr=learning_rate, weight_decay=weight_decay,
                                        adjust_lr_fn='match_rms_adamw'), muon_lr or learning_rate))

# ---- resume, or begin
process = {name: config[name] for name in ('text_schedule', 'text_power', 'latent_schedule', 'latent_target')}
identity = dict(model=asdict(model_config), process=process, **dataset_identity(train_data.meta))
identity = json.loads(json.dumps(identity))                # tuples become lists, as they will be read back
skipped = torch.zeros((), device=device)                   # steps of the run so far
streak = torch.zeros((), device=device)                    # steps skipped in a row
step = saved_at = evaluated_at = 0
best_val = math.inf
with stop_on_error():
    newest = checkpoint.newest(out_dir) if resume == 'auto' else None
    if init_from and not newest:
        source, source_config, source_meta = checkpoint.load_model(init_from, 'best', device=device)
        source_process = {name: source_config[name] for name in process}
        source_identity = json.loads(json.dumps(dict(model=asdict(source.config), process=source_process, **dataset_identity(source_meta))))
        source_identity['model']['dropout'] = identity['model']['dropout']
        other = checkpoint.difference(source_identity, identity)
        if other:
            raise ValueError(f'init_from={init_from} was trained with {other}')
        model.load_state_dict(source.state_dict())
        for e, p in zip(ema or (), parameters):
            e.copy_(p.detach())
        del source
        print(f'begins with the best weights of {init_from}')
    elif freeze == 'modality' and not newest:
        print('warning: freeze=modality without init_from freezes an encoder at its random start: its modality will not be understood')
    if newest:
        saved = checkpoint.load(newest, map_location=device)
        state = saved['training_state']
        other = checkpoint.difference(state['identity'], identity)
        if other:
            raise ValueError(f'{newest} was trained with {other}: choose another --out_dir')
        if saved['optimizer']['names'] != list(names) or len(saved['optimizer']['states']) != len(optimizers):
            raise ValueError(f'{newest} was trained with other parameters or another optimizer: choose another --out_dir')
        model.load_state_dict(saved['model'])
        for (opt, _), opt_state in zip(optimizers, saved['optimizer']['states']):
            for group, saved_group in zip(opt.param_groups, opt_state['param_groups']):
                saved_group.update({key: group[key] for key in ('weight_decay', 'betas') if key in group})   # knobs, not state
            opt.load_state_dict(opt_state)
        for name, e in zip(names, ema or ()):
            e.copy_((saved['ema'] or saved['model'])[name])
        step = saved_at = state['step']
        evaluated_at, best_val = state['evaluated_at'], math.inf if state['best_val'] is None else state['best_val']
        skipped += state['skipped']
        streak += state['streak']
        torch.set_rng_state(saved['rng']['cpu'].cpu())
        if device_type == 'cuda' and 'cuda' in saved['rng']:
            torch.cuda.set_rng_state(saved['rng']['cuda'].cpu())
        del saved
        print(f'going on from {newest}')
    checkpoint.write_run(out_dir, config, folder, fresh=newest is None)
    if os.path.exists(os.path.join(out_dir, 'preempted.json')):
        os.remove(os.path.join(out_dir, 'preempted.json'))

if compile:
    for block in model.blocks:                             # all blocks are one program: a depth-th of the wait
        block.compile(dynamic=False)

flops = model.flops(global_batch, L, stages[0].budget * grad_accum, stages[0].predict)
print(f'{model.n_parameters() / 1e6:.1f}M parameters ({sum(p.numel() for p in parameters) / 1e6:.1f}M train), '
      f'{flops / 1e9:,.0f} GFLOP per step, {len(train_data):,} samples, {global_batch * max_iters / len(train_data):.1f} epochs, '
      f'device {device}, {dtype}', flush=True)


def make_batch(data, rows, step, first, batch):
    """ Rows of the dataset as they enter the network at this step, with what the losses need; first: number of the first row
    in the global batch, of `batch` rows. A pure function of its arguments and the seed, made on the host. """
    tokens, latents = data.rows(rows)                                    # (B, L), (B, N, D)
    B, stage = len(rows), stage_at(step)
    c = draw_clocks(seed, step, first, B, batch, stage.shares, cond_drop, latent_noise, t_min)
    out = dict(mode=c['mode'], t_text=c['t_text'].float(), t_latent=c['t_latent'].float())
    if 'text' in streams:
        out['tokens'], mask = text.corrupt(tokens, c['t_text'], uniforms(seed, step, 'mask', first, B, L))
        if 'text' in stage.predict:                        # where: a row without this loss has clock 0, and the weight inf * 0
            row_weight = torch.where(c['text_weight'] > 0, text.weight(c['t_text']) * c['text_weight'], 0)
            scored = mask & (c['text_weight'] > 0)[:, None]
            out['positions'], out['targets'], out['weight'] = positions_and_targets(scored, tokens, row_weight, stage.budget)
    if 'latent' in streams:
        out['clean'], out['noise'] = latents, normals(seed, step, 'latent', first, B, N, D)
        if 'latent' in stage.predict:
            out['row_weight'] = torch.where(c['latent_weight'] > 0, latent.weight(c['t_latent']) * c['latent_weight'], 0).float()
    return out


def losses(b):
    """ Forward one micro-batch: {loss, and per stream its loss, its error per position or row, and the logits}. """
    noisy = target = None
    predict = stage.predict
    if 'latent' in streams:
        noisy, e = latent.corrupt(b['clean'], b['t_latent'], b['noise'])
        target = latent.target_of(b['clean'], e, b['t_latent'])
    with autocast():
        logits, out = model(b.get('tokens'), noisy, b['t_text'], b['t_latent'], b.get('positions'), predict)
    r = dict(loss=torch.zeros((), device=device))
    if 'text' in predict:
        r['text_loss'], r['nll'] = text.loss(logits, b['targets'], b['weight'])
        r['loss'], r['logits'] = r['loss'] + r['text_loss'], logits
    if 'latent' in predict:
        r['latent_loss'], r['error'] = latent.loss(out, target, b['row_weight'])
        r['loss'] = r['loss'] + latent_weight * r['latent_loss']
    return r


@torch.no_grad()
def add_statistics(stats, b, r):
    """ Add a micro-batch to the sums that are logged; on the device, nothing waits. Losses also in 4 bins of their clock: the one
    diagnostic that a diffusion run needs. """
    def binned(clock, values, scored):
        bins = (4 * clock).long().clamp(max=3)
        return [torch.zeros(4, device=device).index_add_(0, bins, x) for x in (torch.where(scored, values, 0), scored.float())]
    def by_mode(modes, values):
        return torch.zeros(len(MODES), device=device).index_add_(0, modes, values)
    sums = dict(loss=r['loss'], rows=by_mode(b['mode'], torch.ones_like(b['t_text'])))
    if 'text_loss' in r:
        scored, row = b['weight'] > 0, b['positions'] // L
        sums['text_loss'], sums['correct'] = r['text_loss'], ((r['logits'].argmax(1) == b['targets']) & scored).sum()
        sums['text_bins'], sums['text_count'] = binned(b['t_text'][row], r['nll'], scored)
        sums['text_by_mode'] = by_mode(b['mode'][row], torch.where(scored, b['weight'] * r['nll'], 0)) * batch_size
    if 'latent_loss' in r:
        sums['latent_loss'] = r['latent_loss']
        sums['latent_by_mode'] = by_mode(b['mode'], torch.where(b['row_weight'] > 0, b['row_weight'] * r['error'], 0))
        sums['latent_bins'], sums['latent_count'] = binned(b['t_latent'], r['error'], b['row_weight'] > 0)
    for key, value in sums.items():
        stats[key] = stats.get(key, 0) + value.detach()


@torch.no_grad()
def evaluate():
    """ Over eval_iters micro-batches of the validation split, always the same rows, masks and noise: the exact text bound in
    nats per real token (text and one EOS) and the latents' squared error of the target per dimension, each given what the
    mode gives (clean text, clean latents, or nothing: noise at clock 1). """
    model.eval()
    nats = real = error = rows_seen = 0.0
    for i in range(min(eval_iters, -(-len(val_data) // batch_size))):
        rows = [r % len(val_data) for r in range(i * batch_size, (i + 1) * batch_size)]
        tokens, latents = val_data.rows(rows)
        tokens, B = tokens.to(device), len(rows)
        ones, zeros = torch.ones(B, device=device), torch.zeros(B, device=device)
        e = None
        if 'latent' in streams:
            latents, e = latents.to(device), normals(seed, i, 'evaluation latent', 0, B, N, D).to(device)
        u = uniforms(seed, i, 'evaluation', 0, B, 1 + L).to(device)
        spread = (u[0, 0] + torch.arange(B, device=device) / B) % 1      # one clock per row, evenly
        with autocast():
            if 'text' in predict:
                t_latent = zeros if 'l2t' in trains else ones            # mixed: given the latents
                z = latent.corrupt(latents, t_latent, e)[0] if N and e is not None else None
                u[:, 0] = spread
                nats += text_bound(model, text, tokens, z, t_latent, u).sum().item()
            if 'latent' in predict:
                z, e = latent.corrupt(latents, spread, e)
                given = zeros if 't2l' in trains else ones
                seen = text.corrupt(tokens, given, u[:, 1:])[0] if 'text' in streams else None
                out = model(seen, z, given, spread.float(), predict=('latent',))[1]
                error += latent.loss(out, latent.target_of(latents, e, spread), ones)[1].sum().item()
        real += (tokens != train_data.tokenizer.pad).sum().item()
        rows_seen += B
    model.train()
    values = dict(val_text=nats / real, val_latent=error / rows_seen)
    return {name: value for name, value in values.items() if name.removeprefix('val_') in predict}


def get_lr(step):
    """ Factor of the base rates at this step: linear warm-up, then cosine from 1 to min_lr, and min_lr for good. """
    warmup = min(warmup_iters, max_iters // 2)
    if step < warmup:
        return (step + 1) / warmup
    begin = max(warmup, decay_from * max_iters)
    done = min(1.0, max(0.0, (step - begin) / max(1, max_iters - begin)))
    return min_lr + (1 - min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def save(is_best):
    assert ema is None or not ema[0].requires_grad, 'the average carries a graph'
    ema_state = dict(zip(names, ema)) if ema is not None else None
    if ema_state is not None:                              # frozen parameters do not move: their average is what they are
        ema_state = {n: ema_state.get(n, p.detach()) for n, p in model.named_parameters()}
    rng = {'cpu': torch.get_rng_state(), **({'cuda': torch.cuda.get_rng_state()} if device_type == 'cuda' else {})}
    optimizer_state = dict(names=list(names), states=[opt.state_dict() for opt, _ in optimizers])
    state = dict(step=step, evaluated_at=evaluated_at, best_val=None if math.isinf(best_val) else best_val,
                 skipped=skipped.item(), streak=streak.item(), model_config=asdict(model_config), identity=identity)
    with stop_on_error(code=5):
        checkpoint.save(out_dir, step, model.state_dict(), ema_state, optimizer_state, state, [rng], keep=keep, best=is_best)


def log_line(**entry):
    with open(os.path.join(out_dir, 'training_log.jsonl'), 'a') as f:
        f.write(json.dumps(entry) + '\n')


def clock_time(seconds):
    return f'{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}'


def check_streak():
    """ Ends the run when too many steps in a row were skipped; reads the device, so at log, save and evaluation steps only. """
    if streak.item() >= max_bad_steps:
        stop(f'step {step}: {int(streak.item())} steps in a row had no finite loss or gradient; '
             f'the newest checkpoint is step {saved_at}', code=3)


def micro_batches(step):
    while step < max_iters:
        for micro in range(grad_accum):
            first = micro * batch_size
            rows = row_order(len(train_data), seed, step * global_batch + first, batch_size)
            yield make_batch(train_data, rows, step, first, global_batch)
        step += 1


# ---- the loop: evaluate, save and stop; micro-steps; guard; step; average; log
stop_signal = None


def request_stop(number, frame):
    global stop_signal
    stop_signal = number


for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, request_stop)

stage = None
model.train()
batches = prefetch(micro_batches(step), device)
stats, since, steps_since = {}, time.perf_counter(), 0
start_step, start_time = step, since
while True:
    at_end = step >= max_iters
    due_evaluation = (at_end or step % eval_interval == 0) and step > evaluated_at and not stop_signal
    due_save = (at_end or step % save_interval == 0 or stop_signal) and step > saved_at
    if due_evaluation or due_save:
        began, is_best = time.perf_counter(), False
        check_streak()
        if due_evaluation:
            with averaged_weights():
                val = evaluate()
            val_loss = (val.get('val_text') or 0) + latent_weight * (val.get('val_latent') or 0)
            is_best, best_val, evaluated_at = val_loss < best_val, min(best_val, val_loss), step
            units = dict(val_text='nats per token', val_latent='per dimension')
            print(f'step {step:>6,} | ' + ', '.join(f'{name} {value:.4f} {units[name]}' for name, value in val.items())
                  + (' | best' if is_best else ''), flush=True)
            log_line(step=step, **val, best=is_best, seconds=round(time.perf_counter() - began, 2))
        # not while a streak is open, or the last good ones would rotate away; at the end all the same: a skipped step moved nothing
        if (due_save or is_best) and (streak.item() == 0 or at_end or stop_signal):
            save(is_best)
            saved_at = step
        since += time.perf_counter() - began
    if stop_signal:
        name = signal.Signals(stop_signal).name
        with open(os.path.join(out_dir, 'preempted.json'), 'w') as f:
            json.dump(dict(step=saved_at, signal=name), f)
        print(f'{name}: saved step {saved_at:,}; run the same command again to go on', flush=True)
        break
    if at_end:
        break

    if stage is not stage_at(step):
        stage = stage_at(step)
        freeze_all_but(set(names) - stage.frozen)
        assert {n for n, p in model.named_parameters() if not p.requires_grad} == stage.frozen, 'others are frozen than shall be'
        if len(stages) > 1:
            print(f'step {step:>6,} | mode {stage.mode}', flush=True)
    loss = 0
    for _ in range(grad_accum):
        batch = next(batches)
        result = losses(batch)
        (result['loss'] / grad_accum).backward()
        loss = loss + result['loss'].detach() / grad_accum
        add_statistics(stats, batch, result)
    norm = torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
    bad = (~torch.isfinite(norm) | ~torch.isfinite(loss)).float() if guard else torch.zeros((), device=device)
    for opt, rate in optimizers:
        for group in opt.param_groups:
            group['lr'] = rate * get_lr(step)
        if isinstance(opt, torch.optim.AdamW):
            opt.found_inf = bad                            # the fused kernel leaves weights, moments and step count alone
            opt.step()
        elif not bad.item():                               # Muon has no such switch: one sync
            opt.step()
        opt.zero_grad(set_to_none=True)
    step += 1
    steps_since += 1
    skipped += bad
    streak = (streak + 1) * bad
    if ema is not None:                                    # after the step; a skipped step moves nothing
        with torch.no_grad():                              # ema += (1 - d) (weights - ema); with a graph it would grow for ever
            d = min(ema_decay, (1 + step) / (10 + step))
            torch._foreach_add_(ema, torch._foreach_mul(torch._foreach_sub(parameters, ema), (1 - d) * (1 - bad)))
    stats['norm'] = stats.get('norm', 0) + norm

    if step % log_interval == 0 or step == max_iters or stage_at(step) is not stage:   # a line speaks of one mode
        now = time.perf_counter()
        s = {key: (value / steps_since).tolist() for key, value in stats.items()}   # means per step
        share = lambda sums, counts: [a / b if b else None for a, b in zip(sums, counts)]  # noqa: E731
        per_mode = lambda key: {m: x for m, x in zip(MODES, share(s[key], s['rows'])) if x}  # noqa: E731
        speed = global_batch * L * steps_since / (now - since)
        entry = dict(step=step, epoch=step * global_batch / len(train_data), tokens=step * global_batch * L,   # PAD among them
                     loss=s['loss'] / grad_accum)
        line = f'step {step:>6,}/{max_iters:,} | loss {entry["loss"]:.4f}'
        if 'text_loss' in s:
            entry.update(text_loss=s['text_loss'] / grad_accum, text_accuracy=s['correct'] / max(sum(s['text_count']), 1e-9),
                         text_nll_by_t=share(s['text_bins'], s['text_count']), text_nats_by_mode=per_mode('text_by_mode'))
            line += f' | text {entry["text_loss"]:.4f}, {100 * entry["text_accuracy"]:.1f} % right'
        if 'latent_loss' in s:
            entry.update(latent_loss=s['latent_loss'] / grad_accum, latent_mse_by_t=share(s['latent_bins'], s['latent_count']),
                         latent_mse_by_mode=per_mode('latent_by_mode'))
            line += f' | latent {entry["latent_loss"]:.4f}'
        entry.update(lr=learning_rate * get_lr(step - 1), grad_norm=s['norm'], tokens_per_s=speed, skipped=int(skipped.item()),
                     modes=dict(zip(MODES, (rows / global_batch for rows in s['rows']))))
        log_line(**entry)
        eta = (max_iters - step) * (now - since) / steps_since
        print(f'{line} | norm {entry["grad_norm"]:.2f} | {speed:,.0f} tokens/s | ETA {clock_time(eta)}'
              + (f' | skipped {entry["skipped"]}' if entry['skipped'] else ''), flush=True)
        stats, since, steps_since = {}, now, 0
        check_streak()

print(f'{step - start_step:,} steps in {clock_time(time.perf_counter() - start_time)}; best validation '
      f'{best_val:.4f}; checkpoints in {out_dir}', flush=True)
