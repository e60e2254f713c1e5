"""
Train the two-clock model: text from an embedding (l2t), an embedding from text (t2l), both from
noise, or all at once.

    python train.py config/quickstart.py                          # one process, CPU or GPU
    python train.py config/quickstart.py --max_iters=100          # any knob below, by name
    python train.py config/quickstart.py config/mixed.py --out_dir=out/mixed    # an overlay
    python train.py config/quickstart.py --preflight_only=true    # is everything in place?
    torchrun --standalone --nproc_per_node=8 train.py config/l2t.py  # docs/cluster.md

Reads data/<dataset> (prepare.py). Writes out_dir: config.json, data/, training_log.jsonl, and
step-N/ with the checkpoints. Run again with the same out_dir, it goes on from the newest whole
checkpoint as if it had never stopped: bit for bit with one or two processes on a CPU, else to
rounding, also on another number of processes. Row order, masks, clocks and noise are functions of
(seed, step): nothing is replayed.

Exit codes: 0 done or preempted, 2 bad config, data or checkpoint, 3 diverged, 4 preflight or
rendezvous, 5 cannot save.
"""
if __name__ != '__main__':                                 # an import would start a training
    raise ImportError('train.py is a script: run `python train.py ...`; '
                      'other modules hold what can be imported')

import math
import signal
import sys
import time

import runs.threads    # before torch: it sets how threads wait for one another

import torch

from configurator import configure, stop_on_error
from data import prefetch, row_order
from loss import BatchMaker, Loss
from model import Model
from processes import add_modules
from runs import distributed
from runs.distributed import all_reduce_max, all_reduce_sum, rank, world
from runs.flops import flops_of_step
from runs.log import StepLog, say_cost
from runs.resume import State, resume_or_begin

# A comment that opens with a range or with choices is a rule: the configurator reads it from this
# file and refuses other values.

# ---- data and run
dataset = 'quickstart'         # <a folder under data/, or a path to one>
out_dir = 'out/run'            # <a folder>: of this run
resume = 'auto'                # auto | never; auto: go on from out_dir's newest whole checkpoint;
                               # never: refuse a non-empty out_dir
seed = 0                       # [0, 2**63)
# ---- what is learned
mode = 'l2t'                   # <l2t, t2l, unconditional, causal; or several, as l2t+3*causal>
                               # each row draws one. In turn: t2l:40%,l2t trains t2l for the first
                               # 40 % of the steps, then l2t
causal_weight = 1.0            # [0, 1e6]: of the loss of causal rows beside the others
cond_drop = 0.1                # [0, 1]: share of conditional rows whose condition is noise
latent_weight = 1.0            # [0, 1e6]: of the latent loss beside the text loss
init_from = ''                 # a run folder: begin with its best weights, at step 0
# ---- model; what the modes need beside is chosen by runs/preflight.py
streams = ('text', 'latent')   # text | latent
latent_tokens = 8              # [1, 1024]: tokens per latent vector
depth = 8                      # [1, 256]
heads = 4                      # [1, 256]
width = 256                    # [1, 16384]
latent_width = None            # None | int [1, 16384]; None: width
text_clock = True              # False: the text clock is not read; costs no likelihood
dropout = 0.0                  # [0, 1)
# ---- optimisation
batch_size = 64                # [1, 65536]: rows per process and micro-step
grad_accum = 1                 # [1, 65536]: micro-steps per step
global_batch = None            # None | int [1, 2**30]: rows per step, over all processes: then
                               # grad_accum follows; None: batch_size x grad_accum x processes
max_iters = 10_000             # [1, 1e9]
optimizer = 'adamw'            # adamw | muon; muon: for the blocks' matrices, AdamW for the rest
learning_rate = 1e-3           # (0, 10]
warmup_iters = 100             # [0, 1e9]: at most half the run
weight_decay = 0.1             # [0, 10]: on matrices, embeddings among them
grad_clip = 1.0                # [0, 1e9]: largest norm of the gradient; 0: not clipped
ema_decay = 0.999              # [0, 1): warmed up, min(ema_decay, (1 + n) / (10 + n)); 0: none
# ---- machine
device = 'auto'                # auto | cpu | cuda | <cuda:1 or the like>
dtype = 'auto'                 # auto | bfloat16 | float32; bfloat16: autocast, weights and
                               # optimizer stay float32 (float16 would need loss scaling); auto:
                               # bfloat16 where the device has instructions for its products
