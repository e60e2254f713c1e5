"""
edit: one word of a text is to become another of its class (man: woman, red: blue), and all other
words stay. The texts are those that have exactly one word of one of the classes.

E is the encoder. A text is changed towards

    z' = E(text) + E(the new word) - E(the old word)

and compared with the text that is wanted, in which the word is replaced. The network never sees it.

Measured
    carries         % that have the new word and not the old one
    kept            % of the other words that are still there
    exact           % that are the wanted text, word for word
    cosine          with the embedding of the wanted text
    nats            per token, given that embedding
Controls
    left_to_right   where the network also writes so: the same positions, filled by 8 beams from
                    left to right (as in infill). lead: how far ahead of it, text by text
    anew            written from z' alone
    shuffled        changed towards the z' of another text
    copy            not changed
    wanted          changed towards the embedding of the wanted text: is z' what is wrong?
"""
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unicodedata import normalize

import numpy as np
import torch
import torch.nn.functional as F

from corpora.words import WORD, words
from sampling.beams import fill_by_beams
from sampling.inputs import moved
from sampling.knobs import TEXT_KNOBS
from sampling.likelihood import changed_by
from sampling.run import BOTH, FILLS, Needs
from sampling.texts import write
from tasks.common import Figures, Task, derangement, encode, read_classes
from tasks.measures import spaced

RIVAL = 'left_to_right'


def prepare(run, knobs):
    if not run.meta['encoder']:
        raise ValueError(f'{run.out_dir} has latents that were given without their encoder: no '
                         'edit from it')

    # a word of a class is looked for among the words of a text, as `words` gives them
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
    z_wanted = run.stats.standardise(asked.raw_wanted)
    other = derangement(n, ctx.knobs['seed'])

    # what is written, and the controls
    written = {'': change(run, ctx, asked, z),
               'anew': run.write(latents=asked.raw, lengths_of=asked.tokens, **ctx.sampling),
               'shuffled': change(run, ctx, asked, z[other]),
               'copy': asked.texts,
               'wanted': change(run, ctx, asked, z_wanted)}
    if run.net.is_causal and not ctx.knobs['sampler']:
        written[RIVAL] = change(run, ctx, asked, z, from_left_to_right=True)

    # against the texts that are wanted
    figures = Figures(n)
    judged = {control: compare_edits(run, asked, texts) for control, texts in written.items()}
    figures.enter_with_lead(judged, RIVAL)
    for text, old, new, out in zip(asked.texts, asked.old, asked.new, written['']):
        ctx.shown.append(f'   {text}\n   {old} -> {new}\n-> {out}\n')
    return figures


def generate(run, ctx, rows=slice(None), **knobs):
    """ The changed texts; a sweep calls it. Its time has the encoder's in it. """
    part = replace(ctx, texts=ctx.texts[rows], tokens=ctx.tokens[rows], raw=ctx.raw[rows])
    asked = what_is_asked(run, part)
    return change(run, ctx, asked, run.stats.standardise(asked.raw), **knobs)


def judge(run, ctx, written):
    # drawn with the same seed, so the same words are asked for as in generate
    return compare_edits(run, what_is_asked(run, ctx), written)


def what_is_asked(run, ctx):
    """ Of the texts with exactly one word of a class: texts, tokens (n, L), old and new words, the
    texts that are wanted, and raw latents (n, N, D): raw_now of the texts, raw the z', raw_wanted.
    The new word is drawn from the others of the class. """
    # a text with two words of a class has no one answer, so it is left out
    rng = np.random.default_rng(ctx.knobs['seed'])
    rows, old, new, wanted = [], [], [], []
    for i, text in enumerate(ctx.texts):
        for members in ctx.prepared.values():
            found = [word for word in words(text) if word in members]
            if len(found) == 1:
                others = [word for word in members if word != found[0]]
                rows.append(i)
                old.append(found[0])
                new.append(str(rng.choice(others)))
                wanted.append(replaced(text, old[-1], new[-1]))
                break
    if len(rows) < 2:
        raise ValueError(f'classes: {len(rows)} of {ctx.n} texts have exactly one word of one of '
                         'them, expected at least 2')

    raw = ctx.raw[rows]
    return SimpleNamespace(
        texts=[ctx.texts[i] for i in rows],
        tokens=ctx.tokens[rows],
        old=old,
        new=new,
        wanted=wanted,
        raw_now=raw,
        raw=moved(run, raw, new, old),
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
    changed = {'strength': ctx.knobs['strength']} | changed
    knobs = ctx.sampling_knobs(**changed)
    z_now = run.stats.standardise(asked.raw_now)
    masked = changed_by(run.net, asked.tokens, z_now, z, knobs)
    tokens = torch.where(masked, run.net.text.mask_id, asked.tokens)

    # the same positions are filled either way, and all others are known
    if from_left_to_right:
        tokens = fill_by_beams(run.net, tokens, masked, z, batch=knobs.sample_batch)
    else:
        tokens = write(run.net, tokens, ~masked, z, knobs, inner=masked)
    return run.decode(tokens)


def compare_edits(run, asked, written):
    """ {metric: values (n,)} of the texts that were written. """
    # of the words: is the new one there, and are the others? One that is there twice counts twice
    carries, kept = [], []
    for text, out, old, new in zip(asked.texts, written, asked.old, asked.new):
        has = Counter(words(out))
        others = Counter(words(text))
        del others[old]
        n_kept = (others & has).total()
        carries.append(100.0 * (new in has and old not in has))
        kept.append(100.0 * n_kept / max(1, others.total()))

    # of the whole text, and of what it says to the encoder and to the network
    exact = [100.0 * (spaced(out) == spaced(text)) for out, text in zip(written, asked.wanted)]
    raw = asked.raw_wanted
    embedded = encode(run, written)
    return {
        'carries': np.array(carries),
        'kept': np.array(kept),
        'exact': np.array(exact),
        'cosine': F.cosine_similarity(embedded.flatten(1), raw.flatten(1)).numpy(),
        'nats': run.nats(written, raw).numpy()
    }


TASK = Task(
    Needs(BOTH, (FILLS,), masked_text=True), (*TEXT_KNOBS, 'strength', 'classes'), measure,
    prepare=prepare, generate=generate, judge=judge, rival=RIVAL, embeds=True, takes_two=True,
    headlines=(('a word changed, % exactly so', '', 'exact'),))
