"""
Train the two-clock model: text from an embedding (l2t), an embedding from text (t2l), both from noise, or all at once.

    python train.py config/quickstart.py                            # one process, CPU or GPU
    python train.py config/quickstart.py --max_iters=100            # any knob below, by name
    python train.py config/quickstart.py config/mixed.py --out_dir=out/mixed        # overlays: mixed, t2l, ar, ... (README)
    python train.py config/quickstart.py --preflight_only=true      # look whether everything is in place, and stop
    torchrun --standalone --nproc_per_node=8 train.py config/l2t.py # one node; several nodes and SLURM: README

Reads data/<dataset> (prepare.py), writes out_dir: config.json, data/, training_log.jsonl, step-N/ with the checkpoints.
Run again with the same out_dir, it goes on from the newest whole checkpoint as if it had never stopped: bit for bit with one or
two processes on a CPU, else to rounding, also on another number of processes. Row order, masks, clocks and noise are functions of
(seed, step), nothing is replayed.
Exit codes: 0 done or preempted, 2 bad config, data or checkpoint, 3 diverged, 4 preflight or rendezvous, 5 cannot save.
"""
if __name__ != '__main__':                                 # an import would start a training
    raise ImportError('train.py is a script: run `python train.py ...`; other modules hold what can be imported')

import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec

# before torch reads it: threads that wait sleep, where spinning would take the core of whom they wait for
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import numpy as np
import torch

import checkpoint
import distributed
from adaptive import STAGES, Adaptive, rarity
from baselines import cluster_table, clusters_in_words, text_process as make_text
from configurator import configure, read_knobs, stop, stop_on_error
from data import MAX_META, PackedDataset, dataset_folder, dataset_identity, how_to_prepare, prefetch, row_order, split_digests
from diffusion import MODES, GaussianLatents
from distributed import add, agree, rank, stop_all, world
from model import Model, ModelConfig
from objective import Objective, read_stages

# ---- data and run
dataset = 'quickstart'             # <a folder under data/, or a path to one>
out_dir = 'out/run'                # <a folder>: of this run
resume = 'auto'                    # auto | never; auto: go on from out_dir's newest whole checkpoint; never: refuse a non-empty out_dir
seed = 0                           # [0, 2**63)
# ---- what is learned
mode = 'l2t'                       # l2t | t2l | unconditional | mixed
mode_weights = (1.0, 1.0, 1.0)     # [0, 1e6]; mixed: shares of unconditional, l2t, t2l
mode_schedule = ''                 # or modes in turn: 't2l:2000,l2t:3000,mixed' is 2,000 steps of t2l, 3,000 of l2t, then mixed
length_schedule = ''               # '24:1200,40': texts are cut to 24 tokens for 1,200 steps, then to 40; '': whole; compile: anew for each
predict_length = True              # False: EOS and PAD are given, not learned; texts longer than seq_len are cropped at random
cond_drop = 0.1                    # [0, 1]: share of l2t and t2l rows whose condition is noise at clock 1
latent_noise = 0.0                 # [0, 1]: l2t reads latents at a clock from U(0, latent_noise)
latent_weight = 1.0                # [0, 1e6]: of the latent loss (per dimension) beside the text loss (nats per token)
init_from = ''                     # a run folder: begin with its best weights, at step 0
freeze = 'unused'                  # none | unused | modality; unused: what no loss of the mode can reach; modality: in l2t the latent
                                   # encoder and head too, in t2l the text ones, to fine-tune what init_from names
# ---- importance of tokens, math in adaptive.py
importance = 'none'                # none | freq | learned | hybrid: what masking, curriculum and sample.py's by_importance go by
masking = 'time_only'              # time_only | proportional | inverse | balanced: proportional masks the important first
beta = 0.5                         # [0, 100]; tokens are masked at exp(-beta) to exp(beta) times the common rate, within 1/2 and 2
curriculum = False                 # easy, medium, then hard tokens weigh more
curriculum_stages = (0.3333, 0.6666)   # (0, 1): shares of training at which medium and hard begin
curriculum_focus = 2.0             # [1, 1e3]: how much more they weigh
# ---- the two processes, math in diffusion.py and baselines.py; sampling reads the same
text_process = 'masked'            # masked | gidd | hdlm; or causal=True below: autoregressive
text_schedule = 'loglinear'        # loglinear | cosine | polynomial | ddpm
text_power = 2.0                   # [0.01, 100]; polynomial: 1 - a(t) = t^power
text_loss_weight = 'bound'         # bound | uniform | rdm | dynamic | clip: what is masked at t weighs w(t), 1 (flow matching), or 1 - t;
                                   # gidd has bound, dynamic, clip
gidd_uniform = 0.1                 # [0, 1); gidd: share of tokens that are others by lot at t = 1/2
gidd_gamma = 1.0                   # [0.1, 10]; gidd: noise comes earlier and later (> 1), or in between
hdlm_gamma = 1.0                   # [0.1, 10]; hdlm: tokens become clusters so much faster than clusters MASK
hdlm_xi = 1.0                      # (0, 1]; hdlm: probability of the own cluster
clusters = 64                      # [1, 65536]; hdlm: how many
clusters_from = ''                 # hdlm: a run folder (its token embedding), or an .npy file of V rows, or of V cluster ids; '': by the
                                   # company that tokens keep in the training texts; with init_from, and on going on, they stay as they were