compile = False                # torch.compile every block: a minute at the start, then faster steps
parallel = 'ddp'               # ddp | fsdp; fsdp: FSDP2, parameters and moments are shared out
# ---- logs and checkpoints
keep = 2                       # [1, 1e6]: the newest checkpoints, kept beside the best; 1: if the
                               # newest is broken, only the best is left
save_interval = 1000           # [1, 1e9]
eval_interval = 500            # [1, 1e9]
eval_iters = 16                # [1, 1e6]: micro-batches of the validation split
log_interval = 50              # [1, 1e6]
wandb_project = ''             # log there too: pip install wandb; a resumed run goes on in its own

# ---- ADVANCED: what most runs leave alone
preflight_only = False         # look whether everything is in place, and stop
length_schedule = ''           # '24:80%,40': texts of 24 tokens for 80 % of the steps, then of 40;
                               # or '24:1200,40'. A text that is cut has no latent loss
predict_length = True          # False: EOS and PAD are given, not learned; texts longer than
                               # seq_len are cropped at random (proteins)
freeze = 'none'                # none | modality; modality: in l2t the latent encoder and head, in
                               # t2l the text ones, to fine-tune what init_from names
seq_len = None                 # None | int [1, 65536]: L; None: the dataset's max_tokens + 1
spatial = False                # the latents are a square grid
# the two processes (diffusion.py); sampling reads the same
text_schedule = 'loglinear'    # loglinear | cosine | polynomial | ddpm
text_loss_weight = 'bound'     # bound | uniform | rdm | dynamic | clip; bound: w(t); uniform: 1,
                               # as in flow matching; rdm: 1 - t; dynamic and clip: gidd only
latent_schedule = 'vp'         # vp | rf
latent_target = None           # None | v | x0 | flow | eps; None: x0 where one vector is
                               # predicted from text, else v
latent_loss_weight = 'none'    # none | snr | min_snr
t_min = 1e-3                   # (0, 1): clocks are drawn from (t_min, 1)
# other text processes (processes/); their knobs, and those of importance and muon, stand in their
# own files, and --help has them
text_process = 'masked'        # masked | gidd | hdlm
importance = 'none'            # none | freq | learned | hybrid: what masking and curriculum go by
# optimisation
min_lr = 0.0                   # [0, 1]: at the end, as a share of learning_rate
betas = (0.9, 0.95)            # [0, 1)
# guard
guard = True                   # skip a step whose loss or gradient is not finite, or spikes; ten
                               # skips in a row end the run, exit code 3
spike_factor = 10.0            # [0, 1e9]; a spike: a gradient norm so many times the median of the
                               # last 64; 0: none is
# other processes
dist_timeout = 600.0           # [1, 1e7]: seconds after which a silent process ends the run
master_timeout = 6.0           # [0.1, 1e7]: seconds in which rank 0 must be found at the start

config = configure(globals(), show=False)

# -----------------------------------------------------------------------------
# What follows from knobs and data; all that can be wrong is found here, before the network is built

def plan_and_join():
    """
    Checks knobs, data and machine, and joins the other processes. With preflight_only the process
    ends here. Returns what preflight.plan has made of knobs and data:
        train_data, val_data    data.PackedDataset, of the dataset in `folder`
        text, latent            diffusion.MaskedText, diffusion.GaussianLatents
        model_config            model.ModelConfig
        stages                  stretches of one mode and one text length; most runs have one
        predict, modes          the streams that have a loss, and the modes, in any stage
        global_batch            rows of a step, over all processes
        micro_batch, grad_accum rows of a process and micro-step, and micro-steps of a step
        device, dtype           where it runs, and in which numbers: bfloat16 or float32
        is_sharded              whether FSDP shares the parameters out
        adaptive                masking by importance (ATAT); None for most runs
    """
    from runs import meeting, preflight
    run = preflight.plan(config)
    if preflight_only:
        raise SystemExit(0)
    with stop_on_error(code=4):
        meeting.join(run.device, dist_timeout)

    preflight.agree_on_dtype(run, config)
    return run


run = plan_and_join()
device, dtype, is_sharded = run.device, run.dtype, run.is_sharded
micro_batch, grad_accum = run.micro_batch, run.grad_accum
train_data, val_data = run.train_data, run.val_data
device_type = torch.device(device).type
torch.manual_seed(seed)
if device_type == 'cuda':
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision('high')
else:
    distributed.keep_freed_memory()

# -----------------------------------------------------------------------------
# Model, loss, running average, optimizers

def autocast():
    return torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16')


