"""
A trained run: what it can do, and what it writes, strings in, strings or latents out.

    run = Run('out/quickstart')
    run.write(['Return a list.'], rerank=8)     # l2t: a text from the embedding of a text
    run.infill(['Return [MASK:2] list.'])       # the gaps of a text
    run.edit(['a red bike'], towards=['blue'], away=['red'])
    run.embed(['Return a list.'])               # t2l: a latent from a text
    run.complete(latents, given, ['a heart'])   # the rest of a latent of which a part is given
    run.sample(4)                               # both from noise

The keywords of these methods are the knobs of sampling/knobs.py, and besides
    num_samples      so many of each text or latent, one below the other
    on_step          a callback as samplers.py has it, such as recorder.Recorder
With a seed, text i of a list is written the same whatever the other texts are, and in batches of
any size, but for the last bits of sums (noise.py).

An unknown keyword is a TypeError, and what the run has not learned a ValueError of one line.

Latents are raw: as the encoder gives them, (n, N, D) float32 on the host. Where texts are not to be
embedded, they may also be tokens (n, L).
Letters: n texts, L text tokens, N latent vectors, D latent dims, C width.
"""
import os
import re
from collections.abc import Sized
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import processes
from base.files import one_line
from base.machine import pick_device, pick_dtype
from configurator import here_or_beside
from corpora.tokenizers import RESIDUES, load_tokenizer, spelled
from data import load_stats
from diffusion import GaussianLatents, MaskedText, is_end, modes_of
from encoders import CODE, TABLE, check_texts, load_encoder
from noise import rows_of, rows_of_parts
from runs.checkpoint import as_written, load_model
from samplers import no_callback
from sampling.beams import check_one_text, for_drafts, write_by_beams
from sampling.denoise import FILLS, Denoiser
from sampling.drafts import nearest_drafts
from sampling.inputs import MOST_TEMPLATES, embeddings, moved, pack, read_template
from sampling.knobs import SamplingKnobs
from sampling.latents import make_latents, write_both
from sampling.likelihood import changed_by, nats_per_token
from sampling.texts import blank, settle, write

# -----------------------------------------------------------------------------
# What a direction needs

WRITES = (*FILLS, 'causal')        # modes that teach to write a text
MAKES = ('t2l', 'unconditional')   # modes that teach to make a latent


@dataclass
class Needs:
    """ What a run must have for a direction (NEEDS, below), or for a task in tasks/. """
    streams: tuple = ()
    modes: tuple = ()              # of each tuple in it, the run was trained for one mode or more
    masked_text: bool = False      # its text process is MaskedText

    def missing(self, net):
        """ What the network of a run lacks, as the rest of a sentence that begins with the run's
        name, or ''. """
        has_modes = all(net.learned & set(some) for some in self.modes)
        if not set(self.streams) <= set(net.streams) or not has_modes:
            return f'has streams {net.streams} and was trained for {", ".join(sorted(net.learned))}'
        if self.masked_text and not isinstance(net.text, MaskedText):
            return 'was not trained on masked text'
        return ''


BOTH = ('text', 'latent')
NEEDS = {
    'text': Needs(('text',), (WRITES,)),
    'latent': Needs(('latent',), (MAKES,)),
    'l2t': Needs(BOTH, (WRITES,)),
    't2l': Needs(BOTH, (MAKES,)),
    'complete': Needs(BOTH, (('complete',),)),
    't2l2t': Needs(BOTH, (WRITES, MAKES)),
    'unconditional': Needs(BOTH, (('unconditional',),), masked_text=True),
    'infill': Needs(('text',), (WRITES,)),
    'edit': Needs(BOTH, (FILLS,), masked_text=True),
}

# -----------------------------------------------------------------------------
# The run

N_STANDARD = 20                # residues that a protein is written of: the first of RESIDUES


def never_written(tokenizer, has_length):
    """ Ids that no sampler writes: the residues of a protein but the 20 standard ones, and EOS and
    PAD where the length of a text is given. """
    ids = []
    if tokenizer.kind == 'esm':
        ids += range(N_STANDARD, len(RESIDUES))
    if has_length:
        ids += [tokenizer.eos, tokenizer.pad]
    return ids