latent_schedule = 'vp'             # vp | rf
latent_target = 'v'                # v | x0 | flow | eps
latent_loss_weight = 'none'        # none | snr | min_snr
t_min = 1e-3                       # (0, 1): clocks are drawn from (t_min, 1)
# ---- model
streams = ('text', 'latent')       # text | latent
seq_len = None                     # None | int [1, 65536]: L; None: the dataset's max_tokens + 1
latent_tokens = 8                  # [1, 1024]: tokens per latent vector
depth = 8                          # [1, 256]
heads = 4                          # [1, 256]
width = 256                        # [1, 16384]
latent_width = None                # None | int [1, 16384]; None: width
mlp_ratio = 4.0                    # (0, 64]
causal = False                     # autoregressive: text sees what is before it, and latents; modes l2t, or streams=text
bag = False                        # for modes that predict latents: the prediction adds a learned, weighted average over the tokens
shortcut = False                   # for modes that predict text: every token adds a learned linear map of the latents
text_clock = True                  # False: the text clock is left out, costs no likelihood
spatial = False                    # the latents are a square grid
dropout = 0.0                      # [0, 1)
# ---- optimisation
batch_size = 64                    # [1, 65536]: rows per process and micro-step
grad_accum = 1                     # [1, 65536]: micro-steps per step
max_iters = 10_000                 # [1, 1e9]
optimizer = 'adamw'                # adamw | muon; muon: torch.optim.Muon for the trunk's matrices, AdamW for the rest
learning_rate = 1e-3               # (0, 10]
muon_lr = None                     # None | (0, 10]: of the trunk's matrices under muon, in AdamW's scale; None: learning_rate
min_lr = 0.0                       # [0, 1]: share of learning_rate at the end
warmup_iters = 100                 # [0, 1e9]: at most half the run
decay_from = 0.0                   # [0, 1]: share of the run after which the cosine decay begins
weight_decay = 0.1                 # [0, 10]: on matrices only
betas = (0.9, 0.95)                # [0, 1)
grad_clip = 1.0                    # [0, 1e9]: largest norm of the gradient; 0: not clipped
ema_decay = 0.999                  # [0, 1): warmed up as min(ema_decay, (1 + n) / (10 + n)); 0: no average
# ---- machine
device = 'auto'                    # auto | cpu | cuda | <cuda:1 or the like>
dtype = 'bfloat16'                 # bfloat16 | float32; bfloat16: autocast, weights and optimizer stay float32 (float16 would need loss
                                   # scaling)
compile = False                    # torch.compile every block: a minute or more at the first start, then faster steps (LOG.md)
parallel = 'ddp'                   # ddp | fsdp; over several processes; fsdp: FSDP2, parameters and moments shared out
dist_timeout = 600.0               # [1, 1e7]: seconds after which a process that does not answer ends the run
master_timeout = 6.0               # [0.1, 1e7]: seconds in which rank 0 must be found at the start
preflight_only = False
# ---- guard, logs, checkpoints
guard = True                       # skip a step whose loss or gradient is not finite, or spikes: nothing moves
spike_factor = 10.0                # [0, 1e9]; a spike: a gradient norm so many times the median of the last 64; 0: none is
max_bad_steps = 10                 # [1, 1e9]: so many skips in a row end the run, exit code 3
keep = 2                           # [1, 1e6]: the newest checkpoints, kept beside the best; 1: if the newest is broken,
                                   # only the best is left
save_interval = 1000               # [1, 1e9]
eval_interval = 500                # [1, 1e9]
eval_iters = 16                    # [1, 1e6]: micro-batches of the validation split
log_interval = 50                  # [1, 1e6]
wandb_project = ''                 # log there too: pip install wandb; a resumed run goes on in the same wandb run

config = configure(globals())

# ---- derived values, and everything a user can get wrong, before anything is built
if parallel == 'fsdp' and optimizer == 'muon':
    stop('parallel=fsdp shares matrices out, and muon needs them whole: use optimizer=adamw, or parallel=ddp')
if wandb_project and not find_spec('wandb'):
    stop('wandb_project is set, and wandb is not installed: pip install wandb')
if resume == 'never' and os.path.isdir(out_dir) and set(os.listdir(out_dir)) - {'lock'}:
    stop(f'{out_dir} is not empty and resume=never: choose another --out_dir')


def stage_at(step):
    return [stage for stage in stages if stage.first <= step][-1]


def tokens_until(step):
    """ PAD among them. """
    ends = [*(stage.first for stage in stages[1:]), max_iters]
    return global_batch * sum(stage.seq_len * max(0, min(step, end) - stage.first) for stage, end in zip(stages, ends))


def in_units(n, unit):
    """ '850 kB', '1.25 MB', '32.1 TFLOP': three digits, with the prefix that fits. """
    for prefix, size in (('E', 1e18), ('P', 1e15), ('T', 1e12), ('G', 1e9), ('M', 1e6), ('k', 1e3)):
        if n >= size:
            digits = 2 if n < 10 * size else 1 if n < 100 * size else 0
            return f'{n / size:.{digits}f} {prefix}{unit}'
    return f'{n:.0f} {unit}'


def describe_padding():
    """ A sentence if most of a batch is PAD: the network computes it all the same. """
    seq_len, lengths = max(stage.seq_len for stage in stages), train_data.lengths()
    share = 1 - np.minimum(lengths + 1, seq_len).mean() / seq_len        # a text and its EOS
    if share > 0.5:
        longest = max(lengths.max(), val_data.lengths().max())
        shorter = f'--seq_len={longest + 1} holds the longest, or ' if longest + 1 < seq_len else ''
        return (f'{100 * share:.0f} % of a batch is PAD: texts have {lengths.mean():.1f} tokens on average, '
                f'seq_len is {seq_len}; {shorter}prepare with a smaller --max_tokens, which cuts the long ones')


