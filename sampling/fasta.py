""" Proteins on their way out: the residues that a sampler may write, and FASTA files. """
import re

import torch

from runs.files import write_text

N_STANDARD = 20                # of the tokenizer's residues: the first ones, ESM orders them so
LINE = 60                      # residues in a line of a FASTA file


def never_written(tokenizer, has_length):
    """ Ids (n,) that no sampler writes: the residues of a protein but the 20 standard ones, and EOS
    and PAD where the length of a text is given. """
    ids = []
    if tokenizer.kind == 'esm':
        from corpora.tokenizers import RESIDUES
        ids += range(N_STANDARD, len(RESIDUES))
    if has_length:
        ids += [tokenizer.eos, tokenizer.pad]
    return torch.tensor(ids, dtype=torch.int64)


def write_fasta(path, sequences):
    """ A file of sequences, named sample_1, sample_2, ... """
    lines = []
    for i, residues in enumerate(sequences, 1):
        lines.append(f'>sample_{i} length={len(residues)}')
        lines += re.findall(f'.{{1,{LINE}}}', residues) or ['']
    write_text(path, '\n'.join([*lines, '']))
