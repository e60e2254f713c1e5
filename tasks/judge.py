"""
A judge of pictures: a small convolutional network, trained on the real training pictures. It says
what a picture shows, and its features tell real pictures from others.

    judge = train_judge(run, train, captions, seed)
    name, of_set, words = judge.of(pictures)   # (n,), (n,), and (n, W) bool: the likeliest
                                               # name, set, and N_SEEN words
    judge.features(pictures)                   # (n, 1, FEATURES)

A caption is "heart", "a heart" or "tabler: heart": it may begin with the set of its picture. Names
are told apart without their words of style (corpora.icons.thing_of).
Letters: n pictures, S pixels a side, C channels.
"""
import re
from collections import Counter, defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F

from base.console import progress_bar
from corpora.icons import thing_of
from corpora.images import images_of, pixels
from corpora.words import words

MANY = 40                      # sets, or captions where none names a set, of a name that is a class
MANY_WORDS = 100               # captions of a word or a set that is one
N_SEEN = 5                     # words that a judge sees in a picture, or half of all, if fewer
FEATURES = 256
STEPS = 4000                   # of training
BATCH = 64
LARGEST_SHIFT = 2              # pixels by which training pictures are moved


def parse(caption):
    """ ('tabler', ('clipboard', 'heart')) of 'tabler: clipboard heart'; '' where no set is named,
    which is one word with a colon. An article goes. """
    of_set, name = re.fullmatch(r'(?:(\S+): )?(.*)', caption, re.DOTALL).groups('')
    said = tuple(words(name))
    if len(said) > 1 and said[0] in ('a', 'an'):
        said = said[1:]
    return of_set, said


class Classes:
    """ What the judge learns to tell apart, of the captions of the training pictures. """

    def __init__(self, captions):
        sets_of, n_names, n_words, n_sets = defaultdict(set), Counter(), Counter(), Counter()
        for of_set, said in map(parse, captions):
            sets_of[thing_of(said)].add(of_set)
            n_names[thing_of(said)] += 1
            n_words.update(set(said))
            n_sets[of_set] += 1
        # {what: the number of its class}
        n_sets.pop('', None)                                 # captions without a set
        self.sets = numbered(name for name, n in n_sets.items() if n >= MANY_WORDS)
        self.words = numbered(word for word, n in n_words.items() if n >= MANY_WORDS)
        if self.sets:
            n_names = {name: len(sets - {''}) for name, sets in sets_of.items()}
        n_names.pop((), None)                                # captions without a word
        self.names = numbered(name for name, n in n_names.items() if n >= MANY)

    def of(self, captions):
        """ name (n,) and set (n,), -1 where it is none of the classes; words (n, W) bool. """
        parsed = [parse(caption) for caption in captions]
        name = torch.tensor([self.names.get(thing_of(said), -1) for _, said in parsed])
        of_set = torch.tensor([self.sets.get(of_set, -1) for of_set, _ in parsed])
        has_word = torch.zeros(len(parsed), len(self.words), dtype=torch.bool)
        for i, (_, said) in enumerate(parsed):
            has_word[i, [self.words[word] for word in said if word in self.words]] = True
        return name, of_set, has_word


def numbered(found):
    return {one: i for i, one in enumerate(sorted(found))}


def as_input(pictures):
    """ (n, S, S, C) uint8 -> (n, C, S, S) in [-1, 1]. """
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def conv(before, after, size, stride=1):
    return (nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False),
            nn.BatchNorm2d(after), nn.ReLU())


class Judge(nn.Module):

    def __init__(self, channels, classes):
        super().__init__()
        self.classes = classes
        self.trunk = nn.Sequential(
            *conv(channels, 32, 5, stride=2),
            *conv(32, 64, 3), nn.MaxPool2d(2, ceil_mode=True),
            *conv(64, 128, 3), nn.AdaptiveMaxPool2d(4),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(16 * 128, FEATURES), nn.ReLU())
        self.dropout = nn.Dropout(0.3)
        self.sizes = [len(classes.names), len(classes.words), len(classes.sets)]
        self.head = nn.Linear(FEATURES, sum(self.sizes))

    def forward(self, x):
        return self.head(self.dropout(self.trunk(x))).split(self.sizes, dim=1)

    @torch.no_grad()
    def in_parts(self, function, pictures):
        """ What a function of the network says of pictures (n, S, S, C) uint8, part by part. """
        device = self.head.weight.device
        return [function(as_input(pictures[i:i + 512]).to(device))
                for i in range(0, len(pictures), 512)]

    def features(self, pictures):
        """ (n, 1, FEATURES) of pictures, on the host. """
        return torch.cat(self.in_parts(self.trunk, pictures)).cpu()[:, None]

    def of(self, pictures):
        """ The likeliest name (n,) and set (n,), and the likeliest words (n, W) bool. """
        parts = zip(*self.in_parts(self, pictures))
        name, has_word, of_set = (torch.cat(some).cpu() for some in parts)
        n_seen = min(N_SEEN, (has_word.shape[1] + 1) // 2)
        best = has_word.topk(n_seen, dim=1).indices
        seen = torch.zeros_like(has_word, dtype=torch.bool).scatter(1, best, True)
        return likeliest(name), likeliest(of_set), seen


def likeliest(logits):
    """ The class (n,) of logits (n, classes); -2, which none is, where there are no classes. """
    if not logits.shape[1]:
        return torch.full((len(logits),), -2)
    return logits.argmax(1)


def loss_of(said, name, has_word, of_set):
    """ The loss of what the judge says of B pictures, a mean over them: in nats of the name and of
    the set, where they are classes, and of each word whether the name has it. """
    of_name, of_words, of_sets = said
    loss = F.binary_cross_entropy_with_logits(of_words, has_word.float(), reduction='sum')
    for logits, right in ((of_name, name), (of_sets, of_set)):
        if logits.shape[1]:
            loss = loss + F.cross_entropy(logits, right, ignore_index=-1, reduction='sum')
    return loss / len(of_words)


def train_judge(run, train, captions, seed):
    """ A Judge that has learned from the pictures of a split, which have these captions. ValueError
    where these have hardly a word in common. """
    classes = Classes(captions)
    if not classes.words:
        raise ValueError(f'{train.folder}: no word is in the captions of {MANY_WORDS} training '
                         'pictures, too few to learn what pictures show: leave image out of '
                         '--tasks')
    name, of_set, has_word = classes.of(captions)
    device = run.net.device

    # half of each batch has a name that is a class, if there are such
    some = torch.arange(len(train))
    of_class = some[name >= 0]
    if not len(of_class):
        of_class = some

    # the caller's generators stay as they are
    cards = [device] if device.type == 'cuda' else []
    with torch.random.fork_rng(cards):
        torch.manual_seed(seed)
        judge = Judge(images_of(run)['channels'], classes).to(device)
        optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in progress_bar(range(STEPS), desc='training the judge'):
            rows = torch.cat([one[torch.randint(len(one), (BATCH // 2,))]
                              for one in (of_class, some)])
            x = as_input(pixels(run, train.raw_latents(rows.numpy())))
            dx, dy = torch.randint(-LARGEST_SHIFT, LARGEST_SHIFT + 1, (2,)).tolist()
            x = torch.roll(x, (dy, dx), (2, 3))
            right = [some[rows].to(device) for some in (name, has_word, of_set)]
            loss_of(judge(x.to(device)), *right).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return judge.eval().requires_grad_(False)
