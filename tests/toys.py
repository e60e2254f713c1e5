""" A text distribution small enough to enumerate (V = 3, L = 4), networks that are tables over its
4^4 noisy states, and random networks. Small texts, encoders and run folders. """
import gzip
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import torch

from base.writing import sealed
from diffusion import GaussianLatents, MaskedText, modes_of
from model import Model, ModelConfig
from runs import checkpoint, run_folder
from runs.checkpoint import identity_of
from samplers import SAMPLERS, no_callback
from sampling.denoise import Denoiser
from sampling.knobs import SamplingKnobs
from sampling.run import Run
from sampling.texts import blank, write

V, L, MASK = 3, 4, 3
EOS, PAD = 1, 2                                              # of the V ids, where a text has an end
TEXTS = torch.tensor(list(itertools.product(range(V), repeat=L)))        # (81, 4)
STATES = torch.tensor(list(itertools.product(range(V + 1), repeat=L)))   # (256, 4), with MASK
FILL_MASKS = [name for name, row in SAMPLERS.items() if not row.is_causal]
WEIGHTS = (V + 1) ** torch.arange(L - 1, -1, -1)


def index(states):
    """ Row of STATES of each state (..., L). """
    return (states * WEIGHTS).sum(-1)


# ---- networks

SHAPE = dict(vocab_size=V, seq_len=L, latent_dim=2, n_latents=1, latent_tokens=1, depth=1, heads=1,
             width=2)


class Network(torch.nn.Module):
    """ What is asked of a model. Its hidden states are its logits, and its head leaves them alone.
    logits_of(tokens, z, t_text, t_latent) -> (B, L, V). shape: fields of ModelConfig. """
    importance = None

    def __init__(self, logits_of=None, **shape):
        super().__init__()
        self.config = ModelConfig(**SHAPE | shape)
        self.bias = torch.nn.Parameter(torch.zeros(1))
        if logits_of:
            self.logits_of = logits_of

    def forward(self, tokens, z, t_text, t_latent, positions=None, predict=('text', 'latent'),
                return_hidden=False, n_causal=0, given=None):
        logits = latents = None
        if 'text' in predict:
            logits = self.logits_of(tokens, z, t_text, t_latent)
            if positions is not None:
                logits = logits.flatten(0, 1)[positions]
        if 'latent' in predict and 'latent' in self.config.streams:
            latents = self.latents_of(tokens, z, t_text, t_latent)
        return logits, latents

    def text_head(self, hidden):
        return hidden


class Toy(Network):
    """ A network of text alone by a table (256, L, V) of logits; it does not read clocks. """

    def __init__(self, table):
        super().__init__(streams=('text',))
        self.table = table

    def logits_of(self, tokens, z, t_text, t_latent):
        return self.table[index(tokens)].float()


def as_v(z, x0, t):
    """ What a network predicts that sees x0 in z (B, N, D) at clock t (B,): v. """
    alpha_t, sigma_t = GaussianLatents(torch.ones(1)).alpha_sigma_like(t, z)
    return (alpha_t * z - x0) / sigma_t                                  # from x0 = a z_t - s v


class Known(Network):
    """ A two-stream network that says what its condition tells it: text logits that differ where
    the latents say nothing, and latents, as v, whose x0 is the first token of the text, or -1 where
    that is all MASK. It keeps its clocks. """

    def __init__(self, **shape):
        super().__init__(**shape)
        self.clocks = []

    def forward(self, tokens, z, t_text, t_latent, *args, **more):
        self.clocks.append((t_text[0].item(), t_latent[0].item()))
        return super().forward(tokens, z, t_text, t_latent, *args, **more)

    def logits_of(self, tokens, z, t_text, t_latent):
        conditional, null = torch.tensor([1., 0., 2.]), torch.tensor([0., 3., 0.])
        logits = torch.where((t_latent == 1)[:, None, None], null, conditional)
        return logits.expand(len(tokens), L, V)

    def latents_of(self, tokens, z, t_text, t_latent):
        is_blank = (tokens == MASK).all(1)
        x0 = torch.where(is_blank, -1., tokens[:, 0].float())
        return as_v(z, x0[:, None, None], t_latent)


def random_network(V=20, L=12, **more):
    """ A real network of three blocks with random weights. """
    torch.manual_seed(0)
    shape = dict(latent_dim=6, n_latents=2, latent_tokens=3, depth=3, heads=2, width=32,
                 latent_width=16)
    model = Model(ModelConfig(vocab_size=V, seq_len=L, **shape | more))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(.3 * torch.randn(p.shape))
    return model.eval()


def random_inputs(B=6, L=12, V=20, N=2, D=6):
    """ What it reads: tokens, latents, and the two clocks. """
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (B, L), generator=g)
    z = torch.randn(B, N, D, generator=g)
    return tokens, z, torch.rand(B, generator=g), torch.rand(B, generator=g)