def in_words(seconds):
    """ '183 ms', '4.0 s', '12.5 min' or '11.1 h'. """
    if seconds < 1:
        return f'{1000 * seconds:.0f} ms'
    if seconds < 100:
        return f'{seconds:.1f} s'
    return f'{seconds / 60:.1f} min' if seconds < 6000 else f'{seconds / 3600:.1f} h'


# ---- preflight: all that can be wrong, before anything is built
def tick(what, finding):
    if rank == 0:
        print(f'✓ {what:<10} {finding}', flush=True)


folder = dataset_folder(dataset)
configs = [arg for arg in sys.argv[1:] if arg.endswith('.py')]
if not os.path.exists(os.path.join(folder, 'meta.json')):
    stop(f'no dataset in {folder} (no meta.json): {how_to_prepare(folder, configs)}')
with stop_on_error():
    if device == 'auto' and torch.cuda.is_available() or device == 'cuda':
        if 0 < torch.cuda.device_count() <= distributed.local_rank:
            stop(f'rank {rank}: cuda:{distributed.local_rank} is asked for, this machine has {torch.cuda.device_count()}; '
                 'fewer --nproc_per_node', code=4)
        if torch.cuda.device_count():                      # none: pick_device says so
            device = f'cuda:{distributed.local_rank}'      # one GPU per process
    device = checkpoint.pick_device(device)
    train_data = PackedDataset(folder, 'train', seq_len, crop=not predict_length)
    val_data = PackedDataset(folder, 'val', train_data.seq_len, crop=not predict_length)
    if not predict_length and text_clock and 'text' in streams:
        raise ValueError('predict_length=False goes with text_clock=False: how much is masked would be told of another length')
    if (train_data.cropped or val_data.cropped) and 'latent' in streams:
        raise ValueError(f'seq_len={seq_len} crops texts of {folder}, whose latents are of whole ones: use seq_len=None, or --streams=text')
    if train_data.latent_shape is None and 'latent' in streams:
        raise ValueError(f"{folder} has no latents: prepare it with --encoder=..., or train with --streams=text, --mode=unconditional")
    L, (N, D) = train_data.seq_len, train_data.latent_shape or (0, 0)
    model_config = ModelConfig(
        vocab_size=train_data.tokenizer.vocab_size, seq_len=L, latent_dim=D, n_latents=N,
        **{name: config[name] for name in ('latent_tokens', 'depth', 'heads', 'width', 'latent_width', 'mlp_ratio', 'causal', 'streams',
                                           'bag', 'shortcut', 'text_clock', 'spatial', 'dropout', 'importance')},
        clusters=clusters if text_process == 'hdlm' else 0)
    text = make_text(config, model_config.vocab_size, torch.arange(model_config.vocab_size) % max(1, clusters),
                     train_data.lengths() if causal else None)
    if text_process != 'masked' and 'text' not in streams:
        raise ValueError(f'text_process={text_process}, but streams={streams} has no text')
    latent = GaussianLatents(train_data.live.to(device) if N else None, latent_schedule, latent_target, latent_loss_weight)
    if importance == 'none' and (masking != 'time_only' or curriculum):
        raise ValueError(f'masking={masking}, curriculum={curriculum}: choose an --importance= for them')
    adaptive, pad = None, train_data.tokenizer.pad
    if importance != 'none':
        adaptive = Adaptive(masking, beta, curriculum, curriculum_stages, curriculum_focus, max_iters, pad,
                            rarity(train_data.counts(), pad), learns=importance != 'freq')
    if (causal or text_process != 'masked') and importance != 'none':
        raise ValueError(f'importance={importance} is of masked text: not with causal={causal}, text_process={text_process}')
    if causal and (text_clock or not predict_length):
        raise ValueError('causal=True reads no clock and learns where a text ends: use text_clock=False, predict_length=True')
    more = adaptive.share(text, t_min) if adaptive else 1
    stages = read_stages(mode_schedule or mode, length_schedule, mode_weights, streams, freeze, max_iters, L,
                         head_budget=lambda share, length: text.head_budget(batch_size, length, share * more, t_min))
    if causal and any('latent' in stage.predict for stage in stages):
        raise ValueError('causal=True predicts no latents: use mode=l2t, or streams=text with mode=unconditional')
    if N and not train_data.live.any() and any('latent' in stage.predict for stage in stages):
        raise ValueError(f'{folder}: no dimension of its latents varies, so mode={mode_schedule or mode} '
                         'has no latents to learn: prepare it with another --encoder or --latents_from, '
                         'or train with --mode=l2t')
    with torch.device('meta'):                             # without memory
        sketch = Model(model_config)
    checkpoint.check_tables(sketch)
    n_parameters = sketch.n_parameters()
    for stage in stages:
        stage.frozen = set() if freeze == 'none' else set(sketch.unreachable(stage.predict))
        if freeze == 'modality':
            stage.frozen |= set(sketch.encoder_and_head('latent' if stage.mode == 'l2t' else 'text'))
        assert stage.frozen <= {name for name, _ in sketch.named_parameters()}, 'these are no parameters'
    always_frozen = set.intersection(*(stage.frozen for stage in stages))
    n_trained = sum(p.numel() for name, p in sketch.named_parameters() if name not in always_frozen)
    is_sharded = parallel == 'fsdp' and world > 1
    if is_sharded and any(stage.frozen != always_frozen for stage in stages):
        raise ValueError(f'mode_schedule={mode_schedule} freezes other parameters in other stages, which parallel=fsdp cannot: use ddp')
