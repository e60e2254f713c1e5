""" Icons and their names in the same two streams (docs/images.md): one name is drawn by many, and
one drawing has several names. Pictures from names, names from pictures, the rest of a picture of
which a part is given, and both from noise.

The icons that come along are those of 162 names that at least 40 sets draw. They need: pip install
pillow. All of Iconify's sets need resvg-py besides, and a clone of github.com/iconify/icon-sets:

    pip install resvg-py pillow
    python prepare.py config/icons.py --input="icon-sets/json/*.json" --vocab_size=1536

    python prepare.py config/icons.py
    python train.py config/icons.py
    python sample.py config/icons.py --mode=t2l --text="tabler: heart" --num_samples=8 --png=a.png
    python sample.py config/icons.py --mode=l2t --image=icon.png       # or a folder of pictures
    python sample.py config/icons.py --mode=complete --image=half.png --text="a heart" --png=b.png
"""
# data: patches of 4 x 4 pixels
dataset = 'icons'
out = 'data/icons'
input = 'icons'
image_size = 32
patch = 4
channels = 1
vocab_size = 512
max_tokens = 15
val_fraction = 0.05
# run
out_dir = 'out/icons'
mode = 'unconditional+l2t+3*t2l+complete+2*causal'
# model: a patch is a token
spatial = True
latent_tokens = 1
depth = 6
width = 128
latent_width = 192
heads = 4
text_clock = False
# optimisation
optimizer = 'muon'
learning_rate = 3e-3
muon_iterations = 3
batch_size = 48
max_iters = 20_000
warmup_iters = 200
eval_interval = 500
# evaluation
tasks = 'nelbo,image'
