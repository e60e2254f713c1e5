"""
A trained run from Python: strings in, strings or arrays out.

    from nanoldlm import load_run
    run = load_run('out/quickstart')                     # a run folder, an export, or a hub id
    run.write(['Return a list.'])                        # list of str, from the texts' embeddings
    run.write(latents=z, rerank=8)                       # the same from raw embeddings (n, D)
    run.infill(['Return the [MASK:2] of a list.'])       # list of str: gaps filled
    run.interpolate('Return a list.', 'Read a file.')    # list of str: from one to the other
    run.embed(['Return a list.'])                        # (n, D) float32: written by diffusion
    run.encode(['Return a list.'])                       # (n, D) float32: of the run's encoder
    run.sample(4)                                        # list of str, from nothing

Importing this module reads no command line. The keywords of a method are the knobs of sample.py:
sampler, steps, temperature, guidance and so on; an unknown one is a TypeError. What a run has not
learned is a ValueError of one line.
Letters: n texts, N latent vectors of a text, D latent dimensions.
"""
import os
import re

import numpy as np
import torch

from sampling.inputs import pack, slerp, warn_of_texts
from encoders import check_texts
from sampling import loading
from sampling import directions
from sampling.search import search
from sampling.writing import blank, write

HUB_ID = re.compile(r'[\w.-]+/[\w.-]+', re.ASCII)
COMMIT = re.compile(r'[0-9a-f]{40}')


def load_run(folder, which='best', device='auto', dtype='auto', encoder_folder='',
             revision=None):
    """
    A Run from a run folder, from a folder that Run.export wrote, or by the id of such a folder on
    the Hugging Face hub, with `revision`, a whole commit: a branch is refused. A folder that is
    there is never looked up.
    which: best, latest, or a step as step-00001000. encoder_folder: where the encoder lies now.
    ValueError where something of the run is missing or broken.
    """
    if not os.path.isdir(folder):
        if not revision or not HUB_ID.fullmatch(folder):
            raise ValueError(f'{folder}: no such folder; of a hub id give the revision, too: '
                             'a commit')
        if not COMMIT.fullmatch(str(revision)):
            raise ValueError(f'revision={revision!r}: expected a whole commit, 40 of 0-9 and a-f; '
                             'what a branch names may change')
        from huggingface_hub import snapshot_download
        folder = snapshot_download(folder, revision=revision)
    return Run(loading.load_run(folder, which, device, dtype, encoder_folder))


class Run:
    """ A trained run. `loaded` is what sample.py works with (sampling/loading.py). """

    def __init__(self, loaded):
        self.loaded = loaded

    def write(self, texts=None, latents=None, rerank=1, refine=0, seed=0, **knobs):
        """
        l2t: a text from each latent. Give texts, which the run's encoder embeds, or latents, raw
        embeddings (n, D) or (n, N, D). rerank: the nearest of so many drafts. refine: rounds of
        mending, by cosine and log p (sampling/search.py). Returns a list of n str.
        """
        if (texts is None) == (latents is None):
            raise ValueError('write: give texts, or latents')
        if not len(latents if texts is None else texts):
            return []
        directions.check_direction(self.loaded, 'l2t')
        raw = self.raw_latents(latents) if texts is None else self.embeddings(texts)

        if rerank > 1 or refine:
            tokens, _ = search(self.loaded, raw, rerank, refine, seed=seed, **knobs)
        else:
            z = self.loaded.stats.standardise(raw)
            tokens = directions.l2t(self.loaded, z, seed=seed, **knobs)
        return self.decode(tokens)

    def infill(self, templates, like=None, seed=0, **knobs):
        """ Fills the gaps of each template: [MASK], [MASK:3] for three tokens, [MASK:*] for the
        whole rest, [MASK:2-6] for the length that the network finds likeliest. like: a text for
        each template, whose embedding the result shall have. Returns a list of n str. """
        directions.check_direction(self.loaded, 'infill')
        check_texts(templates)
        z = None
        if like is not None:
            if len(like) != len(templates):
                raise ValueError(f'{len(templates)} templates, {len(like)} texts in like')
            z = self.loaded.stats.standardise(self.embeddings(like))
        tokens, _ = directions.infill(self.loaded, templates, z, seed=seed, **knobs)
        return self.decode(tokens)

    def interpolate(self, first, last, n=5, rerank=1, refine=0, seed=0, **knobs):
        """ l2t on the way from the embedding of one text to that of another: n texts, from the two
        embeddings and from n - 2 between them, along the great circle. Returns a list of n str. """
        raw = slerp(*self.embeddings([first, last]), n)
        return self.write(latents=raw, rerank=rerank, refine=refine, seed=seed, **knobs)

    def embed(self, texts, seed=0, **knobs):
        """ t2l: a raw embedding of each text, written by diffusion: (n, D) float32, or (n, N, D)
        where a text has several vectors. """
        directions.check_direction(self.loaded, 't2l')
        z = directions.t2l(self.loaded, pack(self.loaded, texts), seed=seed, **knobs)
        return self.as_array(loading.raw_latents(self.loaded, z))

    def encode(self, texts):
        """ The embeddings of the encoder that made the run's data, of the same shape. """
        return self.as_array(loading.encode(self.loaded, texts))

    def sample(self, n, seed=0, **knobs):
        """ n texts from nothing: from both clocks where the run has learned that, else text alone.
        Returns a list of str. """
        if 'unconditional' in loading.trained_for(self.loaded) and 'latent' in self.loaded.streams:
            tokens, _ = directions.unconditional(self.loaded, n, seed=seed, **knobs)
            return self.decode(tokens)
        directions.check_direction(self.loaded, 'text')
        tokens, known_mask = blank(self.loaded, n, seed=seed)
        return self.decode(write(self.loaded, tokens, known_mask, None, seed, **knobs))

    def export(self, folder, license=''):
        """ Writes the run as a folder that can be given away: averaged weights as safetensors,
        config.json, tokenizer, model card. load_run reads it. """
        from runs.export import export
        export(self.loaded.out_dir, folder, self.loaded.checkpoint, license)

    # between strings, arrays and tensors

    def decode(self, tokens):
        return [self.loaded.tokenizer.decode(ids) for ids in tokens.tolist()]

    def embeddings(self, texts):
        """ (n, N, D) float32 to write from, by the run's encoder. There is a warning for a text
        without any word that it knows, and for one that is longer than the run's texts. """
        raw = loading.encode(self.loaded, texts)
        warn_of_texts(self.loaded, texts)
        return raw

    def raw_latents(self, latents):
        """ (n, N, D) float32 of an array (n, D) or (n, N, D). """
        config = self.loaded.model.config
        N, D = config.n_latents, config.latent_dim
        raw = torch.as_tensor(np.asarray(latents, np.float32))
        is_one_vector = N == 1 and raw.shape[1:] == (D,)
        if not is_one_vector and raw.shape[1:] != (N, D):
            expected = f'(n, {D})' if N == 1 else f'(n, {N}, {D})'
            raise ValueError(f'latents of shape {tuple(raw.shape)}, expected {expected}')
        if not raw.isfinite().all():
            raise ValueError('latents hold nan or inf')
        return raw.reshape(-1, N, D)

    def as_array(self, raw):
        raw = raw.squeeze(1) if raw.shape[1] == 1 else raw
        return raw.float().numpy()
