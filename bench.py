"""
Speed as a ratio in one run: one side beside the other, interleaved, medians.

    python bench.py                                              # guard: what guard and logging cost a training step
    python bench.py --what=trainings --lines="config/multi30k_l2t.py | config/multi30k_l2t.py --optimizer=adamw"   # tokens/s
    python bench.py --what=step --shape=small                    # a training step beside other libraries' (peers.py)
    python bench.py --what=scaling --settings=bfloat16           # how that grows with depth, width, length and batch
    python bench.py --what=samplers                              # seconds a text, beside an autoregressive decoder of that size
    python bench.py --what=loader                                # batches from the packed dataset beside a file a sample; share of a step
    python bench.py --what=encoder --encoder=FOLDER              # embedding beside sentence-transformers (pip install it)

Times of training are those of train.py itself, run in this process from the same seed: the tokens per second of its own log, without the
first line. guard=False decides nothing and skips nothing, and still keeps the few numbers that a log line needs.
"""
import gc
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from types import SimpleNamespace

# before torch reads it: threads that wait sleep, where spinning would take the core of whom they wait for
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import peers
from checkpoint import pick_device
from configurator import configure, stop, stop_on_error
from data import PackedDataset, dataset_folder
from diffusion import GaussianLatents, MaskedText
from distributed import keep_freed_memory
from encoders import load_encoder
from samplers import SAMPLERS

what = 'guard'                  # guard | trainings | step | scaling | samplers | loader | encoder, comma-separated
dataset = 'quickstart'          # <a folder under data/, or a path to one>
rounds = 5                      # [1, 1000]: each side so many times
max_iters = 60                  # [1, 1e6]: of each training
batch_size = 32                 # [1, 65536]
depth = 4                       # [1, 256]
width = 256                     # [1, 16384]
heads = 4                       # [1, 256]
dtype = 'bfloat16'              # bfloat16 | float32
samples = 4096                  # [1, 1e7]: loader, encoder
encoder = 'minilm'              # <a name, hub id or folder>: of texts
embed_batch_size = 64           # [1, 65536]
lines = ''                      # trainings: arguments of train.py, | between them
shape = 'small'                 # small | gpt2vocab: step
sides = 'ours,diffusers,mmdit,bert,gpt'   # step
settings = 'as shipped,float32,float32 compiled,bfloat16,bfloat16 compiled'
seconds = 2.0                   # (0, 3600]; step, scaling: of steps in each round
scale = 'depth,width,length,batch'      # scaling: what is halved and doubled
device = 'auto'                 # auto | cpu | cuda | <cuda:1 or the like>
save = ''                       # step: a .json for the table
threads = 2                     # [1, 1024]: of torch

HERE = os.path.dirname(os.path.abspath(__file__))


def compare(sides, unit):
    """ {name: function that returns its speed}, by turns; prints each speed and its ratio to the first side's. Returns medians. """
    speeds = {name: [] for name in sides}
    for i in range(rounds):
        for name, run in sides.items():                                  # interleaved: what disturbs the machine disturbs all
            speeds[name].append(run())
            print(f'round {i + 1}/{rounds}  {name:<40} {speeds[name][-1]:>12,.0f} {unit}', flush=True)
    base = next(iter(sides))
    print(f'\n{"":<40} {unit:>12}   speed, relative to {base!r}: median (least, most) over rounds')
    for name in sides:
        ratios = [s / b for b, s in zip(speeds[base], speeds[name])]
        print(f'{name:<40} {statistics.median(speeds[name]):>12,.0f}   {statistics.median(ratios):.3f} '
              f'({min(ratios):.3f}, {max(ratios):.3f})')
    print()
    return {name: statistics.median(values) for name, values in speeds.items()}


# ---- guard