def net_of(model=None, mode='unconditional+l2t+t2l', text=None, eos=EOS, pad=PAD, **more):
    """ The Denoiser of a model: by default of Known, on masked text. more: its other arguments. """
    model = Known() if model is None else model
    text = text or MaskedText(model.config.vocab_size)
    latent = None
    if 'latent' in model.config.streams:
        latent = GaussianLatents(torch.ones(model.config.latent_dim))
    return Denoiser(model, text, latent, eos, pad, modes_of(mode), **more)


def toy_run(net=None, **changes):
    """ A run.Run of a Denoiser, without a folder. A text is a list of its ids. """
    net = net or net_of()
    tokenizer = SimpleNamespace(eos=net.eos, pad=net.pad, kind='bpe', decode=lambda ids: ids,
                                encode=lambda text: [0] * len(text))
    stats = SimpleNamespace(standardise=lambda z: z, destandardise=lambda z: z)
    run = Run.__new__(Run)
    vars(run).update(
        net=net, tokenizer=tokenizer, stats=stats, out_dir='out/toy', encoder=None,
        config=dict(text_process='masked'), meta=dict(encoder=None))
    vars(run).update(changes)
    return run


def l2t(net, z, on_step=no_callback, **knobs):
    """ Tokens (n, L) written from standardised latents z (n, N, D). """
    knobs = SamplingKnobs(**knobs)
    return write(net, *blank(net, len(z), knobs), z, knobs, on_step=on_step)


# ---- laws

def text_law(seed=0):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(len(TEXTS), generator=g, dtype=torch.float64) ** 3
    return p / p.sum()


def optimal_denoiser(seed=0):
    """ p (81,) and the table of its network. """
    p = text_law(seed)
    return p, denoiser_of(p)


def denoiser_of(p):
    """ The table of log P(x^i = v | visible tokens of the state), of the law p (81,). """
    state = STATES[:, None]
    fits = ((state == MASK) | (state == TEXTS)).all(-1) * p                          # (256, 81)
    onehot = torch.nn.functional.one_hot(TEXTS, V).double()                          # (81, L, V)
    mass = torch.einsum('sx,xlv->slv', fits, onehot)
    table = mass / fits.sum(1)[:, None, None]
    return table.clamp(min=1e-300).log()


def random_denoiser(seed=1):
    """ A network that knows nothing of the data. """
    g = torch.Generator().manual_seed(seed)
    return torch.randn(len(STATES), L, V, generator=g, dtype=torch.float64)


def exact_bound(p, table, kind):
    """ Expected bound, nats per text, by enumerating texts and masks.  count: n ~ U{1..L}, L/n;
    continuous: E_t [1/t sum], with integral of t^(n-1) (1-t)^(L-n) dt = (n-1)! (L-n)! / L!. """
    log_p = table.log_softmax(-1)
    total = 0.0
    for bits in itertools.product([False, True], repeat=L):
        n = sum(bits)
        if not n:
            continue
        mask = torch.tensor(bits)
        seen = torch.where(mask, MASK, TEXTS)
        nll = -log_p[index(seen)].gather(-1, TEXTS[..., None])[..., 0]
        if kind == 'count':
            weight = 1 / n / math.comb(L, n)
        else:
            weight = math.factorial(n - 1) * math.factorial(L - n) / math.factorial(L)
        total += weight * (p * (nll * mask).sum(1)).sum().item()
    return total


def chain_law(table, shares):
    """ Law over TEXTS of the chain that, step by step, releases each masked position with
    probability u of `shares`. """
    return release_chain(table, [(u, 0.0) for u in shares])


def release_chain(table, steps):
    """ The same with remasking: steps of (probability that a masked position is released, that a
    visible one is masked again). """
    law = torch.zeros(len(STATES), dtype=torch.float64)
    law[-1] = 1                                                          # all MASK
    probs = table.softmax(-1)
    for u, g in steps:
        new = torch.zeros_like(law)
        for i in law.nonzero().flatten().tolist():
            moves = []                                     # per position: (token, probability)
            for position, token in enumerate(STATES[i].tolist()):
                if token != MASK:
                    moves.append([(token, 1 - g), (MASK, g)])
                    continue
                written = [(v, u * probs[i, position, v].item()) for v in range(V)]
                moves.append([(MASK, 1 - u), *written])
            for combination in itertools.product(*moves):
                tokens, factors = zip(*combination)
                chance = math.prod(factors)
                if chance:
                    new[index(torch.tensor(tokens))] += law[i] * chance
        law = new
    return law[index(TEXTS)]