def make_model():
    """ The network, with what ATAT or another text process keeps beside it. """
    model = add_modules(Model(run.model_config), config).to(device)
    if run.adaptive:
        model.importance.rarity.copy_(run.adaptive.rarity)
    return model


model = make_model()
if freeze == 'modality':
    # a parameter without a gradient is moved by no optimizer: neither by momentum nor by decay
    for parameter in model.input_and_head('latent' if mode == 'l2t' else 'text'):
        parameter.requires_grad_(False)
if compile:
    # a program per stage and number of causal rows
    torch._dynamo.config.recompile_limit = 64 * len(run.stages)
    torch._dynamo.config.accumulated_recompile_limit = 256 * len(run.stages)
    for block in model.blocks:                           # all blocks are one program: compiled once
        block.compile(dynamic=False)

of_batches = (run.text, run.latent, streams, seed, cond_drop, t_min, predict_length)
if run.adaptive:
    from processes.adaptive import AdaptiveBatchMaker, AdaptiveLoss
    make_batch = AdaptiveBatchMaker(*of_batches, adaptive=run.adaptive)
    loss_fn = AdaptiveLoss(model, make_batch, autocast, latent_weight)
else:
    make_batch = BatchMaker(*of_batches, causal_weight)
    loss_fn = Loss(model, make_batch, autocast, latent_weight)
if is_sharded:
    distributed.shard(loss_fn, device, in_bfloat16=dtype == 'bfloat16')
if rank:                                                 # from here on only dropout draws from this
    torch.manual_seed(seed + rank)

# [(optimizer, base rate)]
groups = model.parameter_groups()
adamw_matrices = list(groups['embeddings_and_heads'])
if optimizer == 'adamw':
    adamw_matrices += groups['matrices']
adamw_groups = [dict(params=adamw_matrices, weight_decay=weight_decay),
                dict(params=groups['vectors'], weight_decay=0.0)]
adamw = torch.optim.AdamW(adamw_groups, lr=learning_rate, betas=betas, fused=True)
optimizers = [(adamw, learning_rate)]
if optimizer == 'muon':
    from runs.muon import Muon
    muon = Muon(groups['matrices'], learning_rate, weight_decay, config['muon_iterations'],
                getattr(torch, dtype))
    optimizers.append((muon, config['muon_lr'] or learning_rate))

# -----------------------------------------------------------------------------
# Resume, or begin

MAX_BAD_STEPS = 10
# spike_factor looks at the norms of 64 steps
state = State(model, optimizers, ema_decay, 64, device)
wandb_id = resume_or_begin(state, run, config)
if rank == 0:
    say_cost(model, run, config)

# -----------------------------------------------------------------------------
# Batches: a function of the seed and the step; whose rows they are depends on the rank

def stage_at(step):
    return [stage for stage in run.stages if stage.first <= step][-1]


def tokens_until(step):
    """ PAD among them. """
    ends = [*(stage.first for stage in run.stages[1:]), max_iters]
    tokens_of_a_row = 0
    for stage, end in zip(run.stages, ends):
        tokens_of_a_row += stage.seq_len * max(0, min(step, end) - stage.first)
    return run.global_batch * tokens_of_a_row


def rows_of(step, micro, rank):
    """ Number of the first row of this rank's micro-batch in the global batch, and the rows of the
    dataset. """
    first = (micro * world + rank) * micro_batch
    return first, row_order(len(train_data), seed, step * run.global_batch + first, micro_batch)


def micro_batches(step):
    while step < max_iters:
        for micro in range(grad_accum):
            first, rows = rows_of(step, micro, rank)
            yield make_batch(train_data, rows, step, first, run.global_batch, stage_at(step))
        step += 1