def tokens_per_s(*arguments):
    """ Median over the log lines of one training, but the first, which waits for the first steps to warm up. """
    with tempfile.TemporaryDirectory() as out_dir:
        sys.argv = ['train.py', *arguments, f'--out_dir={out_dir}', f'--max_iters={max_iters}', '--eval_interval=1000000',
                    '--save_interval=1000000', '--eval_iters=1']
        stdout, sys.stdout = sys.stdout, open(os.devnull, 'w')
        try:
            runpy.run_path(os.path.join(HERE, 'train.py'), run_name='__main__')
        finally:
            sys.stdout.close()
            sys.stdout = stdout
            gc.collect()                                                 # the script's model
            torch._dynamo.reset()                                        # and its programs: a function may hold 8
        with open(os.path.join(out_dir, 'training_log.jsonl')) as f:
            entries = [json.loads(line) for line in f]
    return statistics.median([e['tokens_per_s'] for e in entries if 'tokens_per_s' in e][1:])


def model_knobs():
    return (f'--dataset={dataset}', f'--batch_size={batch_size}', f'--depth={depth}', f'--width={width}', f'--heads={heads}',
            f'--dtype={dtype}')


def guard():
    compare({'off': lambda: tokens_per_s(*model_knobs(), '--guard=false', '--log_interval=30'),
             'guard': lambda: tokens_per_s(*model_knobs(), '--guard=true', '--log_interval=30'),
             'guard and a log line every 10 steps': lambda: tokens_per_s(*model_knobs(), '--guard=true', '--log_interval=10')}, 'tokens/s')


def trainings():
    """ Any command lines of train.py beside each other: --lines="config/a.py | config/a.py --optimizer=adamw". """
    if not lines:
        stop('--lines="config/a.py | config/b.py --lr=...": the arguments of each training')
    compare({arguments.strip(): lambda a=arguments: tokens_per_s(*a.split(), f'--log_interval={max(1, max_iters // 4)}')
             for arguments in lines.split('|')}, 'tokens/s')


# ---- step: each side in a process of its own, by turns

class Worker:
    """ A side in one setting at one shape: built, warmed up, and then waiting for its turns on stdin. """

    def __init__(self, side, s, setting):
        code = f'import bench; bench.threads, bench.device = {threads}, {device!r}; bench.work({side!r}, {s!r}, {setting!r})'
        self.errors = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen([sys.executable, '-W', 'ignore', '-c', code], cwd=HERE, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.errors)
        self.ready = self.answer()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith('{'):                                     # what a library prints is passed over
                return json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        return dict(error=(self.errors.read().strip() or f'exit code {code}').split('\n')[-1])

    def turn(self, seconds):
        """ {seconds: of a step, memory_gb}, or {error: its last words}. """
        with suppress(BrokenPipeError):                                  # it has ended: answer() says why
            self.process.stdin.write(f'{seconds}\n')
            self.process.stdin.flush()
        return self.ready if 'error' in self.ready else self.answer()

    def end(self):
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def work(side, shape, setting):
    """ In the worker: a line of JSON when it is ready, then one for every line of stdin, a number of seconds to work. """
    torch.set_num_threads(threads)
    where, (dtype, *compiled) = pick_device(device), setting.replace('as shipped', 'float32').split()
    if setting != 'as shipped':
        keep_freed_memory()
        torch.set_float32_matmul_precision('high')
    module, loss = peers.build(side, shape, where, dtype, setting == 'as shipped')
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, **({} if setting == 'as shipped' else dict(fused=True)))

    def step():
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value
    with FlopCounterMode(display=False) as flops, sdpa_kernel(SDPBackend.MATH):              # the only one whose products it counts
        step()
    if compiled:
        for part in module.blocks if side == 'ours' else [module]:       # ours as train.py does it
            part.compile(dynamic=False)
    for _ in range(5):
        step()
    if where.startswith('cuda'):                                         # the peak of memory begins here
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == 'linux':
        with open('/proc/self/clear_refs', 'w') as f:
            f.write('5')
    print(json.dumps(dict(flops=flops.get_total_flops(), parameters=sum(p.numel() for p in module.parameters()))), flush=True)
    for line in sys.stdin:
        end, times = time.perf_counter() + float(line), []
        while time.perf_counter() < end:
            began = time.perf_counter()
            value = step().item()                                        # waits for the device
            times.append(time.perf_counter() - began)
        assert np.isfinite(value), f'{side}: loss {value}'
        peak = (torch.cuda.max_memory_allocated() / 1e9 if where.startswith('cuda') else
                int(re.search(r'VmHWM:\s+(\d+)', open('/proc/self/status').read())[1]) / 1e6 if sys.platform == 'linux' else None)
        print(json.dumps(dict(seconds=statistics.median(times), memory_gb=peak)), flush=True)


