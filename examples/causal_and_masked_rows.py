"""
One network writes both ways: by diffusion, and token by token. The kind of a row says what it sees.

A masked row reads a text with masks, and every position sees every other position. A causal row
reads the text, and a position sees only what is before it. Both kinds stand in one batch and use
the same weights; just the table of who sees whom differs. So the network has the exact likelihood
of a decoder, and it also fills gaps by the words on both sides, where a decoder must search.

    causal row   -log p(x)  = sum over i of -log p(x^i | x^<i)                       exact
    masked row   -log p(x) <= E_n [ L/n * sum over masked i of -log p(x^i | x_t) ]   a bound

    python examples/causal_and_masked_rows.py      trains a small network on both kinds for some
seconds. It prints the nats of both with the entropy, then what each says of a gap, with the truth.
"""
import itertools

import torch

from toy import ENTROPY, L, PROBABILITIES, TOKENS, WORDS, ids
from diffusion import exact_nll
from toy_training import TEXT, small_model, train


def nothing(B):
    """ Latents that say nothing, and their clock: 1. """
    return torch.zeros(B, 1, 2), torch.ones(B)


def nats(model):
    """ Nats of a sentence: exact in causal rows, and the bound of masked rows, enumerated. """
    exact = exact_nll(model, TOKENS, *nothing(4))                        # (4,)

    # bound() masks the n places of the smallest u: every order of the places, with every n
    orders = torch.tensor(list(itertools.permutations(range(L))))        # (24, L)
    orders = orders.repeat_interleave(L, 0)                              # (96, L)
    n = torch.arange(L).repeat(24)[:, None]                              # (96, 1)
    u = (torch.cat([n, orders], 1) + 0.5) / L                            # (96, 1 + L)
    tokens = TOKENS.repeat_interleave(96, 0)                             # (384, L)
    bound = TEXT.bound(model, tokens, *nothing(384), u.repeat(4, 1))
    bound = bound.view(4, 96).mean(1)                                    # (4,)
    return (PROBABILITIES * exact).sum().item(), (PROBABILITIES * bound).sum().item()


def batch_of_both(model, text):
    """ The text as a masked and as a causal row: probabilities (2, L, V) of one network call. """
    # the same text twice: of a batch the last n_causal rows are causal
    x_t = ids(text)[None].expand(2, L)

    # a masked row has its share of masks as its clock, a causal row has 0
    share_masked = (x_t[0] == TEXT.mask_id).float().mean()
    clock = torch.tensor([share_masked, 0.])
    z, t_latent = nothing(2)
    logits, _ = model(x_t, z, clock, t_latent, n_causal=1)
    return logits.softmax(2)


@torch.no_grad()
def main(steps=200):
    model = small_model()
    with torch.enable_grad():
        # cond_drop=1: the latents are always noise, so it is the text alone that is learned
        train(model, 'l2t+causal', steps, batch_size=128, cond_drop=1.0)

    # over the sentences no network has fewer nats than their entropy
    found = dict(entropy=ENTROPY)
    found['exact'], found['bound'] = nats(model)
    print('nats of a sentence            network   entropy')
    print(f'causal rows, exact           {found["exact"]:8.3f}  {ENTROPY:8.3f}')
    print(f'masked rows, bound           {found["bound"]:8.3f}  {ENTROPY:8.3f}')

    # the gap is at place 1: what comes behind it decides, if it can be seen
    print('\nP(walks) at the gap       masked row  (truth)  causal row  (truth)')
    for text, truth in (('she __ her soup', 0.0), ('she __ her dog', 1.0)):
        p = batch_of_both(model, text)
        masked, causal = p[:, 1, WORDS.index('walks')].tolist()
        found[text] = masked, truth, causal, 0.25              # 0.25 = 0.1 / (0.3 + 0.1)
        print(f'{text:24}{masked:12.3f}  ({truth:.3f}) {causal:11.3f}  (0.250)')

    # does the first half of a text change with its last word?
    one = batch_of_both(model, 'she __ her soup')
    other = batch_of_both(model, 'she __ her dog')
    change = (one - other).abs()[:, :2].amax((1, 2)).tolist()
    found['change'] = change
    print(f'largest change           {change[0]:11.3f}          {change[1]:11.3f}  (0.000)')
    return found


if __name__ == '__main__':
    main()