global_batch = batch_size * grad_accum * world
if not predict_length:                                     # sampling draws from these: every hundredth of the training lengths, rising
    config['lengths'] = [int(n) for n in np.quantile(np.minimum(train_data.lengths(), L), np.linspace(0, 1, 101))]
predict = tuple(s for s in streams if any(s in stage.predict for stage in stages))
trains = {name for stage in stages for name, share in stage.shares.items() if share}
tick('config', f'{len(config)} knobs, mode {mode_schedule or mode}')
tick('data', f'{folder}: {len(train_data):,} and {len(val_data):,} samples, every file of the size in meta.json')
tick('shapes', f'vocabulary {model_config.vocab_size:,}, {L} tokens, latents {N} x {D}')
tick('model', f'{n_parameters / 1e6:.1f}M parameters, {n_trained / 1e6:.1f}M of them train')
if rank == 0 and 'text' in streams and not checkpoint.steps(out_dir) and (too_long := describe_padding()):
    print(f'warning: {too_long}', flush=True)
device_type = torch.device(device).type
tick('device', f'{device}, {torch.cuda.get_device_name(device)}, {torch.cuda.device_count()} here' if device_type == 'cuda' else
     f'{device}, {torch.get_num_threads()} threads')
with stop_on_error(code=4):
    place = os.path.abspath(out_dir)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    # kept ones, the best, and the one being written; a short run makes fewer: one at each save or
    # evaluation, and one at the end
    intervals = save_interval, eval_interval
    both = (max_iters - 1) // math.lcm(*intervals)
    made = sum((max_iters - 1) // interval for interval in intervals) - both + 1
    to_come = max(1, min(keep + 2, made) - len(checkpoint.steps(out_dir)))
    needs, has = to_come * n_parameters * 4 * (4 if ema_decay else 3), shutil.disk_usage(place).free
    if has < needs:
        raise OSError(f'{to_come:,} checkpoints to come need {in_units(needs, "B")}, {place} has {in_units(has, "B")}: '
                      'make room, or choose another --out_dir')
    tick('disk', f'{in_units(needs, "B")} for {to_come} checkpoints to come, {in_units(has, "B")} free at {place}')
    tick('processes', distributed.reach_master(master_timeout)
         + (f'; waits up to {dist_timeout:g} s for the others' if world > 1 and not preflight_only else ''))
    nccl = f', NCCL {".".join(map(str, torch.cuda.nccl.version()))}' if torch.cuda.is_available() else ''
    tick('versions', f'torch {torch.__version__}{nccl}')
    if preflight_only:
        raise SystemExit(0)
    distributed.join(device, dist_timeout)

# ---- device and seed
torch.manual_seed(seed)
if device_type == 'cuda':
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision('high')
else:
    distributed.keep_freed_memory()
objective = Objective(text, latent, streams, device, lambda: torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16'),
                      seed, cond_drop, latent_noise, latent_weight, t_min, adaptive, predict_length)

# ---- model, and its running average in float32
model = Model(model_config).to(device)
if adaptive:
    model.importance.rarity.copy_(adaptive.rarity)
if compile:
    for block in model.blocks:                             # all blocks are one program: a depth-th of the wait
        block.compile(dynamic=False)


def set_frozen(frozen):
    """ What is frozen gets no gradient, so no optimizer moves it: not by momentum, not by decay. """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)


set_frozen(always_frozen)                                  # the optimizers take all that ever train
if is_sharded:
    distributed.shard(model, device)
names, parameters = zip(*((n, p) for n, p in model.named_parameters() if n not in always_frozen))
if rank:                                                   # from here on only dropout draws from this generator
    torch.manual_seed(seed + rank)
ema = [p.detach().clone() for p in parameters] if ema_decay else None


@contextmanager
def averaged_weights():
    """ Inside, the model has its EMA weights. """
    @torch.no_grad()
    def swap():
        if is_sharded:
            model.reshard()                                # or fsdp would go on with what it gathered before
        for p, e in zip(parameters, ema or ()):
            now = p.clone()
            p.copy_(e)
            e.copy_(now)
    swap()
    yield
    swap()


# ---- optimizers: [(optimizer, base rate)]
groups = model.parameter_groups()
adamw_matrices = groups['ends'] + (groups['matrices'] if optimizer == 'adamw' else [])
adamw_groups = [dict(params=adamw_matrices, weight_decay=weight_decay), dict(params=groups['vectors'], weight_decay=0.0)]
optimizers = [(torch.optim.AdamW(adamw_groups, lr=learning_rate, betas=betas, fused=True), learning_rate)]
if optimizer == 'muon':
    # match_rms_adamw scales Muon's update to the size of AdamW's, so that one rate serves both (arXiv:2502.16982)
    optimizers.append((torch.optim.Muon(groups['matrices'], lr=learning_rate, weight_decay=weight_decay,
                                        adjust_lr_fn='match_rms_adamw'), muon_lr or learning_rate))

# ---- the guard's memory, on the device: read only when something is logged, saved or evaluated
skipped = torch.zeros((), device=device)                   # steps of the run so far
streak = torch.zeros((), device=device)                    # steps skipped in a row
history = torch.full((checkpoint.NORMS,), math.nan, device=device)   # the last gradient norms of steps that were taken

