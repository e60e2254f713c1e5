"""
One network, two clocks: which task it does depends on nothing but where the clocks stand.

The network reads a text with masks and a latent with noise, each with its own clock, from 0 (clean)
to 1 (noise), and predicts both clean. What stands at clock 0 is given, what stands at clock 1 is
unknown, and between them it is half known. So text from latent, latent from text, filling gaps,
and both from nothing are points of one square. Training draws points of this square, and no task
has a network, a head or a flag of its own.

    network(x_t, z_s, t, s) = p(x^i | x_t, z_s) and E[z | x_t, z_s],    clocks t, s in [0, 1]

    python examples/two_clocks_make_every_task.py      trains a small network for some seconds, asks
it for text and latent at seven points, and prints the truth (by Bayes' rule) beside each answer.
"""
import torch
import torch.nn.functional as F

from toy import L, LATENTS, TOKENS, V, WORDS, ids, posterior
from toy_training import LATENT, TEXT, small_model, train
from sampling.solvers import x0_and_e

SHE, WALKS = WORDS.index('she'), WORDS.index('walks')
Z = LATENTS[3]                                                 # of 'she walks her dog'
NOISE = torch.tensor([0.3, -0.5])

# (the task, the text that is read, the clock of the latent)
QUESTIONS = [
    ('text from latent', '__ __ __ __', 0.0),
    ('latent from text', 'she walks her dog', 1.0),
    ('from nothing', '__ __ __ __', 1.0),
    ('fill gaps', 'she __ __ __', 1.0),
    ('gaps + latent', 'she __ __ __', 0.0),
    ('noisy latent', '__ __ __ __', 0.5),
    ('a bit of both', '__ __ her __', 0.7),
]


@torch.no_grad()
def ask(model, text, t_latent):
    """ P(she), P(walks) and the latent, (4,): of the network, and in truth. """
    # what is read; the clock of the text is the share of its masks
    x_t, t_latent = ids(text)[None], torch.tensor([t_latent])
    t_text = (x_t == TEXT.mask_id).float().mean(1)
    z_t, _ = LATENT.corrupt(Z[None, None], t_latent, NOISE[None, None])

    # the answer of the network; what is given, it need not predict
    logits, out = model(x_t, z_t, t_text, t_latent)
    z, _ = x0_and_e(LATENT, out, z_t, t_latent)
    z = torch.where(t_latent > 0, z, z_t)
    is_masked = (x_t == TEXT.mask_id)[..., None]
    p = torch.where(is_masked, logits.softmax(2), F.one_hot(x_t, V + 1)[..., :V])
    answer = torch.tensor([p[0, 0, SHE], p[0, 1, WALKS], *z[0, 0]])

    # the truth: Bayes' rule over the four sentences
    q = posterior(x_t, z_t[:, 0], t_latent)[0]
    is_she, walks = TOKENS[:, 0] == SHE, TOKENS[:, 1] == WALKS
    truth = torch.tensor([q[is_she].sum(), q[walks].sum(), *(q @ LATENTS.double())])
    return answer, truth


def main(steps=400):
    model = small_model()
    train(model, '2*unconditional+l2t+t2l', steps)

    found = {}
    print('answers of the network (truth)     clocks')
    print('task             it reads          text latent  P(she)       P(walks)'
          '     latent: she,  walks')
    for task, text, t_latent in QUESTIONS:
        answer, truth = found[task] = ask(model, text, t_latent)
        a, b = answer.tolist(), truth.tolist()
        print(f'{task:17}{text:18}{text.count("__") / L:.2f} {t_latent:4.1f}  '
              f'{a[0]:.2f} ({b[0]:.2f})  {a[1]:.2f} ({b[1]:.2f})  '
              f'{a[2]:5.2f} ({b[2]:5.2f})  {a[3]:5.2f} ({b[3]:5.2f})')
    return found


if __name__ == '__main__':
    main()