def any_order_law(table, block=L):
    """ Law over TEXTS of: a uniformly chosen masked position of the leftmost unfinished block at a
    time, x ~ Cat(p). """
    law = torch.zeros(len(STATES), dtype=torch.float64)
    law[-1] = 1
    probs = table.softmax(-1)
    for _ in range(L):
        new = torch.zeros_like(law)
        for i in law.nonzero().flatten().tolist():
            masked = (STATES[i] == MASK).nonzero().flatten().tolist()
            of_block = [position for position in masked if position // block == masked[0] // block]
            for position in of_block:
                for v in range(V):
                    state = STATES[i].clone()
                    state[position] = v
                    new[index(state)] += law[i] / len(of_block) * probs[i, position, v]
        law = new
    return law[index(TEXTS)]


def chi_square_z(samples, law):
    """ How many standard deviations the chi-square of samples (n, L) lies above its mean under
    `law` (81,). """
    of_states = torch.bincount(index(samples), minlength=len(STATES))
    counts = of_states[index(TEXTS)].double()
    assert counts.sum() == len(samples), 'a sample still holds MASK'
    expected = law * len(samples)
    keep = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[keep].sum()
    freedom = keep.sum().item() - 1
    return (statistic.item() - freedom) / math.sqrt(2 * freedom)


def flat(figures):
    """ {'control/metric': value} of a task's Figures, '..._se': its standard error. """
    found = {}
    for (control, metric), (value, se) in figures.items():
        key = f'{control}/{metric}' if control else metric
        found[key] = value
        if se is not None:
            found[f'{key}_se'] = se
    return found


# ---- words, texts of them, and encoders that know them

WORDS = ('a the dog cat runs sits on beach mat and red big small man woman walks along river in '
         'snow').split()
LINES = [f'{WORDS[i % 20]} {WORDS[i * 7 % 20]} {WORDS[i * 3 % 19]} walks number {i}.'
         for i in range(150)]


def write_lines(path, lines=LINES):
    return put(path, '\n'.join(lines) + '\n')


def put(path, content=''):
    """ The path of a file with this text, or these bytes, in a folder that is made for it. Where
    its name ends in .gz it is packed. """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content.encode() if isinstance(content, str) else content
    is_packed = path.name.lower().endswith('.gz')
    path.write_bytes(gzip.compress(content) if is_packed else content)
    return path


def save_tokenizer(folder):
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    vocab = {word: i for i, word in enumerate(['[PAD]', '[UNK]', '[CLS]', '[SEP]'] + WORDS)}
    tok = Tokenizer(models.WordLevel(vocab, unk_token='[UNK]'))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.post_processor = processors.TemplateProcessing(
        single='[CLS] $A [SEP]', special_tokens=[('[CLS]', 2), ('[SEP]', 3)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token='[PAD]', unk_token='[UNK]', cls_token='[CLS]',
        sep_token='[SEP]', model_max_length=64).save_pretrained(folder)
    return len(vocab)


def save_encoder(folder, kind='bert'):
    """ A random encoder of an architecture in the table, in a folder as a hub would give it. """
    import transformers as T           # takes seconds, and few tests need it
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder
    torch.manual_seed(0)
    V = save_tokenizer(folder)
    small = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                 intermediate_size=64, pad_token_id=0)
    if kind == 'bert':
        model = T.BertModel(T.BertConfig(**small))
    elif kind == 'roberta':
        model = T.XLMRobertaModel(T.XLMRobertaConfig(**small, max_position_embeddings=50))
    elif kind == 'qwen3':
        model = T.Qwen3Model(T.Qwen3Config(**small, num_key_value_heads=2, head_dim=8))
    elif kind == 't5':
        model = T.T5EncoderModel(T.T5Config(vocab_size=V, d_model=32, d_kv=8, d_ff=64,
                                            num_layers=2, num_heads=4))
    elif kind == 'sonar':
        model = M2M100Encoder(T.M2M100Config(
            vocab_size=V, d_model=32, encoder_layers=2, encoder_attention_heads=4,
            encoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0))
    model.save_pretrained(folder)
    return str(folder)


# ---- run folders, without a training

CONFIG = ModelConfig(vocab_size=50, seq_len=8, latent_dim=6, latent_tokens=2, depth=2, heads=2,
                     width=16)
KNOBS = dict(text_process='masked', text_schedule='loglinear', latent_schedule='vp',
             latent_target='v', optimizer='adamw', seed=1)
META = dict(format=2, tokenizer=dict(kind='byte', vocab_size=258, eos=256, pad=257), encoder=None,
            latent_shape=None, token_dtype='uint16', max_tokens=7, splits={}, files={})


def states(step):
    """ All that `save` takes, every number of it a function of the step. """
    torch.manual_seed(step)
    model = {name: torch.randn_like(x) for name, x in Model(CONFIG).state_dict().items()}
    tensors = dict(model=model, ema={name: x + 1 for name, x in model.items()},
                   optimizer={f'exp_avg.{name}': x * 2 for name, x in model.items()},
                   rng={f'rank{rank}.cpu': torch.get_rng_state() for rank in range(2)})
    known = dict(history=[.5, 1e-30, float(step)], identity=identity_of(CONFIG, KNOBS, META),
                 knobs=KNOBS)
    return tensors, known


def save_each(out, *steps, keep=9, best=()):
    for step in steps:
        checkpoint.write_checkpoint(out, step, *states(step), keep=keep, best=step in best)
    return out


def new_run(tmp_path, *steps, best=()):
    """ out_dir of a run with these checkpoints. """
    data = tmp_path / 'dataset'
    data.mkdir()
    (data / 'meta.json').write_text(sealed(META))
    out = tmp_path / 'run'
    run_folder.take(out)
    run_folder.begin(dict(out_dir=str(out), wandb_project='', seed=1, max_iters=9), data, 0)
    return save_each(out, *steps, best=best)
