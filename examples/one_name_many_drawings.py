"""
Why does a picture need a latent that is drawn, and not predicted?

One name has many drawings, and one drawing has several names. A regression predicts the mean of all
drawings of a name, which is fog. A nearest neighbour copies. Diffusion draws one of many.

    python examples/one_name_many_drawings.py          needs pillow and matplotlib

writes one_name.png by the weights that come along:
    four names: eight drawings of each, the mean of all drawings of the name among the icons that
    come along (corpora/icons.png), and the one among these that is nearest to the first drawing
    a name that these four sets lack, drawn in the style of each, twice
    drawings of sets that the network has not seen, and the names that it writes for them
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np

from corpora.icons import SHEET, SHEET_SIZE, as_patches, read_sheet
from corpora.images import pixels
from sampling.run import Run

NAMES = ('heart', 'camera', 'folder open', 'rocket')
MISSING = 'umbrella'           # these sets lack it, by any name
STYLES = ('pixelarticons', 'teenyicons', 'heroicons-solid', 'octicon')
UNSEEN = ('carbon', 'famicons', 'gg', 'heroicons', 'uil')    # sets that are held out
N_DRAWN, N_NAMED = 8, 5


def grey_of(icons):
    """ Pictures (n, S, S, 1) uint8 of icons; ink is black. """
    ink = np.stack([np.frombuffer(icon.ink, np.uint8) for icon in icons])
    return 255 - ink.reshape(-1, SHEET_SIZE, SHEET_SIZE, 1)


def nearest(picture, pictures):
    """ The one of these pictures that is nearest to a picture. """
    difference = pictures.astype(np.float32) - picture
    return pictures[(difference ** 2).mean((1, 2, 3)).argmin()]


def rows_of_names(run, icons):
    """ (name, its pictures, their titles) of each of NAMES. """
    known = grey_of(icons)
    for name in NAMES:
        drawn = pixels(run, run.embed([f'a {name}'], num_samples=N_DRAWN))
        of_name = known[[icon.words == tuple(name.split()) for icon in icons]]
        mean = of_name.mean(0).round().astype(np.uint8)
        titles = [''] * N_DRAWN + ['the mean', 'nearest']
        yield name, [*drawn, mean, nearest(drawn[0], known)], titles


def row_of_styles(run):
    """ One name in four styles, two drawings of each. """
    captions = [f'{of_set}: {MISSING}' for of_set in STYLES]
    drawn = pixels(run, run.embed(captions, num_samples=2))
    return MISSING, drawn, [of_set for of_set in STYLES for _ in range(2)]


def row_of_written(run, icons):
    """ Drawings of sets that are held out, evenly over them, and the names written for them. """
    unseen = [*{icon.words: icon for icon in icons if icon.set in UNSEEN}.values()]
    some = unseen[::len(unseen) // N_NAMED][:N_NAMED]
    patches = [as_patches(icon.ink, SHEET_SIZE, run.meta['source']['patch']) for icon in some]
    return 'names\nwritten', grey_of(some), run.write(latents=np.stack(patches))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=
                                     argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', default=str(ROOT / 'weights/icons'), help='a run of icons')
    parser.add_argument('--save', default='one_name.png')
    given = parser.parse_args()
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    run = Run(given.out_dir)
    icons = read_sheet(SHEET, SHEET_SIZE)
    rows = [*rows_of_names(run, icons), row_of_styles(run), row_of_written(run, icons)]

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