def lr_factor(step):
    """ What the base rates are multiplied by: linear warm-up, then cosine from 1 to min_lr. """
    warmup = min(warmup_iters, max_iters // 2)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, max_iters - warmup))
    return min_lr + (1 - min_lr) * 0.5 * (1 + math.cos(math.pi * done))

# -----------------------------------------------------------------------------
# Evaluate, save, log

def evaluate():
    """ {val_text the bound and val_causal, nats per real token; val_latent squared error per
    dimension} over eval_iters micro-batches of the validation split, which the ranks share. None
    where a signal came. """
    # each rank takes its share of the micro-batches
    model.eval()
    n = min(eval_iters, -(-len(val_data) // batch_size))
    sums = torch.zeros(5, dtype=torch.float64)
    for i in range(0, n, world):
        if all_reduce_max(signal_seen):
            return None
        part = loss_fn.validate(val_data, (i + rank) % n, batch_size, run.predict, run.modes)
        if i + rank < n:                               # else it ran for FSDP, which gathers for all
            sums += part

    # means over all of them
    nats, real, squared_error, rows, causal_nats = all_reduce_sum(sums).tolist()
    found = {}
    if 'text' in run.predict and run.modes & {'l2t', 'unconditional'}:
        found['val_text'] = nats / real
    if 'causal' in run.modes:
        found['val_causal'] = causal_nats / real
    if 'latent' in run.predict:
        found['val_latent'] = squared_error / rows
    return found


save_owed = False                                       # one was due while steps were being skipped


def save(is_best):
    """ Whether it could be saved. A full disk is a warning; the third time in a row, or at the end,
    it is exit code 5. What is not finite is not saved: exit code 3. """
    error = state.save(run, config, is_best)
    if isinstance(error, ValueError):
        report()
        advice = 'a smaller learning_rate'
        if not guard:
            advice = 'guard=True and a smaller learning_rate'
        distributed.stop_all(f'{error}; {newest_checkpoint()}: train with {advice}', code=3)
    if error and (state.failed_saves == 3 or state.step >= max_iters or stop_signal):
        distributed.stop_all(error, code=5)
    if error and rank == 0:
        print(f'warning: {error}; the run goes on and tries again', file=sys.stderr, flush=True)
    return not error


def newest_checkpoint():
    if not state.saved_at:
        return 'there is no checkpoint'
    return f'the newest checkpoint is step {state.saved_at}'


log = StepLog(out_dir, state.step, max_iters, log_interval, grad_accum, run.global_batch,
              len(train_data), device, rows_of, tokens_until, config, wandb_id)


def report():
    """ A line of the steps since the last one. Every rank must call. """
    more = {}
    if config['curriculum']:
        more['curriculum_stage'] = run.adaptive.stage_name(state.step - 1)
    last = max(0, state.step - 1)                          # a signal may come before the first step
    flops = flops_of_step(model, run, grad_accum, stage_at(last), world)
    log.report(state.step, learning_rate * lr_factor(last), state.skipped.item(), flops, more)


def check_streak():
    """ Ends the run when too many steps in a row were skipped. It reads the device, so it is called
    at log, save and evaluation steps only. """
    streak = int(state.streak.item())
    if streak >= MAX_BAD_STEPS:
        report()
        why = f'had no finite loss or gradient, or a spike beyond spike_factor={spike_factor:g}'
        distributed.stop_all(f'step {state.step}: {streak} steps in a row {why}; '
                             f'{newest_checkpoint()}', code=3)


def evaluate_and_save(at_end):
    """ Does both where they are due. False: a signal came during the evaluation. """
    global save_owed
    due_evaluation = at_end or state.step % eval_interval == 0
    due_evaluation = due_evaluation and not stop_signal and state.step > state.evaluated_at
    due_save = at_end or stop_signal or state.step % save_interval == 0
    due_save = due_save or save_owed and log.steps == 0
    due_save = due_save and state.step > state.saved_at
    if not due_evaluation and not due_save:
        return True

    # evaluate
    check_streak()
    began = time.perf_counter()
    is_best, best_before = False, state.best_val
    if due_evaluation:
        with state.averaged_weights(loss_fn):
            val = evaluate()
        model.train()
        if val is None:
            return False
        val_loss = val.get('val_text', 0) + val.get('val_causal', 0)
        val_loss += latent_weight * val.get('val_latent', 0)
        is_best = val_loss < state.best_val
        state.best_val = min(state.best_val, val_loss)
        state.evaluated_at = state.step
        if rank == 0:
            units = dict(val_text='nats per token', val_causal='nats per token',
                         val_latent='per dimension')
            found = [f'{name} {value:.4f} {units[name]}' for name, value in val.items()]
            line = f'step {state.step:>6,} | ' + ', '.join(found)
            print(line + (' | best' if is_best else ''), flush=True)
        seconds = round(time.perf_counter() - began, 2)
        log.write(step=state.step, **val, best=is_best, seconds=seconds)

    # save, but not while steps are being skipped, or the last good checkpoints would rotate away;
    # at the end all the same: a skip moved nothing
    if due_save or is_best:
        save_owed = state.streak.item() > 0 and not at_end and not stop_signal
        is_saved = not save_owed and save(is_best)
        if not is_saved:
            state.best_val = best_before                   # `best` names what is saved
    log.since += time.perf_counter() - began
    return True


def enter_stage():
    """ The stage of this step, and the module that computes its loss. A stage changes what its
    loss reaches, and DDP is told that when it is made. """
    stage = stage_at(state.step)
    if state.step == stage.first:
        state.history.fill_(math.nan)           # norms of another loss say nothing about this one's
    if len(run.stages) > 1 and rank == 0:
        print(f'step {state.step:>6,} | mode {stage.mode}, texts of {stage.seq_len} tokens',
              flush=True)

    # a loss on one stream leaves parameters of the other without a gradient
    has_unused = len(stage.predict) < len(streams)
    return stage, distributed.replicate(loss_fn, device, is_sharded, has_unused)


# -----------------------------------------------------------------------------
# The loop: evaluate, save and stop; micro-steps; guard; step; average; log

signal_seen = stop_signal = 0                              # this process's, and what all agreed on


def note_signal(number, frame):
    global signal_seen
    signal_seen = number


for name in ('SIGTERM', 'SIGUSR1', 'SIGINT'):
    if hasattr(signal, name):                              # Windows has no SIGUSR1
        signal.signal(getattr(signal, name), note_signal)

stage = net = None
model.train()
batches = prefetch(micro_batches(state.step), device)
start_step, start_time = state.step, time.perf_counter()
log.since = start_time
while True:
    # ---- evaluate, save and stop
    at_end = state.step >= max_iters
    stop_signal = all_reduce_max(signal_seen)
    if not evaluate_and_save(at_end):
        continue
    if stop_signal:
        report()
        break
    if at_end:
        break

    # ---- another stage: another mode or text length
    if stage is not stage_at(state.step):
        stage, net = enter_stage()

    # ---- micro-steps: forward and backward on every rank, no early exit
    log.begin_step()
    loss = 0
    for micro in range(grad_accum):
        with stop_on_error():                              # data that is found wrong only when read
            batch = next(batches)
        with distributed.gradient_sync(net, is_last=micro == grad_accum - 1):
            micro_loss, sums = net(batch, stage.predict)
            (micro_loss / grad_accum).backward()
        loss = loss + micro_loss.detach() / (grad_accum * world)
        log.add_micro_batch(micro, micro_loss.detach(), sums)

    # ---- guard: loss and norm are those of the global batch, the same bits on every rank
    loss = all_reduce_sum(loss)
    norm = torch.nn.utils.clip_grad_norm_(state.parameters, grad_clip or math.inf)
    norm = norm.full_tensor() if is_sharded else norm
    bad = torch.zeros((), device=device)
    if guard:
        # the median of a history that is not yet full is nan, so nothing is above it
        is_spike = torch.zeros_like(norm, dtype=torch.bool)
        if spike_factor:
            median = state.history.median()
            is_spike = (median > 0) & (norm > spike_factor * median)
        bad = (~torch.isfinite(norm) | ~torch.isfinite(loss) | is_spike).float()

    # ---- step: nothing moves where `bad` is 1
    for opt, rate in optimizers:
        for group in opt.param_groups:
            group['lr'] = rate * lr_factor(state.step)
        if isinstance(opt, torch.optim.AdamW):
            opt.found_inf = bad                      # the fused kernel then leaves everything alone
            opt.step()
        elif not bad.item():                               # Muon has no such switch: one sync
            opt.step()
        opt.zero_grad(set_to_none=True)
    state.skipped += bad
    state.streak = (state.streak + 1) * bad
    state.history = torch.where(bad > 0, state.history, torch.cat((state.history[1:], norm[None])))
    log.end_step(bad, loss, norm)
    state.step += 1

    # ---- average: ema += (1 - d) (weights - ema), after the step
    if state.ema is not None:
        with torch.no_grad():                              # with a graph it would grow for ever
            d = min(ema_decay, (1 + state.step) / (10 + state.step))
            weight = (1 - d) * (1 - bad)
            # one by one: older versions of torch have no _foreach_lerp_ by tensors for FSDP
            for average, parameter in zip(state.ema, state.parameters):
                average.lerp_(parameter, weight)

    # ---- log: a line speaks of one mode
    is_last = state.step == max_iters or stage_at(state.step) is not stage
    if state.step % log_interval == 0 or is_last:
        report()
        check_streak()
    else:
        log.estimate(state.step)

signal_name = signal.Signals(stop_signal).name if stop_signal else ''
log.finish(state, signal_name, start_step, time.perf_counter() - start_time)
distributed.leave()