# ---- resume, or begin
def identity_of(model_config, knobs, meta):
    """ What two runs must share for one to begin with the weights of the other, as it is read back from JSON. """
    process = {name: knobs[name] for name in ('text_schedule', 'text_power', 'latent_schedule', 'latent_target')}
    if (kind := knobs.get('text_process', 'masked')) != 'masked':
        process.update({name: knobs[name] for name in ('text_process', f'{kind}_gamma', dict(gidd='gidd_uniform', hdlm='hdlm_xi')[kind])})
    return json.loads(json.dumps(dict(model=asdict(model_config), process=process, **dataset_identity(meta))))


compatible = identity_of(model_config, config, train_data.meta)    # init_from needs no more than this
identity = {**compatible, 'data': split_digests(train_data.meta)}  # a resume needs the same samples
step = saved_at = evaluated_at = failed_saves = 0
save_owed = False                                          # one was due while steps were being skipped
best_val = math.inf


def fill(state):
    own = model.state_dict()
    model.load_state_dict({name: distributed.share(w, own[name]) if name in own else w for name, w in state.items()})


def begin_from(run_folder):
    """ The best weights of another run of the same model, process and data. """
    source, source_config, source_meta = checkpoint.load_model(run_folder, 'best', device=device)
    source_identity = identity_of(source.config, source_config, source_meta)
    source_identity['model']['dropout'] = compatible['model']['dropout']
    other = checkpoint.difference(source_identity, compatible)
    if other:
        raise ValueError(f'init_from={run_folder} was trained with {other}')
    fill(source.state_dict())
    for e, p in zip(ema or (), parameters):
        e.copy_(p.detach())


def go_on_from(newest):
    """ Everything as it was when it was saved, on any number of processes. """
    global step, saved_at, evaluated_at, best_val
    saved = checkpoint.load(newest, map_location='cpu' if is_sharded else device, rank=rank)
    state = saved['training_state']
    defaults = json.loads(json.dumps(asdict(ModelConfig())))             # of knobs that are younger than the run
    other = checkpoint.difference({**state['identity'], 'model': {**defaults, **state['identity']['model']}}, compatible)
    if other:
        raise ValueError(f'{newest} was trained with {other}: choose another --out_dir')

    # the same samples in both splits, or `best` would compare losses of two validation splits
    known = state['identity'].get('data')
    if not known:                                          # an older run: its copy of meta.json says it
        meta = checkpoint.read_json(checkpoint.Path(out_dir) / 'data' / 'meta.json', limit=MAX_META)
        known = split_digests(meta)
    other = checkpoint.difference({'data': known}, {'data': identity['data']})
    if other:
        raise ValueError(f'{newest} was trained on another dataset than {folder} ({other}): '
                         'name its own with --dataset=, or choose another --out_dir')
    if saved['optimizer']['names'] != list(names) or len(saved['optimizer']['states']) != len(optimizers):
        raise ValueError(f'{newest} was trained with other parameters or another optimizer: choose another --out_dir')
    fill(saved['model'])
    name_of = dict(zip(parameters, names))
    for (opt, _), opt_state in zip(optimizers, saved['optimizer']['states']):
        owners = [(name_of[p], p) for group in opt.param_groups for p in group['params']]
        moments = checkpoint.checked_moments(newest / 'optimizer.pt', opt_state, opt, owners)
        for i, of_one in moments.items():
            for kind, value in of_one.items():
                of_one[kind] = distributed.share(value, owners[i][1])
        opt.load_state_dict(dict(state=moments, param_groups=opt.state_dict()['param_groups']))              # the groups are knobs
    for name, e in zip(names, ema or ()):
        average = (saved['ema'] or saved['model'])[name]
        checkpoint.check_average(newest / 'ema.safetensors', name, average, e)
        e.copy_(distributed.share(average, e))
    step = saved_at = int(state['step'])
    evaluated_at, best_val = int(state['evaluated_at']), math.inf if state['best_val'] is None else float(state['best_val'])
    skipped.fill_(state['skipped'])
    streak.fill_(state['streak'])
    if state['history']:
        history[-len(state['history']):] = torch.tensor(state['history'])
    if saved['rng']:                                       # None: more processes than before
        torch.set_rng_state(saved['rng']['cpu'].cpu())
        if device_type == 'cuda' and 'cuda' in saved['rng']:
            torch.cuda.set_rng_state(saved['rng']['cuda'].cpu())
    if state['global_batch'] != global_batch and rank == 0:
        print(f'warning: the global batch was {state["global_batch"]} rows and is now {global_batch}: not the run it would have been')


# these leave what a resumed run learns as it is
HARMLESS = {'dataset', 'out_dir', 'resume', 'init_from', 'clusters_from', 'device', 'compile', 'parallel',
            'dist_timeout', 'master_timeout', 'preflight_only', 'max_bad_steps', 'keep', 'save_interval',
            'eval_interval', 'log_interval', 'wandb_project'}


def say_what_changed():
    """ One line of the knobs that are others than in config.json, which the last start wrote. """
    try:
        before = checkpoint.read_config(out_dir)
    except ValueError as error:
        print(f'warning: {error}: whether knobs have changed is not known', file=sys.stderr)
        return

    changed = []
    for name, default in read_knobs(__file__)[0].items():
        new, old = config[name], before.get(name, default)  # the default: the knob is younger than the run
        old = tuple(old) if isinstance(old, list) else old
        if name not in HARMLESS and old != new:
            changed.append(f'{name} {old!r} -> {new!r}')
    if changed:
        print(f'resumed with other knobs: {", ".join(changed)}', flush=True)


def take_run_folder():
    """ For rank 0: nobody else writes there until this process ends, however it ends. """
    checkpoint.lock(out_dir)
    return checkpoint.newest(out_dir) if resume == 'auto' else None


