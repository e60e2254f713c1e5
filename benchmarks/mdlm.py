"""
MDLM's own network and loss beside config/mdlm.py, on the same rows of captions, in nats per token.

MDLM is a clone of github.com/kuleshov-group/mdlm (c112c52); its network needs `pip install einops`.
RAW holds the captions (docs/results.md).

    python prepare.py config/captions.py --encoder=none --out=data/captions_text \
        --input="RAW/train.*.en.gz" --val_input="RAW/val.*.en.gz"
    python train.py config/captions.py config/mdlm.py --dataset=captions_text --depth=4 \
        --width=128 --heads=4 --batch_size=64 --max_iters=800 --length_schedule= --dropout=0 \
        --t_min=1e-3 --optimizer=adamw --learning_rate=1e-3 --betas=0.9,0.999 --weight_decay=0 \
        --warmup_iters=100 --min_lr=1 --ema_decay=0.99 --out_dir=out/adamw_0
    python train.py config/captions.py config/mdlm.py --dataset=captions_text --depth=4 \
        --width=128 --heads=4 --batch_size=64 --max_iters=800 --length_schedule= --dropout=0 \
        --out_dir=out/muon_0
    python -m benchmarks.mdlm --folder=MDLM --runs=out/adamw_0,out/muon_0 --save=results/mdlm.json

Two more seeds: both trainings again with --seed=1 and --out_dir=out/adamw_1, out/muon_1, and so
with 2; --runs names all six. Beside each run by AdamW, MDLM trains at the same shape, on the same
rows of each step, with AdamW at the same rates, and with the same average of the weights:
config.json of the run says how. Then all are measured with the bound of tasks/nelbo.py, on the same
captions and masks.

What stands in for what is not of PyTorch: flash_attn's attention and rotary positions (equal in
float32, and much slower than on a GPU), and hydra, lightning and torchmetrics, which the loss does
not use. MDLM drops out nothing here, as ours.
"""
import importlib.util
import json
import os
import sys
import warnings
from types import ModuleType, SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import configure, stop_on_error
from data import PackedDataset, row_order
from model import rotate
from runs import preflight
from runs.console import progress_bar
from runs.files import write_text
from runs.manifest import dataset_folder
from runs.stages import lr_factor
from sampling.likelihood import what_is_scored
from sampling.loading import load_run
from tasks.common import chosen_rows, enter
from tasks.nelbo import mean_bound

folder = 'mdlm'                # <a folder>: a clone of MDLM
runs = 'out/adamw_0'           # <run folders>, with commas between them: of config/mdlm.py; of each
                               # seed the one by AdamW first
n = 1000                       # [2, 1e6]: validation texts, drawn by lot
draws = 8                      # [1, 1e4]: of the bound, for each text
seed = 0                       # [0, 2**63): of these
save = ''                      # a .json for the figures

# -----------------------------------------------------------------------------
# Their code, without a GPU

def rotary(qkv, cos, sin):
    """ flash_attn's apply_rotary_emb_qkv_: queries and keys of qkv (B, L, 3, H, d) turn by the
    angles (L, d/2), values stay. """
    q, k, v = qkv.unbind(2)
    cos, sin = cos[:, None], sin[:, None]                                # (L, 1, d/2)
    return torch.stack([rotate(q, cos, sin), rotate(k, cos, sin), v], 2)


def full_attention(qkv, cu_seqlens, length, dropout_p, causal):
    """ flash_attn's flash_attn_varlen_qkvpacked_func of rows of one length: (B L, 3, H, d) to
    (B L, H, d). """
    q, k, v = qkv.unflatten(0, (-1, length)).permute(2, 0, 3, 1, 4)      # (B, H, L, d) each
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(0, 1)


