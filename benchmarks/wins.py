"""
The two pictures of docs/diffusion.md, by the weights that come along: an edit over its strength,
and gaps filled by diffusion beside the same gaps filled from left to right.

    python -m benchmarks.wins --encoder_folder=MINILM --save=docs
"""
import os
from html import escape
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from configurator import configure, stop_on_error
from runs.files import write_text
from sampling.animation import COLUMNS, LINE, LOOK, MARGIN, as_svg, text_at
from sampling.directions import edit
from sampling.inputs import embeddings, moved, pack
from sampling.loading import load_run
from sampling.unmasking import lines_of, pieces_of
from sampling.writing import write
from tasks.common import embed
from tasks.infill import gaps_of, left_to_right

out_dir = 'weights/captions'   # <a run folder>
encoder_folder = ''            # <a folder>: of the encoder; '': from the hub
save = 'docs'                  # <a folder>: edit.svg and infill.svg go there

TEXT = 'A woman is taking a picture of a little boy brushing his teeth in a bathroom.'
AWAY, TOWARDS = 'boy', 'girl'
STRENGTHS = (0.02, 0.1, 0.2, 0.4)
# of what is wrong
RED = '.a { fill: #cf222e } @media (prefers-color-scheme: dark) { .a { fill: #ff7b72 } }'


def edits(run):
    """ [(label, spans)]: the text at each strength, blue where a token has changed. """
    now = embeddings(run, [TEXT])
    z_now = run.stats.standardise(now)
    z = run.stats.standardise(moved(run, now, [TOWARDS], [AWAY]))
    wanted = embeddings(run, [TEXT.replace(AWAY, TOWARDS)])
    tokens = pack(run, [TEXT])

    rows = []
    for strength in (0, *STRENGTHS):
        after = edit(run, tokens, z_now, z, strength) if strength else tokens
        there = embed(run, [run.tokenizer.decode(after[0].tolist())])
        cosine = F.cosine_similarity(there.flatten(), wanted.flatten(), 0)
        label = f'strength {strength:g}' if strength else 'the text'
        rows.append((f'{label}: cosine with what is wanted {cosine:.2f}',
                     spans(run, after[0], n=(after != tokens)[0])))
    return rows


def fillings(run, n=3):
    """ [(label, spans)]: the first n texts of ten.txt, half of their tokens masked, then filled;
    blue where a token is right, red where it is wrong. """
    texts = Path(out_dir, 'ten.txt').read_text(encoding='utf-8').splitlines()[:n]
    z = run.stats.standardise(torch.from_numpy(np.load(Path(out_dir, 'ten.npy'))[:n, None]))
    tokens = pack(run, texts)
    masked = gaps_of(run, tokens, share=0.5, seed=0)                                 # (n, L)
    gaps = torch.where(masked, run.text.mask_id, tokens)

    by_diffusion = write(run, gaps, ~masked, z, inner=masked)
    token_by_token = left_to_right(run, gaps, masked, z)
    rows = []
    for i in range(n):
        rows.append(('half of the tokens are masked', spans(run, gaps[i], m=masked[i])))
        for label, filled in (('filled by diffusion', by_diffusion[i]),
                              ('from left to right, the best of 8 beams', token_by_token[i])):
            is_right = filled == tokens[i]
            share = (is_right & masked[i]).sum() / masked[i].sum()
            rows.append((f'{label}: {share:.0%} right',
                         spans(run, filled, n=masked[i] & is_right, a=masked[i] & ~is_right)))
    return rows


def spans(run, tokens, **marks):
    """ [(text, kind)] of tokens (L,). marks: {kind: where (L,)}, of the kinds m, a mask, n, blue,
    and a, red here. """
    found = []
    for i, piece in enumerate(pieces_of(run.tokenizer, tokens.tolist(), run.text.mask_id)):
        kind = ''.join(kind for kind, where in marks.items() if where[i])
        found.append((piece, kind))
    return found


def picture(title, rows):
    """ SVG text: a label and a text for each row. """
    body, y = [], 30
    for label, found in rows:
        body.append(f'<text class="h" x="{MARGIN}" y="{y}">{escape(label)}</text>')
        for line in lines_of(found, COLUMNS):
            y += LINE
            body.append(text_at(y, line))
        y += 32
    return as_svg(title, [LOOK, RED], body, y - 10)


def main():
    run = load_run(out_dir, encoder_folder=encoder_folder)
    for name, title, make in (('edit', 'An edit over its strength', edits),
                              ('infill', 'Gaps filled by diffusion and from left to right',
                               fillings)):
        path = os.path.join(save, f'{name}.svg')
        write_text(path, picture(title, make(run)))
        print(path)


if __name__ == '__main__':
    configure(globals())
    with stop_on_error():
        main()