newest, error = distributed.first_or_stop(2, take_run_folder), None
if text_process == 'hdlm' and not newest and not init_from:
    cluster_of = distributed.first_or_stop(2, cluster_table, clusters_from, train_data, clusters)
    model.cluster_of.copy_(cluster_of)
try:
    if newest:
        go_on_from(newest)
    elif init_from:
        begin_from(init_from)
except (ValueError, OSError) as failure:
    error = str(failure)
except Exception as failure:                               # whatever a hostile or older checkpoint provokes
    error = f'cannot go on from {newest or init_from}: {type(failure).__name__}: {failure}'
errors = [e for e in distributed.everyone(error) if e]
if errors:
    stop_all(errors[0], code=2)
if text_process == 'hdlm':                                 # those of the run that it goes on from, if it does
    text.tables = {torch.device('cpu'): model.cluster_of.cpu()}
    if rank == 0 and not newest:
        print(*clusters_in_words(model.cluster_of.cpu(), train_data), sep='\n')
if rank == 0:
    if newest or init_from:
        print(f'going on from {newest}' if newest else f'begins with the best weights of {init_from}')
        if newest:
            say_what_changed()
    elif freeze == 'modality':
        print('warning: freeze=modality without init_from freezes an encoder at its random start: its modality will not be understood')


def begin_run_folder():
    """ The run's id for wandb, if it logs there. """
    checkpoint.write_run(out_dir, config, folder, fresh=newest is None, step=step)
    (checkpoint.Path(out_dir) / 'preempted.json').unlink(missing_ok=True)
    if wandb_project:
        return checkpoint.wandb_id(out_dir, fresh=newest is None)


wandb_id = distributed.first_or_stop(2, begin_run_folder)
if wandb_project and rank == 0:
    import wandb
    wandb.init(project=wandb_project, name=os.path.basename(out_dir), config=config, id=wandb_id, resume='allow')
flops = model.flops(global_batch, stages[0].seq_len, stages[0].budget * grad_accum * world, stages[0].predict)
if rank == 0:
    epochs = global_batch * max_iters / len(train_data)
    print(f'{max_iters:,} steps of {global_batch:,} x {L} tokens: {epochs:,.{0 if epochs >= 100 else 2}f} epochs of '
          f'{len(train_data):,} samples, {in_units(flops, "FLOP")} a step, {in_units(flops * max_iters, "FLOP")} in all; '
          f'{world} x {device}, {dtype}', flush=True)


# ---- a batch is a function of the seed and the step; whose rows they are depends on the rank
def rows_of(step, micro, rank):
    """ Number of the first row of this rank's micro-batch in the global batch, and the rows of the dataset. """
    first = (micro * world + rank) * batch_size
    return first, row_order(len(train_data), seed, step * global_batch + first, batch_size)


def micro_batches(step):
    while step < max_iters:
        for micro in range(grad_accum):
            first, rows = rows_of(step, micro, rank)
            yield objective.batch(train_data, rows, step, first, global_batch, stage_at(step))
        step += 1


