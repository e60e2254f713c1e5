"""
One name has many drawings, and one drawing has several names. So a regression draws fog, a nearest
neighbour copies, and a diffusion model draws. This makes the first picture of the README:

    pip install pillow matplotlib
    python examples/one_name_many_drawings.py --out_dir=weights/icons

Its parts, of the icons that come along (corpora/icons.png):
    eight drawings of each name, the mean of all drawings of it, which is the best that a regression
    can say, and the drawing that is nearest to the first of the eight
    one name in the styles of four sets that do not have it
    drawings of sets that the network has not seen, and the names that it writes for them
"""
import argparse
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, ROOT)

import numpy as np

from corpora.icons import SHEET, SHEET_SIZE, as_patches, read_sheet
from corpora.images import pixels
from sampling.run import Run

NAMES = ('heart', 'rocket', 'umbrella', 'folder open')
MISSING = 'clipboard heart'
STYLES = ('tabler', 'pixelarticons', 'mdi', 'teenyicons')
UNSEEN = ('famicons', 'gg', 'charm')       # sets that are held out
N_DRAWN, N_NAMED = 8, 5


def grey_of(icons):
    """ Pictures (n, S, S, 1) uint8 of icons, ink is black. """
    ink = np.stack([np.frombuffer(icon.ink, np.uint8) for icon in icons])
    return 255 - ink.reshape(-1, SHEET_SIZE, SHEET_SIZE, 1)


def nearest(picture, pictures):
    """ The one of these pictures that is nearest to a picture. """
    difference = pictures.astype(np.float32) - picture
    return pictures[(difference ** 2).mean((1, 2, 3)).argmin()]


def rows_of_names(run, icons):
    """ (name, its pictures) of each of NAMES. """
    known = grey_of(icons)
    for name in NAMES:
        drawn = pixels(run, run.embed([f'a {name}'], num_samples=N_DRAWN))
        of_name = known[[icon.words == tuple(name.split()) for icon in icons]]
        mean = of_name.mean(0).round().astype(np.uint8)
        yield name, [*drawn, mean, nearest(drawn[0], known)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--out_dir', default=os.path.join(ROOT, 'weights', 'icons'))
    parser.add_argument('--save', default='one_name.png')
    given = parser.parse_args()
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    run = Run(given.out_dir)
    icons = read_sheet(SHEET, SHEET_SIZE)
    rows = [(name, pictures, [''] * N_DRAWN + ['the mean', 'nearest']) for name, pictures
            in rows_of_names(run, icons)]

    # one name in four styles, two drawings each
    styles = [f'{of_set}: {MISSING}' for of_set in STYLES]
    drawn = pixels(run, run.embed(styles, num_samples=2))
    rows.append((MISSING, [*drawn], [of_set for of_set in STYLES for _ in range(2)]))

    # names of drawings: one of each name at most, evenly over the sheet
    unseen = {icon.words: icon for icon in icons if icon.set in UNSEEN}
    some = [*unseen.values()][::len(unseen) // N_NAMED][:N_NAMED]
    patches = np.stack([as_patches(icon.ink, SHEET_SIZE, run.meta['source']['patch'])
                        for icon in some])
    written = run.write(latents=patches)
    rows.append(('names written', [*grey_of(some)], written))

    columns = N_DRAWN + 2
    figure, axes = plt.subplots(len(rows), columns, figsize=(.95 * columns, 1.12 * len(rows)))
    for line, (label, pictures, titles) in zip(axes, rows):
        line[0].set_ylabel(label.replace(' ', '\n'), fontsize=9)
        for axis in line:
            axis.set(xticks=[], yticks=[], frame_on=False)
        for axis, picture, title in zip(line, pictures, titles):
            axis.imshow(picture.squeeze(2), cmap='gray', vmin=0, vmax=255)
            axis.set_title(title.replace(': ', ':\n'), fontsize=7)
    figure.tight_layout()
    figure.savefig(given.save, dpi=110)
    print(f'written to {given.save}')


if __name__ == '__main__':
    main()
