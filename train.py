"""
Train the two-clock model: text from an embedding (l2t), an embedding from text (t2l), both from
noise, or all at once.

    python train.py config/quickstart.py                          # one process, CPU or GPU
    python train.py config/quickstart.py --max_iters=100          # any knob below, by name
    python train.py config/quickstart.py config/stable.py --out_dir=out/s   # an overlay
    python train.py config/quickstart.py --preflight_only=true    # is everything in place?
    torchrun --standalone --nproc_per_node=8 train.py config/l2t.py  # docs/cluster.md

Reads data/<dataset> (prepare.py). Writes out_dir: config.json, data/, training_log.jsonl, and
step-N/ with the checkpoints. Run again with the same out_dir, it goes on from the newest whole
checkpoint as if it had never stopped: bit for bit with one or two processes on a CPU, else to
rounding, also on another number of processes. Row order, masks, clocks and noise are functions of
(seed, step): nothing is replayed.

Exit codes: 0 done, 1 a bug, 2 bad config, data, device or checkpoint, 3 diverged, 4 no room on the
disk, or the processes do not meet or lose each other, 5 cannot save. A signal ends the run once it
has saved: with 0 after USR1, which asks a job to make room, and with 128 and its number after the
others, as 130 after Ctrl-C and 143 after TERM.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))   # PYTHONSAFEPATH=1 leaves it out
if __name__ == '__main__':
    import base.begin                                      # before torch

import faulthandler
import math
import signal
import time

import torch

import processes
from base import distributed
from base.console import stop_on_error
from base.distributed import all_reduce_max, all_reduce_sum, print0
from base.machine import keep_freed_memory, pick_device, pick_dtype
from configurator import configure, show_knobs
from data import Loader
from diffusion import GaussianLatents, Loss, MaskedText, Noising, modes_of
from model import Model
from runs import preflight, run_folder
from runs.log import StepLog
from runs.resume import State, resume_or_begin
from runs.stages import lr_factor, read_stages

# A comment that opens with a range or with choices is a rule: the configurator reads it from this
# file and refuses other values.

# ---- data and run
dataset = 'quickstart'         # <a folder under data/, or a path to one>
out_dir = 'out/run'            # <a folder>: of this run, which goes on from its newest checkpoint
seed = 0                       # [0, 1e18]
# ---- what is learned
mode = 'l2t'                   # <l2t, t2l, unconditional, causal, complete; or several, as
                               # l2t+3*causal>; each row draws one of them. complete goes with t2l:
                               # a part of a picture is given, too. A schedule: t2l:40%,l2t trains
                               # t2l for the first 40 % of the steps, then l2t
causal_weight = 1.0            # [0, 1e6]: weight of the loss of causal rows; other rows have 1
cond_drop = 0.1                # [0, 1]: share of conditional rows whose condition is noise
latent_weight = 1.0            # [0, 1e6]: weight of the latent loss; the text loss has 1
init_from = ''                 # a run folder: begin with its best weights, at step 0
# ---- model; what else the modes need is chosen by runs/preflight.py
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
global_batch = None            # None | int [1, 1e9]: rows per step, over all processes, each in
                               # as many micro-steps as that takes; None: batch_size x processes
max_iters = 10_000             # [1, 1e9]
optimizer = 'adamw'            # adamw | muon; muon: for the blocks' matrices, AdamW for the rest
learning_rate = 1e-3           # (0, 10]
warmup_iters = 100             # [0, 1e9]: at most half the run
weight_decay = 0.1             # [0, 10]: on matrices, embeddings among them, but not the bag
grad_clip = 1.0                # [0, 1e9]: largest norm of the gradient; 0: not clipped
ema_decay = 0.999              # [0, 1): warmed up, min(ema_decay, (1 + n) / (10 + n)); 0: none
# ---- machine
device = 'auto'                # auto | cpu | cuda | mps | <cuda:1 or the like>
dtype = 'auto'                 # auto | bfloat16 | float32; bfloat16: autocast, weights and moments
                               # stay float32; auto: bfloat16 where the device multiplies in it
compile = False                # compile the blocks, on a card the loss of masked text too: a minute
parallel = 'ddp'               # ddp | fsdp; fsdp: FSDP2, parameters and moments are shared out
# ---- logs and checkpoints
keep = 2                       # [1, 1e6]: how many of the newest checkpoints stay, besides the best
eval_interval = 500            # [1, 1e9]: evaluate, and save
eval_rows = 1024               # [1, 1e9]: how many rows of the validation split are evaluated
log_interval = 50              # [1, 1e4]
wandb_project = ''             # log there (pip install wandb); WANDB_RUN_ID: the run to go on with

# ---- ADVANCED: what most runs leave alone
preflight_only = False         # look whether everything is in place, and stop
length_schedule = ''           # '24:80%,all': texts are cut to 24 tokens for 80 % of the steps; or
                               # '24:1200,all'. A text that is cut has no latent loss
predict_length = True          # False: EOS and PAD are given, not learned; texts longer than
                               # seq_len are cropped at random (proteins)
seq_len = None                 # None | int [1, 65536]: L; None: the dataset's max_tokens + 1
spatial = False                # the latents are a square grid
text_schedule = 'loglinear'    # loglinear | cosine
text_loss_weight = 'bound'     # bound | uniform | rdm | dynamic | clip; bound: w(t); uniform: 1,
                               # as in flow matching; rdm: 1 - t; dynamic and clip: gidd only
latent_schedule = 'vp'         # vp | rf
latent_target = None           # None | v | x0 | rest | flow | eps; None: x0 where one vector is
                               # predicted from text, else v
t_min = 1e-3                   # (0, 1): clocks are drawn from (t_min, 1)
text_process = 'masked'        # masked | gidd | hdlm | atat
min_lr = 0.0                   # [0, 1]: at the end, as a share of learning_rate
betas = (0.9, 0.95)            # [0, 1)
guard = 10.0                   # [0, 1e9]; skip a step whose loss or gradient is not finite, or
                               # whose gradient norm is so many times the median of the last 64;
                               # ten skips in a row end the run, exit code 3; 0: skip none
dist_timeout = 600.0           # [1, 1e7]: seconds after which a silent process ends the run

# ---- read where text_process=gidd
gidd_uniform = 0.1             # [0, 1): share of tokens that are random ones at t = 1/2
gidd_gamma = 1.0               # [0.1, 10]: above 1, noise comes earlier and later
# ---- read where text_process=hdlm
hdlm_gamma = 1.0               # [0.1, 10]: how much faster tokens become clusters than
                               # clusters become MASK
hdlm_xi = 1.0                  # (0, 1]: probability of a token's own cluster
clusters = 64                  # [1, 65536]: how many
clusters_from = ''             # a run folder: by its token embedding; '': by co-occurrence counts
                               # of the training texts. A resumed run, and init_from, keep their
                               # clusters
# ---- read where text_process=atat
importance = 'freq'            # freq | learned | hybrid: what masking and curriculum go by
masking = 'time_only'          # time_only | proportional | inverse | balanced; proportional: the
                               # important are masked first
beta = 0.5                     # [0, 100]; rates are exp(-beta) to exp(beta) times the common one,
                               # within 1/2 and 2
curriculum = False             # easy, medium, then hard tokens weigh more
curriculum_stages = (0.3333, 0.6666)   # (0, 1): shares of training at which medium and hard begin
curriculum_focus = 2.0         # [1, 1e3]: how much more they weigh
# ---- read where optimizer=muon
muon_lr = None                 # None | (0, 10]: of the blocks' matrices, in AdamW's scale; None:
                               # learning_rate
muon_iterations = 0            # [0, 5]: of Newton-Schulz; 0: the five of torch.optim.Muon; else so
                               # many of Polar Express (docs/speedrun.md)

rank, world = distributed.rank(), distributed.world()
config = configure(globals(), show=False)
MAX_BAD_STEPS, N_NORMS = 10, 64                            # of the guard

# -----------------------------------------------------------------------------
# What a run is made of. What can be wrong with knobs, data and machine is found here

with stop_on_error():
    train_data, val_data = preflight.open_data(config)
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    # by the mode it decides what is no knob: shift, bag, shortcut; and latent_target, where that is
    # None
    model_config = preflight.network(config, train_data)
    text_process = processes.text_process(config, model_config.vocab_size, train_data)
    live = train_data.live.to(device) if train_data.latent_shape else None
    latent_process = GaussianLatents(live, latent_schedule, config['latent_target'])
    micro_batch, grad_accum = preflight.share_rows(batch_size, global_batch)
    rows_a_step = micro_batch * grad_accum * world
    stages = read_stages(mode, length_schedule, streams, max_iters, train_data.seq_len)
    with torch.device('meta'):
        sketch = Model(model_config)                         # shapes alone, which take no memory
    for stage in stages:
        stage.flops = grad_accum * world * preflight.flops_of(sketch, micro_batch, stage,
                                                              text_process)
    show_knobs(config)
    preflight.print_findings(config, sketch, train_data, val_data, stages, micro_batch,
                             grad_accum)
with stop_on_error(code=4):
    preflight.check_machine(config, device, dtype, sketch)
if preflight_only:
    distributed.leave()
    raise SystemExit(0)

config['dtype'] = dtype
config['global_batch'] = rows_a_step
modes = modes_of(mode)
predict = {stream for stage in stages for stream in stage.predict}
is_sharded = parallel == 'fsdp' and world > 1
device_type = torch.device(device).type
torch.manual_seed(seed)
if device_type == 'cuda':
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision('high')
else:
    keep_freed_memory()

# -----------------------------------------------------------------------------
# Model, loss, optimizers, and the state: resumed, or begun

model = Model(model_config).to(device)
if compile:
    # torch compiles a program for each stage and each number of causal rows, which are more than
    # its limits allow by default
    torch._dynamo.config.recompile_limit = 64 * len(stages)
    torch._dynamo.config.accumulated_recompile_limit = 256 * len(stages)
    for block in model.blocks:                           # all blocks are one program: compiled once
        block.compile(dynamic=False)
    if device_type == 'cuda' and isinstance(text_process, MaskedText):
        text_process.loss = torch.compile(text_process.loss, dynamic=True)

noising = Noising(text_process, latent_process, streams, seed, cond_drop, t_min, predict_length,
                  causal_weight)
loss_fn = Loss(model, noising, dtype, latent_weight)
if is_sharded:
    distributed.shard(loss_fn, device, in_bfloat16=dtype == 'bfloat16')
if rank:                                     # from here on only dropout uses torch's generator
    torch.manual_seed(seed + rank)

with stop_on_error():
    groups = model.parameter_groups()
adamw_matrices = list(groups['embeddings_and_heads'])
if optimizer == 'adamw':
    adamw_matrices += groups['matrices']
adamw_groups = [dict(params=adamw_matrices, weight_decay=weight_decay),
                dict(params=groups['vectors'], weight_decay=0.0)]
adamw = torch.optim.AdamW(adamw_groups, lr=learning_rate, betas=betas, fused=True)
optimizers, rates = [adamw], [learning_rate]             # and the base rate of each
if optimizer == 'muon':
    from runs.muon import Muon
    muon = Muon(groups['matrices'], learning_rate, weight_decay, muon_iterations,
                getattr(torch, dtype))
    optimizers, rates = [adamw, muon], [learning_rate, muon_lr or learning_rate]

state = State(loss_fn, optimizers, ema_decay, N_NORMS, device)
resume_or_begin(state, train_data, text_process, config)
# the table of this dataset, also where init_from gave the weights
if model.importance:
    model.importance.rarity.copy_(text_process.adaptive.rarity)

# -----------------------------------------------------------------------------
# Evaluate, save, log; a stage

def evaluate():
    """ Measures the averaged weights on eval_rows rows of the validation split. Returns True if
    they are the best so far; False if not, if this step was evaluated already, or if a signal came.
    Logs val_text (the bound) and val_causal (exact), in nats per real token, and val_latent, the
    squared error per dimension. """
    if state.step == state.evaluated_at:
        return False

    # each rank takes its share of the batches
    began = time.perf_counter()
    n_rows = min(eval_rows, len(val_data))
    n_batches = -(-n_rows // batch_size)
    sums = torch.zeros(5, dtype=torch.float64)
    model.eval()
    with state.averaged_weights(), stop_on_error():        # data that is found wrong only when read
        for i in range(rank, rank + n_batches, world):
            if all_reduce_max(run_folder.signal_seen):
                return False
            # FSDP gathers the weights in every call, so all ranks make equally many. A rank
            # without a batch of its own reads one past the end, of which no row counts
            sums += loss_fn.validate(val_data, i * batch_size, batch_size, n_rows, predict, modes)
    model.train()

    # means over all of them
    nats, real, squared_error, rows, causal_nats = all_reduce_sum(sums).tolist()
    val = {}
    if 'text' in predict and modes & {'l2t', 'unconditional'}:
        val['val_text'] = nats / real
    if 'causal' in modes:
        val['val_causal'] = causal_nats / real
    if 'latent' in predict:
        val['val_latent'] = squared_error / rows
    # the loss of a uniform guess: ln V for each position that is scored. In a masked text PAD is
    # scored as well, but the loss is given per real token
    ln_V = math.log(model_config.vocab_size)
    n_scored = rows * train_data.seq_len if predict_length else real
    guess = dict(val_text=ln_V * n_scored / real, val_causal=ln_V, val_latent=math.inf)
    weights = dict(val_text=1, val_causal=1, val_latent=latent_weight)
    val_loss = sum(weights[name] * value for name, value in val.items())
    is_best = val_loss < state.best_val
    state.best_val = min(state.best_val, val_loss)
    state.evaluated_at = state.step
    log.log_evaluation(state.step, val, guess, is_best, time.perf_counter() - began)
    return is_best


def save(is_best):
    """ Saves this step, and returns whether it is saved. A full disk is a warning; the third time
    in a row, at the end, or after a signal it ends the run with exit code 5. Weights that are not
    finite are not saved, and end it with exit code 3. """
    distributed.rank0_or_stop(2, run_folder.check)
    if state.step == state.saved_at and not is_best:
        return True
    distributed.rank0_or_stop(2, train_data.check_files, digest=False)
    error = state.save(config, is_best)
    if isinstance(error, ValueError):
        log_steps()
        distributed.stop_all(f'{error}; {newest_checkpoint()}: train with guard=10, or a smaller '
                             'learning_rate', code=3)
    if error and (state.failed_saves == 3 or state.step >= max_iters or stop_signal):
        distributed.stop_all(error, code=5)
    if error:
        print0(f'warning: {error}; the run goes on and tries again', file=sys.stderr)
    return not error


def newest_checkpoint():
    return f'the newest checkpoint is step {state.saved_at}' if state.saved_at else 'none is saved'


def log_steps():
    """ A line of the steps since the last one, which are of one stage. Every rank must call. """
    if not log.steps:
        return
    step = state.step
    tokens_a_row = 0                                       # in all steps so far
    for s in stages:
        n_steps = min(step, s.end) - s.first
        tokens_a_row += s.seq_len * max(0, n_steps)
    more = dict(
        epoch=step * rows_a_step / len(train_data),
        tokens=rows_a_step * tokens_a_row,
        lr=learning_rate * lr_factor(config, step - 1),
        skipped=int(state.skipped.item()))
    more |= text_process.logged(step - 1)
    log.log_steps(step, rows_a_step * stage.seq_len, stage.flops, **more)


def check_streak():
    """ The number of steps in a row that were skipped; too many end the run. It reads the device,
    so it is called at log, save and evaluation steps only. """
    streak = int(state.streak.item())
    if streak >= MAX_BAD_STEPS:
        log_steps()
        distributed.stop_all(f'step {state.step}: {streak} steps in a row had no finite loss or '
                             f'gradient, or a gradient norm beyond guard={guard:g} times the '
                             f'median; {newest_checkpoint()}', code=3)
    return streak


def batches_from(step):
    """ The noisy batches of all steps from this one on. An error in the data, which may be found
    only when it is read, is one line. """
    with stop_on_error():
        yield from loader.batches(noising, stages, step, device)


def enter_stage():
    """ The stage of this step, and the module that computes its loss. DDP must know
    which parameters get a gradient, so each stage wraps the loss anew. """
    stage = next(stage for stage in stages if state.step < stage.end)
    if state.step == stage.first:
        state.history.fill_(math.nan)           # norms of another loss say nothing about this one's
    if len(stages) > 1:
        print0(f'step {state.step:>6,} | mode {stage.mode}, texts of {stage.seq_len} tokens')
    if world == 1 or is_sharded:
        return stage, loss_fn

    # a loss on one stream leaves parameters of the other without a gradient; and where no part is
    # given, nothing is marked
    has_unused = len(stage.predict) < len(streams)
    has_unused = has_unused or model_config.parts and not stage.shares['complete']
    return stage, distributed.replicate(loss_fn, has_unused)


# -----------------------------------------------------------------------------
# The loop: evaluate, save and stop; micro-steps; guard; step; average; log

run_folder.note_signals()
faulthandler.enable(sys.__stderr__ or sys.__stdout__)      # SIGBUS: data that were cut off
stop_signal = 0                                            # what all processes have agreed on
first_step = state.step
loader = Loader(train_data, seed, micro_batch, grad_accum, rank, world)
log = StepLog(out_dir, device, max_iters, loader.row_numbers, config)
batches = batches_from(state.step)
stage = net = None
model.train()
while True:
    # ---- evaluate, save and stop. Step 0 comes here, too: it counts as evaluated and saved, so
    # both calls return at once
    at_end = state.step >= max_iters
    stop_signal = all_reduce_max(run_folder.signal_seen)
    if at_end or stop_signal or state.step % eval_interval == 0:
        began = time.perf_counter()
        streak = check_streak()
        best_before = state.best_val
        is_best = not stop_signal and evaluate()
        stop_signal = all_reduce_max(run_folder.signal_seen)  # one may have come meanwhile
        # not while steps are skipped: good checkpoints would be pushed out; at the end, yes
        is_saved = (not streak or at_end or stop_signal) and save(is_best)
        if not is_saved:
            state.best_val = best_before                   # `best` names what is saved
        log.since += time.perf_counter() - began
    if at_end or stop_signal:
        break

    # ---- another stage: another mode or text length
    if net is None or state.step == stage.end:
        stage, net = enter_stage()

    # ---- micro-steps: forward and backward on every rank, no early exit
    loss = torch.zeros((), device=device)
    for micro in range(grad_accum):
        batch = next(batches)
        if world > 1:
            distributed.sync_gradients(net, is_last=micro == grad_accum - 1)
        losses = net(batch, stage.predict)
        (losses.loss / grad_accum).backward()
        loss += losses.loss.detach()
        log.add(batch, losses)

    # ---- guard: loss and norm are those of the global batch, the same bits on every rank
    loss = all_reduce_sum(loss / (grad_accum * world))
    norm = torch.nn.utils.clip_grad_norm_(state.parameters, grad_clip or math.inf)
    norm = norm.full_tensor() if is_sharded else norm
    bad = torch.zeros((), device=device)
    if guard:
        # the median is nan until 64 norms are known, and 0 if most steps have no gradient
        median = state.history.median()
        is_spike = (median > 0) & (norm > guard * median)
        bad = (~torch.isfinite(norm) | ~torch.isfinite(loss) | is_spike).float()

    # ---- step: nothing moves where `bad` is 1
    factor = lr_factor(config, state.step)
    for opt, rate in zip(optimizers, rates):
        for group in opt.param_groups:
            group['lr'] = rate * factor
        # where found_inf is 1, the optimizer moves nothing: fused AdamW and our Muon know it. It is
        # read on the device, so the host does not wait
        opt.found_inf = bad
        opt.step()
        opt.zero_grad(set_to_none=True)
    state.skipped += bad
    state.streak = (state.streak + 1) * bad
    one_later = torch.cat((state.history[1:], norm[None]))
    state.history = torch.where(bad > 0, state.history, one_later)
    state.step += 1

    # ---- average: ema += (1 - d) (weights - ema), after the step
    if state.ema is not None:
        with torch.no_grad():                              # else autograd's graph would grow
            d = min(ema_decay, (1 + state.step) / (10 + state.step))
            weight = (1 - d) * (1 - bad)
            ahead = torch._foreach_sub(state.parameters, state.ema)
            torch._foreach_mul_(ahead, weight)
            torch._foreach_add_(state.ema, ahead)

    # ---- log: no line spans two stages
    log.end_step(bad, loss, norm)
    if state.step % log_interval == 0 or state.step == stage.end:
        log_steps()
        check_streak()

# ---- the last words
log_steps()
signal_name = signal.Signals(stop_signal).name if stop_signal else ''
if stop_signal:
    distributed.rank0_or_stop(5, run_folder.note_preemption, out_dir, state.saved_at, signal_name)
log.last_lines(state, signal_name, train_data.meta)
if log.n_steps and not stop_signal:
    run_folder.forget_signals()                            # all is saved, and this may take long
    error = distributed.first_error(preflight.check_digests, train_data, val_data)
    if error:
        distributed.stop_all(f'{error}. It was whole at step {first_step}: every checkpoint after '
                             'that may have learned from other data, so mend the dataset, and '
                             'train again from there', code=2)

# as a shell has it, so that `make` and `&&` stop; USR1 is a scheduler's, and its job has succeeded
exit_code = 0 if stop_signal in (0, signal.SIGUSR1) else 128 + stop_signal
distributed.leave(exit_code)
if exit_code:
    raise SystemExit(exit_code)