def matmul_rate(dtype, n=2048, seconds=.5):
    """ Operations per second of an n x n product: what this machine gives, now. """
    where = pick_device(device)
    a, b = (torch.randn(n, n, device=where, dtype=dtype) for _ in range(2))
    for _ in range(2):
        (a @ b)[0, 0].item()
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        for _ in range(1 if where == 'cpu' else 100):
            c = a @ b
            count += 1
        c[0, 0].item()
    return 2 * n ** 3 * count / (time.perf_counter() - began)


def step():
    """ First every side alone in every setting; then the best setting of each, and each as shipped, by turns. """
    s, chosen, rows = peers.SHAPES[shape], [], []
    for side in sides.split(','):
        if side not in peers.SIDES:
            stop(f'sides={sides!r}: choose from {", ".join(peers.SIDES)}')
        alone = {}
        for setting in settings.split(','):
            if side == 'ours' and setting == 'as shipped':
                continue
            worker = Worker(side, s, setting)
            answer = worker.turn(seconds)
            worker.end()
            if 'error' in answer:
                print(f'{side:<12}{setting:<20} {answer["error"]}', flush=True)
            else:
                alone[setting] = answer['seconds']
                print(f'{side:<12}{setting:<20} {1000 * answer["seconds"]:>8.1f} ms', flush=True)
        best = min((s for s in alone if s != 'as shipped'), key=alone.get, default=None)
        chosen += [(side, setting) for setting in (best, 'as shipped') if setting in alone]
    if not chosen:
        stop('no side could be measured: the lines above say why')
    workers = {(side, setting): Worker(side, s, setting) for side, setting in chosen}
    times, memory, peaks = {key: [] for key in chosen}, {}, []
    for i in range(rounds):
        peaks.append(matmul_rate(torch.bfloat16))
        for key, worker in workers.items():
            answer = worker.turn(seconds)
            if 'error' in answer:
                stop(f'{" ".join(key)}: {answer["error"]}; without it: --sides')
            times[key].append(answer['seconds'])
            memory[key] = answer['memory_gb']
        print(f'round {i + 1}/{rounds}  matmul {peaks[-1] / 1e12:.2f} TFLOP/s  '
              + '  '.join(f'{side} {1000 * times[side, setting][-1]:.1f}' for side, setting in chosen), flush=True)
    first = chosen[0]
    print(f'\n{shape}: ' + ', '.join(f'{name} {value:,}' for name, value in s.items()))
    print(f'matmul, bfloat16: {statistics.median(peaks) / 1e12:.2f} TFLOP/s')
    print(f'{"":<12}{"setting":<20}{"ms":>8}{"tokens/s":>10}   {f"time / {first[0]}":<22}{"M params":>9}{"GFLOP":>7}'
          f'{"of matmul":>10}{"GB":>6}')
    for key in chosen:
        ratios, ready = [t / base for t, base in zip(times[key], times[first])], workers[key].ready
        ms, ratio = 1000 * statistics.median(times[key]), statistics.median(ratios)
        utilisation = statistics.median(ready['flops'] / t / peak for t, peak in zip(times[key], peaks))
        rows.append(dict(side=key[0], setting=key[1], ms=ms, tokens_per_s=s['batch'] * s['length'] / ms * 1000, ratio=ratio,
                         ratio_least=min(ratios), ratio_most=max(ratios), utilisation=utilisation, memory_gb=memory[key], **ready))
        print(f'{key[0]:<12}{key[1]:<20}{ms:>8.1f}{rows[-1]["tokens_per_s"]:>10,.0f}   '
              f'{f"{ratio:.2f} ({min(ratios):.2f}, {max(ratios):.2f})":<22}'
              f'{ready["parameters"] / 1e6:>9.1f}{ready["flops"] / 1e9:>7.0f}{utilisation:>10.0%}{memory[key] or 0:>6.2f}')
    for worker in workers.values():
        worker.end()
    if save:
        with open(save, 'w') as f:
            json.dump(dict(command=sys.argv[1:], shape=s, torch=torch.__version__, threads=threads, matmul=peaks, rows=rows), f, indent=1)


