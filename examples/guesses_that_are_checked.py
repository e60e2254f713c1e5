"""
Masked rows guess several words at once, causal rows check them: the text is still the decoder's.

A decoder draws one word a call. Words that are unmasked together take fewer calls, but they do not
know of one another. Speculative sampling (arXiv:2211.17192) has both. One call does all of this:

    draw    x^i ~ p(x^i | x^<i)    for the next word, and behind each guess of the last call
    check   a guess stands if it is what was drawn there; then the word behind it counts, too
    guess   g^i = argmax p(x^i | x^<j, MASK)    at MASKs behind what stands     (arXiv:2511.08923)

All that counts was drawn by the decoder. Guesses, good or bad, only decide how many calls it takes.

    python examples/guesses_that_are_checked.py      enumerates all draws, in two seconds. It prints
the calls, how far the law is from the decoder's, and which words of a sentence came in one call.
"""
import torch

from toy import L, MASK, PROBABILITIES, TOKENS, WORDS, BestNetwork


def p_behind(text):
    """ P(x^i | text, and MASK behind it) at each place behind the text: (L - len(text), V). """
    x_t = torch.tensor([text + [MASK] * (L - len(text))])
    logits, _ = BestNetwork()(x_t, None, None, None)                     # (1, L, V)
    return logits[0, len(text):].softmax(1)


def guesses_of_masked_rows(text):
    """ The likeliest word at each MASK, but for the first: that word is drawn in this call. """
    return p_behind(text)[1:].argmax(1).tolist()


GUESSES = {
    'none: a word a call': lambda text: [],
    'of masked rows': guesses_of_masked_rows,
    'always "dog"': lambda text: [WORDS.index('dog')] * L,
}


def one_call(text, guesses, guess_of):
    """ All that a call may write behind `text`: its words, their probability, the next guesses. """
    # the decoder draws: each word that it may draw is followed
    p = p_behind(text)[0]                                                # (V,)
    for x in (p > 1e-9).nonzero().flatten().tolist():
        # the call ends with this word, unless it was guessed: then the next one counts, too
        behind = [([], 1., guess_of(text))]
        if x in guesses[:1] and len(text) + 1 < L:
            behind = one_call(text + [x], guesses[1:], guess_of)
        for words, p_words, next_guesses in behind:
            yield [x, *words], p[x].item() * p_words, next_guesses


def law_of(guess_of):
    """ {text: (probability, words of each call)} of all texts that may come. """
    # from the empty text on, call by call, until all texts are whole
    law = {}
    begun = [([], [], [], 1.)]                             # text, guesses, calls, probability
    while begun:
        text, guesses, calls, p = begun.pop()
        if len(text) == L:
            law[tuple(text)] = p, calls
            continue
        for words, p_words, next_guesses in one_call(text, guesses, guess_of):
            begun.append((text + words, next_guesses, [*calls, words], p * p_words))
    return law


def main():
    found = {}
    print('guesses               calls a text   largest error')
    for name, guess_of in GUESSES.items():
        # over all texts: the mean number of calls, and the largest error of a probability
        law = law_of(guess_of)
        n_calls = sum(p * len(calls) for p, calls in law.values())
        errors = []
        for x, truth in zip(TOKENS.tolist(), PROBABILITIES):
            p, _ = law[tuple(x)]
            errors.append(abs(p - truth))
        found[name] = n_calls, max(errors)
        print(f'{name:20} {n_calls:14.2f} {max(errors):14.3f}')

    print('\nwords that came in one call, by guesses of masked rows:')
    for _, calls in law_of(guesses_of_masked_rows).values():
        print('    ', [' '.join(WORDS[x] for x in words) for words in calls])
    return found


if __name__ == '__main__':
    main()
