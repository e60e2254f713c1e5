"""
Latent text diffusion on one page: two clocks, one network, two losses, one sampler.

    x_t    each word is hidden with probability t            text clock t in [0, 1]
    z_s  = (1 - s) z + s e,   e ~ N(0, 1)                    latent clock s in [0, 1]
    loss = sum over hidden words of -log p(x^i | x_t, z_s) / t  +  |z - z_hat(x_t, z_s)|^2

A clock at 0 means given, a clock at 1 means unknown. So one network writes a text from a latent,
a latent from a text, and both from noise.

In the world of toy.py every right answer is known. Letters: B rows, L places, V words.

    python examples/the_whole_idea.py       trains for some seconds, prints answers and truth
"""
import torch
import torch.nn.functional as F
from torch.nn import GELU, LazyLinear, Sequential
from toy import L, LATENTS, MASK, PROBABILITIES, SENTENCES, TOKENS, V


def predict(network, x_t, z_s, t, s):
    """ Logits (B, L, V) of the words, and the latent (B, 2). """
    # all that it reads, in one row of numbers: words or MASK, the noisy latent, both clocks
    x_t = F.one_hot(x_t, V + 1).flatten(1)
    out = network(torch.cat([x_t, z_s, t, s], 1))
    z_hat = out[:, :2]
    logits = out[:, 2:].unflatten(1, (L, V))
    return logits, z_hat


def loss_of(network, x, z):
    """ The loss above, of texts x (B, L) and their latents z (B, 2). """
    # the clocks: of three rows one has its text given, one has its latent given, one has neither
    t, s = torch.rand(2, len(x), 1)
    t[0::3] = 0
    s[1::3] = 0

    # the noisy text and latent, and what the network says of the clean ones
    is_hidden = torch.rand(x.shape) < t
    x_t = torch.where(is_hidden, MASK, x)
    z_s = (1 - s) * z + s * torch.randn(z.shape)
    logits, z_hat = predict(network, x_t, z_s, t, s)

    # hidden words count by 1/t, which is cut off where t is small
    nll = F.cross_entropy(logits.mT, x, reduction='none')                        # (B, L)
    text_loss = (nll * is_hidden / t.clamp(min=0.01)).sum(1)
    latent_loss = (z - z_hat).square().sum(1)
    return (text_loss + latent_loss).mean()


@torch.no_grad()
def sample(network, x_t, z_s, t, s, steps=50):
    """ Texts and latents, by clocks that run to 0 from t and s (B, 1): from 0 where something is
    given, else from 1. """
    for k in range(steps, 0, -1):
        logits, z_hat = predict(network, x_t, z_s, t * k / steps, s * k / steps)
        words = torch.distributions.Categorical(logits=logits).sample()

        # a clock loses one k-th: so many hidden words are shown, so far goes the latent
        is_shown = (x_t == MASK) & (torch.rand(x_t.shape) < 1 / k)
        x_t = torch.where(is_shown, words, x_t)
        z_s = z_s + s * (z_hat - z_s) / k
    return x_t, z_s


def main(steps=2000, n=2000):
    torch.manual_seed(0)
    network = Sequential(LazyLinear(128), GELU(), LazyLinear(128), GELU(), LazyLinear(2 + L * V))
    optimizer = torch.optim.Adam(network.parameters())
    for step in range(steps):
        # the rate falls to 0 in a straight line
        optimizer.param_groups[0]['lr'] = 4e-3 * (1 - step / steps)
        rows = torch.multinomial(PROBABILITIES, 256, replacement=True)
        loss_of(network, TOKENS[rows], LATENTS[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()

    # one sampler, three directions: they differ in where the clocks begin
    x = TOKENS.repeat(n // 4, 1)
    z = LATENTS.repeat(n // 4, 1)
    masks = torch.full_like(x, MASK)
    noise = torch.randn_like(z)
    given = torch.zeros(n, 1)
    unknown = torch.ones(n, 1)
    texts, _ = sample(network, masks, z, unknown, given)
    _, latents = sample(network, x, noise, given, unknown)
    drawn, _ = sample(network, masks, noise, unknown, unknown)

    # against the truth
    right = (texts == x).all(1).double().mean()
    distance = (latents - z).norm(dim=1).mean()
    shares = (drawn == TOKENS[:, None]).all(2).double().mean(1)
    print(f'text from latent: {right:.1%} right')
    print(f'latent from text: off by {distance:.3f}')
    for sentence, share, p in zip(SENTENCES, shares, PROBABILITIES):
        print(f'both from noise:  {sentence:17} {share:.3f} (truth {p})')
    return right, distance, shares


if __name__ == '__main__':
    main()