def their_code():
    """ The modules diffusion and noise_schedule of the clone; ValueError where it is missing. """
    def stand_in(name, **contents):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
        return sys.modules[name]

    def load(name):
        path = os.path.join(folder, f'{name}.py')
        if not os.path.isfile(path):
            raise ValueError(f'{path}: missing; name a clone of github.com/kuleshov-group/mdlm '
                             'with --folder=')
        spec = importlib.util.spec_from_file_location(f'mdlm {name}', path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    # what they import, in the order in which it is needed; a CPU has none of their autocasts
    warnings.filterwarnings('ignore', '.*autocast')
    attention = SimpleNamespace(flash_attn_varlen_qkvpacked_func=full_attention)
    layers = stand_in('flash_attn.layers',
                      rotary=stand_in('flash_attn.layers.rotary', apply_rotary_emb_qkv_=rotary))
    stand_in('flash_attn', layers=layers, flash_attn_interface=attention)
    stand_in('hydra', utils=stand_in('hydra.utils'))
    stand_in('lightning', LightningModule=nn.Module)
    stand_in('torchmetrics', aggregation=SimpleNamespace(MeanMetric=object))
    for name in ('omegaconf', 'dataloader'):
        stand_in(name)
    stand_in('utils', print_nans=lambda *_: None)
    noise_schedule = stand_in('noise_schedule', **vars(load('noise_schedule')))
    stand_in('models', dit=load('models/dit'))
    return load('diffusion'), noise_schedule


class Theirs(nn.Module):
    """ MDLM at the shape of a run. `loss` is its training loss. Called, it is a network as
    diffusion.MaskedText.bound calls ours: it has no latents, and reads no clock. """

    def __init__(self, shape):
        super().__init__()
        diffusion, noise_schedule = their_code()
        sizes = SimpleNamespace(hidden_size=shape.width, cond_dim=128, n_blocks=shape.depth,
                                n_heads=shape.heads, dropout=0.0, scale_by_sigma=True,
                                length=shape.seq_len)
        self.config = shape
        V = shape.vocab_size

        # what Diffusion.__init__ sets from configs/config.yaml, and no trainer, metric or scorer
        it = self.diffusion = diffusion.Diffusion.__new__(diffusion.Diffusion)
        nn.Module.__init__(it)
        it.config = SimpleNamespace(model=sizes)
        it.backbone = diffusion.models.dit.DIT(it.config, vocab_size=V + 1)
        it.noise = noise_schedule.LogLinearNoise()
        it.mask_index, it.vocab_size, it.neg_infinity = V, V + 1, -1e6
        it.parameterization, it.T, it.sampling_eps = 'subs', 0, 1e-3
        it.antithetic_sampling, it.time_conditioning = True, False
        it.importance_sampling = it.change_of_variables = False

    def loss(self, tokens):                                              # (B, L)
        return self.diffusion._loss(tokens, torch.ones_like(tokens)).loss

    def forward(self, tokens, latents, t_text, t_latent, positions, **_):
        log_p = self.diffusion(tokens, torch.zeros(len(tokens)))         # (B, L, V + 1)
        return log_p.flatten(0, 1)[positions, :-1], None

    @staticmethod
    def text_head(log_p):
        return log_p

# -----------------------------------------------------------------------------
# Training, and the bound

def trained(run):
    """ Theirs, trained as the run was, with its weights averaged. """
    c = run.config
    torch.manual_seed(c['seed'])
    data = PackedDataset(dataset_folder(c['dataset']), 'train', run.L)
    model = Theirs(run.model.config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=c['betas'],
                                  weight_decay=c['weight_decay'])
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(c['ema_decay']))

    for step in progress_bar(range(c['max_iters']), desc='MDLM', unit='step'):
        for group in optimizer.param_groups:
            group['lr'] = c['learning_rate'] * lr_factor(c, step)
        rows = row_order(len(data), c['seed'], step * c['batch_size'], c['batch_size'])
        model.loss(data.rows(rows)[0].long()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average.module.eval()


@torch.inference_mode()
def bound_of(run, tokens, what):
    """ Nats of each text (n,), and its real tokens (n,). """
    known_mask, n_real = what_is_scored(run, tokens)
    nats = mean_bound(run, run.text, tokens, None, 1.0, known_mask, draws, seed, 128, what)
    return nats, n_real


def check_runs(of_each):
    """ ValueError where a run has none by AdamW of its seed before it, or is there twice. """
    kinds = []
    for run in of_each:
        kind = run.config['seed'], run.config['optimizer']
        if kind in kinds or (kind[0], 'adamw') not in [*kinds, kind]:
            raise ValueError(f'{run.out_dir}: seed {kind[0]}, {kind[1]}; of each seed --runs names '
                             'first one run by adamw, then at most one by each other optimizer')
        kinds.append(kind)


def main():
    results, of_adamw, of_seeds = {}, {}, {}
    of_each = [load_run(out_dir, dtype='float32') for out_dir in runs.split(',')]
    check_runs(of_each)
    for run in of_each:
        run_seed, optimizer = run.config['seed'], run.config['optimizer']
        val = PackedDataset(dataset_folder(run.config['dataset']), 'val', run.L)
        tokens, _ = val.rows(chosen_rows(len(val), n, 'random', seed))
        nats, n_real = bound_of(run, tokens, optimizer)
        measured = {optimizer: nats}
        if optimizer == 'adamw':
            of_adamw[run_seed] = nats
            results['millions of parameters/ours'] = preflight.count(run.model) / 1e6
            run.model = trained(run)
            results['millions of parameters/MDLM'] = preflight.count(run.model) / 1e6
            measured['MDLM'], _ = bound_of(run, tokens, 'MDLM')

        # nats per token, and the paired difference
        for name, nats in measured.items():
            values = {name: nats}
            if name != 'adamw':
                values[f'{name} less adamw'] = nats - of_adamw[run_seed]
            enter(results, f'seed {run_seed}/', {key: (x, n_real) for key, x in values.items()})
            for key, x in values.items():
                of_seeds.setdefault(key, []).append((x.sum() / n_real.sum()).item())

    # the mean over the trainings
    enter(results, 'mean/', of_seeds)
    print(*(f'{key} {value:.3f}' for key, value in results.items()), sep='\n')
    if save:
        write_text(save, json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    configure(globals())
    with stop_on_error():
        main()
