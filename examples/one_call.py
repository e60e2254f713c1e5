"""
What does one call of the network read, and what does it say?

It reads a text and a picture, each as noisy as its own clock says: 0 is clean, 1 is noise. A mode
says which clocks are drawn. Where a clock is above 0, the network says what is clean there.

    mode            text clock   latent clock   says
    l2t             drawn        0              the text of a picture
    t2l             0            drawn          a picture of a text
    unconditional   drawn        drawn          both
    causal          0            0              the next token, by the picture and the tokens before

    python examples/one_call.py          needs pillow and matplotlib

writes one_call.png by the weights that come along, a row for each mode: what one call reads, and
what it says, of a drawing that it has not seen.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from corpora.icons import SHEET, SHEET_SIZE, as_patches, read_sheet
from corpora.images import pixels
from sampling.recorder import name_of, pieces_of
from sampling.run import Run
from sampling.solvers import x0_and_e

SET, NAME = 'carbon', 'camera'                             # a set that is held out
SEED = 1
N_SHOWN = 4                                                # tokens of the text: the rest is PAD
# the clocks of the text and of the latent, between 0 and 1 where they are drawn
MODES = {'l2t': (0.7, 0.0), 't2l': (0.0, 0.8), 'unconditional': (0.7, 0.8), 'causal': (0.0, 0.0)}


@torch.no_grad()
def one_call(run, mode, x, z, u, e):
    """
    One call about one text x (1, L) and one latent z (1, N, D), with the noise u (1, L) uniform and
    e (1, N, D) normal.
    Returns what it reads, x_t and z_s, and what it says: the likeliest token at each position, its
    probability, both (L,), and the clean latent.
    """
    net = run.net
    t, s = torch.tensor(MODES[mode])

    # noise: a token is MASK with probability t
    x_t = torch.where(u < t, net.text.mask_id, x)
    alpha, sigma = net.latent.alpha_sigma(s)
    z_s = alpha * z + sigma * e

    # one call: logits, and the prediction of the latent, in which the clean latent is
    n_causal = 1 if mode == 'causal' else 0
    logits, prediction = net.model(x_t, z_s, t[None], s[None], n_causal=n_causal)
    p, token = logits[0].softmax(1).max(1)
    clean, _ = x0_and_e(net.latent, prediction, z_s, s)
    return x_t[0], z_s, token, p, clean


def text_of(run, ids):
    """ The ids (L,) as a text, in which MASK is a block. """
    pieces = pieces_of(run.tokenizer, ids.tolist(), run.net.text.mask_id, to_end=True)
    return '   '.join(piece.strip() for piece in pieces)


def rows(run, icon):
    """ (what a row is, what it reads, what it says) of each mode. Both are a text and a picture
    (S, S) uint8, or None where nothing is said. """
    rng = torch.Generator().manual_seed(SEED)
    text = [f'a {NAME}']
    patches = as_patches(icon.ink, SHEET_SIZE, run.meta['source']['patch'])
    x = run.pack(text)
    z = run.latents_of(text, patches[None])
    u = torch.rand(x.shape, generator=rng)
    e = torch.randn(z.shape, generator=rng)

    def drawing(latents):
        return pixels(run, run.raw_latents(latents))[0].squeeze(2)
    for mode, (t, s) in MODES.items():
        x_t, z_s, token, p, said = one_call(run, mode, x, z, u, e)

        # of masked tokens the likeliest, in a causal row the next of each
        is_said = (x_t == run.net.text.mask_id) if mode != 'causal' else x[0] != run.tokenizer.pad
        words = []
        for i in is_said[:N_SHOWN].nonzero()[:, 0]:
            word = name_of(run.tokenizer, token[i].item()).strip()
            words.append(f'{word}  {p[i]:.2f}')
        label = f'{mode}\ntext clock {t}\nlatent clock {s}'
        reads = text_of(run, x_t[:N_SHOWN]), drawing(z_s)
        yield label, reads, ('\n'.join(words), drawing(said) if s > 0 else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=
                                     argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', default=str(ROOT / 'weights/icons'), help='a run of icons')
    parser.add_argument('--save', default='one_call.png')
    given = parser.parse_args()
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    run = Run(given.out_dir)
    icon = next(icon for icon in read_sheet(SHEET, SHEET_SIZE)
                if icon.set == SET and icon.words == tuple(NAME.split()))
    widths = dict(width_ratios=[1.5, 1.8, 1, .3, 1, 1])
    figure, axes = plt.subplots(len(MODES), 6, figsize=(11, 1.6 * len(MODES)), gridspec_kw=widths)
    for line, (label, reads, says) in zip(axes, rows(run, icon)):
        for axis, shown in zip(line, [label, *reads, '→', *says]):
            axis.axis('off')
            if isinstance(shown, str):
                axis.text(0, .5, shown, va='center', fontsize=12)
            elif shown is not None:
                axis.imshow(shown, cmap='gray', vmin=0, vmax=255)
    for axis, title in zip(axes[0], ['', 'reads', '', '', 'says', '']):
        axis.set_title(title, loc='left', fontsize=13)
    figure.savefig(given.save, dpi=90, bbox_inches='tight')
    print(f'written to {given.save}')


if __name__ == '__main__':
    main()
