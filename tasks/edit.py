"""
edit: a word is to become another of its class (a man a woman, red blue), and all others stay. Texts
that have exactly one word of one of the classes are changed towards
    z' = E(text) + E(the new word) - E(the old word)
and compared with the text in which the word is replaced, which the network never sees: carries, %
that have the new word and not the old one; kept, % of the other words; exact, word for word; cosine
with the embedding of that text; nats per token given that embedding.
Controls: left_to_right, where the network also writes so, the same positions filled by 8 beams from
left to right (as in infill); anew, written from z' alone; shuffled, changed towards
the z' of another text; copy, not changed; told, changed towards the embedding of the text that is
wanted. lead: how far ahead of left_to_right, text by text.
"""
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unicodedata import normalize

import numpy as np
import torch
import torch.nn.functional as F

from corpora.words import WORD, words
from sampling.inputs import moved, pack
from sampling.knobs import TEXT_KNOBS
from sampling.likelihood import changed_by
from sampling.run import BOTH, FILLS, Needs
from sampling.writing import write
from tasks.common import Figures, Task, derangement, encode, read_classes
from tasks.infill import left_to_right
from tasks.measures import spaced

RIVAL = 'left_to_right'


def prepare(run, knobs):
    if not run.meta['encoder']:
        raise ValueError(f'{run.out_dir} has latents that were given without their encoder: no '
                         'edit from it')
    found = read_classes(knobs['classes'])
    for members in found.values():
        if any(words(word) != [word] for word in members) or len({*members}) < len(members):
            raise ValueError(f'classes: {", ".join(members)}: edit takes single words in small '
                             'letters, each once')
    return found


def measure(run, ctx):
    asked = what_is_asked(run, ctx)
    n = len(asked.texts)
    z = run.stats.standardise(asked.raw)
    other = derangement(n, ctx.knobs['seed'])
    told = run.stats.standardise(asked.raw_wanted)

    # what is written, and the controls
    written = {'': change(run, ctx, asked, z),
               'anew': run.write(latents=asked.raw, lengths_of=asked.tokens, **ctx.sampling),
               'shuffled': change(run, ctx, asked, z[other]),
               'copy': asked.texts,
               'told': change(run, ctx, asked, told)}
    if run.net.is_causal and not ctx.knobs['sampler']:
        written[RIVAL] = change(run, ctx, asked, z, from_left_to_right=True)
    figures = Figures(n)
    judged = {control: compare_edits(run, asked, texts) for control, texts in written.items()}
    figures.enter_with_lead(judged, RIVAL)
    ctx.shown += [f'   {text}\n   {old} -> {new}\n-> {out}\n' for text, old, new, out
                  in zip(asked.texts, asked.old, asked.new, written[''])]
    return figures


def generate(run, ctx, rows=slice(None), **knobs):
    """ The changed texts; a sweep calls it. Its time has the encoder's in it. """
    asked = what_is_asked(run, replace(ctx, texts=ctx.texts[rows], tokens=ctx.tokens[rows],
                                       raw=ctx.raw[rows]))
    return change(run, ctx, asked, run.stats.standardise(asked.raw), **knobs)


def judge(run, ctx, written):
    return compare_edits(run, what_is_asked(run, ctx), written)


def what_is_asked(run, ctx):
    """ Of the texts with exactly one word of a class: texts, tokens (n, L), old and new words, the
    texts that are wanted, and raw latents (n, N, D): raw_now of the texts, raw the z', raw_wanted.
    The new word is drawn from the others of the class. """
    rng = np.random.default_rng(ctx.knobs['seed'])
    rows, old, new, wanted = [], [], [], []
    for i, text in enumerate(ctx.texts):
        for members in ctx.prepared.values():
            found = [word for word in words(text) if word in members]
            if len(found) == 1:
                rows.append(i)
                old.append(found[0])
                new.append(str(rng.choice([word for word in members if word != found[0]])))
                wanted.append(replaced(text, old[-1], new[-1]))
                break
    if len(rows) < 2:
        raise ValueError(f'classes: {len(rows)} of {ctx.n} texts have exactly one word of one of '
                         'them, expected at least 2')

    raw = ctx.raw[rows]
    return SimpleNamespace(texts=[ctx.texts[i] for i in rows], tokens=ctx.tokens[rows], old=old,
                           new=new, wanted=wanted, raw_now=raw, raw=moved(run, raw, new, old),
                           raw_wanted=encode(run, wanted))


def replaced(text, old, new):
    """ The text with another word, which has a capital where the old one had. """
    def cased(match):
        if match[0].lower() != old:
            return match[0]
        return new.capitalize() if match[0][0].isupper() else new
    return WORD.sub(cased, normalize('NFC', text))


def change(run, ctx, asked, z, from_left_to_right=False, **changed):
    """ As Run.edit, from tokens and latents that are there. """
    knobs = ctx.sampling_knobs(**dict(strength=ctx.knobs['strength']) | changed)
    masked = changed_by(run.net, asked.tokens, run.stats.standardise(asked.raw_now), z, knobs)
    tokens = torch.where(masked, run.net.text.mask_id, asked.tokens)
    if from_left_to_right:
        return run.decode(left_to_right(run.net, tokens, masked, z, batch=knobs.sample_batch))
    return run.decode(write(run.net, tokens, ~masked, z, knobs, inner=masked))


def compare_edits(run, asked, written):
    """ {metric: values (n,)} of the texts that were written. """
    carries, kept = [], []
    for text, out, old, new in zip(asked.texts, written, asked.old, asked.new):
        has = Counter(words(out))
        others = Counter(words(text))
        del others[old]
        n_kept = (others & has).total()
        carries.append(100.0 * (new in has and old not in has))
        kept.append(100.0 * n_kept / max(1, others.total()))
    exact = [100.0 * (spaced(out) == spaced(text)) for out, text in zip(written, asked.wanted)]
    raw = asked.raw_wanted
    embedded = encode(run, written)
    cosine = F.cosine_similarity(embedded.flatten(1), raw.flatten(1))
    nats = run.nats(pack(run, written, cut=True), raw)
    return {
        'carries': np.array(carries),
        'kept': np.array(kept),
        'exact': np.array(exact),
        'cosine': cosine.numpy(),
        'nats': nats.numpy()
    }


TASK = Task(
    Needs(BOTH, (FILLS,), masked_text=True), (*TEXT_KNOBS, 'strength', 'classes'), measure,
    prepare=prepare, generate=generate, judge=judge, rival=RIVAL, embeds=True, takes_two=True,
    headlines=(('a word changed, % exactly so', '', 'exact'),))