def evaluate():
    """ {val_text nats per real token, val_latent squared error per dimension} over eval_iters micro-batches of the validation
    split, which the ranks share; None where a signal came meanwhile. """
    model.eval()
    n = min(eval_iters, -(-len(val_data) // batch_size))
    sums = torch.zeros(4, dtype=torch.float64)
    for i in range(0, n, world):
        if agree(signal_seen):
            return None
        part = objective.validation(model, val_data, (i + rank) % n, batch_size, predict, trains)
        sums += part if i + rank < n else 0                # a rank without one runs all the same: fsdp gathers for all
    nats, real, error, rows = add(sums).tolist()
    return {f'val_{stream}': value for stream, value in (('text', nats / real), ('latent', error / rows)) if stream in predict}


def get_lr(step):
    """ Factor of the base rates at this step: linear warm-up, then cosine from 1 to min_lr, and min_lr for good. """
    warmup = min(warmup_iters, max_iters // 2)
    if step < warmup:
        return (step + 1) / warmup
    begin = max(warmup, decay_from * max_iters)
    done = min(1.0, max(0.0, (step - begin) / max(1, max_iters - begin)))
    return min_lr + (1 - min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def save(is_best):
    """ Whether it could be saved: rank 0 writes, all know how it went. A full disk is a warning; the third time in a row, or at
    the end, it is exit code 5. What is not finite is not saved: exit code 3. """
    global saved_at, failed_saves
    assert ema is None or not ema[0].requires_grad, 'the average carries a graph'
    weights = distributed.gather(model.state_dict())
    average = None if ema is None else {**weights, **dict(zip(names, distributed.gather(ema)))}      # what is frozen is its own average
    moments = dict(names=list(names), states=[distributed.gather(opt.state_dict()) for opt, _ in optimizers])
    rngs = distributed.everyone({'cpu': torch.get_rng_state(),
                                 **({'cuda': torch.cuda.get_rng_state()} if device_type == 'cuda' else {})})
    state = dict(step=step, evaluated_at=evaluated_at, best_val=None if math.isinf(best_val) else best_val,
                 skipped=skipped.item(), streak=streak.item(), history=history[history.isfinite()].tolist(),
                 global_batch=global_batch, model_config=asdict(model_config), identity=identity)
    _, error = distributed.on_first(checkpoint.save, out_dir, step, weights, average, moments, state, rngs, keep=keep, best=is_best)
    if isinstance(error, ValueError):                      # what is to be saved is not finite
        report()
        before = f'the newest checkpoint is step {saved_at}' if saved_at else 'there is no checkpoint'
        advice = 'a smaller learning_rate' if guard else 'guard=True and a smaller learning_rate'
        stop_all(f'{error}; {before}: train with {advice}', code=3)
    failed_saves = failed_saves + 1 if error else 0
    if not error:
        saved_at = step
    elif failed_saves == 3 or step >= max_iters or stop_signal:
        stop_all(error, code=5)
    elif rank == 0:
        print(f'warning: {error}; the run goes on and tries again', file=sys.stderr, flush=True)
    return not error


def log_line(**entry):
    if rank == 0:
        try:
            line = (json.dumps(entry) + '\n').encode()
            with open(os.path.join(out_dir, 'training_log.jsonl'), 'ab', buffering=0) as f:
                end = f.tell()
                if f.write(line) < len(line):              # half a line would spoil the file for whoever reads it
                    f.truncate(end)
                    raise OSError('no room for a line')
        except OSError as error:
            print(f'warning: cannot log: {error}', file=sys.stderr, flush=True)
        if wandb_project:
            wandb.log(entry, step=entry['step'])


def check_streak():
    """ Ends the run when too many steps in a row were skipped; reads the device, so at log, save and evaluation steps only. """
    if streak.item() >= max_bad_steps:
        report()
        stop_all(f'step {step}: {int(streak.item())} steps in a row had no finite loss or gradient, or a spike beyond spike_factor='
                 f'{spike_factor:g}; the newest checkpoint is step {saved_at}', code=3)


def describe_skips():
    """ What was wrong with each step skipped since the last line, and for a loss on which rank, in which rows. All ranks ask. """
    if not recent[:, 0].any():
        return []
    finite, found = distributed.everyone(micro_finite.tolist()), []
    for i, (bad, loss, norm) in enumerate(recent.tolist()):
        if bad:
            why = 'loss' if not math.isfinite(loss) else 'gradient' if not math.isfinite(norm) else 'spike'
            where = [dict(rank=r, rows=rows_of(step - steps_since + i, micro, r)[1].tolist())
                     for r in range(world) for micro in range(grad_accum) if not finite[r][i][micro]]
            found.append(dict(step=step - steps_since + i + 1, why=why, loss=f'{loss:.4g}', grad_norm=f'{norm:.4g}', where=where))
    return found


def report():
    """ One line of the log and one on the screen, of the steps since the last one. Every rank must call. """
    global since, steps_since
    if not steps_since:
        return
    skips, sums = describe_skips(), add(stats.clone())       # here the device is waited for
    *sums, norm, taken = sums.split([*(x.numel() for x in found.values()), 1, 1])
    taken, seconds = taken.item(), time.perf_counter() - since                 # steps, counted on every rank
    s = {name: (x / max(1, taken)).tolist() for name, x in zip(found, sums)}   # means per step and rank
    speed = (tokens_until(step) - tokens_until(step - steps_since)) / seconds
    memory = torch.cuda.max_memory_allocated() if device_type == 'cuda' else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    entry = dict(step=step, epoch=step * global_batch / len(train_data), tokens=tokens_until(step))
    line = 'no step was taken'
    if taken:
        losses, line = objective.summary(s, grad_accum)
        entry.update(losses, grad_norm=norm.item() / taken)
        line += f' | norm {entry["grad_norm"]:.2f}'
    entry.update(lr=learning_rate * get_lr(step - 1), tokens_per_s=speed, memory_gb=round(memory / 1e9, 3), skipped=int(skipped.item()),
                 **({'curriculum_stage': STAGES[adaptive.stage(step - 1)]} if curriculum else {}),
                 modes=dict(zip(MODES, (rows * world / global_batch for rows in s['rows']))), **({'skips': skips} if skips else {}))
    log_line(**entry)
    if rank == 0:
        for skip in skips:
            where = ', '.join(f'rank {w["rank"]} rows {w["rows"][0]}...' for w in skip['where'])
            print(f'step {skip["step"]:>6,} skipped: {skip["why"]}, loss {skip["loss"]}, norm {skip["grad_norm"]}'
                  + (f', {where}' if where else ''), flush=True)
        eta = (max_iters - step) * seconds / steps_since
        print(f'step {step:>6,}/{max_iters:,} | {line} | {speed:,.0f} tokens/s | ETA {timedelta(seconds=int(eta))}'
              + (f' | skipped {entry["skipped"]}' if entry['skipped'] else ''), flush=True)
    since, steps_since = since + seconds, 0


def first_estimate():
    """ One line after the first few steps of this process: a slow run's first log line is minutes away. The very first step
    is left out, as it is slow. Waits for the device twice. """
    global first_step
    is_due = steps_since == 5 or steps_since > 1 and time.perf_counter() - since - first_step > 5
    if steps_since == 1 or is_due:
        if device_type == 'cuda':
            torch.cuda.synchronize()
        seconds = time.perf_counter() - since
        if steps_since == 1:
            first_step = seconds
        else:
            a_step = (seconds - first_step) / (steps_since - 1)
            first_step = None                              # said once
            print(f'step {step:>6,}/{max_iters:,} | {in_words(a_step)} a step, '
                  f'about {in_words(a_step * (max_iters - step))} to go', flush=True)


# ---- the loop: evaluate, save and stop; micro-steps; guard; step; average; log
signal_seen = stop_signal = 0                              # this process's, and what all agreed on


def note_signal(number, frame):
    global signal_seen
    signal_seen = number


for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, note_signal)

stage, net = None, None
model.train()
batches = prefetch(micro_batches(step), device)
since, steps_since = time.perf_counter(), 0
start_step, start_time, first_step = step, since, 0.0
while True:
    at_end = step >= max_iters
    stop_signal = agree(signal_seen)
    due_evaluation = (at_end or step % eval_interval == 0) and step > evaluated_at and not stop_signal
    due_save = (at_end or step % save_interval == 0 or stop_signal or save_owed and steps_since == 0) and step > saved_at
    if due_evaluation or due_save:
        check_streak()                                     # waits for the device
        began, is_best, best_before = time.perf_counter(), False, best_val
        if due_evaluation:
            with averaged_weights():
                val = evaluate()
            model.train()
            if val is None:                                # a signal came
                continue
            val_loss = (val.get('val_text') or 0) + latent_weight * (val.get('val_latent') or 0)
            is_best, best_val, evaluated_at = val_loss < best_val, min(best_val, val_loss), step
            if rank == 0:
                units = dict(val_text='nats per token', val_latent='per dimension')
                print(f'step {step:>6,} | ' + ', '.join(f'{name} {value:.4f} {units[name]}' for name, value in val.items())
                      + (' | best' if is_best else ''), flush=True)
            log_line(step=step, **val, best=is_best, seconds=round(time.perf_counter() - began, 2))
        if due_save or is_best:
            # not while a streak is open, or the last good ones would rotate away; at the end all the same: a skip moved nothing
            save_owed = streak.item() > 0 and not at_end and not stop_signal
            if save_owed or not save(is_best):
                best_val = best_before                     # `best` names what is saved
        since += time.perf_counter() - began
    if stop_signal:
        report()
        name = signal.Signals(stop_signal).name
        distributed.first_or_stop(5, checkpoint.write_text, checkpoint.Path(out_dir) / 'preempted.json',
                                  json.dumps(dict(step=saved_at, signal=name)))
        if rank == 0:
            done = f'saved step {saved_at:,}' if saved_at else 'no step was done, nothing to save'
            print(f'{name}: {done}; run the same command again to go on', flush=True)
        break
    if at_end:
        break

    if stage is not stage_at(step):
        stage = stage_at(step)
        set_frozen(stage.frozen)
        if step == stage.first:
            history.fill_(math.nan)                        # the norms of another loss say nothing about this one's
        net = distributed.parallelise(model, parallel, device, find_unused=bool(set(model.unreachable(stage.predict)) - stage.frozen))
        if len(stages) > 1 and rank == 0:
            print(f'step {step:>6,} | mode {stage.mode}, texts of {stage.seq_len} tokens', flush=True)
    if steps_since == 0:                                   # since the last log line: sums over steps that were taken
        stats = 0
        recent, micro_finite = torch.zeros(log_interval, 3, device=device), torch.ones(log_interval, grad_accum, device=device)
    loss = now = 0
    for micro in range(grad_accum):
        batch = next(batches)
        with distributed.all_reduce_only_at(micro == grad_accum - 1, net):
            result = objective.losses(net, batch, stage.predict)
            (result['loss'] / grad_accum).backward()
        loss = loss + result['loss'].detach() / (grad_accum * world)
        micro_finite[steps_since, micro] = result['loss'].detach().isfinite()
        found = objective.statistics(batch, result)
        now = now + torch.cat(tuple(found.values()))
    loss = add(loss)                                       # of the global batch, as the gradients are: the same bits on every rank
    norm = torch.nn.utils.clip_grad_norm_(parameters, grad_clip or math.inf)
    norm = norm.full_tensor() if is_sharded else norm
    bad = torch.zeros((), device=device)
    if guard:                                              # the median of a history that is not yet full is nan, so nothing is above it
        spike = norm > spike_factor * history.median() if spike_factor else torch.zeros_like(norm, dtype=torch.bool)
        bad = (~torch.isfinite(norm) | ~torch.isfinite(loss) | spike).float()
    for opt, rate in optimizers:
        for group in opt.param_groups:
            group['lr'] = rate * get_lr(step)
        if isinstance(opt, torch.optim.AdamW):
            opt.found_inf = bad                            # the fused kernel leaves weights, moments and step count alone
            opt.step()
        elif not bad.item():                               # Muon has no such switch: one sync
            opt.step()
        opt.zero_grad(set_to_none=True)
    skipped += bad
    streak = (streak + 1) * bad
    history = torch.where(bad > 0, history, torch.cat((history[1:], norm[None])))
    stats = stats + torch.where(bad > 0, 0, torch.cat((now, norm[None], torch.ones_like(norm)[None])))
    recent[steps_since] = torch.stack((bad, loss, norm))
    step += 1
    steps_since += 1
    if ema is not None:                                    # after the step; a skipped step moves nothing
        with torch.no_grad():                              # ema += (1 - d) (weights - ema); with a graph it would grow for ever
            d = min(ema_decay, (1 + step) / (10 + step))
            torch._foreach_add_(ema, torch._foreach_mul(torch._foreach_sub(parameters, ema), (1 - d) * (1 - bad)))

    if step % log_interval == 0 or step == max_iters or stage_at(step) is not stage:   # a line speaks of one mode
        report()
        check_streak()
    elif rank == 0 and steps_since == step - start_step and first_step is not None:
        first_estimate()

if rank == 0:
    best = '' if math.isinf(best_val) else f'best validation {best_val:.4f}; '
    if start_step >= max_iters:
        print(f'{out_dir} is finished: {step:,} of {max_iters:,} steps; {best}raise --max_iters to go on', flush=True)
    elif step > start_step:
        print(f'{step - start_step:,} steps in {timedelta(seconds=int(time.perf_counter() - start_time))}; '
              f'{best}checkpoints in {out_dir}', flush=True)
distributed.leave()