class Run:
    """
    out_dir     a run folder, or an export, here or next to the scripts; or the id of an export on
                the Hugging Face hub, with `revision`, a whole commit. If the folder exists, the
                hub is not asked
    which       best | latest | a step, as step-00001000
    encoder     the folder where its encoder lies now; '': where it was for prepare.py
    """

    def __init__(self, out_dir, which='best', device='auto', dtype='auto', encoder='',
                 revision=''):
        out_dir = here_or_beside(out_dir)
        if revision and not os.path.isdir(out_dir):
            if not re.fullmatch('[0-9a-f]{40}', revision):
                raise ValueError(f'revision={revision!r}: expected a whole commit, 40 of 0-9 and '
                                 'a-f; what a branch names may change')
            from huggingface_hub import snapshot_download
            out_dir = snapshot_download(out_dir, revision=revision)
        self.out_dir = out_dir
        device = pick_device(device)

        # the network, with averaged weights; the knobs of training; meta.json of its data
        model, self.config, self.meta, self.checkpoint = load_model(out_dir, which, device)

        # what lies in data/
        self.folder = os.path.join(out_dir, 'data')
        self.tokenizer = load_tokenizer(self.folder, self.meta)
        self.stats = load_stats(self.folder, self.meta)    # of the latents, or None
        self.encoder = None                                # loaded when it is needed
        self.encoder_folder = encoder

        # what it was trained for: the modes, the processes; quantiles of the texts' lengths, where
        # it does not learn when a text ends
        latent = None
        with as_written(out_dir):
            learned = modes_of(self.config['mode'])
            lengths = [*map(int, self.config.get('lengths') or ())] or None
            text = processes.text_process(self.config, model.config.vocab_size)
            if self.stats:
                latent = GaussianLatents(self.stats.live.to(device),
                                         self.config['latent_schedule'],
                                         self.config['latent_target'])
        if model.config.clusters:
            text.take_clusters(model.cluster_of.cpu())
        self.net = Denoiser(
            model, text, latent,
            eos=self.tokenizer.eos,
            pad=self.tokenizer.pad,
            learned=learned,
            lengths=lengths,
            banned=never_written(self.tokenizer, bool(lengths)),
            dtype=pick_dtype(dtype, device))

    # ---- what it can do

    def can(self, direction):
        return not NEEDS[direction].missing(self.net)

    def check(self, direction):
        """ ValueError where the run cannot do it. """
        missing = NEEDS[direction].missing(self.net)
        if missing:
            hint = ''
            if len(self.net.streams) == 2:
                can_be_causal = self.config['text_process'] == 'masked' and not self.net.lengths
                every = 'unconditional+l2t+t2l' + '+causal' * can_be_causal
                every += '+complete' * bool(self.net.model.config.spatial)
                hint = f'; --mode={every} trains every direction'
            raise ValueError(f'{self.out_dir} {missing}: no {direction} from it{hint}')

    # ---- texts

    def write(self, texts=None, latents=None, num_samples=1, lengths_of=None,
              on_step=no_callback, **knobs):
        """
        l2t: a text from each latent (raw, not standardised), or from the embedding of each text.
        Returns a list of str. The knob rerank: the nearest of so many drafts, embedded again.
        The knob beams: of the texts that so many beams find, the likeliest per token.
        lengths_of (n, L): tokens, whose lengths the texts get where the run does not learn lengths.
        """
        if (texts is None) == (latents is None):
            raise ValueError('write: give texts, or latents')
        self.check('l2t')
        knobs = SamplingKnobs(**knobs)
        check_one_text(knobs, num_samples)
        raw = embeddings(self, texts) if latents is None else self.to_raw(latents)
        rows = rows_of(len(raw), num_samples)
        if lengths_of is not None:
            lengths_of = lengths_of.repeat_interleave(num_samples, 0)
        raw = raw.repeat_interleave(num_samples, 0)
        return self.write_from(raw, rows, knobs, num_samples > 1, lengths_of, on_step)

    def write_from(self, raw, rows, knobs, must_differ, lengths_of, on_step):
        """ The texts of raw latents (n, N, D), a list of str: what `write` does once its arguments
        are read. knobs: SamplingKnobs. rows (n, 2): as noise.rows_of gives them. must_differ: more
        than one text is wanted of the same latent, so these shall not be equal. """
        if knobs.rerank > 1:
            # a search finds one text of each latent, and has no steps to show
            if not must_differ and on_step is no_callback:
                knobs = for_drafts(self.net, knobs)
            return nearest_drafts(self, raw, rows, knobs, lengths_of, on_step)
        z = self.stats.standardise(raw)
        if knobs.beams > 1:
            return self.decode(write_by_beams(self.net, z, knobs)[:, 0])
        tokens, known_mask = blank(self.net, len(raw), knobs, lengths_of, rows)
        tokens = write(self.net, tokens, known_mask, z, knobs, must_differ=must_differ,
                       on_step=on_step, rows=rows)
        return self.decode(tokens)

    def infill(self, templates, like=None, latents=None, num_samples=1, on_step=no_callback,
               **knobs):
        """ Fills the gaps of each template: [MASK], [MASK:3] for three tokens, [MASK:*] for the
        whole rest, [MASK:2-6] for the length that the network finds likeliest. like: a text for
        each template, whose embedding the result shall have; or latents. Returns a list of str. """
        if like is not None and latents is not None:
            raise ValueError('infill: give like, or latents')
        if like is not None:
            latents = embeddings(self, like)
        return self.fill(templates, latents, num_samples, on_step, **knobs)[0]

    def fill(self, templates, latents=None, num_samples=1, on_step=no_callback, **knobs):
        """ As infill, with nats per token (n,) of each; None where no gap has a range. """
        self.check('infill')
        check_texts(templates)
        knobs = SamplingKnobs(**knobs)

        # a row for each length of each template
        z = self.latents_of(templates, latents)
        rows = rows_of(len(templates), num_samples)
        templates = [template for template in templates for _ in range(num_samples)]
        read = [read_template(self, template, knobs.length) for template in templates]
        tokens, known_mask, inner = (torch.cat(parts) for parts in zip(*read))
        n_rows = torch.tensor([len(variants) for variants, *_ in read])
        if z is not None:
            z = z.repeat_interleave(num_samples, 0).repeat_interleave(n_rows, 0)
        rows = rows_of_parts(rows, n_rows, MOST_TEMPLATES)
        sampler, _ = settle(self.net, knobs, z is not None, from_text=True)
        if sampler.is_causal:
            self.check_ends_in_gaps(tokens, known_mask)
        tokens = write(self.net, tokens, known_mask, z, knobs, inner, num_samples > 1, on_step,
                       rows)
        if len(tokens) == len(templates):
            return self.decode(tokens), None

        # the best length of each
        nats = nats_per_token(self.net, tokens, z, knobs)
        first = n_rows.cumsum(0) - n_rows                                # (n,)
        fewest = [some.argmin() for some in nats.split(n_rows.tolist())]
        best = first + torch.stack(fewest)
        return self.decode(tokens[best]), nats[best]

    def edit(self, texts, like=(), towards=(), away=(), latents=None, num_samples=1,
             on_step=no_callback, **knobs):
        """
        Each text, changed towards the embedding of a text in `like`; or towards its own plus that
        of a text in `towards`, minus that of one in `away`; or towards latents. These are of n
        texts, or of one for all. strength: the share of its tokens that may change, those that lose
        most; a text keeps its number of tokens. Returns a list of str.
        """
        self.check('edit')
        if bool(like) + bool(towards or away) + (latents is not None) != 1:
            raise ValueError('edit: give like, or towards and away, or latents')
        check_texts(texts)
        for name, some in (('like', like), ('towards', towards), ('away', away)):
            is_list = isinstance(some, Sized) and not isinstance(some, str)
            if not is_list or len(some) not in (0, 1, len(texts)):
                raise ValueError(f'{name}={some!r}: expected a list of 1 or {len(texts)} texts')
        knobs = SamplingKnobs(**knobs)
        now = embeddings(self, texts)
        if like:
            latents = embeddings(self, like)
        elif latents is None:
            latents = moved(self, now, towards, away)
        raw = same_number(texts, self.to_raw(latents))

        # what is to change is written anew, from the latent and from all that stays
        rows = rows_of(len(texts), num_samples)
        tokens = self.pack(texts).repeat_interleave(num_samples, 0)
        z_now = self.stats.standardise(now).repeat_interleave(num_samples, 0)
        z = self.stats.standardise(raw).repeat_interleave(num_samples, 0)
        masked = changed_by(self.net, tokens, z_now, z, knobs, rows)
        tokens = torch.where(masked, self.net.text.mask_id, tokens)
        tokens = write(self.net, tokens, ~masked, z, knobs, masked, num_samples > 1, on_step, rows)
        return self.decode(tokens)

    def sample(self, n, **knobs):
        """ A list of n texts, with latents of their own where the run has learned that. """
        if self.can('unconditional'):
            return self.sample_both(n, **knobs)[0]
        return self.sample_text(n, **knobs)

    def sample_text(self, n, on_step=no_callback, **knobs):
        """ n texts from text alone. """
        self.check('text')
        knobs = SamplingKnobs(**knobs)
        tokens, known_mask = blank(self.net, n, knobs)
        return self.decode(write(self.net, tokens, known_mask, None, knobs, on_step=on_step))

    # ---- latents

    def embed(self, texts, num_samples=1, on_step=no_callback, **knobs):
        """ t2l: a latent of each text, made by diffusion. (Not by the encoder: that is encode, and
        embeddings, which also warns.) """
        self.check('t2l')
        tokens = self.pack(texts)
        rows = rows_of(len(tokens), num_samples)
        tokens = tokens.repeat_interleave(num_samples, 0)
        knobs = SamplingKnobs(**knobs)
        z = make_latents(self.net, tokens, len(tokens), knobs, rows, on_step=on_step)
        return self.raw_latents(z)

    def complete(self, latents, given, texts=None, num_samples=1, **knobs):
        """ Latents (n, N, D) whose vectors given (n, N) bool stay. The others are drawn, each with
        its text where there are texts. """
        self.check('complete')
        known = self.stats.standardise(self.to_raw(latents))
        given = torch.as_tensor(given, dtype=torch.bool)
        if given.shape != known.shape[:2]:
            raise ValueError(f'given: shape {tuple(given.shape)}, expected '
                             f'{tuple(known.shape[:2])}')
        tokens = None
        if texts is not None:
            if len(texts) != len(known):
                raise ValueError(f'complete: {len(texts)} texts for {len(known)} latents, expected '
                                 'one for each')
            tokens = self.pack(texts).repeat_interleave(num_samples, 0)
        rows = rows_of(len(known), num_samples)
        known = known.repeat_interleave(num_samples, 0)
        given = given.repeat_interleave(num_samples, 0)
        z = make_latents(self.net, tokens, len(known), SamplingKnobs(**knobs), rows, known, given)
        return self.raw_latents(z)

    def sample_latents(self, n, **knobs):
        """ n latents of no text. """
        self.check('latent')
        return self.raw_latents(make_latents(self.net, None, n, SamplingKnobs(**knobs)))

    def sample_both(self, n, on_step=no_callback, **knobs):
        """ n texts, and a latent of each. """
        self.check('unconditional')
        tokens, z = write_both(self, n, SamplingKnobs(**knobs), on_step)
        return self.decode(tokens), self.raw_latents(z)

    def round_trip(self, texts, num_samples=1, on_step=no_callback, **knobs):
        """ t2l2t: a latent of each text, and a text from that. Returns texts and latents. """
        self.check('t2l2t')
        check_one_text(SamplingKnobs(**knobs), num_samples)
        tokens = self.pack(texts)
        rows = rows_of(len(tokens), num_samples)
        raw = self.embed(tokens, num_samples, **knobs)
        tokens = tokens.repeat_interleave(num_samples, 0)
        knobs = SamplingKnobs(**knobs)
        return self.write_from(raw, rows, knobs, num_samples > 1, tokens, on_step), raw

    # ---- what it says of texts

    def nats(self, texts, latents=None, **knobs):
        """ How unlikely the network finds each text, from latents or from text alone: nats per
        token, (n,) float64. Exact where the run has learned mode=causal, else the bound of
        diffusion (sampling/likelihood.py). A text that it wrote may have more tokens when it is
        read: the end of one that is too long is left out. """
        self.check('text')
        tokens = self.pack(texts, cut=True)
        z = self.latents_of(texts, latents)
        return nats_per_token(self.net, tokens, z, SamplingKnobs(**knobs))

    def encode(self, texts):
        """ Latents of texts, by the encoder that made the run's data. """
        check_texts(texts)
        texts = [spelled(self.tokenizer.kind, text) for text in texts]
        return torch.as_tensor(self.load_encoder()(texts))

    def load_encoder(self):
        """ ValueError where there is none, or it has changed. """
        # once: its weights are read, and their digest is compared
        if self.encoder is None:
            record = self.meta['encoder']
            if record is None:
                raise ValueError(f'{self.out_dir}: its latents were given without their encoder, '
                                 'so no text can be embedded; give it latents, --latents=FILE.npy')
            # where it lies now: nowhere else, in a folder, or on the hub by a name of prepare.py
            where = self.encoder_folder
            if record['id'] in ('lsa', *CODE):
                if where not in ('', record['id']):
                    raise ValueError(f'encoder={where}: that of {self.out_dir} is {record["id"]}, '
                                     'which lies in no folder of its own: leave it out')
                where = self.folder
            elif where in TABLE:
                where = TABLE[where]['id']
            self.encoder = load_encoder(record, folder=where or None, device=self.net.device)
        return self.encoder

    def cosines(self, texts, latents):
        """ Of the embeddings of n texts with latents, (n,). """
        raw = same_number(texts, self.to_raw(latents))
        return F.cosine_similarity(self.encode(texts).flatten(1), raw.flatten(1))

    def check_ends_in_gaps(self, tokens, known_mask):
        """ ValueError where a known token (not EOS or PAD) stands behind a position to write: what
        is written from left to right cannot see it. """
        behind = (~known_mask[:, :-1]).cumsum(1) > 0                     # (n, L - 1)
        known_token = known_mask[:, 1:] & ~is_end(tokens[:, 1:], self.tokenizer)
        if (behind & known_token).any():
            raise ValueError('an autoregressive model continues a text: '
                             'all [MASK] must stand at its end')

    # ---- between strings, tokens and latents

    def pack(self, texts, cut=False):
        """ Tokens (n, L) of texts; of tokens themselves. """
        return texts if isinstance(texts, torch.Tensor) else pack(self, texts, cut)

    def decode(self, tokens):
        """ The n texts of tokens (n, L). """
        return [self.tokenizer.decode(ids) for ids in tokens.tolist()]

    def raw_latents(self, z):
        """ Standardised latents as the encoder would give them. Its outputs may lie on the sphere;
        latents that were given without an encoder are taken as they are. """
        raw = self.stats.destandardise(z)
        is_normalized = (self.meta['encoder'] or {}).get('normalize')
        return F.normalize(raw, dim=-1) if is_normalized else raw

    def latents_of(self, texts, raw):
        """ Standardised latents (n, N, D) of n texts, or None, from raw ones, or None. """
        if raw is None:
            return None
        return self.stats.standardise(same_number(texts, self.to_raw(raw)))

    def to_raw(self, latents):
        """ (n, N, D) float32 of a tensor, array or list (n, D) or (n, N, D). """
        N, D = self.net.model.config.n_latents, self.net.model.config.latent_dim
        try:
            if isinstance(latents, list):
                latents = torch.stack([torch.as_tensor(one) for one in latents])
            raw = torch.as_tensor(latents, dtype=torch.float32).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError('latents: expected a tensor, an array, or a list of at least one, '
                             f'found {type(latents).__name__}: {one_line(error)}') from None
        is_one_vector = N == 1 and raw.shape[1:] == (D,)
        if not is_one_vector and raw.shape[1:] != (N, D):
            expected = f'(n, {D})' if N == 1 else f'(n, {N}, {D})'
            raise ValueError(f'latents of shape {tuple(raw.shape)}, expected {expected}')
        if not raw.isfinite().all():
            raise ValueError('latents hold nan or inf')
        return raw.reshape(-1, N, D)


def same_number(texts, raw):
    """ Latents of n texts: one for each, or one for all. """
    if len(raw) not in (1, len(texts)):
        raise ValueError(f'{len(texts)} texts, {len(raw)} latents')
    return raw.expand(len(texts), -1, -1)