# ---- scaling

def scaling():
    """ Our step, one of its sizes at a time halved and doubled. """
    if set(scale.split(',')) - {'depth', 'width', 'length', 'batch'}:
        stop(f'scale={scale!r}: choose from depth, width, length, batch')
    base = peers.SHAPES[shape]
    points = [('', base)] + [(f'{name} {int(base[name] * factor)}', base | {name: int(base[name] * factor)})
                             for name in scale.split(',') for factor in (.5, 2)]
    setting, table = settings.split(',')[-1], {}
    for i in range(rounds):
        for label, s in points:
            s = s | dict(heads=max(1, s['width'] // 64))
            worker = Worker('ours', s, setting)
            answer = worker.turn(seconds)
            worker.end()
            if 'error' in answer:
                stop(f'{label or "as it is"}: {answer["error"]}')
            answer |= worker.ready | dict(peak=matmul_rate(torch.bfloat16), tokens=s['batch'] * s['length'])
            table.setdefault(label, []).append(answer)
        print(f'round {i + 1}/{rounds}', flush=True)
    print(f'\n{shape}: ' + ', '.join(f'{name} {value:,}' for name, value in base.items()) + f'; {setting}')
    print(f'{"":<12}{"ms":>8}{"tokens/s":>10}{"time":>7}{"GFLOP":>8}{"work":>7}{"of matmul":>10}{"M params":>9}{"GB":>6}')
    first = statistics.median(a['seconds'] for a in table[''])
    for label, answers in table.items():
        t, a = statistics.median(a['seconds'] for a in answers), answers[0]
        print(f'{label or "as it is":<12}{1000 * t:>8.1f}{a["tokens"] / t:>10,.0f}{t / first:>7.2f}{a["flops"] / 1e9:>8.0f}'
              f'{a["flops"] / table[""][0]["flops"]:>7.2f}'
              f'{statistics.median(a["flops"] / a["seconds"] / a["peak"] for a in answers):>10.0%}'
              f'{a["parameters"] / 1e6:>9.1f}{a["memory_gb"] or 0:>6.2f}')
    if save:
        with open(save, 'w') as f:
            json.dump(dict(command=sys.argv[1:], shape=base, setting=setting, torch=torch.__version__, threads=threads, rows=table), f,
                      indent=1)


# ---- samplers

def samplers():
    """ Seconds a text of every sampler on an untrained network of the shape, beside an autoregressive decoder of its depth and width with
    its cache of keys and values (transformers' GPT-2): what they write does not matter here, quality is evaluate.py's to say. """
    from transformers import GPT2Config, GPT2LMHeadModel

    import sample
    s, where = peers.SHAPES[shape], pick_device(device)
    L, V, autocast = s['length'], s['vocab_size'], lambda: torch.autocast(torch.device(where).type, torch.bfloat16)
    model = peers.ours(s, None)[0].to(where).eval()
    model.text_head.weight.data.normal_(std=s['width'] ** -.5)
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=L + 1, n_embd=s['width'], n_layer=s['depth'], n_head=s['heads']))
    gpt.to(where).eval()
    run = SimpleNamespace(model=model, device=where, text=MaskedText(V), streams=model.config.streams, L=L, row_calls=0, autocast=autocast,
                          out_dir='', lengths=None, banned=[], tokenizer=SimpleNamespace(eos=0, pad=1),
                          latent=GaussianLatents(torch.ones(s['latent_dim'], device=where)))
    calls = {}

    def ours(n, name, steps):
        def go():
            run.row_calls, began = 0, time.perf_counter()
            sample.write(run, *sample.blank(run, n), torch.randn(n, s['n_latents'], s['latent_dim']), sampler=name, steps=steps)
            calls[f'{name}, {steps} steps, batch {n}'] = run.row_calls / n
            return n / (time.perf_counter() - began)
        return go

    @torch.inference_mode()
    def autoregressive(n):
        began = time.perf_counter()
        with autocast():
            gpt.generate(torch.zeros(n, 1, dtype=torch.int64, device=where), max_new_tokens=L, min_new_tokens=L, do_sample=True,
                         pad_token_id=1)
        return n / (time.perf_counter() - began)
    for n in (1, batch_size):
        jobs = {f'autoregressive, batch {n}': lambda: autoregressive(n)}
        for name in SAMPLERS:
            for steps in (L, L // 8):
                jobs[f'{name}, {steps} steps, batch {n}'] = ours(n, name, steps)
        medians = compare(jobs, 'texts/s')
        for name in medians:
            print(f'{name:<40} {1000 / medians[name]:>9.1f} ms a text, {calls.get(name, L):>6.1f} network calls')
        print()


# ---- loader

def loader():
    """ Batches of random rows, from the memory maps and from a .npy and a .npz a sample, as systems before this one had it; both are in the
    page cache. Then the share of the memory maps in a step of train.py. """
    data = PackedDataset(dataset_folder(dataset), 'train')
    if data.stats is None or len(data) < batch_size:
        stop(f'{data.folder}: the loader is measured on {batch_size} pairs of text and latent or more')
    rows, generator = min(samples, len(data)), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        tokens, latents = data.rows(np.arange(rows))
        for i in range(rows):
            np.savez(f'{folder}/{i}.npz', input_ids=tokens[i].numpy())
            np.save(f'{folder}/{i}.npy', latents[i].numpy())

        def samples_per_s(read):
            count, start = 0, time.perf_counter()
            while time.perf_counter() < start + 1:
                order = generator.permutation(rows)
                for i in range(0, rows - batch_size + 1, batch_size):
                    read(order[i:i + batch_size])
                    count += batch_size
            return count / (time.perf_counter() - start)

        def a_file_a_sample(batch):
            pairs = []
            for i in batch:
                with np.load(f'{folder}/{i}.npz') as arrays:
                    pairs.append((arrays['input_ids'], np.load(f'{folder}/{i}.npy')))
            return [torch.from_numpy(np.stack(column)) for column in zip(*pairs)]
        assert all(torch.equal(a, b) for a, b in zip(a_file_a_sample([3, 1]), data.rows(np.array([3, 1]))))
        medians = compare({'a file a sample': lambda: samples_per_s(a_file_a_sample),
                           'packed': lambda: samples_per_s(data.rows)}, 'samples/s')
    step = batch_size * data.seq_len / tokens_per_s(*model_knobs(), f'--log_interval={max(1, max_iters // 3)}')
    read = batch_size / medians['packed']
    print(f'a step of {batch_size} rows takes {1000 * step:.1f} ms, reading them {1000 * read:.3f} ms: {read / step:.2%}')


# ---- encoder

def embedding():
    """ The same model, texts and batch size, in float32. """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        stop('to compare with it: pip install sentence-transformers')
    data = PackedDataset(dataset_folder(dataset), 'train')
    texts = [data.text(int(i)) for i in np.random.default_rng(0).permutation(len(data))[:samples]]
    ours = load_encoder(encoder, batch_size=embed_batch_size)
    theirs = SentenceTransformer(encoder if os.path.isdir(encoder) else ours.record['id'], device='cpu')

    def encode_ours():
        return ours(texts)[:, 0]

    def encode_theirs():
        return theirs.encode(texts, batch_size=embed_batch_size, convert_to_tensor=True, show_progress_bar=False)

    def texts_per_s(encode):
        start = time.perf_counter()
        encode()
        return len(texts) / (time.perf_counter() - start)
    print(f'largest difference of an embedding: {(encode_ours() - encode_theirs()).abs().max():.1e}')
    compare({'sentence-transformers': lambda: texts_per_s(encode_theirs), 'encoders.py': lambda: texts_per_s(encode_ours)}, 'texts/s')


def main():
    configure(globals())
    if shape not in peers.SHAPES:
        stop(f'shape={shape!r}: choose from {", ".join(peers.SHAPES)}')
    torch.set_num_threads(threads)
    benches = dict(guard=guard, trainings=trainings, step=step, scaling=scaling, samplers=samplers, loader=loader, encoder=embedding)
    for name in what.split(','):
        if name not in benches:
            stop(f'what={name!r}: choose from {", ".join(benches)}')
        print(f'{name}, {torch.get_num_threads()} threads')
        with stop_on_error():
            benches[name]()


if __name__ == '__main__':
    main()
